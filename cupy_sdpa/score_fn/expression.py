"""A score function as plain data: steps, each of earlier ones. It is hashable, and equal where its structure is.

A :class:`Program` holds no array, no number that a caller may change, no name of the caller's and nothing that the caller
made; it is part of a problem, and so of the key of a plan. :mod:`cupy_sdpa.score_fn.tracer` writes it, by calling the function;
:mod:`cupy_sdpa.score_fn.autodiff` continues it; :mod:`cupy_sdpa.graph.emit` says it in the steps of a graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Literal, NamedTuple

Kind = Literal["float", "int", "bool"]

#: Steps that compute nothing: the score, the place of an element along an axis, a number handed over with every call, a number
#: that is part of the structure, an element of an array.
LEAVES = ("score", "index", "number", "constant", "captured")
#: The axes of the scores by the names that a score function gives them.
AXES = ("b", "h", "q_idx", "kv_idx")
#: Comparisons: the same with the operands exchanged, and the opposite.
FLIPPED = {
    "cmp_eq": "cmp_eq",
    "cmp_neq": "cmp_neq",
    "cmp_gt": "cmp_lt",
    "cmp_ge": "cmp_le",
    "cmp_lt": "cmp_gt",
    "cmp_le": "cmp_ge",
}
OPPOSITE = {
    "cmp_eq": "cmp_neq",
    "cmp_neq": "cmp_eq",
    "cmp_gt": "cmp_le",
    "cmp_ge": "cmp_lt",
    "cmp_lt": "cmp_ge",
    "cmp_le": "cmp_gt",
}
#: Steps whose operands may be exchanged.
COMMUTES = frozenset({"add", "mul", "max", "min", "logical_and", "logical_or"})
#: Steps that give an integer where all their operands are integers. (``div`` does so only where it is asked for.)
_INTEGER = frozenset({"add", "sub", "mul", "neg", "abs", "max", "min", "binary_select"})
_LOGICAL = {"logical_and": "logical_or", "logical_or": "logical_and"}
_FOLDED: dict[str, Callable[..., float]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "neg": operator.neg,
    "max": max, "min": min, "abs": abs,
}  # fmt: skip


class Step(NamedTuple):
    """One step.

    Attributes:
        mode: a pointwise mode of :mod:`cupy_sdpa.graph.nodes`, or one of :data:`LEAVES`.
        args: the steps that it reads.
        name: of a number or an array handed over; of the axis of an index.
        kind: the type of the result. ``int`` has 64 bits on the CPU and 32 bits on the GPU, where it wraps around. A ``div``
            of kind ``int`` truncates.
        value: of a constant.
    """

    mode: str
    args: tuple[int, ...] = ()
    name: str = ""
    kind: Kind = "float"
    value: float = 0.0


class Program(NamedTuple):
    """What a score function and a mask function do.

    Attributes:
        steps: in the order of their computation.
        score: the step that gives the score; None where it stays as it is.
        mask: the step that says whether the key is seen; None where nothing is hidden.
    """

    steps: tuple[Step, ...]
    score: int | None
    mask: int | None

    @property
    def captured(self) -> tuple[Step, ...]:
        """The arrays that are read."""
        return tuple(step for step in self.steps if step.mode == "captured")


#: No function at all.
EMPTY_PROGRAM = Program((), None, None)


class Writer:
    """Writes steps down: equal ones once, and simplified.

    What is folded is what arithmetic allows whatever the numbers are: ``x + 0``, ``x * 1``, ``-(-x)``, constants among
    themselves.

    Args:
        steps: what is there already.
    """

    def __init__(self, steps: Iterable[Step] = ()) -> None:
        self.steps = list(steps)
        self._numbers = {step: number for number, step in enumerate(self.steps)}
        self._opposites: dict[int, int] = {}

    def leaf(self, mode: str, name: str = "", kind: Kind = "float", value: float = 0.0) -> int:
        """A step that computes nothing."""
        return self._add(Step(mode, (), name, kind, value))

    def constant(self, value: float, kind: Kind = "float") -> int:
        """A number that is part of the structure."""
        return self.leaf("constant", kind=kind, value=value)

    def add(self, mode: str, *args: int, kind: Kind | None = None) -> int:
        """A step of earlier ones; its kind follows from theirs unless it is given."""
        if mode in COMMUTES:  # one order, so that equal ones are known as such
            args = tuple(sorted(args))
        kind = kind or self._kind(mode, args)
        simpler = self._simplified(mode, args, kind)
        return self._add(Step(mode, args, kind=kind)) if simpler is None else simpler

    def opposite(self, condition: int) -> int:
        """The opposite of a condition, by the opposite comparisons; no step is needed that negates."""
        found, waiting = self._opposites, [condition]
        while waiting:
            mode, args, *_ = self.steps[waiting[-1]]
            if mode in OPPOSITE:
                found[waiting.pop()] = self.add(OPPOSITE[mode], *args)
            elif missing := [arg for arg in args if arg not in found]:
                waiting += missing
            else:
                found[waiting.pop()] = self.add(_LOGICAL[mode], *(found[arg] for arg in args))
        return found[condition]

    def reachable(self, *roots: int | None, known: Container[int] = ()) -> list[int]:
        """The steps that some steps need, in the order of their computation, without those that are known."""
        found: set[int] = set()
        waiting = [root for root in roots if root is not None]
        while waiting:
            number = waiting.pop()
            if number not in found and number not in known:
                found.add(number)
                waiting += self.steps[number].args
        return sorted(found)

    def depends(self, root: int, mode: str) -> bool:
        """Whether a step needs a leaf of a mode."""
        return any(self.steps[number].mode == mode for number in self.reachable(root))

    def value(self, number: int) -> float | None:
        """The value of a constant; None of anything else."""
        step = self.steps[number]
        return step.value if step.mode == "constant" else None

    def _add(self, step: Step) -> int:
        if step not in self._numbers:
            self._numbers[step] = len(self.steps)
            self.steps.append(step)
        return self._numbers[step]

    def _kind(self, mode: str, args: tuple[int, ...]) -> Kind:
        if mode in OPPOSITE or mode in _LOGICAL:
            return "bool"
        numbers = args[:2]  # a third operand is a condition
        return "int" if mode in _INTEGER and all(self.steps[arg].kind == "int" for arg in numbers) else "float"

    def _simplified(self, mode: str, args: tuple[int, ...], kind: Kind) -> int | None:
        """An earlier step, or a constant, of the same value and kind."""
        values = [self.value(arg) for arg in args]
        if mode in _FOLDED and None not in values:
            return self.constant(_FOLDED[mode](*values), kind)
        if mode == "mul" and 0 in values:
            return self.constant(0, kind)
        x, b, *_ = *args, args[0]
        first, second = values[0], values[-1]
        same = {number for number in (x, b) if self.steps[number].kind == kind}
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


class Finished(NamedTuple):
    """A program, and what was left out of it because it may change from call to call.

    Attributes:
        program: the structure.
        numbers: what every number handed over is called while the function is traced, by its name in the program.
        captured: the same of every array.
        origins: for every step of the program, its number before.
    """

    program: Program
    numbers: dict[str, str]
    captured: dict[str, str]
    origins: tuple[int, ...]


def finished(writer: Writer, score: int | None, mask: int | None) -> Finished:
    """The program of what was written: without what nobody needs, in an order and with names that follow from its structure."""
    places: dict[int, int] = {}
    steps: list[Step] = []
    given: dict[str, dict[str, str]] = {"number": {}, "captured": {}}
    for number in _depth_first(writer, [root for root in (score, mask) if root is not None]):
        step = writer.steps[number]
        name = step.name
        if (names := given.get(step.mode)) is not None:
            name = f"{'n' if step.mode == 'number' else 't'}{len(names)}"
            names[name] = step.name
        places[number] = len(steps)
        steps.append(step._replace(args=tuple(places[arg] for arg in step.args), name=name))
    program = Program(tuple(steps), None if score is None else places[score], None if mask is None else places[mask])
    return Finished(program, given["number"], given["captured"], tuple(places))


def _depth_first(writer: Writer, roots: list[int]) -> Iterator[int]:
    """Every step that the roots need, once, after those that it reads."""
    done: set[int] = set()
    waiting = [(root, False) for root in reversed(roots)]
    while waiting:
        number, ready = waiting.pop()
        if number in done:
            continue
        if ready:
            done.add(number)
            yield number
        else:
            waiting.append((number, True))
            waiting += [(arg, False) for arg in reversed(writer.steps[number].args)]
