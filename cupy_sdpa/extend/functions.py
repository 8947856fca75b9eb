"""Score and mask functions: trace and record them.

========== ==================================================================================================================
trace      check_function, record, trace, FUNCTIONS, function_identities, trace_functions, AXES, Expression, Step, Sides,
           NO_BRANCHES
========== ==================================================================================================================
"""

from ..core.boundary.user_functions import FUNCTIONS, function_identities, trace_functions
from ..core.score_fn.expression import AXES, Expression, Step
from ..core.score_fn.mask_analysis import Sides
from ..core.score_fn.proxy import NO_BRANCHES
from ..core.score_fn.tracer import check_function, record, trace

__all__ = [
    "AXES",
    "FUNCTIONS",
    "NO_BRANCHES",
    "Expression",
    "Sides",
    "Step",
    "check_function",
    "function_identities",
    "record",
    "trace",
    "trace_functions",
]
