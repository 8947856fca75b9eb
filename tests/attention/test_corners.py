"""Graph and reference, which are written independently, agree in float64 up to rounding."""

from dataclasses import replace

import numpy as np
import pytest
from cases import FORWARD, Case, options_of_reference
from exact import evaluated
from tolerance import assert_close

from cupy_sdpa import attention, reference
from cupy_sdpa.calls import arguments
from cupy_sdpa.graph.attention_backward import backward
from cupy_sdpa.graph.attention_forward import forward
from cupy_sdpa.problem.problem import ROW_STATS
from cupy_sdpa.staging import stage


def test_missing_clears_show(monkeypatch):
    """If packed results after the last sequence are not cleared, exact evaluation has NaN there, and only there."""
    clear = stage._clear_padding_on_cpu
    monkeypatch.setattr(
        stage, "_clear_padding_on_cpu", lambda problem, given, arrays, results: clear(problem, given, arrays, [])
    )
    (case,) = (replace(case.with_dtype("float64"), stats=False) for case in FORWARD if case.name == "packed_window_tail")
    arrays, options = case.arrays(), case.options()
    got = evaluated(arguments.read_forward(*arrays, options), forward)["out"]
    truth, _ = reference.attention(*arrays, **options_of_reference(options))
    beyond = np.isnan(got)
    assert beyond.any()
    assert not truth[beyond].any()
    np.testing.assert_allclose(got[~beyond], truth[~beyond], rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", FORWARD, ids=str)
def test_forward_graphs_match_the_reference(case):
    """Exact evaluation of every case, to 1e-12."""
    case = replace(case.with_dtype("float64"), bias_dtype=None)
    arrays, options = case.laid_out(case.arrays()), case.options(dropout_mask=case.kept())
    call = arguments.read_forward(*arrays, options, return_stats=case.stats)
    got = evaluated(call, forward)
    truth = reference.attention(*arrays, **options_of_reference(options), max_sumexp=case.stats == "max_sumexp")
    names = ("out", *(ROW_STATS if case.stats == "max_sumexp" else ("stats",)))
    for name, wanted in zip(names, truth, strict=True):
        if name in got:  # row statistics are float32
            np.testing.assert_allclose(got[name], wanted, rtol=0 if name == "out" else 1e-6, atol=1e-12, err_msg=name)
    assert len(got) == 1 + {False: 0, True: 1, "max_sumexp": 3}[case.stats]


@pytest.mark.parametrize("guards", [(), ("keys", "queries")], ids=["plain", "guarded"])
@pytest.mark.parametrize("direct", [False, True], ids=["summed", "direct"])
@pytest.mark.parametrize("case", FORWARD, ids=str)
def test_backward_graphs_match_the_reference(case, direct, guards):
    """Exact evaluation of every case and method to compute gradients; guards change nothing."""
    case = replace(case.with_dtype("float64"), bias_dtype=None)
    arrays, options = case.laid_out(case.arrays()), case.options(dropout_mask=case.kept())
    (dout,) = case.laid_out([case.dout()])
    known = options_of_reference(options)
    out, stats = reference.attention(*arrays, **known)
    if not (case.bias or case.sinks or case.seq_lens_q or case.seq_lens_kv):  # no copy is converted, so it may be float64
        call = arguments.read_backward(*arrays, options, dout=dout, out=np.asfortranarray(out), **case.gradients)
        call.arrays["stats"] = stats
        exact = 1e-10
    else:
        stats = np.asfortranarray(stats.astype(np.float32))
        call = arguments.read_backward(*arrays, options, dout=dout, out=np.asfortranarray(out), stats=stats, **case.gradients)
        exact = 2e-5
    got = evaluated(call, lambda given: backward(given, direct, frozenset(guards)))
    truth = reference.attention_backward(dout, *arrays, **known, **case.gradients)
    for (name, gradient), wanted in zip(got.items(), truth, strict=True):
        size = exact * max(1, np.abs(wanted).max())
        np.testing.assert_allclose(gradient, wanted, rtol=1e-6 if name == "dsinks" else 0, atol=size, err_msg=name)


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
    """A change of an element of q, k or v changes the loss as its gradient predicts."""
    case = case.with_dtype("float64")
    arrays, dout = list(case.arrays()), case.dout()
    options = options_of_reference(case.options())
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
def test_errors_are_of_the_size_of_rounding(case, dtype):
    """The CPU engine's error against float64 is of the size of the dtype's rounding."""
    case = case.with_dtype(dtype)
    q, k, v = case.laid_out(case.arrays())
    options = case.options(dropout_mask=case.kept())
    out = attention(q, k, v, **options)
    truth, _ = reference.attention(q, k, v, **options_of_reference(options))
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-21, "float64": 2.0**-49}[dtype]
    assert np.abs(out.astype(np.float64) - truth).max() <= 4 * unit * np.abs(v.astype(np.float64)).max() / (1 - case.dropout)


def test_integers_come_out_exactly():
    """With a saturated softmax every output is a row of V, bit for bit: this checks masks, layouts and grouped-query attention."""
    case = Case("integers", d=16, hq=4, hkv=2, sq=7, skv=7, b=2, dtype="float16")
    rng = np.random.default_rng(1)
    keys = np.zeros((16, 2, 7, 2))
    keys[np.arange(7), :, np.arange(7)] = 1  # key j is the unit vector e_j
    wanted = rng.integers(0, 7, (4, 7, 2))
    queries = np.zeros((16, 4, 7, 2))
    for h, i, b in np.ndindex(wanted.shape):
        queries[wanted[h, i, b], h, i, b] = 1000
    q, k, v = (x.astype("float16", order="F") for x in (queries, keys, rng.integers(-50, 50, (16, 2, 7, 2))))
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
    """The tolerance policy accepts the naive computation, so a failure of another engine is caused by that engine."""
    q, k, v = FORWARD[0].arrays()
    naive = attention(q, k, v)
    assert_close(naive, reference.attention(q, k, v)[0], naive)
