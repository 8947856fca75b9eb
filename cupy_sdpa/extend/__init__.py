"""Import the names you need to write an operation: they are the interface of the core.

:doc:`/extending` shows how to write an operation with them. Each function and class has an example, or names another one whose
example uses it. The modules ``calls``, ``options``, ``arrays``, ``functions``, ``planning`` and ``cudnn`` have the
names that only the package's own layers need, such as ``kv_cache`` and ``derivatives``. Layers import nothing else from the
core. The names in these modules, and all other names of the core, may change without notice.

========== ===================================================================================================================
operation  operation, Call, CallKey, ReadCall, results_of, read_operands, composed
steps      Builder, View, Constant
options    takes_options, read_flag, read_number
arrays     Array, Axes, Expected, check_arrays, read_array, dtype_name, numpy_dtype
kernels    cupy_runtime, Struct, cuda_kernel, TYPES
merging    Parts, merge_parts
messages   Unsupported, in_words
========== ===================================================================================================================
"""

from ..core._typing import Array
from ..core.boundary.axes import Axes
from ..core.boundary.options import takes_options
from ..core.boundary.read_array import check_arrays, read_array
from ..core.errors import Unsupported, in_words
from ..core.kernels.merge import Parts, merge_parts
from ..core.options.values import read_flag, read_number
from ..core.problem.tensor_spec import Expected, dtype_name, numpy_dtype
from ..core.problem.view import View
from ..core.programs.calls import Call, operation, results_of
from ..core.programs.composed_passes import read_operands
from ..core.programs.executor import ReadCall, composed
from ..core.programs.program import Builder
from ..core.programs.steps import Constant
from ..core.replay.call_key import CallKey
from ..core.runtime import cupy_runtime
from ..core.runtime.cuda_code import Struct, cuda_kernel
from ..core.runtime.dtypes import TYPES

__all__ = [
    "TYPES",
    "Array",
    "Axes",
    "Builder",
    "Call",
    "CallKey",
    "Constant",
    "Expected",
    "Parts",
    "ReadCall",
    "Struct",
    "Unsupported",
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
    "read_number",
    "read_operands",
    "results_of",
    "takes_options",
]
