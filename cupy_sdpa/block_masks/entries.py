"""A block mask as batch items: lists of pages for the forward pass, and rectangles of blocks for the backward pass.

Forward, a block of queries is a batch item of a call with paged keys: its pages are the blocks that it attends to. Blocks with
and without a mask are separate calls, whose results are merged, unless that takes longer than computing all with a mask.

Backward, cuDNN reads no pages. Copies of the blocks of a rectangle, which are query blocks that attend to the same key blocks,
are a packed sequence, and the gradients of all copies of a block are summed. Each copy costs as much time as several blocks, so
blocks are grouped in the cheapest of some ways: query blocks with equal sets of key blocks, or the converse; and for partial
blocks consecutive query blocks with all of their key blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .block_mask import ALL, NONE, BlockMask, numbers_of
from .blocks import BLOCK

#: The time of a block with a mask, and of copying and merging a block of queries, relative to a block without a mask, in the
#: forward pass. A query block with few full blocks is therefore computed by one masked call. H200, 16 heads, head dim 128: 8
#: blocks of 64 take 167 us without a mask and 240 us with one; copying and merging 64 blocks takes 65 us.
MASKED_COST, MERGE_COST = 1.45, 3.0
#: In the backward pass: the time of a block with a mask, and of each copy of a block of queries and of keys. They follow from
#: the times of 512 blocks as 64 sequences of 128 queries and 1024 keys (731 us), 64 of 1024 and 128 (1112 us) and 8 of 1024 and
#: 1024 (440 us), of copies (87 us for 512 blocks of an array) and sums (87 us), and of a mask (291 us).
MASKED_GRADIENT_COST, QUERY_COPY_COST, KEY_COPY_COST = 2.0, 3.7, 2.25
#: The numbers of consecutive query blocks that are tried as rectangles with a mask.
_STEPS = (1, 2, 4, 8, 16)
#: Memory of padded lists, relative to the listed blocks: longer lists are split.
_PADDING = 2


class TableSizes(NamedTuple):
    """The sizes of a call that tables depend on: Hq, Hkv and B."""

    hq: int
    hkv: int
    batch: int


class Entries(NamedTuple):
    """Batch items of one call.

    Attributes:
        items: int32 ``(E, 3)``: query block, group of heads and batch item of each.
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
        offsets, parts: target t, which is (query block, group, batch item) with the first fastest, gets the results of the
            copied entries ``parts[offsets[t] : offsets[t + 1]]`` and of ``direct``.
    """

    groups: int
    direct: Entries | None
    copied: tuple[Entries, ...]
    offsets: NDArray[np.int32]
    parts: NDArray[np.int32]


class _List(NamedTuple):
    """A query block (block, group of heads, batch item), its key blocks, and the numbers of the partial ones."""

    item: tuple[int, int, int]
    keys: NDArray[np.int64]
    partial: NDArray[np.int64]


def _entries_of_lists(lists: Sequence[_List], mask: BlockMask, sizes: TableSizes, masked: bool) -> Entries:
    """Return the batch items of lists."""
    most, count = max([1, *(len(one.keys) for one in lists)]), len(lists)
    table, partial = np.zeros((most, count), np.int32), np.full((most, count), NONE, np.int32)
    lengths = np.zeros(count, np.int32)
    for e, ((_, g, b), keys, of_keys) in enumerate(lists):
        if len(keys):
            first = page(sizes, mask, g, b) * mask.kinds.shape[0]
            table[:, e] = first + keys[0]
            table[: len(keys), e] = first + keys
            partial[: len(keys), e] = of_keys
            lengths[e] = BLOCK * (len(keys) - 1) + min(BLOCK, mask.skv - BLOCK * int(keys[-1]))
    items = np.array([one.item for one in lists], np.int32).reshape(-1, 3)
    return Entries(items, np.asfortranarray(table), lengths, np.asfortranarray(partial) if masked else None)


def _split_long_ones(found: Sequence[Any]) -> list[Any]:
    """Lists or rectangles of which those with many keys are split, so that equal sizes need at most twice the memory."""
    counts = np.array([len(one.keys) for one in found])
    most = int(counts.max(initial=1))
    while most > 1 and (-(-counts // most)).sum() * most > _PADDING * counts.sum():
        most -= 1
    return [
        one._replace(keys=one.keys[i : i + most], partial=one.partial[i : i + most])
        for one in found
        for i in range(0, len(one.keys), most)
    ]


def page(sizes: TableSizes, mask: BlockMask, group: int, entry: int) -> int:
    """Return the row of pages of a group and batch item: pages belong to an entry, or to a key/value head and an entry."""
    return entry if mask.heads == 1 else group // (sizes.hq // sizes.hkv) + sizes.hkv * entry


def make_tables(mask: BlockMask, sizes: TableSizes) -> Tables:
    """Return the batch items of a mask for calls of some sizes."""
    _, query_blocks, groups, _ = mask.kinds.shape
    numbers, without, masked = numbers_of(mask), [], []
    for b in range(sizes.batch):
        for g in range(groups):
            for i in range(query_blocks):
                of_blocks = numbers[:, i, g, b % mask.batch]
                full, partial = np.flatnonzero(of_blocks == ALL), np.flatnonzero(of_blocks >= 0)
                separate = len(full) * (MASKED_COST - 1) > MERGE_COST or not len(partial)
                keys = full if separate else full[:0]
                without.append(_List((i, g, b), keys, of_blocks[keys]))
                keys = partial if separate else np.flatnonzero(of_blocks != NONE)
                masked.append(_List((i, g, b), keys, of_blocks[keys]))
    direct, copied = None, []
    of_full, of_masked = (sum(len(one.keys) for one in lists) for lists in (without, masked))
    if groups == 1 and of_full:
        direct = _entries_of_lists(without, mask, sizes, False)
    elif groups == 1 and max((len(one.keys) for one in masked), default=0) * len(masked) <= _PADDING * of_masked:
        # lists of equal length need at most twice the memory
        direct, of_masked = _entries_of_lists(masked, mask, sizes, True), 0
    if direct is None and of_full:
        copied.append(_entries_of_lists([one for one in without if len(one.keys)], mask, sizes, False))
    if of_masked:
        copied.append(_entries_of_lists(_split_long_ones(masked), mask, sizes, True))
    items = np.concatenate([np.zeros((0, 3), np.int32), *(entries.items for entries in copied)])
    return Tables(groups, direct, tuple(copied), *sources(items, query_blocks, groups, sizes.batch))


def sources(items: NDArray[np.int32], blocks: int, groups: int, batch: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return each block's copies as offsets and numbers, for ``(block, group, batch item)`` with the block fastest."""
    targets = items[:, 0] + blocks * (items[:, 1] + groups * items[:, 2])
    offsets = np.concatenate([[0], np.cumsum(np.bincount(targets, minlength=blocks * groups * batch))])
    return offsets.astype(np.int32), np.argsort(targets, kind="stable").astype(np.int32)


