"""``support``: print the support table, or check it by planning with cuDNN."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ..errors import CudnnError
from ..offline import problems, survey
from ..offline.page import page
from ..problem.problem import Problem
from ..support import gpus
from ..support.known_bugs import BUGS, GUARDS, Bug
from ..support.rules import RULES
from ..support.why_not import GUARDS_OFF, unverified_rules, why_not
from ..version import MINIMUM_CUDNN, RELEASES, version_number, version_text
from .helpers import machine
from .helpers.console import CommandError, Help, Progress, add_json, counted, one_line, print_labeled, print_wrapped, result

_EPILOG = f"""\
examples:
  python -m cupy_sdpa support --measure          plan every problem for every
                                                 described GPU, and compare with
                                                 the table
  python -m cupy_sdpa support --measure --pairs  the same for every pair of
                                                 options (half an hour)
  python -m cupy_sdpa support --markdown         the page of the documentation

{GUARDS_OFF}=NAME,... turns off rows of the table in a process.
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "support",
        description="Print what each cuDNN version and GPU can run, and all known bugs; or check this table with cuDNN.",
        epilog=_EPILOG,
        formatter_class=Help,
    )
    parser.add_argument(
        "--cudnn",
        metavar="VERSION",
        help="the cuDNN version (default: the newest known one); with --measure the library's path",
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--markdown", action="store_true", help="print the page of the documentation")
    mode.add_argument("--measure", action="store_true", help="plan all problems for all described GPUs (a minute or two)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--pairs", action="store_true", help="with --measure: every pair of options")
    which.add_argument("--operations", action="store_true", help="with --measure: every operation of score functions")
    add_json(parser)
    parser.set_defaults(command=command)


def command(arguments: argparse.Namespace) -> int:
    """Run ``support``; returns 1 if cuDNN contradicts the table."""
    if (arguments.pairs or arguments.operations) and not arguments.measure:
        name = "--pairs" if arguments.pairs else "--operations"
        raise CommandError(f"{name} has no effect without --measure: use support --measure {name}")
    if arguments.measure:
        machine.check_library(arguments.cudnn)
        others = problems.operations() if arguments.operations else problems.PROBES
        return _measure(arguments.cudnn, problems.pairs() if arguments.pairs else others)
    try:
        version = version_number(arguments.cudnn) if arguments.cudnn else RELEASES[-1]
    except ValueError as error:
        raise CommandError(str(error)) from error
    if result(**_facts(version)):
        return 0
    if arguments.markdown:
        print("\n".join(page(version)))
    else:
        print_wrapped("\n".join(_lines(version)))
    return 0


def _facts(version: int) -> dict[str, Any]:
    """The support table for a cuDNN version; docs/command_line.md lists the keys."""
    named = {**problems.PROBES, **problems.pairs(), **problems.operations()}
    return {
        "cudnn": version_text(version), "minimum_cudnn": version_text(MINIMUM_CUDNN),
        "gpus": [
            {"name": name, "compute_capability": gpus.capability(name) / 10, "origin": gpus.origin(name)} for name in gpus.NAMES
        ],
        "problems": [
            {"name": name, "gpus": {gpu: _support(problem, version, gpu)._asdict() for gpu in gpus.REPRESENTATIVES}}
            for name, problem in named.items()
        ],
        "rules": [{"name": rule.name, "summary": rule.summary, "refuses": rule.refuses} for rule in RULES],
        "bugs": [
            {"name": bug.name, "when": bug.when, "effect": bug.effect, "guards": sorted(bug.guards), "remedy": bug.remedy}
            for bug in BUGS
        ],
    }  # fmt: skip


class _Support(NamedTuple):
    """Whether a GPU runs a problem.

    Attributes:
        runs: whether no rule refuses it.
        rules: the rules that refuse it, or those for which its results are unverified.
    """

    runs: bool
    rules: tuple[str, ...]

    def __str__(self) -> str:
        if self.runs and not self.rules:
            return "yes"
        return f"{'unverified' if self.runs else 'no'} ({', '.join(self.rules)})"


def _support(problem: Problem, version: int, gpu: str) -> _Support:
    capability = gpus.capability(gpu)
    if refusing := tuple(dict.fromkeys(reason.rule for reason in why_not(problem, version, capability))):
        return _Support(False, refusing)
    return _Support(True, tuple(dict.fromkeys(name for name, _ in unverified_rules(problem, version, capability))))


def _lines(version: int) -> Iterator[str]:
    """The support table for a cuDNN version as text."""
    yield f"cuDNN {version_text(version)} ({version_text(MINIMUM_CUDNN)} or newer is required)"
    listed = (f"{name.upper()} ({gpus.capability(name) / 10}, {gpus.origin(name)})" for name in gpus.NAMES)
    yield f"described GPUs: {', '.join(listed)}"
    yield "\nproblems:"
    for name, problem in problems.PROBES.items():
        yield f"  {name}: {_verdict(problem, version)}"
    yield from _exceptions("pairs of options", problems.pairs(), version)
    yield from _exceptions("operations of score and mask functions", problems.operations(), version)
    yield "\nrules:"
    for rule in RULES:
        yield f"  {rule.name}: {rule.summary} ({rule.error.__name__ if rule.refuses else 'unverified'})"
    yield "\nknown bugs of cuDNN:"
    yield from dict.fromkeys(map(_bug, BUGS))  # a bug has a row for each range of versions
    yield "\nLinks and versions: python -m cupy_sdpa support --markdown"


def _bug(bug: Bug) -> str:
    action = ", ".join(GUARDS[guard] for guard in sorted(bug.guards)) or f"refused: {bug.remedy}"
    return f"  {bug.name}: {bug.when}: {bug.effect} ({action})".replace("`", "")


def _exceptions(title: str, named: Mapping[str, Problem], version: int) -> Iterator[str]:
    """The problems that some GPU cannot run, or for which it is unverified."""
    verdicts = {name: _verdict(problem, version) for name, problem in named.items()}
    exceptions = {name: verdict for name, verdict in verdicts.items() if verdict != "yes"}
    yield f"\n{title}: {len(verdicts) - len(exceptions)} of {len(verdicts)} run on all GPUs; the others are:"
    for name, verdict in exceptions.items():
        yield f"  {name}: {verdict}".replace("`", "")


def _verdict(problem: Problem, version: int) -> str:
    """``yes`` if all GPUs run a problem, else the GPUs by verdict, with the rules."""
    found: dict[str, list[str]] = {}
    for gpu in gpus.REPRESENTATIVES:
        found.setdefault(str(_support(problem, version, gpu)), []).append(gpu.upper())
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{', '.join(names)} {verdict}" for verdict, names in found.items())


def _measure(cudnn: str | None, probes: Mapping[str, Problem]) -> int:
    try:
        with Progress("planning") as progress:
            version, findings = survey.measure(probes, cudnn, progress)
    except CudnnError as error:
        raise CommandError(machine.brief(error)) from error
    wrong = [finding for finding in findings if not finding.agree]
    for finding in wrong:
        expected = ", ".join(finding.rules) or "it runs"
        text = f"{finding.probe} on {finding.gpu}: table: {expected}; cuDNN: {one_line(finding.measured)}"
        print_labeled("differs", text)
    result(
        cudnn=version_text(version), planned=len(findings),
        differs=[
            {"problem": finding.probe, "gpu": finding.gpu, "rules": list(finding.rules), "cudnn": finding.measured}
            for finding in wrong
        ],
    )  # fmt: skip
    print_labeled(
        "measured",
        f"{counted(len(findings), 'problem')} with cuDNN {version_text(version)}: {len(wrong)} differ from the table",
    )
    return 1 if wrong else 0
