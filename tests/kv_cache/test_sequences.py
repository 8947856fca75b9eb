"""Sequences as other libraries describe them: lists of pages, packed sequences with gaps, padding before sequences; and views."""

import numpy as np
import pytest
from engines import numbers

from cupy_sdpa import (
    KVCache,
    attention,
    attention_vjp,
    cu_seqlens_with_gaps,
    page_table_from_lists,
    reference,
)  # fmt: skip


@pytest.mark.parametrize("seed", numbers(8, quick=3))
def test_random_lists_of_pages(seed, engine):
    """The table lists the pages of each sequence in order, then -1; also for lists without pages and wider tables."""
    rng = np.random.default_rng(seed)
    for _ in range(5):
        batch, size = int(rng.integers(1, 7)), int(rng.integers(1, 65))
        counts = rng.choice([0, 1, *rng.integers(0, 300, 2)], batch)
        starts = np.concatenate([[rng.integers(0, 3)], counts]).cumsum().astype(np.int32)
        pages = rng.permutation(int(starts[-1]) + int(rng.integers(0, 3))).astype(np.int32)
        last = rng.integers(1, size + 1, batch).astype(np.int32)
        width = int(max(1, counts.max() + rng.integers(-2, 3)))
        given = [engine.put(np.repeat(x, 2))[::2] for x in (starts, pages, last)]
        table, lengths = page_table_from_lists(*given, page_size=size, max_pages=width)
        wanted = np.full((width, batch), -1, np.int32)
        for b, count in enumerate(counts):
            own = pages[starts[b] : starts[b] + count][:width]
            wanted[: len(own), b] = own
        kept = np.where(counts > width, width * size, np.where(counts > 0, (counts - 1) * size + last, 0))
        assert table.flags.f_contiguous
        np.testing.assert_array_equal(engine.get(table), wanted)
        np.testing.assert_array_equal(engine.get(lengths), kept)


def test_lists_of_integers():
    """On the CPU the arguments may be lists or int64 arrays."""
    for make in (list, np.array):
        table, lengths = page_table_from_lists(make([0, 2, 3]), make([5, 1, 4]), make([3, 4]), page_size=4)
        assert (table.tolist(), lengths.tolist(), table.dtype, lengths.dtype) == ([[5, 4], [1, -1]], [7, 4], np.int32, np.int32)
        assert cu_seqlens_with_gaps(make([0, 8]), make([3, 4])).tolist() == [0, 3, 8, 12]


def test_the_width_of_the_longest_list():
    """On the CPU the table has as many rows as the longest list."""
    given = [np.int32(x) for x in ([0, 3, 4], [7, 5, 6, 1], [2, 1])]
    assert page_table_from_lists(*given, page_size=2)[0].tolist() == [[7, 1], [5, -1], [6, -1]]
    empty = page_table_from_lists(np.int32([0, 0]), np.int32([]), np.int32([0]), page_size=2)
    assert [x.tolist() for x in empty] == [[[-1]], [0]]


def test_a_view_has_what_attention_needs(engine):
    """Attention to a view is attention to the arrays; a new one has the rows that the table has grown by."""
    cache = KVCache(8, 2, pages=20, batch=2, page_size=4, layers=2, dtype=str(engine.dtype), numpy=not engine.on_cudnn)
    k, v, q = (engine.normal(i, 8, heads, 9, 2) for i, heads in enumerate((2, 2, 4)))
    for begin, end in ((0, 3), (3, 9)):
        for layer in range(2):
            new = (x[:, :, begin:end] for x in ((k, v), (v, k))[layer])
            cache.append(*new, layer)
        for layer, (keys, values) in enumerate(((k, v), (v, k))):
            found = attention(q[:, :, begin:end], **cache.view(layer), causal="bottom_right")
            wanted = attention(q[:, :, begin:end], keys[:, :, :end], values[:, :, :end], causal="bottom_right")
            np.testing.assert_allclose(
                engine.get(found).astype("f4"), engine.get(wanted).astype("f4"), atol=2 * engine.tolerance
            )
    assert set(cache.view()) == {"k", "v", "page_table", "seq_lens_kv"}
    with pytest.raises(ValueError, match="layer is 2; the cache has 2"):
        cache.view(2)


