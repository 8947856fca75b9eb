"""CuPy arrays that the interpreter computes with, instead of cuDNN (``engine="cupy"``).

The type of the arrays selects the engine. :class:`InterpretedArray` is the type for this one: what computes with numpy arrays
also computes with it, because numpy's operators and functions on it call CuPy's (numpy's protocols ``__array_ufunc__`` and
``__array_function__``). Only CuPy's own operations run, and elementwise kernels that it compiles: no cuDNN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .cupy_runtime import cupy, elementwise


class InterpretedArray(np.lib.mixins.NDArrayOperatorsMixin):
    """A CuPy array that is computed with as a numpy array is; numpy arrays that it is combined with are copied to the GPU.

    Attributes:
        array: the CuPy array, whose memory it shares.
    """

    __slots__ = ("array",)

    def __init__(self, array: Any) -> None:
        self.array = array

    def __getattr__(self, name: str) -> Any:
        """Return an attribute or a method of the CuPy array; array results are also interpreted arrays."""
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(self.array, name)
        return _Method(value) if callable(value) else _wrapped(value)

    def __getitem__(self, key: Any) -> InterpretedArray:
        return InterpretedArray(self.array[_plain(key)])

    def __setitem__(self, key: Any, value: Any) -> None:
        self.array[_plain(key)] = _plain(value)

    def __len__(self) -> int:
        return len(self.array)

    def __repr__(self) -> str:
        return f"<interpreted array {self.shape} {self.dtype}>"

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *operands: Any, **named: Any) -> Any:
        (out,) = named.pop("out", (None,))
        if method != "__call__" or type(out) not in (type(None), InterpretedArray):  # a numpy array would not be written
            return NotImplemented
        if out is not None:
            getattr(cupy(), ufunc.__name__)(*map(_plain, operands), out=out.array, **named)
            return out
        return _wrapped(getattr(cupy(), ufunc.__name__)(*map(_plain, operands), **named))

    def __array_function__(self, function: Callable[..., Any], types: Any, operands: Any, named: Mapping[str, Any]) -> Any:
        own = getattr(cupy(), function.__name__, None)
        if own is None:
            return NotImplemented
        named = {name: _plain(value) for name, value in named.items() if name != "subok"}  # CuPy has no subclasses of arrays
        if named.get("shape") == ():  # CuPy's functions such as empty_like take it for no shape
            return _wrapped(own(*_plain(operands), **named | {"shape": (1,)}).reshape(()))
        return _wrapped(own(*_plain(operands), **named))

    def max(self, axis: int | None = None, keepdims: bool = False, initial: float = -np.inf) -> InterpretedArray:
        """Return the largest element along an axis; CuPy's reductions have no initial value."""
        if self.array.size:
            return InterpretedArray(cupy().maximum(self.array.max(axis=axis, keepdims=keepdims), initial))
        shape = np.empty(self.array.shape).sum(axis=axis, keepdims=keepdims).shape
        return InterpretedArray(cupy().full(shape, initial, self.array.dtype))


class _Method:
    """A method of a CuPy array with operands and a result that may be interpreted."""

    __slots__ = ("_method",)

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def __call__(self, *operands: Any, **named: Any) -> Any:
        return _wrapped(self._method(*_plain(operands), **named))


def plain(array: Any) -> Any:
    """Return the CuPy array of an interpreted array; others unchanged."""
    return array.array if type(array) is InterpretedArray else array


def on_host(array: Any) -> Any:
    """Return an interpreted array as a numpy array, which waits for the GPU; others unchanged."""
    return array.array.get(order="F" if array.flags.f_contiguous else "C") if type(array) is InterpretedArray else array


def as_strided(array: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """Return a view of a numpy or interpreted array's memory, from its first element; strides in bytes."""
    if type(array) is InterpretedArray:
        return InterpretedArray(cupy().ndarray(shape, array.dtype, array.array.data, strides))
    return np.lib.stride_tricks.as_strided(array, shape, strides)


def _plain(value: Any) -> Any:
    """Return an operand of CuPy's functions: numpy arrays are copied to the GPU; the same for those in a tuple or a list."""
    if type(value) is InterpretedArray:
        return value.array
    if isinstance(value, np.ndarray):
        return cupy().asarray(value)
    return type(value)(map(_plain, value)) if type(value) in (tuple, list) else value


def _wrapped(value: Any) -> Any:
    """Return a result of CuPy's functions."""
    if isinstance(value, cupy().ndarray):
        return InterpretedArray(value)
    return tuple(map(_wrapped, value)) if type(value) is tuple else value


# Functions that CuPy alone does not have. Their kernels need no CUDA header.


def erf(x: Any) -> Any:
    """Return the error function of a CuPy array, in float64."""
    return elementwise("float64 x", "float64 y", "y = erf(x)", "erf")(x.astype(np.float64))


#: The numbers that ``numpy.random.Philox`` draws (Salmon et al. 2011, Philox 4x64 with 10 rounds): element i is number i % 4 of
#: the block at the counter + i / 4 + 1.
_PHILOX = """
    unsigned long long a = first + 1 + i / 4, b = c1, c = c2, d = c3, k = key0, l = key1;
    for (int round = 0; round < 10; ++round) {
        const unsigned long long high0 = __umul64hi(0xD2E7470EE14C6C93ULL, a), low0 = 0xD2E7470EE14C6C93ULL * a;
        const unsigned long long high1 = __umul64hi(0xCA5A826395121157ULL, c), low1 = 0xCA5A826395121157ULL * c;
        a = high1 ^ b ^ k; b = low1; c = high0 ^ d ^ l; d = low0;
        k += 0x9E3779B97F4A7C15ULL; l += 0xBB67AE8584CAA73BULL;
    }
    y = i % 4 < 2 ? (i % 4 ? b : a) : (i % 4 == 2 ? c : d)
"""


def philox(key: tuple[int, int], counter: tuple[int, int, int, int], count: int) -> Any:
    """Return the numbers of ``numpy.random.Philox(key=key, counter=counter).random_raw(count)``, uint64, as a CuPy array."""
    parameters = ", ".join(f"uint64 {name}" for name in ("key0", "key1", "first", "c1", "c2", "c3"))
    kernel = elementwise(parameters, "uint64 y", _PHILOX, "philox")
    return kernel(*map(np.uint64, (*key, *counter)), cupy().empty(count, np.uint64))
