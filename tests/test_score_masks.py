"""Masks within score functions: every way to write one equals a mask function."""

import numpy as np
import pytest
from cases import as_float

from cupy_sdpa import attention_vjp, problem
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
