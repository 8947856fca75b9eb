"""``layout=``: every call gives the results of a plain float64 reference in the caller's axes, and copies nothing."""

import functools

import numpy as np
import pytest
from plain import softmax_attention

import cupy_sdpa
from cupy_sdpa import attention, attention_backward, attention_jvp, attention_vjp, explain, layout, prepare, problem
from cupy_sdpa.arrays.layouts import LAYOUTS
from cupy_sdpa.parallel import Loopback, context_parallel, run_threads

DENSE = ["bshd", "bhsd", "sbhd"]


def random_arrays(rng, letters):
    """Random sizes, small ones often, and q, k, v and dout in a layout, with NaN between the elements that are read."""
    pick = functools.partial(rng.choice, p=[0.1, 0.3, 0.2, 0.4])
    b, sq, skv = (int(pick([0, 1, 2, 5])) for _ in range(3))
    hkv, group, d, dv = int(rng.integers(1, 3)), int(rng.integers(1, 3)), int(rng.integers(1, 9)), int(rng.integers(1, 9))
    sizes = [(sq, hkv * group, d), (skv, hkv, d), (skv, hkv, dv), (sq, hkv * group, dv)]
    return [padded(rng, tuple({"b": b, "s": s, "h": h, "d": e}[x] for x in letters)) for s, h, e in sizes]


def padded(rng, shape):
    """A random array that is a slice of a larger one of NaN."""
    whole = np.full(tuple(n + 2 for n in shape), np.nan)
    part = whole[tuple(slice(1, n + 1) for n in shape)]
    part[...] = rng.standard_normal(shape)
    return part


def to(array, letters, target):
    """Permute axes from some letters to others, by their names."""
    return np.einsum(f"{letters}->{target}", array)


@pytest.mark.parametrize("letters", DENSE)
@pytest.mark.parametrize("seed", range(12))
def test_random_problems(letters, seed):
    """Output, log-sum-exp and gradients of random problems with masks, biases and lengths in the order (B, Hq, Sq, Skv)."""
    rng = np.random.default_rng(seed)
    arrays = random_arrays(rng, letters)
    q, k, v, dout = (to(x, letters, "bhsd") for x in arrays)
    (b, hq, sq, d), skv = q.shape, k.shape[2]
    allowed, bias, options = np.ones((b, hq, sq, skv), bool), np.zeros((b, hq, sq, skv)), {}
    if rng.random() < 0.5:
        axes = int(rng.integers(0, 5))  # the missing ones are the first, as numpy broadcasts
        shape = tuple(n if rng.random() < 0.6 else 1 for n in allowed.shape)[4 - axes :]
        options["mask"] = rng.random(shape) < 0.7
        allowed = allowed & options["mask"]
    if rng.random() < 0.5:
        axes = int(rng.integers(0, 5))
        options["bias"] = rng.standard_normal(tuple(n if rng.random() < 0.6 else 1 for n in bias.shape)[4 - axes :])
        bias = bias + options["bias"]
    if rng.random() < 0.5:
        options["causal"] = True
        allowed = allowed & (np.arange(skv) <= np.arange(sq)[:, None])
    if rng.random() < 0.5:
        options["seq_lens_q"] = rng.integers(0, sq + 1, b).astype(np.int32)
        options["seq_lens_kv"] = rng.integers(0, skv + 1, b).astype(np.int32)
        in_q = np.arange(sq) < options["seq_lens_q"][:, None]
        in_kv = np.arange(skv) < options["seq_lens_kv"][:, None]
        allowed = allowed & in_q[:, None, :, None] & in_kv[:, None, None, :]
        for x, inside in zip(arrays, (in_q, in_kv, in_kv, in_q), strict=True):
            to(x, letters, "bshd")[~inside] = np.nan
        q, k, v, dout = (np.nan_to_num(to(x, letters, "bhsd")) for x in arrays)
    want, rows = softmax_attention(q, k, v, allowed, bias, d**-0.5)
    for _ in range(3):
        out = padded(rng, to(want, "bhsd", letters).shape)
        out[...] = np.nan
        stats = np.full((b, hq, sq), np.nan)
        got = attention(*arrays[:3], layout=letters, out=out, stats=stats, **options)
        assert got[0] is out
        assert got[1] is stats
        np.testing.assert_allclose(to(out, letters, "bhsd"), want, atol=1e-12)
        np.testing.assert_allclose(stats, rows, atol=1e-12)
        arrays[2] *= -1  # in place
        want = -want
    arrays[2] *= -1
    out, stats = attention(*arrays[:3], layout=letters, stats=stats, **options)
    extra = {"return_dbias": True} if "bias" in options else {}
    gradients = attention_backward(arrays[3], *arrays[:3], out, stats, layout=letters, **options, **extra)
    for gradient, x in zip(gradients, (*arrays[:3], options.get("bias")), strict=False):
        assert gradient.shape == x.shape

    def loss(q, k, v, bias):
        return (softmax_attention(q, k, v, allowed, bias, d**-0.5)[0] * dout).sum()

    directions = [rng.standard_normal(x.shape) for x in (q, k, v, options.get("bias", np.zeros(())))]
    step = 1e-5 * np.array([[1], [-1]])
    plus, minus = (loss(*(x + float(t) * dx for x, dx in zip((q, k, v, bias), directions, strict=True))) for t in step.ravel())
    slope = sum((np.nan_to_num(to(g, letters, "bhsd")) * dx).sum() for g, dx in zip(gradients[:3], directions[:3], strict=True))
    if extra:
        slope += (gradients[3] * directions[3]).sum()
    else:
        plus, minus = (
            loss(*(x + float(t) * dx for x, dx in zip((q, k, v), directions[:3], strict=True)), bias) for t in step.ravel()
        )
    np.testing.assert_allclose(slope, (plus - minus) / 2e-5, atol=1e-6)


