"""The bench: its presets are what they say, its arithmetic is right, it runs on the CPU, and fails in one clear line."""

import csv
import importlib.util
import json
import math
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cupy_sdpa.__main__ import main
from cupy_sdpa._cli import machine
from cupy_sdpa.bench import cold, cpu, facts, measure, plots, presets, run, table, way, ways
from cupy_sdpa.bench.presets import PRESETS, Preset

ROOT = Path(__file__).parents[1]
NAMES = [preset.name for preset in PRESETS]
RATES = run.Rates(matmul_tflops=700.0, matmul_dtype="bfloat16", copy_gbs=4000.0)
SMALL = Preset("small", 2, 4, 2, 6, 6, 16, 8, causal=True)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rows_of(preset, times, direction="forward"):
    """Tidy rows of ways that took so many milliseconds; None is left out."""
    rows = []
    for name, ms in times.items():
        clock = "wall clock of a row of calls" if name == "flex" else "events"
        figures = {"times": [ms], "host_us": 1000 * (ms or 0), "peak_bytes": 4096, "clock": clock}
        found = {"left_out": "it cannot"} if ms is None else figures
        rows.append({"preset": preset.name, "direction": direction, "way": name, "gpu": "a GPU", **found})
    return [table.tidy(row) for row in run.judged(rows, preset, RATES)]


def two_presets():
    """Rows in which the fastest other way is once one and once the other."""
    return [
        *rows_of(PRESETS[0], {"ours": 2.0, "torch-cudnn": 1.0, "flex": 4.0, "jax": None}),
        *rows_of(PRESETS[1], {"ours": 2.0, "torch-cudnn": 8.0, "flex": 4.0, "jax": None}),
    ]


# presets


def test_names_are_one_each():
    """Every preset has a name of its own, which is a word for the command line."""
    assert len(set(NAMES)) == len(NAMES)
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") for name in NAMES)


@pytest.mark.parametrize("preset", PRESETS, ids=NAMES)
def test_a_preset_can_be_posed(preset):
    """It is a problem of ours in each of its directions, of the sizes that it names."""
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
    """As many as a look at each of them finds."""
    preset = Preset("x", 1, 1, 1, sq, skv, 8, 8, causal=causal, left=left)
    seen = sum((not causal or j <= i) and (left is None or i - j <= left) for i in range(sq) for j in range(skv))
    assert preset.pairs == seen


def test_useful_operations():
    """Two products forward, five backward, over the pairs that are seen, of all heads and entries."""
    pairs = 2 * 4 * (1 + 2 + 3 + 4 + 5 + 6)
    assert SMALL.operations("forward") == 2 * pairs * (16 + 8)
    assert SMALL.operations("backward") == 2 * pairs * (3 * 16 + 2 * 8)
    assert SMALL.operations("both") == SMALL.operations("forward") + SMALL.operations("backward")
    assert SMALL.moved_bytes == 2 * 2 * 6 * (4 * 16 + 2 * 16 + 2 * 8 + 4 * 8)


def test_presets_are_chosen_by_how_they_begin():
    """By a whole name, else by a beginning; nothing for a wrong one."""
    assert [preset.name for preset in presets.chosen(["llama-8b-8k"])] == ["llama-8b-8k"]
    assert all(preset.name.startswith("vit") for preset in presets.chosen(["vit"]))
    with pytest.raises(ValueError, match="no preset 'bert'"):
        presets.chosen(["bert"])
    with pytest.raises(ValueError, match="no peer 'xformers': choose from torch-cudnn"):
        ways.chosen(["xformers"])


# measuring


