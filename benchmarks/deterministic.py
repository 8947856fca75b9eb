"""Deterministic gradients: time, workspace, and whether the bits repeat, for each engine that computes them.

    python -m benchmarks deterministic [results.csv]

Times are medians of single calls by CUDA events; the engines are interleaved.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from typing import Any

import cupy

import cupy_sdpa

from .common.device import random_normal
from .common.machine import versions
from .common.script import csv_path, listed, write_csv
from .common.timing import device_ms, interleaved

#: (head dim, query heads, key/value heads, length, causal)
SIZES = [(128, 32, 8, 4096, False), (128, 32, 8, 4096, True), (128, 32, 8, 8192, False), (128, 32, 8, 8192, True)]
ROUNDS, REPEATS = 15, 6


def measure(d: int, hq: int, hkv: int, s: int, causal: bool) -> list[dict[str, Any]]:
    """A row for each engine that this cuDNN has."""
    q, dout = random_normal(d, hq, s, 1), random_normal(d, hq, s, 1)
    k, v = random_normal(d, hkv, s, 1), random_normal(d, hkv, s, 1)
    out, stats = cupy_sdpa.attention(q, k, v, causal=causal, return_stats=True)
    plain = {"causal": causal}
    exact = {**plain, "deterministic": True}
    quadratic = 2 * hq * s * s  # bytes of dS in bfloat16; a smaller limit leaves only the ordered engine
    contenders: dict[str, dict[str, Any]] = {
        "default": plain,
        "quadratic": exact,
        "ordered": {**exact, "max_workspace": quadratic - 1},
    }
    reports = {name: cupy_sdpa.explain(q, k, v, backward=True, **options) for name, options in contenders.items()}
    contenders = {name: options for name, options in contenders.items() if reports[name]}

    def run(name: str) -> tuple[Any, Any, Any]:
        return cupy_sdpa.attention_backward(dout, q, k, v, out, stats, **contenders[name])

    for name in contenders:
        run(name)  # the first call builds the plan and is not timed
    timers = {name: functools.partial(device_ms, [functools.partial(run, name)]) for name in contenders}
    times = interleaved(timers, ROUNDS)
    rows = []
    for name in contenders:
        first = run(name)
        same = [
            all(bool((x.view("u2") == y.view("u2")).all()) for x, y in zip(run(name), first, strict=True))
            for _ in range(REPEATS)
        ]
        report = reports[name]
        rows.append({
            "d": d, "hq": hq, "hkv": hkv, "s": s, "causal": causal, "way": name, "ms": round(statistics.median(times[name]), 3),
            "workspace_bytes": report.workspace, "engine": report.plan and report.plan.engine,
            "same_bits": all(same), **versions(),
        })  # fmt: skip
    return rows


def main(words: Sequence[str]) -> int:
    """Measure, print the rows and write them."""
    path = csv_path("deterministic", __doc__, words)
    rows = []
    for size in SIZES:
        for row in measure(*size):
            rows.append(row)
            print(listed({name: row[name] for name in list(row)[:10]}), flush=True)
        cupy.get_default_memory_pool().free_all_blocks()
    if path:
        write_csv(path, rows)
    return 0
