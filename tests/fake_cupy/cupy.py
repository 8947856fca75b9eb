"""The fake ``cupy`` module."""

from __future__ import annotations

import ctypes
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy import float16, float32, float64, inf, int32, int64, nan, uint32  # noqa: F401

from . import compiler, driver, memory
from .array import compute, ndarray
from .device import DEVICE, NOT_READY, CUDARuntimeError, OutOfMemoryError, Work

__version__ = "14.0.0"


def _from_host(array: Any, order: str | None = None) -> ndarray:
    array = np.asarray(array)
    if order is None:
        order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    made = ndarray(array.shape, array.dtype, order=order)
    made[...] = array
    return made


def asarray(x: Any, dtype: Any = None, order: str | None = None) -> ndarray:
    """Convert to an array on the device; an array on the device is returned unchanged if it has the dtype and the order."""
    if isinstance(x, ndarray):
        own = x if dtype is None or x.dtype == np.dtype(dtype) else x.astype(dtype)
        return {None: lambda a: a, "K": lambda a: a, "F": asfortranarray, "C": ascontiguousarray}[order](own)
    if hasattr(x, "__cuda_array_interface__"):
        return x.exported()
    return _from_host(np.asarray(x, dtype), order)


def array(x: Any, dtype: Any = None, order: str | None = None) -> ndarray:
    return x.copy(order or "K") if isinstance(x, ndarray) else asarray(x, dtype, order)


def from_dlpack(x: Any) -> ndarray:
    """Share the memory of an array that the test exports: it has ``exported()``, the array on the device."""
    if x.__dlpack_device__()[0] != 2:
        raise TypeError("CPU arrays cannot be directly imported to CuPy")
    x.__dlpack__(stream=_get_current_stream().ptr or 1)
    shared = x.exported()
    return shared._same_memory(shared.view_)


def asnumpy(x: Any, order: str = "C") -> Any:
    return x.get(order=order) if isinstance(x, ndarray) else np.asarray(x, order=order)


