"""Mistakes with helpers, caches, shared prefixes, block masks, functions of the zoo, and directional derivatives."""

# mypy: ignore-errors
# (most mistakes are type errors)

import pickle

import numpy as np
from mistakes import causal, output, row

import cupy_sdpa
from cupy_sdpa import (
    BlockMask,
    Unsupported,
    alibi_slopes,
    attention,
    attention_backward,
    attention_jvp,
    block_mask,
    dropout_mask,
    fp8,
    layout,
    merge,
    merge_backward,
    shared_prefix_attention,
    zoo,
)


def halves(x):
    """The results over the first three keys and over the others, with their log-sum-exps."""
    parts = [attention(x.q, x.k[:, :, part], x.v[:, :, part], return_stats=True) for part in (slice(3), slice(3, None))]
    return [list(part) for part in zip(*parts, strict=True)]


def infinite_parts(x):
    """Halves with a log-sum-exp of inf, as flash-attention 2 returns it for a row without keys."""
    outs, stats = halves(x)
    stats[1] = stats[1].copy(order="F")
    stats[1][5, 1, 2] = np.inf
    return outs, stats


def merged(change=lambda outs, stats: (outs, stats), **options):
    """The merged results of two halves, of which one was changed."""
    return lambda x: merge(*change(*halves(x)), **options)


def dropped(**options):
    """A dropout mask with options."""
    return lambda x: dropout_mask(x.q, x.k, **{"dropout_p": 0.5, "seed": 1, **options})


HELPERS = [
    row("merge", "arrays instead of lists", lambda x: merge(x.dout, x.q), TypeError, "outs is a numpy.ndarray", "list"),
    row("merge", "pairs of an output and its statistics", lambda x: merge(list(zip(*halves(x), strict=True))), TypeError, "stats"),
    row("merge", "outputs without statistics", merged(lambda o, s: (o, [])), ValueError, "2 outs and 0 stats"),
    row("merge", "None instead of an output", merged(lambda o, s: ([o[0], None], s)), TypeError, "outs[1] is None"),
    row("merge", "outputs of two shapes with a layout", merged(lambda o, s: ([o[0].T, o[1].T[:, :1]], [a.T for a in s]), layout="bhsd"),
        ValueError, "outs[1] has shape (3, 1, 4, 16)", "must be (3, 4, 6, 16), the shape of outs[0] ["),
    row("merge", "inf of flash-attention 2 in the log-sum-exp", lambda x: merge(*infinite_parts(x)), ValueError,
        "stats[1] is inf in 1 of 72 rows, first at query 5, head 1 and batch item 2", "-np.inf", engine="numpy"),
    row("merge", "a generator", merged(lambda o, s: ((a for a in o), s)), TypeError, "outs is a generator", "list"),
    row("merge", "integers", merged(lambda o, s: ([a.astype("i4") for a in o], s)), TypeError, "int32", ".astype("),
    row("merge", "two axes", lambda x: merge([x.q[:, 0, :, 0]], [x.q[0, 0]]), ValueError, "(Dv, Hq, Sq, B)"),
    row("merge", "an output of the parts as out", lambda x: overlapping_merge(x), ValueError, "out overlaps outs[0]"),
    row("merge", "return_stats=1", merged(return_stats=1), TypeError, "return_stats is 1"),
    row("merge", "FP8 outputs", lambda x: merge([fp8.quantize(x.q)], [x.q[0]]), TypeError, "Fp8Array", "dequantize"),
    row("merge", "numpy and CuPy arrays", lambda x: merge([x.dout], [np.zeros((6, 4, 3), "f4")]), TypeError, "mixed",
        engine="fake"),
    row("merge", "lists as statistics", lambda x: merge([x.s], [x.s[0].tolist()]), TypeError, "stats[0] is a list", "numpy.asarray"),
    row("merge_backward", "a list as the gradient of the log-sum-exp", lambda x: merge_backward(*halves(x), x.dout, [1.0]), TypeError,
        "dstats is a list", "numpy.asarray"),
    row("merge_backward", "no gradient", lambda x: merge_backward(*halves(x), None), TypeError, "dout and dstats are None"),
    row("merge_backward", "the gradient of missing sinks", lambda x: merge_backward(*halves(x), x.dout, return_dsinks=True), ValueError,
        "return_dsinks is True and sinks is None"),
    row("merge_backward", "the gradient first", lambda x: merge_backward(x.dout, *halves(x)), TypeError, "outs is a numpy.ndarray", "list"),
    row("merge_backward", "a log-sum-exp less", lambda x: merge_backward(halves(x)[0], halves(x)[1][:1], x.dout), ValueError,
        "2 outs and 1 stats"),
    row("alibi_slopes", "an array of heads", lambda x: alibi_slopes(np.arange(4)), TypeError, "heads"),
    row("alibi_slopes", "no heads", lambda x: alibi_slopes(0), ValueError, "heads is 0"),
    row("alibi_slopes", "three heads", lambda x: alibi_slopes(3), lambda x: 2.0 ** -np.array([4, 8, 2])),
    row("dropout_mask", "no rate", lambda x: dropout_mask(x.q, x.k, seed=1), TypeError, "dropout_p"),
    row("dropout_mask", "the rate by position", lambda x: dropout_mask(x.q, x.k, 0.5), TypeError, "positional"),
    row("dropout_mask", "v", lambda x: dropout_mask(*x.qkv, dropout_p=0.5, seed=1), TypeError, "positional"),
    row("dropout_mask", "causal masks", dropped(causal=True), TypeError, "causal"),
    row("to_julia", "a layout of fewer axes", lambda x: layout.to_julia(x.q, "thd"), ValueError, "4 axes", "'thd'"),
    row("to_julia", "a list", lambda x: layout.to_julia([[1]], "bshd"), TypeError, "list", "numpy.asarray"),
    row("from_julia", "packed arrays to four axes", lambda x: layout.from_julia(x.pq, "bshd"), ValueError, "3 axes"),
]  # fmt: skip


