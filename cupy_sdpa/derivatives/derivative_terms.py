"""The sum of a directional derivative's terms: a CUDA kernel, and the same for numpy arrays."""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

import numpy as np

from ..extend import TYPES, Struct, cuda_kernel, cupy_runtime

#: Threads along head_dim and along rows, and the maximum number of blocks.
COLUMNS, ROWS, MAX_BLOCKS = 8, 32, 4096
#: Bytes that a thread adds at once.
VECTOR = 16


class Terms(NamedTuple):
    """The terms of the output's derivative; a missing term is None.

    Attributes:
        scores: ``(Dv, H, S, B)`` or packed ``(Dv, H, T)``: the rows of the gradient of Q2 with the term.
        values: the output for v'.
        means: ``(1, H, S, B)`` or packed: the row of the gradient of Q2 with the mean of the score derivatives.
    """

    scores: Any
    values: Any
    means: Any


def add_terms(terms: Terms, output: Any, out: Any, dout: Any) -> None:
    """Compute ``dout = scores + values - means * output`` in float32 (float64 arrays: in float64); copy output to ``out``.

    Args:
        terms: the terms.
        output: attention's output; it is only read if ``out`` or means are not None.
        out: the array to copy the output to, or None.
        dout: the array for the result.
    """
    if not dout.size:
        return
    if cupy_runtime.is_array(dout):
        _add_terms_on_gpu(terms, output, out, dout)
    else:
        _add_terms_on_cpu(terms, output, out, dout)


def _add_terms_on_cpu(terms: Terms, output: Any, out: Any, dout: Any) -> None:
    work = np.result_type(np.float32, dout.dtype)
    total = np.zeros_like(dout, work)
    if terms.scores is not None:
        total += terms.scores.astype(work)
    if terms.values is not None:
        total += terms.values.astype(work)
    if terms.means is not None:
        total -= terms.means.astype(work) * output.astype(work)
    with np.errstate(over="ignore"):
        dout[...] = total
    if out is not None:
        out[...] = output


_ARRAYS = ("scores", "values", "means", "output", "out", "dout")
#: The sizes of the result, and the arrays: the address of the first element, and strides in bytes; 0 for none.
_TERMS = Struct("Arguments", "width heads length rows", **dict.fromkeys(_ARRAYS, Struct("Array", "address d h s b")))


def _add_terms_on_gpu(terms: Terms, output: Any, out: Any, dout: Any) -> None:
    width, heads, length, *_ = dout.shape
    rows = dout.size // width
    given = (*terms, output, out, dout)
    arrays = [(0,) * 5 if x is None else (x.data.ptr, *x.strides, 0)[:5] for x in given]
    itemsize = dout.itemsize
    aligned, places = True, width * itemsize
    for name, (place, step, *strides) in zip(_ARRAYS, arrays, strict=True):
        if place and name != "means":  # a row has only one mean
            aligned &= step == itemsize
            places |= functools.reduce(operator.or_, strides, place)  # every row is aligned
    aligned &= places % VECTOR == 0
    arguments = _TERMS(width, heads, length, rows, *arrays)
    grid = (min(-(-rows // ROWS), MAX_BLOCKS),)
    _add_terms_kernel(dout.dtype.name, VECTOR // itemsize if aligned else 1)(grid, (COLUMNS, ROWS), (arguments,))


@cuda_kernel
def _add_terms_kernel(dtype: str, vector: int) -> str:
    """Return the kernel of :func:`add_terms`; a thread computes ``vector`` elements along head_dim at a time."""
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
