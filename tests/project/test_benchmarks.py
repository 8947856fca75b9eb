"""The benchmarks: presets, timers, arithmetic, tables and files, the CPU run, and errors of one line."""

import csv
import math
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmark_rows import RATES, rows_of, two_presets

from benchmarks import presets
from benchmarks.common import accuracy, script, timing
from benchmarks.common import machine as facts
from benchmarks.compare import cold, contender_run, cpu, run, table
from benchmarks.contenders import contender, registry
from benchmarks.presets import PRESETS, Preset

ROOT = Path(__file__).parents[2]
NAMES = [preset.name for preset in PRESETS]
SMALL = Preset("small", 2, 4, 2, 6, 6, 16, 8, causal=True)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# presets


def test_preset_names_are_unique():
    """Names are unique and valid words of a command line."""
    assert len(set(NAMES)) == len(NAMES)
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") for name in NAMES)


@pytest.mark.parametrize("preset", PRESETS, ids=NAMES)
def test_a_preset_gives_valid_problems(preset):
    """In each of its directions, with its sizes."""
    assert set(preset.directions) <= set(presets.DIRECTIONS)
    for direction in preset.directions:
        asked = preset.problems(direction)
        assert [problem.backward for problem in asked] == {"forward": [0], "backward": [1], "both": [0, 1]}[direction]
        assert (asked[0].stats is not None) == (direction != "forward")
        for problem in asked:
            assert problem.sizes == (preset.d, preset.dv, preset.hq, preset.hkv, preset.sq, preset.skv, preset.b)
            assert (problem.band is not None) == preset.causal


@pytest.mark.parametrize("left", [None, 0, 2, 9])
@pytest.mark.parametrize(("sq", "skv", "causal"), [(7, 7, True), (7, 7, False), (3, 8, True), (8, 3, True), (1, 9, False)])
def test_visible_pairs_are_counted(sq, skv, causal, left):
    """Equal to the count of a double loop."""
    preset = Preset("x", 1, 1, 1, sq, skv, 8, 8, causal=causal, left=left)
    seen = sum((not causal or j <= i) and (left is None or i - j <= left) for i in range(sq) for j in range(skv))
    assert preset.pairs == seen


def test_useful_operations():
    """Two matrix products forward, five backward, over the visible pairs of all heads and batch entries."""
    pairs = 2 * 4 * (1 + 2 + 3 + 4 + 5 + 6)
    assert SMALL.operations("forward") == 2 * pairs * (16 + 8)
    assert SMALL.operations("backward") == 2 * pairs * (3 * 16 + 2 * 8)
    assert SMALL.operations("both") == SMALL.operations("forward") + SMALL.operations("backward")
    assert SMALL.moved_bytes == 2 * 2 * 6 * (4 * 16 + 2 * 16 + 2 * 8 + 4 * 8)


def test_presets_are_selected_by_name_or_prefix():
    """An exact name wins over a prefix; an unknown name is an error."""
    assert [preset.name for preset in presets.select(["llama-8b-8k"])] == ["llama-8b-8k"]
    assert all(preset.name.startswith("vit") for preset in presets.select(["vit"]))
    with pytest.raises(ValueError, match="no preset 'bert'"):
        presets.select(["bert"])
    with pytest.raises(ValueError, match="no peer 'xformers': choose from torch-cudnn"):
        registry.select(["xformers"])


# measuring


def test_rounds_are_shuffled():
    """Every contender is measured once per round, the first round does not count, and the order changes."""
    order = []

    def timer_of(name):
        def measure():
            order.append(name)
            return float(len(order))

        return measure

    names = ("a", "b", "c", "d")
    taken = timing.interleaved({name: timer_of(name) for name in names}, 12)
    rounds = [tuple(order[i : i + 4]) for i in range(0, len(order), 4)]
    assert len(rounds) == 13
    assert all(sorted(turn) == sorted(names) for turn in rounds)
    assert len(set(rounds)) > 6
    assert len({turn[0] for turn in rounds}) == 4
    assert all(len(values) == 12 for values in taken.values())
    assert min(map(min, taken.values())) > 4
    assert random.Random(0).sample(names, 4) == list(rounds[0])  # reproducible


