"""Trees of draft tokens: which keys a token attends to, with pages and lengths, and what the cache keeps of a draft."""

import numpy as np
import pytest
from engines import numbers
from planner import plan_problem

import cupy_sdpa
from cupy_sdpa import KVCache, Rope, apply_rope, attention, explain, tree_depths, tree_mask, zoo
from cupy_sdpa.check.draw import GPUS


def draw(rng, tokens, batch):
    """Random trees, some with several roots: the parents ``(Sq, B)``, and which keys are visible, ``(keys, queries, B)``."""
    parents = np.array([[rng.integers(-1 if rng.integers(3) else max(-1, i - 2), max(i, 0)) for _ in range(batch)]
                        for i in range(tokens)], np.int32)  # fmt: skip
    visible = np.zeros((tokens, tokens, batch), bool)
    for i, b in np.ndindex(tokens, batch):
        token = i
        while token >= 0:
            visible[token, i, b] = True
            token = parents[token, b]
    return parents, visible


@pytest.mark.parametrize("number", numbers(12, quick=1, sweep=6))
@pytest.mark.parametrize("names", ["tree", "tree paged", "tree cache", "tree paged score_mod sinks"])
def test_random_problems(names, number, engine):
    """Trees with other options agree with the reference, in calls, prepared calls and gradients."""
    engine.agrees(engine.draw({*names.split()}, number), refused=True)


@pytest.mark.parametrize("form", ["parents", "device", "mask", "one"])
def test_trees_of_some_tokens(form, engine):
    """Every sequence has its own tree, or all share one; with seq_lens_q it is the tree of a sequence's newest tokens."""
    options = {"tree": form, "seq_lens_q": "random", "seq_lens_kv": "random", "stats": True}
    engine.agrees(engine.case(d=16, dv=16, hq=2, hkv=2, sq=9, skv=20, b=4, options=options))


