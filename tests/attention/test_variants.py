"""Packed sequences, biases, masks, ALiBi slopes, softcap, sinks and dropout: definitions, errors, behavior."""

from dataclasses import replace

import numpy as np
import pytest
from cases import Case, as_float, inputs

import cupy_sdpa
from cupy_sdpa import Unsupported, alibi_slopes, attention, attention_backward, attention_vjp, dropout_mask, explain, reference
from cupy_sdpa.support.why_not import unverified_rules, why_not

ENGINES = ["numpy", pytest.param("cupy", marks=pytest.mark.gpu)]


@pytest.fixture(params=ENGINES)
def xp(request):
    """numpy, and CuPy if there is a GPU."""
    return np if request.param == "numpy" else pytest.importorskip("cupy")


PACKED = Case(
    "packed", packed=True, seq_lens_q=(100, 0, 37, 128), seq_lens_kv=(64, 20, 0, 150), b=4, hq=4, hkv=2, causal="bottom_right"
)


def test_packed_sequences_are_independent(xp):
    """Each gives the results of the sequence alone, also without keys, and in the gradients."""
    q, k, v, dout = inputs(xp, PACKED)
    options = PACKED.options(xp)
    out, stats = attention(q, k, v, return_stats=True, **options)
    gradients = attention_backward(dout, q, k, v, out, stats, deterministic=True, **options)
    starts_q, starts_kv = (np.cumsum([0, *lengths]) for lengths in (PACKED.seq_lens_q, PACKED.seq_lens_kv))
    for b in range(4):
        of_q, of_kv = (slice(starts[b], starts[b + 1]) for starts in (starts_q, starts_kv))
        one = [xp.asfortranarray(x[:, :, part][..., None]) for x, part in ((q, of_q), (k, of_kv), (v, of_kv), (dout, of_q))]
        alone, alone_stats = attention(*one[:3], causal="bottom_right", return_stats=True)
        np.testing.assert_allclose(as_float(out[:, :, of_q]), as_float(alone[..., 0]), atol=1e-2)
        np.testing.assert_allclose(as_float(stats[:, of_q]), as_float(alone_stats[..., 0]).T, rtol=1e-5)
        wanted = attention_backward(one[3], *one[:3], alone, alone_stats, causal="bottom_right")
        for got, want, part in zip(gradients, wanted, (of_q, of_kv, of_kv), strict=True):
            np.testing.assert_allclose(as_float(got[:, :, part]), as_float(want[..., 0]), atol=5e-2)


@pytest.mark.parametrize("kind", ["int32", "int64"])
def test_cu_seqlens_of_any_dtype_and_stride(kind, xp):
    """int32 and int64, strided too."""
    q, k, v, _ = inputs(xp, PACKED)
    options = PACKED.options(xp)
    plain = attention(q, k, v, **options)
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):
        wide = xp.zeros(2 * options[name].size, kind)
        wide[::2] = options[name]
        options[name] = wide[::2]
    assert (attention(q, k, v, **options) == plain).all()


def test_packed_arrays_may_be_interleaved(xp):
    """q, k and v as a fused projection returns them, with a common stride between positions."""
    case = Case("interleaved", packed=True, seq_lens_q=(60, 33), seq_lens_kv=(60, 33), b=2, hkv=4)
    q, k, v, dout = inputs(xp, case)
    options = case.options(xp)
    three = xp.zeros((64, 4, 3, 93), q.dtype, order="F")
    for n, x in enumerate((q, k, v)):
        three[:, :, n] = x
    apart = [three[:, :, n] for n in range(3)]
    out, stats = attention(q, k, v, return_stats=True, **options)
    assert (attention(*apart, **options) == out).all()
    wanted = attention_backward(dout, q, k, v, out, stats, deterministic=True, **options)
    for a, b in zip(attention_backward(dout, *apart, out, stats, deterministic=True, **options), wanted, strict=True):
        assert (a == b).all()


