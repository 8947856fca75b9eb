"""What the options mean: diagonals and windows, lengths, packed sequences, masks and biases, sinks, slopes and dropout."""

import numpy as np
import pytest

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
    """Whatever the stride of the array of one length; the problem describes its mask."""
    q = np.zeros((64, 4, 16, 1), np.float32, order="F")
    for array in (np.array([3], np.int32), np.array([3, 4, 5], np.int32)[::2][:1]):
        assert explain(q, q, q, seq_lens_q=array).problem.seq_lens_q.strides == (4,)
    text = str(explain(q, q, q, seq_lens_kv=np.int32([2]), window=(5, None, "bottom_right")).problem)
    assert "at most 16 queries, at most 16 keys" in text
    assert "window of 5 keys before and all after the diagonal from the bottom right" in text
    slopes = {"alibi_slopes": alibi_slopes(4), "window": (None, None, "bottom_right")}
    assert "diagonal from the bottom right" in str(explain(q, q[:, :, :9], q[:, :, :9], **slopes).problem)


@pytest.mark.parametrize("what", [np.inf, -np.inf, 1e4], ids=str)
@pytest.mark.parametrize("kind", ["lengths", "packed"])
def test_the_padding_is_not_read(kind, what, engine):
    """Infinities and huge numbers in the padding change no bit; results there are 0, and -inf for the log-sum-exp."""
    lengths = np.int32([[40, 17, 0], [9, 48, 20]])
    if kind == "lengths":
        options = {"seq_lens_q": lengths[0], "seq_lens_kv": lengths[1]}
        shapes, padding = (
            ((16, 4, 40, 3), (16, 2, 48, 3)),
            [np.arange(n)[:, None] >= m for n, m in zip((40, 48), lengths, strict=True)],
        )
    else:
        starts = np.concatenate([[[3], [3]], 3 + np.cumsum(lengths, axis=1)], axis=1).astype("i4")
        options = {"cu_seqlens_q": starts[0], "cu_seqlens_kv": starts[1], "max_seqlen_q": 40, "max_seqlen_kv": 48}
        shapes = (16, 4, 70), (16, 2, 90)
        padding = [(np.arange(s[2]) < 3) | (np.arange(s[2]) >= of[-1]) for s, of in zip(shapes, starts, strict=True)]
    sides = {"q": 0, "k": 1, "v": 1, "dout": 0}
    results = []
    for value in (0, what):
        made = {
            name: engine.get(engine.normal(n, *shapes[side])).copy(order="F") for n, (name, side) in enumerate(sides.items())
        }
        for name, x in made.items():
            x[:, :, padding[sides[name]]] = value
        given, there = engine.put(made), engine.put(options)
        of_q = {name: given[name] for name in "qkv"}
        out, stats = attention(**of_q, causal="bottom_right", return_stats=True, **there)
        options_of_both = {"causal": "bottom_right", "deterministic": True, **there}
        gradients = attention_backward(given["dout"], **of_q, out=out, stats=stats, **options_of_both)
        results.append(engine.get((out, stats, *gradients)))
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)
    out, stats, dq, dk, dv = results[1]
    assert not any(x[:, :, padding[side]].any() for x, side in ((out, 0), (dq, 0), (dk, 1), (dv, 1)))
    assert ((stats if kind == "packed" else stats.swapaxes(0, 1))[:, padding[0]] == -np.inf).all()
    assert all(np.isfinite(x).all() for x in (out, dq, dk, dv))


