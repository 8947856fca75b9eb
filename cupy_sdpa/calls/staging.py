"""What an engine is given in place of the caller's arrays: padded, cleaned and converted copies, and what follows from them.

:func:`engine_problem` says it of a problem, before there is any array, so that plans can be made ahead; a :class:`Stage` does it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..device import cupy_runtime, kernels
from ..problem.bucket import Policy, padded_axes
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
from ..problem.tensor_spec import TensorSpec, dense_spec, dtype_name, numpy_dtype
from ..problem.varlen import ragged_offsets, round_up_totals
from ..support.why_not import staging_guards

#: What -inf is given beyond the lengths; all other results get 0.
_LOGARITHMS = ("stats", "max")


def engine_problem(problem: Problem, bucket: Policy | None, on_gpu: bool) -> Problem:
    """What the engine is given: what was asked, with its lengths rounded up, or with copies in place of some arrays."""
    if problem.trivial:
        return problem
    return _engine_problem(bucket(problem) if bucket else problem, on_gpu)


@functools.lru_cache(maxsize=4096)
def _engine_problem(problem: Problem, on_gpu: bool) -> Problem:
    if problem.captured:
        problem = replace(problem, captured=tuple(_read_as(problem, spec, on_gpu) for spec in problem.captured))
    if not on_gpu:
        return _interned(problem)
    specs: dict[str, Any] = {}
    for name in cleaned(problem):
        spec = getattr(problem, name)
        specs[name] = dense_spec(name, spec.dtype, spec.shape)
    *_, sq, skv, _ = problem.sizes
    for spec in (problem.bias, problem.mask):
        if spec and (spec is problem.mask or spec.shape[:2] == (1, 1)):
            # cuDNN dies of bytes in memory (support.deadly), and mistakes one number for another where both axes are 1
            kind = "float16" if spec is problem.mask else spec.dtype
            kind = "float32" if (sq, skv) == (1, 1) else kind  # as in _read_as
            keys = skv if spec.shape[1] == 1 else spec.shape[0]
            specs[spec.name] = dense_spec(spec.name, kind, (keys, *spec.shape[1:]))
    guards = staging_guards(problem)
    if "finite-bias" in guards and problem.bias:
        bias = specs.get("bias", problem.bias)
        specs["bias"] = dense_spec("bias", "float32", bias.shape)
    # sums are of q's dtype, and added up over heads and batch only; others are wrong or fault
    sums = {spec.name: dense_spec(spec.name, problem.dtype, (skv, sq, *spec.shape[2:])) for spec in problem.ds_reductions}
    if problem.dbias:
        specs["dbias"] = sums.pop("dbias")
    if problem.dcaptured:
        specs["dcaptured"] = tuple(sums.values())
    if "dense-queries" in guards:
        specs["q"] = dense_spec("q", problem.q.dtype, problem.q.shape)
    if "two-rows" in guards:
        exact = problem.backward and problem.deterministic  # as in validation: there are two queries
        specs["settings"] = problem.settings._replace(max_seqlen_q=2, deterministic=exact)
        if dump := problem.rng_dump:
            specs["rng_dump"] = dense_spec("rng_dump", dump.dtype, (dump.shape[0], 2, *dump.shape[2:]))
    problem = replace(problem, **specs) if specs else problem
    return _interned(round_up_totals(problem) if problem.packed else problem)


def _read_as(problem: Problem, spec: TensorSpec, on_gpu: bool) -> TensorSpec:
    """How an array of a score function is read: on the GPU without bytes, and dense."""
    kind = "float16" if on_gpu and spec.dtype == "bool" else spec.dtype
    keys, queries, _, batch = spec.shape
    *_, sq, _, _ = problem.sizes
    if on_gpu and sq == 1 and keys == 1 and kind in ("float16", "bfloat16"):
        kind = "float32"  # the kernel for one query reads 4 bytes at a time (9.19 and 9.28: a misaligned address)
    alone = (keys, queries) == (1, 1) and (batch > 1 or max(spec.shape) == 1)  # mistaken for one another, as a bias is
    shape = (problem.sizes[5] if alone and on_gpu else keys, *spec.shape[1:])
    same = (kind, shape) == (spec.dtype, spec.shape) and (not on_gpu or (spec.dense and spec.alignment >= 16))
    return spec if same else dense_spec(spec.name, kind, shape)


@functools.lru_cache(maxsize=4096)
def _interned(problem: Problem) -> Problem:
    """The first of equal problems: every length of a bucket finds its plan by identity."""
    return problem


def cleaned(problem: Problem) -> dict[str, str]:
    """The arrays that are copied with zeros beyond the lengths, where lengths are given, and the array of their lengths.

    cuDNN multiplies what it finds there by a probability of 0: values in the forward pass, all that is multiplied backward.
    """
    if problem.seq_lens_q is None:
        return {}
    if not problem.backward:
        return {"v": "seq_lens_kv"}
    return {"q": "seq_lens_q", "dout": "seq_lens_q", "k": "seq_lens_kv", "v": "seq_lens_kv"}


class Stage:
    """The arrays of one call, and those that stand in for them.

    Args:
        problem: what was asked.
        given: what the engine is given, :func:`engine_problem`.
        arrays: the caller's, by name, all results among them.
        on_gpu: whether they are CuPy's.

    Attributes:
        arrays: the engine's, by name.
        plain: whether they are the caller's, and nothing is done before or after.
    """

    def __init__(self, problem: Problem, given: Problem, arrays: Mapping[str, Any], on_gpu: bool) -> None:
        self.problem, self.on_gpu, self._given = problem, on_gpu, given
        self._own = arrays
        self.arrays: dict[str, Any] = dict(arrays)
        self._clears_last = False
        same = (given is problem or given == problem) and not problem.ragged and not _may_see_nothing(problem)
        self.plain = same and problem.max is None  # which is nearly always
        if same:
            return
        self._results = {spec.name for spec in problem.results}
        for spec in given.tensors:
            self.arrays[spec.name] = self._staged(spec)
        for spec in problem.ds_reductions:
            clear(self.arrays[spec.name], 0.0, on_gpu)  # it is added up
        # After the kernel, because kernels for a single query write rows that are beyond the length.
        self._clears_last = on_gpu and problem.ragged and "clear-last" in staging_guards(given)
        if problem.ragged and not self._clears_last:
            self._clear_rows()
        if has_ragged_alibi(given):
            *_, sq, skv, _ = given.sizes
            self.arrays["diagonal"] = _diagonal(sq, skv, *(self.arrays[name] for name in LENGTHS), on_gpu=on_gpu)

    @property
    def bytes_made(self) -> int:
        """Bytes of the arrays that stand in for others."""
        return sum(array.nbytes for name, array in self.arrays.items() if array is not self._own.get(name))

    def finish(self) -> None:
        """Clear rows beyond the lengths, copy results to the caller's arrays, and make the log-sum-exp of its parts."""
        if self._clears_last:
            self._clear_rows()
        if self.problem.max:
            rows = [self.arrays[name] for name in ("max", "sum_exp", "stats")]
            (kernels.log_sum_exp if self.on_gpu else _log_sum_exp)(*rows)
        for spec in self.problem.results:
            target, source = self._own[spec.name], self.arrays[spec.name]
            if target is source:
                continue
            if spec in self.problem.ds_reductions:
                self._sum(target, source)
            else:
                self._resize(target, source, spec.name)

    def _clear_rows(self) -> None:
        """Clear the results that no batch entry has; of packed sequences also make lengths and offsets."""
        rows = [(spec.name, self.arrays[spec.name]) for spec in self.problem.results if spec.name in QUERY_ARRAYS + KEY_ARRAYS]
        self.arrays |= (_rows_on_gpu if self.on_gpu else _rows)(self.problem, self._given, self.arrays, rows)

    def _staged(self, spec: TensorSpec) -> Any:
        """What stands in for an array, or the array itself."""
        name = spec.name
        array = self._own.get(name)
        if array is None:
            like = self._own["q" if name == "seq_lens_q" else "k"]  # the lengths of a bucket
            return filled("int32", like.shape[3], like.shape[2], like=like, on_gpu=self.on_gpu)
        if name in self._results:
            same = array.shape == spec.shape and dtype_name(array.dtype) == spec.dtype
            return array if same or (self.problem.packed and not has_score_axes(name)) else self._empty(spec)
        if name == "stats" and _may_see_nothing(self.problem):
            array = self._unseen(array)
        lengths = cleaned(self.problem).get(name)
        if lengths and self.on_gpu:
            array = kernels.cleaned(array, self._own[lengths])
        elif lengths and name == "dout":  # of which whole rows are summed; the rest the interpreter cuts off itself
            array = _cleaned(array, self._own[lengths])
        finite = name == "bias" and self.on_gpu and "finite-bias" in staging_guards(self.problem)
        if has_score_axes(name) and (finite or self._differs(array, spec)):
            array = self._broadcast(array, spec)
            if finite:
                kernels.replace_infinite(array)
        elif self.problem.packed and name == "q" and spec.dense and not self.problem.q.dense:
            copy = cupy_runtime.empty(array.shape, array.dtype)
            copy[...] = array
            array = copy
        elif not self.problem.packed and not _fits(array, spec):
            copy = self._empty(spec)
            self._resize(copy, array, name)
            array = copy
        return array

    def _differs(self, array: Any, spec: TensorSpec) -> bool:
        """Whether a bias, a mask or what a function reads is not as the engine is given it."""
        if (dtype_name(array.dtype), array.shape) != (spec.dtype, spec.shape):
            return True
        return spec in self._given.captured and spec not in self.problem.captured

    def _broadcast(self, array: Any, spec: TensorSpec) -> Any:
        """A copy of a bias or a mask in the engine's dtype, along the keys where it is one number, longer in a bucket."""
        made = self._empty(spec)
        own = tuple(slice(None) if n in (1, full) else slice(n) for n, full in zip(array.shape, spec.shape, strict=True))
        if any(part != slice(None) for part in own):
            made.fill(0)
        made[own] = array
        return made

    def _sum(self, target: Any, source: Any) -> None:
        """A sum of the scores' gradient from the engine's: without a bucket's padding, along the axes that it lacks."""
        *_, sq, skv, _ = self.problem.sizes
        source = source[:skv, :sq]
        axes = tuple(axis for axis in (0, 1) if target.shape[axis] == 1)
        target[...] = source.sum(axis=axes, keepdims=True, dtype=np.float32) if axes else source

    def _unseen(self, stats: Any) -> Any:
        """The log-sum-exp with +inf for masked rows, which then get ``exp(S - L) = 0`` and ``exp(sink - L) = 0``."""
        if self.on_gpu:
            return kernels.seeing_nothing(stats)
        return np.where(stats <= MASKED_SCORE, np.float32(np.inf), stats)

    def _empty(self, spec: TensorSpec) -> Any:
        make = cupy_runtime.empty if self.on_gpu else functools.partial(np.empty, order="F")
        return make(spec.shape, numpy_dtype(spec.dtype))

    def _resize(self, target: Any, source: Any, name: str) -> None:
        """Copy an array into a longer one, with zeros behind it, or into a shorter one."""
        axes = [axis for axis, _ in padded_axes(name) if target.shape[axis] != source.shape[axis]]
        if self.on_gpu and len(axes) == 1:
            cupy_runtime.resize(target, source, axes[0])
        else:
            cupy_runtime.fit(target, source, tuple(axes))


