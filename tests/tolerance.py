"""The tolerance policy: no tolerance is set by hand.

The rule is :func:`cupy_sdpa.check.comparison.compare`: the error of a result, with float64 as the truth, may be at most :data:`FACTOR`
times that of the naive computation in the same precision, plus a floor for rounding. The naive computation is this package's
interpreter in the declared precision.
"""

import numpy as np

from cupy_sdpa.check.comparison import FACTOR, compare, max_error

__all__ = ["FACTOR", "assert_close", "gradient_floor", "rounding_floor"]


def rounding_floor(truth, dtype) -> float:
    """The error of adding and subtracting a number in a dtype."""
    finite = np.where(np.isfinite(truth), truth, 0.0)
    rounded = finite.astype(dtype)
    moved = (rounded + dtype.type(0.3)).astype(dtype) - dtype.type(0.3)
    return 2 * max_error(moved.astype(dtype), finite)


def gradient_floor(dout, q, k, v, tau, truth, dtype) -> float:
    """The rounding error of a gradient: of the result, and of the difference dP - D.

    dP and D are sums of products of dout and v in float32. Where they cancel, as with a single key, only their rounding errors
    remain, times a row of q or k.
    """
    dout, q, k, v = (float(np.linalg.norm(x.astype(np.float64), axis=0).max(initial=0)) for x in (dout, q, k, v))
    cancelled = FACTOR * float(np.finfo(np.float32).eps) * dout * v * abs(tau) * max(q, k)
    return cancelled + rounding_floor(truth, dtype)


def assert_close(actual, truth, naive, floor=None) -> None:
    """Assert that ``actual`` is as near to the truth as its precision allows; ``floor`` is by default :func:`rounding_floor`."""
    actual, truth, naive = np.asarray(actual), np.asarray(truth), np.asarray(naive)
    floor = rounding_floor(truth, naive.dtype) if floor is None else floor
    assert np.isfinite(max_error(naive, truth) + floor), "the naive computation is wrong, or its floor is"
    message = compare("the result", actual, truth, naive, floor)
    assert not message, message
