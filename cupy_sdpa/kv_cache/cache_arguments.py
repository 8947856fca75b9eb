"""Checks of the arguments of a key/value cache."""

from __future__ import annotations

import functools
import itertools
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ..extend import cupy_runtime, in_words

if TYPE_CHECKING:
    from numpy.typing import NDArray  # slow to import


Function = TypeVar("Function", bound=Callable[..., Any])


def other_names(answers: Mapping[str, str]) -> Callable[[Function], Function]:
    """Raise TypeError in calls with other libraries' parameters, with what to write instead of them."""
    known = {name: answer for answer, names in answers.items() for name in names.split()}

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for name in kwargs.keys() & known.keys():
                raise TypeError(f"there is no parameter {name}: {known[name]}")
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


#: Raises an error for other libraries' names of ``seq_lens_q`` in the methods of a cache.
refuse_names = other_names(
    {
        "pass seq_lens_q=, the number of new tokens of each sequence, as for attention": (
            "counts lengths new_tokens num_tokens query_lens seq_lens seq_lens_kv"
        )
    }
)


def index(given: int, count: int, name: str) -> int:
    """Return the index of one of the cache's sequences or layers."""
    if not isinstance(given, numbers.Integral):
        raise TypeError(f"{name} is {given!r}; it must be an integer")
    if not 0 <= given < count:
        raise ValueError(f"{name} is {given}; the cache has {count}, from 0 to {count - 1}")
    return int(given)


def read_lengths(seq_lens_q: int | Sequence[int] | NDArray[Any], batch: int) -> NDArray[np.int64]:
    """Return the number of new tokens of each sequence; not to be modified."""
    if cupy_runtime.is_array(seq_lens_q):
        raise TypeError("seq_lens_q is a CuPy array; pass host numbers, for example seq_lens_q.get()")
    if isinstance(seq_lens_q, int) and 0 <= seq_lens_q < 1 << 31:
        return uniform(seq_lens_q, batch)
    array = np.asarray(seq_lens_q)
    if array.dtype.kind not in "iu":
        raise TypeError(f"seq_lens_q is {seq_lens_q!r}; it must be integers")
    if array.shape not in ((), (batch,)):
        raise ValueError(f"seq_lens_q has shape {array.shape}; pass one number, or {batch} numbers for the {batch} sequences")
    array = np.full(batch, array, np.int64) if array.ndim == 0 else array.astype(np.int64)
    if (array < 0).any():
        raise ValueError(f"seq_lens_q is {seq_lens_q!r}; it must not be negative, use truncate() to shorten a sequence")
    return array


def read_path(path: Sequence[int] | NDArray[Any], present: int, sequence: int) -> list[int]:
    """Return the kept tokens of the last step, of which the sequence has ``present`` ones."""
    if cupy_runtime.is_array(path):
        raise TypeError("path is a CuPy array; pass host numbers, for example path.get()")
    array = np.asarray(path)
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"path is {path!r}; it must be integers: the positions of the kept tokens in the last step")
    if array.ndim != 1:
        raise ValueError(f"path has shape {array.shape}; it must have one axis: the positions of the kept tokens")
    kept: list[int] = array.astype(np.int64).tolist()
    for token in kept:
        if not 0 <= token < present:
            raise ValueError(
                f"path contains {token}, but sequence {sequence} has {present} tokens of the last step: pass positions among "
                "them, from 0, before another step begins"
            )
    for one, other in itertools.pairwise(kept):
        if other <= one:
            raise ValueError(f"path contains {other} after {one}; positions must ascend: pass sorted(path) without duplicates")
    return kept


