"""Problems ahead of time: the problems of a call, the report on it, and what a GPU or a version of cuDNN supports.

========== ==================================================================================================================
problems   Settings, Split, views_of_shapes, Report
GPUs       WITHOUT_CUDNN, writes_16_bits
========== ==================================================================================================================
"""

from ..core.boundary.arguments import views_of_shapes
from ..core.options.table import Settings, Split
from ..core.replay.call_report import Report
from ..core.support.rules import WITHOUT_CUDNN, writes_16_bits

__all__ = [
    "WITHOUT_CUDNN",
    "Report",
    "Settings",
    "Split",
    "views_of_shapes",
    "writes_16_bits",
]
