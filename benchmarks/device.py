"""The GPU: arrays, memory, rates, state, versions of the libraries; and the difference between two results."""

from __future__ import annotations

import gc
import math
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cupy_sdpa.cli import machine
from cupy_sdpa.core.cudnn.library import library
from cupy_sdpa.core.problem.tensor_spec import numpy_dtype
from cupy_sdpa.core.runtime import cupy_runtime
from cupy_sdpa.core.version import __version__, version_text

from .timing import Events, device_ms, interleaved

Call = Callable[[], Any]
#: Rows and columns of the matrix whose products keep the device busy, and of the one whose rate is measured.
BUSY_SIZE, RATE_SIZE = 4096, 8192
#: Bytes of the copy that measures the memory's rate.
COPY_BYTES = 1 << 30


def l2_bytes() -> int:
    """Return the size of the current GPU's L2 cache."""
    runtime = cupy_runtime.cupy().cuda.runtime
    return int(runtime.getDeviceProperties(runtime.getDevice())["l2CacheSize"])


def input_sets(bytes_per_set: int) -> int:
    """Return the number of input sets that together are at least twice as large as the L2 cache; at least 2."""
    return max(2, -(-2 * l2_bytes() // bytes_per_set))


def random_normal(*shape: int, dtype: str = "bfloat16") -> Any:
    """Normal random numbers in Fortran order."""
    cupy = cupy_runtime.cupy()
    numbers = cupy.random.standard_normal(shape, dtype="float32")
    return cupy.asfortranarray(numbers.astype(numpy_dtype(dtype)))


def as_torch(array: Any) -> Any:
    """Return a PyTorch tensor ``(batch, heads, seq, head_dim)`` on the memory of an array ``(head_dim, heads, seq, batch)``."""
    import torch

    return torch.from_dlpack(array).permute(3, 1, 2, 0)


def busy_matrix(size: int = BUSY_SIZE) -> tuple[Any, str]:
    """Return a matrix whose products keep the device busy, and its dtype: PyTorch's bfloat16, else CuPy's float16."""
    try:
        import torch
    except ImportError:
        cupy = cupy_runtime.cupy()
        return cupy.random.standard_normal((size, size), dtype="float32").astype("float16"), "float16"
    return torch.randn(size, size, dtype=torch.bfloat16, device="cuda"), "bfloat16"


def running(calls: Mapping[str, Sequence[Call]]) -> dict[str, Sequence[Call]]:
    """Return the contenders whose calls run here, repeated until they are captured; why another one does not run is printed."""
    found = {}
    for name, several in calls.items():
        try:
            for call in [*several] * 4:
                call()
        except (RuntimeError, NotImplementedError, MemoryError) as error:
            print(f"  {name} does not run: {type(error).__name__}: {str(error).splitlines()[0][:150]}", flush=True)
        else:
            found[name] = several
    return found


def timed(calls: Mapping[str, Sequence[Call]], rounds: int, **limits: Any) -> dict[str, list[float]]:
    """Return the milliseconds of the contenders that run here by CUDA events, in interleaved rounds.

    Args:
        calls: the calls of each contender.
        rounds, limits: see :func:`~benchmarks.timing.interleaved`.
    """
    busy, _ = busy_matrix()
    return interleaved({name: Events(several, busy) for name, several in running(calls).items()}, rounds, **limits)


def matmul_tflops() -> tuple[float, str]:
    """Return the rate of a large product of random matrices in TFLOP/s, and its dtype."""
    matrix, dtype = busy_matrix(RATE_SIZE)
    ms = statistics.median(device_ms([lambda: matrix @ matrix] * 4, matrix, 1) for _ in range(7))
    return 2 * RATE_SIZE**3 / ms / 1e9, dtype


def copy_gbs() -> float:
    """Return the rate of a copy on the device: bytes read and written, in GB/s."""
    cupy = cupy_runtime.cupy()
    source = cupy.zeros(COPY_BYTES, "u1")
    target = cupy.empty_like(source)
    busy, _ = busy_matrix()
    ms = statistics.median(device_ms([lambda: cupy.copyto(target, source)] * 4, busy) for _ in range(7))
    return 2 * COPY_BYTES / ms / 1e6


def free_memory() -> None:
    """Return the unused memory of CuPy's and PyTorch's pools to the GPU."""
    gc.collect()
    cupy_runtime.cupy().get_default_memory_pool().free_all_blocks()
    if torch := sys.modules.get("torch"):
        torch.cuda.empty_cache()


def peak_of(name: str, call: Call) -> int:
    """Return the peak memory that a call allocates, in PyTorch's pool if its contender's name contains ``torch``."""
    return (torch_peak if "torch" in name.lower() else peak_allocation)(call)


def peak_allocation(call: Call) -> int:
    """Return the peak of the bytes that CuPy's memory pool hands out during a call."""
    hook = cupy_runtime.cupy().cuda.MemoryHook
    current, peak = 0, 0

    class Count(hook):  # type: ignore[misc, valid-type]  # CuPy has no types
        """Tracks the bytes in use and their maximum."""

        name = "count"

        def malloc_postprocess(self, *, mem_size: int, **_: Any) -> None:
            """Count an allocation."""
            nonlocal current, peak
            current += mem_size
            peak = max(peak, current)

        def free_postprocess(self, *, mem_size: int, **_: Any) -> None:
            """Count a deallocation."""
            nonlocal current
            current -= mem_size

    with Count():
        results = call()
        del results
    return peak


def torch_peak(call: Call) -> int:
    """Return the peak of the memory that a call allocates in PyTorch's pool."""
    from torch import cuda

    cuda.synchronize()
    before = cuda.memory_allocated()
    cuda.reset_peak_memory_stats()
    results = call()
    cuda.synchronize()
    del results
    return int(cuda.max_memory_allocated()) - int(before)


#: Modules of the peers, by the column of their version. A module that is not imported takes no part.
_PEERS = {"torch": "torch", "triton": "triton", "jax": "jax", "cudnn_frontend": "cudnn"}


def versions(**peers: str) -> dict[str, str]:
    """Return the name of the GPU, and the versions of cuDNN, the given peers, CuPy and this package."""
    cupy = cupy_runtime.cupy()
    return {
        "gpu": cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())["name"].decode(),
        "cudnn": version_text(library().version),
        **peers,
        "cupy": cupy.__version__,
        "cupy_sdpa": __version__,
    }


def all_versions() -> dict[str, str]:
    """:func:`versions` with the driver, Python, numpy and all imported peers; empty strings for missing ones."""
    peers = {column: str(getattr(sys.modules.get(module), "__version__", "")) for column, module in _PEERS.items()}
    return versions(driver=machine.driver() or "", python=platform.python_version(), numpy=np.__version__, **peers)


class WrongResultError(ArithmeticError):
    """A contender's results differ from the expected ones."""


def largest_difference(results: Sequence[Any], expected: Sequence[Any]) -> float:
    """Return the largest difference divided by the largest magnitude, of the worst pair of arrays; NaN if a result has one.

    Raises:
        WrongResultError: two shapes differ.
    """
    worst = 0.0
    for a, b in zip(results, expected, strict=True):
        if a.shape != b.shape:
            raise WrongResultError(f"a result has the shape {a.shape}, the expected one {b.shape}")
        a, b = a.astype("float32"), b.astype("float32")
        difference = float(abs(a - b).max() / abs(b).max())
        if not difference <= worst:  # keeps NaN
            worst = difference
        if math.isnan(worst):
            return worst
    return worst
