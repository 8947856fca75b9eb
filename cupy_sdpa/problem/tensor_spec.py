"""Arrays as a problem sees them: dtype, shape, strides and alignment, and nothing of their contents."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

#: The dtypes of q, k and v.
FloatDtype = Literal["float16", "bfloat16", "float32", "float64"]
FLOAT_DTYPES: tuple[FloatDtype, ...] = get_args(FloatDtype)

#: Bytes per element of every dtype that an array may have.
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8, "bool": 1}

#: An array's (dtype name, shape, strides in bytes, alignment of its memory in bytes): all that a problem takes from it.
Signature = tuple[str, tuple[int, ...], tuple[int, ...], int]


@functools.cache
def dtype_name(dtype: Any) -> str:
    """The name of an array's dtype; numpy takes half a microsecond to put one together.

    >>> import numpy as np
    >>> dtype_name(np.dtype("f4"))
    'float32'
    """
    return str(dtype.name)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """numpy's dtype of a name, bfloat16 among them."""
    if name == "bfloat16":
        import ml_dtypes  # 45 ms to import: only where bfloat16 is met

        return np.dtype(ml_dtypes.bfloat16)  # type: ignore[no-any-return, unused-ignore]  # typed since ml_dtypes 0.6
    return np.dtype(name)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An array as the caller holds it.

    Attributes:
        name: the argument's name.
        dtype: numpy's name of it.
        shape: as the caller sees it, such as ``(head_dim, heads, seq, batch)``.
        strides: in bytes. An axis of length 1 gets the stride that it would have in dense memory.
        alignment: of the first element, in bytes, at most 16.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    alignment: int

    @property
    def dense(self) -> bool:
        """Whether it is dense in Fortran order."""
        return self.strides == dense_strides(self.shape, ITEMSIZE[self.dtype])

    def __str__(self) -> str:
        text = f"{self.name} {self.shape} {self.dtype}"
        return text if self.dense else f"{text} strides {self.strides} bytes"


def dense_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The strides in bytes of a dense array in Fortran order: the first axis is contiguous."""
    strides, step = [], itemsize
    for length in shape:
        strides.append(step)
        step *= max(length, 1)
    return tuple(strides)


def dense_signature(dtype: str, shape: tuple[int, ...]) -> Signature:
    """The signature of a dense array in Fortran order."""
    return dtype, shape, dense_strides(shape, ITEMSIZE.get(dtype, 1)), 16


def dense_spec(name: str, dtype: str, shape: tuple[int, ...]) -> TensorSpec:
    """A dense array in Fortran order, as one that is made for a call."""
    return TensorSpec(name, *dense_signature(dtype, shape))


def spec_of(name: str, signature: Signature) -> TensorSpec:
    """The array of a signature; axes of length 1, and arrays without elements, get the strides of dense memory."""
    dtype, shape, strides, alignment = signature
    if 0 in shape:
        return dense_spec(name, dtype, shape)
    normal = list(strides)
    for axis, length in enumerate(shape):
        if length == 1:  # no step is ever taken along it: numpy, CuPy and DLPack put anything here, 0 too
            normal[axis] = normal[axis - 1] * max(shape[axis - 1], 1) if axis else ITEMSIZE.get(dtype, 1)
    return TensorSpec(name, dtype, shape, tuple(normal), alignment)