def _fits(array: Any, spec: TensorSpec) -> bool:
    """Whether an array has the shape and the strides of what stands for it."""
    steps = zip(array.shape, array.strides, spec.strides, strict=False)
    return bool(array.shape == spec.shape) and all(length == 1 or step == wanted for length, step, wanted in steps)


def _log_sum_exp(top: Any, total: Any, stats: Any) -> None:
    with np.errstate(divide="ignore"):
        stats[...] = top + np.log(total)


def _cleaned(array: Any, lengths: Any) -> Any:
    beyond = np.arange(array.shape[2])[:, None] >= lengths
    return np.where(beyond, np.zeros((), array.dtype), array)


def _may_see_nothing(problem: Problem) -> bool:
    """Whether gradients have rows whose -inf no mask hides.

    Those beyond the lengths with sinks, and those whose scores are -inf by a bias or a function.
    """
    return problem.backward and (problem.bias is not None or problem.dsinks is not None or problem.has_score_mod)


def filled(dtype: str, size: int, value: int, *, like: Any, on_gpu: bool) -> Any:
    """A one-dimensional array of equal integers, on the device of another array."""
    if not on_gpu:
        return np.full(size, value, dtype)
    with cupy_runtime.on_device_of(like):
        array = cupy_runtime.empty((size,), np.dtype(dtype))
        if dtype == "int32":
            cupy_runtime.fill_int32(array, value)
        else:
            array.fill(value)
    return array


