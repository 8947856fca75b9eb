"""The mean of values in FP8: over the keys, at the beginning of cached sequences, and its addition to an output.

For every vector m that is constant over the keys, ``attention(v) = attention(v - m) + w m`` with the sum w of a row's weights.
FP8 attention without the mean has a smaller error: Hopper's tensor cores truncate sums of numbers with one sign.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ..extend import TYPES, Struct, cuda_kernel, cupy_runtime, dtype_name, numpy_dtype, rounded

#: The elements of a unit along head_dim, the threads of a block, and the largest number of blocks along an axis of a grid.
_UNIT, _THREADS, _MAX_BLOCKS = 8, 256, 65535
#: The rows that a block adds up.
_ROWS = 256


class Weights(NamedTuple):
    """What gives the sum of a row's weights: 0 without keys, otherwise 1, less the weight of the sink.

    Attributes:
        stats: float32 ``(S, H, B)`` or packed ``(H, T)``, the log-sum-exp, in which a sink counts as a key.
        sinks: float32 ``(H,)``; None without sinks.
    """

    stats: Any
    sinks: Any = None


class Scaled(NamedTuple):
    """The factor of an FP8 output, and its largest magnitude.

    Attributes:
        scale: float32 ``(1,)``; None for 1.
        amax: float32 ``(1,)``, where the largest magnitude before the scale is written; it is 0 before. None if nothing is.
    """

    scale: Any = None
    amax: Any = None


# Steps and calls, for arrays of numpy and of CuPy


def sums_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the scratch array of :func:`write_mean` for an array of a shape."""
    width, heads, rows, *batch = shape
    return width, heads, *batch, max(1, -(-rows // _ROWS))


def write_mean(source: Any, mean: Any, lengths: Any, sums: Any) -> None:
    """Write the mean over the rows of an array, 0 where it is not finite; two launches.

    Args:
        source: ``(D, H, S, B)`` or packed ``(D, H, T)``, float16, bfloat16 or float32 (numpy: also float64). On the GPU D is a
            multiple of 8, and head_dim is contiguous.
        mean: float32 ``(D, H, 1, B)`` or ``(D, H, 1)``, dense in Fortran order.
        lengths: int32 ``(B,)``, dense; rows beyond them are not read. None for full lengths.
        sums: float32 with :func:`sums_shape`; None for numpy.
    """
    if not mean.size:
        return
    if not cupy_runtime.is_array(mean):
        _write_mean_on_cpu(source, mean, lengths)
        return
    width, heads, rows, *batch = source.shape
    columns, chunks = heads * math.prod(batch), sums.shape[-1]
    strides = (*source.strides[1:], 0)[:3]
    arguments = _SOURCE(source, *strides, lengths, width // _UNIT, heads, rows, columns, chunks, sums, mean)
    _mean_kernel(dtype_name(source.dtype), "sums")((chunks, min(columns, _MAX_BLOCKS)), (_THREADS,), (arguments,))
    _mean_kernel(dtype_name(source.dtype), "mean")((-(-mean.size // _THREADS),), (_THREADS,), (arguments,))


def add_mean(
    source: Any, target: Any, descale: Any, mean: Any, weights: Weights, scaled: Scaled, table: Any, dtype: str
) -> None:
    """``target = scale * (descale * source + w mean)`` with the sum w of a row's weights; one launch.

    Args:
        source: ``(D, Hq, S, B)`` or packed ``(D, Hq, T)``, dense in Fortran order; FP8 (uint8 on the GPU), float16 or bfloat16.
            On the GPU D is a multiple of 8.
        target: as ``source``, also float32 (numpy: float64). It may be the source.
        descale: float32 ``(1,)``; None for 1.
        mean: float32 ``(D, Hkv, B)`` with any strides, the mean of each sequence; of packed sequences B is 1.
        weights, scaled: as above.
        table: int32 ``(B,)``, the place of each sequence along the last axis of ``mean``, if it has keys; None for its number.
        dtype: the dtype of elements of 8 bits.
    """
    if not target.size:
        return
    if not cupy_runtime.is_array(target):
        _add_mean_on_cpu(source, target, descale, mean, weights, scaled, table, dtype)
        return
    stats, sinks = weights
    of_head, of_row, *of_batch = stats.strides if target.ndim == 3 else (stats.strides[1], stats.strides[0], stats.strides[2])
    width, heads, length = target.shape[:3]
    units = target.size // _UNIT
    arguments = _OUTPUT(
        source, target, descale, mean, *mean.strides, stats, of_row, of_head, *(of_batch or (0,)),
        *((0, 0) if sinks is None else (sinks, *sinks.strides)), *((0, 0) if table is None else (table, *table.strides)),
        *scaled, width // _UNIT, heads, heads // mean.shape[1], length, units,
    )  # fmt: skip
    types = (dtype if x.itemsize == 1 else dtype_name(x.dtype) for x in (source, target))
    _add_mean_kernel(*types)((min(-(-units // _THREADS), _MAX_BLOCKS),), (_THREADS,), (arguments,))


#: What a report says of the expected error of a call with this step.
add_mean.accuracy = "the mean is added after this rounding"  # type: ignore[attr-defined]


def write_first_means(
    tokens: Any, own: Any, means: Any, state: tuple[Any, Any, Any, Any], *, advance: bool, is_fp8: bool
) -> None:
    """Write the mean of the first page of every sequence whose first tokens are appended; one launch.

    It is the mean m of the n tokens of a head, without NaN and infinities, times ``max(0, 1 - s^2 / (n |m|^2))`` with their
    variance ``s^2``, and 0 for one token (James and Stein 1961): m differs from the mean of all tokens by about ``s^2 / n``, so
    where it is small, 0 is nearer. FP8 tokens give the sequence the mean that was subtracted from them.

    Args:
        tokens: ``(D, Hkv, S, B)`` or packed ``(D, Hkv, T)``, with unit stride along the first axis. On the GPU D is a multiple
            of 8.
        own: of FP8 tokens, with their shape, float32 with any strides; None for 0, and for other tokens.
        means: float32 ``(D, Hkv, pages)``, dense in Fortran order.
        state: the page table, the lengths, the counts and the starts of the cache, see :class:`.cache_kernels.State`.
        advance: whether the lengths are those before the append; otherwise they are those after it.
        is_fp8: whether the tokens are FP8.
    """
    table, lengths, counts, starts = state
    if not cupy_runtime.is_array(means):
        _write_first_means_on_cpu(tokens, own, means, state, advance=advance, is_fp8=is_fp8)
        return
    width, heads, length, *_ = tokens.shape
    strides = [*(*tokens.strides[1:], 0)[:3], own, *((0,) * 4 if own is None else (*own.strides, 0)[:4])]
    numbers = width // _UNIT, heads, length, counts.size, table.shape[0], tokens.ndim == 3, advance
    arguments = _FIRST(tokens, *strides, means, table, lengths, counts, starts, *numbers)
    kernel = _first_means_kernel("" if is_fp8 else dtype_name(tokens.dtype))
    kernel((heads, min(counts.size, _MAX_BLOCKS)), (_THREADS,), (arguments,))


# The numpy functions


def _write_first_means_on_cpu(
    tokens: Any, own: Any, means: Any, state: tuple[Any, Any, Any, Any], *, advance: bool, is_fp8: bool
) -> None:
    table, *others = state
    for b, (length, count, first) in enumerate(zip(*(x.tolist() for x in others), strict=False)):
        part = (..., slice(first, first + count)) if tokens.ndim == 3 else (..., slice(count), b)
        if not count or length > (0 if advance else count):
            continue
        page = table[0, b]
        if is_fp8:
            means[:, :, page] = 0 if own is None else own[part][:, :, 0]
            continue
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            x = tokens[part].astype(np.float32)
            x = np.where(np.isfinite(x), x, np.float32(0))
            total, squares = x.sum(axis=2), np.square(x).sum(axis=(0, 2))
            norm = np.square(total).sum(axis=0) / count
            variance = np.maximum(squares - norm, 0) / (count - 1)
            found = total / count * np.maximum(0, 1 - variance / norm)
        means[:, :, page] = np.where(np.isfinite(found), found, 0)


def _write_mean_on_cpu(source: Any, mean: Any, lengths: Any) -> None:
    """Compute the kernels' sums in the same order, so with the same bits."""
    width, heads, rows, *batch = source.shape
    values = np.zeros((width, heads, max(1, -(-rows // _ROWS)) * _ROWS, *batch), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        values[:, :, :rows] = source
        if lengths is not None:
            values = np.where(np.arange(values.shape[2])[:, None] < lengths, values, np.float32(0))
        groups = max(1, _THREADS // -(-width // _UNIT))
        steps = -(-_ROWS // groups)
        parts = np.zeros((width, heads, values.shape[2] // _ROWS, steps * groups, *batch), np.float32)
        parts[:, :, :, :_ROWS] = values.reshape((width, heads, -1, _ROWS, *batch))
        parts = _in_order(parts.reshape((width, heads, -1, steps, groups, *batch)), 3)
        total = _in_order(_in_order(parts, 3), 2)
        numbers = np.float32(rows) if lengths is None else lengths.astype(np.float32)
        found = total / np.maximum(numbers, 1)
    mean[:, :, 0] = np.where(np.isfinite(found), found, np.float32(0))


def _in_order(x: Any, axis: int) -> Any:
    """Return the sum along an axis, one element after the other."""
    total = np.zeros(x.shape[:axis] + x.shape[axis + 1 :], np.float32)
    for part in np.moveaxis(x, axis, 0):
        total += part
    return total


def _add_mean_on_cpu(
    source: Any, target: Any, descale: Any, mean: Any, weights: Weights, scaled: Scaled, table: Any, dtype: str
) -> None:
    own, to = (x.view(numpy_dtype(dtype)) if x.itemsize == 1 else x for x in (source, target))
    stats = weights.stats[None] if target.ndim == 3 else weights.stats.transpose(1, 0, 2)[None]  # (1, H, S, B) or (1, H, T)
    with np.errstate(invalid="ignore", over="ignore"):
        of_keys = np.ones_like(stats)
        if weights.sinks is not None:
            sinks = weights.sinks.reshape((1, -1, *(1,) * (stats.ndim - 2)))
            of_keys = (1 - np.exp(sinks - stats.astype(np.float64))).astype(np.float32)
        of_keys = np.where(np.isneginf(stats), np.float32(0), of_keys)
        if table is not None:  # the entry of a sequence without keys may be anything
            mean = mean[..., np.where(of_keys.any(axis=(0, 1, 2)), table, 0)]
        of_heads = np.repeat(mean, target.shape[1] // max(mean.shape[1], 1), axis=1)
        of_heads = of_heads[:, :, None] if target.ndim == 4 else of_heads
        values = own.astype(np.float32) * (np.float32(1) if descale is None else descale)
        values = values + np.where(of_keys == 0, np.float32(0), of_keys * of_heads)
        if scaled.amax is not None:
            scaled.amax[...] = np.fmax.reduce(np.abs(values), axis=None, initial=0)
        values = values if scaled.scale is None else values * scaled.scale
        to[...] = rounded(values, dtype) if target.itemsize == 1 else values.astype(target.dtype)


# The kernels

#: The arrays of :func:`write_first_means`: addresses, strides in bytes, and numbers of units and of others.
_FIRST = Struct(
    "First",
    "tokens head_stride token_stride batch_stride own own_d own_head own_token own_batch means table lengths counts starts "
    "width heads length batch table_rows packed advance",
)
#: The array of :func:`write_mean`: addresses, strides in bytes, and numbers of units.
_SOURCE = Struct("Source", "source head_stride row_stride batch_stride lengths width heads rows columns chunks sums mean")
#: The arrays of :func:`add_mean`: addresses, strides in bytes, and numbers of units and of heads.
_OUTPUT = Struct(
    "Output",
    "source target descale mean mean_d mean_h mean_b stats stats_s stats_h stats_b sinks sinks_h table table_b scale amax "
    "width heads group rows units",
)
_MEAN_BODIES = {
    # a thread adds the rows group, group + groups, ... of a unit; then one thread adds the groups
    "sums": """
        __shared__ float parts[8][THREADS];
        const long long width = s.width < THREADS ? s.width : THREADS, groups = THREADS / width;
        const long long own = threadIdx.x % width, group = threadIdx.x / width, begin = blockIdx.x * (long long)ROWS;
        for (long long column = blockIdx.y; column < s.columns; column += gridDim.y) {
            const long long head = column % s.heads, b = column / s.heads;
            long long end = s.lengths ? ((const int*)s.lengths)[b] : s.rows;
            end = min(min(end, s.rows), begin + ROWS);
            const char* const from = (const char*)s.source + head * s.head_stride + b * s.batch_stride;
            for (long long first = 0; first < s.width; first += width) {
                const long long unit = first + own;
                const bool is_used = unit < s.width && group < groups;
                float total[8] = {};
                if (is_used)
                    for (long long row = begin + group; row < end; row += groups) {
                        const Element* const x = (const Element*)(from + row * s.row_stride) + 8 * unit;
                        for (int i = 0; i < 8; ++i) total[i] = __fadd_rn(total[i], float(x[i]));
                    }
                for (int i = 0; i < 8; ++i) parts[i][threadIdx.x] = total[i];
                __syncthreads();
                if (is_used && group == 0)
                    for (int i = 0; i < 8; ++i) {
                        float sum = 0;
                        for (long long g = 0; g < groups; ++g) sum = __fadd_rn(sum, parts[i][g * width + own]);
                        ((float*)s.sums)[((blockIdx.x * s.columns + column) * s.width + unit) * 8 + i] = sum;
                    }
                __syncthreads();
            }
        }""",
    "mean": """
        const long long size = s.columns * s.width * 8, i = (long long)blockIdx.x * THREADS + threadIdx.x;
        if (i >= size) return;
        float total = 0;
        for (long long chunk = 0; chunk < s.chunks; ++chunk)
            total = __fadd_rn(total, ((const float*)s.sums)[chunk * size + i]);
        const long long number = s.lengths ? ((const int*)s.lengths)[i / (8 * s.width) / s.heads] : s.rows;
        const float mean = total / (float)max(number, 1ll);
        ((float*)s.mean)[i] = isfinite(mean) ? mean : 0.0f;""",
}


@cuda_kernel
def _mean_kernel(dtype: str, name: str) -> str:
    """Return the kernels of :func:`write_mean`: the sums of parts of the rows, and their mean."""
    of = TYPES[dtype]
    return f"""{of.header}#define THREADS {_THREADS}
        #define ROWS {_ROWS}
        {_SOURCE}
        typedef {of.name} Element;
        extern "C" __global__ void cupy_sdpa_mean_{name}(const Source s) {{{_MEAN_BODIES[name]}
        }}"""


@cuda_kernel
def _add_mean_kernel(source: str, target: str) -> str:
    """Return the kernel of :func:`add_mean`; a thread computes a unit. Each product and sum is rounded, as on numpy."""
    types = {"In": TYPES[source], "Out": TYPES[target]}
    vectors = (f"struct alignas({min(8 * of.itemsize, 16)}) {name}s {{ {of.name} x[8]; }};" for name, of in types.items())
    return f"""{"".join(sorted({of.header for of in types.values()}))}
        {_OUTPUT}
        {" ".join(vectors)}
        extern "C" __global__ void cupy_sdpa_add_mean(const Output o) {{
            __shared__ float largest[{_THREADS}];
            const float none = __int_as_float(0xff800000), scale = o.scale ? *(const float*)o.scale : 1;  // -inf
            const float descale = o.descale ? *(const float*)o.descale : 1;
            float own = 0;
            const long long step = (long long)gridDim.x * blockDim.x;
            for (long long u = blockIdx.x * (long long)blockDim.x + threadIdx.x; u < o.units; u += step) {{
                const long long column = u % o.width, head = u / o.width % o.heads, r = u / o.width / o.heads;
                const long long row = r % o.rows, b = r / o.rows;
                const float stats = *(const float*)(o.stats + row * o.stats_s + head * o.stats_h + b * o.stats_b);
                float of_keys = stats == none ? 0 : 1;
                if (o.sinks && of_keys)  // float64, because approximations of expf differ
                    of_keys = (float)(1 - exp(*(const float*)(o.sinks + head * o.sinks_h) - (double)stats));
                const Ins from = ((const Ins*)o.source)[u];
                Outs to;
                const char* mean = nullptr;
                if (of_keys != 0) {{  // the entry of a sequence without keys may be anything
                    const long long place = o.table ? *(const int*)(o.table + b * o.table_b) : b;
                    mean = (const char*)o.mean + 8 * column * o.mean_d + head / o.group * o.mean_h + place * o.mean_b;
                }}
                for (int i = 0; i < 8; ++i) {{
                    float x = __fmul_rn(float(from.x[i]), descale);
                    if (mean) x = __fadd_rn(x, __fmul_rn(of_keys, *(const float*)(mean + i * o.mean_d)));
                    own = fmaxf(own, fabsf(x));
                    to.x[i] = {types["Out"].name}(__fmul_rn(x, scale));
                }}
                ((Outs*)o.target)[u] = to;
            }}
            if (!o.amax) return;
            largest[threadIdx.x] = own;
            __syncthreads();
            for (int step = {_THREADS // 2}; step; step /= 2) {{
                if (threadIdx.x < step) largest[threadIdx.x] = fmaxf(largest[threadIdx.x], largest[threadIdx.x + step]);
                __syncthreads();
            }}
            // the bits of positive numbers are in their order
            if (threadIdx.x == 0) atomicMax((int*)o.amax, __float_as_int(largest[0]));
        }}"""


@cuda_kernel
def _first_means_kernel(dtype: str) -> str:
    """Return the kernel of :func:`write_first_means`, a block for each head and sequence; the dtype is empty for FP8 tokens."""
    of = TYPES[dtype or "float32"]
    return f"""{of.header}{_FIRST}
        #define THREADS {_THREADS}
        typedef {of.name} Element;
        // Adds the numbers of a block's threads.
        __device__ float sum_of_block(float* parts, float x) {{
            __syncthreads();
            parts[threadIdx.x] = x;
            __syncthreads();
            for (int step = THREADS / 2; step; step /= 2) {{
                if (threadIdx.x < step) parts[threadIdx.x] += parts[threadIdx.x + step];
                __syncthreads();
            }}
            return parts[0];
        }}
        extern "C" __global__ void cupy_sdpa_first_means(const First f) {{
            __shared__ float parts[8][THREADS];
            const long long head = blockIdx.x, width = f.width < THREADS ? f.width : THREADS, groups = THREADS / width;
            const long long own = threadIdx.x % width, group = threadIdx.x / width;
            const int* const counts = (const int*)f.counts;
            for (long long b = blockIdx.y; b < f.batch; b += gridDim.y) {{
                const long long count = counts[b], begin = ((const int*)f.lengths)[b] - (f.advance ? 0 : count);
                if (begin > 0 || count <= 0) continue;
                const long long first = f.packed ? ((const int*)f.starts)[b] : 0;
                const long long end = min(first + count, f.length);
                const char* const from = (const char*)f.tokens + head * f.head_stride + b * f.batch_stride;
                float* const mean = (float*)f.means + (((const int*)f.table)[b * f.table_rows] * f.heads + head) * 8 * f.width;
                {"" if dtype else "const long long own_mean = first * f.own_token + head * f.own_head + b * f.own_batch;"}
                float squares = 0, norm = 0;
                for (long long start = 0; start < f.width; start += width) {{
                    const long long unit = start + own;
                    const bool is_used = unit < f.width && group < groups;
                    float total[8] = {{}};
                    if (is_used && {int(bool(dtype))})
                        for (long long row = first + group; row < end; row += groups)
                            for (int i = 0; i < 8; ++i) {{
                                float x = float(((const Element*)(from + row * f.token_stride))[8 * unit + i]);
                                x = isfinite(x) ? x : 0.0f;
                                total[i] += x;
                                squares += x * x;
                            }}
                    for (int i = 0; i < 8; ++i) parts[i][threadIdx.x] = total[i];
                    __syncthreads();
                    if (is_used && group == 0)
                        for (int i = 0; i < 8; ++i) {{
                            const long long d = 8 * unit + i;
                            float sum = 0;
                            for (long long g = 0; g < groups; ++g) sum += parts[i][g * width + own];
                            norm += sum * sum;
                            mean[d] = {"sum" if dtype else "f.own ? *(const float*)(f.own + own_mean + d * f.own_d) : 0.0f"};
                        }}
                    __syncthreads();
                }}
                if (!{int(bool(dtype))}) continue;
                squares = sum_of_block(parts[0], squares);
                norm = sum_of_block(parts[0], norm);
                norm /= count;
                const float factor = fmaxf(0, 1 - fmaxf(squares - norm, 0) / (count - 1) / norm) / count;
                if (group == 0)
                    for (long long unit = own; unit < f.width; unit += width)
                        for (int i = 0; i < 8; ++i) {{
                            const float x = mean[8 * unit + i] * factor;
                            mean[8 * unit + i] = isfinite(x) ? x : 0.0f;
                        }}
                __syncthreads();
            }}
        }}"""
