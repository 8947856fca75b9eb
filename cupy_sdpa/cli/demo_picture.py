"""The figure of the demo: attention maps of a passage of the text, one for each head."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import machine
from .console import CommandError

#: The number of tokens in the passage.
WINDOW = 40


def importable() -> bool:
    """Whether matplotlib can be imported."""
    return not isinstance(machine.imported("matplotlib.figure"), str)


def window(count: int, position: int) -> NDArray[np.intp]:
    """The positions of the passage around a given position, in a text of ``count`` tokens."""
    start = max(0, min(position - WINDOW // 2, count - WINDOW))
    return np.arange(start, min(start + WINDOW, count))


def draw(path: Path, words: Sequence[str], maps: Sequence[tuple[str, NDArray[Any]]], heading: str) -> None:
    """Write the figure with a heading, in the format of the file: the title and the weights ``(queries, keys)`` of each head.

    Raises:
        CommandError: the file cannot be written.
    """
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9 * len(maps), 8.5), layout="constrained")
    figure.suptitle(heading, fontsize=15)
    for axes, (name, weights) in zip(np.atleast_1d(figure.subplots(1, len(maps))), maps, strict=True):
        # A token attends to itself most, so the color scale covers the other weights only.
        others = weights[~np.eye(len(words), dtype=bool)]
        image = axes.imshow(weights, cmap="Blues", norm=PowerNorm(0.5, 0, others.max(initial=0) or 1))
        axes.set_title(name, fontsize=13)
        axes.set_xticks(range(len(words)), words, rotation=90, fontsize=9)
        axes.set_yticks(range(len(words)), words, fontsize=9)
        axes.set_xlabel("key")
        axes.set_ylabel("query")
        figure.colorbar(image, ax=axes, shrink=0.7, extend="max", label="attention weight")
    drawn = io.BytesIO()
    try:
        figure.savefig(drawn, dpi=110, format=path.suffix[1:] or "png")
        path.write_bytes(drawn.getvalue())  # at once, so that an interrupted command leaves no part of a figure
    except (OSError, ValueError) as error:  # ValueError: unknown format
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CommandError(f"cannot write {path}: {reason}") from error
