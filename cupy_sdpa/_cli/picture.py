"""The picture of the demo: who attends to whom, for a passage of the text, in two heads side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import machine
from .console import CommandError

#: Tokens of the passage.
WINDOW = 40


def importable() -> bool:
    """Whether matplotlib is there."""
    return not isinstance(machine.imported("matplotlib.figure"), str)


def window(words: int, place: int) -> NDArray[np.intp]:
    """The passage around a place of a text of so many words."""
    start = max(0, min(place - WINDOW // 2, words - WINDOW))
    return np.arange(start, min(start + WINDOW, words))


def draw(path: Path, words: Sequence[str], maps: Sequence[tuple[str, NDArray[Any]]], heading: str) -> None:
    """Write the picture of attention maps.

    Args:
        path: where to; its ending says the format.
        words: of the passage.
        maps: of every head, its name and its weights, ``(words, words)``: a row is a query.
        heading: above it all.

    Raises:
        CommandError: it cannot be written.
    """
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9 * len(maps), 8.5), layout="constrained")
    figure.suptitle(heading, fontsize=15)
    for axes, (name, weights) in zip(np.atleast_1d(figure.subplots(1, len(maps))), maps, strict=True):
        # A token attends to itself most; the colours are for what it attends to beside that.
        beside = weights[~np.eye(len(words), dtype=bool)]
        image = axes.imshow(weights, cmap="Blues", norm=PowerNorm(0.5, 0, beside.max(initial=0) or 1))
        axes.set_title(name, fontsize=13)
        axes.set_xticks(range(len(words)), words, rotation=90, fontsize=9)
        axes.set_yticks(range(len(words)), words, fontsize=9)
        axes.set_xlabel("attended to (key)")
        axes.set_ylabel("attends (query)")
        figure.colorbar(image, ax=axes, shrink=0.7, extend="max", label="attention weight")
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:  # ValueError: no such format
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CommandError(f"cannot write {path}: {reason}") from error
