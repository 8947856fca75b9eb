"""A contender in one preset and direction: its calls, its timer, and the columns of its row."""

from __future__ import annotations

import functools
import math
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from ..common import timing
from ..common.accuracy import WrongResultError, largest_difference
from ..contenders.contender import Call, Contender, Inputs, Timer, UnavailableError
from ..contenders.ours import Ours
from ..contenders.registry import unavailable
from ..presets import Preset

#: The largest accepted difference from cupy_sdpa's results, relative to the largest magnitude.
TOLERANCE = 0.02
#: The most characters of the reason why a contender is left out.
_MAX_REASON = 300


class ContenderRun:
    """A contender in one preset and direction: a call for each input set, and the columns of its row.

    A failure does not end the benchmark. Its reason goes into the column ``left_out``.
    """

    def __init__(self, kind: type[Contender], preset: Preset, direction: str) -> None:
        self.name = kind.name
        self.row: dict[str, Any] = {}
        self.results: list[Any] = []
        self._host_calls: dict[str, Call] = {}
        self._host_count = 1
        self._contender: Contender | None = None
        self._timer: Timer | None = None
        self._kind, self._case = kind, (preset, direction)

    @property
    def ready(self) -> bool:
        """Whether it can be timed."""
        return self._timer is not None and "left_out" not in self.row

    def attempt(self, action: Callable[[], Any]) -> Any:
        """Run a function and return its result; if it fails, leave the contender out and return None."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                return action()
            except Exception as error:  # the other contenders continue
                self.row["left_out"] = failure_reason(error, [str(warning.message) for warning in caught])
        return None

    def prepare(self, sets: Sequence[Inputs], expected: Sequence[Any], busy: Any, tune: bool) -> None:
        """Make the calls and compare the results of the first one with the expected ones, if there are any."""
        self.attempt(lambda: self._prepare(sets, expected, busy, tune))

    def _prepare(self, sets: Sequence[Inputs], expected: Sequence[Any], busy: Any, tune: bool) -> None:
        contender = self._contender = self._create()
        if tune and isinstance(contender, Ours):
            contender.tune(sets[0])
        with contender.active():
            calls = [contender.call(inputs) for inputs in sets]
            self._compare(contender, calls, expected)
            self.row |= {"peak_bytes": contender.peak_bytes(calls[0]), **contender.facts()}
            self._host_calls = {"host_us": calls[0], **dict(contender.host_variants(sets[0]))}
            for call in self._host_calls.values():
                call()
            self._host_count = max(1, timing.affordable_calls(calls[0], contender.wait) // timing.HOST_ROUNDS)
        self._timer = contender.timer(calls, busy)

    def call_once(self, inputs: Inputs) -> None:
        """Run the call once, which fills the caches of compiled kernels."""

        def run() -> None:
            contender = self._create()
            with contender.active():
                contender.wait(contender.call(inputs)())

        self.attempt(run)

    def _create(self) -> Contender:
        if reason := unavailable(self._kind):
            raise UnavailableError(reason)
        return self._kind(*self._case)

    def _compare(self, contender: Contender, calls: Sequence[Call], expected: Sequence[Any]) -> None:
        self.results = contender.to_cupy(calls[0]())
        for call in calls[1:]:  # run every call once before timing
            call()
        contender.wait()
        if expected:
            self.row["difference"] = largest_difference(self.results, expected)
            self.results = []
            if not self.row["difference"] < TOLERANCE:  # also refuses NaN
                raise WrongResultError(f"its results differ from ours by {self.row['difference']:.3g} of the largest value")

    def __call__(self) -> float:
        """Return the milliseconds of a call; NaN if it failed."""
        return self._measure(self._timer or (lambda: math.nan))

    def host_timers(self) -> dict[tuple[ContenderRun, str], Callable[[], float]]:
        """Functions that measure its host times in microseconds, by column; none if it is left out."""
        if not self.ready:
            return {}
        return {(self, column): functools.partial(self._host_us, call) for column, call in self._host_calls.items()}

    def _host_us(self, call: Call) -> float:
        assert self._contender
        wait = self._contender.wait
        return self._measure(lambda: timing.host_us(call, self._host_count, wait))

    def _measure(self, timer: Callable[[], float]) -> float:
        def measure() -> float:
            assert self._contender
            with self._contender.active():
                return timer()

        value = self.attempt(measure) if self.ready else None
        return math.nan if value is None else float(value)

    def record_times(self, times: Sequence[float]) -> None:
        """Add the measured times to its row."""
        if self.ready and self._timer:
            self.row |= {"times": times, "rounds": len(times), "clock": self._timer.clock}


def failure_reason(error: Exception, caught: Sequence[str]) -> str:
    """One line: the exception, and the warnings before it that explain it."""
    texts = [re.sub(r" ?\(Triggered internally.*", "", text, flags=re.DOTALL) for text in caught]
    explanations = [text for text in texts if not text.endswith(("because:", "runtime disabled."))]
    own = ("cupy_sdpa", "benchmarks")
    name = "" if type(error).__module__.split(".")[0] in own else f"{type(error).__name__}: "
    return " ".join("; ".join(dict.fromkeys([f"{name}{error}", *explanations])).split())[:_MAX_REASON]
