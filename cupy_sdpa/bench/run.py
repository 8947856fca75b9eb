"""A preset in one direction: every way made ready, compared with ours, and timed in turn with the others."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from . import cold, facts, measure
from .presets import Preset
from .table import Row, tidy
from .way import Call, Impossible, Inputs, Ours, Timer, Way
from .ways import why_not

#: Largest difference from our results over the largest magnitude.
TOLERANCE = 0.02
#: Sets of inputs, at least and at most. More would only cost launches: the products in front of the calls sweep the cache, too.
FEWEST_SETS, MOST_SETS = 2, 64
#: Characters of the reason why a way is left out.
_REASON = 300


@dataclass(frozen=True)
class Rates:
    """What the GPU can do at best, measured in the same run.

    Attributes:
        matmul_tflops: of a large product of matrices.
        matmul_dtype: their dtype.
        copy_gbs: bytes that a copy reads and writes, 10^9 a second.
    """

    matmul_tflops: float
    matmul_dtype: str
    copy_gbs: float

    @classmethod
    def measured(cls) -> Rates:
        """On the current GPU."""
        return cls(*measure.matmul_tflops(), measure.copy_gbs())

    def share(self, preset: Preset, direction: str, ms: float) -> dict[str, Any]:
        """The part of the rate that bounds a preset: the copy's where a single query reads all keys, else the product's."""
        if preset.decode:
            return {"share": preset.moved_bytes / ms / 1e6 / self.copy_gbs, "share_of": "copy"}
        return {"share": preset.operations(direction) / ms / 1e9 / self.matmul_tflops, "share_of": "matmul"}


class Contestant:
    """A way in a run: its calls, one for every set of inputs, what is known of it, or why it is left out.

    No failure of it ends the run: it is kept as the reason.
    """

    def __init__(self, kind: type[Way], preset: Preset, direction: str) -> None:
        self.name = kind.name
        self.row: dict[str, Any] = {}
        self.results: list[Any] = []
        self._hosts: dict[str, Call] = {}
        self._host_calls = 1
        self._way: Way | None = None
        self._timer: Timer | None = None
        self._kind, self._asked = kind, (preset, direction)

    @property
    def ready(self) -> bool:
        """Whether it can be timed."""
        return self._timer is not None and "left_out" not in self.row

    def attempt(self, what: Callable[[], Any]) -> Any:
        """Do something, and leave this way out if it fails; gives None then."""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                return what()
            except Exception as error:  # whatever it is, the others go on
                self.row["left_out"] = _reason(error, [str(warning.message) for warning in said])
        return None

    def prepare(self, sets: Sequence[Inputs], expected: Sequence[Any], busy: Any, tune: bool) -> None:
        """Make the calls, compare the first one's results with the expected ones, if there are any, and learn what there is."""

        def do() -> None:
            if reason := why_not(self._kind):
                raise Impossible(reason)
            way = self._way = self._kind(*self._asked)
            if tune and isinstance(way, Ours):
                way.tune(sets[0])
            with way.active():
                calls = [way.call(inputs) for inputs in sets]
                self._compare(way, calls, expected)
                self.row |= {"peak_bytes": way.peak_bytes(calls[0]), **way.facts()}
                self._hosts = {"host_us": calls[0], **dict(way.other_calls(sets[0]))}
                for call in self._hosts.values():
                    call()
                self._host_calls = max(1, measure.affordable(calls[0], way.wait) // measure.HOST_ROUNDS)
            self._timer = way.timer(calls, busy)

        self.attempt(do)

    def call_once(self, inputs: Inputs) -> None:
        """Make the call and run it, so that what is compiled for it is in a cache."""

        def do() -> None:
            if reason := why_not(self._kind):
                raise Impossible(reason)
            way = self._kind(*self._asked)
            with way.active():
                way.wait(way.call(inputs)())

        self.attempt(do)

    def _compare(self, way: Way, calls: Sequence[Call], expected: Sequence[Any]) -> None:
        self.results = way.as_ours(calls[0]())
        for call in calls[1:]:  # each once, so that nothing is made for the first time while it is timed
            call()
        way.wait()
        if expected:
            self.row["difference"] = measure.farthest(self.results, expected)
            self.results = []
            if not self.row["difference"] < TOLERANCE:  # NaN is not
                raise measure.Wrong(f"its results are {self.row['difference']:.3g} of the largest value away from ours")

    def __call__(self) -> float:
        """Milliseconds of a call; NaN where it failed."""
        return self._measured(self._timer or (lambda: math.nan))

    def hosts(self) -> dict[tuple[Contestant, str], Callable[[], float]]:
        """What measures its host times, microseconds, by column; nothing where it is left out."""
        return {(self, column): functools.partial(self._host_us, call) for column, call in self._hosts.items() if self.ready}

    def _host_us(self, call: Call) -> float:
        assert self._way
        wait = self._way.wait
        return self._measured(lambda: measure.host_us(call, self._host_calls, wait))

    def _measured(self, timed: Callable[[], float]) -> float:
        def do() -> float:
            assert self._way
            with self._way.active():
                return timed()

        found = self.attempt(do) if self.ready else None
        return math.nan if found is None else float(found)

    def timed(self, times: Sequence[float]) -> None:
        """Write down what was measured."""
        if self.ready and self._timer:
            self.row |= {"times": times, "rounds": len(times), "clock": self._timer.clock}


def _reason(error: Exception, said: Sequence[str]) -> str:
    """One line: the exception, and what was warned of before it that says why."""
    told = [re.sub(r" ?\(Triggered internally.*", "", text, flags=re.DOTALL) for text in said]
    why = [text for text in told if not text.endswith(("because:", "runtime disabled."))]
    name = "" if type(error).__module__.startswith("cupy_sdpa") else f"{type(error).__name__}: "
    return " ".join("; ".join(dict.fromkeys([f"{name}{error}", *why])).split())[:_REASON]


def measured(
    preset: Preset, direction: str, peers: Sequence[type[Way]], rates: Rates, rounds: int, tune: bool = False
) -> list[Row]:
    """The rows of a preset in one direction, ours first."""
    beyond_the_cache = -(-2 * measure.l2_bytes() // preset.input_bytes)
    sets = [Inputs(preset) for _ in range(min(max(FEWEST_SETS, beyond_the_cache), MOST_SETS))]
    busy, _ = measure.busy_matrix()
    kinds: list[type[Way]] = [Ours, *peers]
    ours, *others = contestants = [Contestant(kind, preset, direction) for kind in kinds]
    ours.prepare(sets, [], busy, tune)
    for other in others:
        if ours.ready:
            other.prepare(sets, ours.results, busy, tune)
        else:
            other.row["left_out"] = "there is nothing to compare its results with"
    ours.results = []
    before = facts.state("before")
    hosts = {key: timed for one in contestants for key, timed in one.hosts().items()}
    for (one, column), times in measure.interleaved(hosts, measure.HOST_ROUNDS).items():
        if one.ready:
            one.row[column] = statistics.median(times)
    timed = {one.name: one for one in contestants if one.ready}
    for name, times in measure.interleaved(timed, rounds).items():
        timed[name].timed(times)
    common = {
        "preset": preset.name, "b": preset.b, "hq": preset.hq, "hkv": preset.hkv, "sq": preset.sq, "skv": preset.skv,
        "d": preset.d, "dv": preset.dv, "causal": preset.causal, "window": preset.left, "direction": direction,
        "dtype": "bfloat16", **before, **facts.state("after"),
        "matmul_tflops": rates.matmul_tflops, "matmul_dtype": rates.matmul_dtype, "copy_gbs": rates.copy_gbs,
    }  # fmt: skip
    return judged([{**common, "way": one.name, **one.row} for one in contestants], preset, rates)


def judged(rows: list[Row], preset: Preset, rates: Rates) -> list[Row]:
    """The rows of all ways of a preset in one direction, with times, rates and ratios, from their ``times`` of each round."""
    times = {row["way"]: row["times"] for row in rows if "times" in row}
    ms = {way: statistics.median(taken) for way, taken in times.items()}
    best = min((way for way in ms if way != Ours.name), key=ms.__getitem__, default=None)
    for row in rows:
        if (way := row["way"]) in ms:
            row |= {"ms": ms[way], "tflops": preset.operations(row["direction"]) / ms[way] / 1e9, "best_peer": way == best}
            row |= rates.share(preset, row["direction"], ms[way])
            if way != Ours.name and Ours.name in ms:
                row["ours_over_it"] = measure.ratio(times[Ours.name], times[way])
    return rows


@dataclass(frozen=True)
class Wanted:
    """What a run is to measure.

    Attributes:
        presets, directions, peers: these.
        rounds: how often each way is timed.
        tune: whether our plans are chosen by measuring first.
        cold: the preset whose first call in a new process is timed; None for none.
    """

    presets: Sequence[Preset]
    directions: Sequence[str]
    peers: Sequence[type[Way]]
    rounds: int = measure.ROUNDS
    tune: bool = False
    cold: Preset | None = None

    @property
    def cases(self) -> list[tuple[Preset, str]]:
        """The presets in every direction that they have."""
        return [
            (preset, direction) for preset in self.presets for direction in self.directions if direction in preset.directions
        ]


def run(wanted: Wanted, progress: Callable[[int, int, str], None]) -> Iterator[list[Row]]:
    """The tidy rows of everything wanted, those of a preset in one direction at a time.

    Plans that were kept or tuned in other processes do not count.

    Args:
        wanted: what is measured.
        progress: told how many cases are done, how many there are, and what comes next.
    """
    for peer in wanted.peers:
        why_not(peer)  # they are imported before cuDNN is looked for, so that all use one
    with _environment("CUPY_SDPA_CACHE_DIR", "0"):
        used, rates = facts.every_version(), Rates.measured()
        cases = wanted.cases
        for number, (preset, direction) in enumerate(cases):
            progress(number, len(cases), f"{preset.name} {direction}")
            rows = measured(preset, direction, wanted.peers, rates, wanted.rounds, wanted.tune)
            measure.free_memory()
            if preset is wanted.cold and direction == "forward":
                _add_cold(rows)
            yield [tidy({**row, **used}) for row in rows]


def compiled(wanted: Wanted, progress: Callable[[int, int, str], None]) -> Iterator[str]:
    """Call every peer once in every case, and measure nothing; gives what could not be called, and why.

    FlexAttention takes a minute for what its cache on disk then has: several such processes, each with other presets, fill it.
    """
    cases = wanted.cases
    for number, (preset, direction) in enumerate(cases):
        progress(number, len(cases), f"{preset.name} {direction}")
        inputs = Inputs(preset)
        for kind in wanted.peers:
            one = Contestant(kind, preset, direction)
            one.call_once(inputs)
            if reason := one.row.get("left_out"):
                yield f"{kind.name} ({preset.name} {direction}): {reason}"
        measure.free_memory()


def _add_cold(rows: Sequence[Row]) -> None:
    """Add the first calls of new processes to the rows of the ways that run here."""
    for row in rows:
        if row["way"] in cold.COLD and not row.get("left_out"):
            try:
                row |= cold.cold_ms(row["way"], row["preset"])
            except cold.Failed as error:
                row["cold_failed"] = str(error)


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """A variable of the environment for a while."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
