"""Plans of the calls that compute a block mask, with the real cuDNN for described GPUs; and reports."""

import numpy as np
import pytest
from planner import library_version, plan_problem

import cupy_sdpa
from cupy_sdpa import BlockMask, block_mask, explain, zoo
from cupy_sdpa.plans.plan import PlanInfo
from cupy_sdpa.sparse.plan import part_problems
from cupy_sdpa.support import gpus
from cupy_sdpa.support.why_not import why_not

LENGTH = 1024


def masks():
    """A mask for each method, and of all kinds of blocks."""
    rng = np.random.default_rng(0)
    listed = rng.random((8, 8)) < 0.5
    table = {"table": listed}
    return {
        "packed": block_mask(lambda b, h, i, j: i // 100 == j // 100, LENGTH, LENGTH),
        "slices": block_mask(lambda b, h, i, j: (i >= j) | (j < 300), LENGTH, LENGTH),
        "full blocks": BlockMask.from_blocks(listed),
        "partial blocks": block_mask(
            lambda b, h, i, j, table: table[i // 128, j // 128] & (i + j > 9), LENGTH, LENGTH, tensors=table
        ),
        "heads": BlockMask.from_blocks(rng.random((8, 8, 4, 1)) < 0.5, mask_mod=lambda b, h, i, j: (i + j + h) % 5 > 0),
        "function": block_mask(zoo.dilated(200, 2), LENGTH, LENGTH),
    }


@pytest.mark.cudnn
@pytest.mark.parametrize("gpu", gpus.REPRESENTATIVES)
@pytest.mark.parametrize("name", masks())
def test_every_call_is_planned(name, gpu, planned, planner):
    """The real cuDNN accepts the calls of both passes for every described GPU."""
    version = planner.call(library_version)
    q, k = (np.empty((64, heads, LENGTH, 1), np.float16, order="F") for heads in (4, 2))
    for options in ({"return_stats": True}, {"backward": True}):
        for problem in part_problems((q, k, k), masks()[name], {}, **options):
            assert not why_not(problem, version, gpus.capability(gpu))
            plan = planned(plan_problem, problem, gpu)
            assert isinstance(plan, PlanInfo), f"{problem}: {plan}"


@pytest.mark.parametrize(
    ("name", "text"), [("packed", "packed sequences"), ("slices", "2 calls on slices"), ("heads", "batch entries")]
)
def test_reports(name, text):
    """The report names the blocks and the method; both passes have one for each call."""
    x = np.zeros((64, 4, LENGTH, 1), np.float16, order="F")
    mask = masks()[name]
    report = explain(x, x, x, block_mask=mask)
    assert report
    assert f"{mask.blocks} of {mask.kinds.size} blocks" in str(report)
    assert text in str(report)
    assert explain(x, x, x, block_mask=mask, backward=True)
    assert explain(x, x, x, block_mask=mask, backward=True, gpu="h200", cudnn="9.19")


def test_a_mask_without_blocks_has_no_report():
    """There is no call of cuDNN."""
    x = np.zeros((64, 4, 128, 1), np.float32, order="F")
    with pytest.raises(ValueError, match="lists no block"):
        cupy_sdpa.explain(x, x, x, block_mask=BlockMask.from_blocks(np.zeros((1, 1), bool)))
