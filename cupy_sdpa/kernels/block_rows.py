"""Kernels for blocks of rows: copy blocks of an array, and merge or sum the results of copies; also on numpy arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

#: The number of queries, or of keys, in a block; and the number of threads in a thread block.
BLOCK, THREADS = 128, 128


class BlockRows(NamedTuple):
    """The rows of an array ``(D, H, S, B)`` or ``(S, H, B)`` as kernels read them; address and strides in bytes."""

    data: int
    head: int
    row: int
    batch: int
    rows: int


def record_of(array: Any) -> BlockRows:
    """The rows of an array ``(D, H, S, B)``."""
    _, head, row, batch = array.strides
    return BlockRows(array.data.ptr, head, row, batch, array.shape[2])


def is_vector(array: Any, size: int) -> bool:
    """Whether the rows of an array consist of aligned units of ``size`` bytes."""
    return all(x % size == 0 for x in (array.shape[0] * array.itemsize, array.data.ptr, *array.strides[1:]))
