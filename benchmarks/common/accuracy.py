"""The difference between two results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


class WrongResultError(ArithmeticError):
    """A contender's results differ from the expected ones."""


def largest_difference(results: Sequence[Any], expected: Sequence[Any]) -> float:
    """The largest difference divided by the largest magnitude, of the worst pair of arrays; NaN if a result has one.

    Raises:
        WrongResultError: two shapes differ.
    """
    worst = 0.0
    for a, b in zip(results, expected, strict=True):
        if a.shape != b.shape:
            raise WrongResultError(f"a result has the shape {a.shape}, the expected one {b.shape}")
        a, b = a.astype("float32"), b.astype("float32")
        difference = float(abs(a - b).max() / abs(b).max())
        if not difference <= worst:  # keeps NaN
            worst = difference
        if math.isnan(worst):
            return worst
    return worst
