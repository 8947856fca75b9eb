"""Problems ahead of time: the problems of a call, the report on it, and what a GPU or a version of cuDNN supports.

========== ==================================================================================================================
problems   as_data, problem_of_data, views_of_shapes, OF_FORWARD, problems_of, report_of, Report
GPUs       WITHOUT_CUDNN, writes_16_bits
========== ==================================================================================================================
"""

from ..core.boundary.arguments import views_of_shapes
from ..core.problem.plain_data import as_data, problem_of_data
from ..core.programs.describe import OF_FORWARD, problems_of, report_of
from ..core.replay.call_report import Report
from ..core.support.rules import WITHOUT_CUDNN, writes_16_bits

__all__ = [
    "OF_FORWARD",
    "WITHOUT_CUDNN",
    "Report",
    "as_data",
    "problem_of_data",
    "problems_of",
    "report_of",
    "views_of_shapes",
    "writes_16_bits",
]
