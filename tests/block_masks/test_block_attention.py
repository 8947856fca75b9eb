"""Attention with a block mask, its gradients and its derivatives: random problems, and what only some masks do."""

import ml_dtypes
import numpy as np
import pytest
from engines import every_engine, numbers, on_cudnn

from cupy_sdpa import (
    BlockMask,
    attention,
    attention_backward,
    attention_jvp,
    attention_vjp,
    block_mask,
    explain,
    get_plan_cache,
)

TABLE = np.array([[True, False, True], [True, True, False], [False, True, True]])
#: A mask for each method; ``n`` changes it.
MASKS = {
    "packed": lambda n=0: block_mask(lambda b, h, i, j: i // (100 + n) == j // (100 + n), 300, 300),
    "slices": lambda n=0: block_mask(lambda b, h, i, j: (i >= j) | (j < 70 + n), 300, 300),
    "full": lambda n=0: BlockMask.from_blocks(np.roll(TABLE, n, axis=0), 300, 300),
    "partial": lambda n=0: BlockMask.from_blocks(np.roll(TABLE, n, 0), 300, 300, mask_mod=lambda b, h, i, j: (i + j) % 3 > 0),
    "heads": lambda n=0: BlockMask.from_blocks(np.stack([np.roll(TABLE, n, 0), TABLE.T], axis=2)[..., None], 300, 300),
}


def arrays_of(engine, sq=300, skv=300, hq=2, hkv=1, dtype=None):
    """q, k, v and dout."""
    shapes = [(16, hq, sq, 1), (16, hkv, skv, 1), (16, hkv, skv, 1), (16, hq, sq, 1)]
    return [engine.normal([seed, 1], *shape, dtype=dtype) for seed, shape in enumerate(shapes)]


def both_passes(arrays, **options):
    """The output and the gradients."""
    out, pullback = attention_vjp(*arrays[:3], **options)
    return [out, *pullback(arrays[3])]


def check_dense(engine, results, arrays, mask, **options):
    """Compare the output and the gradients with the dense mask in float64; the options are numpy's."""
    wide = [engine.get(x).astype(np.float64, order="F") for x in arrays]
    for x, y in zip(engine.get(results), both_passes(wide, mask=mask.to_dense(), **options), strict=True):
        np.testing.assert_allclose(x, y, atol=4 * engine.tolerance * max(1, abs(y).max()))


@every_engine
@pytest.mark.parametrize("number", numbers(12, quick=2))
def test_random_problems(number, engine):
    """Masks of every kind and of heads and batch items, any sizes, options, layouts, gradients and derivatives."""
    engine.agrees(engine.draw({"block_mask"}, number), refused=True)


#: Masks of ``check``, and options of the call.
CORNERS = [
    (("documents", "kq11"), {"sinks": "high"}), (("documents", "kqhb"), {"score_mod": ("bias_bk", "float32")}),
    (("prefix", "kq11"), {"softcap": 2.0}), (("segments", "kq11"), {"sinks": "normal", "score_mod": ("first_keys", "")}),
    (("segments", "kq1b"), {"score_mod": ("positions", "int32")}), (("window", "kq11"), {"scale": 0.05}),
    (("blocks", "kqhb"), {"preallocated": True}), (("blocks", "kq11"), {"score_mod": ("gain_bhq", "float32")}),
    (("pairs", "kqh1"), {"sinks": "high"}), (("pairs", "kq1b"), {"softcap": 2.0, "deterministic": True}),
    (("pairs", "kq11"), {"score_mod": ("relative", "")}), (("blocks", "kqh1"), {"deterministic": True, "preallocated": True}),
]  # fmt: skip


@pytest.mark.parametrize("jvp", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["gradients", "derivative"])
@pytest.mark.parametrize("number", [pytest.param(n, marks=[pytest.mark.slow] * (n % 4 > 0)) for n in range(len(CORNERS))])
@pytest.mark.in_turn(2)
def test_each_kind_of_mask(number, jvp, engine):
    """With options, for groups of heads, and for keys and queries of which the last block is not full."""
    mask, options = CORNERS[number]
    options = {"block_mask": mask, **options, **({"jvp": ("qkv", "q", "kv", "v")[number % 4]} if jvp else {})}
    sizes = {"d": 16, "dv": 24, "hq": 2, "hkv": 1, "sq": 300, "skv": 260, "b": 2}
    engine.agrees(engine.case(**sizes, backward=not jvp, options=options, seed=number), refused=True)


@pytest.mark.parametrize("name", ["slices", "partial"])
def test_arrays_that_are_read_at_a_number(name, engine):
    """A score function reads an array at a key and at its last column."""
    mask, arrays, columns = MASKS[name](), arrays_of(engine), engine.normal(7, 300, 3, dtype="f4")
    options = {"score_mod": lambda s, b, h, i, j, columns: s + columns[j, -1]}
    results = both_passes(arrays, block_mask=mask, tensors={"columns": columns}, **options)
    check_dense(engine, results, arrays, mask, tensors={"columns": engine.get(columns)}, **options)


@pytest.mark.parametrize("name", ["batch", "heads", "no blocks", "queries", "keys"])
def test_sizes_of_0(name, engine):
    """Outputs and gradients are 0, with arrays of a score function; derivatives and reports also exist."""
    pairs = block_mask(lambda b, h, i, j: (i + j) % 2 == 0, 200, 300)
    no_query, no_key = (block_mask(lambda b, h, i, j: i >= j, *lengths) for lengths in ((0, 300), (200, 0)))
    none = BlockMask.from_blocks(np.zeros((3, 2, 2, 1), bool), 200, 300)
    mask, heads, batch = {
        "batch": (pairs, 2, 0), "heads": (pairs, 0, 2), "no blocks": (none, 2, 2), "queries": (no_query, 2, 2), "keys": (no_key, 2, 2),
    }[name]  # fmt: skip
    q, k, v = (engine.normal(0, 16, heads, n, batch) for n in (mask.sq, mask.skv, mask.skv))
    rows = engine.normal(1, batch, heads, mask.sq, dtype="f4")
    options = {"block_mask": mask, "score_mod": lambda s, b, h, i, j, rows: s + rows[b, h, i], "tensors": {"rows": rows}}
    results = [*both_passes((q, k, v, q), **options), *attention_jvp(q, k, v, q, k, v, **options)]
    assert [x.shape for x in results] == [q.shape, q.shape, k.shape, v.shape, q.shape, q.shape]
    assert not any(x.any() for x in engine.get(results))
    for flags in ({}, {"return_stats": True}, {"backward": True}, {"jvp": True}):
        report = explain(q, k, v, **flags, **options)
        assert report
        assert "runs without a kernel" in str(report)
        assert name != "no blocks" or flags or report.blocks.endswith("nothing is computed")


@pytest.mark.parametrize("kind", ["shared", "per head", "function", "prefix"])
def test_blocks_that_are_not_listed_are_not_read(kind, engine):
    """NaN in keys of a block to which no query attends, and in queries without keys, does not spread."""
    blocks = np.random.default_rng(0).random((4, 3, 2 if kind == "per head" else 1, 1)) < 0.6
    blocks[2], blocks[:, 1] = False, False
    blocks[0, 0], blocks[1, 2] = True, True
    mask = BlockMask.from_blocks(blocks)
    if kind == "function":
        mask = block_mask(lambda b, h, i, j: ((i + j) % 2 == 0) & (j // 128 != 2) & (i // 128 != 1), 384, 512)
    if kind == "prefix":
        mask = block_mask(lambda b, h, i, j: ((j < 100) | (i + 128 >= j)) & (j < 256) & (i // 128 != 1), 384, 512)
    arrays = arrays_of(engine, 384, 512, 2, 2)
    expected = engine.get(both_passes(arrays, block_mask=mask))
    for x, unread in zip(arrays, (slice(128, 256), slice(256, 384), slice(256, 384), slice(128, 256)), strict=True):
        x[:, :, unread] = np.nan
    for x, y in zip(engine.get(both_passes(arrays, block_mask=mask)), expected, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name", MASKS)
def test_gradients_in_bfloat16(name, engine):
    """Parts whose gradients are added have the dtype of the arrays."""
    arrays, mask = arrays_of(engine, dtype=ml_dtypes.bfloat16), MASKS[name]()
    wide = [engine.get(x).astype(np.float64, order="F") for x in arrays]
    for x, y in zip(engine.get(both_passes(arrays, block_mask=mask)), both_passes(wide, mask=mask.to_dense()), strict=True):
        np.testing.assert_allclose(x.astype(np.float64), y, atol=0.04 * max(1, abs(y).max()))


@pytest.mark.parametrize("case", ["very low scores", "very low scores of pairs", "nested slices"])
def test_gradients_of_keys_that_parts_share(case, engine):
    """Keys after the last one have no weight, although their scores of 0 are the largest; gradients of shared keys are sums."""
    mask = block_mask(lambda b, h, i, j: (i < 100) | ((j >= 50) & (j < 100)), 256, 300)
    arrays = arrays_of(engine, 256, 300, 1, 1, "f2")
    if case != "nested slices":
        function = (lambda b, h, i, j: (i + j) % 3 > 0) if "pairs" in case else None
        mask = BlockMask.from_blocks(np.array([[True, False], [False, True], [True, True]]), 256, 300, mask_mod=function)
        arrays[0], arrays[1] = arrays[0] / 4 + np.float16(8), arrays[1] / 4 - np.float16(8)
    arrays = [engine.xp.asarray(x.astype(engine.dtype), order="F") for x in arrays]
    check_dense(engine, both_passes(arrays, block_mask=mask), arrays, mask)


def test_the_function_of_a_mask_may_change(engine):
    """The backward pass uses the mask function as it was when the mask was created."""
    state = {"step": 2}

    def mask_mod(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= 200) & ((q_idx - kv_idx) % state["step"] == 0)

    mask = block_mask(mask_mod, 1024, 1024)
    q, k, v, dout = arrays_of(engine, 1024, 1024, 1, 1)
    _, pullback = attention_vjp(q, k, v, block_mask=mask)
    before = engine.get(pullback(dout))
    assert "packed" not in str(explain(q, k, v, block_mask=mask, backward=True).problem), "the function is not used"
    state["step"] = 3
    for again in (pullback, attention_vjp(q, k, v, block_mask=mask)[1]):
        for x, y in zip(before, engine.get(again(dout)), strict=True):
            np.testing.assert_array_equal(x, y)


# Refused calls


def test_nothing_is_written_by_a_refused_call(engine):
    """Wrong options, masks of other sizes, and a result in the memory of an input raise before anything is written."""
    q, k, v, dout = arrays_of(engine)
    mask, before, out = MASKS["full"](), engine.get(q).copy(), engine.nan(16, 2, 300, 1)
    wrong = [
        ({"block_mask": mask, "num_splits": 2, "out": out}, ValueError, "num_splits is 2"),
        ({"block_mask": np.ones(3), "out": out}, TypeError, "must be a cupy_sdpa"),
        ({"block_mask": BlockMask.from_blocks(np.ones((2, 2), bool)), "out": out}, ValueError, "is for 256 queries"),
        (
            {"block_mask": BlockMask.from_blocks(np.ones((3, 3, 1, 3), bool), 300, 300), "out": out},
            ValueError,
            "3 batch items",
        ),
        ({"block_mask": mask, "out": q}, ValueError, "out overlaps"),
    ]
    for number in range(5):  # also for a repeated call
        attention(q, k, v, block_mask=mask, out=dout)
        for options, error, words in wrong if number % 4 == 0 else ():
            with pytest.raises(error, match=words):
                attention(q, k, v, **options)
            with pytest.raises(error, match=words.replace("out overlaps", "out")):
                attention_jvp(q, k, v, q, **options)
    assert np.isnan(engine.get(out)).all()
    np.testing.assert_array_equal(engine.get(q), before)


# Arrays, plans and streams


def test_tensors_of_any_strides(engine):
    """Reversed axes; on numpy also a field of records, whose strides are no multiples of an element."""
    q, k, v, dout = arrays_of(engine)
    values = np.random.default_rng(4).standard_normal((2, 1, 300)).astype(np.float32)
    records = np.zeros(values.shape, [("x", "i2"), ("values", "f4")])
    records["values"] = values
    options = {"block_mask": MASKS["packed"](), "score_mod": lambda score, b, h, i, j, w: score + w[h, b, j]}

    def results(w):
        given = options | {"tensors": {"w": w}}
        out, stats = attention(q, k, v, return_stats=True, **given)
        derivatives = attention_jvp(q, k, v, q, **given)
        return [*map(engine.get, (out, stats, *attention_backward(dout, q, k, v, out, stats, **given), *derivatives))]

    want = results(engine.put(values))
    others = [engine.put(values[::-1].copy())[::-1], engine.put(values[:, :, ::-1].copy())[:, :, ::-1]]
    for w in (*others, *([] if engine.on_cudnn else [records["values"]])):
        for _ in range(2):
            for x, y in zip(results(w), want, strict=True):
                np.testing.assert_allclose(x, y, atol=engine.tolerance, rtol=engine.tolerance)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("number", [pytest.param(n, marks=[pytest.mark.slow] * (n > 2)) for n in range(6)])
@pytest.mark.parametrize("name", MASKS)
def test_explain_plans_what_the_call_runs(name, number, fake):
    """A report has exactly the call's plans; with sinks or a score function of arrays."""
    from engines import Engine

    engine, flag = Engine("fake", fake), ("return_stats", "backward", "jvp")[number // 2]
    q, k, v, dout = arrays_of(engine)
    options = {"sinks": engine.normal(5, 2, dtype="f4")}
    if number % 2:
        rows = engine.normal(6, 2, 300, dtype="f4")
        options = {"score_mod": lambda s, b, h, i, j, rows: s + rows[h, i] * (j - i) / 300, "tensors": {"rows": rows}}
    out, stats = attention(q, k, v, block_mask=MASKS[name](), return_stats=True, **options)
    called = {
        "return_stats": lambda mask: attention(q, k, v, block_mask=mask, return_stats=True, **options),
        "backward": lambda mask: attention_backward(dout, q, k, v, out, stats, block_mask=mask, **options),
        "jvp": lambda mask: attention_jvp(q, k, v, q, k, v, block_mask=mask, **options),
    }[flag]
    cache = get_plan_cache()

    def planned(*steps):
        cache.clear()
        for step in steps:
            step(MASKS[name]())
        return sorted(line.split(": engine")[0] for line in str(cache).splitlines()[1:] if "refused" not in line)

    def explained(mask):
        assert explain(q, k, v, block_mask=mask, **{flag: True}, **options)

    assert [] != planned(explained) == planned(explained, called) == planned(called)


@on_cudnn
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_used_on_two_streams(name, engine):
    """The second stream reads the tables of the mask that the first one has uploaded; nothing else waits for it."""
    mask, arrays = MASKS[name](), arrays_of(engine)
    engine.xp.cuda.Device().synchronize()
    first, second = (engine.xp.cuda.Stream(non_blocking=True) for _ in range(2))
    with first:
        kept = attention_vjp(*arrays[:3], block_mask=mask)
    with second:
        out = attention(*arrays[:3], block_mask=mask)
        results = [out, *attention_vjp(*arrays[:3], block_mask=mask)[1](arrays[3])]
    second.synchronize()
    check_dense(engine, results, arrays, mask)
    first.synchronize()
    del kept


@on_cudnn
def test_the_tables_are_not_created_in_a_capture(engine):
    """The first call with a mask copies its tables to the GPU, so it raises while the stream is captured."""
    x, mask = engine.normal(0, 16, 1, 300, 1), MASKS["full"]()
    with engine.xp.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        try:
            with pytest.raises(RuntimeError, match="the stream is being captured"):
                attention(x, x, x, block_mask=mask)
        finally:
            stream.end_capture()


@on_cudnn
@pytest.mark.parametrize("name", ["packed", "slices", "partial"])
def test_deterministic_gradients_after_others(name, engine):
    """A repeated call with deterministic=True does not run what was cached without it."""
    mask, (q, k, v, dout) = MASKS[name](), arrays_of(engine)
    get_plan_cache().clear()
    out, stats = attention(q, k, v, return_stats=True, block_mask=mask)
    for deterministic in (False, False, True):
        attention_backward(dout, q, k, v, out, stats, block_mask=mask, deterministic=deterministic)
        assert ("deterministic backward" in str(get_plan_cache())) == deterministic


@on_cudnn
@pytest.mark.parametrize("queries", [1, 300])
def test_deterministic_calls_of_one_query(queries, engine):
    """cuDNN's default kernel for one query adds its parts in varying order, so no part of such a call uses it."""
    mask = block_mask(lambda b, h, i, j: (j >= 100) & (j < 300) & ((i == 0) | (i >= 200)), queries, 1000)
    q, k = (engine.normal(n, 16, 2, n, 2) for n in (queries, 1000))
    get_plan_cache().clear()
    attention(q, k, k, return_stats=True, block_mask=mask, deterministic=True)
    attention_jvp(q, k, k, q, k, k, block_mask=mask, deterministic=True)
    of_one_query = [line for line in str(get_plan_cache()).splitlines() if "forward" in line and " 1 query," in line]
    assert len(of_one_query) >= 2
    assert all("deterministic forward" in line for line in of_one_query)


# Mask functions that are passed without a block mask


def halves(b, h, q_idx, kv_idx):
    """Two documents."""
    return q_idx // 1024 == kv_idx // 1024


#: Options of a call, the percentage of empty blocks among those that it computes, and whether block_mask= is recommended.
EMPTY = {
    "documents": ({"mask_mod": halves}, 50, True),
    "causal documents": ({"mask_mod": lambda b, h, i, j: (i >= j) & (i // 256 == j // 256)}, 82, True),
    "causal, and documents": ({"causal": True, "mask_mod": lambda b, h, i, j: i // 256 == j // 256}, 82, True),
    "a window to the left": ({"window": (512, 0), "mask_mod": lambda b, h, i, j: i // 128 == j // 128}, 77, True),
    "of an array": (
        {"mask_mod": lambda b, h, i, j, x: x[i] == x[j], "tensors": {"x": np.arange(2048, dtype=np.int32) // 128}}, 94, True,
    ),
    "of heads": ({"mask_mod": lambda b, h, i, j: (i // 256 == j // 256) | (h > 0)}, 44, False),
    "with scores": (
        {"mask_mod": halves, "score_mod": lambda s, b, h, i, j, t: s + t[j], "tensors": {"t": np.ones(2048, np.float32)}}, 50, True,
    ),
    "nearly all pairs": ({"mask_mod": lambda b, h, i, j: (i + j) % 7 > 0}, 0, False),
}  # fmt: skip


@pytest.mark.parametrize("name", EMPTY)
def test_explain_counts_the_empty_blocks_of_a_mask_function(name, engine):
    """It names ``block_mask=`` if a large part is empty, and the problem is large."""
    options, percent, worth = EMPTY[name]
    options = {key: engine.put(x) if key == "tensors" else x for key, x in options.items()}
    x = engine.normal(0, 16, 2, 2048, 1)
    text = explain(x, x, x, **options).blocks
    assert f" {percent} % of the blocks" in text
    assert ("block_mask=cupy_sdpa.block_mask(mask_mod, 2048, 2048" in text) == worth
    few, shorter = engine.normal(0, 16, 2, 384, 1), {key: x for key, x in options.items() if key != "tensors"}
    if "tensors" not in options:
        found = explain(few, few, few, **shorter).blocks
        assert "% of the blocks" in found
        assert "block_mask=" not in found


def test_explain_estimates_the_empty_blocks_of_large_problems(engine):
    """From some blocks of all heads and sequences."""
    x = engine.normal(0, 8, 4, 4096, 2)
    text = explain(x, x, x, mask_mod=lambda b, h, i, j: (i // 256 == j // 256) & (b >= 0)).blocks
    percent = int(text.split("about ")[1].split(" %")[0])
    assert 92 <= percent <= 96
    assert "block_mask=" in text


#: Calls whose mask function has no blocks that a block mask would skip.
NOT_COUNTED = {
    "a band": {"mask_mod": lambda b, h, i, j: i >= j}, "no function": {}, "dropout": {"mask_mod": halves, "dropout_p": 0.1, "seed": 1},
    "lengths": {"mask_mod": halves, "seq_lens_kv": np.array([2048], np.int32)},
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_COUNTED)
def test_explain_counts_only_blocks_that_a_block_mask_would_skip(name, fake):
    """cuDNN skips the tiles of bands itself; with other options a block mask is a dense mask."""
    options = {key: fake.asarray(x) if isinstance(x, np.ndarray) else x for key, x in NOT_COUNTED[name].items()}
    x = fake.zeros((16, 2, 2048, 1), np.float16, order="F")
    assert not explain(x, x, x, **options).blocks


def test_explain_counts_the_empty_blocks_with_other_arrays(engine):
    """Of other libraries, in other layouts, and with ``engine``."""
    ids = engine.put({"t": np.arange(2048, dtype=np.int32) // 256})
    x = engine.normal(0, 1, 2048, 2, 16).copy("C")
    others = {"layout": "bshd"} | ({} if engine.name == "numpy" else {"engine": "cupy"})
    report = explain(x, x, x, mask_mod=lambda b, h, i, j, t: t[i] == t[j], tensors=ids, **others)
    assert " 88 % of the blocks" in report.blocks
