"""The derivatives of score functions: each rule, random functions, and gradients of captured arrays."""

import contextlib

import numpy as np
import pytest
from functions import HKV, HQ, LEARNED, OPERATIONS, ZOO, B, agrees, arrays, drawn, right_on_the_gpu
from planner import library_version, plan_problem

from cupy_sdpa import Unsupported, attention, attention_backward, attention_vjp, explain, problem, zoo
from cupy_sdpa.calls.arguments import read_backward
from cupy_sdpa.calls.call import Call
from cupy_sdpa.graph.attention_backward import backward
from cupy_sdpa.graph.emit import COMPOSED
from cupy_sdpa.graph.nodes import POINTWISE
from cupy_sdpa.plans.plan import PlanInfo
from cupy_sdpa.problem import subproblems
from cupy_sdpa.score_fn.autodiff import RULES
from cupy_sdpa.support import gpus
from cupy_sdpa.support.why_not import why_not

#: The modes whose result is differentiable; including identity, which functions do not contain.
SMOOTH = sorted(
    set(RULES) - {"floor", "ceil", "gen_index", "logical_and", "logical_or"} - {m for m in RULES if m[:4] == "cmp_"}
)


def test_every_operation_has_its_derivative():
    """Every differentiable mode has a rule."""
    assert set(RULES) == set(POINTWISE) | set(COMPOSED)


def _operands(mode):
    return range({**POINTWISE, "hypot": 2, "log1p": 1, "expm1": 1, "binary_select": 2}[mode])


@pytest.mark.parametrize(("mode", "operand"), [(m, n) for m in SMOOTH if m != "identity" for n in _operands(m)])
def test_a_mistake_in_any_rule_is_caught(mode, operand, monkeypatch):
    """A derivative with respect to either operand that is 10 % too large is detected by some function."""
    right = RULES[mode]

    def wrong(*arguments):
        gradients = list(right(*arguments))
        gradients[operand] = gradients[operand]._replace(factor=gradients[operand].factor * 1.1)
        return gradients

    def shows(functions):
        steps = problem((8, 4, 20, 2), (8, 2, 20, 2), (8, 2, 20, 2), dtype="float32", **functions.options(q=20, kv=20)).settings
        if mode not in {step.mode for step in (steps.program.steps if steps.program else ())}:
            return False
        try:
            agrees(functions, s=20)
        except AssertionError:
            return True
        return False

    monkeypatch.setitem(RULES, mode, wrong)
    backward.cache_clear()
    try:
        assert any(shows(functions) for functions in [*OPERATIONS, *ZOO])
    finally:
        backward.cache_clear()


def by_seed(seed):
    """The random function with a seed."""
    rng = np.random.default_rng(seed)
    return drawn(lambda options: options[rng.integers(len(options))])


@pytest.mark.gpu
@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(80))
def test_random_functions_are_right_on_the_gpu(seed, cupy):
    """Both passes, compared with the same function in float64."""
    functions = by_seed(seed)
    known, there = (functions.options(xp, q=200, kv=200) for xp in (np, cupy))
    right_on_the_gpu(cupy, "bfloat16", known, there)


# Gradients of captured arrays


@pytest.mark.parametrize("functions", LEARNED, ids=str)
def test_gradients_of_arrays_match_finite_differences(functions):
    """Along random directions."""
    q, k, v, dout = arrays(s=30)
    options = functions.options(q=30, kv=30)
    options["tensors"] = {name: x.astype(np.float64) for name, x in options["tensors"].items()}
    out, stats = attention(q, k, v, return_stats=True, **options)
    gradients = attention_backward(dout, q, k, v, out, stats, return_dtensors=True, **options)[-1]
    rng = np.random.default_rng(5)
    for name, x in options["tensors"].items():
        assert (gradients[name].shape, gradients[name].dtype) == (x.shape, x.dtype)
        for _ in range(3):
            direction = rng.standard_normal(x.shape)
            moved = [
                {**options, "tensors": options["tensors"] | {name: np.asarray(x + step * direction)}} for step in (1e-5, -1e-5)
            ]
            above, below = (float((attention(q, k, v, **given) * dout).sum()) for given in moved)
            size = float(np.abs(gradients[name] * direction).sum())
            np.testing.assert_allclose((above - below) / 2e-5, (gradients[name] * direction).sum(), rtol=0, atol=1e-5 * size)


