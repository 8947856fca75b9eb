"""Plan for described GPUs with this process's cuDNN. The process must not use a GPU: see :mod:`.core.cudnn.deviceless`."""

from __future__ import annotations

from pathlib import Path

from ..errors import Unsupported
from ..problem.problem import Problem
from ..support.installed import Cudnn
from .disk_cache import DiskCache, NotStored
from .plan import PlanInfo, Target
from .planner import plan_for


def plan_described(problem: Problem, target: Target, folder: Path | None = None) -> PlanInfo | str:
    """Plan a problem for a described GPU, and store the plan in ``folder`` if one is given.

    Return the plan's properties, or a text that says why there is no plan or why the plan cannot be stored.

    Raises:
        CudnnError: cuDNN failed, or this machine cannot plan.
    """
    Cudnn.planning_version()
    try:
        plan = plan_for(problem, target, DiskCache(folder, required=True) if folder else None)
    except (Unsupported, NotStored) as error:
        return str(error)
    plan.close()
    return plan.info