@pytest.mark.parametrize("causal", [False, True], ids=str)
@pytest.mark.parametrize("what", [np.nan, np.inf], ids=str)
def test_positions_after_the_last_sequence_are_not_read(what, causal, xp):
    """Their results are 0, and -inf for the log-sum-exp."""
    case = Case("tail", packed=True, seq_lens_q=(100, 37), seq_lens_kv=(64, 90), b=2, hkv=2, tail=40, causal=causal)
    q, k, v, dout = inputs(xp, case)
    options = case.options(xp)
    results = []
    for filled in (0, what):
        for x, end in ((q, 137), (k, 154), (v, 154), (dout, 137)):
            x[:, :, end:] = filled
        out, stats = attention(q, k, v, return_stats=True, **options)
        results.append((out, stats, *attention_backward(dout, q, k, v, out, stats, deterministic=True, **options)))
    for a, b in zip(*results, strict=True):
        assert (a == b).all()
    out, stats, dq, dk, dv = results[1]
    assert not any(x[:, :, end:].any() for x, end in ((out, 137), (dq, 137), (dk, 154), (dv, 154)))
    assert (stats[:, 137:] == -np.inf).all()


def test_rows_masked_by_a_bias_of_minus_infinity(xp):
    """As with a mask: output 0, log-sum-exp -inf, gradients 0, no NaN."""
    case = Case("hidden", sq=70, skv=90)
    q, k, v, dout = inputs(xp, case)
    seen = xp.ones((90, 70, 1, 1), bool, order="F")
    seen[:, 3:7] = False
    bias = xp.asfortranarray(xp.where(seen, 0, -np.inf).astype(q.dtype))
    by_mask, by_bias = ({"mask": seen}, {"bias": bias})
    results = []
    for options in (by_mask, by_bias):
        out, stats = attention(q, k, v, return_stats=True, **options)
        results.append((out, stats, *attention_backward(dout, q, k, v, out, stats, **options)))
        assert not out[:, :, 3:7].any()
        assert (stats[3:7] == -np.inf).all()
        assert not results[-1][2][:, :, 3:7].any()
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(as_float(a), as_float(b), atol=2e-2)


def test_a_key_padding_mask_matches_lengths(xp):
    """A mask of shape (Skv, 1, 1, B) equals lengths, and needs twice its number of elements in bytes."""
    case = Case("of_keys", sq=70, skv=90)
    q, k, v, _ = inputs(xp, case)
    lengths = np.array([50, 90], np.int32)
    mask = xp.asarray(np.asfortranarray((np.arange(90)[:, None] < lengths)[:, None, None]))
    a, b = attention(q, k, v, mask=mask), attention(q, k, v, seq_lens_kv=xp.asarray(lengths))
    np.testing.assert_allclose(as_float(a), as_float(b), atol=1e-2)


def test_the_gradient_of_a_bias_has_its_shape_and_dtype(xp):
    """It is summed over the broadcast axes; a bias that is constant along the keys has a gradient near 0."""
    case = Case("gradient_of_bias", sq=70, skv=90)
    q, k, v, dout = inputs(xp, case)
    for shape in ((90, 70, 4, 2), (90, 70, 1, 1), (90, 1, 1, 2), (1, 1, 4, 1)):
        bias = xp.zeros(shape, np.float32, order="F")
        _, pullback = attention_vjp(q, k, v, bias=bias, return_dbias=True)
        dbias = pullback(dout)[3]
        assert (dbias.shape, dbias.dtype) == (bias.shape, bias.dtype)
        assert (abs(as_float(dbias)).max() < 0.5) == (shape[:2] == (1, 1))


def test_sinks_take_weight_and_have_no_value(xp):
    """A sink of -inf has no effect; one far above all scores gives an output near 0."""
    case = Case("sinks")
    q, k, v, _ = inputs(xp, case)
    plain, stats = attention(q, k, v, return_stats=True)
    sinks = xp.asarray(np.array([-np.inf, -100, 100, 100], np.float32))
    out, sunk = attention(q, k, v, sinks=sinks, return_stats=True)
    np.testing.assert_allclose(as_float(out[:, :2]), as_float(plain[:, :2]), atol=1e-2)
    np.testing.assert_allclose(as_float(sunk[:, :2]), as_float(stats[:, :2]), rtol=1e-5)
    assert abs(as_float(out[:, 2:])).max() < 1e-3
    np.testing.assert_allclose(as_float(sunk[:, 2:]), 100, rtol=1e-5)


def test_caps_and_scales_share_a_plan():
    """The values of softcap and scale are by-value scalars; only the presence of a softcap is part of the plan."""
    q = np.zeros((8, 2, 16, 1), np.float32, order="F")
    one, other, none = (explain(q, q, q, softcap=cap).problem for cap in (2.0, 30.0, None))
    assert one is other
    assert one != none


