"""Packed sequences beside PyTorch's ways and cudnn-frontend's: the same arrays, the same run, interleaved; both passes.

    python benchmarks/packed.py [results.csv]

Every way that can run a batch is timed by CUDA events, in an order shuffled in every round, over several sets of random
inputs that together are larger than the L2 cache, behind work that keeps the device busy for longer than the host needs to
prepare the calls; medians. A way counts only with results near those of attention in float32, one sequence at a time, and one
that cannot run is named with its exception. Attention alone is timed: filling padding, repeating heads and undoing both is
done before and after. Host time is the time until the calls return, the device idle.

The file has a row for every batch, pass and way, the left-out ones with their reason. Needs PyTorch beside CuPy, and
cudnn-frontend for its rows. Ends with 1 where our own results are wrong, or no results at all.
"""

from __future__ import annotations

import functools
import inspect
import math
import statistics
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cupy
import numpy as np
import torch
from common import L2_BYTES, device_ms, host_us, interleaved, random_normal, ratio, versions, write_csv
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import cupy_sdpa

DIRECTIONS = ("forward", "backward")
ROUNDS = 25
#: A way that has spent this on one batch and pass gets no more than the fewest rounds.
SECONDS_A_WAY, FEWEST_ROUNDS = 2.5, 4
#: Median host times are of so many turns: our calls come a few times before they are known.
HOST_TURNS = 9
#: A way whose calls take the host longer is timed one call at a time, or not at all: no queue would hide it.
SLOW_HOST_MS, SLOWEST_HOST_MS = 20, 100
#: Largest difference over largest magnitude.
TOLERANCE = 0.02
BUSY_SIZE, BUSY_MS = 4096, 0.15  # a product of two such matrices, at least


class Preset(NamedTuple):
    """Sequences of the field, and the heads over them; sizes in the legend's letters."""

    name: str
    lengths: tuple[int, ...]
    hq: int
    hkv: int
    d: int
    causal: bool
    timed: bool = True

    @property
    def total(self) -> int:
        """Positions of all sequences."""
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        """The length of the longest sequence."""
        return max(self.lengths)

    @property
    def starts(self) -> list[int]:
        """Where each sequence begins and the last one ends."""
        return [sum(self.lengths[:b]) for b in range(len(self.lengths) + 1)]


def mixed(batch: int, shortest: int, longest: int) -> tuple[int, ...]:
    """Random lengths, the same in every run."""
    return tuple(int(s) for s in np.random.default_rng(batch).integers(shortest, longest, batch, endpoint=True))


LONG = (8192 - 1, 8192 - 333, 8192 - 1027, 8192 - 75)
PRESETS = [
    Preset("8 of 512 to 4096 causal", mixed(8, 512, 4096), 32, 8, 128, True),
    Preset("8 of 512 to 4096", mixed(8, 512, 4096), 32, 8, 128, False),
    Preset("16 of 1024 to 2048 64 heads causal", mixed(16, 1024, 2048), 64, 8, 128, True),
    Preset("4 near 8192 causal", LONG, 32, 8, 128, True),
    Preset("32 of 128 to 1024 d64 causal", mixed(32, 128, 1024), 16, 16, 64, True),
    Preset("empty ones among 5 causal", (700, 0, 1333, 64, 0), 8, 2, 128, True, timed=False),
]


class Batch:
    """Random packed arrays, and the same memory as PyTorch sees it, (total, heads, head_dim)."""

    def __init__(self, preset: Preset) -> None:
        sizes = {"q": preset.hq, "k": preset.hkv, "v": preset.hkv, "dout": preset.hq}
        self.arrays = {name: random_normal(preset.d, h, preset.total) for name, h in sizes.items()}
        self.q, self.k, self.v, self.dout = (as_torch(a) for a in self.arrays.values())


def as_torch(array: Any) -> Any:
    """The same memory in C order."""
    return torch.from_dlpack(array.T)


