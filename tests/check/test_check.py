"""The self-test: which cases it draws, that its reference is correct and independent, and that it detects injected faults."""

import ast
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cupy_sdpa
from cupy_sdpa import check, reference
from cupy_sdpa.__main__ import main
from cupy_sdpa.check import Case, pool, run
from cupy_sdpa.check.cases.case import GRADIENTS, REQUIRES, Paged, parse
from cupy_sdpa.check.cases.combine import LEFT_OUT, SHARES, schedule
from cupy_sdpa.check.cases.data import build, call_options
from cupy_sdpa.check.cases.draw import OPTIONS, PAIRS, draw, draw_options
from cupy_sdpa.check.cases.memory import Memory, memory_of, named_layout
from cupy_sdpa.check.pool import Pool
from cupy_sdpa.check.shrink import candidates, shrink
from cupy_sdpa.check.verify.execute import execute, expected
from cupy_sdpa.check.verify.inputs import Inputs
from cupy_sdpa.check.verify.oracle import MASKED, evaluate
from cupy_sdpa.check.verify.outcome import Outcome

FOLDER = Path(check.__file__).parent
#: The modules that compute the expected results. They must not import the code under test.
INDEPENDENT = (
    "cases.case",
    "cases.data",
    "cases.functions",
    "cases.memory",
    "cases.pages",
    "verify.inputs",
    "verify.oracle",
    "verify.tolerance",
)


# Drawn cases