def test_packed_sequences_are_independent(engine):
    """Each gives the results of the sequence alone, also without keys, and in the gradients; offsets may be strided int64."""
    starts = {"q": np.array([0, 100, 100, 137, 265]), "kv": np.array([0, 64, 84, 84, 234])}
    q, dout, k, v = (engine.normal(n, 64, heads, total) for n, (heads, total) in enumerate([(4, 265)] * 2 + [(2, 234)] * 2))
    wide = {f"cu_seqlens_{side}": engine.put(np.repeat(of, 2))[::2] for side, of in starts.items()}
    options = {**wide, "max_seqlen_q": 128, "max_seqlen_kv": 150, "causal": "bottom_right"}
    out, stats = attention(q, k, v, return_stats=True, **options)
    gradients = attention_backward(dout, q, k, v, out, stats, **options)
    for n in range(4):
        of_q, of_kv = (slice(of[n], of[n + 1]) for of in starts.values())
        one = [
            engine.xp.asfortranarray(x[:, :, part][..., None]) for x, part in ((q, of_q), (k, of_kv), (v, of_kv), (dout, of_q))
        ]
        alone = attention(*one[:3], causal="bottom_right", return_stats=True)
        wanted = alone[0], alone[1].transpose(1, 0, 2), *attention_backward(one[3], *one[:3], *alone, causal="bottom_right")
        got = out[:, :, of_q], stats[:, of_q], *(x[:, :, of] for x, of in zip(gradients, (of_q, of_kv, of_kv), strict=True))
        for a, b in zip(engine.get(got), engine.get(wanted), strict=True):
            np.testing.assert_allclose(a.astype("f4"), b[..., 0].astype("f4"), atol=4 * engine.tolerance, rtol=engine.tolerance)


def test_a_bias_of_minus_infinity_is_a_mask(engine):
    """Of the same rows: output 0, log-sum-exp -inf, gradients 0, no NaN; and a mask of keys is that of lengths."""
    q, k, v, dout = (engine.normal(n, 64, 4, length, 2) for n, length in enumerate((70, 90, 90, 70)))
    seen = np.ones((90, 70, 1, 1), bool, order="F")
    seen[:, 3:7] = False
    results = []
    for options in (
        {"mask": engine.put(seen)},
        {"bias": engine.put(np.where(seen, 0, -np.inf).astype(engine.dtype, order="F"))},
    ):
        out, stats = attention(q, k, v, return_stats=True, **options)
        found = engine.get((out, stats, *attention_backward(dout, q, k, v, out, stats, **options)))
        assert not found[0][:, :, 3:7].any()
        assert (found[1][3:7] == -np.inf).all()
        assert not found[2][:, :, 3:7].any()
        results.append(found)
    lengths = np.int32([50, 90])
    of_keys = engine.put(np.asfortranarray((np.arange(90)[:, None] < lengths)[:, None, None]))
    results.append(engine.get((attention(q, k, v, mask=of_keys),)))
    results.append(engine.get((attention(q, k, v, seq_lens_kv=engine.put(lengths)),)))
    for pair in (results[:2], results[2:]):
        for a, b in zip(*pair, strict=True):
            np.testing.assert_allclose(a.astype("f4"), b.astype("f4"), atol=2 * engine.tolerance)


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
    np.testing.assert_array_equal(np.isnan(stats), there)
    for result in (out.astype(np.float32), dq):
        np.testing.assert_array_equal(np.isnan(result), np.broadcast_to(there.transpose(1, 0, 2), result.shape))
    clean = np.where(np.isnan(bias), np.float32(0), bias)
    wanted = engine.get(attention(q, k, v, seq_lens_kv=lengths, **scores(np.asfortranarray(clean)), **options))
    rows = ~np.isnan(out.astype(np.float32))
    np.testing.assert_array_equal(out[rows], wanted[rows])


def test_the_gradient_of_a_bias_has_its_shape_and_dtype(engine):
    """It is summed over the broadcast axes; a bias that is constant along the keys has a gradient near 0."""
    q, k, v, dout = (engine.normal(n, 64, 4, length, 2) for n, length in enumerate((70, 90, 90, 70)))
    for shape in ((90, 70, 4, 2), (90, 70, 1, 1), (90, 1, 1, 2), (1, 1, 4, 1)):
        bias = engine.xp.zeros(shape, np.float32, order="F")
        dbias = attention_vjp(q, k, v, bias=bias, return_dbias=True)[1](dout)[3]
        assert (dbias.shape, dbias.dtype) == (bias.shape, bias.dtype)
        assert (abs(engine.get(dbias)).max() < 0.5) == (shape[:2] == (1, 1))


