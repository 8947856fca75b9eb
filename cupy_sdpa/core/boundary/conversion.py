"""Calls whose arrays are converted: of other libraries, without a batch axis, with ``engine``, or with ``layout``.

The arrays are first shared (:mod:`.sharing`), then their axes are permuted (:mod:`.axes`); results go the opposite way. If only
axes change, the arrays are views of the caller's, and a repeated call is cached with the caller's arrays.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..problem.arrays import GRADIENTS
from ..runtime import cupy_runtime
from . import layouts
from .axes import Axes
from .libraries import library_of
from .read_array import tensor_name
from .sharing import Sharing

#: Types of arrays that need no conversion without options: numpy's and CuPy's. They are added when they occur.
OWN_TYPES: set[type] = {np.ndarray}
#: The names of the forward pass's results, in the order in which they are returned.
OUTPUTS = ("out", "stats", "max", "sum_exp")


def needs_conversion(q: Any, options: Mapping[str, Any]) -> bool:
    """True if a call converts its arrays."""
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
        options: the options with the package's axes, without ``layout`` and ``engine``.
        makes_views: whether all arrays are views of numpy or CuPy arrays that the caller passed.
    """

    def __init__(self, q: Any, options: Mapping[str, Any]) -> None:
        self._axes = Axes.of_call(q, options)
        self._sharing = Sharing(q, options.get("engine"))
        with self._sharing.stream_of(q):
            self.options = {
                name: self._option(name, value) for name, value in options.items() if name not in ("layout", "engine")
            }
        self.makes_views = self._sharing.keeps_arrays

    @classmethod
    def of(cls, q: Any, options: Mapping[str, Any]) -> Conversion | None:
        """Return a call's conversion; None if the arrays are numpy or CuPy arrays with the package's axes."""
        return cls(q, options) if needs_conversion(q, options) else None

    def call(self, function: Callable[..., Any], arrays: Mapping[str, Any], results: Sequence[str] = (), **flags: Any) -> Any:
        """Call a function with the converted arrays, the converted options and ``flags``; see :meth:`run`."""
        return self.run(functools.partial(function, **self.options, **flags), arrays, results)

    def run(self, function: Callable[..., Any], arrays: Mapping[str, Any], results: Sequence[str] = ()) -> Any:
        """Call a function that takes the arrays by name, on converted arrays.

        It returns the ``results``, or the first of them, with the package's axes, a single one not as a tuple. The caller gets
        them in its axes and library, and anything else unchanged. Results that the caller passed are written to.
        """
        with self.context():
            returned = function(**self.converted(arrays, results))
            if not results:
                return returned
            if not isinstance(returned, tuple):
                return self._back(results[0], returned, arrays.get(results[0]))
            return tuple(self.back(results, returned, arrays))

    def converted(self, arrays: Mapping[str, Any], results: Sequence[str]) -> dict[str, Any]:
        """Return the arrays with the package's axes, by name; the call writes to the arrays named in ``results``."""
        converted = {}
        for name, array in arrays.items():
            if array is not None and name in results:
                self._sharing.check_writable(name)
            converted[name] = None if array is None else self._axes.array(name, self._sharing.shared(name, array))
        return converted

    def back(self, results: Sequence[str], returned: Sequence[Any], arrays: Mapping[str, Any]) -> list[Any]:
        """Return a function's results in the caller's axes and library; return results after ``results`` unchanged."""
        pairs = zip(results, returned, strict=False)
        return [*(self._back(name, array, arrays.get(name)) for name, array in pairs), *returned[len(results) :]]

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """A context in which work is enqueued on the caller's stream, and errors show the caller's axes."""
        with self._sharing.context(), self._axes.context():
            yield

    def _back(self, name: str, array: Any, target: Any) -> Any:
        """Return a result in the caller's form; if the caller passed an array for it, that array."""
        if isinstance(array, dict):
            return {key: self._sharing.returned(value) for key, value in array.items()}
        return self._sharing.returned(self._axes.result(name, array)) if target is None else target

    def _option(self, name: str, value: Any) -> Any:
        """Return an option with the package's axes."""
        if value is None:
            return None
        if name == "tensors" and isinstance(value, Mapping):
            return {key: self._sharing.shared(tensor_name(key), x) for key, x in value.items()}
        return self._axes.option(name, self._sharing.shared(name, value))


def gradient_names(requests: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the gradients in the order in which they are returned, from the flags that request them."""
    of_scale = ("dscale",) if requests.get("return_dscale") else ()
    return (*(row.name for row in GRADIENTS if not row.request or requests[row.request]), *of_scale, "dtensors")