def overlapping_merge(x):
    """A merge into one of its parts."""
    outs, stats = halves(x)
    return merge(outs, stats, out=outs[0])


def new_cache(pages=6, layers=1, batch=3, dtype="float32", **options):
    """An empty cache of float32 arrays."""
    return cupy_sdpa.KVCache(8, 2, pages=pages, batch=batch, page_size=4, dtype=dtype, numpy=True, layers=layers, **options)


def tokens(x, count=3, batch=3, dtype="f4"):
    """Tokens of all sequences, the same values for the same numbers."""
    return np.asfortranarray(np.random.default_rng(count).standard_normal((8, 2, count, batch)).astype(dtype))


def attended(cache, q, layer=0, **options):
    """Attention to all tokens of a layer."""
    pages = {"page_table": cache.table, "seq_lens_kv": cache.lengths, "causal": "bottom_right"}
    return attention(q, cache.keys(layer), cache.values(layer), **{**pages, **options})


def stepped(act, layers=1, **options):
    """What an act makes of a cache with three tokens in each sequence."""

    def make(x):
        c, t = new_cache(layers=layers, **options), tokens(x)
        for layer in range(layers):
            c.append(t, t, layer)
        return act(x, c, t)

    return make


def after(act, layers=1, count=3):
    """Attention of the last query after an act on a cache with three tokens in each sequence."""

    def make(x):
        def run(x, c, t):
            act(c, t)
            return attended(c, x.q[:, :, :1])

        return stepped(run, layers)(x)

    return make


def attention_to(*counts):
    """Attention of one query to tokens that were appended in steps."""

    def wanted(x):
        t = np.concatenate([tokens(x, count) for count in counts], axis=2)
        return output(x.q[:, :, :1], t, t)

    return wanted


def fails(function, *arguments, **options):
    """Call a function that raises."""
    try:
        function(*arguments, **options)
    except (ValueError, TypeError, RuntimeError, MemoryError):
        return
    raise AssertionError("no error")


