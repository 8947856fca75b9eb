"""The names of the core with which layers are written: operations, steps, views, checks, kernels and merging.

:doc:`/extending` writes an operation with them. The features beside the core, such as ``kv_cache`` and ``derivatives``, import
these names first; a name of the core that is not here may change without notice.

========== ==========================================================================================================
operation  operation, Call, CallKey, call_of, read, read_operands, composed, ReadCall, run, results_of
steps      Builder, View, Check, Constant, passes, register_option
options    Options, ReadOptions, takes_options, check_names, kept_options, other_layout, read_flag, read_count
arrays     read_array, as_int32, arrays_on_gpu, check_arrays, Expected, expected_arrays, check_strides_of, read_forward,
           dtype_name, numpy_dtype, row_stats_dtype, row_stats_shape
functions  Recorded, Access, relocated
kernels    cuda_kernel, Struct, TYPES, cupy_runtime
merging    merge, Parts
errors     in_words, Unsupported
========== ==========================================================================================================
"""

from .core.boundary.argument import arrays_on_gpu, as_int32, check_arrays, read_array
from .core.boundary.arguments import read_forward
from .core.boundary.layouts import check_strides_of, other_layout
from .core.boundary.options import check_names, takes_options
from .core.boundary.read_options import ReadOptions
from .core.boundary.user_functions import kept_options
from .core.errors import Unsupported, in_words
from .core.hooks import register_option
from .core.kernels.merge import Parts, merge
from .core.options.table import Options
from .core.options.values import read_count, read_flag
from .core.problem.problem import row_stats_dtype, row_stats_shape
from .core.problem.tensor_spec import Expected, dtype_name, numpy_dtype
from .core.problem.validation import expected_arrays
from .core.problem.view import View
from .core.programs import passes
from .core.programs.calls import Call, call_of, operation, read, results_of, run
from .core.programs.executor import ReadCall, composed, read_operands
from .core.programs.program import Builder
from .core.programs.steps import Check, Constant
from .core.replay.call_key import CallKey
from .core.runtime import cupy_runtime
from .core.runtime.cuda_code import Struct, cuda_kernel
from .core.runtime.dtypes import TYPES
from .core.score_fn.recorded import Access, Recorded, relocated

__all__ = [
    "TYPES",
    "Access",
    "Builder",
    "Call",
    "CallKey",
    "Check",
    "Constant",
    "Expected",
    "Options",
    "Parts",
    "ReadCall",
    "ReadOptions",
    "Recorded",
    "Struct",
    "Unsupported",
    "View",
    "arrays_on_gpu",
    "as_int32",
    "call_of",
    "check_arrays",
    "check_names",
    "check_strides_of",
    "composed",
    "cuda_kernel",
    "cupy_runtime",
    "dtype_name",
    "expected_arrays",
    "in_words",
    "kept_options",
    "merge",
    "numpy_dtype",
    "operation",
    "other_layout",
    "passes",
    "read",
    "read_array",
    "read_count",
    "read_flag",
    "read_forward",
    "read_operands",
    "register_option",
    "relocated",
    "results_of",
    "row_stats_dtype",
    "row_stats_shape",
    "run",
    "takes_options",
]
