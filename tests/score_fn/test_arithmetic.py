"""Arithmetic in score and mask functions: integers are exact, floats are accurate, mistakes are reported with their line."""

import sys

import numpy as np
import pytest
from engines import one_in
from functions import HKV, HQ, INTEGERS, B, agrees, arrays, evaluated

from cupy_sdpa import attention, attention_backward, attention_vjp, explain, problem, zoo

# Integers


@pytest.mark.parametrize("case", one_in(6, INTEGERS), ids=str)
def test_integers_are_exact(case, engine):
    """Both passes with masks and scores from integers agree with numpy's int64 arithmetic."""
    dtype, tolerance = ("float16", 2e-2) if engine.on_cudnn else ("float32", 1e-5)
    agrees(case, s=200, put=engine.put, dtype=dtype, tolerance=tolerance)


@pytest.mark.slow
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


@pytest.mark.parametrize("number", [2**63, -(2**70), 2**31, -(2**31) - 1])
def test_integers_that_are_too_large_raise(number, engine):
    """Integers of more than 64 bits in the line of the function; more than 32 bits on the GPU, where floats have no limit."""
    x = engine.normal(0, 8, 1, 9, 1)

    def seen(b, h, q_idx, kv_idx):
        return (q_idx + number) % 3 == kv_idx % 3

    if abs(number) > 2**62:
        with pytest.raises(OverflowError, match=f"{number} does not fit into 64 bits") as caught:
            attention(x, x, x, mask_mod=seen)
        assert any(entry.name == "seen" for entry in caught.traceback)
    elif engine.on_cudnn:
        with pytest.raises(OverflowError, match=f"the integer {number}; on the GPU integers have 32 bits"):
            attention(x, x, x, mask_mod=seen)
        attention(x, x, x, mask_mod=lambda b, h, i, j: (i + (2**31 - 9)) % 3 == (j + -(2**31)) % 3)
    else:
        j, i = np.ogrid[:9, :9]
        mask = np.asfortranarray(((i + number) % 3 == j % 3)[:, :, None, None])
        np.testing.assert_array_equal(attention(x, x, x, mask_mod=seen), attention(x, x, x, mask=mask))


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
    program = problem(shape, shape, shape, dtype="bfloat16", mask_mod=mask_mod).settings.expression
    assert [step.mode for step in program.steps if step.args and step.mode != "cmp_eq"] == modes


def test_floats_use_no_integer_operations():
    """A function of the score alone has a program without integers."""
    asked = problem(*[(32, 1, 128, 1)] * 3, dtype="bfloat16", score_mod=zoo.softcap(20.0))
    assert not {step.kind for step in asked.settings.expression.steps} & {"int", "bool"}


def test_a_product_of_distances_with_floats_does_not_wrap_around():
    """A distance times a float is a float: distances are below 2**31, but their squares may not be."""

    def gaussian(score, b, h, i, j):
        return score - (i - j) * (0.5 / 9) * (i - j)

    asked = problem(*[(32, 1, 64, 1)] * 3, dtype="bfloat16", score_mod=gaussian)
    assert {step.kind for step in asked.settings.expression.steps if step.mode == "mul"} == {"float"}


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


@pytest.mark.parametrize(
    "function",
    [np.expm1, lambda s: np.log1p(abs(s)), lambda s: np.hypot(s, 0.5), lambda s: s % 0.7, lambda s: s // 0.7],
    ids=["expm1", "log1p", "hypot", "remainder", "quotient"],
)
def test_composed_functions(function, engine):
    """The scores, which the log-sum-exp of a single key shows, within the accuracy of float32."""
    q = engine.normal(0, 8, 1, 512, 1)
    q *= engine.dtype.type(0.4)
    k = engine.xp.ones((8, 1, 1, 1), engine.dtype, order="F")
    options = {"score_mod": lambda s, b, h, i, j: function(s), "return_stats": True, "scale": 0.5}
    stats = engine.get(attention(q, k, k, **options)[1])[:, 0, 0]
    score = 0.5 * engine.get(q).astype(np.float64).sum(axis=0)[0, :, 0]
    steady = abs(score / 0.7 - np.round(score / 0.7)) > 1e-4  # a step function may round either way
    np.testing.assert_allclose(stats[steady], function(score)[steady], atol=1e-3, rtol=1e-3)


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


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "numbers")) for name in STEPS])
def test_the_derivative_of_a_chain_takes_linear_work(name):
    """Twice as many operations need about twice as many function calls, from tracing to both graphs."""

    def made(length):
        def score_mod(s, b, h, i, j):
            for n in range(length):
                s = STEPS[name](s, i, n)
            return s

        attention_vjp(x, x, x, score_mod=score_mod)[1](x)

    x = np.ones((4, 1, 2, 1), np.float32, order="F")
    short, long = (_work(made, length) for length in (50, 100))
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


@pytest.mark.slow
def test_the_gradient_through_many_maxima_does_not_vanish():
    """Each has the factor 1 or 1/2; the product of 1100 factors 1/2 would underflow before the factors of 2 are
    applied.
    """

    def score_mod(s, b, h, i, j):
        for n in range(1100):
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


@pytest.mark.cudnn  # the key of a stored plan contains the build of the library
@pytest.mark.slow
def test_empty_values_have_a_log_sum_exp():
    """Dv = 0: the output is empty, and the statistics follow from the scores, with every option that changes them."""
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
