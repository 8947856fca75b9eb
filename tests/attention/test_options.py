"""What the options mean: diagonals and windows, lengths, packed sequences, masks and biases, sinks, slopes and dropout."""

import ml_dtypes
import numpy as np
import pytest
from low_scores import close, low_scores

import cupy_sdpa
from cupy_sdpa import Unsupported, alibi_slopes, attention, attention_backward, attention_vjp, dropout_mask, explain, reference

SQUARE, WIDE, TALL = (6, 6), (4, 7), (7, 4)
PICTURES = {
    "causal": (SQUARE, {"causal": True}, lambda i, j: j <= i),
    "causal_wide": (WIDE, {"causal": "top_left"}, lambda i, j: j <= i),
    "causal_tall": (TALL, {"causal": True}, lambda i, j: j <= i),
    "bottom_right_wide": (WIDE, {"causal": "bottom_right"}, lambda i, j: j <= i + 3),
    "bottom_right_tall": (TALL, {"causal": "bottom_right"}, lambda i, j: j <= i - 3),
    "window": (SQUARE, {"window": (2, 1)}, lambda i, j: i - 2 <= j <= i + 1),
    "window_left": (SQUARE, {"window": (1, None)}, lambda i, j: i - 1 <= j),
    "window_right": (WIDE, {"window": (None, 2)}, lambda i, j: j <= i + 2),
    "window_of_the_diagonal": (SQUARE, {"window": (0, 0)}, lambda i, j: i == j),
    "window_causal": (SQUARE, {"window": (2, 5), "causal": True}, lambda i, j: i - 2 <= j <= i),
    "window_bottom_right": (WIDE, {"window": (1, 1, "bottom_right")}, lambda i, j: i + 2 <= j <= i + 4),
    "window_causal_bottom_right": (WIDE, {"window": (1, None), "causal": "bottom_right"}, lambda i, j: i + 2 <= j <= i + 3),
    "window_bottom_right_tall": (TALL, {"window": (1, 1, "bottom_right")}, lambda i, j: i - 4 <= j <= i - 2),
}


@pytest.mark.parametrize("name", PICTURES)
def test_diagonals_and_windows_match_their_definition(name, engine):
    """For each query and key: queries of zeros give the mean of the values that they attend to."""
    (sq, skv), options, rule = PICTURES[name]
    want = np.array([[rule(i, j) for j in range(skv)] for i in range(sq)])
    q, k = (engine.xp.zeros((8, 1, n, 1), engine.dtype, order="F") for n in (sq, skv))
    v = engine.put(np.asfortranarray(np.eye(8, dtype=engine.dtype)[:, None, :skv, None]))
    np.testing.assert_array_equal(engine.get(attention(q, k, v, **options))[:skv, 0, :, 0].T > 0, want)
    np.testing.assert_array_equal([reference.visible(i, 0, sq, skv, **options) for i in range(sq)], want)


SAME = {
    "square_bottom_right": ((64, 64), {"causal": "bottom_right"}, {"causal": True}),
    "decode_bottom_right": ((1, 64), {"causal": "bottom_right"}, {}),
    "window_beyond_everything": ((64, 64), {"window": (63, 63)}, {}),
    "window_without_bounds": ((64, 32), {"window": (None, None)}, {}),
    "window_that_is_causal": ((64, 32), {"window": (None, 0)}, {"causal": True}),
    "causal_window": ((64, 64), {"window": (9, 30), "causal": True}, {"window": (9, 0)}),
    "softcaps": ((64, 64), {"softcap": 2.0}, {"softcap": 30.0}),
    "scales": ((64, 64), {"scale": 0.1}, {"scale": 0.2}),
}


@pytest.mark.parametrize("name", SAME)
def test_equal_masks_give_one_problem(name):
    """They share a plan, because the problem holds the simplest form; the value of a softcap is not part of it."""
    (sq, skv), *both = SAME[name]
    shapes = (64, 4, sq, 2), (64, 4, skv, 2), (64, 4, skv, 2)
    one, other = (cupy_sdpa.problem(*shapes, dtype="bfloat16", **options) for options in both)
    assert one == other
    assert one != cupy_sdpa.problem(*shapes, dtype="bfloat16", mask=(skv, sq, 1, 1))


