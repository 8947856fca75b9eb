"""Functions that change: a pullback, a prepared call and a captured graph compute what was traced when they were made.

Results are compared with those of a function that never changes.
"""

import gc
import importlib
import itertools
import weakref

import fake_libraries
import numpy as np
import pytest
from cases import as_float

from cupy_sdpa import attention, attention_backward, attention_jvp, attention_vjp, block_mask, get_plan_cache, prepare
from cupy_sdpa._cudnn.library import library
from cupy_sdpa.parallel import Loopback, context_parallel, run_threads


@pytest.fixture(params=["numpy", "fake"])
def engine(request):
    """numpy, and the fake CuPy."""
    if request.param == "numpy":
        yield np
        return
    fake = request.getfixturevalue("fake")
    yield fake
    fake.cuda.Device().synchronize()


def arrays(xp, count=4, size=24):
    """Arrays ``(16, 2, size, 1)``: float64 on numpy, float16 on the fake CuPy."""
    rng = np.random.default_rng(0)
    dtype = np.float64 if xp is np else np.float16
    return [xp.asarray(np.asfortranarray(rng.standard_normal((16, 2, size, 1)).astype(dtype))) for _ in range(count)]


def equal(got, want):
    """Assert that results are equal."""
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(as_float(a), as_float(b))


FACTOR = 2.0


def loop_variable():
    """The closure of a loop."""
    factor = 2.0

    def change():
        nonlocal factor
        factor = 3.0

    return (lambda s, *_: s * factor), change


def global_variable():
    """A global number; the fixture ``restored`` restores it."""

    def change():
        globals()["FACTOR"] = 3.0

    return (lambda s, *_: s * FACTOR), change


def container():
    """An element of a list, for which a function is traced in every call."""
    values = [2.0]
    return (lambda s, *_: s * values[0]), lambda: values.__setitem__(0, 3.0)


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
    return made, lambda: setattr(made, "factor", 3.0)


def default():
    """A default."""

    def function(s, b, h, i, j, factor=2.0):
        return s * factor

    return function, lambda: setattr(function, "__defaults__", (3.0,))


def code():
    """The code."""

    def function(s, *_):
        return s * 2.0

    return function, lambda: setattr(function, "__code__", (lambda s, *_: s * 3.0).__code__)


def array():
    """An array that the function refers to."""
    value = np.array(2.0)
    return (lambda s, *_: s * value), lambda: value.fill(3.0)


def every_call():
    """A function that computes something else in every call."""
    numbers = itertools.chain([2.0], itertools.repeat(3.0))
    return (lambda s, *_: s * next(numbers)), lambda: None


CHANGES = [loop_variable, global_variable, container, callable_object, default, code, array, every_call]


@pytest.fixture
def restored(monkeypatch):
    """Restore the global number."""
    monkeypatch.setitem(globals(), "FACTOR", 2.0)


@pytest.mark.parametrize("change_of", CHANGES, ids=lambda change: change.__name__)
def test_a_pullback_computes_with_the_function_of_the_forward_pass(change_of, engine, restored):
    """Also in its first call, and again after another call with the changed function."""
    q, k, v, dout = arrays(engine)
    function, change = change_of()
    out, pullback = attention_vjp(q, k, v, score_mod=function)
    change()
    want, own = attention_vjp(q, k, v, score_mod=lambda s, *_: s * 2.0)
    later, other = attention_vjp(q, k, v, score_mod=lambda s, *_: s * 3.0)
    equal([out], [want])
    equal(attention_vjp(q, k, v, score_mod=function)[1](dout), other(dout))
    for _ in range(2):
        equal(pullback(dout), own(dout))
    equal([attention(q, k, v, score_mod=function)], [later])


@pytest.mark.parametrize("change_of", CHANGES, ids=lambda change: change.__name__)
def test_a_prepared_call_computes_with_the_function_of_prepare(change_of, engine, restored):
    """In both passes; a function that is passed to the prepared call is used in its place."""
    q, k, v, dout = arrays(engine)
    functions = [change_of() for _ in range(2)]
    call = prepare(q, k, v, score_mod=functions[0][0], return_stats=True)
    backward = prepare(q, k, v, score_mod=functions[1][0], backward=True)
    for _, change in functions:
        change()
    for factor in (2.0, 3.0, 2.0):
        options = {} if factor == 2.0 else {"score_mod": functions[0][0]}
        out, stats = call(q, k, v, **options)
        want, own = attention_vjp(q, k, v, score_mod=lambda s, *_, factor=factor: s * factor)
        equal([out, *backward(dout, q, k, v, out, stats, **options)], [want, *own(dout)])
    with pytest.raises(ValueError, match="differs from the prepared one"):
        call(q, k, v, score_mod=lambda s, *_: s + 3.0)


