"""Packed sequences: arrays ``(head_dim, heads, total)`` in which sequences lie behind one another, without padding.

``cu_seqlens`` ``(B+1,)`` says where each begins and the last one ends, counted in positions. An engine wants each array's own
offsets, counted in elements of that array: ``cu_seqlens`` times the array's step from one position to the next. Arrays with
equal steps share them.
"""

from __future__ import annotations

import dataclasses
import functools

from .problem import CU_SEQLENS, KEY_ARRAYS, QUERY_ARRAYS, Problem
from .tensor_spec import ITEMSIZE, TensorSpec, dense_spec


def ragged_offset_name(name: str, step: int) -> str:
    """What the offsets of an array are called: whether it has queries or keys, and its step in elements.

    >>> ragged_offset_name("dv", 1024)
    'cu_seqlens_kv × 1024'
    """
    return f"{CU_SEQLENS[name in KEY_ARRAYS]} × {step}"


def token_stride(spec: TensorSpec) -> int:
    """Elements from one position of a packed array to the next."""
    return spec.strides[-1] // ITEMSIZE[spec.dtype]


@functools.lru_cache(maxsize=1024)
def ragged_offsets(problem: Problem) -> dict[str, tuple[str, int]]:
    """The offsets that a problem's graph reads, by name: which array they are made of, and the factor."""
    d, dv, hq, *_ = problem.sizes
    steps = {(spec.name, token_stride(spec)) for spec in problem.tensors if spec.name in QUERY_ARRAYS + KEY_ARRAYS}
    if problem.backward:  # of the scratch memory, which is dense
        steps |= {("q", hq * d), ("q", hq), ("k", hq * d), ("k", hq * dv)}
    return {ragged_offset_name(name, factor): (CU_SEQLENS[name in KEY_ARRAYS], factor) for name, factor in sorted(steps)}


@functools.lru_cache(maxsize=4096)
def round_up_totals(problem: Problem) -> Problem:
    """The problem with its totals rounded up by at most an eighth, for no plan depends on them but for its scratch memory.

    So batches of other totals share a plan. Nothing is copied, and no array is read beyond its own total.
    """
    totals = {"q": round_up(problem.q.shape[2]), "k": round_up(problem.k.shape[2])}
    specs = {}
    for spec in problem.tensors:
        if spec.name in QUERY_ARRAYS + KEY_ARRAYS:
            shape = (*spec.shape[:-1], totals["k" if spec.name in KEY_ARRAYS else "q"])
            grown = dense_spec(spec.name, spec.dtype, shape) if spec.dense else dataclasses.replace(spec, shape=shape)
            specs[spec.name] = grown
    return dataclasses.replace(problem, **specs)  # type: ignore[arg-type]


def round_up(total: int) -> int:
    """A total rounded up to one of eight numbers between a power of two and the next.

    >>> round_up(1000), round_up(1024), round_up(1025), round_up(3)
    (1024, 1024, 1152, 3)
    """
    unit = 1 << max(0, (total - 1).bit_length() - 4)
    return -(-total // unit) * unit
