"""Plan ahead of time: the report on a call, and what a GPU supports.

========== ===================================================================================================================
reports    Report
GPUs       writes_16_bits
========== ===================================================================================================================
"""

from ..core.replay.call_report import Report
from ..core.support.rules import writes_16_bits

__all__ = [
    "Report",
    "writes_16_bits",
]
