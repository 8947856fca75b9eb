"""The weights summed over the queries for every key: random problems, grouped heads, and plans."""

import numpy as np
import pytest
from engines import numbers, one_in
from planner import plan_problem

from cupy_sdpa import weight_sums, weight_sums_problems


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
    for problem in weight_sums_problems((128, 8, 512, 2), (128, 2, 1024, 2), dtype="bfloat16", **options):
        assert not isinstance(planned(plan_problem, problem, gpu), str)
