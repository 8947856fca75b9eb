"""Autotuning: measure the engine configs that cuDNN's heuristics propose on the caller's arrays, and keep the fastest.

A config is accepted only if its results agree with those of the first one. Deterministic gradients stay deterministic: the
graph of the ordered engine, which accumulates dQ in scratch memory, is not tuned, because its other configs accumulate in
arbitrary order.

Only proposed configs are measured. Knob settings that the heuristics do not propose gained 3 % on one of ten
problems on an H200 and nothing on the others, took up to 21 s to measure, and up to 18 of 28 of them computed wrong results
(``benchmarks/results/h200_cudnn928_plans.csv``).
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import _html
from .._cudnn.launch import Handle
from ..device import cupy_runtime
from ..device.cuda_graph import Recording
from ..plans.disk_cache import current
from ..plans.engines import Candidate, EngineSearch, Knobs, knobs_text
from ..plans.plan import Plan, SerializedPlan
from ..plans.plan_cache import PlanCache
from ..plans.planner import engine_search
from ..problem.problem import Problem

#: A config must be faster than the current plan by this factor to replace it; a smaller gain is noise.
GAIN = 1.02
#: The norm of the difference from the first config's results, relative to their norm, above which a config is wrong: a few
#: roundings to bfloat16 (0.4 % each).
TOLERANCE = 0.02
#: The number of configs that are measured again in turn, the number of rounds, and the target milliseconds of a round.
_FINALISTS, _ROUNDS, _ROUND_MS = 4, 7, 1.0


@dataclass(frozen=True)
class Trial:
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
        before: microseconds of the plan before tuning.
        after: microseconds of the plan after tuning.
    """

    problem: Problem
    trials: tuple[Trial, ...]
    before: float
    after: float

    @property
    def gain(self) -> float:
        """The speedup; 1 if the plan did not change."""
        return self.before / self.after

    _COLUMNS = ("time", "engine", "knobs", "workspace")

    def _title(self) -> str:
        return f"{self.problem}: {self.before:.1f} us before, {self.after:.1f} us after, {self.gain:.2f} times as fast"

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for t in self.trials:
            time = "failed or wrong results" if t.us is None else f"{t.us:.1f} us"
            yield time, str(t.engine), knobs_text(t.knobs), f"{t.workspace} B"

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
    bench = _Bench(plan.target.handle, execute, results)
    first = fastest = _Entry(plan, bench.time(plan, rounds=3))
    finalists: list[_Entry] = []
    try:
        dropped = [] if _is_ordered(problem, plan) else _measure_candidates(bench, problem, plan, finalists)
        entries = [first, *finalists]
        rounds = [[bench.time(entry.plan, rounds=1) for entry in entries] for _ in range(_ROUNDS)]
        for entry, times in zip(entries, zip(*rounds, strict=True), strict=True):
            entry.us = statistics.median(times)
        best = min(entries, key=lambda entry: entry.us)
        if first.us >= GAIN * best.us:
            fastest = best
    finally:
        _progress("")
        for entry in finalists:
            if entry is not fastest:
                entry.plan.close()
    fastest.plan.mark_tuned()
    current().put(plan.key, fastest.plan.content())
    if fastest is not first:
        cache.put(problem, fastest.plan)
    trials = sorted([*dropped, *(entry.trial() for entry in entries)], key=lambda trial: trial.us or math.inf)
    return Tuning(problem, tuple(trials), first.us, fastest.us)


@dataclass
class _Entry:
    """A plan and the microseconds of one execution; infinite if it fails or its results are wrong."""

    plan: Plan
    us: float = math.inf

    def trial(self) -> Trial:
        info = self.plan.info
        return Trial(info.engine, info.knobs, info.workspace, self.us if self.us < math.inf else None)


def _is_ordered(problem: Problem, plan: Plan) -> bool:
    """Whether a plan uses the ordered engine; other configs of its graph accumulate dQ in scratch memory in arbitrary order."""
    return problem.deterministic and bool(plan.info.graph.by_role("scratch"))


