"""What stands for numbers and arrays while a score function is called: what is done with them is written down.

Python's operators and numpy's functions work on a value, those that its tracer knows (:mod:`cupy_sdpa.score_fn.ufuncs`); everything
else raises, in the person's own line, and says what to write instead.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from .expression import AXES, Kind, Writer


class Tracer(Protocol):
    """Where values are written down."""

    writer: Writer
    sizes: Mapping[str, int]
    lines: dict[str, str]
    numbers: dict[str, Any]
    bounds: dict[int, int]
    functions: Mapping[str, Callable[..., Value]]

    def number(self, number: Any, kind: Kind) -> int:
        """A number of the function's own."""
        ...

    def access(self, name: str, index: tuple[str | int, ...], kind: Kind) -> int:
        """An array, read."""
        ...


class Value(np.lib.mixins.NDArrayOperatorsMixin):
    """A traced value. Python's operators call the numpy functions of their names.

    Attributes:
        tracer: where it is written down.
        step: its number there.
    """

    __slots__ = ("step", "tracer")
    __hash__ = None  # type: ignore[assignment]  # == gives a condition

    def __init__(self, tracer: Tracer, step: int) -> None:
        self.tracer, self.step = tracer, step

    @property
    def kind(self) -> Kind:
        """``float``, ``int`` or ``bool``."""
        return self.tracer.writer.steps[self.step].kind

    def __repr__(self) -> str:
        return f"<traced {self.kind}>"

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **more: Any) -> Value:
        if method != "__call__":
            raise TypeError(
                f"np.{ufunc.__name__}.{method} goes over many elements, and a score function sees one: {_LEAVE_OUT}"
            )
        return self._called(ufunc.__name__, inputs, more)

    def __array_function__(self, function: Any, types: Any, inputs: Any, more: Any) -> Value:
        return self._called(function.__name__, inputs, more)

    def _called(self, name: str, inputs: tuple[Any, ...], more: Mapping[str, Any]) -> Value:
        """A function of numpy's, by its name."""
        functions = self.tracer.functions
        if more:
            raise TypeError(f"np.{name} is given {', '.join(more)}: {_LEAVE_OUT}")
        if name not in functions:
            raise TypeError(f"np.{name} is none of the functions that a score function can use: {', '.join(sorted(functions))}")
        return functions[name](*inputs)

    def __bool__(self) -> bool:
        raise TypeError(
            "a score function is called once, with no numbers in it, so `if`, `and`, `or`, `not`, `min`, `max` and `a < b < c` "
            "cannot look at them: write np.where(condition, a, b), &, |, ~, np.minimum, np.maximum, and (a < b) & (b < c)"
        )

    def __index__(self) -> int:
        raise TypeError(
            "an array of the function's own is indexed with a traced value: give the array to the call, "
            "tensors={'name': array}, and take it as a parameter of that name"
        )

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.__index__()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # protocols that are looked for
            raise AttributeError(name)
        other = METHODS.get(name) or (f"np.{name}(x)" if name in self.tracer.functions else "")
        hint = f"write {other} in place of x.{name}()" if other else "write numpy's functions, such as np.tanh(x)"
        raise AttributeError(f"a traced value has no attribute {name!r}: {hint}")

    def __getitem__(self, index: Any) -> Any:
        raise TypeError("a traced value is one element and has no index; arrays come in by tensors={'name': array}")

    def _number(self, *_: Any) -> Any:
        raise TypeError(
            "a score function is called once, with no numbers in it, so nothing but traced values can be made of one: write "
            "numpy's functions in place of math's (np.tanh, np.exp), and leave float(), int() and round() out"
        )

    __float__ = __int__ = __complex__ = __round__ = __len__ = __iter__ = _number


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"):
    # numpy's x += y writes into x; here it is x = x + y
    setattr(Value, f"__i{_name}__", getattr(Value, f"__{_name}__"))

#: What to write in place of the methods of PyTorch's tensors and of arrays.
METHODS = {
    "sigmoid": "scipy.special.expit(x), or 1 / (1 + np.exp(-x))", "relu": "np.maximum(x, 0)", "clamp": "np.clip(x, low, high)",
    "pow": "x**y", "rsqrt": "x**-0.5", "erf": "scipy.special.erf(x)", "softplus": "np.logaddexp(x, 0)", "abs": "abs(x)",
    "masked_fill": "np.where(condition, y, x)", "item": "x", "astype": "x, or x * 1.0 for a float",
    "float": "x * 1.0", "to": "x, or x * 1.0 for a float",
}  # fmt: skip
_LEAVE_OUT = "call it with its operands alone"