class Ours:
    """cupy_sdpa on CuPy arrays."""

    name = "ours"
    repeats = False

    def __init__(self, preset: Preset, repeated: bool) -> None:
        self.preset = preset
        self.options = options(preset, preset.starts)

    def forward(self, batch: Batch) -> Callable[[], Any]:
        """The call, its results allocated before."""
        q, k, v, _ = batch.arrays.values()
        out = cupy.empty_like(q)
        stats = cupy.empty(q.shape[1:], np.float32, order="F")
        return lambda: cupy_sdpa.attention(q, k, v, **self.options, return_stats=True, out=out, stats=stats)

    def backward(self, batch: Batch) -> Callable[[], Any]:
        """The call, its results allocated before, with those of the forward pass."""
        q, k, v, dout = batch.arrays.values()
        out, stats = cupy_sdpa.attention(q, k, v, **self.options, return_stats=True)
        into = {f"d{name}": cupy.empty_like(x) for name, x in zip("qkv", (q, k, v), strict=True)}
        return lambda: cupy_sdpa.attention_backward(dout, q, k, v, out, stats, **self.options, **into)

    def packed(self, results: Sequence[Any], direction: str) -> list[Any]:
        """What was computed, as PyTorch sees it; without the statistics."""
        return [as_torch(x) for x in (results[:1] if direction == "forward" else results)]

    def facts(self, direction: str, batch: Batch) -> dict[str, Any]:
        """The plan's engine and its workspace."""
        plan = plan_of(batch, self.options, direction)
        return {"engine": str(plan.engine), "workspace_bytes": plan.workspace}


def options(preset: Preset, starts: Sequence[int]) -> dict[str, Any]:
    """The keywords of our calls."""
    cu = cupy.asarray(np.array(starts, np.int32))
    most = preset.longest
    return {
        "causal": preset.causal,
        "cu_seqlens_q": cu,
        "cu_seqlens_kv": cu,
        "max_seqlen_q": most,
        "max_seqlen_kv": most,
    }


def plan_of(batch: Batch, keywords: dict[str, Any], direction: str) -> Any:
    """How a call of ours would run."""
    q, k, v, _ = batch.arrays.values()
    report = cupy_sdpa.explain(q, k, v, **keywords, return_stats=direction == "forward", backward=direction == "backward")
    if report.plan is None:
        raise RuntimeError(str(report))
    return report.plan


class TorchWay:
    """A function of PyTorch and its gradients by autograd; with ``repeated``, every query head has a key head of its own."""

    repeats = True

    def __init__(self, preset: Preset, repeated: bool) -> None:
        self.preset, self.repeated = preset, repeated
        self.group = {"enable_gqa": True} if preset.hq != preset.hkv and not repeated else {}
        self.starts = torch.tensor(preset.starts, dtype=torch.int32, device="cuda")

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        """The function."""
        raise NotImplementedError

    def laid_out(self, x: Any) -> Any:
        """A packed tensor as the function takes it."""
        return x

    def packed_again(self, x: Any) -> Any:
        """The opposite."""
        return x

    def inputs(self, batch: Batch) -> list[Any]:
        """The arguments of the function."""
        count = self.preset.hq // self.preset.hkv if self.repeated else 1
        heads = [batch.q] + [x.repeat_interleave(count, 1) if count > 1 else x for x in (batch.k, batch.v)]
        return [self.laid_out(x) for x in heads]

    def forward(self, batch: Batch) -> Callable[[], Any]:
        """The call."""
        inputs = self.inputs(batch)
        return lambda: (self.attend(*inputs),)

    def backward(self, batch: Batch) -> Callable[[], Any]:
        """The call, after the forward pass."""
        leaves = [x.detach().requires_grad_() for x in self.inputs(batch)]
        with torch.enable_grad():
            result = self.attend(*leaves)
        gradient = self.laid_out(batch.dout)
        return lambda: torch.autograd.grad(result, leaves, gradient, retain_graph=True)

    def packed(self, results: Sequence[Any], direction: str) -> list[Any]:
        """What was computed, packed, over the heads there are."""
        heads = [self.preset.hq] if direction == "forward" else [self.preset.hq, self.preset.hkv, self.preset.hkv]
        tensors = [self.packed_again(x) for x in results]
        return [x.unflatten(1, (h, -1)).float().sum(2) for x, h in zip(tensors, heads, strict=True)]

    def facts(self, direction: str, batch: Batch) -> dict[str, Any]:
        """Nothing is known of it."""
        return {}


