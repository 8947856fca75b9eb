"""Also run each step of the calls in a block on numpy, and compare the results.

The inputs of a step are copied from the GPU. Attention is compared with the float64 result of its graph: the error may be twice
that of the naive computation in the same precision, plus rounding errors. Other steps are compared with their numpy functions,
except the one that splits keys. Dropout draws other numbers on a GPU, so the results of such launches are not compared.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MethodType, NoneType
from typing import Any, TypeVar

import numpy as np
import pytest

from cupy_sdpa.check.comparison import APPROXIMATE, DEVIATIONS, FP8_SUM, SINGLE, compare, spacing
from cupy_sdpa.core.graph import graph_of
from cupy_sdpa.core.kernels import merge, paged, ragged
from cupy_sdpa.core.numpy_engine.interpreter import evaluate
from cupy_sdpa.core.problem.arrays import CU_SEQLENS, KEY_ARRAYS, LENGTHS, QUERY_ARRAYS, ROW_STATS
from cupy_sdpa.core.problem.problem import Problem
from cupy_sdpa.core.problem.tensor_spec import FP8_LARGEST, numpy_dtype
from cupy_sdpa.core.problem.view import View
from cupy_sdpa.core.programs import calls
from cupy_sdpa.core.programs.executor import ReadCall
from cupy_sdpa.core.programs.steps import ProgramStep, Scalar
from cupy_sdpa.core.replay.bound_program import HostProgram
from cupy_sdpa.core.replay.replay_cache import DeviceProgram
from cupy_sdpa.core.runtime import cupy_runtime
from cupy_sdpa.core.runtime.interpreted_array import InterpretedArray
from cupy_sdpa.fp8 import fp8_kernels, mean_kernels

T = TypeVar("T")

#: A kernel that is not compared: on numpy keys are not split.
_NOT_COMPARED = (paged.split,)
#: The position of an argument that only the launches of a kernel use. It is not compared: the numpy function does not write it.
_SCRATCH = {fp8_kernels.quantize_arrays: 1, mean_kernels.write_mean: 3}
#: Functions of scores that a GPU approximates.
_APPROXIMATE = frozenset({"tanh_fwd", "exp", "log", "pow", "sin", "cos", "tan", "erf"})
#: Kernels that add the elements of their first argument.
_SUMS = (ragged.sum_over_scores,)


@contextlib.contextmanager
def validated_steps() -> Iterator[None]:
    """Compare each step of the calls in the block with numpy. Calls are parsed again and run step by step, without CUDA graphs.

    Calls of other threads that start in the block are compared unless they are repeated. Those on a stream that is being
    captured are not compared.
    """
    own = ReadCall._run_step

    def run(call: ReadCall, step: ProgramStep, arguments: Any, device: int | None, *others: Any) -> Any:
        def work() -> Any:
            return own(call, step, arguments, device, *others)

        return work() if device is not None and cupy_runtime.capturing() else compared(call, step, arguments, work)

    with pytest.MonkeyPatch.context() as patch:
        nothing = lambda *arguments: None  # noqa: E731 - a repeated call is parsed
        replaced = ((HostProgram, "run", nothing), (DeviceProgram, "run", nothing), (calls, "cache_call", nothing))
        for owner, name, function in (*replaced, (ReadCall, "_run_step", run)):
            patch.setattr(owner, name, function)
        yield


def compared(call: ReadCall, step: ProgramStep, arguments: Any, work: Callable[[], T]) -> T:
    """Run a step by ``work``, and compare what it wrote; ``arguments`` has arrays and numbers instead of views and scalars.

    Raises:
        AssertionError: a result differs from numpy's.
    """
    on_gpu, attend = call.on_gpu, step.attend
    pairs = list(_pairs(attend.arrays if attend else step.arguments, arguments))
    copies = _HostCopies(pairs)
    result = work()
    if attend:
        scalars = {**call.scalars, **attend.scalars}
        problems = _differences_of_attention(attend.problem, copies.of(arguments), arguments, scalars)
    elif step.function in _NOT_COMPARED or isinstance(step.function, MethodType | NoneType):
        return result  # a method of an object, such as an exchange between members, is not repeated
    elif step.function is merge.merge_parts and on_gpu and len(arguments) > 5 and arguments[5] is not None:
        return result  # FP8: on numpy keys are not split
    else:
        problems = _differences_of_kernel(step, arguments, pairs, copies)
    for text in problems:
        assert not text, f"step {step.name!r} differs from its result on numpy with the same inputs: {text}"
    return result


def _differences_of_kernel(
    step: ProgramStep, arguments: Any, pairs: "Sequence[tuple[View, Any]]", copies: "_HostCopies"
) -> Iterator[str]:
    """How what a kernel wrote differs from what its numpy function writes."""
    scratch = arguments[_SCRATCH[step.function]] if step.function in _SCRATCH else None
    written = {view: array for view, array in pairs if view in step.writes and array is not scratch}
    own = copies.of(arguments)
    assert step.function
    step.function(*own)
    largest = 0.0
    if step.function in _SUMS:  # whose terms may be larger than the sum
        largest = float(np.abs(own[0].astype(np.float32)).sum(axis=(0, 1)).max(initial=0))
    for view, array in written.items():
        yield _difference(view.storage.name, _on_host(array), copies.of(array), largest)


def _pairs(views: Any, bound: Any) -> Iterator[tuple[View, Any]]:
    """The views in an argument with their arrays."""
    if isinstance(views, View):
        yield views, bound
    elif isinstance(views, Mapping):
        for name, view in views.items():
            yield view, bound[name]
    elif isinstance(views, (tuple, list)) and not isinstance(views, Scalar):
        for one, other in zip(views, bound, strict=True):
            yield from _pairs(one, other)


def _on_host(array: Any) -> Any:
    """A copy of an array in memory of the host, in the same order."""
    if isinstance(array, InterpretedArray):
        array = array.array
    if not cupy_runtime.is_array(array):
        return array.copy("K")
    return array.get(order="F" if array.flags.f_contiguous else "C")


class _HostCopies:
    """Copies of the arrays of a step from before it runs."""

    def __init__(self, pairs: Sequence[tuple[View, Any]]) -> None:
        # the arrays are kept: no other array has their ids
        self._copies = {id(array): (array, _on_host(array)) for _, array in pairs}

    def of(self, value: Any) -> Any:
        """An argument with the copies instead of the arrays."""
        if id(value) in self._copies:
            return self._copies[id(value)][1]
        if isinstance(value, dict):
            return {name: self.of(x) for name, x in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self.of, value))
        return type(value)(map(self.of, value)) if isinstance(value, (tuple, list)) else value


def _difference(name: str, actual: Any, expected: Any, largest: float) -> str:
    """How a kernel's result differs from its numpy function's; empty if only by rounding.

    ``largest`` is the largest sum of magnitudes, if it is a sum.
    """
    if actual.dtype.kind in "biu":
        wrong = actual != expected
        if not wrong.any():
            return ""
        at = tuple(int(n) for n in np.argwhere(wrong)[0])
        return f"{int(wrong.sum())} of {wrong.size} elements of {name} differ; element {at} is {actual[at]}, not {expected[at]}"
    unit = spacing(np.asarray(expected).dtype)
    with np.errstate(invalid="ignore"):  # a signaling NaN in memory that nothing wrote
        actual, expected = actual.astype(np.float64), np.asarray(expected).astype(np.float64)
    actual = np.where(np.isnan(actual) & np.isnan(expected), 0, actual)  # memory that nothing wrote
    expected = np.where(np.isnan(expected) & (actual == 0), 0, expected)
    floor = DEVIATIONS * max(unit, SINGLE) * max(_largest(expected), largest)
    return compare(name, actual, expected, expected, floor)


def _differences_of_attention(
    problem: Problem, before: Mapping[str, Any], after: Mapping[str, Any], scalars: Mapping[str, float]
) -> Iterator[str]:
    """How the results of attention differ from the interpreter's, given copies of the arrays from before it ran."""
    on_gpu = any(map(cupy_runtime.is_array, after.values()))
    if problem.trivial or (on_gpu and problem.settings.dropout and "dropout_mask" not in after):
        return
    dtypes = {spec.name: numpy_dtype(spec.dtype) for spec in problem.tensors}
    arrays = {name: x.view(dtypes[name]) if name in dtypes else x for name, x in before.items()}
    names = [spec.name for spec in problem.results if spec.name in after]
    naive = arrays | {name: arrays[name].copy("K") for name in names}
    graph = graph_of(problem)
    approximate = APPROXIMATE * (on_gpu and any(getattr(node, "mode", "") in _APPROXIMATE for node in graph.nodes))
    with np.errstate(all="ignore"):  # memory that nothing wrote may contain NaN
        exact = arrays | {name: arrays[name].astype(np.float64, order="K") for name in names}
        evaluate(graph, naive, scalars)
        evaluate(graph, exact, scalars, exact=True)
    for name in names:
        actual = _on_host(after[name]).view(dtypes[name])
        part = _written(problem, name, arrays, actual)
        with np.errstate(all="ignore"):
            got, truth, close = (np.asarray(x[part], np.float64) for x in (actual, exact[name], naive[name]))
        unwritten = np.isnan(got) & np.isnan(truth)
        got, truth, close = (np.where(unwritten, 0, x) for x in (got, truth, close))
        yield compare(name, got, truth, close, _floor(problem, name, arrays, scalars, _largest(truth), approximate))


