"""Validate the arguments of a group's call, and describe them so that members can compare them."""

from __future__ import annotations

import numbers
import zlib
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from .. import Problem, Unsupported
from ..extend import (
    OPTIONS,
    Axes,
    Expected,
    ReadOptions,
    Recorded,
    View,
    check_arrays,
    cupy_runtime,
    numpy_dtype,
    read_forward,
    read_operands,
)
from .configuration import Configuration, Request
from .shards import ShardLayout

#: The offsets of whole packed sequences, which the host cuts into parts.
CU_SEQLENS = ("cu_seqlens_q", "cu_seqlens_kv")


class HostOffsets:
    """The offsets of packed sequences, which are read on the host: part of a call's key."""

    def __init__(self, value: Any) -> None:
        self.array = np.asarray(value)

    @classmethod
    def of(cls, value: Any) -> Any:
        """Return the offsets in a numpy array or a list; any other value itself."""
        return cls(value) if isinstance(value, (np.ndarray, list, tuple)) else value

    @property
    def _cache_key(self) -> tuple[str, bytes]:
        return str(self.array.dtype), self.array.tobytes()


def read_member_operands(
    arrays: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, View], ReadOptions]:
    """Call :func:`.read_operands` for a member, and remove ``compute_dtype`` and the offsets from the options.

    The offsets are for whole sequences; they are read where the sequences are cut.
    """
    passed = [name for name in CU_SEQLENS if options.get(name) is not None]
    stand_ins = dict.fromkeys(passed, arrays["q"])  # any array on the right device, because only its presence counts
    operands, views, read = read_operands(arrays, {**options, **stand_ins}, results=())
    for name in passed:
        del operands[name], views[name]
    return operands, views, read.without(*CU_SEQLENS).of_one_problem()


def check_engine(options: Mapping[str, Any]) -> None:
    """Raise Unsupported for ``engine="cupy"``."""
    if isinstance(engine := options.get("engine"), str) and engine == "cupy":
        raise Unsupported(
            "engine is 'cupy', which a group does not support: its members exchange keys while cuDNN computes. Omit engine: "
            "CuPy arrays then run on cuDNN, and numpy arrays on the CPU"
        )


def configure(
    rank: int, size: int, views: Mapping[str, View], read: ReadOptions, options: Mapping[str, Any], of: Request
) -> Configuration:
    """Validate a call's options and its arrays: q, k and v, and in the backward pass also dout, out and stats.

    ``options`` are the caller's options, and ``read`` are the options that :func:`read_member_operands` returned.

    Raises:
        TypeError, ValueError, Unsupported: as :func:`cupy_sdpa.attention`; and if arrays are not the member's part.
    """
    for name, option in OPTIONS.items():
        reason = option.refusal("ContextParallel")
        if reason is not None and option.is_passed(options.get(name)):
            raise Unsupported(f"{name} is passed, which a group does not support: {reason}")
    given = {name: views[name] for name in of.arrays}
    q, k, _ = (given[name] for name in "qkv")
    packed = any(options.get(name) is not None for name in CU_SEQLENS)
    for name, array in given.items():
        expected = (3 if packed else 4) - (name == "stats")
        if array.ndim != expected:
            raise ValueError(f"{name} has {array.ndim} dimensions {array.shape}; it needs {expected}")
        if name != "stats":
            Axes.check_strides(name, array)
    queries, keys = _packed_layouts(options, size) if packed else _dense_layouts(q.shape[2], k.shape[2], size, of)
    for name, layout in (("q", queries), ("k", keys), ("v", keys), ("dout", queries), ("out", queries)):
        if name in given and given[name].shape[2] != layout.share(rank):
            _raise_share(name, given[name].shape, layout, rank, packed)
    problem = _problem(given, read, queries, keys, of.dtype)
    on_gpu = q.storage.device is not None
    drawn = bool(problem.settings.dropout) and options.get("dropout_mask") is None
    if drawn and on_gpu and size > 1:
        raise Unsupported(
            f"dropout_p is {options['dropout_p']} with {size} members: cuDNN derives the random number of a weight from its "
            "place in the call, and has no input for the call's place in the sequence, so members would not drop the weights "
            "that one GPU drops: omit dropout_p"
        )
    needed = Expected.of_call(*(given[name] for name in "qkv"), given=given, computed=of.dtype)
    check_arrays([needed[name] for name in ("dout", "out", "stats")], given)
    band = problem.band
    aligned = band is not None and band.bottom_right
    diagonals = tuple(m - n if aligned else 0 for n, m in zip(queries.lengths, keys.lengths, strict=True))
    positional = drawn or any(OPTIONS[name].parts == "sliced" for name, value in options.items() if value is not None)
    text = _text(problem, {**options, **read.functions}, queries, keys)
    return Configuration(rank, problem, queries, keys, diagonals, read.functions, positional, drawn, on_gpu, text)