def test_totals_share_a_plan():
    """Neither the total length of packed sequences nor their offsets are part of the plan."""
    starts = {"cu_seqlens_q": (5,), "cu_seqlens_kv": (5,), "max_seqlen_q": 300, "max_seqlen_kv": 300}
    made = {cupy_sdpa.problem(*[(64, 4, n)] * 3, dtype="bfloat16", backward=True, **starts) for n in (1000, 1010, 1024)}
    assert len(made) == 1


def test_lengths_of_a_batch_of_one_are_dense():
    """For any stride of the array of one length; the problem describes its mask."""
    q = np.zeros((64, 4, 16, 1), np.float32, order="F")
    for array in (np.array([3], np.int32), np.array([3, 4, 5], np.int32)[::2][:1]):
        assert explain(q, q, q, seq_lens_q=array).problem.seq_lens_q.strides == (4,)
    text = str(explain(q, q, q, seq_lens_kv=np.int32([2]), window=(5, None, "bottom_right")).problem)
    assert "at most 16 queries, at most 16 keys" in text
    assert "window of 5 keys before and all after the diagonal from the bottom right" in text
    slopes = {"alibi_slopes": alibi_slopes(4), "window": (None, None, "bottom_right")}
    assert "diagonal from the bottom right" in str(explain(q, q[:, :, :9], q[:, :, :9], **slopes).problem)


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"causal": True}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("source", ["bias", "tensors", "score_mod"])
def test_nan_in_a_score_is_not_a_mask(source, options, engine):
    """The row of the score is NaN, as in a dense softmax, unless the score is masked; other rows are as without NaN."""
    q, k, v = (engine.normal(n, 16, 2, 20, 2) for n in range(3))
    bias = np.zeros((20, 20, 2, 2), np.float32, order="F")
    bias[3, 7, 1, 0], bias[9, 4, 0, 1], bias[18, 2, 1, 1] = np.nan, -1e9, np.nan
    if "sinks" in options:
        options = {"sinks": engine.put(np.zeros(2, np.float32))}

    def scores(array):
        if source == "bias":
            return {"bias": engine.put(array)}
        if source == "tensors":
            return {"score_mod": lambda s, b, h, i, j, table: s + table[j, i, h, b], "tensors": {"table": engine.put(array)}}
        bad = np.isnan(array)

        def modified(s, b, h, i, j, bad):
            return np.where(bad[j, i, h, b], (s - s) / (s - s), np.where((b == 1) & (h == 0) & (i == 4) & (j == 9), -1e9, s))

        return {"score_mod": modified, "tensors": {"bad": engine.put(np.asfortranarray(bad))}}

    lengths = engine.put(np.int32([20, 15]))  # the last NaN is beyond the length
    of_call = {"seq_lens_kv": lengths, **scores(bias), **options}
    out, stats = attention(q, k, v, return_stats=True, **of_call)
    dq = engine.get(attention_backward(v, q, k, v, out, stats, **of_call)[0]).astype(np.float32)
    out, stats = engine.get((out, stats))
    there = np.zeros((20, 2, 2), bool)
    there[7, 1, 0] = True
    lost = np.isnan(stats)
    if engine.has_cudnn_since(91901):
        lost |= np.isneginf(stats)  # as in 9.28.1; 9.19.0 writes NaN, and versions between were not measured
    np.testing.assert_array_equal(lost, there)
    for result in (out.astype(np.float32), dq):
        np.testing.assert_array_equal(np.isnan(result), np.broadcast_to(there.transpose(1, 0, 2), result.shape))
    clean = np.where(np.isnan(bias), np.float32(0), bias)
    wanted = engine.get(attention(q, k, v, seq_lens_kv=lengths, **scores(np.asfortranarray(clean)), **options))
    rows = ~np.isnan(out.astype(np.float32))
    np.testing.assert_array_equal(out[rows], wanted[rows])


def test_alibi_slopes_match_the_paper():
    """For 8 heads the slopes of section 3; for other numbers the slopes of its code."""
    assert alibi_slopes(16)[:2].tolist() == pytest.approx([2**-0.5, 2**-1])
    assert alibi_slopes(12).tolist()[8:] == pytest.approx([2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5])


