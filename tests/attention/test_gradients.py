"""The public backward calls: shapes and dtypes, preallocated results, the pullback, and results of another call."""

import gc
import sys
import weakref

import ml_dtypes
import numpy as np
import pytest

from cupy_sdpa import attention, attention_backward, attention_jvp, attention_vjp, prepare, reference, widen

NAMES = ("dq", "dk", "dv")


def everything(engine=None, dtype=np.float32, **options):
    """dout, q, k, v, out, stats of a causal call of grouped heads; the head dim of v is another one."""
    rng = np.random.default_rng(0)
    shapes = (24, 4, 6, 2), (16, 4, 6, 2), (16, 2, 7, 2), (24, 2, 7, 2)
    made = [np.asfortranarray(rng.standard_normal(shape).astype(engine.dtype if engine else dtype)) for shape in shapes]
    dout, q, k, v = engine.put(made) if engine else made
    return dout, q, k, v, *attention(q, k, v, return_stats=True, **{"causal": True, **options})


def test_the_pullback_can_be_called_repeatedly(engine):
    """It is linear in dout, accepts preallocated gradients, and its first results equal the two calls' results."""
    dout, q, k, v, out, stats = everything(engine, deterministic=True)
    got, pullback = attention_vjp(q, k, v, causal=True, deterministic=True)
    np.testing.assert_array_equal(engine.get(got), engine.get(out))
    wanted = engine.get(attention_backward(dout, q, k, v, out, stats, causal=True, deterministic=True))
    for _ in range(2):
        for a, b in zip(engine.get(pullback(dout)), wanted, strict=True):
            np.testing.assert_array_equal(a, b)
    dq = engine.nan(*q.shape)
    assert pullback(engine.xp.asfortranarray(2 * dout), dq=dq)[0] is dq
    np.testing.assert_allclose(engine.get(dq), 2 * wanted[0], rtol=1e-2, atol=engine.tolerance)


def test_lists_of_lengths_are_those_of_the_forward_pass():
    """The caller's list may change before the pullback, or a prepared call, runs."""
    q, k, v = (np.random.default_rng(n).standard_normal((8, 2, 12, 2)).astype(np.float32, order="F") for n in range(3))
    lengths = [3, 4]
    options = {"seq_lens_kv": lengths, "score_mod": lambda score, b, h, q_idx, kv_idx: 2 * score}
    out, pullback = attention_vjp(q, k, v, **options)
    prepared, gradients = prepare(q, k, v, **options), pullback(out)
    lengths[0] = 12
    for again, first in zip(pullback(out), gradients, strict=True):
        np.testing.assert_array_equal(again, first)
    np.testing.assert_array_equal(prepared(q, k, v), out)


def test_the_pullback_counts_and_releases_its_memory():
    """nbytes counts q, k, v, out, stats and captured arrays once each; they are released with the pullback."""
    _, q, k, v, out, stats = everything()
    got, pullback = attention_vjp(q, k, v)
    assert pullback.nbytes == sum(x.nbytes for x in (q, k, v, out, stats))
    assert f"keeps {pullback.nbytes} bytes" in repr(pullback)
    assert attention_vjp(q, k, k)[1].nbytes == 2 * k.nbytes - k.nbytes + q.nbytes * 2 + stats.nbytes
    alive = weakref.ref(got)
    del got
    gc.collect()
    assert alive() is not None
    before = sys.getrefcount(q)
    del pullback
    assert alive() is None
    assert sys.getrefcount(q) < before
    tensors = {"w": np.ones((4, 6, 7))}
    out, keeping = attention_vjp(q, k, v, score_mod=lambda s, b, h, i, j, w: s + w[h, i, j], tensors=tensors)
    assert keeping.nbytes == attention_vjp(q, k, v)[1].nbytes + tensors.pop("w").nbytes
    assert len(keeping(out)) == 3


