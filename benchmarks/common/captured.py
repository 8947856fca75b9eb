"""The device's time of calls in a captured CUDA graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from cupy_sdpa.device import cupy_runtime

Call = Callable[[], Any]


class CapturedCalls:
    """A timer of calls in a captured CUDA graph; returns microseconds per call, the gaps between kernels included.

    Args:
        calls: the calls; they are repeated in turn.
        count: the smallest number of calls in the graph.
        captured_by: ``"cupy"`` or ``"torch"``, the library whose allocator and stream the calls use.
    """

    def __init__(self, calls: Sequence[Call], count: int, captured_by: str = "cupy") -> None:
        self._cuda = cupy_runtime.cupy().cuda
        self._calls = [calls[i % len(calls)] for i in range(max(count, len(calls)))]
        self._stream = self._cuda.Stream(non_blocking=True)
        for call in calls:
            call()
        self._cuda.Device().synchronize()
        self._launch = self._capture_with_torch() if captured_by == "torch" else self._capture()
        self()

    def _capture(self) -> Call:
        with self._stream:
            for call in dict.fromkeys(self._calls):
                call()
            self._stream.begin_capture()
            self._kept = [call() for call in self._calls]
            captured = self._stream.end_capture()
        return functools.partial(captured.launch, self._stream)

    def _capture_with_torch(self) -> Call:
        import torch

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._kept = [call() for call in self._calls]
        external = torch.cuda.ExternalStream(self._stream.ptr)

        def launch() -> None:
            with torch.cuda.stream(external):
                graph.replay()

        return launch

    def __call__(self) -> float:
        """Launch the graph once and return the mean microseconds of a call."""
        start, stop = self._cuda.Event(), self._cuda.Event()
        start.record(self._stream)
        self._launch()
        stop.record(self._stream)
        stop.synchronize()
        return float(self._cuda.get_elapsed_time(start, stop)) * 1e3 / len(self._calls)
