"""NVRTC, CUDA's run-time compiler, which cuDNN uses to compile the kernels of plans."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator
from ctypes import POINTER, c_int
from pathlib import Path
from typing import NamedTuple

from .library import build_id, library, path_of

#: The folders in cuDNN's own search path (RUNPATH), relative to cuDNN: its own, and the folders of the CUDA 12 and 13 wheels.
_FOLDERS = (".", "../../cuda_nvrtc/lib", "../../cu13/lib")


class Nvrtc(NamedTuple):
    """The NVRTC that cuDNN uses: its version, such as "12.9", or "none", its path, and the build id of the file.

    Patch releases of one version have different build ids.
    """

    version: str
    path: str
    build: str

    def __str__(self) -> str:
        return f"nvrtc {self.version} {self.build}".strip()


@functools.cache
def nvrtc() -> Nvrtc:
    """Return the NVRTC that cuDNN uses in this process; loaded on the first call.

    cuDNN opens ``libnvrtc.so.N``, where N is the major CUDA version that it was built with. The loader returns the library of
    this name that the process has already loaded (by CuPy, PyTorch or cuda.pathfinder). Otherwise it searches
    ``LD_LIBRARY_PATH``, cuDNN's own search path and the system's folders. This function searches the same places in the same
    order and loads the library, so cuDNN gets the same one.

    If there is no NVRTC, the version is "none". cuDNN then cannot compile, but still loads serialized plans.
    """
    for name, mode in _candidates(f"libnvrtc.so.{library().cudart_version // 1000}"):
        try:
            loaded = ctypes.CDLL(name, mode)
            function = loaded.nvrtcVersion
        except (OSError, AttributeError):  # missing, or not NVRTC
            continue
        function.argtypes, function.restype = [POINTER(c_int), POINTER(c_int)], c_int
        major, minor = c_int(), c_int()
        if function(ctypes.byref(major), ctypes.byref(minor)) == 0:
            path = path_of(function)
            return Nvrtc(f"{major.value}.{minor.value}", path, build_id(Path(path)))
    return Nvrtc("none", "", "")


def _candidates(soname: str) -> Iterator[tuple[str, int]]:
    """Yield the arguments of dlopen, name and mode, for every place in the loader's order."""
    if hasattr(os, "RTLD_NOLOAD"):  # Windows has no such file
        yield soname, os.RTLD_NOLOAD
    folders = [Path(folder) for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":")]
    cudnn = Path(library().path).parent
    for folder in [*folders, *(cudnn / folder for folder in _FOLDERS)]:
        if folder.is_absolute():
            yield str(folder / soname), ctypes.DEFAULT_MODE
    yield soname, ctypes.DEFAULT_MODE
