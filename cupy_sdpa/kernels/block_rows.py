"""Kernels for blocks of rows: copy blocks of an array, and merge or sum the results of copies; also on numpy arrays."""

from __future__ import annotations

from typing import Any

from ..runtime.cuda_code import Struct

#: The number of queries, or of keys, in a block; and the number of threads in a thread block.
BLOCK, THREADS = 128, 128
#: The rows of an array as kernels read them: the address, and strides in bytes.
ROWS = Struct("Rows", "data head row batch rows")


def rows_of(array: Any) -> tuple[Any, ...]:
    """The values of :data:`ROWS` for an array ``(D, H, S, B)``, or row statistics ``(S, H, B)``."""
    if array.ndim == 4:
        _, head, row, batch = array.strides
        return array, head, row, batch, array.shape[2]
    row, head, batch = array.strides
    return array, head, row, batch, array.shape[0]


def is_vector(array: Any, size: int) -> bool:
    """Whether the rows of an array consist of aligned units of ``size`` bytes."""
    return all(x % size == 0 for x in (array.shape[0] * array.itemsize, array.data.ptr, *array.strides[1:]))
