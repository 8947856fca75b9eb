"""The command line of the benchmarks: compare, its files and figures, errors of one line, and the other commands."""

import importlib.util
import json
import re

import pytest
from benchmark_rows import rows_of, two_presets

from benchmarks import __main__ as commands
from benchmarks import presets
from benchmarks.__main__ import main
from benchmarks.common import script
from benchmarks.compare import cpu, plots, table
from benchmarks.contenders import registry
from benchmarks.presets import PRESETS
from cupy_sdpa._cli.helpers import machine
from cupy_sdpa._cli.helpers.console import output_file

NAMES = [preset.name for preset in PRESETS]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty working directory, and lines of 100 columns: pytest-xdist sets COLUMNS."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)
    return tmp_path


# the command


@pytest.fixture
def small_cpu(monkeypatch):
    """A tiny problem for the CPU."""
    measured = cpu.measure
    monkeypatch.setattr(cpu, "measure", lambda rounds, progress: measured((8, 2, 16, 1), rounds, progress))


@pytest.mark.usefixtures("small_cpu")
def test_on_the_cpu(folder, capsys):
    """Prints a table and a progress line for each direction, and writes a file."""
    assert main(["compare", "--cpu", "--csv", "x.csv"]) == 0
    printed = capsys.readouterr()
    head, *rows = printed.out.splitlines()
    assert head.split() == ["preset", "direction", "ms", "numpy"]  # nothing that only a GPU has
    assert [row.split()[:2] for row in rows[:2]] == [["cpu-2-heads-16", "forward"], ["cpu-2-heads-16", "backward"]]
    assert "-" not in rows[0].split()
    for words in ("the fastest", "mean", " to "):  # of one preset and one other contender
        assert words not in printed.out
    assert printed.err.splitlines() == ["1 of 2: cpu-2-heads-16 forward", "2 of 2: cpu-2-heads-16 backward"]
    assert main(["compare", "--from", "x.csv"]) == 0
    assert capsys.readouterr().out == printed.out


@pytest.mark.parametrize(("failure", "status"), [(KeyboardInterrupt, 130), (ValueError("no"), 2)], ids=["interrupt", "failure"])
@pytest.mark.parametrize("before", [None, b"of before"], ids=["new", "existing"])
def test_without_results_the_file_is_as_before(failure, status, before, folder, monkeypatch, capsys):
    """A run that fails or is interrupted before its first result leaves no new file and does not change an existing one."""

    def fail(**_):
        raise failure

    monkeypatch.setattr(cpu, "measure", fail)
    if before:
        (folder / "x.csv").write_bytes(before)
    assert main(["compare", "--cpu", "--csv", "x.csv"]) == status
    assert capsys.readouterr().err.count("\n") == 1
    assert [path.read_bytes() for path in folder.iterdir()] == ([before] if before else [])


