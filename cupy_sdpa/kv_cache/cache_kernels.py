"""The paged key/value cache, on a GPU and in numpy arrays: append tokens, copy pages, store numbers in the page table."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..extend import TYPES, UNITS, Struct, cuda_kernel, cupy_runtime, dtype_name, rounded
from ..fp8.fp8_kernels import PACK, ROTATION, rotated_values
from .rope_kernel import ROPE, SHARED_TURNS, position_strides, rotated, types_of


class State(NamedTuple):
    """What the kernel reads to find the place of a token; int32.

    Attributes:
        table: ``(width, B)`` in Fortran order, the pages of each sequence.
        lengths: ``(B,)``, the tokens in the cache.
        counts: ``(B,)``, the new tokens of the present step.
        finished: ``(B,)``, zeros; used within the kernel.
        starts: ``(B + 1,)``, where the new tokens of each sequence begin in packed arrays; the last one is their number.
    """

    table: Any
    lengths: Any
    counts: Any
    finished: Any
    starts: Any


#: The maximum number of pairs in a launch. They are passed by value: kernels take arguments of at most 4 KiB in total.
_MAX_PAIRS = 500
_PAIRS = np.dtype([("count", np.int32), ("first", np.int32, _MAX_PAIRS), ("second", np.int32, _MAX_PAIRS)])
_PAIRS_DECLARATION = f"struct Pairs {{ int count, first[{_MAX_PAIRS}], second[{_MAX_PAIRS}]; }};"


def _batches(pairs: Sequence[tuple[int, int]]) -> Iterator[Any]:
    """Yield the pairs as arguments of kernels."""
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
    """Copy pages in all layers of arrays ``(D, page_size, Hkv, pages, layers)`` in Fortran order; pairs of pages (from, to).

    No page occurs both as a source and as a target.
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
    """Return the kernel of :func:`copy_pages`; ``blockIdx.y`` is the pair and ``blockIdx.z`` the layer."""
    return f"""{_PAIRS_DECLARATION}
        extern "C" __global__ void cupy_sdpa_copy_pages({unit}* storage, const Pairs pairs, long long units, long long layer) {{
            {unit}* const pages = storage + blockIdx.z * layer;
            const {unit}* const from = pages + pairs.first[blockIdx.y] * units;
            {unit}* const to = pages + pairs.second[blockIdx.y] * units;
            for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < units; i += gridDim.x * blockDim.x) to[i] = from[i];
        }}"""


def read_rows(storages: Sequence[Any], rows: Sequence[int]) -> list[Any]:
    """Return a copy of rows of all layers and heads; row r of page p is number ``p * page_size + r``."""
    if not cupy_runtime.is_array(storages[0]):
        return [storage[:, *_row_index(storage, rows)] for storage in storages]
    saved = []
    for storage in storages:
        dim, _, heads, _, layers = storage.shape
        saved.append(cupy_runtime.empty((dim, heads, layers, len(rows)), storage.dtype))
    _copy_rows(storages, saved, list(enumerate(rows)), to_storage=False)
    return saved


def write_rows(storages: Sequence[Any], saved: Sequence[Any], rows: Sequence[int], first: int) -> None:
    """Write rows from the result of :func:`read_rows`, beginning with its row ``first``."""
    if not cupy_runtime.is_array(storages[0]):
        for storage, copied in zip(storages, saved, strict=True):
            storage[:, *_row_index(storage, rows)] = copied[first : first + len(rows)]
        return
    _copy_rows(storages, saved, list(enumerate(rows, first)), to_storage=True)


def _row_index(storage: Any, rows: Sequence[int]) -> tuple[Any, ...]:
    """Return the index of rows in a numpy array."""
    pages, places = np.divmod(np.array(rows), storage.shape[1])
    return places, slice(None), pages


