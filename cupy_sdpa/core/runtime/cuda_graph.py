"""Captured CUDA graphs, launched whole or kernel by kernel.

A launch of one graph takes 2.6 us of host time; each kernel launch or memset takes 3 to 5 us. But alternating between many CUDA
graphs is slow: in a continuous sequence of launches of 64 graphs in turn, each with a kernel of 8 us, a launch takes 39 us, and
8 us kernel by kernel (H200, benchmarks/results/h200_cudnn919_graphs.csv). One of many graphs is therefore launched whole only
if its stream is idle; this check takes 1 us. An executable graph also takes 0.12 MiB of device memory: if there are many,
further graphs are not made executable, and are launched kernel by kernel.

A kernel node owns a copy of its kernel's arguments; the kernel can be launched with this copy.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from . import cupy_runtime, driver

#: Bytes of device memory outside CuPy's pool that an executable graph takes (400 captured calls: 48 MiB on an H100).
GRAPH_BYTES = 128 << 10
#: Bytes that a graph counts towards the limit if it is not executable, although it takes host memory only.
HOST_BYTES = 8 << 10

#: A function that enqueues work, such as a node's, or raises an error, and its arguments.
DriverCall = tuple[Callable[..., Any], tuple[Any, ...]]
#: Takes a step of the host in a capture: the function and its arguments.
OnHost = Callable[[Any, tuple[Any, ...]], None]


class Recording:
    """A captured CUDA graph of the work that ``run`` enqueues on the current stream, to be launched again on this stream.

    Nothing runs during the capture. ``run`` is called with a function that takes the steps of the host: where it is called, one
    graph ends and another one begins, and every launch runs the step between them.

    The arrays in ``own`` belong to this recording alone: no other one, on any stream, uses them. They are memory of the current
    stream, and the graphs are launched on that stream only. :meth:`close` can therefore return them to CuPy's pool, which
    reuses memory in stream order. ``memory`` is what ``run`` allocates: part of ``own``, or memory that the caller has
    allocated whenever the graphs are launched. What does not fit into it becomes part of ``own``.

    A graph of at least ``least_nodes`` kernels and memsets is made executable, so that it can be launched whole. Other
    sequences of kernels and memsets are launched one by one.

    Attributes:
        size: bytes of device memory, including the arrays that are kept alive.
        has_host_steps: whether there are steps of the host. A launch that failed cannot be repeated then.
        used: whether it was launched; the caller sets it, and resets it to find graphs that are not used.
    """

    __slots__ = ("_arrays", "_executables", "_graphs", "_singly", "_stream", "_whole", "has_host_steps", "size", "used")

    def __init__(
        self,
        run: Callable[[OnHost], None],
        own: Sequence[Any] = (),
        *,
        memory: cupy_runtime.Memory | None = None,
        least_nodes: int = 0,
    ) -> None:
        self._stream, self.used = cupy_runtime.stream(), False
        parts, allocated = capture(run, memory)
        self._arrays = [*own, *allocated]
        self._graphs = [part for part in parts if isinstance(part, int)]
        self._executables: list[int] = []
        self.has_host_steps = len(self._graphs) < len(parts)
        #: What a launch calls: with whole graphs, where they are executable, and kernel by kernel.
        self._whole: list[DriverCall] = []
        self._singly: list[DriverCall] = []
        try:
            for part in parts:
                if not isinstance(part, int):
                    self._whole.append(part)
                    self._singly.append(part)
                elif has_nodes(part) or not self.has_host_steps:
                    self._add(part, least_nodes)
                else:
                    self._graphs.remove(part)
                    cupy_runtime.cupy().cuda.runtime.graphDestroy(part)
        except BaseException:
            self.close()
            raise
        executable = len(self._executables)
        self.size = GRAPH_BYTES * executable + HOST_BYTES * (len(self._graphs) - executable)
        self.size += sum(array.nbytes for array in self._arrays)

    def _add(self, graph: int, least_nodes: int) -> None:
        """Add the launch of a graph."""
        runtime = cupy_runtime.cupy().cuda.runtime
        singly = driver_calls(graph, self._stream)
        whole = singly
        if not singly or len(singly) >= least_nodes:
            self._executables.append(runtime.graphInstantiate(graph))
            whole = [(runtime.graphLaunch, (self._executables[-1], self._stream))]
        self._whole += whole
        self._singly += singly or whole  # others than sequences are launched whole in any case

    def launch(self, *, of_many: bool) -> None:
        """Enqueue the work again; ``of_many``: the graph is one of many that are launched in turn."""
        for function, arguments in self._singly if of_many and self._executables and is_busy(self._stream) else self._whole:
            function(*arguments)

    def close(self) -> None:
        """Destroy the graphs; work that is already enqueued still completes."""
        runtime = cupy_runtime.cupy().cuda.runtime
        self._whole, self._singly = [], []
        with contextlib.ExitStack() as stack:  # runs every callback, even if one fails
            stack.callback(self._arrays.clear)
            for graph in self._graphs:
                stack.callback(runtime.graphDestroy, graph)
            for executable in self._executables:
                stack.callback(runtime.graphExecDestroy, executable)


def capture(
    run: Callable[[OnHost], None], memory: cupy_runtime.Memory | None = None
) -> tuple[list[int | DriverCall], list[Any]]:
    """Capture the work that ``run`` enqueues, and that allocates in ``memory``, into CUDA graphs; nothing runs.

    Returns the graphs, which the caller destroys, with the steps of the host between them; and arrays that did not fit into the
    memory, and what CuPy's functions allocate: the caller keeps them alive as long as the graphs are launched. They are memory
    of the stream that is current outside the capture. After an error the capture is ended, and the current stream is restored.
    """
    cuda = cupy_runtime.cupy().cuda
    parts: list[int | DriverCall] = []
    with cupy_runtime.arena(memory, cuda.get_current_stream()) as arena, cuda.Stream(non_blocking=True) as stream:

        def begin() -> None:
            cuda.runtime.streamBeginCapture(stream.ptr, cuda.runtime.streamCaptureModeRelaxed)  # independent of other threads

        def end() -> None:
            parts.append(int(cuda.runtime.streamEndCapture(stream.ptr)))

        def on_host(function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
            end()
            parts.append((function, arguments))
            begin()

        try:
            begin()
            with cuda.using_allocator(arena.keep):
                run(on_host)
        except BaseException:
            with contextlib.suppress(Exception):  # also raised if the capture is invalid; the capture has ended in any case
                end()
            for part in parts:
                if isinstance(part, int):
                    cuda.runtime.graphDestroy(part)
            raise
        end()
        return parts, arena.others


@functools.cache  # saves 0.6 us of attribute look-ups in each repeated call
def _busy_functions() -> tuple[Callable[..., Any], Callable[..., Any], Any]:
    """Return the functions and the constant that :func:`is_busy` needs."""
    cuda = driver.bindings()
    relaxed = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    return cupy_runtime.cupy().cuda.runtime.streamQuery, cuda.cuThreadExchangeStreamCaptureMode, relaxed


def is_busy(stream: int) -> bool:
    """True if a stream has unfinished work. Safe while another thread captures, in any capture mode."""
    query, exchange_mode, relaxed = _busy_functions()
    _, mode = exchange_mode(relaxed)
    try:
        return bool(query(stream))  # cudaSuccess is 0
    finally:
        exchange_mode(mode)


def has_nodes(graph: int) -> bool:
    """True if there is work in a graph."""
    status, *_, count = driver.bindings().cuGraphGetNodes(graph)
    return bool(status or count)


def driver_calls(graph: int, stream: int) -> list[DriverCall]:
    """Return a graph's nodes as driver calls, in order; an empty list unless the graph is a sequence of kernels and memsets."""
    cuda = driver.bindings()
    nodes = _lists_of(cuda.cuGraphGetNodes, graph)[0]
    count = len(nodes)
    begins, ends, *_ = _lists_of(cuda.cuGraphGetEdges, graph)
    sequence = [(int(a), int(b)) for a, b in itertools.pairwise(nodes)]
    if [(int(a), int(b)) for a, b in zip(begins, ends, strict=True)] != sequence:
        return []
    calls = [call for node in nodes for call in _driver_call(node, stream)]
    return calls if len(calls) == count else []


