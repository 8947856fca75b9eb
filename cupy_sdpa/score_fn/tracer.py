"""A person's own score function, called once with traced values: what it does to them is written down as a program.

Arithmetic, comparisons and numpy's functions on traced values become steps (:mod:`cupy_sdpa.score_fn.expression`). What cannot be written
down raises where it stands in the person's code, with what to write instead.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .expression import AXES, FLIPPED, Kind, Program, Step, Writer, finished
from .proxy import Array, Value, as_value
from .ufuncs import FUNCTIONS

#: ``f(score, b, h, q_idx, kv_idx, **tensors) -> score`` and ``f(b, h, q_idx, kv_idx, **tensors) -> bool``, FlexAttention's
#: signatures (Dong et al. 2024, "Flex Attention", section 3).
ScoreMod = Callable[..., Any]
MaskMod = Callable[..., Any]

#: Numbers that are part of the structure; all others are handed over with every call.
_STRUCTURAL = (0.0, 1.0, -1.0, math.inf, -math.inf)


#: ``a q_idx + b kv_idx + c`` as a, b and c.
Linear = tuple[float, float, float]
#: Keys before and after the diagonal, None for no bound.
Sides = tuple[int | None, int | None]


class Access(NamedTuple):
    """An array as a function reads it.

    Attributes:
        name: in ``tensors=``.
        axes: for every axis of the array the axis of the scores that goes along it, or a place.
    """

    name: str
    axes: tuple[str | int, ...]

    def __str__(self) -> str:
        return f"{self.name}[{', '.join(map(str, self.axes))}]"


class Traced(NamedTuple):
    """What functions do together.

    Attributes:
        program: its structure; None where nothing is left of it.
        numbers: by their names in the program.
        captured: how arrays are read, by their names in the program.
        band: how many keys before and after the diagonal a query attends to, where a mask function bounds them; None: no bound.
        lines: where each mode was written, for people.
    """

    program: Program | None
    numbers: dict[str, float]
    captured: dict[str, Access]
    band: Sides | None
    lines: dict[str, str]


class Tracer:
    """Calls functions with traced values.

    Args:
        sizes: the lengths of the axes of the scores, by the names of :data:`~cupy_sdpa.score_fn.expression.AXES`.
        arrays: what ``tensors=`` has.
        steps: what is there already.
    """

    def __init__(self, sizes: Mapping[str, int], arrays: Mapping[str, Any], steps: Iterable[Step] = ()) -> None:
        self.writer = Writer(steps)
        self.sizes = sizes
        self.numbers: dict[str, Any] = {}
        self.bounds: dict[int, int] = {}  # the largest integer that steps of 0 or more may give
        self.accesses: dict[str, Access] = {}
        self.lines: dict[str, str] = {}
        self.functions = FUNCTIONS
        self.arrays = {name: Array(self, name, array).as_parameter() for name, array in arrays.items()}
        self.used: set[str] = set()

    def score(self, function: ScoreMod) -> int:
        """The step that gives the score that a function makes of a score."""
        score = Value(self, self.writer.leaf("score"))
        result = self._called(function, "score_mod", score)
        if result.kind == "bool":
            raise TypeError(
                "score_mod gave a condition; it must give a score. A function that says which keys are seen is mask_mod"
            )
        if not self.writer.depends(result.step, "score"):  # a row or a column would do, and engines want all of it
            result = score - score + result
        return result.step

    def mask(self, function: MaskMod) -> int | None:
        """The step that says whether a key is seen, by a function; None where all are."""
        result = self._called(function, "mask_mod")
        if result.kind != "bool":
            raise TypeError("mask_mod gave a number; it must give a condition, such as q_idx >= kv_idx")
        known = self.writer.value(result.step)
        if known is None:
            return result.step
        nothing = self.writer.leaf("index", "kv_idx", "int"), self.writer.constant(0, "int")
        return None if known else self.writer.add("cmp_lt", *nothing)

    def _called(self, function: Callable[..., Any], what: str, *score: Value) -> Value:
        if not callable(function):
            raise TypeError(f"{what} is a {type(function).__name__}; it must be a function {_SIGNATURES[what]}")
        places = [*score, *(Value(self, self.writer.leaf("index", axis, "int")) for axis in AXES)]
        wanted = self._wanted(function, what, len(places))
        try:
            return as_value(self, function(*places, **wanted))
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise  # by the function itself
            names = ", ".join(self.arrays) or "nothing"
            raise TypeError(f"{what} must be a function {_SIGNATURES[what]}; tensors has {names}: {error}") from None

    def _wanted(self, function: Callable[..., Any], what: str, places: int) -> dict[str, Any]:
        """Those arrays that a function takes: the other function may want the rest."""
        if not self.arrays:
            return {}  # a signature takes 15 us to read
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):  # one that is not written in Python
            return dict(self.arrays)
        own = {p.name for p in parameters[:places] if p.kind is p.POSITIONAL_OR_KEYWORD}
        if taken := own & self.arrays.keys():
            names = ", ".join(repr(name) for name in sorted(taken))
            raise ValueError(
                f"tensors has {names}, which {what} has among its first {places} parameters: give the array another name"
            )
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            wanted = self.arrays
        else:
            names_taken = {p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY}
            wanted = {name: array for name, array in self.arrays.items() if name in names_taken}
        self.used |= wanted.keys()
        return dict(wanted)

    def number(self, number: Any, kind: Kind) -> int:
        """A number of the function's own: by value, so that it may change; 0, 1, -1 and infinities are structure."""
        value = int(number) if kind == "int" else float(number)
        if kind == "int" and not -(2**63) <= value < 2**63:
            raise OverflowError(f"{number} does not fit into 64 bits: write it as a float")
        if value in _STRUCTURAL:
            return self.writer.constant(value, kind)
        self.numbers[repr(value)] = value
        return self.writer.leaf("number", repr(value), kind)

    def access(self, name: str, index: tuple[str | int, ...], kind: Kind) -> int:
        """An array, read."""
        access = Access(name, index)
        self.accesses[str(access)] = access
        return self.writer.leaf("captured", str(access), kind)


