"""A call's arguments, read and checked, and the engine that its arrays choose."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from . import gpu
from .errors import CudnnError, Unsupported
from .interpreter import evaluate
from .patterns import graph_of
from .problem import Problem, Signature, gradient_problem, problem
from .report import Report
from .support import Reason, why_not

if TYPE_CHECKING:  # cuDNN's rooms are entered only for CuPy arrays
    from .plan import Plan

T = TypeVar("T")


@dataclass
class Call:
    """A call's arguments, read: the problem they pose, the arrays by name, the numbers by name."""

    problem: Problem
    arrays: dict[str, Any]
    scalars: dict[str, float]
    on_gpu: bool

    def run(self) -> list[Any]:
        """Compute; gives the arrays of the results."""
        if self.on_gpu:
            with gpu.on_device_of(self.arrays["q"]) as device:
                if self.problem.trivial:
                    self._fill()
                else:
                    try:
                        self._planned(device, self._launch)
                    except (Unsupported, CudnnError) as error:
                        error.add_note(f"asked for: {self.problem}")
                        raise
        elif self.problem.trivial:
            self._fill()
        else:
            self._allocate()
            evaluate(graph_of(self.problem), self.arrays, self.scalars)
        return [self.arrays[spec.name] for spec in self.problem.results]

    def explain(self) -> Report:
        """Whether and how :meth:`run` would run."""
        graph = graph_of(self.problem)
        if not self.on_gpu:
            return Report("numpy", self.problem, graph)
        if self.problem.trivial:
            return Report("cuDNN", self.problem, graph)
        with gpu.on_device_of(self.arrays["q"]) as device:
            if reasons := self._objections(device):
                return Report("cuDNN", self.problem, graph, reasons=tuple(reason.text for reason in reasons))
            try:
                plan = self._planned(device, lambda plan: plan.info)
            except Unsupported as error:
                return Report("cuDNN", self.problem, graph, reasons=tuple(str(error).splitlines()))
        return Report("cuDNN", self.problem, plan.graph, plan)

    def _fill(self) -> None:
        """The results where there is nothing to compute: a sum over no key is 0, its logarithm -inf."""
        self._allocate()
        for spec in self.problem.results:
            self.arrays[spec.name][...] = -math.inf if spec.name == "stats" else 0

    def _allocate(self) -> None:
        """Make the results that the caller did not give."""
        for spec in self.problem.results:
            if self.arrays.get(spec.name) is None:
                dtype = np.float32 if spec.name == "stats" else self.arrays["q"].dtype
                empty = gpu.cupy().empty if self.on_gpu else np.empty
                self.arrays[spec.name] = empty(spec.shape, dtype, order="F")

    def _objections(self, device: int) -> list[Reason]:
        """What the support table has against the problem on this device, with the cuDNN that is loaded."""
        from ._cudnn.library import library

        return why_not(self.problem, library().version, gpu.capability(device))

    def _planned(self, device: int, run: Callable[[Plan], T]) -> T:
        """Run with the problem's plan, which is looked up or, after the support table has been asked, built."""
        from .cache import session

        here = session(gpu.context_id())

        def build() -> Plan:
            from .plan import plan_for

            if reasons := self._objections(device):
                raise reasons[0].error("\n".join(reason.text for reason in reasons))
            return plan_for(self.problem, here.handle, capability=gpu.capability(device), memory=gpu.free_memory())

        def run_on_stream(plan: Plan) -> T:
            here.handle.set_stream(gpu.stream())
            return run(plan)

        return here.cache.use(self.problem, build, run_on_stream)

    def _launch(self, plan: Plan) -> None:
        self._allocate()
        workspace = gpu.allocate(plan.info.workspace)
        plan.execute({name: array.data.ptr for name, array in self.arrays.items()}, self.scalars, workspace.ptr)


def read_forward(
    q: Any, k: Any, v: Any, *, scale: Any, causal: Any, return_stats: bool, max_workspace: Any, out: Any, stats: Any
) -> Call:
    """Check a forward call's arguments; the first thing wrong is raised, before anything is allocated."""
    arrays = _given(q=q, k=k, v=v, out=out, stats=stats)
    on_gpu = _engine(arrays)
    tau = _scale(scale, q)
    asked = problem(
        *(_signature(arrays.get(name)) for name in ("q", "k", "v", "out", "stats")),
        bool(return_stats), _causal(causal), tau >= _SMALLEST_SCALE, _workspace(max_workspace),
    )  # fmt: skip
    _check_overlap(asked, arrays)
    return Call(asked, arrays, {"scale": tau}, on_gpu)