class TorchVarlen(TorchWay):
    """``torch.nn.attention.varlen``; it takes fewer key heads as they are, newer versions where they are told to."""

    name = "torch varlen"

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        """The function."""
        from torch.nn.attention.varlen import varlen_attn

        known = inspect.signature(varlen_attn).parameters
        keywords = {name: value for name, value in self.group.items() if name in known}
        if self.preset.causal:
            keywords |= {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
        most = self.preset.longest
        return varlen_attn(q, k, v, self.starts, self.starts, most, most, **keywords)


class TorchVarlenCudnn(TorchWay):
    """The operator by which PyTorch gives packed sequences to cuDNN; PyTorch 2.11 plans anew at every call, on the host."""

    name = "torch varlen cuDNN"

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        """The function."""
        most, starts = self.preset.longest, self.starts
        operator = torch.ops.aten._cudnn_attention_forward
        return operator(q, k, v, None, starts, starts, most, most, True, 0.0, self.preset.causal, False)[0]


class TorchNested(TorchWay):
    """Scaled dot-product attention of jagged nested tensors."""

    name = "torch nested"

    def __init__(self, preset: Preset, repeated: bool) -> None:
        super().__init__(preset, repeated)
        self.starts = self.starts.long()

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        """The function."""
        bounds = {"min_seqlen": min(self.preset.lengths), "max_seqlen": self.preset.longest}
        x = [torch.nested.nested_tensor_from_jagged(t, self.starts, **bounds).transpose(1, 2) for t in (q, k, v)]
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]):
            return scaled_dot_product_attention(*x, is_causal=self.preset.causal, **self.group).transpose(1, 2).values()


class TorchPadded(TorchWay):
    """cuDNN's scaled dot-product attention over padding up to the longest; a bias hides padded keys where nothing else does."""

    name = "torch padded"

    def __init__(self, preset: Preset, repeated: bool) -> None:
        super().__init__(preset, repeated)
        longest = -(-preset.longest // 64) * 64
        lengths = torch.tensor(preset.lengths, device="cuda")
        self.real = torch.arange(longest, device="cuda") < lengths[:, None]
        self.bias = None
        if not preset.causal:
            bias = torch.zeros(len(preset.lengths), 1, longest, longest, dtype=torch.bfloat16, device="cuda")
            self.bias = bias.masked_fill_(~self.real[:, None, None, :], -math.inf)

    def laid_out(self, x: Any) -> Any:
        """With zeros behind every sequence, (batch, heads, longest, head_dim)."""
        padded = x.new_zeros(*self.real.shape, *x.shape[1:])
        padded[self.real] = x
        return padded.transpose(1, 2)

    def packed_again(self, x: Any) -> Any:
        """Without what lies behind the sequences."""
        return x.transpose(1, 2)[self.real]

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        """The function."""
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, self.bias, is_causal=self.preset.causal, **self.group)


@functools.cache
def frontend() -> tuple[Any, Any]:
    """cudnn-frontend, and its handle on PyTorch's stream."""
    import cudnn

    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    return cudnn, handle


