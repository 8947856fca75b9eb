"""The rows of a run: written to and read from CSV, printed as a table, and summarized by geometric means.

The column ``way`` is the contender's name, and ``ours_over_it`` is our time divided by the contender's. Both names are part
of the format of the files.
"""

from __future__ import annotations

import csv
import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .contenders.ours import Ours
from .device import STATE_COLUMNS

Row = dict[str, Any]

#: The numeric columns, with the number of decimals; None for integers.
NUMBERS: dict[str, int | None] = {
    **dict.fromkeys(("b", "hq", "hkv", "sq", "skv", "d", "dv", "window", "rounds", "peak_bytes", "workspace_bytes")),
    "ms": 5, "tflops": 2, "share": 4, "ours_over_it": 4, "difference": 6, "plan_ms": 1, "matmul_tflops": 1, "copy_gbs": 1,
    **dict.fromkeys(("host_us", "host_out_us", "host_prepared_us", "cold_ms", "cold_kept_ms", "next_kept_ms"), 2),
}  # fmt: skip
#: The boolean columns.
FLAGS = ("causal", "best_peer")
#: All columns in order; every row has all of them.
COLUMNS = (
    "preset", "b", "hq", "hkv", "sq", "skv", "d", "dv", "causal", "window", "direction", "dtype", "way",
    "ms", "rounds", "clock", "tflops", "share", "share_of", "ours_over_it", "best_peer", "host_us", "host_out_us",
    "host_prepared_us", "cold_ms", "cold_kept_ms", "next_kept_ms", "cold_failed", "peak_bytes", "difference",
    "engine", "untuned_engine", "workspace_bytes", "plan_ms", "left_out", "matmul_tflops", "matmul_dtype", "copy_gbs",
    *STATE_COLUMNS, "gpu", "driver", "cudnn", "torch", "triton", "jax", "cudnn_frontend", "cupy", "numpy", "python",
    "cupy_sdpa",
)  # fmt: skip
#: The columns whose ratios are averaged, and their titles.
MEANS = {"ms": "time", "peak_bytes": "memory", "host_us": "host"}


def complete(row: Row) -> Row:
    """A row with all columns: None for missing values, and numbers rounded."""
    return {column: _rounded(column, row.get(column)) for column in COLUMNS}


def _rounded(column: str, value: Any) -> Any:
    if value is None or value == "":
        return None
    digits = NUMBERS.get(column)
    return value if digits is None else round(value, digits)


def read_csv(path: str | Path) -> list[Row]:
    """Read rows with all columns from a CSV file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a file of ``compare``.
    """
    with Path(path).open(newline="") as file:
        reader = csv.DictReader(file)
        try:
            missing = [column for column in ("preset", "direction", "way", "ms") if column not in (reader.fieldnames or ())]
            if missing:
                raise ValueError(f"it has no column {missing[0]}")
            rows = [complete({column: _parsed(column, text) for column, text in row.items()}) for row in reader]
            if not rows:
                raise ValueError("it has no rows")
        except ValueError as error:  # includes UnicodeDecodeError
            raise ValueError(f"{path} is not a CSV file of compare: {error}") from error
    return rows


def _parsed(column: str, text: str | None) -> Any:
    if not text:
        return None
    if column in FLAGS:
        return text == "True"
    if column in NUMBERS:
        return int(text) if NUMBERS[column] is None else float(text)
    return text


def by_case(rows: Iterable[Row]) -> dict[tuple[str, str], dict[str, Row]]:
    """The rows by (preset, direction), then by contender."""
    cases: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        cases.setdefault((row["preset"], row["direction"]), {})[row["way"]] = row
    return cases


def contenders_of(rows: Iterable[Row]) -> list[str]:
    """The names of the contenders in order of appearance."""
    return list(dict.fromkeys(row["way"] for row in rows))


def ratios(rows: Iterable[Row], direction: str, contender: str | None = None, column: str = "ms") -> list[float]:
    """Our values divided by a contender's, one for each preset.

    Args:
        rows: rows with all columns.
        direction: the direction.
        contender: its name; None for the fastest other contender of each preset.
        column: the column of the values. Ratios of times are medians of the ratios within a round.
    """
    values = []
    for (_, case_direction), found in by_case(rows).items():
        ours = found.get(Ours.name, {}).get(column)
        for name, row in found.items():
            selected = row["best_peer"] if contender is None else name == contender
            if case_direction == direction and selected and name != Ours.name and ours and row[column]:
                values.append(row["ours_over_it"] if column == "ms" else ours / row[column])
    return values


