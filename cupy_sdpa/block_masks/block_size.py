"""Arrays of blocks of any size, as the tiles of 128 queries and 128 keys in which calls compute."""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..extend import cupy_runtime, in_words
from .blocks import BLOCK
from .evaluate import EMPTY, FULL, PARTIAL, KeyRanges, kinds_of, partial_blocks


class BlockSize(NamedTuple):
    """The numbers of queries and of keys in a block."""

    queries: int
    keys: int


#: The size of the tiles.
TILE = BlockSize(BLOCK, BLOCK)


def read_block(block: Any) -> BlockSize:
    """Return the size of a block, from a number or a pair.

    Raises:
        TypeError, ValueError: it is neither, or blocks of this size are not composed of tiles, nor tiles of them.
    """
    pair = block if isinstance(block, (tuple, list)) else (block, block)
    if len(pair) != 2 or not all(isinstance(n, numbers.Integral) and not isinstance(n, bool) for n in pair):
        raise TypeError(f"block is {block!r}; it must be a number of queries and keys, or a pair (queries, keys)")
    for n in pair:
        if n < 1 or (n % BLOCK and BLOCK % n):
            raise ValueError(
                f"block is {block!r}; sizes must be multiples or divisors of {BLOCK}: choose {BLOCK}, and pass the mask "
                "function of the pairs"
            )
    return BlockSize(int(pair[0]), int(pair[1]))


def _on_host(name: str, array: Any) -> NDArray[Any]:
    found = array.get() if cupy_runtime.is_array(array) else array
    if not isinstance(found, np.ndarray):
        raise TypeError(f"{name} is {in_words(array)}; it must be a numpy or CuPy array")
    return found


def read_bool(name: str, array: Any) -> NDArray[np.bool_]:
    """Return a bool array of either engine, on the host; other dtypes raise TypeError."""
    host = _on_host(name, array)
    if host.dtype != bool:
        raise TypeError(f"{name} is {host.dtype}; it must be bool: convert with .astype(bool)")
    return host


def blocks_of_lists(prefix: str, numbers_of_blocks: Any, indices: Any) -> NDArray[np.bool_]:
    """Return the listed blocks ``(key blocks, query blocks, Hq, B)`` of fields of FlexAttention."""
    counts, listed = _on_host(f"{prefix}num_blocks", numbers_of_blocks), _on_host(f"{prefix}indices", indices)
    if listed.ndim != 4 or counts.shape != listed.shape[:3] or {counts.dtype.kind, listed.dtype.kind} - set("iu"):
        raise ValueError(
            f"{prefix}num_blocks is {counts.dtype} {counts.shape} and {prefix}indices {listed.dtype} {listed.shape}; they must "
            "be integers (B, Hq, query blocks) and (B, Hq, query blocks, key blocks)"
        )
    key_blocks = listed.shape[3]
    used = np.arange(key_blocks) < counts[..., None]
    if (counts < 0).any() or (counts > key_blocks).any():
        raise ValueError(
            f"{prefix}num_blocks has numbers from {counts.min()} to {counts.max()}; there are {key_blocks} key blocks"
        )
    if (used & ((listed < 0) | (listed >= key_blocks))).any():
        raise ValueError(f"{prefix}indices has entries outside 0 to {key_blocks - 1}, the key blocks")
    blocks = np.zeros(listed.shape, bool)
    at = np.nonzero(used)
    blocks[(*at[:3], listed[at])] = True
    if np.count_nonzero(blocks) != len(at[0]):
        raise ValueError(f"{prefix}indices lists a key block of a query block twice; {prefix}num_blocks counts each block once")
    return blocks.transpose(3, 2, 1, 0)


