"""Repeated calls: they skip validation, run from CUDA graphs, and give right results."""

import itertools
import sys
import threading
from contextlib import contextmanager

import numpy as np
import pytest
from cases import Case, as_float, inputs

from cupy_sdpa import attention, attention_backward, autotune, explain, get_plan_cache, prepare
from cupy_sdpa._cudnn.library import library
from cupy_sdpa.calls import replay_cache
from cupy_sdpa.device import cuda_graph, driver
from cupy_sdpa.plans.plan_cache import RECORDING_LIMIT
from cupy_sdpa.plans.sessions import existing_session
from cupy_sdpa.problem.problem import Problem

pytestmark = pytest.mark.gpu

CASE = Case("repeated", sq=100, dtype="bfloat16")


@pytest.fixture
def session(plans):
    """A session without cached calls."""
    session = existing_session(driver.context_id())
    session.cached_calls.clear()
    session.cache.recorded.warned = False
    yield session
    session.cache.set_recording_limit(RECORDING_LIMIT)


@pytest.fixture
def arrays(cupy, session):
    """Random q, k, v and dout."""
    return inputs(cupy, CASE)


@contextmanager
def reading_forbidden(monkeypatch):
    """Make validation, calls of cuDNN and new problems an error."""

    def refuse(*_, **__):
        raise AssertionError("the call was not repeated")

    with monkeypatch.context() as patch:
        for module, name in itertools.product(("attention", "prepare"), ("read_forward", "read_backward")):
            patch.setattr(sys.modules[f"cupy_sdpa.{module}"], name, refuse)
        for name in ("cudnnBackendExecute", "cudnnBackendCreateDescriptor", "cudnnSetStream"):
            patch.setattr(library(), name, refuse)
        patch.setattr(Problem, "__post_init__", refuse)
        yield


def bits(x):
    return x.view("u2").get()


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window": (5, 0)}, {"scale": 0.3, "softcap": 2.0}, {"return_stats": True}],
    ids=["plain", "causal", "window", "scale_and_softcap", "stats"],
)
def test_a_repeated_call_is_one_launch(options, arrays, cupy, monkeypatch):
    """A look-up, an allocation and a launch, with the same bits, of the present contents."""
    q, k, v, _ = arrays

    def call(q=q):
        got = attention(q, k, v, **options)
        return [as_float(x) for x in (got if isinstance(got, tuple) else [got])]

    want, *_ = (call() for _ in range(6))  # until CuPy's pool returns the same memory
    with reading_forbidden(monkeypatch):
        same = call()
        cupy.multiply(q, 2, out=q)
        changed = call()
    for a, b in zip((*same, *changed), (*want, *call(q.copy(order="F"))), strict=True):
        np.testing.assert_array_equal(a, b)


def test_other_arrays_of_the_same_kind(arrays, cupy, monkeypatch):
    """A cached call at new addresses skips validation: its plan is executed on the new arrays."""
    q, k, v, dout = arrays
    out, stats = attention(q, k, v, causal=True, return_stats=True)
    attention_backward(dout, q, k, v, out, stats, causal=True)
    others = [x.copy(order="F") for x in (k, q, v, dout)]
    with monkeypatch.context() as patch:
        for name in ("read_forward", "read_backward"):
            patch.setattr(sys.modules["cupy_sdpa.attention"], name, None)
        other, other_stats = attention(*others[:3], causal=True, return_stats=True)
        gradients = attention_backward(others[3], *others[:3], other, other_stats, causal=True)
    get_plan_cache().clear()
    want, want_stats = attention(k, q, v, causal=True, return_stats=True)
    np.testing.assert_array_equal(as_float(other), as_float(want))
    np.testing.assert_array_equal(as_float(other_stats), as_float(want_stats))
    for a, b in zip(gradients, attention_backward(dout, k, q, v, want, want_stats, causal=True), strict=True):
        np.testing.assert_allclose(as_float(a), as_float(b), atol=2e-2)


