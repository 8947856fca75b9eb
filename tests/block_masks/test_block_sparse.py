"""Attention with a block mask, and its gradients, against a dense reference in float64 written here."""

import numpy as np
import pytest

import cupy_sdpa
from cupy_sdpa import BlockMask, attention, attention_backward, attention_jvp, attention_vjp, block_mask
from cupy_sdpa._cudnn.library import library
from cupy_sdpa.sparse import method as methods
from cupy_sdpa.sparse.entries import Sizes
from cupy_sdpa.sparse.method import method_of

NAMES = ("out", "stats", "dq", "dk", "dv")


def dense_attention(q, k, v, dout, attends, scale, added, sinks):
    """The output, the log-sum-exp and the gradients from the whole matrix of scores; all arrays ``(D, H, S, B)``."""
    hq, hkv = q.shape[1], k.shape[1]
    of = np.arange(hq) // (hq // hkv)
    k, v = k[:, of], v[:, of]
    scores = np.where(attends, scale * np.einsum("dhib,dhjb->jihb", q, k) + added, -np.inf)
    top = scores.max(axis=0, initial=-np.inf)
    top = top if sinks is None else np.maximum(top, sinks[:, None])
    base = np.where(np.isneginf(top), 0, top)
    total = np.exp(scores - base).sum(axis=0) + (0 if sinks is None else np.exp(sinks[:, None] - base))
    with np.errstate(divide="ignore"):
        stats = base + np.log(total)
    weights = np.where(attends, np.exp(scores - np.where(np.isneginf(stats), 0, stats)), 0)
    out = np.einsum("jihb,dhjb->dhib", weights, v)
    dscores = scale * weights * (np.einsum("dhib,dhjb->jihb", dout, v) - np.einsum("dhib,dhib->ihb", dout, out))
    dq = np.einsum("jihb,dhjb->dhib", dscores, k)
    dk, dv = (np.einsum("jihb,dhib->dhjb", x, y) for x, y in ((dscores, q), (weights, dout)))
    dk, dv = (np.stack([x[:, of == h].sum(axis=1) for h in range(hkv)], axis=1) for x in (dk, dv))
    return out, stats, dq, dk, dv


