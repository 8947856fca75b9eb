"""Conversion of tokens to FP8 while they are written to the pages of a key/value cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..problem.tensor_spec import rounded
from ..runtime import cupy_runtime
from ..runtime.cuda_code import Struct, cuda_kernel
from ..runtime.dtypes import PACK, ROTATION, TYPES
from . import cache_kernels
from .cache_kernels import ADVANCE, ARGUMENTS, TOKENS, State, arguments_of, grid_of, lanes_of
from .fp8_kernels import rotated_values

#: The elements that a thread converts, and the threads of a block.
_UNIT, _THREADS = 8, 256


class Tokens(NamedTuple):
    """New keys or values, and their conversion.

    Attributes:
        array: ``(D, Hkv, S, B)`` or packed ``(D, Hkv, T)``, D a multiple of 8; float16, bfloat16, float32, or uint8 for FP8.
        pages: uint8 ``(D, Hkv, page_size, pages)``, dense in the order (D, page_size, Hkv, pages).
        scale: float32 ``(1,)``, of the pages.
        descale: float32 ``(1,)``, of FP8 tokens; None for others.
        rotation: the length of the parts of head_dim that are rotated; 1 for none.
    """

    array: Any
    pages: Any
    scale: Any
    descale: Any
    rotation: int


#: :class:`Tokens` as the kernel reads them: addresses, strides in bytes, and the units of a row.
_SIDE = Struct("Side", "tokens pages row head_stride token_stride batch_stride scale descale rotation")
_ARGUMENTS = Struct("Arguments", f"{ARGUMENTS} lanes", sides=(_SIDE, 2))


def append(keys: Tokens, values: Tokens, state: State, source: str, dtype: str, *, advance: bool) -> None:
    """Write the new keys and values of one layer in FP8; one launch. Values beyond the largest number saturate.

    Args:
        keys, values: the tokens, of one dtype.
        state: the arrays that give the place of each token.
        source: the dtype of the tokens.
        dtype: that of the pages.
        advance: as for :func:`.cache_kernels.append`, which writes the same rows.
    """
    if not cupy_runtime.is_array(keys.pages):
        k, v = (_elements(tokens, dtype) for tokens in (keys, values))
        cache_kernels.append(k, v, keys.pages, values.pages, state, advance=advance)
        return
    lanes, batch = lanes_of(*(x.array.shape[0] // _UNIT for x in (keys, values))), state.lengths.size
    numbers = arguments_of(keys.array, keys.pages, state, advance=advance)
    given = _ARGUMENTS(*numbers, lanes, [_side(keys), _side(values)])
    _append_kernel(source, dtype)(grid_of(keys.array, keys.pages, batch, _THREADS // lanes), (_THREADS,), (given,))


def _elements(tokens: Tokens, dtype: str) -> Any:
    """The elements of numpy tokens."""
    with np.errstate(invalid="ignore", over="ignore"):  # tokens after the counts may be anything
        if tokens.descale is not None:
            return rounded(tokens.array.astype(np.float32) * tokens.descale * tokens.scale, dtype)
        return rounded(rotated_values(tokens.array, tokens.rotation, None) * tokens.scale, dtype)


def _side(tokens: Tokens) -> tuple[Any, ...]:
    """The values of :data:`_SIDE`."""
    array, pages, scale, descale, rotation = tokens
    steps = [stride if length > 1 else 0 for length, stride in zip(array.shape[1:], array.strides[1:], strict=True)]
    return array, pages, array.shape[0] // _UNIT, *(*steps, 0)[:3], scale, descale, rotation


@cuda_kernel
def _append_kernel(source: str, dtype: str) -> str:
    """The kernel of :func:`append`.

    ``blockIdx.y`` is the sequence, and ``blockIdx.z`` selects keys or values. Groups of ``lanes`` threads, within a warp,
    convert a row of a head each; a thread converts a unit. All threads take part in every rotation.
    """
    of = TYPES[source]
    return f"""{"" if source == dtype else of.header}{TYPES[dtype].header}{ROTATION}{PACK}
        {_ARGUMENTS}
        extern "C" __global__ void cupy_sdpa_append_fp8(const Arguments a) {{
            {TOKENS}
            const Side& s = a.sides[blockIdx.z];
            const float scale = *(const float*)s.scale, descale = s.descale ? *(const float*)s.descale : 1;
            const int size = a.page_size, end = begin + count, last = (end - 1) / size * size;
            // the rest of the last page, if its first row is new
            const unsigned heads = a.heads, rows = (count == 0 || last < begin ? end : last + size) - begin;
            const unsigned lanes = a.lanes, lane = threadIdx.x % lanes, per_block = {_THREADS} / lanes;
            for (unsigned base = blockIdx.x * per_block; base < rows * heads; base += gridDim.x * per_block) {{
                const unsigned i = base + threadIdx.x / lanes;
                const int row = i / heads, head = i % heads, position = begin + row, token = first + row;
                const bool stored = i < rows * heads && position / size < a.width;
                const bool given = stored && row < count && token < a.tokens;
                const long long page = stored ? ((const int*)a.table)[b * a.width + position / size] : 0;
                uint2* const to = (uint2*)s.pages + ((page * heads + head) * size + position % size) * s.row;
                const {of.name}* const from = (const {of.name}*)(
                    s.tokens + b * s.batch_stride + token * s.token_stride + head * s.head_stride);
                for (int column = 0; column < s.row; column += lanes) {{
                    const int unit = column + lane;
                    float x[{_UNIT}] = {{}};
                    if (given && unit < s.row)
                        for (int j = 0; j < {_UNIT}; ++j) x[j] = __fmul_rn(float(from[{_UNIT} * unit + j]), descale);
                    rotate(x, (int)s.rotation);
                    if (stored && unit < s.row) to[unit] = pack(x, scale);
                }}
            }}
            {ADVANCE}
        }}"""
