"""Arrays that are made when they are used first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin


class Lazy(NDArrayOperatorsMixin):
    """Stands for an array of numpy or CuPy, which is made at the first use of its elements, and then kept.

    Shape, ``ndim`` and ``size`` are known before. Indexing, operators, methods, numpy's functions and conversions
    (``numpy.asarray``, ``cupy.asarray``) make it; so does :attr:`array`, which is the array itself.

    Args:
        shape: of the array.
        make: makes it. What it refers to is kept alive until then, and read as it is then.

    >>> x = Lazy((2,), lambda: print("made") or np.ones(2))
    >>> x
    <lazy array (2,), not made yet>
    >>> x.shape, float((x + 1).sum())
    made
    ((2,), 4.0)
    """

    def __init__(self, shape: tuple[int, ...], make: Callable[[], Any]) -> None:
        self.shape = shape
        self._make: Callable[[], Any] | None = make
        self._array: Any = None

    @property
    def array(self) -> Any:
        """The array."""
        if self._make is not None:
            self._array, self._make = self._make(), None
        return self._array

    @property
    def ndim(self) -> int:
        """How many axes it has."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many elements it has."""
        return int(np.prod(self.shape, dtype=np.int64))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and not name.startswith(("__cuda_array", "__dlpack")):
            raise AttributeError(name)  # of Python's own protocols it has those written here; numpy's asks know no bfloat16
        return getattr(self.array, name)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None, **keywords: Any) -> Any:
        if out is not None:
            keywords["out"] = tuple(map(made, out))
        return getattr(ufunc, method)(*map(made, inputs), **keywords)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(self.array, dtype, copy=copy)

    def __getitem__(self, key: Any) -> Any:
        return self.array[made(key)]

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.array)

    def __bool__(self) -> bool:
        return bool(self.array)

    def __repr__(self) -> str:
        return f"<lazy array {self.shape}, not made yet>" if self._make else repr(self.array)


def made(x: Any) -> Any:
    """What a lazy array stands for; everything else as it is."""
    return x.array if isinstance(x, Lazy) else x


def check_array(name: str, x: Any, *, optional: bool = False) -> None:
    """Raise TypeError where an argument is not an array, lazy or not; None is one where it is optional."""
    if not hasattr(x, "ndim") and not (optional and x is None):
        raise TypeError(f"{name} is a {type(x).__name__}; give an array: numpy.asarray(...) or cupy.asarray(...) makes one")