def summary(values: Sequence[float]) -> str:
    """The geometric mean and the range.

    >>> summary([0.5, 2.0])
    '1.00 (0.50 to 2.00)'
    """
    return f"{statistics.geometric_mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """The printed table: a line for each preset and direction, then means, clocks, and left-out contenders."""
    others = [name for name in contenders_of(rows) if name != Ours.name]
    yield from _table(rows, others)
    yield ""
    several = len({row["preset"] for row in rows}) > 1
    ratios_of = "Geometric means and ranges of the ratios" if several else "The ratios"
    yield f"The columns of other contenders: our time divided by theirs. {ratios_of}:"
    groups = {"on the GPU": [row for row in rows if row["gpu"]], "on the CPU": [row for row in rows if not row["gpu"]]}
    for title, group in groups.items():
        if group and all(groups.values()):
            yield f" {title}:"
        yield from _means(group, others)
    yield from _clocks(rows)
    yield from _left_out(rows)


def short(name: str) -> str:
    """A short column heading for a contender."""
    return {"torch-cudnn": "cudnn", "torch-flash": "flash", "cudnn-frontend": "frontend"}.get(name, name)


def _table(rows: Sequence[Row], others: Sequence[str]) -> Iterator[str]:
    of_gpus = {"tflops": ("TFLOP/s", ".0f"), "share": ("share", ".0%"), "host_us": ("host us", ".1f")}
    columns = {"ms": ("ms", ".4f")} | (of_gpus if any(row["gpu"] for row in rows) else {})
    table = [["preset", "direction", *(title for title, _ in columns.values()), *map(short, others)]]
    for (preset, direction), found in by_case(rows).items():
        ours = found.get(Ours.name, complete({}))
        values = [_cell(ours[column], form) for column, (_, form) in columns.items()]
        ratios = [_cell(found[name]["ours_over_it"], ".3f") if name in found else "" for name in others]
        table.append([preset, direction, *values, *ratios])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        left = [cell.ljust(width) for cell, width in zip(cells[:2], widths, strict=False)]
        right = [cell.rjust(width) for cell, width in zip(cells[2:], widths[2:], strict=True)]
        yield "  ".join([*left, *right]).rstrip()


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _means(rows: Sequence[Row], others: Sequence[str]) -> Iterator[str]:
    present = [name for name in others if any(row["way"] == name for row in rows)]
    names = (None, *present) if len(present) > 1 else present
    for direction, name in itertools.product(dict.fromkeys(row["direction"] for row in rows), names):
        values = [(title, ratios(rows, direction, name, column)) for column, title in MEANS.items()]
        texts = (f"{title} {summary(found) if len(found) > 1 else format(found[0], '.2f')}" for title, found in values if found)
        if text := ", ".join(texts):
            yield f"  {direction:9} {name or 'the fastest':15} {text}"


def _clocks(rows: Sequence[Row]) -> Iterator[str]:
    """The contenders that are not timed by events; their times may include the host's."""
    counts: dict[tuple[str, str], int] = {}
    for row in rows:
        if row["gpu"] and row["clock"] and row["clock"] != "events":
            counts[row["way"], row["clock"]] = counts.get((row["way"], row["clock"]), 0) + 1
    if counts:
        yield ""
        yield "may include the host's time:"
    for (name, clock), count in counts.items():
        yield f"  {name}, {count} times: {clock}"


def _left_out(rows: Sequence[Row]) -> Iterator[str]:
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["left_out"]:
            reasons.setdefault((row["way"], row["left_out"]), []).append(f"{row['preset']} {row['direction']}")
    if reasons:
        yield ""
        yield "left out:"
    for (name, reason), cases in reasons.items():
        more = f" and {len(cases) - 1} more" if len(cases) > 1 else ""
        yield f"  {name} ({cases[0]}{more}): {reason}"
