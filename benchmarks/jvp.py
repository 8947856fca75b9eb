"""Directional derivatives against PyTorch's forward-mode differentiation: time, peak memory and accuracy.

    python -m benchmarks jvp [results.csv]

The contenders: this package; this package with arrays that were widened before; ``torch.func.jvp`` in the same dtype, of
PyTorch's attention on its math backend, the only one with a forward-mode derivative, and of attention composed of two products
and a softmax; for scale also our forward pass, and our forward and backward pass. Times are medians over rounds in shuffled
order, by CUDA events. Peak memory is counted by the allocator of each library, without the inputs. The error is relative to
PyTorch's derivative in float32, in the norm, on the first heads.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import cupy
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import cupy_sdpa

from . import runner
from .device import as_torch, busy_matrix, peak_allocation, random_normal
from .timing import Events, host_us, interleaved, ratio

ROUNDS, SECONDS = 9, 0.4
#: PyTorch stores matrices of size Sq x Skv: problems whose matrices take more bytes in float32 are measured without it.
MOST_BYTES = 8 << 30
#: The heads that the error is measured on.
HEADS_COMPARED = 2

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
        """The output and its derivative."""
        return cupy_sdpa.attention_jvp(*self.arrays.values(), **self.given, causal=self.size.causal)

    def widened(self) -> Call:
        """The same from arrays that are widened before."""
        arrays = cupy_sdpa.widen(*self.arrays.values(), **self.given)
        return functools.partial(cupy_sdpa.attention_jvp, *self.arrays.values(), widened=arrays, causal=self.size.causal)

    def forward(self) -> Any:
        """The output only."""
        return cupy_sdpa.attention(*self.arrays.values(), causal=self.size.causal)

    def both_passes(self) -> tuple[Any, ...]:
        """The output and the gradients."""
        q, k, v = self.arrays.values()
        out, stats = cupy_sdpa.attention(q, k, v, causal=self.size.causal, return_stats=True)
        return cupy_sdpa.attention_backward(out, q, k, v, out, stats, causal=self.size.causal)

    def pytorch(self, dtype: Any = torch.bfloat16, heads: slice = slice(None), *, composed: bool = False) -> Call:
        """``torch.func.jvp`` of attention on the math backend, or composed of two products and a softmax."""
        group = self.size.hq // self.size.hkv
        first = {"q": heads, "k": slice(None), "v": slice(None)}
        if heads.stop is not None:
            first |= dict.fromkeys("kv", slice(-(-heads.stop // group)))
        primals, tangents = (
            tuple(as_torch(x[name])[:, first[name]].to(dtype).contiguous() for name in "qkv")
            for x in (self.arrays, self.tangents)
        )
        length = self.size.s
        hidden = torch.ones(length, length, dtype=torch.bool, device="cuda").triu(1) if composed and self.size.causal else None
        moved = [name in self.size.tangents for name in "qkv"]

        def attend(*given: Any) -> Any:
            chosen = iter(given)
            q, k, v = (next(chosen) if one else x for one, x in zip(moved, primals, strict=True))
            if q.shape[1] != k.shape[1]:  # enable_gqa repeats them, too
                k, v = (x.repeat_interleave(group, 1)[:, : q.shape[1]] for x in (k, v))
            if not composed:
                return scaled_dot_product_attention(q, k, v, is_causal=self.size.causal)
            scores = q @ k.transpose(-1, -2) * self.size.d**-0.5
            if self.size.causal:
                scores = scores.masked_fill(hidden, -torch.inf)
            return torch.softmax(scores, -1) @ v

        def call() -> Any:
            with sdpa_kernel(SDPBackend.MATH):
                return torch.func.jvp(
                    attend,
                    tuple(x for x, one in zip(primals, moved, strict=True) if one),
                    tuple(x for x, one in zip(tangents, moved, strict=True) if one),
                )

        return call

    def errors(self) -> tuple[float, float]:
        """The relative errors of our derivative and of PyTorch's in bfloat16."""
        heads = slice(min(HEADS_COMPARED, self.size.hq))
        _, truth = self.pytorch(torch.float32, heads, composed=True)()
        _, theirs = self.pytorch(torch.bfloat16, heads, composed=True)()
        ours = as_torch(self.ours()[1])[:, heads]
        norm = torch.linalg.vector_norm
        return tuple(float(norm(x.float() - truth) / norm(truth)) for x in (ours, theirs))  # type: ignore[return-value]


def pytorch_peak(call: Call) -> int:
    """The peak of the memory that a call allocates in PyTorch's pool."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = call()
    torch.cuda.synchronize()
    del results
    return int(torch.cuda.max_memory_allocated() - before)


def rows_of(size: Size, busy: Any) -> Iterator[dict[str, Any]]:
    """A row for every contender of one problem."""
    problem = Problem(size)
    calls: dict[str, Call] = {
        "attention_jvp": problem.ours, "widened before": problem.widened(), "forward": problem.forward,
        "forward and backward": problem.both_passes,
    }  # fmt: skip
    compared = 4 * size.b * size.hq * size.s * size.s <= MOST_BYTES
    if compared:
        calls |= {"torch.func.jvp, math": problem.pytorch(), "torch.func.jvp, composed": problem.pytorch(composed=True)}
    for name, call in list(calls.items()):
        try:
            for _ in range(4):  # plans, and the captured CUDA graphs of repeated calls
                call()
        except (RuntimeError, NotImplementedError) as error:
            print(f"{size.name}: {name} does not run: {str(error).splitlines()[0][:150]}", flush=True)
            del calls[name]
    times: Mapping[str, Sequence[float]] = interleaved(
        {name: Events([call], busy) for name, call in calls.items()}, ROUNDS, seconds=SECONDS
    )
    peaks = {name: (pytorch_peak if name.startswith("torch") else peak_allocation)(call) for name, call in calls.items()}
    errors = problem.errors() if compared or 4 * HEADS_COMPARED * size.s**2 <= MOST_BYTES // 4 else ("", "")
    for name in calls:
        relative = {"attention_jvp": errors[0], "torch.func.jvp, composed": errors[1]}.get(name, "")
        yield {
            **size._asdict(), "contender": name, "ms": round(statistics.median(times[name]), 4),
            "of_jvp": round(ratio(times[name], times["attention_jvp"]), 3), "peak_mib": round(peaks[name] / 2**20, 1),
            "memory_of_jvp": round(peaks[name] / max(peaks["attention_jvp"], 1), 2),
            "error": f"{relative:.2e}" if relative else "",
            "host_us": "" if name.startswith("torch") else round(host_us(calls[name], 20), 1),
        }  # fmt: skip


def rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of all problems."""
    busy, _ = busy_matrix()
    for size in SIZES:
        try:
            yield from rows_of(size, busy)
        except (cupy.cuda.memory.OutOfMemoryError, torch.OutOfMemoryError) as error:
            print(f"{size.name}: {type(error).__name__}", flush=True)


def main(words: Sequence[str]) -> int:
    """Run the benchmark."""
    return runner.run("jvp", __doc__, words, rows)
