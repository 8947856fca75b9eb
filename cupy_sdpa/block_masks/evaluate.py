"""Evaluate a mask function on index arrays: one row of tiles at a time, and single blocks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..extend import Recorded, cupy_runtime, in_words
from .blocks import BLOCK

#: The kinds of blocks: no query attends to a key, some do, every query attends to every key.
EMPTY, PARTIAL, FULL = 0, 1, 2
#: The number of elements that are evaluated at once, if they are at least one row of tiles.
_ELEMENTS = 1 << 23


def kinds_of(pairs: NDArray[Any], every: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the kinds of blocks, from the numbers of pairs that attend and of all pairs."""
    return np.where(pairs == 0, EMPTY, np.where(pairs == every, FULL, PARTIAL)).astype(np.uint8)


def partial_blocks(kinds: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Return the partial blocks, int32 ``(n, 4)``: key block, query block, head and batch item, the first one fastest."""
    return np.argwhere(kinds.T == PARTIAL)[:, ::-1].astype(np.int32)


def lengths_of(length: int, blocks: int) -> NDArray[np.int64]:
    """Return the number of positions in each block."""
    return np.minimum(BLOCK, length - BLOCK * np.arange(blocks))


Made = TypeVar("Made")
Parameters = ParamSpec("Parameters")


def answers_flex_attention(function: Callable[Parameters, Made]) -> Callable[Parameters, Made]:
    """Name our arguments in the error of a call that uses the arguments of FlexAttention's ``create_block_mask``."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*arguments: Parameters.args, **keywords: Parameters.kwargs) -> Made:
        try:
            signature.bind(*arguments, **keywords)
        except TypeError as error:
            raise TypeError(
                f"{error}: the call is block_mask(mask_mod, sq, skv, heads=, batch=). FlexAttention's "
                "create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN) is block_mask(mask_mod, Q_LEN, KV_LEN, heads=H, batch=B)"
            ) from None
        return function(*arguments, **keywords)

    return call


class KeyRanges(NamedTuple):
    """The keys of every query of one head and batch item, int64 ``(Sq,)``: the first one, the last plus 1, and the number.

    They are contiguous if the number is ``end - first``.
    """

    first: NDArray[np.int64]
    end: NDArray[np.int64]
    number: NDArray[np.int64]


class MaskFunction:
    """A mask function ``f(b, h, q_idx, kv_idx, **tensors) -> condition`` with its arrays, all numpy or all CuPy.

    Attributes:
        xp: the module of its arrays, numpy or CuPy.
        dtype: the dtype of the positions: integers have 64 bits on the CPU and 32 bits on the GPU, as in all calls.
        recorded: the recorded function; None if only arrays can evaluate it, such as ``table[q_idx - kv_idx]``.
    """

    def __init__(
        self, mask_mod: Callable[..., Any], tensors: Mapping[str, Any] | None, *, per_head: bool, per_entry: bool
    ) -> None:
        if not isinstance(tensors or {}, Mapping):
            raise TypeError(f"tensors is {in_words(tensors)}; it must be a mapping of names to arrays")
        arrays = dict(tensors or {})
        for name, array in arrays.items():
            if not hasattr(array, "shape"):
                raise TypeError(f"tensors[{name!r}] is {in_words(array)}; convert with numpy.asarray or cupy.asarray")
        self.xp: Any = np
        on_gpu = {name: cupy_runtime.is_array(array) for name, array in arrays.items()}
        if len(set(on_gpu.values())) > 1:
            raise TypeError("tensors has numpy and CuPy arrays; move them to one device with cupy.asarray or cupy.asnumpy")
        if any(on_gpu.values()) or (not arrays and cupy_runtime.current_device() is not None):
            self.xp = cupy_runtime.cupy()
        self.dtype = np.dtype(np.int64 if self.xp is np else np.int32)
        self.recorded = Recorded.if_traceable("mask_mod", mask_mod, arrays)
        self._arrays = {name: arrays[name] for name in taken(mask_mod, arrays)}
        if self.recorded is None:
            _check_sums(mask_mod, self._arrays)
        self._call = self.recorded or mask_mod
        self._per_head, self._per_entry = per_head, per_entry

    def __call__(self, b: Any, h: Any, queries: Any, keys: Any) -> Any:
        """Return whether queries attend to keys, bool, of the broadcast shape of the index arrays."""
        head = self._index(h) if self._per_head else _Unknown("h", "heads")
        entry = self._index(b) if self._per_entry else _Unknown("b", "batch")
        try:
            result = self._call(entry, head, queries, keys, **self._arrays)
        except ValueError as error:
            if "truth value" not in str(error):
                raise
            raise TypeError(
                "mask_mod is called with arrays of indices, which have no single truth value: write np.where(condition, a, b) "
                "instead of `if`, &, | and ~ instead of `and`, `or` and `not`, (a < b) & (b < c) instead of `a < b < c`, and "
                "np.minimum instead of `min`"
            ) from error
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise  # raised inside the function, not by a call with wrong arguments
            raise TypeError(f"mask_mod must be a function f(b, h, q_idx, kv_idx, **tensors) -> condition: {error}") from None
        except IndexError as error:
            shapes = ", ".join(f"tensors[{name!r}] {array.shape}" for name, array in self._arrays.items())
            raise IndexError(
                f"{error}: mask_mod reads {shapes or 'an array'}, and q_idx is below sq, kv_idx below skv, h below heads and b "
                "below batch: pass a longer array, or the right sq, skv, heads and batch"
            ) from error
        if getattr(getattr(result, "dtype", None), "kind", "b" if isinstance(result, (bool, np.bool_)) else "") != "b":
            kind = getattr(result, "dtype", "None" if result is None else type(result).__name__)
            remedy = "add a return statement" if result is None else "for a number x write x != 0"
            raise TypeError(f"mask_mod returned {kind}; it must return a condition, such as q_idx >= kv_idx: {remedy}")
        shape = np.broadcast_shapes(queries.shape, keys.shape, *(x.shape for x in (b, h) if hasattr(x, "shape")))
        found = getattr(result, "shape", ())
        if len(found) > len(shape) or any(n not in (1, full) for n, full in zip(found[::-1], shape[::-1], strict=False)):
            raise ValueError(f"mask_mod returned shape {found} for indices of shape {shape}: compute it from q_idx and kv_idx")
        return self.xp.broadcast_to(self.xp.asarray(result), shape)

    def _index(self, index: Any) -> Any:
        """Return an array of indices, or an index as a scalar of numpy: ``~(h == 0)`` would be -2 of a Python integer."""
        return index if hasattr(index, "shape") else self.dtype.type(index)


class _SumOfConditions(TypeError):
    """A sum of two conditions, which numpy computes as ``|``."""


class _Checked(np.ndarray[Any, Any]):
    """An array of which conditions cannot be added."""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **keywords: Any) -> Any:
        operands = [np.asarray(x) for x in inputs]
        if ufunc is np.add and method == "__call__" and all(x.dtype == np.bool_ for x in operands):
            raise _SumOfConditions(
                "mask_mod adds two conditions, which numpy's + turns into a condition: write &, |, or np.where(condition, 1, 0)"
            )
        if "out" in keywords:  # x |= y
            keywords["out"] = tuple(map(np.asarray, keywords["out"]))
        return np.asarray(getattr(ufunc, method)(*operands, **keywords)).view(_Checked)


