"""The weights summed over the queries for every key: random problems, grouped heads, refusals, and plans."""

import numpy as np
import pytest
from engines import numbers
from planner import plan_problem

from cupy_sdpa import Unsupported, attention, weight_sums
from cupy_sdpa.composed import weight_sums_problems


@pytest.mark.parametrize("number", numbers(24, quick=4))
def test_random_problems(number, engine):
    """Masks, lengths, packed sequences, pages, sinks, grouped heads and functions agree with the reference."""
    engine.agrees(engine.draw({"weight_sums"}, number), refused=True)


@pytest.mark.parametrize("option", ["packed", "paged", "score_mod", "mask_mod", "sinks", "window"])
@pytest.mark.parametrize("number", numbers(3, quick=1))
def test_random_problems_of_an_option(number, option, engine):
    """Each option at least once."""
    engine.agrees(engine.draw({"weight_sums", option}, number), refused=True)


def test_sums_are_those_of_the_weights(engine):
    """Every query distributes a weight of 1; the sums of key/value heads are those of their query heads."""
    q, k = engine.normal(0, 16, 6, 9, 2), engine.normal(1, 16, 2, 13, 2)
    sums = engine.get(weight_sums(q, k, causal="bottom_right"))
    assert (sums.shape, sums.dtype) == ((13, 6, 2), np.float32)
    np.testing.assert_allclose(sums.sum(axis=0), 9, rtol=1e-5)
    of_heads = engine.get(weight_sums(q, k, causal="bottom_right", per_kv_head=True))
    np.testing.assert_allclose(of_heads, sums.reshape(13, 2, 3, 2).sum(axis=2), rtol=1e-5)


def test_weights_from_one_hot_values(engine):
    """The sums are those of the outputs for values that are rows of the identity."""
    q, k = engine.normal(0, 16, 2, 7, 1), engine.normal(1, 16, 2, 16, 1)
    one_hot = np.repeat(np.eye(16, dtype=engine.dtype)[:, None, :, None], 2, axis=1)
    weights = engine.get(attention(q, k, engine.put(np.asfortranarray(one_hot)), window=(3, 1)))
    sums = engine.get(weight_sums(q, k, window=(3, 1)))
    np.testing.assert_allclose(sums, weights.astype("f4").sum(axis=2), atol=7 * engine.tolerance)


def test_a_repeated_call_follows_its_arrays(engine):
    """Repeated calls, which may be replayed, read the present elements and return new results."""
    q, k = engine.normal(0, 16, 4, 8, 1), engine.normal(1, 16, 2, 8, 1)
    found = [weight_sums(q, k) for _ in range(5)]
    first = [engine.get(x).copy() for x in found]
    q *= -1
    other = engine.get(weight_sums(q, k))
    assert all(np.array_equal(x, first[0]) for x in first)
    assert np.abs(other - first[0]).max() > 0.1
    np.testing.assert_array_equal(engine.get(found[0]), first[0])


def test_nothing_to_sum(engine):
    """Keys without queries have the weight 0; no keys give no sums."""
    q, k = engine.nan(16, 2, 0, 3), engine.normal(0, 16, 2, 5, 3)
    assert not engine.get(weight_sums(q, k)).any()
    assert weight_sums(engine.normal(0, 16, 2, 4, 3), engine.nan(16, 2, 0, 3)).shape == (0, 2, 3)


def test_the_largest_score_of_each_head(engine):
    """The recipe of the documentation: row maxima, and their maximum."""
    q, k = engine.normal(0, 16, 4, 9, 2), engine.normal(1, 16, 2, 13, 2)
    _, _, rows, _ = attention(q, k, k, causal=True, return_stats="max_sumexp")
    found = engine.get(rows.max(axis=(0, 2)))
    scores = np.einsum("dhib,dhjb->hijb", engine.get(q).astype("f8"), np.repeat(engine.get(k), 2, axis=1).astype("f8")) / 4
    hidden = np.arange(13) > np.arange(9)[:, None]
    np.testing.assert_allclose(found, np.where(hidden[None, :, :, None], -np.inf, scores).max(axis=(1, 2, 3)), rtol=1e-3)


def test_refused_options():
    """The message names the option and the remedy, before anything is computed."""
    x = np.ones((8, 2, 4, 1), np.float32, order="F")
    for options, words in (
        ({"bias": np.zeros((4, 4, 1, 1), np.float32)}, "with bias.*score function"),
        ({"dropout_p": 0.1, "seed": 1}, "with dropout_p.*before dropout"),
        ({"layout": "bshd"}, "with layout.*head_dim, heads"),
    ):
        with pytest.raises(Unsupported, match=words):
            weight_sums(x, x, **options)
        with pytest.raises(Unsupported, match=words):
            weight_sums_problems(x, x, **options)


@pytest.mark.cudnn
@pytest.mark.parametrize("gpu", ["h200", "a100"])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"causal": "bottom_right"}, {"window": (100, 0)}, {"sinks": True}], ids=str
)
def test_plans(options, gpu, planned):
    """cuDNN plans both passes."""
    for problem in weight_sums_problems((128, 8, 512, 2), (128, 2, 1024, 2), dtype="bfloat16", **options):
        assert not isinstance(planned(plan_problem, problem, gpu), str)
