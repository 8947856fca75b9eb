"""Captured CUDA graphs: what they keep, and which can be launched kernel by kernel; CuPy and the driver are fakes."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest

from cupy_sdpa.device import cuda_graph, cupy_runtime, driver

KERNEL, COPY, FILL = "kernel", "copy", "fill"
SIZES = {"gridDimX": 4, "gridDimY": 2, "gridDimZ": 3, "blockDimX": 384, "blockDimY": 1, "blockDimZ": 1, "sharedMemBytes": 512}


class Driver:
    """A fake driver with a graph: its nodes by kind, and its edges as pairs of node indices."""

    CUgraphNodeType = SimpleNamespace(CU_GRAPH_NODE_TYPE_KERNEL=KERNEL, CU_GRAPH_NODE_TYPE_MEMSET=FILL)
    CUlaunchAttributeID = SimpleNamespace(
        CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION="cluster", CU_LAUNCH_ATTRIBUTE_COOPERATIVE="together"
    )
    CUlaunchConfig = CUlaunchAttribute = SimpleNamespace

    def __init__(self, kinds, edges, *, lossy=False, height=1, cluster=0, together=0, value=5, size=4):
        self.kinds, self.edges, self.lossy, self.height, self.cluster, self.together = (
            kinds, edges, lossy, height, cluster, together,
        )  # fmt: skip
        self.value, self.size, self.done = value, size, []

        self.cuLaunchKernelEx = functools.partial(self._do, "launch")
        self.cuMemsetD16Async, self.cuMemsetD32Async = (functools.partial(self._do, name) for name in ("fill 2", "fill 4"))

    def _do(self, *given):
        self.done.append(given)
        return (self.status,)

    status = 0

    def cuGraphGetNodes(self, graph, count=0):
        return 0, list(range(len(self.kinds)))[:count], len(self.kinds)

    def cuGraphGetEdges(self, graph, count=0):
        some = self.edges[:count]
        return 909 if self.lossy else 0, [a for a, _ in some], [b for _, b in some], [None for _ in some], len(self.edges)

    def cuGraphNodeGetType(self, node):
        return 0, self.kinds[node]

    def cuGraphKernelNodeGetParams(self, node):
        return 0, SimpleNamespace(**SIZES, func=70 + node if node % 2 else 0, kern=90 + node, kernelParams=7000 + node)

    def cuGraphMemsetNodeGetParams(self, node):
        return 0, SimpleNamespace(dst=1 << 40, value=self.value, width=3, height=self.height, elementSize=self.size)

    def cuGraphKernelNodeGetAttribute(self, node, name):
        return 0, SimpleNamespace(clusterDim=SimpleNamespace(x=self.cluster, y=1, z=1), cooperative=self.together)

    @staticmethod
    def CUstream(address):
        return ("stream", address)

    @staticmethod
    def CUdeviceptr(address):
        return ("address", address)

    @staticmethod
    def CUfunction(address):
        return ("function", address)


def driver_calls(monkeypatch, *given, **more):
    """The driver calls of a graph, and the list of those that ran."""
    made = Driver(*given, **more)
    monkeypatch.setattr(driver, "bindings", lambda: made)
    cuda = SimpleNamespace(
        driver=SimpleNamespace(launchKernel=lambda *given: made.done.append(("kernel", *given))),
        runtime=SimpleNamespace(memsetAsync=lambda *given: made.done.append(("fill", *given))),
    )
    monkeypatch.setattr(cupy_runtime, "cupy", lambda: SimpleNamespace(cuda=cuda))
    return cuda_graph.driver_calls(graph=1, stream=9), made.done


def launched(calls, done):
    """The driver calls that ran when all of them were launched."""
    for function, arguments in calls:
        function(*arguments)
    return done


@pytest.mark.parametrize("cluster", [0, 1])
def test_a_sequence_of_fills_and_kernels(cluster, monkeypatch):
    """Each node is launched with its parameters, on the stream of the graph, in order; a cluster of one block is no cluster."""
    calls = driver_calls(monkeypatch, [FILL, KERNEL, KERNEL], [(0, 1), (1, 2)], cluster=cluster)
    fill, *kernels = launched(*calls)
    assert fill == ("fill 4", ("address", 1 << 40), 5, 3, ("stream", 9))
    dimensions = tuple(SIZES.values())
    assert kernels == [("kernel", 71, *dimensions, 9, 7001, 0), ("kernel", 92, *dimensions, 9, 7002, 0)]


@pytest.mark.parametrize(
    ("value", "size", "filled"),
    [(0, 4, ("fill", 1 << 40, 0, 12, 9)), (0x07070707, 4, ("fill", 1 << 40, 7, 12, 9)), (0xFF, 1, ("fill", 1 << 40, 0xFF, 3, 9)),
     (0x0505, 2, ("fill", 1 << 40, 5, 6, 9)), (0xFF800000, 4, ("fill 4", ("address", 1 << 40), 0xFF800000, 3, ("stream", 9))),
     (0x0100, 2, ("fill 2", ("address", 1 << 40), 0x0100, 3, ("stream", 9)))],
)  # fmt: skip
def test_fills(value, size, filled, monkeypatch):
    """A fill with equal bytes is one of bytes, of the same memory."""
    assert launched(*driver_calls(monkeypatch, [FILL], [], value=value, size=size)) == [filled]


@pytest.mark.parametrize(
    ("more", "names"), [({"cluster": 2}, ["cluster"]), ({"cluster": 2, "together": 1}, ["cluster", "together"])]
)
def test_launch_attributes_of_kernels(more, names, monkeypatch):
    """Clusters and cooperative launches are kept; such a kernel is launched with the driver's function, whose status is read."""
    ((launch, config, kernel, parameters, extra),) = launched(*(given := driver_calls(monkeypatch, [KERNEL], [], **more)))
    assert {name: getattr(config, name) for name in SIZES} == SIZES
    assert (config.hStream, [attribute.id for attribute in config.attrs]) == (("stream", 9), names)
    assert config.numAttrs == len(names)
    assert (launch, kernel, parameters, extra) == ("launch", ("function", 90), 7000, 0)
    monkeypatch.setattr(Driver, "status", SimpleNamespace(name="CUDA_ERROR_INVALID_CLUSTER_SIZE"))
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_CLUSTER_SIZE"):
        launched(*given)


