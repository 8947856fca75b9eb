"""The batch entries of a block mask: blocks of queries, the pages that they attend to, and where their results are merged."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .block_mask import BlockMask
from .evaluate import BLOCK, FULL, PARTIAL

#: The time of a block with a mask, and of copying and merging a block of queries, relative to that of a block without a mask.
#: A query block with few full blocks is therefore computed by one masked call.
MASKED_COST, MERGE_COST = 2.0, 3.0
#: Memory of padded lists, relative to the listed blocks: longer lists are split.
_PADDING = 2
#: What a block of a list attends to, in place of the number of a partial block.
ALL, NONE = -1, -2


class Sizes(NamedTuple):
    """The sizes of a call that tables depend on: Hq, Hkv and B."""

    hq: int
    hkv: int
    batch: int


class Entries(NamedTuple):
    """Batch entries of one call.

    Attributes:
        items: int32 ``(E, 3)``: query block, group of heads and batch entry of each.
        table: int32 ``(P, E)``: the pages of each.
        lengths: int32 ``(E,)``: the number of keys of each.
        partial: int32 ``(P, E)``: the number of the partial block of each page, or :data:`ALL` or :data:`NONE`; None for a call
            without a mask.
    """

    items: NDArray[np.int32]
    table: NDArray[np.int32]
    lengths: NDArray[np.int32]
    partial: NDArray[np.int32] | None


class Tables(NamedTuple):
    """The calls of a forward pass.

    Attributes:
        groups: the number of groups of heads, which are computed separately: 1, or Hq if the mask differs between heads.
        direct: the entries that read q and write out in place: all query blocks in order; or None.
        copied: the entries that read copies of query blocks, in up to two calls: without and with a mask.
        offsets, parts: the results of target t, which is (query block, group, batch entry) with the first fastest, are the copied
            entries ``parts[offsets[t] : offsets[t + 1]]``, and those of ``direct``.
    """

    groups: int
    direct: Entries | None
    copied: tuple[Entries, ...]
    offsets: NDArray[np.int32]
    parts: NDArray[np.int32]


class _Lists:
    """Query blocks with their lists of key blocks, which become :class:`Entries`."""

    def __init__(self) -> None:
        self.items: list[tuple[int, int, int]] = []
        self.keys: list[NDArray[np.int64]] = []
        self.partial: list[NDArray[np.int64]] = []

    def add(self, item: tuple[int, int, int], keys: NDArray[np.int64], partial: NDArray[np.int64]) -> None:
        """Append a query block."""
        self.items.append(item)
        self.keys.append(keys)
        self.partial.append(partial)

    @property
    def blocks(self) -> int:
        """The number of listed blocks."""
        return sum(map(len, self.keys))

    def split(self) -> _Lists:
        """Lists of which the long ones are split, so that lists of equal length need at most twice the memory."""
        most = split_length(list(map(len, self.keys)))
        found = _Lists()
        for item, keys, partial in zip(self.items, self.keys, self.partial, strict=True):
            for begin in range(0, len(keys), most):
                found.add(item, keys[begin : begin + most], partial[begin : begin + most])
        return found

    def entries(self, mask: BlockMask, sizes: Sizes, masked: bool) -> Entries:
        """The batch entries of the lists."""
        key_blocks = mask.kinds.shape[0]
        most = max(1, *map(len, self.keys)) if self.keys else 1
        count = len(self.items)
        table, partial = np.zeros((most, count), np.int32), np.full((most, count), NONE, np.int32)
        lengths = np.zeros(count, np.int32)
        for e, ((_, g, b), keys, of_keys) in enumerate(zip(self.items, self.keys, self.partial, strict=True)):
            if len(keys):
                first = page(sizes, mask, g, b) * key_blocks
                table[:, e] = first + keys[0]
                table[: len(keys), e] = first + keys
                partial[: len(keys), e] = of_keys
                lengths[e] = BLOCK * (len(keys) - 1) + min(BLOCK, mask.skv - BLOCK * int(keys[-1]))
        items = np.array(self.items, np.int32).reshape(-1, 3)
        return Entries(items, np.asfortranarray(table), lengths, np.asfortranarray(partial) if masked else None)


def split_length(lengths: list[int]) -> int:
    """The length to which lists are split, so that lists of this length need at most twice the memory of the listed blocks."""
    counts = np.array(lengths)
    most = max(lengths, default=1)
    while most > 1 and (-(-counts // most)).sum() * most > _PADDING * counts.sum():
        most -= 1
    return max(most, 1)


def page(sizes: Sizes, mask: BlockMask, group: int, entry: int) -> int:
    """The row of pages of a group and batch entry: pages are those of each entry, or of each key/value head and entry."""
    return entry if mask.heads == 1 else group // (sizes.hq // sizes.hkv) + sizes.hkv * entry


def make_tables(mask: BlockMask, sizes: Sizes) -> Tables:
    """The batch entries of a mask for calls of some sizes."""
    _, query_blocks, groups, _ = mask.kinds.shape
    numbers = np.full(mask.kinds.shape, ALL, np.int64)
    numbers.T[mask.kinds.T == PARTIAL] = np.arange(mask.partial)
    without, masked = _Lists(), _Lists()
    for b in range(sizes.batch):
        for g in range(groups):
            for i in range(query_blocks):
                column = (slice(None), i, g, b % mask.batch)
                kinds, of_blocks = mask.kinds[column], numbers[column]
                full, listed = np.flatnonzero(kinds == FULL), np.flatnonzero(kinds)
                partial = np.flatnonzero(kinds == PARTIAL)
                separate = len(full) * (MASKED_COST - 1) > MERGE_COST or not len(partial)
                without.add((i, g, b), full if separate else full[:0], of_blocks[full if separate else full[:0]])
                own = partial if separate else listed
                masked.add((i, g, b), own, of_blocks[own])
    direct, copied = None, []
    if groups == 1 and without.blocks:
        direct = without.entries(mask, sizes, False)
    elif groups == 1 and _is_even(masked):
        return Tables(1, masked.entries(mask, sizes, True), (), *_sources(mask, sizes, ()))
    if direct is None and without.blocks:
        copied.append(_without_empty(without).entries(mask, sizes, False))
    if masked.blocks:
        copied.append(masked.split().entries(mask, sizes, True))
    return Tables(groups, direct, tuple(copied), *_sources(mask, sizes, copied))


def _is_even(lists: _Lists) -> bool:
    """Whether lists of equal length need at most twice the memory, so that none is split."""
    return max(map(len, lists.keys), default=0) * len(lists.keys) <= _PADDING * lists.blocks or not lists.blocks


def _without_empty(lists: _Lists) -> _Lists:
    found = _Lists()
    for item, keys, partial in zip(lists.items, lists.keys, lists.partial, strict=True):
        if len(keys):
            found.add(item, keys, partial)
    return found


def _sources(mask: BlockMask, sizes: Sizes, copied: Any) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The copied entries of every target, as offsets and numbers."""
    _, query_blocks, groups, _ = mask.kinds.shape
    items = np.concatenate([np.zeros((0, 3), np.int32), *(entries.items for entries in copied)])
    return sources(items, query_blocks, groups, sizes.batch)


