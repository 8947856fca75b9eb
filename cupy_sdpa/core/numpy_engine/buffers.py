"""Keep memory in each thread for its next calls: a few large arrays for tiles, and the evaluations of small graphs.

Tiles of any graph can use the large arrays. Without them, every call would get zeroed pages from the operating system again.
With 8 heads of size 64, 128 positions and batch 4, page faults took 40 % of the time of a forward and a backward pass.
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

#: The environment variable that sets the bytes of a tile of float32 scores.
TILE_BYTES = "CUPY_SDPA_TILE_BYTES"
#: The bytes of a tile: the tile and its copies fit into a laptop's caches.
NBYTES = int(os.environ.get(TILE_BYTES, 1 << 20))
#: The maximum number of buffers of a thread (each at most two tiles large), and the bytes below which arrays are not kept.
COUNT, SMALLEST = 6, 1 << 16
#: The maximum number of evaluations that a thread keeps. A kept graph's results take at most ``NBYTES``.
EVALUATIONS = 16


def _references_of_unused() -> int:
    """Count the references to a buffer that no array uses, as :func:`empty` does: the number depends on the Python version."""
    for buffer in [np.empty(1, np.uint8)]:
        return sys.getrefcount(buffer)
    raise AssertionError


_UNUSED = _references_of_unused()


class TileMemory(dict[str, Any]):
    """The results of a small tile's steps. The next tile with the same lengths overwrites them.

    A step computes ``memory.setdefault(name, np.add(x, y, out=memory.get(name)))``, which allocates only once.
    """

    __slots__ = ()


class NoMemory(TileMemory):
    """The memory of a large tile: it keeps nothing."""

    __slots__ = ()

    def setdefault(self, name: str, value: Any = None) -> Any:
        """Return the value."""
        return value


NO_MEMORY = NoMemory()


class _Buffers(threading.local):
    def __init__(self) -> None:
        self.all: list[NDArray[Any]] = []
        #: The evaluations that no call is using, most recently used last.
        self.evaluations: dict[Hashable, Any] = {}


_buffers = _Buffers()


def take(key: Hashable) -> Any:
    """Take the kept evaluation with this key, or return None. :func:`give` puts an evaluation back."""
    return _buffers.evaluations.pop(key, None)


def give(key: Hashable, evaluation: Any) -> None:
    """Keep an evaluation for the next call with this key."""
    kept = _buffers.evaluations
    kept[key] = evaluation
    if len(kept) > EVALUATIONS:
        del kept[next(iter(kept))]


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an array in C order, in memory that no array uses any more or in new memory. It must not reach the user."""
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
