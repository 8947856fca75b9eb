"""Types of arrays of other libraries: shared with numpy or CuPy without a copy, and back.

The library is identified by the module of an array's type, so that none is imported here. PyTorch, JAX and Numba are known; any
other library is supported if its arrays have ``__dlpack__`` and its module has ``from_dlpack``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ..extend import cupy_runtime, numpy_dtype

#: The device types of DLPack that numpy and CuPy share.
_CPU, _CUDA = 1, 2


def library_of_type(kind: type) -> _DLPack | None:
    """Return the library of a type of arrays; None if its arrays cannot be shared."""
    root = kind.__module__.partition(".")[0]
    if root == "torch":
        return _PyTorch("PyTorch") if hasattr(kind, "data_ptr") else None
    if root in ("jax", "jaxlib"):
        return _Jax("JAX") if hasattr(kind, "__dlpack__") else None
    if root == "numba":
        return _Numba("Numba") if hasattr(kind, "__cuda_array_interface__") else None
    known = hasattr(sys.modules.get(root), "from_dlpack") and hasattr(kind, "__dlpack__") and hasattr(kind, "__dlpack_device__")
    return _DLPack(root) if known else None


class _DLPack:
    """A library that shares arrays through DLPack, with the attributes that the core reads; subclasses share in other ways."""

    writable = True
    stream: Callable[[int], int] | None = None

    def __init__(self, name: str) -> None:
        self.name = name

    def device(self, array: Any) -> int | None:
        kind, number = array.__dlpack_device__()
        if int(kind) not in (_CPU, _CUDA):
            raise TypeError(
                f"a {type(array).__module__}.{type(array).__qualname__} is on a device of DLPack type {int(kind)}; arrays must "
                "be in the memory of the CPU (1) or of a CUDA GPU (2): copy it there"
            )
        return int(number) if int(kind) == _CUDA else None

    def share(self, name: str, array: Any) -> Any:
        return self.in_numpy(array) if self.device(array) is None else cupy_runtime.cupy().from_dlpack(array)

    def in_numpy(self, array: Any) -> Any:
        """Convert the library's array, which is in CPU memory, to a numpy array."""
        return np.from_dlpack(array)

    def returned(self, array: Any) -> Any:
        return sys.modules[self.name].from_dlpack(array)


class _PyTorch(_DLPack):
    """PyTorch has its own streams, and bfloat16 arrays on the CPU, which numpy lacks."""

    def share(self, name: str, array: Any) -> Any:
        if array.requires_grad and sys.modules["torch"].is_grad_enabled():
            raise TypeError(
                f"{name} requires a gradient, which this function does not record: use the autograd function in "
                f"examples/torch_attention.py, or pass {name}.detach()"
            )
        return super().share(name, array.detach())

    def in_numpy(self, array: Any) -> Any:
        torch = sys.modules["torch"]
        if array.dtype == torch.bfloat16:
            return array.view(torch.int16).numpy().view(numpy_dtype("bfloat16"))
        return array.numpy()

    def returned(self, array: Any) -> Any:
        torch = sys.modules["torch"]
        if cupy_runtime.is_array(array):
            return torch.from_dlpack(array)
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    def stream(self, device: int) -> int:
        return int(sys.modules["torch"].cuda.current_stream(device).cuda_stream)


class _Jax(_DLPack):
    """JAX shares only concrete arrays, which are read-only."""

    writable = False

    def share(self, name: str, array: Any) -> Any:
        if not hasattr(array, "__dlpack_device__") or "Tracer" in type(array).__name__:
            raise TypeError(
                f"{name} is traced by JAX; cupy_sdpa runs outside of jax.jit and jax.grad: call it on concrete arrays"
            )
        return super().share(name, array)

    def in_numpy(self, array: Any) -> Any:
        return np.asarray(array)

    def returned(self, array: Any) -> Any:
        import jax

        return jax.dlpack.from_dlpack(array) if cupy_runtime.is_array(array) else jax.numpy.asarray(array)


class _Numba(_DLPack):
    """Numba has arrays only on a GPU, and does not support DLPack."""

    def share(self, name: str, array: Any) -> Any:
        return cupy_runtime.cupy().asarray(array)

    def returned(self, array: Any) -> Any:
        import numba.cuda

        return numba.cuda.as_cuda_array(array)
