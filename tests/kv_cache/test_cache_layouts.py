"""Caches, rotations, shared prefixes and merged parts with a layout in C order: the same results as without one."""

import pickle

import numpy as np
import pytest

from cupy_sdpa import KVCache, Rope, apply_rope, attention, fp8, layout, merge, shared_prefix_attention

#: The axes (D, H, S, B) in the order of a layout.
ORDERS = {"bshd": (3, 2, 1, 0), "bhsd": (3, 1, 2, 0), "sbhd": (2, 3, 1, 0)}


@pytest.fixture(params=ORDERS)
def letters(request):
    return request.param


def cache_of(engine, **options):
    size = {"pages": 9, "batch": 3, "page_size": 2, "dtype": engine.dtype.name} | options
    return KVCache(8, 2, **size, numpy=engine.name == "numpy")


def equal(engine, found, wanted, axes):
    """Whether a result in the order of a layout is another one in (D, H, S, B)."""
    np.testing.assert_array_equal(engine.get(found).transpose(np.argsort(axes)), engine.get(wanted))


@pytest.mark.parametrize("default", [False, True])
def test_a_cache(default, letters, engine):
    """Tokens, pages and table have the layout, also if a block around the cache's creation sets it; a copy keeps it."""
    axes = ORDERS[letters]
    q, k, v = engine.normal(0, 8, 4, 1, 3), engine.normal(1, 8, 2, 5, 3), engine.normal(2, 8, 2, 5, 3)
    own = cache_of(engine)
    if default:
        with layout.default(letters):
            cache = cache_of(engine)
    else:
        cache = cache_of(engine, layout=letters)
    for tokens, counts in ((5, [5, 3, 1]), (2, None)):
        own.append(k[:, :, :tokens], v[:, :, :tokens], seq_lens_q=counts)
        cache.append(k[:, :, :tokens].transpose(axes), v[:, :, :tokens].transpose(axes), seq_lens_q=counts)
    wanted = attention(q, **own.view())
    for one in (cache, pickle.loads(pickle.dumps(cache))):
        assert one.table.shape == own.table.shape[::-1]
        assert one.full_table.shape == own.full_table.shape[::-1]
        equal(engine, one.keys(), own.keys(), axes)
        equal(engine, attention(q.transpose(axes), **one.view()), wanted, axes)


def test_packed_tokens_and_fp8(engine):
    """Packed tokens are (T, Hkv, D); pages of an FP8 cache also have the layout."""
    tokens = engine.normal(0, 8, 2, 5)
    own, cache = cache_of(engine), cache_of(engine, layout="bshd")
    own.append(tokens, tokens, seq_lens_q=[2, 2, 1])
    cache.append(tokens.T, tokens.T, seq_lens_q=[2, 2, 1])
    equal(engine, cache.values(), own.values(), ORDERS["bshd"])
    if engine.name == "numpy":
        eight = cache_of(engine, dtype="float8_e4m3fn", layout="bhsd", rotate=True)
        same = cache_of(engine, dtype="float8_e4m3fn", rotate=True)
        x = engine.normal(1, 8, 2, 4, 3)
        eight.append(x.transpose(ORDERS["bhsd"]), x.transpose(ORDERS["bhsd"]))
        same.append(x, x)
        q = fp8.quantize(engine.normal(2, 8, 4, 1, 3), rotate=True)
        wanted = attention(q, **same.view()).dequantize()
        equal(engine, attention(q.transpose(ORDERS["bhsd"]), **eight.view()).dequantize(), wanted, ORDERS["bhsd"])


def test_rotations_and_parts(letters, engine):
    """apply_rope and merge take and return the layout, by name or by default."""
    axes, rope = ORDERS[letters], Rope(8)
    q, k = engine.normal(0, 8, 4, 3, 2), engine.normal(1, 8, 2, 7, 2)
    equal(engine, apply_rope(q.transpose(axes), rope, start=3, layout=letters), apply_rope(q, rope, start=3), axes)
    parts = [attention(q, k[:, :, part], k[:, :, part], return_stats=True) for part in (slice(2), slice(2, None))]
    outs, stats = [out.transpose(axes) for out, _ in parts], [rows.T for _, rows in parts]
    wanted, rows = merge(*zip(*parts, strict=True), return_stats=True)
    found, other = merge(outs, stats, return_stats=True, layout=letters)
    equal(engine, found, wanted, axes)
    np.testing.assert_array_equal(engine.get(other.T), engine.get(rows))
    target = engine.xp.empty_like(wanted).transpose(axes)
    with layout.default(letters):
        equal(engine, merge(outs, stats), wanted, axes)
        assert merge(outs, stats, out=target) is target
    equal(engine, target, wanted, axes)


def test_a_shared_prefix(letters, engine):
    """The output, the statistics, the pages and the table."""
    axes = ORDERS[letters]
    cache = cache_of(engine, batch=2)
    prefix, tokens = engine.normal(0, 8, 2, 5), engine.normal(1, 8, 2, 1, 2)
    cache.append(prefix, prefix, seq_lens_q=[5, 0])
    cache.fork(0, 1)
    cache.append(tokens, tokens)
    q = engine.normal(2, 8, 4, 1, 2)
    pages = {"page_table": cache.table, "seq_lens_kv": cache.lengths}
    given = cache.keys(), cache.values(), cache.shared_prefix()
    wanted, rows = shared_prefix_attention(q, *given, **pages, return_stats=True)
    theirs = [x.transpose(axes) for x in (q, *given[:2])]
    pages["page_table"] = cache.table.T
    found, other = shared_prefix_attention(*theirs, given[2], **pages, layout=letters, return_stats=True)
    equal(engine, found, wanted, axes)
    np.testing.assert_array_equal(engine.get(other.T), engine.get(rows))


def test_lists_of_positions():
    """On the CPU apply_rope takes lists and int64 arrays of positions and offsets."""
    x, rope = np.asfortranarray(np.random.default_rng(0).standard_normal((8, 2, 5, 2)).astype(np.float32)), Rope(8)
    wanted = apply_rope(x, rope, seq_lens_kv=np.array([7, 9], np.int32), seq_lens_q=np.array([5, 4], np.int32))
    np.testing.assert_array_equal(apply_rope(x, rope, seq_lens_kv=[7, 9], seq_lens_q=np.array([5, 4])), wanted)
    packed = x[..., 0]
    wanted = apply_rope(packed, rope, start=np.array([1, 2], np.int32), cu_seqlens_q=np.array([0, 2, 5], np.int32))
    np.testing.assert_array_equal(apply_rope(packed, rope, start=(1, 2), cu_seqlens_q=[0, 2, 5]), wanted)
