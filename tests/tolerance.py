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


def accumulation_floor(q, k, tau, truth, added=0.0) -> float:
    """What accumulating in float32 may do to a score, and so to the log-sum-exp, whatever the order and the rounding.

    An epsilon of the sum of magnitudes (by Cauchy and Schwarz at most |q| |k|, and what is ``added``) and of the result. numpy adds in pairs and
    rounds to nearest; tensor cores truncate, so their error is not bounded by a multiple of numpy's.
    """
    q, k = (np.linalg.norm(x.astype(np.float64), axis=0).max() for x in (q, k))
    finite = np.abs(truth[np.isfinite(truth)])
    return FACTOR * float(np.finfo(np.float32).eps) * (abs(tau) * q * k + added + finite.max(initial=0))


def gradient_floor(dout, q, k, v, tau, truth, dtype) -> float:
    """What rounding alone may do to a gradient: to the result, and to the difference dP - D that it is made from.

    dP and D are sums of products of dout and v, in float32; where they cancel, as with a single key, only their rounding is
    left, times a row of q or k.
    """
    dout, q, k, v = (float(np.linalg.norm(x.astype(np.float64), axis=0).max(initial=0)) for x in (dout, q, k, v))
    cancelled = FACTOR * float(np.finfo(np.float32).eps) * dout * v * abs(tau) * max(q, k)
    return cancelled + rounding_floor(truth, dtype)


def sinks_floor(dout, out, stats, sinks) -> float:
    """What rounding the output does to the gradient of a sink, ``-sum exp(sink - L) dout * out``.

    A head has one such number, so the naive computation may be right by luck. Roundings are independent: their sum is of the
    size of the root of the sum of squares (Higham and Mary 2019, "A new approach to probabilistic rounding error analysis").
    ``out`` and ``stats`` are the true ones; all are of padded arrays, or all of packed ones.
    """
    left = np.where(np.isfinite(stats), stats, np.inf)
    left = left.swapaxes(0, 1) if left.ndim == 3 else left  # (Hq, Sq, B) or (Hq, Tq)
    sinks = np.asarray(sinks, np.float64).reshape(-1, *(1,) * (left.ndim - 1))
    terms = (np.exp(sinks - left) * dout.astype(np.float64) * out) ** 2
    of_heads = np.sqrt(terms.sum(axis=(0, *range(2, terms.ndim))))
    return FACTOR * float(of_heads.max()) * float(np.spacing(dout.dtype.type(1))) / 2


def assert_close(actual, truth, naive, floor=None) -> None:
    """Fail unless ``actual`` is as near to the truth as its precision allows.

    Args:
        actual: the result in question.
        truth: float64.
        naive: the plain computation in the precision of ``actual``.
        floor: what rounding alone can do; by default what it does to the truth.
    """
    actual, naive = np.asarray(actual), np.asarray(naive)
    if floor is None:
        floor = rounding_floor(truth, naive.dtype)
    assert actual.shape == np.shape(truth), f"shape {actual.shape}, expected {np.shape(truth)}"
    error, allowed = worst(actual, truth), FACTOR * worst(naive, truth) + floor
    assert np.isfinite(allowed), "the naive computation is wrong, or its floor is"
    assert error <= allowed, f"error {error:.3e}, allowed {allowed:.3e} (naive computation {worst(naive, truth):.3e})"
