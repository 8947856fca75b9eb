"""Attention and its gradients against PyTorch, cudnn-frontend, FlexAttention and JAX, for the presets.

All contenders run on the same inputs in the same process, in an order that is shuffled in every round. Their results are
compared with ours first; a contender that fails or differs is left out, with the reason. The disk cache is off.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import re
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cupy_sdpa.cli import machine, picture
from cupy_sdpa.cli.console import CommandError, Progress, file_error, one_line, output_file, positive

from . import cpu, device, plots, presets, runner, table, timing
from .contenders.contender import Call, Contender, Inputs, Timer, UnavailableError
from .contenders.ours import Ours
from .contenders.registry import PEERS, select, unavailable
from .presets import Preset
from .table import Row, complete

#: The largest accepted difference from cupy_sdpa's results, relative to the largest magnitude.
TOLERANCE = 0.02
#: The most input sets. More would only add launches: the products before the calls sweep the cache, too.
MAX_SETS = 64
_EPILOG = """\
A ratio is our time divided by the other contender's. A share is relative to
the rate of a large matrix product in the same run, for decoding to the rate
of a copy.

examples:
  python -m benchmarks compare --list
  python -m benchmarks compare --presets llama-8b decode --csv out.csv
  python -m benchmarks compare --compile --peers flex --presets vit
  python -m benchmarks compare --cpu                             needs no GPU
  python -m benchmarks compare --from out.csv --plots pictures   needs no GPU
