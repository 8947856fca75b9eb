"""The options that change scores or weights by a number or an array: one row each, which all parts of ``check`` read.

It uses no other code of the package, as the oracle.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .formats import LARGEST, dtype_of


class Row(NamedTuple):
    """An option of a case with the same name as the call's option.

    Attributes:
        draw: draws the literal of a case (:mod:`.case`) with a :class:`.sampler.Sampler`.
        simplest: the simplest literal.
        array: builds the array of a case from its literal; None if the literal is passed to the call.
        saved: returns the literal for a problem of a plan cache; None if the problem does not have the option.
        terms: returns arguments of :func:`cupy_sdpa.reference.modified`, from the inputs of the oracle, the literal and the
            dtype to compute in; None if the option does not change the scores.
        slope: returns the derivative of the scores by the array, from the inputs of the oracle, for its gradient; None if it
            has none, or another formula.
    """

    draw: Callable[[Any], Any]
    simplest: Any
    array: Callable[[Any, np.random.Generator, Any], Any] | None
    saved: Callable[[Any], Any]
    terms: Callable[[Any, Any, np.dtype[Any]], dict[str, Any]] | None = None
    slope: Callable[[Any], Any] | None = None


def random_mask(rng: np.random.Generator, case: Any, axes: str, p: float) -> Any:
    """Return a boolean array that is True with probability p."""
    return np.asfortranarray(rng.random(score_shape(case, axes)) < p)


def score_shape(case: Any, axes: str) -> tuple[int, ...]:
    """Return the shape of an array that broadcasts to ``(Skv, Sq, Hq, B)``, from axes such as ``"k1h1"``."""
    full = dict(zip("kqhb", (case.skv, case.sq, case.hq, case.b), strict=True))
    return tuple(1 if axis == "1" else full[axis] for axis in axes)


def axes_of(problem: Any, spec: Any) -> str:
    """Return the axes of an array that is broadcast to the scores, with 1 where it is broadcast, such as ``"k1h1"``."""
    _, _, hq, _, sq, skv, b = problem.sizes
    pairs = zip("kqhb", spec.shape, (skv, sq, hq, b), strict=True)
    return "".join(letter if length > 1 or full <= 1 else "1" for letter, length, full in pairs)


def bias_repeats(case: Any) -> int:
    """Return how many consecutive batch items share a bias: all of them if the bias has no batch axis."""
    axes, *_ = case.options["bias"]
    return case.b if axes[3] == "1" else math.gcd(case.options["bias_repeats"], case.b)


def _draw_repeats(sampler: Any) -> int:
    """Draw how many batch items share a bias, whose batch axis then has one element for each group of them."""
    b, (axes, *others) = sampler.sizes["b"], sampler.options["bias"]
    repeats = int(sampler.pick(*(n for n in range(1, max(b, 1) + 1) if b % n == 0)))
    sampler.options["bias"] = (f"{axes[:3]}{sampler.pick('b', 'b', 'b', '1')}", *others)
    return repeats


def _saved_repeats(problem: Any) -> int | None:
    batch, groups = problem.sizes[6], problem.bias.shape[3] if problem.bias else 1
    return None if groups in (1, batch) else batch // groups


def _draw_bias(sampler: Any) -> Any:
    axes = sampler.axes()
    dtype = sampler.pick("float16", "bfloat16", "float32", *(["float64"] if sampler.engine == "cpu" else []))
    return axes, dtype, sampler.pick("normal", "normal", "normal", "inf", "inf_rows", "min", "min_rows", "low", "low_rows")


def _mask_array(case: Any, rng: np.random.Generator, value: Any) -> Any:
    """Return the option ``mask``."""
    axes, kind = value
    shape = score_shape(case, axes)
    if kind in ("none", "all"):
        return np.full(shape, kind == "all", order="F")
    mask = random_mask(rng, case, axes, 0.7)
    axis = {"rows": 0, "keys": 1}.get(kind)
    if axis is not None:  # mask whole rows or whole columns
        mask &= rng.random([1 if i == axis else n for i, n in enumerate(shape)]) < 0.6
    return np.asfortranarray(mask)


def _bias_array(case: Any, rng: np.random.Generator, value: Any) -> Any:
    """Return the option ``bias``."""
    axes, dtype, kind = value
    shape = score_shape(case, axes)
    if "bias_repeats" in case.options and axes[3] == "b":
        shape = (*shape[:3], shape[3] // bias_repeats(case))
    bias = rng.standard_normal(shape).astype(dtype_of(dtype))
    if kind != "normal":
        finite = -2e6 if kind.startswith("low") and dtype != "float16" else -LARGEST[dtype]
        masked = -np.inf if kind.startswith("inf") else finite
        mask_shape = [1 if i == 0 else n for i, n in enumerate(shape)] if kind.endswith("rows") else shape
        bias = np.where(rng.random(mask_shape) < 0.3, np.array(masked, bias.dtype), bias)
    return np.asfortranarray(bias)


def _alibi_slopes(case: Any, rng: np.random.Generator, kind: str) -> Any:
    """Return the option ``alibi_slopes``: the slopes of the ALiBi paper, or random ones of which some are 0."""
    usual = 2.0 ** -(8 * np.arange(1, case.hq + 1) / max(case.hq, 1))
    slopes = usual if kind == "usual" else rng.random(case.hq) * (rng.random(case.hq) < 0.8)
    return slopes.astype(np.float32)


def _sinks(case: Any, rng: np.random.Generator, kind: str) -> Any:
    """Return the option ``sinks``."""
    return (rng.standard_normal(case.hq) + 5 * (kind == "high")).astype(np.float32)


def _of_bias(inputs: Any, value: Any, work: np.dtype[Any]) -> dict[str, Any]:
    bias = inputs.data.arrays["bias"]
    if "bias_repeats" in inputs.case.options:
        bias = np.repeat(bias, bias_repeats(inputs.case), axis=3)
    with np.errstate(over="ignore"):  # finfo.min of float64 becomes -inf
        return {"bias": inputs.expand_scores(bias).astype(work)}


def _of_slopes(inputs: Any, value: Any, work: np.dtype[Any]) -> dict[str, Any]:
    distance = np.abs(inputs.diagonal() - np.arange(inputs.case.skv)).astype(work)
    return {"penalty": inputs.expand_heads(inputs.data.arrays["alibi_slopes"]).astype(work) * distance}


#: The rows by the names of the options.
ROWS = {
    "mask": Row(
        lambda s: (s.axes(), s.pick("random", "random", "rows", "keys", "none", "all")), ("kq11", "random"), _mask_array,
        lambda p: p.mask and (axes_of(p, p.mask), "random"),
    ),
    "bias": Row(
        _draw_bias, ("kqh1", "float32", "normal"), _bias_array,
        lambda p: p.bias and (axes_of(p, p.bias), p.bias.dtype, "normal"), _of_bias, lambda inputs: 1.0,
    ),
    "alibi_slopes": Row(
        lambda s: s.pick("usual", "random"), "usual", _alibi_slopes, lambda p: p.alibi_slopes and "usual", _of_slopes
    ),
    "softcap": Row(
        lambda s: s.pick(0.5, 2.0, 15.0, 50.0), 2.0, None, lambda p: 15.0 if p.settings.softcap else None,
        lambda inputs, value, work: {"softcap": work.type(value)},
    ),
    "sinks": Row(lambda s: s.pick("normal", "high"), "normal", _sinks, lambda p: p.sinks and "normal"),
    "bias_repeats": Row(_draw_repeats, 2, None, _saved_repeats),
}  # fmt: skip
