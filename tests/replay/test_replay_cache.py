"""Repeated calls: which calls use a cached call, and how it runs; CuPy, cuDNN and the plan are fakes."""

import contextlib
import functools
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from cases import Case

from cupy_sdpa import CudnnError
from cupy_sdpa.calls import replay_cache
from cupy_sdpa.calls.call import Call, LaunchRecord
from cupy_sdpa.device import cupy_runtime
from cupy_sdpa.plans.plan_cache import PlanCache
from cupy_sdpa.staging.stage import Fill

FORWARD = ("q", "k", "v", "out", "stats")
CASE = Case("repeated", dtype="float16", sq=16, stats=False)
SHAPE = CASE.arrays()[0].shape


class Array:
    """A fake CuPy array with the attributes that are used."""

    addresses = itertools.count(1 << 20, 1 << 20)

    def __init__(self, shape=SHAPE, dtype="f2", memory=None, strides=None, order="F", device=0):
        like = np.zeros(shape, dtype, order=order)
        self.shape, self.dtype, self.strides, self.nbytes = shape, like.dtype, like.strides, like.nbytes
        self.data = memory or SimpleNamespace(ptr=next(self.addresses), device_id=device)
        self._f_contiguous = like.flags.f_contiguous

    def at(self, address):
        self.data = SimpleNamespace(ptr=address, device_id=self.data.device_id)
        return self


CAPTURE = 99


class Recording:
    """A fake captured graph: its number, and the objects that it keeps alive; during the capture the plan has the captured
    stream.
    """

    numbers = itertools.count(1)

    def __init__(self, fixture, run, own, *, memory, least_nodes):
        fixture.plan.set_stream(CAPTURE)
        if fixture.failure:
            raise fixture.failure
        self.fixture, self.number, self.own, self.size = fixture, next(self.numbers), own, fixture.size
        self.memory, self.least_nodes = memory, least_nodes
        fixture.done.append(("record",))
        fixture.alive.add(self.number)
        self.used = False

    def launch(self, *, of_many):
        assert self.number in self.fixture.alive
        if self.fixture.launch_failure:
            raise self.fixture.launch_failure
        self.fixture.done.append(("launch", self.number, of_many))

    def close(self):
        self.fixture.alive.remove(self.number)


class ParsedCall(Call):
    """A call that only records that it ran again, and on which arrays."""

    def run(self, memory=None):
        """Append ``("run", addresses)``."""
        self.done.append(("run", {name: array.data.ptr for name, array in self.arrays.items()}))
        self.arrays |= self.created
        self.launched = self.record
        return [self.arrays[spec.name] for spec in self.problem.results if spec.name in self.arrays] or [None]


