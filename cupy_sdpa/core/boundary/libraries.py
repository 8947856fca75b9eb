"""Arrays of other libraries in a call: which library they belong to, and on which stream they are shared.

Which types of arrays there are is registered (:mod:`.core.hooks`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ..hooks import Library, registered_library
from ..runtime import cupy_runtime


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
    if library.stream is None or (device := library.device(array)) is None:
        return contextlib.nullcontext()
    return _as_cupy_stream(cupy_runtime.cupy().cuda, library.stream(device))


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
