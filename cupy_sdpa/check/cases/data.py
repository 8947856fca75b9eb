"""The values of a case's arrays, on the host: two sets of the same shapes, which take turns in the same memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from .case import Case
from .functions import axes_lengths, function_of

#: The largest finite number of each dtype.
LARGEST = {"float16": 65504.0, "bfloat16": 2.0**128 * (1 - 2.0**-8), "float32": 2.0**128 * (1 - 2.0**-24)}
LARGEST["float64"] = float(np.finfo(np.float64).max)
#: Options of the call that are handed over as they are.
PLAIN = ("scale", "causal", "window", "softcap", "bucket", "max_workspace")


def dtype_of(name: str) -> np.dtype[Any]:
    """A dtype by its name.

    >>> dtype_of("bfloat16").itemsize
    2
    """
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


@dataclass
class Data:
    """One set of values.

    Attributes:
        case: what they are for.
        arrays: what the call is given, by the names of its arguments: q, k, v, dout in logical shape, with NaN where nothing
            may be read, and the arrays of the options.
        tensors: the arrays of the functions, by name.
        lengths: of the queries and the keys of each batch entry, as the engine may use them.
        begins: where packed sequences begin, of queries and keys; None where they are not packed.
        keep: which weights dropout keeps, ``(Skv, Sq, Hq, B)``; filled in when the engine has been asked.
    """

    case: Case
    arrays: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[Any, Any] = (None, None)
    begins: tuple[Any, Any] | None = None
    keep: Any = None


def build(case: Case, which: int) -> Data:
    """The set of values with a number, 0 or 1."""
    data = Data(case)
    rng = np.random.default_rng([case.seed, which])
    _lay_out_sequences(data, which)
    data.arrays |= {name: _large(data, rng, name) for name in ("q", "k", "v", "dout")}
    for name, make in _ARRAYS.items():
        if name in case.options:
            data.arrays[name] = make(case, np.random.default_rng([case.seed, which, len(name)]), case.options[name])
    if "dropout" in case.options:
        _, how, seed, offset = case.options["dropout"]
        if how == "mask":
            data.keep = data.arrays["dropout_mask"] = _mask_of(rng, case, "kqhb", 0.7)
        elif how == "array":
            data.arrays |= {"seed": np.array([seed + which]), "offset": np.array([offset])}
    for option in ("score_mod", "mask_mod"):
        if option in case.options:
            data.tensors |= _tensors(case, rng, option)
    return data


def _lengths(rng: np.random.Generator, kind: str, most: int, count: int, over: int = 0) -> Any:
    drawn = rng.integers(0, most + 1, count)
    drawn = np.where(rng.random(count) < 0.2, most + over, drawn)
    made: dict[str, Callable[[], Any]] = {
        "random": lambda: drawn,
        "some_zero": lambda: np.where(rng.random(count) < 0.5, 0, drawn),
        "zero": lambda: np.zeros(count),
        "full": lambda: np.full(count, most + over),
        "one": lambda: np.full(count, min(1, most)),
    }
    return made[kind]().astype(np.int32)


@functools.lru_cache(maxsize=8)
def _sequences(seed: int, which: int, packed: tuple[Any, ...], sizes: tuple[int, int, int]) -> tuple[Any, Any]:
    sq, skv, b = sizes
    rng = np.random.default_rng([seed, which, 77])
    of_queries, of_keys, _, _, over, _ = packed
    queries = _lengths(rng, of_queries, sq, b, over)
    keys = np.minimum(queries, skv) if of_keys == "same" else _lengths(rng, of_keys, skv, b, over)
    return queries, keys


def _lay_out_sequences(data: Data, which: int) -> None:
    """Lengths, or where packed sequences begin; both sets of values have arrays of the same total."""
    case, sides = data.case, ("q", "kv")
    if "packed" in case.options:
        *_, before, _, _, dtype = packed = case.options["packed"]
        lengths = _sequences(case.seed, which, packed, (case.sq, case.skv, case.b))
        begins = [np.concatenate([[before], before + np.cumsum(own)]).astype(dtype) for own in lengths]
        data.begins = (begins[0], begins[1])
        data.arrays |= {f"cu_seqlens_{side}": array for side, array in zip(sides, begins, strict=True)}
        data.lengths = (np.minimum(lengths[0], case.sq), np.minimum(lengths[1], case.skv))
        return
    rng = np.random.default_rng([case.seed, which, 77])
    found: list[Any] = []
    for side, most in zip(sides, (case.sq, case.skv), strict=True):
        kind = case.options.get(f"seq_lens_{side}")
        own = None if kind is None else _lengths(rng, kind, most, case.b)
        if own is not None:
            data.arrays[f"seq_lens_{side}"] = own
        found.append(own)
    data.lengths = (found[0], found[1])


def total(case: Case, side: int) -> int:
    """Positions of a packed array of queries (0) or keys (1)."""
    _, _, before, after, _, _ = packed = case.options["packed"]
    sums = [_sequences(case.seed, which, packed, (case.sq, case.skv, case.b))[side].sum() for which in (0, 1)]
    return int(before + max(sums) + after)


def shape_of(case: Case, name: str) -> tuple[int, ...]:
    """The shape of q, k, v, of their gradients, or of out, dout and stats."""
    of_keys = name in ("k", "v", "dk", "dv")
    heads, length = (case.hkv, case.skv) if of_keys else (case.hq, case.sq)
    dim = case.dv if name in ("v", "dv", "out", "dout") else case.d
    if "packed" in case.options:
        length = total(case, int(of_keys))
        return (heads, length) if name == "stats" else (dim, heads, length)
    return (length, heads, case.b) if name == "stats" else (dim, heads, length, case.b)


def _large(data: Data, rng: np.random.Generator, name: str) -> Any:
    """An array of positions: random where there is a sequence, NaN where there is none."""
    case, side = data.case, int(name in "kv")
    array = rng.standard_normal(shape_of(case, name), np.float32)
    own = data.lengths[side]
    if data.begins is not None:
        begins = data.begins[side]
        positions = np.arange(array.shape[2])
        inside = (positions[:, None] >= begins[:-1]) & (positions[:, None] < begins[:-1] + own)
        array = np.where(inside.any(axis=1), array, np.nan)
    elif own is not None:
        array = np.where(np.arange(array.shape[2])[:, None] < own, array, np.nan)
    return np.asfortranarray(array.astype(dtype_of(case.dtype)))


def _mask_of(rng: np.random.Generator, case: Case, axes: str, p: float) -> Any:
    return np.asfortranarray(rng.random(_broadcast(case, axes)) < p)


def _broadcast(case: Case, axes: str) -> tuple[int, ...]:
    full = dict(zip("kqhb", (case.skv, case.sq, case.hq, case.b), strict=True))
    return tuple(1 if axis == "1" else full[axis] for axis in axes)


def _mask(case: Case, rng: np.random.Generator, value: Any) -> Any:
    axes, kind = value
    shape = _broadcast(case, axes)
    if kind in ("none", "all"):
        return np.full(shape, kind == "all", order="F")
    drawn = _mask_of(rng, case, axes, 0.7)
    axis = {"rows": 0, "keys": 1}.get(kind)
    if axis is not None:  # whole rows, or whole columns
        drawn &= rng.random([1 if i == axis else n for i, n in enumerate(shape)]) < 0.6
    return np.asfortranarray(drawn)


def _bias(case: Case, rng: np.random.Generator, value: Any) -> Any:
    axes, dtype, kind = value
    shape = _broadcast(case, axes)
    drawn = rng.standard_normal(shape).astype(dtype_of(dtype))
    if kind != "normal":
        hidden = -np.inf if kind.startswith("inf") else -LARGEST[dtype]
        of = [1 if i == 0 else n for i, n in enumerate(shape)] if kind.endswith("rows") else shape
        drawn = np.where(rng.random(of) < 0.3, np.array(hidden, drawn.dtype), drawn)
    return np.asfortranarray(drawn)


def _slopes(case: Case, rng: np.random.Generator, kind: str) -> Any:
    usual = 2.0 ** -(8 * np.arange(1, case.hq + 1) / max(case.hq, 1))
    drawn = usual if kind == "usual" else rng.random(case.hq) * (rng.random(case.hq) < 0.8)
    return drawn.astype(np.float32)


_ARRAYS: dict[str, Callable[[Case, np.random.Generator, Any], Any]] = {
    "mask": _mask,
    "bias": _bias,
    "alibi_slopes": _slopes,
    "sinks": lambda case, rng, kind: (rng.standard_normal(case.hq) + 5 * (kind == "high")).astype(np.float32),
}


def _tensors(case: Case, rng: np.random.Generator, option: str) -> dict[str, Any]:
    """What a function reads."""
    name, dtype = case.options[option]
    function, made = function_of(option, name), {}
    for tensor, axes in function.tensors.items():
        shape = axes_lengths(axes, case.b, case.hq, case.sq, case.skv)
        drawn: Any = rng.random(shape) + 0.5
        if dtype == "bool":
            drawn = drawn < 1.1
        elif dtype.startswith("int"):
            drawn = rng.integers(-3, 4, shape)
        made[tensor] = np.array(drawn, dtype_of(dtype), order="F")
    return made


def call_options(case: Case, arrays: dict[str, Any], tensors: dict[str, Any], which: int) -> dict[str, Any]:
    """The options of the call, with arrays of the engine.

    Args:
        case: what is asked.
        arrays, tensors: as in :class:`Data`, on the engine.
        which: the set of values, which sets the seed of dropout.
    """
    names = ("mask", "bias", "alibi_slopes", "sinks", "seq_lens_q", "seq_lens_kv", "cu_seqlens_q", "cu_seqlens_kv")
    options = {name: case.options[name] for name in PLAIN if name in case.options}
    options |= {name: arrays[name] for name in names if name in arrays}
    if "packed" in case.options:
        options |= {"max_seqlen_q": case.sq, "max_seqlen_kv": case.skv}
    if "dropout" in case.options:
        options |= dropout_options(case, arrays, which)
    for option in ("score_mod", "mask_mod"):
        if option in case.options:
            options[option] = function_of(option, case.options[option][0]).call
    return options | ({"tensors": tensors} if tensors else {})


def dropout_options(case: Case, arrays: dict[str, Any], which: int) -> dict[str, Any]:
    """The options of dropout alone."""
    p, how, seed, offset = case.options["dropout"]
    if how == "mask":
        return {"dropout_p": p, "dropout_mask": arrays["dropout_mask"]}
    if how == "array":
        return {"dropout_p": p, "seed": arrays["seed"], "offset": arrays["offset"]}
    return {"dropout_p": p, "seed": seed + which, "offset": offset}
