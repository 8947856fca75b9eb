"""The key of a call: what a repeated call has in common with the first one."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..boundary.read_array import tensor_name
from ..boundary.user_functions import FUNCTIONS
from ..score_fn.identity import identity

#: Options of these types are part of the key unchanged. Tuples are keyed by their repr: (1, 0) and (1.0, 0) differ.
_KEY_TYPES = frozenset({bool, int, float, str, type(None), np.bool_, np.int64, np.float32, np.float64})

#: A key, and the arrays that the caller passed.
Arguments = tuple[tuple[Any, ...], list[Any]]


class BoundPrograms(dict[Any, Any]):
    """The bound programs of an object such as a group, by key. They may refer to the object, and are freed with it.

    ``built`` are the programs that are not bound yet, by what they depend on.
    """

    __slots__ = ("__weakref__", "built")

    def __init__(self) -> None:
        self.built: dict[Any, Any] = {}


class CallKey(NamedTuple):
    """What identifies a call: a repeated call has an equal tag, and its arrays and options differ only in their addresses.

    Attributes:
        tag: distinguishes calls of different functions or with different flags; hashable.
        names, arrays: the arrays by position; an array that is not passed is None.
        options: the options, including arrays.
        programs: where the call's program is kept, see :meth:`new_programs`. Default None: with the programs of all calls.

    >>> CallKey(("doubled", 2), ("q", "out"), (np.zeros((8, 1, 4, 1)), None), {}).array("q").shape
    (8, 1, 4, 1)
    """

    tag: Any
    names: Sequence[str]
    arrays: tuple[Any, ...]
    options: Mapping[str, Any]
    programs: BoundPrograms | None = None

    @staticmethod
    def new_programs() -> BoundPrograms:
        """Return :attr:`programs` for an object such as a group. They may refer to the object, and are freed with it."""
        return BoundPrograms()

    def named(self) -> dict[str, Any]:
        """Return the arrays by name."""
        return dict(zip(self.names, self.arrays, strict=True))

    def array(self, name: str) -> Any:
        """Return an array by its name."""
        return self.arrays[self.names.index(name)]


class ArrayType:
    """The array type of numpy or of CuPy, and whether its arrays have the attribute ``_f_contiguous``."""

    def __init__(self, ndarray: Any) -> None:
        self.ndarray, self.has_flag = ndarray, hasattr(ndarray, "_f_contiguous")


#: The key of numpy.
HOST = ArrayType(np.ndarray)


def read_key(of: ArrayType, kind: Any, arrays: tuple[Any, ...], options: Mapping[str, Any]) -> Arguments | None:
    """Return the key of a call: what it depends on except the addresses of its arrays; None if it must be parsed every time.

    Device and alignment are not in the key: both follow from the addresses, and are checked for new addresses. True stands for
    the strides of Fortran order: CuPy creates a tuple of strides in every access, and a flag takes a sixth of the time. Strides
    of axes of length 1, on which no address depends, may then differ. ``kind`` is the part of the key without arrays and
    options, hashable.
    """
    ndarray, has_flag = of.ndarray, of.has_flag
    # Every repeated call runs this: the branches repeat code instead of calling a function.
    key: list[Any] = [kind]
    passed: list[Any] = []
    for array in arrays:
        if type(array) is ndarray:
            key.append(array.dtype)
            key.append(array.shape)
            key.append((has_flag and array._f_contiguous) or array.strides)
            passed.append(array)
        elif array is None:
            key.append(None)
        else:
            return None
    for name, value in options.items():
        value_type = type(value)
        key.append(name)
        if value_type in _KEY_TYPES:
            key.append(value_type)
            key.append(value or repr(value))  # 0.0 and -0.0 are equal and differ
        elif value_type is ndarray:
            key += (value.dtype, value.shape, (has_flag and value._f_contiguous) or value.strides)
            passed.append(value)
        elif value_type is tuple:
            key.append(repr(value))
        elif name in FUNCTIONS:
            function = identity(value)
            if function is None:
                return None
            key.append(function)
        elif name == "tensors" and value_type is dict:
            key.append(len(value))
            for tensor, array in value.items():
                if type(tensor) is not str or type(array) is not ndarray:
                    return None
                key += (tensor, array.dtype, array.shape, (has_flag and array._f_contiguous) or array.strides)
                passed.append(array)
        elif hasattr(value_type, "_cache_key"):
            key.append(value._cache_key)
        else:
            return None
    return tuple(key), passed


#: Sorts memory pointers.
address = operator.attrgetter("ptr")


def array_names(ndarray: Any, key: CallKey) -> list[str]:
    """Return the names of the arrays that the caller passed, in the order of :func:`read_key`."""
    names = [name for name, array in zip(key.names, key.arrays, strict=True) if array is not None]
    for name, value in key.options.items():
        if type(value) is ndarray:
            names.append(name)
        elif name == "tensors" and value:
            names += map(tensor_name, value)
    return names
