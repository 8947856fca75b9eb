"""Host time (launch overhead) of a call against PyTorch's, and of each step of a repeated call.

    python -m benchmarks host [results.csv]

Median microseconds until a call returns, on an idle device, our calls and PyTorch's interleaved. The steps are timed in
separate loops, so their sum is a little less than a call. ``cudnnBackendExecute`` runs the plan of the same call with a
finished variant pack. A sequence of calls is many calls without synchronization, on the given number of array sets; its time
is the mean of host and device together. ``host_options`` measures every option. Needs PyTorch besides CuPy.
"""

from __future__ import annotations

import functools
import statistics
import time
import timeit
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cupy
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import cupy_sdpa
from cupy_sdpa import zoo
from cupy_sdpa._cudnn.constants import AttributeType
from cupy_sdpa._cudnn.descriptor import Descriptor
from cupy_sdpa._cudnn.library import library
from cupy_sdpa.calls import call_key, replay_cache
from cupy_sdpa.device import cuda_graph, driver

from .common.device import as_torch, busy_matrix, random_normal
from .common.machine import versions
from .common.script import csv_path, listed, write_csv
from .common.timing import host_us, interleaved, ratio

SHAPE, SEQUENCE_SHAPE = (64, 8, 128, 2), (64, 8, 256, 2)
ROUNDS, CALLS = 15, 100
#: A call that has used this many seconds gets fewer rounds.
SECONDS_PER_CALL = 5.0
#: The least number of calls in a sequence.
SEQUENCE = 512
#: The numbers of array sets in a sequence of calls.
SETS = (1, 64)
#: A step is timed in this many loops of this many repetitions; the best loop counts.
LOOPS, STEPS = 5, 20000


