"""Look up the installed cuDNN and what it supports, and plan for described GPUs. Importing this module does not load cuDNN.

========== ===================================================================================================================
here       InstalledCudnn, CudnnError
plans      SupportTable, planning_version
========== ===================================================================================================================
"""

from ..core.cudnn_engine.described import planning_version
from ..core.errors import CudnnError
from ..core.support.installed import InstalledCudnn
from ..core.support.table import SupportTable

__all__ = [
    "CudnnError",
    "InstalledCudnn",
    "SupportTable",
    "planning_version",
]
