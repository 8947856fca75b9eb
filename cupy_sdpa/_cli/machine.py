"""What this machine has for the GPU and what it lacks, each lack with the command that brings it."""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from types import ModuleType

from .._cudnn.library import OVERRIDE, library
from ..device import cupy_runtime
from ..errors import CudnnError
from ..support.rules import MINIMUM_CAPABILITY
from ..version import MINIMUM_CUDNN, version_text
from .console import CommandError, one_line

#: What a broken installation raises when it is imported: a library that it is linked to is missing, CuPy cannot write its
#: cache folder, it was built for another numpy, its parts do not fit.
_BROKEN = (ImportError, OSError, ValueError, RuntimeError)
#: Where the kernel's NVIDIA driver says its version; and the devices that it makes, on Linux and under Windows (WSL).
_DRIVER = Path("/proc/driver/nvidia/version")
_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
#: The first driver for CUDA 13.
_DRIVER_OF_CUDA13 = 580


def imported(name: str) -> ModuleType | str:
    """A module, or why it cannot be had."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return "not installed"
        return f"cannot be imported: {one_line(str(error))}"
    except _BROKEN as error:
        return f"cannot be imported: {one_line(str(error))}"


def driver() -> str | None:
    """The version of the NVIDIA driver in the kernel, "unknown" where it is there and does not say; None without one."""
    if _DRIVER.exists() and (found := re.search(r"\b(\d{3,}\.\d[\d.]*)", _DRIVER.read_text())):
        return found[1]
    return "unknown" if any(device.exists() for device in (_DRIVER, *_DEVICES)) else None


def pip() -> str:
    """The command that installs everything for the GPU, for the CUDA of CuPy where it is installed, else of the driver."""
    cupy, version = imported("cupy"), driver()
    if isinstance(cupy, ModuleType):
        extra = f"cuda{cupy.cuda.runtime.runtimeGetVersion() // 1000}"
    elif version and version != "unknown":
        extra = "cuda13" if int(version.split(".")[0]) >= _DRIVER_OF_CUDA13 else "cuda12"
    else:
        return "pip install 'cupy-sdpa[cuda12]' (or [cuda13])"
    return f"pip install 'cupy-sdpa[{extra}]'"


def no_gpu() -> str | None:
    """Why there is no GPU to compute on; None where there is one, or where only CuPy could tell and is not there."""
    cupy = imported("cupy")
    if not isinstance(cupy, ModuleType):
        return None if driver() else "no GPU: no NVIDIA driver is loaded"
    runtime = cupy.cuda.runtime
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        has = runtime.driverGetVersion()
        if not has:  # CUDA calls that an insufficient driver
            return "no GPU: no NVIDIA driver is loaded"
        return f"no GPU: {error} (the driver is for CUDA {cuda_text(has)}, CuPy for {cuda_text(runtime.runtimeGetVersion())})"
    return None if count else "no GPU: the driver knows none"


def gpus() -> list[str]:
    """Every GPU's name, compute capability and memory; CuPy must be there."""
    runtime = cupy_runtime.cupy().cuda.runtime
    found = []
    for device in range(runtime.getDeviceCount()):
        properties = runtime.getDeviceProperties(device)
        name, memory = properties["name"].decode(), properties["totalGlobalMem"] / 2**30
        found.append(f"{name}, compute capability {cupy_runtime.capability(device) / 10}, {memory:.0f} GiB")
    return found


def obstacles() -> list[str]:
    """Everything that keeps cuDNN's engine from running here, the weightiest first; empty where it can run."""
    found = [reason] if (reason := no_gpu()) else []
    cupy = imported("cupy")
    for title, module in (("CuPy", cupy), ("cuda-python", imported("cuda.bindings.driver"))):
        if isinstance(module, str):
            found.append(f"{title} {'is ' * (module == 'not installed')}{module}: {pip()}")
    try:
        version = library().version
    except CudnnError as error:
        remedy = one_line(error.summary) if OVERRIDE in os.environ else pip()
        found.append(f"cuDNN is not found: {remedy}")
    else:
        if version < MINIMUM_CUDNN:
            found.append(f"cuDNN is {version_text(version)}, {version_text(MINIMUM_CUDNN)} or newer is needed: {pip()}")
    if not reason and isinstance(cupy, ModuleType):
        capability = cupy_runtime.capability(cupy.cuda.runtime.getDevice())
        if capability < MINIMUM_CAPABILITY:
            found.append(f"the GPU has compute capability {capability / 10}, {MINIMUM_CAPABILITY / 10} or newer is needed")
    return found


def brief(error: CudnnError) -> str:
    """What a failure says, but for the places where cuDNN was looked for: ``info`` lists them."""
    more = " `python -m cupy_sdpa info` lists where it was looked for" if error.summary != str(error) else ""
    return error.summary + more


def check_library(cudnn: str | None) -> None:
    """Raise where what is to be the path of cuDNN is no file.

    Raises:
        CommandError: it is none.
    """
    if cudnn is not None and not Path(cudnn).is_file():
        raise CommandError(f"--cudnn {cudnn}: there is no such file; give the path of a libcudnn.so.9")


def cuda_text(version: int) -> str:
    """A CUDA version as people write it.

    >>> cuda_text(12090)
    '12.9'
    """
    return f"{version // 1000}.{version % 1000 // 10}"


def memory_available() -> int | None:
    """Bytes of memory that can be had without swapping; None where the system does not say."""
    path = Path("/proc/meminfo")
    if not path.exists():  # not Linux
        return None
    found = re.search(r"^MemAvailable:\s*(\d+) kB", path.read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else None
