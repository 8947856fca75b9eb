"""CuPy's arrays: numpy arrays in fake device memory, whose contents are computed when their stream runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from . import memory
from .device import DEVICE, Work


class Flags:
    """The flags of CuPy's arrays, which have no ``writeable``."""

    __slots__ = ("c_contiguous", "f_contiguous", "owndata")

    def __init__(self, flags: Any) -> None:
        self.c_contiguous, self.f_contiguous, self.owndata = flags.c_contiguous, flags.f_contiguous, flags.owndata


class ndarray:  # noqa: N801
    """An array on the device. As in CuPy, the constructor takes memory."""

    __array_priority__ = 100
    __slots__ = ("__weakref__", "base", "data", "view_")

    def __init__(self, *given: Any, **named: Any) -> None:
        self._init(*given, **named)

    def _init(
        self, shape: Any, dtype: Any = float, memptr: Any = None, strides: tuple[int, ...] | None = None, order: str = "C"
    ) -> None:
        shape = (shape,) if isinstance(shape, (int, np.integer)) else tuple(map(int, shape))
        dtype = np.dtype(dtype)
        self.data = memory.alloc(math.prod(shape) * dtype.itemsize) if memptr is None else memptr
        self.base: Any = None
        if 0 in shape:
            self.view_ = np.empty(shape, dtype, order)
        else:
            whole = self.data.mem.block.whole
            offset = self.data.ptr - self.data.mem.block.address
            self.view_ = np.ndarray(shape, dtype, whole, offset, strides, order)

    # Attributes and views, which need no work of the device

    shape = property(lambda self: self.view_.shape)
    strides = property(lambda self: self.view_.strides)
    dtype = property(lambda self: self.view_.dtype)
    ndim = property(lambda self: self.view_.ndim)
    size = property(lambda self: self.view_.size)
    itemsize = property(lambda self: self.view_.itemsize)
    nbytes = property(lambda self: self.view_.nbytes)
    flags = property(lambda self: Flags(self.view_.flags))
    _f_contiguous = property(lambda self: self.view_.flags.f_contiguous)
    T = property(lambda self: self.transpose())

    @property
    def device(self) -> Any:
        from .cupy import Device

        return Device(0)

    def __len__(self) -> int:
        return len(self.view_)

    def __repr__(self) -> str:
        return f"<fake cupy array {self.shape} {self.dtype}>"

    def _same_memory(self, view: Any) -> ndarray:
        made = object.__new__(ndarray)
        address = view.__array_interface__["data"][0] if view.size else self.data.ptr
        made.data = self.data + (address - self.data.ptr)
        made.view_, made.base = view, self.base if self.base is not None else self
        return made

    def transpose(self, *axes: Any) -> ndarray:
        return self._same_memory(self.view_.transpose(*axes))

    def __getitem__(self, key: Any) -> ndarray:
        parts = key if isinstance(key, tuple) else (key,)
        if any(isinstance(part, ndarray) for part in parts):  # indices in arrays: a copy
            places = [n for n, part in enumerate(parts) if isinstance(part, ndarray)]

            def take(array: Any, *indices: Any) -> Any:
                found = list(parts)
                for place, index in zip(places, indices, strict=True):
                    found[place] = index
                return array[tuple(found)]

            def trial(array: Any, *indices: Any) -> Any:  # indices may not be computed yet
                return take(array, *(index if index.dtype == bool else np.zeros_like(index) for index in indices))

            return compute(take, self, *(parts[place] for place in places), trial=trial)
        return self._same_memory(self.view_[_with_dots(key)])

    def view(self, dtype: Any = None) -> ndarray:
        return self._same_memory(self.view_.view() if dtype is None else self.view_.view(dtype))

    def reshape(self, *shape: Any, order: str = "C") -> ndarray:
        """A view if possible, else a copy."""
        made = self.view_.reshape(*shape, order=order)
        if np.may_share_memory(made, self.view_) or not made.size:
            return self._same_memory(made)
        return compute(lambda x: x.reshape(*shape, order=order), self)

    def repeat(self, repeats: int) -> ndarray:
        return compute(lambda x: x.repeat(repeats), self)

    def ravel(self, order: str = "C") -> ndarray:
        return self.reshape(-1, order=order)

    def __copy__(self) -> ndarray:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> ndarray:
        return self.copy()

    def __reduce__(self) -> Any:
        from .cupy import array

        return array, (self.get(),)

    # Reads and writes of contents, in the order of the current stream

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(key, ndarray):
            self._set_rows(key, value)
            return
        target = self.view_[_with_dots(key)]
        source = value.view_ if isinstance(value, ndarray) else np.array(value)
        if np.broadcast_shapes(target.shape, source.shape) != target.shape:
            raise ValueError(f"an array of shape {source.shape} is assigned to elements of shape {target.shape}")

        def run() -> None:
            target[...] = source

        if target.size:
            DEVICE.submit(memory.current_stream(), Work(run))

    def _set_rows(self, indices: ndarray, value: ndarray) -> None:
        """Write rows at indices."""

        def run() -> None:
            self.view_[indices.view_] = value.view_

        DEVICE.submit(memory.current_stream(), Work(run))

    def clip(self, low: int, high: int) -> ndarray:
        return compute(lambda x: np.clip(x, low, high), self)

    def fill(self, value: Any) -> None:
        self[...] = value

    def astype(self, dtype: Any, order: str = "K", copy: bool = True) -> ndarray:
        if not copy and self.dtype == np.dtype(dtype):
            return self
        return compute(lambda x: x.astype(dtype, order=order), self)

    def swapaxes(self, one: int, other: int) -> ndarray:
        return self._same_memory(self.view_.swapaxes(one, other))

    def copy(self, order: str = "C") -> ndarray:
        return compute(lambda x: x.copy(order=order), self)

    def get(self, order: str = "C") -> Any:
        """The contents as a numpy array; waits for the current stream."""
        DEVICE.wait(memory.current_stream())
        return self.view_.copy(order=order)

    def item(self) -> Any:
        return self.get().item()

    __bool__ = lambda self: bool(self.get())  # noqa: E731
    __int__ = lambda self: int(self.get())  # noqa: E731
    __float__ = lambda self: float(self.get())  # noqa: E731

    def __array__(self, *given: Any, **more: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Use `.get()`")

    def __array_ufunc__(self, ufunc: Any, method: str, *operands: Any, **named: Any) -> Any:
        if method != "__call__" or named or any(isinstance(x, np.ndarray) for x in operands):
            raise TypeError(f"Unsupported operands of {ufunc.__name__}: {[type(x).__name__ for x in operands]}")
        return compute(ufunc, *operands)

    def __array_function__(self, function: Any, types: Any, operands: Any, named: Any) -> Any:
        if function not in (np.where, np.clip) or named:
            return NotImplemented
        return compute(function, *operands, order="C")

    def __iter__(self) -> Any:
        return (self[place] for place in range(len(self)))

    def _method(name: str) -> Any:  # noqa: N805
        def method(self: Any, *given: Any, **more: Any) -> ndarray:
            if more.keys() - {"axis", "dtype", "out", "keepdims"}:
                raise TypeError(f"{name}() got an unexpected keyword argument: {sorted(more)}")
            return compute(lambda x: np.asarray(getattr(x, name)(*given, **more)), self)

        return method

    sum, max, min, all, any, mean, argmax = map(_method, ("sum", "max", "min", "all", "any", "mean", "argmax"))

    def _operator(function: Any, turned: bool = False) -> Any:  # noqa: N805
        if turned:
            return lambda self, other: compute(function, other, self, order="C")
        return lambda self, other: compute(function, self, other, order="C")

    __add__, __radd__ = _operator(np.add), _operator(np.add, turned=True)
    __sub__, __rsub__ = _operator(np.subtract), _operator(np.subtract, turned=True)
    __mul__, __rmul__ = _operator(np.multiply), _operator(np.multiply, turned=True)
    __truediv__, __rtruediv__ = _operator(np.divide), _operator(np.divide, turned=True)
    __floordiv__, __mod__ = _operator(np.floor_divide), _operator(np.remainder)

    def __matmul__(self, other: Any) -> Any:
        if memory.current_stream() in DEVICE.captures:
            raise NotImplementedError("calling cuBLAS API during stream capture is currently unsupported")
        return compute(np.matmul, self, other)

    __lt__, __le__, __gt__, __ge__ = map(_operator, (np.less, np.less_equal, np.greater, np.greater_equal))
    __eq__, __ne__ = map(_operator, (np.equal, np.not_equal))
    __and__, __or__ = map(_operator, (np.logical_and, np.logical_or))
    __neg__ = lambda self: compute(np.negative, self, order="C")  # noqa: E731
    __abs__ = lambda self: compute(np.absolute, self, order="C")  # noqa: E731
    __invert__ = lambda self: compute(np.logical_not, self, order="C")  # noqa: E731
    __hash__ = None

    def _in_place(function: Any) -> Any:  # noqa: N805
        return lambda self, other: compute(function, self, other, out=self)

    __iadd__, __isub__, __imul__, __itruediv__ = map(_in_place, (np.add, np.subtract, np.multiply, np.divide))


ndarray.__module__ = "cupy"


def _with_dots(key: Any) -> Any:
    """An index that gives a view, never a scalar, of a numpy array."""
    key = key if isinstance(key, tuple) else (key,)
    return key if any(part is Ellipsis for part in key) else (*key, ...)


def compute(
    function: Callable[..., Any],
    *operands: Any,
    out: ndarray | None = None,
    trial: Callable[..., Any] | None = None,
    order: str | None = None,
) -> ndarray:
    """Compute ``function`` of numpy arrays on the current stream.

    The result has the shape and dtype that ``trial``, by default the function, returns for the present contents, and by default
    its memory order. CuPy's operators return arrays in C order, for any order of their operands.
    """
    given = [x.view_ if isinstance(x, ndarray) else x for x in operands]
    with np.errstate(all="ignore"):
        tried = np.asarray((trial or function)(*given))
    made = out
    if made is None:
        own = "F" if tried.flags.f_contiguous and not tried.flags.c_contiguous else "C"
        made = ndarray(tried.shape, tried.dtype, order=order or own)
    target = made.view_

    def run() -> None:
        target[...] = function(*given)

    if target.size:
        DEVICE.submit(memory.current_stream(), Work(run))
    return made
