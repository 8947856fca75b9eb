"""Steps and parts of CUDA kernels that operations share.

============= ===============================================================================================================
memory        UNITS
concatenation Address, Concatenation, Filler, address, address_bits, concatenate, MULTIPLE, rounded_up
sums          BLOCK, Sources, row_means
============= ===============================================================================================================
"""

from ..core.kernels.concatenation import Address, Concatenation, Filler, address, address_bits, concatenate
from ..core.kernels.merge import BLOCK, Sources
from ..core.kernels.row_means import row_means
from ..core.programs.stats_gradient import MULTIPLE, rounded_up
from ..core.runtime.memory import UNITS

__all__ = [
    "BLOCK",
    "MULTIPLE",
    "UNITS",
    "Address",
    "Concatenation",
    "Filler",
    "Sources",
    "address",
    "address_bits",
    "concatenate",
    "rounded_up",
    "row_means",
]
