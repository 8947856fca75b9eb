"""The benchmarks: what would make a figure wrong, and errors in one line."""

import functools
import importlib.util
import math
import os
import random
import re
from dataclasses import replace

import numpy as np
import pytest
from command_line import run as run_command
from tiers import missing

from benchmarks import (
    cold_start,
    compare,
    cpu,
    device,
    figures,
    first_use,
    host_trees,
    presets,
    runner,
    table,
    tables,
    timing,
)
from benchmarks.__main__ import COMMANDS, main
from benchmarks.contenders import contender, registry
from benchmarks.presets import PRESETS, Preset

METHODS = ("ring", "all_gather", "all_to_all")
pytestmark = pytest.mark.usefixtures("folder")
run = functools.partial(run_command, main=main)
with_gpu = pytest.mark.skipif(not missing("gpu"), reason="this machine has a GPU")
SMALL = Preset("small", 2, 4, 2, 6, 6, 16, 8, causal=True)
RATES = compare.Rates(matmul_tflops=700.0, matmul_dtype="bfloat16", copy_gbs=4000.0)


def rows_of(preset, times, direction="forward"):
    """Rows of contenders with the given milliseconds; None is left out."""
    rows = []
    for name, ms in times.items():
        clock = "wall clock of consecutive calls" if name == "flex" else "events"
        figures = {"times": [ms], "host_us": 1000 * (ms or 0), "peak_bytes": 4096, "clock": clock}
        found = {"left_out": "it cannot"} if ms is None else figures
        rows.append({"preset": preset.name, "direction": direction, "way": name, "gpu": "a GPU", **found})
    return [table.complete(row) for row in compare.add_ratios(rows, preset, RATES)]


def two_presets():
    """Rows in which the fastest other contender differs between the presets."""
    return [
        *rows_of(PRESETS[0], {"ours": 2.0, "torch-cudnn": 1.0, "flex": 4.0, "jax": None}),
        *rows_of(PRESETS[1], {"ours": 2.0, "torch-cudnn": 8.0, "flex": 4.0, "jax": None}),
    ]


# counts


@pytest.mark.parametrize(
    ("sq", "skv", "causal", "left"), [(7, 7, True, 2), (3, 8, True, None), (8, 3, True, 9), (1, 9, False, 0)]
)
def test_visible_pairs_are_counted(sq, skv, causal, left):
    """Equal to the count of a double loop."""
    preset = Preset("x", 1, 1, 1, sq, skv, 8, 8, causal=causal, left=left)
    seen = sum((not causal or j <= i) and (left is None or i - j <= left) for i in range(sq) for j in range(skv))
    assert preset.pairs == seen


def test_useful_operations():
    """Two matrix products forward, five backward, over the visible pairs of all heads and batch items."""
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
    one.prepare([None, None], [np.array([1.0, 2.0])], None)
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
        ({"call": lambda self, inputs: lambda: [][0]}, "IndexError: list index out of range"),
        ({"ms": property(lambda self: 1 / 0)}, "ZeroDivisionError"),
    ],
    ids=["wrong", "nan", "failing_call", "no_time"],
)
def test_a_failing_contender_is_left_out_with_its_reason(change, reason):
    """It is not timed, and does not end the run."""
    one = contender_of(**change)
    assert one.ready == ("ms" in change)
    assert math.isnan(one())
    assert one.row["left_out"].startswith(reason)
    one.record_times([1.0])
    assert "ms" not in one.row


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


def test_the_table(tmp_path):
    """Of the docs: the fastest other contender and geometric means; reading the file gives the same rows."""
    rows, path = two_presets(), tmp_path / "x.csv"
    runner.write_csv(path, rows)
    assert table.read_csv(path) == rows
    lines = run("tables speed", str(path)).lines
    assert f"| {PRESETS[0].name} | 2 | {rows[0]['tflops']:.0f} | 2.00\N{NO-BREAK SPACE}cudnn |" in lines
    for means in (
        "time | the fastest | 1.00 (0.50 to 2.00)",
        "time | torch-cudnn | 0.71 (0.25 to 2.00)",
        "memory | flex | 1.00 (1.00 to 1.00)",
    ):
        assert f"| {means} |" in lines


# the CPU


@pytest.fixture
def small_cases(monkeypatch):
    """Cases of few positions, one of each kind."""
    few = [replace(case, sizes=(*(min(n, 128) for n in case.sizes[:2]), *case.sizes[2:])) for case in cpu.cases()]
    kinds = {
        (case.name.split(",")[0], *case.options): case for case in few if not case.lengths and "block_mask" not in case.options
    }
    packed = cpu.Case("packed", (40, 40, 4, 2, 16, 1), lengths=(10, 30))
    monkeypatch.setattr(cpu, "cases", lambda: iter([*kinds.values(), packed]))


