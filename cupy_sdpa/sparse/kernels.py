"""Kernels for blocks: copy blocks to batch entries, merge their results, and sum gradients; also on numpy arrays."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from ..device import cupy_runtime
from ..device.kernels import declaration, struct
from ..device.memory import UNITS
from ..device.merge import TYPES
from .evaluate import BLOCK

#: The threads of a block of a kernel.
_THREADS = 128


class _Blocks(NamedTuple):
    """An array ``(D, H, S, B)`` as blocks of rows; addresses and strides in bytes."""

    data: int
    head: int
    row: int
    batch: int
    rows: int


class _Copies(NamedTuple):
    """Dense blocks ``(D, H', BLOCK, n)``: address, width of a row of a head, and H'."""

    data: int
    width: int
    heads: int
    items: int
    count: int


def copy_blocks(array: Any, items: Any, heads: int) -> Any:
    """Copies of blocks ``(D, H', BLOCK, n)`` of an array ``(D, H, S, B)``; rows after S are 0. One launch.

    Args:
        array: the array; its first axis is contiguous.
        items: int32 ``(n, 3)``: block, group of heads and batch entry of each copy.
        heads: H', the number of heads in a group.
    """
    d, _, rows, _ = array.shape
    shape = (d, heads, BLOCK, len(items))
    if not cupy_runtime.is_array(array):
        copies = np.zeros(shape, array.dtype, order="F")
        for n, (i, g, b) in enumerate(items):
            block = array[:, g * heads : (g + 1) * heads, i * BLOCK : min((i + 1) * BLOCK, rows), b]
            copies[:, :, : block.shape[2], n] = block
        return copies
    copies = cupy_runtime.empty(shape, array.dtype)
    if copies.size:
        size = array.itemsize
        unit = next(u for u in UNITS if all(x % u == 0 for x in (d * size, array.data.ptr, *array.strides[1:])))
        arguments = np.array((_blocks(array), tuple(_copies(copies, items))), _COPY)
        threads = (max(1, min(d * size // unit, 32)), 1)
        threads = (threads[0], _THREADS // threads[0])
        _copy_kernel(unit)((len(items), heads), threads, (arguments,))
    return copies


def copy_stats(stats: Any, items: Any, heads: int, *, rows_first: bool) -> Any:
    """Copies of the log-sum-exp of query blocks for the backward pass, in which rows without keys get inf.

    Args:
        stats: float32 ``(S, H, B)``.
        items, heads: as for :func:`copy_blocks`.
        rows_first: the copies are ``(BLOCK, H', n)``; otherwise ``(H', BLOCK n)``, packed.
    """
    count, rows = len(items), stats.shape[0]
    shape = (BLOCK, heads, count) if rows_first else (heads, BLOCK * count)
    if not cupy_runtime.is_array(stats):
        copies = np.full((BLOCK, heads, count), np.inf, np.float32)
        for n, (i, g, b) in enumerate(items):
            block = stats[i * BLOCK : min((i + 1) * BLOCK, rows), g * heads : (g + 1) * heads, b]
            copies[: len(block), :, n] = np.where(np.isneginf(block), np.float32(np.inf), block)
        copies = copies if rows_first else copies.transpose(1, 0, 2).reshape(shape, order="F")
        return np.asfortranarray(copies)
    copies = cupy_runtime.empty(shape, np.dtype(np.float32))
    if copies.size:
        s, h, b = stats.strides
        to = (4, 4 * BLOCK) if rows_first else (4 * heads, 4)
        arguments = np.array(((stats.data.ptr, h, s, b, rows), (copies.data.ptr, *to, heads, items.data.ptr)), _COPY_STATS)
        _copy_stats_kernel()((count,), (_THREADS,), (arguments,))
    return copies


def _blocks(array: Any) -> tuple[int, ...]:
    _, head, row, batch = array.strides
    return tuple(_Blocks(array.data.ptr, head, row, batch, array.shape[2]))


def _copies(copies: Any, items: Any) -> _Copies:
    d, heads, _, count = copies.shape
    return _Copies(copies.data.ptr, d * copies.itemsize, heads, items.data.ptr, count)


_COPY = np.dtype([("of", struct(_Blocks)), ("to", struct(_Copies))])


class _Stats(NamedTuple):
    """Copied row statistics: address, strides in bytes, heads, and items."""

    data: int
    row: int
    head: int
    heads: int
    items: int


_COPY_STATS = np.dtype([("of", struct(_Blocks)), ("to", struct(_Stats))])


@functools.cache
def _copy_kernel(unit: int) -> Any:
    """The kernel of :func:`copy_blocks`: ``blockIdx`` is (item, head), ``threadIdx`` is (unit of a row, row)."""
    kind = UNITS[unit]
    zero = {16: "make_uint4(0, 0, 0, 0)", 8: "make_uint2(0, 0)", 4: "0u", 2: "(unsigned short)0"}[unit]
    return cupy_runtime.cupy().RawKernel(
        f"""{declaration("Blocks", _Blocks)}
        {declaration("Copies", _Copies)}
        struct Arguments {{ Blocks of; Copies to; }};
        extern "C" __global__ void cupy_sdpa_copy_blocks(const Arguments x) {{
            const long long n = blockIdx.x, h = blockIdx.y;
            const int* const item = (const int*)x.to.items + 3 * n;
            const long long first = (long long)item[0] * {BLOCK};
            const char* const of = (const char*)x.of.data + (item[1] * x.to.heads + h) * x.of.head + item[2] * x.of.batch;
            char* const to = (char*)x.to.data + (n * {BLOCK} * x.to.heads + h) * x.to.width;
            #pragma unroll 4
            for (int row = threadIdx.y; row < {BLOCK}; row += blockDim.y)
                for (int i = threadIdx.x; i < x.to.width / {unit}; i += blockDim.x) {{
                    {kind} value = {zero};
                    if (first + row < x.of.rows) value = ((const {kind}*)(of + (first + row) * x.of.row))[i];
                    (({kind}*)(to + row * x.to.heads * x.to.width))[i] = value;
                }}
        }}""",
        "cupy_sdpa_copy_blocks",
    )


@functools.cache
def _copy_stats_kernel() -> Any:
    """The kernel of :func:`copy_stats`: ``blockIdx`` is the item."""
    return cupy_runtime.cupy().RawKernel(
        f"""{declaration("Blocks", _Blocks)}
        {declaration("Stats", _Stats)}
        struct Arguments {{ Blocks of; Stats to; }};
        extern "C" __global__ void cupy_sdpa_copy_stats(const Arguments x) {{
            const long long n = blockIdx.x;
            const int* const item = (const int*)x.to.items + 3 * n;
            for (int i = threadIdx.x; i < {BLOCK} * x.to.heads; i += blockDim.x) {{
                const long long row = i % {BLOCK}, h = i / {BLOCK}, s = (long long)item[0] * {BLOCK} + row;
                float value = __int_as_float(0x7f800000);
                if (s < x.of.rows)
                    value = *(const float*)(x.of.data + (item[1] * x.to.heads + h) * x.of.head + s * x.of.row
                                            + item[2] * x.of.batch);
                if (value == __int_as_float(0xff800000)) value = -value;
                ((float*)x.to.data)[n * {BLOCK} * x.to.heads + (row * x.to.row + h * x.to.head) / 4] = value;
            }}
        }}""",
        "cupy_sdpa_copy_stats",
    )


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


class _Merge(NamedTuple):
    """The arguments of :func:`merge_blocks`; addresses, and strides in bytes."""

    offsets: int
    parts: int
    groups: int
    heads: int
    blocks: int
    width: int
    copies: int
    copied_stats: int
    stats: int
    stats_head: int
    stats_row: int
    stats_batch: int
    base: int
    base_head: int
    base_row: int
    base_batch: int
    sinks: int


_MERGE = np.dtype([("out", struct(_Blocks)), ("x", struct(_Merge))])


def merge_blocks(sources: Sources, copies: Any, copied_stats: Any, out: Any, stats: Any, base: Any, sinks: Any) -> None:
    """Merge the results of copied query blocks with those in ``out``, in float32; one launch, no synchronization.

    Args:
        sources: the copies of every block of queries.
        copies: ``(Dv, H', BLOCK, n)``, dense.
        copied_stats: float32 ``(BLOCK, H', n)``, dense, their log-sum-exp; where it is -inf, the copy is not used.
        out: ``(Dv, H, S, B)``: the results in place, if there is ``base``; written.
        stats: float32 ``(S, H, B)``, written; or None.
        base: float32 ``(S, H, B)``, the log-sum-exp of the results in place; or None.
        sinks: float32 ``(H,)``, a part without a value for each head; or None.
    """
    if not cupy_runtime.is_array(out):
        _merge_on_cpu(sources, copies, copied_stats, out, stats, base, sinks)
        return
    width, heads, rows, batch = out.shape
    blocks, per_group = -(-rows // BLOCK), heads // sources.groups
    if not out.size:
        return
    unit = 16 // out.itemsize
    if width % unit or any(x % 16 for x in (out.data.ptr, *out.strides[1:])):
        unit = 1
    no_stats = (0,) * 4
    given = [
        (0, 0, 0, 0) if array is None else (array.data.ptr, array.strides[1], array.strides[0], array.strides[2])
        for array in (stats, base)
    ]
    record = (
        sources.offsets.data.ptr, sources.parts.data.ptr, sources.groups, per_group, blocks, width,
        0 if copies is None else copies.data.ptr, 0 if copied_stats is None else copied_stats.data.ptr, *given[0], *given[1],
        0 if sinks is None else sinks.data.ptr,
    )  # fmt: skip
    del no_stats
    columns = max(1, min(width // unit, 32))
    kernel = _merge_kernel(out.dtype.name, unit)
    kernel(
        (blocks * sources.groups * batch, per_group),
        (columns, _THREADS // columns),
        (np.array((_blocks(out), record), _MERGE),),
    )


def _merge_on_cpu(sources: Sources, copies: Any, copied_stats: Any, out: Any, stats: Any, base: Any, sinks: Any) -> None:
    _, heads, rows, batch = out.shape
    blocks, per_group = -(-rows // BLOCK), heads // sources.groups
    dtype = np.result_type(np.float32, out.dtype)
    for t, (b, g, i) in enumerate(np.ndindex(batch, sources.groups, blocks)):
        own = slice(i * BLOCK, min((i + 1) * BLOCK, rows))
        of = slice(g * per_group, (g + 1) * per_group)
        count = own.stop - own.start
        numbers = sources.parts[sources.offsets[t] : sources.offsets[t + 1]]
        scores = [copied_stats[:count, :, n].astype(dtype) for n in numbers]
        values = [copies[:, :, :count, n].astype(dtype) for n in numbers]
        if base is not None:
            scores.append(base[own, of, b].astype(dtype))
            values.append(out[:, of, own, b].astype(dtype))
        if sinks is not None:
            scores.append(np.broadcast_to(sinks[of].astype(dtype), (count, per_group)))
            values.append(np.zeros((len(out), per_group, count), dtype))
        total, result = np.full((count, per_group), -np.inf, dtype), np.zeros((len(out), per_group, count), dtype)
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


@functools.cache
def _merge_kernel(dtype: str, unit: int) -> Any:
    """The kernel of :func:`merge_blocks`: ``blockIdx`` is (target, head), ``threadIdx`` is (vector of a row, row)."""
    kind = TYPES[dtype]
    return cupy_runtime.cupy().RawKernel(
        f"""{kind.header}struct alignas({unit * kind.itemsize}) Vector {{ {kind.name} x[{unit}]; }};
        {declaration("Blocks", _Blocks)}
        {declaration("Merge", _Merge)}
        struct Arguments {{ Blocks out; Merge x; }};
        #define NONE __int_as_float(0xff800000)  // -inf
        extern "C" __global__ void cupy_sdpa_merge_blocks(const Arguments arguments) {{
            const Merge& x = arguments.x;
            const long long t = blockIdx.x, i = t % x.blocks, g = t / x.blocks % x.groups, b = t / x.blocks / x.groups;
            const long long head = g * x.heads + blockIdx.y;
            const int first = ((const int*)x.offsets)[t], end = ((const int*)x.offsets)[t + 1];
            for (int row = threadIdx.y; row < {BLOCK}; row += blockDim.y) {{
                const long long s = i * {BLOCK} + row;
                if (s >= arguments.out.rows) break;
                const float own = x.base
                    ? *(const float*)(x.base + head * x.base_head + s * x.base_row + b * x.base_batch) : NONE;
                const float sink = x.sinks ? ((const float*)x.sinks)[head] : NONE;
                float top = fmaxf(own, sink);
                for (int n = first; n < end; ++n) {{
                    const long long copy = ((const int*)x.parts)[n];
                    top = fmaxf(top, ((const float*)x.copied_stats)[(copy * x.heads + blockIdx.y) * {BLOCK} + row]);
                }}
                const float lowest = top == NONE ? 0.0f : top;
                float total = 0;
                for (int n = first; n < end; ++n) {{
                    const long long copy = ((const int*)x.parts)[n];
                    total += expf(((const float*)x.copied_stats)[(copy * x.heads + blockIdx.y) * {BLOCK} + row] - lowest);
                }}
                if (own != NONE) total += expf(own - lowest);
                if (sink != NONE) total += expf(sink - lowest);
                if (x.stats && threadIdx.x == 0)
                    *(float*)(x.stats + head * x.stats_head + s * x.stats_row + b * x.stats_batch)
                        = total == 0 ? NONE : lowest + logf(total);
                if (x.base && first == end && sink == NONE) continue;  // the result is in place
                const float factor = total == 0 ? 0.0f : 1 / total;
                char* const out = (char*)arguments.out.data + head * arguments.out.head + s * arguments.out.row
                    + b * arguments.out.batch;
                for (int c = threadIdx.x; c < x.width / {unit}; c += blockDim.x) {{
                    float sum[{unit}] = {{}};
                    if (own != NONE) {{
                        const Vector value = ((const Vector*)out)[c];
                        const float weight = expf(own - lowest) * factor;
                        for (int j = 0; j < {unit}; ++j) sum[j] = weight * float(value.x[j]);
                    }}
                    for (int n = first; n < end; ++n) {{
                        const long long copy = ((const int*)x.parts)[n];
                        const float score = ((const float*)x.copied_stats)[(copy * x.heads + blockIdx.y) * {BLOCK} + row];
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
        }}""",
        "cupy_sdpa_merge_blocks",
    )


class _Sum(NamedTuple):
    """The arguments of :func:`sum_blocks`."""

    offsets: int
    parts: int
    groups: int
    heads: int
    blocks: int
    width: int
    copies: int


_SUM = np.dtype([("out", struct(_Blocks)), ("x", struct(_Sum))])


def sum_blocks(sources: Sources, copies: Any, out: Any) -> None:
    """Write the sums of copies to the blocks of an array, in float32 and a fixed order; 0 for blocks without copies.

    Args:
        sources: the copies of every block.
        copies: ``(D, H', BLOCK, n)``, dense.
        out: ``(D, H, S, B)``, written.
    """
    width, heads, rows, batch = out.shape
    blocks, per_group = -(-rows // BLOCK), heads // sources.groups
    if not out.size:
        return
    if not cupy_runtime.is_array(out):
        dtype = np.result_type(np.float32, out.dtype)
        for t, (b, g, i) in enumerate(np.ndindex(batch, sources.groups, blocks)):
            own = slice(i * BLOCK, min((i + 1) * BLOCK, rows))
            total = np.zeros((width, per_group, own.stop - own.start), dtype)
            for n in sources.parts[sources.offsets[t] : sources.offsets[t + 1]]:
                total += copies[:, :, : own.stop - own.start, n]
            out[:, g * per_group : (g + 1) * per_group, own, b] = total
        return
    unit = 16 // out.itemsize
    if width % unit or any(x % 16 for x in (out.data.ptr, *out.strides[1:])):
        unit = 1
    record = (sources.offsets.data.ptr, sources.parts.data.ptr, sources.groups, per_group, blocks, width, copies.data.ptr)
    columns = max(1, min(width // unit, 32))
    kernel = _sum_kernel(out.dtype.name, unit)
    kernel(
        (blocks * sources.groups * batch, per_group), (columns, _THREADS // columns), (np.array((_blocks(out), record), _SUM),)
    )


@functools.cache
def _sum_kernel(dtype: str, unit: int) -> Any:
    """The kernel of :func:`sum_blocks`: ``blockIdx`` is (target, head), ``threadIdx`` is (vector of a row, row)."""
    kind = TYPES[dtype]
    return cupy_runtime.cupy().RawKernel(
        f"""{kind.header}struct alignas({unit * kind.itemsize}) Vector {{ {kind.name} x[{unit}]; }};
        {declaration("Blocks", _Blocks)}
        {declaration("Sum", _Sum)}
        struct Arguments {{ Blocks out; Sum x; }};
        extern "C" __global__ void cupy_sdpa_sum_blocks(const Arguments arguments) {{
            const Sum& x = arguments.x;
            const long long t = blockIdx.x, i = t % x.blocks, g = t / x.blocks % x.groups, b = t / x.blocks / x.groups;
            const long long head = g * x.heads + blockIdx.y;
            const int first = ((const int*)x.offsets)[t], end = ((const int*)x.offsets)[t + 1];
            for (int row = threadIdx.y; row < {BLOCK}; row += blockDim.y) {{
                const long long s = i * {BLOCK} + row;
                if (s >= arguments.out.rows) break;
                char* const out = (char*)arguments.out.data + head * arguments.out.head + s * arguments.out.row
                    + b * arguments.out.batch;
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
        }}""",
        "cupy_sdpa_sum_blocks",
    )