class Steps:
    """The separate steps of a repeated call, and ``cudnnBackendExecute``."""

    def __init__(self, q: Any, k: Any, v: Any) -> None:
        self.arrays = (q, k, v)
        self.out = cupy_sdpa.attention(q, k, v)
        here = replay_cache._runtime
        assert here is not None
        self.here = here
        found = call_key.read_key(here, ("forward", False, False), self.arrays, {})
        session = here.session(driver.context_id())
        assert found is not None
        assert session is not None
        self.key, *_ = found
        self.session = session
        self.known = session.cached_calls[self.key]
        self.pointers, self.recording = next(iter(self.known._graphs.items()))
        (self.plan,) = self.known.plans

    def each(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        """The name and the function of each step."""
        here, known, key, how = self.here, self.known, self.key, ("forward", False, False)
        cache = self.session.cache
        (made,) = known._created
        yield "the key: dtypes, shapes and strides", lambda: call_key.read_key(here, how, self.arrays, {})
        yield "the context and its session", lambda: here.session(here.context_id(0)[1])
        yield "look up the call", lambda: self.session.cached_calls.get(key)
        yield "the current stream", lambda: here.current_stream().ptr
        yield "allocate the output", lambda: here.array(made[0], made[1], here.alloc(made[2]))
        yield "look up the addresses", lambda: known._graphs.get(self.pointers)
        yield "with many captured graphs: is the device busy?", lambda: cuda_graph.is_busy(0)
        yield "the plan cache's lock", lambda: self._locked(cache.lock)

    @staticmethod
    def _locked(lock: Any) -> None:
        lock.acquire()
        lock.release()

    def execute(self) -> Callable[[], Any]:
        """``cudnnBackendExecute`` on the same arrays with one variant pack, which :meth:`close` destroys."""
        launcher = self.plan._launcher
        q, k, v = self.arrays
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
    """The timers of all calls by name."""
    q, k, v = (random_normal(*SHAPE) for _ in range(3))
    out = cupy.empty_like(q)
    settle(lambda: cupy_sdpa.attention(q, k, v))
    steps = Steps(q, k, v)
    prepared = cupy_sdpa.prepare(q, k, v)
    y, stats = cupy_sdpa.attention(q, k, v, return_stats=True)
    dout = random_normal(*SHAPE)
    into = {f"d{name}": cupy.empty_like(q) for name in "qkv"}
    slopes = cupy.asarray(cupy_sdpa.alibi_slopes(q.shape[1]))
    x = [as_torch(a) for a in (q, k, v)]
    leaves = [t.detach().requires_grad_() for t in x]
    with torch.enable_grad(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        result = scaled_dot_product_attention(*leaves)

    def backend(kind: SDPBackend) -> Callable[[], Any]:
        def call() -> Any:
            return scaled_dot_product_attention(*x)

        def timer() -> float:
            with sdpa_kernel(kind):  # outside the timed call, because entering it takes longer than the call
                return host_us(call, CALLS)

        return timer

    def ours(call: Callable[[], Any]) -> Callable[[], float]:
        settle(call)
        return lambda: host_us(call, CALLS)

    compared = {
        "attention": ours(lambda: cupy_sdpa.attention(q, k, v)),
        "attention, causal": ours(lambda: cupy_sdpa.attention(q, k, v, causal=True)),
        "attention, out=": ours(lambda: cupy_sdpa.attention(q, k, v, out=out)),
        "attention, score_mod=zoo.softcap(30.0), out=": ours(
            lambda: cupy_sdpa.attention(q, k, v, score_mod=zoo.softcap(30.0), out=out)
        ),
        "attention, score_mod=zoo.alibi, out=": ours(
            lambda: cupy_sdpa.attention(q, k, v, score_mod=zoo.alibi, tensors={"slopes": slopes}, out=out)
        ),
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
        "attention, out=, the device busy": lambda: on_busy_device(lambda: cupy_sdpa.attention(q, k, v, out=out)),
        "attention_backward, dq=, dk=, dv=, the device busy": lambda: on_busy_device(
            lambda: cupy_sdpa.attention_backward(dout, q, k, v, y, stats, **into)
        ),
        "PyTorch, cuDNN, the device busy": lambda: on_busy_device(lambda: scaled_dot_product_attention(*x)),
        "attention, new addresses": lambda: new_addresses(q, k, v),
        "attention, not cached": lambda: not_cached(q, k, v),
    }
    for count in SETS:
        compared |= sequences(count)
    return compared, steps


def settle(call: Callable[[], Any]) -> None:
    """Repeat a call until its CUDA graph is captured."""
    for _ in range(2 * replay_cache.CAPTURE_AFTER):
        call()
        cupy.cuda.Device().synchronize()


def on_busy_device(call: Callable[[], Any]) -> float:
    """The host time of a call after other work, while the device is busy."""
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


def sequences(count: int) -> dict[str, Callable[[], float]]:
    """The timers of sequences of calls on ``count`` array sets, both passes, ours and PyTorch's."""
    options: dict[str, Any] = {"scale": 1 / (7 + count)}  # another scale, so that each sequence has its own captured graphs
    sets = [[random_normal(*SEQUENCE_SHAPE) for _ in range(4)] for _ in range(count)]
    forward, backward, torch_forward, torch_backward = [], [], [], []
    for q, k, v, dout in sets:
        out, stats = cupy_sdpa.attention(q, k, v, return_stats=True, **options)
        forward.append(functools.partial(cupy_sdpa.attention, q, k, v, **options))
        backward.append(functools.partial(cupy_sdpa.attention_backward, dout, q, k, v, out, stats, **options))
        x = [as_torch(a) for a in (q, k, v)]
        leaves = [t.detach().requires_grad_() for t in x]
        with torch.enable_grad(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            result = scaled_dot_product_attention(*leaves, **options)
        torch_forward.append(functools.partial(scaled_dot_product_attention, *x, **options))
        torch_backward.append(functools.partial(torch.autograd.grad, result, leaves, as_torch(dout), retain_graph=True))

    def sequence(calls: Sequence[Callable[[], Any]]) -> Callable[[], float]:
        def timer() -> float:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                cupy.cuda.Device().synchronize()
                begin = time.perf_counter()
                for _ in range(-(-SEQUENCE // count)):
                    for call in calls:
                        call()
                cupy.cuda.Device().synchronize()
                return (time.perf_counter() - begin) / (-(-SEQUENCE // count) * count) * 1e6

        return timer

    return {
        f"a sequence of calls, sets {count}": sequence(forward),
        f"a sequence of calls, sets {count}, PyTorch": sequence(torch_forward),
        f"a sequence of backward calls, sets {count}": sequence(backward),
        f"a sequence of backward calls, sets {count}, PyTorch": sequence(torch_backward),
    }


def new_addresses(q: Any, k: Any, v: Any) -> float:
    """A call whose output always has a new address, because the caller keeps all outputs: no CUDA graph can be replayed."""
    outputs: list[Any] = []
    # The scale makes it another call in the replay cache, so that its addresses do not evict those of the other calls.
    return host_us(lambda: outputs.append(cupy_sdpa.attention(q, k, v, scale=0.1)), CALLS)


def not_cached(q: Any, k: Any, v: Any) -> float:
    """A call whose arguments are parsed every time: only dictionaries of arrays are part of a key."""
    return host_us(lambda: cupy_sdpa.attention(q, k, v, tensors=types.MappingProxyType({})), CALLS)


def peer(name: str) -> str:
    """The PyTorch call to compare with: the same sequence or the one on a busy device, else its cuDNN backend."""
    if name.startswith("a sequence"):
        return name if name.endswith("PyTorch") else f"{name}, PyTorch"
    if "backward" in name or "autograd" in name:
        return "PyTorch's autograd, cuDNN"
    return "PyTorch, cuDNN, the device busy" if name.endswith("the device busy") else "PyTorch, cuDNN"


def main(words: Sequence[str]) -> int:
    """Measure, print the times and write them."""
    path = csv_path("host", __doc__, words)
    used = versions(torch=torch.__version__)
    print(listed(used))
    with torch.no_grad():
        compared, steps = calls()
        measured = interleaved(compared, ROUNDS, seconds=SECONDS_PER_CALL)
    rows = []
    for name, times in measured.items():
        us, over = statistics.median(times), ratio(times, measured[peer(name)])
        rows.append({"kind": "call", "name": name, "us": round(us, 2), "over_torch": round(over, 3)})
        print(f"{name:60} {us:8.2f} us   {over:6.3f} of PyTorch's")
    bare = ratio(measured["prepared, out="], measured["cudnnBackendExecute"])
    print(f"prepared call / cudnnBackendExecute: {bare:.3f}")
    print("the steps of a repeated call:")
    for name, step in steps.each():
        value = min(timeit.repeat(step, number=STEPS, repeat=LOOPS)) / STEPS * 1e6
        rows.append({"kind": "step", "name": name, "us": round(value, 2), "over_torch": None})
        print(f"  {name:52} {value:6.2f} us")
    steps.close()
    if path:
        write_csv(path, [{**row, **used} for row in rows])
    return 0