def read_length(name: str, value: Any) -> int:
    """Return a number of positions; ValueError if it is not an integer, or negative."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} is {value!r}; it must be an integer, 0 or more")
    return int(value)


def packed_lengths(name: str, starts: Any) -> tuple[int, ...]:
    """Return the lengths of packed sequences from the offsets of whole sequences; raise if they are on the GPU."""
    if cupy_runtime.is_array(starts):
        raise TypeError(
            f"{name} is a CuPy array; a group cuts every sequence on the host, and reading the offsets from the GPU would wait "
            "for it: pass a numpy array"
        )
    starts = np.asarray(starts)
    if starts.dtype.kind != "i" or starts.ndim != 1 or not starts.size:
        raise TypeError(f"{name} is {starts.dtype} of shape {starts.shape}; it must be int32 or int64 (B + 1,)")
    lengths = np.diff(starts)
    if starts[0] or (lengths < 0).any():
        raise ValueError(f"{name} is {starts.tolist()}; the offsets of whole sequences begin with 0 and must not decrease")
    return tuple(lengths.tolist())


def _lengths(name: str, options: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the lengths of packed sequences of a call."""
    if options.get(name) is None:
        raise ValueError(f"{name} is None; packed sequences need both cu_seqlens_q and cu_seqlens_kv")
    lengths = packed_lengths(name, options[name])
    side = name.removeprefix("cu_seqlens_")
    longest = options.get(f"max_seqlen_{side}")
    if longest is not None and max(lengths, default=0) > longest:
        raise ValueError(f"{name} has a sequence of {max(lengths)}; max_seqlen_{side} is {longest}")
    return lengths


def _packed_layouts(options: Mapping[str, Any], size: int) -> tuple[ShardLayout, ShardLayout]:
    """Return the layouts of the queries and keys of packed sequences."""
    queries, keys = (ShardLayout(_lengths(name, options), size, packed=True) for name in CU_SEQLENS)
    if len(queries.lengths) != len(keys.lengths):
        raise ValueError(f"cu_seqlens_q has {len(queries.lengths)} sequences and cu_seqlens_kv {len(keys.lengths)}")
    return queries, keys


def _dense_layouts(queries: int, keys: int, size: int, of: Request) -> tuple[ShardLayout, ShardLayout]:
    """Return the layouts of dense arrays from the lengths of the member's arrays."""
    seqlen_kv = of.seqlen_kv
    whole_q = queries * size if of.seqlen_q is None else read_length("seqlen_q", of.seqlen_q)
    if seqlen_kv is None:
        seqlen_kv = whole_q if queries == keys else keys * size
    return ShardLayout((whole_q,), size), ShardLayout((read_length("seqlen_kv", seqlen_kv),), size)


def _raise_share(name: str, shape: tuple[int, ...], layout: ShardLayout, rank: int, packed: bool) -> NoReturn:
    """Raise the error of an array that does not have the member's number of positions."""
    side = "kv" if name in "kv" else "q"
    source = f"cu_seqlens_{side}" if packed else f"seqlen_{side}"
    remedy = (
        "cut arrays with shard()"
        if packed
        else f"cut arrays with shard(), and pass {source}= if {2 * layout.size} does not divide it"
    )
    raise ValueError(
        f"{name} has shape {shape}; of {layout.total} positions ({source}) member {rank} of {layout.size} holds "
        f"{layout.share(rank)}: {remedy}"
    )


def _problem(
    given: Mapping[str, View], options: ReadOptions, queries: ShardLayout, keys: ShardLayout, dtype: str | None
) -> Problem:
    """Return the problem of the call on one GPU, without its functions; check the functions."""
    device = given["q"].storage.device
    views: dict[str, Any] = {}
    for name, layout in (("q", queries), ("k", keys), ("v", keys)):
        x = given[name]
        kind = x.dtype if dtype is None else numpy_dtype(dtype)
        views[name] = View.dense(name, (*x.shape[:2], layout.total, *x.shape[3:]), kind, device)
    if queries.packed:
        for side, layout in (("q", queries), ("kv", keys)):
            options |= {f"cu_seqlens_{side}": View.dense("", (len(layout.lengths) + 1,), np.int32, device)}
            if getattr(options.settings, f"max_seqlen_{side}") is None:
                options |= {f"max_seqlen_{side}": max(layout.lengths, default=0)}
    if options.functions:
        read_forward(**views, options=options)  # checks them
    return read_forward(**views, options=options.without(*options.functions, "tensors")).problem


def _text(problem: Problem, options: Mapping[str, Any], queries: ShardLayout, keys: ShardLayout) -> str:
    """Return the shapes and options, one per line."""
    lines = [
        f"problem: {problem}",
        f"lengths of q: {abbreviated(queries.lengths)}",
        f"lengths of k: {abbreviated(keys.lengths)}",
    ]
    for name in sorted(options):
        value = options[name]
        if value is None or name in CU_SEQLENS:
            continue
        if isinstance(value, Recorded):
            text = f"{value.__qualname__}, {abbreviated(value)}"
        elif name == "tensors":
            text = ", ".join(f"{key} {array.shape} {array.dtype}" for key, array in value.items())
        else:
            text = f"{value.shape} {value.dtype}" if hasattr(value, "shape") else repr(value)
        lines.append(f"{name}: {text}")
    return "\n".join(lines)


def abbreviated(value: Any) -> str:
    """Return a value as text; a long one ends with its checksum."""
    text = str(value)
    return text if len(text) <= 200 else f"{text[:160]} ..., checksum {zlib.crc32(text.encode()):08x}"
