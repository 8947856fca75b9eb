"""Numpy functions of traced values, as steps that every engine supports (:data:`FUNCTIONS`).

Python's operators also use them: ``x + y`` is ``np.add(x, y)``.

To add a function, compose it of existing modes in :data:`FUNCTIONS`. A new mode is a row of :mod:`.modes`.
"""

from __future__ import annotations

import functools
import math
import numbers
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .expression import Kind
from .modes import MODES
from .proxy import Tracer, Value, as_value, line_of_function


def _tracer_of(*operands: Any) -> Tracer:
    return next(x.tracer for x in operands if isinstance(x, Value))


def _is_integer(x: Any) -> bool:
    """True if an operand is an integer or a condition (1 or 0)."""
    if isinstance(x, Value):
        return x.kind != "float"
    return isinstance(x[()] if isinstance(x, np.ndarray) and not x.ndim else x, (numbers.Integral, np.bool_))


def _operands(*operands: Any, tracer: Tracer | None = None) -> list[Value]:
    """Return the operands as traced numbers. Unless all are integers, Python numbers become floats."""
    tracer = tracer or _tracer_of(*operands)
    kind: Kind = "int" if all(map(_is_integer, operands)) else "float"
    one, zero = (1, 0) if kind == "int" else (1.0, 0.0)
    values = (as_value(tracer, x, kind) for x in operands)
    return [_where(x, one, zero) if x.kind == "bool" else x for x in values]


def _record(mode: str, *operands: Value, kind: Kind | None = None) -> Value:
    """Record a step, the source line that it comes from, and the bound of an integer result."""
    tracer = operands[0].tracer
    tracer.lines.setdefault(mode, tracer.line or line_of_function())
    result = Value(tracer, tracer.writer.add(mode, *(x.step for x in operands), kind=kind))
    bounds = [_upper_bound(x) for x in operands[:2]]
    non_negative = [bound for bound in bounds if bound is not None]
    if len(non_negative) == len(bounds) and mode in _BOUNDS:
        tracer.bounds[result.step] = _BOUNDS[mode](*non_negative)
    elif mode == "abs" or (mode == "max" and non_negative):
        tracer.bounds[result.step] = _UNBOUNDED
    return result


#: Modes whose integer result is non-negative if the operands are: upper bounds of operands -> upper bound of the result.
_BOUNDS: dict[str, Callable[..., int]] = {
    "add": operator.add, "mul": operator.mul, "min": min, "max": max, "div": lambda x, b: x, "binary_select": max,
    "abs": lambda x: x,
}  # fmt: skip
_UNBOUNDED = 2**63


def _upper_bound(x: Value) -> int | None:
    """Return an upper bound of a non-negative integer; None if the value may be negative or is not an integer."""
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
    return _record(mode, x)


def _rounded(mode: str, x: Any) -> Value:
    (x,) = _operands(x)
    return x if x.kind == "int" else _record(mode, x)


def _binary(mode: str, x: Any, b: Any) -> Value:
    x, b = _operands(x, b)
    return _record(mode, x, b)


def _conditions(*operands: Any) -> list[Value]:
    tracer = _tracer_of(*operands)
    values = [as_value(tracer, x) for x in operands]
    for x in values:
        if x.kind != "bool":
            raise TypeError(
                "&, |, ^ and ~ need conditions, or an integer and a number, such as q_idx & 3; x != 0 is a condition"
            )
    return values


def _logical(mode: str, x: Any, b: Any) -> Value:
    first, second = _conditions(x, b)
    for condition, other in ((first, second), (second, first)):
        constant = condition.tracer.writer.value(condition.step)
        if constant is not None:  # True & other, False | other
            return other if bool(constant) == (mode == "logical_and") else condition
    return _record(mode, first, second)


def _not(x: Any) -> Value:
    if isinstance(x, (bool, np.bool_)):
        return not x  # type: ignore[return-value]  # the caller combines it with a traced condition
    (x,) = _conditions(x)
    constant = x.tracer.writer.value(x.step)
    return as_value(x.tracer, not constant) if constant is not None else Value(x.tracer, x.tracer.writer.opposite(x.step))


def _logical_xor(x: Any, b: Any) -> Value:
    x, b = _conditions(x, b)
    return _logical("logical_or", _logical("logical_and", x, _not(b)), _logical("logical_and", _not(x), b))


