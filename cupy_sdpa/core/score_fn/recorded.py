"""Score and mask functions as the numpy calls that they make."""

from __future__ import annotations

import weakref
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


class Recorded:
    """A score or mask function as it was when it was traced: a function that makes the same numpy calls and returns an operand.

    It keeps no reference to the function, to what the function refers to, or to arrays, so later changes of these have no
    effect. Equal ones are the same object, see :func:`recorded`. ``name`` has the module, the qualified name and the first
    source line of the function.
    """

    def __init__(self, name: tuple[str, str, str], calls: Sequence[NumpyCall], result: Any) -> None:
        self.name, self.calls, self.result = name, tuple(calls), result
        self.__module__, self.__qualname__, self._line = name
        operands = (*(operand for call in calls for operand in call.operands), result)
        #: The elements of arrays that it reads.
        self.reads = tuple(dict.fromkeys(operand for operand in operands if isinstance(operand, Access)))

    def __call__(self, /, *arguments: Any, **tensors: Any) -> Any:
        """Compute, as the function did: on traced values, or on arrays of positions."""
        parameters = dict(zip(PARAMETERS[-len(arguments) :], arguments, strict=True))

        results: list[Any] = []
        line = self._line  # read by line_of_function() of .proxy

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
            for call in self.calls:
                line = call.line
                operands = map(value, call.operands)
                if call.function.__name__ not in _OF_CONDITIONS:
                    operands = map(_number, operands)
                results.append(call.function(*operands))
            return value(self.result)
        except Exception as error:
            error.add_note(f"raised by the line {line} of the function")
            raise

    def __str__(self) -> str:
        return "; ".join([*(f"t{number} = {call}" for number, call in enumerate(self.calls)), str(self.result)])

    def __repr__(self) -> str:
        return f"<recorded {self.__qualname__}>"


def _number(x: Any) -> Any:
    """1 and 0 instead of an array's conditions; anything else unchanged."""
    return x + 0 if getattr(x, "dtype", None) == np.bool_ else x


_known: weakref.WeakValueDictionary[Any, Recorded] = weakref.WeakValueDictionary()


def recorded(function: Callable[..., Any], calls: Sequence[NumpyCall], result: Any) -> Recorded:
    """Return a recorded function, without calls that its result does not depend on; only the name of ``function`` is used."""
    needed: set[int] = set()
    stack = [result]
    while stack:
        operand = stack.pop()
        if isinstance(operand, Result) and operand.call not in needed:
            needed.add(operand.call)
            stack += calls[operand.call].operands
    numbers = {old: Result(new) for new, old in enumerate(sorted(needed))}

    def moved(operand: Any) -> Any:
        return numbers[operand.call] if isinstance(operand, Result) else operand

    kept = [calls[number]._replace(operands=tuple(map(moved, calls[number].operands))) for number in numbers]
    name = function.name if isinstance(function, Recorded) else _name_of(function)
    made = Recorded(name, kept, moved(result))
    texts = tuple((call.function, call.line, *map(_type_and_value, call.operands)) for call in kept)
    key = name, texts, _type_and_value(made.result)
    return _known.setdefault(key, made)


def relocated(
    function: Recorded, reads: Mapping[Access, Access], *, starts: Mapping[str, Any], places: Mapping[str, Access]
) -> Recorded:
    """Return the function for a call at other positions: a function of the indices in the call.

    ``reads`` has the elements of the call's arrays instead of the elements that the function reads. ``starts`` are added to
    indices of the call, by axis: numbers, or elements of arrays. ``places`` are the elements that contain the positions, for
    other axes.
    """
    shifts = [NumpyCall(np.add, (axis, start), function.name[2]) for axis, start in starts.items()]
    indices = {**places, **{axis: Result(number) for number, axis in enumerate(starts)}}

    def moved(operand: Any) -> Any:
        if isinstance(operand, Result):
            return Result(operand.call + len(shifts))
        if isinstance(operand, Access):
            return reads[operand]
        return indices.get(operand, operand) if isinstance(operand, str) else operand

    calls = [call._replace(operands=tuple(map(moved, call.operands))) for call in function.calls]
    return recorded(function, [*shifts, *calls], moved(function.result))


def _name_of(function: Callable[..., Any]) -> tuple[str, str, str]:
    """Return the module, the qualified name and the first source line of a function."""
    module, name = getattr(function, "__module__", None) or "?", getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(function, "__code__", None)
    return module, name, f"{code.co_filename}:{code.co_firstlineno}" if code else f"{module}.{name}"


def _type_and_value(operand: Any) -> tuple[type, str]:
    """Return what distinguishes operands: 1, 1.0 and True are different, and so are 0.0 and -0.0."""
    return type(operand), repr(operand)
