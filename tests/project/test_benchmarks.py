"""The benchmarks: presets, timers, contenders, rows and tables, and the CPU run."""

import math
import random

import numpy as np
import pytest
from benchmark_rows import RATES, SMALL, rows_of, two_presets
from command_line import run as run_command

from benchmarks import compare, cpu, device, presets, runner, table, timing
from benchmarks.__main__ import main
from benchmarks.contenders import contender, registry
from benchmarks.presets import PRESETS, Preset

# presets


def test_presets():
    """Names are unique words of a command line; the problems of each direction are valid and have the preset's sizes."""
    names = [preset.name for preset in PRESETS]
    assert len({*names}) == len(names)
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") for name in names)
    for preset in (preset for preset in PRESETS if not preset.engine):
        assert set(preset.directions) <= set(presets.DIRECTIONS)
        for direction in preset.directions:
            asked = preset.problems(direction)
            assert [problem.backward for problem in asked] == {"forward": [0], "backward": [1], "both": [0, 1]}[direction]
            assert (asked[0].stats is not None) == (direction != "forward")
            for problem in asked:
                assert problem.sizes == (preset.d, preset.dv, preset.hq, preset.hkv, preset.sq, preset.skv, preset.b)
                assert (problem.band is not None) == preset.causal
    assert [preset.name for preset in presets.select(["llama-8b-8k"])] == ["llama-8b-8k"]
    assert all(preset.name.startswith("vit") for preset in presets.select(["vit"]))


@pytest.mark.parametrize("left", [None, 0, 2, 9])
@pytest.mark.parametrize(("sq", "skv", "causal"), [(7, 7, True), (3, 8, True), (8, 3, True), (1, 9, False)])
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


# measuring


def test_rounds_are_shuffled():
    """Every contender is measured once per round, the first round does not count, and the order changes, reproducibly."""
    order, names = [], ("a", "b", "c", "d")
    taken = timing.interleaved({name: lambda name=name: order.append(name) or float(len(order)) for name in names}, 12)
    rounds = [tuple(order[i : i + 4]) for i in range(0, len(order), 4)]
    assert len(rounds) == 13
    assert all(sorted(turn) == sorted(names) for turn in rounds)
    assert len({turn[0] for turn in rounds}) == 4
    assert all(len(values) == 12 for values in taken.values())
    assert min(map(min, taken.values())) > 4
    assert random.Random(0).sample(names, 4) == list(rounds[0])


def test_a_slow_contender_gets_fewer_rounds():
    """A contender that has used its time gets the minimum number of rounds, the others get all rounds."""
    now = [0.0]

    def slow():
        now[0] += timing.SECONDS_PER_CONTENDER
        return 1.0

    taken = timing.interleaved({"slow": slow, "fast": lambda: 2.0}, 20, clock=lambda: now[0])
    assert (len(taken["slow"]), len(taken["fast"])) == (timing.MIN_ROUNDS, 20)


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
    assert device.largest_difference([a, a], [a, b]) == pytest.approx(1 / 3)
    assert device.largest_difference([a], [a]) == 0
    assert math.isnan(device.largest_difference([a, np.array([np.nan])], [a, np.array([1.0])]))
    with pytest.raises(device.WrongResultError, match="shape"):
        device.largest_difference([a], [a[:2]])


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


def contender_of(**change):
    """A run of a contender, ready or left out."""
    one = compare.ContenderRun(type("Changed", (Fake,), change), SMALL, "forward")
    one.prepare([None, None], [np.array([1.0, 2.0])], None, tune=False)
    return one


def test_a_correct_contender_is_timed():
    """Its row has the times of all rounds and the clock."""
    one = contender_of()
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
        ({"ms": property(lambda self: 1 / 0)}, "ZeroDivisionError"),
    ],
    ids=["wrong", "nan", "no_call", "failing_call", "not_installed", "no_facts", "no_time"],
)
def test_a_failing_contender_is_left_out_with_its_reason(change, reason):
    """It is not timed, and does not end the run."""
    one = contender_of(**change)
    assert one.ready == ("ms" in change)
    assert math.isnan(one())
    assert one.row["left_out"].startswith(reason)
    one.record_times([1.0])
    assert "ms" not in one.row


def test_warnings_become_part_of_the_reason():
    """Warnings that explain the failure are included; those that only introduce them are not."""
    said = ["Flash attention kernel not used because: (Triggered internally at x.h:3)", "the last dimension differs"]
    assert compare.failure_reason(RuntimeError("No kernel"), said) == "RuntimeError: No kernel; the last dimension differs"


