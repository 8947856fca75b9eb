"""The plan cache and the sessions of threads, with plans that need no GPU."""

import gc
import os
import threading
from typing import ClassVar

import pytest
from cases import Case

from cupy_sdpa import CudnnError, Unsupported
from cupy_sdpa.graph.attention_forward import forward
from cupy_sdpa.plans import sessions
from cupy_sdpa.plans.plan import Plan, PlanInfo
from cupy_sdpa.plans.plan_cache import PlanCache

PROBLEMS = [Case(f"p{n}", sq=n + 1).problem() for n in range(40)]


class FakePlan(Plan):
    """A plan that counts calls of close(), which may fail."""

    def __init__(self, fail=None):
        self.fail = fail
        self.used = False
        self.info = PlanInfo(2, (("TILE_M", 3),), 256, (), 1.0, False, False, 70000, (), 91900, forward(PROBLEMS[0]))
        self.closed = 0

    def close(self):
        self.closed += 1
        if self.fail:
            raise self.fail


def itself(plan):
    return plan


def refuse(text="engine 2: no"):
    raise Unsupported(text)


def test_a_plan_is_built_once():
    """The second look-up of a problem returns the plan of the first."""
    kept = PlanCache()
    first = kept.use(PROBLEMS[0], FakePlan, itself)
    again = kept.use(Case("another name, the same problem", sq=1).problem(), FakePlan, itself)
    assert first is again
    assert (kept.hits, kept.misses, len(kept)) == (1, 1, 1)


def test_the_least_recently_used_plan_is_evicted_and_closed():
    """Beyond the limit it is closed once, before the call returns."""
    kept = PlanCache(limit=2)
    one, two = (kept.use(p, FakePlan, itself) for p in PROBLEMS[:2])
    kept.use(PROBLEMS[0], FakePlan, itself)
    kept.use(PROBLEMS[2], FakePlan, itself)
    assert (one.closed, two.closed, len(kept)) == (0, 1, 2)
    assert kept.use(PROBLEMS[0], FakePlan, itself) is one


def test_refusals_are_cached_as_text():
    """A refusal is not planned again; no exception is cached, because its frames keep arrays alive."""
    kept = PlanCache()
    asked, text = [], "engine 2: no, asked for the first time"
    for _ in range(3):
        with pytest.raises(Unsupported, match=text):
            kept.use(PROBLEMS[0], lambda: asked.append(1) or refuse(text), itself)
    assert len(asked) == 1
    gc.collect()
    assert not any(isinstance(o, Unsupported) and str(o) == text for o in gc.get_objects())


def test_other_errors_are_not_cached():
    """An error that may be temporary, such as a lack of memory, is not cached."""
    kept = PlanCache()

    def fail():
        raise MemoryError

    with pytest.raises(MemoryError):
        kept.use(PROBLEMS[0], fail, itself)
    assert isinstance(kept.use(PROBLEMS[0], FakePlan, itself), FakePlan)


def test_a_plan_that_runs_without_look_ups_is_not_evicted():
    """A run counts as a use; a plan that was just built is never evicted."""
    kept = PlanCache(limit=2)
    used, idle = (kept.use(problem, FakePlan, itself) for problem in PROBLEMS[:2])
    used.used = True
    kept.use(PROBLEMS[2], FakePlan, itself)
    assert (used.closed, idle.closed) == (0, 1)
    kept.set_limit(1)
    (last,) = (kept.get(problem) for problem in PROBLEMS if kept.get(problem))
    last.used = True
    new = kept.use(PROBLEMS[3], FakePlan, itself)
    assert (last.closed, new.closed, len(kept)) == (1, 0, 1)


