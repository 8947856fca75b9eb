"""The driver that cuDNN plans with: NVIDIA's where that has a GPU, else a stub of libcuda.so.1, compiled when it is needed."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from pathlib import Path

from ..errors import CudnnError

COMPILERS = ("cc", "gcc", "clang")
_SOURCE = Path(__file__).with_name("stub_libcuda.c")


def use_some_driver() -> None:
    """Have this process, which will use no GPU, find a driver.

    Raises:
        CudnnError: there is no C compiler to build the stub with.
    """
    try:
        driven = ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
    except OSError:
        driven = False
    if not driven:
        use_stub()


def use_stub() -> None:
    """Have this process, which must never use a GPU, take the stub for the driver.

    Raises:
        CudnnError: there is no C compiler.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise CudnnError(
            "planning for a GPU on a machine without NVIDIA's driver needs a C compiler, to build a stub of libcuda.so.1: "
            f"none of {', '.join(COMPILERS)} was found; install one, such as with apt install gcc"
        )
    with tempfile.TemporaryDirectory() as folder:  # once loaded, the file is no longer needed
        target = f"{folder}/libcuda.so.1"
        flags = ["-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1"]
        subprocess.run([compiler, *flags, "-o", target, str(_SOURCE)], check=True)
        ctypes.CDLL(target, mode=ctypes.RTLD_GLOBAL)
