"""The tables of docs/migration.md: the code of every row runs and gives what a reference that shares no code gives.

With PyTorch and JAX (GPU tier) the left columns of their tables also run, and return the same.
"""

import re
from pathlib import Path

import numpy as np
import pytest

import cupy_sdpa
from cupy_sdpa import nnlib, reference

PAGE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text(encoding="utf-8")
B, HQ, HKV, SQ, SKV, D = 2, 4, 2, 5, 7, 8
RNG = np.random.default_rng(0)
#: The arrays in the order (B, H, S, D), and the options in the order (B, Hq, Sq, Skv).
Q, K, V = (RNG.standard_normal(shape) for shape in ((B, HQ, SQ, D), (B, HKV, SKV, D), (B, HKV, SKV, D)))
DOUT = RNG.standard_normal(Q.shape)
MASK, SQUARE, BIAS = RNG.random((B, 1, SQ, SKV)) < 0.7, RNG.random((SQ, SKV)) < 0.7, RNG.standard_normal((B, HQ, SQ, SKV))
LENGTHS_Q, LENGTHS = np.array([4, 5], np.int32), np.array([6, 7], np.int32)
KEEP = np.arange(SKV) < LENGTHS[:, None]
TABLE, SLOPES, SINKS = RNG.standard_normal((HQ, SQ, SKV)), cupy_sdpa.alibi_slopes(HQ), np.array([0.5, -1, 2, 0], np.float32)
PAGES, PAGE_TABLE = RNG.standard_normal((2, 5, 4, HKV, D)), np.array([[3, 0], [1, 4]], np.int32)
STARTS_Q, STARTS_K = np.array([0, 2, 5], np.int32), np.array([0, 3, 7], np.int32)
#: Transformer Engine's packed sequences with gaps: sums of the lengths, and of the lengths with the gaps.
REAL_Q, REAL, PADDED_Q, PADDED = (np.array(x, np.int32) for x in ([0, 1, 3], [0, 2, 5], [0, 2, 5], [0, 3, 7]))

QUERY, KEY = np.arange(SQ)[:, None], np.arange(SKV)
DIAGONAL = QUERY + SKV - SQ  # of the bottom right


def relative(s, b, h, i, j):
    """A score function."""
    return s + 0.1 * (i - j)


def striped(b, h, i, j):
    """A mask function."""
    return (i + j) % 3 != 0


def want(q=Q, k=K, v=V, allowed=True, bias=0.0, tau=D**-0.5, **others):
    """The reference, for arrays (B, H, S, D)."""
    mask, bias = (np.broadcast_to(x, (*q.shape[:3], k.shape[2])).T for x in (allowed, bias))
    out, rows = reference.attention(*(x.transpose(3, 1, 2, 0) for x in (q, k, v)), mask=mask, bias=bias, scale=tau, **others)
    return out.transpose(3, 1, 2, 0), rows.T


def paged():
    """The keys and values of the pages, (B, Hkv, Skv, D), and which of them are used."""
    k, v = (pool[PAGE_TABLE].reshape(B, 8, HKV, D).transpose(0, 2, 1, 3) for pool in PAGES)
    return want(k=k, v=v, allowed=(np.arange(8) < LENGTHS[:, None])[:, None, None])


def varlen():
    """The packed sequences one after the other, (1, H, T, D)."""
    found = []
    for n in range(2):
        rows, keys = slice(*STARTS_Q[n : n + 2]), slice(*STARTS_K[n : n + 2])
        q, k, v = Q[:1, :, rows], K[:1, :, keys], V[:1, :, keys]
        sq, skv = q.shape[2], k.shape[2]
        found.append(want(q, k, v, np.arange(skv) <= np.arange(sq)[:, None] + skv - sq)[0])
    return np.concatenate(found, axis=2), None