def test_sinks_take_weight_and_have_no_value(engine):
    """A sink of -inf has no effect; one far above all scores gives an output near 0."""
    q, k, v = (engine.normal(n, 64, 4, 128, 2) for n in range(3))
    plain, stats = engine.get(attention(q, k, v, return_stats=True))
    sinks = engine.put(np.float32([-np.inf, -100, 100, 100]))
    out, sunk = engine.get(attention(q, k, v, sinks=sinks, return_stats=True))
    np.testing.assert_allclose(out[:, :2].astype("f4"), plain[:, :2].astype("f4"), atol=engine.tolerance)
    np.testing.assert_allclose(sunk[:, :2], stats[:, :2], rtol=1e-5)
    assert abs(out[:, 2:].astype("f4")).max() < 1e-3
    np.testing.assert_allclose(sunk[:, 2:], 100, rtol=1e-5)


@pytest.mark.parametrize("kind", ["dense", "lengths", "packed"])
def test_a_row_without_keys_attends_to_its_sink(kind, engine):
    """Without any key the log-sum-exp is the score of the sink, the padding is 0 and -inf, and gradients are 0."""
    sinks = engine.put(np.float32([0.5, 7, -2])[::2])
    (rows, there), keys = {
        "dense": ((5, 2), np.ones((5, 1, 2))), "lengths": ((5, 2), np.arange(5)[:, None, None] < [3, 5]),
        "packed": ((14,), np.isin(np.arange(14), [2, 3, 4, 7, 8, 9])),
    }[kind], (0, 2) if kind != "packed" else (0,)  # fmt: skip
    q, k = (engine.xp.ones((8, 2, *n), engine.dtype, order="F") for n in (rows, keys))
    options = {"sinks": sinks}
    if kind == "packed":  # with an empty sequence, positions beyond the maximum length on the GPU, and before and after all
        starts = np.int32([2, 2, 7, 11] if engine.on_cudnn else [2, 2, 5, 5, 7])
        there = there if engine.on_cudnn else np.isin(np.arange(14), range(2, 7))
        options |= {"cu_seqlens_q": engine.put(starts), "cu_seqlens_kv": engine.put(starts * 0)}
        options |= {"max_seqlen_q": 3, "max_seqlen_kv": 1}
    elif kind == "lengths":
        options["seq_lens_q"] = engine.put(np.int32([3, 5]))
    out, stats, top, total = engine.get(attention(q, k, k, return_stats="max_sumexp", **options))
    assert not out.any()
    for got, alone, nothing in ((stats, [[0.5], [-2]], -np.inf), (top, [[0.5], [-2]], -np.inf), (total, 1, 0)):
        np.testing.assert_array_equal(got, np.broadcast_to(np.where(there, alone, nothing), got.shape))
    result, pullback = attention_vjp(q, k, k, **options)
    assert not any(x.any() for x in engine.get(pullback(engine.xp.ones(result.shape, result.dtype, order="F"))))


def test_alibi_slopes_match_the_paper():
    """For 8 heads those of section 3; for other numbers those of its code."""
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
    """Equal ones give the same mask, others another, as do heads and batch entries; integers and arrays alike."""
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
    """A given mask gives the same bits, forward and backward; cuDNN generates the mask itself, and refuses another."""
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


@pytest.mark.parametrize("engine", ["fake", pytest.param("cupy", marks=pytest.mark.gpu)], indirect=True)
def test_a_captured_graph_reads_seed_and_offset(engine):
    """With arrays that change between launches, the dropped weights change."""
    cupy = engine.xp
    q, k, v = (engine.normal(n, 64, 2, 40, 1) for n in range(3))
    seed, offset, out = engine.put(np.array([7])), engine.put(np.array([0])), cupy.empty_like(q)
    options = {"dropout_p": 0.5, "seed": seed, "offset": offset, "out": out}
    attention(q, k, v, **options)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        attention(q, k, v, **options)
        stream.begin_capture()
        attention(q, k, v, **options)
        graph = stream.end_capture()
        for number in (0, 8):
            offset.fill(number)
            graph.launch(stream)
            stream.synchronize()
            found = engine.get(out)
            wanted = attention(q, k, v, dropout_p=0.5, seed=7, offset=number)
            np.testing.assert_array_equal(found, engine.get(wanted))
        del graph
    engine.forget_plans()