def _check_sums(mask_mod: Callable[..., Any], arrays: Mapping[str, Any]) -> None:
    """Raise TypeError if a function that cannot be traced adds conditions: numpy's sum of two is not a number.

    The function is called with one query and one key. Any other exception is left to its evaluation.
    """
    first = np.zeros((1, 1), np.int64).view(_Checked)
    on_host = {
        name: (array if isinstance(array, np.ndarray) else cupy_runtime.cupy().asnumpy(array)).view(_Checked)
        for name, array in arrays.items()
    }
    try:
        mask_mod(np.int64(0), np.int64(0), first, first, **on_host)
    except _SumOfConditions as error:
        raise TypeError(str(error)) from None
    except Exception:
        return


class _Unknown:
    """An index that the mask function must not use, because the mask is the same for all its values."""

    def __init__(self, name: str, option: str) -> None:
        what = {"heads": "heads", "batch": "batch items"}[option]
        self._message = f"mask_mod uses {name}, and {option} is None: pass {option}= to block_mask, the number of {what}"

    def _use(self, *_: Any) -> Any:
        raise TypeError(self._message)

    __bool__ = __index__ = __int__ = __float__ = __array__ = __array_ufunc__ = __array_function__ = __neg__ = __abs__ = _use
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __floordiv__ = _use
    __rfloordiv__ = __mod__ = __rmod__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __and__ = __or__ = _use
    __pow__ = __rpow__ = __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __xor__ = __rxor__ = __rand__ = __ror__ = _use
    __pos__ = __invert__ = __divmod__ = __rdivmod__ = __hash__ = _use


