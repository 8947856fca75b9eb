"""An operation graph evaluated with numpy as cuDNN 9.19 does: what it computes, what it writes, and what it does not write.

Sums of FP8 products have the precision of Hopper's tensor cores. One bug is 9.28's: the backward pass treats -inf in an array
with one element per query as 0.

Everything is computed as if there were no lengths, so the padding is multiplied by 0 and its NaN spreads. Arrays with ragged
offsets are read within their sequences: up to the next offset, and up to the length if the graph has lengths. Rows in the padding are not written, and nothing is written for a batch item without queries, or
without keys and sinks; but a single query with paged keys is written. The sum of the score gradients is added to the existing
values.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from cupy_sdpa.core.cudnn.constants import DataType, PointwiseMode, ReduceTensorOp

from .device import ILLEGAL_ADDRESS, CUDARuntimeError, Device

#: The number of keys that the kernels for several queries load at once.
TILE = 128
#: Hopper adds the FP8 products of so many columns at a time, with so many bits after the leading one.
FP8_COLUMNS, FP8_BITS = 32, 13
_DTYPES = {
    DataType.HALF: np.dtype("float16"), DataType.BFLOAT16: np.dtype(ml_dtypes.bfloat16), DataType.FLOAT: np.dtype("float32"),
    DataType.DOUBLE: np.dtype("float64"), DataType.INT32: np.dtype("int32"), DataType.INT64: np.dtype("int64"),
    DataType.BOOLEAN: np.dtype("bool"), DataType.UINT8: np.dtype("uint8"),
    DataType.FP8_E4M3: np.dtype(ml_dtypes.float8_e4m3fn), DataType.FP8_E5M2: np.dtype(ml_dtypes.float8_e5m2),
}  # fmt: skip
_FP8 = {_DTYPES[DataType.FP8_E4M3], _DTYPES[DataType.FP8_E5M2]}
_NUMBERS = {"float32": ctypes.c_float, "float64": ctypes.c_double, "int32": ctypes.c_int32}


@dataclass(frozen=True)
class Tensor:
    """A tensor descriptor."""

    uid: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    virtual: bool
    by_value: bool
    ragged: Tensor | None

    @property
    def name(self) -> str:
        """The name in messages."""
        return f"tensor {self.uid} {self.dims} {self.dtype}"

    @property
    def steps(self) -> tuple[int, ...]:
        """Strides in bytes."""
        return tuple(step * self.dtype.itemsize for step in self.strides)

    @property
    def sequence(self) -> int:
        """A ragged tensor's axis of positions: rows, or columns if their stride is larger."""
        return 3 if self.strides[3] > self.strides[2] else 2


class Value(NamedTuple):
    """The value of a tensor: a float32, integer or boolean array, and the rows and columns of each batch item.

    Attributes:
        top: whether it is the maximum of each row.
        total: whether it is a sum.
        product: whether it is a product of matrices.
        grouped: whether it is the sum over the heads of a group.
    """

    array: Any
    rows: Any = None
    columns: Any = None
    top: bool = False
    total: bool = False
    product: bool = False
    grouped: bool = False


