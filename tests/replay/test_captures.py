"""Calls that the user captures in a CUDA graph, and captures of other threads."""

import gc
import threading

import numpy as np
import pytest
from engines import on_cudnn
from fake_cupy import library
from replayed_calls import CASES, OFTEN, Calls, equal

from cupy_sdpa import attention, get_plan_cache, prepare

CAPTURED: list[tuple[str, dict[str, int]]] = [(name, {}) for name in CASES if name != "large copies"]
CAPTURED += [(name, {"bucket": 32}) for name in ("plain", "lengths", "packed")]
PARAMETERS = [pytest.param(*pair, marks=[pytest.mark.slow] * (n % 3 > 0)) for n, pair in enumerate(CAPTURED)]

pytestmark = [
    on_cudnn,
    pytest.mark.usefixtures("cache"),
]


@pytest.mark.parametrize(("name", "options"), PARAMETERS, ids=str)
def test_captured_calls(name, options, engine, cache):
    """Both passes in a CUDA graph: replayed with changed contents, after the plan cache was emptied, with other work between."""
    calls, xp = Calls(engine, name, **options), engine.xp
    want = calls.run()
    xp.cuda.Device().synchronize()
    with xp.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        results = calls.launch()
        graph = stream.end_capture()
        calls.load(0)
        graph.launch(stream)
        equal(calls.host(results), want)
        other = calls.elsewhere()
        other.load(1)
        want = other.run()
        cache.clear()
        for length in range(3, 6):  # other plans, where those of the graph may have been
            attention(*(engine.normal(seed, 16, 2, length, 1) for seed in range(3)))
        cache.clear()
        gc.collect()
        for size in (1 << 10, 1 << 14):
            junk = [xp.full(size, np.nan, np.float32) for _ in range(8)]
            calls.load(1)
            graph.launch(stream)
            equal(calls.host(results), want)
            assert all(np.isnan(x.get()).all() for x in junk)
        stream.synchronize()
    if engine.name == "fake":
        assert library().forget_plans() == (2 if "dq" in want else 1), "the plans in the graph are kept, and no other"


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
    calls, xp = Calls(engine, "plain"), engine.xp
    want = [calls.run() for _ in range(OFTEN)][-1]
    xp.cuda.Device().synchronize()
    with xp.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        results = calls.launch()
        graph = stream.end_capture()
        for run in (lambda: graph.launch(stream), calls.launch):
            calls.load(0)
            run()
            equal(calls.host(results), want)
        stream.synchronize()
    equal(calls.run(), want)


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
