"""Represent the numpy calls of a score or mask function as data, and make these calls again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .expression import AXES

#: The parameters of a score function before its arrays; a mask function has the last four.
PARAMETERS = ("score", *AXES)
#: Functions that get conditions unchanged. For all others, conditions become 1 and 0: in numpy, True + True is True, not 2.
_OF_CONDITIONS = frozenset(
    {"logical_and", "bitwise_and", "logical_or", "bitwise_or", "logical_xor", "bitwise_xor", "logical_not", "invert"}
    | {"where", "positive"}
)


class Result(NamedTuple):
    """The result of an earlier numpy call of a recorded function, identified by the call's number."""

    call: int

    def __str__(self) -> str:
        return f"t{self.call}"


class Access(NamedTuple):
    """How a function indexes a captured array: each axis has an index, which is a score axis's name or an integer."""

    name: str
    axes: tuple[str | int, ...]

    def __str__(self) -> str:
        return f"{self.name}[{', '.join(map(str, self.axes))}]"


class NumpyCall(NamedTuple):
    """One numpy call in a recorded function, and its source line.

    An operand is the name of a parameter, an element of an array (:class:`Access`), a :class:`Result`, or a number.
    """

    function: Callable[..., Any]
    operands: tuple[Any, ...]
    line: str

    def __str__(self) -> str:
        return f"{self.function.__name__}({', '.join(map(str, self.operands))})"


def make_calls(calls: Sequence[NumpyCall], result: Any, line: str, arguments: Sequence[Any], tensors: Mapping[str, Any]) -> Any:
    """Make the calls on traced values or on arrays of positions, and return the operand ``result``.

    ``line`` is the function's own line; an error that no call raises names it.
    """
    parameters = dict(zip(PARAMETERS[-len(arguments) :], arguments, strict=True))
    results: list[Any] = []

    def read(access: Access) -> Any:
        index = tuple(axis if isinstance(axis, int) else parameters[axis] for axis in access.axes)
        return tensors[access.name][index] if index else tensors[access.name]

    def value(operand: Any) -> Any:
        if isinstance(operand, str):
            return parameters[operand]
        if isinstance(operand, Result):
            return results[operand.call]
        return read(operand) if isinstance(operand, Access) else operand

    try:
        for call in calls:
            line = call.line  # proxy.line_of_function() reads this variable
            operands = map(value, call.operands)
            if call.function.__name__ not in _OF_CONDITIONS:
                operands = map(_as_number, operands)
            results.append(call.function(*operands))
        return value(result)
    except Exception as error:
        error.add_note(f"raised at {line} in the function")
        raise


def _as_number(x: Any) -> Any:
    """Return 1 and 0 for a Boolean array; return anything else unchanged."""
    return x + 0 if getattr(x, "dtype", None) == np.bool_ else x