CACHE = [
    row("KVCache", "a float head dim", lambda x: cupy_sdpa.KVCache(8.0, 2, pages=6, batch=3, numpy=True), TypeError, "head_dim",
        "integer"),
    row("KVCache", "integers as the dtype", lambda x: cupy_sdpa.KVCache(8, 2, pages=6, batch=3, dtype="int8", numpy=True),
        TypeError, "int8", "float8_e4m3fn"),
    row("KVCache", "the layout of packed tokens", lambda x: new_cache(layout="thd"), ValueError, "layout is 'thd'", "'bshd'"),
    row("KVCache", "a scale in an array without axes", lambda x: new_cache(dtype="float8_e4m3fn", k_scale=np.array(2.0)), TypeError,
        "k_scale is a numpy.ndarray", "a number for each of the 1 layers"),
    row("KVCache", "a scale of a bfloat16 cache", lambda x: cupy_sdpa.KVCache(8, 2, pages=6, batch=3, k_scale=1.0, numpy=True),
        ValueError, "FP8 caches"),
    row("KVCache", "a scale for each head", lambda x: cupy_sdpa.KVCache(8, 2, pages=6, batch=3, dtype="float8_e4m3fn", numpy=True,
        k_scale=[1.0, 2.0]), ValueError, "2 numbers", "1 layer"),
    row("KVCache", "a scale of 0", lambda x: cupy_sdpa.KVCache(8, 2, pages=6, batch=3, dtype="float8_e4m3fn", numpy=True, k_scale=0),
        ValueError, "k_scale is 0", "above 0"),
    *(row("KVCache", f"a scale of {scale}, which float32 or its inverse does not have", lambda x, scale=scale: cupy_sdpa.KVCache(
        8, 2, pages=6, batch=3, dtype="float8_e4m3fn", numpy=True, v_scale=scale), ValueError, f"v_scale is {scale}", "float32")
      for scale in (1e39, 1e-50)),
    row("KVCache", "no GPU", lambda x: cupy_sdpa.KVCache(8, 2, pages=6, batch=3), RuntimeError, "numpy=True", engine="no GPU"),
    row("KVCache.append", "no layer in a cache of several layers", stepped(lambda x, c, t: [c.append(t, t), c.append(t, t)], 2, pages=20),
        RuntimeError, "layers [1]", "layer="),
    row("KVCache.cancel_step", "a step whose layers are all appended", stepped(lambda x, c, t: c.cancel_step()), RuntimeError,
        "truncate()"),
    row("KVCache.append", "a layer twice", lambda x: layer_twice(x), RuntimeError, "layer 2 of this step is appended already",
        "layers [1] are not: pass layer="),
    row("KVCache.append", "other numbers of tokens in a later layer", lambda x: other_lengths(x), ValueError, "3", "2"),
    row("KVCache.append", "lengths instead of the layer", lambda x: new_cache().append(tokens(x), tokens(x), [3, 3, 3]), TypeError,
        "layer is [3, 3, 3]"),
    row("KVCache.append", "masked arrays", lambda x: new_cache().append(*[np.ma.array(tokens(x))] * 2), TypeError, "MaskedArray",
        "numpy arrays"),
    row("KVCache", "lengths that the user advances, too", stepped(lambda x, c, t: np.add(c.lengths, 1, out=c.lengths)), ValueError,
        "read-only"),
    row("KVCache", "a write to the page table", stepped(lambda x, c, t: c.table.fill(0)), ValueError, "read-only"),
    row("KVCache.append", "lengths for other sequences", lambda x: new_cache().append(tokens(x), tokens(x), seq_lens_q=[3, 3]),
        ValueError, "3 sequences"),
    row("KVCache.append", "negative lengths", lambda x: new_cache().append(tokens(x), tokens(x), seq_lens_q=[1, -1, 0]), ValueError,
        "truncate()"),
    row("KVCache.append", "a float as lengths", lambda x: new_cache().append(tokens(x), tokens(x), seq_lens_q=1.0), TypeError, "1.0",
        "integers"),
    row("KVCache.append", "other lengths than announced", lambda x: announced(x), ValueError, "omit seq_lens_q"),
    row("KVCache.append", "a call after one that ran out of pages", lambda x: retried(x), attention_to(3, 2)),
    row("KVCache.append", "a call after one with a wrong dtype",
        after(lambda c, t: [fails(c.append, t.astype("f8"), t), c.append(*[tokens(None, 2)] * 2)]), attention_to(3, 2)),
    row("KVCache.append", "the token's array is used again", after(lambda c, t: t.fill(0)), attention_to(3)),
    row("KVCache.append", "FP8 tokens in a float32 cache", lambda x: new_cache().append(*[fp8.quantize(tokens(x))] * 2), TypeError,
        "Fp8Array"),
    row("KVCache.begin_step", "two steps without an append", lambda x: [c.begin_step(1) for c in [new_cache()] * 2], RuntimeError,
        "layer 0"),
    row("KVCache.begin_step", "an array of shapes", lambda x: new_cache().begin_step(x.q), TypeError, "integers"),
    row("KVCache.begin_step", "lengths that are changed afterwards", lambda x: changed_lengths(x), lambda x: np.array([3, 3, 3])),
    row("KVCache.keys", "a layer that does not exist", lambda x: new_cache().keys(1), ValueError, "layer is 1"),
    row("KVCache.values", "a tensor as the layer", lambda x: new_cache().values(x.q), TypeError, "integer"),
    row("KVCache.keys", "the lengths of the host", stepped(lambda x, c, t: attended(c, x.q, seq_lens_kv=c.host_lengths)),
        stepped(lambda x, c, t: attended(c, x.q))),
    row("KVCache.fork", "a target that is not empty", after(lambda c, t: c.fork(0, 1)), ValueError, "release(1)"),
    row("KVCache.fork", "several targets", after(lambda c, t: c.fork(0, [1, 2])), TypeError, "integer"),
    row("KVCache.truncate", "a length above the present one", after(lambda c, t: c.truncate(0, 4)), ValueError, "from 0 to 3"),
    row("KVCache.truncate", "a float length", after(lambda c, t: c.truncate(0, 1.0)), TypeError, "1.0"),
    row("KVCache.truncate", "within a step", lambda x: within_step(x), RuntimeError, "before truncate()"),
    row("KVCache.release", "a sequence that does not exist", after(lambda c, t: c.release(3)), ValueError, "from 0 to 2"),
    row("KVCache.release", "a sequence twice", after(lambda c, t: [c.release(1), c.release(1), c.append(t, t, seq_lens_q=[0, 3, 0])]),
        attention_to(3)),
    row("KVCache.shared_prefix", "sequences without common pages", stepped(lambda x, c, t: np.int64(c.shared_prefix())),
        lambda x: np.int64(0)),
    row("shared_prefix_attention", "no prefix", lambda x: shared_prefix_attention(x.q, x.pages_k, x.pages_v), TypeError,
        "shared_prefix"),
    row("shared_prefix_attention", "dense arrays", lambda x: shared_prefix_attention(*x.qkv, 4), ValueError, "page_table"),
    row("shared_prefix_attention", "a prefix beyond the table", lambda x: prefixed(x, 12), ValueError, "from 0 to 8"),
    row("shared_prefix_attention", "sequences with other pages", lambda x: prefixed(x, 4), ValueError, "KVCache.shared_prefix"),
    row("shared_prefix_attention", "causal=True", lambda x: prefixed(x, 4, causal=True), ValueError, "'bottom_right'"),
    row("shared_prefix_attention", "layout=", lambda x: shared_prefix_attention(
        x.q.T, x.pages_k.T, x.pages_v.T, 4, **x.paged, layout="bshd"), ValueError, "layout"),
    row("shared_prefix_attention", "statistics of rows", lambda x: prefixed(x, 4, return_stats="max_sumexp"), ValueError,
        "return_stats is 'max_sumexp'", "False or True"),
    row("shared_prefix_attention", "a misspelled option", lambda x: prefixed(x, 4, casual=True), TypeError, "causal"),
    row("shared_prefix_attention", "FP8 pages", lambda x: shared_prefix_attention(
        x.q, fp8.quantize(x.pages_k), fp8.quantize(x.pages_v), 4, **x.paged), TypeError, "cupy_sdpa.attention"),
    row("shared_prefix_attention", "pages and lengths in lists", lambda x: prefixed(x, 4, page_table=[[3] * 3, [1, 4, 0]],
        seq_lens_kv=[5, 8, 4]), lambda x: attention(x.q, x.pages_k, x.pages_v, page_table=np.array([[3] * 3, [1, 4, 0]], "i4"),
        seq_lens_kv=x.integers(5, 8, 4))),
]  # fmt: skip


