"""Every row of the table of calls, repeated: other values, addresses and options, captures, failures and evictions."""

import contextlib
import gc
import warnings
import weakref

import numpy as np
import pytest
from engines import not_parsed, on_cudnn, one_in
from fake_cupy import DEVICE
from replayed_calls import CASES, OFTEN, PARSED, REPLAY, ROWS, calls_of, changes_of, equal, functions_run
from validated_steps import validated_steps

from cupy_sdpa import Unsupported, attention, attention_backward, get_plan_cache, prepare
from cupy_sdpa.core.replay import replay_cache

#: The functions of the package that a call enters in addition to :data:`REPLAY`, because it creates other objects.
OTHER_WORK = {
    "weight sums": 7,
    "entropy": 9,
    "FP8": 100,
    "FP8 keys": 40,
    "conversion to FP8": 12,
    "gradients of the log-sum-exp": 15,  # a third pass
    "functions of every call": 20,
}
#: The rows whose arrays have other axes than the program's.
VIEWED = {"layout", "no batch axis", "attention_vjp, layout", "attention_vjp, no batch axis"}
#: The rows whose changes are in the short tier: options of every kind.
KEYS = ("plain", "block mask", "layout", "compute_dtype", "functions of every call", "arrays of functions")
#: One in three rows is in the short tier, each test another third.
FIRST, SECOND, THIRD = (one_in(3, [*ROWS[n:], *ROWS[:n]]) for n in range(3))


@pytest.fixture(autouse=True)
def _all_work_is_done(engine):
    """Replayed graphs have run when their plans are destroyed."""
    yield
    if engine.on_cudnn:
        engine.xp.cuda.Device().synchronize()


def parsed(engine, calls, *changes):
    """The results of both sets of values, or of the first one with changed options, of calls that are parsed; each step is compared."""
    try:
        with validated_steps():
            return [calls.run(0, **options) for options in changes] if changes else [calls.run(index) for index in (0, 1)]
    except Unsupported as error:
        pytest.skip(f"not supported: {error}") if engine.name == "cupy" else pytest.fail(str(error))


@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd"])
def test_results_have_the_same_strides_in_every_call(layout, engine):
    """Also along axes of length 1: otherwise the next call of a result would be another call than that of the first one."""
    lengths = {"b": 1, "s": 5, "h": 1, "d": 8}
    q = engine.xp.ascontiguousarray(engine.normal(0, *(lengths[letter] for letter in layout)))
    assert len({attention(q, q, q, layout=layout).strides for _ in range(OFTEN + 1)}) == 1


@pytest.mark.parametrize("name", FIRST)
def test_values_and_addresses(name, engine):
    """In place, with results of the caller and with new ones; on other memory nothing is parsed. Earlier results stay."""
    calls, fresh = calls_of(engine, name), calls_of(engine, name, preallocated=False)
    want, kept = parsed(engine, calls), []
    for turn in range(OFTEN + 3):
        index = turn % 2
        equal(engine, calls.run(index), want[index], f"call {turn}")
        fresh.load(index)
        results = fresh.launch()
        equal(engine, fresh.host(results), want[index], f"call {turn} with new results")
        kept += [(results, index)] * (turn < 4)
    other = fresh.elsewhere()
    with contextlib.nullcontext() if name in PARSED else not_parsed():
        results = other.launch()
    equal(engine, other.host(results), want[index], "at other addresses")
    for results, index in kept:
        equal(engine, fresh.host(results), want[index], "of an earlier call")


def arrays_made(engine, call):
    """How many arrays of the fake CuPy a call creates, views included."""
    made = []
    with pytest.MonkeyPatch.context() as patch:
        for method in ("_init", "_same_memory"):
            own = getattr(engine.xp.ndarray, method)
            patch.setattr(
                engine.xp.ndarray, method, lambda *given, own=own, **named: (made.append(own), own(*given, **named))[1]
            )
        call()
    return len(made)


