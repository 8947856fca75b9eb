"""Plan ahead of time: a call's problems, the report on a call, and what a GPU supports.

========== ===================================================================================================================
problems   Report
GPUs       writes_16_bits
========== ===================================================================================================================
"""

from ..core.replay.call_report import Report
from ..core.support.rules import writes_16_bits

__all__ = [
    "Report",
    "writes_16_bits",
]
