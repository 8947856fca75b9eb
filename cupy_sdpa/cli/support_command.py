"""``support``: print the support table."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from ..extend.cudnn import Cudnn
from .console import add_json, command_errors, print_wrapped, result
from .support_problems import PROBES

DESCRIPTION = "Print what each cuDNN version and GPU can run, and all known bugs."
EPILOG = """\
examples:
  python -m cupy_sdpa support --cudnn 9.19      what cuDNN 9.19 can run

Set CUPY_SDPA_GUARDS_OFF=NAME,... to turn off rows of the table for one process.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--cudnn", metavar="VERSION", help="the cuDNN version (default: the newest known one)")
    add_json(parser)


def command(arguments: argparse.Namespace) -> int:
    """Run ``support``."""
    with command_errors():
        table = Cudnn(arguments.cudnn).support_table(PROBES)
    if not result(**table):
        print_wrapped("\n".join(_lines(table)))
    return 0


def _lines(table: Mapping[str, Any]) -> Iterator[str]:
    """Yield the support table as text."""
    yield f"cuDNN {table['cudnn']} ({table['minimum_cudnn']} or newer is required)"
    listed = (f"{gpu['name'].upper()} ({gpu['compute_capability']}, {gpu['origin']})" for gpu in table["gpus"])
    yield f"described GPUs: {', '.join(listed)}"
    yield "\nproblems:"
    for problem in table["problems"]:
        yield f"  {problem['name']}: {_verdict(problem['gpus'])}"
    yield "\nrules:"
    for rule in table["rules"]:
        yield f"  {rule['name']}: {rule['summary']} ({rule['error'] if rule['refuses'] else 'unverified'})"
    yield "\nknown bugs of cuDNN:"
    yield from dict.fromkeys(map(_bug, table["bugs"]))  # a bug has one row for each range of versions
    yield "\nPairs of options, operations of score functions, links: docs/support.md"


def _bug(bug: Mapping[str, Any]) -> str:
    action = ", ".join(bug["workarounds"]) or f"not supported: {bug['remedy']}"
    return f"  {bug['name']}: {bug['when']}: {bug['effect']} ({action})".replace("`", "")


def _verdict(support: Mapping[str, Any]) -> str:
    """Return ``yes`` if all GPUs run a problem; otherwise list the GPUs for each verdict, with its rules."""
    found: dict[str, list[str]] = {}
    for gpu, of in support.items():
        verdict = "yes" if of["runs"] else "no"
        if of["rules"]:
            verdict = f"{'unverified' if of['runs'] else 'no'} ({', '.join(of['rules'])})"
        found.setdefault(verdict, []).append(gpu.upper())
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{', '.join(names)} {verdict}" for verdict, names in found.items())