class Rectangle(NamedTuple):
    """Query blocks that attend to key blocks.

    Attributes:
        group, entry: the group of heads and the batch item.
        queries, keys: the blocks, in order.
        partial: the numbers of the partial blocks ``(key blocks, query blocks)``, or :data:`ALL` or :data:`NONE`; None if all
            blocks are full.
    """

    group: int
    entry: int
    queries: NDArray[np.int64]
    keys: NDArray[np.int64]
    partial: NDArray[np.int64] | None = None

    @property
    def cost(self) -> float:
        """The time of the backward pass relative to a block without a mask."""
        block = 1.0 if self.partial is None else MASKED_GRADIENT_COST
        return block * len(self.queries) * len(self.keys) + QUERY_COPY_COST * len(self.queries) + KEY_COPY_COST * len(self.keys)


def rectangles(mask: BlockMask, batch: int) -> tuple[list[Rectangle], list[Rectangle]]:
    """Return the blocks of a mask as rectangles: rectangles of full blocks, and rectangles with a mask.

    For each group of heads and batch item the cheapest of these is taken: full blocks without a mask and partial blocks with
    one; or all blocks with one.
    """
    numbers, full, masked = numbers_of(mask), [], []
    for b in range(batch):
        for g in range(mask.heads):
            own = numbers[:, :, g, b % mask.batch]
            without = _full_rectangles(own == ALL, g, b)
            apart = _masked_rectangles(np.where(own >= 0, own, NONE), g, b)
            together = _masked_rectangles(own, g, b)
            if _cost(without) + _cost(apart) > _cost(together):
                without, apart = [], together
            full += without
            masked += apart
    return full, _split_long_ones(masked)


def _cost(found: Sequence[Rectangle]) -> float:
    return sum(rectangle.cost for rectangle in found)


def _full_rectangles(blocks: NDArray[np.bool_], group: int, entry: int) -> list[Rectangle]:
    """Rectangles of full blocks: query blocks with equal sets of key blocks, or key blocks with equal sets of query blocks."""
    by_queries = [Rectangle(group, entry, queries, keys) for queries, keys in _equal_rows(blocks.T)]
    by_keys = [Rectangle(group, entry, queries, keys) for keys, queries in _equal_rows(blocks)]
    return min((by_queries, by_keys), key=_cost)


