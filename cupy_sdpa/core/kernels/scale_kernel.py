"""Multiply the queries of every head by a number: a CUDA kernel, and the same on numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..runtime import cupy_runtime
from ..runtime.cuda_code import Struct, cuda_kernel
from ..runtime.dtypes import TYPES

#: The arrays as the kernel reads them: addresses, lengths, and strides in bytes.
_ARGUMENTS = Struct(
    "Arguments",
    "target source scale width heads tokens rows target_d target_h target_s target_b source_d source_h source_s source_b "
    "scale_h",
)
#: Threads along head_dim and along rows, and the maximum number of blocks.
_COLUMNS, _ROWS, _MAX_BLOCKS = 32, 8, 1 << 16


def scale_heads(target: Any, source: Any, scale: Any) -> None:
    """``target = scale source`` for each head, in float32 (float64: in float64); one launch.

    Args:
        target, source: ``(D, Hq, Sq, B)`` or packed ``(D, Hq, Tq)``, of one dtype, any strides.
        scale: ``(Hq,)``, float32 (numpy: also float64).
    """
    if not target.size:
        return
    if not cupy_runtime.is_array(target):
        work = np.result_type(np.float32, source.dtype)
        factors = scale.astype(work).reshape((1, -1, *(1,) * (source.ndim - 2)))
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # the padding may be anything
            target[...] = source.astype(work) * factors
        return
    width, heads, tokens = source.shape[:3]
    rows = source.size // width
    steps = ((*x.strides, 0)[:4] for x in (target, source))
    arguments = _ARGUMENTS(target, source, scale, width, heads, tokens, rows, *next(steps), *next(steps), *scale.strides)
    grid = (min(-(-rows // _ROWS), _MAX_BLOCKS),)
    _kernel(source.dtype.name)(grid, (_COLUMNS, _ROWS), (arguments,))


@cuda_kernel
def _kernel(dtype: str) -> str:
    """Return the kernel of :func:`scale_heads`; ``threadIdx.y`` counts rows."""
    of = TYPES[dtype]
    return f"""{of.header}{_ARGUMENTS}
        extern "C" __global__ void cupy_sdpa_scale_heads(const Arguments a) {{
            const long long step = (long long)gridDim.x * blockDim.y;
            for (long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y; row < a.rows; row += step) {{
                const long long h = row % a.heads, s = row / a.heads % a.tokens, b = row / a.heads / a.tokens;
                const long long source = a.source + h * a.source_h + s * a.source_s + b * a.source_b;
                const long long target = a.target + h * a.target_h + s * a.target_s + b * a.target_b;
                const float factor = *(const float*)(a.scale + h * a.scale_h);
                for (long long d = threadIdx.x; d < a.width; d += blockDim.x)
                    *({of.name}*)(target + d * a.target_d)
                        = {of.name}(factor * float(*(const {of.name}*)(source + d * a.source_d)));
            }}
        }}"""
