"""Masks in a symbolic form that the fused kernel computes itself: causal, of key lengths, or both."""

from __future__ import annotations

import functools
import numbers
from typing import Any

import numpy as np

from ..block_masks.no_array import NoArray
from ..extend import cupy_runtime, read_number
from .nnlib_arrays import check_array, to_four_axes


class Mask(NoArray):
    """A mask defined by a causal flag and key lengths. The Boolean array is computed when it is used.

    ``mask & other`` is a :class:`Mask` if ``other`` is one, otherwise an array, broadcast from the first axis on. ``~mask`` and
    ``numpy.asarray(mask)`` are arrays; use :attr:`array` for everything else.

    Args:
        xp: the module of the array, numpy or cupy.
        keys, queries: lengths of the first two axes.
        causal: mask the keys after each query. Default False.
        lengths: number of visible keys of each batch item, ``(B,)`` int32. Default None: all keys.

    Attributes:
        shape: ``(keys, queries)``, or ``(keys, queries, 1, B)`` with lengths.
    """

    _not_an_array = "its attribute .array is a bool array"

    def __init__(self, xp: Any, keys: int, queries: int, *, causal: bool = False, lengths: Any = None) -> None:
        self.causal, self.lengths, self._xp = causal, lengths, xp
        self.shape = (keys, queries) if lengths is None else (keys, queries, 1, lengths.shape[0])
        if xp is not np:
            vars(self)["__array_ufunc__"] = None  # CuPy then leaves ``array & mask`` to :meth:`__rand__`; numpy asks the class

    @functools.cached_property
    def array(self) -> Any:
        """The mask as a Boolean array, True where the query attends to the key."""
        xp, (keys, queries) = self._xp, self.shape[:2]
        index = xp.arange(keys)[:, None]
        visible = index <= xp.arange(queries) if self.causal else xp.ones((keys, queries), bool)
        if self.lengths is not None:
            visible = visible[:, :, None, None] & (index[:, :, None, None] < self.lengths)
        return xp.asfortranarray(visible)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(self.array, dtype, copy=copy)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """Return the array of ``array & mask``; every other function of numpy raises TypeError."""
        if ufunc is np.bitwise_and and method == "__call__" and not options:
            one, other = inputs
            return self & (one if other is self else other)
        return self._refuse()

    def __and__(self, other: Any) -> Any:
        if not isinstance(other, Mask):
            check_array("the other mask", other)
            return to_four_axes(self.array) & to_four_axes(other)
        (keys, queries), (other_keys, other_queries) = self.shape[:2], other.shape[:2]
        lengths = [mask.lengths for mask in (self, other) if mask.lengths is not None]
        sizes = {queries, other_queries}, {array.shape[0] for array in lengths}
        if keys != other_keys or any(len(lengths_of_axis - {1}) > 1 for lengths_of_axis in sizes):
            raise ValueError(f"masks of shapes {self.shape} and {other.shape} cannot be combined")
        shortest = self._xp.minimum(*lengths) if len(lengths) == 2 else lengths[0] if lengths else None
        return Mask(self._xp, keys, max(queries, other_queries), causal=self.causal or other.causal, lengths=shortest)

    __rand__ = __and__  # ``&=`` also creates a new mask, because the old one may have other references

    def __invert__(self) -> Any:
        return ~self.array

    def __repr__(self) -> str:
        return f"Mask(shape={self.shape}, causal={self.causal}, lengths={self.lengths})"


def make_causal_mask(x: Any, *, dims: int = 2) -> Mask:
    """Make a square causal mask: every query attends to the keys up to its own position.

    Args:
        x: an array of the sequence; only its length and its device are used.
        dims: the sequence dimension of x, counted from 1. Default 2, for ``(features, len, batch...)``; 3 for the
            ``(d, nheads, len, B)`` of :func:`dot_product_attention_scores`.

    Returns:
        ``mask[i, j] = i <= j`` for key i and query j, both counted from 0. The fused kernel applies it as a flag.

    Raises:
        TypeError, ValueError: x is not an array, or has no dimension ``dims``.

    >>> import numpy as np
    >>> np.asarray(make_causal_mask(np.zeros((8, 3))))
    array([[ True,  True,  True],
           [False,  True,  True],
           [False, False,  True]])
    """
    check_array("x", x)
    if not 1 <= read_number("dims", dims, 0) <= x.ndim:
        raise ValueError(f"dims is {dims}; x has {x.ndim} dimensions, counted from 1")
    length = x.shape[dims - 1]
    return Mask(cupy_runtime.array_module(x), length, length, causal=True)


def make_padding_mask(lengths: Any, kv_len: int) -> Mask:
    """Make a key padding mask from the length of each batch item; NNlib.jl has no such helper.

    Args:
        lengths: ``(B,)`` integers; more than ``kv_len`` means all keys, less than 0 means no keys.
        kv_len: the number of keys.

    Returns:
        ``(kv_len, 1, 1, B)``. The fused kernel takes the lengths.

    Raises:
        TypeError, ValueError: ``lengths`` is not an array ``(B,)`` of integers, or ``kv_len`` is not a number >= 0.

    >>> import numpy as np
    >>> np.asarray(make_padding_mask(np.array([2, 3]), 3))[:, 0, 0]
    array([[ True,  True],
           [ True,  True],
           [False,  True]])
    """
    check_array("lengths", lengths)
    if len(lengths.shape) != 1 or lengths.dtype.kind not in "iu":
        raise ValueError(f"lengths has shape {lengths.shape} and dtype {lengths.dtype}; it must be (B,) integers")
    if not isinstance(kv_len, numbers.Integral) or isinstance(kv_len, bool) or kv_len < 0:
        raise ValueError(f"kv_len is {kv_len!r}; it must be a number of keys, 0 or more")
    return Mask(cupy_runtime.array_module(lengths), kv_len, 1, lengths=lengths.clip(0, kv_len).astype(np.int32))
