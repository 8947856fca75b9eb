"""Arrays without a batch axis, and a default layout: the same results as with all axes and with layout=."""

import threading

import numpy as np
import pytest

import cupy_sdpa
from cupy_sdpa import attention, attention_backward, attention_jvp, attention_vjp, explain, fp8, layout, prepare, widen
from cupy_sdpa.parallel import ContextParallel


def arrays(engine):
    """q (8, 4, 5), k (8, 2, 7), v (16, 2, 7), dout and a bias, and q, k and v with a batch axis."""
    shapes = (8, 4, 5), (8, 2, 7), (16, 2, 7), (16, 4, 5), (7, 5, 4)
    q, k, v, dout, bias = (engine.normal(n, *shape) for n, shape in enumerate(shapes))
    return q, k, v, dout, bias, [x[..., None] for x in (q, k, v)]


def equal(engine, found, wanted):
    """Whether results without batch axes are the same bits as those with them."""
    for x, y in zip(found, wanted, strict=True):
        x, y = engine.get(x), engine.get(y)
        assert x.shape == y.shape[:-1]
        np.testing.assert_array_equal(x, y[..., 0])


@pytest.mark.parametrize("axes", [3, 4], ids="bias with {} axes".format)
def test_both_passes(axes, engine):
    """Results have no batch axis; the gradient of a bias has the shape of the bias."""
    q, k, v, dout, own_bias, wide = arrays(engine)
    bias = own_bias if axes == 3 else own_bias[..., None]
    options, wanted_options = {"bias": bias, "causal": True}, {"bias": own_bias[..., None], "causal": True}
    found, wanted = (attention(*x, return_stats=True, **o) for x, o in (((q, k, v), options), (wide, wanted_options)))
    equal(engine, found, wanted)
    *gradients, dbias = attention_backward(dout, q, k, v, *found, return_dbias=True, **options)
    *others, other = attention_backward(dout[..., None], *wide, *wanted, return_dbias=True, **wanted_options)
    equal(engine, gradients, others)
    assert dbias.shape == bias.shape
    np.testing.assert_array_equal(engine.get(dbias).ravel(), engine.get(other).ravel())
    _, pullback = attention_vjp(q, k, v, **options)
    equal(engine, pullback(dout), others)
    call = prepare(q, k, v, backward=True, return_dbias=True, **options)
    equal(engine, call(dout, q, k, v, *found)[:3], others)
    assert explain(q, k, v, **options)
    assert explain(q, k, v, backward=True, **options)


def test_derivatives(engine):
    """Also with the wide arrays, and results that are passed."""
    q, k, v, dout, _, wide = arrays(engine)
    wanted = attention_jvp(*wide, *wide, return_stats=True)
    equal(engine, attention_jvp(q, k, v, q, k, v, return_stats=True), wanted)
    equal(engine, attention_jvp(q, k, v, widened=widen(q, k, v, q, k, v), return_stats=True), wanted)
    assert explain(q, k, v, jvp=True)
    out = engine.xp.empty_like(dout)
    assert attention(q, k, v, out=out) is out
    equal(engine, [out], [attention(*wide)])


@pytest.mark.parametrize("amax", [False, True])
def test_fp8(amax):
    """FP8 arrays, and arrays that attention_vjp converts, also in the caller's layout."""
    x = np.asfortranarray(np.random.default_rng(0).standard_normal((16, 2, 5)), np.float32)
    converted = fp8.quantize(x), fp8.quantize(x[..., None])
    of_layout = fp8.quantize(x.transpose(2, 1, 0), layout="thd")
    given = {"return_stats": True, "return_amax": amax, "causal": True}
    found, wanted = (fp8.attention(y, y, y, **given) for y in converted)
    other = fp8.attention(of_layout, of_layout, of_layout, layout="bshd", **given)
    assert (found[0].shape, found[1].shape) == ((16, 2, 5), (5, 2))
    for y, name in ((found[0].T, "out"), (other[0], "out in C order")):
        np.testing.assert_array_equal(y.dequantize("float32"), wanted[0].dequantize("float32").T[0], err_msg=name)
    for results in (found, other):
        np.testing.assert_array_equal(results[-1].ravel(), wanted[-1].ravel() if amax else results[-1].ravel())
    out, pullback = attention_vjp(x, x, x, compute_dtype="float8_e4m3fn")
    wide, other_pullback = attention_vjp(*[x[..., None]] * 3, compute_dtype="float8_e4m3fn")
    for y, z in zip((out, *pullback(x)), (wide, *other_pullback(x[..., None])), strict=True):
        np.testing.assert_array_equal(y, z[..., 0])


@pytest.mark.parametrize(("letters", "axes"), [("bshd", (2, 1, 0)), ("bhsd", (1, 2, 0)), ("sbhd", (2, 1, 0))])
def test_layouts(letters, axes, engine):
    """The letters without b: ``"bhsd"`` is (heads, positions, head dim)."""
    own = [np.random.default_rng(n).standard_normal(shape) for n, shape in enumerate([(8, 4, 5), (8, 2, 7), (16, 2, 7)])]
    theirs = [engine.xp.asarray(np.ascontiguousarray(x.transpose(axes)).astype(engine.dtype)) for x in own]
    given = [engine.xp.asarray(np.asfortranarray(x.astype(engine.dtype))) for x in own]
    out, stats = attention(*theirs, layout=letters, return_stats=True, causal=True)
    wanted = attention(*given, return_stats=True, causal=True)
    np.testing.assert_allclose(engine.get(out.transpose(np.argsort(axes))), engine.get(wanted[0]), atol=1e-6)
    np.testing.assert_allclose(engine.get(stats.T), engine.get(wanted[1]), atol=1e-6)


