"""Command lines and result files of the benchmark scripts."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cupy_sdpa._cli.helpers import machine
from cupy_sdpa._cli.helpers.console import CommandError, Help, output_file


def parser(command: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser for ``python -m benchmarks COMMAND``.

    Args:
        command: the command's name.
        doc: the module's docstring; its first line is the description.
    """
    description = (doc or "").splitlines()[0]
    return argparse.ArgumentParser(prog=f"python -m benchmarks {command}", description=description, formatter_class=Help)


def add_csv(arguments: argparse.ArgumentParser) -> None:
    """Add the optional path of a script's CSV file."""
    arguments.add_argument("csv", nargs="?", type=output_file, metavar="FILE", help="write the rows to this CSV file")


def csv_path(command: str, doc: str | None, words: Sequence[str]) -> Path | None:
    """Parse the command line of a script that needs a GPU and whose only argument is the optional path of its CSV file.

    Raises:
        CommandError: there is no GPU.
    """
    arguments = parser(command, doc)
    add_csv(arguments)
    path: Path | None = arguments.parse_args(words).csv
    check_gpu(command)
    return path


def check_gpu(command: str) -> None:
    """Check that there is a GPU; loads no cuDNN, so that a peer that is imported later can load its own.

    Raises:
        CommandError: there is none.
    """
    if reason := machine.no_gpu():
        raise CommandError(f"{command} needs a GPU ({reason})")


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
