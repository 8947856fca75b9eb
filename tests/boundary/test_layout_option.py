"""``layout=``: every call gives the results of permuted views in the caller's axes, and copies nothing."""

import functools

import numpy as np
import pytest

import cupy_sdpa
from cupy_sdpa import attention, attention_backward, attention_jvp, attention_vjp, explain, layout, prepare, problem
from cupy_sdpa.parallel import Loopback, context_parallel, run_threads

DENSE = ["bshd", "bhsd", "sbhd"]
SIZES = {"b": 2, "s": 16, "h": 4, "d": 16, "t": 32}
EITHER_GPU = pytest.mark.parametrize("engine", ["fake", pytest.param("cupy", marks=pytest.mark.gpu)], indirect=True)


def random_arrays(letters, count=4):
    """q, k, v and dout in C order."""
    return [np.random.default_rng(n).standard_normal([SIZES[x] for x in letters]) for n in range(count)]


@pytest.mark.parametrize("letters", DENSE)
@pytest.mark.parametrize("shape", [(7,), (5, 7), (4, 1, 7), (2, 1, 5, 1)], ids=str)
def test_missing_axes_are_the_first_ones(shape, letters):
    """A mask and a bias (B, Hq, Sq, Skv) are broadcast as in numpy, and the gradient of the bias has its shape."""
    rng = np.random.default_rng(0)
    shapes = [(8, 4, 5, 2), (8, 2, 7, 2), (8, 2, 7, 2), (8, 4, 5, 2)]
    own = [np.asfortranarray(rng.standard_normal(x)) for x in shapes]
    theirs = [layout.from_julia(x, letters) for x in own]
    options = {"bias": rng.standard_normal(shape), "mask": rng.random(shape) < 0.7}
    wide = {name: np.asfortranarray(x.reshape((1,) * (4 - x.ndim) + shape).T) for name, x in options.items()}
    out, pullback = attention_vjp(*theirs[:3], layout=letters, return_dbias=True, **options)
    want, own_pullback = attention_vjp(*own[:3], return_dbias=True, **wide)
    *found, dbias = pullback(theirs[3])
    *wanted, own_dbias = own_pullback(own[3])
    for x, y in zip((out, *found), (want, *wanted), strict=True):
        np.testing.assert_array_equal(layout.to_julia(x, letters), y)
    np.testing.assert_array_equal(dbias, own_dbias.T.reshape(shape))


@pytest.mark.parametrize("letters", [*DENSE, "dhsb"])
def test_every_call_takes_a_layout(letters):
    """Each public function returns what it returns for permuted views, in the caller's axes; results share one memory order."""
    rng = np.random.default_rng(0)
    q, k, v, dout = own = [np.asfortranarray(rng.standard_normal((4, 2, 5, 2))) for _ in range(4)]
    theirs = [layout.from_julia(x, letters) for x in own]
    mask = cupy_sdpa.block_mask(lambda b, h, i, j: i >= j, 5, 5)

    def same(found, wanted):
        for x, y in zip(found, wanted, strict=True):
            x = x.T if letters != "dhsb" and x.ndim == 3 else layout.to_julia(x, letters) if x.ndim == 4 else x
            np.testing.assert_array_equal(x, y)
            assert x.strides == y.strides

    for options in ({"causal": True}, {"block_mask": mask}, {"mask_mod": lambda b, h, i, j: i >= j}):
        flags = {"return_stats": True, **options}
        same(attention(*theirs[:3], layout=letters, **flags), results := attention(q, k, v, **flags))
        given = [theirs[3], *theirs[:3], layout.from_julia(results[0], letters)]
        rows = results[1] if letters == "dhsb" else results[1].T
        want = attention_backward(dout, q, k, v, *results, **options)
        same(attention_backward(*given, rows, layout=letters, **options), want)
        out, pullback = attention_vjp(*theirs[:3], layout=letters, **options)
        want, own_pullback = attention_vjp(q, k, v, **options)
        same((out, *pullback(theirs[3])), (want, *own_pullback(dout)))
        assert pullback.nbytes == own_pullback.nbytes
        assert explain(*theirs[:3], layout=letters, **options).problem == explain(q, k, v, **options).problem
    same(attention_jvp(*theirs[:3], theirs[3], layout=letters), attention_jvp(q, k, v, dout))
    wide = cupy_sdpa.widen(*theirs[:3], theirs[3], layout=letters)
    same(attention_jvp(*theirs[:3], widened=wide, layout=letters), attention_jvp(q, k, v, dout))
    same([prepare(*theirs[:3], layout=letters, causal=True)(*theirs[:3])], [attention(q, k, v, causal=True)])
    backward = prepare(*theirs[:3], layout=letters, backward=True)
    out, stats = attention(*theirs[:3], layout=letters, return_stats=True)
    same(backward(theirs[3], *theirs[:3], out, stats), attention_vjp(q, k, v)[1](dout))
    shapes = [x.shape for x in theirs[:3]]
    for function in (problem, cupy_sdpa.jvp_problems):
        found, wanted = function(*shapes, dtype="float64", layout=letters), function(q.shape, k.shape, v.shape, dtype="float64")
        assert found == wanted


