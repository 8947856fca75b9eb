"""Work with a call's arrays: names, dtypes, checks, layouts, and arrays of other libraries.

========= ====================================================================================================================
names     KEY_ARRAYS
dtypes    FLOAT_DTYPES, FP8_LARGEST, rounded
problems  Problem, NoArray
checks    expected_arrays, check_strides_of
layouts   Layout
libraries Library
========= ====================================================================================================================
"""

from ..core._typing import Layout
from ..core.boundary.layouts import check_strides_of
from ..core.boundary.libraries import Library
from ..core.boundary.read_array import NoArray
from ..core.problem.arrays import KEY_ARRAYS
from ..core.problem.problem import Problem
from ..core.problem.tensor_spec import FLOAT_DTYPES, FP8_LARGEST, rounded
from ..core.problem.validation import expected_arrays

__all__ = [
    "FLOAT_DTYPES",
    "FP8_LARGEST",
    "KEY_ARRAYS",
    "Layout",
    "Library",
    "NoArray",
    "Problem",
    "check_strides_of",
    "expected_arrays",
    "rounded",
]