def layer_twice(x):
    """A step of three layers, in which layer 2 is appended twice."""
    c, t = new_cache(layers=3), tokens(x)
    for layer in (0, 2, 2):
        c.append(t, t, layer)


def other_lengths(x):
    """A step of two layers with two tokens in the second one."""
    c = new_cache(layers=2)
    c.append(tokens(x), tokens(x), 0)
    c.append(tokens(x, 2), tokens(x, 2), 1)


def announced(x):
    """An append with other lengths than the step has."""
    c = new_cache()
    c.begin_step([1, 2, 3])
    c.append(tokens(x), tokens(x), seq_lens_q=[3, 2, 1])


def retried(x):
    """Attention after an append that ran out of pages, and another one."""
    c = new_cache(pages=6)
    c.append(tokens(x), tokens(x))
    fails(c.append, tokens(x, 6), tokens(x, 6))
    c.append(tokens(x, 2), tokens(x, 2))
    return attended(c, x.q[:, :, :1])


def changed_lengths(x):
    """The lengths after a step whose array of lengths was changed after its announcement."""
    c, lengths = new_cache(), np.array([3, 3, 3])
    c.begin_step(lengths)
    lengths[:] = 1
    c.append(tokens(x), tokens(x))
    return c.lengths


def within_step(x):
    """A truncation between the announcement and the append."""
    c = new_cache()
    c.begin_step(1)
    c.truncate(0, 0)


def prefixed(x, prefix, **options):
    """Attention with a shared prefix."""
    return shared_prefix_attention(x.q, x.pages_k, x.pages_v, prefix, **{**x.paged, **options})


def masked(mask_mod, sq=6, skv=7, **options):
    """A block mask of a function."""
    return lambda x: block_mask(mask_mod, sq, skv, **options)


def blocks(*shape, value=True):
    """A bool array of blocks."""
    return np.full(shape, value)