"""


class Rates(NamedTuple):
    """The peak rates of the GPU, measured in the same run: TFLOP/s of a large product and its dtype, GB/s of a copy."""

    matmul_tflops: float
    matmul_dtype: str
    copy_gbs: float

    def share(self, preset: Preset, direction: str, ms: float) -> dict[str, Any]:
        """The share of the rate that limits a preset: the copy's for decoding, else the matrix product's."""
        if preset.decode:
            return {"share": preset.moved_bytes / ms / 1e6 / self.copy_gbs, "share_of": "copy"}
        return {"share": preset.operations(direction) / ms / 1e9 / self.matmul_tflops, "share_of": "matmul"}


class Settings(NamedTuple):
    """What to measure: presets, directions, other contenders, rounds, and whether our plans are autotuned first."""

    presets: Sequence[Preset]
    directions: Sequence[str]
    peers: Sequence[type[Contender]]
    rounds: int = timing.ROUNDS
    tune: bool = False

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

    def prepare(self, sets: Sequence[Inputs], expected: Sequence[Any], busy: Any, tune: bool) -> None:
        """Make the calls and compare the results of the first one with the expected ones, if there are any."""
        self.attempt(lambda: self._prepare(sets, expected, busy, tune))

    def _prepare(self, sets: Sequence[Inputs], expected: Sequence[Any], busy: Any, tune: bool) -> None:
        made = self._contender = self._create()
        if tune and isinstance(made, Ours):
            made.tune(sets[0])
        with made.active():
            calls = [made.call(inputs) for inputs in sets]
            self.results = made.to_cupy(calls[0]())
            for call in calls[1:]:  # run every call once before timing
                call()
            made.wait()
            if expected:
                self.row["difference"] = device.largest_difference(self.results, expected)
                self.results = []
                if not self.row["difference"] < TOLERANCE:  # also refuses NaN
                    raise device.WrongResultError(
                        f"its results differ from ours by {self.row['difference']:.3g} of the largest value"
                    )
            self.row |= {"peak_bytes": made.peak_bytes(calls[0]), **made.facts()}
            self._host_calls = {"host_us": calls[0], **dict(made.host_variants(sets[0]))}
            for call in self._host_calls.values():
                call()
            self._host_count = max(1, timing.affordable_calls(calls[0], made.wait) // timing.HOST_ROUNDS)
        self._timer = made.timer(calls, busy)

    def call_once(self, inputs: Inputs) -> None:
        """Run the call once, which fills the caches of compiled kernels."""

        def once() -> None:
            made = self._create()
            with made.active():
                made.wait(made.call(inputs)())

        self.attempt(once)

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
    """One line: the exception, and the warnings before it that explain it."""
    texts = [re.sub(r" ?\(Triggered internally.*", "", text, flags=re.DOTALL) for text in caught]
    explanations = [text for text in texts if not text.endswith(("because:", "runtime disabled."))]
    own = ("cupy_sdpa", "benchmarks")
    name = "" if type(error).__module__.split(".")[0] in own else f"{type(error).__name__}: "
    return " ".join("; ".join(dict.fromkeys([f"{name}{error}", *explanations])).split())[:300]


def run(settings: Settings, progress: Callable[[int, int, str], None]) -> Iterator[list[Row]]:
    """Measure; yields the rows of one preset and direction at a time.

    Args:
        settings: what to measure.
        progress: called with the number of finished cases, their total, and the next case's name.
    """
    for peer in settings.peers:
        unavailable(peer)  # imports peers before cuDNN is loaded, so that all use the same library
    os.environ["CUPY_SDPA_CACHE_DIR"] = "0"
    versions, rates = device.all_versions(), Rates(*device.matmul_tflops(), device.copy_gbs())
    for number, (preset, direction) in enumerate(settings.cases):
        progress(number, len(settings.cases), f"{preset.name} {direction}")
        rows = measure(preset, direction, settings, rates)
        device.free_memory()
        yield [complete({**row, **versions}) for row in rows]


def measure(preset: Preset, direction: str, settings: Settings, rates: Rates) -> list[Row]:
    """Measure a preset in one direction; returns a row for each contender, ours first."""
    sets = [Inputs(preset) for _ in range(min(device.input_sets(preset.input_bytes), MAX_SETS))]
    busy, _ = device.busy_matrix()
    kinds: list[type[Contender]] = [Ours, *settings.peers]
    ours, *others = runs = [ContenderRun(kind, preset, direction) for kind in kinds]
    ours.prepare(sets, [], busy, settings.tune)
    for other in others:
        if ours.ready:
            other.prepare(sets, ours.results, busy, settings.tune)
        else:
            other.row["left_out"] = "our call failed: there are no results to compare with"
    ours.results = []
    before = device.state("before")
    host_timers = {key: timer for one in runs for key, timer in one.host_timers().items()}
    for (one, column), times in timing.interleaved(host_timers, timing.HOST_ROUNDS).items():
        if one.ready:
            one.row[column] = statistics.median(times)
    ready = {one.name: one for one in runs if one.ready}
    for name, times in timing.interleaved(ready, settings.rounds).items():
        ready[name].record_times(times)
    common = {**preset.columns(), "direction": direction, **before, **device.state("after"), **rates._asdict()}
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


def compile_peers(settings: Settings, progress: Callable[[int, int, str], None]) -> Iterator[str]:
    """Call every peer once in every case without measuring; yields a line for each that fails.

    FlexAttention compiles for a minute and stores the result in a cache on disk. Several processes with different presets fill
    that cache faster.
    """
    for number, (preset, direction) in enumerate(settings.cases):
        progress(number, len(settings.cases), f"{preset.name} {direction}")
        inputs = Inputs(preset)
        for kind in settings.peers:
            one = ContenderRun(kind, preset, direction)
            one.call_once(inputs)
            if reason := one.row.get("left_out"):
                yield f"{kind.name} ({preset.name} {direction}): {reason}"
        device.free_memory()


# the command


def parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    parser = runner.parser("compare", __doc__)
    parser.epilog = _EPILOG
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--cpu", action="store_true", help="time the CPU engine against plain numpy only")
    mode.add_argument("--from", dest="source", type=Path, metavar="FILE", help="the rows of an earlier run, from its CSV file")
    mode.add_argument("--list", action="store_true", help="list presets, directions and peers, and which peers are available")
    mode.add_argument("--compile", action="store_true", help="call every peer once to fill the caches of compiled kernels")
    parser.add_argument("--presets", nargs="+", metavar="NAME", help="names or prefixes of presets (default: all)")
    parser.add_argument("--directions", nargs="+", choices=presets.DIRECTIONS, metavar="NAME",
        help=f"{', '.join(presets.DIRECTIONS)} (default: all)",
    )  # fmt: skip
    parser.add_argument("--peers", nargs="*", metavar="NAME", help=f"{', '.join(PEERS)} (default: all; no name: none)")
    parser.add_argument(
        "--rounds", type=positive, metavar="N", help=f"rounds (default {timing.ROUNDS}, with --cpu {cpu.ROUNDS})"
    )
    parser.add_argument("--tune", action="store_true", help="autotune our plans first (docs/plans.md)")
    parser.add_argument("--csv", type=output_file, metavar="FILE", help="write all rows, each with all versions")
    parser.add_argument("--json", action="store_true", help="print all rows as JSON instead of the table")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="write figures (needs matplotlib)")
    return parser


#: The options that cannot be combined with a mode.
_EXCLUDED = {
    "cpu": ("presets", "directions", "peers", "tune"),
    "source": ("rounds", "tune", "csv"),
    "list": ("presets", "directions", "peers", "rounds", "tune", "csv", "plots"),
    "compile": ("rounds", "tune", "csv", "plots", "json"),
}


def main(words: Sequence[str]) -> int:
    """Run ``compare``; returns 1 if one of our own calls failed.

    Raises:
        CommandError: it cannot run.
    """
    given = parser().parse_args(words)
    for mode, names in _EXCLUDED.items():
        present = [name for name in names if getattr(given, name) not in (None, False)]
        if getattr(given, mode) and present:
            raise CommandError(f"--{present[0]} has no effect with --{'from' if mode == 'source' else mode}: remove it")
    try:
        settings = Settings(
            presets.select(given.presets), given.directions or presets.DIRECTIONS, select(given.peers),
            given.rounds or timing.ROUNDS, given.tune,
        )  # fmt: skip
    except ValueError as error:
        raise CommandError(str(error)) from error
    if given.list:
        _list(as_json=given.json)
        return 0
    if given.compile:
        _check_gpu(settings)
        with Progress("compiling") as bar:
            for line in compile_peers(settings, _reporter(bar)):
                print(f"left out: {line}")
        return 0
    if given.plots and not picture.importable():
        raise CommandError("--plots needs matplotlib: pip install 'cupy-sdpa[plot]'")
    rows = _collect(given, settings)
    return int(any(row["left_out"] and row["way"] == Ours.name for row in rows))


def _collect(given: argparse.Namespace, settings: Settings) -> list[Row]:
    """Measure or read the rows, and write them to all outputs; rows of an interrupted run are written, too."""
    rows: list[Row] = []
    try:
        for new in _rows(given, settings):
            rows += new
            if given.csv:
                runner.write_csv(given.csv, rows)
    except OSError as error:
        raise CommandError(file_error(error)) from error
    except (ValueError, device.WrongResultError) as error:
        raise CommandError(str(error)) from error
    finally:
        if rows:
            print(json.dumps(rows, indent=1) if given.json else "\n".join(table.lines(rows)))
            if given.plots:
                for path in plots.draw(rows, given.plots):
                    print(f"wrote {path}", file=sys.stderr)
    return rows


def _rows(given: argparse.Namespace, settings: Settings) -> Iterator[list[Row]]:
    """The rows of an earlier run, or of each case as soon as it is measured."""
    if given.source:
        ways = (Ours.name, *(peer.name for peer in settings.peers))
        names = {preset.name for preset in settings.presets}
        yield [
            row for row in table.read_csv(given.source)
            if (given.presets is None or row["preset"] in names)
            and row["direction"] in settings.directions
            and (given.peers is None or row["way"] in ways)
        ]  # fmt: skip
        return
    with Progress("measuring") as bar:
        report = _reporter(bar)
        if not given.cpu:
            _check_gpu(settings)
            yield from run(settings, report)
        if given.cpu or given.presets is None:
            yield [complete(row) for row in cpu.measure(rounds=given.rounds or cpu.ROUNDS, progress=report)]


def _check_gpu(settings: Settings) -> None:
    if reason := machine.no_gpu():
        raise CommandError(f"compare needs a GPU ({reason}); --cpu runs the part that needs none")
    for peer in settings.peers:
        unavailable(peer)  # imports peers before cuDNN is loaded, so that all use the same library
    if obstacles := machine.obstacles():
        raise CommandError(f"compare cannot run here: {obstacles[0]}; --cpu runs the part that needs no GPU")


def _reporter(bar: Progress) -> Callable[[int, int, str], None]:
    """A function that shows progress: a bar on a terminal, else a line for every case."""

    def report(done: int, total: int, case: str) -> None:
        if sys.stderr.isatty():
            bar(done, total)
        else:
            print(f"{done + 1} of {total}: {case}", file=sys.stderr, flush=True)

    return report


def _list(*, as_json: bool) -> None:
    """Print all presets, directions and peers."""
    peers = {name: one_line(unavailable(kind)) or "available" for name, kind in PEERS.items()}
    found = {preset.name: preset.described() for preset in presets.PRESETS}
    if as_json:
        print(json.dumps({"presets": found, "directions": presets.DIRECTIONS, "peers": peers}, indent=1))
        return
    print("presets:", *(f"  {name:26}{text}" for name, text in found.items()), sep="\n")
    print(f"directions: {', '.join(presets.DIRECTIONS)}")
    print("peers:", *(f"  {name:16}{PEERS[name].title:18}{state}" for name, state in peers.items()), sep="\n")
