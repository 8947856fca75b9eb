"""Explain a call: whether it can run, its graph and its plan, or every reason why it cannot."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import _html
from ..errors import Unsupported
from ..graph import graph_of
from ..graph.nodes import Graph, Node, Tensor
from ..numpy_engine.tiles import tile_of
from ..problem.problem import Problem
from ..runtime import cupy_runtime
from ..support.batch import MEASURED
from ..support.padding import description as padding_of
from ..support.why_not import Reason, guards, unverified, workarounds

if TYPE_CHECKING:
    from ..cudnn_engine.plan import PlanInfo


#: The command that verifies results on the GPU of this machine.
CHECK = "python -m cupy_sdpa check"


#: The names of the constants of score functions.
_CONSTANT = re.compile(r"\bn\d+\b")


@dataclass(frozen=True)
class Report:
    """Describe whether and how a call would run; true if it would. It holds no array.

    :func:`cupy_sdpa.explain` and :func:`cupy_sdpa.explain_function` return it; ``print`` shows all of it.

    Attributes:
        engine: ``cuDNN``, ``numpy``, or ``CuPy`` with ``engine="cupy"``.
        problem: the problem that the engine runs.
        graph: its operation graph.
        plan: cuDNN's plan; None on numpy, if the call cannot run, and if nothing was planned.
        reasons: why the call cannot run; empty if it can.
        note: how the report was made, such as "from the support table alone"; may be empty.
        error: the exception that the call would raise.
        launches: the reports of all launches, this one first, if the call needs more than one.
        workarounds: the known cuDNN bugs that the call works around.
        unverified: the features of the call whose results were never verified on this GPU.
        blocks: how a block mask is computed; empty without one.
        conversion: which arrays are converted with ``compute_dtype``; empty without it.
        accuracy: the expected error of FP8, and its cause; empty for other dtypes.
        scalars: the names and values of the scalars in the formulas, such as ``scale``; empty for a problem, which has no
            values.
        steps: the steps of the call, one line each: what each does and writes. Those that are attention are the launches.
        temporary_bytes: the bytes of the temporary arrays of the steps; the workspace of cuDNN is not among them.
        batch_dependence: why the bits of a sequence may depend on the rest of the batch, and the fix; empty if they do not, for
            arrays of equal lengths; None if it is unknown.

    >>> import cupy_sdpa
    >>> shape = (512, 8, 1024, 2)
    >>> problem = cupy_sdpa.problem(shape, shape, shape, dtype="float16", backward=True)
    >>> report = cupy_sdpa.explain(problem, gpu="H200", cudnn="9.19")
    >>> bool(report), report.engine, report.error.__name__, len(report.reasons)
    (False, 'cuDNN', 'Unsupported', 1)
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
    blocks: str = ""
    conversion: str = ""
    accuracy: str = ""
    scalars: tuple[tuple[str, float], ...] = ()
    steps: tuple[str, ...] = ()
    temporary_bytes: int = 0
    batch_dependence: str | None = None

    @property
    def workspace(self) -> int | None:
        """Bytes of cuDNN's workspace, or of a tile with ``engine="cupy"``; 0 on numpy, None if unknown.

        Not included are the arrays of other steps, such as copies, see ``temporary_bytes``.

        >>> import numpy as np, cupy_sdpa
        >>> x = np.ones((8, 1, 4, 1), np.float32, order="F")
        >>> cupy_sdpa.explain(x, x, x).workspace
        0
        """
        if self.engine == "numpy" or self.problem.trivial:
            return 0
        if self.engine == "CuPy":
            return max(tile_of(launch.graph).nbytes for launch in self.launches or (self,))
        plans = [launch.plan for launch in self.launches or (self,)]  # they run in sequence and share it
        return max((plan.workspace for plan in plans if plan), default=None)

    def __bool__(self) -> bool:
        return not self.reasons

    def __str__(self) -> str:
        return "\n".join(self._lines(operations=True))

    def __repr__(self) -> str:
        return f"<Report: {self._verdict().removesuffix(':')}; {self.problem}>"

    def summary(self) -> str:
        """Return the report as text without the operations of the graph.

        >>> import numpy as np, cupy_sdpa
        >>> x = np.ones((8, 1, 4, 1), np.float32, order="F")
        >>> report = cupy_sdpa.explain(x, x, x)
        >>> str(report).startswith(report.summary()), "operations" in report.summary()
        (True, False)
        """
        return "\n".join(self._lines(operations=False))

    def _lines(self, *, operations: bool) -> Iterator[str]:
        yield self._verdict()
        yield from (f"  {reason}" for reason in self.reasons)
        yield str(self.problem)
        if self.blocks:
            yield f"block mask: {self.blocks}"
        if self.conversion:
            yield f"arrays are converted: {self.conversion}"
        if self.accuracy:
            yield f"expected error: {self.accuracy}"
        if named := [f"{name} = {value:g}" for name, value in self.scalars if not _CONSTANT.fullmatch(name)]:
            yield f"scalars: {', '.join(named)}"
        if self.plan:
            facts = list(self._facts(self.plan))
            width = max(len(name) for name, _ in facts)
            yield from (f"  {name:<{width}}  {value}" for name, value in facts)
            yield from (f"  {reason}" for reason in self.plan.reasons())
        yield from (f"  works around {bug}" for bug in self.workarounds)
        yield from (f"  not verified on this GPU ({CHECK} verifies it): {what}" for what in self.unverified)
        if self.batch_dependence:
            yield f"bits of a sequence may depend on the rest of the batch: {self.batch_dependence}"
        elif self.batch_dependence is not None and self.problem.sizes[-1] > 1:
            source = f" ({MEASURED})" if self.engine == "cuDNN" else ""
            yield f"bits of a sequence do not depend on the rest of the batch{source}"
        if len(self.steps) > 1:
            yield f"{len(self.steps)} steps, {self.temporary_bytes} bytes of temporary arrays:"
            yield from self.steps
        if operations:
            yield "operations, with the axes of the call (scores: keys, queries, heads, batch):"
            yield from self._operations()
        for launch in self.launches[1:]:
            yield ""
            yield "and then"
            yield from launch._lines(operations=operations)

    def _operations(self) -> Iterator[str]:
        """Yield one line per input, then one line per step; results that exist only inside the kernel are marked."""
        values = {name: f"{value:.6g}" for name, value in self.scalars}
        formulas = [_CONSTANT.sub(lambda match: values.get(match[0], match[0]), node.formula) for node in self.graph.nodes]
        width = max(map(len, formulas))
        for t in self.graph.by_role("input", "constant"):
            yield f"  {t.role:8} {t.name:<{width}}  {_shape(self.shape_of(t), 'x'):>20} {t.dtype}"
        for number, (node, formula) in enumerate(zip(self.graph.nodes, formulas, strict=True), 1):
            shape, storage = _shape(self.shape_of(node.out), "x"), "; ".join(_storage(node))
            yield f"  {number:4}.  {formula:<{width}}  {shape:>20} {node.out.dtype:8}  {storage}"

    def shape_of(self, tensor: Tensor) -> tuple[int, ...]:
        """Return a graph tensor's shape in the axis order of the call; scores are (Skv, Sq, Hq, B)."""
        for spec in self.problem.tensors:
            if spec.name == tensor.name:
                return spec.shape
        return tensor.shape[::-1]

    def _facts(self, plan: PlanInfo) -> Iterator[tuple[str, str]]:
        """Yield the properties of the plan, and what becomes of the padding."""
        yield from plan.facts()
        if padding := padding_of(self.problem):
            yield "padding", padding

    def _verdict(self) -> str:
        if self.reasons:
            verdict = f"cannot run on {self.engine}"
        elif self.problem.trivial:
            return "runs without a kernel: there is no query, key or value"
        elif self.engine == "numpy":
            return "runs on the CPU: the arrays are numpy arrays"
        elif self.engine == "CuPy":
            return f"runs with CuPy's operations, without cuDNN: {tile_of(self.graph)}"
        else:
            verdict = f"runs on {self.engine}"
        return f"{verdict}{f' ({self.note})' if self.note else ''}{':' if self.reasons else ''}"

    def _repr_html_(self) -> str:
        tensors = [("", t.role, t.name, _shape(self.shape_of(t)), t.dtype) for t in self.graph.by_role("input")]
        steps = [
            (str(number), "; ".join(_storage(node)), node.formula, _shape(self.shape_of(node.out)), node.out.dtype)
            for number, node in enumerate(self.graph.nodes, 1)
        ]  # fmt: skip
        body = ""
        if len(self.steps) > 1:
            title = f"{len(self.steps)} steps, {self.temporary_bytes} bytes of temporary arrays"
            body += _html.details(title, _html.table(("step",), [(step,) for step in self.steps]))
        body += _html.details("operations", _html.table(("step", "array", "formula", "shape", "dtype"), [*tensors, *steps]))
        verdict = self._verdict().removesuffix(":")
        if self.reasons:
            body += _html.table((verdict,), [(reason,) for reason in self.reasons])
        elif self.plan:
            body += _html.table((verdict, ""), self._facts(self.plan))
            if self.plan.refused:
                body += _html.details("refused before", _html.table(("reason",), [(reason,) for reason in self.plan.refused]))
        else:
            body += _html.table((verdict,), [])
        if self.workarounds:
            body += _html.details("known bugs worked around", _html.table(("bug",), [(bug,) for bug in self.workarounds]))
        if self.unverified:
            title = f"not verified on this GPU ({CHECK} verifies it)"
            body += _html.details(title, _html.table(("what",), [(what,) for what in self.unverified]))
        body += "".join(launch._repr_html_() for launch in self.launches[1:])
        return _html.with_title(str(self.problem), body)


