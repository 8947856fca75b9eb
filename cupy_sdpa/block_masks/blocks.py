"""Copy blocks of rows, and elements, of an array: CUDA kernels, and the same on numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..extend import Struct, cuda_kernel, cupy_runtime
from ..extend.arrays import as_strided
from ..extend.kernels import BLOCK as BLOCK
from ..extend.kernels import UNITS

#: The number of threads in a thread block.
THREADS = 128
#: The rows of an array as kernels read them: the address, and strides in bytes.
_ROWS = Struct("Rows", "data head row batch rows")
#: The arguments of :func:`copy_blocks`; width is the number of bytes in one head's row of the copies.
_COPY = Struct("Arguments", source=_ROWS, target=Struct("Copies", "data width heads items"))


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
        unit = next(unit for unit in UNITS if _is_vector(array, unit))
        arguments = _COPY(_rows_of(array), (copies, d * size, heads, items))
        columns = max(1, min(d * size // unit, 32))
        _copy_kernel(unit, of_stats)((len(items), heads), (columns, THREADS // columns), (arguments,))


@cuda_kernel
def _copy_kernel(unit: int, of_stats: bool) -> str:
    """Return the kernel of :func:`copy_blocks`: ``blockIdx`` is (item, head), ``threadIdx`` is (unit of a row, row)."""
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
        copies[...] = as_strided(array, (last + 1,), (array.itemsize,))[index]
        return
    if copies.size:
        addresses = np.int64(array.data.ptr), np.int64(index.data.ptr), np.int64(copies.data.ptr), np.int64(copies.size)
        _element_kernel(array.itemsize)((-(-copies.size // THREADS),), (THREADS,), addresses)


@cuda_kernel
def _element_kernel(size: int) -> str:
    """Return the kernel of :func:`copy_elements`."""
    kind = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "uint2"}[size]
    return f"""extern "C" __global__ void cupy_sdpa_copy_elements(
            long long array, long long index, long long copies, long long size
        ) {{
            const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
            if (i < size) ((({kind}*)copies))[i] = ((const {kind}*)array)[((const long long*)index)[i]];
        }}"""
