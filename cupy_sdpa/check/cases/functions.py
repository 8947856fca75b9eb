"""The score and mask functions that the self-test draws: plain Python functions that also accept numpy arrays.

The package traces them. The reference calls them with numpy arrays that broadcast to ``(B, Hq, Sq, Skv)``. Each captured array
is read with one index expression, so its gradient is a sum of the gradient of the scores times an elementwise derivative.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


class Function(NamedTuple):
    """A score or mask function and the arrays that it captures.

    Attributes:
        call: the function, with FlexAttention's signature.
        tensors: the axes of each captured array: letters of ``bhqk``, or a digit for an axis of that length, which is read at
            its last index.
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

# Not drawn until integers above 2^24 are exact in score functions; then move these into the tables above.
PENDING_SCORES = {"large_product": Function(lambda s, b, h, q, k: s + 0.5 * ((k * 8192 + q) % 3))}
PENDING_MASKS = {"large_product": Function(lambda b, h, q, k: (k * 8192 + q) % 3 > 0)}


def function_of(option: str, name: str) -> Function:
    """A function by its option, ``score_mod`` or ``mask_mod``, and its name; or by its source code, lines joined by ``; ``."""
    if name.count("return "):
        return _of_source(option, name)
    return {**SCORES, **PENDING_SCORES}[name] if option == "score_mod" else {**MASKS, **PENDING_MASKS}[name]


def tensor_shape(axes: str, b: int, h: int, q: int, k: int) -> tuple[int, ...]:
    """The shape of a captured array with the given axes.

    >>> tensor_shape("hk2", 1, 4, 5, 6)
    (4, 6, 2)
    """
    sizes = {"b": b, "h": h, "q": q, "k": k}
    return tuple(int(axis) if axis.isdigit() else sizes[axis] for axis in axes)


# Functions of a trace

#: The parameters of the functions before the arrays.
PARAMETERS = {"score_mod": ("score", "b", "h", "q_idx", "kv_idx"), "mask_mod": ("b", "h", "q_idx", "kv_idx")}
#: The axes of the scores, by the letters of :attr:`Function.tensors`.
_LETTERS = {"b": "b", "h": "h", "q_idx": "q", "kv_idx": "k"}
#: A line of a recorded function, and the read of a captured array.
_OPERAND = r"(?:[A-Za-z]\w*|-?(?:np\.inf|np\.nan|\d[\d.]*(?:e[+-]?\d+)?))"
_OPERANDS = rf"{_OPERAND}(?:, {_OPERAND})*"
_CALL = re.compile(rf"t\d+ = (np|special)\.([a-z]\w*)\({_OPERANDS}\)")
_READ = re.compile(rf"t\d+ = ([A-Za-z]\w*)\[({_OPERANDS})\]")
_NAME = re.compile(r"(?<![\w.])(?!t\d+\b|np\b|special\b|return\b|True\b|False\b)[A-Za-z]\w*")
_RETURN = re.compile(rf"return {_OPERAND}")


def compiled(option: str, source: Sequence[str]) -> tuple[Callable[..., Any], dict[str, list[str]]]:
    """The function that a trace recorded as source code, and how it indexes each captured array.

    Every line is one call of a numpy function, one read of an array, or the return of a value; nothing else is executed.

    Args:
        option: ``score_mod`` or ``mask_mod``.
        source: the lines.

    Raises:
        ValueError: a line has another form.

    >>> function, reads = compiled("score_mod", ["t0 = x[h]", "t1 = np.multiply(score, t0)", "return t1"])
    >>> function(2.0, 0, 1, 0, 0, x=[1.0, 3.0]), reads
    (np.float64(6.0), {'x': ['h']})
    """
    reads: dict[str, list[str]] = {}
    for line in source:
        if read := _READ.fullmatch(line):
            reads.setdefault(read[1], []).append(read[2])
        elif not _RETURN.fullmatch(line) and not ((call := _CALL.fullmatch(line)) and _is_elementwise(*call.groups())):
            raise ValueError(f"{line!r} is not a line of a recorded function")
        else:  # an array without axes is an operand
            for name in _NAME.findall(line.split(" = ")[-1]):
                if name not in PARAMETERS[option]:
                    reads.setdefault(name, []).append("")
    names: dict[str, Any] = {"np": np, "special": _Special()}
    code = f"def {option}({', '.join((*PARAMETERS[option], *reads))}):\n    " + "\n    ".join(source)
    exec(code, names)
    return names[option], reads


def _is_elementwise(module: str, name: str) -> bool:
    """Whether a function computes one element from one element of each operand."""
    if module == "special":
        return name in ("erf", "expit")
    return name in ("where", "clip") or isinstance(getattr(np, name, None), np.ufunc)


class _Special:
    """The functions of scipy.special, imported when one is called."""

    def __getattr__(self, name: str) -> Any:
        import importlib

        return getattr(importlib.import_module("scipy.special"), name)


@functools.lru_cache(maxsize=64)
def _of_source(option: str, source: str) -> Function:
    """A recorded function. Its captured arrays are read with one index expression each."""
    call, reads = compiled(option, source.split("; "))
    axes = {}
    for name, indices in reads.items():
        if len(set(indices)) > 1:
            raise ValueError(f"it reads {name} at {' and at '.join(dict.fromkeys(indices))}; the self-test reads an array once")
        parts = indices[0].split(", ") if indices[0] else []
        if any(part not in _LETTERS and not (part.isdecimal() and int(part) < 9) for part in parts):
            raise ValueError(f"it reads {name}[{indices[0]}]; the self-test reads b, h, q_idx, kv_idx and indices up to 8")
        axes[name] = "".join(_LETTERS.get(part) or str(int(part) + 1) for part in parts)
    return Function(call, axes)
