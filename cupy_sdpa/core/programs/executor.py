"""Calls that have been read: build their programs, and run them.

:func:`call_of_problem` builds the program of one problem, :func:`composed` a program of several steps, and
:meth:`ReadCall.run` runs it: on numpy step by step, on a GPU with one block of memory, as one call of the replay cache.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ..boundary.call import BoundProblem, Fill, GivenStats, LaunchRecord, logger
from ..boundary.read_array import check_separate
from ..boundary.user_functions import NO_FUNCTIONS, Functions, Gradients, function_identities
from ..errors import CudnnError, Unsupported
from ..graph import graph_of
from ..graph.nodes import Graph
from ..numpy_engine.interpreter import evaluate
from ..numpy_engine.row_check import RowCheck
from ..problem import trace
from ..problem.bucket import Rounding
from ..problem.problem import Problem
from ..problem.tensor_spec import TensorSpec
from ..problem.view import View, array_of_view, device_of
from ..replay.call_key import HOST, CallKey, read_key
from ..replay.replay_cache import keep_recent
from ..runtime import cupy_runtime, memory
from ..runtime.interpreted_array import InterpretedArray
from ..support.engine_problem import engine_problem
from . import attention_steps
from .binding import BLOCK
from .program import Builder, Program
from .step_log import run_logged
from .steps import Attend, ProgramStep

if TYPE_CHECKING:  # modules that load cuDNN are imported only for CuPy arrays
    from ..cudnn_engine.plan import Plan
    from ..replay.call_report import Report
    from ..runtime.cuda_graph import OnHost


@dataclass
class ReadCall:
    """A call with valid arguments: its program and its arrays. It is cached and captured as a whole.

    Attributes:
        program: the program.
        arrays: the caller's arrays by name; later also the inputs and the results that were created for the call.
        results: the views of the results in order. Results that the caller does not pass are created.
        tensors: the metadata of the arrays whose alignments are part of the program.
        problem: the problem, if the call is one problem; None for a call of several steps.
        functions: the traced score and mask functions. Default: none.
        identities: the identities of the functions when they were traced.
        scalars: the scalars by name that are passed by value.
        fills: inputs that the caller did not pass, by name; they are created when the call runs.
        gradients: the gradients of ``tensors``, which are the last results. Default None: there are none.
        launched: how the call ran on the GPU; None before the call has run, and while a stream is captured.
        planned: whether the plans have been built. They are built before anything is written, because planning can fail.
        refusal: returns why the call is not supported, given the step's name and the step's reason. Default None: the
            reason itself.

    >>> from cupy_sdpa import attention
    >>> from cupy_sdpa.extend import Call
    >>> q = np.zeros((8, 1, 4, 1), order="F")
    >>> call = Call.of(attention, q, q, q, causal=True).read()
    >>> call.results["out"].shape, call.report().engine, [step.name for step in call.program.steps]
    ((8, 1, 4, 1), 'numpy', ['attention'])
    """

    program: Program
    arrays: dict[str, Any]
    results: Mapping[str, View]
    tensors: tuple[TensorSpec, ...] = ()
    problem: Problem | None = None
    functions: Functions = NO_FUNCTIONS
    identities: tuple[Hashable | None, ...] = ()
    scalars: Mapping[str, float] = field(default_factory=dict)
    fills: Mapping[str, Fill] = field(default_factory=dict)
    gradients: Gradients | None = None
    launched: LaunchRecord | None = None
    planned: bool = False
    refusal: Callable[[str, str], str] | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether the arrays are CuPy's, or views of such arrays, which have no elements."""
        return device_of(self.arrays["q"]) is not None

    def on(self, arrays: dict[str, Any]) -> ReadCall:
        """Return the same call on other arrays of the same dtypes, shapes, strides and alignments."""
        call = copy.copy(self)
        call.arrays, call.launched = arrays, None
        return call

    def plan(self) -> None:
        """Build the plans of all steps, if they are not in the plan cache; ``error.step`` names a step that cannot run."""
        self.planned = True
        if not self.on_gpu:
            return
        from ..cudnn_engine.cached_plan import with_plan

        with cupy_runtime.on_device_of(self.arrays["q"]) as device:
            for step in self.program.steps:
                if step.attend and step.attend.arrays:
                    try:
                        with_plan(step.attend.problem, device, lambda session, plan: None)
                    except Exception as error:
                        self._raise(error, step)

    def run(self, memory: cupy_runtime.Memory | None = None, plans: Sequence[Plan] = ()) -> list[Any]:
        """Compute and return the results, with ``plans`` instead of the plan cache's.

        ``memory`` holds everything that is allocated, except the results and the inputs that the caller did not pass.
        """
        self.launched = None
        if not self.planned and not plans and len(self.program.steps) > 1:
            self.plan()
        self.create_inputs()
        if not self.on_gpu:
            self.create_results()
            self.execute(None)
            return self.returned()
        with cupy_runtime.on_device_of(self.arrays["q"]) as device:
            self.create_results()
            if cupy_runtime.capturing():  # into an arena of the capture, if there is one
                self.execute(device, keep=True)
            else:
                with cupy_runtime.arena(memory) as arena:
                    ran = self.execute(device, plans=plans)
                if ran or not self.program.launches:
                    self.launched = LaunchRecord(tuple(ran), arena.needed, self.program.plan_only)
        return self.returned()

    def returned(self) -> list[Any]:
        """Return the arrays of the results in order; gradients of ``tensors`` are one dictionary."""
        results = [self.arrays[name] for name in self.results]
        return self.gradients.as_last(results) if self.gradients else results

    def create_inputs(self) -> None:
        """Create the inputs that the caller did not pass."""
        for name, fill in self.fills.items():
            if name not in self.arrays:
                self.arrays[name] = _filled(fill, self.arrays["q"])

    def create_results(self) -> None:
        """Create the results that the caller did not pass."""
        for name, view in self.results.items():
            if name not in self.arrays:
                self.arrays[name] = cupy_runtime.new_result(self.arrays["q"], view.shape, view.dtype)

    def check_elements(self, arrays: Mapping[str, Any] | None = None) -> None:
        """Check elements such as lengths on the CPU, by default of the call's arrays; reading from a GPU would synchronize."""
        if arrays is None:
            if self.on_gpu:
                return
            arrays = self.arrays
        for check, views in self.program.checks:
            check({name: array_of_view(x, arrays[x.storage.name]) for name, x in views.items() if x.storage.name in arrays})

    def evaluation(self) -> Callable[[Mapping[str, Any]], None] | None:
        """Return a function that computes the call on numpy arrays; None unless the call only evaluates one graph."""
        if not self.program.plan_only or self.fills or self.gradients:
            return None
        (attend,) = self.program.launches
        if not attend.arrays:
            return None
        if attend.of.backward or trace.problems is not None:
            return functools.partial(self._evaluate, attend)
        return functools.partial(evaluate, graph_of(attend.problem), scalars=self._scalars(attend))  # the quickest

    def enqueue(self, on_host: OnHost) -> None:
        """Enqueue the work of :meth:`run` again, on the same arrays, in a capture of the package."""
        assert self.launched
        self.execute(self.arrays["q"].data.device_id, plans=self.launched.plans, on_host=on_host)

    def execute(
        self,
        device: int | None,
        block: Any = None,
        *,
        plans: Sequence[Plan] = (),
        keep: bool = False,
        on_host: OnHost | None = None,
    ) -> list[Plan]:
        """Run all steps, and return the plans that ran.

        Args:
            device: the current device; None for numpy arrays.
            block: the memory of the temporaries, an array of bytes. Default None: it is allocated.
            plans: the plans of all launches. Default: from the plan cache, which builds missing plans.
            keep: whether the plans must outlive the plan cache, because the caller captures the stream.
            on_host: in a capture, takes each host step as a function and its arguments. Default None: host steps run.
        """
        ran: list[Plan] = []
        given = iter(plans)
        branches = self.program.join < len(self.program.steps) and device is not None and cupy_runtime.capturing()
        logged = logger.isEnabledFor(logging.DEBUG) and not (device is not None and cupy_runtime.capturing())
        if logged:
            logger.debug("%s", self.program.summary)
        join = None
        if plans:
            plans[0].set_stream(cupy_runtime.stream())  # all plans of a call share one handle
        try:
            for number, (step, arguments) in enumerate(self.bound(block)):
                if join and number == self.program.join:
                    join()
                    join = None
                if step.on_host and on_host:
                    on_host(step.function, arguments)
                    continue
                plan = None
                with cupy_runtime.parallel_branch() if branches and step.branch else contextlib.nullcontext(join) as join:
                    if plans and branches:
                        plans[0].set_stream(cupy_runtime.stream())
                    if logged:
                        run = functools.partial(self._run_step, step, arguments, device, given, keep)
                        plan = run_logged(number + 1, step, run, on_gpu=device is not None)
                    else:
                        plan = self._run_step(step, arguments, device, given, keep)
                if plan is not None:
                    ran.append(plan)
        finally:
            if join:
                join()  # a capture with an unjoined branch could not be ended
        return ran

    def _run_step(
        self, step: ProgramStep, arguments: Any, device: int | None, plans: Iterator[Plan], keep: bool
    ) -> Plan | None:
        """Run one step; return the plan that ran."""
        if step.function:
            step.function(*arguments)
        elif step.attend and step.attend.arrays:
            if device is not None:
                return self._launch(step, arguments, device, next(plans, None), keep)
            self._evaluate(step.attend, arguments)
        return None

    def bound(self, block: Any = None) -> Iterator[tuple[ProgramStep, Any]]:
        """Yield each step with its arguments: a tuple for a kernel, a dictionary for attention."""
        program, like, on_gpu = self.program, self.arrays["q"], self.on_gpu
        if block is None and program.memory_bytes:
            block = cupy_runtime.temporary(like, (program.memory_bytes,), np.dtype(np.uint8))
        by_storage = {**self.arrays, BLOCK: block}
        for name in program.constants:
            constant = program.constant(name)
            by_storage[name] = constant.on_device() if on_gpu else constant.array
        for name, fill in program.fills.items():
            by_storage[name] = _filled(fill, like)
        arrays = program.bindings.arrays(by_storage, on_gpu=on_gpu)
        for step, arguments in zip(program.steps, program.bindings.arguments, strict=True):
            yield step, arguments.on(arrays, self.scalars)

    def _scalars(self, attend: Attend | None) -> Mapping[str, float]:
        return {**self.scalars, **attend.scalars} if attend and attend.scalars else self.scalars

    def _evaluate(self, attend: Attend, arrays: Mapping[str, Any]) -> None:
        """Compute attention on numpy arrays."""
        if trace.problems is not None:  # the problem that a GPU would plan
            trace.keep(engine_problem(attend.problem, None, True))
        graph = graph_of(attend.problem)
        evaluate(graph, arrays, self._scalars(attend), check=_row_check(graph, attend, arrays))

    def _launch(self, step: ProgramStep, arrays: Mapping[str, Any], device: int, plan: Plan | None, keep: bool) -> Plan:
        """Execute a plan, by default from the plan cache."""
        attend = step.attend
        assert attend
        try:
            if plan is not None:
                self._execute_plan(step, arrays, keep, plan)
                return plan
            from ..cudnn_engine.cached_plan import with_plan

            return with_plan(attend.problem, device, lambda session, plan: self._execute_plan(step, arrays, keep, plan))
        except Exception as error:
            self._raise(error, step)

    def _execute_plan(self, step: ProgramStep, arrays: Mapping[str, Any], keep: bool, plan: Plan) -> Plan:
        """Execute a plan; its workspace is memory for this launch only."""
        if keep:
            plan.keep()
        # a branch runs in parallel with later launches, which must not use its workspace
        with contextlib.nullcontext() if step.branch else cupy_runtime.released():
            workspace = _workspace(plan)  # it returns to the pool when this function ends
            addresses = {name: array.data.ptr for name, array in arrays.items()}
            plan.execute(addresses, self._scalars(step.attend), workspace.ptr)
        return plan

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The problems that an engine runs, in step order. If no query attends to a key, there is one problem without keys."""
        from .describe import problems_of

        return problems_of(self)

    def report(
        self,
        explain: Callable[[Problem], Report] | None = None,
        target: Callable[[], tuple[int, int]] | None = None,
    ) -> Report:
        """Report whether and how the call would run: the steps of its program, and the plan of each launch.

        ``explain`` returns the report on a problem; ``target`` returns the cuDNN version and the compute capability that the
        report is for. By default the report is on the arrays' engine, and plans are built and cached.
        """
        from .describe import report_of

        return report_of(self, explain, target)

    def _raise(self, error: Exception, step: ProgramStep) -> NoReturn:
        """Raise a step's error, with notes that describe the call."""
        attend = step.attend
        assert attend
        error.__dict__["step"] = step.name
        if self.refusal and isinstance(error, Unsupported):
            raise Unsupported(self.refusal(step.name.partition(":")[0], str(error))) from error
        if not isinstance(error, (Unsupported, CudnnError)):
            raise error
        error.add_note(f"the call: {attend.of}")
        if source_lines := attend.source_lines or self.functions.source_lines:
            lines = ", ".join(f"{mode} at {line}" for mode, line in source_lines.items())
            error.add_note(f"operations of its score and mask functions: {lines}")
        raise error


