"""Calls that consist of several passes: how they run, problems for plans ahead of time, arrays of a derivative."""

from .explanation import explain_function
from .jvp import jvp_problems
from .programs.derivative import widen
from .weights import weight_sums_problems

__all__ = ["explain_function", "jvp_problems", "weight_sums_problems", "widen"]


def __dir__() -> list[str]:
    """The public names."""
    return __all__
