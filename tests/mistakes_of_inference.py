"""Mistakes with rotary embeddings, lists of pages, trees, sums of weights, paged keys and values, caches and shared prefixes."""

# mypy: ignore-errors

import copy

import numpy as np
from mistakes import row

import cupy_sdpa
from cupy_sdpa import (
    KVCache,
    OutOfPages,
    Rope,
    Unsupported,
    apply_rope,
    attention,
    cu_seqlens_with_gaps,
    fp8,
    page_table_from_lists,
    shared_prefix_attention,
    tree_depths,
    tree_mask,
    weight_entropy,
    weight_sums,
    weight_sums_problems,
)

TOKENS = np.ones((8, 2, 3, 2), np.float32, order="F")


def appended(rope, positions=None, **options):
    """An append that rotates keys."""
    cache = KVCache(8, 2, **{"pages": 4, "batch": 2, "dtype": "float32", "numpy": True} | options)
    return cache.append(TOKENS, TOKENS, rope=rope, positions=positions)


def rotation(*given, **options):
    """A rotation that raises."""
    return lambda x: Rope(*given, **options)


def applied(rope=None, **options):
    """Queries that are rotated, and arguments that may be functions of the arrays."""
    return lambda x: apply_rope(x.q, rope or Rope(8), **{name: y(x) if callable(y) else y for name, y in options.items()})


