"""Score and mask functions: compared with dense arrays, with the options that they replace, planned, and their errors."""

import inspect
import os

import numpy as np
import pytest
from engines import numbers, one_in
from functions import (
    GPUS,
    HKV,
    HQ,
    INTEGERS,
    LEARNED,
    OPERATIONS,
    ZOO,
    B,
    Functions,
    agrees,
    arrays,
    drawn,
    parts_have_plans,
    refused,
    right_on_the_gpu,
)

from cupy_sdpa import Unsupported, attention, problem, zoo

EVERY = [*ZOO, *OPERATIONS]


@pytest.mark.parametrize("functions", one_in(2, EVERY), ids=str)
def test_functions_match_dense_arrays(functions):
    """The graph equals a call of the function with whole arrays; the gradients equal finite differences."""
    agrees(functions, s=42)


@pytest.mark.parametrize("number", numbers(320, quick=8, sweep=20))
def test_random_functions_match_dense_arrays(number):
    """Both passes."""
    agrees(drawn(number), s=20)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("functions", EVERY, ids=str)
def test_functions_are_right_on_the_gpu(functions, dtype, cupy):
    """Both passes within the tolerance policy."""
    right_on_the_gpu(cupy, dtype, *(functions.options(xp, q=200, kv=200) for xp in (np, cupy)))


@pytest.mark.gpu
@pytest.mark.sweep
@pytest.mark.parametrize("number", range(80))
def test_random_functions_are_right_on_the_gpu(number, cupy):
    """Both passes, compared with the same function in float64."""
    right_on_the_gpu(cupy, "bfloat16", *(drawn(number).options(xp, q=200, kv=200) for xp in (np, cupy)))


def asked(**options):
    """The problem of some functions."""
    return problem((32, 4, 70, 2), (32, 2, 70, 2), (32, 2, 70, 2), dtype="bfloat16", **options)


def test_a_problem_is_keyed_by_structure():
    """Functions with the same operations give the same problem, for any constants; others do not."""
    assert asked(score_mod=zoo.softcap(2.0)) is asked(score_mod=lambda s, b, h, i, j: 30.0 * np.tanh(s / 30.0))
    assert asked(score_mod=zoo.softcap(2.0)) != asked(score_mod=lambda s, b, h, i, j: 30.0 * np.tanh(s / 20.0))
    one, other = (asked(score_mod=zoo.temperature, tensors={"temperature": np.ones(4, np.float32) * n}) for n in (1, 2))
    assert one is other


@pytest.mark.parametrize(
    ("mask_mod", "options"),
    [
        (zoo.causal, {"causal": True}), (zoo.sliding_window(15), {"window": (15, 0)}), (zoo.nearby(9), {"window": (9, 9)}),
        (lambda b, h, i, j: (j - i < 5) & (i < j + 3), {"window": (2, 4)}), (lambda b, h, i, j: i > j, None),
    ],
    ids=["causal", "sliding", "nearby", "strict", "without_itself"],
)  # fmt: skip
def test_bands_are_recognized(mask_mod, options):
    """A condition on the distance becomes the band of the options; other conditions stay functions."""
    found = asked(mask_mod=mask_mod)
    assert found == asked(**options) if options else found.band is None
    assert asked(mask_mod=zoo.dilated(30, 3)).band[:2] == (30, 0), "a part of the function is the band"


#: Whether to plan every function for every GPU, which takes an hour.
NIGHTLY = os.environ.get("CUPY_SDPA_NIGHTLY", "0") != "0"
CONDITIONS = [
    Functions("condition", lambda s, b, h, i, j: np.where(s > i - 1.5, s, -np.inf)),
    Functions("condition around a mask", lambda s, b, h, i, j: np.where(s > 0, np.where(i >= j, s, -np.inf), 0.5 * s)),
]
PLANNED = [*dict.fromkeys([*ZOO, *LEARNED]), *INTEGERS, *CONDITIONS, *OPERATIONS, *map(drawn, range(8))]


@pytest.mark.cudnn
@pytest.mark.parametrize("number", one_in(3, range(len(PLANNED))), ids=lambda number: str(PLANNED[number]))
def test_a_function_is_planned(number, planned):
    """The real cuDNN plans the gradients for the H200, also of arrays, or the table rules them out; other GPUs and passes in
    turn.
    """
    functions, shapes = PLANNED[number], ((64, HQ, 200, B), (64, HKV, 200, B), (64, HKV, 200, B))
    options = {"dtype": "bfloat16", **functions.options(q=200, kv=200)}
    asked = [("h200", {"backward": True, "return_dtensors": functions in LEARNED})]
    turn = number % (2 * len(GPUS))
    others = [(gpu, {"backward": backward}) for gpu in GPUS for backward in (False, True)]
    for gpu, passes in [*asked, *(others if NIGHTLY else others[turn : turn + 1])]:
        parts_have_plans(planned, problem(*shapes, **options, **passes), gpu)


