"""Random problems that mix features, as a run of the self-test draws them; and problems that failed once."""

import pytest
from engines import CASES, SIZES, every_engine

from cupy_sdpa.check import Case
from cupy_sdpa.check.draw import draw

BUGS = {
    "a bucket of one key, sinks and a bias": Case(
        dtype="bfloat16", d=16, dv=16, sq=3, skv=1, backward=True,
        options={"bias": ("1111", "bfloat16", "normal"), "sinks": "high", "bucket": 128},
    ),
    "a block mask without batch items": Case(
        dtype="bfloat16", d=16, dv=16, hq=2, sq=1, skv=130, b=0, options={"block_mask": ("blocks", "kq1b")},
    ),
    "a block mask of heads, without heads": Case(
        dtype="float16", d=16, dv=16, hq=0, hkv=0, sq=1, skv=4, b=2, options={"block_mask": ("prefix", "kqh1")},
    ),
    "a fused kernel beside the offsets of packed statistics": Case(
        dtype="float16", d=16, dv=16, hq=4, hkv=2, sq=1, skv=1, backward=True, options={"packed": ("random", "full", 16, 100, 0, "int64")}, seed=49,
    ),
    "gradients with a block mask, without heads": Case(
        dtype="bfloat16", d=40, dv=40, hq=0, hkv=0, sq=7, skv=7, b=5, backward=True,
        options={"sinks": "high", "block_mask": ("documents", "kq1b")}, seed=700425,
    ),
}  # fmt: skip


#: Numbers of the problems of a test.
BLOCKS = [
    range(1),
    pytest.param(range(1, 4), marks=pytest.mark.slow),
    *(pytest.param(range(n, n + 50), marks=pytest.mark.sweep) for n in range(4, 154, 50)),
]


@every_engine
@pytest.mark.parametrize("lengths", [None, (1, 1)], ids=["any lengths", "one query and key"])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_mixed_problems(engine, block, lengths):
    """Problems with any options that the self-test draws; none fails."""
    for number in block:
        engine.agrees(draw(1, number, CASES[engine.name], lengths, SIZES[engine.name]), refused=True)


@every_engine
@pytest.mark.parametrize("name", BUGS)
def test_problems_that_failed(engine, name):
    """Findings of random problems."""
    engine.agrees(BUGS[name].with_(engine=CASES[engine.name]))
