"""The tracer, and proxies of numbers and arrays, with which a score function is traced.

Python's operators and the numpy functions in :mod:`.core.score_fn.ufuncs` work on a proxy. Everything else raises an
exception in the line of the function that uses it; the message names a replacement.
"""

from __future__ import annotations

import math
import numbers
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from .expression import AXES, Kind, Step, Writer
from .mask_analysis import MASKED_SCORE
from .numpy_calls import Access, make_calls

#: The refusal of Python's branches in functions, after the reason.
NO_BRANCHES = (
    "{}, so `if`, `and`, `or`, `not`, `min`, `max` and `a < b < c` cannot be evaluated: write np.where(condition, a, b), &, |, "
    "~, np.minimum, np.maximum, and (a < b) & (b < c)"
)
#: Numbers that are constants of the expression, in addition to floats that may mask; all others are by-value scalars.
_CONSTANTS = (0.0, 1.0, -1.0)
#: The end of the message of an index that is computed.
_GATHER = (
    "the kernel has no gather, so indices are b, h, q_idx, kv_idx and integers. Gather the elements before the call and pass "
    "them as bias=table[index] of shape (Skv, Sq, Hq, B), which takes memory for all pairs and heads; cupy_sdpa.zoo.table_bias "
    "does so, and sums dbias into the gradient of the table. Pass gathered conditions as mask="
)
#: Folders of code between the line of a score function and the recording of a step: this package's, and numpy's operators.
_INTERNAL_FOLDERS = tuple(os.path.join(os.path.dirname(module), "") for module in (__file__, np.__file__))