def empty(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return ndarray(shape, dtype, order=order)


def full(shape: Any, value: Any, dtype: Any = None, order: str = "C") -> ndarray:
    made = ndarray(shape, np.asarray(value).dtype if dtype is None else dtype, order=order)
    made.fill(value)
    return made


def zeros(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return full(shape, 0, dtype, order)


def ones(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return full(shape, 1, dtype, order)


def empty_like(x: ndarray, dtype: Any = None, order: str = "K", subok: None = None, shape: Any = None) -> ndarray:
    """A new array with the same shape, or another one, and the same memory order. As CuPy, it takes ``()`` for no shape."""
    if subok is not None:
        raise TypeError("subok is not supported yet")
    fortran = order == "F" or (order == "K" and x.flags.f_contiguous and not x.flags.c_contiguous)
    return ndarray(shape if shape else x.shape, x.dtype if dtype is None else dtype, order="F" if fortran else "C")


def zeros_like(x: ndarray, dtype: Any = None) -> ndarray:
    made = empty_like(x, dtype)
    made.fill(0)
    return made


def full_like(x: ndarray, value: Any, dtype: Any = None) -> ndarray:
    made = empty_like(x, dtype)
    made.fill(value)
    return made


def arange(*given: Any, dtype: Any = None) -> ndarray:
    return _from_host(np.arange(*given, dtype=dtype))


def asfortranarray(x: ndarray) -> ndarray:
    return x if x.flags.f_contiguous else x.copy("F")


def ascontiguousarray(x: ndarray) -> ndarray:
    return x if x.flags.c_contiguous else x.copy("C")


def broadcast_to(x: ndarray, shape: tuple[int, ...]) -> ndarray:
    """A broadcast view, with strides of 0."""
    return x._same_memory(np.lib.stride_tricks.as_strided(x.view_, shape, np.broadcast_to(x.view_, shape).strides))


def concatenate(arrays: list[ndarray], axis: int = 0, *, dtype: Any = None) -> ndarray:
    return compute(lambda *given: np.concatenate(given, axis=axis, dtype=dtype), *arrays)


def stack(arrays: list[ndarray], axis: int = 0) -> ndarray:
    return compute(lambda *given: np.stack(given, axis=axis), *arrays)


def bincount(x: ndarray, weights: ndarray, minlength: int) -> ndarray:
    return compute(lambda *given: np.bincount(*given, minlength=minlength), x, weights)


def take(x: ndarray, indices: ndarray, axis: int | None = None) -> ndarray:
    return compute(lambda *given: np.take(*given, axis=axis, mode="clip"), x, indices)


def _ufunc(function: Any) -> Any:
    def call(*given: Any, out: ndarray | None = None, dtype: Any = None) -> ndarray:
        if any(isinstance(x, np.ndarray) for x in given):
            raise TypeError(f"Unsupported type {np.ndarray}")
        if out is not None and out.shape != np.broadcast_shapes(
            *(np.shape(x) if not isinstance(x, ndarray) else x.shape for x in given)
        ):
            raise ValueError("Out shape is mismatched")
        return compute(function if dtype is None else lambda *x: function(*x, dtype=dtype, casting="unsafe"), *given, out=out)

    return call


#: The functions with the names of numpy's that CuPy has as ufuncs.
UFUNCS = [
    "absolute", "add", "ceil", "cos", "divide", "equal", "exp", "floor", "floor_divide", "fmod", "greater", "greater_equal", "invert", "isfinite",
    "isinf", "isnan", "less", "less_equal", "log", "logaddexp", "logical_and", "logical_not", "logical_or", "maximum", "minimum", "multiply",
    "negative", "not_equal", "power", "reciprocal", "remainder", "sin", "sqrt", "square", "subtract", "tan", "tanh", "true_divide",
]  # fmt: skip
globals().update({name: _ufunc(getattr(np, name)) for name in UFUNCS})
abs = _ufunc(np.absolute)


def _of_arrays(function: Any) -> Any:
    return lambda *given, **named: compute(lambda *arrays: function(*arrays, **named), *given)


packbits, searchsorted, isneginf, diff, pad, repeat = map(
    _of_arrays, (np.packbits, np.searchsorted, np.isneginf, np.diff, np.pad, np.repeat)
)


def where(condition: ndarray, x: Any, y: Any) -> ndarray:
    """Choose elements; the condition is an array."""
    return compute(np.where, condition.astype(bool, copy=False), x, y)


def matmul(a: ndarray, b: ndarray) -> ndarray:
    return a @ b


linalg = SimpleNamespace(norm=_ufunc(np.linalg.norm))
random = SimpleNamespace(standard_normal=lambda shape, dtype=float: asarray(np.random.standard_normal(shape).astype(dtype)))


class Device:
    """The only device; a test may change its compute capability."""

    compute_capability = "90"

    def __init__(self, device: int = 0) -> None:
        self.id = device

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device)

    __hash__ = None

    def use(self) -> None:
        """Make it current, which it is."""

    def synchronize(self) -> None:
        DEVICE.wait_for_all()


class Graph:
    """An instantiated CUDA graph."""

    def __init__(self, graph: int) -> None:
        self.graph, self.graphExec = graph, DEVICE.instantiate(graph)

    def launch(self, stream: Any = None) -> None:
        DEVICE.launch(self.graphExec, memory.current_stream() if stream is None else stream.ptr)

    def __del__(self) -> None:
        DEVICE.executables.pop(self.graphExec, None)
        DEVICE.graphs.pop(self.graph, None)


class Stream:
    """A stream; by default a blocking one, as in CuPy."""

    null: Stream

    def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
        self._own = not null
        self.ptr = DEVICE.create_stream(non_blocking) if self._own else 0

    def __del__(self) -> None:
        if self._own and DEVICE is not None:  # None at interpreter exit
            DEVICE.destroy_stream(self.ptr)

    def __enter__(self) -> Stream:
        memory.streams_of_thread().append(self)
        return self

    def __exit__(self, *_: object) -> None:
        memory.streams_of_thread().pop()

    @classmethod
    def from_external(cls, stream: Any) -> Stream:
        """A stream that another library owns."""
        made = object.__new__(cls)
        made._own, made.ptr = False, stream.__cuda_stream__()[1]
        return made

    def use(self) -> Stream:
        memory.streams_of_thread()[:] = [self]
        return self

    @property
    def done(self) -> bool:
        return not DEVICE.busy(self.ptr)

    def synchronize(self) -> None:
        DEVICE.wait(self.ptr)

    def begin_capture(self, mode: int | None = None) -> None:
        DEVICE.begin_capture(self.ptr)

    def end_capture(self) -> Graph:
        return Graph(DEVICE.end_capture(self.ptr))

    def is_capturing(self) -> bool:
        return self.ptr in DEVICE.captures

    def record(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Let later work of this stream wait for an event; the stream becomes part of the event's capture."""
        if event.captured:
            DEVICE.join_capture(self.ptr, event.stream, event.submitted)
        else:
            DEVICE.submit(self.ptr, Work(event.complete, us=0.0))


Stream.null = Stream(null=True)


class Event:
    """An event with the time of a stream's clock."""

    def __init__(self, disable_timing: bool = False) -> None:
        self.time, self.stream, self.done, self._timing = math.nan, 0, True, not disable_timing
        self.captured, self.submitted = False, 0

    def record(self, stream: Stream | None = None) -> None:
        self.stream = memory.current_stream() if stream is None else stream.ptr
        self.captured = self.stream in DEVICE.captures
        self.done = self.captured

        def run() -> None:
            self.time, self.done = DEVICE.clock[self.stream], True

        if self._timing or not self.captured:
            DEVICE.submit(self.stream, Work(run, us=0.0))
        self.submitted = DEVICE.submitted.get(self.stream, 0)

    def complete(self) -> None:
        """Run the work before the event."""
        with DEVICE.lock:
            while not self.done:
                DEVICE.run_next(self.stream)

    def synchronize(self) -> None:
        if not self.done or self.captured:
            DEVICE.wait(self.stream)


def _get_current_stream() -> Any:
    streams = memory.streams_of_thread()
    return streams[-1] if streams else Stream.null


# The CUDA runtime


def _get_device() -> int:
    driver.make_current()
    return 0


def _properties(device: int) -> dict[str, Any]:
    return {"name": b"NVIDIA H200", "multiProcessorCount": 132, "major": 9, "minor": 0, "totalGlobalMem": 141 << 30}


def _query(stream: int) -> int:
    return NOT_READY if DEVICE.busy(stream) else 0


runtime = SimpleNamespace(
    is_hip=False,
    CUDARuntimeError=CUDARuntimeError, getDevice=_get_device, getDeviceCount=lambda: 1, setDevice=lambda device: None,
    free=lambda pointer: driver.make_current(), memGetInfo=lambda: (64 << 30, 141 << 30), getDeviceProperties=_properties,
    memcpyDeviceToDevice=3, memsetAsync=lambda to, value, size, stream: DEVICE.fill(stream, to, value, 1, size),
    memcpyAsync=lambda to, of, size, kind, stream: DEVICE.copy(stream, to, of, size),
    memcpy2DAsync=lambda to, pitch, of, from_pitch, width, height, kind, stream: DEVICE.copy(
        stream, to, of, width, height, pitch, from_pitch
    ),
    streamCaptureModeGlobal=0, streamCaptureModeThreadLocal=1, streamCaptureModeRelaxed=2,
    streamIsCapturing=lambda stream: stream in DEVICE.captures, streamQuery=_query, streamSynchronize=DEVICE.wait,
    streamBeginCapture=lambda stream, mode: DEVICE.begin_capture(stream), streamEndCapture=DEVICE.end_capture,
    deviceSynchronize=DEVICE.wait_for_all, graphInstantiate=DEVICE.instantiate, graphLaunch=DEVICE.launch,
    graphDestroy=DEVICE.graphs.pop, graphExecDestroy=DEVICE.executables.pop, runtimeGetVersion=lambda: 12090,
    driverGetVersion=lambda: 13000, deviceGetPCIBusId=lambda device: "0000:00:00.0",
)  # fmt: skip


def _launch_kernel(function: int, *dimensions_and_more: int) -> None:
    """``cuLaunchKernel`` of the kernel of a graph node; raises an error if it fails."""
    *dimensions, stream, parameters, extra = dimensions_and_more
    assert len(dimensions) == 7
    (status,) = driver.cuLaunchKernelEx(SimpleNamespace(hStream=stream), function, parameters, extra)
    if status:
        raise CUDARuntimeError(int(status), status.name)


cuda = SimpleNamespace(
    runtime=runtime, driver=SimpleNamespace(launchKernel=_launch_kernel), Device=Device, Stream=Stream, Event=Event, Graph=Graph, MemoryPool=memory.MemoryPool,
    MemoryPointer=memory.MemoryPointer, UnownedMemory=memory.UnownedMemory, memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError), alloc=memory.alloc,
    malloc_async=memory.malloc_async, set_allocator=memory.set_allocator, using_allocator=memory.using_allocator, get_allocator=memory.get_allocator,
    get_current_stream=_get_current_stream, is_available=lambda: True, alloc_pinned_memory=bytearray,
    get_elapsed_time=lambda begin, end: (end.time - begin.time) / 1e3,
)  # fmt: skip


def get_default_memory_pool() -> memory.MemoryPool:
    return memory.POOL


# Kernels


class RawKernel:
    """A CUDA C++ kernel. Arguments are arrays (passed as addresses), numpy scalars and Python numbers."""

    def __init__(self, code: str, name: str, options: tuple[str, ...] = (), **_: Any) -> None:
        self._launch = compiler.Launch(code, name)

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], **_: Any) -> None:
        held = [np.int64(x.data.ptr) if isinstance(x, ndarray) else np.asarray(x).copy() for x in args]
        for x in args:
            if isinstance(x, memory.MemoryPointer):
                raise TypeError("give an address as .ptr")
        launch = self._launch
        DEVICE.submit(memory.current_stream(), Work(lambda: launch(grid, block, held)))


