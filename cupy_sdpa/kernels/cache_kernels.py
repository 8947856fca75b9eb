"""The paged key/value cache, on a GPU and in numpy arrays: append tokens, copy pages, store numbers in the page table."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..problem.tensor_spec import dtype_name
from ..runtime import cupy_runtime
from ..runtime.cuda_code import Struct, cuda_kernel
from ..runtime.memory import UNITS
from .rope_kernel import ROPE, SHARED_TURNS, rotated, types_of


class State(NamedTuple):
    """What the kernel reads to find the place of a token; int32.

    Attributes:
        table: ``(width, B)`` in Fortran order, the pages of each sequence.
        lengths: ``(B,)``, the tokens in the cache.
        counts: ``(B,)``, the new tokens of the present step.
        finished: ``(B,)``, zeros; used within the kernel.
    """

    table: Any
    lengths: Any
    counts: Any
    finished: Any


#: The maximum number of pairs in a launch. They are passed by value: kernels take arguments of at most 4 KiB in total.
_MAX_PAIRS = 500
_PAIRS = np.dtype([("count", np.int32), ("first", np.int32, _MAX_PAIRS), ("second", np.int32, _MAX_PAIRS)])
_PAIRS_DECLARATION = f"struct Pairs {{ int count, first[{_MAX_PAIRS}], second[{_MAX_PAIRS}]; }};"


def _batches(pairs: Sequence[tuple[int, int]]) -> Iterator[Any]:
    """The pairs as arguments of kernels."""
    for start in range(0, len(pairs), _MAX_PAIRS):
        part = pairs[start : start + _MAX_PAIRS]
        batch = np.zeros((), _PAIRS)
        batch["count"] = len(part)
        batch["first"][: len(part)], batch["second"][: len(part)] = zip(*part, strict=True)
        yield batch


def store(array: Any, pairs: Sequence[tuple[int, int]]) -> None:
    """Store values in an int32 array ``(n,)``; pairs of index and value."""
    if not cupy_runtime.is_array(array):
        for index, value in pairs:
            array[index] = value
        return
    for batch in _batches(pairs):
        _store_kernel()((-(-int(batch["count"]) // 128),), (128,), (array, batch))


@cuda_kernel
def _store_kernel() -> str:
    return f"""{_PAIRS_DECLARATION}
        extern "C" __global__ void cupy_sdpa_store(int* array, const Pairs pairs) {{
            const int i = blockIdx.x * blockDim.x + threadIdx.x;
            if (i < pairs.count) array[pairs.first[i]] = pairs.second[i];
        }}"""


def copy_pages(storages: Sequence[Any], pairs: Sequence[tuple[int, int]]) -> None:
    """Copy pages in all layers; pairs of pages (from, to).

    Args:
        storages: arrays ``(D, page_size, Hkv, pages, layers)`` in Fortran order.
        pairs: the pages; none occurs both as a source and as a target.
    """
    if not cupy_runtime.is_array(storages[0]):
        for storage, (source, target) in itertools.product(storages, pairs):
            storage[..., target, :] = storage[..., source, :]
        return
    for storage, batch in itertools.product(storages, _batches(pairs)):
        page = storage.strides[3]
        unit = math.gcd(page, 16)
        units = page // unit
        grid = (min(64, -(-units // 256)), int(batch["count"]), storage.shape[4])
        arguments = (storage, batch, np.int64(units), np.int64(storage.strides[4] // unit))
        _copy_pages_kernel(UNITS[unit])(grid, (256,), arguments)


@cuda_kernel
def _copy_pages_kernel(unit: str) -> str:
    """The kernel of :func:`copy_pages`; ``blockIdx.y`` is the pair and ``blockIdx.z`` the layer."""
    return f"""{_PAIRS_DECLARATION}
        extern "C" __global__ void cupy_sdpa_copy_pages({unit}* storage, const Pairs pairs, long long units, long long layer) {{
            {unit}* const pages = storage + blockIdx.z * layer;
            const {unit}* const from = pages + pairs.first[blockIdx.y] * units;
            {unit}* const to = pages + pairs.second[blockIdx.y] * units;
            for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < units; i += gridDim.x * blockDim.x) to[i] = from[i];
        }}"""


def read_rows(storages: Sequence[Any], rows: Sequence[int]) -> list[Any]:
    """A copy of rows of all layers and heads; row r of page p is number ``p * page_size + r``.

    Args:
        storages: arrays ``(D, page_size, Hkv, pages, layers)`` in Fortran order.
        rows: the rows.
    """
    if not cupy_runtime.is_array(storages[0]):
        return [storage[:, *_rows(storage, rows)] for storage in storages]
    saved = []
    for storage in storages:
        dim, _, heads, _, layers = storage.shape
        saved.append(cupy_runtime.empty((dim, heads, layers, len(rows)), storage.dtype))
    _copy_rows(storages, saved, list(enumerate(rows)), to_storage=False)
    return saved


def write_rows(storages: Sequence[Any], saved: Sequence[Any], rows: Sequence[int], first: int) -> None:
    """Write rows from those of :func:`read_rows`, of which number ``first`` is the first."""
    if not cupy_runtime.is_array(storages[0]):
        for storage, copied in zip(storages, saved, strict=True):
            storage[:, *_rows(storage, rows)] = copied[first : first + len(rows)]
        return
    _copy_rows(storages, saved, list(enumerate(rows, first)), to_storage=True)


def _rows(storage: Any, rows: Sequence[int]) -> tuple[Any, ...]:
    """The index of rows in a numpy array."""
    pages, places = np.divmod(np.array(rows), storage.shape[1])
    return places, slice(None), pages


def _copy_rows(storages: Sequence[Any], saved: Sequence[Any], pairs: list[tuple[int, int]], *, to_storage: bool) -> None:
    """Copy between saved rows and those of the storages; pairs of their numbers. One launch for each storage."""
    for storage, copied, batch in ((*both, part) for both in zip(storages, saved, strict=True) for part in _batches(pairs)):
        size, heads, layers = storage.shape[1], storage.shape[2], storage.shape[4]
        unit = math.gcd(storage.strides[1], 16)
        units = storage.strides[1] // unit
        numbers = (np.int32(units), np.int32(size), np.int32(heads), np.int64(storage.strides[4] // unit))
        grid, block = (int(batch["count"]), heads, layers), (min(128, units),)
        _copy_rows_kernel(UNITS[unit])(grid, block, (storage, copied, batch, *numbers, np.int32(to_storage)))


@cuda_kernel
def _copy_rows_kernel(unit: str) -> str:
    """The kernel of :func:`_copy_rows`; a block copies a row of a head of a layer."""
    return f"""{_PAIRS_DECLARATION}
        extern "C" __global__ void cupy_sdpa_copy_rows(
            {unit}* storage, {unit}* saved, const Pairs pairs, int units, int size, int heads, long long layer, int to_storage
        ) {{
            const long long row = pairs.second[blockIdx.x], page = row / size, head = blockIdx.y;
            {unit}* const inside = storage + blockIdx.z * layer + ((page * heads + head) * size + row % size) * units;
            {unit}* const outside =
                saved + (((long long)pairs.first[blockIdx.x] * gridDim.z + blockIdx.z) * heads + head) * units;
            for (int i = threadIdx.x; i < units; i += blockDim.x)
                if (to_storage) inside[i] = outside[i]; else outside[i] = inside[i];
        }}"""


#: The sequence b of a block, its new tokens from the position ``begin``, and the first of them in a packed array.
TOKENS = """const int b = blockIdx.y;
            const int* const counts = (const int*)a.counts;
            int* const length = (int*)a.lengths + b;
            const int count = counts[b], begin = max(0, *length - (a.advance ? 0 : count));
            int first = 0;
            if (a.packed) for (int i = 0; i < b; ++i) first += counts[i];"""
#: The last block of a sequence advances its length: every block has read it then.
ADVANCE = """if (!a.advance) return;
            __syncthreads();
            if (threadIdx.x == blockDim.x - 1 && threadIdx.y == blockDim.y - 1) {
                __threadfence();
                int* const finished = (int*)a.finished + b;
                if (atomicAdd(finished, 1) == gridDim.x * gridDim.z - 1) {
                    *finished = 0;
                    *length = begin + count;
                }
            }"""


#: The arguments of a kernel that appends, besides the keys and values: addresses and numbers.
ARGUMENTS = "table lengths counts finished width page_size heads tokens packed advance"
#: The keys or the values of :func:`append`: addresses, bytes per unit, units per row, and strides in bytes.
_SIDE = Struct("Side", "tokens pages unit row head_stride token_stride batch_stride")
_ARGUMENTS = Struct("Arguments", ARGUMENTS, sides=(_SIDE, 2))


def append(k: Any, v: Any, keys: Any, values: Any, state: State, *, advance: bool, rotation: Any = None) -> None:
    """Write the new tokens of one layer to their pages; one launch.

    The other rows of a page that the new tokens begin become 0: cuDNN multiplies them by 0, and NaN would spread.

    Args:
        k, v: ``(D, Hkv, S, B)`` and ``(Dv, Hkv, S, B)``, or packed ``(D, Hkv, T)`` and ``(Dv, Hkv, T)``, with unit stride along
            the first axis. Tokens beyond S or T are stored as 0.
        keys, values: the pages, ``(D, Hkv, page_size, pages)`` and ``(Dv, Hkv, page_size, pages)``; dense in the order
            (D, page_size, Hkv, pages).
        state: the arrays that give the place of each token.
        advance: whether the lengths are those before the step and become those after it; otherwise they are those after it.
        rotation: of the keys by their positions, from :func:`.rope_kernel.record`; or None.
    """
    if not cupy_runtime.is_array(keys):
        _append_on_numpy(k, v, keys, values, state, advance=advance, rotation=rotation)
        return
    batch = state.lengths.size
    sides = [_side(k, keys), _side(v, values)]
    lanes = lanes_of(*(side[3] for side in sides))
    given: list[Any] = [_ARGUMENTS(*arguments_of(k, keys, state, advance=advance), sides)]
    if rotation is not None:
        given.append(rotation)
    kernel = _append_kernel(None if rotation is None else dtype_name(k.dtype))
    kernel(grid_of(k, keys, batch, 256 // lanes), (lanes, 256 // lanes), tuple(given))


def _append_on_numpy(k: Any, v: Any, keys: Any, values: Any, state: State, *, advance: bool, rotation: Any) -> None:
    first = 0
    for b, count in enumerate(state.counts.tolist()):
        begin = int(state.lengths[b]) - (0 if advance else count)
        new_k, new_v = (x[:, :, first : first + count] if x.ndim == 3 else x[:, :, :count, b] for x in (k, v))
        if rotation is not None:
            new_k = rotated(new_k, rotation, np.arange(begin, begin + count))
        _write(new_k, keys, state.table[:, b], begin)
        _write(new_v, values, state.table[:, b], begin)
        first += count
    if advance:
        state.lengths[...] += state.counts


def _write(new: Any, pages: Any, table: Any, begin: int) -> None:
    """Write tokens ``(D, Hkv, count)`` to the positions from ``begin``; clear the other rows of a page that they begin."""
    size, end = pages.shape[2], begin + new.shape[2]
    for start in range(begin // size * size, end, size):
        page = pages[..., table[start // size]]
        if start >= begin:
            page[...] = 0
        low, high = max(begin, start), min(end, start + size)
        page[:, :, low - start : high - start] = new[:, :, low - begin : high - begin]


def lanes_of(*units: int) -> int:
    """The threads that copy a row, of these numbers of units in keys and values."""
    return min(32, 1 << (max(units) - 1).bit_length())


def grid_of(k: Any, keys: Any, batch: int, rows_per_block: int) -> tuple[int, int, int]:
    """The blocks for the tokens of a sequence, the sequences, and keys and values."""
    blocks = -(-(k.shape[2] + keys.shape[2]) * k.shape[1] // (4 * rows_per_block))
    return max(1, min(blocks, 2048 // batch)), batch, 2


def arguments_of(k: Any, keys: Any, state: State, *, advance: bool) -> tuple[Any, ...]:
    """The values of :data:`ARGUMENTS`."""
    return (*state, state.table.shape[0], keys.shape[2], *k.shape[1:3], k.ndim == 3, advance)


def _side(x: Any, pages: Any) -> tuple[Any, ...]:
    """The values of :data:`_SIDE`."""
    return x, pages, *_layout(x.shape, x.strides, x.itemsize, x.data.ptr % 16)


@functools.lru_cache(maxsize=256)
def _layout(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, alignment: int) -> tuple[int, ...]:
    """The values of :data:`_SIDE` after the addresses; the strides of axes of length 1 have no meaning."""
    steps = [stride if length > 1 else 0 for length, stride in zip(shape[1:], strides[1:], strict=True)]
    row = shape[0] * itemsize
    unit = math.gcd(16, row, alignment, *steps)
    return unit, row // unit, *(*steps, 0)[:3]


@cuda_kernel
def _append_kernel(rotates: str | None) -> str:
    """The kernel of :func:`append`; ``rotates`` is the dtype of keys that are rotated.

    ``blockIdx.y`` is the sequence, and ``blockIdx.z`` selects keys or values. ``threadIdx.y`` and ``blockIdx.x`` count the rows
    of all heads, ``threadIdx.x`` the units of a row, or the pairs of channels that are rotated.
    """
    cases = " ".join(
        f"case {size}: write_rows(a, s, begin, count, first, Copy<{unit}>()); break;" for size, unit in UNITS.items()
    )
    header = given = writer = rotate = ""
    if rotates:
        of, real = types_of(rotates)
        header, given = f"{of.header}{ROPE}", ", const Rope rope"
        writer = f"""struct Rotate {{
            const Rope& rope;
            const unsigned long long* turns;
            __device__ void operator()(char* to, const char* from, int position, int bytes) const {{
                {of.name}* const row = ({of.name}*)to;
                const int dim = bytes / sizeof({of.name});
                if (from) rotate_row<{real}>(rope, turns, position, (const {of.name}*)from, row, dim);
                else for (int c = threadIdx.x; c < dim; c += blockDim.x) row[c] = {of.name}(0.0f);
            }}
        }};"""
        rotate = f"""{SHARED_TURNS}
            if (!blockIdx.z) write_rows(a, s, begin, count, first, Rotate{{rope, turns}});
            else"""
    return f"""{header}{_ARGUMENTS}
        template <class Unit>
        struct Copy {{
            __device__ void operator()(char* to, const char* from, int, int bytes) const {{
                for (int c = threadIdx.x; c < bytes / (int)sizeof(Unit); c += blockDim.x)
                    ((Unit*)to)[c] = from ? ((const Unit*)from)[c] : Unit{{}};
            }}
        }};
        {writer}
        // Writes the rows of new tokens; the source of a row that becomes 0 is null.
        template <class Write>
        __device__ void write_rows(const Arguments& a, const Side& s, int begin, int count, int first, const Write& write) {{
            const int size = a.page_size, b = blockIdx.y, end = begin + count, last = (end - 1) / size * size;
            const int bytes = s.row * s.unit;
            // the rest of the last page, if its first row is new
            const unsigned heads = a.heads, rows = (count == 0 || last < begin ? end : last + size) - begin;
            for (unsigned i = blockIdx.x * blockDim.y + threadIdx.y; i < rows * heads; i += gridDim.x * blockDim.y) {{
                const int row = i / heads, head = i % heads, position = begin + row, token = first + row;
                if (position / size >= a.width) break;
                const long long page = ((const int*)a.table)[b * a.width + position / size];
                char* const to = (char*)s.pages + ((page * heads + head) * size + position % size) * bytes;
                const char* const from = (const char*)(
                    s.tokens + b * s.batch_stride + token * s.token_stride + head * s.head_stride);
                write(to, row < count && token < a.tokens ? from : nullptr, position, bytes);
            }}
        }}
        extern "C" __global__ void cupy_sdpa_append(const Arguments a{given}) {{
            {TOKENS}
            const Side& s = a.sides[blockIdx.z];
            {rotate} switch (s.unit) {{ {cases} }}
            {ADVANCE}
        }}"""
