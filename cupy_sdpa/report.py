"""The answer of :func:`cupy_sdpa.explain`: whether and how a call would run, as values that are safe to keep."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .graph import Graph
from .problem import Problem

if TYPE_CHECKING:
    from .plan import PlanInfo


@dataclass(frozen=True)
class Report:
    """Whether and how a call would run; true where it would.

    Attributes:
        engine: ``cuDNN`` or ``numpy``.
        problem: what was asked.
        graph: the steps that the engine would run.
        plan: cuDNN's plan; None on numpy, where none is needed, and where there is a reason against it.
        reasons: everything that speaks against it.
    """

    engine: str
    problem: Problem
    graph: Graph
    plan: PlanInfo | None = None
    reasons: tuple[str, ...] = ()

    @property
    def workspace(self) -> int | None:
        """Bytes of the GPU's memory that the call would use beside its arrays; 0 on numpy, None where it cannot run."""
        if self.reasons:
            return None
        return self.plan.workspace if self.plan else 0

    def __bool__(self) -> bool:
        return not self.reasons

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield str(self.problem)
        yield "steps:"
        yield from self.graph.lines()
        if self.reasons:
            yield f"cannot run on {self.engine}:"
            yield from (f"  {reason}" for reason in self.reasons)
        elif self.problem.trivial:
            yield "runs without a kernel: there is no key to see, or no result to give"
        elif self.plan:
            yield f"runs on cuDNN: {self.plan}"
        else:
            yield "runs on the CPU: the arrays are numpy's"