def test_the_reference_notices_swapped_axes():
    """Heads and positions exchanged, or a transposed mask, change the result."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 3, 3, 4)) for _ in range(3))
    mask = np.tri(3, dtype=bool)[None, None]
    every, none = np.ones((1, 3, 3, 3), bool), np.zeros((1, 3, 3, 3))
    want, _ = softmax_attention(q, k, v, every & mask, none, 0.5)
    assert np.abs(attention(q, k, v, layout="bhsd", mask=mask) - want).max() < 1e-12
    assert np.abs(attention(q, k, v, layout="bshd", mask=mask) - want).max() > 0.1
    assert np.abs(attention(q, k, v, layout="bhsd", mask=mask.transpose(0, 1, 3, 2)) - want).max() > 0.1


@pytest.mark.parametrize("letters", ["bshd", "bhsd", "sbhd", "dhsb"])
def test_every_call_takes_a_layout(letters):
    """Each public function returns what it returns for permuted views, in the caller's axes; results share one memory order."""
    rng = np.random.default_rng(0)
    q, k, v, dout = own = [np.asfortranarray(rng.standard_normal((4, 2, 5, 2))) for _ in range(4)]
    theirs = [layout.from_julia(x, letters) for x in own]
    mask = cupy_sdpa.block_mask(lambda b, h, i, j: i >= j, 5, 5)

    def same(found, wanted):
        for x, y in zip(found, wanted, strict=True):
            x = x.T if letters != "dhsb" and x.ndim == 3 else layout.to_julia(x, letters) if x.ndim == 4 else x
            np.testing.assert_array_equal(x, y)
            assert x.strides == y.strides

    for options in ({"causal": True}, {"block_mask": mask}, {"mask_mod": lambda b, h, i, j: i >= j}):
        flags = {"return_stats": True, **options}
        same(attention(*theirs[:3], layout=letters, **flags), results := attention(q, k, v, **flags))
        given = [theirs[3], *theirs[:3], layout.from_julia(results[0], letters)]
        rows = results[1] if letters == "dhsb" else results[1].T
        same(
            attention_backward(*given, rows, layout=letters, **options), attention_backward(dout, q, k, v, *results, **options)
        )
        out, pullback = attention_vjp(*theirs[:3], layout=letters, **options)
        want, own_pullback = attention_vjp(q, k, v, **options)
        same((out, *pullback(theirs[3])), (want, *own_pullback(dout)))
        assert pullback.nbytes == own_pullback.nbytes
        assert explain(*theirs[:3], layout=letters, **options).problem == explain(q, k, v, **options).problem
    same(attention_jvp(*theirs[:3], theirs[3], layout=letters), attention_jvp(q, k, v, dout))
    wide = cupy_sdpa.widen(*theirs[:3], theirs[3], layout=letters)
    same(attention_jvp(*theirs[:3], widened=wide, layout=letters), attention_jvp(q, k, v, dout))
    call = prepare(*theirs[:3], layout=letters, causal=True)
    same([call(*theirs[:3])], [attention(q, k, v, causal=True)])
    backward = prepare(*theirs[:3], layout=letters, backward=True)
    out, stats = attention(*theirs[:3], layout=letters, return_stats=True)
    same(backward(theirs[3], *theirs[:3], out, stats), attention_vjp(q, k, v)[1](dout))
    shapes = [x.shape for x in theirs[:3]]
    assert problem(*shapes, dtype="float64", layout=letters) == problem(q.shape, k.shape, v.shape, dtype="float64")
    jvp = cupy_sdpa.jvp_problems(*shapes, dtype="float64", layout=letters)
    assert jvp == cupy_sdpa.jvp_problems(q.shape, k.shape, v.shape, dtype="float64")


