"""The score and mask functions that the self-test draws: plain Python functions that also accept numpy arrays.

The package traces them. The reference calls them with numpy arrays that broadcast to ``(B, Hq, Sq, Skv)``. Each captured array
is read with one index expression, so its gradient is the sum of dS times an elementwise derivative.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


class Function(NamedTuple):
    """A score or mask function and the arrays that it captures.

    Attributes:
        call: the function, with FlexAttention's signature.
        tensors: the axes of each captured array: letters of ``bhqk``, or a digit for an axis of that length, which is read
            at its last index.
        kind: the kind of the arrays' values: ``"float"``, ``"int"``, ``"bool"``, or ``"number"`` (float or int).
    """

    call: Callable[..., Any]
    tensors: Mapping[str, str] = {}
    kind: str = "float"


#: The dtypes of each kind of values; float64 and int64 are drawn on the CPU engine only.
DTYPES = {
    "float": ("float16", "bfloat16", "float32", "float64"),
    "int": ("int32", "int64"),
    "bool": ("bool",),
    "number": ("float16", "bfloat16", "float32", "int32", "int64"),
}

#: Score functions. Their derivatives are finite; the reference detects points where one is not differentiable.
SCORES: dict[str, Function] = {
    "tanh": Function(lambda s, b, h, q, k: 3 * np.tanh(s / 3)),
    "double": Function(lambda s, b, h, q, k: 2 * s),
    "square": Function(lambda s, b, h, q, k: s + 0.1 * s * s),
    "abs": Function(lambda s, b, h, q, k: abs(s)),
    "log1p": Function(lambda s, b, h, q, k: np.log1p(s * s) - s),
    "sigmoid": Function(lambda s, b, h, q, k: 3 / (1 + np.exp(-s))),
    "sqrt": Function(lambda s, b, h, q, k: np.sqrt(s * s + 0.5)),
    "sin": Function(lambda s, b, h, q, k: s + np.sin(s)),
    "maximum": Function(lambda s, b, h, q, k: np.maximum(s, 0.25 * s)),
    "constant": Function(lambda s, b, h, q, k: 0.5),
    "distance": Function(lambda s, b, h, q, k: s - 0.05 * abs(q - k)),
    "relative": Function(lambda s, b, h, q, k: s + 0.01 * (k - q)),
    "near_key_100": Function(lambda s, b, h, q, k: s - 0.5 * abs(k - 100)),
    "first_keys": Function(lambda s, b, h, q, k: s - 0.03 * k),
    "fading": Function(lambda s, b, h, q, k: s * np.exp(-0.02 * abs(q - k))),
    "every_third": Function(lambda s, b, h, q, k: np.where(k % 3 == 1, s, 0.5 * s - 1)),
    "blocks": Function(lambda s, b, h, q, k: s + 0.25 * (k // 16 - q // 16 + k % 4)),
    "where_score": Function(lambda s, b, h, q, k: np.where(s > 0, s, 0.25 * s)),
    "later": Function(lambda s, b, h, q, k: np.where(q >= k, s, -1.0)),
    "near": Function(lambda s, b, h, q, k: np.where(k + 5 > q, s, 0.5)),
    "hidden": Function(lambda s, b, h, q, k: np.where(q + 3 >= k, s, -np.inf)),
    "by_head": Function(lambda s, b, h, q, k: s * (h + 1) / 4),
    "by_batch": Function(lambda s, b, h, q, k: s * (1 + 0.25 * b) - 0.01 * b * k),
    "number": Function(lambda s, b, h, q, k, x: s * x, {"x": ""}),
    "place": Function(lambda s, b, h, q, k, x: s + x[1] * 0.05 * abs(q - k), {"x": "2"}),
    "gain_h": Function(lambda s, b, h, q, k, x: s * x[h], {"x": "h"}),
    "slope_h": Function(lambda s, b, h, q, k, x: s - 0.1 * x[h] * abs(q - k), {"x": "h"}),
    "bias_k": Function(lambda s, b, h, q, k, x: s + x[k], {"x": "k"}, "number"),
    "bias_bk": Function(lambda s, b, h, q, k, x: s + x[b, k], {"x": "bk"}, "number"),
    "gain_q": Function(lambda s, b, h, q, k, x: s * x[q], {"x": "q"}),
    "gain_bhq": Function(lambda s, b, h, q, k, x: s * x[b, h, q], {"x": "bhq"}),
    "bias_b": Function(lambda s, b, h, q, k, x: s * (1 + 0.1 * x[b]), {"x": "b"}),
    "bias_bh": Function(lambda s, b, h, q, k, x: s * x[b, h] + 0.01 * k, {"x": "bh"}),
    "bias_hqk": Function(lambda s, b, h, q, k, x: s + x[h, q, k], {"x": "hqk"}, "number"),
    "bias_kq": Function(lambda s, b, h, q, k, x: s + x[k, q], {"x": "kq"}),
    "bias_all": Function(lambda s, b, h, q, k, x: 3 * np.tanh((s + x[b, h, q, k]) / 3), {"x": "bhqk"}),
    "chosen": Function(lambda s, b, h, q, k, x: np.where(x[b, k], s, s - 2), {"x": "bk"}, "bool"),
    "later_bias": Function(lambda s, b, h, q, k, x: np.where(q >= k, s, -1.0) + x[b, k], {"x": "bk"}),
    "two": Function(lambda s, b, h, q, k, x, y: s * x[h] + y[b, k], {"x": "h", "y": "bk"}),
    "positions": Function(lambda s, b, h, q, k, x, y: s - 0.05 * abs(x[q] - y[k]), {"x": "q", "y": "k"}, "int"),
}

#: Mask functions. Their arrays have other names, because a call may also have a score function.
MASKS: dict[str, Function] = {
    "causal": Function(lambda b, h, q, k: q >= k),
    "window": Function(lambda b, h, q, k: (q - k <= 5) & (k - q <= 3)),
    "near": Function(lambda b, h, q, k: abs(q - k) <= 20),
    "key_100": Function(lambda b, h, q, k: k == 100),
    "from_key_100": Function(lambda b, h, q, k: (k >= 100) | (q >= k)),
    "not_own": Function(lambda b, h, q, k: ~(q == k)),
    "dilated": Function(lambda b, h, q, k: (q - k) % 3 == 0),
    "checkered": Function(lambda b, h, q, k: (q + k + h) % 2 == 0),
    "chunks": Function(lambda b, h, q, k: q // 16 == k // 16),
    "by_batch": Function(lambda b, h, q, k: k >= b),
    "nothing": Function(lambda b, h, q, k: k < 0),
    "all": Function(lambda b, h, q, k: k >= 0),
    "keys": Function(lambda b, h, q, k, u: u[b, k], {"u": "bk"}, "bool"),
    "rows": Function(lambda b, h, q, k, u: u[q] & (k >= 0), {"u": "q"}, "bool"),
    "table": Function(lambda b, h, q, k, u: u[h, q, k], {"u": "hqk"}, "bool"),
    "documents": Function(lambda b, h, q, k, u, w: u[b, q] == w[b, k], {"u": "bq", "w": "bk"}, "int"),
    "head_window": Function(lambda b, h, q, k, u: abs(q - k) <= u[h] + 2, {"u": "h"}, "int"),
    "prefix": Function(lambda b, h, q, k, u: (k < u[b] + 3) | (q >= k), {"u": "b"}, "int"),
    "positive": Function(lambda b, h, q, k, u: u[k] > 0.75, {"u": "k"}, "float"),
}


def function_of(option: str, name: str) -> Function:
    """Return a function by its option, ``score_mod`` or ``mask_mod``, and its name; or by its program (:func:`of_program`)."""
    if name.startswith("{"):
        return of_program(option, name)
    return SCORES[name] if option == "score_mod" else MASKS[name]


def tensor_shape(axes: str, b: int, h: int, q: int, k: int) -> tuple[int, ...]:
    """Return the shape of a captured array with the given axes.

    >>> tensor_shape("hk2", 1, 4, 5, 6)
    (4, 6, 2)
    """
    sizes = {"b": b, "h": h, "q": q, "k": k}
    return tuple(int(axis) if axis.isdigit() else sizes[axis] for axis in axes)


# Functions of saved problems

#: The parameters of the functions before the arrays.
PARAMETERS = {"score_mod": ("score", "b", "h", "q_idx", "kv_idx"), "mask_mod": ("b", "h", "q_idx", "kv_idx")}
#: The steps without operands.
_LEAVES = ("score", "index", "number", "constant", "captured")
#: What computes the other steps, independently of the package.
_NUMPY: dict[str, Callable[..., Any]] = {
    "abs": np.absolute, "add": np.add, "atan": np.arctan, "binary_select": lambda x, b, condition: np.where(condition, x, b),
    "ceil": np.ceil, "cmp_eq": np.equal, "cmp_ge": np.greater_equal, "cmp_gt": np.greater, "cmp_le": np.less_equal,
    "cmp_lt": np.less, "cmp_neq": np.not_equal, "cos": np.cos, "div": np.divide, "erf": np.vectorize(math.erf, otypes=[float]),
    "exp": np.exp, "expm1": np.expm1, "floor": np.floor, "hypot": np.hypot, "identity": lambda x: x, "log": np.log,
    "log1p": np.log1p, "logical_and": np.logical_and, "logical_or": np.logical_or, "max": np.maximum, "min": np.minimum,
    "mod": np.fmod, "mul": np.multiply, "neg": np.negative, "pow": np.power, "reciprocal": np.reciprocal,
    "rsqrt": lambda x: 1 / np.sqrt(x), "sin": np.sin, "sqrt": np.sqrt, "sub": np.subtract, "tan": np.tan, "tanh_fwd": np.tanh,
}  # fmt: skip
#: The modes whose result is not negative if the operands are not.
_KEEP_SIGN = frozenset({"add", "mul", "div", "min", "max", "abs"})


@functools.lru_cache(maxsize=64)
def of_program(option: str, text: str) -> Function:
    """Return the function that a program computes, for ``score_mod`` or ``mask_mod``. Scalars have arbitrary values.

    The program is a JSON object: ``steps`` as in a file of problems, the last one is the result; and ``arrays``, the axes of
    each captured array, as in :attr:`Function.tensors`.

    Raises:
        ValueError: the program has an unknown step.

    >>> steps = '[{"mode": "score"}, {"mode": "captured", "name": "t0"}, {"mode": "mul", "args": [0, 1]}]'
    >>> function = of_program("score_mod", '{"arrays": {"t0": "h"}, "steps": %s}' % steps)
    >>> function.call(2.0, 0, 1, 0, 0, t0=np.array([1.0, 3.0]))
    np.float64(6.0)
    """
    found = json.loads(text)
    steps = [_Step(**{**step, "args": tuple(step.get("args", ()))}) for step in found["steps"]]
    axes: dict[str, str] = dict(found["arrays"])
    if unknown := [step.mode for step in steps if step.mode not in (*_LEAVES, *_NUMPY)]:
        raise ValueError(f"a program has the step {unknown[0]}, which the self-test does not know")
    numbers = [step for step in steps if step.mode == "number"]
    literals = {step.name: 3 + i if step.kind == "int" else 0.75 + 0.125 * i for i, step in enumerate(numbers)}
    letters = {"b": "b", "h": "h", "q": "q_idx", "k": "kv_idx"}

    def call(*positions: Any, **arrays: Any) -> Any:
        given = dict(zip(PARAMETERS[option], positions, strict=True))
        values: list[Any] = []
        for step in steps:
            operands = [values[arg] for arg in step.args]
            match step.mode:
                case "score" | "index":
                    values.append(given[step.name or "score"])
                case "number":
                    values.append(literals[step.name])
                case "constant":
                    values.append({"int": int, "bool": bool, "float": float}[step.kind](step.value))
                case "captured":
                    index = tuple(int(axis) - 1 if axis.isdigit() else given[letters[axis]] for axis in axes[step.name])
                    values.append(arrays[step.name][index])
                case "div" if step.kind == "int":
                    values.append(_truncated(*operands, positive=all(_is_positive(steps, arg) for arg in step.args)))
                case mode:
                    values.append(_NUMPY[mode](*operands))
        return values[-1]

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    call.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in (*PARAMETERS[option], *axes)])  # type: ignore[attr-defined]
    return Function(call, axes)


class _Step(NamedTuple):
    """A step of a program, as in a file of problems; a value that is not finite is a text."""

    mode: str
    args: tuple[int, ...] = ()
    name: str = ""
    kind: str = "float"
    value: float | str = 0.0


def _is_positive(steps: Sequence[_Step], index: int) -> bool:
    """True if a step is known to be 0 or more."""
    step = steps[index]
    if step.mode in ("index", "number") or (step.mode == "constant" and float(step.value) >= 0):
        return True
    return step.mode in _KEEP_SIGN and (step.mode == "abs" or all(_is_positive(steps, arg) for arg in step.args))


def _truncated(x: Any, b: Any, *, positive: bool) -> Any:
    """Return the quotient of integers, rounded to 0."""
    if positive:
        return x // b
    quotient = abs(x) // abs(b)
    return np.where(np.logical_xor(np.less(x, 0), np.less(b, 0)), -quotient, quotient)
