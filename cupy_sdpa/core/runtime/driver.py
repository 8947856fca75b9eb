"""The CUDA driver API, through ``cuda.bindings``: contexts and error checks."""

from __future__ import annotations

import functools
from typing import Any

from ..errors import INSTALL_FOR_GPU
from .cupy_runtime import cupy


@functools.cache
def bindings() -> Any:
    """Return the module ``cuda.bindings.driver``.

    Raises:
        RuntimeError: cuda-python is not installed.
    """
    try:
        from cuda.bindings import driver as module
    except ImportError as error:
        raise RuntimeError(f"cuda-python is required for the GPU: {INSTALL_FOR_GPU}") from error
    return module


def context_id() -> int:
    """Return the current CUDA context's id, which is never reused; create the primary context if no context is current.

    Raises:
        RuntimeError: there is no GPU, or cuda-python is not installed.
    """
    status, context = bindings().cuCtxGetId(0)
    if status:  # no context is current in this thread yet
        cupy().cuda.runtime.free(0)
        context = unwrap(bindings().cuCtxGetId(0))
    return context  # type: ignore[no-any-return]


def check(result: Any) -> None:
    """Raise RuntimeError unless a driver call returned success."""
    if result[0]:
        raise RuntimeError(f"the CUDA driver failed: {result[0].name}")


def unwrap(result: Any) -> Any:
    """Return the value of a driver call; raise RuntimeError unless it returned success."""
    check(result)
    return result[1]
