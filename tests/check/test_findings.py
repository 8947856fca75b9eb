"""The self-test finds faults: lost options, wrong elements, stale and missing writes, other bits; right calls have no finding."""

import functools
import itertools

import numpy as np
import pytest
from fake_cupy import program

import cupy_sdpa
from cupy_sdpa.check import Case
from cupy_sdpa.check.case import Paged
from cupy_sdpa.check.data import FORMATS, dtype_of
from cupy_sdpa.check.execute import execute
from cupy_sdpa.check.tolerances import FP8_SUM

#: Sizes that show the faults.
SIZES = {"d": 16, "dv": 16, "hq": 4, "hkv": 2, "sq": 20, "skv": 30}


@pytest.fixture
def replaced(monkeypatch):
    """Replaces a public function by one that gets the real one and its arguments."""

    def replace(name, function):
        monkeypatch.setattr(cupy_sdpa, name, functools.partial(function, getattr(cupy_sdpa, name)))

    return replace


def paged(page=2, order="pages", lengths="random", num_splits=0, rest="mixed", *, shared=False, moved=False):
    """The option ``paged``."""
    return tuple(Paged(page, order, lengths, num_splits, rest, shared, moved))


def first_bit(results, index):
    """Change a bit of the first element of a result."""
    (results if isinstance(results, tuple) else (results,))[index].view(np.uint32).ravel(order="K")[:1] ^= 1


# Lost options


def without(name):
    return lambda options: {key: value for key, value in options.items() if key != name}


def changed(name, change):
    return lambda options: options | {name: change(options[name])}


def shifted(x):
    return np.roll(x, 1, axis=0)


def near_keys(score_mod):
    return lambda s, b, h, q, k: score_mod(s, b, h, q, k % 256)


CAUSAL = {"causal": "bottom_right"}
OF_PAGES = {"sq": 3, "skv": 12, "b": 3}
#: Faults in the options of the forward pass: the change, the options and the sizes.
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
    "table of another sequence": (changed("page_table", lambda x: np.roll(x, 1, axis=1)), CAUSAL | {"paged": paged(3, lengths="full")}, OF_PAGES),
    "order of pages": (changed("page_table", lambda x: x[::-1]), CAUSAL | {"paged": paged(3, lengths="full")}, OF_PAGES),
    "a row after the length": (changed("seq_lens_kv", lambda n: n + 1), CAUSAL | {"paged": paged(3, lengths="one")}, OF_PAGES),
    "a key less": (changed("seq_lens_kv", lambda n: n - 1), CAUSAL | {"paged": paged(3, lengths="one")}, OF_PAGES),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", LOST)
def test_a_lost_option_is_found(name, dtype, replaced):
    """A call that ignores or misreads an option is a finding; a correct call is not."""
    alter, options, sizes = LOST[name]
    case = Case(**{"dtype": dtype, **SIZES, "options": options, **sizes})
    assert execute(case).kind == "passed"
    replaced("attention", lambda real, *arrays, **options: real(*arrays, **alter(options)))
    outcome = execute(case)
    assert outcome.kind == "wrong"
    assert outcome.cause.startswith("out")


# Wrong results


def put(index, value):
    def spoil(results, arrays, options):
        results[0][index] = value

    return spoil


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


