"""Plans of the calls that compute a block mask, with the real cuDNN for described GPUs; and reports."""

import numpy as np
import pytest
from planner import library_version, plan_problem

import cupy_sdpa
from cupy_sdpa import BlockMask, block_mask, explain, zoo
from cupy_sdpa.plans.plan import PlanInfo
from cupy_sdpa.programs.block_mask_calls import part_problems
from cupy_sdpa.sparse import backward as gradients
from cupy_sdpa.sparse import forward
from cupy_sdpa.support import gpus
from cupy_sdpa.support.engine_problem import engine_problem
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
    assert explain(x, x, x, block_mask=mask, gradients=True)
    assert explain(x, x, x, block_mask=mask, gradients=True, gpu="h200", cudnn="9.19")


def scores(with_scores, queries=LENGTH):
    """A score function of positions and of an array with an element for each query."""
    if not with_scores:
        return {}
    function = lambda score, b, h, q_idx, kv_idx, rows: score + rows[q_idx] * (kv_idx - q_idx)  # noqa: E731
    return {"score_mod": function, "tensors": {"rows": np.ones(queries, np.float32)}}


def described(problem):
    """A problem without the layouts and dtypes of its arrays."""
    return str(problem), tuple((spec.name, spec.shape) for spec in problem.tensors)


@pytest.mark.parametrize("with_scores", [False, True], ids=["", "scores"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", masks())
def test_the_problems_are_those_of_the_calls(name, backward, with_scores, monkeypatch):
    """What is planned and reported ahead of time is what the calls run; also with sinks and a score function."""
    mask, options = masks()[name], {**scores(with_scores), "sinks": np.ones(4, np.float32)}
    q, k = (np.ones((16, heads, LENGTH, 1), np.float32, order="F") for heads in (4, 2))
    run = []
    for module, reader in ((forward, "read_forward"), (gradients, "read_backward")):
        read = getattr(module, reader)
        monkeypatch.setattr(module, reader, lambda *x, read=read, **y: run.append(read(*x, **y)) or run[-1])
    out, stats = cupy_sdpa.attention(q, k, k, block_mask=mask, return_stats=True, **options)
    if backward:
        run.clear()
        cupy_sdpa.attention_backward(q, q, k, k, out, stats, block_mask=mask, **options)
    outputs = {"backward": True} if backward else {"return_stats": True}
    # the layouts of the arrays are those of the GPU, as in part_problems
    expected = {described(engine_problem(call.problem, None, True)) for call in run}
    assert {described(problem) for problem in part_problems((q, k, k), mask, options, **outputs)} == expected


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", ["packed", "slices", "partial blocks", "apart"])
def test_consecutive_positions_are_no_arrays_of_queries(name, backward):
    """cuDNN's backward kernel takes two arrays with an element for each query besides its own; the function here reads one."""
    q, k = (np.ones((16, heads, LENGTH, 1), np.float32, order="F") for heads in (4, 2))
    every_second = np.tile(np.array([[True], [False]]) ^ (np.arange(8) % 2 == 0), (4, 1))
    mask = BlockMask.from_blocks(every_second) if name == "apart" else masks()[name]
    problems = part_problems((q, k, k), mask, scores(True), gradients=backward)
    counts = [sum(spec.shape[1] > 1 and spec.shape[0] == 1 for spec in problem.captured) for problem in problems]
    assert max(counts) == (2 if name == "apart" and backward else 1)


@pytest.mark.cudnn
@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (300, 200)], ids=str)
def test_calls_of_all_pairs_with_a_score_function_are_planned(shape, planned, planner):
    """Also of one query and one key, for which cuDNN reads no positions from arrays: it is computed as a longer sequence."""
    mask = BlockMask.from_blocks(np.ones((-(-shape[1] // 128), -(-shape[0] // 128)), bool), *shape)
    q, k = (np.empty((64, heads, length, 1), np.float16, order="F") for heads, length in zip((4, 2), shape, strict=True))
    for options in ({"return_stats": True}, {"backward": True}):
        for problem in part_problems((q, k, k), mask, scores(True, shape[0]), **options):
            assert not why_not(problem, planner.call(library_version), 90)
            assert isinstance(plan := planned(plan_problem, problem, "h200"), PlanInfo), plan


@pytest.mark.parametrize("flags", [{}, {"backward": True}, {"jvp": True}], ids=str)
def test_a_mask_without_blocks_runs_without_a_kernel(flags):
    """There is no call of cuDNN, for a described GPU, too."""
    x = np.zeros((64, 4, 128, 1), np.float16, order="F")
    mask = BlockMask.from_blocks(np.zeros((1, 1), bool))
    for target in ({}, {"gpu": "h200", "cudnn": "9.19"}):
        report = explain(x, x, x, block_mask=mask, **flags, **target)
        assert report
        assert "runs without a kernel" in str(report)
    if not flags:
        assert "0 of 1 blocks" in report.blocks
        assert report.blocks.endswith("nothing is computed")
