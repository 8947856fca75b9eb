"""The rows of a run: as CSV and back, as a table for a terminal, and their ratios in the mean."""

from __future__ import annotations

import csv
import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .facts import STATE_COLUMNS
from .way import Ours

Row = dict[str, Any]

#: The columns of numbers, with how many digits behind the point are kept; None for whole numbers.
NUMBERS: dict[str, int | None] = {
    **dict.fromkeys(("b", "hq", "hkv", "sq", "skv", "d", "dv", "window", "rounds", "peak_bytes", "workspace_bytes")),
    "ms": 5, "tflops": 2, "share": 4, "ours_over_it": 4, "difference": 6, "plan_ms": 1, "matmul_tflops": 1, "copy_gbs": 1,
    **dict.fromkeys(("host_us", "host_out_us", "host_prepared_us", "cold_ms", "cold_kept_ms", "next_kept_ms"), 2),
}  # fmt: skip
#: Those that are true or false.
FLAGS = ("causal", "best_peer")
#: All of them, in order; every row has every one.
COLUMNS = (
    "preset", "b", "hq", "hkv", "sq", "skv", "d", "dv", "causal", "window", "direction", "dtype", "way",
    "ms", "rounds", "clock", "tflops", "share", "share_of", "ours_over_it", "best_peer", "host_us", "host_out_us",
    "host_prepared_us", "cold_ms", "cold_kept_ms", "next_kept_ms", "cold_failed", "peak_bytes", "difference",
    "engine", "untuned_engine", "workspace_bytes", "plan_ms", "left_out", "matmul_tflops", "matmul_dtype", "copy_gbs",
    *STATE_COLUMNS, "gpu", "driver", "cudnn", "torch", "triton", "jax", "cudnn_frontend", "cupy", "numpy", "python",
    "cupy_sdpa",
)  # fmt: skip


#: What the means are of, and how it is called.
MEANS = {"ms": "time", "peak_bytes": "memory", "host_us": "host"}


def tidy(row: Row) -> Row:
    """A row with every column, None where it has nothing, and with as many digits as are kept."""
    return {column: _rounded(column, row.get(column)) for column in COLUMNS}


def _rounded(column: str, value: Any) -> Any:
    if value is None or value == "":
        return None
    digits = NUMBERS.get(column)
    return value if digits is None else round(value, digits)


def write_csv(path: str | Path, rows: Sequence[Row]) -> None:
    """Rows of one and the same columns, as CSV."""
    with Path(path).open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read_csv(path: str | Path) -> list[Row]:
    """What :func:`write_csv` has written of tidy rows.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such file.
    """
    with Path(path).open(newline="") as file:
        reader = csv.DictReader(file)
        try:
            missing = [column for column in ("preset", "direction", "way", "ms") if column not in (reader.fieldnames or ())]
            if missing:
                raise ValueError(f"it has no column {missing[0]}")
            rows = [tidy({column: _read(column, text) for column, text in row.items()}) for row in reader]
            if not rows:
                raise ValueError("it has no rows")
        except ValueError as error:  # UnicodeDecodeError, too
            raise ValueError(f"{path} is no file of the bench: {error}") from error
    return rows


def _read(column: str, text: str | None) -> Any:
    if not text:
        return None
    if column in FLAGS:
        return text == "True"
    if column in NUMBERS:
        return int(text) if NUMBERS[column] is None else float(text)
    return text


def cases(rows: Iterable[Row]) -> dict[tuple[str, str], dict[str, Row]]:
    """The rows by preset and direction, and those by way."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row["preset"], row["direction"]), {})[row["way"]] = row
    return found


def ways_of(rows: Iterable[Row]) -> list[str]:
    """The ways that there are, in order."""
    return list(dict.fromkeys(row["way"] for row in rows))


def ratios(rows: Iterable[Row], direction: str, way: str | None = None, column: str = "ms") -> list[float]:
    """Our figures over a way's in one direction, a preset each; None for the way that takes the least time with each."""
    found = []
    for (_, towards), ways in cases(rows).items():
        ours = ways.get(Ours.name, {}).get(column)
        for name, row in ways.items():
            wanted = row["best_peer"] if way is None else name == way
            if towards == direction and wanted and name != Ours.name and ours and row[column]:
                found.append(row["ours_over_it"] if column == "ms" else ours / row[column])  # times: round by round
    return found


