"""Removed tokens leave nothing behind: attention after random changes of a cache equals that to the tokens of a sequence alone."""

import numpy as np
import pytest
from engines import numbers
from fp8_arrays import relative, values_of

from cupy_sdpa import KVCache, OutOfPages, Rope, attention, fp8

#: The sizes of the caches: D, Dv, Hkv, the query heads of each, and the page size.
SIZES = [(16, 16, 2, 1, 8), (16, 32, 1, 3, 4), (32, 16, 2, 2, 16)]
JUNK = (np.nan, np.inf, -np.inf)


class Machine:
    """A cache under random operations. Most appends end in tokens of NaN and infinities, most of which are removed afterwards."""

    def __init__(self, engine, number, dtype):
        self.engine, self.rng = engine, np.random.default_rng([3, number])
        d, dv, hkv, group, size = SIZES[number % len(SIZES)]
        self.fp8 = dtype.startswith("float8")
        self.rope = None if self.fp8 or number % 2 else Rope(d)
        self.cache = KVCache(
            d, hkv, head_dim_v=dv, pages=14, batch=3, page_size=size, layers=2, dtype=dtype, numpy=not engine.on_cudnn
        )
        self.group = group
        #: Whether each token of each sequence is finite.
        self.finite = [[], [], []]

    def tokens(self, counts, junk):
        """New tokens for all layers, of which the last ``junk[b]`` of sequence b are not finite; those beyond the counts as well."""
        cache, dtype = self.cache, np.float16 if self.fp8 else self.cache.dtype
        for _ in range(cache.layers):
            pair = []
            for dim in (cache.head_dim, cache.head_dim_v):
                x = self.rng.standard_normal((dim, cache.heads_kv, max(counts), cache.batch)).astype(dtype)
                for b, (count, number) in enumerate(zip(counts, junk, strict=True)):
                    x[:, :, count - number :, b] = self.rng.choice(JUNK)
                pair.append(self.engine.put(np.asfortranarray(x)))
            yield pair

    def append(self):
        """A step, perhaps cancelled after some layers."""
        cache, rng = self.cache, self.rng
        counts = [int(n) for n in rng.integers(0, cache.page_size + 2, cache.batch)]
        junk = [int(rng.integers(n + 1)) * int(rng.integers(4) > 0) for n in counts]
        layers = cache.layers if rng.integers(4) else int(rng.integers(cache.layers))
        rope = {} if self.rope is None else {"rope": self.rope}
        try:
            cache.begin_step(counts)
        except OutOfPages:
            cache.release(int(rng.integers(cache.batch)))
            self.finite = [x if n else [] for x, n in zip(self.finite, cache.host_lengths, strict=True)]
            return
        for layer, (k, v) in enumerate([*self.tokens(counts, junk)][:layers]):
            cache.append(k, v, layer, **rope)
        if layers < cache.layers:
            cache.cancel_step()
            return
        for own, count, number in zip(self.finite, counts, junk, strict=True):
            own += [True] * (count - number) + [False] * number
        for b in rng.permutation(cache.batch).tolist():
            if rng.integers(3) == 0:
                self.fork(b)
            self.clean(b, counts[b])
        if rng.integers(3) == 0:
            self.reorder()

    def reorder(self):
        """Let the sequences continue each other, or exchange two; rarely remove all."""
        cache, rng = self.cache, self.rng
        if rng.integers(5) == 0:
            cache.reset()
            self.finite = [[], [], []]
            return
        order = rng.integers(cache.batch, size=cache.batch).tolist()
        cache.reorder(order)
        cache.swap(0, 2)
        self.finite = [list(self.finite[order[b]]) for b in (2, 1, 0)]

    def fork(self, b):
        """Share a sequence: what one of two owners removes is still a part of the other."""
        empty = [i for i, x in enumerate(self.finite) if not x]
        if empty and self.finite[b]:
            self.cache.fork(b, empty[0])
            self.finite[empty[0]] = list(self.finite[b])

    def clean(self, b, count):
        """Remove the tokens that are not finite, with keep or truncate; or leave them."""
        own = self.finite[b]
        if all(own) or self.rng.integers(6) == 0:
            return
        start = len(own) - count
        path = [i for i in range(count) if own[start + i] and self.rng.integers(3)]
        keeps = all(own[:start]) and self.rng.integers(2)
        try:
            if keeps and self.cache.host_lengths[b] == len(own):
                self.cache.keep(b, path)
                del own[start + len(path) :]
            else:
                length = own.index(False)
                self.cache.truncate(b, length)
                del own[length:]
        except (OutOfPages, ValueError):  # no page is free for a copy, or a fork has no tokens of the last step
            self.cache.release(b)
            own.clear()

    def stored(self, layer, b):
        """The stored keys and values of a sequence, in float64."""
        cache, get = self.cache, self.engine.get
        table, length = get(cache.full_table)[:, b], int(cache.host_lengths[b])
        pages = [table[i] for i in range(-(-length // cache.page_size))]
        for x in (cache.keys(layer), cache.values(layer)):
            mean = 0.0
            if self.fp8:
                mean = 0.0 if x.mean is None or not length else get(x.mean[:, :, :1, int(table[0])]).astype(np.float64)
                elements = np.asfortranarray(get(x.data)).view(self.cache.dtype)
                x = values_of(fp8.Fp8Array(elements, get(x.descale), dtype=x.dtype))
            else:
                x = get(x).astype(np.float64)
            yield np.concatenate([*(x[..., page] for page in pages), x[..., 0][:, :, :0]], axis=2)[:, :, :length] + mean

    def check(self, queries):
        """Compare attention to both layers with a formula that reads the rows of each sequence alone."""
        cache, engine = self.cache, self.engine
        heads = cache.heads_kv * self.group
        x = self.rng.standard_normal((cache.head_dim, heads, queries, cache.batch)).astype(np.float16)
        q, given = x.astype(np.float64), engine.put(np.asfortranarray(x))
        given = fp8.quantize(given) if self.fp8 else given
        for layer in range(cache.layers):
            keys = {"k": cache.keys(layer), "v": cache.values(layer), "page_table": cache.table, "seq_lens_kv": cache.lengths}
            out = attention(given, **keys, causal="bottom_right")
            out = engine.get(out.dequantize("float32") if self.fp8 else out).astype(np.float64)
            for b, own in enumerate(self.finite):
                if all(own):
                    wanted = bottom_right(q[..., b], *self.stored(layer, b))
                    assert np.isfinite(out[..., b]).all(), (layer, b, len(own))
                    assert relative(out[..., b], wanted) < (0.3 if self.fp8 else 0.02), (layer, b)


def bottom_right(q, k, v):
    """Causal attention of the newest tokens, (D, Hq, Sq), to (D, Hkv, Skv) in float64."""
    group, skv, sq = q.shape[1] // k.shape[1], k.shape[2], q.shape[2]
    k, v = k.repeat(group, axis=1), v.repeat(group, axis=1)
    scores = np.einsum("dhq,dhk->hqk", q, k) / np.sqrt(len(q))
    allowed = np.arange(skv) <= np.arange(sq)[:, None] + skv - sq
    weights = np.where(allowed, np.exp(scores - scores.max(-1, initial=0, keepdims=True)), 0)
    total = weights.sum(-1, keepdims=True)
    return np.einsum("hqk,dhk->dhq", np.divide(weights, total, out=np.zeros_like(weights), where=total > 0), v)


@pytest.mark.parametrize("number", numbers(12, quick=2, sweep=6))
@pytest.mark.parametrize("dtype", ["float16", pytest.param("float8_e4m3fn", marks=pytest.mark.slow)])
def test_attention_after_random_changes(dtype, number, engine):
    """NaN and infinities in every token that is removed, also of other sequences and of cancelled steps, change no result."""
    machine = Machine(engine, number, dtype)
    for turn in range(8):
        machine.append()
        for queries in (1, 2, 5 + 20 * (turn == 7)):
            machine.check(queries)