_SIGNATURES = {
    "score_mod": "f(score, b, h, q_idx, kv_idx, **tensors) -> score",
    "mask_mod": "f(b, h, q_idx, kv_idx, **tensors) -> condition",
}


def trace(
    score_mod: ScoreMod | None,
    mask_mod: MaskMod | None,
    arrays: Mapping[str, Any],
    sizes: Mapping[str, int],
    *,
    bands: bool = True,
) -> Traced:
    """What the functions of a call do; those parts that hide keys by their distance come out as a band, if ``bands`` may.

    Raises:
        TypeError, ValueError, IndexError: what cannot be written down, at the line where it stands.
    """
    tracer = Tracer(sizes, arrays)
    writer = tracer.writer
    score = None if score_mod is None else tracer.score(score_mod)
    conditions: list[int] = []
    if score is not None:
        # where(condition, score, -inf) hides: the mask of a score function
        score, conditions = _hiding(writer, score)
        score = None if writer.steps[score].mode == "score" else score
    if mask_mod is not None and (mask := tracer.mask(mask_mod)) is not None:
        conditions.append(mask)
    if unused := arrays.keys() - tracer.used:
        raise ValueError(
            f"tensors has {', '.join(sorted(unused))}, which no function takes: name it as a parameter, or leave it out"
        )
    band, rest = _banded(tracer, conditions) if bands else (None, conditions)
    done = finished(writer, score, _joined(writer, rest))
    known = {name: tracer.numbers[temporary] for name, temporary in done.numbers.items()}
    captured = {name: tracer.accesses[temporary] for name, temporary in done.captured.items()}
    left = done.program if done.program.steps else None
    return Traced(left, known, captured, band, tracer.lines)


