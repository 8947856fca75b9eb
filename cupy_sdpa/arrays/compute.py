"""The option ``compute_dtype``: float32 and float64 arrays are computed in 16 bits, and results have the caller's dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..problem.tensor_spec import numpy_dtype
from .layouts import VECTORS

#: The dtypes to compute in.
COMPUTE_DTYPES = ("float16", "bfloat16")
#: The dtypes of arrays that are converted.
CONVERTED = ("float32", "float64")


def read_compute_dtype(value: Any, dtype: str) -> str | None:
    """The dtype to compute in; None if nothing is converted.

    Args:
        value: the option.
        dtype: the dtype of q.

    Raises:
        TypeError, ValueError: it is no such dtype, or q is not float32 or float64.
    """
    if value is None:
        return None
    try:
        name = value if isinstance(value, str) else str(np.dtype(value).name)
    except TypeError:
        name = repr(value)
    if name not in COMPUTE_DTYPES:
        fp8 = ". FP8: attention_vjp takes it, and attention takes arrays of cupy_sdpa.fp8.quantize_qkv(q, k, v)"
        raise ValueError(
            f"compute_dtype is {value!r}; it must be {' or '.join(map(repr, COMPUTE_DTYPES))}, or None for q's dtype"
            f"{fp8 if 'fp8' in name or 'float8' in name else ''}"
        )
    if dtype == name:
        return None
    if dtype not in CONVERTED:
        raise TypeError(
            f"compute_dtype is {name!r} and q is {dtype}; it is for {' and '.join(CONVERTED)} arrays: omit compute_dtype, or "
            f"convert with .astype({name!r})"
        )
    return name


def is_converted(name: str) -> bool:
    """Whether an array is converted: those with a head dim are, the log-sum-exp, masks and biases are not."""
    return name in VECTORS


def cast(array: Any, dtype: Any, new: Callable[[Any, tuple[int, ...], Any], Any]) -> Any:
    """A copy with another dtype, dense in Fortran order; one kernel on the GPU.

    Values beyond the range of the dtype become infinite, as on the GPU.

    Args:
        array: the array.
        dtype: the new dtype.
        new: creates an array: ``cupy_runtime.temporary`` for one that is used within a call only, else ``new_result``.
    """
    copy = new(array, array.shape, numpy_dtype(dtype) if isinstance(dtype, str) else dtype)
    write(copy, array)
    return copy


def write(target: Any, source: Any) -> None:
    """Copy an array into one with another dtype."""
    with np.errstate(over="ignore", under="ignore"):
        target.T[...] = source.T  # CuPy converts arrays in C order at memory speed, others much slower