def test_a_slow_contender_gets_fewer_rounds():
    """A contender that has used its time gets the minimum number of rounds, the others get all rounds."""
    now = [0.0]

    def slow():
        now[0] += timing.SECONDS_PER_CONTENDER
        return 1.0

    taken = timing.interleaved({"slow": slow, "fast": lambda: 2.0}, 20, clock=lambda: now[0])
    assert len(taken["slow"]) == timing.MIN_ROUNDS
    assert len(taken["fast"]) == 20


def test_a_wall_clock_runs_long_enough():
    """The number of calls grows until the total time is long enough; the result is the time of one call."""
    calls = []
    timer = timing.WallClock([lambda: calls.append(1), lambda: calls.append(2)], lambda results: None)
    assert 0 < timer() < 1000 * timing.WALL_SECONDS
    assert len(calls) % 2 == 0
    assert len(calls) > 2


def test_largest_difference():
    """Relative to the largest magnitude, of the worst pair; NaN for NaN; an error for different shapes."""
    a, b = np.array([1.0, 2.0, -4.0]), np.array([1.0, 2.0, -3.0])
    assert accuracy.largest_difference([a, a], [a, b]) == pytest.approx(1 / 3)
    assert accuracy.largest_difference([a], [a]) == 0
    assert math.isnan(accuracy.largest_difference([a, np.array([np.nan])], [a, np.array([1.0])]))
    with pytest.raises(accuracy.WrongResultError, match="shape"):
        accuracy.largest_difference([a], [a[:2]])


class Fake(contender.Contender):
    """A contender with a given result and time."""

    name, title = "fake", "a fake"
    result, ms = 1.0, 3.0

    def call(self, inputs):
        return lambda: (np.array([self.result, 2.0]),)

    def timer(self, calls, busy):
        return type("Timer", (), {"clock": "no clock", "__call__": lambda _: self.ms})()

    def wait(self, results=None):
        pass


def contender_of(kind):
    """A run of a contender, ready or left out."""
    one = contender_run.ContenderRun(kind, SMALL, "forward")
    one.prepare([None, None], [np.array([1.0, 2.0])], None, tune=False)
    return one


def test_a_correct_contender_is_timed():
    """Its row has the times of all rounds and the clock."""
    one = contender_of(Fake)
    assert one.ready
    times = [one(), 5.0, 4.0]
    one.record_times(times)
    assert (one.row["times"], one.row["rounds"], one.row["clock"], one.row["difference"]) == (times, 3, "no clock", 0.0)
    (((owner, column), timer),) = one.host_timers().items()
    assert (owner, column) == (one, "host_us")
    assert timer() > 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"result": 1.1}, "its results differ from ours by 0.05 of the largest value"),
        ({"result": math.nan}, "its results differ from ours by nan of"),
        ({"call": lambda self, inputs: 1 / 0}, "ZeroDivisionError: division by zero"),
        ({"call": lambda self, inputs: lambda: [][0]}, "IndexError: list index out of range"),
        ({"requires": ("no_such_module",)}, "no_such_module cannot be imported: No module named 'no_such_module'"),
        ({"facts": lambda self: dict[str, str]()["x"]}, "KeyError: 'x'"),
    ],
    ids=["wrong", "nan", "no_call", "failing_call", "not_installed", "no_facts"],
)
def test_a_failing_contender_is_left_out_with_its_reason(change, reason):
    """It is not timed, and does not end the run."""
    one = contender_of(type("Failing", (Fake,), change))
    assert not one.ready
    assert one.row["left_out"].startswith(reason)
    assert math.isnan(one())
    one.record_times([1.0])
    assert "ms" not in one.row


def test_compiling_calls_every_peer_once(monkeypatch):
    """In every case; failures are reported and do not end the run."""
    called = []

    class Compiling(Fake):
        def call(self, inputs):
            return lambda: called.append((self.preset.name, self.direction)) or (np.ones(2),)

    failing = type("Failing", (Fake,), {"name": "failing", "call": lambda self, inputs: 1 / 0})
    monkeypatch.setattr(run, "Inputs", lambda preset: None)
    monkeypatch.setattr(run.device, "free_memory", lambda: None)
    settings = run.Settings([SMALL], ["forward", "both"], [Compiling, failing])
    failures = list(run.compile_peers(settings, lambda *_: None))
    assert called == [(SMALL.name, "forward"), (SMALL.name, "both")]
    assert failures == [
        f"failing ({SMALL.name} {direction}): ZeroDivisionError: division by zero" for direction in ("forward", "both")
    ]


