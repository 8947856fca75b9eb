"""The derivative of a score function: reverse mode over its steps.

Every mode has its rule, in :data:`RULES`. A rule is written with the saved values of the forward steps (``dy - dy y y`` for
tanh), so that no engine needs backward activations.

Where a function has a kink the convention of the field is followed:
``|x|`` has the derivative 0 at 0, and ``max`` and ``min`` give half to each of two equal operands, as in PyTorch and JAX;
comparisons, floor, ceil and places have none. A branch of ``where`` that is not taken gets 0, and what it computes from that
may be NaN if its own derivative is infinite.

Source: Griewank and Walther 2008, "Evaluating Derivatives", chapter 3 (reverse mode).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .expression import OPPOSITE, Writer


class Adjoint(NamedTuple):
    """``factor * (product of over) / (product of under) * value``: the numbers in front are put off, and may cancel.

    Attributes:
        value: a step.
        factor: a constant.
        over, under: numbers handed over, as steps.
    """

    value: int
    factor: float = 1.0
    over: tuple[int, ...] = ()
    under: tuple[int, ...] = ()


class Rule:
    """What the rules write with."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer

    def plain(self, g: Adjoint) -> int:
        """A gradient as a step, with the numbers in front multiplied."""
        number = g.value
        for mode, numbers in (("mul", g.over), ("div", g.under)):
            for other in numbers:
                number = self.writer.add(mode, number, other)
        return self.scaled(number, g.factor)

    def scaled(self, number: int, factor: float) -> int:
        """A step times a constant."""
        return self.writer.add("mul", number, self.writer.constant(factor))

    def sum(self, one: Adjoint, other: Adjoint) -> Adjoint:
        """Two gradients of one step."""
        if one[1:] == other[1:]:
            return one._replace(value=self.writer.add("add", one.value, other.value))
        if one[2:] == other[2:] and one.factor == -other.factor:
            return one._replace(value=self.writer.add("sub", one.value, other.value))
        return Adjoint(self.writer.add("add", self.plain(one), self.plain(other)))

    def times(self, g: Adjoint, mode: str, number: int) -> Adjoint:
        """A gradient times a step, or divided by it."""
        step = self.writer.steps[number]
        if step.mode == "constant" and (mode == "mul" or step.value):
            return g._replace(factor=g.factor * step.value if mode == "mul" else g.factor / step.value)
        if step.mode != "number":
            return g._replace(value=self.writer.add(mode, g.value, number))
        over, under = list(g.over), list(g.under)
        joined, opposite = (over, under) if mode == "mul" else (under, over)
        if number in opposite:
            opposite.remove(number)
        else:
            joined.append(number)
        return g._replace(over=tuple(sorted(over)), under=tuple(sorted(under)))

    def where(self, g: Adjoint, condition: int) -> Adjoint:
        """A gradient where a condition holds, else 0."""
        return g._replace(value=self.writer.add("binary_select", g.value, self.writer.constant(0.0), condition))

    def ranked(self, g: Adjoint, strictly: str, x: int, b: int) -> Adjoint:
        """A gradient where x is greater (or less) than b, half of it where they are equal, else 0.

        A condition is a number, 1 or 0: ``(x > b) + (x >= b)`` is twice the share. A backward pass through ``clip`` took 4.7 ms
        with choices (``binary_select``) and 1.7 so (an H200, 16 heads, 4096, head dim 128, batch 2).
        """
        if abs(g.factor) < 2**-16:  # many halves: their product must not vanish before the doubles are multiplied
            g = Adjoint(self.plain(g))
        twice = self.writer.add("add", self.writer.add(strictly, x, b), self.writer.add(_NOT_STRICTLY[strictly], x, b))
        return self.times(g, "mul", twice)._replace(factor=g.factor / 2)


_NOT_STRICTLY = {"cmp_gt": "cmp_ge", "cmp_lt": "cmp_le"}

Gradients = Sequence[Adjoint | None]
_NONE: Callable[..., Gradients] = lambda r, g, out, *args: [None] * len(args)  # noqa: E731


def _mul(r: Rule, g: Adjoint, out: int, x: int, b: int) -> Gradients:
    return r.times(g, "mul", b), r.times(g, "mul", x)


def _div(r: Rule, g: Adjoint, out: int, x: int, b: int) -> Gradients:
    # d(x / b) = dx / b - (x / b) db / b
    over = r.times(g, "div", b)
    return over, _times_saved(r, over, out, factor=-1.0)


def _times_saved(r: Rule, g: Adjoint, *saved: int, factor: float = 1.0) -> Adjoint:
    for number in saved:
        g = r.times(g, "mul", number)
    return g._replace(factor=g.factor * factor)


def _tanh(r: Rule, g: Adjoint, out: int, x: int) -> Gradients:
    # d tanh = 1 - tanh^2, as dy - (dy y) y
    squares = r.writer.add("mul", r.writer.add("mul", g.value, out), out)
    return [g._replace(value=r.writer.add("sub", g.value, squares))]


