"""Score and mask functions as source code: one numpy call per line, so that another process can run them.

A function is called once with recording operands. It is independent of the tracer of the calls: it records which numpy
functions are called, in the caller's order, and changes nothing.
"""

from __future__ import annotations

import numbers
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

#: The parameters of score and mask functions before the arrays.
PARAMETERS = {"score_mod": ("score", "b", "h", "q_idx", "kv_idx"), "mask_mod": ("b", "h", "q_idx", "kv_idx")}
#: Numpy functions that are not ufuncs and may occur in a function.
_OTHER_FUNCTIONS = frozenset({"where", "clip"})
#: The functions of scipy.special that may occur.
_SPECIAL = frozenset({"erf", "expit"})


class NotRecordedError(Exception):
    """A function cannot be written as source code; the message is the reason."""


class _Operand(np.lib.mixins.NDArrayOperatorsMixin):
    """A recording operand: a parameter of the function, or the result of a line."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, lines: list[str], name: str) -> None:
        self.lines, self.name = lines, name

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **keywords: Any) -> _Operand:
        if method != "__call__" or keywords:
            raise NotRecordedError(f"it calls {ufunc.__name__} with keywords or as .{method}")
        return self._line(f"{'special' if ufunc.__name__ in _SPECIAL else 'np'}.{ufunc.__name__}", inputs)

    def __array_function__(self, function: Any, types: Any, inputs: Any, keywords: Any) -> _Operand:
        if keywords or function.__name__ not in _OTHER_FUNCTIONS:
            raise NotRecordedError(f"it calls np.{function.__name__}")
        return self._line(f"np.{function.__name__}", inputs)

    def _line(self, function: str, operands: tuple[Any, ...]) -> _Operand:
        self.lines.append(f"t{len(self.lines)} = {function}({', '.join(map(_text, operands))})")
        return _Operand(self.lines, f"t{len(self.lines) - 1}")

    def __bool__(self) -> bool:
        raise NotRecordedError("it converts a traced value to a bool")

    __float__ = __int__ = __index__ = __len__ = __iter__ = __array__ = __bool__


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"):
    setattr(_Operand, f"__i{_name}__", getattr(_Operand, f"__{_name}__"))  # x += y is x = x + y, as in a call


class _Array:
    """A recording captured array, of which one element is read."""

    def __init__(self, lines: list[str], name: str, shape: tuple[int, ...], dtype: Any) -> None:
        self.lines, self.name, self.shape, self.dtype, self.ndim = lines, name, shape, dtype, len(shape)

    def __getitem__(self, index: Any) -> _Operand:
        parts = index if isinstance(index, tuple) else (index,)
        parts = tuple(x % n if isinstance(x, int) else x for x, n in zip(parts, self.shape, strict=True))
        self.lines.append(f"t{len(self.lines)} = {self.name}[{', '.join(map(_text, parts))}]")
        return _Operand(self.lines, f"t{len(self.lines) - 1}")


def _text(operand: Any) -> str:
    """An operand as source code."""
    if isinstance(operand, _Operand):
        return operand.name
    if isinstance(operand, np.ndarray) and operand.ndim == 0:
        operand = operand[()]
    if isinstance(operand, (bool, np.bool_)):
        return str(bool(operand))
    if isinstance(operand, numbers.Integral):
        return str(int(operand))
    if isinstance(operand, numbers.Real):
        number = float(operand)
        return repr(number) if np.isfinite(number) else {"inf": "np.inf", "-inf": "-np.inf"}.get(repr(number), "np.nan")
    raise NotRecordedError(f"it computes with a {type(operand).__qualname__}")


def name_of(function: Callable[..., Any]) -> str:
    """The module and the qualified name of a function.

    >>> from cupy_sdpa import zoo
    >>> name_of(zoo.softcap(30.0))
    'cupy_sdpa.zoo.softcap.<locals>.score_mod'
    """
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"


def source_of(function: Callable[..., Any], option: str, tensors: Mapping[str, Any]) -> list[str]:
    """The lines of a function's body.

    Args:
        function: the function.
        option: ``score_mod`` or ``mask_mod``.
        tensors: the arrays of the call, which the function may read; only shapes and dtypes are used.

    Raises:
        NotRecordedError: the function cannot be written as source code.

    >>> from cupy_sdpa import zoo
    >>> source_of(zoo.softcap(30.0), "score_mod", {})
    ['t0 = np.divide(score, 30.0)', 't1 = np.tanh(t0)', 't2 = np.multiply(30.0, t1)', 'return t2']
    """
    import inspect  # slow to import

    lines: list[str] = []
    arguments = [_Operand(lines, name) for name in PARAMETERS[option]]
    captured: dict[str, Any] = {}
    try:
        parameters = inspect.signature(function).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        for name, array in tensors.items():
            if not re.fullmatch(r"(?!t\d+$|np$|special$)[A-Za-z]\w*", name):
                raise NotRecordedError(f"tensors has the name {name!r}")
            if takes_all or name in parameters:
                shape = tuple(array.shape)
                captured[name] = _Array(lines, name, shape, array.dtype) if shape else _Operand(lines, name)
        lines.append(f"return {_text(function(*arguments, **captured))}")
    except NotRecordedError:
        raise
    except Exception as error:  # the call itself raises it, or the function does what only the tracer of calls can do
        raise NotRecordedError(f"{type(error).__name__}: {error}") from error
    return lines