def clear(array: Any, value: float, on_gpu: bool) -> None:
    """Fill an array with zeros or -inf."""
    if on_gpu:
        cupy_runtime.clear(array, value)
    else:
        array.fill(value)


def _diagonal(queries: int, keys: int, of_queries: Any, of_keys: Any, *, on_gpu: bool) -> Any:
    """``p = i + Skv - Sq`` of every query and batch entry, ``(Sq, B)``; of a single query once for each key, ``(Skv, B)``."""
    rows, step = (keys, 0) if queries == 1 else (queries, 1)
    if on_gpu:
        return kernels.diagonal(rows, step, of_queries, of_keys)
    return np.asfortranarray(step * np.arange(rows, dtype=np.int32)[:, None] + (of_keys - of_queries))


def _rows(problem: Problem, given: Problem, arrays: Mapping[str, Any], rows: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """On the CPU: the lengths and offsets of packed sequences; results are cleared, for nothing is written beyond lengths."""
    for name, array in rows:
        array.fill(fill_value(name))
    if not problem.packed:
        return {}
    found = {name: np.diff(arrays[begins]).astype(np.int32) for name, begins in zip(LENGTHS, CU_SEQLENS, strict=True)}
    return found | {name: arrays[begins].astype(np.int64) * factor for name, (begins, factor) in ragged_offsets(given).items()}


def _rows_on_gpu(
    problem: Problem, given: Problem, arrays: Mapping[str, Any], rows: Sequence[tuple[str, Any]]
) -> dict[str, Any]:
    *_, sq, skv, _ = (problem if problem.packed else given).sizes
    names = CU_SEQLENS if problem.packed else LENGTHS
    of_queries = kernels.Side(arrays[names[0]], sq, problem.q.shape[2])
    of_keys = kernels.Side(arrays[names[1]], skv, problem.k.shape[2])
    named = (
        {name: (begins == CU_SEQLENS[1], factor) for name, (begins, factor) in ragged_offsets(given).items()}
        if problem.packed
        else None
    )
    sinks = arrays.get("sinks")
    results = [
        kernels.Cleared(array, name in KEY_ARRAYS, name in ROW_STATS, fill_value(name), sinks if name in _LOGARITHMS else None)
        for name, array in rows
    ]
    return kernels.prepare_rows(of_queries, of_keys, named, results)


def fill_value(name: str) -> float:
    """What a result is where there is nothing."""
    return -math.inf if name in _LOGARITHMS else 0.0
