"""``compute_dtype=``: float32 and float64 arrays are rounded to 16 bits, and everything returned has the caller's dtype."""

import numpy as np
import pytest
from engines import numbers

import cupy_sdpa
from cupy_sdpa import attention, attention_backward, attention_jvp, attention_vjp, explain

KINDS = ["float16", "bfloat16"]
PAIRS = [(dtype, kind) for dtype in ("float32", "float64") for kind in KINDS]


def random_arrays(seed, dtype):
    """q, k, v and dout (D, H, S, B) of random sizes, small ones as often as large ones."""
    rng = np.random.default_rng(seed)
    b, sq, skv = (int(rng.choice([0, 1, 2, 17])) for _ in range(3))
    hkv, group, d, dv = int(rng.integers(1, 3)), int(rng.integers(1, 3)), int(rng.integers(1, 9)), int(rng.integers(1, 9))
    shapes = (d, hkv * group, sq, b), (d, hkv, skv, b), (dv, hkv, skv, b), (dv, hkv * group, sq, b)
    return [rng.standard_normal(shape).astype(dtype, order="F") for shape in shapes]


@pytest.mark.parametrize("seed", numbers(12, quick=4))
def test_the_roundings_are_those_of_arrays_in_16_bits(seed):
    """The results equal the results of rounded arrays, in both passes, with and without arrays to write into."""
    dtype, kind = PAIRS[seed % 4]
    arrays = random_arrays(seed, dtype)
    for _ in range(2):
        q, k, v, dout = (x.astype(kind) for x in arrays)
        want, stats = attention(q, k, v, causal=True, return_stats=True)
        gradients = attention_backward(dout, q, k, v, want, stats, causal=True)
        out = np.full(want.shape, np.nan, dtype, order="F")
        rows = np.full(stats.shape, np.nan, np.float32, order="F")
        found = attention(*arrays[:3], causal=True, compute_dtype=kind, out=out, stats=rows)
        assert found[0] is out
        assert found[1] is rows
        targets = [np.full(x.shape, np.nan, dtype, order="F") for x in arrays[:3]]
        named = dict(zip(("dq", "dk", "dv"), targets, strict=True))
        again = attention_backward(arrays[3], *arrays[:3], out, rows, causal=True, compute_dtype=kind, **named)
        result, pullback = attention_vjp(*arrays[:3], causal=True, compute_dtype=kind)
        for got, wanted in zip((out, *targets, result, *pullback(arrays[3])), (want, *gradients) * 2, strict=True):
            assert got.dtype == np.dtype(dtype)
            np.testing.assert_array_equal(got, wanted.astype(dtype))
        for got, target in zip(again, targets, strict=True):
            assert got is target
        np.testing.assert_array_equal(rows, stats)
        for x in arrays:
            x *= -2  # in place: nothing is kept between calls


def test_a_seed_without_axes(engine):
    """It is a one-element array, in both passes, and as the number."""
    q = engine.normal(0, 8, 2, 10, 2, dtype=np.float32)
    options = {"dropout_p": 0.5, "compute_dtype": "float16"}
    found = []
    for seed in (4, engine.put(np.array(4)), engine.put(np.array([4]))):
        out, pullback = attention_vjp(q, q, q, seed=seed, **options)
        found.append([out, *pullback(q)])
    for other in found[1:]:
        for x, y in zip(other, found[0], strict=True):
            np.testing.assert_allclose(engine.get(x), engine.get(y), atol=0.01)


def test_arrays_of_another_byte_order():
    """They are those numbers, as without the option."""
    q, k, v = (np.asfortranarray(np.random.default_rng(n).standard_normal((8, 2, 10, 2), np.float32)) for n in range(3))
    want = attention(q, k, v, compute_dtype="float16")
    swapped = [x.astype(">f4") for x in (q, k, v)]
    for arrays in ((q, swapped[1], v), swapped):
        np.testing.assert_array_equal(attention(*arrays, compute_dtype="float16"), want)


def test_other_options_and_calls():
    """Biases and sinks keep their dtype and get gradients of it; block masks, layouts and derivatives are also converted."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (np.asfortranarray(rng.standard_normal((8, 2, 10, 2), np.float32)) for _ in range(4))
    bias, sinks = rng.standard_normal((10, 10, 2, 2), np.float32).copy(order="F"), rng.standard_normal(2).astype(np.float32)
    options = {"bias": bias, "sinks": sinks, "return_dbias": True, "return_dsinks": True}
    _, pullback = attention_vjp(q, k, v, compute_dtype="float16", **options)
    _, exact = attention_vjp(q, k, v, **options)
    for x, y in zip(pullback(dout), exact(dout), strict=True):
        assert x.dtype == np.float32
        np.testing.assert_allclose(x, y, atol=0.05)
    mask = cupy_sdpa.block_mask(lambda b, h, i, j: i >= j, 10, 10)
    for given in ({"block_mask": mask}, {"causal": True}):
        theirs = [x.transpose(3, 1, 2, 0) for x in (q, k, v)]
        out = attention(*theirs, layout="bhsd", compute_dtype="bfloat16", **given)
        assert out.dtype == np.float32
        error = np.abs(out.transpose(3, 1, 2, 0) - attention(q, k, v, causal=True)).max()
        assert 2**-12 < error < 0.05, "nothing is rounded"
    for x, y in zip(attention_jvp(q, k, v, dout, compute_dtype="bfloat16"), attention_jvp(q, k, v, dout), strict=True):
        assert x.dtype == np.float32
        np.testing.assert_allclose(x, y, atol=0.1)


def test_the_pullback_keeps_arrays_in_16_bits():
    """q, k, v and out take half of the memory; the caller's arrays are not kept."""
    x = np.ones((8, 2, 10, 1), np.float32, order="F")
    _, pullback = attention_vjp(x, x, x, compute_dtype="float16")
    assert pullback.nbytes == 4 * x.nbytes // 2 + 4 * 2 * 10


def test_what_is_not_converted():
    """None and the dtype of the arrays convert nothing; large values become infinite without a warning, as on a GPU."""
    q, k, v = (np.random.default_rng(n).standard_normal((8, 2, 5, 1)).astype(np.float16, order="F") for n in range(3))
    for kind in (None, "float16", np.float16):
        np.testing.assert_array_equal(attention(q, k, v, compute_dtype=kind), attention(q, k, v))
    x = np.full((8, 1, 2, 1), 1e6, np.float32, order="F")
    assert not np.isfinite(attention(x * 0, x * 0, x, compute_dtype="float16")).any()
    assert np.isfinite(attention(x * 0, x * 0, x, compute_dtype="bfloat16")).all()


def test_explain_names_the_conversion():
    """The problem is that in 16 bits; no gradient needs to be passed."""
    x = np.ones((8, 2, 10, 1), np.float32, order="F")
    for backward in (False, True):
        report = explain(x, x, x, compute_dtype="bfloat16", backward=backward)
        assert report.problem.dtype == "bfloat16"
        assert "arrays are converted: float32 to bfloat16 before the call, and back after it" in str(report)
    assert "converted" not in str(explain(x, x, x))