def test_totals_share_a_plan():
    """Neither the total length of packed sequences nor their offsets are part of the plan."""
    problems = []
    for total in (1000, 1010, 1024):
        x = (64, 4, total)
        starts = {"cu_seqlens_q": (5,), "cu_seqlens_kv": (5,), "max_seqlen_q": 300, "max_seqlen_kv": 300}
        problems.append(cupy_sdpa.problem(x, x, x, dtype="bfloat16", backward=True, **starts))
    assert problems[0] == problems[1] == problems[2]


class TestDropout:
    """The dropped weights depend only on seed and offset, and are the same in the backward pass."""

    def test_the_share_of_dropped_weights(self, xp):
        """The probability is not rounded."""
        q = xp.ones((64, 4, 512, 2), np.float16, order="F")
        for p in (0.01, 0.1, 0.3, 0.5, 0.9):
            kept = [dropout_mask(q, q, dropout_p=p, seed=seed) for seed in range(8)]
            dropped = 1 - np.mean([float(mask.mean()) for mask in kept])
            assert abs(dropped - p) < 0.02 * p

    def test_seeds_and_offsets_determine_the_mask(self, xp):
        """Equal ones give the same mask, others another; integers and arrays alike."""
        q = xp.ones((64, 2, 128, 2), np.float16, order="F")
        kept = dropout_mask(q, q, dropout_p=0.5, seed=3)
        assert (kept == dropout_mask(q, q, dropout_p=0.5, seed=3, offset=0)).all()
        assert (kept == dropout_mask(q, q, dropout_p=0.5, seed=xp.array([3]), offset=xp.array(0))).all()
        for other in ({"seed": 4}, {"seed": 3, "offset": 4}, {"seed": -3}):
            same = float((kept == dropout_mask(q, q, dropout_p=0.5, **other)).mean())
            assert 0.45 < same < 0.55

    def test_the_same_weights_are_dropped_by_the_call(self, xp):
        """With unit vectors as values the output is the weights: they are 0 where the mask is."""
        s, p = 64, 0.25
        q = xp.zeros((64, 2, s, 1), np.float16, order="F")
        v = xp.asfortranarray(xp.broadcast_to(xp.eye(s, dtype=np.float16)[:, None, :, None], (s, 2, s, 1)))
        out = attention(q, q, v, dropout_p=p, seed=11)  # (key, head, query, 1)
        kept = dropout_mask(q, q, dropout_p=p, seed=11)
        np.testing.assert_allclose(as_float(out[..., 0]), as_float(kept[..., 0].transpose(0, 2, 1)) / (s * (1 - p)), rtol=2e-3)

    def test_dropout_mask_replaces_the_seed(self):
        """On the CPU a given mask gives the same bits, forward and backward."""
        case = Case("given_back", sq=60, skv=70).with_dtype("float32")
        q, k, v = case.arrays()
        drawn = {"dropout_p": 0.3, "seed": 5, "offset": 2}
        given = {"dropout_p": 0.3, "dropout_mask": dropout_mask(q, k, **drawn)}
        results = []
        for options in (drawn, given):
            out, stats = attention(q, k, v, return_stats=True, **options)
            results.append((out, stats, *attention_backward(case.dout(), q, k, v, out, stats, **options)))
        for a, b in zip(*results, strict=True):
            np.testing.assert_array_equal(a, b)

    def test_dropout_does_not_depend_on_tiles(self, monkeypatch):
        """A tile of the CPU engine uses the mask of the whole."""
        q = np.ones((8, 2, 50, 2), np.float32, order="F")
        whole = attention(q, q, q, dropout_p=0.5, seed=1)
        monkeypatch.setattr("cupy_sdpa.graph.tiles.TILE_ELEMENTS", 150)
        np.testing.assert_array_equal(attention(q, q, q, dropout_p=0.5, seed=1), whole)


