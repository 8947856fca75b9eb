"""The command demo: output, error, engine and plot."""

import re
import sys

import numpy as np
import pytest
from command_line import complaint, lines

from cupy_sdpa.__main__ import main
from cupy_sdpa._cli import demo
from cupy_sdpa._cli.helpers import machine, text


@pytest.fixture
def no_matplotlib(monkeypatch):
    """A machine without matplotlib."""
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty working directory, and lines of 100 columns: pytest-xdist sets COLUMNS."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)
    return tmp_path


DEMOS = {
    "whole_text": [],
    "causal": ["--causal"],
    "float16": ["--dtype", "float16", "--seq", "200"],
    "float32": ["--dtype", "float32", "--seq", "200"],
    "float64_causal": ["--dtype", "float64", "--seq", "200", "--causal"],
    "longer_than_the_text": ["--seq", "1000", "--heads", "2"],
    "one_head": ["--seq", "50", "--heads", "1"],
    "odd_sizes": ["--seq", "33", "--heads", "6", "--kv-heads", "3", "--head-dim", "17"],
    "one_token": ["--seq", "1", "--head-dim", "1"],
    "two_tokens_causal": ["--seq", "2", "--causal", "--kv-heads", "1"],
    "wider_than_the_vocabulary": ["--seq", "20", "--head-dim", "400"],
}


@pytest.mark.parametrize("words", DEMOS.values(), ids=DEMOS)
def test_demo(words, capsys):
    """The output fits on a screen and has the engine and its reason; rounding explains the error."""
    assert main(["demo", "--engine", "numpy", *words]) == 0
    shown = lines(capsys)
    assert len(shown) <= 24
    assert max(map(len, shown)) <= 100
    printed = " ".join(" ".join(shown).split())
    assert "numpy (requested by --engine numpy)" in printed
    error, explained = re.search(r"error (\S+) at most .* explains up to (\S+) ", printed).groups()
    assert 0 <= float(error) <= float(explained)
    assert "rows checked" in printed
    assert "correct: " in printed


def test_demo_says_why_it_is_this_engine(capsys):
    """Without --engine the demo selects an engine and prints the reason."""
    assert main(["demo", "--seq", "64"]) == 0
    (line,) = [line for line in lines(capsys) if line.startswith("engine")]
    reasons = machine.obstacles()
    assert reasons[0][:40] in line if reasons else "cuDNN (" in line


def test_demo_is_deterministic(capsys):
    """Two runs print the same lines except for the times."""
    outputs = []
    for _ in range(2):
        main(["demo", "--engine", "numpy", "--seq", "100"])
        outputs.append([line for line in lines(capsys) if not line.startswith("time")])
    assert outputs[0] == outputs[1]


def test_demo_finds_related_words(capsys):
    """Marmalade attends to orange more than to any other word."""
    main(["demo", "--engine", "numpy"])
    assert any("'marmalade' attends to orange 0." in line for line in lines(capsys))


def test_causal_words_see_only_what_came_before():
    """With --causal, later words have weight 0."""
    words = text.tokens()[:60]
    q, k, _ = text.heads(words, 60, 2, 1, 16)
    seen = text.weights(q, k, 0, np.arange(60), causal=True)
    assert np.array_equal(seen, np.tril(seen))
    assert np.allclose(seen.sum(axis=1), 1)


@pytest.mark.parametrize("causal", [[], ["--causal"]], ids=["full", "causal"])
def test_demo_checks_a_part_where_all_would_take_long(causal, monkeypatch, capsys):
    """A large demo checks some rows and prints how many."""
    monkeypatch.setattr(demo, "ROWS", 64)
    assert main(["demo", "--engine", "numpy", "--heads", "4", "--seq", "100", *causal]) == 0
    assert re.search(r"\(\d+ of 400 rows checked\)", "\n".join(lines(capsys)))


