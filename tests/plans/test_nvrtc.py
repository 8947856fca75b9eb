"""NVRTC, which cuDNN uses to compile: the package finds the library that cuDNN will load."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cupy_sdpa._cudnn.deviceless import COMPILERS

COMPILER = next(filter(None, map(shutil.which, COMPILERS)), None)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason=f"no C compiler ({', '.join(COMPILERS)}) to build a library with")

#: A process with a fake cuDNN for CUDA 99 in a folder.
CODE = """
import ctypes, sys, types
from cupy_sdpa._cudnn import nvrtc
nvrtc.library = lambda: types.SimpleNamespace(cudart_version=99010, path=sys.argv[1] + "/libcudnn.so.9")
if sys.argv[2:]:
    before = ctypes.CDLL(sys.argv[2])
found = nvrtc.nvrtc()
assert found is nvrtc.nvrtc()
print(found.version, found.path or "-", len(found.build))
try:
    loaded = ctypes.CDLL("libnvrtc.so.99").nvrtcVersion  # as cuDNN opens it
    assert nvrtc.path_of(loaded) == found.path
except OSError:
    assert found.version == "none"
"""


def found(cudnn, *loaded, **environment):
    """What a new process finds, with cuDNN in a folder: version, path, length of the build id."""
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", CODE, cudnn, *loaded], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": root, "LD_LIBRARY_PATH": "", **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    version, path, length = done.stdout.split()
    return version, path, int(length)


def build(folder, minor, *flags):
    """Build a library that reports NVRTC 99."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "nvrtc.c"
    source.write_text(f"int nvrtcVersion(int *major, int *minor) {{ *major = 99; *minor = {minor}; return 0; }}")
    path = folder / "libnvrtc.so.99"
    names = ["-shared", "-fPIC", "-Wl,-soname,libnvrtc.so.99", "-Wl,--build-id"]
    subprocess.run([COMPILER, *names, *flags, "-o", path, source], check=True)
    return str(path)


@needs_compiler
@pytest.mark.parametrize("place", ["cudnn/lib", "cuda_nvrtc/lib", "cu13/lib"])
def test_it_is_found_where_cudnn_searches(place, tmp_path):
    """In the folder of cuDNN, or of the wheel."""
    (tmp_path / "cudnn/lib").mkdir(parents=True)
    assert found(tmp_path / "cudnn/lib") == ("none", "-", 0)
    path = build(tmp_path / place, 4)
    assert found(tmp_path / "cudnn/lib") == ("99.4", path, 16)


@needs_compiler
def test_the_search_order_is_that_of_the_loader(tmp_path):
    """A loaded library of the name, LD_LIBRARY_PATH, then cuDNN's own search path."""
    build(tmp_path / "cuda_nvrtc/lib", 1)
    by_path, by_someone = build(tmp_path / "named", 2), build(tmp_path / "else", 3)
    cudnn = tmp_path / "cudnn/lib"
    cudnn.mkdir(parents=True)
    assert found(cudnn, LD_LIBRARY_PATH=f":{tmp_path / 'named'}")[:2] == ("99.2", by_path)
    assert found(cudnn, by_someone, LD_LIBRARY_PATH=str(tmp_path / "named"))[:2] == ("99.3", by_someone)


def test_a_file_that_is_not_nvrtc_is_ignored(tmp_path):
    """Then there is none, which is a valid version."""
    (tmp_path / "libnvrtc.so.99").write_bytes(b"not a library")
    assert found(tmp_path) == ("none", "-", 0)


@needs_compiler
def test_two_builds_of_a_version_differ(tmp_path):
    """The version has no patch level, but the build id differs."""
    texts = []
    for flags in ([], ["-DPATCH"], ["-Wl,--build-id=0x0123456789abcdef"]):
        path = Path(build(tmp_path / "lib", 1, *flags))
        code = f"from cupy_sdpa._cudnn.library import build_id; from pathlib import Path; print(build_id(Path({str(path)!r})))"
        texts.append(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.cudnn
def test_cudnn_compiles_with_what_was_found(planner):
    """The planning process uses one NVRTC, the one that was found."""
    version, path, in_use = planner.call(planned_with)
    assert in_use == [path]
    assert int(version.split(".")[0]) >= 12


def planned_with():
    """In a child: plan, then list the loaded libraries."""
    from planner import plan_problem

    from cupy_sdpa import problem
    from cupy_sdpa._cudnn.nvrtc import nvrtc

    shape = (64, 2, 64, 1)
    plan_problem(problem(shape, shape, shape, dtype="float16"), "h200")
    in_use = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libnvrtc.so" in line}
    return nvrtc().version, nvrtc().path, sorted(in_use)
