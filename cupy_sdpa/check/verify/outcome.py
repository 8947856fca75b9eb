"""What a case comes to."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

#: What one case may come to, the worst last.
KINDS = ("passed", "refused", "wrong", "exception", "crash", "hang")


@dataclass
class Outcome:
    """What a case came to.

    Attributes:
        kind: of :data:`KINDS`.
        message: what is wrong, or why it was refused.
        what: the results that are wrong, or the type and place of the exception; findings of one kind and ``what`` are alike.
        calls: how many calls were made.
        fatal: whether the process must not be used any more.
    """

    kind: str = "passed"
    message: str = ""
    what: str = ""
    calls: int = 0
    fatal: bool = False

    @property
    def found(self) -> bool:
        """Whether it is a finding."""
        return self.kind not in ("passed", "refused")

    def as_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)
