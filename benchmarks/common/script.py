"""Command lines and result files of the benchmark scripts."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cupy_sdpa._cli.helpers.console import Help


def parser(command: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser for ``python -m benchmarks COMMAND``.

    Args:
        command: the command's name.
        doc: the module's docstring; its first line is the description.
    """
    description = (doc or "").splitlines()[0]
    return argparse.ArgumentParser(prog=f"python -m benchmarks {command}", description=description, formatter_class=Help)


def csv_path(command: str, doc: str | None, words: Sequence[str]) -> str | None:
    """Parse the command line of a script whose only argument is the optional path of its CSV file."""
    arguments = parser(command, doc)
    arguments.add_argument("csv", nargs="?", metavar="FILE", help="write the rows to this CSV file")
    path: str | None = arguments.parse_args(words).csv
    return path


def listed(facts: Mapping[str, Any]) -> str:
    """Names and values on one line.

    >>> listed({"ms": 0.5, "engine": 3})
    'ms 0.5, engine 3'
    """
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def write_csv(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows that all have the same columns."""
    with Path(path).open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
