"""Gradients of short sequences against FlexAttention, kernel by kernel.

    python -m benchmarks small_gradients [results.csv]

The time of every kernel of a backward pass, from CUPTI through PyTorch's profiler, the mean over calls; and of all of them in a
captured CUDA graph, with the gaps between them. Ours runs with cuDNN's default engine and with the deterministic one.
"""

from __future__ import annotations

import collections
import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cupy
import torch
from torch._functorch import config as functorch
from torch.nn.attention.flex_attention import flex_attention
from torch.profiler import ProfilerActivity, profile

import cupy_sdpa

from ..common.captured import CapturedCalls
from ..common.device import as_torch, random_normal
from ..common.machine import versions
from ..common.script import csv_path, listed, write_csv

#: Head dim, heads and batch; and the lengths.
SIZES, LENGTHS = (64, 8, 2), (128, 256, 512)
#: The calls in a profile, in a captured graph, and the launches of the graph.
PROFILED, CAPTURED, LAUNCHES = 20, 20, 30

Call = Callable[[], Any]


def kernels(call: Call) -> dict[str, float]:
    """The mean microseconds of every kernel of a call, by name."""
    for _ in range(5):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(PROFILED):
            call()
        torch.cuda.synchronize()
    found: dict[str, float] = collections.defaultdict(float)
    for event in profiled.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name] += event.device_time / PROFILED
    return dict(found)


def graph_us(call: Call) -> float:
    """The median microseconds of a call within a captured CUDA graph of many."""
    timer = CapturedCalls([call], CAPTURED)
    return statistics.median(timer() for _ in range(LAUNCHES))


def rows(length: int) -> Iterator[dict[str, Any]]:
    """A row for each kernel of each contender, and one for the sum."""
    d, heads, batch = SIZES
    q, k, v, dout = (random_normal(d, heads, length, batch) for _ in range(4))
    out, stats = cupy_sdpa.attention(q, k, v, return_stats=True)
    given = (dout, q, k, v, out, stats)
    dq, dk, dv = (cupy.empty_like(x, order="F") for x in (q, k, v))
    backward = functools.partial(cupy_sdpa.attention_backward, *given, dq=dq, dk=dk, dv=dv)
    functorch.donated_buffer = False  # the backward pass runs several times
    leaves = [as_torch(x).detach().requires_grad_() for x in (q, k, v)]
    result, gradient = torch.compile(flex_attention)(*leaves), as_torch(dout)
    contenders: dict[str, Call] = {
        "cuDNN": backward,
        "cuDNN, deterministic": functools.partial(backward, deterministic=True),
        "FlexAttention": lambda: torch.autograd.grad(result, leaves, gradient, retain_graph=True),
    }
    for contender, call in contenders.items():
        found = kernels(call)
        for name, us in found.items():
            yield {"length": length, "contender": contender, "kernel": name.split("(")[0][:100], "us": round(us, 2)}
        yield {"length": length, "contender": contender, "kernel": "sum", "us": round(sum(found.values()), 2)}
        if contender != "FlexAttention":
            yield {"length": length, "contender": contender, "kernel": "captured", "us": round(graph_us(call), 2)}


def main(words: Sequence[str]) -> int:
    """Measure, print the rows and write them."""
    path = csv_path("small_gradients", __doc__, words)
    used, found = versions(), []
    print(listed(used))
    for length in LENGTHS:
        for row in rows(length):
            found.append(row | used)
            print(listed(row), flush=True)
            if path:
                write_csv(path, found)
    return 0
