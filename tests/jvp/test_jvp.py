"""Directional derivatives: random problems over all options, compared with whole matrices in float64 and with differences.

The same problems run on numpy arrays, on the fake CuPy, and on a GPU; and the real cuDNN plans them for five GPUs.
"""

import contextlib
import itertools
import os
from dataclasses import replace

import functions
import jvp_reference
import numpy as np
import pytest
from cases import Case, options_of_reference
from engines import Engine
from not_parsed import not_parsed
from on_gpu import dropped, poisoned, poisoning
from planner import library_version, plan_problem
from test_sweep import HEAD_DIMS, LONGER, combination
from tolerance import assert_close, rounding_floor

import cupy_sdpa
from cupy_sdpa import Unsupported, attention, attention_backward, attention_jvp, jvp_problems, store, widen
from cupy_sdpa.calls import replay_cache
from cupy_sdpa.forward_mode import kernels
from cupy_sdpa.forward_mode.form import form_of
from cupy_sdpa.problem.subproblems import subproblems
from cupy_sdpa.support import gpus
from cupy_sdpa.support.why_not import why_not

NIGHTLY = os.environ.get("CUPY_SDPA_NIGHTLY", "0") != "0"
#: Which of dq, dk and dv are given.
GIVEN = [given for given in itertools.product((True, False), repeat=3) if any(given)]


def draw(seed, **choices):
    """A random case, its tangents, and whether it is deterministic."""
    rng = np.random.default_rng(seed)
    case = combination(lambda values: values[rng.integers(len(values))], **choices)
    given = GIVEN[rng.integers(len(GIVEN))]
    return case, given, bool(rng.random() < 0.2)


def tangents_of(case, given):
    """Random dq, dk and dv in the layout of the case; None where they are not given."""
    return [x if wanted else None for x, wanted in zip(case.laid_out(case.arrays(1)), given, strict=True)]


def check_exact(case, given, altered=lambda options: options, **more):
    """Compare the CPU engine in float64 with whole matrices; ``altered`` options are passed to the call only."""
    case = replace(case.with_dtype("float64"), bias_dtype=None)
    arrays, options = case.laid_out(case.arrays()), case.options(dropout_mask=case.kept())
    tangents = tangents_of(case, given)
    truth = jvp_reference.jvp(arrays, tangents, **options_of_reference(options))
    results = [np.full(x.shape, np.nan, order="F") for x in truth]
    got = attention_jvp(*arrays, *tangents, out=results[0], dout=results[1], **altered(options), **more)
    for result, wanted, one in zip(results, truth, got, strict=True):
        assert one is result
        # the log-sum-exp is float32
        np.testing.assert_allclose(result, wanted, rtol=0, atol=2e-6 * max(1, np.abs(wanted).max(initial=0)))


@pytest.mark.parametrize("part", range(6))
def test_any_combination_of_options(part):
    """Every option and layout, packed sequences, grouped heads, two head dims, any of the tangents."""
    for seed in range(60 * part, 60 * part + 60):
        case, given, deterministic = draw(seed)
        check_exact(case, given, deterministic=deterministic)


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(20 if NIGHTLY else 5))
def test_many_combinations(part):
    """More of them."""
    for seed in range(1000 + 200 * part, 1200 + 200 * part):
        case, given, deterministic = draw(seed)
        check_exact(case, given, deterministic=deterministic)


SMALL = [
    dict(zip(("sq", "skv", "b", "hq", "hkv"), sizes, strict=True))
    for sizes in itertools.product((0, 1, 2), (0, 1, 2), (0, 1, 2), (2,), (1, 2))
]


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"sinks": True}, {"dropout": 0.5}], ids=str)
@pytest.mark.parametrize("dims", [(1, 1), (2, 5), (8, 0)], ids=str)
def test_smallest_sizes(dims, options):
    """Sizes of 0, 1 and 2."""
    d, dv = dims
    for number, sizes in enumerate(SMALL):
        case = Case(f"small_{number}", d=d, dv=dv or None, **sizes, **options)
        case = replace(case, skv=sizes["skv"]) if sizes["skv"] else case
        arrays = [np.full((n, h, s, case.b), 1.0 + number % 3, order="F") for n, h, s in (
            (d, case.hq, case.sq), (d, case.hkv, sizes["skv"]), (dv, case.hkv, sizes["skv"]))]  # fmt: skip
        rng = np.random.default_rng(number)
        tangents = [np.asfortranarray(rng.standard_normal(x.shape)) for x in arrays]
        known = {name: x for name, x in case.options().items() if name not in ("seed", "offset", "dropout_p")}
        if "dropout" in options:
            known |= {
                "dropout_p": 0.5,
                "dropout_mask": np.asfortranarray(rng.random((sizes["skv"], case.sq, case.hq, case.b)) < 0.5),
            }
        got = attention_jvp(*arrays, *tangents, **known)
        for one, wanted in zip(got, jvp_reference.jvp(arrays, tangents, **known), strict=True):
            np.testing.assert_allclose(one, wanted, rtol=0, atol=1e-5)