def test_a_group_takes_a_layout():
    """Members pass and get their parts in the caller's axes; without a layout, parts in C order raise."""
    q, k, v, dout = (x[:, :8] for x in random_arrays("bshd"))
    want, pullback = attention_vjp(q, k, v, layout="bshd", causal=True)
    gradients = pullback(dout)

    def member(group):
        cp = context_parallel(group)
        for forgotten in (q, q[:1], q.transpose(0, 2, 1, 3).copy()):
            with pytest.raises(ValueError, match=r"in C order: .*pass layout='b.*axis=1 for 'bshd'"):
                cp.unshard(np.ascontiguousarray(forgotten))
        parts = [cp.shard(x, axis=1) for x in (q, k, v, dout)]
        for batch in (1, 2):
            with pytest.raises(ValueError, match=r"in C order: .*pass layout='bshd'"):
                cp.attention(*[parts[0][:batch]] * 3)
        out, back = cp.attention_vjp(*parts[:3], layout="bshd", causal=True)
        assert cp.explain(*parts[:3], layout="bshd", causal=True).method
        return [cp.unshard(x, axis=1) for x in (out, *back(parts[3]))]

    for found in run_threads(Loopback(2, timeout=20).members, member):
        for x, y in zip(found, (want, *gradients), strict=True):
            assert x.flags.c_contiguous
            np.testing.assert_allclose(x, y, atol=1e-6)


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_parts_are_dense(axis):
    """For any strides of the array, including broadcast and reversed axes."""
    x = np.random.default_rng(0).standard_normal((4, 6, 8, 2))
    cp = context_parallel(Loopback(2).members[0])
    for y in (x, x.T, x[:, ::-1], x.transpose(2, 0, 3, 1), np.broadcast_to(x[:, :1], x.shape), x[:1], x[::2, :, ::2]):
        if y.shape[axis] % 4 == 0:
            part = cp.shard(y, axis=axis)
            assert part.base.flags.c_contiguous or part.base.flags.f_contiguous
            assert part.base.size == part.size
            np.testing.assert_array_equal(part, np.take(y, cp.position_ids(y.shape[axis]), axis))
            assert part.flags.c_contiguous or not y.flags.c_contiguous


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("letters", [*DENSE, "dhsb"])
def test_the_dropout_mask_of_a_call(letters, dropout_p):
    """In C order it is (B, Hq, Sq, Skv), and a call with it drops the weights of the call with the seed."""
    q, k, v = random_arrays(letters, 3)
    mask = cupy_sdpa.dropout_mask(q, k, dropout_p=dropout_p, seed=3, layout=letters)
    assert mask.shape == ((16, 16, 4, 2) if letters == "dhsb" else (2, 4, 16, 16))
    if dropout_p:
        want = attention(q, k, v, layout=letters, dropout_p=dropout_p, seed=3)
        np.testing.assert_array_equal(attention(q, k, v, layout=letters, dropout_p=dropout_p, dropout_mask=mask), want)
    else:
        assert mask.all()


# Forgotten layouts, and the axes of messages; further messages are in the tables of mistakes