class Fixture:
    """A thread's session with one plan, and what was done: ``("execute", addresses)``, ``("record",)``, ``("launch", number, of_many)``."""

    def __init__(self, monkeypatch, workspace=256):
        self.streams: list[int] = []
        self.done, self.alive, self.stream, self.capturing, self.free = [], set(), 7, False, [1 << 40]
        #: The exceptions of captures, launches and allocations of some bytes; and the size of a captured graph.
        self.failure, self.launch_failure, self.too_much, self.size = None, None, None, 100

        def memory(size):
            if size == self.too_much:
                raise MemoryError
            return SimpleNamespace(ptr=self.free[0], device_id=0)

        self.session = SimpleNamespace(cached_calls={}, handle=object(), cache=PlanCache())
        self.here = SimpleNamespace(
            ndarray=Array, has_flag=True, array=cupy_runtime.array_function(Array), alloc=memory, is_capturing=lambda stream: self.capturing,
            current_stream=lambda: SimpleNamespace(ptr=self.stream), context_id=lambda flags: (0, 1),
            session=lambda context: self.session,
        )  # fmt: skip
        monkeypatch.setattr(replay_cache, "_runtime", self.here)
        monkeypatch.setattr(replay_cache.driver, "context_id", lambda: 1)
        monkeypatch.setattr(replay_cache.cupy_runtime, "stream", lambda: self.stream)
        monkeypatch.setattr(replay_cache.cupy_runtime, "empty", Array)
        monkeypatch.setattr(replay_cache, "Recording", functools.partial(Recording, self))
        self.plan = self.new_plan(workspace)

    def new_plan(self, workspace=256):
        def execute(addresses, numbers, pointer):
            self.done.append(("execute", dict(addresses), numbers))

        return SimpleNamespace(
            info=SimpleNamespace(workspace=workspace), dependents=set(), used=False, execute=execute, set_stream=self.streams.append,
            target=SimpleNamespace(handle=self.session.handle),
        )  # fmt: skip

    def call(self, q, k, v, out=None, *, plain=True, made=0, **options):
        """As attention() does; gives what ran: the last thing done, or "read"."""
        arrays = (q, k, v, out, None)
        results = replay_cache.run_cached("forward", arrays, options)
        if results is not None:
            assert out is None or results[0] is out
            return self.done[-1]
        made_out = Array(memory=self.here.alloc(0)) if out is None else out
        named = {"q": q, "k": k, "v": v, "out": made_out}
        launched = LaunchRecord((self.plan,), self.plan.info.workspace + made, plain)
        call = ParsedCall(CASE.problem(), named, {"scale": 0.25}, on_gpu=True, launched=launched)
        call.done, call.record, call.created = self.done, launched, {}
        replay_cache.cache_call("forward", FORWARD, arrays, options, call)
        return "read"


@pytest.fixture
def fixture(monkeypatch):
    return Fixture(monkeypatch)


def test_validated_executed_captured_launched(fixture):
    """Validated once, then executed; at the third use of the same addresses captured; then launched."""
    q, k, v = Array(), Array(), Array()
    did = [fixture.call(q, k, v) for _ in range(5)]
    kinds = [x if isinstance(x, str) else x[0] for x in did]
    assert kinds == ["read", "execute", "record", "launch", "launch"]
    assert fixture.session.cache.hits == 3
    assert fixture.plan.used


def test_one_of_many(fixture, monkeypatch):
    """A captured graph gets a flag whether its call has several."""
    monkeypatch.setattr(replay_cache, "FEW_GRAPHS", 2)
    q, k, v = Array(), Array(), Array()
    told = []
    for out in [Array() for _ in range(3)]:
        *_, (_, _, of_many) = (fixture.call(q, k, v, out) for _ in range(4))
        told.append(of_many)
    assert told == [False, False, True]


def test_each_call_runs_on_its_own_arrays(fixture):
    """A call that was cached with one array for q, k and v does not identify them afterwards."""
    x = Array()
    fixture.call(x, x, x)
    q, k, v = Array(), Array(), Array()
    kind, addresses, numbers = fixture.call(q, k, v)
    assert kind == "execute"
    assert addresses == {"q": q.data.ptr, "k": k.data.ptr, "v": v.data.ptr, "out": fixture.free[0]}
    assert numbers == {"scale": 0.25}


def test_the_address_of_the_result_is_part_of_the_addresses(fixture):
    """A graph is not launched for a result at another address."""
    q, k, v = Array(), Array(), Array()
    for _ in range(4):
        fixture.call(q, k, v)
    fixture.free[0] += 4096
    assert fixture.call(q, k, v)[0] == "execute"
    fixture.free[0] -= 4096
    assert fixture.call(q, k, v)[0] == "launch"
    fixture.stream = 9
    assert fixture.call(q, k, v)[0] == "execute"
    assert fixture.streams[-1] == 9


OTHER = {
    "dtype": lambda: Array(dtype="f4"),
    "shape": lambda: Array((*SHAPE[:2], 8, SHAPE[3])),
    "strides": lambda: Array(order="C"),
    "misaligned": lambda: Array().at(1 << 20 | 2),
    "device": lambda: Array(device=1),
    "numpy": lambda: np.zeros(SHAPE, np.float16, order="F"),
    "subclass": lambda: type("Mine", (Array,), {})(),
}


