"""A call: on the engine that its arrays choose, run, explained, or tuned."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from ..device import cupy_runtime
from ..errors import CudnnError, Unsupported
from ..graph.interpreter import evaluate
from ..graph.patterns import graph_of
from ..problem.bucket import Policy
from ..problem.problem import CU_SEQLENS, LENGTHS, ROW_STATS, Problem
from ..problem.subproblems import subproblems
from ..problem.tensor_spec import numpy_dtype
from ..support.why_not import Reason, unverified, why_not, workarounds
from .report import Report
from .staging import Stage, clear, engine_problem, fill_value, filled

if TYPE_CHECKING:  # cuDNN's rooms are entered only for CuPy arrays
    from ..plans.plan import Plan, PlanInfo
    from ..plans.plan_cache import Session
    from .autotune import Tuning
    from .user_functions import Gradients

T = TypeVar("T")

#: Where :func:`cupy_sdpa.autotune` is in force: what has been tuned so far, and whether knobs are tried by hand.
tunings: ContextVar[tuple[list[Tuning], bool] | None] = ContextVar("tunings", default=None)


class LaunchRecord(NamedTuple):
    """What a call ran with.

    Attributes:
        plan: its plan.
        workspace: the address of the workspace.
        plain: whether nothing but the plan was run.
        made: bytes of the arrays that stood in for others.
    """

    plan: Plan
    workspace: int
    plain: bool
    made: int


class Fill(NamedTuple):
    """A one-dimensional array of equal elements."""

    dtype: str
    size: int
    value: int


@dataclass
class Call:
    """A call's arguments, read.

    Attributes:
        problem: what they pose.
        arrays, scalars: by their names.
        on_gpu: the engine.
        bucket: how lengths are rounded up.
        lines: where each operation of the caller's own functions was written.
        gradients: what gives the gradients of the arrays that they read, where asked for.
        filled: arrays of one value that the caller did not give, by their names; they are made when the call runs.
        launched: what it ran with, once it has run.
    """

    problem: Problem
    arrays: dict[str, Any]
    scalars: dict[str, float]
    on_gpu: bool
    bucket: Policy | None = None
    lines: Mapping[str, str] = dataclasses.field(default_factory=dict)
    gradients: Gradients | None = None
    filled: dict[str, Fill] = dataclasses.field(default_factory=dict)
    launched: LaunchRecord | None = None

    def run(self) -> list[Any]:
        """Compute; gives the results."""
        self._fill_inputs()
        parts = self._launches()
        if len(parts) > 1:  # refuse before anything is written
            for launch in parts:
                launch._on_device(launch._plan)
        for launch in parts:
            launch._on_device(launch._compute)
            if launch.arrays is not self.arrays:
                self.arrays |= {spec.name: launch.arrays[spec.name] for spec in launch.problem.ds_reductions}
        results = [self.arrays[spec.name] for spec in self.problem.results if spec not in self.problem.dcaptured]
        if self.gradients:
            results.append(self._on_device(self._gathered))
        return results

    def _fill_inputs(self) -> None:
        if self.filled:
            make = functools.partial(filled, like=self.arrays["q"], on_gpu=self.on_gpu)
            self.arrays |= {name: make(*fill) for name, fill in self.filled.items()}
            self.filled = {}

    def _on_device(self, work: Callable[[int | None], T]) -> T:
        """Do something on the device of the arrays; what is refused says of which call, and where that was written."""
        if self.on_gpu:
            with cupy_runtime.on_device_of(self.arrays["q"]) as device:
                try:
                    return work(device)
                except (Unsupported, CudnnError) as error:
                    error.add_note(f"asked for: {self.problem}")
                    if self.lines:
                        written = ", ".join(f"{mode} at {line}" for mode, line in self.lines.items())
                        error.add_note(f"its functions are written with {written}")
                    raise
        return work(None)

    def _gathered(self, device: int | None) -> dict[str, Any]:
        assert self.gradients
        return self.gradients.gathered(self.arrays)

    def _plan(self, device: int | None) -> None:
        if device is not None and not self.problem.trivial:
            planned(self.engine_problem, device, lambda here, plan: None)

    def _launches(self) -> list[Call]:
        """The calls that this one takes, nearly always itself alone; the first one gives most results."""
        parts = subproblems(self.problem)
        if parts == (self.problem,):
            return [self]
        results = {spec.name for spec in self.problem.results}
        inputs = {name: array for name, array in self.arrays.items() if name not in results}
        first, *others = parts
        return [
            dataclasses.replace(self, problem=first),
            *(dataclasses.replace(self, problem=part, arrays=dict(inputs)) for part in others),
        ]

    def explain(self) -> Report:
        """Whether and how :meth:`run` would run."""
        if not self.on_gpu:
            return every_launch(self.engine_problem, lambda asked: Report("numpy", asked, graph_of(asked)))
        with cupy_runtime.on_device_of(self.arrays["q"]) as device:
            report = every_launch(self.engine_problem, lambda asked: explain_here(asked, device))
            if report.plan:  # the engine's problem may no longer meet a bug that the caller's does
                own = workarounds(self.problem, report.plan.cudnn, cupy_runtime.capability(device))
                return dataclasses.replace(report, workarounds=tuple(dict.fromkeys((*own, *report.workarounds))))
            return report

    def with_gradient_inputs(self) -> Call:
        """A backward call that knows only q, k and v, with what the forward pass gives; the output serves as its gradient."""
        if not self.problem.backward:
            return self
        results = ("dout", "out", "stats", *(spec.name for spec in self.problem.results))
        known = {name: array for name, array in self.arrays.items() if name not in results}
        forward = dataclasses.replace(
            self.problem, dout=None, dq=None, dk=None, dv=None, dbias=None, dsinks=None, dcaptured=(),
            settings=self.problem.settings._replace(deterministic=False),
        )  # fmt: skip
        out, stats = Call(forward, dict(known), self.scalars, self.on_gpu, self.bucket, filled=dict(self.filled)).run()
        return dataclasses.replace(self, arrays={**known, "out": out, "stats": stats, "dout": out})

    @property
    def engine_problem(self) -> Problem:
        """What the engine is given in place of what was asked, see :mod:`cupy_sdpa.calls.staging`."""
        return engine_problem(self.problem, self.bucket, self.on_gpu)

    def _compute(self, device: int | None) -> None:
        if self.problem.trivial:
            self._fill()
            return
        given = self.engine_problem
        if device is None:
            stage = self._staged(given)
            evaluate(graph_of(given), stage.arrays, self.scalars)
            stage.finish()
        else:
            if tunings.get() is not None:
                self._tune(given, device)
            planned(given, device, lambda _, plan: self._launch(given, plan))

    def _staged(self, given: Problem) -> Stage:
        self._allocate()
        return Stage(self.problem, given, self.arrays, self.on_gpu)

    def _fill(self) -> None:
        """The results where there is nothing to compute: a sum over no key is 0, its logarithm -inf.

        A row that could see nothing but its sink sees that.
        """
        self._allocate()
        p = self.problem
        for spec in p.results:
            clear(self.arrays[spec.name], fill_value(spec.name), self.on_gpu)
        if p.sinks and not p.backward:
            xp = cupy_runtime.cupy() if self.on_gpu else np
            for spec in p.results:
                if spec.name in ROW_STATS:
                    alone = 1.0 if spec.name == "sum_exp" else self.arrays["sinks"][:, None]
                    self.arrays[spec.name][...] = xp.where(self._rows_there(xp), alone, fill_value(spec.name))

    def _rows_there(self, xp: Any) -> Any:
        """Which rows belong to a sequence, to be broadcast over the log-sum-exp's axes."""
        if self.problem.packed:
            places, begins = xp.arange(self.problem.q.shape[2]), self.arrays[CU_SEQLENS[0]]
            begin = xp.take(begins, xp.maximum(xp.searchsorted(begins, places, side="right") - 1, 0))  # of its sequence
            *_, longest, _, _ = self.problem.sizes  # positions of a sequence beyond max_seqlen_q belong to none
            return (begin <= places) & (places < begins[-1]) & (places < begin + longest)
        if self.problem.ragged:
            return xp.arange(self.problem.q.shape[2])[:, None, None] < self.arrays[LENGTHS[0]]
        return xp.ones((), bool)

    def _allocate(self) -> None:
        """Make the results that the caller did not give."""
        for spec in self.problem.results:
            if self.arrays.get(spec.name) is None:
                empty = cupy_runtime.cupy().empty if self.on_gpu else np.empty
                self.arrays[spec.name] = empty(spec.shape, numpy_dtype(spec.dtype), order="F")

    def _launch(self, given: Problem, plan: Plan) -> None:
        if capturing := cupy_runtime.capturing():
            plan.keep()
        self._allocate()
        workspace = _workspace(plan)  # after the results, as in a repeated call, so that it gets the same address
        stage = self._enqueued(given, plan, workspace.ptr)
        if not capturing:
            self.launched = LaunchRecord(plan, workspace.ptr, stage.plain, stage.bytes_made)

    def enqueue(self) -> None:
        """Enqueue once more what :meth:`run` did, on the same arrays, in the same workspace; the stream may be captured."""
        assert self.launched
        plan, workspace, *_ = self.launched
        plan.set_stream(cupy_runtime.stream())
        self._enqueued(self.engine_problem, plan, workspace)

    def _enqueued(self, given: Problem, plan: Plan, workspace: int) -> Stage:
        stage = self._staged(given)
        self._execute(stage, plan, workspace)
        stage.finish()
        return stage

    def _execute(self, stage: Stage, plan: Plan, workspace: int) -> None:
        plan.execute({name: array.data.ptr for name, array in stage.arrays.items()}, self.scalars, workspace)

    def _tune(self, given: Problem, device: int) -> None:
        """Measure every engine config on these arrays, unless that has been done, and keep the fastest."""
        from .autotune import tune

        in_force = tunings.get()
        assert in_force is not None
        done, knobs = in_force
        if cupy_runtime.capturing():
            raise RuntimeError("a stream is being captured: nothing can be measured now; tune before the capture begins")

        def measure(here: Session, plan: Plan) -> None:
            if plan.info.tuned:
                return
            stage = self._staged(given)
            results = [stage.arrays[spec.name] for spec in given.results]
            done.append(tune(given, plan, here.cache, functools.partial(self._execute, stage), results, knobs=knobs))

        planned(given, device, measure)