@pytest.mark.parametrize(
    ("name", "launched"), [("bias", 1), ("added_before", 1), ("added_behind", 2), ("kerple", 3), ("pairs", 3)]
)
def test_arrays_share_a_launch_where_they_can(name, launched):
    """An array whose derivative equals that of the product of q and k shares its subproblem; any other has its own."""
    (functions,) = (functions for functions in LEARNED if functions.name == name)
    q, k, v, _ = arrays(s=30)
    report = explain(q, k, v, backward=True, return_dtensors=True, **functions.options(q=30, kv=30))
    assert len(report.launches or (report,)) == launched
    assert str(report).count("and then") == launched - 1
    assert report._repr_html_().count("runs on the CPU") == launched
    parts = subproblems.subproblems(report.problem) if launched == 1 else [part.problem for part in report.launches]
    assert [len(part.ds_reductions) for part in parts] == ([1] if launched == 1 else [0] + [1] * (launched - 1))


@pytest.mark.parametrize("functions", LEARNED, ids=str)
def test_further_launches_leave_the_gradients_of_q_k_and_v(functions):
    """They are those of the first subproblem, whichever gradients are requested, and are written to the preallocated arrays."""
    q, k, v, dout = arrays(s=30)
    options = functions.options(q=30, kv=30)
    out, stats = attention(q, k, v, return_stats=True, **options)
    alone = attention_backward(dout, q, k, v, out, stats, **options)
    dq = np.full_like(q, np.nan)
    *gradients, _ = attention_backward(dout, q, k, v, out, stats, dq=dq, return_dtensors=True, **options)
    assert gradients[0] is dq
    for a, b in zip(gradients, alone, strict=True):
        np.testing.assert_array_equal(a, b)


def test_every_launch_is_planned_before_the_first_runs(monkeypatch):
    """If the second subproblem is refused, nothing has been written."""
    (functions,) = (functions for functions in LEARNED if functions.name == "kerple")
    q, k, v, dout = arrays(s=30)
    options = functions.options(q=30, kv=30)
    out, stats = attention(q, k, v, return_stats=True, **options)
    call = read_backward(q, k, v, options, dout=dout, out=out, stats=stats, return_dtensors=True)
    asked, ran = [], []

    def with_plan(given, device, run):
        asked.append(given.settings.gradient_of)
        if len(asked) > 1:
            raise Unsupported("no engine")

    monkeypatch.setattr(call, "on_gpu", True)
    monkeypatch.setattr("cupy_sdpa.calls.call.with_plan", with_plan)
    monkeypatch.setattr("cupy_sdpa.device.cupy_runtime.on_device_of", lambda array: contextlib.nullcontext(0))
    monkeypatch.setattr(Call, "_run", lambda self, device, memory: ran.append(self.problem))
    with pytest.raises(Unsupported, match="no engine"):
        call.run()
    assert (asked, ran) == (["", "t0"], [])


def test_only_requested_gradients_are_returned():
    """Names select them; an array that only a mask function reads, or that no score depends on, has the gradient 0."""
    q, k, v, dout = arrays(s=30)
    options = next(f for f in LEARNED if f.name == "kerple").options(q=30, kv=30)
    _, pullback = attention_vjp(q, k, v, return_dtensors=["r2"], **options)
    assert set(pullback(dout)[3]) == {"r2"}
    cut = {"mask_mod": lambda b, h, i, j, x: x[j] > 0.5, "tensors": {"x": np.linspace(0, 1, 30)}}
    _, pullback = attention_vjp(q, k, v, return_dtensors="x", **cut)
    assert not pullback(dout)[3]["x"].any()


