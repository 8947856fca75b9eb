"""Which engine config is the fastest for a problem: measured, on the caller's arrays and stream, and kept.

Heuristics know the problem and the GPU, not what else matters. Every config that they propose is measured; on request also
every setting of the engines' knobs that finalizes. A config counts only if its results agree with those of the first: of
the settings made by hand many finalize and compute nonsense (measured with 9.19: up to 16 of 23). Deterministic gradients stay
deterministic: cuDNN does not report which configs are, so settings by hand are not tried for them, and nothing else is tried
for the graph of the ordered engine.
"""

from __future__ import annotations

import itertools
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
from ..plans.engines import Candidate, EngineConfig, Knobs, Search, knobs_text
from ..plans.plan import Plan, SerializedPlan, searching
from ..plans.plan_cache import PlanCache
from ..problem.problem import Problem

#: The knobs that are tried by hand; the others are to be left alone (STAGES changes what is computed, and in what order).
KNOBS = ("KERNEL_CFG", "TILE_M", "TILE_N", "STREAM_K")
#: A config must be faster than the heuristics' by this factor to take its place; less is noise.
GAIN = 1.02
#: The norm of the difference to the first config's results, over their norm, at which a config is taken to be wrong: some
#: roundings to bfloat16 (0.4 % each).
TOLERANCE = 0.02
#: How many configs are measured again, in turns; rounds; and the milliseconds that a round of one of them should last.
_FINALISTS, _ROUNDS, _ROUND_MS = 4, 7, 1.0


@dataclass(frozen=True)
class Trial:
    """An engine config that was measured.

    Attributes:
        engine, knobs: what it was.
        workspace: bytes that it needs beside the arrays.
        us: microseconds of an execution, the median; None where it failed or its results were wrong.
        proposed: whether heuristics propose it.
    """

    engine: int
    knobs: Knobs
    workspace: int
    us: float | None
    proposed: bool


