"""Merge attention results over disjoint sets of keys: a CUDA kernel, and the same on numpy arrays."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..runtime import cupy_runtime
from ..runtime.cuda_code import Struct, cuda_kernel
from ..runtime.dtypes import TYPES

#: The maximum number of groups in a launch.
MAX_GROUPS = 8
#: The parts that a thread loads at once, and the maximum number of threads that share the parts of a row.
_UNROLL, _MAX_SLOTS = 8, 8
#: The maximum number of threads along Dv, and the number of threads that a block is filled up to with rows.
_MAX_COLUMNS, _THREADS = 32, 128


class Parts(NamedTuple):
    """Partial results with equal strides; any strides are allowed.

    Attributes:
        out: float16, bfloat16 or float32 (numpy: also float64), ``(Dv, H, S, B, C)``: C parts.
        stats: float32 (numpy: also float64) ``(S, H, B, C)``, the log-sum-exp of each row of each part.
        totals: None, or on the GPU float32 with the strides of ``stats``. With totals, ``stats`` is the highest score m of each
            row, and totals is the sum of ``exp(score - m)``: a single log-sum-exp in float32 has fewer digits.
        sources: None, or two int32 arrays ``(offsets, numbers)``. The parts are then C copies of blocks of rows,
            ``(Dv, H / groups, block, 1, C)``, without totals, and the copies ``numbers[offsets[t] : offsets[t + 1]]`` are the
            parts of block t. t counts the blocks of rows fastest, then groups of heads, then batch items.
            Only the last group of parts can have sources.

    Example: :func:`merge_parts`.
    """

    out: Any
    stats: Any
    totals: Any = None
    sources: Any = None

    def blocks_of(self, out: Any) -> Iterator[tuple[tuple[slice, slice, slice], Any]]:
        """Yield each block's heads, rows and batch item of an array ``(D, H, S, B)``, and the numbers of its copies."""
        (offsets, numbers), (_, of_group, block, *_), (_, heads, rows, batch) = self.sources, self.out.shape, out.shape
        blocks = itertools.product(range(batch), range(0, heads, of_group or 1), range(0, rows, block))
        for t, (b, h, s) in enumerate(blocks):
            place = slice(h, h + of_group), slice(s, min(s + block, rows)), slice(b, b + 1)
            yield place, numbers[offsets[t] : offsets[t + 1]]


class Factors(NamedTuple):
    """The factors of FP8 parts on the GPU, float32 ``(1,)``.

    Attributes:
        dtype: the dtype of the parts, and of the output if its elements have 8 bits.
        descale: of the parts.
        scale: of the output; None if it is not FP8.
        amax: where the largest magnitude of the output is written; it is 0 before.
    """

    dtype: str
    descale: Any
    scale: Any
    amax: Any


def merge_parts(
    groups: Sequence[Parts],
    out: Any,
    stats: Any = None,
    sinks: Any = None,
    lengths: Any = None,
    factors: Factors | None = None,
    totals: Any = None,
) -> None:
    """Merge parts in float32: one launch, no synchronization. float64 numpy arrays are merged in float64.

    A row of a part with log-sum-exp -inf has weight 0, and its output is not used. A row without other parts gets output 0 and
    log-sum-exp -inf, or its sink.

    Args:
        groups: groups of one dtype; on the GPU more than :data:`MAX_GROUPS` are first merged into one group in float32.
        out: ``(Dv, H, S, B)``, written; any strides and float dtype. It may be the memory of a part before a group with
            sources; rows without other parts and sinks are then not written.
        stats: ``(S, H, B)``, of the dtype of the groups' statistics, written; or None.
        sinks: float32 ``(H,)``, a part without a value for each head; or None.
        lengths: int32 ``(B,)``, the number of queries; rows after it have no part and no sink. None for all.
        factors: of FP8 parts on the GPU; None for other dtypes.
        totals: with the strides of ``stats``, written on the GPU: results as in :class:`Parts`, to be merged with others.

    Two parts, whose rows have equal log-sum-exps, so equal weights:

    >>> values = np.array([1.0, 3.0]).reshape(1, 1, 1, 1, 2)
    >>> out, stats = np.empty((1, 1, 1, 1)), np.empty((1, 1, 1))
    >>> merge_parts([Parts(values, np.zeros((1, 1, 1, 2)))], out, stats)
    >>> print(out.item(), f"{stats.item():.3f}")
    2.0 0.693
    """
    if not cupy_runtime.is_array(out):
        for (heads, rows, b), of_block in _blocks_on_cpu(groups, out):
            own = None if stats is None else stats[rows, heads, b]
            _merge_on_cpu(of_block, out[:, heads, rows, b], own, None if sinks is None else sinks[heads])
        if lengths is not None:
            padding = np.arange(out.shape[2])[:, None] >= lengths  # queries, batch
            out[...] = np.where(padding, 0, out)
            if stats is not None:
                stats[...] = np.where(padding[:, None, :], -np.inf, stats)
        return
    if len(groups) > MAX_GROUPS:
        several = [groups[i : i + MAX_GROUPS] for i in range(0, len(groups), MAX_GROUPS)]
        shapes = [(*x.shape[:-1], len(several)) for x in (groups[0].out, groups[0].stats, groups[0].stats)]
        made = Parts(*(cupy_runtime.empty(shape, np.dtype(np.float32)) for shape in shapes))
        for i, some in enumerate(several):
            _merge_on_gpu(some, made.out[..., i], made.stats[..., i], None, None, None, made.totals[..., i])
        groups = [made]
    _merge_on_gpu(groups, out, stats, sinks, lengths, factors, totals)