def test_both_passes_with_preallocated_results(arrays, cupy, monkeypatch):
    """out=, stats=, dq=, dk= and dv= are returned as the same objects."""
    q, k, v, dout = arrays
    out, stats = attention(q, k, v, return_stats=True)
    into = {f"d{n}": cupy.empty_like(x) for n, x in zip("qkv", (q, k, v), strict=True)}
    want = [as_float(x) for x in (out, stats, *attention_backward(dout, q, k, v, out, stats, deterministic=True))]
    for _ in range(replay_cache.CAPTURE_AFTER + 1):  # the first call is not counted if it allocates memory
        attention(q, k, v, out=out, stats=stats)
        attention_backward(dout, q, k, v, out, stats, deterministic=True, **into)
    for x in (out, stats, *into.values()):
        x.fill(np.nan)
    with reading_forbidden(monkeypatch):
        forward = attention(q, k, v, out=out, stats=stats)
        backward = attention_backward(dout, q, k, v, out, stats, deterministic=True, **into)
    assert forward[0] is out
    assert forward[1] is stats
    assert [id(x) for x in backward] == [id(x) for x in into.values()]
    for a, b in zip((*forward, *backward), want, strict=True):
        np.testing.assert_array_equal(as_float(a), b)


def test_what_changes_the_key_of_a_call(arrays, cupy):
    """Another scale, mask, output, layout or address of a view does not use an earlier call."""
    q, k, v, _ = arrays
    out = cupy.empty_like(q)
    for _ in range(4):
        attention(q, k, v, out=out)
    plain = bits(out)
    assert (bits(attention(q, k, v, scale=0.5)) != plain).any()
    assert (bits(attention(q, k, v, causal=True)) != plain).any()
    assert (bits(attention(k, q, v)) != plain).any()
    assert (bits(attention(q, k, v[..., ::-1].copy(order="F"))) != plain).any()
    assert (bits(attention(q, k, v)) == plain).all()
    assert (bits(attention(q, k, cupy.asfortranarray(v.copy(order="C")), out=out)) == plain).all()
    with pytest.raises(ValueError, match="out overlaps q"):
        attention(q, k, v, out=q)
    with pytest.raises(TypeError, match="float32"):
        attention(q.astype("f4"), k, v, out=out)
    with pytest.raises(TypeError, match="no option casual"):
        attention(q, k, v, out=out, casual=True)


def test_arrays_of_options_are_read_again(arrays, cupy, monkeypatch):
    """Sinks and slopes with other contents at the same address, and at other addresses."""
    case = Case("sinks", sinks=True, alibi=True, hq=4, hkv=4)
    q, k, v, _ = inputs(cupy, case)
    options, out = case.options(cupy), cupy.empty_like(q)
    for _ in range(replay_cache.CAPTURE_AFTER):
        attention(q, k, v, out=out, **options)
    with reading_forbidden(monkeypatch):
        before = bits(attention(q, k, v, out=out, **options))
        options["sinks"] += 3
        after = bits(attention(q, k, v, out=out, **options))
    assert (before != after).any()
    assert (after == bits(attention(q, k, v, **{**options, "sinks": options["sinks"].copy()}))).all()


PREPARED = [
    Case("packed", packed=True, seq_lens_q=(100, 0, 37), seq_lens_kv=(64, 20, 0), b=3, hq=4, hkv=2, causal=True, tail=3),
    Case("lengths", seq_lens_q=(20, 33), seq_lens_kv=(40, 3), sq=40, skv=48),
    Case("mask", mask="kb", sq=70),
    Case("bias", bias="hb", sq=70),
    Case("max_sumexp", stats="max_sumexp"),
    Case("dropout", dropout=0.25),
]


