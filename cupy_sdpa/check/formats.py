"""The dtypes of a case by their names, and their largest numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

#: The largest finite number of each dtype.
LARGEST = {"float16": 65504.0, "bfloat16": 2.0**128 * (1 - 2.0**-8), "float32": 2.0**128 * (1 - 2.0**-24)}
LARGEST["float64"] = float(np.finfo(np.float64).max)


class Format(NamedTuple):
    """A format of 8 bits: the largest number, the spacing at 1, and the smallest number above 0."""

    largest: float
    spacing: float
    smallest: float


FORMATS = {"float8_e4m3fn": Format(448.0, 2.0**-3, 2.0**-9), "float8_e5m2": Format(57344.0, 2.0**-2, 2.0**-16)}
#: The scale of FP8 arrays: a power of two, so that their values are exact in float16 and bfloat16.
FP8_SCALE = 64.0


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the dtype of a name.

    >>> dtype_of("bfloat16").itemsize
    2
    """
    return np.dtype(getattr(ml_dtypes, name, name))


def round_fp8(array: Any, dtype: str, scale: float) -> Any:
    """Numbers of FP8 divided by a scale: rounded to nearest, saturated."""
    most = FORMATS[dtype].largest
    return np.clip(array * scale, -most, most).astype(dtype_of(dtype)).astype(array.dtype) / scale