MASKS = [
    row("block_mask", "FlexAttention's order B, H, Q_LEN, KV_LEN", lambda x: block_mask(zoo.causal, 3, 4, 6, 7), TypeError,
        "create_block_mask", "heads=H"),
    row("block_mask", "FlexAttention's B and H alone", lambda x: block_mask(zoo.causal, None, None, Q_LEN=6, KV_LEN=7), TypeError,
        "heads=H"),
    row("block_mask", "one length", lambda x: block_mask(zoo.causal, 6), TypeError, "skv"),
    row("block_mask", "a float length", masked(zoo.causal, 6.0), TypeError, "sq is 6.0", "integer"),
    row("block_mask", "a negative length", masked(zoo.causal, -1), ValueError, "sq is -1"),
    row("block_mask", "a function that returns numbers", masked(lambda b, h, i, j: (i >= j).astype(int)), TypeError, "int",
        "condition"),
    row("block_mask", "a function without return", masked(lambda b, h, i, j: None), TypeError, "None", "condition"),
    row("block_mask", "a function of two arguments", masked(lambda i, j: i >= j), TypeError, "2 positional arguments", "f(b, h, q_idx, kv_idx"),
    row("block_mask", "a score function", masked(zoo.relative_position), TypeError, "mask_mod"),
    row("block_mask", "the keys before the queries", masked(lambda b, h, kv_idx, q_idx: q_idx >= kv_idx), TypeError,
        "kv_idx, q_idx", "by position"),
    row("block_mask", "a function of heads without heads=", masked(lambda b, h, i, j: (i >= j) | (h == 0)), TypeError, "h",
        "pass heads=", "number of heads"),
    row("block_mask", "a function of the batch without batch=", masked(lambda b, h, i, j: (i >= j) | (b == 0)), TypeError,
        "batch is None", "number of batch items"),
    row("block_mask", "tensors that the function does not take", masked(zoo.causal, tensors={"a": np.ones(3)}), ValueError,
        "tensors has a"),
    row("block_mask", "a tensor that is a list", masked(zoo.causal_document, 6, 6, tensors={"document_id": [0] * 6}), TypeError,
        "tensors['document_id'] is a list", "numpy.asarray"),
    row("block_mask", "an array of its own that is too short", masked(lambda b, h, i, j: np.zeros(5)[i] == j, 6, 6), IndexError,
        "reads an array", "sq"),
    row("block_mask", "a tensor that is too short", masked(zoo.causal_document, 6, 6, tensors={"document_id": np.zeros(5, int)}),
        IndexError, "tensors['document_id'] (5,)", "sq"),
    row("block_mask", "a tensor that is too long", lambda x: attention(x.s, x.s, x.s, block_mask=block_mask(
        zoo.causal_document, 6, 6, tensors={"document_id": np.repeat([0, 1, 2], [3, 3, 2])})), lambda x: output(
        x.s, x.s, x.s, allowed=documents())),
    row("block_mask", "a mask of a wrong shape", masked(lambda b, h, i, j: np.ones((3, 5), bool)), ValueError, "(3, 5)", "mask_mod"),
    row("block_mask", "heads=True", masked(zoo.causal, heads=True), TypeError, "heads is True"),
    row("block_mask", "a tensor that changes afterwards", lambda x: changed_document(x), lambda x: output(
        x.s, x.s, x.s, allowed=documents())),
    row("block_mask", "the variable of a loop", lambda x: looped_masks(x), lambda x: [
        output(x.s, x.s, x.s, allowed=np.abs(np.arange(6)[:, None] - np.arange(6))[:, :, None, None] <= n) for n in (1, 3)]),
    row("BlockMask.from_blocks", "elements instead of blocks", lambda x: BlockMask.from_blocks(blocks(7, 6), 6, 7), ValueError,
        "sq is 6", "1 blocks of 128"),
    row("BlockMask.from_blocks", "integers", lambda x: BlockMask.from_blocks(np.ones((1, 1), int)), TypeError, "int64",
        ".astype(bool)"),
    row("BlockMask.from_blocks", "a list", lambda x: BlockMask.from_blocks([[True]]), TypeError, "list", "numpy"),
    row("BlockMask.from_blocks", "three axes", lambda x: BlockMask.from_blocks(blocks(1, 1, 4)), ValueError, "(1, 1, 4)"),
    row("BlockMask.from_blocks", "partial blocks without a function", lambda x: BlockMask.from_blocks(
        blocks(1, 1), full=blocks(1, 1, value=False)), ValueError, "mask_mod is None"),
    row("BlockMask.from_blocks", "the array changes afterwards", lambda x: changed_blocks(x), lambda x: np.ones((6, 6, 1, 1))),
    row("BlockMask.from_kv_blocks", "this package's order of axes", lambda x: BlockMask.from_kv_blocks(
        np.ones((1, 2, 3), int), np.zeros((1, 3, 2, 1), int)), ValueError, "(B, Hq, query blocks)"),
    row("BlockMask.from_kv_blocks", "an index beyond the blocks", lambda x: BlockMask.from_kv_blocks(
        np.ones((1, 1, 1), int), np.full((1, 1, 1, 1), 1)), ValueError, "0 to 0"),
    row("BlockMask.from_kv_blocks", "a block twice", lambda x: BlockMask.from_kv_blocks(
        np.full((1, 1, 1), 2), np.zeros((1, 1, 1, 2), int)), ValueError, "kv_indices", "twice"),
    row("BlockMask.from_kv_blocks", "full numbers without full indices", lambda x: BlockMask.from_kv_blocks(
        np.ones((1, 1, 1), int), np.zeros((1, 1, 1, 1), int), np.ones((1, 1, 1), int)), ValueError, "pass both"),
    row("BlockMask.from_kv_blocks", "the mask of FlexAttention", lambda x: BlockMask.from_kv_blocks(object(), None), TypeError,
        "kv_num_blocks is an object", "numpy"),
    row("BlockMask.to_dense", "the dense mask as mask=", lambda x: attention(x.s, x.s, x.s, mask=masked(zoo.causal, 6, 6)(
        x).to_dense()), lambda x: output(x.s, x.s, x.s, allowed=causal(6, 6))),
    row("BlockMask.picture", "the name of a head", lambda x: masked(zoo.causal)(x).picture("a"), TypeError, "head is 'a'", "0 to 0"),
    row("BlockMask.picture", "a float as the sequence", lambda x: masked(zoo.causal)(x).picture(0, 1.0), TypeError, "entry is 1.0",
        "0 to 0"),
    row("BlockMask.picture", "a head that does not exist", lambda x: masked(zoo.causal)(x).picture(head=4), IndexError, "head is 4",
        "1"),
    row("BlockMask", "a mask after pickling", lambda x: attention(x.s, x.s, x.s, block_mask=pickle.loads(pickle.dumps(
        masked(zoo.causal, 6, 6)(x)))), lambda x: output(x.s, x.s, x.s, allowed=causal(6, 6))),
]  # fmt: skip


