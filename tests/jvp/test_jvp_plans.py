"""Directional derivatives planned by the real cuDNN for described GPUs."""

import numpy as np
import pytest
from planner import library_version, plan_problem

from cupy_sdpa.check.calls import problems
from cupy_sdpa.check.combine import with_required
from cupy_sdpa.check.draw import OPTIONS, Sampler, draw_options
from cupy_sdpa.composed import jvp_problems
from cupy_sdpa.problem.subproblems import subproblems
from cupy_sdpa.support import gpus
from cupy_sdpa.support.why_not import why_not


@pytest.mark.cudnn
@pytest.mark.parametrize("gpu", [pytest.param(gpu, marks=[pytest.mark.slow] * (gpu != "h200")) for gpu in gpus.REPRESENTATIVES])
def test_what_the_table_allows_is_planned(gpu, planned):
    """Random problems for every described GPU: each pass has a plan, or the table refuses it."""
    version, capability, count = planned(library_version), gpus.capability(gpu), 0
    for number in range(24):
        sampler = Sampler(np.random.default_rng([number, 5]), "plan")
        names = sampler.extended({"jvp"}, sorted(OPTIONS), sampler.integer(3))
        for problem in problems(draw_options(with_required(names), number, "plan")):
            if problem.trivial or why_not(problem, version, capability):
                continue
            for one in subproblems(problem):
                plan = planned(plan_problem, one, gpu)
                assert not isinstance(plan, str), f"{one}: {plan}"
                count += 1
    assert count > 10


@pytest.mark.parametrize(
    ("capability", "d", "runs"),
    [(90, 128, True), (90, 136, False), (80, 64, True), (80, 72, False), (100, 64, True), (120, 64, True)],
)
def test_the_largest_head_dims(capability, d, runs):
    """128 on Hopper and 64 on other GPUs."""
    shape = (d, 4, 256, 2)
    reasons = [
        reason for one in jvp_problems(shape, shape, shape, dtype="bfloat16") for reason in why_not(one, 92800, capability)
    ]
    assert (not reasons) is runs
