"""The forward pass with a block mask."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..calls.arguments import read_forward
from ..calls.call_key import ArrayFunctions, ComposedCall, read_key, run_part, tensor_name
from ..calls.options import band_options, read_flag
from ..calls.replay_cache import cache_call, run_cached
from ..calls.user_functions import function_identities, kept_options
from ..device import cupy_runtime
from ..device.blocks import BLOCK
from ..device.blocks.copies import copy_blocks
from ..device.blocks.results import Sources, merge_blocks
from ..problem.problem import row_stats_shape
from ..score_fn.expression import AXES
from . import method as methods
from .entries import Sizes, Tables
from .masks.block_mask import BlockMask
from .masks.segments import Packed, Slice
from .method import EntryArrays, Upload
from .native import bits_on_engine, is_supported, native_of
from .positions import Parts, ScoreFunction, of_entries, of_packed, of_slice

_NAMES = ("q", "k", "v", "out", "stats")


def attention_with_block_mask(
    q: Any,
    k: Any,
    v: Any,
    mask: BlockMask,
    options: Mapping[str, Any],
    *,
    return_stats: Any,
    deterministic: Any,
    out: Any,
    stats: Any,
) -> Any:
    """:func:`cupy_sdpa.attention` with a block mask.

    Args:
        q, k, v, return_stats, deterministic, out, stats: as for :func:`cupy_sdpa.attention`.
        mask: the block mask.
        options: the other options.
    """
    deterministic = deterministic is not False and read_flag("deterministic", deterministic)
    kind: Any = None
    if isinstance(mask, BlockMask):
        kind = ("blocks", mask.number, mask.has_its_function, bool(return_stats), deterministic)
    given = (q, k, v, out, stats)
    if kind and cupy_runtime.is_array(q) and (results := run_cached(kind, given, options)) is not None:
        return tuple(results) if len(results) > 1 else results[0]
    sizes = methods.check(q, k, v, mask, options)
    check_return_stats(return_stats)
    methods.check_arrays(dict(zip(_NAMES, given, strict=True)), options.get("sinks"), ("out", "stats"))
    identities = function_identities(options)
    with cupy_runtime.device_context(q):
        kept = kept_options(q, options)
        parts_of(q, k, mask, sizes, kept, deterministic)  # checks the score function
        shape, rows = (v.shape[0], *q.shape[1:]), row_stats_shape(q.shape)
        out = cupy_runtime.new_result(q, shape, q.dtype) if out is None else out
        if stats is None and return_stats:
            stats = cupy_runtime.new_result(q, rows, np.dtype(np.float32))
        arrays = {name: array for name, array in zip(_NAMES, (q, k, v, out, stats), strict=True) if array is not None}
        work = functools.partial(_compute, weakref.ref(mask), sizes, without_arrays(kept), deterministic)
        run_composed(mask, kind, _NAMES, given, options, work, arrays, ["out", "stats"][: len(arrays) - 3], identities)
    return out if stats is None else (out, stats)


def check_return_stats(return_stats: Any) -> None:
    """Raise ValueError for row statistics that are not computed with a block mask."""
    if return_stats not in (False, True):
        raise ValueError(f"return_stats is {return_stats!r} and block_mask is passed; it must be False or True")


def run_composed(
    mask: BlockMask,
    kind: Any,
    names: tuple[str, ...],
    given: tuple[Any, ...],
    options: Mapping[str, Any],
    work: Callable[[dict[str, Any]], None],
    arrays: dict[str, Any],
    results: list[str],
    identities: tuple[Hashable | None, ...],
) -> None:
    """Compute a call with a block mask, and cache it.

    Args:
        mask: the block mask.
        kind, names, given, options: as for :func:`.cache_call`.
        work: computes the results from the arrays of the call and of the options, by name.
        arrays: the arrays of the call, including the results.
        results: the names of the results.
        identities: the identities of the functions when they were traced.
    """
    arrays = {**arrays, **arrays_of(options)}
    if not cupy_runtime.is_array(arrays["q"]):
        work(arrays)
        return
    key = read_key(ArrayFunctions(), kind, given, options)
    parsed = mask.tables.setdefault(("parsed", key[0]), []) if key else []
    call = ComposedCall(work, arrays, results, identities, parsed)
    call.run()
    cache_call(kind, names, given, options, call)


def arrays_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of the options by name, and those of functions by :func:`.tensor_name`."""
    found = {"sinks": options["sinks"]} if options.get("sinks") is not None else {}
    return found | {tensor_name(name): array for name, array in (options.get("tensors") or {}).items()}


