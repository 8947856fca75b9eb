"""Options: the table, checks, values, and the dtype to compute in.

========== ===================================================================================================================
table      OPTIONS, Options, ReadOptions, refused_by
checks     check_names, check_spelling, kept_options
values     as_float, Band, read_band, read_bucket
dtype      check_converted, read_compute_dtype
========== ===================================================================================================================
"""

from ..core.boundary.compute import check_converted, read_compute_dtype
from ..core.boundary.options import check_names, check_spelling
from ..core.boundary.read_options import ReadOptions
from ..core.boundary.user_functions import kept_options
from ..core.options.band import Band, read_band
from ..core.options.table import OPTIONS, Options, refused_by
from ..core.options.values import as_float
from ..core.problem.bucket import read_bucket

__all__ = [
    "OPTIONS",
    "Band",
    "Options",
    "ReadOptions",
    "as_float",
    "check_converted",
    "check_names",
    "check_spelling",
    "kept_options",
    "read_band",
    "read_bucket",
    "read_compute_dtype",
    "refused_by",
]
