"""A caller's own score and mask functions: against dense arrays, planned, on the GPU, and what they are keyed by."""

import math

import numpy as np
import pytest
from cases import DTYPES
from functions import HKV, HQ, OPERATIONS, ZOO, B, D, S, dense_attention, dense_gradients
from on_gpu import poisoned, poisoning
from tolerance import accumulation_floor, assert_close, gradient_floor

from cupy_sdpa import attention, attention_backward

SCALE = 1 / math.sqrt(D)


def arrays(dtype="float64", s=S, d=D):
    """q, k, v and dout."""
    rng = np.random.default_rng(3)
    shapes = ((d, HQ, s, B), (d, HKV, s, B), (d, HKV, s, B), (d, HQ, s, B))
    return [np.asfortranarray(rng.standard_normal(shape).astype(DTYPES[dtype])) for shape in shapes]


@pytest.mark.parametrize("functions", [*ZOO, *OPERATIONS], ids=str)
def test_a_function_is_what_it_says(functions):
    """The graph of a function gives what calling it with whole arrays gives; its gradients, what differences give."""
    q, k, v, dout = arrays()
    options = functions.options()
    out, stats = attention(q, k, v, return_stats=True, **options)
    wanted, of_rows = dense_attention(q, k, v, SCALE, options)
    np.testing.assert_allclose(out, wanted, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(stats, of_rows, rtol=1e-6, atol=1e-6)
    got = attention_backward(dout, q, k, v, wanted, of_rows.astype(np.float32, order="F"), **options)
    for a, b in zip(got, dense_gradients(dout, q, k, v, SCALE, options, functions.slope), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("functions", [*ZOO, *OPERATIONS], ids=str)
def test_a_function_is_right_on_the_gpu(functions, dtype, cupy):
    """Both passes, within the tolerance policy, every element written."""
    q, k, v, dout = arrays(dtype, 200, 64)
    known, on_gpu = (functions.options(xp, q=200, kv=200) for xp in (np, cupy))
    truth, of_rows = dense_attention(q, k, v, 1 / 8, known)
    naive, naive_rows = attention(q, k, v, return_stats=True, **known)
    here = [cupy.asarray(x) for x in (q, k, v)]
    out, stats = poisoned(cupy, truth.shape, q.dtype), poisoned(cupy, of_rows.shape, np.float32)
    with poisoning(cupy):
        attention(*here, out=out, stats=stats, **on_gpu)
    assert_close(cupy.asnumpy(out), truth, naive)
    assert_close(cupy.asnumpy(stats), of_rows, naive_rows, accumulation_floor(q, k, 1 / 8, of_rows, 40.0))
    given = {name: poisoned(cupy, x.shape, x.dtype) for name, x in zip(("dq", "dk", "dv"), (q, k, v), strict=True)}
    with poisoning(cupy):
        got = attention_backward(cupy.asarray(dout), *here, out, stats, **on_gpu, **given)
    wanted = dense_gradients(dout, q, k, v, 1 / 8, known, functions.slope)
    other = attention_backward(dout, q, k, v, naive, naive_rows, **known)
    for a, b, c in zip(got, wanted, other, strict=True):
        assert_close(cupy.asnumpy(a), b, c, gradient_floor(dout, q, k, v, 1 / 8, b, c.dtype))
