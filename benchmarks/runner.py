"""The command line of a benchmark, and the loop that prints its rows and writes them to a CSV file."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cupy_sdpa.cli import machine
from cupy_sdpa.cli.console import CommandError, Help, output_file

from .device import free_memory, versions

Row = dict[str, Any]


def parser(command: str, doc: str | None) -> argparse.ArgumentParser:
    """Return a parser for ``python -m benchmarks COMMAND``.

    Args:
        command: the command's name.
        doc: the module's docstring; its first line is the description.
    """
    description = (doc or "").splitlines()[0]
    return argparse.ArgumentParser(prog=f"python -m benchmarks {command}", description=description, formatter_class=Help)


def run(
    command: str,
    doc: str | None,
    words: Sequence[str],
    rows: Callable[[argparse.Namespace], Iterator[Row]],
    add: Callable[[argparse.ArgumentParser], object] = lambda parser: None,
    *,
    needs_gpu: Callable[[argparse.Namespace], bool] = lambda given: True,
    shown: Sequence[str] = (),
    failed: Callable[[Row], bool] = lambda row: False,
) -> int:
    """Run a benchmark: print its rows, and write them after each, so that an interrupted run keeps its rows.

    Args:
        command, doc: see :func:`parser`.
        words: the command line.
        rows: yields the rows for the options. The versions of the libraries are added to each.
        add: adds options to the parser. The path of the CSV file is one already.
        needs_gpu: whether these options need a GPU.
        shown: the columns that are printed; all if empty.
        failed: whether a row reports a failure.

    Returns:
        1 if a row reports a failure.

    Raises:
        CommandError: there is no GPU.
    """
    arguments = parser(command, doc)
    arguments.add_argument("csv", nargs="?", type=output_file, metavar="FILE", help="write the rows to this CSV file")
    add(arguments)
    given = arguments.parse_args(words)
    on_gpu = needs_gpu(given)
    if on_gpu:
        check_gpu(command, "; --cpu needs none" * hasattr(given, "cpu"))
    found: list[Row] = []
    used: dict[str, str] = {}
    for row in rows(given):
        if on_gpu and not used:  # peers have been imported
            torch = getattr(sys.modules.get("torch"), "__version__", None)
            used = versions(**({"torch": str(torch)} if torch else {}))
            print(listed(used))
        print(listed({name: row[name] for name in shown or row if row[name] not in (None, "")}), flush=True)
        found.append({**row, **used})
        if on_gpu:
            free_memory()
        if given.csv:
            write_csv(given.csv, found)
    return int(any(map(failed, found)))


def check_gpu(command: str, remedy: str = "") -> None:
    """Check that there is a GPU; loads no cuDNN, so that a peer that is imported later can load its own.

    Raises:
        CommandError: there is no GPU.
    """
    if reason := machine.no_gpu():
        raise CommandError(f"{command} needs a GPU ({reason}){remedy}")


def listed(facts: Mapping[str, Any]) -> str:
    """Names and values on one line.

    >>> listed({"ms": 0.5, "engine": 3})
    'ms 0.5, engine 3'
    """
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def write_csv(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows with the columns of the first row."""
    with Path(path).open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