def test_packed_sequences():
    """``thd``: q (Tq, Hq, D), the log-sum-exp (Tq, Hq), and a bias (B, Hq, Sq, Skv)."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((total, 2, 4)) for total in (7, 9, 9))
    starts = {"cu_seqlens_q": np.array([0, 3, 7], np.int32), "cu_seqlens_kv": np.array([0, 5, 9], np.int32)}
    bias = rng.standard_normal((2, 1, 4, 5))
    packed = {**starts, "max_seqlen_q": 4, "max_seqlen_kv": 5, "bias": bias}
    out, stats = attention(q, k, v, layout="thd", return_stats=True, **packed)
    assert out.shape == (7, 2, 4)
    assert stats.shape == (7, 2)
    for n, (rows, keys) in enumerate([(slice(3), slice(5)), (slice(3, 7), slice(5, 9))]):
        one = [x[part].transpose(1, 0, 2)[None] for x, part in ((q, rows), (k, keys), (v, keys))]
        sq, skv = one[0].shape[2], one[1].shape[2]
        part = np.broadcast_to(bias[n, :, :sq, :skv], (1, 2, sq, skv))
        want, lse = softmax_attention(*one, np.ones(part.shape, bool), part, 0.5)
        np.testing.assert_allclose(out[rows], want[0].transpose(1, 0, 2), atol=1e-12)
        np.testing.assert_allclose(stats[rows], lse[0].T, atol=1e-6)
    gradients = attention_vjp(q, k, v, layout="thd", return_dbias=True, **packed)[1](out)
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape, bias.shape]


@pytest.mark.parametrize("packed", [False, True])
def test_pages(packed):
    """Pools of pages (pages, page size, Hkv, D) and a page table (B, pages per sequence), as in flash-attention."""
    rng = np.random.default_rng(0)
    pools = [rng.standard_normal((6, 4, 2, 8)) for _ in range(2)]
    table, lengths = np.array([[4, 1], [0, 5]], np.int32), np.array([7, 5], np.int32)
    q = rng.standard_normal((2, 3, 2, 8))
    options = {"page_table": table, "seq_lens_kv": lengths}
    if packed:
        found = attention(
            q.reshape(6, 2, 8), *pools, layout="thd", cu_seqlens_q=np.array([0, 3, 6], np.int32), max_seqlen_q=3, **options
        )
        found = found.reshape(q.shape)
    else:
        found = attention(q, *pools, layout="bshd", **options)
    for n in range(2):
        k, v = (x[table[n]].reshape(1, 8, 2, 8).transpose(0, 2, 1, 3)[:, :, : lengths[n]] for x in pools)
        every = np.ones((1, 2, 3, lengths[n]), bool)
        want, _ = softmax_attention(q[n : n + 1].transpose(0, 2, 1, 3), k, v, every, np.zeros(every.shape), 8**-0.5)
        np.testing.assert_allclose(found[n], want[0].transpose(1, 0, 2), atol=1e-12)


def test_a_group_takes_a_layout():
    """Members pass and get their parts in the caller's axes."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((2, 8, 2, 4)) for _ in range(4))
    want, pullback = attention_vjp(q, k, v, layout="bshd", causal=True)
    gradients = pullback(dout)

    def member(group):
        cp = context_parallel(group)
        parts = [cp.shard(x, axis=1) for x in (q, k, v, dout)]
        out, back = cp.attention_vjp(*parts[:3], layout="bshd", causal=True)
        assert cp.explain(*parts[:3], layout="bshd", causal=True).method
        return [cp.unshard(x, axis=1) for x in (out, *back(parts[3]))]

    for found in run_threads(Loopback(2).members, member):
        for x, y in zip(found, (want, *gradients), strict=True):
            np.testing.assert_allclose(x, y, atol=1e-6)


