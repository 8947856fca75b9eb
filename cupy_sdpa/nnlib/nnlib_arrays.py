"""Heads, batch dimensions and broadcasting of NNlib.jl's arrays."""

from __future__ import annotations

import math
from typing import Any

from ..extend import in_words, read_number


def split_heads(x: Any, nheads: int) -> Any:
    """Reshape ``(n, len, batch...)`` to ``(n / nheads, nheads, len, batch...)``; a view of a column-major array.

    Raises:
        TypeError: x is not an array, or nheads is not an integer.
        ValueError: x has fewer than two axes, or ``n`` is not a multiple of ``nheads``.

    >>> import numpy as np
    >>> split_heads(np.zeros((8, 5, 2), order="F"), 2).shape
    (4, 2, 5, 2)
    """
    check_array("x", x)
    if x.ndim < 2:
        raise ValueError(f"x has shape {x.shape}; it must be (n, len, batch...)")
    n, *rest = x.shape
    return x.reshape((_head_dim(n, nheads), nheads, *rest), order="F")


def _head_dim(n: int, nheads: int) -> int:
    if read_number("nheads", nheads, 0) < 1 or n % nheads:
        raise ValueError(f"the first dimension is {n}; it must be a multiple of nheads, which is {nheads}")
    return n // nheads


def join_heads(x: Any) -> Any:
    """Reshape ``(d, nheads, len, batch...)`` to ``(d nheads, len, batch...)``: the inverse of :func:`split_heads`.

    Raises:
        TypeError: x is not an array.
        ValueError: x has fewer than three axes.

    >>> import numpy as np
    >>> join_heads(np.zeros((4, 2, 5, 2), order="F")).shape
    (8, 5, 2)
    """
    check_array("x", x)
    if x.ndim < 3:
        raise ValueError(f"x has shape {x.shape}; it must be (d, nheads, len, batch...)")
    d, nheads, *rest = x.shape
    return x.reshape((d * nheads, *rest), order="F")


def fold(x: Any, nheads: int) -> Any:
    """Reshape ``(n, len, batch...)`` to ``(d, nheads, len, B)``; B is the product of the batch dimensions.

    A view, or a copy in Fortran order if the strides of x or of the view are not supported by kernels.
    """
    n, length, *batch = x.shape
    shape = _head_dim(n, nheads), nheads, length, math.prod(batch)
    folded = x.reshape(shape, order="F")  # takes 4 us in CuPy
    strides = folded.strides
    if folded.size and (min(strides) < 0 or (shape[0] > 1 and strides[0] != x.itemsize)):
        return folded.copy(order="F")
    return folded


def unfold(y: Any, batch: tuple[int, ...]) -> Any:
    """Reshape ``(d, nheads, len, B)`` to ``(d nheads, len, batch...)``: the inverse of :func:`fold`."""
    d, nheads, length, _ = y.shape
    return y.reshape((d * nheads, length, *batch), order="F")


def to_four_axes(array: Any) -> Any:
    """Append axes of length 1 up to four axes: Julia broadcasts from the first axis on, numpy from the last."""
    if array.ndim > 4:
        raise ValueError(f"bias or mask has shape {array.shape}; it must broadcast to (kv_len, q_len, nheads, B)")
    return array.reshape(array.shape + (1,) * (4 - array.ndim), order="F")


def check_array(name: str, x: Any) -> None:
    """Raise TypeError if an argument is not an array."""
    if remedy := getattr(type(x), "_not_an_array", None):
        raise TypeError(f"{name} is {in_words(x)}; {remedy}")
    if not hasattr(x, "ndim"):
        raise TypeError(f"{name} is {in_words(x)}; pass an array: convert with numpy.asarray(...) or cupy.asarray(...)")
