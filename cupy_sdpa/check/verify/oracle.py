r"""Attention and its gradients from the papers, dense, in numpy: what every result is compared with.

It shares no code with the rest of the package. All matrices are ``(B, Hkv, G, Sq, Skv)``, G query heads for each key head.
Computed in float64 it is the truth; computed in float32 with the roundings of a fused kernel (P, dS and the results to the
dtype of the arrays, L to float32) it is the naive computation of flash-attention's tolerance rule.

Vaswani et al. 2017, equation 1; Dao 2023, "FlashAttention-2", sections 2.2 and 3.1. The derivatives of score functions are
central differences of the plain Python functions.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..cases.data import Data, dtype_of
from ..cases.functions import function_of

#: A score at or below this counts as masked.
MASKED = -1e6
#: The step of the central differences.
STEP = 1e-6

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass
class Results:
    """What a computation gives, and what it went through.

    Attributes:
        values: results by name, in the shapes of the call's.
        p, seen, ds, slope: weights, which of them are not masked, the gradient of the scores before the softmax, and the
            derivative of the scores by the scaled product of q and k.
        stats: ``(B, Hkv, G, Sq)``.
        kinked: whether the derivative of the score function jumps where the scores are.
        parts: for each tensor, the derivative of the scores by what is read of it.
    """

    values: dict[str, Array] = field(default_factory=dict)
    p: Array = field(default_factory=lambda: np.zeros(0))
    seen: Array = field(default_factory=lambda: np.zeros(0, bool))
    scores: Array = field(default_factory=lambda: np.zeros(0))
    ds: Array = field(default_factory=lambda: np.zeros(0))
    slope: Any = 1.0
    stats: Array = field(default_factory=lambda: np.zeros(0))
    sink: Array = field(default_factory=lambda: np.zeros(0))
    kinked: bool = False
    parts: dict[str, Array] = field(default_factory=dict)


class Problem:
    """The values of a case in the oracle's shapes.

    Args:
        data: what the call is given.
    """

    def __init__(self, data: Data) -> None:
        self.data, self.case = data, data.case
        case = data.case
        self.group = case.hq // case.hkv if case.hkv else 1
        self.scale = case.options.get("scale", case.d**-0.5)
        self.lengths = [
            np.full(case.b, most) if own is None else own for own, most in zip(data.lengths, (case.sq, case.skv), strict=True)
        ]
        self.q, self.dout = (self.of_queries(self.padded(name)) for name in ("q", "dout"))
        self.k, self.v = (self.padded(name)[:, :, None] for name in ("k", "v"))
        p = case.options["dropout"][0] if "dropout" in case.options else 0.0
        self.kept: Any = 1.0 if data.keep is None else self.of_scores(data.keep) / (1 - p)

    def padded(self, name: str) -> Array:
        """An array as ``(B, H, S, D)`` in float64, 0 beyond the lengths."""
        array, side = self.data.arrays[name], int(name in "kv")
        own, most = self.lengths[side], (self.case.sq, self.case.skv)[side]
        if self.data.begins is None:
            wide = array.transpose(3, 1, 2, 0)
            inside = (np.arange(most) < own[:, None])[:, None, :, None]
            return np.where(inside, wide, 0).astype(np.float64)
        made = np.zeros((len(own), array.shape[1], most, array.shape[0]))
        for b, (begin, count) in enumerate(zip(self.data.begins[side], own, strict=False)):
            made[b, :, :count] = array[:, :, begin : begin + count].transpose(1, 2, 0)
        return made

    def of_queries(self, wide: Array) -> Array:
        """An array with its query heads in groups."""
        b, _, *rest = wide.shape
        return wide.reshape(b, self.case.hkv, self.group, *rest)

    def of_scores(self, array: Array) -> Array:
        """An array ``(Skv, Sq, Hq, B)``, every axis may be 1, in the shape of the scores."""
        wide = array.transpose(3, 2, 1, 0)
        b, h, *rest = wide.shape
        groups = (1, 1) if h == 1 and self.case.hq != 1 else (self.case.hkv, self.group)
        return wide.reshape(b, *groups, *rest)

    def of_heads(self, array: Array) -> Array:
        """An array ``(Hq,)`` in the shape of the scores."""
        return array.reshape(1, self.case.hkv, self.group, 1, 1)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the scores."""
        case = self.case
        return case.b, case.hkv, self.group, case.sq, case.skv

    def diagonal(self) -> Array:
        """For each batch entry and query the key on its diagonal, ``(B, 1, 1, Sq, 1)``."""
        i = np.arange(self.case.sq)[:, None]
        window = self.case.options.get("window", ())
        if "bottom_right" in (self.case.options.get("causal"), *window[2:]):
            return np.asarray(i + (self.lengths[1] - self.lengths[0])[:, None, None, None, None])
        return np.broadcast_to(i, (1, 1, 1, self.case.sq, 1))

    def visible(self) -> Array:
        """Which keys the masks show to each query."""
        case, options = self.case, self.case.options
        j, i, middle = np.arange(case.skv), np.arange(case.sq)[:, None], self.diagonal()
        queries, keys = (own[:, None, None, None, None] for own in self.lengths)
        seen = np.broadcast_to((i < queries) & (j < keys), self.shape).copy()
        if "causal" in options:
            seen &= j <= middle
        left, right, *_ = options.get("window", (None, None))
        if left is not None:
            seen &= j >= middle - left
        if right is not None:
            seen &= j <= middle + right
        if "mask" in options:
            seen &= self.of_scores(self.data.arrays["mask"])
        if "mask_mod" in options:
            seen &= self.called("mask_mod")
        return seen

    def places(self) -> tuple[Array, ...]:
        """``b, h, q_idx, kv_idx``, which broadcast to ``(B, Hq, Sq, Skv)``."""
        case = self.case
        return np.ix_(*(np.arange(n) for n in (case.b, case.hq, case.sq, case.skv)))

    def called(self, option: str, score: Array | None = None, **tensors: Array) -> Array:
        """A function of the case, called with whole arrays."""
        function = function_of(option, self.case.options[option][0]).call
        wanted = inspect.signature(function).parameters
        every = {name: _exact(array) for name, array in self.data.tensors.items() if name in wanted}
        first = [] if score is None else [score.reshape(self.flat)]
        with np.errstate(all="ignore"):
            result = function(*first, *self.places(), **(every | tensors))
        return np.broadcast_to(np.asarray(result), self.flat).reshape(self.shape)

    @property
    def flat(self) -> tuple[int, ...]:
        """The shape of the scores, heads not in groups."""
        case = self.case
        return case.b, case.hq, case.sq, case.skv

    def unpadded(self, wide: Array, side: int, fill: float = 0.0) -> Array:
        """A result ``(B, H, S, ...)`` in the shape of the call's, with ``fill`` where there is no sequence."""
        own = self.lengths[side]
        inside = (np.arange(wide.shape[2]) < own[:, None])[:, None, :]
        wide = np.where(inside.reshape(*inside.shape, *(1,) * (wide.ndim - 3)), wide, fill)
        if self.data.begins is None:
            return wide.transpose(3, 1, 2, 0) if wide.ndim == 4 else wide.transpose(2, 1, 0)
        count = self.data.arrays["k" if side else "q"].shape[2]
        made = np.full((wide.shape[1], count, *wide.shape[3:]), fill)
        for b, (begin, length) in enumerate(zip(self.data.begins[side], own, strict=False)):
            made[:, begin : begin + length] = wide[b, :, :length]
        return made.transpose(2, 0, 1) if made.ndim == 3 else made

    def joined(self, wide: Array) -> Array:
        """``(B, Hkv, G, Sq, ...)`` with its query heads not in groups."""
        return wide.reshape(self.case.b, self.case.hq, *wide.shape[3:])