def test_a_contender_that_fails_while_it_is_timed():
    """It is left out."""
    one = contender_of(type("Failing", (Fake,), {"ms": property(lambda self: 1 / 0)}))
    assert one.ready
    assert math.isnan(one())
    assert one.row["left_out"].startswith("ZeroDivisionError")


def test_warnings_become_part_of_the_reason():
    """Warnings that explain the failure are included; those that only introduce them are not."""
    said = [
        "Flash attention kernel not used because: (Triggered internally at x.h:3)",
        "the last dimension differs",
        "off (Triggered",
    ]
    assert (
        contender_run.failure_reason(RuntimeError("No kernel"), said)
        == "RuntimeError: No kernel; the last dimension differs; off (Triggered"
    )


def test_without_nvidia_smi_the_state_is_empty(monkeypatch, folder):
    """The columns exist and are empty."""
    runtime = type("Runtime", (), {"getDevice": lambda: 0, "deviceGetPCIBusId": lambda device: "0000:00:00.0"})
    cupy = type("Cupy", (), {"cuda": type("Cuda", (), {"runtime": runtime})})
    monkeypatch.setattr(facts.cupy_runtime, "cupy", lambda: cupy)
    monkeypatch.setenv("PATH", str(folder))
    assert set(facts.state("before").values()) == {""}
    (folder / "nvidia-smi").write_text("#!/bin/sh\necho 1980, 3201, 130.5, 41, 0x0000000000000000\n")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")
    found = facts.state("after")
    assert found["sm_mhz_after"] == "1980"
    assert found["throttle_after"] == "0x0000000000000000"
    assert set(found) | set(facts.state("before")) == set(facts.STATE_COLUMNS)


def test_a_failing_cold_start_has_a_reason():
    """The last line of the output of the process."""
    if not registry.unavailable(registry.PEERS["torch-cudnn"]):
        pytest.skip("PyTorch is installed")
    with pytest.raises(cold.ColdStartError, match="No module named 'torch'"):
        cold.cold_ms("torch-cudnn", NAMES[0])


# rows


def test_rates_and_ratios():
    """TFLOP/s, the share of the peak rate, the ratio of times, and the fastest other contender."""
    rows = {row["way"]: row for row in two_presets()[:4]}
    operations = PRESETS[0].operations("forward")
    assert rows["ours"]["tflops"] == round(operations / 2e-3 / 1e12, 2)
    assert rows["ours"]["share"] == pytest.approx(rows["ours"]["tflops"] / 700, abs=1e-3)
    assert (rows["ours"]["ours_over_it"], rows["ours"]["best_peer"]) == (None, False)
    assert (rows["torch-cudnn"]["ours_over_it"], rows["torch-cudnn"]["best_peer"]) == (2.0, True)
    assert (rows["flex"]["ours_over_it"], rows["flex"]["best_peer"]) == (0.5, False)
    assert (rows["jax"]["ms"], rows["jax"]["left_out"]) == (None, "it cannot")


def test_ratios_are_within_a_round():
    """A clock that falls during the run does not change the ratios."""
    times = {"ours": [1.0, 1.0, 2.0, 2.0, 2.0], "torch-cudnn": [1.0, 1.0, 2.0], "flex": [3.0, 1.0, 6.0, 6.0, 6.0]}
    rows = run.add_ratios(
        [{"way": name, "direction": "forward", "times": values} for name, values in times.items()], PRESETS[0], RATES
    )
    assert [row["ms"] for row in rows] == [2.0, 1.0, 6.0]
    assert [row.get("ours_over_it") for row in rows] == [None, 1.0, pytest.approx(1 / 3)]
    (mean,) = table.ratios([{"preset": "", **row} for row in rows], "forward")
    assert mean == 1.0


