"""Lengths rounded up, so that many lengths share few plans: the arrays are padded, and what was padded is not seen.

A plan is for exact lengths. A service that meets a new length with every call would build a plan for every one; with a
bucket it builds one for each rounded length, and pays with copies of the arrays and work on the padding.
"""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from .problem import KEY_ARRAYS, LENGTHS, QUERY_ARRAYS, ROW_STATS, Problem, has_score_axes
from .tensor_spec import dense_spec

#: What ``bucket=`` takes: None for exact lengths; a number to round up to its multiples; ``"power_of_two"``, of at least
#: :data:`SMALLEST`; or a function from a length to the rounded one.
Bucket = int | str | Callable[[int], int] | None

#: The least length that ``"power_of_two"`` rounds up to: below it kernels do not get faster.
SMALLEST = 64


@dataclass(frozen=True)
class Policy:
    """How lengths are rounded up."""

    bucket: int | str | Callable[[int], int]

    def __call__(self, problem: Problem) -> Problem:
        """The problem with its lengths rounded up, dense arrays, and the true lengths in arrays of their own."""
        *_, sq, skv, _ = problem.sizes
        # A single query stays one: decoding has kernels of its own.
        return _rounded(problem, sq if sq == 1 else self.length(sq), self.length(skv))

    def length(self, length: int) -> int:
        """A length, rounded up.

        Raises:
            ValueError: the function gave less, or no integer.

        >>> Policy(512).length(1000), Policy("power_of_two").length(1000), Policy("power_of_two").length(3)
        (1024, 1024, 64)
        """
        if isinstance(self.bucket, str):
            return max(SMALLEST, 1 << (length - 1).bit_length())
        if callable(self.bucket):
            rounded = self.bucket(length)
            if not isinstance(rounded, numbers.Integral) or rounded < length:
                raise ValueError(f"bucket gave {rounded!r} for the length {length}; it must give an integer no smaller")
            return int(rounded)
        return -(-length // self.bucket) * self.bucket


def check_bucket(bucket: Any) -> Policy | None:
    """The policy that an argument asks for.

    Raises:
        TypeError, ValueError: it is none.
    """
    if bucket is None:
        return None
    if callable(bucket) or (isinstance(bucket, str) and bucket == "power_of_two"):
        return Policy(bucket)
    if isinstance(bucket, numbers.Integral) and not isinstance(bucket, bool):
        if bucket < 1:
            raise ValueError(f"bucket is {bucket}; lengths are rounded up to multiples of a number of 1 or more")
        return Policy(int(bucket))
    raise TypeError(f"bucket is {bucket!r}; it must be None, a number, 'power_of_two', or a function from length to length")


@functools.lru_cache(maxsize=4096)
def _rounded(problem: Problem, queries: int, keys: int) -> Problem:
    if problem.packed:  # only the longest lengths grow, no array does
        return replace(problem, settings=problem.settings._replace(max_seqlen_q=queries, max_seqlen_kv=keys))
    sq, skv = problem.q.shape[2], problem.k.shape[2]
    specs: dict[str, Any] = {}
    for spec in problem.tensors:
        shape = list(spec.shape)
        for axis, of in padded_axes(spec.name):
            if shape[axis] == (sq if of == "q" else skv):  # an axis of length 1 stands for all
                shape[axis] = queries if of == "q" else keys
        same = tuple(shape) == spec.shape  # the array itself, wherever its elements are
        specs[spec.name] = spec if same else dense_spec(spec.name, spec.dtype, tuple(shape))
    captured, dcaptured = (tuple(specs.pop(spec.name) for spec in group) for group in (problem.captured, problem.dcaptured))
    for name in LENGTHS:
        specs[name] = specs.get(name) or dense_spec(name, "int32", problem.q.shape[3:])
    return replace(problem, captured=captured, dcaptured=dcaptured, **specs)


def padded_axes(name: str) -> tuple[tuple[int, str], ...]:
    """The axes along which an array is padded, and the array that sets each one's length, q or k.

    >>> padded_axes("stats"), padded_axes("dv"), padded_axes("bias")
    (((0, 'q'),), ((2, 'k'),), ((0, 'k'), (1, 'q')))
    """
    if has_score_axes(name):
        return (0, "k"), (1, "q")
    if name in ROW_STATS:
        return ((0, "q"),)
    if name in QUERY_ARRAYS:
        return ((2, "q"),)
    return ((2, "k"),) if name in KEY_ARRAYS else ()
