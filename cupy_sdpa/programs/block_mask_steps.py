"""Builders of attention with a block mask, and of its gradients.

The method of a mask (:mod:`cupy_sdpa.block_masks.method`) is one packed call, calls on slices, batch entries of blocks, or
a call whose kernel skips blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..block_masks.block_mask import BlockMask
from ..block_masks.block_positions import MovableFunction, Positions, of_copies, of_entries, of_packed, of_slice
from ..block_masks.entries import Entries, PackedCopies, Sizes, Tables, attends, packed_copies, rectangles, sources
from ..block_masks.method import as_pages, flattened, gradient_function, is_attended, method_of
from ..block_masks.native import native_of
from ..block_masks.segments import Packed, Slice, gradient_slices
from ..boundary.options import band_options
from ..kernels.blocks import BLOCK, Sources, copy_blocks, copy_elements, merge_blocks, sum_blocks
from ..problem.view import View
from ..score_fn.expression import AXES
from .program import Builder
from .steps import Constant

#: The bytes of copies of blocks at a time; heads that need more are computed one part after the other.
MAX_COPIES = 1 << 31

T = TypeVar("T")


def stored(mask: BlockMask, key: tuple[Any, ...], make: Callable[[], T]) -> T:
    """The tables of a mask under a key; they are made once, and shared by all programs of the mask."""
    if key not in mask.tables:
        mask.tables[key] = make()
    found: T = mask.tables[key]
    return found


class Forward(NamedTuple):
    """The arrays of a forward pass, as for :func:`cupy_sdpa.attention`."""

    q: View
    k: View
    v: View
    out: View
    stats: View | None


class Gradients(NamedTuple):
    """The arrays of a backward pass, as for :func:`cupy_sdpa.attention_backward`."""

    dout: View
    q: View
    k: View
    v: View
    out: View
    stats: View
    dq: View
    dk: View
    dv: View


class _Parts:
    """What the parts of a call with a block mask have in common; ``options`` are the others than the mask."""

    def __init__(
        self, builder: Builder, q: View, k: View, mask: BlockMask, options: Mapping[str, Any], *, deterministic: bool
    ) -> None:
        self.builder, self.mask, self.sizes = builder, mask, Sizes(q.shape[1], k.shape[1], q.shape[3])
        self.method = method_of(mask, self.sizes)
        self.flags: dict[str, Any] = {"deterministic": deterministic}
        self.options = {name: value for name, value in options.items() if value is not None}
        if "tensors" in self.options:
            # the copies of elements count whole elements from the first one
            given = self.options["tensors"].items()
            self.options["tensors"] = {name: x if _counts_elements(x) else builder.copied(x) for name, x in given}
        self.scores = score_function(q.shape, k.shape, self.options)
        for name in ("score_mod", "tensors"):
            self.options.pop(name, None)

    def options_of(self, part: Mapping[str, Any], key: tuple[Any, ...], positions: Callable[[], Positions]) -> dict[str, Any]:
        """The options of a part, with the score function at its positions.

        ``part`` has the options of this part only; ``key`` identifies it among those of the sizes.
        """
        options = {**self.options, **part}
        if self.scores is None:
            return options
        if key[0] == (0, self.mask.sq, 0, self.mask.skv):  # all queries and keys are at their positions
            return {**options, **self.scores.options}
        key = (self.sizes, *key)
        found, places = stored(self.mask, (*key, "positions"), lambda: self._places(positions()))
        tensors = {name: self.builder.constant(constant) for name, constant in places.items()}
        names = {}
        for number, access in enumerate(self.scores.reads):
            array = self.scores.tensors[access.name]
            names[access] = name = f"{access.name} at {number}"
            if not any(isinstance(axis, str) for axis in access.axes):
                tensors[name] = array[(*access.axes, ...)] if access.axes else array
                continue
            layout = access.axes, array.shape, array.strides
            make = functools.partial(self.scores.index, access, array, found)
            index = stored(self.mask, (*key, "index", layout), lambda make=make: Constant(make()))  # type: ignore[misc]
            tensors[name] = self.builder.temporary(index.array.shape, array.dtype)
            self.builder.run(copy_elements, tensors[name], array, self.builder.constant(index), writes=(tensors[name],))
        located = self.scores.located(names, {name: constant.array.ndim for name, constant in places.items()})
        return {**options, "score_mod": located, "tensors": {**options.get("tensors", {}), **tensors}}

    def _places(self, positions: Positions) -> tuple[Positions, dict[str, Constant]]:
        assert self.scores
        return positions, {name: Constant(array) for name, array in self.scores.places(positions, self.mask).items()}

    def whole_options(self, **others: Any) -> dict[str, Any]:
        """The options of one call on the whole arrays."""
        return {**self.options, **(self.scores.options if self.scores else {}), **others}

    def packing(self, key: tuple[Any, ...], part: Packed | PackedCopies) -> dict[str, Any]:
        """The options of packed sequences."""
        starts = stored(self.mask, (self.sizes, *key, "starts"), lambda: (Constant(part.starts_q), Constant(part.starts_kv)))
        starts_q, starts_kv = map(self.builder.constant, starts)
        return {
            "cu_seqlens_q": starts_q, "cu_seqlens_kv": starts_kv, "max_seqlen_q": part.longest_q,
            "max_seqlen_kv": part.longest_kv, **band_options(getattr(part, "band", None)),
        }  # fmt: skip

    def pairs(self, key: tuple[Any, ...], partial: Any) -> dict[str, Any]:
        """The options of the mask within partial blocks; none if all blocks are full."""
        if partial is None:
            return {}
        constant = stored(self.mask, (self.sizes, *key, "pairs"), lambda: Constant(attends(self.mask, partial)))
        return {"mask_mod": is_attended, "tensors": {"attends": self.builder.constant(constant)}}

    def flat(self, x: View) -> View:
        """An array ``(D, H, S, B)`` as ``(D, H, S B)``; a copy if its batch entries do not follow one another."""
        view: View | None = flattened(x)
        if view is None:
            dense = self.builder.temporary(x.shape, x.dtype)
            self.builder.copy(dense, x)
            view = flattened(dense)
            assert view is not None
        return view

    def dense(self, x: View) -> tuple[View, Callable[[], None]]:
        """An array for a result that can be flattened, and a function that copies it to the result, if it is not that."""
        if flattened(x) is not None:
            return x, lambda: None
        own = self.builder.temporary(x.shape, x.dtype)
        return own, lambda: self.builder.copy(x, own)

    def copies(self, x: View, items: View, heads: int, *, of_stats: bool = False) -> View:
        """Copies of blocks ``(D, heads, BLOCK, n)``."""
        made = self.builder.temporary((x.shape[0], heads, BLOCK, items.shape[0]), np.float32 if of_stats else x.dtype)
        self.builder.run(copy_blocks, made, x, items, heads, of_stats, writes=(made,))
        return made


def _counts_elements(array: View) -> bool:
    """Whether every element of an array is a number of elements, 0 or more, after the first one."""
    return all(stride >= 0 and stride % array.itemsize == 0 for stride in array.strides)


def score_function(q: Sequence[int], k: Sequence[int], options: Mapping[str, Any]) -> MovableFunction | None:
    """The score function of a call with a block mask, from the shapes of q and k; None if there is none.

    Raises:
        ValueError: it masks keys, or ``tensors`` is passed without it.
    """
    score_mod, tensors = options.get("score_mod"), options.get("tensors") or {}
    if score_mod is None:
        if tensors:
            raise ValueError(f"tensors has {', '.join(tensors)}, but score_mod is not passed to read it")
        return None
    return MovableFunction(score_mod, tensors, dict(zip(AXES, (q[3], q[1], q[2], k[2]), strict=True)))


def sequences(copies: View) -> View:
    """Copies of blocks ``(D, H, BLOCK, n)`` as packed sequences ``(D, H, BLOCK n)``."""
    d, heads, _, count = copies.shape
    return copies.reshape((d, heads, BLOCK * count), order="F")


def blocks(array: View) -> View:
    """Packed sequences ``(D, H, BLOCK n)`` as blocks ``(D, H, BLOCK, n)``."""
    d, heads, total = array.shape
    return array.reshape((d, heads, BLOCK, total // BLOCK), order="F")


# The forward pass


def forward(
    builder: Builder,
    arrays: Forward,
    mask: BlockMask,
    options: Mapping[str, Any],
    *,
    deterministic: bool,
    native: bool = False,
) -> None:
    """Add the steps that write the output, and the log-sum-exp unless ``stats`` is None.

    ``native``: the kernel skips blocks itself, see :mod:`cupy_sdpa.block_masks.native`.
    """
    q, k, v, out, stats = arrays
    parts = _Parts(builder, q, k, mask, options, deterministic=deterministic)
    if parts.method.packed:
        _packed(parts, arrays, parts.method.packed)
    elif parts.method.slices is not None:
        _slices(parts, arrays, parts.method.slices)
    elif native:
        found = native_of(mask)
        assert found
        bits = stored(mask, (parts.sizes, "bits"), lambda: Constant(np.asfortranarray(found.of(parts.sizes))))
        results: dict[str, Any] = {"out": out, "stats": stats, "block_bits": builder.constant(bits)}
        builder.attend("blocks", q, k, v, parts.whole_options(**found.options), **results, **parts.flags)
    else:
        _blocks(parts, arrays, parts.method.blocks)


def _packed(parts: _Parts, arrays: Forward, packed: Packed) -> None:
    """All segments as the sequences of one packed call."""
    builder, (q, k, v, out, stats) = parts.builder, arrays
    flat = parts.flat(q), parts.flat(k), parts.flat(v)
    own, finish = parts.dense(out)
    rows = None if stats is None else builder.temporary((out.shape[1], out.shape[2] * out.shape[3]), np.float32)
    given = parts.options_of(
        parts.packing(("packed",), packed), ("packed",), functools.partial(of_packed, packed, parts.mask, parts.sizes)
    )
    builder.attend("packed", *flat, given, out=flattened(own), stats=rows, **parts.flags)
    finish()
    if stats is not None and rows is not None:
        builder.copy(stats, rows.reshape((rows.shape[0], *stats.shape[::2]), order="F").transpose(1, 0, 2))


def _slices(parts: _Parts, arrays: Forward, slices: Sequence[Slice]) -> None:
    """Every segment as a call on slices of the arrays."""
    builder, (q, k, v, out, stats), begin = parts.builder, arrays, 0
    for part in slices:
        q0, q1, k0, k1, band = part
        _fill_rows(parts, out, stats, begin, q0)
        rows = stats
        if stats is not None and not ((q0, q1) == (0, q.shape[2]) and stats.flags.f_contiguous):
            rows = builder.temporary((q1 - q0, *stats.shape[1:]), np.float32)
        given = parts.options_of(band_options(band), (part[:4],), functools.partial(of_slice, part, parts.mask, parts.sizes))
        of_kv = slice(k0, k1)
        results: dict[str, Any] = {"out": out[:, :, q0:q1], "stats": rows}
        builder.attend("slice", q[:, :, q0:q1], k[:, :, of_kv], v[:, :, of_kv], given, **results, **parts.flags)
        if stats is not None and rows is not None and rows is not stats:
            builder.copy(stats[q0:q1], rows)
        begin = q1
    _fill_rows(parts, out, stats, begin, q.shape[2])


def _fill_rows(parts: _Parts, out: View, stats: View | None, begin: int, end: int) -> None:
    """The results of queries that attend to no key."""
    parts.builder.fill(out[:, :, begin:end], 0)
    if stats is None or begin == end:
        return
    sinks = parts.options.get("sinks")
    if sinks is None:
        parts.builder.fill(stats[begin:end], -np.inf)
    else:
        parts.builder.copy(stats[begin:end], sinks[None, :, None])


def _blocks(parts: _Parts, arrays: Forward, tables: Tables) -> None:
    """Blocks of queries as batch entries, whose pages are the blocks of keys that they attend to."""
    builder, mask, sizes = parts.builder, parts.mask, parts.sizes
    q, k, v, out, stats = arrays
    groups, sinks = tables.groups, parts.options.pop("sinks", None)
    (_, hq, sq, batch), dv = q.shape, v.shape[0]
    pages = _pages(parts, k, groups), _pages(parts, v, groups)
    merges = bool(tables.copied) or sinks is not None
    target, finish = parts.dense(out) if tables.direct else (out, None)
    base = None
    if tables.direct:
        rows = builder.temporary((hq, sq * batch), np.float32) if merges or stats is not None else None
        starts = [i * BLOCK + b * mask.sq for i, _, b in tables.direct.items.tolist()]
        given = _entry_options(parts, ("direct",), tables.direct, [*starts, mask.sq * batch])
        builder.attend("blocks", parts.flat(q), pages[0], pages[1], given, out=flattened(target), stats=rows, **parts.flags)
        base = None if rows is None else rows.reshape((hq, sq, batch), order="F").transpose(1, 0, 2)
    if not tables.direct or merges:
        heads, count = hq // groups, sum(len(entries.items) for entries in tables.copied)
        copies = builder.temporary((dv, heads, BLOCK, count), q.dtype)
        copied_stats = builder.temporary((heads, BLOCK * count), np.float32)
        begin = 0
        for number, entries in enumerate(tables.copied):
            own = slice(begin, begin + BLOCK * len(entries.items))
            items = stored(mask, (sizes, "copied", number, "items"), lambda entries=entries: Constant(entries.items))  # type: ignore[misc]
            queries = sequences(parts.copies(q, builder.constant(items), heads))
            given = _entry_options(parts, ("copied", number), entries, BLOCK * np.arange(len(entries.items) + 1))
            results: dict[str, Any] = {"out": sequences(copies)[..., own], "stats": copied_stats[..., own]}
            builder.attend("blocks", queries, pages[0], pages[1], given, **results, **parts.flags)
            begin = own.stop
        offsets, numbers = stored(mask, (sizes, "sources"), lambda: (Constant(tables.offsets), Constant(tables.parts)))
        where = Sources(builder.constant(offsets), builder.constant(numbers), groups)
        of_copies = copied_stats.reshape((heads, BLOCK, count), order="F")
        writes = [x for x in (target, stats) if x is not None]
        builder.run(merge_blocks, where, copies, of_copies, target, stats, base, sinks, writes=writes)
    elif stats is not None and base is not None:
        builder.copy(stats, base)
    if finish:
        finish()


def _pages(parts: _Parts, x: View, groups: int) -> View:
    """Keys or values as pages ``(D, heads, BLOCK, pages)``: a view if possible, otherwise copies of blocks."""
    found: View | None = as_pages(x) if groups == 1 else None
    if found is not None:
        return found
    mask, sizes = parts.mask, parts.sizes
    of_heads = 1 if groups == 1 else sizes.hkv

    def make() -> Constant:
        every = [(j, g, b) for b, g, j in np.ndindex(sizes.batch, of_heads, mask.kinds.shape[0])]
        return Constant(np.array(every, np.int32).reshape(-1, 3))

    items = parts.builder.constant(stored(mask, (sizes, "pages"), make))
    return parts.copies(x, items, sizes.hkv if groups == 1 else 1)


def _entry_options(parts: _Parts, key: tuple[Any, ...], entries: Entries, starts: Any) -> dict[str, Any]:
    """The options of a call on batch entries of blocks, whose queries have these cumulative lengths."""

    def make() -> list[Constant]:
        return [Constant(entries.table), Constant(entries.lengths), Constant(np.array(starts, np.int32))]

    table, lengths, cumulative = map(parts.builder.constant, stored(parts.mask, (parts.sizes, *key, "entries"), make))
    given = {"page_table": table, "seq_lens_kv": lengths, "cu_seqlens_q": cumulative, "max_seqlen_q": BLOCK}
    given |= parts.pairs(key, None if entries.partial is None else entries.partial[:, None])
    return parts.options_of(given, key, functools.partial(of_entries, entries, parts.mask, parts.sizes))


# The backward pass


def backward(builder: Builder, arrays: Gradients, mask: BlockMask, options: Mapping[str, Any], *, deterministic: bool) -> None:
    """Add the steps that write dq, dk and dv."""
    options = {name: value for name, value in options.items() if name != "sinks"}  # the log-sum-exp contains them
    parts = _Parts(builder, arrays.q, arrays.k, mask, options, deterministic=deterministic)
    method = parts.method
    if method.blocks is not None and not deterministic and (function := gradient_function(mask, parts.sizes)):
        # deterministic gradients would need memory for all pairs
        _attend_backward(parts, "whole", arrays, parts.whole_options(mask_mod=function))
    elif method.packed:
        _packed_gradients(parts, arrays, method.packed)
    elif method.slices is not None:
        _slice_gradients(parts, arrays, method.slices)
    else:
        _block_gradients(parts, arrays)


def _attend_backward(parts: _Parts, name: str, arrays: Gradients, options: Mapping[str, Any]) -> None:
    """One step: the gradients of a part."""
    others = arrays._asdict()
    q, k, v = (others.pop(key) for key in ("q", "k", "v"))
    parts.builder.attend_backward(name, q, k, v, options, **others, **parts.flags)


def _packed_gradients(parts: _Parts, arrays: Gradients, packed: Packed) -> None:
    """All segments as the sequences of one packed call."""
    builder, (s, h, b) = parts.builder, arrays.stats.shape
    rows = builder.temporary((h, s, b), np.float32)
    builder.copy(rows, arrays.stats.transpose(1, 0, 2))
    dout, q, k, v, out = (parts.flat(x) for x in arrays[:5])
    results = [parts.dense(x) for x in arrays[6:]]
    given = parts.options_of(
        parts.packing(("packed",), packed), ("packed",), functools.partial(of_packed, packed, parts.mask, parts.sizes)
    )
    dq, dk, dv = (parts.flat(own) for own, _ in results)
    stats = rows.reshape((h, s * b), order="F")
    _attend_backward(parts, "packed", Gradients(dout, q, k, v, out, stats, dq, dk, dv), given)
    for _, finish in results:
        finish()


def _slice_gradients(parts: _Parts, arrays: Gradients, slices: Sequence[Slice]) -> None:
    """Every segment as a call on slices of the arrays, the one with most keys first."""
    builder, results = parts.builder, [_Sum(parts.builder, array) for array in arrays[6:]]
    for part in sorted(gradient_slices(slices), key=lambda part: part.k0 - part.k1):
        q0, q1, k0, k1, band = part
        rows = arrays.stats
        if q1 - q0 < rows.shape[0] or not rows.flags.f_contiguous:
            rows = builder.temporary((q1 - q0, *rows.shape[1:]), rows.dtype)
            builder.copy(rows, arrays.stats[q0:q1])
        targets = [result.target(*bounds) for result, bounds in zip(results, ((q0, q1), (k0, k1), (k0, k1)), strict=True)]
        given = parts.options_of(band_options(band), (part[:4],), functools.partial(of_slice, part, parts.mask, parts.sizes))
        of_q, of_kv = (slice(None), slice(None), slice(q0, q1)), (slice(None), slice(None), slice(k0, k1))
        inputs = arrays.dout[of_q], arrays.q[of_q], arrays.k[of_kv], arrays.v[of_kv], arrays.out[of_q], rows
        _attend_backward(parts, "slice", Gradients(*inputs, *targets), given)
        for result in results:
            result.add()
    for result in results:
        result.clear_rest()


class _Sum:
    """A gradient as the sum of gradients of slices: the first one of a position is written, the others are added."""

    def __init__(self, builder: Builder, array: View) -> None:
        self._builder, self._array = builder, array
        self._written: list[tuple[int, int]] = []
        self._part: tuple[View, View] | None = None

    def target(self, begin: int, end: int) -> View:
        """An array for the gradient of a slice: the slice, or a new one that is added to it by :meth:`add`."""
        part = self._array[:, :, begin:end]
        gaps = self._gaps(begin, end)
        self._written.append((begin, end))
        if gaps == [(begin, end)]:
            return part
        for first, last in gaps:
            self._builder.fill(self._array[:, :, first:last], 0)
        self._part = part, self._builder.temporary(part.shape, part.dtype)
        return self._part[1]

    def add(self) -> None:
        """Add the gradient of the last slice, if it is not in place."""
        if self._part:
            self._builder.add(*self._part)
            self._part = None

    def clear_rest(self) -> None:
        """Write 0 to positions that are in no slice."""
        for first, last in self._gaps(0, self._array.shape[2]):
            self._builder.fill(self._array[:, :, first:last], 0)

    def _gaps(self, begin: int, end: int) -> list[tuple[int, int]]:
        """The parts of a range that no slice has written."""
        gaps = []
        for first, last in sorted(self._written):
            if begin < min(first, end):
                gaps.append((begin, min(first, end)))
            begin = max(begin, last)
        return [*gaps, (begin, end)] if begin < end else gaps


class _Copied(NamedTuple):
    """The rectangles of a mask: the copied blocks, int32 ``(n, 3)``, and the packed copies of each call.

    ``of_queries`` and ``of_keys`` are the copies of every block: offsets and parts, see :class:`.Sources`; of as many groups of
    heads as ``groups`` and ``key_groups``.
    """

    queries: Constant
    keys: Constant
    of_queries: tuple[Constant, Constant]
    of_keys: tuple[Constant, Constant]
    groups: int
    key_groups: int
    parts: list[PackedCopies]


def _copied(mask: BlockMask, sizes: Sizes) -> _Copied:
    found = (packed_copies(kind, mask, sizes) for kind in rectangles(mask, sizes.batch))
    parts = [part for part in found if part is not None]
    empty = np.zeros((0, 3), np.int32)
    queries = np.concatenate([empty, *(part.queries for part in parts)])
    keys = np.concatenate([empty, *(part.keys for part in parts)])
    key_blocks, query_blocks, groups, _ = mask.kinds.shape
    key_groups = 1 if groups == 1 else sizes.hkv
    offsets_q, parts_q = map(Constant, sources(queries, query_blocks, groups, sizes.batch))
    offsets_kv, parts_kv = map(Constant, sources(keys, key_blocks, key_groups, sizes.batch))
    return _Copied(Constant(queries), Constant(keys), (offsets_q, parts_q), (offsets_kv, parts_kv), groups, key_groups, parts)


def _block_gradients(parts: _Parts, arrays: Gradients) -> None:
    """Copies of the blocks of rectangles as packed sequences, and sums of their gradients."""
    mask, sizes = parts.mask, parts.sizes
    copied = stored(mask, (sizes, "rectangles"), lambda: _copied(mask, sizes))
    if not copied.parts or not sizes.hq:
        for result in arrays[6:]:
            parts.builder.fill(result, 0)
        return
    every = []
    for number, part in enumerate(copied.parts):
        key = ("rectangles", number)
        given = {**parts.packing(key, part), **parts.pairs(key, part.partial)}
        every.append(parts.options_of(given, key, functools.partial(of_copies, part, mask)))
    if mask.heads > 1 or parts.scores is not None:
        heads = (1, 1) if mask.heads > 1 else (sizes.hq, sizes.hkv)
        _sum_of_copies(parts, arrays, copied, *heads, every)
        return
    size = arrays.q.itemsize * BLOCK * (arrays.q.shape[0] + arrays.v.shape[0]) * 2
    turns = -(-size * (len(copied.queries.array) * sizes.hq + len(copied.keys.array) * sizes.hkv) // MAX_COPIES)
    step = -(-sizes.hkv // max(1, min(turns, sizes.hkv)))
    repeat = sizes.hq // sizes.hkv
    for begin in range(0, sizes.hkv, step):
        of_kv = slice(begin, min(begin + step, sizes.hkv))
        of_q = slice(of_kv.start * repeat, of_kv.stop * repeat)
        named = arrays._asdict().items()
        turn = {name: array[:, of_kv if name in ("k", "v", "dk", "dv") else of_q] for name, array in named}
        _sum_of_copies(parts, Gradients(**turn), copied, of_q.stop - of_q.start, of_kv.stop - of_kv.start, every)


def _sum_of_copies(
    parts: _Parts, arrays: Gradients, copied: _Copied, hq: int, hkv: int, options: Sequence[Mapping[str, Any]]
) -> None:
    """The gradients of all copies, and their sums; hq and hkv are the heads of a copy."""
    builder = parts.builder
    queries, keys = builder.constant(copied.queries), builder.constant(copied.keys)
    dout, q, out = (sequences(parts.copies(x, queries, hq)) for x in (arrays.dout, arrays.q, arrays.out))
    k, v = (sequences(parts.copies(x, keys, hkv)) for x in (arrays.k, arrays.v))
    stats = sequences(parts.copies(arrays.stats.transpose(1, 0, 2)[None], queries, hq, of_stats=True))[0]
    dq, dk, dv = (builder.temporary(x.shape, x.dtype) for x in (q, k, v))
    from_q = from_kv = 0
    for part, given in zip(copied.parts, options, strict=True):
        end_q, end_kv = from_q + BLOCK * len(part.queries), from_kv + BLOCK * len(part.keys)
        of_q, of_kv = (..., slice(from_q, end_q)), (..., slice(from_kv, end_kv))
        inputs = dout[of_q], q[of_q], k[of_kv], v[of_kv], out[of_q], stats[of_q]
        _attend_backward(parts, "copies", Gradients(*inputs, dq[of_q], dk[of_kv], dv[of_kv]), given)
        from_q, from_kv = end_q, end_kv
    for copies, result, of, groups in (
        (dq, arrays.dq, copied.of_queries, copied.groups),
        (dk, arrays.dk, copied.of_keys, copied.key_groups),
        (dv, arrays.dv, copied.of_keys, copied.key_groups),
    ):
        where = Sources(builder.constant(of[0]), builder.constant(of[1]), groups)
        builder.run(sum_blocks, where, blocks(copies), result, writes=(result,))
