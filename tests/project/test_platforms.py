"""The CPU engine and the commands on Windows and macOS: without CuPy, CUDA's libraries and what only Unix has."""

import ast
import json

import pytest
from command_line import python

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
"""
#: Both passes, the derivative, functions, explain, saved problems, the disk cache and the plan cache; then what must not be there.
ATTENTION = """
import ctypes, importlib, os, pathlib
import numpy as np, cupy_sdpa
from cupy_sdpa import parallel, reference, store, zoo
x = np.asfortranarray(np.random.default_rng(0).standard_normal((8, 2, 40, 2)))
out, pullback = cupy_sdpa.attention_vjp(x, x, x, causal=True, score_mod=zoo.softcap(3.0))
expected, _ = reference.attention(x, x, x, causal=True, softcap=3.0)
np.testing.assert_allclose(out, expected, atol=1e-10)
pullback(x)
cupy_sdpa.attention_jvp(x, x, x, x)
print(store.kept(), cupy_sdpa.explain(x, x, x))
shelf = store.DiskCache(pathlib.Path("plans"))
shelf.check()
shelf.put("0" * 64, b"x")
assert store.DiskCache(pathlib.Path("plans")).get("0" * 64) == b"x"
importlib.import_module("cupy_sdpa.core.cudnn_engine.plan_cache")
for absent in (lambda: importlib.import_module("fcntl"), lambda: os.fork(), lambda: importlib.import_module("cupy"),
               lambda: ctypes.CDLL("libcudnn.so.9")):
    try:
        absent()
    except (ImportError, AttributeError, OSError):
        continue
    raise AssertionError("it is there")
"""
COMMANDS = {
    "info": 0,
    "demo --seq 50": 0,
    "explain 64,8,256,2 --gpu h100": 0,
    "support": 0,
    "check --engine cpu --problems 2 --seed 1 --json report.json": 0,
    "check --saved problems.jsonl --engine cpu": 0,
}
RUN = """
import contextlib, io, sys
from cupy_sdpa.__main__ import main
if __name__ == "__main__":
    outcomes = {}
    for command in sys.argv[1:]:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            status = main(command.split())
        outcomes[command] = status, out.getvalue(), err.getvalue()
    print(outcomes)
"""


@pytest.mark.slow
def test_without_what_only_unix_has(tmp_path):
    """Attention and every command run; what needs Linux says in one line what is missing."""
    (tmp_path / "sitecustomize.py").write_text(REMOVED, encoding="utf-8")
    (tmp_path / "attention.py").write_text(ATTENTION, encoding="utf-8")
    (tmp_path / "commands.py").write_text(RUN, encoding="utf-8")
    done = python("attention.py", cwd=tmp_path, path=[tmp_path], CUPY_SDPA_TRACE="problems.jsonl")
    assert (done.status, done.err) == (0, "")
    assert len((tmp_path / "problems.jsonl").read_text(encoding="utf-8").splitlines()) >= 3
    done = python("commands.py", *COMMANDS, cwd=tmp_path, path=[tmp_path], MPLBACKEND="agg")
    assert (done.status, done.err) == (0, "")
    outcomes = ast.literal_eval(done.out)
    for command, (status, out, err) in outcomes.items():
        assert status == COMMANDS[command], err
        assert "Traceback" not in err
        assert err.count("\n") == 1 or not status
        if command == "info":
            assert "numpy       yes" in out
            assert "cuDNN       no" in out
        if command.startswith("explain"):
            assert "from the support table alone" in " ".join(out.split())
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["findings"] == []
