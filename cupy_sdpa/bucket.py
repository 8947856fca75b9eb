"""Lengths rounded up, so that many lengths share few plans: the arrays are padded, and what was padded is not seen.

A plan is for exact lengths. A service that meets a new length with every call would build a plan for every one; with a
bucket it builds one for each rounded length, and pays with copies of the arrays and work on the padding.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .problem import LENGTHS, Problem, TensorSpec, dense_spec

#: What ``bucket=`` takes: None for exact lengths; a number to round up to its multiples; ``"power_of_two"``, of at least
#: :data:`SMALLEST`; or a function from a length to the rounded one.
Bucket = int | str | Callable[[int], int] | None

#: The least length that ``"power_of_two"`` rounds up to: below it kernels do not get faster.
SMALLEST = 64

#: The axis of every array that is as long as the queries or the keys.
_QUERIES = {"q": 2, "out": 2, "dout": 2, "dq": 2, "stats": 0}
_KEYS = {"k": 2, "v": 2, "dk": 2, "dv": 2}


@dataclass(frozen=True)
class Policy:
    """How lengths are rounded up."""

    bucket: int | str | Callable[[int], int]

    def __call__(self, problem: Problem) -> Problem:
        """The problem with its lengths rounded up, dense arrays, and the true lengths in arrays of their own."""
        sq, skv = problem.q.shape[2], problem.k.shape[2]
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
    if callable(bucket) or bucket == "power_of_two":
        return Policy(bucket)
    if isinstance(bucket, numbers.Integral) and not isinstance(bucket, bool):
        if bucket < 1:
            raise ValueError(f"bucket is {bucket}; lengths are rounded up to multiples of a number of 1 or more")
        return Policy(int(bucket))
    raise TypeError(f"bucket is {bucket!r}; it must be None, a number, 'power_of_two', or a function from length to length")


def padding(name: str) -> tuple[int, str]:
    """The axis along which an array is padded, and the array that sets its length, q or k.

    >>> padding("stats"), padding("dv")
    ((0, 'q'), (2, 'k'))
    """
    return (_QUERIES[name], "q") if name in _QUERIES else (_KEYS[name], "k")


def cleaned(problem: Problem) -> dict[str, str]:
    """The arrays that are copied with zeros beyond the lengths, where lengths are given, and the array of their lengths.

    cuDNN multiplies what it finds there by a probability of 0: values in the forward pass, all that is multiplied backward.
    """
    if not problem.backward:
        return {"v": "seq_lens_kv"}
    return {"q": "seq_lens_q", "dout": "seq_lens_q", "k": "seq_lens_kv", "v": "seq_lens_kv"}


@functools.lru_cache(maxsize=4096)
def with_cleaned(problem: Problem) -> Problem:
    """The problem with dense arrays in place of those that are copied."""
    copied = [spec for spec in problem.tensors if spec.name in cleaned(problem)]
    specs: dict[str, Any] = {spec.name: dense_spec(spec.name, spec.dtype, spec.shape) for spec in copied}
    return _interned(dataclasses.replace(problem, **specs))


@functools.lru_cache(maxsize=4096)
def _rounded(problem: Problem, queries: int, keys: int) -> Problem:
    specs: dict[str, Any] = {spec.name: _padded(spec, queries, keys) for spec in problem.tensors}
    for name in LENGTHS:
        specs[name] = specs.get(name) or dense_spec(name, "int32", problem.q.shape[3:])
    return _interned(dataclasses.replace(problem, **specs))


@functools.lru_cache(maxsize=4096)
def _interned(problem: Problem) -> Problem:
    """The first of equal problems: every length of a bucket finds its plan by identity."""
    return problem


def _padded(spec: TensorSpec, queries: int, keys: int) -> TensorSpec:
    if spec.name in LENGTHS:
        return spec
    axis, of = padding(spec.name)
    shape = list(spec.shape)
    shape[axis] = queries if of == "q" else keys
    return dense_spec(spec.name, spec.dtype, tuple(shape))
