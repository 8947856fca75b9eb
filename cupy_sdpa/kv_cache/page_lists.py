"""The CUDA kernel that makes a page table from lists of pages."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..extend import cuda_kernel


def fill_table(starts: Any, pages: Any, last: Any, page_size: int, table: Any, lengths: Any) -> None:
    """Write the page table ``(P, B)``, in Fortran order, and the lengths of sequences; one launch.

    The list of each sequence begins at ``starts`` among all pages; an index beyond them is not read. Lists are cut after P
    pages; -1 follows shorter ones. ``last`` are the numbers of tokens in the last pages.
    """
    width, batch = table.shape
    if batch:
        numbers = (np.int32(pages.size), np.int32(width), np.int32(page_size))
        _fill_table_kernel()((batch,), (128,), (starts, pages, last, *numbers, table, lengths))


@cuda_kernel
def _fill_table_kernel() -> str:
    """Return the kernel of :func:`fill_table`; each block is for one sequence."""
    return """extern "C" __global__ void cupy_sdpa_page_lists(
            const int* starts, const int* pages, const int* last, int total, int width, int page_size, int* table, int* lengths
        ) {
            const int b = blockIdx.x, start = starts[b], count = max(0, min(starts[b + 1] - start, width));
            for (int i = threadIdx.x; i < width; i += blockDim.x)
                table[(long long)b * width + i] = i < count && start + i >= 0 && start + i < total ? pages[start + i] : -1;
            if (threadIdx.x == 0)
                lengths[b] = count < starts[b + 1] - start ? count * page_size : count ? (count - 1) * page_size + last[b] : 0;
        }"""
