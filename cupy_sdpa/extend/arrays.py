"""Work with a call's arrays: dtypes and problems.

========= ====================================================================================================================
dtypes    rounded
problems  Problem
========= ====================================================================================================================
"""

from ..core.problem.problem import Problem
from ..core.problem.tensor_spec import rounded

__all__ = [
    "Problem",
    "rounded",
]
