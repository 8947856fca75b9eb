"""Diagonals, windows and lengths: what the options mean, which values raise, and the padding."""

from dataclasses import replace

import numpy as np
import pytest
from cases import Case

import cupy_sdpa
from cupy_sdpa import attention, attention_backward, explain, reference
from cupy_sdpa.problem.band import Band
from cupy_sdpa.support.why_not import why_not

SQUARE, WIDE, TALL = (6, 6), (4, 7), (7, 4)


def seen_by(sq, skv, **options):
    """Which keys each query attends to: queries of zeros give the mean of the values that they attend to."""
    q, k = np.zeros((8, 1, sq, 1), order="F"), np.zeros((8, 1, skv, 1), order="F")
    v = np.eye(skv)[:, None, :, None]
    return attention(q, k, np.asfortranarray(v), **options)[:, 0, :, 0].T > 0


PICTURES = {
    "causal": (SQUARE, {"causal": True}, lambda i, j: j <= i),
    "causal_wide": (WIDE, {"causal": "top_left"}, lambda i, j: j <= i),
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
def test_the_options_match_their_definition(name):
    """For each query and key."""
    (sq, skv), options, rule = PICTURES[name]
    want = np.array([[rule(i, j) for j in range(skv)] for i in range(sq)])
    np.testing.assert_array_equal(seen_by(sq, skv, **options), want)
    np.testing.assert_array_equal([reference.visible(i, 0, sq, skv, **options) for i in range(sq)], want)


SAME = {
    "square_bottom_right": (((64, 64), {"causal": "bottom_right"}), ((64, 64), {"causal": True})),
    "decode_bottom_right": (((1, 64), {"causal": "bottom_right"}), ((1, 64), {})),
    "window_beyond_everything": (((64, 64), {"window": (63, 63)}), ((64, 64), {})),
    "window_without_bounds": (((64, 32), {"window": (None, None)}), ((64, 32), {})),
    "window_that_is_causal": (((64, 32), {"window": (None, 0)}), ((64, 32), {"causal": True})),
    "causal_window": (((64, 64), {"window": (9, 30), "causal": True}), ((64, 64), {"window": (9, 0)})),
}


@pytest.mark.parametrize("name", SAME)
def test_equal_masks_give_one_problem(name):
    """They share a plan, because the problem holds the simplest form."""
    one, other = (
        cupy_sdpa.problem((64, 4, sq, 2), (64, 4, skv, 2), (64, 4, skv, 2), dtype="bfloat16", **options)
        for (sq, skv), options in SAME[name]
    )
    assert one is other or one == other


def test_lengths_of_a_batch_of_one_are_dense():
    """Whatever the stride of the array of one length."""
    for array in (np.array([3], np.int32), np.array([3, 4, 5], np.int32)[::2][:1]):
        q = np.zeros((64, 4, 16, 1), np.float32, order="F")
        asked = explain(q, q, q, seq_lens_q=array).problem
        assert asked.seq_lens_q.strides == (4,)
        assert "contiguous-head-dim" not in {reason.rule for reason in why_not(asked, 91900, 90)}


def test_problems_describe_their_mask():
    """In the text of the problem."""
    assert str(Band(right=0)) == "causal from the top left"
    assert str(Band(5, None, bottom_right=True)) == "window of 5 keys before and all after the diagonal from the bottom right"
    q = np.zeros((8, 1, 4, 2), np.float32, order="F")
    text = str(explain(q, q, q, seq_lens_kv=np.array([1, 2], np.int32)).problem)
    assert "at most 4 queries, at most 4 keys" in text


BAD = {
    "causal": ({"causal": "left"}, ValueError, "causal is 'left'"),
    "window_word": ({"window": "all"}, TypeError, "window is 'all'"),
    "window_one": ({"window": (1,)}, TypeError, r"window is \(1,\)"),
    "window_negative": ({"window": (-1, 0)}, ValueError, r"window is \(-1, 0\)"),
    "window_fraction": ({"window": (1.5, 0)}, ValueError, r"window is \(1\.5, 0\)"),
    "window_corner": ({"window": (1, 0, "top_right")}, ValueError, "its third entry must be"),
    "two_diagonals": ({"causal": True, "window": (1, 0, "bottom_right")}, ValueError, "different diagonals"),
    "lengths_dtype": ({"seq_lens_q": np.array([1, 2])}, TypeError, "seq_lens_q is int64; it must be int32"),
    "lengths_shape": ({"seq_lens_kv": np.array([1], np.int32)}, ValueError, r"seq_lens_kv has shape \(1,\); it must be \(2,\)"),
    "lengths_too_long": ({"seq_lens_kv": np.array([1, 5], np.int32)}, ValueError, "from 1 to 5; they must be from 0 to 4"),
    "lengths_negative": ({"seq_lens_q": np.array([-1, 2], np.int32)}, ValueError, "from -1 to 2"),
    "lengths_list": ({"seq_lens_q": [1, 2]}, TypeError, "seq_lens_q is a list"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_masks_raise(name):
    """The message contains the value and the valid ones."""
    options, error, words = BAD[name]
    x = np.zeros((8, 1, 4, 2), np.float32)
    with pytest.raises(error, match=words):
        attention(x, x, x, **options)


LENGTHS = Case("beyond", d=64, hq=4, hkv=2, sq=150, skv=200, b=3, seq_lens_q=(150, 70, 0), seq_lens_kv=(33, 200, 128))


def beyond(case, what):
    """q, k, v and dout of a case, with a value in the padding."""
    q, k, v, dout = (x.copy(order="F") for x in (*case.arrays(), case.dout()))
    for entry in range(case.b):
        for array, lengths in ((q, case.seq_lens_q), (dout, case.seq_lens_q), (k, case.seq_lens_kv), (v, case.seq_lens_kv)):
            array[:, :, lengths[entry] :, entry] = what
    return q, k, v, dout


def everything(xp, case, arrays):
    """out, stats and the gradients, as numpy arrays."""
    q, k, v, dout = (xp.asarray(x) for x in arrays)
    options = case.options(xp)
    out, stats = attention(q, k, v, return_stats=True, **options)
    gradients = attention_backward(dout, q, k, v, out, stats, deterministic=not case.sinks, **case.gradients, **options)
    return [x if xp is np else xp.asnumpy(x) for x in (out, stats, *gradients)]


@pytest.mark.parametrize("engine", ["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def test_sums_exclude_the_padding(engine):
    """NaN in the padding does not affect the gradients of a bias and of sinks, which are sums over all positions."""
    xp = np if engine == "numpy" else pytest.importorskip("cupy")
    case = replace(LENGTHS, name="sums", bias="kq", sinks=True, dtype="float32" if xp is np else "bfloat16")
    clean, dirty = (everything(xp, case, beyond(case, what)) for what in (0, np.nan))
    for a, b in zip(clean[1:], dirty[1:], strict=True):
        assert np.isfinite(b.astype(np.float32)).all() or b.shape == clean[1].shape
        np.testing.assert_allclose(a.astype(np.float32), b.astype(np.float32), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("what", [np.nan, np.inf, -np.inf, 1e30], ids=str)
@pytest.mark.parametrize("causal", [False, True, "bottom_right"], ids=str)
@pytest.mark.parametrize("engine", ["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def test_the_padding_is_not_read(engine, causal, what):
    """NaN, infinities and huge numbers in the padding have no effect; results there are 0, and -inf for the log-sum-exp."""
    xp = np if engine == "numpy" else pytest.importorskip("cupy")
    case = Case(**{**vars(LENGTHS), "causal": causal, "dtype": "float32" if xp is np else "bfloat16"})
    clean = everything(xp, case, beyond(case, 0))
    dirty = everything(xp, case, beyond(case, what))
    for a, b in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(a.astype(np.float32), b.astype(np.float32))
    out, stats, dq, dk, dv = (x.astype(np.float32) for x in dirty)
    for entry in range(case.b):
        for array, lengths in ((out, case.seq_lens_q), (dq, case.seq_lens_q), (dk, case.seq_lens_kv), (dv, case.seq_lens_kv)):
            assert not array[:, :, lengths[entry] :, entry].any()
        assert (stats[case.seq_lens_q[entry] :, :, entry] == -np.inf).all()
    assert all(np.isfinite(x).all() for x in (out, dq, dk, dv))
