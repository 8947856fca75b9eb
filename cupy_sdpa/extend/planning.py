"""Problems ahead of time: the problems of a call, the report on it, and what a GPU or a version of cuDNN supports.

========== ==================================================================================================================
problems   Settings, Split, problems_of_shapes, OF_FORWARD, report_of, Report
GPUs       WITHOUT_CUDNN, writes_16_bits
========== ==================================================================================================================
"""

from ..core.options.table import Settings, Split
from ..core.programs.describe import OF_FORWARD, problems_of_shapes, report_of
from ..core.replay.call_report import Report
from ..core.support.rules import WITHOUT_CUDNN, writes_16_bits

__all__ = [
    "OF_FORWARD",
    "WITHOUT_CUDNN",
    "Report",
    "Settings",
    "Split",
    "problems_of_shapes",
    "report_of",
    "writes_16_bits",
]
