"""The summary of a run: counts per option and pair of options, findings, and the report for an issue."""

from __future__ import annotations

import itertools
import textwrap
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from .case import Case
from .draw import OPTIONS
from .outcome import Outcome

#: Columns of the printed text.
WIDTH = 80
#: The columns of the table.
COLUMNS = ("run", "refused", "wrong")


@dataclass
class Finding:
    """A case that failed.

    Attributes:
        case, outcome: the smallest case that fails in this way, and its outcome.
        original: the case that was drawn.
        shrunk: whether the case was shrunk.
        duplicates: other drawn cases that failed in the same way, probably because of the same bug.
    """

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
        """The finding as JSON values."""
        return {
            "kind": self.outcome.kind, "message": self.outcome.message, "case": repr(self.case),
            "sentence": self.case.describe(),
            "original": repr(self.original), "reproduce": self.command, "shrunk": self.shrunk,
            "also": [repr(case) for case in self.duplicates],
        }  # fmt: skip

    def text(self) -> str:
        """The finding as text: kind and case, error message, and the command that reproduces it."""
        times = f" ({len(self.duplicates) + 1} times)" if self.duplicates else ""
        head = f"{self.outcome.kind}{times}: {self.case.describe()}"
        parts = [head, self.outcome.message]
        return "\n".join([*(textwrap.fill(part, WIDTH, subsequent_indent="  ") for part in parts), f"  {self.command}"])


@dataclass
class Summary:
    """Counts of a run.

    Attributes:
        kinds: the number of outcomes, by engine and kind.
        options, pairs: the number of outcomes, by option or pair of options, and column of :data:`COLUMNS`.
        reasons: the number of refusals, by reason.
        findings: the cases that failed, as drawn.
        problems: the number of cases.
        calls: the number of calls.
    """

    kinds: Counter[tuple[str, str]] = field(default_factory=Counter)
    options: Counter[tuple[str, str]] = field(default_factory=Counter)
    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    problems: int = 0
    calls: int = 0

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

    def count(self, *kinds: str) -> int:
        """The number of outcomes of some kinds."""
        return sum(number for (_, kind), number in self.kinds.items() if kind in kinds)

    def share(self, name: str) -> float:
        """The percentage of cases with an option."""
        return 100 * sum(self.options[name, column] for column in COLUMNS) / max(self.problems, 1)

    def table(self) -> list[str]:
        """The lines of a table of options: the share of the cases, and the number that were run, refused and wrong."""
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
        """The counts as JSON values."""

        def by_column(counts: Counter[tuple[str, str]]) -> dict[str, dict[str, int]]:
            names = sorted({name for name, _ in counts})
            return {name: {column: counts[name, column] for column in COLUMNS} for name in names}

        return {
            "problems": self.problems, "calls": self.calls,
            "kinds": {f"{engine} {kind}": count for (engine, kind), count in sorted(self.kinds.items())},
            "shares": {name: round(self.share(name), 1) for name in sorted({name for name, _ in self.options})},
            "options": by_column(self.options), "pairs": by_column(self.pairs),
            "refusals": dict(self.reasons.most_common()),
        }  # fmt: skip
