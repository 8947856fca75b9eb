"""Pictures of a run's rows: bars of TFLOP/s for every direction, and of the host's time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .presets import DIRECTIONS
from .table import Row, cases, ways_of
from .ways import WAYS

#: Inches of a picture's width, of a bar's height, and around them.
_WIDTH, _BAR, _MARGIN = 9.0, 0.085, 1.6
_COLORS = ("#1b6ca8", "#7a7a7a", "#c9a227", "#6a994e", "#b56576", "#8e7dbe", "#444444")


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
            done.append(_bars(some, lambda row: row["tflops"], title, folder / f"bench_{direction}.{ending}"))
    some = [row for row in rows if row["direction"] == "forward" and row["host_us"] is not None]
    if some:
        title = "forward: time until a call returns, the device idle, microseconds"
        done.append(_bars(some, lambda row: row["host_us"], title, folder / f"bench_host.{ending}"))
    return done


def _bars(rows: Sequence[Row], value: Callable[[Row], float], title: str, path: Path) -> Path:
    """Groups of horizontal bars, a preset each."""
    import matplotlib
    from matplotlib.figure import Figure

    names, groups = ways_of(rows), cases(rows)
    height = _MARGIN + _BAR * len(groups) * (len(names) + 1)
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.subplots()
    for number, name in enumerate(names):
        places = [place + (number - (len(names) - 1) / 2) / (len(names) + 1) for place in range(len(groups))]
        lengths = [value(ways[name]) if name in ways else 0.0 for ways in groups.values()]
        color = _COLORS[number % len(_COLORS)]
        axes.barh(places, lengths, 1 / (len(names) + 1), label=_title(name), color=color)
    axes.set_yticks(range(len(groups)), [preset for preset, _ in groups])
    axes.set_ylim(len(groups) - 0.5, -0.5)  # the first preset above
    axes.set_title(_headed(title, rows[0]))
    axes.grid(axis="x", alpha=0.4)
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
