"""A single query, as in generation: cuDNN's kernel that splits the keys, and the workarounds for its bugs."""

import numpy as np
import pytest
from exact import evaluated
from planner import library_version, plan_problem

import cupy_sdpa
from cupy_sdpa import reference
from cupy_sdpa.calls.arguments import read_forward
from cupy_sdpa.graph.attention_forward import forward
from cupy_sdpa.plans.engines import splits_keys
from cupy_sdpa.plans.plan import PlanInfo
from cupy_sdpa.support import gpus
from cupy_sdpa.support.engine_problem import engine_problem
from cupy_sdpa.support.why_not import guards, why_not

KEYS, HEADS, BATCH = 300, 4, 2
ROWS = np.arange(KEYS)
SLOPES = np.linspace(0.01, 0.1, HEADS).astype(np.float32)
LENGTHS = np.array([0, 120], np.int32)

#: Options by name, and their effect on the scores ``(B, Hq, Sq, Skv)``, as a function of the indices of the axes.
CASES = {
    "alibi": ({"alibi_slopes": SLOPES}, lambda s, b, h, i, j: s - SLOPES[h] * abs(i - j)),
    "alibi, bottom right, lengths": (
        {"alibi_slopes": SLOPES, "causal": "bottom_right", "seq_lens_kv": LENGTHS},
        lambda s, b, h, i, j: np.where(j < LENGTHS[b], s - SLOPES[h] * abs(LENGTHS[b] - 1 - j), -np.inf),
    ),
    "positions": ({"score_mod": lambda s, b, h, i, j: s + 0.01 * j}, lambda s, b, h, i, j: s + 0.01 * j),
    "a mask of positions": ({"mask_mod": lambda b, h, i, j: j % 3 == 0}, lambda s, b, h, i, j: np.where(j % 3 == 0, s, -np.inf)),
    "one number a head": (
        {"score_mod": lambda s, b, h, i, j, t: s * t[h] + j, "tensors": {"t": SLOPES}},
        lambda s, b, h, i, j: s * SLOPES[h] + j,
    ),
    "a number added to each head": (
        {"score_mod": lambda s, b, h, i, j, t: s + t[h], "tensors": {"t": 10 * SLOPES}},
        lambda s, b, h, i, j: s + 10 * SLOPES[h],
    ),
    "the head": ({"score_mod": lambda s, b, h, i, j: s + 0.01 * j * (h % 3)}, lambda s, b, h, i, j: s + 0.01 * j * (h % 3)),
    "a mask of heads": (
        {"mask_mod": lambda b, h, i, j, t: (t[h] > 0.05) | ((j + h) % 3 == 0), "tensors": {"t": SLOPES}},
        lambda s, b, h, i, j: np.where((SLOPES[h] > 0.05) | ((j + h) % 3 == 0), s, -np.inf),
    ),
    "one number a batch entry": (
        {"score_mod": lambda s, b, h, i, j, t: s + t[b, h], "tensors": {"t": np.outer([1.0, 2.0], SLOPES)}},
        lambda s, b, h, i, j: s + np.outer([1.0, 2.0], SLOPES)[b, h],
    ),
}  # fmt: skip


def arrays(dtype=np.float64):
    """Random q, k and v of a single query."""
    rng = np.random.default_rng(0)
    shapes = ((16, HEADS, 1, BATCH), (16, 2, KEYS, BATCH), (16, 2, KEYS, BATCH))
    return [np.asfortranarray(rng.standard_normal(shape).astype(dtype)) for shape in shapes]


def expected(q, k, v, modify):
    """The output of numpy."""
    k, v = (np.repeat(x, 2, axis=1) for x in (k, v))
    s = np.einsum("dhqb,dhkb->bhqk", q, k) / 4
    s = modify(s, *np.ogrid[:BATCH, :HEADS, :1, :KEYS])
    e = np.exp(s - np.maximum(s.max(-1, keepdims=True), -1e300))
    return np.einsum("bhqk,dhkb->dhqb", e / np.maximum(e.sum(-1, keepdims=True), 1e-300), v)


@pytest.mark.parametrize("guards", [(), ("positions",)], ids=["plain", "positions from memory"])
@pytest.mark.parametrize("name", CASES)
def test_positions_from_memory_mean_the_same(name, guards):
    """A graph that reads key positions from memory equals one that computes them."""
    options, modify = CASES[name]
    q, k, v = arrays()
    got = evaluated(read_forward(q, k, v, options), lambda given: forward(given, frozenset(guards)))
    np.testing.assert_allclose(got["out"], expected(q, k, v, modify), atol=1e-12)