def _storage(node: Node) -> Iterator[str]:
    """Yield which results of a step are stored; the others exist only inside the kernel."""
    if node.out.role == "virtual":
        yield "never stored"
    yield from (f"output {t.name}" for t in node.outputs if t.role == "output")


def _shape(shape: tuple[int, ...], times: str = " x ") -> str:
    return times.join(map(str, shape))


def joined(reports: Sequence[Report]) -> Report:
    """Return the report on several launches: the report of the first that cannot run, or the first with all launches."""
    first, *others = reports
    for report in reports:
        if report.reasons:
            return report
    return dataclasses.replace(first, launches=(first, *others)) if others else first


def explain_on_device(problem: Problem, device: int) -> Report:
    """Report whether and how a problem would run on the current device; the plan is built and cached."""
    graph = graph_of(problem)
    if problem.trivial:
        return Report("cuDNN", problem, graph)
    from ..cudnn_engine.cached_plan import unsupported_reasons, with_plan

    if reasons := unsupported_reasons(problem, device):
        return refusal_report(problem, reasons)
    try:
        info = with_plan(problem, device, lambda session, plan: plan.info)
    except Unsupported as error:
        return Report("cuDNN", problem, graph, reasons=tuple(str(error).splitlines()))
    return plan_report(problem, info, cupy_runtime.capability(device))


