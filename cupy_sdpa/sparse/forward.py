"""The forward pass with a block mask."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..calls.arguments import read_forward
from ..calls.replay_cache import cache_call, run_cached
from ..device import cupy_runtime
from . import plan as plans
from .block_mask import BlockMask
from .evaluate import BLOCK
from .kernels import Sources, copy_blocks, merge_blocks
from .plan import EntryArrays, Plan
from .tables import Sizes


def attention_with_block_mask(
    q: Any, k: Any, v: Any, mask: BlockMask, options: Mapping[str, Any], *, return_stats: Any, out: Any, stats: Any
) -> Any:
    """:func:`cupy_sdpa.attention` with a block mask.

    Args:
        q, k, v, return_stats, out, stats: as for :func:`cupy_sdpa.attention`.
        mask: the block mask.
        options: the other options.
    """
    sizes = plans.check(q, k, v, mask, options)
    if return_stats not in (False, True):
        raise ValueError(f"return_stats is {return_stats!r} and block_mask is passed; it must be False or True")
    given = {name: value for name, value in options.items() if value is not None}
    with cupy_runtime.on_device_of(q) if cupy_runtime.is_array(q) else contextlib.nullcontext():
        shape = (v.shape[0], *q.shape[1:])
        _check_result("out", out, shape, q.dtype)
        _check_result("stats", stats, (q.shape[2], q.shape[1], q.shape[3]), np.dtype(np.float32))
        out = cupy_runtime.new_result(q, shape, q.dtype) if out is None else out
        if stats is None and return_stats:
            stats = cupy_runtime.new_result(q, (q.shape[2], q.shape[1], q.shape[3]), np.dtype(np.float32))
        plan = plans.plan_of(mask, sizes)
        if plan.packed:
            _packed(q, k, v, mask, sizes, plan, given, out, stats)
        elif plan.slices is not None:
            _slices(q, k, v, plan, given, out, stats)
        else:
            _blocks(q, k, v, mask, sizes, plan, given, out, stats)
    return out if stats is None else (out, stats)


def _check_result(name: str, array: Any, shape: tuple[int, ...], dtype: Any) -> None:
    if array is not None and (array.shape != shape or array.dtype != dtype):
        raise ValueError(f"{name} is {array.dtype} {array.shape}; it must be {dtype} {shape}")


def call(q: Any, k: Any, v: Any, options: Mapping[str, Any], out: Any, stats: Any) -> None:
    """:func:`cupy_sdpa.attention` of a part, which writes into ``out`` and ``stats``, if that is not None."""
    kind, arrays = ("forward", stats is not None, False), (q, k, v, out, stats)
    if run_cached(kind, arrays, options) is None:
        parsed = read_forward(q, k, v, options, return_stats=stats is not None, out=out, stats=stats)
        parsed.run()
        cache_call(kind, ("q", "k", "v", "out", "stats"), arrays, options, parsed)


def in_order(array: Any) -> Any:
    """A copy of an array in Fortran order."""
    copy = cupy_runtime.temporary(array, array.shape, array.dtype)
    copy[...] = array
    return copy


def packed_arrays(mask: BlockMask, sizes: Sizes, plan: Plan, like: Any) -> dict[str, Any]:
    """The options of a packed call."""
    key = (plans.device_of(like), sizes, "packed")
    if (found := mask.tables.get(key)) is None:
        assert plan.packed
        upload = plans.Upload(like)
        starts_q, starts_kv, longest_q, longest_kv, band = plan.packed
        found = mask.tables[key] = {
            "cu_seqlens_q": upload(starts_q), "cu_seqlens_kv": upload(starts_kv), "max_seqlen_q": longest_q,
            "max_seqlen_kv": longest_kv, **plans.band_options(band),
        }  # fmt: skip
    return found  # type: ignore[no-any-return]


def _packed(
    q: Any, k: Any, v: Any, mask: BlockMask, sizes: Sizes, plan: Plan, options: dict[str, Any], out: Any, stats: Any
) -> None:
    """All segments as the sequences of one packed call."""
    flat = [plans.flattened(x) if plans.flattened(x) is not None else plans.flattened(in_order(x)) for x in (q, k, v)]
    target = plans.flattened(out)
    own = target if target is not None else cupy_runtime.temporary(q, (*out.shape[:2], math.prod(out.shape[2:])), out.dtype)
    _, heads, total = own.shape
    rows = None if stats is None else cupy_runtime.temporary(q, (heads, total), np.dtype(np.float32))
    call(*flat, {**options, **packed_arrays(mask, sizes, plan, q)}, own, rows)
    if target is None:
        out[...] = own.reshape(out.shape, order="F")
    if stats is not None:
        stats[...] = rows.reshape((heads, *stats.shape[::2]), order="F").transpose(1, 0, 2)


def _slices(q: Any, k: Any, v: Any, plan: Plan, options: dict[str, Any], out: Any, stats: Any) -> None:
    """Every segment as a call on slices of the arrays."""
    assert plan.slices is not None
    begin = 0
    for q0, q1, k0, k1, band in plan.slices:
        _fill_rows(out, stats, begin, q0, options.get("sinks"))
        whole = (q0, q1) == (0, q.shape[2])
        rows = stats
        if stats is not None and not (whole and stats.flags.f_contiguous):
            rows = cupy_runtime.temporary(q, (q1 - q0, *stats.shape[1:]), np.dtype(np.float32))
        of_q, of_kv = slice(q0, q1), slice(k0, k1)
        given = {**options, **plans.band_options(band)}
        call(q[:, :, of_q], k[:, :, of_kv], v[:, :, of_kv], given, out[:, :, of_q], rows)
        if rows is not stats:
            stats[of_q] = rows
        begin = q1
    _fill_rows(out, stats, begin, q.shape[2], options.get("sinks"))


def _fill_rows(out: Any, stats: Any, begin: int, end: int, sinks: Any) -> None:
    """The results of queries that attend to no key."""
    if begin < end:
        out[:, :, begin:end] = 0
        if stats is not None:
            stats[begin:end] = -math.inf if sinks is None else sinks[None, :, None]


def _blocks(
    q: Any, k: Any, v: Any, mask: BlockMask, sizes: Sizes, plan: Plan, options: dict[str, Any], out: Any, stats: Any
) -> None:
    """Blocks of queries as batch entries, whose pages are the blocks of keys that they attend to."""
    arrays = block_arrays(mask, sizes, plan, q)
    groups, sinks = plan.blocks.groups, options.pop("sinks", None)
    (d, hq, sq, batch), dv = q.shape, v.shape[0]
    pages = [pages_of(x, arrays["pages"], sizes.hkv if groups == 1 else 1, groups == 1) for x in (k, v)]
    new = cupy_runtime.temporary
    float32 = np.dtype(np.float32)
    direct, copied = arrays["direct"], arrays["copied"]
    target, base = out, None
    if direct:
        flat = plans.flattened(q) if plans.flattened(q) is not None else plans.flattened(in_order(q))
        if plans.flattened(out) is None:
            target = new(q, out.shape, out.dtype)
        merges = bool(copied) or sinks is not None
        rows = new(q, (hq, sq * batch), float32) if merges or stats is not None else None
        call(flat, *pages, {**options, **direct.options}, plans.flattened(target), rows)
        base = None if rows is None else rows.reshape((hq, sq, batch), order="F").transpose(1, 0, 2)
        if not merges:
            if stats is not None:
                stats[...] = base
            if target is not out:
                out[...] = target
            return
    heads, count = hq // groups, sum(len(entries.items) for entries in copied)
    results = new(q, (dv, heads, BLOCK, count), q.dtype) if count else None
    results_stats = new(q, (BLOCK, heads, count), float32) if count else None
    begin = 0
    for entries in copied:
        own = slice(begin, begin + len(entries.items))
        queries = copy_blocks(q, entries.items, heads)
        call(queries, *pages, {**options, **entries.options}, results[..., own], results_stats[..., own])
        begin = own.stop
    merge_blocks(arrays["sources"], results, results_stats, target, stats, base, sinks)
    if target is not out:
        out[...] = target


def block_arrays(mask: BlockMask, sizes: Sizes, plan: Plan, like: Any) -> dict[str, Any]:
    """The tables of a plan on the engine of a call."""
    key = (plans.device_of(like), sizes, "blocks")
    if (found := mask.tables.get(key)) is not None:
        return found  # type: ignore[no-any-return]
    upload, tables = plans.Upload(like), plan.blocks
    key_blocks = mask.kinds.shape[0]
    rows = sizes.batch * (1 if tables.groups == 1 else sizes.hkv)
    every = np.array([(j, r % (rows // sizes.batch), r // (rows // sizes.batch)) for r in range(rows) for j in range(key_blocks)],
                     np.int32).reshape(-1, 3)  # fmt: skip
    direct: EntryArrays | None = None
    if tables.direct:
        direct = plans.upload_entries(mask, tables.direct, upload)
        starts = [min(i * BLOCK, mask.sq) + b * mask.sq for i, _, b in tables.direct.items.tolist()]
        starts.append(mask.sq * sizes.batch)
        direct.options.update(cu_seqlens_q=upload(np.array(starts, np.int32)), max_seqlen_q=BLOCK)
    found = mask.tables[key] = {
        "pages": plans.upload_items(every, upload),
        "direct": direct,
        "copied": [plans.upload_entries(mask, entries, upload) for entries in tables.copied],
        "sources": Sources(upload(tables.offsets), upload(tables.parts), tables.groups),
    }
    return found


def pages_of(array: Any, items: Any, heads: int, shared: bool) -> Any:
    """Keys or values as pages ``(D, heads, BLOCK, pages)``: a view if possible, otherwise copies of blocks."""
    pages = plans.as_pages(array) if shared else None
    return copy_blocks(array, items, heads) if pages is None else pages