def _bitwise(logical: Callable[[Any, Any], Value], of_bits: Callable[[Any, int, Any], Value], x: Any, b: Any) -> Value:
    """Return an operation on two conditions, or on a traced integer x and the bits of a number, in any order.

    ``of_bits`` takes x, the number, and ``x & number``.
    """
    for value, number in ((x, b), (b, x)):
        is_number = isinstance(number, numbers.Integral) and not isinstance(number, bool)
        if is_number and isinstance(value, Value) and value.kind == "int":
            return of_bits(value, int(number), _bits_of(value, int(number)))
    return logical(x, b)


def _bits_of(x: Value, number: int) -> Any:
    """``x & number``: runs of bits by divisions and remainders, which are exact and round down, as in two's complement."""
    if number < 0:
        return x - _bits_of(x, ~number)
    total, low = 0 * x, 0
    while number >> low:
        run = 0
        while number >> low + run & 1:
            run += 1
        if run:
            total = total + x // (1 << low) % (1 << run) * (1 << low)
        low += run or 1
    return total


def _shifted(x: Any, count: Any, *, left: bool) -> Value:
    """``x << count`` or ``x >> count`` of a traced integer, as a product or a quotient that is rounded down."""
    if not isinstance(count, numbers.Integral) or not isinstance(x, Value) or x.kind != "int" or count < 0:
        raise TypeError("<< and >> take a traced integer and a number of bits, such as q_idx >> 3: use // and * otherwise")
    return _binary("mul", x, 1 << int(count)) if left else _floor_divide(x, 1 << int(count))


def _round(x: Any, decimals: int = 0) -> Value:
    """Return the nearest integer; of two, the even one."""
    if decimals:
        raise TypeError(f"np.round was called with {decimals} decimals; round x * 10**decimals, and divide by 10**decimals")
    (number,) = _operands(x)
    if number.kind == "int":
        return number
    below = _unary("floor", number)
    rest = number - below
    return below + _where(rest == 0.5, _remainder(below, 2.0), _where(rest > 0.5, 1.0, 0.0))  # type: ignore[no-any-return]


def _where(condition: Any, x: Any = None, b: Any = None) -> Value:
    if x is None or b is None:
        raise TypeError("np.where needs three arguments: write np.where(condition, a, b)")
    tracer = _tracer_of(condition, x, b)
    (c,) = _conditions(as_value(tracer, condition))
    first, second = as_value(tracer, x), as_value(tracer, b)
    if first.kind == second.kind == "bool":
        return _logical("logical_or", _logical("logical_and", c, first), _logical("logical_and", _not(c), second))
    constant = tracer.writer.value(c.step)
    first, second = _operands(x, b, tracer=tracer)
    if constant is not None:
        return first if constant else second
    return _record("binary_select", first, second, c)


def _floor_divide(x: Any, b: Any) -> Value:
    """``x // b``: exact for integers; for floats the integer nearest to ``(x - x % b) / b``."""
    x, b = _division_operands(x, b)
    if x.kind == b.kind == "int":
        return _integer_division(x, b)[0]
    # the quotient may have been rounded down: add a margin before floor
    return _unary("floor", _binary("div", x - _remainder(x, b), b) + 0.25)


def _remainder(x: Any, b: Any) -> Value:
    """``x % b`` with the sign of b, as numpy defines it: exact for integers; for floats except for the last addition."""
    x, b = _division_operands(x, b)
    if x.kind == b.kind == "int":
        return _integer_division(x, b)[1]
    remainder = _record("mod", x, b)
    return _where(_has_wrong_sign(remainder, b), remainder + b, remainder)


#: cuDNN divides INT32 in float32 and truncates: the quotient is exact up to this integer.
_EXACT_DIVISION = 1 << 22


def _integer_division(x: Value, b: Value) -> tuple[Value, Value]:
    """``x // b`` and ``x % b``, exact even if the quotient is computed in float32.

    A quotient of large integers has an error of up to ``x / b`` times 2**-22. Dividing the remainder once more leaves an error
    of at most 1. Products and differences of integers are exact modulo 2**32.
    """
    quotient = _record("div", x, b, kind="int")
    remainder = x - quotient * b
    bound, divisor_bound = _upper_bound(x), _upper_bound(b)
    if bound is None or divisor_bound is None or max(bound, divisor_bound) > _EXACT_DIVISION:
        correction = _record("div", remainder, b, kind="int")
        quotient, remainder = quotient + correction, remainder - correction * b
        low, high = _has_wrong_sign(remainder, b), _reaches_divisor(remainder, b)
        quotient = _where(low, quotient - 1, _where(high, quotient + 1, quotient))
        remainder = _where(low, remainder + b, _where(high, remainder - b, remainder))
    if divisor_bound is not None:  # the divisor is positive: division by 0 is undefined
        remainder.tracer.bounds[remainder.step] = divisor_bound
        if bound is not None:
            quotient.tracer.bounds[quotient.step] = bound
    return quotient, remainder


