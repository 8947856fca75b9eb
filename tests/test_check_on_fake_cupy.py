"""Random paged problems of the self-test on the fake CuPy: staging, split keys, our kernels and replay with real graphs."""

import numpy as np
import pytest

from cupy_sdpa.check.cases import draw as drawing
from cupy_sdpa.check.cases.draw import OPTIONS, Limits, _with_required, draw_options, is_valid
from cupy_sdpa.check.verify.execute import execute

#: Options with which keys are split.
SPLIT = ("causal", "window", "window", "seq_lens_q", "seq_lens_q", "sinks", "softcap", "stats", "deterministic", "preallocated")


def names_of(number):
    """The option ``paged``, and up to three others; in two of three cases only those with which keys are split."""
    rng, names = np.random.default_rng([number, 5]), {"paged"}
    others = SPLIT if number % 3 else list(OPTIONS)
    if number % 3 == 1:
        names |= {"seq_lens_q", str(rng.choice(["causal", "window"]))}
    for _ in range(int(rng.integers(0, 4))):
        more = names | {str(rng.choice(others))}
        names = more if is_valid(_with_required(more)) else names
    return names


@pytest.mark.parametrize("number", range(40))
def test_paged_problems_of_the_gpu(number, fake, monkeypatch):
    """Problems as they are drawn for a GPU, with smaller sizes; none fails."""
    monkeypatch.setitem(drawing.LIMITS, "gpu", Limits(20_000, 60_000))
    case = draw_options(names_of(number), number, "gpu")
    outcome = execute(case)
    assert outcome.kind in ("passed", "refused"), f"{outcome.message}\n{case!r}"
