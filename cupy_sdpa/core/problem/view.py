"""Arrays that are described, but not allocated: what the steps of a program read and write."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..runtime import cupy_runtime
from ..runtime.interpreted_array import InterpretedArray
from .tensor_spec import (
    TensorSpec,
    alignment_of,
    byte_range,
    dense_strides,
    dtype_name,
    make_spec,
    row_stats_dtype,
    row_stats_shape,
)


class Storage(NamedTuple):
    """The memory that views lie in.

    Attributes:
        name: the name of a call's array, or of memory within a program.
        alignment: the alignment of its first element in bytes, at most 16.
        device: the number of the GPU; None for the memory of the host.
    """

    name: str
    alignment: int
    device: int | None


class Flags(NamedTuple):
    """The orders in which the elements of a view follow one another without gaps, as for arrays."""

    f_contiguous: bool
    c_contiguous: bool


@dataclass(frozen=True)
class View:
    """A part of a storage as an array: slices, transposes and reshapes are views, as for arrays; it has no elements.

    Attributes:
        storage: the memory.
        dtype: the numpy dtype.
        shape: the lengths of the axes.
        strides: in bytes.
        offset: the bytes from the storage's first element to the view's.

    >>> x = View.dense("x", (4, 3), np.float32, None)
    >>> x[:, 1:].shape, x[:, 1:].offset, x.transpose(1, 0).strides
    ((4, 2), 16, (16, 4))
    """

    storage: Storage
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @classmethod
    def of(cls, name: str, array: Any) -> View:
        """Return a view of the caller's whole array, or rename a view. Only the array's metadata are read."""
        if isinstance(array, View):
            return replace(array, storage=array.storage._replace(name=name))
        if not cupy_runtime.is_array(array):
            return cls(Storage(name, 16, None), array.dtype, array.shape, array.strides)
        storage = Storage(name, alignment_of(array.data.ptr), array.data.device_id)
        return cls(storage, array.dtype, array.shape, array.strides)

    @classmethod
    def dense(cls, name: str, shape: Sequence[int], dtype: Any, device: int | None) -> View:
        """Return the view of a whole array in Fortran order."""
        dtype = np.dtype(dtype)
        return cls(Storage(name, 16, device), dtype, tuple(shape), dense_strides(tuple(shape), dtype.itemsize))

    @classmethod
    def row_stats(cls, name: str, q: Any, dtype: Any = None) -> View:
        """Return the view of a whole array with one number for each row of scores, such as the log-sum-exp.

        Its dtype is float64 if ``dtype``, the compute dtype (default: q's), is float64; otherwise float32.

        >>> stats = View.row_stats("stats", View.dense("q", (64, 8, 100, 2), np.float16, None))
        >>> stats.shape, stats.dtype
        ((100, 8, 2), dtype('float32'))
        """
        kind = row_stats_dtype(q.dtype if dtype is None else dtype)
        return cls.dense(name, row_stats_shape(q.shape), kind, q.storage.device)

    def spec(self, name: str) -> TensorSpec:
        """Return what a problem depends on, if the view is its array of this name."""
        alignment = 16
        if self.storage.device is not None and self.dtype.kind != "i":  # only cuDNN needs aligned arrays
            alignment = alignment_of(self.offset | self.storage.alignment)
        return make_spec(name, dtype_name(self.dtype), self.shape, self.strides, alignment)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """The bytes of an element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return self.size * self.itemsize

    @property
    def flags(self) -> Flags:
        """Whether the elements follow one another without gaps."""
        forward = self.size < 2 or _is_dense(self.shape, self.strides, self.itemsize)
        return Flags(forward, self.size < 2 or _is_dense(self.shape[::-1], self.strides[::-1], self.itemsize))

    @property
    def bounds(self) -> tuple[int, int]:
        """The first byte of the elements in the storage, and the byte after the last; both 0 without elements."""
        if not self.size:
            return 0, 0
        start, end = byte_range(self.shape, self.strides, self.itemsize)
        return self.offset + start, self.offset + end

    @property
    def T(self) -> View:  # noqa: N802 - as for arrays
        """The axes in reverse order."""
        return replace(self, shape=self.shape[::-1], strides=self.strides[::-1])

    def transpose(self, *axes: Any) -> View:
        """Return the axes in another order."""
        order = list(axes[0] if len(axes) == 1 and not isinstance(axes[0], int) else axes)
        return replace(self, shape=tuple(self.shape[n] for n in order), strides=tuple(self.strides[n] for n in order))

    def reshape(self, *shape: Any, order: str = "C") -> View:
        """Another shape of the same elements, in Fortran order; a single element has every order."""
        lengths = tuple(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
        same = lengths == self.shape or (self.ndim == 1 == len(lengths))
        dense = self.flags.f_contiguous and (order == "F" or self.size < 2)
        if math.prod(lengths) != self.size or not (same or dense):
            raise ValueError(f"a view of shape {self.shape} and strides {self.strides} has no shape {lengths} in order {order}")
        if same:
            return self
        return self.strided(lengths, dense_strides(lengths, self.itemsize))

    def strided(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> View:
        """Return a view from the same first element with another shape and other strides in bytes."""
        return replace(self, shape=shape, strides=strides)

    def __getitem__(self, key: Any) -> View:
        """Return the view of some elements: integers, slices, None and an ellipsis, as for arrays."""
        keys = list(key) if isinstance(key, tuple) else [key]
        used = sum(one is not None and one is not Ellipsis for one in keys)
        if Ellipsis not in keys:
            keys.append(Ellipsis)
        at = keys.index(Ellipsis)
        keys[at : at + 1] = [slice(None)] * (self.ndim - used)
        shape, strides, offset, axis = [], [], self.offset, 0
        for one in keys:
            if one is None:
                shape.append(1)
                strides.append(0)
                continue
            length, stride = self.shape[axis], self.strides[axis]
            axis += 1
            if isinstance(one, slice):
                begin, end, step = one.indices(length)
                count = len(range(begin, end, step))
                shape.append(count)
                strides.append(stride * step)
                offset += stride * begin if count else 0
            else:
                if not -length <= one < length:
                    raise IndexError(f"index {one} is outside an axis of length {length}")
                offset += stride * (one % length)
        if 0 in self.shape:  # CuPy's pointer to no memory takes no offset
            offset = self.offset
        return View(self.storage, self.dtype, tuple(shape), tuple(strides), offset)


def device_of(array: Any) -> int | None:
    """Return the GPU's number for a CuPy array or its view; None for numpy arrays and interpreted arrays."""
    if isinstance(array, View):
        return array.storage.device
    return array.data.device_id if cupy_runtime.is_array(array) else None


def array_of_view(view: View, array: Any) -> Any:
    """Return the part of a numpy array that a view of its storage describes; an array of the other byte order keeps it.

    The same for arrays that the interpreter computes with.
    """
    if isinstance(array, InterpretedArray):
        whole = array.array
        return InterpretedArray(type(whole)(view.shape, view.dtype, whole.data + view.offset, view.strides))
    dtype = view.dtype if array.dtype.isnative else view.dtype.newbyteorder(array.dtype.byteorder)
    if not view.size:
        return np.empty(view.shape, dtype, order="F")
    address = array.__array_interface__["data"][0] + view.offset
    return np.asarray(Elements(address, view, array, writeable=array.flags.writeable)).view(dtype)


def placed(view: View, array: Any) -> Any:
    """Return the part of a numpy or CuPy array that a view of its storage describes; the array itself for a whole view."""
    if not view.offset and array.shape == view.shape and array.strides == view.strides and array.dtype == view.dtype:
        return array
    if cupy_runtime.is_array(array):
        return type(array)(view.shape, view.dtype, array.data + view.offset, view.strides)
    return array_of_view(view, array)


class Elements:
    """The elements of an array, or of a view, at an address, with the protocol of numpy; ``owner`` is kept alive."""

    def __init__(self, address: int, array: Any, owner: Any = None, *, writeable: bool = True) -> None:
        self._owner = owner
        self.__array_interface__ = {
            "data": (address, not writeable),
            "shape": array.shape,
            "strides": array.strides,
            "typestr": f"|V{array.itemsize}",
            "version": 3,
        }


def _is_dense(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """True if elements follow one another without gaps, the first axis fastest."""
    for length, stride in zip(shape, strides, strict=True):
        if length != 1 and stride != itemsize:
            return False
        itemsize *= length
    return True