def read_order(order: Sequence[int] | NDArray[Any], batch: int) -> list[int]:
    """Return the sequence that each one continues, B numbers."""
    if cupy_runtime.is_array(order):
        raise TypeError("order is a CuPy array; pass host numbers, for example order.get()")
    array = np.asarray(order)
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"order is {order!r}; it must be integers: for each sequence the one that it continues")
    if array.shape != (batch,):
        raise ValueError(f"order has shape {array.shape}; pass {batch} numbers, for each sequence the one that it continues")
    sources: list[int] = array.tolist()
    for b, source in enumerate(sources):
        if not 0 <= source < batch:
            raise ValueError(
                f"order[{b}] is {source}; the cache has {batch} sequences, from 0 to {batch - 1}: pass {b} to keep a sequence, "
                f"and call release({b}) to remove it"
            )
    return sources


@functools.lru_cache(maxsize=64)
def uniform(count: int, batch: int) -> NDArray[np.int64]:
    """Return the same count for every sequence; the same array for the same numbers."""
    counts = np.full(batch, count, np.int64)
    counts.flags.writeable = False
    return counts


def check_new_tokens(
    k: Any, v: Any, dims: tuple[int, int], heads: int, batch: int, dtype: np.dtype[Any] | None, device: int | None
) -> None:
    """Check the type, device, dtype, shape and strides of new keys and values.

    ``dims`` are D and Dv; ``dtype`` is None if another function has checked the dtypes; ``device`` is None for numpy arrays.
    """
    for name, x, dim in (("k", k, dims[0]), ("v", v, dims[1])):
        if not (type(x) in (np.ndarray, np.memmap) if device is None else cupy_runtime.is_array(x)):
            kind = "numpy" if device is None else "CuPy"
            raise TypeError(f"{name} is {in_words(x)}, but the cache consists of {kind} arrays")
        if device is not None and x.data.device_id != device:
            raise ValueError(f"{name} is on device {x.data.device_id}, the cache on device {device}; copy the array")
        if dtype is not None and x.dtype != dtype:
            raise TypeError(
                f"{name} is {x.dtype}, but the cache is {dtype}; convert with .astype({str(dtype)!r}), or pass dtype= to "
                "the cache"
            )
        dense = x.ndim == 4 and x.shape[3] == batch
        if not (dense or x.ndim == 3) or x.shape[:2] != (dim, heads):
            orders = {f"{name}.T": x.shape[::-1], f"{name}.transpose(3, 1, 2, 0)": (*x.shape[3:], *x.shape[1:3], x.shape[0])}
            remedy = next((f": pass {passed}" for passed, axes in orders.items() if axes[:2] == (dim, heads)), "")
            raise ValueError(
                f"{name} has shape {x.shape}; the cache takes ({dim}, {heads}, S, {batch}), or packed ({dim}, {heads}, T)"
                f"{remedy}"
            )
        if dim > 1 and x.strides[0] != x.dtype.itemsize and 0 not in x.shape:
            raise ValueError(
                f"{name} has a stride of {x.strides[0]} bytes along its first axis; it must be {x.dtype.itemsize}: "
                f"copy it with asfortranarray({name})"
            )
    if k.shape[2:] != v.shape[2:]:
        raise ValueError(f"k has shape {k.shape}, v {v.shape}; they must have the same tokens")


def check_tokens(k: Any, counts: NDArray[np.int64], needed: tuple[int, int], capturing: bool) -> None:
    """Check that new keys have the counted tokens. Packed arrays of a capture may have more, for later launches."""
    packed, given = k.ndim == 3, k.shape[2]
    if given < needed[packed] or (packed and given > needed[packed] and not capturing):
        names = ("T", "the sum") if packed else ("S", "the maximum")
        raise ValueError(
            f"k has {names[0]} = {given} tokens, but {names[1]} of seq_lens_q is {needed[packed]}; seq_lens_q is "
            f"{counts.tolist()}"
        )


def tokens_of(counts: NDArray[np.int64]) -> tuple[int, int]:
    """Return the tokens that dense and packed arrays need for the counts: their maximum and their sum."""
    return int(counts.max()), int(counts.sum())
