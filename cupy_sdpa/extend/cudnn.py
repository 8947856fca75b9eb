"""cuDNN: what is installed, what it supports, and plans for described GPUs. Importing this module does not load the library.

========== ===================================================================================================================
here       InstalledCudnn, OVERRIDE, CudnnError
plans      SupportTable, Target, plan_described, planning_version, PlanInfo
========== ===================================================================================================================
"""

from ..core.cudnn.library import OVERRIDE
from ..core.cudnn_engine.described import plan_described, planning_version
from ..core.cudnn_engine.plan import PlanInfo, Target
from ..core.errors import CudnnError
from ..core.support.installed import InstalledCudnn
from ..core.support.table import SupportTable

__all__ = [
    "OVERRIDE",
    "CudnnError",
    "InstalledCudnn",
    "PlanInfo",
    "SupportTable",
    "Target",
    "plan_described",
    "planning_version",
]
