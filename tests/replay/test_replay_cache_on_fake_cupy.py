"""Repeated, captured, prepared and autotuned calls on host memory: their addresses and streams, see :mod:`fake_cupy`.

Streams are lazy and freed memory is NaN, so a stale address or stream gives a wrong result. On a real GPU:
tests/replay/test_gpu_replay.py and tests/plans/test_gpu_plans.py.
"""

import contextlib
import functools
import itertools
import sys
import threading

import numpy as np
import pytest
from cases import Case, as_float
from fake_cupy import DEVICE
from fake_cupy.cudnn import CONFIGS
from not_parsed import not_parsed
from tolerance import assert_close

import cupy_sdpa
from cupy_sdpa import attention, attention_backward, attention_vjp, explain, get_plan_cache, prepare, reference
from cupy_sdpa._cudnn.library import library
from cupy_sdpa.calls import replay_cache
from cupy_sdpa.device import memory
from cupy_sdpa.device.cuda_graph import Recording

#: Calls with the same addresses after which a CUDA graph is replayed.
OFTEN = replay_cache.CAPTURE_AFTER + 1


@pytest.fixture
def cupy(fake):
    """Install the fake CuPy."""
    return fake


@contextlib.contextmanager
def replayed():
    """Assert that cuDNN is not called, because a CUDA graph runs."""
    before = len(library().executions)
    yield
    assert len(library().executions) == before, "the call was not replayed"


CASES = [
    Case("plain", d=16, sq=20, skv=24, hkv=2, causal=True),
    Case("lengths", d=16, sq=40, skv=48, seq_lens_q=(20, 33), seq_lens_kv=(40, 3)),
    Case("packed", d=16, packed=True, seq_lens_q=(19, 0, 7), seq_lens_kv=(16, 4, 0), b=3, hkv=2, causal=True, tail=3),
    Case("mask", d=16, sq=20, mask="kb"),
    Case("bias", d=16, sq=20, bias="hb"),
    Case("sinks_and_slopes", d=16, sq=20, sinks=True, alibi=True),
    Case("max_sumexp", d=16, sq=20, stats="max_sumexp"),
    Case("dropout", d=16, sq=20, dropout=0.25),
]


class Problem:
    """The arrays and options of a case, results full of NaN, and both passes with preallocated results."""

    def __init__(self, cupy, case, **options):
        self.cupy, self.case = cupy, case
        self.options = case.options(cupy) | options
        self.inputs = [cupy.asarray(x) for x in (*case.arrays(), case.dout())]
        q, k, v, _ = self.inputs
        rows = (case.hq, q.shape[2]) if case.packed else (case.sq, case.hq, case.b)
        self.results = [cupy.empty_like(x) for x in (q, q, k, v)]
        self.results.insert(1, cupy.empty(rows, np.float32, order="F"))
        self.poison()

    def poison(self):
        """Fill the results with NaN."""
        for x in self.results:
            x.fill(np.nan)

    def run(self):
        """Run both passes with preallocated results; returns their contents after the current stream is done."""
        self.launch()
        return [as_float(x) for x in self.results]

    def launch(self):
        """Run both passes without synchronization."""
        q, k, v, dout = self.inputs
        out, stats, dq, dk, dv = self.results
        attention(q, k, v, out=out, stats=stats, **self.options)
        attention_backward(dout, q, k, v, out, stats, dq=dq, dk=dk, dv=dv, **self.options)

    def fresh(self):
        """A copy at other addresses, which no call has used."""
        other = object.__new__(Problem)
        other.__dict__ |= self.__dict__
        arrays = {name: x.copy("K") for name, x in self.options.items() if isinstance(x, self.cupy.ndarray)}
        other.options = self.options | arrays
        other.inputs, other.results = [x.copy("K") for x in self.inputs], [x.copy("K") for x in self.results]
        other.poison()
        return other

    def change(self):
        """Change inputs and lengths in place."""
        self.inputs[0] *= 2
        self.inputs[2] *= -1
        for name in self.options.keys() & {"seq_lens_kv", "mask", "bias", "sinks", "alibi_slopes"}:
            self.options[name][...] = self.options[name][::-1].copy()