ROWS = [
    row("Rope", "an odd number of channels", rotation(7), ValueError, "dim is 7", "even"),
    row("Rope", "the head dim as a float", rotation(64.0), TypeError, "dim is 64.0", "integer"),
    row("Rope", "a base and frequencies", rotation(4, base=100.0, frequencies=[1, 2]), ValueError, "base is 100.0 and frequencies", "one"),
    row("Rope", "a frequency for each channel", rotation(4, frequencies=np.ones(4)), ValueError, "shape (4,)", "pass 2 numbers"),
    row("Rope", "a frequency of infinity", rotation(4, frequencies=[1, np.inf]), ValueError, "inf", "finite"),
    row("Rope", "frequencies on the device", lambda x: Rope(4, frequencies=x.xp.ones(2, "f4")), TypeError, "CuPy array", "frequencies.get()",
        engine="fake"),
    row("Rope", "a base in text", rotation(4, base="100"), TypeError, "base is '100'", "a number"),
    row("Rope", "a base beyond float64", rotation(4, base=10**400), ValueError, "base is inf", "finite"),
    row("Rope", "a base whose frequencies overflow", rotation(64, base=1e-320), ValueError, "base is 1e-320", "at least 1e-150"),
    row("Rope", "a factor beyond float64", rotation(4, factor=10**400), ValueError, "factor is inf", "finite"),
    row("Rope", "theta of other libraries", rotation(4, theta=1e4), TypeError, "no parameter theta", "pass base="),
    row("Rope", "inverse frequencies", rotation(4, inv_freq=[1, 0.1]), TypeError, "no parameter inv_freq", "pass frequencies="),
    row("Rope", "a factor of 0", rotation(4, factor=0), ValueError, "factor is 0.0", "above 0"),
    row("Rope", "a form in text", rotation(4, interleaved="half"), TypeError, "interleaved is 'half'", "True or False"),
    row("apply_rope", "the number of channels as the rotation", lambda x: apply_rope(x.q, 8), TypeError, "rope is 8", "Rope(8)"),
    row("apply_rope", "more channels than the head dim", applied(Rope(16)), ValueError, "rope.dim is 16, but the head dim is 8", "Rope(8)"),
    row("apply_rope", "a start and lengths of keys", applied(start=3, seq_lens_kv=lambda x: x.lengths), ValueError, "start and seq_lens_kv are both passed", "one of them"),
    row("apply_rope", "positions of other libraries", applied(position_ids=3), TypeError, "no parameter position_ids", "pass positions="),
    row("apply_rope", "an offset of other libraries", applied(offset=3), TypeError, "no parameter offset", "pass start="),
    row("apply_rope", "one number as positions", applied(positions=3), TypeError, "positions is an int"),
    row("apply_rope", "positions of the sequences", applied(positions=np.zeros(3, "i4")), ValueError, "positions has shape (3,)", "(6,)", "(S,) or (S, B)"),
    row("apply_rope", "positions (B, S)", applied(positions=np.zeros((3, 6), "i4")), ValueError, "positions has shape (3, 6)", "(6, 3)"),
    row("apply_rope", "positions in float32", applied(positions=np.zeros((6, 3), "f4")), TypeError, "positions is float32", "int32"),
    row("apply_rope", "positions and a start", applied(positions=np.zeros(6, "i4"), start=3), ValueError, "positions and start are both passed", "omit start="),
    row("apply_rope", "positions of numpy with CuPy queries", lambda x: apply_rope(x.q, Rope(8), positions=np.zeros(6, "i4")), TypeError, "arrays are mixed",
        engine="fake"),
    row("KVCache.append", "positions without a rotation", lambda x: appended(None, positions=np.zeros(1, "i4")), ValueError, "without rope=", "omit positions="),
    row("KVCache.append", "positions of other tokens", lambda x: appended(Rope(8), positions=np.zeros(7, "i4")), ValueError, "positions has shape (7,)"),
    row("tree_depths", "a parent after its child", lambda x: tree_depths([-1, 2, 0]), ValueError, "the parent of token 1 is 2", "parents come first"),
    row("tree_depths", "parents in float", lambda x: tree_depths([0.5, 1]), TypeError, "parents is a list of float64", "integers"),
    row("tree_depths", "int64 parents on the device", lambda x: tree_depths(x.xp.zeros(3, "i8")), TypeError, "int32", engine="fake"),
    row("tree_depths", "an unknown layout", lambda x: tree_depths([-1, 0], layout="bs"), ValueError, "layout is 'bs'"),
    row("apply_rope", "a rotation of other libraries", lambda x: apply_rope(x.q, cos=x.q, sin=x.q), TypeError, "no parameter", "pass rope="),
    row("apply_rope", "fewer tokens than the last append", applied(seq_lens_kv=np.int32([9, 9, 9]), seq_lens_q=np.int32([7, 2, 0]), max_seqlen_q=7),
        ValueError, "max_seqlen_q is 7", "x has 6 tokens"),
    row("apply_rope", "a position beyond 64 bits", applied(start=2**63), ValueError, "start is 9223372036854775808", "below 2**62"),
    row("apply_rope", "lengths and offsets", applied(seq_lens_q=lambda x: x.lengths, cu_seqlens_q=lambda x: x.starts), ValueError,
        "seq_lens_q and cu_seqlens_q are both passed"),
    row("apply_rope", "offsets with a dense array", applied(cu_seqlens_q=lambda x: x.starts), ValueError, "x has shape (8, 4, 6, 3)", "packed (D, H, T)"),
    row("apply_rope", "a packed array without offsets", lambda x: apply_rope(x.pq, Rope(8)), ValueError, "x has shape (8, 4, 11)", "cu_seqlens_q="),
    row("apply_rope", "one position per token", applied(start=np.zeros((6, 3), "i4")), ValueError, "start has shape (6, 3)", "(3,)"),
    row("apply_rope", "lengths in float32", applied(seq_lens_kv=np.zeros(3, "f4")), TypeError, "seq_lens_kv is float32", "int32"),
    row("apply_rope", "float offsets", lambda x: apply_rope(x.pq, Rope(8), cu_seqlens_q=np.zeros(4, "f4")), TypeError, "cu_seqlens_q is float32",
        ".astype('int32')"),
    row("apply_rope", "offsets that fall", lambda x: apply_rope(x.pq, Rope(8), cu_seqlens_q=np.array([0, 8, 5, 11], "i4")), ValueError,
        "cu_seqlens_q is [0, 8, 5, 11]", "must rise"),
    row("apply_rope", "lengths beyond the tokens", applied(seq_lens_kv=np.array([9, 9, 9], "i4"), seq_lens_q=np.array([6, 7, 0], "i4")), ValueError,
        "seq_lens_q has lengths from 0 to 7", "from 0 to 6"),
    row("apply_rope", "a start of True", applied(start=True), TypeError, "start is True", "a number"),
    row("apply_rope", "integers", lambda x: apply_rope(x.table[:, :, None, None], Rope(2)), TypeError, "x is int32", "float16"),
    row("apply_rope", "an array in C order", lambda x: apply_rope(x.q.copy(order="C"), Rope(8)), ValueError, "axis 0 must be contiguous"),
    row("apply_rope", "lengths of numpy with CuPy queries", lambda x: apply_rope(x.q, Rope(8), seq_lens_kv=np.zeros(3, "i4")), TypeError, "arrays are mixed",
        "cupy.asarray", engine="fake"),
    row("KVCache.append", "True as the rotation", lambda x: appended(True), TypeError, "rope is True", "Rope(8)"),
    row("KVCache.append", "a rotation to an FP8 cache", lambda x: appended(Rope(8), dtype="float8_e4m3fn"), ValueError,
        "the cache is float8_e4m3fn", "apply_rope(k, rope, start=...)"),
]  # fmt: skip


