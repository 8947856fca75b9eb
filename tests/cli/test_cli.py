"""The command line: help, exit statuses, info, plan and support."""

import os
import re
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from command_line import ROOT, complaint, lines, python

from cupy_sdpa import CudnnError, __version__, store
from cupy_sdpa.__main__ import main
from cupy_sdpa._cli.helpers import machine


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty working directory, and lines of 100 columns: pytest-xdist sets COLUMNS."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)
    return tmp_path


# help and exit status


@pytest.mark.parametrize("command", ["demo", "run", "info", "plan", "support"])
def test_help_has_an_example(command, capsys):
    """The help of every command ends with examples."""
    with pytest.raises(SystemExit) as done:
        main([command, "--help"])
    assert done.value.code == 0
    assert f"python -m cupy_sdpa {command}" in capsys.readouterr().out.split("example")[1]


def test_no_command_prints_the_help(capsys):
    """Without a command the help is printed, and the status is 2."""
    assert main([]) == 2
    assert "python -m cupy_sdpa demo" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["info", "support", "explain 64,2,128,1", "run in.npz -o out.npz"])
def test_unknown_options_print_the_usage_of_the_command(command, capsys):
    """Not that of python -m cupy_sdpa, which lists no options."""
    with pytest.raises(SystemExit) as done:
        main([*command.split(), "--causl"])
    assert done.value.code == 2
    usage, *_, error = capsys.readouterr().err.splitlines()
    name = command.split()[0]
    assert usage.startswith(f"usage: python -m cupy_sdpa {name} ")
    assert error == f"python -m cupy_sdpa {name}: error: unrecognized arguments: --causl"


def test_version(capsys):
    """--version prints the version of the package."""
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize("words", [["info"], ["demo", "--seq", "64", "--engine", "numpy"]], ids=lambda w: w[0])
def test_as_a_module(words, folder):
    """The commands work as python -m cupy_sdpa, with warnings as errors."""
    done = python(*words, cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert "numpy" in done.stdout


def test_a_closed_pipe(folder):
    """A command whose output pipe is closed, as by head, ends without a traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = python("info", cwd=folder, stdout=writer)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


# info

#: A process in which no library for the GPU can be imported or loaded.
BARE = """
import sys
for name in ("cupy", "cuda", "cuda.pathfinder", "cuda.bindings", "cuda.bindings.driver", "matplotlib"):
    sys.modules[name] = None
import ctypes
def missing(name, *args, **kwargs):
    raise OSError(f"{name}: cannot open shared object file")
ctypes.CDLL = missing
from cupy_sdpa.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def test_info(capsys):
    """info prints every library and the engines that can run."""
    assert main(["info"]) == 0
    printed = "\n".join(lines(capsys))
    for expected in (__version__, np.__version__, ml_dtypes.__version__, "CuPy", "cuda-python", "cuDNN", "GPU"):
        assert expected in printed
    can = printed.split("this machine can run:")[1]
    assert re.search(r"numpy +yes", can)
    assert re.search(rf"cuDNN +{'no' if machine.obstacles() else 'yes'}", can)


def test_info_in_a_bare_environment(folder):
    """Without any library for the GPU, info prints the pip command for each."""
    env = {name: os.environ.pop(name) for name in ("CUPY_SDPA_CUDNN",) if name in os.environ}
    try:
        done = python("info", cwd=folder, code=BARE)
    finally:
        os.environ.update(env)
    assert (done.returncode, done.stderr) == (0, "")
    can = done.stdout.split("this machine can run:")[1]
    for title in ("CuPy is not installed", "cuda-python is not installed", "cuDNN is not found"):
        assert re.search(rf"{title}: pip install 'cupy-sdpa\[cuda1[23]\]'", can)
    assert re.search(r"numpy +yes", can)


def test_demo_in_a_bare_environment(folder):
    """Without any library for the GPU, the demo runs on numpy and prints the reason."""
    done = python("demo", "--seq", "40", cwd=folder, code=BARE)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"engine +numpy \((no GPU: |CuPy is not installed: pip install)", done.stdout)


@pytest.mark.parametrize(
    "failure", ["ImportError('libx.so.1 is missing')", "PermissionError(13, 'Permission denied', '/cache')"]
)
def test_a_module_that_is_broken(failure, folder, monkeypatch):
    """A module that is installed but cannot be imported is reported with its error; a missing one as not installed."""
    (folder / "broken.py").write_text(f"raise {failure}")
    monkeypatch.syspath_prepend(folder)
    assert re.search("cannot be imported: .*(libx|Permission denied)", machine.imported("broken"))
    assert machine.imported("broken_and_missing") == machine.imported("missing.too") == "not installed"


