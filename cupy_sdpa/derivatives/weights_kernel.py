"""CUDA kernels of the sums of weights and of their entropy, and the same functions for numpy arrays."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from ..extend import TYPES, Struct, cuda_kernel, cupy_runtime, dtype_name

#: The negated number x; -inf of -inf.
_NEGATED = "y = x == __int_as_float(0xff800000) ? x : -x"


def negated_rows(bias: Any, stats: Any, starts: Any) -> None:
    """Write the negated log-sum-exp of each query as a bias of keys; -inf where there is no query, or one without keys.

    The bias is float32 (numpy: also float64) ``(Sq, 1, H, B)`` in Fortran order. The log-sum-exp has its dtype, any strides,
    and the shape ``(Sq, H, B)``, or packed ``(H, Tq)`` with ``starts``, int32 or int64 ``(B + 1,)``, where sequences begin.
    """
    if not cupy_runtime.is_array(bias):
        _negated_rows_on_numpy(bias, stats, starts)
    elif starts is None:
        cupy_runtime.elementwise("float32 x", "float32 y", _NEGATED, "negated_rows")(stats, bias[:, 0])
    elif bias.size:
        queries, _, heads, batch = bias.shape
        head, token = (stride // 4 for stride in stats.strides)
        step = starts.strides[0] // starts.itemsize
        numbers = [np.int64(x) for x in (step, head, token, stats.shape[1], queries, heads)]
        kernel = _negated_rows_kernel("int" if starts.itemsize == 4 else "long long")
        kernel((-(-queries // 128), heads, batch), (128,), (bias, stats, starts, *numbers))


def _negated_rows_on_numpy(bias: Any, stats: Any, starts: Any) -> None:
    if starts is None:
        bias[:, 0] = np.where(np.isneginf(stats), stats, -stats)
        return
    bias[...] = -np.inf
    for b, (begin, end) in enumerate(itertools.pairwise(starts.tolist())):
        rows = stats[:, begin : min(end, begin + len(bias))].T
        bias[: len(rows), 0, :, b] = np.where(np.isneginf(rows), rows, -rows)


@cuda_kernel
def _negated_rows_kernel(integer: str) -> str:
    """Return the kernel of :func:`negated_rows` for packed sequences; ``blockIdx.y`` is the head, ``.z`` the sequence."""
    return f"""extern "C" __global__ void cupy_sdpa_negated_rows(
            float* bias, const float* stats, const {integer}* starts, long long stride, long long head_stride,
            long long token_stride, long long total, long long queries, long long heads
        ) {{
            const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x, h = blockIdx.y, b = blockIdx.z;
            if (i >= queries) return;
            const long long token = starts[b * stride] + i;
            const bool exists = token >= 0 && token < total && token < starts[(b + 1) * stride];
            const float x = exists ? stats[h * head_stride + token * token_stride] : __int_as_float(0xff800000);
            float y;
            {_NEGATED};
            bias[(b * heads + h) * queries + i] = y;
        }}"""


def add_exponentials(sums: Any, logarithms: Any, add: bool) -> None:
    """``sums = exp(logarithms)``, or ``sums += exp(logarithms)``; arrays of one shape, float32 (numpy: also float64)."""
    if not cupy_runtime.is_array(sums):
        sums[...] = (sums if add else 0) + np.exp(logarithms)
    elif add:
        kernel = cupy_runtime.elementwise("float32 x, float32 z", "float32 y", "y = z + expf(x)", "added_exponentials")
        kernel(logarithms, sums, sums)
    else:
        cupy_runtime.elementwise("float32 x", "float32 y", "y = expf(x)", "exponentials")(logarithms, sums)


def gathered(target: Any, pages: Any, table: Any, lengths: Any) -> None:
    """Copy the keys of each sequence from its pages; those after its length become 0.

    The target is ``(D, H, P * page_size, B)`` in Fortran order, of 16-bit numbers on the GPU; pages ``(D, H, page_size,
    pages)`` have its dtype, and any strides; the table is int32 ``(P, B)``, and the lengths are int32 ``(B,)``.
    """
    size = pages.shape[2]
    if not cupy_runtime.is_array(target):
        target[...] = 0
        for b, length in enumerate(lengths.tolist()):
            own = pages[..., table[: -(-length // size), b]].transpose(0, 1, 3, 2)
            for place in range(own.shape[2]):
                begin, end = place * size, min(place * size + size, length)
                target[:, :, begin:end, b] = own[:, :, place, : end - begin]
    elif target.size:
        dim, heads, tokens, batch = target.shape
        steps = [np.int64(stride // pages.itemsize) for stride in pages.strides]
        places = [np.int64(stride // 4) for stride in (*table.strides, lengths.strides[0])]
        numbers = [np.int64(n) for n in (dim, heads, tokens, size, pages.shape[3])]
        given = (target, pages, table, lengths, *steps, *places, *numbers)
        _gathered_kernel()((-(-tokens * heads // 8), batch), (32, 8), given)


@cuda_kernel
def _gathered_kernel() -> str:
    """Return the kernel of :func:`gathered`; ``blockIdx.y`` is the sequence, ``threadIdx.y`` counts rows of all heads."""
    return """extern "C" __global__ void cupy_sdpa_gathered(
            unsigned short* target, const unsigned short* pages, const int* table, const int* lengths,
            long long dim_step, long long head_step, long long token_step, long long page_step,
            long long place_step, long long entry_step, long long length_step,
            long long dim, long long heads, long long tokens, long long size, long long count
        ) {
            const long long row = blockIdx.x * (long long)blockDim.y + threadIdx.y, b = blockIdx.y;
            if (row >= tokens * heads) return;
            const long long token = row / heads, head = row % heads;
            long long page = -1;
            if (token < lengths[b * length_step]) page = table[token / size * place_step + b * entry_step];
            if (page >= count) page = -1;
            unsigned short* const to = target + ((b * tokens + token) * heads + head) * dim;
            const unsigned short* const from = pages + page * page_step + token % size * token_step + head * head_step;
            for (int c = threadIdx.x; c < dim; c += 32) to[c] = page < 0 ? 0 : from[c * dim_step];
        }"""


#: The arrays of :func:`row_entropies` as the kernel reads them: addresses, lengths, and strides in elements.
_ROWS = Struct(
    "Rows",
    "entropies stats q out sinks sink_step dim heads tokens rows to_token to_head to_batch row_token row_head row_batch "
    "q_head q_token q_batch out_head out_token out_batch",
)


def row_entropies(entropies: Any, stats: Any, q: Any, out: Any, sinks: Any, scale: float) -> None:
    """Write the entropy of the weights of each query, ``L - scale q . out``, and the term of the sink; one launch.

    Args:
        entropies, stats: ``(Sq, Hq, B)`` or packed ``(Hq, Tq)``, float32 (numpy: also float64), any strides. The log-sum-exp is
            -inf where there is no query, or one without keys.
        q, out: ``(D, Hq, Sq, B)`` or packed ``(D, Hq, Tq)``, float16 or bfloat16 with unit stride along D (numpy: any). ``out``
            is the mean of the keys with the weights.
        sinks: float32 ``(Hq,)``, or None.
        scale: the factor of the scores.
    """
    if not cupy_runtime.is_array(entropies):
        _row_entropies_on_numpy(entropies, stats, q, out, sinks, scale)
        return
    if not entropies.size:
        return
    dim, heads, tokens = q.shape[:3]
    rows = [_steps_of_rows(x) for x in (entropies, stats)]
    vectors = [[stride // x.itemsize for stride in (*x.strides[1:], 0)[:3]] for x in (q, out)]
    step = 0 if sinks is None else sinks.strides[0] // 4
    numbers = dim, heads, tokens, entropies.size
    record = _ROWS(entropies, stats, q, out, sinks, step, *numbers, *rows[0], *rows[1], *vectors[0], *vectors[1])
    grid = (min(-(-entropies.size // 8), 1 << 16),)
    _row_entropies_kernel(dtype_name(q.dtype))(grid, (32, 8), (record, np.float32(scale)))


def _steps_of_rows(x: Any) -> tuple[int, int, int]:
    """Return the strides in elements along tokens, heads and batch of an array ``(Sq, Hq, B)`` or packed ``(Hq, Tq)``."""
    first, second, *batch = (stride // x.itemsize for stride in x.strides)
    return (first, second, batch[0]) if batch else (second, first, 0)


def _row_entropies_on_numpy(entropies: Any, stats: Any, q: Any, out: Any, sinks: Any, scale: float) -> None:
    work = entropies.dtype
    with np.errstate(invalid="ignore", over="ignore"):  # the padding of q may be anything
        mean = scale * (q.astype(work) * out.astype(work)).sum(axis=0)
        found = stats - (mean.transpose(1, 0, 2) if mean.ndim == 3 else mean)
        if sinks is not None:
            of_rows = sinks.astype(work).reshape((1, -1, 1) if mean.ndim == 3 else (-1, 1))
            found = found - np.where(np.isneginf(of_rows), 0, np.exp(of_rows - stats) * of_rows)
        entropies[...] = np.where(np.isneginf(stats), 0, np.where(found < 0, 0, found))


@cuda_kernel
def _row_entropies_kernel(dtype: str) -> str:
    """Return the kernel of :func:`row_entropies`; the threads of a warp have channels of a row, ``threadIdx.y`` counts rows."""
    of = TYPES[dtype]
    return f"""{of.header}{_ROWS}
        extern "C" __global__ void cupy_sdpa_row_entropies(const Rows r, float scale) {{
            const float none = __int_as_float(0xff800000);
            for (long long first = blockIdx.x * (long long)blockDim.y; first < r.rows; first += gridDim.x * blockDim.y) {{
                const bool exists = first + threadIdx.y < r.rows;  // every thread of the block takes part in the sums
                const long long row = exists ? first + threadIdx.y : first;
                const long long h = row % r.heads, s = row / r.heads % r.tokens, b = row / r.heads / r.tokens;
                const {of.name}* const q = (const {of.name}*)r.q + h * r.q_head + s * r.q_token + b * r.q_batch;
                const {of.name}* const out = (const {of.name}*)r.out + h * r.out_head + s * r.out_token + b * r.out_batch;
                float mean = 0;
                for (int d = threadIdx.x; d < r.dim; d += 32) mean += (float)q[d] * (float)out[d];
                for (int step = 16; step; step /= 2) mean += __shfl_xor_sync(0xffffffffu, mean, step);
                if (!exists || threadIdx.x) continue;
                const float stats = ((const float*)r.stats)[s * r.row_token + h * r.row_head + b * r.row_batch];
                float found = stats - scale * mean;
                if (r.sinks) {{
                    const float sink = ((const float*)r.sinks)[h * r.sink_step];
                    if (sink != none) found -= expf(sink - stats) * sink;
                }}
                if (stats == none || found < 0) found = 0;
                ((float*)r.entropies)[s * r.to_token + h * r.to_head + b * r.to_batch] = found;
            }}
        }}"""
