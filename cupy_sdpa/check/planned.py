"""Plan a case with the real cuDNN for a described GPU, without executing it."""

from __future__ import annotations

from typing import Any

import numpy as np

import cupy_sdpa

from .case import GRADIENTS, Case, Outcome
from .data import build, call_options
from .drawn_memory import memory_of
from .routes import with_tree

#: Part of the reason of a report if a problem ended the process.
_CRASHED = "ended the process inside cuDNN"


def plan(case: Case, outcome: Outcome) -> None:
    """Plan both passes, and set the outcome. A report with neither a plan nor reasons is a finding."""
    for problem in problems(case):
        report = cupy_sdpa.explain(problem, gpu=case.gpu)
        for launch in report.launches or (report,):
            outcome.calls += not launch.problem.trivial
            if launch.reasons:
                kind = "crash" if _CRASHED in launch.reasons[0] else "refused"
                outcome.set(kind, " ".join(launch.reasons[0].split())[:400], "planning")
                return
            if not launch.plan and not launch.problem.trivial:
                outcome.set("exception", f"there is neither a plan nor a reason: {launch.problem}", "planning")
                return


def problems(case: Case) -> list[Any]:
    """The problems of the passes of a case."""
    data, memory = build(case, 0), memory_of(case, np, "qkv")
    table = {"page_table": memory.views["page_table"]} if case.paged else {}  # a part of a larger array, as in a call
    q, k, v = (memory.views[name] for name in "qkv")
    options = with_tree(case, data, k, call_options(case, data.arrays | table, data.tensors, 0), np)
    stats = case.options.get("stats", case.backward)
    if "deterministic" in case.options:
        options["deterministic"] = True
    if case.tangents:
        return list(cupy_sdpa.composed.jvp_problems(q, k, v, tangents=list(case.tangents), return_stats=stats, **options))
    if "weight_sums" in case.options:
        options.pop("num_splits", None)
        return list(cupy_sdpa.composed.weight_sums_problems(q, k, **options))
    if "fp8" in case.options:
        return [cupy_sdpa.problem(q.shape, k.shape, v.shape, dtype=case.options["fp8"], return_stats=stats, **options)]
    both = [cupy_sdpa.problem(q, k, v, return_stats=stats, **options)]
    if case.backward:
        options |= {name: True for name in GRADIENTS if name in case.options}
        both.append(cupy_sdpa.problem(q, k, v, backward=True, **options))
    return both
