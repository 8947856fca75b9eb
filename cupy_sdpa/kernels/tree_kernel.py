"""The CUDA kernel that numbers the tokens of trees, and gives every key the range of numbers of its descendants."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..runtime.cuda_code import cuda_kernel

#: The maximum number of tokens of a tree: their numbers are in shared memory (24 KiB).
MAX_TOKENS = 2048


class Intervals(NamedTuple):
    """What :func:`cupy_sdpa.zoo.tree` reads; int32 in Fortran order.

    Attributes:
        number: ``(B, Sq)``, the number of each token in depth-first order.
        first: ``(B, Skv)``, the number of the token of each key.
        last: ``(B, Skv)``, the largest number among its descendants. The range of an earlier key is that of all tokens, the
            range of a key after the tree is empty.
    """

    number: Any
    first: Any
    last: Any


def fill_intervals(parents: Any, lengths: Any, counts: Any, found: Intervals) -> None:
    """Write the intervals of trees; one launch.

    ``parents`` are int32 ``(Sq, B)`` in Fortran order, or ``(Sq, 1)`` for all sequences. A parent that is not an earlier token
    is
    the last key before the tree. ``lengths`` and ``counts`` are int32 ``(B,)``, or None for Skv and Sq.
    """
    (tokens, trees), (batch, keys) = parents.shape, found.first.shape
    if not batch:
        return
    numbers = tuple(np.int32(x) for x in (tokens, trees, keys, lengths is not None, counts is not None))
    arrays = (parents, *(found.number if x is None else x for x in (lengths, counts)), *found)
    _intervals_kernel(1 << (tokens - 1).bit_length())((batch, max(1, min(16, keys // 1024))), (256,), (*arrays, *numbers))


@cuda_kernel
def _intervals_kernel(room: int) -> str:
    """The kernel of :func:`fill_intervals`; ``blockIdx.x`` is the sequence, ``blockIdx.y`` a part of the keys."""
    return f"""extern "C" __global__ void cupy_sdpa_tree_intervals(
            const int* parents, const int* lengths, const int* counts, int* numbers, int* first, int* last,
            int tokens, int trees, int keys, int has_lengths, int has_counts
        ) {{
            __shared__ int own[{room}], size[{room}], next[{room}];
            const int b = blockIdx.x, batch = gridDim.x;
            const int* const parent = parents + (trees > 1 ? (long long)b * tokens : 0);
            if (threadIdx.x == 0) {{
                for (int i = 0; i < tokens; ++i) size[i] = 1;
                for (int i = tokens - 1; i > 0; --i) if (parent[i] >= 0 && parent[i] < i) size[parent[i]] += size[i];
                int root = 0;  // the number of the next token without a parent
                for (int i = 0; i < tokens; ++i) {{
                    int* const number = parent[i] >= 0 && parent[i] < i ? next + parent[i] : &root;
                    own[i] = *number;
                    next[i] = *number + 1;
                    *number += size[i];
                }}
            }}
            __syncthreads();
            const int stride = gridDim.y * blockDim.x, thread = blockIdx.y * blockDim.x + threadIdx.x;
            for (int i = thread; i < tokens; i += stride) numbers[b + (long long)i * batch] = own[i];
            const int count = has_counts ? counts[b] : tokens, start = (has_lengths ? lengths[b] : keys) - count;
            for (int i = thread; i < keys; i += stride) {{
                const int token = i - start;
                const bool earlier = token < 0, of_tree = !earlier && token < min(count, tokens);
                first[b + (long long)i * batch] = earlier ? 0 : of_tree ? own[token] : tokens;
                last[b + (long long)i * batch] = earlier ? tokens : of_tree ? own[token] + size[token] - 1 : -1;
            }}
        }}"""
