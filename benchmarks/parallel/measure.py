"""Measure the members of a group: time of a pass, of its calls alone and of its transfers alone."""

from __future__ import annotations

import functools
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

import cupy_sdpa
from cupy_sdpa.calls.call import stats_are
from cupy_sdpa.device import cupy_runtime
from cupy_sdpa.parallel import ContextParallel, Loopback, run_on_gpus, run_threads
from cupy_sdpa.parallel.groups.convert import as_exchanger
from cupy_sdpa.parallel.groups.group import Transfer
from cupy_sdpa.problem.tensor_spec import numpy_dtype

from . import processes
from .model import Problem

#: The most calls in a measurement, the measurements of which the median is taken, and the calls before them.
CALLS, ROUNDS, WARM_UP = 16, 5, 4
#: The length of a member up to which a measurement has the most calls; the time of a call grows with its square.
CALLS_LENGTH = 16384
#: The bytes of the transfers with which the bandwidth of a link is measured.
LINK_BYTES = 1 << 28


class Engine(NamedTuple):
    """Where the members run.

    Attributes:
        members: the number of members.
        gpus: the number of GPUs; 0 on the CPU. With fewer GPUs than members, the members are threads on one GPU.
        group: the group of this process, if there is one process for each GPU; None for threads.
    """

    members: int
    gpus: int
    group: Any = None

    @property
    def xp(self) -> Any:
        """The array module."""
        return cupy_runtime.cupy() if self.gpus else np

    def run(self, function: Callable[[Any], Any]) -> list[Any]:
        """Call a function with every member; returns the results of all members."""
        if self.group is not None:
            return processes.gathered(self.group, function(self.group))
        if self.gpus == self.members:
            return run_on_gpus(function, self.gpus)
        return run_threads(Loopback(self.members, timeout=600).members, function)

    def barrier(self) -> threading.Barrier | processes.Barrier:
        """A barrier of all members."""
        return threading.Barrier(self.members) if self.group is None else processes.Barrier(self.group)

    def wait(self) -> None:
        """Wait for the current GPU."""
        if self.gpus:
            self.xp.cuda.Device().synchronize()


class Watched:
    """A group that records its exchanges, and can leave them out, so that only the calls are timed."""

    def __init__(self, group: Any) -> None:
        self._group = as_exchanger(group)
        self.rank, self.size = self._group.rank, self._group.size
        self.silent = False
        self.events: list[tuple[str, Any, Any]] | None = None
        self.exchanges: list[tuple[list[tuple[int, int]], list[tuple[int, int]]]] = []

    def exchange(self, sends: Sequence[Transfer], receives: Sequence[Transfer], label: str) -> None:
        """Record an exchange, and make it unless the group is silent."""
        self.exchanges.append(([(x.array.nbytes, x.peer) for x in sends], [(x.array.nbytes, x.peer) for x in receives]))
        if self.silent:
            return
        if self.events is None or not (sends or receives) or not cupy_runtime.is_array((*sends, *receives)[0].array):
            self._group.exchange(sends, receives, label)
            return
        stream = cupy_runtime.cupy().cuda.get_current_stream()
        begin = stream.record()
        self._group.exchange(sends, receives, label)
        self.events.append((label, begin, stream.record()))

    def timeline(self, call: Callable[[], Any]) -> str:
        """When the exchanges of a call begin and end on the GPU, and when the call ends, in milliseconds."""
        self.events = []
        cupy = cupy_runtime.cupy()
        begin = cupy.cuda.get_current_stream().record()
        call()
        end = cupy.cuda.get_current_stream().record()
        end.synchronize()
        moments = [
            f"{label} {cupy.cuda.get_elapsed_time(begin, a):.3f} to {cupy.cuda.get_elapsed_time(begin, b):.3f}"
            for label, a, b in self.events
        ]
        self.events = None
        return "; ".join([*moments, f"end of the call {cupy.cuda.get_elapsed_time(begin, end):.3f}"])

    def check(self) -> None:
        """As the group."""
        self._group.check()


class Timing(NamedTuple):
    """The milliseconds of a pass for one member.

    Attributes:
        total: of the pass.
        calls: of the pass without transfers.
        transfers: of its transfers alone.
        sent: the bytes that the member sends.
        timeline: when its transfers begin and end on the GPU.
    """

    total: float
    calls: float
    transfers: float
    sent: int
    timeline: str

    @property
    def hidden(self) -> float:
        """The fraction of the transfers during which calls run."""
        exposed = max(0.0, self.total - self.calls)
        return 1.0 if not self.transfers else max(0.0, 1 - exposed / self.transfers)


def arrays(xp: Any, problem: Problem, length: int, seed: int = 0) -> list[Any]:
    """Random q, k, v and the gradient of the output, the same for all members."""
    q, k, v = problem.shapes(length)
    made = []
    for number, shape in enumerate((q, k, v, q)):
        if xp is np:
            x = np.random.default_rng([seed, number]).standard_normal(shape[::-1], np.float32)
        else:
            x = xp.random.RandomState(seed + number).standard_normal(shape[::-1], dtype="float32")
        made.append(x.astype(numpy_dtype(problem.dtype)).T)
    return made


def timed(
    engine: Engine, barrier: threading.Barrier | processes.Barrier, function: Callable[[], Any], calls: int = CALLS
) -> float:
    """The median milliseconds of a function that all members call, after warming up."""
    for _ in range(WARM_UP):
        function()
    found = []
    for _ in range(ROUNDS):
        engine.wait()
        barrier.wait()
        begin = time.perf_counter()
        for _ in range(calls):
            function()
        engine.wait()
        barrier.wait()
        found.append((time.perf_counter() - begin) / calls * 1e3)
    return statistics.median(found)