def test_functions_of_pytorchs_gradients():
    """autograd's backward pass computes with the function of the forward pass."""
    with fake_libraries.installed() as libraries:
        run = importlib.import_module("cupy_sdpa.integrations.torch").attention
        host = arrays(np)
        function, change = loop_variable()
        run(*(libraries.torch(x, requires_grad=True) for x in host[:3]), layout="dhsb", score_mod=function)
        change()
        gradients = libraries.modules["torch"].state.last(libraries.torch(host[3]))
    want = attention_vjp(*host[:3], score_mod=lambda s, *_: s * 2.0)[1](host[3])
    for got, wanted in zip(gradients[:3], want, strict=True):
        np.testing.assert_allclose(got.inside, wanted, atol=1e-6)


def test_functions_of_a_loop(engine):
    """Every layer has the gradients of its own window and factor."""
    q, k, v, dout = arrays(engine)
    pullbacks = []
    for window, factor in ((2, 1.0), (9, 0.25)):
        options = {
            "score_mod": lambda s, *_: s * factor,  # noqa: B023
            "mask_mod": lambda b, h, i, j: abs(i - j) <= window,  # noqa: B023
        }
        pullbacks.append(attention_vjp(q, k, v, **options)[1])
    for (window, factor), pullback in zip(((2, 1.0), (9, 0.25)), pullbacks, strict=True):
        equal(pullback(dout), attention_vjp(q, k, v, score_mod=lambda s, *_: s * factor, window=(window, window))[1](dout))  # noqa: B023


def test_functions_of_a_loop_in_a_group(engine):
    """The pullback of every member has the gradients of its own layer."""
    q, k, v, dout = arrays(engine)
    want = []
    for factor in (1.0, 0.25):
        _, pullback = attention_vjp(q, k, v, score_mod=lambda s, b, h, i, j, factor=factor: s * factor - 0.1 * abs(i - j))
        want.append([as_float(x) for x in pullback(dout)])

    def member(own):
        cp, pullbacks = context_parallel(own), []
        parts = [cp.shard(x) for x in (q, k, v, dout)]
        for factor in (1.0, 0.25):
            function = lambda s, b, h, i, j: s * factor - 0.1 * abs(i - j)  # noqa: B023, E731
            pullbacks.append(cp.attention_vjp(*parts[:3], score_mod=function)[1])
        try:
            return [[as_float(cp.unshard(x)) for x in pullback(parts[3])] for pullback in pullbacks]
        finally:
            if engine is not np:
                get_plan_cache().clear()  # of this thread

    for found in run_threads(Loopback(2, timeout=60).members, member):
        for a, b in zip(itertools.chain(*found), itertools.chain(*want), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6 if engine is np else 4e-3)


