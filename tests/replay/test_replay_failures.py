"""Repeated calls when something fails or is full: captures, launches, memory, and the limits of what is kept."""

import contextlib
import threading

import numpy as np
import pytest
from engines import on_cudnn
from fake_cupy import DEVICE, library
from replayed_calls import OFTEN, REPLAY, functions_run

from cupy_sdpa import attention, attention_backward, explain, fp8, get_plan_cache
from cupy_sdpa.core.replay import replay_cache

pytestmark = [
    on_cudnn,
    pytest.mark.usefixtures("cache"),
]


@pytest.fixture
def limits(monkeypatch):
    """Sets limits of what is kept of repeated calls."""

    def set_limits(**values):
        for name, value in values.items():
            monkeypatch.setattr(replay_cache, name, value)

    return set_limits


class Repeated:
    """A call with a preallocated output, and its right result."""

    def __init__(self, engine, size=20):
        self.engine, self.size = engine, size
        self.q, self.k, self.v = (engine.normal(seed, 16, 2, size, 2) for seed in range(3))
        self.out = engine.nan(*self.q.shape)
        self.want = {}

    def __call__(self, out=None, scale=1.0):
        """Call, and return whether a graph was launched or captured, or neither."""
        out = self.out if out is None else out
        out.fill(np.nan)
        cache = get_plan_cache()
        before, kept = len(library().executions) if self.engine.name == "fake" else 0, cache.recordings
        count = functions_run(attention, self.q, self.k, self.v, out=out, scale=scale)
        replayed = count <= REPLAY if self.engine.name == "cupy" else len(library().executions) == before
        got = self.engine.get(out)
        np.testing.assert_array_equal(got, self.want.setdefault(scale, got))
        assert not np.isnan(got).any()
        return "launch" if replayed else "capture" if cache.recordings > kept else "run"


@pytest.fixture
def call(engine):
    """A call to repeat."""
    return Repeated(engine)


@contextlib.contextmanager
def failing(engine, name, error):
    """Let a function of CUDA graphs fail."""

    def fail(*_):
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.xp.cuda.runtime, name, fail)
        yield


def test_run_run_capture_launch(call, cache):
    """Parsed, executed, at the third use of the same addresses captured, then launched."""
    assert [call() for _ in range(5)] == ["run", "run", "capture", "launch", "launch"]
    assert (cache.hits, cache.misses, cache.recordings) == (4, 1, 1)


FUNCTIONS = ["streamBeginCapture", "graphInstantiate", "graphLaunch"]


@pytest.mark.parametrize("error", [RuntimeError("refused"), MemoryError("refused"), KeyError("refused")], ids=repr)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_failure_of_cuda_graphs_is_a_warning(name, error, engine, call, cache, limits):
    """Whichever function fails: results are right, there is one warning for all calls, and calls are captured again later."""
    limits(RETRY_AFTER=4)
    with failing(engine, name, error), pytest.warns(RuntimeWarning, match=f"{type(error).__name__}.*refused") as said:
        kinds = [call(scale=scale) for scale in (1.0, 0.5) for _ in range(2 * OFTEN)]
    assert len(said) == 1
    assert "captured again after 4 calls" in str(said[0].message)
    assert cache.recordings == 0
    assert name == "graphLaunch" or kinds.count("run") == len(kinds)
    assert not DEVICE.graphs
    assert [call() for _ in range(3 * OFTEN)][-2:] == ["launch", "launch"]


