"""A block mask as batch entries: lists of pages for the forward pass, and rectangles of blocks for the backward pass.

Forward, a block of queries is a batch entry of a call with paged keys: its pages are the blocks that it attends to. Blocks with
and without a mask are separate calls, whose results are merged, unless that takes longer than computing all with a mask.

Backward, cuDNN reads no pages. Copies of the blocks of a rectangle, which are query blocks that attend to the same key blocks,
are a packed sequence, and the gradients of all copies of a block are summed. The cost besides cuDNN's kernels is
proportional to the number of copies, so blocks are grouped in the way that needs fewer: key blocks with equal sets of query
blocks, or query blocks with equal sets of key blocks. With equal numbers the first is used: cuDNN's kernels keep a tile of keys
and loop over queries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..device.blocks import BLOCK
from .block_mask import BlockMask
from .evaluate import FULL, PARTIAL

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
        offsets, parts: the results of target t, which is (query block, group, batch entry) with the first fastest, are those of
            the copied entries ``parts[offsets[t] : offsets[t + 1]]`` and of ``direct``.
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


def _sources(mask: BlockMask, sizes: Sizes, copied: Sequence[Entries]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The copied entries of every target, as offsets and numbers."""
    _, query_blocks, groups, _ = mask.kinds.shape
    items = np.concatenate([np.zeros((0, 3), np.int32), *(entries.items for entries in copied)])
    return sources(items, query_blocks, groups, sizes.batch)


