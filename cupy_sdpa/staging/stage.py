"""Arrays of a call that the caller does not pass: results, filled inputs, and copies in the form that the engine needs.

:mod:`cupy_sdpa.support.engine_problem` computes from a problem alone which form the engine needs; a :class:`Stage` makes the
copies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..device import cupy_runtime, kernels, memory
from ..device.paging import paged
from ..problem.bucket import padded_axes
from ..problem.problem import (
    CU_SEQLENS,
    KEY_ARRAYS,
    LENGTHS,
    MASKED_SCORE,
    QUERY_ARRAYS,
    ROW_STATS,
    Problem,
    has_ragged_alibi,
    has_score_axes,
)
from ..problem.tensor_spec import TensorSpec, dtype_name, storage_dtype
from ..problem.varlen import ragged_offsets
from ..support.padding import masked_inputs
from ..support.why_not import disabled_names, staging_guards

#: The row statistics that are -inf where there is nothing to compute; all other results are 0.
_LOGARITHMS = ("stats", "max")


class Fill(NamedTuple):
    """A one-dimensional array of equal integers."""

    dtype: str
    size: int
    value: int


def _may_mask_rows(problem: Problem) -> bool:
    """Whether the backward pass may have rows that are masked by a bias, a score function, or as padding with sinks."""
    return problem.backward and (problem.bias is not None or problem.dsinks is not None or problem.has_score_mod)


def _writes_empty_sequences(problem: Problem) -> bool:
    """Whether cuDNN writes 0, and -inf as the log-sum-exp, for sequences without keys, so that nothing needs to be cleared.

    Its kernel for a single query with paged keys does (measured with 9.19 and 9.28), other kernels write nothing. Options that
    select another kernel, or that the measurement did not cover, are excluded.
    """
    *_, sq, _, _ = problem.sizes
    excluded = problem.packed or problem.band or problem.changes_scores or problem.settings.dropout or problem.max
    return problem.paged and sq == 1 and not excluded


# Arrays: every allocation of a call


def create_inputs(fills: Mapping[str, Fill], like: Any, on_gpu: bool) -> dict[str, Any]:
    """Arrays of equal integers, on the device of another array."""
    return {name: _filled(fill, like, on_gpu) for name, fill in fills.items()}


def _filled(fill: Fill, like: Any, on_gpu: bool) -> Any:
    dtype, size, value = fill
    if not on_gpu:
        return np.full(size, value, dtype)
    with cupy_runtime.on_device_of(like):
        if dtype == "int32":
            return memory.equal_integers(value, size)
        array = cupy_runtime.empty((size,), np.dtype(dtype))
        array.fill(value)
    return array


def allocate_results(problem: Problem, arrays: dict[str, Any], *, discarded: bool = False) -> None:
    """Add the results that the caller did not pass to ``arrays``.

    Args:
        problem, arrays: of the call.
        discarded: whether no result is returned, so that all of them are temporary. Default False: those for the gradients of
            captured arrays.
    """
    on_gpu = cupy_runtime.is_array(arrays["q"])
    for spec in problem.results:
        if arrays.get(spec.name) is None:
            make = cupy_runtime.temporary if discarded or spec in problem.dcaptured else cupy_runtime.new_result
            arrays[spec.name] = make(arrays["q"], spec.shape, storage_dtype(spec.dtype, on_gpu))


def fill_value(name: str) -> float:
    """The value of a result where there is nothing to compute: -inf for stats and max, otherwise 0."""
    return -math.inf if name in _LOGARITHMS else 0.0


def fill_trivial_results(problem: Problem, arrays: Mapping[str, Any], on_gpu: bool) -> None:
    """Fill the results of a problem without queries, keys or values; the log-sum-exp of a row with a sink is the sink."""
    for spec in problem.results:
        memory.clear(arrays[spec.name], fill_value(spec.name))
    if problem.sinks and not problem.backward:
        rows = {spec.name: arrays[spec.name] for spec in problem.results if spec.name in ROW_STATS}
        dense = cupy_runtime.temporary_copy(arrays["sinks"]) if on_gpu else arrays["sinks"]
        of_sinks = dict.fromkeys(rows, dense)
        if "sum_exp" in rows:
            of_sinks["sum_exp"] = _filled(Fill("float32", problem.sinks.shape[0], 1), arrays["q"], on_gpu)
        if on_gpu and problem.ragged:
            _fill_rows_on_gpu(problem, arrays, rows, of_sinks)
        else:  # on the GPU an assignment of arrays of one dtype creates no other array
            for name, array in rows.items():
                value = of_sinks[name][:, None]
                array[...] = np.where(_rows_in_sequences(problem, arrays), value, fill_value(name)) if problem.ragged else value


def _rows_in_sequences(problem: Problem, arrays: Mapping[str, Any]) -> Any:
    """Which rows are not padding, on the CPU; broadcasts to the axes of the log-sum-exp."""
    if problem.packed:
        rows, starts = np.arange(problem.q.shape[2]), arrays[CU_SEQLENS[0]]
        start = np.take(starts, np.maximum(np.searchsorted(starts, rows, side="right") - 1, 0))  # of the row's sequence
        *_, longest, _, _ = problem.sizes  # rows of a sequence after max_seqlen_q count as padding
        return (start <= rows) & (rows < starts[-1]) & (rows < start + longest)
    return np.arange(problem.q.shape[2])[:, None, None] < arrays[LENGTHS[0]]


def _fill_rows_on_gpu(
    problem: Problem, arrays: Mapping[str, Any], rows: Mapping[str, Any], of_sinks: Mapping[str, Any]
) -> None:
    """Write the values of the sinks to the rows that are not padding, in one launch."""
    *_, longest, _, batch = problem.sizes
    if not batch:
        return
    starts_or_lengths = arrays[(CU_SEQLENS if problem.packed else LENGTHS)[0]]
    queries = kernels.Lengths(starts_or_lengths, longest, problem.q.shape[2], problem.packed)
    results = [kernels.ClearedResult(array, False, True, fill_value(name), of_sinks[name]) for name, array in rows.items()]
    kernels.prepare_sequences(queries, queries._replace(max_length=0), None, results)


def is_plain(problem: Problem, engine_problem: Problem) -> bool:
    """Whether the CPU engine's arrays are the caller's, and nothing runs besides the engine."""
    return engine_problem == problem and not problem.ragged and not _may_mask_rows(problem) and problem.max is None


class Stage:
    """The arrays of one call in the form that the engine needs.

    Args:
        problem: the caller's problem.
        engine_problem: the problem that the engine runs, see :func:`~cupy_sdpa.support.engine_problem.engine_problem`.
        arrays: the caller's arrays and all results, by name.
        on_gpu: whether the arrays are CuPy's.
        full_queries: whether no query is padding, although there are lengths. Default False.

    Attributes:
        arrays: the engine's arrays, by name.
        unchanged: whether the engine's arrays are the caller's, and nothing runs besides the engine.
    """

    def __init__(
        self,
        problem: Problem,
        engine_problem: Problem,
        arrays: Mapping[str, Any],
        on_gpu: bool,
        *,
        full_queries: bool = False,
    ) -> None:
        self._problem, self._engine_problem, self._on_gpu = problem, engine_problem, on_gpu
        self._originals = arrays
        self.arrays: dict[str, Any] = dict(arrays)
        self._results = {spec.name for spec in problem.results}
        clears = problem.ragged and not (on_gpu and full_queries and _writes_empty_sequences(problem))
        # Kernels for a single query write rows of the padding, so it is cleared after the kernel.
        self._clears_last = clears and on_gpu and problem.seq_lens_q is not None and "one-query-lengths" not in disabled_names()
        self._clears_first = clears and not self._clears_last
        same = (engine_problem is problem or engine_problem == problem) and not clears and not _may_mask_rows(problem)
        self.unchanged = same and problem.max is None
        if not same:
            self._make_copies()

    def _make_copies(self) -> None:
        for spec in self._engine_problem.tensors:
            self.arrays[spec.name] = self._engine_array(spec)
        for spec in self._problem.ds_reductions:
            memory.clear(self.arrays[spec.name], 0.0)  # the engine accumulates into it
        if self._clears_first:
            self._clear_padding()
        if has_ragged_alibi(self._engine_problem):
            *_, sq, skv, _ = self._engine_problem.sizes
            self.arrays["diagonal"] = _diagonal(sq, skv, *(self.arrays[name] for name in LENGTHS), on_gpu=self._on_gpu)

    def finish(self) -> None:
        """Clear padding rows, combine the row statistics, and copy results to the caller's arrays."""
        if self._clears_last:
            self._clear_padding()
        if self._problem.max:
            rows = [self.arrays[name] for name in ("max", "sum_exp", "stats")]
            (kernels.log_sum_exp if self._on_gpu else _log_sum_exp)(*rows)
        for spec in self._problem.results:
            target, source = self._originals[spec.name], self.arrays[spec.name]
            if target is source:
                continue
            if spec in self._problem.ds_reductions:
                self._sum_into(target, source)
            else:
                self._resize(target, source, spec.name)

    def _clear_padding(self) -> None:
        """Clear the padding rows of the results; for packed sequences also compute lengths and offsets."""
        rows = [(spec.name, self.arrays[spec.name]) for spec in self._problem.results if spec.name in QUERY_ARRAYS + KEY_ARRAYS]
        clear = _clear_padding_on_gpu if self._on_gpu else _clear_padding_on_cpu
        lengths = {name: self._originals[name] for name in LENGTHS if name in self._originals}
        self.arrays |= clear(self._problem, self._engine_problem, {**self.arrays, **lengths}, rows)

    def _engine_array(self, spec: TensorSpec) -> Any:
        """The array that the engine uses for a tensor: the caller's, or a new one."""
        array = self._originals.get(spec.name)
        one_key = self._on_gpu and "one-key" in staging_guards(self._problem)
        if spec.name == "page_table" and self._on_gpu and (self._engine_problem.sizes[4] > 1 or one_key):
            return paged.padded_table(array, self._originals["seq_lens_kv"], self._problem.k.shape[2], spec.shape[0])
        if array is None:  # the lengths of a bucket
            like = self._originals["q" if spec.name == "seq_lens_q" else "k"]
            return _filled(Fill("int32", like.shape[3], like.shape[2]), like, self._on_gpu)
        if spec.name == "seq_lens_kv" and one_key:
            lengths = self._empty(spec)
            cupy_runtime.cupy().maximum(array, 1, out=lengths)
            return lengths
        if spec.name in self._results:
            if self._is_packed_copy(spec):
                return cupy_runtime.empty(array.shape, array.dtype)
            same = array.shape == spec.shape and array.dtype == storage_dtype(spec.dtype, self._on_gpu)
            return array if same or (self._problem.packed and not has_score_axes(spec.name)) else self._empty(spec)
        return self._in_layout(self._masked(array, spec.name), spec)

    def _masked(self, array: Any, name: str) -> Any:
        """An input in which values of the padding and of fully masked rows that would make a result NaN are replaced."""
        if name == "stats" and _may_mask_rows(self._problem):
            # exp(S - L) and exp(sink - L) of a row are 0 if L is +inf
            return kernels.backward_stats(array) if self._on_gpu else _masked_stats(array)
        lengths = None if self._engine_problem.settings.padded else masked_inputs(self._problem).get(name)
        if lengths and self._on_gpu:
            return kernels.zero_padded(array, self._originals[lengths])
        if lengths and name == "dout":  # whole rows of this input are summed; the interpreter masks the other inputs itself
            return _zero_padding(array, self._originals[lengths])
        return array

    def _in_layout(self, array: Any, spec: TensorSpec) -> Any:
        """An input in the dtype, shape and layout that the engine needs."""
        name = spec.name
        # in a bucket, a bias of one key becomes one of several keys, which the bug does not affect: spec keeps its dtype
        affected = name == "bias" and self._on_gpu and "finite-bias" in staging_guards(self._problem)
        finite_bias = affected and spec.dtype == "float32"
        if has_score_axes(name) and (finite_bias or self._needs_broadcast(array, spec)):
            array = self._broadcast(array, spec)
            if finite_bias:
                kernels.replace_infinite(array)
        elif self._is_packed_copy(spec):
            array = cupy_runtime.temporary_copy(array)
        elif not self._problem.packed and not _has_layout(array, spec):
            copy = self._empty(spec)
            self._resize(copy, array, name)
            array = copy
        return array

    def _is_packed_copy(self, spec: TensorSpec) -> bool:
        """Whether a packed array is not dense or not aligned, and the engine needs one that is."""
        original = getattr(self._problem, spec.name, None)  # captured arrays and their gradients are no fields
        if not self._problem.packed or original is None or not spec.dense:
            return False
        return not original.dense or bool(original.alignment < spec.alignment)

    def _needs_broadcast(self, array: Any, spec: TensorSpec) -> bool:
        """Whether a bias, a mask or a captured array is not in the engine's form."""
        if (dtype_name(array.dtype), array.shape) != (spec.dtype, spec.shape):
            return True
        return spec in self._engine_problem.captured and spec not in self._problem.captured

    def _broadcast(self, array: Any, spec: TensorSpec) -> Any:
        """A copy of a bias, a mask or a captured array: converted, expanded along the keys, and padded to a bucket."""
        copy = self._empty(spec)
        own = tuple(slice(None) if n in (1, full) else slice(n) for n, full in zip(array.shape, spec.shape, strict=True))
        if any(part != slice(None) for part in own):
            copy.fill(0)
        copy[own] = array
        return copy

    def _sum_into(self, target: Any, source: Any) -> None:
        """Write the gradient of a bias or a captured array: without padding, summed over the axes that are broadcast."""
        *_, sq, skv, _ = self._problem.sizes
        source = source[:skv, :sq]
        axes = tuple(axis for axis in (0, 1) if target.shape[axis] < source.shape[axis])
        if not axes:
            target[...] = source
        elif self._on_gpu:
            kernels.sum_over_scores(source, target)
        else:
            target[...] = source.sum(axis=axes, keepdims=True, dtype=np.float32)

    def _empty(self, spec: TensorSpec) -> Any:
        return cupy_runtime.temporary(self._originals["q"], spec.shape, storage_dtype(spec.dtype, self._on_gpu))

    def _resize(self, target: Any, source: Any, name: str) -> None:
        """Copy an array into a longer one, padded with zeros, or into a shorter one."""
        axes = [axis for axis, _ in padded_axes(name) if target.shape[axis] != source.shape[axis]]
        if self._on_gpu and len(axes) == 1:
            memory.resize(target, source, axes[0])
        else:
            memory.fit(target, source, tuple(axes))


