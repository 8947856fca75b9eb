"""Selecting, running and destroying plans; cuDNN, its descriptors and CuPy are fakes."""

import contextlib
from types import SimpleNamespace

import pytest
from stand_ins import CASE, Descriptor, candidate, fake_plan, uids

import cupy_sdpa
from cupy_sdpa import CudnnError, Unsupported
from cupy_sdpa.calls import call
from cupy_sdpa.calls.call import Call, LaunchRecord, with_plan
from cupy_sdpa.device import cupy_runtime, driver
from cupy_sdpa.graph.attention_forward import forward
from cupy_sdpa.plans import engines, plan, plan_cache, plan_file, planner, sessions
from cupy_sdpa.plans.engines import EngineSearch
from cupy_sdpa.plans.plan import Target
from cupy_sdpa.plans.planner import ORDERED, ORDERED_SINCE, plan_for

DETERMINISTIC = CASE.gradient_problem(deterministic=True)


@pytest.fixture
def cudnn(monkeypatch):
    """A library with a version and no functions."""
    library = SimpleNamespace(version=ORDERED_SINCE, build="test", last_error=list)
    for module in (plan, planner, engines):
        monkeypatch.setattr(module, "library", lambda: library)
    return library


class Made:
    """Stands in for :func:`cupy_sdpa.plans.planner.load_or_build`: every plan needs ``workspace`` bytes, those of the ordered engine 10."""

    def __init__(self, workspace):
        self.workspace, self.asked = workspace, []

    def __call__(self, graph, target, *, config=None, limit=None, refused=(), disk_cache=None):
        self.asked.append(config)
        need = 10 if config else self.workspace
        if limit is not None and need > limit:
            raise Unsupported(f"cuDNN has no engine for this graph:\n  engine 6: it needs {need} bytes, {limit} are allowed")
        return SimpleNamespace(info=SimpleNamespace(workspace=need, refused=tuple(refused)))


@pytest.mark.parametrize(
    ("limit", "engine"), [(None, [None]), (1000, [None]), (999, [None, ORDERED])], ids=["no_limit", "within", "beyond"]
)
def test_max_workspace_selects_the_deterministic_engine(limit, engine, cudnn, monkeypatch):
    """Within the limit, or without one, dQ is written directly; beyond it the ordered engine is used, and the reason is kept."""
    monkeypatch.setattr(planner, "load_or_build", made := Made(1000))
    chosen = plan_for(CASE.gradient_problem(deterministic=True, max_workspace=limit), Target("h200", 90))
    assert made.asked == engine
    assert [reason for reason in chosen.info.refused if "1000 bytes, 999 are allowed" in reason] == [
        "  engine 6: it needs 1000 bytes, 999 are allowed"
    ] * (len(engine) - 1)


@pytest.mark.parametrize(
    ("version", "capability"),
    [(ORDERED_SINCE - 1, 90), (ORDERED_SINCE, 80), (ORDERED_SINCE, 89), (92800, 100), (92800, 103), (92800, 120)],
)
def test_the_ordered_engine_is_for_hopper_only(version, capability, cudnn, monkeypatch):
    """On other GPUs, and with an older cuDNN, gradients beyond max_workspace are refused without trying the ordered engine."""
    cudnn.version = version
    monkeypatch.setattr(planner, "load_or_build", made := Made(1000))
    with pytest.raises(Unsupported, match=r"a Hopper GPU; .*compute capability") as refused:
        plan_for(CASE.gradient_problem(deterministic=True, max_workspace=999), Target("other", capability))
    assert "999 are allowed" in str(refused.value)
    assert made.asked == [None]


def test_sums_of_score_gradients_never_use_the_ordered_engine(cudnn, monkeypatch):
    """cuDNN writes the gradients of bias and captured arrays only where dQ is written directly; beyond max_workspace they are
    refused.
    """
    monkeypatch.setattr(planner, "load_or_build", made := Made(1000))
    shape = (64, 2, 16, 1)
    asked = cupy_sdpa.problem(
        shape, shape, shape, dtype="float16", backward=True, deterministic=True, max_workspace=999, return_dtensors=True,
        score_mod=lambda s, b, h, i, j, t: s + t[i, j], tensors={"t": (16, 16)},
    )  # fmt: skip
    assert asked.ds_reductions
    with pytest.raises(Unsupported, match="999 are allowed"):
        plan_for(asked, Target("h200", 90))
    assert made.asked == [None]


