"""The caller's arrays of calls that do not read them as arrays of one problem: strides, dtypes, shapes and overlaps."""

import numpy as np
import pytest
from test_block_sparse import NAMES, Draw, dense_attention

import cupy_sdpa
from cupy_sdpa import (
    BlockMask,
    attention,
    attention_backward,
    attention_jvp,
    attention_vjp,
    merge,
    shared_prefix_attention,
    widen,
)


def strided(xp, x, rng, *, dense_rows=True):
    """A view with random gaps and a random order of axes, the array of NaN that it is a part of, and where it lies in it."""
    order = rng.permutation(x.ndim)
    if dense_rows:
        order = np.array([*(axis for axis in order if axis), 0])
    free = np.array([axis > 0 or not dense_rows for axis in order])
    steps = np.where(free, rng.choice([1, 1, 2], x.ndim), 1)
    gaps = np.where(free, rng.integers(0, 4, x.ndim), 8 * rng.integers(0, 2))
    lengths = np.array(x.shape)[order]
    index = tuple(slice(0, (n - 1) * step + 1, step) for n, step in zip(lengths.tolist(), steps.tolist(), strict=True))
    own = np.zeros(lengths * steps + gaps, bool)
    whole = np.full(own.shape, np.nan, x.dtype)
    own[index], whole[index] = True, x.transpose(order)
    whole = xp.asarray(whole)
    return whole[index].transpose(*np.argsort(order).tolist()), whole, own


def host(x):
    """An array in the memory of the host."""
    return x.get() if hasattr(x, "get") else x


def draw_with_dense_rows(seed, xp):
    """A random call with a block mask, whose head dims the GPU supports."""
    return Draw(seed, "float32" if xp is np else "float16", dims=(16, 32))


@pytest.mark.parametrize("engine", ["numpy", "fake"])
@pytest.mark.parametrize("seed", range(24))
def test_block_masks_with_strided_arrays(seed, engine, fake):
    """All arguments and results have gaps and other orders of axes. Elements in the gaps stay NaN."""
    xp, rng = np if engine == "numpy" else fake, np.random.default_rng(seed)
    draw = draw_with_dense_rows(seed, xp)
    options = {"scale": draw.scale, "block_mask": draw.mask}
    if draw.sinks is not None:
        options["sinks"] = strided(xp, draw.sinks, rng, dense_rows=xp is fake)[0]
    scale = draw.scale or draw.arrays[0].shape[0] ** -0.5
    expected = dense_attention(*(x.astype("f8") for x in draw.arrays), draw.attends, scale, 0.0, draw.sinks)
    for _ in range(2):
        q, k, v, dout = (strided(xp, x, rng)[0] for x in draw.arrays)
        made = [np.full(x.shape, np.nan, "f4" if name == "stats" else q.dtype) for name, x in zip(NAMES, expected, strict=True)]
        results = [strided(xp, x, rng, dense_rows=x.ndim == 4) for x in made]
        out, stats, dq, dk, dv = (view for view, _, _ in results)
        attention(q, k, v, out=out, stats=stats, **options)
        attention_backward(dout, q, k, v, out, stats, dq=dq, dk=dk, dv=dv, **options)
        for name, (view, whole, own), wanted in zip(NAMES, results, expected, strict=True):
            np.testing.assert_allclose(host(view), wanted, rtol=2e-2, atol=2e-2, err_msg=name)
            assert np.isnan(host(whole)[~own]).all(), name


#: One of the arrays of a call, changed so that it does not fit, and the error.
UNFIT = {
    "int32 sinks": ("sinks", lambda x: x.astype("i4"), TypeError, "sinks is int32; it must be float32"),
    "one sink": ("sinks", lambda x: x[:1], ValueError, r"sinks has shape \(1,\); it must be \(4,\)"),
    "float64 stats": ("stats", lambda x: x.astype("f8"), TypeError, "stats is float64; it must be float32"),
    "float64 dout": ("dout", lambda x: x.astype("f8"), TypeError, "dout is float64; it must be"),
    "stats of one head": ("stats", lambda x: x[:, :1], ValueError, r"stats has shape \(384, 1, 1\); it must be \(384, 4, 1\)"),
    "None for dout": ("dout", lambda x: None, TypeError, "dout is None"),
}


