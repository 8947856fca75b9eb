"""A run of the self-test: draw cases, run them in worker processes, count the outcomes, and shrink the findings."""

from __future__ import annotations

import itertools
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .case import SIZES, Case, Outcome
from .draw import OPTIONS, draw
from .pool import CasePool
from .shrink import same_failure, shrink

#: The time limit in seconds for shrinking one finding; the limit for all findings together is twice that.
SHRINK_SECONDS = 60.0
#: The maximum number of findings that are shrunk, and how many at the same time.
MAX_SHRUNK, BATCH = 9, 3
#: A run plans a case in one of this many rounds of the engines, because planning is slow.
PLAN_INTERVAL = 4
#: Columns of the printed text.
WIDTH = 80
#: The columns of the table.
COLUMNS = ("run", "refused", "wrong")


@dataclass
class Finding:
    """The smallest case that fails in one way, the case that was drawn, and other drawn ones, probably of the same bug."""

    case: Case
    outcome: Outcome
    original: Case
    shrunk: bool = False
    duplicates: list[Case] = field(default_factory=list)

    @property
    def signature(self) -> tuple[Any, ...]:
        """Findings with equal signatures are reported once."""
        return self.case.engine, self.outcome.kind, self.outcome.cause, self.case.features, self.case.backward

    @property
    def command(self) -> str:
        """The shell command that reproduces the finding."""
        return f'python -c "from cupy_sdpa.check import Case, reproduce; reproduce({self.case!r})"'

    def as_dict(self) -> dict[str, Any]:
        """Return the finding as JSON values."""
        return {
            "kind": self.outcome.kind, "message": self.outcome.message, "case": repr(self.case),
            "sentence": self.case.describe(),
            "original": repr(self.original), "reproduce": self.command, "shrunk": self.shrunk,
            "also": [repr(case) for case in self.duplicates],
        }  # fmt: skip

    def text(self) -> str:
        """Return the finding as text: kind and case, error message, and the command that reproduces it."""
        times = f" ({len(self.duplicates) + 1} times)" if self.duplicates else ""
        head = f"{self.outcome.kind}{times}: {self.case.describe()}"
        parts = [head, self.outcome.message]
        return "\n".join([*(textwrap.fill(part, WIDTH, subsequent_indent="  ") for part in parts), f"  {self.command}"])


