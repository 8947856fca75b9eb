"""Masks within score functions: every way to write one equals a mask function."""

import numpy as np
import pytest
from functions import Functions, agrees
from low_scores import close, low_scores

from cupy_sdpa import attention_vjp, problem

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
    "logarithm": (lambda s, b, h, i, j, t: s + np.log(t[j] + 1.75) * 1.0, lambda s, *_: s + np.log(2.0), lambda b, h, i,
    j: j % 3 != 1),
} | {name: (*pair, lambda b, h, i, j: i >= j) for name, pair in CAUSAL.items()}  # fmt: skip


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("name", OTHERS)
def test_a_mask_in_a_score_function_equals_a_mask_function(name, softcap, engine):
    """Output and gradients, also with a softcap, which is applied after the function."""
    masking, score_mod, mask_mod = OTHERS[name]
    plus = {}
    if name in ("bias", "logarithm"):
        plus["tensors"] = {"t": (BIAS if name == "bias" else np.where(BIAS < 0, -1.75, 0.25)).astype(np.float32)}
    q, k, v, dout = (engine.normal(n, 16, 2, 20, 1) for n in range(4))
    out, pullback = attention_vjp(q, k, v, score_mod=masking, softcap=softcap, **engine.put(plus))
    exact = [engine.get(x).astype(np.float64) for x in (q, k, v, dout)]
    want, own = attention_vjp(*exact[:3], score_mod=score_mod, mask_mod=mask_mod, softcap=softcap)
    for got, wanted in zip((out, *pullback(dout)), (want, *own(exact[3])), strict=True):
        np.testing.assert_allclose(engine.get(got), wanted, atol=2 * engine.tolerance)


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_mask_in_a_score_function_is_a_band(name):
    """Conditions on the distance become causal=True, however they are written, also with -1e9 for -inf."""
    shape = (64, 2, 128, 1)
    band = problem(shape, shape, shape, dtype="bfloat16", score_mod=CAUSAL[name][0]).settings.band
    assert (band and band[:2]) == {"within": None, "nested": (29, 0)}.get(name, (None, 0))


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


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the dense formula
@pytest.mark.in_turn(2)
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("name", OF_SCORE)
def test_a_condition_on_the_score_reads_the_score_that_the_function_receives(name, softcap, engine):
    """Output, log-sum-exp and gradients agree with the dense formula, also for fully masked rows and with a softcap."""
    function = Functions(name, OF_SCORE[name])
    if engine.on_cudnn:
        agrees(function, 20, 16, softcap, engine.put, "float16", 1e-2)
    else:
        agrees(function, 20, 8, softcap)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_random_conditions_on_the_score():
    """Random sums, selections and comparisons of the score and the positions equal the dense formula."""
    rng = np.random.default_rng(1)
    for _ in range(20):
        low, high, slope = rng.normal(size=3).round(2)
        compare, join = rng.choice([np.less, np.greater]), rng.choice([np.logical_and, np.logical_or])
        hidden, finite = rng.choice([-INF, 0.5, 0.0], 3), rng.choice(3)

        def score_mod(s, b, h, i, j, low=low, high=high, slope=slope, compare=compare, join=join, hidden=hidden, finite=finite):
            condition = join(compare(s, low), i - j * 1.0 > high * 3)
            inner = np.where(compare(slope * s, high - 0.1 * j), (s, 1.0, s * s)[finite], hidden[0])
            return np.where(condition, inner, hidden[1]) + np.where(i >= j, s, hidden[2])

        agrees(Functions("random", score_mod), 9, 8, [None, 3.0][rng.integers(2)])


#: name -> a score function of scores that are all -2e6, and the score to which it is equal.
LOW = {
    "zeros": (lambda s, b, h, i, j, t: s + t[j], lambda s, b, h, i, j: s),
    "factors": (lambda s, b, h, i, j, t: s * (t[j] + 2), lambda s, b, h, i, j: 2 * s),
    "selection": (lambda s, b, h, i, j, t: np.where(i >= j, s, s + t[j]), lambda s, b, h, i, j: s),
    "minimum": (lambda s, b, h, i, j, t: np.minimum(s, t[j]), lambda s, b, h, i, j: s),
    "maximum": (lambda s, b, h, i, j, t: np.maximum(s, t[j] - 1e9), lambda s, b, h, i, j: s),
    "rounded": (lambda s, b, h, i, j, t: (s + 4e6) - 4e6 + t[j], lambda s, b, h, i, j: s),
    "mask": (lambda s, b, h, i, j, t: s + np.where(i < j, -1e9, t[j]), lambda s, b, h, i, j: np.where(i < j, -INF, s)),
    "product": (lambda s, b, h, i, j, t: s + (i < j) * -1e9 + t[j], lambda s, b, h, i, j: np.where(i < j, -INF, s)),
    "of the score": (lambda s, b, h, i, j, t: np.where(s < 0, s + t[j], -1e9), lambda s, b, h, i, j: s),
}  # fmt: skip


@pytest.mark.parametrize("name", LOW)
def test_a_score_is_not_masked_because_it_is_low(name, engine):
    """Only a term masks, for any score: output, log-sum-exp and the gradients of v."""
    q, k, v = low_scores(engine)
    function, equal = LOW[name]
    zeros = engine.put({"t": np.zeros(20, np.float32)})
    out, pullback = attention_vjp(q, k, v, scale=1.0, score_mod=function, tensors=zeros)
    exact = [engine.get(x).astype(np.float64) for x in (q, k, v)]
    want, own = attention_vjp(*exact, scale=1.0, score_mod=equal)
    np.testing.assert_allclose(engine.get(out), want, atol=2 * engine.tolerance)
    close(engine, pullback(v)[2:], own(exact[2])[2:])
