"""Block masks: which blocks are listed, in what memory, and how they are shown."""

import copy
import gc
import pickle
import tracemalloc

import numpy as np
import pytest

from cupy_sdpa import BlockMask, attention, attention_vjp, block_mask, zoo
from cupy_sdpa.sparse.entries import Sizes, make_tables, rectangles
from cupy_sdpa.sparse.masks.evaluate import EMPTY, FULL, PARTIAL, Function, evaluate
from cupy_sdpa.sparse.masks.segments import band_sides, find_segments, gradient_slices, packed, slices
from cupy_sdpa.sparse.method import method_of


def dense_of(mask_mod, sq, skv, **tensors):
    """The mask ``(Skv, Sq)``, evaluated at once."""
    attends = mask_mod(0, 0, np.arange(sq), np.arange(skv)[:, None], **tensors)
    return np.broadcast_to(attends, (skv, sq))


@pytest.mark.parametrize("lengths", [(0, 5), (1, 1), (2, 300), (128, 128), (129, 127), (500, 300), (1000, 1)], ids=str)
@pytest.mark.parametrize(
    "mask_mod", [zoo.causal, zoo.sliding_window(40), zoo.image_window(20, 3), zoo.chunked(100), zoo.checkered]
)
def test_a_mask_is_that_of_its_function(mask_mod, lengths):
    """Every pair; full blocks have no masked pair, and empty blocks no other one."""
    mask = block_mask(mask_mod, *lengths)
    dense = dense_of(mask_mod, *lengths)
    np.testing.assert_array_equal(mask.to_dense()[..., 0, 0], dense)
    assert mask.shape == (*reversed(lengths), 1, 1)
    for (j, i), kind in np.ndenumerate(mask.kinds[..., 0, 0]):
        block = dense[j * 128 : (j + 1) * 128, i * 128 : (i + 1) * 128]
        assert kind == (FULL if block.all() else PARTIAL if block.any() else EMPTY)


def test_masks_of_heads_and_batch_entries():
    """The function gets h and b, with arrays that it indexes by them."""
    size = np.array([10, 300], np.int32)
    start = np.array([0, 150, 299], np.int32)

    def mask_mod(b, h, q_idx, kv_idx, size, start):
        return (abs(q_idx - kv_idx) <= size[h]) & (kv_idx >= start[b])

    mask = block_mask(mask_mod, 200, 300, heads=2, batch=3, tensors={"size": size, "start": start})
    for h, b in np.ndindex(2, 3):
        expected = dense_of(lambda _b, _h, i, j: mask_mod(b, h, i, j, size, start), 200, 300)  # noqa: B023
        np.testing.assert_array_equal(mask.to_dense()[..., h, b], expected)


@pytest.mark.parametrize(("index", "option"), [("b", "batch"), ("h", "heads")])
def test_an_index_that_is_not_given_is_refused(index, option):
    """The message names the option."""
    functions = {"b": lambda b, h, i, j: i + b > j, "h": lambda b, h, i, j: i > j * h}
    with pytest.raises(TypeError, match=f"uses {index}, and {option} is None: pass {option}="):
        block_mask(functions[index], 10, 10)


@pytest.mark.parametrize(
    ("function", "options", "error", "message"),
    [
        (lambda b, h, i, j: i - j, {}, TypeError, "it must return a condition"),
        (lambda b, h, i, j: i > j, {"sq": -1}, ValueError, "sq is -1"),
        (lambda b, h, i, j: i > j, {"skv": 1.5}, TypeError, "skv is 1.5"),
        (lambda b, h, i, j: i > j, {"heads": 0}, ValueError, "heads is 0"),
        (lambda b, h, i, j: i > j, {"tensors": {"x": np.ones(1)}}, ValueError, "tensors has x"),
        (3, {}, TypeError, "mask_mod is a int"),
    ],
)
def test_wrong_arguments_are_refused(function, options, error, message):
    """The message contains the value."""
    with pytest.raises(error, match=message):
        block_mask(function, **{"sq": 10, "skv": 10, **options})


