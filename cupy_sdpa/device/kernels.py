"""The few CUDA kernels of our own: what cuDNN needs beside the caller's arrays, and what it leaves undone."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..problem.problem import MASKED_SCORE
from . import cupy_runtime

#: A finite number for -inf: it hides a key from a query as surely, and stays finite times log2(e).
LOWEST = -1e30


class Side(NamedTuple):
    """Where the positions of queries, or of keys, lie.

    Attributes:
        given: the lengths of the batch entries, int32 ``(B,)``; or where packed sequences begin, int32 or int64 ``(B+1,)``.
        most: the most positions that an entry may have.
        total: how many there are together, of packed sequences.
    """

    given: Any
    most: int
    total: int


class Cleared(NamedTuple):
    """A result in which what no entry has is to be cleared.

    Attributes:
        array: ``(D, H, S, B)`` or packed ``(D, H, T)``; of one number a row ``(S, H, B)`` or packed ``(H, T)``.
        of_keys: whether its positions are those of keys.
        numbers: whether it has one number a row.
        value: 0, or -inf in float32.
        sinks: float32 ``(Hq,)``, what the rows of a batch entry without keys get in place of the value; None for the value.
    """

    array: Any
    of_keys: bool
    numbers: bool
    value: float
    sinks: Any = None


def prepare_rows(
    queries: Side, keys: Side, offsets: Mapping[str, tuple[bool, int]] | None, results: Sequence[Cleared]
) -> dict[str, Any]:
    """Lengths and offsets of packed sequences, and cleared results, in one launch and without waiting.

    cuDNN 9.19 writes nothing where a batch entry has no position, and nothing for an entry that has positions on one side
    only. That is cleared, and, of packed results, the positions before the first sequence, after the last one, and those of a
    sequence that are beyond the longest length. Nothing else is touched. A packed sequence is cut off at the longest length and
    at the end of the array.

    Args:
        queries, keys: where they lie.
        offsets: of packed sequences, for every name whether it is of keys, and the factor; None for dense arrays.
        results: what is to be cleared.

    Returns:
        Of packed sequences ``seq_lens_q`` and ``seq_lens_kv``, int32 ``(B,)``, and the offsets, int64 ``(B+1,)``.
    """
    packed = offsets is not None
    batch = queries.given.size - packed
    made: dict[str, Any] = {}
    if offsets is not None:
        made = {name: cupy_runtime.empty((batch,), np.int32) for name in ("seq_lens_q", "seq_lens_kv")}
        made |= {name: cupy_runtime.empty((batch + 1,), np.int64) for name in offsets}
    numbers = [batch, len(offsets or ()), len(results)]
    for side, name in ((queries, "seq_lens_q"), (keys, "seq_lens_kv")):
        lengths = made[name].data.ptr if packed else 0
        step = side.given.strides[0] // side.given.itemsize
        numbers += [side.given.data.ptr, step, side.given.itemsize, lengths, side.most, side.total]
    for name, (of_keys, factor) in (offsets or {}).items():
        numbers += [made[name].data.ptr, of_keys, factor]
    for result in results:
        numbers += _layout(result, packed)
    if len(numbers) > _MOST:
        raise ValueError(f"{len(numbers)} numbers for a launch that takes {_MOST}")
    arguments = np.zeros((), [("n", np.int64, _MOST)])
    arguments["n"][: len(numbers)] = numbers
    wide = max(1, min(64, 256 // max(batch, 1)))
    _rows(packed)((wide, max(batch, 1)), (256,), (arguments,))
    return made


def _layout(result: Cleared, packed: bool) -> list[int]:
    """A result in words of 4 bytes: address, side, bits, and the length and steps of columns, heads, positions and batch."""
    array, words = result.array, [step // 4 for step in result.array.strides]
    if result.numbers:
        heads, position = (0, 1) if packed else (1, 0)
        columns, head_step, position_step = 1, words[heads], words[position]
    else:
        heads, position = 1, 2
        columns, head_step, position_step = array.shape[0] * array.itemsize // 4, words[1], words[2]
    batch_step = 0 if packed else words[-1]
    bits = int(np.float32(result.value).view(np.uint32))
    sinks = 0 if result.sinks is None else result.sinks.data.ptr
    return [array.data.ptr, result.of_keys, bits, columns, array.shape[heads], head_step, position_step, batch_step, sinks]


#: The numbers that the kernel of :func:`prepare_rows` takes: 15, 3 for each of at most 14 offsets, 9 for each of 4 results.
_MOST = 15 + 3 * 14 + 9 * 4


@functools.cache
def _rows(packed: bool) -> Any:
    """The kernel of :func:`prepare_rows`; a row of blocks for every batch entry."""
    return cupy_runtime.cupy().RawKernel(
        f"""struct Numbers {{ long long n[{_MOST}]; }};
        struct Side {{ long long given, step, size, lengths, most, total; }};
        struct Offsets {{ long long out, of_keys, factor; }};
        struct Result {{ long long out, of_keys, bits, columns, heads, head_step, position_step, batch_step, sinks; }};
        __device__ long long within(long long x, long long most) {{ return x < 0 ? 0 : x < most ? x : most; }}
        __device__ long long at(const Side& s, long long i) {{
            return s.size == 4 ? ((const int*)s.given)[i * s.step] : ((const long long*)s.given)[i * s.step];
        }}
        extern "C" __global__ void cupy_sdpa_rows(const Numbers numbers) {{
            const long long* n = numbers.n;
            const long long batch = n[0], b = blockIdx.y;
            const Side* sides = (const Side*)(n + 3);
            const Offsets* offsets = (const Offsets*)(n + 15);
            const Result* results = (const Result*)(offsets + n[1]);
            const bool packed = {int(packed)};
            long long begin[2], length[2], end[2];
            for (int s = 0; s < 2; ++s) {{
                const Side& side = sides[s];
                if (packed) {{
                    begin[s] = within(at(side, b), side.total);
                    end[s] = within(at(side, b + 1), side.total);
                    length[s] = within(end[s] - begin[s], side.most);
                    if (blockIdx.x == 0 && threadIdx.x == 0) ((int*)side.lengths)[b] = length[s];
                }} else {{
                    begin[s] = 0;
                    length[s] = within(at(side, b), side.most);
                    end[s] = side.most;
                }}
            }}
            if (blockIdx.x == 0 && threadIdx.x < n[1]) {{
                const Offsets& o = offsets[threadIdx.x];
                ((long long*)o.out)[b] = begin[o.of_keys] * o.factor;
                if (b + 1 == batch)
                    ((long long*)o.out)[batch] = within(at(sides[o.of_keys], batch), sides[o.of_keys].total) * o.factor;
            }}
            for (int r = 0; r < n[2]; ++r) {{
                const Result& result = results[r];
                const int s = result.of_keys;
                // what this entry has no result for, and what is before the first and after the last packed sequence
                const long long from[3] = {{length[1 - s] ? begin[s] + length[s] : begin[s], 0, end[s]}};
                const long long to[3] = {{end[s], packed && b == 0 ? begin[s] : 0,
                                          packed && b + 1 == batch ? sides[s].total : 0}};
                const long long row = result.columns * result.heads;
                for (int part = 0; part < 3; ++part) {{
                    const long long count = (to[part] - from[part]) * row;
                    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count;
                         i += (long long)gridDim.x * blockDim.x) {{
                        const long long position = from[part] + i / row, word = i % row;
                        const bool lonely = result.sinks && part == 0 && position < begin[s] + length[s];
                        ((unsigned*)result.out)[b * result.batch_step + position * result.position_step
                            + word / result.columns * result.head_step + word % result.columns] = lonely
                            ? ((const unsigned*)result.sinks)[word / result.columns] : (unsigned)result.bits;
                    }}
                }}
            }}
        }}""",
        "cupy_sdpa_rows",
    )


def cleaned(array: Any, lengths: Any) -> Any:
    """A dense copy of an array ``(D, H, S, B)`` with zeros behind the length of every batch entry, whatever lies there.

    D is a multiple of 8 elements of 2 bytes, so a position of a sequence is a multiple of 16 bytes.
    """
    copy = cupy_runtime.empty(array.shape, array.dtype)
    rows = cupy_runtime.rows_of(array, 2)
    if rows is None or rows.address % 16 or rows.pitch % 16:
        copy[...] = array
        rows = cupy_runtime.rows_of(copy, 2)
    assert rows is not None
    position = rows.width // array.shape[2]
    blocks = min(-(-rows.width // (16 * 256)), 1024)
    arguments = (rows.address, copy, lengths, np.int64(rows.pitch // 16), np.int64(rows.width // 16), np.int64(position // 16))
    _cleaning()((blocks, array.shape[3]), (256,), arguments)
    return copy


@functools.cache
def _cleaning() -> Any:
    """The kernel of :func:`cleaned`: 16 bytes a thread and step."""
    return cupy_runtime.cupy().RawKernel(
        """extern "C" __global__ void cupy_sdpa_clean(
            const uint4* from, uint4* to, const int* lengths, long long pitch, long long width, long long position) {
            const long long b = blockIdx.y, kept = lengths[b] * position, step = (long long)gridDim.x * blockDim.x;
            for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < width; i += step)
                to[b * width + i] = i < kept ? from[b * pitch + i] : make_uint4(0, 0, 0, 0);
        }""",
        "cupy_sdpa_clean",
    )


def seeing_nothing(stats: Any) -> Any:
    """A copy of log-sum-exps with +inf in place of those of masked rows."""
    copy = cupy_runtime.empty(stats.shape, stats.dtype)
    kernel = _elementwise("float32 x, float32 lowest, float32 top", "float32 y", "y = x <= lowest ? top : x", "seeing_nothing")
    return kernel(stats, MASKED_SCORE, math.inf, copy)


def replace_infinite(bias: Any) -> None:
    """Replace -inf in a float32 array by :data:`LOWEST`."""
    operation = "y = x < lowest ? lowest : x"
    _elementwise("float32 x, float32 lowest", "float32 y", operation, "replace_infinite")(bias, LOWEST, bias)


def log_sum_exp(top: Any, total: Any, stats: Any) -> None:
    """``stats = top + log(total)``."""
    _elementwise("float32 m, float32 l", "float32 y", "y = m + logf(l)", "log_sum_exp")(top, total, stats)


def diagonal(rows: int, step: int, of_queries: Any, of_keys: Any) -> Any:
    """``step i + keys - queries`` for every row i and batch entry, int32 ``(rows, B)``."""
    made = cupy_runtime.empty((rows, of_queries.size), np.int32)
    operation = "p = i % n * step + k[i / n] - q[i / n]"
    kernel = _elementwise("raw int32 q, raw int32 k, int64 n, int64 step", "int32 p", operation, "diagonal")
    kernel(of_queries, of_keys, rows, step, made.T)  # its elements in the order of the memory
    return made


@functools.cache
def _elementwise(inputs: str, outputs: str, operation: str, name: str) -> Any:
    return cupy_runtime.cupy().ElementwiseKernel(inputs, outputs, operation, f"cupy_sdpa_{name}")