@pytest.mark.parametrize("rows", ["all", "some"])
def test_demo_notices_a_wrong_result(rows, monkeypatch, capsys):
    """An error larger than rounding gives status 1."""
    right = demo.attention
    monkeypatch.setattr(demo, "attention", lambda *arrays, **options: right(*arrays, **options) * np.float32(1.1))
    monkeypatch.setattr(demo, "ROWS", 1 << 15 if rows == "all" else 64)
    assert main(["demo", "--engine", "numpy", "--seq", "100"]) == 1
    assert any("WRONG" in line for line in lines(capsys))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--heads", "4", "--kv-heads", "3"], "--heads 4 is not a multiple of --kv-heads 3"),
        (["--seq", "10000000000"], "GiB are available"),
    ],
    ids=["heads", "too_large"],
)
def test_demo_refuses(words, said, capsys):
    """Invalid options are errors of one line."""
    assert main(["demo", *words]) == 2
    assert said in complaint(capsys)


def test_the_demo_writes_no_file_by_default(folder, capsys):
    """Only --plot writes a figure."""
    assert main(["demo", "--engine", "numpy", "--seq", "50"]) == 0
    assert not list(folder.iterdir())
    assert "picture" not in capsys.readouterr().out


@pytest.mark.parametrize("path", ["none/map.png", "."])
def test_a_figure_that_cannot_be_written_is_reported_first(path, capsys):
    """Before attention is computed and printed."""
    assert main(["demo", "--engine", "numpy", "--plot", path]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"cupy_sdpa: cannot write {path}: ")
    assert not printed.out


def test_a_requested_figure_needs_matplotlib(no_matplotlib, capsys):
    """--plot without matplotlib is an error."""
    assert main(["demo", "--plot", "map.png"]) == 2
    assert "pip install 'cupy-sdpa[plot]'" in complaint(capsys)


@pytest.mark.parametrize(
    "words",
    [["--plot"], ["--plot", "map.svg"], ["--causal", "--heads", "1", "--plot"], ["--seq", "1", "--plot"]],
    ids=["default", "named", "one_head", "one"],
)
def test_figure(words, folder, capsys):
    """With matplotlib the demo writes the figure and prints its path."""
    pytest.importorskip("matplotlib")
    assert main(["demo", "--engine", "numpy", "--seq", "60", *words]) == 0
    (path,) = folder.iterdir()
    assert path.name == ("map.svg" if "map.svg" in words else "attention.png")
    assert path.stat().st_size > 5000
    assert lines(capsys)[-1].split() == ["picture", path.name]


@pytest.mark.parametrize("path", ["missing/map.png", "map.unknown"])
def test_figure_that_cannot_be_written(path, folder, capsys):
    """A figure that cannot be written is an error of one line."""
    pytest.importorskip("matplotlib")
    assert main(["demo", "--engine", "numpy", "--seq", "20", "--plot", path]) == 2
    assert path in complaint(capsys)
    assert not list(folder.iterdir())


@pytest.mark.gpu
@pytest.mark.parametrize("words", [[], ["--causal", "--dtype", "float16"], ["--seq", "5000", "--heads", "16"]])
def test_demo_on_the_gpu(words, capsys):
    """On a GPU the demo runs on cuDNN, prints the plan, and the result is correct."""
    assert main(["demo", "--engine", "cudnn", *words]) == 0
    printed = " ".join(lines(capsys))
    assert "engine    cuDNN (" in printed
    assert "workspace" in printed
    assert "numpy in" in printed


@pytest.mark.gpu
def test_what_cudnn_refuses_goes_to_numpy(capsys):
    """On a GPU, numpy computes what cuDNN cannot run, and the reason is printed."""
    assert main(["demo", "--seq", "50", "--head-dim", "20"]) == 0
    assert "numpy (cuDNN cannot run this: the head_dim" in " ".join(lines(capsys))
    assert main(["demo", "--seq", "50", "--head-dim", "20", "--engine", "cudnn"]) == 2
    assert "head_dim" in complaint(capsys)
