"""The CUDA driver's bindings, ``cuda.bindings.driver``, as far as the package uses them. Functions return a status first."""

from __future__ import annotations

import enum
import itertools
import threading
from types import SimpleNamespace
from typing import Any

from .device import DEVICE, Work

CUdeviceptr = CUstream = CUfunction = int
CUlaunchConfig = CUlaunchAttribute = SimpleNamespace


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_INVALID_HANDLE = 400


class CUgraphNodeType(enum.IntEnum):
    CU_GRAPH_NODE_TYPE_KERNEL = 0
    CU_GRAPH_NODE_TYPE_MEMCPY = 1
    CU_GRAPH_NODE_TYPE_MEMSET = 2
    CU_GRAPH_NODE_TYPE_GRAPH = 4
    CU_GRAPH_NODE_TYPE_MEM_ALLOC = 10
    CU_GRAPH_NODE_TYPE_MEM_FREE = 11


class CUlaunchAttributeID(enum.IntEnum):
    CU_LAUNCH_ATTRIBUTE_COOPERATIVE = 2
    CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION = 4


class CUstreamCaptureMode(enum.IntEnum):
    CU_STREAM_CAPTURE_MODE_GLOBAL = 0
    CU_STREAM_CAPTURE_MODE_RELAXED = 2


_KINDS = {
    "kernel": CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL, "memcpy": CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMCPY,
    "memset": CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET, "graph": CUgraphNodeType.CU_GRAPH_NODE_TYPE_GRAPH,
    "alloc": CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEM_ALLOC, "free": CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEM_FREE,
}  # fmt: skip

_contexts = itertools.count(1 << 40)
_context = next(_contexts)
_thread = threading.local()


def new_context() -> None:
    """Replace the current context by a new one, so that no session of an earlier one is used."""
    global _context
    _context = next(_contexts)


def make_current() -> None:
    """Make the context current in this thread, as the runtime does on first use."""
    _thread.context = _context


def cuCtxGetId(context: int) -> tuple[CUresult, int]:
    """The id of the current context; an error in a thread without one."""
    if getattr(_thread, "context", None) != _context:
        return CUresult.CUDA_ERROR_INVALID_CONTEXT, 0
    return CUresult.CUDA_SUCCESS, _context


def cuThreadExchangeStreamCaptureMode(mode: CUstreamCaptureMode) -> tuple[CUresult, CUstreamCaptureMode]:
    before = getattr(_thread, "mode", CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)
    _thread.mode = mode
    return CUresult.CUDA_SUCCESS, before


def _memset(address: int, value: int, itemsize: int, width: int, height: int, pitch: int, stream: int) -> tuple[CUresult]:
    DEVICE.fill(int(stream), int(address), value, itemsize, width, height, pitch)
    return (CUresult.CUDA_SUCCESS,)


def cuMemsetD8Async(address: int, value: int, count: int, stream: int) -> tuple[CUresult]:
    return _memset(address, value, 1, count, 1, 0, stream)


def cuMemsetD16Async(address: int, value: int, count: int, stream: int) -> tuple[CUresult]:
    return _memset(address, value, 2, count, 1, 0, stream)


def cuMemsetD32Async(address: int, value: int, count: int, stream: int) -> tuple[CUresult]:
    return _memset(address, value, 4, count, 1, 0, stream)


def cuMemsetD2D8Async(address: int, pitch: int, value: int, width: int, height: int, stream: int) -> tuple[CUresult]:
    return _memset(address, value, 1, width, height, pitch, stream)


def _works(graph: int) -> list[Work]:
    return DEVICE.graphs[graph]


class _Node(int):
    """A graph node: the graph, and the index in it."""

    graph: int

    @property
    def work(self) -> Work:
        """The work of the node; an error after the graph is destroyed."""
        return _works(self.graph)[self]


def _node(graph: int, place: int) -> _Node:
    node = _Node(place)
    node.graph = graph
    return node


def cuGraphGetNodes(graph: int, count: int = 0) -> tuple[CUresult, list[_Node], int]:
    """The nodes of a graph, one per unit of work."""
    works = _works(graph)
    return CUresult.CUDA_SUCCESS, [_node(graph, place) for place in range(len(works))][:count], len(works)


def cuGraphGetEdges(graph: int, count: int = 0) -> tuple[CUresult, list[_Node], list[_Node], list[None], int]:
    """The edges of a graph: the work of one stream is a chain."""
    number = max(0, len(_works(graph)) - 1)
    begins, ends = ([_node(graph, place + shift) for place in range(number)][:count] for shift in (0, 1))
    return CUresult.CUDA_SUCCESS, begins, ends, [None] * len(begins), number


def cuGraphNodeGetType(node: _Node) -> tuple[CUresult, CUgraphNodeType]:
    return CUresult.CUDA_SUCCESS, _KINDS[node.work.kind]


def cuGraphKernelNodeGetParams(node: _Node) -> tuple[CUresult, SimpleNamespace]:
    """The launch parameters of a kernel node; its function and parameters both refer to the work."""
    names = ("gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ")
    number = _register(node)
    return CUresult.CUDA_SUCCESS, SimpleNamespace(
        **dict.fromkeys(names, 1), sharedMemBytes=0, func=number, kern=0, kernelParams=number
    )


def cuGraphMemsetNodeGetParams(node: _Node) -> tuple[CUresult, SimpleNamespace]:
    assert node.work.memset
    address, value, itemsize, width, height = node.work.memset
    return CUresult.CUDA_SUCCESS, SimpleNamespace(dst=address, value=value, width=width, height=height, elementSize=itemsize)


def cuGraphKernelNodeGetAttribute(node: _Node, name: Any) -> tuple[CUresult, SimpleNamespace]:
    """An attribute of a kernel node: no kernel is cooperative or has clusters."""
    return CUresult.CUDA_SUCCESS, SimpleNamespace(clusterDim=SimpleNamespace(x=0, y=0, z=0), cooperative=0)


_numbers = itertools.count(1)
_registered: dict[int, _Node] = {}


def _register(node: _Node) -> int:
    number = next(_numbers)
    _registered[number] = node
    return number


def cuLaunchKernelEx(config: SimpleNamespace, function: int, parameters: int, extra: int) -> tuple[CUresult]:
    """Launch the kernel of a graph node; the graph must still exist, because it owns the parameters."""
    assert function == parameters
    node = _registered[function]
    if node.graph not in DEVICE.graphs:
        return (CUresult.CUDA_ERROR_INVALID_HANDLE,)
    node.work.check()
    DEVICE.submit(int(config.hStream), node.work)
    return (CUresult.CUDA_SUCCESS,)
