"""Block masks with every other option: which calls compute by blocks, which as a dense mask, and which raise."""

import numpy as np
import pytest
from engines import numbers, one_in

from cupy_sdpa import (
    BlockMask,
    attention,
    attention_jvp,
    attention_vjp,
    block_mask,
    explain,
    fp8,
    prepare,
    weight_entropy,
    weight_sums,
    zoo,
)
from cupy_sdpa.check.combine import is_valid, with_required
from cupy_sdpa.check.draw import OPTIONS

#: The options of ``check`` that no call takes with a block mask, or that are separate features.
OTHERS = {"block_mask", "fp8", "mean", "shared_prefix", "merge", "cache"}
N = 300
#: Options of calls of 2 heads and 2 batch items, and how the report describes the mask.
HOW = {
    "nothing": ({}, "computed as batch items of blocks"),
    "scale, softcap": ({"scale": 0.3, "softcap": 3.0}, "batch items of blocks"),
    "causal": ({"causal": True}, "6 of 9 blocks, 6 of them partial"),
    "a window": ({"window": [100, 0, "bottom_right"]}, "5 of 9 blocks"),
    "a band of all pairs": ({"window": (300, None)}, "9 of 9 blocks"),
    "a bucket": ({"bucket": 128}, "batch items of blocks"),
    "lengths": ({"seq_lens_kv": np.array([300, 200], "i4")}, "computed as a dense mask of all blocks, because of seq_lens_kv"),
    "causal and lengths": ({"causal": True, "seq_lens_q": np.array([300, 200], "i4")}, "because of seq_lens_q"),
    "a bias": ({"bias": np.ones((N, 1, 1, 1), "f4", "F")}, "because of bias"),
    "slopes": ({"alibi_slopes": np.array([0.5, 0.25], "f4")}, "because of alibi_slopes"),
    "dropout": ({"dropout_p": 0.5, "seed": 1}, "because of dropout_p, seed"),
    "no dropout": ({"dropout_p": 0.0}, "batch items of blocks"),
    "a mask": ({"mask": np.ones((N, 1, 1, 2), bool, "F")}, "because of mask"),
    "a mask function": ({"mask_mod": zoo.causal}, "because of mask_mod"),
    "max_sumexp": ({"return_stats": "max_sumexp"}, "because of return_stats='max_sumexp'"),
    "gradients of sinks": (
        {"sinks": np.zeros(2, "f4"), "backward": True, "return_dsinks": True}, "because of return_dsinks",
    ),
}  # fmt: skip


def partial():
    """A mask whose blocks are all partial."""
    return block_mask(lambda b, h, i, j: (i + j) % 3 > 0, N, N)


@pytest.mark.parametrize("name", HOW)
def test_explain_says_how_a_mask_is_computed(name):
    """By blocks, or as a dense mask and why."""
    options, words = HOW[name]
    x = np.ones((8, 2, N, 2), np.float32, order="F")
    report = explain(x, x, x, block_mask=partial(), **options)
    assert report
    assert words in report.blocks


@pytest.mark.parametrize(
    "other", one_in(2, [name for name in OPTIONS if name not in OTHERS and is_valid(with_required({"block_mask", name}))])
)
@pytest.mark.parametrize("number", numbers(3, quick=1, sweep=2))
@pytest.mark.in_turn(2)
def test_with_every_option(other, number, engine):
    """Both passes and derivatives agree with the reference; only cuDNN may not support them."""
    names = {"block_mask", other} - (engine.left_out - {"parallel"})  # an offset needs float64
    engine.agrees(engine.draw(names, number, others=OPTIONS.keys() - OTHERS, most=1), refused=True)


def test_every_option_is_drawn():
    """With a block mask, all but one option of each call, and FP8, whose results have their own tests."""
    partners = {name for name in OPTIONS if name != "block_mask" and is_valid(with_required({"block_mask", name}))}
    assert set(OPTIONS) - partners == OTHERS


