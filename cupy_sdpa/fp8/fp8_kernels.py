"""The CUDA kernels of FP8: largest magnitudes, conversion to FP8 with an optional rotation, delayed scaling, and the inverse.

A thread converts a *unit* of 8 elements along head_dim. A rotation multiplies parts of head_dim by a normalized Hadamard matrix
with the fast Walsh-Hadamard transform: three steps within the unit, the others between the threads of a warp. GPUs that have an
instruction for the conversion use it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..extend import TYPES, Struct, cuda_kernel, cupy_runtime, dtype_name, numpy_dtype, rounded

#: The FP8 dtypes.
FP8_DTYPES = tuple(name for name, of in TYPES.items() if of.itemsize == 1)


def is_name(dtype: Any, names: Sequence[str]) -> bool:
    """Return True if a dtype is one of the names. A dtype of numpy is not, although it is equal to its name.

    >>> is_name("float8_e5m2", FP8_DTYPES), is_name(numpy_dtype("float8_e5m2"), FP8_DTYPES)
    (True, False)
    """
    return isinstance(dtype, str) and dtype in names


#: A rotation, for the kernels that convert to and from FP8. Its operations are rounded one by one, in the order of
#: :func:`rotate`: every kernel and numpy compute the same bits.
ROTATION = """
// The Walsh-Hadamard transform of parts of n elements, divided by sqrt(n). Every thread of the warp calls it.
__device__ void rotate(float* x, int n) {
    for (int step = 1; step < 8 && step < n; step *= 2)
        for (int i = 0; i < 8; ++i)
            if (!(i & step)) {
                const float a = x[i], b = x[i + step];
                x[i] = __fadd_rn(a, b);
                x[i + step] = __fsub_rn(a, b);
            }
    for (int step = 1; step < n / 8; step *= 2)
        for (int i = 0; i < 8; ++i) {
            const float other = __shfl_xor_sync(0xffffffffu, x[i], step);
            x[i] = threadIdx.x & step ? __fsub_rn(other, x[i]) : __fadd_rn(x[i], other);
        }
    float factor = 1;  // rsqrtf is not rounded correctly
    for (int rest = n; rest > 1; rest /= 4) factor *= rest == 2 ? 0.70710678f : 0.5f;
    if (n > 1) for (int i = 0; i < 8; ++i) x[i] = __fmul_rn(x[i], factor);
}
"""
#: Eight numbers as FP8, for the same kernels.
PACK = """
__device__ uint2 pack(const float* x, float scale) {
    uint2 packed = make_uint2(0, 0);
    for (int i = 0; i < 4; ++i) {
        packed.x |= to_fp8(__fmul_rn(x[i], scale)) << 8 * i;
        packed.y |= to_fp8(__fmul_rn(x[i + 4], scale)) << 8 * i;
    }
    return packed;
}
"""

#: The elements that a thread converts, the threads of a block, and the largest number of blocks for an array. The kernels count
#: units in 32 bits.
UNIT, THREADS, _MAX_BLOCKS = 8, 256, 1024
#: The largest number of arrays in a launch: q, k and v.
MAX_ARRAYS = 3
#: The distance between the factors ``scale`` and ``descale`` of an array, in elements: cuDNN requires aligned addresses.
FACTOR_STEP = 4
#: The numbers of the state of delayed scaling before its history, see :func:`delayed`.
STATE = 5
#: Largest magnitudes below this number get the scale 1.
_SMALLEST = 1e-30


class Fp8Conversion(NamedTuple):
    """An array to convert.

    Attributes:
        source: ``(D, H, S, B)`` or packed ``(D, H, T)``, float16, bfloat16 or float32 (numpy: also float64). On the GPU D is a
            multiple of :data:`UNIT`.
        target: FP8 (uint8 on the GPU), dense in Fortran order, with the shape of the source; None if nothing is converted.
        factors: float32 ``(2 FACTOR_STEP,)``, where the scale and the descale are written, :data:`FACTOR_STEP` elements apart.
        rotation: the length of the parts of head_dim that are rotated, a power of two; 1 for none.
        lengths: int32 ``(B,)``, the length of each batch item; beyond it 0 is stored, not the source's elements. None for full
            lengths.
        mean: float32 ``(D, H, 1, B)`` or packed ``(D, H, 1)``, dense in Fortran order, which is subtracted; None for 0. Such an
            array is not rotated. Its scale follows from the largest magnitude with or without the mean, so that it also fits an
            output of attention.
    """

    source: Any
    target: Any
    factors: Any
    rotation: int
    lengths: Any = None
    mean: Any = None


#: A :class:`Fp8Conversion` as the kernels read it: addresses, bytes, and numbers of units.
_ARRAY = Struct(
    "Array", "source head_stride row_stride batch_stride target width heads rows units lengths factors rotation dense mean"
)
#: The argument of the kernels.
_ARRAYS = Struct("Arrays", arrays=(_ARRAY, MAX_ARRAYS))
#: A mean as :func:`dequantize` reads it: strides in bytes, 0 where it is constant, and the lengths of three axes.
_MEAN = Struct("Mean", "address stride_0 stride_1 stride_2 stride_3 length_0 length_1 length_2")


# Steps and calls, for arrays of numpy and of CuPy


def quantize_arrays(conversions: Sequence[Fp8Conversion], amax: Any, dtype: str) -> None:
    """Convert arrays to FP8 with current scaling, in two launches.

    ``amax`` is uint32, one element for each block and array of the launches; None for numpy.
    """
    if cupy_runtime.is_array(conversions[0].factors):
        grid, arguments, source = _launch(conversions)
        for name in ("amax", "convert"):
            _kernel(source, dtype, name)(grid, (THREADS,), (arguments, amax))
        return
    for source, target, factors, rotation, lengths, mean in conversions:
        values = rotated_values(source, rotation, lengths)
        amax = np.abs(values).max(initial=0)
        if mean is not None:
            with np.errstate(invalid="ignore", over="ignore"):
                values = rotated_values(values - mean, 1, lengths)
            amax = np.maximum(amax, np.abs(values).max(initial=0))
        scale, _ = _store(factors, amax, dtype)
        target.view(numpy_dtype(dtype))[...] = elements_of(values, scale, dtype)


def dequantize(source: Any, target: Any, descale: Any, rotation: int, dtype: str, mean: Any = None) -> None:
    """``target = source * descale``, rotated back, plus a mean.

    ``source`` and ``target`` are dense in Fortran order; on the GPU the first axis is a multiple of 8. ``mean`` is float32 of
    their shape with any strides, and at most three of the other axes are longer than 1; None for 0.
    """
    if not cupy_runtime.is_array(target):
        values = rotate(source.view(numpy_dtype(dtype)).astype(np.float32) * descale[0], rotation)
        target[...] = (values if mean is None else values + mean).astype(target.dtype)
    elif units := source.size // UNIT:
        grid = (min(-(-units // THREADS), _MAX_BLOCKS),)
        arguments = (source, target, descale, np.int64(units), np.int64(rotation), _mean(mean))
        _dequantize_kernel(dtype_name(target.dtype), dtype)(grid, (THREADS,), arguments)


def _mean(mean: Any) -> Any:
    """Return the values of :data:`_MEAN`."""
    if mean is None:
        return _MEAN(*(None,) * len(_MEAN.fields))
    first, *others = zip(mean.shape, mean.strides, strict=True)
    axes = [first, *((length, stride) for length, stride in others if length > 1), *[(1, 0)] * 3][:4]
    return _MEAN(mean, *(stride for _, stride in axes), *(length for length, _ in axes[:3]))


def write_factors(conversions: Sequence[Fp8Conversion], dtype: str, headroom: float) -> None:
    """Write the factors of arrays as if their largest finite magnitudes were larger by a factor; two launches."""
    if not cupy_runtime.is_array(conversions[0].factors):
        for source, _, factors, rotation, lengths, _ in conversions:
            values = rotated_values(source, rotation, lengths)
            amax = headroom * float(np.abs(values).max(initial=0, where=np.isfinite(values)))
            _store(factors, min(amax, np.finfo(np.float32).max), dtype)
        return
    grid, arguments, source = _launch(conversions)
    amax = cupy_runtime.empty(grid, np.uint32)
    _kernel(source, dtype, "finite_amax")(grid, (THREADS,), (arguments, amax))
    numbers = np.int64(grid[0]), np.float32(headroom)
    _kernel(source, dtype, "factors")(grid[1:], (THREADS,), (arguments, amax, *numbers))


def delayed(conversion: Fp8Conversion, dtype: str, state: Any) -> None:
    """Convert an array with a scale that was computed before, and then compute the next scale; one launch.

    ``state`` is float32 ``(STATE + N,)``: the scale, the descale; as uint32 the largest magnitude of this launch, the number of
    blocks that have finished, and the position of the oldest entry of the history; and the history of N magnitudes.
    """
    if not cupy_runtime.is_array(state):
        source, target, factors, rotation, lengths, _ = conversion
        values = rotated_values(source, rotation, lengths)
        factors[:1], factors[FACTOR_STEP : FACTOR_STEP + 1] = state[:1], state[1:2]
        target.view(numpy_dtype(dtype))[...] = elements_of(values, state[:1], dtype)
        update(state, np.abs(values).max(initial=0), dtype)
        return
    grid, arguments, source = _launch([conversion])
    _kernel(source, dtype, "delayed")(grid, (THREADS,), (arguments, state, np.int64(state.size - STATE)))


def update(state: Any, amax: Any, dtype: str) -> None:
    """Add a magnitude, float32 ``(1,)``, to the history of delayed scaling if it is finite, and compute the next scale.

    For numpy it may be a number; one launch.
    """
    if cupy_runtime.is_array(state):
        _kernel("float32", dtype, "update")((1,), (1,), (amax, state, np.int64(state.size - STATE)))
    elif np.isfinite(largest := np.abs(amax).max()):
        position, history = state[4:5].view(np.uint32), state[STATE:]
        history[position[0]] = largest
        position[0] = (position[0] + 1) % history.size
        state[:1], state[1:2] = _factors_of(history.max(), dtype)


# The numpy functions


def elements_of(values: Any, scale: Any, dtype: str) -> Any:
    """Return the elements of float32 numbers, dense in Fortran order."""
    with np.errstate(invalid="ignore"):  # infinities and NaN propagate as on a GPU
        return np.asfortranarray(rounded(values * scale, dtype))


def rotated_values(x: Any, rotation: int, lengths: Any) -> Any:
    """Return a numpy array before it is scaled and rounded: float32, 0 in the padding, rotated."""
    values = np.asfortranarray(x, np.float32)
    if lengths is not None:
        values = np.where(np.arange(x.shape[2])[:, None] < lengths, values, np.float32(0))
    return rotate(values, rotation)


@functools.cache
def largest_number(dtype: str) -> float:
    """Return the largest number of an FP8 dtype."""
    from ml_dtypes import finfo  # takes 45 ms to import

    return float(finfo(numpy_dtype(dtype)).max)  # type: ignore[no-untyped-call, unused-ignore]  # typed since ml_dtypes 0.6


def _factors_of(amax: Any, dtype: str) -> tuple[Any, Any]:
    """Return the scale and the descale of a largest magnitude, float32 ``(1,)``."""
    most, largest = np.float32(largest_number(dtype)), np.full(1, amax, np.float32)
    if amax < _SMALLEST:
        return np.ones(1, np.float32), np.ones(1, np.float32)
    with np.errstate(invalid="ignore"):
        return most / largest, largest / most


def _store(factors: Any, amax: Any, dtype: str) -> tuple[Any, Any]:
    """Write the scale and the descale of a largest magnitude; returns them."""
    scale, descale = _factors_of(amax, dtype)
    factors[:1], factors[FACTOR_STEP : FACTOR_STEP + 1] = scale, descale
    return scale, descale


def rotation_of(head_dim: int) -> int:
    """Return the length of the parts of head_dim that are rotated: the largest power of two that divides it.

    >>> rotation_of(128), rotation_of(192), rotation_of(80)
    (128, 64, 16)
    """
    return max(head_dim & -head_dim, 1)


def rotate(x: Any, rotation: int) -> Any:
    """Multiply parts of a float32 numpy array's first axis by a normalized Hadamard matrix, which is its own inverse.

    The matrix is Sylvester's (1867), computed by a Walsh-Hadamard transform: with the operations of the kernels
    (:data:`ROTATION`), so with the same bits.
    """
    if rotation == 1:
        return x
    step = 1
    with np.errstate(invalid="ignore", over="ignore"):  # infinities and NaN propagate as on a GPU
        while step < rotation:
            pairs = x.reshape((step, 2, len(x) // (2 * step), *x.shape[1:]), order="F")
            x = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1).reshape(x.shape, order="F")
            step *= 2
    return x * np.float32(1 / math.sqrt(rotation))


# The launches


def blocks_of(sources: Sequence[Any]) -> int:
    """Return the blocks of a launch that converts arrays."""
    units = max(int(x.size) // UNIT for x in sources)
    return max(1, min(-(-units // THREADS), _MAX_BLOCKS))


def _launch(conversions: Sequence[Fp8Conversion]) -> tuple[tuple[int, int], Any, str]:
    """Return the grid, the argument of the kernels, and the dtype of the sources."""
    blocks = blocks_of([conversion.source for conversion in conversions])
    arguments = _ARRAYS([_array(conversion) for conversion in conversions])
    return (blocks, len(conversions)), arguments, dtype_name(conversions[0].source.dtype)


def _array(conversion: Fp8Conversion) -> tuple[Any, ...]:
    """Return the values of :data:`_ARRAY`."""
    source, target, factors, rotation, lengths, mean = conversion
    width, heads, rows, *_ = source.shape
    dense = lengths is None and mean is None and source.flags.f_contiguous
    sizes = width // UNIT, heads, rows, source.size // UNIT
    return source, *(*source.strides[1:], 0)[:3], target, *sizes, lengths, factors, rotation, dense, mean


_READ = """
// The unit u of the source, rotated; 0 after the last unit and beyond the length. Every thread of the warp calls it.
// Returns the mean of the unit, or null without a mean.
__device__ const float* read(const Array& a, long long u, float* x) {
    const float* mean = nullptr;
    for (int i = 0; i < 8; ++i) x[i] = 0;
    if (u < a.units) {
        const Source* unit = (const Source*)a.source + 8 * u;
        bool given = true;
        if (!a.dense) {  // divisions of 32 bits take a fraction of the time of those of 64 bits
            const unsigned i = (unsigned)u, width = (unsigned)a.width, heads = (unsigned)a.heads, rows = (unsigned)a.rows;
            const unsigned r = i / width, of_rows = r / heads, b = of_rows / rows;
            const unsigned column = i - r * width, head = r - of_rows * heads, row = of_rows - b * rows;
            const char* const from = (const char*)a.source + b * a.batch_stride + row * a.row_stride + head * a.head_stride;
            unit = (const Source*)from + 8 * column;
            given = !a.lengths || (int)row < ((const int*)a.lengths)[b];
            if (given && a.mean) mean = (const float*)a.mean + 8 * (column + (long long)width * (head + (long long)heads * b));
        }
        if (given) {
            alignas(16) Source of[8];
            if ((unsigned long long)unit % 16 == 0) {
                for (int i = 0; i < (int)sizeof(of) / 16; ++i) ((uint4*)of)[i] = ((const uint4*)unit)[i];
            } else {
                for (int i = 0; i < 8; ++i) of[i] = unit[i];
            }
            for (int i = 0; i < 8; ++i) x[i] = float(of[i]);
        }
    }
    rotate(x, (int)a.rotation);
    return mean;
}
__device__ void subtract(const float* mean, float* x) {
    for (int i = 0; i < 8; ++i) x[i] = __fsub_rn(x[i], mean[i]);
}
__device__ void write(const Array& a, long long u, const float* x, float scale) {
    if (u < a.units) ((uint2*)a.target)[u] = pack(x, scale);
}
// The bits of a magnitude are in the order of the magnitudes, and those of NaN are the largest.
__device__ unsigned magnitude(const float* x) {
    unsigned largest = 0;
    for (int i = 0; i < 8; ++i) largest = max(largest, __float_as_uint(x[i]) & 0x7fffffffu);
    return largest;
}
__device__ unsigned finite_magnitude(const float* x) {
    unsigned largest = 0;
    for (int i = 0; i < 8; ++i) {
        const unsigned bits = __float_as_uint(x[i]) & 0x7fffffffu;
        if (bits < 0x7f800000u) largest = max(largest, bits);
    }
    return largest;
}
// The largest magnitude of a block in thread 0.
__device__ unsigned of_block(unsigned largest) {
    __shared__ unsigned parts[THREADS];
    parts[threadIdx.x] = largest;
    __syncthreads();
    for (int step = THREADS / 2; step; step /= 2) {
        if (threadIdx.x < step) parts[threadIdx.x] = max(parts[threadIdx.x], parts[threadIdx.x + step]);
        __syncthreads();
    }
    return parts[0];
}
// The scale that maps a magnitude to the largest number, and its inverse; 1 for magnitudes that have no normal inverse.
__device__ void factors_of(float amax, float& scale, float& descale) {
    const bool small = amax < 1e-30f;
    scale = small ? 1.0f : (float)MOST / amax;
    descale = small ? 1.0f : amax / (float)MOST;
}
// Add a magnitude to the history, if it is finite, and compute the next factors from its maximum.
__device__ void advance(float* state, unsigned amax, long long length) {
    if (amax >= 0x7f800000u) return;
    unsigned* const counters = (unsigned*)state + 2;
    unsigned* const history = (unsigned*)state + HISTORY;
    history[counters[2]] = amax;
    counters[2] = (counters[2] + 1) % length;
    unsigned largest = 0;
    for (long long i = 0; i < length; ++i) largest = max(largest, history[i]);
    factors_of(__uint_as_float(largest), state[0], state[1]);
}
"""
_BODIES = {
    "amax": """(const Arrays arrays, unsigned* amax) {
        const Array& a = arrays.arrays[blockIdx.y];
        unsigned largest = 0;
        float x[8];
        for (long long base = (long long)blockIdx.x * THREADS; base < a.units; base += (long long)gridDim.x * THREADS) {
            const float* const mean = read(a, base + threadIdx.x, x);
            largest = max(largest, magnitude(x));
            if (mean) {
                subtract(mean, x);
                largest = max(largest, magnitude(x));
            }
        }
        largest = of_block(largest);
        if (threadIdx.x == 0) amax[blockIdx.y * gridDim.x + blockIdx.x] = largest;
    }""",
    "convert": """(const Arrays arrays, const unsigned* amax) {
        const Array& a = arrays.arrays[blockIdx.y];
        float scale, descale, x[8];
        unsigned largest = 0;
        for (unsigned i = threadIdx.x; i < gridDim.x; i += THREADS) largest = max(largest, amax[blockIdx.y * gridDim.x + i]);
        factors_of(__uint_as_float(of_block(largest)), scale, descale);
        if (blockIdx.x == 0 && threadIdx.x == 0) {
            ((float*)a.factors)[0] = scale;
            ((float*)a.factors)[STEP] = descale;
        }
        for (long long base = (long long)blockIdx.x * THREADS; base < a.units; base += (long long)gridDim.x * THREADS) {
            if (const float* const mean = read(a, base + threadIdx.x, x)) subtract(mean, x);
            write(a, base + threadIdx.x, x, scale);
        }
    }""",
    "factors": """(const Arrays arrays, const unsigned* amax, long long blocks, float headroom) {
        unsigned largest = 0;
        for (unsigned i = threadIdx.x; i < blocks; i += THREADS) largest = max(largest, amax[blockIdx.x * blocks + i]);
        largest = of_block(largest);
        float* const factors = (float*)arrays.arrays[blockIdx.x].factors;
        if (threadIdx.x == 0) factors_of(fminf(__uint_as_float(largest) * headroom, 3.4028235e38f), factors[0], factors[STEP]);
    }""",
    "delayed": """(const Arrays arrays, float* state, long long length) {
        const Array& a = arrays.arrays[0];
        unsigned* const counters = (unsigned*)state + 2;
        const float scale = state[0];
        unsigned largest = 0;
        float x[8];
        if (blockIdx.x == 0 && threadIdx.x == 0) {
            ((float*)a.factors)[0] = scale;
            ((float*)a.factors)[STEP] = state[1];
        }
        for (long long base = (long long)blockIdx.x * THREADS; base < a.units; base += (long long)gridDim.x * THREADS) {
            read(a, base + threadIdx.x, x);
            largest = max(largest, magnitude(x));
            write(a, base + threadIdx.x, x, scale);
        }
        largest = of_block(largest);
        if (threadIdx.x) return;
        atomicMax(counters, largest);
        __threadfence();
        if (atomicAdd(counters + 1, 1u) != gridDim.x - 1) return;
        __threadfence();
        advance(state, atomicExch(counters, 0u), length);  // every block has read the scale
        counters[1] = 0;
    }""",
    "update": """(const float* amax, float* state, long long length) {
        advance(state, __float_as_uint(*amax) & 0x7fffffffu, length);
    }""",
}
#: The same for the finite numbers of an array.
_BODIES["finite_amax"] = _BODIES["amax"].replace("magnitude(x)", "finite_magnitude(x)")


@cuda_kernel
def _kernel(source: str, dtype: str, name: str) -> str:
    """Return a kernel by its name in :data:`_BODIES`.

    "amax" and "convert" are two launches, because in one launch all blocks would have to wait for each other.
    """
    of = TYPES[source]
    names = {"THREADS": THREADS, "STEP": FACTOR_STEP, "HISTORY": STATE, "MOST": largest_number(dtype)}
    defined = "".join(f"#define {key} {value}\n" for key, value in names.items())
    return (
        f"{of.header}{defined}{TYPES[dtype].header}{ROTATION}{PACK}{_ARRAYS}\ntypedef {of.name} Source;{_READ}"
        f'extern "C" __global__ void cupy_sdpa_fp8_{name}{_BODIES[name]}'
    )


@cuda_kernel
def _dequantize_kernel(target: str, dtype: str) -> str:
    """Return the kernel of :func:`dequantize`."""
    of = TYPES[target]
    return f"""{of.header}{TYPES[dtype].header}{ROTATION}{_MEAN}
        typedef {of.name} Target;
        extern "C" __global__ void cupy_sdpa_dequantize(
            const uint2* from, Target* to, const float* descale, long long units, long long rotation, const Mean mean) {{
            const long long step = (long long)gridDim.x * blockDim.x;
            for (long long base = (long long)blockIdx.x * blockDim.x; base < units; base += step) {{
                const long long u = base + threadIdx.x;
                const uint2 packed = u < units ? from[u] : make_uint2(0, 0);
                float x[8];
                for (int i = 0; i < 4; ++i) {{
                    x[i] = __fmul_rn(from_fp8(packed.x >> 8 * i & 0xff), *descale);
                    x[i + 4] = __fmul_rn(from_fp8(packed.y >> 8 * i & 0xff), *descale);
                }}
                rotate(x, (int)rotation);
                if (mean.address && u < units) {{
                    const long long width = mean.length_0 / 8, r = u / width, s = r / mean.length_1;
                    const char* const from = (const char*)mean.address
                        + 8 * (u % width) * mean.stride_0 + r % mean.length_1 * mean.stride_1
                        + s % mean.length_2 * mean.stride_2 + s / mean.length_2 * mean.stride_3;
                    for (int i = 0; i < 8; ++i) x[i] = __fadd_rn(x[i], *(const float*)(from + i * mean.stride_0));
                }}
                alignas(16) Target values[8];
                for (int i = 0; i < 8; ++i) values[i] = Target(x[i]);
                if (u < units)
                    for (int i = 0; i < (int)sizeof(values) / 16; ++i)
                        ((uint4*)(to + 8 * u))[i] = ((const uint4*)values)[i];
            }}
            __syncwarp();
        }}"""
