"""Problems ahead of time: the problems of a call, the report on it, and what a GPU or a version of cuDNN supports.

========== ===================================================================================================================
problems   problems_of_shapes, Report
GPUs       writes_16_bits
========== ===================================================================================================================
"""

from ..core.programs.calls import problems_of_shapes
from ..core.replay.call_report import Report
from ..core.support.rules import writes_16_bits

__all__ = [
    "Report",
    "problems_of_shapes",
    "writes_16_bits",
]
