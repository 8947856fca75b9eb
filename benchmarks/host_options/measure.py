"""The timers: a repeated call on an idle device, and a mix of kinds of calls."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from cupy_sdpa._cli.helpers.console import one_line
from cupy_sdpa.calls.replay_cache import CAPTURE_AFTER

from ..common.timing import affordable_calls, host_us, interleaved

#: The sets of arrays of a mix, and the most calls without synchronization. The launch queue holds 1024 launches, and the
#: gradients of arrays take up to 20: a host that waits for the queue would measure the device.
SETS, PIECE = 64, 48
#: Rounds that count; a contender that has used this many seconds gets fewer. The most calls of a round on an idle device.
ROUNDS, SECONDS, CALLS = 11, 4.0, 50
#: Repetitions before a measurement: until a CUDA graph is captured, and more. The most of them in a mix, in which the addresses
#: of results vary.
WARM_UP, MAX_WARM_UP = 2 * CAPTURE_AFTER, 96

Call = Callable[[], Any]
Context = Callable[[], AbstractContextManager[Any]]
Wait = Callable[[Any], Any]


class Way(NamedTuple):
    """A way of computing a kind of call.

    Attributes:
        title: its description.
        make: makes the call on the set of arrays with a number.
        active: the context in which calls are made and run, entered outside of the measured time.
    """

    title: str
    make: Callable[[int], Call]
    active: Context = contextlib.nullcontext


class Chosen(NamedTuple):
    """A way that runs, and its calls on all sets."""

    way: Way
    calls: list[Call]


def choose(ways: Sequence[Way], wait: Wait, sets: int = SETS) -> tuple[Chosen | None, list[str]]:
    """The first way that runs on all sets, and the reasons why those before it do not run.

    Args:
        ways: the ways, in the order of preference.
        wait: waits for the device.
        sets: the number of sets.
    """
    failures = []
    for way in ways:
        try:
            with way.active(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch's reasons why a backend cannot run
                first = way.make(0)
                repeat(first, wait)
                calls = [first, *(way.make(number) for number in range(1, sets))]
                for call in calls:
                    call()
                wait(None)
        except Exception as error:  # a missing library, or a call that it does not support: the next way is tried
            failures.append(f"{way.title} does not run: {type(error).__name__}: {one_line(str(error))[:150]}")
        else:
            return Chosen(way, calls), failures
    return None, failures


def repeat(call: Call, wait: Wait) -> None:
    """Repeat a call until its CUDA graph is captured."""
    for _ in range(WARM_UP):
        call()
        wait(None)


def idle_timer(chosen: Chosen, wait: Wait) -> Callable[[], float]:
    """A timer of the first call on an idle device, always on the same addresses: median microseconds."""
    call = chosen.calls[0]
    with chosen.way.active():
        repeat(call, wait)
        count = min(CALLS, affordable_calls(call, wait))

    def timer() -> float:
        with chosen.way.active():
            return host_us(call, count, wait)

    return timer


class Mix:
    """A timer of calls of several kinds in turn, each on the next set of arrays, as in a model with many layers.

    Args:
        calls: the calls of each kind on all sets.
        wait: waits for the device.
        active: the context in which all calls run.
        captured: the number of CUDA graphs that are captured.

    Attributes:
        rounds: for each kind, the mean microseconds of its calls in every round.
    """

    def __init__(
        self,
        calls: Mapping[str, Sequence[Call]],
        wait: Wait,
        active: Context = contextlib.nullcontext,
        captured: Callable[[], int] = lambda: 0,
    ) -> None:
        self._wait, self._active, self._captured = wait, active, captured
        sets = len(next(iter(calls.values())))
        self._order = [(name, several[number]) for number in range(sets) for name, several in calls.items()]
        self._counts = {name: len(several) for name, several in calls.items()}
        self.rounds: dict[str, list[float]] = {name: [] for name in calls}

    def warm_up(self) -> None:
        """Run the mix until no CUDA graph is captured in as many rounds as one needs."""
        before, unchanged = self._captured(), 0
        for _ in range(MAX_WARM_UP):
            self._run()
            now = self._captured()
            unchanged = unchanged + 1 if now == before else 0
            before = now
            if unchanged == WARM_UP:
                break

    def __call__(self) -> float:
        """Run one round; returns the mean microseconds of a call.

        A round that is not measured runs first. The caches of the CPU then contain what a program that uses one library has
        there, and not what the other contender left.
        """
        self._run()
        spent = self._run()
        for name, seconds in spent.items():
            self.rounds[name].append(seconds / self._counts[name] * 1e6)
        return sum(spent.values()) / len(self._order) * 1e6

    def _run(self) -> dict[str, float]:
        """Run one round; returns the seconds of the calls of each kind."""
        spent = dict.fromkeys(self._counts, 0.0)
        with self._active():
            for first in range(0, len(self._order), PIECE):
                self._wait(None)
                for name, call in self._order[first : first + PIECE]:
                    begin = time.perf_counter()
                    result = call()
                    spent[name] += time.perf_counter() - begin
                    del result  # outside of the measured time
            self._wait(None)
        return spent


def measure_mixes(mixes: Mapping[str, Mix]) -> None:
    """Measure the mixes of several contenders in interleaved rounds; the results are in their ``rounds``."""
    for mix in mixes.values():
        mix.warm_up()
    interleaved(mixes, ROUNDS, seconds=SECONDS)
    for mix in mixes.values():
        for several in mix.rounds.values():
            del several[0]  # the first round does not count