@pytest.mark.parametrize("case", PREPARED, ids=str)
def test_staging_is_part_of_the_captured_graph(case, arrays, cupy, monkeypatch):
    """Offsets, lengths, copies and cleared rows: a repeated call computes them from the present contents."""
    monkeypatch.setattr(
        replay_cache, "SMALL_BYTES", 1 << 24
    )  # a large workspace is allocated from the pool, at varying addresses
    q, k, v, dout = inputs(cupy, case)
    options = case.options(cupy)
    out, stats = attention(q, k, v, return_stats=True, **options)
    into = {f"d{n}": cupy.empty_like(x) for n, x in zip("qkv", (q, k, v), strict=True)}

    def both(q=q, k=k, out=out, stats=stats, **into):
        attention(q, k, v, out=out, stats=stats, **options)
        attention_backward(dout, q, k, v, out, stats, deterministic=True, **into, **options)
        return [as_float(x) for x in (out, stats, *into.values())]

    for _ in range(2 * replay_cache.CAPTURE_AFTER):  # memory kept by the first graph changes the next addresses of the pool
        both(**into)
    for name in options.keys() & {"seq_lens_kv", "mask"}:
        options[name][...] = options[name][::-1].copy()
    cupy.multiply(q, 2, out=q)
    for x in (out, stats, *into.values()):
        x.fill(np.nan)
    with reading_forbidden(monkeypatch):
        got = both(**into)
    fresh = {name: cupy.empty_like(x) for name, x in into.items()}
    want = both(q.copy(order="F"), k.copy(order="F"), cupy.empty_like(out), cupy.empty_like(stats), **fresh)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_large_copies_are_not_kept(arrays, cupy, monkeypatch):
    """A call with copies is captured, its graph owns no copies, and its results are right."""
    case = Case("lengths", seq_lens_q=(20, 50), seq_lens_kv=(70, 3), sq=64, skv=80, dropout=0.25)
    q, k, v, _ = inputs(cupy, case)
    options, out = case.options(cupy), cupy.empty_like(q)
    monkeypatch.setattr(replay_cache, "SMALL_BYTES", 0)
    assert "zeros in a copy of v" in str(explain(q, k, v, **options))
    for _ in range(6):
        attention(q, k, v, out=out, **options)
    plans = get_plan_cache()
    assert plans.recordings > 0
    assert plans.recording_bytes <= plans.recordings * (cuda_graph.GRAPH_BYTES + 1024)
    before = bits(out)
    options["seq_lens_kv"][...] = cupy.array([1, 80])
    attention(q, k, v, out=out, **options)
    assert (bits(out) != before).any()
    np.testing.assert_array_equal(bits(out), bits(attention(q, k, v, out=cupy.empty_like(out), **options)))