def _blocks_on_cpu(groups: Sequence[Parts], out: Any) -> Iterator[tuple[tuple[slice, slice, slice], Sequence[Parts]]]:
    """Yield the blocks of a result, each with its parts: a single block of all rows unless the last group has sources."""
    *of_all, last = groups
    if last.sources is None:
        yield (slice(None), slice(None), slice(None)), groups
        return
    for place, numbers in last.blocks_of(out):
        heads, rows, b = place
        count = rows.stop - rows.start
        of_block = [Parts(x.out[:, heads, rows, b], x.stats[rows, heads, b]) for x in of_all]
        yield place, [*of_block, Parts(last.out[:, :, :count, :, numbers], last.stats[:count, :, :, numbers])]


def _merge_on_cpu(groups: Sequence[Parts], out: Any, stats: Any, sinks: Any) -> None:
    dtype = np.result_type(np.float32, groups[0].out.dtype)
    scores = np.concatenate([group.stats for group in groups], axis=3, dtype=dtype)
    top = scores.max(axis=3, initial=-np.inf)
    if sinks is not None:
        top = np.maximum(top, sinks[:, None])
    base = np.where(np.isneginf(top), 0, top)
    with np.errstate(divide="ignore", invalid="ignore"):  # log 0, and inf - inf
        weights = np.exp(scores - base[..., None])
        total = weights.sum(axis=3)
        if sinks is not None:
            total += np.exp(sinks[:, None] - base)
        merged = np.zeros_like(out, dtype)
        ends = itertools.accumulate(group.stats.shape[3] for group in groups)
        for group, end in zip(groups, ends, strict=True):
            own = (..., slice(end - group.stats.shape[3], end))
            used = ~np.isneginf(scores[own].swapaxes(0, 1))
            merged += (np.where(used, group.out.astype(dtype), 0) * weights[own].swapaxes(0, 1)).sum(axis=4)
        out[...] = merged / np.where(total == 0, 1, total).swapaxes(0, 1)
        if stats is not None:
            stats[...] = base + np.log(total)


#: :class:`Parts` as the kernel reads them: addresses, and strides in bytes.
_GROUP = Struct("Group", "parts out out_d out_h out_s out_b out_c stats stats_s stats_h stats_b stats_c totals")
#: The results as the kernel writes them, the sinks, and the sizes; addresses and strides in bytes. ``parts`` is the number of
#: parts of every row; ``offsets``, ``numbers`` and ``copied_heads`` are of the sources of the group ``listed``.
_TARGET = Struct(
    "Target",
    "parts width heads queries rows out out_d out_h out_s out_b stats stats_s stats_h stats_b sinks sinks_h lengths descale "
    "scale amax totals listed offsets numbers copied_heads is_in_place",
)
_ARGUMENTS = Struct("Arguments", target=_TARGET, groups=(_GROUP, MAX_GROUPS))


