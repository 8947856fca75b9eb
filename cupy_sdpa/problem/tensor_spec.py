"""Array metadata: dtype, shape, strides and alignment."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

#: The dtypes of q, k and v.
FloatDtype = Literal["float16", "bfloat16", "float32", "float64"]
FLOAT_DTYPES: tuple[FloatDtype, ...] = get_args(FloatDtype)
#: The dtypes of 8 bits (FP8), each with its largest number. The values of an array are its elements times a scale factor.
FP8_LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}

#: The bytes per element of every dtype that an array may have.
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8, "bool": 1, "uint8": 1}
ITEMSIZE |= dict.fromkeys(FP8_LARGEST, 1)

#: The metadata of an array that a problem depends on: (dtype name, shape, strides in bytes, alignment in bytes).
Signature = tuple[str, tuple[int, ...], tuple[int, ...], int]


@functools.cache
def dtype_name(dtype: Any) -> str:
    """The name of a numpy dtype; cached, because numpy takes half a microsecond to format it.

    >>> import numpy as np
    >>> dtype_name(np.dtype("f4"))
    'float32'
    """
    return str(dtype.name)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of a name; bfloat16 and FP8 are dtypes of ml_dtypes."""
    if name == "bfloat16" or name in FP8_LARGEST:
        import ml_dtypes  # takes 45 ms to import

        return np.dtype(getattr(ml_dtypes, name))  # type: ignore[no-any-return, unused-ignore]  # typed since ml_dtypes 0.6
    return np.dtype(name)


def storage_dtype(name: str, on_gpu: bool) -> np.dtype[Any]:
    """The dtype of the arrays of a dtype: on the GPU uint8 for FP8, which CuPy does not have."""
    return np.dtype(np.uint8) if on_gpu and name in FP8_LARGEST else numpy_dtype(name)


def rounded(values: Any, dtype: str) -> Any:
    """Round numbers to a dtype; to FP8 with saturation, as GPUs do: numbers beyond the largest one become the largest one.

    >>> import numpy as np
    >>> rounded(np.float32([0.3, 17, -1000]), "float8_e4m3fn").astype(np.float32).tolist()
    [0.3125, 16.0, -448.0]
    """
    largest = FP8_LARGEST.get(dtype)
    return (values if largest is None else np.clip(values, -largest, largest)).astype(numpy_dtype(dtype))


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The metadata of one array of a problem.

    Attributes:
        name: the name of the argument.
        dtype: the name of the numpy dtype.
        shape: the shape in the caller's axis order, such as ``(head_dim, heads, seq, batch)``.
        strides: in bytes. An axis of length 1 has the stride of a dense array.
        alignment: the alignment of the first element in bytes, at most 16.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    alignment: int

    @property
    def dense(self) -> bool:
        """Whether the array is dense in Fortran order."""
        return self.strides == dense_strides(self.shape, ITEMSIZE[self.dtype])

    def __str__(self) -> str:
        text = f"{self.name} {self.shape} {self.dtype}"
        return text if self.dense else f"{text} strides {self.strides} bytes"


def dense_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The strides in bytes of a dense array in Fortran order."""
    strides, step = [], itemsize
    for length in shape:
        strides.append(step)
        step *= max(length, 1)
    return tuple(strides)


def dense_signature(dtype: str, shape: tuple[int, ...]) -> Signature:
    """The signature of a dense array in Fortran order."""
    return dtype, shape, dense_strides(shape, ITEMSIZE.get(dtype, 1)), 16


def dense_spec(name: str, dtype: str, shape: tuple[int, ...]) -> TensorSpec:
    """The spec of a dense array in Fortran order."""
    return TensorSpec(name, *dense_signature(dtype, shape))


def make_spec(name: str, signature: Signature) -> TensorSpec:
    """The spec of an array; axes of length 1 and empty arrays get the strides of a dense array."""
    dtype, shape, strides, alignment = signature
    if 0 in shape:
        return dense_spec(name, dtype, shape)
    normalized = list(strides)
    for axis, length in enumerate(shape):
        if length == 1:  # the stride has no meaning: numpy, CuPy and DLPack return arbitrary values, including 0
            normalized[axis] = normalized[axis - 1] * max(shape[axis - 1], 1) if axis else ITEMSIZE.get(dtype, 1)
    return TensorSpec(name, dtype, shape, tuple(normalized), alignment)
