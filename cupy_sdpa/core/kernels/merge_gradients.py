"""The gradients of merged attention results with respect to the parts: a CUDA kernel, and the same on numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..runtime import cupy_runtime
from ..runtime.cuda_code import Struct, cuda_kernel
from ..runtime.dtypes import TYPES
from .concatenation import Address, address, strides_of_rows
from .merge import MAX_GROUPS


class PartGradient(NamedTuple):
    """One part of a merged result and its gradients; any strides.

    Attributes:
        out: ``(Dv, H, S, B)``; None for a sink, whose value is 0.
        stats: ``(S, H, B)``, the log-sum-exp, or the scores of the sink.
        dout: like ``out``, written; or None.
        dstats: like ``stats``, written.
    """

    out: Any
    stats: Any
    dout: Any
    dstats: Any


def merge_gradients(parts: Sequence[PartGradient], out: Any, stats: Any, dout: Any, dstats: Any) -> None:
    """Write the gradients of parts, in float32 (float64 numpy arrays: in float64); one launch for every eight parts.

    With ``w = exp(L_i - L)`` they are ``w dO`` and ``w (rowsum(dO ∘ (O_i - O)) + dL)``; 0 where L_i is -inf.

    Args:
        parts: the parts.
        out, stats: the merged results; ``out`` in float32 or float64.
        dout, dstats: their gradients; None is 0.
    """
    if not cupy_runtime.is_array(out):
        for part in parts:
            _part_on_cpu(part, out, stats, dout, dstats)
        return
    width, heads, tokens, _ = out.shape
    rows = stats.size
    if not rows:
        return
    dtype = (parts[0].out if dout is None else dout).dtype.name
    for first in range(0, len(parts), MAX_GROUPS):
        some = parts[first : first + MAX_GROUPS]
        whole = [width, heads, tokens, rows, *map(_place, (out, stats, dout, dstats))]
        arguments = _ARGUMENTS(*whole, [tuple(map(_place, part)) for part in some])
        grid = (min(-(-rows // _WARPS), 1 << 16), len(some))
        _kernel(dtype)(grid, (32, _WARPS), (arguments,))


def _part_on_cpu(part: PartGradient, out: Any, stats: Any, dout: Any, dstats: Any) -> None:
    with np.errstate(invalid="ignore"):  # inf - inf, and outputs that are not used
        weights = np.where(np.isneginf(part.stats), 0, np.exp(part.stats - stats)).astype(out.dtype)
        slope: Any = 0 if dstats is None else np.where(weights > 0, dstats, 0)
        if dout is not None:
            own = -out if part.out is None else np.where((weights > 0).swapaxes(0, 1), part.out.astype(out.dtype), 0) - out
            slope = slope + (dout.astype(out.dtype) * own).sum(axis=0).swapaxes(0, 1)
        part.dstats[...] = np.where(weights > 0, weights * slope, 0)
        if part.dout is not None:
            of_out = np.where(weights > 0, weights, 0).swapaxes(0, 1)
            part.dout[...] = 0 if dout is None else np.where(of_out > 0, of_out * dout.astype(out.dtype), 0)


#: The warps of a block.
_WARPS = 8
#: An array of the kernel.
_FIELDS = " ".join(Address._fields)
_PART = Struct("Part", "", **dict.fromkeys(PartGradient._fields, Struct("OfPart", _FIELDS)))
_ARGUMENTS = Struct(
    "Arguments",
    "width heads tokens rows",
    **dict.fromkeys(("out", "stats", "dout", "dstats"), Struct("Whole", _FIELDS)),
    parts=(_PART, MAX_GROUPS),
)


def _place(array: Any) -> Address:
    """Return an array ``(D, H, S, B)`` or ``(S, H, B)``, or None, as the kernel reads it."""
    if array is None or array.ndim == 4:
        return address(array, 0)
    tokens, heads, batch = strides_of_rows(array)
    return Address(array.data.ptr, 0, heads, tokens, batch)


@cuda_kernel
def _kernel(dtype: str) -> str:
    """Return the kernel of :func:`merge_gradients`; a warp's threads have channels of a row, ``blockIdx.y`` the part."""
    of = TYPES[dtype]
    return f"""{of.header}{_ARGUMENTS}
        extern "C" __global__ void cupy_sdpa_merge_gradients(const Arguments a) {{
            const Part& p = a.parts[blockIdx.y];
            const float none = __int_as_float(0xff800000);
            for (long long first = blockIdx.x * (long long)blockDim.y; first < a.rows; first += gridDim.x * blockDim.y) {{
                const bool exists = first + threadIdx.y < a.rows;  // every thread of the block takes part in the sums
                const long long row = exists ? first + threadIdx.y : first;
                const long long h = row % a.heads, s = row / a.heads % a.tokens, b = row / a.heads / a.tokens;
                #define AT(x) (x.address + h * x.h + s * x.s + b * x.b)
                const float own = *(const float*)AT(p.stats);
                const float weight = own == none ? 0.0f : expf(own - *(const float*)AT(a.stats));
                float sum = 0;
                for (long long d = threadIdx.x; d < a.width; d += 32) {{
                    const float of_row = a.dout.address ? float(*(const {of.name}*)(AT(a.dout) + d * a.dout.d)) : 0.0f;
                    if (a.dout.address && weight > 0) {{
                        const float value = p.out.address ? float(*(const {of.name}*)(AT(p.out) + d * p.out.d)) : 0.0f;
                        sum += of_row * (value - *(const float*)(AT(a.out) + d * a.out.d));
                    }}
                    if (p.dout.address && exists)
                        *({of.name}*)(AT(p.dout) + d * p.dout.d) = {of.name}(weight > 0 ? weight * of_row : 0.0f);
                }}
                for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
                if (!exists || threadIdx.x) continue;
                if (a.dstats.address && weight > 0) sum += *(const float*)AT(a.dstats);
                *(float*)AT(p.dstats) = weight > 0 ? weight * sum : 0.0f;
            }}
        }}"""