def documents():
    """Two documents of three tokens."""
    ids = np.repeat([0, 1], 3)
    return ((ids[:, None] == ids) & (np.arange(6)[:, None] <= np.arange(6)))[:, :, None, None]


def changed_document(x):
    """A mask of documents, whose array has changed."""
    ids = np.repeat([0, 1], 3)
    mask = block_mask(zoo.causal_document, 6, 6, tensors={"document_id": ids})
    ids[:] = 0
    return attention(x.s, x.s, x.s, block_mask=mask)


def looped_masks(x):
    """Masks of functions that read the variable of a loop, which were created in the loop."""
    made = [block_mask(lambda b, h, i, j: abs(i - j) <= n, 6, 6) for n in (1, 3)]  # noqa: B023
    return [attention(x.s, x.s, x.s, block_mask=mask) for mask in made]


def changed_blocks(x):
    """The mask of an array of blocks that has changed."""
    listed = blocks(1, 1)
    mask = BlockMask.from_blocks(listed, 6, 6)
    listed[:] = False
    return mask.to_dense()


def with_zoo(mask_mod=None, score_mod=None, **tensors):
    """A call with functions of the zoo."""
    return lambda x: attention(x.s, x.s, x.s, mask_mod=mask_mod, score_mod=score_mod, tensors=tensors or None)


