"""The caller's arrays: what a call reads of an array before it runs, and whether arrays share memory."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..errors import in_words
from ..problem.arrays import INTEGERS, OPTION_ARRAYS, SEEDS
from ..problem.tensor_spec import Expected, TensorSpec, byte_range, check_spec
from ..problem.view import Elements, View, device_of
from ..runtime import cupy_runtime
from ..runtime.interpreted_array import InterpretedArray
from .libraries import check_one_library, library_of

#: The arguments that are int32.
INT32 = frozenset(INTEGERS)
#: What to pass instead of an object that is not an array, by argument name.
_REMEDIES = {
    "stats": "return_stats=True returns new statistics",
    "alibi_slopes": "cupy_sdpa.alibi_slopes(Hq) returns the usual ones; cupy.asarray copies them to the GPU",
    **dict.fromkeys(INT32, "convert with numpy.asarray(..., 'int32') or cupy.asarray(..., 'int32')"),
}


def tensor_name(name: str) -> str:
    """Return the name of an array in ``tensors=`` among the arrays of a call."""
    return f"tensors[{name!r}]"


def read_array(name: str, array: Any, *, integers: bool = False) -> Any:
    """Check that an argument is an array of numpy or CuPy, or a view, and return it; lists of lengths become int32 arrays.

    Args:
        name, array: the argument.
        integers: convert a list of integers or an int64 array to int32. Options such as ``seq_lens_kv`` are always converted.

    Raises:
        TypeError: it is not an array; the message says how to convert it.
        ValueError: a list has rows of several lengths, or integers of more than 32 bits.

    >>> read_array("seq_lens_kv", [3, 5])
    array([3, 5], dtype=int32)
    """
    if isinstance(array, View):
        return array
    if integers or name in INT32:
        array = as_int32(name, array)
    # the elements of a subclass of ndarray, such as a masked array, may mean something else
    if type(array) in (np.ndarray, np.memmap, InterpretedArray):
        return array
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
            remedy = f"pass a number for each batch item, such as numpy.full(B, {array}, 'int32')"
        if isinstance(array, tuple) and array and all(isinstance(n, int) for n in array):
            remedy = "shapes are for cupy_sdpa.problem(q, k, v, dtype=)"
        if callable(array):
            remedy = "it is a function: call it, and pass the result"
        raise TypeError(
            f"{name} is {in_words(array)}; this call takes numpy and CuPy arrays, or arrays of a single "
            f"other library: {remedy or 'convert with numpy.asarray, cupy.asarray or cupy.from_dlpack'}"
        )
    return array


def read_arrays(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """Read all arrays of a call by name: the arguments and the options, then those in ``tensors``.

    Every call reads its arrays here, before anything is allocated, so that no engine gets an array of another one. The third
    result is whether the arrays are CuPy's. A seed or an offset that is an integer is not an array.

    Raises:
        TypeError: q, k or v is None, an argument is not an array, or arrays of several libraries are mixed.
        ValueError: arrays are on different devices.
    """
    passed = {**arrays, **{name: options[name] for name in OPTION_ARRAYS if options.get(name) is not None}}
    passed = {name: x for name, x in passed.items() if not (name in SEEDS and _is_integer(name, x))}
    check_one_library(passed)
    checked = {name: read_array(name, x) for name, x in passed.items() if x is not None or name in ("q", "k", "v")}
    named = {tensor_name(name): x for name, x in (options.get("tensors") or {}).items()}
    tensors = {name: read_array(name, x) for name, x in named.items()}
    return checked, tensors, arrays_on_gpu(checked | tensors)


def _is_integer(name: str, value: Any) -> bool:
    """True if a seed or an offset is an integer; False for arrays and None."""
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
    """Return lengths, offsets or a page table on the CPU as int32: of a list or a tuple of integers, or of an int64 array.

    Anything else is returned unchanged and raises an error later; so are int64 offsets, which calls accept.

    >>> as_int32("seq_lens_kv", [3, 5])
    array([3, 5], dtype=int32)
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
        raise ValueError(f"{name} has values from {found.min()} to {found.max()}; they must fit into 32 bits")
    return found.astype(np.int32)


