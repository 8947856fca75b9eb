"""What a call enqueues, recorded: a CUDA graph, which costs the host least, and its kernels, for many graphs cost the device.

A graph costs the host 2 us whatever is in it, and a kernel or a fill 2 to 3 each. But many different graphs in turn cost the
device: of 64, each with a kernel of 8 us, an endless row takes 32 us a launch, and kernel by kernel 8 (H200, driver 580,
``benchmarks/graphs.py``). A few take no more than their kernels. So one of many is launched as a graph only if the device
waits for the host, which takes less than 1 us to find out.

A node of a graph keeps a copy of its kernel's arguments, and this is where they are launched from.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from . import cupy_runtime

#: Bytes of the device's memory, outside CuPy's pool, that a CUDA graph takes (400 recordings of a call: 48 MiB, on an H100).
GRAPH_BYTES = 128 << 10

#: A function of the driver that enqueues a node's work, and its arguments.
Step = tuple[Callable[..., Any], tuple[Any, ...]]


class Recording:
    """What ``run`` enqueues on the current stream, to be launched again on that stream; nothing runs.

    What it allocates, and ``own``, belongs to the recording alone: no other recording, on whatever stream, uses that memory. It
    is memory of the current stream, on which alone it is launched, so after :meth:`close` it can go back to CuPy's pool, which
    reuses memory in the order of its stream.

    Args:
        run: enqueues it.
        own: arrays that it reads or writes, which are nobody else's: kept until :meth:`close`.

    Attributes:
        size: bytes of the device's memory that it takes, with the arrays that it keeps.
    """

    __slots__ = ("_executable", "_graph", "_kept", "_launch", "_steps", "_stream", "size")

    def __init__(self, run: Callable[[], None], own: Sequence[Any] = ()) -> None:
        runtime = cupy_runtime.cupy().cuda.runtime
        self._stream, self._launch = cupy_runtime.stream(), runtime.graphLaunch
        self._graph, held = cupy_runtime.captured(run)
        self._kept = [*own, *held]
        self.size = GRAPH_BYTES + sum(array.nbytes for array in self._kept)
        try:
            self._steps: Sequence[Step] = steps(self._graph, self._stream)
            self._executable = runtime.graphInstantiate(self._graph)
        except BaseException:
            runtime.graphDestroy(self._graph)
            raise

    def launch(self, *, of_many: bool) -> None:
        """Enqueue it all once more.

        Args:
            of_many: whether it is one of many that are launched in turn.
        """
        if of_many and is_busy(self._stream):
            self.launch_one_by_one()
        else:
            self._launch(self._executable, self._stream)

    def launch_one_by_one(self) -> None:
        """Enqueue its kernels, as they come without a graph; as a graph where they are not one row."""
        for function, arguments in self._steps:
            cupy_runtime.check(function(*arguments))
        if not self._steps:
            self._launch(self._executable, self._stream)

    def close(self) -> None:
        """Destroy it; what is running runs to its end."""
        runtime = cupy_runtime.cupy().cuda.runtime
        self._steps = ()
        with contextlib.ExitStack() as stack:  # all of it, whichever fails
            stack.callback(self._kept.clear)
            stack.callback(runtime.graphDestroy, self._graph)
            stack.callback(runtime.graphExecDestroy, self._executable)


class _Asking:
    """What it takes to ask whether a stream has work: found once, for it is asked in the hot path."""

    def __init__(self) -> None:
        cuda = cupy_runtime.driver()
        self.query, self.exchange = cupy_runtime.cupy().cuda.runtime.streamQuery, cuda.cuThreadExchangeStreamCaptureMode
        self.relaxed = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED


_asking = functools.cache(_Asking)


def is_busy(stream: int) -> bool:
    """Whether a stream has work that is not done. To ask does no harm to what other threads capture, in any mode."""
    asking = _asking()
    _, before = asking.exchange(asking.relaxed)
    try:
        return bool(asking.query(stream))  # cudaSuccess is 0
    finally:
        asking.exchange(before)


def steps(graph: int, stream: int) -> list[Step]:
    """A graph's nodes as calls of the driver, in their order; none where they are anything but a row of kernels and fills."""
    cuda = cupy_runtime.driver()
    nodes = _asked(cuda.cuGraphGetNodes, graph)[0]
    count = len(nodes)
    edges = _asked(cuda.cuGraphGetEdges, graph)
    row = [(int(a), int(b)) for a, b in itertools.pairwise(nodes)]
    if [(int(a), int(b)) for a, b in zip(*edges[:2], strict=True)] != row:
        return []
    found = [step for node in nodes for step in _step(node, stream)]
    return found if len(found) == count else []


def _asked(function: Any, graph: int) -> list[Any]:
    """The lists that a function of the driver gives, which is to be told their length; empty ones where it cannot give them."""
    status, *_, count = function(graph)
    if status or not count:
        return [[], []]
    status, *lists, _ = function(graph, count)
    return [[], []] if status else lists


def _step(node: Any, stream: int) -> Iterator[Step]:
    """A kernel or a fill; nothing for another kind of node."""
    cuda = cupy_runtime.driver()
    kinds = cuda.CUgraphNodeType
    kind = cupy_runtime.unwrap(cuda.cuGraphNodeGetType(node))
    if kind == kinds.CU_GRAPH_NODE_TYPE_KERNEL:
        yield _kernel(node, cupy_runtime.unwrap(cuda.cuGraphKernelNodeGetParams(node)), stream)
    elif kind == kinds.CU_GRAPH_NODE_TYPE_MEMSET:
        fill = cupy_runtime.unwrap(cuda.cuGraphMemsetNodeGetParams(node))
        if fill.height == 1:
            functions = {1: cuda.cuMemsetD8Async, 2: cuda.cuMemsetD16Async, 4: cuda.cuMemsetD32Async}
            where = cuda.CUdeviceptr(int(fill.dst))  # fill's own is a view of fill
            yield functions[fill.elementSize], (where, fill.value, fill.width, cuda.CUstream(stream))


def _kernel(node: Any, kernel: Any, stream: int) -> Step:
    cuda = cupy_runtime.driver()
    config = cuda.CUlaunchConfig()
    for name in ("gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ", "sharedMemBytes"):
        setattr(config, name, getattr(kernel, name))
    config.hStream = cuda.CUstream(stream)
    config.attrs = attributes = list(_attributes(node))
    config.numAttrs = len(attributes)
    function = cuda.CUfunction(int(kernel.func) or int(kernel.kern))  # the driver takes either
    return cuda.cuLaunchKernelEx, (config, function, int(kernel.kernelParams), 0)


def _attributes(node: Any) -> Iterator[Any]:
    """What of a kernel's launch its results depend on: clusters, and whether all its blocks run at once."""
    cuda = cupy_runtime.driver()
    cluster, together = (
        cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
        cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE,
    )
    for name in (cluster, together):
        value = cupy_runtime.unwrap(cuda.cuGraphKernelNodeGetAttribute(node, name))
        if value.clusterDim.x if name == cluster else value.cooperative:
            attribute = cuda.CUlaunchAttribute()
            attribute.id, attribute.value = name, value
            yield attribute