def _filled(fill: Fill, like: Any) -> Any:
    """Return an array of equal integers, on the device of another array."""
    dtype, size, value = fill
    if not cupy_runtime.is_array(like):
        return np.full(size, value, dtype)
    with cupy_runtime.on_device_of(like):
        if dtype == "int32":
            return memory.equal_integers(value, size)
        array = cupy_runtime.empty((size,), np.dtype(dtype))
        array.fill(value)
    return array


def _row_check(graph: Graph, attend: Attend, arrays: Mapping[str, Any]) -> RowCheck | None:
    """Return the check of the log-sum-exp and the output that a backward pass gets on the CPU; None for no check."""
    problem = attend.of
    if not problem.backward or problem.has_score_mod or attend.given_stats == "other":
        return None
    if not isinstance(arrays["q"], np.ndarray):  # on a GPU the check would synchronize in every tile
        return None
    whole, appended = attend.given_stats in ("whole", "appended"), 0
    if attend.given_stats == "appended":
        from ..kernels.stats_gradient import ROWS

        appended = ROWS
    return RowCheck(graph, arrays.get("sinks"), problem.settings.dropout, whole=whole, appended=appended)


def _workspace(plan: Plan) -> Any:
    """Allocate the workspace of a plan; an out-of-memory error gets a note with the size and the fix."""
    try:
        return cupy_runtime.allocate(plan.info.workspace)
    except Exception as error:  # CuPy's OutOfMemoryError, or another allocator's
        error.add_note(
            f"cuDNN's workspace for this call is {plan.info.workspace} bytes. max_workspace= limits it: cuDNN then uses an "
            "engine that needs less, if it has one"
        )
        raise


