"""Functions that change: a call computes what its function computes now; a pullback, a prepared call and a captured graph
compute what was traced when they were made.

Results are compared with a function that never changes.
"""

import gc
import itertools
import weakref

import numpy as np
import pytest

from cupy_sdpa import attention, attention_backward, attention_jvp, attention_vjp, block_mask, prepare
from cupy_sdpa.parallel import Loopback, context_parallel, run_threads

#: Calls with the same addresses after which a CUDA graph is replayed.
OFTEN = 5


def arrays(engine, count=4, size=24):
    """Arrays ``(16, 2, size, 1)``."""
    return [engine.normal(seed, 16, 2, size, 1) for seed in range(count)]


def equal(engine, got, want):
    """Assert that results are equal."""
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(engine.get(a), engine.get(b))


def times(factor):
    """A function that never changes."""
    return lambda s, *_: s * factor


def loop_variable():
    """The closure of a loop."""
    factor = 2.0

    def change(value):
        nonlocal factor
        factor = value

    return (lambda s, *_: s * factor), change


class Scaled:
    """A callable object."""

    def __init__(self):
        self.factor = 2.0

    def __call__(self, score, *_):
        """The score times the factor."""
        return score * self.factor


def callable_object():
    """An attribute of a callable object."""
    made = Scaled()
    return made, lambda value: setattr(made, "factor", value)


def every_call():
    """A function that computes something else in every call."""
    numbers = itertools.chain([2.0], itertools.repeat(3.0))
    return (lambda s, *_: s * next(numbers)), lambda value: None


#: Of a function with an identity, and of functions that are traced in every call; test_function_identity.py has all changes.
CHANGES = [loop_variable, callable_object, every_call]
every_change = pytest.mark.parametrize("change_of", CHANGES, ids=lambda change: change.__name__)


@pytest.mark.parametrize("change_of", CHANGES[:-1], ids=lambda change: change.__name__)
def test_a_call_computes_with_the_present_function(change_of, engine):
    """Also when calls are replayed; after the change is undone, what it computed before."""
    q, k, v, _ = arrays(engine)
    function, change = change_of()
    for factor in (2.0, 3.0, 2.0, 3.0):
        change(factor)
        want = engine.get(attention(q, k, v, scale=factor / 4))
        for _ in range(OFTEN):
            np.testing.assert_allclose(engine.get(attention(q, k, v, score_mod=function)), want, atol=engine.tolerance)


def test_a_function_with_a_state_is_never_stale(engine):
    """It is traced in every call, or its results are used only in the state in which it was traced."""
    q, k, v, _ = arrays(engine)
    want = {n: engine.get(attention(q, k, v, scale=n / 4)) for n in (1, 2)}
    state = [1]

    def alternating(s, b, h, i, j):
        state[0] = 3 - state[0]
        return s * state[0]

    for n in (2, 1, 2, 1, 2, 1):
        np.testing.assert_allclose(engine.get(attention(q, k, v, score_mod=alternating)), want[n], atol=engine.tolerance)


def test_a_function_that_changes_while_the_call_runs(fake):
    """The call is not cached under the identity that the function has afterwards."""
    q, k, v = (fake.asarray(np.random.default_rng(n).standard_normal((16, 2, 24, 1)).astype("f2", order="F")) for n in range(3))
    function, change = loop_variable()

    def allocate(size):
        change(3.0)
        return fake.get_default_memory_pool().malloc(size)

    with fake.cuda.using_allocator(allocate):
        first = attention(q, k, v, score_mod=function)
    for scale, out in ((0.5, first), (0.75, attention(q, k, v, score_mod=function))):
        np.testing.assert_allclose(out.get(), attention(q, k, v, scale=scale).get(), atol=4e-3)


@every_change
def test_a_pullback_computes_with_the_function_of_the_forward_pass(change_of, engine):
    """Also in its first call, and again after another call with the changed function."""
    q, k, v, dout = arrays(engine)
    function, change = change_of()
    out, pullback = attention_vjp(q, k, v, score_mod=function)
    change(3.0)
    want, own = attention_vjp(q, k, v, score_mod=times(2.0))
    later, other = attention_vjp(q, k, v, score_mod=times(3.0))
    equal(engine, [out], [want])
    equal(engine, attention_vjp(q, k, v, score_mod=function)[1](dout), other(dout))
    for _ in range(2):
        equal(engine, pullback(dout), own(dout))
    equal(engine, [attention(q, k, v, score_mod=function)], [later])


