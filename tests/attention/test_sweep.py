"""Random problems, and long sweeps, which run only with ``-m sweep``."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from cases import LAYOUTS, Case
from on_gpu import check_backward, check_forward
from planner import plan_graph

from cupy_sdpa import attention, attention_backward
from cupy_sdpa._cudnn.library import library
from cupy_sdpa.device import cupy_runtime
from cupy_sdpa.graph.attention_forward import forward
from cupy_sdpa.plans.plan import PlanInfo
from cupy_sdpa.support.why_not import why_not

pytestmark = pytest.mark.sweep

#: Head dims that cuDNN supports; common ones are more likely.
HEAD_DIMS = (*range(8, 129, 8), *(64, 128) * 6, 192, 256)
#: Short lengths; those at the limits of tiles are more likely.
LENGTHS = (*range(1, 71), *(1, 63, 64, 65) * 8)
LONGER = (*LENGTHS, 127, 128, 129, 300)
#: The axes of a mask or bias with full length: every subset.
AXES = ("-", *("".join(axes) for n in range(1, 5) for axes in itertools.combinations("kqhb", n)))
#: The alignments of a window with each kind of causal mask, so that both are equal.
CORNERS = {False: ((), ("top_left",), ("bottom_right",)), True: ((), ("top_left",)), "bottom_right": ((), ("bottom_right",))}


def combination(pick, head_dims=range(1, 25), lengths=LENGTHS):
    """A case with a random combination of all options; ``pick`` selects from a sequence, whose first element is the simplest.

    The name, which determines the random arrays, is one of a hundred, so that a smaller case has the same numbers.
    """

    def sometimes(values, otherwise):
        return pick(values) if pick((False, False, True)) else otherwise

    d, hkv = pick(head_dims), pick((1, 2, 3))
    if sometimes((True,), False):
        b = pick((1, 2, 3, 4))
        sizes = {"packed": True, "tail": pick((0, 0, 0, 1, 29))}
        for side in ("q", "kv"):
            own = tuple(pick((0, 0, *lengths)) for _ in range(b))
            sizes[f"seq_lens_{side}"] = own if any(own) else (*own[1:], 1)
    else:
        b = pick((1, 2, 3))
        sizes = {"sq": pick(lengths), "skv": pick(lengths), "layout": pick(tuple(LAYOUTS))}
        for side, most in (("q", sizes["sq"]), ("kv", sizes["skv"])):
            if sometimes((True,), False):
                sizes[f"seq_lens_{side}"] = tuple(pick((most, most, 0, *range(most + 1))) for _ in range(b))
    causal = pick((False, False, True, "bottom_right"))
    sides = (None, None, *range(41))
    return Case(
        f"drawn_{pick(range(100))}",
        d=d,
        dv=sometimes(head_dims, d),
        hq=hkv * pick((1, 2, 3)),
        hkv=hkv,
        b=b,
        dtype=pick(("bfloat16", "float16")),
        causal=causal,
        window=(pick(sides), pick(sides), *pick(CORNERS[causal])) if pick((False, False, True)) else None,
        mask=sometimes(AXES, ""),
        bias=sometimes(AXES, ""),
        bias_dtype=pick((None, "float16", "bfloat16", "float32")),
        alibi=sometimes((True,), False),
        softcap=sometimes((0.5, 2.0, 5.0), None),
        sinks=sometimes((True,), False),
        dropout=sometimes((0.25, 0.5), 0.0),
        stats=pick((True, False, "max_sumexp")),
        scale=pick((None, None, 0.3, -0.2, 0.0)),
        **sizes,
    )


def random_case(seed):
    """The case of a seed, with sizes that cuDNN supports."""
    rng = np.random.default_rng(seed)
    return combination(lambda options: options[rng.integers(len(options))], HEAD_DIMS, LONGER)


@pytest.mark.cudnn
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("d", range(8, 257, 8))
def test_every_head_dim_is_planned_for_the_h200(d, causal, planned):
    """Every multiple of 8 up to 256 has a plan with the Hopper kernel."""
    plan = planned(plan_graph, forward(Case(f"d{d}", d=d, sq=256, hq=4, hkv=2, causal=causal).problem()), "h200")
    assert isinstance(plan, PlanInfo), plan
    assert plan.engine == 2


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(150))
def test_random_combinations_are_right_on_the_gpu(seed, cupy):
    """Within the tolerance policy, with results full of NaN before; or refused with the reason of the table."""
    case = random_case(seed)
    arrays = case.laid_out([cupy.asarray(x) for x in case.arrays()])
    if reasons := _objections(case.problem()):
        with pytest.raises(reasons[0].error):
            attention(*arrays, return_stats=case.stats, **case.options(cupy))
        case = replace(case, stats=True)  # the gradients need no maximum
    if not _objections(case.problem()):
        check_forward(cupy, case)
        if reasons := _objections(case.gradient_problem()):
            out, stats = attention(*arrays, return_stats=True, **case.options(cupy))
            with pytest.raises(reasons[0].error):
                attention_backward(out, *arrays, out, stats, **case.options(cupy), **case.gradients)
        else:
            check_backward(cupy, case, *case.arrays())


def _objections(problem):
    return why_not(problem, library().version, cupy_runtime.capability(0))