def _measure_candidates(bench: _Bench, problem: Problem, plan: Plan, finalists: list[_Entry]) -> list[Trial]:
    """Measure every other config once; store the fastest in ``finalists``, and return the trials of all others."""
    dropped: list[Trial] = []
    expected = bench.results_of(plan)
    with engine_search(plan.info.graph, plan.target, problem.settings.max_workspace) as (search, uids):
        for count, candidate in enumerate(_candidates(search, plan), 1):
            serialized = SerializedPlan(uids, candidate, plan.info.refused)
            entry = _Entry(Plan(serialized, plan.info.graph, plan.target, plan.key, candidate.build_ms))
            finalists.append(entry)
            if bench.agrees(entry.plan, expected):
                entry.us = bench.time(entry.plan, rounds=3)
            _progress(f"tuning: {count} engine configs measured")
            finalists.sort(key=lambda entry: entry.us)
            if len(finalists) > _FINALISTS or finalists[-1].us == math.inf:
                slowest = finalists.pop()
                dropped.append(slowest.trial())
                slowest.plan.close()
    return dropped


def _candidates(search: EngineSearch, plan: Plan) -> Iterator[Candidate]:
    """Every proposed config except the plan's own, each once; the caller closes them."""
    seen = {(plan.info.engine, plan.info.knobs)}
    for candidate in search.proposed():
        config = candidate.engine, candidate.knobs
        if config in seen:
            candidate.close()
        else:
            seen.add(config)
            yield candidate


class _Bench:
    """Runs plans on the caller's arrays and measures the time of their kernels without the launch overhead of the host."""

    def __init__(self, handle: Handle | None, execute: Callable[[Plan, int], None], results: Sequence[Any]) -> None:
        assert handle
        self._handle, self._execute, self._results = handle, execute, results
        self._cupy = cupy_runtime.cupy()

    def results_of(self, plan: Plan) -> list[Any]:
        """Copies of a plan's results; an element that the plan does not write is NaN."""
        for array in self._results:
            array.fill(self._cupy.nan)
        workspace = cupy_runtime.allocate(plan.info.workspace)
        self._execute(plan, workspace.ptr)
        return [array.copy() for array in self._results]

    def agrees(self, plan: Plan, expected: list[Any]) -> bool:
        """Whether a plan runs and its results equal the expected ones except for rounding."""
        try:
            results = self.results_of(plan)
        except Exception:  # also if its workspace cannot be allocated, with any allocator
            return False
        return all(self._is_close(a, b) for a, b in zip(expected, results, strict=True))

    def _is_close(self, a: Any, b: Any) -> bool:
        xp = self._cupy
        a, b = a.astype(xp.float32), b.astype(xp.float32)
        difference = xp.where(a == b, 0, a - b)  # the -inf of a fully masked row is equal to itself
        finite = xp.where(xp.isfinite(a), a, 0)
        return bool(xp.linalg.norm(difference.ravel()) <= TOLERANCE * xp.linalg.norm(finite.ravel()))  # False for NaN

    def time(self, plan: Plan, rounds: int) -> float:
        """Microseconds per execution: the median over rounds of many consecutive executions."""
        recording = self._recorded(plan, cupy_runtime.empty((plan.info.workspace,), np.uint8))
        try:
            self._launch_ms(recording, 1)
            count = max(1, min(100, round(_ROUND_MS / self._launch_ms(recording, 1))))
            return statistics.median(self._launch_ms(recording, count) for _ in range(rounds)) * 1e3
        finally:
            recording.close()

    def _recorded(self, plan: Plan, workspace: Any) -> Recording:
        """An execution of a plan as a captured CUDA graph; the handle's stream is restored."""
        before = cupy_runtime.stream()

        def run() -> None:
            self._handle.set_stream(cupy_runtime.stream())
            self._execute(plan, workspace.data.ptr)

        try:
            return Recording(run, [workspace])
        finally:
            self._handle.set_stream(before)

    def _launch_ms(self, recording: Recording, count: int) -> float:
        """Milliseconds per launch of ``count`` launches; as many launches before keep the device busy during enqueueing."""
        begin, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        for event in (begin, end):
            for _ in range(count):
                recording.launch_one_by_one()
            event.record()
        end.synchronize()
        return float(self._cupy.cuda.get_elapsed_time(begin, end)) / count


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
