"""Log the steps of calls: at level DEBUG of the logger ``cupy_sdpa``, with the time and the bytes of each one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from ..boundary.call import logger
from ..runtime import cupy_runtime
from .steps import ProgramStep

T = TypeVar("T")


def run_logged(number: int, step: ProgramStep, run: Callable[[], T], *, on_gpu: bool) -> T:
    """Run a step and log it; on a GPU wait until it has ended."""
    if on_gpu:
        cuda = cupy_runtime.cupy().cuda
        begin, end = cuda.Event(), cuda.Event()
        begin.record()
        result = run()
        end.record()
        end.synchronize()
        seconds = cuda.get_elapsed_time(begin, end) / 1000
    else:
        started = time.perf_counter()
        result = run()
        seconds = time.perf_counter() - started
    moved = sum(view.nbytes for view in {*step.views()})
    rate = f", {moved / seconds / 1e9:.1f} GB/s" if seconds else ""
    logger.debug("%3d. %-32s %10.1f us, %.3f MiB%s", number, step.name, seconds * 1e6, moved / 2**20, rate)
    return result