def test_ways_take_turns_in_any_order():
    """Every way is measured once a round, the first round does not count, and the order changes from round to round."""
    order = []

    def way_of(name):
        def measured():
            order.append(name)
            return float(len(order))

        return measured

    names = ("a", "b", "c", "d")
    taken = measure.interleaved({name: way_of(name) for name in names}, 12)
    rounds = [tuple(order[i : i + 4]) for i in range(0, len(order), 4)]
    assert len(rounds) == 13
    assert all(sorted(turn) == sorted(names) for turn in rounds)
    assert len(set(rounds)) > 6
    assert len({turn[0] for turn in rounds}) == 4
    assert all(len(values) == 12 for values in taken.values())
    assert min(map(min, taken.values())) > 4
    assert random.Random(0).sample(names, 4) == list(rounds[0])  # the same in every run


def test_a_slow_way_gets_fewer_rounds():
    """What has taken longer than is enough is measured as often as is needed, the others as often as is wanted."""
    now = [0.0]

    def slow():
        now[0] += measure.SECONDS_A_WAY
        return 1.0

    taken = measure.interleaved({"slow": slow, "fast": lambda: 2.0}, 20, clock=lambda: now[0])
    assert len(taken["slow"]) == measure.FEWEST_ROUNDS
    assert len(taken["fast"]) == 20


def test_a_wall_clock_runs_long_enough():
    """Its row of calls grows until its ends do not count, and it gives the time of one."""
    calls = []
    timer = measure.WallClock([lambda: calls.append(1), lambda: calls.append(2)], lambda results: None)
    assert 0 < timer() < 1000 * measure.WALL_SECONDS
    assert len(calls) % 2 == 0
    assert len(calls) > 2


def test_differences_are_of_the_largest_value():
    """The worst pair counts; NaN is no agreement; another shape is wrong."""
    a, b = np.array([1.0, 2.0, -4.0]), np.array([1.0, 2.0, -3.0])
    assert measure.farthest([a, a], [a, b]) == pytest.approx(1 / 3)
    assert measure.farthest([a], [a]) == 0
    assert math.isnan(measure.farthest([a, np.array([np.nan])], [a, np.array([1.0])]))
    with pytest.raises(measure.Wrong, match="shape"):
        measure.farthest([a], [a[:2]])


class Fake(way.Way):
    """Gives what it is told to, in the time it is told."""

    name, title = "fake", "a fake"
    result, ms = 1.0, 3.0

    def call(self, inputs):
        return lambda: (np.array([self.result, 2.0]),)

    def timer(self, calls, busy):
        return type("Timer", (), {"clock": "no clock", "__call__": lambda _: self.ms})()

    def wait(self, results=None):
        pass


def contest(kind):
    """A contestant that is ready, or that is left out."""
    one = run.Contestant(kind, SMALL, "forward")
    one.prepare([None, None], [np.array([1.0, 2.0])], None, tune=False)
    return one


def test_a_way_that_agrees_is_timed():
    """Every round's time is kept, with how it was measured."""
    one = contest(Fake)
    assert one.ready
    times = [one(), 5.0, 4.0]
    one.timed(times)
    assert (one.row["times"], one.row["rounds"], one.row["clock"], one.row["difference"]) == (times, 3, "no clock", 0.0)
    (((whose, column), timed),) = one.hosts().items()
    assert (whose, column) == (one, "host_us")
    assert timed() > 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"result": 1.1}, "its results are 0.05 of the largest value away from ours"),
        ({"result": math.nan}, "its results are nan of"),
        ({"call": lambda self, inputs: 1 / 0}, "ZeroDivisionError: division by zero"),
        ({"call": lambda self, inputs: lambda: [][0]}, "IndexError: list index out of range"),
        ({"needs": ("no_such_module",)}, "no_such_module cannot be imported: No module named 'no_such_module'"),
        ({"facts": lambda self: {}["x"]}, "KeyError: 'x'"),
    ],
    ids=["wrong", "nan", "cannot_begin", "cannot_run", "not_here", "no_facts"],
)
def test_a_way_that_fails_is_left_out_with_its_reason(change, reason):
    """It ends nothing, it is not timed, and it says why."""
    one = contest(type("Failing", (Fake,), change))
    assert not one.ready
    assert one.row["left_out"].startswith(reason)
    assert math.isnan(one())
    one.timed([1.0])
    assert "ms" not in one.row


