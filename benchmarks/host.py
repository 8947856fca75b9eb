"""What a call costs the host, beside PyTorch's, and what each of its steps costs: the budget of the hot path.

    python benchmarks/host.py [results.csv]

The time until a call returns, the device idle before it, in microseconds; medians, ours and PyTorch's in turn. The steps are
timed in loops of their own, so they add up to a little less than a call. ``execute`` is ``cudnnBackendExecute`` with a variant
pack that is ready, on the plan of the same call. A row of calls is the mean of many of which none is waited for, host and
device together, on so many sets of arrays. Needs PyTorch beside CuPy.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
import timeit
from collections.abc import Callable, Iterator
from typing import Any

import cupy
import torch
from common import host_us, interleaved, random_normal, ratio, versions, write_csv
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import cupy_sdpa
from cupy_sdpa._cudnn.constants import AttributeType
from cupy_sdpa._cudnn.descriptor import Descriptor
from cupy_sdpa._cudnn.library import library
from cupy_sdpa.bench.measure import as_torch, busy_matrix
from cupy_sdpa.calls import replay_cache
from cupy_sdpa.device import cuda_graph, cupy_runtime

SHAPE, ROW_SHAPE = (64, 8, 128, 2), (64, 8, 256, 2)
ROUNDS, CALLS = 15, 100
#: A call that has taken so many seconds gets fewer rounds.
SECONDS_A_WAY = 5.0
#: Calls in a row, at least.
ROW = 512
#: Sets of arrays of a row of calls.
SETS = (1, 64)
#: A step is timed in so many loops of so many; the best counts.
LOOPS, STEPS = 5, 20000


class Steps:
    """The steps of a repeated call, each alone; and cuDNN's own function."""

    def __init__(self, q: Any, k: Any, v: Any) -> None:
        self.arrays = (q, k, v, None, None)
        self.out = cupy_sdpa.attention(q, k, v)
        here = replay_cache._runtime
        assert here is not None
        self.here = here
        found = replay_cache._key(here.ndarray, ("forward", False), self.arrays, {})
        session = here.session(cupy_runtime.context_id())
        assert found is not None
        assert session is not None
        self.key, *_ = found
        self.session = session
        self.known = session.known[self.key]
        self.pointers, self.recording = next(iter(self.known._graphs.items()))
        self.plan = self.known.plan

    def each(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Name and step."""
        here, known, key, how = self.here, self.known, self.key, ("forward", False)
        cache = self.session.cache
        (made,) = known._created
        yield "the key: dtypes, shapes and strides", lambda: replay_cache._key(here.ndarray, how, self.arrays, {})
        yield "the context and its session", lambda: here.session(here.context_id(0)[1])
        yield "look the call up", lambda: self.session.known.get(key)
        yield "the current stream", lambda: here.current_stream().ptr
        yield "allocate the output", lambda: here.ndarray(made[0], made[1], here.alloc(made[2]), None, "F")
        yield "look the addresses up", lambda: known._graphs.get(self.pointers)
        yield "of many recordings: is the device behind?", lambda: cuda_graph.is_busy(0)
        yield "the plan cache's lock", lambda: self._locked(cache.lock)

    @staticmethod
    def _locked(lock: Any) -> None:
        with lock:
            pass

    def execute(self) -> Callable[[], Any]:
        """``cudnnBackendExecute`` on the same arrays, with a variant pack that is kept, for :meth:`close` to destroy."""
        launcher = self.plan._launcher
        q, k, v, *_ = self.arrays
        named = {"q": q, "k": k, "v": v, "out": self.out}
        addresses = [named[name].data.ptr for name in self.plan._arrays]
        self.workspace = cupy.cuda.alloc(max(self.plan.info.workspace, 1))
        self.pack = Descriptor("VARIANT_PACK")
        self.pack.set("UNIQUE_IDS", list(launcher._uids))
        self.pack.set("DATA_POINTERS", addresses + list(launcher._addresses)[len(addresses) :], AttributeType.VOID_PTR)
        self.pack.set("WORKSPACE", self.workspace.ptr, AttributeType.VOID_PTR)
        self.pack.finalize()
        handle, plan, pack = self.plan.target.handle.pointer, self.plan._descriptor.pointer, self.pack.pointer
        run = library().cudnnBackendExecute
        return lambda: run(handle, plan, pack)

    def close(self) -> None:
        """Destroy the variant pack."""
        self.pack.close()


def calls() -> tuple[dict[str, Callable[[], Any]], Steps]:
    """What is compared, by name."""
    q, k, v = (random_normal(*SHAPE) for _ in range(3))
    out = cupy.empty_like(q)
    settle(lambda: cupy_sdpa.attention(q, k, v))
    steps = Steps(q, k, v)
    prepared = cupy_sdpa.prepare(q, k, v)
    y, stats = cupy_sdpa.attention(q, k, v, return_stats=True)
    dout = random_normal(*SHAPE)
    into = {f"d{name}": cupy.empty_like(q) for name in "qkv"}
    x = [as_torch(a) for a in (q, k, v)]
    leaves = [t.detach().requires_grad_() for t in x]
    with torch.enable_grad(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        result = scaled_dot_product_attention(*leaves)

    def backend(kind: SDPBackend) -> Callable[[], Any]:
        def call() -> Any:
            return scaled_dot_product_attention(*x)

        def entered() -> float:
            with sdpa_kernel(kind):  # entering it takes longer than the call
                return host_us(call, CALLS)

        return entered

    def ours(call: Callable[[], Any]) -> Callable[[], float]:
        settle(call)
        return lambda: host_us(call, CALLS)

    compared = {
        "attention": ours(lambda: cupy_sdpa.attention(q, k, v)),
        "attention, causal": ours(lambda: cupy_sdpa.attention(q, k, v, causal=True)),
        "attention, out=": ours(lambda: cupy_sdpa.attention(q, k, v, out=out)),
        "prepared, out=": ours(lambda: prepared(q, k, v, out=out)),
        "cudnnBackendExecute": ours(steps.execute()),
        "cuGraphLaunch": ours(lambda: steps.recording.launch(of_many=False)),
        "PyTorch, cuDNN": backend(SDPBackend.CUDNN_ATTENTION),
        "PyTorch, flash": backend(SDPBackend.FLASH_ATTENTION),
        "attention_backward": ours(lambda: cupy_sdpa.attention_backward(dout, q, k, v, y, stats)),
        "attention_backward, dq=, dk=, dv=": ours(lambda: cupy_sdpa.attention_backward(dout, q, k, v, y, stats, **into)),
        "PyTorch's autograd, cuDNN": lambda: host_us(
            lambda: torch.autograd.grad(result, leaves, as_torch(dout), retain_graph=True), CALLS
        ),
        "attention, out=, the device behind": lambda: behind(lambda: cupy_sdpa.attention(q, k, v, out=out)),
        "attention_backward, dq=, dk=, dv=, the device behind": lambda: behind(
            lambda: cupy_sdpa.attention_backward(dout, q, k, v, y, stats, **into)
        ),
        "PyTorch, cuDNN, the device behind": lambda: behind(lambda: scaled_dot_product_attention(*x)),
        "attention, at other addresses": lambda: elsewhere(q, k, v),
        "attention, read": lambda: unread(q, k, v),
    }
    for count in SETS:
        compared |= rows_of_calls(count)
    return compared, steps


def settle(call: Callable[[], Any]) -> None:
    """Call until it is recorded."""
    for _ in range(2 * replay_cache.CAPTURE_AFTER):
        call()
        cupy.cuda.Device().synchronize()


def behind(call: Callable[[], Any]) -> float:
    """A call behind other work: the device is not waiting."""
    busy, _ = busy_matrix()
    times = []
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        for _ in range(CALLS):
            cupy.cuda.Device().synchronize()
            _ = busy @ busy
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def rows_of_calls(count: int) -> dict[str, Callable[[], float]]:
    """Both passes, ours and PyTorch's, one call after the other on so many sets of arrays."""
    options = {"scale": 1 / (7 + count)}  # each row is a call of its own, with its own recordings
    sets = [[random_normal(*ROW_SHAPE) for _ in range(4)] for _ in range(count)]
    forward, backward, theirs, their_backward = [], [], [], []
    for q, k, v, dout in sets:
        out, stats = cupy_sdpa.attention(q, k, v, return_stats=True, **options)
        forward.append(functools.partial(cupy_sdpa.attention, q, k, v, **options))
        backward.append(functools.partial(cupy_sdpa.attention_backward, dout, q, k, v, out, stats, **options))
        x = [as_torch(a) for a in (q, k, v)]
        leaves = [t.detach().requires_grad_() for t in x]
        with torch.enable_grad(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            result = scaled_dot_product_attention(*leaves, **options)
        theirs.append(functools.partial(scaled_dot_product_attention, *x, **options))
        their_backward.append(functools.partial(torch.autograd.grad, result, leaves, as_torch(dout), retain_graph=True))

    def row(calls: list[Callable[[], Any]]) -> Callable[[], float]:
        def timed() -> float:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                cupy.cuda.Device().synchronize()
                begin = time.perf_counter()
                for _ in range(-(-ROW // count)):
                    for call in calls:
                        call()
                cupy.cuda.Device().synchronize()
                return (time.perf_counter() - begin) / (-(-ROW // count) * count) * 1e6

        return timed

    return {
        f"a row of calls, sets {count}": row(forward),
        f"a row of calls, sets {count}, PyTorch": row(theirs),
        f"a row of backward calls, sets {count}": row(backward),
        f"a row of backward calls, sets {count}, PyTorch": row(their_backward),
    }


def elsewhere(q: Any, k: Any, v: Any) -> float:
    """A call whose output is always at another address, as where the caller keeps them all: nothing can be recorded."""
    kept: list[Any] = []
    # With a scale it is another call, so that its many addresses do not take the place of those of the others.
    return host_us(lambda: kept.append(cupy_sdpa.attention(q, k, v, scale=0.1)), CALLS)


def unread(q: Any, k: Any, v: Any) -> float:
    """A call that is read and checked from the beginning: one that names arrays for functions is never known."""
    return host_us(lambda: cupy_sdpa.attention(q, k, v, tensors={}), CALLS)


def peer(name: str) -> str:
    """PyTorch's call that one is compared with: the same in a row of calls or behind other work, else cuDNN's, idle."""
    if name.startswith("a row"):
        return name if name.endswith("PyTorch") else f"{name}, PyTorch"
    if "backward" in name or "autograd" in name:
        return "PyTorch's autograd, cuDNN"
    return "PyTorch, cuDNN, the device behind" if name.endswith("the device behind") else "PyTorch, cuDNN"


def main(path: str | None = None) -> None:
    """Print the times and the budget and, where a path is given, write them as CSV."""
    used = versions(torch=torch.__version__)
    print(", ".join(f"{name} {value}" for name, value in used.items()))
    with torch.no_grad():
        compared, steps = calls()
        taken = interleaved(compared, ROUNDS, seconds=SECONDS_A_WAY)
    rows = []
    for name, times in taken.items():
        us, over = statistics.median(times), ratio(times, taken[peer(name)])
        rows.append({"kind": "call", "name": name, "us": round(us, 2), "over_torch": round(over, 3)})
        print(f"{name:60} {us:8.2f} us   {over:6.3f} of PyTorch's")
    bare = ratio(taken["prepared, out="], taken["cudnnBackendExecute"])
    print(f"prepared over a bare cudnnBackendExecute: {bare:.3f}")
    print("the steps of a repeated call:")
    for name, step in steps.each():
        value = min(timeit.repeat(step, number=STEPS, repeat=LOOPS)) / STEPS * 1e6
        rows.append({"kind": "step", "name": name, "us": round(value, 2), "over_torch": None})
        print(f"  {name:52} {value:6.2f} us")
    steps.close()
    if path:
        write_csv(path, [{**row, **used} for row in rows])


if __name__ == "__main__":
    main(*sys.argv[1:])
