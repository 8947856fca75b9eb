"""The self-test finds faults: lost options, wrong elements, stale and missing writes, other bits; right calls have no finding."""

import itertools
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from fake_cupy import program
from tolerance import rounding_floor

import cupy_sdpa
from cupy_sdpa.check import Case
from cupy_sdpa.check.case import Paged
from cupy_sdpa.check.comparison import FACTOR, max_error
from cupy_sdpa.check.data import build
from cupy_sdpa.check.execute import ExpectedResults, execute
from cupy_sdpa.check.formats import FORMATS, dtype_of
from cupy_sdpa.check.tolerances import FP8_SUM

#: Sizes that show the faults.
SIZES = {"d": 16, "dv": 16, "hq": 4, "hkv": 2, "sq": 20, "skv": 30}


@pytest.fixture
def replaced(monkeypatch):
    """Replaces a public function by what a fault makes of it."""
    return lambda name, fault: monkeypatch.setattr(cupy_sdpa, name, fault(getattr(cupy_sdpa, name)))


def paged(page=2, lengths="random", num_splits=0, *, moved=False):
    """The option ``paged``."""
    return tuple(Paged(page, "pages", lengths, num_splits, "mixed", False, moved))


def in_options(change):
    """A fault: options are changed."""
    return lambda real: lambda *arrays, **options: real(*arrays, **change(options))


def in_results(change, at=None, when=lambda options: True):
    """A fault: the results of all calls ``when`` a condition holds, or of the one with the number ``at``, are changed in place.

    The change gets the results, the arrays and the options.
    """

    def fault(real):
        calls = itertools.count()

        def function(*arrays, **options):
            results = real(*arrays, **options)
            if when(options) and (at is None or next(calls) == at):
                change(results if isinstance(results, tuple) else (results,), arrays, options)
            return results

        return function

    return fault


# Changes of options


def without(name):
    return in_options(lambda options: {key: value for key, value in options.items() if key != name})


def changed(name, change):
    return in_options(lambda options: options | {name: change(options[name])})


def shifted(x):
    return np.roll(x, 1, axis=0)


def near_keys(score_mod):
    return lambda s, b, h, q, k: score_mod(s, b, h, q, k % 256)


# Changes of results


def put(index, value):
    def change(results, arrays, options):
        results[0][index] = value

    return change


def swap_heads(results, arrays, options):
    results[0][...] = results[0][:, ::-1].copy()


def write_beside(results, arrays, options):
    options["out"].base[...] = np.where(np.isnan(options["out"].base), 0, options["out"].base)


def change_input(results, arrays, options):
    arrays[0][0] += 1


def stale(results, arrays, options, kept=[]):  # noqa: B006 (kept from call to call)
    kept.append([x.copy() for x in results])
    for result, old in zip(results, kept[0], strict=True):
        if result.shape == old.shape:
            result[...] = old


def enlarge(index):
    """3 % too large."""

    def change(results, arrays, options):
        results[index][...] = (results[index].astype(np.float64) * 1.03).astype(results[index].dtype)

    return change


def first_bit(index):
    """Another bit of the first element."""

    def change(results, arrays, options):
        results[index].view(np.uint32).ravel(order="K")[:1] ^= 1

    return change


def padding_not_written(real):
    """The second call on the same memory leaves the padding as it was, which is NaN."""
    calls = itertools.count()

    def function(*arrays, out=None, **options):
        before = None if out is None else out.copy()
        result = real(*arrays, out=out, **options)
        if next(calls) == 1:
            result[:, :, 1:] = before[:, :, 1:]
        return result

    return function


