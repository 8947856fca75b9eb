r"""How near a result must be to the truth: flash-attention's rule, with a floor of propagated rounding errors.

An error is accepted up to :data:`FACTOR` times that of the naive computation in the same precision, plus a floor. The naive
error of a few numbers may be small by luck, so the floor is what independent roundings do, to first order: weights and dS to
the dtype of the arrays, scores and L in float32 (Higham and Mary 2019, "A new approach to probabilistic rounding error
analysis"). A result that must be exact (0 or -inf where a query attends to nothing, and in the padding) has no tolerance.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..cases.data import dtype_of
from ..cases.functions import function_of
from .oracle import Array, Problem, Results, gathered, summed

#: How many times the naive computation's error is accepted.
FACTOR = 2.0
#: Standard deviations of the propagated errors that are accepted.
DEVIATIONS = 4.0
#: float32's relative spacing.
SINGLE = float(np.finfo(np.float32).eps)
#: What the GPU's approximate tanh and its like may be off by, relative to the score.
APPROXIMATE = 2.0**-10
#: Score functions that are made of those.
CURVED = ("tanh", "log1p", "sigmoid", "sin", "fading", "bias_all")


def spacing(dtype: Any) -> float:
    """The relative spacing of a dtype."""
    return float(np.spacing(np.dtype(dtype).type(1)))


def worst(a: Array, b: Array) -> float:
    """The largest difference; equal infinities differ by nothing, and a NaN is infinitely far from everything."""
    return float(gaps(a, b).max(initial=0.0))


def gaps(a: Array, b: Array) -> Array:
    """The difference of each pair of elements, as :func:`worst` takes it."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.where(a == b, 0.0, np.abs(a - b))
    return np.where(np.isnan(gap), np.inf, gap)


def floors(problem: Problem, truth: Results) -> dict[str, float]:
    """What rounding alone may do to each result."""
    with np.errstate(invalid="ignore", over="ignore"):
        return _Floors(problem, truth).all()


class _Floors:
    """The errors of one case, propagated; names as in the oracle."""

    def __init__(self, problem: Problem, truth: Results) -> None:
        self.problem, self.truth, case = problem, truth, problem.case
        dtype = dtype_of(case.dtype)
        work = self.work = spacing(np.float64) if case.dtype == "float64" else SINGLE
        #: the largest rounding error, relative; its standard deviation, with that of sums; and what subnormal numbers add
        self.half = spacing(dtype) / 2
        self.rounding = self.half / 3**0.5 + work * max(case.sq, case.skv, 1) ** 0.5 / 4
        self.subnormal = float(np.nextafter(dtype.type(0), dtype.type(1))) / 2
        self.q, self.k, self.v, self.dout = problem.q, problem.k, problem.v, problem.dout
        norms = _norm(self.q) * _norm(self.k).swapaxes(-1, -2)
        p = self.p = truth.p
        scores = np.where(p > 0, np.abs(truth.scores), 0)
        bent = "softcap" in case.options or case.options.get("score_mod", ("",))[0] in CURVED
        self.approximate = APPROXIMATE * (case.engine == "gpu" and bent)
        steep = np.maximum(1, np.abs(truth.slope)) if case.backward else 1.0
        #: the error of each score, and of L
        self.of_scores = 4 * work * abs(problem.scale) * norms * steep + 4 * work * scores
        self.of_scores += self.approximate * np.minimum(scores, 60)
        self.of_stats = SINGLE * np.where(np.isfinite(truth.stats), np.abs(truth.stats), 0)[..., None]

    def all(self) -> dict[str, float]:
        """The floor of every result of the case."""
        values, p, kept = self.truth.values, self.p, np.asarray(self.problem.kept)
        weights = (kept * (p * (self.rounding + self.of_scores) + self.subnormal * (p > 0))) ** 2
        of_out = np.sqrt(weights @ self.v**2)
        row = (p * self.of_scores).sum(axis=-1)
        of_rows = 2 * _most(row) + 4 * SINGLE * _size(values["stats"])
        found = {
            "out": DEVIATIONS * _most(of_out),
            "stats": of_rows,
            "max": 2 * _most(self.of_scores[p > 0]) + 4 * SINGLE * _size(values["max"]),
        }
        found["sum_exp"] = 8 * (_most(self.of_scores[p > 0]) + SINGLE) * max(1.0, _size(values["sum_exp"]))
        if self.problem.case.backward:
            found |= self.gradients(of_out, kept)
        for name in ("out", "dq", "dk", "dv"):
            if name in found:
                found[name] += 2 * self.half * _size(values[name])
        return found

    def gradients(self, of_out: Array, kept: Array) -> dict[str, float]:
        """The floors of the gradients."""
        problem, p, ds = self.problem, self.p, np.abs(self.truth.ds)
        slope = np.abs(np.asarray(self.truth.slope)) + self.approximate
        scale = abs(problem.scale)
        out = np.abs((p * kept) @ self.v)
        size = np.abs(self.dout)
        mean = np.sqrt((size**2 * (of_out + self.rounding * out) ** 2).sum(axis=-1, keepdims=True))
        mean = mean + 4 * self.work * (size * out).sum(axis=-1, keepdims=True)
        of_product = 4 * self.work * _norm(self.dout) * _norm(self.v).swapaxes(-1, -2) * kept
        weight = 2 * self.of_scores + 2 * self.of_stats
        single = ds * (self.rounding + self.approximate + weight) + p * of_product + self.subnormal * (p > 0)
        of_ds = np.sqrt(single**2 + (p * mean) ** 2) * slope
        dq = np.sqrt((single * slope) ** 2 @ self.k**2) + np.abs((p * slope) @ self.k) * mean
        dk = np.sqrt((of_ds**2).swapaxes(-1, -2) @ self.q**2).sum(axis=2)
        of_p = kept * (p * (self.rounding + weight) + self.subnormal * (p > 0))
        dv = np.sqrt((of_p**2).swapaxes(-1, -2) @ self.dout**2).sum(axis=2)
        found = {"dq": scale * DEVIATIONS * _most(dq), "dk": scale * DEVIATIONS * _most(dk), "dv": DEVIATIONS * _most(dv)}
        drift = _size(self.of_stats + self.of_scores * (p > 0))
        for name in ("dq", "dk", "dv"):
            found[name] += 2 * drift * _size(self.truth.values[name])
        of_parts = 2 * (single + p * mean) + 2 * self.half * ds  # may be added up in 16 bits
        if "dbias" in self.truth.values:
            bias = problem.data.arrays["bias"]
            found["dbias"] = _most(summed(problem, of_parts, bias.shape))
            found["dbias"] += spacing(bias.dtype) * _size(self.truth.values["dbias"])
        if "dsinks" in self.truth.values:
            sink = self.truth.sink
            d = (self.dout * ((p * kept) @ self.v)).sum(axis=-1, keepdims=True)
            parts = DEVIATIONS * np.sqrt(((sink * mean) ** 2).sum(axis=(0, 3, 4)))
            found["dsinks"] = _most(parts + (sink * np.abs(d) * (4 * SINGLE + 2 * self.of_stats)).sum(axis=(0, 3, 4)))
        for name, part in self.truth.parts.items():
            array, key = problem.data.tensors[name], f"tensors[{name!r}]"
            if key in self.truth.values:
                axes = function_of("score_mod", problem.case.options["score_mod"][0]).tensors[name]
                found[key] = _most(gathered(problem, of_parts * np.abs(part), axes, array.shape))
                found[key] += (spacing(array.dtype) + 1e-8) * _size(self.truth.values[key])
        return found