@pytest.mark.parametrize(
    ("driver", "extra"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024", "'cupy-sdpa[cuda12]'"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build", "'cupy-sdpa[cuda13]'"),
        ("something else", "'cupy-sdpa[cuda12]' (or [cuda13])"),
    ],
    ids=["cuda12", "cuda13", "unknown"],
)
def test_the_driver_chooses_the_extra(driver, extra, folder, monkeypatch):
    """The pip command is for the CUDA version of the driver, if it is known."""
    (folder / "version").write_text(f"{driver}\nGCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n")
    monkeypatch.setattr(machine, "_DRIVER", folder / "version")
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert machine.pip() == f"pip install {extra}"
    assert machine.no_gpu() is None  # there is a driver; only CuPy could count its GPUs


@pytest.mark.parametrize("override", [False, True])
def test_cudnn_that_cannot_be_found(override, monkeypatch):
    """For a missing cuDNN the remedy is the pip command; a wrong path in the environment is reported."""

    def library():
        raise CudnnError("CUPY_SDPA_CUDNN asks for x, which is not there. Searched:\n  here: no")

    monkeypatch.setattr(machine, "library", library)
    monkeypatch.delenv("CUPY_SDPA_CUDNN", raising=False)
    if override:
        monkeypatch.setenv("CUPY_SDPA_CUDNN", "x")
    (reason,) = [reason for reason in machine.obstacles() if reason.startswith("cuDNN")]
    assert ("asks for x, which is not there." if override else "pip install") in reason


# plan and support

SHAPES = """
[[attention]]
q = [64, 4, 128, 1]
k = [64, 4, 128, 1]
v = [64, 4, 128, 1]
dtype = "bfloat16"
passes = ["forward", "backward"]
"""


@pytest.mark.cudnn
def test_plan_fills_a_store(folder, capsys):
    """Prints two plans with their engines and stores them; a second run finds them; a refusal gives status 1."""
    (folder / "shapes.toml").write_text(SHAPES)
    words = ["plan", "--gpu", "h200", "shapes.toml", "-o", "plans", "-j", "1"]
    assert main(words) == 0
    said = " ".join(" ".join(lines(capsys)).split())
    assert said.count("planned ") == 2
    assert re.search(r"engine 2, \d+ ms, \d+ bytes", said)
    assert len(list((folder / "plans").glob("*.plan"))) == 2
    assert main(words) == 0
    assert " ".join(" ".join(lines(capsys)).split()).count("already stored") == 2
    (folder / "shapes.toml").write_text(SHAPES.replace("bfloat16", "float32"))
    assert main(words) == 1
    said = " ".join(lines(capsys))
    assert "2 refused" in said
    assert "q, k and v are float32" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["missing.toml", "--gpu", "h200"], "No such file"),
        (["shapes.toml", "--gpu", "h201"], "no GPU named 'h201'"),
        (["bad.toml", "--gpu", "h200"], "bad.toml is not a TOML file"),
        (["shapes.toml", "--gpu", "bad.toml"], "bad.toml does not describe a GPU"),
        (["bytes", "--gpu", "h200"], "bytes is not a TOML file"),
        (["shapes.toml", "--gpu", "bytes"], "bytes does not describe a GPU"),
        (["shapes.toml", "--gpu", "h200", "--cudnn", "./missing.so.9"], "--cudnn ./missing.so.9: there is no such file"),
        (["shapes.toml", "--gpu", "h200", "--cudnn", "8.9"], "'8.9' is not supported: this package needs cuDNN 9"),
    ],
    ids=["no_file", "no_gpu", "no_toml", "no_description", "bytes", "bytes_for_a_gpu", "no_library", "old_cudnn"],
)
def test_plan_refuses(words, said, folder, capsys):
    """One line, exit status 2, and no new folder."""
    (folder / "shapes.toml").write_text(SHAPES)
    (folder / "bad.toml").write_text("][")
    (folder / "bytes").write_bytes(b"\xda\x00")
    assert main(["plan", *words, "-o", "plans"]) == 2
    assert said in complaint(capsys)
    assert not (folder / "plans").exists()


