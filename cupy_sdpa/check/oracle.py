r"""The expected results of a case: what the public reference lacks, and the intermediate values for the tolerances.

The masks and the softmax are those of :mod:`cupy_sdpa.reference`. Besides, the self-test needs score functions, derivatives,
the roundings of a kernel, and all heads at once. It uses no other code of the package.

All matrices are ``(B, Hkv, G, Sq, Skv)``, G query heads per key head.
In float64 the result is the truth. In float32, with the roundings of a fused kernel (P, dS and the results to the dtype of the
arrays, L to float32), it is the naive computation of flash-attention's tolerance rule.

Vaswani et al. 2017, equation 1; Dao 2023, "FlashAttention-2", sections 2.2 and 3.1. The derivatives of score functions are
central differences of the plain Python functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..reference import exponentials as exponentials_of
from .data import FORMATS, FP8_SCALE, dtype_of, round_fp8
from .functions import function_of
from .inputs import Array, Inputs

#: Scores up to this value count as masked.
MASKED = -1e6
#: The step of the central differences.
STEP = 1e-6
#: A score function is not differentiable if its derivative changes by more than this in a step, at weights above the second.
MAX_BEND, MIN_WEIGHT = 1e-3, 1e-12


def _empty() -> Array:
    return np.zeros(0)


@dataclass
class Results:
    """The results of a computation, and its intermediate values.

    Attributes:
        values: the results by name, in the shapes of the call's.
        p: the weights, softmax of the scores.
        attended: which weights are not masked.
        scores: the scores after the mask, -inf where masked.
        ds: the gradient of the scores before the softmax.
        dscores: the derivative of the scores in the direction of the tangents.
        mean: its mean of each row, with the weights p.
        score_derivative: the derivative of the scores by the scaled product of q and k.
        score_curvature: the magnitude of its derivative.
        difference_error: the error of the derivative from rounding in the differences that it was computed with.
        stats: the log-sum-exp, ``(B, Hkv, G, Sq)``.
        sink_weight: the weight of the sink.
        nondifferentiable: whether the score function is not differentiable at one of the scores.
        tensor_derivatives: for each captured array, the derivative of the scores by the element that was read.
    """

    values: dict[str, Array] = field(default_factory=dict)
    p: Array = field(default_factory=_empty)
    attended: Array = field(default_factory=_empty)
    scores: Array = field(default_factory=_empty)
    ds: Array = field(default_factory=_empty)
    score_derivative: Any = 1.0
    score_curvature: Any = 0.0
    difference_error: Any = 0.0
    dscores: Array = field(default_factory=_empty)
    mean: Array = field(default_factory=_empty)
    stats: Array = field(default_factory=_empty)
    sink_weight: Array = field(default_factory=_empty)
    nondifferentiable: bool = False
    tensor_derivatives: dict[str, Array] = field(default_factory=dict)


class Forward(NamedTuple):
    """The values of the forward pass that the backward pass needs.

    Attributes:
        q, k, v, out: in the working precision.
        product: the scaled product of q and k.
        softcap_input: the scores before the softcap.
        scores: the scores after the mask.
        sink: the score of the sink, ``(B, Hkv, G, Sq, 1)``.
    """

    q: Array
    k: Array
    v: Array
    out: Array
    product: Array
    softcap_input: Array
    scores: Array
    sink: Array


class Precision:
    """The roundings of a computation.

    Args:
        dtype: the dtype of the arrays; None for the truth.
    """

    def __init__(self, dtype: str | None) -> None:
        self.dtype = None if dtype is None else dtype_of(dtype)
        self.work = np.dtype("float64" if dtype in (None, "float64") else "float32")

    def round(self, array: Array) -> Array:
        """Round to the dtype of the arrays."""
        with np.errstate(over="ignore", invalid="ignore"):
            return array if self.dtype is None else array.astype(self.dtype).astype(self.work)

    def round_weights(self, exponentials: Array, divisor: Array, keep: Any, fp8: str) -> Array:
        """The rounded weights. In FP8 they are rounded before the division."""
        if self.dtype is None or not fp8:
            return self.round(exponentials / divisor * keep)
        return np.asarray(round_fp8(exponentials, fp8, FORMATS[fp8].largest) / divisor)

    def round_out(self, out: Array, fp8: str) -> Array:
        """The rounded output."""
        return self.round(out if self.dtype is None or not fp8 else round_fp8(out, fp8, FP8_SCALE))

    def round_stats(self, array: Array) -> Array:
        """Round to float32, the dtype of row statistics."""
        return array if self.dtype is None else array.astype(np.float32).astype(self.work)


def evaluate(inputs: Inputs, dtype: str | None = None, *, truth: Results | None = None) -> Results:
    """Compute all results of a case.

    Args:
        inputs: the values.
        dtype: the dtype that results and weights are rounded to; None for the truth.
        truth: the truth; its derivatives of the score function are used.
    """
    precision, results, case = Precision(dtype), Results(), inputs.case
    work = precision.work
    q, k, v = (x.astype(work) for x in (inputs.q, inputs.k, inputs.v))
    product = np.broadcast_to(work.type(inputs.scale) * (q @ k.swapaxes(-1, -2)), inputs.shape)
    scores, softcap_input = _scores(inputs, product, work)
    # A score of -inf from a score function is masked, even if the softcap or the bias makes it finite.
    attended = inputs.visible() & ~(scores <= MASKED) & ~np.isneginf(softcap_input)
    scores = np.where(attended, scores, -np.inf).astype(work)
    sink = _sink(inputs, work)
    exponentials, *rows = exponentials_of(scores, sink[..., 0])
    sink_exponential, maximum, total = (x[..., None] for x in rows)
    with np.errstate(divide="ignore"):
        stats = precision.round_stats(maximum + np.log(total))
    divisor = np.where(total == 0, 1, total)
    p = exponentials / divisor
    fp8 = case.options.get("fp8", "")
    out = precision.round_out(precision.round_weights(exponentials, divisor, inputs.keep, fp8) @ v, fp8)
    results.values = {"out": inputs.to_call_shape(inputs.merge_heads(out), 0)}
    for name, array, fill_value in (("stats", stats, -np.inf), ("max", maximum, -np.inf), ("sum_exp", total, 0.0)):
        results.values[name] = inputs.to_call_shape(inputs.merge_heads(array[..., 0]), 0, fill_value)
    if "weight_sums" in case.options:
        sums = p.sum(axis=-2)
        of_heads = sums.sum(axis=2) if case.options["weight_sums"] == "key heads" else inputs.merge_heads(sums)
        results.values["weights"] = inputs.to_call_shape(precision.round_stats(of_heads), 1)
    results.p, results.attended, results.scores, results.stats = p, attended, scores, stats[..., 0]
    results.sink_weight = sink_exponential / divisor
    forward = Forward(q, k, v, out, product, softcap_input, scores, sink)
    if truth is None and (case.backward or "jvp" in case.options):
        _add_score_derivatives(inputs, forward, results)
    if case.backward:
        _add_gradients(inputs, precision, results, forward, truth or results)
    if "jvp" in case.options:
        _add_derivative(inputs, precision, results, forward, truth or results)
    return results


def _sink(inputs: Inputs, work: np.dtype[Any]) -> Array:
    """The scores of the sinks, ``(B, Hkv, G, Sq, 1)``; -inf where there is no sink."""
    sink = np.full((*inputs.shape[:-1], 1), -np.inf, work)
    if "sinks" not in inputs.case.options:
        return sink
    inside = np.arange(inputs.case.sq)[:, None] < inputs.lengths[0][:, None, None, None, None]
    return np.where(inside, inputs.expand_heads(inputs.data.arrays["sinks"]), sink).astype(work)


def _scores(inputs: Inputs, product: Array, work: np.dtype[Any]) -> tuple[Array, Array]:
    """The scores before the mask, and the scores before the softcap."""
    options, arrays = inputs.case.options, inputs.data.arrays
    scores = product
    if "score_mod" in options:
        scores = inputs.call_function("score_mod", scores).astype(work)
    softcap_input = scores
    if "softcap" in options:
        cap = work.type(options["softcap"])
        scores = cap * np.tanh(scores / cap)
    if "alibi_slopes" in options:
        distance = np.abs(inputs.diagonal() - np.arange(inputs.case.skv)).astype(work)
        scores = scores - inputs.expand_heads(arrays["alibi_slopes"]).astype(work) * distance
    if "bias" in options:
        with np.errstate(over="ignore"):
            scores = scores + inputs.expand_scores(arrays["bias"]).astype(work)
    return scores, softcap_input


def _add_score_derivatives(inputs: Inputs, forward: Forward, results: Results) -> None:
    """Add the derivatives of the scores by the scaled product of q and k and by the captured arrays, in float64."""
    options = inputs.case.options
    of_softcap: Any = 1.0
    bend_of_softcap: Any = 0.0
    if "softcap" in options:
        capped = np.tanh(forward.softcap_input / options["softcap"])
        of_softcap = 1 - capped**2
        bend_of_softcap = 2 / options["softcap"] * np.abs(capped) * of_softcap
    results.score_derivative, results.score_curvature = of_softcap, bend_of_softcap
    if "score_mod" not in options:
        return
    product = forward.product
    with np.errstate(all="ignore"):
        above, value, below = (inputs.call_function("score_mod", product + step) for step in (STEP, 0.0, -STEP))
        derivative = np.where(np.isfinite(value), (above - below) / (2 * STEP), 0.0)
        bend = np.abs((above - value) - (value - below)) / STEP
        results.score_derivative = of_softcap * derivative
        results.score_curvature = bend_of_softcap * derivative**2 + of_softcap * np.where(np.isfinite(bend), bend / STEP, 0.0)
        results.difference_error = np.spacing(np.where(np.isfinite(value), np.maximum(1, np.abs(value)), 1.0)) / STEP
        results.nondifferentiable = bool((np.isfinite(bend) & (bend > MAX_BEND) & (results.p > MIN_WEIGHT)).any())
        for name, array in inputs.data.tensors.items():
            if array.dtype.kind not in "iub" and name in _score_tensors(inputs):
                wide = array.astype(np.float64)
                high, low = (inputs.call_function("score_mod", product, **{name: wide + step}) for step in (STEP, -STEP))
                of_tensor = np.where(np.isfinite(value), (high - low) / (2 * STEP), 0.0)
                results.tensor_derivatives[name] = of_softcap * of_tensor


def _score_tensors(inputs: Inputs) -> Mapping[str, str]:
    """The axes of the arrays that the score function captures, by name."""
    return function_of("score_mod", inputs.case.options["score_mod"][0]).tensors


def _add_derivative(inputs: Inputs, precision: Precision, results: Results, forward: Forward, truth: Results) -> None:
    """Add the derivative in the direction of the tangents: ``dO = (P ∘ (dS - Σ P ∘ dS) ∘ R) V + (P ∘ R) dV``."""
    work, p = precision.work, results.p
    dq, dk, dv = (inputs.tangent(name).astype(work) for name in "qkv")
    dproduct = work.type(inputs.scale) * (dq @ forward.k.swapaxes(-1, -2) + forward.q @ dk.swapaxes(-1, -2))
    ds = results.dscores = dproduct * np.asarray(truth.score_derivative, work)
    mean = results.mean = (p * ds).sum(axis=-1, keepdims=True)
    keep = np.asarray(inputs.keep, work)
    of_scores = precision.round(precision.round(p * (ds - mean) * keep) @ forward.v)
    derivative = precision.round(of_scores + precision.round(precision.round(p * keep) @ dv))
    results.values["jvp"] = inputs.to_call_shape(inputs.merge_heads(derivative), 0)


def _add_gradients(inputs: Inputs, precision: Precision, results: Results, forward: Forward, truth: Results) -> None:
    """Add the gradients to the results; the derivatives of the score function are those of the truth."""
    q, k, v, work = forward.q, forward.k, forward.v, precision.work
    dout = inputs.dout.astype(work)
    stats = results.stats[..., None]
    stats = np.where(np.isneginf(stats), np.inf, stats)
    # A fused kernel computes P again from the rounded L.
    p = np.exp(forward.scores - stats).astype(work) if precision.dtype is not None else results.p
    keep = np.asarray(inputs.keep, work)
    dp = (dout @ v.swapaxes(-1, -2)) * keep
    delta = (dout * forward.out).sum(axis=-1, keepdims=True)
    ds = results.ds = p * (dp - delta)
    dproduct = precision.round(ds * np.asarray(truth.score_derivative, work))
    scale = work.type(inputs.scale)
    dv = precision.round(p * keep).swapaxes(-1, -2) @ dout
    dk = scale * (dproduct.swapaxes(-1, -2) @ q)
    dq = scale * (dproduct @ k)
    values = results.values
    values["dq"] = precision.round(inputs.to_call_shape(inputs.merge_heads(dq), 0))
    values["dk"] = precision.round(inputs.to_call_shape(dk.sum(axis=2), 1))
    values["dv"] = precision.round(inputs.to_call_shape(dv.sum(axis=2), 1))
    options = inputs.case.options
    if "return_dbias" in options:
        values["dbias"] = inputs.sum_to_shape(ds, inputs.data.arrays["bias"].shape).astype(work)
    if "return_dsinks" in options:
        values["dsinks"] = -(np.exp(forward.sink - stats) * delta).sum(axis=(0, 3, 4)).reshape(inputs.case.hq)
    if "return_dtensors" in options:
        axes = _score_tensors(inputs)
        for name, derivative in truth.tensor_derivatives.items():
            shape = inputs.data.tensors[name].shape
            values[f"tensors[{name!r}]"] = inputs.sum_to_tensor(ds * derivative, axes[name], shape)