def problem(d=64, heads=(32, 8), keys=4096, batch=8, **options):
    """The problem of a single query."""
    q, kv = (d, heads[0], 1, batch), (d, heads[1], keys, batch)
    return cupy_sdpa.problem(q, kv, kv, dtype="bfloat16", **options)


@pytest.mark.cudnn
@pytest.mark.parametrize(
    "options",
    [
        {}, {"alibi_slopes": True}, {"alibi_slopes": True, "causal": "bottom_right", "seq_lens": True},
        {"score_mod": lambda s, b, h, i, j: s + 0.01 * j}, {"mask_mod": lambda b, h, i, j: j % 3 == 0},
        {"score_mod": lambda s, b, h, i, j, t: s * t[h] + j, "tensors": {"t": (32,)}}, {"bias": (4096, 1, 1, 1)},
    ],
    ids=["plain", "alibi", "alibi with lengths", "positions", "mask of positions", "one number a head", "bias"],
)  # fmt: skip
def test_the_fast_kernel_is_used_where_it_is_correct(options, planner):
    """The kernel that splits the keys is used for the options that it computes correctly."""
    plan = planner.call(plan_problem, problem(**options), "h200")
    assert isinstance(plan, PlanInfo), plan
    assert splits_keys(plan.engine, dict(plan.knobs))
    assert plan.workspace > 0  # the keys are split


#: Functions that read the head or an array without a key axis, as options.
OF_THE_HEAD = {
    "head": {"score_mod": lambda s, b, h, i, j: s + h},
    "array": {"score_mod": lambda s, b, h, i, j, t: s + t[h], "tensors": {"t": (HEADS,)}},
    "array of batch entries": {"score_mod": lambda s, b, h, i, j, t: s + t[b, h], "tensors": {"t": (BATCH, HEADS)}},
    "one element": {"score_mod": lambda s, b, h, i, j, t: s + t, "tensors": {"t": ()}},
    "integers": {"score_mod": lambda s, b, h, i, j, t: s + t[h] % 3, "tensors": {"t": np.arange(HEADS, dtype=np.int32)}},
    "with other indices": {"score_mod": lambda s, b, h, i, j: s * 0.5 + 0.01 * j - 0.02 * i + 0.1 * h},
    "mask of the head": {"mask_mod": lambda b, h, i, j: (j + h) % 3 != 0},
    "mask of an array": {"mask_mod": lambda b, h, i, j, t: t[h] > 0, "tensors": {"t": (HEADS,)}},
}  # fmt: skip


@pytest.mark.cudnn
@pytest.mark.parametrize("gpu", gpus.REPRESENTATIVES)
@pytest.mark.parametrize("name", OF_THE_HEAD)
def test_functions_of_the_head_are_planned(name, gpu, planner):
    """Since 9.26 cuDNN refuses to add an array with stride 0 along the keys; the product of such an array and ones is planned."""
    q, options = (64, HEADS, 1, BATCH), OF_THE_HEAD[name]
    version = planner.call(library_version)
    for keys in (1, KEYS, "pages"):
        kv = (64, 2, 16, 100) if keys == "pages" else (64, 2, keys, BATCH)
        table = {"page_table": (32, BATCH)} if keys == "pages" else {}
        for more in ({}, {"return_stats": True}, {"deterministic": True}):
            asked = cupy_sdpa.problem(q, kv, kv, dtype="bfloat16", **options, **table, **more)
            if not why_not(asked, version, gpus.capability(gpu)):
                plan = planner.accept(plan_problem, asked, gpu)
                assert isinstance(plan, PlanInfo), f"{asked}: {plan}"


@pytest.mark.cudnn
@pytest.mark.parametrize("mask", [(1, 1, 1, 1), (1, 1, HEADS, BATCH)])
def test_a_mask_of_a_single_key_is_planned_beside_a_function(mask, planner):
    """The key axis of the mask has one element, and stride 0."""
    shape = (64, HEADS, 1, BATCH)
    asked = cupy_sdpa.problem(shape, shape, shape, dtype="bfloat16", mask=mask, **OF_THE_HEAD["head"])
    plan = planner.accept(plan_problem, asked, "h200")
    assert isinstance(plan, PlanInfo), plan


