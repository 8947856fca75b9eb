r"""The tolerance of a result: flash-attention's rule plus the propagated rounding error.

The allowed error is :data:`.FACTOR` times the error of the naive computation in the same precision, plus a floor. The naive
error of a few elements may be small by chance, so the floor is the effect of independent roundings to first order: weights and
dS are rounded to the dtype of the arrays, scores and L to float32, or float64 for float64 arrays (Higham and Mary 2019, "A new
approach to probabilistic rounding error analysis").

The derivative of a score function or softcap has an error of its own. It is computed at a rounded score, which adds the
curvature times the error of the score. Its operations have errors relative to their operands, not to their difference: where a
softcap is saturated, 1 - tanh(s)^2 is nearly 0 with an error of the spacing at 1. Where all scores are saturated, the gradients
of q and k consist of such errors only.

Results that must be exact (0 or -inf in fully masked rows and in the padding) have no
tolerance.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .comparison import APPROXIMATE, DEVIATIONS, FP8_SUM, SINGLE, spacing
from .formats import FORMATS, FP8_SCALE, dtype_of
from .oracle import Array, Inputs, Results, score_tensors
from .weight_options import ROWS

#: Score functions that use approximate functions.
APPROXIMATE_FUNCTIONS = ("tanh", "log1p", "sigmoid", "sin", "fading", "bias_all")
#: The number of queries or keys in a block, see :mod:`cupy_sdpa.block_masks`.
_BLOCK = 128
#: The largest magnitude of a score to which the error of approximate functions is relative.
_MAX_APPROXIMATE_SCORE = 60


def rounding_floors(inputs: Inputs, truth: Results) -> dict[str, float]:
    """Return the error that rounding alone may cause, by result."""
    with np.errstate(invalid="ignore", over="ignore"):
        return _Floors(inputs, truth).all()


def _subnormal(dtype: np.dtype[Any]) -> float:
    """Return the largest absolute rounding error of the subnormal numbers of a dtype."""
    return float(np.nextafter(dtype.type(0), dtype.type(1))) / 2


class _Floors:
    """Rounding errors of one case, propagated to its results.

    Attributes:
        half: the largest relative rounding error, half the spacing of the dtype.
        rounding: the standard deviation of the relative error of an element: rounding, and a sum in the working precision.
        subnormal: the largest absolute rounding error of subnormal numbers.
        approximate: the relative error of approximate functions.
        of_scores: the error of each score.
        of_derivative: the error of the derivative of each score by the scaled product of q and k.
        of_stats: the error of L.
    """

    def __init__(self, inputs: Inputs, truth: Results) -> None:
        self.inputs, self.truth, case = inputs, truth, inputs.case
        dtype, fp8 = dtype_of(case.dtype), FORMATS.get(case.options.get("fp8", ""))
        work = self.work = spacing(np.float64) if case.dtype == "float64" else SINGLE
        self.half = (fp8.spacing if fp8 else spacing(dtype)) / 2
        self.rounding = self.half / 3**0.5 + work * max(case.sq, case.skv, 1) ** 0.5 / 4
        self.subnormal = fp8.smallest / FP8_SCALE / 2 if fp8 else _subnormal(dtype)
        self.keep = np.asarray(inputs.keep)
        norms = _norms(inputs.q) * _norms(inputs.k).swapaxes(-1, -2)
        p = self.p = truth.p
        scores = np.where(p > 0, np.abs(truth.scores), 0)
        is_approximate = "softcap" in case.options or case.options.get("score_mod", ("",))[0] in APPROXIMATE_FUNCTIONS
        self.approximate = APPROXIMATE * (case.engine == "gpu" and is_approximate)
        amplification = np.maximum(1, np.abs(truth.score_derivative)) if case.backward or "jvp" in case.options else 1.0
        self.of_scores = 4 * work * abs(inputs.scale) * norms * amplification + 4 * work * scores
        #: The relative error of q times a scale for each head, which is rounded to the dtype.
        self.of_product = self.half * ("head_scales" in case.options)
        self.of_scores += self.of_product * abs(inputs.scale) * norms
        if fp8 and case.engine == "gpu":
            self.of_scores += FP8_SUM * abs(inputs.scale) * norms
        self.of_scores += self.approximate * np.minimum(scores, _MAX_APPROXIMATE_SCORE)
        derivative = np.asarray(truth.score_derivative)
        self.is_function = "softcap" in case.options or "score_mod" in case.options
        self.of_derivative = truth.score_curvature * self.of_scores + truth.difference_error
        self.of_derivative = self.of_derivative + 4 * work * (1 + np.abs(derivative)) * self.is_function
        self.of_stats = work * np.where(np.isfinite(truth.stats), np.abs(truth.stats), 0)[..., None]

    def all(self) -> dict[str, float]:
        """Return the floor of every result of the case."""
        values, p = self.truth.values, self.p
        weights = (self.keep * (p * (self.rounding + self.of_scores) + self.subnormal * (p > 0))) ** 2
        of_sums = self.work * p.shape[-1] ** 0.5 / 4  # of partial sums that are as large as the result
        of_out = np.sqrt(weights @ self.inputs.v**2 + (of_sums * ((p * self.keep) @ self.inputs.v)) ** 2)
        of_rows = (p * self.of_scores).sum(axis=-1)
        of_attended = _finite_max(self.of_scores[p > 0])
        floors = {
            "out": DEVIATIONS * _finite_max(of_out),
            "stats": 2 * _finite_max(of_rows) + 4 * self.work * _max_abs(values["stats"]),
            "max": 2 * of_attended + 4 * self.work * _max_abs(values["max"]),
            "sum_exp": 8 * (of_attended + self.work) * max(1.0, _max_abs(values["sum_exp"])),
        }
        if self.inputs.case.backward:
            floors |= self._gradients(of_out)
        if "jvp" in self.inputs.case.options:
            floors |= self._derivative()
        if "weight_sums" in self.inputs.case.options:
            terms = (p * (2 * self.of_scores + 4 * self.of_stats + 4 * self.work)).sum(axis=-2)
            floors["weights"] = _finite_max(terms.sum(axis=2)) + 8 * self.work * _max_abs(values["weights"])
        if "weight_entropy" in self.inputs.case.options:
            # Each logarithm, cuDNN's and the merge's of split keys, has a relative error of 2^-22 (H200: 6.1 epsilons in all).
            floors["entropy"] = self._entropy(2 * _finite_max(of_rows) + 8 * self.work * _max_abs(values["stats"]))
        for name in ("out", "dq", "dk", "dv", "jvp"):
            if name in floors:
                floors[name] += 2 * self.half * _max_abs(values[name])
        for name in {"dq", "dk", "dv"} & floors.keys():  # the results are rounded, with a block mask also their terms
            terms = 1 + ("block_mask" in self.inputs.case.options) * max(p.shape[-2:]) / _BLOCK
            floors[name] += DEVIATIONS * self.subnormal * (terms / 3) ** 0.5
        if "fp8" in self.inputs.case.options:
            floors["out"] += 2 * self.subnormal  # of the output
            if self.inputs.case.paged:  # the results of chunks are rounded before they are merged
                floors["out"] += 2 * self.half * _max_abs((self.keep * p) @ np.abs(self.inputs.v))
        return floors

    def _entropy(self, of_stats: float) -> float:
        """Return the floor of the entropy: the errors of L, of the mean score (that is, of the mean key), and of the sink."""
        inputs, p = self.inputs, self.p
        weights = (p * (self.rounding + self.of_scores) + self.subnormal * (p > 0)) ** 2
        of_keys = weights @ inputs.k**2 + (2 * self.half * (p @ inputs.k)) ** 2 + self.subnormal**2
        of_mean = abs(inputs.scale) * np.sqrt((of_keys * inputs.q**2).sum(axis=-1))
        magnitude = abs(inputs.scale) * np.abs(inputs.q * (p @ inputs.k)).sum(axis=-1)
        of_sink = 0.0  # its weight, exp(sink - L), has the relative error of_stats
        if "sinks" in inputs.case.options:
            sinks = inputs.expand_heads(inputs.data.arrays["sinks"])
            sinks = np.where(np.isneginf(sinks), 0, np.abs(sinks))
            of_sink = (of_stats + 4 * self.work) * _finite_max(self.truth.sink_weight * sinks)
        return of_stats + of_sink + DEVIATIONS * _finite_max(of_mean) + 4 * self.work * (1 + _finite_max(magnitude))

    def _gradients(self, of_out: Array) -> dict[str, float]:
        """Return the floors of the gradients, from the standard deviation of the error of the output."""
        inputs, p, keep, ds = self.inputs, self.p, self.keep, np.abs(self.truth.ds)
        derivative = np.abs(np.asarray(self.truth.score_derivative)) + self.approximate
        out, abs_dout = np.abs((p * keep) @ inputs.v), np.abs(inputs.dout)
        of_delta = np.sqrt((abs_dout**2 * (of_out + self.rounding * out) ** 2).sum(axis=-1, keepdims=True))
        of_delta = of_delta + 4 * self.work * (abs_dout * out).sum(axis=-1, keepdims=True)
        size = np.abs(inputs.dstats)  # the gradient of L is rounded to two numbers of the dtype
        of_delta = of_delta + ((2 * self.half) ** 2 + 4 * self.work) * size + self.subnormal * (size > 0)
        of_dp = 4 * self.work * _norms(inputs.dout) * _norms(inputs.v).swapaxes(-1, -2) * keep
        of_p = 2 * self.of_scores + 2 * self.of_stats  # relative
        of_element = ds * (self.rounding + self.approximate + of_p + self.of_product) + p * of_dp + self.subnormal * (p > 0)
        of_dproduct = of_element * derivative + ds * self.of_derivative
        if self.is_function:  # dS times the derivative is also rounded; tiny products become 0
            of_dproduct = of_dproduct + np.minimum(self.subnormal, ds * derivative)
        of_ds = np.sqrt(of_dproduct**2 + (p * of_delta * derivative) ** 2)
        of_weight = keep * (p * (self.rounding + of_p) + self.subnormal * (p > 0))
        # The error of delta is common to a row, so its terms of dq add up.
        dq = np.sqrt(of_dproduct**2 @ inputs.k**2) + np.abs((p * derivative) @ inputs.k) * of_delta
        dk = np.sqrt((of_ds**2).swapaxes(-1, -2) @ inputs.q**2).sum(axis=2)
        dv = np.sqrt((of_weight**2).swapaxes(-1, -2) @ inputs.dout**2).sum(axis=2)
        scale = _max_abs(np.asarray(inputs.scale)) * DEVIATIONS
        floors = {"dq": scale * _finite_max(dq), "dk": scale * _finite_max(dk), "dv": DEVIATIONS * _finite_max(dv)}
        drift = _max_abs(self.of_stats + self.of_scores * (p > 0))
        for name in ("dq", "dk", "dv"):
            floors[name] += 2 * drift * _max_abs(self.truth.values[name])
        for name in ("dq", "dk"):
            floors[name] += 2 * self.of_product * _max_abs(self.truth.values[name])
        if "dscale" in self.truth.values:  # the errors of a row add up
            product = np.abs((self.truth.ds * np.asarray(self.truth.score_derivative)) @ inputs.k)
            of_rows = (np.abs(inputs.q) * (dq + (2 * self.half + 2 * drift) * product + self.subnormal)).sum(axis=-1)
            floors["dscale"] = DEVIATIONS * float(np.sqrt((of_rows**2).sum(axis=(0, 3))).max(initial=0))
            floors["dscale"] += 4 * SINGLE * float((np.abs(inputs.q) * product).sum(axis=(0, 3, 4)).max(initial=0))
        of_terms = 2 * (of_element + p * of_delta) + 2 * self.half * ds  # may be accumulated in 16 bits
        return floors | self._sums(of_terms, of_delta, ds)

    def _derivative(self) -> dict[str, float]:
        """Return the floors of the derivatives in the direction of the tangents, of the output and of the log-sum-exp.

        The means are products of rounded arrays, or rounded themselves; they are multiplied by the output.
        """
        inputs, truth, p, keep = self.inputs, self.truth, self.p, self.keep
        dq, dk, dv = (inputs.tangent(name) for name in "qkv")
        out, ds, mean = np.abs((p * keep) @ inputs.v), np.abs(truth.dscores), np.abs(truth.mean)
        of_p = self.rounding + self.approximate + 2 * self.of_scores + 2 * self.of_stats  # relative
        norms = _norms(dq) * _norms(inputs.k).swapaxes(-1, -2) + _norms(inputs.q) * _norms(dk).swapaxes(-1, -2)
        of_ds = 4 * self.work * abs(inputs.scale) * norms * np.abs(np.asarray(truth.score_derivative))
        of_ds = of_ds + abs(inputs.scale) * norms * self.of_derivative
        squares = sum(
            (x**2 * (self.rounding**2 * (p @ y) ** 2 + (p * of_p) ** 2 @ y**2)).sum(axis=-1, keepdims=True)
            for x, y in ((dq, inputs.k), (inputs.q, dk))
        )
        of_mean = abs(inputs.scale) * np.sqrt(squares) + np.sqrt(((p * (ds * of_p + of_ds)) ** 2).sum(axis=-1, keepdims=True))
        of_mean = of_mean + (self.rounding + 2 * self.of_stats) * mean
        of_element = keep * (p * ((ds + mean) * of_p + of_ds) + self.subnormal * (p > 0))
        of_weight = keep * (p * of_p + self.subnormal * (p > 0))
        of_terms = np.sqrt(of_element**2 @ inputs.v**2 + of_weight**2 @ dv**2) + of_mean * out
        drift = _max_abs(self.of_stats + self.of_scores * (p > 0))
        terms = _max_abs(mean * out) + _max_abs((p * keep) @ dv)
        found = DEVIATIONS * _finite_max(of_terms) + (2 * self.half + 2 * drift) * terms
        return {"jvp": found, "dstats": DEVIATIONS * _finite_max(of_mean) + (2 * self.half + 2 * drift) * _max_abs(mean)}

    def _sums(self, of_terms: Array, of_delta: Array, ds: Array) -> dict[str, float]:
        """Return the floors of sums of dS, from the errors of each term and of rowsum(dO * O), and the magnitudes of dS."""
        inputs, values, floors = self.inputs, self.truth.values, {}
        for option, row in ROWS.items():
            if (name := f"d{option}") in values and row.slope is not None:
                array = inputs.data.arrays[option]
                floors[name] = _finite_max(inputs.sum_to_shape(of_terms * np.abs(row.slope(inputs)), array.shape))
                floors[name] += spacing(array.dtype) * _max_abs(values[name]) + _subnormal(array.dtype)
        if "dsinks" in values:
            weight = self.truth.sink_weight
            delta = (inputs.dout * ((self.p * self.keep) @ inputs.v)).sum(axis=-1, keepdims=True) - inputs.dstats
            of_dsinks = DEVIATIONS * np.sqrt(((weight * of_delta) ** 2).sum(axis=(0, 3, 4)))
            of_rows = (self.p * self.of_scores).sum(axis=-1, keepdims=True)  # an error of the scores changes L
            of_weight = (weight * np.abs(delta) * (4 * SINGLE + 2 * self.of_stats + 2 * of_rows)).sum(axis=(0, 3, 4))
            floors["dsinks"] = _finite_max(of_dsinks + of_weight)
        for name, derivative in self.truth.tensor_derivatives.items():
            array, key = inputs.data.tensors[name], f"tensors[{name!r}]"
            if key in values:
                of_elements = of_terms * np.abs(derivative) + ds * self.of_derivative
                floors[key] = _finite_max(inputs.sum_to_tensor(of_elements, score_tensors(inputs)[name], array.shape))
                floors[key] += (spacing(array.dtype) + 1e-8) * _max_abs(values[key]) + _subnormal(array.dtype)
        return floors


def _norms(x: Array) -> Array:
    return np.asarray(np.linalg.norm(x, axis=-1, keepdims=True))


def _max_abs(array: Array) -> float:
    """Return the largest finite magnitude."""
    return float(np.abs(np.where(np.isfinite(array), array, 0)).max(initial=0.0))


def _finite_max(array: Array) -> float:
    """Return the maximum, with NaN as 0 and infinities as the largest finite numbers."""
    return float(np.max(np.nan_to_num(array), initial=0.0))


def exact_elements(inputs: Inputs, truth: Results) -> dict[str, Array]:
    """Masks of the elements that must equal the truth: fully masked rows, keys that no query attends to, and the padding."""
    attended, case = truth.attended, inputs.case
    rows = ~np.asarray(attended.any(axis=-1, keepdims=True))
    columns = ~np.asarray(attended.any(axis=(2, 3)))[..., None]
    dim = max(case.d, case.dv)
    wide_rows = np.broadcast_to(rows, (*rows.shape[:-1], dim))
    wide_columns = np.broadcast_to(columns, (*columns.shape[:-1], dim))
    queries = np.asarray(inputs.to_call_shape(inputs.merge_heads(wide_rows), 0, 1.0) > 0)
    keys = np.asarray(inputs.to_call_shape(wide_columns, 1, 1.0) > 0)
    of_heads = inputs.merge_heads(~np.asarray(attended.any(axis=-2)))
    unused = columns[..., 0] if case.options.get("weight_sums") == "key heads" else of_heads
    masked = inputs.to_call_shape(inputs.merge_heads(rows[..., 0]), 0, 1.0) > 0
    exact = {
        "dstats": masked,
        "weights": np.asarray(inputs.to_call_shape(unused, 1, 1.0) > 0), "out": queries[: case.dv], "jvp": queries[: case.dv],
        "dq": queries[: case.d], "dk": keys[: case.d], "dv": keys[: case.dv],
    }  # fmt: skip
    if "sinks" not in case.options:
        exact |= dict.fromkeys(("stats", "max", "sum_exp", "entropy"), masked)
    return exact