def test_the_share_of_dropped_weights(engine):
    """The probability is not rounded; a probability of 0 drops nothing, also of packed sequences."""
    q = engine.xp.ones((64, 4, 256, 2), np.float16, order="F")
    for p in (0.01, 0.1, 0.9) if engine.name != "fake" else (0.1,):
        kept = [float(dropout_mask(q, q, dropout_p=p, seed=seed).mean()) for seed in range(8 if p == 0.01 else 2)]
        assert abs(1 - np.mean(kept) - p) < 0.02 * p + 0.001
    starts = engine.put(np.int32([0, 50, 100]))
    lengths = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": 50, "max_seqlen_kv": 50}
    for x, options in ((q[:, :2, :50], {}), (q[:, :2, :100, 0], lengths)):
        kept = dropout_mask(engine.xp.asfortranarray(x), engine.xp.asfortranarray(x), dropout_p=0, seed=1, **options)
        assert (kept.shape, kept.dtype) == ((50, 50, 2, 2), bool)
        assert kept.all()


def test_seeds_and_offsets_determine_the_mask(engine):
    """Equal ones give the same mask, others another, as do heads and batch items; integers and arrays alike."""
    q = engine.xp.ones((64, 2, 128, 2), np.float16, order="F")
    kept = dropout_mask(q, q, dropout_p=0.5, seed=3)
    for same in ({"offset": 0}, {"seed": engine.put(np.array([3])), "offset": engine.put(np.array(0))}):
        assert (kept == dropout_mask(q, q, dropout_p=0.5, **{"seed": 3, **same})).all()
    others = [dropout_mask(q, q, dropout_p=0.5, **{"seed": 3, **other}) for other in ({"seed": 4}, {"offset": 4}, {"seed": -3})]
    parts = [kept[:, :, head, entry] for head in range(2) for entry in range(2)]
    pairs = [(kept, other) for other in others] + [(one, other) for n, one in enumerate(parts) for other in parts[:n]]
    assert all(0.45 < float((one == other).mean()) < 0.55 for one, other in pairs)


def test_the_call_drops_the_weights_of_the_mask(engine):
    """With unit vectors as values the output is the weights: they are 0 where the mask is."""
    s, p = 64, 0.25
    q = engine.xp.zeros((64, 2, s, 1), np.float16, order="F")
    v = engine.put(np.asfortranarray(np.broadcast_to(np.eye(s, dtype=np.float16)[:, None, :, None], (s, 2, s, 1))))
    out = engine.get(attention(q, q, v, dropout_p=p, seed=11))[..., 0]  # (key, head, query)
    kept = engine.get(dropout_mask(q, q, dropout_p=p, seed=11))[..., 0]
    np.testing.assert_allclose(out.astype("f4"), kept.transpose(0, 2, 1) / (s * (1 - p)), rtol=2e-3)


def test_a_dropout_mask_replaces_the_seed(engine):
    """A given mask gives the same bits, forward and backward; cuDNN generates the mask itself, and accepts no other."""
    q, k, v, dout = (engine.normal(n, 64, 2, 60, 2) for n in range(4))
    drawn = {"dropout_p": 0.3, "seed": 5, "offset": 2}
    given = {"dropout_p": 0.3, "dropout_mask": engine.xp.asfortranarray(dropout_mask(q, k, **drawn))}
    if engine.on_cudnn:
        with pytest.raises(Unsupported, match="pass seed and offset"):
            attention(q, k, v, **given)
        return
    results = []
    for options in (drawn, given):
        out, pullback = attention_vjp(q, k, v, **options)
        results.append((out, *pullback(dout)))
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("mask", [0.0, -1e9, "min", -np.inf])
def test_a_bias_masks_by_its_own_value(mask, dtype, engine):
    """Scores of -2e6 next to the score 0 of a key that a bias masks: its weight is 0 in both passes; zeros mask nothing."""
    q, k, v = low_scores(engine, other=0.0)
    bias = np.zeros((20, 20, 1, 1), dtype, order="F")
    bias[-1] = float(ml_dtypes.finfo(dtype).min) if mask == "min" else mask
    out, pullback = attention_vjp(q, k, v, scale=1.0, bias=engine.put(bias))
    exact = [engine.get(x).astype(np.float64) for x in (q, k, v)]
    visible = np.ones((20, 1, 1, 1), bool)
    visible[-1] = mask == 0
    want, own = attention_vjp(*exact, scale=1.0, mask=visible)
    np.testing.assert_allclose(engine.get(out), want, atol=2 * engine.tolerance)
    close(engine, pullback(v)[2:], own(exact[2])[2:])