def block_call(xp, change, **options):
    """Both passes with a mask of random blocks; ``change(name, array)`` returns the array to pass."""
    rng = np.random.default_rng(1)
    mask = BlockMask.from_blocks(np.array([[1, 0, 1], [0, 1, 1], [1, 0, 0]], bool)[:, :, None, None], 384, 384)
    dtype = "f4" if xp is np else "f2"
    q, k, v, dout = (xp.asarray(np.asfortranarray(rng.standard_normal((16, 4, 384, 1)).astype(dtype))) for _ in range(4))
    sinks = change("sinks", xp.asarray(rng.standard_normal(4).astype("f4")))
    out, stats = attention(q, k, v, block_mask=mask, sinks=sinks, return_stats=True)
    given = {name: change(name, x) for name, x in {"dout": dout, "out": out, "stats": stats}.items()}
    dq = change("dq", xp.asarray(np.zeros(q.shape, dtype, order="F")))
    return attention_backward(
        given["dout"], q, k, v, given["out"], given["stats"], block_mask=mask, sinks=sinks, dq=dq, **options
    )


@pytest.mark.parametrize("engine", ["numpy", "fake"])
@pytest.mark.parametrize("case", UNFIT)
def test_block_masks_refuse_arrays_that_do_not_fit(case, engine, fake):
    """The kernels of blocks read the arrays as if they were of the right dtype and shape."""
    name, made, error, message = UNFIT[case]
    with pytest.raises(error, match=message):
        block_call(np if engine == "numpy" else fake, lambda of, x: made(x) if of == name else x)


def test_block_masks_and_sinks_with_gaps(fake):
    """The kernel that merges blocks reads them without their stride, so the GPU refuses them."""
    with pytest.raises(ValueError, match="sinks has strides"):
        block_call(fake, lambda of, x: fake.asarray(np.ones(8, "f4"))[::2] if of == "sinks" else x)