LOSSES = {
    "softcap": {"softcap": None},
    "scale": {"scale": None},
    "causal": {"causal": False},
    "window": {"window": None},
    "mask": {"mask": None},
    "bias": {"bias": np.zeros_like},
    "alibi_slopes": {"alibi_slopes": None},
    "sinks": {"sinks": None},
    "dropout_mask": {"dropout_mask": None, "dropout_p": 0.0},
    "seq_lens_q": {"seq_lens_q": None},
    "seq_lens_kv": {"seq_lens_kv": None},
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_lost_option_is_detected(name):
    """The comparison fails if the call ignores an option."""

    def altered(options):
        return options | {key: value(options[key]) if callable(value) else value for key, value in LOSSES[name].items()}

    def fails(seed):
        case, _, _ = draw(seed)
        if name not in case.options(dropout_mask=case.kept()):
            return False
        try:
            check_exact(case, (True, True, True), altered)
        except AssertionError:
            return True
        return False

    assert any(fails(seed) for seed in range(100))


@pytest.mark.parametrize("lost", ["mean", "dropout_of_the_mean", "values"])
def test_a_lost_term_is_detected(lost, monkeypatch):
    """The comparison fails without one of the terms of the derivative."""
    from cupy_sdpa.programs import derivative as jvp

    add_terms, without = jvp.add_terms, {"mean": {"means": None}, "values": {"values": None}}
    if lost in without:
        monkeypatch.setattr(jvp, "add_terms", lambda terms, *arrays: add_terms(terms._replace(**without[lost]), *arrays))
    else:
        monkeypatch.setattr(jvp, "without_dropout", lambda options: options)
    with pytest.raises(AssertionError):
        check_exact(Case("lost", d=8, sq=20, dropout=0.5), (True, True, True))


def difference(arrays, tangents, options, step=1e-4):
    """The derivative of the output by central differences of the CPU engine in float64."""
    moved = [[x if dx is None else x + sign * step * dx for x, dx in zip(arrays, tangents, strict=True)] for sign in (1, -1)]
    plus, minus = (attention(*each, **options) for each in moved)
    return (plus - minus) / (2 * step)


@pytest.mark.parametrize("seed", range(80))
def test_it_is_the_limit_of_differences(seed):
    """Central differences of the forward pass, with any options."""
    case, given, _ = draw(5000 + seed)
    case = replace(case.with_dtype("float64"), bias_dtype=None)
    arrays, options, tangents = case.laid_out(case.arrays()), case.options(dropout_mask=case.kept()), tangents_of(case, given)
    _, dout = attention_jvp(*arrays, *tangents, **options)
    wanted = difference(arrays, tangents, options)
    np.testing.assert_allclose(dout, wanted, rtol=0, atol=1e-5 * max(1, np.abs(wanted).max(initial=0)))


@pytest.mark.parametrize("dropout", [{}, {"dropout_p": 0.3, "seed": 5}], ids=["", "dropout"])
@pytest.mark.parametrize("case", [case for case in functions.ZOO if case.name != "squared_relu"], ids=str)
def test_score_and_mask_functions(case, dropout):
    """Every function of the zoo, with captured arrays, alone and with dropout."""
    rng = np.random.default_rng([*case.name.encode()])
    sizes = ((4, 4), (2, 70), (2, 70))
    arrays, tangents = (
        [
            np.asfortranarray(rng.standard_normal((n, h, s, 2)))
            for n, (h, s) in zip((8, 8, 5), ((4, 70), *sizes[1:]), strict=True)
        ]
        for _ in range(2)
    )
    options = case.options() | dropout
    wanted = difference(arrays, tangents, options)
    if case.name in ("clipped", "softsign", "root"):  # where differences cross a kink they are not the derivative
        wanted = difference(arrays, tangents, options, 1e-6)
    for given in ((True, True, True), (True, False, False)):
        chosen = [x if wanted else None for x, wanted in zip(tangents, given, strict=True)]
        wanted = difference(arrays, chosen, options, 1e-6)
        _, dout = attention_jvp(*arrays, *chosen, **options)
        np.testing.assert_allclose(dout, wanted, rtol=0, atol=2e-5 * max(1, np.abs(wanted).max()))


def test_it_is_the_transpose_of_the_gradient():
    """``<w, J t> = <Jᵀ w, t>`` for a random gradient w and a random direction t."""
    rng = np.random.default_rng(0)
    q, k, v, dq, dk, dv = (np.asfortranarray(rng.standard_normal((8, h, s, 2))) for h, s in ((4, 30), (2, 40), (2, 40)) * 2)
    options = {"causal": "bottom_right", "softcap": 3.0}
    out, dout = attention_jvp(q, k, v, dq, dk, dv, **options)
    w = np.asfortranarray(rng.standard_normal(out.shape))
    out, stats = attention(q, k, v, return_stats=True, **options)
    gradients = attention_backward(w, q, k, v, out, stats, **options)
    pairs = zip(gradients, (dq, dk, dv), strict=True)
    np.testing.assert_allclose((w * dout).sum(), sum((x * y).sum() for x, y in pairs), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 5.0}, {"dropout": 0.25}], ids=str)