class Array:
    """An array of ``tensors=``, which a score function reads one element of.

    Args:
        tracer: where that is written down.
        name: in ``tensors=``.
        array: of numpy or CuPy; nothing but shape and dtype is looked at.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tracer: Tracer, name: str, array: Any) -> None:
        self._tracer, self._name = tracer, name
        self.shape: tuple[int, ...] = tuple(array.shape)
        self.dtype = array.dtype
        self._kind: Kind = "int" if array.dtype.kind in "iu" else "float"

    @property
    def ndim(self) -> int:
        """How many axes it has."""
        return len(self.shape)

    def as_parameter(self) -> Array | Value:
        """What the function gets: of an array without axes its element."""
        return self if self.ndim else self[()]

    def __repr__(self) -> str:
        return f"<tensors[{self._name!r}] {self.shape} {self.dtype}>"

    def __getitem__(self, index: Any) -> Value:
        parts = index if isinstance(index, tuple) else (index,)
        if len(parts) != self.ndim:
            raise IndexError(f"{self!r} is read with {len(parts)} indices; it needs {self.ndim}, one for each axis")
        names = tuple(self._axis(axis, part) for axis, part in enumerate(parts))
        for name in names:
            if isinstance(name, str) and names.count(name) > 1:
                raise IndexError(f"{self!r} is read with {name} twice: take the diagonal of the array beforehand")
        element = Value(self._tracer, self._tracer.access(self._name, names, self._kind))
        return element != 0.0 if self.dtype.kind == "b" else element

    def _axis(self, axis: int, part: Any) -> str | int:
        length = self.shape[axis]
        if isinstance(part, numbers.Integral):
            if not -length <= int(part) < length:
                raise IndexError(f"{self!r} is read at {int(part)} along axis {axis}, which has {length}")
            return int(part) % length
        step = self._tracer.writer.steps[part.step] if isinstance(part, Value) else None
        if step is None:
            raise IndexError(f"{self!r} is read with {part!r}; its indices are b, h, q_idx, kv_idx, and whole numbers")
        if step.mode != "index":
            raise IndexError(
                f"{self!r} is read at a computed place along axis {axis}; the indices are b, h, q_idx and kv_idx themselves: "
                "make an array beforehand whose axes they go along, such as table[q[:, None] - kv[None, :] + n]"
            )
        if (full := self._tracer.sizes[step.name]) != length:
            raise IndexError(
                f"{self!r} has {length} along axis {axis} and {step.name} goes up to {full}: give an array of that size"
            )
        return step.name

    def _element(self, *_: Any) -> Any:
        raise TypeError(f"{self!r} is an array; read an element of it, such as {self._name}[{', '.join(AXES[-self.ndim :])}]")

    __bool__ = __float__ = __int__ = __index__ = __len__ = __iter__ = __array__ = __array_ufunc__ = __array_function__ = (
        _element
    )
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = __abs__ = _element
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _element


def as_value(tracer: Tracer, x: Any, kind: Kind = "float") -> Value:
    """What a function computes with: a traced value, or a number, which is a float unless ``kind`` is int and it is one."""
    if isinstance(x, Value):
        if x.tracer is not tracer:
            raise TypeError("a traced value of another call is used: a score function may keep none")
        return x
    if isinstance(x, (bool, np.bool_)):
        return Value(tracer, tracer.writer.constant(float(x), "bool"))
    if isinstance(x, np.ndarray) and x.ndim == 0:
        x = x[()]
    if isinstance(x, numbers.Real):
        return Value(tracer, tracer.number(x, kind if isinstance(x, numbers.Integral) else "float"))
    if isinstance(x, Array):
        x._element()
    raise TypeError(
        f"a {type(x).__module__}.{type(x).__qualname__} is used as a number; a score function computes with traced values and "
        "numbers: give arrays to the call, tensors={'name': array}, and read them with [h], [q_idx, kv_idx] and the like"
    )
