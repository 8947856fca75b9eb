"""Ctrl-C ends every command with one line, and leaves no unfinished file."""

import os
import signal
import subprocess
import sys
import time

import pytest
from command_line import ROOT, python

pytestmark = pytest.mark.usefixtures("folder")

SHAPES = " ".join(f"64,8,{length},2" for length in range(100, 3000, 100))
COMMANDS = [
    "demo --engine numpy --seq 8000",
    pytest.param("check --engine cpu", marks=pytest.mark.slow),
    pytest.param(f"plan {SHAPES} --gpu h200 -o plans", marks=[pytest.mark.cudnn, pytest.mark.slow]),
]
#: What the child runs: it writes a file once the command has begun.
CODE = """
import sys, pathlib
from cupy_sdpa.__main__ import main
pathlib.Path("begun").touch()
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("words", COMMANDS, ids=["demo", "check", "plan"])
def test_one_line(words, folder):
    """No traceback, also not of the worker processes; files that existed are unchanged."""
    before = {*folder.iterdir(), folder / "begun", folder / "plans"}
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, *words.split()], env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
        start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background of a shell ignores it
    )  # fmt: skip
    while not (folder / "begun").exists() and process.poll() is None:
        time.sleep(0.01)
    time.sleep({"demo": 1.5, "check": 3.0}.get(words.split()[0], 1.0))
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


@pytest.mark.parametrize("module", ["cupy_sdpa.core.errors", pytest.param("cupy_sdpa.cli.main", marks=pytest.mark.slow)])
def test_during_the_imports(module, folder):
    """The process ends without a traceback."""
    (folder / "sitecustomize.py").write_text(INTERRUPTS, encoding="utf-8")
    assert python("-m", "cupy_sdpa", "support", cwd=folder, path=[folder], INTERRUPTED=module) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize("module", ["numpy", pytest.param("cupy_sdpa.cli.support_problems", marks=pytest.mark.slow)])
def test_during_the_import_of_a_command(module, folder):
    """One line and the status of an interrupted command."""
    (folder / "sitecustomize.py").write_text(INTERRUPTS, encoding="utf-8")
    done = python("-m", "cupy_sdpa", "support", cwd=folder, path=[folder], INTERRUPTED=module)
    assert done == (130, "", "cupy_sdpa: interrupted\n")
