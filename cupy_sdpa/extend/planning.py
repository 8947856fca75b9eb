"""Plan ahead of time: a call's problems, the report on a call, and what a GPU supports.

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