def equal(got, want):
    """Assert that results are equal and contain no NaN."""
    for a, b in zip(got, want, strict=True):
        assert not np.isnan(a).any()
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_repeated_calls_are_not_parsed(case, cupy):
    """With every option and in both passes, on new addresses from the second call on, and whether a graph is replayed or not."""
    problem = Problem(cupy, case)
    out, stats = attention(*problem.inputs[:3], return_stats=True, **problem.options)
    first = attention_backward(problem.inputs[3], *problem.inputs[:3], out, stats, **problem.options)
    others = [problem.fresh() for _ in range(3)]
    with not_parsed():
        for other in others:
            again, rows = attention(*other.inputs[:3], return_stats=True, **other.options)
            gradients = attention_backward(other.inputs[3], *other.inputs[:3], again, rows, **other.options)
            equal([as_float(x) for x in (again, rows, *gradients)], [as_float(x) for x in (out, stats, *first)])


def kinds():
    """The kinds of all nodes of all instantiated CUDA graphs."""
    return {work.kind for works in DEVICE.executables.values() for work in works}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_replays_read_the_present_contents(case, cupy):
    """A replayed call is right after its inputs changed, and its memory is not allocated to others."""
    problem = Problem(cupy, case)
    for _ in range(2 * OFTEN):
        want = problem.run()
    assert kinds() <= {"kernel", "memset", "memcpy"}, "a graph allocates memory"
    with replayed():
        equal(problem.run(), want)
    sizes = [1 << n for n in range(8, 17)] + [x.nbytes for x in problem.results]
    others = [cupy.full(size, 7, np.uint8) for size in sizes for _ in range(8)]  # all free memory that might be reused
    problem.change()
    problem.poison()
    with replayed():
        got = problem.run()
    assert all((x.get() == 7).all() for x in others)
    equal(got, problem.fresh().run())


def test_addresses_of_results_and_inputs_change(cupy):
    """New results and inputs at other addresses: each call uses its own arrays."""
    case = Case("moving", d=16, sq=20, skv=24)
    q, k, v = map(cupy.asarray, case.arrays())
    want = as_float(attention(q, k, v))
    kept = [attention(q, k, v) for _ in range(2 * OFTEN)]
    for _ in range(2 * OFTEN):
        equal([as_float(attention(q, k, v))], [want])
    for factor in (2, 3):
        other = v * np.float32(factor).astype(v.dtype)
        equal([as_float(attention(q, k, cupy.asfortranarray(other)))], [as_float(attention(q, k, cupy.asfortranarray(other)))])
        np.testing.assert_allclose(as_float(attention(q, k, cupy.asfortranarray(other))), factor * want, rtol=0.02, atol=0.02)
    equal(map(as_float, kept), [want] * len(kept))


@pytest.mark.parametrize("has_flag", [True, False], ids=["contiguity", "strides"])
def test_strides_of_one_query(has_flag, cupy, monkeypatch):
    """Strides of axes of length 1 may differ: results are right, and the call is not parsed if CuPy has a flag for the others."""
    q, k, v = (cupy.asarray(x) for x in Case("one", d=16, sq=1, skv=24, b=1).arrays())
    want = as_float(attention(q, k, v))
    monkeypatch.setattr(replay_cache._runtime, "has_flag", has_flag)
    attention(q, k, v)
    same, other = q.copy("K"), cupy.full((16, 4, 3, 1), np.nan, q.dtype, order="F")[:, :, :1]
    other[...] = q
    assert other.strides != q.strides
    with not_parsed():
        equal([as_float(attention(same, k, v))], [want])
    with not_parsed() if has_flag else contextlib.nullcontext():
        equal([as_float(attention(other, k, v))], [want])


