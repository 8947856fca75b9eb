"""Timers: the device's time by CUDA events or in a captured graph, the host's time, and interleaved rounds."""

from __future__ import annotations

import functools
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from cupy_sdpa.core.runtime import cupy_runtime

Name = TypeVar("Name")

#: Rounds for each contender. A contender that has used this many seconds gets no more than the minimum number of rounds.
ROUNDS, SECONDS_PER_CONTENDER, MIN_ROUNDS = 25, 1.5, 5
#: Matrix products that are queued before the timed calls: at first, and at most. The host queues the calls while they run.
PRODUCTS, MAX_PRODUCTS = 8, 256
#: Limits for the host time of one call: total seconds, number of calls, number of rounds.
HOST_SECONDS, HOST_CALLS, HOST_ROUNDS = 0.2, 200, 5
#: Minimum length of a wall clock measurement in seconds; the cost of its start and end is then negligible.
WALL_SECONDS = 0.02


def timed_by_events(calls: Sequence[Callable[[], Any]], busy: Any, products: int) -> tuple[float, bool]:
    """Time calls on the device by CUDA events, after products of a matrix that keep the device busy.

    All results stay alive until the end. Otherwise the allocator would reuse their memory, and writes would hit the cache.

    Args:
        calls: what is timed, once each.
        busy: a square matrix; not used if ``products`` is 0.
        products: the number of matrix products to queue first.

    Returns:
        The mean milliseconds of a call, and whether the products were still running when the last call was queued. If so,
        the device never waited for the host.
    """
    cuda = cupy_runtime.cupy().cuda
    start, stop = cuda.Event(), cuda.Event()
    for _ in range(products):
        _ = busy @ busy
    start.record()
    results = [call() for call in calls]
    stop.record()
    hidden = not start.done
    stop.synchronize()
    del results
    return float(cuda.get_elapsed_time(start, stop)) / len(calls), hidden


def device_ms(calls: Sequence[Callable[[], Any]], busy: Any = None, products: int = PRODUCTS) -> float:
    """Return the mean milliseconds of the calls on the device by CUDA events; without ``busy``, launched back to back."""
    return timed_by_events(calls, busy, 0 if busy is None else products)[0]


def host_us(call: Callable[[], Any], count: int = HOST_CALLS, wait: Callable[[Any], Any] | None = None) -> float:
    """Return the median microseconds until a call returns, on an idle device.

    Args:
        call: what is timed.
        count: the number of calls.
        wait: waits for the given results and for the device; the default synchronizes the current device.
    """
    wait = wait or (lambda results: cupy_runtime.cupy().cuda.Device().synchronize())
    times, results = [], None
    for _ in range(count):
        wait(results)
        results = None  # frees its memory for the next call
        begin = time.perf_counter()
        results = call()
        times.append(time.perf_counter() - begin)
    wait(results)
    return statistics.median(times) * 1e6


def affordable_calls(call: Callable[[], Any], wait: Callable[[Any], Any]) -> int:
    """Return the number of calls that fit into ``HOST_SECONDS``: at least 5, at most ``HOST_CALLS``."""
    wait(None)
    begin = time.perf_counter()
    wait(call())
    return max(5, min(HOST_CALLS, int(HOST_SECONDS / (time.perf_counter() - begin))))


class Events:
    """A timer by CUDA events. It queues more matrix products first until they hide the host's time."""

    def __init__(self, calls: Sequence[Callable[[], Any]], busy: Any) -> None:
        self._calls, self._busy, self._products = calls, busy, PRODUCTS
        self._hidden = True

    def __call__(self) -> float:
        """Return the milliseconds of a call."""
        while True:
            ms, self._hidden = timed_by_events(self._calls, self._busy, self._products)
            if self._hidden or self._products >= MAX_PRODUCTS:
                return ms
            self._products *= 2

    @property
    def clock(self) -> str:
        """The method of measurement, and whether it includes the host's time."""
        return "events" if self._hidden else "events, host not hidden"


class WallClock:
    """A timer for calls on streams that CUDA events do not see: many calls, until the last result is ready.

    It includes the host's time where the host takes longer than the device.
    """

    clock = "wall clock of consecutive calls"

    def __init__(self, calls: Sequence[Callable[[], Any]], wait: Callable[[Any], Any]) -> None:
        self._calls, self._wait = calls, wait
        self._repeats = 1

    def __call__(self) -> float:
        """Return the milliseconds of a call."""
        while True:
            begin = time.perf_counter()
            for _ in range(self._repeats):
                results = [call() for call in self._calls]
            self._wait(results)
            seconds = time.perf_counter() - begin
            if seconds >= WALL_SECONDS:
                return seconds * 1e3 / (self._repeats * len(self._calls))
            self._repeats = max(self._repeats + 1, int(self._repeats * 1.2 * WALL_SECONDS / seconds))


class CapturedCalls:
    """A timer of calls in a captured CUDA graph; returns microseconds per call, the gaps between kernels included.

    Args:
        calls: the calls; they are repeated in turn.
        count: the smallest number of calls in the graph.
        captured_by: ``"cupy"`` or ``"torch"``, the library whose allocator and stream the calls use.
    """

    def __init__(self, calls: Sequence[Callable[[], Any]], count: int, captured_by: str = "cupy") -> None:
        self._cuda = cupy_runtime.cupy().cuda
        self._calls = [calls[i % len(calls)] for i in range(max(count, len(calls)))]
        self._stream = self._cuda.Stream(non_blocking=True)
        for call in calls:
            call()
        self._cuda.Device().synchronize()
        self._launch = self._capture_with_torch() if captured_by == "torch" else self._capture()
        self()

    def _capture(self) -> Callable[[], Any]:
        with self._stream:
            for call in dict.fromkeys(self._calls):
                call()
            self._stream.begin_capture()
            self._kept = [call() for call in self._calls]
            captured = self._stream.end_capture()
        return functools.partial(captured.launch, self._stream)

    def _capture_with_torch(self) -> Callable[[], Any]:
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


def interleaved(
    timers: Mapping[Name, Callable[[], float]],
    rounds: int = ROUNDS,
    *,
    seconds: float = SECONDS_PER_CONTENDER,
    min_rounds: int = MIN_ROUNDS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Name, list[float]]:
    """Measure every contender once per round.

    The order is shuffled in every round. The GPU's clock falls when it draws more power, so in a fixed order a contender that
    runs after one that draws less power would look faster. The first round is a warm-up and does not count.

    Args:
        timers: for each contender, a function that returns one measurement.
        rounds: the number of rounds that count.
        seconds: a contender that has used this many seconds stops after ``min_rounds`` measurements.
        min_rounds: see ``seconds``.
        clock: returns the current time in seconds.

    Returns:
        The measurements of each contender.
    """
    order = random.Random(0)
    names = list(timers)
    measurements: dict[Name, list[float]] = {name: [] for name in names}
    spent = dict.fromkeys(names, 0.0)
    for number in range(rounds + 1):
        for name in order.sample(names, len(names)):
            if spent[name] > seconds and len(measurements[name]) >= min_rounds:
                continue
            begin = clock()
            value = timers[name]()
            spent[name] += clock() - begin
            if number:
                measurements[name].append(value)
    return measurements


def ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """Return the median of the ratios of two contenders' times in the same round, in which the GPU's clock was nearly the same.

    >>> ratio([1.0, 2.0, 4.0], [2.0, 4.0])  # the clock fell, and the second contender stopped after two rounds
    0.5
    """
    return statistics.median(a / b for a, b in zip(times, others, strict=False))