STARTS = np.array([0, 4, 10], np.int32)
PACKED = {"cu_seqlens_q": STARTS, "cu_seqlens_kv": STARTS, "max_seqlen_q": 6, "max_seqlen_kv": 6}
ONE_POSITION = PACKED | dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), np.array([0, 8, 16], np.int32))
ONE_POSITION |= dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), 8)
#: Arrays whose layout was forgotten: q, options, and the hint of the message.
FORGOTTEN = {
    "bshd": (np.ones((2, 5, 3, 8)), {}, "axes are (batch 2, seq 5, heads 3, head_dim 8), pass layout='bshd'"),
    "bhsd": (np.ones((2, 3, 5, 8)), {}, "axes are (batch 2, heads 3, seq 5, head_dim 8), pass layout='bhsd'"),
    "split heads": (np.ones((2, 5, 24)).reshape(2, 5, 3, 8).transpose(0, 2, 1, 3), {},
    "axes are (batch 2, heads 3, seq 5, head_dim 8), pass layout='bhsd'"),
    "a part of fused q, k and v": (np.ones((2, 3, 3, 5, 8))[:, 1], {}, "axes are (batch 2, heads 3, seq 5, head_dim 8), pass layout='bhsd'"),
    "a batch of 8": (np.ones((8, 5, 3, 8)), {}, "axes are (batch 8, seq 5, heads 3, head_dim 8), pass layout='bshd'"),
    "a copy": (np.ones((8, 3, 5, 2), order="F").copy(), {}, "if they are (head_dim, heads, seq, batch), copy it with asfortranarray(q)"),
    "every second element of the head dim": (np.ones((16, 3, 5, 2), order="F")[::2], {}, "contiguous; copy it with asfortranarray(q)"),
    "reversed": (np.ones((8, 3, 5, 2), order="F")[:, :, ::-1], {}, "negative strides: copy it with asfortranarray(q)"),
    "a batch of 1": (np.ones((1, 8, 5, 16)), {}, "axes are (batch 1, seq 8, heads 5, head_dim 16), pass layout='bshd'"),
    "a batch of 1 and one head": (np.ones((1, 1, 5, 16)), {}, "axes are (batch 1, heads 1, seq 5, head_dim 16), pass layout='bhsd'"),
    "one packed position": (np.ones((1, 3, 16)), ONE_POSITION, "axes are (total 1, heads 3, head_dim 16), pass layout='thd'"),
    "packed": (np.ones((10, 3, 16)), PACKED, "axes are (total 10, heads 3, head_dim 16), pass layout='thd'"),
}  # fmt: skip


def calls_that_read_a_layout(x, options):
    """Every call that takes arrays with a head dim."""
    x = x.astype(np.float32, order="K") if x.base is None else x
    yield from (functools.partial(f, x, x, x, **options) for f in (attention, attention_vjp, explain, prepare))
    stats = np.zeros(x.shape[1:] if x.ndim == 3 else (x.shape[2], x.shape[1], x.shape[3]), np.float32, order="F")
    yield lambda: attention_backward(x, x, x, x, x, stats, **options)
    yield from (functools.partial(f, x, x, x, x, **options) for f in (attention_jvp, cupy_sdpa.widen))
    yield lambda: attention(x, x, x, compute_dtype="float16", **options)
    yield lambda: context_parallel().attention(x, x, x, **options)
    if x.ndim == 4:
        mask = cupy_sdpa.block_mask(lambda b, h, i, j: i >= j, sq=x.shape[2], skv=x.shape[2])
        yield lambda: attention(x, x, x, block_mask=mask, **options)


@pytest.mark.parametrize("name", FORGOTTEN)
def test_a_forgotten_layout_is_refused(name):
    """Strides that a GPU cannot read raise on the CPU, where they would be read with the wrong axes."""
    x, options, text = FORGOTTEN[name]
    for call in calls_that_read_a_layout(x, options):
        with pytest.raises(ValueError, match=r"axis 0 must be contiguous|negative strides|in C order") as found:
            call()
        assert text in str(found.value).replace("of k", "of q")
    assert problem(x, x, x, **options).q.shape == x.shape  # its report has the reason
    confirmed = attention(x, x, x, layout="dht" if x.ndim == 3 else "dhsb", **options)
    np.testing.assert_array_equal(confirmed, attention(*[np.asfortranarray(x)] * 3, **options))