def test_a_failure_to_close_an_evicted_plan_warns():
    """The new plan is cached and runs; the evicted one is removed."""
    kept = PlanCache(limit=1)
    old = kept.use(PROBLEMS[0], lambda: FakePlan(CudnnError("failed to destroy")), itself)
    with pytest.warns(RuntimeWarning, match="failed to destroy"):
        new = kept.use(PROBLEMS[1], FakePlan, itself)
    assert (old.closed, new.closed, len(kept)) == (1, 0, 1)
    assert kept.use(PROBLEMS[1], refuse, itself) is new


def test_a_new_plan_is_kept_even_if_eviction_is_interrupted():
    """An exception during the eviction does not lose the new plan: the next look-up returns it."""
    kept = PlanCache(limit=1)
    kept.use(PROBLEMS[0], lambda: FakePlan(KeyboardInterrupt()), itself)
    built = []
    with pytest.raises(KeyboardInterrupt):
        kept.use(PROBLEMS[1], lambda: built.append(FakePlan()) or built[0], itself)
    assert kept.use(PROBLEMS[1], refuse, itself) is built[0]
    assert built[0].closed == 0


@pytest.mark.parametrize("how", [PlanCache.clear, lambda kept: kept.set_limit(1)], ids=["clear", "set_limit"])
def test_one_failure_does_not_stop_an_eviction(how):
    """Every evicted plan is closed although some fail; each failure is a warning."""
    kept = PlanCache()
    plans = [
        kept.use(p, lambda n=n: FakePlan(CudnnError(f"{n}") if n < 2 else None), itself) for n, p in enumerate(PROBLEMS[:5])
    ]
    with pytest.warns(RuntimeWarning) as said:
        how(kept)
    assert [plan.closed for plan in plans[:4]] == [1] * 4
    assert len(kept) == len([plan for plan in plans if not plan.closed])
    assert [str(warning.message) for warning in said] == [f"a plan could not be destroyed: CudnnError: {n}" for n in (0, 1)]


@pytest.mark.parametrize("loser", ["replaced", "built_twice"])
def test_a_failure_to_close_a_replaced_plan_warns(loser):
    """For either of two plans of one problem."""
    kept, bad = PlanCache(), FakePlan(CudnnError("failed to destroy"))
    if loser == "replaced":
        kept.use(PROBLEMS[0], lambda: bad, itself)
        with pytest.warns(RuntimeWarning, match="failed to destroy"):
            kept.put(PROBLEMS[0], stays := FakePlan())
    else:
        stays = FakePlan()
        with pytest.warns(RuntimeWarning, match="failed to destroy"):
            assert kept.use(PROBLEMS[0], lambda: kept.put(PROBLEMS[0], stays) or bad, itself) is stays
    assert (bad.closed, stays.closed) == (1, 0)
    assert kept.get(PROBLEMS[0]) is stays


class FakeRecording:
    """A captured graph of some bytes, stored under its name in ``home``; its close() may fail."""

    home: ClassVar[dict] = {}

    def __init__(self, name, size=100, fail=None):
        self.name, self.size, self.fail, self.closed, self.used = name, size, fail, 0, False

    def close(self):
        assert self.name not in self.home  # no call launches it any more
        self.closed += 1
        if self.fail:
            raise self.fail


@pytest.fixture
def recordings(monkeypatch):
    """The captured graphs of a cache with a limit of 350 bytes."""
    monkeypatch.setattr(FakeRecording, "home", {})
    kept = PlanCache()
    kept.set_recording_limit(350)
    return kept.recorded


def record(recordings, *names, **more):
    made = [FakeRecording(name, **more) for name in names]
    for recording in made:
        recordings.add(recording, FakeRecording.home, recording.name)
    return made


def test_graphs_that_were_not_launched_are_evicted(recordings):
    """Beyond the limit, the oldest of them is removed from its call and destroyed, once."""
    a, b, c = record(recordings, "a", "b", "c")
    a.used = True
    (d,) = record(recordings, "d")
    assert [x.closed for x in (a, b, c, d)] == [0, 1, 0, 0]
    assert set(FakeRecording.home) == {"a", "c", "d"}
    (e,) = record(recordings, "e", size=240)
    assert [x.closed for x in (a, b, c, d, e)] == [1, 1, 1, 0, 0]
    assert (len(recordings), recordings.bytes) == (2, 340)


