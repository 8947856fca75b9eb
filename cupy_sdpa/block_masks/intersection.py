"""The intersection of a block mask with a band: ``causal`` and ``window`` beside ``block_mask``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..kernels.block_rows import BLOCK
from ..problem.band import Band
from . import segments
from .block_mask import BlockMask
from .block_size import with_exact_kinds
from .evaluate import EMPTY, FULL, PARTIAL, Rows


def within_band(mask: BlockMask, band: Band) -> BlockMask:
    """The pairs of a block mask that are in a band. It is computed once, and belongs to the mask."""
    if ("band", band) not in mask.tables:
        simplified = band.simplified(mask.sq, mask.skv, lengths=False)
        mask.tables["band", band] = mask if simplified is None else _intersected(mask, simplified)
    found: BlockMask = mask.tables["band", band]
    return found


def _intersected(mask: BlockMask, band: Band) -> BlockMask:
    first, end = _keys_of_band(band, mask.sq, mask.skv)
    key_blocks, query_blocks, *_ = mask.kinds.shape
    edges = np.minimum(BLOCK * np.arange(key_blocks + 1), mask.skv)
    inside = np.clip(np.minimum(end, edges[1:, None]) - np.maximum(first, edges[:-1, None]), 0, None)  # (key blocks, Sq)
    begins = BLOCK * np.arange(query_blocks)
    pairs = np.add.reduceat(inside, begins, axis=1) if query_blocks else inside
    lengths = np.minimum(BLOCK, mask.sq - begins) * np.diff(edges)[:, None]
    of_band = np.where(pairs == lengths, FULL, np.where(pairs > 0, PARTIAL, EMPTY))[:, :, None, None]
    kinds = np.minimum(mask.kinds, of_band).astype(np.uint8)
    tiles = np.argwhere(kinds.T == PARTIAL)[:, ::-1].astype(np.int32)
    numbers = np.full(mask.kinds.shape, -1)
    numbers.T[mask.kinds.T == PARTIAL] = np.arange(len(mask.bits))
    bits = np.empty((len(tiles), BLOCK * BLOCK // 8), np.uint8)
    for n, (j, i, h, b) in enumerate(tiles):
        bits[n] = _bits_of_band(first, end, j, i)
        if (number := numbers[j, i, h, b]) >= 0:
            bits[n] &= mask.bits[number]
    kinds, bits = with_exact_kinds(kinds, bits, tiles, (mask.sq, mask.skv))
    found = None if mask.segments is None else _segments(mask, first, end, 2 * query_blocks + 2)
    function = _function(mask, band) if mask._has_its_function else None
    return BlockMask(mask.sq, mask.skv, kinds, bits, found, function, mask.block)


def _keys_of_band(band: Band, sq: int, skv: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first key of every query, and the last key plus 1; both are 0 for a query without keys."""
    diagonal = np.arange(sq) + (skv - sq if band.bottom_right else 0)
    first = np.zeros(sq, np.int64) if band.left is None else np.maximum(diagonal - band.left, 0)
    end = np.full(sq, skv) if band.right is None else np.minimum(diagonal + band.right + 1, skv)
    return np.where(first < end, first, 0), np.where(first < end, end, 0)


def _bits_of_band(first: NDArray[np.int64], end: NDArray[np.int64], j: int, i: int) -> NDArray[np.uint8]:
    """The pairs of a tile that are in a band, in the form of the bits of a block mask."""
    attends, keys = np.zeros((BLOCK, BLOCK), bool), BLOCK * j + np.arange(BLOCK)
    of_tile = slice(BLOCK * i, BLOCK * (i + 1))
    queries = first[of_tile, None]
    attends[: len(queries)] = (queries <= keys) & (keys < end[of_tile, None])
    return np.packbits(attends)


def _segments(
    mask: BlockMask, first: NDArray[np.int64], end: NDArray[np.int64], most: int
) -> tuple[segments.Segments, ...] | None:
    """The segments of the rows of a mask within a band; None if there are too many."""
    found = []
    for entry in mask.segments or ():
        low, high = np.zeros((2, mask.sq), np.int64)
        for q0, q1, of_first, of_end in entry.segments:
            rows = np.arange(q0, q1)
            low[q0:q1] = of_first.key if of_first.fixed else np.maximum(of_first.key, rows - (entry.left or 0))
            high[q0:q1] = of_end.key if of_end.fixed else np.minimum(of_end.key, rows + (entry.right or 0) + 1)
        low, high = np.maximum(low, first), np.minimum(high, end)
        used = low < high
        rows_of = Rows(np.where(used, low, 0), np.where(used, high, 0), np.where(used, high - low, 0))
        segments_of_entry = segments.find_segments(rows_of, most)
        if segments_of_entry is None:
            return None
        found.append(segments_of_entry)
    return tuple(found)


def _function(mask: BlockMask, band: Band) -> Callable[..., Any]:
    """The mask function within a band."""
    own, shift = mask.function, mask.skv - mask.sq if band.bottom_right else 0
    assert own is not None
    left, right = band.left, band.right

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        condition = own(b, h, q_idx, kv_idx)
        if right is not None:
            condition = condition & (kv_idx <= q_idx + (shift + right))
        if left is not None:
            condition = condition & (kv_idx >= q_idx + (shift - left))
        return condition

    return mask_mod
