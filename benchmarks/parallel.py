"""Attention over several GPUs: time, hidden transfers, memory, exactness.

    python -m benchmarks parallel [results.csv] [--members N] [--cpu] [--only NAME ...] [--methods METHOD ...]
    torchrun --nproc-per-node N -m benchmarks parallel --pytorch [results.csv] [--only NAME ...] [--methods METHOD ...]

Each GPU has its own process if torchrun, mpirun or srun started them; otherwise the members are threads of this process. With
fewer GPUs than members, they are threads on one GPU, and transfers are then copies on it. The ideal time is one GPU's time for
the whole problem, divided by the number of GPUs. ``calls_ms`` is the time without transfers (on the CPU, where none is hidden,
the rest of the time), ``transfers_ms`` the time of the same transfers alone; the hidden fraction is 1 - (total - calls) /
transfers. Of several processes, rank 0 prints and writes.

With ``--pytorch``, the processes of torchrun also measure PyTorch's context parallelism on the same problems, with the same
barriers, calls and rounds: the rows with the method ``PyTorch``. ``of_pytorch`` is then our time divided by PyTorch's, and
``message`` says how PyTorch ran, or why it did not.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import cupy_sdpa
from cupy_sdpa.cli.console import CommandError, positive
from cupy_sdpa.core.errors import Unsupported
from cupy_sdpa.core.problem.tensor_spec import numpy_dtype
from cupy_sdpa.core.runtime import cupy_runtime
from cupy_sdpa.parallel import ContextParallel, Loopback, connect, run_on_gpus, run_threads
from cupy_sdpa.parallel.configuration import METHODS
from cupy_sdpa.parallel.convert import as_exchanger
from cupy_sdpa.parallel.group import Transfer
from cupy_sdpa.parallel.launchers import environment

from . import runner

#: The most calls in a measurement, the measurements of which the median is taken, and the calls before them.
CALLS, ROUNDS, WARM_UP = 16, 5, 4
#: The length of a member up to which a measurement has the most calls; the time of a call grows with its square.
CALLS_LENGTH = 16384
#: The bytes of the transfers with which the bandwidth of a link is measured.
LINK_BYTES = 1 << 28
PASSES = ("forward", "backward")
COLUMNS = (
    "kind", "problem", "members", "gpus", "method", "pass", "one_gpu_ms", "ideal_ms", "total_ms", "of_ideal", "of_pytorch",
    "calls_ms", "transfers_ms", "hidden", "sent_mib", "memory_mib", "error", "link_gbs", "message",
)  # fmt: skip


class Problem(NamedTuple):
    """A problem: its name, the positions of every member, query and key/value heads, head dim, options, dtype."""

    name: str
    length: int
    heads: int
    key_heads: int
    head_dim: int
    options: Mapping[str, Any]
    dtype: str = "bfloat16"

    @property
    def calls(self) -> int:
        """The calls in a measurement."""
        return max(1, min(CALLS, int(CALLS * (CALLS_LENGTH / self.length) ** 2)))


#: The problems on GPUs, with lengths per member: the heads of Llama 3 8B and 70B.
PROBLEMS = (
    *(
        Problem(f"{name}, {length}k per GPU{suffix}", length << 10, heads, 8, 128, options)
        for heads, suffix in ((32, ""), (64, ", 64 heads"))
        for name, options in (("causal", {"causal": True}), ("full", {}))
        for length in (8, 16, 32)
    ),
    Problem("causal, 64k per GPU", 65536, 32, 8, 128, {"causal": True}),
    Problem("window of 4096, 16k per GPU", 16384, 32, 8, 128, {"causal": True, "window": (4096, 0)}),
    Problem("multi-head, causal, 8k per GPU", 8192, 32, 32, 128, {"causal": True}),
)
#: The problems on the CPU, which test the benchmark.
CPU_PROBLEMS = (
    Problem("causal, 64 per member", 64, 8, 8, 16, {"causal": True}, "float32"),
    Problem("full, 64 per member", 64, 8, 8, 16, {}, "float32"),
)


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
        """Call a function with every member of this process; returns their results."""
        if self.group is not None:
            return [function(self.group)]
        if self.gpus == self.members:
            return run_on_gpus(function, self.gpus)
        return run_threads(Loopback(self.members, timeout=600).members, function)

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
        self.exchanges: list[tuple[list[tuple[int, int]], list[tuple[int, int]]]] = []

    def exchange(self, sends: Sequence[Transfer], receives: Sequence[Transfer], label: str) -> None:
        """Record an exchange, and make it unless the group is silent."""
        self.exchanges.append(([(x.array.nbytes, x.peer) for x in sends], [(x.array.nbytes, x.peer) for x in receives]))
        if not self.silent:
            self._group.exchange(sends, receives, label)

    def replay(self, xp: Any, exchanges: Sequence[Any]) -> None:
        """Make exchanges of the same sizes again, without calls."""
        for sends, receives in exchanges:
            to, of = ([Transfer(xp.empty(size, np.uint8), peer) for size, peer in some] for some in (sends, receives))
            self._group.exchange(to, of, "replay")

    def barrier(self, xp: Any) -> None:
        """Wait for all members: a byte to and from everyone."""
        others = [peer for peer in range(self.size) if peer != self.rank]
        to, of = ([Transfer(xp.zeros(1, np.uint8), peer) for peer in others] for _ in range(2))
        self._group.exchange(to, of, "barrier")

    def check(self) -> None:
        """As the group."""
        self._group.check()


def arrays(xp: Any, problem: Problem, length: int) -> list[Any]:
    """Random q, k, v and the gradient of the output, the same for all members."""
    made = []
    for number, heads in enumerate((problem.heads, problem.key_heads, problem.key_heads, problem.heads)):
        shape = (1, length, heads, problem.head_dim)
        if xp is np:
            x = np.random.default_rng([0, number]).standard_normal(shape, np.float32)
        else:
            x = xp.random.RandomState(number).standard_normal(shape, dtype="float32")
        made.append(x.astype(numpy_dtype(problem.dtype)).T)
    return made


def timed(engine: Engine, group: Watched | None, function: Callable[[], Any], calls: int) -> float:
    """Return the median milliseconds of a function that all members of a group call, after warming up."""

    def together() -> None:
        if group:
            group.barrier(engine.xp)
        engine.wait()

    for _ in range(WARM_UP):
        function()
    found = []
    for _ in range(ROUNDS):
        together()
        begin = time.perf_counter()
        for _ in range(calls):
            function()
        together()
        found.append((time.perf_counter() - begin) / calls * 1e3)
    return statistics.median(found)


def one_device(engine: Engine, problem: Problem) -> tuple[dict[str, float], list[Any]]:
    """Return the milliseconds of both passes of the whole problem on one device, and the results as numpy arrays."""
    q, k, v, dout = arrays(engine.xp, problem, problem.length * engine.members)
    options: dict[str, Any] = dict(problem.options)
    out, stats = cupy_sdpa.attention(q, k, v, return_stats=True, **options)
    passes: dict[str, Callable[[], Any]] = {
        "forward": lambda: cupy_sdpa.attention(q, k, v, return_stats=True, **options),
        "backward": lambda: cupy_sdpa.attention_backward(dout, q, k, v, out, stats, **options),
    }
    times = {name: timed(engine, None, call, problem.calls) for name, call in passes.items()}
    return times, [_numpy(x) for x in (out, *passes["backward"]())]


def member_row(engine: Engine, problem: Problem, method: str, own: Any) -> dict[str, Any]:
    """Return the measurements of one member: by pass (total, calls, transfers, bytes sent, memory), and the whole results."""
    group, count = Watched(own), problem.calls
    cp = ContextParallel(group, method=method, check=False)
    q, k, v, dout = (cp.shard(x) for x in arrays(engine.xp, problem, problem.length * engine.members))
    options: dict[str, Any] = dict(problem.options)
    out, stats = cp.attention(q, k, v, return_stats=True, **options)
    gradients = cp.attention_backward(dout, q, k, v, out, stats, **options)
    found: dict[str, Any] = {"results": [_numpy(cp.unshard(x)) for x in (out, *gradients)]}
    del gradients
    passes: dict[str, Callable[[], Any]] = {
        "forward": functools.partial(cp.attention, q, k, v, return_stats=True, **options),
        "backward": functools.partial(cp.attention_backward, dout, q, k, v, out, stats, **options),
    }
    for name, call in passes.items():
        before = _used(engine, free=not own.rank or engine.gpus > 1)
        total = timed(engine, group, call, count)
        memory = _used(engine) - before
        group.exchanges = []
        call()
        exchanges = list(group.exchanges)
        transfers = timed(engine, group, functools.partial(group.replay, engine.xp, exchanges), count)
        calls = total - transfers
        if engine.gpus:  # the CPU rejects the log-sum-exp of keys that were not received
            group.silent = True
            calls = timed(engine, group, call, count)
            group.silent = False
        sent = sum(size for sends, _ in exchanges for size, _ in sends)
        found[name] = total, calls, transfers, sent, memory
    return found


class Peer(NamedTuple):
    """What PyTorch's context parallelism measured.

    Attributes:
        ms: the milliseconds of each pass and of both; empty if it did not run.
        message: how it ran, or why it did not.
        error: the largest difference of its output from one GPU's, relative to the largest magnitude.
    """

    ms: Mapping[str, float]
    message: str
    error: float = 0.0


#: Measures a problem with PyTorch, from the output on one GPU.
MeasurePeer = Callable[[Engine, Problem, Any], Peer]


def peer_rows(one: Mapping[str, float], gpus: int, peer: Peer) -> Iterator[dict[str, Any]]:
    """Yield PyTorch's rows, one with the message if it did not run."""
    common = {"method": "PyTorch", "message": peer.message}
    if not peer.ms:
        yield common | {"pass": ""}
    for name, ms in peer.ms.items():
        ideal = (sum(one.values()) if name == "both" else one[name]) / gpus
        error = f"{peer.error:.2e}" if name == "forward" else ""
        times = {"ideal_ms": round(ideal, 3), "total_ms": round(ms, 3), "of_ideal": round(ideal / ms, 3)}
        yield common | times | {"pass": name, "error": error}


