"""Captured CUDA graphs: what they keep, and which can be launched kernel by kernel."""

import gc
from types import SimpleNamespace

import numpy as np
import pytest
from fake_cupy import DEVICE

from cupy_sdpa.core.runtime import cuda_graph, cupy_runtime, driver

KERNEL, COPY, FILL = "kernel", "copy", "fill"
SIZES = {"gridDimX": 4, "gridDimY": 2, "gridDimZ": 3, "blockDimX": 384, "blockDimY": 1, "blockDimZ": 1, "sharedMemBytes": 512}


def driver_calls(monkeypatch, kinds, edges, *, lossy=False, height=1, cluster=0, together=0, value=5, size=4, status=0):
    """The driver calls of a graph of a fake driver, and the list of those that ran.

    The graph has nodes of some kinds, and edges as pairs of node indices; the other arguments are parameters of all nodes.
    """
    done, names = [], SimpleNamespace
    begins, ends = ([edge[n] for edge in edges] for n in (0, 1))
    attributes = names(clusterDim=names(x=cluster, y=1, z=1), cooperative=together)

    def runs(name):
        return lambda *given: (done.append((name, *given)), (status,))[1]

    cuda = names(
        CUgraphNodeType=names(CU_GRAPH_NODE_TYPE_KERNEL=KERNEL, CU_GRAPH_NODE_TYPE_MEMSET=FILL),
        CUlaunchAttributeID=names(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION="cluster", CU_LAUNCH_ATTRIBUTE_COOPERATIVE="together"),
        CUlaunchConfig=names, CUlaunchAttribute=names,
        CUstream=lambda address: ("stream", address),
        CUdeviceptr=lambda address: ("address", address),
        CUfunction=lambda address: ("function", address),
        cuGraphGetNodes=lambda graph, count=0: (0, [*range(count)], len(kinds)),
        cuGraphGetEdges=lambda graph, n=0: (909 if lossy else 0, begins[:n], ends[:n], [None] * n, len(edges)),
        cuGraphNodeGetType=lambda node: (getattr(kinds[node], "refused", 0), kinds[node]),
        cuGraphKernelNodeGetParams=lambda node: (
            0, names(**SIZES, func=70 + node if node % 2 else 0, kern=90 + node, kernelParams=7000 + node),
        ),
        cuGraphMemsetNodeGetParams=lambda node: (0, names(dst=1 << 40, value=value, width=3, height=height, elementSize=size)),
        cuGraphKernelNodeGetAttribute=lambda node, name: (0, attributes),
        cuLaunchKernelEx=runs("launch"), cuMemsetD16Async=runs("fill 2"), cuMemsetD32Async=runs("fill 4"),
    )  # fmt: skip
    of_cupy = names(cuda=names(driver=names(launchKernel=runs("kernel")), runtime=names(memsetAsync=runs("fill"))))
    for where, name, made in ((driver, "bindings", cuda), (cupy_runtime, "cupy", of_cupy)):
        monkeypatch.setattr(where, name, lambda made=made: made)
    return cuda_graph.driver_calls(graph=1, stream=9), done


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
    ((launch, config, kernel, parameters, extra),) = launched(*driver_calls(monkeypatch, [KERNEL], [], **more))
    assert {name: getattr(config, name) for name in SIZES} == SIZES
    assert (config.hStream, [attribute.id for attribute in config.attrs]) == (("stream", 9), names)
    assert config.numAttrs == len(names)
    assert (launch, kernel, parameters, extra) == ("launch", ("function", 90), 7000, 0)
    refused = SimpleNamespace(name="CUDA_ERROR_INVALID_CLUSTER_SIZE")
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_CLUSTER_SIZE"):
        launched(*driver_calls(monkeypatch, [KERNEL], [], status=refused, **more))


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
    node = SimpleNamespace(refused=SimpleNamespace(name="CUDA_ERROR_INVALID_VALUE"))
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
        driver_calls(monkeypatch, [node], [])


def used_bytes(fake):
    """The bytes in use after garbage collection."""
    gc.collect()
    return fake.get_default_memory_pool().used_bytes()


def fills(arrays):
    """A function that fills arrays with 1, and temporary memory that it allocates."""

    def run(on_host):
        memory = cupy_runtime.allocate(300)
        cupy_runtime.cupy().cuda.runtime.memsetAsync(memory.ptr, 1, 300, cupy_runtime.stream())
        for array in arrays:
            array.fill(1)

    return run


def test_a_captured_graph_owns_its_memory(fake):
    """What is allocated during the capture, from the pool of the caller's stream, is counted and kept until close()."""
    out, own = fake.full(40, 7, np.float32), fake.empty(1000, np.uint8)
    fake.cuda.Device().synchronize()
    before, streams = used_bytes(fake), set()

    def allocate(size):
        streams.add(fake.cuda.get_current_stream().ptr)
        return fake.get_default_memory_pool().malloc(size)

    with fake.cuda.Stream(non_blocking=True) as stream, fake.cuda.using_allocator(allocate):
        recording = cuda_graph.Recording(fills([out]), [own])
        assert out.get()[0] == 7, "the capture ran something"
        assert recording.size == cuda_graph.GRAPH_BYTES + 1300
        del own
        assert used_bytes(fake) > before
        for of_many in (False, True):
            out.fill(0)
            recording.launch(of_many=of_many)
            assert (out.get() == 1).all()
        recording.close()
        stream.synchronize()
    assert streams == {stream.ptr}
    assert used_bytes(fake) == before - 1024


