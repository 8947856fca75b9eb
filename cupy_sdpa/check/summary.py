"""What a run has come to: counts per option and pair, findings, and the report that can be attached to an issue."""

from __future__ import annotations

import itertools
import textwrap
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from .cases.case import Case
from .cases.draw import OPTIONS
from .verify.outcome import Outcome

#: Columns of the table.
WIDTH = 80


@dataclass
class Finding:
    """One way in which something failed.

    Attributes:
        case, outcome: the smallest case known.
        original: the case that was drawn.
        shrunk: whether it was made smaller.
        also: other drawn cases that failed in the same way, probably of the same cause.
    """

    case: Case
    outcome: Outcome
    original: Case
    shrunk: bool = False
    also: list[Case] = field(default_factory=list)

    @property
    def signature(self) -> tuple[Any, ...]:
        """What findings have in common that are reported once."""
        return self.case.engine, self.outcome.kind, self.outcome.what, self.case.features, self.case.backward

    @property
    def line(self) -> str:
        """One line that reproduces it."""
        return f'python -c "from cupy_sdpa.check import Case, reproduce; reproduce({self.case!r})"'

    def as_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {
            "kind": self.outcome.kind, "message": self.outcome.message, "case": repr(self.case),
            "sentence": self.case.sentence(),
            "original": repr(self.original), "reproduce": self.line, "shrunk": self.shrunk,
            "also": [repr(case) for case in self.also],
        }  # fmt: skip

    def text(self) -> str:
        """For people."""
        times = f" ({len(self.also) + 1} times)" if self.also else ""
        head = f"{self.outcome.kind}{times}: {self.case.sentence()}"
        said = [head, self.outcome.message]
        return "\n".join([*(textwrap.fill(part, WIDTH, subsequent_indent="  ") for part in said), f"  {self.line}"])


@dataclass
class Summary:
    """Counts of a run.

    Attributes:
        kinds: outcomes by engine and kind.
        options, pairs: outcomes by option and kind: ``"run"``, ``"refused"``, ``"wrong"``.
        reasons: why cases were refused.
        findings: the cases that failed, as they were drawn.
    """

    kinds: Counter[tuple[str, str]] = field(default_factory=Counter)
    options: Counter[tuple[str, str]] = field(default_factory=Counter)
    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    problems: int = 0
    calls: int = 0

    def add(self, case: Case, outcome: Outcome) -> None:
        """Count what a case has come to."""
        self.problems += 1
        self.calls += outcome.calls
        self.kinds[case.engine, outcome.kind] += 1
        column = "refused" if outcome.kind == "refused" else "wrong" if outcome.found else "run"
        features = case.features or ("no option",)
        for name in (*features, "gradients" if case.backward else "forward only"):
            self.options[name, column] += 1
        for pair in itertools.combinations(features, 2):
            self.pairs[" + ".join(pair), column] += 1
        if outcome.kind == "refused":
            self.reasons[outcome.message] += 1
        if outcome.found:
            self.findings.append(Finding(case, outcome, case))

    def counted(self, *kinds: str) -> int:
        """How many cases came to one of some kinds."""
        return sum(count for (_, kind), count in self.kinds.items() if kind in kinds)

    def table(self) -> list[str]:
        """A line for each option: how often it ran right, was refused, was wrong."""
        names = ["forward only", "gradients", "no option", *OPTIONS, "layouts"]
        half = -(-len(names) // 2)
        rows = [f"{name:<16}" + "".join(f"{self.options[name, column]:>7}" for column in COLUMNS) for name in names]
        rows += [""] * (2 * half - len(rows))
        head = f"{'option':<16}" + "".join(f"{column:>7}" for column in ("run", "refuse", "wrong"))
        pairs = zip([head, *rows[:half]], [head, *rows[half:]], strict=True)
        return [f"{left}   {right}".rstrip() for left, right in pairs]

    def as_dict(self) -> dict[str, Any]:
        """As JSON takes it."""

        def by_column(counts: Counter[tuple[str, str]]) -> dict[str, dict[str, int]]:
            names = sorted({name for name, _ in counts})
            return {name: {column: counts[name, column] for column in COLUMNS} for name in names}

        return {
            "problems": self.problems, "calls": self.calls,
            "kinds": {f"{engine} {kind}": count for (engine, kind), count in sorted(self.kinds.items())},
            "options": by_column(self.options), "pairs": by_column(self.pairs),
            "refusals": dict(self.reasons.most_common()),
        }  # fmt: skip


#: What an option is counted under.
COLUMNS = ("run", "refused", "wrong")
