"""The numpy calls that a score or mask function makes, as data, and how they are computed again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .expression import AXES

#: The parameters of a score function before its arrays; a mask function has the last four.
PARAMETERS = ("score", *AXES)
#: Functions that take conditions unchanged. All others compute with 1 and 0; numpy's sum of two conditions is a condition.
_OF_CONDITIONS = frozenset(
    {"logical_and", "bitwise_and", "logical_or", "bitwise_or", "logical_xor", "bitwise_xor", "logical_not", "invert"}
    | {"where", "positive"}
)


class Result(NamedTuple):
    """The result of an earlier call of a recorded function, by the number of the call."""

    call: int

    def __str__(self) -> str:
        return f"t{self.call}"


class Access(NamedTuple):
    """How a function indexes a captured array: by the name of an axis of the scores, or an integer, along every axis."""

    name: str
    axes: tuple[str | int, ...]

    def __str__(self) -> str:
        return f"{self.name}[{', '.join(map(str, self.axes))}]"


class NumpyCall(NamedTuple):
    """One call of a numpy function in a recorded function, and the source line that made it.

    An operand is the name of a parameter, an element of an array (:class:`Access`), a :class:`Result`, or a number.
    """

    function: Callable[..., Any]
    operands: tuple[Any, ...]
    line: str

    def __str__(self) -> str:
        return f"{self.function.__name__}({', '.join(map(str, self.operands))})"


def make_calls(calls: Sequence[NumpyCall], result: Any, line: str, arguments: Sequence[Any], tensors: Mapping[str, Any]) -> Any:
    """Make the calls, and return the operand ``result``: on traced values, or on arrays of positions.

    ``line`` is the line of the function, which is named in errors outside of its calls.
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
            line = call.line  # read by line_of_function() of .proxy
            operands = map(value, call.operands)
            if call.function.__name__ not in _OF_CONDITIONS:
                operands = map(_as_number, operands)
            results.append(call.function(*operands))
        return value(result)
    except Exception as error:
        error.add_note(f"raised by the line {line} of the function")
        raise


def _as_number(x: Any) -> Any:
    """1 and 0 instead of an array's conditions; anything else unchanged."""
    return x + 0 if getattr(x, "dtype", None) == np.bool_ else x
