"""The time of a call."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..runtime import cupy_runtime

#: The number of timed calls on the CPU, and the maximum seconds for timing, also on the GPU.
CALLS, SECONDS = 5, 1.0
#: On the GPU: the number of batches, and the maximum number of calls in a batch.
BATCHES, BATCH = 7, 20


@dataclass(frozen=True)
class Timing:
    """The result and the times of a call.

    Attributes:
        out: the result of the first call.
        first: seconds of the first call.
        median: median seconds of the repeated calls.
        repeats: the number of repeated calls, in words.
    """

    out: Any
    first: float
    median: float
    repeats: str


def measure(call: Callable[[], Any], on_gpu: bool) -> Timing:
    """Time a call.

    Args:
        call: the call.
        on_gpu: whether it enqueues its work on CuPy's current stream.
    """
    started = time.perf_counter()
    out = call()
    return _time_gpu(call, out, started) if on_gpu else _time_cpu(call, out, started)


def _time_cpu(call: Callable[[], Any], out: Any, started: float) -> Timing:
    """Time repeated calls by the wall clock; the first call began at ``started`` and is one of them."""
    times = [time.perf_counter() - started]
    while len(times) < CALLS and sum(times) < SECONDS:
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return Timing(out, times[0], float(np.median(times)), f"{len(times)} call{'s' * (len(times) > 1)}")


def _time_gpu(call: Callable[[], Any], out: Any, started: float) -> Timing:
    """Time batches of calls by CUDA events; the first call began at ``started``."""
    cuda = cupy_runtime.cupy().cuda
    cuda.get_current_stream().synchronize()
    first = time.perf_counter() - started
    call()
    cuda.get_current_stream().synchronize()
    second = time.perf_counter() - started - first  # the first call also loads the kernel
    calls = max(1, min(BATCH, int(SECONDS / BATCHES / second)))
    events = [cuda.Event() for _ in range(BATCHES + 1)]
    events[0].record()
    for event in events[1:]:
        for _ in range(calls):  # several calls, so that the launch overhead of the host is hidden
            call()
        event.record()
    events[-1].synchronize()
    batches = [cuda.get_elapsed_time(a, b) for a, b in itertools.pairwise(events)]  # milliseconds
    median = float(np.median(batches)) / calls / 1e3
    return Timing(out, first, median, f"{BATCHES} batches of {calls}, by CUDA events")
