"""Draw the errors: ``python -m benchmarks.fp8.plot`` writes ``docs/_static/fp8_errors.svg`` from the files of errors.

A panel for each kind of inputs: the error against the number of keys, both on logarithmic axes. Lines of cuDNN are solid, those
of the CPU engine are dashed.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: The files with errors; a file that does not exist is left out.
FILES = ("h200_cudnn919_fp8_errors.csv", "cpu_fp8_errors.csv")
TARGET = ROOT / "docs" / "_static" / "fp8_errors.svg"
TITLES = {"normal": "normal", "outliers": "outliers in q and k", "mean": "v with mean 0.3"}
COLORS = {
    "bfloat16": "#7a7a7a", "FP8": "#d1603d", "FP8, rotated": "#1b6ca8", "FP8, rotated, parts": "#3a8f5c",
    "FP8, rotated, centered": "#8458a8",
}  # fmt: skip
#: Pixels of a panel, and the ranges of the axes.
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 230, 230, 50, 34, 20
_KEYS, _ERRORS = (1024, 131072), (8e-4, 1.0)


def read() -> list[dict[str, str]]:
    """The rows of all files."""
    paths = [ROOT / "benchmarks" / "results" / name for name in FILES]
    rows = []
    for path in paths:
        if path.exists():
            with path.open(newline="") as file:
                rows += list(csv.DictReader(file))
    return rows


def place(value: float, ends: tuple[float, float], length: float) -> float:
    """The position of a number on a logarithmic axis."""
    low, high = map(math.log, ends)
    return (math.log(value) - low) / (high - low) * length


def panel(number: int, inputs: str, rows: list[dict[str, str]]) -> Iterator[str]:
    """The parts of a panel."""
    left = _LEFT + number * (_WIDTH + _GAP)
    yield f'<text x="{left + _WIDTH / 2:.0f}" y="{_TOP - 12}" text-anchor="middle" fill="#777777">{TITLES[inputs]}</text>'
    yield f'<rect x="{left}" y="{_TOP}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#999999"/>'
    for error in (0.001, 0.01, 0.1, 1.0):
        y = _TOP + _HEIGHT - place(error, _ERRORS, _HEIGHT)
        yield f'<path d="M{left} {y:.1f}h{_WIDTH}" stroke="#999999" stroke-opacity="0.4"/>'
        if number == 0:
            yield f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#777777">{error:g}</text>'
    for keys in (1024, 8192, 65536):
        x = left + place(keys, _KEYS, _WIDTH)
        yield f'<text x="{x:.1f}" y="{_TOP + _HEIGHT + 16}" text-anchor="middle" fill="#777777">{keys // 1024}k</text>'
    lines: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in rows:
        if row["inputs"] == inputs:
            lines.setdefault((row["engine"], row["method"]), []).append((float(row["keys"]), float(row["error"])))
    for (engine, method), points in lines.items():
        pairs = ((left + place(x, _KEYS, _WIDTH), _TOP + _HEIGHT - place(y, _ERRORS, _HEIGHT)) for x, y in sorted(points))
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in pairs)
        dashes = ' stroke-dasharray="4 3"' if engine == "numpy" else ""
        yield f'<polyline points="{path}" fill="none" stroke="{COLORS[method]}" stroke-width="1.6"{dashes}/>'


def drawn() -> str:
    """The picture."""
    rows, width = read(), _LEFT + len(TITLES) * (_WIDTH + _GAP)
    height = _TOP + _HEIGHT + 66
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">']
    for number, inputs in enumerate(TITLES):
        parts += panel(number, inputs, rows)
    x = _LEFT
    for method, color in COLORS.items():
        parts.append(f'<path d="M{x} {height - 22}h18" stroke="{color}" stroke-width="2"/>')
        parts.append(f'<text x="{x + 23}" y="{height - 18}" fill="#777777">{method}</text>')
        x += 42 + 7 * len(method)
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    TARGET.write_text(drawn(), encoding="utf-8")