def calls_of(problem: Problem) -> int:
    """The calls in a measurement of a problem."""
    return max(1, min(CALLS, int(CALLS * (CALLS_LENGTH / problem.length) ** 2)))


def measure(engine: Engine, problem: Problem, method: str) -> Iterator[tuple[str, list[Timing], float, int]]:
    """Measure both passes.

    Yields:
        The pass, the timing of every member, the largest error of its results against one device relative to their largest
        element, and the bytes that were allocated on the first GPU.
    """
    barrier, length, count = engine.barrier(), problem.length * engine.members, calls_of(problem)

    whole_results: dict[str, list[Any]] = {}  # of the first member

    def member(own: Any) -> dict[str, Any]:
        group = Watched(own)
        cp = ContextParallel(group, method=method, check=False)
        # each member in turn, so that whole sequences are in memory once
        whole = arrays(engine.xp, problem, length)
        q, k, v, dout = (cp.shard(x) for x in whole)
        del whole
        options: dict[str, Any] = dict(problem.options)
        out, stats = cp.attention(q, k, v, return_stats=True, **options)
        gradients = cp.attention_backward(dout, q, k, v, out, stats, **options)
        results = {"forward": [cp.unshard(out)], "backward": [cp.unshard(x) for x in gradients]}
        if not own.rank:
            whole_results.update({name: [x.get() if engine.gpus else x for x in made] for name, made in results.items()})
        del results, gradients
        passes = {
            "forward": functools.partial(cp.attention, q, k, v, return_stats=True, **options),
            "backward": functools.partial(cp.attention_backward, dout, q, k, v, out, stats, **options),
        }
        found: dict[str, Any] = {}
        for name, call in passes.items():
            before = _free(engine, barrier, own.rank)
            total = timed(engine, barrier, call, count)
            memory = _used(engine) - before
            group.silent = True
            with stats_are("other"):  # those of keys that were not received
                calls = timed(engine, barrier, call, count)
            group.silent, group.exchanges = False, []
            call()
            exchanges = list(group.exchanges)
            transfers = timed(engine, barrier, functools.partial(_replay, engine, group, exchanges), count)
            sent = sum(size for sends, _ in exchanges for size, _ in sends)
            timeline = group.timeline(call) if engine.gpus else ""
            found[name] = Timing(total, calls, transfers, sent, timeline), memory
        return found

    def alone(own: Any) -> dict[str, Any]:
        """The member; if it fails, the others do not wait for it."""
        try:
            return member(own)
        except BaseException:
            barrier.abort()
            raise

    members = engine.run(alone)
    expected = one_device(engine, problem, length)
    for name in ("forward", "backward"):
        pairs = zip(whole_results[name], expected[name], strict=True) if whole_results else ()
        error = max((float(np.abs(_wide(a) - _wide(b)).max() / np.abs(_wide(b)).max()) for a, b in pairs), default=0.0)
        yield name, [found[name][0] for found in members], error, members[0][name][1]


def one_device(engine: Engine, problem: Problem, length: int) -> dict[str, list[Any]]:
    """The results of one device as numpy arrays."""
    q, k, v, dout = arrays(engine.xp, problem, length)
    options: dict[str, Any] = dict(problem.options)
    out, stats = cupy_sdpa.attention(q, k, v, return_stats=True, **options)
    gradients = cupy_sdpa.attention_backward(dout, q, k, v, out, stats, **options)
    return {
        name: [x.get() if engine.gpus else x for x in found] for name, found in (("forward", [out]), ("backward", gradients))
    }


def one_device_ms(engine: Engine, problem: Problem, length: int) -> dict[str, float]:
    """The milliseconds of both passes on one device."""
    q, k, v, dout = arrays(engine.xp, problem, length)
    options: dict[str, Any] = dict(problem.options)
    out, stats = cupy_sdpa.attention(q, k, v, return_stats=True, **options)
    alone, count = threading.Barrier(1), calls_of(problem)
    return {
        "forward": timed(engine, alone, lambda: cupy_sdpa.attention(q, k, v, return_stats=True, **options), count),
        "backward": timed(engine, alone, lambda: cupy_sdpa.attention_backward(dout, q, k, v, out, stats, **options), count),
    }


def link_bandwidth(engine: Engine) -> float:
    """The bytes per second that a member sends to the next one while it receives as many from the one before."""
    barrier, size = engine.barrier(), LINK_BYTES if engine.gpus else 1 << 20

    def member(own: Any) -> float:
        group = Watched(own)
        exchanges = [([(size, (own.rank + 1) % own.size)], [(size, (own.rank - 1) % own.size)])]
        return timed(engine, barrier, functools.partial(_replay, engine, group, exchanges))

    return size / max(engine.run(member)) * 1e3 if engine.members > 1 else 0.0


def _replay(engine: Engine, group: Watched, exchanges: Sequence[Any]) -> None:
    """Make exchanges of the same sizes again, without calls."""
    for sends, receives in exchanges:
        to, of = ([Transfer(engine.xp.empty(size, np.uint8), peer) for size, peer in some] for some in (sends, receives))
        group.exchange(to, of, "replay")


def _free(engine: Engine, barrier: threading.Barrier | processes.Barrier, rank: int) -> int:
    """Free unused memory of CuPy's pool; returns what is left."""
    engine.wait()
    barrier.wait()
    if engine.gpus and (not rank or engine.gpus > 1):
        engine.xp.get_default_memory_pool().free_all_blocks()
    barrier.wait()
    return _used(engine)


def _used(engine: Engine) -> int:
    return int(engine.xp.get_default_memory_pool().total_bytes()) if engine.gpus else 0


def _wide(x: Any) -> Any:
    return x.astype(np.float32)