@dataclass
class Summary:
    """What a run has found so far.

    Outcomes are counted by engine and kind (``kinds``), and by option or pair of options and column of :data:`COLUMNS`
    (``options``, ``pairs``), refusals by reason. The findings are without duplicates at the end.
    """

    kinds: Counter[tuple[str, str]] = field(default_factory=Counter)
    options: Counter[tuple[str, str]] = field(default_factory=Counter)
    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    problems: int = 0
    calls: int = 0
    start: float = field(default_factory=time.monotonic)
    interrupted: bool = False

    @property
    def seconds(self) -> float:
        """The seconds since the start."""
        return time.monotonic() - self.start

    def add(self, case: Case, outcome: Outcome) -> None:
        """Count the outcome of a case."""
        self.problems += 1
        self.calls += outcome.calls
        self.kinds[case.engine, outcome.kind] += 1
        column = "refused" if outcome.kind == "refused" else "wrong" if outcome.is_finding else "run"
        features = case.features or ("no option",)
        for name in (*features, "gradients" if case.backward else "forward only"):
            self.options[name, column] += 1
        for pair in itertools.combinations(features, 2):
            self.pairs[" + ".join(pair), column] += 1
        if outcome.kind == "refused":
            self.reasons[outcome.message] += 1
        if outcome.is_finding:
            self.findings.append(Finding(case, outcome, case))

    def count(self, kind: str) -> int:
        """Return the number of outcomes of a kind."""
        return sum(number for (_, other), number in self.kinds.items() if other == kind)

    def share(self, name: str) -> float:
        """Return the percentage of cases with an option."""
        return 100 * sum(self.options[name, column] for column in COLUMNS) / max(self.problems, 1)

    def table(self) -> list[str]:
        """Return the lines of a table of options: the share of the cases, and the number that were run, refused and wrong."""
        names = ["forward only", "gradients", "no option", *OPTIONS, "layouts"]
        half = -(-len(names) // 2)
        widths = (6, 7, 6)
        rows = [
            f"{name:<15}{self.share(name):>3.0f}%"
            + "".join(f"{self.options[name, column]:>{width}}" for column, width in zip(COLUMNS, widths, strict=True))
            for name in names
        ]
        rows += [""] * (2 * half - len(rows))
        head = f"{'option':<15}{'of':>4}{'run':>6}{'refuse':>7}{'wrong':>6}"
        pairs = zip([head, *rows[:half]], [head, *rows[half:]], strict=True)
        return [f"{left}   {right}".rstrip() for left, right in pairs]

    def as_dict(self) -> dict[str, Any]:
        """Return the counts as JSON values."""

        def by_column(counts: Counter[tuple[str, str]]) -> dict[str, dict[str, int]]:
            names = sorted({name for name, _ in counts})
            return {name: {column: counts[name, column] for column in COLUMNS} for name in names}

        return {
            "problems": self.problems, "calls": self.calls,
            "kinds": {f"{engine} {kind}": count for (engine, kind), count in sorted(self.kinds.items())},
            "shares": {name: round(self.share(name), 1) for name in sorted({name for name, _ in self.options})},
            "options": by_column(self.options), "pairs": by_column(self.pairs),
            "refusals": dict(self.reasons.most_common()), "findings": [finding.as_dict() for finding in self.findings],
        }  # fmt: skip


class RunLimits(NamedTuple):
    """When a run stops drawing cases: the seconds and the number of cases, or None; and whether the first finding ends it."""

    seconds: float | None = None
    problems: int | None = None
    first: bool = False


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
    limits: RunLimits = RunLimits(),  # noqa: B008 (a tuple)
    *,
    progress: Callable[[Summary, str], None] = lambda summary, activity: None,
    before_shrinking: Callable[[Summary], None] = lambda summary: None,
    modules: tuple[str, ...] = (),
) -> Summary:
    """Run cases until a limit is reached. A KeyboardInterrupt ends the run; the result then covers the finished cases.

    ``progress`` is called after each case, with the current activity, and ``before_shrinking`` before findings are shrunk, if
    there are any; the first of a run that it ends is not. Each of ``jobs`` worker processes imports the modules first.
    """
    summary = Summary()
    with CasePool(jobs, modules) as pool, ThreadPoolExecutor(jobs) as threads:
        try:
            wanted: Iterator[Case] = itertools.islice(drawn, limits.problems)
            if limits.first:
                wanted = itertools.takewhile(lambda case: not summary.findings, wanted)
            pending: dict[Future[Outcome], Case] = {}
            while True:
                while len(pending) < pool.size and (limits.seconds is None or summary.seconds < limits.seconds):
                    if (case := next(wanted, None)) is None:
                        break
                    pending[threads.submit(pool.run, case)] = case
                if not pending:
                    break
                for future in wait(pending, return_when=FIRST_COMPLETED).done:
                    summary.add(pending.pop(future), future.result())
                    progress(summary, "running")
            if summary.findings and not limits.first:
                before_shrinking(summary)
                _shrink_findings(summary.findings, pool, threads, lambda: progress(summary, "shrinking findings"))
        except KeyboardInterrupt:
            summary.interrupted = True
            pool.kill()
    summary.findings = merge_duplicates(summary.findings)
    return summary


def _shrink_findings(
    findings: Sequence[Finding], pool: CasePool, threads: ThreadPoolExecutor, report: Callable[[], None]
) -> None:
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
            explained = finding.shrunk or any(_explains(other, finding) for other in [*shrunk, *batch])
            if not explained and len(batch) < BATCH:
                batch.append(finding)
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
    """True if another finding probably has the same cause: the same failure, and no fewer options and no smaller sizes."""
    if simple.case.engine != other.case.engine or not same_failure(simple.outcome, other.outcome):
        return False
    # The line of an exception identifies the bug, except for errors of CUDA, which are raised by any later call.
    if simple.outcome.kind == "exception" and "CUDARuntimeError" not in simple.outcome.cause:
        return True
    sizes = ((getattr(simple.case, name), getattr(other.case, name)) for name in SIZES)
    return all(0 < a <= b or a == b for a, b in sizes) and set(simple.case.options) <= set(other.case.options)


def merge_duplicates(findings: Sequence[Finding]) -> list[Finding]:
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
