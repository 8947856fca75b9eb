"""Calls of layers: calls that are read in several places, the programs that a layer keeps, and how a pass is computed.

========== ===================================================================================================================
calls      run_cached, BoundPrograms, read_forward, read_backward, read_stats_gradient, BoundProblem
passes     decided_options
========== ===================================================================================================================
"""

from ..core.boundary.arguments import read_backward, read_forward
from ..core.boundary.call import BoundProblem
from ..core.programs.decided_options import decided_options
from ..core.programs.passes import read_stats_gradient
from ..core.replay.replay_cache import BoundPrograms, run_cached

__all__ = [
    "BoundProblem",
    "BoundPrograms",
    "decided_options",
    "read_backward",
    "read_forward",
    "read_stats_gradient",
    "run_cached",
]
