"""``compute_dtype=``: float32 and float64 arrays are rounded to 16 bits, and everything returned has the caller's dtype."""

import numpy as np
import pytest
from cases import DTYPES

import cupy_sdpa
from cupy_sdpa import attention, attention_backward, attention_jvp, attention_vjp, explain, get_plan_cache
from cupy_sdpa._cudnn.library import library

KINDS = ["float16", "bfloat16"]


def random_arrays(seed, dtype):
    """q, k, v and dout (D, H, S, B) of random sizes, small ones as often as large ones."""
    rng = np.random.default_rng(seed)
    b, sq, skv = (int(rng.choice([0, 1, 2, 17])) for _ in range(3))
    hkv, group, d, dv = int(rng.integers(1, 3)), int(rng.integers(1, 3)), int(rng.integers(1, 9)), int(rng.integers(1, 9))
    shapes = (d, hkv * group, sq, b), (d, hkv, skv, b), (dv, hkv, skv, b), (dv, hkv * group, sq, b)
    return [rng.standard_normal(shape).astype(dtype, order="F") for shape in shapes]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("seed", range(8))
def test_the_roundings_are_those_of_arrays_in_16_bits(seed, dtype, kind):
    """The results equal those of rounded arrays, in both passes, with and without arrays to write into."""
    arrays = random_arrays(seed, dtype)
    for _ in range(2):
        q, k, v, dout = (x.astype(DTYPES[kind]) for x in arrays)
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


def test_rounding_is_noticed():
    """The results differ from those in float32, by as much as bfloat16 rounds."""
    q, k, v = (np.random.default_rng(n).standard_normal((16, 2, 40, 1), np.float32).copy(order="F") for n in range(3))
    error = np.abs(attention(q, k, v, compute_dtype="bfloat16") - attention(q, k, v)).max()
    assert 2**-12 < error < 2**-5


def test_other_options_and_calls():
    """Biases and sinks keep their dtype and get gradients of it; block masks, layouts and derivatives are converted, too."""
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
        assert out.shape == (2, 2, 10, 8)
        np.testing.assert_allclose(out.transpose(3, 1, 2, 0), attention(q, k, v, causal=True), atol=0.05)
    results = attention_jvp(q, k, v, dout, compute_dtype="bfloat16")
    for x, y in zip(results, attention_jvp(q, k, v, dout), strict=True):
        assert x.dtype == np.float32
        np.testing.assert_allclose(x, y, atol=0.1)


def test_the_pullback_keeps_arrays_in_16_bits():
    """q, k, v and out take half of the memory; the caller's arrays are not kept."""
    x = np.ones((8, 2, 10, 1), np.float32, order="F")
    _, pullback = attention_vjp(x, x, x, compute_dtype="float16")
    assert pullback.nbytes == 4 * x.nbytes // 2 + 4 * 2 * 10


def test_no_conversion():
    """None, and the dtype of the arrays, convert nothing."""
    q, k, v = (np.random.default_rng(n).standard_normal((8, 2, 5, 1)).astype(np.float16, order="F") for n in range(3))
    for kind in (None, "float16", np.float16):
        np.testing.assert_array_equal(attention(q, k, v, compute_dtype=kind), attention(q, k, v))


def test_large_values_become_infinite():
    """As on the GPU, without a warning."""
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


