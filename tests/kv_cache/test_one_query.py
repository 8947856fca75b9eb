"""A single query, as in generation: cuDNN's kernel that splits the keys, and the workarounds for its bugs."""

import numpy as np
import pytest
from engines import one_in
from planner import library_version, plan_problem

import cupy_sdpa
from cupy_sdpa import reference
from cupy_sdpa.check.draw import GPUS
from cupy_sdpa.core.boundary.arguments import read_forward
from cupy_sdpa.core.cudnn_engine.engines import splits_keys
from cupy_sdpa.core.support import gpus
from cupy_sdpa.core.support.engine_problem import engine_problem
from cupy_sdpa.core.support.why_not import why_not

HEADS, BATCH, KEYS = 4, 2, 300
#: Options that read positions, heads, lengths or arrays without a key axis: cuDNN's kernel computes some of them wrongly.
POSITIONS = {
    "alibi": {"alibi_slopes": "random"},
    "alibi, bottom right, lengths": {"alibi_slopes": "random", "causal": "bottom_right", "seq_lens_kv": "some_zero"},
    "alibi in pages": {"alibi_slopes": "random", "causal": "bottom_right", "paged": (4, "pages", "random", 0, "mixed", False, False)},
    **{name: {"score_mod": (name, "")} for name in ("relative", "first_keys", "by_head", "by_batch")},
    **{name: {"score_mod": (name, "float16")} for name in ("number", "gain_h", "slope_h", "bias_bh", "bias_k", "two")},
    **{f"{name} in pages": {"score_mod": (name, "float16"), "paged": (4, "pages", "random", 0, "mixed", False, False)}
       for name in ("slope_h", "bias_bh")},
    "queries of length 0": {"seq_lens_q": "some_zero", "stats": True},
    **{name: {"mask_mod": (name, kind)} for name, kind in (("key_100", ""), ("checkered", ""), ("head_window", "int32"))},
}  # fmt: skip


@pytest.mark.parametrize("name", one_in(2, POSITIONS))
def test_positions_are_right(name, engine):
    """With more than 256 keys, computed or read from memory, as the bugs of cuDNN's version require."""
    engine.agrees(engine.case(d=16, dv=16, hq=HEADS, hkv=2, sq=1, skv=KEYS, b=BATCH, options=POSITIONS[name]))


#: Options with which the keys in pages are not split, so that cuDNN would add the sinks.
BESIDE_SINKS = {
    "alibi": {"alibi_slopes": "usual"},
    "mask": {"mask": ("kqhb", "random")},
    "bias": {"bias": ("kq1b", "float16", "normal")},
    "score_mod": {"score_mod": ("gain_h", "bfloat16")},
    "mask_mod": {"mask_mod": ("checkered", "")},
}


@pytest.mark.parametrize("page", one_in(2, [16, 1]))
@pytest.mark.parametrize("name", BESIDE_SINKS)
def test_sinks_of_grouped_heads_in_pages(name, page, engine):
    """Every head has its own sink, with and without the log-sum-exp and arrays for the results, also sequences without keys."""
    pages = {"paged": (page, "heads", "some_zero", 0, "mixed", False, False), "sinks": "high"}
    sizes = {"d": 16, "dv": 16, "hq": 6, "hkv": 2, "sq": 1, "skv": 64, "b": 3}
    for more, layouts in (({}, {}), ({"stats": True}, {}), ({"stats": True, "preallocated": True}, {"out": "dhsb*s+h"})):
        engine.agrees(engine.case(**sizes, layouts=layouts, options=BESIDE_SINKS[name] | pages | more, seed=1))


def test_the_workaround_of_sinks_is_explained(fake):
    """The report names the bug, which the problem of the launch does not have."""
    x, pages = fake.zeros((16, 4, 1, 1), np.float16, order="F"), fake.zeros((16, 2, 4, 2), np.float16, order="F")
    options = {"page_table": fake.asarray([[0], [1]], np.int32), "seq_lens_kv": fake.asarray([8], np.int32)}
    report = cupy_sdpa.explain(
        x, pages, pages, **options, sinks=fake.zeros(4, np.float32), alibi_slopes=fake.ones(4, np.float32)
    )
    assert any(text.startswith("one-paged-query-sinks") for text in report.workarounds)


