r"""The expected results of a case: what the public reference lacks, and the intermediate values for the tolerances.

The masks and the softmax come from :mod:`cupy_sdpa.reference`. The self-test also needs score functions, derivatives, the
roundings of a kernel, and all heads at once. It uses no other code of the package.

All matrices are ``(B, Hkv, G, Sq, Skv)``, G query heads per key head.
In float64 the result is the truth. With the roundings of a fused kernel (P, dS and the results to the dtype of the arrays, the
rest in float32, or float64 for float64 arrays), it is the naive computation of flash-attention's tolerance rule.

Vaswani et al. 2017, equation 1; Dao 2023, "FlashAttention-2", sections 2.2 and 3.1. The derivatives of score functions are
central differences of the plain Python functions.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

from ..reference import MASKED, diagonal, directional_derivative, exponentials, gradients, modified, output, visible
from .data import Data, tree_pairs
from .formats import FORMATS, FP8_SCALE, dtype_of, round_fp8
from .functions import function_of
from .weight_options import ROWS

Array = np.ndarray[Any, np.dtype[Any]]

#: The step of the central differences.
STEP = 1e-6
#: A score function is not differentiable if its derivative changes by more than this in a step, at weights above the second.
MAX_BEND, MIN_WEIGHT = 1e-3, 1e-12


class Inputs:
    """The values of a case in the shapes of the oracle.

    Attributes:
        q, dout: ``(B, Hkv, G, Sq, D)`` and ``(B, Hkv, G, Sq, Dv)`` in float64.
        dstats: the gradient of the log-sum-exp, ``(B, Hkv, G, Sq, 1)``; 0.0 without one.
        k, v: ``(B, Hkv, 1, Skv, D)`` and ``(B, Hkv, 1, Skv, Dv)`` in float64.
        lengths: the lengths of the queries and of the keys, ``(B,)`` each.
        group: the number of query heads per key head.
        shape, merged_shape: the shape of the scores, and with merged heads, ``(B, Hq, Sq, Skv)``.
        scale: the factor of q k^T; for each head in a shape that broadcasts to the scores.
        keep: the factors of dropout, 0 or 1 / (1 - p), in the shape of the scores; 1.0 without dropout.
    """

    def __init__(self, data: Data) -> None:
        self.data, self.case = data, data.case
        case = data.case
        self.group = case.hq // case.hkv if case.hkv else 1
        self.scale: Any = case.options.get("scale", case.d**-0.5)
        if "head_scales" in case.options:
            self.scale = self.expand_heads(data.arrays["scale"].astype(np.float64))
        self.lengths = [
            np.full(case.b, maximum) if lengths is None else lengths
            for lengths, maximum in zip(data.lengths, (case.sq, case.skv), strict=True)
        ]
        self.shape = case.b, case.hkv, self.group, case.sq, case.skv
        self.merged_shape = case.b, case.hq, case.sq, case.skv
        self.q, self.dout, self.k, self.v = (self._padded(name) for name in ("q", "dout", "k", "v"))
        self.dstats: Any = 0.0
        if (of_stats := case.options.get("dstats")) is not None:
            self.dout = 0 * self.dout if of_stats == "alone" else self.dout
            self.dstats = self._padded("dstats")
        #: The mean of v in FP8, which is part of v; it broadcasts to its shape.
        self.mean: Any = 0.0
        if data.mean is not None:
            self.mean = data.mean.transpose(3, 1, 2, 0)[:, :, None].astype(np.float64)
            self.v = self.v + self.mean
        p = case.dropout.p if case.dropout else 0.0
        self.keep: Any = 1.0 if data.keep is None else self.expand_scores(data.keep) / (1 - p)

    def tangent(self, name: str) -> Array:
        """Return the tangent of q, k or v in the shape of the array; 0 if it is not given."""
        if name not in self.case.options["jvp"]:
            return np.zeros_like(getattr(self, name))
        return self._padded(f"t{name}")

    def _padded(self, name: str) -> Array:
        """Return an array as ``(B, Hkv, G, S, D)`` in float64, 0 beyond the lengths; keys and values have G = 1."""
        array, side = self.data.dense.get(name, self.data.arrays[name]), int(name[-1] in "kv")
        if name == "dstats":  # as one channel
            array = array[None] if array.ndim == 2 else array.transpose(1, 0, 2)[None]
        lengths, maximum, starts = self.lengths[side], (self.case.sq, self.case.skv)[side], self.data.starts[side]
        if starts is None:
            transposed = array.transpose(3, 1, 2, 0)
            inside = (np.arange(maximum) < lengths[:, None])[:, None, :, None]
            padded = np.where(inside, transposed, 0).astype(np.float64)
        else:
            padded = np.zeros((len(lengths), array.shape[1], maximum, array.shape[0]))
            for b, (start, length) in enumerate(zip(starts, lengths, strict=False)):
                padded[b, :, :length] = array[:, :, start : start + length].transpose(1, 2, 0)
        b, _, *rest = padded.shape
        return padded.reshape(b, self.case.hkv, 1 if side else self.group, *rest)

    def merge_heads(self, array: Array) -> Array:
        """Reshape ``(B, Hkv, G, Sq, ...)`` to ``(B, Hq, Sq, ...)``."""
        return array.reshape(self.case.b, self.case.hq, *array.shape[3:])

    def expand_scores(self, array: Array) -> Array:
        """Reshape an array that broadcasts to ``(Skv, Sq, Hq, B)`` so that it broadcasts to the scores."""
        transposed = array.transpose(3, 2, 1, 0)
        b, h, *rest = transposed.shape
        groups = (1, 1) if h == 1 and self.case.hq != 1 else (self.case.hkv, self.group)
        return transposed.reshape(b, *groups, *rest)

    def expand_heads(self, array: Array) -> Array:
        """Reshape ``(Hq,)`` so that it broadcasts to the scores."""
        return array.reshape(1, self.case.hkv, self.group, 1, 1)

    def diagonal(self) -> Array:
        """Return the key index on the diagonal for each batch item and query, ``(B, 1, 1, Sq, 1)``."""
        i, (lengths_q, lengths_kv) = np.arange(self.case.sq)[:, None], self.lengths
        found = [diagonal(i, n, m, **self._band) for n, m in zip(lengths_q, lengths_kv, strict=True)]
        return np.array(found).reshape(self.case.b, 1, 1, self.case.sq, 1)

    @property
    def _band(self) -> dict[str, Any]:
        """The options of the reference that are a band."""
        return {name: self.case.options[name] for name in ("causal", "window") if name in self.case.options}

    def visible(self) -> Array:
        """Return whether each query attends to each key, according to the lengths and the mask options."""
        case, options = self.case, self.case.options
        i, (lengths_q, lengths_kv) = np.arange(case.sq)[:, None], self.lengths
        band = {**self._band, "seq_lens_q": lengths_q, "seq_lens_kv": lengths_kv}
        entries = [visible(i, b, case.sq, case.skv, **band) for b in range(case.b)]
        in_band = np.array(entries, bool).reshape(case.b, 1, 1, case.sq, case.skv)
        found = np.broadcast_to(in_band, self.shape).copy()
        if "mask" in options:
            found &= self.expand_scores(self.data.arrays["mask"])
        if self.data.attends is not None:
            found &= self.expand_scores(self.data.attends)
        if self.data.parents is not None:
            found &= self.tree()
        if "mask_mod" in options:
            found &= self.call_function("mask_mod")
        return found

    def tree(self) -> Array:
        """Return whether each key is before the tree of the newest tokens, or visible within it, ``(B, 1, 1, Sq, Skv)``."""
        case, pairs = self.case, tree_pairs(self.data.parents)
        found = np.zeros((case.b, 1, 1, case.sq, case.skv), bool)
        for b, (count, length) in enumerate(zip(*self.lengths, strict=True)):
            start = int(length) - int(count)
            found[b, ..., : max(start, 0)] = True
            tokens = np.arange(max(start, 0), length) - start
            found[b, 0, 0, :, max(start, 0) : length] = pairs[tokens, :, min(b, pairs.shape[2] - 1)].T
        return found

    def call_function(self, option: str, scores: Array | None = None, **tensors: Array) -> Array:
        """Call the score or mask function of the case with whole arrays; ``tensors`` replace captured ones."""
        function = function_of(option, self.case.options[option][0]).call
        parameters = inspect.signature(function).parameters
        captured = {name: _widened(array) for name, array in self.data.tensors.items() if name in parameters}
        first = [] if scores is None else [scores.reshape(self.merged_shape)]
        indices = np.ix_(*(np.arange(n) for n in self.merged_shape))
        with np.errstate(all="ignore"):
            result = function(*first, *indices, **(captured | tensors))
        return np.broadcast_to(np.asarray(result), self.merged_shape).reshape(self.shape)

    def to_call_shape(self, array: Array, side: int, fill_value: float = 0.0) -> Array:
        """Return a result ``(B, H, S, ...)`` of queries (0) or keys (1) in the call's shape, with a value in the padding."""
        lengths = self.lengths[side]
        inside = (np.arange(array.shape[2]) < lengths[:, None])[:, None, :]
        array = np.where(inside.reshape(*inside.shape, *(1,) * (array.ndim - 3)), array, fill_value)
        if (starts := self.data.starts[side]) is None:
            return array.transpose(3, 1, 2, 0) if array.ndim == 4 else array.transpose(2, 1, 0)
        total = self.data.arrays["k" if side else "q"].shape[2]
        packed = np.full((array.shape[1], total, *array.shape[3:]), fill_value)
        for b, (start, length) in enumerate(zip(starts, lengths, strict=False)):
            packed[:, start : start + length] = array[b, :, :length]
        return packed.transpose(2, 0, 1) if packed.ndim == 3 else packed

    def sum_to_shape(self, array: Array, shape: tuple[int, ...]) -> Array:
        """Sum an array of the shape of the scores to one that broadcasts to ``(Skv, Sq, Hq, B)``, or to ``(Hq,)``.

        The axis B of the result may be shorter: groups of batch items then share an element.
        """
        full = np.broadcast_to(array, self.shape).reshape(self.merged_shape).transpose(3, 2, 1, 0)
        if len(shape) == 1:
            return np.asarray(full.sum(axis=(0, 1, 3)))
        if shape[3] not in (1, full.shape[3]):
            full = full.reshape(*full.shape[:3], shape[3], full.shape[3] // shape[3]).sum(axis=4)
        axes = tuple(axis for axis, n in enumerate(shape) if n == 1)
        result: Array = full.sum(axis=axes, keepdims=True)
        return result

    def sum_to_tensor(self, array: Array, axes: str, shape: tuple[int, ...]) -> Array:
        """Sum an array of the shape of the scores to a captured array; an axis of fixed length is read at its last index."""
        full = array.reshape(self.merged_shape)
        letters = [axis for axis in axes if not axis.isdigit()]
        sums = np.einsum(full, list(range(4)), ["bhqk".index(axis) for axis in letters])
        result = np.zeros(shape)
        result[tuple(-1 if axis.isdigit() else slice(None) for axis in axes)] = sums
        return result


def _widened(array: Array) -> Array:
    """Convert floating-point numbers to float64 and integers to int64; boolean arrays are unchanged."""
    if array.dtype.kind == "b":
        return array
    return array.astype(np.int64 if array.dtype.kind in "iu" else np.float64)


class Results:
    """All results of a case, and the intermediate values of their computation.

    Args:
        inputs: the values.
        dtype: the dtype that results and weights are rounded to; None for the truth.
        truth: the truth; its derivatives of the score function are used.

    Attributes:
        values: the results by name, in the shapes of the call's.
        q, k, v, out, product: in the working precision; the product of q and k is scaled.
        softcap_input: the scores before the softcap.
        scores: the scores after the mask, -inf where masked.
        sink: the score of the sink, ``(B, Hkv, G, Sq, 1)``.
        p, sink_weight: the weights (the softmax of the scores), and the weight of the sink.
        attended: which weights are not masked.
        stats: the log-sum-exp, ``(B, Hkv, G, Sq)``.
        ds: the gradient of the scores before the softmax.
        dscores: the derivative of the scores in the direction of the tangents.
        mean: its mean of each row, with the weights p.
        score_derivative: the derivative of the scores by the scaled product of q and k.
        score_curvature: the magnitude of its derivative.
        difference_error: the error of the derivative from rounding in the differences that it was computed with.
        nondifferentiable: whether the score function is not differentiable at one of the scores.
        tensor_derivatives: for each captured array, the derivative of the scores by the element that was read.
    """

    def __init__(self, inputs: Inputs, dtype: str | None = None, truth: Results | None = None) -> None:
        self.inputs, self.truth, case = inputs, truth or self, inputs.case
        self.dtype = None if dtype is None else dtype_of(dtype)
        self.fp8 = "" if dtype is None else case.options.get("fp8", "")
        self.work = np.dtype("float64" if dtype in (None, "float64") else "float32")
        self.score_derivative: Any = 1.0
        self.score_curvature: Any = 0.0
        self.difference_error: Any = 0.0
        self.nondifferentiable = False
        self.tensor_derivatives: dict[str, Array] = {}
        self.values: dict[str, Array] = {}
        self._add_outputs()
        if truth is None and (case.backward or "jvp" in case.options):
            self._add_score_derivatives()
        if case.backward:
            self._add_gradients()
        if "jvp" in case.options:
            self._add_derivative()

    def _round(self, array: Array) -> Array:
        """Round to the dtype of the arrays."""
        with np.errstate(over="ignore", invalid="ignore"):
            return array if self.dtype is None else array.astype(self.dtype).astype(self.work)

    def _round_stats(self, array: Array) -> Array:
        """Round to the dtype of row statistics, which is the dtype to compute in."""
        return array if self.dtype is None else array.astype(self.work)

    def _add_outputs(self) -> None:
        """Compute the weights, and add the results of the forward pass."""
        inputs, options, work = self.inputs, self.inputs.case.options, self.work
        self.q, self.k, self.v = (x.astype(work) for x in (inputs.q, inputs.k, inputs.v))
        self.product = np.broadcast_to(np.asarray(inputs.scale, work) * (self.q @ self.k.swapaxes(-1, -2)), inputs.shape)
        scores = self._scores()
        # A score of -inf from a score function is masked, even if the softcap or the bias makes it finite.
        self.attended = inputs.visible() & ~(scores <= MASKED) & ~np.isneginf(self.softcap_input)
        self.scores = np.where(self.attended, scores, -np.inf).astype(work)
        self.sink = self._sink()
        found, *rows = exponentials(self.scores, self.sink[..., 0])
        of_sink, maximum, total = (x[..., None] for x in rows)
        with np.errstate(divide="ignore"):
            stats = self._round_stats(maximum + np.log(total))
        divisor = np.where(total == 0, 1, total)
        self.p, self.sink_weight, self.stats = found / divisor, of_sink / divisor, stats[..., 0]
        if self.fp8:  # weights are rounded before the division
            weights = np.asarray(round_fp8(found, self.fp8, FORMATS[self.fp8].largest) / divisor)
            mean = np.asarray(inputs.mean, work)
            self.out = np.asarray(round_fp8(weights @ (self.v - mean), self.fp8, FP8_SCALE))
            self.out = self._round(round_fp8(self.out + mean * self.attended.any(axis=-1, keepdims=True), self.fp8, FP8_SCALE))
        else:
            self.out = output(self.p, self.v, keep=inputs.keep, rounded=self._round)
        self.values["out"] = inputs.to_call_shape(inputs.merge_heads(self.out), 0)
        for name, array, fill_value in (("stats", stats, -np.inf), ("max", maximum, -np.inf), ("sum_exp", total, 0.0)):
            self.values[name] = inputs.to_call_shape(inputs.merge_heads(array[..., 0]), 0, fill_value)
        if "weight_sums" in options:
            sums = self.p.sum(axis=-2)
            of_heads = sums.sum(axis=2) if options["weight_sums"] == "key heads" else inputs.merge_heads(sums)
            self.values["weights"] = inputs.to_call_shape(self._round_stats(of_heads), 1)
        if "weight_entropy" in options:
            self.values["entropy"] = inputs.to_call_shape(inputs.merge_heads(self._entropy()), 0)

    def _entropy(self) -> Array:
        """Return the entropy of each row of weights, in which a sink is a key; with roundings from the mean key."""
        if self.dtype is None:
            terms = [p * np.log(np.where(p > 0, p, 1)) for p in (self.p, self.sink_weight)]
            return -np.asarray(terms[0].sum(axis=-1) + terms[1][..., 0])
        mean = np.asarray(self.inputs.scale, self.work) * (self.q * self._round(self.p @ self.k)).sum(axis=-1)
        of_sink = (self.sink_weight * np.where(np.isneginf(self.sink), 0, self.sink))[..., 0]
        found = np.where(np.isneginf(self.stats), 0, self.stats) - mean - of_sink
        return self._round_stats(np.where(found < 0, 0, found))

    def _sink(self) -> Array:
        """Return the scores of the sinks; -inf where there is no sink."""
        inputs = self.inputs
        sink = np.full((*inputs.shape[:-1], 1), -np.inf, self.work)
        if "sinks" not in inputs.case.options:
            return sink
        inside = np.arange(inputs.case.sq)[:, None] < inputs.lengths[0][:, None, None, None, None]
        return np.where(inside, inputs.expand_heads(inputs.data.arrays["sinks"]), sink).astype(self.work)

    def _scores(self) -> Array:
        """Return the scores before the mask; also set the scores before the softcap."""
        inputs, work, options = self.inputs, self.work, self.inputs.case.options
        scores = self.product
        if "score_mod" in options:
            scores = inputs.call_function("score_mod", scores).astype(work)
        self.softcap_input = scores
        changes: dict[str, Any] = {}
        for name, row in ROWS.items():
            if row.terms is not None and name in options:
                changes |= row.terms(inputs, options[name], work)
        with np.errstate(over="ignore"):
            found: Array = modified(scores, **changes)
        return found

    def _add_score_derivatives(self) -> None:
        """Compute the derivatives of the scores by the scaled product of q and k and by the captured arrays, in float64."""
        inputs, options, product = self.inputs, self.inputs.case.options, self.product
        of_softcap: Any = 1.0
        bend_of_softcap: Any = 0.0
        if "softcap" in options:
            capped = np.tanh(self.softcap_input / options["softcap"])
            of_softcap = 1 - capped**2
            bend_of_softcap = 2 / options["softcap"] * np.abs(capped) * of_softcap
        self.score_derivative, self.score_curvature = of_softcap, bend_of_softcap
        if "score_mod" not in options:
            return
        with np.errstate(all="ignore"):
            above, value, below = (inputs.call_function("score_mod", product + step) for step in (STEP, 0.0, -STEP))
            derivative = np.where(np.isfinite(value), (above - below) / (2 * STEP), 0.0)
            bend = np.abs((above - value) - (value - below)) / STEP
            self.score_derivative = of_softcap * derivative
            self.score_curvature = bend_of_softcap * derivative**2 + of_softcap * np.where(np.isfinite(bend), bend / STEP, 0.0)
            self.difference_error = np.spacing(np.where(np.isfinite(value), np.maximum(1, np.abs(value)), 1.0)) / STEP
            self.nondifferentiable = bool((np.isfinite(bend) & (bend > MAX_BEND) & (self.p > MIN_WEIGHT)).any())
            for name, array in inputs.data.tensors.items():
                if array.dtype.kind not in "iub" and name in score_tensors(inputs):
                    wide = array.astype(np.float64)
                    high, low = (inputs.call_function("score_mod", product, **{name: wide + step}) for step in (STEP, -STEP))
                    of_tensor = np.where(np.isfinite(value), (high - low) / (2 * STEP), 0.0)
                    self.tensor_derivatives[name] = of_softcap * of_tensor

    def _add_derivative(self) -> None:
        """Add the derivative in the direction of the tangents."""
        inputs, work = self.inputs, self.work
        dq, dk, dv = (inputs.tangent(name).astype(work) for name in "qkv")
        dproduct = np.asarray(inputs.scale, work) * (dq @ self.k.swapaxes(-1, -2) + self.q @ dk.swapaxes(-1, -2))
        self.dscores = dproduct * np.asarray(self.truth.score_derivative, work)
        keep = np.asarray(inputs.keep, work)
        found, self.mean = directional_derivative(self.p, self.dscores, self.v, dv, keep=keep, rounded=self._round)
        self.values["jvp"] = inputs.to_call_shape(inputs.merge_heads(found), 0)
        self.values["dstats"] = inputs.to_call_shape(inputs.merge_heads(self.mean[..., 0]), 0)

    def _add_gradients(self) -> None:
        """Add the gradients, with the true derivatives of the score function."""
        inputs, options, work, values = self.inputs, self.inputs.case.options, self.work, self.values
        dout = inputs.dout.astype(work)
        stats = self.stats[..., None]
        stats = np.where(np.isneginf(stats), np.inf, stats)
        # A fused kernel computes P again from the rounded L.
        p = np.exp(self.scores - stats).astype(work) if self.dtype is not None else self.p
        dq, dk, dv, self.ds, delta = gradients(
            p, dout, self.q, self.k, self.v, scale=np.asarray(inputs.scale, work), keep=np.asarray(inputs.keep, work),
            slope=np.asarray(self.truth.score_derivative, work), out=self.out, rounded=self._round,
            dstats=np.asarray(inputs.dstats, work),
        )  # fmt: skip
        values["dq"] = self._round(inputs.to_call_shape(inputs.merge_heads(dq), 0))
        values["dk"] = self._round(inputs.to_call_shape(dk.sum(axis=2), 1))
        values["dv"] = self._round(inputs.to_call_shape(dv.sum(axis=2), 1))
        for name, row in ROWS.items():
            if f"return_d{name}" in options and row.slope is not None:
                shape = inputs.data.arrays[name].shape
                values[f"d{name}"] = inputs.sum_to_shape(self.ds * row.slope(inputs), shape).astype(work)
        if "return_dscale" in options:
            slope = np.asarray(self.truth.score_derivative, work)
            of_product = self._round(self._round(self.ds * slope) @ self.k)  # the gradient of q times the scale
            values["dscale"] = (self.q * of_product).sum(axis=(0, 3, 4)).reshape(inputs.case.hq)
        if "return_dsinks" in options:
            values["dsinks"] = -(np.exp(self.sink - stats) * delta).sum(axis=(0, 3, 4)).reshape(inputs.case.hq)
        if "return_dtensors" in options:
            for name, derivative in self.truth.tensor_derivatives.items():
                shape = inputs.data.tensors[name].shape
                values[f"tensors[{name!r}]"] = inputs.sum_to_tensor(self.ds * derivative, score_tensors(inputs)[name], shape)


def score_tensors(inputs: Inputs) -> dict[str, str]:
    """Return the axes of the arrays that the score function captures, by name."""
    return dict(function_of("score_mod", inputs.case.options["score_mod"][0]).tensors)
