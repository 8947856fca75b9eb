"""The plan cache: its limits, its counts, failures to destroy what it evicts, and the sessions of threads and contexts."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import fake_cupy
import numpy as np
import pytest
from fake_cupy import DEVICE, library
from replayed_calls import OFTEN

import cupy_sdpa
from cupy_sdpa import CudnnError, attention, get_plan_cache
from cupy_sdpa.core.cudnn_engine.plan import Plan
from cupy_sdpa.core.cudnn_engine.plan_cache import PlanCache

PROBLEMS = [cupy_sdpa.problem(*[(64, 4, n, 2)] * 3, dtype="float16") for n in range(1, 6)]


class FakePlan(Plan):
    """A plan that counts calls of close(), which may fail."""

    def __init__(self, fail=None):
        self.fail, self.used, self.closed = fail, False, 0

    def close(self):
        self.closed += 1
        if self.fail:
            raise self.fail


def use(kept, number, plan=None):
    """The plan of a problem, which is stored if missing."""
    return kept.use(PROBLEMS[number], lambda: plan or FakePlan(), lambda found: found)


def test_the_least_recently_used_plan_is_evicted():
    """Beyond the limit it is closed once; a look-up and a run without a look-up are uses; a new plan is never evicted."""
    kept = PlanCache(limit=2)
    one, two = use(kept, 0), use(kept, 1)
    assert use(kept, 0) is one
    three = use(kept, 2)
    assert (one.closed, two.closed, three.closed, len(kept)) == (0, 1, 0, 2)
    one.used = True
    use(kept, 3)
    assert (one.closed, three.closed) == (0, 1)
    kept.set_limit(1)
    (last,) = (kept.get(problem) for problem in PROBLEMS if kept.get(problem))
    last.used = True
    new = use(kept, 4)
    assert (last.closed, new.closed, len(kept)) == (1, 0, 1)


@pytest.mark.parametrize("how", ["evicted", "clear", "set_limit", "built_twice"])
def test_a_failure_to_close_a_plan_warns(how):
    """The others are closed, and the new plan is cached and used."""
    kept, bad = PlanCache(limit=3), FakePlan(CudnnError("failed to destroy"))
    stays, others = FakePlan(), []
    if how != "built_twice":
        use(kept, 0, bad)
        others = [use(kept, 1), use(kept, 2)]
    calls = {
        "evicted": lambda: use(kept, 3, stays), "clear": kept.clear, "set_limit": lambda: kept.set_limit(1),
        "built_twice": lambda: kept.use(PROBLEMS[0], lambda: use(kept, 0, stays) and bad, lambda found: found),
    }  # fmt: skip
    with pytest.warns(RuntimeWarning, match="a plan could not be destroyed: CudnnError: failed to destroy") as said:
        assert calls[how]() in (stays, None)
    assert len(said) == 1
    assert (bad.closed, stays.closed) == (1, 0)
    closed = {"clear": [1, 1], "set_limit": [1, 0], "built_twice": []}
    assert [plan.closed for plan in others] == closed.get(how, [0, 0])
    assert stays in [kept.get(problem) for problem in PROBLEMS] or how in ("clear", "set_limit")


def test_a_new_plan_is_kept_even_if_eviction_is_interrupted():
    """An exception during the eviction does not lose the new plan: the next look-up returns it."""
    kept, new = PlanCache(limit=1), FakePlan()
    use(kept, 0, FakePlan(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        use(kept, 1, new)
    assert use(kept, 1) is new
    assert new.closed == 0


def test_of_two_plans_built_at_once_the_first_stored_stays():
    """Two threads may build a plan of one problem; the second plan is closed, and both threads use the first."""
    kept, entered, built = PlanCache(), threading.Barrier(2), []

    def build():
        entered.wait(10)  # both are in build, which does not hold the lock
        built.append(FakePlan())
        return built[-1]

    with ThreadPoolExecutor(2) as threads:
        ran = list(threads.map(lambda _: kept.use(PROBLEMS[0], build, lambda found: found), range(2)))
    assert len(built) == 2
    assert ran[0] is ran[1]
    assert ran[0].closed == 0
    assert sorted(plan.closed for plan in built) == [0, 1]


def test_a_plan_is_not_destroyed_while_it_runs():
    """clear() in another thread waits for the running execution."""
    kept, running, done = PlanCache(), threading.Event(), []

    def run(plan):
        running.set()
        clearing.join(0.2)
        done.append(plan.closed)

    clearing = threading.Thread(target=lambda: (running.wait(10), kept.clear()))
    clearing.start()
    kept.use(PROBLEMS[0], FakePlan, run)
    clearing.join(10)
    assert done == [0]
    assert len(kept) == 0


# Through calls


@pytest.fixture
def calls(fake):
    """Makes repeated calls with some numbers of keys on preallocated results."""
    x = fake.ones((16, 2, 8, 1), np.float16, order="F")

    def call(*lengths, scale=1.0, times=OFTEN):
        for length in lengths:
            out = fake.empty_like(x)
            for _ in range(times):
                attention(x, x[:, :, :length], x[:, :, :length], out=out, scale=scale)
        fake.cuda.Device().synchronize()

    return call


def test_counts_table_and_clear(calls):
    """Hits, misses, bytes and graphs; one row for each plan, the newest first; clear() restarts the counts, not the limits."""
    cache = get_plan_cache()
    cache.set_limit(50)
    calls(5, 6)
    assert (cache.hits, cache.misses, cache.size, cache.recordings) == (2 * OFTEN - 2, 2, 2, 2)
    title, newest, oldest = str(cache).splitlines()
    graphs = f"2 captured CUDA graphs, {cache.recording_bytes} bytes"
    assert title == f"plan cache: 2 of at most 50, {cache.bytes} bytes, {cache.hits} hits, 2 misses; {graphs}"
    assert "6 keys" in newest
    assert "5 keys" in oldest
    for words in ("engine 2", "knobs KERNEL_CFG=3", "workspace 4096 B", "time ", "built"):
        assert words in newest
    page = cache._repr_html_()
    assert (page.count("<tr>"), graphs in page, "KERNEL_CFG=3" in page) == (3, True, True)
    cache.clear()
    assert (cache.hits, cache.misses, cache.size, cache.bytes, cache.recordings, cache.recording_bytes) == (0,) * 6
    assert cache.limit == 50
    assert not library().live
    assert not DEVICE.graphs


def test_a_lower_limit_takes_effect_at_once(calls):
    """Of plans and of the bytes of graphs; 0 bytes turn captures off."""
    cache = get_plan_cache()
    calls(3, 4, 5, 6, times=1)
    cache.set_limit(2)
    assert library().live == {"EXECUTION_PLAN": 2}
    calls(5, 6)
    assert cache.misses == 4
    each = cache.recording_bytes // 2
    cache.set_recording_limit(each)
    cache.set_recording_limit(each)
    assert (cache.recordings, len(DEVICE.graphs)) == (1, 1)
    cache.set_recording_limit(0)
    calls(5, 6)
    assert (cache.recordings, cache.recording_bytes, cache.recording_limit) == (0, 0, 0)


@pytest.mark.parametrize("failing", ["graph", "descriptor", "both"])
def test_one_failure_does_not_stop_the_rest(failing, calls, fake, monkeypatch):
    """All plans and their graphs are destroyed although some cannot be; each failure is a warning."""
    calls(5, 6)
    calls(5, scale=2.0)
    destroy, remove = fake.cuda.runtime.graphDestroy, library().cudnnBackendDestroyDescriptor

    def fail(graph):
        destroy(graph)
        raise RuntimeError("sticky")

    functions = {
        "graph": (fake.cuda.runtime, "graphDestroy", fail),
        "descriptor": (library(), "cudnnBackendDestroyDescriptor", lambda pointer: remove(pointer) or 5000),
    }
    with monkeypatch.context() as patch:
        for name, function in functions.items():
            if failing in (name, "both"):
                patch.setattr(*function)
        with pytest.warns(RuntimeWarning, match="sticky|5000"):
            get_plan_cache().clear()
    assert not library().live
    assert not DEVICE.graphs
    assert (get_plan_cache().recordings, get_plan_cache().recording_bytes) == (0, 0)


def in_thread(function):
    """The result of a function in a new thread, which then ends."""
    got = []
    thread = threading.Thread(target=lambda: got.append(function()))
    thread.start()
    thread.join(10)
    return got[0]


def test_sessions(fake):
    """A context and a thread have their own plans; a new thread takes over an ended thread's plans."""
    fake.cuda.Device().synchronize()
    mine = get_plan_cache()
    assert get_plan_cache() is mine
    ended = {id(in_thread(get_plan_cache)) for _ in range(20)}
    assert len(ended) == 1
    assert id(mine) not in ended
    barrier = threading.Barrier(16)
    with ThreadPoolExecutor(16) as threads:
        got = list(threads.map(lambda _: (get_plan_cache(), barrier.wait(10))[0], range(16)))
    assert len(set(map(id, got))) == 16
    fake_cupy.driver.new_context()
    fake.cuda.runtime.getDevice()
    assert id(get_plan_cache()) not in {id(mine), *ended, *map(id, got)}


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_has_new_sessions(calls):
    """After a fork the child neither uses nor destroys plans of the parent."""
    calls(5)
    mine, live = get_plan_cache(), library().live
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        new = get_plan_cache()
        right = new is not mine and new.size == 0 and mine.size == 1
        os.write(writer, b"new" if right and library().live == live else b"old")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 3) == b"new"
    assert get_plan_cache() is mine
