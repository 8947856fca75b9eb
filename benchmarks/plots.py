"""Figures of the rows: TFLOP/s in each direction, and the host's time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .contenders.ours import Ours
from .contenders.registry import CONTENDERS
from .presets import DIRECTIONS
from .table import Row, by_case, contenders_of

#: A transparent background, and a grey that is readable on light and dark pages.
THEME: dict[str, Any] = {
    "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none", "legend.facecolor": "none",
    "text.color": "#777777", "axes.labelcolor": "#777777", "axes.edgecolor": "#777777", "axes.titlecolor": "#777777",
    "xtick.color": "#777777", "ytick.color": "#777777", "svg.hashsalt": "cupy_sdpa",
}  # fmt: skip
#: Inches: the width of a figure, the height of a preset's line, and the rest of the height.
_WIDTH, _LINE, _MARGIN = 9.0, 0.2, 1.4
_COLORS = ("#3a86c8", "#8a8a8a", "#c9a227", "#6a994e", "#b56576", "#8e7dbe", "#2a9d8f")
_MARKERS = ("o", "s", "v", "D", "^", "P", "X")


def draw(rows: Sequence[Row], folder: Path, suffix: str = "svg") -> list[Path]:
    """Write the figures that the rows have data for.

    Args:
        rows: rows with all columns.
        folder: where the files go; it is created if it is missing.
        suffix: ``svg`` or ``png``.

    Returns:
        The paths of the files.

    Raises:
        OSError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for direction in DIRECTIONS:
        selected = [row for row in rows if row["direction"] == direction and row["tflops"] is not None]
        if selected:
            title = f"{direction}: useful operations, TFLOP/s"
            paths.append(_in_theme(selected, lambda row: row["tflops"], title, folder / f"bench_{direction}.{suffix}"))
    selected = [row for row in rows if row["direction"] == "forward" and row["host_us"] is not None]
    if selected:
        title = "forward: time until a call returns, the device idle, microseconds"
        paths.append(_in_theme(selected, lambda row: row["host_us"], title, folder / f"bench_host.{suffix}", log=True))
    return paths


def _in_theme(rows: Sequence[Row], value: Callable[[Row], float], title: str, path: Path, *, log: bool = False) -> Path:
    import matplotlib

    with matplotlib.rc_context(THEME):
        return _dots(rows, value, title, path, log=log)


def _dots(rows: Sequence[Row], value: Callable[[Row], float], title: str, path: Path, *, log: bool = False) -> Path:
    """Draw a line for each preset with a marker for each contender; ours are filled and on top."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    names, groups = contenders_of(rows), list(by_case(rows).items())
    figure = Figure(figsize=(_WIDTH, _MARGIN + _LINE * len(groups)), layout="constrained")
    axes = figure.subplots()
    for number, name in enumerate(names):
        points = [(value(found[name]), line) for line, (_, found) in enumerate(groups) if name in found]
        color, ours = _COLORS[number % len(_COLORS)], name == Ours.name
        axes.plot(
            *zip(*points, strict=True), _MARKERS[number % len(_MARKERS)], label=_title(name), color=color,
            markersize=7 if ours else 6, markerfacecolor=color if ours else "none", zorder=3 if ours else 2,
        )  # fmt: skip
    axes.set_yticks(range(len(groups)), [preset for (preset, _), _ in groups])
    axes.set_ylim(len(groups) - 0.5, -0.5)  # the first preset at the top
    if log:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
    else:
        axes.set_xlim(0)
    axes.set_title(_heading(title, rows[0]))
    axes.grid(alpha=0.4, which="both")
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=3, fontsize="small")
    # without random ids and the date, so that equal rows give equal files
    figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path


def _title(name: str) -> str:
    return CONTENDERS[name].title if name in CONTENDERS else name


def _heading(title: str, row: dict[str, Any]) -> str:
    machine = ", ".join(filter(None, [row["gpu"], row["cudnn"] and f"cuDNN {row['cudnn']}"]))
    return f"{title}\n{machine}" if machine else title


def draw_decode(rows: Sequence[Row], path: Path) -> None:
    """Draw decoding times relative to ours, for one and four queries; the rows are those of ``decode``."""
    import matplotlib

    with matplotlib.rc_context(THEME):
        _draw_decode(rows, path)


def _draw_decode(rows: Sequence[Row], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    chosen = [row for row in rows if row["problem"] == "decode" and not row["option"]]
    problems = list(dict.fromkeys((int(row["batch"]), int(row["keys"])) for row in chosen))
    names = list(dict.fromkeys(row["contender"] for row in chosen))
    for axes, queries in zip(figure.subplots(1, 2), (1, 4), strict=True):
        for name in names:
            times = {
                (int(row["batch"]), int(row["keys"])): float(row["of_ours"])
                for row in chosen
                if row["contender"] == name and int(row["queries"]) == queries
            }
            points = [(place, times[problem]) for place, problem in enumerate(problems) if problem in times]
            axes.plot(*zip(*points, strict=True), "o-", label=name)
        axes.set_xticks(range(len(problems)), [f"{b} x {keys // 1024}k" for b, keys in problems], rotation=45)
        axes.set_yscale("log")
        axes.set_title(f"{queries} quer{'y' if queries == 1 else 'ies'}: time, of ours")
        axes.grid(alpha=0.4, which="both")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(names), fontsize="small")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
