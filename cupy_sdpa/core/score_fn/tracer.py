"""Trace score and mask functions: call them once with traced values and record their operations as an expression.

Arithmetic, comparisons and numpy functions on traced values become steps (:mod:`.core.score_fn.expression`). An operation that
cannot be traced raises an exception in the function's line that uses it; the message names a replacement.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from ..errors import in_words
from .expression import AXES, Expression, Step, normalized
from .mask_analysis import Sides, conjunction, split_band, split_score, without_constants
from .numpy_calls import PARAMETERS, Access
from .proxy import CapturedArray, Tracer, Value, as_value
from .ufuncs import FUNCTIONS

#: ``f(score, b, h, q_idx, kv_idx, **tensors) -> score`` and ``f(b, h, q_idx, kv_idx, **tensors) -> bool``, FlexAttention's
#: signatures (Dong et al. 2024, "Flex Attention", section 3).
ScoreMod = Callable[..., Any]
MaskMod = Callable[..., Any]


class Traced(NamedTuple):
    """The result of tracing a score function and a mask function.

    Attributes:
        expression: the steps, or None if no step remains.
        numbers, captured: the values of the by-value scalars, and how captured arrays are indexed, by their names in the
            expression.
        band: the number of keys before and after the diagonal that a query attends to, or None if no band was recognized.
        lines: the source line in which each mode was first used, for messages.
    """

    expression: Expression | None
    numbers: dict[str, float]
    captured: dict[str, Access]
    band: Sides | None
    lines: dict[str, str]

    @property
    def masks(self) -> bool:
        """Whether the functions mask keys, so that a query may attend to fewer than all keys."""
        return self.band is not None or (self.expression is not None and self.expression.mask is not None)


class FunctionTracer(Tracer):
    """Calls functions with traced values, and with the captured arrays by their names in ``tensors=``; records their steps."""

    def __init__(self, sizes: Mapping[str, int], arrays: Mapping[str, Any], steps: Iterable[Step] = ()) -> None:
        super().__init__(FUNCTIONS, sizes, steps)
        self.arrays = {name: CapturedArray(self, name, array).as_parameter() for name, array in arrays.items()}
        self.used: set[str] = set()

    def score(self, function: ScoreMod) -> Value:
        """Trace a score function; return the modified score."""
        result = self._called(function, "score_mod", Value(self, self.writer.leaf("score")))
        if result.kind == "bool":
            raise TypeError(
                "score_mod returned a condition; it must return a score. Pass a function that returns a condition as mask_mod"
            )
        return result

    def mask(self, function: MaskMod) -> Value:
        """Trace a mask function; return the condition."""
        result = self._called(function, "mask_mod")
        if result.kind != "bool":
            raise TypeError("mask_mod returned a number; it must return a condition, such as q_idx >= kv_idx")
        return result

    def full(self, step: int) -> int:
        """Return the modified score as a step that depends on the score: engines need a result with the scores' full shape."""
        if self.writer.depends(step, "score"):
            return step
        score = self.writer.leaf("score")
        return self.writer.add("add", self.writer.add("sub", score, score), step)

    def check_used(self) -> None:
        """Raise ValueError for arrays that no function takes."""
        if unused := self.arrays.keys() - self.used:
            raise ValueError(
                f"tensors has {', '.join(sorted(unused))}, which no function takes: add a parameter of that name, or remove it"
            )

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
        """Return the arrays that a function takes; the remaining ones may belong to the other function."""
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


_SIGNATURES = {
    "score_mod": "f(score, b, h, q_idx, kv_idx, **tensors) -> score",
    "mask_mod": "f(b, h, q_idx, kv_idx, **tensors) -> condition",
}
_PARAMETERS = {"score_mod": PARAMETERS, "mask_mod": AXES}


def check_function(option: str, function: Any) -> None:
    """Raise TypeError if a function is not callable, or if its parameters are in another order."""
    if not callable(function):
        raise TypeError(
            f"{option} is {in_words(function)}; it must be a function {_SIGNATURES[option]}. A bool array is "
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
            f"{option} has the parameters {', '.join(names)}; they are passed by position, as {_SIGNATURES[option]}: move "
            f"or rename {wrong[0]}"
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

    With ``bands`` conditions on ``q_idx - kv_idx`` are separated as a band.

    Raises:
        TypeError, ValueError, IndexError: an operation cannot be traced; raised in the line that uses it.
    """
    tracer = FunctionTracer(sizes, arrays)
    writer = tracer.writer
    score = None if score_mod is None else tracer.score(score_mod).step
    conditions: list[int] = []
    if score is not None:
        score, conditions = split_score(writer, score)
        score = None if writer.steps[score].mode == "score" else tracer.full(score)
    if mask_mod is not None:
        conditions.append(tracer.mask(mask_mod).step)
    tracer.check_used()
    conditions = without_constants(writer, conditions)
    band, conditions = split_band(writer, tracer.numbers, conditions) if bands else (None, conditions)
    expression, number_names, captured_names = normalized(writer, score, conjunction(writer, conditions))
    numbers = {name: tracer.numbers[traced] for name, traced in number_names.items()}
    captured = {name: tracer.accesses[traced] for name, traced in captured_names.items()}
    return Traced(expression if expression.steps else None, numbers, captured, band, tracer.lines)