def test_a_forgotten_layout_of_a_group_is_refused():
    """Parts keep the order of the axes in memory; without axis= the order must be that of q."""
    x = np.random.default_rng(0).standard_normal((2, 8, 4, 8))

    def member(group):
        cp = context_parallel(group)
        for call in (cp.shard, cp.unshard):
            for forgotten in (x, x[:1], x.transpose(0, 2, 1, 3).copy()):
                with pytest.raises(ValueError, match=r"in C order: layout='b.*axis=1 for 'bshd'"):
                    call(forgotten)
        part = cp.shard(x, axis=1)
        for batch in (1, 2):
            with pytest.raises(ValueError, match=r"in C order: layout='bshd'"):
                cp.attention(*[part[:batch]] * 3)
        return cp.unshard(cp.attention(part, part, part, layout="bshd"), axis=1)

    for found in run_threads(Loopback(2, timeout=20).members, member):
        assert found.flags.c_contiguous
        np.testing.assert_allclose(found, attention(x, x, x, layout="bshd"), atol=1e-6)


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_parts_are_dense(axis):
    """Whatever the strides of the array are, broadcast and reversed axes too."""
    x = np.random.default_rng(0).standard_normal((4, 6, 8, 2))
    cp = context_parallel(Loopback(2).members[0])
    for y in (x, x.T, x[:, ::-1], x.transpose(2, 0, 3, 1), np.broadcast_to(x[:, :1], x.shape), x[:1], x[::2, :, ::2]):
        if y.shape[axis] % 4 == 0:
            part = cp.shard(y, axis=axis)
            assert part.base.flags.c_contiguous or part.base.flags.f_contiguous
            assert part.base.size == part.size
            positions = cp.position_ids(y.shape[axis])
            np.testing.assert_array_equal(part, np.take(y, positions, axis))
            assert part.flags.c_contiguous or not y.flags.c_contiguous


