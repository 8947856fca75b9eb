"""The worker process of the planner: ``python -m cupy_sdpa.offline.plan_worker``.

A request is ``(problem, target, folder)``, where the folder of the disk cache may be None; or None, which requests the version
of cuDNN. A result is a :class:`~.core.cudnn_engine.plan.PlanInfo`, the text of a refusal, a version number, or an
exception that the parent raises.
"""

from __future__ import annotations

import functools
import traceback
from typing import Any

from ..extend import Unsupported
from ..extend.cudnn import CudnnError, DiskCache, NotStored, library, load_driver_or_stub, plan_for
from ._workers import serve


@functools.cache
def _load_cudnn() -> int:
    """Provide a driver library to cuDNN, load cuDNN and return its version."""
    load_driver_or_stub()
    return library().version


def _handle(request: Any) -> Any:
    try:
        version = _load_cudnn()
        if request is None:
            return version
        problem, target, folder = request
        plan = plan_for(problem, target, DiskCache(folder, required=True) if folder else None)
        plan.close()
        return plan.info
    except (Unsupported, NotStored) as error:
        return str(error)
    except CudnnError as error:
        return error
    except Exception:  # the process continues; the parent must not report a crash of cuDNN
        return RuntimeError(f"planning failed:\n{traceback.format_exc()}")


if __name__ == "__main__":
    serve(_handle)