def test_precision(options, dtype):
    """The relative error in the norm is a few roundings of the dtype."""
    case = Case("precision", d=64, sq=200, hkv=2, **options, dtype=dtype)
    arrays, tangents, known = case.arrays(), case.arrays(1), case.options(dropout_mask=case.kept())
    _, truth = jvp_reference.jvp(arrays, tangents, **known)
    _, dout = attention_jvp(*arrays, *tangents, **known)
    assert np.linalg.norm(dout - truth) <= 3 * {"float32": 2**-21, "float16": 2**-11, "bfloat16": 2**-8}[
        dtype
    ] * np.linalg.norm(truth)


@pytest.mark.parametrize(("d", "factor"), [(56, 2.0), (64, 40.0)])
def test_the_row_of_ones_removes_the_error_of_the_mean(d, factor):
    """Keys and values with a large mean: without the row, which does not fit with head dim 64, the error is larger."""
    case = Case("means", d=d, sq=100, hkv=2, dtype="float16")
    (q, k, v), tangents = case.arrays(), case.arrays(1)
    arrays = (q, (k + np.float16(3)).astype(np.float16), (v + np.float16(3)).astype(np.float16))
    _, truth = jvp_reference.jvp(arrays, tangents)
    _, dout = attention_jvp(*arrays, *tangents)
    error = np.linalg.norm(dout - truth) / np.linalg.norm(truth)
    assert factor / 10 * 2**-11 < error < factor * 2**-11


# With CuPy arrays


def check_on_gpu(cupy, case, given, calls=5, **more):
    """Compare repeated calls with CuPy arrays within the tolerance policy; all memory is full of NaN before."""
    arrays, tangents = case.arrays(), [x if one else None for x, one in zip(case.arrays(1), given, strict=True)]
    options = case.options(dropout_mask=dropped(cupy, case))
    truth = jvp_reference.jvp(arrays, tangents, **options_of_reference(options))
    naive = attention_jvp(*arrays, *tangents, **options)
    on_gpu = case.laid_out([cupy.asarray(x) for x in arrays])
    on_gpu_tangents = [None if x is None else case.laid_out([cupy.asarray(x)])[0] for x in tangents]
    known = case.options(cupy)
    for number in range(calls):
        preallocated = {}
        if number % 2:
            preallocated = {
                name: poisoned(cupy, x.shape, arrays[0].dtype) for name, x in zip(("out", "dout"), truth, strict=True)
            }
        with poisoning(cupy):
            got = attention_jvp(*on_gpu, *on_gpu_tangents, **known, **preallocated, **more)
        for name, one, wanted, other in zip(("out", "dout"), got, truth, naive, strict=True):
            floor = rounding_floor(wanted, other.dtype) + (mean_floor(arrays, tangents, case.tau) if name == "dout" else 0)
            assert_close(cupy.asnumpy(one), wanted, other, floor)


def mean_floor(arrays, tangents, tau):
    """The error of the means of the derivatives of the scores in float32, times a row of v."""
    norms = [
        0.0 if x is None else float(np.linalg.norm(x.astype(np.float64), axis=0).max(initial=0)) for x in (*arrays, *tangents)
    ]
    q, k, v, dq, dk, _ = norms
    return 4 * float(np.finfo(np.float32).eps) * abs(tau) * (dq * k + q * dk) * v


