"""Calls whose arrays are converted: of other libraries, without a batch axis, with ``engine``, or with ``layout``.

A conversion shares the caller's arrays with numpy or CuPy, and permutes their axes; the results are converted back in the
opposite order. If only axes change, the arrays are views of the caller's, and a repeated call is cached with the caller's axes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..problem.problem import CU_SEQLENS, SCORE_INPUTS
from ..runtime import cupy_runtime
from ..runtime.interpreted_array import plain
from . import layouts
from .engine import interpreted, read_engine
from .libraries import Library, kind_of, library_of, mixed_libraries, on_stream_of, sharing_stream

#: Types of arrays that need no conversion without options: those of numpy and CuPy. They are added when they occur.
OWN_TYPES: set[type] = {np.ndarray}
#: The names of the results of the forward pass, in the order in which they are returned.
OUTPUTS = ("out", "stats", "max", "sum_exp")


def needs_conversion(q: Any, options: Mapping[str, Any]) -> bool:
    """Whether a call converts its arrays."""
    if type(q) not in OWN_TYPES:
        if library_of(q) is not None:
            return True
        if isinstance(q, np.ndarray) or cupy_runtime.is_array(q):
            OWN_TYPES.add(type(q))
    if "engine" in options or (getattr(q, "ndim", 0) == 3 and type(q) in OWN_TYPES and layouts.is_unbatched(q, options)):
        return True
    if options.get("layout") is None:
        return False
    layouts.check_layout(options["layout"])
    return True


class Conversion:
    """The conversion of the arrays of one call, whose queries are ``q``.

    Attributes:
        options: the options in the form of this package, without ``layout`` and ``engine``.
    """

    def __init__(self, q: Any, options: Mapping[str, Any]) -> None:
        given = dict(options)
        self._named: str | None = given.pop("layout", None)
        layouts.check_layout(self._named)
        engine = given.pop("engine", None)
        self._layout = layouts.other_layout(options)
        self._is_unbatched = layouts.is_unbatched(q, options)
        self._library: Library | None = library_of(q)
        self._kind = kind_of(q)
        self._bias_axes: int | None = getattr(given.get("bias"), "ndim", None)
        with contextlib.nullcontext() if self._library is None else sharing_stream(self._library, q):
            own = self._in_own_library("q", q)
            self._device: int | None = own.data.device_id if cupy_runtime.is_array(own) else None
            #: Other objects are refused by the call.
            self._engine = read_engine(engine, own) if kind_of(own) else None
            #: The shapes of the caller's arrays, for messages.
            self._shapes = layouts.shapes_of({"q": q}, given)
            self.options = {name: self._option(name, value) for name, value in given.items()}
        #: Whether all arrays are views of those of numpy or CuPy that the caller passed.
        self.makes_views = self._library is None and self._engine != "cupy"

    def run(self, function: Callable[..., Any], arrays: Mapping[str, Any], results: Sequence[str] = ()) -> Any:
        """Call a function that takes the arrays by name, on converted arrays.

        The function returns the ``results``, or the first of them, in the form of this package, a single one not as a tuple.
        The caller gets them in its form, and anything else that is returned as it is. Results that it passed are written to.
        """
        with self.context():
            found = function(**self.own(arrays, results))
            if not results:
                return found
            if not isinstance(found, tuple):
                return self._back(results[0], found, arrays.get(results[0]))
            return tuple(self.back(results, found, arrays))

    def own(self, arrays: Mapping[str, Any], results: Sequence[str]) -> dict[str, Any]:
        """The arrays in the form of this package, by name; those of the ``results`` are written."""
        return {name: self._into(name, array, result=name in results) for name, array in arrays.items()}

    def back(self, results: Sequence[str], found: Sequence[Any], arrays: Mapping[str, Any]) -> list[Any]:
        """Results in the caller's form: those in ``results``, in order; others are returned as they are."""
        pairs = zip(results, found, strict=False)
        return [*(self._back(name, array, arrays.get(name)) for name, array in pairs), *found[len(results) :]]

    def _into(self, name: str, array: Any, *, result: bool) -> Any:
        """An argument in the form of this package; ``result``: the call writes the array."""
        if array is None:
            return None
        if result and self._library is not None and not self._library.writable:
            raise TypeError(f"{name} is an array of {self._library.name}, which cannot be written to: omit {name}")
        array = self._shared(name, array)
        self._shapes |= layouts.shapes_of({name: array}, {})
        if self._is_unbatched:
            array = layouts.with_batch(name, array, self._layout)
        return array if self._layout is None else layouts.to_own(name, array, self._layout)

    def _back(self, name: str, array: Any, target: Any) -> Any:
        """A result in the caller's form; if the caller passed an array for it, that array."""
        if isinstance(array, dict):
            return {key: self._returned(value) for key, value in array.items()}
        if target is not None:
            return target
        if self._layout is not None:
            array = layouts.from_own(name, array, self._layout, self._bias_axes if name == "dbias" else None)
        if self._is_unbatched:
            unchanged = name != "dbias" or self._layout is not None or self._bias_axes != 3
            array = layouts.without_batch(name, array, self._layout) if unchanged else array[..., 0]
        return self._returned(array)

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """A context in which work is enqueued on the caller's stream, and errors show the caller's axes."""
        with contextlib.ExitStack() as stack:
            if self._library is not None and self._device is not None:
                stack.enter_context(on_stream_of(self._library, self._device))
            elif self._engine == "cupy":
                stack.enter_context(cupy_runtime.cupy().cuda.Device(self._device))
            stack.enter_context(layouts.of_caller(self._named, self._shapes, unbatched=self._is_unbatched))
            yield

    def _option(self, name: str, value: Any) -> Any:
        if value is None:
            return None
        if name == "tensors" and isinstance(value, Mapping):
            return {key: self._shared(f"tensors[{key!r}]", x) for key, x in value.items()}
        value = self._shared(name, value)
        if self._is_unbatched:
            value = layouts.with_batch(name, value, self._layout) if name in SCORE_INPUTS else value
        return layouts.option_to_own(name, value, self._layout) if self._layout is not None else value

    def _shared(self, name: str, array: Any) -> Any:
        """An array of the caller's library in the form that the engine needs; anything else is returned as it is."""
        array = self._in_own_library(name, array)
        return interpreted(name, array, self._device) if self._engine == "cupy" and self._device is not None else array

    def _in_own_library(self, name: str, array: Any) -> Any:
        """An array of the caller's library as a numpy or CuPy array."""
        kind = kind_of(array)
        if self._library is None:
            if library_of(array) is not None:
                raise mixed_libraries(self._kind, name, kind)
            return array
        if kind and kind != self._kind and name not in CU_SEQLENS:  # of groups, which read them on the host
            raise mixed_libraries(self._kind, name, kind)
        return self._library.share(name, array) if kind == self._kind else array

    def _returned(self, array: Any) -> Any:
        return plain(array) if self._library is None else self._library.returned(plain(array))


def convert(
    function: Callable[..., Any],
    arrays: Mapping[str, Any],
    options: Mapping[str, Any],
    results: Sequence[str] = (),
    **flags: Any,
) -> Any:
    """Call a function on converted arrays and options, with further arguments, see :meth:`Conversion.run`."""
    conversion = Conversion(arrays["q"], options)
    return conversion.run(functools.partial(function, **conversion.options, **flags), arrays, results)


def gradient_names(return_dbias: bool, return_dsinks: bool) -> tuple[str, ...]:
    """The names of the gradients in the order in which they are returned."""
    return ("dq", "dk", "dv", *["dbias"] * bool(return_dbias), *["dsinks"] * bool(return_dsinks), "dtensors")