@pytest.mark.parametrize(("factor", "said"), [(2.0, "differ by"), (np.nan, "differ by nan")])
def test_a_wrong_comparison_is_not_timed(factor, said, small_cases, monkeypatch):
    """Different results, or NaN, are an error."""
    right = cpu.Contenders.ours
    monkeypatch.setattr(cpu.Contenders, "ours", lambda self: [factor * x for x in right(self)])
    assert said in run("cpu --rounds 1").err


def test_the_table_of_the_cpu(small_cases, folder):
    """Every case and pass is timed, with the results of plain numpy; the table has a row for each."""
    done = run("cpu x.csv --rounds 1")
    assert done.status == 0, done.err
    rows = [*cpu.cases()]
    lines = [*tables.cpu(str(folder / "x.csv"))]
    assert len(lines) == len(rows) + 3
    assert len(done.lines) == sum(len(case.passes) for case in rows)


# the commands


@pytest.mark.parametrize(
    ("failure", "status", "before"),
    [(KeyboardInterrupt, 130, b"of before"), (FileNotFoundError(2, "no", "file"), 2, None)],
    ids=["interrupt", "failure"],
)
def test_without_results_the_file_is_as_before(failure, status, before, folder, monkeypatch):
    """A run that fails or is interrupted before its first result leaves no new file and does not change an existing one."""

    def fail(*_):
        raise failure

    monkeypatch.setattr(cpu, "rows", fail)
    if before:
        (folder / "x.csv").write_bytes(before)
    done = run("cpu x.csv")
    assert (done.status, done.err.count("\n")) == (status, 1)
    assert [path.read_bytes() for path in folder.iterdir()] == ([before] if before else [])


#: Command lines, and the end of the last line on stderr.
WRONG = {
    "cpu none/x.csv": "cannot write none/x.csv: No such file or directory",
    "tables speed none.csv": "none.csv: No such file or directory",
    "tables speed text.csv": "text.csv is not a CSV file of compare: it has no column preset",
    "tables speed bytes.csv": "bytes.csv is not a CSV file of compare: .*",
    "tables speed empty.csv": "empty.csv is not a CSV file of compare: it has no rows",
    "tables speed words.csv": "words.csv is not a CSV file of compare: could not convert string to float: 'abc'",
    "tables plans text.csv": "FILE has no effect with plans, only with speed and figures: remove it",
}


@pytest.mark.parametrize("command", WRONG)
def test_wrong_command_lines(command, folder):
    """The last line names the value and the fix; nothing is written."""
    files = {"text": b"no table", "bytes": b"\xda\x00", "empty": b"preset,direction,way,ms\n"}
    files["words"] = files["empty"] + b"a,b,ours,abc\n"
    for name, content in files.items():
        (folder / f"{name}.csv").write_bytes(content)
    done = run(command)
    assert (done.status, done.out) == (2, "")
    assert re.search(rf"{WRONG[command]}$", done.err.splitlines()[-1])
    assert {path.stem: path.read_bytes() for path in folder.iterdir()} == files


#: Options with which a command needs a GPU that also runs without one.
WITH_GPU = {"saved": "--problems problems.jsonl", "fp8": "--decode", "host_trees": "--before ."}


TREE = runner.__file__.rpartition("/benchmarks")[0]


def test_another_tree(folder):
    """The host times of a tree and of itself; a folder that is no tree is named."""
    done = run(f"host_trees x.csv --cpu --pairs 1 --rounds 1 --before {TREE}")
    rows = tables.read(str(folder / "x.csv"))
    assert [row["call"] for row in rows][::10] == ["plain", "vjp"], done.err
    assert rows[-1]["call"] == "mix"
    assert all(row["spread"] == "{0:.2f}-{0:.2f}".format(float(row["us"]) / float(row["before_us"])) for row in rows), rows
    assert "is no tree of this repository" in run("host_trees --cpu --before .").complaint


def test_members_of_another_tree(folder):
    """A member's calls with each method, in both passes."""
    done = run(f"host_trees x.csv --cpu --members --pairs 1 --rounds 1 --before {TREE}")
    names = [row["call"] for row in tables.read(str(folder / "x.csv"))]
    assert names == [f"{method}_{way}" for method in METHODS for way in ("forward", "backward")], done.err


def test_pairs_of_processes():
    """The ratio is the median over all rounds of all pairs; the spread is that of the pairs' medians."""
    pairs = [[[10.0, 10.0, 10.0], [10.0, 11.0, 90.0]], [[10.0, 10.0, 20.0], [8.0, 9.0, 20.0]], [[8.0], [10.0]]]
    expected = {"call": "plain", "before_us": 8.0, "us": 8.0, "ratio": 1.0, "spread": "0.90-1.25"}
    assert host_trees.summary("plain", pairs) == expected


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no sched_getaffinity")
def test_the_core_of_the_processes():
    """The core is the chosen one, otherwise one of the allowed ones; a core that is not allowed is an error."""
    allowed = os.sched_getaffinity(0)
    assert {*host_trees.cores(None)} == allowed
    assert {host_trees.cores(core)[0] for core in allowed} == allowed
    assert "--core 99999 is not one of the cores" in run(f"host_trees --cpu --core 99999 --before {TREE}").complaint