# One call of attention


def call_of_problem(call: BoundProblem) -> ReadCall:
    """Return the call of one problem. Calls of equal problems share the program."""
    full_queries = "seq_lens_q" in call.fills
    functions = call.functions._replace(arrays={})  # the cache keeps the call, but not the arrays that functions read
    program, results = _program_of(call.problem, call.bucket, call.on_gpu, full_queries, call.gradients, call.given_stats)
    return ReadCall(
        program, call.arrays, results, call.problem.tensors, call.problem, functions, functions.identities, call.scalars,
        call.fills, call.gradients,
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _program_of(
    problem: Problem,
    bucket: Rounding | None,
    on_gpu: bool,
    full_queries: bool,
    gradients: Gradients | None,
    given_stats: GivenStats,
) -> tuple[Program, dict[str, View]]:
    """Return the program of a problem, and the views of its results."""
    builder = Builder(0 if on_gpu else None)
    views = attention_steps.problem_views(problem, gradients, builder.device)
    *_, queries, _, batch = problem.sizes
    fills = {"seq_lens_q": Fill("int32", batch, queries)} if full_queries else {}
    call = BoundProblem(problem, views, {}, on_gpu, bucket, NO_FUNCTIONS, gradients, fills, given_stats)
    attention_steps.add(builder, "gradients" if problem.backward else "attention", call)
    return builder.build(), {name: views[name] for name in call.result_names}


# Calls of several steps


def is_any_array(value: Any) -> bool:
    """True if a value is an array of numpy or CuPy, or the view of one."""
    return isinstance(value, (np.ndarray, InterpretedArray, View)) or cupy_runtime.is_array(value)


#: The programs of the latest calls, by what they depend on.
_programs: dict[Hashable, Program] = {}
#: The largest number of programs.
MAX_PROGRAMS = 256


def composed(
    key: CallKey,
    arrays: dict[str, Any],
    views: dict[str, View],
    results: Mapping[str, View],
    build: Callable[[Builder], object],
    *,
    gradients: Gradients | None = None,
    refusal: Callable[[str, str], str] | None = None,
) -> ReadCall:
    """Return the call of several steps; calls with equal arguments share the program. Nothing is allocated.

    Args:
        key: the call as it was parsed.
        arrays, views: as :func:`.read_operands` returned them. The views of results that the caller did not pass are added.
        results: the views of the results in order, by which those that the caller did not pass are created. The shapes and
            dtypes of passed results are not checked: ``builder.attend`` checks its own arrays, :func:`.check_arrays` any other.
        build: adds the steps to a builder.
        gradients, refusal: see :class:`ReadCall`.

    Raises:
        ValueError: a result is read-only or overlaps another array, or on the CPU an element, such as a length, is invalid.

    Example: :func:`.operation`.
    """
    passed = [name for name in results if name in arrays]
    results = {name: views.get(name, view) for name, view in results.items()}
    views |= results
    identities = function_identities(key.options)
    kept = _programs if key.programs is None else key.programs.built
    program_key = _program_key(key, views)
    program = kept.get(program_key)
    if program is None:
        builder = Builder(views["q"].storage.device)
        build(builder)
        program = builder.build()
    # in an order that is independent of which results the caller passes
    tensors = tuple(view.spec(name) for name, view in sorted(views.items()))
    call = ReadCall(program, arrays, results, tensors, identities=identities, gradients=gradients, refusal=refusal)
    check_separate(passed, call.arrays)
    call.check_elements()
    if program_key and function_identities(key.options) == identities:  # no function changed while it was called
        keep_recent(kept, program_key, program, MAX_PROGRAMS)
    return call


def _program_key(key: CallKey, views: Mapping[str, View]) -> Hashable | None:
    """Return what a program depends on; None if an option cannot be compared."""
    options = {name: value for name, value in key.options.items() if name != "tensors"}
    arrays = {name for name, value in options.items() if is_any_array(value)}
    read = read_key(HOST, key.tag, (), {name: value for name, value in options.items() if name not in arrays})
    unread = (View.of(name, options[name]) for name in options if name in arrays and name not in views)
    return read and (read[0], *views.values(), *unread)
