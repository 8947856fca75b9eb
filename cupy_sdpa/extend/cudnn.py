"""cuDNN: load it, and plan for a described GPU. Importing this module loads the binding, not the library.

========== ===================================================================================================================
GPUs       capability_of, describe, model_of
library    OVERRIDE, library, load_driver_or_stub, CudnnError
plans      PlanInfo, Target, plan_for, DiskCache, NotStored
========== ===================================================================================================================
"""

from ..core.cudnn.deviceless import load_driver_or_stub
from ..core.cudnn.library import OVERRIDE, library
from ..core.cudnn_engine.disk_cache import DiskCache, NotStored
from ..core.cudnn_engine.plan import PlanInfo, Target
from ..core.cudnn_engine.planner import plan_for
from ..core.errors import CudnnError
from ..core.runtime.cupy_runtime import model_of
from ..core.support.gpus import capability_of, describe

__all__ = [
    "OVERRIDE",
    "CudnnError",
    "DiskCache",
    "NotStored",
    "PlanInfo",
    "Target",
    "capability_of",
    "describe",
    "library",
    "load_driver_or_stub",
    "model_of",
    "plan_for",
]