class Read(NamedTuple):
    """Reads the arguments of an execution.

    Attributes:
        device: the memory.
        pointers: the address of every tensor in memory.
        numbers: the by-value scalars.
        lengths: the lengths of the sequences of ragged tensors.
    """

    device: Device
    pointers: dict[int, int]
    numbers: dict[int, float]
    lengths: Mapping[int, Any] = {}

    def __call__(self, t: Tensor) -> Any:
        """The contents of a tensor; the padding of a ragged one is 0."""
        if t.by_value:
            return np.full((1, 1, 1, 1), self.numbers[t.uid], t.dtype)
        if t.ragged is None:
            return self.device.view(self.pointers[t.uid], t.dims, t.steps, t.dtype).copy()
        found = np.zeros(t.dims, t.dtype)
        begins = self(t.ragged).ravel().tolist()
        if sorted(begins) != begins:
            raise CUDARuntimeError(ILLEGAL_ADDRESS, f"the ragged offsets of {t.name} decrease: {begins}")
        for b, (begin, end) in enumerate(itertools.pairwise(begins)):
            length = min((end - begin) // t.strides[t.sequence], t.dims[t.sequence])
            if t.uid in self.lengths:
                length = min(length, int(self.lengths[t.uid][b]))
            self.within(t, found[b], length)[...] = self.entry(t, begin, length)
        return found

    def entry(self, t: Tensor, begin: int, length: int) -> Any:
        """The memory of a batch item of a ragged tensor."""
        shape = list(t.dims[1:])
        shape[t.sequence - 1] = length
        return self.device.view(self.pointers[t.uid] + begin * t.dtype.itemsize, shape, t.steps[1:], t.dtype)

    @staticmethod
    def within(t: Tensor, entry: Any, length: int) -> Any:
        """The positions of an entry that are within the array."""
        return entry[:, :length] if t.sequence == 2 else entry[:, :, :length]


class Operation(NamedTuple):
    """An operation: its kind, its tensors by role, and its settings."""

    kind: str
    tensors: dict[str, Tensor]
    settings: dict[str, Any]


@dataclass(frozen=True)
class Program:
    """The operations of a graph."""

    operations: tuple[Operation, ...]

    @classmethod
    def of(cls, operations: list[Any]) -> Program:
        """Create a program from descriptors: nested (kind, pointer, attributes)."""
        tensors: dict[int, Tensor] = {}

        def tensor(pointer: int, given: dict[str, Any]) -> Tensor:
            if pointer not in tensors:
                ragged = given.get("RAGGED_OFFSET_DESC")
                tensors[pointer] = Tensor(
                    given["UNIQUE_ID"][0], tuple(given["DIMENSIONS"]), tuple(given["STRIDES"]),
                    _DTYPES[DataType(given["DATA_TYPE"][0])], bool(given["IS_VIRTUAL"][0]),
                    bool(given.get("IS_BY_VALUE", [False])[0]), tensor(*ragged[1:]) if ragged else None,
                )  # fmt: skip
            return tensors[pointer]

        def operation(kind: str, _: int, given: dict[str, Any]) -> Operation:
            of, settings = {}, {}
            for name, value in given.items():
                if isinstance(value, tuple) and value[0] == "TENSOR":
                    of[name] = tensor(*value[1:])
                elif isinstance(value, tuple):
                    settings |= {key: setting[0] for key, setting in value[2].items()}
            return Operation(kind.removeprefix("OPERATION_"), of, settings)

        made = [operation(*given) for given in operations]
        queries = next((o.tensors["ADESC"].dims[2] for o in made if o.kind == "MATMUL"), 0)
        for operation in made:
            if operation.kind == "PAGED_CACHE_LOAD":
                operation.settings["tile"] = 1 if queries == 1 else TILE
        if sum(operation.kind == "MATMUL" for operation in made) > 2:
            for operation in made:
                operation.settings["backward"] = True
        return cls(tuple(made))

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that an execution passes."""
        every = {t for operation in self.operations for t in operation.tensors.values()}
        every |= {t.ragged for t in every if t.ragged is not None}
        return sorted((t for t in every if not t.virtual), key=lambda t: t.uid)

    def numbers(self, pointers: dict[int, int]) -> dict[int, float]:
        """The by-value scalars, read from the host before the execution is enqueued."""
        given = (t for t in self.tensors if t.by_value)
        return {t.uid: _NUMBERS[t.dtype.name].from_address(pointers[t.uid]).value for t in given}

    def run(self, read: Read, scribble: Callable[[], None]) -> None:
        """Evaluate the program.

        Args:
            read: reads the arguments.
            scribble: fills cuDNN's part of the workspace with garbage.
        """
        values: dict[int, Value] = {}
        not_written = self._entries_not_written(read)
        read = read._replace(lengths=self._sequence_lengths(read))

        def get(t: Tensor) -> Value:
            if t.virtual:
                return values[t.uid]
            return values.get(t.uid, Value(None))._replace(array=_working(self._as_one_query_reads(t, read(t))))

        for operation in self.operations:
            scribble()
            if operation.kind == "PAGED_CACHE_LOAD":
                t = operation.tensors["YDESC"]
                values[t.uid] = Value(_working(_paged_load(operation, read)))
                continue
            t = operation.tensors["CDESC" if operation.kind == "MATMUL" else "YDESC"]
            value = _RULES[operation.kind](operation, {name: get(x) for name, x in operation.tensors.items() if x is not t})
            array = np.broadcast_to(value.array, np.broadcast_shapes(value.array.shape, t.dims if not t.virtual else ()))
            rounded = _rounded(array, t.dtype)
            values[t.uid] = value._replace(array=_working(rounded))
            if not t.virtual:
                added = operation.kind == "REDUCTION" and not value.product and t.dims[3] > 1
                _write(read, t, rounded, values[t.uid], not_written, added)

    def _sequence_lengths(self, read: Read) -> dict[int, Any]:
        """The lengths of the sequences of every ragged tensor that a matmul with lengths reads, or that is multiplied by one."""
        lengths: dict[int, Any] = {}
        for operation in self.operations:
            for name, sides in {"ADESC": "MK", "BDESC": "KN"}.items():
                t = operation.tensors.get(name)
                if operation.kind == "MATMUL" and t is not None and t.ragged is not None:
                    given = operation.tensors.get(f"GEMM_{sides[t.sequence - 2]}_OVERRIDE_DESC")
                    lengths |= {} if given is None else {t.uid: read(given).ravel()}
        for operation in self.operations:
            ragged = [t.uid for t in operation.tensors.values() if t.ragged is not None]
            if operation.kind == "POINTWISE":
                found = [lengths[uid] for uid in ragged if uid in lengths]
                lengths |= {uid: found[0] for uid in ragged if found and uid not in lengths}
        return lengths

    def _entries_not_written(self, read: Read) -> Any:
        """For each batch item whether nothing is written: with lengths, it has no query, or neither a key nor a sink."""
        one_paged_query = any(operation.settings.get("tile") == 1 for operation in self.operations)
        for operation in self.operations:
            t = operation.tensors
            if {"GEMM_M_OVERRIDE_DESC", "GEMM_N_OVERRIDE_DESC"} <= t.keys():
                queries, keys = (read(t[f"GEMM_{name}_OVERRIDE_DESC"]).ravel() for name in "MN")
                self._check_that_it_ends(t["ADESC"], keys[queries > 0])
                return (queries == 0) | ((keys == 0) & (self._sinks is None) & (not one_paged_query))
        return None

    def _check_that_it_ends(self, q: Tensor, keys: Any) -> None:
        """Hopper's FP8 kernel never ends if some sequences with queries, not all, have no key and there are more tiles than
        multiprocessors."""
        batch, heads, rows, _ = q.dims
        if q.dtype in _FP8 and batch * heads * -(-rows // TILE) > 132 and keys.any() and not keys.all():
            raise AssertionError("the FP8 kernel never ends: a sequence has no keys")

    @property
    def _sinks(self) -> Tensor | None:
        """The sinks of the softmax, to which rows without a key attend."""
        maxima = (o.tensors["BDESC"] for o in self.operations if o.settings.get("MODE") == PointwiseMode.MAX)
        return next((t for t in maxima if not t.virtual and t.dims[2:] == (1, 1)), None)

    def _as_one_query_reads(self, t: Tensor, array: Any) -> Any:
        """The kernel for one query and paged keys reads the sink of the first head of a group for all its heads."""
        loads = [
            o.tensors["CONTAINER_DESC"] for o in self.operations if o.kind == "PAGED_CACHE_LOAD" and o.settings["tile"] == 1
        ]
        if not loads or t is not self._sinks:
            return array
        group = t.dims[1] // loads[0].dims[1]
        return array[:, ::group].repeat(group, axis=1)


def _write(read: Read, t: Tensor, array: Any, value: Value, not_written: Any, added: bool) -> None:
    """Write the valid rows of a result."""
    if value.rows is None and t.ragged is None:
        view = read.device.view(read.pointers[t.uid], t.dims, t.steps, t.dtype)
        view[...] = view + array if added else array
        return
    begins = None if t.ragged is None else read(t.ragged).ravel().tolist()
    for b in range(t.dims[0]):
        begin = b * t.strides[0] if begins is None else begins[b]
        if value.rows is not None:
            length = int(value.rows[b])
        else:
            length = t.dims[2] if begins is None else (begins[b + 1] - begin) // t.strides[2]
        length = min(length, t.dims[2])
        if length == 0 or (not_written is not None and not_written[b]):
            continue
        shape = (t.dims[1], length, t.dims[3])
        view = read.device.view(read.pointers[t.uid] + begin * t.dtype.itemsize, shape, t.steps[1:], t.dtype)
        view[...] = array[b, :, :length]
        if value.grouped and begins is not None and t.strides[2] != t.dims[1] * t.dims[3]:
            view[:, -1] = 3  # packed sequences of grouped heads: wrong where dk or dv is not dense


def _paged_load(operation: Operation, read: Read) -> Any:
    """The rows of the pages of every entry.

    With several queries the rows of whole tiles are loaded: table entries after the length are read, those that are not pages
    give 0, and page 0 is loaded after the end of the table. With one query only the rows before the length are loaded.
    """
    t = operation.tensors
    pages, y, table = read(t["CONTAINER_DESC"]), t["YDESC"], t["PAGE_TABLE_DESC"]
    (count, heads, page, d), (batch, _, width, _) = pages.shape, table.dims
    lengths, tile = read(t["SEQUENCE_DESC"]).ravel(), operation.settings["tile"]
    longest = max(width * page, -(-width * page // tile) * tile)
    rows = np.zeros((batch, heads, longest, d), pages.dtype)
    for b, length in enumerate(lengths):
        loaded = -(-int(length) // tile) * tile
        start = read.pointers[table.uid] + b * table.steps[0]
        entries = read.device.view(start, (min(-(-loaded // page), width),), (table.steps[2],), table.dtype)
        for i in range(-(-loaded // page)):
            entry, kept = entries[i] if i < width else 0, page if tile > 1 else min(page, int(length) - i * page)
            if 0 <= entry < count:
                rows[b, :, i * page : i * page + kept] = pages[entry, :, :kept]
        if np.isnan(rows[b, :, width * page :]).any():  # the values are multiplied by 0, and added
            rows[b] = np.nan
    rows = rows[:, :, : width * page]
    return rows.swapaxes(2, 3) if y.dims[2:] == (d, width * page) and y.strides[2] == 1 else rows


def _rounded(array: Any, dtype: np.dtype[Any]) -> Any:
    """Numbers in a dtype; FP8 saturates."""
    if dtype.itemsize > 1 or dtype.kind in "biu":
        return array.astype(dtype)
    most = float(ml_dtypes.finfo(dtype).max)
    return np.clip(array, -most, most).astype(dtype)


def _working(array: Any) -> Any:
    return array if array.dtype.kind in "ib" else array.astype(np.float32)


def _matmul(operation: Operation, given: dict[str, Value]) -> Value:
    a, b = given["ADESC"], given["BDESC"]
    groups = a.array.shape[1] // b.array.shape[1]
    in_fp8 = {operation.tensors[name].dtype for name in ("ADESC", "BDESC")} <= _FP8
    array = (fp8_product if in_fp8 else np.matmul)(a.array, np.repeat(b.array, groups, axis=1))
    rows, columns = a.rows, b.columns
    if "GEMM_M_OVERRIDE_DESC" in given:
        rows = given["GEMM_M_OVERRIDE_DESC"].array.ravel()
    if "GEMM_N_OVERRIDE_DESC" in given:
        columns = given["GEMM_N_OVERRIDE_DESC"].array.ravel()
    return Value(array, rows, columns, product=True)


def fp8_product(a: Any, b: Any) -> Any:
    """The product of FP8 matrices on Hopper: addends are truncated to :data:`FP8_BITS` below the exponent of the largest one.

    Source: DeepSeek-AI 2024, "DeepSeek-V3 technical report", section 3.3.2. With 13 bits the errors of attention are those of an
    H200 (tests/fp8/test_fp8.py).
    """
    total = np.zeros((*a.shape[:-1], b.shape[-1]), np.float32)
    for begin in range(0, a.shape[-1], FP8_COLUMNS):
        columns = slice(begin, begin + FP8_COLUMNS)
        products = a[..., columns, None] * b[..., None, columns, :]
        largest = np.maximum(np.abs(products).max(axis=-2), np.abs(total))
        unit = np.ldexp(np.float32(1), np.frexp(largest)[1] - 1 - FP8_BITS)
        total = np.trunc(total / unit) * unit + (np.trunc(products / unit[..., None, :]) * unit[..., None, :]).sum(axis=-2)
    return total


def _reduction(operation: Operation, given: dict[str, Value]) -> Value:
    x, dims = given["XDESC"], operation.tensors["YDESC"].dims
    array = np.broadcast_to(x.array, operation.tensors["XDESC"].dims)
    b, h, m, n = array.shape
    if x.product:  # sum over the heads of a group
        return x._replace(array=array.reshape(b, dims[1], h // dims[1], m, n).sum(axis=2), grouped=True)
    axes = tuple(axis for axis in range(4) if dims[axis] == 1)
    if ReduceTensorOp(operation.settings["OPERATOR"]) == ReduceTensorOp.AMAX:
        return Value(_largest(array, x.rows))
    if ReduceTensorOp(operation.settings["OPERATOR"]) == ReduceTensorOp.MAX:
        return Value(array.max(axis=axes, keepdims=True), x.rows, top=True)
    total = array.sum(axis=axes, keepdims=True, dtype=np.float32)
    if _is_of_sinks(operation, n):
        total = -total  # cuDNN negates it
    return Value(total, x.rows if (dims[0], *dims[2:]) == (b, m, 1) else None, total=True)


def _is_of_sinks(operation: Operation, columns: int) -> bool:
    """Whether a sum is the gradient of the sinks: the only sum of rows in float32 that a backward pass writes."""
    y = operation.tensors["YDESC"]
    shape = (y.dims[0], *y.dims[2:], columns)
    return "backward" in operation.settings and not y.virtual and shape == (1, 1, 1, 1) and y.dtype == np.float32


def _largest(array: Any, rows: Any) -> Any:
    """The largest magnitude of the rows that are no padding."""
    inside = True if rows is None else np.arange(array.shape[2])[:, None] < np.reshape(rows, (-1, 1, 1, 1))
    return np.abs(array).max(axis=(0, 1, 2, 3), keepdims=True, where=inside, initial=0)


def _rng(operation: Operation, given: dict[str, Value]) -> Value:
    """Random numbers that depend on the seed, the offset and the index of the element.

    As measured with cuDNN, the heads of all batch items, counted together, are 32 apart in units of the offset.
    """
    seed, offset = (int(given[name].array.ravel()[0]) for name in ("SEED", "OFFSET_DESC"))
    dims = operation.tensors["YDESC"].dims
    b, h, i, j = np.ogrid[tuple(slice(n) for n in dims)]
    with np.errstate(over="ignore"):
        x = (i << 20 | j).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = x ^ (
            np.uint64(seed % 2**64) * np.uint64(0xBF58476D1CE4E5B9)
            + np.uint64(offset % 2**64)
            + 32 * (b * dims[1] + h).astype(np.uint64)
        )
        for shift in (30, 27, 31):  # splitmix64
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(0x94D049BB133111EB)
    kept = (x >> np.uint64(40)) < round(operation.settings["BERNOULLI_DIST_PROBABILITY"] * 2**24)
    return Value(kept.astype(np.float32))


def _reshape(operation: Operation, given: dict[str, Value]) -> Value:
    x = given["XDESC"]
    assert operation.tensors["YDESC"].dims == tuple(operation.tensors["XDESC"].dims[axis] for axis in (0, 1, 3, 2))
    array = np.broadcast_to(x.array, operation.tensors["XDESC"].dims)
    return x._replace(array=array.swapaxes(2, 3), rows=x.columns, columns=x.rows)


def _subtract(x: Value, b: Value) -> Any:
    """In a fully masked row the maximum and the scores are -inf; cuDNN subtracts 0."""
    return x.array - (np.where(np.isneginf(b.array), 0, b.array) if b.top else b.array)


def _divide(x: Value, b: Value) -> Any:
    """In a fully masked row the sum is 0; cuDNN gives 0. It divides integers in float32."""
    if x.array.dtype.kind == "i":
        return x.array.astype(np.float32) / b.array.astype(np.float32)
    return x.array / (np.where(b.array == 0, 1, b.array) if b.total else b.array)


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: function(*(value.array for value in given))


_erf = np.vectorize(math.erf, otypes=[np.float32])

_MODES: dict[str, Callable[..., Any]] = {
    "SUB": _subtract, "DIV": _divide, "RSQRT": _plain(lambda x: 1 / np.sqrt(x)), "ERF": _plain(_erf),
    "IDENTITY": _plain(lambda x: x), "BINARY_SELECT": _plain(lambda x, b, t: np.where(t != 0, x, b)),
    **{name: _plain(function) for name, function in {
        "MUL": np.multiply, "ADD": np.add, "MAX": np.maximum, "MIN": np.minimum, "POW": np.power, "NEG": np.negative,
        "EXP": np.exp, "LOG": np.log, "SQRT": np.sqrt, "RECIPROCAL": np.reciprocal, "TANH_FWD": np.tanh, "SIN": np.sin,
        "COS": np.cos, "TAN": np.tan, "ABS": np.absolute, "FLOOR": np.floor, "CEIL": np.ceil, "CMP_EQ": np.equal,
        "CMP_NEQ": np.not_equal, "CMP_GE": np.greater_equal, "CMP_GT": np.greater, "CMP_LE": np.less_equal,
        "CMP_LT": np.less, "LOGICAL_AND": np.logical_and, "LOGICAL_OR": np.logical_or, "MOD": np.fmod,
    }.items()},
}  # fmt: skip


def _is_mistaken(b: Tensor, x: Tensor, mode: str) -> bool:
    """Whether cuDNN reads the element of another batch item, from an array with one element per entry.

    It does not if there is only one query and one key.
    """
    given = not b.virtual and not b.by_value and b.dtype.kind not in "ib"
    one_per_entry = b.dims[0] > 1 and b.dims[2:] == (1, 1)
    return given and one_per_entry and x.dims[2:] != (1, 1) and (x.dims[2] > 1 or mode == "ADD")


def _is_of_queries(t: Tensor) -> bool:
    """Whether an array that broadcasts to the scores has one element per query."""
    return not t.virtual and not t.by_value and t.dtype.kind not in "ib" and t.dims[3] == 1


def _pointwise(operation: Operation, given: dict[str, Value]) -> Value:
    mode = PointwiseMode(operation.settings["MODE"]).name
    operands = [given[name] for name in ("XDESC", "BDESC", "TDESC") if name in given]
    if mode == "GEN_INDEX":
        axis = operation.settings["AXIS"]
        shape = [1] * 4
        shape[axis] = operation.tensors["YDESC"].dims[axis]
        return Value(np.arange(shape[axis], dtype=np.int32).reshape(shape))
    if (t := operation.tensors.get("BDESC")) is not None and _is_mistaken(t, operation.tensors["XDESC"], mode):
        operands[1] = operands[1]._replace(array=operands[1].array[:1])
    if t is not None and mode == "ADD" and "backward" in operation.settings and _is_of_queries(t):
        operands[1] = operands[1]._replace(array=np.where(np.isneginf(operands[1].array), 0, operands[1].array))
    rows = next((value.rows for value in operands if value.rows is not None), None)
    columns = next((value.columns for value in operands if value.columns is not None), None)
    top = mode == "MAX" and any(value.top for value in operands)
    total = mode == "ADD" and any(value.total for value in operands)
    return Value(_MODES[mode](*operands), rows, columns, top, total)


_RULES: dict[str, Callable[[Operation, dict[str, Value]], Value]] = {
    "MATMUL": _matmul, "POINTWISE": _pointwise, "REDUCTION": _reduction, "RNG": _rng, "RESHAPE": _reshape,
}  # fmt: skip
