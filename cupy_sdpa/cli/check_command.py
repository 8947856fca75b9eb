"""``check``: a randomized self-test of the GPU and cuDNN, or of the CPU engine and of planning."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import CudnnError, __version__
from ..extend import cupy_runtime
from ..extend.cudnn import Cudnn
from . import machine
from .console import CommandError, StatusLine, brief, command_errors, counted, one_line, output_file, positive, print_labeled

if TYPE_CHECKING:
    from ..check.case import Case
    from ..check.run import RunLimits, Summary

DESCRIPTION = (
    "Draw random problems, run each several times in worker processes, and compare the results with a "
    "float64 reference. Without a GPU: test the CPU engine, and planning for described GPUs."
)
EPILOG = """\
examples:
  python -m cupy_sdpa check                     for one minute
  python -m cupy_sdpa check --minutes 20 --json report.json
  python -m cupy_sdpa check --engine cpu --seed 7 --problems 500
  python -m cupy_sdpa check --saved problems.jsonl
  python -m cupy_sdpa check --large             arrays beyond 2^31 elements

exit status: 0 no findings; 1 findings; 2 no problem could run; 130 Ctrl-C,
after the result of the finished problems.
To report a finding, attach the file that --json writes.
"""
#: Seconds between progress lines if stderr is not a terminal, and if it is a terminal.
_INTERVAL, _TERMINAL_INTERVAL = 10.0, 0.2
#: The maximum number of findings to print; the report contains all.
_MAX_PRINTED = 12


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "--minutes",
        type=float,
        help="minutes for drawing problems (default: 1); shrinking the findings takes up to 2 minutes more, 4 if problems hang",
    )
    parser.add_argument("--problems", type=positive, metavar="N", help="number of problems instead of a duration")
    parser.add_argument("--seed", type=int, help="seed of the problems (default: random)")
    parser.add_argument(
        "--engine",
        choices=("gpu", "cpu", "cupy", "plan"),
        action="append",
        help="what to test; may be repeated; cupy is engine='cupy' (default: gpu, or without a GPU cpu and plan)",
    )
    parser.add_argument(
        "--lengths", type=_pair_of_lengths, metavar="SQ,SKV", help="fixed lengths of queries and keys (default: random)"
    )
    parser.add_argument(
        "--jobs", type=positive, metavar="N", help="worker processes (default: one per CPU core, on a GPU at most 8)"
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        type=output_file,
        help="write a report for a bug report: before the findings are shrunk, and again at the end",
    )
    parser.add_argument(
        "--saved", type=Path, metavar="FILE", help="verify the problems of a program (CUPY_SDPA_TRACE), not random ones"
    )
    parser.add_argument(
        "--large",
        action="store_true",
        help="run problems beyond 2^31 elements and near the largest grids instead of random ones; the GPU needs up to 92 GiB",
    )
    parser.add_argument("--case", metavar="LITERAL", help="run the case of a finding")
    parser.add_argument("--first", action="store_true", help="end at the first finding, and do not shrink it")


def _pair_of_lengths(text: str) -> tuple[int, int]:
    queries, comma, keys = text.partition(",")
    if not (comma and queries.isdecimal() and keys.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a pair of lengths such as 1,276")
    return int(queries), int(keys)


def command(arguments: argparse.Namespace) -> int:
    """Run ``check``; returns 1 if there are findings."""
    from ..check.run import cases, run

    if arguments.large:
        return _large(arguments)
    seed, limits, case = _seed(arguments), _limits(arguments), _case_of_literal(arguments)
    if arguments.saved and case:
        raise CommandError("--saved and --case are both given: pass one of them")
    engines = _engines([case.engine] if case else arguments.engine)
    jobs = 1 if case else arguments.jobs or _jobs(engines)
    given = [case] if case else _saved(arguments.saved, engines) if arguments.saved else None
    if given is not None:
        limits = limits._replace(seconds=None, problems=limits.problems or len(given))
    amount = f"{limits.seconds / 60:g} min" if limits.seconds else counted(limits.problems or 0, "problem")
    print_labeled("seed", f"{seed}; {amount}, {jobs} worker process{'es' * (jobs != 1)}")

    def report(summary: Summary, *, final: bool) -> None:
        if arguments.json is not None:
            facts = {
                "versions": versions(), "seed": seed, "engines": list(engines), "seconds": round(summary.seconds, 1),
                "final": final, **summary.as_dict(),
            }  # fmt: skip
            try:
                arguments.json.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            except OSError as error:
                raise CommandError(f"--json {arguments.json}: {error.strerror}") from error

    def before_shrinking(summary: Summary) -> None:
        with contextlib.suppress(CommandError):  # raised again by the final report
            report(summary, final=False)

    with _Progress(limits) as progress:
        drawn = cases(seed, engines, arguments.lengths) if given is None else iter(given)
        summary = run(drawn, jobs, limits, progress=progress, before_shrinking=before_shrinking)
    _print_summary(summary)
    report(summary, final=not summary.interrupted)
    if arguments.json is not None:
        print_labeled("report", str(arguments.json))
    if summary.interrupted:
        raise KeyboardInterrupt
    if not summary.problems:
        raise CommandError("no problem was run: increase --minutes")
    return 1 if summary.findings else 0


def _large(arguments: argparse.Namespace) -> int:
    """Run the problems beyond 2^31 elements that fit into the free memory; returns 1 if there are findings."""
    given = [
        f"--{name}"
        for name in ("minutes", "problems", "seed", "engine", "lengths", "saved", "case")
        if getattr(arguments, name)
    ]
    if given:
        raise CommandError(f"--large and {given[0]} are given: pass one of them")
    _engines(["gpu"])
    from ..check import large

    cases: list[dict[str, Any]] = []
    for case in large.CASES:
        free, began = large.free_gib(), time.perf_counter()
        errors: list[str] = []
        if case.gib > free:
            outcome = f"skipped: it needs {case.gib} GiB, and {free:.0f} GiB are free"
        else:
            try:
                errors = large.run(case)
            except Exception as error:  # an unsupported or failing call is a finding: these problems must run
                errors = [f"{type(error).__name__}: {error}"]
            outcome = f"{len(errors)} wrong" if errors else "passed"
        seconds = time.perf_counter() - began
        cases.append({"case": case.name, "gib": case.gib, "outcome": outcome, "errors": errors, "seconds": round(seconds, 1)})
        print(f"{case.name}: {outcome}, {seconds:.1f} s", *errors[:_MAX_PRINTED], sep="\n  ", flush=True)
    if arguments.json is not None:
        facts = {"versions": versions(), "large": cases}
        arguments.json.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print_labeled("report", str(arguments.json))
    if all(case["outcome"].startswith("skipped") for case in cases):
        raise CommandError("no problem could run: the GPU has too little free memory")
    return 1 if any(case["errors"] for case in cases) else 0


def _seed(arguments: argparse.Namespace) -> int:
    """Return the seed of the run; random by default."""
    seed = secrets.randbelow(10**6) if arguments.seed is None else int(arguments.seed)
    if seed < 0:
        raise CommandError(f"--seed {seed}: use an integer, 0 or larger")
    return seed


def _limits(arguments: argparse.Namespace) -> RunLimits:
    """Return the duration and the number of problems; one minute by default."""
    from ..check.run import RunLimits

    minutes = 1.0 if arguments.minutes is None and arguments.problems is None else arguments.minutes
    if minutes is not None and not minutes > 0:
        raise CommandError(f"--minutes {minutes}: use a positive number")
    return RunLimits(None if minutes is None else 60 * minutes, arguments.problems, arguments.first)


def _case_of_literal(arguments: argparse.Namespace) -> Case | None:
    """Return the case of ``--case``."""
    from ..check.case import parse

    try:
        return parse(arguments.case) if arguments.case else None
    except ValueError as error:
        raise CommandError(f"--case: {error}") from None


def _saved(path: Path, engines: Sequence[str]) -> list[Case]:
    """Return the cases of a file of problems; prints which are verified at smaller sizes, and which not at all."""
    from .. import store
    from ..check.saved import NotRepeatableError, case_of, reduced

    if "plan" in engines and engines != ("cpu", "plan"):
        raise CommandError("--engine plan has no effect with --saved: use plan --saved, which plans for described GPUs")
    with command_errors():
        problems = [problem for problem in store.read_problems(path) if not problem.trivial]
    found: dict[str, Case] = {}
    smaller = 0
    for number, problem in enumerate(problems, 1):
        try:
            full = [case_of(problem, engine, seed=1) for engine in engines if engine != "plan"]
        except NotRepeatableError as error:
            print_labeled("skipped", f"problem {number}: {error}")
            continue
        cases = [reduced(case) for case in full]
        smaller += cases != full
        found |= {repr(case): case for case in cases}  # several launches of a call are one case
    text = f"{counted(len(problems), 'problem')} of {path}, verified by {counted(len(found), 'case')}"
    print_labeled("problems", f"{text}; {smaller} with smaller sizes, for the reference")
    if not found:
        raise CommandError(f"{path} has no problem that can be verified")
    return list(found.values())


def _engines(requested: Sequence[str] | None) -> tuple[str, ...]:
    """Return the engines that can be tested here; prints these, and the others with the reasons. A requested one must run."""
    reasons = machine.obstacles()
    if requested is None:
        requested = ("cpu", "plan") if reasons else ("gpu",)
        if reasons:
            print_labeled("no GPU", f"no kernel is run: {one_line('; '.join(reasons))}")
    engines = []
    for engine in dict.fromkeys(requested):
        if engine == "gpu":
            if reasons:
                raise CommandError(f"--engine gpu cannot run here: {one_line('; '.join(reasons))}")
            print_labeled("tests", f"{'; '.join(machine.gpus())}; cuDNN {Cudnn.installed().version}")
        elif engine == "cpu":
            print_labeled("tests", f"the CPU engine, numpy {np.__version__}")
        elif engine == "cupy":
            if missing := machine.obstacles_of_cupy():
                raise CommandError(f"--engine cupy cannot run here: {one_line('; '.join(missing))}")
            print_labeled("tests", f"engine='cupy' on {'; '.join(machine.gpus())}")
        else:
            if reason := _planning_obstacle():
                print_labeled("untested", f"planning: {reason}")
                continue
            print_labeled("tests", f"planning for described GPUs, cuDNN {Cudnn.installed().version}")
        engines.append(engine)
    if not engines:
        raise CommandError("no engine can be tested here")
    return tuple(engines)


def _jobs(engines: Sequence[str]) -> int:
    """Return the number of worker processes: one per CPU core; on a GPU at most 8, and at most one per 2 GiB of its memory."""
    cores = os.cpu_count() or 1
    if not {"gpu", "cupy"} & set(engines):
        return cores
    memory = cupy_runtime.cupy().cuda.runtime.getDeviceProperties(0)["totalGlobalMem"]
    return max(1, min(8, cores, int(memory) >> 31))


def _planning_obstacle() -> str:
    """Return why this machine cannot plan; an empty string if it can."""
    from ..offline.remote_planner import Planner

    try:
        with Planner():
            return ""
    except CudnnError as error:
        return one_line(brief(error))


def versions() -> dict[str, Any]:
    """Return the versions in the report."""
    cupy = machine.imported("cupy")
    try:
        cudnn = Cudnn.installed().version
    except CudnnError:
        cudnn = "not found"
    gpus = machine.gpus() if isinstance(cupy, ModuleType) and machine.no_gpu() is None else []
    return {
        "cupy_sdpa": __version__, "cudnn": cudnn, "cupy": cupy.__version__ if isinstance(cupy, ModuleType) else cupy,
        "numpy": np.__version__, "python": sys.version.split()[0], "driver": machine.driver(), "gpus": gpus,
        "guards_off": os.environ.get("CUPY_SDPA_GUARDS_OFF", ""),
    }  # fmt: skip


class _Progress(StatusLine):
    """The progress, without a terminal a new line every ten seconds; and each new finding."""

    def __init__(self, limits: RunLimits) -> None:
        super().__init__()
        self._limits, self._last, self._findings = limits, -math.inf if self.visible else time.monotonic(), 0

    def __call__(self, summary: Summary, activity: str) -> None:
        """Print new findings, and the progress if the interval has passed."""
        for finding in summary.findings[self._findings :]:
            self.show("")
            print(f"found: {finding.command}", file=sys.stderr, flush=True)
        self._findings = len(summary.findings)
        if time.monotonic() - self._last < (_TERMINAL_INTERVAL if self.visible else _INTERVAL):
            return
        of_seconds = f" of {self._limits.seconds:.0f}" if self._limits.seconds else ""
        of_problems = f" of {self._limits.problems}" if self._limits.problems else ""
        text = f"{activity}: {summary.problems}{of_problems} problems, {summary.count('refused')} refused, "
        text += f"{counted(len(summary.findings), 'finding')}, {summary.seconds:.0f}{of_seconds} s"
        self._last = time.monotonic()
        if self.visible:
            self.show(text)
        else:
            print(text, file=sys.stderr, flush=True)


def _print_summary(summary: Summary) -> None:
    """Print the table, the findings and the totals."""
    print()
    for line in summary.table():
        print(line)
    findings = summary.findings
    for finding in findings[:_MAX_PRINTED]:
        print(f"\n{finding.text()}")
    if len(findings) > _MAX_PRINTED:
        print(f"\nand {len(findings) - _MAX_PRINTED} more, which are in the report of --json")
    kinds = ", ".join(f"{count} {kind} on {engine}" for (engine, kind), count in sorted(summary.kinds.items()))
    totals = (counted(summary.problems, "problem"), counted(summary.calls, "call"), counted(len(findings), "finding"))
    print(f"\n{', '.join(totals)} in {summary.seconds:.0f} s ({kinds})")
