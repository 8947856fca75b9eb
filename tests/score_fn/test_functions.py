"""Score and mask functions: compared with dense arrays, planned, on the GPU, and their keys."""

import contextlib
import gc
import inspect
import math
import os
import weakref

import numpy as np
import pytest
from functions import HQ, OPERATIONS, ZOO, B, agrees, arrays, dense_attention, dense_gradients, packed, right_on_the_gpu
from on_gpu import poisoned, poisoning
from planner import library_version, plan_problem
from tolerance import accumulation_floor, assert_close, gradient_floor

from cupy_sdpa import (
    Unsupported,
    alibi_slopes,
    attention,
    attention_backward,
    attention_vjp,
    dropout_mask,
    prepare,
    problem,
    zoo,
)
from cupy_sdpa.calls.arguments import read_forward, read_shapes
from cupy_sdpa.plans.plan import PlanInfo
from cupy_sdpa.problem.band import Band
from cupy_sdpa.score_fn.expression import AXES
from cupy_sdpa.score_fn.tracer import trace
from cupy_sdpa.support import gpus
from cupy_sdpa.support.why_not import why_not


@pytest.mark.parametrize("functions", [*ZOO, *OPERATIONS], ids=str)
def test_functions_match_dense_arrays(functions):
    """The graph equals a call of the function with whole arrays; the gradients equal finite differences."""
    agrees(functions)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("functions", [*ZOO, *OPERATIONS], ids=str)
def test_a_function_is_right_on_the_gpu(functions, dtype, cupy):
    """Both passes within the tolerance policy, with results full of NaN before."""
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


def asked(**functions):
    """The problem of some functions."""
    return problem((32, 4, 70, 2), (32, 2, 70, 2), (32, 2, 70, 2), dtype="bfloat16", **functions)


def test_a_problem_is_keyed_by_structure():
    """Functions with the same operations give the same problem, whatever their constants; others do not."""
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
    """A condition on the distance becomes the band of the options; other conditions stay functions."""
    found = asked(mask_mod=mask_mod)
    assert found.band == band
    assert (found.settings.program is None) == (mask_mod in (zoo.causal,) or (band is not None and band != Band(30, 0)))


@pytest.mark.parametrize(
    ("score_mod", "error", "text"),
    [
        (lambda s, b, h, i, j: s if s > 0 else 0, TypeError, "np.where"),
        (lambda s, b, h, i, j: math.tanh(s), TypeError, "np.tanh"),
        (lambda s, b, h, i, j: np.ones(4)[h] + s, TypeError, "tensors="),
        (lambda s, b, h, i, j: np.sinc(s), TypeError, "np.sinc is not supported in score functions"),
        (lambda s, b, h, i, j: i > j, TypeError, "mask_mod"),
    ],
    ids=["if", "math", "closure", "unknown", "condition"],
)
def test_untraceable_functions_raise_with_a_remedy(score_mod, error, text):
    """The error is raised in the user's line."""
    with pytest.raises(error, match=text) as caught:
        asked(score_mod=score_mod)
    assert any(entry.name == "<lambda>" for entry in caught.traceback) or text == "mask_mod"


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"mask_mod": zoo.causal, "tensors": [np.ones(3)]}, TypeError, "tensors is a list; it must be a mapping"),
        ({"tensors": {"x": np.ones(3)}}, ValueError, "tensors has x, but neither score_mod nor mask_mod"),
    ],
    ids=["list", "unread"],
)
def test_bad_tensors_raise(options, error, text):
    """In calls, and in explain() with shapes."""
    q, k, v, _ = arrays(s=40)
    with pytest.raises(error, match=text):
        attention(q, k, v, **options)
    with pytest.raises(error, match=text):
        asked(**options)


def test_functions_and_arrays_are_released():
    """A function, its closure and its arrays are released after the call."""

    class Cap:
        value = 3.0

    def called():
        weight, cap = np.ones((B, 40), np.float32), Cap()

        def score_mod(score, b, h, q_idx, kv_idx, weight):
            return cap.value * np.tanh(score / cap.value) + weight[b, kv_idx]

        q, k, v, dout = arrays(s=40)
        _, pullback = attention_vjp(q, k, v, score_mod=score_mod, tensors={"weight": weight}, return_dtensors=True)
        pullback(dout)
        return [weakref.ref(x) for x in (score_mod, cap, weight)]

    watched = called()
    gc.collect()
    assert [x() for x in watched] == [None] * 3


