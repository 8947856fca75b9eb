"""Block masks: which blocks are listed, in what memory, and how they are shown."""

import copy
import gc
import pickle
import tracemalloc

import numpy as np
import pytest
from engines import numbers

from cupy_sdpa import BlockMask, attention, attention_vjp, block_mask, zoo

#: The numbers of :attr:`BlockMask.kinds`.
EMPTY, PARTIAL, FULL = 0, 1, 2


def dense_of(mask_mod, sq, skv, **tensors):
    """The mask ``(Skv, Sq)``, evaluated at once."""
    attends = mask_mod(0, 0, np.arange(sq), np.arange(skv)[:, None], **tensors)
    return np.broadcast_to(attends, (skv, sq))


def blocks_of(dense, q, kv):
    """A dense mask's kinds of blocks ``(Skv, Sq)``, written plainly."""
    kinds = np.zeros((-(-dense.shape[0] // kv), -(-dense.shape[1] // q)), np.uint8)
    for (j, i), _ in np.ndenumerate(kinds):
        block = dense[j * kv : (j + 1) * kv, i * q : (i + 1) * q]
        kinds[j, i] = FULL if block.all() else PARTIAL if block.any() else EMPTY
    return kinds


def check_attention(mask, atol=1e-6):
    """Attention with a block mask and its gradients are those with the dense mask."""
    attends = mask.to_dense()
    skv, sq, heads, batch = attends.shape
    rng = np.random.default_rng(0)
    q, k, v, dout = (np.asfortranarray(rng.standard_normal((8, heads, s, batch))) for s in (sq, skv, skv, sq))
    (out, pullback), (expected, dense_pullback) = (
        attention_vjp(q, k, v, **options) for options in ({"block_mask": mask}, {"mask": np.asfortranarray(attends)})
    )
    for x, y in zip((out, *pullback(dout)), (expected, *dense_pullback(dout)), strict=True):
        np.testing.assert_allclose(x, y, atol=atol)


#: Mask functions, lengths and block sizes. Reported blocks may have another size than the blocks of 128 that are computed.
MASKS = [
    (zoo.causal, (500, 300), 128), (zoo.causal, (0, 5), 128), (zoo.causal, (2, 300), (32, 256)), (zoo.causal, (1000, 1), 128),
    (zoo.sliding_window(40), (129, 127), 128), (zoo.sliding_window(7), (50, 30), 1),
    (zoo.sliding_window(70), (700, 257), 256), (zoo.sliding_window(70), (128, 300), (128, 64)),
    (zoo.image_window(20, 3), (500, 300), 64), (zoo.image_window(20, 3), (1, 1), 384),
    (zoo.chunked(100), (128, 128), (256, 128)), (zoo.chunked(100), (1000, 1), 384), (zoo.dilated(499, 2), (500, 300), 64),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(MASKS)))
def test_a_mask_is_that_of_its_function(number, engine):
    """Every pair, evaluated on the engine's device; blocks, sparsity and text follow the block size."""
    mask_mod, lengths, block = MASKS[number]
    size = block if isinstance(block, tuple) else (block, block)
    dense, pairs = dense_of(mask_mod, *lengths), np.random.default_rng(0).random(lengths[::-1]) < 0.3
    mask = block_mask(mask_mod, *lengths, block=block)
    np.testing.assert_array_equal(mask.to_dense()[..., 0, 0], dense)
    assert mask.shape == (*reversed(lengths), 1, 1)
    np.testing.assert_array_equal(mask.kinds[..., 0, 0], blocks_of(dense, 128, 128))
    expected = blocks_of(dense, *size)
    np.testing.assert_array_equal(mask._block_kinds[..., 0, 0], expected)
    assert (mask.blocks, mask.partial) == (np.count_nonzero(expected), np.count_nonzero(expected == PARTIAL))
    assert mask.sparsity == pytest.approx(1 - mask.blocks / max(expected.size, 1) if expected.size else mask.sparsity)
    assert (f"blocks of {size[0]} x {size[1]}" in repr(mask)) == (block != 128)
    assert mask.block == size

    def with_array(b, h, q_idx, kv_idx, pairs):
        return pairs[kv_idx, q_idx] & mask_mod(b, h, q_idx, kv_idx)

    if min(lengths):
        mask = block_mask(with_array, *lengths, tensors={"pairs": engine.put(pairs)})
        np.testing.assert_array_equal(mask.to_dense()[..., 0, 0], dense & pairs)


def test_masks_of_heads_and_batch_entries(engine):
    """The function gets h and b, with arrays that it indexes by them."""
    size, start = np.array([10, 300], np.int32), np.array([0, 150, 299], np.int32)

    def mask_mod(b, h, q_idx, kv_idx, size, start):
        return (abs(q_idx - kv_idx) <= size[h]) & (kv_idx >= start[b])

    tensors = engine.put({"size": size, "start": start})
    mask = block_mask(mask_mod, 200, 300, heads=2, batch=3, tensors=tensors)
    for h, b in np.ndindex(2, 3):
        expected = dense_of(lambda _b, _h, i, j: mask_mod(b, h, i, j, size, start), 200, 300)  # noqa: B023
        np.testing.assert_array_equal(mask.to_dense()[..., h, b], expected)


@pytest.mark.parametrize("use", [lambda h: h**2, lambda h: h << 1, lambda h: 1 ^ h, lambda h: {1: 2}[h], lambda h: 1 & h])
def test_every_use_of_an_index_that_is_not_given_is_refused(use):
    """The message names the option."""
    with pytest.raises(TypeError, match="uses h, and heads is None"):
        block_mask(lambda b, h, i, j: i + use(h) > j, 10, 10)


def test_the_mask_is_not_evaluated_at_once():
    """It takes the memory of some rows of blocks, not of all pairs (67 MB of bool)."""
    tracemalloc.start()
    block_mask(lambda b, h, i, j: i // 500 == j // 500, 1 << 14, 1 << 12)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.2 * (1 << 26)


@pytest.mark.parametrize("seed", numbers(14, quick=6))
def test_masks_of_arrays_of_blocks(seed):
    """Listed blocks, blocks within a function, and blocks that are listed as full, of heads and batch items."""
    rng = np.random.default_rng(seed)
    q, kv = ((64, 64), (128, 128), (256, 256), (384, 384), (128, 64), (32, 256), (256, 128))[seed % 7]
    sq, skv = (int(rng.integers(1, 600)) for _ in range(2))
    shape = (-(-skv // kv), -(-sq // q), int(rng.integers(1, 3)), int(rng.integers(1, 3)))
    listed, full = rng.random(shape) < 0.5, rng.random(shape) < 0.5

    def expand(x):
        return x.repeat(kv, axis=0).repeat(q, axis=1)[:skv, :sq]

    function = ((np.arange(skv)[:, None] + np.arange(sq)) % 3 > 0)[:, :, None, None]
    options, expected = {}, expand(listed)
    if seed % 3:
        options, expected = {"mask_mod": lambda b, h, i, j: (i + j) % 3 > 0}, expected & function
    if seed % 3 == 2:
        options, expected = {**options, "full": full}, expected | expand(listed & full)
    mask = BlockMask.from_blocks(listed, sq, skv, block=(q, kv), **options)
    np.testing.assert_array_equal(mask.to_dense(), expected)
    for h, b in np.ndindex(shape[2:]):
        np.testing.assert_array_equal(mask.kinds[..., h, b], blocks_of(expected[..., h, b], 128, 128))
        np.testing.assert_array_equal(mask._block_kinds[..., h, b], blocks_of(expected[..., h, b], q, kv))
    assert len(mask.bits) == np.count_nonzero(mask.kinds == PARTIAL)
    check_attention(mask)


@pytest.mark.parametrize(("sq", "skv"), [(1, 200), (200, 1), (130, 260), (3, 129)])
def test_a_function_of_listed_blocks_has_no_pairs_after_the_end(sq, skv):
    """A block of which one pair is excluded is partial, and one of which none is excluded is full, also at the ends."""
    blocks = np.ones((-(-skv // 128), -(-sq // 128)), bool)
    for key in range(max(skv - 3, 0), skv):
        mask = BlockMask.from_blocks(blocks, sq, skv, mask_mod=lambda b, h, i, j, key=key: j != key)
        expected = np.broadcast_to(np.arange(skv)[:, None] != key, (skv, sq))
        np.testing.assert_array_equal(mask.to_dense()[..., 0, 0], expected)
    mask = BlockMask.from_blocks(blocks, sq, skv, mask_mod=lambda b, h, i, j: i >= 0)
    assert (mask.kinds == FULL).all()


def test_from_the_fields_of_flex_attention():
    """The axes are FlexAttention's; entries after the counts are not read; ``BLOCK_SIZE`` is ``block``."""
    rng = np.random.default_rng(0)
    partial = rng.random((2, 3, 4, 5)) < 0.4  # (B, H, query blocks, key blocks)
    full = ~partial & (rng.random(partial.shape) < 0.4)

    def fields(blocks):
        order = np.argsort(~blocks, axis=3, kind="stable")
        counts = blocks.sum(axis=3)
        return counts, np.where(np.arange(5) < counts[..., None], order, 99)

    mask = BlockMask.from_kv_blocks(*fields(partial), *fields(full), mask_mod=lambda b, h, i, j: i >= j)
    assert mask.shape == (640, 512, 3, 2)
    i, j = np.arange(4)[:, None], np.arange(5)
    of_function = np.where(i == j, PARTIAL, np.where(i > j, FULL, EMPTY))
    expected = np.where(full, FULL, np.where(partial, of_function, EMPTY))
    np.testing.assert_array_equal(mask.kinds, expected.transpose(3, 2, 1, 0))
    counts, indices = np.array([[[1, 2]]], "u4"), np.array([[[[1, 0, 0], [0, 2, 0]]]], "u4")
    mask = BlockMask.from_kv_blocks(counts, indices, block=(64, 256), skv=700)
    expected = np.zeros((700, 128), bool)
    expected[256:512, :64] = expected[:256, 64:] = expected[512:, 64:] = True
    np.testing.assert_array_equal(mask.to_dense()[..., 0, 0], expected)
    assert mask.blocks == 3


@pytest.mark.parametrize("seed", numbers(30, quick=12))
def test_short_masks_of_intervals(seed):
    """Rows that attend to consecutive keys, of every form, at lengths of few keys: the bounds of segments are exact."""
    rng = np.random.default_rng(seed)
    sq = int(rng.integers(1, 60))
    skv = int(rng.integers(1, 60)) if seed % 3 == 0 else sq
    document, n, ends = np.sort(rng.integers(0, 5, 60)), int(rng.integers(0, 10)), int(rng.integers(0, skv + 1))
    mask_mod = [
        lambda b, h, i, j, document: i >= j,
        lambda b, h, i, j, document: document[i] == document[j],
        lambda b, h, i, j, document: (document[i] == document[j]) & (i >= j) & (i - j <= n),
        lambda b, h, i, j, document: (j < ends) | (i >= j),
        lambda b, h, i, j, document: (abs(i - j) <= n) & (document[i] > 0),
        lambda b, h, i, j, document: (j <= i + n) & (i - j <= 1),
    ][seed % 6]
    check_attention(block_mask(mask_mod, sq, skv, tensors={"document": document}))


def test_display():
    """The text is one line; the picture has one cell per block, and at most 128 in a row."""
    mask = block_mask(zoo.causal, 512, 256)
    assert repr(mask) == "<BlockMask 512 x 256: 7 of 8 blocks, 2 of them partial; sparsity 12.5 %>"
    assert mask.sparsity == 0.125
    html = mask._repr_html_()
    assert html.count("<rect") == 8
    assert "7 of 8 blocks" in html
    assert BlockMask.from_blocks(np.ones((300, 300), bool)).picture().count("<rect") == 100**2
    with pytest.raises(TypeError, match=r"^head is 'a'; it must be an integer from 0 to 0$"):
        mask.picture("a")


def test_masks_are_read_only():
    """Calls store tables of a mask, which a later change would not reach; dense arrays of it are copies."""
    mask = block_mask(lambda b, h, i, j: (i + j) % 3 > 0, 200, 300, block=32)
    for copied in (mask, pickle.loads(pickle.dumps(mask)), BlockMask.from_blocks(np.ones((3, 2), bool), 200, 300)):
        with pytest.raises(AttributeError, match="sq of a BlockMask cannot be changed"):
            copied.sq = 100
        with pytest.raises(AttributeError, match="kinds of a BlockMask cannot be deleted"):
            del copied.kinds
        for array in (copied.kinds, copied.bits, copied._block_kinds):
            assert not array.flags.writeable
    dense = mask.to_dense()
    dense[...] = False
    assert mask.to_dense().any()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda mask: pickle.loads(pickle.dumps(mask))])
def test_a_copied_mask_is_used_after_the_original_is_freed(copied, engine):
    """Cached calls of the original are not calls of the copy."""
    mask = block_mask(lambda b, h, i, j: (i >= j) & ((i + j) % 3 > 0), 140, 140)
    x = engine.normal(0, 16, 1, 140, 1)
    for _ in range(2):
        expected = engine.get(attention(x, x, x, block_mask=mask))
    other = copied(mask)
    np.testing.assert_array_equal(other.to_dense(), mask.to_dense())
    del mask
    gc.collect()
    np.testing.assert_array_equal(engine.get(attention(x, x, x, block_mask=other)), expected)


def test_functions_that_cannot_be_traced():
    """A function that kernels cannot compute can make a mask, and the mask has gradients."""
    check_attention(block_mask(lambda b, h, i, j: (i >= j) & ((i.astype("i8") + j) % 5 != 1), 640, 640))


#: Mask functions that compute with conditions, and the same masks with logical operators.
WITH_CONDITIONS = {
    "sum": (lambda b, h, i, j: ((i // 16 == j // 16) + (i >= j)) > 1, lambda b, h, i, j: (i // 16 == j // 16) & (i >= j)),
    "add": (lambda b, h, i, j: np.add(i >= j, j % 3 == 0) == 2, lambda b, h, i, j: (i >= j) & (j % 3 == 0)),
    "three": (lambda b, h, i, j: (i >= j) + (j % 3 == 0) + (j % 2 == 0) > 2, lambda b, h, i, j: (i >= j) & (j % 6 == 0)),
    "difference": (lambda b, h, i, j: (i >= j) - (j % 3 == 0) > 0, lambda b, h, i, j: (i >= j) & (j % 3 != 0)),
    "negative": (lambda b, h, i, j: -(i >= j) < 0, lambda b, h, i, j: i >= j),
    "sign": (lambda b, h, i, j: np.sign(i >= j) + abs(j % 3 == 0) == 2, lambda b, h, i, j: (i >= j) & (j % 3 == 0)),
    "not first head": (lambda b, h, i, j: ~(h == 0) & (i >= j), lambda b, h, i, j: (h != 0) & (i >= j)),
    "first head": (lambda b, h, i, j: (i >= j) & ~(h > 0), lambda b, h, i, j: (i >= j) & (h <= 0)),
    "heads": (lambda b, h, i, j: ~(h == 0), lambda b, h, i, j: (h != 0) & (j >= 0)),
    "products": (lambda b, h, i, j: (i**6 + j) % 3 == 0, lambda b, h, i, j: ((i % 3) * (i % 3) + j) % 3 == 0),
}  # fmt: skip


@pytest.mark.parametrize("name", WITH_CONDITIONS)
def test_a_condition_is_a_number_in_arithmetic_as_in_mask_mod(name, fake):
    """A block mask equals mask_mod= and logical operators, evaluated by CuPy, and by numpy if there are numpy arrays."""
    mask_mod, logical = WITH_CONDITIONS[name]
    size = 45 if name == "products" else 150  # 45 ** 6 needs more than 32 bits
    want = np.stack([np.broadcast_to(logical(0, h, *np.ogrid[:size, :size]), (size, size)).T for h in (0, 1)], axis=2)
    arrays = {"t": np.zeros(1, np.int32)}
    q, k, v = (np.asfortranarray(np.random.default_rng(0).standard_normal((8, 2, size, 1))) for _ in range(3))
    mask = block_mask(mask_mod, size, size, heads=2, batch=1)
    on_cpu = block_mask(lambda b, h, i, j, t: mask_mod(b, h, i, j), size, size, heads=2, tensors=arrays)
    np.testing.assert_array_equal(on_cpu.to_dense()[..., 0], want)
    if name != "products":  # integers have 32 bits on the GPU
        np.testing.assert_array_equal(mask.to_dense()[..., 0], want)
    np.testing.assert_allclose(attention(q, k, v, block_mask=on_cpu), attention(q, k, v, mask_mod=mask_mod), atol=1e-12)


@pytest.mark.parametrize("add", [lambda x, b: x + b, np.add])
def test_a_function_that_cannot_be_traced_must_not_add_conditions(add):
    """Numpy evaluates ``isin``, and its sum of two conditions is True where both hold; other operators agree."""
    tensors = {"table": np.arange(-8, 9)}

    def near(b, h, i, j, table):
        return np.isin(j - i, table)

    def both(b, h, i, j, table):
        return add(near(b, h, i, j, table), i >= j) > 1

    with pytest.raises(TypeError, match=r"adds two conditions.*np\.where\(condition, 1, 0\)"):
        block_mask(both, 50, 50, tensors=tensors)
    mask = block_mask(lambda *x, table: np.where(near(*x, table), 1, 0) + (x[2] >= x[3]) > 1, 50, 50, tensors=tensors)
    want = dense_of(lambda b, h, i, j: (abs(j - i) < 9) & (i >= j), 50, 50)
    np.testing.assert_array_equal(mask.to_dense()[..., 0, 0], want)
