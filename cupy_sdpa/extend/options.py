"""Options: the table, checks, values, and the dtype to compute in.

========== ===================================================================================================================
table      OPTIONS, Options, ReadOptions, refused_by
checks     check_names, kept_options
values     as_float, Band
dtype      check_converted, read_compute_dtype
========== ===================================================================================================================
"""

from ..core.boundary.compute import check_converted, read_compute_dtype
from ..core.boundary.options import check_names
from ..core.boundary.read_options import ReadOptions
from ..core.boundary.user_functions import kept_options
from ..core.options.band import Band
from ..core.options.table import OPTIONS, Options, refused_by
from ..core.options.values import as_float

__all__ = [
    "OPTIONS",
    "Band",
    "Options",
    "ReadOptions",
    "as_float",
    "check_converted",
    "check_names",
    "kept_options",
    "read_compute_dtype",
    "refused_by",
]
