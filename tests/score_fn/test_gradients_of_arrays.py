"""The gradients of captured arrays, ``return_dtensors``, and that every rule of the derivatives is tested."""

import numpy as np
import pytest
from functions import LEARNED, arrays, refused, right_on_the_gpu

from cupy_sdpa import Unsupported, attention, attention_backward, attention_vjp, explain

NAMED = {functions.name: functions for functions in LEARNED}
every_function = pytest.mark.parametrize("functions", LEARNED, ids=str)


@every_function
def test_gradients_match_finite_differences(functions):
    """Along random directions; the gradients of q, k and v are those without, and are written to the preallocated arrays."""
    q, k, v, dout = arrays(s=30)
    options = functions.options(q=30, kv=30)
    options["tensors"] = {name: x.astype(np.float64) for name, x in options["tensors"].items()}
    out, stats = attention(q, k, v, return_stats=True, **options)
    dq = np.full_like(q, np.nan)
    *found, gradients = attention_backward(dout, q, k, v, out, stats, dq=dq, return_dtensors=True, **options)
    assert found[0] is dq
    for a, b in zip(found, attention_backward(dout, q, k, v, out, stats, **options), strict=True):
        np.testing.assert_array_equal(a, b)
    rng = np.random.default_rng(5)
    for name, x in options["tensors"].items():
        assert (gradients[name].shape, gradients[name].dtype) == (x.shape, x.dtype)
        for _ in range(3):
            direction = rng.standard_normal(x.shape)
            moved = [options["tensors"] | {name: np.asarray(x + step * direction)} for step in (1e-5, -1e-5)]
            above, below = (float((attention(q, k, v, **options | {"tensors": there}) * dout).sum()) for there in moved)
            size = float(np.abs(gradients[name] * direction).sum())
            np.testing.assert_allclose((above - below) / 2e-5, (gradients[name] * direction).sum(), rtol=0, atol=1e-5 * size)


@pytest.mark.parametrize(
    ("name", "launched"), [("bias", 1), ("added_before", 1), ("added_behind", 2), ("logarithmic", 3), ("pairs", 3)]
)
def test_arrays_share_a_launch_where_they_can(name, launched):
    """An array whose derivative equals the derivative of the product of q and k shares its subproblem; any other has its own."""
    q, k, v, _ = arrays(s=30)
    report = explain(q, k, v, backward=True, return_dtensors=True, **NAMED[name].options(q=30, kv=30))
    assert len(report.launches or (report,)) == launched
    assert str(report).count("and then") == launched - 1
    assert report._repr_html_().count("runs on the CPU") == launched


@pytest.mark.parametrize("softcap", [None, 20.0])
def test_a_sum_beside_a_choice_has_a_factor(softcap):
    """cuDNN's kernel takes a choice of a constant for a mask, and sums a gradient without a factor wrongly."""
    q, k, v, _ = arrays(s=30)
    options = {"bias": np.zeros((30, 30, 1, 1), order="F"), "return_dbias": True, "softcap": softcap}
    chosen = explain(q, k, v, backward=True, score_mod=lambda s, b, h, i, j: np.where(i >= j, s, -1.0), **options)
    plain = explain(q, k, v, backward=True, score_mod=lambda s, b, h, i, j: s * 0.5, **options)
    assert "dbias = Σ P∘(dP−D)" in str(plain)
    assert "dbias = Σ f" in str(chosen)


def test_every_launch_is_planned_before_the_first_runs(fake):
    """If the second subproblem cannot run, nothing has been written."""
    q, k, v, dout = map(fake.asarray, arrays("float16", s=30))
    options = NAMED["logarithmic"].options(fake, q=30, kv=30)
    out, stats = attention(q, k, v, return_stats=True, **options)
    attention_backward(dout, q, k, v, out, stats, **options)  # the first subproblem has a plan
    targets = {name: fake.full(x.shape, np.nan, np.float16, order="F") for name, x in (("dq", q), ("dk", k), ("dv", v))}
    with refused(), pytest.raises(Unsupported):
        attention_backward(dout, q, k, v, out, stats, return_dtensors=True, **targets, **options)
    assert all(np.isnan(x.get()).all() for x in targets.values())


def test_only_requested_gradients_are_returned():
    """Names select them; an array that only a mask function reads, or that no score depends on, has the gradient 0."""
    q, k, v, dout = arrays(s=30)
    gains = {"score_mod": lambda s, b, h, i, j, x, y: s * x[h] + y[j], "tensors": {"x": np.ones(4), "y": np.ones(30)}}
    _, pullback = attention_vjp(q, k, v, return_dtensors=["y"], **gains)
    assert set(pullback(dout)[3]) == {"y"}
    cut = {"mask_mod": lambda b, h, i, j, x: x[j] > 0.5, "tensors": {"x": np.linspace(0, 1, 30)}}
    _, pullback = attention_vjp(q, k, v, return_dtensors="x", **cut)
    assert not pullback(dout)[3]["x"].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@every_function
def test_gradients_are_right_on_the_gpu(functions, dtype, cupy):
    """Every subproblem, with memory full of NaN."""
    known, there = (functions.options(xp, q=200, kv=200) for xp in (np, cupy))
    right_on_the_gpu(cupy, dtype, known, there, return_dtensors=True)