def test_a_forgotten_layout_of_other_arguments_is_refused():
    """Results, gradients, biases and statistics in C order; they also raise on a GPU."""
    q = np.asfortranarray(np.random.default_rng(0).standard_normal((8, 3, 5, 2)))
    out, stats = attention(q, q, q, return_stats=True)
    backward = {"dout": out, "q": q, "k": q, "v": q, "out": out, "stats": stats}
    for name in ("dout", "out", "stats"):
        with pytest.raises(ValueError, match=f"^{name} has .*layout='dhsb', which confirms"):
            attention_backward(**{**backward, name: backward[name].copy()})
    for name in ("dq", "dk", "dv"):
        with pytest.raises(
            ValueError, match=rf"^{name} has a stride .*\(head_dim, heads, seq, batch\), allocate it with order='F'"
        ):
            attention_backward(**backward, **{name: np.empty(q.shape)})
    with pytest.raises(ValueError, match=r"^out has .*allocate it with order='F': a result cannot be written through a copy"):
        attention(q, q, q, out=np.empty(out.shape))
    with pytest.raises(ValueError, match=r"^out has .*copy it with asfortranarray\(out\)"):
        attention_backward(**{**backward, "out": out.copy()})
    for options in ({"out": np.empty(out.shape)}, {"stats": np.empty(stats.shape)}, {"bias": np.ones((5, 5, 3, 2))}):
        with pytest.raises(ValueError, match=f"^{next(iter(options))} has .*layout='dhsb', which confirms"):
            attention(q, q, q, **options)
        attention(q, q, q, layout="dhsb", **options)


ACCEPTED = {
    "Fortran order": lambda x: x,
    "x.T of C order": lambda x: np.ascontiguousarray(x.T).T,
    "heads after positions": lambda x: np.asfortranarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3),
    "a slice of every axis": lambda x: np.asfortranarray(np.pad(x, 1))[1:-1, 1:-1, 1:-1, 1:-1],
    "every second position": lambda x: np.repeat(x, 2, axis=2).copy(order="F")[:, :, ::2],
    "broadcast heads": lambda x: np.broadcast_to(x[:, :1], x.shape),
    "head dim 1": lambda x: np.asfortranarray(x[:1]),
    "head dim 1, heads after positions": lambda x: np.ascontiguousarray(x[:1, :, :, :1]),
    "one channel of every head": lambda x: x[:1],
    "one position": lambda x: np.ascontiguousarray(x[:, :1, :1, :1]),
    "no position": lambda x: np.ascontiguousarray(x[:, :, :0]),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_arrays_with_a_contiguous_head_dim_need_no_layout(name):
    """Gaps, broadcast axes, and axes of length 0 and 1 are as on a GPU."""
    x = ACCEPTED[name](np.asfortranarray(np.random.default_rng(0).standard_normal((7, 3, 5, 2))))
    found, want = (attention(x, x, x, causal=True, layout=layout) for layout in (None, "dhsb"))
    np.testing.assert_array_equal(found, want)


def test_every_layout_is_tested():
    """A new layout needs tests."""
    assert {*DENSE, "thd", "dhsb", "dht"} == set(layout.LAYOUTS)


# Repeated calls


@pytest.mark.parametrize("options", [{}, {"compute_dtype": "float16"}], ids=["plain", "compute_dtype"])
def test_errors_have_the_axes_of_the_caller(options, engine):
    """Also after a call that is cached."""
    dtype = np.float32 if options else None
    q, k, v = (engine.normal(n, 2, 20, 2, 16, dtype=dtype).copy(order="C") for n in range(3))
    for _ in range(3):
        attention(q, k, v, layout="bshd", **options)
        with pytest.raises(ValueError, match=r"\(2, 10, 2, 16\).*layout='bshd'"):
            attention(q, k, v[:, :10].copy(order="C"), layout="bshd", **options)
