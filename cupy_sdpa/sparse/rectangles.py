"""The blocks of a mask as rectangles, for the backward pass: sets of query blocks that attend to the same key blocks.

cuDNN has no gradients of paged keys. Copies of the blocks of each rectangle are a packed sequence, whose gradients cuDNN computes;
the gradients of all copies of a block are then summed. The cost besides cuDNN's kernels is proportional to the number of copies,
so blocks are grouped in the way that needs fewer: key blocks with equal sets of query blocks, or query blocks with equal sets of
key blocks. With equal numbers the first is used: cuDNN's kernels keep a tile of keys and loop over queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .block_mask import BlockMask
from .evaluate import BLOCK, FULL, PARTIAL
from .tables import Sizes, split_length


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


class Sequences(NamedTuple):
    """Rectangles as packed sequences of copies of blocks.

    Attributes:
        queries, keys: int32 ``(n, 3)``: block, group of heads and batch entry of each copy. Keys have the head of their group.
        starts_q, starts_kv: int32, the cumulative lengths.
        longest_q, longest_kv: the maximum lengths.
        partial: int32 ``(E, P)``: the numbers of the partial blocks of each sequence, -2 after the last one; or None.
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
            found += min(by_keys, by_queries, key=_copies)
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


def sequences(rectangles: list[Rectangle], mask: BlockMask, sizes: Sizes) -> Sequences | None:
    """Rectangles as packed sequences; None without rectangles.

    The part of a last block of keys after Skv is a sequence without queries.
    """
    if not rectangles:
        return None
    queries, keys, starts = [], [], [(0, 0)]
    per_head = mask.heads > 1
    for group, entry, of_q, of_k, _ in rectangles:
        queries += [(i, group, entry) for i in of_q.tolist()]
        head = group // (sizes.hq // sizes.hkv) if per_head else 0
        keys += [(j, head, entry) for j in of_k.tolist()]
        missing = max(0, (int(of_k[-1]) + 1) * BLOCK - mask.skv)
        q, kv = starts[-1][0] + BLOCK * len(of_q), starts[-1][1] + BLOCK * len(of_k)
        starts.append((q, kv - missing))
        if missing:
            starts.append((q, kv))
    partial = None
    if rectangles[0].partial is not None:
        most = max(len(rectangle.queries) for rectangle in rectangles)
        numbers = [np.full(most, -2, np.int32) for _ in starts[1:]]
        e = 0
        for rectangle in rectangles:
            assert rectangle.partial is not None
            numbers[e][: len(rectangle.partial)] = rectangle.partial
            e += 2 if (int(rectangle.keys[-1]) + 1) * BLOCK > mask.skv else 1
        partial = np.array(numbers)
    return Sequences(
        np.array(queries, np.int32),
        np.array(keys, np.int32),
        *(np.array([pair[i] for pair in starts], np.int32) for i in (0, 1)),
        BLOCK * max(len(rectangle.queries) for rectangle in rectangles),
        BLOCK * max(len(rectangle.keys) for rectangle in rectangles),
        partial,
    )


def attends(mask: BlockMask, partial: NDArray[np.int32]) -> NDArray[np.float16]:
    """The mask of sequences of one key block as a captured array ``(keys, queries, E)`` in Fortran order."""
    count, most = partial.shape
    known = np.concatenate([mask.bits, np.zeros((2, BLOCK * BLOCK // 8), np.uint8)])
    found = np.empty((count, most * BLOCK, BLOCK), np.float16)
    for e in range(count):
        found[e] = np.unpackbits(known[partial[e]], axis=1).reshape(most * BLOCK, BLOCK)
    return found.T
