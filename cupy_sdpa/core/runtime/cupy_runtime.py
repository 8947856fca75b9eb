"""CuPy: arrays, devices, streams and allocation.

This module imports CuPy only on first use. :func:`is_array` never imports it.

>>> import numpy as np
>>> x = np.ones(3)
>>> is_array(x), array_module(x).exp(x).shape
(False, (3,))
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np

from ..errors import INSTALL_FOR_GPU


def is_array(x: object) -> bool:
    """True if ``x`` is a CuPy array."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(x, cupy.ndarray)


def cupy() -> Any:
    """Return the module ``cupy``.

    Raises:
        RuntimeError: CuPy is not installed.
    """
    try:
        import cupy as module
    except ImportError as error:
        raise RuntimeError(f"CuPy is required for the GPU: {INSTALL_FOR_GPU}") from error
    return module


def array_module(array: Any) -> Any:
    """Return the module of an array: cupy or numpy."""
    return cupy() if is_array(array) else np


@contextlib.contextmanager
def on_device_of(array: Any) -> Iterator[int]:
    """Make an array's device the current one within a ``with`` block; yields its number."""
    device = array.data.device_id
    if device == cupy().cuda.runtime.getDevice():
        yield device
    else:
        with array.device:
            yield device


def device_context(array: Any) -> contextlib.AbstractContextManager[Any]:
    """:func:`on_device_of` a CuPy array; for other arrays a context that changes nothing."""
    return on_device_of(array) if is_array(array) else contextlib.nullcontext()


def current_device() -> int | None:
    """Return the number of CuPy's current device; None without CuPy or without a GPU."""
    if importlib.util.find_spec("cupy") is None or not cupy().cuda.is_available():
        return None
    return int(cupy().cuda.runtime.getDevice())


def capability(device: int) -> int:
    """Return the compute capability of a device; 90 is 9.0."""
    return int(cupy().cuda.Device(device).compute_capability)


@functools.cache
def model(device: int) -> str:
    """Return the model of a device, see :func:`model_of`."""
    properties = cupy().cuda.runtime.getDeviceProperties(device)
    return model_of(properties["name"].decode(), capability(device), properties["multiProcessorCount"])


def model_of(name: str, capability: int, multiprocessors: int) -> str:
    """Return a GPU model as text: the properties of a device on which plans depend.

    >>> model_of("NVIDIA H200", 90, 132)
    'NVIDIA H200, compute capability 9.0, 132 multiprocessors'
    """
    return f"{name}, compute capability {capability / 10}, {multiprocessors} multiprocessors"


def stream() -> int:
    """Return the address of CuPy's current stream."""
    return int(cupy().cuda.get_current_stream().ptr)


@functools.cache
def elementwise(inputs: str, outputs: str, operation: str, name: str) -> Any:
    """Return an elementwise kernel of CuPy."""
    return cupy().ElementwiseKernel(inputs, outputs, operation, f"cupy_sdpa_{name}")


def capturing() -> bool:
    """True if CuPy's current stream is being captured into a CUDA graph."""
    cuda = cupy().cuda
    pointer = cuda.get_current_stream().ptr
    # the default stream cannot be captured, nor, by CuPy, one of ROCm
    return bool(pointer) and not cuda.runtime.is_hip and bool(cuda.runtime.streamIsCapturing(pointer))


def arrays_function(ndarray: Any) -> Callable[[Sequence[tuple[Any, ...]], Sequence[Any]], list[Any]]:
    """Return a function that creates arrays from tuples of (shape, dtype, bytes, strides, order) and memory pointers.

    ``ndarray.__new__`` packs its arguments into a tuple and a dictionary, twice, and passes them on to ``_init``; this takes a
    third of the time. ``_init`` is therefore called directly, if CuPy has it.
    """
    direct = hasattr(ndarray, "_init")
    new = ndarray.__base__.__new__

    def arrays(created: Sequence[tuple[Any, ...]], pointers: Sequence[Any]) -> list[Any]:
        made = []
        for (shape, dtype, _, strides, order), pointer in zip(created, pointers):  # noqa: B905 - strict takes longer
            if direct:
                array = new(ndarray)
                array._init(shape, dtype, pointer, strides, order)
            else:
                array = ndarray(shape, dtype, pointer, strides, order)
            made.append(array)
        return made

    return arrays


#: The streams of parallel branches by thread and device; never destroyed, because a stream may be part of a capture.
_branch_streams: dict[tuple[int, int], Any] = {}


