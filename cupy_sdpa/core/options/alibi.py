"""The option ``alibi_slopes``: the distance of a key from the diagonal lowers the score, by a slope for each head.

Source: Press et al. 2022, "Train Short, Test Long", section 3.
"""

from __future__ import annotations

from typing import Any

from .option import ScoreInputs


def change(score: Any, inputs: ScoreInputs) -> Any:
    """``S <- S − slope |p − j|`` with the key p on the diagonal of the query."""
    slope, distance = inputs.array("alibi_slopes"), inputs.distance()
    # a causal mask hides the keys after the diagonal: p - j is not negative
    hidden = inputs.band is not None and inputs.band.right == 0
    return score - slope * (distance if hidden else abs(distance))