def summary(every: Sequence[float]) -> str:
    """The geometric mean, and from where to where.

    >>> summary([0.5, 2.0])
    '1.00 (0.50 to 2.00)'
    """
    return f"{statistics.geometric_mean(every):.2f} ({min(every):.2f} to {max(every):.2f})"


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """The table, a preset and direction a line, and below it the means and what was left out."""
    others = [way for way in ways_of(rows) if way != Ours.name]
    table = [["preset", "direction", "ms", "TFLOP/s", "share", "host us", *map(short, others)]]
    for (preset, direction), ways in cases(rows).items():
        ours = ways.get(Ours.name, tidy({}))
        figures = [_cell(ours["ms"], ".4f"), _cell(ours["tflops"], ".0f"), _share(ours), _cell(ours["host_us"], ".1f")]
        theirs = [_cell(ways[way]["ours_over_it"], ".3f") if way in ways else "" for way in others]
        table.append([preset, direction, *figures, *theirs])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        left = [cell.ljust(width) for cell, width in zip(cells[:2], widths, strict=False)]
        right = [cell.rjust(width) for cell, width in zip(cells[2:], widths[2:], strict=True)]
        yield "  ".join([*left, *right]).rstrip()
    yield ""
    yield "In the columns of the others: our time over theirs. Geometric means of such ratios, and from where to where:"
    places = {"on the GPU": [row for row in rows if row["gpu"]], "on the CPU": [row for row in rows if not row["gpu"]]}
    for place, where in places.items():
        if where and all(places.values()):
            yield f" {place}:"
        for direction, way in itertools.product(dict.fromkeys(row["direction"] for row in where), (None, *others)):
            found = [(title, ratios(where, direction, way, column)) for column, title in MEANS.items()]
            if told := ", ".join(f"{title} {summary(every)}" for title, every in found if every):
                yield f"  {direction:9} {way or 'the fastest':15} {told}"
    yield from _clocks(rows)
    yield from _left_out(rows)
    yield from _cold(rows)


def short(way: str) -> str:
    """A heading that is no wider than its figures need."""
    return {"torch-cudnn": "cudnn", "torch-flash": "flash", "cudnn-frontend": "frontend"}.get(way, way)


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _share(row: Row) -> str:
    return "-" if row["share"] is None else f"{row['share']:.0%}"


def _clocks(rows: Sequence[Row]) -> Iterator[str]:
    """The ways that are not timed by events, for the host's time may be in theirs."""
    others: dict[tuple[str, str], int] = {}
    for row in rows:
        if row["gpu"] and row["clock"] and row["clock"] != "events":
            others[row["way"], row["clock"]] = others.get((row["way"], row["clock"]), 0) + 1
    if others:
        yield ""
        yield "the host's time may be in:"
    for (way, clock), count in others.items():
        yield f"  {way}, {count} times: {clock}"


def _left_out(rows: Sequence[Row]) -> Iterator[str]:
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["left_out"]:
            reasons.setdefault((row["way"], row["left_out"]), []).append(f"{row['preset']} {row['direction']}")
    if reasons:
        yield ""
        yield "left out:"
    for (way, reason), where in reasons.items():
        more = f" and {len(where) - 1} more" if len(where) > 1 else ""
        yield f"  {way} ({where[0]}{more}): {reason}"


def _cold(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        begin = f"first call of a new process, {row['preset']}, {row['way']}"
        if row["cold_ms"] is not None:
            yield f"{begin}: {row['cold_ms']:.1f} ms"
            if row["cold_kept_ms"] is not None:
                yield f"  with its plan kept {row['cold_kept_ms']:.1f} ms; and the next plan kept {row['next_kept_ms']:.1f} ms"
        elif row["cold_failed"]:
            yield f"{begin}: {row['cold_failed']}"
