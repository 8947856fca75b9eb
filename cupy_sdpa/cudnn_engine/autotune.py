"""Autotuning: measure the engine configs that cuDNN's heuristics propose on the caller's arrays, and keep the fastest.

A config is accepted only if its results agree with those of the first one. Deterministic gradients stay deterministic: the
graph of the ordered engine is not tuned, because its other configs accumulate dQ in scratch memory in arbitrary order.

Only proposed configs are measured. Knob settings that the heuristics do not propose gained 3 % on one of ten problems on an
H200 and nothing on the others, took up to 21 s to measure, and up to 18 of 28 of them computed wrong results
(``benchmarks/results/h200_cudnn928_plans.csv``).
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .. import _html
from ..problem.problem import Problem
from ..runtime import cupy_runtime
from ..runtime.cuda_graph import Recording
from .disk_cache import current
from .engines import Candidate, EngineSearch, knobs_text
from .plan import Plan
from .plan_cache import PlanCache
from .plan_file import Knobs
from .planner import engine_search

#: A config must be faster than the current plan by this factor to replace it; a smaller gain is noise.
GAIN = 1.02
#: The norm of the difference from the first config's results, relative to their norm, above which a config is wrong: a few
#: roundings to bfloat16 (0.4 % each).
TOLERANCE = 0.02
#: The number of configs measured again in turn, the number of rounds, and the target milliseconds of a round of a config.
_FINALISTS, _ROUNDS, _ROUND_MS = 4, 7, 1.0


class Trial(NamedTuple):
    """The measurement of one engine config.

    Attributes:
        engine, knobs: the config.
        workspace: bytes of workspace.
        us: microseconds of one execution, the median; None if it failed or its results were wrong.
    """

    engine: int
    knobs: Knobs
    workspace: int
    us: float | None


@dataclass(frozen=True)
class Tuning:
    """The result of tuning one problem; prints as a table, the fastest config first.

    Attributes:
        problem: the problem that was tuned.
        trials: every config, the fastest first.
        before, after: microseconds of the plan before and after tuning.
    """

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

    def _rows(self) -> list[tuple[str, ...]]:
        times = ("failed or wrong results" if t.us is None else f"{t.us:.1f} us" for t in self.trials)
        return [
            (time, str(t.engine), knobs_text(t.knobs), f"{t.workspace} B") for time, t in zip(times, self.trials, strict=True)
        ]

    _COLUMNS = ("time", "engine", "knobs", "workspace")

    def __str__(self) -> str:
        rows = [self._COLUMNS, *self._rows()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
        return "\n".join([self._title(), *lines])

    def _repr_html_(self) -> str:
        return _html.with_title(self._title(), _html.table(self._COLUMNS, self._rows()))


def tune(
    problem: Problem, plan: Plan, cache: PlanCache, execute: Callable[[Plan, int], None], results: Sequence[Any]
) -> Tuning:
    """Measure the engine configs of a problem; the fastest plan is stored in the plan cache and the disk cache.

    Args:
        problem: the problem of the plan.
        plan: the current plan.
        cache: the plan cache that contains the plan.
        execute: runs a plan with the workspace at an address.
        results: the arrays that the plan writes.
    """
    is_ordered = problem.deterministic and bool(plan.info.graph.by_role("scratch"))
    times = {plan: _time(plan, execute, 3)}  # infinite: it failed, or its results are wrong
    fastest = plan
    try:
        if not is_ordered:
            expected = _results(plan, execute, results)
            with engine_search(plan.info.graph, plan.target, problem.settings.max_workspace) as search:
                for candidate in _candidates(search, plan):
                    other = Plan(candidate, plan.info.graph, plan.target, plan.key, candidate.facts.build_ms)
                    times[other] = math.inf
                    if _agrees(other, execute, results, expected):
                        times[other] = _time(other, execute, 3)
                    _progress(f"tuning: {len(times) - 1} engine configs measured")
        others = sorted((one for one in times if one is not plan and times[one] < math.inf), key=times.__getitem__)
        finalists = [plan, *others[:_FINALISTS]]
        rounds = [[_time(one, execute, 1) for one in finalists] for _ in range(_ROUNDS)]
        times.update(zip(finalists, map(statistics.median, zip(*rounds, strict=True)), strict=True))
        best = min(finalists, key=times.__getitem__)
        if times[plan] >= GAIN * times[best]:
            fastest = best
    finally:
        _progress("")
        for other in times:
            if other is not plan and other is not fastest:
                other.close()
    fastest.mark_tuned()
    current().put(plan.key, fastest.content())
    if fastest is not plan:
        cache.put(problem, fastest)
    infos = sorted(((one.info, us) for one, us in times.items()), key=lambda found: found[1])
    trials = (Trial(info.engine, info.knobs, info.workspace, us if us < math.inf else None) for info, us in infos)
    return Tuning(problem, tuple(trials), times[plan], times[fastest])


def _candidates(search: EngineSearch, plan: Plan) -> Iterator[Candidate]:
    """Every proposed config except the plan's own, each once; the caller closes them."""
    seen = {(plan.info.engine, plan.info.knobs)}
    for candidate in search.proposed():
        config = candidate.facts.engine, candidate.facts.knobs
        if config in seen:
            candidate.close()
        else:
            seen.add(config)
            yield candidate


