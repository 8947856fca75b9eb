"""``support``: what runs where by the table, and, measured, whether the table is right."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from ..errors import CudnnError
from ..offline import problems, survey
from ..offline.page import page
from ..problem.problem import Problem
from ..support.why_not import GUARDS_OFF
from ..version import RELEASES, version_number, version_text
from . import machine
from .console import CommandError, Help, Progress, one_line, say, width
from .plain import plain

_EPILOG = f"""\
examples:
  python -m cupy_sdpa support --measure          plan every problem for every
                                                 described GPU, and compare
  python -m cupy_sdpa support --measure --pairs  the same for every pair of
                                                 options (half an hour)
  python -m cupy_sdpa support --markdown         the page of the documentation

{GUARDS_OFF}=NAME,... turns rows of the table off, for a process
that knows better.
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "support",
        help="what runs where, and whether that is still true",
        description="What each cuDNN and GPU can run, and every known bug; or, measured, whether that is right.",
        epilog=_EPILOG,
        formatter_class=Help,
    )
    parser.add_argument("--cudnn", metavar="VERSION", help="the version (default: the newest known), or with --measure a path")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--markdown", action="store_true", help="as the page of the documentation")
    what.add_argument(
        "--measure", action="store_true", help="plan everything, for GPUs that need not be here (a minute or two)"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--pairs", action="store_true", help="with --measure: every pair of options")
    which.add_argument("--operations", action="store_true", help="with --measure: every operation of score functions")
    parser.set_defaults(command=command)


def command(arguments: argparse.Namespace) -> int:
    """Run ``support``; 1 where the table is not right."""
    if (arguments.pairs or arguments.operations) and not arguments.measure:
        name = "--pairs" if arguments.pairs else "--operations"
        raise CommandError(f"{name} says what to plan, and nothing is planned without --measure: support --measure {name}")
    if arguments.measure:
        machine.check_library(arguments.cudnn)
        others = problems.operations() if arguments.operations else problems.PROBES
        return _measure(arguments.cudnn, problems.pairs() if arguments.pairs else others)
    try:
        version = version_number(arguments.cudnn) if arguments.cudnn else RELEASES[-1]
    except ValueError as error:
        raise CommandError(str(error)) from error
    lines = page(version)
    if arguments.markdown:
        print("\n".join(lines))
        return 0
    for line in plain(lines, width()):
        print(line)
    return 0


def _measure(cudnn: str | None, probes: Mapping[str, Problem]) -> int:
    try:
        with Progress("planning") as progress:
            version, findings = survey.measure(probes, cudnn, progress)
    except CudnnError as error:
        raise CommandError(machine.brief(error)) from error
    wrong = [finding for finding in findings if not finding.agree]
    for finding in wrong:
        says = ", ".join(finding.rules) or "it runs"
        say("differs", f"{finding.probe} on {finding.gpu}: the table says: {says}; cuDNN: {one_line(finding.measured)}")
    say("measured", f"{len(findings)} problems with cuDNN {version_text(version)}: {len(wrong)} differ from the table")
    return 1 if wrong else 0