def _has_layout(array: Any, spec: TensorSpec) -> bool:
    """Whether an array has the shape and the strides of a spec."""
    axes = zip(array.shape, array.strides, spec.strides, strict=False)
    return bool(array.shape == spec.shape) and all(length == 1 or stride == expected for length, stride, expected in axes)


def _log_sum_exp(maximum: Any, sum_exp: Any, stats: Any) -> None:
    with np.errstate(divide="ignore"):
        stats[...] = maximum + np.log(sum_exp)


def _masked_stats(stats: Any) -> Any:
    return np.where(stats <= MASKED_SCORE, np.float32(np.inf), stats)


def _zero_padding(array: Any, lengths: Any) -> Any:
    return np.where(np.arange(array.shape[2])[:, None] >= lengths, np.zeros((), array.dtype), array)


def _diagonal(queries: int, keys: int, lengths_q: Any, lengths_kv: Any, *, on_gpu: bool) -> Any:
    """``p = i + Skv - Sq`` of every query and batch entry, ``(Sq, B)``; for a single query it is repeated, ``(Skv, B)``."""
    rows, step = (keys, 0) if queries == 1 else (queries, 1)
    if on_gpu:
        return kernels.diagonal(rows, step, lengths_q, lengths_kv)
    return np.asfortranarray(step * np.arange(rows, dtype=np.int32)[:, None] + (lengths_kv - lengths_q))