@pytest.mark.in_turn(3)
@pytest.mark.cudnn
@pytest.mark.parametrize(
    "options",
    [
        {"dropout_p": 0.1, "seed": 1}, {"sinks": True}, {"deterministic": True},
        {"deterministic": True, "alibi_slopes": True}, {"deterministic": True, "return_stats": "max_sumexp"},
    ],
    ids=["dropout", "sinks", "deterministic", "deterministic with alibi", "deterministic with max_sumexp"],
)  # fmt: skip
@pytest.mark.parametrize("gpu", ["h200", "a100"])
def test_the_split_kernel_is_avoided_where_it_is_wrong(options, gpu, planner):
    """It is wrong with dropout and sinks, and accumulates in any order: another kernel is used, and the reason is kept."""
    asked = cupy_sdpa.problem((64, 18, 1, 8), (64, 3, 163, 8), (64, 3, 163, 8), dtype="bfloat16", **options)
    plan = planner.call(plan_problem, asked, gpu)
    assert isinstance(plan, PlanInfo), plan
    assert not splits_keys(plan.engine, dict(plan.knobs))
    assert any("splits the keys" in reason for reason in plan.refused)


@pytest.mark.cudnn
def test_explain_names_the_bug_that_is_worked_around():
    """The report has the entry of the table, the effect, and the workaround."""
    text = str(cupy_sdpa.explain(problem(alibi_slopes=True), gpu="h200"))
    assert "works around one-query-positions" in text
    assert "constant key positions" in text
    assert "works around" not in str(cupy_sdpa.explain(problem(), gpu="h200"))


@pytest.mark.cudnn
def test_explain_names_the_kernel_that_deterministic_excludes():
    """The report has the entry of the table, and the effect of deterministic=True."""
    text = str(cupy_sdpa.explain(problem(deterministic=True), gpu="h200"))
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
    graph = forward(problem(deterministic=True), guards(problem(deterministic=True), 92800, 90))
    assert graph.no_split
    assert not forward(problem(), guards(problem(), 92800, 90)).no_split


def test_every_call_accepts_deterministic():
    """The plain call, prepare(), explain() and attention_vjp(); a value that is not a flag raises."""
    q, k, v = arrays()
    out = cupy_sdpa.attention(q, k, v)
    np.testing.assert_array_equal(cupy_sdpa.attention(q, k, v, deterministic=True), out)
    np.testing.assert_array_equal(cupy_sdpa.prepare(q, k, v, deterministic=True)(q, k, v), out)
    assert cupy_sdpa.explain(q, k, v, deterministic=True).problem.deterministic
    assert not cupy_sdpa.explain(q, k, v).problem.deterministic
    with pytest.raises(TypeError, match="deterministic is 1; it must be True or False"):
        cupy_sdpa.attention(q, k, v, deterministic=1)


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
    (read,) = engine_problem(read_forward(q, k, v, options).problem, None, on_gpu=True).captured
    assert read.dtype == "float32"
    q = np.ones((64, 4, 2, 2), np.float16, order="F")
    (read,) = engine_problem(read_forward(q, k, v, options).problem, None, on_gpu=True).captured
    assert read.dtype == "float16"


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_positions_are_right_on_the_gpu(name, cupy):
    """With more than 256 keys ALiBi and functions of positions match numpy."""
    options, modify = CASES[name]
    q, k, v = arrays(np.float16)

    def up(x):
        return (
            {n: up(y) for n, y in x.items()}
            if isinstance(x, dict)
            else cupy.asarray(x, order="F")
            if isinstance(x, np.ndarray)
            else x
        )

    options = up({n: {m: y.astype(np.float32) for m, y in x.items()} if n == "tensors" else x for n, x in options.items()})
    for _ in range(4):  # a repeated call is captured
        out = cupy_sdpa.attention(*map(up, (q, k, v)), **options)
        np.testing.assert_allclose(out.get().astype(float), expected(*(x.astype(float) for x in (q, k, v)), modify), atol=6e-3)


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
@pytest.mark.parametrize("keys", [1, 50, 300, 5000])
def test_queries_of_length_0(keys, cupy):
    """Output 0 and log-sum-exp -inf, even if the memory contains NaN; other batch entries are right."""
    q, k, v = (np.random.default_rng(keys).standard_normal((64, 4, n, 3)).astype(np.float16) for n in (1, keys, keys))
    lengths = np.array([0, 1, 1], np.int32)
    truth, log_sums = reference.attention(q, k, v, seq_lens_q=lengths)
    q[..., 0] = np.nan
    given = [cupy.asarray(x, order="F") for x in (q, k, v)]
    for _ in range(4):
        out, stats = cupy_sdpa.attention(*given, seq_lens_q=cupy.asarray(lengths), return_stats=True)
        np.testing.assert_allclose(out.get().astype(float), truth, atol=3e-3)
        np.testing.assert_allclose(stats.get(), log_sums, atol=1e-4)


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
