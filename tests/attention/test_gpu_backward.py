"""The backward pass on a GPU: gradients are as accurate as their precision allows, and the behavior of the calls."""

from dataclasses import replace

import numpy as np
import pytest
from cases import FORWARD, HIDDEN_ROWS, Case
from on_gpu import check_backward, gradients_on_gpu, poisoning

import cupy_sdpa.plans.planner
from cupy_sdpa import Unsupported, attention, attention_backward, attention_vjp, explain, get_plan_cache
from cupy_sdpa._cudnn.library import library
from cupy_sdpa.plans.planner import ORDERED_SINCE
from cupy_sdpa.support.known_bugs import BUGS
from cupy_sdpa.support.why_not import why_not

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=["default", "deterministic"])
@pytest.mark.parametrize("case", FORWARD, ids=str)
def test_every_case(case, options, cupy):
    """Every named case: gradients within twice the naive computation's error, or refused by the table."""
    q, k, v = case.arrays()
    if why_not(case.problem(), library().version, 90):
        case = replace(case, stats=True)  # options that only the forward pass has
    reasons = {reason.rule for reason in why_not(case.gradient_problem(**options), library().version, 90)}
    if reasons:
        with pytest.raises(Unsupported):
            check_backward(cupy, case, q, k, v, **options)
    less = {
        "deterministic-sinks": "return_dsinks", "packed-sinks-gradient": "return_dsinks",
        "dropout-sinks-gradient": "return_dsinks", "bias-gradient": "return_dbias",
    }  # fmt: skip
    if reasons <= set(less):
        check_backward(cupy, case, q, k, v, **options, **{less[rule]: False for rule in reasons})


@pytest.mark.parametrize("case", HIDDEN_ROWS, ids=str)
def test_rows_that_attend_only_to_the_sink(case, cupy):
    """Rows that a bias of -inf masks, with sinks, have gradients of 0."""
    reasons = {reason.rule for reason in why_not(case.gradient_problem(), library().version, 90)}
    less = {"packed-sinks-gradient": "return_dsinks", "bias-gradient": "return_dbias"}
    check_backward(cupy, case, *case.arrays(), **{less[rule]: False for rule in reasons})


def scored(case, score):
    """Inputs of a case whose scores, and so the log-sum-exp, are near a number."""
    rng = np.random.default_rng(5)
    size = np.sqrt(abs(score) / np.sqrt(case.d))
    shapes = case.shapes
    q, k = (size + 0.05 * rng.standard_normal(shape) for shape in shapes[:2])
    dtype = case.arrays()[2].dtype
    return [np.asfortranarray(x.astype(dtype)) for x in (np.sign(score) * q, k, rng.standard_normal(shapes[2]))]


LENGTHS = [(1, 64), (1, 128), (1, 320), (64, 192), (100, 64), (128, 448), (256, 128), (100, 333), (7, 1)]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("score", [-110, -100, 100])
@pytest.mark.parametrize(("sq", "skv"), LENGTHS)
def test_extreme_log_sum_exps(sq, skv, score, causal, cupy):
    """A log-sum-exp near -100 or +100 gives no NaN and no wrong gradient, with any lengths (known Hopper bugs, guarded)."""
    case = Case(f"extreme_{sq}_{skv}", d=128, hq=4, hkv=2, sq=sq, skv=skv, b=1, causal=causal)
    check_backward(cupy, case, *scored(case, score))


@pytest.mark.parametrize(("sq", "skv"), LENGTHS[:6])
def test_the_known_bugs_are_where_the_table_has_them(sq, skv, cupy, monkeypatch):
    """Without the guards there is NaN exactly where the table lists a bug of this cuDNN."""
    case = Case(f"bug_{sq}_{skv}", d=128, hq=4, hkv=2, sq=sq, skv=skv, b=1)
    q, k, v = scored(case, -110)
    version = library().version
    met = {bug.name for bug in BUGS if bug.affects(case.gradient_problem(), version, 90)}
    monkeypatch.setattr(cupy_sdpa.plans.planner, "guards", lambda *_: frozenset())
    get_plan_cache().clear()
    dq, dk, dv = gradients_on_gpu(cupy, case, case.dout(), q, k, v)
    get_plan_cache().clear()
    assert np.isnan(dq.astype(np.float32)).any() == ("backward-key-tail" in met)
    if version <= 92501 or skv % 128 == 0:  # since 9.26 only multiples of 128 have the bug; the guard covers all
        assert np.isnan(dk.astype(np.float32)).any() == np.isnan(dv.astype(np.float32)).any() == ("backward-query-tail" in met)


def random_inputs(cupy, case):
    """q, k, v, dout, out and stats on the GPU."""
    q, k, v, dout = (cupy.asarray(x) for x in (*case.arrays(), case.dout()))
    out, stats = attention(q, k, v, causal=case.causal, return_stats=True)
    return q, k, v, dout, out, stats


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("way", ["quadratic", "second_engine", "ordered"])
def test_deterministic_gradients_are_the_same_bits(way, causal, cupy):
    """Every deterministic method gives the same bits in eight runs; the workspace limit selects the method."""
    case = Case("deterministic", d=128, hq=16, hkv=4, sq=2048, b=1, causal=causal)
    q, k, v, dout, out, stats = random_inputs(cupy, case)
    options = {"causal": causal, "deterministic": True, "max_workspace": 100 << 20 if way == "ordered" else None}
    report = explain(q, k, v, backward=True, **options)
    if way == "second_engine":  # slightly less than the first method needs
        options["max_workspace"] = report.workspace - 1
        report = explain(q, k, v, backward=True, **options)
        assert report.plan.engine == 7
    if way == "ordered" and library().version < ORDERED_SINCE:
        assert not report
        assert any("9.25.1 or newer and a Hopper GPU" in reason for reason in report.reasons)
        return
    assert (report.workspace <= 100 << 20) == (way == "ordered")
    runs = [attention_backward(dout, q, k, v, out, stats, **options) for _ in range(8)]
    for run in runs[1:]:
        for a, b in zip(run, runs[0], strict=True):
            assert (a.view("u2") == b.view("u2")).all()
    default = attention_backward(dout, q, k, v, out, stats, causal=causal)
    for a, b in zip(runs[0], default, strict=True):
        assert float(cupy.abs(a.astype("f4") - b.astype("f4")).max()) <= 0.02 * float(cupy.abs(b.astype("f4")).max())