CAUSAL = {"causal": "bottom_right"}
OF_PAGES = {"sq": 3, "skv": 12, "b": 3}
#: Faults in the options of the forward pass: the fault, the options and the sizes.
LOST = {
    "mask": (changed("mask", shifted), {"mask": ("kq11", "random")}, {}),
    "bias": (changed("bias", shifted), {"bias": ("k1h1", "float32", "normal")}, {}),
    "lengths": (changed("seq_lens_kv", lambda n: np.maximum(n - 1, 0)), {"seq_lens_kv": "random"}, {"b": 3}),
    "scale": (without("scale"), {"scale": 0.5}, {}),
    "softcap": (without("softcap"), {"softcap": 0.5}, {}),
    "alibi": (without("alibi_slopes"), {"alibi_slopes": "usual"}, {}),
    "sinks": (without("sinks"), {"sinks": "normal"}, {}),
    "window": (without("window"), {"window": (3, 3, "top_left")}, {}),
    "key positions": (changed("score_mod", near_keys), {"score_mod": ("near_key_100", "")}, {"sq": 1, "skv": 384}),
    "mask function": (without("mask_mod"), {"mask_mod": ("dilated", "")}, {}),
    "table of another sequence": (changed("page_table", lambda x: np.roll(x, 1, axis=1)), CAUSAL | {"paged": paged(3, "full")}, OF_PAGES),
    "order of pages": (changed("page_table", lambda x: x[::-1]), CAUSAL | {"paged": paged(3, "full")}, OF_PAGES),
    "a row after the length": (changed("seq_lens_kv", lambda n: n + 1), CAUSAL | {"paged": paged(3, "one")}, OF_PAGES),
    "a key less": (changed("seq_lens_kv", lambda n: n - 1), CAUSAL | {"paged": paged(3, "one")}, OF_PAGES),
}  # fmt: skip
#: Faults in the results of a call with a preallocated output, and the cause of the finding.
SPOILED = {
    "a NaN": (put((0, 0, 0, 0), np.nan), "out"),
    "an infinity": (put((3, 1, 2, 0), np.inf), "out"),
    "an element not written": (put((-1, -1, -1, -1), np.nan), "out"),
    "heads swapped": (swap_heads, "out"),
    "memory beside the result": (write_beside, "out"),
    "an input changed": (change_input, "q"),
    "results of earlier data": (stale, "out"),
}
#: Functions, the place of a result and its name, and the case. With bfloat16 a derivative has larger errors.
DERIVATIVES: dict[str, tuple[str, int, str, dict[str, Any]]] = {
    **{name: ("attention_backward", index, name, {"backward": True}) for index, name in enumerate(("dq", "dk", "dv"))},
    "dsinks": ("attention_backward", 3, "dsinks", {"backward": True, "options": {"sinks": "normal", "return_dsinks": True}}),
    "dbias": (
        "attention_backward", 3, "dbias", {"backward": True, "options": {"bias": ("kq11", "float32", "normal"), "return_dbias": True}},
    ),
    "jvp": ("attention_jvp", 1, "jvp", {"options": {"jvp": "qkv"}}),
    "jvp, softcap": ("attention_jvp", 1, "jvp", {"options": {"jvp": "qkv", "softcap": 2.0}}),
    "jvp, packed": ("attention_jvp", 1, "jvp", {"options": {"jvp": "qkv", "packed": ("full", "full", 0, 0, 0, "int32")}}),
}  # fmt: skip
PREALLOCATED = {
    "d": 8, "dv": 8, "hq": 2, "hkv": 2, "sq": 5, "skv": 7, "layouts": {"out": "dhsb+s"}, "options": {"preallocated": True},
}  # fmt: skip
DETERMINISTIC = {"sq": 1, "skv": 7, "options": {"stats": "max_sumexp", "deterministic": True}}
OF_BATCH = {
    "sq": 5, "skv": 7, "b": 3, "backward": True, "options": {"bias": ("kqhb", "float32", "normal"), "seq_lens_kv": "random"},
}  # fmt: skip
#: Faults: the values of the case, the function with the fault, the fault, and the beginning of the cause and a part of the message.
FAULTS = {
    **{f"lost: {name}, {dtype}": ({"dtype": dtype, **SIZES, "options": options, **sizes}, "attention", fault, "out", "")
       for name, (fault, options, sizes) in LOST.items() for dtype in ("float16", "bfloat16", "float32")},
    **{name: (PREALLOCATED, "attention", in_results(change), cause, "") for name, (change, cause) in SPOILED.items()},
    "another dtype": (
        {"dtype": "float16"}, "attention", lambda real: lambda *x, **o: real(*x, **o).astype(np.float32),
        "out", "out is float32, expected float16",
    ),
    "another array than out": (
        {"options": {"preallocated": True}}, "attention", lambda real: lambda *x, out=None, **o: real(*x, **o), "out", "call 1: out",
    ),
    "a fully masked row of 1e-30": (
        {"sq": 3, "options": {"mask_mod": ("nothing", "")}}, "attention",
        lambda real: lambda *x, **o: real(*x, **o) + np.float32(1e-30), "out", "must be exactly 0",
    ),
    "padding that one call does not write": (
        {"sq": 4, "b": 2, "options": {"seq_lens_q": "one", "preallocated": True}}, "attention", padding_not_written,
        "out", "call 2: out must be exactly 0",
    ),
    **{f"{name} 3 % too large, {dtype}": ({"dtype": dtype, **SIZES, **values}, function, in_results(enlarge(index)), cause, "")
       for name, (function, index, cause, values) in DERIVATIVES.items()
       for dtype in ("float16", "bfloat16", "float32", "float64") if dtype != "bfloat16" or "jvp" not in name},
    # the second call on these data; every call has the option
    **{f"bits of {name}, {'both passes' if backward else 'forward'}": (
        DETERMINISTIC | {"backward": backward}, "attention",
        in_results(first_bit(index), 2, lambda options: options["deterministic"]), name, f"bits of {name} differ")
       for index, name in enumerate(("out", "stats", "max", "sum_exp")) for backward in (False, True)},
    "bits of dq": (
        {"sq": 5, "skv": 7, "backward": True, "options": {"deterministic": True}}, "attention_backward",
        in_results(first_bit(0), 2, lambda options: options["deterministic"]), "dq", "bits of dq differ",
    ),
    **{f"bits of {name} of sequence {entry} alone": (
        OF_BATCH, function, in_results(first_bit(0), min(entry, 1), lambda options: options.get("batch_invariant")), name,
        f"bits of {name} of sequence {entry} depend on the rest of the batch")
       for function, name in (("attention", "out"), ("attention_backward", "dq")) for entry in (0, 2)},
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name, replaced):
    """A call with one fault is a finding; a correct call is not."""
    values, function, fault, cause, message = FAULTS[name]
    case = Case(**values)
    assert execute(case).kind == "passed"
    replaced(function, fault)
    outcome = execute(case)
    assert outcome.kind == "wrong"
    assert outcome.cause.split(", ")[0] == cause
    assert message in outcome.message