class Ragged:
    """A graph of cudnn-frontend over packed tensors: padded in its dimensions, packed by its offsets."""

    def __init__(self, preset: Preset) -> None:
        self.preset = preset
        self.cudnn, self.handle = frontend()
        major, minor = torch.cuda.get_device_capability()
        self.graph = self.cudnn.pygraph(
            io_data_type=self.cudnn.data_type.BFLOAT16,
            intermediate_data_type=self.cudnn.data_type.FLOAT,
            compute_data_type=self.cudnn.data_type.FLOAT,
            handle=self.handle,
            sm_version=10 * major + minor,
        )
        self.named: dict[str, Any] = {}
        self.fixed: list[tuple[Any, Any]] = []  # tensors of the graph that are the same in every batch, and what is in them
        starts = torch.tensor(preset.starts, dtype=torch.int64, device="cuda")
        lengths = torch.tensor(preset.lengths, dtype=torch.int32, device="cuda")
        steps = {"q": preset.hq * preset.d, "kv": preset.hkv * preset.d, "stats": preset.hq}
        self.offsets = {name: self._vector(starts * step) for name, step in steps.items()}
        self.keywords = {
            "attn_scale": preset.d**-0.5,
            "use_padding_mask": True,
            "seq_len_q": self._vector(lengths),
            "seq_len_kv": self._vector(lengths),
            "use_causal_mask": preset.causal,
        }

    def _vector(self, data: Any) -> Any:
        kind = self.cudnn.data_type.INT64 if data.dtype == torch.int64 else self.cudnn.data_type.INT32
        tensor = self.graph.tensor(dim=[len(data), 1, 1, 1], stride=[1, 1, 1, 1], data_type=kind)
        self.fixed.append((tensor, data))
        return tensor

    def _layout(self, name: str) -> tuple[list[int], list[int], Any, Any]:
        """Dimensions, strides, offsets and data type."""
        p = self.preset
        if name == "stats":
            h, d, offsets, kind = p.hq, 1, "stats", self.cudnn.data_type.FLOAT
        elif name in ("k", "v", "dk", "dv"):
            h, d, offsets, kind = p.hkv, p.d, "kv", self.cudnn.data_type.BFLOAT16
        else:
            h, d, offsets, kind = p.hq, p.d, "q", self.cudnn.data_type.BFLOAT16
        return [len(p.lengths), h, p.longest, d], [p.longest * h * d, d, h * d, 1], self.offsets[offsets], kind

    def input(self, name: str) -> Any:
        """A tensor that the graph reads."""
        dim, stride, offsets, kind = self._layout(name)
        self.named[name] = self.graph.tensor(name=name, dim=dim, stride=stride, ragged_offset=offsets, data_type=kind)
        return self.named[name]

    def output(self, name: str, tensor: Any) -> None:
        """A tensor that the graph writes."""
        dim, stride, offsets, kind = self._layout(name)
        tensor.set_output(True).set_dim(dim).set_stride(stride).set_data_type(kind).set_ragged_offset(offsets)
        self.named[name] = tensor

    def build(self) -> None:
        """Plan."""
        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([self.cudnn.heur_mode.A, self.cudnn.heur_mode.FALLBACK])
        self.graph.check_support()
        self.graph.build_plans()
        self.workspace = torch.empty(max(self.graph.get_workspace_size(), 1), dtype=torch.uint8, device="cuda")

    def call(self, data: dict[str, Any], results: Sequence[str]) -> Callable[[], Any]:
        """The call on these arrays."""
        pack = {tensor.get_uid(): x for tensor, x in self.fixed}
        pack |= {self.named[name].get_uid(): x for name, x in data.items()}
        made = tuple(data[name] for name in results)

        def run() -> tuple[Any, ...]:
            self.graph.execute(pack, self.workspace, handle=self.handle)
            return made

        return run