def problem(d=64, heads=(32, 8), keys=4096, batch=8, **options):
    """The problem of a single query."""
    q, kv = (d, heads[0], 1, batch), (d, heads[1], keys, batch)
    return cupy_sdpa.problem(q, kv, kv, dtype="bfloat16", **options)


#: Problems, and why the kernel that splits the keys is not used; "" if it is.
PLANNED = {
    "alibi with lengths": (problem(alibi_slopes=True, causal="bottom_right", seq_lens_kv=True), "h200", ""),
    "one number a head": (
        problem(score_mod=lambda s, b, h, i, j, t: s * t[h] + j, tensors={"t": (32,)}), "h200", ""
    ),
    "dropout": (problem(heads=(18, 3), keys=163, dropout_p=0.1, seed=1), "a100", "splits the keys"),
    "deterministic with max_sumexp": (
        problem(heads=(18, 3), keys=163, deterministic=True, alibi_slopes=True, return_stats="max_sumexp"), "h200", "splits the keys"
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.cudnn
@pytest.mark.parametrize("name", PLANNED)
def test_the_kernel_that_splits_keys_is_used_where_it_is_right(name, planner):
    """It is wrong with dropout and sinks, and accumulates in any order: another kernel is then used, and the reason is kept."""
    asked, gpu, reason = PLANNED[name]
    plan = planner.call(plan_problem, asked, gpu)
    assert not isinstance(plan, str), plan
    assert splits_keys(plan.engine, dict(plan.knobs)) != bool(reason)
    if reason:
        assert any(reason in refused for refused in plan.refused)
    else:
        assert plan.workspace > 0  # the keys are split


#: Functions that read the head or an array without a key axis, as options.
OF_THE_HEAD = {
    "head": {"score_mod": lambda s, b, h, i, j: s + h},
    "array": {"score_mod": lambda s, b, h, i, j, t: s + t[h], "tensors": {"t": (HEADS,)}},
    "array of batch items": {"score_mod": lambda s, b, h, i, j, t: s + t[b, h], "tensors": {"t": (BATCH, HEADS)}},
    "one element": {"score_mod": lambda s, b, h, i, j, t: s + t, "tensors": {"t": ()}},
    "integers": {"score_mod": lambda s, b, h, i, j, t: s + t[h] % 3, "tensors": {"t": np.arange(HEADS, dtype=np.int32)}},
    "with other indices": {"score_mod": lambda s, b, h, i, j: s * 0.5 + 0.01 * j - 0.02 * i + 0.1 * h},
    "mask of the head": {"mask_mod": lambda b, h, i, j: (j + h) % 3 != 0},
    "mask of an array": {"mask_mod": lambda b, h, i, j, t: t[h] > 0, "tensors": {"t": (HEADS,)}},
}  # fmt: skip


@pytest.mark.cudnn
@pytest.mark.parametrize("gpu", ["h200", *(pytest.param(gpu, marks=pytest.mark.slow) for gpu in sorted({*GPUS} - {"h200"}))])
def test_functions_of_the_head_are_planned(gpu, planner):
    """Since 9.26 cuDNN cannot add an array with stride 0 along the keys; the product of such an array and ones is planned."""
    version = planner.call(library_version)
    kinds = ((1, {}), (KEYS, {"return_stats": True}), ("pages", {}), ("pages", {"deterministic": True}))
    for (name, options), (keys, more) in ((of, kind) for of in OF_THE_HEAD.items() for kind in kinds):
        kv = (64, 2, 16, 100) if keys == "pages" else (64, 2, keys, BATCH)
        table = {"page_table": (32, BATCH)} if keys == "pages" else {}
        asked = cupy_sdpa.problem((64, HEADS, 1, BATCH), kv, kv, dtype="bfloat16", **options, **table, **more)
        if not why_not(asked, version, gpus.capability_of(gpu)):
            plan = planner.accept(plan_problem, asked, gpu)
            assert not isinstance(plan, str), f"{name} {asked}: {plan}"


@pytest.mark.cudnn
@pytest.mark.parametrize("mask", [(1, 1, 1, 1), (1, 1, HEADS, BATCH)])
def test_a_mask_of_a_single_key_is_planned_beside_a_function(mask, planner):
    """The key axis of the mask has one element, and stride 0."""
    shape = (64, HEADS, 1, BATCH)
    asked = cupy_sdpa.problem(shape, shape, shape, dtype="bfloat16", mask=mask, **OF_THE_HEAD["head"])
    plan = planner.accept(plan_problem, asked, "h200")
    assert not isinstance(plan, str), plan


@pytest.mark.slow
@pytest.mark.cudnn
def test_explain_names_the_bug_that_is_worked_around():
    """The report has the entry of the table, the effect, and the workaround."""
    text = str(cupy_sdpa.explain(problem(alibi_slopes=True, deterministic=True), gpu="h200"))
    assert "works around one-query-positions" in text
    assert "constant key positions" in text
    assert "deterministic forward attention" in text
    assert "works around one-query-deterministic" in text
    assert "the kernel that splits the keys is not used" in text


def test_deterministic_is_part_of_the_problem_where_it_matters():
    """Only the forward pass of one query has a kernel that accumulates in any order: other problems and plans are unchanged."""
    assert problem(deterministic=True) != problem()
    assert problem(deterministic=True).deterministic
    q, kv = (64, 4, 2, 2), (64, 4, 300, 2)
    assert cupy_sdpa.problem(q, kv, kv, dtype="float16", deterministic=True) == cupy_sdpa.problem(q, kv, kv, dtype="float16")
    starts = {"cu_seqlens_q": (3,), "cu_seqlens_kv": (3,), "max_seqlen_kv": 16, "max_seqlen_q": 1, "dtype": "float16"}
    packed = ((64, 4, 2), (64, 2, 32), (64, 2, 32))
    assert cupy_sdpa.problem(*packed, **starts, deterministic=True) == cupy_sdpa.problem(*packed, **starts)


def test_packed_sequences_of_one_query_are_planned_for_two():
    """cuDNN writes and reads the log-sum-exp of single packed queries at wrong addresses, so they are planned for two."""
    starts = {"cu_seqlens_q": (3,), "cu_seqlens_kv": (3,), "max_seqlen_kv": 16}
    kv = (64, 2, 32)
    for longest, planned in ((1, 2), (2, 2), (3, 3)):
        for backward in (False, True):
            asked = cupy_sdpa.problem((64, 4, 2), kv, kv, dtype="bfloat16", max_seqlen_q=longest, backward=backward, **starts)
            assert asked.settings.max_seqlen_q == planned


def test_small_arrays_of_sixteen_bits_are_read_as_float32():
    """The split kernel reads 4 bytes at a time, so 16-bit arrays without an axis of keys are converted."""
    t = np.ones(4, np.float16)
    q, k, v = (np.ones((64, 4, n, 2), np.float16, order="F") for n in (1, 300, 300))
    options = {"score_mod": lambda s, b, h, i, j, t: s * t[h], "tensors": {"t": t}}
    for queries, dtype in ((q, "float32"), (np.ones((64, 4, 2, 2), np.float16, order="F"), "float16")):
        (read,) = engine_problem(read_forward(queries, k, v, options).problem, None, on_gpu=True).captured
        assert read.dtype == dtype


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 8])
@pytest.mark.parametrize("keys", [1024, 20000])
def test_deterministic_results_have_the_same_bits(heads, keys, cupy):
    """In every call and captured graph, also for arrays at other addresses."""
    rng = np.random.default_rng(keys)
    arrays = [rng.standard_normal((16, heads, n, 2)).astype(np.float16) for n in (1, keys, keys)]
    found = set()
    for _ in range(20):
        given = [cupy.asarray(x, order="F") for x in arrays]
        for _ in range(4):
            results = cupy_sdpa.attention(*given, return_stats="max_sumexp", deterministic=True)
            found.add(b"".join(x.get().tobytes() for x in results))
    assert len(found) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("d", [40, 48, 64])
def test_dropout_leaves_the_context_alive(d, cupy):
    """Dropout of a single query with many heads, which caused an illegal memory access, matches its mask."""
    shapes = (d, 18, 1, 8), (d, 3, 163, 8), (d, 3, 163, 8)
    q, k, v = (np.random.default_rng(d).standard_normal(shape).astype(np.float16) for shape in shapes)
    given, dropout = [cupy.asarray(x, order="F") for x in (q, k, v)], {"dropout_p": 0.1, "seed": 3}
    out = cupy_sdpa.attention(*given, **dropout)
    kept = cupy_sdpa.dropout_mask(*given[:2], **dropout).get()
    assert 0.88 < kept.mean() < 0.92
    truth, _ = reference.attention(q, k, v, dropout_p=0.1, dropout_mask=kept)
    np.testing.assert_allclose(out.get().astype(float), truth, atol=6e-3)