@pytest.mark.parametrize(
    ("wanted", "error", "text"),
    [("y", ValueError, "names 'y'; tensors has x, n"), (["n"], TypeError, "'n', which is int32: only floating-point")],
    ids=["unknown", "whole"],
)
def test_gradients_of_missing_or_integer_arrays_raise(wanted, error, text):
    """An array that does not exist, and an integer array."""
    q, k, v, dout = arrays(s=30)
    tensors = {"x": np.ones(HQ), "n": np.ones(HQ, np.int32)}
    _, pullback = attention_vjp(
        q, k, v, score_mod=lambda s, b, h, i, j, x, n: s * x[h] + n[h], tensors=tensors, return_dtensors=wanted
    )
    with pytest.raises(error, match=text):
        pullback(dout)


@pytest.mark.parametrize("option", [{"softcap": 2.0}, {"score_mod": zoo.quadratic(0.3)}], ids=["softcap", "score_mod"])
def test_the_gradient_of_a_bias_with_a_score_function(option):
    """The bias is added after the score function, so its gradient is the same as without one, in its own subproblem."""
    q, k, v, dout = arrays(s=30)
    bias = np.asfortranarray(np.random.default_rng(1).standard_normal((30, 30, HQ, 1)))
    out, stats = attention(q, k, v, bias=bias, return_stats=True, **option)
    dbias = attention_backward(dout, q, k, v, out, stats, bias=bias, return_dbias=True, **option)[3]
    direction = np.asfortranarray(np.random.default_rng(2).standard_normal(bias.shape))
    above, below = ((attention(q, k, v, bias=bias + step * direction, **option) * dout).sum() for step in (1e-5, -1e-5))
    np.testing.assert_allclose((above - below) / 2e-5, (dbias * direction).sum(), rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("functions", LEARNED, ids=str)
def test_gradients_of_arrays_are_right_on_the_gpu(functions, dtype, cupy):
    """Every subproblem, with memory full of NaN."""
    known, there = (functions.options(xp, q=200, kv=200) for xp in (np, cupy))
    right_on_the_gpu(cupy, dtype, known, there, return_dtensors=True)


@pytest.mark.cudnn
@pytest.mark.parametrize("functions", LEARNED, ids=str)
def test_gradients_of_arrays_are_planned(functions, planned):
    """Every subproblem has a plan, except those that the table refuses."""
    shapes = (64, HQ, 200, B), (64, HKV, 200, B), (64, HKV, 200, B)
    asked = problem(*shapes, dtype="bfloat16", backward=True, return_dtensors=True, **functions.options(q=200, kv=200))
    others = [name for name in gpus.REPRESENTATIVES if name != "h200"]
    for part in subproblems.subproblems(asked):
        for gpu in ("h200", others[LEARNED.index(functions) % len(others)]) if part.ds_reductions else ():
            plan = planned(plan_problem, part, gpu)
            reasons = why_not(part, planned(library_version), gpus.capability(gpu))
            assert {reason.rule for reason in reasons} <= {"query-numbers"}
            assert isinstance(plan, PlanInfo) == (not reasons), plan


def test_gradients_of_an_array_with_packed_sequences():
    """On the CPU engine one packed sequence gives the same gradients as the same sequence unpacked."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (np.asfortranarray(rng.standard_normal((8, 2, 5), np.float32)) for _ in range(4))
    options = {"score_mod": lambda s, b, h, i, j, gain: s * gain[h], "tensors": {"gain": np.array([0.5, 2.0], np.float32)}}
    starts = np.array([0, 5], np.int32)
    packed = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": 5, "max_seqlen_kv": 5}
    _, pullback = attention_vjp(q, k, v, **options, **packed, return_dtensors=True)
    _, unpacked = attention_vjp(q[..., None], k[..., None], v[..., None], **options, return_dtensors=True)
    *got, tensors = pullback(dout)
    *expected, expected_tensors = unpacked(dout[..., None])
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other[..., 0], atol=1e-6)
    np.testing.assert_allclose(tensors["gain"], expected_tensors["gain"], atol=1e-6)
