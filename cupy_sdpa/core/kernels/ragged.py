"""Kernels that run before and after attention: they compute offsets, clear padding, and convert row statistics.

Functions that run as steps take numpy or CuPy arrays; the numpy code is next to the CUDA kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..runtime import cupy_runtime, memory
from ..runtime.cuda_code import Struct, cuda_kernel
from ..runtime.cupy_runtime import elementwise
from ..runtime.dtypes import TYPES
from ..runtime.interpreted_array import on_host

#: A finite replacement for -inf in a bias. It masks a key as well as -inf, and remains finite when multiplied by log2(e).
LOWEST = -1e30


class Lengths(NamedTuple):
    """The lengths of the sequences of queries, or of keys.

    Attributes:
        array: int32 ``(B,)``, the length of each batch item; for packed sequences the cumulative lengths, int32 or int64
            ``(B+1,)``.
        max_length: the largest length; longer sequences are truncated.
        total: the number of positions of a packed array; unused for dense arrays.
        packed: whether the sequences are packed.
        made: int32 ``(B,)``, written: the lengths of packed sequences; or None.
    """

    array: Any
    max_length: int
    total: int
    packed: bool = False
    made: Any = None


class Offsets(NamedTuple):
    """Ragged offsets, int64 ``(B+1,)``, written: cumulative lengths times ``factor``, the elements per position."""

    made: Any
    of_keys: bool
    factor: int


class ClearedResult(NamedTuple):
    """A result whose padding is cleared.

    Attributes:
        array: ``(D, H, S, B)`` or packed ``(D, H, T)``; row statistics ``(S, H, B)`` or packed ``(H, T)``.
        of_keys: whether its positions are key positions.
        per_row: whether it is a row statistic.
        fill_value: 0, or -inf in float32.
        sinks: float32 ``(Hq,)``, written instead of ``fill_value`` to the rows of batch items without keys; or None.
    """

    array: Any
    of_keys: bool
    per_row: bool
    fill_value: float
    sinks: Any = None


def prepare_sequences(queries: Lengths, keys: Lengths, offsets: Sequence[Offsets], results: Sequence[ClearedResult]) -> None:
    """Compute lengths and offsets of packed sequences, and clear the padding of results; one launch, no synchronization.

    cuDNN 9.19 writes nothing to a batch item without queries, nor to one without keys. This function clears the results of
    such entries, positions beyond the length of an entry, and in packed results the positions before the first and after the
    last sequence. It writes to no other position. A packed sequence is truncated at ``max_length`` and at the end of the array.
    The written offsets never decrease and stay inside the array for any cumulative lengths: an offset below an earlier one
    becomes the earlier one, because cuDNN accesses other memory if offsets decrease.

    Args:
        queries, keys: the lengths of the queries and of the keys.
        offsets: the offsets of packed sequences.
        results: the results whose padding is cleared.
    """
    sides = queries, keys
    if not cupy_runtime.is_array(queries.array):
        _prepare_on_numpy(sides, offsets, results)
        return
    packed = queries.packed, keys.packed
    batch = queries.array.size - packed[0]
    sequences = [
        (x.array, x.array.strides[0] // x.array.itemsize, x.array.itemsize, x.made, x.max_length, x.total) for x in sides
    ]
    given = [_result(result, packed[result.of_keys]) for result in results]
    blocks = max(1, min(64, 256 // max(batch, 1)))
    arguments = _ARGUMENTS(batch, len(offsets), len(results), sequences, offsets, given)
    _prepare_sequences_kernel(packed)((blocks, max(batch, 1)), (256,), (arguments,))


def _prepare_on_numpy(sides: Sequence[Lengths], offsets: Sequence[Offsets], results: Sequence[ClearedResult]) -> None:
    starts, ranges = [], []  # of each sequence: where it begins and ends, and its length
    for array, most, total, packed, made in sides:
        given = on_host(array).astype(np.int64)
        starts.append(np.maximum.accumulate(given.clip(0, total)) if packed else np.zeros(len(given) + 1, np.int64))
        begin, end = starts[-1][:-1], starts[-1][1:] if packed else np.full(len(given), most)
        ranges.append((begin, end, (end - begin if packed else given).clip(0, most)))
        if made is not None:
            made[...] = ranges[-1][2]
    for made, of_keys, factor in offsets:
        made[...] = starts[of_keys] * factor
    for array, of_keys, per_row, value, sinks in results:
        packed, (begin, end, lengths) = sides[of_keys].packed, (x.tolist() for x in ranges[of_keys])
        others = ranges[1 - of_keys][2].tolist()
        axes = ((1, 0) if packed else (0, 1, 2)) if per_row else (2, 0, 1, 3)
        rows = array.transpose(axes[: array.ndim])  # the positions first
        for b in range(len(begin)):
            own = rows if packed else rows[..., b]
            own[begin[b] + (lengths[b] if others[b] else 0) : end[b]] = value
            if sinks is not None and not others[b]:
                own[begin[b] : begin[b] + lengths[b]] = sinks
        if packed and len(begin):
            rows[: begin[0]] = value
            rows[end[-1] :] = value


#: :class:`Lengths` as the kernel reads them; addresses, elements and bytes.
_SEQUENCES = Struct("Sequences", "array stride itemsize lengths max_length total")
#: A :class:`ClearedResult` as the kernel writes it, in words of 4 bytes; ``columns`` is the words per position and head.
_RESULT = Struct("Result", "out of_keys bits columns heads head_stride position_stride batch_stride sinks")
#: The arguments, with the maximum number of offsets and of results in a launch.
_ARGUMENTS = Struct(
    "Arguments",
    "batch offset_count result_count",
    sequences=(_SEQUENCES, 2),
    offsets=(Struct("Offsets", "out of_keys factor"), 14),
    results=(_RESULT, 4),
)


def _result(result: ClearedResult, packed: bool) -> tuple[Any, ...]:
    """Return the values of :data:`_RESULT`."""
    array, strides = result.array, [stride // 4 for stride in result.array.strides]
    head, position = ((0, 1) if packed else (1, 0)) if result.per_row else (1, 2)
    columns = 1 if result.per_row else array.shape[0] * array.itemsize // 4
    bits = int(np.float32(result.fill_value).view(np.uint32))
    batch = 0 if packed else strides[-1]
    return array, result.of_keys, bits, columns, array.shape[head], strides[head], strides[position], batch, result.sinks


@cuda_kernel
def _prepare_sequences_kernel(packed: tuple[bool, bool]) -> str:
    """Return the kernel of :func:`prepare_sequences`; blocks with one ``blockIdx.y`` work on one batch item."""
    return f"""{_ARGUMENTS}
        __device__ long long clamped(long long x, long long highest) {{ return x < 0 ? 0 : x < highest ? x : highest; }}
        __device__ long long at(const Sequences& s, long long i) {{
            return s.itemsize == 4 ? ((const int*)s.array)[i * s.stride] : ((const long long*)s.array)[i * s.stride];
        }}
        // a block writes the offsets, each of which is at least the earlier ones, and their differences, the lengths
        __device__ void write_offsets(const Arguments& arguments, int side) {{
            const Sequences& s = arguments.sequences[side];
            const long long count = arguments.batch / blockDim.x + 1, first = threadIdx.x * count;
            const long long last = min(first + count, (long long)arguments.batch + 1);
            long long highest = 0;
            for (long long i = 0; i < first && first < last; ++i) highest = max(highest, clamped(at(s, i), s.total));
            for (long long i = first; i < last; ++i) {{
                const long long before = highest;
                highest = max(highest, clamped(at(s, i), s.total));
                for (int n = 0; n < arguments.offset_count; ++n) {{
                    const Offsets& o = arguments.offsets[n];
                    if (o.of_keys == side) ((long long*)o.out)[i] = highest * o.factor;
                }}
                if (i && s.lengths) ((int*)s.lengths)[i - 1] = clamped(highest - before, s.max_length);
            }}
        }}
        extern "C" __global__ void cupy_sdpa_prepare_sequences(const Arguments arguments) {{
            const long long batch = arguments.batch, b = blockIdx.y;
            const bool packed[2] = {{{int(packed[0])}, {int(packed[1])}}};
            long long begin[2], length[2], end[2];
            for (int side = 0; side < 2; ++side) {{
                const Sequences& s = arguments.sequences[side];
                if (packed[side]) {{
                    begin[side] = clamped(at(s, b), s.total);
                    end[side] = clamped(at(s, b + 1), s.total);
                    length[side] = clamped(end[side] - begin[side], s.max_length);
                }} else {{
                    begin[side] = 0;
                    length[side] = clamped(at(s, b), s.max_length);
                    end[side] = s.max_length;
                }}
            }}
            if (blockIdx.x == 0 && b == 0) {{
                for (int side = 0; side < 2; ++side) if (packed[side]) write_offsets(arguments, side);
            }}
            for (int r = 0; r < arguments.result_count; ++r) {{
                const Result& result = arguments.results[r];
                const int side = result.of_keys;
                // the padding of this entry, and in packed results what is before the first and after the last sequence
                const long long from[3] = {{length[1 - side] ? begin[side] + length[side] : begin[side], 0, end[side]}};
                const long long to[3] = {{end[side], packed[side] && b == 0 ? begin[side] : 0,
                                          packed[side] && b + 1 == batch ? arguments.sequences[side].total : 0}};
                const long long words = result.columns * result.heads;
                for (int part = 0; part < 3; ++part) {{
                    const long long count = (to[part] - from[part]) * words;
                    const long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x;
                    const long long step = (long long)gridDim.x * blockDim.x;
                    const long long start = result.out + 4 * (b * result.batch_stride + from[part] * result.position_stride);
                    const bool dense = result.position_stride == words && result.head_stride == result.columns;
                    if (dense && !result.sinks && start % 16 == 0 && count % 4 == 0) {{
                        const unsigned x = result.bits;
                        for (long long i = first; i < count / 4; i += step) ((uint4*)start)[i] = make_uint4(x, x, x, x);
                        continue;
                    }}
                    for (long long i = first; i < count; i += step) {{
                        const long long position = from[part] + i / words, head = i % words / result.columns;
                        const bool sink = result.sinks && part == 0 && position < begin[side] + length[side];
                        ((unsigned*)result.out)[b * result.batch_stride + position * result.position_stride
                            + head * result.head_stride + i % result.columns] = sink
                            ? ((const unsigned*)result.sinks)[head] : (unsigned)result.bits;
                    }}
                }}
            }}
        }}"""


def zero_padded(copy: Any, array: Any, lengths: Any) -> None:
    """Copy an array ``(D, H, S, B)`` to a dense one, with zeros beyond the length of every batch item, even if these are NaN.

    On the GPU D is a multiple of 8 elements of 2 bytes, so a position of a sequence is a multiple of 16 bytes.
    """
    if not cupy_runtime.is_array(array):
        copy[...] = np.where(np.arange(array.shape[2])[:, None] >= lengths, np.zeros((), array.dtype), array)
        return
    if not copy.size:
        return
    rows = memory.rows_of(array, 2)
    if rows is None or array.data.ptr % 16 or rows.pitch % 16:
        copy[...] = array
        array, rows = copy, memory.rows_of(copy, 2)
    assert rows is not None
    position = rows.width // array.shape[2]
    blocks = min(-(-rows.width // (16 * 256)), 1024)
    sizes = (np.int64(x // 16) for x in (rows.pitch, rows.width, position))
    _zero_padded_kernel()((blocks, array.shape[3]), (256,), (array.data.ptr, copy, lengths, *sizes))


@cuda_kernel
def _zero_padded_kernel() -> str:
    """Return the kernel of :func:`zero_padded`; a thread copies 16 bytes at a time."""
    return """extern "C" __global__ void cupy_sdpa_zero_padded(
            const uint4* from, uint4* to, const int* lengths, long long pitch, long long width, long long position) {
            const long long b = blockIdx.y, end = lengths[b] * position, step = (long long)gridDim.x * blockDim.x;
            for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < width; i += step)
                to[b * width + i] = i < end ? from[b * pitch + i] : make_uint4(0, 0, 0, 0);
        }"""


def backward_stats(copy: Any, stats: Any) -> None:
    """Copy the log-sum-exp for the backward pass, with +inf in fully masked rows, so that exp(S - L) is 0 there."""
    if not cupy_runtime.is_array(stats):
        copy[...] = np.where(np.isneginf(stats), np.inf, stats)
        return
    elementwise("float32 x, float32 top", "float32 y", "y = x == -top ? top : x", "backward_stats")(stats, math.inf, copy)


def replace_infinite(bias: Any) -> None:
    """Replace -inf in a float32 array by :data:`LOWEST`."""
    if not cupy_runtime.is_array(bias):
        bias[...] = np.where(bias < np.float32(LOWEST), np.float32(LOWEST), bias)
        return
    operation = "y = x < lowest ? lowest : x"
    elementwise("float32 x, float32 lowest", "float32 y", operation, "replace_infinite")(bias, LOWEST, bias)


def at_least_one(copy: Any, lengths: Any) -> None:
    """Copy lengths, with 1 instead of 0."""
    cupy_runtime.array_module(lengths).maximum(lengths, 1, out=copy)


def write_log_sum_exp(top: Any, total: Any, stats: Any) -> None:
    """``stats = top + log(total)``."""
    if not cupy_runtime.is_array(stats):
        with np.errstate(divide="ignore"):
            stats[...] = top + np.log(total)
        return
    elementwise("float32 m, float32 l", "float32 y", "y = m + logf(l)", "write_log_sum_exp")(top, total, stats)


def diagonal(made: Any, step: int, lengths_q: Any, lengths_kv: Any) -> None:
    """Write ``step i + lengths_kv - lengths_q`` for every row i and batch item into an int32 array ``(rows, B)``."""
    rows, _ = made.shape
    if not cupy_runtime.is_array(made):
        made[...] = step * np.arange(rows, dtype=np.int32)[:, None] + (lengths_kv - lengths_q)
        return
    operation = "p = i % n * step + k[i / n] - q[i / n]"
    kernel = elementwise("raw int32 q, raw int32 k, int64 n, int64 step", "int32 p", operation, "diagonal")
    kernel(lengths_q, lengths_kv, rows, step, made.T)  # the elements of made.T are in memory order


#: The arguments of :func:`sum_over_scores`: addresses, sizes, and strides in bytes.
_SUM = Struct(
    "Sum",
    "source keys queries source_key source_query source_head source_batch target target_keys target_queries target_key "
    "target_query target_head target_batch",
)


def sum_over_scores(source: Any, target: Any) -> None:
    """Write the sum of ``source``, ``(Skv, Sq, H, B)``, over its first two axes where ``target`` has length 1.

    In float32; numpy arrays of float64 in float64.
    """
    if not cupy_runtime.is_array(source):
        axes = tuple(axis for axis in (0, 1) if target.shape[axis] != source.shape[axis])
        target[...] = source.sum(axis=axes, keepdims=True, dtype=np.result_type(np.float32, source.dtype))
        return
    keys, queries, heads, batch = source.shape
    arguments = _SUM(source, keys, queries, *source.strides, target, *target.shape[:2], *target.strides)
    blocks = -(-target.shape[0] // 32) * target.shape[1]
    _sum_kernel(source.dtype.name, target.dtype.name)((blocks, heads, batch), (32,), (arguments,))


@cuda_kernel
def _sum_kernel(dtype: str, out_dtype: str) -> str:
    """Return the kernel of :func:`sum_over_scores`. A warp computes 32 sums of different keys, or one sum over all keys."""
    source, target = TYPES[dtype], TYPES[out_dtype]
    return f"""{"".join(sorted({source.header, target.header}))}
        {_SUM}
        extern "C" __global__ void cupy_sdpa_sum(const Sum x) {{
            const bool over_keys = x.keys != x.target_keys;
            const long long lane = threadIdx.x, h = blockIdx.y, b = blockIdx.z;
            const long long query = blockIdx.x % x.target_queries, column = blockIdx.x / x.target_queries * 32 + lane;
            const long long from = x.source + h * x.source_head + b * x.source_batch;
            __shared__ float sums[32];
            float total = 0;
            for (long long q = query; q < x.queries; q += x.target_queries)
                for (long long key = over_keys ? lane : column; key < x.keys; key += over_keys ? 32 : x.keys)
                    total += float(*(const {source.name}*)(from + key * x.source_key + q * x.source_query));
            sums[lane] = total;
            __syncwarp();
            if (over_keys && lane == 0) for (int i = 1; i < 32; ++i) total += sums[i];
            if (over_keys ? lane == 0 : column < x.target_keys)
                *({target.name}*)(x.target + (over_keys ? 0 : column) * x.target_key + query * x.target_query
                    + h * x.target_head + b * x.target_batch) = {target.name}(total);
        }}"""
