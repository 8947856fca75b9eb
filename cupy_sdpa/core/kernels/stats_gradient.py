"""The gradient of the log-sum-exp as two numbers of 16 bits: a CUDA kernel, and the same on numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..runtime import cupy_runtime
from ..runtime.cuda_code import Struct, cuda_kernel
from ..runtime.dtypes import TYPES
from .concatenation import strides_of_rows

#: The rows that :func:`append_stats_gradient` writes.
ROWS = 2
#: The arrays as the kernel reads them: addresses, lengths, and strides in bytes.
_ARGUMENTS = Struct(
    "Arguments",
    "dout out dstats stats heads tokens rows row dout_d dout_h dout_s dout_b out_d out_h out_s out_b dstats_s dstats_h "
    "dstats_b stats_s stats_h stats_b",
)
#: Threads of a block, and the maximum number of blocks.
_THREADS, _MAX_BLOCKS = 256, 1 << 16


def append_stats_gradient(dout: Any, out: Any, dstats: Any, stats: Any) -> None:
    """Write dL, the gradient of the log-sum-exp, into the last two rows of dout, and -1 into the same rows of out; one launch.

    The first of them is dL in the dtype of dout, the second what this rounding lost. Both are 0 where L is -inf.

    Args:
        dout: ``(W, Hq, Sq, B)`` or packed ``(W, Hq, Tq)``, any strides; the other rows are not written.
        out: the same; or None.
        dstats, stats: dL and L, ``(Sq, Hq, B)`` or packed ``(Hq, Tq)``, float32 (numpy: also float64), any strides.
    """
    if not cupy_runtime.is_array(dout):
        found = np.where(np.isneginf(stats), 0, dstats)
        found = found.swapaxes(0, 1) if found.ndim == 3 else found
        if out is not None:
            out[-ROWS:] = -1
        with np.errstate(over="ignore", invalid="ignore"):
            high = found.astype(dout.dtype)
            dout[-2] = high
            dout[-1] = np.where(np.isfinite(high), found - high.astype(found.dtype), 0)
        return
    if not dout.size:
        return
    width, heads, tokens = dout.shape[:3]
    steps = [(*x.strides, 0)[:4] if x is not None else (0,) * 4 for x in (dout, out)]
    rows = *strides_of_rows(dstats), *strides_of_rows(stats)
    count = dout.size // width
    arguments = _ARGUMENTS(dout, out, dstats, stats, heads, tokens, count, width - ROWS, *steps[0], *steps[1], *rows)
    grid = (min(-(-count // _THREADS), _MAX_BLOCKS),)
    _append_kernel(dout.dtype.name)(grid, (_THREADS,), (arguments,))


@cuda_kernel
def _append_kernel(dtype: str) -> str:
    """Return the kernel of :func:`append_stats_gradient`; a thread writes both numbers of a row."""
    of = TYPES[dtype]
    return f"""{of.header}{_ARGUMENTS}
        extern "C" __global__ void cupy_sdpa_append_stats_gradient(const Arguments a) {{
            const float none = __int_as_float(0xff800000);  // -inf
            const long long step = (long long)gridDim.x * blockDim.x;
            for (long long row = (long long)blockIdx.x * blockDim.x + threadIdx.x; row < a.rows; row += step) {{
                const long long h = row % a.heads, s = row / a.heads % a.tokens, b = row / a.heads / a.tokens;
                const float stats = *(const float*)(a.stats + h * a.stats_h + s * a.stats_s + b * a.stats_b);
                const float dstats = *(const float*)(a.dstats + h * a.dstats_h + s * a.dstats_s + b * a.dstats_b);
                const float found = stats == none ? 0.0f : dstats;
                const {of.name} high = {of.name}(found);
                const float rest = found - float(high);
                const long long place = a.dout + a.row * a.dout_d + h * a.dout_h + s * a.dout_s + b * a.dout_b;
                *({of.name}*)place = high;
                if (a.out) {{
                    const long long own = a.out + a.row * a.out_d + h * a.out_h + s * a.out_s + b * a.out_b;
                    *({of.name}*)own = *({of.name}*)(own + a.out_d) = {of.name}(-1.0f);
                }}
                *({of.name}*)(place + a.dout_d) = {of.name}(isfinite(float(high)) ? rest : 0.0f);
            }}
        }}"""