class ElementwiseKernel:
    """An element-wise kernel with named dtypes; outputs are allocated unless they are passed."""

    def __init__(self, in_params: str, out_params: str, operation: str, name: str = "kernel", **_: Any) -> None:
        self._inputs, self._outputs = ([compiler.Parameter(t) for t in text.split(",")] for text in (in_params, out_params))
        self._loop = compiler.elementwise(in_params, out_params, operation)

    def __call__(self, *args: Any, **_: Any) -> Any:
        every = [*self._inputs, *self._outputs]
        shapes = [getattr(x, "shape", ()) for x, p in zip(args, every, strict=False) if not p.raw]
        shape = np.broadcast_shapes(*shapes)
        made = [ndarray(shape, p.dtype) for p in every[len(args) :]]
        held: list[Any] = []
        for x, p in zip((*args, *made), every, strict=True):
            if isinstance(x, ndarray):
                if x.dtype != p.dtype:
                    raise TypeError(f"{p.name} is {x.dtype}, the kernel takes {p.dtype}")
                if p.raw and not x.flags.c_contiguous:
                    raise NotImplementedError("raw arrays that are not contiguous")
                if p in self._outputs and x.shape != shape:
                    raise ValueError(f"Out shape is mismatched: {x.shape}, {shape}")
            held.append(x.view_ if isinstance(x, ndarray) else np.array(x, p.dtype))
        axes = len(shape)
        strides = [(0,) * axes if p.raw else np.broadcast_to(x, shape).strides for x, p in zip(held, every, strict=True)]
        sizes = (ctypes.c_longlong * max(axes, 1))(*shape)
        steps = (ctypes.c_longlong * max(axes * len(held), 1))(*(step for row in strides for step in row))
        pointers = (ctypes.c_void_p * len(held))(*(x.ctypes.data for x in held))
        count = ctypes.c_longlong(math.prod(shape))

        def run(keep: Any = held) -> None:
            self._loop(count, axes, sizes, steps, pointers)

        DEVICE.submit(memory.current_stream(), Work(run))
        results = [*args, *made][len(self._inputs) :]
        return results[0] if len(results) == 1 else tuple(results)
