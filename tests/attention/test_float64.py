"""float64 arrays are computed in float64, also their log-sum-exp and what is computed from it."""

import numpy as np
import pytest
from engines import numbers

from cupy_sdpa import (
    attention,
    attention_backward,
    attention_jvp,
    attention_vjp,
    block_mask,
    merge,
    nnlib,
    prepare,
    weight_entropy,
    weight_sums,
)

#: What is combined with an offset; everything else is drawn.
FEATURES = ("deterministic", "jvp", "weight_sums", "weight_entropy", "merge", "shared_prefix", "block_mask", "packed", "sinks")
interpreted = pytest.mark.parametrize(
    "engine", ["numpy", pytest.param("interpreted", marks=[pytest.mark.slow, pytest.mark.in_turn(2)])], indirect=True
)


@interpreted
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("number", numbers(6, quick=2))
def test_a_number_that_is_added_to_all_scores_changes_nothing(feature, number, engine):
    """With scores of 1e5 and -3e6 every result is as exact as float64 permits."""
    engine.agrees(engine.draw({"offset", feature}, number))


@pytest.mark.parametrize("engine", ["numpy"], indirect=True)
@pytest.mark.parametrize("number", numbers(6, quick=2))
def test_members_of_a_group_exchange_float64(number, engine):
    """Groups do not run with ``engine="cupy"``."""
    engine.agrees(engine.draw({"offset", "parallel"}, number))


def arrays(dtype, offset=0.0):
    """q, k, v and dout; the first elements of the head dim add the offset to every score."""
    q, k, v, dout = (np.random.default_rng(n).standard_normal((16, 2, 20, 1)).astype(dtype, order="F") for n in range(4))
    q[0], k[0] = 4 * offset, 1
    return q, k, v, dout


def log_sum_exps(q, k, v):
    """The log-sum-exp by every function that returns one, and the sums of weights, which have its dtype."""
    mask = block_mask(lambda b, h, i, j: i >= j, 20, 20)
    pair = [attention(q, k, v, return_stats=True)] * 2
    return {
        "attention": attention(q, k, v, return_stats=True)[1],
        "maximum": attention(q, k, v, return_stats="max_sumexp")[2],
        "sum": attention(q, k, v, return_stats="max_sumexp")[3],
        "block mask": attention(q, k, v, block_mask=mask, return_stats=True)[1],
        "prepare": prepare(q, k, v, return_stats=True)(q, k, v)[1],
        "derivative": attention_jvp(q, k, v, q, return_stats=True)[2],
        "merge": merge(*zip(*pair, strict=True), return_stats=True)[1],
        "sums of weights": weight_sums(q, k),
        "entropy": weight_entropy(q, k),
    }


@pytest.mark.parametrize(("dtype", "wanted"), [("float32", "float32"), ("float64", "float64")])
def test_the_log_sum_exp_is_float64_for_float64_arrays_only(dtype, wanted):
    """One rule for all functions."""
    q, k, v, _ = arrays(dtype)
    assert {name: x.dtype.name for name, x in log_sum_exps(q, k, v).items()} == dict.fromkeys(log_sum_exps(q, k, v), wanted)


@pytest.mark.parametrize(
    "options", [{}, {"block_mask": block_mask(lambda b, h, i, j: i >= j, 20, 20)}], ids=["dense", "blocks"]
)
def test_float32_statistics_of_float64_arrays_are_accepted(options):
    """They are written, and gradients computed from them have their precision."""
    q, k, v, dout = arrays("float64")
    stats = np.full((20, 2, 1), np.nan, np.float32, order="F")
    out, found = attention(q, k, v, stats=stats, **options)
    assert found is stats
    exact = attention(q, k, v, return_stats=True, **options)[1]
    np.testing.assert_array_equal(stats, exact.astype(np.float32))
    want = attention_backward(dout, q, k, v, out, exact, **options)
    for got, wanted in zip(attention_backward(dout, q, k, v, out, stats, **options), want, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-5)


def test_float32_statistics_do_not_limit_the_precision_of_a_derivative():
    """The array that the caller passes is a copy of the log-sum-exp that the derivative is computed from."""
    q, k, v, dk = arrays("float64", offset=1e5)
    dk[0] = 0
    stats = np.empty((20, 2, 1), np.float32, order="F")
    _, derivative, _ = attention_jvp(q, k, v, None, dk, None, stats=stats)
    wanted = attention_jvp(q, k, v, None, dk, None)[1]
    np.testing.assert_array_equal(derivative, wanted)
    np.testing.assert_allclose(stats, 1e5, rtol=1e-4)


def test_nnlib_computes_gradients_in_float64():
    """Its pullback keeps the log-sum-exp of the forward pass."""
    gradients = []
    for offset in (0, 1e5):
        q, k, v, dout = (x.reshape((32, 20, 1), order="F") for x in arrays("float64", offset))
        gradients.append(nnlib.dot_product_attention_vjp(q, k, v, nheads=2)[1](dout)[2])
    np.testing.assert_allclose(*gradients, atol=1e-9)


def test_gradients_are_exact_at_scores_of_1e5():
    """The example of the report: an offset of all scores does not change the gradient of v."""
    found = []
    for offset in (0, 1e5):
        q, k, v, dout = arrays("float64", offset)
        found.append(attention_vjp(q, k, v)[1](dout)[2])
    np.testing.assert_allclose(*found, atol=1e-9)