class Frontend:
    """cudnn-frontend's graphs with ragged offsets, and the plans that its heuristics choose."""

    name = "cudnn-frontend"
    repeats = False

    def __init__(self, preset: Preset, repeated: bool) -> None:
        self.preset = preset

    @functools.cached_property
    def first(self) -> Ragged:
        """The forward graph."""
        graph = Ragged(self.preset)
        out, stats = graph.graph.sdpa(**{x: graph.input(x) for x in ("q", "k", "v")}, is_inference=False, **graph.keywords)
        graph.output("out", out)
        graph.output("stats", stats)
        graph.build()
        return graph

    @functools.cached_property
    def second(self) -> Ragged:
        """The backward graph, with workspace for the positions there are."""
        graph = Ragged(self.preset)
        inputs = {key: graph.input(x) for key, x in zip(("q", "k", "v", "o", "dO", "stats"), BACKWARD_INPUTS, strict=True)}
        most = {"max_total_seq_len_q": self.preset.total, "max_total_seq_len_kv": self.preset.total}
        for name, tensor in zip(("dq", "dk", "dv"), graph.graph.sdpa_backward(**inputs, **most, **graph.keywords), strict=True):
            graph.output(name, tensor)
        graph.build()
        return graph

    def _forward(self, batch: Batch) -> tuple[dict[str, Any], Callable[[], Any]]:
        stats = torch.empty(self.preset.total, self.preset.hq, device="cuda")
        data = {"q": batch.q, "k": batch.k, "v": batch.v, "out": torch.empty_like(batch.q), "stats": stats}
        return data, self.first.call(data, ["out"])

    def forward(self, batch: Batch) -> Callable[[], Any]:
        """The call."""
        return self._forward(batch)[1]

    def backward(self, batch: Batch) -> Callable[[], Any]:
        """The call, after the forward pass."""
        data, run = self._forward(batch)
        run()
        into = {f"d{x}": torch.empty_like(data[x]) for x in ("q", "k", "v")}
        return self.second.call({**data, "dout": batch.dout, **into}, list(into))

    def packed(self, results: Sequence[Any], direction: str) -> list[Any]:
        """What was computed."""
        return list(results)

    def facts(self, direction: str, batch: Batch) -> dict[str, Any]:
        """The workspace."""
        graph = self.first if direction == "forward" else self.second
        return {"engine": graph.graph.get_plan_name_at_index(0), "workspace_bytes": graph.graph.get_workspace_size()}


BACKWARD_INPUTS = ("q", "k", "v", "out", "dout", "stats")
WAYS = (Ours, TorchVarlen, TorchVarlenCudnn, TorchNested, TorchPadded, Frontend)


def reference(preset: Preset, batch: Batch) -> dict[str, list[Any]]:
    """Both passes in float32, a sequence and a key head at a time."""
    results = [torch.zeros(x.shape, device="cuda") for x in (batch.q, batch.q, batch.k, batch.v)]
    count = preset.hq // preset.hkv
    for begin, end in zip(preset.starts, preset.starts[1:], strict=False):
        for head in range(preset.hkv if begin < end else 0):
            queries, keys = slice(count * head, count * (head + 1)), slice(head, head + 1)
            x = (batch.q[begin:end, queries], batch.k[begin:end, keys], batch.v[begin:end, keys])
            leaves = [t.float().transpose(0, 1).requires_grad_() for t in x]
            with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
                q, k, v = (t.expand(count, -1, -1) for t in leaves)
                out = scaled_dot_product_attention(q, k, v, is_causal=preset.causal)
            gradients = torch.autograd.grad(out, leaves, batch.dout[begin:end, queries].float().transpose(0, 1))
            for result, of, t in zip(results, (queries, queries, keys, keys), (out.detach(), *gradients), strict=True):
                result[begin:end, of] = t.transpose(0, 1)
    return {"forward": results[:1], "backward": results[1:]}


def farthest(ones: Sequence[Any], others: Sequence[Any]) -> float:
    """The largest difference over the largest magnitude, of the worst pair; NaN where there is one."""
    worst = [(a.float() - b.float()).abs().max() / b.float().abs().max() for a, b in zip(ones, others, strict=True)]
    return float(torch.stack(worst).max())


class Runner(NamedTuple):
    """A way that computes a batch rightly: its calls, one for every set of inputs, and what is known of it."""

    calls: list[Callable[[], Any]]
    results: list[Any]
    error: float
    host_ms: float
    facts: dict[str, Any]


