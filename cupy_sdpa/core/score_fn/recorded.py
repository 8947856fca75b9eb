"""Record score and mask functions as the numpy calls that they make, and trace or relocate them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .expression import AXES, LEAVES
from .numpy_calls import Access, NumpyCall, Result, make_calls
from .proxy import Value
from .tracer import FunctionTracer, Traced, check_function, trace

#: An array element: the array's name and the indices, as in :class:`.Access`.
Element = tuple[str, tuple[str | int, ...]]


class Recorded:
    """A snapshot of a score or mask function: it makes the numpy calls that the function made when it was traced.

    It keeps no reference to the function, to anything that the function refers to, or to arrays, so later changes to them have
    no effect. Equal recorded functions are the same object.

    Attributes:
        option: ``score_mod`` or ``mask_mod``.
        name: the module, the qualified name and the first source line of the function.
        calls, result: the numpy calls, and the operand that the function returns.
        reads: the array elements that the function reads.

    >>> recorded_mask = Recorded.of("mask_mod", lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, {})
    >>> str(recorded_mask), recorded_mask(0, 0, np.arange(3), 1).tolist()
    ('t0 = greater_equal(q_idx, kv_idx); t0', [False, True, True])
    """

    #: Equal recorded functions compute the same, see :func:`.identity`.
    _is_its_identity = True

    def __init__(self, option: str, name: tuple[str, str, str], calls: Sequence[NumpyCall], result: Any) -> None:
        self.option, self.name, self.calls, self.result = option, name, tuple(calls), result
        self.__module__, self.__qualname__, self._line = name
        operands = (*(operand for call in calls for operand in call.operands), result)
        self.reads = tuple(dict.fromkeys(operand for operand in operands if isinstance(operand, Access)))

    @classmethod
    def of(cls, option: str, function: Callable[..., Any], arrays: Mapping[str, Any]) -> Recorded:
        """Record a function that reads ``arrays``. Raises the same errors as :func:`.trace`."""
        return record({option: function}, arrays)[option]

    @classmethod
    def if_traceable(cls, option: str, function: Any, arrays: Mapping[str, Any]) -> Recorded | None:
        """Record a function, or return None if it cannot be traced; it can still be called with arrays of positions.

        Raises:
            TypeError: it is not a function, or its parameters are in the wrong order.
        """
        check_function(option, function)
        try:
            return cls.of(option, function, arrays)
        except Exception:
            return None

    def __call__(self, /, *arguments: Any, **tensors: Any) -> Any:
        """Make the function's numpy calls on traced values or on arrays of positions."""
        return make_calls(self.calls, self.result, self._line, arguments, tensors)

    def traced(self, arrays: Mapping[str, Any], sizes: Mapping[str, int]) -> Traced:
        """Trace only this function, see :func:`.trace`; ``sizes`` has the lengths of b, h, q_idx and kv_idx."""
        functions = {self.option: self}
        return trace(functions.get("score_mod"), functions.get("mask_mod"), arrays, sizes)

    def relocated(
        self,
        reads: Mapping[Access, Element],
        *,
        starts: Mapping[str, int | Element] | None = None,
        places: Mapping[str, Element] | None = None,
    ) -> Recorded:
        """Return the function for a call on a part of the sequences, as a function of that call's indices.

        Args:
            reads: for each element that the function reads, the element of the call's arrays to read instead.
            starts: for ``b``, ``h``, ``q_idx`` and ``kv_idx``, what to add to the call's index: a number, or an array element.
                Default None: nothing.
            places: for other axes, the array element that contains the position. Default None: the index is the position.
        """
        starts = starts or {}
        for axis in {*starts, *(places or {})}.difference(AXES):
            raise ValueError(f"there is no axis {axis!r}; the axes are {', '.join(AXES)}")
        shifts = [
            NumpyCall(np.add, (axis, Access(*start) if isinstance(start, tuple) else start), self.name[2])
            for axis, start in starts.items()
        ]
        elements = {axis: Access(*place) for axis, place in (places or {}).items()}
        indices: dict[str, Any] = {**elements, **{axis: Result(number) for number, axis in enumerate(starts)}}

        def moved(operand: Any) -> Any:
            if isinstance(operand, Result):
                return Result(operand.call + len(shifts))
            if isinstance(operand, Access):
                return Access(*reads[operand])
            return indices.get(operand, operand) if isinstance(operand, str) else operand

        calls = [call._replace(operands=tuple(map(moved, call.operands))) for call in self.calls]
        return recorded(self.option, self, [*shifts, *calls], moved(self.result))

    def __str__(self) -> str:
        return "; ".join([*(f"t{number} = {call}" for number, call in enumerate(self.calls)), str(self.result)])

    def __repr__(self) -> str:
        return f"<recorded {self.__qualname__}>"


