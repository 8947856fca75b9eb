"""The CPU engine itself: its rules are complete, its tiles are invisible, its memory is bounded."""

import tracemalloc

import numpy as np
import pytest
from cases import Case

from cupy_sdpa import attention, graph, interpreter, lowering
from cupy_sdpa.graph import POINTWISE, Builder, Node, Tensor, row_major
from cupy_sdpa.interpreter import MODES, RULES, evaluate
from cupy_sdpa.patterns import forward


def test_every_node_has_its_rule_in_both_engines():
    """The set of node classes is the interpreter's and the lowering's, and every pointwise mode has a meaning."""
    nodes = {c for c in vars(graph).values() if isinstance(c, type) and issubclass(c, Node) and c is not Node}
    assert nodes == set(RULES) == set(lowering.RULES)
    assert set(POINTWISE) == set(MODES)


@pytest.mark.parametrize("elements", [1, 100, 1000, 10**9])
@pytest.mark.parametrize("case", [Case("full", sq=33, skv=47, hkv=2), Case("causal", sq=47, skv=33, causal=True)], ids=str)
def test_tiles_are_invisible(case, elements, monkeypatch):
    """Blocks of one row, of some rows, and of all give the same numbers."""
    q, k, v = case.with_dtype("float64").arrays()
    wanted = attention(q, k, v, causal=case.causal, return_stats=True)
    monkeypatch.setattr(interpreter, "TILE_ELEMENTS", elements)
    got = attention(q, k, v, causal=case.causal, return_stats=True)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)


def test_long_attention_fits_a_laptop():
    """4096 queries over 4096 keys, eight heads: well under 1 GiB beside the arrays."""
    rng = np.random.default_rng(0)
    q, k, v = (np.asfortranarray(rng.standard_normal((64, 8, 4096, 1), np.float32)) for _ in range(3))
    tracemalloc.start()
    try:
        attention(q, k, v, causal=True)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 * 2**20


def test_declared_precision_rounds_what_the_graph_says():
    """P is rounded to bfloat16 before P V, as on the tensor cores; exact evaluation rounds nothing."""
    case = Case("rounding", d=8, hq=1, hkv=1, sq=1, skv=3, b=1)
    q, k, v = case.arrays()
    out, exact = (np.empty(case.problem().out.shape, np.float64, order="F") for _ in range(2))
    named = dict(zip("qkv", (q, k, v), strict=True))
    stats = np.empty((1, 1, 1), np.float32)
    evaluate(forward(case.problem()), named | {"out": out, "stats": stats}, {"scale": 1.0})
    evaluate(forward(case.problem()), named | {"out": exact, "stats": stats}, {"scale": 1.0}, exact=True)
    s = np.einsum("dhib,dhjb->j", q.astype(np.float64), k.astype(np.float64))
    p = np.exp(s - s.max())
    p /= p.sum()
    vs = v[:, 0, :, 0].astype(np.float64)
    np.testing.assert_allclose(exact.ravel(), vs @ p, atol=1e-14)
    np.testing.assert_allclose(out.ravel(), vs @ p.astype(q.dtype).astype(np.float64), atol=1e-6)
    assert np.abs(out - exact).max() > 1e-5


def test_a_row_of_minus_infinity_gives_zero():
    """The rule of the softmax node: nothing to attend to is 0 and -inf, not NaN."""
    shape = (1, 1, 2, 3)
    x = Tensor("x", shape, "float64", "input", row_major(shape), (0, 1, 2, 3))
    v = Tensor("v", (1, 1, 3, 1), "float64", "input", row_major((1, 1, 3, 1)), (0, 1, 2, 3))
    out = Tensor("out", (1, 1, 2, 1), "float64", "output", row_major((1, 1, 2, 1)), (0, 1, 2, 3))
    stats = Tensor("stats", (1, 1, 2, 1), "float64", "output", row_major((1, 1, 2, 1)), (0, 1, 2, 3))
    g = Builder("float64")
    g.matmul("O = P V", g.softmax("P = softmax(X)", x, "P", "float64", stats), v, out)
    arrays = {"x": np.array([[-np.inf] * 3, [0, -np.inf, 0]]).reshape(shape), "v": np.ones((1, 1, 3, 1))}
    arrays |= {"out": np.empty((1, 1, 2, 1)), "stats": np.empty((1, 1, 2, 1))}
    evaluate(g.graph(), arrays, {})
    np.testing.assert_array_equal(arrays["out"].ravel(), [0, 1])
    np.testing.assert_array_equal(arrays["stats"].ravel(), [-np.inf, np.log(2)])


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_positions_are_those_in_the_whole_tensor(axis, monkeypatch):
    """gen_index counts batch entries, heads, rows and columns of the tensor, not of the tile."""
    monkeypatch.setattr(interpreter, "TILE_ELEMENTS", 4)
    shape = (2, 3, 5, 4)
    strides = row_major(shape)
    x = Tensor("x", shape, "float64", "input", strides, (0, 1, 2, 3))
    out = Tensor("out", shape, "float64", "output", strides, (0, 1, 2, 3))
    g = Builder("float64")
    index = g.pointwise("n", "gen_index", x, out="n", dtype="int32", axis=axis)
    visible = g.pointwise("n >= 1", "cmp_ge", index, g.scalar("one", "float64", 1.0), out="m", dtype="bool")
    g.pointwise("x where m, else 0", "binary_select", x, g.scalar("zero", "float64", 0.0), visible, out=out)
    values, got = np.random.default_rng(0).standard_normal(shape), np.empty(shape)
    evaluate(g.graph(), {"x": values, "out": got}, {})
    np.testing.assert_array_equal(got, np.where(np.indices(shape)[axis] >= 1, values, 0))


