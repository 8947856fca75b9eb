"""The caller's arrays: what a call reads of an array before it runs, and whether arrays share memory."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ..errors import in_words
from ..problem.problem import CU_SEQLENS, LENGTHS, OPTION_ARRAYS, SEEDS
from ..problem.tensor_spec import Expected, TensorSpec, alignment_of, byte_range, check_spec, dtype_name, make_spec
from ..problem.view import Elements, View
from ..runtime import cupy_runtime
from ..runtime.interpreted_array import InterpretedArray
from .libraries import check_one_library, library_of

#: The arguments that are int32.
INT32 = frozenset((*LENGTHS, *CU_SEQLENS, "page_table"))
#: What to pass in place of an object that is no array, by the names of arguments.
_REMEDIES = {
    "stats": "return_stats=True returns new statistics",
    "alibi_slopes": "cupy_sdpa.alibi_slopes(Hq) returns the usual ones; cupy.asarray copies them to the GPU",
    **dict.fromkeys(INT32, "convert with numpy.asarray(..., 'int32') or cupy.asarray(..., 'int32')"),
}


class Argument(NamedTuple):
    """An array argument.

    Attributes:
        name: the name of the argument.
        array: the array, or its view.
        address: the address of the first element in the GPU's memory; 0 for numpy arrays.
        device: the device of a CuPy array; None for numpy arrays, and for those that the interpreter computes with.
    """

    name: str
    array: Any
    address: int
    device: int | None

    @property
    def spec(self) -> TensorSpec:
        """What a problem depends on."""
        if isinstance(self.array, View):
            return self.array.spec(self.name)
        return spec_of(self.name, self.array, 0 if self.device is None else self.address)


class NoArray:
    """Base of masks that are not arrays: operators and attributes of arrays raise an error that names the array of the mask.

    Attributes:
        _not_an_array: what to use instead; the end of the message.
    """

    _not_an_array: str
    __array_ufunc__: Any

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(f"{in_words(self)} is not an array: {self._not_an_array}")

    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __invert__ = __getitem__ = _refuse
    __iter__ = __contains__ = __array_ufunc__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_") or not hasattr(np.ndarray, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise AttributeError(f"{in_words(self)} is not an array, and has no attribute {name}: {self._not_an_array}")


def read_array(name: str, array: Any) -> Argument:
    """The record of an array."""
    if isinstance(array, View):
        return Argument(name, array, array.offset, array.storage.device)
    if name in INT32:
        array = as_int32(name, array)
    if type(array) in (np.ndarray, np.memmap):  # the elements of a subclass, such as a masked array, may mean something else
        return Argument(name, array, 0, None)
    if type(array) is InterpretedArray:
        return Argument(name, array, array.data.ptr, None)
    if not cupy_runtime.is_array(array):
        if remedy := getattr(type(array), "_not_an_array", None):
            raise TypeError(f"{name} is {in_words(array)}; {remedy}")
        if array is ...:
            raise TypeError(f"{name} is not passed: pass it by position, or as {name}=")
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError(
                f"{name} is a numpy.ma.MaskedArray, whose mask attention does not read: pass {name}.data, and "
                "the keys to attend to as mask=, bool (Skv, Sq, Hq, B), True where a masked array has False; or their number "
                "as seq_lens_kv="
            )
        if library := library_of(array):
            raise TypeError(
                f"{name} is an array of {library.name}; this call takes numpy and CuPy arrays: share it, for example with "
                f"numpy.asarray({name}) or cupy.from_dlpack({name})"
            )
        remedy = _REMEDIES.get(name, "")
        if name in INT32 and isinstance(array, numbers.Integral):
            remedy = f"pass a number for each batch entry, such as numpy.full(B, {array}, 'int32')"
        if isinstance(array, tuple) and array and all(isinstance(n, int) for n in array):
            remedy = "shapes are for cupy_sdpa.problem(q, k, v, dtype=)"
        if callable(array):
            remedy = "it is a function: call it, and pass the result"
        raise TypeError(
            f"{name} is {in_words(array)}; attention takes numpy and CuPy arrays, or arrays of one "
            f"other library: {remedy or 'convert with numpy.asarray, cupy.asarray or cupy.from_dlpack'}"
        )
    return Argument(name, array, array.data.ptr, array.data.device_id)


def read_arrays(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[dict[str, Argument], dict[str, Argument], bool]:
    """Read all arrays of a call: its arguments and the arrays among its options, by name; those in ``tensors``; and the engine.

    Every call reads its arrays here, before anything is allocated, so that no engine gets an array of another one. The third
    result tells whether the arrays are CuPy's. A seed or an offset that is an integer is not an array.

    Raises:
        TypeError: q, k or v is None, an array is none, or arrays of several libraries are mixed.
        ValueError: arrays are on different devices.
    """
    passed = {**arrays, **{name: options.get(name) for name in OPTION_ARRAYS}}
    passed = {name: x for name, x in passed.items() if not (name in SEEDS and _is_integer(name, x))}
    check_one_library(passed)
    found = {name: read_array(name, x) for name, x in passed.items() if x is not None or name in ("q", "k", "v")}
    tensors = {name: read_array(f"tensors[{name!r}]", x) for name, x in (options.get("tensors") or {}).items()}
    return found, tensors, arrays_on_gpu([*found.values(), *tensors.values()])


def _is_integer(name: str, value: Any) -> bool:
    """Whether a seed or an offset is an integer; False for arrays and None."""
    if isinstance(value, (bool, np.bool_, str)) or (
        isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral)
    ):
        raise TypeError(f"{name} is {value!r}; it must be an integer, or an int64 array of one element")
    if not isinstance(value, numbers.Integral):
        return False
    if not -(2**63) <= int(value) < 2**63:
        raise ValueError(f"{name} is {value}; it must be a 64-bit integer")
    return True


def as_int32(name: str, array: Any) -> Any:
    """Lengths, offsets or a page table on the CPU as int32: of a list or a tuple of integers, or of an int64 array.

    Anything else is returned unchanged, to be refused later; offsets of int64 too, which calls take.
    """
    listed = isinstance(array, (list, tuple))
    if not listed and (type(array) is not np.ndarray or array.dtype != np.int64 or name.startswith("cu_seqlens")):
        return array
    try:
        found = np.array(array, order="F")
    except ValueError:
        raise ValueError(
            f"{name} has rows of several lengths; pass a rectangular list, with any pages after the last"
        ) from None
    if found.dtype.kind != "i" and found.size:
        raise TypeError(f"{name} is {in_words(array)} of {found.dtype}; it must contain integers")
    limits = np.iinfo(np.int32)
    if found.size and not limits.min <= found.min() <= found.max() <= limits.max:
        raise ValueError(f"{name} has values from {found.min()} to {found.max()}; they must have 32 bits")
    return found.astype(np.int32)


def spec_of(name: str, array: Any, address: int = 0) -> TensorSpec:
    """The spec of a CuPy array at an address, or of a numpy array."""
    # Only cuDNN needs aligned arrays, and it reads integers one at a time.
    alignment = 16 if array.dtype.kind == "i" else alignment_of(address)
    return make_spec(name, dtype_name(array.dtype), array.shape, array.strides, alignment)


def arrays_on_gpu(arguments: Iterable[Argument]) -> bool:
    """Whether the arrays are CuPy's, all on one device."""
    given = list(arguments)
    different = {argument.device for argument in given}
    if len(different) == 1:
        return different != {None}
    own, *others = given
    others = [own, *(argument for argument in others if argument.device != own.device)]
    if None in different:
        on_host, on_gpu = (next(x.name for x in others if (x.device is None) is host) for host in (True, False))
        listed = ", ".join(f"{x.name} is {_kind_of(x)}" for x in others)
        raise TypeError(
            f"arrays are mixed: {listed}. Move them to one side with cupy.asarray({on_host}) or cupy.asnumpy({on_gpu})"
        )
    listed = ", ".join(f"{x.name} on device {x.device}" for x in others)
    raise ValueError(
        f"arrays are on different devices: {listed}. Copy them to one: with cupy.cuda.Device(...): cupy.asarray(...)"
    )