def test_compiling_calls_every_peer_once(monkeypatch):
    """In every case, in what it runs in; failures are told, and end nothing."""
    called = []

    class Compiling(Fake):
        def call(self, inputs):
            return lambda: called.append((self.preset.name, self.direction)) or (np.ones(2),)

    failing = type("Failing", (Fake,), {"name": "failing", "call": lambda self, inputs: 1 / 0})
    monkeypatch.setattr(run, "Inputs", lambda preset: None)
    monkeypatch.setattr(run.measure, "free_memory", lambda: None)
    wanted = run.Wanted([SMALL], ["forward", "both"], [Compiling, failing])
    told = list(run.compiled(wanted, lambda *_: None))
    assert called == [(SMALL.name, "forward"), (SMALL.name, "both")]
    assert told == [f"failing ({SMALL.name} {way}): ZeroDivisionError: division by zero" for way in ("forward", "both")]


def test_a_way_that_fails_while_it_is_timed():
    """It is left out, too."""
    one = contest(type("Failing", (Fake,), {"ms": property(lambda self: 1 / 0)}))
    assert one.ready
    assert math.isnan(one())
    assert one.row["left_out"].startswith("ZeroDivisionError")


def test_warnings_become_part_of_the_reason():
    """What was warned of on the way says why; what only introduces it does not."""
    said = [
        "Flash attention kernel not used because: (Triggered internally at x.h:3)",
        "the last dimension differs",
        "off (Triggered",
    ]
    assert run._reason(RuntimeError("No kernel"), said) == "RuntimeError: No kernel; the last dimension differs; off (Triggered"


def test_without_nvidia_smi_nothing_is_said_of_clocks(monkeypatch, folder):
    """Its columns are empty."""
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


def test_a_cold_start_that_fails_says_why():
    """The last line of what the process has said, for a way that cannot be had."""
    if not ways.why_not(ways.PEERS["torch-cudnn"]):
        pytest.skip("PyTorch is here")
    with pytest.raises(cold.Failed, match="No module named 'torch'"):
        cold.cold_ms("torch-cudnn", NAMES[0])


# rows


def test_rates_and_ratios():
    """TFLOP/s, the share of what bounds it, our time over theirs, and which of them is the fastest."""
    rows = {row["way"]: row for row in two_presets()[:4]}
    operations = PRESETS[0].operations("forward")
    assert rows["ours"]["tflops"] == round(operations / 2e-3 / 1e12, 2)
    assert rows["ours"]["share"] == pytest.approx(rows["ours"]["tflops"] / 700, abs=1e-3)
    assert (rows["ours"]["ours_over_it"], rows["ours"]["best_peer"]) == (None, False)
    assert (rows["torch-cudnn"]["ours_over_it"], rows["torch-cudnn"]["best_peer"]) == (2.0, True)
    assert (rows["flex"]["ours_over_it"], rows["flex"]["best_peer"]) == (0.5, False)
    assert (rows["jax"]["ms"], rows["jax"]["left_out"]) == (None, "it cannot")


def test_a_ratio_is_of_times_in_the_same_round():
    """A clock that falls after our last round, or in the middle, is no difference between two ways."""
    times = {"ours": [1.0, 1.0, 2.0, 2.0, 2.0], "torch-cudnn": [1.0, 1.0, 2.0], "flex": [3.0, 1.0, 6.0, 6.0, 6.0]}
    rows = run.judged([{"way": way, "direction": "forward", "times": taken} for way, taken in times.items()], PRESETS[0], RATES)
    assert [row["ms"] for row in rows] == [2.0, 1.0, 6.0]
    assert [row.get("ours_over_it") for row in rows] == [None, 1.0, pytest.approx(1 / 3)]
    (mean,) = table.ratios([{"preset": "", **row} for row in rows], "forward")
    assert mean == 1.0


