"""The CPU engine: its rules are complete, tiles have no effect on results, memory is bounded."""

import itertools
import json
import os
import re
import subprocess
import sys
import tracemalloc
import weakref
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from functions import OPERATIONS, ZOO

from cupy_sdpa import attention, attention_backward, attention_vjp, dropout_mask, explain, problem, reference
from cupy_sdpa.check.case import Case
from cupy_sdpa.check.draw import draw
from cupy_sdpa.check.execute import execute
from cupy_sdpa.check.functions import of_program
from cupy_sdpa.check.sampler import Limits
from cupy_sdpa.core.cudnn.constants import PointwiseMode
from cupy_sdpa.core.cudnn_engine import lowering
from cupy_sdpa.core.graph import nodes
from cupy_sdpa.core.graph.attention_forward import forward
from cupy_sdpa.core.graph.nodes import GraphBuilder, Node, Tensor, row_major
from cupy_sdpa.core.numpy_engine import buffers, tiles
from cupy_sdpa.core.numpy_engine.bands import Masked
from cupy_sdpa.core.numpy_engine.fusion import Fused
from cupy_sdpa.core.numpy_engine.interpreter import COMPILER_RULES, POINTWISE, evaluate
from cupy_sdpa.core.numpy_engine.row_check import Checked
from cupy_sdpa.core.problem.tensor_spec import numpy_dtype
from cupy_sdpa.core.score_fn.modes import MODES


def tensor(name, shape, dtype="float64", role="input"):
    """A tensor of a graph, in C order."""
    return Tensor(name, shape, dtype, role, row_major(shape), (0, 1, 2, 3))


def test_every_node_has_a_rule_in_both_engines():
    """Interpreter and lowering support all node classes, and every pointwise mode is defined. A block mask changes the lowering of
    its whole graph.
    """
    every = {c for c in vars(nodes).values() if isinstance(c, type) and issubclass(c, Node) and c is not Node}
    assert every == set(COMPILER_RULES) - {Checked, Fused, Masked} == set(lowering.LOWERING_RULES)
    assert set(POINTWISE) == {"gen_index", *(mode for mode, row in MODES.items() if isinstance(row.cudnn, str))}


@pytest.mark.parametrize("mode", MODES)
def test_every_row_of_the_modes_is_complete(mode):
    """It has a function of numpy, a mode of cuDNN or a composition, a CUDA expression, a printed form and a derivative."""
    row = MODES[mode]
    assert callable(row.numpy) or callable(getattr(np, row.numpy))
    assert callable(row.cudnn) or row.cudnn in PointwiseMode.__members__
    assert callable(row.derivative)
    names = [f"x{i}" for i in range(row.operands)]
    for text in (row.code, row.formula):  # of a mode that cuDNN has
        assert all(name in text.format(*names) for name in names) == isinstance(row.cudnn, str)
    for other in (row.flipped, row.opposite):
        assert bool(other) == mode.startswith("cmp_")
        assert not other or MODES[other].operands == 2
    if row.opposite:
        x, y = np.meshgrid(*[np.arange(3)] * 2)
        compare = {name: getattr(np, MODES[name].numpy) for name in (mode, row.flipped, row.opposite)}
        np.testing.assert_array_equal(compare[mode](x, y), compare[row.flipped](y, x))
        np.testing.assert_array_equal(compare[mode](x, y), ~compare[row.opposite](x, y))


@pytest.mark.parametrize("mode", MODES)
def test_the_self_test_computes_every_mode(mode):
    """It has a table of its own, with equal results."""
    row = MODES[mode]
    function = row.numpy if callable(row.numpy) else getattr(np, row.numpy)
    for operands in ((0.5, 0.25, 1.0), (1.0, 2.0, 0.0)):
        values = [{"mode": "constant", "value": x} for x in operands[: row.operands]]
        program = {"arrays": {}, "steps": [*values, {"mode": mode, "args": [*range(row.operands)]}]}
        assert of_program("score_mod", json.dumps(program)).call(0.0, 0, 0, 0, 0) == function(*operands[: row.operands])