def _written(problem: Problem, name: str, arrays: Mapping[str, Any], result: Any) -> Any:
    """The elements of a result that are compared: those before the lengths of sequences with queries and keys."""
    side = next((n for n, of in enumerate((QUERY_ARRAYS, KEY_ARRAYS)) if name in of), 0 if name in ROW_STATS else None)
    given = [_range_of(problem, n, arrays) for n in (0, 1)]
    if side is None or given == [None, None]:
        return ...
    axis = 0 if name in ROW_STATS and not problem.packed else 1 if name in ROW_STATS else 2
    total, batch = result.shape[axis], problem.sizes[-1]
    begin, end = given[side] or (np.zeros(batch, int), np.full(batch, total))
    empty = np.zeros(batch, bool)
    for found in given:
        if found is not None:
            empty |= found[0] >= found[1]
    positions = np.arange(total)[:, None]
    inside = (begin <= positions) & (positions < end) & ~empty  # positions, batch
    if problem.packed and not (problem.paged and side):
        return np.broadcast_to(inside.any(axis=1), np.moveaxis(result, axis, -1).shape) if axis == result.ndim - 1 else ...
    shape = [1] * result.ndim
    shape[axis], shape[-1] = total, batch
    return np.broadcast_to(inside.reshape(shape), result.shape)