def sources(items: NDArray[np.int32], blocks: int, groups: int, batch: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The copies of every block, as offsets and numbers: those of ``(block, group, batch entry)``, the first fastest."""
    targets = items[:, 0] + blocks * (items[:, 1] + groups * items[:, 2])
    offsets = np.concatenate([[0], np.cumsum(np.bincount(targets, minlength=blocks * groups * batch))])
    return offsets.astype(np.int32), np.argsort(targets, kind="stable").astype(np.int32)


class Rectangle(NamedTuple):
    """Query blocks that attend to key blocks.

    Attributes:
        group, entry: the group of heads and the batch entry.
        queries, keys: the blocks, in order.
        partial: the numbers of the partial blocks ``(query blocks,)`` of a single key block; None if all blocks are full.
    """

    group: int
    entry: int
    queries: NDArray[np.int64]
    keys: NDArray[np.int64]
    partial: NDArray[np.int64] | None = None


class PackedCopies(NamedTuple):
    """Rectangles as packed sequences of copies of blocks.

    Attributes:
        queries, keys: int32 ``(n, 3)``: block, group of heads and batch entry of each copy. Keys have the head of their group.
        starts_q, starts_kv: int32, the cumulative lengths.
        longest_q, longest_kv: the maximum lengths.
        partial: int32 ``(P, E)``: the numbers of the partial blocks of each sequence, :data:`NONE` after the last one; or None.
    """

    queries: NDArray[np.int32]
    keys: NDArray[np.int32]
    starts_q: NDArray[np.int32]
    starts_kv: NDArray[np.int32]
    longest_q: int
    longest_kv: int
    partial: NDArray[np.int32] | None


def full_rectangles(mask: BlockMask, batch: int) -> list[Rectangle]:
    """The full blocks of a mask as rectangles."""
    found = []
    for b in range(batch):
        for g in range(mask.heads):
            blocks = mask.kinds[:, :, g, b % mask.batch] == FULL
            by_keys = [Rectangle(g, b, queries, keys) for keys, queries in _equal_rows(blocks)]
            by_queries = [Rectangle(g, b, queries, keys) for queries, keys in _equal_rows(blocks.T)]
            found += by_keys if _copies(by_keys) <= _copies(by_queries) else by_queries
    return found


def _copies(rectangles: list[Rectangle]) -> int:
    """The number of copies of blocks."""
    return sum(len(rectangle.queries) + len(rectangle.keys) for rectangle in rectangles)


def _equal_rows(blocks: NDArray[np.bool_]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """The rows with equal contents and the columns that are set, for every content that is not empty."""
    rows: dict[bytes, list[int]] = {}
    for number, row in enumerate(blocks):
        if row.any():
            rows.setdefault(row.tobytes(), []).append(number)
    for numbers in rows.values():
        yield np.array(numbers), np.flatnonzero(blocks[numbers[0]])


def partial_rectangles(mask: BlockMask, batch: int) -> list[Rectangle]:
    """The partial blocks of a mask as rectangles of one key block; the mask of longer ones is split."""
    numbers = np.zeros(mask.kinds.shape, np.int64)
    numbers.T[mask.kinds.T == PARTIAL] = np.arange(mask.partial)
    lists = []
    for b in range(batch):
        for g in range(mask.heads):
            for j, row in enumerate(mask.kinds[:, :, g, b % mask.batch] == PARTIAL):
                if row.any():
                    queries = np.flatnonzero(row)
                    lists.append((g, b, j, queries, numbers[j, queries, g, b % mask.batch]))
    most = split_length([len(queries) for *_, queries, _ in lists])
    return [
        Rectangle(g, b, queries[i : i + most], np.array([j]), partial[i : i + most])
        for g, b, j, queries, partial in lists
        for i in range(0, len(queries), most)
    ]


def packed_copies(rectangles: list[Rectangle], mask: BlockMask, sizes: Sizes) -> PackedCopies | None:
    """Rectangles as packed sequences; None without rectangles.

    The part of a last block of keys after Skv is a sequence without queries.
    """
    if not rectangles:
        return None
    queries, keys, starts, partial = [], [], [(0, 0)], []
    most = max(len(rectangle.queries) for rectangle in rectangles)
    for group, entry, of_q, of_k, numbers in rectangles:
        queries += [(i, group, entry) for i in of_q.tolist()]
        head = group // (sizes.hq // sizes.hkv) if mask.heads > 1 else 0
        keys += [(j, head, entry) for j in of_k.tolist()]
        missing = max(0, (int(of_k[-1]) + 1) * BLOCK - mask.skv)
        q, kv = starts[-1][0] + BLOCK * len(of_q), starts[-1][1] + BLOCK * len(of_k)
        starts += [(q, kv - missing), (q, kv)][: 1 + (missing > 0)]
        if numbers is not None:
            column = np.full((most, 1 + (missing > 0)), NONE, np.int32)
            column[: len(numbers), 0] = numbers
            partial.append(column)
    return PackedCopies(
        queries=np.array(queries, np.int32),
        keys=np.array(keys, np.int32),
        starts_q=np.array([q for q, _ in starts], np.int32),
        starts_kv=np.array([kv for _, kv in starts], np.int32),
        longest_q=BLOCK * most,
        longest_kv=BLOCK * max(len(rectangle.keys) for rectangle in rectangles),
        partial=np.concatenate(partial, axis=1) if partial else None,
    )


def attends(mask: BlockMask, partial: NDArray[np.int32], *, keys_first: bool) -> NDArray[np.float16]:
    """The mask of batch entries as a captured array ``(keys, queries, E)`` in Fortran order: 1 where a query attends, else 0.

    Args:
        mask: the block mask.
        partial: int32 ``(P, E)``: the number of a partial block, :data:`ALL` or :data:`NONE`.
        keys_first: whether the P blocks of an entry are blocks of keys; otherwise they are blocks of queries.
    """
    most, count = partial.shape
    size = BLOCK * BLOCK // 8
    known = np.concatenate([mask.bits, np.zeros((1, size), np.uint8), np.full((1, size), 255, np.uint8)])  # NONE and ALL last
    found = np.empty((count, BLOCK, most, BLOCK) if keys_first else (count, most, BLOCK, BLOCK), np.float16)
    for e in range(count):  # one at a time: the bits of all would need twice the memory
        blocks = np.unpackbits(known[partial[:, e]], axis=1).reshape(most, BLOCK, BLOCK)
        found[e] = blocks.transpose(1, 0, 2) if keys_first else blocks
    return found.reshape(count, -1, (most if keys_first else 1) * BLOCK).T
