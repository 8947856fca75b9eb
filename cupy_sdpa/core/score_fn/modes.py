"""The pointwise modes of score functions and of operation graphs: one row for each, with everything that is known about it.

To add a mode, add a row. If a function computes it with numpy, instead of the name of a numpy function, also list its name in
``FUNCTIONS`` of :mod:`.ufuncs`. If cuDNN has the mode and no numpy function computes it, also add a rule to ``POINTWISE`` of
:mod:`.core.numpy_engine.interpreter`. A mode that cuDNN has is a new kind of graph: compare its results on a GPU
before you use it. A mode that is composed of other modes needs no comparison.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .adjoints import AdjointRule, RuleWriter, of_abs, of_div, of_erf, of_mod, of_mul, of_none, of_pow, of_select, of_tan


class Mode(NamedTuple):
    """A pointwise mode.

    Attributes:
        operands: their number.
        numpy: the name of the function of numpy, and of CuPy; or what computes it with numpy.
        cudnn: the name of cuDNN's mode; or a function that composes it of other modes, ``(writer, operands) -> step``.
        code: the CUDA expression of floats, whose functions have the precision of their operands; empty if it is composed.
        formula: the printed form; empty if it is composed.
        derivative: the rule of reverse-mode differentiation.
        integers: the CUDA expression of integers, if it is another one.
        flipped: of a comparison: the one with exchanged operands.
        opposite: of a comparison: its negation.
        commutes: whether the operands can be exchanged.
        is_closed: whether the result of integers is an integer. ``div`` returns an integer only if its kind is set.
        is_unbounded: whether the result, or its derivative, may be infinite or NaN for finite operands.
    """

    operands: int
    numpy: str | Callable[..., Any]
    cudnn: str | Callable[..., int]
    code: str
    formula: str
    derivative: AdjointRule
    integers: str = ""
    flipped: str = ""
    opposite: str = ""
    commutes: bool = False
    is_closed: bool = False
    is_unbounded: bool = False


# Compositions: they are accurate for small operands, and overflow only if the result does.


def _log1p(w: RuleWriter, x: int) -> int:
    # log u + (x - (u - 1)) / u with u = 1 + x: the second term restores what rounding u loses of x (as in GSL's gsl_log1p)
    one = w.constant(1.0)
    u = w.add("add", x, one)
    rounded, log = w.add("sub", u, one), w.add("log", u)
    correction = w.add("div", w.add("sub", x, rounded), u)
    # log u alone where x = u - 1, which includes x = -1 and infinity
    return w.add("binary_select", w.add("add", log, correction), log, w.add("cmp_neq", x, rounded))


def _expm1(w: RuleWriter, x: int) -> int:
    # tanh(x / 2) (exp(x) + 1)
    half = w.add("tanh_fwd", w.add("mul", x, w.constant(0.5)))
    return w.add("mul", half, w.add("add", w.add("exp", x), w.constant(1.0)))


def _hypot(w: RuleWriter, x: int, b: int) -> int:
    # m sqrt(1 + r^2) with m = max(|x|, |b|) and r = min(|x|, |b|) / m
    sides = w.add("abs", x), w.add("abs", b)
    longest, zero = w.add("max", *sides), w.constant(0.0)
    ratio = w.add("binary_select", w.add("div", w.add("min", *sides), longest), zero, w.add("cmp_gt", longest, zero))
    return w.add("mul", longest, w.add("sqrt", w.add("add", w.add("mul", ratio, ratio), w.constant(1.0))))


def _atan(w: RuleWriter, x: int) -> int:
    # y + sin(atan x - y) twice, with y = 2 u / (1 + 9/32 u^2) and u = tan(atan(x) / 2): errors of 1e-2, 2e-7 and 1e-21
    one, most = w.constant(1.0), 1e15
    x = w.add("max", w.add("min", x, w.constant(most)), w.constant(-most))
    root = w.add("sqrt", w.add("add", w.add("mul", x, x), one))
    u = w.add("div", x, w.add("add", root, one))
    y = w.add("div", w.add("mul", u, w.constant(2.0)), w.add("add", w.add("mul", w.add("mul", u, u), w.constant(9 / 32)), one))
    sine, cosine = w.add("div", x, root), w.add("div", one, root)
    for _ in range(2):
        difference = w.add("sub", w.add("mul", sine, w.add("cos", y)), w.add("mul", cosine, w.add("sin", y)))
        y = w.add("add", y, difference)
    return y


def _comparison(numpy: str, cudnn: str, code: str, formula: str, flipped: str, opposite: str) -> Mode:
    return Mode(2, numpy, cudnn, f"{{0}} {code} {{1}}", f"{{}} {formula} {{}}", of_none, flipped=flipped, opposite=opposite)


#: The modes by their names in expressions and graphs. A division of integers is truncated; ``mod`` is its remainder, with the
#: sign of x. Both are 0 if the divisor is 0.
MODES: dict[str, Mode] = {
    "mul": Mode(2, "multiply", "MUL", "{0} * {1}", "{} · {}", of_mul, commutes=True, is_closed=True),
    "add": Mode(2, "add", "ADD", "{0} + {1}", "{} + {}", lambda a, g, out, x, b: (g, g), commutes=True, is_closed=True),
    "sub": Mode(2, "subtract", "SUB", "{0} - {1}", "{} − {}", lambda a, g, out, x, b: (g, g.scaled(-1.0)), is_closed=True),
    "div": Mode(2, "divide", "DIV", "{0} / {1}", "{} / {}", of_div, "{1} ? {0} / {1} : 0", is_unbounded=True),
    "mod": Mode(2, "fmod", "MOD", "fmod({0}, {1})", "{} mod {}", of_mod, "{1} ? {0} % {1} : 0", is_unbounded=True),
    "max": Mode(
        2, "maximum", "MAX", "{0} > {1} || {0} != {0} ? {0} : {1}", "max({}, {})",
        lambda a, g, out, x, b: (a.where_selected(g, "cmp_gt", x, b), a.where_selected(g, "cmp_lt", x, b)),
        commutes=True, is_closed=True,
    ),
    "min": Mode(
        2, "minimum", "MIN", "{0} < {1} || {0} != {0} ? {0} : {1}", "min({}, {})",
        lambda a, g, out, x, b: (a.where_selected(g, "cmp_lt", x, b), a.where_selected(g, "cmp_gt", x, b)),
        commutes=True, is_closed=True,
    ),
    "pow": Mode(2, "power", "POW", "pow({0}, {1})", "{} ^ {}", of_pow, is_unbounded=True),
    "neg": Mode(1, "negative", "NEG", "-{0}", "−{}", lambda a, g, out, x: [g.scaled(-1.0)], is_closed=True),
    "abs": Mode(1, "absolute", "ABS", "fabs({0})", "|{}|", of_abs, "{0} < 0 ? -{0} : {0}", is_closed=True),
    "exp": Mode(1, "exp", "EXP", "exp({0})", "exp({})", lambda a, g, out, x: [a.multiply(g, out)], is_unbounded=True),
    "log": Mode(1, "log", "LOG", "log({0})", "log({})", lambda a, g, out, x: [a.divide(g, x)], is_unbounded=True),
    "sqrt": Mode(1, "sqrt", "SQRT", "sqrt({0})", "√{}", lambda a, g, out, x: [a.divide(g.scaled(0.5), out)], is_unbounded=True),
    "rsqrt": Mode(
        1, lambda x: 1 / np.sqrt(x), "RSQRT", "1 / sqrt({0})", "1 / √{}",
        lambda a, g, out, x: [a.multiply(g, out, out, out).scaled(-0.5)],
        is_unbounded=True,
    ),
    "reciprocal": Mode(
        1, "reciprocal", "RECIPROCAL", "1 / {0}", "1 / {}", lambda a, g, out, x: [a.multiply(g, out, out).scaled(-1.0)],
        is_unbounded=True,
    ),
    "tanh_fwd": Mode(1, "tanh", "TANH_FWD", "tanh({0})", "tanh({})", functools.partial(of_tan, "sub")),
    "sin": Mode(1, "sin", "SIN", "sin({0})", "sin({})", lambda a, g, out, x: [a.multiply(g, a.writer.add("cos", x))]),
    "cos": Mode(
        1, "cos", "COS", "cos({0})", "cos({})", lambda a, g, out, x: [a.multiply(g, a.writer.add("sin", x)).scaled(-1.0)]
    ),
    "tan": Mode(1, "tan", "TAN", "tan({0})", "tan({})", functools.partial(of_tan, "add"), is_unbounded=True),
    "erf": Mode(1, np.vectorize(math.erf, otypes=[np.float64]), "ERF", "erf({0})", "erf({})", of_erf),
    "floor": Mode(1, "floor", "FLOOR", "floor({0})", "⌊{}⌋", of_none, "{0}"),
    "ceil": Mode(1, "ceil", "CEIL", "ceil({0})", "⌈{}⌉", of_none, "{0}"),
    "identity": Mode(1, lambda x: x, "IDENTITY", "{0}", "{}", lambda a, g, out, x: [g]),
    "cmp_eq": _comparison("equal", "CMP_EQ", "==", "=", "cmp_eq", "cmp_neq"),
    "cmp_neq": _comparison("not_equal", "CMP_NEQ", "!=", "≠", "cmp_neq", "cmp_eq"),
    "cmp_ge": _comparison("greater_equal", "CMP_GE", ">=", "≥", "cmp_le", "cmp_lt"),
    "cmp_gt": _comparison("greater", "CMP_GT", ">", ">", "cmp_lt", "cmp_le"),
    "cmp_le": _comparison("less_equal", "CMP_LE", "<=", "≤", "cmp_ge", "cmp_gt"),
    "cmp_lt": _comparison("less", "CMP_LT", "<", "<", "cmp_gt", "cmp_ge"),
    "logical_and": Mode(2, "logical_and", "LOGICAL_AND", "{0} != 0 && {1} != 0", "{} and {}", of_none, commutes=True),
    "logical_or": Mode(2, "logical_or", "LOGICAL_OR", "{0} != 0 || {1} != 0", "{} or {}", of_none, commutes=True),
    "binary_select": Mode(  # x where condition, else b
        3, lambda x, b, condition: np.where(condition, x, b), "BINARY_SELECT", "{2} != 0 ? {0} : {1}",
        "{0} where {2}, else {1}", of_select, is_closed=True,
    ),
    "log1p": Mode(
        1, "log1p", _log1p, "", "", lambda a, g, out, x: [a.divide(g, a.writer.add("add", x, a.writer.constant(1.0)))],
        is_unbounded=True,
    ),
    "expm1": Mode(1, "expm1", _expm1, "", "", lambda a, g, out, x: [a.multiply(g, a.writer.add("exp", x))], is_unbounded=True),
    "hypot": Mode(
        2, "hypot", _hypot, "", "", lambda a, g, out, x, b: [a.divide(a.multiply(g, operand), out) for operand in (x, b)],
        is_unbounded=True,
    ),
    "atan": Mode(
        1, "arctan", _atan, "", "",
        lambda a, g, out, x: [a.divide(g, a.writer.add("add", a.writer.add("mul", x, x), a.writer.constant(1.0)))],
    ),
}  # fmt: skip
#: For every comparison, the same comparison with swapped operands, and its negation.
FLIPPED = {mode: row.flipped for mode, row in MODES.items() if row.flipped}
OPPOSITE = {mode: row.opposite for mode, row in MODES.items() if row.opposite}
#: The modes whose result is a condition.
CONDITIONS = frozenset({*OPPOSITE, "logical_and", "logical_or"})
