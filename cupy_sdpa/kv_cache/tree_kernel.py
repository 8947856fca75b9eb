"""Number the tokens of trees, find their depths, and the range of numbers of each key's descendants; also on numpy arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..extend import cuda_kernel, cupy_runtime

#: The maximum number of tokens of a tree: their numbers are in shared memory (24 KiB).
MAX_TOKENS = 2048


class Intervals(NamedTuple):
    """What :func:`cupy_sdpa.zoo.tree` reads; int32 in Fortran order.

    Attributes:
        number: ``(B, Sq)``, the number of each token in depth-first order.
        first: ``(B, Skv)``, the number of the token of each key.
        last: ``(B, Skv)``, the largest number among its descendants. The range of an earlier key covers all tokens, the range
            of a key after the tree is empty.
    """

    number: Any
    first: Any
    last: Any


def fill_intervals(parents: Any, lengths: Any, counts: Any, found: Intervals) -> None:
    """Write the intervals of trees; one launch.

    ``parents`` are int32 ``(Sq, B)`` in Fortran order, or ``(Sq, 1)`` for all sequences. A parent that is not an earlier token
    is the last key before the tree. ``lengths`` and ``counts`` are int32 ``(B,)``, or None for Skv and Sq.
    """
    if not cupy_runtime.is_array(found.first):
        _fill_on_numpy(parents, lengths, counts, found)
        return
    (tokens, trees), (batch, keys) = parents.shape, found.first.shape
    if not batch:
        return
    numbers = tuple(np.int32(x) for x in (tokens, trees, keys, lengths is not None, counts is not None))
    arrays = (parents, *(found.number if x is None else x for x in (lengths, counts)), *found)
    _intervals_kernel(1 << (tokens - 1).bit_length())((batch, max(1, min(16, keys // 1024))), (256,), (*arrays, *numbers))


def _fill_on_numpy(parents: Any, lengths: Any, counts: Any, found: Intervals) -> None:
    tokens, (batch, keys) = len(parents), found.first.shape
    size, next_number = np.ones((tokens, parents.shape[1]), np.int32), np.zeros((tokens + 1, parents.shape[1]), np.int32)
    number, columns = np.zeros_like(size), np.arange(parents.shape[1])
    for i in range(tokens - 1, 0, -1):
        children = parents[i] >= 0
        size[parents[i][children], columns[children]] += size[i][children]
    for i in range(tokens):  # the last row of next_number is for tokens without a parent
        number[i] = next_number[parents[i], columns]
        next_number[parents[i], columns] += size[i]
        next_number[i] = number[i] + 1
    first, last = np.zeros((batch, keys), np.int32), np.full((batch, keys), tokens, np.int32)
    for b in range(batch):
        count = tokens if counts is None else int(counts[b])
        start = (keys if lengths is None else int(lengths[b])) - count
        token, column = np.arange(keys) - start, b if parents.shape[1] > 1 else 0
        of_tree = (token >= 0) & (token < min(count, tokens))
        first[b, token >= 0], last[b, token >= 0] = tokens, -1
        first[b, of_tree] = number[token[of_tree], column]
        last[b, of_tree] = first[b, of_tree] + size[token[of_tree], column] - 1
    found.number[...], found.first[...], found.last[...] = number.T, first, last


@cuda_kernel
def _intervals_kernel(room: int) -> str:
    """Return the kernel of :func:`fill_intervals`; ``blockIdx.x`` is the sequence, ``blockIdx.y`` a part of the keys."""
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


def fill_depths(parents: Any, depths: Any) -> None:
    """Write the number of ancestors of each token, int32 ``(Sq, B)`` in Fortran order like the parents; one launch."""
    tokens, trees = parents.shape
    if cupy_runtime.is_array(depths):
        _depths_kernel()((max(1, -(-trees // 32)),), (32,), (parents, depths, np.int32(tokens), np.int32(trees)))
        return
    depths[...] = 0
    for i in range(tokens):
        child = parents[i] >= 0
        depths[i, child] = depths[parents[i, child], np.flatnonzero(child)] + 1


@cuda_kernel
def _depths_kernel() -> str:
    """Return the kernel of :func:`fill_depths`; a thread computes the depths of a tree."""
    return """extern "C" __global__ void cupy_sdpa_tree_depths(const int* parents, int* depths, int tokens, int trees) {
            const int tree = blockIdx.x * blockDim.x + threadIdx.x;
            if (tree >= trees) return;
            const int* const parent = parents + (long long)tree * tokens;
            int* const depth = depths + (long long)tree * tokens;
            for (int i = 0; i < tokens; ++i) depth[i] = parent[i] >= 0 && parent[i] < i ? depth[parent[i]] + 1 : 0;
        }"""
