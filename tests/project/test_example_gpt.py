"""examples/gpt.py: its gradients, training and generation; on a GPU with CuPy."""

import runpy
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from command_line import ROOT, python, run

PATH = ROOT / "examples" / "gpt.py"
TEXT = "the cat sat on the mat. " * 20


@pytest.fixture(scope="module")
def gpt():
    """The example's functions."""
    return SimpleNamespace(**runpy.run_path(str(PATH)))


def test_readers_can_copy_it():
    """At most 150 lines, and no import besides numpy, the standard library and this package."""
    lines = PATH.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    imports = [line for line in lines if line.startswith(("import ", "from "))]
    assert imports == [
        "import argparse", "import importlib", "from pathlib import Path", "import numpy as np", "from cupy_sdpa import attention_vjp",
    ]  # fmt: skip


def test_gradients(gpt):
    """The directional derivative of a random function of the logits, in float64, for every weight."""
    rng = np.random.default_rng(0)
    weights = {name: x.astype(np.float64) for name, x in gpt.initial(5, rng).items()}
    words = np.eye(5)[rng.integers(0, 5, (2, 7))]
    dlogits = rng.standard_normal((2, 7, 5))
    gradients = gpt.gpt(weights, words, None)[1](dlogits)
    assert gradients.keys() == weights.keys()
    for name, gradient in gradients.items():
        step = rng.standard_normal(gradient.shape)
        plus, minus = (
            (gpt.gpt(weights | {name: weights[name] + t * step}, words, None)[0] * dlogits).sum() for t in (1e-5, -1e-5)
        )
        np.testing.assert_allclose((gradient * step).sum(), (plus - minus) / 2e-5, rtol=1e-4, atol=1e-6, err_msg=name)


def test_causality(gpt):
    """A character does not change the logits of earlier positions."""
    rng = np.random.default_rng(0)
    weights = gpt.initial(5, rng)
    numbers = rng.integers(0, 5, (1, 9))
    before = gpt.gpt(weights, np.eye(5, dtype=np.float32)[numbers], None)[0]
    numbers[0, 6] = (numbers[0, 6] + 1) % 5
    after = gpt.gpt(weights, np.eye(5, dtype=np.float32)[numbers], None)[0]
    np.testing.assert_array_equal(before[0, :6], after[0, :6])
    assert (before[0, 6:] != after[0, 6:]).any()


@pytest.mark.slow
@pytest.mark.parametrize("on", ["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def test_it_learns_a_sentence(on, gpt, request):
    """The loss falls to a small part, and the continuation is the sentence; with CuPy arrays attention runs in bfloat16."""
    engine = {} if on == "numpy" else {"xp": request.getfixturevalue("cupy"), "dtype": "bfloat16"}
    weights, vocabulary, losses = gpt.train(TEXT, steps=120, **engine)
    text = gpt.generate(weights, vocabulary, "the cat ", 24, temperature=0.1, **engine)
    assert losses[0] > 2
    assert losses[-1] < 0.2
    assert text.startswith("the cat sat on the mat. the")


def program(words):
    """Run the program."""
    with mock.patch.object(sys, "argv", [str(PATH), *words]):
        runpy.run_path(str(PATH), run_name="__main__")
    return 0


def test_the_command():
    """It prints the loss and a continuation of the prompt."""
    done = run("--cpu --steps 2 --tokens 3 --prompt", "Alice was ", main=program)
    first, last, *rest = done.lines
    assert first.startswith("loss per character: ")
    assert (first[-18:], last[-18:]) == ("after 1 of 2 steps", "after 2 of 2 steps")
    assert "\n".join(rest).startswith("Alice was ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise ImportError('no CuPy')", "no CuPy (--cpu uses numpy)"),
        ("def zeros(shape): raise RuntimeError('no device')", "no device (--cpu uses numpy)"),
    ],
    ids=["no CuPy", "no GPU"],
)
def test_without_a_gpu(code, message, tmp_path):
    """One line that names --cpu."""
    (tmp_path / "cupy.py").write_text(code, encoding="utf-8")
    done = python(str(PATH), cwd=tmp_path, path=[tmp_path])
    assert done.status == 2
    assert done.err.splitlines()[-1].endswith(message)
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "0"], "1 step or more"),
        (["--prompt", ""], "a prompt of characters of the text"),
        (["--prompt", "日"], "a prompt of characters of the text"),
        (["--text", "missing.txt"], "missing.txt"),
        (["--text", str(PATH.parent)], "directory"),
        (["--text", sys.executable], "can't decode"),
    ],
    ids=["steps", "empty", "unknown", "missing", "folder", "binary"],
)
def test_mistakes_end_before_training(words, message):
    """Invalid options end the command with one line and status 2."""
    done = run("--cpu", *words, main=program)
    assert (done.status, done.out) == (2, "")
    assert message in done.err.splitlines()[-1]