def test_the_mask_is_not_evaluated_at_once():
    """The memory is that of some rows of blocks, not that of all pairs (67 MB of bool)."""
    tracemalloc.start()
    block_mask(lambda b, h, i, j: i // 500 == j // 500, 1 << 14, 1 << 12)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.2 * (1 << 26)


def test_from_blocks():
    """Without a function all listed blocks are full; with one, those that are not listed as full have its pairs."""
    rng = np.random.default_rng(0)
    blocks = rng.random((3, 2, 2, 1)) < 0.5
    mask = BlockMask.from_blocks(blocks, 200, 300)
    assert (mask.blocks, mask.partial) == (blocks.sum(), 0)
    np.testing.assert_array_equal(mask.to_dense(), np.repeat(np.repeat(blocks, 128, 0), 128, 1)[:300, :200])
    full = blocks & (rng.random(blocks.shape) < 0.5)
    mask = BlockMask.from_blocks(blocks, 200, 300, full=full, mask_mod=lambda b, h, i, j: i >= j + h)
    i, j, h = np.arange(200)[:, None, None], np.arange(300)[:, None, None, None], np.arange(2)[:, None]
    wide = [np.repeat(np.repeat(x, 128, 0), 128, 1)[:300, :200] for x in (blocks, full)]
    np.testing.assert_array_equal(mask.to_dense(), wide[1] | (wide[0] & (i >= j + h)))


def test_from_the_fields_of_flex_attention():
    """The axes are those of FlexAttention; entries after the counts are not read."""
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
    with pytest.raises(ValueError, match="kv_indices has entries outside of 0 to 4"):
        BlockMask.from_kv_blocks(np.full((1, 1, 1), 2), np.full((1, 1, 1, 5), 7))


@pytest.mark.parametrize("seed", range(40))
def test_segments_are_exactly_the_rows(seed):
    """Random interval masks: the segments, and the packed sequences if there are any, have the same pairs."""
    rng = np.random.default_rng(seed)
    sq = int(rng.integers(1, 60))
    skv = int(rng.integers(1, 60)) if seed % 3 == 0 else sq
    document, n, ends = np.sort(rng.integers(0, 5, 60)), int(rng.integers(0, 10)), int(rng.integers(0, skv + 1))
    mask_mod = [
        lambda b, h, i, j: i >= j,
        lambda b, h, i, j: document[i] == document[j],
        lambda b, h, i, j: (document[i] == document[j]) & (i >= j) & (i - j <= n),
        lambda b, h, i, j: (j < ends) | (i >= j),
        lambda b, h, i, j: (abs(i - j) <= n) & (document[i] > 0),
    ][seed % 5]
    mask = block_mask(mask_mod, sq, skv)
    dense = mask.to_dense()[..., 0, 0].T
    function = Function(mask_mod, None, per_head=False, per_entry=False)
    entry = find_segments(evaluate(function, 0, 0, sq, skv)[1], 1000)
    found = np.zeros_like(dense)
    for q0, q1, first, end in entry.segments:
        left, right = band_sides(entry, [part for part in entry.segments if part.q0 == q0])
        for i in range(q0, q1):
            begin = first.key if left is None else max(first.key, i - left)
            found[i, begin : end.key if right is None else min(end.key, i + right + 1)] = True
    np.testing.assert_array_equal(found, dense)
    if (sequences := packed([entry], sq, skv)) is not None:
        found = np.zeros_like(dense)
        for e in range(len(sequences.starts_q) - 1):
            q, kv = (slice(*starts[e : e + 2]) for starts in (sequences.starts_q, sequences.starts_kv))
            i, j = np.arange(q.stop - q.start)[:, None], np.arange(kv.stop - kv.start)
            attends, band = np.ones((i.size, j.size), bool), sequences.band
            if band:
                shift = j.size - i.size if band.bottom_right else 0
                attends &= j >= (-np.inf if band.left is None else i + shift - band.left)
                attends &= j <= (np.inf if band.right is None else i + shift + band.right)
            found[q, kv] = attends
        np.testing.assert_array_equal(found, dense)


def test_rows_that_are_not_intervals_have_no_segments():
    """A gap in one row is enough."""
    assert block_mask(lambda b, h, i, j: (i != 70) | (j != 30), 100, 100).segments is None
    assert block_mask(lambda b, h, i, j: (i != 70) | (j != 0), 100, 100).segments is not None
    empty = block_mask(lambda b, h, i, j: i < j - 1000, 100, 100).segments
    assert empty is not None
    assert not empty[0].segments


def test_work_is_proportional_to_the_number_of_blocks():
    """One long row among short ones: padded lists of the forward pass and of the backward pass have at most twice the blocks."""
    kinds = np.eye(64, dtype=bool)
    kinds[:, 5] = True
    mask = BlockMask.from_blocks(kinds, mask_mod=lambda b, h, i, j: (i + j) % 2 == 0)
    tables = make_tables(mask, Sizes(4, 2, 1))
    lists = [entries for entries in (tables.direct, *tables.copied) if entries and entries.partial is not None]
    assert sum(entries.partial.size for entries in lists) <= 2 * mask.blocks
    full, masked = rectangles(mask, 1)
    assert not full
    assert max(len(part.keys) for part in masked) * len(masked) <= 2 * sum(len(part.keys) for part in masked)
    listed = np.zeros((64, 64), int)
    for part in masked:
        listed[np.ix_(part.keys, part.queries)] += part.partial >= 0
    np.testing.assert_array_equal(listed, mask.kinds[..., 0, 0] == PARTIAL)


def test_display():
    """The text is one line; the picture has one cell per block, and at most 128 in a row."""
    mask = block_mask(zoo.causal, 512, 256)
    assert repr(mask) == "<BlockMask 512 x 256: 7 of 8 blocks, 2 of them partial; sparsity 12.5 %>"
    assert mask.sparsity == 0.125
    html = mask._repr_html_()
    assert html.count("<rect") == 8
    assert "7 of 8 blocks" in html
    large = BlockMask.from_blocks(np.ones((300, 300), bool))
    assert large.picture().count("<rect") == 100**2


@pytest.mark.parametrize(
    "mask_mod", [zoo.causal, zoo.sliding_window(40), zoo.image_window(20, 3), zoo.chunked(100), zoo.checkered]
)
def test_masks_are_evaluated_on_the_gpu(mask_mod, fake):
    """Without arrays on the GPU, if there is one; with CuPy arrays there, too. The mask is the same as on numpy."""
    pairs = np.random.default_rng(0).random((300, 200)) < 0.3

    def with_array(b, h, q_idx, kv_idx, pairs):
        return pairs[kv_idx, q_idx] & mask_mod(b, h, q_idx, kv_idx)

    host, device = (block_mask(with_array, 200, 300, tensors={"pairs": x}) for x in (pairs, fake.asarray(pairs)))
    plain = block_mask(mask_mod, 200, 300)
    np.testing.assert_array_equal(host.kinds, device.kinds)
    np.testing.assert_array_equal(host.to_dense(), device.to_dense())
    np.testing.assert_array_equal(plain.to_dense()[..., 0, 0], dense_of(mask_mod, 200, 300))


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (2, 2), (3, 1), (3, 2), (5, 4), (1, 1), (40, 41)], ids=str)
@pytest.mark.parametrize("ends", [0, 1, 2])
def test_no_slice_has_one_query_and_one_key(shape, ends):
    """cuDNN cannot read the positions of a score function there; such masks are computed in another way."""
    functions = [
        lambda b, h, i, j: (i >= j) | (j < ends),
        lambda b, h, i, j: i + j == ends,
        lambda b, h, i, j: (j <= i + ends) & (i - j <= 1),
    ]
    for function in functions:
        mask = block_mask(function, *shape)
        for entry in mask.segments or ():
            found = slices(entry)
            every = [*(found or ()), *gradient_slices(found or ())]
            assert all((part.q1 - part.q0, part.k1 - part.k0) != (1, 1) for part in every)