def test_on_another_stream_and_in_a_capture(arrays, cupy):
    """A repeated call runs on the current stream; during a capture it is captured."""
    q, k, v, _ = arrays
    out = cupy.empty_like(q)
    for _ in range(3):
        attention(q, k, v, out=out)
    want = bits(out)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        out.fill(np.nan)
        attention(q, k, v, out=out)
        stream.synchronize()
        assert (bits(out) == want).all()
        stream.begin_capture()
        attention(q, k, v, out=out)
        graph = stream.end_capture()
    out.fill(np.nan)
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    assert (bits(out) == want).all()


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_both_ways_to_launch_a_captured_graph(backward, arrays, session, cupy, monkeypatch):
    """It is launched as one if the device is idle, and kernel by kernel if it is busy; with the same bits."""
    q, k, v, dout = arrays
    out, stats = attention(q, k, v, return_stats=True)
    into = {f"d{n}": cupy.empty_like(x) for n, x in zip("qkv", (q, k, v), strict=True)} if backward else {"out": out}
    graphs, kernels, large = [], [], cupy.ones((8192, 8192), "f4")

    def call():
        return attention_backward(dout, q, k, v, out, stats, **into) if backward else attention(q, k, v, **into)

    for _ in range(replay_cache.CAPTURE_AFTER + 1):
        call()
    _ = large @ large
    cupy.cuda.Device().synchronize()
    want = [bits(into[name]) for name in into if name != "dq"]  # which is accumulated in any order
    (recording,) = next(known for known in session.cached_calls.values() if known._graphs)._graphs.values()
    monkeypatch.setattr(replay_cache, "FEW_GRAPHS", 0)  # this graph is one of many
    steps, launch = recording._driver_calls, recording._launch
    recording._launch = lambda *given: graphs.append(1) or launch(*given)
    recording._driver_calls = [(lambda *given, run=run: kernels.append(1) or run(*given), given) for run, given in steps]
    with reading_forbidden(monkeypatch):
        call()
        assert (len(graphs), len(kernels)) == (1, 0)
        for x in into.values():
            x.fill(np.nan)
        _ = large @ large  # 20 ms
        call()
    assert (len(graphs), len(kernels)) == (1, len(steps))
    assert steps
    for x, y in zip([bits(into[name]) for name in into if name != "dq"], want, strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_failed_capture_leaves_nothing(arrays, cupy):
    """The exception during the capture is raised; the stream and later captures are unaffected."""
    q, k, v, _ = arrays
    out = cupy.empty_like(q)
    want = bits(attention(q, k, v))

    def fail():
        attention(q, k, v, out=out)
        raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            cuda_graph.Recording(fail)
    for _ in range(replay_cache.CAPTURE_AFTER + 2):
        out.fill(0)
        attention(q, k, v, out=out)
        assert (bits(out) == want).all()


@pytest.mark.parametrize("name", ["graphInstantiate", "graphLaunch", "streamBeginCapture"])
def test_a_failure_to_capture_or_launch_warns(name, arrays, cupy, monkeypatch):
    """Whichever function of CUDA graphs fails, every call is right, there is one warning, and the stream works."""
    q, k, v, _ = arrays
    out = cupy.empty_like(q)
    want = bits(attention(q, k, v))

    def fail(*_):
        raise RuntimeError(f"{name} failed")

    def call():
        out.fill(np.nan)
        return bits(attention(q, k, v, out=out))

    monkeypatch.setattr(cupy.cuda.runtime, name, fail)
    with pytest.warns(RuntimeWarning, match=f"{name} failed") as said:
        got = [call() for _ in range(3 * replay_cache.CAPTURE_AFTER)]
    assert all((x == want).all() for x in got)
    assert len(said) == 1
    assert get_plan_cache().recordings == 0


def test_no_memory_for_a_workspace(session, cupy):
    """CuPy's error has a note on the workspace; with enough memory the same plan runs, with the same bits."""
    q, k, v, dout = inputs(cupy, Case("large_workspace", sq=2048))  # 67 MB
    out, stats = attention(q, k, v, return_stats=True)
    want = [bits(x) for x in attention_backward(dout, q, k, v, out, stats, deterministic=True)]
    into = {f"d{n}": cupy.empty_like(x) for n, x in zip("qkv", (q, k, v), strict=True)}
    attention_backward(dout, q, k, v, out, stats, deterministic=True, **into)  # cached from here on
    report = explain(q, k, v, backward=True, deterministic=True)
    cache, pool = get_plan_cache(), cupy.get_default_memory_pool()
    misses, used = cache.misses, pool.used_bytes()
    pool.free_all_blocks()
    pool.set_limit(size=used + report.workspace // 2)
    try:
        for _ in range(replay_cache.CAPTURE_AFTER + 1):
            with pytest.raises(cupy.cuda.memory.OutOfMemoryError) as raised:
                attention_backward(dout, q, k, v, out, stats, deterministic=True, **into)
            assert any(f"{report.workspace} bytes" in note and "max_workspace=" in note for note in raised.value.__notes__)
    finally:
        pool.set_limit(size=0)
    got = attention_backward(dout, q, k, v, out, stats, deterministic=True, **into)
    assert cache.misses == misses
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(bits(a), b)


def test_recording_bytes_match_the_device_memory(arrays, cupy):
    """recording_bytes is at least half of the decrease of the device's free memory outside CuPy's pool."""
    q, k, v, _ = arrays
    cache, free = get_plan_cache(), lambda: cupy.cuda.runtime.memGetInfo()[0]
    pool = cupy.get_default_memory_pool()

    def record(out):
        for _ in range(replay_cache.CAPTURE_AFTER + 1):
            attention(q, k, v, out=out)
        cupy.cuda.Device().synchronize()

    taken = []
    for _ in range(5):  # other processes use the same GPU: the smallest decrease counts
        cache.clear()
        outputs = [cupy.empty_like(q) for _ in range(101)]
        record(outputs[0])
        before, reserved = free(), pool.total_bytes()
        for out in outputs[1:]:
            record(out)
        taken.append(before - free() - (pool.total_bytes() - reserved))
        assert cache.recordings == 101
        if taken[-1] <= 2 * cache.recording_bytes:
            break
    assert min(taken) <= 2 * cache.recording_bytes
    assert cache.recording_bytes <= cache.recording_limit
    cache.clear()
    assert (cache.recordings, cache.recording_bytes) == (0, 0)


@pytest.mark.parametrize("mode", ["Global", "ThreadLocal", "Relaxed"])
def test_a_call_breaks_no_capture_of_another_thread(mode, arrays, cupy, monkeypatch):
    """Querying whether the device is busy is safe while another thread captures."""
    monkeypatch.setattr(replay_cache, "FEW_GRAPHS", 0)
    q, k, v, _ = arrays
    out, stream = cupy.empty_like(q), cupy.cuda.Stream(non_blocking=True)
    for _ in range(replay_cache.CAPTURE_AFTER + 1):
        attention(q, k, v, out=out)
        cupy.cuda.Device().synchronize()
    want = bits(out)
    begun, done, ends = threading.Event(), threading.Event(), []

    def other():
        with stream:
            held = cupy.zeros((4,), "f4")
            stream.synchronize()
            stream.begin_capture(getattr(cupy.cuda.runtime, f"streamCaptureMode{mode}"))
            held += 1
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
    assert (bits(out) == want).all()


def test_a_graph_can_be_captured_while_another_thread_captures(arrays, cupy):
    """Neither capture is invalidated."""
    q, k, v, _ = arrays
    want, failed = bits(attention(q, k, v)), []
    stream = cupy.cuda.Stream(non_blocking=True)
    attention(q, k, v, causal=True)  # planned

    def other():
        try:
            for _ in range(4):
                attention(q, k, v, causal=True)
        except Exception as error:  # raised in the test's own thread
            failed.append(error)

    with stream:
        held = cupy.empty_like(q)
        attention(q, k, v, out=held)
        stream.synchronize()
        stream.begin_capture()
        attention(q, k, v, out=held)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        graph = stream.end_capture()
    assert not failed, failed
    held.fill(np.nan)
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    assert (bits(held) == want).all()


def test_captured_graphs_are_destroyed_before_their_plan(arrays, cupy, monkeypatch):
    """By clear(), the cache's limit and autotuning; later calls are right, and counted."""
    q, k, v, _ = arrays
    living = set()

    class Counted(cuda_graph.Recording):
        def __init__(self, *given, **options):
            super().__init__(*given, **options)
            living.add(self)

        def close(self):
            living.remove(self)
            super().close()

    monkeypatch.setattr(replay_cache, "Recording", Counted)
    cache = get_plan_cache()
    want = bits(attention(q, k, v))
    for _ in range(3):
        attention(q, k, v)
    assert len(living) == cache.recordings == 1
    assert (cache.hits, cache.misses) == (3, 1)
    cache.clear()
    assert not living
    for _ in range(4):
        assert (bits(attention(q, k, v)) == want).all()
    with autotune() as found:
        attention(q, k, v)
    assert len(found) == 1
    for _ in range(4):
        np.testing.assert_allclose(as_float(attention(q, k, v)), want.view(q.dtype).astype("f4"), atol=0.05)
    assert len(living) == 1
    cache.set_limit(1)
    attention(q, k, v, causal=True)
    cache.set_limit(256)
    assert not living


def test_old_addresses_are_evicted(arrays, cupy, monkeypatch):
    """The bytes of captured graphs and the number of calls stay within the limits; each result is right."""
    q, k, v, _ = arrays
    monkeypatch.setattr(replay_cache, "MAX_CALLS", 2)
    cache = get_plan_cache()
    cache.set_recording_limit(3 * cuda_graph.GRAPH_BYTES + 3 * replay_cache.SMALL_BYTES)
    outputs = [cupy.empty_like(q) for _ in range(5)]
    want = bits(attention(q, k, v))
    for _ in range(4):
        for out in outputs:
            out.fill(np.nan)
            attention(q, k, v, out=out)
            assert (bits(out) == want).all()
    assert 0 < cache.recording_bytes <= cache.recording_limit
    for _ in range(3):
        for scale in (0.1, 0.2, 0.3, 0.4):
            np.testing.assert_array_equal(bits(attention(q, k, v, scale=scale)), bits(attention(q, k, v, scale=scale)))
    known = existing_session(driver.context_id()).cached_calls
    assert len(known) == 2
    assert cache.recording_bytes <= cache.recording_limit
    assert cache.recordings == sum(len(call._graphs) for call in known.values())


def test_a_prepared_call_is_repeated(arrays, cupy, monkeypatch):
    """Like any other; arrays of another problem still raise."""
    q, k, v, _ = arrays
    call, out = prepare(q, k, v, causal=True), cupy.empty_like(q)
    want = bits(attention(q, k, v, causal=True))
    for _ in range(replay_cache.CAPTURE_AFTER):
        call(q, k, v, out=out)
    out.fill(np.nan)
    with reading_forbidden(monkeypatch):
        assert call(q, k, v, out=out) is out
    assert (bits(out) == want).all()
    with pytest.raises(ValueError, match="differs from the prepared one"):
        call(q[:, :, :50], k, v)


def test_threads_repeat_on_their_own(arrays, cupy):
    """Each thread has its own cached calls; all get the same bits while plans are evicted."""
    q, k, v, _ = arrays
    want, wrong = bits(attention(q, k, v)), []

    def work():
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for turn in range(60):
                out = attention(q, k, v)
                stream.synchronize()
                if not (bits(out) == want).all():
                    wrong.append(turn)
                if turn % 20 == 19:
                    get_plan_cache().clear()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.multi_gpu
def test_two_gpus_have_their_own_captured_graphs(cupy, monkeypatch):
    """The same call on both, whichever is current: it runs on the device of its arrays, captured in that context if it is
    current.
    """
    devices = [cupy.cuda.Device(number) for number in (0, 1)]
    given, wanted = [], []
    for device in devices:
        with device:
            get_plan_cache().clear()
            q, k, v, dout = inputs(cupy, CASE)
            q *= 1 + device.id  # each with its own values
            out, stats = attention(q, k, v, return_stats=True)
            given.append((q, k, v, dout, out, stats))
            wanted.append([bits(x) for x in (out, *attention_backward(dout, q, k, v, out, stats)[1:])])

    def check(device):
        q, k, v, dout, out, stats = given[device.id]
        again, _ = attention(q, k, v, return_stats=True)
        _, dk, dv = attention_backward(dout, q, k, v, out, stats)  # dq is accumulated in any order
        for x, want in zip((again, dk, dv), wanted[device.id], strict=True):
            assert x.device == device
            np.testing.assert_array_equal(bits(x), want)

    for _ in range(4 * replay_cache.CAPTURE_AFTER):
        for current, device in itertools.product(devices, devices):
            with current:
                check(device)
    for device in devices:
        with device:
            check(device)
            with reading_forbidden(monkeypatch):
                check(device)
            known = existing_session(driver.context_id()).cached_calls.values()
            assert sum(bool(call._graphs) for call in known) == 2
            get_plan_cache().clear()
