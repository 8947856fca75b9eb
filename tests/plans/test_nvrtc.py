"""NVRTC, which cuDNN uses to compile: the package finds the library that cuDNN will load."""

import shutil
import subprocess
import sys

import pytest
from planner import child_environment, nvrtc_in_use

import cupy_sdpa

COMPILERS = ("cc", "gcc", "clang")
COMPILER = next(filter(None, map(shutil.which, COMPILERS)), None)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason=f"no C compiler ({', '.join(COMPILERS)}) to build a library with")

#: A process with a fake cuDNN for CUDA 99 in a folder.
CODE = """
import ctypes, sys, types
from cupy_sdpa.cudnn import nvrtc
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
    done = subprocess.run(
        [sys.executable, "-c", CODE, cudnn, *loaded], capture_output=True, text=True,
        env=child_environment(**{"LD_LIBRARY_PATH": "", **environment}),
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


@pytest.mark.slow
@needs_compiler
def test_it_is_found_where_cudnn_searches(tmp_path):
    """In the folder of cuDNN, or of a wheel; a file that is not NVRTC is ignored, and none is a valid version."""
    (tmp_path / "cudnn/lib").mkdir(parents=True)
    (tmp_path / "cudnn/lib/libnvrtc.so.99").write_bytes(b"not a library")
    assert found(tmp_path / "cudnn/lib") == ("none", "-", 0)
    for number, place in enumerate(("cudnn/lib", "cuda_nvrtc/lib", "cu13/lib")):
        path = build(tmp_path / str(number) / place, 4)
        (tmp_path / str(number) / "cudnn/lib").mkdir(parents=True, exist_ok=True)
        assert found(tmp_path / str(number) / "cudnn/lib") == ("99.4", path, 16)


@pytest.mark.slow
@needs_compiler
def test_the_search_order_is_that_of_the_loader(tmp_path):
    """A loaded library of the name, LD_LIBRARY_PATH, then cuDNN's own search path."""
    build(tmp_path / "cuda_nvrtc/lib", 1)
    by_path, by_someone = build(tmp_path / "named", 2), build(tmp_path / "else", 3)
    cudnn = tmp_path / "cudnn/lib"
    cudnn.mkdir(parents=True)
    assert found(cudnn, LD_LIBRARY_PATH=f":{tmp_path / 'named'}")[:2] == ("99.2", by_path)
    assert found(cudnn, by_someone, LD_LIBRARY_PATH=str(tmp_path / "named"))[:2] == ("99.3", by_someone)


@pytest.mark.slow
@needs_compiler
def test_two_builds_of_a_version_differ(tmp_path):
    """The version has no patch level, but the build id differs."""
    flags = ([], ["-DPATCH"], ["-Wl,--build-id=0x0123456789abcdef"])
    paths = [build(tmp_path / str(number), 1, *more) for number, more in enumerate(flags)]
    code = "import pathlib, sys; from cupy_sdpa.cudnn.library import build_id; print(*[build_id(pathlib.Path(x)) for x in sys.argv[1:]])"
    done = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True, env=child_environment())
    one, same, other = done.stdout.split()
    assert one == same != other


@pytest.mark.slow
@pytest.mark.cudnn
def test_cudnn_compiles_with_what_was_found(planner):
    """The planning process uses one NVRTC, the one that was found."""
    asked = cupy_sdpa.problem(*[(64, 2, 64, 1)] * 3, dtype="float16")
    version, path, in_use = planner.call(nvrtc_in_use, asked, "h200")
    assert in_use == [path]
    assert int(version.split(".")[0]) >= 12
