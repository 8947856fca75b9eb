"""Permute axes: view the caller's arrays with the package's axes, and the results with the caller's axes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from ..problem.arrays import SCORE_INPUTS
from . import layouts


class Axes:
    """The caller's axes, read from ``layout``. Functions that are not operations use it to permute their arrays.

    Attributes:
        layout: the caller's layout in C order, such as ``"bshd"``. None: the package's axes, so nothing is permuted.

    Raises:
        ValueError: there is no such layout.

    >>> import numpy as np
    >>> axes = Axes("bshd")
    >>> x = axes.array("q", np.zeros((2, 5, 3, 8)))
    >>> x.shape, axes.result("out", x).shape
    ((8, 3, 5, 2), (2, 5, 3, 8))
    """

    def __init__(self, layout: str | None) -> None:
        layouts.check_layout(layout)
        self.layout = layouts.other_layout({"layout": layout})
        self._named, self._is_unbatched = layout, False
        self._bias_axes: int | None = None
        #: The shapes of the caller's arrays, for messages.
        self._shapes: dict[str, tuple[int, ...]] = {}

    @classmethod
    def of_call(cls, q: Any, options: Mapping[str, Any]) -> Axes:
        """Return the axes of a call. If q has no batch axis, no array has one."""
        axes = cls(options.get("layout"))
        axes._is_unbatched = layouts.is_unbatched(q, options)
        axes._bias_axes = getattr(options.get("bias"), "ndim", None)
        axes._shapes |= layouts.shapes_of({"q": q}, options)
        return axes

    def context(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which errors show the caller's axes; with ``layout=``, arrays may have any strides."""
        return layouts.of_caller(self._named, self._shapes, unbatched=self._is_unbatched)

    def array(self, name: str, array: Any) -> Any:
        """Return an array with the package's axes. Arrays named ``q``, ``k`` or ``v``, or after a result, have a head dim."""
        if self.layout is None and not self._is_unbatched:
            return array
        self._shapes |= layouts.shapes_of({name: array}, {})
        if self._is_unbatched:
            array = layouts.with_batch(name, array, self.layout)
        return array if self.layout is None else layouts.to_own(name, array, self.layout)

    def option(self, name: str, value: Any) -> Any:
        """Return the value of an option with the package's axes."""
        if self._is_unbatched and name in SCORE_INPUTS:
            value = layouts.with_batch(name, value, self.layout)
        return value if self.layout is None else layouts.option_to_own(name, value, self.layout)

    def result(self, name: str, array: Any) -> Any:
        """Return a result with the caller's axes."""
        if self.layout is not None:
            array = layouts.from_own(name, array, self.layout, self._bias_axes if name == "dbias" else None)
        if self._is_unbatched:
            unchanged = name != "dbias" or self.layout is not None or self._bias_axes != 3
            array = layouts.without_batch(name, array, self.layout) if unchanged else array[..., 0]
        return array