OTHERS = {
    "copy": ([FILL, COPY, KERNEL], [(0, 1), (1, 2)], {}),
    "fork": ([FILL, KERNEL, KERNEL], [(0, 1), (0, 2)], {}),
    "two_rows": ([KERNEL, KERNEL], [], {}),
    "edges_with_a_meaning": ([KERNEL, KERNEL], [(0, 1)], {"lossy": True}),
    "fill_of_rows": ([FILL, KERNEL], [(0, 1)], {"height": 2}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_graphs_are_launched_as_a_whole(name, monkeypatch):
    """No node is omitted, and parallel nodes are not serialized."""
    kinds, edges, more = OTHERS[name]
    assert driver_calls(monkeypatch, kinds, edges, **more)[0] == []


def test_a_failure_of_the_driver_raises(monkeypatch):
    """A node is not omitted because the driver cannot report its parameters."""
    refused = SimpleNamespace(name="CUDA_ERROR_INVALID_VALUE")
    monkeypatch.setattr(Driver, "cuGraphNodeGetType", lambda *_: (refused, None))
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
        driver_calls(monkeypatch, [KERNEL], [])


CALLERS, CAPTURED, GRAPH, EXECUTABLE = 7, 99, 5, 6


class Cupy:
    """A fake CuPy with streams, capture and graphs; ``done`` lists the calls, ``fail`` the exceptions by function.

    ``current`` is the address of the current stream, ``memory`` the stream of each allocation.
    """

    def __init__(self):
        self.streamCaptureModeRelaxed = 2
        self.cuda = self.runtime = self
        self.current, self.done, self.memory, self.fail = CALLERS, [], [], {}

    def _do(self, name, *arguments, result=None):
        self.done.append((name, *arguments))
        if name in self.fail:
            raise self.fail[name]
        return result

    def Stream(self, *, non_blocking):
        return Stream(self, CAPTURED)

    def get_current_stream(self):
        return Stream(self, self.current)

    def empty(self, size, dtype):
        self.memory.append(self.current)
        array = self._do("empty", result=np.zeros(size, dtype))
        return SimpleNamespace(nbytes=array.nbytes, data=SimpleNamespace(ptr=1 << 40))

    def alloc(self, size):
        return self._do("alloc", result=SimpleNamespace(ptr=1 << 41))

    def streamIsCapturing(self, pointer):
        return False

    def streamBeginCapture(self, pointer, mode):
        self._do("begin", pointer)

    def streamEndCapture(self, pointer):
        return self._do("end", pointer, result=GRAPH)

    def graphInstantiate(self, graph):
        return self._do("instantiate", graph, result=EXECUTABLE)

    def graphDestroy(self, graph):
        self._do("destroy", graph)

    def graphExecDestroy(self, executable):
        self._do("destroy", executable)

    def graphLaunch(self, executable, stream):
        self._do("launch", executable, stream)


class Stream:
    def __init__(self, cupy, address):
        self.cupy, self.ptr = cupy, address

    def __enter__(self):
        self.before, self.cupy.current = self.cupy.current, self.ptr
        return self

    def __exit__(self, *_):
        self.cupy.current = self.before


@pytest.fixture
def cupy(monkeypatch):
    cupy = Cupy()
    monkeypatch.setattr(cupy_runtime, "cupy", lambda: cupy)
    monkeypatch.setattr(cuda_graph, "driver_calls", lambda graph, stream: cupy._do("driver_calls", result=()))
    return cupy


def test_a_captured_graph_owns_its_memory(cupy):
    """Allocations during the capture are of the caller's stream; they are counted and kept with the given arrays until close()."""
    own = SimpleNamespace(nbytes=1000)
    recording = cuda_graph.Recording(lambda: [cupy_runtime.allocate(size) for size in (300, 40)], [own])
    assert cupy.memory == [CALLERS, CALLERS]
    assert recording.size == cuda_graph.GRAPH_BYTES + 1340
    assert [kept.nbytes for kept in recording._arrays] == [1000, 300, 40]
    recording.launch(of_many=False)
    recording.close()
    assert cupy.done == [
        ("begin", CAPTURED), ("empty",), ("empty",), ("end", CAPTURED), ("driver_calls",), ("instantiate", GRAPH),
        ("launch", EXECUTABLE, CALLERS), ("destroy", EXECUTABLE), ("destroy", GRAPH),
    ]  # fmt: skip
    assert recording._arrays == []


def test_an_arena(cupy):
    """It hands out parts of its memory in order; what does not fit is allocated, and kept alive during a capture."""
    memory = cupy_runtime.Memory(100000, 1100)
    with cupy_runtime.arena(memory) as arena:
        assert [cupy_runtime.allocate(size) - memory.pointer for size in (300, 1, 100)] == [0, 512, 768]
        assert cupy.done == []
        cupy_runtime.allocate(1)
        assert cupy.done[-1] == ("alloc",)
        assert (arena.needed, arena.others) == (1280, [])
    with cupy_runtime.arena() as arena:
        cupy_runtime.allocate(300)
    assert (arena.needed, cupy.done) == (512, [("alloc",), ("alloc",)])
    with cupy_runtime.arena(memory) as arena:
        for _ in range(2):
            with cupy_runtime.released():
                assert [cupy_runtime.allocate(size) - memory.pointer for size in (300, 1)] == [0, 512]
        assert cupy_runtime.allocate(1) == memory.pointer
        assert arena.needed == 768
    recording = cuda_graph.Recording(lambda: [cupy_runtime.allocate(size) for size in (600, 300)], memory=memory)
    assert [kept.nbytes for kept in recording._arrays] == [300]


def test_a_graph_that_is_not_executable(cupy, monkeypatch):
    """It takes no device memory, and is launched kernel by kernel; one that is no sequence of kernels is made executable."""
    done = []
    kernels = [(lambda *given: done.append(given), (1, 2)), (lambda *given: done.append(given), (3,))]
    monkeypatch.setattr(cuda_graph, "driver_calls", lambda graph, stream: kernels)
    recording = cuda_graph.Recording(lambda: None, [SimpleNamespace(nbytes=1000)], least_nodes=3)
    assert recording.size == cuda_graph.HOST_BYTES + 1000
    recording.launch(of_many=False)
    assert done == [(1, 2), (3,)]
    recording.close()
    assert [name for name, *_ in cupy.done] == ["begin", "end", "destroy"]
    monkeypatch.setattr(cuda_graph, "driver_calls", lambda graph, stream: [])
    recording = cuda_graph.Recording(lambda: None, least_nodes=3)
    recording.launch(of_many=False)
    assert cupy.done[-1] == ("launch", EXECUTABLE, CALLERS)
    assert recording.size == cuda_graph.GRAPH_BYTES


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("refused"), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("where", ["begin", "run", "empty", "end", "driver_calls", "instantiate"])
@pytest.mark.parametrize("broken", [False, True], ids=["", "and_the_capture_is_broken"])
def test_a_failed_capture_leaves_nothing(where, broken, error, cupy):
    """The error is raised, the capture is ended, its graph destroyed, the current stream and the allocator are restored."""
    if broken:
        cupy.fail["end"] = RuntimeError("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED")
    cupy.fail[where] = error

    def run():
        cupy_runtime.allocate(300)
        cupy._do("run")

    with pytest.raises((type(error), RuntimeError)) as raised:
        cuda_graph.Recording(run)
    if not broken or where not in ("driver_calls", "instantiate"):
        assert raised.value is error
    names = [name for name, *_ in cupy.done]
    assert names.count("end") >= 1
    assert names.count("destroy") == ("end" not in cupy.fail)
    assert cupy.current == CALLERS
    cupy_runtime.allocate(10)
    assert cupy.done[-1] == ("alloc",)


def test_close_releases_everything_after_a_failure(cupy):
    """Graph, executable and memory are released, whichever fails."""
    recording = cuda_graph.Recording(lambda: None, [SimpleNamespace(nbytes=1)])
    cupy.fail["destroy"] = RuntimeError("sticky")
    with pytest.raises(RuntimeError, match="sticky"):
        recording.close()
    assert cupy.done[-2:] == [("destroy", EXECUTABLE), ("destroy", GRAPH)]
    assert recording._arrays == []


class Plain:
    """An array type whose constructor takes the arguments, as CuPy's does."""

    def __init__(self, *given):
        self.given = given


class Direct(Plain):
    """The base of an array type with ``_init``."""

    def _init(self, *given):
        self.given = ("directly", *given)


class WithInit(Direct):
    """An array type with ``_init``."""


@pytest.mark.parametrize(("kind", "given"), [(Plain, ()), (WithInit, ("directly",))], ids=["constructor", "init"])
def test_arrays_are_created_with_or_without_init(kind, given):
    """In Fortran order, and of the array type."""
    made = cupy_runtime.array_function(kind)((2, 3), "f2", "memory")
    assert type(made) is kind
    assert made.given == (*given, (2, 3), "f2", "memory", None, "F")
