"""The figures of the documentation, drawn from recorded results: ``python -m benchmarks tables figures``; needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import table
from .contenders.ours import Ours
from .contenders.registry import CONTENDERS
from .presets import DIRECTIONS
from .table import RESULTS, Row, by_case, contenders_of, read

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = Path(__file__).parents[1] / "docs" / "_static"
#: A transparent background, and a grey that is readable on light and dark pages. Equal rows give equal files.
THEME: dict[str, Any] = {
    "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none", "legend.facecolor": "none",
    "text.color": "#777777", "axes.labelcolor": "#777777", "axes.edgecolor": "#777777", "axes.titlecolor": "#777777",
    "xtick.color": "#777777", "ytick.color": "#777777", "svg.hashsalt": "cupy_sdpa",
}  # fmt: skip
#: Inches: the width of a figure, the height of a preset's line, and the rest of the height.
_WIDTH, _LINE, _MARGIN = 9.0, 0.2, 1.4
_COLORS = ("#3a86c8", "#8a8a8a", "#c9a227", "#6a994e", "#b56576", "#8e7dbe", "#2a9d8f")
_MARKERS = ("o", "s", "v", "D", "^", "P", "X")
#: The presets of the figure in the README.
FRONT = ("llama-8b-8k-causal", "llama-70b-8k", "mla-4k-causal", "gpt-oss-8k-window-128", "gemma-4k-causal", "vit-1024")
#: The methods of the FP8 errors, and the contenders of the scaling over GPUs, with their colors.
METHODS = {
    "bfloat16": "#7a7a7a", "FP8": "#d1603d", "FP8, rotated": "#1b6ca8", "FP8, rotated, with the mean of v": "#3a8f5c",
}  # fmt: skip
KINDS = {"measured": ("2 GPUs", "#1b6ca8"), "PyTorch": ("PyTorch, 2 GPUs", "#d1603d")}


def write(path: Path | None = None, folder: Path = FOLDER) -> list[Path]:
    """Write all figures, or the figures of a file from ``compare``; return their paths.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: it is not a file of ``compare``.
    """
    import matplotlib

    drawn: dict[str, Callable[[], Figure]] = _of_compare(table.read_csv(path or RESULTS / "h200_cudnn919.csv"))
    if path is None:
        drawn |= {"decode": decode, "fp8_errors": fp8_errors, "parallel_scaling": parallel_scaling}
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(THEME):
        for name, draw in drawn.items():
            draw().savefig(folder / f"{name}.svg", dpi=110, metadata={"Date": None})
    return [folder / f"{name}.svg" for name in drawn]


def _of_compare(rows: Sequence[Row]) -> dict[str, Callable[[], Figure]]:
    """Return the figures of the rows of ``compare`` that they have data for: a rate for each direction, and the host's time."""
    found: dict[str, Callable[[], Figure]] = {}

    def add(name: str, selected: list[Row], column: str, title: str, *, log: bool = False) -> None:
        if selected := [row for row in selected if row[column] is not None]:
            found[name] = lambda: _dots(selected, column, title, log=log)

    by_direction = {name: [row for row in rows if row["direction"] == name] for name in DIRECTIONS}
    for direction, selected in by_direction.items():
        add(f"bench_{direction}", selected, "tflops", f"{direction}: useful operations, TFLOP/s")
    front = [row for row in by_direction["forward"] if row["preset"] in FRONT]
    add("bench_front", front, "tflops", "forward: useful operations, TFLOP/s")
    of_host = "forward: time until a call returns, the device idle, microseconds"
    add("bench_host", by_direction["forward"], "host_us", of_host, log=True)
    return found


def _dots(rows: Sequence[Row], column: str, title: str, *, log: bool = False) -> Figure:
    """Return a line for each preset with a marker for each contender; ours are filled and on top."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    names, groups = contenders_of(rows), list(by_case(rows).items())
    figure = Figure(figsize=(_WIDTH, _MARGIN + _LINE * len(groups)), layout="constrained")
    axes = figure.subplots()
    for number, name in enumerate(names):
        points = [(found[name][column], line) for line, (_, found) in enumerate(groups) if name in found]
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
    return figure


def _title(name: str) -> str:
    return CONTENDERS[name].title if name in CONTENDERS else name


def _heading(title: str, row: Row) -> str:
    machine = ", ".join(filter(None, [row["gpu"], row["cudnn"] and f"cuDNN {row['cudnn']}"]))
    return f"{title}\n{machine}" if machine else title


def decode() -> Figure:
    """Decoding times relative to ours, for one and four queries."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    chosen = [row for row in read("h200_cudnn919_decode.csv") if row["problem"] == "decode" and not row["option"]]
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
    return figure


def fp8_errors() -> Figure:
    """Return the error against the number of keys for each kind of inputs. Lines of the CPU engine are dashed."""
    from matplotlib.figure import Figure

    rows = read("h200_cudnn919_fp8_errors.csv", "cpu_fp8_errors.csv")
    figure = Figure(figsize=(_WIDTH, 3.8), layout="constrained")
    titles = {
        "normal": "normal",
        "outliers": "outliers in q, k",
        "v = 0.3 + n": "v = 0.3 + n",
        "v = 1 + 0.3 n": "v = 1 + 0.3 n",
    }
    for axes, (inputs, title) in zip(figure.subplots(1, 4, sharey=True), titles.items(), strict=True):
        for engine, style in (("cuDNN", "-"), ("numpy", "--")):
            for method, color in METHODS.items():
                found = [row for row in rows if (row["engine"], row["inputs"], row["method"]) == (engine, inputs, method)]
                points = sorted((int(row["keys"]), float(row["error"])) for row in found)
                if not points:
                    continue
                axes.loglog(*zip(*points, strict=True), style, color=color, label=method if style == "-" else None)
        axes.set_xticks((1024, 8192, 65536), ("1k", "8k", "64k"))
        axes.minorticks_off()
        axes.set_title(title)
        axes.grid(alpha=0.4)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(METHODS), fontsize="small")
    return figure


def parallel_scaling() -> Figure:
    """Return the time of one GPU divided by the number of GPUs, relative to the best method's time, for each pass."""
    from matplotlib.figure import Figure

    rows = [row for row in read("h200x2_cudnn919_parallel.csv") if row["of_ideal"]]
    problems = list(dict.fromkeys(row["problem"] for row in rows if row["kind"] == "PyTorch"))
    figure = Figure(figsize=(_WIDTH, 3.6), layout="constrained")
    passes = {"forward": "forward", "both": "forward and backward"}
    for axes, (direction, title) in zip(figure.subplots(1, 2, sharey=True), passes.items(), strict=True):
        for column, (kind, (label, color)) in enumerate(KINDS.items()):
            best: dict[str, float] = {}
            for row in rows:
                if (row["kind"], row["pass"]) == (kind, direction):
                    best[row["problem"]] = max(float(row["of_ideal"]), best.get(row["problem"], 0.0))
            heights = [best.get(problem, 0.0) for problem in problems]
            axes.bar([place + 0.3 * column - 0.15 for place in range(len(problems))], heights, 0.27, color=color, label=label)
        texts = [problem.replace(" per GPU", "").replace(", ", "\n") for problem in problems]
        axes.set_xticks(range(len(problems)), texts, fontsize="small")
        axes.set_ylim(0.6, 1.05)
        axes.set_title(title)
        axes.grid(alpha=0.4, axis="y")
        axes.set_axisbelow(True)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize="small")
    return figure