@pytest.mark.parametrize("engine", ["cpu", "gpu", "plan"])
def test_every_pair_of_options_is_drawn(engine):
    """Every valid pair of options occurs, and is drawn as often as the share of pairs says."""
    cases = [draw(3, number, engine) for number in range(100 * len(PAIRS) // SHARES["pairs"] + 50)]
    drawn = {pair for case in cases for pair in itertools.combinations(case.options, 2)}
    other = LEFT_OUT[engine]
    assert {pair for pair in PAIRS if not other & {*pair}} <= drawn
    assert set(OPTIONS) - other <= {name for case in cases for name in case.options}


def test_every_feature_has_its_share():
    """Every 50 cases contain each feature as often as its share says; on the CPU the drawn cases have the feature."""
    assert sum(SHARES.values()) == 100
    for start in (0, 50, 1000):
        names = [schedule(7, number)[0] for number in range(start, start + 50)]
        assert {name: 2 * names.count(name) for name in SHARES} == SHARES
    for number in range(100):
        feature, _ = schedule(7, number)
        assert feature in ("pairs", "few") or feature in draw(7, number, "cpu").options


def test_shared_prefixes_need_no_layout():
    """shared_prefix_attention takes no layout=, so no array is drawn whose layout a call must name."""
    drawn = [draw_options({"shared_prefix", "paged"}, number, "cpu") for number in range(500)]
    assert sum(bool(case.layouts) and 1 in (case.d, case.dv) for case in drawn) > 6
    assert [case for case in drawn if named_layout(case)] == []


def test_small_sizes_are_drawn_as_often_as_large_ones():
    """On the CPU a third of the lengths are 0, 1 or 2, and a fifth are above 40."""
    lengths = [n for number in range(1000) for case in [draw(2, number, "cpu")] for n in (case.sq, case.skv)]
    assert sum(n < 3 for n in lengths) > 0.33 * len(lengths)
    assert sum(n > 40 for n in lengths) > 0.2 * len(lengths)


def test_a_case_depends_on_seed_and_number():
    """The same seed and number give the same case; another number, seed or engine gives another."""
    case = draw(5, 17, "cpu")
    assert case == draw(5, 17, "cpu")
    assert case not in (draw(5, 18, "cpu"), draw(6, 17, "cpu"), draw(5, 17, "gpu"))


def test_sizes_cover_the_input_space():
    """Empty, tiny, decoding and odd sizes are drawn, and head dims in steps of 8 up to 256."""
    cases = [draw(0, number, "gpu") for number in range(3000)]
    for name in ("sq", "skv"):
        assert {0, 1, 2, 63, 64, 65, 127, 128, 129} <= {getattr(case, name) for case in cases}
    assert {case.d for case in cases} == set(range(8, 257, 8))
    decoding = [case for case in cases if case.sq == 1]
    assert len(decoding) > 700
    assert max(case.skv for case in decoding) > 30000
    assert any("dropout" in case.options and case.skv % 64 and case.b * case.hq > 16 for case in decoding)
    assert {case.hq // case.hkv for case in cases if case.hkv} >= {1, 2, 3, 4, 6, 8}


@pytest.mark.parametrize("engine", ["cpu", "gpu", "plan"])
def test_parse_inverts_repr(engine):
    """``parse`` of the ``repr`` of a case returns the case."""
    for number in range(200):
        case = draw(1, number, engine)
        assert parse(repr(case)) == case


@pytest.mark.parametrize("text", ["1", "Case(1)", "Case(sq=len)", "Case(size=1)", "Case(engine='tpu')", "f(sq=1)", "Case("])
def test_parse_rejects_other_text(text):
    """``parse`` accepts only literals of existing fields."""
    with pytest.raises(ValueError, match=r"Case|case|engine"):
        parse(text)


def test_a_slice_is_surrounded_by_nan():
    """Every layout gives a view with the requested shape and values, surrounded by NaN."""
    for layout in ("dhsb", "dshb+s*b", "bshd-d", "dhsb+d+h", "sdbh*s"):
        memory = Memory(np)
        view = memory.allocate("q", (8, 2, 3, 4), np.float16, layout)
        values = np.arange(192, dtype=np.float16).reshape(8, 2, 3, 4)
        memory.load({"q": values})
        assert np.array_equal(view, values)
        assert np.isnan(memory.parents["q"]).sum() == memory.parents["q"].size - 192
        assert not memory.surroundings_changed("q")
        if memory.parents["q"].size > 192:
            memory.parents["q"][np.isnan(memory.parents["q"])] = 0
            assert memory.surroundings_changed("q")


def test_positions_beyond_the_lengths_are_nan():
    """In every array with positions, also in the gaps of packed sequences."""
    data = build(Case(sq=4, skv=5, b=2, backward=True, options={"seq_lens_q": "one", "seq_lens_kv": "one", "jvp": "qkv"}), 0)
    for name in ("q", "k", "v", "dout", "tq", "tk", "tv"):
        assert np.isfinite(data.arrays[name][:, :, :1]).all(), name
        assert np.isnan(data.arrays[name][:, :, 1:]).all(), name
    packed = build(Case(sq=4, skv=4, options={"packed": ("full", "full", 3, 2, 0, "int32")}), 0)
    for name in "qkv":
        np.testing.assert_array_equal(np.isnan(packed.arrays[name][0, 0]), [True] * 3 + [False] * 4 + [True] * 2)


def test_the_first_finding_ends_a_run(planted):
    """It is reported as drawn, without shrinking."""
    cases = [Case(), Case(sq=5, options={"causal": "top_left"}), Case(seed=1), Case(seed=2)]
    summary, (finding,), *_ = run.run(iter(cases), 1, run.Limits(first=True), modules=(planted,))
    assert (summary.problems, finding.shrunk) == (2, False)


# Paged keys


def paged(page=2, order="pages", lengths="random", num_splits=0, rest="mixed", *, shared=False, moved=False):
    """The option ``paged``."""
    return tuple(Paged(page, order, lengths, num_splits, rest, shared, moved))


def test_paged_cases_cover_the_options():
    """Page sizes, few queries, packed queries, splits, and every kind of table entry are drawn; every case is consistent."""
    for engine, pages in (("gpu", {2**n for n in range(8)}), ("cpu", {1, 3, 16, 48, 128})):
        cases = [draw_options({"paged"}, number, engine) for number in range(400)]
        drawn = [case.paged for case in cases]
        assert pages <= {value.page for value in drawn}
        assert sum(1 <= case.sq <= 8 for case in cases) > 250
        assert all(case.skv % case.paged.page == 0 and not case.backward for case in cases)
        assert {value.num_splits for value in drawn} >= {0, 1, 2, 3, 7}
        assert {value.rest for value in drawn} == {"large", "negative", "unowned", "mixed"}
        assert {(value.shared, value.moved) for value in drawn} == set(itertools.product((False, True), repeat=2))
    partners = {name for pair in PAIRS if "paged" in pair for name in pair}
    assert set(OPTIONS) - partners == {
        "seq_lens_kv", "bucket", "jvp", "block_mask", "parallel", "merge", "cache", *GRADIENTS,
    }  # fmt: skip


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("rest", ["large", "negative", "unowned", "mixed"])
def test_the_arrays_of_paged_cases(rest, shared):
    """The gathered pages are the dense keys; other pages are NaN, rows after the length are finite and large."""
    case = Case(dtype="float16", skv=12, b=3, options={"paged": paged(3, rest=rest, shared=shared)}, seed=3)
    data = build(case, 0)
    table, lengths = data.arrays["page_table"], data.lengths[1]
    assert 0 < lengths.min() < lengths.max()
    used = [table[: -(-n // 3), b] for b, n in enumerate(lengths)]
    for name in "kv":
        pool = data.arrays[name]
        for b, n in enumerate(lengths):
            rows = pool[..., used[b]].transpose(0, 1, 3, 2).reshape(*pool.shape[:2], -1)
            np.testing.assert_array_equal(rows[:, :, :n], data.dense[name][:, :, :n, b])
            assert np.isfinite(rows).all()
            if n % 3 and not shared:
                assert abs(rows[:, :, n:]).max() > 100
        unused = np.setdiff1d(np.arange(pool.shape[3]), np.concatenate(used))
        assert len(unused) >= 3
        assert np.isnan(pool[..., unused]).all()
    after = np.concatenate([table[-(-n // 3) :, b] for b, n in enumerate(lengths)])
    allowed = {"large": {2**30}, "negative": {-1}, "unowned": set(unused.tolist())}
    assert set(after.tolist()) <= allowed.get(rest, set().union(*allowed.values()))
    memory = memory_of(case, np, "qkv")
    memory.load(data.arrays)
    assert memory.views["page_table"].base.shape == (7, 4)
    np.testing.assert_array_equal(memory.views["page_table"], table)


def test_moved_pages_have_the_same_contents():
    """With ``moved`` both sets of values are equal for dense attention, and their page tables differ."""
    case = Case(skv=12, b=2, options={"paged": paged(3, lengths="full", moved=True)})
    one, other = build(case, 0), build(case, 1)
    assert (one.arrays["page_table"] != other.arrays["page_table"]).any()
    for name in "kv":
        np.testing.assert_array_equal(one.dense[name], other.dense[name])


@pytest.mark.parametrize("option", ["deterministic", "num_splits"])
def test_moved_pages_must_give_the_same_bits(option, monkeypatch):
    """A result that depends on the places of the pages is a finding if the call is reproducible."""
    options = {"paged": paged(num_splits=3 if option == "num_splits" else 0, moved=True)}
    case = Case(skv=8, options=options | ({"deterministic": True} if option == "deterministic" else {}))
    assert execute(case).kind == "passed"
    real = cupy_sdpa.attention

    def spoiled(*arrays, **options):
        out = real(*arrays, **options)
        out.view(np.uint32)[0, 0, 0, 0] ^= options["page_table"][0, 0] & 1
        return out

    monkeypatch.setattr(cupy_sdpa, "attention", spoiled)
    seeds = [seed for seed in range(20) if execute(case.with_(seed=seed)).kind == "wrong"]
    assert seeds
    assert option in execute(case.with_(seed=seeds[0])).message


def test_shrinking_keeps_whole_pages():
    """Skv stays a multiple of the page size; the page and every field of the option become simpler."""

    def ask(case):
        return Outcome("wrong", "", "out") if case.paged and case.paged.shared and case.skv > 20 else Outcome()

    case = Case(
        "gpu",
        "float16",
        sq=4,
        skv=96,
        b=3,
        options={"sinks": "high", "paged": paged(16, num_splits=3, shared=True, moved=True)},
    )
    small, _ = shrink(case, ask(case), ask)
    assert small == Case(
        "gpu", "float16", sq=1, skv=21, options={"paged": paged(1, lengths="full", rest="unowned", shared=True)}
    )


# The reference of the self-test


@pytest.mark.parametrize("name", INDEPENDENT)
def test_the_reference_is_independent(name):
    """The modules that generate data and check results import numpy, ml_dtypes and one another only."""
    folder, module = name.split(".")
    for node in ast.walk(ast.parse((FOLDER / folder / f"{module}.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert (f"{folder}." if node.level == 1 else "") + node.module in INDEPENDENT
        elif isinstance(node, ast.Import):
            assert not any(alias.name.startswith("cupy") for alias in node.names)


def _known_to_the_reference(case):
    names = ("score_mod", "mask_mod", "bucket", "max_workspace")
    finite = "min" not in case.options.get("bias", ("", "", ""))[2]  # the reference does not treat these as masked
    known = not {"packed", "paged"} <= set(case.options)
    return finite and known and not any(name in case.options for name in names) and 0 not in (case.hkv, case.dv)


def test_the_oracle_agrees_with_the_reference():
    """Without functions, results and gradients equal those of ``cupy_sdpa.reference``."""
    compared = 0
    for case in filter(_known_to_the_reference, (draw(11, number, "cpu").with_(dtype="float64") for number in range(170))):
        if case.b * case.hq * case.sq * case.skv > 60_000:
            continue
        data = build(case, 0)
        if "dropout" in case.options and data.keep is None:
            data.keep = np.random.default_rng(0).random((case.skv, case.sq, case.hq, case.b)) < 0.5
        options = call_options(case, data.arrays, {}, 0)
        for name in ("seed", "offset", "max_seqlen_q", "max_seqlen_kv", "page_table", "num_splits"):
            options.pop(name, None)
        if case.paged or case.cache:
            options["seq_lens_kv"] = data.lengths[1]
        if "dropout" in case.options:
            options["dropout_mask"] = data.keep
        if data.attends is not None:
            options["mask"] = data.attends
        arrays = [{**data.arrays, **data.dense}[name] for name in ("q", "k", "v")]
        found = evaluate(Inputs(data)).values
        wanted = dict(
            zip(("out", "stats", "max", "sum_exp"), reference.attention(*arrays, **options, max_sumexp=True), strict=True)
        )
        if case.backward:
            more = {f"return_{name}": True for name in ("dbias", "dsinks") if f"return_{name}" in case.options}
            got = reference.attention_backward(data.arrays["dout"], *arrays, **options, **more)
            wanted |= dict(zip(("dq", "dk", "dv", *(name[7:] for name in more)), got, strict=True))
        for name, array in wanted.items():
            np.testing.assert_allclose(found[name], array, rtol=1e-9, atol=1e-10, err_msg=f"{name} of {case!r}")
        compared += 1
    assert compared > 60


@pytest.mark.parametrize("name", ["tanh", "square", "gain_h", "slope_h", "bias_kq", "two", "place", "number", "bias_all"])
def test_the_oracles_gradients_are_differences(name):
    """With score functions, gradients equal finite differences of the output along random directions."""
    case = Case(
        dtype="float64", d=4, dv=3, hq=4, hkv=2, sq=5, skv=6, b=2, backward=True, seed=4,
        options={"score_mod": (name, "float64"), "softcap": 5.0, "causal": "bottom_right", "return_dtensors": True},
    )  # fmt: skip
    data = build(case, 0)
    found = evaluate(Inputs(data)).values
    rng = np.random.default_rng(0)
    dout = data.arrays["dout"]
    places = {"q": data.arrays, "k": data.arrays, "v": data.arrays} | dict.fromkeys(data.tensors, data.tensors)
    for key, place in places.items():
        start, direction = place[key], rng.standard_normal(place[key].shape)
        sums = []
        for step in (1e-5, -1e-5):
            place[key] = start + step * direction
            sums.append((evaluate(Inputs(data)).values["out"] * dout).sum())
        place[key] = start
        gradient = found[f"d{key}" if key in ("q", "k", "v") else f"tensors[{key!r}]"]
        assert (gradient * direction).sum() == pytest.approx((sums[0] - sums[1]) / 2e-5, rel=1e-6, abs=1e-7)


def test_rows_masked_by_finite_values():
    """A bias at or below the threshold masks a key; a row of such keys gives output 0, log-sum-exp -inf and gradient 0."""
    case = Case(dtype="float64", sq=3, skv=4, backward=True, options={"bias": ("kq11", "float32", "normal")})
    data = build(case, 0)
    data.arrays["bias"][:, 1] = 2 * MASKED
    wanted = expected(data)
    assert np.isneginf(wanted.truth.values["stats"][1]).all()
    assert wanted.exact["out"][:, :, 1].all()
    assert not wanted.truth.values["out"][:, :, 1].any()
    assert not wanted.truth.values["dq"][:, :, 1].any()


# Injected faults


def _without(name):
    return lambda options: {key: value for key, value in options.items() if key != name}


def _shifted(name):
    return lambda options: options | {name: np.roll(options[name], 1, axis=0)}


def _shorter(options):
    return options | {"seq_lens_kv": np.maximum(options["seq_lens_kv"] - 1, 0)}


def _wrong_positions(options):
    near = options["score_mod"]
    return options | {"score_mod": lambda s, b, h, q, k: near(s, b, h, q, k % 256)}


#: Faults in the options of the forward pass.
LOST = {
    "mask": (_shifted("mask"), {"mask": ("kq11", "random")}, {}),
    "bias": (_shifted("bias"), {"bias": ("k1h1", "float32", "normal")}, {}),
    "lengths": (_shorter, {"seq_lens_kv": "random"}, {"b": 3}),
    "scale": (_without("scale"), {"scale": 0.5}, {}),
    "softcap": (_without("softcap"), {"softcap": 0.5}, {}),
    "alibi": (_without("alibi_slopes"), {"alibi_slopes": "usual"}, {}),
    "sinks": (_without("sinks"), {"sinks": "normal"}, {}),
    "window": (_without("window"), {"window": (3, 3, "top_left")}, {}),
    "key positions": (_wrong_positions, {"score_mod": ("near_key_100", "")}, {"sq": 1, "skv": 384}),
    "mask function": (_without("mask_mod"), {"mask_mod": ("dilated", "")}, {}),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", LOST)
def test_a_lost_option_is_found(name, dtype, monkeypatch):
    """A call that ignores or misreads an option is a finding; a correct call is not."""
    alter, options, sizes = LOST[name]
    case = Case(**({"dtype": dtype, "d": 16, "dv": 16, "hq": 4, "hkv": 2, "sq": 20, "skv": 30, "options": options} | sizes))
    assert execute(case).kind == "passed"
    real = cupy_sdpa.attention
    monkeypatch.setattr(cupy_sdpa, "attention", lambda *arrays, **options: real(*arrays, **alter(options)))
    outcome = execute(case)
    assert outcome.kind == "wrong"
    assert outcome.cause.startswith("out")


def _next_page(options):
    return options | {"page_table": np.roll(options["page_table"], 1, axis=1)}


def _one_key_more(options):
    return options | {"seq_lens_kv": options["seq_lens_kv"] + 1}


def _exchanged(options):
    return options | {"page_table": options["page_table"][::-1]}


@pytest.mark.parametrize(
    ("alter", "lengths"),
    [
        (_next_page, "full"),
        (_exchanged, "full"),
        (_one_key_more, "one"),
        (_shorter, "one"),
    ],
    ids=["table of another sequence", "order of pages", "a row after the length", "a key less"],
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_wrong_pages_are_found(alter, lengths, dtype, monkeypatch):
    """A call that reads other pages or rows is a finding; a correct call is not."""
    options = {"paged": paged(3, lengths=lengths), "causal": "bottom_right"}
    case = Case(dtype=dtype, d=16, dv=16, hq=2, hkv=1, sq=3, skv=12, b=3, options=options)
    assert execute(case).kind == "passed"
    real = cupy_sdpa.attention
    monkeypatch.setattr(cupy_sdpa, "attention", lambda *arrays, **options: real(*arrays, **alter(options)))
    assert execute(case).kind == "wrong"


def _put(index, value):
    def spoil(results, arrays, options):
        results[0][index] = value

    return spoil


def _swap_heads(results, arrays, options):
    results[0][...] = results[0][:, ::-1].copy()


def _write_beside(results, arrays, options):
    options["out"].base[...] = np.where(np.isnan(options["out"].base), 0, options["out"].base)


def _change_input(results, arrays, options):
    arrays[0][0] += 1


def _stale(results, arrays, options, kept=[]):  # noqa: B006 (kept from call to call)
    kept.append([x.copy() for x in results])
    for result, old in zip(results, kept[0], strict=True):
        if result.shape == old.shape:
            result[...] = old


#: Faults in the results: (the fault, the cause of the finding).
SPOILED = {
    "a NaN": (_put((0, 0, 0, 0), np.nan), "out"),
    "an infinity": (_put((3, 1, 2, 0), np.inf), "out"),
    "an element not written": (_put((-1, -1, -1, -1), np.nan), "out"),
    "heads swapped": (_swap_heads, "out"),
    "memory beside the result": (_write_beside, "out"),
    "an input changed": (_change_input, "q"),
    "results of earlier data": (_stale, "out"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_wrong_result_is_found(name, monkeypatch):
    """One wrong element, a write to the wrong place and stale results are findings."""
    spoil, what = SPOILED[name]
    case = Case(d=8, dv=8, hq=2, hkv=2, sq=5, skv=7, layouts={"out": "dhsb+s"}, options={"preallocated": True})
    assert execute(case).kind == "passed"
    real = cupy_sdpa.attention

    def spoiled(*arrays, **options):
        results = real(*arrays, **options)
        if "out" in options:
            spoil(results if isinstance(results, tuple) else [results], arrays, options)
        return results

    monkeypatch.setattr(cupy_sdpa, "attention", spoiled)
    outcome = execute(case)
    assert (outcome.kind, outcome.cause.split(", ")[0]) == ("wrong", what)


def test_a_result_of_another_dtype_is_found(monkeypatch):
    """The values are right, and the dtype is a finding."""
    real = cupy_sdpa.attention
    monkeypatch.setattr(cupy_sdpa, "attention", lambda *arrays, **options: real(*arrays, **options).astype(np.float32))
    outcome = execute(Case(dtype="float16"))
    assert (outcome.kind, outcome.cause) == ("wrong", "out")
    assert "out is float32, expected float16" in outcome.message


def test_a_preallocated_result_that_is_not_written_is_found(monkeypatch):
    """A call that returns right values in another array than ``out`` is a finding."""
    case = Case(options={"preallocated": True})
    real = cupy_sdpa.attention
    monkeypatch.setattr(cupy_sdpa, "attention", lambda *arrays, out=None, **options: real(*arrays, **options))
    assert execute(case).kind == "wrong"


def test_every_call_must_write_its_whole_result(monkeypatch):
    """A later call that leaves the padding of a preallocated result as it was is a finding: it is NaN before every call."""
    case = Case(sq=4, b=2, options={"seq_lens_q": "one", "preallocated": True})
    assert execute(case).kind == "passed"
    real, calls = cupy_sdpa.attention, itertools.count()

    def spoiled(*arrays, out=None, **options):
        before = None if out is None else out.copy()
        result = real(*arrays, out=out, **options)
        if next(calls) == 1:  # the second call on this memory
            result[:, :, 1:] = before[:, :, 1:]
        return result

    monkeypatch.setattr(cupy_sdpa, "attention", spoiled)
    assert "call 2: out must be exactly 0" in execute(case).message


def test_fully_masked_rows_must_be_exactly_0(monkeypatch):
    """In a fully masked row even 1e-30 is a finding."""
    case = Case(sq=3, options={"mask_mod": ("nothing", "")})
    assert execute(case).kind == "passed"
    real = cupy_sdpa.attention
    monkeypatch.setattr(cupy_sdpa, "attention", lambda *arrays, **options: real(*arrays, **options) + np.float32(1e-30))
    assert "must be exactly 0" in execute(case).message


@pytest.mark.parametrize("index", range(3), ids=["dq", "dk", "dv"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_wrong_gradient_is_found(index, dtype, monkeypatch):
    """A gradient that is 3 % too large is a finding in every dtype."""
    case = Case(dtype=dtype, d=16, dv=16, hq=4, hkv=2, sq=20, skv=30, backward=True)
    assert execute(case).kind == "passed"
    real = cupy_sdpa.attention_backward

    def spoiled(*arrays, **options):
        results = real(*arrays, **options)
        results[index][...] = (results[index].astype(np.float64) * 1.03).astype(results[index].dtype)
        return results

    monkeypatch.setattr(cupy_sdpa, "attention_backward", spoiled)
    outcome = execute(case)
    assert (outcome.kind, outcome.cause) == ("wrong", f"d{'qkv'[index]}")


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"packed": ("full", "full", 0, 0, 0, "int32")}], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_wrong_derivative_is_found(dtype, options, monkeypatch):
    """A derivative that is 3 % too large is a finding."""
    case = Case(dtype=dtype, d=16, dv=16, hq=4, hkv=2, sq=20, skv=30, options={"jvp": "qkv", **options})
    assert execute(case).kind == "passed"
    real = cupy_sdpa.attention_jvp

    def spoiled(*arrays, **options):
        results = real(*arrays, **options)
        results[1][...] = (results[1].astype(np.float64) * 1.03).astype(results[1].dtype)
        return results

    monkeypatch.setattr(cupy_sdpa, "attention_jvp", spoiled)
    outcome = execute(case)
    assert (outcome.kind, outcome.cause) == ("wrong", "jvp")


def test_gradients_that_are_not_deterministic_are_found(monkeypatch):
    """With deterministic=True one different bit between calls on equal data is a finding."""
    case = Case(sq=5, skv=7, backward=True, options={"deterministic": True})
    assert execute(case).kind == "passed"
    real, calls = cupy_sdpa.attention_backward, itertools.count()

    def spoiled(*arrays, **options):
        results = real(*arrays, **options)
        results[0].view(np.uint32)[0, 0, 0, 0] ^= next(calls) == 2  # the second call on these data
        return results

    monkeypatch.setattr(cupy_sdpa, "attention_backward", spoiled)
    assert "bits of dq differ" in execute(case).message


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "both passes"])
@pytest.mark.parametrize(("index", "name"), list(enumerate(["out", "stats", "max", "sum_exp"])))
def test_a_forward_pass_that_is_not_deterministic_is_found(index, name, backward, monkeypatch):
    """The same holds for a single query; and every forward pass is called with deterministic=True."""
    case = Case(sq=1, skv=7, backward=backward, options={"stats": "max_sumexp", "deterministic": True})
    assert execute(case).kind == "passed"
    real, calls, flags = cupy_sdpa.attention, itertools.count(), []

    def spoiled(*arrays, **options):
        flags.append(options["deterministic"])
        results = real(*arrays, **options)
        results[index].view(np.uint32).ravel(order="K")[:1] ^= next(calls) == 2  # the second call on these data
        return results

    monkeypatch.setattr(cupy_sdpa, "attention", spoiled)
    assert f"bits of {name} differ" in execute(case).message
    assert all(flags)


def test_exceptions_are_findings_and_refusals_are_not(monkeypatch):
    """An exception is a finding with its type; Unsupported is a refusal."""
    for error, kind in ((ValueError("no"), "exception"), (cupy_sdpa.Unsupported("not here"), "refused")):

        def failing(*arrays, error=error, **options):
            raise error

        monkeypatch.setattr(cupy_sdpa, "attention", failing)
        outcome = execute(Case())
        assert outcome.kind == kind
        assert str(error) in outcome.message


# Shrinking


def test_shrinking_removes_what_a_failure_does_not_need():
    """Options, sizes, layouts and gradients that the failure does not need are removed."""

    def ask(case):
        wrong = "alibi_slopes" in case.options and case.skv > 256 and case.sq == 1
        return Outcome("wrong", "", "out") if wrong else Outcome()

    case = Case(
        "gpu", "bfloat16", d=64, dv=128, hq=12, hkv=4, sq=1, skv=1500, b=3, backward=True, layouts={"q": "dshb"},
        options={"causal": "bottom_right", "alibi_slopes": "usual", "sinks": "high", "return_dsinks": True},
    )  # fmt: skip
    small, outcome = shrink(case, ask(case), ask)
    assert small == Case("gpu", "float16", sq=1, skv=257, options={"alibi_slopes": "usual"})
    assert outcome.kind == "wrong"


def test_shrinking_keeps_the_kind_of_failure():
    """A smaller case that fails in another way is not accepted."""

    def ask(case):
        return Outcome("crash") if case.skv == 100 else Outcome("wrong", "", "out")

    small, outcome = shrink(Case(skv=100, b=4), Outcome("crash"), ask)
    assert (small, outcome.kind) == (Case(skv=100, sq=1, d=1, dv=1), "crash")


def test_every_candidate_is_smaller():
    """Candidates differ from the case, and never have an option without the one that it requires."""
    for number in range(100):
        case = draw(2, number, "gpu")
        for smaller in candidates(case):
            assert smaller != case
            assert len(smaller.options) <= len(case.options)
            assert not smaller.paged or smaller.skv % smaller.paged.page == 0
            for name, needed in REQUIRES.items():
                assert name not in smaller.options or needed in smaller.options


# Processes


PLANTED = """
import os, signal, time
import cupy_sdpa
real = cupy_sdpa.attention

def attention(*arrays, **options):
    if options.get("softcap"):
        os.kill(os.getpid(), signal.SIGKILL)
    if options.get("window"):
        time.sleep(1000)
    results = real(*arrays, **options)
    if options.get("causal"):
        results[0][0, 0] += 1
    return results

cupy_sdpa.attention = attention
"""


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """The name of a module that injects faults into the processes that import it."""
    (tmp_path / "planted_errors.py").write_text(PLANTED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(run, "SHRINK_SECONDS", 3.0)
    return "planted_errors"


def test_a_crash_is_a_finding_and_the_run_continues(planted):
    """Crashes and wrong results are reported with a line that reproduces them; all other cases run."""
    cases = [
        Case(), Case(options={"softcap": 2.0, "scale": 1.0}), Case(seed=1), Case(sq=5, b=2, options={"causal": "top_left"}),
        Case(seed=2),
    ]  # fmt: skip
    summary, findings, *_ = run.run(iter(cases), 2, modules=(planted,))
    assert summary.problems == 5
    assert summary.count("passed") == 3
    found = {finding.outcome.kind: finding for finding in findings}
    assert found.keys() == {"crash", "wrong"}
    assert "SIGKILL" in found["crash"].outcome.message
    assert found["crash"].case.options == {"softcap": 2.0}
    assert found["wrong"].case == Case(d=1, dv=1, sq=1, skv=1, options={"causal": "top_left"})
    assert found["wrong"].command.count("\n") == 0
    assert parse(found["wrong"].command.split("reproduce(")[1].removesuffix(')"')) == found["wrong"].case


def test_a_process_that_hangs_is_a_finding(planted):
    """A case that exceeds the time limit is a finding, and its process is replaced."""
    with Pool(1, (planted,)) as workers:
        assert workers.run(Case()).kind == "passed"
        outcome = workers.run(Case(options={"window": (1, 1)}), limit=1.0)
        assert outcome.kind == "hang"
        assert workers.run(Case()).kind == "passed"


def test_a_process_that_is_killed_from_outside_is_a_finding():
    """The outcome names the signal."""
    worker = pool.Worker()
    assert worker.run(Case()).kind == "passed"
    os.kill(worker.pid, signal.SIGTERM)
    outcome = worker.run(Case())
    worker.close()
    assert outcome.kind == "crash"
    assert "SIGTERM" in outcome.message


def test_an_interrupted_run_reports_the_finished_cases(planted):
    """Ctrl-C ends all processes at once, also those that are running a case; the report contains the finished cases."""

    def progress(summary, seconds, activity):
        if summary.problems == 2:
            raise KeyboardInterrupt

    cases = [Case(), Case(seed=1), Case(options={"window": (1, 1)})]  # the last one would hang
    summary, findings, seconds, interrupted = run.run(iter(cases), 2, progress=progress, modules=(planted,))
    assert (summary.problems, findings, interrupted) == (2, [], True)
    assert seconds < pool.TIME_LIMIT / 2


def test_findings_of_one_kind_are_reported_once(planted, monkeypatch):
    """Cases that fail in the same way are listed with the shrunk one."""
    cases = [Case(b=b, seed=b, options={"causal": "top_left"} | more) for b in (1, 2) for more in ({}, {"sinks": "high"})]
    _, (finding,), _, _ = run.run(iter(cases), 1, modules=(planted,))
    assert len(finding.duplicates) == 3
    assert "4 times" in finding.text()


# The command


def test_the_command_writes_a_report(tmp_path, capsys):
    """A run without findings exits with 0; the report contains versions, seed and counts."""
    file = tmp_path / "report.json"
    words = ["check", "--engine", "cpu", "--case", "Case(options={'causal': 'top_left', 'sinks': 'normal'})"]
    assert main([*words, "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["problems"] == 1
    assert report["findings"] == []
    assert report["versions"]["numpy"] == np.__version__
    assert report["options"]["causal"] == {"run": 1, "refused": 0, "wrong": 0}
    assert report["shares"]["causal"] == 100
    assert report["pairs"]["causal + sinks"]["run"] == 1
    printed = capsys.readouterr()
    assert "1 problem, 3 calls, 0 findings" in printed.out
    assert all(len(line) <= 100 for line in printed.out.splitlines())


def test_the_command_exits_with_1_if_there_are_findings(planted, tmp_path, capsys, monkeypatch):
    """A finding is printed, is in the report, and sets the exit status."""
    monkeypatch.setattr(run, "Pool", lambda jobs, modules: Pool(jobs, (planted,)))
    file = tmp_path / "report.json"
    assert main(["check", "--case", "Case(options={'causal': 'top_left'})", "--json", str(file)]) == 1
    (finding,) = json.loads(file.read_text())["findings"]
    assert finding["kind"] == "wrong"
    assert finding["reproduce"] in capsys.readouterr().out


def test_findings_are_printed_and_reported_before_they_are_shrunk(planted, tmp_path, capsys, monkeypatch):
    """A run that is killed while it shrinks has printed its findings and written its report; the report is written again at the
    end.
    """
    monkeypatch.setattr(run, "Pool", lambda jobs, modules: Pool(jobs, (planted,)))
    file, literal, seen = tmp_path / "report.json", "Case(sq=5, options={'causal': 'top_left'})", []

    def shrinking(*arguments):
        seen.append((json.loads(file.read_text()), capsys.readouterr().err))
        shrink_some(*arguments)

    shrink_some = run._shrink_findings
    monkeypatch.setattr(run, "_shrink_findings", shrinking)
    assert main(["check", "--case", literal, "--json", str(file)]) == 1
    ((report, printed),) = seen
    assert (report["problems"], report["final"]) == (1, False)
    assert [(finding["shrunk"], finding["case"]) for finding in report["findings"]] == [(False, literal)]
    assert f'found: python -c "from cupy_sdpa.check import Case, reproduce; reproduce({literal})"' in printed
    report = json.loads(file.read_text())
    assert report["final"]
    assert [finding["shrunk"] for finding in report["findings"]] == [True]


def test_a_report_that_cannot_be_written_loses_no_finding(planted, tmp_path, capsys, monkeypatch):
    """The run continues, prints its findings, and fails at the end."""
    monkeypatch.setattr(run, "Pool", lambda jobs, modules: Pool(jobs, (planted,)))
    monkeypatch.setattr("cupy_sdpa._cli.check.output_file", Path)  # it becomes a folder after the arguments were checked
    assert main(["check", "--case", "Case(options={'causal': 'top_left'})", "--json", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert "1 finding in" in printed.out
    assert f"--json {tmp_path}: Is a directory" in " ".join(printed.err.split())


def test_the_command_runs_drawn_problems(capsys):
    """Worker processes run drawn problems; the table of options fits 80 columns."""
    assert main(["check", "--engine", "cpu", "--problems", "6", "--seed", "5", "--jobs", "2"]) == 0
    out = capsys.readouterr().out
    assert "6 problems" in out
    table = out[out.index("option") :].split("\n\n")[0].splitlines()
    assert max(map(len, table)) <= 80
    assert all(any(name in line for line in table) for name in OPTIONS)
    assert all(line.count("%") in (1, 2) for line in table[1:])


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--minutes", "0"], "--minutes"),
        (["--seed", "-1"], "--seed"),
        (["--case", "Case(sq=f)"], "--case"),
        (["--json", "no/such/folder/x.json"], "cannot write no/such/folder/x.json: No such file or directory"),
        (["--json", "."], "cannot write .: "),
    ],
    ids=lambda x: x[0] if isinstance(x, list) else "",
)
def test_bad_arguments_are_one_line(words, complaint, capsys):
    """A bad argument exits with 2 before anything runs, and names the option or the file."""
    assert main(["check", *words]) == 2
    printed = capsys.readouterr()
    assert complaint in printed.err
    assert not printed.out


def test_the_command_without_a_gpu(monkeypatch, capsys):
    """Without a GPU and a C compiler the output names both, and the CPU engine is tested."""
    from cupy_sdpa._cli import check as command
    from cupy_sdpa._cli.helpers import machine

    monkeypatch.setattr(machine, "obstacles", lambda: ["no GPU: none"])
    monkeypatch.setattr(command, "_planner", lambda: "no C compiler")
    assert main(["check", "--problems", "2", "--seed", "5", "--jobs", "1"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "no kernel is run: no GPU: none" in out
    assert "planning: no C compiler" in out
    assert main(["check", "--engine", "gpu"]) == 2


def test_reproduce_runs_a_case(capsys):
    """The printed command runs the case and prints its outcome."""
    check.reproduce(Case(sq=3, options={"causal": "bottom_right"}))
    assert capsys.readouterr().out.splitlines()[-1] == "passed: 3 calls"


def test_import_does_not_load_the_check():
    """``import cupy_sdpa`` does not import the self-test."""
    code = "import sys, cupy_sdpa; sys.exit(any(name.startswith('cupy_sdpa.check') for name in sys.modules))"
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parents[1])}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


@pytest.mark.cudnn
def test_planning_is_tested_for_described_gpus():
    """The real cuDNN plans a case; a case that the support table refuses is refused."""
    with Pool(1) as workers:
        planned = workers.run(Case("plan", "float16", d=64, dv=64, sq=128, skv=128, gpu="h200", options={"causal": "top_left"}))
        refused = workers.run(Case("plan", "float16", d=12, dv=12, sq=128, skv=128, gpu="h200"))
    assert (planned.kind, planned.calls) == ("passed", 1)
    assert (refused.kind, refused.cause) == ("refused", "head-dim")


@pytest.mark.gpu
def test_a_minute_on_the_gpu_finds_nothing(capsys):
    """One minute of random problems on this GPU and cuDNN without a finding."""
    status = main(["check", "--minutes", "1", "--seed", "1", "--engine", "gpu"])
    assert status == 0, capsys.readouterr().out
