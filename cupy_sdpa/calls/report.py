"""The answer of :func:`cupy_sdpa.explain`: whether and how a call would run, as values that are safe to keep."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import _html
from ..errors import Unsupported
from ..graph.nodes import Graph
from ..problem.problem import Problem

if TYPE_CHECKING:
    from ..plans.plan import PlanInfo


#: The command that verifies what a GPU computes.
CHECK = "python -m cupy_sdpa check"


@dataclass(frozen=True)
class Report:
    """Whether and how a call would run; true where it would.

    Attributes:
        engine: ``cuDNN`` or ``numpy``.
        problem: what was asked.
        graph: the steps that the engine would run.
        plan: cuDNN's plan; None on numpy, where none is needed, where there is a reason against it, and where none was made.
        reasons: everything that speaks against it.
        note: what else there is to say of the answer, such as that it was not planned; empty where there is nothing.
        error: what the call would raise.
        launches: the reports of all launches, this one first, where there are several.
        workarounds: the known bugs of cuDNN that the call works around.
        unverified: what of the call was never run on this GPU.
    """

    engine: str
    problem: Problem
    graph: Graph
    plan: PlanInfo | None = None
    reasons: tuple[str, ...] = ()
    note: str = ""
    error: type[Exception] = Unsupported
    launches: tuple[Report, ...] = ()
    workarounds: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()

    @property
    def workspace(self) -> int | None:
        """Bytes of the GPU's memory that the call would use beside its arrays; 0 on numpy, None where that is not known.

        The copies that a bucket, or lengths, are computed on come on top: they are as large as the arrays. So do sums of the
        scores' gradient: as large as what they are the gradient of, and as the scores along queries and keys.
        """
        if self.engine == "numpy" or self.problem.trivial:
            return 0
        plans = [launch.plan for launch in self.launches or (self,)]  # one after the other, so the largest
        return max((plan.workspace for plan in plans if plan), default=None)

    def __bool__(self) -> bool:
        return not self.reasons

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield str(self.problem)
        yield "steps:"
        yield from self.graph.lines()
        yield self._verdict()
        yield from (f"  {reason}" for reason in self.reasons)
        if self.plan:
            facts = list(self.plan.facts())
            width = max(len(name) for name, _ in facts)
            yield from (f"  {name:<{width}}  {value}" for name, value in facts)
            yield from (f"  {reason}" for reason in self.plan.reasons())
        yield from (f"  works around {bug}" for bug in self.workarounds)
        yield from (f"  not verified on this GPU ({CHECK} verifies it): {doubt}" for doubt in self.unverified)
        for launch in self.launches[1:]:
            yield ""
            yield "and then"
            yield from launch._lines()

    def _verdict(self) -> str:
        if self.reasons:
            verdict = f"cannot run on {self.engine}"
        elif self.problem.trivial:
            return "runs without a kernel: there is no key to see, or no result to give"
        elif self.engine == "numpy":
            return "runs on the CPU: the arrays are numpy's"
        else:
            verdict = f"runs on {self.engine}"
        return f"{verdict}{f' ({self.note})' if self.note else ''}{':' if self.plan or self.reasons else ''}"

    def _repr_html_(self) -> str:
        tensors = [("", t.role, t.name, _shape(t.shape), t.dtype) for t in self.graph.by_role("input")]
        steps = [
            (str(number), ", ".join(t.name for t in node.outputs if t.role == "output"), node.formula, _shape(node.out.shape),
             node.out.dtype)
            for number, node in enumerate(self.graph.nodes, 1)
        ]  # fmt: skip
        body = _html.details("steps", _html.table(("step", "array", "formula", "shape", "dtype"), [*tensors, *steps]))
        verdict = self._verdict().removesuffix(":")
        if self.reasons:
            body += _html.table((verdict,), [(reason,) for reason in self.reasons])
        elif self.plan:
            body += _html.table((verdict, ""), self.plan.facts())
            if self.plan.refused:
                body += _html.details("refused before", _html.table(("reason",), [(reason,) for reason in self.plan.refused]))
        else:
            body += _html.table((verdict,), [])
        if self.workarounds:
            body += _html.details("known bugs worked around", _html.table(("bug",), [(bug,) for bug in self.workarounds]))
        if self.unverified:
            title = f"not verified on this GPU ({CHECK} verifies it)"
            body += _html.details(title, _html.table(("what",), [(doubt,) for doubt in self.unverified]))
        body += "".join(launch._repr_html_() for launch in self.launches[1:])
        return _html.with_title(str(self.problem), body)


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
