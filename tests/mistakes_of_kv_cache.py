"""Mistakes with paged keys and values, key/value caches and shared prefixes."""

# mypy: ignore-errors

import copy

import numpy as np
from mistakes import row

from cupy_sdpa import KVCache, OutOfPages, Unsupported, attention, fp8, shared_prefix_attention


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


def appended(k, v=None, *, counts=None, **options):
    """An append to a cache of shapes and dtypes, or of arrays of FP8."""

    def array(x, kind):
        if callable(kind):
            return kind(x)
        shape, dtype = kind if isinstance(kind[0], tuple) else (kind, x.dtype)
        return x.xp.asarray(np.ones(shape, dtype, order="F"))

    return lambda x: made(x, **options).append(array(x, k), array(x, k if v is None else v), counts=counts)


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
ROWS = [
    # paged keys and values
    row("attention", "a page table in float", paged(page_table=zeros(2, 3)), TypeError, "page_table is float32", "must be int32"),
    row("attention", "the pages of one sequence", paged(page_table=ints(2)), ValueError, "page_table has shape (2,)",
        "(pages per sequence, B) with 3 sequences, as q (8, 4, 6, 3)"),
    row("attention", "pages of other packed sequences", paged(**packed(cu_seqlens_q=ints(3))), ValueError, "shape (2, 3)", "2 sequences, as cu_seqlens_q"),
    row("attention", "offsets of keys in pages", paged(cu_seqlens_kv=ints(4)), ValueError, "cu_seqlens_kv (4,)", "page_table (2, 3)", "omit cu_seqlens_kv"),
    row("attention", "packed queries to pages without the longest", paged(**packed(max_seqlen_q=None)), ValueError, "max_seqlen_q is None"),
    row("attention", "offsets of dense queries to pages", paged(cu_seqlens_q=ints(4), max_seqlen_q=3), ValueError, "q has 4 dimensions",
        "(head_dim, heads, total), because cu_seqlens_q is passed"),
    row("attention", "lengths of packed queries to pages", paged(**packed(seq_lens_q=ints(3))), ValueError, "both passed"),
    row("attention", "float offsets with pages", paged(**packed(cu_seqlens_q=zeros(4))), TypeError, "cu_seqlens_q is float32", "int32 or int64"),
    *[row("attention", f"num_splits and {name}", paged(num_splits=2, **options), ValueError, "num_splits is 2", f"with {name}", "omit")
      for name, options in {
          "bias": {"bias": zeros(8, 6, 1, 1)}, "mask": {"mask": zeros(8, 1, 1, 3) == 0}, "alibi_slopes": {"alibi_slopes": zeros(4)},
          "dropout_p": {"dropout_p": 0.5, "seed": 1}, "score_mod": {"score_mod": lambda s, b, h, i, j: 2 * s},
          "mask_mod": {"mask_mod": lambda b, h, i, j: (i + j) % 2 == 0}, "cu_seqlens_q": packed(),
          "514 rows of a key/value head (at most 512)": {"q": zeros(8, 4, 257, 3)},
      }.items()],
    *[row("attention", f"{number} chunks of pages", paged(num_splits=number), ValueError, f"num_splits is {number}", "a number of chunks")
      for number in (0, 1.5)],
    row("attention", "other numbers of pages", paged(v=zeros(16, 2, 4, 7)), ValueError, "numbers of pages (axis 3) of k and v differ, 6 and 7",
        ".transpose(0, 2, 1, 3)"),
    row("attention", "other page sizes", paged(v=zeros(16, 2, 5, 6)), ValueError, "page sizes (axis 2) of k and v differ, 4 and 5"),
    row("attention", "pages with three axes", paged(k=zeros(8, 2, 24)), ValueError, "k has 3 dimensions (8, 2, 24)", "because page_table is passed"),
    *[row("attention", f"{'numpy' if moved else 'CuPy'} {name} among other arrays", lambda x, name=name, moved=moved: mixed(x, name, not moved), TypeError,
          "arrays are mixed", f"{name} is a {'numpy' if moved else 'CuPy'} array", "Move them to one side with cupy.asarray", engine="fake")
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
    row("KVCache.begin_step", "huge counts", lambda x: made(x, max_length=5).begin_step([2**62, 0, 0]), ValueError, f"gets {2**62}, but max_length is 5"),
    row("KVCache.begin_step", "unsigned counts", lambda x: made(x).begin_step(np.full(3, 2**64 - 1, np.uint64)), ValueError, "must not be negative"),
    row("KVCache.begin_step", "more tokens than pages", lambda x: made(x).begin_step([24, 1, 0]), OutOfPages, "needs 7 pages, but 6 of 6 are free; release"),
    row("KVCache.begin_step", "counts on the device", lambda x: made(x).begin_step(x.lengths), TypeError, "counts is a CuPy array", "counts.get()", engine="fake"),
    row("KVCache.append", "a list", lambda x: made(x).append([1.0], x.q), TypeError, "k is a list", "the cache consists of numpy arrays"),
    row("KVCache.append", "values of another head dim", appended(ONE, (8, 2, 1, 3)), ValueError, "v has shape (8, 2, 1, 3)", "(16, 2, S, 3)"),
    row("KVCache.append", "tokens (B, S, Hkv, D)", appended((3, 5, 2, 16)), ValueError, "k has shape (3, 5, 2, 16)", "pass k.T"),
    row("KVCache.append", "tokens (B, Hkv, S, D)", appended((3, 2, 5, 16)), ValueError, "k has shape (3, 2, 5, 16)", "k.transpose(3, 1, 2, 0)"),
    row("KVCache.append", "tokens in C order", lambda x: made(x).append(*[x.xp.ones((16, 2, 5, 3), x.dtype)] * 2), ValueError,
        "stride", "asfortranarray(k)"),
    row("KVCache.append", "packed tokens without counts", appended((16, 2, 5)), ValueError, "packed arrays need", "counts="),
    row("KVCache.append", "other counts of packed tokens", appended((16, 2, 5), counts=[1, 1, 1]), ValueError, "T = 5 tokens", "the sum of counts is 3"),
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
    row("KVCache.append", "integers to an FP8 cache", appended((ONE, "i4"), **FP8), TypeError, "k is int32", "a cache of float8_e4m3fn takes float16"),
    row("KVCache.append", "two dtypes to an FP8 cache", appended((ONE, "f2"), (ONE, "f4"), **FP8), TypeError, "k is float16 and v is float32", "one"),
    row("KVCache.append", "FP8 tokens of another format", appended(quantized("float8_e5m2"), **FP8), TypeError, "k is float8_e5m2", "quantize"),
    row("KVCache.append", "rotated keys to a cache that is not", appended(quantized(rotate=True), quantized(), **FP8), ValueError, "k.rotated is True",
        "rotate of the cache is False"),
    row("KVCache.append", "a capture before a scale is known", in_capture, RuntimeError, "layer 0 has no scale", "k_scale=", engine="fake"),
    row("KVCache.append", "a capture before the kernel is compiled", lambda x: in_capture(x, k_scale=1, v_scale=1), RuntimeError,
        "append tokens of float16 once", engine="fake"),
    # shared prefixes
    row("shared_prefix_attention", "the number of keys as a float", paged(shared_prefix_attention, shared_prefix=4.0), TypeError, "shared_prefix is 4.0"),
    row("shared_prefix_attention", "a length shorter than the prefix", paged(shared_prefix_attention, shared_prefix=4, page_table=ints(2, 3) + np.int32([[0], [1]]),
        seq_lens_kv=np.array([5, 3, 4], "i4")), ValueError, "shared_prefix is 4, and seq_lens_kv of sequence 1 is 3"),
]  # fmt: skip