def _merge_on_gpu(
    groups: Sequence[Parts], out: Any, stats: Any, sinks: Any, lengths: Any, factors: Factors | None, totals: Any
) -> None:
    width, heads, queries, batch = out.shape
    sources, of_all = groups[-1].sources, groups[:-1] if groups[-1].sources else groups
    rows, parts = heads * queries * batch, sum(group.out.shape[4] for group in of_all)
    if not rows or not width:
        return
    (dtype,) = {group.out.dtype for group in groups}
    vector = 16 // dtype.itemsize
    if not all(_is_aligned(array, vector) for array in (out, *(group.out for group in groups))):
        vector = 1
    columns = min(max(-(-width // vector), 1), _MAX_COLUMNS)
    slots = 1 if sources else min(max(-(-parts // _UNROLL), 1), _MAX_SLOTS)
    block_rows = max(_THREADS // (columns * slots), 1)
    grid = (-(-rows // block_rows), max(-(-width // (columns * vector)), 1))
    target = [
        parts, width, heads, queries, rows, out, *out.strides, *((0,) * 4 if stats is None else (stats, *stats.strides)),
        *((0, 0) if sinks is None else (sinks, *sinks.strides)), lengths, *(factors[1:] if factors else (None,) * 3), totals,
    ]  # fmt: skip
    block = 0
    if sources is None:
        target += [0] * 5
    else:
        _, of_group, block, *_ = groups[-1].out.shape
        is_in_place = any(group.out.data.ptr == out.data.ptr for group in of_all)
        target += [len(of_all), *sources, of_group, int(is_in_place)]
    given = [(x.out.shape[4], x.out, *x.out.strides, x.stats, *x.stats.strides, x.totals) for x in groups]
    of_parts, of_out = (factors.dtype if factors and of.itemsize == 1 else of.name for of in (dtype, out.dtype))
    kernel = _merge_kernel(of_parts, of_out, vector, groups[0].totals is not None, block)
    kernel(grid, (columns, block_rows, slots), (_ARGUMENTS(target, given),))


def _is_aligned(array: Any, vector: int) -> bool:
    """True if a thread can access ``vector`` consecutive elements along Dv at once, up to 16 bytes in one instruction."""
    width, *lengths = array.shape
    unit, *strides = array.strides
    size = min(vector * array.itemsize, 16)
    used = [stride for length, stride in zip(lengths, strides, strict=True) if length > 1]
    return bool(width % vector == 0 and unit == array.itemsize and math.gcd(size, array.data.ptr, *used) == size)


@cuda_kernel
def _merge_kernel(dtype: str, out_dtype: str, vector: int, carried: bool, block: int) -> str:
    """Return the kernel of :func:`merge_parts`.

    ``threadIdx`` is (column, row, slot): a column is a vector of elements along Dv, and the slots of a row share its parts.

    Each thread keeps the highest log-sum-exp of its parts, and sums relative to it. The first slot then adds the sums of the
    other slots. A step loads all values before it uses the first one, so their loads overlap. If ``carried``, the parts have
    totals. If ``block`` is not 0, the last group has sources with blocks of ``block`` rows, and a row has only one slot, which
    reads the parts in order.
    """
    types = {"In": TYPES[dtype], "Out": TYPES[out_dtype]}
    vectors = (
        f"struct alignas({min(vector * of.itemsize, 16)}) {name} {{ {of.name} x[{vector}]; }};" for name, of in types.items()
    )
    amount = "*(const float*)(arguments.groups[g].totals + place)" if carried else "1"
    of_row, number, own = "", "part - begin", {"h": "h", "s": "s", "b": "b", "count": "group.parts"}
    if block:
        of_row = f"""
            const int* numbers = nullptr;
            if (row < t.rows) {{
                const long long blocks = (queries + {block - 1}) / {block}, groups = heads / t.copied_heads;
                const int* const offsets = (const int*)t.offsets + (b * groups + h / t.copied_heads) * blocks + s / {block};
                numbers = (const int*)t.numbers + offsets[0];
                copies = offsets[1] - offsets[0];
            }}"""
        number = "g == t.listed ? numbers[part - begin] : part - begin"
        own = {"h": "(g == t.listed ? h % t.copied_heads : h)", "s": f"(g == t.listed ? s % {block} : s)",
               "b": "(g == t.listed ? 0 : b)", "count": "(g == t.listed ? copies : group.parts)"}  # fmt: skip
    return f"""{"".join(sorted({of.header for of in types.values()}))}{" ".join(vectors)}
        {_ARGUMENTS}
        #define NONE __int_as_float(0xff800000)  // -inf
        // a finite number to subtract from log-sum-exps
        __device__ float base_of(float top) {{ return top == NONE ? 0.0f : top; }}
        extern "C" __global__ void __launch_bounds__({_MAX_COLUMNS * _MAX_SLOTS}) cupy_sdpa_merge(const Arguments arguments) {{
            const Target& t = arguments.target;
            const unsigned row = blockIdx.x * blockDim.y + threadIdx.y, heads = t.heads, queries = t.queries;
            const long long h = row % heads, s = row / heads % queries, b = row / heads / queries;
            const long long column = ((long long)blockIdx.y * blockDim.x + threadIdx.x) * {vector};
            long long copies = 0;{of_row}
            const bool is_kept = t.is_in_place && !copies && !t.sinks;
            const bool has_value = column < t.width && !is_kept, is_used = row < t.rows && (has_value || column == 0);
            const long long parts = t.parts + copies;
            float top = NONE, total = 0, sum[{vector}] = {{}};
            const int length = is_used && t.lengths ? ((const int*)t.lengths)[b] : t.queries;  // not used before the end
            if (t.sinks && threadIdx.z == 0 && is_used) {{
                top = *(const float*)(t.sinks + h * t.sinks_h);
                total = top == NONE ? 0 : 1;
            }}
            int g = -1;
            long long begin = 0, end = 0, out = 0, stats = 0;
            for (long long first = threadIdx.z; is_used && first < parts; first += {_UNROLL} * blockDim.z) {{
                float score[{_UNROLL}], amount[{_UNROLL}];
                In value[{_UNROLL}];
                #pragma unroll
                for (int i = 0; i < {_UNROLL}; ++i) {{
                    const long long part = first + i * blockDim.z;
                    score[i] = NONE;
                    if (part < parts) {{
                        while (part >= end) {{
                            const Group& group = arguments.groups[++g];
                            begin = end;
                            end += {own["count"]};
                            out = group.out + column * group.out_d + {own["h"]} * group.out_h + {own["s"]} * group.out_s
                                + {own["b"]} * group.out_b;
                            stats = {own["h"]} * group.stats_h + {own["s"]} * group.stats_s + {own["b"]} * group.stats_b;
                        }}
                        const long long number = {number}, place = stats + number * arguments.groups[g].stats_c;
                        score[i] = *(const float*)(arguments.groups[g].stats + place);
                        amount[i] = {amount};
                        if (has_value) value[i] = *(const In*)(out + number * arguments.groups[g].out_c);
                    }}
                }}
                float highest = top;
                #pragma unroll
                for (int i = 0; i < {_UNROLL}; ++i) highest = fmaxf(highest, score[i]);
                const float base = base_of(highest), scale = expf(top - base);
                top = highest;
                total *= scale;
                #pragma unroll
                for (int j = 0; j < {vector}; ++j) sum[j] *= scale;
                #pragma unroll
                for (int i = 0; i < {_UNROLL}; ++i) {{
                    if (score[i] == NONE) continue;
                    const float weight = amount[i] * expf(score[i] - base);
                    total += weight;
                    #pragma unroll
                    for (int j = 0; j < {vector}; ++j) sum[j] += weight * float(value[i].x[j]);
                }}
            }}
            if (blockDim.z > 1) {{
                __shared__ float shared[{vector} + 2][{_MAX_COLUMNS * _MAX_SLOTS}];
                const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
                const int step = blockDim.y * blockDim.x;
                shared[0][thread] = top;
                shared[1][thread] = total;
                for (int j = 0; j < {vector}; ++j) shared[j + 2][thread] = sum[j];
                __syncthreads();
                if (threadIdx.z) return;
                for (int i = 1; i < blockDim.z; ++i) top = fmaxf(top, shared[0][thread + i * step]);
                const float scale = expf(shared[0][thread] - base_of(top));
                total *= scale;
                for (int j = 0; j < {vector}; ++j) sum[j] *= scale;
                for (int i = 1; i < blockDim.z; ++i) {{
                    const int other = thread + i * step;
                    const float weight = expf(shared[0][other] - base_of(top));
                    total += weight * shared[1][other];
                    for (int j = 0; j < {vector}; ++j) sum[j] += weight * shared[j + 2][other];
                }}
            }}
            if (!is_used) return;
            const bool exists = s < length;
            float factor = total == 0 ? 0.0f : 1 / total;
            if (t.descale) factor *= *(const float*)t.descale;
            const float scale = t.scale ? *(const float*)t.scale : 1;
            Out merged;
            float largest = 0;
            for (int j = 0; j < {vector}; ++j) {{
                const float value = exists ? sum[j] * factor : 0.0f;
                largest = fmaxf(largest, fabsf(value));
                merged.x[j] = {types["Out"].name}(value * scale);
            }}
            // the bits of positive numbers are in their order
            if (t.amax && has_value && largest > *(const volatile float*)t.amax)
                atomicMax((int*)t.amax, __float_as_int(largest));
            if (has_value) *(Out*)(t.out + column * t.out_d + h * t.out_h + s * t.out_s + b * t.out_b) = merged;
            if (t.stats && column == 0)
            {{
                const long long place = h * t.stats_h + s * t.stats_s + b * t.stats_b;
                if (t.totals) *(float*)(t.totals + place) = total;
                *(float*)(t.stats + place) = t.totals ? top : exists ? base_of(top) + logf(total) : NONE;
            }}
        }}"""
