"""CUDA kernels of the weights summed over the queries, and the same functions for numpy arrays."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from ..runtime import cupy_runtime
from ..runtime.cuda_code import cuda_kernel
from ..runtime.cupy_runtime import elementwise

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
        elementwise("float32 x", "float32 y", _NEGATED, "negated_rows")(stats, bias[:, 0])
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
    """The kernel of :func:`negated_rows` for packed sequences; ``blockIdx.y`` is the head and ``blockIdx.z`` the sequence."""
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


def exponentials(sums: Any, logarithms: Any, add: bool) -> None:
    """``sums = exp(logarithms)``, or ``sums += exp(logarithms)``; arrays of one shape, float32 (numpy: also float64)."""
    if not cupy_runtime.is_array(sums):
        sums[...] = (sums if add else 0) + np.exp(logarithms)
    elif add:
        elementwise("float32 x, float32 z", "float32 y", "y = z + expf(x)", "added_exponentials")(logarithms, sums, sums)
    else:
        elementwise("float32 x", "float32 y", "y = expf(x)", "exponentials")(logarithms, sums)


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
    """The kernel of :func:`gathered`; ``blockIdx.y`` is the sequence, ``threadIdx.y`` counts rows of all heads."""
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
