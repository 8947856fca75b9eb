"""Everything asked of CuPy and of the CUDA driver: arrays, memory, streams, devices and contexts.

CuPy is imported only where the caller has done so already, or asks about the GPU.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


def is_array(x: object) -> bool:
    """Whether ``x`` is a CuPy array; CuPy is not imported to find out."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(x, cupy.ndarray)


def cupy() -> Any:
    """The cupy module.

    Raises:
        RuntimeError: CuPy is not installed.
    """
    try:
        import cupy as module
    except ImportError as error:
        raise RuntimeError("CuPy is needed for the GPU: pip install 'cupy-sdpa[cuda12]' (or [cuda13])") from error
    return module


@contextlib.contextmanager
def on_device_of(array: Any) -> Iterator[int]:
    """Make an array's device the current one for a while; gives its number."""
    device = array.data.device_id
    if device == cupy().cuda.runtime.getDevice():
        yield device
    else:
        with array.device:
            yield device


def current_device() -> int | None:
    """The number of CuPy's current device; None where there is no CuPy, or no GPU."""
    if importlib.util.find_spec("cupy") is None or not cupy().cuda.is_available():
        return None
    return int(cupy().cuda.runtime.getDevice())


def stream() -> int:
    """The address of CuPy's current stream."""
    return int(cupy().cuda.get_current_stream().ptr)


def capturing() -> bool:
    """Whether CuPy's current stream records what it is given into a CUDA graph, instead of running it."""
    pointer = stream()
    return bool(pointer) and bool(cupy().cuda.runtime.streamIsCapturing(pointer))  # the default stream cannot be captured


def allocate(size: int) -> Any:
    """``size`` bytes for work of the current stream.

    From CuPy's allocator, and back in its pool when the result is let go. While the stream is captured the memory belongs
    to the graph: allocated by a node of it before the work and freed by one after it, in every replay.
    """
    if capturing():
        return cupy().cuda.malloc_async(size)
    return cupy().cuda.alloc(size)


def empty(shape: tuple[int, ...], dtype: Any) -> Any:
    """A temporary array in Fortran order, in memory from :func:`allocate`."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return cupy().ndarray(shape, dtype, allocate(max(size, 1)), order="F")


def free_memory() -> int:
    """Bytes that CuPy could allocate now: what the device has free and what CuPy's pool holds unused."""
    free, _ = cupy().cuda.runtime.memGetInfo()
    return int(free) + int(cupy().get_default_memory_pool().free_bytes())


