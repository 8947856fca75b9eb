# mypy: disable-error-code="arg-type, call-overload, dict-item"
# The tables of mistakes pass wrong types on purpose.
"""The public backward calls on numpy arrays: results, preallocated outputs, the pullback, and error messages."""

import gc
import sys
import weakref

import numpy as np
import pytest
from cases import DTYPES, LAYOUTS, Case
from tolerance import worst

from cupy_sdpa import attention, attention_backward, attention_vjp, explain, prepare, reference

CASE = Case("backward", d=16, dv=24, hq=4, hkv=2, sq=6, skv=7, causal=True, dtype="float32")


def everything(case=CASE):
    """dout, q, k, v, out, stats."""
    q, k, v = case.arrays()
    out, stats = attention(q, k, v, causal=case.causal, scale=case.scale, return_stats=True)
    return case.dout(), q, k, v, out, stats


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_have_the_shapes_and_dtypes_of_their_arrays(dtype):
    """New gradients are in Fortran order, and as accurate as their dtype allows."""
    case = CASE.with_dtype(dtype)
    dout, q, k, v, out, stats = everything(case)
    gradients = attention_backward(dout, q, k, v, out, stats, causal=True)
    truth = reference.attention_backward(dout, q, k, v, causal=True)
    unit = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-20, "float64": 2.0**-21}[dtype]  # stats are float32
    for got, of, wanted in zip(gradients, (q, k, v), truth, strict=True):
        assert (got.shape, got.dtype, got.flags.f_contiguous) == (of.shape, of.dtype, True)
        assert worst(got, wanted) <= 8 * unit * np.abs(wanted).max()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_changes_nothing(layout):
    """Views with any strides give the same bits as dense arrays."""
    case = Case("layouts", d=16, hkv=2, sq=6, skv=7, dtype="float32")
    dout, q, k, v, out, stats = everything(case)
    wanted = attention_backward(dout, q, k, v, out, stats)
    turned = [LAYOUTS[layout](x) for x in (dout, q, k, v, out)]
    for got, want in zip(attention_backward(*turned, stats), wanted, strict=True):
        np.testing.assert_array_equal(got, want)


def test_preallocated_gradients_are_written_and_returned():
    """Any of dq=, dk= and dv= are returned as the same objects."""
    dout, q, k, v, out, stats = everything()
    wanted = attention_backward(dout, q, k, v, out, stats, causal=True)
    for names in (("dq",), ("dk", "dv"), ("dq", "dk", "dv")):
        given = {name: np.full_like({"dq": q, "dk": k, "dv": v}[name], np.nan) for name in names}
        got = dict(zip(("dq", "dk", "dv"), attention_backward(dout, q, k, v, out, stats, causal=True, **given), strict=True))
        for name, want in zip(("dq", "dk", "dv"), wanted, strict=True):
            np.testing.assert_array_equal(got[name], want)
            assert name not in given or got[name] is given[name]


def test_inputs_are_unchanged():
    """No bit of the inputs changes."""
    inputs = everything()
    before = [x.tobytes() for x in inputs]
    attention_backward(*inputs, causal=True)
    assert [x.tobytes() for x in inputs] == before


def test_deterministic_changes_no_number_on_the_cpu():
    """The CPU engine always gives the same bits."""
    inputs = everything()
    plain = attention_backward(*inputs, causal=True)
    for a, b in zip(plain, attention_backward(*inputs, causal=True, deterministic=True), strict=True):
        np.testing.assert_array_equal(a, b)


def test_gradients_without_keys_or_queries_are_0():
    """Without keys, or without queries, every gradient is 0."""
    for sizes in ({"skv": 0}, {"sq": 0, "skv": 3}, {"b": 0}):
        q, k, v = (
            np.ones(s, np.float32, order="F")
            for s in ((8, 2, sizes.get("sq", 2), sizes.get("b", 1)), *[(8, 2, sizes.get("skv", 3), sizes.get("b", 1))] * 2)
        )
        out, stats = attention(q, k, v, return_stats=True)
        for gradient, of in zip(attention_backward(np.ones_like(out), q, k, v, out, stats), (q, k, v), strict=True):
            assert gradient.shape == of.shape
            assert (gradient == 0).all()


def test_a_saturated_row_has_the_gradient_of_its_key_alone():
    """If one key has all the weight, dv of that key is dout, and dq and dk are 0."""
    q = np.zeros((8, 1, 1, 1))
    q[0] = 1000
    k = np.zeros((8, 1, 3, 1), order="F")
    k[0, 0, 1] = 1
    v, dout = np.ones((8, 1, 3, 1), order="F"), np.arange(8.0).reshape(8, 1, 1, 1)
    out, stats = attention(q, k, v, return_stats=True)
    dq, dk, dv = attention_backward(dout, q, k, v, out, stats)
    np.testing.assert_allclose(
        dv[:, 0, :, 0], np.outer(np.arange(8.0), [0, 1, 0]), rtol=1e-4, atol=1e-6
    )  # stats near 353 in float32
    assert np.abs(dq).max() < 1e-6
    assert np.abs(dk).max() < 1e-3