# Lines of the user, and operators


def test_a_refusal_names_the_operations_and_their_lines(fake):
    """For operators, numpy functions, and indexing with conditions."""

    def function(score, b, h, q_idx, kv_idx, seen):
        return np.where(seen[kv_idx], score * 2.5, np.exp(score))

    q, k, v, _ = map(fake.asarray, arrays("float16", s=40))
    with refused(), pytest.raises(Unsupported) as caught:
        attention(q, k, v, score_mod=function, tensors={"seen": fake.ones(40, bool)})
    note = "\n".join(caught.value.__notes__)
    for operation in ("mul", "exp", "cmp_neq", "binary_select"):
        assert f"{operation} at {__file__}:{function.__code__.co_firstlineno + 1}" in note


@pytest.mark.parametrize(
    "function",
    [
        lambda i, j: (i > j) ^ (j > 2), lambda i, j: True ^ (i > j), lambda i, j: (i > j) ^ np.True_, lambda i,
        j: (i > j) & True,
        lambda i, j: False | (i > j), lambda i, j: ~(i > j), lambda i, j: np.logical_not(i > j) & ~(j > 2),
        lambda i, j: ((i > j) == True) & True, lambda i, j: (i > j) != (j > 2), lambda i, j: (i > j) == 1,  # noqa: E712
        lambda i, j: np.where(i > j, j > 2, False), lambda i, j: (i * np.int32(3) // np.int64(2)) % np.uint8(2) == 1,
        lambda i, j: i**np.array(2) > j * np.float32(2.5), lambda i, j: np.clip(i, None, np.array(3)) >= j,
        lambda i, j: (i > j) * (j + 1) - (j > 2) > 0, lambda i, j: np.True_ ^ (i > j) ^ True,
        lambda i, j: (i & 5) > (j & 2), lambda i, j: ((i - 3) & np.int32(6)) != j, lambda i, j: ((i - 3) & -2) > -j,
        lambda i, j: (1 | (i - j)) == 3, lambda i, j: ((i - 4) ^ 5) > j, lambda i, j: ~i + 3 > -j, lambda i, j: (6 ^ i) > ~(j - 4),
        lambda i, j: (i - 3) >> 1 == j - 3, lambda i, j: i << 2 > j << np.int64(1), lambda i, j: (i | -3) > j - 4,
    ],
)  # fmt: skip
def test_operators_of_conditions_and_integers(function):
    """They agree with index arrays, with Python's and numpy's numbers on either side."""
    q, k, v, _ = arrays(s=7)
    mask = np.asfortranarray(np.broadcast_to(function(*np.ogrid[:7, :7]), (7, 7)).T[:, :, None, None])
    got = attention(q, k, v, mask_mod=lambda b, h, i, j: function(i, j))
    np.testing.assert_allclose(got, attention(q, k, v, mask=mask), atol=1e-12)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda i, j: (i > j) ^ 1, "x != 0 is a condition"), (lambda i, j: 1 ^ (i > j), "x != 0 is a condition"),
        (lambda i, j: (i > j) ^ 0.5, "x != 0 is a condition"), (lambda i, j: (i > j) & 1, "such as q_idx & 3"),
        (lambda i, j: np.int64(1) | (i > j), "such as q_idx & 3"), (lambda i, j: (i & j) > 2, "such as q_idx & 3"),
        (lambda i, j: (i & 1.0) > 2, "such as q_idx & 3"), (lambda i, j: np.logical_not(i), "x != 0 is a condition"),
        (lambda i, j: 0 < i < j, "a < b < c"), (lambda i, j: not i > j, "~"), (lambda i, j: bool(i > j) & (i > j), "np.where"),
        (lambda i, j: i in (1, 2), "np.where"), (lambda i, j: 2 >> i == j, "a number of bits, such as q_idx >> 3"),
        (lambda i, j: i << -1 == j, "a number of bits"), (lambda i, j: np.round(0.5 * i, 1) > j, "1 decimals"),
        (lambda i, j: (i > j) == None, "NoneType is used as a number"),  # noqa: E711
        (lambda i, j: np.sinc(i) > j, "np.sinc is not supported in score functions"),
    ],
)  # fmt: skip
def test_operators_that_are_refused_name_a_remedy(function, text):
    """A TypeError from the line of the function."""
    q, k, v, _ = arrays(s=7)
    with pytest.raises(TypeError, match=text) as caught:
        attention(q, k, v, mask_mod=lambda b, h, i, j: function(i, j))
    assert any(entry.name == "<lambda>" for entry in caught.traceback)
    assert any(entry.lineno + 1 == inspect.getsourcelines(function)[1] for entry in caught.traceback)