@every_change
def test_a_prepared_call_computes_with_the_function_of_prepare(change_of, engine):
    """In both passes; a function that is passed to the prepared call is used in its place, if it differs in numbers only."""
    q, k, v, dout = arrays(engine)
    made = [change_of() for _ in range(2)]
    call = prepare(q, k, v, score_mod=made[0][0], return_stats=True)
    backward = prepare(q, k, v, score_mod=made[1][0], backward=True)
    for _, change in made:
        change(3.0)
    for factor in (2.0, 3.0, 2.0):
        options = {} if factor == 2.0 else {"score_mod": made[0][0]}
        out, stats = call(q, k, v, **options)
        want, own = attention_vjp(q, k, v, score_mod=times(factor))
        equal(engine, [out, *backward(dout, q, k, v, out, stats, **options)], [want, *own(dout)])
    for _ in range(2):
        with pytest.raises(ValueError, match="differs from the prepared one"):
            call(q, k, v, score_mod=lambda s, *_: s + 3.0)


@pytest.mark.slow
def test_functions_of_a_loop_in_a_group():
    """The pullback of every member has the gradients of its own layer."""
    host = [np.asfortranarray(np.random.default_rng(n).standard_normal((16, 2, 24, 1))) for n in range(4)]
    want = []
    for factor in (1.0, 0.25):
        want += attention_vjp(*host[:3], score_mod=lambda s, b, h, i, j, n=factor: s * n - 0.1 * abs(i - j))[1](host[3])

    def member(own):
        cp, pullbacks = context_parallel(own), []
        parts = [cp.shard(x) for x in host]
        for factor in (1.0, 0.25):
            function = lambda s, b, h, i, j: s * factor - 0.1 * abs(i - j)  # noqa: B023, E731
            pullbacks.append(cp.attention_vjp(*parts[:3], score_mod=function)[1])
        return [cp.unshard(x) for pullback in pullbacks for x in pullback(parts[3])]

    for found in run_threads(Loopback(2, timeout=60).members, member):
        for a, b in zip(found, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("engine", ["fake", pytest.param("cupy", marks=pytest.mark.gpu)], indirect=True)
def test_a_captured_graph_computes_what_was_captured(engine):
    """Of a call and of a prepared call: a function that has changed is not read, present elements of its arrays are."""
    q, k, v, _ = arrays(engine)
    weight = engine.put(np.ones(2, np.float32))
    function = lambda s, b, h, i, j, t: s * t[h] * factor  # noqa: E731
    options, factor = {"score_mod": function, "tensors": {"t": weight}}, 2.0
    want = engine.get(attention(q, k, v, scale=1.0))
    prepared = prepare(q, k, v, **options)
    attention(q, k, v, **options)
    outs = [engine.xp.empty_like(q) for _ in range(2)]
    engine.xp.cuda.Device().synchronize()
    with engine.xp.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        attention(q, k, v, out=outs[0], **options)
        prepared(q, k, v, out=outs[1])
        graph = stream.end_capture()
        factor = 3.0
        weight *= 2
        graph.launch(stream)
        stream.synchronize()
    for out in outs:
        np.testing.assert_allclose(engine.get(out), want, atol=engine.tolerance)
    assert np.abs(engine.get(attention(q, k, v, **options)) - want).max() > 0.1
    del graph, prepared
    engine.forget_plans()


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_cached_call_with_a_block_mask_keeps_its_function(backward, engine):
    """An equal function of another object, after the first one has changed, at an address of another alignment."""
    mask = block_mask(lambda b, h, i, j: i // 128 == j // 128, 256, 256)
    made = [loop_variable() for _ in range(2)]
    first, *others = arrays(engine, size=256)
    memory = engine.xp.empty((first.size + 4,), first.dtype)
    moved = memory[4:].reshape(first.shape, order="F")
    moved[...] = first

    def run(q, function):
        k, v, dout = others
        options = {"block_mask": mask, "score_mod": function}
        out, stats = attention(q, k, v, return_stats=True, **options)
        return attention_backward(dout, q, k, v, out, stats, **options) if backward else [out]

    want = run(first, times(2.0))
    for _ in range(2):
        equal(engine, run(first, made[0][0]), want)
    made[0][1](3.0)
    equal(engine, run(moved, made[1][0]), want)


def test_every_pass_of_a_derivative_computes_with_one_function(engine):
    """A function that computes something else in every call is called once."""
    q, k, v, t = arrays(engine)
    want = attention_jvp(q, k, v, t, t, t, score_mod=times(2.0))
    equal(engine, attention_jvp(q, k, v, t, t, t, score_mod=every_call()[0]), want)


def test_mappings_and_lists_are_read_once(engine):
    """A pullback and a prepared call keep the arrays of ``tensors``, the window and the requested gradients."""
    q, k, v, dout = arrays(engine)
    ones = engine.put(np.ones(2, np.float32))
    tensors, window, requested = {"t": ones, "u": ones.copy()}, [3, 0], ["t"]
    options = {"score_mod": lambda s, b, h, i, j, t, u: s * t[h] + u[h], "tensors": tensors, "window": window}
    kept = {**options, "tensors": dict(tensors), "window": (3, 0)}
    _, pullback = attention_vjp(q, k, v, return_dtensors=requested, **options)
    call = prepare(q, k, v, **options)
    tensors["t"] = ones * 0
    window[0] = 1
    requested.append("u")
    *gradients, of_tensors = attention_vjp(q, k, v, return_dtensors=["t"], **kept)[1](dout)
    *found, found_tensors = pullback(dout)
    equal(engine, found, gradients)
    assert found_tensors.keys() == {"t"}
    equal(engine, found_tensors.values(), of_tensors.values())
    equal(engine, [call(q, k, v)], [attention(q, k, v, **kept)])


def test_functions_and_arrays_are_released():
    """After the call nothing refers to a function, its closure and its arrays; a pullback refers to the arrays only."""
    q, k, v, dout = (np.ones((8, 2, 6, 1), order="F") for _ in range(4))

    def called():
        weight, cap = np.ones((1, 6), np.float32), Scaled()

        def score_mod(score, b, h, q_idx, kv_idx, weight):
            return cap(score) + weight[b, kv_idx]

        _, pullback = attention_vjp(q, k, v, score_mod=score_mod, tensors={"weight": weight}, return_dtensors=True)
        pullback(dout)
        return pullback, [weakref.ref(x) for x in (score_mod, cap, weight)]

    pullback, (*watched, weight) = called()
    gc.collect()
    assert [x() for x in watched] == [None] * 2
    before = pullback(dout)[3]["weight"]
    weight()[...] = 2  # elements are data: the gradients follow the present elements
    q *= 2
    assert before.shape == pullback(dout)[3]["weight"].shape
    del pullback
    gc.collect()
    assert weight() is None


def test_an_error_of_a_pullback_has_the_users_line():
    """A length that differs from its axis is noted with the line that reads the array."""
    x = np.ones((8, 2, 24, 1), order="F")

    def function(s, b, h, i, j, t):
        return s + t[j] * 2.0

    with pytest.raises(IndexError, match="has length 5 along axis 0, and kv_idx has 24 values") as error:
        attention_vjp(x, x, x, score_mod=function, tensors={"t": np.ones(5)})
    assert f"{__file__}:{function.__code__.co_firstlineno + 1}" in str(error.value.__notes__)


def folded(s, b, h, i, j, t, u):
    """A score function of positions that reads arrays without an effect."""
    return s * 0.5 + t[i] * 0 + u[j] * 0 + 0.1 * ((3 * i - j) // 2 % 5)


def captured(size):
    """The arrays of this function."""
    rng = np.random.default_rng(1)
    return {"t": rng.random(size).astype(np.float32), "u": rng.random(size) < 0.5}


@pytest.mark.parametrize("method", ["ring", "all_gather", "all_to_all"])
def test_reads_without_an_effect_in_a_group(method):
    """Both passes of a group equal one device's."""
    q, k, v, dout = (np.asfortranarray(np.random.default_rng(n).standard_normal((16, 2, 24, 1))) for n in range(4))
    options = {"score_mod": folded, "tensors": captured(24)}
    out, own_pullback = attention_vjp(q, k, v, **options)
    want = (out, *own_pullback(dout))

    def member(own):
        cp = context_parallel(own, method=method)
        out, pullback = cp.attention_vjp(*(cp.shard(x) for x in (q, k, v)), **options)
        return [cp.unshard(x) for x in (out, *pullback(cp.shard(dout)))]

    for found in run_threads(Loopback(2, timeout=60).members, member):
        for got, wanted in zip(found, want, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


def documents(b, h, q_idx, kv_idx):
    """Two documents, and keys before both."""
    return (kv_idx < 100) | (q_idx // 130 == kv_idx // 130)


@pytest.mark.slow
def test_reads_without_an_effect_and_a_block_mask(engine):
    """Both passes equal a call with the mask function."""
    size = 260
    q, k, v, dout = arrays(engine, size=size)
    options = {"score_mod": folded, "tensors": captured(size)}
    out, pullback = attention_vjp(q, k, v, block_mask=block_mask(documents, size, size), **engine.put(options))
    host = [engine.get(x).astype(np.float64) for x in (q, k, v, dout)]
    want, own = attention_vjp(*host[:3], mask_mod=documents, **options)
    for got, wanted in zip((out, *pullback(dout)), (want, *own(host[3])), strict=True):
        np.testing.assert_allclose(engine.get(got), wanted, atol=4 * engine.tolerance)
