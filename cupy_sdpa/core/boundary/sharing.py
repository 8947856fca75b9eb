"""Share a call's arrays with the engine: arrays of other libraries become arrays of numpy or CuPy on the same memory."""

from __future__ import annotations

import contextlib
from typing import Any

from ..hooks import Library
from ..problem.arrays import CU_SEQLENS
from ..runtime import cupy_runtime
from ..runtime.interpreted_array import plain
from .engine import interpreted, read_engine
from .libraries import kind_of, library_of, mixed_libraries, on_stream_of, sharing_stream


class Sharing:
    """How the arrays of a call are shared; with ``engine="cupy"``, CuPy arrays become arrays of the interpreter.

    Attributes:
        keeps_arrays: whether the arrays are the caller's own, or views of them.
    """

    def __init__(self, q: Any, engine: Any) -> None:
        self._library: Library | None = library_of(q)
        self._kind = kind_of(q)
        with self.stream_of(q):
            array = self._in_numpy_or_cupy("q", q)
        self._device: int | None = array.data.device_id if cupy_runtime.is_array(array) else None
        #: The call raises TypeError for other objects.
        self._engine = read_engine(engine, array) if kind_of(array) else None
        self.keeps_arrays = self._library is None and self._engine != "cupy"

    def stream_of(self, q: Any) -> contextlib.AbstractContextManager[Any]:
        """Return a context that shares the options: CuPy uses the current stream of q's library."""
        return contextlib.nullcontext() if self._library is None else sharing_stream(self._library, q)

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which work is enqueued on the caller's stream, on q's device."""
        if self._library is not None and self._device is not None:
            return on_stream_of(self._library, self._device)
        if self._engine == "cupy":
            device: contextlib.AbstractContextManager[Any] = cupy_runtime.cupy().cuda.Device(self._device)
            return device
        return contextlib.nullcontext()

    def shared(self, name: str, array: Any) -> Any:
        """Return an array in the form that the engine needs; anything else is returned unchanged."""
        array = self._in_numpy_or_cupy(name, array)
        return interpreted(name, array, self._device) if self._engine == "cupy" and self._device is not None else array

    def check_writable(self, name: str) -> None:
        """Raise TypeError if the library's arrays cannot be written to."""
        if self._library is not None and not self._library.writable:
            raise TypeError(f"{name} is an array of {self._library.name}, which cannot be written to: omit {name}")

    def returned(self, array: Any) -> Any:
        """Return a result as an array of the caller's library."""
        return plain(array) if self._library is None else self._library.returned(plain(array))

    def _in_numpy_or_cupy(self, name: str, array: Any) -> Any:
        """Return an array of the caller's library as a numpy or CuPy array."""
        kind = kind_of(array)
        if self._library is None:
            if library_of(array) is not None:
                raise mixed_libraries(self._kind, name, kind)
            return array
        if kind and kind != self._kind and name not in CU_SEQLENS:  # groups read them on the host
            raise mixed_libraries(self._kind, name, kind)
        return self._library.share(name, array) if kind == self._kind else array