BAD = {
    "no_stats": (lambda a: attention_backward(*a[:5], None), TypeError, r"stats is None; .*return_stats=True"),
    "no_out": (lambda a: attention_backward(*a[:4], None, a[5]), TypeError, r"out is None"),
    "dout_dtype": (lambda a: attention_backward(a[0].astype("f8"), *a[1:]), TypeError, r"dout is float64; it must be float32: convert"),
    "dout_shape": (lambda a: attention_backward(a[0][:, :, :5], *a[1:]), ValueError, r"dout has shape \(24, 4, 5, 2\); it must be \(24, 4, 6, 2\)"),
    "out_shape": (lambda a: attention_backward(*a[:4], a[4][:16], a[5]), ValueError, r"out has shape \(16, 4, 6, 2\); it must be \(24, 4, 6, 2\)"),
    "stats_shape": (lambda a: attention_backward(*a[:5], a[5].T), ValueError, r"stats has shape \(2, 4, 6\); it must be \(6, 4, 2\)"),
    "stats_dtype": (lambda a: attention_backward(*a[:5], a[5].astype("f8")), TypeError, r"stats is float64; it must be float32"),
    "dq_shape": (lambda a: attention_backward(*a, dq=a[2].copy()), ValueError, r"dq has shape \(16, 2, 7, 2\); it must be \(16, 4, 6, 2\), the shape and dtype of q"),
    "dv_dtype": (lambda a: attention_backward(*a, dv=a[3].astype("f2")), TypeError, r"dv is float16; it must be float32"),
    "dq_is_q": (lambda a: attention_backward(*a, dq=a[1]), ValueError, r"dq overlaps q"),
    "dk_is_dv": (lambda a: attention_backward(a[0][:16], *a[1:3], a[2].copy(), a[4][:16], a[5], dk=a[3][:16], dv=a[3][:16]), ValueError, r"dk overlaps dv"),
    "head_dims": (lambda a: attention_backward(a[0], a[1], a[2][:8], *a[3:]), ValueError, r"head dims .* 16 and 8"),
    "workspace": (lambda a: attention_backward(*a, max_workspace=-1), ValueError, r"max_workspace is -1; .*bytes"),
    "workspace_text": (lambda a: attention_backward(*a, max_workspace="1 GB"), ValueError, r"max_workspace is '1 GB'"),
    "scale": (lambda a: attention_backward(*a, scale=np.nan), ValueError, r"scale is nan"),
    "lists": (lambda a: attention_backward([1], *a[1:]), TypeError, r"dout is a list"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_raise(name):
    """The message contains the value and the requirement."""
    call, error, words = BAD[name]
    with pytest.raises(error, match=words):
        call(everything())


def test_the_pullback_can_be_called_repeatedly():
    """It is linear in dout, and accepts preallocated gradients."""
    dout, q, k, v, out, stats = everything()
    got, pullback = attention_vjp(q, k, v, causal=True)
    np.testing.assert_array_equal(got, out)
    wanted = attention_backward(dout, q, k, v, out, stats, causal=True)
    for _ in range(2):
        for a, b in zip(pullback(dout), wanted, strict=True):
            np.testing.assert_array_equal(a, b)
    dq = np.empty_like(q)
    assert pullback(2 * dout, dq=dq)[0] is dq
    np.testing.assert_allclose(dq, 2 * wanted[0], rtol=1e-5, atol=1e-6)


def test_the_pullback_counts_and_releases_its_memory():
    """nbytes counts q, k, v, out and stats once each; they are released with the pullback."""
    _, q, k, v, out, stats = everything()
    got, pullback = attention_vjp(q, k, v)
    assert pullback.nbytes == sum(x.nbytes for x in (q, k, v, out, stats))
    assert f"keeps {pullback.nbytes} bytes" in repr(pullback)
    alive = weakref.ref(got)
    del got
    gc.collect()
    assert alive() is not None
    before = sys.getrefcount(q)
    del pullback
    assert alive() is None
    assert sys.getrefcount(q) < before


def test_explain_lists_the_backward_steps():
    """A backward report shows the steps of the backward pass; with numpy no workspace is needed."""
    _, q, k, v, *_ = everything()
    report = explain(q, k, v, causal=True, backward=True, deterministic=True)
    assert report
    assert report.workspace == 0
    for words in ("deterministic backward attention", "dV = Pᵀ dO", "dK = dSᵀ Q", "dQ = dS K", "runs on the CPU"):
        assert words in str(report)


@pytest.mark.parametrize("name", ["out", "stats", "return_stats"])
def test_the_vjp_rejects_preallocated_results(name):
    """The error is raised by the call, not by the pullback."""
    x = np.ones((8, 2, 5, 2))
    with pytest.raises(TypeError, match=f"attention_vjp does not take {name}"):
        attention_vjp(x, x, x, **{name: np.empty_like(x)})


def test_the_pullback_keeps_captured_arrays():
    """nbytes counts them, and the caller may change its dict."""
    x, w = np.ones((8, 2, 5, 2), order="F"), np.ones((2, 5, 5))
    tensors = {"w": w}
    _, plain = attention_vjp(x, x, x)
    out, pullback = attention_vjp(x, x, x, score_mod=lambda s, b, h, i, j, w: s + w[h, i, j], tensors=tensors)
    tensors.clear()
    assert pullback.nbytes == plain.nbytes + w.nbytes
    assert len(pullback(out)) == 3


SINKS = np.float32([0.5, -1, 2, 0])
#: Calls whose results are not those of a causal call with sinks, by the change; and the argument that is refused.
OTHER_CALLS = {
    "other queries": (lambda q, k, v, o: attention(q + q, k, v, return_stats=True, **o), "stats"),
    "another mask": (lambda q, k, v, o: attention(q, k, v, return_stats=True, **(o | {"causal": False})), "stats"),
    "another scale": (lambda q, k, v, o: attention(q, k, v, return_stats=True, **o, scale=0.1), "stats"),
    "no sinks": (lambda q, k, v, o: attention(q, k, v, return_stats=True, causal=True), "stats"),
    "zeros": (lambda q, k, v, o: (attention(q, k, v, **o), np.zeros((16, 4, 2), np.float32, order="F")), "stats"),
    "infinite": (lambda q, k, v, o: (attention(q, k, v, **o), np.full((16, 4, 2), -np.inf, np.float32, order="F")), "stats"),
    "no softcap": (lambda q, k, v, o: attention(q, k, v, return_stats=True, **(o | {"softcap": None})), "stats"),
    "other values": (lambda q, k, v, o: (attention(q, k, v - 1, **o), attention(q, k, v, return_stats=True, **o)[1]), "out"),
    "no output": (lambda q, k, v, o: (np.zeros_like(v), attention(q, k, v, return_stats=True, **o)[1]), "out"),
}


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", OTHER_CALLS)
def test_results_of_another_call_are_refused(name, dtype):
    """The weights that the backward pass computes on the CPU do not fit them; the message has row, values and remedy."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (np.asfortranarray(rng.standard_normal((8, 4, 16, 2)).astype(dtype)) for _ in range(4))
    options = {"causal": True, "sinks": SINKS, "softcap": 30.0}
    make, wrong = OTHER_CALLS[name]
    text = rf"{wrong} is of another call: at query \d+, head \d and batch entry \d .*pass the {wrong} that the forward call returned"
    with pytest.raises(ValueError, match=text):
        attention_backward(dout, q, k, v, *make(q, k, v, options), **options)
    prepared = prepare(q, k, v, backward=True, **options)
    with pytest.raises(ValueError, match=text):
        prepared(dout, q, k, v, *make(q, k, v, options))
    attention_backward(dout, q, k, v, *attention(q, k, v, return_stats=True, **options), **options)


@pytest.mark.parametrize("size", [1e-3, 1, 30, 1e3, 1e4])
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


@pytest.mark.parametrize("head_dim", [8, 64])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding_of_small_outputs_is_not_another_call(dtype, head_dim):
    """Outputs that are subnormal in their dtype have an absolute rounding error; a wrong output is refused nevertheless."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (np.asfortranarray(rng.standard_normal((head_dim, 2, 20, 2)).astype(dtype)) for _ in range(4))
    for scale in (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1):
        values = v * v.dtype.type(scale)
        out, stats = attention(q, k, values, return_stats=True)
        attention_backward(dout, q, k, values, out, stats)
        for size in (1e-8, 1.0):
            attention_backward(dout * v.dtype.type(size), q, k, values, out, stats)
        attention_vjp(*(x.astype(np.float32) for x in (q, k, values)), compute_dtype=dtype)[1](dout.astype(np.float32))
        with pytest.raises(ValueError, match="out is of another call"):
            attention_backward(dout, q, k, values, out + v.dtype.type(max(scale, 1e-3)), stats)


def test_a_pullback_of_changed_arrays_is_refused():
    """The pullback keeps references: an array that changes between the passes would give wrong gradients."""
    q, k, v = (np.asfortranarray(np.random.default_rng(0).standard_normal((8, 2, 5, 1))) for _ in range(3))
    out, pullback = attention_vjp(q, k, v)
    k += 1e-3 * q
    with pytest.raises(ValueError, match="is of another call"):
        pullback(out)
