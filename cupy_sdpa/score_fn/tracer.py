"""Trace score and mask functions: call them once with traced values and record their operations as a program.

Arithmetic, comparisons and numpy functions on traced values become steps (:mod:`cupy_sdpa.score_fn.expression`). An operation
that cannot be traced raises an exception in the line of the function that uses it; the message names a replacement.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from .expression import AXES, Kind, Program, Step, Writer, normalized
from .mask_analysis import Sides, conjunction, split_band, split_score
from .proxy import Array, Value, as_value
from .ufuncs import FUNCTIONS

#: ``f(score, b, h, q_idx, kv_idx, **tensors) -> score`` and ``f(b, h, q_idx, kv_idx, **tensors) -> bool``, FlexAttention's
#: signatures (Dong et al. 2024, "Flex Attention", section 3).
ScoreMod = Callable[..., Any]
MaskMod = Callable[..., Any]

#: Numbers that are constants of the program; all others are by-value scalars.
_CONSTANTS = (0.0, 1.0, -1.0, math.inf, -math.inf)


class Access(NamedTuple):
    """How a function indexes a captured array.

    Attributes:
        name: the name of the array in ``tensors=``.
        axes: the index along every axis of the array: the name of an axis of the scores, or an integer.
    """

    name: str
    axes: tuple[str | int, ...]

    def __str__(self) -> str:
        return f"{self.name}[{', '.join(map(str, self.axes))}]"


class Traced(NamedTuple):
    """The result of tracing a score function and a mask function.

    Attributes:
        program: the steps, or None if no step remains.
        numbers: the values of the by-value scalars, by their names in the program.
        captured: how captured arrays are indexed, by their names in the program.
        band: the number of keys before and after the diagonal that a query attends to, or None if no band was recognized.
        lines: the source line in which each mode was first used, for messages.
    """

    program: Program | None
    numbers: dict[str, float]
    captured: dict[str, Access]
    band: Sides | None
    lines: dict[str, str]


class Tracer:
    """Calls functions with traced values and records their steps.

    Args:
        sizes: the lengths of the axes of the scores, by the names of :data:`~cupy_sdpa.score_fn.expression.AXES`.
        arrays: the captured arrays, by their names in ``tensors=``.
        steps: the steps to start from.
    """

    def __init__(self, sizes: Mapping[str, int], arrays: Mapping[str, Any], steps: Iterable[Step] = ()) -> None:
        self.writer = Writer(steps)
        self.sizes = sizes
        self.numbers: dict[str, Any] = {}
        self.bounds: dict[int, int] = {}  # upper bounds of non-negative integer steps
        self.accesses: dict[str, Access] = {}
        self.lines: dict[str, str] = {}
        self.functions = FUNCTIONS
        self.arrays = {name: Array(self, name, array).as_parameter() for name, array in arrays.items()}
        self.used: set[str] = set()

    def score(self, function: ScoreMod) -> int:
        """Trace a score function; returns the step of the modified score."""
        score = Value(self, self.writer.leaf("score"))
        result = self._called(function, "score_mod", score)
        if result.kind == "bool":
            raise TypeError(
                "score_mod returned a condition; it must return a score. Pass a function that returns a condition as mask_mod"
            )
        if not self.writer.depends(result.step, "score"):  # engines need a result of the full shape of the scores
            result = score - score + result
        return result.step

    def mask(self, function: MaskMod) -> int | None:
        """Trace a mask function; returns the step of the condition, or None if it is always true."""
        result = self._called(function, "mask_mod")
        if result.kind != "bool":
            raise TypeError("mask_mod returned a number; it must return a condition, such as q_idx >= kv_idx")
        constant = self.writer.value(result.step)
        if constant is None:
            return result.step
        if constant:
            return None
        return self.writer.add("cmp_lt", self.writer.leaf("index", "kv_idx", "int"), self.writer.constant(0, "int"))

    def _called(self, function: Callable[..., Any], option: str, *score: Value) -> Value:
        """Call a function with traced values."""
        check_function(option, function)
        positional = [*score, *(Value(self, self.writer.leaf("index", axis, "int")) for axis in AXES)]
        tensors = self._tensors(function, option, len(positional))
        try:
            result = function(*positional, **tensors)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise  # the error was raised inside the function, not by a call with wrong arguments
            names = ", ".join(self.arrays) or "no arrays"
            made = getattr(function, "__name__", "it")
            raise TypeError(
                f"{option} must be a function {_SIGNATURES[option]}; tensors has {names}: {error}. If {made} makes such a "
                f"function, pass {made}(...)"
            ) from None
        if result is None:
            raise TypeError(f"{option} returned None; it must be a function {_SIGNATURES[option]}: add a return statement")
        return as_value(self, result)

    def _tensors(self, function: Callable[..., Any], option: str, positional: int) -> dict[str, Any]:
        """The arrays that a function takes; the remaining ones may belong to the other function."""
        if not self.arrays:
            return {}  # reading a signature takes 15 us
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):  # a function that is not written in Python
            return dict(self.arrays)
        reserved = {p.name for p in parameters[:positional] if p.kind is p.POSITIONAL_OR_KEYWORD}
        if clashes := reserved & self.arrays.keys():
            names = ", ".join(repr(name) for name in sorted(clashes))
            raise ValueError(
                f"tensors has {names}, which is among the first {positional} parameters of {option}: rename the array"
            )
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            tensors = dict(self.arrays)
        else:
            accepted = {p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY}
            tensors = {name: array for name, array in self.arrays.items() if name in accepted}
        self.used |= tensors.keys()
        return tensors

    def number(self, number: Any, kind: Kind) -> int:
        """Record a number of the function: a constant of the program if it is 0, 1, -1 or infinite, else a by-value scalar."""
        value = int(number) if kind == "int" else float(number)
        if kind == "int" and not -(2**63) <= value < 2**63:
            raise OverflowError(f"{number} does not fit into 64 bits: write it as a float")
        if value in _CONSTANTS:
            return self.writer.constant(value, kind)
        self.numbers[repr(value)] = value
        return self.writer.leaf("number", repr(value), kind)

    def access(self, name: str, index: tuple[str | int, ...], kind: Kind) -> int:
        """Record a read of a captured array."""
        access = Access(name, index)
        self.accesses[str(access)] = access
        return self.writer.leaf("captured", str(access), kind)


_SIGNATURES = {
    "score_mod": "f(score, b, h, q_idx, kv_idx, **tensors) -> score",
    "mask_mod": "f(b, h, q_idx, kv_idx, **tensors) -> condition",
}
_PARAMETERS = {"score_mod": ("score", *AXES), "mask_mod": AXES}


def check_function(option: str, function: Any) -> None:
    """Check that a score function or a mask function is callable, and that its parameters are not in another order.

    Raises:
        TypeError: a parameter has the name of another one's place, or the object is no function.
    """
    if not callable(function):
        raise TypeError(
            f"{option} is a {type(function).__name__}; it must be a function {_SIGNATURES[option]}. A bool array is "
            "mask=, a BlockMask is block_mask="
        )
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a function that is not written in Python
        return
    known = {*_PARAMETERS["score_mod"]}
    wrong = [name for name, right in zip(names, _PARAMETERS[option], strict=False) if name in known and name != right]
    if wrong and wrong not in (["b"], ["h"]):  # single letters may have another meaning
        raise TypeError(
            f"{option} has the parameters {', '.join(names)}; they are passed by position, as {_SIGNATURES[option]}: change "
            f"the place of {wrong[0]}, or its name"
        )


def trace(
    score_mod: ScoreMod | None,
    mask_mod: MaskMod | None,
    arrays: Mapping[str, Any],
    sizes: Mapping[str, int],
    *,
    bands: bool = True,
) -> Traced:
    """Trace the score function and the mask function of a call.

    Args:
        score_mod, mask_mod: the functions, or None.
        arrays: the captured arrays, by their names in ``tensors=``.
        sizes: the lengths of the axes of the scores.
        bands: whether to separate conditions on ``q_idx - kv_idx`` as a band.

    Raises:
        TypeError, ValueError, IndexError: an operation cannot be traced; raised in the line that uses it.
    """
    tracer = Tracer(sizes, arrays)
    writer = tracer.writer
    score = None if score_mod is None else tracer.score(score_mod)
    conditions: list[int] = []
    if score is not None:
        score, conditions = split_score(writer, score)
        score = None if writer.steps[score].mode == "score" else score
    if mask_mod is not None and (mask := tracer.mask(mask_mod)) is not None:
        conditions.append(mask)
    if unused := arrays.keys() - tracer.used:
        raise ValueError(
            f"tensors has {', '.join(sorted(unused))}, which no function takes: add a parameter of that name, or remove it"
        )
    band, conditions = split_band(writer, tracer.numbers, conditions) if bands else (None, conditions)
    program, number_names, captured_names = normalized(writer, score, conjunction(writer, conditions))
    numbers = {name: tracer.numbers[traced] for name, traced in number_names.items()}
    captured = {name: tracer.accesses[traced] for name, traced in captured_names.items()}
    return Traced(program if program.steps else None, numbers, captured, band, tracer.lines)
