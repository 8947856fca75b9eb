"""Read and run a layer's calls.

========== ===================================================================================================================
calls      run_cached, read_forward
========== ===================================================================================================================
"""

from ..core.boundary.arguments import read_forward
from ..core.replay.replay_cache import run_cached

__all__ = [
    "read_forward",
    "run_cached",
]