def test_a_batch_axis_of_some_arrays_is_refused():
    """The message names both numbers of axes; so is a call whose packed sequences lack their offsets for one side."""
    q = np.ones((8, 1, 5), np.float32, order="F")
    with pytest.raises(ValueError, match=r"q has 3 axes and k has 4: \(8, 1, 5, 1\).*cu_seqlens_q="):
        attention(q, q[..., None], q)
    with pytest.raises(ValueError, match=r"q has 3 axes and stats has 3: \(5, 1, 1\)"):
        attention(q, q, q, stats=np.ones((5, 1, 1), np.float32, order="F"))
    with pytest.raises(ValueError, match="cu_seqlens_kv"):
        attention(q, q, q, cu_seqlens_q=np.array([0, 5], np.int32), max_seqlen_q=5)


# the default layout

X = np.random.default_rng(0).standard_normal((2, 5, 4, 8)).astype(np.float32)
STARTS = np.array([0, 2, 5], np.int32)
OF_PACKED = {"cu_seqlens_q": STARTS, "cu_seqlens_kv": STARTS, "max_seqlen_q": 3, "max_seqlen_kv": 3}


def test_a_default_layout():
    """Calls in the block are those with layout=; packed sequences are "thd"; a named layout wins."""
    wanted = attention(X, X, X, layout="bshd")
    with layout.default("bshd"):
        found = attention(X, X, X), attention(X.T, X.T, X.T, layout="dhsb").T, prepare(X, X, X)(X, X, X)
        packed = attention(X[0], X[0], X[0], **OF_PACKED)
        out, pullback = attention_vjp(X, X, X)
        made = cupy_sdpa.problem(X.shape, X.shape, X.shape, dtype="float16")
        assert explain(made, gpu="h200", cudnn="9.19").problem == made
        assert explain(X, X, X)
        described = cupy_sdpa.explain_function(attention, X, X, X)
        eight_bits = fp8.quantize(X)
        assert fp8.attention(eight_bits, eight_bits, eight_bits).shape == X.shape
        assert cupy_sdpa.dropout_mask(X, X, dropout_p=0.5, seed=1).shape == (2, 4, 5, 5)
    for x in found:
        np.testing.assert_array_equal(x, wanted)
    np.testing.assert_array_equal(packed, attention(X[0], X[0], X[0], layout="thd", **OF_PACKED))
    assert made.sizes == cupy_sdpa.problem(X.shape, X.shape, X.shape, dtype="float16", layout="bshd").sizes
    assert pullback(out)[0].shape == X.shape
    assert described == cupy_sdpa.explain_function(attention, X, X, X, layout="bshd")
    assert described != cupy_sdpa.explain_function(attention, X, X, X, layout="dhsb")


def test_what_was_made_elsewhere_keeps_its_layout():
    """A pullback and a prepared call compute with the layout of the call that made them."""
    own = np.asfortranarray(X)  # (D 2, H 5, S 4, B 8)
    out, pullback = attention_vjp(own, own, own)
    _, of_group = ContextParallel().attention_vjp(own, own, own)
    call = prepare(own, own, own)
    wanted = pullback(out)
    with layout.default("bhsd"):
        for x, y in zip((*pullback(out), *of_group(out)), wanted * 2, strict=True):
            np.testing.assert_array_equal(x, y)
        np.testing.assert_array_equal(call(own, own, own), out)
        np.testing.assert_array_equal(call(own, own, own, scale=0.3), attention(own, own, own, scale=0.3, layout="dhsb"))


def test_functions_of_other_axes_ignore_or_refuse_it():
    """NNlib's functions have their own axes; a function without layout= raises TypeError, which names it."""
    x = np.asfortranarray(X[..., 0])
    wanted, _ = cupy_sdpa.nnlib.dot_product_attention(x, x, x)
    with layout.default("bshd"):
        np.testing.assert_array_equal(cupy_sdpa.nnlib.dot_product_attention(x, x, x)[0], wanted)
        with pytest.raises(TypeError, match=r"the default layout is 'bshd', and weight_sums has no layout="):
            cupy_sdpa.weight_sums(X, X)


def test_the_default_is_of_the_thread_and_the_block():
    """Another thread has no default layout, even while the block is active; after an error the previous one is back."""
    seen = []
    own = np.asfortranarray(X)
    with layout.default("bshd"):
        thread = threading.Thread(target=lambda: seen.append(attention(own, own, own)))
        thread.start()
        thread.join()
        with pytest.raises(ZeroDivisionError), layout.default("bhsd"):
            raise ZeroDivisionError
        assert attention(X, X, X).flags.c_contiguous
    np.testing.assert_array_equal(seen[0], attention(own, own, own))
    with pytest.raises(ValueError, match=r"the default layout is 'thd'; it must be 'bshd', 'bhsd', 'sbhd', 'dhsb'"):
        layout.default("thd").__enter__()
