"""Directional derivatives against PyTorch's forward-mode differentiation: time and peak memory.

    python -m benchmarks jvp [results.csv]

The contenders: this package; this package with arrays that were widened before; ``torch.func.jvp`` in the same dtype, of
PyTorch's attention on its math backend, the only one with a forward-mode derivative; for scale also our forward pass, and our
forward and backward pass. Times are medians over rounds in shuffled order, by CUDA events. Peak memory is counted by the
allocator of each library, without the inputs.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import cupy_sdpa

from . import runner
from .device import as_torch, peak_of, random_normal, timed
from .timing import host_us, ratio

ROUNDS, SECONDS = 9, 0.4
#: PyTorch stores matrices of size Sq x Skv: problems whose matrices take more bytes in float32 are measured without it.
MOST_BYTES = 8 << 30

Call = Callable[[], Any]


class Size(NamedTuple):
    """A problem, bfloat16."""

    name: str
    d: int
    hq: int
    hkv: int
    s: int
    b: int
    causal: bool = False
    tangents: str = "qkv"


SIZES = (
    Size("image, 1k", 64, 16, 16, 1024, 8),
    Size("image, 4k", 64, 16, 16, 4096, 1),
    Size("head dim 72", 72, 16, 16, 4096, 1),
    Size("causal, 4k", 128, 16, 16, 4096, 1, causal=True),
    Size("grouped heads, 4k", 128, 32, 8, 4096, 1),
    Size("dq only", 64, 16, 16, 4096, 1, tangents="q"),
    Size("dv only", 64, 16, 16, 4096, 1, tangents="v"),
    Size("32k", 128, 16, 16, 32768, 1, causal=True),
)


class Problem:
    """The arrays of a problem."""

    def __init__(self, size: Size) -> None:
        self.size = size
        heads = {"q": size.hq, "k": size.hkv, "v": size.hkv}
        self.arrays, self.tangents = (
            {name: random_normal(size.d, count, size.s, size.b) for name, count in heads.items()} for _ in range(2)
        )
        self.given = {f"d{name}": self.tangents[name] for name in size.tangents}

    def ours(self) -> tuple[Any, ...]:
        """Return the output and its derivative."""
        return cupy_sdpa.attention_jvp(*self.arrays.values(), **self.given, causal=self.size.causal)

    def widened(self) -> Call:
        """Return the same from arrays that are widened before."""
        arrays = cupy_sdpa.widen(*self.arrays.values(), **self.given)
        return functools.partial(cupy_sdpa.attention_jvp, *self.arrays.values(), widened=arrays, causal=self.size.causal)

    def forward(self) -> Any:
        """Return the output only."""
        return cupy_sdpa.attention(*self.arrays.values(), causal=self.size.causal)

    def both_passes(self) -> tuple[Any, ...]:
        """Return the output and the gradients."""
        q, k, v = self.arrays.values()
        out, stats = cupy_sdpa.attention(q, k, v, causal=self.size.causal, return_stats=True)
        return cupy_sdpa.attention_backward(out, q, k, v, out, stats, causal=self.size.causal)

    def pytorch(self) -> Call:
        """``torch.func.jvp`` of attention on the math backend."""
        primals, tangents = (tuple(as_torch(x[name]).contiguous() for name in "qkv") for x in (self.arrays, self.tangents))
        moved = [name in self.size.tangents for name in "qkv"]
        group = self.size.hq // self.size.hkv

        def attend(*given: Any) -> Any:
            chosen = iter(given)
            q, k, v = (next(chosen) if one else x for one, x in zip(moved, primals, strict=True))
            if group > 1:  # enable_gqa also repeats them
                k, v = (x.repeat_interleave(group, 1) for x in (k, v))
            return scaled_dot_product_attention(q, k, v, is_causal=self.size.causal)

        arguments = [tuple(x for x, one in zip(several, moved, strict=True) if one) for several in (primals, tangents)]

        def call() -> Any:
            with sdpa_kernel(SDPBackend.MATH):
                return torch.func.jvp(attend, *arguments)

        return call


def rows_of(size: Size) -> Iterator[dict[str, Any]]:
    """Yield a row for every contender of one problem."""
    problem = Problem(size)
    calls: dict[str, Call] = {
        "attention_jvp": problem.ours, "widened before": problem.widened(), "forward": problem.forward,
        "forward and backward": problem.both_passes,
    }  # fmt: skip
    if 4 * size.b * size.hq * size.s * size.s <= MOST_BYTES:
        calls["torch.func.jvp, math"] = problem.pytorch()
    found = timed({name: [call] for name, call in calls.items()}, ROUNDS, seconds=SECONDS)
    peaks = {name: peak_of(name, calls[name]) for name in found}
    for name, times in found.items():
        yield {
            **size._asdict(), "contender": name, "ms": round(statistics.median(times), 4),
            "of_jvp": round(ratio(times, found["attention_jvp"]), 3), "peak_mib": round(peaks[name] / 2**20, 1),
            "memory_of_jvp": round(peaks[name] / max(peaks["attention_jvp"], 1), 2),
            "host_us": "" if name.startswith("torch") else round(host_us(calls[name], 20), 1),
        }  # fmt: skip


def rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of all problems."""
    for size in SIZES:
        yield from rows_of(size)


def main(words: Sequence[str]) -> int:
    """Run the benchmark."""
    return runner.run("jvp", __doc__, words, rows)