@pytest.mark.parametrize("seed", numbers(6, quick=2))
def test_sequences_with_gaps(seed, engine):
    """Results and gradients of each sequence are those of the sequence alone; gaps may contain NaN."""
    rng = np.random.default_rng(seed)
    batch, causal = int(rng.integers(1, 4)), bool(rng.integers(2))
    counts = {side: rng.integers(1, 12, batch) for side in ("q", "kv")}
    starts, totals, offsets, longest = {}, {}, {}, {}
    for side, own in counts.items():
        gaps = rng.integers(0, 7, batch + 1)
        starts[side] = gaps.cumsum()[:-1] + np.concatenate([[0], own.cumsum()[:-1]])
        longest[f"max_seqlen_{side}"] = int(max(*own, *gaps))
        totals[side] = int(gaps.sum() + own.sum())
        given = (engine.put(x.astype(np.int32)) for x in (starts[side], own))
        offsets[f"cu_seqlens_{side}"] = cu_seqlens_with_gaps(*given)
    host = {
        name: np.full((16, heads, totals[side]), np.nan, engine.dtype, order="F")
        for name, heads, side in (("q", 4, "q"), ("k", 2, "kv"), ("v", 2, "kv"), ("dout", 4, "q"))
    }
    places = {side: [slice(s, s + n) for s, n in zip(starts[side], counts[side], strict=True)] for side in counts}
    for name, x in host.items():
        for place in places["q" if name in ("q", "dout") else "kv"]:
            x[..., place] = rng.standard_normal(x[..., place].shape)
    arrays = engine.put(host)
    q, k, v = (arrays[name] for name in "qkv")
    out, pullback = attention_vjp(q, k, v, causal=causal, **offsets, **longest)
    found = dict(zip(("out", "dq", "dk", "dv"), engine.get((out, *pullback(arrays["dout"]))), strict=True))
    for of_q, of_kv in zip(places["q"], places["kv"], strict=True):
        own = {n: host[n][..., of_q if n in ("q", "dout") else of_kv, None].astype(np.float64) for n in host}
        right, _ = reference.attention(own["q"], own["k"], own["v"], causal=causal)
        gradients = reference.attention_backward(own["dout"], own["q"], own["k"], own["v"], causal=causal)
        for name, wanted in zip(("out", "dq", "dk", "dv"), (right, *gradients), strict=True):
            part = found[name][..., of_kv if name in ("dk", "dv") else of_q]
            np.testing.assert_allclose(part.astype("f8"), wanted[..., 0], atol=8 * engine.tolerance, rtol=0.02)


def test_padding_before_each_sequence(engine):
    """A dense batch with padding at the start is packed without a copy; each sequence is attended to alone."""
    padding, length = [3, 0, 5], 9
    q, k, v = (engine.normal(i, 16, 2, length, 3) for i in range(3))
    starts = engine.put(np.int32([length * b + n for b, n in enumerate(padding)]))
    offsets = cu_seqlens_with_gaps(starts, engine.put(np.int32([length - n for n in padding])))
    packed = [x.reshape((16, 2, 3 * length), order="F") for x in (q, k, v)]
    given = {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets, "max_seqlen_q": length, "max_seqlen_kv": length}
    out = engine.get(attention(*packed, causal=True, **given)).reshape(16, 2, length, 3, order="F")
    for b, n in enumerate(padding):
        own = (engine.get(x)[:, :, n:, b : b + 1].astype("f8") for x in (q, k, v))
        np.testing.assert_allclose(
            out[:, :, n:, b].astype("f8"), reference.attention(*own, causal=True)[0][..., 0], atol=2 * engine.tolerance
        )
