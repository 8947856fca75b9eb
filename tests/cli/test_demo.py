"""The command demo: output, error, engine and plot; and explain on the current GPU."""

import re

import numpy as np
import pytest
from command_line import ROOT, python, run
from engines import one_in

from cupy_sdpa import reference

pytestmark = pytest.mark.usefixtures("folder")

#: Options for every engine, and for numpy only: other dtypes, from one token on.
DEMOS = ["--seq 40", "--causal --dtype float16 --seq 50"]
ON_NUMPY = ["--dtype float64 --seq 200 --causal", "--seq 1000", "--seq 1", "--seq 2 --causal", "--seq 20 --dtype float32"]


def check(command):
    """The text of a demo: it fits on a screen, and rounding explains the error."""
    done = run(command)
    assert done.status == 0
    assert len(done.lines) <= 24
    assert max(map(len, done.lines)) <= 100
    error, explained = re.search(r"error (\S+) at most .* explains up to (\S+)", done.text).groups()
    assert 0 <= float(error) <= float(explained)
    assert "correct: " in done.text
    return done.text


@pytest.mark.parametrize("words", DEMOS)
def test_demo(words, engine):
    """On every engine the result is correct, and the engine and its reason are printed; on cuDNN also the plan."""
    printed = check(f"demo --engine {'cudnn' if engine.on_cudnn else 'numpy'} {words}")
    expected = ("engine cuDNN (", "workspace") if engine.on_cudnn else ("numpy (requested by --engine numpy)", "all ")
    assert all(part in printed for part in expected)


@pytest.mark.parametrize("words", ["--seq 30 --causal", "--seq 20 --dtype float64"])
def test_demo_without_cudnn(words, fake):
    """With --engine cupy a GPU also computes what cuDNN does not support; the tiles replace the plan."""
    printed = check(f"demo --engine cupy {words}")
    for part in ("engine CuPy (", "engine='cupy')", "plan none: CuPy's operations, without cuDNN: all heads at a time"):
        assert part in printed


@pytest.mark.parametrize("words", ON_NUMPY)
def test_demo_on_numpy(words):
    """The results are correct."""
    check(f"demo --engine numpy {words}")


@pytest.mark.gpu
@pytest.mark.parametrize("words", ["", "--seq 5000"])
def test_large_demos(words):
    """On a GPU cuDNN is chosen without being asked for."""
    assert "engine cuDNN (" in check(f"demo {words}")


def test_on_the_current_gpu(engine):
    """explain plans for this GPU."""
    if engine.on_cudnn:
        done = run("explain 64,8,100,2 --keys 64,4,50,2 --causal --dtype float16")
        assert done.status == 0
        assert done.text.startswith("runs on cuDNN forward attention, float16: batch 2, 8 query and 4 key/value heads")
        assert "workspace" in done.text


def test_numpy_computes_what_cudnn_cannot_run(engine):
    """With the reason; if cuDNN is requested, the reason is an error."""
    if engine.on_cudnn:
        assert "numpy (cuDNN cannot run this: " in check("demo --seq 50 --dtype float64")
        assert "float64" in run("demo --seq 50 --dtype float64 --engine cudnn").complaint


def test_words(folder):
    """Related words attend to each other, two runs print the same except for times, and no file is written."""
    done = [run("demo --engine numpy") for _ in range(2)]
    outputs = [[line for line in one.lines if not line.startswith("time")] for one in done]
    assert outputs[0] == outputs[1]
    assert any("'marmalade' attends to orange 0." in line for line in outputs[0])
    assert not list(folder.iterdir())


def test_causal_words_see_only_what_came_before():
    """With --causal, a word attends only to words that occur before it."""
    text = (ROOT / "cupy_sdpa" / "cli" / "alice.txt").read_text(encoding="utf-8").lower().replace("’", "'")
    before = set(re.findall(r"\w+(?:['-]\w+)*", text[: text.rindex("watch")]))
    attended = [
        re.findall(
            r"([\w'-]+) 0\.\d+", re.search("'watch' attends to (.*?) itself", run(f"demo --engine numpy{option}").text)[1]
        )
        for option in ("", " --causal")
    ]
    assert [before.issuperset(words) for words in attended] == [False, True]


@pytest.mark.slow
def test_a_part_is_checked_where_all_would_take_long():
    """A large demo checks some rows and prints how many."""
    printed = check("demo --engine numpy --seq 2200 --causal")
    assert 0 < int(re.search(r"\((\d+) of 17600 rows checked\)", printed)[1]) < 17600


@pytest.mark.parametrize("words", ["--seq 100", "--dtype float32 --causal"])
def test_a_wrong_result_is_noticed(words, monkeypatch):
    """An error larger than rounding gives status 1."""
    right = reference.attention
    monkeypatch.setattr(reference, "attention", lambda *x, **options: [np.float32(1.1) * y for y in right(*x, **options)])
    done = run(f"demo --engine numpy {words}")
    assert done.status == 1
    assert "WRONG" in done.text


@pytest.mark.slow
def test_a_figure_needs_matplotlib(folder):
    """--plot without matplotlib is an error with the fix."""
    (folder / "matplotlib.py").write_text("raise ModuleNotFoundError('no matplotlib', name='matplotlib')")
    done = python("-m", "cupy_sdpa", "demo", "--plot", "map.png", cwd=folder, path=[folder])
    assert "pip install -e '.[plot]' in a clone" in done.complaint


@pytest.mark.parametrize("words", one_in(4, ["--plot map.svg", "--plot", "--causal --plot", "--seq 1 --plot"]))
def test_figure(words, folder):
    """With matplotlib the demo writes the figure and prints its path; an unknown ending is an error."""
    pytest.importorskip("matplotlib")
    done = run(f"demo --engine numpy --seq 60 {words}")
    (path,) = folder.iterdir()
    assert path.name == ("map.svg" if "map.svg" in words else "attention.png")
    assert path.stat().st_size > 5000
    assert done.lines[-1].split() == ["picture", path.name]
    path.unlink()
    assert "'unknown' is not supported" in run("demo --engine numpy --seq 20 --plot map.unknown").err
    assert not list(folder.iterdir())
