"""Calls of layers: calls that are read in several places, the programs that a layer keeps, and how a pass is computed.

========== ===================================================================================================================
calls      Operands, ReadCall, read, run, run_cached, read_forward, read_backward, BoundProblem, GivenStats
programs   Program, BoundPrograms, keep_recent
passes     passes, decided_options
========== ===================================================================================================================
"""

from ..core.boundary.arguments import read_backward, read_forward
from ..core.boundary.call import BoundProblem, GivenStats
from ..core.programs import passes
from ..core.programs.calls import read, run
from ..core.programs.decided_options import decided_options
from ..core.programs.executor import Operands, ReadCall
from ..core.programs.program import Program
from ..core.replay.replay_cache import BoundPrograms, keep_recent, run_cached

__all__ = [
    "BoundProblem",
    "BoundPrograms",
    "GivenStats",
    "Operands",
    "Program",
    "ReadCall",
    "decided_options",
    "keep_recent",
    "passes",
    "read",
    "read_backward",
    "read_forward",
    "run",
    "run_cached",
]
