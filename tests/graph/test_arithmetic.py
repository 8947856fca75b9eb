"""Arithmetic in score and mask functions: integers are exact, floats are accurate, mistakes are reported with their line."""

import sys
from typing import Any

import numpy as np
import pytest
from functions import HKV, HQ, INTEGERS, B, arrays, dense_attention, evaluated, right_on_the_gpu
from planner import library_version, plan_problem

from cupy_sdpa import attention, attention_backward, explain, problem, zoo
from cupy_sdpa.calls import user_functions
from cupy_sdpa.graph import graph_of
from cupy_sdpa.plans.plan import PlanInfo
from cupy_sdpa.support import gpus
from cupy_sdpa.support.why_not import why_not

NAMED = pytest.mark.parametrize("case", INTEGERS, ids=str)


# Integers


@NAMED
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_integers_are_exact_with_every_dtype(case, dtype):
    """Masks and scores from integers equal those of numpy's int64 arithmetic."""
    q, k, v, _ = arrays(dtype, s=200)
    options = case.options(q=200, kv=200)
    out, stats = attention(q, k, v, return_stats=True, **options)
    wanted, of_rows = dense_attention(q, k, v, 32**-0.5, options)
    tolerance = 1e-5 if dtype == "float32" else 0.03
    np.testing.assert_allclose(stats, of_rows, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(out.astype(np.float32), wanted, atol=tolerance)


def test_an_integer_mask_of_many_positions():
    """``(i * 8192 + j) % 3`` is exact for every query, also where the product exceeds 24 bits."""
    x = np.zeros((4, 1, 3000, 1), np.float32, order="F")
    _, stats = attention(x, x, x, mask_mod=lambda b, h, i, j: (i * 8192 + j) % 3 == 0, return_stats=True)
    i, j = np.ogrid[:3000, :3000]
    np.testing.assert_allclose(np.exp(stats[:, 0, 0]), ((i * 8192 + j) % 3 == 0).sum(axis=1), rtol=1e-6)


def test_int64_arrays_have_64_bits_on_the_cpu():
    """Document ids that differ by multiples of 2**32 differ, and constants may exceed 32 bits."""
    q, k, v, _ = arrays("float32", s=50)
    ids = {"document_id": np.arange(50) // 5 * 2**32}
    short = {"document_id": (np.arange(50) // 5).astype(np.int32)}
    out, wanted = (attention(q, k, v, mask_mod=zoo.causal_document, tensors=tensors) for tensors in (ids, short))
    np.testing.assert_array_equal(out, wanted)
    out, wanted = (attention(q, k, v, mask_mod=lambda b, h, i, j, n=n: (i * n + j) % 3 == 0) for n in (2**40, 1))
    np.testing.assert_array_equal(out, wanted)  # 2**40 % 3 is 1


@pytest.mark.parametrize("number", [2**63, -(2**70)])
def test_integers_of_more_than_64_bits_raise(number):
    """The error is raised in the line of the function."""
    with pytest.raises(OverflowError, match=f"{number} does not fit into 64 bits") as caught:
        problem((32, 1, 9, 1), (32, 1, 9, 1), (32, 1, 9, 1), dtype="bfloat16", mask_mod=lambda b, h, i, j: i + number > j)
    assert any(entry.name == "<lambda>" for entry in caught.traceback)


def test_integers_of_more_than_32_bits_raise_on_the_gpu():
    """For arrays by dtype, for constants by value; floats have no such limit."""
    shape = (64, 1, 9, 1)
    options = {"mask_mod": lambda b, h, i, j, x: x[i] == x[j], "tensors": {"x": np.arange(9)}}
    (reason,) = why_not(problem(shape, shape, shape, dtype="bfloat16", **options), 92800, 90)
    assert (reason.rule, reason.error) == ("int64-tensors", TypeError)
    assert "int64" in reason.text
    assert ".astype('int32')" in reason.text
    for number in (2**31, -(2**31) - 1):
        with pytest.raises(OverflowError, match=f"the integer {number}; on the GPU integers have 32 bits"):
            user_functions.check_scalars({"n0": number})
    user_functions.check_scalars({"n0": 2**31 - 1, "n1": -(2**31), "n2": 1e30})


@pytest.mark.parametrize("divisor", [0, 0.0])
@pytest.mark.parametrize("operation", ["//", "%"])
def test_division_by_the_constant_0_raises(divisor, operation):
    """As in Python."""
    divide = {"//": lambda x: x // divisor, "%": lambda x: x % divisor}[operation]
    x = np.ones((4, 1, 5, 1))
    for function in (lambda s, b, h, i, j: s + divide(i), lambda s, b, h, i, j: divide(s)):
        with pytest.raises(ZeroDivisionError):
            attention(x, x, x, score_mod=function)


@pytest.mark.parametrize(
    ("mask_mod", "modes"),
    [
        (lambda b, h, i, j: i // 16 == 1, ["div"]),
        (lambda b, h, i, j: (i + j) % 2 == 0, ["add", "div", "mul", "sub"]),
        (lambda b, h, i, j: i % 16 // 4 == 0, ["div", "mul", "sub", "div"]),
    ],
    ids=["quotient", "remainder", "both"],
)
def test_floor_division_of_nonnegative_integers_is_short(mask_mod, modes):
    """A quotient of positions is one division, a remainder three operations."""
    shape = (32, 1, 64, 1)
    program = problem(shape, shape, shape, dtype="bfloat16", mask_mod=mask_mod).settings.program
    assert [step.mode for step in program.steps if step.args and step.mode != "cmp_eq"] == modes


def test_floats_use_no_integer_operations():
    """The graph of a function of the score alone contains no integers."""
    shape = (32, 1, 128, 1)
    asked = problem(shape, shape, shape, dtype="bfloat16", score_mod=zoo.softcap(20.0))
    assert not [tensor for tensor in graph_of(asked).tensors if tensor.dtype.startswith("int")]


def test_a_product_of_distances_with_floats_does_not_wrap_around():
    """The zoo's Gaussian multiplies by a float first: distances are below 2**31, but their squares may not be."""
    asked = problem((32, 1, 64, 1), (32, 1, 64, 1), (32, 1, 64, 1), dtype="bfloat16", score_mod=zoo.gaussian(3.0))
    assert {step.kind for step in asked.settings.program.steps if step.mode == "mul"} == {"float"}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@NAMED
def test_integers_are_exact_on_the_gpu(case, dtype, cupy):
    """Both passes, compared with numpy."""
    known, there = (case.options(xp, q=200, kv=200) for xp in (np, cupy))
    right_on_the_gpu(cupy, dtype, known, there)


@pytest.mark.gpu
def test_wide_integers_raise_on_the_gpu(cupy):
    """No integer is truncated to 32 bits."""
    q, k, v = (cupy.asarray(x) for x in arrays("bfloat16", s=64)[:3])
    with pytest.raises(TypeError, match=r"tensors\['x'\] is int64; .*\.astype\('int32'\)"):
        attention(q, k, v, mask_mod=lambda b, h, i, j, x: x[i] == x[j], tensors={"x": cupy.arange(64)})
    with pytest.raises(OverflowError, match="integers have 32 bits"):
        attention(q, k, v, mask_mod=lambda b, h, i, j: (i + 2**40) % 3 == j % 3)


@pytest.mark.cudnn
@NAMED
def test_integer_arithmetic_is_planned(case, planned):
    """Gradients on the H200; a part of the functions on the other GPUs."""
    shapes = (64, HQ, 200, B), (64, HKV, 200, B), (64, HKV, 200, B)
    others = [name for name in gpus.REPRESENTATIVES if name != "h200"]
    number = INTEGERS.index(case)
    for gpu, backward in (("h200", True), (others[number // 3 % len(others)], False))[: 1 + (number % 3 == 0)]:
        asked = problem(*shapes, dtype="bfloat16", backward=backward, **case.options(q=200, kv=200))
        reasons = {reason.rule for reason in why_not(asked, planned(library_version), gpus.capability(gpu))}
        plan = planned(plan_problem, asked, gpu)
        assert not reasons
        assert isinstance(plan, PlanInfo), plan


# Floats

SMALL = np.array([1e-17, -1e-17, 3e-9, -2e-5, 1e-3, 0.0])
VALUES = {
    "expm1": (np.expm1, np.exp, [*SMALL, 0.3, -0.7, 5.0, -40.0, 300.0, 1000.0, -1000.0, np.inf, -np.inf]),
    "log1p": (np.log1p, lambda x: 1 / (1 + x), [*SMALL, 0.3, -0.7, 5.0, 1e10, 1e300, -1.0, np.inf]),
}


@pytest.mark.parametrize("name", VALUES)
def test_small_values_are_accurate(name):
    """The function and its derivative are within a few units in the last place of numpy's."""
    function, derivative, values = VALUES[name]
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(evaluated(function, values), function(values), rtol=2e-15)
        np.testing.assert_allclose(evaluated(function, values, derivative=True), derivative(np.array(values)), rtol=2e-15)
        single = np.asarray(values, np.float32)
        np.testing.assert_allclose(evaluated(function, single, dtype="float32"), function(single), rtol=1e-6)


SIDES = np.array([(3, 4), (1e200, 1), (1, 1e200), (-1e200, 1e200), (1e-200, 1e-200), (0, 0), (0, -2), (-5, 0), (1e-9, 1)]).T


def test_hypot_overflows_where_the_result_does():
    """No squares of large or small sides are computed; the derivative is x / hypot(x, y), and NaN at 0."""
    x, y = SIDES
    wanted = np.hypot(x, y)
    np.testing.assert_allclose(evaluated(np.hypot, x, y), wanted, rtol=1e-15)
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(evaluated(np.hypot, x, y, derivative=True), x / wanted, rtol=1e-15)


NUMBERS = np.random.default_rng(0).standard_normal(5000) * 10.0 ** np.random.default_rng(1).integers(-4, 5, 5000)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("divisor", [0.1, -0.1, 1.5, 3.0, -7.0, None], ids=str)
def test_floor_division_of_floats_matches_numpy(divisor, dtype):
    """``//`` and ``%`` give the same bits as numpy; ``1.0 // 0.1`` is 9."""
    x = np.asarray([1.0, -1.0, 0.3, 6.0, -6.0, 1e-20, -1e-20, 0.0, *NUMBERS], dtype)
    if divisor is None:
        y = np.asarray(np.roll(x, 77) + 0.01, dtype)
        np.testing.assert_array_equal(evaluated(lambda s, y: s % y, x, y, dtype=dtype), x % y)
        near = abs(x / y) < 2**20
        np.testing.assert_array_equal(evaluated(lambda s, y: s // y, x, y, dtype=dtype)[near], (x // y)[near])
        return
    np.testing.assert_array_equal(evaluated(lambda s: s % divisor, x, dtype=dtype), x % np.array(divisor, dtype))
    np.testing.assert_array_equal(evaluated(lambda s: s // divisor, x, dtype=dtype), x // np.array(divisor, dtype))


def test_the_derivative_of_a_remainder():
    """1 with respect to the dividend, minus the floored quotient with respect to the divisor."""
    x, y = np.array([7.3, -7.3, 7.3, -7.3]), np.array([2.0, 2.0, -2.0, -2.0])
    np.testing.assert_array_equal(evaluated(lambda s, y: s % y, x, y, derivative=True), 1.0)
    np.testing.assert_allclose(evaluated(lambda s, y: y % s, y, x, derivative=True), -(x // y))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "function",
    [np.expm1, lambda s: np.log1p(abs(s)), lambda s: np.hypot(s, 0.5), lambda s: s % 0.7, lambda s: s // 0.7],
    ids=["expm1", "log1p", "hypot", "remainder", "quotient"],
)
def test_composed_functions_are_right_on_the_gpu(function, cupy):
    """The scores, which the log-sum-exp of a single key shows, within the accuracy of float32."""
    rng = np.random.default_rng(0)
    q = np.asfortranarray(rng.standard_normal((8, 1, 512, 1)) * 0.4).astype(np.float16)
    k = np.ones((8, 1, 1, 1), np.float16, order="F")
    options = {"score_mod": lambda s, b, h, i, j: function(s), "return_stats": True, "scale": 0.5}
    _, stats = attention(cupy.asarray(q), cupy.asarray(k), cupy.asarray(k), **options)
    score = 0.5 * q.astype(np.float64).sum(axis=0)[0, :, 0]
    wanted = function(score)
    steady = abs(score / 0.7 - np.round(score / 0.7)) > 1e-4  # a step function may round either way
    np.testing.assert_allclose(cupy.asnumpy(stats)[:, 0, 0][steady], wanted[steady], atol=1e-3, rtol=1e-3)


# Amount of work


def _work(function, *arguments):
    """The number of Python function calls of a call."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
    return count


STEPS = {
    "tanh": lambda s, i, n: np.tanh(s) * 1.5 + s,
    "numbers": lambda s, i, n: s * (1.5 + n / 7) + np.sin(s) / (1.1 + n / 9),
    "maximum": lambda s, i, n: np.maximum(s, n + 0.5),
    "where": lambda s, i, n: np.where((s > n + 0.5) ^ (i < n), s * 2.0, s),
    "log1p": lambda s, i, n: np.log1p(abs(s)),
    "remainder": lambda s, i, n: s + (i + n) % 3,
}


@pytest.mark.parametrize("name", STEPS)
def test_the_derivative_of_a_chain_takes_linear_work(name):
    """Twice as many operations need about twice as many function calls, from tracing to both graphs."""

    def made(length):
        def score_mod(s, b, h, i, j):
            for n in range(length):
                s = STEPS[name](s, i, n)
            return s

        shape = (32, 1, 64, 1)
        graph_of(problem(shape, shape, shape, dtype="float32", backward=True, score_mod=score_mod))

    short, long = (_work(made, length) for length in (150, 300))
    assert long < 2.5 * short


def test_shared_conditions_take_linear_work():
    """A chain of forty conditions, each used twice in the next one, is visited once."""

    def mask_mod(b, h, i, j):
        distance, seen = i - j, i >= j
        for n in range(40):
            distance = distance + distance
            seen = (seen ^ (j > n)) & (distance > n)
        return ~seen

    shape = (32, 1, 64, 1)
    assert _work(lambda: problem(shape, shape, shape, dtype="float32", mask_mod=mask_mod)) < 100_000


def test_the_gradient_through_many_maxima_does_not_vanish():
    """Each has the factor 1 or 1/2; the product of two thousand factors 1/2 would underflow before the factors of 2 are
    applied.
    """

    def score_mod(s, b, h, i, j):
        for n in range(2000):
            s = np.maximum(s, -1000.0 - n)
        return s

    q, k, v, dout = arrays("float64", s=6)
    out, stats = attention(q, k, v, return_stats=True)
    wanted = attention_backward(dout, q, k, v, out, stats)
    for a, b in zip(attention_backward(dout, q, k, v, out, stats, score_mod=score_mod), wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


# Syntax and mistakes


def test_assignments_compute():
    """``s += 1`` is ``s = s + 1``."""

    def score_mod(s, b, h, i, j):
        before = s
        s += 1
        s -= 2.5
        s *= 3
        s /= 2
        s **= 2
        s %= 1.7
        s //= 0.5
        return s + before

    def mask_mod(b, h, i, j):
        seen = i >= j
        seen &= j > 2
        seen |= i == j
        seen ^= j == 5
        return seen

    def same(s, b, h, i, j):
        return ((s + 1 - 2.5) * 3 / 2) ** 2 % 1.7 // 0.5 + s

    q, k, v, _ = arrays(s=12)
    got = attention(q, k, v, score_mod=score_mod, mask_mod=mask_mod)
    wanted = attention(q, k, v, score_mod=same, mask_mod=lambda b, h, i, j: (((i >= j) & (j > 2)) | (i == j)) ^ (j == 5))
    np.testing.assert_array_equal(got, wanted)


def test_clip_takes_a_number_between_traced_bounds():
    """``np.clip(0.5, s, s + 1)``."""
    values = np.array([-2.0, -0.2, 0.1, 0.5, 0.9, 3.0])
    np.testing.assert_array_equal(evaluated(lambda s: np.clip(0.5, s, s + 1), values), np.clip(0.5, values, values + 1))


MISTAKES: dict[str, Any] = {
    "method": (lambda s, b, h, i, j: s.sigmoid(), {}, AttributeError, r"'sigmoid': write scipy\.special\.expit\(x\)"),
    "method_of_numpy": (lambda s, b, h, i, j: s.tanh(), {}, AttributeError, r"write np\.tanh\(x\) in place of x\.tanh\(\)"),
    "attribute": (lambda s, b, h, i, j: s.shape, {}, AttributeError, "no attribute 'shape'"),
    "out": (lambda s, b, h, i, j: np.add(s, 1, out=s), {}, TypeError, "np.add was called with the keywords out"),
    "where": (lambda s, b, h, i, j: np.where(s > 0), {}, TypeError, r"write np\.where\(condition, a, b\)"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_reported_with_their_line(name):
    """The message names what to write instead."""
    function, tensors, error, text = MISTAKES[name]
    x = np.ones((4, 1, 5, 1))
    with pytest.raises(error, match=text) as caught:
        attention(x, x, x, score_mod=function, tensors=tensors)
    assert any(entry.name == "<lambda>" for entry in caught.traceback)


SIGNATURES = {
    "missing": (lambda s, b, h, i, j, w: s, {}, TypeError, r"tensors has no arrays: .*missing 1 required .*'w'"),
    "another": (lambda s, b, h, i, j, w: s, {"x": np.ones(1)}, TypeError, r"tensors has x: .*missing 1 required .*'w'"),
    "few": (lambda s: s, {}, TypeError, r"f\(score, b, h, q_idx, kv_idx, \*\*tensors\) -> score"),
    "taken": (
        lambda s, b, h, i, j: s,
        {"h": np.ones(1)},
        ValueError,
        r"tensors has 'h', which is among the first 5 parameters of score_mod",
    ),
    "taken_first": (lambda s, b, h, i, j, **t: s, {"s": np.ones(1)}, ValueError, "tensors has 's'"),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_errors_name_the_tensors(name):
    """The message contains the signature and the names in ``tensors``."""
    function, tensors, error, text = SIGNATURES[name]
    x = np.ones((4, 1, 5, 1))
    with pytest.raises(error, match=text):
        attention(x, x, x, score_mod=function, tensors=tensors)


def test_exceptions_of_the_function_are_unchanged():
    """A TypeError raised inside the function is not reported as a signature error."""
    x = np.ones((4, 1, 5, 1))
    with pytest.raises(TypeError, match=r"^object of type 'int' has no len\(\)$"):
        attention(x, x, x, score_mod=lambda s, b, h, i, j: len(3))


@pytest.mark.cudnn  # the key of a stored plan contains the build of the library
def test_empty_values_have_a_log_sum_exp():
    """Dv = 0: the output is empty, and the statistics are those of the scores, with every option that changes them."""
    q, k, v, _ = arrays(s=20)
    empty = np.empty((0, *v.shape[1:]), order="F")
    for options in ({}, {"causal": True}, {"sinks": np.ones(HQ, np.float32)}, {"seq_lens_kv": np.array([0, 7], np.int32)}):
        out, *got = attention(q, k, empty, return_stats="max_sumexp", **options)
        _, *wanted = attention(q, k, v, return_stats="max_sumexp", **options)
        assert out.shape == (0, HQ, 20, B)
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(a, b)
    shapes = (64, HQ, 20, B), (64, HKV, 20, B), (0, HKV, 20, B)
    report = explain(problem(*shapes, dtype="bfloat16", return_stats=True), gpu="h200")
    assert not report
    assert "head_dim of v is 0" in str(report)