def taken(function: Callable[..., Any], arrays: Mapping[str, Any]) -> list[str]:
    """Return the names of the arrays that a mask function or a score function takes.

    Raises:
        ValueError: there are others.
    """
    if not arrays:
        return []
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return list(arrays)
    accepted = {p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY}
    if unused := arrays.keys() - accepted:
        raise ValueError(
            f"tensors has {', '.join(sorted(unused))}, which the function does not take: add a parameter of that name, or "
            "remove it"
        )
    return list(arrays)


def block_kinds(function: MaskFunction, b: int, h: int, sq: int, skv: int) -> tuple[NDArray[np.uint8], KeyRanges]:
    """Return the kinds of all blocks of one head and batch item, ``(key blocks, query blocks)``, and the keys of every query.

    The function is evaluated on some rows of tiles at a time.
    """
    xp = function.xp
    query_blocks, key_blocks = -(-sq // BLOCK), -(-skv // BLOCK)
    if not skv:
        none = np.zeros(sq, np.int64)
        return np.zeros((0, query_blocks), np.uint8), KeyRanges(none, none, none)
    keys = xp.arange(skv, dtype=function.dtype)[None, :]
    step = BLOCK * max(1, _ELEMENTS // (BLOCK * max(skv, 1)))
    kinds, rows = np.zeros((key_blocks, query_blocks), np.uint8), []
    for begin in range(0, sq, step):
        end = min(begin + step, sq)
        attends = function(b, h, xp.arange(begin, end, dtype=function.dtype)[:, None], keys)
        sums, found = _reduced(attends, xp)
        tile = slice(begin // BLOCK, -(-end // BLOCK))
        lengths = lengths_of(sq, query_blocks)[tile][None, :] * lengths_of(skv, key_blocks)[:, None]
        kinds[:, tile] = kinds_of(sums, lengths)
        rows.append(found)
    first, last, count = np.concatenate(rows, axis=1) if rows else np.zeros((3, 0), np.int64)
    return kinds, KeyRanges(first, last, count)


def _reduced(attends: Any, xp: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return each block's number of pairs, ``(key blocks, query blocks)``; each row's first key, end and count."""
    queries, keys = attends.shape
    blocks = -(-queries // BLOCK), -(-keys // BLOCK)
    padded = attends
    if queries % BLOCK or keys % BLOCK:
        padded = xp.zeros((blocks[0] * BLOCK, blocks[1] * BLOCK), bool)
        padded[:queries, :keys] = attends
    sums = padded.reshape(blocks[0], BLOCK, blocks[1], BLOCK).sum(axis=3, dtype=np.int32).sum(axis=1).T
    count = attends.sum(axis=1, dtype=np.int64)
    found = xp.stack([attends.argmax(axis=1), keys - attends[:, ::-1].argmax(axis=1), count])
    return (sums, found) if xp is np else (cupy_runtime.cupy().asnumpy(sums), cupy_runtime.cupy().asnumpy(found))


def evaluate_blocks(function: MaskFunction, blocks: NDArray[np.int32], sq: int, skv: int) -> NDArray[np.uint8]:
    """Return the bits of single blocks: uint8 ``(n, BLOCK BLOCK / 8)``, query by query, the first key in the highest bit.

    The blocks are int32 ``(n, 4)``: key block, query block, head and batch item. Pairs after the lengths get the bit 0.
    """
    xp, found = function.xp, [np.zeros((0, BLOCK * BLOCK // 8), np.uint8)]
    step = max(1, _ELEMENTS // BLOCK**2)
    for begin in range(0, len(blocks), step):
        part = xp.asarray(blocks[begin : begin + step].astype(function.dtype))[:, :, None, None]
        offsets = xp.arange(BLOCK, dtype=function.dtype)
        queries, keys = part[:, 1] * BLOCK + offsets[:, None], part[:, 0] * BLOCK + offsets
        exists = (queries < sq) & (keys < skv)
        attends = function(part[:, 3], part[:, 2], xp.minimum(queries, sq - 1), xp.minimum(keys, skv - 1)) & exists
        bits = xp.packbits(xp.ascontiguousarray(attends).reshape(-1)).reshape(len(attends), -1)
        found.append(bits if xp is np else cupy_runtime.cupy().asnumpy(bits))
    return np.concatenate(found)
