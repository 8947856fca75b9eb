"""Rotary embeddings: the CUDA kernel, the numpy function, and the lines with which an append to a key/value cache rotates."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from ..extend import TYPES, Struct, cuda_kernel, cupy_runtime

#: The maximum number of rotated pairs of channels. Their frequencies are an argument of the kernels.
MAX_PAIRS = 128
#: A rotation as kernels read it. ``turns`` are the turns per position: angle / (2 pi) * 2^64, modulo 2^64.
RECORD = np.dtype([("pairs", "i8"), ("interleaved", "i8"), ("factor", "f8"), ("turns", "u8", MAX_PAIRS)])

#: The angle is computed in integers, modulo a whole turn: only the turns per position are rounded.
ROPE = f"""
struct Rope {{ long long pairs, interleaved; double factor; unsigned long long turns[{MAX_PAIRS}]; }};
__device__ void turn(unsigned long long angle, float& s, float& c) {{ sincospif((int)(angle >> 32) / 2147483648.0f, &s, &c); }}
__device__ void turn(unsigned long long angle, double& s, double& c) {{
    sincospi((long long)angle / 9223372036854775808.0, &s, &c);
}}
// Rotates the channels of one token and head; ``turns`` are the turns of ``r`` in shared memory.
template <class Real, class T>
__device__ void rotate_row(const Rope& r, const unsigned long long* turns, long long position, const T* from, T* to, int dim) {{
    for (int i = threadIdx.x; i < r.pairs; i += blockDim.x) {{
        const int first = r.interleaved ? 2 * i : i, second = first + (r.interleaved ? 1 : (int)r.pairs);
        Real s, c;
        turn((unsigned long long)position * turns[i], s, c);
        s *= (Real)r.factor;
        c *= (Real)r.factor;
        const Real x = (Real)from[first], y = (Real)from[second];
        to[first] = T(x * c - y * s);
        to[second] = T(x * s + y * c);
    }}
    for (int i = 2 * r.pairs + threadIdx.x; i < dim; i += blockDim.x) to[i] = from[i];
}}
"""
#: Copies the turns of ``rope`` to shared memory; every thread of the block calls it.
SHARED_TURNS = f"""__shared__ unsigned long long turns[{MAX_PAIRS}];
            for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < rope.pairs; i += blockDim.x * blockDim.y)
                turns[i] = rope.turns[i];
            __syncthreads();"""


def types_of(dtype: str) -> tuple[Any, str]:
    """Return the type of the elements, and the one in which they are rotated."""
    return TYPES[dtype], "double" if dtype == "float64" else "float"


def rotation_record(angles: tuple[float, ...], factor: float, *, interleaved: bool) -> Any:
    """Return the record of a rotation; ``angles`` are the pairs' angles per position, in radians."""
    made = np.zeros((), RECORD)
    made["pairs"], made["interleaved"], made["factor"] = len(angles), interleaved, factor
    made["turns"][: len(angles)] = [_turns(angle) for angle in angles]
    return made


#: The fractional bits of pi: as many as the largest frequency has integer bits, about 500, and more than the 64 of turns.
_PI_BITS = 640


def _turns(angle: float) -> int:
    """``angle / (2 pi) * 2^64`` modulo 2^64, rounded once: an error of a turn is multiplied by the position."""
    numerator, denominator = angle.as_integer_ratio()
    turn = 2 * denominator * _pi()
    return ((numerator << (_PI_BITS + 65)) + turn) // (2 * turn) % (1 << 64)


@functools.cache
def _pi() -> int:
    """``pi * 2^_PI_BITS``, by Machin's formula ``pi / 4 = 4 arctan(1/5) - arctan(1/239)``."""

    def arctan_of_inverse(x: int) -> int:
        total, power, n = 0, (1 << (_PI_BITS + 16)) // x, 1
        while power:
            total += power // n if n % 4 == 1 else -(power // n)
            power //= x * x
            n += 2
        return total

    return 4 * (4 * arctan_of_inverse(5) - arctan_of_inverse(239)) >> 16


def rotated(x: Any, record: Any, positions: Any) -> Any:
    """Rotate a numpy array ``(D, H, ...)``; the shape of the positions broadcasts to the axes after the second."""
    pairs, dtype = int(record["pairs"]), np.float64 if x.dtype == np.float64 else np.float32
    angles = positions.astype(np.uint64) * record["turns"][:pairs].reshape(-1, 1, *[1] * positions.ndim)
    angles = angles.view(np.int64) * (2 * math.pi / 2**64)
    cosine, sine = ((record["factor"] * function(angles)).astype(dtype) for function in (np.cos, np.sin))
    out = np.array(x, order="F")
    first = slice(0, 2 * pairs, 2) if record["interleaved"] else slice(pairs)
    second = slice(1, 2 * pairs, 2) if record["interleaved"] else slice(pairs, 2 * pairs)
    a, b = x[first].astype(dtype), x[second].astype(dtype)
    with np.errstate(invalid="ignore"):  # infinities become NaN, as on a GPU: padding may be anything
        out[first], out[second] = a * cosine - b * sine, a * sine + b * cosine
    return out


