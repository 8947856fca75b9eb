"""Permute a call's axes: the caller's arrays become views with the package's axes, and results views with the caller's."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from ..problem.arrays import SCORE_INPUTS
from . import layouts


class Axes:
    """The caller's axes, from the option ``layout``, and without a batch axis if q has no batch axis."""

    def __init__(self, q: Any, options: Mapping[str, Any]) -> None:
        self._named: str | None = options.get("layout")
        layouts.check_layout(self._named)
        self._layout = layouts.other_layout(options)
        self._is_unbatched = layouts.is_unbatched(q, options)
        self._bias_axes: int | None = getattr(options.get("bias"), "ndim", None)
        #: The shapes of the caller's arrays, for messages.
        self._shapes = layouts.shapes_of({"q": q}, options)

    def context(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which errors show the caller's axes."""
        return layouts.of_caller(self._named, self._shapes, unbatched=self._is_unbatched)

    def array(self, name: str, array: Any) -> Any:
        """Return an array of the call with the package's axes."""
        self._shapes |= layouts.shapes_of({name: array}, {})
        if self._is_unbatched:
            array = layouts.with_batch(name, array, self._layout)
        return array if self._layout is None else layouts.to_own(name, array, self._layout)

    def option(self, name: str, value: Any) -> Any:
        """Return the value of an option with the package's axes."""
        if self._is_unbatched and name in SCORE_INPUTS:
            value = layouts.with_batch(name, value, self._layout)
        return value if self._layout is None else layouts.option_to_own(name, value, self._layout)

    def result(self, name: str, array: Any) -> Any:
        """Return a result with the caller's axes."""
        if self._layout is not None:
            array = layouts.from_own(name, array, self._layout, self._bias_axes if name == "dbias" else None)
        if self._is_unbatched:
            unchanged = name != "dbias" or self._layout is not None or self._bias_axes != 3
            array = layouts.without_batch(name, array, self._layout) if unchanged else array[..., 0]
        return array
