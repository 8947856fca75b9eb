"""Recognize masks in score functions, and bands in masks.

``where(condition, x, -inf)`` in a score function is a mask, also as a term of a sum. A condition that bounds
``q_idx - kv_idx`` by a constant is a band (causal, sliding window), which engines compute faster than a general mask.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from .expression import Step, Writer
from .modes import FLIPPED

#: A score at or below this value counts as masked if a bias was added, or a function read an array or selected a number. So
#: masks of finite numbers such as -1e9 or finfo.min also mask whole rows. float32 numbers of this magnitude are 32 apart:
#: the softmax of such scores is meaningless. Without a bias or such a function no score is masked.
MASKED_SCORE = -5e8
#: The number of keys before and after the diagonal that a query attends to; None is unbounded.
Sides = tuple[int | None, int | None]


class LinearForm(NamedTuple):
    """``query * q_idx + key * kv_idx + constant``."""

    query: float
    key: float
    constant: float

    def plus(self, other: LinearForm, sign: int = 1) -> LinearForm:
        """Return the sum of two forms, or their difference with the sign -1."""
        return LinearForm(*(x + sign * y for x, y in zip(self, other, strict=True)))


class LinearForms:
    """The linear forms of steps, given the values of the by-value scalars; each step is analyzed once."""

    def __init__(self, writer: Writer, numbers: Mapping[str, float]) -> None:
        self.writer, self.numbers = writer, numbers
        self._forms: dict[int, LinearForm | None] = {}

    def of(self, root: int) -> LinearForm | None:
        """Return the linear form of a step, or None if it is not linear in the indices."""
        for step in self.writer.reachable(root, known=self._forms):
            self._forms[step] = self._form(self.writer.steps[step])
        return self._forms[root]

    def _form(self, step: Step) -> LinearForm | None:
        """Return the linear form of a step whose operands have been analyzed."""
        match step.mode:
            case "index" if step.name == "q_idx":
                return LinearForm(1, 0, 0)
            case "index" if step.name == "kv_idx":
                return LinearForm(0, 1, 0)
            case "number":
                return LinearForm(0, 0, self.numbers[step.name])
            case "constant":
                return LinearForm(0, 0, step.value)
            case "add" | "sub":
                x, b = (self._forms[arg] for arg in step.args)
                return x.plus(b, 1 if step.mode == "add" else -1) if x and b else None
        return None


class SplitScore(NamedTuple):
    """The values of a step where all conditions hold, under which it is not infinite; None if it is infinite everywhere."""

    step: int | None
    conditions: tuple[int, ...] = ()


def split_score(writer: Writer, score: int) -> tuple[int, list[int]]:
    """Split a score into its value where it is not ``-inf`` and the conditions for that.

    ``where(c, s, -inf)`` and ``s + where(c, 0, -inf)`` become ``s`` and ``[c]``; nested selections give several conditions,
    which must all hold. A score that is masked everywhere becomes 0 and a False condition. A constant below
    :data:`MASKED_SCORE` that ``where`` selects counts as ``-inf``. A condition on the score itself remains a part of the score,
    which is ``-inf`` where it does not hold.
    """
    splits: dict[tuple[int, float], SplitScore] = {}
    for known in writer.reachable(score):
        for infinity in (-math.inf, math.inf):
            splits[known, infinity] = _split(writer, known, infinity, splits)
    step, conditions = splits[score, -math.inf]
    if step is None or (writer.value(step) or 0.0) <= MASKED_SCORE:
        return writer.constant(0.0), [writer.constant(0.0, "bool")]
    return step, list(conditions)


def _split(writer: Writer, step: int, infinity: float, known: Mapping[tuple[int, float], SplitScore]) -> SplitScore:
    """Split a step whose operands are split."""
    mode, args, *_, kind, value = writer.steps[step]
    if mode == "constant" and value == infinity:
        return SplitScore(None)
    if mode == "binary_select":
        lowest = math.copysign(MASKED_SCORE, infinity)
        masks = ((writer.value(arg) or 0.0) / lowest > 1 for arg in args[:2])
        chosen, other = (SplitScore(None) if mask else known[arg, infinity] for arg, mask in zip(args[:2], masks, strict=True))
        return _split_selection(writer, step, chosen, other)
    same = mode == "add" or mode == ("min" if infinity < 0 else "max")
    if not same and mode not in ("sub", "neg"):
        return SplitScore(step)
    signs = (infinity, infinity) if same else (infinity, -infinity) if mode == "sub" else (-infinity,)
    parts = [known[arg, sign] for arg, sign in zip(args, signs, strict=True)]
    steps = tuple(part.step for part in parts)
    if steps == args:
        return SplitScore(step)
    found = [part for part in steps if part is not None]
    conditions = dict.fromkeys(condition for part in parts for condition in part.conditions)
    return SplitScore(writer.add(mode, *found, kind=kind), tuple(conditions)) if len(found) == len(steps) else SplitScore(None)


def _split_selection(writer: Writer, step: int, x: SplitScore, b: SplitScore) -> SplitScore:
    """SplitScore ``where(condition, x, b)``."""
    first, second, condition = writer.steps[step].args
    if (x.step, b.step) == (first, second) or writer.depends(condition, "score"):
        return SplitScore(step)  # a mask is evaluated on the finished score, so a condition on the score received is not one
    if x.step is None and b.step is None:
        return SplitScore(None)
    opposite = writer.opposite(condition)
    if b.step is None:
        return SplitScore(x.step, (condition, *x.conditions))
    if x.step is None:
        return SplitScore(b.step, (opposite, *b.conditions))
    conditions = [writer.add("logical_or", opposite, of_x) for of_x in x.conditions]
    conditions += [writer.add("logical_or", condition, of_b) for of_b in b.conditions]
    return SplitScore(writer.add("binary_select", x.step, b.step, condition), tuple(conditions))


def without_constants(writer: Writer, conditions: Sequence[int]) -> list[int]:
    """Return the conditions except True ones; if one is False, return a condition on positions that never holds."""
    if any(writer.value(condition) == 0 for condition in conditions):
        return [writer.add("cmp_lt", writer.leaf("index", "kv_idx", "int"), writer.constant(0, "int"))]
    return [condition for condition in conditions if writer.value(condition) is None]


def split_band(writer: Writer, numbers: Mapping[str, float], conditions: Sequence[int]) -> tuple[Sides | None, list[int]]:
    """Split conditions that must all hold into the intersection of all bands (or None) and the other conditions."""
    left, right, others = math.inf, math.inf, []
    forms = LinearForms(writer, numbers)
    for condition in _conjuncts(writer, conditions):
        bounds = _bounds(forms, condition)
        if bounds is None or min(bounds) < 0:  # a band that excludes the diagonal is not supported
            others.append(condition)
        else:
            left, right = min(left, bounds[0]), min(right, bounds[1])
    sides = (None if left == math.inf else int(left), None if right == math.inf else int(right))
    return (None if sides == (None, None) else sides), others


def conjunction(writer: Writer, conditions: Sequence[int]) -> int | None:
    """Append the logical and of some conditions; None without conditions."""
    joined = None
    for condition in conditions:
        joined = condition if joined is None else writer.add("logical_and", joined, condition)
    return joined


def _conjuncts(writer: Writer, conditions: Sequence[int]) -> Iterator[int]:
    """Yield the operands of nested logical ands, each once."""
    visited: set[int] = set()
    stack = list(reversed(conditions))
    while stack:
        condition = stack.pop()
        if condition in visited:
            continue
        visited.add(condition)
        if (step := writer.steps[condition]).mode == "logical_and":
            stack += reversed(step.args)
        else:
            yield condition


def _bounds(forms: LinearForms, condition: int) -> tuple[float, float] | None:
    """Return how many keys before and after the diagonal satisfy a condition (possibly infinite); None if it is not a band.

    The conditions are ``q_idx - kv_idx <= n``, ``kv_idx - q_idx <= n`` and ``|q_idx - kv_idx| <= n``, with any comparison
    except ``==`` and ``!=``, and with the terms in any order.
    """
    steps = forms.writer.steps
    mode, args, *_ = steps[condition]
    if mode not in FLIPPED or mode in ("cmp_eq", "cmp_neq"):
        return None
    x, b = args
    if mode in ("cmp_ge", "cmp_gt"):  # x >= b is b <= x
        x, b, mode = b, x, FLIPPED[mode]
    absolute = steps[x].mode == "abs"
    lesser, greater = forms.of(steps[x].args[0] if absolute else x), forms.of(b)
    if lesser is None or greater is None:
        return None
    if absolute and (lesser.constant != 0 or (greater.query, greater.key) != (0, 0)):
        return None
    difference = lesser.plus(greater, -1)  # <= 0
    if (difference.query, difference.key) not in ((1, -1), (-1, 1)):
        return None
    if not float(difference.constant).is_integer():  # infinity and NaN are not bounds either
        return None
    most = -difference.constant - (mode == "cmp_lt")  # +-(q_idx - kv_idx) <= most
    if absolute:
        return most, most
    return (most, math.inf) if difference.query == 1 else (math.inf, most)
