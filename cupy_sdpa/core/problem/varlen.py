"""Packed (varlen) sequences: arrays ``(head_dim, heads, total)`` that hold several sequences in a row, without padding.

``cu_seqlens`` ``(B+1,)`` contains the start position of each sequence, and the end of the last one. Engines need ragged
offsets, in elements of each array: ``cu_seqlens`` times the stride from one position to the next. Arrays with equal strides
share their offsets.
"""

from __future__ import annotations

import dataclasses
import functools

from .arrays import CU_SEQLENS, KEY_ARRAYS, QUERY_ARRAYS
from .problem import Problem
from .tensor_spec import ITEMSIZE, TensorSpec, dense_spec


def ragged_offset_name(name: str, stride: int) -> str:
    """Return the name of the ragged offsets of an array."""
    return f"{CU_SEQLENS[name in KEY_ARRAYS]} × {stride}"


def token_stride(spec: TensorSpec) -> int:
    """Return the number of elements from one position of a packed array to the next."""
    return spec.strides[-1] // ITEMSIZE[spec.dtype]


@functools.lru_cache(maxsize=1024)
def ragged_offsets(problem: Problem) -> dict[str, tuple[str, int]]:
    """Return the ragged offsets that a problem's graph reads: name -> (the cu_seqlens array, its factor)."""
    d, dv, hq, *_ = problem.sizes
    packed = QUERY_ARRAYS if problem.paged else QUERY_ARRAYS + KEY_ARRAYS
    strides = {(spec.name, token_stride(spec)) for spec in problem.tensors if spec.name in packed}
    if problem.backward:  # scratch memory, which is dense
        strides |= {("q", hq * d), ("q", hq), ("k", hq * d), ("k", hq * dv)}
    return {ragged_offset_name(name, stride): (CU_SEQLENS[name in KEY_ARRAYS], stride) for name, stride in sorted(strides)}


@functools.lru_cache(maxsize=4096)
def round_up_totals(problem: Problem) -> Problem:
    """Round a problem's total lengths up by at most an eighth, so that batches of similar totals share a plan.

    A plan depends on the totals only through its scratch memory. Nothing is copied, and no array is read beyond its true total.
    """
    totals = {"q": round_up(problem.q.shape[2]), "k": round_up(problem.k.shape[2])}
    specs = {}
    for spec in problem.tensors:
        if spec.name in QUERY_ARRAYS or (spec.name in KEY_ARRAYS and not problem.paged):
            shape = (*spec.shape[:-1], totals["k" if spec.name in KEY_ARRAYS else "q"])
            rounded = dense_spec(spec.name, spec.dtype, shape) if spec.dense else dataclasses.replace(spec, shape=shape)
            specs[spec.name] = rounded
    return dataclasses.replace(problem, **specs)  # type: ignore[arg-type]


def round_up(total: int) -> int:
    """Round a total up to one of eight numbers between a power of two and the next.

    >>> round_up(1000), round_up(1024), round_up(1025), round_up(3)
    (1024, 1024, 1152, 3)
    """
    unit = 1 << max(0, (total - 1).bit_length() - 4)
    return -(-total // unit) * unit