def test_the_share_of_decoding_is_relative_to_a_copy():
    """It is the rate of the bytes that must be moved."""
    (preset,) = presets.select(["decode-32k-batch-1"])
    (row,) = rows_of(preset, {"ours": 0.1})
    moved = 2 * 128 * (32 + 2 * 8 * 32768 + 32)
    assert row["share_of"] == "copy"
    assert row["share"] == pytest.approx(moved / 1e-4 / 4000e9, abs=1e-4)


def test_means_are_geometric():
    """For one contender, for the fastest of each preset, and for memory."""
    rows = two_presets()
    assert table.ratios(rows, "forward", "torch-cudnn") == [2.0, 0.25]
    assert table.ratios(rows, "forward") == [2.0, 0.5]
    assert table.ratios(rows, "forward", "flex", "peak_bytes") == [1.0, 1.0]
    assert table.ratios(rows, "backward") == []
    assert table.summary([2.0, 0.25]) == "0.71 (0.25 to 2.00)"


def test_the_printed_table():
    """Values, dashes for left-out contenders, means and reasons, at most 120 columns wide."""
    shown = list(table.lines(two_presets()))
    assert max(map(len, shown)) <= 120
    assert shown[0].split() == ["preset", "direction", "ms", "TFLOP/s", "share", "host", "us", "cudnn", "flex", "jax"]
    assert shown[1].split()[-3:] == ["2.000", "0.500", "-"]
    text = "\n".join(shown)
    assert "forward   the fastest     time 1.00 (0.50 to 2.00)" in text
    assert f"jax ({NAMES[0]} forward and 1 more): it cannot" in text
    assert "may include the host's time:\n  flex, 2 times: wall clock of consecutive calls" in text


def test_a_file_of_rows_comes_back(folder):
    """Every row has all columns, and reading returns the rows that were written."""
    rows = two_presets()
    script.write_csv("x.csv", rows)
    with open("x.csv", newline="") as file:
        assert tuple(next(csv.reader(file))) == table.COLUMNS
    assert table.read_csv("x.csv") == rows
    (folder / "other.csv").write_text("part,value\na,1\n")
    with pytest.raises(ValueError, match=r"other.csv is not a CSV file of compare: it has no column preset"):
        table.read_csv("other.csv")


def test_the_table_of_the_docs(folder):
    """It has a line for every preset with the name of the fastest other contender, and the means."""
    script.write_csv("x.csv", two_presets())
    command = [sys.executable, "-m", "benchmarks", "tables", "speed", "x.csv"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"PYTHONPATH": str(ROOT)})
    lines = done.stdout.splitlines()
    assert (
        f"| {NAMES[0]} | 2 | 21 | 2.00\N{NO-BREAK SPACE}cudnn |".replace("| 21 |", f"| {two_presets()[0]['tflops']:.0f} |")
        in lines
    )
    assert "| time | the fastest | 1.00 (0.50 to 2.00) |" in lines


# the CPU


def test_plain_numpy_agrees_with_the_cpu_engine():
    """A tiny problem gives rows for both contenders and directions, with time and memory."""
    rows = cpu.measure((8, 2, 16, 1), rounds=2)
    assert [(row["direction"], row["way"]) for row in rows] == [
        (direction, name) for direction in ("forward", "backward") for name in ("ours", "numpy")
    ]
    for row in rows:
        assert row["ms"] > 0
        assert row["peak_bytes"] > 0
    assert set().union(*rows) <= set(table.COLUMNS)


def test_a_wrong_comparison_is_not_timed(monkeypatch):
    """Different results are an error."""
    monkeypatch.setattr(cpu, "plain_forward", lambda q, k, v: (2 * v,))
    with pytest.raises(ArithmeticError, match="differ by"):
        cpu.measure((8, 2, 16, 1), rounds=1)


def test_nan_is_a_difference(monkeypatch):
    """NaN in any result is an error."""
    plain = cpu.plain_backward

    def with_nan(*arrays):
        *others, dv = plain(*arrays)
        return (*others, dv * np.nan)

    monkeypatch.setattr(cpu, "plain_backward", with_nan)
    with pytest.raises(ArithmeticError, match="differ by nan"):
        cpu.measure((8, 2, 16, 1), rounds=1)
