"""CUDA graphs of repeated calls: addresses, keys, streams, threads and captures of the caller."""

import contextlib
import itertools
import threading

import numpy as np
import pytest
from engines import on_cudnn
from fake_cupy import DEVICE, library
from replayed_calls import OFTEN, calls_of, equal, functions_run

from cupy_sdpa import attention, attention_backward, get_plan_cache, prepare

pytestmark = [
    on_cudnn,
    pytest.mark.usefixtures("cache"),
]


@pytest.fixture
def qkv(engine):
    """q, k and v."""
    return [engine.normal(seed, 16, 2, 20, 2) for seed in range(3)]


@contextlib.contextmanager
def replayed(engine):
    """Assert that cuDNN is not called, because a CUDA graph is launched; on a GPU the number of functions shows it."""
    before = len(library().executions) if engine.name == "fake" else 0
    yield
    assert engine.name != "fake" or len(library().executions) == before, "the call was not replayed"


def test_addresses_of_results_and_inputs_change(engine, qkv):
    """New results and inputs at other addresses: each call uses its own arrays, also where one was three arguments before."""
    q, k, v = qkv
    attention(q, q, q)
    want = engine.get(attention(q, k, v))
    kept = [attention(q, k, v) for _ in range(2 * OFTEN)]
    for _ in range(2 * OFTEN):
        np.testing.assert_array_equal(engine.get(attention(q, k, v)), want)
    for factor in (2, 4):
        scaled = engine.xp.asfortranarray(v * np.float16(factor))
        np.testing.assert_array_equal(engine.get(attention(q, k, scaled)), factor * want)
    for x in kept:
        np.testing.assert_array_equal(engine.get(x), want)


def test_strides_of_one_query(engine):
    """Strides of axes of length 1 may differ: results are right, and the call is not parsed."""
    q, k, v = (engine.normal(seed, 16, 2, n, 1) for seed, n in enumerate((1, 24, 24)))
    parsed = functions_run(attention, q, k, v)
    want = engine.get(attention(q, k, v))
    other = engine.nan(16, 2, 3, 1)[:, :, :1]
    other[...] = q
    assert other.strides != q.strides
    assert functions_run(attention, other, k, v) < parsed / 4
    np.testing.assert_array_equal(engine.get(attention(other, k, v)), want)


def test_the_pool_may_return_the_memory_of_results_in_any_order(engine, qkv):
    """Gradients of equal sizes are replayed, although the pool returns their blocks in the order in which they were freed."""
    q, k, v = qkv
    out, stats = attention(q, k, v, return_stats=True)

    def run(order):
        gradients = list(attention_backward(q, q, k, v, out, stats))
        contents = dict(zip(("dq", "dk", "dv"), map(engine.get, gradients), strict=True))
        for number in order:
            gradients[number] = None
        return contents

    orders = list(itertools.permutations(range(3)))
    want = [run(order) for order in orders][-1]
    with replayed(engine):
        for order in orders:
            equal(engine, run(order), want)


def other_calls(engine):
    """Calls that differ from causal attention with ``out`` in one thing: the changed arguments."""
    xp = engine.xp
    q = engine.normal(0, 16, 2, 20, 2)
    longer = xp.zeros(q.size + 4, q.dtype)
    unaligned = longer[4:].reshape(q.shape[::-1]).T
    unaligned[...] = q
    elsewhere = q.copy("K")
    if engine.name == "fake":
        elsewhere.data.device_id = 1
    bias = [
        xp.asarray(np.asfortranarray(np.random.default_rng(5).standard_normal((20, 20, 1, 1)).astype(t))) for t in ("e", "f")
    ]
    return {
        "dtype": {"q": q.astype(np.float32)}, "shape": {"q": q[:, :, :8]}, "strides": {"q": xp.ascontiguousarray(q)},
        "heads": {"q": engine.normal(0, 16, 4, 20, 2)}, "alignment": {"q": unaligned}, "numpy": {"q": engine.get(q)},
        "no mask": {"causal": False}, "corner": {"causal": "bottom_right"}, "scale": {"scale": 0.5}, "window": {"window": (1, 0)},
        "floats": {"window": (1.0, 0)}, "softcap": {"softcap": 2.0}, "function": {"score_mod": lambda s, b, h, i, j: 2 * s},
        "bias": {"bias": bias[0]}, "bias of another dtype": {"bias": bias[1]}, "bias in another order": {"bias": bias[1].T},
        "one row of a bias": {"bias": bias[1][:, :1]}, "bucket": {"bucket": 64}, "name": {"casual": True}, "overlap": {"out": q},
        "sinks": {"sinks": xp.zeros(2, np.float32)}, "stats": {"return_stats": True}, "device": {"q": elsewhere},
        "max_workspace": {"max_workspace": 0},
    }  # fmt: skip


