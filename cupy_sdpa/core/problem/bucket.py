"""Bucketing: lengths are rounded up, arrays are padded and the padding is masked, so that many lengths share few plans.

A plan is compiled for exact lengths: a service in which every call has a new length would build a plan for every call. With a
bucket it builds one plan for each rounded length, at the cost of copies of the arrays and of work on the padding.
"""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from .arrays import LENGTHS, letters_of
from .problem import Problem
from .tensor_spec import dense_spec

#: The type of ``bucket=``: None for exact lengths; a number to round up to its multiples; ``"power_of_two"``, at least
#: :data:`SMALLEST`; or a function from a length to the rounded length.
Bucket = int | Literal["power_of_two"] | Callable[[int], int] | None

#: The smallest length of ``"power_of_two"``: kernels for shorter lengths are not faster.
SMALLEST = 64


class Rounding(NamedTuple):
    """The rounded lengths of the queries and of the keys of a call."""

    queries: int
    keys: int

    @classmethod
    def of(cls, problem: Problem, round_up: Callable[[int], int]) -> Rounding:
        """Return the lengths of a problem, rounded up. A single query is not padded: decoding has special kernels."""
        *_, sq, skv, _ = problem.sizes
        return cls(sq if sq == 1 else round_up(sq), round_up(skv))

    def __call__(self, problem: Problem) -> Problem:
        """Return the problem with rounded lengths and dense arrays; seq_lens_q and seq_lens_kv hold the true lengths."""
        return _rounded(problem, *self)


def read_bucket(bucket: Any) -> Callable[[int], int] | None:
    """Return how ``bucket=`` rounds a length up; None for exact lengths.

    >>> read_bucket(512)(1000), read_bucket("power_of_two")(1000), read_bucket("power_of_two")(3)
    (1024, 1024, 64)
    """
    if bucket is None:
        return None
    if callable(bucket):
        return functools.partial(_called, bucket)
    if isinstance(bucket, str) and bucket == "power_of_two":
        return lambda length: max(SMALLEST, 1 << (length - 1).bit_length())
    if isinstance(bucket, numbers.Integral) and not isinstance(bucket, bool):
        if bucket < 1:
            raise ValueError(f"bucket is {bucket}; it must be at least 1: lengths are rounded up to its multiples")
        return lambda length: -(-length // int(bucket)) * int(bucket)
    raise TypeError(f"bucket is {bucket!r}; it must be None, a number, 'power_of_two', or a function from length to length")


def _called(bucket: Callable[[int], int], length: int) -> int:
    rounded = bucket(length)
    if not isinstance(rounded, numbers.Integral) or rounded < length:
        raise ValueError(f"bucket returned {rounded!r} for the length {length}; it must return an integer >= the length")
    return int(rounded)


@functools.lru_cache(maxsize=4096)
def _rounded(problem: Problem, queries: int, keys: int) -> Problem:
    if problem.packed:  # only the maximum lengths are rounded up, not the arrays
        return replace(problem, settings=problem.settings._replace(max_seqlen_q=queries, max_seqlen_kv=keys))
    sq, skv = problem.q.shape[2], problem.k.shape[2]
    specs: dict[str, Any] = {}
    for spec in problem.tensors:
        shape = list(spec.shape)
        for axis, side in padded_axes(spec.name):
            if shape[axis] == (sq if side == "q" else skv):  # axes of length 1 are broadcast
                shape[axis] = queries if side == "q" else keys
        unpadded = tuple(shape) == spec.shape  # the array is used unchanged, with any strides
        specs[spec.name] = spec if unpadded else dense_spec(spec.name, spec.dtype, tuple(shape))
    captured, dcaptured = (tuple(specs.pop(spec.name) for spec in group) for group in (problem.captured, problem.dcaptured))
    for name in LENGTHS:
        specs[name] = specs.get(name) or dense_spec(name, "int32", problem.q.shape[3:])
    return replace(problem, captured=captured, dcaptured=dcaptured, **specs)


def padded_axes(name: str) -> tuple[tuple[int, Literal["q", "k"]], ...]:
    """Return the axes along which an array is padded, each with the array that sets its length, q or k.

    >>> padded_axes("stats"), padded_axes("dv"), padded_axes("bias")
    (((0, 'q'),), ((2, 'k'),), ((0, 'k'), (1, 'q')))
    """
    sides: dict[str, Literal["q", "k"]] = {"Sq": "q", "Skv": "k"}
    return tuple((axis, sides[letter]) for axis, letter in enumerate(letters_of(name)) if letter in sides)
