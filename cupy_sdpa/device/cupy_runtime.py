"""Everything asked of CuPy and of the CUDA driver: arrays, memory, streams, devices and contexts.

CuPy is imported only where the caller has done so already, or asks about the GPU.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np

#: While :func:`captured` runs something: the stream that its memory is of, and that memory.
_holder: ContextVar[tuple[Any, list[Any]] | None] = ContextVar("holder", default=None)


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
    if holder := _holder.get():
        stream, held = holder
        with stream:
            held.append(cupy().empty(size, np.uint8))
        return held[-1].data
    if capturing():
        return cupy().cuda.malloc_async(size)
    return cupy().cuda.alloc(size)


def empty(shape: tuple[int, ...], dtype: Any) -> Any:
    """A temporary array in Fortran order, in memory from :func:`allocate`."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return cupy().ndarray(shape, dtype, allocate(max(size, 1)), order="F")


@functools.cache
def driver() -> Any:
    """The CUDA driver's bindings.

    Raises:
        RuntimeError: cuda-python is missing.
    """
    try:
        from cuda.bindings import driver as module
    except ImportError as error:
        raise RuntimeError(
            "cuda-python is needed to tell CUDA contexts apart: pip install 'cupy-sdpa[cuda12]' (or [cuda13])"
        ) from error
    return module


def context_id() -> int:
    """An id of the current CUDA context that no later context will have; makes the device's primary context if there is none.

    Raises:
        RuntimeError: there is no GPU, or cuda-python is missing.
    """
    status, number = driver().cuCtxGetId(0)
    if status:  # no context is current in this thread yet
        cupy().cuda.runtime.free(0)
        number = unwrap(driver().cuCtxGetId(0))
    return number  # type: ignore[no-any-return]


def captured(run: Callable[[], None]) -> tuple[int, list[Any]]:
    """A CUDA graph of what ``run`` enqueues, for the caller to destroy; and the memory that it allocates for that, as arrays.

    Nothing runs. The memory is of the current stream, as if it were no recording: whoever launches the graph holds it.
    Whatever is raised, the capture is ended, and the current stream is the one from before.
    """
    runtime = cupy().cuda.runtime
    held: list[Any] = []
    token = _holder.set((cupy().cuda.get_current_stream(), held))
    try:
        with cupy().cuda.Stream(non_blocking=True) as stream:
            try:
                runtime.streamBeginCapture(stream.ptr, runtime.streamCaptureModeRelaxed)  # minds nobody else's work
                run()
            except BaseException:
                with contextlib.suppress(Exception):  # raised too where the capture was broken, and in any case it has ended
                    runtime.graphDestroy(runtime.streamEndCapture(stream.ptr))
                raise
            return int(runtime.streamEndCapture(stream.ptr)), held
    finally:
        _holder.reset(token)


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
    to, of = rows_of(target, axis), rows_of(source, axis)
    if to is None or of is None or to.number != of.number:
        fit(target, source, (axis,))
        return
    width = min(to.width, of.width)
    runtime = cupy().cuda.runtime
    if width:
        kind = runtime.memcpyDeviceToDevice
        runtime.memcpy2DAsync(to.address, to.pitch, of.address, of.pitch, width, to.number, kind, stream())
    if width < to.width:
        check(driver().cuMemsetD2D8Async(to.address + width, to.pitch, 0, to.width - width, to.number, stream()))


def clear(array: Any, value: float) -> None:
    """Fill with zeros, or a float32 array with -inf: by the driver, at the speed of the memory, where the array is dense."""
    if not array.flags.f_contiguous and not array.flags.c_contiguous:
        array.fill(value)
    elif array.size:
        if value == 0:
            check(driver().cuMemsetD8Async(array.data.ptr, 0, array.nbytes, stream()))
        else:
            bits = int(np.float32(value).view(np.uint32))
            check(driver().cuMemsetD32Async(array.data.ptr, bits, array.size, stream()))


def fill_int32(array: Any, value: int) -> None:
    """Fill a dense int32 array with a number."""
    check(driver().cuMemsetD32Async(array.data.ptr, value, array.size, stream()))


def check(answer: Any) -> None:
    """Raise where the driver did not answer with success."""
    if answer[0]:
        raise RuntimeError(f"the CUDA driver failed: {answer[0].name}")


def unwrap(answer: Any) -> Any:
    """The one value that the driver answers with; raises where it is not success."""
    check(answer)
    return answer[1]


class Rows(NamedTuple):
    """Where the rows of an array lie, in bytes."""

    address: int
    pitch: int
    width: int
    number: int


def rows_of(array: Any, axis: int) -> Rows | None:
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
    return Rows(array.data.ptr, pitch, width, count)


#: For each CUDA context, by its id, the numbers from 0 on; see :func:`positions`.
_positions: dict[int, Any] = {}


def positions(length: int) -> Any:
    """An int32 array that begins with the numbers from 0 to ``length - 1``; never freed, so that plans may keep its address.

    A context has one such array, which is at least doubled where a longer one is needed. It is complete when this returns:
    work on every stream may read it.
    """
    context = context_id()
    array = _positions.get(context)
    if array is None or array.size < length:
        size = max(1 << 16, 1 << (length - 1).bit_length())
        with cupy().cuda.Stream(non_blocking=True) as stream:
            array = cupy().arange(size, dtype=np.int32)
            stream.synchronize()
        _kept_positions.append(array)
        _positions[context] = array
    return array


#: Every array that :func:`positions` has made: together they take twice the memory of the longest.
_kept_positions: list[Any] = []


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