class Handle:
    """A handle that stores the streams that were set."""

    def __init__(self):
        self.streams = []

    def set_stream(self, stream):
        self.streams.append(stream)


@pytest.fixture
def device(monkeypatch):
    """A GPU whose free memory must not be queried, and a session on it: ``handle``, ``cache``, and the current ``stream``."""

    def read(*_):
        raise AssertionError("the free memory was read")

    session = SimpleNamespace(handle=Handle(), cache=plan_cache.PlanCache(), stream=7)
    cuda = SimpleNamespace(runtime=SimpleNamespace(memGetInfo=read))
    monkeypatch.setattr(cupy_runtime, "cupy", lambda: SimpleNamespace(cuda=cuda, get_default_memory_pool=read))
    monkeypatch.setattr(driver, "context_id", lambda: 1)
    for name, value in {"capturing": False, "model": "h200", "capability": 90}.items():
        monkeypatch.setattr(cupy_runtime, name, lambda *_, value=value: value)
    monkeypatch.setattr(cupy_runtime, "stream", lambda: session.stream)
    monkeypatch.setattr(sessions, "existing_session", lambda context: session)
    monkeypatch.setattr(sessions, "session", lambda context: session)
    monkeypatch.setattr(call, "unsupported_reasons", lambda problem, number: [])
    return session


@pytest.mark.cudnn  # the key of a stored plan contains the build of the library
def test_a_deterministic_plan_does_not_depend_on_free_memory(device, monkeypatch):
    """Planning never queries the free memory, so the same problem always gets the same engine."""
    targets = []
    monkeypatch.setattr(planner, "plan_for", lambda problem, target: targets.append(target) or fake_plan())
    for _ in range(2):
        with_plan(DETERMINISTIC, 0, lambda session, found: None)
    assert targets == [Target("h200", 90, device.handle)]


@pytest.mark.cudnn  # the key of a stored plan contains the build of the library
def test_every_run_is_on_the_current_stream(device, monkeypatch):
    """The handle gets the stream that is current at the run, not that at the build of the plan."""
    monkeypatch.setattr(planner, "plan_for", lambda problem, target: fake_plan())
    seen = []
    for device.stream in (7, 9, 7):
        with_plan(CASE.problem(), 0, lambda session, found: seen.append(session.handle.streams[-1]))
    assert seen == [7, 9, 7]


@pytest.mark.cudnn  # the key of a stored plan contains the build of the library
def test_a_plan_is_built_on_the_current_stream(device, monkeypatch):
    """During the build the handle has no stream that may have been destroyed."""
    seen = []
    monkeypatch.setattr(planner, "plan_for", lambda problem, target: seen.append(list(device.handle.streams)) or fake_plan())
    with_plan(CASE.problem(), 0, lambda session, found: None)
    assert seen == [[7]]


class Memory:
    """A fake of :func:`cupy_sdpa.device.memory.allocate`, which raises ``error`` if it is set."""

    def __init__(self, error=None):
        self.error = error

    def __call__(self, size):
        if self.error:
            raise self.error
        return SimpleNamespace(ptr=1 << 40)


def a_call(ran):
    """A call with all its arrays, and a plan with a workspace of 12345 bytes."""
    problem = CASE.problem()
    arrays = {spec.name: SimpleNamespace(data=SimpleNamespace(ptr=16), nbytes=0) for spec in problem.tensors}
    made = SimpleNamespace(
        info=SimpleNamespace(workspace=12345), execute=lambda addresses, scalars, workspace: ran.append(workspace),
        set_stream=lambda stream: ran.append(("stream", stream)), keep=lambda: ran.append("kept"),
    )  # fmt: skip
    return Call(problem, arrays, {}, on_gpu=True), made