def _hiding(writer: Writer, score: int) -> tuple[int, list[int]]:
    """A score without the ``-inf`` that it has where a condition does not hold, and the conditions."""
    conditions = []
    while writer.steps[score].mode == "binary_select":
        x, b, condition = writer.steps[score].args
        if writer.value(b) == -math.inf:
            conditions.append(condition)
            score = x
        elif writer.value(x) == -math.inf:
            conditions.append(writer.opposite(condition))
            score = b
        else:
            break
    return score, conditions


def _conjunction(writer: Writer, conditions: Sequence[int]) -> Iterator[int]:
    """The conditions that must all hold, each once."""
    seen: set[int] = set()
    waiting = list(conditions)[::-1]
    while waiting:
        condition = waiting.pop()
        if condition in seen:
            continue
        seen.add(condition)
        if (step := writer.steps[condition]).mode == "logical_and":
            waiting += step.args[::-1]
        else:
            yield condition


def _joined(writer: Writer, conditions: Sequence[int]) -> int | None:
    joined = None
    for condition in conditions:
        joined = condition if joined is None else writer.add("logical_and", joined, condition)
    return joined


def _banded(tracer: Tracer, conditions: Sequence[int]) -> tuple[Sides | None, list[int]]:
    """The band that some of the conditions make together, and the other conditions."""
    left, right, rest = math.inf, math.inf, []
    known: dict[int, Linear | None] = {}
    for condition in _conjunction(tracer.writer, conditions):
        bounds = _bounds(tracer, condition, known)
        if bounds is None or min(bounds) < 0:
            rest.append(condition)
        else:
            left, right = min(left, bounds[0]), min(right, bounds[1])
    sides = (None if left == math.inf else int(left), None if right == math.inf else int(right))
    return (None if sides == (None, None) else sides), rest


def _bounds(tracer: Tracer, condition: int, known: dict[int, Linear | None]) -> tuple[float, float] | None:
    """How many keys before and after its own position a query sees by a condition, if that is what the condition is about."""
    writer = tracer.writer
    mode, args, *_ = writer.steps[condition]
    if mode not in FLIPPED or mode in ("cmp_eq", "cmp_neq"):
        return None
    a, b = args
    if mode in ("cmp_ge", "cmp_gt"):  # a >= b is b <= a
        a, b, mode = b, a, FLIPPED[mode]
    distance, symmetric = a, False
    if writer.steps[a].mode == "abs":  # |q - kv| <= n
        (distance,), symmetric = writer.steps[a].args, True
    one, other = (_linear(tracer, number, known) for number in (distance, b))
    if one is None or other is None or (symmetric and other[:2] != (0, 0)):
        return None
    of_query, of_key, constant = (x - y for x, y in zip(one, other, strict=True))
    if (of_query, of_key) not in ((1, -1), (-1, 1)) or not float(constant).is_integer():  # infinity and NaN are none
        return None
    most = -constant - (mode == "cmp_lt")  # of_query q + of_key kv <= most
    if symmetric:
        return (most, most) if one[2] == 0 else None
    return (most, math.inf) if of_query == 1 else (math.inf, most)


def _linear(tracer: Tracer, root: int, known: dict[int, Linear | None]) -> Linear | None:
    """A step as ``a q_idx + b kv_idx + c``, where it is that; what is found is added to ``known``."""
    for number in tracer.writer.reachable(root, known=known):
        mode, args, name, _, value = tracer.writer.steps[number]
        found: Linear | None = None
        if mode == "index" and name in ("q_idx", "kv_idx"):
            found = (1, 0, 0) if name == "q_idx" else (0, 1, 0)
        elif mode in ("number", "constant"):
            found = 0, 0, tracer.numbers[name] if mode == "number" else value
        elif mode in ("add", "sub"):
            one, other = (known[arg] for arg in args)
            if one and other:
                sign = 1 if mode == "add" else -1
                a, b, c = (x + sign * y for x, y in zip(one, other, strict=True))
                found = a, b, c
        known[number] = found
    return known[root]