def runner(way: Any, direction: str, batches: Sequence[Batch], wanted: Sequence[Any]) -> Runner:
    """Make the calls, compare the first one's results, and see how long the host takes for a call.

    Raises:
        ArithmeticError: they are not near those in float32.
    """
    calls = [getattr(way, direction)(batch) for batch in batches]
    results = [x.clone() for x in way.packed(calls[0](), direction)]
    error = farthest(results, wanted)
    if not error < TOLERANCE:  # NaN is not
        raise ArithmeticError(f"its results are {error:.3g} of the largest value away from those in float32")
    took = host_us(lambda: [call() for call in calls], HOST_TURNS) / 1000 / len(calls)
    return Runner(calls, results, error, took, way.facts(direction, batches[0]))


def runners(preset: Preset, direction: str, batches: Sequence[Batch], wanted: Any) -> tuple[dict[str, Runner], dict[str, str]]:
    """The ways that can, and why the others cannot; with repeated heads where they need it."""
    able: dict[str, Runner] = {}
    unable: dict[str, str] = {}
    for kind in WAYS:
        for repeated in (False, True) if kind.repeats and preset.hq != preset.hkv else (False,):
            name = f"{kind.name}, repeated heads" if repeated else kind.name
            try:
                able[name] = runner(kind(preset, repeated), direction, batches, wanted)
                break
            except Exception as error:  # whatever it is, the others go on
                unable[name] = f"{type(error).__name__}: {error}"[:1000]
    return able, unable


def times(able: dict[str, Runner]) -> dict[str, list[float]]:
    """The times, interleaved, of the ways that do not keep the host too long."""
    busy = torch.randn(BUSY_SIZE, BUSY_SIZE, dtype=torch.bfloat16, device="cuda")
    names = [name for name, one in able.items() if one.host_ms < SLOWEST_HOST_MS]
    calls = {name: able[name].calls[: 1 if able[name].host_ms > SLOW_HOST_MS else None] for name in names}
    products = {name: 8 + math.ceil(1.5 * able[name].host_ms * len(calls[name]) / BUSY_MS) for name in names}
    timed = {name: functools.partial(device_ms, calls[name], busy, products[name]) for name in names}
    return interleaved(timed, ROUNDS, seconds=SECONDS_A_WAY, fewest=FEWEST_ROUNDS)


def measure(preset: Preset, direction: str, batches: Sequence[Batch], wanted: Sequence[Any]) -> list[dict[str, Any]]:
    """The rows of a preset and a pass, printed as they come."""
    print(f"{preset.name}, {direction}: {preset.total} positions, {preset.hq}/{preset.hkv} heads", flush=True)
    able, unable = runners(preset, direction, batches, wanted)
    taken = times(able) if preset.timed else {}
    ms = {name: statistics.median(values) for name, values in taken.items()}
    ours = able.get(Ours.name)
    best = min((name for name in ms if name != Ours.name), key=ms.__getitem__, default=None)
    over = (2 if direction == "forward" else 5) * preset.d  # useful operations: so many products over the head's dimension
    flops = 2 * preset.hq * sum(s**2 for s in preset.lengths) * over / (2 if preset.causal else 1)
    rows = []
    for name in (*able, *unable):
        row: dict[str, Any] = {
            "name": preset.name,
            "b": len(preset.lengths),
            "total": preset.total,
            "longest": preset.longest,
            "hq": preset.hq,
            "hkv": preset.hkv,
            "d": preset.d,
            "causal": preset.causal,
            "direction": direction,
            "dtype": "bfloat16",
            "way": name,
            **dict.fromkeys(MEASURED),
        }
        if one := able.get(name):
            row |= {"error": round(one.error, 5), "host_us": round(1000 * one.host_ms, 1), **one.facts}
            row["difference_from_ours"] = round(farthest(ours.results, one.results), 5) if ours else None
        if name in ms:
            row |= {"ms": round(ms[name], 4), "tflops": round(flops / ms[name] / 1e9), "best_other": name == best}
            row["ours_over_it"] = round(ratio(taken[Ours.name], taken[name]), 3) if Ours.name in ms else None
        row["left_out"] = unable[name].partition("\n")[0] if name in unable else None
        rows.append(row)
        print(f"  {name:34} {told(row) if name in able else f'left out: {unable[name]}'}", flush=True)
    if best and Ours.name in ms:
        print(f"  ours over the best of the others, {best}: {ratio(taken[Ours.name], taken[best]):.3f}")
    return rows


