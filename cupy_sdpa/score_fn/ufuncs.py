"""numpy's functions of traced values: each by steps that every engine has (:data:`FUNCTIONS`).

Python's operators go by them, too: ``x + y`` is ``np.add(x, y)``.
"""

from __future__ import annotations

import math
import numbers
import operator
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .expression import Kind
from .proxy import Tracer, Value, as_value

#: Code that stands between a person's line and what is written down for it: ours, and numpy's of the operators.
_BETWEEN = tuple(os.path.join(os.path.dirname(module), "") for module in (__file__, np.__file__))


def _tracer_of(*operands: Any) -> Tracer:
    return next(x.tracer for x in operands if isinstance(x, Value))


def _is_integer(x: Any) -> bool:
    """Whether an operand is an integer or a condition, which counts as 1 or 0."""
    if isinstance(x, Value):
        return x.kind != "float"
    return isinstance(x[()] if isinstance(x, np.ndarray) and not x.ndim else x, (numbers.Integral, np.bool_))


def _operands(*operands: Any, tracer: Tracer | None = None) -> list[Value]:
    """What is computed with, as numbers. Unless all are integers, those that are not traced become floats."""
    tracer = tracer or _tracer_of(*operands)
    kind: Kind = "int" if all(map(_is_integer, operands)) else "float"
    one, zero = (1, 0) if kind == "int" else (1.0, 0.0)
    values = (as_value(tracer, x, kind) for x in operands)
    return [_where(x, one, zero) if x.kind == "bool" else x for x in values]


def _written(mode: str, *operands: Value, kind: Kind | None = None) -> Value:
    """A step, and where the person wrote it."""
    tracer = operands[0].tracer
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    tracer.lines.setdefault(mode, f"{frame.f_code.co_filename}:{frame.f_lineno}")
    result = Value(tracer, tracer.writer.add(mode, *(x.step for x in operands), kind=kind))
    bounds = [_bound(x) for x in operands[:2]]
    known = [bound for bound in bounds if bound is not None]
    if len(known) == len(bounds) and mode in _BOUNDS:
        tracer.bounds[result.step] = _BOUNDS[mode](*known)
    elif mode == "abs" or (mode == "max" and known):
        tracer.bounds[result.step] = _UNBOUNDED
    return result


#: Steps that give no integer below 0 where their operands are none: the largest integer that they give.
_BOUNDS: dict[str, Callable[..., int]] = {
    "add": operator.add, "mul": operator.mul, "min": min, "max": max, "div": lambda x, b: x, "binary_select": max,
    "abs": lambda x: x,
}  # fmt: skip
_UNBOUNDED = 2**63


def _bound(x: Value) -> int | None:
    """The largest integer that a value may be where it is known to be 0 or more, else None."""
    mode, _, name, kind, value = x.tracer.writer.steps[x.step]
    if kind != "int":
        return None
    if mode == "index":
        return x.tracer.sizes.get(name, _UNBOUNDED)
    if mode in ("number", "constant"):
        number = int(x.tracer.numbers.get(name, -1) if mode == "number" else value)
        return number if number >= 0 else None
    return x.tracer.bounds.get(x.step)


def _unary(mode: str, x: Any) -> Value:
    (x,) = _operands(x)
    return _written(mode, x)


def _rounded(mode: str, x: Any) -> Value:
    (x,) = _operands(x)
    return x if x.kind == "int" else _written(mode, x)


def _binary(mode: str, x: Any, b: Any) -> Value:
    x, b = _operands(x, b)
    return _written(mode, x, b)


def _compare(mode: str, x: Any, b: Any) -> Value:
    x, b = _operands(x, b)
    return _written(mode, x, b)


def _conditions(*operands: Any) -> list[Value]:
    tracer = _tracer_of(*operands)
    values = [as_value(tracer, x) for x in operands]
    for x in values:
        if x.kind != "bool":
            raise TypeError(
                "&, |, ^ and ~ join conditions; a number is given: write x % 2 == 1 for a bit, x != 0 for a condition"
            )
    return values


def _logical(mode: str, x: Any, b: Any) -> Value:
    given = _conditions(x, b)
    for one, other in (given, given[::-1]):
        known = one.tracer.writer.value(one.step)
        if known is not None:  # True & x, False | x
            return other if bool(known) == (mode == "logical_and") else one
    return _written(mode, *given)


def _not(x: Any) -> Value:
    if isinstance(x, (bool, np.bool_)):
        return not x  # type: ignore[return-value]  # it meets a traced condition next
    (x,) = _conditions(x)
    known = x.tracer.writer.value(x.step)
    return as_value(x.tracer, not known) if known is not None else Value(x.tracer, x.tracer.writer.opposite(x.step))


