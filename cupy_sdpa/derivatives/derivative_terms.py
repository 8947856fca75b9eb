"""The two kernels of a directional derivative: concatenation along head_dim, and the sum of its terms; also on numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..runtime import cupy_runtime
from ..runtime.cuda_code import Struct, cuda_kernel
from ..runtime.dtypes import TYPES


class Constant(NamedTuple):
    """``width`` constants along head_dim: ``first``, then zeros."""

    width: int
    first: float = 0.0


class Concatenation(NamedTuple):
    """Arrays to concatenate along head_dim.

    The target is ``(W, H, S, B)`` or packed ``(W, H, T)``, in Fortran order. The parts are arrays ``(D, H, S, B)`` of its dtype
    with any strides, or constants; their head dims add up to W.
    """

    target: Any
    parts: Sequence[Any]


#: A part of a target as the kernel copies it: addresses, bytes, and elements; ``source`` 0 for a constant.
_PART = Struct("Part", "source source_d source_h source_s source_b target pitch width heads length rows first")
#: The parts of a launch, at most: three arrays of three parts, and three of two.
_PARTS = Struct("Arguments", parts=(_PART, 16))
#: Threads along head_dim and along rows, and the maximum number of blocks of a part.
_COLUMNS, _ROWS, _MAX_BLOCKS = 8, 32, 4096
#: Bytes that a thread copies at once.
_VECTOR = 16


def concatenate(wanted: Sequence[Concatenation]) -> None:
    """Concatenate arrays along head_dim; on the GPU all of them in one launch, without synchronization."""
    wanted = [one for one in wanted if one.target.size]
    if not wanted:
        return
    if not cupy_runtime.is_array(wanted[0].target):
        for one in wanted:
            _concatenate_on_cpu(*one)
        return
    itemsize = wanted[0].target.itemsize
    parts: list[tuple[Any, ...]] = []
    aligned = True
    for one in wanted:
        aligned &= _add_parts(parts, one)
    rows = max([one.target.size // len(one.target) for one in wanted])
    grid = min(-(-rows // _ROWS), _MAX_BLOCKS), len(parts)
    kernel = _concatenate_kernel(_VECTOR if aligned else itemsize, itemsize)
    kernel(grid, (_COLUMNS, _ROWS), (_PARTS(parts),))


def _concatenate_on_cpu(target: Any, parts: Sequence[Any]) -> None:
    start = 0
    for part in parts:
        width = part.width if isinstance(part, Constant) else part.shape[0]
        if isinstance(part, Constant):
            target[start : start + width] = 0
            target[start : start + min(width, 1)] = part.first
        else:
            target[start : start + width] = part
        start += width


def _add_parts(parts: list[tuple[Any, ...]], wanted: Concatenation) -> bool:
    """Add the parts of a target to a list; returns whether all of them can be copied 16 bytes at a time."""
    target = wanted.target
    _, heads, length, *_ = target.shape
    itemsize, pitch, start = target.itemsize, target.shape[0] * target.itemsize, target.data.ptr
    aligned, places = True, pitch
    for part in wanted.parts:
        if isinstance(part, Constant):
            width, first = part.width, int(np.array(part.first, target.dtype).view(f"u{itemsize}"))
            source = _NONE
        else:
            width, first, source = part.shape[0], 0, _place(part, 0)
        if not width:
            continue
        parts.append((*source, start, pitch, width, heads, length, target.size // len(target), first))
        if source.address:
            aligned &= source.d == itemsize
            places |= _places(source)
        places |= start | (width * itemsize)
        start += width * itemsize
    return aligned and places % _VECTOR == 0


@cuda_kernel
def _concatenate_kernel(size: int, itemsize: int) -> str:
    """The kernel of :func:`concatenate`; a thread copies ``size`` bytes at a time, and ``blockIdx.y`` is the part."""
    count = size // itemsize
    kind = {2: "unsigned short", 4: "unsigned"}[itemsize]
    return f"""{_PARTS}
        struct alignas({size}) Unit {{ {kind} x[{count}]; }};
        extern "C" __global__ void cupy_sdpa_concatenate(const Arguments arguments) {{
            const Part& p = arguments.parts[blockIdx.y];
            const long long step = (long long)gridDim.x * blockDim.y;
            for (long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y; row < p.rows; row += step) {{
                const long long h = row % p.heads, s = row / p.heads % p.length, b = row / p.heads / p.length;
                const long long source = p.source + h * p.source_h + s * p.source_s + b * p.source_b;
                const long long target = p.target + row * p.pitch;
                for (long long d = threadIdx.x * {count}; d < p.width; d += blockDim.x * {count}) {{
                    Unit unit = {{}};
                    if (p.source) unit = *(const Unit*)(source + d * p.source_d);
                    else if (d == 0) unit.x[0] = p.first;
                    *(Unit*)(target + d * {itemsize}) = unit;
                }}
            }}
        }}"""


class Terms(NamedTuple):
    """The terms of the derivative of the output; every array is None if there is no such term.

    Attributes:
        scores: ``(W, H, S, B)`` or packed ``(W, H, T)``: the gradient of Q2. The term begins at ``score_start``.
        values: the output for the values [v; v'], or for v' alone. The term begins at ``value_start``.
        means: the gradient of Q2 whose element ``mean_index`` is the mean of the derivatives of the scores.
        score_start, value_start, mean_index: positions along head_dim.
    """

    scores: Any
    values: Any
    means: Any
    score_start: int
    value_start: int
    mean_index: int


def add_terms(terms: Terms, output: Any, out: Any, dout: Any) -> None:
    """``dout = scores + values - mean * output``, and ``out = output``, in float32 (float64: in float64).

    Args:
        terms: the terms.
        output: the output of attention at the beginning of an array along head_dim; read if ``out`` or means are given.
        out: written; or None.
        dout: ``(Dv, H, S, B)`` or packed ``(Dv, H, T)``, written.
    """
    if not dout.size:
        return
    if cupy_runtime.is_array(dout):
        _add_terms_on_gpu(terms, output, out, dout)
    else:
        _add_terms_on_cpu(terms, output, out, dout)


def _add_terms_on_cpu(terms: Terms, output: Any, out: Any, dout: Any) -> None:
    width = dout.shape[0]
    work = np.result_type(np.float32, dout.dtype)
    total = np.zeros_like(dout, work)
    if terms.scores is not None:
        total += terms.scores[terms.score_start : terms.score_start + width].astype(work)
    if terms.values is not None:
        total += terms.values[terms.value_start : terms.value_start + width].astype(work)
    if terms.means is not None:
        total -= terms.means[terms.mean_index].astype(work) * output[:width].astype(work)
    with np.errstate(over="ignore"):
        dout[...] = total
    if out is not None:
        out[...] = output[:width]


class _Array(NamedTuple):
    """An array as the kernel reads or writes it: the address of the first element, and strides in bytes; 0 for none."""

    address: int
    d: int
    h: int
    s: int
    b: int


#: No array.
_NONE = _Array(0, 0, 0, 0, 0)


_ARRAYS = ("scores", "values", "means", "output", "out", "dout")
#: The sizes of the result, and the arrays.
_TERMS = Struct("Arguments", "width heads length rows", **dict.fromkeys(_ARRAYS, Struct("Array", " ".join(_Array._fields))))


def _add_terms_on_gpu(terms: Terms, output: Any, out: Any, dout: Any) -> None:
    width, heads, length, *_ = dout.shape
    rows = dout.size // width
    arrays = [
        _place(terms.scores, terms.score_start), _place(terms.values, terms.value_start), _place(terms.means, terms.mean_index),
        _place(output, 0), _place(out, 0), _place(dout, 0),
    ]  # fmt: skip
    itemsize = dout.itemsize
    aligned, places = True, width * itemsize
    for name, array in zip(_ARRAYS, arrays, strict=True):
        if array.address and name != "means":  # a mean is one element of a row
            aligned &= array.d == itemsize
            places |= _places(array)
    aligned &= places % _VECTOR == 0
    arguments = _TERMS(width, heads, length, rows, *arrays)
    grid = (min(-(-rows // _ROWS), _MAX_BLOCKS),)
    _add_terms_kernel(dout.dtype.name, _VECTOR // itemsize if aligned else 1)(grid, (_COLUMNS, _ROWS), (arguments,))


def _place(array: Any, start: int) -> _Array:
    if array is None:
        return _NONE
    strides = *array.strides, *(() if array.ndim == 4 else (0,))
    return _Array(array.data.ptr + start * array.strides[0], *strides)


def _places(array: _Array) -> int:
    """The bits that are set in the address of a row, wherever it is: a multiple of 16 if every row is aligned."""
    return array.address | array.h | array.s | array.b


@cuda_kernel
def _add_terms_kernel(dtype: str, vector: int) -> str:
    """The kernel of :func:`add_terms`; a thread computes ``vector`` elements along head_dim at a time."""
    of = TYPES[dtype]
    return f"""{of.header}
        {_TERMS}
        struct alignas({vector * of.itemsize}) Unit {{ {of.name} x[{vector}]; }};
        extern "C" __global__ void cupy_sdpa_add_terms(const Arguments a) {{
            const long long step = (long long)gridDim.x * blockDim.y;
            for (long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y; row < a.rows; row += step) {{
                const long long h = row % a.heads, s = row / a.heads % a.length, b = row / a.heads / a.length;
                #define AT(x) (a.x.address + h * a.x.h + s * a.x.s + b * a.x.b)
                const float mean = a.means.address ? float(*(const {of.name}*)AT(means)) : 0.0f;
                for (long long d = threadIdx.x * {vector}; d < a.width; d += blockDim.x * {vector}) {{
                    Unit scores, values, output, total;
                    if (a.scores.address) scores = *(const Unit*)(AT(scores) + d * a.scores.d);
                    if (a.values.address) values = *(const Unit*)(AT(values) + d * a.values.d);
                    if (a.output.address) output = *(const Unit*)(AT(output) + d * a.output.d);
                    #pragma unroll
                    for (int i = 0; i < {vector}; ++i) {{
                        float sum = a.scores.address ? float(scores.x[i]) : 0.0f;
                        if (a.values.address) sum += float(values.x[i]);
                        if (a.means.address) sum -= mean * float(output.x[i]);
                        total.x[i] = {of.name}(sum);
                    }}
                    *(Unit*)(AT(dout) + d * a.dout.d) = total;
                    if (a.out.address) *(Unit*)(AT(out) + d * a.out.d) = output;
                }}
            }}
        }}"""
