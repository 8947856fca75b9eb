"""Arrays on the GPU, its cache and memory, and the rates of a large matrix product and of a copy."""

from __future__ import annotations

import gc
import statistics
import sys
from typing import Any

from cupy_sdpa.calls.call import Call
from cupy_sdpa.device import cupy_runtime
from cupy_sdpa.problem.tensor_spec import numpy_dtype
from cupy_sdpa.programs.run import compiled

from .timing import device_ms

#: Rows and columns of the matrix whose products keep the device busy, and of the one whose rate is measured.
BUSY_SIZE, RATE_SIZE = 4096, 8192
#: Bytes of the copy that measures the memory's rate.
COPY_BYTES = 1 << 30


def l2_bytes() -> int:
    """The size of the current GPU's L2 cache."""
    runtime = cupy_runtime.cupy().cuda.runtime
    return int(runtime.getDeviceProperties(runtime.getDevice())["l2CacheSize"])


def input_sets(bytes_per_set: int) -> int:
    """The number of input sets that together are at least twice as large as the L2 cache; at least 2."""
    return max(2, -(-2 * l2_bytes() // bytes_per_set))


def random_normal(*shape: int) -> Any:
    """Normal random numbers in bfloat16, in Fortran order."""
    cupy = cupy_runtime.cupy()
    numbers = cupy.random.standard_normal(shape, dtype="float32")
    return cupy.asfortranarray(numbers.astype(numpy_dtype("bfloat16")))


def arrays_of_launch(call: Call) -> dict[str, Any]:
    """The arrays of the first launch of a call, after the steps before it have run."""
    run = compiled(call)
    run.create_inputs()
    run.create_results()
    number = next(number for number, step in enumerate(run.program.steps) if step.attend)
    return run.arrays_before(number, run.arrays["q"].data.device_id)


def as_torch(array: Any) -> Any:
    """A PyTorch tensor ``(batch, heads, seq, head_dim)`` on the memory of an array ``(head_dim, heads, seq, batch)``."""
    import torch

    return torch.from_dlpack(array).permute(3, 1, 2, 0)


def busy_matrix(size: int = BUSY_SIZE) -> tuple[Any, str]:
    """A matrix whose products keep the device busy, and its dtype: bfloat16 of PyTorch, or without it float16 of CuPy."""
    try:
        import torch
    except ImportError:
        cupy = cupy_runtime.cupy()
        return cupy.random.standard_normal((size, size), dtype="float32").astype("float16"), "float16"
    return torch.randn(size, size, dtype=torch.bfloat16, device="cuda"), "bfloat16"


def matmul_tflops() -> tuple[float, str]:
    """The rate of a large product of random matrices in TFLOP/s, and its dtype."""
    matrix, dtype = busy_matrix(RATE_SIZE)
    ms = statistics.median(device_ms([lambda: matrix @ matrix] * 4, matrix, 1) for _ in range(7))
    return 2 * RATE_SIZE**3 / ms / 1e9, dtype


def copy_gbs() -> float:
    """The rate of a copy on the device: bytes read and written, in GB/s."""
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