def _exact(array: Array) -> Array:
    """Numbers in float64, whole numbers in int64, conditions as they are."""
    if array.dtype.kind == "b":
        return array
    return array.astype(np.int64 if array.dtype.kind in "iu" else np.float64)


class Precision:
    """How a computation rounds.

    Args:
        dtype: of the arrays; None for the truth.
    """

    def __init__(self, dtype: str | None) -> None:
        self.dtype = None if dtype is None else dtype_of(dtype)
        self.work = np.dtype("float64" if dtype in (None, "float64") else "float32")

    def store(self, array: Array) -> Array:
        """Round to the dtype of the arrays."""
        with np.errstate(over="ignore", invalid="ignore"):
            return array if self.dtype is None else array.astype(self.dtype).astype(self.work)

    def statistics(self, array: Array) -> Array:
        """Round to float32, as statistics are kept."""
        return array if self.dtype is None else array.astype(np.float32).astype(self.work)


def evaluate(problem: Problem, dtype: str | None = None, *, exact: Results | None = None) -> Results:
    """All results of a case.

    Args:
        problem: the values.
        dtype: the dtype that results and weights are rounded to; None for the truth.
        exact: the truth, for the derivatives of the functions.
    """
    by, found, case = Precision(dtype), Results(), problem.case
    q, k, v = (x.astype(by.work) for x in (problem.q, problem.k, problem.v))
    product = by.work.type(problem.scale) * (q @ k.swapaxes(-1, -2))
    product = np.broadcast_to(product, problem.shape)
    scores, softcapped = _scores(problem, product, by)
    seen = problem.visible() & (scores > MASKED) & ~np.isneginf(softcapped)  # -inf of a function masks, whatever comes next
    scores = np.where(seen, scores, -np.inf).astype(by.work)
    sink = np.full((*problem.shape[:-1], 1), -np.inf, by.work)
    if "sinks" in case.options:
        inside = np.arange(case.sq)[:, None] < problem.lengths[0][:, None, None, None, None]
        sink = np.where(inside, problem.of_heads(problem.data.arrays["sinks"]), sink).astype(by.work)
    top = np.maximum(scores.max(axis=-1, keepdims=True, initial=-np.inf), sink)
    base = np.where(np.isneginf(top), 0, top)
    e, of_sink = np.exp(scores - base), np.exp(sink - base)
    total = e.sum(axis=-1, keepdims=True) + of_sink
    with np.errstate(divide="ignore"):
        stats = by.statistics(top + np.log(total))
    p = e / np.where(total == 0, 1, total)
    out = by.store(by.store(p * problem.kept) @ v)
    rows = {"stats": stats, "max": top, "sum_exp": total}
    found.values = {"out": problem.unpadded(problem.joined(out), 0)}
    for name, row in rows.items():
        fill = 0.0 if name == "sum_exp" else -np.inf
        found.values[name] = problem.unpadded(problem.joined(row[..., 0]), 0, fill)
    found.p, found.seen, found.scores, found.stats = p, seen, scores, stats[..., 0]
    found.sink = of_sink / np.where(total == 0, 1, total)
    if case.backward:
        _gradients(problem, by, found, (q, k, v, out), (scores, sink, product, softcapped), exact)
    return found