def with_gaps():
    """Packed sequences with gaps between them, where the result is NaN: unknown, (1, H, T, D)."""
    found = np.full((1, HQ, SQ, D), np.nan)
    for n in range(2):
        rows, keys = (slice(s[n], s[n] + sums[n + 1] - sums[n]) for s, sums in ((PADDED_Q, REAL_Q), (PADDED, REAL)))
        found[:, :, rows] = want(Q[:1, :, rows], K[:1, :, keys], V[:1, :, keys])[0]
    return found, None


def single(**options):
    """The first batch item alone."""
    return want(Q[:1], K[:1], V[:1], **options)[0], None


def varlen_paged():
    """The queries of packed sequences on the keys of pages, causal."""
    k, v = (pool[PAGE_TABLE].reshape(B, 8, HKV, D).transpose(0, 2, 1, 3) for pool in PAGES)
    found = []
    for n in range(B):
        q, skv = Q[:1, :, slice(*STARTS_Q[n : n + 2])], LENGTHS[n]
        sq = q.shape[2]
        found.append(
            want(q, k[n : n + 1, :, :skv], v[n : n + 1, :, :skv], np.arange(skv) <= np.arange(sq)[:, None] + skv - sq)[0]
        )
    return np.concatenate(found, axis=2), None


def one_paged():
    """The first query of each sequence on the keys of pages."""
    out, stats = paged()
    return out[:, :, :1], stats