def objections(case, given, version, capability, **more):
    """Why a derivative cannot run."""
    return [reason for problem in problems_of(case, given, **more) for reason in why_not(problem, version, capability)]


def problems_of(case, given, **more):
    """The problems of the passes of a derivative."""
    names = [name for name, one in zip(("dq", "dk", "dv"), given, strict=True) if one]
    return jvp_problems(*case.laid_out(case.arrays()), tangents=names, **case.options(), **more)


@pytest.mark.parametrize("seed", range(60))
def test_on_the_fake_cupy(seed, fake):
    """With staging, kernels, cached calls and captured graphs; NaN in the padding and in all memory."""
    case, given, deterministic = draw(seed, head_dims=(8, 16, 24, 32), lengths=(*range(1, 20), 64))
    if objections(case, given, 91900, 90, deterministic=deterministic):
        tangents = [fake.asarray(x) if one else None for x, one in zip(case.arrays(1), given, strict=True)]
        with pytest.raises((Unsupported, ValueError, TypeError)):
            attention_jvp(
                *(fake.asarray(x) for x in case.arrays()), *tangents, deterministic=deterministic, **case.options(fake)
            )
        return
    check_on_gpu(fake, case, given, deterministic=deterministic)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(120))
def test_on_the_gpu(seed, cupy):
    """With cuDNN."""
    from cupy_sdpa._cudnn.library import library
    from cupy_sdpa.device import cupy_runtime

    case, given, deterministic = draw(seed, head_dims=HEAD_DIMS, lengths=LONGER)
    if not objections(case, given, library().version, cupy_runtime.capability(0), deterministic=deterministic):
        check_on_gpu(cupy, case, given, deterministic=deterministic)


REPEATED = {
    "centered": {"causal": True},
    "joint": {"softcap": 2.0},
    "dropout": {"dropout_p": 0.25, "seed": 3},
    "function": {"score_mod": cupy_sdpa.zoo.softsign},
}


@pytest.mark.parametrize("given", [(True, True, True), (True, False, False), (False, False, True)], ids=str)
@pytest.mark.parametrize("name", REPEATED)
def test_repeated_calls_are_not_parsed(name, given, fake):
    """Neither with the same arrays nor with others; the results are those of new contents."""
    case, calls = Case("repeated", d=16, sq=24, dtype="float16"), 4 * replay_cache.CAPTURE_AFTER
    arrays = [fake.asarray(x) for x in (*case.arrays(), *case.arrays(1))]
    results = []
    for number in range(calls):
        tangents = [x if one else None for x, one in zip(arrays[3:], given, strict=True)]
        with not_parsed() if number in (1, calls - 1) else contextlib.nullcontext():  # a capture parses the call once more
            out, dout = attention_jvp(*arrays[:3], *tangents, **REPEATED[name])
        results.append([out.get(), dout.get()])
        del out, dout
        for x in arrays:
            x[...] = -x
    for x, y in zip(results[0], results[2], strict=True):
        np.testing.assert_array_equal(x, y)
    moved = [fake.asarray(x.get()) for x in arrays]
    with not_parsed():
        out, dout = attention_jvp(
            *moved[:3], *(x if one else None for x, one in zip(moved[3:], given, strict=True)), **REPEATED[name]
        )
    for x, y in zip(results[calls % 2], (out, dout), strict=True):
        np.testing.assert_array_equal(x, y.get())


