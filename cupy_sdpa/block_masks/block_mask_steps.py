"""Builders of attention with a block mask, and of its gradients.

The method of a mask (:mod:`cupy_sdpa.block_masks.method`) is one packed call, calls on slices, or batch items of blocks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from ..extend import KEY_ARRAYS, Builder, Constant, Parts, ReadOptions, View, merge_parts
from .block_mask import BlockMask
from .block_positions import MovableFunction, Positions, of_copies, of_entries, of_packed, of_slice
from .blocks import BLOCK, copy_blocks, copy_elements, sum_blocks
from .entries import Entries, PackedCopies, Tables, TableSizes, attends, packed_copies, rectangles, sources
from .intersection import within_band
from .method import as_pages, flattened, gradient_function, is_attended, method_of
from .segments import PackedSegments, SegmentSlice, gradient_slices

#: The bytes of copies of blocks at a time; heads that need more are computed one part after the other.
MAX_COPIES = 1 << 31

T = TypeVar("T")


def stored(mask: BlockMask, key: tuple[Any, ...], make: Callable[[], T]) -> T:
    """Return the tables of a mask under a key; they are made once, and shared by all programs of the mask."""
    if key not in mask.tables:
        mask.tables[key] = make()
    found: T = mask.tables[key]
    return found


#: The arrays of a pass by name.
Arrays = Mapping[str, Any]


class _Parts:
    """What the parts of a call with a block mask have in common; ``options`` are the others than the mask."""

    def __init__(
        self, builder: Builder, q: View, k: View, mask: BlockMask, options: ReadOptions, *, deterministic: bool
    ) -> None:
        self.builder, self.mask, self.sizes = builder, mask, TableSizes(q.shape[1], k.shape[1], q.shape[3])
        self.method = method_of(mask, self.sizes)
        self.flags: dict[str, Any] = {"deterministic": deterministic}
        if "tensors" in options:
            # the copies of elements count whole elements from the first one
            given = options["tensors"].items()
            options |= {"tensors": {name: x if _counts_elements(x) else builder.copied(x) for name, x in given}}
        self.scores = score_function(q.shape, k.shape, options)
        self.options = options.without("score_mod", "tensors")

    def options_of(self, part: Mapping[str, Any], key: tuple[Any, ...], positions: Callable[[], Positions]) -> ReadOptions:
        """Return the options of a part, with the score function at its positions.

        ``part`` has the options that differ in this part, see :class:`.ReadOptions`; ``key`` identifies it among the parts of
        these sizes.
        """
        options = self.options | part
        if self.scores is None:
            return options
        if key[0] == (0, self.mask.sq, 0, self.mask.skv):  # all queries and keys are at their positions
            return options | self.scores.options
        found = stored(self.mask, (self.sizes, *key, "positions"), positions)
        numbers = self.scores.places(found, self.mask)
        places = dict(zip(numbers, self.constants((*key, "places"), numbers.values), strict=True))
        tensors, names = {**places}, []
        for number, (of, axes) in enumerate(self.scores.reads):
            array = self.scores.tensors[of]
            names.append(name := f"{of} at {number}")
            if not any(isinstance(axis, str) for axis in axes):
                tensors[name] = array[(*axes, ...)] if axes else array
                continue
            layout = axes, array.shape, array.strides
            index = self.constant((*key, "index", layout), self.scores.index, axes, array, found)
            tensors[name] = self.builder.temporary(index.shape, array.dtype)
            count = max(0, (array.bounds[1] - array.offset) // array.itemsize)
            elements = array.strided((count,), (array.itemsize,))
            self.builder.run(copy_elements, tensors[name], elements, index, writes=(tensors[name],))
        located = self.scores.located(names, {name: array.ndim for name, array in places.items()})
        return options | {"score_mod": located, "tensors": {**options.get("tensors", {}), **tensors}}

    def constants(self, key: tuple[Any, ...], make: Callable[..., Iterable[Any]], *arguments: Any) -> list[View]:
        """Arrays that are known now and made once for a mask; ``key`` identifies them among the arrays of these sizes."""
        found = stored(self.mask, (self.sizes, *key), lambda: [Constant(array) for array in make(*arguments)])
        return [self.builder.constant(constant) for constant in found]

    def constant(self, key: tuple[Any, ...], make: Callable[..., Any], *arguments: Any) -> View:
        """Return one of :meth:`constants`."""
        (found,) = self.constants(key, lambda: [make(*arguments)])
        return found

    def attend(self, name: str, arrays: Arrays, options: ReadOptions) -> None:
        """One step: the pass on the arrays of a part."""
        add = self.builder.attend_backward if "dout" in arrays else self.builder.attend
        add(name, options=options, **arrays, **self.flags)

    def whole_options(self, **others: Any) -> ReadOptions:
        """Return the options of one call on the whole arrays."""
        return self.options | {**(self.scores.options if self.scores else {}), **others}

    def packing(self, key: tuple[Any, ...], part: PackedSegments | PackedCopies) -> dict[str, Any]:
        """Return what packed sequences change."""
        starts_q, starts_kv = self.constants((*key, "starts"), lambda: (part.starts_q, part.starts_kv))
        return {
            "cu_seqlens_q": starts_q, "cu_seqlens_kv": starts_kv, "max_seqlen_q": part.longest_q,
            "max_seqlen_kv": part.longest_kv, "band": getattr(part, "band", None),
        }  # fmt: skip

    def pairs(self, key: tuple[Any, ...], partial: Any) -> dict[str, Any]:
        """Return the options of the mask within partial blocks; none if all blocks are full."""
        if partial is None:
            return {}
        return {"mask_mod": is_attended, "tensors": {"attends": self.constant((*key, "pairs"), attends, self.mask, partial)}}

    def flat(self, x: View) -> View:
        """Return an array ``(D, H, S, B)`` as ``(D, H, S B)``; a copy if its batch items do not follow one another."""
        view: View | None = flattened(x)
        if view is None:
            dense = self.builder.temporary(x.shape, x.dtype)
            self.builder.copy(dense, x)
            view = flattened(dense)
            assert view is not None
        return view

    def copies(self, x: View, items: View, heads: int, *, of_stats: bool = False) -> View:
        """Copies of blocks ``(D, heads, BLOCK, n)``."""
        made = self.builder.temporary((x.shape[0], heads, BLOCK, items.shape[0]), x.dtype)
        self.builder.run(copy_blocks, made, x, items, heads, of_stats, writes=(made,))
        return made


def _counts_elements(array: View) -> bool:
    """True if every element of an array is a number of elements, 0 or more, after the first one."""
    return all(stride >= 0 and stride % array.itemsize == 0 for stride in array.strides)


def score_function(q: Sequence[int], k: Sequence[int], options: Mapping[str, Any]) -> MovableFunction | None:
    """Return the score function of a call with a block mask, from the shapes of q and k, or None.

    Raises:
        ValueError: it masks keys, or ``tensors`` is passed without it.
    """
    score_mod, tensors = options.get("score_mod"), options.get("tensors") or {}
    if score_mod is None:
        if tensors:
            raise ValueError(f"tensors has {', '.join(tensors)}, but score_mod is not passed to read it")
        return None
    return MovableFunction(score_mod, tensors, {"b": q[3], "h": q[1], "q_idx": q[2], "kv_idx": k[2]})


def sequences(copies: View) -> View:
    """Copies of blocks ``(D, H, BLOCK, n)`` as packed sequences ``(D, H, BLOCK n)``."""
    d, heads, _, count = copies.shape
    return copies.reshape((d, heads, BLOCK * count), order="F")


def blocks(array: View) -> View:
    """Packed sequences ``(D, H, BLOCK n)`` as blocks ``(D, H, BLOCK, 1, n)``."""
    d, heads, total = array.shape
    return array.reshape((d, heads, BLOCK, 1, total // BLOCK), order="F")


# The two passes


def add(
    builder: Builder,
    arrays: Arrays,
    mask: BlockMask,
    options: ReadOptions,
    *,
    deterministic: bool,
) -> None:
    """Add the steps that write dq, dk and dv; or the output, and the log-sum-exp unless ``stats`` is None."""
    mask, backward = within_band(mask, options.settings.band), "dout" in arrays
    # the blocks' plans depend on the mask, so lengths alone do not identify them
    options = dataclasses.replace(options | {"band": None}, causal=None, round_up=None)
    if backward:  # the log-sum-exp contains the sinks
        options = options.without("sinks")
    parts = _Parts(builder, arrays["q"], arrays["k"], mask, options, deterministic=deterministic)
    method = parts.method
    if method.packed:
        _attend_packed(parts, arrays, method.packed)
    elif method.slices is not None:
        _attend_slices(parts, arrays, method.slices)
    elif backward:
        # deterministic gradients with the function would need memory for all pairs
        function = None if deterministic else gradient_function(mask, parts.sizes)
        if function:
            parts.attend("whole", arrays, parts.whole_options(mask_mod=function))
        else:
            _block_gradients(parts, arrays)
    else:
        _attend_blocks(parts, arrays, method.blocks)


def _attend_packed(parts: _Parts, arrays: Arrays, packed: PackedSegments) -> None:
    """All segments as the sequences of one packed call."""
    builder, backward, after = parts.builder, "dout" in arrays, []
    flat: dict[str, View | None] = dict(arrays)
    for name, x in arrays.items():
        if name == "stats":
            if x is None:
                continue
            s, h, b = x.shape
            rows = builder.temporary((h, s, b), x.dtype)
            flat[name] = rows.reshape((h, s * b), order="F")
            if backward:
                builder.copy(rows, x.transpose(1, 0, 2))
            else:
                after.append((x, rows.transpose(1, 0, 2)))
        elif name in _results(arrays):
            own = x if flattened(x) is not None else builder.temporary(x.shape, x.dtype)
            flat[name] = flattened(own)
            if own is not x:
                after.append((x, own))
        else:
            flat[name] = parts.flat(x)
    key, positions = ("packed",), functools.partial(of_packed, packed, parts.mask, parts.sizes)
    parts.attend("packed", flat, parts.options_of(parts.packing(key, packed), key, positions))
    for target, source in after:
        builder.copy(target, source)


def _attend_slices(parts: _Parts, arrays: Arrays, slices: Sequence[SegmentSlice]) -> None:
    """Every segment as a call on slices of the arrays; for gradients the one with most keys first.

    The first result of a position is written in place, and further ones are added to it.
    """
    builder, stats, backward = parts.builder, arrays["stats"], "dout" in arrays
    written: dict[str, list[tuple[int, int]]] = {name: [] for name in _results(arrays)}
    if backward:
        slices = sorted(gradient_slices(slices), key=lambda part: part.k0 - part.k1)
    for part in slices:
        q0, q1, k0, k1, band = part
        of_kv = slice(k0, k1)
        own: dict[str, View | None] = {}
        added = []
        for name, x in arrays.items():
            if name == "stats":
                continue
            positions = of_kv if name in KEY_ARRAYS else slice(q0, q1)
            own[name] = place = x[:, :, positions]
            if name not in written:
                continue
            whole = positions.start, positions.stop
            gaps = _gaps(written[name], *whole)
            written[name].append(whole)
            if gaps != [whole]:
                for begin, end in gaps:
                    builder.fill(x[:, :, begin:end], 0)
                own[name] = term = builder.temporary(place.shape, place.dtype)
                added.append((place, term))
        rows = stats
        if stats is not None and not (q1 - q0 == stats.shape[0] and stats.flags.f_contiguous):
            rows = builder.temporary((q1 - q0, *stats.shape[1:]), stats.dtype)
            if backward:
                builder.copy(rows, stats[q0:q1])
        given = parts.options_of({"band": band}, (part[:4],), functools.partial(of_slice, part, parts.mask, parts.sizes))
        parts.attend("slice", {**own, "stats": rows}, given)
        for place, term in added:
            builder.add(place, term)
        if rows is not stats and not backward:
            builder.copy(stats[q0:q1], rows)
    for name, ranges in written.items():
        for begin, end in _gaps(ranges, 0, arrays[name].shape[2]):
            builder.fill(arrays[name][:, :, begin:end], 0)
            if stats is not None and not backward:
                _fill_rows(parts, stats, begin, end)


def _gaps(written: Sequence[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    """Return the parts of a range of positions that no slice has written."""
    gaps = []
    for first, last in sorted(written):
        if begin < min(first, end):
            gaps.append((begin, min(first, end)))
        begin = max(begin, last)
    return [*gaps, (begin, end)] if begin < end else gaps


def _results(arrays: Arrays) -> tuple[str, ...]:
    """Return the names of a pass's results with a head dim."""
    return ("dq", "dk", "dv") if "dout" in arrays else ("out",)