def test_decoding_is_a_matter_of_memory():
    """A single query's share is of the copy's rate: the bytes that must be moved."""
    (preset,) = presets.chosen(["decode-32k-batch-1"])
    (row,) = rows_of(preset, {"ours": 0.1})
    moved = 2 * 128 * (32 + 2 * 8 * 32768 + 32)
    assert row["share_of"] == "copy"
    assert row["share"] == pytest.approx(moved / 1e-4 / 4000e9, abs=1e-4)


def test_means_are_geometric():
    """Of one way, and of the fastest of each preset; also of memory."""
    rows = two_presets()
    assert table.ratios(rows, "forward", "torch-cudnn") == [2.0, 0.25]
    assert table.ratios(rows, "forward") == [2.0, 0.5]
    assert table.ratios(rows, "forward", "flex", "peak_bytes") == [1.0, 1.0]
    assert table.ratios(rows, "backward") == []
    assert table.summary([2.0, 0.25]) == "0.71 (0.25 to 2.00)"


def test_the_table_says_everything():
    """Figures, dashes for what is left out, means, and the reasons, within a terminal."""
    shown = list(table.lines(two_presets()))
    assert max(map(len, shown)) <= 120
    assert shown[0].split() == ["preset", "direction", "ms", "TFLOP/s", "share", "host", "us", "cudnn", "flex", "jax"]
    assert shown[1].split()[-3:] == ["2.000", "0.500", "-"]
    text = "\n".join(shown)
    assert "forward   the fastest     time 1.00 (0.50 to 2.00)" in text
    assert f"jax ({NAMES[0]} forward and 1 more): it cannot" in text
    assert "the host's time may be in:\n  flex, 2 times: wall clock of a row of calls" in text


def test_a_file_of_rows_comes_back(folder):
    """Every column is in every row, and what is read is what was written."""
    rows = two_presets()
    table.write_csv("x.csv", rows)
    with open("x.csv", newline="") as file:
        assert tuple(next(csv.reader(file))) == table.COLUMNS
    assert table.read_csv("x.csv") == rows
    (folder / "other.csv").write_text("part,value\na,1\n")
    with pytest.raises(ValueError, match=r"other.csv is no file of the bench: it has no column preset"):
        table.read_csv("other.csv")


def test_the_table_of_the_docs(folder):
    """It has a line for every preset, with the fastest other way's name, and the means."""
    table.write_csv("x.csv", two_presets())
    script = [sys.executable, str(ROOT / "benchmarks" / "tables.py"), "speed", "x.csv"]
    done = subprocess.run(script, capture_output=True, text=True, check=True, env={"PYTHONPATH": str(ROOT)})
    lines = done.stdout.splitlines()
    assert (
        f"| {NAMES[0]} | 2 | 21 | 2.00\N{NO-BREAK SPACE}cudnn |".replace("| 21 |", f"| {two_presets()[0]['tflops']:.0f} |")
        in lines
    )
    assert "| time | the fastest | 1.00 (0.50 to 2.00) |" in lines


# the CPU


def test_plain_numpy_agrees_with_the_interpreter():
    """On a tiny problem: the rows of both ways and directions, with time and memory."""
    rows = cpu.measure((8, 2, 16, 1), rounds=2)
    assert [(row["direction"], row["way"]) for row in rows] == [
        (direction, name) for direction in ("forward", "backward") for name in ("ours", "numpy")
    ]
    for row in rows:
        assert row["ms"] > 0
        assert row["peak_bytes"] > 0
    assert set().union(*rows) <= set(table.COLUMNS)


def test_a_wrong_comparison_is_not_timed(monkeypatch):
    """Where the two differ there is no figure."""
    monkeypatch.setattr(cpu, "plain_forward", lambda q, k, v: (2 * v,))
    with pytest.raises(ArithmeticError, match="differ by"):
        cpu.measure((8, 2, 16, 1), rounds=1)