X = np.ones((2, 5, 3, 8))
WRONG = {
    "unknown": ({"layout": "BSHD"}, "layout is 'BSHD'; it must be one of .*'bshd'"),
    "a number": ({"layout": 4}, "layout is 4; it must be"),
    "packed": ({"layout": "thd"}, r"q has 4 axes \(2, 5, 3, 8\); with layout='thd' it must have 3: \(total, heads, head_dim\)"),
    "mask in our order": ({"layout": "bhsd", "mask": np.ones((3, 3, 5, 2), bool)}, r"pass mask\.T"),
    "mask in the other order": ({"mask": np.ones((2, 1, 5, 5), bool)}, r"pass mask\.T"),
    "mask of two axes": ({"mask": np.ones((1, 5), bool)}, r"pass mask\.T\[\.\.\., None, None\]"),
    "out": (
        {"layout": "bhsd", "out": np.ones((2, 3, 5, 8))},
        r"out has shape \(2, 3, 5, 8\); it must be \(2, 5, 3, 8\), \(B, Hq, Sq, Dv\), .*\[layout='bhsd'\]",
    ),
    "stats": (
        {"layout": "sbhd", "stats": np.ones((2, 5, 8), np.float32)},
        r"stats has shape \(2, 5, 8\); it must be \(5, 3, 2\), \(B, Hq, Sq\) \[",
    ),
    "key padding mask": (
        {"layout": "bhsd", "mask": np.ones((2, 3), bool)},
        r"mask has shape \(2, 3\); it must broadcast to \(2, 5, 3, 3\), \(B, Hq, Sq, Skv\): .*\[:, None, None, :\]",
    ),
    "dropout_mask": (
        {"layout": "bhsd", "dropout_p": 0.5, "dropout_mask": np.ones((2, 5, 3, 1), bool)},
        r"dropout_mask has shape \(2, 5, 3, 1\); it must be \(2, 5, 3, 3\), \(B, Hq, Sq, Skv\)",
    ),
    "page_table": (
        {"layout": "bshd", "page_table": np.zeros((4, 1), np.int32), "seq_lens_kv": np.ones(2, np.int32)},
        r"page_table has shape \(4, 1\); it must be \(B, pages per sequence\) with 2 sequences, as q \(2, 5, 3, 8\)",
    ),
    "packed lengths": (
        {"layout": "bshd", "cu_seqlens_q": np.array([0, 5], np.int32)},
        r"q has 4 dimensions \(2, 5, 3, 8\); it needs 3: \(total, heads, head_dim\), .*layout='thd'",
    ),
}
#: q, k and v that do not match, as shapes, and the message: the axes are the caller's.
PAIRS = {
    "lengths": ("bhsd", (2, 4, 9, 8), (2, 4, 7, 8), (2, 4, 6, 8), r"lengths \(axis 2\) of k and v .* k is \(2, 4, 7, 8\)"),
    "heads": ("bhsd", (2, 4, 9, 8), (2, 3, 9, 8), (2, 3, 9, 8), r"q is \(2, 4, 9, 8\), k is \(2, 3, 9, 8\);.*\(batch, heads, seq, h"),
    "head dims": ("bshd", (2, 9, 4, 8), (2, 9, 4, 6), (2, 9, 4, 6), r"head dims \(axis 3\) of q and k differ, 8 and 6: q is \(2, 9, 4"),
    "batch": ("sbhd", (9, 2, 4, 8), (9, 1, 4, 8), (9, 1, 4, 8), r"batch sizes \(axis 1\) of q and k differ, 2 and 1"),
    "no head dim": ("bshd", (2, 9, 4, 0), (2, 9, 4, 0), (2, 9, 4, 8), r"q \(2, 9, 4, 0\) has head dim 0; axis 3 is head_dim"),
    "own": (None, (8, 4, 9, 2), (6, 4, 9, 2), (6, 4, 9, 2), r"head dims \(axis 0\) of q and k differ"),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_errors_show_the_callers_axes(name):
    """Also where arrays are converted before the call: with compute_dtype and for the derivative."""
    layout, *shapes, text = PAIRS[name]
    arrays = [np.ones(shape, np.float32) for shape in shapes]
    calls = [attention, attention_vjp, cupy_sdpa.prepare, cupy_sdpa.explain]
    for call in calls if layout is None else [*calls, functools.partial(attention, compute_dtype="bfloat16")]:
        with pytest.raises(ValueError, match=text) as found:
            call(*arrays, layout=layout)
        assert (f"[layout={layout!r}]" in str(found.value)) == (layout is not None)


def test_pages_of_a_cache_with_a_layout():
    """The pages of a cache have our axes: the message says that layout is omitted."""
    cache = cupy_sdpa.KVCache(8, 2, pages=4, page_size=4, batch=2, dtype=np.float32, numpy=True)
    q = np.ones((2, 1, 4, 8), np.float32)
    with pytest.raises(
        ValueError, match=r"cupy_sdpa\.KVCache are \(head_dim, heads, page size, pages\): omit layout, and pass q"
    ):
        attention(q, cache.keys(0), cache.values(0), layout="bshd", page_table=cache.table, seq_lens_kv=cache.lengths)


NO_AXES = {
    "max_seqlen": ({"max_seqlen_q": 3}, "max_seqlen_q is 3 and cu_seqlens_q is None"),
    "scale": ({"scale": float("nan")}, "scale is nan"),
    "window": ({"window": (-1, 0)}, "window is"),
    "return_dbias": ({"return_dbias": True}, "return_dbias is True and bias is None"),
}


@pytest.mark.parametrize("name", NO_AXES)
def test_errors_without_axes_do_not_mention_them(name):
    options, text = NO_AXES[name]
    call = attention_vjp if "return_dbias" in options else attention
    with pytest.raises(ValueError, match=text) as found:
        call(X, X, X, layout="bshd", **options)
    assert "axes" not in str(found.value)
    assert "layout=" not in str(found.value)


@pytest.mark.parametrize("name", WRONG)
def test_errors_show_shapes_as_they_were_passed(name):
    """The message has the layout, the caller's shapes, and the remedy."""
    options, text = WRONG[name]
    with pytest.raises(ValueError, match=text):
        attention(*[X if "layout" in options else X.T] * 3, **options)


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("letters", ["bshd", "bhsd", "sbhd", "dhsb"])
def test_the_dropout_mask_of_a_call(letters, dropout_p):
    """In C order it is (B, Hq, Sq, Skv), and a call with it drops the weights of the call with the seed."""
    sizes = {"b": 2, "s": 9, "h": 3, "d": 8}
    q, k, v = np.random.default_rng(0).standard_normal((3, *(sizes[x] for x in letters)))
    mask = cupy_sdpa.dropout_mask(q, k, dropout_p=dropout_p, seed=3, layout=letters)
    assert mask.shape == ((9, 9, 3, 2) if letters == "dhsb" else (2, 3, 9, 9))
    if dropout_p:
        want = attention(q, k, v, layout=letters, dropout_p=dropout_p, seed=3)
        np.testing.assert_array_equal(attention(q, k, v, layout=letters, dropout_p=dropout_p, dropout_mask=mask), want)
    else:
        assert mask.all()


STARTS = np.array([0, 4, 10], np.int32)
PACKED = {"cu_seqlens_q": STARTS, "cu_seqlens_kv": STARTS, "max_seqlen_q": 6, "max_seqlen_kv": 6}
X4 = np.ones((2, 5, 3, 8), np.float32)
#: Arrays whose layout was forgotten: q, options, and the hint of the message.
FORGOTTEN = {
    "bshd": (X4, {}, "layout='bshd' (batch 2, seq 5, heads 3, head_dim 8)?"),
    "bhsd": (np.ones((2, 3, 5, 8), np.float32), {}, "layout='bhsd' (batch 2, heads 3, seq 5, head_dim 8)?"),
    "split heads": (
        np.ones((2, 5, 24)).reshape(2, 5, 3, 8).transpose(0, 2, 1, 3),
        {},
        "layout='bhsd' (batch 2, heads 3, seq 5,",
    ),
    "a part of fused q, k and v": (np.ones((2, 3, 3, 5, 8))[:, 1], {}, "layout='bhsd' (batch 2, heads 3, seq 5, head_dim 8)?"),
    "a batch of 8": (np.ones((8, 5, 3, 8), np.float32), {}, "layout='bshd' (batch 8, seq 5, heads 3, head_dim 8)?"),
    "a copy": (np.ones((8, 3, 5, 2), order="F").copy(), {}, "Or copy it with asfortranarray(q)"),
    "every second element of the head dim": (np.ones((16, 3, 5, 2), order="F")[::2], {}, "Copy it with asfortranarray(q)"),
    "reversed": (np.ones((8, 3, 5, 2), order="F")[:, :, ::-1], {}, "negative strides: copy it with asfortranarray(q)"),
    "a batch of 1": (np.ones((1, 8, 5, 16), np.float32), {}, "layout='bshd' (batch 1, seq 8, heads 5, head_dim 16)?"),
    "a batch of 1 and one head": (
        np.ones((1, 1, 5, 16), np.float32),
        {},
        "layout='bhsd' (batch 1, heads 1, seq 5, head_dim 16)?",
    ),
    "one packed position": (
        np.ones((1, 3, 16), np.float32),
        {**PACKED, **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), np.array([0, 8, 16], np.int32))}
        | dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), 8),
        "layout='thd' (total 1, heads 3, head_dim 16)?",
    ),
    "packed": (np.ones((10, 3, 16), np.float32), PACKED, "layout='thd' (total 10, heads 3, head_dim 16)?"),
}


