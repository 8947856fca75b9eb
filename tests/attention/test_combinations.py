"""All options in combination: random cases, evaluated exactly and compared with the reference, and planned by the real cuDNN."""

import os
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from cases import Case, options_of_reference
from exact import evaluated
from hypothesis import HealthCheck, Phase, find, given, seed, settings
from hypothesis import strategies as st
from planner import library_version, plan_problem
from test_sweep import HEAD_DIMS, LONGER, combination

from cupy_sdpa import reference
from cupy_sdpa.calls import arguments
from cupy_sdpa.graph.attention_backward import backward
from cupy_sdpa.graph.attention_forward import forward
from cupy_sdpa.plans.plan import PlanInfo
from cupy_sdpa.problem.problem import ROW_STATS
from cupy_sdpa.problem.subproblems import subproblems
from cupy_sdpa.support import gpus
from cupy_sdpa.support.why_not import why_not

#: The same cases in every run; no database of examples.
EVERY = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
#: Whether to run the tests of about an hour, with two thousand plans.
NIGHTLY = os.environ.get("CUPY_SDPA_NIGHTLY", "0") != "0"
#: Without shrinking, where it would take minutes.
AS_DRAWN = settings(EVERY, phases=[Phase.explicit, Phase.generate])


@st.composite
def cases(draw, **choices):
    """Random combinations of options, with sizes that numpy computes quickly."""
    return combination(lambda options: draw(st.sampled_from(options)), **choices)


class Asked(NamedTuple):
    """A problem to plan with cuDNN."""

    case: Case
    gpu: str
    backward: bool
    deterministic: bool
    dbias: bool
    dsinks: bool

    def problem(self):
        """The problem of a call with arrays on this GPU."""
        case, options = self.case, self.case.options()
        arrays = case.laid_out(case.arrays())
        if not self.backward:
            return arguments.read_shapes(*arrays, options, return_stats=case.stats)
        return arguments.read_shapes(
            *arrays, options, backward=True, deterministic=self.deterministic,
            return_dbias=self.dbias, return_dsinks=self.dsinks,
        )  # fmt: skip


@st.composite
def asked(draw):
    """A case that cuDNN may support, a pass, and a GPU."""
    case, backward = draw(cases(head_dims=HEAD_DIMS, lengths=LONGER)), draw(st.booleans())
    return Asked(
        case,
        draw(st.sampled_from(("h200", *gpus.REPRESENTATIVES))),
        backward,
        backward and draw(st.sampled_from((False, False, True))),
        backward and bool(case.bias) and draw(st.booleans()),
        backward and case.sinks and draw(st.booleans()),
    )


# Exact evaluation: the graph on numpy, compared with the reference


def forward_agrees(case, altered=lambda options: options):
    """Assert that the results equal the reference's; ``altered`` options are passed to the graph only, to inject a fault."""
    case = case.with_dtype("float64")
    arrays, options = case.laid_out(case.arrays()), case.options(dropout_mask=case.kept())
    parts = case.stats == "max_sumexp"
    call = arguments.read_forward(*arrays, altered(options), return_stats=case.stats)
    got = evaluated(call, forward)
    truth = reference.attention(*arrays, **options_of_reference(options), max_sumexp=parts)
    names = ("out", *(ROW_STATS if parts else ("stats",)))
    for name, wanted in zip(names, truth, strict=True):
        if name == "out":
            accuracy = {"rtol": 0, "atol": 1e-12 * max(1, np.abs(arrays[2]).max(), np.abs(wanted).max())}
        else:  # float32; computed from float32 parts, a log-sum-exp near 0 is the difference of larger numbers
            largest = np.abs(np.where(np.isfinite(truth[2]), truth[2], 0)).max() if parts else 0
            accuracy = {"rtol": 1e-6, "atol": 1e-6 * largest + 1e-12}
        if name in got:
            np.testing.assert_allclose(got[name], wanted, **accuracy, err_msg=name)
    assert set(got) == {"out", *(names[1:] if case.stats else ())}


def backward_agrees(case, direct=False, guards=(), altered=lambda options: options):
    """Assert that every gradient equals the reference's; arguments as for :func:`forward_agrees` and the graph."""
    case = replace(case.with_dtype("float64"), bias_dtype=None)
    arrays, options = case.laid_out(case.arrays()), case.options(dropout_mask=case.kept())
    (dout,) = case.laid_out([case.dout()])
    known = options_of_reference(options)
    out, stats = reference.attention(*arrays, **known)
    exact = 1e-10
    given_stats = stats
    if case.bias or case.sinks or case.seq_lens_q or case.seq_lens_kv:  # it is converted to float32
        exact, given_stats = 2e-5, np.asfortranarray(stats.astype(np.float32))
    call = arguments.read_backward(*arrays, altered(options), dout=dout, out=np.asfortranarray(out), **case.gradients)
    call.arrays["stats"] = given_stats
    got = evaluated(call, lambda given: backward(given, direct, frozenset(guards)))
    truth = reference.attention_backward(dout, *arrays, **known, **case.gradients)
    for (name, gradient), wanted in zip(got.items(), truth, strict=True):
        size = exact * max(1, np.abs(wanted).max())
        np.testing.assert_allclose(gradient, wanted, rtol=1e-6 if name == "dsinks" else 0, atol=size, err_msg=name)