def test_steps_of_the_host_run_between_graphs(fake):
    """They run in every launch and not in the capture; graphs without work are not launched."""
    out, seen = fake.zeros(40, np.float32), []

    def note(name):
        seen.append((name, float(out.get()[0])))

    def run(on_host):
        on_host(note, ("first",))
        out.fill(1)
        on_host(note, ("second",))
        on_host(note, ("third",))
        fills([out])(on_host)
        out.fill(2)

    recording = cuda_graph.Recording(run, least_nodes=3)
    assert recording.has_host_steps
    assert not seen
    assert recording.size == cuda_graph.HOST_BYTES + cuda_graph.GRAPH_BYTES + 300
    for of_many in (False, True):
        out.fill(0)
        recording.launch(of_many=of_many)
        assert out.get()[0] == 2
        assert seen == [("first", 0), ("second", 1), ("third", 1)]
        seen.clear()
    recording.close()
    assert not DEVICE.graphs
    assert not DEVICE.executables


def test_what_cupy_allocates_in_a_capture_is_kept(fake):
    """The temporaries of CuPy's functions belong to the graph: other arrays get other memory."""
    x, out = fake.full(500, 3, np.float32), fake.zeros(500, np.float32)

    def run(on_host):
        out[...] = (x + 1) * (x - 1)

    recording = cuda_graph.Recording(run)
    assert recording.size == cuda_graph.GRAPH_BYTES + 3 * 2000
    others = [fake.full(500, np.nan, np.float32) for _ in range(8)]
    recording.launch(of_many=False)
    assert (out.get() == 8).all()
    assert all(np.isnan(other.get()).all() for other in others)
    recording.close()


def test_an_arena(fake):
    """It hands out parts of its memory in order; what does not fit is allocated, and kept alive during a capture."""
    memory = cupy_runtime.Memory(fake.cuda.alloc(1100), 1100)
    start = memory.pointer.ptr

    def places(*sizes):
        return [cupy_runtime.allocate(size).ptr - start for size in sizes]

    with cupy_runtime.arena(memory) as arena:
        assert places(300, 1, 100) == [0, 512, 768]
        assert not 0 <= places(1)[0] < 1100
        assert (arena.needed, arena.others) == (1280, [])
    with cupy_runtime.arena(memory) as arena:
        for _ in range(2):
            with cupy_runtime.released():
                assert places(300, 1) == [0, 512]
        assert places(1) == [0]
        assert arena.needed == 768
    recording = cuda_graph.Recording(lambda on_host: places(600, 300), memory=memory)
    assert recording.size == cuda_graph.GRAPH_BYTES + 300
    recording.close()


def test_a_graph_that_is_not_executable(fake):
    """It takes no device memory, and is launched kernel by kernel; one that is no sequence of kernels is made executable."""
    out, other = fake.full(40, 7, np.float32), fake.full(40, 5, np.float32)
    recording = cuda_graph.Recording(fills([out]), least_nodes=3)
    assert recording.size == cuda_graph.HOST_BYTES + 300
    assert not DEVICE.executables
    recording.launch(of_many=False)
    assert (out.get() == 1).all()
    recording.close()
    copy = cuda_graph.Recording(lambda on_host: out.data.copy_from_device_async(other.data, 160), least_nodes=3)
    assert copy.size == cuda_graph.GRAPH_BYTES
    for of_many in (False, True):
        out.fill(0)
        copy.launch(of_many=of_many)
        assert (out.get() == 5).all()
    copy.close()


PLACES = {"begin": "streamBeginCapture", "end": None, "instantiate": "graphInstantiate", "run": "memsetAsync"}


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("refused"), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("broken", [False, True], ids=["", "and_the_capture_is_broken"])
def test_a_failed_capture_leaves_nothing(where, broken, error, fake, monkeypatch):
    """The error is raised, the capture is ended, its graph destroyed, the current stream and the allocator are restored."""
    runtime, ended = fake.cuda.runtime, []
    end = runtime.streamEndCapture

    def fail(*_):
        raise error

    def end_capture(stream):
        ended.append(stream)
        graph = end(stream)
        if broken or where == "end":
            runtime.graphDestroy(graph)
            raise error if where == "end" else RuntimeError("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED")
        return graph

    with monkeypatch.context() as patch:
        for name, function in {"streamEndCapture": end_capture, **({} if where == "end" else {PLACES[where]: fail})}.items():
            patch.setattr(runtime, name, function)
        with pytest.raises((type(error), RuntimeError)) as raised:
            cuda_graph.Recording(fills([]))
    assert raised.value is error or (broken and where == "instantiate")
    assert ended
    assert not DEVICE.graphs
    assert fake.cuda.get_current_stream() is fake.cuda.Stream.null
    address = cupy_runtime.allocate(10).ptr
    assert address == fake.cuda.alloc(10).ptr, "the allocator of the capture is in use"


def test_close_releases_everything_after_a_failure(fake, monkeypatch):
    """The graph and its memory are released although its executable cannot be destroyed."""
    before = used_bytes(fake)
    recording = cuda_graph.Recording(fills([]), [fake.empty(1000, np.uint8)])
    destroy = fake.cuda.runtime.graphExecDestroy

    def fail(executable):
        destroy(executable)
        raise RuntimeError("sticky")

    monkeypatch.setattr(fake.cuda.runtime, "graphExecDestroy", fail)
    with pytest.raises(RuntimeError, match="sticky"):
        recording.close()
    assert not DEVICE.graphs
    assert used_bytes(fake) == before


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
    (made,) = cupy_runtime.arrays_function(kind)([((2, 3), "f2", 12, None, "F")], ["memory"])
    assert type(made) is kind
    assert made.given == (*given, (2, 3), "f2", "memory", None, "F")