def _tan(r: Rule, g: Adjoint, out: int, x: int) -> Gradients:
    squares = r.writer.add("mul", r.writer.add("mul", g.value, out), out)
    return [g._replace(value=r.writer.add("add", g.value, squares))]


def _abs(r: Rule, g: Adjoint, out: int, x: int) -> Gradients:
    # d |x| = (x > 0) - (x < 0)
    zero = r.writer.constant(0.0)
    return [r.times(g, "mul", r.writer.add("sub", *(r.writer.add(mode, x, zero) for mode in ("cmp_gt", "cmp_lt"))))]


def _erf(r: Rule, g: Adjoint, out: int, x: int) -> Gradients:
    # d erf = 2 / sqrt(pi) exp(-x^2)
    bell = r.writer.add("exp", r.writer.add("neg", r.writer.add("mul", x, x)))
    return [_times_saved(r, g, bell, factor=2 / math.sqrt(math.pi))]


def _pow(r: Rule, g: Adjoint, out: int, x: int, b: int) -> Gradients:
    # d x^b = b x^(b-1) dx + x^b log x db
    less = r.writer.add("pow", x, r.writer.add("sub", b, r.writer.constant(1.0)))
    of_x = r.times(r.times(g, "mul", b), "mul", less)
    return of_x, _times_saved(r, g, out, r.writer.add("log", x))


def _mod(r: Rule, g: Adjoint, out: int, x: int, b: int) -> Gradients:
    # d(x mod b) = dx - trunc(x / b) db, where trunc(x / b) = (x - out) / b
    return g, r.times(_times_saved(r, g, r.writer.add("sub", x, out), factor=-1.0), "div", b)


def _select(r: Rule, g: Adjoint, out: int, x: int, b: int, condition: int) -> Gradients:
    # by choice: with conditions as factors cuDNN 9.19 gave nonsense for some functions
    return r.where(g, condition), r.where(g, r.writer.opposite(condition)), None


#: mode -> (what to write with, the gradient of the result, the result, the operands) -> the gradients of the operands.
RULES: dict[str, Callable[..., Gradients]] = {
    "add": lambda r, g, out, x, b: (g, g),
    "sub": lambda r, g, out, x, b: (g, g._replace(factor=-g.factor)),
    "mul": _mul,
    "div": _div,
    "neg": lambda r, g, out, x: [g._replace(factor=-g.factor)],
    "identity": lambda r, g, out, x: [g],
    "exp": lambda r, g, out, x: [_times_saved(r, g, out)],
    "log": lambda r, g, out, x: [r.times(g, "div", x)],
    "sqrt": lambda r, g, out, x: [r.times(g._replace(factor=g.factor / 2), "div", out)],
    "rsqrt": lambda r, g, out, x: [_times_saved(r, g, out, out, out, factor=-0.5)],
    "reciprocal": lambda r, g, out, x: [_times_saved(r, g, out, out, factor=-1.0)],
    "tanh_fwd": _tanh,
    "sin": lambda r, g, out, x: [r.times(g, "mul", r.writer.add("cos", x))],
    "cos": lambda r, g, out, x: [_times_saved(r, g, r.writer.add("sin", x), factor=-1.0)],
    "tan": _tan,
    "erf": _erf,
    "pow": _pow,
    "mod": _mod,
    "log1p": lambda r, g, out, x: [r.times(g, "div", r.writer.add("add", x, r.writer.constant(1.0)))],
    "expm1": lambda r, g, out, x: [r.times(g, "mul", r.writer.add("exp", x))],
    "hypot": lambda r, g, out, x, b: [r.times(r.times(g, "mul", operand), "div", out) for operand in (x, b)],
    "abs": _abs,
    "max": lambda r, g, out, x, b: (r.ranked(g, "cmp_gt", x, b), r.ranked(g, "cmp_lt", x, b)),
    "min": lambda r, g, out, x, b: (r.ranked(g, "cmp_lt", x, b), r.ranked(g, "cmp_gt", x, b)),
    "binary_select": _select,
    **dict.fromkeys(("floor", "ceil", "gen_index", "logical_and", "logical_or", *OPPOSITE), _NONE),
}  # fmt: skip


def gradients(writer: Writer, root: int, wanted: Sequence[int]) -> list[int | None]:
    """The derivatives of a step with respect to some leaves, as steps; None where there is none.

    The function is one of numbers, so a gradient is that of the result times the derivative; the derivative is made of the
    saved values of the forward steps alone.

    Args:
        writer: holds the steps; more are added.
        root: the step.
        wanted: the leaves.
    """
    rule = Rule(writer)
    active = set(wanted)  # the steps that have something to do with them
    needed = writer.reachable(root)
    for number in needed:
        if active.intersection(writer.steps[number].args):
            active.add(number)
    found = {root: Adjoint(writer.constant(1.0))}
    for number in reversed(needed):
        mode, args, *_ = writer.steps[number]
        if number not in active or number not in found or not args:
            continue
        for arg, own in zip(args, RULES[mode](rule, found[number], number, *args), strict=True):
            if own is not None and arg in active:
                found[arg] = rule.sum(found[arg], own) if arg in found else own
    return [rule.plain(found[leaf]) if leaf in found else None for leaf in wanted]
