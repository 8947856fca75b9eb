"""A single query: which of cuDNN's kernels are right for it, and how fast, with and without positions read from memory.

    python benchmarks/one_query.py [results.csv]

For each problem and option, each engine config that the heuristics propose is run twice: with the graph that computes the
positions of keys, and with the graph that reads them from memory (the guard ``positions``). The file has the engine, its knobs,
whether it splits the keys, the largest error of the output beside numpy's in float64 (for one batch entry), and the time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import cupy
import numpy as np
from common import random_normal, versions, write_csv
from cupyx.profiler import benchmark

from cupy_sdpa.calls.arguments import read_forward
from cupy_sdpa.device import cupy_runtime
from cupy_sdpa.graph.patterns import forward
from cupy_sdpa.plans.engines import knobs_text, splits_keys
from cupy_sdpa.plans.plan import Plan, SerializedPlan, Target, searching
from cupy_sdpa.plans.plan_cache import session

#: Batch, query heads, key heads, head dim, keys.
PROBLEMS = ((1, 32, 8, 128, 32768), (8, 32, 8, 128, 8192), (32, 32, 8, 128, 4096), (4, 32, 32, 64, 4096), (8, 18, 3, 64, 163))
GUARDS = (frozenset[str](), frozenset({"positions"}))
#: Without the guard the kernel that splits the keys writes beyond its memory for these; it is left out.
DEADLY = ("dropout",)


def options(heads: int) -> dict[str, tuple[dict[str, Any], Any]]:
    """Options by name, and what they make of the scores ``(Hq, Skv)`` with the indices of both axes; None for random ones."""
    slopes = np.linspace(0.01, 0.1, heads).astype(np.float32)
    return {
        "none": ({}, lambda s, h, j: s),
        "alibi_slopes": ({"alibi_slopes": cupy.asarray(slopes)}, lambda s, h, j: s - slopes[h] * j),
        "score_mod": ({"score_mod": lambda s, b, h, i, j: s + 0.001 * j}, lambda s, h, j: s + 0.001 * j),
        "mask_mod": ({"mask_mod": lambda b, h, i, j: j % 3 == 0}, lambda s, h, j: np.where(j % 3 == 0, s, -np.inf)),
        "sinks": ({"sinks": cupy.full(heads, -50, np.float32)}, lambda s, h, j: s),
        "dropout": ({"dropout_p": 0.1, "seed": 1}, None),
    }


def truth(q: Any, k: Any, v: Any, modify: Any) -> Any:
    """The output of the first batch entry, by numpy in float64, ``(D, Hq)``."""
    q, k, v = (x[..., 0].get().astype(np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    s = modify(np.einsum("dh,dhk->hk", q[:, :, 0], k) / q.shape[0] ** 0.5, *np.ogrid[: q.shape[1], : k.shape[2]])
    p = np.exp(s - s.max(1, keepdims=True))
    return np.einsum("hk,dhk->dh", p / p.sum(1, keepdims=True), v)


def rows() -> Iterator[dict[str, Any]]:
    """A row for each problem, option, graph and engine config."""
    target = Target(cupy_runtime.model(0), cupy_runtime.capability(0), session(cupy_runtime.context_id()).handle)
    for batch, heads, key_heads, d, keys in PROBLEMS:
        shapes = ((d, heads, 1, batch), *[(d, key_heads, keys, batch)] * 2)
        q, k, v = (random_normal(*shape) for shape in shapes)
        for name, (given, modify) in options(heads).items():
            wanted = None if modify is None else truth(q, k, v, modify)
            for guards in GUARDS:
                call = read_forward(q, k, v, given)
                graph = forward(call.engine_problem, guards)
                with searching(graph, target) as (search, uids):
                    for candidate in search.proposed():
                        splits = splits_keys(candidate.engine, dict(candidate.knobs))
                        if splits and name in DEADLY:
                            candidate.close()
                            continue
                        plan = Plan(SerializedPlan(uids, candidate), graph, target, "", 0.0)
                        error, us = measured(call, plan, wanted)
                        plan.close()
                        yield {
                            "batch": batch, "heads": heads, "key_heads": key_heads, "d": d, "keys": keys, "option": name,
                            "positions": "memory" if guards else "computed", "engine": candidate.engine,
                            "knobs": knobs_text(candidate.knobs), "splits": splits, "workspace": candidate.need,
                            "error": error, "us": us, **versions(),
                        }  # fmt: skip


def measured(call: Any, plan: Plan, wanted: Any) -> tuple[str, float]:
    """The largest error of a plan's output, and its microseconds, the median of 20 executions."""
    call.create_inputs()
    stage = call.stage()
    workspace = cupy_runtime.allocate(max(plan.info.workspace, 1))
    plan.set_stream(cupy_runtime.stream())
    pointers = {name: array.data.ptr for name, array in stage.arrays.items()}

    def run() -> None:
        plan.execute(pointers, call.scalars, workspace.ptr)

    run()
    out = call.arrays["out"][:, :, 0, 0].get().astype(np.float64)
    error = "" if wanted is None else f"{np.abs(out - wanted).max():.1e}"
    times = benchmark(run, n_repeat=20, n_warmup=3).gpu_times
    return error, round(1e6 * float(np.median(times)), 1)


def main() -> None:
    """Measure, print, and write the file."""
    found = []
    for row in rows():
        found.append(row)
        words = ("batch", "heads", "key_heads", "d", "keys", "option", "positions", "engine", "knobs", "error", "us")
        print(*(f"{row[name]}" for name in words), sep="  ", flush=True)
    if len(sys.argv) > 1:
        write_csv(sys.argv[1], found)


if __name__ == "__main__":
    main()