@on_cudnn
@pytest.mark.parametrize("name", SECOND)
def test_host_work_and_memory(name, engine):
    """A call whose addresses return is one launch, which writes to no memory of others."""
    attention(*(engine.normal(n, 16, 1, 4, 1) for n in range(3)))  # other calls are cached from the first one on
    calls = calls_of(engine, name)
    for _ in range(2 * OFTEN):
        want = calls.run(0)
    if name not in PARSED:
        for _ in range(2 * OFTEN):
            calls.launch()
        # the pool may return other addresses in one of them
        assert min(functions_run(calls.launch) for _ in range(4)) <= calls.passes * (REPLAY + 1) + OTHER_WORK.get(name, 0)
    if engine.name == "fake":
        if name in VIEWED:
            kept = name.startswith("attention_vjp")  # the log-sum-exp
            assert arrays_made(engine, calls.launch) == len(want) + kept, "a repeated call creates views"
        kinds = {work.kind for works in DEVICE.executables.values() for work in works}
        assert kinds <= {"kernel", "memset", "memcpy"}, "a graph allocates memory"
    sizes = [1 << n for n in range(8, 17)] + [x.nbytes for x in calls.arrays.values()]
    others = [engine.xp.full(size, 7, np.uint8) for size in sizes for _ in range(4)]  # all free memory that might be reused
    equal(engine, calls.run(0), want)
    assert all((x.get() == 7).all() for x in others)
    if name in CASES:
        assert not any(calls.memory.surroundings_changed(result) for result in calls.arrays if result in want)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in KEYS)) for name in ROWS])
def test_changed_options(name, engine):
    """Calls on the same arrays that differ in an option, in turn: each is a call of its own."""
    calls, changes = calls_of(engine, name, preallocated=False), [{}, *changes_of(engine, name)]
    want = parsed(engine, calls, *changes)
    for turn in range(OFTEN):
        for options, results in zip(changes, want, strict=True):
            equal(engine, calls.run(0, **options), results, f"{options}, turn {turn}")


@on_cudnn
@pytest.mark.parametrize("name", FIRST)
def test_captured_calls(name, engine, cache):
    """In a CUDA graph of the caller: launched with changed contents, after the plan cache was emptied, with other work between."""
    calls, xp = calls_of(engine, name), engine.xp
    want = [calls.run(index) for index in (0, 1)]
    xp.cuda.Device().synchronize()
    with xp.cuda.Stream(non_blocking=True) as stream:
        calls.launch()
        stream.begin_capture()
        results = calls.launch()
        graph = stream.end_capture()
        calls.load(0)
        graph.launch(stream)
        equal(engine, calls.host(results), want[0])
        cache.clear()
        for length in range(3, 6):  # other plans, where the graph's plans may have been
            attention(*(engine.normal(seed, 16, 2, length, 1) for seed in range(3)))
        cache.clear()
        gc.collect()
        for size in (1 << 7, 1 << 10, 1 << 14):
            junk = [xp.full(size, np.nan, np.float32) for _ in range(8)]
            for x in results.values():
                if x is not None:
                    x[...] = 0
            calls.load(1)
            graph.launch(stream)
            # a seed that is a number stays as captured
            equal(engine, calls.host(results), want[1])
            assert all(np.isnan(x.get()).all() for x in junk), "a graph wrote to memory of others"
        stream.synchronize()
    del graph
    engine.forget_plans(kept=False)