@pytest.mark.parametrize("mode", MODES)
def test_every_unbounded_mode_is_marked(mode):
    """The gradients of score functions clear infinite and NaN factors only if a mode is marked."""
    row = MODES[mode]
    function = row.numpy if callable(row.numpy) else getattr(np, row.numpy)
    with np.errstate(all="ignore"):
        results = function(*np.meshgrid(*[np.array([-1000, -1, -0.5, 0, 0.5, 1, 1000])] * row.operands))
    assert row.is_unbounded or np.isfinite(results).all()


@pytest.fixture
def tile(request, monkeypatch):
    """The number of elements of a tile."""
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", request.param)
    return request.param


LENGTHS = {"seq_lens_q": np.array([20, 33], np.int32), "seq_lens_kv": np.array([29, 0], np.int32)}


@pytest.mark.parametrize("tile", [1, 100, 1000, 10**9], indirect=True)
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"dropout_p": 0.5, "seed": 1}, LENGTHS], ids=["plain", "causal", "dropout", "lengths"]
)
def test_tiles_do_not_change_results(options, tile):
    """Tiles of one row, of some rows and of all rows give the numbers of the reference, with the dropout mask of the whole, and
    with NaN beyond the lengths.
    """
    rng = np.random.default_rng(0)
    q, k, v = (np.asfortranarray(rng.standard_normal((16, h, n, 2))) for h, n in ((4, 33), (2, 29), (2, 29)))
    known = {**options, "dropout_mask": dropout_mask(q, k, **options)} if "seed" in options else options
    known.pop("seed", None)
    wanted = reference.attention(q, k, v, **known)
    for x, name in ((q, "seq_lens_q"), (k, "seq_lens_kv"), (v, "seq_lens_kv")):
        for entry, length in enumerate(options.get(name, ())):
            x[:, :, length:, entry] = np.nan
    for a, b in zip(attention(q, k, v, return_stats=True, **options), wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-12 if a.dtype == np.float64 else 1e-6)


