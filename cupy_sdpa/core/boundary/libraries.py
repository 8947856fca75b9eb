"""Arrays of other libraries in a call: which library they belong to, and on which stream they are shared.

Which types of arrays there are is registered (:mod:`.core.hooks`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from ..hooks import registered_library
from ..runtime import cupy_runtime

#: The device types of DLPack that numpy and CuPy share.
_CPU, _CUDA = 1, 2


class Library:
    """A library whose arrays you can pass to calls. It shares arrays through DLPack; subclasses share them in other ways.

    Attributes:
        name: the name of the library.
        writable: whether arrays can be written to.
        stream: returns the address of the library's current stream on a device, given by number. None: the library has no such
            function, so calls use CuPy's current stream and return when their work is done.
    """

    writable = True
    stream: Callable[[int], int] | None = None

    def __init__(self, name: str) -> None:
        self.name = name

    def share(self, name: str, array: Any) -> Any:
        """Convert the library's array, passed as the argument ``name``, to a numpy or CuPy array."""
        return cupy_runtime.cupy().from_dlpack(array) if _is_on_gpu(array) else self.in_numpy(array)

    def in_numpy(self, array: Any) -> Any:
        """Convert the library's array, which is in CPU memory, to a numpy array."""
        return np.from_dlpack(array)

    def returned(self, array: Any) -> Any:
        """Convert a numpy or CuPy array to the library's array type."""
        return sys.modules[self.name].from_dlpack(array)


def library_of(array: Any) -> Library | None:
    """Return the library of an array; None for arrays of numpy and CuPy, and for other objects."""
    kind = type(array)
    if kind not in _libraries:
        _libraries[kind] = _library(kind)
    return _libraries[kind]


#: The libraries of types that occurred.
_libraries: dict[type, Library | None] = {}


def _library(kind: type) -> Library | None:
    """Return the library of a new type; the layers that know libraries are not imported for our own types."""
    root = kind.__module__.partition(".")[0]
    return None if root in ("numpy", "cupy", "builtins", "ml_dtypes", "cupy_sdpa") else registered_library(kind)


def kind_of(array: Any) -> str:
    """Return the library of an array for messages; empty for other objects."""
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
    """Return the error of a call whose q is an array of one library, and another argument of a second one."""
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
    """Return a context that shares arrays: CuPy uses the library's current stream on the device of one of its arrays."""
    if library.stream is None or not _is_on_gpu(array):
        return contextlib.nullcontext()
    _, device = array.__dlpack_device__()
    return _as_cupy_stream(cupy_runtime.cupy().cuda, library.stream(int(device)))


def _is_on_gpu(array: Any) -> bool:
    """True if an array of another library is in the memory of a GPU."""
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
    """Return a context in which a stream is CuPy's current one."""
    if cuda.get_current_stream().ptr == address:
        return contextlib.nullcontext()
    if address == 0:
        return cuda.Stream.null
    if hasattr(cuda.Stream, "from_external"):  # CuPy 14.2 and newer
        return cuda.Stream.from_external(_Stream(address))
    return cuda.ExternalStream(address)