#: The columns that a way may leave empty.
MEASURED = (
    "ms",
    "tflops",
    "ours_over_it",
    "best_other",
    "host_us",
    "error",
    "difference_from_ours",
    "engine",
    "workspace_bytes",
    "left_out",
)


def told(row: dict[str, Any]) -> str:
    """What is printed of a way."""
    time_of_it = (
        f"{row['ms']:9.4f} ms {row['tflops']:4} TFLOP/s   ours over it {row['ours_over_it']}" if row["ms"] else "not timed"
    )
    plan = f"   engine {row['engine']}, workspace {row['workspace_bytes']}" if row["engine"] else ""
    far = "TOO FAR " if too_far(row) else ""
    return f"{time_of_it}   host {row['host_us']} us   error {row['error']}, {far}from ours {row['difference_from_ours']}{plan}"


def too_far(row: dict[str, Any]) -> bool:
    """Whether our results and a way's are not those of one and the same function."""
    difference = row["difference_from_ours"]
    return difference is not None and not difference < TOLERANCE


def tell_workspace(preset: Preset, batch: Batch) -> None:
    """Print our backward pass's workspace, and that of twice as many sequences over the same positions."""
    wide = sorted({*preset.starts, *((a + b) // 2 for a, b in zip(preset.starts, preset.starts[1:], strict=False))})
    for starts in (preset.starts, wide):
        workspace = plan_of(batch, options(preset, starts), "backward").workspace
        print(f"  workspace of the backward pass: {len(starts) - 1:3} sequences, {preset.total} positions: {workspace} bytes")


def main(path: str | None = None) -> int:
    """Print the times and, where a path is given, write them as CSV; 1 where our results are wrong or missing."""
    used = versions(torch=torch.__version__)
    try:
        cudnn, _ = frontend()
        used["cudnn_frontend"] = f"{cudnn.__version__} with cuDNN {cudnn.backend_version_string()}"
    except Exception as error:  # told again for every batch
        used["cudnn_frontend"] = f"none: {type(error).__name__}"
    print(", ".join(f"{name} {value}" for name, value in used.items()))
    rows: list[dict[str, Any]] = []
    failed = False
    for preset in PRESETS:
        try:
            with torch.no_grad():
                run(preset, rows)
        except Exception:  # the others go on, and what there is gets written
            failed = True
            traceback.print_exc()
        torch.cuda.empty_cache()
        cupy.get_default_memory_pool().free_all_blocks()
    for direction in DIRECTIONS:
        over = [
            row["ours_over_it"] for row in rows if row["direction"] == direction and row["best_other"] and row["ours_over_it"]
        ]
        if over:
            mean = statistics.geometric_mean(over)
            print(f"{direction}: ours over the best of the others {mean:.3f} in the geometric mean, {max(over):.3f} at worst")
    if path and rows:
        write_csv(path, [{**row, **used} for row in rows])
    wrong = any(too_far(row) or (row["left_out"] and row["way"] == Ours.name) for row in rows)
    return int(failed or wrong)


def run(preset: Preset, rows: list[dict[str, Any]]) -> None:
    """Add a preset's rows, both passes."""
    size = 2 * preset.d * (preset.hq + 2 * preset.hkv) * preset.total
    sets = max(2, -(-2 * L2_BYTES // size)) if preset.timed else 1
    batches = [Batch(preset) for _ in range(sets)]
    wanted = reference(preset, batches[0])
    for direction in DIRECTIONS:
        rows += measure(preset, direction, batches, wanted[direction])
    tell_workspace(preset, batches[0])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