@pytest.mark.parametrize("option", ["deterministic", "num_splits"])
def test_moved_pages_must_give_the_same_bits(option, replaced):
    """A result that depends on the places of the pages is a finding if the call is reproducible."""
    options = {"paged": paged(num_splits=3 if option == "num_splits" else 0, moved=True)}
    case = Case(skv=8, options=options | ({"deterministic": True} if option == "deterministic" else {}))
    assert execute(case).kind == "passed"
    replaced("attention", in_results(first_bit(0), when=lambda options: options["page_table"][0, 0] & 1))
    found = [outcome for outcome in (execute(case.with_(seed=seed)) for seed in range(20)) if outcome.kind == "wrong"]
    assert found
    assert option in found[0].message


# FP8, exceptions


@pytest.mark.slow
@pytest.mark.parametrize("error", [0, 1e-4, 3e-3])
def test_the_tolerance_of_the_log_sum_exp_in_fp8(error, fake, replaced):
    """The error of sums on tensor cores passes, a larger one fails."""
    options = {"fp8": "float8_e4m3fn", "stats": True}

    def change(results, arrays, options):
        results[1][...] += np.float32(error)

    replaced("attention", in_results(change))
    assert execute(Case("gpu", "float16", **SIZES, b=2, options=options)).kind == ("wrong" if error > 1e-3 else "passed")


@pytest.mark.parametrize("engine", ["cpu", pytest.param("gpu", marks=pytest.mark.slow)])
def test_wrong_results_in_fp8_are_found(engine, fake, replaced):
    """A scale that is a third too large fails."""
    case = Case(engine, "float16", **SIZES, seed=1, options={"fp8": "float8_e4m3fn", "scale": 0.3})
    assert execute(case).kind == "passed"
    replaced("attention", changed("scale", lambda scale: 0.4))
    assert execute(case).kind == "wrong"


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("d", [16, pytest.param(256, marks=pytest.mark.slow)])
def test_the_tolerance_of_sums_in_fp8(d, dtype):
    """It covers the sums of tensor cores for one key, where no error averages out."""
    rng, largest = np.random.default_rng(d), FORMATS[dtype].largest
    q, k = (np.clip(rng.standard_normal((20_000, d)) * 90, -largest, largest).astype(dtype_of(dtype)) for _ in range(2))
    q, k = q.astype(np.float32), k.astype(np.float32)
    allowed = 2 * FP8_SUM * np.linalg.norm(q, axis=1) * np.linalg.norm(k, axis=1)
    found = program.fp8_product(q[:, None], k[..., None])[:, 0, 0]
    errors = np.abs(found - (q.astype(np.float64) * k).sum(axis=1)) / allowed
    assert 1 / 16 < errors.max() < 1


def test_the_tolerance_of_subnormal_gradients():
    """Products of dS and a small derivative of a score function are rounded to 16 bits, and so is the term of each block."""
    options = {"score_mod": ("fading", ""), "block_mask": ("segments", "kq11"), "deterministic": True}
    case = Case("gpu", "float16", d=104, dv=64, hq=2, sq=1, skv=1776, backward=True, options=options, seed=1213)
    expected = ExpectedResults(build(case, 0))
    naive, truth = (results.values["dq"] for results in (expected.naive, expected.truth))
    assert 5.97e-7 < expected.floors["dq"] + FACTOR * max_error(naive, truth) < 2e-6  # an H200 had the error 5.97e-7


@pytest.mark.parametrize(("error", "kind"), [(ValueError("no"), "exception"), (cupy_sdpa.Unsupported("not here"), "refused")])
def test_exceptions_are_findings_and_refusals_are_not(error, kind, replaced):
    """An exception is a finding with its type; Unsupported is a refusal."""
    replaced("attention", lambda real: MagicMock(side_effect=error))
    outcome = execute(Case())
    assert outcome.kind == kind
    assert str(error) in outcome.message


def test_the_floor_is_of_the_size_of_rounding():
    """The floor of the other tests is a few units in the last place."""
    values = np.linspace(-1, 1, 1001)
    for name, unit in (("float16", 2.0**-10), ("bfloat16", 2.0**-7)):
        assert 0 < rounding_floor(values, np.dtype(name)) <= 4 * unit