def test_cold_start(folder):
    """The times of a new process, which are longer than their parts; every program is valid."""
    done = run("cold_start x.csv --cpu --runs 1")
    ours, *_ = tables.read(str(folder / "x.csv"))
    assert (done.status, ours["library"]) == (0, f"numpy {np.__version__}"), done.err
    whole, *parts = (float(ours[column]) for column in cold_start.COLUMNS)
    assert whole > sum(parts) > min(parts) > 0
    for blanks in (*cold_start.CONTENDERS.values(), *cold_start.CPU_CONTENDERS.values()):
        compile(cold_start.PROGRAM.format(**blanks), "program", "exec")


def test_first_use(folder):
    """A first call on numpy arrays loads no kernel, no table of cuDNN, and no layer; docs/design.md says what it loads."""
    done = run(f"first_use x.csv --runs 1 --before {TREE}")
    rows = tables.read(str(folder / "x.csv"))
    assert [row["tree"] for row in rows] == ["before", "now"], done.err
    assert all(int(row["modules"]) <= 82 and int(row["lines"]) <= 14_200 for row in rows), rows
    assert "is no tree of this repository" in run("first_use --before .").complaint
    _, lines = first_use.measure(first_use.ROOT)
    loaded = {name.split(".")[2] for name in lines if name.startswith("cupy_sdpa.core.")}
    assert not loaded & {"kernels", "cudnn", "cudnn_engine"}
    assert {name for name in lines if not name.startswith("cupy_sdpa.core.")} == {"cupy_sdpa.attention_functions"}


@with_gpu
def test_without_a_gpu_the_reason_is_one_line():
    """Every command says that it needs a GPU, or which library it lacks."""
    for name in COMMANDS.keys() - {"cpu", "first_use", "tables"}:
        said = run(f"{name} {WITH_GPU.get(name, '')}").complaint
        assert re.fullmatch(rf"{name}.* needs a GPU \(no GPU: .*\).*|{name} needs \w+, which is not installed", said)


# figures


def test_figures(folder):
    """One for every direction with rows, and one for the host time; equal rows give equal files. Or how to draw them."""
    runner.write_csv("x.csv", [*two_presets(), *rows_of(PRESETS[0], {"ours": 2.0, "flex": 4.0}, "backward")])
    if not importlib.util.find_spec("matplotlib"):
        assert "pip install -e '.[plot]'" in run("tables figures x.csv --folder a").complaint
        return
    for name in "ab":
        assert run(f"tables figures x.csv --folder {name}").status == 0
    drawn, again = ({path.name: path.read_bytes() for path in (folder / name).iterdir()} for name in "ab")
    assert sorted(drawn) == [f"bench_{name}.svg" for name in ("backward", "forward", "host")]
    assert drawn == again


@pytest.mark.slow
def test_figures_of_the_documentation(folder):
    """They show the recorded results. Other versions of matplotlib draw other files."""
    matplotlib = pytest.importorskip("matplotlib")
    assert run("tables figures --folder .").status == 0
    assert {path.stem for path in folder.iterdir()} >= {"bench_front", "decode", "fp8_errors", "parallel_scaling"}
    for path in folder.iterdir():
        shown = (figures.FOLDER / path.name).read_text(encoding="utf-8")
        if f"Matplotlib v{matplotlib.__version__}," in shown:
            assert path.read_text(encoding="utf-8") == shown, "draw it anew: python -m benchmarks tables figures"


# a GPU


@pytest.mark.gpu
def test_on_a_gpu():
    """A small preset in all directions: our calls run, and the peers run or have a reason.

    FlexAttention is left out because it compiles for a minute.
    """
    peers = [name for name, kind in registry.PEERS.items() if name != "flex" and "bfloat16" in kind.dtypes]
    done = run(f"compare x.csv --presets notebook-128 --rounds 2 --peers {' '.join(peers)}")
    assert done.status == 0
    cases = table.by_case(table.read_csv("x.csv"))
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
    for column in ("host_out_us", "host_prepared_us"):
        assert first[column] > 0


@pytest.mark.gpu
def test_host_options_on_a_gpu():
    """Two kinds and their closest calls of PyTorch if it is installed, otherwise the reason."""
    done = run("host_options x.csv --no-flex --only plain lengths")
    assert done.status == 0
    assert importlib.util.find_spec("torch") is not None or "PyTorch does not run" in done.out
