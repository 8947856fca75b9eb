"""Recognize masks in score functions, and bands in masks.

``where(condition, score, -inf)`` in a score function is a mask. A condition that bounds ``q_idx - kv_idx`` by a constant is a
band (causal, sliding window), which engines compute faster than a general mask.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from .expression import FLIPPED, Step, Writer

#: The number of keys before and after the diagonal that a query attends to; None is unbounded.
Sides = tuple[int | None, int | None]


class Bounds(NamedTuple):
    """The numbers of keys before and after the diagonal under one condition: integers, or infinity."""

    left: float
    right: float


class LinearForm(NamedTuple):
    """``query * q_idx + key * kv_idx + constant``."""

    query: float
    key: float
    constant: float

    def plus(self, other: LinearForm, sign: int = 1) -> LinearForm:
        """The sum of two forms, or their difference with the sign -1."""
        return LinearForm(*(x + sign * y for x, y in zip(self, other, strict=True)))


class LinearForms:
    """The linear forms of steps; each step is analyzed once.

    Args:
        writer: contains the steps.
        numbers: the values of the by-value scalars.
    """

    def __init__(self, writer: Writer, numbers: Mapping[str, float]) -> None:
        self.writer, self.numbers = writer, numbers
        self._forms: dict[int, LinearForm | None] = {}

    def of(self, root: int) -> LinearForm | None:
        """The linear form of a step, or None if it is not linear in the indices."""
        for step in self.writer.reachable(root, known=self._forms):
            self._forms[step] = self._form(self.writer.steps[step])
        return self._forms[root]

    def _form(self, step: Step) -> LinearForm | None:
        """The linear form of a step whose operands have been analyzed."""
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


def split_score(writer: Writer, score: int) -> tuple[int, list[int]]:
    """Split a score into the score where it is not ``-inf`` and the conditions under which it is not.

    ``where(c, s, -inf)`` becomes ``s`` and ``[c]``; nested selections result in several conditions, which must all hold.
    """
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


def split_band(writer: Writer, numbers: Mapping[str, float], conditions: Sequence[int]) -> tuple[Sides | None, list[int]]:
    """Split conditions into a band and the other conditions.

    Args:
        writer: contains the steps.
        numbers: the values of the by-value scalars.
        conditions: the steps that must all hold.

    Returns:
        The intersection of all bands, or None without a band; and the other conditions.
    """
    left, right, others = math.inf, math.inf, []
    forms = LinearForms(writer, numbers)
    for condition in _conjuncts(writer, conditions):
        bounds = _bounds(forms, condition)
        if bounds is None or min(bounds) < 0:  # a band that excludes the diagonal is not supported
            others.append(condition)
        else:
            left, right = min(left, bounds.left), min(right, bounds.right)
    sides = (None if left == math.inf else int(left), None if right == math.inf else int(right))
    return (None if sides == (None, None) else sides), others


def conjunction(writer: Writer, conditions: Sequence[int]) -> int | None:
    """Append the logical and of some conditions; None without conditions."""
    joined = None
    for condition in conditions:
        joined = condition if joined is None else writer.add("logical_and", joined, condition)
    return joined


def _conjuncts(writer: Writer, conditions: Sequence[int]) -> Iterator[int]:
    """The operands of nested logical ands, each once."""
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


def _bounds(forms: LinearForms, condition: int) -> Bounds | None:
    """The band that a condition describes, or None if it does not describe a band.

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
        return Bounds(most, most)
    return Bounds(most, math.inf) if difference.query == 1 else Bounds(math.inf, most)
