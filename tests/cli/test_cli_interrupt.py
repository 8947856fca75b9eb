"""Ctrl-C ends every command with one line, and leaves no unfinished file."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
SHAPES = '[[attention]]\nq = [64, 8, 256, 2]\nk = [64, 8, 256, 2]\nv = [64, 8, 256, 2]\ndtype = "bfloat16"\n'
SHAPES += f"lengths = {list(range(100, 3000, 100))}\n"
COMMANDS = {
    "demo": ["demo", "--seq", "100000", "--heads", "32", "--head-dim", "16", "--engine", "numpy"],
    "generate": ["demo", "--generate", "--steps", "100000", "--engine", "numpy"],
    "run": ["run", "in.npz", "-o", "out.npz"],
    "bench": ["bench", "--trace", "problems.jsonl", "--engine", "cpu"],
    "check": ["check", "--engine", "cpu"],
    "plan": pytest.param(["plan", "shapes.toml", "--gpu", "h200", "-o", "plans"], marks=pytest.mark.cudnn),
    "measure": pytest.param(["support", "--measure"], marks=pytest.mark.cudnn),
}
#: What the child runs: it writes a file once the command has begun.
CODE = """
import sys, pathlib
from cupy_sdpa.__main__ import main
pathlib.Path("begun").touch()
sys.exit(main(sys.argv[1:]))
"""


def interrupted(folder, command, ready, wait):
    """The exit status and the output of a command that gets Ctrl-C some seconds after it is ready."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, cwd=folder, env=environment, text=True, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background of a shell ignores it
    )  # fmt: skip
    for _ in range(2000):
        if ready() or process.poll() is not None:
            break
        time.sleep(0.01)
    time.sleep(wait)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: also to the worker processes
    try:
        out, err = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            process.kill()
    return process.returncode, out, err


@pytest.mark.parametrize("words", COMMANDS.values(), ids=list(COMMANDS))
def test_one_line(words, tmp_path):
    """No traceback, also not of the worker processes; files that existed are unchanged."""
    x = np.ones((64, 32, 3000, 1), np.float32, order="F")
    np.savez(tmp_path / "in.npz", q=x, k=x, v=x)
    (tmp_path / "shapes.toml").write_text(SHAPES, encoding="utf-8")
    line = '{"call": "attention", "q": %s, "k": %s, "v": %s, "options": {"scale": %d}}\n'
    array = '{"shape": [64, 16, 2000, 1], "dtype": "float32"}'
    (tmp_path / "problems.jsonl").write_text("".join(line % (array, array, array, n) for n in range(1, 60)), encoding="utf-8")
    before = set(tmp_path.iterdir())
    status, out, err = interrupted(tmp_path, [sys.executable, "-c", CODE, *words], (tmp_path / "begun").exists, 1.0)
    assert (status, err.splitlines()[-1:]) == (130, ["cupy_sdpa: interrupted"])
    if words[0] == "check":
        assert "findings in" in out, "it prints the result so far"
    assert "Traceback" not in err
    left = set(tmp_path.iterdir()) - before - {tmp_path / "begun", tmp_path / "plans"}
    assert left == set()


#: Sends Ctrl-C to the process when it imports a module.
INTERRUPTS = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPTED"]:
            os.kill(os.getpid(), signal.SIGINT)


sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize("module", ["numpy", "cupy_sdpa.attention", "cupy_sdpa._cli.main", "cupy_sdpa.offline.problems"])
def test_during_the_imports(module, tmp_path):
    """The process ends without a traceback."""
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTS, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "INTERRUPTED": module}
    command = [sys.executable, "-m", "cupy_sdpa", "support"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
