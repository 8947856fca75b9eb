"""The arrays of a launch in the form that the engine needs: copies, lengths and offsets, and cleared padding.

:mod:`.core.support.engine_problem` computes from a problem alone which form the engine needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from ..boundary.call import Fill
from ..kernels import paged, ragged
from ..problem.arrays import CU_SEQLENS, KEY_ARRAYS, LENGTHS, QUERY_ARRAYS, ROW_STATS, has_score_axes
from ..problem.bucket import padded_axes
from ..problem.problem import Problem, has_ragged_diagonal
from ..problem.tensor_spec import TensorSpec, dtype_name, numpy_dtype
from ..problem.varlen import ragged_offsets
from ..problem.view import View
from ..runtime import memory
from ..support.engine_problem import may_mask_rows
from ..support.padding import masked_inputs
from ..support.why_not import disabled_names, staging_guards
from .steps import Steps

#: The row statistics that are -inf where there is nothing to compute; all other results are 0.
_LOGARITHMS = ("stats", "max")


def fill_value(name: str) -> float:
    """Return the value of a result where there is nothing to compute: -inf for stats and max, otherwise 0."""
    return -math.inf if name in _LOGARITHMS else 0.0


def fill_trivial_results(steps: Steps, problem: Problem, arrays: Mapping[str, View]) -> None:
    """Fill the results of a problem without queries, keys or values; the log-sum-exp of a row with a sink is the sink."""
    for spec in problem.results:
        steps.fill(arrays[spec.name], fill_value(spec.name))
    *_, longest, _, batch = problem.sizes
    if not problem.sinks or problem.backward or not batch:
        return
    sinks, rows = arrays["sinks"], [spec.name for spec in problem.results if spec.name in ROW_STATS]
    if not problem.ragged:
        for name in rows:
            if name == "sum_exp":
                steps.fill(arrays[name], 1)
            else:
                steps.copy(arrays[name], sinks[None, :, None])
        return
    dense = sinks if sinks.flags.f_contiguous else steps.copied(sinks)
    ones = steps.temporary(sinks.shape, np.float32)
    steps.fill(ones, 1)
    results = [
        ragged.ClearedResult(arrays[name], False, True, fill_value(name), ones if name == "sum_exp" else dense) for name in rows
    ]
    starts_or_lengths = arrays[(CU_SEQLENS if problem.packed else LENGTHS)[0]]
    queries = ragged.Lengths(starts_or_lengths, longest, problem.q.shape[2], problem.packed)
    if rows:
        no_keys = queries._replace(max_length=0)
        steps.run(ragged.prepare_sequences, queries, no_keys, (), results, writes=[arrays[name] for name in rows])


def _writes_empty_sequences(problem: Problem) -> bool:
    """True if cuDNN writes 0, and -inf as the log-sum-exp, for sequences without keys, so that nothing needs to be cleared.

    Its kernel for a single query with paged keys does (measured with 9.19 and 9.28), other kernels write nothing. Options that
    select another kernel, or that the measurement did not cover, are excluded.
    """
    *_, sq, _, _ = problem.sizes
    excluded = problem.packed or problem.band or problem.changes_weights or problem.max
    return problem.paged and sq == 1 and not excluded


class EngineForm:
    """The views of one launch in the form that the engine needs; ``full_queries``: no query is padding, despite lengths."""

    def __init__(
        self, steps: Steps, problem: Problem, engine_problem: Problem, originals: Mapping[str, View], *, full_queries: bool
    ) -> None:
        self._steps, self._problem, self._engine_problem, self._originals = steps, problem, engine_problem, originals
        self._on_gpu = steps.on_gpu
        self._arrays: dict[str, View] = dict(originals)
        self._results = {spec.name for spec in problem.results}
        #: The arrays that only the engine's problem has.
        self._others: dict[str, View] = {}
        clears = problem.ragged and not (self._on_gpu and full_queries and _writes_empty_sequences(problem))
        # Kernels for a single query write rows of the padding, so it is cleared after the kernel.
        of_lengths = self._on_gpu and problem.seq_lens_q is not None
        self._clears_last = clears and of_lengths and "one-query-lengths" not in disabled_names()
        self._clears_first = clears and not self._clears_last
        self._same = engine_problem == problem and not clears and not may_mask_rows(problem)

    def of_engine(self) -> dict[str, View]:
        """Return the arrays of the engine's problem."""
        return {spec.name: self._arrays[spec.name] for spec in self._engine_problem.tensors} | self._others

    def prepare(self) -> None:
        """Copy what the engine needs in another form, and clear what it adds to or does not write."""
        if self._same:
            return
        for spec in self._engine_problem.tensors:
            self._arrays[spec.name] = self._engine_array(spec)
        for spec in self._problem.ds_reductions:
            self._steps.fill(self._arrays[spec.name], 0.0)  # the engine accumulates into it
        if self._clears_first:
            self._clear_padding()
        if has_ragged_diagonal(self._engine_problem):
            self._add_diagonal()

    def finish(self) -> None:
        """Clear padding rows, combine the row statistics, and copy results to the caller's arrays."""
        if self._clears_last:
            self._clear_padding()
        if self._problem.max:
            rows = [self._arrays[name] for name in ("max", "sum_exp", "stats")]
            self._steps.run(ragged.write_log_sum_exp, *rows, writes=rows[2:])
        for spec in self._problem.results:
            target, source = self._originals[spec.name], self._arrays[spec.name]
            if target == source:
                continue
            if spec in self._problem.ds_reductions and has_score_axes(spec.name):
                self._sum_into(target, source)
            else:
                self._resize(target, source, spec.name)

    def _clear_padding(self) -> None:
        """Clear the padding rows of the results; for packed sequences also compute lengths and offsets."""
        problem, engine_problem, steps = self._problem, self._engine_problem, self._steps
        arrays = {**self._arrays, **{name: self._originals[name] for name in LENGTHS if name in self._originals}}
        *_, sq, skv, batch = (problem if problem.packed else engine_problem).sizes
        packed = problem.packed, problem.packed and not problem.paged
        sides = []
        for side, (most, total) in enumerate(((sq, problem.q.shape[2]), (skv, problem.k.shape[2]))):
            made = steps.temporary((batch,), np.int32) if packed[side] else None
            array = arrays[(CU_SEQLENS if packed[side] else LENGTHS)[side]]
            sides.append(ragged.Lengths(array, most, total, packed[side], made))
            if made:
                self._others[LENGTHS[side]] = made
        offsets = []
        for name, (starts, factor) in (ragged_offsets(engine_problem) if problem.packed else {}).items():
            self._others[name] = steps.temporary((batch + 1,), np.int64)
            offsets.append(ragged.Offsets(self._others[name], starts == CU_SEQLENS[1], factor))
        names = [spec.name for spec in problem.results if spec.name in QUERY_ARRAYS + KEY_ARRAYS]
        cleared = [
            ragged.ClearedResult(
                arrays[name], name in KEY_ARRAYS, name in ROW_STATS, fill_value(name),
                arrays.get("sinks") if name in _LOGARITHMS else None,
            )
            for name in names
        ]  # fmt: skip
        writes = [*(arrays[name] for name in names), *self._others.values()]
        steps.run(ragged.prepare_sequences, *sides, offsets, cleared, writes=writes)

    def _add_diagonal(self) -> None:
        """``p = i + Skv - Sq`` of every query and batch item, ``(Sq, B)``; for a single query it is repeated, ``(Skv, B)``."""
        *_, sq, skv, batch = self._engine_problem.sizes
        rows, step = (skv, 0) if sq == 1 else (sq, 1)
        made = self._others["diagonal"] = self._steps.temporary((rows, batch), np.int32)
        lengths = [self._others.get(name) or self._arrays[name] for name in LENGTHS]
        self._steps.run(ragged.diagonal, made, step, *lengths, writes=[made])

    def _engine_array(self, spec: TensorSpec) -> View:
        """Return the array that the engine uses for a tensor: the caller's, or a new one."""
        array, steps = self._originals.get(spec.name), self._steps
        one_key = self._on_gpu and "one-key" in staging_guards(self._problem)
        if array is None:  # the lengths of a bucket
            like = self._originals["q" if spec.name == "seq_lens_q" else "k"]
            return steps.filled(Fill("int32", like.shape[3], like.shape[2]))
        if spec.name == "page_table" and self._on_gpu and (self._engine_problem.sizes[4] > 1 or one_key):
            made = steps.temporary(spec.shape, np.int32)
            lengths = self._originals["seq_lens_kv"]
            steps.run(paged.padded_table, made, array, lengths, self._problem.k.shape[2], writes=[made])
            return made
        if spec.name == "seq_lens_kv" and one_key:
            made = steps.temporary(spec.shape, np.int32)
            steps.run(ragged.at_least_one, made, array, writes=[made])
            return made
        if spec.name in self._results:
            if self._is_packed_copy(spec):
                return steps.temporary(array.shape, array.dtype)
            same = array.shape == spec.shape and array.dtype == numpy_dtype(spec.dtype, on_gpu=self._on_gpu)
            return array if same or (self._problem.packed and not has_score_axes(spec.name)) else steps.temporary_of(spec)
        return self._in_layout(self._masked(array, spec.name), spec)

    def _masked(self, array: View, name: str) -> View:
        """Return an input in which values of the padding and of fully masked rows that would make a result NaN are replaced."""
        if name == "stats" and may_mask_rows(self._problem):
            # exp(S - L) and exp(sink - L) of a row are 0 if L is +inf
            copy = self._steps.temporary(array.shape, array.dtype)
            self._steps.run(ragged.backward_stats, copy, array, writes=[copy])
            return copy
        lengths = None if self._engine_problem.settings.padded else masked_inputs(self._problem).get(name)
        # on the CPU the interpreter masks the inputs itself, except dout, of which whole rows are summed
        if lengths and (self._on_gpu or name == "dout"):
            copy = self._steps.temporary(array.shape, array.dtype)
            self._steps.run(ragged.zero_padded, copy, array, self._originals[lengths], writes=[copy])
            return copy
        return array

    def _in_layout(self, array: View, spec: TensorSpec) -> View:
        """Return an input in the dtype, shape and layout that the engine needs."""
        name = spec.name
        # in a bucket, a bias of one key becomes one of several keys, which the bug does not affect: spec keeps its dtype
        affected = name == "bias" and self._on_gpu and "finite-bias" in staging_guards(self._problem)
        finite_bias = affected and spec.dtype == "float32"
        if has_score_axes(name) and (finite_bias or self._needs_broadcast(array, spec)):
            array = self._broadcast(array, spec)
            if finite_bias:
                self._steps.run(ragged.replace_infinite, array, writes=[array])
        elif self._is_packed_copy(spec):
            array = self._steps.copied(array)
        elif not self._problem.packed and not _has_layout(array, spec):
            copy = self._steps.temporary_of(spec)
            self._resize(copy, array, name)
            array = copy
        return array

    def _is_packed_copy(self, spec: TensorSpec) -> bool:
        """True if a packed array is not dense or not aligned, and the engine needs one that is."""
        original = getattr(self._problem, spec.name, None)  # captured arrays and their gradients are no fields
        if not self._problem.packed or original is None or not spec.dense:
            return False
        return not original.dense or bool(original.alignment < spec.alignment)

    def _needs_broadcast(self, array: View, spec: TensorSpec) -> bool:
        """True if a bias, a mask or a captured array is not in the engine's form."""
        if (dtype_name(array.dtype), array.shape) != (spec.dtype, spec.shape):
            return True
        return spec in self._engine_problem.captured and spec not in self._problem.captured

    def _broadcast(self, array: View, spec: TensorSpec) -> View:
        """Return a copy of a bias, a mask or a captured array: converted, expanded along the keys, and padded to a bucket."""
        copy = self._steps.temporary_of(spec)
        own = tuple(slice(None) if n in (1, full) else slice(n) for n, full in zip(array.shape, spec.shape, strict=True))
        if any(part != slice(None) for part in own):
            self._steps.fill(copy, 0)
        self._steps.copy(copy[own], array)
        return copy

    def _sum_into(self, target: View, source: View) -> None:
        """Write the gradient of a bias or a captured array: without padding, summed over the axes that are broadcast."""
        *_, sq, skv, _ = self._problem.sizes
        source = source[:skv, :sq]
        if target.shape[:2] == source.shape[:2]:
            self._steps.copy(target, source)
        else:
            self._steps.run(ragged.sum_over_scores, source, target, writes=[target])

    def _resize(self, target: View, source: View, name: str) -> None:
        """Copy an array into a longer one, padded with zeros, or into a shorter one."""
        axes = [axis for axis, _ in padded_axes(name) if target.shape[axis] != source.shape[axis]]
        if target.shape == source.shape:
            self._steps.copy(target, source)
        else:
            self._steps.run(memory.resize, target, source, axes, writes=[target])


def _has_layout(array: View, spec: TensorSpec) -> bool:
    """True if an array has the shape and the strides of a spec."""
    axes = zip(array.shape, array.strides, spec.strides, strict=False)
    return bool(array.shape == spec.shape) and all(length == 1 or stride == expected for length, stride, expected in axes)
