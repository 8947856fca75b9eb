"""Mistakes with rotary embeddings, lists of pages, sequences with gaps, and sums of weights."""

# mypy: ignore-errors

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
    page_table_from_lists,
    tree_mask,
    weight_sums,
)
from cupy_sdpa.composed import weight_sums_problems

TOKENS = np.ones((8, 2, 3, 2), np.float32, order="F")


def appended(rope, **options):
    """An append that rotates keys."""
    cache = KVCache(8, 2, **{"pages": 4, "batch": 2, "dtype": "float32", "numpy": True} | options)
    return cache.append(TOKENS, TOKENS, rope=rope)


def rotation(*given, **options):
    """A rotation that is refused."""
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
    row("Rope", "frequencies that overflow as turns", rotation(4, frequencies=[1e300, 1]), ValueError, "1e+300", "at most 1e+150"),
    row("Rope", "a factor beyond float64", rotation(4, factor=10**400), ValueError, "factor is inf", "finite"),
    row("Rope", "a base of 0", rotation(4, base=0), ValueError, "base is 0", "above 0"),
    row("Rope", "a factor of 0", rotation(4, factor=0), ValueError, "factor is 0.0", "above 0"),
    row("Rope", "a factor beyond float32", rotation(4, factor=1e39), ValueError, "factor is 1e+39", "float32"),
    row("Rope", "a form in text", rotation(4, interleaved="half"), TypeError, "interleaved is 'half'", "True or False"),
    row("apply_rope", "the number of channels as the rotation", lambda x: apply_rope(x.q, 8), TypeError, "rope is 8", "Rope(8)"),
    row("apply_rope", "more channels than the head dim", applied(Rope(16)), ValueError, "rope.dim is 16, but the head dim is 8", "Rope(8)"),
    row("apply_rope", "start and end", applied(start=3, end=lambda x: x.lengths), ValueError, "start and end are both passed", "one of them"),
    row("apply_rope", "a position beyond 64 bits", applied(start=2**63), ValueError, "start is 9223372036854775808", "below 2**62"),
    row("apply_rope", "lengths and offsets", applied(seq_lens=lambda x: x.lengths, cu_seqlens=lambda x: x.starts), ValueError,
        "seq_lens and cu_seqlens are both passed"),
    row("apply_rope", "offsets with a dense array", applied(cu_seqlens=lambda x: x.starts), ValueError, "x has shape (8, 4, 6, 3)", "packed (D, H, T)"),
    row("apply_rope", "a packed array without offsets", lambda x: apply_rope(x.pq, Rope(8)), ValueError, "x has shape (8, 4, 11)", "cu_seqlens="),
    row("apply_rope", "one position per token", applied(start=np.zeros((6, 3), "i4")), ValueError, "start has shape (6, 3)", "(3,)"),
    row("apply_rope", "ends in float32", applied(end=np.zeros(3, "f4")), TypeError, "end is float32", "int32"),
    row("apply_rope", "float offsets", lambda x: apply_rope(x.pq, Rope(8), cu_seqlens=np.zeros(4, "f4")), TypeError, "cu_seqlens is float32",
        ".astype('int32')"),
    row("apply_rope", "offsets that fall", lambda x: apply_rope(x.pq, Rope(8), cu_seqlens=np.array([0, 8, 5, 11], "i4")), ValueError,
        "cu_seqlens is [0, 8, 5, 11]", "must rise"),
    row("apply_rope", "offsets beyond the tokens", lambda x: apply_rope(x.pq, Rope(8), cu_seqlens=np.array([0, 5, 12], "i4")), ValueError,
        "cu_seqlens is [0, 5, 12]", "at most 11"),
    row("apply_rope", "lengths beyond the tokens", applied(end=np.array([9, 9, 9], "i4"), seq_lens=np.array([6, 7, 0], "i4")), ValueError,
        "seq_lens has lengths from 0 to 7", "from 0 to 6"),
    row("apply_rope", "a start of True", applied(start=True), TypeError, "start is True", "a number"),
    row("apply_rope", "integers", lambda x: apply_rope(x.table[:, :, None, None], Rope(2)), TypeError, "x is int32", "float16"),
    row("apply_rope", "an array in C order", lambda x: apply_rope(x.q.copy(order="C"), Rope(8)), ValueError, "axis 0 must be contiguous"),
    row("apply_rope", "ends of numpy with CuPy queries", lambda x: apply_rope(x.q, Rope(8), end=np.zeros(3, "i4")), TypeError, "arrays are mixed",
        "cupy.asarray", engine="fake"),
    row("KVCache.append", "True as the rotation", lambda x: appended(True), TypeError, "rope is True", "Rope(8)"),
    row("KVCache.append", "a rotation of more channels", lambda x: appended(Rope(10)), ValueError, "rope.dim is 10, but the head dim is 8"),
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