X = np.ones((8, 2, 10, 1), np.float32, order="F")
WRONG = {
    "another dtype": (X, {"compute_dtype": "float32"}, ValueError, "compute_dtype is 'float32'; it must be 'float16' or 'bfloat16'"),
    "an object": (X, {"compute_dtype": object()}, ValueError, "it must be 'float16' or 'bfloat16'"),
    "16 bits": (X.astype(np.float16), {"compute_dtype": "bfloat16"}, TypeError, "compute_dtype is 'bfloat16' and q is float16"),
    "mixed": (X, {"compute_dtype": "float16", "out": X.astype(np.float16, order="F")}, TypeError, "out is float16 and q is float32"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_dtypes_raise(name):
    """Before anything is computed; the message has both dtypes."""
    x, options, error, text = WRONG[name]
    with pytest.raises(error, match=text):
        attention(x, x, x, **options)


def test_calls_that_do_not_convert_say_so():
    """Prepared calls, and problems."""
    with pytest.raises(TypeError, match=r"does not take compute_dtype; cupy_sdpa\.attention"):
        cupy_sdpa.prepare(X, X, X, compute_dtype="float16")


def test_on_the_gpu(fake):
    """CuPy arrays in float32 run, in both passes, again and again, and without a synchronization."""
    rng = np.random.default_rng(0)
    host = [rng.standard_normal((2, 16, 2, 16), np.float32) for _ in range(4)]
    want, pullback = attention_vjp(*host[:3], layout="bshd", causal=True)
    gradients = pullback(host[3])
    arrays = [fake.asarray(x) for x in host]
    for _ in range(8):
        out, back = attention_vjp(*arrays[:3], layout="bshd", causal=True, compute_dtype="float16")
        for x, y in zip((out, *back(arrays[3])), (want, *gradients), strict=True):
            assert x.dtype == np.float32
            np.testing.assert_allclose(x.get(), y, atol=0.03)


def test_a_captured_call(fake):
    """The rounded arrays belong to the CUDA graph: replays are right after its memory was used by others."""
    rng = np.random.default_rng(0)
    host = [rng.standard_normal((2, 16, 2, 16), np.float32) for _ in range(4)]
    arrays = [fake.asarray(x) for x in host]
    options = {"layout": "bshd", "compute_dtype": "float16"}
    attention_vjp(*arrays[:3], **options)[1](arrays[3])
    fake.cuda.Device().synchronize()
    stream = fake.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        out, pullback = attention_vjp(*arrays[:3], **options)
        found = [out, *pullback(arrays[3])]
        graph = stream.end_capture()
        for _ in range(3):
            others = [fake.full(1 << n, np.nan, np.float32) for n in range(4, 14) for _ in range(4)]
            graph.launch(stream)
            stream.synchronize()
            want, back = attention_vjp(*host[:3], layout="bshd")
            for x, y in zip(found, (want, *back(host[3])), strict=True):
                np.testing.assert_allclose(x.get(), y, atol=0.05)
            arrays[0] *= np.float32(0.5)
            host[0] *= np.float32(0.5)
        del others
    get_plan_cache().clear()
    assert library().forget_plans() == 2  # those of the captured graph


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_on_a_gpu(dtype, kind, cupy):
    """Both passes, repeatedly and in a captured CUDA graph; what is returned has the caller's dtype."""
    rng = np.random.default_rng(0)
    host = [rng.standard_normal((2, 4, 77, 64)).astype(dtype) for _ in range(4)]
    options = {"layout": "bhsd", "causal": True}
    arrays = [cupy.asarray(x) for x in host]

    def check(found):
        want, pullback = attention_vjp(*host[:3], **options)
        for x, y in zip(found, (want, *pullback(host[3])), strict=True):
            assert x.dtype == np.dtype(dtype)
            np.testing.assert_allclose(x.get(), y, atol=0.03 * max(1, np.abs(y).max()))
        for x, y in zip(arrays, host, strict=True):
            x *= -0.75
            y *= -0.75

    for _ in range(6):
        out, pullback = attention_vjp(*arrays[:3], compute_dtype=kind, **options)
        check((out, *pullback(arrays[3])))
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        out, pullback = attention_vjp(*arrays[:3], compute_dtype=kind, **options)
        found = [out, *pullback(arrays[3])]
        graph = stream.end_capture()
        for _ in range(3):
            junk = [cupy.full(1 << n, np.nan, np.float32) for n in range(8, 18) for _ in range(4)]
            graph.launch(stream)
            check(found)
    del junk
