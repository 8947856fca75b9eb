"""The gradients of calls with a block mask."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..calls.arguments import read_backward
from ..calls.call_key import run_part
from ..calls.options import band_options
from ..calls.replay_cache import run_cached
from ..calls.user_functions import function_identities, kept_options
from ..device import cupy_runtime
from ..device.blocks import BLOCK
from ..device.blocks.copies import copy_blocks, copy_stats
from ..device.blocks.results import Sources, sum_blocks
from . import method as methods
from .entries import PackedCopies, Sizes, attends, packed_copies, rectangles, sources
from .forward import (
    as_blocks,
    as_sequences,
    mask_of,
    packed_options,
    packed_view,
    parts_of,
    run_composed,
    with_arrays,
    without_arrays,
)
from .masks.block_mask import BlockMask
from .masks.segments import Packed, Slice, gradient_slices
from .method import Upload
from .positions import Parts, of_copies, of_packed, of_slice

#: The bytes of copies of blocks at a time; heads that need more are computed one part after the other.
MAX_COPIES = 1 << 31

_NAMES = ("dout", "q", "k", "v", "out", "stats", "dq", "dk", "dv")


class Arrays(NamedTuple):
    """The arrays of a backward pass, as for :func:`cupy_sdpa.attention_backward`."""

    dout: Any
    q: Any
    k: Any
    v: Any
    out: Any
    stats: Any
    dq: Any
    dk: Any
    dv: Any


def refuse_gradients(others: Mapping[str, Any]) -> None:
    """Raise ValueError if other gradients than those of q, k and v are requested, by the names of the arguments."""
    for name, value in others.items():
        if value is not False and value is not None:
            raise ValueError(f"{name} is {value!r} and block_mask is passed; only dq, dk and dv are computed with a block mask")


def gradients_with_block_mask(
    arrays: tuple[Any, ...], mask: BlockMask, options: Mapping[str, Any], *, deterministic: bool, others: Mapping[str, Any]
) -> tuple[Any, Any, Any]:
    """:func:`cupy_sdpa.attention_backward` with a block mask.

    Args:
        arrays: dout, q, k, v, out, stats, dq, dk and dv; the last three may be None.
        mask: the block mask.
        options: the other options.
        deterministic: whether to return the same bits in every run.
        others: the other requested gradients, which are refused.
    """
    dout, q, k, v, out, stats, dq, dk, dv = arrays
    requested = any(value is not False and value is not None for value in others.values())
    kind = ("gradients of blocks", mask.number, mask.has_its_function, deterministic) if isinstance(mask, BlockMask) else None
    if kind and not requested and cupy_runtime.is_array(q) and (results := run_cached(kind, arrays, options)) is not None:
        return tuple(results)
    sizes = methods.check(q, k, v, mask, options)
    refuse_gradients(others)
    for name, array in (("dout", dout), ("out", out), ("stats", stats)):
        if array is None:
            raise TypeError(
                f"{name} is None; the backward pass needs it: attention(..., return_stats=True) returns out and stats"
            )
    methods.check_arrays(dict(zip(_NAMES, arrays, strict=True)), options.get("sinks"), ("dq", "dk", "dv"))
    identities = function_identities(options)
    with cupy_runtime.device_context(q):
        kept = kept_options(q, options)
        parts_of(q, k, mask, sizes, kept, deterministic)  # checks the score function
        dq, dk, dv = (
            cupy_runtime.new_result(q, x.shape, x.dtype) if dx is None else dx for x, dx in ((q, dq), (k, dk), (v, dv))
        )
        whole = Arrays(dout, q, k, v, out, stats, dq, dk, dv)
        work = functools.partial(_compute, weakref.ref(mask), sizes, without_arrays(kept), deterministic)
        run_composed(mask, kind, _NAMES, arrays, options, work, whole._asdict(), ["dq", "dk", "dv"], identities)
    return dq, dk, dv


def _compute(
    reference: weakref.ref[BlockMask], sizes: Sizes, options: Mapping[str, Any], deterministic: bool, arrays: dict[str, Any]
) -> None:
    """Write the gradients; the arguments are those of the forward pass, and whether bits must be the same in every run."""
    mask, whole = mask_of(reference), Arrays(*(arrays[name] for name in _NAMES))
    parts = parts_of(whole.q, whole.k, mask, sizes, with_arrays(options, arrays), deterministic)
    method = methods.method_of(mask, sizes)
    parts.options.pop("sinks", None)  # the log-sum-exp contains them
    if method.blocks is not None and not deterministic and (function := methods.gradient_function(mask, sizes)):
        # deterministic gradients would need memory for all pairs
        call(whole, {**parts.whole_options, "mask_mod": function}, deterministic)
    elif method.packed:
        _packed(whole, parts, method.packed)
    elif method.slices is not None:
        _slices(whole, parts, method.slices)
    else:
        _blocks(whole, parts)


def call(arrays: Arrays, options: Mapping[str, Any], deterministic: bool) -> None:
    """:func:`cupy_sdpa.attention_backward` of a part, which writes into dq, dk and dv."""
    dout, q, k, v, *others = arrays
    names = dict(zip(_NAMES[4:], others, strict=True))
    read = functools.partial(read_backward, q, k, v, options, dout=dout, deterministic=deterministic, **names)
    run_part(_NAMES, tuple(arrays), options, read)


def _packed(arrays: Arrays, parts: Parts, packed: Packed) -> None:
    """All segments as the sequences of one packed call."""
    mask, sizes = parts.mask, parts.sizes
    s, h, b = arrays.stats.shape
    rows = cupy_runtime.temporary(arrays.q, (h, s, b), np.dtype(np.float32))
    rows[...] = arrays.stats.transpose(1, 0, 2)
    inputs = [packed_view(x) for x in (arrays.dout, arrays.q, arrays.k, arrays.v, arrays.out)]
    results, moved = [], []
    for result in arrays[6:]:
        own = result
        if methods.flattened(result) is None:
            own = cupy_runtime.temporary(arrays.q, result.shape, result.dtype)
            moved.append((result, own))
        results.append(packed_view(own))
    given = parts.options_of(
        packed_options(mask, sizes, packed, arrays.q),
        ("packed",),
        arrays.q,
        functools.partial(of_packed, packed, mask, sizes),
    )
    dout, q, k, v, out = inputs
    dq, dk, dv = results
    call(Arrays(dout, q, k, v, out, rows.reshape((h, s * b), order="F"), dq, dk, dv), given, parts.deterministic)
    for result, own in moved:
        result[...] = own


def _slices(arrays: Arrays, parts: Parts, slices: list[Slice]) -> None:
    """Every segment as a call on slices of the arrays, the one with most keys first."""
    results = [_Sum(array) for array in arrays[6:]]
    for part in sorted(gradient_slices(slices), key=lambda part: part.k0 - part.k1):
        with cupy_runtime.released():
            _slice(arrays, parts, part, results)
    for result in results:
        result.clear_rest()


def _slice(arrays: Arrays, parts: Parts, part: Slice, results: list[_Sum]) -> None:
    """Add the gradients of a segment."""
    mask, sizes = parts.mask, parts.sizes
    q0, q1, k0, k1, band = part
    of_q, of_kv = (slice(None), slice(None), slice(q0, q1)), (slice(None), slice(None), slice(k0, k1))
    stats = arrays.stats
    if q1 - q0 < stats.shape[0] or not stats.flags.f_contiguous:
        stats = cupy_runtime.temporary(arrays.q, (q1 - q0, *stats.shape[1:]), stats.dtype)
        stats[...] = arrays.stats[q0:q1]
    targets = [result.target(*bounds) for result, bounds in zip(results, ((q0, q1), (k0, k1), (k0, k1)), strict=True)]
    given = parts.options_of(band_options(band), (part[:4],), arrays.q, functools.partial(of_slice, part, mask, sizes))
    inputs = arrays.dout[of_q], arrays.q[of_q], arrays.k[of_kv], arrays.v[of_kv], arrays.out[of_q], stats
    call(Arrays(*inputs, *targets), given, parts.deterministic)
    for result in results:
        result.add()


class _Sum:
    """A gradient as the sum of gradients of slices: the first one of a position is written, the others are added.

    Args:
        array: the gradient ``(D, H, S, B)``.
    """

    def __init__(self, array: Any) -> None:
        self._array = array
        self._written: list[tuple[int, int]] = []
        self._part: tuple[Any, Any] | None = None

    def target(self, begin: int, end: int) -> Any:
        """An array for the gradient of a slice: the slice, or a new one that is added to it by :meth:`add`."""
        part = self._array[:, :, begin:end]
        gaps = self._gaps(begin, end)
        self._written.append((begin, end))
        if gaps == [(begin, end)]:
            return part
        for gap in gaps:
            self._array.T[:, slice(*gap)] = 0
        self._part = part, cupy_runtime.temporary(part, part.shape, part.dtype)
        return self._part[1]

    def add(self) -> None:
        """Add the gradient of the last slice, if it is not in place."""
        if self._part:
            part, added = (x.T for x in self._part)  # CuPy adds arrays in C order at memory speed, others much slower
            part += added
            self._part = None

    def clear_rest(self) -> None:
        """Write 0 to positions that are in no slice."""
        for gap in self._gaps(0, self._array.shape[2]):
            self._array.T[:, slice(*gap)] = 0

    def _gaps(self, begin: int, end: int) -> list[tuple[int, int]]:
        """The parts of a range that no slice has written."""
        gaps = []
        for first, last in sorted(self._written):
            if begin < min(first, end):
                gaps.append((begin, min(first, end)))
            begin = max(begin, last)
        return [*gaps, (begin, end)] if begin < end else gaps


class Copied(NamedTuple):
    """The rectangles of a mask on the engine of a call.

    Attributes:
        queries, keys: int32 ``(n, 3)``: the copied blocks.
        sources_q, sources_kv: the copies of every block.
        calls: for each call the ends of its copies of queries and of keys, its options, and its sequences.
    """

    queries: Any
    keys: Any
    sources_q: Sources
    sources_kv: Sources
    calls: list[tuple[int, int, dict[str, Any], PackedCopies]]


def _blocks(arrays: Arrays, parts: Parts) -> None:
    """Copies of the blocks of rectangles as packed sequences, and sums of their gradients."""
    mask, sizes = parts.mask, parts.sizes
    copied = copied_blocks(mask, sizes, arrays.q)
    if not copied.calls or not sizes.hq:
        for result in arrays[6:]:
            result[...] = 0
        return
    every = [
        parts.options_of(given, ("rectangles", number), arrays.q, functools.partial(of_copies, part, mask))
        for number, (_, _, given, part) in enumerate(copied.calls)
    ]
    if mask.heads > 1 or parts.scores is not None:
        heads = (1, 1) if mask.heads > 1 else (sizes.hq, sizes.hkv)
        _sum_of_copies(arrays, copied, heads[0], heads[1], every, parts.deterministic)
        return
    size = arrays.q.itemsize * BLOCK * (arrays.q.shape[0] + arrays.v.shape[0]) * 2
    turns = -(-size * (len(copied.queries) * sizes.hq + len(copied.keys) * sizes.hkv) // MAX_COPIES)
    step = -(-sizes.hkv // max(1, min(turns, sizes.hkv)))
    repeat = sizes.hq // sizes.hkv
    for begin in range(0, sizes.hkv, step):
        of_kv = slice(begin, min(begin + step, sizes.hkv))
        of_q = slice(of_kv.start * repeat, of_kv.stop * repeat)
        part = Arrays(
            *(array[:, of_kv if name in ("k", "v", "dk", "dv") else of_q] for name, array in zip(_NAMES, arrays, strict=True))
        )
        with cupy_runtime.released():
            _sum_of_copies(part, copied, of_q.stop - of_q.start, of_kv.stop - of_kv.start, every, parts.deterministic)


def _sum_of_copies(
    arrays: Arrays, copied: Copied, hq: int, hkv: int, options: list[dict[str, Any]], deterministic: bool
) -> None:
    """The gradients of all copies, and their sums; hq and hkv are the heads of a copy."""
    queries, keys = copied.queries, copied.keys
    dout, q, out = (as_sequences(copy_blocks(x, queries, hq)) for x in (arrays.dout, arrays.q, arrays.out))
    k, v = (as_sequences(copy_blocks(x, keys, hkv)) for x in (arrays.k, arrays.v))
    stats = copy_stats(arrays.stats, queries, hq)
    dq, dk, dv = (cupy_runtime.temporary(q, x.shape, x.dtype) for x in (q, k, v))
    from_q = from_kv = 0
    for (end_q, end_kv, _, _), given in zip(copied.calls, options, strict=True):
        of_q, of_kv = (..., slice(from_q, end_q)), (..., slice(from_kv, end_kv))
        part = Arrays(dout[of_q], q[of_q], k[of_kv], v[of_kv], out[of_q], stats[of_q], dq[of_q], dk[of_kv], dv[of_kv])
        call(part, given, deterministic)
        from_q, from_kv = end_q, end_kv
    sum_blocks(copied.sources_q, as_blocks(dq), arrays.dq)
    sum_blocks(copied.sources_kv, as_blocks(dk), arrays.dk)
    sum_blocks(copied.sources_kv, as_blocks(dv), arrays.dv)


def copied_blocks(mask: BlockMask, sizes: Sizes, like: Any) -> Copied:
    """The rectangles of a mask for calls of some sizes, on the engine of a call."""

    def make(upload: Upload) -> Copied:
        found = (packed_copies(kind, mask, sizes) for kind in rectangles(mask, sizes.batch))
        parts = [part for part in found if part is not None]
        calls, end_q, end_kv = [], 0, 0
        for part in parts:
            end_q, end_kv = end_q + BLOCK * len(part.queries), end_kv + BLOCK * len(part.keys)
            given: dict[str, Any] = {
                "cu_seqlens_q": upload(part.starts_q), "cu_seqlens_kv": upload(part.starts_kv), "max_seqlen_q": part.longest_q,
                "max_seqlen_kv": part.longest_kv,
            }  # fmt: skip
            if part.partial is not None:
                pairs = upload(attends(mask, part.partial))
                given |= {"mask_mod": methods.is_attended, "tensors": {"attends": pairs}}
            calls.append((end_q, end_kv, given, part))
        empty = np.zeros((0, 3), np.int32)
        queries = np.concatenate([empty, *(part.queries for part in parts)])
        keys = np.concatenate([empty, *(part.keys for part in parts)])
        key_blocks, query_blocks, groups, _ = mask.kinds.shape
        kv_groups = 1 if groups == 1 else sizes.hkv
        of_q = sources(queries, query_blocks, groups, sizes.batch)
        of_kv = sources(keys, key_blocks, kv_groups, sizes.batch)
        return Copied(
            upload.items(queries),
            upload.items(keys),
            Sources(upload(of_q[0]), upload(of_q[1]), groups),
            Sources(upload(of_kv[0]), upload(of_kv[1]), kv_groups),
            calls,
        )

    return methods.on_engine(mask, like, (sizes, "rectangles"), make)
