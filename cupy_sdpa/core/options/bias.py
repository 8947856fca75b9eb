"""The options ``bias``, an array that is added to the scores, and ``bias_repeats``, the batch items that share one bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .option import ScoreInputs
from .values import optional_count


def change(score: Any, inputs: ScoreInputs) -> Any:
    """``S <- S + bias``."""
    return score + inputs.array("bias")


def read_repeats(options: Mapping[str, Any]) -> int | None:
    """Read ``bias_repeats``; ValueError without a bias."""
    if options.get("bias_repeats") is None:
        return None
    repeats = optional_count("bias_repeats", "the number of consecutive batch items that share a bias", least=1)(options)
    if options.get("bias") is None:
        raise ValueError(f"bias_repeats is {repeats} and bias is None: pass bias=, of (Skv, Sq, Hq, B / {repeats})")
    return repeats