@pytest.mark.parametrize("name", FUNCTIONS[:2])
def test_an_interrupted_capture_leaves_nothing(name, engine, call, cache):
    """KeyboardInterrupt is raised; later calls are right on the caller's stream, and no graph is left."""
    assert [call(), call()] == ["run", "run"]
    with failing(engine, name, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        call()
    assert [call() for _ in range(3)] == ["run"] * 3
    assert engine.name != "fake" or library().executions[-1].stream == engine.xp.cuda.get_current_stream().ptr
    assert not DEVICE.graphs
    assert (cache.recordings, cache.recording_bytes) == (0, 0)


def test_a_failure_does_not_pause_other_calls(engine, call):
    """A call is captured although another one could not be."""
    with failing(engine, "graphInstantiate", MemoryError()), pytest.warns(RuntimeWarning):
        _ = [call(scale=0.1) for _ in range(3)]
    assert [call(scale=0.2) for _ in range(3)][-1] == "capture"
    assert call(scale=0.1) == "run"


@pytest.mark.parametrize(("kind", "small"), [("pool", 1 << 14), ("pool", 0), ("allocator", 1 << 14), ("allocator", 0)])
def test_no_memory_for_a_workspace(kind, small, engine, cache, limits):
    """The allocator's error is raised with a note on the workspace and the fix; later the same plan gives the same bits."""
    limits(SMALL_BYTES=small)
    q, k, v = (engine.normal(seed, 64, 4, 1024 if engine.name == "cupy" else 40, 2) for seed in range(3))
    out, stats = attention(q, k, v, return_stats=True)
    into = {f"d{name}": engine.nan(*x.shape) for name, x in zip("qkv", (q, k, v), strict=True)}

    def run():
        return [engine.get(x) for x in attention_backward(q, q, k, v, out, stats, deterministic=True, **into)]

    want = run()
    report = explain(q, k, v, backward=True, deterministic=True)
    misses, pool = cache.misses, engine.xp.get_default_memory_pool()
    oom = engine.xp.cuda.memory.OutOfMemoryError

    def allocate(size):
        raise RuntimeError("another allocator's")

    for _ in range(OFTEN):
        pool.free_all_blocks()
        pool.set_limit(size=pool.total_bytes() if kind == "pool" else 0)
        try:
            allocator = engine.xp.cuda.using_allocator(allocate if kind == "allocator" else pool.malloc)
            with allocator, pytest.raises(oom if kind == "pool" else RuntimeError) as raised:
                attention_backward(q, q, k, v, out, stats, deterministic=True, **into)
        finally:
            pool.set_limit(size=0)
        note = f"{report.workspace} bytes"
        assert any(note in text and "max_workspace=" in text for text in raised.value.__notes__), raised.value.__notes__
    for got in (run(), run()):
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)
    assert cache.misses == misses


def test_graphs_of_all_calls_share_one_limit(engine, call, cache):
    """The least recently launched is destroyed, of whichever call; its addresses are counted again."""
    for scale in (0.1, 0.2):
        assert [call(scale=scale) for _ in range(3)][-1] == "capture"
    assert call(scale=0.1) == "launch"
    cache.set_recording_limit(cache.recording_bytes + 100)
    for _ in range(3):
        call(scale=0.3)
    assert cache.recordings == 2
    assert cache.recording_bytes <= cache.recording_limit
    assert [call(scale=scale) for scale in (0.1, 0.2, 0.3)] == ["launch", "run", "launch"]


def test_a_graph_beyond_the_limit_is_not_captured_repeatedly(engine, call, cache):
    """A graph that exceeds the limit alone is destroyed, and the call runs for a while without; 0 turns captures off."""
    cache.set_recording_limit(100)
    assert {call() for _ in range(4 * OFTEN)} == {"run"}
    cache.set_recording_limit(0)
    assert {call(scale=2.0) for _ in range(2 * OFTEN)} == {"run"}
    assert not DEVICE.graphs


def test_old_calls_and_addresses_are_forgotten(engine, call, cache, limits):
    """The least recently used call is removed with its graphs; of many addresses the least recent are counted anew."""
    for scale in (1.0, 2.0, 3.0):
        call(scale=scale)
    for size in (8, 16, 24):
        fp8.quantize(engine.normal(0, 16, 2, size, 2))  # calls without a plan are kept by clear()
    cache.clear()  # the calls with a plan no longer count
    limits(MAX_CALLS=2, MAX_ADDRESS_SETS=3)
    for scale in (0.1, 0.2, 0.1, 0.3):
        for _ in range(4):
            call(scale=scale)
    assert cache.recordings == 2 or engine.name == "cupy"  # whose pool may return two addresses for one result
    assert call(scale=0.1) == "launch"
    assert [call(scale=0.2) for _ in range(3)] == ["run", "run", "capture"]
    outputs = [engine.nan(*call.q.shape) for _ in range(5)]
    for out in (*outputs, *outputs):
        assert call(out) == "run"
    assert [call(outputs[4]) for _ in range(3)] == ["run", "capture", "launch"]


