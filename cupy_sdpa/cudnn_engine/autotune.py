"""Autotuning: measure the engine configs that cuDNN's heuristics propose on the caller's arrays, and keep the fastest.

A config is accepted only if its results agree with those of the first one. Deterministic gradients stay deterministic: the
graph of the ordered engine is not tuned, because its other configs accumulate dQ in scratch memory in arbitrary order.
Other knob settings than the proposed ones are not measured (:doc:`/design`).
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .. import _html
from ..problem.problem import Problem
from ..runtime import cupy_runtime
from ..runtime.cuda_graph import Recording
from .disk_cache import current
from .engines import engine_search
from .plan import Knobs, Plan, knobs_text
from .plan_cache import PlanCache

#: A config must be faster than the current plan by this factor to replace it; a smaller gain is noise.
GAIN = 1.02
#: The relative norm of the difference from the first config's results above which a config is wrong: roundings to bfloat16.
TOLERANCE = 0.02
#: The configs are measured in turn, so many times, and the medians are compared; the target milliseconds of a measurement.
_ROUNDS, _ROUND_MS = 5, 1.0
#: Runs a plan with the workspace at an address.
Execute = Callable[[Plan, int], None]


class Trial(NamedTuple):
    """An engine config, its workspace in bytes, and the microseconds of an execution; None if it failed or was wrong."""

    engine: int
    knobs: Knobs
    workspace: int
    us: float | None


@dataclass(frozen=True)
class Tuning:
    """The configs of one problem, the fastest first, and the microseconds of the plan before and after; prints as a table."""

    problem: Problem
    trials: tuple[Trial, ...]
    before: float
    after: float

    @property
    def gain(self) -> float:
        """The speedup; 1 if the plan did not change."""
        return self.before / self.after

    def _title(self) -> str:
        return f"{self.problem}: {self.before:.1f} us before, {self.after:.1f} us after, {self.gain:.2f} times as fast"

    def _table(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("time", "engine", "knobs", "workspace")]
        for engine, knobs, workspace, us in self.trials:
            time = "failed or wrong results" if us is None else f"{us:.1f} us"
            rows.append((time, str(engine), knobs_text(knobs), f"{workspace} B"))
        return rows

    def __str__(self) -> str:
        rows = self._table()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join([self._title(), *lines])

    def _repr_html_(self) -> str:
        columns, *rows = self._table()
        return _html.with_title(self._title(), _html.table(columns, rows))


def tune(problem: Problem, plan: Plan, cache: PlanCache, execute: Execute, results: Sequence[Any]) -> Tuning:
    """Measure the engine configs of a problem and store the fastest plan; ``execute`` runs a plan, which writes ``results``."""
    graph = plan.info.graph
    is_ordered = problem.deterministic and graph.by_role("scratch")
    fastest, plans, right = plan, {(plan.info.engine, plan.info.knobs): plan}, [plan]
    try:
        expected = _results(plan, execute, results)
        with engine_search(graph, plan.target, problem.settings.max_workspace) as search:
            for candidate in () if is_ordered else search.proposed():
                other = Plan(candidate, graph, plan.target, plan.key, candidate.facts.build_ms)
                if plans.setdefault((other.info.engine, other.info.knobs), other) is not other:
                    other.close()  # heuristics have proposed the config before
                    continue
                with contextlib.suppress(Exception):  # also if its workspace cannot be allocated, with any allocator
                    if _agree(expected, _results(other, execute, results)):
                        right.append(other)
        rounds = [[_time(one, execute) for one in right] for _ in range(_ROUNDS)]
        times = dict(zip(right, map(statistics.median, zip(*rounds, strict=True)), strict=True))
        fastest = min(right, key=lambda one: times[one] * (1 if one is plan else GAIN))
    finally:
        for other in {*plans.values()} - {plan, fastest}:
            other.close()
    fastest.mark_tuned()
    current().put(plan.key, fastest.content())
    if fastest is not plan:
        cache.put(problem, fastest)
    trials = [Trial(*config, one.info.workspace, times.get(one)) for config, one in plans.items()]
    trials.sort(key=lambda trial: trial.us or math.inf)
    return Tuning(problem, tuple(trials), times[plan], times[fastest])


def _results(plan: Plan, execute: Execute, results: Sequence[Any]) -> list[Any]:
    """Copies of a plan's results; an element that the plan does not write is NaN."""
    for array in results:
        array.fill(np.nan)
    workspace = cupy_runtime.allocate(plan.info.workspace)
    execute(plan, workspace.ptr)
    return [array.copy() for array in results]


def _agree(expected: list[Any], found: list[Any]) -> bool:
    """Whether results are equal except for rounding; NaN is not."""
    xp = cupy_runtime.cupy()
    for a, b in zip((x.astype(xp.float32) for x in expected), (x.astype(xp.float32) for x in found), strict=True):
        difference = xp.where(a == b, 0, a - b)  # the -inf of a fully masked row is equal to itself
        finite = xp.where(xp.isfinite(a), a, 0)
        if not xp.linalg.norm(difference.ravel()) <= TOLERANCE * xp.linalg.norm(finite.ravel()):
            return False
    return True


def _time(plan: Plan, execute: Execute) -> float:
    """Microseconds of the kernels of an execution, without the host: the mean of many launches."""
    cuda, workspace = cupy_runtime.cupy().cuda, cupy_runtime.empty((plan.info.workspace,), np.uint8)
    recording = Recording(lambda: execute(plan, workspace.data.ptr), [workspace])

    def launch_ms(count: int) -> float:  # as many launches before keep the device busy during enqueueing
        begin, end = cuda.Event(), cuda.Event()
        for event in (begin, end):
            for _ in range(count):
                recording.launch_one_by_one()
            event.record()
        end.synchronize()
        return float(cuda.get_elapsed_time(begin, end)) / count

    with contextlib.closing(recording):
        return launch_ms(max(1, min(100, round(_ROUND_MS / launch_ms(1))))) * 1e3