def _norm(x: Array) -> Array:
    return np.asarray(np.linalg.norm(x, axis=-1, keepdims=True))


def _size(array: Array) -> float:
    """The largest finite magnitude."""
    return float(np.abs(np.where(np.isfinite(array), array, 0)).max(initial=0.0))


def _most(array: Array) -> float:
    return float(np.max(np.nan_to_num(array), initial=0.0))


def exact_places(problem: Problem, truth: Results) -> dict[str, Array]:
    """Where results must be exactly the truth: what attends to nothing, what nothing attends to, and the padding."""
    seen, case = truth.seen, problem.case
    rows = ~np.asarray(seen.any(axis=-1, keepdims=True))
    columns = ~np.asarray(seen.any(axis=(2, 3)))[..., None]
    of_rows = np.broadcast_to(rows, (*rows.shape[:-1], max(case.d, case.dv)))
    of_columns = np.broadcast_to(columns, (*columns.shape[:-1], max(case.d, case.dv)))
    queries = np.asarray(problem.unpadded(problem.joined(of_rows), 0, 1.0) > 0)
    keys = np.asarray(problem.unpadded(of_columns, 1, 1.0) > 0)
    places = {"out": queries[: case.dv], "dq": queries[: case.d], "dk": keys[: case.d], "dv": keys[: case.dv]}
    empty = problem.unpadded(problem.joined(np.broadcast_to(rows[..., 0], rows.shape[:-1])), 0, 1.0) > 0
    if "sinks" not in case.options:
        places |= dict.fromkeys(("stats", "max", "sum_exp"), empty)
    return places


def compare(name: str, actual: Array, truth: Array, naive: Array, floor: float, exact: Array | None = None) -> str:
    """What is wrong with a result; empty where it is right."""
    if actual.shape != truth.shape:
        return f"{name} has shape {actual.shape}, expected {truth.shape}"
    gap = gaps(actual, truth)
    if exact is not None and (gap[exact] > 0).any():
        return f"{name} must be exactly {_at(truth, np.where(exact, gap, 0))}: {_first(actual, np.where(exact, gap, 0))}"
    allowed = FACTOR * worst(naive, truth) + floor
    if not np.isfinite(allowed):
        allowed = FACTOR * worst(np.where(np.isfinite(naive), naive, truth), truth) + floor
    if (error := float(gap.max(initial=0.0))) <= allowed:
        return ""
    first = np.where(gap > allowed, gap, 0)
    wrong = int((gap > allowed).sum())
    return (
        f"{name} has an error of {error:.3g}, allowed {allowed:.3g}; {wrong} of {gap.size} elements are wrong: "
        f"{_first(actual, first)}, expected {_at(truth, first)}"
    )


def _index(gap: Array) -> tuple[int, ...]:
    """The first wrong element in Fortran order."""
    flat = int(np.argmax(gap.ravel(order="F") > 0))
    return tuple(int(i) for i in np.unravel_index(flat, gap.shape, order="F"))


def _first(actual: Array, gap: Array) -> str:
    index = _index(gap)
    return f"the first is element {index}, {float(actual[index]):.6g}"


def _at(truth: Array, gap: Array) -> str:
    return f"{float(truth[_index(gap)]):.6g}"
