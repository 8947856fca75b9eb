"""NVRTC, which cuDNN uses to compile: the package finds the library that cuDNN will load."""

import shutil
import subprocess
import sys

import pytest
from planner import child_environment, nvrtc_in_use

import cupy_sdpa

COMPILERS = ("cc", "gcc", "clang")
COMPILER = next(filter(None, map(shutil.which, COMPILERS)), None)

#: A process with a fake cuDNN for CUDA 99 in a folder.
CODE = """
import ctypes, sys, types
from cupy_sdpa.core.cudnn import nvrtc
nvrtc.library = lambda: types.SimpleNamespace(cudart_version=99010, path=sys.argv[1] + "/libcudnn.so.9")
if sys.argv[2:]:
    before = ctypes.CDLL(sys.argv[2])
found = nvrtc.nvrtc()
assert found is nvrtc.nvrtc()
print(found.version, found.path or "-", found.build or "-")
try:
    loaded = ctypes.CDLL("libnvrtc.so.99").nvrtcVersion  # as cuDNN opens it
    assert nvrtc.path_of(loaded) == found.path
except OSError:
    assert found.version == "none"
"""


def found(cudnn, *loaded, **environment):
    """What a new process finds, with cuDNN in a folder: version, path, build id."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, cudnn, *loaded], capture_output=True, text=True,
        env=child_environment(**{"LD_LIBRARY_PATH": "", **environment}),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


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
@pytest.mark.skipif(COMPILER is None, reason=f"no C compiler ({', '.join(COMPILERS)}) to build a library with")
def test_it_is_found_where_cudnn_searches(tmp_path):
    """A loaded library of the name, LD_LIBRARY_PATH, then cuDNN's folder or a wheel's; what is not NVRTC is ignored. Two
    builds of one version have different build ids.
    """
    (tmp_path / "cudnn/lib").mkdir(parents=True)
    (tmp_path / "cudnn/lib/libnvrtc.so.99").write_bytes(b"not a library")
    assert found(tmp_path / "cudnn/lib") == ["none", "-", "-"]
    builds = []
    for number, place in enumerate(("cudnn/lib", "cuda_nvrtc/lib", "cu13/lib")):
        path = build(tmp_path / str(number) / place, 4, *["-Wl,--build-id=0x0123456789abcdef"][: number // 2])
        cudnn = tmp_path / str(number) / "cudnn/lib"
        cudnn.mkdir(parents=True, exist_ok=True)
        assert found(cudnn)[:2] == ["99.4", path]
        builds.append(found(cudnn)[2])
    assert builds[0] == builds[1] != builds[2]
    by_path, by_someone = build(tmp_path / "named", 2), build(tmp_path / "else", 3)
    assert found(cudnn, LD_LIBRARY_PATH=f":{tmp_path / 'named'}")[:2] == ["99.2", by_path]
    assert found(cudnn, by_someone, LD_LIBRARY_PATH=str(tmp_path / "named"))[:2] == ["99.3", by_someone]


@pytest.mark.slow
@pytest.mark.cudnn
def test_cudnn_compiles_with_what_was_found(planner):
    """The planning process uses one NVRTC, the one that was found."""
    asked = cupy_sdpa.problem(*[(64, 2, 64, 1)] * 3, dtype="float16")
    version, path, in_use = planner.call(nvrtc_in_use, asked, "h200")
    assert in_use == [path]
    assert int(version.split(".")[0]) >= 12
