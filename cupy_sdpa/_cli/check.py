"""``check``: a randomized self-test of this GPU and cuDNN, or of the CPU engine and of planning."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from .._cudnn.library import library
from ..device import cupy_runtime
from ..errors import CudnnError
from ..version import __version__, version_text
from . import machine
from .console import CommandError, Help, one_line, positive, say

if TYPE_CHECKING:
    from ..check.summary import Finding, Summary

_EPILOG = """\
examples:
  python -m cupy_sdpa check                     one minute
  python -m cupy_sdpa check --minutes 20 --json report.json
  python -m cupy_sdpa check --engine cpu --seed 7 --problems 500

exit status: 0 nothing was found; 1 something was; 2 nothing could run.
To report a finding, attach the file that --json writes.
"""
#: Seconds between lines of progress where they do not overwrite one another.
_INTERVAL = 10.0
#: The most findings that are printed; the report has all of them.
_MOST = 12


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "check",
        help="a randomized self-test of this GPU and cuDNN",
        description="Draw problems from the whole input space, run each several times in worker processes, and compare "
        "every result with a float64 reference. Without a GPU: the CPU engine, and planning for described GPUs.",
        epilog=_EPILOG,
        formatter_class=Help,
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help="how long to draw problems (default: 1); making findings smaller takes up to 2 minutes more, 4 if problems hang",
    )
    parser.add_argument("--problems", type=positive, metavar="N", help="how many problems, in place of a time")
    parser.add_argument("--seed", type=int, help="of the problems; the same seed draws the same (default: a random one)")
    parser.add_argument(
        "--engine",
        choices=("gpu", "cpu", "plan"),
        action="append",
        help="what to test; may be given twice (default: gpu; without one cpu and plan)",
    )
    parser.add_argument("--lengths", type=_lengths, metavar="SQ,SKV", help="the numbers of queries and keys (default: drawn)")
    parser.add_argument("--jobs", type=positive, metavar="N", help="worker processes (default: one per CPU core, 8 on a GPU)")
    parser.add_argument(
        "--json",
        metavar="FILE",
        type=Path,
        help="write a report that can be attached to an issue: before findings are made smaller, and again at the end",
    )
    parser.add_argument("--case", metavar="LITERAL", help="run one case that a finding has printed")
    parser.set_defaults(command=command)


def _lengths(text: str) -> tuple[int, int]:
    queries, comma, keys = text.partition(",")
    if not (comma and queries.isdecimal() and keys.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a pair of lengths such as 1,276")
    return int(queries), int(keys)


def command(arguments: argparse.Namespace) -> int:
    """Run ``check``; 1 where something was found."""
    from ..check.cases.case import parse
    from ..check.run import cases, run

    seed = secrets.randbelow(10**6) if arguments.seed is None else arguments.seed
    if seed < 0:
        raise CommandError(f"--seed {seed}: give a whole number, 0 or more")
    minutes = 1.0 if arguments.minutes is None and arguments.problems is None else arguments.minutes
    if minutes is not None and not minutes > 0:
        raise CommandError(f"--minutes {minutes}: give a positive number")
    if arguments.json and not arguments.json.absolute().parent.is_dir():
        raise CommandError(f"--json {arguments.json}: there is no such folder")
    try:
        one = parse(arguments.case) if arguments.case else None
    except ValueError as error:
        raise CommandError(f"--case: {error}") from None
    engines = _engines([one.engine] if one else arguments.engine)
    jobs = 1 if one else arguments.jobs or _jobs(engines)
    bound = "1 problem" if one else f"{minutes:g} min" if minutes else f"{arguments.problems} problems"
    say("seed", f"{seed}; {bound}, {jobs} worker process{'es' * (jobs > 1)}")
    with _Progress(None if minutes is None else 60 * minutes, arguments.problems) as progress:
        drawn = iter([one]) if one else cases(seed, engines, arguments.lengths)
        bounds = None if minutes is None else 60 * minutes, arguments.problems

        def report(summary: Summary, findings: Sequence[Finding], seconds: float, *, final: bool) -> None:
            if arguments.json:
                facts = {"seed": seed, "engines": list(engines), "seconds": round(seconds, 1), "final": final}
                _write(arguments.json, facts | summary.as_dict() | {"findings": [finding.as_dict() for finding in findings]})

        def before_shrinking(summary: Summary, seconds: float) -> None:
            with contextlib.suppress(CommandError):  # the end of the run raises it
                report(summary, summary.findings, seconds, final=False)

        summary, findings, seconds = run(drawn, jobs, *bounds, progress, before_shrinking=before_shrinking)
    _print(summary, findings, seconds)
    report(summary, findings, seconds, final=True)
    if arguments.json:
        say("report", str(arguments.json))
    if not summary.problems:
        raise CommandError("no problem was run: give more time with --minutes")
    return 1 if findings else 0


def _write(path: Path, report: dict[str, Any]) -> None:
    """Write a report.

    Raises:
        CommandError: the file cannot be written.
    """
    text = json.dumps({"versions": versions()} | report, indent=1, ensure_ascii=False) + "\n"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--json {path}: {error.strerror}") from error


def _engines(wanted: Sequence[str] | None) -> tuple[str, ...]:
    """What can be tested here; what is tested and what is not is printed.

    Raises:
        CommandError: what was asked for cannot run.
    """
    reasons = machine.obstacles()
    if wanted is None:
        wanted = ("cpu", "plan") if reasons else ("gpu",)
        if reasons:
            say("no GPU", f"no kernel is run: {one_line('; '.join(reasons))}")
    found = []
    for engine in dict.fromkeys(wanted):
        if engine == "gpu":
            if reasons:
                raise CommandError(f"--engine gpu cannot run here: {one_line('; '.join(reasons))}")
            say("tests", f"{'; '.join(machine.gpus())}; cuDNN {version_text(library().version)}")
        elif engine == "cpu":
            say("tests", f"the CPU engine, numpy {np.__version__}")
        else:
            version = _planner()
            if isinstance(version, str):
                say("not tested", f"planning: {version}")
                continue
            say("tests", f"planning for described GPUs, cuDNN {version_text(version)}")
        found.append(engine)
    if not found:
        raise CommandError("nothing can be tested here")
    return tuple(found)


def _jobs(engines: Sequence[str]) -> int:
    """How many worker processes: one per CPU core; on a GPU at most 8, each with 2 GiB of its memory."""
    cores = os.cpu_count() or 1
    if "gpu" not in engines:
        return cores
    memory = cupy_runtime.cupy().cuda.runtime.getDeviceProperties(0)["totalGlobalMem"]
    return max(1, min(8, cores, int(memory) >> 31))


def _planner() -> int | str:
    """The version of the cuDNN that plans, or why none does."""
    from ..offline.planner import Planner

    try:
        with Planner() as planner:
            return planner.version
    except CudnnError as error:
        return one_line(machine.brief(error))


def versions() -> dict[str, Any]:
    """What the report says of this machine."""
    cupy = machine.imported("cupy")
    try:
        cudnn = version_text(library().version)
    except CudnnError:
        cudnn = "not found"
    gpus = machine.gpus() if isinstance(cupy, ModuleType) and machine.no_gpu() is None else []
    return {
        "cupy_sdpa": __version__, "cudnn": cudnn, "cupy": cupy.__version__ if isinstance(cupy, ModuleType) else cupy,
        "numpy": np.__version__, "python": sys.version.split()[0], "driver": machine.driver(), "gpus": gpus,
        "guards_off": os.environ.get("CUPY_SDPA_GUARDS_OFF", ""),
    }  # fmt: skip


class _Progress:
    """A line on stderr: overwritten on a terminal, else a new one every ten seconds; and each finding when it is found.

    Args:
        seconds, problems: the bounds of the run.
    """

    def __init__(self, seconds: float | None, problems: int | None) -> None:
        self._seconds, self._problems = seconds, problems
        self._terminal, self._last, self._printed = sys.stderr.isatty(), 0.0, 0

    def __call__(self, summary: Summary, seconds: float, doing: str) -> None:
        """Print new findings and how far the run is."""
        for finding in summary.findings[self._printed :]:
            print("\r\033[K" * self._terminal + f"found: {finding.line}", file=sys.stderr, flush=True)
        self._printed = len(summary.findings)
        if time.monotonic() - self._last < (0.2 if self._terminal else _INTERVAL):
            return
        if not self._terminal and not self._last:
            self._last = time.monotonic()
            return
        self._last = time.monotonic()
        of_time = f" of {self._seconds:.0f} s" if self._seconds else " s"
        of_problems = f" of {self._problems}" if self._problems else ""
        refused, findings = summary.counted("refused"), len(summary.findings)
        text = (
            f"{doing}: {summary.problems}{of_problems} problems, {refused} refused, {findings} findings, {seconds:.0f}{of_time}"
        )
        print(f"\r\033[K{text}" if self._terminal else text, end="" if self._terminal else "\n", file=sys.stderr, flush=True)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _print(summary: Summary, findings: Sequence[Finding], seconds: float) -> None:
    print()
    for line in summary.table():
        print(line)
    for finding in findings[:_MOST]:
        print(f"\n{finding.text()}")
    if len(findings) > _MOST:
        print(f"\nand {len(findings) - _MOST} more, which the report of --json has")
    kinds = ", ".join(f"{count} {kind} on {engine}" for (engine, kind), count in sorted(summary.kinds.items()))
    print(f"\n{summary.problems} problems, {summary.calls} calls, {len(findings)} findings in {seconds:.0f} s ({kinds})")