def _range_of(problem: Problem, side: int, arrays: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """The first position of each sequence and the one after the last, of the queries (0) or keys (1); None without lengths."""
    lengths, starts = arrays.get(LENGTHS[side]), arrays.get(CU_SEQLENS[side])
    if problem.packed and starts is not None:
        return starts[:-1], starts[1:]
    return None if lengths is None else (np.zeros_like(lengths), lengths)


def _floor(
    problem: Problem, name: str, arrays: Mapping[str, Any], scalars: Mapping[str, float], largest: float, approximate: float
) -> float:
    """The error that rounding may cause in addition to the naive computation's, which may be small by chance.

    ``largest`` is the largest magnitude of the result, and ``approximate`` the relative error of scores from approximate
    functions.
    """
    unit = 2.0**-2 if problem.q.dtype in FP8_LARGEST else spacing(numpy_dtype(problem.q.dtype))
    norms = {key: _norm(arrays[key]) * _descale(arrays, key) for key in ("q", "k", "v", "dout") if key in arrays}
    scores = abs(scalars.get("scale", 1.0)) * norms["q"] * norms["k"]
    if name in ROW_STATS:
        of_sums = FP8_SUM * scores if problem.q.dtype in FP8_LARGEST else 0.0
        return 8 * SINGLE * (scores + 1) * max(largest, 1.0) + of_sums + approximate * scores
    products = norms.get("dout", 0.0) * norms["v"]
    terms = {"out": norms["v"], "dq": products * norms["k"], "dk": products * norms["q"], "dv": norms.get("dout", 0.0)}
    return unit * (DEVIATIONS * largest + terms.get(name, products) * (1 + SINGLE * scores))


def _descale(arrays: Mapping[str, Any], name: str) -> float:
    """The factor of an FP8 array; 1 for others."""
    found = arrays.get(f"descale_{name}")
    return 1.0 if found is None else float(np.abs(found).max(initial=0.0))


def _norm(array: Any) -> float:
    """The largest Euclidean norm along head_dim of the finite elements."""
    x = np.asarray(array, np.float64)
    return float(np.sqrt(np.square(np.where(np.isfinite(x), x, 0)).sum(axis=0)).max(initial=0.0))


def _largest(array: Any) -> float:
    """The largest finite magnitude."""
    return float(np.abs(np.where(np.isfinite(array), array, 0)).max(initial=0.0))