def _calls_that_read_a_layout(x, options):
    """Every call that takes arrays with a head dim."""
    yield from (lambda f=f: f(x, x, x, **options) for f in (attention, attention_vjp, explain, prepare))
    stats = np.zeros(x.shape[1:] if x.ndim == 3 else (x.shape[2], x.shape[1], x.shape[3]), np.float32, order="F")
    yield lambda: attention_backward(x, x, x, x, x, stats, **options)
    yield lambda: attention_jvp(x, x, x, x, **options)
    yield lambda: cupy_sdpa.widen(x, x, x, x, **options)
    yield lambda: attention(x, x, x, compute_dtype="float16", **options)
    yield lambda: context_parallel().attention(x, x, x, **options)
    if x.ndim == 4:
        mask = cupy_sdpa.block_mask(lambda b, h, i, j: i >= j, sq=x.shape[2], skv=x.shape[2])
        yield lambda: attention(x, x, x, block_mask=mask, **options)


@pytest.mark.parametrize("name", FORGOTTEN)
def test_a_forgotten_layout_is_refused(name):
    """Strides that a GPU cannot read are refused on the CPU, where they would be read with the wrong axes."""
    x, options, text = FORGOTTEN[name]
    for call in _calls_that_read_a_layout(x, options):
        with pytest.raises(ValueError, match=r"axis 0 must be contiguous|negative strides|in C order") as found:
            call()
        assert text in str(found.value).replace("of k", "of q")
    confirmed = attention(x, x, x, layout="dht" if x.ndim == 3 else "dhsb", **options)
    np.testing.assert_array_equal(confirmed, attention(*[np.asfortranarray(x)] * 3, **options))


