"""How block masks are computed: the method, the problems of its calls, their plans by the real cuDNN, and their reports."""

import math

import numpy as np
import pytest
from planner import library_version, plan_problem

from cupy_sdpa import BlockMask, attention, attention_backward, block_mask, explain, jvp_problems, zoo
from cupy_sdpa.block_masks import block_mask_steps
from cupy_sdpa.core.support import gpus
from cupy_sdpa.core.support.why_not import why_not
from cupy_sdpa.extend import Call

LENGTH = 1024
LISTED = np.random.default_rng(0).random((8, 8, 4, 1)) < 0.5
#: A mask for each method, and of all kinds of blocks; and masks of few queries and keys, whose parts could be too small.
MASKS = {
    "packed": lambda: block_mask(lambda b, h, i, j: i // 100 == j // 100, LENGTH, LENGTH),
    "slices": lambda: block_mask(lambda b, h, i, j: (i >= j) | (j < 300), LENGTH, LENGTH),
    "full": lambda: BlockMask.from_blocks(LISTED[:, :, :1]),
    "partial": lambda: BlockMask.from_blocks(LISTED[:, :, :1], mask_mod=lambda b, h, i, j: (i * j) % 5 > 0),
    "heads": lambda: BlockMask.from_blocks(LISTED, mask_mod=lambda b, h, i, j: (i + j + h) % 5 > 0),
    "function": lambda: block_mask(zoo.dilated(200, 2), LENGTH, LENGTH),
    "apart": lambda: BlockMask.from_blocks(np.indices((8, 8)).sum(axis=0) % 2 == 0),
    "all of 1 x 1": lambda: block_mask(lambda b, h, i, j: j >= 0, 1, 1),
    "all of 1 x 300": lambda: block_mask(lambda b, h, i, j: j >= 0, 1, 300),
    "all of 300 x 200": lambda: block_mask(lambda b, h, i, j: j >= 0, 300, 200),
    "few of 2 x 1": lambda: block_mask(lambda b, h, i, j: (i >= j) | (j < 1), 2, 1),
    "few of 3 x 2": lambda: block_mask(lambda b, h, i, j: (i >= j) | (j < 1), 3, 2),
    "one pair": lambda: block_mask(lambda b, h, i, j: i + j == 2, 2, 3),
    "a diagonal": lambda: block_mask(lambda b, h, i, j: (j <= i) & (i - j <= 1), 3, 2),
}  # fmt: skip


def arrays_of(mask, heads=(4, 2), batch=1):
    """q, k and v for a mask."""
    return [
        np.empty((64, n, s, batch), np.float16, order="F")
        for n, s in zip((*heads, heads[1]), (mask.sq, mask.skv, mask.skv), strict=True)
    ]


def problems_of(mask, scores=False, **flags):
    """The problems of a GPU's calls, with sinks; ``scores`` adds a score function of positions and of an element for each query."""
    options = {"sinks": np.ones(4, np.float32)}
    if scores:
        options["score_mod"] = lambda score, b, h, i, j, rows: score + rows[i] * (j - i)
        options["tensors"] = {"rows": np.ones(mask.sq, np.float32)}
    q, k, v = arrays_of(mask)
    if flags.pop("jvp", False):
        return jvp_problems(q, k, v, block_mask=mask, **options)
    function, arrays = attention, (q, k, v)
    if flags.pop("backward", False):
        function, arrays = attention_backward, (q, q, k, v, q, np.empty((mask.sq, q.shape[1], 1), np.float32, order="F"))
    options |= {"block_mask": mask, **flags}
    return Call.of(function, *arrays, **options).read(for_gpu=True).problems


@pytest.mark.cudnn
@pytest.mark.in_turn(2)
@pytest.mark.parametrize("gpu", [pytest.param(gpu, marks=[pytest.mark.slow] * (gpu != "h200")) for gpu in gpus.REPRESENTATIVES])
@pytest.mark.parametrize("name", MASKS)
def test_every_call_is_planned(name, gpu, planned, planner):
    """The real cuDNN accepts the calls of each pass for every described GPU; on Hopper also with a score function, and derivatives."""
    version, mask = planner.call(library_version), MASKS[name]()
    passes = [(False, {"return_stats": True}), (False, {"backward": True})]
    if gpu == "h200":
        passes += [(True, {"return_stats": True}), (True, {"backward": True}), (False, {"jvp": True})]
    for scores, flags in passes:
        for problem in problems_of(mask, scores, **flags):
            assert not why_not(problem, version, gpus.capability_of(gpu))
            plan = planned(plan_problem, problem, gpu)
            assert not isinstance(plan, str), f"{problem}: {plan}"


#: A mask, the batch items of a call, and how its report describes it.
METHODS = {
    "documents": (MASKS["packed"], 1, "computed as packed sequences"),
    "a prefix": (MASKS["slices"], 1, "computed as 2 calls on slices"),
    "heads": (MASKS["heads"], 1, "computed as batch items of blocks"),
    "a short last block": (
        lambda: BlockMask.from_blocks(np.array([[1, 0], [1, 0], [0, 1], [0, 1]], bool), 256, 450), 2, "as packed sequences",
    ),
    "documents of small blocks": (
        lambda: BlockMask.from_blocks(np.kron(np.eye(3, dtype=bool), np.ones((3, 3), bool)), block=64), 1, "as packed sequences",
    ),
    "a gap in a row": (lambda: block_mask(lambda b, h, i, j: (i < 640) | (j != 5), 1000, 1000), 1, "batch items of blocks"),
    "no gap in a row": (lambda: block_mask(lambda b, h, i, j: (i < 640) | (j > 5), 1000, 1000), 1, "calls on slices"),
    "all pairs": (MASKS["all of 300 x 200"], 2, "computed as 1 calls on slices"),
    "all pairs of one query": (MASKS["all of 1 x 300"], 2, "computed as 1 calls on slices"),
    "all pairs of heads": (lambda: BlockMask.from_blocks(np.ones((2, 3, 4, 2), bool), 300, 200), 2, "as 1 calls on slices"),
    "no pairs": (lambda: block_mask(lambda b, h, i, j: i < j - 1000, 100, 100), 1, "nothing is computed"),
}  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_methods(name):
    """The report names the blocks and the method; both passes have a report for each call."""
    make, batch, text = METHODS[name]
    mask = make()
    q, k, v = arrays_of(mask, (4, 4), batch)
    report = explain(q, k, v, block_mask=mask)
    assert report
    assert f"{mask.blocks} of {mask._block_kinds.size} blocks" in report.blocks
    assert text in report.blocks
    assert explain(q, k, v, block_mask=mask, backward=True)


@pytest.mark.parametrize("flags", [{}, {"backward": True}], ids=["forward", "backward"])
def test_work_is_proportional_to_the_number_of_blocks(flags):
    """One long row among short ones: the masks of the calls have at most twice the pairs of the blocks."""
    listed = np.eye(64, dtype=bool)
    listed[:, 5] = listed[5] = True
    mask = BlockMask.from_blocks(listed, mask_mod=lambda b, h, i, j: (i + j) % 2 == 0)
    report = explain(*arrays_of(mask, (1, 1)), block_mask=mask, deterministic=True, **flags)
    sizes = [math.prod(spec.shape) for launch in report.launches or (report,) for spec in launch.problem.captured]
    assert 0 < sum(sizes) <= 2 * mask.blocks * 128**2


def test_heads_in_turn_share_memory(monkeypatch):
    """Copies of heads that are computed one after the other are in the same memory, whose size is bounded; results are the same."""
    shapes = [(8, heads, 300, 1) for heads in (8, 8, 4, 4)]
    dout, q, k, v = (np.asfortranarray(np.random.default_rng(n).standard_normal(shape)) for n, shape in enumerate(shapes))
    found, sizes = [], []
    for limit in (1 << 31, 1):
        monkeypatch.setattr(block_mask_steps, "MAX_COPIES", limit)
        mask = BlockMask.from_blocks(np.array([[1, 0, 1], [1, 1, 0], [0, 1, 1]], bool), 300, 300)
        arrays = dout, q, k, v, *attention(q, k, v, return_stats=True, block_mask=mask)
        sizes.append(Call.of(attention_backward, *arrays, block_mask=mask).read().program.memory_bytes)
        found.append(attention_backward(*arrays, block_mask=mask))
    assert sizes[1] < 0.6 * sizes[0]
    for x, y in zip(*found, strict=True):
        np.testing.assert_array_equal(x, y)
