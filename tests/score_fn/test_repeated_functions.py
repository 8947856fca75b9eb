"""Repeated calls with functions, ``tensors`` and gradients of arrays, on host memory: nothing is parsed, and nothing is stale.

The results of a repeated call are compared with those of a call that is parsed, see :mod:`fake_cupy`.
"""

import contextlib
import functools as tools
import itertools
import weakref

import functions
import numpy as np
import pytest
from cases import as_float
from not_parsed import not_parsed

from cupy_sdpa import attention, attention_backward, attention_vjp, get_plan_cache, prepare, zoo
from cupy_sdpa._cudnn.library import library
from cupy_sdpa.calls import replay_cache
from cupy_sdpa.device import cuda_graph, driver
from cupy_sdpa.plans.sessions import session

#: Calls with the same addresses after which a CUDA graph is replayed.
OFTEN = replay_cache.CAPTURE_AFTER + 1


@pytest.fixture
def cupy(fake):
    """Install the fake CuPy; afterwards all work is done."""
    yield fake
    fake.cuda.Device().synchronize()


@contextlib.contextmanager
def parsed():
    """Parse all calls: none is cached."""
    current = session(driver.context_id())
    saved, current.cached_calls = current.cached_calls, {}
    try:
        yield
    finally:
        current.cached_calls = saved


def equal(got, want):
    """Assert that results are equal and contain no NaN; dictionaries of gradients are results."""
    flat = [[x for y in results for x in (y.values() if isinstance(y, dict) else [y])] for results in (got, want)]
    for a, b in zip(*flat, strict=True):
        assert not np.isnan(as_float(a)).any()
        np.testing.assert_array_equal(as_float(a), as_float(b))


class Arrays:
    """The arrays and options of a problem; :meth:`moved` copies them to other addresses and changes their contents."""

    def __init__(self, cupy, case, dtype="f2", heads=4, size=40, seed=0, **options):
        rng = np.random.default_rng(seed)
        shapes = [(16, heads, size, 2), (16, 2, size, 2), (16, 2, size, 2), (16, heads, size, 2)]
        self.cupy = cupy
        self.arrays = [cupy.asarray(np.asfortranarray(rng.standard_normal(shape).astype(dtype))) for shape in shapes]
        self.options = case.options(cupy, heads, size, size, 2) | options
        self.extra = {"return_dtensors": True} if case in functions.LEARNED else {}

    def run(self):
        """Both passes: the output, the log-sum-exp and the gradients."""
        q, k, v, dout = self.arrays
        out, stats = attention(q, k, v, return_stats=True, **self.options)
        return [out, stats, *attention_backward(dout, q, k, v, out, stats, **self.extra, **self.options)]

    def moved(self, factor=0.5):
        """The same problem with other values at other addresses."""
        other = object.__new__(Arrays)
        other.__dict__ |= self.__dict__
        other.arrays = [(x * np.float32(factor).astype(x.dtype)).copy("K") for x in self.arrays]
        if tensors := self.options.get("tensors"):
            copies = {name: (x[::-1] if x.ndim else x).copy("K") for name, x in tensors.items()}
            other.options = self.options | {"tensors": copies}
        return other


CHOSEN = [
    f
    for f in [*functions.ZOO, *functions.LEARNED]
    if f.name in {
        "softcap", "alibi_causal", "bias", "head_bias", "key_bias", "kerple", "document", "document_softcap", "causal", "natten",
        "prefix_lm", "valid_keys", "images", "head_windows", "added_before", "gated", "pairs", "places", "number", "chosen",
    }
]  # fmt: skip
CASES = list({f.name: f for f in CHOSEN}.values())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_second_call_is_not_parsed(case, cupy):
    """Also at other addresses and with other contents, in both passes; results equal those of a call that is parsed."""
    problem = Arrays(cupy, case)
    want = problem.run()
    for number in range(2 * OFTEN):
        other = problem.moved(0.5 + number / 8)
        with not_parsed():
            got = other.run()
        with parsed():
            equal(got, other.run())
    for _ in range(2 * OFTEN):
        equal(problem.run(), want)


