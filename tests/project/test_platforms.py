"""The CPU engine and the commands on Windows and macOS: without CuPy, CUDA's libraries and what only Unix has."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
#: Loaded by every Python process that the test starts, before other code.
REMOVED = """
import ctypes, os, selectors, shutil, signal, subprocess, sys
shutil._use_fd_functions = False
for name in ("fcntl", "resource", "termios", "pwd", "grp", "syslog", "cupy", "cuda.bindings", "cuda.bindings.driver"):
    sys.modules[name] = None
subprocess.Popen.kill = subprocess.Popen.terminate
for name in ("fork", "forkpty", "register_at_fork", "getuid", "geteuid", "getgid", "killpg", "getpgid", "setsid", "sysconf",
             "sched_getaffinity", "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_DIRECTORY", "RTLD_NOLOAD", "RTLD_NOW", "RTLD_GLOBAL",
             "mkfifo", "chown"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("SIGKILL", "SIGALRM", "SIGHUP", "SIGUSR1", "alarm", "setitimer", "pthread_sigmask"):
    if hasattr(signal, name):
        delattr(signal, name)


class Selector:
    def register(self, *arguments):
        raise OSError("[WinError 10038] An operation was attempted on something that is not a socket")


selectors.DefaultSelector = Selector
load = ctypes.CDLL


class CDLL(load):
    def __init__(self, name=None, *arguments, **keywords):
        if name is not None and any(part in str(name) for part in ("cudnn", "nvrtc", "libcuda", "cudart")):
            raise OSError(f"{name}: cannot open shared object file")
        super().__init__(name, *arguments, **keywords)


ctypes.CDLL = CDLL
sys.unix_was_removed = True
"""
ATTENTION = """
import sys
assert sys.unix_was_removed
import numpy as np, cupy_sdpa
from cupy_sdpa import parallel, reference, store, zoo
x = np.asfortranarray(np.random.default_rng(0).standard_normal((8, 2, 40, 2)))
out, pullback = cupy_sdpa.attention_vjp(x, x, x, causal=True, score_mod=zoo.softcap(3.0))
expected, _ = reference.attention(x, x, x, causal=True, softcap=3.0)
np.testing.assert_allclose(out, expected, atol=1e-10)
pullback(x)
cupy_sdpa.attention_jvp(x, x, x, x)
print(store.kept(), cupy_sdpa.explain(x, x, x))
with cupy_sdpa.trace("problems.jsonl") as problems:
    cupy_sdpa.attention(x, x, x)
"""
COMMANDS = {
    "info": ["info"],
    "demo": ["demo", "--seq", "50"],
    "explain": ["explain", "64,8,256,2", "--gpu", "h100", "--cudnn", "9.19"],
    "support": ["support"],
    "run": ["run", "in.npz", "-o", "out.npz", "--layout", "dhsb"],
    "check": ["check", "--engine", "cpu", "--problems", "4", "--seed", "1", "--json", "report.json"],
    "bench": ["bench", "--trace", "problems.jsonl", "--json"],
    "check_trace": ["check", "--trace", "problems.jsonl", "--engine", "cpu"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the module that removes Unix, an input file and a trace."""
    path = tmp_path_factory.mktemp("platform")
    (path / "site").mkdir()
    (path / "site" / "sitecustomize.py").write_text(REMOVED, encoding="utf-8")
    x = np.ones((8, 2, 4, 1), np.float32)
    np.savez(path / "in.npz", q=x, k=x, v=x)
    done = run(path, "-c", ATTENTION)
    assert done.returncode == 0, done.stderr
    return path


def run(folder, *words):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder / "site"), str(ROOT)]), "MPLBACKEND": "agg"}
    command = [sys.executable, "-W", "error", *words]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


def test_attention(folder):
    """Both passes, the derivative, functions, the disk cache, explain and a trace."""
    assert len((folder / "problems.jsonl").read_text(encoding="utf-8").splitlines()) == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_commands(name, folder):
    done = run(folder, "-m", "cupy_sdpa", *COMMANDS[name])
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    if name == "info":
        assert "numpy       yes" in done.stdout
        assert "cuDNN       no" in done.stdout
    if name == "check":
        assert json.loads((folder / "report.json").read_text(encoding="utf-8"))["findings"] == []


def test_a_command_that_needs_linux(folder):
    """Planning says in one line what is missing; explain uses the support table, and says so."""
    done = run(folder, "-m", "cupy_sdpa", "support", "--measure")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    done = run(folder, "-m", "cupy_sdpa", "explain", "64,8,256,2", "--gpu", "h100")
    assert (done.returncode, done.stderr) == (0, "")
    assert "from the support table alone" in " ".join(done.stdout.split())


def test_the_removal_bites(folder):
    """Code that needs a removed function or library fails."""
    for code in ("import fcntl", "import os; os.fork()", "import cupy", "import ctypes; ctypes.CDLL('libcudnn.so.9')"):
        assert run(folder, "-c", code).returncode == 1
