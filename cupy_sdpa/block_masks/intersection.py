"""The intersection of a block mask with a band: ``causal`` and ``window`` together with ``block_mask``."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..extend import Band, Recorded
from .block_mask import BlockMask, numbers_of, segments_of
from .block_size import with_exact_kinds
from .blocks import BLOCK
from .evaluate import KeyRanges, kinds_of, lengths_of, partial_blocks


def within_band(mask: BlockMask, band: Band | None) -> BlockMask:
    """Return the pairs of a block mask that are in a band. It is computed once, and belongs to the mask."""
    if band is None:
        return mask
    if ("band", band) not in mask.tables:
        simplified = band.simplified(mask.sq, mask.skv, lengths=False)
        mask.tables["band", band] = mask if simplified is None else _intersected(mask, simplified)
    found: BlockMask = mask.tables["band", band]
    return found


def _intersected(mask: BlockMask, band: Band) -> BlockMask:
    of_band = BlocksOfBand(band, mask.sq, mask.skv)
    kinds, numbers = np.minimum(mask.kinds, of_band.kinds), numbers_of(mask)
    tiles = partial_blocks(kinds)
    bits = np.empty((len(tiles), BLOCK * BLOCK // 8), np.uint8)
    for n, (j, i, h, b) in enumerate(tiles):
        bits[n] = of_band.bits(j, i)
        if (number := numbers[j, i, h, b]) >= 0:
            bits[n] &= mask.bits[number]
    kinds, bits = with_exact_kinds(kinds, bits, tiles, (mask.sq, mask.skv))
    found = None if mask.segments is None else segments_of(_keys_within(mask, of_band), kinds)
    function = None if mask.function is None else _function_within(mask.function, band, mask.skv - mask.sq)
    return BlockMask(mask.sq, mask.skv, kinds, bits, found, function, mask.block)


class BlocksOfBand:
    """The blocks of a band: their kinds ``(key blocks, query blocks, 1, 1)``.

    ``first`` and ``end`` are the first key of every query, and the last key plus 1; both are 0 for a query without keys.
    """

    def __init__(self, band: Band, sq: int, skv: int) -> None:
        diagonal = np.arange(sq) + (skv - sq if band.bottom_right else 0)
        first = np.zeros(sq, np.int64) if band.left is None else np.maximum(diagonal - band.left, 0)
        end = np.full(sq, skv) if band.right is None else np.minimum(diagonal + band.right + 1, skv)
        self.first, self.end = np.where(first < end, first, 0), np.where(first < end, end, 0)
        key_blocks, query_blocks = -(-skv // BLOCK), -(-sq // BLOCK)
        edges = np.minimum(BLOCK * np.arange(key_blocks + 1), skv)
        inside = np.minimum(self.end, edges[1:, None]) - np.maximum(self.first, edges[:-1, None])  # (key blocks, Sq)
        pairs = np.clip(inside, 0, None)
        if query_blocks:
            pairs = np.add.reduceat(pairs, BLOCK * np.arange(query_blocks), axis=1)
        self.kinds = kinds_of(pairs, lengths_of(sq, query_blocks) * np.diff(edges)[:, None])[:, :, None, None]

    def bits(self, j: int, i: int) -> NDArray[np.uint8]:
        """Return a block's pairs as the bits of a block mask."""
        attends, keys = np.zeros((BLOCK, BLOCK), bool), BLOCK * j + np.arange(BLOCK)
        of_tile = slice(BLOCK * i, BLOCK * (i + 1))
        queries = self.first[of_tile, None]
        attends[: len(queries)] = (queries <= keys) & (keys < self.end[of_tile, None])
        return np.packbits(attends)


def _keys_within(mask: BlockMask, band: BlocksOfBand) -> dict[tuple[int, int], KeyRanges]:
    """Return the keys of every query of a mask of segments within a band, by head and batch item."""
    found = {}
    for b, entry in enumerate(mask.segments or ()):
        low, high = np.zeros((2, mask.sq), np.int64)
        for q0, q1, of_first, of_end in entry.segments:
            rows = np.arange(q0, q1)
            low[q0:q1] = of_first.key if of_first.fixed else np.maximum(of_first.key, rows - (entry.left or 0))
            high[q0:q1] = of_end.key if of_end.fixed else np.minimum(of_end.key, rows + (entry.right or 0) + 1)
        low, high = np.maximum(low, band.first), np.minimum(high, band.end)
        used = low < high
        found[0, b] = KeyRanges(np.where(used, low, 0), np.where(used, high, 0), np.where(used, high - low, 0))
    return found


def _function_within(own: Recorded, band: Band, corner: int) -> Recorded:
    """Return a mask function within a band whose bottom-right diagonal is ``corner`` keys after the top-left diagonal."""
    left, right, shift = band.left, band.right, corner if band.bottom_right else 0

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        condition = own(b, h, q_idx, kv_idx)
        if right is not None:
            condition = condition & (kv_idx <= q_idx + (shift + right))
        if left is not None:
            condition = condition & (kv_idx >= q_idx + (shift - left))
        return condition

    return Recorded.of("mask_mod", mask_mod, {})
