"""Options: the table, values, how a pass is computed, and programs that an object keeps.

========== ==================================================================================================================
table      OPTIONS, refused_by, takes, check_spelling, special_call
values     as_float, Band, read_band, read_bucket
passes     PassOption, decided_options, split_options, cast, check_converted, read_compute_dtype
programs   BoundPrograms, keep_recent
========== ==================================================================================================================
"""

from ..core.boundary.compute import cast, check_converted, read_compute_dtype
from ..core.boundary.options import check_spelling, special_call
from ..core.hooks import PassOption
from ..core.options.band import Band, read_band
from ..core.options.table import OPTIONS, refused_by, takes
from ..core.options.values import as_float
from ..core.problem.bucket import read_bucket
from ..core.programs.decided_options import decided_options, split_options
from ..core.replay.replay_cache import BoundPrograms, keep_recent

__all__ = [
    "OPTIONS",
    "Band",
    "BoundPrograms",
    "PassOption",
    "as_float",
    "cast",
    "check_converted",
    "check_spelling",
    "decided_options",
    "keep_recent",
    "read_band",
    "read_bucket",
    "read_compute_dtype",
    "refused_by",
    "special_call",
    "split_options",
    "takes",
]
