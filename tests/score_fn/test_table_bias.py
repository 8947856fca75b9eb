"""Learned tables as a bias: the gathered elements, and the gradient of the table, on every engine."""

import numpy as np
import pytest
from engines import every_engine

from cupy_sdpa import attention, attention_vjp, zoo

D, H, SQ, SKV, B = 8, 4, 21, 18, 2


@every_engine
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_gradient_of_a_table(dtype, engine):
    """The bias has the elements of the index, and the gradient of the table is the sum over the pairs that read it."""
    index = np.clip(np.arange(SQ) - np.arange(SKV)[:, None], -4, 4) + 4
    q, k, v = (engine.normal(n, D, H, length, B) for n, length in enumerate((SQ, SKV, SKV)))
    table = np.random.default_rng(3).standard_normal((9, H)).astype(dtype)
    bias, scatter = zoo.table_bias(engine.put(table), index)
    np.testing.assert_array_equal(engine.get(bias)[..., 0], table[index])
    assert bias.dtype == dtype
    out, pullback = attention_vjp(q, k, v, bias=bias, return_dbias=True, **engine.options)
    dbias = pullback(engine.normal(9, *out.shape))[-1]
    wanted = np.zeros((9, H))
    np.add.at(wanted, index, engine.get(dbias)[..., 0].astype(np.float64))
    found = scatter(dbias)
    assert found.dtype == np.float32
    np.testing.assert_allclose(engine.get(found), wanted, rtol=1e-6, atol=1e-6)


def test_the_gradient_is_that_of_differences():
    """In float64 it agrees with finite differences of the output."""
    q, k, v = (np.random.default_rng(n).standard_normal((D, H, SQ, B)).copy("F") for n in range(3))
    rng = np.random.default_rng(3)
    table, step, dout = rng.standard_normal((8, H)), rng.standard_normal((8, H)), rng.standard_normal(q.shape).copy("F")
    plus, minus = (
        (attention(q, k, v, bias=zoo.t5_bias(table + t * step, SQ, SQ, max_distance=12)[0]) * dout).sum() for t in (1e-5, -1e-5)
    )
    bias, scatter = zoo.t5_bias(table, SQ, SQ, max_distance=12)
    _, pullback = attention_vjp(q, k, v, bias=bias, return_dbias=True)
    gradient = scatter(pullback(dout)[-1])
    assert gradient.dtype == np.float64
    np.testing.assert_allclose((gradient * step).sum(), (plus - minus) / 2e-5, rtol=1e-6)


def test_the_axes_of_another_layout():
    """The transpose of the bias is the bias with layout="bhsd"."""
    q, k, v = (np.random.default_rng(n).standard_normal((B, H, SQ, D)) for n in range(3))
    bias, _ = zoo.t5_bias(np.random.default_rng(3).standard_normal((32, H)), SQ, SQ, bidirectional=False)
    out = attention(q, k, v, bias=bias.T, layout="bhsd", causal=True)
    own = (np.asfortranarray(x.transpose(3, 1, 2, 0)) for x in (q, k, v))
    np.testing.assert_allclose(out.transpose(3, 1, 2, 0), attention(*own, bias=bias, causal=True), atol=1e-12)


@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (32, 256), (64, 128), (8, 20)])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets_of_t5(bidirectional, buckets, max_distance):
    """They agree with the formula with logarithms in float32, as implementations of T5 compute it."""
    distance = np.arange(-1000, 1001)
    side = buckets // 2 if bidirectional else buckets
    exact = side // 2
    n = abs(distance) if bidirectional else np.maximum(-distance, 0)
    large = np.log(np.maximum(n, 1).astype(np.float32) / np.float32(exact)) / np.float32(np.log(max_distance / exact))
    large = np.minimum(exact + (large * np.float32(side - exact)).astype(int), side - 1)
    wanted = np.where(n < exact, n, large) + (distance > 0) * side * bidirectional
    np.testing.assert_array_equal(zoo.t5_bucket(distance, bidirectional, buckets, max_distance), wanted)


def test_the_index_of_swin():
    """It is the sum of the distances along both axes, as the reference implementation of Swin computes it."""
    height, width = 3, 4
    y, x = (axis.reshape(-1) for axis in np.mgrid[:height, :width])
    index = (y[:, None] - y + height - 1) * (2 * width - 1) + (x[:, None] - x + width - 1)  # of query and key
    table = np.random.default_rng(3).standard_normal(((2 * height - 1) * (2 * width - 1), H))
    bias, _ = zoo.swin_bias(table, height, width)
    np.testing.assert_array_equal(bias[..., 0], table[index].transpose(1, 0, 2))