@pytest.mark.parametrize("name", ["softcap", "document_softcap", "valid_keys", "alibi_causal"])
def test_calls_on_the_same_addresses_are_replayed(name, cupy):
    """Copies of bool arrays are part of the captured graph; changed contents are read."""
    problem = Arrays(cupy, next(case for case in CASES if case.name == name))
    q, k, v, _ = problem.arrays
    out = cupy.empty_like(q)
    for _ in range(OFTEN):
        attention(q, k, v, out=out, **problem.options)
    for array in [q, *problem.options.get("tensors", {}).values()]:
        array[...] = array[::-1].copy()
    before = len(library().executions)
    attention(q, k, v, out=out, **problem.options)
    assert len(library().executions) == before, "the call was not replayed"
    with parsed():
        equal([out], [attention(q, k, v, **problem.options)])


def test_functions_that_are_created_in_every_call(cupy):
    """Equal closures are one call; the pullback of attention_vjp is not parsed either."""
    problem = Arrays(cupy, functions.ZOO[0])
    *arrays, dout = problem.arrays

    def run():
        out, pullback = attention_vjp(*arrays, score_mod=zoo.softcap(3.0), mask_mod=zoo.sliding_window(7))
        return [out, *pullback(dout)]

    want = run()
    for _ in range(2 * OFTEN):
        with not_parsed() if _ == 0 else contextlib.nullcontext():
            equal(run(), want)


def changed_numbers(cupy, monkeypatch):
    """Run with 50 numbers in turn, and compare every result with one that is parsed; returns the number of plans."""
    monkeypatch.setattr(replay_cache, "MAX_CALLS", 16)
    problem = Arrays(cupy, functions.ZOO[0])
    q, k, v, _ = problem.arrays
    cache = get_plan_cache()
    cache.clear()
    for number in np.linspace(2.0, 4.0, 50):
        cap = float(number)

        def score_mod(score, b, h, q_idx, kv_idx, cap=cap):
            return cap * np.tanh(score / cap)

        def closure(score, b, h, q_idx, kv_idx):
            return cap * np.tanh(score / cap)  # noqa: B023

        for function in (score_mod, closure):
            got = [attention(q, k, v, score_mod=function) for _ in range(2)]
            want = attention(*(x.get().astype("f8") for x in (q, k, v)), score_mod=zoo.softcap(cap))
            for out in got:
                np.testing.assert_allclose(as_float(out), want, atol=4e-3)
    assert len(session(driver.context_id()).cached_calls) <= 16
    return cache.size


def test_a_number_that_changes_in_every_call(cupy, monkeypatch):
    """One plan, correct results, and a bounded number of cached calls."""
    assert changed_numbers(cupy, monkeypatch) == 1


def test_the_oracle_bites(cupy, monkeypatch):
    """If numbers in closures were not part of the identity, results would be wrong, and the test above would fail."""
    functions.without_closure_values(monkeypatch)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        changed_numbers(cupy, monkeypatch)


SETTINGS = {"alpha": 2.0}
ALPHA = 2.0


def by_global(s, b, h, i, j):
    """A function of a global number."""
    return s * ALPHA


def by_dictionary(s, b, h, i, j):
    """A function of an element of a global dictionary."""
    return s * SETTINGS["alpha"]


def by_default(s, b, h, i, j, alpha=2.0):
    """A function of a default."""
    return s * alpha


@pytest.mark.parametrize("name", ["global", "dictionary", "default", "code", "array"])
def test_changes_of_a_function_are_seen(name, cupy, monkeypatch):
    """The next call computes what the function computes now; after the change is undone, what it computed before."""
    table = np.array(2.0)
    function = {"global": by_global, "dictionary": by_dictionary, "default": by_default, "code": lambda s, b, h, i, j: 2.0 * s,
                "array": lambda s, b, h, i, j: s * table}[name]  # fmt: skip
    q, k, v, _ = Arrays(cupy, functions.ZOO[0]).arrays
    want = {alpha: as_float(attention(q, k, v, scale=alpha / 4)) for alpha in (2.0, 3.0)}
    original = function.__code__

    def change(alpha):
        monkeypatch.setitem(globals(), "ALPHA", alpha)
        monkeypatch.setitem(SETTINGS, "alpha", alpha)
        by_default.__defaults__ = (alpha,)
        table.fill(alpha)
        if name == "code":
            function.__code__ = original if alpha == 2.0 else (lambda s, b, h, i, j: 3.0 * s).__code__

    for alpha in (2.0, 3.0, 2.0, 3.0):
        change(alpha)
        for _ in range(OFTEN):
            np.testing.assert_allclose(as_float(attention(q, k, v, score_mod=function)), want[alpha], atol=4e-3)
    change(2.0)


