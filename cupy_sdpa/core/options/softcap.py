"""The option ``softcap``: scores become ``c tanh(S / c)``. It is passed by value; a plan depends on whether it is given."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..score_fn.mask_analysis import MASKED_SCORE
from .option import ScoreInputs
from .values import LARGEST, SMALLEST, read_number


def read(options: Mapping[str, Any]) -> float | None:
    """Read the soft cap; None for no cap."""
    softcap = options.get("softcap")
    if softcap is None:
        return None
    value = read_number("softcap", softcap, advice=", or None for no cap")
    if not SMALLEST <= value <= LARGEST:
        raise ValueError(f"softcap is {softcap}; it must be above 0 and finite in float32, or None for no cap")
    return value


def is_given(softcap: float | None) -> bool:
    """True if scores are capped."""
    return softcap is not None


def change(score: Any, inputs: ScoreInputs) -> Any:
    """``S <- c tanh(S / c)``, and -inf where a score function masks: the softcap of a masked score would be finite."""
    cap = inputs.number("softcap")
    capped = cap * np.tanh(score / cap)
    return np.where(score <= inputs.constant(MASKED_SCORE), -math.inf, capped) if inputs.may_mask else capped
