"""Arrays of a call: their names and dtypes, checks, layouts, other libraries, and ``engine="cupy"``.

============= ================================================================================================================
names         BACKWARD, CU_SEQLENS, FORWARD, KEY_ARRAYS, LENGTHS, REQUESTS, SEEDS, OUTPUTS,
              tensor_name, VECTORS
dtypes        ITEMSIZE, FLOAT_DTYPES, FP8_LARGEST, FloatDtype, rounded, storage_dtype
problems      Problem, TensorSpec, NoArray, expected_arrays, spec_of, device_of
checks        check_counts, check_lengths, check_offsets, check_strides_of, stride_obstacle, shares_memory
layouts       Layout, default_layout, check_layout, other_layout, from_own, has_own_axes, in_own_layout, of_caller,
              takes_default, to_own, convert, needs_conversion
libraries     Library, is_on_gpu
engine="cupy" InterpretedArray, plain, as_strided, interpreted
============= ================================================================================================================
"""

from ..core._typing import Layout
from ..core.boundary.argument import NoArray, spec_of, tensor_name
from ..core.boundary.arguments import check_counts, check_lengths, check_offsets
from ..core.boundary.conversion import OUTPUTS, convert, needs_conversion
from ..core.boundary.engine import interpreted
from ..core.boundary.layouts import (
    VECTORS,
    check_layout,
    check_strides_of,
    from_own,
    has_own_axes,
    in_own_layout,
    of_caller,
    other_layout,
    takes_default,
    to_own,
)
from ..core.boundary.libraries import Library, is_on_gpu
from ..core.layout import default_layout
from ..core.problem.arrays import BACKWARD, CU_SEQLENS, FORWARD, KEY_ARRAYS, LENGTHS, REQUESTS, SEEDS
from ..core.problem.problem import Problem
from ..core.problem.tensor_spec import (
    FLOAT_DTYPES,
    FP8_LARGEST,
    ITEMSIZE,
    FloatDtype,
    TensorSpec,
    rounded,
    storage_dtype,
    stride_obstacle,
)
from ..core.problem.validation import expected_arrays
from ..core.problem.view import device_of
from ..core.replay.bound_program import shares_memory
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
    "OUTPUTS",
    "REQUESTS",
    "SEEDS",
    "VECTORS",
    "FloatDtype",
    "InterpretedArray",
    "Layout",
    "Library",
    "NoArray",
    "Problem",
    "TensorSpec",
    "as_strided",
    "check_counts",
    "check_layout",
    "check_lengths",
    "check_offsets",
    "check_strides_of",
    "convert",
    "default_layout",
    "device_of",
    "expected_arrays",
    "from_own",
    "has_own_axes",
    "in_own_layout",
    "interpreted",
    "is_on_gpu",
    "needs_conversion",
    "of_caller",
    "other_layout",
    "plain",
    "rounded",
    "shares_memory",
    "spec_of",
    "storage_dtype",
    "stride_obstacle",
    "takes_default",
    "tensor_name",
    "to_own",
]