def without_arrays(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with None in place of every array, for :func:`with_arrays`."""
    given = {name: value for name, value in options.items() if value is not None}
    given |= {"sinks": None} if "sinks" in given else {}
    return given | ({"tensors": dict.fromkeys(given["tensors"])} if "tensors" in given else {})


def with_arrays(options: Mapping[str, Any], arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The options of :func:`without_arrays` with arrays by name."""
    given = dict(options)
    given |= {"sinks": arrays["sinks"]} if "sinks" in given else {}
    tensors = {name: arrays[tensor_name(name)] for name in given.get("tensors", ())}
    return given | ({"tensors": tensors} if "tensors" in given else {})


def mask_of(reference: weakref.ref[BlockMask]) -> BlockMask:
    """The mask of a running call, whose caller holds it."""
    mask = reference()
    assert mask is not None
    return mask


def _compute(
    reference: weakref.ref[BlockMask], sizes: Sizes, options: Mapping[str, Any], deterministic: bool, arrays: dict[str, Any]
) -> None:
    """Write the results of a call.

    Args:
        reference: the block mask.
        sizes: the sizes of the call.
        options: the other options, without their arrays.
        deterministic: whether bits must be the same in every run.
        arrays: q, k, v, out, stats if it is returned, and the arrays of the options, by name.
    """
    mask = mask_of(reference)
    q, k, v, out, stats = (arrays.get(name) for name in _NAMES)
    assert q is not None
    parts = parts_of(q, k, mask, sizes, with_arrays(options, arrays), deterministic)
    method = methods.method_of(mask, sizes)
    if method.packed:
        _packed(q, k, v, parts, method.packed, out, stats)
    elif method.slices is not None:
        _slices(q, k, v, parts, method.slices, out, stats)
    elif is_supported((q, k, v), mask, sizes, parts.whole_options, return_stats=stats is not None):
        found = native_of(mask)
        assert found
        given = {**parts.whole_options, **found.options}
        call(q, k, v, given, out, stats, deterministic, bits_on_engine(mask, sizes, q))
    else:
        _blocks(q, k, v, parts, method.blocks, out, stats)


def call(
    q: Any, k: Any, v: Any, options: Mapping[str, Any], out: Any, stats: Any, deterministic: bool, bits: Any = None
) -> None:
    """:func:`cupy_sdpa.attention` of a part, which writes into ``out`` and ``stats``, if that is not None.

    Args:
        q, k, v, options, out, stats, deterministic: as for :func:`cupy_sdpa.attention`.
        bits: the bits of the listed blocks, see :mod:`.native`. Default None: all blocks are computed.
    """
    results = {"return_stats": stats is not None, "out": out, "stats": stats, "block_bits": bits}
    read = functools.partial(read_forward, q, k, v, options, deterministic=deterministic, **results)
    run_part((*_NAMES, "block_bits"), (q, k, v, out, stats, bits), options, read)


def parts_of(q: Any, k: Any, mask: BlockMask, sizes: Sizes, options: Mapping[str, Any], deterministic: bool) -> Parts:
    """What the parts of a call have in common."""
    given = {name: value for name, value in options.items() if value is not None}
    score_mod, tensors = given.pop("score_mod", None), given.pop("tensors", {})
    if score_mod is None:
        if tensors:
            raise ValueError(f"tensors has {', '.join(tensors)}, but score_mod is not passed to read it")
        return Parts(mask, sizes, given, None, deterministic)
    (_, hq, sq, batch), skv = q.shape, k.shape[2]
    scores = ScoreFunction(score_mod, tensors, dict(zip(AXES, (batch, hq, sq, skv), strict=True)))
    return Parts(mask, sizes, given, scores, deterministic)


def packed_view(array: Any) -> Any:
    """An array ``(D, H, S, B)`` as ``(D, H, S B)``; a copy if its batch entries do not follow one another."""
    flat = methods.flattened(array)
    return methods.flattened(cupy_runtime.temporary_copy(array)) if flat is None else flat


def packed_options(mask: BlockMask, sizes: Sizes, packed: Packed, like: Any) -> dict[str, Any]:
    """The options of a packed call."""

    def make(upload: Upload) -> dict[str, Any]:
        starts_q, starts_kv, longest_q, longest_kv, band = packed
        return {
            "cu_seqlens_q": upload(starts_q), "cu_seqlens_kv": upload(starts_kv), "max_seqlen_q": longest_q,
            "max_seqlen_kv": longest_kv, **band_options(band),
        }  # fmt: skip

    return methods.on_engine(mask, like, (sizes, "packed"), make)


def _packed(q: Any, k: Any, v: Any, parts: Parts, packed: Packed, out: Any, stats: Any) -> None:
    """All segments as the sequences of one packed call."""
    mask, sizes = parts.mask, parts.sizes
    target = methods.flattened(out)
    own = target if target is not None else cupy_runtime.temporary(q, (*out.shape[:2], math.prod(out.shape[2:])), out.dtype)
    _, heads, total = own.shape
    rows = None if stats is None else cupy_runtime.temporary(q, (heads, total), np.dtype(np.float32))
    given = parts.options_of(
        packed_options(mask, sizes, packed, q), ("packed",), q, functools.partial(of_packed, packed, mask, sizes)
    )
    call(packed_view(q), packed_view(k), packed_view(v), given, own, rows, parts.deterministic)
    if target is None:
        out[...] = own.reshape(out.shape, order="F")
    if stats is not None and rows is not None:
        stats[...] = rows.reshape((heads, *stats.shape[::2]), order="F").transpose(1, 0, 2)


def _slices(q: Any, k: Any, v: Any, parts: Parts, slices: list[Slice], out: Any, stats: Any) -> None:
    """Every segment as a call on slices of the arrays."""
    mask, sizes, sinks = parts.mask, parts.sizes, parts.options.get("sinks")
    begin = 0
    for part in slices:
        q0, q1, k0, k1, band = part
        _fill_rows(out, stats, begin, q0, sinks)
        whole = (q0, q1) == (0, q.shape[2])
        rows = stats
        if stats is not None and not (whole and stats.flags.f_contiguous):
            rows = cupy_runtime.temporary(q, (q1 - q0, *stats.shape[1:]), np.dtype(np.float32))
        of_q, of_kv = slice(q0, q1), slice(k0, k1)
        given = parts.options_of(band_options(band), (part[:4],), q, functools.partial(of_slice, part, mask, sizes))
        call(q[:, :, of_q], k[:, :, of_kv], v[:, :, of_kv], given, out[:, :, of_q], rows, parts.deterministic)
        if rows is not stats:
            stats[of_q] = rows
        begin = q1
    _fill_rows(out, stats, begin, q.shape[2], sinks)


def _fill_rows(out: Any, stats: Any, begin: int, end: int, sinks: Any) -> None:
    """The results of queries that attend to no key."""
    if begin < end:
        out[:, :, begin:end] = 0
        if stats is not None:
            stats[begin:end] = -math.inf if sinks is None else sinks[None, :, None]


def _blocks(q: Any, k: Any, v: Any, parts: Parts, tables: Tables, out: Any, stats: Any) -> None:
    """Blocks of queries as batch entries, whose pages are the blocks of keys that they attend to."""
    mask, sizes = parts.mask, parts.sizes
    arrays = block_arrays(mask, sizes, tables, q)
    groups, sinks = tables.groups, parts.options.pop("sinks", None)
    (_, hq, sq, batch), dv = q.shape, v.shape[0]
    pages = [pages_of(x, arrays.pages, sizes.hkv if groups == 1 else 1, groups == 1) for x in (k, v)]
    new = cupy_runtime.temporary
    float32 = np.dtype(np.float32)
    direct, copied = arrays.direct, arrays.copied
    target, base = out, None
    if direct and tables.direct:
        if methods.flattened(out) is None:
            target = new(q, out.shape, out.dtype)
        merges = bool(copied) or sinks is not None
        rows = new(q, (hq, sq * batch), float32) if merges or stats is not None else None
        given = parts.options_of(direct.options, ("direct",), q, functools.partial(of_entries, tables.direct, mask, sizes))
        call(packed_view(q), pages[0], pages[1], given, packed_view(target), rows, parts.deterministic)
        base = None if rows is None else rows.reshape((hq, sq, batch), order="F").transpose(1, 0, 2)
        if not merges:
            if stats is not None:
                stats[...] = base
            if target is not out:
                out[...] = target
            return
    heads, count = hq // groups, sum(len(entries.items) for entries in copied)
    results, results_stats = new(q, (dv, heads, BLOCK * count), q.dtype), new(q, (heads, BLOCK * count), float32)
    begin = 0
    for number, entries in enumerate(copied):
        own = slice(begin, begin + BLOCK * len(entries.items))
        queries = as_sequences(copy_blocks(q, entries.items, heads))
        given = parts.options_of(
            entries.options, ("copied", number), q, functools.partial(of_entries, tables.copied[number], mask, sizes)
        )
        call(queries, pages[0], pages[1], given, results[..., own], results_stats[..., own], parts.deterministic)
        begin = own.stop
    merge_blocks(
        arrays.sources, as_blocks(results), results_stats.reshape((heads, BLOCK, count), order="F"), target, stats, base, sinks
    )
    if target is not out:
        out[...] = target


class Blocks(NamedTuple):
    """The tables of a method on the engine of a call.

    Attributes:
        pages: int32 ``(n, 3)``: the blocks of keys, as items of :func:`.copy_blocks`.
        direct, copied: as in :class:`.Tables`.
        sources: the copied entries of every block of queries.
    """

    pages: Any
    direct: EntryArrays | None
    copied: list[EntryArrays]
    sources: Sources


def block_arrays(mask: BlockMask, sizes: Sizes, tables: Tables, like: Any) -> Blocks:
    """The tables of a method on the engine of a call."""

    def make(upload: Upload) -> Blocks:
        groups = 1 if tables.groups == 1 else sizes.hkv
        every = [(j, g, b) for b, g, j in np.ndindex(sizes.batch, groups, mask.kinds.shape[0])]
        direct: EntryArrays | None = None
        if tables.direct:
            starts = [i * BLOCK + b * mask.sq for i, _, b in tables.direct.items.tolist()]
            direct = methods.upload_entries(mask, tables.direct, [*starts, mask.sq * sizes.batch], upload)
        copied = [
            methods.upload_entries(mask, entries, BLOCK * np.arange(len(entries.items) + 1), upload)
            for entries in tables.copied
        ]
        return Blocks(
            upload.items(np.array(every, np.int32).reshape(-1, 3)),
            direct,
            copied,
            Sources(upload(tables.offsets), upload(tables.parts), tables.groups),
        )

    return methods.on_engine(mask, like, (sizes, "blocks"), make)


def as_sequences(copies: Any) -> Any:
    """Copies of blocks ``(D, H, BLOCK, n)`` as packed sequences ``(D, H, BLOCK n)``."""
    d, heads, _, count = copies.shape
    return copies.reshape((d, heads, BLOCK * count), order="F")


def as_blocks(array: Any) -> Any:
    """Packed sequences ``(D, H, BLOCK n)`` as blocks ``(D, H, BLOCK, n)``."""
    d, heads, total = array.shape
    return array.reshape((d, heads, BLOCK, total // BLOCK), order="F")


def pages_of(array: Any, items: Any, heads: int, shared: bool) -> Any:
    """Keys or values as pages ``(D, heads, BLOCK, pages)``: a view if possible, otherwise copies of blocks."""
    pages = methods.as_pages(array) if shared else None
    return copy_blocks(array, items, heads) if pages is None else pages
