"""Work with options: the table of options, options as they were read, and the type of a band.

========== ===================================================================================================================
table      OPTIONS, Options, ReadOptions
values     Band
========== ===================================================================================================================
"""

from ..core.boundary.read_options import ReadOptions
from ..core.options.band import Band
from ..core.options.table import OPTIONS, Options

__all__ = [
    "OPTIONS",
    "Band",
    "Options",
    "ReadOptions",
]