def test_support_prints_the_table(capsys):
    """As text and as the page of the documentation; an unknown version is an error."""
    assert main(["support"]) == 0
    printed = lines(capsys)
    assert "  forward, head dim 64: yes" in printed
    assert "  gradients, one query, head and batch entry: no (backward-one-row)" in printed
    assert max(map(len, printed)) <= 100
    assert not set("`#") & set("".join(printed))
    assert sum(line.startswith("  single-key-difference: ") for line in printed) == 1  # a bug with two rows is printed once
    assert main(["support", "--markdown", "--cudnn", "9.25.1"]) == 0
    assert "cuDNN 9.25.1:" in "\n".join(lines(capsys))
    assert main(["support", "--cudnn", "new"]) == 2
    assert "'new' is not a cuDNN version" in complaint(capsys)


def test_describing_needs_a_gpu(capsys):
    """Without a GPU the status is 2."""
    if not machine.obstacles():
        pytest.skip("this machine has a GPU")
    assert main(["info", "--describe"]) == 2
    assert "there is no GPU to describe" in complaint(capsys)


@pytest.mark.gpu
def test_a_description_read_off_the_card_plans(folder, capsys):
    """plan accepts the output of info --describe, and the description matches the card."""
    assert main(["info", "--describe"]) == 0
    (folder / "card.json").write_text("\n".join(lines(capsys)))
    (folder / "shapes.toml").write_text(SHAPES)
    assert main(["plan", "--gpu", "card.json", "shapes.toml", "-o", "plans"]) == 0
    import cupy

    from cupy_sdpa.device import cupy_runtime
    from cupy_sdpa.offline import planner

    assert planner.load_target("card.json").model == cupy_runtime.model(cupy.cuda.runtime.getDevice())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("shapes.toml", "shapes.toml: File exists"),
        ("open", "open: other users may write to it"),
        ("no/x", "no/x: Not a directory"),
    ],
)
def test_plan_refuses_a_folder_that_cannot_keep_plans(name, said, folder, capsys, monkeypatch):
    """The error comes before planning, and no file is changed."""
    (folder / "shapes.toml").write_text(SHAPES)
    (folder / "open").mkdir(mode=0o777)
    (folder / "open").chmod(0o777)
    (folder / "no").write_text("")
    monkeypatch.setattr("cupy_sdpa.offline.planner.Planner", None)
    assert main(["plan", "--gpu", "h200", "shapes.toml", "-o", name]) == 2
    assert f"plans cannot be stored in {said}" in complaint(capsys)
    assert (folder / "shapes.toml").read_text() == SHAPES


def test_passes_may_be_a_string(folder):
    """It means a list of one pass."""
    (folder / "shapes.toml").write_text(SHAPES.replace('passes = ["forward", "backward"]', 'passes = "backward"'))
    assert 'passes = "backward"' in (folder / "shapes.toml").read_text()
    assert all(asked.backward for asked in store.read_problems(folder / "shapes.toml"))


WITHOUT_EFFECT = {
    "support": (["support", "--pairs"], "--pairs has no effect without --measure"),
    "library": (["support", "--measure", "--cudnn", "9.19"], "--cudnn 9.19: there is no such file"),
}


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_options_without_effect_are_refused(name, capsys):
    """They are not silently ignored."""
    words, said = WITHOUT_EFFECT[name]
    assert main(words) == 2
    assert said in complaint(capsys)


@pytest.mark.parametrize("command", ["", "demo", "run", "info", "explain", "plan", "support"])
def test_help_fits_a_narrow_terminal(command, capsys, monkeypatch):
    """At most 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main([*filter(None, [command]), "--help"])
    assert max(map(len, lines(capsys))) <= 80


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_tables_fit_the_terminal(columns, capsys, monkeypatch):
    """Lines are at most as wide as the terminal, and at most 100 columns; single long words excepted."""
    monkeypatch.setenv("COLUMNS", str(columns))
    words = {"support": ["support"], "explain": ["explain", "64,8,1000,2", "--gpu", "h200", "--cudnn", "9.19"]}
    for asked in words.values():
        main(asked)
        long = [line for line in lines(capsys) if len(line) > min(columns, 100)]
        assert not [line for line in long if len(line.split()) > 1 and "https://" not in line]


def test_an_ascii_terminal(folder):
    """Characters that it cannot print are replaced."""
    command = [sys.executable, "-m", "cupy_sdpa", "explain", "64,2,16,1", "--gpu", "h200", "--cudnn", "9.19"]
    done = subprocess.run(
        command, capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    )
    assert done.returncode == 0
    assert b"S = Q K?" in done.stdout
    assert not done.stderr
