"""Share parts of CUDA kernels between layers.

========== ===================================================================================================================
memory     UNITS
head dims  padded_head_dim
========== ===================================================================================================================
"""

from ..core.programs.stats_gradient import padded_head_dim
from ..core.runtime.memory import UNITS

__all__ = [
    "UNITS",
    "padded_head_dim",
]
