"""The outcome of a case."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

#: The kinds of outcomes, the worst last.
KINDS = ("passed", "refused", "wrong", "exception", "crash", "hang")


@dataclass
class Outcome:
    """The outcome of a case.

    Attributes:
        kind: one of :data:`KINDS`.
        message: the error, or the reason of the refusal.
        cause: the names of the wrong results, the type and line of the exception, the signal, or the rule of the refusal.
            Findings of one kind and cause are probably the same bug.
        calls: the number of calls.
        fatal: whether the process must be replaced.
    """

    kind: str = "passed"
    message: str = ""
    cause: str = ""
    calls: int = 0
    fatal: bool = False

    @property
    def is_finding(self) -> bool:
        """Whether the case failed."""
        return self.kind not in ("passed", "refused")

    def set(self, kind: str, message: str, cause: str) -> Outcome:
        """Set the kind, message and cause."""
        self.kind, self.message, self.cause = kind, message, cause
        return self

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)