def check_captured(cupy, options):
    """Compare a call in a CUDA graph, which is launched again after other work, with an eager call."""
    case = Case("captured", d=16, sq=24, dtype="float16")
    arrays = [cupy.asarray(x) for x in (*case.arrays(), *case.arrays(1))]
    want = [x.get() for x in attention_jvp(*arrays, **options)]
    for one, other in zip(Engine("fake", cupy).captured(lambda: attention_jvp(*arrays, **options)), want, strict=True):
        np.testing.assert_allclose(one.astype("f4"), other.astype("f4"), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", REPEATED)
def test_captured_on_the_fake_cupy(name, fake):
    """A graph owns the memory of the passes, and can be launched again."""
    from cupy_sdpa._cudnn.library import library

    check_captured(fake, REPEATED[name])
    assert library().forget_plans() > 0, "the plans of the graph are kept"


@pytest.mark.gpu
@pytest.mark.parametrize("name", REPEATED)
def test_captured_on_the_gpu(name, cupy):
    """With cuDNN."""
    check_captured(cupy, REPEATED[name])


def test_memory_is_proportional_to_the_lengths(fake):
    """No array of a call has the size Sq x Skv."""
    case, sizes = Case("memory", d=8, hq=1, hkv=1, sq=4096, b=1, dtype="float16"), []
    arrays = [fake.asarray(x) for x in (*case.arrays(), *case.arrays(1))]
    with poisoning(fake, sizes):
        attention_jvp(*arrays, causal=True)
    assert 0 < max(sizes) <= 4096 * 4096 // 8


@pytest.mark.parametrize("unit", [True, False], ids=["aligned", "any strides"])
@pytest.mark.parametrize("seed", range(10))
def test_concatenation_kernel(seed, unit, fake):
    """Arrays with any strides and constants, dense and packed."""
    from test_merge import strided

    rng = np.random.default_rng(seed)
    ndim = int(rng.integers(3, 5))
    rest = tuple(int(n) for n in rng.integers(1, 5, ndim - 1))
    widths = [int(n) * (8 if unit else 1) for n in rng.integers(1, 4, 2)]
    host = [rng.standard_normal((n, *rest)).astype("float16") for n in widths]
    one = kernels.Constant(8 if unit else 3, 1.0)
    target = poisoned(fake, (sum(widths) + one.width, *rest), np.float16)
    kernels.concatenate(
        [kernels.Concatenation(target, [strided(fake, rng, host[0], unit=unit), one, strided(fake, rng, host[1], unit=unit)])]
    )
    ones = np.zeros((one.width, *rest), "float16")
    ones[0] = 1
    np.testing.assert_array_equal(target.get(), np.concatenate([host[0], ones, host[1]]))


def test_the_tangent_of_a_bias_of_keys():
    """A bias per key is a head dim: q has 1, and k the bias, in an additional row; its tangent is that of the row."""
    rng = np.random.default_rng(0)
    q, k, v = (np.asfortranarray(rng.standard_normal((8, h, s, 2))) for h, s in ((4, 10), (2, 12), (2, 12)))
    bias, dbias = (np.asfortranarray(rng.standard_normal((12, 1, 1, 2))) for _ in range(2))
    tau = 8**-0.5

    def rows(of_q, of_k):
        more_q = np.concatenate([q, np.full((1, *q.shape[1:]), of_q), np.zeros((7, *q.shape[1:]))])
        more_k = np.broadcast_to(of_k[:, 0].transpose(1, 0, 2)[None] / tau, (1, *k.shape[1:]))
        return np.asfortranarray(more_q), np.asfortranarray(np.concatenate([k, more_k, np.zeros((7, *k.shape[1:]))]))

    wide_q, wide_k = rows(1.0, bias)
    dk = np.zeros_like(wide_k)
    dk[8] = dbias[:, 0].transpose(1, 0, 2)[0] / tau
    out, dout = attention_jvp(wide_q, wide_k, v, dk=dk, scale=tau)
    np.testing.assert_allclose(out, attention(q, k, v, bias=bias), atol=1e-6)
    plus, minus = (attention(q, k, v, bias=bias + t * dbias) for t in (1e-4, -1e-4))
    np.testing.assert_allclose(dout, (plus - minus) / 2e-4, atol=1e-6)


# Widened arrays


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"softcap": 2.0, "dropout_p": 0.5, "seed": 1}], ids=str)
@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_widened_arrays(given, options):
    """The same bits as without them, and for tangents that are written into them later."""
    case = Case("widened", d=8, dv=6, hkv=2, sq=10, skv=12, dtype="float32")
    arrays, first, second = case.arrays(), tangents_of(case, given), [
        x if one else None for x, one in zip(case.arrays(2), given, strict=True)
    ]  # fmt: skip
    wide = widen(*arrays, *[None if x is None else x.copy(order="F") for x in first], **options)
    for x, y in zip(attention_jvp(*arrays, widened=wide, **options), attention_jvp(*arrays, *first, **options), strict=True):
        np.testing.assert_array_equal(x, y)
    dq, dk, dv = second
    if dq is not None:
        wide.dout[:8] = dq
    if dk is not None:
        wide.v[8 * given[0] :][:8] = dk
    if dv is not None:
        wide.values[6:] = dv
    for x, y in zip(attention_jvp(*arrays, widened=wide, **options), attention_jvp(*arrays, *second, **options), strict=True):
        np.testing.assert_array_equal(x, y)


