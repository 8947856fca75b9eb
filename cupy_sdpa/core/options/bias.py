"""The option ``bias``: an array that is added to the scores."""

from __future__ import annotations

from typing import Any

from .option import ScoreInputs


def change(score: Any, inputs: ScoreInputs) -> Any:
    """``S <- S + bias``."""
    return score + inputs.array("bias")
