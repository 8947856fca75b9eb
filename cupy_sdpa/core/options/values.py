"""Read the values of options: numbers, flags, and choices."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, overload

import numpy as np

from ..errors import in_words

#: The smallest positive and the largest normal numbers of float32, in which cuDNN gets the scalars.
SMALLEST, LARGEST = 2.0**-126, (2 - 2**-23) * 2.0**127


def is_one_of(value: Any, choices: Sequence[Any]) -> bool:
    """Return whether a value is one of the choices; False for arrays, which compare elementwise, and for unhashable values.

    >>> is_one_of("ring", (None, "ring")), is_one_of([1], (None, "ring"))
    (True, False)
    """
    return isinstance(value, Hashable) and value in choices


def read_flag(name: str, value: Any) -> bool:
    """Read a Boolean argument.

    Raises:
        TypeError: it is not a Boolean.

    >>> read_flag("causal", np.True_)
    True
    """
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} is {value!r}; it must be True or False")
    return bool(value)


def optional_count(name: str, what: str, least: int = 0) -> Callable[[Mapping[str, Any]], int | None]:
    """Return the reader of an option that is a number or None; ``what`` it is, for the error message."""

    def read(options: Mapping[str, Any]) -> int | None:
        value = options.get(name)
        if value is None:
            return None
        if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} is {value!r}; it must be {what}, {least} or more, or None")
        return int(value)

    return read


@overload
def read_number(name: str, value: Any, least: int) -> int: ...
@overload
def read_number(name: str, value: Any, *, advice: str = "") -> float: ...
def read_number(name: str, value: Any, least: int | None = None, *, advice: str = "") -> float:
    """Read a number as a Python float or, with ``least``, an integer that must be at least ``least``.

    Real numbers out of range become infinity. ``advice`` ends the message of the TypeError.

    Raises:
        TypeError: it is not a number, or with ``least`` not an integer.
        ValueError: it is less than ``least``.

    >>> read_number("scale", np.float32(0.5)), read_number("scale", -(10**400)), read_number("page", np.int64(16), 1)
    (0.5, -inf, 16)
    >>> read_number("page", -1, 0)
    Traceback (most recent call last):
    ValueError: page is -1; it must be 0 or more
    """
    if least is not None:
        if not isinstance(value, numbers.Integral) or isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}; it must be an integer")
        if value < least:
            raise ValueError(f"{name} is {value}; it must be {least} or more")
        return int(value)
    if not isinstance(value, numbers.Real) or isinstance(value, (bool, np.bool_)):
        text = f" {value!r}" if isinstance(value, str) else ""
        raise TypeError(f"{name} is {in_words(value)}{text}; it must be a number{advice}")
    try:
        return float(value)
    except OverflowError:
        return -math.inf if value < 0 else math.inf
