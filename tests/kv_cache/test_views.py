"""What ``KVCache.view`` says about the queries of the last append: prompts of different lengths, packed tokens, captures, trees."""

import copy
import pickle

import numpy as np
import pytest

import cupy_sdpa
from cupy_sdpa import KVCache, Rope, apply_rope, attention, tree_mask, weight_entropy, weight_sums

ON_A_GPU = pytest.mark.parametrize("engine", ["fake", pytest.param("cupy", marks=pytest.mark.gpu)], indirect=True)
SHAPE = {"pages": 30, "batch": 3, "page_size": 4}


def made(engine, **options):
    """A cache of two sequences of pages, whose dtype the engine runs."""
    return KVCache(16, 2, **{"dtype": str(engine.dtype), "numpy": not engine.on_cudnn} | SHAPE | options)


class Sequences:
    """Random tokens of three sequences, and attention of each alone on numpy; the engine gets them padded or packed.

    Args:
        engine: the engine.
        rope: the rotation of queries and keys; None for none.
    """

    def __init__(self, engine, rope=None):
        self.engine, self.rope, self.rng = engine, rope, np.random.default_rng(1)
        self.k, self.v = ([np.zeros((16, 2, 0), engine.dtype)] * 3 for _ in range(2))

    def step(self, counts, size=0, *, packed=False):
        """New q, k and v on the engine, with NaN as padding up to ``size`` tokens; and the results of every sequence."""
        arrays, wanted = [], []
        each = [[self.rng.standard_normal((16, heads, n)).astype(self.engine.dtype) for n in counts] for heads in (4, 2, 2)]
        for b, count in enumerate(counts):
            q, k, v = (x[b] for x in each)
            self.k[b], self.v[b] = (np.concatenate([old, new], axis=2) for old, new in ((self.k[b], k), (self.v[b], v)))
            q, k, v = (np.asfortranarray(x[..., None].astype("f4")) for x in (q, self.k[b], self.v[b]))
            if self.rope:
                q, k = apply_rope(q, self.rope, start=k.shape[2] - count), apply_rope(k, self.rope)
            wanted.append(attention(q, k, v, causal="bottom_right")[..., 0])
        for of in each:
            if packed:
                x = np.concatenate(of, axis=2)
            else:
                x = np.full((16, of[0].shape[1], size or max(counts), 3), np.nan, self.engine.dtype)
                for b, own in enumerate(of):
                    x[:, :, : counts[b], b] = own
            arrays.append(self.engine.put(np.asfortranarray(x)))
        return arrays, wanted

    def check(self, out, wanted, counts, *, packed=False):
        """Compare; the padding of the results must be 0."""
        out = self.engine.get(out).astype("f4")
        parts = np.split(out, np.cumsum(counts)[:-1], axis=2) if packed else [out[:, :, :n, b] for b, n in enumerate(counts)]
        for found, own in zip(parts, wanted, strict=True):
            np.testing.assert_allclose(found, own, atol=3 * self.engine.tolerance)
        for b, n in enumerate([] if packed else counts):
            assert out.shape[2] == 1 or not out[:, :, n:, b].any()


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_prompts_of_different_lengths(packed, rotated, engine):
    """Padded or packed prompts, then one token, several and none: append, rotation and attention with the same dictionary."""
    rope = Rope(16) if rotated else None
    cache, tokens = made(engine), Sequences(engine, rope)
    for counts, size in (([9, 4, 0], 0), ([1, 1, 1], 0), ([2, 5, 3], 8), ([1, 0, 1], 0), ([3, 3, 3], 5), ([2, 0, 2], 2)):
        (q, k, v), wanted = tokens.step(counts, size, packed=packed)
        cache.append(k, v, seq_lens_q=counts, rope=rope)
        view = cache.view()
        q = apply_rope(q, rope, **view) if rope else q
        tokens.check(attention(q, **view, causal="bottom_right"), wanted, counts, packed=packed)
        assert ("cu_seqlens_q" in view) == packed
        assert ("seq_lens_q" in view) == (not packed and 1 < q.shape[2] > min(counts))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_views_in_a_layout(layout, engine):
    """Packed queries have the layout thd, even if the cache's layout has the heads before the tokens."""
    cache, tokens, counts = made(engine, layout=layout), Sequences(engine, Rope(16)), [2, 5, 3]
    axes = [3, 1, 2, 0] if layout == "bhsd" else [3, 2, 1, 0]
    for packed in (False, True):
        order = [2, 1, 0] if packed else axes
        (q, k, v), wanted = tokens.step(counts, packed=packed)
        cache.append(k.transpose(order), v.transpose(order), seq_lens_q=counts, rope=tokens.rope)
        view = cache.view()
        out = attention(apply_rope(q.transpose(order), tokens.rope, **view), **view, causal="bottom_right")
        tokens.check(out.transpose(np.argsort(order)), wanted, counts, packed=packed)