class Draw:
    """A random call: sizes from 1 to a few blocks, a mask of any kind, and the options."""

    def __init__(self, seed, dtype="float64", dims=(1, 8)):
        rng = self.rng = np.random.default_rng(seed)
        pick = lambda *choices: choices[int(rng.integers(len(choices)))]  # noqa: E731
        self.hkv, self.batch = pick(1, 2), pick(1, 2)
        self.hq = self.hkv * pick(1, 2)
        self.sq = pick(1, 2, 100, 128, 129, 256, 300, 384, 640)
        self.skv = pick(1, 2, 5, 128, 200, 256, 384, 513, self.sq, self.sq)
        shapes = [(pick(*dims), self.hq, self.sq), (pick(*dims), self.hkv, self.skv)]
        d, dv = shapes[0][0], shapes[1][0]
        shapes = [(d, self.hq, self.sq), (d, self.hkv, self.skv), (dv, self.hkv, self.skv), (dv, self.hq, self.sq)]
        self.arrays = [np.asfortranarray(rng.standard_normal((*shape, self.batch)).astype(dtype)) for shape in shapes]
        self.scale = pick(None, 0.3)
        self.sinks = pick(None, None, rng.standard_normal(self.hq).astype("f4"))
        self.heads, self.entries = pick(1, 1, self.hq), pick(1, 1, self.batch)
        self.mask = self.draw_mask(pick)
        self.attends = self.mask.to_dense()

    def draw_mask(self, pick):
        """A mask of random blocks, of random pairs in random blocks, of documents, of a prefix, of a band, or without any key."""
        rng, sq, skv = self.rng, self.sq, self.skv
        blocks = (-(-skv // 128), -(-sq // 128), self.heads, self.entries)
        kind = pick("blocks", "pairs", "pairs", "documents", "causal documents", "prefix", "band", "dilated", "none")
        if kind in ("blocks", "none"):
            return BlockMask.from_blocks(rng.random(blocks) < (0 if kind == "none" else pick(0.3, 0.7)), sq, skv)
        if kind == "pairs":
            pairs = rng.random((skv, sq, *blocks[2:])) < 0.5
            kinds = np.repeat(np.repeat(rng.integers(0, 3, blocks), 128, 0), 128, 1)[:skv, :sq]
            pairs = np.where(kinds == 0, False, np.where(kinds == 1, True, pairs))
            per_head, per_entry = self.heads > 1, self.entries > 1

            def mask_mod(b, h, q_idx, kv_idx, pairs):
                return pairs[kv_idx, q_idx, h if per_head else 0, b if per_entry else 0]

            groups = {"heads": self.heads if per_head else None, "batch": self.entries if per_entry else None}
            return block_mask(mask_mod, sq, skv, tensors={"pairs": pairs}, **groups)
        document = np.sort(rng.integers(0, 4, max(sq, skv)))
        n, ends = int(rng.integers(0, 200)), int(rng.integers(0, skv + 1))
        functions = {
            "documents": lambda b, h, i, j, document: document[i] == document[j],
            "causal documents": lambda b, h, i, j, document: (document[i] == document[j]) & (i >= j) & (i - j <= n),
            "prefix": lambda b, h, i, j, document: (i >= j) | (j < ends),
            "band": lambda b, h, i, j, document: (i >= j) & (i - j <= n),
            "dilated": lambda b, h, i, j, document: ((i - j) % 3 == 0) & (i >= j),
        }
        return block_mask(functions[kind], sq, skv, tensors={"document": document})

    def scores(self, xp):
        """A score function that reads arrays at heads, queries, keys and both; its options, and what it adds."""
        rng = self.rng
        slope, rows, columns = (rng.standard_normal(n) for n in (self.hq, (self.batch, self.sq), (self.skv, self.hq)))
        pairs = np.asfortranarray(rng.standard_normal((self.sq, self.skv)))
        tensors = {"slope": slope, "rows": rows, "columns": columns, "pairs": pairs}
        tensors = {name: np.asfortranarray(x.astype("f4")) for name, x in tensors.items()}

        def score_mod(score, b, h, q_idx, kv_idx, slope, rows, columns, pairs):
            moved = 0.01 * slope[h] * (q_idx - kv_idx) + rows[b, q_idx] + columns[kv_idx, h]
            return score + moved + pairs[q_idx, kv_idx] + columns[kv_idx, -1]

        i, j = np.arange(self.sq)[:, None, None], np.arange(self.skv)[:, None, None, None]
        wide = {name: x.astype("f8") for name, x in tensors.items()}
        added = 0.01 * wide["slope"][:, None] * (i - j) + wide["rows"].T[:, None]
        added = added + (wide["columns"] + wide["columns"][:, -1:])[:, None, :, None] + wide["pairs"].T[:, :, None, None]
        return {"score_mod": score_mod, "tensors": {name: xp.asarray(x, order="F") for name, x in tensors.items()}}, added


def check(draw, xp, tolerance, *, with_scores, deterministic=True, repeats=1):
    """Compare all results, in new arrays and in arrays full of NaN."""
    options, added = draw.scores(xp) if with_scores else ({}, 0.0)
    options |= {"scale": draw.scale, "block_mask": draw.mask}
    options |= {} if draw.sinks is None else {"sinks": xp.asarray(draw.sinks)}
    scale = draw.scale or draw.arrays[0].shape[0] ** -0.5
    wide = [x.astype(np.float64) for x in draw.arrays]
    expected = dense_attention(*wide, draw.attends, scale, added, draw.sinks)
    q, k, v, dout = (xp.asarray(x) for x in draw.arrays)
    for number in range(repeats):
        out = xp.asarray(np.full(expected[0].shape, np.nan, draw.arrays[0].dtype, order="F"))
        results = {
            f"d{n}": xp.asarray(np.full(x.shape, np.nan, x.dtype, order="F")) for n, x in zip("qkv", draw.arrays, strict=False)
        }
        if number % 2:
            got = attention(q, k, v, return_stats=True, **options)
            got += attention_backward(dout, q, k, v, *got, **options)
        else:
            got = attention(q, k, v, return_stats=True, out=out, **options)
            assert got[0] is out
            exact = number % 4 == 0 and deterministic
            got += attention_backward(dout, q, k, v, *got, **results, deterministic=exact, **options)
        assert all(a is b for a, b in zip(got[2:], results.values(), strict=True)) == (number % 2 == 0)
        for name, x, y in zip(NAMES, got, expected, strict=True):
            x = x.get() if hasattr(x, "get") else x
            np.testing.assert_array_equal(np.isneginf(x), np.isneginf(y), err_msg=name)
            finite = np.isfinite(y)
            limit = tolerance * max(1.0, abs(y[finite]).max(initial=0))
            assert abs(x.astype("f8")[finite] - y[finite]).max(initial=0) <= limit, (name, draw.mask)


@pytest.mark.parametrize("seed", range(60))
def test_on_numpy(seed):
    """On the CPU engine, with every kind of mask; every second call with a score function of positions and arrays."""
    check(Draw(seed), np, 1e-5, with_scores=seed % 2 == 1)


def test_the_comparison_finds_a_wrong_mask():
    """A mask with one pair more than the reference is found."""
    draw = Draw(3)
    draw.mask = BlockMask.from_blocks(np.ones((1, 1), bool), 2, 2)
    draw.sq, draw.skv, draw.attends = 2, 2, np.tri(2, dtype=bool).T[:, :, None, None]
    draw.arrays = [np.asfortranarray(x[:, :, :1].repeat(2, axis=2) * [[1.0], [2.0]]) for x in draw.arrays]
    with pytest.raises(AssertionError):
        check(draw, np, 1e-5, with_scores=False)


def test_every_method_is_drawn():
    """The random masks are computed as packed sequences, as slices, and as blocks with and without copies."""
    found = set()
    for seed in range(60):
        draw = Draw(seed)
        method = method_of(draw.mask, Sizes(draw.hq, draw.hkv, draw.batch))
        found.add(method.name)
        if method.blocks:
            found |= {"direct"} if method.blocks.direct else set()
            found |= {"copied"} if method.blocks.copied else set()
    assert found == {"packed", "slices", "blocks", "direct", "copied"}


@pytest.mark.parametrize("seed", range(24))
def test_on_the_fake_cupy(seed, fake):
    """With staging and kernels, repeated until the calls are captured."""
    draw = Draw(100 + seed, "float16", (16, 32))
    check(draw, fake, 2e-2, with_scores=seed % 3 == 2, repeats=6)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(60))
def test_on_the_gpu(seed, cupy):
    """With cuDNN, repeated until the calls are captured; without deterministic gradients with a score function of arrays, which
    cuDNN 9.19 refuses.
    """
    draw = Draw(100 + seed, "float16", (64, 128))
    with_scores = seed % 3 == 2
    check(draw, cupy, 2e-2, with_scores=with_scores, deterministic=not with_scores, repeats=6)


@pytest.mark.parametrize("shape", [(1, 2), (1, 300), (300, 200)], ids=str)
@pytest.mark.parametrize("groups", [(1, 1), (2, 1), (2, 2)], ids=str)
def test_a_mask_of_all_pairs_is_a_call_without_a_mask(shape, groups, fake):
    """With a score function at its own positions."""
    draw = Draw(0, "float16", (16, 32))
    draw.hq, draw.hkv, draw.batch, (draw.sq, draw.skv) = groups[0], 1, groups[1], shape
    rng = np.random.default_rng(0)
    sizes = (draw.hq, draw.sq), (1, draw.skv), (1, draw.skv), (draw.hq, draw.sq)
    draw.arrays = [np.asfortranarray(rng.standard_normal((16, *size, draw.batch)).astype("f2")) for size in sizes]
    draw.mask = BlockMask.from_blocks(np.ones((-(-shape[1] // 128), -(-shape[0] // 128), *groups), bool), *shape)
    draw.attends, draw.sinks = draw.mask.to_dense(), None
    method = method_of(draw.mask, Sizes(draw.hq, 1, draw.batch))
    assert [part[:4] for part in method.slices] == [(0, shape[0], 0, shape[1])]
    before = len(library().executions)
    check(draw, fake, 2e-2, with_scores=True)
    assert len(library().executions) == before + 2


@pytest.mark.parametrize("method", ["packed", "slices", "blocks"])
def test_gradients_are_those_of_central_differences(method):
    """The derivative of a weighted sum of the output in a random direction, in float64."""
    rng = np.random.default_rng(0)
    table = rng.random((3, 3)) < 0.6
    functions = {
        "packed": lambda b, h, i, j, table: i // 100 == j // 100,
        "slices": lambda b, h, i, j, table: (i >= j) | (j < 70),
        "blocks": lambda b, h, i, j, table: table[i // 128, j // 128] & ((i + j) % 3 > 0),
    }
    mask = block_mask(functions[method], 300, 300, tensors={"table": table})
    assert method_of(mask, Sizes(2, 1, 1)).name == method
    q, k, v, dout = (np.asfortranarray(rng.standard_normal((8, h, 300, 1))) for h in (2, 1, 1, 2))
    moves = [np.asfortranarray(rng.standard_normal(x.shape)) for x in (q, k, v)]
    _, pullback = attention_vjp(q, k, v, block_mask=mask)
    expected = sum((x * y).sum() for x, y in zip(pullback(dout), moves, strict=True))
    ends = [
        (attention(*(x + e * y for x, y in zip((q, k, v), moves, strict=True)), block_mask=mask) * dout).sum()
        for e in (1e-4, -1e-4)
    ]
    assert abs((ends[0] - ends[1]) / 2e-4 - expected) < 1e-4 * abs(expected)


@pytest.mark.parametrize("kind", ["shared", "per head", "function", "prefix"])
def test_blocks_that_are_not_listed_are_not_read(kind, fake):
    """NaN in keys of a block to which no query attends, and in queries without keys, does not spread."""
    rng = np.random.default_rng(0)
    blocks = rng.random((4, 3, 2 if kind == "per head" else 1, 1)) < 0.6
    blocks[2], blocks[:, 1] = False, False
    blocks[0, 0], blocks[1, 2] = True, True
    mask = BlockMask.from_blocks(blocks)
    if kind == "function":
        mask = block_mask(lambda b, h, i, j: ((i + j) % 2 == 0) & (j // 128 != 2) & (i // 128 != 1), 384, 512)
    if kind == "prefix":
        mask = block_mask(lambda b, h, i, j: ((j < 100) | (i + 128 >= j)) & (j < 256) & (i // 128 != 1), 384, 512)
    for xp, dtype in ((np, "float32"), (fake, "float16")):
        q, k, v, dout = (np.asfortranarray(rng.standard_normal((16, 2, n, 1)).astype(dtype)) for n in (384, 512, 512, 384))
        clean = [x.copy(order="F") for x in (q, k, v, dout)]
        for x in (k, v):
            x[:, :, 256:384] = np.nan
        for x in (q, dout):
            x[:, :, 128:256] = np.nan
        got, expected = [], []
        for arrays, results in (((q, k, v, dout), got), (clean, expected)):
            out, pullback = attention_vjp(*(xp.asarray(x) for x in arrays[:3]), block_mask=mask)
            results += [out, *pullback(xp.asarray(arrays[3]))]
        for x, y in zip(got, expected, strict=True):
            x, y = (a.get() if hasattr(a, "get") else a for a in (x, y))
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"block_mask": np.ones((3, 3))}, TypeError, "BlockMask"),
        ({"causal": True}, ValueError, "causal and block_mask"),
        ({"mask_mod": lambda b, h, i, j: i > j}, ValueError, "mask_mod and block_mask"),
        ({"dropout_p": 0.1, "seed": 1}, ValueError, "dropout_p and block_mask"),
        ({"return_stats": "max_sumexp"}, ValueError, "max_sumexp"),
        ({"score_mod": lambda s, b, h, i, j: np.where(i > j, s, -np.inf)}, ValueError, "score_mod masks keys"),
        ({"tensors": {"x": np.ones(2)}}, ValueError, "tensors has x"),
        ({"out": np.ones((8, 1, 5, 1))}, ValueError, "out has shape"),
        ({"out": np.ones((8, 1, 300, 1), "f4", order="F")}, TypeError, "out is float32"),
    ],
)
def test_wrong_arguments_are_refused(change, error, message):
    """The message names the argument."""
    x = np.ones((8, 1, 300, 1), order="F")
    with pytest.raises(error, match=message):
        attention(x, x, x, **{"block_mask": BlockMask.from_blocks(np.ones((3, 3), bool), 300, 300), **change})


def test_a_mask_of_other_sizes_is_refused():
    """Both sizes are named."""
    x = np.ones((8, 2, 300, 1), order="F")
    with pytest.raises(ValueError, match="256 queries and 300 keys; q has 300"):
        attention(x, x, x, block_mask=BlockMask.from_blocks(np.ones((3, 2), bool), 256, 300))
    for groups in ((4, 1), (1, 3), (2, 3)):
        with pytest.raises(ValueError, match=f"{groups[0]} heads and {groups[1]} batch entries; q has 2 and 1"):
            attention(x, x, x, block_mask=BlockMask.from_blocks(np.ones((3, 3, *groups), bool), 300, 300))


def test_results_must_not_overlap_inputs():
    """out in the memory of q is refused, and nothing is written."""
    x = np.ones((8, 1, 300, 1), order="F")
    with pytest.raises(ValueError, match="out overlaps q"):
        attention(
            x, x.copy(order="F"), x.copy(order="F"), out=x, block_mask=BlockMask.from_blocks(np.ones((3, 3), bool), 300, 300)
        )
    assert (x == 1).all()


@pytest.mark.parametrize("name", ["explain", "prepare"])
def test_other_calls_refuse_the_option(name):
    """prepare takes no block mask."""
    x = np.ones((8, 1, 128, 1), order="F")
    mask = BlockMask.from_blocks(np.ones((1, 1), bool))
    if name == "prepare":
        with pytest.raises(TypeError, match="block_mask"):
            cupy_sdpa.prepare(x, x, x, block_mask=mask)
    else:
        assert cupy_sdpa.explain(x, x, x, block_mask=mask)


def halves(b, h, q_idx, kv_idx):
    """Two documents."""
    return q_idx // 1024 == kv_idx // 1024


@pytest.mark.parametrize(
    ("name", "mask_mod", "used"),
    [
        ("documents", halves, True),
        ("causal documents", lambda b, h, i, j: (i >= j) & (i // 256 == j // 256), True),
        ("causal", lambda b, h, i, j: i >= j, False),
        ("of heads", lambda b, h, i, j: i // 256 == j // 256 + h, False),
        ("nearly all pairs", lambda b, h, i, j: (i + j) % 7 > 0, False),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_plain_mask_functions_use_blocks_where_it_pays(name, mask_mod, used, fake, monkeypatch):
    """The result is the same, and the report names the reason; small problems and functions with arrays use all blocks."""
    from cupy_sdpa.sparse import automatic

    monkeypatch.setattr(automatic, "_decisions", type(automatic._decisions)())
    shape = (16, 1, 2048, 1)
    decision = automatic.decide(shape, shape, {"mask_mod": mask_mod})
    assert (decision.mask is not None) == used, decision.reason
    assert automatic.decide(shape, shape, {"mask_mod": mask_mod}) is decision
    assert automatic.decide((16, 1, 512, 1), shape, {"mask_mod": mask_mod}).mask is None
    for options in ({"tensors": {"x": np.ones(1)}}, {"causal": True}, {"bias": np.ones(1)}, {"dropout_p": 0.1}):
        assert automatic.decide(shape, shape, {"mask_mod": mask_mod, **options}).mask is None
    x = np.empty(shape, np.float16, order="F")
    report = cupy_sdpa.explain(x, x, x, mask_mod=mask_mod, gpu="h200", cudnn="9.19")
    assert ("block mask: used" if used else "block mask: not used") in str(report)


def test_a_plain_mask_function_is_computed_by_blocks(fake, monkeypatch):
    """attention and its gradients with mask_mod are those with the block mask of the function."""
    from cupy_sdpa.sparse import automatic

    monkeypatch.setattr(automatic, "_decisions", type(automatic._decisions)())
    rng = np.random.default_rng(0)
    arrays = [fake.asarray(np.asfortranarray(rng.standard_normal((16, 1, 2048, 1)).astype("f2"))) for _ in range(4)]
    mask = BlockMask.from_blocks(np.kron(np.eye(2, dtype=bool), np.ones((8, 8), bool)))
    results = []
    for options in ({"mask_mod": halves}, {"block_mask": mask}):
        out, pullback = attention_vjp(*arrays[:3], **options)
        results.append([x.get() for x in (out, *pullback(arrays[3]))])
    assert len(automatic._decisions) == 1
    for x, y in zip(*results, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("join", [lambda x, b: (x + b) > 1, lambda x, b: np.add(x, b) == 2])
def test_blocks_of_a_sum_of_conditions(join, fake, monkeypatch):
    """A function that counts conditions has the blocks and the result of the one that joins them by &."""
    from cupy_sdpa.sparse import automatic

    monkeypatch.setattr(automatic, "_decisions", type(automatic._decisions)())
    x = fake.asarray(np.asfortranarray(np.random.default_rng(0).standard_normal((16, 1, 2048, 1)).astype("f2")))
    counted = {"mask_mod": lambda b, h, i, j: join(i // 128 == j // 128, i >= j)}
    joined = {"mask_mod": lambda b, h, i, j: (i // 128 == j // 128) & (i >= j)}
    assert automatic.automatic_mask(x, x, counted).blocks == 16
    np.testing.assert_array_equal(attention(x, x, x, **counted).get(), attention(x, x, x, **joined).get())


def test_blocks_are_not_used_with_a_score_function_that_masks(fake):
    """A valid call with both functions is computed, and its results are those of a single mask function."""
    from cupy_sdpa.sparse import automatic

    x = fake.asarray(np.asfortranarray(np.random.default_rng(0).standard_normal((16, 1, 2048, 1)).astype("f2")))
    masks = {"score_mod": lambda s, b, h, i, j: s + np.where(i >= j, 0, -np.inf), "mask_mod": halves}
    assert automatic.automatic_mask(x, x, {"mask_mod": halves, "score_mod": lambda s, *_: 2 * s}) is not None
    for _ in range(2):
        assert automatic.automatic_mask(x, x, masks) is None
    want = attention(x, x, x, mask_mod=halves, causal=True)
    np.testing.assert_array_equal(attention(x, x, x, **masks).get(), want.get())


def check_captured(xp, method):
    """Both passes in a CUDA graph of the caller, launched twice on changed inputs, against eager calls."""
    rng = np.random.default_rng(0)
    table = rng.random((3, 3)) < 0.6
    table[0] = [True, False, True]
    functions = {
        "packed": lambda b, h, i, j, table: i // 100 == j // 100,
        "slices": lambda b, h, i, j, table: (i >= j) | (j < 70),
        "blocks": lambda b, h, i, j, table: table[i // 128, j // 128] & ((i + j) % 3 > 0),
    }
    mask = block_mask(functions[method], 300, 300, tensors={"table": table})
    q, k, v, dout = (xp.asarray(np.asfortranarray(rng.standard_normal((32, h, 300, 1)).astype("f2"))) for h in (2, 1, 1, 2))

    def call():
        out, stats = attention(q, k, v, block_mask=mask, return_stats=True)
        return [out, stats, *attention_backward(dout, q, k, v, out, stats, block_mask=mask)]

    call()
    xp.cuda.Device().synchronize()
    with xp.cuda.Stream(non_blocking=True) as stream:
        call()
        stream.begin_capture()
        results = call()
        graph = stream.end_capture()
        for _ in range(2):
            for x in (q, k, v, dout):
                x *= 0.5
            for x in results:
                x[...] = np.nan
            graph.launch(stream)
            captured = [x.get() for x in results]
            for one, other in zip(captured, call(), strict=True):
                np.testing.assert_allclose(one, other.get(), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("method", ["packed", "slices", "blocks"])
def test_captured_on_the_fake_cupy(method, fake):
    """A graph owns the memory of the parts, and can be launched again."""
    check_captured(fake, method)
    assert library().forget_plans() > 0, "the plans of the graph are kept"


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["packed", "slices", "blocks"])
def test_captured_on_the_gpu(method, cupy):
    """With cuDNN."""
    check_captured(cupy, method)


def test_the_tables_are_not_created_in_a_capture(fake):
    """The first call with a mask copies its tables to the GPU, so it is refused while the stream is captured."""
    x = fake.asarray(np.ones((16, 1, 256, 1), np.float16, order="F"))
    mask = BlockMask.from_blocks(np.array([[True, False], [True, True]]).T)
    with fake.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        try:
            with pytest.raises(RuntimeError, match="the stream is being captured"):
                attention(x, x, x, block_mask=mask)
        finally:
            stream.end_capture()


def test_a_function_that_changes_does_not_change_its_mask():
    """The backward pass may use the mask function, but not after a value that it refers to has changed."""
    state = {"step": 2}

    def mask_mod(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= 200) & ((q_idx - kv_idx) % state["step"] == 0)

    mask = block_mask(mask_mod, 1024, 1024)
    assert methods.gradient_function(mask, Sizes(1, 1, 1)) is mask_mod
    rng = np.random.default_rng(0)
    q, k, v, dout = (np.asfortranarray(rng.standard_normal((8, 1, 1024, 1))) for _ in range(4))
    _, pullback = attention_vjp(q, k, v, block_mask=mask)
    before = pullback(dout)
    state["step"] = 3
    assert methods.gradient_function(mask, Sizes(1, 1, 1)) is None
    for x, y in zip(before, pullback(dout), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


def test_other_gradients_are_refused_before_the_forward_pass():
    """attention_vjp refuses gradients that a block mask does not have when it is called, not when the pullback is."""
    q = np.ones((8, 2, 256, 1), np.float32, order="F")
    mask = BlockMask.from_blocks(np.eye(2, dtype=bool))
    with pytest.raises(ValueError, match="return_dsinks is True and block_mask is passed"):
        attention_vjp(q, q, q, block_mask=mask, sinks=np.zeros(2, np.float32), return_dsinks=True)


@pytest.mark.parametrize("queries", [1, 300])
def test_deterministic_calls_of_one_query(queries, fake):
    """cuDNN's default kernel for one query adds its parts in varying order, so no part of such a call uses it."""
    mask = block_mask(lambda b, h, i, j: (j >= 100) & (j < 300) & ((i == 0) | (i >= 200)), queries, 1000)
    assert method_of(mask, Sizes(2, 2, 2)).slices[0].q1 == 1
    q, k = (fake.asarray(np.ones((16, 2, n, 2), np.float16, order="F")) for n in (queries, 1000))
    attention(q, k, k, return_stats=True, block_mask=mask, deterministic=True)
    attention_jvp(q, k, k, q, k, k, block_mask=mask, deterministic=True)
    of_one_query = [line for line in str(cupy_sdpa.get_plan_cache()).splitlines() if "forward" in line and " 1 queries" in line]
    assert len(of_one_query) >= 2
    assert all("deterministic forward" in line for line in of_one_query)
    with pytest.raises(TypeError, match="deterministic is 'yes'"):
        attention(q, k, k, block_mask=mask, deterministic="yes")


def sizes_of_0(name):
    """A mask, the head counts and the batch of a call that computes nothing."""
    every = BlockMask.from_blocks(np.ones((3, 2), bool), 200, 300)
    pairs = block_mask(lambda b, h, i, j: (i + j) % 2 == 0, 200, 300)
    none = BlockMask.from_blocks(np.zeros((3, 2, 2, 1), bool), 200, 300)
    no_query, no_key = (block_mask(lambda b, h, i, j: i >= j, *lengths) for lengths in ((0, 300), (200, 0)))
    found = {"batch": (every, 2, 0), "batch of pairs": (pairs, 2, 0), "heads": (pairs, 0, 2), "blocks": (none, 2, 2)}
    return (found | {"queries": (no_query, 2, 2), "keys": (no_key, 2, 2)})[name]


@pytest.mark.parametrize("name", ["batch", "batch of pairs", "heads", "blocks", "queries", "keys"])
def test_sizes_of_0(name, fake):
    """Outputs and gradients are 0, with arrays of a score function; derivatives and reports exist, too."""
    mask, heads, batch = sizes_of_0(name)
    for xp, dtype in ((np, "float64"), (fake, "float16")):
        shapes = [(16, heads, n, batch) for n in (mask.sq, mask.skv, mask.skv)]
        q, k, v = (xp.asarray(np.ones(shape, dtype, order="F"), order="F") for shape in shapes)
        rows = xp.asarray(np.ones((batch, heads, mask.sq), "f4"))
        options = {"block_mask": mask, "score_mod": lambda s, b, h, i, j, rows: s + rows[b, h, i], "tensors": {"rows": rows}}
        out, pullback = attention_vjp(q, k, v, **options)
        results = [out, *pullback(out), *attention_jvp(q, k, v, q, k, v, **options)]
        shapes = [q.shape, q.shape, k.shape, v.shape, q.shape, q.shape]
        assert [x.shape for x in results] == shapes
        assert not any(x.get().any() if hasattr(x, "get") else x.any() for x in results)
        for flags in ({}, {"return_stats": True}, {"backward": True}, {"jvp": True}):
            report = cupy_sdpa.explain(q, k, v, **flags, **options)
            assert report
            assert "runs without a kernel" in str(report)


def test_slices_whose_keys_are_within_those_of_others():
    """The gradients of keys that several slices share are sums, and those of other keys are kept."""
    mask = block_mask(lambda b, h, i, j: (i < 100) | ((j >= 50) & (j < 100)), 200, 500)
    assert method_of(mask, Sizes(1, 1, 1)).name == "slices"
    rng = np.random.default_rng(0)
    q, k, v, dout = (np.asfortranarray(rng.standard_normal((8, 1, n, 1))) for n in (200, 500, 500, 200))
    out, pullback = attention_vjp(q, k, v, block_mask=mask)
    expected = dense_attention(q, k, v, dout, mask.to_dense(), 8**-0.5, 0.0, None)
    for x, y in zip((out, *pullback(dout)), (expected[0], *expected[2:]), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)


@pytest.mark.parametrize("method", ["packed", "slices", "blocks"])
def test_deterministic_gradients_after_others(method, fake):
    """A repeated call with deterministic=True does not run what was cached without it."""
    functions = {
        "packed": lambda b, h, i, j: i // 100 == j // 100,
        "slices": lambda b, h, i, j: (i >= j) | (j < 70),
        "blocks": lambda b, h, i, j: (i + j) % 3 > 0,
    }
    mask = block_mask(functions[method], 300, 300)
    assert method_of(mask, Sizes(2, 2, 1)).name == method
    x = fake.asarray(np.ones((16, 2, 300, 1), np.float16, order="F"))
    out, stats = attention(x, x, x, return_stats=True, block_mask=mask)
    for deterministic in (False, False, True):
        attention_backward(x, x, x, x, out, stats, block_mask=mask, deterministic=deterministic)
        assert ("deterministic backward" in str(cupy_sdpa.get_plan_cache())) == deterministic


REFUSED = {
    "row statistics": ("forward", {"return_stats": "max_sumexp"}),
    "a flag": ("forward", {"deterministic": "yes"}),
    "another mask": ("backward", {"causal": True}),
    "the shape of out": ("forward", {"out": np.ones((8, 1, 5, 1), order="F")}),
    "other gradients": ("backward", {"return_dsinks": True, "sinks": np.ones(1, np.float32)}),
    "the shape of dq": ("backward", {"dq": np.ones((8, 1, 5, 1), order="F")}),
    "a flag of a derivative": ("jvp", {"return_stats": "max_sumexp"}),
    "the shape of a tangent": ("jvp", {"dq": np.ones((8, 1, 5, 1), order="F")}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_explain_refuses_what_the_call_refuses(name):
    """With the same error."""
    kind, options = REFUSED[name]
    options = {"block_mask": BlockMask.from_blocks(np.ones((3, 3), bool), 300, 300), **options}
    x, stats = np.ones((8, 1, 300, 1), order="F"), np.ones((300, 1, 1), np.float32, order="F")
    if kind == "jvp":
        options = {"dq": x, "dk": x, **options}
    calls = {
        "forward": lambda: attention(x, x, x, **options),
        "backward": lambda: attention_backward(x, x, x, x, x, stats, **options),
        "jvp": lambda: attention_jvp(x, x, x, **options),
    }
    with pytest.raises((TypeError, ValueError)) as wanted:
        calls[kind]()
    flags = {} if kind == "forward" else {kind: True}
    with pytest.raises(wanted.type) as found:
        cupy_sdpa.explain(x, x, x, **flags, **options)
    assert str(found.value) == str(wanted.value)


def test_gradients_of_very_low_scores():
    """The part of a last block after the last key has no weight: with its score of 0 the weight would be infinite."""
    mask = BlockMask.from_blocks(np.array([[True, False], [False, True], [True, True]]), 256, 300)
    assert method_of(mask, Sizes(1, 1, 1)).name == "blocks"
    rng = np.random.default_rng(0)
    q, k = (sign * 10 + rng.standard_normal((8, 1, n, 1)) for sign, n in ((1, 256), (-1, 300)))
    arrays = [np.asfortranarray(x.astype("f4")) for x in (q, k, rng.standard_normal(k.shape), rng.standard_normal(q.shape))]
    out, pullback = attention_vjp(*arrays[:3], block_mask=mask)
    expected = dense_attention(*(x.astype("f8") for x in arrays), mask.to_dense(), 8**-0.5, 0.0, None)
    assert expected[1].max() < -100
    for x, y in zip((out, *pullback(arrays[3])), (expected[0], *expected[2:]), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-3)
