"""The options of dropout: a probability, and either the state of a random number generator or the mask of kept weights."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

#: The options of dropout.
DROPOUT = ("dropout_p", "seed", "offset", "dropout_mask")


def read(options: Mapping[str, Any]) -> float:
    """Read the dropout probability; check that a seed or a mask is given with it, but not both."""
    p = options.get("dropout_p", 0.0)
    if not isinstance(p, numbers.Real):
        raise TypeError(f"dropout_p is {p!r}; it must be a number, the probability of dropping a weight, 0 for no dropout")
    if not 0 <= float(p) < 1:
        raise ValueError(f"dropout_p is {p}; it must be at least 0 and below 1")
    passed = [name for name in ("dropout_mask", "seed", "offset") if options.get(name) is not None]
    if not p and "dropout_mask" in passed:
        raise ValueError(
            "dropout_mask is given and dropout_p is 0: kept weights are divided by 1 - dropout_p, so also pass dropout_p"
        )
    if p and "dropout_mask" in passed and len(passed) > 1:
        raise ValueError(f"dropout_mask and {passed[1]} are given; the mask replaces random numbers: pass one of them")
    if p and not {"seed", "dropout_mask"} & set(passed):
        raise ValueError(f"dropout_p is {p} and seed is None: pass a seed, so that the backward pass drops the same weights")
    return float(p)