@pytest.mark.parametrize("tile", [200, 1 << 20], indirect=True)
def test_keys_that_a_mask_function_hides_are_not_computed(tile):
    """In both passes, a tile has only the keys that a comparison with a number leaves, so NaN elsewhere changes nothing. Another
    number leaves other keys.
    """
    rng = np.random.default_rng(0)
    q, k, v = (np.asfortranarray(rng.standard_normal((16, h, n, 2))) for h, n in ((4, 33), (2, 40), (2, 40)))
    for number in (20, 31, 6):
        for first, last in ((0, number), (number, 40)):
            hidden = [x.copy(order="F") for x in (k, v)]
            for x in hidden:
                x[:, :, :first] = x[:, :, last:] = np.nan

            def mask(b, h, i, j):
                return j < number if last < 40 else j >= number  # noqa: B023

            out, pullback = attention_vjp(q, *hidden, mask_mod=mask)
            wanted, expected = attention_vjp(q, *(x[:, :, first:last] for x in (k, v)))
            dq, dk, dv = expected(q)
            gradients = pullback(q)
            np.testing.assert_allclose(out, wanted, rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(gradients[0], dq, rtol=1e-12, atol=1e-12)
            for x, y in zip(gradients[1:], (dk, dv), strict=True):
                np.testing.assert_allclose(x[:, :, first:last], y, rtol=1e-12, atol=1e-12)
                assert not x[:, :, :first].any()
                assert not x[:, :, last:].any()


@pytest.mark.parametrize(("elements", "count"), [(64, 0), *(pytest.param(n, 4, marks=pytest.mark.slow) for n in (1, 64, 1000))])
def test_tiles_of_a_gpu(elements, count, fake, monkeypatch):
    """Random problems in tiles of few queries: positions go on in the next tile, and gradients of keys are sums over tiles."""
    monkeypatch.setattr(tiles, "GPU_TILE_ELEMENTS", elements)
    cases = [draw(elements, number, "cupy", limits=Limits(20_000, 60_000)) for number in range(count)]
    cases.append(Case("cupy", sq=13, skv=20, hq=2, b=2, backward=True, options={"seq_lens_q": "random", "causal": "top_left"}))
    outcomes = [execute(case) for case in cases]
    assert not [outcome.message for outcome in outcomes if outcome.kind not in ("passed", "refused")]
    assert sum(outcome.kind == "passed" for outcome in outcomes) > 0.7 * count


def test_a_tile_of_a_gpu_has_one_batch_item(fake):
    """With several, the bits of an item might depend on the others."""
    sizes = [str(explain(*[fake.zeros((8, 2, 16, b), "f4", order="F")] * 3, engine="cupy")) for b in (1, 3)]
    assert len({re.search(r"[\d.]+ MB at once", text).group() for text in sizes}) == 1


def test_queries_beyond_the_lengths_read_no_keys():
    """A tile with queries that do not exist reads the keys of the others only."""
    x = np.ones((8, 1, 40, 1), np.float32, order="F")
    v = x.copy(order="F")
    v[:, :, 30] = np.nan
    out = attention(x, x, v, causal=True, seq_lens_q=np.int32([2]), seq_lens_kv=np.int32([40]))
    assert not np.isnan(out).any()


def test_long_attention_fits_a_laptop():
    """4096 queries and keys, two heads: far below the 134 MB of the scores."""
    rng = np.random.default_rng(0)
    q, k, v = (np.asfortranarray(rng.standard_normal((16, 2, 4096, 1), np.float32)) for _ in range(3))
    tracemalloc.start()
    try:
        attention(q, k, v, causal=True)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64e6


def test_long_gradients_fit_a_laptop():
    """4096 queries and keys, two heads: the gradients take a fraction of the 134 MB of the scores."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (np.asfortranarray(rng.standard_normal((16, 2, 4096, 1), np.float32)) for _ in range(4))
    out, stats = attention(q, k, v, return_stats=True)
    tracemalloc.start()
    try:
        attention_backward(dout, q, k, v, out, stats)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 24e6


#: Options with which the first 64 of 1024 queries attend to none of the keys after the first 512.
EXCLUDED = {
    "causal": {"causal": True},
    "window": {"window": (100, 50)},
    "bottom right": {"window": (None, 0, "bottom_right")},
    "lengths": {"seq_lens_q": np.array([1024], np.int32), "seq_lens_kv": np.array([500], np.int32)},
    "function": {"mask_mod": lambda b, h, i, j: (i >= j) & (j + 300 > i)},
}


@pytest.mark.parametrize("name", EXCLUDED)
def test_excluded_keys_are_not_computed(name):
    """NaN in keys and values that no query of a tile attends to changes nothing, in both passes: nothing reads them there."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (np.asfortranarray(rng.standard_normal((8, 2, 1024, 1), np.float32)) for _ in range(4))
    options = EXCLUDED[name]
    want, stats = attention(q, k, v, return_stats=True, **options)
    gradients = attention_backward(dout, q, k, v, want, stats, **options)
    for x in (k, v):
        x[:, :, 512:] = np.nan
    out, stats = attention(q, k, v, return_stats=True, **options)
    np.testing.assert_array_equal(out[:, :, :64], want[:, :, :64])
    dq = attention_backward(dout, q, k, v, out, stats, **options)[0]
    np.testing.assert_array_equal(dq[:, :, :64], gradients[0][:, :, :64])


def test_packed_sequences_cost_their_own_lengths():
    """Ten positions with a maximum length of 4000 need no memory for 4000 keys in either pass."""
    x = np.asfortranarray(np.random.default_rng(0).standard_normal((8, 1, 10), np.float32))
    starts = np.array([0, 4, 4, 10], np.int32)
    options = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": 4000, "max_seqlen_kv": 4000}
    attention_vjp(x, x, x, **options)[1](x)
    tracemalloc.start()
    try:
        attention_vjp(x, x, x, **options)[1](x)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.parametrize("tile", [7, 1 << 20], indirect=True)
def test_a_larger_max_seqlen_changes_nothing(tile):
    """Every result is the same; some sequences have no query or no key."""
    rng = np.random.default_rng(0)
    q, dout = (np.asfortranarray(rng.standard_normal((8, 4, 14))) for _ in range(2))
    k, v = (np.asfortranarray(rng.standard_normal((8, 2, 17))) for _ in range(2))
    table = np.asfortranarray(rng.standard_normal((40, 40)))
    results = []
    for bound in (9, 40):
        options = {
            "cu_seqlens_q": np.array([0, 5, 5, 9, 13], np.int32), "cu_seqlens_kv": np.array([0, 7, 8, 8, 17], np.int32),
            "max_seqlen_q": bound, "max_seqlen_kv": bound, "causal": True, "sinks": np.arange(4, dtype=np.float32),
            "bias": np.asfortranarray(table[:bound, :bound, None, None]), "return_stats": True,
            "score_mod": lambda s, b, h, i, j, x: s + x[i, j] * (i - j), "tensors": {"x": table[:bound, :bound]},
        }  # fmt: skip
        out, stats = attention(q, k, v, **options)
        options.pop("return_stats")
        gradients = attention_backward(dout, q, k, v, out, stats, **options, return_dsinks=True)
        dbias = attention_backward(dout, q, k, v, out, stats, **options, return_dbias=True)[3]
        assert not dbias[9:].any()
        assert not dbias[:, 9:].any()
        results.append([out, stats, *gradients, dbias[:9, :9]])
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def test_declared_dtypes_are_rounded_to():
    """P is rounded to bfloat16 before P V, as on tensor cores; exact evaluation rounds nothing."""
    rng = np.random.default_rng(0)
    shapes = (8, 1, 1, 1), (8, 1, 3, 1), (8, 1, 3, 1)
    q, k, v = (np.asfortranarray(rng.standard_normal(shape).astype(ml_dtypes.bfloat16)) for shape in shapes)
    graph = forward(problem(q, k, v, return_stats=True))
    results = []
    for exact in (False, True):
        arrays = {"q": q, "k": k, "v": v, "out": np.empty((8, 1, 1, 1)), "stats": np.empty((1, 1, 1), np.float32)}
        evaluate(graph, arrays, {"scale": 1.0}, exact=exact)
        results.append(arrays["out"])
    out, exact = results
    s = np.einsum("dhib,dhjb->j", q.astype(np.float64), k.astype(np.float64))
    p = np.exp(s - s.max())
    p /= p.sum()
    vs = v[:, 0, :, 0].astype(np.float64)
    np.testing.assert_allclose(exact.ravel(), vs @ p, atol=1e-14)
    np.testing.assert_allclose(out.ravel(), vs @ p.astype(q.dtype).astype(np.float64), atol=1e-6)
    assert np.abs(out - exact).max() > 1e-5


@pytest.mark.parametrize("tile", [1 << 20, 8], indirect=True)
def test_lengths_of_a_matmul_mask_the_padding(tile):
    """Rows beyond m, columns beyond n and products beyond k are ignored, even NaN; also in tiles."""
    lengths = {"m": [3, 5], "n": [2, 4], "k": [6, 1]}
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 1, 5, 6)), rng.standard_normal((2, 1, 6, 4))
    want = np.zeros((2, 1, 5, 4))
    for entry in range(2):
        m, n, k = (lengths[name][entry] for name in "mnk")
        want[entry, 0, :m, :n] = a[entry, 0, :m, :k] @ b[entry, 0, :k, :n]
        a[entry, 0, m:] = a[entry, 0, :, k:] = np.nan
        b[entry, 0, :, n:] = b[entry, 0, k:] = np.nan
    g = GraphBuilder("float64")
    of_a, of_b, of_out = tensor("a", a.shape), tensor("b", b.shape), tensor("out", want.shape, role="output")
    g.matmul("a b", of_a, of_b, of_out, **{name: tensor(name, (2, 1, 1, 1), "int32") for name in "mnk"})
    out = np.full((2, 1, 5, 4), np.nan)
    given = {name: np.array(values, np.int32).reshape(2, 1, 1, 1) for name, values in lengths.items()}
    evaluate(g.graph(), {"a": a, "b": b, "out": out, **given}, {})
    np.testing.assert_allclose(out, want)


