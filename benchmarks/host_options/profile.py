"""Where the host time of our calls in a mix goes: the time of each step, and how captured graphs are launched.

Every step is a function that is replaced by one that adds its time up. This takes time itself, so a step is corrected by the
time of an empty function, and the total is measured in rounds of their own. The rest are the steps between these functions.
"""

from __future__ import annotations

import collections
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from cupy_sdpa.calls import replay_cache
from cupy_sdpa.device import cuda_graph

from .measure import PIECE, Call, Mix, Wait

#: The timed steps. ``busy``, the check whether the device is idle, is a part of ``launch``.
STEPS = ("key", "context", "session", "stream", "allocate", "array", "launch", "busy")
#: The functions of :data:`.replay_cache._runtime`, and the steps that they are.
RUNTIME = {
    "context_id": "context", "session": "session", "current_stream": "stream", "alloc": "allocate", "array": "array",
}  # fmt: skip
#: The rounds of which the median counts.
ROUNDS = 11
#: The calls of an empty function that calibrate the clock.
EMPTY = 20000

Row = dict[str, Any]


class Clock:
    """The seconds of each step of calls, and how their graphs were launched.

    Attributes:
        kind: the kind of the present call.
        seconds: the seconds of each step of each kind.
        launches: for each kind the number of launches by the way of launching: a graph, or its nodes by their functions.
    """

    def __init__(self) -> None:
        self.kind = ""
        self.seconds: collections.defaultdict[tuple[str, str], float] = collections.defaultdict(float)
        self.launches: collections.defaultdict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self._empty, self._busy = 0.0, False
        empty = self.timed("empty", lambda: None)
        for _ in range(EMPTY):
            empty()
        self._empty = self.seconds.pop(("", "empty")) / EMPTY

    def timed(self, step: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose time is added to a step, less that of an empty function."""
        now, seconds, empty = time.perf_counter, self.seconds, self._empty

        def call(*given: Any, **named: Any) -> Any:
            begin = now()
            result = function(*given, **named)
            seconds[self.kind, step] += now() - begin - empty
            return result

        return call

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Time the steps within a ``with`` block."""
        cache, runtime, recording = vars(replay_cache), vars(replay_cache._runtime), cuda_graph.Recording
        is_busy, launch = cuda_graph.is_busy, self.timed("launch", recording.launch)

        def checked(stream: int) -> bool:
            self._busy = is_busy(stream)
            return self._busy

        def launched(graph: Any, *, of_many: bool) -> None:
            self._busy = False
            launch(graph, of_many=of_many)
            self.launches[self.kind]["graph" if graph._executable and not self._busy else _described(graph)] += 1

        with (
            mock.patch.dict(cache, read_key=self.timed("key", cache["read_key"])),
            mock.patch.dict(runtime, {name: self.timed(step, runtime[name]) for name, step in RUNTIME.items()}),
            mock.patch.object(cuda_graph, "is_busy", self.timed("busy", checked)),
            mock.patch.object(recording, "launch", launched),
        ):
            yield


def _described(graph: Any) -> str:
    """The functions that launch the nodes of a graph, and their numbers."""
    counts = collections.Counter(getattr(function, "__name__", "call").strip("_") for function, _ in graph._driver_calls)
    return " + ".join(f"{count} {name}" for name, count in counts.items())


def profile(calls: Mapping[str, Sequence[Call]], wait: Wait, captured: Callable[[], int]) -> list[Row]:
    """The microseconds of each step of the calls of each kind in a mix: the median over rounds.

    Args:
        calls: the calls of each kind on all sets of arrays.
        wait: waits for the device.
        captured: the number of CUDA graphs that are captured.
    """
    mix = Mix(calls, wait, captured=captured)
    mix.warm_up()
    for _ in range(ROUNDS):
        mix()
    totals = {name: statistics.median(several) for name, several in mix.rounds.items()}
    order = [(name, several[number]) for number in range(len(next(iter(calls.values())))) for name, several in calls.items()]
    clocks = [Clock() for _ in range(ROUNDS)]
    for clock in clocks:
        with clock.active():
            for position, (clock.kind, call) in enumerate(order):
                if position % PIECE == 0:
                    wait(None)
                result = call()
                del result
            wait(None)
    rows = []
    for name, total in totals.items():
        count = len(calls[name])
        steps = {step: round(statistics.median(c.seconds[name, step] for c in clocks) / count * 1e6, 2) for step in STEPS}
        rest = total - sum(us for step, us in steps.items() if step != "busy")
        by = "; ".join(f"{count} x {how}" for how, count in clocks[-1].launches[name].most_common())
        rows.append({"kind": name, "total": round(total, 2), **steps, "rest": round(rest, 2), "launches": by})
    return rows


def described(row: Row) -> str:
    """The printed line of a row."""
    return f"{row['kind']:18} {' '.join(f'{row[name]:>9}' for name in ('total', *STEPS, 'rest'))}  {row['launches']}"


def header() -> str:
    """The printed names of the columns."""
    return f"{'kind':18} {' '.join(f'{name:>9}' for name in ('total', *STEPS, 'rest'))}  launches"