def _copy_rows(storages: Sequence[Any], saved: Sequence[Any], pairs: list[tuple[int, int]], *, to_storage: bool) -> None:
    """Copy between saved rows and the storages' rows, in pairs of their numbers; one launch for each storage."""
    for storage, copied, batch in ((*both, part) for both in zip(storages, saved, strict=True) for part in _batches(pairs)):
        size, heads, layers = storage.shape[1], storage.shape[2], storage.shape[4]
        unit = math.gcd(storage.strides[1], 16)
        units = storage.strides[1] // unit
        numbers = (np.int32(units), np.int32(size), np.int32(heads), np.int64(storage.strides[4] // unit))
        grid, block = (int(batch["count"]), heads, layers), (min(128, units),)
        _copy_rows_kernel(UNITS[unit])(grid, block, (storage, copied, batch, *numbers, np.int32(to_storage)))


@cuda_kernel
def _copy_rows_kernel(unit: str) -> str:
    """Return the kernel of :func:`_copy_rows`; a block copies one row of one head and layer."""
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


def clear_rows(storages: Sequence[Any], spans: Sequence[tuple[int, int]]) -> None:
    """Write 0 to rows of all layers and heads; spans of rows of one page, as pairs of the first row and the number of rows.

    Row r of page p is number ``p * page_size + r``. One launch for each storage.
    """
    if not cupy_runtime.is_array(storages[0]):
        for storage, (row, count) in itertools.product(storages, spans):
            page, first = divmod(row, storage.shape[1])
            storage[:, first : first + count, :, page] = 0
        return
    for storage, batch in itertools.product(storages, _batches(spans)):
        unit = math.gcd(storage.strides[1], 16)
        units = storage.strides[1] // unit
        numbers = (np.int32(units), np.int32(storage.shape[1]), np.int64(storage.strides[4] // unit))
        grid = (int(batch["count"]), storage.shape[2], storage.shape[4])
        _clear_rows_kernel(UNITS[unit])(grid, (128,), (storage, batch, *numbers))


@cuda_kernel
def _clear_rows_kernel(unit: str) -> str:
    """Return the kernel of :func:`clear_rows`; a block clears a contiguous span of one head and layer."""
    return f"""{_PAIRS_DECLARATION}
        extern "C" __global__ void cupy_sdpa_clear_rows(
            {unit}* storage, const Pairs spans, int units, int size, long long layer
        ) {{
            const long long row = spans.first[blockIdx.x], page = row / size, head = blockIdx.y, heads = gridDim.y;
            {unit}* const span = storage + blockIdx.z * layer + ((page * heads + head) * size + row % size) * units;
            const long long count = (long long)spans.second[blockIdx.x] * units;
            const {unit} zero = {{}};
            for (long long i = threadIdx.x; i < count; i += blockDim.x) span[i] = zero;
        }}"""


class CacheFactors(NamedTuple):
    """How new keys or values become FP8 while they are written. Values beyond the largest number saturate.

    Attributes:
        scale: float32 ``(1,)``, of the pages.
        descale: float32 ``(1,)``, of FP8 tokens; None for others.
        rotation: the length of the parts of head_dim that are rotated; 1 for none.
        means: float32 ``(D, Hkv, pages)``, dense in Fortran order, the mean of each page, which is subtracted: all pages of a
            sequence have the mean of its first page, and the append gives it to the other pages. None for 0.
        own: float32 ``(D, Hkv, S, B)`` or packed ``(D, Hkv, T)``, the mean of FP8 tokens, which is added; None for 0.
    """

    scale: Any = None
    descale: Any = None
    rotation: int = 1
    means: Any = None
    own: Any = None


#: The keys or the values of :func:`append`: addresses, bytes per unit, units per row, strides in bytes,
#: and :class:`CacheFactors`.
_SIDE = Struct(
    "Side",
    "tokens pages unit row head_stride token_stride batch_stride "
    f"{' '.join(CacheFactors._fields)} own_d own_head own_token own_batch",
)
_ARGUMENTS = Struct(
    "Arguments",
    f"{' '.join(State._fields)} width page_size heads tokens packed advance listed listed_token listed_batch",
    sides=(_SIDE, 2),
)
#: The threads of a block; and the elements of a row that a thread converts to FP8, which are as many bytes.
_THREADS, _UNIT = 256, 8


def append(
    k: Any,
    v: Any,
    keys: Any,
    values: Any,
    state: State,
    *,
    advance: bool,
    rotation: Any = None,
    positions: Any = None,
    factors: Sequence[CacheFactors] = (CacheFactors(), CacheFactors()),
    dtype: str = "",
) -> None:
    """Write the new tokens of one layer to their pages; one launch.

    cuDNN multiplies the rows after the last token by 0, where NaN would give NaN. These rows must therefore be 0: an append
    that begins a page clears the rest of it, and :func:`clear_rows` clears the rows of removed tokens.

    Args:
        k, v: ``(D, Hkv, S, B)`` and ``(Dv, Hkv, S, B)``, or packed ``(D, Hkv, T)`` and ``(Dv, Hkv, T)``, with unit stride along
            the first axis. Tokens beyond S or T are stored as 0. On the GPU FP8 tokens are uint8, and the head dims of FP8
            tokens and of converted tokens are multiples of 8.
        keys, values: the pages, ``(D, Hkv, page_size, pages)`` and ``(Dv, Hkv, page_size, pages)``; dense in the order
            (D, page_size, Hkv, pages).
        state: the arrays that give the place of each token.
        advance: whether the lengths do not include the new tokens yet, so that this step updates them.
        rotation: how to rotate the keys by their positions (:func:`.rope_kernel.rotation_record`), or None.
        positions: int32 ``(S,)``, ``(S, B)`` or packed ``(T,)``, each token's position for the rotation. None: its place in
            the sequence.
        factors, dtype: the factors and the dtype of FP8 pages.
    """
    if not cupy_runtime.is_array(keys):
        of_keys = rotation, positions
        _append_on_numpy(k, v, keys, values, state, advance=advance, of_keys=of_keys, factors=factors, dtype=dtype)
        return
    batch = state.lengths.size
    sides = [_side(x, pages, own, dtype) for x, pages, own in zip((k, v), (keys, values), factors, strict=True)]
    lanes = min(32, 1 << (max(side[3] for side in sides) - 1).bit_length())
    per_block = _THREADS // lanes
    blocks = -(-(k.shape[2] + keys.shape[2]) * k.shape[1] // (4 * per_block))
    numbers = state.table.shape[0], keys.shape[2], *k.shape[1:3], k.ndim == 3, advance, positions, *position_strides(positions)
    given: list[Any] = [_ARGUMENTS(*state, *numbers, sides)]
    if rotation is not None:
        given.append(rotation)
    source = "" if rotation is None and not dtype else dtype if factors[0].descale is not None else dtype_name(k.dtype)
    _append_kernel(source, dtype)((max(1, min(blocks, 2048 // batch)), batch, 2), (lanes, per_block), tuple(given))


def _elements(x: Any, own: Any, page: int, factors: CacheFactors, dtype: str) -> Any:
    """Return the FP8 elements of the numpy tokens ``(D, Hkv, count)`` of a sequence, with their mean, and its first page."""
    with np.errstate(invalid="ignore", over="ignore"):  # infinities and NaN propagate as on a GPU
        x = rotated_values(x, factors.rotation, None) if factors.descale is None else x.astype(np.float32) * factors.descale
        x = x if own is None else x + own
        x = x if factors.means is None else x - factors.means[:, :, page, None]
        return rounded(x * factors.scale, dtype)


def _append_on_numpy(
    k: Any,
    v: Any,
    keys: Any,
    values: Any,
    state: State,
    *,
    advance: bool,
    of_keys: tuple[Any, Any],
    factors: Sequence[CacheFactors],
    dtype: str,
) -> None:
    rotation, positions = of_keys
    for b, (count, first) in enumerate(zip(state.counts.tolist(), state.starts[:-1].tolist(), strict=True)):
        begin = int(state.lengths[b]) - (0 if advance else count)
        for x, pages, of_side in zip((k, v), (keys, values), factors, strict=True):
            own = of_side.own
            new, own = (
                y if y is None else y[:, :, first : first + count] if y.ndim == 3 else y[:, :, :count, b] for y in (x, own)
            )
            if rotation is not None and pages is keys:
                listed = None if positions is None else positions if positions.ndim == 1 else positions[:, b]
                places = np.arange(begin, begin + count) if listed is None else listed[first if k.ndim == 3 else 0 :][:count]
                new = rotated(new, rotation, places)
            table = state.table[:, b]
            if dtype and count:
                new = _elements(new, own, table[0], of_side, dtype)
            if of_side.means is not None:
                size, means = pages.shape[2], of_side.means
                started = table[-(-begin // size) : -(-(begin + count) // size)]
                means[:, :, started] = means[:, :, table[:1]]
            _write(new, pages, table, begin)
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


def _side(x: Any, pages: Any, factors: CacheFactors, dtype: str) -> tuple[Any, ...]:
    """Return the values of :data:`_SIDE`."""
    layout = _layout(x.shape, x.strides, x.itemsize, x.data.ptr % 16)
    of_own = () if factors.own is None else factors.own.strides
    return x, pages, *((_UNIT, x.shape[0] // _UNIT, *layout[2:]) if dtype else layout), *factors, *(*of_own, 0, 0, 0, 0)[:4]


@functools.lru_cache(maxsize=256)
def _layout(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, alignment: int) -> tuple[int, ...]:
    """Return the unit, the row and the strides of :data:`_SIDE`; the strides of axes of length 1 have no meaning."""
    steps = [stride if length > 1 else 0 for length, stride in zip(shape[1:], strides[1:], strict=True)]
    row = shape[0] * itemsize
    unit = math.gcd(16, row, alignment, *steps)
    return unit, row // unit, *(*steps, 0)[:3]


#: Writes a row of a head, which becomes 0 if ``from`` is null.
_COPY = """template <class Unit>
        struct Copy {
            static constexpr bool together = false;
            __device__ void operator()(char* to, const char* from, int, int, int, int bytes) const {
                for (int c = threadIdx.x; c < bytes / (int)sizeof(Unit); c += blockDim.x)
                    ((Unit*)to)[c] = from ? ((const Unit*)from)[c] : Unit{};
            }
        };"""


def _rotate_code(dtype: str) -> str:
    """Return the same with a rotation of the keys."""
    of, real = types_of(dtype)
    return f"""{of.header}{ROPE}
        struct Rotate {{
            static constexpr bool together = false;
            const Arguments& a;
            const Rope& rope;
            const unsigned long long* turns;
            __device__ void operator()(char* to, const char* from, int position, int, int token, int bytes) const {{
                if (from && a.listed) position = ((const int*)a.listed)[token * a.listed_token + blockIdx.y * a.listed_batch];
                {of.name}* const row = ({of.name}*)to;
                const int dim = bytes / sizeof({of.name});
                if (from) rotate_row<{real}>(rope, turns, position, (const {of.name}*)from, row, dim);
                else for (int c = threadIdx.x; c < dim; c += blockDim.x) row[c] = {of.name}(0.0f);
            }}
        }};"""


def _convert_code(source: str, dtype: str) -> str:
    """Return the same with a conversion to FP8, a unit at a time; ``to`` is null for threads that only rotate."""
    of = TYPES[source]
    return f"""{"" if source == dtype else of.header}{TYPES[dtype].header}{ROTATION}{PACK}
        struct Convert {{
            static constexpr bool together = true;
            const Arguments& a;
            const Side& s;
            const float scale, descale;
            // The mean of a page.
            __device__ float* mean_of(long long page, int head) const {{
                return (float*)s.means + (page * a.heads + head) * s.row * {_UNIT};
            }}
            __device__ void operator()(char* to, const char* from, int position, int head, int token, int) const {{
                const int b = blockIdx.y;
                const int* const table = (const int*)a.table + b * a.width;
                const float* const mean = to && s.means ? mean_of(table[0], head) : nullptr;
                const bool begins_page = mean && position && position % a.page_size == 0;
                const char* const own = (const char*)s.own + b * s.own_batch + token * s.own_token + head * s.own_head;
                for (int column = 0; column < s.row; column += blockDim.x) {{
                    const int unit = column + threadIdx.x;
                    float x[{_UNIT}] = {{}};
                    if (from && unit < s.row)
                        for (int j = 0; j < {_UNIT}; ++j)
                            x[j] = __fmul_rn(float(((const {of.name}*)from)[{_UNIT} * unit + j]), descale);
                    rotate(x, (int)s.rotation);
                    for (int j = 0; j < {_UNIT} && from && mean && unit < s.row; ++j) {{
                        const int d = {_UNIT} * unit + j;
                        if (s.own) x[j] = __fadd_rn(x[j], *(const float*)(own + d * s.own_d));
                        x[j] = __fsub_rn(x[j], mean[d]);
                    }}
                    if (begins_page && unit < s.row)
                        for (int j = 0; j < {_UNIT}; ++j)
                            mean_of(table[position / a.page_size], head)[{_UNIT} * unit + j] = mean[{_UNIT} * unit + j];
                    if (to && unit < s.row) ((uint2*)to)[unit] = pack(x, scale);
                }}
            }}
        }};"""


@cuda_kernel
def _append_kernel(source: str, dtype: str) -> str:
    """Return the kernel of :func:`append`: it converts tokens of ``source`` to FP8; without an FP8 dtype it rotates keys.

    ``blockIdx.y`` is the sequence, and ``blockIdx.z`` selects keys or values. ``threadIdx.y`` and ``blockIdx.x`` count the rows
    of all heads, ``threadIdx.x`` the units of a row, or the pairs of channels that are rotated.
    """
    cases = " ".join(f"case {size}: WRITE(Copy<{unit}>()); break;" for size, unit in UNITS.items())
    code, write = _COPY, f"switch (s.unit) {{ {cases} }}"
    if dtype:
        code = _convert_code(source, dtype)
        write = "WRITE((Convert{a, s, *(const float*)s.scale, s.descale ? *(const float*)s.descale : 1}));"
    elif source:
        code += f"\n{_rotate_code(source)}"
        write = f"{SHARED_TURNS} if (!blockIdx.z) WRITE((Rotate{{a, rope, turns}})); else {write}"
    return f"""{_ARGUMENTS}
{code}
        #define WRITE(write) write_rows(a, s, begin, count, first, write)
        // Writes the rows of new tokens; with ``together`` all threads of the block take part in each of them.
        template <class Write>
        __device__ void write_rows(const Arguments& a, const Side& s, int begin, int count, int first, const Write& write) {{
            const int size = a.page_size, b = blockIdx.y, end = begin + count, last = (end - 1) / size * size;
            const int bytes = s.row * s.unit;
            // the rest of the last page, if its first row is new
            const unsigned heads = a.heads, rows = (count == 0 || last < begin ? end : last + size) - begin;
            for (unsigned base = blockIdx.x * blockDim.y; base < rows * heads; base += gridDim.x * blockDim.y) {{
                const unsigned i = base + threadIdx.y;
                const int row = i / heads, head = i % heads, position = begin + row, token = first + row;
                const bool stored = i < rows * heads && position / size < a.width;
                if (!Write::together && !stored) break;
                const long long page = stored ? ((const int*)a.table)[b * a.width + position / size] : 0;
                char* const to = (char*)s.pages + ((page * heads + head) * size + position % size) * bytes;
                const char* const from = (const char*)(
                    s.tokens + b * s.batch_stride + token * s.token_stride + head * s.head_stride);
                const bool is_new = stored && row < count && token < a.tokens;
                write(stored ? to : nullptr, is_new ? from : nullptr, position, head, token, bytes);
            }}
        }}
        extern "C" __global__ void cupy_sdpa_append(const Arguments a{", const Rope rope" if source and not dtype else ""}) {{
            // the sequence b of a block, its new tokens from the position begin, and the first of them in a packed array
            const int b = blockIdx.y;
            int* const length = (int*)a.lengths + b;
            const int count = ((const int*)a.counts)[b], begin = max(0, *length - (a.advance ? 0 : count));
            const int first = a.packed ? ((const int*)a.starts)[b] : 0;
            const Side& s = a.sides[blockIdx.z];
            {write}
            // the last block of a sequence advances its length: every block has read it then
            if (!a.advance) return;
            __syncthreads();
            if (threadIdx.x == blockDim.x - 1 && threadIdx.y == blockDim.y - 1) {{
                __threadfence();
                int* const finished = (int*)a.finished + b;
                if (atomicAdd(finished, 1) == gridDim.x * gridDim.z - 1) {{
                    *finished = 0;
                    *length = begin + count;
                }}
            }}
        }}"""
