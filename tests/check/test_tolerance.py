"""The tolerance policy rejects wrong results of the kinds that attention code produces."""

import numpy as np
import pytest
from engines import Engine
from tolerance import assert_close, rounding_floor, worst

from cupy_sdpa import attention, reference


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
    q, k, v = (Engine("numpy", np).normal(n, 64, heads, 96, 2, dtype=dtype) for n, heads in enumerate((4, 2, 2)))
    truth, _ = reference.attention(q, k, v, causal=True)
    naive = right(q, k, v)
    assert_close(naive, truth, naive)
    with pytest.raises(AssertionError, match="error"):
        assert_close(wrong(q, k, v), truth, naive)


def test_the_floor_is_of_the_size_of_rounding():
    """The floor is a few units in the last place."""
    values = np.linspace(-1, 1, 1001)
    for name, unit in (("float16", 2.0**-10), ("bfloat16", 2.0**-7)):
        assert 0 < rounding_floor(values, np.dtype(name)) <= 4 * unit


def test_worst_of_infinities_and_nan():
    """Equal infinities differ by 0; NaN differs from everything by inf."""
    assert worst([-np.inf, 1], [-np.inf, 1]) == 0
    assert worst([np.nan], [0]) == np.inf
    assert worst([np.nan], [np.nan]) == np.inf
    assert worst([-np.inf], [0]) == np.inf