def sources(items: NDArray[np.int32], blocks: int, groups: int, batch: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The copies of every block, as offsets and numbers: those of ``(block, group, batch entry)``, the first fastest."""
    targets = items[:, 0] + blocks * (items[:, 1] + groups * items[:, 2])
    offsets = np.concatenate([[0], np.cumsum(np.bincount(targets, minlength=blocks * groups * batch))])
    return offsets.astype(np.int32), np.argsort(targets, kind="stable").astype(np.int32)


def attends(mask: BlockMask, partial: NDArray[np.int32]) -> NDArray[np.float16]:
    """The mask of entries as a captured array ``(keys, queries, E)`` in Fortran order: 1 where a query attends, otherwise 0."""
    pages, count = partial.shape
    known = np.concatenate(
        [mask.bits, np.zeros((1, BLOCK * BLOCK // 8), np.uint8), np.full((1, BLOCK * BLOCK // 8), 255, np.uint8)]
    )
    found = np.empty((count, BLOCK, pages, BLOCK), np.float16)
    for e in range(count):  # one at a time: the bits of all would need twice the memory
        blocks = np.unpackbits(known[partial[:, e]], axis=1).reshape(pages, BLOCK, BLOCK)  # ALL is the last one, NONE before it
        found[e] = blocks.transpose(1, 0, 2)
    return found.reshape(count, BLOCK, pages * BLOCK).T
