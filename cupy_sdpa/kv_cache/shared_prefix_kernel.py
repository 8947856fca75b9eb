"""The CUDA kernel that divides the keys of sequences into a shared prefix and the rest, and the same on numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..extend import Struct, cuda_kernel, cupy_runtime

_PREFIX = Struct("Prefix", "table entry pitch lengths stride batch pages prefix shared shared_length rest")


def divide(table: Any, lengths: Any, prefix: int, shared: Any, shared_length: Any, rest: Any) -> None:
    """Divide the keys of sequences into a shared prefix and the rest; one launch, also for numpy arrays.

    The sequence is chosen on the device: a released one has no pages.

    Args:
        table, lengths: the page table ``(P, B)`` and the lengths, int32 ``(B,)``.
        prefix: the length of the prefix.
        shared: int32 ``(N, 1)``, written: the first pages of the first sequence that has the prefix; 0 if no sequence has it.
        shared_length: int32 ``(1,)``, written: the length of the prefix, or 0.
        rest: int32 ``(B,)``, written: the lengths after the prefix.
    """
    if not cupy_runtime.is_array(lengths):
        whole = lengths >= prefix
        shared[...] = table[: len(shared), whole.argmax(), None] if whole.any() else 0
        shared_length[...] = prefix if whole.any() else 0
        np.maximum(lengths - np.int32(prefix), 0, out=rest)
        return
    entry, pitch, stride = (step // 4 for step in (*table.strides, *lengths.strides))
    arguments = _PREFIX(table, entry, pitch, lengths, stride, lengths.size, shared.size, prefix, shared, shared_length, rest)
    grid = (max(1, min(64, -(-max(shared.size, lengths.size) // 256))),)
    _divide_kernel()(grid, (256,), (arguments,))


@cuda_kernel
def _divide_kernel() -> str:
    """Return the kernel of :func:`divide`."""
    return f"""{_PREFIX}
        extern "C" __global__ void cupy_sdpa_divide(const Prefix x) {{
            const int* const lengths = (const int*)x.lengths;
            const long long step = (long long)gridDim.x * blockDim.x, thread = blockIdx.x * blockDim.x + threadIdx.x;
            long long first = 0;
            while (first < x.batch && lengths[first * x.stride] < x.prefix) ++first;
            const bool any = first < x.batch;
            for (long long i = thread; i < x.pages; i += step)
                ((int*)x.shared)[i] = any ? ((const int*)x.table)[i * x.entry + first * x.pitch] : 0;
            for (long long b = thread; b < x.batch; b += step) {{
                const long long length = lengths[b * x.stride];
                ((int*)x.rest)[b] = length > x.prefix ? length - x.prefix : 0;
            }}
            if (thread == 0) *(int*)x.shared_length = any ? x.prefix : 0;
        }}"""
