"""A single query: error and time of all engine configs, with and without positions that are read from memory.

    python -m benchmarks one_query [results.csv]

For each problem and option, each engine config that the heuristics propose runs with two graphs: one computes the positions
of keys, the other one reads them from memory (the guard ``positions``). A row has the engine, its knobs, whether it splits
the keys, the largest error of the output of one batch entry against numpy in float64, and the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import cupy
import numpy as np
from cupyx.profiler import benchmark

from cupy_sdpa.calls.arguments import read_forward
from cupy_sdpa.device import cupy_runtime, driver
from cupy_sdpa.graph.attention_forward import forward
from cupy_sdpa.plans.engines import knobs_text, splits_keys
from cupy_sdpa.plans.plan import Plan, SerializedPlan, Target
from cupy_sdpa.plans.planner import engine_search
from cupy_sdpa.plans.sessions import session

from ..common.device import arrays_of_launch, random_normal
from ..common.machine import versions
from ..common.script import csv_path, write_csv

#: (batch, query heads, key/value heads, head dim, keys)
PROBLEMS = ((1, 32, 8, 128, 32768), (8, 32, 8, 128, 8192), (32, 32, 8, 128, 4096), (4, 32, 32, 64, 4096), (8, 18, 3, 64, 163))
GUARDS = (frozenset[str](), frozenset({"positions"}))
#: Options for which the kernel that splits the keys writes out of bounds without the guard; it is not run.
UNSAFE = ("dropout",)


def options(heads: int) -> dict[str, tuple[dict[str, Any], Any]]:
    """Options by name, each with its effect on the scores ``(Hq, Skv)``, a function of scores and indices; None for dropout."""
    slopes = np.linspace(0.01, 0.1, heads).astype(np.float32)
    return {
        "none": ({}, lambda s, h, j: s),
        "alibi_slopes": ({"alibi_slopes": cupy.asarray(slopes)}, lambda s, h, j: s - slopes[h] * j),
        "score_mod": ({"score_mod": lambda s, b, h, i, j: s + 0.001 * j}, lambda s, h, j: s + 0.001 * j),
        "mask_mod": ({"mask_mod": lambda b, h, i, j: j % 3 == 0}, lambda s, h, j: np.where(j % 3 == 0, s, -np.inf)),
        "sinks": ({"sinks": cupy.full(heads, -50, np.float32)}, lambda s, h, j: s),
        "dropout": ({"dropout_p": 0.1, "seed": 1}, None),
    }


def reference(q: Any, k: Any, v: Any, modify: Any) -> Any:
    """The output of the first batch entry by numpy in float64, ``(D, Hq)``."""
    q, k, v = (x[..., 0].get().astype(np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    s = modify(np.einsum("dh,dhk->hk", q[:, :, 0], k) / q.shape[0] ** 0.5, *np.ogrid[: q.shape[1], : k.shape[2]])
    p = np.exp(s - s.max(1, keepdims=True))
    return np.einsum("hk,dhk->dh", p / p.sum(1, keepdims=True), v)


def rows() -> Iterator[dict[str, Any]]:
    """A row for each problem, option, graph and engine config."""
    target = Target(cupy_runtime.model(0), cupy_runtime.capability(0), session(driver.context_id()).handle)
    for batch, heads, key_heads, d, keys in PROBLEMS:
        shapes = ((d, heads, 1, batch), *[(d, key_heads, keys, batch)] * 2)
        q, k, v = (random_normal(*shape) for shape in shapes)
        for name, (chosen, modify) in options(heads).items():
            expected = None if modify is None else reference(q, k, v, modify)
            for guards in GUARDS:
                call = read_forward(q, k, v, chosen)
                graph = forward(call.engine_problem, guards)
                with engine_search(graph, target) as (search, uids):
                    for candidate in search.proposed():
                        splits = splits_keys(candidate.engine, dict(candidate.knobs))
                        if splits and name in UNSAFE:
                            candidate.close()
                            continue
                        plan = Plan(SerializedPlan(uids, candidate), graph, target, "", 0.0)
                        error, us = measure(call, plan, expected)
                        plan.close()
                        yield {
                            "batch": batch, "heads": heads, "key_heads": key_heads, "d": d, "keys": keys, "option": name,
                            "positions": "memory" if guards else "computed", "engine": candidate.engine,
                            "knobs": knobs_text(candidate.knobs), "splits": splits, "workspace": candidate.workspace_bytes,
                            "error": error, "us": us, **versions(),
                        }  # fmt: skip


def measure(call: Any, plan: Plan, expected: Any) -> tuple[str, float]:
    """The largest error of a plan's output, and the median microseconds of 20 executions."""
    arrays = arrays_of_launch(call)
    workspace = cupy_runtime.allocate(max(plan.info.workspace, 1))
    plan.set_stream(cupy_runtime.stream())
    pointers = {name: array.data.ptr for name, array in arrays.items()}

    def run() -> None:
        plan.execute(pointers, call.scalars, workspace.ptr)

    run()
    out = call.arrays["out"][:, :, 0, 0].get().astype(np.float64)
    error = "" if expected is None else f"{np.abs(out - expected).max():.1e}"
    times = benchmark(run, n_repeat=20, n_warmup=3).gpu_times
    return error, round(1e6 * float(np.median(times)), 1)


def main(words: Sequence[str]) -> int:
    """Measure, print the rows and write them."""
    path = csv_path("one_query", __doc__, words)
    measured = []
    for row in rows():
        measured.append(row)
        columns = ("batch", "heads", "key_heads", "d", "keys", "option", "positions", "engine", "knobs", "error", "us")
        print(*(f"{row[name]}" for name in columns), sep="  ", flush=True)
    if path:
        write_csv(path, measured)
    return 0