def test_a_step_that_does_not_fit_is_refused_when_it_is_written_down():
    """The builder knows the shape rules: it names the step and both shapes."""
    g = Builder()
    a = Tensor("a", (1, 2, 3, 4), "float32", "input", row_major((1, 2, 3, 4)), (0, 1, 2, 3))
    b = Tensor("b", (1, 2, 5, 6), "float32", "input", row_major((1, 2, 5, 6)), (0, 1, 2, 3))
    with pytest.raises(ValueError, match=r"a \(1, 2, 3, 4\) and b \(1, 2, 5, 6\) do not fit"):
        g.matmul("A B", a, b, "c")
    with pytest.raises(ValueError, match=r"a \(1, 2, 3, 4\), b \(1, 2, 5, 6\) do not broadcast"):
        g.pointwise("a b", "mul", a, b, out="c")
    with pytest.raises(ValueError, match=r"reads 2 tensors, got 1"):
        g.pointwise("a", "mul", a, out="c")
    g.pointwise("a a", "mul", a, a, out="c")
    with pytest.raises(ValueError, match="two tensors are named c"):
        g.pointwise("a a", "mul", a, a, out="c")


def test_lengths_of_a_matmul_hide_what_lies_beyond(monkeypatch):
    """Rows beyond m, columns beyond n and products beyond k count for nothing, be they NaN; in tiles too."""
    lengths = {"m": [3, 5], "n": [2, 4], "k": [6, 1]}
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 1, 5, 6)), rng.standard_normal((2, 1, 6, 4))
    want = np.zeros((2, 1, 5, 4))
    for entry in range(2):
        m, n, k = (lengths[name][entry] for name in "mnk")
        want[entry, 0, :m, :n] = a[entry, 0, :m, :k] @ b[entry, 0, :k, :n]
        a[entry, 0, m:] = a[entry, 0, :, k:] = np.nan
        b[entry, 0, :, n:] = b[entry, 0, k:] = np.nan
    for elements in (1 << 20, 8):
        monkeypatch.setattr(interpreter, "TILE_ELEMENTS", elements)
        g = Builder("float64")
        tensors = {
            name: Tensor(name, shape, dtype, role, row_major(shape), (0, 1, 2, 3))
            for name, shape, dtype, role in (
                ("a", (2, 1, 5, 6), "float64", "input"), ("b", (2, 1, 6, 4), "float64", "input"),
                ("out", (2, 1, 5, 4), "float64", "output"), *((name, (2, 1, 1, 1), "int32", "input") for name in "mnk"),
            )
        }  # fmt: skip
        g.matmul("a b", tensors["a"], tensors["b"], tensors["out"], **{name: tensors[name] for name in "mnk"})
        out = np.full((2, 1, 5, 4), np.nan)
        given = {name: np.array(values, np.int32).reshape(2, 1, 1, 1) for name, values in lengths.items()}
        evaluate(g.graph(), {"a": a, "b": b, "out": out, **given}, {})
        np.testing.assert_allclose(out, want)
    one = Tensor("m", (1, 1, 1, 1), "int32", "input", (1, 1, 1, 1), (0, 1, 2, 3))
    with pytest.raises(ValueError, match=r"m \(1, 1, 1, 1\) must be \(2, 1, 1, 1\)"):
        Builder().matmul("a b", tensors["a"], tensors["b"], "c", m=one)