def plan_report(problem: Problem, info: PlanInfo, capability: int, note: str = "") -> Report:
    """Return the report on a problem that has a plan."""
    target = problem, info.cudnn, capability
    bugs, doubts = workarounds(*target), unverified(*target)
    return Report("cuDNN", problem, info.graph, info, note=note, workarounds=bugs, unverified=doubts)


def with_workarounds(report: Report, problems: Iterable[Problem], target: Callable[[], tuple[int, int]]) -> Report:
    """Return the report with the bugs that the caller's problems work around; the engine's problems may no longer have them.

    ``target`` returns the version of cuDNN and the compute capability, of a report on a call that can run.
    """
    if report.reasons or report.problem.trivial:
        return report
    bugs = [bug for problem in problems for bug in workarounds(problem, *target())]
    return dataclasses.replace(report, workarounds=tuple(dict.fromkeys((*bugs, *report.workarounds))))


def unplanned_report(problem: Problem, cudnn: int, capability: int, note: str) -> Report:
    """Return the report on a problem of which the support table knows no reason against it, without a plan."""
    target = problem, cudnn, capability
    graph, bugs, doubts = graph_of(problem, guards(*target)), workarounds(*target), unverified(*target)
    return Report("cuDNN", problem, graph, note=note, workarounds=bugs, unverified=doubts)


def refusal_report(problem: Problem, reasons: Sequence[Reason], note: str = "") -> Report:
    """Return the report on a problem that the support table rules out."""
    texts = tuple(map(str, reasons))
    return Report("cuDNN", problem, graph_of(problem), reasons=texts, note=note, error=reasons[0].error)
