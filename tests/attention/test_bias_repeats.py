"""A bias that groups of consecutive batch items share: one launch for each bias, with its gradient summed over the items."""

import numpy as np
import pytest
from engines import numbers, on_cudnn, sliced

from cupy_sdpa import (
    Unsupported,
    attention,
    attention_backward,
    attention_jvp,
    attention_vjp,
    dropout_mask,
    explain,
    get_plan_cache,
    prepare,
    problem,
    reference,
)

#: The sizes of most tests: six batch items, of which three consecutive ones share a bias.
D, HQ, HKV, SQ, SKV, B, N = 16, 4, 2, 20, 24, 6, 3


def arrays_of(engine):
    """dout, q, k, v and the bias."""
    shapes = (D, HQ, SQ, B), (D, HQ, SQ, B), (D, HKV, SKV, B), (D, HKV, SKV, B), (SKV, SQ, HQ, B // N)
    return tuple(engine.normal(seed, *shape) for seed, shape in enumerate(shapes))


def repeated(engine, bias, repeats=N):
    """The same bias for each batch item."""
    return engine.put(np.asfortranarray(engine.get(bias).repeat(repeats, axis=3)))


@pytest.mark.parametrize("number", numbers(60, quick=4))
def test_random_problems(number, engine):
    """Calls with shared biases and other options agree with the reference."""
    engine.agrees(engine.draw({"bias_repeats"}, number), refused=True)


@pytest.mark.parametrize("number", numbers(40, quick=4))
def test_random_gradients(number, engine):
    """The gradient of the bias has its shape, and is the sum over the items that share it."""
    engine.agrees(engine.draw({"bias_repeats", "return_dbias"}, number), refused=True)


@on_cudnn
@pytest.mark.parametrize("number", numbers(12, quick=2))
def test_the_items_of_a_bias_may_be_sliced(number, engine):
    """Gradients that are too large for one launch are computed in slices of the items of each bias."""
    drawn = engine.draw(
        {"bias_repeats", "return_dbias"}, number, others=("causal", "mask", "softcap", "sinks", "dropout", "score_mod")
    )
    case = drawn.with_(b=6, options=drawn.options | {"bias_repeats": 3, "bias": ("kqhb", "float32", "normal")})
    with sliced(max(case.dv, 1) * case.hq * max(case.sq, 1)):
        engine.agrees(case, refused=True)


@on_cudnn
def test_launches_of_sliced_items(engine):
    """Each launch computes a part of the items of one bias."""
    q, k, bias = engine.normal(0, D, HQ, 18, 6), engine.normal(1, D, HKV, 18, 6), engine.normal(2, 18, 18, HQ, 2)
    with sliced(2 * D * HQ * 18):
        report = explain(q, k, k, backward=True, bias=bias, bias_repeats=3, return_dbias=True)
    assert [launch.problem.q.shape[3] for launch in report.launches] == [2, 1, 2, 1]
    assert {launch.problem.bias.shape[3] for launch in report.launches} == {1}


def test_the_results_are_those_of_a_repeated_bias(engine):
    """Also with pullbacks, derivatives, prepared calls, other axes and options with an element for each batch item."""
    dout, q, k, v, bias = arrays_of(engine)
    whole, lengths = repeated(engine, bias), engine.put(np.array([24, 3, 0, 17, 24, 9], np.int32))
    for options in ({}, {"seq_lens_kv": lengths}, {"score_mod": of_batch_item}, {"dropout_p": 0.4, "seed": 3, "offset": 5}):
        shared, single = options | {"bias": bias, "bias_repeats": N}, options | {"bias": whole}
        out, stats = attention(q, k, v, return_stats=True, **shared)
        wanted, wanted_stats = attention(q, k, v, return_stats=True, **single)
        pairs = [(out, wanted), (stats, wanted_stats), (prepare(q, k, v, **shared)(q, k, v), wanted)]
        _, pullback = attention_vjp(q, k, v, return_dbias=True, **shared)
        *gradients, dbias = attention_backward(dout, q, k, v, out, stats, return_dbias=True, **shared)
        *of_whole, of_items = attention_backward(dout, q, k, v, wanted, wanted_stats, return_dbias=True, **single)
        sums = engine.get(of_items).astype(float).reshape(*bias.shape, N).sum(axis=4)
        pairs += [*zip(gradients, of_whole, strict=True), (dbias, sums), *zip(pullback(dout), (*gradients, dbias), strict=True)]
        pairs += zip(attention_jvp(q, k, v, q, k, v, **shared), attention_jvp(q, k, v, q, k, v, **single), strict=True)
        for one, other in pairs:
            np.testing.assert_allclose(
                engine.get(one).astype(float), engine.get(other).astype(float), atol=5 * engine.tolerance
            )
    outs = attention(q.T, k.T, v.T, bias=bias.T, bias_repeats=N, layout="bshd")
    np.testing.assert_array_equal(engine.get(outs.T), engine.get(attention(q, k, v, bias=bias, bias_repeats=N)))


def of_batch_item(score, b, h, i, j):
    """A score that depends on the number of the batch item in the call."""
    return score + np.where(j > 9, b / 8, 0)


def test_pages(engine):
    """The page table, not the pages, is divided into the items of each bias."""
    paged = (16, "heads", "random", 0, "mixed", False, False)
    for sq in (1, 5):
        options = {"paged": paged, "bias": ("kqhb", "float32", "normal"), "bias_repeats": 2, "stats": True}
        engine.agrees(engine.case(d=16, dv=16, hq=4, hkv=2, sq=sq, skv=64, b=6, options=options), refused=True)


def test_dropout_drops_what_dropout_mask_returns(engine):
    """The random numbers are those of one launch for the whole batch."""
    _, q, k, v, bias = arrays_of(engine)
    options = {"dropout_p": 0.5, "seed": 11, "offset": 3}
    kept = engine.get(dropout_mask(q, k, **options))
    out = attention(q, k, v, bias=bias, bias_repeats=N, **options)
    arrays = (engine.get(x).astype(float) for x in (q, k, v))
    truth, _ = reference.attention(*arrays, bias=engine.get(bias), bias_repeats=N, dropout_p=0.5, dropout_mask=kept)
    np.testing.assert_allclose(engine.get(out).astype(float), truth, atol=5 * engine.tolerance)


def test_the_gradient_of_the_bias_is_a_limit_of_differences():
    """In float64, for random directions."""
    rng = np.random.default_rng(1)
    dout, q, k, v, bias, *directions = (
        np.asfortranarray(rng.standard_normal(shape))
        for shape in ((5, 2, 6, 6), (4, 2, 6, 6), (4, 1, 7, 6), (5, 1, 7, 6), *(4 * [(7, 6, 2, 3)]))
    )
    out, stats = attention(q, k, v, bias=bias, bias_repeats=2, return_stats=True)
    *_, dbias = attention_backward(dout, q, k, v, out, stats, bias=bias, bias_repeats=2, return_dbias=True)
    for direction in directions:
        sides = (attention(q, k, v, bias=bias + step * direction, bias_repeats=2) for step in (1e-6, -1e-6))
        difference = sum(sign * (dout * side).sum() for sign, side in zip((1, -1), sides, strict=True)) / 2e-6
        assert difference == pytest.approx((dbias * direction).sum(), rel=1e-7)


def test_each_bias_has_a_launch_and_none_is_copied(engine):
    """The launches of all biases have the same problem, one plan, and need no memory besides that of a call without groups."""
    _, q, k, v, bias = arrays_of(engine)
    report = explain(q, k, v, bias=bias, bias_repeats=N)
    assert [launch.problem.bias.shape for launch in report.launches] == [(SKV, SQ, HQ, 1)] * (B // N)
    assert len({launch.problem for launch in report.launches}) == 1
    assert report.temporary_bytes == 0
    gradients = explain(q, k, v, backward=True, bias=bias, bias_repeats=N, return_dbias=True)
    own = explain(*(x[..., :N] for x in (q, k, v)), backward=True, bias=bias[..., :1], return_dbias=True)
    assert len(gradients.launches) == B // N
    assert gradients.temporary_bytes == own.temporary_bytes


@on_cudnn
def test_biases_at_unaligned_addresses_are_copied(engine):
    """cuDNN reads and writes at multiples of 16 bytes: other biases, their gradients and row statistics are copied."""
    shapes = (D, 1, 5, 4), (D, 1, 5, 4), (D, 1, 7, 4), (D, 1, 7, 4), (7, 5, 1, 2)
    dout, q, k, v, bias = (engine.normal(seed, *shape) for seed, shape in enumerate(shapes))
    shared = {"bias": bias, "bias_repeats": 2}
    forward = explain(q, k, v, return_stats=True, **shared)
    assert forward.temporary_bytes >= 7 * 5 * 2  # of the second bias; the two copies may share memory
    out, stats = attention(q, k, v, return_stats=True, **shared)
    found = attention_backward(dout, q, k, v, out, stats, return_dbias=True, **shared)
    given = [engine.get(x).astype(float) for x in (dout, q, k, v)]
    options = {"bias": engine.get(bias).astype(float), "bias_repeats": 2}
    truth = *reference.attention(*given[1:], **options), *reference.attention_backward(*given, return_dbias=True, **options)
    for one, wanted in zip((out, stats, *found), truth, strict=True):
        np.testing.assert_allclose(engine.get(one).astype(float), wanted, atol=5 * engine.tolerance)


@on_cudnn
def test_a_described_problem_has_the_plans_of_the_call(engine):
    """``problem`` and ``explain`` of it, which plans ahead are made from, have the launches of the call."""
    dout, q, k, v, bias = arrays_of(engine)
    shared = {"bias": bias, "bias_repeats": N}
    described = problem(q, k, v, return_stats=True, **shared), problem(q, k, v, backward=True, return_dbias=True, **shared)
    for one in described:
        assert explain(one).plan
    before = get_plan_cache().misses
    out, stats = attention(q, k, v, return_stats=True, **shared)
    attention_backward(dout, q, k, v, out, stats, return_dbias=True, **shared)
    assert get_plan_cache().misses == before


@on_cudnn
def test_captured_calls(engine):
    """A captured graph contains the launches of all biases."""
    _, q, k, v, bias = arrays_of(engine)
    options = {"bias": bias, "bias_repeats": N, "return_stats": True}
    wanted = engine.get(attention(q, k, v, **options))
    for one, other in zip(engine.captured(lambda: attention(q, k, v, **options)), wanted, strict=True):
        np.testing.assert_array_equal(one, other)
    engine.forget_plans()


def test_a_bias_for_all_items_needs_no_launch_of_its_own(engine):
    """``bias_repeats=B`` with one bias is the call without the option, and 1 with a bias for each item, too."""
    _, q, k, v, bias = arrays_of(engine)
    for one, repeats in ((bias[..., :1], B), (repeated(engine, bias), 1)):
        report = explain(q, k, v, bias=one, bias_repeats=repeats)
        assert report.problem == explain(q, k, v, bias=one).problem
        assert not report.launches


def test_packed_sequences_are_not_supported(engine):
    """The message says why, and what to pass instead."""
    _, q, k, v, bias = arrays_of(engine)
    starts = engine.put(np.array([0, 5, 9, 20], np.int32))
    packed = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": SQ, "max_seqlen_kv": SQ}
    with pytest.raises(Unsupported, match=r"bias_repeats is 3 with packed sequences.*seq_lens_q and seq_lens_kv"):
        attention(q[..., 0], k[:, :, :SQ, 0], v[:, :, :SQ, 0], bias=bias[:SQ, :, :, :1], bias_repeats=3, **packed)
