"""The worker process of the planner: ``python -m cupy_sdpa.offline.worker``.

It reads pickled requests from stdin and writes pickled results to stdout. A request is ``(problem, target, folder)``, where the
folder of the disk cache may be None; or None, which requests the version of cuDNN. A result is a
:class:`~cupy_sdpa.plans.plan.PlanInfo`, the text of a refusal, a version number, or an exception that the parent raises.
"""

from __future__ import annotations

import functools
import os
import pickle
import sys
import traceback
from typing import Any

from .._cudnn.deviceless import load_driver_or_stub
from .._cudnn.library import library
from ..errors import CudnnError, Unsupported
from ..plans.disk_cache import DiskCache
from ..plans.planner import plan_for


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
        plan = plan_for(problem, target, DiskCache(folder) if folder else None)
        plan.close()
        return plan.info
    except Unsupported as error:
        return str(error)
    except CudnnError as error:
        return error
    except Exception:  # the process continues; the parent must not report a crash of cuDNN
        return RuntimeError(f"planning failed:\n{traceback.format_exc()}")


def _serve() -> None:
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output that cuDNN prints goes to stderr, not between the results
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            results.write(pickle.dumps(_handle(request)))
            results.flush()
        except BrokenPipeError:  # the parent has ended
            os._exit(1)


if __name__ == "__main__":
    _serve()