# Plans of the real cuDNN


@pytest.mark.cudnn
@pytest.mark.parametrize("gpu", gpus.REPRESENTATIVES)
@pytest.mark.parametrize("part", range(2))
def test_what_the_table_allows_is_planned(part, gpu, planned):
    """Random problems for every described GPU: each pass has a plan, or the table refuses it."""
    from test_combinations import ALLOWED

    version, capability, count = planned(library_version), gpus.capability(gpu), 0
    for seed in range(100 * part, 100 * part + 15):
        case, given, deterministic = draw(seed, head_dims=HEAD_DIMS, lengths=LONGER)
        for problem in problems_of(case, given, deterministic=deterministic):
            if problem.trivial or why_not(problem, version, capability):
                continue
            for one in subproblems(problem):
                plan = planned(plan_problem, one, gpu)
                known = isinstance(plan, str) and any(rule(one, capability) for rule in ALLOWED.values())
                assert known or not isinstance(plan, str), f"{one}: {plan}"
                count += 1
    assert count


@pytest.mark.parametrize(
    ("gpu", "d", "runs"), [(90, 128, True), (90, 136, False), (80, 64, True), (80, 72, False), (100, 64, True), (120, 64, True)]
)
def test_the_largest_head_dims(gpu, d, runs):
    """128 on Hopper and 64 on other GPUs."""
    reasons = objections(Case("large", d=d, sq=256), (True, True, True), 92800, gpu)
    assert (not reasons) is runs


@pytest.mark.parametrize("gpu", [None, "h200"])
def test_explained(gpu):
    """All passes are in the report; a refusal ends with the remedy."""
    if gpu and isinstance(library_version(), str):
        pytest.skip("the cudnn tier: cuDNN is not installed")
    case = Case("explained", d=64, sq=128, dtype="float16")
    options = {"gpu": gpu, "cudnn": "9.19"} if gpu else {}
    report = cupy_sdpa.explain(*case.arrays(), jvp=True, causal=True, **options)
    assert report
    assert [(one.problem.backward, one.problem.q.shape[0]) for one in report.launches] == [
        (False, 64),
        (False, 64),
        (True, 128),
    ]
    assert str(report).count("and then") == 2
    only = cupy_sdpa.explain(*case.arrays(), jvp=True, dv=case.arrays()[2], **options)
    assert not only.launches
    assert only.problem.v.shape[0] == 128
    large = replace(case, d=136)
    report = cupy_sdpa.explain(*large.arrays(), jvp=True, **options)
    assert bool(report) is (gpu is None)
    if gpu:
        assert report.reasons[-1].startswith("Use head dims with D + Dv, 2 D and 2 Dv up to 256 on Hopper")
    with pytest.raises(ValueError, match="backward and jvp are True"):
        cupy_sdpa.explain(*case.arrays(), jvp=True, backward=True)


def test_the_problems_are_those_of_the_call(fake):
    """The passes of a call have the plans of these problems, for any options."""
    for seed in range(40):
        case, given, deterministic = draw(seed, head_dims=(8, 16, 24), lengths=(2, 5, 64))
        problems = problems_of(case, given, deterministic=deterministic)
        if any(why_not(problem, 91900, 90) for problem in problems) or any(problem.trivial for problem in problems):
            continue
        cupy_sdpa.get_plan_cache().clear()
        arrays = case.laid_out([fake.asarray(x) for x in case.arrays()])
        tangents = [fake.asarray(x) if one else None for x, one in zip(case.arrays(1), given, strict=True)]
        attention_jvp(*arrays, *tangents, deterministic=deterministic, **case.options(fake))
        before = cupy_sdpa.get_plan_cache().misses
        for problem in problems:
            assert cupy_sdpa.explain(problem)
        assert cupy_sdpa.get_plan_cache().misses == before


def test_problems_from_a_file(tmp_path):
    """``passes = ["jvp"]``, with the tangents."""
    path = tmp_path / "shapes.toml"
    text = '[[attention]]\nq = [64, 8, 256, 1]\nk = [64, 8, 256, 1]\nv = [64, 8, 256, 1]\ndtype = "float16"\n'
    path.write_text(text + 'passes = ["jvp"]\ntangents = ["dq"]\n')
    shape = (64, 8, 256, 1)
    assert store.read_problems(path) == list(jvp_problems(shape, shape, shape, dtype="float16", tangents=["dq"]))
    path.write_text(text + 'tangents = ["dq"]\n')
    with pytest.raises(ValueError, match="tangents are for jvp"):
        store.read_problems(path)


