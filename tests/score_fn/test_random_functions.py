"""Random score functions: evaluated, differentiated, and planned by the real cuDNN."""

import pytest
from functions import HKV, HQ, B, agrees, drawn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planner import plan_problem

from cupy_sdpa import problem
from cupy_sdpa.plans.plan import PlanInfo

#: The same functions in every run; no database of examples.
EVERY = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@st.composite
def random_functions(draw):
    """Random score functions."""
    return drawn(lambda options: draw(st.sampled_from(options)))


@settings(EVERY, max_examples=150)
@given(random_functions())
def test_derivatives_of_random_functions(functions):
    """Values and gradients match dense arrays and finite differences."""
    agrees(functions, s=20)


@pytest.mark.sweep
@settings(EVERY, max_examples=2000)
@given(random_functions())
def test_derivatives_of_many_random_functions(functions):
    """Some more."""
    agrees(functions, s=20)


@pytest.mark.cudnn
@settings(EVERY, max_examples=15)
@given(functions=random_functions(), backward=st.booleans(), gpu=st.sampled_from(["h200", "b200", "a100", "rtx5090"]))
def test_random_functions_are_planned(functions, backward, gpu, planned):
    """For every generation of GPUs, both passes."""
    shapes = (64, HQ, 200, B), (64, HKV, 200, B), (64, HKV, 200, B)
    asked = problem(*shapes, dtype="bfloat16", backward=backward, **functions.options(q=200, kv=200))
    plan = planned(plan_problem, asked, gpu)
    assert isinstance(plan, PlanInfo), f"{asked.settings.program}: {plan}"
