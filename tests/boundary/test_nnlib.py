"""NNlib.jl's attention: its own tests with its published numbers, masks and alpha; and layouts.

Refused calls are in the tables of mistakes.
"""

import numpy as np
import pytest

import cupy_sdpa
from cupy_sdpa import attention, get_plan_cache, layout, reference
from cupy_sdpa.nnlib import (
    dot_product_attention,
    dot_product_attention_scores,
    dot_product_attention_vjp,
    join_heads,
    make_causal_mask,
    make_padding_mask,
    split_heads,
)

#: The fake CuPy has no products of arrays, from which the weights are computed.
WITH_PRODUCTS = pytest.mark.parametrize("engine", ["numpy", pytest.param("cupy", marks=pytest.mark.gpu)], indirect=True)


def rand(*shape, seed=0, dtype="float32"):
    """Random numbers from 0 to 1."""
    return np.asfortranarray(np.random.default_rng(seed).random(shape).astype(dtype))


def call(engine, *arrays, mask=None, **options):
    """y and alpha as arrays of numpy; through cuDNN computed in float16, with y converted to float32."""
    converted = {"compute_dtype": "float16"} if engine.on_cudnn else {}
    found = dot_product_attention(*map(engine.put, arrays), alpha=True, mask=engine.put(mask), **options, **converted)
    assert all(x.flags.f_contiguous for x in found)
    return engine.get(found)


# NNlib's own tests


@WITH_PRODUCTS
@pytest.mark.parametrize("batch", [(), (1,), (2,), (2, 1, 3)], ids=lambda batch: "x".join(map(str, batch)) or "none")
@pytest.mark.parametrize("nheads", [1, 3, 5])
def test_different_batch_sizes(batch, nheads, engine):
    """Any number of batch dimensions; shapes, dtype, and weights with sum 1. For cuDNN head dims are multiples of 8."""
    n = 8 * 15 if engine.on_cudnn else 15
    q, k, v = rand(n, 3, *batch), rand(n, 4, *batch, seed=1), rand(n, 4, *batch, seed=2)
    y, alpha = call(engine, q, k, v, nheads=nheads)
    assert y.dtype == np.float32
    assert y.shape == (n, 3, *batch)
    assert alpha.shape == (4, 3, nheads, *batch)
    np.testing.assert_allclose(alpha.sum(axis=0), 1, rtol=1e-5)


@WITH_PRODUCTS
def test_scores_are_the_weights_of_attention(engine):
    """Of arrays with split heads; without alpha=True no weights are returned, and y is the same."""
    q = np.asfortranarray((np.arange(1, 97) / 96).reshape(16, 2, 3, 1, order="F").astype(np.float32))
    joined = join_heads(q)
    y, alpha = call(engine, joined, joined, joined, nheads=2)
    found = engine.get(dot_product_attention_scores(engine.put(q), engine.put(q)))
    np.testing.assert_allclose(found, alpha, rtol=1e-6)
    converted = {"compute_dtype": "float16"} if engine.on_cudnn else {}
    same, none = dot_product_attention(*[engine.put(joined)] * 3, nheads=2, **converted)
    assert none is None
    np.testing.assert_array_equal(engine.get(same), y)


Y = """.429754 .513087 .613791 .697125 .46431 .547644 .647876 .73121 .49773 .581064 .680455 .763788"""
ALPHA = """.313896 .332948 .353157 .264431 .328206 .407362 .219215 .31838 .462405
.288691 .331243 .380066 .241239 .323893 .434868 .198438 .311761 .489801"""


def test_specific_results():
    """The numbers in NNlib's tests."""
    x = (np.arange(1, 13) / 12).reshape(4, 3, 1, order="F")
    y, alpha = dot_product_attention(x, x, x, nheads=2, alpha=True)
    np.testing.assert_allclose(y.ravel(order="F"), [float(n) for n in Y.split()], atol=1e-5)
    np.testing.assert_allclose(alpha.ravel(order="F"), [float(n) for n in ALPHA.split()], atol=1e-5)