@pytest.mark.gpu
def test_a_captured_graph_reads_seed_and_offset(cupy):
    """With arrays that change between replays, the masks change, and the result matches the reference."""
    case = Case("captured")
    q, k, v, _ = inputs(cupy, case)
    seed, offset = cupy.array([7]), cupy.array([0])
    out = cupy.empty_like(q)
    attention(q, k, v, dropout_p=0.5, seed=seed, offset=offset, out=out)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        attention(q, k, v, dropout_p=0.5, seed=seed, offset=offset, out=out)
        graph = stream.end_capture()
    for number in (0, 8):
        offset.fill(number)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert (out == attention(q, k, v, dropout_p=0.5, seed=7, offset=number)).all()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        PACKED,
        replace(PACKED, name="packed_slopes", alibi=True),
        Case("mask_and_bias", mask="kb", bias="hb", sq=70),
        Case("dropout", dropout=0.25),
    ],
    ids=str,
)
def test_staging_is_captured(case, cupy):
    """Offsets, lengths, copies and sums are part of the graph: a replay with other contents equals a call."""
    q, k, v, dout = inputs(cupy, case)
    options = case.options(cupy)
    more = {"deterministic": True}

    def call():
        out, stats = attention(q, k, v, return_stats=True, **options)
        return out, stats, *attention_backward(dout, q, k, v, out, stats, **options, **more)

    call()
    cupy.cuda.Device().synchronize()  # the arrays were created on another stream
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        held = [cupy.empty_like(x) for x in call()]
        stream.synchronize()
        stream.begin_capture()
        out, stats = attention(q, k, v, out=held[0], stats=held[1], **options)
        attention_backward(dout, q, k, v, out, stats, dq=held[2], dk=held[3], dv=held[4], **options, **more)
        graph = stream.end_capture()
    for x in (q, k, v, dout):
        x[...] = x[:, ::-1].copy()
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    for a, b in zip(held, call(), strict=False):
        np.testing.assert_allclose(as_float(a), as_float(b), atol=1e-2, rtol=1e-2)


