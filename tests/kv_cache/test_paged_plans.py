"""Plans of paged problems without a GPU: described GPUs, reports, files of problems, and plans ahead of time."""

import numpy as np
import pytest
from planner import plan_problem

import cupy_sdpa
from cupy_sdpa import explain
from cupy_sdpa.check.draw import GPUS


def asked(sq=1, page=16, *, hq=8, keys=4096, batch=2, packed=False, **options):
    """The problem of shapes, with two key/value heads."""
    pages = (64, 2, page, 600)
    q = (64, hq, 2 * sq) if packed else (64, hq, sq, batch)
    more = {"cu_seqlens_q": (batch + 1,), "max_seqlen_q": sq} if packed else {}
    options = {"dtype": "bfloat16", "page_table": (keys // page, batch), **more, **options}
    return cupy_sdpa.problem(q, pages, pages, **options)


#: Options of the planned problems.
OPTIONS = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "packed": {"packed": True, "causal": "bottom_right"},
    "sinks": {"sinks": True, "causal": "bottom_right", "return_stats": True},
    "window": {"window": (100, 0, "bottom_right")},
    "score function": {"score_mod": lambda s, b, h, i, j: s - 0.01 * j},
}


@pytest.mark.cudnn
@pytest.mark.parametrize("gpu", ["h200", *(pytest.param(gpu, marks=pytest.mark.slow) for gpu in sorted({*GPUS} - {"h200"}))])
def test_paged_problems_are_planned(gpu, planner):
    """The real cuDNN accepts what the support table allows, for every described GPU."""
    for options in OPTIONS.values():
        for sq, page in ((1, 64), (4, 16), (70, 16)):
            problem = asked(sq, page, **options)
            plan = planner.accept(plan_problem, problem, gpu)
            assert not isinstance(plan, str), f"{problem}: {plan}"


#: Problems, and the number of chunks in their report; 0 if the keys are not split.
SPLITS = {
    "one query": (asked(), 0),
    "one query, deterministic": (asked(deterministic=True), 16),
    "one query, num_splits": (asked(num_splits=5), 5),
    "one query, sinks": (asked(sinks=True), 16),
    "4 queries": (asked(4, causal="bottom_right"), 16),
    "4 queries, one chunk": (asked(4, num_splits=1), 1),
    "few keys": (asked(4, keys=256), 1),
    "large batch": (asked(4, batch=64), 1),
    "large batch of FP8": (asked(4, batch=64, keys=3 * 4096 + 768, dtype="float8_e4m3fn"), 4),  # of at most 4096 keys
    "more chunks than pages": (asked(4, page=64, keys=512, num_splits=9), 4),
    "a window": (asked(4, page=128, window=(127, 0, "bottom_right"), num_splits=9), 3),
    "128 rows": (asked(32), 16),
    "132 rows": (asked(33), 16),
    "280 rows": (asked(70), 8),
    "516 rows": (asked(129), 0),
    "packed queries": (asked(4, packed=True), 0),
    "a score function": (asked(4, score_mod=lambda s, b, h, i, j: 2 * s), 0),
}


@pytest.mark.parametrize("name", SPLITS)
def test_whether_keys_are_split(name):
    """The number of chunks depends on the rows of a key/value head, the batch size, and the width of the page table."""
    problem, chunks = SPLITS[name]
    assert (problem.settings.split.chunks if problem.settings.split else 0) == chunks


@pytest.mark.slow
@pytest.mark.parametrize("name", ["4 queries", "packed queries"])
def test_a_report_says_whether_keys_are_split(name):
    """With the number of chunks; and the page size."""
    problem, chunks = SPLITS[name]
    text = str(explain(problem, gpu="b200", cudnn="9.27.1"))
    assert "from the support table alone" in text
    assert f"pages of {problem.k.shape[2]} keys" in text
    assert (f"keys split into {chunks} chunks, query heads of a group and queries as rows" in text) == bool(chunks)


# Plans ahead of time


def test_shapes_of_pages_are_those_of_arrays():
    """The problem of shapes equals the problem of a call with arrays: how the keys are split, and packed queries."""
    pages, options = (64, 2, 64, 100), {"dtype": "float16", "page_table": (16, 2)}
    q, pool = np.zeros((64, 8, 4, 2), np.float16, order="F"), np.zeros(pages, np.float16, order="F")
    table, lengths = np.zeros((16, 2), np.int32, order="F"), np.zeros(2, np.int32)
    given = cupy_sdpa.problem(q, pool, pool, page_table=table, seq_lens_kv=lengths, causal="bottom_right", num_splits=3)
    assert given == cupy_sdpa.problem(q.shape, pages, pages, causal="bottom_right", num_splits=3, **options)
    assert given.settings.split.chunks == 3
    assert cupy_sdpa.problem((64, 8, 140), pages, pages, cu_seqlens_q=(3,), max_seqlen_q=70, **options).packed
