"""Copies of blocks of rows, and of the log-sum-exp of their rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..runtime import cupy_runtime
from ..runtime.cuda_code import Struct, cuda_kernel
from ..runtime.interpreted_array import strided
from ..runtime.memory import UNITS
from .block_rows import BLOCK, ROWS, THREADS, is_vector, rows_of

#: The arguments of :func:`copy_blocks` and :func:`copy_stats`; width is the bytes of a row of a head of the copies.
_COPY = Struct("Arguments", source=ROWS, target=Struct("Copies", "data width heads items"))


def copy_blocks(copies: Any, array: Any, items: Any, heads: int) -> None:
    """Copy blocks of an array ``(D, H, S, B)``; rows after S are 0. One launch.

    Args:
        copies: ``(D, H', BLOCK, n)``, dense, written.
        array: the array; its first axis is contiguous.
        items: int32 ``(n, 3)``: block, group of heads and batch entry of each copy.
        heads: H', the number of heads in a group.
    """
    d, _, rows, _ = array.shape
    if not cupy_runtime.is_array(array):
        copies[...] = 0
        for n, (i, g, b) in enumerate(items):
            block = array[:, g * heads : (g + 1) * heads, i * BLOCK : min((i + 1) * BLOCK, rows), b]
            copies[:, :, : block.shape[2], n] = block
        return
    if copies.size:
        size = array.itemsize
        unit = next(unit for unit in UNITS if is_vector(array, unit))
        arguments = _COPY(rows_of(array), (copies, d * size, heads, items))
        columns = max(1, min(d * size // unit, 32))
        _copy_kernel(unit)((len(items), heads), (columns, THREADS // columns), (arguments,))


def copy_stats(copies: Any, stats: Any, items: Any, heads: int) -> None:
    """Copy the log-sum-exp of query blocks for the backward pass; rows without keys get inf.

    Args:
        copies: float32 ``(H', BLOCK n)``, dense, the form of packed sequences; written.
        stats: ``(S, H, B)``.
        items, heads: as for :func:`copy_blocks`.
    """
    count, rows = len(items), stats.shape[0]
    if not cupy_runtime.is_array(stats):
        copies[...] = np.inf
        for n, (i, g, b) in enumerate(items):
            block = stats[i * BLOCK : min((i + 1) * BLOCK, rows), g * heads : (g + 1) * heads, b].T
            copies[:, n * BLOCK : n * BLOCK + block.shape[1]] = np.where(np.isneginf(block), np.float32(np.inf), block)
        return
    if copies.size:
        _copy_stats_kernel()((count,), (THREADS,), (_COPY(rows_of(stats), (copies, 4, heads, items)),))


@cuda_kernel
def _copy_kernel(unit: int) -> str:
    """The kernel of :func:`copy_blocks`: ``blockIdx`` is (item, head), ``threadIdx`` is (unit of a row, row)."""
    kind = UNITS[unit]
    zero = {16: "make_uint4(0, 0, 0, 0)", 8: "make_uint2(0, 0)", 4: "0u", 2: "(unsigned short)0"}[unit]
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
                    {kind} value = {zero};
                    if (first + row < x.source.rows) value = ((const {kind}*)(from + (first + row) * x.source.row))[i];
                    (({kind}*)(to + row * x.target.heads * x.target.width))[i] = value;
                }}
        }}"""


@cuda_kernel
def _copy_stats_kernel() -> str:
    """The kernel of :func:`copy_stats`: ``blockIdx`` is the item."""
    return f"""{_COPY}
        extern "C" __global__ void cupy_sdpa_copy_stats(const Arguments x) {{
            const long long n = blockIdx.x;
            const int* const item = (const int*)x.target.items + 3 * n;
            for (int i = threadIdx.x; i < {BLOCK} * x.target.heads; i += blockDim.x) {{
                const long long row = i % {BLOCK}, h = i / {BLOCK}, s = (long long)item[0] * {BLOCK} + row;
                float value = __int_as_float(0x7f800000);
                if (s < x.source.rows)
                    value = *(const float*)(x.source.data + (item[1] * x.target.heads + h) * x.source.head + s * x.source.row
                                            + item[2] * x.source.batch);
                if (value == __int_as_float(0xff800000)) value = -value;
                ((float*)x.target.data)[(n * {BLOCK} + row) * x.target.heads + h] = value;
            }}
        }}"""


def copy_elements(copies: Any, array: Any, index: Any) -> None:
    """Copy the elements of an array at offsets. One launch.

    Args:
        copies: of the shape of ``index``, in Fortran order; written.
        array: the array.
        index: int64, in Fortran order, the offset of each element from the first one, in elements.
    """
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
