"""Steps and parts of CUDA kernels that operations share.

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
