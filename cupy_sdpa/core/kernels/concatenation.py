"""Concatenate arrays along head_dim: a CUDA kernel, and the same on numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..runtime import cupy_runtime
from ..runtime.cuda_code import Struct, cuda_kernel


class Address(NamedTuple):
    """An array as the kernel reads or writes it: the address of the first element, and strides in bytes; 0 for none."""

    address: int
    d: int
    h: int
    s: int
    b: int


#: No array.
NOWHERE = Address(0, 0, 0, 0, 0)


#: A part of a target as the kernel copies it: addresses, bytes, and elements; ``source`` 0 for a constant.
_PART = Struct("Part", "source source_d source_h source_s source_b target pitch width heads length rows first")
#: The parts of a launch, at most: three arrays of three parts, and three of two.
_PARTS = Struct("Arguments", parts=(_PART, 16))
#: Threads along head_dim and along rows, and the maximum number of blocks of a part.
COLUMNS, ROWS, MAX_BLOCKS = 8, 32, 4096
#: Bytes that a thread copies at once.
VECTOR = 16


def concatenate(wanted: Sequence[tuple[Any, Sequence[Any], float]]) -> None:
    """Concatenate arrays along head_dim; on the GPU, one launch concatenates all of them, without synchronization.

    Args:
        wanted: tuples of a target, its parts, and a number. Along head_dim, the target gets the parts, the number once, and
            zeros. The target is ``(W, H, S, B)`` or packed ``(W, H, T)``, in Fortran order. The parts, ``(D, H, S, B)``, have
            its dtype and any strides.
    """
    wanted = [one for one in wanted if one[0].size]
    if not wanted:
        return
    first_target = wanted[0][0]
    if not cupy_runtime.is_array(first_target):
        for one in wanted:
            _concatenate_on_cpu(*one)
        return
    itemsize = first_target.itemsize
    parts: list[tuple[Any, ...]] = []
    aligned = True
    for one in wanted:
        aligned &= _add_parts(parts, *one)
    rows = max([target.size // len(target) for target, *_ in wanted])
    grid = min(-(-rows // ROWS), MAX_BLOCKS), len(parts)
    kernel = _concatenate_kernel(VECTOR if aligned else itemsize, itemsize)
    kernel(grid, (COLUMNS, ROWS), (_PARTS(parts),))


def _concatenate_on_cpu(target: Any, arrays: Sequence[Any], after: float) -> None:
    start = 0
    for array in arrays:
        end = start + array.shape[0]
        target[start:end] = array
        start = end
    target[start:] = 0
    target[start : start + 1] = after


def _add_parts(parts: list[tuple[Any, ...]], target: Any, arrays: Sequence[Any], after: float) -> bool:
    """Add the parts of a target to a list; returns whether all of them can be copied 16 bytes at a time."""
    width, heads, length, *_ = target.shape
    itemsize, pitch, start = target.itemsize, width * target.itemsize, target.data.ptr
    aligned, places = True, pitch
    constant = int(np.array(after, target.dtype).view(f"u{itemsize}"))
    rest = width - sum(len(array) for array in arrays)
    for source, width, first in (*((address(array, 0), len(array), 0) for array in arrays), (NOWHERE, rest, constant)):
        if not width:
            continue
        parts.append((*source, start, pitch, width, heads, length, target.size // len(target), first))
        if source.address:
            aligned &= source.d == itemsize
            places |= source.address | source.h | source.s | source.b
        places |= start | (width * itemsize)
        start += width * itemsize
    return aligned and places % VECTOR == 0


@cuda_kernel
def _concatenate_kernel(size: int, itemsize: int) -> str:
    """Return the kernel of :func:`concatenate`; a thread copies ``size`` bytes at a time, and ``blockIdx.y`` is the part."""
    count = size // itemsize
    kind = {2: "unsigned short", 4: "unsigned"}[itemsize]
    return f"""{_PARTS}
        struct alignas({size}) Unit {{ {kind} x[{count}]; }};
        extern "C" __global__ void cupy_sdpa_concatenate(const Arguments arguments) {{
            const Part& p = arguments.parts[blockIdx.y];
            const long long step = (long long)gridDim.x * blockDim.y;
            for (long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y; row < p.rows; row += step) {{
                const long long h = row % p.heads, s = row / p.heads % p.length, b = row / p.heads / p.length;
                const long long source = p.source + h * p.source_h + s * p.source_s + b * p.source_b;
                const long long target = p.target + row * p.pitch;
                for (long long d = threadIdx.x * {count}; d < p.width; d += blockDim.x * {count}) {{
                    Unit unit = {{}};
                    if (p.source) unit = *(const Unit*)(source + d * p.source_d);
                    else if (d == 0) unit.x[0] = p.first;
                    *(Unit*)(target + d * {itemsize}) = unit;
                }}
            }}
        }}"""


def address(array: Any, start: int) -> Address:
    """Where an array begins, at an index along head_dim; :data:`NOWHERE` for None."""
    if array is None:
        return NOWHERE
    strides = *array.strides, *(() if array.ndim == 4 else (0,))
    return Address(array.data.ptr + start * array.strides[0], *strides)


def strides_of_rows(array: Any) -> tuple[int, int, int]:
    """Return the strides along tokens, heads and batch of one number for each row: ``(Sq, Hq, B)``, or packed ``(Hq, Tq)``."""
    first, second, *batch = array.strides
    return (first, second, batch[0]) if batch else (second, first, 0)
