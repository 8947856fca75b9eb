"""Read and run a layer's calls, and keep a layer's programs.

========== ===================================================================================================================
calls      run_cached, BoundPrograms, read_forward
========== ===================================================================================================================
"""

from ..core.boundary.arguments import read_forward
from ..core.replay.replay_cache import BoundPrograms, run_cached

__all__ = [
    "BoundPrograms",
    "read_forward",
    "run_cached",
]
