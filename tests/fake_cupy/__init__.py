"""A fake GPU: CuPy, the CUDA driver and cuDNN, as far as the package uses them, in host memory.

Streams are lazy: work is queued and runs when something waits for its stream. Freed memory is filled with NaN in stream order.
A captured graph is replayed on the addresses of the capture. The package's CUDA kernels are compiled by the C++ compiler.
cuDNN's C functions are replaced by Python functions that evaluate the operation graph, see :mod:`fake_cupy.cudnn`. Staging,
kernels, plans, allocation and CUDA graphs therefore run unchanged.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from . import cupy, driver
from .compiler import COMPILERS, compiler
from .cudnn import FakeLibrary
from .device import DEVICE

__all__ = ["COMPILERS", "DEVICE", "FakeLibrary", "compiler", "driver", "installed", "library"]

#: Modules that :func:`installed` replaces.
_REPLACED = ("cupy", "cuda.bindings", "cuda.bindings.driver")
#: Folders and modules that no call uses.
_TOOLS = {"cli", "check", "generate", "__main__"}


@contextlib.contextmanager
def installed() -> Iterator[ModuleType]:
    """Replace CuPy, the driver's bindings and cuDNN, and restore them at the end; yields the fake CuPy."""
    package = _package()
    planner = importlib.import_module("cupy_sdpa.offline.remote_planner")
    planner._close_kept()  # a process would otherwise be lost when variables are restored
    library = importlib.import_module("cupy_sdpa.core.cudnn.library")
    before = {name: sys.modules.get(name) for name in _REPLACED}
    names = {module: dict(vars(module)) for module in package}
    bindings = ModuleType("cuda.bindings")
    bindings.driver = driver
    _clear_caches(package)
    sys.modules.update(zip(_REPLACED, (cupy, bindings, driver), strict=True))
    library._library = FakeLibrary(DEVICE)
    try:
        yield cupy
    finally:
        planner._close_kept()
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
        for module, known in names.items():
            vars(module).update(known)
        _clear_caches(package)


def library() -> FakeLibrary:
    """The fake cuDNN that is installed."""
    made: FakeLibrary = importlib.import_module("cupy_sdpa.core.cudnn.library").library()
    return made


def _package() -> list[ModuleType]:
    """The modules that a call may use."""
    root = importlib.import_module("cupy_sdpa")
    names = [info.name for info in pkgutil.walk_packages(root.__path__, "cupy_sdpa.")]
    return [root, *(importlib.import_module(name) for name in names if not _TOOLS & set(name.split(".")))]


def _clear_caches(package: list[ModuleType]) -> None:
    """Empty every ``functools.cache``: some of them hold objects of one CuPy."""
    for module in package:
        for value in list(vars(module).values()):
            clear: Any = getattr(value, "cache_clear", None)
            if clear is not None and getattr(value, "__module__", "").startswith("cupy_sdpa"):
                clear()
