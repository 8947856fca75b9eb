"""Types of arrays of other libraries: shared with numpy or CuPy without a copy, and back.

The library is identified by the module of an array's type, so that none is imported here. PyTorch, JAX and Numba are known; any
other library is supported if its arrays have ``__dlpack__`` and its module has ``from_dlpack``.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ..extend import cupy_runtime, numpy_dtype
from ..extend.arrays import Library, is_on_gpu


def library_of_type(kind: type) -> Library | None:
    """Return the library of a type of arrays; None if its arrays cannot be shared."""
    root = kind.__module__.partition(".")[0]
    if root == "torch":
        return Library("PyTorch", _share_torch, _torch, _torch_stream) if hasattr(kind, "data_ptr") else None
    if root in ("jax", "jaxlib"):
        return Library("JAX", _share_jax, _jax, writable=False) if hasattr(kind, "__dlpack__") else None
    if root == "numba":
        return Library("Numba", _share_numba, _numba) if hasattr(kind, "__cuda_array_interface__") else None
    make = getattr(sys.modules.get(root), "from_dlpack", None)
    if make is None or not hasattr(kind, "__dlpack__") or not hasattr(kind, "__dlpack_device__"):
        return None
    return Library(root, _share_dlpack, make)


# PyTorch


def _share_torch(name: str, tensor: Any) -> Any:
    torch = sys.modules["torch"]
    if tensor.requires_grad and torch.is_grad_enabled():
        raise TypeError(
            f"{name} requires a gradient, which this function does not record: use the autograd function in "
            f"examples/torch_attention.py, or pass {name}.detach()"
        )
    tensor = tensor.detach()
    if is_on_gpu(tensor):
        return cupy_runtime.cupy().from_dlpack(tensor)
    if tensor.dtype == torch.bfloat16:  # which numpy lacks
        return tensor.view(torch.int16).numpy().view(numpy_dtype("bfloat16"))
    return tensor.numpy()


def _torch(array: Any) -> Any:
    torch = sys.modules["torch"]
    if cupy_runtime.is_array(array):
        return torch.from_dlpack(array)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _torch_stream(device: int) -> int:
    return int(sys.modules["torch"].cuda.current_stream(device).cuda_stream)


# JAX


def _share_jax(name: str, array: Any) -> Any:
    if not hasattr(array, "__dlpack_device__") or "Tracer" in type(array).__name__:
        raise TypeError(f"{name} is traced by JAX; cupy_sdpa runs outside of jax.jit and jax.grad: call it on concrete arrays")
    return cupy_runtime.cupy().from_dlpack(array) if is_on_gpu(array) else np.asarray(array)


def _jax(array: Any) -> Any:
    import jax

    return jax.dlpack.from_dlpack(array) if cupy_runtime.is_array(array) else jax.numpy.asarray(array)


# Numba


def _share_numba(name: str, array: Any) -> Any:
    return cupy_runtime.cupy().asarray(array)


def _numba(array: Any) -> Any:
    import numba.cuda

    return numba.cuda.as_cuda_array(array)


# Others


def _share_dlpack(name: str, array: Any) -> Any:
    return cupy_runtime.cupy().from_dlpack(array) if is_on_gpu(array) else np.from_dlpack(array)
