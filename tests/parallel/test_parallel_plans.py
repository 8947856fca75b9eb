"""The calls of a member of a group are planned by the real cuDNN for a described GPU."""

import numpy as np
import pytest
from parallel_cases import METHODS
from planner import library_version, plan_problem

import cupy_sdpa
from cupy_sdpa.parallel.planning import positions
from cupy_sdpa.parallel.planning.arguments import configure
from cupy_sdpa.parallel.planning.support import problems
from cupy_sdpa.plans.plan import PlanInfo
from cupy_sdpa.problem.tensor_spec import numpy_dtype
from cupy_sdpa.support import gpus
from cupy_sdpa.support.why_not import why_not

pytestmark = pytest.mark.cudnn
SIZE = 4
CASES = {
    "causal": {"causal": True},
    "window": {"window": (100, 0)},
    "window on both sides": {"window": (100, 50, "bottom_right")},
    "ALiBi": {"causal": True, "alibi_slopes": cupy_sdpa.alibi_slopes(8)},
    "softcap and ALiBi": {"causal": True, "softcap": 5.0, "alibi_slopes": cupy_sdpa.alibi_slopes(8)},
    "score function": {"score_mod": lambda score, b, h, q_idx, kv_idx: score + (kv_idx - q_idx) * 0.01},
    "mask function": {"mask_mod": lambda b, h, q_idx, kv_idx: (q_idx // 64) == (kv_idx // 64)},
    "sinks": {"causal": True, "sinks": np.zeros(8, np.float32)},
    "bias": {"bias": np.zeros((512, 1, 8, 1), np.float32, order="F")},
    "lengths": {"causal": True, "seq_lens_kv": np.array([400, 512], np.int32)},
}
PACKED = {
    "packed": {},
    "packed, causal": {"causal": True},
    "packed, window": {"causal": True, "window": (40, 0)},
    "packed, ALiBi": {"causal": True, "alibi_slopes": cupy_sdpa.alibi_slopes(8)},
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", [*CASES, *PACKED])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_calls_of_members_are_planned(direction, name, method, planned, monkeypatch):
    """Every call of the members in the middle and at the ends of a group is supported, and cuDNN plans it for the H200."""
    monkeypatch.setattr(positions, "aligned", lambda x: x.copy(order="F"))  # as for CuPy arrays
    version = planned(library_version)
    found = set()
    for rank in (0, 1, SIZE - 1):
        options = dict(CASES.get(name) or PACKED.get(name) or {})
        batch, length = (2,), 512 // SIZE
        if name in PACKED:
            starts = np.cumsum([0, 256, 64, 0, 192], dtype=np.int32)
            options |= {"cu_seqlens_q": starts, "cu_seqlens_kv": starts}
            batch = ()
        shapes = {"q": (64, 8, length, *batch), "k": (64, 4, length, *batch), "v": (64, 4, length, *batch)}
        arrays = {key: np.zeros(shape, numpy_dtype("bfloat16"), order="F") for key, shape in shapes.items()}
        config = configure(rank, SIZE, arrays, options, (None, None))
        found |= set(problems(config, method, arrays["q"], options, {"backward": direction == "backward"}))
    assert found
    for problem in found:
        assert not why_not(problem, version, gpus.capability("h200")), problem
        plan = planned(plan_problem, problem, "h200")
        assert isinstance(plan, PlanInfo), (problem, plan)