#: Faults in the results: (the fault, the cause of the finding).
SPOILED = {
    "a NaN": (put((0, 0, 0, 0), np.nan), "out"),
    "an infinity": (put((3, 1, 2, 0), np.inf), "out"),
    "an element not written": (put((-1, -1, -1, -1), np.nan), "out"),
    "heads swapped": (swap_heads, "out"),
    "memory beside the result": (write_beside, "out"),
    "an input changed": (change_input, "q"),
    "results of earlier data": (stale, "out"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_wrong_result_is_found(name, replaced):
    """One wrong element, a write to the wrong place and stale results are findings."""
    spoil, what = SPOILED[name]
    case = Case(d=8, dv=8, hq=2, hkv=2, sq=5, skv=7, layouts={"out": "dhsb+s"}, options={"preallocated": True})
    assert execute(case).kind == "passed"

    def spoiled(real, *arrays, **options):
        results = real(*arrays, **options)
        if "out" in options:
            spoil(results if isinstance(results, tuple) else [results], arrays, options)
        return results

    replaced("attention", spoiled)
    outcome = execute(case)
    assert (outcome.kind, outcome.cause.split(", ")[0]) == ("wrong", what)


#: Sizes and options of the case, the function that replaces attention, and a part of the message.
OTHER = {
    "another dtype": (
        {"dtype": "float16"}, lambda real, *x, **o: real(*x, **o).astype(np.float32), "out is float32, expected float16",
    ),
    "another array than out": (
        {"options": {"preallocated": True}}, lambda real, *x, out=None, **o: real(*x, **o), "call 1: out",
    ),
    "a fully masked row of 1e-30": (
        {"sq": 3, "options": {"mask_mod": ("nothing", "")}}, lambda real, *x, **o: real(*x, **o) + np.float32(1e-30), "must be exactly 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER)
def test_right_values_in_the_wrong_form_are_found(name, replaced):
    """The dtype of a result, its memory, and exact zeros are compared."""
    values, function, message = OTHER[name]
    case = Case(**values)
    assert execute(case).kind == "passed"
    replaced("attention", function)
    outcome = execute(case)
    assert outcome.kind == "wrong"
    assert message in outcome.message


def test_every_call_must_write_its_whole_result(replaced):
    """A later call that leaves the padding of a preallocated result as it was is a finding: it is NaN before every call."""
    case = Case(sq=4, b=2, options={"seq_lens_q": "one", "preallocated": True})
    assert execute(case).kind == "passed"
    calls = itertools.count()

    def spoiled(real, *arrays, out=None, **options):
        before = None if out is None else out.copy()
        result = real(*arrays, out=out, **options)
        if next(calls) == 1:  # the second call on this memory
            result[:, :, 1:] = before[:, :, 1:]
        return result

    replaced("attention", spoiled)
    assert "call 2: out must be exactly 0" in execute(case).message


#: Functions, the place of a result and its name, and the case. With bfloat16 a derivative has larger errors.
DERIVATIVES = {
    **{name: ("attention_backward", index, name, {"backward": True}) for index, name in enumerate(("dq", "dk", "dv"))},
    "dsinks": ("attention_backward", 3, "dsinks", {"backward": True, "options": {"sinks": "normal", "return_dsinks": True}}),
    "dbias": (
        "attention_backward", 3, "dbias", {"backward": True, "options": {"bias": ("kq11", "float32", "normal"), "return_dbias": True}},
    ),
    "jvp": ("attention_jvp", 1, "jvp", {"options": {"jvp": "qkv"}}),
    "jvp, softcap": ("attention_jvp", 1, "jvp", {"options": {"jvp": "qkv", "softcap": 2.0}}),
    "jvp, packed": ("attention_jvp", 1, "jvp", {"options": {"jvp": "qkv", "packed": ("full", "full", 0, 0, 0, "int32")}}),
}  # fmt: skip
DTYPES = ("float16", "bfloat16", "float32", "float64")


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, x) for name in DERIVATIVES for x in DTYPES if x != "bfloat16" or "jvp" not in name]
)
def test_a_wrong_derivative_is_found(name, dtype, replaced):
    """A gradient or a derivative that is 3 % too large is a finding."""
    function, index, cause, values = DERIVATIVES[name]
    case = Case(dtype=dtype, **SIZES, **values)
    assert execute(case).kind == "passed"

    def spoiled(real, *arrays, **options):
        results = real(*arrays, **options)
        results[index][...] = (results[index].astype(np.float64) * 1.03).astype(results[index].dtype)
        return results

    replaced(function, spoiled)
    outcome = execute(case)
    assert (outcome.kind, outcome.cause) == ("wrong", cause)


# Other bits


BITS = {
    **{f"{name}, {'both passes' if backward else 'forward'}": ("attention", index, {
        "sq": 1, "skv": 7, "backward": backward, "options": {"stats": "max_sumexp", "deterministic": True}})
       for index, name in enumerate(("out", "stats", "max", "sum_exp")) for backward in (False, True)},
    "dq": ("attention_backward", 0, {"sq": 5, "skv": 7, "backward": True, "options": {"deterministic": True}}),
}  # fmt: skip


@pytest.mark.parametrize("name", BITS)
def test_results_that_are_not_deterministic_are_found(name, replaced):
    """With deterministic=True, in every call, one different bit between calls on equal data is a finding."""
    function, index, values = BITS[name]
    case, calls, flags = Case(**values), itertools.count(), []
    assert execute(case).kind == "passed"

    def spoiled(real, *arrays, **options):
        flags.append(options["deterministic"])
        results = real(*arrays, **options)
        if next(calls) == 2:  # the second call on these data
            first_bit(results, index)
        return results

    replaced(function, spoiled)
    assert f"bits of {name.split(',')[0]} differ" in execute(case).message
    assert all(flags)


#: The lengths of a batch whose sequences are also computed alone.
OF_BATCH = {"lengths": {"seq_lens_kv": "random"}}


@pytest.mark.parametrize("function", ["attention", "attention_backward"])
@pytest.mark.parametrize("lengths", OF_BATCH)
@pytest.mark.parametrize("entry", [0, 2])
def test_a_sequence_with_other_bits_alone_is_found(entry, lengths, function, replaced):
    """The first and the last sequence are also computed alone; one different bit is a finding."""
    case = Case(sq=5, skv=7, b=3, backward=True, options={"bias": ("kqhb", "float32", "normal"), **OF_BATCH[lengths]})
    assert execute(case).kind == "passed"
    calls = itertools.count()

    def spoiled(real, *arrays, **options):
        results = real(*arrays, **options)
        if options.get("batch_invariant") and next(calls) == min(entry, 1):
            first_bit(results, 0)
        return results

    replaced(function, spoiled)
    name = "out" if function == "attention" else "dq"
    assert f"bits of {name} of sequence {entry} depend on the rest of the batch" in execute(case).message


@pytest.mark.parametrize("option", ["deterministic", "num_splits"])
def test_moved_pages_must_give_the_same_bits(option, replaced):
    """A result that depends on the places of the pages is a finding if the call is reproducible."""
    options = {"paged": paged(num_splits=3 if option == "num_splits" else 0, moved=True)}
    case = Case(skv=8, options=options | ({"deterministic": True} if option == "deterministic" else {}))
    assert execute(case).kind == "passed"

    def spoiled(real, *arrays, **options):
        out = real(*arrays, **options)
        if options["page_table"][0, 0] & 1:
            first_bit(out, 0)
        return out

    replaced("attention", spoiled)
    found = [outcome for outcome in (execute(case.with_(seed=seed)) for seed in range(20)) if outcome.kind == "wrong"]
    assert found
    assert option in found[0].message


# FP8, exceptions


@pytest.mark.slow
@pytest.mark.parametrize("error", [0, 1e-4, 3e-3])
def test_the_tolerance_of_the_log_sum_exp_in_fp8(error, fake, replaced):
    """The error of sums on tensor cores passes, a larger one fails."""
    options = {"fp8": "float8_e4m3fn", "stats": True}

    def inexact(real, *arrays, **options):
        out, stats = real(*arrays, **options)
        return out, stats + np.float32(error)

    replaced("attention", inexact)
    assert execute(Case("gpu", "float16", **SIZES, b=2, options=options)).kind == ("wrong" if error > 1e-3 else "passed")


@pytest.mark.parametrize("engine", ["cpu", pytest.param("gpu", marks=pytest.mark.slow)])
def test_wrong_results_in_fp8_are_found(engine, fake, replaced):
    """A scale that is a third too large fails."""
    case = Case(engine, "float16", **SIZES, seed=1, options={"fp8": "float8_e4m3fn", "scale": 0.3})
    assert execute(case).kind == "passed"
    replaced("attention", lambda real, *arrays, **options: real(*arrays, **options | {"scale": 0.4}))
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


@pytest.mark.parametrize(("error", "kind"), [(ValueError("no"), "exception"), (cupy_sdpa.Unsupported("not here"), "refused")])
def test_exceptions_are_findings_and_refusals_are_not(error, kind, replaced):
    """An exception is a finding with its type; Unsupported is a refusal."""

    def failing(real, *arrays, **options):
        raise error

    replaced("attention", failing)
    outcome = execute(Case())
    assert outcome.kind == kind
    assert str(error) in outcome.message
