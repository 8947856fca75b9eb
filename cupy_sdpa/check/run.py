"""A run of the self-test: draw cases, run them in worker processes, and shrink the findings."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from .case import SIZES, Case
from .draw import draw
from .outcome import Outcome
from .pool import Pool
from .shrink import same_failure, shrink
from .summary import Finding, Summary

#: The time limit in seconds for shrinking one finding; the limit for all findings together is twice that.
SHRINK_SECONDS = 60.0
#: The maximum number of findings that are shrunk, and how many at the same time.
MAX_SHRUNK, BATCH = 9, 3
#: A run plans a case in one of this many rounds of the engines, because planning is slow.
PLAN_INTERVAL = 4

#: Called with (the summary, the seconds since the start, the current activity).
Progress = Callable[[Summary, float, str], None]
#: Called with (the summary, the seconds since the start).
BeforeShrinking = Callable[[Summary, float], None]


class Limits(NamedTuple):
    """When a run stops drawing cases; None for no limit.

    Attributes:
        seconds: the duration.
        problems: the number of cases.
        first: whether to end at the first finding, which is not shrunk.
    """

    seconds: float | None = None
    problems: int | None = None
    first: bool = False


class RunResult(NamedTuple):
    """The result of a run.

    Attributes:
        summary: the counts.
        findings: the findings without duplicates.
        seconds: the duration.
        interrupted: whether a KeyboardInterrupt ended it.
    """

    summary: Summary
    findings: list[Finding]
    seconds: float
    interrupted: bool = False


def cases(seed: int, engines: Sequence[str], lengths: tuple[int, int] | None = None) -> Iterator[Case]:
    """Generate the cases of a seed. The engines alternate, each with its own numbers."""
    for number in itertools.count():
        for engine in engines:
            if engine != "plan" or engines == ("plan",):
                yield draw(seed, number, engine, lengths)
            elif number % PLAN_INTERVAL == 0:
                yield draw(seed, number // PLAN_INTERVAL, engine, lengths)


def run(
    drawn: Iterator[Case],
    jobs: int,
    limits: Limits = Limits(),  # noqa: B008 (a tuple)
    *,
    progress: Progress = lambda summary, seconds, activity: None,
    before_shrinking: BeforeShrinking = lambda summary, seconds: None,
    modules: tuple[str, ...] = (),
) -> RunResult:
    """Run cases until a limit is reached. A KeyboardInterrupt ends the run; the result is that of the finished cases.

    Args:
        drawn: the cases.
        jobs: the number of worker processes.
        limits: when to stop.
        progress: called after each case.
        before_shrinking: called before findings are shrunk, if there are any.
        modules: modules that each worker process imports first.
    """
    summary, start, interrupted = Summary(), time.monotonic(), False

    def report(activity: str) -> None:
        progress(summary, time.monotonic() - start, activity)

    def count(case: Case, outcome: Outcome) -> None:
        summary.add(case, outcome)
        report("running")

    with Pool(jobs, modules) as pool, ThreadPoolExecutor(jobs) as threads:
        try:
            end = None if limits.seconds is None else start + limits.seconds
            wanted: Iterator[Case] = itertools.islice(drawn, limits.problems)
            if limits.first:
                wanted = itertools.takewhile(lambda case: not summary.findings, wanted)
            _run_cases(wanted, end, pool, threads, count)
            if summary.findings and not limits.first:
                before_shrinking(summary, time.monotonic() - start)
                _shrink_findings(summary.findings, pool, threads, lambda: report("shrinking findings"))
        except KeyboardInterrupt:
            interrupted = True
            pool.kill()
    return RunResult(summary, merge(summary.findings), time.monotonic() - start, interrupted)


def _run_cases(
    drawn: Iterator[Case],
    end: float | None,
    pool: Pool,
    threads: ThreadPoolExecutor,
    count: Callable[[Case, Outcome], None],
) -> None:
    """Run cases until none are left or the time limit is reached, and call ``count`` with each case and its outcome."""
    pending: dict[Future[Outcome], Case] = {}
    while True:
        while len(pending) < pool.size and (end is None or time.monotonic() < end):
            if (case := next(drawn, None)) is None:
                break
            pending[threads.submit(pool.run, case)] = case
        if not pending:
            return
        for future in wait(pending, return_when=FIRST_COMPLETED).done:
            count(pending.pop(future), future.result())


def _shrink_findings(findings: Sequence[Finding], pool: Pool, threads: ThreadPoolExecutor, report: Callable[[], None]) -> None:
    """Shrink the findings in batches, except those that a shrunk one probably explains."""
    end = time.monotonic() + 2 * SHRINK_SECONDS
    simplest_first = sorted(findings, key=lambda finding: len(finding.case.features))
    shrunk: list[Finding] = []

    def shrink_finding(finding: Finding) -> None:
        seconds = min(SHRINK_SECONDS, end - time.monotonic())
        finding.case, finding.outcome = shrink(finding.case, finding.outcome, pool.run, seconds)
        finding.shrunk = True

    while len(shrunk) < MAX_SHRUNK and time.monotonic() < end:
        batch: list[Finding] = []
        for finding in simplest_first:
            if finding.shrunk or any(_explains(other, finding) for other in [*shrunk, *batch]):
                continue
            batch.append(finding)
            if len(batch) == BATCH:
                break
        if not batch:
            return
        pending = {threads.submit(shrink_finding, finding) for finding in batch}
        while pending:
            report()
            done, pending = wait(pending, timeout=1)
            for future in done:
                future.result()
        shrunk += batch


def _explains(simple: Finding, other: Finding) -> bool:
    """Whether another finding probably has the same cause: the same failure, and no fewer options and no smaller sizes."""
    if simple.case.engine != other.case.engine or not same_failure(simple.outcome, other.outcome):
        return False
    # The line of an exception identifies the bug, except for errors of CUDA, which are raised by any later call.
    if simple.outcome.kind == "exception" and "CUDARuntimeError" not in simple.outcome.cause:
        return True
    sizes = ((getattr(simple.case, name), getattr(other.case, name)) for name in SIZES)
    return all(0 < a <= b or a == b for a, b in sizes) and set(simple.case.options) <= set(other.case.options)


def merge(findings: Sequence[Finding]) -> list[Finding]:
    """Merge duplicates: each is listed with the most similar shrunk finding."""
    merged: list[Finding] = []
    for finding in sorted(findings, key=lambda finding: not finding.shrunk):
        similar = [
            other
            for other in merged
            if other.signature == finding.signature or (not finding.shrunk and _explains(other, finding))
        ]
        if similar:
            max(similar, key=lambda other: len(other.case.options)).duplicates.append(finding.original)
        else:
            merged.append(finding)
    return merged