def test_every_rule_of_derivatives_is_tested():
    """Some function that is compared with differences has the operation."""
    shapes = (8, 4, 20, 2), (8, 2, 20, 2), (8, 2, 20, 2)
    used = set()
    for functions in [*OPERATIONS, *ZOO]:
        program = problem(*shapes, dtype="float32", **functions.options(q=20, kv=20)).settings.expression
        used |= {step.mode for step in program.steps} if program else set()
    unused = {mode for mode in set(MODES) - used if mode[:4] != "cmp_"}  # functions have no identity
    assert unused <= {"identity"}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_results_are_rounded_to_16_bits_as_numpy_rounds_them(dtype):
    """Of normal and subnormal numbers, ties, -0, infinities and NaN; a transposed copy leaves the numbers as they are."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((1, 1, 300, 200)) * np.exp(rng.uniform(-25, 8, (300, 200)))).astype(np.float32)
    powers = np.ldexp(1.0, np.arange(-26, 14))
    x[0, 0, 1, :160] = np.concatenate([powers, -powers * (1 + 2.0**-11), powers * (1 + 3 * 2.0**-11), -powers * (1 + 2.0**-10)])
    x[0, 0, 2, :2] = -0.0, 2.0**-24 * 1.5
    x[0, 0, 290:, :6] = np.inf, -np.inf, np.nan, 65519, 65520, -0.0  # far from the others: blocks are rounded by themselves
    with np.errstate(over="ignore"):
        rounded = x.astype(numpy_dtype(dtype)).astype(np.float32)
    g = GraphBuilder("float32")
    one, of_x = g.scalar("one", value=1.0), tensor("x", x.shape, "float32")
    names = {name: tensor(name, x.shape, "float32", "output") for name in ("direct", "unrounded")}
    names["transposed"] = tensor("transposed", x.swapaxes(-1, -2).shape, "float32", "output")
    y = g.pointwise("y = x", "mul", of_x, one, out="y")
    g.pointwise("transposed", "mul", g.transpose("yT", y, "yT", dtype), one, out=names["transposed"])
    g.pointwise("direct", "mul", g.pointwise("z = y", "mul", y, one, out="z", dtype=dtype), one, out=names["direct"])
    g.pointwise("unrounded", "mul", y, one, out=names["unrounded"])
    out = {name: np.empty(t.shape, np.float32) for name, t in names.items()}
    evaluate(g.graph(), {"x": x, **out}, {})
    for name, expected in (("direct", rounded), ("transposed", rounded.swapaxes(-1, -2)), ("unrounded", x)):
        np.testing.assert_array_equal(out[name], expected, err_msg=name)
        np.testing.assert_array_equal(np.signbit(out[name]), np.signbit(expected), err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_near_the_largest_number(dtype):
    """Their mean is finite, though the sum of products with the weights before the division is not."""
    q, k, v = (np.zeros((8, 2, n, 1), np.float32, order="F") for n in (5, 300, 300))
    v[...] = 3e38
    arrays = [x.astype(numpy_dtype(dtype), order="F") for x in (q, k, v)]
    out = attention(*arrays, causal="bottom_right").astype(np.float64)
    np.testing.assert_allclose(out, 3e38, rtol=2**-8)


def test_tiles_do_not_share_memory():
    """Memory is used again only after the array that had it no longer exists."""
    size = buffers.NBYTES
    kept = [buffers.empty((1, 1, 1, size // 4), np.dtype(np.float32)) for _ in range(buffers.COUNT + 2)]
    assert not any(np.shares_memory(x, y) for x, y in itertools.combinations(kept, 2))
    address = kept.pop(0).ctypes.data
    assert buffers.empty((size // 8,), np.dtype(np.float64)).ctypes.data == address


def test_a_call_has_its_evaluation_alone():
    """It is taken until it is given back; a thread keeps the latest ones."""
    buffers.give("graph", "an evaluation")
    for number in range(buffers.EVALUATIONS - 1):
        buffers.give(number, "another")
    assert buffers.take("graph") == "an evaluation"
    assert buffers.take("graph") is None
    buffers.give("graph", "an evaluation")
    for number in range(buffers.EVALUATIONS):
        buffers.give(-1 - number, "another")
    assert buffers.take("graph") is None


@pytest.mark.parametrize(
    "options", [{}, {"seq_lens_q": [3, 5], "seq_lens_kv": [6, 2]}, {"bias": np.ones((8, 8, 1, 1), order="F")}]
)
def test_a_repeated_small_call_keeps_memory_but_no_array(options):
    """The next call has the memory of its tiles again, with other arrays; the arrays of the last call are not kept."""
    arrays = [np.asfortranarray(np.random.default_rng(n).standard_normal((16, 2, 8, 2))) for n in range(6)]
    wanted = [both_passes(x, options) for x in arrays]
    for _ in range(2):
        for x, results in zip(arrays, wanted, strict=True):
            for result, want in zip(both_passes(x, options), results, strict=True):
                np.testing.assert_array_equal(result, want)
    x = arrays.pop().copy("F")
    both_passes(x, options)
    with pytest.raises(ValueError, match="stats is from another call"):
        attention_backward(x, x, x, x, *[y + 1 for y in attention(x, x, x, return_stats=True, **options)], **options)
    alive = weakref.ref(x)
    del x
    assert alive() is None


def both_passes(x, options):
    """The results of both passes."""
    out, stats = attention(x, x, x, return_stats=True, **options)
    return [out, stats, *attention_backward(out, x, x, x, out, stats, return_dbias="bias" in options, **options)]


@pytest.mark.parametrize("name", ["causal", "window", "function"])
def test_a_repeated_small_call_allocates_no_scores(name):
    """Its memory is the results, views, and arrays of the size of q."""
    x = np.asfortranarray(np.random.default_rng(0).standard_normal((4, 4, 40, 1), np.float32))
    size = np.setbufsize(16)  # of numpy's own copies of operands that are broadcast
    try:
        for _ in range(3):
            both_passes(x, EXCLUDED[name])
        tracemalloc.start()
        both_passes(x, EXCLUDED[name])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        np.setbufsize(size)
    assert peak < 4 * 40 * 40 * 4


def test_threads_do_not_share_memory():
    """Calls of several threads at once, small and large ones in turn, have the bits of calls one after the other."""
    rng = np.random.default_rng(0)
    xs = [np.asfortranarray(rng.standard_normal((8, 2, n, 1), np.float32)) for n in (10, 10, 30, 300) for _ in range(4)]
    expected = [both_passes(x, {"causal": True}) for x in xs]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda x: [both_passes(x, {"causal": True}) for _ in range(5)], xs))
    for runs, results in zip(found, expected, strict=True):
        for run in runs:
            for a, b in zip(run, results, strict=True):
                np.testing.assert_array_equal(a, b)


#: Prints the digest of both passes, twice.
BITS = """
import hashlib, numpy as np
from cupy_sdpa import attention_vjp
q, k, v = (np.asfortranarray(np.random.default_rng(n).standard_normal((64, 4, 300, 1), np.float32)) for n in range(3))
for _ in range(2):
    out, pullback = attention_vjp(q, k, v, causal=True)
    print(hashlib.sha256(b"".join(x.tobytes("F") for x in (out, *pullback(out)))).hexdigest())
"""


@pytest.mark.parametrize("threads", ["1", "2"])
def test_runs_have_the_same_bits_with_the_same_number_of_threads(threads):
    """This is what the page on engines says, with the threads of numpy's BLAS."""
    variables = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
    environment = {**os.environ, **dict.fromkeys(variables, threads)}
    done = subprocess.run([sys.executable, "-c", BITS], env=environment, capture_output=True, text=True, check=True)
    first, second = done.stdout.split()
    assert first == second