def _division_operands(x: Any, b: Any) -> list[Value]:
    constant = b.tracer.writer.value(b.step) if isinstance(b, Value) else b
    if isinstance(constant, numbers.Real) and constant == 0:
        raise ZeroDivisionError("a traced value is divided by the constant 0: write np.inf or -np.inf for an infinite score")
    return _operands(x, b)


def _divided(x: Any, b: Any) -> Value:
    """``x / b``, a float."""
    _division_operands(x, b)
    return _binary("div", x, b)


def _divisor_sign(b: Value) -> int | None:
    """1 or -1 if the sign of a divisor is known, else None."""
    mode, _, name, *_ = b.tracer.writer.steps[b.step]
    divisor = b.tracer.numbers.get(name) if mode == "number" else b.tracer.writer.value(b.step)
    if divisor is None:
        return None if _upper_bound(b) is None else 1
    return 1 if divisor > 0 else -1


def _has_wrong_sign(remainder: Value, b: Value) -> Any:
    """Return whether a remainder and the divisor have opposite signs: the quotient is 1 too large."""
    sign = _divisor_sign(b)
    if sign is None:
        return ((remainder < 0) & (b > 0)) | ((remainder > 0) & (b < 0))
    return remainder < 0 if sign > 0 else remainder > 0


def _reaches_divisor(remainder: Value, b: Value) -> Any:
    """Return whether a remainder is at least the divisor in absolute value: the quotient is 1 too small."""
    sign = _divisor_sign(b)
    if sign is None:
        return ((remainder >= b) & (b > 0)) | ((remainder <= b) & (b < 0))
    return remainder >= b if sign > 0 else remainder <= b


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
            raise ValueError(f"the base of {x} ** traced value must be positive")
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
    """``log(1 + exp x)`` without overflow: ``max(x, 0) + log(1 + exp(-|x|))``."""
    exponential = _unary("exp", _unary("neg", _unary("abs", x)))
    return _binary("add", _binary("max", x, 0.0), _unary("log", _binary("add", exponential, 1.0)))


def _sigmoid(x: Any) -> Value:
    """``1 / (1 + exp(-x)) = (1 + tanh(x / 2)) / 2``."""
    return _binary("add", _binary("mul", _unary("tanh_fwd", _binary("mul", x, 0.5)), 0.5), 0.5)


def _of_mode(mode: str, operands: int) -> Callable[..., Value]:
    """Return the numpy function that a mode computes."""
    return functools.partial(_unary if operands == 1 else _binary, mode)


#: Numpy functions, and SciPy's erf and expit, by name: those that a mode computes, and compositions.
FUNCTIONS: Mapping[str, Callable[..., Value]] = {
    **{row.numpy: _of_mode(mode, row.operands) for mode, row in MODES.items() if isinstance(row.numpy, str) and mode != "mod"},
    **{
        name: _of_mode(mode, MODES[mode].operands)
        for name, mode in (
            ("abs", "abs"), ("fabs", "abs"), ("fmax", "max"), ("fmin", "min"), ("erf", "erf"),
        )
    },
    "floor": lambda x: _rounded("floor", x),
    "ceil": lambda x: _rounded("ceil", x),
    "trunc": lambda x: x if _is_integer(x) else _where(x < 0, _unary("ceil", x), _unary("floor", x)),
    **dict.fromkeys(("rint", "round", "around"), _round),
    "logical_and": lambda x, b: _logical("logical_and", x, b),
    "bitwise_and": lambda x, b: _bitwise(FUNCTIONS["logical_and"], lambda x, number, bits: bits, x, b),
    "logical_or": lambda x, b: _logical("logical_or", x, b),
    "bitwise_or": lambda x, b: _bitwise(FUNCTIONS["logical_or"], lambda x, number, bits: x + number - bits, x, b),
    "logical_xor": _logical_xor,
    "bitwise_xor": lambda x, b: _bitwise(_logical_xor, lambda x, number, bits: x + number - 2 * bits, x, b),
    "left_shift": lambda x, b: _shifted(x, b, left=True),
    "right_shift": lambda x, b: _shifted(x, b, left=False),
    "logical_not": _not,
    "invert": lambda x: -1 - x if isinstance(x, Value) and x.kind == "int" else _not(x),
    **dict.fromkeys(("divide", "true_divide"), _divided),
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
}  # fmt: skip
