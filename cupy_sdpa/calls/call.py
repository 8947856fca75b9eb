"""Run a call: a problem, its arrays and its by-value scalars, on the engine that the type of the arrays selects."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np

from ..device import cupy_runtime, driver
from ..errors import CudnnError, Unsupported
from ..graph import graph_of
from ..graph.interpreter import RowCheck, evaluate
from ..graph.nodes import Graph
from ..problem.bucket import Policy
from ..problem.problem import CU_SEQLENS, LENGTHS, Problem
from ..problem.subproblems import subproblems
from ..score_fn.recorded import Access
from ..staging.split_stage import SplitStage
from ..staging.stage import Fill, Stage, allocate_results, create_inputs, fill_trivial_results, is_plain
from ..support.engine_problem import engine_problem
from ..support.why_not import Reason, why_not

if TYPE_CHECKING:  # modules that load cuDNN are imported only for CuPy arrays
    from ..plans.plan import Plan
    from ..plans.sessions import Session
    from .autotune import Tuning
    from .user_functions import Gradients

T = TypeVar("T")

#: Inside :func:`cupy_sdpa.autotune`: the results so far. None elsewhere.
active_tunings: ContextVar[list[Tuning] | None] = ContextVar("active_tunings", default=None)


#: What is known of the statistics that :func:`cupy_sdpa.attention_backward` gets: those of all keys of the call ("whole"), of
#: these and other keys ("part"), or of other roundings of q and k ("other").
given_stats: ContextVar[Literal["whole", "part", "other"]] = ContextVar("given_stats", default="whole")


@contextlib.contextmanager
def stats_are(kind: Literal["part", "other"]) -> Iterator[None]:
    """Set :data:`given_stats` in a ``with`` block; within a block of "other" nothing more is known."""
    token = given_stats.set("other" if given_stats.get() == "other" else kind)
    try:
        yield
    finally:
        given_stats.reset(token)


class LaunchRecord(NamedTuple):
    """How a call ran on the GPU.

    Attributes:
        plans: the plans of its subproblems.
        memory_bytes: the memory that it needed besides its arrays, its results and the inputs that were created.
        plan_only: whether nothing ran besides one plan, whose workspace is this memory.
    """

    plans: tuple[Plan, ...]
    memory_bytes: int
    plan_only: bool


@dataclass
class Call:
    """A call whose arguments have been validated.

    Attributes:
        problem: the problem that the arguments define.
        arrays: the caller's arrays by name; later also the arrays that were created for the call.
        scalars: the by-value scalars by name.
        on_gpu: whether the arrays are CuPy's.
        bucket: how lengths are rounded up.
        source_lines: the source line of each operation of the score and mask functions.
        gradients: which gradients of ``tensors`` are requested.
        fills: inputs that the caller did not pass, by name; they are created when the call runs. If ``seq_lens_q`` is one of
            them, no query is padding.
        captured: how each captured array is indexed, by its name in ``arrays``.
        identities: the identities of the score and mask functions when they were traced.
        own_results: whether the results are memory that was allocated for this call, so that they overlap no other array.
        launched: how the call ran on the GPU; None before the call has run, and while a stream is captured.
        before_finish: called after the plan was executed and before its results are used; None for nothing.
        has_all_keys: whether a backward pass gets all keys of its statistics, so that these can be checked.
    """

    problem: Problem
    arrays: dict[str, Any]
    scalars: dict[str, float]
    on_gpu: bool
    bucket: Policy | None = None
    source_lines: Mapping[str, str] = dataclasses.field(default_factory=dict)
    gradients: Gradients | None = None
    fills: dict[str, Fill] = dataclasses.field(default_factory=dict)
    captured: Mapping[str, Access] = dataclasses.field(default_factory=dict)
    identities: tuple[Hashable | None, ...] = ()
    own_results: bool = False
    launched: LaunchRecord | None = None
    before_finish: Callable[[], None] | None = None
    has_all_keys: bool = False

    @functools.cached_property
    def engine_problem(self) -> Problem:
        """The problem that the engine runs, see :mod:`cupy_sdpa.support.engine_problem`."""
        return engine_problem(self.problem, self.bucket, self.on_gpu)

    def run(self, memory: cupy_runtime.Memory | None = None) -> list[Any]:
        """Compute and return the results.

        Args:
            memory: memory for everything that is allocated besides the results and the inputs that the caller did not pass.
                Default None: it is allocated.
        """
        self.create_inputs()
        if len(subproblems(self.problem)) > 1:  # raise before anything is written
            self.plan()
        self._on_device(lambda device: self._run(device, memory))
        return self.results()

    def results(self) -> list[Any]:
        """The results, in the order of :attr:`result_names`; gradients of ``tensors`` are one dictionary."""
        results = [self.arrays[name] for name in self.result_names]
        return self.gradients.as_last(results) if self.gradients else results

    @functools.cached_property
    def result_names(self) -> list[str]:
        """The names of the results among the arrays."""
        names = [spec.name for spec in self.problem.results if spec not in self.problem.dcaptured]
        return [*names, *self.gradients.results] if self.gradients else names

    def plan(self, device: int | None = None) -> None:
        """Build the plans of :meth:`run`, if they are not in the plan cache; nothing is allocated or launched.

        Args:
            device: the current device. Default None: that of the arrays.

        Raises:
            Unsupported, CudnnError: the call cannot run.
        """
        for call in self.subcalls():
            if device is None:
                call._on_device(call._build_plan)
            else:
                with call._noted():
                    call._build_plan(device)

    def execute(self, device: int | None, *, keep: bool = False) -> list[Plan]:
        """Run as a step of a program: what it allocates is released, and nothing is recorded.

        Args:
            device: the current device; None for numpy arrays.
            keep: whether the plans must outlive the plan cache, because the caller captures the stream.

        Returns:
            The plans that ran.
        """
        self.create_inputs()
        with self._noted(), cupy_runtime.released():
            return [launched[0] for launched in self._run_parts(device, keep=keep) if launched]

    def on(self, arrays: dict[str, Any]) -> Call:
        """The same call on other arrays of the same dtypes, shapes, strides and alignments; nothing is validated."""
        call = copy.copy(self)
        call.arrays, call.launched = arrays, None
        return call

    def enqueue(self) -> None:
        """Enqueue the work of :meth:`run` again, on the same arrays; the stream may be captured."""
        assert self.launched
        self._allocate_temporary_results()
        for part, plan in zip(self.subcalls(), self.launched.plans, strict=True):
            plan.set_stream(cupy_runtime.stream())
            part._execute(plan)
        self._collect_gradients()

    def create_inputs(self) -> None:
        """Create the inputs that the caller did not pass."""
        missing = {name: fill for name, fill in self.fills.items() if name not in self.arrays}
        if missing:
            self.arrays |= create_inputs(missing, self.arrays["q"], self.on_gpu)

    def subcalls(self) -> list[Call]:
        """One call for each subproblem: usually this call alone; the first one computes most of the results."""
        parts = subproblems(self.problem)
        if parts == (self.problem,):
            return [self]
        results = {spec.name for spec in self.problem.results}
        inputs = {name: array for name, array in self.arrays.items() if name not in results}
        first, *others = parts
        return [
            dataclasses.replace(self, problem=first),
            *(dataclasses.replace(self, problem=part, arrays=inputs | self._reductions(part)) for part in others),
        ]

    def _reductions(self, part: Problem) -> dict[str, Any]:
        """The arrays of the reductions of a subproblem, if they are allocated."""
        return {spec.name: self.arrays[spec.name] for spec in part.ds_reductions if spec.name in self.arrays}

    def stage(self) -> Stage | SplitStage:
        """Allocate the missing results, and copy the arrays that the engine needs in a different form."""
        allocate_results(self.problem, self.arrays, discarded=bool(self.problem.settings.gradient_of))
        if self.engine_problem.settings.split:
            return SplitStage(self.problem, self.engine_problem, self.arrays, self.scalars)
        full = "seq_lens_q" in self.fills
        return Stage(self.problem, self.engine_problem, self.arrays, self.on_gpu, full_queries=full)

    def _on_device(self, work: Callable[[int | None], T]) -> T:
        """Call ``work`` with the device of the arrays as the current one; errors get a note that describes the call."""
        if not self.on_gpu:
            return work(None)
        with cupy_runtime.on_device_of(self.arrays["q"]) as device, self._noted():
            return work(device)

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        """Give errors of a ``with`` block a note that describes the call."""
        try:
            yield
        except (Unsupported, CudnnError) as error:
            error.add_note(f"the call: {self.problem}")
            if self.source_lines:
                lines = ", ".join(f"{mode} at {line}" for mode, line in self.source_lines.items())
                error.add_note(f"operations of its score and mask functions: {lines}")
            raise

    def _build_plan(self, device: int | None) -> None:
        if device is not None and not self.problem.trivial:
            with_plan(self.engine_problem, device, lambda session, plan: None)

    def _run(self, device: int | None, memory: cupy_runtime.Memory | None) -> None:
        """Run the subproblems."""
        if device is None:
            self._run_parts(None)
        elif cupy_runtime.capturing():  # the memory is a part of that of the capture
            with cupy_runtime.released():
                self._run_parts(device, keep=True)
        else:
            with cupy_runtime.arena(memory) as arena:
                launched = self._run_parts(device)
            if all(launched):
                plans, stages = zip(*filter(None, launched), strict=True)
                plan_only = len(launched) == 1 and stages[0].unchanged and not self.gradients
                self.launched = LaunchRecord(plans, arena.needed, plan_only)

    def _run_parts(self, device: int | None, *, keep: bool = False) -> list[tuple[Plan, Stage | SplitStage] | None]:
        """Run the subproblems; for each its plan and its arrays, or None if cuDNN did not run."""
        self._allocate_temporary_results()
        launched = [part._run_part(device, keep) for part in self.subcalls()]
        self._collect_gradients()
        return launched

    def _allocate_temporary_results(self) -> None:
        """Allocate the results; those that are not returned are allocated again."""
        for spec in self.problem.dcaptured:
            self.arrays.pop(spec.name, None)
        allocate_results(self.problem, self.arrays)
        if self.gradients:
            self.gradients.allocate(self.arrays)

    def _collect_gradients(self) -> None:
        if self.gradients:
            self.gradients.collect(self.arrays)

    def _run_part(self, device: int | None, keep: bool) -> tuple[Plan, Stage | SplitStage] | None:
        """Run a subproblem; returns the plan and the arrays if they were used."""
        if self.problem.trivial:
            allocate_results(self.problem, self.arrays)
            fill_trivial_results(self.problem, self.arrays, self.on_gpu)
            return None
        if device is None:
            stage = self.stage()
            graph = graph_of(self.engine_problem)
            self._evaluate(graph, stage.arrays)
            stage.finish()
            return None
        if active_tunings.get() is not None:
            self._tune(device)
        return with_plan(self.engine_problem, device, lambda session, plan: self._launch(plan, keep))

    def lengths(self) -> list[tuple[Problem, dict[str, str]]]:
        """The problem if it has lengths, offsets or page tables of the caller, and their names among the arrays."""
        passed = [name for name in (*LENGTHS, *CU_SEQLENS, "page_table") if name in self.arrays and name not in self.fills]
        return [(self.problem, dict(zip(passed, passed, strict=True)))] if passed else []

    def evaluation(self) -> Callable[[Mapping[str, Any]], None] | None:
        """What computes the call on numpy arrays, with results; None if more runs than the evaluation of one graph."""
        parts = subproblems(self.problem)
        if self.problem.trivial or self.fills or self.gradients or len(parts) > 1:
            return None
        if not is_plain(self.problem, self.engine_problem):
            return None
        return functools.partial(self._evaluate, graph_of(self.engine_problem))

    def _evaluate(self, graph: Graph, arrays: Mapping[str, Any]) -> None:
        """Evaluate the graph of the call on numpy arrays."""
        evaluate(graph, arrays, self.scalars, check=self._row_check(graph, arrays))

    def _row_check(self, graph: Graph, arrays: Mapping[str, Any]) -> RowCheck | None:
        """The check of the statistics and the output that a backward pass gets, on the CPU; None if there is none."""
        problem = self.problem
        if not problem.backward or problem.has_score_mod or given_stats.get() == "other":
            return None
        if not isinstance(arrays["q"], np.ndarray):  # on a GPU the check would synchronize in every tile
            return None
        whole = self.has_all_keys and given_stats.get() == "whole"
        return RowCheck(graph, arrays.get("sinks"), problem.settings.dropout, whole=whole)

    def _launch(self, plan: Plan, keep: bool) -> tuple[Plan, Stage | SplitStage]:
        """Execute a plan."""
        if keep:
            plan.keep()
        return plan, self._execute(plan)

    def _execute(self, plan: Plan) -> Stage | SplitStage:
        workspace = _workspace(plan)
        stage = self.stage()
        self._execute_staged(stage, plan, workspace.ptr)
        if self.before_finish:
            self.before_finish()
        stage.finish()
        return stage

    def _execute_staged(self, stage: Stage | SplitStage, plan: Plan, workspace: int) -> None:
        plan.execute({name: array.data.ptr for name, array in stage.arrays.items()}, self.scalars, workspace)

    def _tune(self, device: int) -> None:
        """Measure the engine configs on these arrays and keep the fastest, unless the plan is tuned already."""
        from .autotune import tune

        tunings = active_tunings.get()
        assert tunings is not None
        if cupy_runtime.capturing():
            raise RuntimeError("a call cannot be tuned while a stream is being captured: tune before the capture begins")

        def measure(session: Session, plan: Plan) -> None:
            if plan.info.tuned:
                return
            stage = self.stage()
            results = [stage.arrays[spec.name] for spec in self.engine_problem.results]
            execute = functools.partial(self._execute_staged, stage)
            tunings.append(tune(self.engine_problem, plan, session.cache, execute, results))

        with_plan(self.engine_problem, device, measure)


def unsupported_reasons(problem: Problem, device: int) -> list[Reason]:
    """Why the loaded cuDNN cannot run a problem on a device, from the support table; empty if no reason is known."""
    from .._cudnn.library import library

    return why_not(problem, library().version, cupy_runtime.capability(device))


def with_plan(problem: Problem, device: int, use: Callable[[Session, Plan], T]) -> T:
    """Call ``use`` with the session and the plan of a problem; the plan is built if it is not in the plan cache.

    Raises:
        Unsupported: cuDNN has no plan for the problem.
        RuntimeError: the plan would have to be built while the stream is being captured.
    """
    from ..plans.sessions import existing_session, session

    context = driver.context_id()
    if existing_session(context) is None:
        _check_not_capturing(problem)
    current = session(context)

    def build() -> Plan:
        from ..plans.plan import Target
        from ..plans.planner import plan_for

        if reasons := unsupported_reasons(problem, device):
            raise reasons[0].error("\n".join(map(str, reasons)))
        _check_not_capturing(problem)
        return plan_for(problem, Target(cupy_runtime.model(device), cupy_runtime.capability(device), current.handle))

    # Also for building: the stream of an earlier call may have been destroyed.
    current.handle.set_stream(cupy_runtime.stream())
    return current.cache.use(problem, build, functools.partial(use, current))


def _workspace(plan: Plan) -> Any:
    """Allocate the workspace of a plan; an out-of-memory error gets a note with the size and the remedy."""
    try:
        return cupy_runtime.allocate(plan.info.workspace)
    except Exception as error:  # CuPy's OutOfMemoryError, or that of another allocator
        error.add_note(
            f"cuDNN's workspace for this call is {plan.info.workspace} bytes. max_workspace= limits it: cuDNN then uses an "
            "engine that needs less, if it has one"
        )
        raise


def _check_not_capturing(problem: Problem) -> None:
    if cupy_runtime.capturing():
        raise RuntimeError(
            f"the stream is being captured into a CUDA graph, and there is no plan yet for {problem}: building a plan would "
            "break the capture. Run the call, cupy_sdpa.explain(...) or cupy_sdpa.prepare(...) once before the capture begins"
        )


@contextlib.contextmanager
def tuning_enabled() -> Iterator[list[Tuning]]:
    """Tune the calls in the block; yields the list to which the results are appended."""
    tunings: list[Tuning] = []
    token = active_tunings.set(tunings)
    try:
        yield tunings
    finally:
        active_tunings.reset(token)
