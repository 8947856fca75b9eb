"""Copy blocks of rows or elements of an array, and sum such copies: CUDA kernels, and the same on numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..extend import TYPES, UNITS, Parts, Struct, cuda_kernel, cupy_runtime, dtype_name

#: The number of queries in a block, which is also its number of keys.
BLOCK = 128
#: The number of threads in a thread block.
THREADS = 128
#: The C types in which the kernels copy memory, by their size in bytes.
_UNITS = {**UNITS, 1: "unsigned char"}
#: The rows of an array as kernels read them: the address, and strides in bytes.
_ROWS = Struct("Rows", "data head row batch rows")
#: The arguments of :func:`copy_blocks`; width is the number of bytes in one head's row of the copies.
_COPY = Struct("Arguments", source=_ROWS, target=Struct("Copies", "data width heads items"))
#: The arguments of :func:`sum_blocks`; width is the number of elements along D, and heads the number of heads in a group.
_SUM = Struct("Arguments", "width heads blocks groups offsets parts", copies=_ROWS, target=_ROWS)


def _rows_of(array: Any) -> tuple[Any, ...]:
    """Return the values of :data:`_ROWS` for an array ``(D, H, S, B)``."""
    _, head, row, batch = array.strides
    return array, head, row, batch, array.shape[2]


def _is_vector(array: Any, size: int) -> bool:
    """True if the rows of an array consist of aligned units of ``size`` bytes."""
    return all(x % size == 0 for x in (array.shape[0] * array.itemsize, array.data.ptr, *array.strides[1:]))


def copy_blocks(copies: Any, array: Any, items: Any, heads: int, of_stats: bool = False) -> None:
    """Copy blocks of an array ``(D, H, S, B)`` whose first axis is contiguous; rows after S are 0. One launch.

    Args:
        copies: ``(D, H', BLOCK, n)``, dense, written.
        array: the array.
        items: int32 ``(n, 3)``: block, group of heads and batch item of each copy.
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
        unit = next(unit for unit in _UNITS if _is_vector(array, unit))
        arguments = _COPY(_rows_of(array), (copies, d * size, heads, items))
        columns = max(1, min(d * size // unit, 32))
        _copy_kernel(unit, of_stats)((len(items), heads), (columns, THREADS // columns), (arguments,))


@cuda_kernel
def _copy_kernel(unit: int, of_stats: bool) -> str:
    """Return the kernel of :func:`copy_blocks`: ``blockIdx`` is (item, head), ``threadIdx`` is (unit of a row, row)."""
    kind, missing, without_keys = _UNITS[unit], "", ""  # no value: zeros
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
                    {kind} value{{{missing}}};
                    if (first + row < x.source.rows) value = ((const {kind}*)(from + (first + row) * x.source.row))[i];
                    {without_keys}
                    (({kind}*)(to + row * x.target.heads * x.target.width))[i] = value;
                }}
        }}"""


def sum_blocks(parts: Parts, out: Any) -> None:
    """Write the sums of copies to the blocks of ``out``, in float32 and a fixed order; 0 for blocks without copies. One launch.

    Args:
        parts: copies ``(D, H / groups, BLOCK, 1, n)``, dense, with the dtype of ``out``, and their sources; no statistics.
        out: ``(D, H, S, B)``, whose first axis is contiguous, written.
    """
    copies = parts.out[:, :, :, 0]
    if not cupy_runtime.is_array(out):
        dtype = np.result_type(np.float32, out.dtype)
        for (heads, rows, b), numbers in parts.blocks_of(out):
            total = np.zeros_like(out[:, heads, rows, b], dtype)
            for n in numbers:
                total += copies[:, :, : rows.stop - rows.start, n, None]
            out[:, heads, rows, b] = total
        return
    if out.size:
        (d, heads, rows, batch), of_group = out.shape, copies.shape[1]
        unit = next(unit for unit in _UNITS if _is_vector(out, unit) and _is_vector(copies, unit))
        vector = max(unit // out.itemsize, 1)
        columns = max(1, min(d // vector, 32))
        blocks, groups, block_rows = -(-rows // BLOCK), heads // of_group, THREADS // columns
        grid = (blocks * groups * batch, of_group, -(-BLOCK // block_rows))
        arguments = _SUM(d, of_group, blocks, groups, *parts.sources, _rows_of(copies), _rows_of(out))
        _sum_blocks_kernel(dtype_name(out.dtype), vector)(grid, (columns, block_rows), (arguments,))


@cuda_kernel
def _sum_blocks_kernel(dtype: str, vector: int) -> str:
    """Return the kernel of :func:`sum_blocks`: ``blockIdx`` is (block, head, rows), ``threadIdx`` is (vector of a row, row)."""
    of = TYPES[dtype]
    return f"""{of.header}struct alignas({min(vector * of.itemsize, 16)}) Vector {{ {of.name} x[{vector}]; }};
        {_SUM}
        extern "C" __global__ void cupy_sdpa_sum_blocks(const Arguments x) {{
            const long long t = blockIdx.x, i = t % x.blocks, g = t / x.blocks % x.groups, b = t / x.blocks / x.groups;
            const int first = ((const int*)x.offsets)[t], end = ((const int*)x.offsets)[t + 1];
            const long long row = blockIdx.z * blockDim.y + threadIdx.y, s = i * {BLOCK} + row;
            if (row >= {BLOCK} || s >= x.target.rows) return;
            const char* const from = (const char*)x.copies.data + blockIdx.y * x.copies.head + row * x.copies.row;
            char* const to = (char*)x.target.data + (g * x.heads + blockIdx.y) * x.target.head + s * x.target.row
                + b * x.target.batch;
            for (int c = threadIdx.x; c < x.width / {vector}; c += blockDim.x) {{
                float sum[{vector}] = {{}};
                for (int n = first; n < end; ++n) {{
                    const Vector value = ((const Vector*)(from + ((const int*)x.parts)[n] * x.copies.batch))[c];
                    for (int j = 0; j < {vector}; ++j) sum[j] += float(value.x[j]);
                }}
                Vector result;
                for (int j = 0; j < {vector}; ++j) result.x[j] = {of.name}(sum[j]);
                ((Vector*)to)[c] = result;
            }}
        }}"""


def copy_elements(copies: Any, array: Any, index: Any) -> None:
    """Gather elements of memory ``(n,)``: ``index``, int64 in Fortran order, has the offset of each element of ``copies``."""
    if not cupy_runtime.is_array(array):
        copies[...] = array[index]
        return
    if copies.size:
        addresses = np.int64(array.data.ptr), np.int64(index.data.ptr), np.int64(copies.data.ptr), np.int64(copies.size)
        _element_kernel(array.itemsize)((-(-copies.size // THREADS),), (THREADS,), addresses)


@cuda_kernel
def _element_kernel(size: int) -> str:
    """Return the kernel of :func:`copy_elements`."""
    kind = _UNITS[size]
    return f"""extern "C" __global__ void cupy_sdpa_copy_elements(
            long long array, long long index, long long copies, long long size
        ) {{
            const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
            if (i < size) ((({kind}*)copies))[i] = ((const {kind}*)array)[((const long long*)index)[i]];
        }}"""
