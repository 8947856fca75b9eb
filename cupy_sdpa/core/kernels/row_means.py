"""Sums of products along head_dim, one for each row: a CUDA kernel, and the same on numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..runtime import cupy_runtime
from ..runtime.cuda_code import Struct, cuda_kernel
from ..runtime.dtypes import TYPES
from .concatenation import MAX_BLOCKS, Address, address, strides_of_rows

#: The arguments of :func:`row_means`: addresses, sizes, and strides in bytes.
_MEANS = Struct(
    "Means",
    "width heads length rows target stats target_s target_h target_b stats_s stats_h stats_b",
    **dict.fromkeys(("products", "dout", "mean"), Struct("Array", " ".join(Address._fields))),
)


def row_means(target: Any, stats: Any, products: Any, dout: Any, mean: Any, scale: float) -> None:
    """Write each row's mean score derivative, which is the derivative of the log-sum-exp; one launch.

    The result is the sum of ``scale rowsum(dout ∘ products)``, which the backward pass subtracts, and ``mean``, which it does
    not subtract. Where the log-sum-exp is -inf, the result is 0.

    Args:
        target, stats: ``(Sq, Hq, B)`` or packed ``(Hq, Tq)``, float32 (numpy: also float64), any strides.
        products, dout: ``(X, Hq, Sq, B)`` or packed ``(X, Hq, Tq)``. None: the first term is 0.
        mean: ``(1, Hq, Sq, B)`` or packed ``(1, Hq, Tq)``, in the dtype of products; None stands for 0.
        scale: the scores' scale factor.
    """
    if not target.size:
        return
    if not cupy_runtime.is_array(target):
        work, found = target.dtype, 0
        with np.errstate(invalid="ignore", over="ignore"):  # the padding of q may be anything
            if products is not None:
                found = scale * (products.astype(work) * dout.astype(work)).sum(axis=0)
            if mean is not None:
                found = found + mean[0].astype(work)
        if target.ndim == 3 and not isinstance(found, int):
            found = found.transpose(1, 0, 2)
        target[...] = np.where(np.isneginf(stats), 0, found)
        return
    like = mean if products is None else products
    width, heads, length, *_ = like.shape
    places = [address(products, 0), address(dout, 0), address(mean, 0)]
    rows = *strides_of_rows(target), *strides_of_rows(stats)
    arguments = _MEANS(width, heads, length, target.size, target, stats, *rows, *places)
    grid = (min(-(-target.size // _WARPS), MAX_BLOCKS),)
    _row_means_kernel(like.dtype.name)(grid, (32, _WARPS), (arguments, np.float32(scale)))


#: The warps of a block of :func:`row_means`.
_WARPS = 8


@cuda_kernel
def _row_means_kernel(dtype: str) -> str:
    """Return the kernel of :func:`row_means`; the threads of a warp have channels of a row, ``threadIdx.y`` counts rows."""
    of = TYPES[dtype]
    return f"""{of.header}{_MEANS}
        extern "C" __global__ void cupy_sdpa_row_means(const Means a, float scale) {{
            for (long long first = blockIdx.x * (long long)blockDim.y; first < a.rows; first += gridDim.x * blockDim.y) {{
                const bool exists = first + threadIdx.y < a.rows;  // every thread of the block takes part in the sums
                const long long row = exists ? first + threadIdx.y : first;
                const long long h = row % a.heads, s = row / a.heads % a.length, b = row / a.heads / a.length;
                #define AT(x) (a.x.address + h * a.x.h + s * a.x.s + b * a.x.b)
                float sum = 0;
                if (a.products.address) for (long long d = threadIdx.x; d < a.width; d += 32)
                    sum += float(*(const {of.name}*)(AT(products) + d * a.products.d))
                        * float(*(const {of.name}*)(AT(dout) + d * a.dout.d));
                for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
                if (!exists || threadIdx.x) continue;
                float found = scale * sum;
                if (a.mean.address) found += float(*(const {of.name}*)AT(mean));
                if (*(const float*)(a.stats + s * a.stats_s + h * a.stats_h + b * a.stats_b) == __int_as_float(0xff800000))
                    found = 0;
                *(float*)(a.target + s * a.target_s + h * a.target_h + b * a.target_b) = found;
            }}
        }}"""
