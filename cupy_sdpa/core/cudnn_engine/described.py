"""Plan for described GPUs with the cuDNN of this process, which must not use a GPU: see :mod:`.core.cudnn.deviceless`."""

from __future__ import annotations

import functools
from pathlib import Path

from ..cudnn.deviceless import load_driver_or_stub
from ..cudnn.library import library
from ..errors import Unsupported
from ..problem.problem import Problem
from .disk_cache import DiskCache, NotStored
from .plan import PlanInfo, Target
from .planner import plan_for


@functools.cache
def planning_version() -> int:
    """Load cuDNN, before it the driver or a stub of it, and return the version of cuDNN.

    Raises:
        CudnnError: this machine cannot plan; the message lists what is missing.
    """
    load_driver_or_stub()
    return library().version


def plan_described(problem: Problem, target: Target, folder: Path | None = None) -> PlanInfo | str:
    """Plan a problem for a described GPU, and store the plan in a folder unless it is None.

    Return the properties of the plan, or the reason why there is no plan, or why it cannot be stored.

    Raises:
        CudnnError: cuDNN failed, or this machine cannot plan.
    """
    planning_version()
    try:
        plan = plan_for(problem, target, DiskCache(folder, required=True) if folder else None)
    except (Unsupported, NotStored) as error:
        return str(error)
    plan.close()
    return plan.info
