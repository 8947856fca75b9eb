"""The interface of the core: the names with which operations and layers are written.

:doc:`/extending` writes an operation with the names of this module. The modules of this folder have what some operations need
besides: ``arrays``, ``options``, ``functions``, ``kernels``, ``planning`` and ``cudnn``. The features beside the core, such as
``kv_cache`` and ``derivatives``, import nothing else of it; any other name of the core may change without notice.

========== ==================================================================================================================
operation  Call, call_of, operation, read, results_of, run, CallKey, run_cached, Operands, ReadCall, composed, read_operands
steps      Builder, Program, View, Check, Constant, passes
options    Options, ReadOptions, check_names, takes_options, kept_options, is_one_of, read_count, read_flag, read_positive,
           register_option, other_layout
arrays     Array, ArrayT, Layout, arrays_on_gpu, as_int32, check_arrays, read_array, Expected, dtype_name, numpy_dtype,
           expected_arrays, check_strides_of, read_forward, device_of, Problem, row_stats_dtype, row_stats_shape
functions  Access, Recorded, relocated
kernels    cupy_runtime, Struct, cuda_kernel, TYPES
notebooks  with_title
merging    Parts, merge
errors     CudnnError, Unsupported, in_words
========== ==================================================================================================================
"""

from ..core._html import with_title
from ..core._typing import Array, ArrayT, Layout
from ..core.boundary.argument import arrays_on_gpu, as_int32, check_arrays, read_array
from ..core.boundary.arguments import read_forward
from ..core.boundary.layouts import check_strides_of, other_layout
from ..core.boundary.options import check_names, takes_options
from ..core.boundary.read_options import ReadOptions
from ..core.boundary.user_functions import kept_options
from ..core.errors import CudnnError, Unsupported, in_words
from ..core.hooks import register_option
from ..core.kernels.merge import Parts, merge
from ..core.options.table import Options
from ..core.options.values import is_one_of, read_count, read_flag, read_positive
from ..core.problem.problem import Problem, row_stats_dtype, row_stats_shape
from ..core.problem.tensor_spec import Expected, dtype_name, numpy_dtype
from ..core.problem.validation import expected_arrays
from ..core.problem.view import View, device_of
from ..core.programs import passes
from ..core.programs.calls import Call, call_of, operation, read, results_of, run
from ..core.programs.executor import Operands, ReadCall, composed, read_operands
from ..core.programs.program import Builder, Program
from ..core.programs.steps import Check, Constant
from ..core.replay.call_key import CallKey
from ..core.replay.replay_cache import run_cached
from ..core.runtime import cupy_runtime
from ..core.runtime.cuda_code import Struct, cuda_kernel
from ..core.runtime.dtypes import TYPES
from ..core.score_fn.recorded import Access, Recorded, relocated

__all__ = [
    "TYPES",
    "Access",
    "Array",
    "ArrayT",
    "Builder",
    "Call",
    "CallKey",
    "Check",
    "Constant",
    "CudnnError",
    "Expected",
    "Layout",
    "Operands",
    "Options",
    "Parts",
    "Problem",
    "Program",
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
    "device_of",
    "dtype_name",
    "expected_arrays",
    "in_words",
    "is_one_of",
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
    "read_positive",
    "register_option",
    "relocated",
    "results_of",
    "row_stats_dtype",
    "row_stats_shape",
    "run",
    "run_cached",
    "takes_options",
    "with_title",
]