# Errors


def zeros(*shape, dtype=np.float32):
    """Zeros in Fortran order."""
    return np.zeros(shape, dtype, order="F")


#: Changes of a valid call, the error, and words of the message.
INVALID = {
    "no_tangent": ({"dq": None}, ValueError, "dq, dk and dv are None; pass at least one"),
    "shape": ({"dq": zeros(8, 2, 5, 1)}, ValueError, r"dq has shape \(8, 2, 5, 1\); with q of shape \(8, 2, 6, 1\)"),
    "dtype": ({"dk": zeros(8, 2, 6, 1, dtype=np.float64)}, TypeError, "dk is float64 and k is float32"),
    "list": ({"dv": [1.0]}, TypeError, "dv is a list; attention takes numpy and CuPy arrays"),
    "k": ({"k": zeros(4, 2, 6, 1)}, ValueError, "the head dims .axis 0. of q and k differ, 8 and 4"),
    "paged": ({"page_table": zeros(1, 1, dtype=np.int32)}, Unsupported, "gather the pages into dense k and v"),
    "dbias": ({"dbias": zeros(6, 1, 1, 1)}, Unsupported, "has no dbias: .*can be appended to the head dims"),
    "unknown": ({"scal": 1.0}, TypeError, "there is no option scal; did you mean scale?"),
    "splits": ({"num_splits": 2}, ValueError, "num_splits is 2"),
    "out": ({"out": zeros(8, 2, 5, 1)}, ValueError, r"out has shape \(8, 2, 5, 1\).*must be \(8, 2, 6, 1\)"),
    "flag": ({"deterministic": 1}, TypeError, "deterministic is 1; it must be True or False"),
    "widened": ({"widened": 3}, TypeError, "widened is passed, and dq, dk or dv"),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_arguments(name):
    """The message names both values; nothing is written."""
    changes, error, words = INVALID[name]
    dout = np.full((8, 2, 6, 1), np.nan, np.float32, order="F")
    call = {"q": zeros(8, 2, 6, 1), "k": zeros(8, 2, 6, 1), "v": zeros(8, 2, 6, 1), "dq": zeros(8, 2, 6, 1), "dout": dout}
    with pytest.raises(error, match=words):
        attention_jvp(**(call | changes))
    assert np.isnan(dout).all()


def test_results_must_not_overlap():
    """Neither an input nor each other; and they must be writable."""
    x, y = zeros(8, 2, 6, 1), zeros(8, 2, 6, 1)
    for results in ({"dout": x}, {"out": y, "dout": y}):
        with pytest.raises(ValueError, match="overlaps another array"):
            attention_jvp(x, x, x, x, **results)
    y.flags.writeable = False
    with pytest.raises(ValueError, match="dout is read-only"):
        attention_jvp(x, x, x, x, dout=y)
    wide = widen(x, x, x, x)
    with pytest.raises(ValueError, match="widened is for"):
        attention_jvp(x, x, x, widened=wide, softcap=1.0)
    with pytest.raises(TypeError, match="widened is a int"):
        attention_jvp(x, x, x, widened=3)


#: The order of the axes of results in memory, and the gap after head_dim in multiples of 8.
OUTPUTS = {"a gap after each head": ((0, 1, 2, 3), 1), "heads outside": ((0, 2, 1, 3), 0), "both": ((0, 2, 3, 1), 1)}


@pytest.mark.parametrize("given", [(True, False, False), (False, True, False), (True, True, True)], ids=["dq", "dk", "all"])
@pytest.mark.parametrize("layout", OUTPUTS)
def test_results_with_any_strides(layout, given, fake):
    """Only the elements of the results are written, in every repeated call."""
    case = Case("strided results", d=16, hq=4, hkv=2, sq=5, skv=7, b=3, dtype="float16")
    arrays, tangents = case.arrays(), [x if one else None for x, one in zip(case.arrays(1), given, strict=True)]
    wanted = attention_jvp(*arrays, *tangents, return_stats=True)
    on_gpu, on_gpu_tangents = [fake.asarray(x) for x in arrays], [None if x is None else fake.asarray(x) for x in tangents]
    axes, gap = OUTPUTS[layout]
    for _ in range(5):
        results, memory = {}, []
        for name, x in zip(("out", "dout"), wanted, strict=False):
            shape = [x.shape[axis] for axis in axes]
            shape[0] += 8 * gap
            memory.append(poisoned(fake, tuple(shape), x.dtype))
            results[name] = memory[-1][: x.shape[0]].transpose(np.argsort(axes).tolist())
        results["stats"] = poisoned(fake, wanted[2].shape, np.float32)
        got = attention_jvp(*on_gpu, *on_gpu_tangents, **results)
        for one, x, result in zip(got, wanted, results.values(), strict=True):
            assert one is result
            np.testing.assert_allclose(one.get().astype(np.float64), x.astype(np.float64), atol=0.02)
        for x, result in zip(memory, wanted, strict=False):
            assert np.isnan(x.get()).sum() == x.size - result.size


WRONG_STATS = {
    "shape": (zeros(5, 2, 1), ValueError, r"stats has shape \(5, 2, 1\)"),
    "order": (np.zeros((6, 2, 1), np.float32), ValueError, "stats has strides .*allocate it with order='F'"),
    "dtype": (zeros(6, 2, 1, dtype=np.int32), TypeError, "stats is int32"),
    "list": ([0.0], TypeError, "stats is a list"),
}


@pytest.mark.parametrize("with_values", [False, True])
@pytest.mark.parametrize("engine", ["numpy", "fake"])
@pytest.mark.parametrize("name", WRONG_STATS)
def test_invalid_stats(name, with_values, engine, request):
    """The message names the value; nothing is written."""
    stats, error, words = WRONG_STATS[name]
    xp = np if engine == "numpy" else request.getfixturevalue("fake")
    x = xp.asarray(np.ones((8, 2, 6, 1), np.float16, order="F"))
    dout = xp.asarray(np.full((8, 2, 6, 1), np.nan, np.float16, order="F"))
    stats = xp.asarray(stats) if isinstance(stats, np.ndarray) else stats
    for _ in range(2):
        with pytest.raises(error, match=words):
            attention_jvp(x, x, x, x, dv=x if with_values else None, dout=dout, stats=stats)
    assert np.isnan(dout if engine == "numpy" else dout.get()).all()


def test_head_dims_that_are_too_large_are_refused(fake):
    """Before anything is written, with the remedy."""
    case = Case("large", d=136, sq=8, dtype="float16")
    arrays = [fake.asarray(x) for x in (*case.arrays(), *case.arrays(1))]
    dout = poisoned(fake, arrays[0].shape, np.float16)
    with pytest.raises(
        Unsupported, match=r"head dims 136 and 136 needs .*Use head dims with D . Dv, 2 D and 2 Dv up to 256 on Hopper"
    ):
        attention_jvp(*arrays, dout=dout)
    assert np.isnan(dout.get()).all()


def test_mixed_arrays(fake):
    """Tangents are on the engine of the arrays."""
    x = np.asfortranarray(np.ones((8, 1, 4, 1), np.float16))
    y = fake.asarray(x)
    with pytest.raises(TypeError, match="arrays are mixed"):
        attention_jvp(y, y, y, x)
    with pytest.raises(TypeError, match="float32"):
        attention_jvp(*[fake.asarray(x.astype(np.float32))] * 4)


@pytest.mark.parametrize(
    ("options", "dims", "widths", "joint"),
    [
        ({}, (64, 64), (128, 128), False),
        ({"softcap": 2.0}, (56, 56), (120, 112), True),
        ({"softcap": 2.0}, (64, 64), (128, 128), False),
        ({"softcap": 2.0}, (120, 120), (248, 240), True),
        ({"softcap": 2.0}, (128, 128), (256, 256), False),
        ({"dropout_p": 0.5}, (56, 56), (112, 112), False),
        ({"cu_seqlens_q": 0}, (40, 24), (80, 80), True),
        ({}, (64, 32), (104, 128), True),
        ({}, (56, 56), (120, 112), True),
        ({"sinks": 0}, (56, 56), (112, 112), False),
        ({"sinks": 0, "softcap": 2.0}, (56, 56), (120, 112), True),
    ],
    ids=str,
)
def test_head_dims_of_the_passes(options, dims, widths, joint):
    """No larger than necessary; equal where kernels need it."""
    form = form_of(*dims, (True, True, True), options)
    assert (form.score_width, form.product_width) == widths
    assert form.joint is joint
    assert form_of(*dims, (True, False, False), {}).product_width == dims[0]
