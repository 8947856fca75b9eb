"""Memory that a thread keeps for its next calls: some large arrays for the tiles of any graph, and every result of small ones.

Without the large arrays, every call would get pages of zeros from the operating system again: with both passes of 8 heads of 64
and 128 positions, batch 4, these page faults took 40 % of the time.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray  # slow to import

#: The environment variable with the bytes of a tile of scores in float32.
TILE_BYTES = "CUPY_SDPA_TILE_BYTES"
#: The bytes of a tile: it and its copies fit into the caches of a laptop.
NBYTES = int(os.environ.get(TILE_BYTES, 1 << 20))
#: The largest number of buffers of a thread, none of which is larger than two tiles. Smaller arrays than this are not kept.
COUNT, SMALLEST = 6, 1 << 16
#: The largest number of small tiles whose results a thread keeps, each of at most ``NBYTES``.
SMALL_TILES = 16


def _references_of_unused() -> int:
    """The references to a buffer that no array uses, counted as in :func:`empty`: they depend on the version of Python."""
    for buffer in [np.empty(1, np.uint8)]:
        return sys.getrefcount(buffer)
    raise AssertionError


_UNUSED = _references_of_unused()


class Memory(dict[str, Any]):
    """The results of the steps of a small tile, to which the steps of the next such tile write again.

    A step computes ``memory.setdefault(name, np.add(x, y, out=memory.get(name)))``, which allocates only the first time.
    """

    __slots__ = ()


class NoMemory(Memory):
    """The memory of large tiles: nothing is kept."""

    __slots__ = ()

    def setdefault(self, name: str, value: Any = None) -> Any:
        """Return the value."""
        return value


class _Buffers(threading.local):
    def __init__(self) -> None:
        self.all: list[NDArray[Any]] = []
        #: The memories of small tiles that are not in use, the latest last.
        self.small: dict[Hashable, Memory] = {}


_buffers = _Buffers()


def take(tile: Hashable) -> Memory:
    """The memory of a small tile: nobody else has it until :func:`give`."""
    return _buffers.small.pop(tile, None) or Memory()


def give(tile: Hashable, memory: Memory) -> None:
    """Keep the memory of a small tile for the next one."""
    small = _buffers.small
    small[tile] = memory
    if len(small) > SMALL_TILES:
        del small[next(iter(small))]


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """An array in C order with the memory of one that no longer exists, or new memory. No caller gets such an array."""
    size = dtype.itemsize
    for length in shape:
        size *= length
    if not SMALLEST <= size <= 2 * NBYTES:
        return np.empty(shape, dtype)
    for buffer in _buffers.all:
        if buffer.nbytes >= size and sys.getrefcount(buffer) == _UNUSED:
            return buffer[:size].view(dtype).reshape(shape)
    buffer = np.empty(max(size, NBYTES), np.uint8)
    if len(_buffers.all) < COUNT:
        _buffers.all.append(buffer)
    return buffer[:size].view(dtype).reshape(shape)