#: The methods to compute gradients, and the guards: all give the same results.
WAYS = (st.booleans(), st.sampled_from([(), ("keys", "queries"), ("keys",), ("queries",)]))


@settings(EVERY, max_examples=150)
@given(cases())
def test_any_combination_matches_the_reference(case):
    """Exact evaluation of the graph, for any combination of options."""
    forward_agrees(case)


@settings(EVERY, max_examples=150)
@given(cases(), *WAYS)
def test_gradients_of_any_combination_match_the_reference(case, direct, guards):
    """Every method to compute them, with any guards."""
    backward_agrees(case, direct, guards)


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(4))
def test_many_combinations_match_the_reference(part):
    """Both passes of many more combinations."""

    @seed(part)
    @settings(EVERY, max_examples=500)
    @given(cases(), *WAYS)
    def agree(case, direct, guards):
        forward_agrees(case)
        backward_agrees(case, direct, guards)

    agree()


#: Options whose absence must be detected, and their replacements; arrays with a gradient are replaced by zeros.
LOSSES = {
    "softcap": {"softcap": None},
    "scale": {"scale": None},
    "causal": {"causal": False},
    "window": {"window": None},
    "mask": {"mask": None},
    "bias": {"bias": np.zeros_like},
    "alibi_slopes": {"alibi_slopes": None},
    "sinks": {"sinks": np.zeros_like},
    "dropout_mask": {"dropout_mask": None, "dropout_p": 0.0},
    "seq_lens_q": {"seq_lens_q": None},
    "seq_lens_kv": {"seq_lens_kv": None},
    "cu_seqlens_kv": {"cu_seqlens_kv": lambda begins: np.minimum(begins, begins[-1] - 1)},
}


@pytest.mark.parametrize("agrees", [forward_agrees, backward_agrees], ids=["forward", "backward"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_lost_option_is_detected(name, agrees):
    """A graph that ignores an option differs from the reference in some random case."""

    def altered(options):
        lost = {key: value(options[key]) if callable(value) else value for key, value in LOSSES[name].items() if key in options}
        return options | lost

    def shows(case):
        try:
            agrees(case, altered=altered)
        except AssertionError:
            return True
        return False

    find(cases(), shows, settings=settings(AS_DRAWN, max_examples=150))


# Planned by the real cuDNN for described GPUs


#: Refusals of cuDNN 9.28 that are not in our table, for constructed descriptions: names, problems and GPUs.
ALLOWED = {
    "256-blackwell": lambda p, capability: p.backward and p.sizes[0] == p.sizes[1] == 256 and 100 <= capability < 120,
    "deterministic-packed": lambda p, capability: p.backward and p.packed and p.deterministic and not 90 <= capability < 120,
    "two-head-dims-packed": lambda p, capability: (
        p.backward and p.packed and p.sizes[0] != p.sizes[1] and not 90 <= capability < 120
    ),
}


def check_plan(question, call):
    """Plan a problem that the table allows; no crash, and no refusal that is not listed."""
    problem, capability = question.problem(), gpus.capability(question.gpu)
    assert not problem.trivial
    version = call(library_version)
    if why_not(problem, version, capability):
        return
    for part in subproblems(problem):
        plan = call(plan_problem, part, question.gpu)
        if isinstance(plan, str):
            assert any(known(part, capability) for known in ALLOWED.values()), f"{part}: {plan}"
        else:
            assert isinstance(plan, PlanInfo)


def check_plans(number, first, call):
    """:func:`check_plan` of a number of drawn questions; ``first`` is their seed."""

    @seed(first)
    @settings(AS_DRAWN, max_examples=number)
    @given(asked())
    def check(question):
        check_plan(question, call)

    check()


@pytest.mark.cudnn
@pytest.mark.parametrize("part", range(8))
def test_any_combination_that_the_table_allows_is_planned(part, planned):
    """On every described GPU."""
    check_plans(20, part, planned)


@pytest.mark.cudnn
@pytest.mark.sweep
@pytest.mark.parametrize("part", range(8))
def test_many_combinations_that_the_table_allows_are_planned(part, planner):
    """Many more; every night their kernels are compiled, too."""
    check_plans(250 if NIGHTLY else 100, 100 + part, planner.call if NIGHTLY else planner.accept)
