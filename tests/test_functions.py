"""A caller's own score and mask functions: against dense arrays, planned, on the GPU, and what they are keyed by."""

import math

import numpy as np
import pytest
from cases import DTYPES
from functions import HKV, HQ, OPERATIONS, ZOO, B, D, S, dense_attention, dense_gradients
from on_gpu import poisoned, poisoning
from tolerance import accumulation_floor, assert_close, gradient_floor

from cupy_sdpa import attention, attention_backward, patterns, problem, zoo
from cupy_sdpa.band import Band
from cupy_sdpa.derivative import RULES
from cupy_sdpa.graph import POINTWISE

SCALE = 1 / math.sqrt(D)


def arrays(dtype="float64", s=S, d=D):
    """q, k, v and dout."""
    rng = np.random.default_rng(3)
    shapes = ((d, HQ, s, B), (d, HKV, s, B), (d, HKV, s, B), (d, HQ, s, B))
    return [np.asfortranarray(rng.standard_normal(shape).astype(DTYPES[dtype])) for shape in shapes]


@pytest.mark.parametrize("functions", [*ZOO, *OPERATIONS], ids=str)
def test_a_function_is_what_it_says(functions):
    """The graph of a function gives what calling it with whole arrays gives; its gradients, what differences give."""
    q, k, v, dout = arrays()
    options = functions.options()
    out, stats = attention(q, k, v, return_stats=True, **options)
    wanted, of_rows = dense_attention(q, k, v, SCALE, options)
    np.testing.assert_allclose(out, wanted, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(stats, of_rows, rtol=1e-6, atol=1e-6)
    got = attention_backward(dout, q, k, v, wanted, of_rows.astype(np.float32, order="F"), **options)
    for a, b in zip(got, dense_gradients(dout, q, k, v, SCALE, options, functions.slope), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("functions", [*ZOO, *OPERATIONS], ids=str)
def test_a_function_is_right_on_the_gpu(functions, dtype, cupy):
    """Both passes, within the tolerance policy, every element written."""
    q, k, v, dout = arrays(dtype, 200, 64)
    known, on_gpu = (functions.options(xp, q=200, kv=200) for xp in (np, cupy))
    truth, of_rows = dense_attention(q, k, v, 1 / 8, known)
    naive, naive_rows = attention(q, k, v, return_stats=True, **known)
    here = [cupy.asarray(x) for x in (q, k, v)]
    out, stats = poisoned(cupy, truth.shape, q.dtype), poisoned(cupy, of_rows.shape, np.float32)
    with poisoning(cupy):
        attention(*here, out=out, stats=stats, **on_gpu)
    assert_close(cupy.asnumpy(out), truth, naive)
    assert_close(cupy.asnumpy(stats), of_rows, naive_rows, accumulation_floor(q, k, 1 / 8, of_rows, 40.0))
    given = {name: poisoned(cupy, x.shape, x.dtype) for name, x in zip(("dq", "dk", "dv"), (q, k, v), strict=True)}
    with poisoning(cupy):
        got = attention_backward(cupy.asarray(dout), *here, out, stats, **on_gpu, **given)
    wanted = dense_gradients(dout, q, k, v, 1 / 8, known, functions.slope)
    other = attention_backward(dout, q, k, v, naive, naive_rows, **known)
    for a, b, c in zip(got, wanted, other, strict=True):
        assert_close(cupy.asnumpy(a), b, c, gradient_floor(dout, q, k, v, 1 / 8, b, c.dtype))


def test_every_operation_has_its_derivative():
    """A mode without a rule would be found out by a person."""
    assert set(RULES) == set(POINTWISE)


def test_a_wrong_derivative_is_caught(monkeypatch):
    """A mistake planted in a rule shows."""
    patterns.backward.cache_clear()
    monkeypatch.setitem(RULES, "sin", lambda r, g, out, x: [r.times(g, "mul", out)])
    functions = next(f for f in OPERATIONS if f.name == "sin")
    with pytest.raises(AssertionError):
        test_a_function_is_what_it_says(functions)
    patterns.backward.cache_clear()


def asked(**functions):
    """The problem with some functions."""
    return problem((32, 4, 70, 2), (32, 2, 70, 2), (32, 2, 70, 2), dtype="bfloat16", **functions)


def test_a_problem_is_keyed_by_structure():
    """Functions that do the same pose the same problem, whatever their numbers; others do not."""
    assert asked(score_mod=zoo.softcap(2.0)) is asked(score_mod=lambda s, b, h, i, j: 30.0 * np.tanh(s / 30.0))
    assert asked(score_mod=zoo.softcap(2.0)) != asked(score_mod=lambda s, b, h, i, j: 30.0 * np.tanh(s / 20.0))
    one, other = (asked(score_mod=zoo.temperature, tensors={"temperature": np.ones(4, np.float32) * n}) for n in (1, 2))
    assert one is other


@pytest.mark.parametrize(
    ("mask_mod", "band"),
    [
        (zoo.causal, Band(None, 0)),
        (zoo.sliding_window(15), Band(15, 0)),
        (zoo.nearby(9), Band(9, 9)),
        (lambda b, h, i, j: (j - i < 5) & (i < j + 3), Band(2, 4)),
        (zoo.dilated(30, 3), Band(30, 0)),
        (lambda b, h, i, j: i > j, None),
    ],
    ids=["causal", "sliding", "nearby", "strict", "dilated", "without_itself"],
)
def test_bands_are_recognized(mask_mod, band):
    """A condition on the distance becomes the band that the options make; one that a band is not stays a function."""
    found = asked(mask_mod=mask_mod)
    assert found.band == band
    assert (found.settings.program is None) == (mask_mod in (zoo.causal,) or (band is not None and band != Band(30, 0)))


@pytest.mark.parametrize(
    ("score_mod", "error", "text"),
    [
        (lambda s, b, h, i, j: s if s > 0 else 0, TypeError, "np.where"),
        (lambda s, b, h, i, j: math.tanh(s), TypeError, "np.tanh"),
        (lambda s, b, h, i, j: np.ones(4)[h] + s, TypeError, "tensors="),
        (lambda s, b, h, i, j: np.sinc(s), TypeError, "np.sinc is none of the functions"),
        (lambda s, b, h, i, j: i > j, TypeError, "mask_mod"),
    ],
    ids=["if", "math", "closure", "unknown", "condition"],
)
def test_what_cannot_be_traced_says_what_to_write(score_mod, error, text):
    """It raises in the person's own line."""
    with pytest.raises(error, match=text) as caught:
        asked(score_mod=score_mod)
    assert any(entry.name == "<lambda>" for entry in caught.traceback) or text == "mask_mod"