def context_id() -> int:
    """An id of the current CUDA context that no later context will have; makes the device's primary context if there is none.

    Raises:
        RuntimeError: there is no GPU, or cuda-python is missing.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise RuntimeError(
            "cuda-python is needed to tell CUDA contexts apart: pip install 'cupy-sdpa[cuda12]' (or [cuda13])"
        ) from error
    status, number = driver.cuCtxGetId(0)
    if status:  # no context is current in this thread yet
        cupy().cuda.runtime.free(0)
        status, number = driver.cuCtxGetId(0)
        if status:
            raise RuntimeError(f"no CUDA context is current: {status.name}")
    return int(number)


def fit(target: Any, source: Any, axes: Sequence[int]) -> None:
    """Copy what fits along some axes, and clear what is left of the target behind it; numpy's arrays or CuPy's."""
    common = tuple(slice(min(to, of)) for to, of in zip(target.shape, source.shape, strict=True))
    for axis in axes:
        target[(*common[:axis], slice(common[axis].stop, None))] = 0
    target[common] = source[common]


def resize(target: Any, source: Any, axis: int) -> None:
    """:func:`fit` for CuPy's arrays, along one axis.

    Two calls of the driver, at the speed of the memory, where the arrays lie in evenly spaced rows, each dense up to and with
    the axis, as arrays in Fortran order do; CuPy's element-wise kernels, 20 times slower on 4-dimensional arrays, elsewhere.
    """
    to, of = _rows(target, axis), _rows(source, axis)
    if to is None or of is None or to.number != of.number:
        fit(target, source, (axis,))
        return
    width = min(to.width, of.width)
    runtime = cupy().cuda.runtime
    if width:
        kind = runtime.memcpyDeviceToDevice
        runtime.memcpy2DAsync(to.address, to.pitch, of.address, of.pitch, width, to.number, kind, stream())
    if width < to.width:
        from cuda.bindings import driver

        _check(driver.cuMemsetD2D8Async(to.address + width, to.pitch, 0, to.width - width, to.number, stream()))


def clear(array: Any, value: float) -> None:
    """Fill with zeros, or a float32 array with -inf: by the driver, at the speed of the memory, where the array is dense."""
    if not array.flags.f_contiguous and not array.flags.c_contiguous:
        array.fill(value)
    elif array.size:
        from cuda.bindings import driver

        if value == 0:
            _check(driver.cuMemsetD8Async(array.data.ptr, 0, array.nbytes, stream()))
        else:
            bits = int(np.float32(value).view(np.uint32))
            _check(driver.cuMemsetD32Async(array.data.ptr, bits, array.size, stream()))


def seeing_nothing(stats: Any) -> Any:
    """A copy of log-sum-exps with +inf in place of -inf."""
    copy = empty(stats.shape, stats.dtype)
    return _elementwise("float32 x", "float32 y", "y = x == -INFINITY ? INFINITY : x", "seeing_nothing")(stats, copy)


def diagonal(queries: int, of_queries: Any, of_keys: Any) -> Any:
    """``i + keys - queries`` for every query i and batch entry, int32 ``(Sq, B)``."""
    made = empty((queries, of_queries.size), np.int32)
    operation = "p = i % n + k[i / n] - q[i / n]"
    kernel = _elementwise("raw int32 q, raw int32 k, int64 n", "int32 p", operation, "diagonal")
    kernel(of_queries, of_keys, queries, made.T)  # its elements in the order of the memory
    return made


@functools.cache
def _elementwise(inputs: str, outputs: str, operation: str, name: str) -> Any:
    return cupy().ElementwiseKernel(inputs, outputs, operation, f"cupy_sdpa_{name}")


#: How many offsets the kernel of :func:`unpacked` can make.
_MOST_OFFSETS = 14


def unpacked(
    sides: dict[str, tuple[int, int, str]], arrays: Mapping[str, Any], offsets: Mapping[str, tuple[str, int]]
) -> dict[str, Any]:
    """The lengths of packed sequences, int32, and the offsets of arrays, int64, in one launch and without waiting.

    What a sequence may not have, more positions than the longest or than there are, it does not get.

    Args:
        sides: for ``cu_seqlens_q`` and ``cu_seqlens_kv`` the length of the longest, the total, and the lengths' name.
        arrays: holds both, int32 or int64 ``(B+1,)``.
        offsets: for every name which of them it is made of, and the factor.
    """
    names = list(sides)
    size = arrays[names[0]].size
    lengths = [empty((size - 1,), np.int32) for _ in names]
    found = [empty((size,), np.int64) for _ in offsets]
    factors = [factor if begins == names[0] else -factor for begins, factor in offsets.values()]
    blank = [0] * (_MOST_OFFSETS - len(offsets))
    numbers = [np.int64(n) for begins in names for n in sides[begins][:2]]
    kinds = tuple("int" if arrays[begins].dtype.itemsize == 4 else "long long" for begins in names)
    stride = [np.int64(arrays[begins].strides[0] // arrays[begins].itemsize) for begins in names]
    arguments = (
        *(arrays[begins] for begins in names), *stride, *lengths, *numbers, np.int32(size),
        *(x.data.ptr for x in found), *blank, *(np.int64(f) for f in factors), *(np.int64(0) for _ in blank),
    )  # fmt: skip
    _unpacking(*kinds)((-(-size // 128),), (128,), arguments)
    lengths_by_name = {sides[begins][2]: array for begins, array in zip(names, lengths, strict=True)}
    return lengths_by_name | dict(zip(offsets, found, strict=True))


@functools.cache
def _unpacking(of_queries: str, of_keys: str) -> Any:
    """The kernel of :func:`unpacked`; a factor below 0 is one of keys."""
    outs = ", ".join(f"long long* o{n}" for n in range(_MOST_OFFSETS))
    factors = ", ".join(f"long long f{n}" for n in range(_MOST_OFFSETS))
    writes = "\n".join(f"            if (f{n}) o{n}[i] = f{n} > 0 ? q * f{n} : k * -f{n};" for n in range(_MOST_OFFSETS))
    return cupy().RawKernel(
        f"""__device__ long long within(long long x, long long most) {{ return x < 0 ? 0 : x < most ? x : most; }}
        extern "C" __global__ void cupy_sdpa_unpack(
            const {of_queries}* cu_q, const {of_keys}* cu_k, long long step_q, long long step_k, int* len_q, int* len_k,
            long long most_q, long long total_q, long long most_k, long long total_k, int size, {outs}, {factors}) {{
            const int i = blockIdx.x * blockDim.x + threadIdx.x;
            if (i >= size) return;
            const long long q = within(cu_q[i * step_q], total_q), k = within(cu_k[i * step_k], total_k);
            if (i + 1 < size) {{
                len_q[i] = within(within(cu_q[(i + 1) * step_q], total_q) - q, most_q);
                len_k[i] = within(within(cu_k[(i + 1) * step_k], total_k) - k, most_k);
            }}
{writes}
        }}""",
        "cupy_sdpa_unpack",
    )


def cleaned(array: Any, lengths: Any) -> Any:
    """A dense copy of an array ``(D, H, S, B)`` with zeros behind the length of every batch entry, whatever lies there.

    D is a multiple of 8 elements of 2 bytes, so a position of a sequence is a multiple of 16 bytes.
    """
    copy = empty(array.shape, array.dtype)
    rows = _rows(array, 2)
    if rows is None or rows.address % 16 or rows.pitch % 16:
        copy[...] = array
        rows = _rows(copy, 2)
    assert rows is not None
    position = rows.width // array.shape[2]
    blocks = min(-(-rows.width // (16 * 256)), 1024)
    arguments = (rows.address, copy, lengths, np.int64(rows.pitch // 16), np.int64(rows.width // 16), np.int64(position // 16))
    _cleaning()((blocks, array.shape[3]), (256,), arguments)
    return copy


@functools.cache
def _cleaning() -> Any:
    """The kernel of :func:`cleaned`: 16 bytes a thread and step."""
    return cupy().RawKernel(
        """extern "C" __global__ void cupy_sdpa_clean(
            const uint4* from, uint4* to, const int* lengths, long long pitch, long long width, long long position) {
            const long long b = blockIdx.y, kept = lengths[b] * position, step = (long long)gridDim.x * blockDim.x;
            for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < width; i += step)
                to[b * width + i] = i < kept ? from[b * pitch + i] : make_uint4(0, 0, 0, 0);
        }""",
        "cupy_sdpa_clean",
    )


def fill_int32(array: Any, value: int) -> None:
    """Fill a dense int32 array with a number."""
    from cuda.bindings import driver

    _check(driver.cuMemsetD32Async(array.data.ptr, value, array.size, stream()))


def _check(answer: Any) -> None:
    if answer[0]:
        raise RuntimeError(f"the CUDA driver failed: {answer[0].name}")


class _Rows(NamedTuple):
    """Where the rows of an array lie, in bytes."""

    address: int
    pitch: int
    width: int
    number: int


def _rows(array: Any, axis: int) -> _Rows | None:
    """The rows of an array that is dense up to and with an axis, and whose other axes are evenly spaced rows; else None."""
    width = array.dtype.itemsize
    for length, step in zip(array.shape[: axis + 1], array.strides[: axis + 1], strict=True):
        if length > 1 and step != width:
            return None
        width *= length
    pitch, count = max(width, 1), 1
    for length, step in zip(array.shape[axis + 1 :], array.strides[axis + 1 :], strict=True):
        if length > 1:
            pitch = step if count == 1 else pitch
            if step != pitch * count or pitch < width:
                return None
            count *= length
    return _Rows(array.data.ptr, pitch, width, count)


@functools.cache
def model(device: int) -> str:
    """A device's name, compute capability and number of multiprocessors: what plans depend on."""
    properties = cupy().cuda.runtime.getDeviceProperties(device)
    return model_of(properties["name"].decode(), capability(device), properties["multiProcessorCount"])


def model_of(name: str, capability: int, multiprocessors: int) -> str:
    """The text that stands for a GPU's model.

    >>> model_of("NVIDIA H200", 90, 132)
    'NVIDIA H200, compute capability 9.0, 132 multiprocessors'
    """
    return f"{name}, compute capability {capability / 10}, {multiprocessors} multiprocessors"


def capability(device: int) -> int:
    """A device's compute capability, 9.0 as 90."""
    return int(cupy().cuda.Device(device).compute_capability)