def _equal_rows(blocks: NDArray[np.bool_]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield the rows with equal contents and the columns that are set, for every content that is not empty."""
    rows: dict[bytes, list[int]] = {}
    for number, row in enumerate(blocks):
        if row.any():
            rows.setdefault(row.tobytes(), []).append(number)
    for numbers in rows.values():
        yield np.array(numbers), np.flatnonzero(blocks[numbers[0]])


def _masked_rectangles(numbers: NDArray[np.int64], group: int, entry: int) -> list[Rectangle]:
    """Rectangles with a mask: consecutive query blocks and all key blocks to which one of them attends."""
    options = []
    for step in _STEPS:
        found = []
        for begin in range(0, numbers.shape[1], step):
            listed = numbers[:, begin : begin + step] != NONE
            queries, keys = begin + np.flatnonzero(listed.any(axis=0)), np.flatnonzero(listed.any(axis=1))
            if len(keys):
                found.append(Rectangle(group, entry, queries, keys, numbers[np.ix_(keys, queries)]))
        options.append(found)
    return min(options, key=_cost)


class PackedCopies(NamedTuple):
    """Rectangles as packed sequences of copies of blocks.

    Attributes:
        queries, keys: int32 ``(n, 3)``: block, group of heads and batch item of each copy. Keys have the head of their group.
        starts_q, starts_kv: int32, the cumulative lengths.
        longest_q, longest_kv: the maximum lengths.
        partial: int32 ``(key blocks, query blocks, E)``: the numbers of the partial blocks of each sequence; or None.
    """

    queries: NDArray[np.int32]
    keys: NDArray[np.int32]
    starts_q: NDArray[np.int32]
    starts_kv: NDArray[np.int32]
    longest_q: int
    longest_kv: int
    partial: NDArray[np.int32] | None


def packed_copies(found: list[Rectangle], mask: BlockMask, sizes: TableSizes) -> PackedCopies | None:
    """Rectangles as packed sequences; None without rectangles.

    The part of a last block of keys after Skv is a sequence without queries.
    """
    if not found:
        return None
    queries, keys, starts, partial = [], [], [(0, 0)], []
    most_q, most_kv = max(len(r.queries) for r in found), max(len(r.keys) for r in found)
    for group, entry, of_q, of_k, numbers in found:
        queries += [(i, group, entry) for i in of_q.tolist()]
        head = group // (sizes.hq // sizes.hkv) if mask.heads > 1 else 0
        keys += [(j, head, entry) for j in of_k.tolist()]
        missing = max(0, (int(of_k[-1]) + 1) * BLOCK - mask.skv)
        q, kv = starts[-1][0] + BLOCK * len(of_q), starts[-1][1] + BLOCK * len(of_k)
        starts += [(q, kv - missing), (q, kv)][: 1 + (missing > 0)]
        if numbers is not None:
            own = np.full((most_kv, most_q, 1 + (missing > 0)), NONE, np.int32)
            own[: len(of_k), : len(of_q), 0] = numbers
            partial.append(own)
    return PackedCopies(
        queries=np.array(queries, np.int32),
        keys=np.array(keys, np.int32),
        starts_q=np.array([q for q, _ in starts], np.int32),
        starts_kv=np.array([kv for _, kv in starts], np.int32),
        longest_q=BLOCK * most_q,
        longest_kv=BLOCK * most_kv,
        partial=np.concatenate(partial, axis=2) if partial else None,
    )


def attends(mask: BlockMask, partial: NDArray[np.int32]) -> NDArray[np.float16]:
    """Return the mask of batch items as an array ``(keys, queries, E)`` in Fortran order: 1 where a query attends, else 0.

    ``partial`` is int32 ``(key blocks, query blocks, E)``: the number of a partial block, :data:`ALL` or :data:`NONE`.
    """
    keys, queries, count = partial.shape
    size = BLOCK * BLOCK // 8
    known = np.concatenate([mask.bits, np.zeros((1, size), np.uint8), np.full((1, size), 255, np.uint8)])  # NONE and ALL last
    found = np.empty((count, queries, BLOCK, keys, BLOCK), np.float16)
    for e in range(count):  # one at a time: the bits of all would need twice the memory
        blocks = np.unpackbits(known[partial[..., e]], axis=2).reshape(keys, queries, BLOCK, BLOCK)
        found[e] = blocks.transpose(1, 2, 0, 3)
    return found.reshape(count, queries * BLOCK, keys * BLOCK).T