def test_a_function_with_a_state_is_never_stale(cupy):
    """It is traced in every call, or its results are used only in the state in which it was traced."""
    q, k, v, _ = Arrays(cupy, functions.ZOO[0]).arrays
    want = {n: as_float(attention(q, k, v, scale=n / 4)) for n in range(1, 6)}
    state, numbers = [0], itertools.count(1)

    def counted(s, b, h, i, j):
        state[0] = state[0] + 1
        return s * state[0]

    def alternating(s, b, h, i, j):
        state[0] = 3 - state[0]
        return s * state[0]

    for n in range(1, 6):
        np.testing.assert_allclose(as_float(attention(q, k, v, score_mod=counted)), want[n], atol=4e-3)
    for n in range(1, 6):
        np.testing.assert_allclose(
            as_float(attention(q, k, v, score_mod=lambda s, b, h, i, j: s * next(numbers))), want[n], atol=4e-3
        )
    state[0] = 1
    for n in (2, 1, 2, 1, 2, 1):
        np.testing.assert_allclose(as_float(attention(q, k, v, score_mod=alternating)), want[n], atol=4e-3)


def test_a_function_that_changes_while_the_call_runs(cupy, monkeypatch):
    """The call is not cached under the identity that the function has afterwards."""
    q, k, v, _ = Arrays(cupy, functions.ZOO[0]).arrays
    factor = 2.0
    function = lambda s, b, h, i, j: s * factor  # noqa: E731
    original = replay_cache.Call.run

    def run(call):
        nonlocal factor
        results = original(call)
        factor = 3.0
        return results

    with monkeypatch.context() as patch:
        patch.setattr(replay_cache.Call, "run", run)
        first = attention(q, k, v, score_mod=function)
    for scale, out in ((0.5, first), (0.75, attention(q, k, v, score_mod=function))):
        np.testing.assert_allclose(as_float(out), as_float(attention(q, k, v, scale=scale)), atol=4e-3)


def table(size=40, heads=4, dtype="f4"):
    """An array for :func:`zoo.bias`."""
    return np.random.default_rng(1).standard_normal((heads, size, size)).astype(dtype)


OTHER_TENSORS = {
    "dtype": lambda xp: {"bias": xp.asarray(table(dtype="f2"))},
    "order": lambda xp: {"bias": xp.asarray(np.asfortranarray(table()))},
    "strides": lambda xp: {"bias": xp.asarray(np.repeat(table(), 2, axis=2))[:, :, ::2]},
    "reversed": lambda xp: {"bias": xp.asarray(table()[::-1])[::-1]},
    "misaligned": lambda xp: {"bias": xp.asarray(np.concatenate([np.zeros(1, "f4"), table().ravel()]))[1:].reshape(4, 40, 40)},
}


@pytest.mark.parametrize("name", OTHER_TENSORS)
def test_another_layout_of_an_array_is_another_call(name, cupy):
    """Alternating with the first layout; the gradient has the dtype of the array."""
    problem = Arrays(cupy, next(f for f in functions.LEARNED if f.name == "bias"))
    want = None
    for _ in range(OFTEN):
        for make in (lambda xp: {"bias": xp.asarray(table())}, OTHER_TENSORS[name]):
            problem.options["tensors"] = make(cupy)
            got = problem.run()
            assert got[-1]["bias"].dtype == problem.options["tensors"]["bias"].dtype
            got = [as_float(x) for x in (*got[:-1], got[-1]["bias"])]
            want = want or got
            for a, b in zip(got, want, strict=True):
                np.testing.assert_allclose(a, b, atol=0.02)


