"""CUDA kernels of the paged key/value cache: they append tokens, copy pages, and store numbers in the page table."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..problem.tensor_spec import dtype_name
from ..runtime import cupy_runtime, memory
from ..runtime.memory import UNITS
from .ragged import declaration, struct
from .rope_kernel import RECORD, ROPE, SHARED_TURNS, types_of


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


def zeros(shape: tuple[int, ...], dtype: Any) -> Any:
    """Create an array of zeros in Fortran order."""
    array = cupy_runtime.empty(shape, dtype)
    memory.clear(array, 0)
    return array


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
    for batch in _batches(pairs):
        _store_kernel()((-(-int(batch["count"]) // 128),), (128,), (array, batch))


@functools.cache
def _store_kernel() -> Any:
    return cupy_runtime.cupy().RawKernel(
        f"""{_PAIRS_DECLARATION}
        extern "C" __global__ void cupy_sdpa_store(int* array, const Pairs pairs) {{
            const int i = blockIdx.x * blockDim.x + threadIdx.x;
            if (i < pairs.count) array[pairs.first[i]] = pairs.second[i];
        }}""",
        "cupy_sdpa_store",
    )


def copy_pages(storages: Sequence[Any], pairs: Sequence[tuple[int, int]]) -> None:
    """Copy pages in all layers; pairs of pages (from, to).

    Args:
        storages: arrays ``(D, page_size, Hkv, pages, layers)`` in Fortran order.
        pairs: the pages; none occurs both as a source and as a target.
    """
    for storage, batch in itertools.product(storages, _batches(pairs)):
        page = storage.strides[3]
        unit = math.gcd(page, 16)
        units = page // unit
        grid = (min(64, -(-units // 256)), int(batch["count"]), storage.shape[4])
        arguments = (storage, batch, np.int64(units), np.int64(storage.strides[4] // unit))
        _copy_pages_kernel(UNITS[unit])(grid, (256,), arguments)


@functools.cache
def _copy_pages_kernel(unit: str) -> Any:
    """The kernel of :func:`copy_pages`; ``blockIdx.y`` is the pair and ``blockIdx.z`` the layer."""
    return cupy_runtime.cupy().RawKernel(
        f"""{_PAIRS_DECLARATION}
        extern "C" __global__ void cupy_sdpa_copy_pages({unit}* storage, const Pairs pairs, long long units, long long layer) {{
            {unit}* const pages = storage + blockIdx.z * layer;
            const {unit}* const from = pages + pairs.first[blockIdx.y] * units;
            {unit}* const to = pages + pairs.second[blockIdx.y] * units;
            for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < units; i += gridDim.x * blockDim.x) to[i] = from[i];
        }}""",
        "cupy_sdpa_copy_pages",
    )


def read_rows(storages: Sequence[Any], rows: Sequence[int]) -> list[Any]:
    """A copy of rows of all layers and heads; row r of page p is number ``p * page_size + r``.

    Args:
        storages: arrays ``(D, page_size, Hkv, pages, layers)`` in Fortran order.
        rows: the rows.
    """
    saved = []
    for storage in storages:
        dim, _, heads, _, layers = storage.shape
        saved.append(cupy_runtime.empty((dim, heads, layers, len(rows)), storage.dtype))
    _copy_rows(storages, saved, list(enumerate(rows)), to_storage=False)
    return saved


def write_rows(storages: Sequence[Any], saved: Sequence[Any], rows: Sequence[int], first: int) -> None:
    """Write rows from those of :func:`read_rows`, of which number ``first`` is the first."""
    _copy_rows(storages, saved, list(enumerate(rows, first)), to_storage=True)


def _copy_rows(storages: Sequence[Any], saved: Sequence[Any], pairs: list[tuple[int, int]], *, to_storage: bool) -> None:
    """Copy between saved rows and those of the storages; pairs of their numbers. One launch for each storage."""
    for storage, copied, batch in ((*both, part) for both in zip(storages, saved, strict=True) for part in _batches(pairs)):
        size, heads, layers = storage.shape[1], storage.shape[2], storage.shape[4]
        unit = math.gcd(storage.strides[1], 16)
        units = storage.strides[1] // unit
        numbers = (np.int32(units), np.int32(size), np.int32(heads), np.int64(storage.strides[4] // unit))
        grid, block = (int(batch["count"]), heads, layers), (min(128, units),)
        _copy_rows_kernel(UNITS[unit])(grid, block, (storage, copied, batch, *numbers, np.int32(to_storage)))


@functools.cache
def _copy_rows_kernel(unit: str) -> Any:
    """The kernel of :func:`_copy_rows`; a block copies a row of a head of a layer."""
    return cupy_runtime.cupy().RawKernel(
        f"""{_PAIRS_DECLARATION}
        extern "C" __global__ void cupy_sdpa_copy_rows(
            {unit}* storage, {unit}* saved, const Pairs pairs, int units, int size, int heads, long long layer, int to_storage
        ) {{
            const long long row = pairs.second[blockIdx.x], page = row / size, head = blockIdx.y;
            {unit}* const inside = storage + blockIdx.z * layer + ((page * heads + head) * size + row % size) * units;
            {unit}* const outside =
                saved + (((long long)pairs.first[blockIdx.x] * gridDim.z + blockIdx.z) * heads + head) * units;
            for (int i = threadIdx.x; i < units; i += blockDim.x)
                if (to_storage) inside[i] = outside[i]; else outside[i] = inside[i];
        }}""",
        "cupy_sdpa_copy_rows",
    )


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


class _Side(NamedTuple):
    """The keys or the values of :func:`append`: addresses, bytes per unit, units per row, and strides in bytes."""

    tokens: int
    pages: int
    unit: int
    row: int
    head_stride: int
    token_stride: int
    batch_stride: int


class Arguments(NamedTuple):
    """The other arguments of the kernel of :func:`append`: addresses and numbers."""

    table: int
    lengths: int
    counts: int
    finished: int
    width: int
    page_size: int
    heads: int
    tokens: int
    packed: int
    advance: int


#: The argument of the kernel, passed by value; all fields are int64. With a rotation, it is the last field.
_STRUCT = np.dtype([(name, np.int64) for name in Arguments._fields] + [("sides", struct(_Side), 2)])
_ROPE_STRUCT = np.dtype([("plain", _STRUCT), ("rope", RECORD)])


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
        rotation: of the keys by their positions, from :func:`.rope.record`; or None.
    """
    batch = state.lengths.size
    sides = [_side(k, keys), _side(v, values)]
    lanes = min(32, 1 << (max(side.row for side in sides) - 1).bit_length())  # threads that copy one row
    arguments = arguments_of(k, keys, state, advance=advance)
    given = np.array([*arguments, *sides[0], *sides[1]], np.int64).view(_STRUCT).reshape(())
    if rotation is not None:
        plain, given = given, np.zeros((), _ROPE_STRUCT)
        given["plain"] = plain
        given["rope"] = rotation
    kernel = _append_kernel(None if rotation is None else dtype_name(k.dtype))
    kernel((blocks_of(arguments, batch, 256 // lanes), batch, 2), (lanes, 256 // lanes), (given,))


def blocks_of(arguments: Arguments, batch: int, rows_per_block: int) -> int:
    """The number of blocks for a sequence."""
    blocks = -(-(arguments.tokens + arguments.page_size) * arguments.heads // (4 * rows_per_block))
    return max(1, min(blocks, 2048 // batch))


def arguments_of(k: Any, keys: Any, state: State, *, advance: bool) -> Arguments:
    """The arguments besides the keys and values."""
    return Arguments(
        table=state.table.data.ptr,
        lengths=state.lengths.data.ptr,
        counts=state.counts.data.ptr,
        finished=state.finished.data.ptr,
        width=state.table.shape[0],
        page_size=keys.shape[2],
        heads=k.shape[1],
        tokens=k.shape[2],
        packed=k.ndim == 3,
        advance=advance,
    )


def _side(x: Any, pages: Any) -> _Side:
    address = x.data.ptr
    return _Side(address, pages.data.ptr, *_layout(x.shape, x.strides, x.itemsize, address % 16))


@functools.lru_cache(maxsize=256)
def _layout(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, alignment: int) -> tuple[int, ...]:
    """The fields of :class:`_Side` after the addresses; the strides of axes of length 1 have no meaning."""
    steps = [stride if length > 1 else 0 for length, stride in zip(shape[1:], strides[1:], strict=True)]
    row = shape[0] * itemsize
    unit = math.gcd(16, row, alignment, *steps)
    return unit, row // unit, *(*steps, 0)[:3]


@functools.cache
def _append_kernel(rotated: str | None) -> Any:
    """The kernel of :func:`append`; ``rotated`` is the dtype of keys that are rotated.

    ``blockIdx.y`` is the sequence, and ``blockIdx.z`` selects keys or values. ``threadIdx.y`` and ``blockIdx.x`` count the rows
    of all heads, ``threadIdx.x`` the units of a row, or the pairs of channels that are rotated.
    """
    cases = " ".join(
        f"case {size}: write_rows(a, s, begin, count, first, Copy<{unit}>()); break;" for size, unit in UNITS.items()
    )
    field = header = writer = rotate = ""
    if rotated:
        of, real = types_of(rotated)
        field, header = " Rope rope;", f"{of.header}{ROPE}"
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
            if (!blockIdx.z) write_rows(a, s, begin, count, first, Rotate{{a.rope, turns}});
            else"""
    return cupy_runtime.cupy().RawKernel(
        f"""{header}{declaration("Side", _Side)}
        struct Arguments {{ long long {", ".join(Arguments._fields)}; Side sides[2];{field} }};
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
        extern "C" __global__ void cupy_sdpa_append(const Arguments a) {{
            {TOKENS}
            const Side& s = a.sides[blockIdx.z];
            {rotate} switch (s.unit) {{ {cases} }}
            {ADVANCE}
        }}""",
        "cupy_sdpa_append",
    )
