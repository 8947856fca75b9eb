"""The commands of the benchmarks: compare, its files and figures, and errors of one line."""

import functools
import importlib.util
import re

import pytest
from benchmark_rows import rows_of, two_presets
from command_line import run as run_command
from tiers import missing

from benchmarks import cpu, figures, presets, runner, table
from benchmarks.__main__ import COMMANDS, main
from benchmarks.contenders import registry
from benchmarks.presets import PRESETS

pytestmark = pytest.mark.usefixtures("folder")
run = functools.partial(run_command, main=main)
NAMES = [preset.name for preset in PRESETS]
with_gpu = pytest.mark.skipif(not missing("gpu"), reason="this machine has a GPU")


def test_on_the_cpu(folder, monkeypatch):
    """Prints a line for each contender and direction, and writes a file with all columns."""
    monkeypatch.setattr(cpu, "rows", functools.partial(cpu.rows, shape=(8, 2, 16, 1)))
    done = run("compare x.csv --cpu --rounds 2")
    assert done.status == 0
    wanted = [(direction, name) for direction in ("forward", "backward") for name in ("ours", "numpy")]
    for line, (direction, name) in zip(done.lines, wanted, strict=True):
        assert line.startswith(f"preset cpu-2-heads-16, direction {direction}, way {name}, ms ")
        assert ("ours_over_it" in line) == (name == "numpy")
        assert "share" not in line  # nothing that only a GPU has
    rows = table.read_csv("x.csv")
    assert [(row["direction"], row["way"]) for row in rows] == wanted
    assert all(tuple(row) == table.COLUMNS and row["rounds"] == 2 for row in rows)


@pytest.mark.parametrize(
    ("failure", "status"), [(KeyboardInterrupt, 130), (FileNotFoundError(2, "no", "file"), 2)], ids=["interrupt", "failure"]
)
@pytest.mark.parametrize("before", [None, b"of before"], ids=["new", "existing"])
def test_without_results_the_file_is_as_before(failure, status, before, folder, monkeypatch):
    """A run that fails or is interrupted before its first result leaves no new file and does not change an existing one."""

    def fail(*_):
        raise failure

    monkeypatch.setattr(cpu, "rows", fail)
    if before:
        (folder / "x.csv").write_bytes(before)
    done = run("compare x.csv --cpu")
    assert (done.status, done.err.count("\n")) == (status, 1)
    assert [path.read_bytes() for path in folder.iterdir()] == ([before] if before else [])


def test_the_list():
    """All presets, directions and peers, and why a peer is not available."""
    printed = run("compare --list").out
    assert all(name in printed for name in (*NAMES, *presets.DIRECTIONS, *registry.PEERS))


#: Command lines, and the end of the last line on stderr.
WRONG = {
    "compare --list --presets bert": "there is no preset 'bert'; --list shows all presets",
    "compare --list --peers xformers": "there is no peer 'xformers'.*",
    "compare none/x.csv --cpu": "cannot write none/x.csv: No such file or directory",
    "compare --rounds 0": "argument --rounds: .*",
    "compare --directions sideways": "argument --directions: .*",
    "tables speed none.csv": "none.csv: No such file or directory",
    "tables speed text.csv": "text.csv is not a CSV file of compare: it has no column preset",
    "tables speed bytes.csv": "bytes.csv is not a CSV file of compare: .*",
    "tables speed empty.csv": "empty.csv is not a CSV file of compare: it has no rows",
    "tables speed words.csv": "words.csv is not a CSV file of compare: could not convert string to float: 'abc'",
    "tables plans text.csv": "FILE has no effect with plans, only with speed and figures: remove it",
    "tables": "the following arguments are required: TABLE",
    "parallel --cpu --only nonsense": "no name of a problem contains 'nonsense'; the names are .*",
    "parallel --cpu --members 0": "argument --members: 0 is not positive",
    "host_options --only bert": "invalid choice: 'bert'.*",
}


@pytest.mark.parametrize("command", WRONG)
def test_wrong_command_lines(command, folder):
    """The last line names the value and the remedy; nothing is written."""
    files = {"text": b"no table", "bytes": b"\xda\x00", "empty": b"preset,direction,way,ms\n"}
    files["words"] = files["empty"] + b"a,b,ours,abc\n"
    for name, content in files.items():
        (folder / f"{name}.csv").write_bytes(content)
    done = run(command)
    assert (done.status, done.out) == (2, "")
    assert re.search(rf"{WRONG[command]}$", done.err.splitlines()[-1])
    assert {path.stem: path.read_bytes() for path in folder.iterdir()} == files


def test_usage():
    """The usage lists all commands and fits 100 columns; an unknown command is an error."""
    usage = run("--help").out
    assert all(f"  {name} " in usage for name in COMMANDS)
    assert max(map(len, usage.splitlines())) <= 100
    for words in ("", "bert"):
        assert run(words) == (2, "", usage)


#: Options with which a command needs a GPU that also runs without one.
WITH_GPU = {"saved": "--problems problems.jsonl", "fp8": "--decode"}
NOT_INSTALLED = r"needs \w+, which is not installed"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command(name):
    """It has a help of 80 columns, or says which library it lacks; a file that cannot be written is reported first."""
    done = run(f"{name} --help", columns=80)
    if done.status == 0:
        assert done.out.startswith(f"usage: python -m benchmarks {name} ")
        assert max(map(len, done.lines)) <= 80
    else:
        assert re.fullmatch(f"{name} {NOT_INSTALLED}", done.complaint)
    if name == "tables":
        return
    for path in ("none/x.csv", "."):
        option = "--problems x.jsonl " * (name == "saved")
        last = run(f"{name} {option}{path}").err.splitlines()[-1]
        assert re.search(rf"cannot write {re.escape(path)}: (No such file|Is a)|{NOT_INSTALLED}$", last)


@with_gpu
@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "tables"])
def test_without_a_gpu_the_reason_is_one_line(name):
    """In place of a traceback of CuPy; or the library that is not installed. That of compare names --cpu."""
    said = run(f"{name} {WITH_GPU.get(name, '')}").complaint
    assert re.fullmatch(rf"{name}.* needs a GPU \(no GPU: .*\).*|{name} {NOT_INSTALLED}", said)
    assert name != "compare" or "--cpu" in said


# figures


def test_figures(folder):
    """One for every direction with rows, and one for the host time; equal rows give equal files. Or how to draw them."""
    runner.write_csv("x.csv", [*two_presets(), *rows_of(PRESETS[0], {"ours": 2.0, "flex": 4.0}, "backward")])
    if not importlib.util.find_spec("matplotlib"):
        assert "pip install 'cupy-sdpa[plot]'" in run("tables figures x.csv --folder a").complaint
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
    """Two kinds and their closest calls of PyTorch, if it is installed; otherwise why there are none."""
    done = run("host_options x.csv --no-flex --only plain lengths")
    assert done.status == 0
    assert importlib.util.find_spec("torch") is not None or "PyTorch does not run" in done.out