def _fill_rows(parts: _Parts, stats: View, begin: int, end: int) -> None:
    """The log-sum-exp of queries that attend to no key."""
    sinks = parts.options.get("sinks")
    if sinks is None:
        parts.builder.fill(stats[begin:end], -np.inf)
    else:
        parts.builder.copy(stats[begin:end], sinks[None, :, None])


# The forward pass by blocks


def _attend_blocks(parts: _Parts, arrays: Arrays, tables: Tables) -> None:
    """Blocks of queries as batch items, whose pages are the blocks of keys that they attend to."""
    builder, mask = parts.builder, parts.mask
    q, k, v, out, stats = (arrays[name] for name in ("q", "k", "v", "out", "stats"))
    groups, sinks = tables.groups, parts.options.get("sinks")
    parts.options = parts.options.without("sinks")
    (_, hq, sq, batch), dv, wide = q.shape, v.shape[0], View.row_stats("stats", q).dtype
    pages = {"k": _key_pages(parts, k, groups), "v": _key_pages(parts, v, groups)}
    merges = bool(tables.copied) or sinks is not None
    target, base = out, None
    if tables.direct:
        if flattened(out) is None:
            target = builder.temporary(out.shape, out.dtype)
        rows = builder.temporary((hq, sq * batch), wide) if merges or stats is not None else None
        starts = [i * BLOCK + b * mask.sq for i, _, b in tables.direct.items.tolist()]
        given = _entry_options(parts, ("direct",), tables.direct, [*starts, mask.sq * batch])
        parts.attend("blocks", {"q": parts.flat(q), **pages, "out": flattened(target), "stats": rows}, given)
        base = None if rows is None else rows.reshape((hq, sq, batch), order="F").transpose(1, 0, 2)
    if not tables.direct or merges:
        heads, count = hq // groups, sum(len(entries.items) for entries in tables.copied)
        copies = builder.temporary((dv, heads, BLOCK, count), q.dtype)
        copied_stats = builder.temporary((heads, BLOCK * count), wide)
        begin = 0
        for number, entries in enumerate(tables.copied):
            own = slice(begin, begin + BLOCK * len(entries.items))
            items = parts.constant(("copied", number, "items"), np.asarray, entries.items)
            queries = sequences(parts.copies(q, items, heads))
            given = _entry_options(parts, ("copied", number), entries, BLOCK * np.arange(len(entries.items) + 1))
            results = {"out": sequences(copies)[..., own], "stats": copied_stats[..., own]}
            parts.attend("blocks", {"q": queries, **pages, **results}, given)
            begin = own.stop
        listed = parts.constants(("sources",), lambda: (tables.offsets, tables.parts))
        of_copies = copied_stats.reshape((heads, BLOCK, 1, count), order="F").transpose(1, 0, 2, 3)
        merged = [] if base is None else [Parts(target[..., None], base[..., None])]
        merged.append(Parts(copies[:, :, :, None], of_copies, sources=listed))
        builder.run(merge_parts, merged, target, stats, sinks, writes=[x for x in (target, stats) if x is not None])
    elif stats is not None and base is not None:
        builder.copy(stats, base)
    if target is not out:
        builder.copy(out, target)


