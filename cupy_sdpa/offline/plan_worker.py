"""The worker process of the planner: ``python -m cupy_sdpa.offline.plan_worker``.

A request is ``(problem, target, folder)``, where the folder of the disk cache may be None; or None, which requests the version
of cuDNN. A result is a :class:`~.core.cudnn_engine.plan.PlanInfo`, the text of a refusal, a version number, or an
exception that the parent raises.
"""

from __future__ import annotations

import traceback
from typing import Any

from ..extend.cudnn import CudnnError, plan_described, planning_version
from ._workers import serve


def _handle(request: Any) -> Any:
    try:
        return planning_version() if request is None else plan_described(*request)
    except CudnnError as error:
        return error
    except Exception:  # the process continues; the parent must not report a crash of cuDNN
        return RuntimeError(f"planning failed:\n{traceback.format_exc()}")


if __name__ == "__main__":
    serve(_handle)