def tile_kinds(listed: NDArray[np.bool_], full: NDArray[np.bool_], block: BlockSize, sq: int, skv: int) -> NDArray[np.uint8]:
    """Return the kinds of tiles ``(key tiles, query tiles, heads, batch)``, from blocks with the same axes.

    A query attends to a key in ``listed`` blocks, and every query to every key in ``full`` ones.
    """
    some, whole = listed, full
    for axis, size, length in ((0, block.keys, skv), (1, block.queries, sq)):
        tiles = -(-length // BLOCK)
        if size > BLOCK:
            some, whole = (np.repeat(x, size // BLOCK, axis=axis).take(np.arange(tiles), axis=axis) for x in (some, whole))
        else:
            parts = BLOCK // size * np.arange(tiles)
            some, whole = np.logical_or.reduceat(some, parts, axis), np.logical_and.reduceat(whole, parts, axis)
    return np.where(whole, FULL, np.where(some, PARTIAL, EMPTY)).astype(np.uint8)


def with_blocks(
    bits: NDArray[np.uint8],
    tiles: NDArray[np.int32],
    listed: NDArray[np.bool_],
    full: NDArray[np.bool_],
    block: BlockSize,
    lengths: tuple[int, int],
) -> NDArray[np.uint8]:
    """Return the pairs of partial tiles: all pairs of ``full`` blocks, and the pairs in ``bits`` of other ``listed`` blocks.

    The bits are as in :class:`.BlockMask`; tiles are int32 ``(n, 4)``: key tile, query tile, head and batch item.
    """
    offsets, found = np.arange(BLOCK), np.empty_like(bits)
    for n, (j, i, h, b) in enumerate(tiles):
        queries, keys = BLOCK * i + offsets, BLOCK * j + offsets
        exists = (queries < lengths[0])[:, None] & (keys < lengths[1])
        at = np.ix_(np.minimum(keys // block.keys, len(listed) - 1), np.minimum(queries // block.queries, listed.shape[1] - 1))
        of_block, whole = listed[:, :, h, b][at].T, full[:, :, h, b][at].T
        pairs = np.unpackbits(bits[n]).reshape(BLOCK, BLOCK).astype(bool)
        found[n] = np.packbits(((pairs & of_block) | whole) & exists)
    return found


def with_exact_kinds(
    kinds: NDArray[np.uint8], bits: NDArray[np.uint8], tiles: NDArray[np.int32], lengths: tuple[int, int]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the kinds and bits of :class:`.BlockMask`, with ``tiles`` without pairs empty and tiles with all pairs full."""
    ones = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(axis=1)
    of_queries, of_keys = (np.minimum(BLOCK, n - BLOCK * tiles[:, axis]) for n, axis in zip(lengths, (1, 0), strict=True))
    found = kinds_of(ones[bits].sum(axis=1), of_queries * of_keys)
    kinds = kinds.copy()
    kinds[tuple(tiles.T)] = found
    return kinds, bits[found == PARTIAL]


def rows_of_blocks(blocks: NDArray[np.bool_], block: BlockSize, sq: int, skv: int) -> KeyRanges:
    """Return the keys of every query of full blocks ``(key blocks, query blocks)``."""
    key_blocks, query_blocks = blocks.shape
    first = blocks.argmax(axis=0) * block.keys if key_blocks else np.zeros(query_blocks, np.int64)
    end = np.minimum((key_blocks - blocks[::-1].argmax(axis=0)) * block.keys, skv) if key_blocks else first
    lengths = np.minimum(block.keys, skv - block.keys * np.arange(key_blocks))
    count = (blocks * lengths[:, None]).sum(axis=0)
    return KeyRanges(*(np.repeat(x, block.queries)[:sq].astype(np.int64) for x in (first, end, count)))


def kinds_of_blocks(
    kinds: NDArray[np.uint8], bits: NDArray[np.uint8], block: BlockSize, sq: int, skv: int
) -> NDArray[np.uint8]:
    """Return the kinds of blocks of another size, ``(key blocks, query blocks, heads, batch)``, from tiles and their bits."""
    if block == TILE:
        return kinds
    # pairs of the parts into which a tile is divided: (key tiles, parts, query tiles, parts, heads, batch)
    keys, queries = min(block.keys, BLOCK), min(block.queries, BLOCK)
    parts = BLOCK // keys, BLOCK // queries
    lengths = [
        np.clip(length - n * np.arange(-(-length // BLOCK) * BLOCK // n), 0, n) for n, length in ((keys, skv), (queries, sq))
    ]
    exist = (lengths[0][:, None] * lengths[1])[:, :, None, None]
    full = np.repeat(np.repeat(kinds == FULL, parts[0], axis=0), parts[1], axis=1)
    pairs = np.where(full, exist, 0)
    for (j, i, h, b), of_tile in zip(partial_blocks(kinds), bits, strict=True):
        attends = np.unpackbits(of_tile).reshape(parts[1], queries, parts[0], keys).sum(axis=(1, 3), dtype=np.int64).T
        pairs[j * parts[0] : (j + 1) * parts[0], i * parts[1] : (i + 1) * parts[1], h, b] = attends
    exist = np.broadcast_to(exist, pairs.shape)
    for axis, size, length in ((0, block.keys, skv), (1, block.queries, sq)):
        tiles = max(size // BLOCK, 1) * np.arange(-(-length // size))
        pairs, exist = (np.add.reduceat(x, tiles, axis) for x in (pairs, exist))
    return kinds_of(pairs, exist)
