"""Autotuning: which engine configs are tried and accepted, and how the result is stored and printed."""

from dataclasses import replace

import numpy as np
import pytest
from fake_cupy import library
from fake_cupy.cudnn import CONFIGS, Config

import cupy_sdpa
from cupy_sdpa import attention, attention_backward, attention_vjp, autotune, explain, get_plan_cache, prepare, store

on_cudnn = pytest.mark.parametrize("engine", ["fake", pytest.param("cupy", marks=pytest.mark.gpu)], indirect=True)
#: The first config takes 800 us.
FIRST = CONFIGS[0]


@pytest.fixture(autouse=True)
def no_tuned_plans():
    """No plan of the test is found by others."""
    yield
    store.kept().clear()


@on_cudnn
def test_the_fastest_plan_is_kept(engine):
    """Every config is measured, results stay right, and the choice is stored: another plan cache finds it."""
    get_plan_cache().clear()
    q, k, v = (engine.normal(seed, 64, 4, 48, 2) for seed in range(3))
    want = engine.get(attention(q, k, v, causal=True))
    call = prepare(q, k, v, causal=True, autotune=True)
    plan, tuning = call.report.plan, call.tuning
    assert plan.tuned
    assert tuning.after <= tuning.before
    lines = str(tuning).splitlines()
    assert "us before" in lines[0]
    assert lines[1].split() == ["time", "engine", "knobs", "workspace"]
    assert len(lines) == 2 + len(tuning.trials) == tuning._repr_html_().count("<tr>") + 1
    for got in (call(q, k, v), attention(q, k, v, causal=True)):
        np.testing.assert_allclose(engine.get(got), want, atol=6e-3)
    assert prepare(q, k, v, causal=True, autotune=True).tuning is None
    get_plan_cache().clear()
    again = explain(q, k, v, causal=True).plan
    assert (again.tuned, again.loaded, again.engine, again.knobs) == (True, True, plan.engine, plan.knobs)
    get_plan_cache().clear()


@on_cudnn
def test_both_passes_are_tuned_once_on_the_current_stream(engine):
    """In the context manager, for each problem; results are right, also of later calls on that stream."""
    q, k, v, dout = (engine.normal(seed, 16, 2, 20, 1) for seed in range(4))
    out, stats = attention(q, k, v, return_stats=True)
    want = [engine.get(x) for x in (out, *attention_backward(dout, q, k, v, out, stats))]
    get_plan_cache().clear()
    engine.xp.cuda.Device().synchronize()
    with engine.xp.cuda.Stream(non_blocking=True) as stream:
        with autotune() as found:
            out, pullback = attention_vjp(q, k, v)
            results = [(out, *pullback(dout)), (out, *pullback(dout))]
        results.append((out, *pullback(dout)))
        for got in results:
            for a, b in zip(got, want, strict=True):
                np.testing.assert_allclose(engine.get(a), b, atol=2e-2)
        if engine.name == "fake":
            assert {execution.stream for execution in library().executions[-2:]} == {stream.ptr}
        stream.synchronize()
    assert [tuning.problem.backward for tuning in found] == [False, True]
    assert prepare(q, k, v, backward=True, autotune=True).report.plan.tuned
    get_plan_cache().clear()


def tuned(fake, *configs, **options):
    """Autotune a call whose first config takes 800 us and is right; returns the prepared call."""
    library().configs = (FIRST, *configs)
    x = fake.asarray(np.asfortranarray(np.random.default_rng(0).standard_normal((16, 2, 20, 1)).astype(np.float16)))
    want, _ = attention(x, x, x, return_stats=True, **options)
    call = prepare(x, x, x, autotune=True, **options)
    np.testing.assert_allclose(call(x, x, x).get(), want.get(), rtol=2e-2, atol=2e-2)
    return call


#: What another config does, and whether it is accepted.
OTHERS = {
    "right": ({}, True), "rounded": ({"factor": 1.001}, True), "wrong": ({"factor": 1.05}, False), "zeros": ({"factor": 0.0}, False),
    "not_written": ({"factor": float("nan")}, False), "refused": ({"fails": "finalize"}, False),
    "no_kernel": ({"fails": "finalize", "status": 4001}, False), "not_launched": ({"fails": "execute"}, False),
    "no_memory": ({"fails": "execute", "error": MemoryError("too large")}, False),
    "another_allocators_error": ({"fails": "execute", "error": RuntimeError("out of memory")}, False),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_only_right_results_are_accepted(name, fake):
    """A faster config replaces the plan only if its results are equal up to rounding; else it is destroyed and listed."""
    changes, accepted = OTHERS[name]
    call = tuned(fake, Config(1, us=100.0, **changes))
    assert call.report.plan.engine == (1 if accepted else 2)
    assert call.report.plan.tuned
    assert call.tuning.gain == (pytest.approx(8, rel=0.05) if accepted else 1.0)
    times = {trial.engine: trial.us for trial in call.tuning.trials}
    if changes.get("fails") == "finalize":
        assert times.keys() == {2}
    else:
        assert (times[1] is not None) is accepted
        assert accepted or "wrong results" in str(call.tuning)
    assert library().live == {"EXECUTION_PLAN": 2}, "the plan, and that of the call with the log-sum-exp"


def test_a_right_config_wins_over_wrong_ones(fake):
    """Of many configs the fastest that is right is used; a gain of 1 % is noise and changes nothing; an interrupt leaves nothing."""
    right = [Config(1, (("KERNEL_CFG", n),), us=100.0 + 10 * n) for n in range(7)]
    wrong = [replace(config, engine=3, us=50.0, factor=1.5) for config in right[:2]]
    call = tuned(fake, *wrong, *reversed(right), right[3])
    assert (call.report.plan.engine, call.report.plan.knobs) == (1, (("KERNEL_CFG", 0),))
    assert len(call.tuning.trials) == 10
    assert tuned(fake, Config(1, us=795.0), causal=True).report.plan.engine == 2
    interrupts = Config(1, fails="execute", error=KeyboardInterrupt())
    before = library().live["EXECUTION_PLAN"]
    with pytest.raises(KeyboardInterrupt):
        tuned(fake, Config(3, us=100.0), interrupts, window=(3, 0))
    assert library().live["EXECUTION_PLAN"] == before + 2, "the plans of both calls"


def test_tuning_keeps_within_max_workspace(fake):
    """The limit of the problem applies to every config."""
    assert tuned(fake, Config(1, us=100.0), max_workspace=4096).report.plan.engine == 1
    with pytest.raises(cupy_sdpa.Unsupported, match="4095 are allowed"):
        tuned(fake, Config(1, us=100.0), max_workspace=4095)


@pytest.mark.parametrize("ordered", [False, True])
def test_tuning_keeps_deterministic_gradients_deterministic(ordered, fake):
    """Configs of the graph that writes dQ directly are tried; the ordered engine is the only one of its graph."""
    library().version = 92800
    x = fake.ones((16, 2, 20, 1), np.float16, order="F")
    attention(x, x, x, return_stats=True)  # its plan is used by prepare()
    options = {"backward": True, "deterministic": True}
    library().configs = (replace(FIRST, fails="finalize" * ordered),)
    assert prepare(x, x, x, **options).report.plan.engine == (6 if ordered else 2)
    library().configs = (FIRST, Config(1, us=100.0))
    call = prepare(x, x, x, autotune=True, **options)
    assert call.report.plan.engine == (6 if ordered else 1)
    assert call.report.plan.tuned
    assert len(call.tuning.trials) == (1 if ordered else 2)
