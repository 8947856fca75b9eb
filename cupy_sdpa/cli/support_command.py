"""``support``: print the support table."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, NamedTuple

from .. import Problem
from ..core.support import gpus
from ..core.support.known_bugs import BUGS, GUARDS, Bug
from ..core.support.rules import RULES
from ..core.support.why_not import GUARDS_OFF, unverified_rules, why_not
from ..core.version import MINIMUM_CUDNN, RELEASES, version_number, version_text
from .console import add_json, command_errors, print_wrapped, result
from .support_problems import PROBES

DESCRIPTION = "Print what each cuDNN version and GPU can run, and all known bugs."
EPILOG = f"""\
examples:
  python -m cupy_sdpa support --cudnn 9.19      what another version can run

{GUARDS_OFF}=NAME,... turns off rows of the table in a process.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--cudnn", metavar="VERSION", help="the cuDNN version (default: the newest known one)")
    add_json(parser)


def command(arguments: argparse.Namespace) -> int:
    """Run ``support``."""
    with command_errors():
        version = version_number(arguments.cudnn) if arguments.cudnn else RELEASES[-1]
    if not result(**_facts(version)):
        print_wrapped("\n".join(_lines(version)))
    return 0


def _facts(version: int) -> dict[str, Any]:
    """Return the support table for a cuDNN version; docs/command_line.md lists the keys."""
    return {
        "cudnn": version_text(version), "minimum_cudnn": version_text(MINIMUM_CUDNN),
        "gpus": [
            {"name": name, "compute_capability": gpus.capability_of(name) / 10, "origin": gpus.origin(name)}
            for name in gpus.NAMES
        ],
        "problems": [
            {"name": name, "gpus": {gpu: _support(problem, version, gpu)._asdict() for gpu in gpus.REPRESENTATIVES}}
            for name, problem in PROBES.items()
        ],
        "rules": [{"name": rule.name, "summary": rule.summary, "refuses": rule.refuses} for rule in RULES],
        "bugs": [
            {"name": bug.name, "when": bug.when, "effect": bug.effect, "guards": sorted(bug.guards), "remedy": bug.remedy}
            for bug in BUGS
        ],
    }  # fmt: skip


class _Support(NamedTuple):
    """Whether a GPU runs a problem, and the rules that rule it out or leave its results unverified."""

    runs: bool
    rules: tuple[str, ...]

    def __str__(self) -> str:
        if self.runs and not self.rules:
            return "yes"
        return f"{'unverified' if self.runs else 'no'} ({', '.join(self.rules)})"


def _support(problem: Problem, version: int, gpu: str) -> _Support:
    capability = gpus.capability_of(gpu)
    if refusing := tuple(dict.fromkeys(reason.rule for reason in why_not(problem, version, capability))):
        return _Support(False, refusing)
    return _Support(True, tuple(dict.fromkeys(name for name, _ in unverified_rules(problem, version, capability))))


def _lines(version: int) -> Iterator[str]:
    """Yield the support table for a cuDNN version as text."""
    yield f"cuDNN {version_text(version)} ({version_text(MINIMUM_CUDNN)} or newer is required)"
    listed = (f"{name.upper()} ({gpus.capability_of(name) / 10}, {gpus.origin(name)})" for name in gpus.NAMES)
    yield f"described GPUs: {', '.join(listed)}"
    yield "\nproblems:"
    for name, problem in PROBES.items():
        yield f"  {name}: {_verdict(problem, version)}"
    yield "\nrules:"
    for rule in RULES:
        yield f"  {rule.name}: {rule.summary} ({rule.error.__name__ if rule.refuses else 'unverified'})"
    yield "\nknown bugs of cuDNN:"
    yield from dict.fromkeys(map(_bug, BUGS))  # a bug has a row for each range of versions
    yield "\nPairs of options, operations of score functions, links: docs/support.md"


def _bug(bug: Bug) -> str:
    action = ", ".join(GUARDS[guard] for guard in sorted(bug.guards)) or f"refused: {bug.remedy}"
    return f"  {bug.name}: {bug.when}: {bug.effect} ({action})".replace("`", "")


def _verdict(problem: Problem, version: int) -> str:
    """``yes`` if all GPUs run a problem, else the GPUs by verdict, with the rules."""
    found: dict[str, list[str]] = {}
    for gpu in gpus.REPRESENTATIVES:
        found.setdefault(str(_support(problem, version, gpu)), []).append(gpu.upper())
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{', '.join(names)} {verdict}" for verdict, names in found.items())