#: Results that a causal call with sinks and a softcap would not return, by the change; and the argument that raises.
OTHER_CALLS = {
    "another scale": (lambda q, k, v, o: attention(q, k, v, return_stats=True, **o, scale=0.1), "stats"),
    "no sinks": (lambda q, k, v, o: attention(q, k, v, return_stats=True, **{**o, "sinks": None}), "stats"),
    "no softcap": (lambda q, k, v, o: attention(q, k, v, return_stats=True, **{**o, "softcap": None}), "stats"),
    "infinite": (
        lambda q, k, v, o: (attention(q, k, v, **o), np.full_like(attention(q, k, v, return_stats=True)[1], -np.inf)),
        "stats",
    ),
    "other values": (lambda q, k, v, o: (attention(q, k, v - 1, **o), attention(q, k, v, return_stats=True, **o)[1]), "out"),
    "no output": (lambda q, k, v, o: (np.zeros_like(v), attention(q, k, v, return_stats=True, **o)[1]), "out"),
}


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", OTHER_CALLS)
def test_results_of_another_call_are_refused(name, dtype):
    """The weights that numpy's backward pass computes do not fit them; the message has the row, the values and the fix."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (np.asfortranarray(rng.standard_normal((8, 4, 16, 2)).astype(dtype)) for _ in range(4))
    options = {"causal": True, "sinks": np.float32([0.5, -1, 2, 0]), "softcap": 30.0}
    make, wrong = OTHER_CALLS[name]
    text = rf"{wrong} is from another call: at query \d+, head \d and batch item \d, .*pass the {wrong} that the forward call returned"
    with pytest.raises(ValueError, match=text):
        attention_backward(dout, q, k, v, *make(q, k, v, options), **options)
    prepared = prepare(q, k, v, backward=True, **options)
    with pytest.raises(ValueError, match=text):
        prepared(dout, q, k, v, *make(q, k, v, options))
    attention_backward(dout, q, k, v, *attention(q, k, v, return_stats=True, **options), **options)


@pytest.mark.parametrize("size", [1e-3, 1, 1e3, 1e4])
def test_rounding_is_not_another_call(size):
    """Statistics in float32 of scores up to 1e8, of masked rows, of short sequences with NaN as padding, and of float64 arrays."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (np.asfortranarray(size * rng.standard_normal((8, 2, 20, 2))) for _ in range(4))
    lengths = np.int32([0, 13])
    for x in (q, k, v, dout):
        x[:, :, 13:] = np.nan
    options = {"seq_lens_q": lengths, "seq_lens_kv": lengths, "window": (None, 1), "mask": rng.random((20, 20, 1, 1)) < 0.2}
    for dtype in ("float16", "float32", "float64")[size > 30 :]:
        arrays = [x.astype(dtype) for x in (dout, q, k, v)]
        out, stats = attention(*arrays[1:], return_stats=True, **options)
        assert np.isneginf(stats).any()
        attention_backward(*arrays, out, stats, **options)


def test_another_call_beside_the_gradient_of_the_log_sum_exp():
    """The check reads the output's own rows, not the rows that are appended to it for dstats."""
    q, k, v, dout = (np.random.default_rng(n).standard_normal((16, 2, 9, 1)).astype(np.float32, order="F") for n in range(4))
    out, stats = attention(q, k, v, return_stats=True)
    for results, wrong in (((2 * out, stats), "out"), ((out, stats + 1), "stats")):
        with pytest.raises(ValueError, match=f"{wrong} is from another call"):
            attention_backward(dout, q, k, v, *results, dstats=np.ones_like(stats))