def test_operations_have_the_users_line():
    """For operators, numpy functions, and indexing with conditions."""

    def function(score, b, h, q_idx, kv_idx, seen):
        return np.where(seen[kv_idx], score * 2.5, np.exp(score))

    sizes = dict(zip(AXES, (1, 1, 4, 4), strict=True))
    done = trace(function, None, {"seen": np.ones(4, bool)}, sizes)
    line = f"{__file__}:{function.__code__.co_firstlineno + 1}"
    assert done.lines == dict.fromkeys(("mul", "exp", "cmp_neq", "binary_select"), line)


def test_a_refusal_names_the_operations_and_their_lines(monkeypatch):
    """A refusal of cuDNN lists the lines of the operations."""
    q, k, v, _ = arrays(s=40)
    call = read_forward(q, k, v, {"score_mod": lambda s, b, h, i, j: np.tanh(s) * 2.0})

    def refuse(device, memory):
        raise Unsupported("no engine")

    monkeypatch.setattr(call, "on_gpu", True)
    monkeypatch.setattr(call, "_run", refuse)
    monkeypatch.setattr("cupy_sdpa.device.cupy_runtime.on_device_of", lambda array: contextlib.nullcontext(0))
    with pytest.raises(Unsupported) as caught:
        call.run()
    (_, note) = caught.value.__notes__
    line = inspect.currentframe().f_lineno
    assert f"tanh_fwd at {__file__}:" in note
    assert abs(int(note.split("tanh_fwd at ")[1].split(",")[0].rsplit(":", 1)[1]) - line) < 20


# In combination with other options