def test_dk_and_dv_are_the_same_bits_in_every_run(cupy):
    """By default only dq is accumulated in any order."""
    q, k, v, dout, out, stats = random_inputs(cupy, Case("default_order", d=128, hq=8, hkv=2, sq=1024, b=1))
    runs = [attention_backward(dout, q, k, v, out, stats) for _ in range(5)]
    for run in runs[1:]:
        for a, b in zip(run[1:], runs[0][1:], strict=True):
            assert (a.view("u2") == b.view("u2")).all()


def test_one_allocation_holds_workspace_and_scratch(cupy):
    """Besides the gradients one block is allocated from CuPy's allocator, of the predicted size, and released."""
    q, k, v, dout, out, stats = random_inputs(cupy, Case("allocated", d=128, hq=8, hkv=2, sq=512, b=1))
    need = explain(q, k, v, backward=True).workspace
    assert need >= q.size * 4  # dq is accumulated in float32
    sizes = []
    with poisoning(cupy, sizes):
        gradients = attention_backward(dout, q, k, v, out, stats)
    assert sorted(sizes) == sorted([need, *(x.nbytes for x in gradients)])
    assert not any(cupy.isnan(x).any() for x in gradients)


def test_explain_and_the_call_share_a_plan(cupy):
    """One miss for the report, then only hits, and the same workspace."""
    q, k, v, dout, out, stats = random_inputs(cupy, Case("explained", sq=99, hkv=2))
    kept = get_plan_cache()
    kept.clear()
    report = explain(q, k, v, backward=True)
    attention_backward(dout, q, k, v, out, stats)
    assert (kept.hits, kept.misses, len(kept)) == (1, 1, 1)
    for words in ("backward attention", "dK = dSᵀ Q", "runs on cuDNN", f"workspace        {report.workspace} bytes"):
        assert words in str(report)


def test_a_workspace_limit_refuses_before_anything_runs(cupy):
    """A limit below the need of every engine raises with both sizes; preallocated gradients are unchanged."""
    q, k, v, dout, out, stats = random_inputs(cupy, Case("limited", hkv=2))
    dq = cupy.full(q.shape, np.nan, q.dtype, order="F")
    with pytest.raises(Unsupported, match=r"needs a workspace of \d+ bytes, 1000 are allowed"):
        attention_backward(dout, q, k, v, out, stats, max_workspace=1000, dq=dq)
    assert cupy.isnan(dq).all()
    assert explain(q, k, v, backward=True, max_workspace=1000).workspace is None


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        pytest.param(
            lambda cp, a: {"dout": cp.ascontiguousarray(a["dout"])},
            ValueError,
            r"dout .*axis 0 must be contiguous",
            id="dout_in_c_order",
        ),
        pytest.param(
            lambda cp, a: {"stats": cp.ascontiguousarray(a["stats"])}, ValueError, r"stats has strides", id="stats_in_c_order"
        ),
        pytest.param(
            lambda cp, a: {"dout": a["dout"].astype("f4")},
            TypeError,
            r"dout is float32; it must be bfloat16",
            id="dout_float32",
        ),
        pytest.param(
            lambda cp, a: {"stats": a["stats"][:5]}, ValueError, r"stats has shape \(5, 4, 2\)", id="stats_of_another_call"
        ),
        pytest.param(lambda cp, a: {"dq": a["q"]}, ValueError, r"dq overlaps q", id="dq_is_q"),
        pytest.param(lambda cp, a: {"dk": a["dk"], "dv": a["dk"]}, ValueError, r"dk overlaps dv", id="dk_is_dv"),
        pytest.param(lambda cp, a: {"out": cp.asnumpy(a["out"])}, TypeError, r"out is a numpy array", id="numpy_out"),
    ],
)
def test_bad_arguments_raise(change, error, words, cupy):
    """The message contains the value, the requirement and the remedy."""
    q, k, v, dout, out, stats = random_inputs(cupy, Case("mistaken"))
    arrays = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "stats": stats}
    changed = change(cupy, arrays | {"dk": cupy.empty_like(k)})
    with pytest.raises(error, match=words):
        attention_backward(**(arrays | changed))


def test_the_pullback(cupy):
    """attention_vjp returns the forward result; the pullback can be called repeatedly."""
    case = Case("pulled", d=64, hq=8, hkv=2, sq=200, causal=True)
    q, k, v, dout, out, stats = random_inputs(cupy, case)
    got, pullback = attention_vjp(q, k, v, causal=True, deterministic=True)
    assert (got.view("u2") == out.view("u2")).all()
    first, second = pullback(dout), pullback(dout)
    for a, b in zip(first, second, strict=True):
        assert (a.view("u2") == b.view("u2")).all()
    assert pullback.nbytes == sum(x.nbytes for x in (q, k, v, out, stats))