def every_launch(problem: Problem, explain: Callable[[Problem], Report]) -> Report:
    """What is said of a problem: of its first launch, unless another one cannot run."""
    first, *others = (explain(part) for part in subproblems(problem))
    for report in others:
        if report.reasons:
            return report
    return dataclasses.replace(first, launches=(first, *others)) if others else first


def explain_here(problem: Problem, device: int) -> Report:
    """Whether and how a problem would run on a device, which is the current one; its plan is kept for the call."""
    graph = graph_of(problem)
    if problem.trivial:
        return Report("cuDNN", problem, graph)
    if reasons := objections(problem, device):
        return refused(problem, reasons)
    try:
        info = planned(problem, device, lambda _, plan: plan.info)
    except Unsupported as error:
        return Report("cuDNN", problem, graph, reasons=tuple(str(error).splitlines()))
    return planned_report(problem, info, cupy_runtime.capability(device))


def planned_report(problem: Problem, info: PlanInfo, capability: int, note: str = "") -> Report:
    """The report of a problem that has a plan."""
    asked = problem, info.cudnn, capability
    return Report("cuDNN", problem, info.graph, info, note=note, workarounds=workarounds(*asked), unverified=unverified(*asked))


def refused(problem: Problem, reasons: Sequence[Reason], note: str = "") -> Report:
    """The report of a problem that the support table refuses."""
    texts = tuple(map(str, reasons))
    return Report("cuDNN", problem, graph_of(problem), reasons=texts, note=note, error=reasons[0].error)