def test_a_graph_larger_than_the_limit_is_destroyed(recordings):
    """At once, and the others stay."""
    made = record(recordings, "a", "b") + record(recordings, "c", size=351)
    assert [x.closed for x in made] == [0, 0, 1]
    assert (len(recordings), recordings.bytes, set(FakeRecording.home)) == (2, 200, {"a", "b"})


def test_a_graph_that_cannot_be_destroyed_is_removed(recordings):
    """Its error is raised; the new one stays, and the count of bytes is right."""
    record(recordings, "a", size=300, fail=RuntimeError("destroy"))
    with pytest.raises(RuntimeError, match="destroy"):
        record(recordings, "b")
    assert (len(recordings), recordings.bytes, set(FakeRecording.home)) == (1, 100, {"b"})


def test_the_bytes_of_captured_graphs_can_be_limited():
    """set_recording_limit() takes effect at once, 0 disables captures; a negative limit raises. Attributes and title have the
    counts.
    """
    kept = PlanCache()
    assert kept.recording_limit == 128 << 20
    made = record(kept.recorded, "a", "b", "c")
    assert (kept.recordings, kept.recording_bytes) == (3, 300)
    assert "3 captured CUDA graphs, 300 bytes" in str(kept)
    assert "3 captured CUDA graphs, 300 bytes" in kept._repr_html_()
    kept.set_recording_limit(200)
    assert [x.closed for x in made] == [1, 0, 0]
    kept.set_recording_limit(0)
    assert (kept.recordings, kept.recording_bytes, kept.recording_limit) == (0, 0, 0)
    with pytest.raises(ValueError, match="limit is -1 bytes"):
        kept.set_recording_limit(-1)


def test_clear_destroys_everything():
    """After clear() the cache is empty, every plan and graph is closed, and counts restart; the limit is unchanged."""
    kept = PlanCache(limit=5)
    plans = [kept.use(p, FakePlan, itself) for p in PROBLEMS[:5]]
    (graph,) = record(kept.recorded, "of no plan")
    kept.clear()
    assert [plan.closed for plan in plans] == [1] * 5
    assert (graph.closed, kept.recordings) == (1, 0)
    assert (len(kept), kept.hits, kept.misses, kept.limit) == (0, 0, 0, 5)


def test_a_lower_limit_evicts_at_once():
    """set_limit() evicts; a limit below one raises."""
    kept = PlanCache(limit=5)
    plans = [kept.use(p, FakePlan, itself) for p in PROBLEMS[:5]]
    kept.set_limit(2)
    assert [plan.closed for plan in plans] == [1, 1, 1, 0, 0]
    with pytest.raises(ValueError, match="the limit is 0"):
        kept.set_limit(0)


def test_the_repr_is_a_table():
    """One row per plan, the newest first, with a description of the problem."""
    kept = PlanCache()
    kept.use(PROBLEMS[0], FakePlan, itself)
    with pytest.raises(Unsupported):
        kept.use(PROBLEMS[1], refuse, itself)
    lines = str(kept).splitlines()
    assert lines[0] == "plan cache: 2 of at most 256, 70000 bytes, 0 hits, 2 misses; 0 captured CUDA graphs, 0 bytes"
    assert lines[1].endswith("engine refused")
    assert lines[2].endswith("engine 2, knobs TILE_M=3, workspace 256 B, size 70000 B, time 1.0 ms, built")


