"""Draw the scaling: ``python -m benchmarks.parallel.plot`` writes ``docs/_static/parallel_scaling.svg`` from the results.

A panel for each pass. A bar is the time of one GPU divided by the number of GPUs, relative to the measured time: 1 is ideal.
Circles are the predictions of the model for 2, 4 and 8 GPUs.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "benchmarks" / "results" / "h200x2_cudnn919_parallel.csv"
TARGET = ROOT / "docs" / "_static" / "parallel_scaling.svg"
#: The best of our methods, and the better rotation of PyTorch.
COLORS = {"measured": "#1b6ca8", "PyTorch": "#d1603d"}
PREDICTED = "#3a8f5c"
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 380, 190, 44, 34, 26
_RANGE = (0.6, 1.05)


def read() -> list[dict[str, str]]:
    """The rows."""
    with SOURCE.open(newline="") as file:
        return list(csv.DictReader(file))


def best(rows: list[dict[str, str]], kind: str, problem: str, direction: str) -> float | None:
    """The largest fraction of the ideal time of all methods."""
    found = [
        float(row["of_ideal"])
        for row in rows
        if (row["kind"], row["problem"], row["pass"]) == (kind, problem, direction) and row["of_ideal"]
    ]
    return max(found, default=None)


def predictions(rows: list[dict[str, str]], problem: str, direction: str) -> dict[str, float]:
    """The prediction of the best method for each number of GPUs."""
    column = f"{direction}_of_ideal"
    found: dict[str, float] = {}
    for row in rows:
        if row["kind"] == "model" and row["problem"] == problem:
            found[row["members"]] = max(found.get(row["members"], 0.0), float(row[column]))
    return found


def place(value: float) -> float:
    """The height of a fraction in pixels."""
    low, high = _RANGE
    return max(0.0, (value - low) / (high - low)) * _HEIGHT


def text(x: float, y: float, words: object, size: int = 11, anchor: str = "middle") -> str:
    """Words at a place."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#777777" font-size="{size}">{words}</text>'


def bar(x: float, bottom: float, width: float, value: float, color: str) -> str:
    """A bar from the bottom."""
    height = place(value)
    return f'<rect x="{x:.1f}" y="{bottom - height:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{color}"/>'


def panel(number: int, direction: str, rows: list[dict[str, str]], problems: list[str]) -> Iterator[str]:
    """The parts of a panel."""
    left, bottom = _LEFT + number * (_WIDTH + _GAP), _TOP + _HEIGHT
    yield text(left + _WIDTH / 2, _TOP - 12, {"forward": "forward", "both": "forward and backward"}[direction])
    yield f'<rect x="{left}" y="{_TOP}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#999999"/>'
    for fraction in (0.6, 0.7, 0.8, 0.9, 1.0):
        y = bottom - place(fraction)
        yield f'<path d="M{left} {y:.1f}h{_WIDTH}" stroke="#999999" stroke-opacity="0.4"/>'
        if number == 0:
            yield text(left - 6, y + 4, fraction, anchor="end")
    step = _WIDTH / len(problems)
    for index, problem in enumerate(problems):
        x = left + index * step
        for column, (kind, color) in enumerate(COLORS.items()):
            if (value := best(rows, kind, problem, direction)) is not None:
                yield bar(x + step * (0.12 + 0.22 * column), bottom, step * 0.2, value, color)
        for members, value in predictions(rows, problem, direction).items():
            at, y = x + step * {"2": 0.62, "4": 0.75, "8": 0.88}[members], bottom - place(value)
            yield f'<circle cx="{at:.1f}" cy="{y:.1f}" r="2.6" fill="{PREDICTED}"/>'
            yield text(at, y - 6, members, 9)
        mask, length, *heads = problem.replace(" per GPU", "").split(", ")
        for line, words in enumerate((f"{mask}, {length}", heads[0] if heads else "32 heads")):
            yield text(x + step / 2, bottom + 15 + 13 * line, words)


def drawn() -> str:
    """The picture."""
    rows = read()
    problems = list(dict.fromkeys(row["problem"] for row in rows if row["kind"] == "PyTorch"))
    width, height = _LEFT + 2 * (_WIDTH + _GAP), _TOP + _HEIGHT + 66
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">']
    for number, direction in enumerate(("forward", "both")):
        parts += panel(number, direction, rows, problems)
    x, y = _LEFT, height - 16
    names = ("2 GPUs", "PyTorch, 2 GPUs", "predicted: 2, 4 and 8 GPUs")
    for color, words in zip((*COLORS.values(), PREDICTED), names, strict=True):
        parts += [f'<rect x="{x}" y="{y - 8}" width="12" height="9" fill="{color}"/>', text(x + 18, y, words, anchor="start")]
        x += 40 + 7 * len(words)
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    TARGET.write_text(drawn(), encoding="utf-8")