def _clear_padding_on_cpu(
    problem: Problem, engine_problem: Problem, arrays: Mapping[str, Any], results: Sequence[tuple[str, Any]]
) -> dict[str, Any]:
    """Clear the results: the interpreter does not write to padding. Returns the lengths and offsets of packed sequences."""
    for name, array in results:
        array.fill(fill_value(name))
    if not problem.packed:
        return {}
    sides = list(zip(LENGTHS, CU_SEQLENS, strict=True))[: 1 if problem.paged else 2]
    lengths = {name: np.diff(arrays[starts]).astype(np.int32) for name, starts in sides}
    offsets = ragged_offsets(engine_problem).items()
    return lengths | {name: arrays[starts].astype(np.int64) * factor for name, (starts, factor) in offsets}


def _clear_padding_on_gpu(
    problem: Problem, engine_problem: Problem, arrays: Mapping[str, Any], results: Sequence[tuple[str, Any]]
) -> dict[str, Any]:
    """Clear the padding of the results, and return the lengths and offsets of packed sequences, in one kernel."""
    *_, sq, skv, _ = (problem if problem.packed else engine_problem).sizes
    packed_keys = problem.packed and not problem.paged
    queries = kernels.Lengths(arrays[(CU_SEQLENS if problem.packed else LENGTHS)[0]], sq, problem.q.shape[2], problem.packed)
    keys = kernels.Lengths(arrays[(CU_SEQLENS if packed_keys else LENGTHS)[1]], skv, problem.k.shape[2], packed_keys)
    offsets = ragged_offsets(engine_problem).items() if problem.packed else ()
    factors = {name: (starts == CU_SEQLENS[1], factor) for name, (starts, factor) in offsets} or None
    sinks = arrays.get("sinks")
    cleared = [
        kernels.ClearedResult(
            array, name in KEY_ARRAYS, name in ROW_STATS, fill_value(name), sinks if name in _LOGARITHMS else None
        )
        for name, array in results
    ]
    return kernels.prepare_sequences(queries, keys, factors, cleared)
