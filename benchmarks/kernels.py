"""Kernel times beside PyTorch's cuDNN SDPA: the same arrays, the same run, interleaved; forward and backward.

    python benchmarks/kernels.py [results.csv]

Every preset is timed by CUDA events, ours and PyTorch's in turn, over several sets of random inputs that together are
larger than the L2 cache, behind work that keeps the device busy while the host prepares the calls; medians. Host time is
the time until the call returns, the device idle. Needs PyTorch beside CuPy.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import cupy
import torch
from common import random_normal, versions, write_csv
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import cupy_sdpa


class Preset(NamedTuple):
    """A problem of the field; sizes in the legend's letters."""

    name: str
    b: int
    hq: int
    hkv: int
    s: int
    d: int
    dv: int
    causal: bool


PRESETS = [
    Preset("llama3 70B heads 2k", 1, 64, 8, 2048, 128, 128, False),
    Preset("llama3 70B heads 2k causal", 1, 64, 8, 2048, 128, 128, True),
    Preset("llama3 70B heads 8k", 1, 64, 8, 8192, 128, 128, False),
    Preset("llama3 70B heads 8k causal", 1, 64, 8, 8192, 128, 128, True),
    Preset("llama3 70B heads 16k", 1, 64, 8, 16384, 128, 128, False),
    Preset("llama3 70B heads 16k causal", 1, 64, 8, 16384, 128, 128, True),
    Preset("16 heads 2k", 4, 16, 16, 2048, 128, 128, False),
    Preset("16 heads 2k causal", 4, 16, 16, 2048, 128, 128, True),
    Preset("d64 4k", 4, 16, 16, 4096, 64, 64, False),
    Preset("d64 4k causal", 4, 16, 16, 4096, 64, 64, True),
    Preset("MLA 192/128 4k causal", 1, 128, 128, 4096, 192, 128, True),
    Preset("d256 4k causal", 1, 32, 8, 4096, 256, 256, True),
]
ROUNDS = 30
L2_BYTES = 60 << 20


def inputs(preset: Preset) -> list[list[Any]]:
    """Sets of random q, k, v, together at least twice the L2 cache."""
    shapes = [(preset.d, preset.hq), (preset.d, preset.hkv), (preset.dv, preset.hkv)]
    size = sum(2 * d * h * preset.s * preset.b for d, h in shapes)
    sets = max(2, -(-2 * L2_BYTES // size))
    return [[random_normal(d, h, preset.s, preset.b) for d, h in shapes] for _ in range(sets)]


def as_torch(array: Any) -> Any:
    """The same memory as PyTorch sees it, (batch, heads, seq, head_dim)."""
    return torch.from_dlpack(array).permute(3, 1, 2, 0)


def device_ms(calls: Sequence[Any], busy: Any, products: int = 8) -> float:
    """The mean time of the calls on the device, by events, behind as many products as hide the host's time."""
    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    for _ in range(products):
        torch.mm(busy, busy)
    start.record()
    for call in calls:
        call()
    stop.record()
    stop.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, stop)) / len(calls)


def host_us(call: Any, count: int = 200) -> float:
    """The median time until a call returns, with an idle device."""
    times = []
    for _ in range(count):
        cupy.cuda.Device().synchronize()
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def backward_calls(x: list[Any], y: list[Any], causal: bool, group: dict[str, bool]) -> tuple[Any, Any, float]:
    """Our gradients and PyTorch's of the same arrays, and the largest difference."""
    dout = random_normal(x[2].shape[0], *x[0].shape[1:])
    out, stats = cupy_sdpa.attention(*x, causal=causal, return_stats=True)
    leaves = [t.detach().requires_grad_() for t in y]
    with torch.enable_grad():
        result = scaled_dot_product_attention(*leaves, is_causal=causal, **group)
    gradient = as_torch(dout)

    def ours() -> Any:
        return cupy_sdpa.attention_backward(dout, *x, out, stats, causal=causal)

    def theirs() -> Any:
        return torch.autograd.grad(result, leaves, gradient, retain_graph=True)

    pairs = zip(ours(), theirs(), strict=True)
    return ours, theirs, max((as_torch(a).float() - b.float()).abs().max().item() for a, b in pairs)