@pytest.mark.usefixtures("small_cpu")
def test_as_json(capsys):
    """Every row has all columns."""
    assert main(["compare", "--cpu", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 4
    assert all(tuple(row) == table.COLUMNS for row in rows)


def test_the_list(capsys):
    """All presets, directions and peers, and why a peer is not available."""
    assert main(["compare", "--list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in (*NAMES, *presets.DIRECTIONS, *registry.PEERS))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--presets", "bert"], "there is no preset 'bert'; --list shows all presets"),
        (["--peers", "xformers"], "there is no peer 'xformers'"),
        (["--cold", "bert"], "there is no preset 'bert'"),
        (["--from", "missing.csv"], "missing.csv: No such file or directory"),
        (["--from", "other.csv"], "other.csv is not a CSV file of compare"),
        (["--cpu", "--csv", "no/such/folder.csv"], "cannot write no/such/folder.csv: No such file or directory"),
    ],
    ids=["preset", "peer", "cold", "no_file", "other_file", "no_folder"],
)
def test_errors_are_one_line(words, said, folder, capsys):
    """Exit status 2, no output."""
    (folder / "other.csv").write_text("part,value\na,1\n")
    assert main(["compare", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"benchmarks: {said}")
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("words", [["--rounds", "0"], ["--directions", "sideways"], ["--cpu", "--from", "x.csv"]])
def test_invalid_options(words, capsys):
    """The parser refuses them."""
    with pytest.raises(SystemExit) as done:
        main(["compare", *words])
    assert done.value.code == 2


def test_without_a_gpu(capsys):
    """Exit status 2; the message names --cpu."""
    if not machine.obstacles():
        pytest.skip("this machine has a GPU")
    for words in ([], ["--compile"]):
        assert main(["compare", *words]) == 2
        err = capsys.readouterr().err
        assert err.startswith("benchmarks: compare ")
        assert "--cpu" in err


WITHOUT_EFFECT = {
    "cpu": (["--cpu", "--presets", "vit"], "--presets has no effect with --cpu"),
    "from": (["--from", "x.csv", "--tune"], "--tune has no effect with --from"),
    "list": (["--list", "--rounds", "3"], "--rounds has no effect with --list"),
}


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_options_without_effect_are_refused(name, capsys):
    """Exit status 2, one line."""
    words, said = WITHOUT_EFFECT[name]
    assert main(["compare", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


# figures


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_figures(ending, folder):
    """One for every direction with rows, and one for the host time; equal rows give equal files."""
    pytest.importorskip("matplotlib")
    rows = [*two_presets(), *rows_of(PRESETS[0], {"ours": 2.0, "flex": 4.0}, "backward")]
    drawn = plots.draw(rows, folder / "a", ending)
    assert [path.name for path in drawn] == [f"bench_{name}.{ending}" for name in ("forward", "backward", "host")]
    again = plots.draw(rows, folder / "b", ending)
    assert [path.read_bytes() for path in drawn] == [path.read_bytes() for path in again]


def test_figures_from_a_file(folder, capsys):
    """The command draws the figures of an earlier run; without matplotlib it prints how to install it."""
    script.write_csv("x.csv", two_presets())
    status = main(["compare", "--from", "x.csv", "--plots", "pictures"])
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
    """A small preset in all directions: our calls run, and the peers run or have a reason.

    FlexAttention is left out because it compiles for a minute.
    """
    peers = [name for name in registry.PEERS if name != "flex"]
    words = ["--presets", "notebook-128", "--rounds", "2", "--csv", "x.csv", "--peers", *peers]
    assert main(["compare", *words]) == 0
    assert "notebook-128" in capsys.readouterr().out
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
    assert first["host_out_us"] > 0
    assert first["host_prepared_us"] > 0
    assert first["cold_ms"] > 0
    assert first["cold_kept_ms"] > 0
    assert first["next_kept_ms"] > 0


# earlier runs


def test_rows_of_an_earlier_run_are_selected(folder, capsys):
    """By presets, directions and peers."""
    script.write_csv("x.csv", two_presets())
    assert main(["compare", "--from", "x.csv", "--presets", NAMES[0], "--peers", "flex", "--json"]) == 0
    assert [(row["preset"], row["way"]) for row in json.loads(capsys.readouterr().out)] == [
        (NAMES[0], "ours"),
        (NAMES[0], "flex"),
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xda\x00", "x.csv is not a CSV file of compare: "),
        (b"preset,direction,way,ms\n", "it has no rows"),
        (b"preset,direction,way,ms\na,b,ours,abc\n", "could not convert string to float: 'abc'"),
    ],
    ids=["bytes", "empty", "words"],
)
def test_a_file_of_another_kind(content, said, folder, capsys):
    """The error is one line with the name of the file."""
    (folder / "x.csv").write_bytes(content)
    assert main(["compare", "--from", "x.csv"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("benchmarks: x.csv is not a CSV file of compare: ")
    assert said in error
    assert error.count("\n") == 1


def test_the_list_as_json(capsys):
    """Presets, directions, peers."""
    assert main(["compare", "--list", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == ["presets", "directions", "peers"]


@pytest.mark.usefixtures("small_cpu")
def test_rounds_on_the_cpu(capsys):
    """As many as requested."""
    assert main(["compare", "--cpu", "--rounds", "2", "--json"]) == 0
    assert {row["rounds"] for row in json.loads(capsys.readouterr().out)} == {2}


# other commands


def test_usage(capsys):
    """The usage lists all commands and fits 100 columns; an unknown command is an error."""
    assert main(["--help"]) == 0
    usage = capsys.readouterr().out
    assert all(f"  {name} " in usage for name in commands.COMMANDS)
    assert max(map(len, usage.splitlines())) <= 100
    for words in ([], ["bert"]):
        assert main(words) == 2
        assert capsys.readouterr().err == usage


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_every_command_has_a_help_or_a_reason(name, monkeypatch, capsys):
    """Its module is found; without the libraries that it needs, the error is one line."""
    monkeypatch.setenv("COLUMNS", "80")
    try:
        status = main([name, "--help"])
    except SystemExit as done:
        status = done.code
    printed = capsys.readouterr()
    if status == 0:
        assert printed.out.startswith(f"usage: python -m benchmarks {name} ")
        assert max(map(len, printed.out.splitlines())) <= 80
    else:
        assert status == 2
        assert re.fullmatch(rf"benchmarks: {name} needs \w+, which is not installed\n", printed.err)


#: Commands that also run without a GPU, and options with which they need one.
WITHOUT_GPU = {"compare": (), "parallel": ("--threads",), "fp8": ("--decode",)}


def status_of(*words):
    """The exit status of a command line; argparse raises it."""
    try:
        return main(list(words))
    except SystemExit as done:
        return done.code


@pytest.mark.parametrize("name", [name for name in commands.COMMANDS if name != "tables"])
def test_without_a_gpu_the_reason_is_one_line(name, monkeypatch, capsys):
    """In place of a traceback of CuPy; or the library that is not installed."""
    monkeypatch.setattr(machine, "no_gpu", lambda: "no GPU: no driver")
    assert status_of(name, *WITHOUT_GPU.get(name, ())) == 2
    words = rf"{name}.* needs a GPU \(no GPU: no driver\).*|{name} needs \w+, which is not installed"
    assert re.fullmatch(rf"benchmarks: ({words})\n", capsys.readouterr().err)


@pytest.mark.parametrize("name", [name for name in commands.COMMANDS if name not in ("tables", "shape_override")])
@pytest.mark.parametrize("path", ["none/x.csv", "."])
def test_files_that_cannot_be_written_are_reported_first(name, path, monkeypatch, capsys):
    """Before anything is measured: the measurements would be lost."""
    monkeypatch.setattr(machine, "no_gpu", lambda: "no GPU: no driver")
    assert status_of(name, *(["--csv"] if name == "compare" else []), path) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.search(rf"cannot write {re.escape(path)}: (No such file|Is a)|needs \w+, which is not installed$", last)


def test_a_check_of_a_file_does_not_change_it(folder):
    """A new file is not left behind, and an existing one keeps its content."""
    (folder / "old").write_text("kept")
    assert [output_file(name).name for name in ("new", "old")] == ["new", "old"]
    assert [(path.name, path.read_text()) for path in folder.iterdir()] == [("old", "kept")]


#: Command lines, and the end of the last line on stderr.
WRONG = {
    "missing_file": ("tables speed none.csv", "none.csv: No such file or directory"),
    "wrong_file": ("tables speed text.csv", "text.csv is not a CSV file of compare: it has no column preset"),
    "file_of_another_table": ("tables plans text.csv", "FILE has no effect with plans, only with speed: remove it"),
    "plot_of_another_table": ("tables plans --plot x.svg", "--plot has no effect with plans, only with decode: remove it"),
    "no_table": ("tables", "the following arguments are required: TABLE"),
    "plot_in_no_folder": ("tables decode --plot none/x.svg", "cannot write none/x.svg: No such file or directory"),
    "no_problem": ("parallel --cpu --only nonsense", "no name of a problem contains 'nonsense'; the names are .*"),
    "no_rate": ("parallel --model --rates 0 1", "argument --rates: 0 is not positive and finite"),
    "no_number": ("parallel --model --link x", "argument --link: 'x' is not a number"),
    "no_members": ("parallel --cpu --members 0", "argument --members: 0 is not positive"),
    "three_numbers": ("shape_override 1 2 3", "3 numbers are given; pass four, or none to run all combinations"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_command_lines(name, folder, capsys):
    """The last line names the value and the remedy; nothing is written."""
    (folder / "text.csv").write_text("no table")
    words, message = WRONG[name]
    assert status_of(*words.split()) == 2
    assert re.search(rf"{message}$", capsys.readouterr().err.splitlines()[-1])
    assert [path.name for path in folder.iterdir()] == ["text.csv"]


def test_wrong_results_are_one_line(monkeypatch, capsys):
    """Different results of the CPU engine and numpy are an error of one line."""
    measured = cpu.measure
    monkeypatch.setattr(cpu, "measure", lambda rounds, progress: measured((8, 2, 16, 1), rounds, progress))
    monkeypatch.setattr(cpu, "plain_forward", lambda q, k, v: (2 * v,))
    assert main(["compare", "--cpu"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("benchmarks: the CPU engine and numpy differ by ")