@on_cudnn
@pytest.mark.in_turn(2)
@pytest.mark.parametrize("name", SECOND)
def test_calls_after_a_failure(name, engine):
    """An allocation or a launch fails: the call raises, and later calls have the right results."""
    calls = calls_of(engine, name, preallocated=False)
    want, submit = parsed(engine, calls, {})[0], DEVICE.submit

    def refuse(size):
        raise MemoryError("no memory")

    for turn in range(OFTEN):
        calls.load(0)
        if turn % 2 == 0:
            with engine.xp.cuda.using_allocator(refuse), pytest.raises(MemoryError):
                calls.launch()
        elif engine.name == "fake":
            with pytest.MonkeyPatch.context() as patch:
                left = [turn]

                def submit_or_fail(stream, work, left=left):
                    left[0] -= 1
                    if left[0] == 0:
                        raise MemoryError("no launch")
                    submit(stream, work)

                patch.setattr(DEVICE, "submit", submit_or_fail)
                with contextlib.suppress(MemoryError), warnings.catch_warnings(action="ignore"):
                    calls.launch()
        equal(engine, calls.run(0), want, f"after failure {turn}")


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("name", THIRD)
def test_evicted_calls(name, engine, monkeypatch):
    """Of more calls than are kept the oldest are parsed again; a call that is kept keeps no array and no mask alive."""
    monkeypatch.setattr(replay_cache, "MAX_CALLS", 2)
    calls = calls_of(engine, name, preallocated=False)
    want = calls.run(0)
    for length in (3, 4, 5):
        for _ in range(OFTEN):
            equal(engine, calls.run(0), want)
        if length == 4 and engine.on_cudnn:
            get_plan_cache().clear()
            assert not get_plan_cache().recordings
            assert not DEVICE.graphs
        for _ in range(OFTEN):
            attention(*(engine.normal(seed, 16, 2, length, 1) for seed in range(3)))
    equal(engine, calls.run(0), want)
    masks = [calls.runner.block_mask] if name in CASES and calls.runner.block_mask else []
    alive = [weakref.ref(x) for x in (*calls.arrays.values(), *masks)]
    if engine.on_cudnn:
        engine.xp.cuda.Device().synchronize()
    del calls, masks
    gc.collect()
    assert not any(array() is not None for array in alive)


# Prepared calls

PREPARED = [name for name, row in CASES.items() if not {"jvp", "shared_prefix", "merge", "weight_sums"} & row["options"].keys()]


def prepared(*arrays, **options):
    """The results of a forward call that is prepared for its arrays, and called twice: the second writes into an array."""
    call = prepare(*arrays, **options)
    results = call(*arrays)
    out = results[0] if isinstance(results, tuple) else results
    own = out.copy("K")
    own.fill(np.nan)
    again = call(*arrays, out=own)
    assert (again[0] if isinstance(again, tuple) else again) is own
    return again


def both_passes(calls, forward, backward):
    """The contents of the results of both passes by name."""
    runner, memory = calls.runner, calls.memory
    options, views = runner.options(memory, calls.index), calls.arrays
    results = runner.forward(forward, memory, options, calls.index)
    if runner.case.backward:
        q, k, v = (views[name] for name in "qkv")
        dout = results["out"].copy("K")  # dense, as a prepared call expects it
        dout[...] = views["dout"]
        arrays = dout, q, k, v, results["out"], results["stats"]
        results |= runner.gradients_by_name(backward(*arrays, **options, **runner.backward_options))
    return calls.host(results)


@pytest.mark.parametrize("name", one_in(3, PREPARED))
def test_prepared_calls(name, engine):
    """They have the bits of plain calls, also with other values and at other addresses."""
    calls = calls_of(engine, name, preallocated=False)
    for index in (0, 1):
        calls.load(index)
        want = both_passes(calls, attention, attention_backward)
        equal(engine, both_passes(calls, prepared, lambda *x, **options: prepare(*x[1:4], backward=True, **options)(*x)), want)
    options, passed = calls.runner.options(calls.memory, 1), [calls.arrays[name] for name in "qkv"]
    call, want = prepare(*passed, **options), calls.host({"out": attention(*passed, **options)})
    other = calls.elsewhere()
    other.load(0)
    changed = other.host({"out": call(*(other.arrays[name] for name in "qkv"), **other.runner.options(other.memory, 0))})
    equal(
        engine,
        changed,
        other.host({"out": attention(*(other.arrays[name] for name in "qkv"), **other.runner.options(other.memory, 0))}),
    )
    for _ in range(OFTEN):
        equal(engine, calls.host({"out": call(*passed, **options)}), want)