def measure(preset: Preset, direction: str) -> dict[str, Any]:
    """One row of the table."""
    sets = inputs(preset)
    causal = preset.causal
    group = {"enable_gqa": True} if preset.hq != preset.hkv else {}
    torches = [[as_torch(a) for a in x] for x in sets]
    if direction == "forward":
        ours = [lambda x=x: cupy_sdpa.attention(*x, causal=causal) for x in sets]
        theirs = [lambda x=x: scaled_dot_product_attention(*x, is_causal=causal, **group) for x in torches]
        difference = (as_torch(ours[0]()).float() - theirs[0]().float()).abs().max().item()
    else:
        calls = [backward_calls(x, y, causal, group) for x, y in zip(sets, torches, strict=True)]
        ours, theirs = [c[0] for c in calls], [c[1] for c in calls]
        difference = max(c[2] for c in calls)
    busy = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")  # 0.2 ms a product
    for _ in range(3):
        device_ms(ours, busy), device_ms(theirs, busy)
    times: dict[str, list[float]] = {"ours": [], "torch": []}
    for turn in range(ROUNDS):
        order = [("ours", ours), ("torch", theirs)]
        for name, timed in order if turn % 2 else order[::-1]:
            times[name].append(device_ms(timed, busy))
    ms, torch_ms = (statistics.median(times[name]) for name in ("ours", "torch"))
    # Useful operations: two products forward; backward five, three of them over D and two over Dv.
    over = (preset.d + preset.dv) if direction == "forward" else (3 * preset.d + 2 * preset.dv)
    flops = 2 * preset.b * preset.hq * preset.s**2 * over / (2 if causal else 1)
    report = cupy_sdpa.explain(*sets[0], causal=causal, backward=direction == "backward")
    assert report.plan is not None
    return {
        **preset._asdict(),
        "direction": direction,
        "dtype": "bfloat16",
        "ms": round(ms, 4),
        "tflops": round(flops / ms / 1e9),
        "torch_ms": round(torch_ms, 4),
        "ratio": round(ms / torch_ms, 3),
        "max_difference": round(difference, 5),
        "engine": report.plan.engine,
        "workspace_bytes": report.plan.workspace,
        "build_ms": round(report.plan.build_ms),
    }


def main(path: str | None = None) -> None:
    """Print the table and, where a path is given, write it as CSV."""
    used = versions(torch=torch.__version__)
    print(", ".join(f"{name} {value}" for name, value in used.items()))
    rows = []
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), torch.no_grad():
        for direction, preset in itertools.product(("forward", "backward"), PRESETS):
            rows.append(measure(preset, direction))
            row = rows[-1]
            cupy.get_default_memory_pool().free_all_blocks()
            torch.cuda.empty_cache()
            print(
                f"{direction:8} {preset.name:28} {row['ms']:8.4f} ms {row['tflops']:4} TFLOP/s   "
                f"torch {row['torch_ms']:8.4f} ms   ratio {row['ratio']:.3f}   engine {row['engine']}",
                flush=True,
            )
        small = [random_normal(64, 8, 128, 2) for _ in range(3)]
        out = cupy.empty_like(small[0])
        views = [as_torch(a) for a in small]
        host = {
            "host_us": host_us(lambda: cupy_sdpa.attention(*small)),
            "host_out_us": host_us(lambda: cupy_sdpa.attention(*small, out=out)),
            "torch_host_us": host_us(lambda: scaled_dot_product_attention(*views)),
        }
    print("host time of a small call, median:", ", ".join(f"{name} {value:.1f}" for name, value in host.items()))
    for direction in ("forward", "backward"):
        ratios = [row["ratio"] for row in rows if row["direction"] == direction]
        print(
            f"{direction}: ours over PyTorch's {statistics.geometric_mean(ratios):.3f} in the geometric mean, "
            f"{max(ratios):.3f} at worst"
        )
    if path:
        rounded = {name: round(value, 1) for name, value in host.items()}
        write_csv(path, [{**row, **used, **rounded} for row in rows])


if __name__ == "__main__":
    main(*sys.argv[1:])