def test_another_dtype_of_an_array_is_another_call(cupy):
    """Of the same size, shape and strides."""
    q, k, v, _ = Arrays(cupy, functions.ZOO[0]).arrays
    values = np.random.default_rng(0).integers(1, 9, (4, 40))
    for _ in range(OFTEN):
        for dtype in ("i4", "f4"):
            got = attention(q, k, v, score_mod=quarters, tensors={"x": cupy.asarray(values.astype(dtype))})
            want = attention(*(x.get() for x in (q, k, v)), score_mod=quarters, tensors={"x": values.astype(dtype)})
            np.testing.assert_allclose(as_float(got), as_float(want), atol=4e-3)


def quarters(s, b, h, i, j, x):
    """A bias that reads integers or floats."""
    return s + x[h, j] * 0.25


def test_another_alignment_is_not_parsed_every_time(cupy):
    """The latest alignment is cached, also for calls that are not captured."""
    problem = Arrays(cupy, next(f for f in functions.LEARNED if f.name == "bias"))
    for make in (lambda xp: {"bias": xp.asarray(table())}, OTHER_TENSORS["misaligned"]):
        problem.options["tensors"] = make(cupy)
        want = problem.run()
        with not_parsed():
            equal(problem.run(), want)


def test_constant_indices_are_offsets(cupy):
    """A view of the caller's array at an offset, for arrays at other addresses, and with another index."""
    q, k, v, _ = Arrays(cupy, functions.ZOO[0]).arrays
    tables = np.random.default_rng(0).standard_normal((3, 40)).astype("f4")

    def function(n):
        return lambda s, b, h, i, j, x: s + x[n, j] * x[2, i]

    for n in (0, 1, -1, 0, 1):
        for factor in (1, 2, 3):
            there = {"x": cupy.asarray(factor * tables)}
            got = attention(q, k, v, score_mod=function(n), tensors=there)
            want = attention(*(x.get() for x in (q, k, v)), score_mod=function(n), tensors={"x": factor * tables})
            np.testing.assert_allclose(as_float(got), as_float(want), atol=4e-3)


@pytest.mark.parametrize("options", [{"return_dbias": True}, {"return_dtensors": True}, {"return_dtensors": ["x"]}], ids=str)
def test_gradients_of_arrays_are_not_parsed(options, cupy):
    """Gradients of a bias and of several views of an array: several launches, at other addresses."""
    rng = np.random.default_rng(0)
    problem = Arrays(cupy, functions.ZOO[0])
    q, k, v, dout = problem.arrays

    def given():
        if "return_dbias" in options:
            return {"bias": cupy.asarray(np.asfortranarray(rng.standard_normal((40, 40, 4, 1)), "f4"))}
        arrays = {"x": cupy.asarray(rng.random((4, 40)).astype("f4")), "y": cupy.asarray(rng.random(4).astype("f4"))}
        return {"score_mod": pairs, "tensors": arrays}

    def pairs(s, b, h, i, j, x, y):
        return s * y[h] + x[h, i] * x[h, j]

    out, stats = attention(q, k, v, return_stats=True, **given())
    backward = tools.partial(attention_backward, dout, q, k, v, out, stats, **options)
    backward(**given())
    for _ in range(OFTEN):
        there = given()
        with not_parsed():
            got = backward(**there)
        with parsed():
            equal(got, backward(**there))
    assert (got[3].keys() if isinstance(got[3], dict) else None) == (
        None if "return_dbias" in options else {"x", "y"} if options["return_dtensors"] is True else {"x"}
    )