def test_large_copies_are_not_kept(engine, cache, limits):
    """The graph of a call with much memory owns none of it, and runs only where its memory has the address of the capture."""
    limits(SMALL_BYTES=0)
    call = Repeated(engine)
    assert "launch" in [call() for _ in range(2 * OFTEN)]
    assert cache.recording_bytes < cache.recordings * 140_000
    call.q *= 2
    call.want.clear()
    got = [call() for _ in range(3)]
    assert engine.name != "fake" or "launch" in got
    hole = [engine.xp.empty(4096, np.uint8) for _ in range(4)]  # the memory of the call is elsewhere
    call()
    del hole


def test_kernels_are_launched_one_by_one(engine, call, limits):
    """On a busy stream one of many graphs is launched kernel by kernel, with the same results."""
    stats = engine.nan(20, 2, 2, dtype=np.float32)
    options = {"seq_lens_kv": engine.put(np.array([20, 3], np.int32)), "out": call.out, "stats": stats, "return_stats": True}
    large = engine.xp.ones((8192, 8192), np.float32) if engine.name == "cupy" else None
    for _ in range(OFTEN):
        want = engine.get(attention(call.q, call.k, call.v, **options)[0])
    limits(FEW_GRAPHS=0)
    for busy in (False, True):
        engine.xp.cuda.Device().synchronize()
        if busy:
            call.out.fill(np.nan)
            _ = None if large is None else large @ large  # 20 ms
        launches, executions = len(DEVICE.launches), len(library().executions) if engine.name == "fake" else 0
        got = attention(call.q, call.k, call.v, **options)[0]
        if engine.name == "fake":
            assert (len(DEVICE.launches) - launches == 1) is not busy
            assert len(library().executions) == executions
        np.testing.assert_array_equal(engine.get(got), want)


@pytest.mark.parametrize("mode", ["Global", "ThreadLocal", "Relaxed"])
def test_a_replay_breaks_no_capture_of_another_thread(mode, engine, limits):
    """Querying whether the device is busy is safe while another thread captures, in any mode."""
    q, k, v = (engine.normal(seed, 16, 2, 20, 1) for seed in range(3))
    out, stream = engine.nan(*q.shape), engine.xp.cuda.Stream(non_blocking=True)
    for _ in range(OFTEN):
        attention(q, k, v, out=out)
    want, begun, done, ends = engine.get(out), threading.Event(), threading.Event(), []
    engine.xp.cuda.Device().synchronize()
    limits(FEW_GRAPHS=0)

    def other():
        with stream:
            held = engine.xp.zeros((4,), np.float32)
            stream.synchronize()
            stream.begin_capture(getattr(engine.xp.cuda.runtime, f"streamCaptureMode{mode}"))
            held.fill(1)
            begun.set()
            done.wait()
            ends.append(stream.end_capture())

    thread = threading.Thread(target=other)
    thread.start()
    begun.wait()
    out.data.memset_async(0, out.nbytes)
    attention(q, k, v, out=out)
    done.set()
    thread.join()
    assert len(ends) == 1
    np.testing.assert_array_equal(engine.get(out), want)


def test_recording_bytes_are_those_of_the_device(engine, call, cache):
    """recording_bytes is at least half of the decrease of the device's free memory outside CuPy's pool."""
    if engine.name == "fake":
        pytest.skip("the fake CuPy does not count the memory of the driver")
    runtime, pool, taken = engine.xp.cuda.runtime, engine.xp.get_default_memory_pool(), []
    for _ in range(50):  # other processes may use the same GPU: the smallest decrease counts
        cache.clear()
        outputs = [engine.nan(*call.q.shape) for _ in range(101)]
        for number, out in enumerate(outputs):
            for _ in range(OFTEN):
                call(out)
            if number == 0:
                before, reserved = runtime.memGetInfo()[0], pool.total_bytes()
        taken.append(before - runtime.memGetInfo()[0] - (pool.total_bytes() - reserved))
        assert cache.recordings == 101
        if taken[-1] <= 2 * cache.recording_bytes:
            break
    assert min(taken) <= 2 * cache.recording_bytes <= 2 * cache.recording_limit


def test_the_oldest_calls_are_removed_while_another_thread_adds_one():
    """The search for the oldest one starts again: a call does not raise because of the calls of other threads."""

    class Shared(dict):
        added = 0

        def __iter__(self):
            found = super().__iter__()
            if self.added < 2:  # as another thread would
                self.added += 1
                self[f"added {self.added}"] = None
            return found

    kept = Shared(dict.fromkeys("abcd"))
    replay_cache.remove_oldest(kept, 3)
    assert list(kept) == ["d", "added 1", "added 2"]
