"""What the machine has: libraries, engines and memory; what is missing, with the command that installs it."""

import re
import sys

import ml_dtypes
import numpy as np
import pytest
from command_line import python, run
from tiers import missing

import cupy_sdpa
from cupy_sdpa.cli import machine

pytestmark = pytest.mark.usefixtures("folder")

#: A process in which no library for the GPU can be imported or loaded, except from the working directory.
BARE = """
import ctypes, sys
for name in sys.argv.pop(1).split(","):
    sys.modules[name] = None
def absent(name, *args, **kwargs):
    raise OSError(f"{name}: cannot open shared object file")
ctypes.CDLL = absent
from cupy_sdpa.__main__ import main
for command in sys.argv[1:]:
    assert main(command.split()) == 0
"""


def test_versions():
    """Every library and GPU is listed, and the engines that can run."""
    printed = run("info").text
    for expected in (cupy_sdpa.__version__, np.__version__, ml_dtypes.__version__, "CuPy", "cuda-python", "cuDNN", "GPU"):
        assert expected in printed
    assert re.search(rf"can run: numpy yes .* cuDNN {'no' if missing('gpu') else 'yes'}", printed)


def test_the_engine_without_a_gpu(folder):
    """The demo runs on numpy and prints the reason; cuDNN cannot be asked for, and no file is written."""
    if not missing("gpu"):
        pytest.skip("this machine has a GPU")
    assert re.search(r"engine numpy \((no GPU|CuPy is not installed|cuDNN is not found)", run("demo --seq 20").text)
    assert re.search(r"--engine cupy cannot run here: (no GPU|CuPy is not installed)", run("demo --engine cupy").complaint)
    assert "--engine cudnn cannot run here: " in run("demo --engine cudnn").complaint
    assert not list(folder.iterdir())


def test_a_bare_environment(folder):
    """Without any library for the GPU, info prints the pip command for each, and the demo the reason for numpy."""
    absent = "cupy,cuda,cuda.pathfinder,cuda.bindings,cuda.bindings.driver,matplotlib"
    done = python("-c", BARE, absent, "info", "demo --seq 40", cwd=folder, CUPY_SDPA_CUDNN=None)
    assert done.status == 0
    for title in ("CuPy is not installed", "cuda-python is not installed", "cuDNN is not found"):
        assert re.search(rf"{title}: pip install -e '\.\[cuda1[23]\]'", done.text.split("this machine can run:")[1])
    assert re.search(r"engine numpy \((no GPU: |CuPy is not installed: pip install)", done.text)


@pytest.mark.slow
def test_broken_libraries(folder):
    """A library that cannot be imported is reported with its error, and so is a wrong path of cuDNN in the environment."""
    (folder / "cupy.py").write_text("raise ImportError('libx.so.1 is missing')")
    (folder / "cuda" / "bindings").mkdir(parents=True)
    (folder / "cuda" / "__init__.py").touch()
    (folder / "cuda" / "bindings" / "__init__.py").write_text("raise PermissionError(13, 'Permission denied', '/cache')")
    done = python("-c", BARE, "matplotlib", "info", cwd=folder, path=[folder], CUPY_SDPA_CUDNN="/none/libcudnn.so.9")
    can = done.text.split("this machine can run:")[1]
    assert "CuPy cannot be imported: libx.so.1 is missing: pip install" in can
    assert re.search("cuda-python cannot be imported: .*Permission denied", can)
    assert "cuDNN is not found: libcudnn.so.9 was not found" in can


@pytest.mark.parametrize(
    ("driver", "extra"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024", "cuda12"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build", "cuda13"),
        ("something else", "cuda12"),
    ],
    ids=["cuda12", "cuda13", "unknown"],
)
def test_the_driver_chooses_the_extra(driver, extra, folder, monkeypatch):
    """Without CuPy, the pip command is for the CUDA version of the driver, if it is known."""
    (folder / "version").write_text(f"{driver}\nGCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n")
    monkeypatch.setattr(machine, "_DRIVER", folder / "version")
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert f"pip install -e '.[{extra}]'" in machine.pip()
    assert ("(or [cuda13])" in machine.pip()) == (driver == "something else")
    assert machine.no_gpu() is None  # there is a driver; only CuPy could count its GPUs