# rows


def test_rates_and_ratios():
    """TFLOP/s, the share of the peak rate, the ratio of times, and the fastest other contender."""
    rows = {row["way"]: row for row in two_presets()[:4]}
    ours = rows["ours"]
    assert ours["tflops"] == round(PRESETS[0].operations("forward") / 2e-3 / 1e12, 2)
    assert ours["share"] == pytest.approx(ours["tflops"] / 700, abs=1e-3)
    found = {name: (row["ours_over_it"], row["best_peer"]) for name, row in rows.items() if name != "jax"}
    assert found == {"ours": (None, False), "torch-cudnn": (2.0, True), "flex": (0.5, False)}
    assert (rows["jax"]["ms"], rows["jax"]["left_out"]) == (None, "it cannot")


def test_ratios_are_within_a_round():
    """A clock that falls during the run does not change the ratios."""
    times = {"ours": [1.0, 1.0, 2.0, 2.0, 2.0], "torch-cudnn": [1.0, 1.0, 2.0], "flex": [3.0, 1.0, 6.0, 6.0, 6.0]}
    rows = [{"way": name, "direction": "forward", "times": values} for name, values in times.items()]
    rows = compare.add_ratios(rows, PRESETS[0], RATES)
    assert [row["ms"] for row in rows] == [2.0, 1.0, 6.0]
    assert [row.get("ours_over_it") for row in rows] == [None, 1.0, pytest.approx(1 / 3)]
    assert table.ratios([{"preset": "", **row} for row in rows], "forward") == [1.0]


def test_the_share_of_decoding_is_relative_to_a_copy():
    """It is the rate of the bytes that must be moved."""
    (preset,) = presets.select(["decode-32k-batch-1"])
    (row,) = rows_of(preset, {"ours": 0.1})
    assert row["share_of"] == "copy"
    assert row["share"] == pytest.approx(2 * 128 * (32 + 2 * 8 * 32768 + 32) / 1e-4 / 4000e9, abs=1e-4)


def test_means_are_geometric():
    """For one contender, for the fastest of each preset, and for memory."""
    rows = two_presets()
    assert table.ratios(rows, "forward", "torch-cudnn") == [2.0, 0.25]
    assert table.ratios(rows, "forward") == [2.0, 0.5]
    assert table.ratios(rows, "forward", "flex", "peak_bytes") == [1.0, 1.0]
    assert table.ratios(rows, "backward") == []
    assert table.summary([2.0, 0.25]) == "0.71 (0.25 to 2.00)"


def test_the_table(tmp_path):
    """Of the docs: the fastest other contender and means; reading the file gives the same rows."""
    rows, path = two_presets(), tmp_path / "x.csv"
    runner.write_csv(path, rows)
    assert table.read_csv(path) == rows
    lines = run_command("tables speed", str(path), main=main).lines
    assert f"| {PRESETS[0].name} | 2 | {rows[0]['tflops']:.0f} | 2.00\N{NO-BREAK SPACE}cudnn |" in lines
    assert "| time | the fastest | 1.00 (0.50 to 2.00) |" in lines


# the CPU


def test_plain_numpy_agrees_with_the_cpu_engine():
    """A tiny problem gives rows for both contenders and directions, with time and memory."""
    rows = list(cpu.rows(2, (8, 2, 16, 1)))
    wanted = [(direction, name) for direction in ("forward", "backward") for name in ("ours", "numpy")]
    assert [(row["direction"], row["way"]) for row in rows] == wanted
    assert all(row["ms"] > 0 and row["peak_bytes"] > 0 for row in rows)
    assert set().union(*rows) <= set(table.COLUMNS)


@pytest.mark.parametrize(("factor", "said"), [(2.0, "differ by"), (np.nan, "differ by nan")])
def test_a_wrong_comparison_is_not_timed(factor, said, monkeypatch):
    """Different results, or NaN, are an error."""
    right = cpu.plain_backward
    monkeypatch.setattr(cpu, "plain_backward", lambda *arrays: [factor * x for x in right(*arrays)])
    with pytest.raises(Exception, match=said):
        list(cpu.rows(1, (8, 2, 16, 1)))


def test_names_of_presets_and_peers_are_checked():
    """An unknown name is an error that shows the others."""
    with pytest.raises(Exception, match="no preset 'bert'"):
        presets.select(["bert"])
    with pytest.raises(Exception, match="no peer 'xformers': choose from torch-cudnn"):
        registry.select(["xformers"])