def lists(**changed):
    """A page table from lists of pages, of which some are changed; None removes an argument."""

    def make(x):
        given = {"indptr": [0, 2, 3], "indices": [5, 1, 4], "last_page_len": [3, 4], "page_size": 4} | changed
        arrays = {name: x.xp.asarray(np.array(y, "i4")) if isinstance(y, list) else y for name, y in given.items()}
        return page_table_from_lists(**arrays)

    return make


def treed(parents=(-1, 0, 0, 2), **changed):
    """The mask of a tree for six pages of 4 keys, three sequences."""

    def make(x):
        given = {"k": x.pages_k, "v": x.pages_v, **x.paged, **changed}
        return tree_mask(parents(x) if callable(parents) else parents, **given)

    return make


def reset_within_a_step(x):
    """The lengths of a cache that is reset twice, first with an announced step."""
    cache = KVCache(8, 2, pages=4, batch=3, dtype="float32", numpy=x.xp is np)
    cache.begin_step([3, 2, 0])
    for _ in range(2):
        cache.reset()
    return cache.host_lengths


def after(path, *, sequence=0, pages=6, change=lambda cache: None):
    """A cache that keeps a path of a draft of 4 tokens."""

    def make(x):
        cache = KVCache(8, 2, pages=pages, batch=3, page_size=4, dtype="float32", numpy=x.xp is np)
        draft = x.xp.asarray(np.ones((8, 2, 4, 3), "f4", order="F"))
        cache.append(draft, draft, seq_lens_q=[4, 2, 0])
        change(cache)
        cache.keep(sequence, path(x) if callable(path) else path)

    return make