def _scores(problem: Problem, product: Array, by: Precision) -> tuple[Array, Array]:
    """The scores before masks; and what a softcap is given."""
    options, arrays = problem.case.options, problem.data.arrays
    scores = product
    if "score_mod" in options:
        scores = problem.called("score_mod", scores).astype(by.work)
    capped = scores
    if "softcap" in options:
        cap = by.work.type(options["softcap"])
        scores = cap * np.tanh(scores / cap)
    if "alibi_slopes" in options:
        distance = np.abs(problem.diagonal() - np.arange(problem.case.skv)).astype(by.work)
        scores = scores - problem.of_heads(arrays["alibi_slopes"]).astype(by.work) * distance
    if "bias" in options:
        with np.errstate(over="ignore"):
            scores = scores + problem.of_scores(arrays["bias"]).astype(by.work)
    return scores, capped


def _slopes(problem: Problem, product: Array, capped: Array, found: Results) -> tuple[Any, Any]:
    """The derivatives of the scores by what the softcap is given, and by the product of q and k; in float64."""
    options = problem.case.options
    outer: Any = 1.0
    if "softcap" in options:
        outer = 1 - np.tanh(capped / options["softcap"]) ** 2
    if "score_mod" not in options:
        return outer, outer
    with np.errstate(all="ignore"):
        above, here, below = (problem.called("score_mod", product + step) for step in (STEP, 0.0, -STEP))
        inner = np.where(np.isfinite(here), (above - below) / (2 * STEP), 0.0)
        bend = np.abs((above - here) - (here - below)) / STEP
        found.kinked = bool((np.isfinite(bend) & (bend > 1e-3) & (found.p > 1e-12)).any())
        for name, array in problem.data.tensors.items():
            if array.dtype.kind not in "iub" and name in _parameters(problem):
                wide = array.astype(np.float64)
                high, low = (problem.called("score_mod", product, **{name: wide + step}) for step in (STEP, -STEP))
                found.parts[name] = outer * np.where(np.isfinite(here), (high - low) / (2 * STEP), 0.0)
    return outer, outer * inner