def measured_rows(
    engine: Engine, problem: Problem, methods: Sequence[str], link: float, measure_peer: MeasurePeer | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a problem, all with the same columns."""
    one, expected = one_device(engine, problem)
    peer = measure_peer(engine, problem, expected[0]) if measure_peer else None
    common = {"kind": "measured", "problem": problem.name, "members": engine.members, "gpus": engine.gpus}
    rows = method_rows(engine, problem, methods, link, one, expected)
    for row in itertools.chain(peer_rows(one, max(engine.gpus, 1), peer) if peer else (), rows):
        if peer and row["method"] != "PyTorch" and row["pass"] in peer.ms:
            row["of_pytorch"] = round(row["total_ms"] / peer.ms[row["pass"]], 3)
        yield dict.fromkeys(COLUMNS, "") | common | row


def method_rows(
    engine: Engine, problem: Problem, methods: Sequence[str], link: float, one: Mapping[str, float], expected: Sequence[Any]
) -> Iterator[dict[str, Any]]:
    """Yield the rows of our methods, from the milliseconds and the results of one device."""
    gpus = max(engine.gpus, 1)
    for method in methods:
        try:
            members = engine.run(functools.partial(member_row, engine, problem, method))
        except Unsupported as error:
            print(f"{problem.name}, {method}: {error}", flush=True)
            continue
        pairs = list(zip(members[0]["results"], expected, strict=True))
        spent = 0.0
        for name, compared in zip(PASSES, (pairs[:1], pairs[1:]), strict=True):
            total, calls, transfers = (max(member[name][column] for member in members) for column in range(3))
            _, _, _, sent, memory = members[0][name]
            hidden = 1.0 if not transfers else min(1.0, max(0.0, 1 - max(0.0, total - calls) / transfers))
            difference = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in compared)
            spent += total
            yield {
                "method": method, "pass": name, "one_gpu_ms": round(one[name], 3),
                "ideal_ms": round(one[name] / gpus, 3), "total_ms": round(total, 3),
                "of_ideal": round(one[name] / gpus / total, 3),
                "calls_ms": round(calls, 3), "transfers_ms": round(transfers, 3), "hidden": round(hidden, 3),
                "sent_mib": round(sent / 2**20, 2), "memory_mib": round(memory / 2**20, 1), "error": f"{difference:.2e}",
                "link_gbs": round(link / 1e9, 1),
            }  # fmt: skip
        ideal = sum(one.values()) / gpus
        yield {
            "method": method, "pass": "both", "ideal_ms": round(ideal, 3), "total_ms": round(spent, 3),
            "of_ideal": round(ideal / spent, 3),
        }  # fmt: skip


def link_bandwidth(engine: Engine) -> float:
    """Return the bytes per second that a member sends to the next one while it receives as many from the one before."""
    size = LINK_BYTES if engine.gpus else 1 << 20

    def member(own: Any) -> float:
        group = Watched(own)
        exchanges = [([(size, (own.rank + 1) % own.size)], [(size, (own.rank - 1) % own.size)])]
        return timed(engine, group, functools.partial(group.replay, engine.xp, exchanges), CALLS)

    return size / max(engine.run(member)) * 1e3 if engine.members > 1 else 0.0


def _numpy(x: Any) -> Any:
    return np.asarray(x.get() if cupy_runtime.is_array(x) else x, np.float32)


def _used(engine: Engine, *, free: bool = False) -> int:
    """Return the bytes of CuPy's pool, after unused memory is freed if that is asked for."""
    if not engine.gpus:
        return 0
    engine.wait()
    pool = engine.xp.get_default_memory_pool()
    if free:
        pool.free_all_blocks()
    return int(pool.total_bytes())


def rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of all problems."""
    known = CPU_PROBLEMS if given.cpu else PROBLEMS
    chosen = [x for x in known if not given.only or any(text in x.name for text in given.only)]
    if not chosen:
        names = "; ".join(x.name for x in known)
        raise CommandError(f"no name of a problem contains {' or '.join(map(repr, given.only))}; the names are {names}")
    peer = load_peer(on_gpu=not given.cpu) if given.pytorch else None
    count = 0 if given.cpu else int(cupy_runtime.cupy().cuda.runtime.getDeviceCount())
    members = given.members or max(count, 2)
    engine = Engine(members, members if count >= members else min(count, 1))
    if engine.gpus and _is_launched():
        group = connect()
        engine = Engine(group.size, group.size, group)
    link = link_bandwidth(engine)
    for problem in chosen:
        for row in measured_rows(engine, problem, given.methods, link, peer):
            if engine.group is None or engine.group.rank == 0:
                yield row


def load_peer(*, on_gpu: bool) -> MeasurePeer:
    """Return the function that measures PyTorch's context parallelism. Call this before a call of attention loads our cuDNN.

    Raises:
        CommandError: torchrun did not start this process, it uses no GPU, or PyTorch is not installed.
    """
    if not on_gpu or not _is_launched() or environment().launcher != "torchrun":
        start = "torchrun --nproc-per-node N -m benchmarks parallel --pytorch"
        raise CommandError(f"--pytorch needs one process for each GPU, started by torchrun: {start}")
    try:
        from .parallel_pytorch import measure
    except ModuleNotFoundError as error:
        raise CommandError(f"--pytorch needs {error.name}, which is not installed") from error
    return measure


def _is_launched() -> bool:
    """True if a launcher started this process."""
    try:
        environment()
    except RuntimeError:
        return False
    return True


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--members", type=positive, metavar="N", help="number of members (default: the number of GPUs, at least 2)"
    )
    parser.add_argument("--cpu", action="store_true", help="small problems with numpy arrays, to test the benchmark")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only problems whose name contains one of these texts")
    parser.add_argument("--pytorch", action="store_true", help="also measure PyTorch's context parallelism; needs torchrun")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, metavar="METHOD", help="only these methods")


def main(words: Sequence[str]) -> int:
    """Run the benchmark."""
    return runner.run("parallel", __doc__, words, rows, add_options, needs_gpu=lambda given: not given.cpu)