def test_the_pool_may_return_the_memory_of_results_in_any_order(cupy):
    """Gradients of equal sizes are replayed, although the pool returns their blocks in the order in which they were freed."""
    problem = Problem(cupy, Case("plain", d=16, sq=20, skv=20))
    q, k, v, dout = problem.inputs
    problem.run()
    out, stats = problem.results[:2]

    def run(order):
        gradients = list(attention_backward(dout, q, k, v, out, stats))
        contents = [as_float(x) for x in gradients]
        for number in order:
            gradients[number] = None
        return contents

    orders = list(itertools.permutations(range(3)))
    want = [run(order) for order in orders][-1]
    with replayed():
        for order in orders:
            equal(run(order), want)


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_the_current_stream_is_used(case, cupy):
    """Every launch of first, repeated and replayed calls is on the current stream."""
    problem = Problem(cupy, case)
    want = problem.run()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    cupy.cuda.Device().synchronize()
    for turn in range(2 * OFTEN):
        for stream in [*streams, cupy.cuda.Stream.null, *streams[: turn % 2]]:
            with stream:
                problem.poison()
                before = len(DEVICE.launches), len(library().executions)
                problem.launch()
                assert set(DEVICE.launches[before[0] :]) == {stream.ptr}
                stream.synchronize()
            equal([as_float(x) for x in problem.results], want)
    with streams[0], replayed():
        problem.launch()
        streams[0].synchronize()


@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_a_stream_at_the_address_of_a_destroyed_one(case, cupy):
    """CUDA reuses addresses of streams: results on the new stream are right, and on that stream only."""
    problem = Problem(cupy, case)
    want = problem.run()
    cupy.cuda.Device().synchronize()
    pointers = []
    for _ in range(3):
        stream = cupy.cuda.Stream(non_blocking=True)
        pointers.append(stream.ptr)
        with stream:
            for _ in range(OFTEN + 1):
                problem.poison()
                equal(problem.run(), want)
        del stream
    assert len(set(pointers)) == 1


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_captures_allocate_from_the_callers_stream(case, cupy):
    """During and after captures, memory comes from the pool of the caller's stream, and the handle has that stream."""
    problem, streams = Problem(cupy, case), set()
    problem.launch()  # creates the constants of the plan on a stream of their own
    cupy.cuda.Device().synchronize()

    def allocate(size):
        streams.add(cupy.cuda.get_current_stream().ptr)
        return cupy.get_default_memory_pool().malloc(size)

    with cupy.cuda.Stream(non_blocking=True) as stream, cupy.cuda.using_allocator(allocate):
        for _ in range(OFTEN):
            problem.launch()
            assert cupy.cuda.get_current_stream() is stream
            assert library()._streams[library().executions[-1].handle] == stream.ptr
        stream.synchronize()
    assert streams == {stream.ptr}


@pytest.mark.parametrize("error", [RuntimeError(2), MemoryError("another allocator's"), RuntimeError(999)], ids=str)
def test_a_failed_capture_has_no_effect_on_results(error, cupy, monkeypatch):
    """The results of the call stay, later calls are right, and nothing of the capture is left."""
    if isinstance(error, RuntimeError):
        error = cupy.cuda.runtime.CUDARuntimeError(error.args[0])
    problem = Problem(cupy, CASES[1])

    def fail(graph):
        raise error

    want = problem.run()
    with monkeypatch.context() as patch:
        patch.setattr(cupy.cuda.runtime, "graphInstantiate", fail)
        with pytest.warns(RuntimeWarning):  # noqa: PT031
            for _ in range(2 * OFTEN):
                problem.poison()
                equal(problem.run(), want)
    assert not DEVICE.graphs
    for _ in range(4 * OFTEN):
        problem.poison()
        equal(problem.run(), want)


def test_kernels_are_launched_one_by_one(cupy, monkeypatch):
    """On a busy stream one of several captured graphs is launched kernel by kernel, with the same results."""
    monkeypatch.setattr(replay_cache, "FEW_GRAPHS", 0)
    problem = Problem(cupy, CASES[0])
    want = [problem.run() for _ in range(2 * OFTEN)][-1]
    problem.poison()  # the stream is busy
    launches = len(DEVICE.launches)
    with replayed():
        problem.launch()
        assert len(DEVICE.launches) - launches >= 2
        equal([as_float(x) for x in problem.results], want)


