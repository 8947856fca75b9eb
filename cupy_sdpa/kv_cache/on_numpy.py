"""The functions of :mod:`cupy_sdpa.kernels.cache_kernels` for numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..kernels.cache_kernels import State
from ..rope import rotated


def zeros(shape: tuple[int, ...], dtype: Any) -> Any:
    """Create an array of zeros in Fortran order."""
    return np.zeros(shape, dtype, order="F")


def store(array: Any, pairs: Sequence[tuple[int, int]]) -> None:
    """Store values in an int32 array ``(n,)``; pairs of index and value."""
    for index, value in pairs:
        array[index] = value


def copy_pages(storages: Sequence[Any], pairs: Sequence[tuple[int, int]]) -> None:
    """Copy pages in all layers; pairs of pages (from, to)."""
    for storage in storages:
        for source, target in pairs:
            storage[..., target, :] = storage[..., source, :]


def read_rows(storages: Sequence[Any], rows: Sequence[int]) -> list[Any]:
    """A copy of rows of all layers and heads; row r of page p is number ``p * page_size + r``."""
    return [storage[:, *_rows(storage, rows)] for storage in storages]


def write_rows(storages: Sequence[Any], saved: Sequence[Any], rows: Sequence[int], first: int) -> None:
    """Write rows from those of :func:`read_rows`, of which number ``first`` is the first."""
    for storage, copied in zip(storages, saved, strict=True):
        storage[:, *_rows(storage, rows)] = copied[first : first + len(rows)]


def _rows(storage: Any, rows: Sequence[int]) -> tuple[Any, ...]:
    pages, places = np.divmod(np.array(rows), storage.shape[1])
    return places, slice(None), pages


def append(k: Any, v: Any, keys: Any, values: Any, state: State, *, advance: bool, rotation: Any = None) -> None:
    """Write the new tokens of one layer to their pages."""
    first = 0
    for b, count in enumerate(state.counts.tolist()):
        begin = int(state.lengths[b]) - (0 if advance else count)
        new_k, new_v = (x[:, :, first : first + count] if x.ndim == 3 else x[:, :, :count, b] for x in (k, v))
        if rotation is not None:
            new_k = rotated(new_k, rotation, np.arange(begin, begin + count))
        _write(new_k, keys, state.table[:, b], begin)
        _write(new_v, values, state.table[:, b], begin)
        first += count
    if advance:
        state.lengths[...] += state.counts


def _write(new: Any, pages: Any, table: Any, begin: int) -> None:
    """Write tokens ``(D, Hkv, count)`` to the positions from ``begin``; clear the other rows of a page that they begin."""
    size, end = pages.shape[2], begin + new.shape[2]
    for start in range(begin // size * size, end, size):
        page = pages[..., table[start // size]]
        if start >= begin:
            page[...] = 0
        low, high = max(begin, start), min(end, start + size)
        page[:, :, low - start : high - start] = new[:, :, low - begin : high - begin]
