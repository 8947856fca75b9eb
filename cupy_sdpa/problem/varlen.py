"""Packed sequences: arrays ``(head_dim, heads, total)`` in which sequences lie behind one another, without padding.

``cu_seqlens`` ``(B+1,)`` says where each begins and the last one ends, counted in positions. An engine wants each array's own
offsets, counted in elements of that array: ``cu_seqlens`` times the array's step from one position to the next. Arrays with
equal steps share them.
"""

from __future__ import annotations

import dataclasses
import functools

from .problem import OF_KEYS, OF_QUERIES, STARTS, Problem
from .tensor_spec import SIZES, TensorSpec, dense_spec


def offsets_name(name: str, step: int) -> str:
    """What the offsets of an array are called: whether it has queries or keys, and its step in elements.

    >>> offsets_name("dv", 1024)
    'cu_seqlens_kv × 1024'
    """
    return f"{STARTS[name in OF_KEYS]} × {step}"


def step(spec: TensorSpec) -> int:
    """Elements from one position of a packed array to the next."""
    return spec.strides[-1] // SIZES[spec.dtype]


@functools.lru_cache(maxsize=1024)
def offsets(problem: Problem) -> dict[str, tuple[str, int]]:
    """The offsets that a problem's graph reads, by name: which array they are made of, and the factor."""
    d, dv, hq, *_ = problem.sizes
    steps = {(spec.name, step(spec)) for spec in problem.tensors if spec.name in OF_QUERIES + OF_KEYS}
    if problem.backward:  # of the scratch memory, which is dense
        steps |= {("q", hq * d), ("q", hq), ("k", hq * d), ("k", hq * dv)}
    return {offsets_name(name, factor): (STARTS[name in OF_KEYS], factor) for name, factor in sorted(steps)}


@functools.lru_cache(maxsize=4096)
def with_room(problem: Problem) -> Problem:
    """The problem with its totals rounded up by at most an eighth, for no plan depends on them but for its scratch memory.

    So batches of other totals share a plan. Nothing is copied, and no array is read beyond its own total.
    """
    totals = {"q": room(problem.q.shape[2]), "k": room(problem.k.shape[2])}
    specs = {}
    for spec in problem.tensors:
        if spec.name in OF_QUERIES + OF_KEYS:
            shape = (*spec.shape[:-1], totals["k" if spec.name in OF_KEYS else "q"])
            grown = dense_spec(spec.name, spec.dtype, shape) if spec.dense else dataclasses.replace(spec, shape=shape)
            specs[spec.name] = grown
    return dataclasses.replace(problem, **specs)  # type: ignore[arg-type]


def room(total: int) -> int:
    """A total rounded up to one of eight numbers between a power of two and the next.

    >>> room(1000), room(1024), room(1025), room(3)
    (1024, 1024, 1152, 3)
    """
    unit = 1 << max(0, (total - 1).bit_length() - 4)
    return -(-total // unit) * unit