def test_of_two_plans_built_at_once_the_first_stored_stays():
    """Two threads may build a plan of one problem; the second plan is closed, and both threads use the first."""
    kept = PlanCache()
    entered, go = threading.Barrier(2), threading.Event()
    built, ran = [], []

    def build():
        entered.wait(10)  # both are in build, which does not hold the lock
        go.wait(10)
        built.append(FakePlan())
        return built[-1]

    threads = [threading.Thread(target=lambda: ran.append(kept.use(PROBLEMS[0], build, itself))) for _ in range(2)]
    for thread in threads:
        thread.start()
    go.set()
    for thread in threads:
        thread.join(20)
    assert len(built) == 2
    assert ran[0] is ran[1]
    assert sorted(plan.closed for plan in built) == [0, 1]
    assert ran[0].closed == 0


def test_a_plan_is_not_destroyed_while_it_runs():
    """clear() in another thread waits for the running execution."""
    kept = PlanCache()
    running, done = threading.Event(), []

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


class FakeSession:
    """A session without a handle."""

    def __init__(self):
        self.cache = PlanCache()


@pytest.fixture
def session(monkeypatch):
    """Sessions without cuDNN, in a process that has had none."""
    monkeypatch.setattr(sessions, "Session", FakeSession)
    monkeypatch.setattr(sessions, "_idle", {})
    monkeypatch.setattr(sessions, "_thread", threading.local())
    return sessions.session


def in_thread(function):
    """The result of a function in a new thread, which then ends."""
    got = []
    thread = threading.Thread(target=lambda: got.append(function()))
    thread.start()
    thread.join(10)
    return got[0]


def test_each_context_has_its_own_session(session):
    """Two contexts never share plans; one context keeps its session."""
    assert session(1) is session(1)
    assert session(1) is not session(2)


def test_live_threads_never_share_a_session(session):
    """Sixteen concurrent threads have sixteen sessions."""
    barrier = threading.Barrier(16)
    got = []

    def work():
        got.append(session(1))
        barrier.wait(10)

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(set(map(id, got))) == 16


def test_a_new_thread_reuses_the_session_of_an_ended_one(session):
    """There are as many sessions as concurrent threads, so short-lived threads do not accumulate handles."""
    kept = [in_thread(lambda: session(1)) for _ in range(20)]
    assert len(set(map(id, kept))) == 1
    assert kept[0] is not session(2)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_has_new_sessions(session):
    """After a fork the child neither uses nor destroys objects of the parent."""
    mine = session(1)
    mine.cache.use(PROBLEMS[0], FakePlan, itself)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        new = session(1)
        os.write(writer, b"new" if new is not mine and len(new.cache) == 0 else b"old")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 3) == b"new"
    assert session(1) is mine


def test_counts_and_replacement_of_cached_plans():
    """size and bytes are correct, also after a plan is replaced; refusals take no bytes."""
    kept = PlanCache()
    first = kept.use(PROBLEMS[0], FakePlan, itself)
    with pytest.raises(Unsupported):
        kept.use(PROBLEMS[1], refuse, itself)
    assert (kept.size, kept.bytes) == (2, 70000)
    better = FakePlan()
    kept.put(PROBLEMS[0], better)
    assert (first.closed, better.closed, kept.size) == (1, 0, 2)
    assert kept.get(PROBLEMS[0]) is better
    assert kept.get(PROBLEMS[2]) is None
    assert (kept.hits, kept.misses) == (0, 2)
    assert kept.use(PROBLEMS[0], refuse, itself) is better
    page = kept._repr_html_()
    assert page.count("<tr>") == 3
    assert "TILE_M=3" in page
    assert "refused" in page


def test_two_devices_share_no_plan(session):
    """The same problem on two devices: two plans with two handles in two caches."""
    caches = [sessions.session(context).cache for context in (1, 2)]
    plans = [kept.use(PROBLEMS[0], FakePlan, itself) for kept in caches]
    assert caches[0] is not caches[1]
    assert plans[0] is not plans[1]
    assert [kept.get(PROBLEMS[0]) for kept in caches] == plans
    caches[0].clear()
    assert [plan.closed for plan in plans] == [1, 0]
