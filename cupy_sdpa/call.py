"""A call: on the engine that its arrays choose, run, explained, or tuned."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from . import gpu
from .bucket import Policy, cleaned, padding, with_cleaned
from .errors import CudnnError, Unsupported
from .interpreter import evaluate
from .patterns import graph_of
from .problem import LENGTHS, Problem, TensorSpec
from .report import Report
from .support import Reason, why_not

if TYPE_CHECKING:  # cuDNN's rooms are entered only for CuPy arrays
    from .cache import Session
    from .plan import Plan
    from .tuning import Tuning

T = TypeVar("T")

#: Where :func:`cupy_sdpa.autotune` is in force: what has been tuned so far, and whether knobs are tried by hand.
tunings: ContextVar[tuple[list[Tuning], bool] | None] = ContextVar("tunings", default=None)


@dataclass
class Call:
    """A call's arguments, read: the problem they pose, the arrays by name, the numbers by name.

    ``whole`` says that nothing beyond the lengths matters: neither what the arrays hold there, nor what the results will.
    """

    problem: Problem
    arrays: dict[str, Any]
    scalars: dict[str, float]
    on_gpu: bool
    bucket: Policy | None = None
    whole: bool = False

    def run(self) -> list[Any]:
        """Compute; gives the arrays of the results."""
        if self.on_gpu:
            with gpu.on_device_of(self.arrays["q"]) as device:
                try:
                    self._compute(device)
                except (Unsupported, CudnnError) as error:
                    error.add_note(f"asked for: {self.problem}")
                    raise
        else:
            self._compute(None)
        return [self.arrays[spec.name] for spec in self.problem.results]

    def explain(self) -> Report:
        """Whether and how :meth:`run` would run."""
        asked = self.posed
        if not self.on_gpu:
            return Report("numpy", asked, graph_of(asked))
        with gpu.on_device_of(self.arrays["q"]) as device:
            return explain_here(asked, device)

    def with_gradient_inputs(self) -> Call:
        """A backward call that knows only q, k and v, with what the forward pass gives; the output serves as its gradient."""
        if not self.problem.backward:
            return self
        known = {name: self.arrays[name] for name in ("q", "k", "v", *LENGTHS) if name in self.arrays}
        p = self.problem
        forward = dataclasses.replace(p, dout=None, dq=None, dk=None, dv=None, deterministic=False)
        out, stats = Call(forward, dict(known), self.scalars, self.on_gpu, self.bucket).run()
        return dataclasses.replace(self, arrays={**known, "out": out, "stats": stats, "dout": out})

    @property
    def posed(self) -> Problem:
        """What the engine is given: what was asked, with its lengths rounded up, or with clean copies of arrays."""
        problem = self.problem
        if problem.trivial:
            return problem
        if problem.seq_lens_q:
            problem = with_cleaned(problem)
        return self.bucket(problem) if self.bucket else problem

    def _compute(self, device: int | None) -> None:
        if self.problem.trivial:
            self._fill()
        elif self.bucket:
            self._in_bucket(device)
        elif device is not None and self.problem.seq_lens_q and not self.whole:
            self._with_lengths(device)
        elif device is None:
            self._allocate()
            evaluate(graph_of(self.problem), self.arrays, self.scalars)
        else:
            if tunings.get() is not None:
                self._tune(device)
            planned(self.problem, device, lambda _, plan: self._launch(plan))

    def _in_bucket(self, device: int | None) -> None:
        """With the inputs padded by zeros, the true lengths beside them, and the results cut to their lengths."""
        posed = self.posed
        results = {spec.name for spec in posed.results}
        arrays = {spec.name: self._padded(spec, spec.name in results) for spec in posed.tensors}
        Call(posed, arrays, self.scalars, self.on_gpu, whole=not self.problem.seq_lens_q)._compute(device)
        self._allocate()
        for name in results:
            self._resize(self.arrays[name], arrays[name], name)

    def _with_lengths(self, device: int) -> None:
        """On copies with zeros beyond the lengths, where cuDNN multiplies what it finds by 0: NaN would not stay there.

        The results are cleared first: beyond the lengths nothing is computed, and cuDNN 9.19 writes nothing there.
        """
        self._allocate()
        self._clear()
        arrays = dict(self.arrays)
        for name, lengths in cleaned(self.problem).items():
            arrays[name] = gpu.cleaned(arrays[name], arrays[lengths])
        Call(self.posed, arrays, self.scalars, self.on_gpu, whole=True)._compute(device)

    def _padded(self, spec: TensorSpec, result: bool) -> Any:
        """An input as a dense array of the rounded length, zeros behind it; or an array for a result."""
        source = self.arrays.get(spec.name)
        if spec.name in LENGTHS:
            return full_lengths(spec.name, self.arrays, self.on_gpu) if source is None else source
        empty = gpu.empty if self.on_gpu else _empty
        if result:
            return empty(spec.shape, np.float32 if spec.name == "stats" else self.arrays["q"].dtype)
        assert source is not None, f"{spec.name} is no result and was not given"
        if source.shape == spec.shape and source.flags.f_contiguous and not (self.on_gpu and source.data.ptr % spec.alignment):
            return source
        array = empty(spec.shape, source.dtype)
        self._resize(array, source, spec.name)
        return array

    def _resize(self, target: Any, source: Any, name: str) -> None:
        """Copy an array into a longer one, with zeros behind it, or into a shorter one."""
        axis, _ = padding(name)
        (gpu.resize if self.on_gpu else gpu.fit)(target, source, axis)

    def _fill(self) -> None:
        """The results where there is nothing to compute: a sum over no key is 0, its logarithm -inf."""
        self._allocate()
        self._clear()

    def _clear(self) -> None:
        for spec in self.problem.results:
            self.arrays[spec.name].fill(-math.inf if spec.name == "stats" else 0)

    def _allocate(self) -> None:
        """Make the results that the caller did not give."""
        for spec in self.problem.results:
            if self.arrays.get(spec.name) is None:
                dtype = np.float32 if spec.name == "stats" else self.arrays["q"].dtype
                empty = gpu.cupy().empty if self.on_gpu else np.empty
                self.arrays[spec.name] = empty(spec.shape, dtype, order="F")

    def _launch(self, plan: Plan) -> None:
        self._allocate()
        if gpu.capturing():
            plan.keep()
        workspace = gpu.allocate(plan.info.workspace)
        self._execute(plan, workspace.ptr)

    def _execute(self, plan: Plan, workspace: int) -> None:
        plan.execute({name: array.data.ptr for name, array in self.arrays.items()}, self.scalars, workspace)

    def _tune(self, device: int) -> None:
        """Measure every engine config on these arrays, unless that has been done, and keep the fastest."""
        from .tuning import tune

        in_force = tunings.get()
        assert in_force is not None
        done, knobs = in_force
        if gpu.capturing():
            raise RuntimeError("a stream is being captured: nothing can be measured now; tune before the capture begins")
        self._allocate()
        results = [self.arrays[spec.name] for spec in self.problem.results]

        def measure(here: Session, plan: Plan) -> None:
            if not plan.info.tuned:
                done.append(tune(self.problem, plan, here.cache, self._execute, results, knobs=knobs))

        planned(self.problem, device, measure)


def full_lengths(name: str, arrays: Mapping[str, Any], on_gpu: bool) -> Any:
    """The array of lengths in which every batch entry has all that the arrays have."""
    *_, length, batch = arrays["q" if name == "seq_lens_q" else "k"].shape
    if not on_gpu:
        return np.full(batch, length, np.int32)
    lengths = gpu.empty((batch,), np.int32)
    gpu.fill_int32(lengths, length)
    return lengths


def _empty(shape: tuple[int, ...], dtype: Any) -> Any:
    return np.empty(shape, dtype, order="F")


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
    return Report("cuDNN", problem, info.graph, info)


def refused(problem: Problem, reasons: Sequence[Reason], note: str = "") -> Report:
    """The report of a problem that the support table refuses."""
    texts = tuple(map(str, reasons))
    return Report("cuDNN", problem, graph_of(problem), reasons=texts, note=note, error=reasons[0].error)


def objections(problem: Problem, device: int) -> list[Reason]:
    """What the support table has against a problem on a device, with the cuDNN that is loaded."""
    from ._cudnn.library import library

    return why_not(problem, library().version, gpu.capability(device))


def planned(problem: Problem, device: int, run: Callable[[Session, Plan], T]) -> T:
    """Run with a problem's plan, which is looked up or, after the support table has been asked, built.

    Raises:
        Unsupported: there is no plan.
        RuntimeError: there is none yet, and the stream is being captured.
    """
    from .cache import has_session, session

    context = gpu.context_id()
    if not has_session(context):
        _not_while_capturing(problem)
    here = session(context)

    def build() -> Plan:
        from .plan import Target, plan_for

        if reasons := objections(problem, device):
            raise reasons[0].error("\n".join(map(str, reasons)))
        _not_while_capturing(problem)
        memory = gpu.free_memory() if problem.deterministic else None
        return plan_for(problem, Target(gpu.model(device), gpu.capability(device), here.handle, memory=memory))

    def run_on_stream(plan: Plan) -> T:
        here.handle.set_stream(gpu.stream())
        return run(here, plan)

    return here.cache.use(problem, build, run_on_stream)


def _not_while_capturing(problem: Problem) -> None:
    if gpu.capturing():
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