@pytest.mark.parametrize("name", ["bias", "kerple", "pairs", "added_before"])
@pytest.mark.parametrize("small", [True, False], ids=["small", "large"])
def test_gradients_of_arrays_are_replayed(name, small, cupy, monkeypatch):
    """All launches and the sums are in one graph, which reads the present contents; the caller keeps earlier gradients."""
    if not small:
        monkeypatch.setattr(replay_cache, "SMALL_BYTES", 0)
    problem = Arrays(cupy, next(f for f in functions.LEARNED if f.name == name))
    for _ in range(2 * OFTEN):
        first = problem.run()
        del first  # the results and the memory get the same addresses in the next call
    before = len(library().executions)
    first = problem.run()
    assert len(library().executions) == before, "the call was not replayed"
    kept = {name: x.get().copy() for name, x in first[5].items()}
    for x in problem.options["tensors"].values():
        x *= 2
    second = problem.run()
    equal([first[5][name] for name in kept], kept.values())
    with parsed():
        equal(second, problem.run())


def test_the_requested_gradients_are_part_of_the_key(cupy):
    """Calls that differ in nothing else."""
    problem = Arrays(cupy, functions.ZOO[0])
    q, k, v, dout = problem.arrays
    there = {"score_mod": lambda s, b, h, i, j, x, y: s * x[h] + y[h], "tensors": {name: cupy.ones(4, "f4") for name in "xy"}}
    out, stats = attention(q, k, v, return_stats=True, **there)
    for _ in range(2):
        for wanted, names in ((True, "xy"), ("x", "x"), ("y", "y"), (["x", "y"], "xy"), (("y",), "y"), (False, None)):
            results = attention_backward(dout, q, k, v, out, stats, return_dtensors=wanted, **there)
            assert (set(results[3]) if names else len(results)) == (set(names) if names else 3)


@pytest.mark.parametrize("options", ["mask", "valid_keys", "seq_lens_kv"])
def test_calls_with_large_copies_are_replayed(options, cupy, monkeypatch):
    """Their graphs own no memory: it is allocated in every call. New arrays are not parsed."""
    monkeypatch.setattr(replay_cache, "SMALL_BYTES", 0)
    problem = Arrays(cupy, functions.ZOO[0])
    rng = np.random.default_rng(0)

    def given():
        if options == "mask":
            return {"mask": cupy.asarray(rng.random((40, 40, 1, 2)) < 0.7)}
        if options == "seq_lens_kv":
            return {"seq_lens_kv": cupy.asarray(rng.integers(1, 40, 2).astype("i4"))}
        return {"mask_mod": zoo.valid_keys, "tensors": {"valid": cupy.asarray(rng.random((2, 40)) < 0.7)}}

    problem.options = given()
    problem.run()
    for _ in range(OFTEN):
        problem.options = given()
        with not_parsed():
            got = problem.run()
        with parsed():
            equal(got, problem.run())
    for _ in range(2 * OFTEN):
        with not_parsed():
            equal(problem.run(), got)
    plans = get_plan_cache()
    assert plans.recordings > 0
    assert plans.recording_bytes <= plans.recordings * (cuda_graph.GRAPH_BYTES + 1024)


def test_results_at_new_addresses_are_checked(cupy):
    """An output that overlaps an array of ``tensors`` raises, also in a repeated call."""
    q, k, v, _ = Arrays(cupy, functions.ZOO[0]).arrays
    memory = cupy.asarray(table(dtype="f2"))
    options = {"score_mod": zoo.bias, "tensors": {"bias": memory}}
    for _ in range(OFTEN):
        attention(q, k, v, out=cupy.empty_like(q), **options)
    flat = memory.reshape(-1)[: q.size].reshape(q.shape[::-1]).T
    for _ in range(2):
        with pytest.raises(ValueError, match="out overlaps t0"):
            attention(q, k, v, out=flat, **options)


def test_cached_calls_keep_no_arrays_alive(cupy):
    """Neither those of the caller nor those of gradients."""
    problem = Arrays(cupy, next(f for f in functions.LEARNED if f.name == "kerple"))
    for _ in range(OFTEN):
        problem.run()
    arrays = [weakref.ref(x) for x in (*problem.arrays, *problem.options["tensors"].values())]
    del problem
    assert not any(array() for array in arrays)


