"""Steps and parts of CUDA kernels that operations share.

============= ===============================================================================================================
memory        UNITS, copy_by_rows, bindings
concatenation Address, Concatenation, Filler, address, address_bits, concatenate, MULTIPLE, rounded_up
sums          Sources, row_means, replace_infinite
============= ===============================================================================================================
"""

from ..core.kernels.concatenation import Address, Concatenation, Filler, address, address_bits, concatenate
from ..core.kernels.merge import Sources
from ..core.kernels.ragged import replace_infinite
from ..core.kernels.row_means import row_means
from ..core.programs.stats_gradient import MULTIPLE, rounded_up
from ..core.runtime.driver import bindings
from ..core.runtime.memory import UNITS, copy_by_rows

__all__ = [
    "MULTIPLE",
    "UNITS",
    "Address",
    "Concatenation",
    "Filler",
    "Sources",
    "address",
    "address_bits",
    "bindings",
    "concatenate",
    "copy_by_rows",
    "replace_infinite",
    "rounded_up",
    "row_means",
]
