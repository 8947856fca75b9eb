"""Score and mask functions: trace, record and move them.

========== ===================================================================================================================
trace      check_function, record, trace, FUNCTIONS, function_identities, trace_functions, AXES, Sides, NO_BRANCHES
move       Recorded, Access, relocated
========== ===================================================================================================================
"""

from ..core.boundary.user_functions import FUNCTIONS, function_identities, trace_functions
from ..core.score_fn.expression import AXES
from ..core.score_fn.mask_analysis import Sides
from ..core.score_fn.proxy import NO_BRANCHES
from ..core.score_fn.recorded import Access, Recorded, relocated
from ..core.score_fn.tracer import check_function, record, trace

__all__ = [
    "AXES",
    "FUNCTIONS",
    "NO_BRANCHES",
    "Access",
    "Recorded",
    "Sides",
    "check_function",
    "function_identities",
    "record",
    "relocated",
    "trace",
    "trace_functions",
]
