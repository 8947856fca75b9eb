"""Draw who holds and computes what in a group: ``python tools/parallel_pictures.py`` writes ``docs/_static/parallel/*.svg``.

The pictures are made from the layouts and calls that the package uses, for four members.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cupy_sdpa.core.options.band import Band
from cupy_sdpa.parallel.parts import tiles
from cupy_sdpa.parallel.shards import ShardLayout

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "_static" / "parallel"
MEMBERS, LENGTH, CELL = 4, 16, 22
#: The colors of the members.
COLORS = ("#1b6ca8", "#d1603d", "#3a8f5c", "#8458a8")
NOTHING = "#88888822"


class Picture:
    """A drawing of squares and text.

    Args:
        width, height: the size.
    """

    def __init__(self, width: int, height: int) -> None:
        size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        self.parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">']

    def square(self, x: int, y: int, color: str, label: str = "", opacity: float = 1.0) -> None:
        """A square with a label."""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{CELL - 1}" height="{CELL - 1}" fill="{color}" fill-opacity="{opacity:.2f}"/>'
        )
        if label:
            self.text(x + CELL // 2, y + CELL // 2 + 4, label, "#ffffff", "middle")

    def text(self, x: int, y: int, label: str, color: str = "#777777", anchor: str = "start") -> None:
        """A label."""
        self.parts.append(f'<text x="{x}" y="{y}" fill="{color}" text-anchor="{anchor}">{label}</text>')

    def __str__(self) -> str:
        return "\n".join([*self.parts, "</svg>\n"])


def owners() -> np.ndarray:
    """Return the member of every position."""
    layout, found = ShardLayout((LENGTH,), MEMBERS), np.zeros(LENGTH, int)
    for rank in range(MEMBERS):
        found[layout.positions(rank)] = rank
    return found


def zigzag() -> Picture:
    """Return the positions of a sequence, and the member that holds each of them."""
    picture = Picture(LENGTH * CELL + 90, 2 * CELL)
    picture.text(0, CELL, "position")
    picture.text(0, 2 * CELL - 6, "member")
    for position, rank in enumerate(owners()):
        picture.text(90 + position * CELL + CELL // 2, CELL - 6, str(position), anchor="middle")
        picture.square(90 + position * CELL, CELL, COLORS[rank], str(rank))
    return picture


def computed(method: str) -> Picture:
    """Queries (rows) and keys (columns): the color is the member that computes, the number the step."""
    picture, layout, band = Picture((LENGTH + 2) * CELL, (LENGTH + 2) * CELL), ShardLayout((LENGTH,), MEMBERS), Band(right=0)
    for i, rank in enumerate(owners()):
        picture.square(0, (i + 2) * CELL, COLORS[rank], str(rank))
        picture.square((i + 2) * CELL, 0, COLORS[rank], str(rank))
        for j in range(LENGTH):
            picture.square((j + 2) * CELL, (i + 2) * CELL, NOTHING)
    for rank in range(MEMBERS):
        for step in range(MEMBERS):
            source = (rank - step) % MEMBERS
            rows, keys = layout.positions(rank), layout.positions(source)
            for part in tiles(layout.intervals(rank)[0], layout.intervals(source)[0], 0, band, joined=True):
                for i in rows[slice(*part.rows)]:
                    for j in keys[slice(*part.keys)]:
                        if j <= i:
                            x, y = (int(j) + 2) * CELL, (int(i) + 2) * CELL
                            picture.square(x, y, COLORS[rank], str(step) if method == "ring" else "", 0.85)
    return picture


def heads() -> Picture:
    """Positions (columns) and heads (rows), before and after the exchange."""
    count, gap = 8, 3 * CELL
    picture = Picture(2 * LENGTH * CELL + gap, (count + 1) * CELL)
    picture.text(0, CELL - 6, "before: all heads of a member's positions")
    picture.text(LENGTH * CELL + gap, CELL - 6, "after: all positions of a member's heads")
    picture.text(LENGTH * CELL + gap // 2, (count // 2 + 1) * CELL, "→", anchor="middle")
    for head in range(count):
        for position, rank in enumerate(owners()):
            picture.square(position * CELL, (head + 1) * CELL, COLORS[rank], str(rank))
            own = head * MEMBERS // count
            picture.square(LENGTH * CELL + gap + position * CELL, (head + 1) * CELL, COLORS[own], str(own))
    return picture


def drawn() -> dict[str, str]:
    """Return the pictures by their names."""
    made = {"zigzag": zigzag(), "ring": computed("ring"), "all_gather": computed("all_gather"), "all_to_all": heads()}
    return {name: str(picture) for name, picture in made.items()}


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in drawn().items():
        (FOLDER / f"{name}.svg").write_text(text, encoding="utf-8")
