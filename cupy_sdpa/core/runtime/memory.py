"""Copies and fills of device memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from . import driver
from .cupy_runtime import capturing, cupy, empty, is_array, stream


class Rows(NamedTuple):
    """The memory of an array as evenly spaced rows; in bytes."""

    pitch: int
    width: int
    number: int


def rows_of(array: Any, axis: int) -> Rows | None:
    """Return the rows of an array or a view; None if its memory is not evenly spaced rows.

    A row spans the axes up to ``axis``, along which the array must be dense. The rows must be evenly spaced.
    """
    width = array.dtype.itemsize
    for length, stride in zip(array.shape[: axis + 1], array.strides[: axis + 1], strict=True):
        if length > 1 and stride != width:
            return None
        width *= length
    pitch, count = max(width, 1), 1
    for length, stride in zip(array.shape[axis + 1 :], array.strides[axis + 1 :], strict=True):
        if length > 1:
            pitch = stride if count == 1 else pitch
            if stride != pitch * count or pitch < width:
                return None
            count *= length
    return Rows(pitch, width, count)


def common_rows(target: Any, source: Any) -> tuple[Rows, Rows] | None:
    """Return the longest rows by which an array or a view can be copied into one of the same shape, or None."""
    if target.dtype != source.dtype or not target.size:
        return None
    for axis in reversed(range(target.ndim)):
        to, of = rows_of(target, axis), rows_of(source, axis)
        if to and of and to.number == of.number:
            return to, of
    return None


def copy_by_rows(target: Any, source: Any) -> None:
    """Copy an array into another one of the same shape; CuPy's at memory speed if they have :func:`common_rows`."""
    rows = common_rows(target, source) if is_array(target) else None
    if rows:
        copy_rows(target, source, rows)
    else:
        target.T[...] = source.T  # CuPy copies arrays in C order at memory speed, others much slower


def copy_rows(target: Any, source: Any, rows: tuple[Rows, Rows]) -> None:
    """Copy a CuPy array into another one, given their :func:`common_rows`: the width of the first ones."""
    to, of = rows
    runtime = cupy().cuda.runtime
    kind = runtime.memcpyDeviceToDevice
    runtime.memcpy2DAsync(target.data.ptr, to.pitch, source.data.ptr, of.pitch, to.width, to.number, kind, stream())


def resize(target: Any, source: Any, axes: Sequence[int]) -> None:
    """Copy an array into a longer one, padded with zeros along some axes, or into a shorter one; of numpy or CuPy.

    If only one axis of CuPy arrays changes, and both consist of rows (see :func:`rows_of`), as in Fortran order, two driver
    calls copy at memory speed. CuPy's element-wise kernels are 20 times slower on 4-dimensional arrays.
    """
    of_one_axis = is_array(target) and len(axes) == 1
    to, of = (rows_of(x, axes[0]) if of_one_axis else None for x in (target, source))
    if to is None or of is None:
        common = tuple(slice(min(lengths)) for lengths in zip(target.shape, source.shape, strict=True))
        for axis in axes:
            target[(*common[:axis], slice(common[axis].stop, None))] = 0
        target[common] = source[common]
        return
    width = min(to.width, of.width)
    if width:
        copy_rows(target, source, (to._replace(width=width), of))
    if width < to.width:
        padding, end = to.width - width, target.data.ptr + width
        driver.check(driver.bindings().cuMemsetD2D8Async(end, to.pitch, 0, padding, to.number, stream()))


def clear(array: Any, value: float) -> None:
    """Fill an array with 0, or one of 4 bytes per element with any value. A dense array on the GPU takes one memset, at memory
    speed.
    """
    if not is_array(array) or not (array.flags.f_contiguous or array.flags.c_contiguous):
        array.fill(value)
    elif array.size:
        if value == 0:
            driver.check(driver.bindings().cuMemsetD8Async(array.data.ptr, 0, array.nbytes, stream()))
        else:
            bits = int(np.asarray(value, array.dtype).view(np.uint32))
            driver.check(driver.bindings().cuMemsetD32Async(array.data.ptr, bits, array.size, stream()))


#: The constant arrays ``start, start + step, start + 2 step, ...`` by the id of the CUDA context, start, step and dtype.
_constants: dict[tuple[int, int, int, str], Any] = {}
#: Every constant array that was created. Arrays with the same content take at most twice the memory of the longest one.
_all_constants: list[Any] = []
#: The maximum number of arrays of equal integers in a context; further ones are created anew in every call.
MAX_EQUAL = 64


def multiples(step: int, length: int, dtype: str) -> Any:
    """Return an array that begins with ``0, step, 2 step, ...`` and has at least ``length`` elements; see :func:`_constant`."""
    return _constant(0, step, dtype, max(length, 1 << 16 if step == 1 else 64))


def equal_integers(value: int, length: int) -> Any:
    """Return an int32 array of ``value``. It is usually constant (:func:`_constant`): do not write to it."""
    context = driver.context_id()
    found = _constants.get((context, value, 0, "int32"))
    if (found is None or found.size < length) and (capturing() or _count_equal(context) >= MAX_EQUAL):
        array = empty((length,), np.dtype(np.int32))
        clear(array, value)
        return array
    return _constant(value, 0, "int32", max(length, 1 << 10))[:length]


def is_constant(array: Any) -> bool:
    """True if an array is the beginning of a constant array of equal integers."""
    return any(array.data.ptr == constant.data.ptr for (_, _, step, _), constant in _constants.items() if not step)


def _count_equal(context: int) -> int:
    """Return the number of arrays of equal integers in a context."""
    return sum(not step and of == context for of, _, step, _ in _constants)


def _constant(start: int, step: int, dtype: str, length: int) -> Any:
    """Return an array ``start, start + step, ...`` of at least ``length`` elements: plans may store its address.

    It is never written to and never freed. There is one such array for each content in each context; a longer one is at least
    twice as long. The array is filled when this function returns, so work on any stream may read it.
    """
    key = driver.context_id(), start, step, dtype
    array = _constants.get(key)
    if array is None or array.size < length:
        with cupy().cuda.Stream(non_blocking=True) as new_stream:
            array = cupy().asarray(start + step * np.arange(1 << (length - 1).bit_length(), dtype=dtype))
            new_stream.synchronize()
        _all_constants.append(array)
        _constants[key] = array
    return array