ROWS += [
    row("tree_mask", "a parent after its child", treed([-1, 2, 0]), ValueError, "the parent of token 1 is 2", "from -1 to 0", "parents come first"),
    row("tree_mask", "a first token that is its own parent", treed([0, 0]), ValueError, "the parent of token 0 is 0; it must be -1"),
    row("tree_mask", "parents in float", treed([0.5, 1]), TypeError, "parents is a list of float64", "integers"),
    row("tree_mask", "parents of other sequences", treed(np.zeros((4, 2), int)), ValueError, "parents has shape (4, 2)", "(Sq, 3)"),
    row("tree_mask", "a tree of 3000 tokens", treed([*range(-1, 2999)]), ValueError, "3000 tokens", "at most 2048"),
    row("tree_mask", "queries before keys", treed(np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)), ValueError, "not the mask of a tree", "pass parents.T"),
    row("tree_mask", "a mask without an ancestor", treed(np.array([[1, 1, 0], [0, 1, 1], [0, 0, 1]], bool)), ValueError,
        "query 2 does not attend to key 0", "[0, 1, 2]"),
    row("tree_mask", "a mask of all keys", treed(np.ones((24, 4), bool)), ValueError, "bool and has shape (24, 4)", "(Sq, Sq, 3)"),
    row("tree_mask", "packed keys", treed(k=np.zeros((8, 2, 9), "f4"), page_table=None, seq_lens_kv=None), ValueError, "k has shape (8, 2, 9)"),
    row("tree_mask", "a page table of one sequence", treed(page_table=np.zeros(2, "i4")), ValueError, "page_table has shape (2,)", "(P, B)"),
    row("tree_mask", "int64 parents on the device", treed(lambda x: x.xp.zeros(3, "i8")), TypeError, "parents is", "int32", engine="fake"),
    row("tree_mask", "a bool mask on the device", treed(lambda x: x.xp.zeros((3, 3), bool)), TypeError, "bool CuPy array", "numpy array", engine="fake"),
    row("tree_mask", "parents of CuPy and keys of numpy", treed(lambda x: x.xp.zeros(3, "i4"), k=np.zeros((8, 2, 9, 3), "f4"), page_table=None, seq_lens_kv=None),
        TypeError, "parents is a CuPy array", "parents.get()", engine="fake"),
    row("tree_mask", "a tree of fewer tokens than the draft", treed(seq_lens_q=np.int32([5, 1, 0]), max_seqlen_q=5), ValueError, "max_seqlen_q is 5",
        "the tree has 4", "after the append"),
    row("tree_mask", "a packed draft", treed(cu_seqlens_q=np.int32([0, 1, 2, 3])), ValueError, "packed queries are not supported", "(D, Hkv, S, B)"),
    row("attention", "a tree of fewer tokens", lambda x: attention(x.q, x.pages_k, x.pages_v, **x.paged, **treed()(x)), IndexError,
        "tree_number", "(3, 4)", "q_idx has 6 values"),
    row("KVCache.keep", "a token after the draft", after([0, 4]), ValueError, "path contains 4", "sequence 0 has 4 tokens of the last step"),
    row("KVCache.keep", "a path that does not ascend", after([0, 2, 1]), ValueError, "1 after 2", "sorted(path)"),
    row("KVCache.keep", "one number", after(2), ValueError, "path has shape ()", "one axis"),
    row("KVCache.keep", "fractions", after([0.0, 1.0]), TypeError, "path is [0.0, 1.0]", "integers"),
    row("KVCache.keep", "a path of CuPy", after(lambda x: x.xp.zeros(2, "i4")), TypeError, "path is a CuPy array", "path.get()", engine="fake"),
    row("KVCache.keep", "a sequence that the cache lacks", after([0], sequence=3), ValueError, "sequence is 3", "from 0 to 2"),
    row("KVCache.keep", "after the next step began", after([0], change=lambda cache: cache.begin_step(1)), RuntimeError, "a step is announced", "before keep()"),
    row("KVCache.keep", "more shared pages than free ones", after([0, 2], pages=2, change=lambda cache: cache.fork(0, 2)), OutOfPages,
        "1 pages that sequence 0 shares, but 0 of 2 are free", "release"),
    row("KVCache.reorder", "a sequence that the cache lacks", after([], change=lambda cache: cache.reorder([0, 3, 1])), ValueError, "order[1] is 3",
        "from 0 to 2", "release(1)"),
    row("KVCache.reorder", "-1 for a sequence that ends", after([], change=lambda cache: cache.reorder([0, 1, -1])), ValueError, "order[2] is -1", "release(2)"),
    row("KVCache.reorder", "an order of some sequences", after([], change=lambda cache: cache.reorder([1, 0])), ValueError, "order has shape (2,)", "3 numbers"),
    row("KVCache.reorder", "fractions", after([], change=lambda cache: cache.reorder([0.0, 1.0, 2.0])), TypeError, "order is [0.0", "integers"),
    row("KVCache.reorder", "an order of CuPy", lambda x: after([], change=lambda cache: cache.reorder(x.xp.zeros(3, "i4")))(x), TypeError,
        "order is a CuPy array", "order.get()", engine="fake"),
    row("KVCache.reorder", "within a step", after([], change=lambda cache: (cache.begin_step(1), cache.reorder([0, 0, 0]))), RuntimeError,
        "a step is announced", "before reorder()"),
    row("KVCache.swap", "a sequence that the cache lacks", after([], change=lambda cache: cache.swap(0, 3)), ValueError, "sequence is 3", "from 0 to 2"),
    row("KVCache.swap", "within a step", after([], change=lambda cache: (cache.begin_step(1), cache.swap(0, 1))), RuntimeError, "before swap()"),
    row("KVCache.reset", "twice, and within a step", lambda x: reset_within_a_step(x), lambda x: np.zeros(3, int)),
    row("KVCache.view", "lengths of other queries after padding was appended", lambda x: after([], change=lambda cache: attention(
        x.q[:, :, :4], **cache.view(seq_lens_q=np.float32([1, 2, 0]))))(x), TypeError, "seq_lens_q is float32"),
    row("cu_seqlens_with_gaps", "a first start below 0", lambda x: cu_seqlens_with_gaps([-3, 5], [4, 5]), ValueError, "starts begins with -3",
        "0 or more"),
    row("cu_seqlens_with_gaps", "an end beyond int32", lambda x: cu_seqlens_with_gaps([3, 2**31 - 1], [4, 5]), ValueError,
        "ends at 2147483652", "below 2**31"),
    row("page_table_from_lists", "an array of float32", lists(indices=np.ones(3, "f4")), TypeError, "indices is float32", ".astype('int32')"),
    row("page_table_from_lists", "two axes", lists(indptr=np.zeros((2, 3), "i4")), ValueError, "indptr has shape (2, 3)", "(B + 1,)"),
    row("page_table_from_lists", "the last pages of other sequences", lists(last_page_len=[1]), ValueError, "last_page_len has shape (1,)", "(2,)"),
    row("page_table_from_lists", "a full last page as 0", lists(last_page_len=[0, 4]), ValueError, "last_page_len of sequence 0 is 0", "from 1 to page_size, 4"),
    row("page_table_from_lists", "lists beyond the indices", lists(indptr=[0, 2, 9]), ValueError, "[0, 2, 9]", "the 3 indices"),
    row("page_table_from_lists", "a page size of 0", lists(page_size=0), ValueError, "page_size is 0"),
    row("page_table_from_lists", "lists on the device", lists(), ValueError, "max_pages is None", "pass max_pages=", engine="fake"),
    row("page_table_from_lists", "a list of fractions", lambda x: page_table_from_lists([0, 1.5], [1], [1], page_size=4), TypeError,
        "indptr is a list of float64", "integers"),
    row("cu_seqlens_with_gaps", "the padded offsets of Transformer Engine", lambda x: cu_seqlens_with_gaps(x.starts, x.lengths), ValueError,
        "lengths has shape (3,)", "(4,)"),
    row("cu_seqlens_with_gaps", "sequences that overlap", lambda x: cu_seqlens_with_gaps(np.int32([0, 3]), np.int32([5, 1])), ValueError,
        "sequence 0 ends at 5", "sequence 1 starts at 3"),
    row("cu_seqlens_with_gaps", "a negative length", lambda x: cu_seqlens_with_gaps(np.int32([0, 3]), np.int32([2, -1])), ValueError,
        "lengths of sequence 1 is -1"),
    row("KVCache.truncate", "a part of a shared page without a free page", after([], pages=2, change=lambda cache: (cache.fork(0, 2), cache.truncate(0, 3))),
        OutOfPages, "truncate() writes to 1 pages that sequence 0 shares, but 0 of 2 are free"),
    row("KVCache.view", "after padding was appended and tokens were removed", after([], change=lambda cache: (cache.truncate(1, 1), cache.view())), RuntimeError,
        "counts [4, 2, 0]", "unknown which queries are padding"),
    row("KVCache.view", "a layer that the cache lacks", lambda x: KVCache(8, 2, pages=4, batch=2, numpy=True).view(1), ValueError,
        "layer is 1", "from 0 to 0"),
]  # fmt: skip