def test_threads(cupy):
    """Four threads with a stream each, and a plan cache of one: all results are right."""
    problems = [Problem(cupy, case) for case in CASES[:3]]
    wanted = [problem.run() for problem in problems]
    cupy.cuda.Device().synchronize()
    wrong = []

    def work(seed):
        try:
            rng = np.random.default_rng(seed)
            with cupy.cuda.Stream(non_blocking=True) as stream:
                mine = [problem.fresh() for problem in problems]
                get_plan_cache().set_limit(1 + seed)
                for number in rng.integers(0, 3, 20):
                    mine[number].poison()
                    equal(mine[number].run(), wanted[number])
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


def test_one_plan_at_a_time(cupy):
    """With a limit of one plan each call destroys the previous one, whose work may be queued: results are right."""
    get_plan_cache().set_limit(1)
    problems = [Problem(cupy, case) for case in CASES[:3]]
    wanted = [problem.run() for problem in problems]
    for _ in range(OFTEN):
        for problem in problems:
            problem.poison()
            problem.launch()
        for problem, want in zip(problems, wanted, strict=True):
            equal([as_float(x) for x in problem.results], want)
    assert get_plan_cache().size == 1
    get_plan_cache().set_limit(256)


# Captured by the user


@pytest.mark.parametrize("options", [{}, {"bucket": 64}], ids=["exact", "bucket"])
@pytest.mark.parametrize("case", [case for case in CASES if case.name != "max_sumexp"], ids=str)
def test_captured_calls(case, options, cupy):
    """Both passes in a CUDA graph: replayed with changed contents, after the plan cache was emptied, with other work between."""
    if options and case.packed:
        options = {"bucket": 32}
    problem = Problem(cupy, case, **options)
    want = problem.run()
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        problem.launch()
        graph = stream.end_capture()
        problem.poison()
        graph.launch(stream)
        equal([as_float(x) for x in problem.results], want)
        problem.change()
        fresh = problem.fresh().run()
        get_plan_cache().clear()
        for size in (1 << 10, 1 << 14):
            junk = [cupy.full(size, np.nan, np.float32) for _ in range(8)]
            problem.poison()
            graph.launch(stream)
            equal([as_float(x) for x in problem.results], fresh)
            assert all(np.isnan(x.get()).all() for x in junk)
        stream.synchronize()
    assert library().forget_plans() == 2, "the plans that were captured are kept, and no other"


