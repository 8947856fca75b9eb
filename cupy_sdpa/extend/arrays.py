"""Arrays of a call: their names and dtypes, checks, layouts, other libraries, and ``engine="cupy"``.

============= ================================================================================================================
names         BACKWARD, CU_SEQLENS, FORWARD, KEY_ARRAYS, LENGTHS, REQUESTS, ROW_STATS, SCORE_INPUTS, SEEDS, tensor_name
dtypes        ITEMSIZE, FLOAT_DTYPES, FP8_LARGEST, rounded
problems      Problem, TensorSpec, NoArray, expected_arrays, device_of
checks        check_strides_of
layouts       Layout, has_own_axes, takes_default, convert, needs_conversion
libraries     Library, is_on_gpu, library_of
engine="cupy" InterpretedArray, plain, as_strided, interpreted
============= ================================================================================================================
"""

from ..core._typing import Layout
from ..core.boundary.argument import NoArray, tensor_name
from ..core.boundary.conversion import convert, needs_conversion
from ..core.boundary.engine import interpreted
from ..core.boundary.layouts import (
    check_strides_of,
    has_own_axes,
    takes_default,
)
from ..core.boundary.libraries import Library, is_on_gpu, library_of
from ..core.problem.arrays import BACKWARD, CU_SEQLENS, FORWARD, KEY_ARRAYS, LENGTHS, REQUESTS, ROW_STATS, SCORE_INPUTS, SEEDS
from ..core.problem.problem import Problem
from ..core.problem.tensor_spec import (
    FLOAT_DTYPES,
    FP8_LARGEST,
    ITEMSIZE,
    TensorSpec,
    rounded,
)
from ..core.problem.validation import expected_arrays
from ..core.problem.view import device_of
from ..core.runtime.interpreted_array import InterpretedArray, as_strided, plain

__all__ = [
    "BACKWARD",
    "CU_SEQLENS",
    "FLOAT_DTYPES",
    "FORWARD",
    "FP8_LARGEST",
    "ITEMSIZE",
    "KEY_ARRAYS",
    "LENGTHS",
    "REQUESTS",
    "ROW_STATS",
    "SCORE_INPUTS",
    "SEEDS",
    "InterpretedArray",
    "Layout",
    "Library",
    "NoArray",
    "Problem",
    "TensorSpec",
    "as_strided",
    "check_strides_of",
    "convert",
    "device_of",
    "expected_arrays",
    "has_own_axes",
    "interpreted",
    "is_on_gpu",
    "library_of",
    "needs_conversion",
    "plain",
    "rounded",
    "takes_default",
    "tensor_name",
]