@dataclass(frozen=True)
class Tuning:
    """What tuning a problem has found; printed, a table, the fastest first.

    Attributes:
        problem: what was tuned.
        trials: every config, the fastest first.
        before: microseconds with the plan that was there before.
        after: microseconds with the one that is kept.
    """

    problem: Problem
    trials: tuple[Trial, ...]
    before: float
    after: float

    @property
    def gain(self) -> float:
        """How many times faster; 1 where the plan that was there has stayed."""
        return self.before / self.after

    _COLUMNS = ("time", "engine", "knobs", "workspace", "proposed by")

    def _title(self) -> str:
        return f"{self.problem}: {self.before:.1f} us before, {self.after:.1f} us after, {self.gain:.2f} times as fast"

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for t in self.trials:
            time = "failed or wrong results" if t.us is None else f"{t.us:.1f} us"
            yield time, str(t.engine), knobs_text(t.knobs), f"{t.workspace} B", "heuristics" if t.proposed else "hand"

    def __str__(self) -> str:
        rows = [self._COLUMNS, *self._rows()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
        return "\n".join([self._title(), *lines])

    def _repr_html_(self) -> str:
        return _html.with_title(self._title(), _html.table(self._COLUMNS, self._rows()))


def tune(
    problem: Problem,
    plan: Plan,
    cache: PlanCache,
    execute: Callable[[Plan, int], None],
    results: Sequence[Any],
    *,
    knobs: bool = False,
) -> Tuning:
    """Measure every engine config of a plan's graph, and keep the fastest in the cache and on the shelf.

    Waits for the GPU. Progress is shown on stderr where that is a terminal.

    Args:
        problem: what the plan computes.
        plan: the one that is kept now.
        cache: where it is kept.
        execute: (plan, address of its workspace) -> None; enqueues an execution.
        results: the arrays that it writes.
        knobs: try settings of knobs by hand, too; not for deterministic gradients.
    """
    bench = _Bench(plan.target.handle, execute, results)
    right = bench.results_of(plan)
    first = _Entry(plan, bench.time(plan, rounds=3), proposed=True)
    others: list[_Entry] = []
    trials: list[Trial] = []
    try:
        with searching(plan.info.graph, plan.target, problem.settings.max_workspace) as (search, uids):
            configs = () if _ordered(problem, plan) else _candidates(search, plan, knobs and not problem.deterministic)
            for count, (candidate, proposed) in enumerate(configs, 1):
                other = Plan(
                    SerializedPlan(uids, candidate, plan.info.refused),
                    plan.info.graph,
                    plan.target,
                    plan.key,
                    candidate.build_ms,
                )
                others.append(_Entry(other, None, proposed))
                if bench.agrees(other, right):
                    others[-1].us = bench.time(other, rounds=3)
                _progress(f"tuning: {count} engine configs measured")
                others.sort(key=lambda entry: math.inf if entry.us is None else entry.us)
                if len(others) > _FINALISTS or others[-1].us is None:
                    slow = others.pop()
                    trials.append(slow.trial())
                    slow.plan.close()
        finalists = [first, *others]
        times = [[bench.time(entry.plan, rounds=1) for entry in finalists] for _ in range(_ROUNDS)]
        for entry, every in zip(finalists, zip(*times, strict=True), strict=True):
            entry.us = statistics.median(every)
        _progress("")
        trials += [entry.trial() for entry in finalists]
        fastest = min(finalists, key=lambda entry: entry.us or math.inf)
        before, after = first.us or math.inf, fastest.us or math.inf
        if before < GAIN * after:
            fastest, after = first, before
    except BaseException:
        for entry in others:
            entry.plan.close()
        raise
    for entry in others:
        if entry is not fastest:
            entry.plan.close()
    fastest.plan.mark_tuned()
    current().put(plan.key, fastest.plan.content())
    if fastest is not first:
        cache.put(problem, fastest.plan)
    trials.sort(key=lambda trial: math.inf if trial.us is None else trial.us)
    return Tuning(problem, tuple(trials), before, after)


def _ordered(problem: Problem, plan: Plan) -> bool:
    """Whether a plan is the ordered engine's: other configs of its graph add dQ up in scratch memory in any order."""
    return problem.deterministic and bool(plan.info.graph.by_role("scratch"))


@dataclass
class _Entry:
    """A plan that is being measured; ``us`` is None where it failed or its results are wrong."""

    plan: Plan
    us: float | None
    proposed: bool

    def trial(self) -> Trial:
        info = self.plan.info
        return Trial(info.engine, info.knobs, info.workspace, self.us, self.proposed)


def _candidates(search: Search, plan: Plan, knobs: bool) -> Iterator[tuple[Candidate, bool]]:
    """Every config but the plan's own, for the caller to close, and whether heuristics propose it."""
    seen = {(plan.info.engine, plan.info.knobs)}
    engines = [plan.info.engine]
    for candidate in search.proposed():
        engines.append(candidate.engine)
        if (candidate.engine, candidate.knobs) in seen:
            candidate.close()
        else:
            seen.add((candidate.engine, candidate.knobs))
            yield candidate, True
    for engine in dict.fromkeys(engines) if knobs else ():
        ranges = {name: values for name, values in search.knobs(engine).items() if name in KNOBS}
        every = (tuple(zip(ranges, values, strict=True)) for values in itertools.product(*ranges.values()))
        known = [set(chosen) for number, chosen in seen if number == engine]
        settings = [EngineConfig(engine, chosen) for chosen in every if not any(set(chosen) <= other for other in known)]
        for candidate in search.by_hand(settings):
            yield candidate, False


class _Bench:
    """Runs plans on the caller's arrays, and times their kernels one after the other: without what the host costs."""

    def __init__(self, handle: Handle | None, execute: Callable[[Plan, int], None], results: Sequence[Any]) -> None:
        assert handle
        self._handle, self._execute, self._results = handle, execute, results
        self._cupy = cupy_runtime.cupy()

    def results_of(self, plan: Plan) -> list[Any]:
        """Copies of what a plan computes, in arrays in which what is not written shows."""
        for array in self._results:
            array.fill(self._cupy.nan)
        workspace = cupy_runtime.allocate(plan.info.workspace)
        self._execute(plan, workspace.ptr)
        return [array.copy() for array in self._results]

    def agrees(self, plan: Plan, right: list[Any]) -> bool:
        """Whether a plan runs, and its results are the right ones but for rounding."""
        try:
            results = self.results_of(plan)
        except Exception:  # also where there is no memory for its workspace, whoever's the allocator
            return False
        return all(self._near(a, b) for a, b in zip(right, results, strict=True))

    def _near(self, a: Any, b: Any) -> bool:
        xp = self._cupy
        a, b = a.astype(xp.float32), b.astype(xp.float32)
        apart = xp.where(a == b, 0, a - b)  # -inf, of a row that sees nothing, is equal to itself
        size = xp.where(xp.isfinite(a), a, 0)
        return bool(xp.linalg.norm(apart.ravel()) <= TOLERANCE * xp.linalg.norm(size.ravel()))  # false of NaN

    def time(self, plan: Plan, rounds: int) -> float:
        """Microseconds of an execution in a row of them, the median of some rounds."""
        recording = self._recorded(plan, cupy_runtime.empty((plan.info.workspace,), np.uint8))
        try:
            self._row_ms(recording, 1)
            count = max(1, min(100, round(_ROUND_MS / self._row_ms(recording, 1))))
            return statistics.median(self._row_ms(recording, count) for _ in range(rounds)) * 1e3
        finally:
            recording.close()

    def _recorded(self, plan: Plan, workspace: Any) -> Recording:
        before = cupy_runtime.stream()

        def run() -> None:
            self._handle.set_stream(cupy_runtime.stream())
            self._execute(plan, workspace.data.ptr)

        try:
            return Recording(run, [workspace])
        finally:
            self._handle.set_stream(before)

    def _row_ms(self, recording: Recording, count: int) -> float:
        """Milliseconds of each of so many launches on the caller's stream, behind as many others: the host is ahead."""
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
