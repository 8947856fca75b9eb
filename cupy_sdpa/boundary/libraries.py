"""Arrays of other libraries: shared with numpy or CuPy without a copy, and back.

The library is identified by the module of an array's type, so that none is imported here. PyTorch, JAX and Numba are known; any
other library is supported if its arrays have ``__dlpack__`` and its module has ``from_dlpack``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..problem.tensor_spec import numpy_dtype
from ..runtime import cupy_runtime

#: The device types of DLPack that numpy and CuPy share.
_CPU, _CUDA = 1, 2


class Library(NamedTuple):
    """How arrays of a library are shared.

    Attributes:
        name: the name of the library.
        share: converts an array of the library, given the name of the argument and the array, to a numpy or CuPy array.
        returned: converts a numpy or CuPy array to an array of the library.
        stream: returns the address of the library's current stream on a device, given by its number; None if the library has no
            such function. CuPy's current stream is then used, and the call returns when its work is done.
        writable: whether arrays can be written to.
    """

    name: str
    share: Callable[[str, Any], Any]
    returned: Callable[[Any], Any]
    stream: Callable[[Any], int] | None = None
    writable: bool = True


def library_of(array: Any) -> Library | None:
    """The library of an array; None for arrays of numpy and CuPy, and for other objects."""
    kind = type(array)
    if kind not in _libraries:
        _libraries[kind] = _library(kind)
    return _libraries[kind]


#: The libraries of types that occurred.
_libraries: dict[type, Library | None] = {}


def _library(kind: type) -> Library | None:
    root = kind.__module__.partition(".")[0]
    if root in ("numpy", "cupy", "builtins", "ml_dtypes"):
        return None
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


def kind_of(array: Any) -> str:
    """The library of an array for messages; empty for other objects."""
    if isinstance(array, np.ndarray) or cupy_runtime.is_array(array):
        return "numpy" if isinstance(array, np.ndarray) else "CuPy"
    library = library_of(array)
    return library.name if library else ""


def check_one_library(arrays: Mapping[str, Any]) -> None:
    """Check that no array of another library is passed with a q of numpy or CuPy."""
    own = kind_of(arrays["q"])
    for name, array in arrays.items():
        if own and library_of(array) is not None and library_of(arrays["q"]) is None:
            raise mixed_libraries(own, name, kind_of(array))


def mixed_libraries(own: str, name: str, other: str) -> TypeError:
    """The error of a call whose q is an array of one library, and another argument of a second one."""
    return TypeError(f"arrays are mixed: q is an array of {own} and {name} of {other}; pass arrays of one library")


@contextlib.contextmanager
def on_stream_of(library: Library, device: int) -> Iterator[None]:
    """Make a device current, and the library's current stream on it CuPy's, in a ``with`` block.

    If the library has no function for its stream, the block ends when the work is done.
    """
    cuda = cupy_runtime.cupy().cuda
    with cuda.Device(device):
        if library.stream is None:
            yield
            cuda.get_current_stream().synchronize()
        else:
            with _as_cupy_stream(cuda, library.stream(device)):
                yield


def sharing_stream(library: Library, array: Any) -> Any:
    """A context in which arrays are shared: CuPy's current stream is that of the library on the device of one of its arrays."""
    if library.stream is None or not is_on_gpu(array):
        return contextlib.nullcontext()
    _, device = array.__dlpack_device__()
    return _as_cupy_stream(cupy_runtime.cupy().cuda, library.stream(int(device)))


def is_on_gpu(array: Any) -> bool:
    """Whether an array of another library is in the memory of a GPU."""
    if not hasattr(array, "__dlpack_device__"):
        return hasattr(array, "__cuda_array_interface__")
    kind, _ = array.__dlpack_device__()
    if int(kind) not in (_CPU, _CUDA):
        raise TypeError(
            f"a {type(array).__module__}.{type(array).__qualname__} is on a device of DLPack type {int(kind)}; arrays must be "
            "in the memory of the CPU (1) or of a CUDA GPU (2): copy it there"
        )
    return int(kind) == _CUDA


class _Stream:
    """The address of a stream, with the protocol by which libraries exchange streams."""

    def __init__(self, address: int) -> None:
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._address


def _as_cupy_stream(cuda: Any, address: int) -> Any:
    """A context in which a stream is CuPy's current one."""
    if cuda.get_current_stream().ptr == address:
        return contextlib.nullcontext()
    if address == 0:
        return cuda.Stream.null
    if hasattr(cuda.Stream, "from_external"):  # CuPy 14.2 and newer
        return cuda.Stream.from_external(_Stream(address))
    return cuda.ExternalStream(address)


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
