"""How calls are timed: on the device, on the host, and many ways in turn, in an order that is shuffled in every round."""

from __future__ import annotations

import gc
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ..device import cupy_runtime
from ..problem.tensor_spec import numpy_dtype

Name = TypeVar("Name")

#: Rounds that a way is timed in, and what is enough: a way that has spent so many seconds gets no more than the fewest.
ROUNDS, SECONDS_A_WAY, FEWEST_ROUNDS = 25, 1.5, 5
#: Products that are queued in front of calls at first, and at most: while they run the host prepares the calls.
PRODUCTS, MOST_PRODUCTS = 8, 256
#: Rows and columns of the matrices of those products, and of the one whose rate is measured.
BUSY_SIZE, RATE_SIZE = 4096, 8192
#: Bytes that are copied to measure how fast memory is.
COPIED_BYTES = 1 << 30
#: Seconds that host times of one call may take altogether, how many are wanted, and in how many rounds.
HOST_SECONDS, HOST_CALLS, HOST_ROUNDS = 0.2, 200, 5
#: What a wall clock must run at least, in seconds, for its ends not to count.
WALL_SECONDS = 0.02


class Wrong(ArithmeticError):
    """A way's results are not those of the others."""


def l2_bytes() -> int:
    """The size of the current GPU's L2 cache."""
    runtime = cupy_runtime.cupy().cuda.runtime
    return int(runtime.getDeviceProperties(runtime.getDevice())["l2CacheSize"])


def random_normal(*shape: int) -> Any:
    """Normal random numbers in bfloat16, in Fortran order."""
    cupy = cupy_runtime.cupy()
    numbers = cupy.random.standard_normal(shape, dtype="float32")
    return cupy.asfortranarray(numbers.astype(numpy_dtype("bfloat16")))


def as_torch(array: Any) -> Any:
    """The same memory as PyTorch sees it, (batch, heads, seq, head_dim)."""
    import torch

    return torch.from_dlpack(array).permute(3, 1, 2, 0)


def queued_ms(calls: Sequence[Callable[[], Any]], busy: Any, products: int) -> tuple[float, bool]:
    """The mean time of the calls on the device, by events, behind products of a busy matrix; and whether they hid the host.

    They did where they were still running when the last call was queued: the device has then never waited for the host. All
    results are kept until the end: an allocator that gives the same memory again would have them written into the cache.
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


def device_ms(calls: Sequence[Callable[[], Any]], busy: Any, products: int = PRODUCTS) -> float:
    """The mean time of the calls on the device, by events, behind as many products as hide the host's time."""
    return queued_ms(calls, busy, products)[0]


def host_us(call: Callable[[], Any], count: int = HOST_CALLS, wait: Callable[[Any], Any] | None = None) -> float:
    """The median time until a call returns, with an idle device.

    Args:
        call: what is timed.
        count: how often.
        wait: returns when the results given to it are there, and the device has nothing left to do; None for CUDA's own.
    """
    wait = wait or (lambda results: cupy_runtime.cupy().cuda.Device().synchronize())
    times, results = [], None
    for _ in range(count):
        wait(results)
        results = None  # its memory is free for the next one
        begin = time.perf_counter()
        results = call()
        times.append(time.perf_counter() - begin)
    wait(results)
    return statistics.median(times) * 1e6


def affordable(call: Callable[[], Any], wait: Callable[[Any], Any]) -> int:
    """How many calls' host times are had within a moment."""
    wait(None)
    begin = time.perf_counter()
    wait(call())
    return max(5, min(HOST_CALLS, int(HOST_SECONDS / (time.perf_counter() - begin))))


class Events:
    """Times calls by CUDA events, with as many products in front as it takes to hide the host."""

    def __init__(self, calls: Sequence[Callable[[], Any]], busy: Any) -> None:
        self._calls, self._busy, self._products = calls, busy, PRODUCTS
        self._hidden = True

    def __call__(self) -> float:
        """Milliseconds of a call."""
        while True:
            ms, self._hidden = queued_ms(self._calls, self._busy, self._products)
            if self._hidden or self._products >= MOST_PRODUCTS:
                return ms
            self._products *= 2

    @property
    def clock(self) -> str:
        """How it was timed, and whether the host's time is in it."""
        return "events" if self._hidden else "events, host not hidden"