class Tracer:
    """Records the operations on traced values, with the numpy functions of traced values, by name.

    ``sizes`` are the lengths of the scores' axes, by the names of :data:`~.core.score_fn.expression.AXES`.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]], sizes: Mapping[str, int], steps: Iterable[Step]) -> None:
        self.functions, self.sizes, self.writer = functions, sizes, Writer(steps)
        self.numbers: dict[str, Any] = {}
        self.bounds: dict[int, int] = {}  # upper bounds of non-negative integer steps
        self.accesses: dict[str, Access] = {}
        self.lines: dict[str, str] = {}
        self.line = ""  # the source line of the numpy call that is being traced

    def number(self, number: Any, kind: Kind) -> int:
        """Record a number of the function: a constant if it is 0, 1, -1 or a float beyond 5e8, else a by-value scalar."""
        try:
            value = int(number) if kind == "int" else float(number)
        except OverflowError:
            digits = len(f"{abs(number):x}") * math.log10(16)
            raise OverflowError(
                f"an integer of about {digits:.0f} digits is used as a float, which is at most 1.8e308: write np.inf or -np.inf"
            ) from None
        if kind == "int" and not -(2**63) <= value < 2**63:
            raise OverflowError(f"{number} does not fit into 64 bits: write it as a float")
        if (value in _CONSTANTS and repr(value) != "-0.0") or (kind == "float" and abs(value) > -MASKED_SCORE):
            return self.writer.constant(value, kind)
        self.numbers[repr(value)] = value
        return self.writer.leaf("number", repr(value), kind)

    def access(self, access: Access, kind: Kind) -> int:
        """Record a read of a captured array."""
        self.accesses[str(access)] = access
        return self.writer.leaf("captured", str(access), kind)

    def call(self, function: Callable[..., Any], operands: Sequence[Any]) -> Any:
        """Call a numpy function with traced values; :meth:`made` notes the call unless it is a part of another one."""
        traced = self.functions[function.__name__]
        if self.line:
            return traced(*operands)
        operands = [x[()] if isinstance(x, np.ndarray) and not x.ndim else x for x in operands]
        self.line = line_of_function()
        try:
            result = traced(*operands)
            self.made(function, operands, result)
        finally:
            self.line = ""
        return result

    def made(self, function: Callable[..., Any], operands: Sequence[Any], result: Any) -> None:
        """Note the call that made a result."""

    def read(self, access: Access, element: Value) -> Value:
        """Note that a value is an element of an array, or the condition that it is not 0 if the array is bool."""
        return element


def line_of_function() -> str:
    """Return the line of the function that is being traced; of a recorded function, the line that was recorded."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith(_INTERNAL_FOLDERS):
        if frame.f_code is make_calls.__code__:
            return frame.f_locals["line"]  # type: ignore[no-any-return]
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class Value(np.lib.mixins.NDArrayOperatorsMixin):
    """A traced value: the step that computes it. Python's operators call the numpy functions of the same name."""

    __slots__ = ("step", "tracer")
    __hash__ = None  # type: ignore[assignment]  # == returns a condition

    def __init__(self, tracer: Tracer, step: int) -> None:
        self.tracer, self.step = tracer, step

    @property
    def kind(self) -> Kind:
        """``float``, ``int`` or ``bool``."""
        return self.tracer.writer.steps[self.step].kind

    def __repr__(self) -> str:
        return f"<traced {self.kind}>"

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **keywords: Any) -> Value:
        if method != "__call__":
            raise TypeError(
                f"np.{ufunc.__name__}.{method} needs an array, and a score function computes one element: {_OPERANDS_ONLY}"
            )
        return self._call(ufunc, inputs, keywords)

    def __array_function__(self, function: Any, types: Any, inputs: Any, keywords: Any) -> Value:
        return self._call(function, inputs, keywords)

    def _call(self, function: Any, inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> Value:
        """Trace a call of a numpy function."""
        name, functions = function.__name__, self.tracer.functions
        if keywords:
            raise TypeError(f"np.{name} was called with the keywords {', '.join(keywords)}: {_OPERANDS_ONLY}")
        if name not in functions:
            raise TypeError(f"np.{name} is not supported in score functions; supported are {', '.join(sorted(functions))}")
        return self.tracer.call(function, inputs)  # type: ignore[no-any-return]

    def __bool__(self) -> bool:
        raise TypeError(NO_BRANCHES.format("a score function is traced: it is called once, without actual values"))

    def __index__(self) -> int:
        raise TypeError(
            "an array that is not in tensors is indexed with a traced value: pass the array as tensors={'name': array}, and "
            "add a parameter of that name to the function"
        )

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.__index__()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # Python and numpy look up protocols
            raise AttributeError(name)
        replacement = METHODS.get(name) or (f"np.{name}(x)" if name in self.tracer.functions else "")
        hint = f"write {replacement} instead of x.{name}()" if replacement else "use numpy functions, such as np.tanh(x)"
        raise AttributeError(f"a traced value has no attribute {name!r}: {hint}")

    def __getitem__(self, *_: Any) -> Any:
        raise TypeError("a traced value is one element and cannot be indexed; pass arrays as tensors={'name': array}")

    __setitem__ = __getitem__

    def _number(self, *_: Any) -> Any:
        raise TypeError(
            "a score function is traced: it is called once, without actual values, so a traced value cannot be converted to a "
            "number: use numpy functions instead of the math module's (np.tanh, np.exp), and remove float(), int() and round()"
        )

    __float__ = __int__ = __complex__ = __round__ = __len__ = __iter__ = _number

    @classmethod
    def _of_another_library(cls, *_: Any, **__: Any) -> Any:
        raise TypeError(
            "a function of another library is called with a traced value: use numpy's, such as np.where(condition, a, b)"
        )

    __torch_function__ = __jax_array__ = _of_another_library


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"):
    # numpy's x += y writes to x; here it is x = x + y
    setattr(Value, f"__i{_name}__", getattr(Value, f"__{_name}__"))

#: What to write instead of the methods of PyTorch's tensors and of arrays.
METHODS = {
    "sigmoid": "scipy.special.expit(x), or 1 / (1 + np.exp(-x))", "relu": "np.maximum(x, 0)", "clamp": "np.clip(x, low, high)",
    "pow": "x**y", "rsqrt": "x**-0.5", "erf": "scipy.special.erf(x)", "softplus": "np.logaddexp(x, 0)", "abs": "abs(x)",
    "masked_fill": "np.where(condition, y, x)", "item": "x", "astype": "x, or x * 1.0 for a float",
    "float": "x * 1.0", "to": "x, or x * 1.0 for a float",
}  # fmt: skip
_OPERANDS_ONLY = "call it with its operands only"


class CapturedArray:
    """An array of ``tensors=``, from which a score function reads one element; only its shape and dtype are used."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tracer: Tracer, name: str, array: Any) -> None:
        self._tracer, self._name = tracer, name
        self.shape: tuple[int, ...] = tuple(array.shape)
        self.dtype = array.dtype
        self._kind: Kind = "int" if array.dtype.kind in "iu" else "float"

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    def as_parameter(self) -> CapturedArray | Value:
        """Return the argument of the function: the array, or the element of an array without axes."""
        return self if self.ndim else self[()]

    def __repr__(self) -> str:
        return f"<tensors[{self._name!r}] {self.shape} {self.dtype}>"

    def __getitem__(self, index: Any) -> Value:
        parts = index if isinstance(index, tuple) else (index,)
        if len(parts) != self.ndim:
            raise IndexError(f"{self!r} is indexed with {len(parts)} indices; it needs {self.ndim}, one per axis")
        names = tuple(self._index(axis, part) for axis, part in enumerate(parts))
        for name in names:
            if isinstance(name, str) and names.count(name) > 1:
                raise IndexError(f"{self!r} is indexed with {name} twice: pass the diagonal of the array instead")
        access = Access(self._name, names)
        element = Value(self._tracer, self._tracer.access(access, self._kind))
        return self._tracer.read(access, element != 0.0 if self.dtype.kind == "b" else element)

    def _index(self, axis: int, part: Any) -> str | int:
        """Check one index and return it: the name of an axis of the scores, or an integer."""
        length = self.shape[axis]
        if isinstance(part, numbers.Integral):
            if not -length <= int(part) < length:
                raise IndexError(f"{self!r} has length {length} along axis {axis}; the index {int(part)} is out of range")
            return int(part) % length
        step = self._tracer.writer.steps[part.step] if isinstance(part, Value) else None
        if step is None:
            raise IndexError(f"{self!r} is indexed with {part!r}; use b, h, q_idx, kv_idx and integers")
        if step.mode != "index":
            raise IndexError(f"{self!r} is indexed with a computed value along axis {axis}: {_GATHER}")
        if (full := self._tracer.sizes.get(step.name, length)) != length:
            raise IndexError(
                f"{self!r} has length {length} along axis {axis}, and {step.name} has {full} values: the lengths must be equal"
            )
        return step.name

    def _element(self, *_: Any) -> Any:
        raise TypeError(f"{self!r} is an array; index it, such as {self._example}")

    @property
    def _example(self) -> str:
        return f"{self._name}[{', '.join(AXES[-self.ndim :])}]"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # Python and numpy look up protocols
            raise AttributeError(name)
        raise AttributeError(
            f"{self!r} has no attribute {name!r} in a function, which reads single elements, such as {self._example}: compute "
            f"{self._name}.{name} before the call, and pass the result in tensors"
        )

    def __setitem__(self, *_: Any) -> None:
        raise TypeError(f"{self!r} is read-only in a function: change the array before the call")

    __bool__ = __float__ = __int__ = __index__ = __len__ = __iter__ = __array__ = __array_ufunc__ = __array_function__ = (
        _element
    )
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = __abs__ = _element
    __pow__ = __rpow__ = __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = __matmul__ = __rmatmul__ = __pos__ = _element
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __invert__ = __lshift__ = __rshift__ = _element
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _element


def as_value(tracer: Tracer, x: Any, kind: Kind = "float") -> Value:
    """Return a number or a traced value as a traced value; integers are recorded as integers only if ``kind`` is ``int``.

    Raises:
        TypeError: ``x`` is neither a traced value nor a number, or was traced in another call.
    """
    if isinstance(x, Value):
        if x.tracer is not tracer:
            raise TypeError("the function uses a traced value of an earlier call: it must not store traced values")
        return x
    if isinstance(x, (bool, np.bool_)):
        return Value(tracer, tracer.writer.constant(float(x), "bool"))
    if isinstance(x, np.ndarray) and x.ndim == 0:
        x = x[()]
    if isinstance(x, numbers.Real):
        return Value(tracer, tracer.number(x, kind if isinstance(x, numbers.Integral) else "float"))
    if isinstance(x, CapturedArray):
        x._element()
    raise TypeError(
        f"a {type(x).__module__}.{type(x).__qualname__} is used as a number; score functions compute with traced values and "
        "numbers: pass arrays as tensors={'name': array}, and index them with b, h, q_idx and kv_idx"
    )