@pytest.mark.cudnn
@pytest.mark.parametrize("gpu", sorted({*GPUS}))
def test_trees_are_planned(gpu, planner):
    """The real cuDNN accepts trees over paged keys with lengths, for every described GPU."""
    for tokens, page, more in ((2, 16, {}), (9, 64, {"sinks": True}), (70, 16, {"score_mod": zoo.softcap(3.0)})):
        lengths = np.zeros(2, np.int32)
        given = {"page_table": np.zeros((4096 // page, 2), np.int32, order="F"), "seq_lens_kv": lengths}
        pages, q = (np.zeros(shape, np.float16, order="F") for shape in ((64, 2, page, 600), (64, 8, tokens, 2)))
        more = {name: np.zeros(8, np.float32) if name == "sinks" else x for name, x in more.items()}
        mask = tree_mask([-1, *range(tokens - 1)], pages, **given)
        problem = cupy_sdpa.problem(q, pages, pages, **given, **mask, **more)
        plan = planner.accept(plan_problem, problem, gpu)
        assert not isinstance(plan, str), f"{problem}: {plan}"


def test_shapes_and_reports(engine):
    """A report shows the mask, and the problem of shapes, for plans ahead of time, equals the arrays' problem."""
    q, k = engine.normal(0, 16, 4, 5, 2), engine.normal(1, 16, 2, 30, 2)
    mask = tree_mask([-1, 0, 1, 0, 3], k)
    assert "a mask function" in str(explain(q, k, k, **mask))
    of_shapes = tree_mask([-1, 0, 1, 0, 3], np.zeros(k.shape, np.float16, order="F"))
    made = cupy_sdpa.problem(q, k, k, **mask)
    assert made == cupy_sdpa.problem(q.shape, k.shape, k.shape, dtype=str(q.dtype), **of_shapes)
    call = cupy_sdpa.prepare(q, k, k, **mask)
    other = tree_mask([-1, 0, 0, 1, 1], k)
    found = engine.get(call(q, k, k, tensors=other["tensors"]))
    np.testing.assert_array_equal(found, engine.get(attention(q, k, k, **other)))


def test_a_layout_in_c_order(engine):
    """With a layout in C order parents, masks and block tables have the batch first, and masks the queries before the keys."""
    rng = np.random.default_rng(0)
    parents, visible = draw(rng, 5, 2)
    q, k = engine.normal(0, 16, 4, 5, 2), engine.normal(1, 16, 2, 8, 9)
    table, lengths = engine.put(np.asfortranarray([[1, 2], [3, 8], [5, 0]], np.int32)), engine.put(np.int32([20, 7]))
    given = {"page_table": table, "seq_lens_kv": lengths}
    wanted = engine.get(attention(q, k, k, **given, **tree_mask(parents, k, **given)))
    given["page_table"], own = table.T, k.transpose(3, 2, 1, 0)
    for tree in (parents.T, visible.transpose(2, 1, 0)):
        mask = tree_mask(tree, own, layout="bshd", **given)
        found = attention(q.transpose(3, 2, 1, 0), own, own, layout="bshd", **given, **mask)
        np.testing.assert_array_equal(engine.get(found).transpose(3, 2, 1, 0), wanted)


@pytest.mark.parametrize("form", ["list", "array", "device", "mask", "bshd"])
def test_depths(form, engine):
    """The number of ancestors of each token, for parents in every form; the mask's depths are on the device of its keys."""
    rng = np.random.default_rng(0)
    for tokens, batch in ((1, 1), (7, 3), (40, 2), (0, 2)):
        parents, visible = draw(rng, tokens, batch)
        parents = parents.reshape(tokens, batch)
        wanted, k = visible.sum(axis=0) - 1, engine.normal(0, 16, 2, 50, batch)
        layout = {"layout": "bshd"} if form == "bshd" else {}
        k = k.transpose(3, 2, 1, 0) if layout else k
        wanted = wanted.T if layout else wanted
        tree = {
            "list": parents[:, 0].tolist(), "array": parents, "device": engine.put(parents), "mask": visible, "bshd": parents.T
        }[form]  # fmt: skip
        wanted = wanted[:, :1] if form == "list" else wanted
        depths = tree_depths(tree, **layout)
        assert type(depths) is (type(k) if form == "device" else np.ndarray)
        of_mask = tree_mask(tree, k, **layout).depths
        assert type(of_mask) is type(k)
        for found in (depths, of_mask):
            assert found.dtype == np.int32
            np.testing.assert_array_equal(engine.get(found), wanted)


def test_a_rotated_tree(engine):
    """A tree in one step gives each token the result of its path alone, rotated; the accepted path is then a usual sequence."""
    parents, path, rope = [-1, 0, 0, 1, 2, 4, 1], [0, 2, 4, 5], Rope(16)
    q, k, v = (engine.normal(i, 16, heads, 5 + len(parents), 2) for i, heads in enumerate((4, 2, 2)))

    def new():
        cache = KVCache(16, 2, pages=16, batch=2, page_size=4, dtype=str(engine.dtype), numpy=not engine.on_cudnn)
        cache.append(k[:, :, :5], v[:, :, :5], seq_lens_q=[5, 3], rope=rope)
        return cache

    def rows(x, tokens):
        return engine.put(np.asfortranarray(engine.get(x)[:, :, [5 + token for token in tokens]]))

    cache, draft = new(), [*range(len(parents))]
    positions = cache.lengths + engine.put(tree_depths(parents))
    cache.append(rows(k, draft), rows(v, draft), rope=rope, positions=positions)
    mask, view = tree_mask(parents, **cache.view()), cache.view()
    np.testing.assert_array_equal(engine.get(cache.lengths - len(parents) + mask.depths), engine.get(positions))
    out = engine.get(attention(apply_rope(rows(q, draft), rope, positions=positions, **view), **view, **mask))
    for token in draft:
        ancestors = [token]
        while parents[ancestors[0]] >= 0:
            ancestors.insert(0, parents[ancestors[0]])
        alone = new()
        alone.append(rows(k, ancestors), rows(v, ancestors), rope=rope)
        view = alone.view()
        wanted = engine.get(attention(apply_rope(rows(q, [token]), rope, seq_lens_kv=alone.lengths), **view))
        np.testing.assert_allclose(out[:, :, token], wanted[:, :, 0], atol=2 * engine.tolerance)
        if ancestors == path:
            for b in range(2):
                cache.keep(b, path)
            kept = engine.get(attention(apply_rope(rows(q, [token]), rope, seq_lens_kv=cache.lengths), **cache.view()))
            np.testing.assert_allclose(kept, wanted, atol=engine.tolerance)


def test_no_tokens(engine):
    """A draft without tokens: the mask has no tree."""
    q, k = engine.normal(0, 16, 4, 0, 2), engine.normal(1, 16, 2, 8, 2)
    for empty in ([], np.zeros((0, 2), np.int32), np.zeros((0, 0), bool)):
        assert attention(q, k, k, **tree_mask(empty, k)).shape == (16, 4, 0, 2)


def test_parents_on_the_device_that_are_no_tree(engine):
    """A parent that is not an earlier token counts as -1 on the device, where the host does not read it."""
    k, bad, good = engine.normal(0, 16, 2, 20, 1), [-7, 1, 5, 2], [-1, -1, -1, 2]
    if engine.on_cudnn:
        assert engine.get(tree_depths(engine.put(np.int32(bad)))).ravel().tolist() == [0, 0, 0, 1]
        one, other = (tree_mask(engine.put(np.int32(tree)), k)["tensors"] for tree in (bad, good))
        for name, x in one.items():
            np.testing.assert_array_equal(engine.get(x), engine.get(other[name]))
    with pytest.raises(ValueError, match="the parent of token 0 is -7"):
        tree_mask(bad, k)
