"""Steps and parts of CUDA kernels that operations share.

============= ===============================================================================================================
memory        UNITS, copy_by_rows, bindings
head dims     padded_head_dim
sums          Sources, row_means, replace_infinite
============= ===============================================================================================================
"""

from ..core.kernels.merge import Sources
from ..core.kernels.ragged import replace_infinite
from ..core.kernels.row_means import row_means
from ..core.programs.stats_gradient import padded_head_dim
from ..core.runtime.driver import bindings
from ..core.runtime.memory import UNITS, copy_by_rows

__all__ = [
    "UNITS",
    "Sources",
    "bindings",
    "copy_by_rows",
    "padded_head_dim",
    "replace_infinite",
    "row_means",
]
