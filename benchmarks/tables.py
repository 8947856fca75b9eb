"""The tables of the docs, from the files of results.

python3 benchmarks/tables.py plans > docs/plans_table.md
python3 benchmarks/tables.py functions > docs/functions_table.md
python3 benchmarks/tables.py speed > docs/speed_table.md

A file of results may be named behind ``speed``.
"""

from __future__ import annotations

import csv
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

from cupy_sdpa.bench import table as bench

RESULTS = Path(__file__).parent / "results"
#: The names of ways that are too long even where they are short.
NAMES = {"cudnn-frontend": "fe"}
FILES = ("h200_cudnn919_plans.csv", "h200_cudnn928_plans.csv")


def read(name: str) -> dict[tuple[str, str, str], dict[str, str]]:
    """The rows of a file, by part, case and what was measured."""
    with (RESULTS / name).open(newline="") as file:
        return {(row["part"], row["case"], row["what"]): row for row in csv.DictReader(file)}


def digits(row: dict[str, str]) -> str:
    """A value with three digits."""
    value = float(row["value"])
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def plans() -> Iterator[str]:
    """Of plans.py, line by line."""
    columns = [read(name) for name in FILES]
    heads = [next(iter(rows.values())) for rows in columns]
    yield f"Measured on an {heads[0]['gpu']} by `benchmarks/plans.py`; every row is in `benchmarks/results/`.\n"
    titles = [f"cuDNN {head['cudnn']}" for head in heads]

    def table(part: str, wanted: tuple[str, ...]) -> Iterator[str]:
        yield f"| | | {' | '.join(titles)} |"
        yield "|---|---|" + "---|" * len(titles)
        for _, case, what in (key for key in columns[0] if key[0] == part):
            if what in wanted:
                values = [rows.get((part, case, what)) for rows in columns]
                cells = [f"{digits(row)} {row['unit']}" if row else "" for row in values]
                yield f"| {case} | {what} | {' | '.join(cells)} |"
        yield ""

    yield (
        'First calls of a new process (Llama 3.1 8B\'s heads, 4096, causal), once the libraries are loaded. All but "no store" '
        "are without the CUDA driver's own cache of compiled kernels:\n"
    )
    yield from table("start", ("first forward call done", "first backward call done"))
    yield "Two GPUs in one process, the same problem on one after the other:\n"
    yield from table("two GPUs", ("plan built", "plan loaded"))
    yield "Forty new lengths near 3000, forward and backward:\n"
    yield from table(
        "new lengths",
        (
            "plans built for 40 lengths, both ways",
            "forward: median wait for a new length",
            "backward: median wait for a new length",
        ),
    )
    yield "A call once it is planned, by its length, with exact lengths and in buckets (launches back to back):\n"
    yield f"| length, mask | | {' | '.join(f'{title}: exact | in buckets of 512 | ratio' for title in titles)} |"
    yield "|---|---|" + "---|---|---|" * len(titles)
    for _, case, what in (key for key in columns[0] if key[0] == "cost of a bucket" and key[1].endswith("None")):
        cells = []
        for rows in columns:
            exact = rows["cost of a bucket", case, what]
            rounded = rows["cost of a bucket", case.replace("None", "512"), what]
            ratio = float(rounded["value"]) / float(exact["value"])
            cells += [f"{digits(exact)} us", f"{digits(rounded)} us", f"{ratio:.2f}"]
        yield f"| {case.split(',')[0]} | {what} | {' | '.join(cells)} |"
    yield ""
    yield "Tuning, what heuristics propose (times faster; 1 where the plan stays):\n"
    yield from table("tuning", ("gain",))
    yield "CUDA graphs:\n"
    yield from table("CUDA graph", ("ten calls, launched", "ten calls, replayed"))