def blocks(cupy):
    """A call that consists of several calls."""
    mask = cupy_sdpa.block_mask(lambda b, h, q_idx, kv_idx: (q_idx // 128 + kv_idx // 128) % 2 == 0, 256, 256)
    q, k, v = (cupy.asarray(x) for x in Case("blocks", d=16, sq=256, skv=256).arrays())
    out = cupy.empty_like(q)
    return out, lambda: attention(q, k, v, block_mask=mask, out=out)


def both_passes(cupy):
    """Two calls with copies of their arrays."""
    problem = Problem(cupy, CASES[1])
    return problem.results[-1], problem.launch


@pytest.mark.parametrize("make", [both_passes, blocks], ids=lambda make: make.__name__)
def test_captured_graphs_own_the_memory_of_whole_calls(make, cupy):
    """No node of a graph allocates memory, so its kernels can be launched one by one; also for calls that are parsed."""
    result, call = make(cupy)
    call()
    want = as_float(result)
    recording = Recording(call)
    kinds = {work.kind for work in DEVICE.graphs[recording._graph]}
    assert not kinds & {"alloc", "free"}
    for launch in (recording.launch_one_by_one, functools.partial(recording.launch, of_many=False)):
        result.fill(np.nan)
        junk = [cupy.full(size, np.nan, np.float32) for size in (1 << 10, 1 << 14)]
        launch()
        equal([as_float(result)], [want])
        assert all(np.isnan(x.get()).all() for x in junk)
    cupy.cuda.Device().synchronize()
    recording.close()
    get_plan_cache().clear()
    library().forget_plans()


def test_a_capture_without_a_plan_raises(cupy):
    """A call, prepare() and autotuning without a plan raise, and the capture continues."""
    problem = Problem(cupy, CASES[0])
    q, k, v, _ = problem.inputs
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        with pytest.raises(RuntimeError, match="before the capture begins"):
            attention(q, k, v)
        with pytest.raises(RuntimeError, match="before the capture begins"):
            prepare(q, k, v)
        graph = stream.end_capture()
    want = problem.run()
    cupy.cuda.Device().synchronize()
    with stream:
        call = prepare(q, k, v, **problem.options)
        stream.begin_capture()
        with cupy_sdpa.autotune(), pytest.raises(RuntimeError, match="tune before"):
            attention(q, k, v, **problem.options)
        call(q, k, v, out=problem.results[0])
        graph = stream.end_capture()
        problem.poison()
        graph.launch(stream)
        equal([as_float(problem.results[0])], want[:1])
    get_plan_cache().clear()
    assert library().forget_plans() == 1


# Prepared and autotuned calls


def test_prepared_calls(cupy):
    """A prepared call is replayed; other contents, lengths and addresses are computed; other problems raise."""
    case = CASES[1]
    q, k, v = (cupy.asarray(x) for x in case.arrays())
    options, out = case.options(cupy), cupy.empty_like(q)
    call = prepare(q, k, v, **options)
    assert call.report
    for _ in range(OFTEN):
        out.fill(np.nan)
        call(q, k, v, out=out)
    options["seq_lens_kv"][...] = options["seq_lens_kv"][::-1].copy()
    out.fill(np.nan)
    with replayed():
        assert call(q, k, v, out=out) is out
    want = as_float(attention(q, k, v, **options))
    equal([as_float(out)], [want])
    lengths = cupy.asarray(np.array([1, 2], np.int32))
    other = as_float(call(q, k, v, seq_lens_kv=lengths))
    equal([other], [as_float(attention(q, k, v, **(options | {"seq_lens_kv": lengths})))])
    equal([as_float(call(*(x.copy("K") for x in (q, k, v))))], [want])
    with pytest.raises(ValueError, match="differs from the prepared one"):
        call(q[:, :, :10], k, v)
    with pytest.raises(TypeError, match="0 arrays are passed"):  # the arrays of a cached call, as results
        call(out=q, stats=k, dq=v)
    with pytest.raises(TypeError, match="dq is not a result"):
        call(q, k, v, dq=q)


def right(q, k, v, out):
    """Assert that an output of causal attention is right."""
    arrays = [x.get() for x in (q, k, v)]
    assert_close(out.get(), reference.attention(*arrays, causal=True)[0], attention(*arrays, causal=True))


def test_tuning_takes_the_fastest_that_is_right(cupy):
    """One engine config is faster and wrong, two cannot run; the faster one that is right is used."""
    fastest = CONFIGS[4]
    assert {fastest.fails, fastest.wrong, fastest.us} == {"", False, 400.0}
    q, k, v = (cupy.asarray(x) for x in CASES[0].arrays())
    first = explain(q, k, v, causal=True).plan
    assert (first.engine, first.knobs) == (CONFIGS[0].engine, CONFIGS[0].knobs)
    call = prepare(q, k, v, causal=True, autotune=True)
    plan = call.report.plan
    assert (plan.engine, plan.knobs, plan.tuned) == (fastest.engine, fastest.knobs, True)
    times = {(trial.engine, trial.knobs): trial.us for trial in call.tuning.trials}
    assert times[CONFIGS[1].engine, CONFIGS[1].knobs] is None, "wrong results were accepted"
    assert times[CONFIGS[3].engine, CONFIGS[3].knobs] is None
    assert call.tuning.gain == pytest.approx(CONFIGS[0].us / fastest.us, rel=0.3)
    right(q, k, v, call(q, k, v))
    right(q, k, v, attention(q, k, v, causal=True))
    get_plan_cache().clear()
    again = explain(q, k, v, causal=True).plan
    assert (again.engine, again.knobs, again.tuned, again.loaded) == (fastest.engine, fastest.knobs, True, True)


def test_tuning_of_both_passes_on_a_stream(cupy):
    """In the context manager each pass is autotuned once, on the stream of the call, and the results are right."""
    problem = Problem(cupy, CASES[0])
    q, k, v, dout = problem.inputs
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        with cupy_sdpa.autotune() as found:
            out, pullback = attention_vjp(q, k, v, causal=True)
            first = [as_float(x) for x in pullback(dout)]
            second = [as_float(x) for x in pullback(dout)]
        right(q, k, v, out)
        stream.synchronize()
    assert [tuning.problem.backward for tuning in found] == [False, True]
    equal(first, second)
    want = Problem(cupy, CASES[0]).run()
    equal(first, want[2:])


def test_a_paged_query_needs_no_other_launch(cupy, monkeypatch):
    """One query of every sequence: cuDNN is the only launch, and other addresses are not parsed again."""
    made = lambda *shape: cupy.asarray(np.ones(shape, np.float16, order="F"))  # noqa: E731
    pages = {"page_table": cupy.asarray(np.asfortranarray([[0, 1, 2]], np.int32))}
    keys = [(made(8, 1, 4, 3), made(8, 1, 4, 3)) for _ in range(3)]
    lengths = [cupy.asarray(np.array(x, np.int32)) for x in ([3, 0, 4], [0, 1, 2], [4, 4, 0])]
    for (k, v), n in zip(keys, lengths, strict=True):
        q, before = made(8, 2, 1, 3), len(DEVICE.launches)
        out, stats = attention(q, k, v, seq_lens_kv=n, return_stats=True, **pages)
        launches = len(DEVICE.launches) - before
        assert (out.get()[0, 0, 0] == (n.get() > 0)).all()
        assert (np.isneginf(stats.get()[0, 0]) == (n.get() == 0)).all()
        monkeypatch.setattr(sys.modules["cupy_sdpa.attention"], "read_forward", None)
    assert launches == 1


def test_a_paged_query_with_a_softcap_is_cleared(cupy):
    """It was not measured that cuDNN's kernel writes sequences without keys if an option changes the scores."""
    made = lambda *shape: cupy.asarray(np.ones(shape, np.float16, order="F"))  # noqa: E731
    pages = {"page_table": cupy.asarray(np.zeros((1, 2), np.int32, order="F")), "seq_lens_kv": cupy.asarray(np.int32([3, 0]))}
    launches = []
    for options in ({}, {"softcap": 2.0}):
        attention(made(8, 2, 1, 2), made(8, 1, 4, 1), made(8, 1, 4, 1), **pages, **options)
        before = len(DEVICE.launches)
        attention(made(8, 2, 1, 2), made(8, 1, 4, 1), made(8, 1, 4, 1), **pages, **options)
        launches.append(len(DEVICE.launches) - before)
    assert launches[1] == launches[0] + 1


def test_equal_integers(cupy, monkeypatch):
    """A constant array has one address for one value; too many values and captures get new arrays."""
    monkeypatch.setattr(memory, "_equal", {})
    three = memory.equal_integers(3, 5)
    assert three.get().tolist() == [3] * 5
    assert memory.equal_integers(3, 700).data.ptr == three.data.ptr
    assert memory.is_constant(three)
    longer = memory.equal_integers(3, 5000)
    assert longer.get().tolist() == [3] * 5000
    assert three.get().tolist() == [3] * 5, "plans may store the address of the shorter one"
    for value in range(memory.MAX_EQUAL + 5):
        assert memory.equal_integers(value, 2).get().tolist() == [value] * 2
    last = memory.equal_integers(value, 2)
    assert not memory.is_constant(last)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        inside = memory.equal_integers(10**6, 4)
        assert not memory.is_constant(inside)
        del inside
        stream.end_capture()


def test_repeated_calls_are_recorded_and_replayed(cupy, tmp_path):
    """A call that was captured before the trace is written, and still replayed."""
    x = cupy.asarray(np.ones((16, 2, 20, 1), np.float16, order="F"))
    out = cupy.empty_like(x)
    for _ in range(6):
        attention(x, x, x, out=out)
    hits = get_plan_cache().hits
    with cupy_sdpa.trace(tmp_path / "problems.jsonl") as trace:
        for _ in range(3):
            attention(x, x, x, out=out)
    cupy.cuda.get_current_stream().synchronize()
    assert trace.problems == 1
    assert get_plan_cache().hits == hits + 3
