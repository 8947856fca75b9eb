"""Planning processes: a crashed one is replaced, all end after an error, and Ctrl-C prints one line."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from planner import child_environment

from cupy_sdpa import CudnnError, problem
from cupy_sdpa.offline import planner, worker
from cupy_sdpa.offline.planner import Planner, load_target

SHAPE = (64, 2, 64, 1)
ASKED = problem(SHAPE, SHAPE, SHAPE, dtype="float16")
#: A fake planner: it prints the version, then behaves as the files in its folder specify.
FAKE = """
import os, pathlib, pickle, sys, time
folder = pathlib.Path({folder!r})
while True:
    try:
        request = pickle.load(sys.stdin.buffer)
    except EOFError:
        break
    answer = 92800 if request is None else "no engine"
    if request is not None:
        if (folder / "die").exists():
            (folder / "die").unlink()
            os._exit(7)
        if (folder / "die within").exists():
            (folder / "die within").unlink()
            os.write(1, pickle.dumps("x" * 1000)[:500])
            os._exit(8)
        if (folder / "fail").exists():
            answer = RuntimeError("planning failed")
        if (folder / "wait").exists():
            (folder / str(os.getpid())).touch()
            time.sleep(600)
    os.write(1, pickle.dumps(answer))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder whose files specify the behavior of the planning processes, which do not load cuDNN."""
    monkeypatch.setattr(planner, "_COMMAND", [sys.executable, "-c", FAKE.format(folder=str(tmp_path))])
    return tmp_path


def alive(process):
    """Whether a process exists."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def first_busy(folder, parent=None):
    """The first process that is planning."""
    while not (busy := [name for name in os.listdir(folder) if name.isdigit()]):
        assert parent is None or parent.poll() is None, parent.communicate()
        time.sleep(0.01)
    return int(busy[0])


@pytest.mark.parametrize(("how", "code"), [("die", 7), ("die within", 8)])
def test_a_process_that_ends_is_replaced(how, code, folder):
    """The answer contains its exit status; the next request is answered by a new process."""
    with Planner() as planner:
        (folder / how).touch()
        assert planner.plan(ASKED, load_target("h200")) == f"planning ended the process inside cuDNN (exit status {code})"
        assert planner.plan(ASKED, load_target("h200")) == "no engine"


def test_a_process_that_cannot_be_replaced(folder, monkeypatch):
    """Each request then reports that no process can be started; later requests start one again."""
    with Planner() as workers:
        (folder / "die").touch()
        command = planner._COMMAND
        monkeypatch.setattr(planner, "_COMMAND", [str(folder / "no such program")])
        assert "ended the process" in workers.plan(ASKED, load_target("h200"))
        for _ in range(2):
            with pytest.raises(CudnnError, match=r"cannot be started: .*no such program"):
                workers.plan(ASKED, load_target("h200"))
        monkeypatch.setattr(planner, "_COMMAND", command)
        assert workers.plan(ASKED, load_target("h200")) == "no engine"


def test_a_failure_outside_cudnn_is_raised(folder):
    """The process continues."""
    with Planner() as planner:
        (folder / "fail").touch()
        with pytest.raises(RuntimeError, match="planning failed"):
            planner.plan(ASKED, load_target("h200"))
        (folder / "fail").unlink()
        assert planner.plan(ASKED, load_target("h200")) == "no engine"


def test_unexpected_exceptions_become_answers(monkeypatch):
    """The answer of the planning process contains the traceback."""
    monkeypatch.setattr(worker, "_load_cudnn", lambda: 92800)

    def fail(*_):
        raise RecursionError("too deep")

    monkeypatch.setattr(worker, "plan_for", fail)
    answer = worker._handle((ASKED, load_target("h200"), None))
    assert isinstance(answer, RuntimeError)
    assert "RecursionError: too deep" in str(answer)


def test_no_process_outlives_an_exception(folder):
    """Running processes are killed."""
    (folder / "wait").touch()
    busy = []

    def go_wrong():
        with Planner(2) as planner:
            planner._threads.submit(planner.plan, ASKED, load_target("h200"))
            busy.append(first_busy(folder))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        go_wrong()
    assert not alive(busy[0])


@pytest.mark.parametrize(
    "command", [["plan", "shapes.toml", "--gpu", "h200", "-o", "plans"], ["support", "--measure"]], ids=lambda w: w[0]
)
def test_an_interrupt_is_one_line(command, folder):
    """Ctrl-C in a terminal reaches the whole process group: exit status 130, one line, and no process is left."""
    (folder / "wait").touch()
    (folder / "shapes.toml").write_text(
        '[[attention]]\nq = [64, 2, 64, 1]\nk = [64, 2, 64, 1]\nv = [64, 2, 64, 1]\ndtype = "float16"\nlengths = [64, 128, 192]'
    )
    # a shell starts background jobs with SIGINT ignored, which children inherit
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += f"from cupy_sdpa.offline import planner; planner._COMMAND = {planner._COMMAND!r}\n"
    code += f"from cupy_sdpa.__main__ import main; sys.exit(main({command!r}))"
    running = subprocess.Popen(
        [sys.executable, "-c", code], cwd=folder, env=child_environment(PYTHONPATH=str(Path(__file__).parents[2])),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0,
    )  # fmt: skip
    busy = first_busy(folder, running)
    os.killpg(running.pid, signal.SIGINT)
    out, err = running.communicate(timeout=300)  # a planning process that is not killed would sleep longer
    assert (running.returncode, out, err) == (130, "", "cupy_sdpa: interrupted\n")
    assert not alive(busy)
