"""A GPU without a GPU: CuPy, the CUDA driver and cuDNN as far as the package uses them, on host memory.

Streams run late: work is queued and runs when something waits for its stream. Freed memory is filled with NaN in the
order of its stream. Captured work is recorded and replayed on the addresses that it was recorded with. Our CUDA kernels
are compiled by the C++ compiler. cuDNN's C functions are replaced by Python functions that evaluate the operation graph
as cuDNN was told it, see :mod:`fake_cupy.cudnn`. So staging, kernels, plans, allocation and recordings run unchanged.
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

__all__ = ["COMPILERS", "DEVICE", "FakeLibrary", "compiler", "driver", "installed"]

#: Modules that the stand-ins replace while :func:`installed` is in force.
_REPLACED = ("cupy", "cuda.bindings", "cuda.bindings.driver")
#: Parts of the package that no call enters.
_TOOLS = {"_cli", "check", "generate", "__main__"}


@contextlib.contextmanager
def installed() -> Iterator[ModuleType]:
    """Replace CuPy, the driver's bindings and cuDNN; yields the stand-in for CuPy. Everything is restored at the end."""
    package = _package()
    library = importlib.import_module("cupy_sdpa._cudnn.library")
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
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
        for module, known in names.items():
            vars(module).update(known)
        _clear_caches(package)


def _package() -> list[ModuleType]:
    """The modules that a call may enter."""
    root = importlib.import_module("cupy_sdpa")
    names = [info.name for info in pkgutil.walk_packages(root.__path__, "cupy_sdpa.")]
    return [root, *(importlib.import_module(name) for name in names if not _TOOLS & set(name.split(".")))]


def _clear_caches(package: list[ModuleType]) -> None:
    """Empty every ``functools.cache``: some of them hold what belongs to one CuPy."""
    for module in package:
        for value in list(vars(module).values()):
            clear: Any = getattr(value, "cache_clear", None)
            if clear is not None and getattr(value, "__module__", "").startswith("cupy_sdpa"):
                clear()
