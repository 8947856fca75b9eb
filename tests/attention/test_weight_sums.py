"""The weights summed over the queries for every key, and their entropy for every query: random problems, and plans."""

import gc

import numpy as np
import pytest
from engines import numbers, one_in
from planner import plan_problem

from cupy_sdpa import explain, explain_function, problem, weight_entropy, weight_sums, weight_sums_problems


@pytest.mark.parametrize("options", ["", "packed", "paged", "score_mod", "mask_mod", "sinks", "window"])
@pytest.mark.parametrize("number", numbers(12, quick=1, sweep=6))
def test_random_problems(number, options, engine):
    """Masks, lengths, packed sequences, pages, sinks, grouped heads and functions agree with the reference."""
    engine.agrees(engine.draw({"weight_sums", *options.split()}, number), refused=True)


def test_queries_whose_scores_are_minus_infinity(engine):
    """They have no weights, and the others have a weight of 1 each."""
    q, k = engine.normal(0, 16, 2, 9, 1), engine.normal(1, 16, 2, 13, 1)
    table = engine.put(np.where(np.arange(9) % 3 == 0, -np.inf, 0).astype(np.float32))
    sums = weight_sums(q, k, score_mod=lambda s, b, h, i, j, t: s + t[i], tensors={"t": table})
    np.testing.assert_allclose(engine.get(sums).sum(axis=0), 6, rtol=1e-5)


def test_a_function_of_the_head(engine):
    """The query heads of a group are summed one after the other; a repeated call still has their numbers."""
    q, k = engine.normal(0, 16, 4, 9, 2), engine.normal(1, 16, 2, 13, 2)
    wide_q, wide_k = (x.astype(np.float64) for x in engine.get((q, k)))
    scores = np.einsum("dhib,dhjb->hijb", wide_q, np.repeat(wide_k, 2, axis=1)) / 4
    scores += np.arange(4)[:, None, None, None] * (np.arange(13) % 3)[None, None, :, None]
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    expected = (weights / weights.sum(axis=2, keepdims=True)).sum(axis=1).transpose(1, 0, 2)

    def score_mod(s, b, h, i, j):
        return s + h * (j % 3)

    for _ in range(4):
        found = engine.get(weight_sums(q, k, score_mod=score_mod))
        np.testing.assert_allclose(found, expected, rtol=20 * engine.tolerance)
        gc.collect()


@pytest.mark.parametrize("heads", [2, 4])
def test_nothing_to_sum(heads, engine):
    """Keys without queries have the weight 0; no keys give no sums. Some views begin inside an array without elements."""
    q, k = engine.nan(16, heads, 0, 3), engine.normal(0, 16, 2, 5, 3)
    assert not engine.get(weight_sums(q, k)).any()
    assert weight_sums(engine.normal(0, 16, heads, 4, 3), engine.nan(16, 2, 0, 3)).shape == (0, heads, 3)
    starts, nothing = (engine.put(np.int32(x)) for x in ([0, 2, 5], [0, 0, 0]))
    options = {"cu_seqlens_q": starts, "cu_seqlens_kv": nothing, "max_seqlen_q": 3, "max_seqlen_kv": 4}
    assert weight_sums(engine.normal(0, 16, heads, 5), engine.nan(16, 2, 0), **options).shape == (heads, 0)


@pytest.mark.cudnn
@pytest.mark.parametrize("gpu", one_in(2, ["h200", "a100"]))
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"causal": "bottom_right"}, {"window": (100, 0)}, {"sinks": True}], ids=str
)
def test_plans(options, gpu, planned):
    """cuDNN plans both passes."""
    for one in weight_sums_problems((128, 8, 512, 2), (128, 2, 1024, 2), dtype="bfloat16", **options):
        assert not isinstance(planned(plan_problem, one, gpu), str)


# The entropy of the weights


@pytest.mark.parametrize("options", ["", "packed", "paged", "mask", "mask_mod", "sinks", "window", "block_mask", "seq_lens_q"])
@pytest.mark.parametrize("number", numbers(12, quick=2, sweep=6))
def test_random_entropies(number, options, engine):
    """Masks, lengths, packed sequences, pages, sinks and grouped heads agree with the reference."""
    engine.agrees(engine.draw({"weight_entropy", *options.split()}, number), refused=True)


def test_entropies_of_float64():
    """They are exact up to the rounding of float64, also if all scores have a large offset in common."""
    q, k = (np.random.default_rng(n).standard_normal((16, 2, 30, 2)).astype(np.float64, order="F") for n in range(2))
    for offset, error in ((0.0, 1e-14), (1e6, 1e-8)):
        q[0], k[0] = offset, 1
        scores = np.einsum("dhqb,dhkb->hqkb", q, k) / 4
        p = np.exp(scores - scores.max(axis=2, keepdims=True))
        p /= p.sum(axis=2, keepdims=True)
        found = weight_entropy(q, k)
        assert found.dtype == np.float64
        np.testing.assert_allclose(found, -(p * np.log(p)).sum(axis=2).transpose(1, 0, 2), rtol=0, atol=error)


def test_entropies_of_some_rows(engine):
    """0 for a query without keys, for padding of NaN, and for a query with one key, where rounding could make it negative."""
    q, k = engine.normal(0, 16, 4, 9, 2), engine.normal(1, 16, 2, 13, 2)
    k *= 8
    q[:, :, 7:, 1] = np.nan
    mask = np.ones((13, 9, 1, 1), bool, order="F")
    mask[:, 3], mask[1:, 4] = False, False
    options = {"mask": engine.put(mask), "seq_lens_q": engine.put(np.int32([9, 7]))}
    found = engine.get(weight_entropy(q, k, **options))
    assert found.shape == (9, 4, 2)
    assert not found[3].any()
    assert not found[7:, :, 1].any()
    assert (found[4] >= 0).all()
    np.testing.assert_allclose(found[4], 0, atol=60 * engine.tolerance)
    assert (found[[0, 1, 2, 5, 6]] > 0).any()
    sinks = engine.put(np.float32([-np.inf, 0, 1, 30]))
    with_sinks = engine.get(weight_entropy(q, k, sinks=sinks, **options))
    np.testing.assert_allclose(with_sinks[3], 0, atol=1e-5)
    np.testing.assert_allclose(with_sinks[:, 0], found[:, 0], atol=1e-5)


def test_no_rows(engine):
    """No queries give no entropies, and no keys entropies of 0."""
    assert weight_entropy(engine.nan(16, 2, 0, 3), engine.normal(0, 16, 2, 5, 3)).shape == (0, 2, 3)
    assert not engine.get(weight_entropy(engine.normal(0, 16, 2, 4, 3), engine.nan(16, 2, 0, 3))).any()


@pytest.mark.cudnn
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (100, 0)}, {"sinks": True}], ids=str)
def test_the_plan_of_entropies(options, planned):
    """The report's attention is the problem that is planned ahead of time."""
    q, k = ((128, 8, 512, 2), (128, 2, 1024, 2))
    own = problem(q, k, k, dtype="bfloat16", return_stats=True, **options)
    assert not isinstance(planned(plan_problem, own, "h200"), str)


def test_a_report_of_entropies(engine):
    """It shows the pass of attention with k as values, and the kernel of the entropies."""
    q, k = engine.normal(0, 16, 4, 9, 2), engine.normal(1, 16, 2, 13, 2)
    report = explain_function(weight_entropy, q, k, causal=True)
    (launch,) = report.launches or (report,)
    assert launch.problem == explain(q, k, k, causal=True, return_stats=True).problem
    assert "entrop" in str(report)
