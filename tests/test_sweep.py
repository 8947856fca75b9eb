"""Long sweeps: left out unless asked for with ``-m sweep``."""

import numpy as np
import pytest
from cases import LAYOUTS, Case, options_of_reference
from exact import evaluated
from on_gpu import check_forward

from cupy_sdpa import arguments, reference
from cupy_sdpa.patterns import forward
from cupy_sdpa.plan import PlanInfo

pytestmark = pytest.mark.sweep


def random_case(seed, multiple_of_8=False):
    """A problem that nobody thought of."""
    rng = np.random.default_rng(seed)
    unit = 8 if multiple_of_8 else 1
    hkv = int(rng.integers(1, 5))
    return Case(
        f"seed_{seed}",
        d=unit * int(rng.integers(1, 256 // unit + 1 if multiple_of_8 else 40)),
        dv=unit * int(rng.integers(1, 256 // unit + 1 if multiple_of_8 else 40)),
        hq=hkv * int(rng.integers(1, 5)),
        hkv=hkv,
        sq=int(rng.integers(1, 200)),
        skv=int(rng.integers(1, 200)),
        b=int(rng.integers(1, 4)),
        causal=bool(rng.integers(2)),
        scale=[None, None, 0.3, -0.2, 0.0][rng.integers(5)],
        dtype=["bfloat16", "float16"][rng.integers(2)],
        layout=str(rng.choice(list(LAYOUTS))),
    )


@pytest.mark.parametrize("seed", range(150))
def test_random_problems_are_the_reference(seed):
    """Whatever the sizes, layout, mask and scale: graph and reference agree to 1e-12 in float64."""
    case = random_case(seed).with_dtype("float64")
    arrays = case.laid_out(case.arrays())
    call = arguments.read_forward(*arrays, case.options(), return_stats=True)
    got = evaluated(call, forward(call.posed))
    truth, truth_stats = reference.attention(*arrays, **options_of_reference(case.options()))
    np.testing.assert_allclose(got["out"], truth, rtol=0, atol=1e-12)
    np.testing.assert_allclose(got["stats"], truth_stats, rtol=1e-6)


@pytest.mark.cudnn
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("d", range(8, 257, 8))
def test_every_head_dim_is_planned_for_the_h200(d, causal, planner):
    """Every multiple of 8 up to 256 has a plan, and it is the Hopper kernel's."""
    plan = planner.plan(forward(Case(f"d{d}", d=d, sq=256, hq=4, hkv=2, causal=causal).problem()))
    assert isinstance(plan, PlanInfo), plan
    assert plan.engine == 2


@pytest.mark.cudnn
@pytest.mark.parametrize("seed", range(60))
def test_random_problems_are_planned_for_the_h200(seed, planner):
    """No size, layout, mask or scale that passes the support table is refused by cuDNN."""
    plan = planner.plan(forward(random_case(seed, multiple_of_8=True).problem()))
    assert isinstance(plan, PlanInfo), plan


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(60))
def test_random_problems_are_right_on_the_gpu(seed, cupy):
    """The same problems, run: within the tolerance policy, every element written."""
    check_forward(cupy, random_case(seed, multiple_of_8=True))
