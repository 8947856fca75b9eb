"""The time of a call: for ``demo`` and ``benchmarks/saved.py``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..runtime import cupy_runtime
from .console import counted

#: The number of measurements, the seconds after which no other one begins, and on the GPU the most calls in a measurement.
ROUNDS, SECONDS, BATCH = 7, 1.0, 20


class Timing(NamedTuple):
    """The result of the first call, its seconds, the median seconds of the repeated calls, and their number in words."""

    out: Any
    first: float
    median: float
    repeats: str


def measure(call: Callable[[], Any], on_gpu: bool) -> Timing:
    """Time a call, first and repeated. On the GPU calls are repeated in batches, so that the launch overhead is hidden."""

    def seconds(count: int) -> tuple[Any, float]:
        started = time.perf_counter()
        for _ in range(count):
            result = call()
        if on_gpu:
            cupy_runtime.cupy().cuda.get_current_stream().synchronize()
        return result, (time.perf_counter() - started) / count

    out, first = seconds(1)
    if on_gpu:  # the first call also loads the kernel
        count = max(1, min(BATCH, int(SECONDS / ROUNDS / seconds(1)[1])))
        times = [seconds(count)[1]]
    else:
        count, times = 1, [first]
    while len(times) < ROUNDS and sum(times) * count < SECONDS:
        times.append(seconds(count)[1])
    repeats = f"{len(times)} times {counted(count, 'call')}" if on_gpu else counted(len(times), "call")
    return Timing(out, first, float(np.median(times)), repeats)
