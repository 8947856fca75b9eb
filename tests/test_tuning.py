"""Tuning: which configs are tried, and how what was found is kept and shown. On a GPU: tests/test_gpu_plans.py."""

import pytest
from cases import Case

from cupy_sdpa.tuning import KNOBS, Trial, Tuning

ASKED = Case("small", d=64, sq=64).problem()


def candidates_of(problem, knobs):
    """In a child: the (engine, knobs, whether heuristics propose it) of every candidate, and those of the plan itself."""
    from cupy_sdpa.offline import described
    from cupy_sdpa.patterns import forward
    from cupy_sdpa.plan import make, searching
    from cupy_sdpa.shelf import Shelf
    from cupy_sdpa.tuning import _candidates

    target, graph = described("h200"), forward(problem)
    plan = make(graph, target, shelf=Shelf(None))
    found = []
    with searching(graph, target) as (search, _):
        for candidate, proposed in _candidates(search, plan, knobs):
            found.append((candidate.engine, candidate.knobs, proposed))
            candidate.close()
    plan.close()
    return (plan.info.engine, plan.info.knobs), found


@pytest.mark.cudnn
@pytest.mark.parametrize("knobs", [False, True], ids=["heuristics", "knobs"])
def test_every_config_is_tried_once(knobs, planner):
    """Not the plan that is there, none twice; by hand only on request, and only knobs that may be touched."""
    own, found = planner.call(candidates_of, ASKED, knobs)
    configs = [(engine, chosen) for engine, chosen, _ in found]
    assert own not in configs
    assert len(configs) == len(set(configs))
    by_hand = [dict(chosen) for _, chosen, proposed in found if not proposed]
    assert bool(by_hand) is knobs
    assert all(set(chosen) & set(KNOBS) for chosen in by_hand)
    assert any(proposed for _, _, proposed in found)


def test_printed_it_is_a_table():
    """The fastest first, wrong results named, the gain in the title; the same in a notebook."""
    trials = (
        Trial(1, (("KERNEL_CFG", 3),), 0, 5.0, True),
        Trial(2, (("KERNEL_CFG", 7),), 256, 6.0, True),
        Trial(1, (("KERNEL_CFG", 25),), 0, None, False),
    )
    found = Tuning(ASKED, trials, before=6.0, after=5.0)
    lines = str(found).splitlines()
    assert lines[0].endswith("6.0 us before, 5.0 us after, 1.20 times as fast")
    assert lines[1].split() == ["time", "engine", "knobs", "workspace", "proposed", "by"]
    assert lines[2].startswith("5.0 us")
    assert "wrong results" in lines[4]
    assert found._repr_html_().count("<tr>") == 4
