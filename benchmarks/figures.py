"""The figures of FP8 errors and of scaling over GPUs: ``python -m benchmarks tables figures`` writes them to ``docs/_static``.

They are SVG files that need no library to draw, so that equal results give equal files.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

RESULTS = Path(__file__).parent / "results"
FOLDER = Path(__file__).parents[1] / "docs" / "_static"
#: The methods of the FP8 errors, and the contenders of the scaling, with their colors.
METHODS = {
    "bfloat16": "#7a7a7a", "FP8": "#d1603d", "FP8, rotated": "#1b6ca8", "FP8, rotated, parts": "#3a8f5c",
    "FP8, rotated, centered": "#8458a8",
}  # fmt: skip
KINDS = {"measured": "#1b6ca8", "PyTorch": "#d1603d"}


def read(*names: str) -> list[dict[str, str]]:
    """The rows of files in ``benchmarks/results``."""
    rows = []
    for name in names:
        with (RESULTS / name).open(newline="") as file:
            rows += list(csv.DictReader(file))
    return rows


class Panel(NamedTuple):
    """A panel of a figure: its place and size in pixels, and the range of the vertical axis.

    Attributes:
        number: its number from the left.
        width, height, left, gap: pixels of every panel, before the first one, and between them.
        low, high: the values at the bottom and at the top.
        log: whether the axis is logarithmic.
    """

    number: int
    width: int
    height: int
    left: int
    gap: int
    low: float
    high: float
    log: bool = False

    @property
    def x(self) -> int:
        """The left edge."""
        return self.left + self.number * (self.width + self.gap)

    def y(self, value: float) -> float:
        """The height of a value."""
        return TOP + self.height - max(0.0, part(value, self.low, self.high, log=self.log)) * self.height

    def frame(self, title: str, ticks: Iterable[float]) -> Iterator[str]:
        """The title, the frame, and lines with numbers at the first panel."""
        yield text(self.x + self.width / 2, TOP - 12, title)
        yield f'<rect x="{self.x}" y="{TOP}" width="{self.width}" height="{self.height}" fill="none" stroke="#999999"/>'
        for value in ticks:
            yield f'<path d="M{self.x} {self.y(value):.1f}h{self.width}" stroke="#999999" stroke-opacity="0.4"/>'
            if self.number == 0:
                yield text(self.x - 6, self.y(value) + 4, f"{value:g}", "end")


TOP = 34


def part(value: float, low: float, high: float, *, log: bool) -> float:
    """Where a value is between two others: 0 to 1."""
    if log:
        value, low, high = map(math.log, (value, low, high))
    return (value - low) / (high - low)


def text(x: float, y: float, words: object, anchor: str = "middle") -> str:
    """Words at a place."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#777777">{words}</text>'


def figure(panels: Sequence[Panel], parts: Iterable[str], legend: dict[str, str]) -> str:
    """A figure with a legend below its panels."""
    last = panels[-1]
    width, height = last.x + last.width + last.gap, TOP + last.height + 66
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">', *parts]
    x = last.left
    for name, color in legend.items():
        lines.append(f'<path d="M{x} {height - 22}h18" stroke="{color}" stroke-width="4"/>')
        lines.append(text(x + 23, height - 18, name, "start"))
        x += 42 + 7 * len(name)
    return "\n".join([*lines, "</svg>\n"])


def fp8_errors() -> str:
    """The error against the number of keys, a panel for each kind of inputs. Lines of the CPU engine are dashed."""
    rows = read("h200_cudnn919_fp8_errors.csv", "cpu_fp8_errors.csv")
    titles = {"normal": "normal", "outliers": "outliers in q and k", "mean": "v with mean 0.3"}
    panels = [Panel(number, 230, 230, 50, 20, 8e-4, 1.0, log=True) for number in range(len(titles))]
    parts: list[str] = []
    for panel, (inputs, title) in zip(panels, titles.items(), strict=True):
        parts += panel.frame(title, (0.001, 0.01, 0.1, 1.0))

        def across(keys: float, panel: Panel = panel) -> float:
            return panel.x + part(keys, 1024, 131072, log=True) * panel.width

        parts += [text(across(keys), TOP + panel.height + 16, f"{keys // 1024}k") for keys in (1024, 8192, 65536)]
        lines: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for row in rows:
            if row["inputs"] == inputs:
                lines.setdefault((row["engine"], row["method"]), []).append((float(row["keys"]), float(row["error"])))
        for (engine, method), points in lines.items():
            path = " ".join(f"{across(x):.1f},{panel.y(y):.1f}" for x, y in sorted(points))
            dashes = ' stroke-dasharray="4 3"' if engine == "numpy" else ""
            parts.append(f'<polyline points="{path}" fill="none" stroke="{METHODS[method]}" stroke-width="1.6"{dashes}/>')
    return figure(panels, parts, METHODS)


def parallel_scaling() -> str:
    """The time of one GPU divided by the number of GPUs, relative to the best method's time; a panel for each pass."""
    rows = read("h200x2_cudnn919_parallel.csv")
    problems = list(dict.fromkeys(row["problem"] for row in rows if row["kind"] == "PyTorch"))
    panels = [Panel(number, 380, 190, 44, 26, 0.6, 1.05) for number in range(2)]
    parts: list[str] = []
    for panel, direction in zip(panels, ("forward", "both"), strict=True):
        title = {"forward": "forward", "both": "forward and backward"}[direction]
        parts += panel.frame(title, (0.6, 0.7, 0.8, 0.9, 1.0))
        step, bottom = panel.width / len(problems), TOP + panel.height
        for index, problem in enumerate(problems):
            x = panel.x + index * step
            for column, (kind, color) in enumerate(KINDS.items()):
                key = (kind, problem, direction)
                found = [row["of_ideal"] for row in rows if (row["kind"], row["problem"], row["pass"]) == key]
                if values := [float(value) for value in found if value]:
                    at, y = x + step * (0.2 + 0.3 * column), panel.y(max(values))
                    parts.append(
                        f'<rect x="{at:.1f}" y="{y:.1f}" width="{step * 0.27:.1f}" height="{bottom - y:.1f}" fill="{color}"/>'
                    )
            mask, length, *heads = problem.replace(" per GPU", "").split(", ")
            for line, words in enumerate((f"{mask}, {length}", heads[0] if heads else "32 heads")):
                parts.append(text(x + step / 2, bottom + 15 + 13 * line, words))
    return figure(panels, parts, dict(zip(("2 GPUs", "PyTorch, 2 GPUs"), KINDS.values(), strict=True)))


#: The figures by the names of their files.
FIGURES = {"fp8_errors": fp8_errors, "parallel_scaling": parallel_scaling}


def write() -> None:
    """Write all figures."""
    for name, draw in FIGURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")