@pytest.mark.parametrize("name", OTHER)
def test_other_arrays_are_validated(name, fixture):
    """A call with another problem, or with arrays that may need one, is not the cached call."""
    q, k, v = Array(), Array(), Array()
    fixture.call(q, k, v)
    assert replay_cache.run_cached("forward", (q, OTHER[name](), v, None, None), {}) is None


@pytest.mark.parametrize(
    "options", [{"causal": True}, {"scale": 0.5}, {"window": (1, 0)}, {"score_mod": len}, {"tensors": {}}, {"sinks": Array((4,), "f4")}],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_other_options_are_validated(options, fixture):
    """Options, functions among them, are part of the key."""
    q, k, v = Array(), Array(), Array()
    fixture.call(q, k, v)
    assert replay_cache.run_cached("forward", (q, k, v, None, None), options) is None
    assert replay_cache.run_cached("backward", (q, k, v, None, None), {}) is None


def test_numbers_that_are_equal_are_not_the_same(fixture):
    """A window of floats, which raises, is not that of the equal integers."""
    q, k, v = Array(), Array(), Array()
    fixture.call(q, k, v, window=(1, 0))
    assert replay_cache.run_cached("forward", (q, k, v, None, None), {"window": (1.0, 0)}) is None
    assert replay_cache.run_cached("forward", (q, k, v, None, None), {"window": (1, 0)})


def test_a_result_at_a_new_address_is_validated(fixture):
    """It may overlap another array, so only validated addresses are written to."""
    q, k, v = Array(), Array(), Array()
    fixture.call(q, k, v, Array())
    out = Array()
    assert fixture.call(q, k, v, out) == "read"
    assert fixture.call(q, k, v, out)[0] == "execute"
    assert fixture.call(q, k, v, q) == "read"


def test_calls_with_copies_run_again(fixture):
    """The parsed call runs on the new arrays, and is captured with memory for the copies: its own, or that of every call."""
    for made in (100, replay_cache.SMALL_BYTES + 1):
        fixture.session.cached_calls.clear()
        q, k, v = Array(), Array(), Array()
        kinds = [fixture.call(q, k, v, plain=False, made=made) for _ in range(5)]
        addresses = {"q": q.data.ptr, "k": k.data.ptr, "v": v.data.ptr, "out": fixture.free[0]}
        assert kinds[:2] == ["read", ("run", addresses)]
        assert kinds[4][0] == "launch"
        (known,) = fixture.session.cached_calls.values()
        (graph,) = known._graphs.values()
        assert graph.memory.size == 256 + made
        assert [array.nbytes for array in graph.own] == ([256 + made] if made == 100 else [])
        others = [Array() for _ in range(4)]
        kinds = [fixture.call(other, k, v, plain=False, made=made) for other in others]
        assert kinds == [("run", addresses | {"q": other.data.ptr}) for other in others]


def test_not_while_capturing_nor_tuning(fixture, monkeypatch):
    """A captured stream captures the call itself; autotuned calls are measured."""
    q, k, v = Array(), Array(), Array()
    for _ in range(4):
        fixture.call(q, k, v)
    fixture.capturing = True
    assert replay_cache.run_cached("forward", (q, k, v, None, None), {}) is None
    fixture.capturing = False
    with contextlib.ExitStack() as stack:
        token = replay_cache.active_tunings.set([])
        stack.callback(replay_cache.active_tunings.reset, token)
        assert replay_cache.run_cached("forward", (q, k, v, None, None), {}) is None
    assert fixture.call(q, k, v)[0] == "launch"


def test_a_large_workspace_is_allocated_every_time(monkeypatch):
    """Its address is one of those of the captured graph."""
    fixture = Fixture(monkeypatch, workspace=replay_cache.SMALL_BYTES + 1)
    q, k, v, out = Array(), Array(), Array(), Array()
    for _ in range(4):
        fixture.call(q, k, v, out)
    assert fixture.call(q, k, v, out)[0] == "launch"
    fixture.free[0] += 4096
    assert fixture.call(q, k, v, out)[0] == "execute"


def test_captured_graphs_are_destroyed_before_their_plan(fixture):
    """Then the call is cached again, with the next plan."""
    q, k, v = Array(), Array(), Array()
    for _ in range(4):
        fixture.call(q, k, v)
    assert len(fixture.alive) == 1
    for dependent in fixture.plan.dependents:
        dependent.close()
    assert not fixture.alive
    fixture.plan = fixture.new_plan()
    assert fixture.call(q, k, v) == "read"
    assert fixture.call(q, k, v)[0] == "execute"


FAILURES = {
    "cupys_pool": MemoryError("cupy.cuda.memory.OutOfMemoryError"),
    "another_allocator": RuntimeError("CUDA out of memory"),
    "driver": RuntimeError("the CUDA driver failed: CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"),
    "cudnn": CudnnError("execute the plan", 5000),
    "bug": ZeroDivisionError(),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failed_capture_warns_once(name, fixture, monkeypatch):
    """The results stay. One warning, no further attempt for PAUSE calls, then the call is captured."""
    monkeypatch.setattr(replay_cache, "RETRY_AFTER", 5)
    fixture.failure = FAILURES[name]
    q, k, v = Array(), Array(), Array()
    for _ in range(2):
        fixture.call(q, k, v)
    with pytest.warns(
        RuntimeWarning, match=f"could not be replayed.*{type(fixture.failure).__name__}.*captured again after 5 calls"
    ):
        assert fixture.call(q, k, v)[0] == "run"
    assert [fixture.call(q, k, v)[0] for _ in range(5)] == ["execute"] * 5
    assert fixture.call(q, k, v)[0] == "run"  # another failed capture, without another warning
    assert [fixture.call(q, k, v)[0] for _ in range(5)] == ["execute"] * 5
    fixture.failure = None
    assert fixture.call(q, k, v) == ("record",)
    assert fixture.call(q, k, v)[0] == "launch"


def test_a_session_warns_once_about_failed_captures(fixture):
    """Whichever calls cannot be captured."""
    fixture.failure = MemoryError()
    q, k, v = Array(), Array(), Array()
    with pytest.warns(RuntimeWarning) as said:
        kinds = [fixture.call(q, k, v, scale=scale) for scale in (0.1, 0.2) for _ in range(5)]
    assert len(said) == 1
    assert kinds[2][0] == kinds[7][0] == "run"


def test_a_failure_does_not_pause_other_calls(fixture):
    """A call is captured although another one cannot be."""
    q, k, v = Array(), Array(), Array()
    fixture.failure = MemoryError()
    with pytest.warns(RuntimeWarning):
        _ = [fixture.call(q, k, v, scale=0.1) for _ in range(3)]
    fixture.failure = None
    assert [fixture.call(q, k, v, scale=0.2) for _ in range(3)][-1] == ("record",)
    assert fixture.call(q, k, v, scale=0.1)[0] == "execute"


@pytest.mark.parametrize("failure", [None, MemoryError(), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
def test_the_stream_is_restored_after_a_capture(failure, fixture):
    """The plan has the caller's stream again, not the captured one, also after a failure."""
    q, k, v = Array(), Array(), Array()
    for _ in range(2):
        fixture.call(q, k, v)
    fixture.failure = failure
    expected = {type(None): contextlib.nullcontext, MemoryError: lambda: pytest.warns(RuntimeWarning)}
    with expected.get(type(failure), lambda: pytest.raises(KeyboardInterrupt))():
        fixture.call(q, k, v)
    assert fixture.streams[-2:] == [CAPTURE, fixture.stream]


def test_an_interrupted_capture_leaves_nothing(fixture):
    """KeyboardInterrupt is raised; the session works, and the call is not captured for a while."""
    q, k, v = Array(), Array(), Array()
    fixture.failure = KeyboardInterrupt()
    for _ in range(2):
        fixture.call(q, k, v)
    with pytest.raises(KeyboardInterrupt):
        fixture.call(q, k, v)
    fixture.failure = None
    assert [fixture.call(q, k, v)[0] for _ in range(4)] == ["execute"] * 4
    assert (fixture.session.cache.recordings, fixture.session.cache.recording_bytes, fixture.alive) == (0, 0, set())


def test_a_graph_that_cannot_be_launched_is_destroyed(fixture, monkeypatch):
    """The call is validated instead, with a warning; it is captured again after PAUSE calls."""
    monkeypatch.setattr(replay_cache, "RETRY_AFTER", 2)
    q, k, v = Array(), Array(), Array()
    for _ in range(4):
        fixture.call(q, k, v)
    fixture.launch_failure = RuntimeError("out of memory")
    with pytest.warns(RuntimeWarning, match="out of memory") as said:
        assert fixture.call(q, k, v) == "read"
    assert said[0].filename == __file__
    assert not fixture.alive
    fixture.launch_failure = None
    kinds = [fixture.call(q, k, v) for _ in range(4)]
    assert [kind if isinstance(kind, str) else kind[0] for kind in kinds] == [
        "execute",
        "record",
        "launch",
        "launch",
    ]


@pytest.mark.parametrize("workspace", [256, replay_cache.SMALL_BYTES + 1], ids=["small", "large"])
def test_no_memory_for_the_workspace_of_a_repeated_call(workspace, monkeypatch):
    """The call is validated, where the allocation raises the error with a note; nothing is counted or launched."""
    fixture = Fixture(monkeypatch, workspace)
    q, k, v = Array(), Array(), Array()
    fixture.call(q, k, v)
    fixture.too_much = workspace
    assert replay_cache.run_cached("forward", (q, k, v, None, None), {}) is None
    assert (fixture.done, fixture.session.cache.hits) == ([], 0)


def test_captured_graphs_share_no_memory(fixture):
    """Each has its own workspace, so two of them never write to the same memory, on any streams."""
    q, k, v = Array(), Array(), Array()
    for out in [Array() for _ in range(3)]:
        for _ in range(3):
            fixture.call(q, k, v, out)
    (known,) = fixture.session.cached_calls.values()
    workspaces = [array for recording in known._graphs.values() for array in recording.own]
    assert [array.nbytes for array in workspaces] == [256] * 3
    assert len({array.data.ptr for array in workspaces}) == 3


def test_a_captured_graph_is_for_its_stream_and_results(fixture):
    """A stream with the address of a destroyed one launches a graph only if it writes to the same results."""
    q, k, v, out = Array(), Array(), Array(), Array()
    for _ in range(3):
        fixture.call(q, k, v, out)
    assert fixture.call(q, k, v, out)[0] == "launch"
    other = Array()
    assert fixture.call(q, k, v, other) == "read"
    assert fixture.call(q, k, v, other)[0] == "execute"
    fixture.stream = 9
    assert fixture.call(q, k, v, out)[0] == "execute"
    assert fixture.streams[-1] == 9


def test_captured_graphs_of_all_calls_share_one_limit(fixture):
    """The least recently launched is evicted, of whichever call; then the uses of its addresses are counted again."""
    q, k, v = Array(), Array(), Array()
    cache = fixture.session.cache
    cache.set_recording_limit(250)
    for scale in (0.1, 0.2):
        for _ in range(3):
            fixture.call(q, k, v, scale=scale)
    assert (cache.recordings, cache.recording_bytes) == (2, 200)
    assert fixture.call(q, k, v, scale=0.1)[0] == "launch"
    for _ in range(3):
        fixture.call(q, k, v, scale=0.3)
    assert (cache.recordings, cache.recording_bytes, len(fixture.alive)) == (2, 200, 2)
    assert fixture.call(q, k, v, scale=0.1)[0] == "launch"
    assert fixture.call(q, k, v, scale=0.2)[0] == "execute"
    assert fixture.call(q, k, v, scale=0.3)[0] == "launch"


def test_a_graph_that_is_too_large_is_not_captured_repeatedly(fixture):
    """A graph that exceeds the limit alone is destroyed, and the call is executed for a while."""
    q, k, v = Array(), Array(), Array()
    fixture.size = 129 << 20
    kinds = [fixture.call(q, k, v) for _ in range(10)]
    assert kinds[2] == ("record",)
    assert [kind[0] for kind in kinds[3:]] == ["execute"] * 7
    assert not fixture.alive


def test_a_limit_of_0_disables_captures(fixture):
    """Repeated calls are executed."""
    q, k, v = Array(), Array(), Array()
    fixture.session.cache.set_recording_limit(0)
    kinds = [fixture.call(q, k, v) for _ in range(10)]
    assert [kind[0] for kind in kinds[1:]] == ["execute"] * 9


OPTION_ARRAYS = {
    "strides": Array((8, 4), "f4", order="C"), "shape": Array((4, 8), "f4"), "dtype": Array((8, 4), "f2"),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTION_ARRAYS)
def test_arrays_of_options_are_part_of_the_key(name, fixture):
    """An option's array with another dtype, shape or layout is another call, even at the same address."""
    q, k, v, bias = Array(), Array(), Array(), Array((8, 4), "f4")
    for _ in range(4):
        fixture.call(q, k, v, bias=bias)
    other = OPTION_ARRAYS[name].at(bias.data.ptr)
    assert replay_cache.run_cached("forward", (q, k, v, None, None), {"bias": other}) is None
    assert replay_cache.run_cached("forward", (q, k, v, None, None), {"bias": bias})


def test_the_least_recently_used_call_is_evicted(fixture, monkeypatch):
    """A call that was repeated since stays."""
    monkeypatch.setattr(replay_cache, "MAX_CALLS", 2)
    q, k, v = Array(), Array(), Array()
    for scale in (0.1, 0.2, 0.1, 0.3):
        fixture.call(q, k, v, scale=scale)
    assert fixture.call(q, k, v, scale=0.1) == ("record",)  # for the third time; "read" if it were evicted
    assert replay_cache.run_cached("forward", (q, k, v, None, None), {"scale": 0.2}) is None


def test_old_addresses_are_forgotten(fixture, monkeypatch):
    """The least recent of more than SEEN addresses are removed."""
    monkeypatch.setattr(replay_cache, "MAX_ADDRESS_SETS", 3)
    q, k, v = Array(), Array(), Array()
    outputs = [Array() for _ in range(5)]
    for out in (*outputs, outputs[2]):
        fixture.call(q, k, v, out)
    (known,) = fixture.session.cached_calls.values()
    assert [pointers[3] for pointers in known._counts] == [outputs[n].data.ptr for n in (3, 4, 2)]


def test_evicted_calls_leave_no_captured_graph(fixture, monkeypatch):
    """Their captured graphs are destroyed with them."""
    monkeypatch.setattr(replay_cache, "MAX_CALLS", 2)
    q, k, v = Array(), Array(), Array()
    for scale in (0.1, 0.2, 0.3):
        for _ in range(4):
            fixture.call(q, k, v, scale=scale)
    assert len(fixture.session.cached_calls) == 2
    assert fixture.session.cache.recordings == len(fixture.alive) == 2


def test_arrays_of_the_call_are_kept_with_the_graph(fixture):
    """Every launch reads the inputs that were allocated for the call."""
    q, k, v, out, seed = Array(), Array(), Array(), Array(), Array((1,), "i8")
    launched = LaunchRecord((fixture.plan,), 256, True)
    for _ in range(3):
        named, fills = {"q": q, "k": k, "v": v, "out": out, "seed": seed}, {"seed": Fill("int64", 1, 5)}
        call = ParsedCall(CASE.problem(), named, {}, on_gpu=True, fills=fills, launched=launched)
        call.done, call.record, call.created = fixture.done, launched, {"seed": seed}
        if replay_cache.run_cached("forward", (q, k, v, out, None), {"seed": 5}) is None:
            replay_cache.cache_call("forward", FORWARD, (q, k, v, out, None), {"seed": 5}, call)
    ((kind, addresses), *_) = fixture.done
    assert (kind, addresses.keys()) == ("run", {"q", "k", "v", "out"}), "the call creates the seed when it runs"
    (known,) = fixture.session.cached_calls.values()
    ((kept, workspace),) = [recording.own for recording in known._graphs.values()]
    assert kept is seed
    assert workspace.nbytes == 256