@pytest.mark.parametrize(("dtype", "head_dim"), [("float16", 64), (ml_dtypes.bfloat16, 8)])
def test_rounding_of_small_outputs_is_not_another_call(dtype, head_dim):
    """Outputs that are subnormal in their dtype have an absolute rounding error; a wrong output still raises."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (np.asfortranarray(rng.standard_normal((head_dim, 2, 20, 2)).astype(dtype)) for _ in range(4))
    for scale in (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1):
        values = v * v.dtype.type(scale)
        out, stats = attention(q, k, values, return_stats=True)
        for size in (1e-8, 1.0):
            attention_backward(dout * v.dtype.type(size), q, k, values, out, stats)
        attention_vjp(*(x.astype(np.float32) for x in (q, k, values)), compute_dtype=dtype)[1](dout.astype(np.float32))
        with pytest.raises(ValueError, match="out is from another call"):
            attention_backward(dout, q, k, values, out + v.dtype.type(max(scale, 1e-3)), stats)


CONVERTED = {
    "three batch items": (lambda q: np.zeros((*q.shape[:3], 3), q.dtype, order="F"), "has shape"),
    "no batch axis": (lambda q: np.zeros(q.shape[:3], q.dtype, order="F"), "has .* axes|has shape"),
    "an input": (None, "overlaps (q|dout)"),
    "shared elements": (lambda q: np.zeros((*q.shape[:2], 1, 1), q.dtype, order="F"), "share memory"),
}


@pytest.mark.parametrize("case", CONVERTED)
@pytest.mark.parametrize("layout", [None, "bshd"])
def test_converted_results_are_checked(case, layout, engine):
    """With compute_dtype the call does not see the array of the caller; a wrong one was broadcast to. Nothing is written."""
    made, message = CONVERTED[case]
    options = {"compute_dtype": "float16", "layout": layout}
    arrays = [engine.normal(n, 16, 2, 5, 1, dtype=np.float32) for n in range(3)]
    wrong = arrays[0] if made is None else engine.put(made(np.zeros((16, 2, 5, 1), "f4")))
    wrong = engine.xp.broadcast_to(wrong, (16, 2, 5, 1)) if case == "shared elements" else wrong
    stats = engine.xp.full((5, 2, 1), 7, np.float32, order="F")
    if layout:
        *arrays, wrong, stats = (x.transpose(*reversed(range(x.ndim))) for x in (*arrays, wrong, stats))
        arrays = [wrong if made is None else arrays[0], *arrays[1:]]
    q, k, v = arrays
    before, pullback = engine.get(wrong).copy(), attention_vjp(q, k, v, **options)[1]
    for call in (
        lambda: attention(q, k, v, out=wrong, stats=stats, **options),
        lambda: pullback(q, dq=wrong),
        lambda: attention_jvp(q, k, v, dq=k, out=wrong, **options),
        lambda: attention_jvp(q, k, v, dq=k, dout=wrong, **options),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert (engine.get(stats) == 7).all()
    np.testing.assert_array_equal(engine.get(wrong), before)


@pytest.mark.parametrize("tangents", ["k", *(pytest.param(x, marks=pytest.mark.slow) for x in ("q", "v", "qk", "kv"))])
def test_widened_arrays_are_copies(tangents, engine):
    """Tangents are written into them, which must not change the caller's arrays."""
    q, k, v = (engine.normal(n, 16, 2, 5, 1) for n in range(3))
    given = {f"d{name}": engine.normal([7, n], 16, 2, 5, 1) if name in tangents else None for n, name in enumerate("qkv")}
    wide = widen(q, k, v, **given)
    inputs = [x for x in (q, k, v, *given.values()) if x is not None]
    before = [engine.get(x).tobytes() for x in inputs]
    for one, other in zip(attention_jvp(q, k, v, widened=wide), attention_jvp(q, k, v, **given), strict=True):
        np.testing.assert_array_equal(engine.get(one), engine.get(other))
    for array in wide.named().values():
        array.fill(0)
    assert [engine.get(x).tobytes() for x in inputs] == before


def test_sinks_and_slopes_in_float64():
    """With float64 arrays they may be float64, and are not rounded; other arrays need float32."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (
        np.asfortranarray(rng.standard_normal(s)) for s in [(8, 4, 5, 2), (8, 2, 7, 2), (6, 2, 7, 2), (6, 4, 5, 2)]
    )
    options = {"sinks": rng.standard_normal(4), "alibi_slopes": rng.random(4), "softcap": 5.0}
    out, stats = attention(q, k, v, stats=np.empty((5, 4, 2), order="F"), **options)
    wanted, rows = reference.attention(q, k, v, **options)[:2]
    np.testing.assert_allclose(out, wanted, atol=1e-13)
    np.testing.assert_allclose(stats, rows, atol=1e-13)
    *found, dsinks = attention_backward(dout, q, k, v, out, stats, return_dsinks=True, **options)
    for x, y in zip(found, reference.attention_backward(dout, q, k, v, **options), strict=False):
        np.testing.assert_allclose(x, y, atol=1e-13)
    assert dsinks.dtype == np.float64
    step = 1e-6 * np.eye(4)[1]
    high, low = (reference.attention(q, k, v, **options | {"sinks": options["sinks"] + x})[0] for x in (step, -step))
    assert abs(((high - low) * dout).sum() / 2e-6 - dsinks[1]) < 1e-8
    with pytest.raises(TypeError, match="sinks is float64"):
        attention(*(x.astype(np.float32) for x in (q, k, v)), sinks=options["sinks"])
