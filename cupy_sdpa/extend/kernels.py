"""Share parts of CUDA kernels between layers.

========== ===================================================================================================================
memory     UNITS
head dims  padded_head_dim
sums       Sources
========== ===================================================================================================================
"""

from ..core.kernels.merge import Sources
from ..core.programs.stats_gradient import padded_head_dim
from ..core.runtime.memory import UNITS

__all__ = [
    "UNITS",
    "Sources",
    "padded_head_dim",
]