def test_other_calls_are_not_the_cached_one(engine, cache):
    """Each gives what it gives when it is the first call, the same error or result, after calls that differ in one thing."""

    def outcome(changes):
        arguments = {"q": engine.normal(0, 16, 2, 20, 2), **changes}
        arguments = {name: arguments["q"] if name == "out" else x for name, x in arguments.items()}
        k, v = engine.normal(1, 16, 2, 20, 2), engine.normal(2, 16, 2, 20, 2)
        try:
            results = attention(arguments.pop("q"), k, v, **{"causal": True, **arguments})
        except Exception as error:
            return type(error).__name__, str(error)[:40]
        return tuple(engine.get(x).tobytes() for x in (results if isinstance(results, tuple) else (results,)))

    changes = other_calls(engine)
    alone = {}
    for name in changes:
        cache.clear()
        alone[name] = outcome(changes[name])
    assert sum(isinstance(got[0], str) for got in alone.values()) >= 4
    usual = outcome({})
    for name, change in changes.items():
        for _ in range(OFTEN):
            assert outcome({}) == usual
        assert outcome(change) == alone[name], name
        assert outcome(change) == alone[name], f"{name}, for the second time"


def test_a_result_at_a_new_address_is_checked(engine, qkv):
    """It may overlap an input: only addresses that were checked are written to."""
    q, k, v = qkv
    two = engine.nan(16, 2, 20, 4)
    q, out = two[..., :2], two[..., 2:]
    q[...] = qkv[0]
    for _ in range(OFTEN):
        attention(q, k, v, out=out)
    with pytest.raises(ValueError, match="out overlaps q"):
        attention(q, k, v, out=two[..., 1:3])
    with pytest.raises(ValueError, match="out overlaps q"):
        attention(q, k, v, out=q)


@pytest.mark.parametrize("name", ["plain", "large copies"])
def test_the_current_stream_is_used(name, engine):
    """Every launch of first, repeated and replayed calls is on the current stream."""
    calls, xp = calls_of(engine, name), engine.xp
    want = calls.run()
    streams = [xp.cuda.Stream(non_blocking=True) for _ in range(2)]
    xp.cuda.Device().synchronize()
    for turn in range(OFTEN + 1):
        for stream in [*streams, xp.cuda.Stream.null, *streams[: turn % 2]]:
            with stream:
                calls.load(0)
                before = len(DEVICE.launches)
                results = calls.launch()
                assert engine.name != "fake" or set(DEVICE.launches[before:]) == {stream.ptr}
                stream.synchronize()
            equal(engine, calls.host(results), want)


@pytest.mark.parametrize("name", ["plain", "packed"])
def test_a_stream_at_the_address_of_a_destroyed_one(name, engine):
    """CUDA reuses addresses of streams: results on the new stream are right, and memory comes from the pool of that stream."""
    calls, xp, pointers, used = calls_of(engine, name), engine.xp, set(), set()
    want = calls.run()
    xp.cuda.Device().synchronize()

    def allocate(size):
        used.add(xp.cuda.get_current_stream().ptr)
        return xp.get_default_memory_pool().malloc(size)

    for _ in range(3):
        with xp.cuda.Stream(non_blocking=True) as stream, xp.cuda.using_allocator(allocate):
            for _ in range(OFTEN + 1):
                equal(engine, calls.run(), want)
                assert xp.cuda.get_current_stream() is stream
                assert engine.name != "fake" or library().stream_of_last_handle() == stream.ptr, "a stream that is destroyed"
            pointers.add(stream.ptr)
        del stream
    assert used == pointers
    assert engine.name != "fake" or len(pointers) == 1


def test_plans_are_built_on_the_current_stream(engine, qkv):
    """The stream of the previous call may have been destroyed when the next plan is built."""
    q, k, v = qkv
    want = {length: engine.get(attention(q[:, :, :length], k, v)) for length in (20, 12, 8)}
    get_plan_cache().clear()
    engine.xp.cuda.Device().synchronize()
    for length in want:
        with engine.xp.cuda.Stream(non_blocking=True) as stream:
            got = attention(q[:, :, :length], k, v)
            stream.synchronize()
        del stream
        np.testing.assert_array_equal(engine.get(got), want[length])


@pytest.mark.slow
def test_threads(engine):
    """Four threads with a stream each and a plan cache of a few plans: all results are right while plans come and go."""
    problems = [calls_of(engine, name) for name in ("plain", "lengths", "packed")]
    wanted, wrong = [calls.run() for calls in problems], []
    engine.xp.cuda.Device().synchronize()

    def work(seed):
        try:
            with engine.xp.cuda.Stream(non_blocking=True) as stream:
                mine = [calls.elsewhere() for calls in problems]
                get_plan_cache().set_limit(1 + seed)
                for number in np.random.default_rng(seed).integers(0, 3, 16):
                    equal(engine, mine[number].run(), wanted[number])
                stream.synchronize()
            get_plan_cache().clear()
        except BaseException as error:  # raised in the test's own thread
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong, wrong


