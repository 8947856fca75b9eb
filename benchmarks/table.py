"""The rows of ``compare``: their columns, reading them from CSV, and geometric means; and the rows of other recorded results.

The column ``way`` is the contender's name, and ``ours_over_it`` is our time divided by the contender's. Both names are part
of the format of the files.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .contenders.ours import Ours

Row = dict[str, Any]
RESULTS = Path(__file__).parent / "results"

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
    "engine", "workspace_bytes", "plan_ms", "left_out", "matmul_tflops", "matmul_dtype", "copy_gbs",
    "gpu", "driver", "cudnn", "torch", "triton", "jax", "cudnn_frontend", "cupy", "numpy", "python",
    "cupy_sdpa",
)  # fmt: skip
#: The columns whose ratios are averaged, and their titles.
MEANS = {"ms": "time", "peak_bytes": "memory", "host_us": "host"}


def complete(row: Row) -> Row:
    """Return a row with all columns: None for missing values, and numbers rounded."""
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


def read(*names: str) -> list[dict[str, str]]:
    """Return the rows of files in ``benchmarks/results``, as texts."""
    rows = []
    for name in names:
        with (RESULTS / name).open(newline="") as file:
            rows += list(csv.DictReader(file))
    return rows


def by_case(rows: Iterable[Row]) -> dict[tuple[str, str], dict[str, Row]]:
    """Return the rows by (preset, direction), then by contender."""
    cases: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        cases.setdefault((row["preset"], row["direction"]), {})[row["way"]] = row
    return cases


def contenders_of(rows: Iterable[Row]) -> list[str]:
    """Return the names of the contenders in order of appearance."""
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
    """Return the geometric mean and the range.

    >>> summary([0.5, 2.0])
    '1.00 (0.50 to 2.00)'
    """
    return f"{statistics.geometric_mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def short(name: str) -> str:
    """Return a short column heading for a contender."""
    return {"torch-cudnn": "cudnn", "torch-flash": "flash", "cudnn-frontend": "frontend"}.get(name, name)