def functions() -> Iterator[str]:
    """Of functions.py, line by line."""
    with (RESULTS / "h200_cudnn919_functions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    head = rows[0]
    yield (
        f"Measured on an {head['gpu']} with cuDNN {head['cudnn']} and PyTorch {head['torch']} by `benchmarks/functions.py`: "
        "bfloat16, batch 2, 16 query and 4 key heads, 4096 positions, head dim 128. A ratio is our time over FlexAttention's. "
        "Errors are the largest of the output and the three gradients, over the largest magnitude.\n"
    )
    yield "| function | forward | ratio | backward | ratio | error | FlexAttention's |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        errors = [max(float(row[f"{name}{whose}_error"]) for name in ("out", "dq", "dk", "dv")) for whose in ("", "_flex")]
        times = [f"{float(row[f'{way}_ms']):.2f} ms | {float(row[f'{way}_ratio']):.2f}" for way in ("forward", "backward")]
        yield f"| {row['name']} | " + " | ".join([*times, *(f"{error:.1e}" for error in errors)]) + " |"
    yield ""
    for way in ("forward", "backward"):
        ratios = [float(row[f"{way}_ratio"]) for row in rows]
        mean = statistics.geometric_mean(ratios)
        yield f"{way.capitalize()}, geometric mean of the ratios: {mean:.2f}; from {min(ratios):.2f} to {max(ratios):.2f}."


def speed(first: str | Path = RESULTS / "h200_cudnn919.csv", *others: str | Path) -> Iterator[str]:
    """Of files of ``python -m cupy_sdpa bench``, line by line; of others than the first the means."""
    rows = of_the_gpu(first)
    directions = list(dict.fromkeys(row["direction"] for row in rows))
    yield (
        f"Measured on an {rows[0]['gpu']} with {used(rows[0])} by `python -m cupy_sdpa bench`. "
        "Milliseconds, TFLOP/s, and the ratio of our time to that of the fastest other way, which is named: cudnn and flash "
        "are PyTorch's, fe is cudnn-frontend, flex FlexAttention.\n"
    )
    yield f"| preset | {' | '.join(f'{direction} | TFLOP/s | ratio' for direction in directions)} |"
    yield "|---|" + "---|---|---|" * len(directions)
    cases = bench.cases(rows)
    for preset in dict.fromkeys(row["preset"] for row in rows):
        cells = [cell for direction in directions for cell in speed_of(cases.get((preset, direction), {}))]
        yield f"| {preset} | {' | '.join(cells)} |"
    yield ""
    yield from means(rows)
    for other in map(of_the_gpu, others or [RESULTS / "h200_cudnn928.csv"]):
        yield f"\nThe same with {used(other[0])}:\n"
        yield from means(other)


def of_the_gpu(path: str | Path) -> list[bench.Row]:
    """The rows of a file of the bench that are not the interpreter's."""
    return [row for row in bench.read_csv(path) if row["gpu"]]


def used(row: bench.Row) -> str:
    """The versions of what took part."""
    peers = {"cudnn": "cuDNN", "torch": "PyTorch", "cudnn_frontend": "cudnn-frontend", "jax": "JAX"}
    return ", ".join(f"{name} {row[column]}" for column, name in peers.items() if row[column])


def means(rows: list[bench.Row]) -> Iterator[str]:
    """Our figures over each other way's: time on the device, most memory held at once beside the inputs, time of the host."""
    directions = list(dict.fromkeys(row["direction"] for row in rows))
    yield "Ours over each other way's, the geometric mean of the presets that it has, and from where to where:\n"
    yield f"| | | {' | '.join(directions)} |"
    yield "|---|---|" + "---|" * len(directions)
    for column, title in bench.MEANS.items():
        for way in (None, *(way for way in bench.ways_of(rows) if way != "ours")):
            every = [bench.ratios(rows, direction, way, column) for direction in directions]
            if any(every):
                cells = [bench.summary(some) if some else "" for some in every]
                yield f"| {title} | {way or 'the fastest'} | {' | '.join(cells)} |"


def speed_of(ways: dict[str, bench.Row]) -> tuple[str, str, str]:
    """The cells of a preset in one direction: our time, our rate, the ratio; empty where it was not measured."""
    ours = ways.get("ours")
    if ours is None or ours["ms"] is None:
        return "", "", ""
    best = [
        f"{row['ours_over_it']:.2f}\N{NO-BREAK SPACE}{NAMES.get(way, bench.short(way))}"
        for way, row in ways.items()
        if row["best_peer"]
    ]
    return f"{ours['ms']:.3g}", f"{ours['tflops']:.0f}", "".join(best)


def host() -> Iterator[str]:
    """Of host.py, line by line."""
    with (RESULTS / "h200_cudnn919_host.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    head = rows[0]
    us = {row["name"]: float(row["us"]) for row in rows}
    yield (
        f"On an {head['gpu']}'s host with cuDNN {head['cudnn']} and PyTorch {head['torch']}, by `benchmarks/host.py`: q, k, v "
        "of (64, 8, 128, 2), in a row of calls 256 positions. The device is idle before a call, but where it is behind.\n"
    )
    yield "| call | us | of PyTorch's |"
    yield "|---|---|---|"
    for row in rows:
        if row["kind"] == "call":
            yield f"| {row['name']} | {float(row['us']):.2f} | {float(row['over_torch']):.2f} |"
    yield ""
    prepared = us["prepared, out="] / us["cudnnBackendExecute"]
    yield f"A prepared call takes {prepared:.2f} of a bare `cudnnBackendExecute`. The steps of a repeated call:\n"
    yield "| step | us |"
    yield "|---|---|"
    for row in rows:
        if row["kind"] == "step":
            yield f"| {row['name']} | {float(row['us']):.2f} |"
    yield f"| launch | {us['cuGraphLaunch']:.2f} |"


def graphs() -> Iterator[str]:
    """Of graphs.py, line by line."""
    with (RESULTS / "h200_cudnn919_graphs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    columns = {"device_us": "device", "host_us": "host", "row_us": "endless row"}
    yield (
        f"On an {rows[0]['gpu']} with cuDNN {rows[0]['cudnn']}, by `benchmarks/graphs.py`, us of a launch: the device's and "
        "the host's alone, and what a launch takes in an endless row of them.\n"
    )
    yield f"| pass, recordings | {' | '.join(f'{title}: graph | kernels' for title in columns.values())} |"
    yield "|---|" + "---|---|" * len(columns)
    found = {(row["direction"], int(row["recordings"]), row["way"]): row for row in rows}
    for direction, count in sorted({case[:2] for case in found}, key=lambda case: (case[0] != "forward", case[1])):
        ways = [found[direction, count, way] for way in ("graph", "kernels")]
        cells = [f"{float(way[column]):.1f}" for column in columns for way in ways]
        yield f"| {direction}, {count} | {' | '.join(cells)} |"


TABLES = {"plans": plans, "functions": functions, "speed": speed, "host": host, "graphs": graphs}

if __name__ == "__main__":
    print("\n".join(TABLES[sys.argv[1]](*sys.argv[2:])).rstrip())
