"""What a repeated call has in common with the first one: the key that identifies it, and the parsed call without its arrays."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..boundary.user_functions import FUNCTIONS, tensor_name
from ..runtime import memory
from ..score_fn.identity import identity

#: A call that can be repeated: a program and its arrays. :class:`cupy_sdpa.programs.executor.ProgramCall` is in a layer above.
Repeatable = Any

#: Options of these types are part of the key as they are. Tuples are keyed by their repr: (1, 0) and (1.0, 0) differ.
_KEY_TYPES = frozenset({bool, int, float, str, type(None), np.bool_, np.int64, np.float32, np.float64})

#: A key, and the arrays that the caller passed.
Arguments = tuple[tuple[Any, ...], list[Any]]


class ArrayType:
    """The array type of numpy or of CuPy, and whether its arrays have the attribute ``_f_contiguous``."""

    def __init__(self, ndarray: Any) -> None:
        self.ndarray, self.has_flag = ndarray, hasattr(ndarray, "_f_contiguous")


#: That of numpy.
HOST = ArrayType(np.ndarray)


def read_key(of: ArrayType, kind: Any, arrays: tuple[Any, ...], options: Mapping[str, Any]) -> Arguments | None:
    """The key of a call: what it depends on except the addresses of its arrays; None if it must be parsed every time.

    Device and alignment are not in the key: both follow from the addresses, and are checked for new addresses. True stands for
    the strides of Fortran order: CuPy creates a tuple of strides in every access, and a flag takes a sixth of the time. Strides
    of axes of length 1, on which no address depends, may then differ. ``kind`` is the part besides arrays and options,
    hashable.
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


#: The shape, the dtype, the bytes, the strides and the order of a result that a call creates; the strides are None if they
#: follow from the order.
Created = tuple[tuple[int, ...], Any, int, tuple[int, ...] | None, str]


def created_like(array: Any) -> Created:
    """How to create an array like a result."""
    dense = array.flags.f_contiguous or array.flags.c_contiguous
    order = "F" if array.flags.f_contiguous else "C"
    return array.shape, array.dtype, array.nbytes, None if dense else array.strides, order


def equal_runs(created: Sequence[Created]) -> list[slice]:
    """The runs of several results of equal sizes.

    >>> import numpy as np
    >>> equal_runs([created_like(np.zeros(shape, np.float16)) for shape in ((2, 3), (6,), (1,))])
    [slice(0, 2, None)]
    """
    runs, begin = [], 0
    for _, run in itertools.groupby(created, operator.itemgetter(2)):
        end = begin + len([*run])
        if end > begin + 1:
            runs.append(slice(begin, end))
        begin = end
    return runs


#: Sorts memory pointers.
address = operator.attrgetter("ptr")


class Template:
    """A parsed call without its arrays; it can run on other arrays with the same key, without parsing.

    Its arguments are a call after it ran, the names of the arrays that the caller passed, these arrays, and the results that
    the call creates, as the caller gets them. ``constants`` has the addresses of inputs that were created and never change, by
    name.
    """

    __slots__ = ("_alignments", "_call", "_device", "_direct", "_names", "_views", "constants")

    def __init__(self, call: Repeatable, names: Sequence[str], arrays: Sequence[Any], created: Mapping[str, Any]) -> None:
        self._call, self._names = call.on({}), [*names, *created]
        self._device = call.arrays["q"].data.device_id
        inputs = {name: call.arrays[name] for name in call.fills}
        self.constants = {name: array.data.ptr for name, array in inputs.items() if memory.is_constant(array)}
        #: The position of each array of the call that the caller passed or gets.
        self._direct: list[tuple[str, int]] = []
        #: For views of these arrays: name, position, offset of the first element in bytes, shape, dtype and strides.
        self._views: list[tuple[str, int, int, tuple[int, ...], Any, tuple[int, ...]]] = []
        where: dict[str, tuple[int, int]] = {}
        every = [*arrays, *created.values()]
        of_created = ((name, call.arrays[name], position) for position, name in enumerate(created, len(arrays)))
        for name, array, position in (*passed_arrays(call, names), *of_created):
            offset = array.data.ptr - every[position].data.ptr
            if position < len(arrays):
                where[name] = position, offset
            if array is every[position]:
                self._direct.append((name, position))
            else:
                self._views.append((name, position, offset, array.shape, array.dtype, array.strides))
        #: Position, offset, bits and their value: the alignments. Integers may have any.
        self._alignments = [
            (*where[spec.name], *((15, 0) if spec.alignment >= 16 else (2 * spec.alignment - 1, spec.alignment)))
            for spec in call.problem.tensors
            if spec.name in where and not spec.dtype.startswith("int")
        ]

    def accepts(self, arrays: Sequence[Any], addresses: Sequence[int]) -> bool:
        """Whether arrays are on the device of the call and have the alignments of its problem."""
        for array in arrays:
            if array.data.device_id != self._device:
                return False
        for at, offset, bits, value in self._alignments:  # noqa: SIM110 - any() enters a function for each
            if (addresses[at] + offset) & bits != value:
                return False
        return True

    def named(self, addresses: Sequence[int]) -> dict[str, int]:
        """The addresses of the call's arrays by name, given those of the caller's arrays and of the created results."""
        named = dict(zip(self._names, addresses, strict=False)) | self.constants
        for name, position, offset, *_ in self._views:
            named[name] = addresses[position] + offset
        return named

    def on(self, ndarray: Any, arrays: Sequence[Any], created: Sequence[Any]) -> Repeatable:
        """The call on the caller's arrays and the created results."""
        every = [*arrays, *created]
        found = {name: every[position] for name, position in self._direct}
        for name, position, offset, shape, dtype, strides in self._views:
            found[name] = ndarray(shape, dtype, every[position].data + offset, strides)
        return self._call.on(found)


def callers_name(call: Repeatable, name: str) -> str:
    """The caller's name of an array of a call: of an array that a function reads, for example ``tensors['slopes']``."""
    return tensor_name(call.captured[name].name) if name in call.captured else name


def passed_arrays(call: Repeatable, names: Sequence[str]) -> Iterator[tuple[str, Any, int]]:
    """The arrays of a call that the caller passed, or views of these: name, array and position among ``names``."""
    for name, array in call.arrays.items():
        source = callers_name(call, name)
        if source in names:
            yield name, array, names.index(source)


def results_by_name(call: Repeatable, results: Sequence[Any] | None) -> dict[str, Any]:
    """The results of a call by name; ``results`` are those that the caller gets, if these are views of those of the call."""
    if results is None:
        return {name: call.arrays[name] for name in call.result_names}
    every = [*results[:-1], *results[-1].values()] if call.gradients else results
    return dict(zip(call.result_names, every, strict=True))


def array_names(ndarray: Any, names: Sequence[str], arrays: tuple[Any, ...], options: Mapping[str, Any]) -> list[str]:
    """The names of the arrays that the caller passed, in the order of :func:`read_key`; ``names`` are those of ``arrays``."""
    passed = [name for name, array in zip(names, arrays, strict=True) if array is not None]
    for name, value in options.items():
        if type(value) is ndarray:
            passed.append(name)
        elif name == "tensors" and value:
            passed += map(tensor_name, value)
    return passed
