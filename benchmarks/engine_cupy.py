"""``engine="cupy"`` against PyTorch's math backend: time and peak memory, both passes, float32 and float64.

    python -m benchmarks engine_cupy [results.csv]

Times are medians over rounds in shuffled order, by CUDA events. Peak memory is counted by the allocator of each library,
without the inputs. PyTorch's backend stores matrices of size Sq x Skv.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import cupy_sdpa

from . import runner
from .device import as_torch, peak_of, random_normal, timed
from .timing import ratio

ROUNDS, SECONDS = 5, 0.4
LENGTHS = (1024, 4096, 16384)
D, HEADS = 64, 8

Call = Callable[[], Any]


def ours(arrays: Sequence[Any], causal: bool, backward: bool) -> Call:
    """Attention with ``engine="cupy"``."""
    q, k, v = arrays

    def call() -> Any:
        if not backward:
            return cupy_sdpa.attention(q, k, v, causal=causal, engine="cupy")
        out, stats = cupy_sdpa.attention(q, k, v, causal=causal, return_stats=True, engine="cupy")
        return cupy_sdpa.attention_backward(out, q, k, v, out, stats, causal=causal, engine="cupy")

    return call


def pytorch(arrays: Sequence[Any], causal: bool, backward: bool) -> Call:
    """PyTorch's attention on its math backend."""
    inputs = [as_torch(x).contiguous().requires_grad_(backward) for x in arrays]

    def call() -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            out = scaled_dot_product_attention(*inputs, is_causal=causal)
            return torch.autograd.grad(out, inputs, out.detach()) if backward else out

    return call


def rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for every contender of every problem."""
    for dtype, length, causal, backward in itertools.product(("float32", "float64"), LENGTHS, (False, True), (False, True)):
        arrays = [random_normal(D, HEADS, length, 1).astype(dtype) for _ in range(3)]
        calls = {"ours": ours(arrays, causal, backward), "PyTorch, math": pytorch(arrays, causal, backward)}
        found = timed({name: [call] for name, call in calls.items()}, ROUNDS, seconds=SECONDS)
        for name, times in found.items():
            yield {
                "dtype": dtype, "length": length, "causal": causal, "passes": "both" if backward else "forward",
                "contender": name, "ms": round(statistics.median(times), 3),
                "of_ours": round(ratio(times, found["ours"]), 3), "peak_mib": round(peak_of(name, calls[name]) / 2**20, 1),
            }  # fmt: skip


def main(words: Sequence[str]) -> int:
    """Run the benchmark."""
    return runner.run("engine_cupy", __doc__, words, rows)