@pytest.mark.parametrize("error", [MemoryError("pool"), RuntimeError("another allocator's")], ids=lambda e: type(e).__name__)
def test_no_memory_for_the_workspace_is_an_error_of_this_call_only(error, device, monkeypatch):
    """The allocator's error is raised, with a note on the workspace and the remedy; the next call uses the same plan."""
    ran = []
    asked, made = a_call(ran)
    monkeypatch.setattr(cupy_runtime, "allocate", memory := Memory(error))
    with pytest.raises(type(error)) as raised:
        asked._launch(made)
    assert raised.value is error
    assert any("12345 bytes" in note and "max_workspace=" in note for note in raised.value.__notes__)
    memory.error = None
    asked._launch(made)
    assert ran == [1 << 40]


def test_enqueue_uses_the_captured_stream(device, monkeypatch):
    """A capture enqueues on the captured stream, with the workspace of the call."""
    ran = []
    asked, made = a_call(ran)
    monkeypatch.setattr(cupy_runtime, "allocate", Memory())
    asked.launched = LaunchRecord((made,), 12345, True)
    device.stream = 11
    asked.enqueue()
    assert ran == [("stream", 11), 1 << 40]


def test_a_plan_in_a_users_capture_is_never_destroyed(device, monkeypatch):
    """The user's CUDA graph contains the plan's kernels, so the plan is kept and the call is not cached."""
    ran = []
    asked, made = a_call(ran)
    monkeypatch.setattr(cupy_runtime, "allocate", Memory())
    monkeypatch.setattr(cupy_runtime, "capturing", lambda: True)
    asked._launch(made)
    assert ran == ["kept", 1 << 40]


class Dependent:
    """An object that depends on a plan."""

    def __init__(self, log, fail=None):
        self.log, self.fail = log, fail

    def close(self):
        self.log.append(self)
        if self.fail:
            raise self.fail


def test_a_plan_closes_its_dependents_first(cudnn):
    """Every dependent is closed once, then the plan; a second close() does not close them again."""
    descriptor, log = Descriptor(), []
    made = fake_plan(descriptor)
    made.dependents |= {Dependent(log) for _ in range(3)}
    expected = set(made.dependents)
    descriptor.close = lambda: log.append("plan")
    made.close()
    assert set(log[:3]) == expected
    assert log[3:] == ["plan"]
    made.close()
    assert log[4:] == ["plan"]


@pytest.mark.parametrize("failing", ["dependent", "descriptor", "both"])
def test_one_failure_does_not_stop_the_rest_of_a_close(failing, cudnn):
    """Every dependent and the descriptor are closed although some fail; then the failure is raised."""
    descriptor, log = Descriptor(fail=RuntimeError("destroy") if failing != "dependent" else None), []
    made = fake_plan(descriptor)
    fail = RuntimeError("dependent") if failing != "descriptor" else None
    made.dependents |= {Dependent(log), Dependent(log), Dependent(log, fail), Dependent(log, fail)}
    with pytest.raises(RuntimeError, match="dependent" if failing == "dependent" else "destroy"):
        made.close()
    assert len(log) == 4
    assert descriptor.closed == 1
    assert not made.dependents


def test_a_kept_plan_is_never_destroyed(cudnn):
    """After keep() only the dependents are closed: a user's CUDA graph may still launch the plan's kernels."""
    descriptor, log = Descriptor(), []
    made = fake_plan(descriptor)
    made.dependents.add(Dependent(log))
    made.keep()
    made.close()
    assert len(log) == 1
    assert descriptor.closed == 0


REJECTED = {
    "too_much_workspace": (lambda d: None, 999, None),
    "refused_by_cudnn": (lambda d: setattr(d, "finalizing", Unsupported("no")), None, None),
    "kernel_does_not_compile": (lambda d: setattr(d, "finalizing", CudnnError("no kernel", 4001)), None, None),
    "no_device_memory": (lambda d: setattr(d, "finalizing", CudnnError("no memory", 4004)), None, CudnnError),
    "no_host_memory": (lambda d: setattr(d, "finalizing", CudnnError("no memory", 4003)), None, CudnnError),
    "interrupted": (lambda d: setattr(d, "finalizing", KeyboardInterrupt()), None, KeyboardInterrupt),
}


