"""Pictures of a run's rows: TFLOP/s for every direction, and the host's time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .presets import DIRECTIONS
from .table import Row, cases, ways_of
from .way import Ours
from .ways import WAYS

#: Inches of a picture's width, of a preset's line, and around them.
_WIDTH, _LINE, _MARGIN = 9.0, 0.2, 1.4
_COLORS = ("#1b6ca8", "#7a7a7a", "#c9a227", "#6a994e", "#b56576", "#8e7dbe", "#444444")
_MARKS = ("o", "s", "v", "D", "^", "P", "X")


def draw(rows: Sequence[Row], folder: Path, ending: str = "svg") -> list[Path]:
    """Write the pictures that the rows have figures for; gives their paths.

    Args:
        rows: tidy rows.
        folder: made where it is missing.
        ending: ``svg`` or ``png``.

    Raises:
        OSError: they cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    done = []
    for direction in DIRECTIONS:
        some = [row for row in rows if row["direction"] == direction and row["tflops"] is not None]
        if some:
            title = f"{direction}: useful operations, TFLOP/s"
            done.append(_dots(some, lambda row: row["tflops"], title, folder / f"bench_{direction}.{ending}"))
    some = [row for row in rows if row["direction"] == "forward" and row["host_us"] is not None]
    if some:
        title = "forward: time until a call returns, the device idle, microseconds"
        done.append(_dots(some, lambda row: row["host_us"], title, folder / f"bench_host.{ending}", log=True))
    return done


def _dots(rows: Sequence[Row], value: Callable[[Row], float], title: str, path: Path, *, log: bool = False) -> Path:
    """A line for each preset, with a mark for each way; ours are filled, and on top."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    names, groups = ways_of(rows), list(cases(rows).items())
    figure = Figure(figsize=(_WIDTH, _MARGIN + _LINE * len(groups)), layout="constrained")
    axes = figure.subplots()
    for number, name in enumerate(names):
        points = [(value(ways[name]), place) for place, (_, ways) in enumerate(groups) if name in ways]
        color, ours = _COLORS[number % len(_COLORS)], name == Ours.name
        axes.plot(
            *zip(*points, strict=True), _MARKS[number % len(_MARKS)], label=_title(name), color=color,
            markersize=7 if ours else 6, markerfacecolor=color if ours else "none", zorder=3 if ours else 2,
        )  # fmt: skip
    axes.set_yticks(range(len(groups)), [preset for (preset, _), _ in groups])
    axes.set_ylim(len(groups) - 0.5, -0.5)  # the first preset above
    if log:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
    else:
        axes.set_xlim(0)
    axes.set_title(_headed(title, rows[0]))
    axes.grid(alpha=0.4, which="both")
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=3, fontsize="small")
    # The same rows give the same file.
    with matplotlib.rc_context({"svg.hashsalt": "cupy_sdpa"}):
        figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path


def _title(name: str) -> str:
    return WAYS[name].title if name in WAYS else name


def _headed(title: str, row: dict[str, Any]) -> str:
    where = ", ".join(filter(None, [row["gpu"], row["cudnn"] and f"cuDNN {row['cudnn']}"]))
    return f"{title}\n{where}" if where else title