class _Recorder(FunctionTracer):
    """Record the numpy calls of functions."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self._calls: list[NumpyCall] = []
        self._results: dict[int, Result | Access] = {}  # by step; parameters and numbers have none
        super().__init__({}, arrays)

    def recorded(self, option: str, function: Callable[..., Any], result: Value) -> Recorded:
        """Return the recorded form of a traced function that returned ``result``."""
        return recorded(option, function, self._calls, self._operand(result))

    def made(self, function: Callable[..., Any], operands: Sequence[Any], result: Any) -> None:
        """Record the call that computed a result."""
        step = result.step if isinstance(result, Value) else None
        if step is not None and step not in self._results and self.writer.steps[step].mode not in LEAVES:
            self._calls.append(NumpyCall(function, tuple(map(self._operand, operands)), self.line))
            self._results[step] = Result(len(self._calls) - 1)

    def read(self, access: Access, element: Value) -> Value:
        """Record that a value is an array element; an element of a bool array is the condition that it is not 0."""
        self._results[element.step] = access
        return element

    def _operand(self, x: Any) -> Any:
        """Return an operand of a recorded call, see :class:`NumpyCall`."""
        if not isinstance(x, Value) or x.step in self._results:
            return self._results[x.step] if isinstance(x, Value) else x
        mode, _, name, kind, value = self.writer.steps[x.step]
        if mode in ("number", "constant"):
            return {"float": float, "int": int, "bool": bool}[kind](self.numbers[name] if mode == "number" else value)
        return name or mode  # a parameter


_known: weakref.WeakValueDictionary[Any, Recorded] = weakref.WeakValueDictionary()


def recorded(option: str, function: Callable[..., Any], calls: Sequence[NumpyCall], result: Any) -> Recorded:
    """Return a recorded function without calls that its result does not need; ``function`` only provides its name."""
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
    made = Recorded(option, name, kept, moved(result))
    texts = tuple((call.function, call.line, *map(_type_and_value, call.operands)) for call in kept)
    key = option, name, texts, _type_and_value(made.result)
    return _known.setdefault(key, made)


def record(functions: Mapping[str, Callable[..., Any]], arrays: Mapping[str, Any]) -> dict[str, Recorded]:
    """Record a call's functions, by option name. Raises the same errors as :func:`.trace`."""
    known = {option: function for option, function in functions.items() if isinstance(function, Recorded)}
    if len(known) == len(functions):
        return known
    tracer = _Recorder(arrays)
    calls = {"score_mod": tracer.score, "mask_mod": tracer.mask}
    made = {option: tracer.recorded(option, function, calls[option](function)) for option, function in functions.items()}
    tracer.check_used()
    return made


def _name_of(function: Callable[..., Any]) -> tuple[str, str, str]:
    """Return the module, the qualified name and the first source line of a function."""
    module, name = getattr(function, "__module__", None) or "?", getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(function, "__code__", None)
    return module, name, f"{code.co_filename}:{code.co_firstlineno}" if code else f"{module}.{name}"


def _type_and_value(operand: Any) -> tuple[type, str]:
    """Return a key that distinguishes operands: 1, 1.0 and True are different, and so are 0.0 and -0.0."""
    return type(operand), repr(operand)