def test_prepared_calls_with_functions(cupy):
    """They are not parsed, and another function is compared with the prepared one."""
    q, k, v, _ = Arrays(cupy, functions.ZOO[0]).arrays
    call = prepare(q, k, v, score_mod=zoo.softcap(3.0))
    first = call(q, k, v)
    with not_parsed():
        equal([call(q, k, v)], [first])
    other = call(q, k, v, score_mod=zoo.softcap(2.0))
    equal([other], [attention(q, k, v, score_mod=zoo.softcap(2.0))])
    for _ in range(2):
        with pytest.raises(ValueError, match="differs from the prepared one"):
            call(q, k, v, score_mod=zoo.softsign)


def test_the_results_are_right(cupy):
    """Repeated calls of both passes equal those of the CPU engine."""
    problem = Arrays(cupy, next(f for f in functions.LEARNED if f.name == "added_before"))
    for _ in range(OFTEN):
        got = problem.run()
    q, k, v, dout = (x.get().astype("f8") for x in problem.arrays)
    options = problem.options | {"tensors": {name: x.get() for name, x in problem.options["tensors"].items()}}
    out, stats = attention(q, k, v, return_stats=True, **options)
    gradients = attention_backward(dout, q, k, v, out, stats, return_dtensors=True, **options)
    for one, other in zip([*got[:5], got[5]["x"]], [out, stats, *gradients[:3], gradients[3]["x"]], strict=True):
        np.testing.assert_allclose(as_float(one), other, atol=0.03)


class Parameters:
    """Parameters of the functions below, which are changed at random."""

    alpha = 1.0


@pytest.mark.parametrize("seed", range(3))
def test_random_sequences_of_calls(seed, cupy):
    """Functions, their parameters, arrays, layouts, results and contents change at random; no result is stale."""
    rng = np.random.default_rng(seed)
    problem = Arrays(cupy, functions.ZOO[0], size=16)
    q, k, v, dout = problem.arrays
    config, weights = Parameters(), [1.0, 2.0]

    def by_object(s, b, h, i, j, x):
        return s * config.alpha + x[h, j] * weights[1]

    def by_class(s, b, h, i, j, x):
        return by_object(s, b, h, i, j, x) - Parameters.alpha * x[0, i]

    def by_condition(s, b, h, i, j, x):
        return s + x[h, j] if config.alpha > 1 else s * x[h, i]

    memory = [cupy.asarray(rng.standard_normal((16, 16)).astype("f4")) for _ in range(3)]
    views = [lambda m: m[:4], lambda m: m[4:8], lambda m: m.T[:4], lambda m: m[1:9:2], lambda m: m[:, :4].T]
    outputs = [None, cupy.empty_like(q), cupy.empty_like(q)]
    for _ in range(80):
        parameter, value = rng.integers(5), float(rng.choice([0.5, 1.0, 1.5]))
        if parameter == 0:
            config.alpha = value
        elif parameter == 1:
            weights[1] = value
        elif parameter == 2:
            Parameters.alpha = value
        elif parameter == 3:
            memory[rng.integers(3)][...] = cupy.asarray(rng.standard_normal((16, 16)).astype("f4"))
        function = [by_object, by_class, by_condition][rng.integers(3)]
        given = {"score_mod": function, "tensors": {"x": views[rng.integers(5)](memory[rng.integers(3)])}}
        if rng.random() < 0.3:
            given["mask_mod"] = zoo.sliding_window(int(rng.integers(3, 5)))
        for _ in range(rng.integers(1, 4)):
            out = outputs[rng.integers(3)]
            got, stats = attention(q, k, v, return_stats=True, out=out, **given)
            gradients = attention_backward(dout, q, k, v, got, stats, return_dtensors=bool(parameter % 2), **given)
            results = [as_float(x).copy() for x in (got, stats, *gradients[:3])] + [
                as_float(x) for x in gradients[3:] and gradients[3].values()
            ]
            with parsed():
                want, stats = attention(q, k, v, return_stats=True, **given)
                gradients = attention_backward(dout, q, k, v, want, stats, return_dtensors=bool(parameter % 2), **given)
            want = [as_float(x) for x in (want, stats, *gradients[:3])] + [
                as_float(x) for x in gradients[3:] and gradients[3].values()
            ]
            for a, b in zip(results, want, strict=True):
                np.testing.assert_array_equal(a, b)