def test_no_number_is_no_agreement(monkeypatch):
    """NaN in any result, be the others right."""
    plain = cpu.plain_backward

    def last_is_not_a_number(*arrays):
        *others, dv = plain(*arrays)
        return (*others, dv * np.nan)

    monkeypatch.setattr(cpu, "plain_backward", last_is_not_a_number)
    with pytest.raises(ArithmeticError, match="differ by nan"):
        cpu.measure((8, 2, 16, 1), rounds=1)


# the command


@pytest.fixture
def small_cpu(monkeypatch):
    """A tiny problem in place of the CPU's."""
    measured = cpu.measure
    monkeypatch.setattr(cpu, "measure", lambda rounds, progress: measured((8, 2, 16, 1), rounds, progress))


@pytest.mark.usefixtures("small_cpu")
def test_on_the_cpu(folder, capsys):
    """A table, a line of progress for each step, and a file."""
    assert main(["bench", "--cpu", "--csv", "x.csv"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("preset")
    assert "numpy" in printed.out
    assert printed.err.splitlines() == ["1 of 2: cpu-2-heads-16 forward", "2 of 2: cpu-2-heads-16 backward"]
    assert main(["bench", "--from", "x.csv"]) == 0
    assert capsys.readouterr().out == printed.out


@pytest.mark.parametrize(("failure", "status"), [(KeyboardInterrupt, 130), (ValueError("no"), 2)], ids=["interrupt", "failure"])
@pytest.mark.parametrize("before", [None, b"of before"], ids=["new", "existing"])
def test_without_results_the_file_is_as_before(failure, status, before, folder, monkeypatch, capsys):
    """A run that fails or is interrupted before its first result leaves no empty file, and an earlier file as it was."""

    def fail(**_):
        raise failure

    monkeypatch.setattr(cpu, "measure", fail)
    if before:
        (folder / "x.csv").write_bytes(before)
    assert main(["bench", "--cpu", "--csv", "x.csv"]) == status
    assert capsys.readouterr().err.count("\n") == 1
    assert [path.read_bytes() for path in folder.iterdir()] == ([before] if before else [])


@pytest.mark.usefixtures("small_cpu")
def test_as_json(capsys):
    """Every column of every row."""
    assert main(["bench", "--cpu", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 4
    assert all(tuple(row) == table.COLUMNS for row in rows)


def test_the_list(capsys):
    """All presets, directions and peers, and what a peer lacks."""
    assert main(["bench", "--list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in (*NAMES, *presets.DIRECTIONS, *ways.PEERS))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--presets", "bert"], "there is no preset 'bert'; --list shows them"),
        (["--peers", "xformers"], "there is no peer 'xformers'"),
        (["--cold", "bert"], "there is no preset 'bert'"),
        (["--from", "missing.csv"], "missing.csv: No such file or directory"),
        (["--from", "other.csv"], "other.csv is no file of the bench"),
        (["--cpu", "--csv", "no/such/folder.csv"], "no/such/folder.csv: No such file or directory"),
    ],
    ids=["preset", "peer", "cold", "no_file", "other_file", "no_folder"],
)
def test_what_cannot_be_done_is_one_line(words, said, folder, capsys):
    """Exit status 2, and nothing is measured."""
    (folder / "other.csv").write_text("part,value\na,1\n")
    assert main(["bench", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"cupy_sdpa: {said}")
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("words", [["--rounds", "0"], ["--directions", "sideways"], ["--cpu", "--from", "x.csv"]])
def test_wrong_words(words, capsys):
    """They are told by the parser."""
    with pytest.raises(SystemExit) as done:
        main(["bench", *words])
    assert done.value.code == 2


def test_without_a_gpu(capsys):
    """Exit status 2, and --cpu is named."""
    if not machine.obstacles():
        pytest.skip("there is a GPU here")
    for words in ([], ["--compile"]):
        assert main(["bench", *words]) == 2
        err = capsys.readouterr().err
        assert err.startswith("cupy_sdpa: the bench ")
        assert "--cpu" in err


# pictures


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_pictures(ending, folder):
    """One for every direction that there is, and one of the host; the same rows give the same file."""
    pytest.importorskip("matplotlib")
    rows = [*two_presets(), *rows_of(PRESETS[0], {"ours": 2.0, "flex": 4.0}, "backward")]
    drawn = plots.draw(rows, folder / "a", ending)
    assert [path.name for path in drawn] == [f"bench_{name}.{ending}" for name in ("forward", "backward", "host")]
    again = plots.draw(rows, folder / "b", ending)
    assert [path.read_bytes() for path in drawn] == [path.read_bytes() for path in again]


def test_pictures_from_a_file(folder, capsys):
    """The command draws them of an earlier run's file; without matplotlib it says what brings it."""
    table.write_csv("x.csv", two_presets())
    status = main(["bench", "--from", "x.csv", "--plots", "pictures"])
    err = capsys.readouterr().err
    if importlib.util.find_spec("matplotlib"):
        assert status == 0
        assert sorted(path.name for path in (folder / "pictures").iterdir()) == ["bench_forward.svg", "bench_host.svg"]
    else:
        assert status == 2
        assert "pip install 'cupy-sdpa[plot]'" in err


# a GPU


@pytest.mark.gpu
def test_on_a_gpu(folder, capsys):
    """A small preset, end to end, in all directions, with peers that are here: ours runs, and so do others or say why.

    FlexAttention, which takes a minute to compile, is left to the bench itself.
    """
    peers = [name for name in ways.PEERS if name != "flex"]
    words = ["--presets", "notebook-128", "--rounds", "2", "--csv", "x.csv", "--peers", *peers]
    assert main(["bench", *words]) == 0
    assert "notebook-128" in capsys.readouterr().out
    cases = table.cases(table.read_csv("x.csv"))
    assert set(cases) == {("notebook-128", direction) for direction in presets.DIRECTIONS}
    for found in cases.values():
        assert set(found) == {"ours", *peers}
        for name, row in found.items():
            assert bool(row["ms"]) != bool(row["left_out"]), row
            assert row["left_out"] is None or name != "ours"
            assert row["gpu"]
        assert found["ours"]["engine"]
        assert found["ours"]["peak_bytes"] > 0
        assert found["ours"]["workspace_bytes"] is not None
    first = cases["notebook-128", "forward"]["ours"]
    assert first["host_out_us"] > 0
    assert first["host_prepared_us"] > 0
    assert first["cold_ms"] > 0
    assert first["cold_kept_ms"] > 0
    assert first["next_kept_ms"] > 0


# earlier runs


def test_some_rows_of_an_earlier_run(folder, capsys):
    """Those of the presets, directions and peers that are named."""
    table.write_csv("x.csv", two_presets())
    assert main(["bench", "--from", "x.csv", "--presets", NAMES[0], "--peers", "flex", "--json"]) == 0
    assert [(row["preset"], row["way"]) for row in json.loads(capsys.readouterr().out)] == [
        (NAMES[0], "ours"),
        (NAMES[0], "flex"),
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xda\x00", "x.csv is no file of the bench: "),
        (b"preset,direction,way,ms\n", "it has no rows"),
        (b"preset,direction,way,ms\na,b,ours,abc\n", "could not convert string to float: 'abc'"),
    ],
    ids=["bytes", "empty", "words"],
)
def test_a_file_that_is_no_earlier_run(content, said, folder, capsys):
    """It is named, in one line."""
    (folder / "x.csv").write_bytes(content)
    assert main(["bench", "--from", "x.csv"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("cupy_sdpa: x.csv is no file of the bench: ")
    assert said in error
    assert error.count("\n") == 1


def test_the_list_for_machines(capsys):
    """Presets, directions, peers."""
    assert main(["bench", "--list", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == ["presets", "directions", "peers"]


@pytest.mark.usefixtures("small_cpu")
def test_rounds_on_the_cpu(capsys):
    """As many as are asked for."""
    assert main(["bench", "--cpu", "--rounds", "2", "--json"]) == 0
    assert {row["rounds"] for row in json.loads(capsys.readouterr().out)} == {2}
