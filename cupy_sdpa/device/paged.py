"""CUDA kernels that run before attention with paged keys: they prepare page tables, and split keys into chunks.

cuDNN's kernels for several queries load a whole tile of keys. They read the entries of the page table for all of it, and
multiply the values after the length by 0. So every entry after the length must name a page without NaN: here the first page of
the sequence.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from ..problem.band import Band
from ..problem.problem import Split
from ..problem.tensor_spec import TensorSpec
from . import cupy_runtime


class Chunks(NamedTuple):
    """The arrays of a split problem that :func:`split` writes; R rows and E entries, C for each batch entry.

    Attributes:
        rows: ``(D, Sq, Hq, E)``, the queries, repeated for every chunk.
        table: int32 ``(pages per chunk, E)``, see :func:`empty_table`.
        row_counts: int32 ``(E,)``, R for every entry.
        lengths: int32 ``(E,)``, the number of keys of every chunk.
        bounds: int32 ``(R, E)`` each: no array, the end of the keys of each row, or the end and the first key.
        stats: float32 ``(Sq, Hq, E)``; -inf is written for chunks without keys.
    """

    rows: Any
    table: Any
    row_counts: Any
    lengths: Any
    bounds: list[Any]
    stats: Any


def empty_table(spec: TensorSpec) -> Any:
    """An array for a page table of :func:`~cupy_sdpa.problem.split.table_spec`, with its room after each column."""
    pages, entries = spec.shape
    return cupy_runtime.empty((spec.strides[1] // 4, entries), np.dtype(np.int32))[:pages]


class _Table(NamedTuple):
    """The arguments of :func:`padded_table` as the kernels read them; strides and pitches in elements."""

    table: int
    entry_stride: int
    pitch: int
    pages: int
    lengths: int
    page: int
    out: int
    out_pitch: int


def padded_table(table: Any, lengths: Any, page: int, spec: TensorSpec) -> Any:
    """A copy of a page table ``(P, B)`` in which entries after the length name the first page of the sequence."""
    out = empty_table(spec)
    given = _table(table, lengths, page, out)
    blocks = max(1, min(64, -(-given.out_pitch // 256)))
    _padded_table_kernel()((blocks, table.shape[1]), (256,), (np.array(tuple(given), _struct(_Table)),))
    return out


def _table(table: Any, lengths: Any, page: int, out: Any) -> _Table:
    return _Table(
        table=table.data.ptr,
        entry_stride=table.strides[0] // 4,
        pitch=table.strides[1] // 4,
        pages=table.shape[0],
        lengths=lengths.data.ptr,
        page=page,
        out=out.data.ptr,
        out_pitch=out.strides[1] // 4,
    )


class _Split(NamedTuple):
    """The arguments of :func:`split` as the kernel reads them: addresses, elements, and strides of q in units of copies."""

    q: int
    q_head: int
    q_query: int
    q_batch: int
    units: int
    queries: int
    heads: int
    rows: int
    lengths_q: int
    table: _Table
    chunks: int
    chunk_pages: int
    left: int
    right: int
    bottom_right: int
    out_rows: int
    row_counts: int
    chunk_lengths: int
    end: int
    first: int
    stats: int


def split(
    q: Any,
    table: Any,
    lengths_q: Any,
    lengths_kv: Any,
    page: int,
    band: Band | None,
    split: Split,
    row_count: int,
    chunks: Chunks,
) -> None:
    """Write the arrays of a split problem; one launch.

    Args:
        q: ``(D, Hq, Sq, B)``.
        table: int32 ``(P, B)``.
        lengths_q, lengths_kv: int32 ``(B,)``.
        page: the number of keys per page.
        band: the band of keys that a query attends to, or None.
        split: the chunks.
        row_count: R.
        chunks: the arrays, written.
    """
    d, heads, queries, batch = q.shape
    unit = 16 if all(x % 16 == 0 for x in (q.data.ptr, d * q.itemsize, *_used_strides(q))) else q.itemsize
    left, right, bottom_right = band or Band()
    end, first = (*(array.data.ptr for array in chunks.bounds), 0, 0)[:2]
    given = _Split(
        q=q.data.ptr,
        q_head=q.strides[1] // unit,
        q_query=q.strides[2] // unit,
        q_batch=q.strides[3] // unit,
        units=d * q.itemsize // unit,
        queries=queries,
        heads=heads,
        rows=row_count,
        lengths_q=lengths_q.data.ptr,
        table=_table(table, lengths_kv, page, chunks.table),
        chunks=split.chunks,
        chunk_pages=split.pages,
        left=-1 if left is None else left,
        right=-1 if right is None else right,
        bottom_right=bottom_right,
        out_rows=chunks.rows.data.ptr,
        row_counts=chunks.row_counts.data.ptr,
        chunk_lengths=chunks.lengths.data.ptr,
        end=end,
        first=first,
        stats=chunks.stats.data.ptr,
    )
    blocks = max(1, min(16, -(-given.units * queries * heads // 1024)))
    arguments = np.array(tuple(given), _SPLIT)
    _split_kernel(unit)((blocks, batch * split.chunks), (256,), (arguments,))


def _used_strides(array: Any) -> list[int]:
    return [stride for length, stride in zip(array.shape[1:], array.strides[1:], strict=True) if length > 1]


def _struct(fields: type[_Table | _Split]) -> np.dtype[Any]:
    return np.dtype([(name, np.int64) for name in fields._fields])


_SPLIT = np.dtype([(name, _struct(_Table) if name == "table" else np.int64) for name in _Split._fields])

#: The C struct of the page table, and the entry of a page of a sequence: its own, or that of its first page after the length.
_TABLE = f"""
    struct Table {{ long long {", ".join(_Table._fields)}; }};
    __device__ int entry(const Table& t, long long b, long long first, long long i, long long length) {{
        const long long own = i * t.page < length ? first + i : first;
        return length > 0 ? ((const int*)t.table)[own * t.entry_stride + b * t.pitch] : 0;
    }}"""


@functools.cache
def _padded_table_kernel() -> Any:
    """The kernel of :func:`padded_table`."""
    return cupy_runtime.cupy().RawKernel(
        f"""{_TABLE}
        extern "C" __global__ void cupy_sdpa_padded_table(const Table t) {{
            const long long b = blockIdx.y;
            long long length = ((const int*)t.lengths)[b];
            if (length > t.pages * t.page) length = t.pages * t.page;
            for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < t.out_pitch;
                 i += (long long)gridDim.x * blockDim.x)
                ((int*)t.out)[b * t.out_pitch + i] = entry(t, b, 0, i, length);
        }}""",
        "cupy_sdpa_padded_table",
    )


@functools.cache
def _split_kernel(unit: int) -> Any:
    """The kernel of :func:`split`; blocks with one ``blockIdx.y`` work on one chunk, and copy queries in units of bytes."""
    kind = {16: "uint4", 2: "unsigned short", 4: "unsigned", 8: "uint2"}[unit]
    before, after = (_Split._fields[: _Split._fields.index("table")], _Split._fields[_Split._fields.index("table") + 1 :])
    return cupy_runtime.cupy().RawKernel(
        f"""{_TABLE}
        struct Split {{ long long {", ".join(before)}; Table table; long long {", ".join(after)}; }};
        extern "C" __global__ void cupy_sdpa_split(const Split x) {{
            const long long e = blockIdx.y, b = e / x.chunks, c = e % x.chunks;
            const Table& t = x.table;
            const long long size = x.chunk_pages * t.page, start = c * size;
            long long length = ((const int*)t.lengths)[b], queries = ((const int*)x.lengths_q)[b];
            if (length > t.pages * t.page) length = t.pages * t.page;
            if (queries > x.queries) queries = x.queries;
            const long long shift = (x.bottom_right ? length - queries : 0) - start;  // of the diagonal, in this chunk
            long long keys = length - start;
            keys = keys < 0 || queries == 0 ? 0 : keys < size ? keys : size;
            if (x.right >= 0 && queries - 1 + shift + x.right < 0) keys = 0;
            if (x.left >= 0 && shift - x.left >= keys) keys = 0;
            const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
            const long long threads = (long long)gridDim.x * blockDim.x;
            if (thread == 0) {{
                ((int*)x.row_counts)[e] = x.rows;
                ((int*)x.chunk_lengths)[e] = keys;
            }}
            for (long long i = thread; i < t.out_pitch; i += threads)
                ((int*)t.out)[e * t.out_pitch + i] = entry(t, b, c * x.chunk_pages, i, keys);
            for (long long r = thread; x.end && r < x.rows; r += threads) {{
                const long long s = r % x.queries, p = s + shift;
                long long end = x.right < 0 ? keys : p + x.right + 1, first = x.left < 0 ? 0 : p - x.left;
                if (s >= queries) end = 0;
                ((int*)x.end)[e * x.rows + r] = end < 0 ? 0 : end < keys ? end : keys;
                if (x.first) ((int*)x.first)[e * x.rows + r] = first < 0 ? 0 : first;
            }}
            const long long results = x.queries * x.heads;
            for (long long i = thread; keys == 0 && i < results; i += threads)
                ((unsigned*)x.stats)[e * results + i] = 0xff800000u;  // -inf
            const long long units = results * x.units;
            for (long long i = thread; i < units; i += threads) {{
                const long long row = i / x.units, s = row % x.queries, h = row / x.queries;
                (({kind}*)x.out_rows)[e * units + i] =
                    ((const {kind}*)x.q)[b * x.q_batch + s * x.q_query + h * x.q_head + i % x.units];
            }}
        }}""",
        "cupy_sdpa_split",
    )