BLOCK_SIZES = [64, 128, 256, 384, (128, 64), (32, 256), (256, 128), 1]


def blocks_of(dense, size):
    """The kinds of all blocks of a dense mask ``(Skv, Sq)``, written plainly."""
    q, kv = size
    kinds = np.zeros((-(-dense.shape[0] // kv), -(-dense.shape[1] // q)), np.uint8)
    for (j, i), _ in np.ndenumerate(kinds):
        block = dense[j * kv : (j + 1) * kv, i * q : (i + 1) * q]
        kinds[j, i] = FULL if block.all() else PARTIAL if block.any() else EMPTY
    return kinds


@pytest.mark.parametrize("lengths", [(1, 1), (128, 300), (300, 200), (700, 257)], ids=str)
@pytest.mark.parametrize("block", BLOCK_SIZES, ids=str)
def test_blocks_of_other_sizes_are_reported(block, lengths):
    """The mask is the same; blocks, sparsity and representation are those of the size."""
    if block == 1 and lengths[0] > 300:
        return
    size = block if isinstance(block, tuple) else (block, block)
    mask = block_mask(zoo.sliding_window(70), *lengths, block=block)
    dense = dense_of(zoo.sliding_window(70), *lengths)
    np.testing.assert_array_equal(mask.to_dense()[..., 0, 0], dense)
    expected = blocks_of(dense, size)
    np.testing.assert_array_equal(mask.block_kinds[..., 0, 0], expected)
    assert (mask.blocks, mask.partial) == (np.count_nonzero(expected), np.count_nonzero(expected == PARTIAL))
    assert mask.sparsity == pytest.approx(1 - mask.blocks / expected.size)
    assert (f"blocks of {size[0]} x {size[1]}" in repr(mask)) == (block != 128)
    assert mask.block == size


@pytest.mark.parametrize("seed", range(24))
def test_arrays_of_blocks_of_other_sizes(seed):
    """Full blocks, and blocks within a function, of heads and batch entries, against their dense form."""
    rng = np.random.default_rng(seed)
    block = BLOCK_SIZES[seed % (len(BLOCK_SIZES) - 1)]
    q, kv = block if isinstance(block, tuple) else (block, block)
    sq, skv = (int(rng.integers(1, 600)) for _ in range(2))
    shape = (-(-skv // kv), -(-sq // q), int(rng.integers(1, 3)), int(rng.integers(1, 3)))
    listed, full = rng.random(shape) < 0.5, rng.random(shape) < 0.5
    expand = lambda x: x.repeat(kv, axis=0).repeat(q, axis=1)[:skv, :sq]  # noqa: E731
    function = (np.arange(skv)[:, None] + np.arange(sq)) % 3 > 0
    options, expected = {}, expand(listed)
    if seed % 3:
        options, expected = {"mask_mod": lambda b, h, i, j: (i + j) % 3 > 0}, expected & function[:, :, None, None]
        if seed % 3 == 2:
            options, expected = {**options, "full": full}, expected | expand(listed & full)
    mask = BlockMask.from_blocks(listed, sq, skv, block=block, **options)
    np.testing.assert_array_equal(mask.to_dense(), expected)
    for (j, i, h, b), kind in np.ndenumerate(mask.kinds):
        tile = expected[j * 128 : (j + 1) * 128, i * 128 : (i + 1) * 128, h, b]
        assert kind != EMPTY or not tile.any()
        assert kind != FULL or tile.all()
    attention_of(mask, expected)


def attention_of(mask, attends):
    """Attention with a block mask is that with the dense mask."""
    skv, sq, heads, batch = attends.shape
    rng = np.random.default_rng(0)
    q, k, v = (np.asfortranarray(rng.standard_normal((8, heads, s, batch))) for s in (sq, skv, skv))
    out = attention(q, k, v, block_mask=mask)
    np.testing.assert_allclose(out, attention(q, k, v, mask=np.asfortranarray(attends)), atol=1e-6)


@pytest.mark.parametrize("size", [32, 64, 128, 256])
def test_listed_blocks_without_pairs_do_not_count(size):
    """The numbers of blocks are those of the pairs, whatever lists contain; so are the kinds of the last, shorter blocks."""
    listed = np.ones((-(-700 // size), -(-500 // size)), bool)
    mask = BlockMask.from_blocks(listed, 500, 700, mask_mod=lambda b, h, i, j: (i >= 128) & (j < 512), block=size)
    same = block_mask(lambda b, h, i, j: (i >= 128) & (j < 512), 500, 700, block=size)
    assert (mask.blocks, mask.partial, mask.sparsity) == (same.blocks, same.partial, same.sparsity)
    np.testing.assert_array_equal(mask.kinds, same.kinds)
    np.testing.assert_array_equal(mask.to_dense(), same.to_dense())
    assert len(mask.bits) == 0


def test_masks_are_read_only():
    """Calls store tables of a mask, which a later change would not reach; dense arrays of it are copies."""
    mask = block_mask(lambda b, h, i, j: (i + j) % 3 > 0, 200, 300, block=32)
    for copied in (mask, pickle.loads(pickle.dumps(mask)), BlockMask.from_blocks(np.ones((3, 2), bool), 200, 300)):
        with pytest.raises(AttributeError, match="sq of a BlockMask cannot be changed"):
            copied.sq = 100
        with pytest.raises(AttributeError, match="kinds of a BlockMask cannot be deleted"):
            del copied.kinds
        for array in (copied.kinds, copied.bits, copied.block_kinds):
            assert not array.flags.writeable
    dense = mask.to_dense()
    dense[...] = False
    assert mask.to_dense().any()


def test_full_blocks_with_a_short_last_block_are_packed():
    """The keys of every query are an interval, although the last block of keys is shorter than the others."""
    mask = BlockMask.from_blocks(np.array([[True, False], [True, False], [False, True], [False, True]]), 256, 450)
    assert method_of(mask, Sizes(1, 1, 2)).name == "packed"


def test_documents_of_small_blocks_are_packed():
    """Rows of full blocks of 64 are intervals, so no block of 128 needs a mask."""
    mask = BlockMask.from_blocks(np.kron(np.eye(3, dtype=bool), np.ones((3, 3), bool)), block=64)
    assert method_of(mask, Sizes(1, 1, 1)).name == "packed"
    attention_of(mask, mask.to_dense())


def test_fields_of_flex_attention_with_its_block_size():
    """``BLOCK_SIZE`` of the fields is ``block``."""
    counts, indices = np.array([[[1, 2]]]), np.array([[[[1, 0, 0], [0, 2, 0]]]])
    mask = BlockMask.from_kv_blocks(counts, indices, block=(64, 256), skv=700)
    expected = np.zeros((700, 128), bool)
    expected[256:512, :64] = expected[:256, 64:] = expected[512:, 64:] = True
    np.testing.assert_array_equal(mask.to_dense()[..., 0, 0], expected)
    assert mask.blocks == 3


@pytest.mark.parametrize(
    ("block", "error", "message"),
    [
        (96, ValueError, "block is 96; sizes must be multiples of 128, or divide it: choose 128"),
        ((128, 0), ValueError, r"block is \(128, 0\)"),
        (64.0, TypeError, "block is 64.0; it must be a number"),
        ((64, 64, 64), TypeError, "a pair"),
    ],
)
def test_sizes_that_are_not_made_of_tiles_are_refused(block, error, message):
    """The message has the value and the remedy."""
    with pytest.raises(error, match=message):
        block_mask(zoo.causal, 10, 10, block=block)
    with pytest.raises(error, match=message):
        BlockMask.from_blocks(np.ones((1, 1), bool), block=block)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_num_blocks": np.array([[[-1, 1]]])}, "kv_num_blocks has numbers from -1 to 1; there are 2 key blocks"),
        ({"kv_num_blocks": np.array([[[3, 1]]])}, "kv_num_blocks has numbers from 1 to 3; there are 2 key blocks"),
        ({"kv_num_blocks": np.ones((1, 1, 2))}, "kv_num_blocks is float64"),
        ({"kv_indices": np.zeros((1, 1, 2, 2))}, "kv_indices float64"),
        ({"full_kv_num_blocks": np.array([[[1, 1]]])}, "only full_kv_num_blocks is passed"),
        ({"full_kv_indices": np.array([[[[0, 1], [1, 0]]]])}, "only full_kv_indices is passed"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_wrong_fields_are_refused(change, message):
    """No block is left out silently."""
    fields = {"kv_num_blocks": np.array([[[1, 1]]]), "kv_indices": np.array([[[[0, 1], [1, 0]]]])}
    BlockMask.from_kv_blocks(**{name: x.astype("u4") for name, x in fields.items()})
    with pytest.raises(ValueError, match=message):
        BlockMask.from_kv_blocks(**fields | change)


def test_full_blocks_of_another_shape_are_refused():
    """Both shapes are named."""
    with pytest.raises(ValueError, match=r"full has shape \(2, 3\) and blocks \(3, 3\)"):
        BlockMask.from_blocks(np.ones((3, 3), bool), full=np.ones((2, 3), bool))


@pytest.mark.parametrize("use", [lambda h: h**2, lambda h: h << 1, lambda h: 1 ^ h, lambda h: {1: 2}[h], lambda h: 1 & h])
def test_every_use_of_an_index_that_is_not_given_is_refused(use):
    """The message names the option."""
    with pytest.raises(TypeError, match="uses h, and heads is None"):
        block_mask(lambda b, h, i, j: i + use(h) > j, 10, 10)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda mask: pickle.loads(pickle.dumps(mask))])
def test_a_copied_mask_is_used_after_the_original_is_freed(copied, fake):
    """Cached calls of the original are not calls of the copy."""
    mask = block_mask(lambda b, h, i, j: (i >= j) & ((i + j) % 3 > 0), 300, 300)
    x = fake.asarray(np.random.default_rng(0).standard_normal((16, 1, 300, 1)).astype("f2"), order="F")
    for _ in range(2):
        expected = attention(x, x, x, block_mask=mask).get()
    other = copied(mask)
    np.testing.assert_array_equal(other.to_dense(), mask.to_dense())
    del mask
    gc.collect()
    np.testing.assert_array_equal(attention(x, x, x, block_mask=other).get(), expected)


def test_functions_that_cannot_be_traced():
    """A function that kernels cannot compute can make a mask, and the mask has gradients."""
    mask = block_mask(lambda b, h, i, j: (i >= j) & ((i.astype("i8") + j) % 5 != 1), 640, 640)
    rng = np.random.default_rng(0)
    q, k, v, dout = (np.asfortranarray(rng.standard_normal((8, 1, 640, 1))) for _ in range(4))
    results = []
    for options in ({"block_mask": mask}, {"mask": mask.to_dense()}):
        out, pullback = attention_vjp(q, k, v, **options)
        results.append([out, *pullback(dout)])
    for x, y in zip(*results, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)


FLEX = {
    "positional": ((None, None, 256, 256), {}),
    "keywords": ((), {"B": None, "H": None, "Q_LEN": 256, "KV_LEN": 256}),
}


@pytest.mark.parametrize("name", FLEX)
def test_the_arguments_of_flex_attention(name):
    """The message has the call that takes their place."""
    arguments, keywords = FLEX[name]
    with pytest.raises(TypeError, match=r"is block_mask\(mask_mod, Q_LEN, KV_LEN, heads=H, batch=B\)"):
        block_mask(zoo.causal, *arguments, **keywords)


def test_branches_in_a_mask_function():
    """The message has numpy's functions in place of if, and, or."""

    def branches(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx if kv_idx < 4 else False

    with pytest.raises(TypeError, match=r"called with arrays of indices, so `if`.*np\.where\(condition, a, b\)"):
        block_mask(branches, 256, 256)


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
    """A block mask is that of mask_mod= and of logical operators, evaluated by CuPy, and by numpy if there are numpy arrays."""
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
    """Numpy evaluates a computed index, and its sum of two conditions is True where both hold; other operators agree."""
    tensors = {"table": np.arange(-50, 50)}

    def near(b, h, i, j, table):
        return abs(table[j - i + 50]) < 9

    def both(b, h, i, j, table):
        return add(near(b, h, i, j, table), i >= j) > 1

    with pytest.raises(TypeError, match=r"adds two conditions.*np\.where\(condition, 1, 0\)"):
        block_mask(both, 50, 50, tensors=tensors)
    mask = block_mask(lambda *x, table: np.where(near(*x, table), 1, 0) + (x[2] >= x[3]) > 1, 50, 50, tensors=tensors)
    want = dense_of(lambda b, h, i, j: (abs(j - i) < 9) & (i >= j), 50, 50)
    np.testing.assert_array_equal(mask.to_dense()[..., 0, 0], want)
