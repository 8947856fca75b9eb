"""CUDA kernels around attention with paged keys: page tables, chunks of the keys, and attention over the boundary keys.

cuDNN's kernels for several queries load a whole tile of keys: the pages of all its table entries, and page 0 after the end of
the table. They multiply the values after the length by 0. So the table must consist of whole tiles, and every entry after the
length must name a page without NaN: here the first page of the sequence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..options.band import Band
from ..options.table import Split
from ..problem.tensor_spec import FP8_LARGEST
from ..runtime import cupy_runtime
from ..runtime.cuda_code import Struct, cuda_kernel
from ..runtime.dtypes import TYPES, UNITS


class Keys(NamedTuple):
    """Paged keys and values, and the queries that attend to them.

    Attributes:
        k, v: pages ``(D, Hkv, page size, pages)`` and ``(Dv, Hkv, page size, pages)``.
        table: int32 ``(P, B)``.
        lengths_q, lengths: int32 ``(B,)``, the numbers of queries and keys.
        band: the band of keys that a query attends to, or None.
    """

    k: Any
    v: Any
    table: Any
    lengths_q: Any
    lengths: Any
    band: Band | None


class Chunks(NamedTuple):
    """The arrays of a split problem that :func:`split` writes; R rows and E entries, C for each batch item.

    Attributes:
        rows: ``(D, Sq, Hq, E)``, the queries, repeated for every chunk.
        table: int32 ``(P, E)``, at least the pages per chunk; the first page of the chunk for the others.
        row_counts: int32 ``(E,)``, R for every entry.
        lengths: int32 ``(E,)``, the number of keys of every chunk.
        stats: float32 ``(Sq, Hq, E)``; -inf is written for chunks without keys.
    """

    rows: Any
    table: Any
    row_counts: Any
    lengths: Any
    stats: Any


class PagedFactors(NamedTuple):
    """The factors of FP8 queries and pages, float32 ``(1,)``.

    Attributes:
        descale_q, descale_k, descale_v: of the queries, the keys and the values.
        scale_parts: the scale of the results of chunks and of boundary keys, written: ``1 / descale_v``. A result is a mean of
            values, so it does not saturate.
        amax: 0 is written.
    """

    descale_q: Any
    descale_k: Any
    descale_v: Any
    scale_parts: Any
    amax: Any


class BoundaryKeys(NamedTuple):
    """The results of :func:`split` for the boundary keys, which are the keys of a band outside the common keys.

    Attributes:
        out: ``(Dv, Sq, Hq, B)``, dense, written where there are keys.
        stats: float32 ``(Sq, Hq, B)``, dense, the log-sum-exp, written.
        scale, softcap: of their scores, as for :func:`cupy_sdpa.attention`.
    """

    out: Any
    stats: Any
    scale: float
    softcap: float | None


#: A page table as the kernels read it; strides in elements.
_TABLE = Struct("Table", "table entry_stride pitch pages page lengths")
#: The queries as the kernels read them: strides in bytes, and the band; -1 is no bound.
_QUERIES = Struct("Queries", "q q_head q_query q_batch queries heads lengths left right bottom_right")


def _table(table: Any, lengths: Any, page: int) -> tuple[Any, ...]:
    """Return the values of :data:`_TABLE`."""
    return table, table.strides[0] // 4, table.strides[1] // 4, table.shape[0], page, lengths


def _queries(q: Any, keys: Keys) -> tuple[Any, ...]:
    """Return the values of :data:`_QUERIES`."""
    left, right, bottom_right = keys.band or Band()
    bounds = (-1 if bound is None else bound for bound in (left, right))
    return q, *q.strides[1:], q.shape[2], q.shape[1], keys.lengths_q, *bounds, bottom_right


#: Device functions for table entries (after the length, the first page's entry) and for the keys of queries.
_DEVICE_CODE = """
    __device__ long long least(long long a, long long b) { return a < b ? a : b; }
    __device__ long long most(long long a, long long b) { return a > b ? a : b; }
    __device__ long long length_of(const Table& t, long long b) {
        return least(((const int*)t.lengths)[b], t.pages * t.page);
    }
    __device__ int entry(const Table& t, long long b, long long i) {
        return ((const int*)t.table)[i * t.entry_stride + b * t.pitch];
    }
    __device__ int padded_entry(const Table& t, long long b, long long first, long long i, long long length) {
        return length > 0 ? entry(t, b, i * t.page < length ? first + i : first) : 0;
    }
    // the keys of each query, from first to end, and the common keys: whole pages to which every query attends
    struct Visible {
        long long length, queries, shift, left, right, common_begin, common_end;
        __device__ Visible(const Table& t, const Queries& q, int keys_of_sequence, int queries_of_sequence)
            : left(q.left), right(q.right) {
            length = least(keys_of_sequence, t.pages * t.page);
            queries = least(queries_of_sequence, q.queries);
            shift = q.bottom_right ? length - queries : 0;
            common_end = queries > 0 ? end(0) : 0;
            const unsigned page = t.page, pages = (unsigned(first(queries - 1)) + page - 1) / page;
            common_begin = least((long long)pages * page, common_end);
        }
        __device__ long long first(long long s) const { return left < 0 ? 0 : most(s + shift - left, 0); }
        __device__ long long end(long long s) const {
            return right < 0 ? length : most(least(s + shift + right + 1, length), 0);
        }
    };"""

_PADDED = Struct("Padded", "out width", table=_TABLE)


def padded_table(out: Any, table: Any, lengths: Any, page: int) -> None:
    """Copy a page table ``(P, B)`` to ``(width, B)``; entries after the length name the first page of the sequence."""
    width, batch = out.shape
    if not cupy_runtime.is_array(out):
        length = np.minimum(lengths, len(table) * page)
        entries = np.arange(width)[:, None]
        used = np.where(entries * page < length, entries, 0)
        out[...] = np.where(length > 0, np.take_along_axis(table, used, axis=0), 0)
        return
    arguments = _PADDED(out, width, _table(table, lengths, page))
    _padded_table_kernel()((max(1, min(64, -(-width // 256))), batch), (256,), (arguments,))


@cuda_kernel
def _padded_table_kernel() -> str:
    """Return the kernel of :func:`padded_table`."""
    return f"""{_QUERIES} {_PADDED}{_DEVICE_CODE}
        extern "C" __global__ void cupy_sdpa_padded_table(const Padded x) {{
            const long long b = blockIdx.y, length = length_of(x.table, b), step = (long long)gridDim.x * blockDim.x;
            for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < x.width; i += step)
                ((int*)x.out)[b * x.width + i] = padded_entry(x.table, b, 0, i, length);
        }}"""


#: The threads and the warps of a block.
_THREADS, _WARPS = 128, 4
#: The number of values that a warp loads before it has the scores of their keys.
_EARLY = 4
_SPLIT = Struct(
    "Split",
    "row_count chunks chunk_pages rows chunk_table row_counts chunk_lengths stats blocks_per_chunk split_blocks staged "
    f"table_pages {' '.join(PagedFactors._fields)}",
    table=_TABLE,
    queries=_QUERIES,
)
_BOUNDARY_KEYS = Struct("BoundaryKeys", "batch group k k_head k_row k_page v v_head v_row v_page out stats")


def split(
    q: Any,
    keys: Keys,
    split: Split,
    chunks: Chunks,
    boundary: BoundaryKeys | None,
    dtype: str,
    factors: PagedFactors | None = None,
) -> None:
    """Write the arrays of a split problem, and compute attention over the boundary keys in float32; one launch.

    The pages are aligned to 16 bytes. The chunks may have more queries than q, which are copies of the last one. ``boundary``
    is None if the keys have no band, and ``factors`` for other dtypes than FP8.
    """
    d, heads, queries, batch = q.shape
    staged = chunks.rows.shape[1]
    row = d * q.itemsize
    used = [stride for length, stride in zip(q.shape[1:], q.strides[1:], strict=True) if length > 1]
    unit = 16 if all(x % 16 == 0 for x in (q.data.ptr, row, *used)) else q.itemsize
    table = _table(keys.table, keys.lengths, keys.k.shape[2])
    per_chunk = max(1, min(128, -(-row * staged * heads // (unit * _THREADS))))  # a thread copies a unit: loads overlap
    blocks = per_chunk * batch * split.chunks
    arguments: list[Any] = [
        _SPLIT(
            heads // keys.k.shape[1] * staged, split.chunks, split.pages, *chunks, per_chunk, blocks, staged,
            chunks.table.shape[0], *(factors or (None,) * len(PagedFactors._fields)), table, _queries(q, keys),
        )
    ]  # fmt: skip
    if boundary:
        pages = [x for array in (keys.k, keys.v) for x in (array, *array.strides[1:])]
        results = boundary.out, boundary.stats
        arguments.append(_BOUNDARY_KEYS(batch, heads // keys.k.shape[1], *pages, *results))
        arguments += [np.float32(boundary.scale), np.float32(boundary.softcap or 0)]
        blocks += -(-heads * queries * batch // _WARPS)
    kernel = _split_kernel(unit, dtype, d, boundary.out.shape[0] if boundary else 0)
    kernel((blocks,), (_THREADS,), tuple(arguments))


@cuda_kernel
def _split_kernel(unit: int, dtype: str, d: int, dv: int) -> str:
    """Return the kernel of :func:`split`.

    The first blocks write the chunks, copying units of bytes. In the other blocks, each warp computes attention over the
    boundary keys of one query of one head, if the keys have a band (``dv`` is not 0).
    """
    kind, units = UNITS[unit], d * TYPES[dtype].itemsize // unit
    boundary = """if (blockIdx.x >= x.split_blocks) {
                attend_to_boundary_keys(x, boundary, scale, softcap, blockIdx.x - x.split_blocks);
                return;
            }"""
    return f"""{TYPES[dtype].header}{_SPLIT}{_DEVICE_CODE}
        {_boundary_keys_code(dtype, d, dv) if dv else ""}
        extern "C" __global__ void __launch_bounds__({_THREADS}) cupy_sdpa_split(
            const Split x{", const BoundaryKeys boundary, const float scale, const float softcap" if dv else ""}) {{
            {boundary if dv else ""}
            const unsigned per_chunk = x.blocks_per_chunk, chunks = x.chunks, page = x.table.page;
            const unsigned e = blockIdx.x / per_chunk, b = e / chunks, c = e % chunks;
            const unsigned thread = blockIdx.x % per_chunk * blockDim.x + threadIdx.x, threads = per_chunk * blockDim.x;
            const Queries& q = x.queries;
            const int keys_of_sequence = ((const int*)x.table.lengths)[b], queries_of_sequence = ((const int*)q.lengths)[b];
            const unsigned queries = q.queries, staged = x.staged, results = staged * q.heads;
            for (unsigned i = thread; i < results * {units}; i += threads) {{
                const unsigned row = i / {units}, s = min(row % staged, queries - 1), h = row / staged;
                const long long from = q.q + b * q.q_batch + s * q.q_query + h * q.q_head;
                (({kind}*)x.rows)[(long long)e * results * {units} + i] = ((const {kind}*)from)[i % {units}];
            }}
            const Visible visible(x.table, q, keys_of_sequence, queries_of_sequence);
            const long long size = x.chunk_pages * page, start = visible.common_begin + c * size;
            const long long keys = most(least(visible.common_end - start, size), 0);
            if (blockIdx.x == 0 && thread == 0 && x.scale_parts) {{
                *(float*)x.scale_parts = 1 / *(const float*)x.descale_v;
                *(float*)x.amax = 0;
            }}
            if (thread == 0) {{  // in FP8 a chunk without keys gets one key and no rows (fp8-empty-sequences)
                const bool no_rows = keys == 0 && x.scale_parts;
                ((int*)x.row_counts)[e] = no_rows ? 0 : x.row_count;
                ((int*)x.chunk_lengths)[e] = no_rows ? 1 : keys;
            }}
            const unsigned first = keys ? unsigned(start) / page : 0;
            for (long long i = thread; i < x.table_pages; i += threads)
                ((int*)x.chunk_table)[e * x.table_pages + i] = padded_entry(x.table, b, first, i, keys);
            for (unsigned i = thread; keys == 0 && i < results; i += threads)
                ((unsigned*)x.stats)[(long long)e * results + i] = 0xff800000u;  // -inf
        }}"""


def _boundary_keys_code(dtype: str, d: int, dv: int) -> str:
    """Return the device function that computes attention over the boundary keys of one query of one head with a warp: a thread
    computes the score of one key at a time, and then some columns of the output.
    """
    kind, columns = TYPES[dtype], -(-dv // 32)
    vector = 16 // kind.itemsize
    # The output has the factor of the values, so only the scores need factors.
    descale = "* *(const float*)x.descale_q * *(const float*)x.descale_k" if dtype in FP8_LARGEST else ""
    return f"""{_BOUNDARY_KEYS}
        struct alignas(16) Vector {{ {kind.name} x[{vector}]; }};
        __device__ void attend_to_boundary_keys(
            const Split& x, const BoundaryKeys& boundary, const float scale, const float softcap, const unsigned block) {{
            const Queries& q = x.queries;
            const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
            const unsigned index = block * {_WARPS} + warp, queries = q.queries, heads = q.heads, page = x.table.page;
            const unsigned s = index % queries, h = index / queries % heads;
            const long long b = index / queries / heads;
            if (b >= boundary.batch) return;
            const unsigned head = h / unsigned(boundary.group);
            const long long k = boundary.k + head * boundary.k_head, v = boundary.v + head * boundary.v_head;
            __shared__ float every_query[{_WARPS}][{d}], every_score[{_WARPS}][32];
            __shared__ long long every_value[{_WARPS}][32];
            float* const query = every_query[warp];
            float* const scores = every_score[warp];
            long long* const values = every_value[warp];
            const {kind.name}* const given = (const {kind.name}*)(q.q + b * q.q_batch + s * q.q_query + h * q.q_head);
            // Loads are issued before the first one is used, so that they overlap.
            const int keys_of_sequence = ((const int*)x.table.lengths)[b], queries_of_sequence = ((const int*)q.lengths)[b];
            {kind.name} loaded[{-(-d // 32)}];
            for (int c = 0, i = lane; i < {d}; ++c, i += 32) loaded[c] = given[i];
            const Visible visible(x.table, q, keys_of_sequence, queries_of_sequence);
            for (int c = 0, i = lane; i < {d}; ++c, i += 32) query[i] = float(loaded[c]);
            const long long first = visible.first(s), end = visible.end(s), after = most(visible.common_end, first);
            const long long before = most(least(visible.common_begin, end) - first, 0);
            const long long count = s < visible.queries ? before + most(end - after, 0) : 0;
            float top = __int_as_float(0xff800000), total = 0, sum[{columns}] = {{}};
            for (long long start = 0; start < count; start += 32) {{
                __syncwarp();
                const int keys = least(count - start, 32);
                float score = 0;
                Vector key[{d // vector}];
                if (lane < keys) {{
                    const long long i = start + lane;
                    const unsigned j = i < before ? first + i : after + (i - before), n = j / page;
                    const long long place = entry(x.table, b, n);
                    const Vector* const row = (const Vector*)(k + place * boundary.k_page + (j - n * page) * boundary.k_row);
                    values[lane] = v + place * boundary.v_page + (j - n * page) * boundary.v_row;
                    #pragma unroll
                    for (int p = 0; p < {d // vector}; ++p) key[p] = row[p];
                }}
                __syncwarp();
                {kind.name} early[{_EARLY}][{columns}];
                #pragma unroll
                for (int i = 0; i < {_EARLY}; ++i)
                    for (int c = 0, column = lane; i < keys && column < {dv}; ++c, column += 32)
                        early[i][c] = ((const {kind.name}*)values[i])[column];
                if (lane < keys) {{
                    #pragma unroll
                    for (int p = 0; p < {d // vector}; ++p)
                        for (int i = 0; i < {vector}; ++i) score += query[p * {vector} + i] * float(key[p].x[i]);
                    score *= scale{descale};
                    score = softcap > 0 ? softcap * tanhf(score / softcap) : score;
                    scores[lane] = score;
                }}
                __syncwarp();
                const float previous = top;
                for (int i = 0; i < keys; ++i) top = fmaxf(top, scores[i]);
                __syncwarp();
                if (lane < keys) scores[lane] = expf(score - top);
                __syncwarp();
                const float factor = expf(previous - top);
                total *= factor;
                for (int c = 0; c < {columns}; ++c) sum[c] *= factor;
                #pragma unroll
                for (int i = 0; i < {_EARLY}; ++i) {{
                    if (i >= keys) break;
                    total += scores[i];
                    for (int c = 0, column = lane; column < {dv}; ++c, column += 32) sum[c] += scores[i] * float(early[i][c]);
                }}
                #pragma unroll 4
                for (int i = {_EARLY}; i < keys; ++i) {{
                    const {kind.name}* const value = (const {kind.name}*)values[i];
                    total += scores[i];
                    for (int c = 0, column = lane; column < {dv}; ++c, column += 32) sum[c] += scores[i] * float(value[column]);
                }}
            }}
            const long long row = (b * heads + h) * queries + s;
            {kind.name}* const out = ({kind.name}*)boundary.out + row * {dv};
            for (int c = 0, column = lane; count && column < {dv}; ++c, column += 32) out[column] = {kind.name}(sum[c] / total);
            if (lane == 0) ((float*)boundary.stats)[row] = count ? top + logf(total) : __int_as_float(0xff800000);
        }}"""
