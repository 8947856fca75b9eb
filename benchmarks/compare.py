"""Attention and its gradients against PyTorch, cudnn-frontend, FlexAttention and JAX, for the presets.

    python -m benchmarks compare [results.csv] [--presets NAME ...]

All contenders run on the same inputs in the same process, in an order that is shuffled in every round. Their results are
compared with ours first; a contender that fails or differs is left out, with the reason. The disk cache is off.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import re
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from cupy_sdpa.cli import machine
from cupy_sdpa.cli.console import CommandError, one_line, positive

from . import device, presets, runner, timing
from .contenders.contender import Call, Contender, Inputs, Timer, UnavailableError
from .contenders.ours import Ours
from .contenders.registry import PEERS, select, unavailable
from .presets import Preset
from .table import Row, complete

#: The largest accepted difference from cupy_sdpa's results, relative to the largest magnitude.
TOLERANCE = 0.02
#: The most input sets. More would only add launches: the products before the calls also sweep the cache.
MAX_SETS = 64
#: The columns that are printed.
SHOWN = ("preset", "direction", "way", "ms", "ours_over_it", "share", "share_of", "host_us", "peak_bytes", "clock", "left_out")
_EPILOG = """\
A ratio is our time divided by the other contender's. A share is relative to
the rate of a large matrix product in the same run, for decoding to the rate
of a copy. FlexAttention is compiled for a minute in its first run; several
processes with different presets fill its cache faster.

examples:
  python -m benchmarks compare --list
  python -m benchmarks compare out.csv --presets llama-8b decode
  python -m benchmarks tables speed out.csv                      as a table
  python -m benchmarks tables figures out.csv --folder pictures