def _parameters(problem: Problem) -> Mapping[str, Any]:
    return function_of("score_mod", problem.case.options["score_mod"][0]).tensors


def _gradients(
    problem: Problem,
    by: Precision,
    found: Results,
    arrays: tuple[Array, ...],
    before: tuple[Array, ...],
    exact: Results | None,
) -> None:
    q, k, v, out = arrays
    scores, sink, product, capped = before
    if exact is None:
        _, found.slope = _slopes(problem, product, capped, found)
        exact = found
    dout = problem.dout.astype(by.work)
    stats = found.stats[..., None]
    stats = np.where(np.isneginf(stats), np.inf, stats)
    p = np.exp(scores - stats).astype(by.work) if by.dtype is not None else found.p
    of_sink = np.exp(sink - stats)
    kept = np.asarray(problem.kept, by.work)
    dp = (dout @ v.swapaxes(-1, -2)) * kept
    mean = (dout * out).sum(axis=-1, keepdims=True)
    ds = found.ds = p * (dp - mean)
    dx = by.store(ds * np.asarray(exact.slope, by.work))
    scale = by.work.type(problem.scale)
    dv = by.store(p * kept).swapaxes(-1, -2) @ dout
    dk = scale * (dx.swapaxes(-1, -2) @ q)
    dq = scale * (dx @ k)
    values = found.values
    values["dq"] = by.store(problem.unpadded(problem.joined(dq), 0))
    values["dk"] = by.store(problem.unpadded(dk.sum(axis=2), 1))
    values["dv"] = by.store(problem.unpadded(dv.sum(axis=2), 1))
    options = problem.case.options
    if "return_dbias" in options:
        bias = problem.data.arrays["bias"]
        values["dbias"] = summed(problem, ds, bias.shape).astype(by.work)
    if "return_dsinks" in options:
        values["dsinks"] = -(of_sink * mean).sum(axis=(0, 3, 4)).reshape(problem.case.hq)
    if "return_dtensors" in options:
        axes = _parameters(problem)
        for name, part in exact.parts.items():
            values[f"tensors[{name!r}]"] = gathered(problem, ds * part, axes[name], problem.data.tensors[name].shape)


def summed(problem: Problem, wide: Array, shape: tuple[int, ...]) -> Array:
    """A matrix of scores summed to ``(Skv, Sq, Hq, B)`` with some axes of length 1."""
    full = wide.reshape(problem.flat).transpose(3, 2, 1, 0)
    axes = tuple(axis for axis, n in enumerate(shape) if n == 1)
    result: Array = full.sum(axis=axes, keepdims=True)
    return result


def gathered(problem: Problem, wide: Array, axes: str, shape: tuple[int, ...]) -> Array:
    """A matrix of scores summed to a tensor with some axes; an axis of a fixed length is read at its last place."""
    full = wide.reshape(problem.flat)
    letters = [axis for axis in axes if not axis.isdigit()]
    sums = np.einsum(full, list(range(4)), ["bhqk".index(axis) for axis in letters])
    made = np.zeros(shape)
    made[tuple(-1 if axis.isdigit() else slice(None) for axis in axes)] = sums
    return made
