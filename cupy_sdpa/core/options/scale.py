"""The option ``scale``: the factor of the products of queries and keys. It is passed by value; a plan depends on its sign."""

from __future__ import annotations

import math
from typing import Any

from .values import LARGEST, SMALLEST, read_number


def read_scale(scale: Any, head_dim: int) -> float:
    """Read the scale; None is ``1/sqrt(head_dim)``."""
    default = 1 / math.sqrt(head_dim or 1)
    if scale is None:
        return default
    value = read_number(
        "scale", scale,
        advice=": convert an array of one element with float(...). attention, attention_backward, attention_vjp, prepare and "
        "explain also take a scale for each head, an array (Hq,), except in FP8; in other calls, multiply q by it and pass "
        "scale=1. With attention_jvp, also multiply dq by it",
    )  # fmt: skip
    if not abs(value) <= LARGEST:  # also true for NaN
        raise ValueError(f"scale is {value}; it must be finite in float32. None is 1/sqrt(head_dim) = {default:.6g}")
    return value


def is_positive(scale: float) -> bool:
    """True if a scale is a positive normal number, which cuDNN's kernels may apply in the exponent."""
    return scale >= SMALLEST
