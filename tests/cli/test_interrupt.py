"""Ctrl-C ends every command with one line, and leaves no unfinished file."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from command_line import ROOT, python

pytestmark = pytest.mark.usefixtures("folder")

SHAPES = '[[attention]]\nq = [64, 8, 256, 2]\nk = [64, 8, 256, 2]\nv = [64, 8, 256, 2]\ndtype = "bfloat16"\n'
SHAPES += f"lengths = {list(range(100, 3000, 100))}\n"
COMMANDS = [
    "run in.npz -o out.npz",
    pytest.param("check --engine cpu", marks=pytest.mark.slow),
    pytest.param("plan shapes.toml --gpu h200 -o plans", marks=[pytest.mark.cudnn, pytest.mark.slow]),
]
#: What the child runs: it writes a file once the command has begun.
CODE = """
import sys, pathlib
from cupy_sdpa.__main__ import main
pathlib.Path("begun").touch()
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("words", COMMANDS)
def test_one_line(words, folder):
    """No traceback, also not of the worker processes; files that existed are unchanged."""
    x = np.ones((64, 16, 3000, 1), np.float32, order="F")
    np.savez("in.npz", q=x, k=x, v=x)
    (folder / "shapes.toml").write_text(SHAPES, encoding="utf-8")
    before = {*folder.iterdir(), folder / "begun", folder / "plans"}
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, *words.split()], env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
        start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background of a shell ignores it
    )  # fmt: skip
    while not (folder / "begun").exists() and process.poll() is None:
        time.sleep(0.01)
    time.sleep({"run": 0.3, "check": 3.0}.get(words.split()[0], 1.0))
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: also to the worker processes
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert (process.returncode, err.splitlines()[-1:]) == (130, ["cupy_sdpa: interrupted"])
    assert "Traceback" not in err
    assert ("findings in" in out) == words.startswith("check"), "it prints the result so far"
    assert {*folder.iterdir()} <= before


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
LATER = ("attention", "_cli.main", "offline.problems")


@pytest.mark.parametrize("module", ["numpy", *(pytest.param(f"cupy_sdpa.{name}", marks=pytest.mark.slow) for name in LATER)])
def test_during_the_imports(module, folder):
    """The process ends without a traceback."""
    (folder / "sitecustomize.py").write_text(INTERRUPTS, encoding="utf-8")
    assert python("-m", "cupy_sdpa", "support", cwd=folder, path=[folder], INTERRUPTED=module) == (-signal.SIGINT, "", "")