@contextlib.contextmanager
def parallel_branch() -> Iterator[Callable[[], None]]:
    """Enqueue the work of a ``with`` block on another stream: in a captured graph it is a branch, parallel to later work.

    Memory that the block allocates must be deleted within the block.

    Yields:
        A function to call after the block: the current stream waits for the work of the block.
    """
    cuda = cupy().cuda
    main, key = cuda.get_current_stream(), (threading.get_ident(), cuda.runtime.getDevice())
    if key not in _branch_streams:
        _branch_streams[key] = cuda.Stream(non_blocking=True)
    branch, begin, end = _branch_streams[key], cuda.Event(disable_timing=True), cuda.Event(disable_timing=True)
    begin.record(main)
    branch.wait_event(begin)

    def join() -> None:
        main.wait_event(end)

    try:
        with branch:
            try:
                yield join
            except BaseException as error:
                traceback.clear_frames(error.__traceback__)  # memory of a failed call is freed within the branch
                raise
    except BaseException:
        end.record(branch)
        join()  # a capture with a branch that is not joined could not be ended
        raise
    end.record(branch)


#: The alignment of the parts of an arena, in bytes.
ALIGNMENT = 256


class Memory(NamedTuple):
    """A block of device memory: a CuPy memory pointer, and the size in bytes."""

    pointer: Any
    size: int


def unowned(memory: Memory, device: int) -> Memory:
    """Return the same memory of a device, which the result does not keep alive."""
    cuda = cupy().cuda
    block = cuda.UnownedMemory(memory.pointer.ptr, memory.size, None, device)
    return Memory(cuda.MemoryPointer(block, 0), memory.size)


class Arena:
    """The memory of :func:`allocate` within :func:`arena`.

    Attributes:
        used: the bytes that are allocated now, including the gaps for alignment.
        needed: the largest value of ``used`` so far.
        others: arrays that did not fit into the memory of a capture.
    """

    def __init__(self, memory: Memory | None, stream: Any) -> None:
        self._memory, self._stream = memory, stream
        self._allocator: Any = None if stream is None else cupy().cuda.get_allocator()
        self.used = self.needed = 0
        self.others: list[Any] = []

    def allocate(self, size: int) -> Any:
        """Return the next ``size`` bytes; memory from CuPy's allocator if they do not fit."""
        begin = self.used
        self.used += -(-size // ALIGNMENT) * ALIGNMENT
        self.needed = max(self.needed, self.used)
        if self._memory and self.used <= self._memory.size:
            return self._memory.pointer + begin
        return _allocate(size) if self._stream is None else self.keep(size)

    def keep(self, size: int) -> Any:
        """Memory of the stream outside a capture, which the arena keeps alive; it is CuPy's allocator in the capture."""
        with self._stream:
            self.others.append(cupy().ndarray(size, np.uint8, self._allocator(size)))
        return self.others[-1].data


_arena: ContextVar[Arena | None] = ContextVar("arena", default=None)


@contextlib.contextmanager
def arena(memory: Memory | None = None, stream: Any = None) -> Iterator[Arena]:
    """Within a ``with`` block, let :func:`allocate` return parts of a block of memory, one after the other.

    Args:
        memory: the block. Default None: memory is only counted.
        stream: the stream whose memory is used, and kept alive with the arena, for what does not fit; for captures. Default
            None: the current stream, and nothing is kept alive.
    """
    made = Arena(memory, stream)
    token = _arena.set(made)
    try:
        yield made
    finally:
        _arena.reset(token)


@contextlib.contextmanager
def released() -> Iterator[None]:
    """Return the memory that a ``with`` block allocates within :func:`arena` to it; later work on the stream reuses it."""
    found = _arena.get()
    used = found.used if found else 0
    yield
    if found:
        found.used = used


def allocate(size: int) -> Any:
    """Allocate ``size`` bytes for work on the current stream; returns a CuPy memory pointer.

    The memory is from CuPy's allocator and returns to its pool when the pointer is deleted. While the current stream is being
    captured, the memory belongs to the CUDA graph: each replay allocates it before the work and frees it afterwards. Within
    :func:`arena` it is part of the arena.
    """
    found = _arena.get()
    return found.allocate(size) if found else _allocate(size)


def _allocate(size: int) -> Any:
    return cupy().cuda.malloc_async(size) if capturing() else cupy().cuda.alloc(size)


def empty(shape: tuple[int, ...], dtype: Any) -> Any:
    """Create an uninitialized array in Fortran order, in memory from :func:`allocate`.

    It must be deleted before the call returns: a captured graph that does not free its memory can be launched only once.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return cupy().ndarray(shape, dtype, allocate(max(size, 1)), order="F")


def temporary(like: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Create an uninitialized array in Fortran order that is used within a call only, on the engine of ``like``."""
    return empty(shape, dtype) if is_array(like) else np.empty_like(like, dtype, "F", subok=False, shape=shape)


def temporary_copy(array: Any) -> Any:
    """Return a copy in Fortran order that is used within a call only, see :func:`temporary`."""
    copy = temporary(array, array.shape, array.dtype)
    copy.T[...] = array.T  # CuPy copies arrays in C order at memory speed, others much slower
    return copy


def new_result(like: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Create an uninitialized array in Fortran order to return to the caller, on the engine of ``like``."""
    if is_array(like):
        return cupy().empty(shape, dtype, order="F")
    return np.empty_like(like, dtype, "F", subok=False, shape=shape)