def _kind_of(argument: Argument) -> str:
    """What an array is, for messages; integers may have been passed as a list."""
    if argument.device is not None:
        return "a CuPy array"
    return "a numpy array or a list" if getattr(argument.array, "dtype", None) == np.int32 else "a numpy array"


def share_elements(a: Argument, b: Argument) -> bool:
    """Whether two arrays of one engine have an element in common; views of missing arrays have none."""
    if isinstance(a.array, View) or isinstance(b.array, View):
        return False
    if not a.array.size or not b.array.size:
        return False
    if not a.address or not b.address:  # of numpy arrays
        return a.address == b.address and bool(np.shares_memory(a.array, b.array))
    (a_from, a_to), (b_from, b_to) = (byte_range(x.shape, x.strides, x.itemsize) for x in (a.array, b.array))
    distance = b.address - a.address
    if a_to <= distance + b_from or distance + b_to <= a_from:
        return False
    one, other = (np.asarray(Elements(x.address, x.array)) for x in (a, b))  # to compare layouts; it reads no element
    return bool(np.shares_memory(one, other))


def check_separate(results: Iterable[Argument], arguments: Sequence[Argument]) -> None:
    """Check that results are writable and share no element with another array; no element is read."""
    for result in results:
        if isinstance(result.array, np.ndarray) and not result.array.flags.writeable:
            raise ValueError(f"{result.name} is read-only, but results are written to it: pass a writable array")
        for other in arguments:
            if other is not result and share_elements(result, other):
                raise ValueError(
                    f"{result.name} overlaps {other.name} in memory: results would overwrite it; pass a separate array"
                )


def check_arrays(expected: Iterable[Expected], arrays: Mapping[str, Any]) -> None:
    """Check arrays that a call does not read as arrays of its problem."""
    arguments = {name: read_array(name, array) for name, array in arrays.items() if array is not None}
    passed = [(arguments[one.name], one) for one in expected if one.name in arguments]
    if passed:
        arrays_on_gpu(arguments.values())
    for argument, one in passed:
        check_spec(argument.spec, one)
        if one.writable:
            check_separate([argument], list(arguments.values()))
