"""The cost of plans: built, loaded from disk, built ahead of time; new lengths, with and without buckets.

    python -m benchmarks plans [results.csv] [--ahead FOLDER]

Every first call runs in a new process. ``--ahead`` names a folder of plans built on another machine for the problem of this
benchmark, attention of Llama 3.1 8B; the benchmark checks that they give the same bits as plans built here:

    python -m cupy_sdpa plan 128,32,4096,1 --kv-heads 8 --causal --backward --gpu h200 -o FOLDER

The case "nothing compiled" disables the CUDA driver's cache of compiled kernels on disk, as on a new machine or in a new
container.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cupy

import cupy_sdpa.store
from cupy_sdpa import attention, attention_vjp, get_plan_cache

from . import runner
from .device import random_normal
from .timing import device_ms

#: Query heads, key/value heads and head dim of Llama 3.1 8B.
HQ, HKV, D = 32, 8, 128

_FIRST = """
import ctypes, json, sys, time
from pathlib import Path
begin = time.perf_counter()
import numpy as np, cupy, ml_dtypes
import cupy_sdpa.store
from cupy_sdpa.core.cudnn.library import library
cupy.cuda.runtime.free(0)
rng = np.random.default_rng(0)
def normal(*shape):
    return cupy.asarray(np.asfortranarray(rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)))
s = int(sys.argv[1])
q, k, v, dout = normal(128, 32, s, 1), normal(128, 8, s, 1), normal(128, 8, s, 1), normal(128, 32, s, 1)
cupy.cuda.runtime.deviceSynchronize()
ready = time.perf_counter()
plans = cupy_sdpa.get_plan_cache()                     # loads cuDNN and creates a handle
for name in ("graph", "heuristic", "engines_runtime_compiled", "engines_precompiled", "engines_tensor_ir"):
    path = Path(library().path).with_name(f"libcudnn_{name}.so.9")
    if path.exists():                                  # else cuDNN loads them when the first plan is finalized
        ctypes.CDLL(str(path))
loaded = time.perf_counter()
times = []
def timed(call):
    start = time.perf_counter()
    result = call()
    times.append((time.perf_counter() - start) * 1e3)
    cupy.cuda.runtime.deviceSynchronize()
    times.append((time.perf_counter() - start) * 1e3)
    return result
out, stats = timed(lambda: cupy_sdpa.attention(q, k, v, causal=True, return_stats=True))
dq, dk, dv = timed(lambda: cupy_sdpa.attention_backward(dout, q, k, v, out, stats, causal=True))
got = [p.info for p in plans._entries.values()]        # in order of first use
timed(lambda: cupy_sdpa.attention(q, k, v, causal=True, return_stats=True))
sums = [int(x.view("u2").astype("u8").sum()) for x in (out, dk, dv)]
print(json.dumps({"imports": (ready - begin) * 1e3, "libraries": (loaded - ready) * 1e3, "times": times, "sums": sums,
    "loaded": [info.loaded for info in got], "got": [info.build_ms for info in got]}))
