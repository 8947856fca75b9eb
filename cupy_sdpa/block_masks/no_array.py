"""Raise an error that says what to use instead if a mask that is not an array is used as one."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from ..extend import in_words


class NoArray:
    """Base class of masks that are not arrays: array operators and attributes raise an error that says what to use instead.

    Attributes:
        _not_an_array: what to use instead; the end of the message.
    """

    _not_an_array: str
    __array_ufunc__: Any

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(f"{in_words(self)} is not an array: {self._not_an_array}")

    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __invert__ = __getitem__ = _refuse
    __iter__ = __contains__ = __array_ufunc__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_") or not hasattr(np.ndarray, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise AttributeError(f"{in_words(self)} is not an array, and has no attribute {name}: {self._not_an_array}")