def turned():
    """The rotation of the packed queries by complex numbers, in the half form."""
    angles = np.multiply.outer([3, 4, 10, 11, 12], 1e4 ** -(np.arange(D // 2) / (D // 2)))
    found = (Q[:1, :, :, : D // 2] + 1j * Q[:1, :, :, D // 2 :]) * np.exp(1j * angles)
    return np.concatenate([found.real, found.imag], axis=-1), None


def features(x):
    """NNlib.jl's features (D H, S, B) as (B, H, S, D)."""
    return x.reshape(2, 4, 6, 3, order="F").transpose(3, 1, 2, 0)


X, X_BIAS = np.asfortranarray(RNG.standard_normal((8, 6, 3))), RNG.standard_normal((6, 6))
WEIGHT = RNG.standard_normal((8, 8))


def of_features(x=X, **options):
    """The reference for NNlib.jl's arrays."""
    return want(*[features(x)] * 3, tau=2**-0.5, **options)


BOTTOM, IN = KEY <= DIAGONAL, KEEP[:, None, None]
ROWS = (np.arange(SQ) < LENGTHS_Q[:, None])[:, None, :, None]
#: What each row computes, in the order of the rows; None for dropout, which is random.
EXPECTED = {
    "PyTorch: scaled_dot_product_attention": [
        want(), want(allowed=KEY <= QUERY), want(allowed=BOTTOM), want(allowed=MASK), want(allowed=SQUARE), want(bias=BIAS),
        want(allowed=IN),
        want(tau=0.3), None, want(),
    ],
    "FlexAttention": [
        want(), want(bias=0.1 * (QUERY - KEY)), want(bias=TABLE), want(allowed=(QUERY + KEY) % 3 != 0),
        want(allowed=(QUERY + KEY) % 3 != 0), want(tau=0.3),
        want(),
    ],
    "flash-attn": [
        want(), want(allowed=BOTTOM), want(tau=0.3), want(allowed=(DIAGONAL - 2 <= KEY) & (KEY <= DIAGONAL + 1)),
        want(allowed=DIAGONAL - 2 <= KEY), want(allowed=BOTTOM & (DIAGONAL - 2 <= KEY)), want(softcap=2.0),
        want(allowed=BOTTOM, bias=-SLOPES[:, None, None] * np.abs(DIAGONAL - KEY)), None, want(), want(),
        want(Q, np.concatenate([Q] * 1, 1), Q), varlen(),
        want(allowed=IN & (np.arange(SQ)[:, None] + LENGTHS[:, None, None, None] - SQ >= KEY)), paged(),
    ],
    "JAX: jax.nn.dot_product_attention": [
        want(), want(bias=BIAS), want(allowed=MASK), want(tau=0.3), want(allowed=KEY <= QUERY), want(allowed=ROWS & IN),
        want(allowed=(QUERY - 2 <= KEY) & (KEY <= QUERY + 1)), want(allowed=np.abs(QUERY - KEY) <= 2),
        want(allowed=(QUERY - 2 <= KEY) & (KEY <= QUERY)), want(), want(),
    ],
    "Transformer Engine: DotProductAttention": [
        want(), want(allowed=KEY <= QUERY), want(allowed=BOTTOM), want(allowed=ROWS & IN), want(allowed=ROWS & IN & (KEY <= QUERY)),
        want(allowed=ROWS & IN & (QUERY + (LENGTHS - LENGTHS_Q)[:, None, None, None] >= KEY)), want(allowed=~MASK),
        want(allowed=(DIAGONAL - 2 <= KEY) & (KEY <= DIAGONAL + 1)), want(allowed=(QUERY - 2 <= KEY) & (KEY <= QUERY)),
        want(tau=0.3), want(bias=BIAS), want(tau=0.3, bias=0.3 * BIAS),
        want(allowed=KEY <= QUERY, bias=-SLOPES[:, None, None] * np.abs(QUERY - KEY)), want(sinks=SINKS),
        want(sinks=np.zeros(HQ)), None, want(Q, Q, Q), varlen(), with_gaps(),
    ],
    "FlashInfer and vLLM": [
        varlen_paged(), varlen_paged(), one_paged(), single(allowed=BOTTOM), single(allowed=BOTTOM), varlen_paged(), turned(),
    ],
    "cudnn-frontend": [
        want(tau=1.0), want(tau=0.3), want(tau=0.3), want(tau=0.3, allowed=KEY <= QUERY), want(tau=0.3, allowed=BOTTOM),
        want(tau=0.3, allowed=(QUERY - 2 <= KEY) & (KEY <= QUERY)), want(tau=0.3, allowed=KEY <= QUERY + 1),
        want(tau=0.3, bias=BIAS),
        want(tau=0.3, allowed=ROWS & IN), want(tau=0.3, allowed=KEY <= QUERY,
        bias=-SLOPES[:, None, None] * np.abs(QUERY - KEY)), None,
        want(tau=0.3, sinks=SINKS), want(tau=0.3), want(),
    ],
    "NNlib.jl": [
        of_features(), of_features(allowed=np.tri(6, dtype=bool)), of_features(bias=X_BIAS.T), of_features(), of_features(),
        of_features(np.einsum("ni,isb->nsb", WEIGHT, X)),
    ],
    "CUDA.jl (cuDNN.jl)": [
        want(), want(tau=0.3, allowed=KEY <= QUERY), want(), want(), want(allowed=ROWS & IN), *[want()] * 4,
    ],
}  # fmt: skip
#: The axes of q in each table.
LETTERS = dict.fromkeys(EXPECTED, "bhsd")
LETTERS |= {name: "bshd" for name in EXPECTED if name.startswith(("flash", "Flash", "JAX", "Transformer"))}
LETTERS |= {name: "dhsb" for name in EXPECTED if ".jl" in name}


def rows_of(section):
    """The cells of a table: the code on the left and on the right."""
    text = re.search(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", PAGE, re.S | re.M).group(1)
    return re.findall(r"^\| `(.+)` \| `(.+)` \|$", text, re.M)


ROWS_OF_TABLES = [(name, n) for name in EXPECTED for n in range(len(rows_of(name)))]


def names_of(section):
    """The names that the code of a table may use."""
    letters = LETTERS[section]

    def turned(x):
        return np.einsum(f"bhsd->{letters}", x).copy(order="F" if letters == "dhsb" else "C")

    q, k, v, dout = map(turned, (Q, K, V, DOUT))
    out, rows = want(tau=0.3 if section == "cudnn-frontend" else D**-0.5)
    stats = np.asfortranarray(rows.T) if letters == "dhsb" else rows
    packed = {f"{name}t": x[0].transpose(1, 0, 2) for name, x in (("q", Q), ("k", K), ("v", V))}
    square = np.stack([Q.transpose(0, 2, 1, 3)] * 3, axis=2)
    every = {
        "q": q, "k": k, "v": v, "dout": dout, "o": turned(out), "out": np.full_like(turned(out), np.nan), "stats": stats,
        "mask": MASK, "square": SQUARE, "bias": X_BIAS if "NNlib" in section else BIAS, "keep": KEEP, "lengths": LENGTHS,
        "lengths_q": LENGTHS_Q, "relative": relative, "striped": striped, "table": TABLE, "slopes": SLOPES, "sinks": SINKS,
        "k_pages": PAGES[0], "v_pages": PAGES[1], "starts_q": STARTS_Q, "starts_k": STARTS_K, "qkv": square, "x": X, "W": WEIGHT,
        "seed": 3, "offset": 8, **packed,
        "ends_q": np.array([0, *LENGTHS_Q.cumsum()], np.int32), "ends": np.array([0, *LENGTHS.cumsum()], np.int32), "masked": MASK, "np": np,
        "real_q": REAL_Q, "real": REAL, "padded_q": PADDED_Q, "padded": PADDED,
        "cupy_sdpa": cupy_sdpa, "nnlib": nnlib, "attention": cupy_sdpa.attention, "attention_vjp": cupy_sdpa.attention_vjp,
        "attention_backward": cupy_sdpa.attention_backward,
    }  # fmt: skip
    if section == "FlashInfer and vLLM":
        every |= {
            "q": packed["qt"], "one": Q[:, :, 0], "kv": PAGES.transpose(1, 0, 2, 3, 4).copy(), "qo": STARTS_Q,
            "indptr": np.int32([0, 2, 4]), "indices": PAGE_TABLE.ravel(), "last": LENGTHS - 4, "block_table": PAGE_TABLE,
            "offsets": np.int32([3, 10]), "hnd": PAGES.transpose(1, 0, 3, 2, 4).copy(),
            "q1": q[0], "k1": k[0], "v1": v[0], "k1_hnd": K[0], "v1_hnd": V[0],
        }  # fmt: skip
    return every | ({"table": PAGE_TABLE} if section == "flash-attn" else {})


def run(code, names):
    """Run the code of a cell; an expression is the output. Returns the names that it assigns."""
    names = dict(names)
    try:
        names["out"] = eval(compile(code, "migration", "eval"), names)
    except SyntaxError:
        exec(compile(code, "migration", "exec"), names)
    return names


def in_one_order(x, section):
    """An output as (B, H, S, D)."""
    if section == "NNlib.jl":
        return features(x)
    return np.einsum(f"{LETTERS[section]}->bhsd", x) if x.ndim == 4 else x.transpose(1, 0, 2)[None]


@pytest.mark.parametrize(("section", "number"), ROWS_OF_TABLES)
def test_a_row(section, number):
    """The output, and what else the row assigns: the log-sum-exp and the gradients."""
    _, code = rows_of(section)[number]
    expected, names = EXPECTED[section][number], names_of(section)
    found = run(code, names)
    if expected is None:
        again, other = run(code, names), run(code.replace("seed=seed", "seed=5").replace("seed=0", "seed=5"), names)
        np.testing.assert_array_equal(found["out"], again["out"])
        assert not np.array_equal(found["out"], other["out"])
        return
    output, rows = expected
    if "dq" not in found or "pullback" in found:
        known = ~np.isnan(output)
        np.testing.assert_allclose(in_one_order(found["out"], section)[known], output[known], atol=1e-12)
    if "lse" in found:
        lse = found["lse"]
        np.testing.assert_allclose(lse.T if LETTERS[section] == "dhsb" else lse, rows, atol=1e-6)
    if "alpha" in found:
        np.testing.assert_allclose(found["alpha"].sum(axis=0), 1.0)
    if "dq" in found:
        tau = 0.3 if "0.3" in code else D**-0.5
        steps = [RNG.standard_normal(x.shape) for x in (Q, K, V)]
        plus, minus = (
            (want(*(x + t * dx for x, dx in zip((Q, K, V), steps, strict=True)), tau=tau)[0] * DOUT).sum()
            for t in (1e-5, -1e-5)
        )
        gradients = [in_one_order(found[name], section) for name in ("dq", "dk", "dv")]
        slope = sum((g * dx).sum() for g, dx in zip(gradients, steps, strict=True))
        np.testing.assert_allclose(slope, (plus - minus) / 2e-5, rtol=1e-5)
    if "gradients" in found:
        assert [g is None or g.shape == X.shape for g in found["gradients"]] == [True] * 4


def test_every_row_is_tested():
    """As many rows as expectations, and no code cell outside of the tables that are tested."""
    for section, expected in EXPECTED.items():
        assert len(rows_of(section)) == len(expected), section
    assert sum(map(len, EXPECTED.values())) == len(re.findall(r"^\| `(?!\")[^|]*\(.*$", PAGE, re.M))


def test_the_layouts_of_the_first_table():
    """Each row names a layout and the axes of q with it."""
    rows = re.findall(r'^\| .+ \| (?:`"(\w+)"`|none) \| \(([^)]*)\) \|', PAGE, re.M)
    assert len(rows) == 5
    for letters, axes in rows:
        short = "".join(axis.strip()[0].lower() for axis in axes.split(","))
        assert short == (letters or "dhsb")


def test_the_reference_bites():
    """A wrong diagonal, scale or axis order fails."""
    names = names_of("PyTorch: scaled_dot_product_attention")
    right = want(allowed=KEY <= QUERY)[0]
    for code in (
        'attention(q, k, v, layout="bhsd", causal="bottom_right")',
        'attention(q, k, v, layout="bhsd", causal=True, scale=0.3)',
        'attention(q, k, v, layout="bhsd", causal=True, window=(3, 0))',
    ):
        assert np.abs(run(code, names)["out"] - right).max() > 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(len(rows_of("PyTorch: scaled_dot_product_attention"))))
def test_pytorch_gives_the_same(number):
    """The left column, on tensors in float64 on the CPU."""
    torch = pytest.importorskip("torch")
    from torch.nn.attention.bias import causal_lower_right

    section = "PyTorch: scaled_dot_product_attention"
    code, _ = rows_of(section)[number]
    expected = EXPECTED[section][number]
    names = {name: torch.from_numpy(x.copy()) for name, x in names_of(section).items() if isinstance(x, np.ndarray)}
    names |= {"torch": torch, "F": torch.nn.functional, "causal_lower_right": causal_lower_right}
    for name in "qkv":
        names[name].requires_grad_("grad" in code)
    found = run(code, names)
    if expected is not None:
        np.testing.assert_allclose(found["out"].detach().numpy(), expected[0], atol=1e-10)


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(len(rows_of("JAX: jax.nn.dot_product_attention"))))
def test_jax_gives_the_same(number):
    """The left column, on arrays in float32; its residual is the one that the right column gives."""
    jax = pytest.importorskip("jax")
    section = "JAX: jax.nn.dot_product_attention"
    left, right = rows_of(section)[number]
    arrays = {name: x for name, x in names_of(section).items() if isinstance(x, np.ndarray)}
    names = {name: jax.numpy.asarray(x, np.float32 if x.dtype == np.float64 else None) for name, x in arrays.items()}
    with jax.default_matmul_precision("highest"):
        found = run(left, names | {"jax": jax})
    np.testing.assert_allclose(in_one_order(np.asarray(found["out"]), section), EXPECTED[section][number][0], atol=1e-5)
    ours = run(right, names_of(section))
    for name in {"residual", "dq", "dk", "dv"} & set(ours):
        np.testing.assert_allclose(np.asarray(found[name]), ours[name], atol=1e-5)
