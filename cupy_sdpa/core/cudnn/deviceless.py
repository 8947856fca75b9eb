"""Planning without a GPU: the description of a GPU, and a stub of the CUDA driver.

cuDNN can plan for a GPU from a description, but requires a ``libcuda.so.1``. On a machine without an NVIDIA driver this is a
stub, which is compiled when it is needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
import tempfile
from pathlib import Path

from ..errors import CudnnError
from .descriptor import Descriptor
from .launch import Handle

COMPILERS = ("cc", "gcc", "clang")
_SOURCE = Path(__file__).with_name("stub_libcuda.c")


def read_description() -> str:
    """Return the description of the current GPU, as JSON; creates a CUDA context if none exists. CudnnError without a GPU."""
    with Descriptor.finalized("DEVICEPROP", "describe the GPU", HANDLE=Handle().pointer) as device:
        return device.get_text("JSON_REPRESENTATION")


def load_driver_or_stub() -> None:
    """Load NVIDIA's driver if it has a GPU, otherwise build and load the stub; for a process that does not use a GPU.

    Raises:
        CudnnError: there is no C compiler, or it cannot build the stub.
    """
    with contextlib.suppress(OSError):
        if ctypes.CDLL("libcuda.so.1").cuInit(0) == 0:
            return
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise CudnnError(
            "planning for a GPU on a machine without NVIDIA's driver requires a C compiler to build a stub of libcuda.so.1: "
            f"none of {', '.join(COMPILERS)} was found; install one, for example with apt install gcc"
        )
    with tempfile.TemporaryDirectory() as folder:  # the file is not needed once it is loaded
        target = f"{folder}/libcuda.so.1"
        flags = ["-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1"]
        try:
            subprocess.run([compiler, *flags, "-o", target, str(_SOURCE)], check=True, capture_output=True)
            ctypes.CDLL(target, mode=ctypes.RTLD_GLOBAL)
        except (OSError, subprocess.CalledProcessError) as error:
            raise CudnnError(
                f"planning for a GPU without NVIDIA's driver requires Linux: a stub of libcuda.so.1 cannot be used ({error})"
            ) from error