@pytest.mark.parametrize("name", REJECTED)
def test_a_rejected_plan_is_destroyed(name, cudnn, monkeypatch):
    """A plan that cuDNN refuses, or that needs too much workspace, is closed at once; the reason is kept.

    A lack of memory is an error: it may be temporary, and another engine would give other bits.
    """
    prepare, limit, raised = REJECTED[name]
    made = Descriptor()
    prepare(made)
    monkeypatch.setattr(engines, "Descriptor", lambda kind: made)
    monkeypatch.setattr(engines, "_number_and_notes", lambda config: (2, ()))
    search = EngineSearch(Descriptor(), None, None, limit, lambda size: size, [])
    with pytest.raises(raised) if raised else contextlib.nullcontext():
        assert search._try(Descriptor()) is None
    assert made.closed == 1
    assert len(search.refused) == (raised is None)


def test_a_plan_within_the_limit_is_the_callers_to_close(cudnn, monkeypatch):
    """The plan of an accepted config is open."""
    made = Descriptor()
    monkeypatch.setattr(engines, "Descriptor", lambda kind: made)
    monkeypatch.setattr(engines, "_number_and_notes", lambda config: (2, ()))
    found = EngineSearch(Descriptor(), None, None, 1000, lambda size: size, [])._try(Descriptor())
    assert (found.descriptor, found.workspace_bytes, made.closed) == (made, 1000, 0)


@pytest.mark.cudnn  # the key of a stored plan contains the build of the library
def test_a_plan_that_cannot_be_stored_is_destroyed(cudnn, monkeypatch):
    """If the disk cache fails, the plan is closed, because it is not returned."""
    made = Descriptor()

    @contextlib.contextmanager
    def engine_search(*_):
        yield SimpleNamespace(first=lambda config: candidate(made), refused=[]), uids(forward(CASE.problem()))

    class DiskCache:
        building = staticmethod(lambda key: contextlib.nullcontext())

        def get(self, key):
            return None

        def put(self, key, content):
            raise OSError("no space left on device")

    monkeypatch.setattr(planner, "engine_search", engine_search)
    with pytest.raises(OSError, match="no space left"):
        planner.load_or_build(forward(CASE.problem()), Target("h200", 90), disk_cache=DiskCache())
    assert made.closed == 1


def stored(workspace_bytes):
    """An entry of the disk cache, for a plan with a workspace of some bytes."""
    return plan_file.Facts({}, 1, (), (), workspace_bytes, 1.0, (), False).content("{}")


@pytest.mark.cudnn  # the key of a stored plan contains the build of the library
def test_a_stored_plan_survives_a_lack_of_memory(cudnn, monkeypatch):
    """If there is no memory to load it, the error is raised, the entry stays, and no other plan is built."""
    made, rejected = Descriptor(), []
    made.finalizing = CudnnError("no memory", 4004)
    disk_cache = SimpleNamespace(
        building=lambda key: contextlib.nullcontext(),
        get=lambda key: stored(1000),
        reject=lambda *given: rejected.append(given),
    )
    monkeypatch.setattr(planner, "Descriptor", lambda kind: made)
    with pytest.raises(CudnnError, match="no memory"):
        planner.load_or_build(forward(CASE.problem()), Target("h200", 90, SimpleNamespace(pointer=1)), disk_cache=disk_cache)
    assert made.closed == 1
    assert not rejected


@pytest.mark.parametrize(
    ("content", "closed"),
    [(stored(999), 1), (b'{"need": 1000}\n{}', 0), (b"no JSON\n{}", 0)],
    ids=["other_workspace", "facts_missing", "damaged"],
)
def test_a_plan_that_cannot_be_loaded_is_destroyed(content, closed, cudnn, monkeypatch):
    """A bad entry of the disk cache leaves no descriptor."""
    made = Descriptor()
    monkeypatch.setattr(planner, "Descriptor", lambda kind: made)
    with pytest.raises((ValueError, LookupError)):
        planner.load(content, forward(CASE.problem()), Target("h200", 90, SimpleNamespace(pointer=1)), "key")
    assert made.closed == closed  # facts are validated before a descriptor is created
