"""Score functions as immutable data: a sequence of steps, each of which reads earlier steps.

An :class:`Expression` is hashable, and expressions with the same structure are equal. It contains no arrays, no values of
by-value scalars, and none of the caller's objects or names, so it can be part of the problem and of the plan's cache key.
:mod:`.core.score_fn.tracer` records it, :mod:`.core.score_fn.autodiff` differentiates it, and :mod:`.core.graph.emit` converts
it to operations of a graph.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, Literal, NamedTuple

from .modes import MODES, OPPOSITE

Kind = Literal["float", "int", "bool"]

#: Steps without operands: the score, the index along an axis, a by-value scalar, a constant of the expression, an element of a
#: captured array.
LEAVES = ("score", "index", "number", "constant", "captured")
#: The axes of the scores: batch, head, query and key, by their names in score functions.
AXES = ("b", "h", "q_idx", "kv_idx")
_LOGICAL = {"logical_and": "logical_or", "logical_or": "logical_and"}
_FOLDED: dict[str, Callable[..., float]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "neg": operator.neg,
    "max": max, "min": min, "abs": abs,
}  # fmt: skip


class Step(NamedTuple):
    """One step of an expression.

    Attributes:
        mode: a pointwise mode (:mod:`.modes`), or one of :data:`LEAVES`.
        args: the indices of the operands.
        name: the name of a by-value scalar or a captured array, or the axis of an index.
        kind: the type of the result. An ``int`` has 64 bits on the CPU and 32 bits on the GPU, where it wraps around. A ``div``
            of kind ``int`` truncates.
        value: the value of a constant.
    """

    mode: str
    args: tuple[int, ...] = ()
    name: str = ""
    kind: Kind = "float"
    value: float = 0.0

    def as_data(self) -> Any:
        """Return the step as plain data, as in JSON. Fields with their default value are left out.

        >>> [step.as_data() for step in (Step("score"), Step("neg", (0,)))]
        [{'mode': 'score'}, {'mode': 'neg', 'args': [0]}]
        """
        from .._data import as_data  # needed only for files of problems

        return as_data(self)


class Expression(NamedTuple):
    """The steps of a score function and a mask function, operands first.

    ``score`` is the index of the modified score, ``mask`` the index of the condition under which the query attends to the key,
    or None.
    """

    steps: tuple[Step, ...]
    score: int | None
    mask: int | None

    @property
    def captured(self) -> tuple[Step, ...]:
        """The steps that read captured arrays."""
        return tuple(step for step in self.steps if step.mode == "captured")

    def steps_of(self, root: int) -> tuple[Step, ...]:
        """Return only the steps of the function ``score`` or ``mask``; the last step is its result.

        >>> both = Expression((Step("index", name="b"), Step("score"), Step("neg", (1,))), 2, None)
        >>> [(step.mode, step.args) for step in both.steps_of(2)]
        [('score', ()), ('neg', (0,))]
        """
        needed = {old: new for new, old in enumerate(Writer(self.steps).reachable(root))}
        return tuple(self.steps[old]._replace(args=tuple(needed[arg] for arg in self.steps[old].args)) for old in needed)


#: The expression without a score function and without a mask function.
EMPTY_EXPRESSION = Expression((), None, None)


class Writer:
    """Appends steps to an expression; simplifies them, and appends equal steps once.

    Simplifications hold for all values of the operands: ``x + 0``, ``x * 1``, ``-(-x)``, and arithmetic on constants.
    """

    def __init__(self, steps: Iterable[Step] = ()) -> None:
        self.steps = list(steps)
        self._indices = {step: index for index, step in enumerate(self.steps)}
        self._opposites: dict[int, int] = {}

    def leaf(self, mode: str, name: str = "", kind: Kind = "float", value: float = 0.0) -> int:
        """Append a step without operands."""
        return self._append(Step(mode, (), name, kind, value))

    def constant(self, value: float, kind: Kind = "float") -> int:
        """Append a constant of the expression."""
        return self.leaf("constant", kind=kind, value=value)

    def add(self, mode: str, *args: int, kind: Kind | None = None) -> int:
        """Append an operation on earlier steps; ``kind`` is the result's, by default derived from the operands."""
        if MODES[mode].commutes:  # a canonical order, so that equal steps are recognized
            args = tuple(sorted(args))
        kind = kind or self._kind(mode, args)
        simpler = self._simplified(mode, args, kind)
        return self._append(Step(mode, args, kind=kind)) if simpler is None else simpler

    def opposite(self, condition: int) -> int:
        """Return the negation of a condition, by opposite comparisons: no logical_not is needed."""
        negated, stack = self._opposites, [condition]
        while stack:
            mode, args, *_ = self.steps[stack[-1]]
            if mode in OPPOSITE:
                negated[stack.pop()] = self.add(OPPOSITE[mode], *args)
            elif missing := [arg for arg in args if arg not in negated]:
                stack += missing
            else:  # De Morgan
                negated[stack.pop()] = self.add(_LOGICAL[mode], *(negated[arg] for arg in args))
        return negated[condition]

    def reachable(self, *roots: int | None, known: Container[int] = ()) -> list[int]:
        """Return the steps that the roots depend on, including the roots, operands first; skip roots that are None.

        Leave out the steps ``known``, and their operands unless other steps need them.
        """
        visited: set[int] = set()
        stack = [root for root in roots if root is not None]
        while stack:
            step = stack.pop()
            if step not in visited and step not in known:
                visited.add(step)
                stack += self.steps[step].args
        return sorted(visited)

    def depends(self, root: int, mode: str) -> bool:
        """True if a step depends on a step of a mode."""
        return any(self.steps[step].mode == mode for step in self.reachable(root))

    def value(self, step: int) -> float | None:
        """Return the value of a constant, or None for any other step."""
        return self.steps[step].value if self.steps[step].mode == "constant" else None

    def _append(self, step: Step) -> int:
        if step not in self._indices:
            self._indices[step] = len(self.steps)
            self.steps.append(step)
        return self._indices[step]

    def _kind(self, mode: str, args: tuple[int, ...]) -> Kind:
        if mode in OPPOSITE or mode in _LOGICAL:
            return "bool"
        operands = args[:2]  # a third operand is a condition
        return "int" if MODES[mode].is_closed and all(self.steps[arg].kind == "int" for arg in operands) else "float"

    def _simplified(self, mode: str, args: tuple[int, ...], kind: Kind) -> int | None:
        """Return an earlier step or constant of the same value and kind; None if there is no such step."""
        values = [self.value(arg) for arg in args]
        if mode in _FOLDED and None not in values:
            return self.constant(_FOLDED[mode](*values), kind)
        if mode == "mul" and 0 in values:
            return self.constant(0, kind)
        x, b, *_ = *args, args[0]
        first, second = values[0], values[-1]
        same = {step for step in (x, b) if self.steps[step].kind == kind}
        match mode:
            case "add" | "sub" if second == 0 and x in same:
                return x
            case "add" if first == 0 and b in same:
                return b
            case "mul" | "div" if second == 1 and x in same:
                return x
            case "mul" if first == 1 and b in same:
                return b
            case "mul" | "div" if second == -1 and x in same:
                return self.add("neg", x)
            case "mul" if first == -1 and b in same:
                return self.add("neg", b)
            case "neg" if self.steps[x].mode == "neg":
                return self.steps[x].args[0]
            case "binary_select" if x == b:
                return x
        return None