def as_lists(options):
    """Options whose arrays are lists."""
    return {name: x.tolist() for name, x in options.items()}


def nearby(keys):
    """A block mask of 6 queries and some keys, and three batch items."""
    return cupy_sdpa.block_mask(lambda b, h, i, j: abs(i - j) <= 2 + 2 * b, 6, keys, batch=3)


def summed(**options):
    """The weights of the keys with options."""
    return lambda x: weight_sums(x.q, x.k, **options)


ROWS += [
    *[row(name, "the arrays of a cache, with its values", lambda x, call=call: call(x.q, k=x.pages_k, v=x.pages_v, **x.paged), TypeError,
        "option v", "q and k", "del view['v']")
      for name, call in (("weight_sums", weight_sums), ("weight_entropy", weight_entropy), ("weight_sums_problems", weight_sums_problems))],
    row("weight_sums", "a bias", summed(bias=np.zeros((7, 6, 1, 1), "f4")), Unsupported, "with bias", "score function"),
    *[row("weight_entropy", f"with {name}", lambda x, name=name, value=value: weight_entropy(x.q, x.k, **{name: value}), Unsupported, f"with {name}", words)
      for name, value, words in (
          ("bias", np.zeros((7, 6, 1, 1), "f4"), "only if scores are scale * q k"), ("softcap", 2.0, "only if scores are scale * q k"),
          ("alibi_slopes", np.ones(4, "f4"), "only if scores are scale * q k"), ("score_mod", lambda s, b, h, i, j: s, "Pass masks as mask="),
          ("batch_invariant", True, "its own call"), ("layout", "bshd", "(head_dim, heads, seq, batch)"),
      )],
    row("weight_entropy", "dropout", lambda x: weight_entropy(x.q, x.k, dropout_p=0.5, seed=1), Unsupported, "with dropout_p", "before dropout"),
    row("weight_entropy", "values as a third array", lambda x: weight_entropy(x.q, x.k, x.v), TypeError, "3 arguments are passed by position"),
    row("weight_entropy", "keys of another head dim", lambda x: weight_entropy(x.q, x.v), ValueError, "head dims (axis 0) of q and k differ, 8 and 16"),
    row("weight_entropy", "numpy keys with CuPy queries", lambda x: weight_entropy(x.q, x.k.get()), TypeError, "arrays are mixed", engine="fake"),
    row("weight_sums", "an invariant call", summed(batch_invariant=True), Unsupported, "with batch_invariant", "its own call"),
    row("weight_sums", "dropout", summed(dropout_p=0.5, seed=1), Unsupported, "with dropout_p", "before dropout"),
    row("weight_sums", "a layout in C order", summed(layout="bshd"), Unsupported, "with layout", "(head_dim, heads, seq, batch)"),
    row("weight_sums", "packed queries to pages", lambda x: weight_sums(
        x.pq, x.pages_k, cu_seqlens_q=x.starts, max_seqlen_q=6, **x.paged), Unsupported, "page_table and cu_seqlens_q", "seq_lens_q="),
    row("weight_sums", "values as a third array", lambda x: weight_sums(x.q, x.k, x.v), TypeError, "3 arguments are passed by position"),
    row("weight_sums", "per_kv_head as a number", summed(per_kv_head=2), TypeError, "per_kv_head is 2", "True or False"),
    row("weight_sums", "numpy keys with CuPy queries", lambda x: weight_sums(x.q, x.k.get()), TypeError, "arrays are mixed", engine="fake"),
    row("weight_sums", "a page table in a list", lambda x: weight_sums(x.q, x.pages_k, **as_lists(x.paged)),
        lambda x: weight_sums(x.q, x.pages_k, **x.paged)),
    row("attention", "a page table in a list, beside a block mask", lambda x: attention(
        x.q, x.pages_k, x.pages_v, **as_lists(x.paged), block_mask=nearby(8)),
        lambda x: attention(x.q, x.pages_k, x.pages_v, **x.paged, block_mask=nearby(8))),
    row("attention", "offsets in a list, beside a block mask of several sequences", lambda x: attention(
        x.pq, x.pk, x.pv, **x.packed | {"cu_seqlens_q": x.starts.tolist()}, block_mask=nearby(6)),
        lambda x: attention(x.pq, x.pk, x.pv, **x.packed, block_mask=nearby(6))),
    row("page_table_from_lists", "a page size beyond 32 bits", lambda x: cupy_sdpa.page_table_from_lists([0, 2], [0, 1], [3],
        page_size=2**31), ValueError, "page_size is 2147483648", "below 2**31"),
    row("page_table_from_lists", "more tokens than 32 bits", lambda x: cupy_sdpa.page_table_from_lists([0, 3], [0, 1, 2], [3],
        page_size=2**30), ValueError, "2147483651 tokens", "below 2**31"),
    row("weight_sums_problems", "dropout", lambda x: weight_sums_problems(x.q, x.k, dropout_p=0.5, seed=1), Unsupported, "with dropout_p"),
]  # fmt: skip