def _exclusive(x: Any, b: Any) -> Value:
    return _logical("logical_or", _logical("logical_and", x, _not(b)), _logical("logical_and", _not(x), b))


def _where(condition: Any, x: Any = None, b: Any = None) -> Value:
    if x is None or b is None:
        raise TypeError("np.where is called without both values: write np.where(condition, a, b)")
    tracer = _tracer_of(condition, x, b)
    (chosen,) = _conditions(as_value(tracer, condition))
    one, other = as_value(tracer, x), as_value(tracer, b)
    if one.kind == other.kind == "bool":
        return _logical("logical_or", _logical("logical_and", chosen, one), _logical("logical_and", _not(chosen), other))
    known = tracer.writer.value(chosen.step)
    one, other = _operands(x, b, tracer=tracer)
    if known is not None:
        return one if known else other
    return _written("binary_select", one, other, chosen)


def _floor_divide(x: Any, b: Any) -> Value:
    """``x // b``: exact of integers; of floats the integer nearest to ``(x - x % b) / b``."""
    x, b = _divided(x, b)
    if x.kind == b.kind == "int":
        return _integer_division(x, b)[0]
    # a little more than the quotient, which may have been rounded down
    return _unary("floor", _binary("div", x - _remainder(x, b), b) + 0.25)


def _remainder(x: Any, b: Any) -> Value:
    """``x % b``, of the sign of b, as numpy computes it: exact of integers, and of floats but for the last addition."""
    x, b = _divided(x, b)
    if x.kind == b.kind == "int":
        return _integer_division(x, b)[1]
    rest = _written("mod", x, b)
    return _where(_low(rest, b), rest + b, rest)


#: cuDNN divides INT32 in float32 and truncates: up to this integer that is the exact quotient.
_EXACT_DIVISION = 1 << 22


def _integer_division(x: Value, b: Value) -> tuple[Value, Value]:
    """``x // b`` and ``x % b``, exact also where the quotient is computed in float32.

    A quotient of large integers is wrong by up to ``x / b`` times 2**-22. What is left is divided once more, and what is then
    missing is at most 1. The products and differences of integers are exact, modulo 2**32.
    """
    quotient = _written("div", x, b, kind="int")
    rest = x - quotient * b
    top, divisor = _bound(x), _bound(b)
    if top is None or divisor is None or max(top, divisor) > _EXACT_DIVISION:
        more = _written("div", rest, b, kind="int")
        quotient, rest = quotient + more, rest - more * b
        low, high = _low(rest, b), _high(rest, b)
        quotient = _where(low, quotient - 1, _where(high, quotient + 1, quotient))
        rest = _where(low, rest + b, _where(high, rest - b, rest))
    if divisor is not None:  # positive, or the result has no meaning
        rest.tracer.bounds[rest.step] = divisor
        if top is not None:
            quotient.tracer.bounds[quotient.step] = top
    return quotient, rest


def _divided(x: Any, b: Any) -> list[Value]:
    """The operands of a division."""
    if isinstance(b, numbers.Real) and b == 0:
        raise ZeroDivisionError("a traced value is divided by 0")
    return _operands(x, b)


def _divisor_sign(b: Value) -> int | None:
    """1 or -1 where the sign of a divisor is known, else None."""
    mode, _, name, *_ = b.tracer.writer.steps[b.step]
    divisor = b.tracer.numbers.get(name) if mode == "number" else b.tracer.writer.value(b.step)
    if divisor is None:
        return None if _bound(b) is None else 1
    return 1 if divisor > 0 else -1


def _low(rest: Value, b: Value) -> Any:
    """Whether a rest has not the sign of the divisor: the quotient is 1 too large."""
    sign = _divisor_sign(b)
    if sign is None:
        return ((rest < 0) & (b > 0)) | ((rest > 0) & (b < 0))
    return rest < 0 if sign > 0 else rest > 0


def _high(rest: Value, b: Value) -> Any:
    """Whether a rest reaches the divisor: the quotient is 1 too small."""
    sign = _divisor_sign(b)
    if sign is None:
        return ((rest >= b) & (b > 0)) | ((rest <= b) & (b < 0))
    return rest >= b if sign > 0 else rest <= b


