"""Elements of arrays at computed indices, as an array with the axes of the scores; and the sums of their gradients.

A score function may read ``table[h, np.clip(q_idx - kv_idx, 0, n - 1)]``. cuDNN's graphs cannot: they have no gather. A kernel
writes these elements for all pairs, and the gradient of each element of the table is the sum over the pairs that read it.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..problem.tensor_spec import dtype_name
from ..runtime import cupy_runtime, memory
from ..runtime.cuda_code import cuda_kernel
from ..runtime.interpreted_array import on_host
from ..score_fn.recorded import Access, Computed

#: The axes of the scores in the order of arrays.
SCORE_AXES = ("kv_idx", "q_idx", "h", "b")
#: The elements that numpy reads at once, and the consecutive elements that a thread sums.
_ELEMENTS, _RUN = 1 << 22, 16


class Mode(NamedTuple):
    """An operation of indices, in numpy and in CUDA."""

    function: Callable[..., Any]
    code: str


def _truncated(x: Any, b: Any) -> Any:
    return np.sign(x) * np.sign(b) * (abs(x) // abs(b))


_MODES = {
    "add": Mode(operator.add, "{0} + {1}"), "sub": Mode(operator.sub, "{0} - {1}"), "mul": Mode(operator.mul, "{0} * {1}"),
    "neg": Mode(operator.neg, "-{0}"), "abs": Mode(abs, "{0} < 0 ? -{0} : {0}"), "div": Mode(_truncated, "{0} / {1}"),
    "max": Mode(np.maximum, "{0} > {1} ? {0} : {1}"), "min": Mode(np.minimum, "{0} < {1} ? {0} : {1}"),
    "cmp_eq": Mode(operator.eq, "{0} == {1}"), "cmp_neq": Mode(operator.ne, "{0} != {1}"),
    "cmp_gt": Mode(operator.gt, "{0} > {1}"), "cmp_ge": Mode(operator.ge, "{0} >= {1}"),
    "cmp_lt": Mode(operator.lt, "{0} < {1}"), "cmp_le": Mode(operator.le, "{0} <= {1}"),
    "logical_and": Mode(np.logical_and, "{0} && {1}"), "logical_or": Mode(np.logical_or, "{0} || {1}"),
    "binary_select": Mode(lambda x, b, condition: np.where(condition, x, b), "{2} ? {0} : {1}"),
}  # fmt: skip


@dataclass(frozen=True)
class TableRead:
    """A captured array of elements that are read at computed indices.

    Attributes:
        access: the array and its indices. A negative index counts from the end, as numpy's.
        shape: ``(Skv, Sq, Hq, B)``; axes that the indices do not use have length 1.
        dtype: the dtype of the array.
    """

    access: Access
    shape: tuple[int, ...]
    dtype: Any

    def __str__(self) -> str:
        return self.access.name


def read_elements(target: Any, read: TableRead, tables: tuple[Any, ...]) -> None:
    """Write the elements that a function reads from ``tables``, the arrays ``read.access.arrays``.

    The target is of ``read.shape`` in Fortran order, of the dtype of the array. On the GPU an element out of range is +inf, the
    smallest integer, or False.

    Raises:
        IndexError: on the CPU, an index is out of range.
    """
    if cupy_runtime.is_array(target):
        kernel = _read_kernel(read.access, tuple(map(_layout, tables)))
        numbers = [np.int64(n) for n in (*target.shape[:3], target.size)]
        kernel((-(-target.size // 256),), (256,), (target, *tables, *numbers))
        return
    arrays = dict(zip(read.access.arrays, tables, strict=True))
    for part, positions in _positions(target.shape):
        target[:, part] = arrays[read.access.name][_indices(read.access, arrays, positions)]


def add_to_elements(total: Any, part: Any, read: TableRead, tables: tuple[Any, ...], sums: Any, largest: Any) -> None:
    """Add the gradients of the elements that a function reads to the gradient of the array.

    Sums on the GPU are those of integers: multiples of a power of 2, at most 2^-61 times the number of pairs times the largest
    gradient. They do not depend on the order of the additions, and equal calls have equal results.

    Args:
        total: float32 (numpy: also float64), of the shape of the array, in Fortran order.
        part: float32 (numpy: also float64), of ``read.shape``, in Fortran order.
        read, tables: as for :func:`read_elements`.
        sums: int64 of the shape of the array, in Fortran order, for the GPU; None on the CPU.
        largest: uint32 ``(1,)``, for the GPU; None on the CPU.
    """
    if not cupy_runtime.is_array(total):
        _add_on_numpy(total, part, read.access, dict(zip(read.access.arrays, tables, strict=True)))
        return
    memory.clear(sums, 0)
    memory.clear(largest, 0)
    shift = max(part.size - 1, 1).bit_length()
    _largest_kernel()((min(-(-part.size // 1024), 1024),), (256,), (part, largest, np.int64(part.size)))
    numbers = [np.int64(n) for n in (*part.shape[:3], part.size)]
    kernel = _sums_kernel(read.access, tuple(map(_layout, tables)))
    kernel((-(-part.size // (128 * _RUN)),), (128,), (part, largest, sums, *tables, *numbers, np.int32(shift)))
    _total_kernel()((-(-total.size // 128),), (128,), (total, sums, largest, np.int64(total.size), np.int32(shift)))


# numpy


def _positions(shape: tuple[int, ...]) -> Iterator[tuple[slice, dict[str, Any]]]:
    """Some queries at a time, and the positions of all pairs with them, by axis."""
    keys, queries, heads, batch = shape
    step = max(1, _ELEMENTS // max(keys * heads * batch, 1))
    for begin in range(0, queries, step):
        part = slice(begin, min(begin + step, queries))
        ranges = (np.arange(keys), np.arange(part.start, part.stop), np.arange(heads), np.arange(batch))
        shapes = ((-1, 1, 1, 1), (1, -1, 1, 1), (1, 1, -1, 1), (1, 1, 1, -1))
        yield part, {axis: x.reshape(n) for axis, x, n in zip(SCORE_AXES, ranges, shapes, strict=True)}


def _indices(access: Access, arrays: Mapping[str, Any], positions: Mapping[str, Any]) -> tuple[Any, ...]:
    """The index along each axis of an array; raises IndexError."""
    found: list[Any] = []
    for axis, (index, length) in enumerate(zip(access.axes, arrays[access.name].shape, strict=True)):
        if isinstance(index, Computed):
            value = _evaluated(index, arrays, positions)
            low, high = (int(on_host(x)) for x in (value.min(), value.max()))
            if not -length <= low <= high < length:
                raise IndexError(
                    f"tensors[{access.name!r}] has length {length} along axis {axis}, and its computed index has values from "
                    f"{low} to {high}, also for pairs that are masked: limit it with np.clip(index, 0, {length - 1})"
                )
            found.append(value)
        else:
            found.append(positions[index] if isinstance(index, str) else index)
    return tuple(found)


def _evaluated(index: Computed, arrays: Mapping[str, Any], positions: Mapping[str, Any]) -> Any:
    """The values of a computed index; int64."""
    values: list[Any] = []
    for step in index.steps:
        if step.mode == "index":
            values.append(positions[step.name])
        elif step.mode == "constant":
            values.append(np.int64(step.value) if step.kind == "int" else np.float64(step.value))
        elif step.mode == "captured":
            read = index.reads[int(step.name)]
            element = arrays[read.name][_indices(read, arrays, positions)]
            values.append(element.astype(np.int64) if step.kind == "int" else element)
        else:
            values.append(_MODES[step.mode].function(*(values[arg] for arg in step.args)))
    return values[-1]


def _add_on_numpy(total: Any, part: Any, access: Access, arrays: Mapping[str, Any]) -> None:
    """:func:`add_to_elements` on the CPU; sums are float64, in the order of the elements."""
    sums = np.zeros(total.shape)
    for queries, positions in _positions(part.shape):
        values = on_host(part[:, queries])
        places: Any = np.zeros((1, 1, 1, 1), np.int64)
        for index, length in zip(_indices(access, arrays, positions), total.shape, strict=True):
            places = places * length + on_host(index) % length
        places = np.broadcast_to(places, values.shape)
        sums += np.bincount(places.reshape(-1), values.reshape(-1), minlength=total.size).reshape(total.shape)
    total[...] = total + sums


# CUDA


class _Layout(NamedTuple):
    """The dtype, the shape, and the strides in elements of an array."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _layout(array: Any) -> _Layout:
    return _Layout(dtype_name(array.dtype), array.shape, tuple(stride // array.itemsize for stride in array.strides))


#: The bits of an element that is out of range, by dtype: NaN, which makes a row of the output NaN.
_MISSING = {
    "float16": "0x7e00", "bfloat16": "0x7fc0", "float32": "0x7fc00000u", "float64": "0x7ff8000000000000ull",
    "int32": "0x80000000u", "bool": "0",
}  # fmt: skip
_BITS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "unsigned long long"}
#: The element of all arrays with the axes of the scores.
_PAIR = """
                const long long kv_idx = n % keys, q_idx = n / keys % queries, h = n / keys / queries % heads,
                    b = n / keys / queries / heads;
"""


class _Code:
    """The code that computes where an element is.

    Args:
        access: the element.
        layouts: the arrays ``access.arrays``.
    """

    def __init__(self, access: Access, layouts: tuple[_Layout, ...]) -> None:
        self.lines: list[str] = []
        self._numbers = itertools.count()
        self._arrays = {name: (f"x{i}", layout) for i, (name, layout) in enumerate(zip(access.arrays, layouts, strict=True))}
        #: The names of the variables: whether the indices are in range, and the offset in elements.
        self.inside, self.offset = self._place(access)

    @property
    def parameters(self) -> str:
        """The parameters of a kernel for the arrays."""
        return ", ".join(f"const void* {name}" for name, _ in self._arrays.values())

    def __str__(self) -> str:
        return _PAIR + "\n".join(self.lines)

    def _declare(self, kind: str, value: str) -> str:
        name = f"v{next(self._numbers)}"
        self.lines.append(f"const {kind} {name} = {value};")
        return name

    def _place(self, access: Access) -> tuple[str, str]:
        conditions, terms = ["true"], ["0ll"]
        _, layout = self._arrays[access.name]
        for index, length, stride in zip(access.axes, layout.shape, layout.strides, strict=True):
            place = str(index)
            if isinstance(index, Computed):
                value = self._computed(index)
                place = self._declare("int", f"{value} < 0 ? {value} + {length} : {value}")
                conditions.append(f"{place} >= 0 && {place} < {length}")
            terms.append(f"{place} * {stride}ll")
        return self._declare("bool", " && ".join(conditions)), self._declare("long long", " + ".join(terms))

    def _computed(self, index: Computed) -> str:
        values: list[str] = []
        for step in index.steps:
            if step.mode == "index":
                value = f"(int){step.name}"
            elif step.mode == "constant":
                value = str(int(step.value)) if step.kind == "int" else f"{float(step.value)}f"
            elif step.mode == "captured":
                read = index.reads[int(step.name)]
                inside, offset = self._place(read)
                name, layout = self._arrays[read.name]
                dtype, missing = ("bool", "false") if layout.dtype == "bool" else ("int", f"(int){_MISSING['int32']}")
                value = f"{inside} ? ((const {dtype}*){name})[{offset}] : {missing}"
            else:
                value = _MODES[step.mode].code.format(*(values[arg] for arg in step.args))
            values.append(self._declare(step.kind, value))
        return values[-1]


@cuda_kernel
def _read_kernel(access: Access, layouts: tuple[_Layout, ...]) -> str:
    """The kernel of :func:`read_elements`; a thread reads one element."""
    code, dtype = _Code(access, layouts), layouts[0].dtype
    bits = _BITS[{"bool": 1, "float16": 2, "bfloat16": 2, "float64": 8}.get(dtype, 4)]
    return f"""extern "C" __global__ void cupy_sdpa_read_elements(
            {bits}* target, {code.parameters}, long long keys, long long queries, long long heads, long long size
        ) {{
            const long long n = blockIdx.x * (long long)blockDim.x + threadIdx.x;
            if (n >= size) return;
            {code}
            target[n] = {code.inside} ? ((const {bits}*)x0)[{code.offset}] : ({bits}){_MISSING[dtype]};
        }}"""


@cuda_kernel
def _largest_kernel() -> str:
    """The kernel that writes the bits of the largest magnitude; those of NaN are larger than all others."""
    return """extern "C" __global__ void cupy_sdpa_largest(const float* part, unsigned* largest, long long size) {
            __shared__ unsigned shared;
            if (threadIdx.x == 0) shared = 0;
            __syncthreads();
            unsigned own = 0;
            const long long threads = gridDim.x * (long long)blockDim.x;
            for (long long n = blockIdx.x * (long long)blockDim.x + threadIdx.x; n < size; n += threads) {
                const unsigned bits = __float_as_uint(part[n]) & 0x7fffffffu;
                own = bits > own ? bits : own;
            }
            atomicMax(&shared, own);
            __syncthreads();
            if (threadIdx.x == 0) atomicMax(largest, shared);
        }"""


#: The power of 2 by which gradients are multiplied: with 2^shift of them, sums stay below 2^61.
_SCALE = "const int scale = 61 - shift - ((int)(*largest >> 23) - 126);"


@cuda_kernel
def _sums_kernel(access: Access, layouts: tuple[_Layout, ...]) -> str:
    """The kernel that sums the gradients; a thread sums some consecutive ones, of which most have the same index."""
    first, *others = layouts
    strides = [1]
    for length in first.shape:
        strides.append(strides[-1] * length)
    code = _Code(access, (first._replace(strides=tuple(strides[:-1])), *others))
    return f"""extern "C" __global__ void cupy_sdpa_sums_of_elements(
            const float* part, const unsigned* largest, unsigned long long* sums, {code.parameters},
            long long keys, long long queries, long long heads, long long size, int shift
        ) {{
            {_SCALE}
            const long long begin = (blockIdx.x * (long long)blockDim.x + threadIdx.x) * {_RUN};
            const long long end = begin + {_RUN} < size ? begin + {_RUN} : size;
            long long place = -1, sum = 0;
            for (long long n = begin; n < end; ++n) {{
                {code}
                const long long at = {code.inside} ? {code.offset} : -1;
                if (at != place) {{
                    if (sum) atomicAdd(sums + place, (unsigned long long)sum);
                    place = at;
                    sum = 0;
                }}
                if (at >= 0) sum += llrintf(scalbnf(part[n], scale));
            }}
            if (sum) atomicAdd(sums + place, (unsigned long long)sum);
        }}"""


@cuda_kernel
def _total_kernel() -> str:
    """The kernel that adds the sums to the gradient of the array; NaN if a gradient is not finite."""
    return f"""extern "C" __global__ void cupy_sdpa_total_of_elements(
            float* total, const long long* sums, const unsigned* largest, long long size, int shift
        ) {{
            const long long n = blockIdx.x * (long long)blockDim.x + threadIdx.x;
            if (n >= size) return;
            {_SCALE}
            const bool finite = *largest < 0x7f800000u;
            total[n] = finite ? total[n] + (float)ldexp((double)sums[n], -scale) : __int_as_float(0x7fc00000);
        }}"""