class TokenPositions(NamedTuple):
    """The positions of tokens: in sequence b they count from ``first + start[b]``, or up to ``end[b]``; or all are listed.

    Attributes:
        first: a number.
        start, end: int32 ``(B,)``, or None.
        lengths: int32 ``(B,)``, the number of tokens of each sequence of a dense array; None for all.
        offsets: int32 or int64 ``(B + 1,)``, where each sequence of a packed array begins; None for dense arrays.
        listed: int32 ``(S,)``, ``(S, B)`` or packed ``(T,)``, the position of every token, instead of all other fields; or
            None.
    """

    first: int
    start: Any = None
    end: Any = None
    lengths: Any = None
    offsets: Any = None
    listed: Any = None


#: The arguments of the kernel except the rotation: addresses, numbers of elements, and strides in elements.
_NUMBERS = Struct(
    "Numbers",
    "x out first start end lengths offsets long_offsets dim heads tokens batch rows x_head x_token x_batch out_head out_token "
    "out_batch listed listed_token listed_batch",
)


def apply(x: Any, out: Any, rotation: Any, positions: TokenPositions, dtype: str) -> None:
    """Rotate the channels of an array ``(D, H, S, B)`` or packed ``(D, H, T)``, with unit stride along D; one launch."""
    if not cupy_runtime.is_array(x):
        out[...] = rotated(x, rotation, _on_numpy(x.shape, positions))
        return
    _, start, end, lengths, offsets, listed = positions
    batch = x.shape[3] if x.ndim == 4 else 1 if offsets is None else offsets.size - 1
    rows = math.prod(x.shape[1:])
    if not x.size:
        return
    numbers = _NUMBERS(
        x, out, positions.first, start, end, lengths, offsets, offsets is not None and offsets.itemsize == 8, *x.shape[:3],
        batch, rows, *_steps(x), *_steps(out), listed, *position_strides(listed),
    )  # fmt: skip
    lanes = min(32, 1 << (x.shape[0] // 2 - 1).bit_length())
    per_block = 256 // lanes
    _apply_kernel(dtype)((min(-(-rows // per_block), 1 << 14),), (lanes, per_block), (numbers, rotation))


def _on_numpy(shape: tuple[int, ...], positions: TokenPositions) -> Any:
    """Return the position of every token, int64 ``(S, B)`` or packed ``(T,)``."""
    first, start, end, lengths, offsets, listed = positions
    if listed is not None:
        return listed[:, None] if listed.ndim < len(shape) - 2 else listed
    token = np.arange(shape[2])
    if offsets is None:
        base = np.full(shape[3], first) if start is None else start.astype(np.int64)
        if end is not None:
            base = end.astype(np.int64) - (shape[2] if lengths is None else lengths)
        return token[:, None] + base
    offsets = offsets.astype(np.int64)
    sequence = np.clip(np.searchsorted(offsets[:-1], token, side="right") - 1, 0, None)
    base = np.full(offsets.size - 1, first) if start is None else start.astype(np.int64)
    if end is not None:
        base = end - np.diff(offsets)
    return token - offsets[sequence] + base[sequence]


def _steps(x: Any) -> tuple[int, int, int]:
    """Return the strides in elements along heads, tokens and batch."""
    head, token, batch = (*(stride // x.itemsize for stride in x.strides[1:]), 0)[:3]
    return head, token, batch


def position_strides(listed: Any) -> tuple[int, int]:
    """Return the strides of listed positions in elements along tokens and batch."""
    token, batch = (*(() if listed is None else [stride // 4 for stride in listed.strides]), 0, 0)[:2]
    return token, batch


@cuda_kernel
def _apply_kernel(dtype: str) -> str:
    """Return the kernel of :func:`apply`; ``threadIdx.y`` and ``blockIdx.x`` count rows, ``threadIdx.x`` a row's pairs."""
    of, real = types_of(dtype)
    return f"""{of.header}{ROPE}{_NUMBERS}
        __device__ long long offset(const Numbers& n, long long b) {{
            return n.long_offsets ? ((const long long*)n.offsets)[b] : ((const int*)n.offsets)[b];
        }}
        extern "C" __global__ void cupy_sdpa_rope(const Numbers n, const Rope rope) {{
            {SHARED_TURNS}
            for (long long row = blockIdx.x * blockDim.y + threadIdx.y; row < n.rows; row += gridDim.x * blockDim.y) {{
                const long long head = row % n.heads, token = row / n.heads % n.tokens, entry = row / n.heads / n.tokens;
                long long b = entry, begin = 0, count = n.tokens;
                if (n.offsets) {{  // the last sequence that begins at the token or before it
                    for (long long high = n.batch - 1; b < high;) {{
                        const long long middle = (b + high + 1) / 2;
                        if (offset(n, middle) <= token) b = middle;
                        else high = middle - 1;
                    }}
                    begin = offset(n, b);
                    count = offset(n, b + 1) - begin;
                }} else if (n.lengths) count = ((const int*)n.lengths)[b];
                const long long first =
                    n.end ? ((const int*)n.end)[b] - count : n.start ? ((const int*)n.start)[b] : n.first;
                long long position = first + token - begin;
                if (n.listed) position = ((const int*)n.listed)[token * n.listed_token + entry * n.listed_batch];
                rotate_row<{real}>(
                    rope, turns, position,
                    ({of.name}*)n.x + head * n.x_head + token * n.x_token + entry * n.x_batch,
                    ({of.name}*)n.out + head * n.out_head + token * n.out_token + entry * n.out_batch, n.dim);
            }}
        }}"""
