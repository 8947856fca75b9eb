"""A run of the self-test: draws cases, hands them to the workers, shrinks what they find."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from .cases.case import Case
from .cases.draw import draw
from .pool import Pool
from .shrink import alike, shrink
from .summary import Finding, Summary
from .verify.outcome import Outcome

#: Seconds to shrink a finding (all of them: twice that), how many findings are shrunk, and how many at a time.
SHRINKING, SHRUNK, BATCH = 60.0, 9, 3
#: The sizes of a case.
SIZES = ("d", "dv", "hq", "hkv", "sq", "skv", "b")

#: Called with (the summary, the seconds since the beginning, what is being done).
Progress = Callable[[Summary, float, str], None]


def cases(seed: int, engines: Sequence[str], lengths: tuple[int, int] | None = None) -> Iterator[Case]:
    """All cases of a seed: the engines take turns, each with its own numbers; planning, which takes long, every fourth time."""
    for number in itertools.count():
        for engine in engines:
            if engine != "plan" or engines == ("plan",):
                yield draw(seed, number, engine, lengths)
            elif number % 4 == 0:
                yield draw(seed, number // 4, engine, lengths)


def run(
    drawn: Iterator[Case],
    jobs: int,
    seconds: float | None,
    problems: int | None,
    progress: Progress = lambda summary, seconds, doing: None,
    modules: tuple[str, ...] = (),
    before_shrinking: Callable[[Summary, float], None] = lambda summary, seconds: None,
) -> tuple[Summary, list[Finding], float]:
    """Run cases until the time or their number is up; an interruption ends the run, not its report.

    Args:
        drawn: the cases.
        jobs: how many processes.
        seconds, problems: when to stop drawing; None for no bound.
        progress: called after each case.
        modules: what each process imports first.
        before_shrinking: called with the summary, its findings as they were drawn, and the seconds since the beginning, if
            there are findings.

    Returns:
        The counts, the findings (those of one kind once), and the seconds that it took.
    """
    summary, start = Summary(), time.monotonic()

    def report(doing: str) -> None:
        progress(summary, time.monotonic() - start, doing)

    with Pool(jobs, modules) as pool, ThreadPoolExecutor(jobs) as threads:
        try:
            waiting: dict[Future[Outcome], Case] = {}
            drawn = itertools.islice(drawn, problems)
            while True:
                while len(waiting) < jobs and (seconds is None or time.monotonic() - start < seconds):
                    if (case := next(drawn, None)) is None:
                        break
                    waiting[threads.submit(pool.ask, case)] = case
                if not waiting:
                    break
                for done in wait(waiting, return_when=FIRST_COMPLETED).done:
                    summary.add(waiting.pop(done), done.result())
                    report("running")
            if summary.findings:
                before_shrinking(summary, time.monotonic() - start)
            _shrink_some(summary.findings, pool, threads, lambda: report("shrinking findings"))
        except KeyboardInterrupt:
            pool.kill()
    return summary, merged(summary.findings), time.monotonic() - start


def _shrink_some(findings: Sequence[Finding], pool: Pool, threads: ThreadPoolExecutor, report: Callable[[], None]) -> None:
    """Make the most different findings smaller, a few at a time: one that a smaller one explains is left as it is."""
    end, simple = time.monotonic() + 2 * SHRINKING, sorted(findings, key=lambda finding: len(finding.case.features))
    shrunk: list[Finding] = []

    def smaller(finding: Finding) -> None:
        seconds = min(SHRINKING, end - time.monotonic())
        finding.case, finding.outcome = shrink(finding.case, finding.outcome, pool.ask, seconds)
        finding.shrunk = True

    while len(shrunk) < SHRUNK and time.monotonic() < end:
        batch: list[Finding] = []
        for finding in simple:
            if not finding.shrunk and len(batch) < BATCH and not any(_alike(one, finding) for one in [*shrunk, *batch]):
                batch.append(finding)
        if not batch:
            return
        waiting = {threads.submit(smaller, finding) for finding in batch}
        while waiting:
            report()
            done, waiting = wait(waiting, timeout=1)
            for future in done:
                future.result()
        shrunk += batch


def _alike(one: Finding, other: Finding) -> bool:
    """Whether a finding is probably of the same cause as one with no more options and no larger sizes."""
    same = one.case.engine == other.case.engine and alike(one.outcome, other.outcome)
    if one.outcome.kind == "exception" and "CUDARuntimeError" not in one.outcome.what:  # whose place says nothing
        return same
    sizes = all(
        0 < getattr(one.case, n) <= getattr(other.case, n) or getattr(one.case, n) == getattr(other.case, n) for n in SIZES
    )
    return same and sizes and set(one.case.options) <= set(other.case.options)


def merged(findings: Sequence[Finding]) -> list[Finding]:
    """Shrunk findings that came to the same once; others are counted with the shrunk one that is most like them."""
    kept: list[Finding] = []
    for finding in sorted(findings, key=lambda finding: not finding.shrunk):
        alike_ones = [
            one for one in kept if one.signature == finding.signature or (not finding.shrunk and _alike(one, finding))
        ]
        if alike_ones:
            most = max(alike_ones, key=lambda one: len(one.case.options))
            most.also.append(finding.original)
        else:
            kept.append(finding)
    return kept
