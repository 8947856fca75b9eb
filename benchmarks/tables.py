"""The table of docs/plans.md, from the results of benchmarks/plans.py.

python3 benchmarks/tables.py > docs/plans_table.md
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
FILES = ("h200_cudnn919_plans.csv", "h200_cudnn928_plans.csv")


def read(name: str) -> dict[tuple[str, str, str], dict[str, str]]:
    """The rows of a file, by part, case and what was measured."""
    with (RESULTS / name).open(newline="") as file:
        return {(row["part"], row["case"], row["what"]): row for row in csv.DictReader(file)}


def digits(row: dict[str, str]) -> str:
    """A value with three digits."""
    value = float(row["value"])
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def lines() -> Iterator[str]:
    """The page, line by line."""
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
    yield "Tuning, settings by hand too:\n"
    yield from table("tuning, knobs too", ("gain", "configs with wrong results"))
    yield "CUDA graphs:\n"
    yield from table("CUDA graph", ("ten calls, launched", "ten calls, replayed"))


if __name__ == "__main__":
    print("\n".join(lines()).rstrip())
