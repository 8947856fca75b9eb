"""Draw the pictures of the tour (docs/start.md): ``python tools/tour_pictures.py`` writes ``docs/_static/tour/*.svg``.

The weights and the page table are computed by the package; the other pictures are boxes and arrows.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

import cupy_sdpa

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "_static" / "tour"
CELL = 14
BLUE, ORANGE, GREEN, PURPLE = "#1b6ca8", "#d9822b", "#3a8f5c", "#8458a8"
#: A grey for text and lines that is readable on light and dark pages.
GREY = "#777777"


class Picture:
    """An SVG of squares, boxes, arrows and text.

    Args:
        width, height: the size.
    """

    def __init__(self, width: int, height: int) -> None:
        size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        self.parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13">']

    def text(self, x: float, y: float, label: str, anchor: str = "middle", color: str = GREY) -> None:
        """Write a label."""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" fill="{color}" text-anchor="{anchor}">{label}</text>')

    def square(self, x: float, y: float, color: str, opacity: float = 1.0, size: int = CELL) -> None:
        """Draw one element."""
        place = f'x="{x:g}" y="{y:g}" width="{size - 1}" height="{size - 1}"'
        self.parts.append(f'<rect {place} fill="{color}" fill-opacity="{opacity:.2f}"/>')

    def grid(self, x: int, y: int, values: np.ndarray, color: str, caption: str) -> int:
        """Draw a matrix, whose values between 0 and 1 are opacities, and its caption; return where the next one can begin."""
        for (i, j), value in np.ndenumerate(values):
            paint = (color, 0.2 + 0.75 * value) if value > 0 else ("#888888", 0.13)
            self.square(x + j * CELL, y + i * CELL, *paint)
        rows, columns = values.shape
        self.text(x + columns * CELL / 2, y + rows * CELL + 18, caption)
        return x + columns * CELL

    def box(self, x: int, y: int, width: int, lines: list[str], color: str = BLUE) -> None:
        """Draw a box of centred lines."""
        height = 18 * len(lines) + 14
        place = f'x="{x}" y="{y}" width="{width}" height="{height}" rx="5"'
        self.parts.append(f'<rect {place} fill="{color}" fill-opacity="0.12" stroke="{color}"/>')
        for number, line in enumerate(lines):
            self.text(x + width / 2, y + 21 + 18 * number, line)

    def arrow(self, x1: int, y1: int, x2: int, y2: int, label: str = "") -> None:
        """Draw an arrow along an axis, with a label above its middle."""
        dx, dy = np.sign(x2 - x1), np.sign(y2 - y1)
        head = [(x2, y2), (x2 - 7 * dx - 4 * dy, y2 - 7 * dy - 4 * dx), (x2 - 7 * dx + 4 * dy, y2 - 7 * dy + 4 * dx)]
        points = " ".join(f"{x},{y}" for x, y in head)
        self.parts.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{GREY}"/>')
        self.parts.append(f'<polygon points="{points}" fill="{GREY}"/>')
        if label:
            self.text((x1 + x2) / 2, (y1 + y2) / 2 - 6, label)

    def __str__(self) -> str:
        return "\n".join([*self.parts, "</svg>\n"])


def attention() -> Picture:
    """Queries and keys give scores, the scores weights and a log-sum-exp, and the weights the output."""
    rng, length, dim = np.random.default_rng(4), 6, 4
    q, k = (np.asfortranarray(rng.standard_normal((8, 1, length, 1), np.float32)) for _ in range(2))
    v = np.asfortranarray(np.eye(length, dtype=np.float32).reshape(length, 1, length, 1))
    out, stats = cupy_sdpa.attention(q, k, v, causal=True, return_stats=True)
    weights = out[:, 0, :, 0].T
    scores = np.where(weights > 0, np.log(weights + (weights == 0)) + stats[:, 0, 0, None], np.nan)
    shades = np.nan_to_num((scores - np.nanmin(scores)) / np.ptp(scores[weights > 0]) + 0.05, nan=0).clip(0, 1)
    rows = (stats[:, :, 0] - stats.min()) / np.ptp(stats) * 0.9 + 0.1

    picture, top = Picture(748, 116), 4
    full = np.full((length, dim), 0.6)
    x = picture.grid(4, top, full, BLUE, "q")
    picture.text(x + 14, top + 45, "·")
    x = picture.grid(x + 28, top, full, ORANGE, "k")
    picture.arrow(x + 12, top + 41, x + 52, top + 41)
    x = picture.grid(x + 64, top, shades, GREEN, "scores")
    x = picture.grid(x + 40, top, rows, GREEN, "log-sum-exp")
    picture.text(x + 48, top + 34, "softmax")
    picture.arrow(x + 12, top + 41, x + 84, top + 41)
    x = picture.grid(x + 96, top, weights / weights.max(axis=1, keepdims=True), GREEN, "weights")
    picture.text(x + 14, top + 45, "·")
    x = picture.grid(x + 28, top, full, PURPLE, "v")
    picture.arrow(x + 12, top + 41, x + 52, top + 41)
    picture.grid(x + 64, top, full, BLUE, "out")
    return picture


def pullback() -> Picture:
    """The forward call returns the output and a function that computes gradients from what the call kept."""
    picture = Picture(560, 158)
    picture.box(4, 8, 110, ["q, k, v"])
    picture.box(214, 8, 132, ["attention_vjp"], GREEN)
    picture.box(446, 8, 110, ["out"])
    picture.arrow(114, 24, 212, 24)
    picture.arrow(346, 24, 444, 24)
    picture.box(4, 118, 110, ["dq, dk, dv"], ORANGE)
    picture.box(214, 118, 132, ["pullback"], GREEN)
    picture.box(446, 118, 110, ["dout"], ORANGE)
    picture.arrow(446, 134, 348, 134)
    picture.arrow(214, 134, 116, 134)
    picture.arrow(280, 40, 280, 116)
    picture.text(290, 82, "keeps q, k, v, out and the log-sum-exp", "start")
    return picture


def plan() -> Picture:
    """A call looks for its plan in memory and on disk, and otherwise builds it."""
    picture = Picture(704, 112)
    picture.box(4, 8, 164, ["a call:", "shapes, dtype, options"])
    picture.box(284, 8, 150, ["plan: a compiled", "kernel"], GREEN)
    picture.box(550, 8, 150, ["launch, with your", "arrays and scalars"], BLUE)
    picture.arrow(168, 33, 282, 33, "look up")
    picture.arrow(434, 33, 548, 33, "microseconds")
    picture.text(359, 82, "not in memory: load it from disk, 3 to 8 ms")
    picture.text(359, 102, "not on disk: build it, 30 to 40 ms, and store it")
    return picture


def cache() -> Picture:
    """The pages of three sequences in a pool, as the page table of a cache lists them."""
    size, pages, lengths = 4, 10, [11, 5, 8]
    store = cupy_sdpa.KVCache(8, 1, pages=pages, batch=3, page_size=size, numpy=True)
    for n in (4, 4, 3):  # the sequences grow in turn, so their pages alternate
        counts = np.minimum(n, np.array(lengths) - np.asarray(store.lengths))
        tokens = np.zeros((8, 1, int(counts.max()), 3), np.float32, order="F")
        store.append(tokens, tokens, seq_lens_q=counts)
    table, colors, cell = np.asarray(store.table), (BLUE, ORANGE, GREEN), 18
    picture = Picture(590, 148)
    picture.text(4, 14, "page table", "start")
    picture.text(160, 14, "pool of pages of 4 tokens", "start")
    used = {}
    for sequence, (length, color) in enumerate(zip(lengths, colors, strict=True)):
        numbers = [int(page) for page in table[: -(-length // size), sequence]]
        used |= {page: (color, min(size, length - size * row)) for row, page in enumerate(numbers)}
        y = 40 + 36 * sequence
        picture.text(4, y, f"sequence {sequence}: {', '.join(map(str, numbers))}", "start", color)
        picture.text(4, y + 15, f"{length} tokens", "start")
    for page in range(pages):
        x, y = 160 + (page % 5) * (size * cell + 14), 34 + page // 5 * 56
        color, filled = used.get(page, (GREY, 0))
        for row in range(size):
            picture.square(x + row * cell, y, color if row < filled else "#888888", 0.8 if row < filled else 0.18, cell)
        picture.text(x + size * cell / 2, y + 34, f"page {page}" + ("" if page in used else ", free"))
    return picture


def engines() -> Picture:
    """Which engine computes which arrays."""
    picture = Picture(540, 142)
    rows = [
        ("numpy arrays", "CPU engine: numpy"),
        ("CuPy arrays", "cuDNN: NVIDIA, Ampere or newer"),
        ('CuPy arrays, engine="cupy"', "CuPy's operations: any GPU"),
    ]
    for number, (arrays, engine) in enumerate(rows):
        y = 6 + 46 * number
        picture.box(4, y, 200, [arrays])
        picture.box(296, y, 240, [engine], GREEN)
        picture.arrow(204, y + 16, 294, y + 16)
    return picture


def drawn() -> dict[str, str]:
    """Return the pictures by their names."""
    return {function.__name__: str(function()) for function in (attention, pullback, plan, cache, engines)}


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in drawn().items():
        (FOLDER / f"{name}.svg").write_text(text, encoding="utf-8")