ZOO = [
    row(f"zoo.{name}", "the maker instead of its function", with_zoo(**{option: getattr(zoo, name)}), TypeError, f"pass {name}(...)")
    for option, name in [
        *(("score_mod", name) for name in ("softcap", "length_scaled")),
        *(("mask_mod", name) for name in ("sliding_window", "nearby", "dilated", "chunked", "image_window", "fixed")),
        *(("mask_mod", name) for name in ("with_global", "streaming", "strided")),
    ]
] + [
    row(f"zoo.{name}", f"no {tensor}", with_zoo(**{option: getattr(zoo, name)}), TypeError, f"'{tensor}'", "tensors has no arrays")
    for option, name, tensor in [
        ("score_mod", "alibi", "slopes"), ("score_mod", "temperature", "temperature"),
        ("mask_mod", "prefix_lm", "prefix"), ("mask_mod", "document", "document_id"),
        ("mask_mod", "causal_document", "document_id"), ("mask_mod", "permuted", "order"), ("mask_mod", "valid_keys", "valid"),
        ("mask_mod", "images", "image"), ("mask_mod", "tree", "tree_number"),
    ]
] + [
    row(f"zoo.{name}", "an option of the other kind", with_zoo(**{option: getattr(zoo, name)}), TypeError, option)
    for option, name in [
        ("mask_mod", "relative_position"), ("score_mod", "causal"),
    ]
] + [
    row("zoo.sliding_window", "a window of 3 keys, which is a size of 2", with_zoo(zoo.sliding_window(2)), lambda x: output(
        x.s, x.s, x.s, allowed=causal(6, 6) & ~causal(6, 6, -3))),
    row("zoo.t5_bucket", "no logarithmic buckets", lambda x: zoo.t5_bucket(x.s, buckets=2), ValueError, "buckets is 2", "at least 4"),
    row("zoo.t5_bias", "a table of one head", lambda x: zoo.t5_bias(np.zeros(32), 6, 6), ValueError, "(32,)", "(N, Hq)"),
    row("zoo.table_bias", "an index out of range", lambda x: zoo.table_bias(np.zeros((4, 2)), np.array([[0, 4]])), ValueError, "0 to 4", "4 rows"),
    row("zoo.table_bias", "the gradient of another bias", lambda x: zoo.table_bias(np.zeros((4, 2)), np.array([[0, 3]]))[1](np.zeros((2, 1, 2, 1))),
        ValueError, "(2, 1, 2, 1)", "(1, 2, 2, 1)"),
    row("zoo.swin_bias", "the table of another window", lambda x: zoo.swin_bias(np.zeros((9, 4)), 2, 3), ValueError, "9 rows", "15 distances"),
    row("zoo.chunked", "chunks of 0", lambda x: zoo.chunked(0), ValueError, "size is 0; it must be a number from 1"),
] + [
    row(f"zoo.{name}", f"{value} as {parameter}", lambda x, name=name, given={**others, parameter: value}: getattr(zoo, name)(**given),
        ValueError, f"{parameter} is {value}; it must be a number from {least}")
    for name, parameter, values, least, others in [
        ("softcap", "cap", (0, np.inf, -2, np.nan), "1.17", {}),
        ("length_scaled", "factor", (np.nan, np.inf), "-3.4", {}), ("sliding_window", "size", (-1, np.nan, 2**31), 0, {}),
        ("nearby", "size", (-1,), 0, {}), ("with_global", "count", (-1,), 0, {"size": 3}), ("streaming", "size", (-3,), 0, {"count": 1}),
        ("dilated", "size", (-1,), 0, {"step": 2}), ("fixed", "count", (-1,), 0, {"size": 4}), ("swin_bias", "width", (0,), 1, {"table": None, "height": 2}),
        ("image_window", "reach", (-1,), 0, {"width": 2}), ("strided", "size", (0,), 1, {}),
    ]
    for value in values
]  # fmt: skip


def of_blocks(x, *groups):
    """A block mask of all pairs for the arrays (8, 4, 6, 3)."""
    return BlockMask.from_blocks(np.ones((1, 1, *groups), bool), 6, 6)


def call(**options):
    """A call with a block mask."""
    return lambda x: attention(x.s, x.s, x.s, **{"block_mask": of_blocks(x), **options})


def dq_over_tensors(x):
    """Gradients with a block mask, and dq in the memory of a captured array."""
    memory = np.zeros_like(x.s)
    options = {
        "block_mask": of_blocks(x), "tensors": {"t": memory[:6, 0, 0, 0]}, "score_mod": lambda s, b, h, i, j, t: s + t[j],
    }  # fmt: skip
    out, stats = attention(x.s, x.s, x.s, return_stats=True, **options)
    return attention_backward(x.s, x.s, x.s, x.s, out, stats, dq=memory, **options)


def fields(**changes):
    """A mask of FlexAttention's fields, of which some are changed."""
    own = {"kv_num_blocks": np.array([[[1, 1]]]), "kv_indices": np.array([[[[0, 1], [1, 0]]]])}
    return lambda x: BlockMask.from_kv_blocks(**own | changes)


def branches(b, h, q_idx, kv_idx):
    """A mask function with a branch."""
    return q_idx >= kv_idx if kv_idx < 4 else False