def _lists_of(function: Any, graph: int) -> list[Any]:
    """Return the lists that a driver function returns for a graph; empty lists if it fails. A first call reads their length."""
    status, *_, count = function(graph)
    if status or not count:
        return [[], []]
    status, *lists, _ = function(graph, count)
    return [[], []] if status else lists


def _driver_call(node: Any, stream: int) -> Iterator[DriverCall]:
    """Yield the driver call of a kernel node or of a memset node of one row; nothing for other nodes.

    CuPy's functions take integers, in half the time of ``cuda.bindings``' functions, which are used where CuPy has none.
    """
    cuda = driver.bindings()
    kinds = cuda.CUgraphNodeType
    kind = driver.unwrap(cuda.cuGraphNodeGetType(node))
    if kind == kinds.CU_GRAPH_NODE_TYPE_KERNEL:
        yield _kernel_launch(node, driver.unwrap(cuda.cuGraphKernelNodeGetParams(node)), stream)
    elif kind == kinds.CU_GRAPH_NODE_TYPE_MEMSET:
        params = driver.unwrap(cuda.cuGraphMemsetNodeGetParams(node))
        if params.height == 1:
            address, value, size = int(params.dst), params.value, params.elementSize
            if len(set(value.to_bytes(4, "little")[:size])) == 1:  # all bytes are equal
                yield cupy_runtime.cupy().cuda.runtime.memsetAsync, (address, value & 255, params.width * size, stream)
            else:
                function = {2: cuda.cuMemsetD16Async, 4: cuda.cuMemsetD32Async}[size]
                yield _checked, (function, cuda.CUdeviceptr(address), value, params.width, cuda.CUstream(stream))


