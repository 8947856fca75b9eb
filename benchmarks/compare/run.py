"""Measure all contenders in each preset and direction, compare their results with ours, and yield the rows."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..common import device, machine, timing
from ..contenders.contender import Contender, Inputs
from ..contenders.ours import Ours
from ..contenders.registry import unavailable
from ..presets import Preset
from . import cold
from .contender_run import ContenderRun
from .table import Row, complete

#: The most input sets. More would only add launches: the products before the calls sweep the cache, too.
MAX_SETS = 64


@dataclass(frozen=True)
class Rates:
    """The peak rates of the GPU, measured in the same run.

    Attributes:
        matmul_tflops: TFLOP/s of a large matrix product.
        matmul_dtype: the dtype of its matrices.
        copy_gbs: GB/s that a copy reads and writes.
    """

    matmul_tflops: float
    matmul_dtype: str
    copy_gbs: float

    @classmethod
    def measure(cls) -> Rates:
        """Measure the current GPU."""
        return cls(*device.matmul_tflops(), device.copy_gbs())

    def share(self, preset: Preset, direction: str, ms: float) -> dict[str, Any]:
        """The share of the rate that limits a preset: the copy's for decoding, else the matrix product's."""
        if preset.decode:
            return {"share": preset.moved_bytes / ms / 1e6 / self.copy_gbs, "share_of": "copy"}
        return {"share": preset.operations(direction) / ms / 1e9 / self.matmul_tflops, "share_of": "matmul"}


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        presets, directions, peers: the presets, directions and other contenders.
        rounds: the number of rounds.
        tune: whether our plans are autotuned first.
        cold: the preset whose first call in a new process is timed; None for none.
    """

    presets: Sequence[Preset]
    directions: Sequence[str]
    peers: Sequence[type[Contender]]
    rounds: int = timing.ROUNDS
    tune: bool = False
    cold: Preset | None = None

    @property
    def cases(self) -> list[tuple[Preset, str]]:
        """Each preset in each of the directions that it has."""
        return [
            (preset, direction) for preset in self.presets for direction in self.directions if direction in preset.directions
        ]


#: Called with the number of finished cases, their total, and the next case's name.
Progress = Callable[[int, int, str], None]


def run(settings: Settings, progress: Progress) -> Iterator[list[Row]]:
    """Measure; yields the rows of one preset and direction at a time.

    The disk cache is off, so that plans of other processes are not used.
    """
    for peer in settings.peers:
        unavailable(peer)  # imports peers before cuDNN is loaded, so that all use the same library
    with _environment("CUPY_SDPA_CACHE_DIR", "0"):
        versions, rates = machine.all_versions(), Rates.measure()
        for number, (preset, direction) in enumerate(settings.cases):
            progress(number, len(settings.cases), f"{preset.name} {direction}")
            rows = measure(preset, direction, settings, rates)
            device.free_memory()
            if preset is settings.cold and direction == "forward":
                _add_cold_starts(rows)
            yield [complete({**row, **versions}) for row in rows]


def measure(preset: Preset, direction: str, settings: Settings, rates: Rates) -> list[Row]:
    """Measure a preset in one direction; returns a row for each contender, ours first."""
    sets = [Inputs(preset) for _ in range(min(device.input_sets(preset.input_bytes), MAX_SETS))]
    runs = _prepared(preset, direction, sets, settings)
    before = machine.state("before")
    host_timers = {key: timer for one in runs for key, timer in one.host_timers().items()}
    for (one, column), times in timing.interleaved(host_timers, timing.HOST_ROUNDS).items():
        if one.ready:
            one.row[column] = statistics.median(times)
    ready = {one.name: one for one in runs if one.ready}
    for name, times in timing.interleaved(ready, settings.rounds).items():
        ready[name].record_times(times)
    common = {
        "preset": preset.name, "b": preset.b, "hq": preset.hq, "hkv": preset.hkv, "sq": preset.sq, "skv": preset.skv,
        "d": preset.d, "dv": preset.dv, "causal": preset.causal, "window": preset.left, "direction": direction,
        "dtype": "bfloat16", **before, **machine.state("after"),
        "matmul_tflops": rates.matmul_tflops, "matmul_dtype": rates.matmul_dtype, "copy_gbs": rates.copy_gbs,
    }  # fmt: skip
    return add_ratios([{**common, "way": one.name, **one.row} for one in runs], preset, rates)


def _prepared(preset: Preset, direction: str, sets: Sequence[Inputs], settings: Settings) -> list[ContenderRun]:
    """Prepare all contenders, ours first; the others' results are compared with ours."""
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
    return runs


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


def compile_peers(settings: Settings, progress: Progress) -> Iterator[str]:
    """Call every peer once in every case without measuring; yields a line for each that fails.

    FlexAttention compiles for a minute and stores the result in a cache on disk. Several processes with different presets fill
    that cache faster.
    """
    cases = settings.cases
    for number, (preset, direction) in enumerate(cases):
        progress(number, len(cases), f"{preset.name} {direction}")
        inputs = Inputs(preset)
        for kind in settings.peers:
            one = ContenderRun(kind, preset, direction)
            one.call_once(inputs)
            if reason := one.row.get("left_out"):
                yield f"{kind.name} ({preset.name} {direction}): {reason}"
        device.free_memory()


def _add_cold_starts(rows: Sequence[Row]) -> None:
    """Add the times of first calls in new processes to the rows of the contenders that run here."""
    for row in rows:
        if row["way"] in cold.COLD and not row.get("left_out"):
            try:
                row |= cold.cold_ms(row["way"], row["preset"])
            except cold.ColdStartError as error:
                row["cold_failed"] = str(error)


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable inside the block."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