def spec_of(name: str, array: Any) -> TensorSpec:
    """Return what a problem depends on, if the array or view is its array of this name."""
    return View.of(name, array).spec(name)


def arrays_on_gpu(arrays: Mapping[str, Any]) -> bool:
    """True if the arrays of a call are CuPy's, all on one device.

    Raises:
        TypeError: arrays of numpy and CuPy are mixed.
        ValueError: arrays are on different devices.

    >>> arrays_on_gpu({"q": np.zeros((8, 1, 4, 1)), "k": np.zeros((8, 1, 5, 1))})
    False
    """
    devices = {name: device_of(array) for name, array in arrays.items()}
    first, *others = devices.items()
    different = [first, *((name, device) for name, device in others if device != first[1])]
    if len(different) == 1:
        return first[1] is not None
    if None in devices.values():
        on_host, on_gpu = (next(name for name, device in different if (device is None) is host) for host in (True, False))
        listed = ", ".join(f"{name} is {_library(arrays[name], device)}" for name, device in different)
        raise TypeError(
            f"arrays are mixed: {listed}. Move them to one device with cupy.asarray({on_host}) or cupy.asnumpy({on_gpu})"
        )
    listed = ", ".join(f"{name} on device {device}" for name, device in different)
    raise ValueError(
        f"arrays are on different devices: {listed}. Copy them to one: with cupy.cuda.Device(...): cupy.asarray(...)"
    )


def _library(array: Any, device: int | None) -> str:
    """Return what an array is, for messages; integers may have been passed as a list."""
    if device is not None:
        return "a CuPy array"
    return "a numpy array or a list" if getattr(array, "dtype", None) == np.int32 else "a numpy array"


def share_elements(a: Any, b: Any) -> bool:
    """True if two arrays of one engine have an element in common; False for views of missing arrays."""
    if isinstance(a, View) or isinstance(b, View) or not a.size or not b.size:
        return False
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and bool(np.shares_memory(a, b))
    (a_from, a_to), (b_from, b_to) = (byte_range(x.shape, x.strides, x.itemsize) for x in (a, b))
    distance = b.data.ptr - a.data.ptr
    if a_to <= distance + b_from or distance + b_to <= a_from:
        return False
    one, other = (np.asarray(Elements(x.data.ptr, x)) for x in (a, b))  # to compare layouts; it reads no element
    return bool(np.shares_memory(one, other))


def check_separate(results: Iterable[str], arrays: Mapping[str, Any]) -> None:
    """Check that results, by name among the arrays, are writable and share no element with another array.

    No element is read.

    Raises:
        ValueError: a result is read-only, or overlaps another array.
    """
    for name in results:
        result = arrays[name]
        if isinstance(result, np.ndarray) and not result.flags.writeable:
            raise ValueError(f"{name} is read-only, but results are written to it: pass a writable array")
        for other, array in arrays.items():
            if other != name and share_elements(result, array):
                raise ValueError(f"{name} overlaps {other} in memory: results would overwrite it; pass a separate array")


def check_arrays(expected: Iterable[Expected], arrays: Mapping[str, Any]) -> None:
    """Check the dtypes and shapes of arrays that are not part of a problem; missing arrays (None) are skipped.

    All arrays must be on one device, including arrays without an entry in ``expected``. On the CPU, the values of lengths and
    offsets are also checked (:attr:`.Expected.most`).

    Raises:
        TypeError: an argument is not an array, or has the wrong dtype; or arrays of numpy and CuPy are mixed.
        ValueError: an array has the wrong shape or values out of range, or is read-only although the call writes it; or
            arrays are on different devices.

    >>> check_arrays([Expected("weights", (4, 2), "float32", "(S, H)")], {"weights": np.zeros((4, 3), np.float32)})
    Traceback (most recent call last):
    ValueError: weights has shape (4, 3); it must be (4, 2), (S, H)
    """
    passed = {name: read_array(name, array) for name, array in arrays.items() if array is not None}
    if passed:
        arrays_on_gpu(passed)
    for one in expected:
        if one.name not in passed:
            continue
        check_spec(spec_of(one.name, passed[one.name]), one)
        one.check_elements(passed[one.name])
        if one.writable:
            check_separate([one.name], passed)
