"""Import the names of the core that layers and your own operations need: they are the interface of the core.

:doc:`/extending` shows how to write an operation with them. Each function and class has an example, or refers to another
name's example. Layers import nothing else from the core, except ``extend.cudnn.Cudnn`` in tools such as the command line. All
other names of the core may change without notice.

========== ===================================================================================================================
operation  operation, Call, CallKey, ReadCall, results_of, run_cached, read_operands, read_forward, composed
steps      Builder, View, Constant
options    takes_options, OPTIONS, Options, ReadOptions, Band, Recorded, read_flag, read_number
arrays     Array, Axes, Expected, check_arrays, read_array, dtype_name, numpy_dtype, rounded, FLOAT_DTYPES, KEY_ARRAYS
kernels    cupy_runtime, Struct, cuda_kernel, TYPES, UNITS
merging    Parts, merge_parts
messages   in_words
========== ===================================================================================================================
"""

from ..core._typing import Array
from ..core.boundary.arguments import read_forward
from ..core.boundary.axes import Axes
from ..core.boundary.options import takes_options
from ..core.boundary.read_array import check_arrays, read_array
from ..core.boundary.read_options import ReadOptions
from ..core.errors import in_words
from ..core.kernels.merge import Parts, merge_parts
from ..core.options.band import Band
from ..core.options.table import OPTIONS, Options
from ..core.options.values import read_flag, read_number
from ..core.problem.arrays import KEY_ARRAYS
from ..core.problem.tensor_spec import FLOAT_DTYPES, Expected, dtype_name, numpy_dtype, rounded
from ..core.problem.view import View
from ..core.programs.calls import Call, operation, results_of
from ..core.programs.composed_passes import read_operands
from ..core.programs.executor import ReadCall, composed
from ..core.programs.program import Builder
from ..core.programs.steps import Constant
from ..core.replay.call_key import CallKey
from ..core.replay.replay_cache import run_cached
from ..core.runtime import cupy_runtime
from ..core.runtime.cuda_code import Struct, cuda_kernel
from ..core.runtime.dtypes import TYPES, UNITS
from ..core.score_fn.recorded import Recorded

__all__ = [
    "FLOAT_DTYPES",
    "KEY_ARRAYS",
    "OPTIONS",
    "TYPES",
    "UNITS",
    "Array",
    "Axes",
    "Band",
    "Builder",
    "Call",
    "CallKey",
    "Constant",
    "Expected",
    "Options",
    "Parts",
    "ReadCall",
    "ReadOptions",
    "Recorded",
    "Struct",
    "View",
    "check_arrays",
    "composed",
    "cuda_kernel",
    "cupy_runtime",
    "dtype_name",
    "in_words",
    "merge_parts",
    "numpy_dtype",
    "operation",
    "read_array",
    "read_flag",
    "read_forward",
    "read_number",
    "read_operands",
    "results_of",
    "rounded",
    "run_cached",
    "takes_options",
]
