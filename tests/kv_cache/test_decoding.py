"""Decoding with a key/value cache: random sequences of steps, each compared with dense causal attention over the history.

The history of every sequence is kept in numpy. Pages without an owner are full of NaN before every step.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from cupy_sdpa import KVCache, attention

#: The shapes of the caches: (D, Dv, Hkv, query heads per key/value head, page size, pages, B, layers, max_length).
SHAPES = {
    "one_sequence": (8, 8, 1, 1, 4, 20, 1, 1, None),
    "two_layers": (8, 16, 2, 2, 4, 40, 3, 2, 90),
    "one_row_pages": (16, 8, 1, 4, 1, 130, 2, 1, 70),
    "wide_pages": (8, 8, 2, 1, 64, 9, 3, 1, 128),
    "many": (8, 8, 1, 3, 16, 30, 5, 1, 100),
}
#: The options of attention by name; arrays are made from a random number generator and the number of query heads.
OPTIONS = {
    "plain": lambda rng, hq: {},
    "window": lambda rng, hq: {"window": (int(rng.integers(0, 20)), 0)},
    "sinks": lambda rng, hq: {"sinks": rng.standard_normal(hq).astype(np.float32)},
    "softcap": lambda rng, hq: {"softcap": 1.5},
    "all": lambda rng, hq: {"sinks": np.ones(hq, np.float32), "softcap": 3.0, "window": (9, 0)},
}
ENGINES = ["numpy", "fake", pytest.param("gpu", marks=pytest.mark.gpu)]


@pytest.fixture(params=ENGINES)
def engine(request):
    """Functions that move arrays to the engine and back, and the dtype and tolerance of the tests."""
    if request.param == "numpy":
        return SimpleNamespace(numpy=True, put=np.asarray, get=np.asarray, dtype="float32", tolerance=2e-5)
    module = request.getfixturevalue("fake" if request.param == "fake" else "cupy")
    return SimpleNamespace(numpy=False, put=module.asarray, get=lambda x: x.get(), dtype="float16", tolerance=6e-3)


def dense(q, k, v, options):
    """Causal attention of the last queries ``(D, Hq, n)`` to ``(D, Hkv, N)``, from the definition; float64."""
    d, hq, n = q.shape
    _, hkv, total = k.shape
    out, stats = np.zeros((v.shape[0], hq, n)), np.zeros((n, hq))
    position, key = np.arange(total - n, total)[:, None], np.arange(total)
    left, _ = options.get("window", (None, None))
    seen = (key <= position) & (True if left is None else key >= position - left)
    for h in range(hq):
        scores = q[:, h].T @ k[:, h * hkv // hq] / d**0.5
        if cap := options.get("softcap"):
            scores = cap * np.tanh(scores / cap)
        sink = options["sinks"][h] if "sinks" in options else -np.inf
        weights = np.where(seen, np.exp(scores), 0)
        sums = weights.sum(axis=1, keepdims=True) + np.exp(sink)
        out[:, h] = v[:, h * hkv // hq] @ (weights / sums).T
        stats[:, h] = np.log(sums[:, 0])
    return out, stats


class Model:
    """A cache, and the keys and values of every sequence and layer in numpy."""

    def __init__(self, engine, rng, name, options, num_splits=None):
        d, dv, heads, group, page, pages, batch, layers, longest = SHAPES[name]
        self.engine, self.rng, self.options, self.num_splits = engine, rng, options, num_splits
        self.dims, self.heads, self.group, self.steps = (d, dv), heads, group, 0
        self.cache = KVCache(
            d, heads, pages=pages, batch=batch, page_size=page, head_dim_v=dv, dtype=engine.dtype, layers=layers,
            max_length=longest, numpy=engine.numpy,
        )  # fmt: skip
        self.history = [[tuple(np.zeros((dim, heads, 0)) for dim in (d, dv)) for _ in range(batch)] for _ in range(layers)]

    def length(self, b):
        return self.history[0][b][0].shape[2]

    def poison(self):
        """Fill the pages without an owner with NaN."""
        for storage in self.cache._storage:
            for page in self.cache._pages.free:
                storage[..., page, :] = np.array(np.nan, self.cache.dtype)

    def random(self, *shape):
        """Random numbers that are exact in the dtype of the cache."""
        return np.asfortranarray(self.rng.standard_normal(shape).astype(self.cache.dtype))

    def fits(self, counts):
        """Whether a step neither exceeds the maximum length nor the free pages; in doubt it does."""
        size = self.cache.page_size
        needed = sum(n // size + 2 for n in counts if n)
        return needed <= self.cache.free_pages and all(
            self.length(b) + n <= self.cache.max_length for b, n in enumerate(counts)
        )

    def step(self, counts, *, packed=False, full=False):
        """Append new tokens in all layers, and compare the attention of every new token; returns outputs and statistics."""
        cache, engine = self.cache, self.engine
        self.steps += 1
        self.poison()
        if announced := self.rng.random() < 0.5:
            cache.begin_step(counts)
        results = []
        for layer in range(cache.layers):
            given, kinds = [], (*self.dims, self.dims[0])
            for kind, dim in enumerate(kinds):
                heads = self.heads * (self.group if kind == 2 else 1)
                given.append([self.random(dim, heads, n) for n in counts])
            for b in range(cache.batch):
                old, new = self.history[layer][b], (given[0][b], given[1][b])
                self.history[layer][b] = tuple(np.concatenate(pair, axis=2) for pair in zip(old, new, strict=True))
            k, v, q = (self.joined(each, counts, packed) for each in given)
            cache.append(k, v, layer, **({} if announced or layer else {"counts": counts}))
            out, stats = self.attend(q, layer, counts, packed, full)
            self.compare(engine.get(out), engine.get(stats), given[2], layer, counts, packed)
            results.append((engine.get(out), engine.get(stats)))
        return results

    def joined(self, each, counts, packed):
        """The tokens of all sequences as one array on the engine: packed, or dense with NaN after the counts."""
        if packed:
            return self.engine.put(np.asfortranarray(np.concatenate(each, axis=2)))
        x = np.full((*each[0].shape[:2], max(counts), len(counts)), np.nan, self.cache.dtype, order="F")
        for b, n in enumerate(counts):
            x[:, :, :n, b] = each[b]
        return self.engine.put(x)

    def attend(self, q, layer, counts, packed, full):
        cache, put = self.cache, self.engine.put
        options = {name: put(x) if isinstance(x, np.ndarray) else x for name, x in self.options.items()}
        if packed:
            starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
            options |= {"cu_seqlens_q": put(starts), "max_seqlen_q": max(counts)}
        else:
            options["seq_lens_q"] = put(np.array(counts, np.int32))
            rows = max(counts) * self.group
            if self.num_splits and rows <= 128 and not (rows == 1 and "window" in options):
                options["num_splits"] = self.num_splits
        table = cache.full_table if full else cache.table
        return attention(
            q, cache.keys(layer), cache.values(layer), page_table=table, seq_lens_kv=cache.lengths, causal="bottom_right",
            return_stats=True, **options,
        )  # fmt: skip

    def compare(self, out, stats, queries, layer, counts, packed):
        start = 0
        for b, n in enumerate(counts):
            k, v = self.history[layer][b]
            want, log_sums = dense(queries[b].astype(float), k.astype(float), v.astype(float), self.options)
            got = out[:, :, start : start + n] if packed else out[:, :, :n, b]
            rows = stats[:, start : start + n].T if packed else stats[:n, :, b]
            np.testing.assert_allclose(got.astype(float), want, rtol=0, atol=self.engine.tolerance)
            np.testing.assert_allclose(rows, log_sums, rtol=self.engine.tolerance, atol=self.engine.tolerance)
            if not packed:
                assert not out[:, :, n:, b].any()
                assert np.isneginf(stats[n:, :, b]).all()
            start += n

    def operate(self):
        """One random operation."""
        rng, cache = self.rng, self.cache
        b, kind = int(rng.integers(cache.batch)), rng.choice(["step"] * 6 + ["fork", "truncate", "release"])
        if kind == "fork":
            full = [i for i in range(cache.batch) if self.length(i)]
            empty = [i for i in range(cache.batch) if not self.length(i)]
            if full and empty:
                source, target = int(rng.choice(full)), int(rng.choice(empty))
                cache.fork(source, target)
                for layer in self.history:
                    layer[target] = layer[source]
        elif kind in ("truncate", "release"):
            length = int(rng.integers(0, self.length(b) + 1)) if kind == "truncate" else 0
            cache.truncate(b, length) if kind == "truncate" else cache.release(b)
            for layer in self.history:
                layer[b] = tuple(x[:, :, :length] for x in layer[b])
        else:
            counts = self.counts()
            if max(counts) and self.fits(counts):
                self.step(counts, packed=rng.random() < 0.3, full=rng.random() < 0.5)

    def counts(self):
        """The numbers of new tokens: one for every sequence, few, or chunks of up to 40 for some."""
        rng, batch = self.rng, self.cache.batch
        kind = rng.integers(3)
        if kind == 0:
            return [int(self.length(b) > 0) or int(rng.integers(0, 4)) for b in range(batch)]
        if kind == 1:
            return rng.integers(0, 6, batch).tolist()
        return np.where(rng.random(batch) < 0.5, rng.integers(0, 41, batch), rng.integers(0, 2, batch)).tolist()


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", SHAPES)
def test_random_decoding(name, option, engine):
    """After every step the attention of every new token is that of dense causal attention, and never NaN."""
    rng = np.random.default_rng([len(name), len(option)])
    hq = SHAPES[name][2] * SHAPES[name][3]
    num_splits = [None, 1, 3][int(rng.integers(3))]
    model = Model(engine, rng, name, OPTIONS[option](rng, hq), num_splits)
    for _ in range(25):
        model.operate()
    assert model.steps >= 5


def alone(engine, rng, name, tokens, counts, others, place, batch):
    """The results of one sequence: its tokens are given, those of the others are random.

    Args:
        tokens: the keys, values and queries of every step of the sequence.
        counts: the number of new tokens of every step, for all sequences the same, so that Sq is the same.
        others: the lengths of the other sequences before the first step.
        place: the index of the sequence in the batch.
        batch: B.
    """
    d, dv, heads, group, page, _, _, _, longest = SHAPES[name]
    cache = KVCache(
        d, heads, pages=200, batch=batch, page_size=page, head_dim_v=dv, dtype=engine.dtype, max_length=longest,
        numpy=engine.numpy,
    )  # fmt: skip
    before = [0 if b == place else others[b] for b in range(batch)]
    fill = lambda dim, heads, n: rng.standard_normal((dim, heads, n, batch)).astype(engine.dtype)  # noqa: E731
    if max(before):
        cache.append(*(engine.put(np.asfortranarray(fill(dim, heads, max(before)))) for dim in (d, dv)), counts=before)
    results = []
    for step, n in enumerate(counts):
        made = [fill(d, heads, n), fill(dv, heads, n), fill(d, heads * group, n)]
        for x, own in zip(made, tokens[step], strict=True):
            x[..., place] = own
        k, v, q = (engine.put(np.asfortranarray(x)) for x in made)
        cache.append(k, v)
        pages = cache.keys(), cache.values()
        got = attention(
            q, *pages, page_table=cache.full_table, seq_lens_kv=cache.lengths, causal="bottom_right", num_splits=4,
            return_stats=True,
        )  # fmt: skip
        results += [engine.get(x)[..., place] for x in got]
    return results


@pytest.mark.parametrize("name", ["two_layers", "wide_pages", "many"])
def test_a_sequence_does_not_depend_on_the_batch(name, engine):
    """With num_splits and the full table: the same bits, with other lengths, contents, places and batch sizes of the others."""
    rng = np.random.default_rng(len(name))
    d, dv, heads, group, *_ = SHAPES[name]
    counts = [19, 1, 1, 4, 1, 2, 8, 1]
    tokens = [
        [
            rng.standard_normal((dim, n_heads, n)).astype(engine.dtype)
            for dim, n_heads in ((d, heads), (dv, heads), (d, heads * group))
        ]
        for n in counts
    ]
    first = alone(engine, rng, name, tokens, counts, [0, 0, 0], 0, 3)
    for others, place, batch in (
        ([0, 40, 3], 0, 3),
        ([7, 0, 50], 1, 3),
        ([1, 50, 0], 2, 3),
        ([0], 0, 1),
        ([9, 30, 0, 2, 5], 2, 5),
    ):
        again = alone(engine, rng, name, tokens, counts, others, place, batch)
        for one, other in zip(first, again, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("offset", [1, 4])
@pytest.mark.parametrize("sq", [1, 3])
def test_queries_at_any_address(sq, offset, fake):
    """Vector loads need aligned addresses: queries that begin elsewhere give the same bits."""
    rng = np.random.default_rng(0)
    cache = KVCache(8, 1, pages=20, batch=2, page_size=4, dtype="float16")
    x = fake.asarray(np.asfortranarray(rng.standard_normal((8, 1, 30, 2)).astype(np.float16)))
    cache.append(x, x)
    values = rng.standard_normal(8 * 4 * sq * 2 + offset).astype(np.float16)
    shape = (8, 4, sq, 2)
    whole = fake.asarray(values)
    q = whole[offset:].reshape(shape, order="F")
    assert q.data.ptr % 16
    pages = {"page_table": cache.table, "seq_lens_kv": cache.lengths, "causal": "bottom_right", "num_splits": 2}
    wanted = attention(
        fake.asarray(np.asfortranarray(values[offset:].reshape(shape, order="F"))), cache.keys(), cache.values(), **pages
    )
    found = attention(q, cache.keys(), cache.values(), **pages)
    np.testing.assert_array_equal(found.get(), wanted.get())


@pytest.mark.parametrize("batch", [2, 3])
def test_lengths_with_gaps(batch, fake):
    """Every other element of an array: the elements between are not read."""
    rng = np.random.default_rng(0)
    cache = KVCache(8, 1, pages=40, batch=batch, page_size=4, dtype="float16")
    x = fake.asarray(np.asfortranarray(rng.standard_normal((8, 1, 30, batch)).astype(np.float16)))
    cache.append(x, x, counts=[30, 9, 17][:batch])
    q = fake.asarray(np.asfortranarray(rng.standard_normal((8, 4, 2, batch)).astype(np.float16)))
    options = {"causal": "bottom_right", "num_splits": 2, "page_table": cache.table}
    lengths = [cache.lengths, fake.asarray(np.full(batch, 2, np.int32))]
    wide = [fake.asarray(np.repeat(n.get(), 2) * np.tile([1, 0], batch).astype(np.int32)) for n in lengths]
    found, wanted = (
        attention(q, cache.keys(), cache.values(), seq_lens_kv=kv, seq_lens_q=of_q, **options)
        for kv, of_q in ((n[::2] for n in wide), lengths)
    )
    np.testing.assert_array_equal(found.get(), wanted.get())
