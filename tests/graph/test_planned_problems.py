"""Random problems are planned by the real cuDNN for described GPUs, or refused by the table; no kernel is compiled."""

import os
import re

import numpy as np
import pytest
from planner import library_version, plan_graph, plan_problem

import cupy_sdpa
from cupy_sdpa.check.calls import problems
from cupy_sdpa.check.combine import LEFT_OUT, with_required
from cupy_sdpa.check.draw import OPTIONS, draw, draw_options
from cupy_sdpa.check.sampler import Limits, Sampler
from cupy_sdpa.core.cudnn_engine.plan import PlanInfo
from cupy_sdpa.core.cudnn_engine.planner import ORDERED, ORDERED_SINCE
from cupy_sdpa.core.graph.attention_backward import backward
from cupy_sdpa.core.problem.subproblems import subproblems
from cupy_sdpa.core.support import gpus
from cupy_sdpa.core.support.why_not import guards, why_not

pytestmark = pytest.mark.cudnn

#: Whether to run the tests of about an hour, with two thousand plans.
NIGHTLY = os.environ.get("CUPY_SDPA_NIGHTLY", "0") != "0"
LIMITS = Limits(1_000_000, 1_000_000)
#: Options of problems that other tests plan.
OTHERS = {"fp8", "jvp", "paged", "num_splits", *LEFT_OUT["plan"]}
#: Refusals of cuDNN 9.28 that are not in our table, for constructed descriptions: problems and GPUs.
ALLOWED = {
    "256-blackwell": lambda p, capability: p.backward and p.sizes[0] == p.sizes[1] == 256 and 100 <= capability < 120,
    "deterministic-packed": lambda p, capability: p.backward and p.packed and p.deterministic and not 90 <= capability < 120,
    "two-head-dims-packed": lambda p, capability: (
        p.backward and p.packed and p.sizes[0] != p.sizes[1] and not 90 <= capability < 120
    ),
    "a third array with an element for each query, on Ampere and SM 12.x": lambda p, capability: (
        p.backward and p.bias is not None and p.sizes[4] == 1 and not 90 <= capability < 120
    ),
}
#: Refusals that depend on the number of arrays with an element for each query, such as masks with trees, and on
#: ``max_workspace``.
REFUSALS = re.compile(
    r"sq broadcasted vectors are supported|needs a workspace of \d+ bytes, and the limit is \d+|are the same but got d_qk"
)


#: Whether dQ is written directly, and the engine config.
METHODS = ((True, None), (False, None), (False, ORDERED))


def drawn(number):
    """A random case of any options, for a described GPU."""
    sampler = Sampler(np.random.default_rng([number, 3]), "plan")
    names = sampler.extended(set(), sorted(OPTIONS.keys() - OTHERS), sampler.integer(6))
    return draw_options(names, number, "plan", limits=LIMITS)


def check_plans(numbers, call):
    """Plan the problems that the table allows, with every method to compute gradients on the H200: no crash, and no refusal that
    is not listed; at least a third are planned.
    """
    version, planned = call(library_version), 0
    for case in (draw(11, number, "plan") if number % 2 else drawn(number) for number in numbers):
        capability = gpus.capability_of(case.gpu)
        for problem in (part for whole in problems(case) if not whole.trivial for part in subproblems(whole)):
            if why_not(problem, version, capability):
                continue
            plan = call(plan_problem, problem, case.gpu)
            known = REFUSALS.search(str(plan)) or any(allowed(problem, capability) for allowed in ALLOWED.values())
            assert isinstance(plan, PlanInfo) or known, f"{case!r}\n{problem}: {plan}"
            planned += isinstance(plan, PlanInfo)
            if isinstance(plan, PlanInfo) and problem.backward and case.gpu == "h200" and not problem.ds_reductions:
                for direct, config in METHODS[: 3 if version >= ORDERED_SINCE else 2]:
                    graph = backward(problem, direct, guards(problem, version, 90))
                    other = call(plan_graph, graph, "h200", config)
                    assert isinstance(other, PlanInfo), f"{case!r}, {direct}, {config}: {other}"
                    assert other.engine == 6
    assert planned > len(numbers) // 3


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 6))])
def test_problems_that_the_table_allows_are_planned(part, planned):
    """Both passes, on every described GPU."""
    check_plans(range(16 * part, 16 * part + 16), planned)


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(8))
def test_many_problems_that_the_table_allows_are_planned(part, planner):
    """Many more; every night their kernels are also compiled."""
    count = 250 if NIGHTLY else 50
    check_plans(range(1000 + count * part, 1000 + count * (part + 1)), planner.call if NIGHTLY else planner.accept)


@pytest.mark.sweep
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("d", range(8, 257, 8))
def test_every_head_dim_is_planned_for_the_h200(d, causal, planned):
    """Every multiple of 8 up to 256 has a plan with the Hopper kernel."""
    q, k = (d, 4, 256, 2), (d, 2, 256, 2)
    plan = planned(plan_problem, cupy_sdpa.problem(q, k, k, dtype="bfloat16", causal=causal, return_stats=True), "h200")
    assert isinstance(plan, PlanInfo), plan
    assert plan.engine == 2


@pytest.mark.parametrize("gpu", [pytest.param(gpu, marks=[pytest.mark.slow] * (gpu != "h200")) for gpu in gpus.REPRESENTATIVES])
def test_derivatives_that_the_table_allows_are_planned(gpu, planned):
    """Random problems for every described GPU: each pass has a plan, or the table rules it out."""
    version, capability, count = planned(library_version), gpus.capability_of(gpu), 0
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