def test_graphs_are_destroyed_before_their_plan(engine, qkv, cache):
    """By clear() and the limit of plans; calls are counted, and captured again."""
    q, k, v = qkv
    want = engine.get(attention(q, k, v))

    def repeat():
        for _ in range(OFTEN):
            np.testing.assert_allclose(engine.get(attention(q, k, v)), want, atol=1e-2)
        assert cache.recordings == 1
        assert engine.name != "fake" or len(DEVICE.graphs) == 1

    repeat()
    assert (cache.hits, cache.misses) == (OFTEN, 1)
    cache.clear()
    assert cache.recordings == 0
    repeat()
    cache.set_limit(1)
    attention(q, k, v, causal=True)
    assert cache.recordings == 0
    assert not DEVICE.graphs


@pytest.mark.parametrize(("options", "launches"), [({}, 1), ({"softcap": 2.0}, 2)], ids=["plain", "softcap"])
def test_a_paged_query_needs_no_other_launch(options, launches, engine):
    """One query of every sequence: cuDNN clears sequences without keys, unless an option changes the scores."""
    if engine.name != "fake":
        pytest.skip("launches are counted on the fake CuPy")
    ones = [engine.put(np.ones(shape, np.float16, order="F")) for shape in ((8, 2, 1, 3), (8, 1, 4, 3), (8, 1, 4, 3))]
    table = engine.put(np.asfortranarray([[0, 1, 2]], np.int32))
    for given in ([3, 0, 4], [0, 1, 2], [4, 4, 0]):
        lengths, before = engine.put(np.array(given, np.int32)), len(DEVICE.launches)
        out, stats = attention(*ones, seq_lens_kv=lengths, page_table=table, return_stats=True, **options)
        count = len(DEVICE.launches) - before
        np.testing.assert_array_equal(engine.get(out)[0, 0, 0], np.array(given) > 0)
        np.testing.assert_array_equal(np.isneginf(engine.get(stats)[0, 0]), np.array(given) == 0)
    assert count == launches


def test_pending_calls_outlive_their_plans(engine, cache):
    """Replays that were enqueued before the plan cache is cleared still run."""
    q, k, v = (engine.normal(seed, 16, 2, 20, 1) for seed in range(3))
    want, out = engine.get(attention(q, k, v)), engine.nan(*q.shape)
    for _ in range(OFTEN):
        attention(q, k, v, out=out)
    assert cache.recordings == 1
    out.fill(np.nan)
    attention(q, k, v, out=out)
    cache.clear()
    np.testing.assert_array_equal(engine.get(out), want)


# Captures of the caller


def test_a_capture_without_a_plan_raises(engine, cache):
    """A call and prepare() without a plan raise before anything is captured, and the capture continues."""
    q, k, v = (engine.normal(seed, 16, 2, 20, 1) for seed in range(3))
    out = engine.nan(*q.shape)
    want = engine.get(attention(q, k, v))
    engine.xp.cuda.Device().synchronize()
    with engine.xp.cuda.Stream(non_blocking=True) as stream:
        call = prepare(q, k, v)
        stream.begin_capture()
        for function in (attention, prepare):
            with pytest.raises(RuntimeError, match="before the capture begins"):
                function(q, k, v, causal=True)
        call(q, k, v, out=out)
        graph = stream.end_capture()
        graph.launch(stream)
        np.testing.assert_array_equal(engine.get(out), want)
        stream.synchronize()


def test_a_replayed_call_is_captured_again(engine):
    """A call that launches a graph of its own is part of the user's graph, and is replayed on its own stream afterwards."""
    calls, xp = calls_of(engine, "plain"), engine.xp
    want = [calls.run() for _ in range(OFTEN)][-1]
    xp.cuda.Device().synchronize()
    with xp.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        results = calls.launch()
        graph = stream.end_capture()
        for run in (lambda: graph.launch(stream), calls.launch):
            calls.load(0)
            run()
            equal(engine, calls.host(results), want)
        stream.synchronize()
    equal(engine, calls.run(), want)


def test_a_call_can_be_captured_while_another_thread_captures(engine):
    """Replay in a thread captures a graph of its own while the user captures in another: neither capture is invalidated."""
    xp, failed, kept = engine.xp, [], []
    q, k, v = (engine.normal(seed, 16, 2, 20, 1) for seed in range(3))
    want, causal = engine.get(attention(q, k, v)), engine.get(attention(q, k, v, causal=True))
    xp.cuda.Device().synchronize()

    def other():
        try:
            with xp.cuda.Stream(non_blocking=True) as own:
                for _ in range(OFTEN):
                    kept.append(attention(q, k, v, causal=True))
                own.synchronize()
                get_plan_cache().clear()
        except Exception as error:  # raised in the test's own thread
            failed.append(error)

    with xp.cuda.Stream(non_blocking=True) as stream:
        held = attention(q, k, v)
        stream.synchronize()
        stream.begin_capture()
        attention(q, k, v, out=held)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        graph = stream.end_capture()
        assert not failed, failed
        held.fill(np.nan)
        graph.launch(stream)
        np.testing.assert_array_equal(engine.get(held), want)
        stream.synchronize()
    for x in kept:
        np.testing.assert_array_equal(engine.get(x), causal)