def objections(problem: Problem, device: int) -> list[Reason]:
    """What the support table has against a problem on a device, with the cuDNN that is loaded."""
    from .._cudnn.library import library

    return why_not(problem, library().version, cupy_runtime.capability(device))


def planned(problem: Problem, device: int, run: Callable[[Session, Plan], T]) -> T:
    """Run with a problem's plan, which is looked up or, after the support table has been asked, built.

    Raises:
        Unsupported: there is no plan.
        RuntimeError: there is none yet, and the stream is being captured.
    """
    from ..plans.plan_cache import existing_session, session

    context = cupy_runtime.context_id()
    if existing_session(context) is None:
        _not_while_capturing(problem)
    here = session(context)

    def build() -> Plan:
        from ..plans.plan import Target, plan_for

        if reasons := objections(problem, device):
            raise reasons[0].error("\n".join(map(str, reasons)))
        _not_while_capturing(problem)
        return plan_for(problem, Target(cupy_runtime.model(device), cupy_runtime.capability(device), here.handle))

    here.handle.set_stream(cupy_runtime.stream())  # also for building: the stream of an earlier call may have been destroyed
    return here.cache.use(problem, build, functools.partial(run, here))


def _workspace(plan: Plan) -> Any:
    """The memory for a plan's workspace; where there is too little, the allocator's error with the size and the remedy."""
    try:
        return cupy_runtime.allocate(plan.info.workspace)
    except Exception as error:  # CuPy's OutOfMemoryError, or what another allocator raises
        error.add_note(
            f"cuDNN's workspace for this call is {plan.info.workspace} bytes. max_workspace= limits it: cuDNN then uses an "
            "engine that needs less, where it has one"
        )
        raise


def _not_while_capturing(problem: Problem) -> None:
    if cupy_runtime.capturing():
        raise RuntimeError(
            f"the stream is being captured into a CUDA graph, and there is no plan yet for {problem}: building one would "
            "break the capture. Call once, or cupy_sdpa.explain(...), or cupy_sdpa.prepare(...), before it begins"
        )


@contextlib.contextmanager
def tuning_on(knobs: bool) -> Iterator[list[Tuning]]:
    """Have calls tuned; gives the list that what was found is added to."""
    done: list[Tuning] = []
    token = tunings.set((done, knobs))
    try:
        yield done
    finally:
        tunings.reset(token)
