"""The libraries and GPUs of this machine, and the missing parts with the command that installs them."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

from ..extend import cupy_runtime
from ..extend.cudnn import Cudnn
from .console import one_line, pip_install

#: Exceptions that the import of a broken installation raises: a linked library is missing, CuPy cannot write its cache folder,
#: the module was built for a different numpy version, the versions of its parts do not match.
_BROKEN = (ImportError, OSError, ValueError, RuntimeError)
#: The file with the version of the NVIDIA kernel driver, and its devices, on Linux and under Windows (WSL).
_DRIVER = Path("/proc/driver/nvidia/version")
_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
#: The first driver version for CUDA 13.
_DRIVER_OF_CUDA13 = 580


def imported(name: str) -> ModuleType | str:
    """Import a module; returns the reason if that fails."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return "not installed"
        return f"cannot be imported: {one_line(str(error))}"
    except _BROKEN as error:
        return f"cannot be imported: {one_line(str(error))}"


def driver() -> str | None:
    """Return the version of the NVIDIA kernel driver, "unknown" if it cannot be read; None if no driver is loaded."""
    if _DRIVER.exists() and (found := re.search(r"\b(\d{3,}\.\d[\d.]*)", _DRIVER.read_text())):
        return found[1]
    return "unknown" if any(device.exists() for device in (_DRIVER, *_DEVICES)) else None


def pip() -> str:
    """Return the pip command for the GPU engine, for the CUDA version of CuPy if it is installed, else of the driver."""
    cupy, version = imported("cupy"), driver()
    if isinstance(cupy, ModuleType):
        extra = f"cuda{cupy.cuda.runtime.runtimeGetVersion() // 1000}"
    elif version and version != "unknown":
        extra = "cuda13" if int(version.split(".")[0]) >= _DRIVER_OF_CUDA13 else "cuda12"
    else:
        return pip_install("cuda12", "cuda13")
    return pip_install(extra)


def no_gpu() -> str | None:
    """Return why no GPU can be used; None if a GPU is found, or if CuPy, which counts the GPUs, is not installed."""
    cupy = imported("cupy")
    if not isinstance(cupy, ModuleType):
        return None if driver() else "no GPU: no NVIDIA driver is loaded"
    runtime = cupy.cuda.runtime
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        has = runtime.driverGetVersion()
        if not has:  # the CUDA error would be "insufficient driver"
            return "no GPU: no NVIDIA driver is loaded"
        return f"no GPU: {error} (the driver is for CUDA {cuda_text(has)}, CuPy for {cuda_text(runtime.runtimeGetVersion())})"
    return None if count else "no GPU: the driver finds no GPU"


def gpus() -> list[str]:
    """Return the name, compute capability and memory of every GPU; needs CuPy."""
    runtime = cupy_runtime.cupy().cuda.runtime
    lines = []
    for device in range(runtime.getDeviceCount()):
        properties = runtime.getDeviceProperties(device)
        name, memory = properties["name"].decode(), properties["totalGlobalMem"] / 2**30
        lines.append(f"{name}, compute capability {cupy_runtime.capability(device) / 10}, {memory:.0f} GiB")
    return lines


def obstacles_of_cupy() -> list[str]:
    """Return why the engine ``"cupy"`` cannot run here, the most important reason first; empty if it can run."""
    reasons = [reason] if (reason := no_gpu()) else []
    return [*reasons, *_missing("CuPy", "cupy")]


def _missing(title: str, name: str) -> list[str]:
    """Return why a module cannot be imported."""
    module = imported(name)
    return [f"{title} {'is ' * (module == 'not installed')}{module}: {pip()}"] if isinstance(module, str) else []


def obstacles() -> list[str]:
    """Return why the cuDNN engine cannot run here, the most important reason first; empty if it can run."""
    cupy, capability = imported("cupy"), None
    if not no_gpu() and isinstance(cupy, ModuleType):
        capability = cupy_runtime.capability(cupy.cuda.runtime.getDevice())
    reasons = [*obstacles_of_cupy(), *_missing("cuda-python", "cuda.bindings.driver")]
    return reasons + [one_line(reason) for reason in Cudnn.obstacles(capability, pip())]


def cuda_text(version: int) -> str:
    """Return a CUDA version in the usual form.

    >>> cuda_text(12090)
    '12.9'
    """
    return f"{version // 1000}.{version % 1000 // 10}"
