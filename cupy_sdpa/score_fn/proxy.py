"""Proxies of numbers and arrays, with which a score function is traced.

Python's operators and the numpy functions in :mod:`cupy_sdpa.score_fn.ufuncs` work on a proxy. Everything else raises an
exception in the line of the function that uses it; the message names a replacement.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from .expression import AXES, Kind, Writer
from .recorded import Access

#: The refusal of Python's branches in functions, after the reason.
NO_BRANCHES = (
    "{}, so `if`, `and`, `or`, `not`, `min`, `max` and `a < b < c` cannot be evaluated: write np.where(condition, a, b), &, |, "
    "~, np.minimum, np.maximum, and (a < b) & (b < c)"
)


class Tracer(Protocol):
    """Records the operations on proxies; see :class:`cupy_sdpa.score_fn.tracer.Tracer`."""

    writer: Writer
    sizes: Mapping[str, int]
    line: str
    lines: dict[str, str]
    numbers: dict[str, Any]
    bounds: dict[int, int]
    functions: Mapping[str, Callable[..., Value]]

    def call(self, function: Callable[..., Any], operands: Sequence[Any]) -> Any:
        """Call a numpy function with traced values."""
        ...

    def number(self, number: Any, kind: Kind) -> int:
        """Record a number of the function."""
        ...

    def access(self, access: Access, kind: Kind) -> int:
        """Record a read of a captured array."""
        ...

    def index(self, index: Value) -> Any:
        """A computed index of an array."""
        ...

    def read(self, access: Access, element: Value) -> Value:
        """Record that a value is an element of an array."""
        ...


class Value(np.lib.mixins.NDArrayOperatorsMixin):
    """A traced value. Python's operators call the numpy functions of the same name.

    Attributes:
        tracer: records the operations.
        step: the index of the step that computes the value.
    """

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
        hint = f"write {replacement} in place of x.{name}()" if replacement else "use numpy functions, such as np.tanh(x)"
        raise AttributeError(f"a traced value has no attribute {name!r}: {hint}")

    def __getitem__(self, index: Any) -> Any:
        raise TypeError("a traced value is one element and cannot be indexed; pass arrays as tensors={'name': array}")

    def _number(self, *_: Any) -> Any:
        raise TypeError(
            "a score function is traced: it is called once, without actual values, so a traced value cannot be converted to a "
            "number: use numpy functions in place of the math module's (np.tanh, np.exp), and remove float(), int() and round()"
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

#: What to write in place of the methods of PyTorch's tensors and of arrays.
METHODS = {
    "sigmoid": "scipy.special.expit(x), or 1 / (1 + np.exp(-x))", "relu": "np.maximum(x, 0)", "clamp": "np.clip(x, low, high)",
    "pow": "x**y", "rsqrt": "x**-0.5", "erf": "scipy.special.erf(x)", "softplus": "np.logaddexp(x, 0)", "abs": "abs(x)",
    "masked_fill": "np.where(condition, y, x)", "item": "x", "astype": "x, or x * 1.0 for a float",
    "float": "x * 1.0", "to": "x, or x * 1.0 for a float",
}  # fmt: skip
_OPERANDS_ONLY = "call it with its operands only"


class CapturedArray:
    """A captured array, from which a score function reads one element.

    Args:
        tracer: records the reads.
        name: the name of the array in ``tensors=``.
        array: a numpy or CuPy array; only its shape and dtype are used.
    """

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
        """The argument of the function: the array, or the element of an array without axes."""
        return self if self.ndim else self[()]

    def __repr__(self) -> str:
        return f"<tensors[{self._name!r}] {self.shape} {self.dtype}>"

    def __getitem__(self, index: Any) -> Value:
        parts = index if isinstance(index, tuple) else (index,)
        if len(parts) != self.ndim:
            raise IndexError(f"{self!r} is indexed with {len(parts)} indices; it needs {self.ndim}, one for each axis")
        names = tuple(self._index(axis, part) for axis, part in enumerate(parts))
        for name in names:
            if isinstance(name, str) and names.count(name) > 1:
                raise IndexError(f"{self!r} is indexed with {name} twice: pass the diagonal of the array instead")
        access = Access(self._name, names)
        element = Value(self._tracer, self._tracer.access(access, self._kind))
        return self._tracer.read(access, element != 0.0 if self.dtype.kind == "b" else element)

    def _index(self, axis: int, part: Any) -> Any:
        """Check one index and return it: the name of an axis of the scores, an integer, or a computed index."""
        length = self.shape[axis]
        if isinstance(part, numbers.Integral):
            if not -length <= int(part) < length:
                raise IndexError(f"{self!r} has length {length} along axis {axis}; the index {int(part)} is out of range")
            return int(part) % length
        step = self._tracer.writer.steps[part.step] if isinstance(part, Value) else None
        if step is None:
            raise IndexError(f"{self!r} is indexed with {part!r}; use b, h, q_idx, kv_idx, integers, or what they compute")
        if step.mode != "index":
            try:
                return self._tracer.index(part)
            except IndexError as error:
                raise IndexError(f"{self!r} is indexed with a computed value along axis {axis}: {error}") from None
        if (full := self._tracer.sizes.get(step.name, length)) != length:
            raise IndexError(
                f"{self!r} has length {length} along axis {axis}, and {step.name} has {full} values: the lengths must be equal"
            )
        return step.name

    def _element(self, *_: Any) -> Any:
        raise TypeError(f"{self!r} is an array; index it, such as {self._name}[{', '.join(AXES[-self.ndim :])}]")

    __bool__ = __float__ = __int__ = __index__ = __len__ = __iter__ = __array__ = __array_ufunc__ = __array_function__ = (
        _element
    )
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = __abs__ = _element
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _element


def as_value(tracer: Tracer, x: Any, kind: Kind = "float") -> Value:
    """Convert an operand to a traced value.

    Args:
        tracer: records a number.
        x: a traced value or a number.
        kind: ``int`` records an integer as an integer; otherwise numbers are recorded as floats.

    Raises:
        TypeError: ``x`` is neither a traced value nor a number, or was traced in another call.
    """
    if isinstance(x, Value):
        if x.tracer is not tracer:
            raise TypeError("a traced value of another call is used: a score function must not store traced values")
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