@WITH_PRODUCTS
def test_keys_are_attended_where_the_mask_is_true(engine):
    """The weights are above 0 there and only there; a causal mask counts dimensions from 1."""
    q, k = engine.put(rand(4, 2, 3, 1)), engine.put(rand(4, 2, 5, 1, seed=1))
    mask = np.random.default_rng(3).random((5, 3)) < 0.7
    mask[0] = True
    causal = make_causal_mask(q, dims=3)
    assert causal.shape == (3, 3)
    for keys, given, wanted in ((k, engine.put(mask), mask), (q, causal, np.triu(np.ones((3, 3), bool)))):
        alpha = engine.get(dot_product_attention_scores(q, keys, mask=given))
        for head in range(2):
            np.testing.assert_array_equal(alpha[:, :, head, 0] > 0, wanted)


@WITH_PRODUCTS
def test_dropout(engine):
    """A function of alpha is applied to the whole of it; y and alpha use the same dropout mask."""
    x = engine.put(rand(10, 10, 10))

    def fdrop(alpha):
        return alpha * engine.put(np.random.default_rng(0).random(alpha.shape, dtype=np.float32) > 0.5) * 2

    y, alpha = dot_product_attention(x, x, x, nheads=2, fdrop=fdrop, alpha=True)
    assert dot_product_attention(x, x, x, nheads=2, fdrop=fdrop)[1] is None
    y, alpha, heads = engine.get((y, alpha, split_heads(x, 2)))
    assert 0.4 < (alpha > 0).mean() < 0.6
    np.testing.assert_allclose(y, join_heads(np.einsum("jihb,dhjb->dhib", alpha, heads)), rtol=1e-4)


# Tests of this package


