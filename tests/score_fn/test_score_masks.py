"""Masks within score functions: every way to write one equals a mask function."""

import numpy as np
import pytest
from cases import as_float
from planner import plan_problem

from cupy_sdpa import attention, attention_vjp, problem
from cupy_sdpa.plans.plan import PlanInfo
from cupy_sdpa.problem.band import Band

INF = np.inf
#: A bias with masked keys.
BIAS = np.where(np.arange(20) % 3 == 1, -INF, 0.25)
#: name -> a score function that masks keys after the query, and the score of the other keys; it may read the array ``t``.
CAUSAL = {
    "score": (lambda s, b, h, i, j: np.where(i >= j, s, -INF), lambda s, *_: s),
    "opposite": (lambda s, b, h, i, j: np.where(i < j, -INF, s), lambda s, *_: s),
    "constant": (lambda s, b, h, i, j: np.where(i >= j, 1.0, -INF), lambda s, *_: 1.0),
    "positions": (lambda s, b, h, i, j: np.where(i >= j, -0.1 * (i - j), -INF), lambda s, b, h, i, j: -0.1 * (i - j)),
    "term": (lambda s, b, h, i, j: s + np.where(i >= j, 0, -INF), lambda s, *_: s),
    "first term": (lambda s, b, h, i, j: np.where(i < j, -INF, 0.5) + 2 * s, lambda s, *_: 2 * s + 0.5),
    "difference": (lambda s, b, h, i, j: s - np.where(i >= j, 0.0, INF), lambda s, *_: s),
    "minus": (lambda s, b, h, i, j: -np.where(i >= j, -s, INF), lambda s, *_: s),
    "minimum": (lambda s, b, h, i, j: np.minimum(s, np.where(i >= j, INF, -INF)), lambda s, *_: s),
    "nested": (lambda s, b, h, i, j: np.where(i >= j, np.where(i - j < 30, s, -INF), -INF), lambda s, *_: s),
    "within": (lambda s, b, h, i, j: np.where(h > 0, np.where(i >= j, s, -INF), np.where(i < j, -INF, 1.0)),
               lambda s, b, h, i, j: np.where(h > 0, s, 1.0)),
    "finite": (lambda s, b, h, i, j: np.where(i >= j, s, -1e9), lambda s, *_: s),
}  # fmt: skip
#: name -> a score function and an equal score function with a mask function.
OTHERS = {
    "everything": (lambda s, *_: np.where(False, s, -INF), lambda s, *_: s, lambda b, h, i, j: j < 0),
    "folded": (lambda s, b, h, i, j: np.where(0 * i > 0, 1.0, -INF), lambda s, *_: s, lambda b, h, i, j: j < 0),
    "infinity": (lambda s, *_: -INF, lambda s, *_: s, lambda b, h, i, j: j < 0),
    "finite number": (lambda s, *_: -1e9, lambda s, *_: s, lambda b, h, i, j: j < 0),
    "nothing": (lambda s, *_: np.where(True, s, -INF), lambda s, *_: s, lambda b, h, i, j: j >= 0),
    "bias": (lambda s, b, h, i, j, t: s + t[j], lambda s, *_: s + 0.25, lambda b, h, i, j: j % 3 != 1),
    "logarithm": (lambda s, b, h, i, j, t: s + np.log(t[j] + 1.75) * 1.0, lambda s, *_: s + np.log(2.0), lambda b, h, i, j: j % 3 != 1),
}  # fmt: skip


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("name", [*CAUSAL, *OTHERS])
def test_a_mask_in_a_score_function_equals_a_mask_function(name, softcap):
    """Output and gradients, also with a softcap, which is applied after the function."""
    plus = {"softcap": softcap}
    if name in CAUSAL:
        masking, score_mod = CAUSAL[name]
        mask_mod = lambda b, h, i, j: i >= j  # noqa: E731
    else:
        masking, score_mod, mask_mod = OTHERS[name]
    if name in ("bias", "logarithm"):
        plus["tensors"] = {"t": BIAS if name == "bias" else np.where(BIAS < 0, -1.75, 0.25)}
    rng = np.random.default_rng(0)
    q, k, v, dout = (np.asfortranarray(rng.standard_normal((8, 2, 20, 1))) for _ in range(4))
    out, pullback = attention_vjp(q, k, v, score_mod=masking, **plus)
    want, own = attention_vjp(q, k, v, score_mod=score_mod, mask_mod=mask_mod, softcap=softcap)
    for got, wanted in zip((out, *pullback(dout)), (want, *own(dout)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["constant", "term", "within", "everything", "bias"])
def test_masks_with_a_softcap_on_the_fake_gpu(name, fake):
    """The fake GPU's results are those of the CPU engine."""
    rng = np.random.default_rng(0)
    host = [np.asfortranarray(rng.standard_normal((16, 2, 20, 1)).astype(np.float16)) for _ in range(4)]
    masking = (CAUSAL | OTHERS)[name][0]
    results = []
    for xp in (np, fake):
        q, k, v, dout = map(xp.asarray, host)
        plus = {"tensors": {"t": xp.asarray(BIAS.astype(np.float32))}} if name == "bias" else {}
        out, pullback = attention_vjp(q, k, v, score_mod=masking, softcap=5.0, **plus)
        results.append([as_float(x) for x in (out, *pullback(dout))])
    for got, wanted in zip(*results, strict=True):
        np.testing.assert_allclose(got, wanted, atol=4e-3)


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_mask_in_a_score_function_is_a_band(name):
    """Conditions on the distance become causal=True, however they are written; finite masks are masks by value."""
    shape = (64, 2, 128, 1)
    band = problem(shape, shape, shape, dtype="bfloat16", score_mod=CAUSAL[name][0]).settings.band
    assert band == {"within": None, "finite": None, "nested": Band(29, 0)}.get(name, Band(None, 0))


#: name -> a score function that masks by the score that it receives.
OF_SCORE = {
    "constant": lambda s, *_: np.where(s > 0, -INF, 1.0),
    "score": lambda s, *_: np.where(s > 0, s, -INF),
    "term": lambda s, *_: s + np.where(s > -0.6, 0, -INF),
    "position": lambda s, b, h, i, j: np.where(s > i - 1.5, s, -INF),
    "distance": lambda s, *_: np.where(abs(s) < 1, s, -INF),
    "minus": lambda s, *_: -np.where(s > 0, -s, INF),
    "minimum": lambda s, *_: np.minimum(s, np.where(s > 0, INF, -INF)),
    "both": lambda s, b, h, i, j: np.where((i >= j) & (s > -0.5), s, -INF),
    "within a mask": lambda s, b, h, i, j: np.where(i >= j, np.where(s > 0, s, -INF), -INF),
    "around a mask": lambda s, b, h, i, j: np.where(s > 0, np.where(i >= j, s, -INF), 0.5 * s),
    "everything": lambda s, *_: np.where(s > -100, -INF, s),
    "logarithm": lambda s, *_: np.log(np.maximum(s, 0)),
    "quotient": lambda s, *_: -0.1 / np.maximum(s, 0),
    "product": lambda s, *_: 2 * np.where(s > 0, s, -INF) + s * s,
}


def dense(q, k, v, dout, score_mod, softcap):
    """Output, log-sum-exp, dq, dk and dv in float64; the derivative of the function by differences."""
    q, k, v, dout = (x.astype(np.float64).T.swapaxes(1, 2) for x in (q, k, v, dout))
    scores = q @ k.swapaxes(2, 3) / np.sqrt(q.shape[3])

    def modified(scores):
        with np.errstate(divide="ignore"):
            score = np.broadcast_to(score_mod(scores, *np.ogrid[tuple(map(slice, scores.shape))]), scores.shape)
        finite = np.where(np.isneginf(score), 0.0, score)
        return np.where(np.isneginf(score), -INF, softcap * np.tanh(finite / softcap) if softcap else finite)

    s = modified(scores)
    above, below = modified(scores + 1e-6), modified(scores - 1e-6)
    finite = np.isfinite(s) & np.isfinite(above) & np.isfinite(below)
    slope = np.subtract(above, below, where=finite, out=np.zeros(s.shape)) / 2e-6
    weights = np.exp(s)
    total = weights.sum(axis=3, keepdims=True)
    p = weights / np.where(total == 0, 1, total)
    out, dp = p @ v, dout @ v.swapaxes(2, 3)
    ds = p * (dp - (dout * out).sum(axis=3, keepdims=True)) * slope / np.sqrt(q.shape[3])
    stats = np.log(total, where=total > 0, out=np.full_like(total, -INF))[..., 0]
    gradients = ds @ k, ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ dout
    return [x.swapaxes(1, 2).T for x in (out, *gradients)], stats.T


def results(arrays, score_mod, softcap, **plus):
    """Output and gradients, and the log-sum-exp, of the engine of the arrays."""
    *operands, dout = arrays
    out, pullback = attention_vjp(*operands, score_mod=score_mod, softcap=softcap, **plus)
    _, stats = attention(*operands, score_mod=score_mod, softcap=softcap, return_stats=True, **plus)
    return [as_float(x) for x in (out, *pullback(dout))], as_float(stats)


def check_results(got, want, tolerance):
    """Compare with the dense results; output and dq of fully masked rows are exactly 0, and the log-sum-exp -inf."""
    for found, wanted in zip((*got[0], got[1]), (*want[0], want[1]), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)
    for rows in got[0][:2]:
        assert not rows.swapaxes(1, 2)[:, np.isneginf(want[1])].any()


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("name", OF_SCORE)
def test_a_condition_on_the_score_reads_the_score_that_the_function_receives(name, softcap):
    """Output, log-sum-exp and gradients are those of the dense formula, also of fully masked rows and with a softcap."""
    rng = np.random.default_rng(0)
    arrays = [np.asfortranarray(rng.standard_normal((8, 2, 20, 1))) for _ in range(4)]
    check_results(results(arrays, OF_SCORE[name], softcap), dense(*arrays, OF_SCORE[name], softcap), 1e-5)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_conditions_on_the_score_on_the_fake_gpu(fake, softcap):
    """The kernels compute the dense formula for every function."""
    rng = np.random.default_rng(0)
    arrays = [np.asfortranarray(rng.standard_normal((16, 2, 20, 1)).astype(np.float16)) for _ in range(4)]
    for score_mod in OF_SCORE.values():
        check_results(results(list(map(fake.asarray, arrays)), score_mod, softcap), dense(*arrays, score_mod, softcap), 1e-2)


def test_random_conditions_on_the_score():
    """Random sums, selections and comparisons of the score and the positions equal the dense formula."""
    rng = np.random.default_rng(1)
    arrays = [np.asfortranarray(rng.standard_normal((8, 1, 9, 1))) for _ in range(4)]
    for _ in range(60):
        low, high, slope = rng.normal(size=3).round(2)
        compare, join = rng.choice([np.less, np.greater]), rng.choice([np.logical_and, np.logical_or])
        hidden, finite = rng.choice([-INF, 0.5, 0.0], 3), rng.choice(3)

        def score_mod(s, b, h, i, j, low=low, high=high, slope=slope, compare=compare, join=join, hidden=hidden, finite=finite):
            condition = join(compare(s, low), i - j * 1.0 > high * 3)
            inner = np.where(compare(slope * s, high - 0.1 * j), (s, 1.0, s * s)[finite], hidden[0])
            return np.where(condition, inner, hidden[1]) + np.where(i >= j, s, hidden[2])

        softcap = [None, 3.0][rng.integers(2)]
        check_results(results(arrays, score_mod, softcap), dense(*arrays, score_mod, softcap), 1e-5)


@pytest.mark.parametrize("gpu", ["h200", "a100"])
@pytest.mark.parametrize("backward", [False, True])
def test_cudnn_plans_conditions_on_the_score(planned, gpu, backward):
    """Forward and backward, also with a softcap and lengths that are no multiple of a tile."""
    shape = (64, 2, 100, 1)
    for name, softcap in (("position", None), ("around a mask", 3.0)):
        asked = problem(shape, shape, shape, dtype="float16", score_mod=OF_SCORE[name], softcap=softcap, backward=backward)
        plan = planned(plan_problem, asked, gpu)
        assert isinstance(plan, PlanInfo), plan