#: A sequence in C order, whose first axis has length 1.
ONE = np.random.default_rng(0).random((1, 32, 8, 16), np.float32)
OTHER_CALLS = {
    "dropout_mask": lambda: cupy_sdpa.dropout_mask(ONE, ONE, dropout_p=0.5, seed=0),
    "quantize": lambda: cupy_sdpa.fp8.quantize(ONE),
    "quantize_qkv": lambda: cupy_sdpa.fp8.quantize_qkv(ONE, ONE, ONE),
    "nnlib": lambda: cupy_sdpa.nnlib.dot_product_attention(*[ONE[0][None]] * 3),
    "nnlib, one sequence": lambda: cupy_sdpa.nnlib.dot_product_attention(*[ONE[:, 0]] * 3),
    "an array of results": lambda: attention(*[np.asfortranarray(ONE)] * 3, out=np.empty_like(ONE)),
}


@pytest.mark.parametrize("name", OTHER_CALLS)
def test_a_forgotten_layout_of_one_sequence_is_refused(name):
    """The axis of length 1 has no stride; the other axes in C order show that head_dim is not the first."""
    with pytest.raises(ValueError, match=r"in C order: layout=|in C order\. Pass"):
        OTHER_CALLS[name]()


def test_a_forgotten_layout_of_other_arguments_is_refused():
    """Results, gradients, biases and statistics in C order; a GPU refuses them, too."""
    q = np.asfortranarray(np.random.default_rng(0).standard_normal((8, 3, 5, 2)))
    out, stats = attention(q, q, q, return_stats=True)
    backward = {"dout": out, "q": q, "k": q, "v": q, "out": out, "stats": stats}
    for name in ("dout", "out", "stats"):
        with pytest.raises(ValueError, match=f"^{name} has .*layout='dhsb' confirms"):
            attention_backward(**{**backward, name: backward[name].copy()})
    for name in ("dq", "dk", "dv"):
        with pytest.raises(ValueError, match=f"^{name} has a stride"):
            attention_backward(**backward, **{name: np.empty(q.shape)})
    for options in ({"out": np.empty(out.shape)}, {"stats": np.empty(stats.shape)}, {"bias": np.ones((5, 5, 3, 2))}):
        with pytest.raises(ValueError, match=f"^{next(iter(options))} has .*layout='dhsb' confirms"):
            attention(q, q, q, **options)
        attention(q, q, q, layout="dhsb", **options)


ACCEPTED = {
    "Fortran order": lambda x: x,
    "x.T of C order": lambda x: np.ascontiguousarray(x.T).T,
    "heads after positions": lambda x: np.asfortranarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3),
    "a slice of every axis": lambda x: np.asfortranarray(np.pad(x, 1))[1:-1, 1:-1, 1:-1, 1:-1],
    "every second position": lambda x: np.repeat(x, 2, axis=2).copy(order="F")[:, :, ::2],
    "broadcast heads": lambda x: np.broadcast_to(x[:, :1], x.shape),
    "head dim 1": lambda x: np.asfortranarray(x[:1]),
    "head dim 1, heads after positions": lambda x: np.ascontiguousarray(x[:1, :, :, :1]),
    "one channel of every head": lambda x: x[:1],
    "one position": lambda x: np.ascontiguousarray(x[:, :1, :1, :1]),
    "no position": lambda x: np.ascontiguousarray(x[:, :, :0]),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_arrays_with_a_contiguous_head_dim_need_no_layout(name):
    """Gaps, broadcast axes, and axes of length 0 and 1 are as on a GPU."""
    x = ACCEPTED[name](np.asfortranarray(np.random.default_rng(0).standard_normal((7, 3, 5, 2))))
    found, want = (attention(x, x, x, causal=True, layout=layout) for layout in (None, "dhsb"))
    np.testing.assert_array_equal(found, want)


def test_every_layout_is_tested():
    assert {*DENSE, "thd", "dhsb", "dht"} == set(LAYOUTS)