@ON_A_GPU
@pytest.mark.parametrize("packed", [False, True])
def test_captured_steps_have_other_counts(packed, engine):
    """A view in a capture has the counts on the device, so every launch of the graph has its own padding."""
    xp, tokens, most = engine.xp, Sequences(engine, Rope(16)), [3, 2, 3]
    cache, rope, kept = made(engine), tokens.rope, []

    def step():
        cache.append(k, v, rope=rope)
        view = cache.view() | {"page_table": cache.full_table} | ({"max_seqlen_q": 3} if packed else {})
        kept.append(apply_rope(q, rope, **view))  # as long as the graph
        return attention(kept[-1], **view, causal="bottom_right")

    (q, k, v), wanted = tokens.step(most, packed=packed)
    xp.cuda.Device().synchronize()
    with xp.cuda.Stream(non_blocking=True) as stream:
        cache.begin_step(most)
        tokens.check(step(), wanted, most, packed=packed)
        cache.begin_step(0)
        stream.begin_capture()
        out = step()
        graph = stream.end_capture()
        graph.launch(stream)
        for counts in ([3, 2, 3], [1, 3, 2], [3, 3, 2]):
            given, wanted = tokens.step(counts, 3, packed=packed)
            for x, new in zip((q, k, v), given, strict=True):
                x[:, :, : new.shape[2]] = new
            cache.begin_step(counts)
            graph.launch(stream)
            tokens.check(out[:, :, : sum(counts)] if packed else out, wanted, counts, packed=packed)
            cache.truncate(0, 5)
            tokens.k[0], tokens.v[0] = (x[0][:, :, :5] for x in (tokens.k, tokens.v))
    engine.forget_plans(kept=False)


def test_one_token_needs_no_lengths(engine):
    """A step of one token per sequence has the plan of full lengths, also in a capture, if some sequences get none."""
    cache = made(engine)
    (_, k, v), _ = Sequences(engine).step([1, 0, 1])
    cache.append(k, v, seq_lens_q=[1, 0, 1])
    assert cache.view().keys() == {"k", "v", "page_table", "seq_lens_kv"}


@pytest.mark.parametrize("lengths", [[1, 0, 1], None])
def test_finished_sequences_have_no_weights_if_the_lengths_are_passed(lengths, engine):
    """A sequence without a new token is computed as its newest token, or as padding."""
    cache = made(engine)
    for counts in ([3, 4, 2], [1, 0, 1]):
        (q, k, v), _ = Sequences(engine).step(counts)
        cache.append(k, v, seq_lens_q=counts)
    view = cache.view(seq_lens_q=None if lengths is None else engine.put(np.int32(lengths)))
    q = engine.put(np.ones_like(engine.get(q), order="F"))
    out = engine.get(attention(q, **view, causal="bottom_right"))
    k = view.pop("k")
    del view["v"]
    sums, entropy = (engine.get(call(q, k, causal="bottom_right", **view)) for call in (weight_sums, weight_entropy))
    for b, length in enumerate([4, 4, 3]):
        queries = 1 if lengths is None else lengths[b]
        np.testing.assert_allclose(sums[:, :, b].sum(axis=0), queries, atol=engine.tolerance)
        assert not sums[length:, :, b].any()
        assert out[..., b].any() == entropy[..., b].all() == (queries == 1)


# Queries other than the last append's


@pytest.fixture
def ragged(engine):
    """A cache after the append of padded prompts, and queries."""
    cache, counts = made(engine), [9, 4, 0]
    (q, k, v), _ = Sequences(engine).step(counts)
    cache.append(k, v, seq_lens_q=counts)
    return cache, engine.put(np.nan_to_num(engine.get(q)))


def test_other_queries_raise(engine, ragged):
    """The last query of the padded array is no query of the shorter prompts: the message says what to pass."""
    cache, q = ragged
    last = q[:, :, -1:]
    for call in (lambda: attention(last, **cache.view()), lambda: attention(last, **cache.view(), causal="bottom_right")):
        with pytest.raises(ValueError, match=r"max_seqlen_q is 9.* Sq is 1.*pass 9 or more.*'seq_lens_q': None"):
            call()
    with pytest.raises(ValueError, match=r"max_seqlen_q is 9.*x has 1 tokens.*seq_lens_kv=cache.lengths"):
        apply_rope(last, Rope(16), **cache.view())
    newest = {"seq_lens_q": None, "max_seqlen_q": None}
    given = {"page_table": cache.table, "seq_lens_kv": cache.lengths, "causal": "bottom_right"}
    wanted = engine.get(attention(last, cache.keys(), cache.values(), **given))
    for view in (cache.view() | newest, cache.view(seq_lens_q=None)):
        np.testing.assert_array_equal(engine.get(attention(last, **view, causal="bottom_right")), wanted)