def _key_pages(parts: _Parts, x: View, groups: int) -> View:
    """Keys or values as pages ``(D, heads, BLOCK, pages)``: a view if possible, otherwise copies of blocks."""
    found: View | None = as_pages(x) if groups == 1 else None
    if found is not None:
        return found
    sizes, of_heads = parts.sizes, 1 if groups == 1 else parts.sizes.hkv

    def make() -> Any:
        every = [(j, g, b) for b, g, j in np.ndindex(sizes.batch, of_heads, parts.mask.kinds.shape[0])]
        return np.array(every, np.int32).reshape(-1, 3)

    return parts.copies(x, parts.constant(("pages",), make), sizes.hkv if groups == 1 else 1)


def _entry_options(parts: _Parts, key: tuple[Any, ...], entries: Entries, starts: Any) -> ReadOptions:
    """Return the options of a call on batch items of blocks, whose queries have these cumulative lengths."""
    arrays = entries.table, entries.lengths, np.array(starts, np.int32)
    table, lengths, cumulative = parts.constants((*key, "entries"), lambda: arrays)
    given = {"page_table": table, "seq_lens_kv": lengths, "cu_seqlens_q": cumulative, "max_seqlen_q": BLOCK}
    given |= parts.pairs(key, None if entries.partial is None else entries.partial[:, None])
    return parts.options_of(given, key, functools.partial(of_entries, entries, parts.mask, parts.sizes))