# On the fake CuPy: repeated calls


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("letters", [*DENSE, "thd"])
def test_repeated_calls_are_not_parsed_and_replayed(letters, backward, fake):
    """A layout is part of the key of a repeated call; only new results are permuted."""
    from cases import as_float
    from not_parsed import not_parsed

    from cupy_sdpa._cudnn.library import library
    from cupy_sdpa.calls.replay_cache import CAPTURE_AFTER

    rng = np.random.default_rng(0)
    sizes = {"b": 2, "s": 16, "h": 2, "d": 16, "t": 32}
    shape = tuple(sizes[x] for x in letters)
    q, k, v, dout = host = [rng.standard_normal(shape).astype(np.float16) for _ in range(4)]
    options = {"layout": letters}
    if letters == "thd":
        starts = np.array([0, 10, 32], np.int32)
        options |= {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": 22, "max_seqlen_kv": 22}
    else:
        options["mask"] = rng.random((2, 1, 16, 16)) < 0.8

    def on(xp):
        return {name: xp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}

    want, pullback = attention_vjp(*(x.astype(np.float64) for x in (q, k, v)), **on(np))
    want = pullback(dout.astype(np.float64)) if backward else [want]
    arrays, given = [fake.asarray(x) for x in host], on(fake)
    out, stats = attention(*arrays[:3], return_stats=True, **given)

    def call(*results):
        names = ("dq", "dk", "dv") if backward else ("out",)
        written = dict(zip(names, results, strict=False))
        if backward:
            return attention_backward(arrays[3], *arrays[:3], out, stats, **written, **given)
        return [attention(*arrays[:3], **written, **given)]

    targets = [fake.full(x.shape, np.nan, np.float16) for x in want]
    for results in ([], targets):  # new results, and the caller's arrays
        call(*results)
        with not_parsed():
            for turn in range(2 * CAPTURE_AFTER):
                before = len(library().executions)
                found = call(*results)
                replayed = len(library().executions) == before
                assert replayed or not results or turn < CAPTURE_AFTER
                for x, y in zip(found, want, strict=True):
                    assert x.shape == y.shape
                    np.testing.assert_allclose(as_float(x), y, atol=0.03)


def test_a_call_permutes_new_results_only(fake, monkeypatch):
    """With ``out=`` a repeated call permutes nothing; without it one array."""
    x = fake.asarray(np.ones((2, 16, 2, 16), np.float16))
    out = fake.empty((2, 16, 2, 16), np.float16)
    for _ in range(2):
        attention(x, x, x, layout="bshd")
        attention(x, x, x, layout="bshd", out=out)
    counted = []
    transpose = fake.ndarray.transpose
    monkeypatch.setattr(fake.ndarray, "transpose", lambda self, *axes: counted.append(axes) or transpose(self, *axes))
    attention(x, x, x, layout="bshd", out=out)
    assert not counted
    attention(x, x, x, layout="bshd")
    assert len(counted) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("letters", [*DENSE, "thd"])
def test_on_a_gpu(letters, dtype, cupy):
    """Both passes of arrays in C order, repeated on changing inputs, with results that are full of NaN before the call."""
    from cases import DTYPES, as_float

    rng = np.random.default_rng(0)
    sizes = {"b": 2, "s": 77, "h": 4, "d": 64, "t": 150}
    shape = tuple(sizes[x] for x in letters)
    host = [rng.standard_normal(shape).astype(DTYPES[dtype]) for _ in range(4)]
    options = {"layout": letters, "causal": True}
    if letters == "thd":
        starts = np.array([0, 50, 150], np.int32)
        options |= {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": 100, "max_seqlen_kv": 100}
    else:
        options["mask"] = rng.random((2, 1, 77, 77)) < 0.8
    given = {name: cupy.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    arrays = [cupy.asarray(x) for x in host]
    targets = [cupy.empty(shape, x.dtype) for x in arrays]
    for turn in range(8):
        for target in targets:
            target.view(np.uint16).fill(0x7FFF)  # NaN in both dtypes
        out, stats = attention(*arrays[:3], return_stats=True, **given, out=targets[3])
        assert out is targets[3]
        named = dict(zip(("dq", "dk", "dv"), targets, strict=False)) if turn % 2 else {}
        gradients = attention_backward(arrays[3], *arrays[:3], out, stats, **named, **given)
        want, pullback = attention_vjp(*(x.astype(np.float64) for x in host[:3]), **options)
        wanted = [want, *pullback(host[3].astype(np.float64))]
        for x, y in zip((out, *gradients), wanted, strict=True):
            np.testing.assert_allclose(as_float(x), y, atol=0.03 * max(1, np.abs(y).max()))
        for x, y in zip(arrays, host, strict=True):  # in place
            y *= DTYPES[dtype].type(-0.75)
            x[...] = cupy.asarray(y)
