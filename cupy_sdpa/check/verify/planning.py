"""Plan a case with the real cuDNN for a described GPU; nothing is computed."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

import cupy_sdpa

from ...offline.planner import Planner, load_target
from ...problem.subproblems import subproblems
from ...support import gpus
from ...support.why_not import why_not
from ..cases.case import Case
from ..cases.data import build, call_options
from ..cases.memory import memory_of
from .outcome import Outcome

#: What the planner answers where a problem has killed its process.
_DIED = "ended the process inside cuDNN"


@functools.cache
def planner() -> Planner:
    """A process that plans, for as long as this one lives."""
    return Planner()


def plan(case: Case, outcome: Outcome) -> Outcome:
    """Plan both passes; what is neither a plan nor a refusal with reasons is a finding."""
    version, capability, target = planner().version, gpus.capability(case.gpu), load_target(case.gpu)
    for asked in problems(case):
        if asked.trivial:
            continue
        if reasons := why_not(asked, version, capability):
            outcome.kind, outcome.message, outcome.what = "refused", str(reasons[0]), reasons[0].rule
            return outcome
        for part in subproblems(asked):
            outcome.calls += 1
            answer = planner().plan(part, target)
            if not isinstance(answer, str):
                continue
            outcome.kind = "crash" if _DIED in answer else "refused" if answer.strip() else "exception"
            outcome.message, outcome.what = " ".join(answer.split())[:400], "planning"
            return outcome
    return outcome


def problems(case: Case) -> list[Any]:
    """What the calls of a case ask, forward and backward."""
    data, memory = build(case, 0), memory_of(case, np, "qkv")
    options = call_options(case, data.arrays, data.tensors, 0)
    q, k, v = (memory.views[name] for name in "qkv")
    stats = case.options.get("stats", case.backward)
    if "deterministic" in case.options:
        options["deterministic"] = True
    found = [cupy_sdpa.problem(q, k, v, return_stats=stats, **options)]
    if case.backward:
        names = ("return_dbias", "return_dsinks", "return_dtensors")
        options |= {name: True for name in names if name in case.options}
        found.append(cupy_sdpa.problem(q, k, v, backward=True, **options))
    return found