BANDS = [
    {"causal": True}, {"causal": "bottom_right"}, {"window": (70, 10)}, {"window": (0, None, "bottom_right")}, {"window": (None, 130)},
    {"window": (20, 0, "bottom_right"), "causal": "bottom_right"},
]  # fmt: skip
MASKS = {
    "documents": lambda sq, skv: block_mask(lambda b, h, i, j: i // 90 == j // 90, sq, skv),
    "prefix": lambda sq, skv: block_mask(lambda b, h, i, j: (i >= j) | (j < 40), sq, skv),
    "pairs": lambda sq, skv: block_mask(lambda b, h, i, j: (i + j) % 3 > 0, sq, skv),
    "blocks": lambda sq, skv: BlockMask.from_blocks(
        np.random.default_rng(0).random((-(-skv // 64), -(-sq // 64), 2, 2)) < 0.5, sq, skv, block=64
    ),
    "none": lambda sq, skv: block_mask(lambda b, h, i, j: (i < 0) & (j < 0), sq, skv),
}


@pytest.mark.parametrize("band", one_in(2, BANDS), ids=str)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(
    "sizes",
    [(300, 300), (1, 200), *(pytest.param(x, marks=pytest.mark.slow) for x in ((256, 140), (130, 400), (0, 5)))],
    ids=str,
)
def test_a_band_beside_a_mask(name, band, sizes):
    """The result agrees with both dense masks, has the bits of a mask function with both conditions, and is computed by blocks."""
    sq, skv = sizes
    mask = MASKS[name](sq, skv)
    q, k, v, dout = (np.random.default_rng(n).standard_normal((8, 2, s, 2)) for n, s in enumerate((sq, skv, skv, sq)))
    q, k, v, dout = (np.asfortranarray(x) for x in (q, k, v, dout))
    report = explain(q, k, v, block_mask=mask, **band)
    assert "dense" not in report.blocks
    found, wanted = [], []
    for results, options in ((found, {"block_mask": mask}), (wanted, {"mask": mask.to_dense()})):
        out, pullback = attention_vjp(q, k, v, **options, **band)
        results += [out, *pullback(dout)]
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-6)


@pytest.mark.parametrize("name", ["attends", "block_mask", "mask"])
def test_arrays_of_a_score_function_have_any_name(name, engine):
    """The score function reads an array of ``tensors=`` with any name, together with a dense mask and a block mask."""
    mask = BlockMask.from_blocks(np.array([[1, 0, 1], [1, 1, 0], [1, 0, 1]], bool), N, N)
    other = np.ones((N, N, 1, 1), bool, order="F")
    other[5:9] = False
    q, bias = engine.normal(0, 16, 2, N, 1), engine.normal(1, N, N, 1, 1, dtype="f4")
    function = {
        "attends": lambda s, b, h, i, j, attends: s + attends[j, i, 0, 0],
        "block_mask": lambda s, b, h, i, j, block_mask: s + block_mask[j, i, 0, 0],
        "mask": lambda s, b, h, i, j, mask: s + mask[j, i, 0, 0],
    }[name]
    out = attention(q, q, q, block_mask=mask, mask=engine.put(other), score_mod=function, tensors={name: bias})
    wanted = attention(q, q, q, mask=engine.put(other & mask.to_dense()), bias=bias)
    np.testing.assert_allclose(engine.get(out).astype("f4"), engine.get(wanted).astype("f4"), atol=engine.tolerance)


def test_other_functions_compute_a_dense_mask(engine):
    """Prepared calls, sums of weights, derivatives and layouts in C order."""
    mask, q = partial(), engine.normal(0, 16, 2, N, 1)
    dense, bias = engine.put(mask.to_dense()), engine.normal(1, N, 1, 1, 1)
    for call in (
        lambda **options: prepare(q, q, q, bias=bias, **options)(q, q, q),
        lambda **options: weight_sums(q, q, **options),
        lambda **options: weight_entropy(q, q, **options),
        lambda **options: attention_jvp(q, q, q, q, q, q, bias=bias, **options)[1],
        lambda **options: attention(
            *[q.T] * 3, layout="bshd", bias=bias.T, **{name: x if name[0] == "b" else x.T for name, x in options.items()}
        ),
    ):
        np.testing.assert_array_equal(engine.get(call(block_mask=mask)), engine.get(call(mask=dense)))


def test_fp8_arrays():
    """On numpy they take a block mask, also in C order; cuDNN does not support masks of FP8 arrays."""
    mask, x = partial(), np.random.default_rng(0).standard_normal((16, 2, N, 1)).astype("f4")
    q, dense = fp8.quantize(np.asfortranarray(x)), mask.to_dense()
    report = explain(q, q, q, block_mask=mask)
    assert "because of FP8 arrays" in report.blocks
    assert (attention(q, q, q, block_mask=mask).data == attention(q, q, q, mask=dense).data).all()
    c = fp8.quantize(np.ascontiguousarray(x.T), layout="bshd")
    found, wanted = (attention(c, c, c, layout="bshd", **options) for options in ({"block_mask": mask}, {"mask": dense.T}))
    assert (found.data == wanted.data).all()
    out, _ = attention_vjp(*[np.asfortranarray(x)] * 3, block_mask=mask, compute_dtype="float8_e4m3fn")
    assert np.isfinite(out).all()
    report = explain(q, q, q, block_mask=mask, gpu="H200", cudnn="9.19")
    assert "mask or block_mask is not supported with FP8 arrays" in report.reasons[0]