def _power(x: Any, b: Any) -> Value:
    if isinstance(b, numbers.Real):
        powers: dict[float, Callable[[Any], Value]] = {
            0.0: lambda x: 0.0 * x + 1.0, 1.0: lambda x: x, 2.0: _square, 3.0: lambda x: x * x * x,
            4.0: lambda x: _square(_square(x)),
            0.5: lambda x: _unary("sqrt", x), -0.5: lambda x: _unary("rsqrt", x), -1.0: lambda x: _unary("reciprocal", x),
        }  # fmt: skip
        if float(b) in powers:
            return powers[float(b)](x)
    if isinstance(x, numbers.Real):
        if x <= 0:
            raise ValueError(f"{x} to a traced power; the base must be above 0")
        return _unary("exp", _binary("mul", b, math.log(x)))
    return _binary("pow", x, b)


def _square(x: Any) -> Value:
    return _binary("mul", x, x)


def _sign(x: Any) -> Value:
    one = 1 if _is_integer(x) else 1.0
    return _where(x > 0, one, _where(x < 0, -one, 0 * one))


def _clip(x: Any, low: Any = None, high: Any = None) -> Any:
    clipped = x if low is None else _binary("max", x, low)
    return clipped if high is None else _binary("min", clipped, high)


def _softplus(x: Any) -> Value:
    """``log(1 + exp x)``, which does not overflow."""
    below = _unary("exp", _unary("neg", _unary("abs", x)))
    return _binary("add", _binary("max", x, 0.0), _unary("log", _binary("add", below, 1.0)))


def _sigmoid(x: Any) -> Value:
    """``1 / (1 + exp(-x)) = (1 + tanh(x / 2)) / 2``."""
    return _binary("add", _binary("mul", _unary("tanh_fwd", _binary("mul", x, 0.5)), 0.5), 0.5)


#: numpy's functions, and SciPy's erf and expit, by their names.
FUNCTIONS: Mapping[str, Callable[..., Value]] = {
    **{
        name: (lambda x, b, mode=mode: _binary(mode, x, b))
        for name, mode in (
            ("add", "add"), ("subtract", "sub"), ("multiply", "mul"), ("divide", "div"), ("true_divide", "div"),
            ("maximum", "max"),
            ("minimum", "min"), ("fmax", "max"), ("fmin", "min"),
        )
    },
    **{
        name: (lambda x, mode=mode: _unary(mode, x))
        for name, mode in (
            ("negative", "neg"), ("absolute", "abs"), ("abs", "abs"), ("fabs", "abs"), ("exp", "exp"), ("log", "log"),
            ("sqrt", "sqrt"), ("reciprocal", "reciprocal"), ("tanh", "tanh_fwd"), ("sin", "sin"), ("cos", "cos"),
            ("tan", "tan"),
            ("erf", "erf"), ("expm1", "expm1"), ("log1p", "log1p"),
        )
    },
    "floor": lambda x: _rounded("floor", x),
    "ceil": lambda x: _rounded("ceil", x),
    **{
        name: (lambda x, b, mode=mode: _compare(mode, x, b))
        for name, mode in (
            ("equal", "cmp_eq"), ("not_equal", "cmp_neq"), ("greater", "cmp_gt"), ("greater_equal", "cmp_ge"),
            ("less", "cmp_lt"),
            ("less_equal", "cmp_le"),
        )
    },
    "logical_and": lambda x, b: _logical("logical_and", x, b),
    "bitwise_and": lambda x, b: _logical("logical_and", x, b),
    "logical_or": lambda x, b: _logical("logical_or", x, b),
    "bitwise_or": lambda x, b: _logical("logical_or", x, b),
    "logical_xor": _exclusive,
    "bitwise_xor": _exclusive,
    "logical_not": _not,
    "invert": _not,
    "where": _where,
    "clip": _clip,
    "sign": _sign,
    "square": _square,
    "positive": lambda x: x,
    "power": _power,
    "float_power": _power,
    "floor_divide": _floor_divide,
    "remainder": _remainder,
    "exp2": lambda x: _unary("exp", _binary("mul", x, math.log(2))),
    "log2": lambda x: _binary("mul", _unary("log", x), 1 / math.log(2)),
    "log10": lambda x: _binary("mul", _unary("log", x), 1 / math.log(10)),
    "logaddexp": lambda x, b: _binary("add", _softplus(_binary("sub", b, x)), x),
    "sinh": lambda x: _binary("mul", _binary("sub", _unary("exp", x), _unary("exp", -x)), 0.5),
    "cosh": lambda x: _binary("mul", _binary("add", _unary("exp", x), _unary("exp", -x)), 0.5),
    "expit": _sigmoid,
    "hypot": lambda x, b: _binary("hypot", x, b),
}  # fmt: skip
