"""Read and run a layer's calls, keep a layer's programs, and decide how a pass is computed.

========== ===================================================================================================================
calls      run_cached, BoundPrograms, read_forward, composed_backward
passes     decided_options
========== ===================================================================================================================
"""

from ..core.boundary.arguments import read_forward
from ..core.programs.composed_passes import composed_backward
from ..core.programs.decided_options import decided_options
from ..core.replay.replay_cache import BoundPrograms, run_cached

__all__ = [
    "BoundPrograms",
    "composed_backward",
    "decided_options",
    "read_forward",
    "run_cached",
]
