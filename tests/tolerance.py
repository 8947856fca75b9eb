"""The tolerance policy: no tolerance is set by hand.

The error of a result, with float64 as the truth, may be at most :data:`FACTOR` times that of the naive computation in the same
precision, plus a floor for rounding. The rule is flash-attention's (its tests/test_flash_attn.py). The naive computation is
this package's interpreter in the declared precision.
"""

import numpy as np

#: The factor of the naive computation's error.
FACTOR = 2


def worst(a, b) -> float:
    """The largest absolute difference; 0 for equal infinities, inf if either is NaN."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    with np.errstate(invalid="ignore"):
        gap = np.where(a == b, 0.0, np.abs(a - b))
    return float(np.max(np.where(np.isnan(gap), np.inf, gap), initial=0.0))


def rounding_floor(truth, dtype) -> float:
    """The error of adding and subtracting a number in a dtype."""
    finite = np.where(np.isfinite(truth), truth, 0.0)
    rounded = finite.astype(dtype)
    moved = (rounded + dtype.type(0.3)).astype(dtype) - dtype.type(0.3)
    return 2 * worst(moved.astype(dtype), finite)


def gradient_floor(dout, q, k, v, tau, truth, dtype) -> float:
    """The rounding error of a gradient: of the result, and of the difference dP - D.

    dP and D are sums of products of dout and v in float32. Where they cancel, as with a single key, only their rounding errors
    remain, times a row of q or k.
    """
    dout, q, k, v = (float(np.linalg.norm(x.astype(np.float64), axis=0).max(initial=0)) for x in (dout, q, k, v))
    cancelled = FACTOR * float(np.finfo(np.float32).eps) * dout * v * abs(tau) * max(q, k)
    return cancelled + rounding_floor(truth, dtype)


def assert_close(actual, truth, naive, floor=None) -> None:
    """Assert that ``actual`` is as near to the truth as its precision allows.

    Args:
        actual: the result.
        truth: the result in float64.
        naive: the naive computation in the precision of ``actual``.
        floor: the error of rounding alone; by default :func:`rounding_floor`.
    """
    actual, naive = np.asarray(actual), np.asarray(naive)
    if floor is None:
        floor = rounding_floor(truth, naive.dtype)
    assert actual.shape == np.shape(truth), f"shape {actual.shape}, expected {np.shape(truth)}"
    error, allowed = worst(actual, truth), FACTOR * worst(naive, truth) + floor
    assert np.isfinite(allowed), "the naive computation is wrong, or its floor is"
    assert error <= allowed, f"error {error:.3e}, allowed {allowed:.3e} (naive computation {worst(naive, truth):.3e})"