def zeros(*shape, dtype="f4"):
    """An array of zeros."""
    return np.zeros(shape, dtype, order="F")


def ints(*shape, dtype="i4"):
    """Integers of 0."""
    return zeros(*shape, dtype=dtype)


def paged(function=attention, **changed):
    """A call with the pages, and changed arguments; None removes one."""

    def make(x):
        given = {"q": x.q, "k": x.pages_k, "v": x.pages_v, **x.paged, **changed}
        given = {name: value for name, value in given.items() if value is not None}
        return function(given.pop("q"), given.pop("k"), given.pop("v"), **given)

    return make


def packed(**changed):
    """The arguments of three packed sequences of queries."""
    return {"q": zeros(8, 4, 11), "cu_seqlens_q": ints(4), "max_seqlen_q": 6} | changed


def made(x, **options):
    """A cache of three sequences in the memory of the arrays."""
    sizes = {"pages": 6, "batch": 3, "page_size": 4, "dtype": str(x.dtype), "numpy": x.xp is np}
    return KVCache(16, 2, **(sizes | options))


def appended_to(k, v=None, *, seq_lens_q=None, **options):
    """An append to a cache of shapes and dtypes, or of arrays of FP8."""

    def array(x, kind):
        if callable(kind):
            return kind(x)
        shape, dtype = kind if isinstance(kind[0], tuple) else (kind, x.dtype)
        return x.xp.asarray(np.ones(shape, dtype, order="F"))

    return lambda x: made(x, **options).append(array(x, k), array(x, k if v is None else v), seq_lens_q=seq_lens_q)


def quantized(*given, **options):
    """New tokens in FP8."""
    return lambda x: fp8.quantize(x.xp.asarray(np.ones((16, 2, 3, 3), np.float16, order="F")), *given, **options)