def _results(plan: Plan, execute: Callable[[Plan, int], None], results: Sequence[Any]) -> list[Any]:
    """Copies of a plan's results; an element that the plan does not write is NaN."""
    for array in results:
        array.fill(np.nan)
    workspace = cupy_runtime.allocate(plan.info.workspace)
    execute(plan, workspace.ptr)
    return [array.copy() for array in results]


def _agrees(plan: Plan, execute: Callable[[Plan, int], None], results: Sequence[Any], expected: list[Any]) -> bool:
    """Whether a plan runs and its results equal the expected ones except for rounding."""
    try:
        found = _results(plan, execute, results)
    except Exception:  # also if its workspace cannot be allocated, with any allocator
        return False
    return all(_is_close(a, b) for a, b in zip(expected, found, strict=True))


def _is_close(a: Any, b: Any) -> bool:
    xp = cupy_runtime.cupy()
    a, b = a.astype(xp.float32), b.astype(xp.float32)
    difference = xp.where(a == b, 0, a - b)  # the -inf of a fully masked row is equal to itself
    finite = xp.where(xp.isfinite(a), a, 0)
    return bool(xp.linalg.norm(difference.ravel()) <= TOLERANCE * xp.linalg.norm(finite.ravel()))  # False for NaN


def _time(plan: Plan, execute: Callable[[Plan, int], None], rounds: int) -> float:
    """Microseconds of the kernels of an execution, without the host: the median over rounds of many launches."""
    cuda, handle = cupy_runtime.cupy().cuda, plan.target.handle
    assert handle
    workspace, before = cupy_runtime.empty((plan.info.workspace,), np.uint8), cupy_runtime.stream()

    def run() -> None:
        handle.set_stream(cupy_runtime.stream())
        execute(plan, workspace.data.ptr)

    def launch_ms(count: int) -> float:  # as many launches before keep the device busy during enqueueing
        begin, end = cuda.Event(), cuda.Event()
        for event in (begin, end):
            for _ in range(count):
                recording.launch_one_by_one()
            event.record()
        end.synchronize()
        return float(cuda.get_elapsed_time(begin, end)) / count

    try:
        recording = Recording(run, [workspace])
    finally:
        handle.set_stream(before)
    try:
        launch_ms(1)
        count = max(1, min(100, round(_ROUND_MS / launch_ms(1))))
        return statistics.median(launch_ms(count) for _ in range(rounds)) * 1e3
    finally:
        recording.close()


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
