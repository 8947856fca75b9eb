"""Sequences as other libraries describe them: lists of pages, packed sequences with gaps, padding before sequences; and views."""

import numpy as np
import pytest
from engines import numbers

from cupy_sdpa import attention_vjp, cu_seqlens_with_gaps, page_table_from_lists, reference  # fmt: skip


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


@pytest.mark.parametrize("seed", numbers(6, quick=2))
def test_sequences_with_gaps(seed, engine):
    """Results and gradients of each sequence equal the sequence alone; gaps may contain NaN."""
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
