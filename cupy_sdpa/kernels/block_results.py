"""The results of copies of blocks: merged by their log-sum-exp, or summed."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..runtime import cupy_runtime
from ..runtime.cuda_code import Struct, cuda_kernel
from ..runtime.dtypes import TYPES
from .block_rows import BLOCK, ROWS, THREADS, is_vector, rows_of


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


#: The arguments of :func:`sum_blocks`, and those of :func:`merge_blocks`.
_COPIES = "offsets parts groups heads blocks width copies"
_SUM = Struct("Arguments", _COPIES, out=ROWS)
_MERGE = Struct("Arguments", f"{_COPIES} copied_stats sinks", out=ROWS, stats=ROWS, base=ROWS)


def merge_blocks(sources: Sources, copies: Any, copied_stats: Any, out: Any, stats: Any, base: Any, sinks: Any) -> None:
    """Merge the results of copied query blocks with those in ``out``, in float32; one launch, no synchronization.

    Args:
        sources: the copies of every block of queries.
        copies: ``(Dv, H', BLOCK, n)``, dense.
        copied_stats: float32 ``(H', BLOCK, n)``, dense, their log-sum-exp; where it is -inf, the copy is not used.
        out: ``(Dv, H, S, B)``: the results in place, if there is ``base``; written.
        stats: float32 ``(S, H, B)``, written; or None.
        base: float32 ``(S, H, B)``, the log-sum-exp of the results in place; or None.
        sinks: float32 ``(H,)``, a part without a value for each head; or None.
    """
    if not cupy_runtime.is_array(out):
        _merge_on_cpu(sources, copies, copied_stats, out, stats, base, sinks)
        return
    rows = [None if array is None else rows_of(array) for array in (out, stats, base)]
    _launch(_merge_kernel, _MERGE, sources, copies, out, copied_stats, sinks, *rows)


def _launch(kernel: Any, struct: Struct, sources: Sources, copies: Any, out: Any, *others: Any) -> None:
    """Launch a kernel that writes the blocks of ``out``; ``others`` are the arguments that are not :data:`_COPIES`."""
    width, heads, rows, batch = out.shape
    blocks, per_group = -(-rows // BLOCK), heads // sources.groups
    if not out.size:
        return
    unit = 16 // int(out.itemsize) if is_vector(out, 16) else 1  # the elements that a thread reads and writes at once
    columns = max(1, min(width // unit, 32))
    arguments = struct(*sources, per_group, blocks, width, copies, *others)
    grid, block = (blocks * sources.groups * batch, per_group), (columns, THREADS // columns)
    kernel(out.dtype.name, unit)(grid, block, (arguments,))


def _merge_on_cpu(sources: Sources, copies: Any, copied_stats: Any, out: Any, stats: Any, base: Any, sinks: Any) -> None:
    _, heads, rows, batch = out.shape
    blocks, per_group = -(-rows // BLOCK), heads // sources.groups
    dtype = np.result_type(np.float32, out.dtype)
    for t, (b, g, i) in enumerate(np.ndindex(batch, sources.groups, blocks)):
        own = slice(i * BLOCK, min((i + 1) * BLOCK, rows))
        of = slice(g * per_group, (g + 1) * per_group)
        count = own.stop - own.start
        numbers = sources.parts[sources.offsets[t] : sources.offsets[t + 1]]
        scores = [copied_stats[:, :count, n].T.astype(dtype) for n in numbers]
        values = [copies[:, :, :count, n].astype(dtype) for n in numbers]
        if base is not None:
            scores.append(base[own, of, b].astype(dtype))
            values.append(out[:, of, own, b].astype(dtype))
        if sinks is not None:
            scores.append(np.broadcast_to(sinks[of].astype(dtype), (count, per_group)))
            values.append(np.zeros_like(out[:, of, own, b], dtype))
        result = np.zeros_like(out[:, of, own, b], dtype)
        total = np.full_like(result.sum(axis=0).T, -np.inf)
        for score in scores:
            total = np.logaddexp(total, score)
        for score, value in zip(scores, values, strict=True):
            used = ~np.isneginf(score)
            with np.errstate(invalid="ignore"):
                weight = np.where(used, np.exp(score - total), 0).T
            result += np.where(used.T, value, 0) * weight
        out[:, of, own, b] = result
        if stats is not None:
            stats[own, of, b] = total


@cuda_kernel
def _merge_kernel(dtype: str, unit: int) -> str:
    """The kernel of :func:`merge_blocks`: ``blockIdx`` is (target, head), ``threadIdx`` is (vector of a row, row)."""
    kind = TYPES[dtype]
    return f"""{kind.header}struct alignas({unit * kind.itemsize}) Vector {{ {kind.name} x[{unit}]; }};
        {_MERGE}
        #define NONE __int_as_float(0xff800000)  // -inf
        extern "C" __global__ void cupy_sdpa_merge_blocks(const Arguments x) {{
            const long long t = blockIdx.x, i = t % x.blocks, g = t / x.blocks % x.groups, b = t / x.blocks / x.groups;
            const long long head = g * x.heads + blockIdx.y;
            const int first = ((const int*)x.offsets)[t], end = ((const int*)x.offsets)[t + 1];
            for (int row = threadIdx.y; row < {BLOCK}; row += blockDim.y) {{
                const long long s = i * {BLOCK} + row;
                if (s >= x.out.rows) break;
                const float own = x.base.data
                    ? *(const float*)(x.base.data + head * x.base.head + s * x.base.row + b * x.base.batch) : NONE;
                const float sink = x.sinks ? ((const float*)x.sinks)[head] : NONE;
                float top = fmaxf(own, sink);
                for (int n = first; n < end; ++n) {{
                    const long long copy = ((const int*)x.parts)[n];
                    top = fmaxf(top, ((const float*)x.copied_stats)[(copy * {BLOCK} + row) * x.heads + blockIdx.y]);
                }}
                const float lowest = top == NONE ? 0.0f : top;
                float total = 0;
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
                const float factor = total == 0 ? 0.0f : 1 / total;
                char* const out = (char*)x.out.data + head * x.out.head + s * x.out.row
                    + b * x.out.batch;
                for (int c = threadIdx.x; c < x.width / {unit}; c += blockDim.x) {{
                    float sum[{unit}] = {{}};
                    if (own != NONE) {{
                        const Vector value = ((const Vector*)out)[c];
                        const float weight = expf(own - lowest) * factor;
                        for (int j = 0; j < {unit}; ++j) sum[j] = weight * float(value.x[j]);
                    }}
                    for (int n = first; n < end; ++n) {{
                        const long long copy = ((const int*)x.parts)[n];
                        const float score = ((const float*)x.copied_stats)[(copy * {BLOCK} + row) * x.heads + blockIdx.y];
                        if (score == NONE) continue;
                        const float weight = expf(score - lowest) * factor;
                        const long long at = ((copy * {BLOCK} + row) * x.heads + blockIdx.y) * x.width;
                        const Vector value = ((const Vector*)((const {kind.name}*)x.copies + at))[c];
                        for (int j = 0; j < {unit}; ++j) sum[j] += weight * float(value.x[j]);
                    }}
                    Vector merged;
                    for (int j = 0; j < {unit}; ++j) merged.x[j] = {kind.name}(sum[j]);
                    ((Vector*)out)[c] = merged;
                }}
            }}
        }}"""


def sum_blocks(sources: Sources, copies: Any, out: Any) -> None:
    """Write the sums of copies to the blocks of an array, in float32 and a fixed order; 0 for blocks without copies.

    Args:
        sources: the copies of every block.
        copies: ``(D, H', BLOCK, n)``, dense.
        out: ``(D, H, S, B)``, written.
    """
    _, heads, rows, batch = out.shape
    blocks, per_group = -(-rows // BLOCK), heads // sources.groups
    if not out.size:
        return
    if not cupy_runtime.is_array(out):
        dtype = np.result_type(np.float32, out.dtype)
        for t, (b, g, i) in enumerate(np.ndindex(batch, sources.groups, blocks)):
            own = slice(i * BLOCK, min((i + 1) * BLOCK, rows))
            total = np.zeros_like(out[:, g * per_group : (g + 1) * per_group, own, b], dtype)
            for n in sources.parts[sources.offsets[t] : sources.offsets[t + 1]]:
                total += copies[:, :, : own.stop - own.start, n]
            out[:, g * per_group : (g + 1) * per_group, own, b] = total
        return
    _launch(_sum_kernel, _SUM, sources, copies, out, rows_of(out))


@cuda_kernel
def _sum_kernel(dtype: str, unit: int) -> str:
    """The kernel of :func:`sum_blocks`: ``blockIdx`` is (target, head), ``threadIdx`` is (vector of a row, row)."""
    kind = TYPES[dtype]
    return f"""{kind.header}struct alignas({unit * kind.itemsize}) Vector {{ {kind.name} x[{unit}]; }};
        {_SUM}
        extern "C" __global__ void cupy_sdpa_sum_blocks(const Arguments x) {{
            const long long t = blockIdx.x, i = t % x.blocks, g = t / x.blocks % x.groups, b = t / x.blocks / x.groups;
            const long long head = g * x.heads + blockIdx.y;
            const int first = ((const int*)x.offsets)[t], end = ((const int*)x.offsets)[t + 1];
            for (int row = threadIdx.y; row < {BLOCK}; row += blockDim.y) {{
                const long long s = i * {BLOCK} + row;
                if (s >= x.out.rows) break;
                char* const out = (char*)x.out.data + head * x.out.head + s * x.out.row
                    + b * x.out.batch;
                for (int c = threadIdx.x; c < x.width / {unit}; c += blockDim.x) {{
                    float sum[{unit}] = {{}};
                    #pragma unroll 4
                    for (int n = first; n < end; ++n) {{
                        const long long copy = ((const int*)x.parts)[n];
                        const long long at = ((copy * {BLOCK} + row) * x.heads + blockIdx.y) * x.width;
                        const Vector value = ((const Vector*)((const {kind.name}*)x.copies + at))[c];
                        for (int j = 0; j < {unit}; ++j) sum[j] += float(value.x[j]);
                    }}
                    Vector total;
                    for (int j = 0; j < {unit}; ++j) total.x[j] = {kind.name}(sum[j]);
                    ((Vector*)out)[c] = total;
                }}
            }}
        }}"""