def after(path, *, sequence=0, pages=6, change=lambda cache: None):
    """A cache that keeps a path of a draft of 4 tokens."""

    def make(x):
        cache = KVCache(8, 2, pages=pages, batch=3, page_size=4, dtype="float32", numpy=x.xp is np)
        draft = x.xp.asarray(np.ones((8, 2, 4, 3), "f4", order="F"))
        cache.append(draft, draft, counts=[4, 2, 0])
        change(cache)
        cache.keep(sequence, path(x) if callable(path) else path)

    return make


ROWS += [
    row("tree_mask", "a parent after its child", treed([-1, 2, 0]), ValueError, "the parent of token 1 is 2", "from 0 to 0, or -1", "parents come first"),
    row("tree_mask", "parents in float", treed([0.5, 1]), TypeError, "parents is a list of float64", "integers"),
    row("tree_mask", "parents of other sequences", treed(np.zeros((4, 2), int)), ValueError, "parents has shape (4, 2)", "(Sq, 3)"),
    row("tree_mask", "a tree of 3000 tokens", treed([*range(-1, 2999)]), ValueError, "3000 tokens", "at most 2048"),
    row("tree_mask", "queries before keys", treed(np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)), ValueError, "not the mask of a tree", "pass parents.T"),
    row("tree_mask", "a mask without an ancestor", treed(np.array([[1, 1, 0], [0, 1, 1], [0, 0, 1]], bool)), ValueError,
        "query 2 does not attend to key 0", "[0, 1, 2]"),
    row("tree_mask", "a mask of all keys", treed(np.ones((24, 4), bool)), ValueError, "bool and has shape (24, 4)", "(Sq, Sq, 3)"),
    row("tree_mask", "packed keys", treed(k=np.zeros((8, 2, 9), "f4"), page_table=None, seq_lens_kv=None), ValueError, "k has shape (8, 2, 9)"),
    row("tree_mask", "a page table of one sequence", treed(page_table=np.zeros(2, "i4")), ValueError, "page_table has shape (2,)", "(P, B)"),
    row("tree_mask", "float lengths", treed(seq_lens_kv=np.zeros(3, "f4")), TypeError, "seq_lens_kv is float32", "int32"),
    row("tree_mask", "a cache", treed(k=KVCache(8, 2, pages=4, batch=2, numpy=True)), TypeError, "k is", "**cache.view(layer)"),
    row("tree_mask", "int64 parents on the device", treed(lambda x: x.xp.zeros(3, "i8")), TypeError, "parents is", "int32", engine="fake"),
    row("tree_mask", "a bool mask on the device", treed(lambda x: x.xp.zeros((3, 3), bool)), TypeError, "bool CuPy array", "numpy array", engine="fake"),
    row("tree_mask", "parents of CuPy and keys of numpy", treed(lambda x: x.xp.zeros(3, "i4"), k=np.zeros((8, 2, 9, 3), "f4"), page_table=None, seq_lens_kv=None),
        TypeError, "parents is a CuPy array", "parents.get()", engine="fake"),
    row("attention", "a tree of fewer tokens", lambda x: attention(x.q, x.pages_k, x.pages_v, **x.paged, **treed()(x)), IndexError,
        "tree_number", "(3, 4)", "q_idx has 6 values"),
    row("KVCache.keep", "a token after the draft", after([0, 4]), ValueError, "path contains 4", "sequence 0 has 4 tokens of the last step"),
    row("KVCache.keep", "a negative token", after([-1, 2]), ValueError, "path contains -1", "from 0"),
    row("KVCache.keep", "a path that does not ascend", after([0, 2, 1]), ValueError, "1 after 2", "sorted(path)"),
    row("KVCache.keep", "one number", after(2), ValueError, "path has shape ()", "one axis"),
    row("KVCache.keep", "fractions", after([0.0, 1.0]), TypeError, "path is [0.0, 1.0]", "integers"),
    row("KVCache.keep", "a path of CuPy", after(lambda x: x.xp.zeros(2, "i4")), TypeError, "path is a CuPy array", "path.get()", engine="fake"),
    row("KVCache.keep", "a sequence that the cache lacks", after([0], sequence=3), ValueError, "sequence is 3", "from 0 to 2"),
    row("KVCache.keep", "after the next step began", after([0], change=lambda cache: cache.begin_step(1)), RuntimeError, "a step is announced", "before keep()"),
    row("KVCache.keep", "more shared pages than free ones", after([0, 2], pages=2, change=lambda cache: cache.fork(0, 2)), OutOfPages,
        "1 pages that sequence 0 shares, but 0 of 2 are free", "release"),
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
    row("cu_seqlens_with_gaps", "lengths in float64", lambda x: cu_seqlens_with_gaps(x.lengths, x.lengths.astype("f8")), TypeError, "lengths is float64", "int32"),
    row("cu_seqlens_with_gaps", "sequences that overlap", lambda x: cu_seqlens_with_gaps(np.int32([0, 3]), np.int32([5, 1])), ValueError,
        "sequence 0 ends at 5", "sequence 1 starts at 3"),
    row("cu_seqlens_with_gaps", "a negative length", lambda x: cu_seqlens_with_gaps(np.int32([0, 3]), np.int32([2, -1])), ValueError,
        "lengths of sequence 1 is -1"),
    row("KVCache.view", "a layer that the cache lacks", lambda x: KVCache(8, 2, pages=4, batch=2, numpy=True).view(1), ValueError,
        "layer is 1", "from 0 to 0"),
]  # fmt: skip