def read_backward(
    q: Any, k: Any, v: Any, *, scale: Any, causal: Any, deterministic: bool, max_workspace: Any, **others: Any
) -> Call:
    """Check a backward call's arguments; the first thing wrong is raised, before anything is allocated.

    Args:
        others: dout, out, stats, dq, dk and dv; what is None is taken to be dense.
    """
    arrays = _given(q, k, v, **others)
    on_gpu = _engine(arrays)
    tau = _scale(scale, q)
    asked = gradient_problem(
        *(_signature(arrays.get(name)) for name in ("q", "k", "v", "dout", "out", "stats", "dq", "dk", "dv")),
        _causal(causal), tau >= _SMALLEST_SCALE, bool(deterministic), _workspace(max_workspace),
    )  # fmt: skip
    _check_overlap(asked, arrays)
    return Call(asked, arrays, {"scale": tau}, on_gpu)


def _given(q: Any, k: Any, v: Any, **others: Any) -> dict[str, Any]:
    """The arrays by name; those that may be left out and are None are left out."""
    return {"q": q, "k": k, "v": v} | {name: array for name, array in others.items() if array is not None}


def _causal(causal: Any) -> bool:
    if causal not in (False, True, "top_left"):
        raise ValueError(f"causal is {causal!r}; it must be False, True or 'top_left'")
    return bool(causal)


def _workspace(limit: Any) -> int | None:
    if limit is None:
        return None
    if not isinstance(limit, numbers.Integral) or limit < 0:
        raise ValueError(f"max_workspace is {limit!r}; it must be a number of bytes, 0 or more, or None for no limit")
    return int(limit)


def _check_overlap(asked: Problem, arrays: Mapping[str, Any]) -> None:
    for spec in asked.results:
        if spec.name in arrays:
            for other in arrays:
                if other != spec.name and _overlap(asked, arrays, spec.name, other):
                    raise ValueError(
                        f"{spec.name} overlaps {other} in memory: results would overwrite it; pass an array of its own"
                    )


def _engine(arrays: Mapping[str, Any]) -> bool:
    """True where the arrays are CuPy's, on one device; False where they are numpy's."""
    kinds = {}
    for name, array in arrays.items():
        if gpu.is_array(array):
            kinds[name] = "CuPy"
        elif type(array) in (np.ndarray, np.memmap):  # a subclass, such as a masked array, may mean more than its numbers
            kinds[name] = "numpy"
        else:
            raise TypeError(
                f"{name} is a {type(array).__module__}.{type(array).__qualname__}; attention takes numpy and CuPy arrays: "
                "convert with numpy.asarray, cupy.asarray or cupy.from_dlpack"
            )
    if len(set(kinds.values())) > 1:
        listed = ", ".join(f"{name} is a {kind} array" for name, kind in kinds.items())
        raise TypeError(f"arrays are mixed: {listed}. Move them to one side with cupy.asarray(...) or cupy.asnumpy(...)")
    if kinds["q"] == "numpy":
        return False
    devices = {name: array.data.device_id for name, array in arrays.items()}
    if len(set(devices.values())) > 1:
        listed = ", ".join(f"{name} on device {device}" for name, device in devices.items())
        raise ValueError(
            f"arrays are on different devices: {listed}. Copy them to one: with cupy.cuda.Device(...): cupy.asarray(...)"
        )
    return True


def _signature(array: Any) -> Any:
    """The array's :data:`Signature`, None of None."""
    if array is None:
        return None
    address = array.data.ptr if gpu.is_array(array) else 16  # the interpreter reads any alignment
    signature: Signature = (array.dtype.name, array.shape, array.strides, address & -address & 15 or 16)
    return signature


#: cuDNN gets the scale as float32: these are the least positive and the largest that it can hold without loss of range.
_SMALLEST_SCALE, _LARGEST_SCALE = (float(x) for x in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))


def _scale(scale: Any, q: Any) -> float:
    default = 1 / math.sqrt((q.shape[0] if q.ndim else 0) or 1)
    if scale is None:
        return default
    if not isinstance(scale, numbers.Real):
        raise TypeError(f"scale is a {type(scale).__name__}; it must be a number: float(...) makes one of an array")
    value = float(scale)
    if not abs(value) <= _LARGEST_SCALE:  # true of NaN too
        raise ValueError(f"scale is {value}; it must be finite in float32. None stands for 1/sqrt(head_dim) = {default:.6g}")
    return value


def _overlap(asked: Problem, arrays: Mapping[str, Any], one: str, other: str) -> bool:
    """Whether two arrays share an element; decided on addresses alone, no element is read."""
    a, b = arrays[one], arrays[other]
    if gpu.is_array(a):
        (a_from, a_to), (b_from, b_to) = asked.extents[one], asked.extents[other]
        apart = b.data.ptr - a.data.ptr
        if a_to <= apart + b_from or apart + b_to <= a_from:
            return False
        a, b = np.asarray(_Standin(a)), np.asarray(_Standin(b))
    return bool(np.shares_memory(a, b))


class _Standin:
    """What numpy needs to know of an array on a GPU to compare addresses; a numpy array made from it must not be read."""

    def __init__(self, array: Any) -> None:
        self.__array_interface__ = {
            "data": (array.data.ptr, False),
            "shape": array.shape,
            "strides": array.strides,
            "typestr": f"|V{array.dtype.itemsize}",
            "version": 3,
        }
