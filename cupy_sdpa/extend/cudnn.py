"""cuDNN: what is installed, what it supports, and plans for described GPUs. Importing this module does not load the library.

========== ===================================================================================================================
here       installed, cudnn_obstacles, read_description, OVERRIDE, CudnnError
plans      SupportTable, Target, plan_described, planning_version, PlanInfo
========== ===================================================================================================================
"""

from ..core.cudnn.deviceless import read_description
from ..core.cudnn.library import OVERRIDE
from ..core.cudnn_engine.described import plan_described, planning_version
from ..core.cudnn_engine.plan import PlanInfo, Target
from ..core.errors import CudnnError
from ..core.support.installed import cudnn_obstacles, installed
from ..core.support.table import SupportTable

__all__ = [
    "OVERRIDE",
    "CudnnError",
    "PlanInfo",
    "SupportTable",
    "Target",
    "cudnn_obstacles",
    "installed",
    "plan_described",
    "planning_version",
    "read_description",
]