@pytest.mark.parametrize("removed", [False, True])
def test_lengths_of_other_queries(removed, engine, ragged):
    """``view(seq_lens_q=)`` replaces the lengths of a padded append, also after tokens were removed."""
    cache, q = ragged
    if removed:
        cache.truncate(0, 8)
    own, given = engine.put(np.int32([2, 3, 0])), {"page_table": cache.table, "seq_lens_kv": cache.lengths}
    q = q[:, :, :3]
    wanted = attention(q, cache.keys(), cache.values(), **given, seq_lens_q=own, causal="bottom_right")
    view = cache.view(seq_lens_q=own)
    np.testing.assert_array_equal(engine.get(attention(q, **view, causal="bottom_right")), engine.get(wanted))
    rotated = apply_rope(q, Rope(16), seq_lens_kv=cache.lengths, seq_lens_q=own)
    np.testing.assert_array_equal(engine.get(apply_rope(q, Rope(16), **view)), engine.get(rotated))


CHANGES = {
    "truncate": lambda c: c.truncate(0, 8),
    "keep": lambda c: c.keep(1, [0, 2]),
    "fork": lambda c: c.fork(1, 2),
    "reorder": lambda c: c.reorder([1, 2, 1]),
    "swap": lambda c: c.swap(0, 1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_after_a_padded_append(name, ragged):
    """It is unknown which queries are padding after tokens were removed or shared; another append tells."""
    cache, q = ragged
    CHANGES[name](cache)
    with pytest.raises(RuntimeError, match=r"seq_lens_q \[9, 4, 0\].*unknown which queries are padding"):
        cache.view()
    cache.append(q[:, :2, :1], q[:, :2, :1])
    assert "seq_lens_q" not in cache.view()


def test_an_announced_step(ragged):
    """On the device the counts belong to the new step, and the lengths are from before it."""
    cache, q = ragged
    cache.begin_step([2, 1, 0])
    with pytest.raises(RuntimeError, match=r"seq_lens_q \[2, 1, 0\] is announced.*before view\(\), or call cancel_step"):
        cache.view()
    with pytest.raises(RuntimeError, match=r"append its layer 0 before tree_mask"):
        tree_mask([-1, 0], cache.keys(), page_table=cache.table, seq_lens_kv=cache.lengths)
    cache.cancel_step()
    assert "seq_lens_q" not in cache.view()
    cache.append(q[:, :2, :2], q[:, :2, :2], seq_lens_q=[2, 1, 0])
    assert cache.view()["max_seqlen_q"] == 2


@pytest.mark.parametrize("way", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies_have_views_of_their_own(way, engine, ragged):
    """The counts of a copy do not follow the original."""
    cache, q = ragged
    view = way(cache).view()
    cache.append(q[:, :2], q[:, :2], seq_lens_q=[1, 2, 3])
    assert engine.get(view["seq_lens_q"]).tolist() == [9, 4, 0]
    assert engine.get(cache.view()["seq_lens_q"]).tolist() == [1, 2, 3]


# Trees


def test_a_mask_of_other_lengths_raises(engine):
    """A mask that was made before the append of the draft, or in an earlier step, is for other keys."""
    cache, tokens, parents = made(engine), Sequences(engine), [-1, 0, 0, 2]
    (q, k, v), _ = tokens.step([4, 4, 4])
    cache.append(k, v)
    mask = tree_mask(parents, **cache.view())
    wanted = attention(q, **cache.view(), **mask)
    cache.append(k, v)
    calls = (
        lambda: attention(q, **cache.view(), **mask), lambda: attention(q, **cache.view() | mask),
        lambda: cupy_sdpa.explain(q, **cache.view(), **mask),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(ValueError, match=r"lengths \[4, 4, 4\] of the cache, which now has \[8, 8, 8\].*after the append"):
            call()
    for b in range(3):
        cache.truncate(b, 4)
    np.testing.assert_array_equal(engine.get(attention(q, **cache.view(), **mask)), engine.get(wanted))
    assert type(pickle.loads(pickle.dumps({**mask, "tensors": {}}))) is dict


def test_trees_of_some_tokens(engine):
    """A draft with padding: the mask leaves the lengths of the queries to the view."""
    cache, tokens, parents = made(engine), Sequences(engine), [-1, 0, 0, 2]
    (_, k, v), _ = tokens.step([3, 5, 1])
    cache.append(k, v, seq_lens_q=[3, 5, 1])
    (q, k, v), _ = tokens.step([4, 2, 4])
    cache.append(k, v, seq_lens_q=[4, 2, 4])
    with pytest.raises(ValueError, match=r"max_seqlen_q is 4.*the tree has 3"):
        tree_mask(parents[:3], **cache.view())
    out = engine.get(attention(q, **cache.view(), **tree_mask(parents, **cache.view())))
    alone = attention(q[:, :, :2], **cache.view() | {"seq_lens_q": None, "max_seqlen_q": None}, causal="bottom_right")
    np.testing.assert_allclose(out[:, :, :2, 1], engine.get(alone)[..., 1], atol=2 * engine.tolerance)
    assert not out[:, :, 2:, 1].any()


def test_the_default_dtype(engine):
    """Numpy has no bfloat16 of its own, so the default is float32 there."""
    cache = KVCache(16, 2, **SHAPE, numpy=not engine.on_cudnn)
    assert cache.dtype == cache.keys(0).dtype == ("bfloat16" if engine.on_cudnn else "float32")