@pytest.mark.parametrize("name", ["dout", "out", "dq"])
def test_block_masks_and_rows_with_gaps(name, fake):
    """The kernels of blocks access elements without the stride of the first axis, so gaps are refused; numpy reads a named layout."""

    def change(of, x):
        return x.transpose(1, 0, 2, 3).copy(order="F").transpose(1, 0, 2, 3) if of == name else x

    for xp in (np, fake):
        with pytest.raises(ValueError, match=f"{name} has a stride of .* bytes along"):
            block_call(xp, change)
    for one, other in zip(block_call(np, change, layout="dhsb"), block_call(np, lambda of, x: x), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_block_masks_refuse_results_whose_elements_share_memory(fake):
    """As without a block mask."""
    x = fake.asarray(np.ones((16, 2, 128, 1), "f2", order="F"))
    row = fake.asarray(np.zeros((16, 1, 128, 1), "f2", order="F"))
    with pytest.raises(ValueError, match="elements share memory"):
        attention(
            x, x, x, out=fake.broadcast_to(row, x.shape), block_mask=BlockMask.from_blocks(np.ones((1, 1), bool), 128, 128)
        )


CONVERTED = {
    "three batch entries": (lambda q: np.zeros((*q.shape[:3], 3), q.dtype), "shape"),
    "no batch axis": (lambda q: np.zeros(q.shape[:3], q.dtype), "shape"),
    "an input": (lambda q: q, "overlaps q"),
    "shared elements": (lambda q: np.broadcast_to(np.zeros((*q.shape[:2], 1, 1), q.dtype, order="F"), q.shape), "share memory"),
}


@pytest.mark.parametrize("engine", ["numpy", "fake"])
@pytest.mark.parametrize("case", CONVERTED)
@pytest.mark.parametrize("layout", [None, "bshd"])
def test_converted_results_are_checked(case, engine, layout, fake):
    """With compute_dtype the call does not see the array of the caller; a wrong one was broadcast to. Nothing is written."""
    made, message = CONVERTED[case]
    rng, options = np.random.default_rng(0), {"compute_dtype": "float16", "layout": layout}

    def theirs(x):
        x = x if case == "shared elements" and not all(x.strides) else np.asfortranarray(x)
        if engine == "fake" and case == "shared elements":
            x = fake.broadcast_to(fake.asarray(np.asfortranarray(x[:, :, :1, :1])), x.shape)
        elif engine == "fake":
            x = fake.asarray(x)
        return x if layout is None else x.transpose(*([3, 2, 1, 0] if x.ndim == 4 else [2, 1, 0]))

    q, k, v = (theirs(rng.standard_normal((16, 2, 5, 1)).astype("f4")) for _ in range(3))
    wrong = q if case == "an input" else theirs(made(np.zeros((16, 2, 5, 1), "f4")))
    before, stats = host(wrong).copy(), np.full((5, 2, 1), 7, "f4", order="F")
    stats = stats if engine == "numpy" else fake.asarray(stats)
    stats = stats if layout is None else stats.T
    pullback = attention_vjp(q, k, v, **options)[1]
    message = {"shape": "has .* axes|has shape", "overlaps q": "overlaps (q|dout)"}.get(message, message)
    for call in (
        lambda: attention(q, k, v, out=wrong, stats=stats, **options),
        lambda: pullback(q, dq=wrong),
        lambda: attention_jvp(q, k, v, dq=k, out=wrong, **options),
        lambda: attention_jvp(q, k, v, dq=k, dout=wrong, **options),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert (host(stats) == 7).all()
    np.testing.assert_array_equal(host(wrong), before)


def test_converted_gradients_must_not_overlap():
    """One array for dq and dk received both."""
    x = np.ones((16, 2, 5, 1), "f4", order="F")
    _, pullback = attention_vjp(x, x, x, compute_dtype="float16")
    same = np.zeros_like(x)
    with pytest.raises(ValueError, match="dq overlaps dk"):
        pullback(x, dq=same, dk=same)
    read_only = np.zeros_like(x)
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match="dv is read-only"):
        pullback(x, dq=same, dv=read_only)
    assert not same.any()


def test_merged_results_must_not_share_memory():
    """Elements of out that share memory would overwrite one another."""
    x = np.ones((16, 2, 5, 1), "f4", order="F")
    shared = np.lib.stride_tricks.as_strided(np.zeros(16, "f4"), x.shape, (4, 0, 0, 0))
    with pytest.raises(ValueError, match="elements share memory"):
        merge([x, x], [np.zeros((5, 2, 1), "f4")] * 2, out=shared)


@pytest.mark.parametrize("engine", ["numpy", "fake"])
@pytest.mark.parametrize("sq", [1, 3])
def test_shared_prefixes_check_lengths_and_results(sq, engine, fake):
    """A single length was broadcast to all sequences, and out could overlap the queries or the pages."""
    xp, rng = np if engine == "numpy" else fake, np.random.default_rng(0)
    dtype = "f4" if xp is np else "f2"
    q, k, v = (
        xp.asarray(np.asfortranarray(rng.standard_normal(shape).astype(dtype)))
        for shape in ((16, 2, sq, 2), (16, 2, 4, 6), (16, 2, 4, 6))
    )
    table = xp.asarray(np.array([[0, 0], [1, 1], [2, 3], [4, 5]], "i4", order="F"))
    lengths = xp.asarray(np.array([14, 15], "i4"))
    for wrong in (lengths[:1], lengths.reshape(2, 1)):
        with pytest.raises(ValueError, match=r"seq_lens_kv has shape .*; it must be \(2,\)"):
            shared_prefix_attention(q, k, v, 8, page_table=table, seq_lens_kv=wrong)
    with pytest.raises(TypeError, match="seq_lens_kv is a list"):
        shared_prefix_attention(q, k, v, 8, page_table=table, seq_lens_kv=[14, 15])
    for name, wrong in {"q": q, "k": k[:, :, :sq, :2]}.items():
        before = host(wrong).copy()
        with pytest.raises(ValueError, match=f"out overlaps {name}"):
            shared_prefix_attention(q, k, v, 8, page_table=table, seq_lens_kv=lengths, out=wrong)
        np.testing.assert_array_equal(host(wrong), before)


@pytest.mark.parametrize("tangents", ["q", "k", "v", "qk", "kv"])
def test_widened_arrays_are_copies(tangents):
    """Tangents are written into them, which must not change the caller's arrays."""
    rng = np.random.default_rng(0)
    q, k, v = (np.asfortranarray(rng.standard_normal((16, 2, 5, 1))) for _ in range(3))
    given = {f"d{name}": np.asfortranarray(rng.standard_normal(q.shape)) if name in tangents else None for name in "qkv"}
    wide = widen(q, k, v, **given)
    for name, array in wide.named().items():
        for of, other in {"q": q, "k": k, "v": v, **given}.items():
            assert other is None or not np.shares_memory(array, other), f"{name} and {of}"
    wanted = cupy_sdpa.attention_jvp(q, k, v, **given)
    for one, other in zip(attention_jvp(q, k, v, widened=wide), wanted, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["q", "seq_lens_q", "seq_lens_kv", "page_table", "out", "stats"])
@pytest.mark.parametrize("seed", range(3))
def test_split_pages_with_strided_arrays(seed, name, fake):
    """The kernels of split keys read rows of q and lengths without gaps; the other arrays have any strides."""
    rng = np.random.default_rng(seed)
    sq, batch = ((1, 3), (3, 2), (5, 4))[seed]
    q, k, v = (rng.standard_normal(shape).astype("f2") for shape in ((16, 4, sq, batch), (16, 2, 16, 12), (8, 2, 16, 12)))
    options = {
        "page_table": rng.permutation(12)[: 3 * batch].reshape(3, batch).astype("i4"),
        "seq_lens_kv": rng.integers(sq, 49, batch).astype("i4"),
        "seq_lens_q": rng.integers(1, sq + 1, batch).astype("i4"),
    }
    given = {"q": q, "out": np.full((8, *q.shape[1:]), np.nan, "f2"), "stats": np.full((sq, 4, batch), np.nan, "f4"), **options}
    settings = {"causal": "bottom_right", "num_splits": 2}
    wide = [np.asfortranarray(x.astype("f8")) for x in (q, k, v)]
    expected = attention(*wide, **{n: np.asfortranarray(x) for n, x in options.items()}, **settings, return_stats=True)
    for _ in range(2):
        arrays = {of: fake.asarray(np.asfortranarray(x)) for of, x in given.items()}
        axis = 1 if name in ("q", "out") else 0  # head_dim has no gaps
        repeated = fake.asarray(np.asfortranarray(np.repeat(given[name], 2, axis=axis)))
        arrays[name], between = (repeated[(slice(None),) * axis + (slice(first, None, 2),)] for first in (0, 1))
        between[...] = -1
        passed = {of: arrays[of] for of in options} | settings
        attention(
            arrays["q"],
            fake.asarray(k, order="F"),
            fake.asarray(v, order="F"),
            out=arrays["out"],
            stats=arrays["stats"],
            **passed,
        )
        for of, wanted in zip(("out", "stats"), expected, strict=True):
            np.testing.assert_allclose(arrays[of].get(), wanted, rtol=2e-2, atol=2e-2, err_msg=of)
        assert (between.get() == -1).all()
