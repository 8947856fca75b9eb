"""The worker process of the planner: ``python -m cupy_sdpa.offline.plan_worker``.

A request is a function without parameters, such as a ``functools.partial`` of a core function. The answer is its result, or an
exception for the parent to raise.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from .. import CudnnError
from ._workers import serve


def _answer(request: Callable[[], Any]) -> Any:
    try:
        return request()
    except CudnnError as error:
        return error
    except Exception:  # the process continues; the parent must not report a crash of cuDNN
        return RuntimeError(f"planning failed:\n{traceback.format_exc()}")


if __name__ == "__main__":
    serve(_answer)
