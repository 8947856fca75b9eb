"""Mistakes with rotary embeddings, lists of pages, sequences with gaps, and sums of weights."""

# mypy: ignore-errors

import numpy as np
from mistakes import row

from cupy_sdpa import (
    KVCache,
    Rope,
    Unsupported,
    apply_rope,
    cu_seqlens_with_gaps,
    page_table_from_lists,
    weight_sums,
    weight_sums_problems,
)

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
    row("Rope", "too many channels", rotation(512), ValueError, "dim is 512", "at most 256"),
    row("Rope", "a base and frequencies", rotation(4, base=100.0, frequencies=[1, 2]), ValueError, "base is 100.0 and frequencies", "one"),
    row("Rope", "a frequency for each channel", rotation(4, frequencies=np.ones(4)), ValueError, "shape (4,)", "pass 2 numbers"),
    row("Rope", "a frequency of infinity", rotation(4, frequencies=[1, np.inf]), ValueError, "inf", "finite"),
    row("Rope", "frequencies on the device", lambda x: Rope(4, frequencies=x.xp.ones(2, "f4")), TypeError, "CuPy array", "frequencies.get()",
        engine="fake"),
    row("Rope", "a base in text", rotation(4, base="100"), TypeError, "base is '100'", "a number"),
    row("Rope", "a base of 0", rotation(4, base=0), ValueError, "base is 0", "above 0"),
    row("Rope", "a factor of 0", rotation(4, factor=0), ValueError, "factor is 0.0", "above 0"),
    row("Rope", "a factor beyond float32", rotation(4, factor=1e39), ValueError, "factor is 1e+39", "float32"),
    row("Rope", "a form in text", rotation(4, interleaved="half"), TypeError, "interleaved is 'half'", "True or False"),
    row("apply_rope", "the number of channels as the rotation", lambda x: apply_rope(x.q, 8), TypeError, "rope is 8", "Rope(8)"),
    row("apply_rope", "more channels than the head dim", applied(Rope(16)), ValueError, "rope.dim is 16, but the head dim is 8", "Rope(8)"),
    row("apply_rope", "start and end", applied(start=3, end=lambda x: x.lengths), ValueError, "start and end are both passed", "one of them"),
    row("apply_rope", "lengths and offsets", applied(seq_lens=lambda x: x.lengths, cu_seqlens=lambda x: x.starts), ValueError,
        "seq_lens and cu_seqlens are both passed"),
    row("apply_rope", "offsets with a dense array", applied(cu_seqlens=lambda x: x.starts), ValueError, "x has shape (8, 4, 6, 3)", "packed (D, H, T)"),
    row("apply_rope", "a packed array without offsets", lambda x: apply_rope(x.pq, Rope(8)), ValueError, "x has shape (8, 4, 11)", "cu_seqlens="),
    row("apply_rope", "one position per token", applied(start=np.zeros((6, 3), "i4")), ValueError, "start has shape (6, 3)", "(3,)"),
    row("apply_rope", "ends in int64", applied(end=np.zeros(3, "i8")), TypeError, "end is int64", "int32"),
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


ROWS += [
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
    row("weight_sums_problems", "dropout", lambda x: weight_sums_problems(x.q, x.k, dropout_p=0.5, seed=1), Unsupported, "with dropout_p"),
    row("weight_sums_problems", "shapes without a dtype", lambda x: weight_sums_problems((8, 2, 4, 1), (8, 2, 4, 1)), TypeError, "dtype"),
]  # fmt: skip