def test_a_captured_graph_computes_what_was_captured(fake):
    """The replay of the caller's graph, after the function has changed; a new call computes the new function."""
    q, k, v, _ = arrays(fake)
    function, change = loop_variable()
    want = as_float(attention(q, k, v, score_mod=function))
    out = fake.empty_like(q)
    with fake.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        attention(q, k, v, score_mod=function, out=out)
        graph = stream.end_capture()
        change()
        out.fill(np.nan)
        graph.launch(stream)
        stream.synchronize()
        equal([out], [want])
        assert (as_float(attention(q, k, v, score_mod=function)) != want).any()
    get_plan_cache().clear()
    assert library().forget_plans() == 1


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_cached_call_with_a_block_mask_keeps_its_function(backward, fake):
    """An equal function of another object, after the first one has changed, at an address of another alignment."""
    mask = block_mask(lambda b, h, i, j: i // 128 == j // 128, 256, 256)
    made = [loop_variable() for _ in range(2)]
    first, *others = arrays(fake, size=256)
    memory = fake.empty((first.size + 4,), np.float16)
    moved = memory[4:].reshape(first.shape, order="F")
    moved[...] = first

    def run(q, function):
        options = {"block_mask": mask, "score_mod": lambda s, *_: s * 2.0} if function is None else {
            "block_mask": mask, "score_mod": function}  # fmt: skip
        k, v, dout = others
        out, stats = attention(q, k, v, return_stats=True, **options)
        return [out, *attention_backward(dout, q, k, v, out, stats, **options)] if backward else [out]

    want = run(first, None)
    for _ in range(2):
        equal(run(first, made[0][0]), want)
    made[0][1]()
    equal(run(moved, made[1][0]), want)


def test_every_pass_of_a_derivative_computes_with_one_function(engine):
    """A function that computes something else in every call is called once."""
    function, _ = every_call()
    q, k, v, t = arrays(engine)
    want = attention_jvp(q, k, v, t, t, t, score_mod=lambda s, *_: s * 2.0)
    equal(attention_jvp(q, k, v, t, t, t, score_mod=function), want)


def test_mappings_and_lists_are_read_once(engine):
    """A pullback and a prepared call keep the arrays of ``tensors``, the window and the requested gradients."""
    q, k, v, dout = arrays(engine)
    tensors, window, requested = {"t": engine.ones(2, "f4"), "u": engine.ones(2, "f4")}, [3, 0], ["t"]
    options = {"score_mod": lambda s, b, h, i, j, t, u: s * t[h] + u[h], "tensors": tensors, "window": window}
    kept = {**options, "tensors": dict(tensors), "window": (3, 0)}
    _, pullback = attention_vjp(q, k, v, return_dtensors=requested, **options)
    call = prepare(q, k, v, **options)
    tensors["t"] = engine.zeros(2, "f4")
    window[0] = 1
    requested.append("u")
    *gradients, of_tensors = attention_vjp(q, k, v, return_dtensors=["t"], **kept)[1](dout)
    *found, found_tensors = pullback(dout)
    equal(found, gradients)
    assert found_tensors.keys() == {"t"}
    equal(found_tensors.values(), of_tensors.values())
    equal([call(q, k, v)], [attention(q, k, v, **kept)])


def test_arrays_are_read_by_the_pullback():
    """Elements of captured arrays that change in place are data: the gradients are those of the present elements."""
    q, k, v, dout = arrays(np)
    t = np.ones(2)
    function = lambda s, b, h, i, j, t: s * t[h]  # noqa: E731
    _, pullback = attention_vjp(q, k, v, score_mod=function, tensors={"t": t})
    before = pullback(dout)
    t *= 2
    assert (pullback(dout)[0] != before[0]).any()


def test_a_recorded_function_keeps_nothing_alive():
    """Neither the function nor what it refers to."""
    function = Scaled()
    reference = weakref.ref(function)
    q, k, v, dout = arrays(np)
    _, pullback = attention_vjp(q, k, v, score_mod=function)
    del function
    gc.collect()
    assert reference() is None
    assert pullback(dout)[0].shape == q.shape


def test_an_error_of_a_pullback_has_the_users_line():
    """A length that differs from that of its axis is noted with the line that reads the array."""
    q, k, v, _ = arrays(np)

    def function(s, b, h, i, j, t):
        return s + t[j] * 2.0

    with pytest.raises(IndexError, match="has length 5 along axis 0, and kv_idx has 24 values") as error:
        attention_vjp(q, k, v, score_mod=function, tensors={"t": np.ones(5)})
    assert f"{__file__}:{function.__code__.co_firstlineno + 1}" in str(error.value.__notes__)


#: name -> a score function of arrays that are read at constant indices, as conditions, or without an effect.
READS = {
    "folded": lambda s, b, h, i, j, t, u, n: s * 0.5 + t[i] * 0 + u[j] * 0,
    "constant index": lambda s, b, h, i, j, t, u, n: s * t[1] - abs(i - j) * t[-2],
    "without axes": lambda s, b, h, i, j, t, u, n: s * n,
    "condition": lambda s, b, h, i, j, t, u, n: np.where(u[j], s, s * t[i]),
    "integers": lambda s, b, h, i, j, t, u, n: s + 0.1 * ((3 * i - j) // 2 % 5),
}


def captured(xp, size):
    """The arrays of these functions."""
    rng = np.random.default_rng(1)
    t, u = rng.random(size).astype(np.float32), rng.random(size) < 0.5
    return {"t": xp.asarray(t), "u": xp.asarray(u), "n": xp.asarray(np.array(0.5, np.float32))}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("method", ["ring", "all_gather", "all_to_all"])
def test_reads_of_a_group(method, name):
    """Both passes of a group equal those of one device."""
    q, k, v, dout = arrays(np)
    options = {"score_mod": READS[name], "tensors": captured(np, 24)}
    out, own_pullback = attention_vjp(q, k, v, **options)
    want = (out, *own_pullback(dout))

    def member(own):
        cp = context_parallel(own, method=method)
        out, pullback = cp.attention_vjp(*(cp.shard(x) for x in (q, k, v)), **options)
        return [cp.unshard(x) for x in (out, *pullback(cp.shard(dout)))]

    for found in run_threads(Loopback(2, timeout=60).members, member):
        for got, wanted in zip(found, want, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


BLOCKS = {
    "packed": lambda b, h, i, j: i // 130 == j // 130,
    "slices": lambda b, h, i, j: (j < 100) | (i // 130 == j // 130),
    "blocks": lambda b, h, i, j: (i // 128 + j // 128) % 2 == 0,
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("blocks", BLOCKS)
def test_reads_of_a_call_with_a_block_mask(blocks, name, engine):
    """Both passes equal those of a call with the mask function."""
    size = 260
    q, k, v, dout = arrays(engine, size=size)
    options = {"score_mod": READS[name], "tensors": captured(engine, size)}
    out, pullback = attention_vjp(q, k, v, block_mask=block_mask(BLOCKS[blocks], size, size), **options)
    host = [as_float(x).astype(np.float64) for x in (q, k, v, dout)]
    want, own = attention_vjp(*host[:3], mask_mod=BLOCKS[blocks], **(options | {"tensors": captured(np, size)}))
    for got, wanted in zip((out, *pullback(dout)), (want, *own(host[3])), strict=True):
        np.testing.assert_allclose(as_float(got), wanted, atol=1e-5 if engine is np else 2e-2)
