"""What deterministic gradients cost: time, workspace, and whether the bits repeat, for every way to compute them.

    python benchmarks/deterministic.py [results.csv]

Times are medians over single calls by CUDA events; the ways are interleaved.
"""

from __future__ import annotations

import functools
import statistics
import sys
from typing import Any

import cupy
from common import interleaved, random_normal, versions, write_csv

import cupy_sdpa

#: head dim, query heads, key heads, length, causal
SIZES = [(128, 32, 8, 4096, False), (128, 32, 8, 4096, True), (128, 32, 8, 8192, False), (128, 32, 8, 8192, True)]
ROUNDS, REPEATS = 15, 6


def milliseconds(call: Any) -> float:
    """The time of one call on the device."""
    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, stop))


def measure(d: int, hq: int, hkv: int, s: int, causal: bool) -> list[dict[str, Any]]:
    """A row for every way that this cuDNN has."""
    q, dout = random_normal(d, hq, s, 1), random_normal(d, hq, s, 1)
    k, v = random_normal(d, hkv, s, 1), random_normal(d, hkv, s, 1)
    out, stats = cupy_sdpa.attention(q, k, v, causal=causal, return_stats=True)
    plain = {"causal": causal}
    exact = {**plain, "deterministic": True}
    quadratic = 2 * hq * s * s  # bytes of dS in bfloat16: a limit below it leaves the ordered engine
    ways = {"default": plain, "quadratic": exact, "ordered": {**exact, "max_workspace": quadratic - 1}}
    reports = {name: cupy_sdpa.explain(q, k, v, backward=True, **options) for name, options in ways.items()}
    ways = {name: options for name, options in ways.items() if reports[name]}

    def run(name: str) -> tuple[Any, Any, Any]:
        return cupy_sdpa.attention_backward(dout, q, k, v, out, stats, **ways[name])

    for name in ways:
        run(name)  # what is made for the first call is not timed
    times = interleaved({name: functools.partial(milliseconds, functools.partial(run, name)) for name in ways}, ROUNDS)
    rows = []
    for name in ways:
        first = run(name)
        same = [
            all(bool((x.view("u2") == y.view("u2")).all()) for x, y in zip(run(name), first, strict=True))
            for _ in range(REPEATS)
        ]
        report = reports[name]
        rows.append({
            "d": d, "hq": hq, "hkv": hkv, "s": s, "causal": causal, "way": name, "ms": round(statistics.median(times[name]), 3),
            "workspace_bytes": report.workspace, "engine": report.plan.engine, "same_bits": all(same), **versions(),
        })  # fmt: skip
    return rows


def main(path: str | None = None) -> None:
    """Print the table and, where a path is given, write it as CSV."""
    rows = []
    for size in SIZES:
        for row in measure(*size):
            rows.append(row)
            print(", ".join(f"{name} {row[name]}" for name in list(row)[:10]), flush=True)
        cupy.get_default_memory_pool().free_all_blocks()
    if path:
        write_csv(path, rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