class NormalizedExpression(NamedTuple):
    """An expression in normal form, and the names during tracing of its by-value scalars and captured arrays."""

    expression: Expression
    numbers: dict[str, str]
    captured: dict[str, str]


def captured_name(number: int) -> str:
    """Return the name of an array that score and mask functions read."""
    return f"t{number}"


@functools.cache
def is_captured(name: str) -> bool:
    """True if a name belongs to an array that functions read (:func:`captured_name`), or to its gradient.

    >>> [is_captured(name) for name in ("t0", "dt12", "tq", "d0")]
    [True, True, False, False]
    """
    return re.fullmatch(r"d?t\d+", name) is not None


def normalized(writer: Writer, score: int | None, mask: int | None) -> NormalizedExpression:
    """Return the expression of a score and a mask without unused steps; order and names depend only on its structure."""
    indices: dict[int, int] = {}
    steps: list[Step] = []
    traced_names: dict[str, dict[str, str]] = {"number": {}, "captured": {}}
    for index in _depth_first(writer, [root for root in (score, mask) if root is not None]):
        step = writer.steps[index]
        name = step.name
        if (names := traced_names.get(step.mode)) is not None:
            name = f"n{len(names)}" if step.mode == "number" else captured_name(len(names))
            names[name] = step.name
        indices[index] = len(steps)
        steps.append(step._replace(args=tuple(indices[arg] for arg in step.args), name=name))
    expression = Expression(tuple(steps), None if score is None else indices[score], None if mask is None else indices[mask])
    return NormalizedExpression(expression, traced_names["number"], traced_names["captured"])


def _depth_first(writer: Writer, roots: list[int]) -> Iterator[int]:
    """Yield every step that the roots depend on, once, operands first."""
    done: set[int] = set()
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        step, operands_done = stack.pop()
        if step in done:
            continue
        if operands_done:
            done.add(step)
            yield step
        else:
            stack.append((step, True))
            stack += [(arg, False) for arg in reversed(writer.steps[step].args)]