"""


def first_call(folder: str, environment: dict[str, str] | None = None) -> dict[str, Any]:
    """Time the first calls in a new process, with a folder as the disk cache."""
    paths = os.pathsep.join(filter(None, sys.path))
    variables = {**os.environ, "CUPY_SDPA_CACHE_DIR": folder, "PYTHONPATH": paths, **(environment or {})}
    command = [sys.executable, "-c", _FIRST, "4096"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    if done.returncode:
        raise RuntimeError(done.stderr)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def starts(ahead: str | None) -> Iterator[dict[str, Any]]:
    """First calls in new processes: without a disk cache, with one, and with plans built ahead; medians of 5."""
    with tempfile.TemporaryDirectory() as folder:
        first_call(f"{folder}/warm")  # loads all files into the page cache
        kinds: dict[str, tuple[str, dict[str, str]]] = {
            "no disk cache, nothing compiled": ("0", {"CUDA_CACHE_DISABLE": "1"}),
            "no disk cache": ("0", {}),
            "disk cache": (f"{folder}/warm", {"CUDA_CACHE_DISABLE": "1"}),
        }
        if ahead:
            kinds["built ahead"] = (ahead, {"CUDA_CACHE_DISABLE": "1"})
        sums = {}
        for kind, (cache, environment) in kinds.items():
            runs = [first_call(cache, environment) for _ in range(5)]
            assert all(all(run["loaded"]) == (cache != "0") for run in runs), (kind, runs)
            sums[kind] = tuple(runs[0]["sums"])
            loaded = statistics.median(run["libraries"] for run in runs)
            yield value("start", kind, "cuDNN's libraries loaded, handle created", loaded, "ms")
            times = [statistics.median(every) for every in zip(*(run["times"] for run in runs), strict=True)]
            got = [statistics.median(every) for every in zip(*(run["got"] for run in runs), strict=True)]
            for number, what in enumerate(("forward", "backward")):
                yield value("start", kind, f"first {what} call returns", times[2 * number], "ms")
                yield value("start", kind, f"first {what} call done", times[2 * number + 1], "ms")
                yield value("start", kind, f"of which the {what} plan", got[number], "ms")
            yield value("start", kind, "second forward call returns", times[4], "ms")
        assert len(set(sums.values())) == 1, sums
        yield value("start", "all", "give the same bits of out, dk, dv", len(sums), "kinds")


def gpu_us(call: Callable[..., Any], *arguments: Any, count: int = 20, **options: Any) -> float:
    """Microseconds of a call on the GPU, launched back to back: the median of 7 rounds after a warm-up."""
    calls = [functools.partial(call, *arguments, **options)] * count
    return statistics.median([device_ms(calls) * 1e3 for _ in range(8)][1:])


def lengths() -> Iterator[dict[str, Any]]:
    """Forty new lengths: the time of the first call of each, and the time of a call afterwards."""
    new = [3000 + 17 * n for n in range(40)]
    for bucket in (None, 512, "power_of_two"):
        get_plan_cache().clear()
        cupy_sdpa.store.kept().clear()
        waits: dict[str, list[float]] = {"forward": [], "backward": []}
        for length in new:
            q, k, v = random_normal(D, HQ, length, 1), random_normal(D, HKV, length, 1), random_normal(D, HKV, length, 1)
            cupy.cuda.runtime.deviceSynchronize()
            start = time.perf_counter()
            out, pullback = attention_vjp(q, k, v, causal=True, bucket=bucket)
            cupy.cuda.runtime.deviceSynchronize()
            middle = time.perf_counter()
            pullback(out)
            cupy.cuda.runtime.deviceSynchronize()
            waits["forward"].append((middle - start) * 1e3)
            waits["backward"].append((time.perf_counter() - middle) * 1e3)
        kind = f"bucket {bucket}"
        yield value("new lengths", kind, "plans built for 40 lengths, both passes", get_plan_cache().size, "plans")
        for what, every in waits.items():
            yield value("new lengths", kind, f"{what}: median time of a first call", statistics.median(every), "ms")
            yield value("new lengths", kind, f"{what}: total time of the first calls", sum(every), "ms")
    for length in (1000, 3000, 4000, 8000):
        q, k, v = random_normal(D, HQ, length, 1), random_normal(D, HKV, length, 1), random_normal(D, HKV, length, 1)
        for causal in (False, True):
            for bucket in (None, 512):
                out, pullback = attention_vjp(q, k, v, causal=causal, bucket=bucket)
                case = f"{length} {'causal' if causal else 'full'}, bucket {bucket}"
                yield value("cost of a bucket", case, "forward", gpu_us(attention, q, k, v, causal=causal, bucket=bucket), "us")
                yield value("cost of a bucket", case, "backward", gpu_us(pullback, out), "us")


def rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of all parts."""
    os.environ["CUPY_SDPA_CACHE_DIR"] = "0"
    yield from starts(given.ahead)
    yield from lengths()


def value(part: str, case: str, what: str, number: float, unit: str) -> dict[str, Any]:
    """Return a row."""
    return {"part": part, "case": case, "what": what, "value": f"{number:.4g}", "unit": unit}


def main(words: Sequence[str]) -> int:
    """Run the benchmark."""
    return runner.run("plans", __doc__, words, rows, lambda parser: parser.add_argument(
        "--ahead", metavar="FOLDER", help="a folder of plans built ahead of time, see above"
    ))  # fmt: skip