MASKS = {
    "causal": (lambda x, put: make_causal_mask(x), {"causal": True}),
    "padding": (lambda x, put: make_padding_mask(put(np.array([2, 5])), 5), {"seq_lens_kv": [2, 5]}),
    "both": (lambda x, put: make_causal_mask(x) & make_padding_mask(put(np.array([2, 5])), 5),
    {"causal": True, "seq_lens_kv": [2, 5]}),
    "shorter": (
        lambda x, put: make_padding_mask(put(np.array([4, 3])), 5) & make_padding_mask(put(np.array([2, 5])), 5),
        {"seq_lens_kv": [2, 3]}),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_masks_become_options(name, engine):
    """The fused call is the call with the options: on a GPU it has the same plan; y and alpha equal the results with the mask as an array."""
    x = engine.put(rand(16, 5, 2).astype(engine.dtype))
    make, options = MASKS[name]
    mask = make(x, engine.put)
    y, _ = dot_product_attention(x, x, x, mask=mask, nheads=2)
    plans = get_plan_cache().size if engine.on_cudnn else 0
    if "seq_lens_kv" in options:
        options = options | {"seq_lens_kv": engine.put(np.array(options["seq_lens_kv"], np.int32))}
    heads = split_heads(x, 2)
    want = attention(heads, heads, heads, **options)
    assert plans == (get_plan_cache().size if engine.on_cudnn else 0)
    np.testing.assert_array_equal(engine.get(y), join_heads(engine.get(want)))
    if engine.name != "fake":
        array = engine.put(np.asarray(make(engine.get(x), np.asarray)))
        _, alpha = dot_product_attention(x, x, x, mask=mask, nheads=2, alpha=True)
        dense, dense_alpha = dot_product_attention(x, x, x, mask=array, nheads=2, alpha=True)
        np.testing.assert_allclose(engine.get(y), engine.get(dense), atol=engine.tolerance)
        np.testing.assert_array_equal(engine.get(alpha), engine.get(dense_alpha))


def test_a_mask_and_an_array_is_an_array():
    """Broadcast as in Julia, from the first axis on."""
    some = np.random.default_rng(0).random((5, 5)) < 0.5
    both = make_padding_mask(np.array([2, 5, 1]), 5) & some
    want = some[:, :, None, None] & (np.arange(5)[:, None, None, None] < np.array([2, 5, 1]))
    np.testing.assert_array_equal(both, want)
    np.testing.assert_array_equal(some & make_padding_mask(np.array([2, 5, 1]), 5), want)
    np.testing.assert_array_equal(~make_causal_mask(some) | some, ~np.triu(np.ones((5, 5), bool)) | some)
    assert np.asarray(make_causal_mask(some), np.float32).sum() == 15


@WITH_PRODUCTS
def test_it_matches_the_reference(engine):
    """Heads, bias and mask together, in float64; a bias (kv_len, q_len) is for all heads."""
    q, k, v = rand(32, 7, 3), rand(32, 9, 3, seed=1), rand(16, 9, 3, seed=2)
    mask = np.random.default_rng(4).random((9, 1, 1, 3)) < 0.8
    for bias in (rand(9, 7, 2, seed=3), rand(9, 7, seed=3)):
        y, _ = call(engine, q, k, v, engine.put(bias), nheads=2, mask=mask)
        parts = [split_heads(x, 2).astype("f8") for x in (q, k, v)]
        full = (bias if bias.ndim == 3 else bias[..., None])[..., None].astype("f8")
        want, _ = reference.attention(*parts, bias=full, mask=mask)
        np.testing.assert_allclose(y, join_heads(want), atol=engine.tolerance)


#: Arrays with the values of x and other strides than in Fortran order.
STRIDES = {
    "C order": lambda put, x: put(np.ascontiguousarray(x)),
    "batch first": lambda put, x: put(np.ascontiguousarray(np.moveaxis(x, -1, 0))).transpose(*range(1, x.ndim), 0),
    "reversed positions": lambda put, x: put(x[:, ::-1].copy(order="F"))[:, ::-1],
    "reversed features": lambda put, x: put(x[::-1].copy(order="F"))[::-1],
    "every second feature": lambda put, x: put(np.asfortranarray(np.repeat(x, 2, axis=0)))[::2],
}


@pytest.mark.parametrize("nheads", [1, 2])
@pytest.mark.parametrize("name", STRIDES)
def test_strides_do_not_change_the_meaning_of_axes(name, nheads, engine):
    """Arrays with any strides give the bits of arrays in Fortran order."""
    rng = np.random.default_rng(0)
    arrays = [np.asfortranarray(rng.standard_normal((16, length, 3)).astype(engine.dtype)) for length in (5, 7, 7, 5)]
    arrays.append(np.asfortranarray(rng.standard_normal((7, 5, nheads)).astype(engine.dtype)))
    mask = np.asfortranarray(rng.random((7, 5, 1, 3)) < 0.7)

    def results(make):
        q, k, v, dy, bias = (make(engine.put, x) for x in arrays)
        options = {"mask": make(engine.put, mask), "nheads": nheads}
        y, pullback = dot_product_attention_vjp(q, k, v, bias, **options)
        return [dot_product_attention(q, k, v, bias, **options)[0], y, *pullback(dy)]

    for x, want in zip(results(STRIDES[name]), results(lambda put, x: put(x)), strict=True):
        assert x.flags.f_contiguous
        np.testing.assert_array_equal(engine.get(x), engine.get(want))


@WITH_PRODUCTS
@pytest.mark.parametrize("name", STRIDES)
def test_strides_do_not_change_the_weights(name, engine):
    """alpha of arrays with any strides, and the scores of split heads."""
    q, k = rand(16, 5, 3), rand(16, 7, 3, seed=1)
    found = [STRIDES[name](engine.put, x) for x in (q, k, k)]
    want = dot_product_attention_scores(*(split_heads(engine.put(x), 2) for x in (q, k)))
    converted = {"compute_dtype": "float16"} if engine.on_cudnn else {}
    alphas = (
        dot_product_attention(*found, nheads=2, alpha=True, **converted)[1],
        dot_product_attention_scores(*(split_heads(x, 2) for x in found[:2])),
    )
    for alpha in alphas:
        assert alpha.flags.f_contiguous
        np.testing.assert_allclose(engine.get(alpha), engine.get(want), rtol=1e-5)


def test_heads_are_views():
    """Splitting and joining column-major arrays copies nothing."""
    x = rand(12, 5, 2, 3)
    heads = split_heads(x, 3)
    assert heads.shape == (4, 3, 5, 2, 3)
    assert np.shares_memory(x, heads)
    np.testing.assert_array_equal(heads[:, 1], x[4:8])
    assert np.shares_memory(join_heads(heads), x)


# Layouts


@pytest.mark.parametrize("name", layout.LAYOUTS)
def test_layouts_are_views(name, engine):
    """Both conversions return views; elements are found at the same indices."""
    sizes = {"b": 2, "s": 5, "h": 3, "d": 8, "t": 7}
    x = engine.put(rand(*(sizes[letter] for letter in name)))
    letters = "dht" if "t" in name else "dhsb"
    ours = layout.to_julia(x, name)
    assert ours.shape == tuple(sizes[letter] for letter in letters)
    back = layout.from_julia(ours, name)
    assert (back.shape, back.strides) == (x.shape, x.strides)
    address = (lambda a: a.data.ptr) if engine.on_cudnn else (lambda a: a.ctypes.data)
    assert address(ours) == address(back) == address(x)
    at = dict(zip("bshdt", (1, 3, 2, 4, 6), strict=True))
    ours, x = engine.get((ours, x))
    assert ours[tuple(at[letter] for letter in letters)] == x[tuple(at[letter] for letter in name)]


def test_masks_in_place():
    """``&=`` gives a mask that the kernel supports, and does not change other references to the mask."""
    first = mask = make_causal_mask(rand(8, 5, 2))
    mask &= make_padding_mask(np.array([5, 3]), 5)
    assert (mask.causal, mask.lengths.tolist(), first.lengths) == (True, [5, 3], None)


@pytest.mark.parametrize("lengths", [[3], [9, 4], [-1, 2], [2**32 + 1, 1]], ids=str)
def test_length_masks_match_boolean_masks(lengths):
    """One length for all, longer than the keys, below 0 or beyond 32 bits."""
    x = rand(8, 5, 2)
    mask = make_padding_mask(np.array(lengths), 5)
    seen = np.arange(5)[:, None] < np.array(lengths)
    np.testing.assert_array_equal(np.asarray(mask)[:, 0, 0], seen)
    y, _ = dot_product_attention(x, x, x, mask=mask)
    want, _ = dot_product_attention(x, x, x, mask=np.asarray(mask))
    np.testing.assert_allclose(y, want, rtol=1e-6)


def test_the_gradient_of_a_bias_keeps_its_dtype():
    """A float32 bias of float16 arrays has a gradient that float16 cannot represent."""
    q, k, v = (rand(8, n, 2, seed=n).astype("f2") for n in (4, 6, 6))
    bias = rand(6, 4)
    y, pullback = dot_product_attention_vjp(q, k, v, bias)
    *_, dbias = pullback(np.full(y.shape, 60000, "f2", order="F") * v[:, :4])
    assert dbias.dtype == np.float32
    assert np.isfinite(dbias).all()
    assert (dbias.astype("f2") != dbias).any()


# Repeated calls

#: Problems by name: the axes of a bias, and the mask of x, with lengths of 2 batch items; the heads, and the batch dimensions.
REPEATED = {
    "plain": (None, None, 2, (2,)),
    "bias": ("ki", None, 2, (2,)),
    "bias of heads": ("kih", None, 2, (2, 1)),
    "causal": (None, lambda x, lengths: make_causal_mask(x), 1, (2, 3)),
    "padding": ("kihb", lambda x, lengths: make_padding_mask(lengths, x.shape[1]) & make_causal_mask(x), 2, (2,)),
    "array": (None, lambda x, lengths: np.tri(x.shape[1], dtype=bool).T, 2, ()),
}
#: Problems of which an array is copied in every call.
GAPS, OTHER_DTYPE, ONE_LENGTH, CONVERTED = COPIED = (
    "gaps between batch items", "another dtype of dy", "one length", "computed in another dtype",
)  # fmt: skip


def given_arrays(engine, name, seed):
    """q, k, v and dy, arrays of numpy; the bias, the mask, and the options of a problem."""
    axes, make, nheads, batch = REPEATED.get(name, (None, None, 2, (2, 2)))
    rng = np.random.default_rng([seed, nheads, len(batch)])
    sizes = {"k": 7, "i": 7, "h": nheads, "b": 2}
    dtype = np.float32 if name == CONVERTED else engine.dtype

    def normal(*shape):
        return np.asfortranarray(rng.standard_normal(shape).astype(dtype))

    q, k, v, dy = (normal(n * nheads, 7, *batch) for n in (16, 16, 8, 8))
    bias = normal(*(sizes[axis] for axis in axes)) if axes else None
    mask = make(q, rng.integers(1, 8, 2)) if make else None
    if name == GAPS:  # its batch dimensions cannot be joined
        k = normal(16 * nheads, 7, 3, 2)[:, :, :2]
    elif name == OTHER_DTYPE:
        dy = dy.astype(np.float64 if engine.name == "numpy" else np.float32)
    elif name == ONE_LENGTH:
        mask = make_padding_mask(np.array([5]), 7)
    options = {"compute_dtype": "float16"} if name == CONVERTED else {}
    return [q, k, v, dy], bias, mask, {"nheads": nheads, **options}


def on_engine(engine, arrays, bias, mask):
    """Arrays of the engine with the same strides, the bias and the mask."""
    made = [engine.put(x) if x.base is None else engine.put(x.base)[:, :, : x.shape[2]] for x in arrays]
    if hasattr(mask, "lengths"):
        causal = make_causal_mask(made[0])
        padding = mask if mask.lengths is None else make_padding_mask(engine.put(mask.lengths), mask.shape[0])
        mask = causal if padding is mask else padding & causal if mask.causal else padding
    return made, engine.put(bias), engine.put(mask)


def of_split_heads(arrays, bias, mask, options):
    """The results of attention on arrays of numpy with split heads."""
    given = {name: x for name, x in options.items() if name != "nheads"}
    nheads = options["nheads"]
    q, k, v, dy = (x.reshape((x.shape[0] // nheads, nheads, 7, -1), order="F") for x in arrays)
    if bias is not None:
        given["bias"] = bias.reshape(bias.shape + (1,) * (4 - bias.ndim))
    if mask is not None:
        array = np.asarray(mask)
        given["mask"] = array.reshape(array.shape + (1,) * (4 - array.ndim))
    out, pullback = cupy_sdpa.attention_vjp(q, k, v, **given, return_dbias=bias is not None)
    found = [out, *pullback(dy.astype(out.dtype))]
    shapes = [arrays[3].shape, *(x.shape for x in arrays[:3]), *([bias.shape] if bias is not None else [])]
    return [x.reshape(shape, order="F") for x, shape in zip(found, shapes, strict=True)]


@pytest.mark.parametrize("name", [*REPEATED, *COPIED])
def test_repeated_calls_have_the_results_of_split_heads(name, engine):
    """With other values, at other addresses; results are arrays of their own in Fortran order."""
    kept = []
    for seed in (0, 1, 2, 0, 1, 2, 3, 3):
        arrays, bias, mask, options = given_arrays(engine, name, seed)
        (q, k, v, dy), own_bias, own_mask = on_engine(engine, arrays, bias, mask)
        y, _ = dot_product_attention(q, k, v, own_bias, mask=own_mask, **options)
        again, pullback = dot_product_attention_vjp(q, k, v, own_bias, mask=own_mask, **options)
        *gradients, dbias = pullback(dy)
        assert (dbias is None) == (bias is None)
        found = [again, *gradients, *([dbias] if bias is not None else [])]
        wanted = of_split_heads(arrays, bias, mask, options)
        np.testing.assert_array_equal(engine.get(y), engine.get(again))
        for x, want, given in zip(found, wanted, (dy, q, k, v, own_bias), strict=False):
            assert x.shape == given.shape
            assert x.dtype == given.dtype or name == OTHER_DTYPE
            assert x.flags.f_contiguous
            x, tolerance = engine.get(x), 4 * engine.tolerance
            if engine.name == "numpy" and not hasattr(mask, "lengths"):
                assert x.tobytes(order="F") == want.tobytes(order="F")
            np.testing.assert_allclose(x, want, atol=tolerance, rtol=tolerance)
        kept.append(([*found, y], engine.get((*found, y))))
    for results, values in kept:  # later calls have not written to them
        for x, value in zip(results, values, strict=True):
            np.testing.assert_array_equal(engine.get(x), value)
