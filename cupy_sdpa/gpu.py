"""Everything asked of CuPy and of the CUDA driver: arrays, memory, streams, devices and contexts.

CuPy is imported only where the caller has done so already, or asks about the GPU.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


def is_array(x: object) -> bool:
    """Whether ``x`` is a CuPy array; CuPy is not imported to find out."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(x, cupy.ndarray)


def cupy() -> Any:
    """The cupy module.

    Raises:
        RuntimeError: CuPy is not installed.
    """
    try:
        import cupy as module
    except ImportError as error:
        raise RuntimeError("CuPy is needed for the GPU: pip install 'cupy-sdpa[cuda12]' (or [cuda13])") from error
    return module


@contextlib.contextmanager
def on_device_of(array: Any) -> Iterator[int]:
    """Make an array's device the current one for a while; gives its number."""
    device = array.data.device_id
    if device == cupy().cuda.runtime.getDevice():
        yield device
    else:
        with array.device:
            yield device


def stream() -> int:
    """The address of CuPy's current stream."""
    return int(cupy().cuda.get_current_stream().ptr)


def allocate(size: int) -> Any:
    """``size`` bytes from CuPy's allocator; back in its pool when the result is let go, for later work of the same stream."""
    return cupy().cuda.alloc(size)


def free_memory() -> int:
    """Bytes that CuPy could allocate now: what the device has free and what CuPy's pool holds unused."""
    free, _ = cupy().cuda.runtime.memGetInfo()
    return int(free) + int(cupy().get_default_memory_pool().free_bytes())


def context_id() -> int:
    """An id of the current CUDA context that no later context will have; makes the device's primary context if there is none.

    Raises:
        RuntimeError: there is no GPU, or cuda-python is missing.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise RuntimeError(
            "cuda-python is needed to tell CUDA contexts apart: pip install 'cupy-sdpa[cuda12]' (or [cuda13])"
        ) from error
    status, number = driver.cuCtxGetId(0)
    if status:  # no context is current in this thread yet
        cupy().cuda.runtime.free(0)
        status, number = driver.cuCtxGetId(0)
        if status:
            raise RuntimeError(f"no CUDA context is current: {status.name}")
    return int(number)


def capability(device: int) -> int:
    """A device's compute capability, 9.0 as 90."""
    return int(cupy().cuda.Device(device).compute_capability)