"""


class Rates(NamedTuple):
    """The peak rates of the GPU, measured in the same run: TFLOP/s of a large product and its dtype, GB/s of a copy."""

    matmul_tflops: float
    matmul_dtype: str
    copy_gbs: float

    def share(self, preset: Preset, direction: str, ms: float) -> dict[str, Any]:
        """Return the share of the rate that limits a preset: the copy's for decoding, else the matrix product's."""
        if preset.decode:
            return {"share": preset.moved_bytes / ms / 1e6 / self.copy_gbs, "share_of": "copy"}
        return {"share": preset.operations(direction) / ms / 1e9 / self.matmul_tflops, "share_of": "matmul"}


class Settings(NamedTuple):
    """What to measure: presets, directions, other contenders, and rounds."""

    presets: Sequence[Preset]
    directions: Sequence[str]
    peers: Sequence[type[Contender]]
    rounds: int = timing.ROUNDS

    @property
    def cases(self) -> list[tuple[Preset, str]]:
        """Each preset in each of the directions that it has."""
        return [(preset, name) for preset in self.presets for name in self.directions if name in preset.directions]


class ContenderRun:
    """A contender in one preset and direction: a call for each input set, its timer, and the columns of its row."""

    def __init__(self, kind: type[Contender], preset: Preset, direction: str) -> None:
        self.name = kind.name
        self.row: Row = {}
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

    def prepare(self, sets: Sequence[Inputs], expected: Sequence[Any], busy: Any) -> None:
        """Make the calls and compare the results of the first one with the expected ones, if there are any."""
        self.attempt(lambda: self._prepare(sets, expected, busy))

    def _prepare(self, sets: Sequence[Inputs], expected: Sequence[Any], busy: Any) -> None:
        made = self._contender = self._create()
        with made.active():
            calls = [made.call(inputs) for inputs in sets]
            self.results = made.to_cupy(calls[0]())
            for call in calls[1:]:  # run every call once before timing
                call()
            made.wait()
            if expected:
                self.row["difference"] = device.largest_difference(self.results, expected)
                self.results = []
                if not self.row["difference"] < TOLERANCE:  # also rejects NaN
                    raise device.WrongResultError(
                        f"its results differ from ours by {self.row['difference']:.3g} of the largest value"
                    )
            self.row |= {"peak_bytes": made.peak_bytes(calls[0]), **made.facts()}
            self._host_calls = {"host_us": calls[0], **dict(made.host_variants(sets[0]))}
            for call in self._host_calls.values():
                call()
            self._host_count = max(1, timing.affordable_calls(calls[0], made.wait) // timing.HOST_ROUNDS)
        self._timer = made.timer(calls, busy)

    def _create(self) -> Contender:
        if reason := unavailable(self._kind):
            raise UnavailableError(reason)
        return self._kind(*self._case)

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
    """Return one line: the exception, and the warnings before it that explain it."""
    texts = [re.sub(r" ?\(Triggered internally.*", "", text, flags=re.DOTALL) for text in caught]
    explanations = [text for text in texts if not text.endswith(("because:", "runtime disabled."))]
    own = ("cupy_sdpa", "benchmarks")
    name = "" if type(error).__module__.split(".")[0] in own else f"{type(error).__name__}: "
    return " ".join("; ".join(dict.fromkeys([f"{name}{error}", *explanations])).split())[:300]


def measure(preset: Preset, direction: str, settings: Settings, rates: Rates) -> list[Row]:
    """Measure a preset in one direction; returns a row for each contender, ours first."""
    sets = [Inputs(preset) for _ in range(min(device.input_sets(preset.input_bytes), MAX_SETS))]
    busy, _ = device.busy_matrix()
    kinds: list[type[Contender]] = [Ours, *(peer for peer in settings.peers if preset.dtype in peer.dtypes)]
    ours, *others = runs = [ContenderRun(kind, preset, direction) for kind in kinds]
    ours.prepare(sets, [], busy)
    for other in others:
        if ours.ready:
            other.prepare(sets, ours.results, busy)
        else:
            other.row["left_out"] = "our call failed: there are no results to compare with"
    ours.results = []
    host_timers = {key: timer for one in runs for key, timer in one.host_timers().items()}
    for (one, column), times in timing.interleaved(host_timers, timing.HOST_ROUNDS).items():
        if one.ready:
            one.row[column] = statistics.median(times)
    ready = {one.name: one for one in runs if one.ready}
    for name, times in timing.interleaved(ready, settings.rounds).items():
        ready[name].record_times(times)
    common = {**preset.columns(), "direction": direction, **rates._asdict()}
    return add_ratios([{**common, "way": one.name, **one.row} for one in runs], preset, rates)


def add_ratios(rows: list[Row], preset: Preset, rates: Rates) -> list[Row]:
    """Add medians, rates and ratios to the rows of one preset and direction, from the ``times`` of each round."""
    times = {row["way"]: row["times"] for row in rows if "times" in row}
    ms = {name: statistics.median(values) for name, values in times.items()}
    best = min((name for name in ms if name != Ours.name), key=ms.__getitem__, default=None)
    for row in rows:
        if (name := row["way"]) in ms:
            row |= {"ms": ms[name], "tflops": preset.operations(row["direction"]) / ms[name] / 1e9, "best_peer": name == best}
            row |= rates.share(preset, row["direction"], ms[name])
            if name != Ours.name and Ours.name in ms:
                row["ours_over_it"] = timing.ratio(times[Ours.name], times[name])
    return rows


# the command


def rows(given: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of all cases.

    Raises:
        CommandError: there is no such preset or peer, or the GPU cannot be used.
    """
    settings = Settings(presets.select(given.presets), given.directions, select(given.peers), given.rounds or timing.ROUNDS)
    if given.list:
        _list()
        return
    for peer in settings.peers:
        unavailable(peer)  # imports peers before cuDNN is loaded, so that all use the same library
    if obstacles := machine.obstacles():
        raise CommandError(f"compare cannot run here: {obstacles[0]}; `python -m benchmarks cpu` needs no GPU")
    os.environ["CUPY_SDPA_CACHE_DIR"] = "0"
    versions, rates = device.all_versions(), Rates(*device.matmul_tflops(), device.copy_gbs())
    for preset, direction in settings.cases:
        for row in measure(preset, direction, settings, rates):
            yield complete({**row, **versions})


def _list() -> None:
    """Print all presets, directions and peers."""
    print("presets:", *(f"  {preset.name:26}{preset.described()}" for preset in presets.PRESETS), sep="\n")
    print(f"directions: {', '.join(presets.DIRECTIONS)}")
    peers = ((name, kind.title, one_line(unavailable(kind)) or "available") for name, kind in PEERS.items())
    print("peers:", *(f"  {name:16}{title:18}{state}" for name, title, state in peers), sep="\n")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    names = ", ".join(presets.DIRECTIONS)
    parser.epilog = _EPILOG
    parser.add_argument("--list", action="store_true", help="list presets, directions and peers, and which peers are available")
    parser.add_argument("--presets", nargs="+", metavar="NAME", help="names or prefixes of presets (default: all)")
    parser.add_argument(
        "--directions", nargs="+", choices=presets.DIRECTIONS, default=presets.DIRECTIONS, metavar="NAME",
        help=f"{names} (default: all)",
    )  # fmt: skip
    parser.add_argument("--peers", nargs="*", metavar="NAME", help=f"{', '.join(PEERS)} (default: all; no name: none)")
    parser.add_argument("--rounds", type=positive, metavar="N", help=f"rounds (default {timing.ROUNDS})")


def main(words: Sequence[str]) -> int:
    """Run ``compare``; returns 1 if one of our own calls failed."""
    return runner.run(
        "compare", __doc__, words, rows, add_options, needs_gpu=lambda given: not given.list, shown=SHOWN,
        failed=lambda row: bool(row["left_out"]) and row["way"] == Ours.name,
    )  # fmt: skip