def _checked(function: Callable[..., Any], *arguments: Any) -> None:
    """Call a function of ``cuda.bindings``; raise RuntimeError if it fails."""
    driver.check(function(*arguments))


#: The dimensions of a kernel launch, in the order in which ``cuLaunchKernel`` takes them.
_DIMENSIONS = ("gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ", "sharedMemBytes")


def _kernel_launch(node: Any, params: Any, stream: int) -> DriverCall:
    cuda = driver.bindings()
    function = int(params.func) or int(params.kern)  # the driver accepts either
    attributes = list(_launch_attributes(node))
    if not attributes:
        dimensions = [getattr(params, name) for name in _DIMENSIONS]
        return cupy_runtime.cupy().cuda.driver.launchKernel, (function, *dimensions, stream, int(params.kernelParams), 0)
    config = cuda.CUlaunchConfig()
    for name in _DIMENSIONS:
        setattr(config, name, getattr(params, name))
    config.hStream = cuda.CUstream(stream)
    config.attrs, config.numAttrs = attributes, len(attributes)
    return _checked, (cuda.cuLaunchKernelEx, config, cuda.CUfunction(function), int(params.kernelParams), 0)


def _launch_attributes(node: Any) -> Iterator[Any]:
    """Yield the launch attributes on which a kernel's results depend: cluster dimensions and cooperative launch.

    A launch without the attribute has clusters of one block.
    """
    cuda = driver.bindings()
    cluster, cooperative = (
        cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
        cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE,
    )
    for name in (cluster, cooperative):
        value = driver.unwrap(cuda.cuGraphKernelNodeGetAttribute(node, name))
        if _blocks(value.clusterDim) > 1 if name == cluster else value.cooperative:
            attribute = cuda.CUlaunchAttribute()
            attribute.id, attribute.value = name, value
            yield attribute


def _blocks(dimensions: Any) -> int:
    """Return the number of blocks in a cluster; 0 if the attribute is not set."""
    return int(dimensions.x * dimensions.y * dimensions.z)