OF_FIELDS = [
    row("block_mask", f"block={block!r}", lambda x, block=block: block_mask(zoo.causal, 10, 10, block=block), error, *words)
    for block, error, *words in (
        (96, ValueError, "block is 96; sizes must be multiples or divisors of 128: choose 128"),
        ((128, 0), ValueError, "block is (128, 0)"), (64.0, TypeError, "block is 64.0; it must be a number"),
    )
] + [
    row("BlockMask.from_blocks", "full blocks of another shape", lambda x: BlockMask.from_blocks(
        np.ones((3, 3), bool), full=np.ones((2, 3), bool)), ValueError, "full has shape (2, 3) and blocks (3, 3)"),
    row("block_mask", "a branch on an index", lambda x: block_mask(branches, 256, 256), TypeError, "called with arrays of indices",
        "np.where(condition, a, b)"),
    row("BlockMask.from_kv_blocks", "a negative number of blocks", fields(kv_num_blocks=np.array([[[-1, 1]]])), ValueError,
        "numbers from -1 to 1; there are 2 key blocks"),
    row("BlockMask.from_kv_blocks", "full indices without full numbers", fields(full_kv_indices=np.zeros((1, 1, 2, 2), int)),
        ValueError, "only full_kv_indices is passed"),
    row("zoo.dilated", "a step of 0", lambda x: zoo.dilated(5, 0), ValueError, "step is 0"),
    row("zoo.natten", "a window of even size", lambda x: zoo.natten(7, 8, 4), ValueError, "size is 4"),
    row("zoo.natten", "a dilated window larger than the image", lambda x: zoo.natten(7, 8, 3, 3), ValueError,
        "is 9; it must be at most 7"),
    row("attention", "a block mask for another batch", call(block_mask=BlockMask.from_blocks(np.ones((1, 1, 1, 2), bool), 6, 6)),
        ValueError, "1 heads and 2 batch items; q has 4 and 3"),
    row("attention", "a block mask and two other masks", call(mask=np.ones((6, 1, 1, 1), bool), mask_mod=zoo.causal), ValueError,
        "mask, mask_mod and block_mask are passed", "create block_mask with the condition of mask_mod"),
    row("attention", "a block mask and an unknown option", call(caussal=True), TypeError, "did you mean causal"),
    row("attention", "a block mask for shorter packed sequences", lambda x: attention(*[x.s[..., 0]] * 3, cu_seqlens_q=np.array(
        [0, 6], "i4"), cu_seqlens_kv=np.array([0, 6], "i4"), max_seqlen_q=6, max_seqlen_kv=7, block_mask=of_blocks(x)), ValueError,
        "max_seqlen_q is 6 and max_seqlen_kv 7"),
    row("attention", "a block mask and a score function that masks", call(
        score_mod=lambda s, b, h, i, j: np.where(i > j, s, -np.inf)), ValueError, "score_mod masks keys"),
    row("attention", "a block mask and arrays without a function", call(tensors={"x": np.ones(2)}), ValueError, "tensors has x"),
    row("attention_backward", "a block mask and dq over an array of a score function", dq_over_tensors, ValueError,
        "dq overlaps tensors['t']"),
]  # fmt: skip


def derived(**changes):
    """A derivative of the arrays (8, 4, 6, 3) with some arguments changed."""
    return lambda x: attention_jvp(**{"q": x.s, "k": x.s, "v": x.s, "dq": x.s, **changes})


def wrong_stats(make):
    """A derivative with a wrong array for the log-sum-exp."""
    return lambda x: attention_jvp(x.s, x.s, x.s, dv=x.s, stats=make(x.xp))


JVP = [
    row("attention_jvp", mistake, make, error, *words)
    for mistake, make, error, *words in (
        ("k of another head dim", derived(k=np.zeros((4, 4, 6, 3), "f4", "F")), ValueError, "the head dims", "8 and 4"),
        ("a list as a tangent", derived(dv=[1.0]), TypeError, "dv is a list; attention takes numpy and CuPy arrays"),
        ("num_splits", derived(num_splits=2), ValueError, "num_splits is 2"),
        ("batch_invariant=1", derived(batch_invariant=1), TypeError, "batch_invariant is 1; it must be True or False"),
        ("deterministic=1", derived(deterministic=1), TypeError, "deterministic is 1; it must be True or False"),
        ("a number as the wide arrays", derived(dq=None, widened=3), TypeError, "widened is an int"),
        ("the derivative in the memory of q", lambda x: attention_jvp(x.s, x.s, x.s, x.s, dout=x.s), ValueError,
         "dout overlaps q"),
    )
] + [
    row("attention_jvp", f"stats: {mistake}", wrong_stats(make), error, *words)
    for mistake, make, error, *words in (
        ("another length", lambda xp: xp.zeros((5, 4, 3), np.float32, order="F"), ValueError, "stats has shape (5, 4, 3)"),
        ("C order", lambda xp: xp.zeros((6, 4, 3), np.float32), ValueError, "stats has strides", "allocate it with order='F'"),
        ("integers", lambda xp: xp.zeros((6, 4, 3), np.int32, order="F"), TypeError, "stats is int32"),
        ("a list", lambda xp: [0.0], TypeError, "stats is a list"),
    )
] + [
    row("attention_jvp", "head dims that are too large", lambda x: attention_jvp(*[x.normal(136, 1, 4, 1)] * 6), Unsupported,
        "head dims 136 and 136 needs", "Use head dims with D + Dv, 2 D and 2 Dv up to 256 on Hopper", engine="fake"),
]  # fmt: skip

OF_BLOCK_MASKS = [*OF_FIELDS, *JVP]


ROWS = [*HELPERS, *CACHE, *MASKS, *ZOO]
ROWS += OF_BLOCK_MASKS
