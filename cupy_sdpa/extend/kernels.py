"""Steps and parts of CUDA kernels that operations share.

============= ===============================================================================================================
types         CudaType, UNITS
memory        clear, common_rows, copy, copy_rows, bindings
concatenation Address, Concatenation, Filler, address, alignment_of, concatenate, MULTIPLE, rounded_up
sums          BLOCK, Sources, accumulate, sum_blocks, row_means, replace_infinite
============= ===============================================================================================================
"""

from ..core.kernels.concatenation import Address, Concatenation, Filler, address, alignment_of, concatenate
from ..core.kernels.merge import BLOCK, Sources, accumulate, sum_blocks
from ..core.kernels.ragged import replace_infinite
from ..core.kernels.row_means import row_means
from ..core.programs.stats_gradient import MULTIPLE, rounded_up
from ..core.runtime.driver import bindings
from ..core.runtime.dtypes import CudaType
from ..core.runtime.memory import UNITS, clear, common_rows, copy, copy_rows

__all__ = [
    "BLOCK",
    "MULTIPLE",
    "UNITS",
    "Address",
    "Concatenation",
    "CudaType",
    "Filler",
    "Sources",
    "accumulate",
    "address",
    "alignment_of",
    "bindings",
    "clear",
    "common_rows",
    "concatenate",
    "copy",
    "copy_rows",
    "replace_infinite",
    "rounded_up",
    "row_means",
    "sum_blocks",
]
