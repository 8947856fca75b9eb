"""The one tolerance policy: no tolerance is set by hand.

The fused result may be at most :data:`FACTOR` times as far from the truth as the naive computation in the same precision,
plus what rounding alone can do; the truth is float64. The rule is flash-attention's (tests/test_flash_attn.py there). The
naive computation is this package's interpreter in the declared precision.
"""

import numpy as np

#: How many times the naive computation's error is accepted.
FACTOR = 2


def worst(a, b) -> float:
    """The largest difference; equal infinities differ by nothing, and a NaN is infinitely far from everything."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    with np.errstate(invalid="ignore"):
        gap = np.where(a == b, 0.0, np.abs(a - b))
    return float(np.max(np.where(np.isnan(gap), np.inf, gap), initial=0.0))


def rounding_floor(truth, dtype) -> float:
    """What arithmetic in a dtype does to the truth by merely adding and taking away a number."""
    finite = np.where(np.isfinite(truth), truth, 0.0)
    rounded = finite.astype(dtype)
    moved = (rounded + dtype.type(0.3)).astype(dtype) - dtype.type(0.3)
    return 2 * worst(moved.astype(dtype), finite)


def assert_close(actual, truth, naive) -> None:
    """Fail unless ``actual`` is as near to the truth as its precision allows.

    Args:
        actual: the result in question.
        truth: float64.
        naive: the plain computation in the precision of ``actual``.
    """
    actual, naive = np.asarray(actual), np.asarray(naive)
    assert actual.shape == np.shape(truth), f"shape {actual.shape}, expected {np.shape(truth)}"
    error, allowed = worst(actual, truth), FACTOR * worst(naive, truth) + rounding_floor(truth, naive.dtype)
    assert error <= allowed, f"error {error:.3e}, allowed {allowed:.3e} (naive computation {worst(naive, truth):.3e})"