def mixed(x, name, moved):
    """A call whose arrays are numpy's but one, or the other way around."""
    given = {"q": x.q, "k": x.pages_k, "v": x.pages_v, **x.paged}
    return paged(**{key: y.get() if (key == name) != moved else y for key, y in given.items()})(x)


def in_capture(x, **scales):
    """An append to an FP8 cache in a capture."""
    cache, tokens = made(x, dtype="float8_e4m3fn", **scales), x.xp.asarray(np.ones((16, 2, 1, 3), np.float16, order="F"))
    cache.begin_step()
    with x.xp.cuda.Stream() as stream:
        stream.begin_capture()
        try:
            cache.append(tokens, tokens)
        finally:
            stream.end_capture()


ONE, FP8 = (16, 2, 1, 3), {"dtype": "float8_e4m3fn"}
ROWS += [
    # paged keys and values
    row("attention", "pages of other packed sequences", paged(**packed(cu_seqlens_q=ints(3))), ValueError, "shape (2, 3)", "2 sequences, as cu_seqlens_q"),
    row("attention", "offsets of keys in pages", paged(cu_seqlens_kv=ints(4)), ValueError, "cu_seqlens_kv (4,)", "page_table (2, 3)", "omit cu_seqlens_kv"),
    row("attention", "offsets of dense queries to pages", paged(cu_seqlens_q=ints(4), max_seqlen_q=3), ValueError, "q has 4 dimensions",
        "(head_dim, heads, total), because cu_seqlens_q is passed"),
    *[row("attention", f"num_splits and {name}", paged(num_splits=2, **options), ValueError, "num_splits is 2", f"with {name}", "omit")
      for name, options in {
          "bias": {"bias": zeros(8, 6, 1, 1)}, "mask": {"mask": zeros(8, 1, 1, 3) == 0}, "alibi_slopes": {"alibi_slopes": zeros(4)},
          "dropout_p": {"dropout_p": 0.5, "seed": 1}, "score_mod": {"score_mod": lambda s, b, h, i, j: 2 * s},
          "mask_mod": {"mask_mod": lambda b, h, i, j: (i + j) % 2 == 0}, "cu_seqlens_q": packed(),
          "514 rows of a key/value head (at most 512)": {"q": zeros(8, 4, 257, 3)},
      }.items()],
    *[row("attention", f"{number} chunks of pages", paged(num_splits=number), ValueError, f"num_splits is {number}", "a number of chunks")
      for number in (0, 1.5)],
    row("attention", "pages with three axes", paged(k=zeros(8, 2, 24)), ValueError, "k has 3 dimensions (8, 2, 24)", "because page_table is passed"),
    *[row("attention", f"{'numpy' if moved else 'CuPy'} {name} among other arrays", lambda x, name=name, moved=moved: mixed(x, name, not moved), TypeError,
          "arrays are mixed", f"{name} is a {'numpy' if moved else 'CuPy'} array", "Move them to one device with cupy.asarray", engine="fake")
      for name, moved in (("q", True), ("page_table", True), ("page_table", False), ("seq_lens_kv", True), ("k", False))],
    *[row("attention", f"pages of 48 keys, {sq} queries", lambda x, sq=sq: paged(
        q=x.q[:, :, :sq], k=x.normal(8, 2, 48, 6), v=x.normal(16, 2, 48, 6))(x), Unsupported, "the page size is 48", "use pages of 64 keys", engine="fake")
      for sq in (1, 3)],
    # caches
    *[row("KVCache", f"{name}={value}", lambda x, name=name, value=value: made(x, **{name: value}), ValueError, f"{name} is {value}")
      for name, value in (("max_length", 0), ("layers", -1), ("page_size", 0), ("head_dim_v", 0))],
    row("KVCache", "too many heads", lambda x: KVCache(4, 1 << 30, pages=4, batch=2, page_size=2, numpy=True), ValueError,
        "max_length is 8 with 1073741824 heads", "2**31"),
    row("KVCache", "a shallow copy", lambda x: copy.copy(made(x)), TypeError, "share its pages", "copy.deepcopy", "fork()"),
    row("KVCache.begin_step", "huge lengths", lambda x: made(x, max_length=5).begin_step([2**62, 0, 0]), ValueError, f"gets {2**62}, but max_length is 5"),
    row("KVCache.begin_step", "unsigned lengths", lambda x: made(x).begin_step(np.full(3, 2**64 - 1, np.uint64)), ValueError, "must not be negative"),
    row("KVCache.begin_step", "more tokens than pages", lambda x: made(x).begin_step([24, 1, 0]), OutOfPages, "needs 7 pages, but 6 of 6 are free; release"),
    row("KVCache.begin_step", "lengths on the device", lambda x: made(x).begin_step(x.lengths), TypeError, "seq_lens_q is a CuPy array", "seq_lens_q.get()", engine="fake"),
    row("KVCache.append", "a list", lambda x: made(x).append([1.0], x.q), TypeError, "k is a list", "the cache consists of numpy arrays"),
    row("KVCache.append", "tokens (B, S, Hkv, D)", appended_to((3, 5, 2, 16)), ValueError, "k has shape (3, 5, 2, 16)", "pass k.T"),
    row("KVCache.append", "tokens (B, Hkv, S, D)", appended_to((3, 2, 5, 16)), ValueError, "k has shape (3, 2, 5, 16)", "k.transpose(3, 1, 2, 0)"),
    row("KVCache.append", "tokens in C order", lambda x: made(x).append(*[x.xp.ones((16, 2, 5, 3), x.dtype)] * 2), ValueError,
        "stride", "asfortranarray(k)"),
    row("KVCache.append", "packed tokens without lengths", appended_to((16, 2, 5)), ValueError, "packed arrays need", "seq_lens_q="),
    row("KVCache.append", "other lengths of packed tokens", appended_to((16, 2, 5), seq_lens_q=[1, 1, 1]), ValueError, "T = 5 tokens", "the sum of seq_lens_q is 3"),
    row("KVCache.append", "numpy tokens to a cache of CuPy arrays", lambda x: made(x).append(*[np.ones(ONE, "f2", order="F")] * 2), TypeError,
        "k is a numpy.ndarray, but the cache consists of CuPy arrays", engine="fake"),
    row("KVCache.append", "CuPy values to a cache of numpy arrays", lambda x: made(x, numpy=True).append(
        np.ones(ONE, "f2", order="F"), x.xp.asarray(np.ones(ONE, "f2", order="F"))), TypeError,
        "v is a cupy.ndarray, but the cache consists of numpy arrays", engine="fake"),
    # FP8 caches
    row("KVCache", "a scale in text", lambda x: made(x, **FP8, v_scale="1"), TypeError, "v_scale is a str", "pass a number"),
    row("KVCache", "rotate with an odd head dim", lambda x: KVCache(5, 1, pages=2, batch=1, rotate=True, numpy=True, **FP8), ValueError,
        "head_dim is 5 and rotate is True", "rotate=False"),
    row("KVCache", "an FP8 head dim of 24 on the GPU", lambda x: KVCache(24, 2, pages=2, batch=1, **FP8), ValueError,
        "head_dim is 24 and head_dim_v 24", "multiples of 16", engine="fake"),
    row("KVCache.append", "integers to an FP8 cache", appended_to((ONE, "i4"), **FP8), TypeError, "k is int32", "a cache of float8_e4m3fn takes float16"),
    row("KVCache.append", "two dtypes to an FP8 cache", appended_to((ONE, "f2"), (ONE, "f4"), **FP8), TypeError, "k is float16 and v is float32", "one"),
    row("KVCache.append", "FP8 tokens of another format", appended_to(quantized("float8_e5m2"), **FP8), TypeError, "k is float8_e5m2", "quantize"),
    row("KVCache.append", "rotated keys to a cache that is not", appended_to(quantized(rotate=True), quantized(), **FP8), ValueError, "k.rotated is True",
        "rotate of the cache is False"),
    row("KVCache.append", "a capture before a scale is known", in_capture, RuntimeError, "layer 0 has no scale", "k_scale=", engine="fake"),
    row("KVCache.append", "a capture before the kernel is compiled", lambda x: in_capture(x, k_scale=1, v_scale=1), RuntimeError,
        "append tokens of float16 once", engine="fake"),
    # shared prefixes
    row("shared_prefix_attention", "the number of keys as a float", paged(shared_prefix_attention, shared_prefix=4.0), TypeError, "shared_prefix is 4.0"),
    row("shared_prefix_attention", "a length shorter than the prefix", paged(shared_prefix_attention, shared_prefix=4, page_table=ints(2, 3) + np.int32([[0], [1]]),
        seq_lens_kv=np.array([5, 3, 4], "i4")), ValueError, "shared_prefix is 4, and seq_lens_kv of sequence 1 is 3"),
]  # fmt: skip