# The backward pass by blocks


def _block_gradients(parts: _Parts, arrays: Arrays) -> None:
    """Copies of the blocks of rectangles as packed sequences, and sums of their gradients."""
    mask, sizes = parts.mask, parts.sizes
    copied = stored(mask, (sizes, "rectangles"), lambda: _copies_of_rectangles(mask, sizes))
    if not copied or not sizes.hq:
        for name in _results(arrays):
            parts.builder.fill(arrays[name], 0)
        return
    every = []
    for number, part in enumerate(copied):
        key = ("rectangles", number)
        given = {**parts.packing(key, part), **parts.pairs(key, part.partial)}
        every.append(parts.options_of(given, key, functools.partial(of_copies, part, mask)))
    if mask.heads > 1 or parts.scores is not None:
        heads = (1, 1) if mask.heads > 1 else (sizes.hq, sizes.hkv)
        _sum_of_copies(parts, arrays, copied, *heads, every)
        return
    size = arrays["q"].itemsize * BLOCK * (arrays["q"].shape[0] + arrays["v"].shape[0]) * 2
    blocks_of_heads = sum(len(part.queries) * sizes.hq + len(part.keys) * sizes.hkv for part in copied)
    turns = -(-size * blocks_of_heads // MAX_COPIES)
    step = -(-sizes.hkv // max(1, min(turns, sizes.hkv)))
    repeat = sizes.hq // sizes.hkv
    for begin in range(0, sizes.hkv, step):
        of_kv = slice(begin, min(begin + step, sizes.hkv))
        of_q = slice(of_kv.start * repeat, of_kv.stop * repeat)
        turn = {name: array[:, of_kv if name in KEY_ARRAYS else of_q] for name, array in arrays.items()}
        _sum_of_copies(parts, turn, copied, of_q.stop - of_q.start, of_kv.stop - of_kv.start, every)


def _copies_of_rectangles(mask: BlockMask, sizes: TableSizes) -> list[PackedCopies]:
    """Return the rectangles of a mask as the packed copies of each call."""
    found = (packed_copies(kind, mask, sizes) for kind in rectangles(mask, sizes.batch))
    return [part for part in found if part is not None]


def _sum_of_copies(
    parts: _Parts, arrays: Arrays, copied: Sequence[PackedCopies], hq: int, hkv: int, options: Sequence[ReadOptions]
) -> None:
    """The gradients of all copies, and their sums; hq and hkv are the heads of a copy."""
    builder, key_groups = parts.builder, 1 if parts.mask.heads == 1 else parts.sizes.hkv
    queries = _CopiedBlocks(parts, "queries", [part.queries for part in copied], parts.mask.heads, hq)
    keys = _CopiedBlocks(parts, "keys", [part.keys for part in copied], key_groups, hkv)
    copies: dict[str, View] = {}
    for name, x in arrays.items():
        of = keys if name in KEY_ARRAYS else queries
        if name in _results(arrays):
            like = copies[name[1:]]
            copies[name] = builder.temporary(like.shape, like.dtype)
        elif name == "stats":
            copies[name] = sequences(parts.copies(x.transpose(1, 0, 2)[None], of.items, of.heads, of_stats=True))[0]
        else:
            copies[name] = sequences(parts.copies(x, of.items, of.heads))
    from_q = from_kv = 0
    for part, given in zip(copied, options, strict=True):
        end_q, end_kv = from_q + BLOCK * len(part.queries), from_kv + BLOCK * len(part.keys)
        of_q, of_kv = (..., slice(from_q, end_q)), (..., slice(from_kv, end_kv))
        parts.attend("copies", {name: x[of_kv if name in KEY_ARRAYS else of_q] for name, x in copies.items()}, given)
        from_q, from_kv = end_q, end_kv
    for name in _results(arrays):
        of = keys if name in KEY_ARRAYS else queries
        builder.run(sum_blocks, Parts(blocks(copies[name]), None, sources=of.sources), arrays[name], writes=(arrays[name],))


class _CopiedBlocks:
    """The blocks of queries, or of keys, that are copied: their items, where each block is, and the heads of a copy."""

    def __init__(self, parts: _Parts, name: str, items: Sequence[Any], groups: int, heads: int) -> None:
        every, axis = np.concatenate(items), 0 if name == "keys" else 1
        key, number = ("rectangles", name), parts.mask.kinds.shape[axis]
        self.items, self.heads = parts.constant((*key, "items"), np.asarray, every), heads
        self.sources = parts.constants((*key, "sources"), sources, every, number, groups, parts.sizes.batch)
