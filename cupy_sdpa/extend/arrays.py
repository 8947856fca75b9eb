"""Work with a call's arrays: dtypes, problems, and arrays of other libraries.

========= ====================================================================================================================
dtypes    rounded
problems  Problem, NoArray
libraries Library
========= ====================================================================================================================
"""

from ..core.boundary.libraries import Library
from ..core.boundary.read_array import NoArray
from ..core.problem.problem import Problem
from ..core.problem.tensor_spec import rounded

__all__ = [
    "Library",
    "NoArray",
    "Problem",
    "rounded",
]
