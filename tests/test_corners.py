"""The first of the three corners: graph and reference agree to rounding in float64; both are written independently."""

import numpy as np
import pytest
from cases import FORWARD, Case
from tolerance import assert_close

from cupy_sdpa import attention, reference
from cupy_sdpa.interpreter import evaluate
from cupy_sdpa.patterns import backward, forward


@pytest.mark.parametrize("case", FORWARD, ids=str)
def test_the_graph_means_what_the_papers_say(case):
    """Evaluated exactly, the graph of every case is the reference to 1e-12."""
    case = case.with_dtype("float64")
    q, k, v = arrays = case.laid_out(case.arrays())
    problem = case.problem()
    out, stats = np.full(problem.out.shape, np.nan), np.full((case.sq, case.hq, case.b), np.nan)
    named = dict(zip("qkv", arrays, strict=True)) | {"out": out, "stats": stats} | case.length_arrays()
    evaluate(forward(problem), named, {"scale": case.tau}, exact=True)
    truth, truth_stats = reference.attention(q, k, v, scale=case.scale, **case.mask())
    np.testing.assert_allclose(out, truth, rtol=0, atol=1e-12)
    if case.stats:
        np.testing.assert_allclose(stats, truth_stats, rtol=0, atol=1e-12)
    else:
        assert np.isnan(stats).all()


GRADIENTS = ("dq", "dk", "dv")


@pytest.mark.parametrize("guards", [(), ("keys", "queries")], ids=["plain", "guarded"])
@pytest.mark.parametrize("direct", [False, True], ids=["summed", "direct"])
@pytest.mark.parametrize("case", FORWARD, ids=str)
def test_the_backward_graph_means_what_the_papers_say(case, direct, guards):
    """Evaluated exactly, every way to compute the gradients gives the reference's to 1e-10; guards change nothing."""
    case = case.with_dtype("float64")
    q, k, v = case.laid_out(case.arrays())
    (dout,) = case.laid_out([case.dout()])
    out, stats = reference.attention(q, k, v, scale=case.scale, **case.mask())
    named = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "stats": stats} | case.length_arrays()
    named |= {name: np.full(x.shape, np.nan) for name, x in zip(GRADIENTS, (q, k, v), strict=True)}
    evaluate(backward(case.gradient_problem(), direct, frozenset(guards)), named, {"scale": case.tau}, exact=True)
    truth = reference.attention_backward(dout, q, k, v, scale=case.scale, **case.mask())
    for name, wanted in zip(GRADIENTS, truth, strict=True):
        np.testing.assert_allclose(named[name], wanted, rtol=0, atol=1e-10, err_msg=name)


@pytest.mark.parametrize(
    "case",
    [
        Case("plain", d=8, hq=1, hkv=1, sq=3, skv=4, b=1),
        Case("causal_gqa", d=8, dv=16, hq=4, hkv=2, sq=4, skv=3, b=2, causal=True),
        Case("scaled", d=8, hq=2, hkv=1, sq=2, skv=5, b=1, scale=-0.7),
        Case("bottom_right", d=8, hq=2, hkv=1, sq=4, skv=3, b=1, causal="bottom_right"),
        Case("window_lengths", d=8, hq=2, hkv=2, sq=4, skv=5, b=2, window=(1, 2), seq_lens_q=(4, 2), seq_lens_kv=(3, 5)),
    ],
    ids=str,
)
def test_the_references_gradients_are_finite_differences(case):
    """Moving an element of q, k or v moves the loss by what the gradient says."""
    case = case.with_dtype("float64")
    arrays, dout = list(case.arrays()), case.dout()
    options = {"scale": case.scale, **case.mask()}
    gradients = reference.attention_backward(dout, *arrays, **options)
    rng = np.random.default_rng(0)
    for which, gradient in enumerate(gradients):
        for flat in rng.choice(gradient.size, 12, replace=False):
            place = np.unravel_index(flat, gradient.shape)
            losses = []
            for step in (1e-5, -1e-5):
                moved = [x.copy() for x in arrays]
                moved[which][place] += step
                losses.append((reference.attention(*moved, **options)[0] * dout).sum())
            assert (losses[0] - losses[1]) / 2e-5 == pytest.approx(gradient[place], abs=1e-8)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("case", [c for c in FORWARD if c.dtype == "bfloat16"], ids=str)
def test_every_dtype_is_as_near_as_it_can_be(case, dtype):
    """The CPU engine's error against float64 is of the size of its dtype's rounding."""
    case = case.with_dtype(dtype)
    q, k, v = case.laid_out(case.arrays())
    out = attention(q, k, v, scale=case.scale, **case.mask())
    truth, _ = reference.attention(q, k, v, scale=case.scale, **case.mask())
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-21, "float64": 2.0**-49}[dtype]
    assert np.abs(out.astype(np.float64) - truth).max() <= 4 * unit * np.abs(v.astype(np.float64)).max()


def test_integers_come_out_exactly():
    """With a saturated softmax every output is a row of V, bit for bit: masks, layouts and groups leave no doubt."""
    case = Case("integers", d=16, hq=4, hkv=2, sq=7, skv=7, b=2, dtype="float16")
    rng = np.random.default_rng(1)
    keys = np.zeros((16, 2, 7, 2))
    keys[np.arange(7), :, np.arange(7)] = 1  # key j is the unit vector e_j
    wanted = rng.integers(0, 7, (4, 7, 2))
    queries = np.zeros((16, 4, 7, 2))
    for h, i, b in np.ndindex(wanted.shape):
        queries[wanted[h, i, b], h, i, b] = 1000
    q, k, v = (x.astype("float16") for x in (queries, keys, rng.integers(-50, 50, (16, 2, 7, 2))))
    out = attention(q, k, v, scale=1.0)
    for h, i, b in np.ndindex(wanted.shape):
        np.testing.assert_array_equal(out[:, h, i, b], v[:, h // 2, wanted[h, i, b], b], err_msg=str(case))


def test_the_reference_agrees_with_published_numbers():
    """NNlib.jl's own test of dot_product_attention: q = k = v = reshape(1:12, 4, 3, 1) / 12 with two heads."""
    x = np.arange(1, 13).reshape((2, 2, 3, 1), order="F") / 12
    out, _ = reference.attention(x, x, x)
    published = [
        0.429754,
        0.513087,
        0.613791,
        0.697125,
        0.46431,
        0.547644,
        0.647876,
        0.73121,
        0.49773,
        0.581064,
        0.680455,
        0.763788,
    ]
    np.testing.assert_allclose(out.ravel(order="F"), published, atol=1e-5)


def test_the_naive_computation_is_close_to_itself():
    """The tolerance policy accepts the naive computation, so that a failure of another engine is that engine's."""
    q, k, v = FORWARD[0].arrays()
    naive = attention(q, k, v)
    assert_close(naive, reference.attention(q, k, v)[0], naive)
