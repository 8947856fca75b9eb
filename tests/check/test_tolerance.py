"""The tolerance policy rejects wrong results of the kinds that attention code produces."""

from typing import Any

import numpy as np
import pytest
from cases import DTYPES, Case
from tolerance import accumulation_floor, assert_close, sinks_floor, worst

from cupy_sdpa import attention, reference

CASE = Case("oracle", d=64, hq=4, hkv=2, sq=96, causal=True)


def right(q, k, v):
    """The correct result."""
    return attention(q, k, v, causal=True)


def late_mask(q, k, v):
    """The diagonal is off by one: query i does not attend to key i."""
    out = right(q, k, v).copy()
    shifted = attention(q[:, :, 1:], k[:, :, :-1], v[:, :, :-1], causal=True)
    out[:, :, 1:] = shifted
    return out


def early_mask(q, k, v):
    """The diagonal is off by one: query i attends to key i + 1."""
    pad = np.zeros_like(q[:, :, :1])
    return attention(np.concatenate([pad, q], axis=2), k, v, causal=True)[:, :, 1:]


def lost_scale(q, k, v):
    """No scale."""
    return attention(q, k, v, causal=True, scale=1.0)


def swapped_heads(q, k, v):
    """Query heads use the wrong key heads."""
    return attention(q, k[:, ::-1], v[:, ::-1], causal=True, layout="dhsb")


def no_mask(q, k, v):
    """The mask is missing."""
    return attention(q, k, v)


def one_wrong_tile(q, k, v):
    """Sixteen rows of one head of one batch entry are those of others."""
    out = right(q, k, v).copy()
    out[:, 3, 32:48, 1] = out[:, 3, 48:64, 1]
    return out


def one_nan(q, k, v):
    """One element is NaN."""
    out = right(q, k, v).copy()
    out[5, 0, 7, 0] = np.nan
    return out


def zeros(q, k, v):
    """Nothing is written."""
    return np.zeros_like(right(q, k, v))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "wrong",
    [late_mask, early_mask, lost_scale, swapped_heads, no_mask, one_wrong_tile, one_nan, zeros],
    ids=lambda f: f.__name__,
)
def test_wrong_results_are_rejected(wrong, dtype):
    """Each mistake is far outside the tolerance."""
    q, k, v = CASE.with_dtype(dtype).arrays()
    truth, _ = reference.attention(q, k, v, causal=True)
    naive = right(q, k, v)
    assert_close(naive, truth, naive)
    with pytest.raises(AssertionError, match="error"):
        assert_close(wrong(q, k, v), truth, naive)


#: Mistakes of each of the results whose floor is not that of rounding.
OTHERS: dict[str, list[Any]] = {
    "stats": [lambda x: x / np.log(2), lambda x: x + 1e-4, lambda x: x[:, ::-1], np.zeros_like],
    "dsinks": [np.negative, lambda x: 0.9 * x, lambda x: x[::-1], np.zeros_like],
}


@pytest.mark.parametrize(("name", "wrong"), [(name, wrong) for name, mistakes in OTHERS.items() for wrong in mistakes])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_wrong_statistics_are_rejected(name, wrong, dtype):
    """The floors of float32 accumulation and of the rounded output are far below any mistake."""
    case = CASE.with_dtype(dtype)
    q, k, v = case.arrays()
    dout, known = case.dout(), {"causal": True, "sinks": np.linspace(-1, 2, 4)}
    out, stats = reference.attention(q, k, v, **known)
    if name == "stats":
        truth, floor = stats, accumulation_floor(q, k, case.tau, stats)
        _, naive = attention(q, k, v, causal=True, sinks=known["sinks"].astype(np.float32), return_stats=True)
    else:
        *_, truth = reference.attention_backward(dout, q, k, v, **known, return_dsinks=True)
        floor, rounded = sinks_floor(dout, out, stats, known["sinks"]), out.astype(q.dtype).astype(np.float64)
        weights = np.exp(known["sinks"][:, None, None] - stats.swapaxes(0, 1))
        naive = -(weights * (dout.astype(np.float64) * rounded).sum(axis=0)).sum(axis=(1, 2))
    assert_close(naive, truth, truth, floor)
    with pytest.raises(AssertionError, match="error"):
        assert_close(wrong(naive), truth, truth, floor)


def test_the_floor_of_sinks_is_the_same_for_packed_arrays():
    """The same values, padded and packed."""
    rng = np.random.default_rng(0)
    dout, out = (rng.standard_normal((8, 4, 20, 3)).astype(np.float16) for _ in range(2))
    stats, sinks = rng.standard_normal((20, 4, 3)), rng.standard_normal(4)
    packed = [x.reshape(8, 4, -1, order="F") for x in (dout, out)]
    rows = stats.transpose(1, 0, 2).reshape(4, -1, order="F")
    np.testing.assert_allclose(sinks_floor(*packed, rows, sinks), sinks_floor(dout, out, stats, sinks))


def test_the_floor_is_of_the_size_of_rounding():
    """The floor is a few units in the last place."""
    from tolerance import rounding_floor

    values = np.linspace(-1, 1, 1001)
    for name, unit in (("float16", 2.0**-10), ("bfloat16", 2.0**-7)):
        assert 0 < rounding_floor(values, DTYPES[name]) <= 4 * unit


def test_worst_of_infinities_and_nan():
    """Equal infinities differ by 0; NaN differs from everything by inf."""
    assert worst([-np.inf, 1], [-np.inf, 1]) == 0
    assert worst([np.nan], [0]) == np.inf
    assert worst([np.nan], [np.nan]) == np.inf
    assert worst([-np.inf], [0]) == np.inf
