"""NNlib.jl's attention: its own tests with its published numbers, masks, alpha, errors; and layouts."""

import numpy as np
import pytest
from cases import as_float
from engines import Engine

from cupy_sdpa import get_plan_cache, layout, reference
from cupy_sdpa._cudnn.library import library
from cupy_sdpa.nnlib import attention as nnlib_attention
from cupy_sdpa.nnlib import (
    dot_product_attention,
    dot_product_attention_scores,
    dot_product_attention_vjp,
    join_heads,
    make_causal_mask,
    make_padding_mask,
    split_heads,
)


@pytest.fixture(params=["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def xp(request):
    """numpy, and CuPy if there is a GPU."""
    return np if request.param == "numpy" else pytest.importorskip("cupy")


def rand(xp, *shape, seed=0, dtype="float32"):
    return xp.asarray(np.asfortranarray(np.random.default_rng(seed).random(shape).astype(dtype)))


def call(xp, *arrays, **keywords):
    """y and alpha; on a GPU computed in float16, with y converted to float32."""
    return dot_product_attention(*arrays, alpha=True, **keywords, **({} if xp is np else {"compute_dtype": "float16"}))


def tolerance(xp, exact):
    return exact if xp is np else 2e-2


# NNlib's own tests


@pytest.mark.parametrize("batch", [(), (1,), (2,), (2, 1, 3)], ids=lambda batch: "x".join(map(str, batch)) or "none")
@pytest.mark.parametrize("nheads", [1, 3, 5])
def test_different_batch_sizes(batch, nheads, xp):
    """Any number of batch dimensions; shapes, dtype, and weights with sum 1. On a GPU head dims are multiples of 8."""
    n = 15 if xp is np else 8 * 15
    q, k, v = rand(xp, n, 3, *batch), rand(xp, n, 4, *batch, seed=1), rand(xp, n, 4, *batch, seed=2)
    y, alpha = call(xp, q, k, v, nheads=nheads)
    assert y.dtype == np.float32
    assert y.shape == (n, 3, *batch)
    assert y.flags.f_contiguous
    assert alpha.shape == (4, 3, nheads, *batch)
    np.testing.assert_allclose(as_float(alpha).sum(axis=0), 1, rtol=1e-5)


def test_scores_are_the_weights_of_attention(xp):
    """Of arrays with split heads."""
    q = xp.asarray((np.arange(1, 25) / 24).reshape(4, 2, 3, 1, order="F"))
    joined = join_heads(q)
    _, alpha = call(xp, joined, joined, joined, nheads=2) if xp is np else (None, dot_product_attention_scores(q, q))
    np.testing.assert_allclose(as_float(dot_product_attention_scores(q, q)), as_float(alpha), rtol=1e-6)


Y = """.429754 .513087 .613791 .697125 .46431 .547644 .647876 .73121 .49773 .581064 .680455 .763788"""
ALPHA = """.313896 .332948 .353157 .264431 .328206 .407362 .219215 .31838 .462405
.288691 .331243 .380066 .241239 .323893 .434868 .198438 .311761 .489801"""


def test_specific_results():
    """The numbers in NNlib's tests."""
    x = (np.arange(1, 13) / 12).reshape(4, 3, 1, order="F")
    y, alpha = dot_product_attention(x, x, x, nheads=2, alpha=True)
    np.testing.assert_allclose(y.ravel(order="F"), [float(n) for n in Y.split()], atol=1e-5)
    np.testing.assert_allclose(alpha.ravel(order="F"), [float(n) for n in ALPHA.split()], atol=1e-5)


def test_keys_are_attended_where_the_mask_is_true(xp):
    """The weights are above 0 there and only there; a causal mask counts dimensions from 1."""
    q, k = rand(xp, 4, 2, 3, 1), rand(xp, 4, 2, 5, 1, seed=1)
    mask = np.random.default_rng(3).random((5, 3)) < 0.7
    mask[0] = True
    alpha = as_float(dot_product_attention_scores(q, k, mask=xp.asarray(mask)))
    x = rand(xp, 4, 2, 3, 1)
    causal = make_causal_mask(x, dims=3)
    causal_alpha = as_float(dot_product_attention_scores(x, x, mask=causal))
    for head in range(2):
        np.testing.assert_array_equal(alpha[:, :, head, 0] > 0, mask)
        np.testing.assert_array_equal(causal_alpha[:, :, head, 0] > 0, as_float(causal.array) > 0)
    assert causal.shape == (3, 3)


def test_dropout(xp):
    """A function of alpha is applied to the whole of it; y and alpha use the same dropout mask."""
    x = rand(xp, 10, 10, 10)

    def fdrop(alpha):
        return alpha * (xp.random.default_rng(0).random(alpha.shape, dtype=np.float32) > 0.5) * 2

    y, alpha = dot_product_attention(x, x, x, nheads=2, fdrop=fdrop, alpha=True)
    assert dot_product_attention(x, x, x, nheads=2, fdrop=fdrop)[1] is None
    assert 0.4 < float((alpha > 0).mean()) < 0.6
    want = np.einsum("jihb,dhjb->dhib", as_float(alpha), as_float(split_heads(x, 2)))
    np.testing.assert_allclose(as_float(y), join_heads(want), rtol=1e-4)


def test_a_bias(xp):
    """(kv_len, q_len), for all heads."""
    n = 4 if xp is np else 16
    q, k = rand(xp, n, 5, 1), rand(xp, n, 3, 1, seed=1)
    bias = rand(xp, 3, 5, seed=2)
    y, alpha = call(xp, q, k, k, bias, nheads=2)
    assert alpha.shape == (3, 5, 2, 1)
    assert y.shape == (n, 5, 1)
    plain, _ = call(xp, q, k, k, nheads=2)
    assert abs(as_float(y) - as_float(plain)).max() > 1e-3


def test_gradients_match_finite_differences():
    """Of q, k, v and the bias, with five-point differences in float64."""
    q, k, v = rand(np, 4, 5, 2, dtype="f8"), rand(np, 4, 3, 2, seed=1, dtype="f8"), rand(np, 6, 3, 2, seed=2, dtype="f8")
    arrays = [q, k, v, rand(np, 3, 5, seed=3, dtype="f8")]
    y, pullback = dot_product_attention_vjp(*arrays, nheads=2)
    for place, got in enumerate(pullback(np.ones_like(y))):
        want = np.zeros_like(arrays[place])
        for index in np.ndindex(want.shape):
            for step, weight in ((-2, 1), (-1, -8), (1, 8), (2, -1)):
                moved = [x.copy(order="F") for x in arrays]
                moved[place][index] += step * 1e-3
                want[index] += weight * dot_product_attention(*moved, nheads=2)[0].sum() / 12e-3
        np.testing.assert_allclose(got, want, atol=1e-6, rtol=1e-6)


# Tests of this package


def test_alpha_is_computed_only_on_request(monkeypatch):
    """Without alpha=True no array of the size of the scores is allocated, and alpha is None."""
    x = rand(np, 8, 5, 2)
    y, alpha = dot_product_attention(x, x, x, nheads=2, alpha=True)
    assert alpha.shape == (5, 5, 2, 2)
    heads = split_heads(x, 2)
    np.testing.assert_array_equal(alpha, dot_product_attention_scores(heads, heads))
    monkeypatch.setattr(nnlib_attention, "dot_product_attention_scores", None)
    same, none = dot_product_attention(x, x, x, nheads=2)
    assert none is None
    np.testing.assert_array_equal(same, y)


MASKS = {
    "causal": (lambda x: make_causal_mask(x), {"causal": True}),
    "padding": (lambda x: make_padding_mask(np.array([2, 5]), 5), {"causal": False, "seq_lens_kv": [2, 5]}),
    "both": (
        lambda x: make_causal_mask(x) & make_padding_mask(np.array([2, 5]), 5), {"causal": True, "seq_lens_kv": [2, 5]},
    ),
    "shorter": (
        lambda x: make_padding_mask(np.array([4, 3]), 5) & make_padding_mask(np.array([2, 5]), 5),
        {"causal": False, "seq_lens_kv": [2, 3]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_causal_masks_become_options(name, monkeypatch):
    """No boolean array is passed to the fused call, and the result is that of the array."""
    x = rand(np, 8, 5, 2)
    make, flags = MASKS[name]
    seen = []
    fused = nnlib_attention.attention
    monkeypatch.setattr(nnlib_attention, "attention", lambda *a, **k: seen.append(k) or fused(*a, **k))
    y, alpha = dot_product_attention(x, x, x, mask=make(x), nheads=2, alpha=True)
    assert {key: value.tolist() if hasattr(value, "tolist") else value for key, value in seen[0].items()} == {
        **flags,
        "layout": "dhsb",
    }
    dense, dense_alpha = dot_product_attention(x, x, x, mask=np.asarray(make(x)), nheads=2, alpha=True)
    assert "mask" in seen[1]
    np.testing.assert_allclose(y, dense, rtol=1e-5)
    np.testing.assert_array_equal(alpha, dense_alpha)


def test_a_mask_and_an_array_is_an_array():
    """Broadcast as in Julia, from the first axis on."""
    some = np.random.default_rng(0).random((5, 5)) < 0.5
    both = make_padding_mask(np.array([2, 5, 1]), 5) & some
    want = some[:, :, None, None] & (np.arange(5)[:, None, None, None] < np.array([2, 5, 1]))
    np.testing.assert_array_equal(both, want)
    np.testing.assert_array_equal(some & make_padding_mask(np.array([2, 5, 1]), 5), want)
    np.testing.assert_array_equal(~make_causal_mask(some) | some, ~np.triu(np.ones((5, 5), bool)) | some)
    assert np.asarray(make_causal_mask(some), np.float32).sum() == 15
    with pytest.raises(ValueError, match=r"\(4, 1, 1, 3\) and \(5, 5\) cannot be combined"):
        _ = make_padding_mask(np.array([2, 5, 1]), 4) & make_causal_mask(some)


def test_a_fully_masked_query(xp):
    """0 in y and in alpha, where NNlib.jl has NaN."""
    x = rand(xp, 16, 5, 1)
    mask = np.ones((5, 5), bool)
    mask[:, 2] = False
    y, alpha = call(xp, x, x, x, mask=xp.asarray(mask))
    assert (y[:, 2] == 0).all()
    assert (alpha[:, 2] == 0).all()
    assert not xp.isnan(y).any()


def test_it_matches_the_reference(xp):
    """Heads, bias and mask together, in float64."""
    q, k, v = rand(xp, 32, 7, 3), rand(xp, 32, 9, 3, seed=1), rand(xp, 16, 9, 3, seed=2)
    bias, mask = rand(xp, 9, 7, 2, seed=3), xp.asarray(np.random.default_rng(4).random((9, 1, 1, 3)) < 0.8)
    y, _ = call(xp, q, k, v, bias, nheads=2, mask=mask)
    parts = [as_float(split_heads(x, 2)).astype("f8") for x in (q, k, v)]
    shown = as_float(mask) > 0
    want, _ = reference.attention(*parts, bias=as_float(bias)[..., None].astype("f8"), mask=shown)
    np.testing.assert_allclose(as_float(y), join_heads(want), atol=tolerance(xp, 1e-5))


def test_computed_in_another_dtype():
    """y has the dtype of q; gradients have the dtypes of their arrays."""
    x = rand(np, 16, 6, 2)
    y, _ = dot_product_attention(x, x, x, compute_dtype="bfloat16")
    exact, _ = dot_product_attention(x, x, x)
    assert y.dtype == np.float32
    assert 0 < abs(y - exact).max() < 2e-2
    _, pullback = dot_product_attention_vjp(x, x, x, compute_dtype="bfloat16")
    assert {g.dtype for g in pullback(y)[:3]} == {np.dtype("f4")}


@pytest.mark.parametrize("pass_", ["forward", "both"])
def test_captured_in_another_dtype(pass_, fake):
    """The copies in the other dtype belong to the CUDA graph, whose launches change no other memory."""
    x = fake.asarray(rand(np, 16, 6, 2))

    def call():
        if pass_ == "forward":
            return (dot_product_attention(x, x, x, compute_dtype="bfloat16")[0],)
        y, pullback = dot_product_attention_vjp(x, x, x, compute_dtype="bfloat16")
        call.kept = pullback
        return (y, *pullback(x)[:3])

    Engine("fake", fake).captured(call)
    get_plan_cache().clear()
    library().forget_plans()


@pytest.mark.gpu
def test_float32_on_a_gpu_raises(cupy):
    """The message contains what to write; scores are computed in float32."""
    x = cupy.zeros((16, 5, 1), np.float32, order="F")
    with pytest.raises(TypeError, match="compute_dtype='bfloat16'"):
        dot_product_attention(x, x, x)
    assert dot_product_attention_scores(*[split_heads(x, 2)] * 2).dtype == np.float32


def test_heads_are_views():
    """Splitting and joining column-major arrays copies nothing."""
    x = rand(np, 12, 5, 2, 3)
    heads = split_heads(x, 3)
    assert heads.shape == (4, 3, 5, 2, 3)
    assert np.shares_memory(x, heads)
    np.testing.assert_array_equal(heads[:, 1], x[4:8])
    assert np.shares_memory(join_heads(heads), x)


def test_no_keys():
    """Without keys y is 0 and alpha is empty."""
    y, alpha = dot_product_attention(rand(np, 4, 3, 2), rand(np, 4, 0, 2), rand(np, 4, 0, 2), alpha=True)
    assert (y == 0).all()
    assert alpha.shape == (0, 3, 1, 2)


BAD = {
    "batch": (lambda x: dot_product_attention(x, x[..., :1], x), "Batch dimensions have to be the same: q is \\(4, 3, 2\\)"),
    "heads": (lambda x: dot_product_attention(x, x, x, nheads=3), "is 4; it must be a multiple of nheads, which is 3"),
    "length": (lambda x: dot_product_attention(x, x, x[:, :2]), "k and v the same length"),
    "features": (lambda x: dot_product_attention(x, x[:2], x), "q and k must have the same first dimension"),
    "rank": (lambda x: dot_product_attention(x[:, 0, 0], x, x), "they must be \\(features, len, batch...\\)"),
    "scores": (lambda x: dot_product_attention_scores(x, x), "both must be \\(d, nheads, len, B\\)"),
    "dims": (lambda x: make_causal_mask(x, dims=0), "dims is 0; x has 3 dimensions, counted from 1"),
    "lengths": (lambda x: make_padding_mask(x[0, 0], 3), "it must be \\(B,\\) integers"),
    "keys": (lambda x: make_padding_mask(np.array([1, 2]), 2.5), "kv_len is 2.5; it must be a number of keys"),  # type: ignore[arg-type]
    "fewer_keys": (lambda x: make_padding_mask(np.array([1, 2]), -1), "kv_len is -1; .* 0 or more"),
    "mask": (
        lambda x: dot_product_attention(x, x, x, mask=make_causal_mask(x, dims=1)),
        "the mask has 4 keys and 4 queries; there are 3",
    ),
    "five_axes": (lambda x: dot_product_attention(x, x, x, x[..., None, None, None]), "it must broadcast to \\(kv_len"),
    "lengths_of_others": (
        lambda x: dot_product_attention(x, x, x, mask=make_padding_mask(np.array([1, 2, 3]), 3)),
        "the mask has 3 lengths; there are 2 batch entries",
    ),
    "masks_of_others": (
        lambda x: make_padding_mask(np.array([1, 2, 3]), 3) & make_padding_mask(np.array([1, 2]), 3),
        "masks of shapes \\(3, 1, 1, 3\\) and \\(3, 1, 1, 2\\) cannot be combined",
    ),
    "bias_with_fdrop": (
        lambda x: dot_product_attention(x, x, x, np.ones((3, 3, 5)), fdrop=lambda alpha: alpha),
        "bias is \\(3, 3, 5\\); from the first axis on it must broadcast to \\(3, 3, 1, 2\\)",
    ),
    "fdrop": (
        lambda x: dot_product_attention(x, x, x, fdrop=lambda alpha: alpha[:1]),
        "fdrop returned shape \\(1, 3, 1, 2\\) for alpha",
    ),
    "c_order": (
        lambda x: dot_product_attention(x.copy(), x, x),
        "q has shape \\(4, 3, 2\\) .*axis 0 must be contiguous.*q\\.T",
    ),
    "c_order_of_scores": (lambda x: dot_product_attention_scores(x[:, None].copy(), x[:, None]), "axis 0 must be contiguous"),
    "c_order_of_dy": (lambda x: dot_product_attention_vjp(x, x, x)[1](x.copy()), "dy has shape .*axis 0 must be contiguous"),
    "dy": (lambda x: dot_product_attention_vjp(x, x, x)[1](x[..., 0]), "dy is \\(4, 3\\); it must be \\(4, 3, 2\\)"),
}


@pytest.mark.parametrize("name", BAD)
def test_mismatched_shapes_raise(name):
    """The message contains all values."""
    make, words = BAD[name]
    with pytest.raises(ValueError, match=words):
        make(rand(np, 4, 3, 2))
    with pytest.raises(TypeError, match="float32 and k is float64"):
        dot_product_attention_scores(np.zeros((4, 1, 3, 1), "f4", order="F"), np.zeros((4, 1, 3, 1), order="F"))
    with pytest.raises(TypeError, match="k is a list; pass an array"):
        dot_product_attention(np.zeros((4, 3), order="F"), [[0.0]], np.zeros((4, 3), order="F"))
    with pytest.raises(TypeError, match="the result of fdrop is a NoneType; pass an array"):
        dot_product_attention(*[np.zeros((4, 3), order="F")] * 3, fdrop=lambda alpha: None)
    with pytest.raises(TypeError, match=r"nheads is 2\.0; it must be an integer"):
        dot_product_attention(*[np.zeros((4, 3), order="F")] * 3, nheads=2.0)
    with pytest.raises(TypeError, match="q is int64; attention supports"):
        dot_product_attention_scores(*[np.zeros((4, 1, 3, 1), int, order="F")] * 2)


NO_ARRAYS = {
    "bias": ("bias is a float", lambda x, h: dot_product_attention(x, x, x, 1.0)),
    "bias_list": ("bias is a list", lambda x, h: dot_product_attention(x, x, x, [[1.0] * 3] * 3)),
    "bias_with_fdrop": ("bias is a float", lambda x, h: dot_product_attention(x, x, x, 1.0, fdrop=lambda alpha: alpha)),
    "mask": ("mask is a bool", lambda x, h: dot_product_attention(x, x, x, mask=True)),
    "mask_list": ("mask is a list", lambda x, h: dot_product_attention(x, x, x, mask=[True] * 3)),
    "bias_of_gradients": ("bias is a float", lambda x, h: dot_product_attention_vjp(x, x, x, 1.0)),
    "mask_of_gradients": ("mask is a bool", lambda x, h: dot_product_attention_vjp(x, x, x, mask=True)),
    "dy": ("dy is a list", lambda x, h: dot_product_attention_vjp(x, x, x)[1]([0.0])),
    "q_of_scores": ("q is a list", lambda x, h: dot_product_attention_scores([0.0], h)),
    "k_of_scores": ("k is a NoneType", lambda x, h: dot_product_attention_scores(h, None)),
    "bias_of_scores": ("bias is a float", lambda x, h: dot_product_attention_scores(h, h, 1.0)),
    "mask_of_scores": ("mask is a bool", lambda x, h: dot_product_attention_scores(h, h, mask=True)),
    "numbers_as_mask": ("mask is float64; it must be bool", lambda x, h: dot_product_attention(x, x, x, mask=np.ones((3, 3)))),
    "numbers_as_mask_of_scores": (
        "mask is float64; it must be bool",
        lambda x, h: dot_product_attention_scores(h, h, mask=np.ones((3, 3))),
    ),
    "causal_mask": ("x is a list", lambda x, h: make_causal_mask([1.0])),
    "padding_mask": ("lengths is a list", lambda x, h: make_padding_mask([1, 2], 3)),
    "other_mask": ("the other mask is a bool", lambda x, h: make_causal_mask(x) & True),
    "split_heads": ("x is a list", lambda x, h: split_heads([1.0], 1)),
    "join_heads": ("x is a list", lambda x, h: join_heads([1.0])),
}


@pytest.mark.parametrize("name", NO_ARRAYS)
def test_other_types_raise(name):
    """A TypeError names the argument, its type and the remedy."""
    words, make = NO_ARRAYS[name]
    with pytest.raises(TypeError, match=f"{words}.*(pass an array|convert with|passed as bias=)"):
        make(rand(np, 4, 3, 2), rand(np, 4, 1, 3, 2))


# Layouts


@pytest.mark.parametrize("name", layout.LAYOUTS)
def test_layouts_are_views(name, xp):
    """Both conversions return views; elements are found at the same indices."""
    sizes = {"b": 2, "s": 5, "h": 3, "d": 8, "t": 7}
    x = rand(xp, *(sizes[letter] for letter in name))
    ours = layout.to_julia(x, name)
    assert ours.shape == tuple(sizes[letter] for letter in ("dht" if "t" in name else "dhsb"))
    back = layout.from_julia(ours, name)
    assert back.shape == x.shape
    assert back.strides == x.strides
    address = (lambda a: a.ctypes.data) if xp is np else (lambda a: a.data.ptr)
    assert address(ours) == address(back) == address(x)
    at = dict(zip("bshdt", (1, 3, 2, 4, 6), strict=True))
    one = tuple(at[letter] for letter in name)
    assert ours[tuple(at[letter] for letter in ("dht" if "t" in name else "dhsb"))] == x[one]


def test_memory_layouts_are_described():
    """As text and as a table: the axes by increasing stride, gaps, and errors."""
    x = np.zeros((2, 100, 8, 64), np.float16)
    assert str(layout.Layout(x.T)) == str(layout.Layout(x, "bshd"))
    assert "with gaps" in str(layout.Layout(x[:, ::2], "bshd"))
    assert "with gaps or overlap" in str(layout.Layout(np.broadcast_to(x[:1], x.shape), "bshd"))
    assert "head_dim 64, heads 8, total 200" in str(layout.Layout(np.zeros((64, 8, 200), order="F")))
    table = layout.Layout(x, "bshd")._repr_html_()
    assert table.index("head_dim") < table.index("heads") < table.index("seq") < table.index("batch")
    assert "51200" in table
    with pytest.raises(ValueError, match="the letters are 'bsh'"):
        layout.Layout(x, "bsh")


def test_invalid_layouts_raise():
    """Unknown letters, and arrays of another rank."""
    with pytest.raises(ValueError, match="the layout is 'bshx'; it must have the letters"):
        layout.to_julia(np.zeros((1, 1, 1, 1)), "bshx")
    with pytest.raises(ValueError, match=r"shape \(1, 1\), 2 axes; the layout 'thd' has 3"):
        layout.to_julia(np.zeros((1, 1)), "thd")


def test_masks_in_place():
    """``&=`` gives a mask that the kernel supports, and does not change other references to the mask."""
    first = mask = make_causal_mask(rand(np, 8, 5, 2))
    mask &= make_padding_mask(np.array([5, 3]), 5)
    assert (mask.causal, mask.lengths.tolist(), first.lengths) == (True, [5, 3], None)


@pytest.mark.parametrize("lengths", [[3], [9, 4], [-1, 2], [2**32 + 1, 1]], ids=str)
def test_length_masks_match_boolean_masks(lengths):
    """One length for all, longer than the keys, below 0 or beyond 32 bits."""
    x = rand(np, 8, 5, 2)
    mask = make_padding_mask(np.array(lengths), 5)
    seen = np.arange(5)[:, None] < np.array(lengths)
    np.testing.assert_array_equal(np.asarray(mask)[:, 0, 0], seen)
    y, _ = dot_product_attention(x, x, x, mask=mask)
    want, _ = dot_product_attention(x, x, x, mask=np.asarray(mask))
    np.testing.assert_allclose(y, want, rtol=1e-6)


def test_the_gradient_of_a_bias_keeps_its_dtype():
    """A float32 bias of float16 arrays has a gradient that float16 cannot represent."""
    q, k, v = (rand(np, 8, n, 2, seed=n).astype("f2") for n in (4, 6, 6))
    bias = rand(np, 6, 4)
    y, pullback = dot_product_attention_vjp(q, k, v, bias)
    *_, dbias = pullback(np.full(y.shape, 60000, "f2", order="F") * v[:, :4])
    assert dbias.dtype == np.float32
    assert np.isfinite(dbias).all()
    assert (dbias.astype("f2") != dbias).any()
