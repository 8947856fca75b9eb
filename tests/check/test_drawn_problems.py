"""The problems that the self-test draws, their values and their expected results."""

import ast
import itertools
from pathlib import Path

import numpy as np
import pytest

from cupy_sdpa import check, explain
from cupy_sdpa.check import Case
from cupy_sdpa.check.calls import problems
from cupy_sdpa.check.case import GRADIENTS, Paged, parse
from cupy_sdpa.check.combine import LEFT_OUT, SHARES, schedule
from cupy_sdpa.check.data import build
from cupy_sdpa.check.draw import OPTIONS, PAIRS, draw, draw_options
from cupy_sdpa.check.drawn_memory import DrawnMemory, memory_of
from cupy_sdpa.check.execute import ExpectedResults, execute
from cupy_sdpa.check.oracle import Inputs, Results
from cupy_sdpa.reference import MASKED

FOLDER = Path(check.__file__).parent
#: The modules that compute the expected results. They must not import the code under test.
INDEPENDENT = ("case", "data", "formats", "functions", "drawn_memory", "oracle", "tolerances", "comparison", "weight_options")


@pytest.mark.parametrize("engine", ["cpu", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpu", "plan"))])
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


#: Cases that the self-test reported by mistake: the strides of a head dim of 1 do not tell the order of the axes, so the call
#: names the layout; offsets that add up to the total may be lengths, so such arrays get an unused position.
MISTAKES = {
    "head dim of 1": Case(d=1, dv=1, sq=1, b=2, layouts={"v": "dhbs+b"}, seed=494),
    "offsets like lengths": Case(
        d=1, dv=1, sq=11, skv=1, options={"packed": ("some_zero", "zero", 7, 0, 0, "int64")}, seed=2301
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_of_the_self_test(name):
    """They pass."""
    outcome = execute(MISTAKES[name])
    assert outcome.kind == "passed", outcome.message


@pytest.mark.slow
def test_sizes_cover_the_input_space():
    """Empty, tiny, decoding and odd sizes are drawn, and head dims in steps of 8 up to 256; on the CPU small sizes as often."""
    lengths = [n for number in range(1000) for case in [draw(2, number, "cpu")] for n in (case.sq, case.skv)]
    assert sum(n < 3 for n in lengths) > 0.33 * len(lengths)
    assert sum(n > 40 for n in lengths) > 0.2 * len(lengths)
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
    """``parse`` of the ``repr`` of a case returns the case, which depends on the seed, the number and the engine only."""
    drawn = [draw(1, number, engine) for number in range(200)]
    assert [parse(repr(case)) for case in drawn] == [draw(1, number, engine) for number in range(200)]
    assert drawn[17] not in (drawn[18], draw(2, 17, engine), draw(1, 17, {"cpu": "gpu"}.get(engine, "cpu")))


@pytest.mark.parametrize("text", ["1", "Case(1)", "Case(sq=len)", "Case(size=1)", "Case(engine='tpu')", "f(sq=1)", "Case("])
def test_parse_rejects_other_text(text):
    """``parse`` accepts only literals of existing fields."""
    with pytest.raises(ValueError, match=r"Case|case|engine"):
        parse(text)


def test_a_slice_is_surrounded_by_nan():
    """Every layout gives a view with the requested shape and values, surrounded by NaN."""
    for layout in ("dhsb", "dshb+s*b", "bshd-d", "dhsb+d+h", "sdbh*s"):
        memory = DrawnMemory(np)
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


def test_paged_cases_cover_the_options():
    """Page sizes, few queries, packed queries, splits, and every kind of table entry are drawn; every case is consistent."""
    for engine, pages in (("gpu", {2**n for n in range(8)}), ("cpu", {1, 3, 16, 48, 128})):
        cases = [draw_options({"paged"}, number, engine) for number in range(400)]
        drawn = {name: {getattr(case.paged, name) for case in cases} for name in Paged._fields}
        assert pages <= drawn["page"]
        assert sum(1 <= case.sq <= 8 for case in cases) > 250
        assert all(case.skv % case.paged.page == 0 and not case.backward for case in cases)
        assert {0, 1, 2, 3, 7} <= drawn["num_splits"]
        assert drawn["rest"] == {"large", "negative", "unowned", "mixed"}
        assert drawn["shared"] == drawn["moved"] == {False, True}
    partners = {name for pair in PAIRS if "paged" in pair for name in pair}
    assert set(OPTIONS) - partners == {
        "seq_lens_kv",
        "bucket",
        "jvp",
        "parallel",
        "merge",
        "cache",
        "mean",
        "dstats",
        *GRADIENTS,
    }


@pytest.mark.parametrize("name", ["weight_sums", "weight_entropy"])
def test_num_splits_is_not_drawn_for_calls_without_it(name):
    """With num_splits, equal calls must return equal bits; these calls let cuDNN choose, so bits may differ for one query."""
    cases = [draw_options({"paged", name}, number, "gpu") for number in range(100)]
    assert {case.paged.num_splits for case in cases} == {0}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("rest", ["large", "negative", "unowned", "mixed"])
def test_the_arrays_of_paged_cases(rest, shared):
    """The gathered pages are the dense keys; other pages are NaN, rows after the length are finite and large."""
    case = Case(dtype="float16", skv=12, b=3, options={"paged": (3, "pages", "random", 0, rest, shared, False)}, seed=3)
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
    case = Case(skv=12, b=2, options={"paged": (3, "pages", "full", 0, "mixed", False, True)})
    one, other = build(case, 0), build(case, 1)
    assert (one.arrays["page_table"] != other.arrays["page_table"]).any()
    for name in "kv":
        np.testing.assert_array_equal(one.dense[name], other.dense[name])


@pytest.mark.slow
def test_most_problems_in_fp8_are_supported():
    """Nine of ten are drawn to fit the limits of Hopper."""
    refused = 0
    for number in range(60):
        case = draw_options({"fp8"} | ({"paged"} if number % 2 else {"causal"}), number, "gpu")
        refused += not all(explain(problem, gpu="h200", cudnn="9.19") for problem in problems(case))
    assert refused < 12


# The reference of the self-test


@pytest.mark.parametrize("name", INDEPENDENT)
def test_the_reference_is_independent(name):
    """The modules that generate data and check results import numpy, ml_dtypes, one another, the reference and its tolerance only.

    The functions of saved problems also read the table of modes: which function of numpy a mode is.
    """
    for node in ast.walk(ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 2:
            assert node.module in ("reference", *(["core.score_fn.modes"] if name == "functions" else []))
        elif isinstance(node, ast.ImportFrom) and node.level:
            assert node.module in INDEPENDENT
        elif isinstance(node, ast.Import):
            assert not any(alias.name.startswith("cupy") for alias in node.names)


@pytest.mark.parametrize("name", ["tanh", "square", "gain_h", "slope_h", "bias_kq", "two", "place", "number", "bias_all"])
def test_the_oracles_gradients_are_differences(name):
    """With score functions, gradients equal finite differences of the output along random directions."""
    case = Case(
        dtype="float64", d=4, dv=3, hq=4, hkv=2, sq=5, skv=6, b=2, backward=True, seed=4,
        options={"score_mod": (name, "float64"), "softcap": 5.0, "causal": "bottom_right", "return_dtensors": True},
    )  # fmt: skip
    data = build(case, 0)
    found = Results(Inputs(data)).values
    rng = np.random.default_rng(0)
    dout = data.arrays["dout"]
    places = {"q": data.arrays, "k": data.arrays, "v": data.arrays} | dict.fromkeys(data.tensors, data.tensors)
    for key, place in places.items():
        start, direction = place[key], rng.standard_normal(place[key].shape)
        sums = []
        for step in (1e-5, -1e-5):
            place[key] = start + step * direction
            sums.append((Results(Inputs(data)).values["out"] * dout).sum())
        place[key] = start
        gradient = found[f"d{key}" if key in ("q", "k", "v") else f"tensors[{key!r}]"]
        assert (gradient * direction).sum() == pytest.approx((sums[0] - sums[1]) / 2e-5, rel=1e-6, abs=1e-7)


def test_rows_masked_by_finite_values():
    """A bias below the threshold masks a key; a row of such keys gives output 0, log-sum-exp -inf and gradient 0."""
    case = Case(dtype="float64", sq=3, skv=4, backward=True, options={"bias": ("kq11", "float32", "normal")})
    data = build(case, 0)
    data.arrays["bias"][:, 1] = 2 * MASKED
    wanted = ExpectedResults(data)
    assert np.isneginf(wanted.truth.values["stats"][1]).all()
    assert wanted.exact["out"][:, :, 1].all()
    assert not wanted.truth.values["out"][:, :, 1].any()
    assert not wanted.truth.values["dq"][:, :, 1].any()
