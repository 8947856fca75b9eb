"""Whether a result is within the tolerance: flash-attention's rule, with a floor for rounding errors.

The allowed error is :data:`FACTOR` times the error of the naive computation in the same precision, plus the floor. Both errors
are relative to a computation in float64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray  # slow to import

    Array = NDArray[Any]

#: The factor of the naive computation's error.
FACTOR = 2.0
#: The number of standard deviations of the propagated error in the floor.
DEVIATIONS = 4.0
#: The relative spacing of float32.
SINGLE = float(np.finfo(np.float32).eps)
#: The relative error of a score from the approximate functions of a GPU, such as tanh.
APPROXIMATE = 2.0**-10
#: The error of a sum of FP8 products relative to the norms. Tensor cores truncate every addend to about 13 bits below the
#: leading one of the largest (DeepSeek-AI 2024, "DeepSeek-V3 technical report", section 3.3.2). The error of rows with one key
#: is up to 1.2 of this for normal numbers, and much smaller for rows with many keys.
FP8_SUM = 2.0**-13


def spacing(dtype: Any) -> float:
    """Return the relative spacing of a dtype."""
    return float(np.spacing(np.dtype(dtype).type(1)))


def max_error(a: Array, b: Array) -> float:
    """Return the largest absolute difference, see :func:`abs_errors`."""
    return float(abs_errors(a, b).max(initial=0.0))


def abs_errors(a: Array, b: Array) -> Array:
    """Return the absolute differences; 0 for equal infinities, inf where either is NaN."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        errors = np.where(a == b, 0.0, np.abs(a - b))
    return np.where(np.isnan(errors), np.inf, errors)


def compare(name: str, actual: Array, truth: Array, naive: Array, floor: float, exact: Array | None = None) -> str:
    """Return an error message with the name of a result; empty if it is within the tolerance.

    ``floor`` is the error that rounding may cause, ``exact`` are the elements that must equal the truth.
    """
    if actual.shape != truth.shape:
        return f"{name} has shape {actual.shape}, expected {truth.shape}"
    errors = abs_errors(actual, truth)
    if exact is not None and (errors[exact] > 0).any():
        wrong = exact & (errors > 0)
        return f"{name} must be exactly {_first_value(truth, wrong)}: {_first_element(actual, wrong)}"
    allowed = FACTOR * max_error(naive, truth) + floor
    if not np.isfinite(allowed):
        allowed = FACTOR * max_error(np.where(np.isfinite(naive), naive, truth), truth) + floor
    if (error := float(errors.max(initial=0.0))) <= allowed:
        return ""
    wrong = errors > allowed
    return (
        f"{name} has an error of {error:.3g}, allowed {allowed:.3g}; {int(wrong.sum())} of {wrong.size} elements are wrong: "
        f"{_first_element(actual, wrong)}, expected {_first_value(truth, wrong)}"
    )


def _first_index(wrong: Array) -> tuple[int, ...]:
    """Return the index of the first True element in Fortran order."""
    flat = int(np.argmax(wrong.ravel(order="F")))
    return tuple(int(i) for i in np.unravel_index(flat, wrong.shape, order="F"))


def _first_element(actual: Array, wrong: Array) -> str:
    index = _first_index(wrong)
    return f"the first is element {index}, {float(actual[index]):.6g}"


def _first_value(truth: Array, wrong: Array) -> str:
    return f"{float(truth[_first_index(wrong)]):.6g}"
