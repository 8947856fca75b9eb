"""Kernels for blocks of rows: copy blocks of an array, and merge or sum the results of copies; also on numpy arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..runtime import cupy_runtime
from ..runtime.cuda_code import Struct, cuda_kernel
from ..runtime.dtypes import TYPES
from ..runtime.interpreted_array import strided
from ..runtime.memory import UNITS

#: The number of queries, or of keys, in a block; and the number of threads in a thread block.
BLOCK, THREADS = 128, 128
#: The rows of an array as kernels read them: the address, and strides in bytes.
_ROWS = Struct("Rows", "data head row batch rows")
#: The arguments of :func:`copy_blocks`; width is the bytes of a row of a head of the copies.
_COPY = Struct("Arguments", source=_ROWS, target=Struct("Copies", "data width heads items"))
#: The arguments of :func:`merge_blocks`, of which :func:`sum_blocks` has those up to ``out``.
_MERGE = Struct(
    "Arguments", "offsets parts groups heads blocks width copies copied_stats sinks", out=_ROWS, stats=_ROWS, base=_ROWS
)


def _rows_of(array: Any) -> tuple[Any, ...]:
    """The values of :data:`_ROWS` for an array ``(D, H, S, B)``, or row statistics ``(S, H, B)``."""
    if array.ndim == 4:
        _, head, row, batch = array.strides
        return array, head, row, batch, array.shape[2]
    row, head, batch = array.strides
    return array, head, row, batch, array.shape[0]


def _is_vector(array: Any, size: int) -> bool:
    """Whether the rows of an array consist of aligned units of ``size`` bytes."""
    return all(x % size == 0 for x in (array.shape[0] * array.itemsize, array.data.ptr, *array.strides[1:]))


# Copies


def copy_blocks(copies: Any, array: Any, items: Any, heads: int, of_stats: bool = False) -> None:
    """Copy blocks of an array ``(D, H, S, B)`` whose first axis is contiguous; rows after S are 0. One launch.

    Args:
        copies: ``(D, H', BLOCK, n)``, dense, written.
        array: the array.
        items: int32 ``(n, 3)``: block, group of heads and batch entry of each copy.
        heads: H', the number of heads in a group.
        of_stats: whether the array is the log-sum-exp, float32 (numpy: also float64) ``(1, H, S, B)``, for the backward pass:
            rows without keys, and those after S, are inf. Default False.
    """
    d, _, rows, _ = array.shape
    if not cupy_runtime.is_array(array):
        copies[...] = np.inf if of_stats else 0
        for n, (i, g, b) in enumerate(items):
            block = array[:, g * heads : (g + 1) * heads, i * BLOCK : min((i + 1) * BLOCK, rows), b]
            copies[:, :, : block.shape[2], n] = np.where(np.isneginf(block), np.inf, block) if of_stats else block
        return
    if copies.size:
        size = array.itemsize
        unit = next(unit for unit in UNITS if _is_vector(array, unit))
        arguments = _COPY(_rows_of(array), (copies, d * size, heads, items))
        columns = max(1, min(d * size // unit, 32))
        _copy_kernel(unit, of_stats)((len(items), heads), (columns, THREADS // columns), (arguments,))


@cuda_kernel
def _copy_kernel(unit: int, of_stats: bool) -> str:
    """The kernel of :func:`copy_blocks`: ``blockIdx`` is (item, head), ``threadIdx`` is (unit of a row, row)."""
    kind = UNITS[unit]
    missing = {16: "make_uint4(0, 0, 0, 0)", 8: "make_uint2(0, 0)", 4: "0u", 2: "(unsigned short)0"}[unit]
    without_keys = ""
    if of_stats:  # the bits of inf and -inf
        missing, without_keys = "0x7f800000u", "if (value == 0xff800000u) value = 0x7f800000u;"
    return f"""{_COPY}
        extern "C" __global__ void cupy_sdpa_copy_blocks(const Arguments x) {{
            const long long n = blockIdx.x, h = blockIdx.y;
            const int* const item = (const int*)x.target.items + 3 * n;
            const long long first = (long long)item[0] * {BLOCK};
            const char* const from = (const char*)x.source.data + (item[1] * x.target.heads + h) * x.source.head
                + item[2] * x.source.batch;
            char* const to = (char*)x.target.data + (n * {BLOCK} * x.target.heads + h) * x.target.width;
            #pragma unroll 4
            for (int row = threadIdx.y; row < {BLOCK}; row += blockDim.y)
                for (int i = threadIdx.x; i < x.target.width / {unit}; i += blockDim.x) {{
                    {kind} value = {missing};
                    if (first + row < x.source.rows) value = ((const {kind}*)(from + (first + row) * x.source.row))[i];
                    {without_keys}
                    (({kind}*)(to + row * x.target.heads * x.target.width))[i] = value;
                }}
        }}"""


def copy_elements(copies: Any, array: Any, index: Any) -> None:
    """Copy the elements of an array at offsets: ``index``, int64, in elements, of the shape of ``copies``, in Fortran order."""
    if not cupy_runtime.is_array(array):
        last = sum((length - 1) * stride // array.itemsize for length, stride in zip(array.shape, array.strides, strict=True))
        copies[...] = strided(array, (last + 1,), (array.itemsize,))[index]
        return
    if copies.size:
        addresses = np.int64(array.data.ptr), np.int64(index.data.ptr), np.int64(copies.data.ptr), np.int64(copies.size)
        _element_kernel(array.itemsize)((-(-copies.size // THREADS),), (THREADS,), addresses)


@cuda_kernel
def _element_kernel(size: int) -> str:
    """The kernel of :func:`copy_elements`."""
    kind = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "uint2"}[size]
    return f"""extern "C" __global__ void cupy_sdpa_copy_elements(
            long long array, long long index, long long copies, long long size
        ) {{
            const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
            if (i < size) ((({kind}*)copies))[i] = ((const {kind}*)array)[((const long long*)index)[i]];
        }}"""


# Results of copies


class Sources(NamedTuple):
    """Where the blocks of a result come from.

    Attributes:
        offsets, parts: int32; block t, which is (block, group, batch entry) with the first fastest, is made of the copies
            ``parts[offsets[t] : offsets[t + 1]]``.
        groups: the number of groups of heads.
    """

    offsets: Any
    parts: Any
    groups: int


def merge_blocks(sources: Sources, copies: Any, copied_stats: Any, out: Any, stats: Any, base: Any, sinks: Any) -> None:
    """Merge the results of copied query blocks with those in ``out``, in float32; one launch, no synchronization.

    Args:
        sources: the copies of every block of queries.
        copies: ``(Dv, H', BLOCK, n)``, dense.
        copied_stats: float32 (numpy: also float64) ``(H', BLOCK, n)``, dense, their log-sum-exp; where it is -inf, the copy is
            not used.
        out: ``(Dv, H, S, B)``: the results in place, if there is ``base``; written.
        stats: float32 ``(S, H, B)``, written; or None.
        base: float32 ``(S, H, B)``, the log-sum-exp of the results in place; or None.
        sinks: float32 ``(H,)``, a part without a value for each head; or None.
    """
    if not cupy_runtime.is_array(out):
        _merge_on_cpu(sources, copies, copied_stats, out, stats, base, sinks)
        return
    _launch(sources, copies, out, copied_stats, sinks, stats, base)


def sum_blocks(sources: Sources, copies: Any, out: Any) -> None:
    """Write the sums of copies to the blocks of ``out``, in float32 and a fixed order; 0 for blocks without copies.

    The arguments are those of :func:`merge_blocks`.
    """
    if cupy_runtime.is_array(out):
        _launch(sources, copies, out)
        return
    dtype = np.result_type(np.float32, out.dtype)
    for (heads, rows, b), numbers in _blocks_of(sources, out):
        total = np.zeros_like(out[:, heads, rows, b], dtype)
        for n in numbers:
            total += copies[:, :, : rows.stop - rows.start, n]
        out[:, heads, rows, b] = total


def _launch(
    sources: Sources, copies: Any, out: Any, copied_stats: Any = None, sinks: Any = None, stats: Any = None, base: Any = None
) -> None:
    """Launch the kernel that writes the blocks of ``out``."""
    width, heads, length, batch = out.shape
    blocks, per_group = -(-length // BLOCK), heads // sources.groups
    if not out.size:
        return
    unit = 16 // int(out.itemsize) if _is_vector(out, 16) else 1  # the elements that a thread reads and writes at once
    columns = max(1, min(width // unit, 32))
    rows = (None if array is None else _rows_of(array) for array in (out, stats, base))
    arguments = _MERGE(*sources, per_group, blocks, width, copies, copied_stats, sinks, *rows)
    grid, block = (blocks * sources.groups * batch, per_group), (columns, THREADS // columns)
    _results_kernel(out.dtype.name, unit, copied_stats is not None)(grid, block, (arguments,))


def _blocks_of(sources: Sources, out: Any) -> Iterator[tuple[tuple[slice, slice, int], Any]]:
    """The heads, the rows and the batch entry of each block of an array ``(D, H, S, B)``, and the numbers of its copies."""
    _, heads, rows, batch = out.shape
    blocks, per_group = -(-rows // BLOCK), heads // sources.groups
    for t, (b, g, i) in enumerate(np.ndindex(batch, sources.groups, blocks)):
        place = slice(g * per_group, (g + 1) * per_group), slice(i * BLOCK, min((i + 1) * BLOCK, rows)), b
        yield place, sources.parts[sources.offsets[t] : sources.offsets[t + 1]]


def _merge_on_cpu(sources: Sources, copies: Any, copied_stats: Any, out: Any, stats: Any, base: Any, sinks: Any) -> None:
    dtype = np.result_type(np.float32, out.dtype)
    for (heads, rows, b), numbers in _blocks_of(sources, out):
        count = rows.stop - rows.start
        scores = [copied_stats[:, :count, n].T.astype(dtype) for n in numbers]
        values = [copies[:, :, :count, n].astype(dtype) for n in numbers]
        if base is not None:
            scores.append(base[rows, heads, b].astype(dtype))
            values.append(out[:, heads, rows, b].astype(dtype))
        if sinks is not None:
            scores.append(np.broadcast_to(sinks[heads].astype(dtype), (count, heads.stop - heads.start)))
            values.append(np.zeros_like(out[:, heads, rows, b], dtype))
        result = np.zeros_like(out[:, heads, rows, b], dtype)
        total = np.full_like(result.sum(axis=0).T, -np.inf)
        for score in scores:
            total = np.logaddexp(total, score)
        for score, value in zip(scores, values, strict=True):
            used = ~np.isneginf(score)
            with np.errstate(invalid="ignore"):
                weight = np.where(used, np.exp(score - total), 0).T
            result += np.where(used.T, value, 0) * weight
        out[:, heads, rows, b] = result
        if stats is not None:
            stats[rows, heads, b] = total


@cuda_kernel
def _results_kernel(dtype: str, unit: int, merges: bool) -> str:
    """The kernel of :func:`merge_blocks` and :func:`sum_blocks`.

    ``blockIdx`` is (target, head), ``threadIdx`` is (vector of a row, row).
    """
    kind = TYPES[dtype]
    return f"""{kind.header}struct alignas({unit * kind.itemsize}) Vector {{ {kind.name} x[{unit}]; }};
        {_MERGE}
        #define NONE __int_as_float(0xff800000)  // -inf
        extern "C" __global__ void cupy_sdpa_results_of_blocks(const Arguments x) {{
            const bool merges = {int(merges)};  // otherwise all weights are 1
            const long long t = blockIdx.x, i = t % x.blocks, g = t / x.blocks % x.groups, b = t / x.blocks / x.groups;
            const long long head = g * x.heads + blockIdx.y;
            const int first = ((const int*)x.offsets)[t], end = ((const int*)x.offsets)[t + 1];
            for (int row = threadIdx.y; row < {BLOCK}; row += blockDim.y) {{
                const long long s = i * {BLOCK} + row;
                if (s >= x.out.rows) break;
                float own = NONE, lowest = 0, factor = 1;
                if (merges) {{
                    if (x.base.data)
                        own = *(const float*)(x.base.data + head * x.base.head + s * x.base.row + b * x.base.batch);
                    const float sink = x.sinks ? ((const float*)x.sinks)[head] : NONE;
                    float top = fmaxf(own, sink), total = 0;
                    for (int n = first; n < end; ++n) {{
                        const long long copy = ((const int*)x.parts)[n];
                        top = fmaxf(top, ((const float*)x.copied_stats)[(copy * {BLOCK} + row) * x.heads + blockIdx.y]);
                    }}
                    lowest = top == NONE ? 0.0f : top;
                    for (int n = first; n < end; ++n) {{
                        const long long copy = ((const int*)x.parts)[n];
                        total += expf(((const float*)x.copied_stats)[(copy * {BLOCK} + row) * x.heads + blockIdx.y] - lowest);
                    }}
                    if (own != NONE) total += expf(own - lowest);
                    if (sink != NONE) total += expf(sink - lowest);
                    if (x.stats.data && threadIdx.x == 0)
                        *(float*)(x.stats.data + head * x.stats.head + s * x.stats.row + b * x.stats.batch)
                            = total == 0 ? NONE : lowest + logf(total);
                    if (x.base.data && first == end && sink == NONE) continue;  // the result is in place
                    factor = total == 0 ? 0.0f : 1 / total;
                }}
                char* const out = (char*)x.out.data + head * x.out.head + s * x.out.row
                    + b * x.out.batch;
                for (int c = threadIdx.x; c < x.width / {unit}; c += blockDim.x) {{
                    float sum[{unit}] = {{}};
                    if (own != NONE) {{
                        const Vector value = ((const Vector*)out)[c];
                        const float weight = expf(own - lowest) * factor;
                        for (int j = 0; j < {unit}; ++j) sum[j] = weight * float(value.x[j]);
                    }}
                    #pragma unroll 4
                    for (int n = first; n < end; ++n) {{
                        const long long copy = ((const int*)x.parts)[n];
                        const long long place = (copy * {BLOCK} + row) * x.heads + blockIdx.y;
                        float weight = 1;
                        if (merges) {{
                            const float score = ((const float*)x.copied_stats)[place];
                            if (score == NONE) continue;
                            weight = expf(score - lowest) * factor;
                        }}
                        const Vector value = ((const Vector*)((const {kind.name}*)x.copies + place * x.width))[c];
                        for (int j = 0; j < {unit}; ++j) sum[j] += weight * float(value.x[j]);
                    }}
                    Vector result;
                    for (int j = 0; j < {unit}; ++j) result.x[j] = {kind.name}(sum[j]);
                    ((Vector*)out)[c] = result;
                }}
            }}
        }}"""