class WallClock:
    """Times calls whose stream CUDA events do not see: a long row of them, until the last result is there.

    The host's time is in it wherever the host takes longer than the device.
    """

    clock = "wall clock of a row of calls"

    def __init__(self, calls: Sequence[Callable[[], Any]], wait: Callable[[Any], Any]) -> None:
        self._calls, self._wait = calls, wait
        self._times = 1

    def __call__(self) -> float:
        """Milliseconds of a call."""
        while True:
            begin = time.perf_counter()
            for _ in range(self._times):
                results = [call() for call in self._calls]
            self._wait(results)
            seconds = time.perf_counter() - begin
            if seconds >= WALL_SECONDS:
                return seconds * 1e3 / (self._times * len(self._calls))
            self._times = max(self._times + 1, int(self._times * 1.2 * WALL_SECONDS / seconds))


def interleaved(
    ways: Mapping[Name, Callable[[], float]],
    rounds: int = ROUNDS,
    *,
    seconds: float = SECONDS_A_WAY,
    fewest: int = FEWEST_ROUNDS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Name, list[float]]:
    """What every way measures, in rounds.

    The order is shuffled in every round: the clock falls with the power drawn, so what comes behind a way that draws less
    would look faster. The first round only warms up.

    Args:
        ways: what measures each once.
        rounds: how many count.
        seconds, fewest: a way that has spent so many seconds gets no more than so many rounds.
        clock: tells the seconds that a way takes.
    """
    order = random.Random(0)
    names = list(ways)
    taken: dict[Name, list[float]] = {name: [] for name in names}
    spent = dict.fromkeys(names, 0.0)
    for turn in range(rounds + 1):
        for name in order.sample(names, len(names)):
            if spent[name] > seconds and len(taken[name]) >= fewest:
                continue
            begin = clock()
            value = ways[name]()
            spent[name] += clock() - begin
            if turn:
                taken[name].append(value)
    return taken


def ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """The median, of the rounds that both took part in, of one's time over the other's: their clock was much the same.

    >>> ratio([1.0, 2.0, 4.0], [2.0, 4.0])  # the clock fell, and the other one stopped after two rounds
    0.5
    """
    return statistics.median(a / b for a, b in zip(times, others, strict=False))


def farthest(ones: Sequence[Any], others: Sequence[Any]) -> float:
    """The largest difference over the largest magnitude, of the worst pair of arrays; NaN where there is one.

    Raises:
        Wrong: a pair has two shapes.
    """
    worst = 0.0
    for a, b in zip(ones, others, strict=True):
        if a.shape != b.shape:
            raise Wrong(f"a result has the shape {a.shape}, ours {b.shape}")
        a, b = a.astype("float32"), b.astype("float32")
        apart = float(abs(a - b).max() / abs(b).max())
        if not apart <= worst:  # NaN stays
            worst = apart
        if math.isnan(worst):
            return worst
    return worst


def busy_matrix(size: int = BUSY_SIZE) -> tuple[Any, str]:
    """A matrix whose products keep the device busy, and its dtype: PyTorch's bfloat16, or, without it, CuPy's float16."""
    try:
        import torch
    except ImportError:
        cupy = cupy_runtime.cupy()
        return cupy.random.standard_normal((size, size), dtype="float32").astype("float16"), "float16"
    return torch.randn(size, size, dtype=torch.bfloat16, device="cuda"), "bfloat16"


def matmul_tflops() -> tuple[float, str]:
    """The rate of a large product of random matrices, and its dtype."""
    matrix, dtype = busy_matrix(RATE_SIZE)
    ms = statistics.median(device_ms([lambda: matrix @ matrix] * 4, matrix, 1) for _ in range(7))
    return 2 * RATE_SIZE**3 / ms / 1e9, dtype


def copy_gbs() -> float:
    """Bytes that a copy on the device reads and writes, 10^9 a second."""
    cupy = cupy_runtime.cupy()
    source = cupy.zeros(COPIED_BYTES, "u1")
    target = cupy.empty_like(source)
    busy, _ = busy_matrix()
    ms = statistics.median(device_ms([lambda: cupy.copyto(target, source)] * 4, busy) for _ in range(7))
    return 2 * COPIED_BYTES / ms / 1e6


def free_memory() -> None:
    """Give the memory that pools keep back to the GPU."""
    gc.collect()
    cupy_runtime.cupy().get_default_memory_pool().free_all_blocks()
    if torch := sys.modules.get("torch"):
        torch.cuda.empty_cache()