BAD = {
    "unknown": ({"casual": True}, TypeError, "no option casual; did you mean causal"),
    "softcap": ({"softcap": 0}, ValueError, "softcap is 0; it must be above 0"),
    "softcap_array": ({"softcap": np.ones(1)}, TypeError, "softcap is a ndarray"),
    "bias_shape": ({"bias": np.zeros((4, 3, 1, 1), np.float32)}, ValueError, r"bias has shape \(4, 3, 1, 1\).*keys first"),
    "bias_rank": ({"bias": np.zeros((4, 4), np.float32)}, ValueError, r"bias has shape \(4, 4\)"),
    "bias_dtype": ({"bias": np.zeros((4, 4, 1, 1), int)}, TypeError, "bias is int64; it must be float16"),
    "mask_dtype": ({"mask": np.zeros((4, 4, 1, 1), np.float32)}, TypeError, "mask is float32; it must be bool"),
    "slopes": ({"alibi_slopes": np.zeros(3, np.float32)}, ValueError, r"alibi_slopes has shape \(3,\); it must be \(1,\)"),
    "sinks": ({"sinks": np.zeros(1)}, TypeError, "sinks is float64; it must be float32"),
    "dropout_one": ({"dropout_p": 1.0, "seed": 0}, ValueError, "dropout_p is 1.0; it must be at least 0 and below 1"),
    "dropout_seed": ({"dropout_p": 0.5}, ValueError, "seed is None: pass a seed"),
    "dropout_mask": ({"dropout_mask": np.ones((4, 4, 1, 2), bool)}, ValueError, "dropout_p is 0"),
    "dropout_both": (
        {"dropout_p": 0.5, "seed": 1, "dropout_mask": np.ones((4, 4, 1, 2), bool)}, ValueError, "pass one of them",
    ),
    "dropout_mask_shape": (
        {"dropout_p": 0.5, "dropout_mask": np.ones((4, 4, 1, 1), bool)}, ValueError, r"dropout_mask has shape .* \(4, 4, 1, 2\)",
    ),
    "seed_large": ({"dropout_p": 0.5, "seed": 2**63}, ValueError, "64-bit integer"),
    "seed_float": ({"dropout_p": 0.5, "seed": 1.5}, TypeError, "seed is 1.5; it must be an integer, or an int64 array of one element"),
    "longest_alone": ({"max_seqlen_q": 4}, ValueError, "cu_seqlens_q is None"),
    "packed_rank": (
        {"cu_seqlens_q": np.array([0, 4]), "cu_seqlens_kv": np.array([0, 4])}, ValueError, r"it needs 3: \(head_dim, heads, total\)",
    ),
    "return_stats": ({"return_stats": "all"}, ValueError, "return_stats is 'all'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_options_raise(name):
    """The message contains the value and the valid ones."""
    options, error, words = BAD[name]
    x = np.zeros((8, 1, 4, 2), np.float32)
    with pytest.raises(error, match=words):
        attention(x, x, x, **options)


STARTS = {"cu_seqlens_q": np.array([0, 4, 10]), "cu_seqlens_kv": np.array([0, 4, 10]), "max_seqlen_q": 6, "max_seqlen_kv": 6}
BAD_PACKED = {
    "one_side": ({"cu_seqlens_kv": None}, ValueError, "cu_seqlens_kv is None"),
    "no_longest": ({"max_seqlen_kv": None}, ValueError, "max_seqlen_kv is None"),
    "dtype": ({"cu_seqlens_q": np.array([0.0, 4, 10])}, TypeError, "cu_seqlens_q is float64"),
    "sizes": ({"cu_seqlens_q": np.array([0, 10])}, ValueError, r"both must be \(B \+ 1,\)"),
    "falling": ({"cu_seqlens_q": np.array([0, 7, 5])}, ValueError, "offsets must rise"),
    "beyond": ({"cu_seqlens_q": np.array([0, 7, 11])}, ValueError, "at most 10, the total"),
    "longest": ({"max_seqlen_q": 5}, ValueError, "cu_seqlens_q has a sequence of 6; max_seqlen_q is 5"),
    "lengths": (
        {"seq_lens_q": np.array([1, 2], np.int32)},
        ValueError,
        r"cu_seqlens_\* define the lengths of packed sequences",
    ),
    "bucket_of_bias": ({"bias": np.zeros((6, 6, 1, 1), np.float32), "bucket": 8}, ValueError, "round max_seqlen_q"),
}


@pytest.mark.parametrize("name", BAD_PACKED)
def test_bad_packed_sequences_raise(name):
    """The message contains the value and the valid ones."""
    options, error, words = BAD_PACKED[name]
    x = np.zeros((8, 1, 10), np.float32)
    with pytest.raises(error, match=words):
        attention(x, x, x, **{**STARTS, **options})


def test_gradients_of_missing_arrays_raise():
    """return_dbias without a bias, return_dsinks without sinks."""
    x = np.zeros((8, 1, 4, 1), np.float32, order="F")
    out, stats = attention(x, x, x, return_stats=True)
    for name in ("dbias", "dsinks"):
        with pytest.raises(ValueError, match=f"return_{name} is True and {name[1:]} is None"):
            attention_backward(x, x, x, x, out, stats, **{f"return_{name}": True})


def test_help_shows_every_option():
    """The signatures contain them with their defaults."""
    import inspect

    for call in (attention, attention_backward, attention_vjp, explain, cupy_sdpa.prepare, cupy_sdpa.problem):
        parameters = inspect.signature(call).parameters
        assert {"bias", "softcap", "window", "cu_seqlens_q", "bucket"} <= set(parameters)
        assert parameters["dropout_p"].default == 0.0
        assert parameters["causal"].default is False
        for name in parameters:
            assert name in call.__doc__ or call.__name__ != "attention"


def test_alibi_slopes_match_the_paper():
    """For 8 heads those of section 3; for other numbers those of its code; in general positive and decreasing."""
    assert alibi_slopes(16)[:2].tolist() == pytest.approx([2**-0.5, 2**-1])
    assert alibi_slopes(12).tolist()[8:] == pytest.approx([2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5])
    with pytest.raises(ValueError, match="heads is 0"):
        alibi_slopes(0)


def test_unsupported_variants_are_refused():
    """With the name of the rule and the remedy."""
    shape = (64, 8, 100, 2)
    for options, version, capability, rule in (
        ({"bias": np.zeros((100, 100, 1, 1), order="F")}, 91900, 90, "bias-dtype"),
        ({"dropout_p": 0.5, "dropout_mask": (100, 100, 8, 2)}, 91900, 90, "dropout-mask"),
        ({"return_stats": "max_sumexp", "sinks": True}, 92800, 90, "max-sumexp"),
        ({"return_stats": "max_sumexp", "seq_lens": True}, 91900, 90, "max-sumexp"),
        ({"sinks": True, "return_dsinks": True, "deterministic": True, "backward": True}, 92800, 90, "deterministic-sinks"),
    ):
        asked = cupy_sdpa.problem(shape, shape, shape, dtype="bfloat16", **options)
        assert {reason.rule for reason in why_not(asked, version, capability)} == {rule}
    packed = {"cu_seqlens_q": (3,), "cu_seqlens_kv": (3,), "max_seqlen_q": 60, "max_seqlen_kv": 60}
    asked = cupy_sdpa.problem((64, 8, 100), (64, 8, 100), (64, 8, 100), dtype="bfloat16", backward=True, **packed)
    assert not why_not(asked, 92800, 80)
    assert [name for name, _ in unverified_rules(asked, 92800, 80)] == ["packed-gradients"]
    assert not unverified_rules(asked, 92800, 90)


@pytest.mark.gpu
def test_a_dropout_mask_is_refused_on_the_gpu(cupy):
    """cuDNN generates the mask itself."""
    q = cupy.zeros((64, 2, 32, 1), np.float16, order="F")
    with pytest.raises(Unsupported, match="pass seed and offset"):
        attention(q, q, q, dropout_p=0.5, dropout_mask=cupy.ones((32, 32, 2, 1), bool, order="F"))


def test_all_options_match_the_reference():
    """The reference and the engine agree with all options at once, in float64."""
    case = Case(
        "everything", sq=50, skv=60, hkv=2, softcap=2.0, alibi=True, bias="kqhb", mask="kq", sinks=True, dropout=0.25,
        window=(30, 10, "bottom_right"), seq_lens_q=(40, 50), seq_lens_kv=(60, 33), dtype="float64",
    )  # fmt: skip
    options = case.options(dropout_mask=case.kept())
    arrays = case.arrays()
    out, stats = attention(*arrays, return_stats=True, **options)
    truth, truth_stats = reference.attention(*arrays, **options)
    np.testing.assert_allclose(out, truth, atol=1e-12)
    np.testing.assert_allclose(stats, truth_stats, rtol=1e-6)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_everything_is_kept_without_dropout(packed, xp):
    """A probability of 0 drops nothing."""
    x = xp.zeros((8, 2, 100) if packed else (8, 2, 50, 2), "f2", order="F")
    starts = xp.asarray(np.array([0, 50, 100], "i4"))
    lengths = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": 50, "max_seqlen_kv": 50} if packed else {}
    kept = cupy_sdpa.dropout_mask(x, x, dropout_p=0, seed=1, **lengths)
    assert kept.shape == (50, 50, 2, 2)
    assert kept.dtype == bool
    assert kept.all()


@pytest.mark.parametrize("kind", ["dense", "lengths", "packed"])
def test_a_row_without_keys_attends_to_its_sink(kind, xp):
    """Without any key the log-sum-exp is the score of the sink, and the padding is 0 and -inf."""
    dtype, sinks = np.float32 if xp is np else np.float16, xp.asarray(np.array([0.5, -2], "f4"))
    rows, keys = ((2, 5), (2, 0)) if kind == "packed" else ((2, 5, 2), (2, 0, 2))
    q, k = xp.zeros((8, *rows), dtype, order="F"), xp.zeros((8, *keys), dtype, order="F")
    options = {}
    if kind == "packed":
        starts, none = xp.asarray(np.array([0, 1, 3], "i4")), xp.zeros(3, "i4")
        options = {"cu_seqlens_q": starts, "cu_seqlens_kv": none, "max_seqlen_q": 2, "max_seqlen_kv": 0}
    elif kind == "lengths":
        options = {"seq_lens_q": xp.asarray(np.array([3, 5], "i4"))}
    out, stats, top, total = cupy_sdpa.attention(q, k, k, sinks=sinks, return_stats="max_sumexp", **options)
    assert not as_float(out).any()
    there = {"dense": np.ones((5, 1, 2)), "lengths": np.arange(5)[:, None, None] < [3, 5], "packed": np.arange(5) < 3}[kind]
    sink = np.array([0.5, -2])[:, None]
    for got, alone, nothing in ((stats, sink, -np.inf), (top, sink, -np.inf), (total, 1, 0)):
        np.testing.assert_array_equal(as_float(got), np.broadcast_to(np.where(there, alone, nothing), got.shape))