def _lengths(xp, n):
    return {"seq_lens_q": xp.asarray([n - 70, n], np.int32), "seq_lens_kv": xp.asarray([n, n // 3], np.int32)}


def _starts(xp, n):
    starts = xp.asarray([0, n - 70, 2 * n - 90], np.int32)
    return {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": n, "max_seqlen_kv": n}


def _random(xp, *shape):
    return xp.asarray(np.asfortranarray(np.random.default_rng(6).standard_normal(shape).astype(np.float32)))


#: Whether to run the tests of about an hour, with eight hundred plans.
NIGHTLY = os.environ.get("CUPY_SDPA_NIGHTLY", "0") != "0"

#: Options, created from (array module, length), that functions are combined with.
OTHERS = {
    "lengths": _lengths,
    "packed": _starts,
    "packed_causal": lambda xp, n: _starts(xp, n) | {"causal": True},
    "bucket": lambda xp, n: {"bucket": 128},
    "bucket_lengths": lambda xp, n: {"bucket": 128, "causal": True} | _lengths(xp, n),
    "bias": lambda xp, n: {"bias": _random(xp, n, n, HQ, 1)},
    "mask": lambda xp, n: {"mask": _random(xp, n, n, 1, B) > -1},
    "causal": lambda xp, n: {"causal": True},
    "bottom_right": lambda xp, n: {"causal": "bottom_right"} | _lengths(xp, n),
    "window": lambda xp, n: {"window": (n // 2, 9)},
    "sinks": lambda xp, n: {"sinks": _random(xp, HQ)},
    "alibi": lambda xp, n: {"alibi_slopes": xp.asarray(alibi_slopes(HQ))},
    "softcap": lambda xp, n: {"softcap": 3.0},
    "dropout": lambda xp, n: {"dropout_p": 0.25, "seed": 7},
}


def _both(one, other):
    """Equivalent options: with a function, and with the options that replace it."""
    return lambda xp, n, others: (one(xp, n), other(xp, n, others))


def _numbers(n):
    return np.random.default_rng(8).standard_normal((B, n)).astype(np.float32)


def _documents(n):
    return np.sort(np.random.default_rng(9).integers(0, 3, (B, n)), axis=1).astype(np.int32)


def _own_bias(xp, n, others):
    keys = xp.asarray(np.asfortranarray(_numbers(n).T[:, None, None, :]))
    return {"bias": keys + others.get("bias", 0)}


def _own_mask(xp, n, others):
    ids = _documents(n)
    same = xp.asarray(np.asfortranarray((ids[:, :, None] == ids[:, None, :]).T[:, :, None, :]))
    return {"mask": same & others["mask"] if "mask" in others else same}


#: A function, and equivalent options.
EQUAL = {
    "softcap": _both(lambda xp, n: {"score_mod": zoo.softcap(2.0)}, lambda xp, n, others: {"softcap": 2.0}),
    "key_bias": _both(lambda xp, n: {"score_mod": zoo.key_bias, "tensors": {"weight": xp.asarray(_numbers(n))}}, _own_bias),
    "document": _both(
        lambda xp, n: {"mask_mod": zoo.document, "tensors": {"document_id": xp.asarray(_documents(n))}}, _own_mask
    ),
}


#: The function together with the options; the function is applied first, and its result is changed by the options.
PAIRS = [(name, other) for name in EQUAL for other in OTHERS if other not in ("softcap", "alibi") or name == "document"]


def _laid(other):
    return packed if "packed" in other else lambda x: x


@pytest.mark.parametrize(("name", "other"), PAIRS)
def test_functions_with_other_options_match_equivalent_options(name, other):
    """Both passes equal those of the equivalent option, which the reference supports."""
    q, k, v, dout = (_laid(other)(x) for x in arrays(s=90))
    others = OTHERS[other](np, 90)
    if "seed" in others:
        others = {"dropout_p": 0.25, "dropout_mask": dropout_mask(q, k, **others)}
    results = []
    for own in EQUAL[name](np, 90, others):
        out, stats = attention(q, k, v, return_stats=True, **(others | own))
        results.append([out, stats, *attention_backward(dout, q, k, v, out, stats, **(others | own))])
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def has_plan(call, asked, gpu, allowed):
    """Assert that a problem has a plan on a GPU, or is refused for one of the reasons allowed; ``call`` plans in a child."""
    reasons = {reason.rule for reason in why_not(asked, call(library_version), gpus.capability(gpu))}
    assert reasons <= allowed
    plan = call(plan_problem, asked, gpu)
    assert isinstance(plan, PlanInfo) or reasons, plan


OTHER_GPUS = [gpu for gpu in gpus.REPRESENTATIVES if gpu != "h200"]


@pytest.mark.cudnn
@pytest.mark.parametrize(("name", "other"), PAIRS)
def test_functions_with_other_options_are_planned(name, other, planned):
    """Gradients for the H200, a part of the forward passes for other GPUs; except what the table refuses."""
    known = OTHERS[other](np, 200)
    q, k, v, _ = map(_laid(other), arrays("bfloat16", 200, 64))
    number = PAIRS.index((name, other))
    for gpu, backward in (("h200", True), (OTHER_GPUS[number // 2 % len(OTHER_GPUS)], False))[: 1 + number % 2]:
        asked = read_shapes(q, k, v, known | EQUAL[name](np, 200, known)[0], backward=backward, return_stats=not backward)
        has_plan(planned, asked, gpu, {"packed-gradients", "query-numbers"})


@pytest.mark.cudnn
@pytest.mark.parametrize("functions", ZOO, ids=str)
def test_a_function_is_planned(functions, planned):
    """Gradients for the H200; other GPUs and passes in turn."""
    asked_on(planned, functions, "h200", True)
    number = ZOO.index(functions)
    if number % 2:
        asked_on(planned, functions, OTHER_GPUS[number // 2 % len(OTHER_GPUS)], number % 4 == 1)


@pytest.mark.cudnn
@pytest.mark.sweep
@pytest.mark.parametrize("gpu", gpus.REPRESENTATIVES)
@pytest.mark.parametrize("functions", [*ZOO, *OPERATIONS] if NIGHTLY else OPERATIONS[::5], ids=str)
def test_every_function_is_planned_for_every_gpu(functions, gpu, planned):
    """Both passes."""
    for backward in (False, True):
        asked_on(planned, functions, gpu, backward)


def asked_on(call, functions, gpu, backward):
    """Assert that a pass of a function is planned, or refused because of an array with one element per query."""
    shapes = (64, HQ, 200, B), (64, HQ // 2, 200, B), (64, HQ // 2, 200, B)
    asked = problem(*shapes, dtype="bfloat16", backward=backward, **functions.options(q=200, kv=200))
    has_plan(call, asked, gpu, {"query-numbers"})


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "other"), PAIRS)
def test_functions_with_other_options_are_right_on_the_gpu(name, other, cupy):
    """Both passes, compared with numpy."""
    known, there = (OTHERS[other](xp, 200) for xp in (np, cupy))
    function, there = EQUAL[name](np, 200, known)[0], there | EQUAL[name](cupy, 200, there)[0]
    if "seed" in known:
        q, k, *_ = map(cupy.asarray, arrays("bfloat16", 200, 64))
        known = {"dropout_p": 0.25, "dropout_mask": cupy.asnumpy(dropout_mask(q, k, **known))}
    right_on_the_gpu(cupy, "bfloat16", known | function, there, _laid(other))


@pytest.mark.gpu
def test_a_prepared_function_accepts_other_arrays_and_constants(cupy):
    """A prepared call uses the arrays and constants that are passed; a captured CUDA graph reads the arrays again."""
    q, k, v, _ = map(cupy.asarray, arrays("bfloat16", 200, 64))
    slopes = cupy.ones(HQ, np.float32)
    call = prepare(q, k, v, score_mod=zoo.temperature, tensors={"temperature": slopes})
    assert_same = lambda got, t: cupy.testing.assert_array_equal(got, attention(q, k, v, scale=t / 8))  # noqa: E731
    assert_same(call(q, k, v), 1.0)
    assert_same(call(q, k, v, tensors={"temperature": 2 * slopes}), 2.0)
    out = cupy.empty_like(q)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        call(q, k, v, out=out)
        graph = stream.end_capture()
        slopes *= 4
        stream.synchronize()
        graph.launch(stream)
        stream.synchronize()
    assert_same(out, 4.0)


@pytest.mark.parametrize("bound", [math.inf, math.nan], ids=str)
def test_infinite_and_nan_bounds_of_mask_functions(bound):
    """A mask function may mask nothing, or, with NaN, everything."""
    x = np.asfortranarray(np.random.default_rng(0).random((4, 2, 6, 2)))
    got = attention(x, x, x, mask_mod=lambda b, h, i, j: abs(i - j) <= bound)
    np.testing.assert_allclose(got, attention(x, x, x) if bound == math.inf else np.zeros_like(x))


@pytest.mark.parametrize("wanted", [1, 0, 2.5], ids=str)
def test_return_dtensors_rejects_numbers(wanted):
    """Neither a number nor a flag of another type is accepted."""
    x = np.ones((4, 1, 5, 1), order="F")
    with pytest.raises(TypeError, match=f"return_dtensors is {wanted}; it must be True, False"):
        attention_vjp(x, x, x, score_mod=lambda s, b, h, i, j, w: s * w, tensors={"w": np.ones(())}, return_dtensors=wanted)[1](
            x
        )


@pytest.mark.parametrize(
    "function",
    [
        lambda i, j: (i > j) ^ (j > 2), lambda i, j: True ^ (i > j), lambda i, j: (i > j) ^ np.True_, lambda i, j: (i > j) & True,
        lambda i, j: False | (i > j), lambda i, j: ~(i > j), lambda i, j: np.logical_not(i > j) & ~(j > 2),
        lambda i, j: ((i > j) == True) & True, lambda i, j: (i > j) != (j > 2), lambda i, j: (i > j) == 1,  # noqa: E712
        lambda i, j: np.where(i > j, j > 2, False), lambda i, j: (i * np.int32(3) // np.int64(2)) % np.uint8(2) == 1,
        lambda i, j: i**np.array(2) > j * np.float32(2.5), lambda i, j: np.clip(i, None, np.array(3)) >= j,
        lambda i, j: (i > j) * (j + 1) - (j > 2) > 0, lambda i, j: np.True_ ^ (i > j) ^ True,
    ],
)  # fmt: skip
def test_operators_of_conditions_and_integers(function):
    """They equal those of index arrays, with Python's and numpy's numbers on either side."""
    q, k, v, _ = arrays(s=7)
    mask = np.asfortranarray(np.broadcast_to(function(*np.ogrid[:7, :7]), (7, 7)).T[:, :, None, None])
    got = attention(q, k, v, mask_mod=lambda b, h, i, j: function(i, j))
    np.testing.assert_allclose(got, attention(q, k, v, mask=mask), atol=1e-12)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda i, j: (i > j) ^ 1, "x != 0 for a condition"),
        (lambda i, j: 1 ^ (i > j), "x != 0 for a condition"),
        (lambda i, j: (i > j) ^ 0.5, "x != 0 for a condition"),
        (lambda i, j: (i > j) & 1, "x % 2 == 1 for a bit"),
        (lambda i, j: np.int64(1) | (i > j), "x % 2 == 1 for a bit"),
        (lambda i, j: i & 1, "x % 2 == 1 for a bit"),
        (lambda i, j: ~i > j, "x != 0 for a condition"),
        (lambda i, j: np.logical_not(i), "x != 0 for a condition"),
        (lambda i, j: 0 < i < j, "a < b < c"),
        (lambda i, j: not i > j, "~"),
        (lambda i, j: bool(i > j) & (i > j), "np.where"),
        (lambda i, j: i in (1, 2), "np.where"),
        (lambda i, j: i >> 1 == j, "np.right_shift is not supported"),
        (lambda i, j: (i > j) == None, "NoneType is used as a number"),  # noqa: E711
    ],
)  # fmt: skip
def test_operators_that_are_refused_name_a_remedy(function, text):
    """A TypeError from the line of the function."""
    q, k, v, _ = arrays(s=7)
    with pytest.raises(TypeError, match=text) as caught:
        attention(q, k, v, mask_mod=lambda b, h, i, j: function(i, j))
    assert any(entry.name == "<lambda>" for entry in caught.traceback)