def as_lists(options):
    """Options whose arrays are lists."""
    return {name: x.tolist() for name, x in options.items()}


def nearby(keys):
    """A block mask of 6 queries and some keys, and three batch entries."""
    return cupy_sdpa.block_mask(lambda b, h, i, j: abs(i - j) <= 2 + 2 * b, 6, keys, batch=3)


def summed(**options):
    """The weights of the keys with options."""
    return lambda x: weight_sums(x.q, x.k, **options)


ROWS += [
    row("weight_sums", "a bias", summed(bias=np.zeros((7, 6, 1, 1), "f4")), Unsupported, "with bias", "score function"),
    row("weight_sums", "an invariant call", summed(batch_invariant=True), Unsupported, "with batch_invariant", "a call of its own"),
    row("weight_sums", "dropout", summed(dropout_p=0.5, seed=1), Unsupported, "with dropout_p", "before dropout"),
    row("weight_sums", "a layout in C order", summed(layout="bshd"), Unsupported, "with layout", "(head_dim, heads, seq, batch)"),
    row("weight_sums", "packed queries to pages", lambda x: weight_sums(
        x.pq, x.pages_k, cu_seqlens_q=x.starts, max_seqlen_q=6, **x.paged), Unsupported, "page_table and cu_seqlens_q", "seq_lens_q="),
    row("weight_sums", "values as a third array", lambda x: weight_sums(x.q, x.k, x.v), TypeError, "3 arguments are passed by position"),
    row("weight_sums", "keys of another head dim", lambda x: weight_sums(x.q, x.v), ValueError, "head dims (axis 0) of q and k differ, 8 and 16"),
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
    row("composed.weight_sums_problems", "dropout", lambda x: weight_sums_problems(x.q, x.k, dropout_p=0.5, seed=1), Unsupported, "with dropout_p"),
    row("composed.weight_sums_problems", "shapes without a dtype", lambda x: weight_sums_problems((8, 2, 4, 1), (8, 2, 4, 1)), TypeError, "dtype"),
]  # fmt: skip
