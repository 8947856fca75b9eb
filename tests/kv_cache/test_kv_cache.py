"""The paged key/value cache, compared with a plain Python model: its contents, page table, lengths, and errors."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest

from cupy_sdpa import KVCache, OutOfPages

ENGINES = ["numpy", "fake"]


@pytest.fixture(params=ENGINES)
def engine(request):
    """A module to create arrays with, and the options and functions that differ between numpy and CuPy arrays."""
    if request.param == "numpy":
        return SimpleNamespace(options={"numpy": True}, put=lambda x: x, get=np.asarray)
    fake = request.getfixturevalue("fake")
    return SimpleNamespace(options={}, put=fake.asarray, get=lambda x: x.get())


def bits(x):
    """The elements as integers: NaN equals itself, and bfloat16 needs no arithmetic."""
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


class Model:
    """A cache, and what it must contain: for each sequence a list of tokens, each of which has (k, v) of every layer."""

    def __init__(self, engine, rng, **shape):
        self.engine, self.rng = engine, rng
        self.cache = KVCache(**shape, **engine.options)
        self.tokens = [[] for _ in range(self.cache.batch)]

    def state(self):
        """Everything that a refused operation must not change."""
        cache = self.cache
        arrays = [cache.lengths, cache.full_table, *cache._storage, *cache._parts]
        return (
            [bits(self.engine.get(x)).copy() for x in arrays],
            copy.deepcopy(vars(cache._pages)),
            repr(cache),
            cache._step,
        )

    def unchanged(self, error, match, function, *args, **more):
        """Check that a call raises and changes nothing."""
        before = self.state()
        with pytest.raises(error, match=match):
            function(*args, **more)
        np.testing.assert_equal(self.state(), before)

    def poison_free_pages(self):
        """Fill the pages without owner with NaN, as an earlier owner could have."""
        for storage in self.cache._storage:
            for page in self.cache._pages.free:
                storage[..., page, :] = np.array(np.nan, self.cache.dtype)

    def given(self, counts, form, extra=0):
        """Random new tokens as arrays for every layer, dense or packed, in several layouts; and the tokens per sequence."""
        cache, rng = self.cache, self.rng
        made, tokens = [], [[[] for _ in range(n)] for n in counts]
        most = max(counts) + (0 if form == "packed" else extra)
        layout = rng.integers(4)
        for _ in range(cache.layers):
            pair = []
            for dim in (cache.head_dim, cache.head_dim_v):
                each = [rng.standard_normal((dim, cache.heads_kv, n)).astype(cache.dtype) for n in counts]
                for b, x in enumerate(each):
                    for i in range(counts[b]):
                        tokens[b][i].append(x[..., i])
                if form == "packed":
                    x = np.concatenate(each, axis=2)
                else:
                    x = np.full((dim, cache.heads_kv, most, cache.batch), np.nan, cache.dtype)
                    for b, of in enumerate(each):
                        x[:, :, : counts[b], b] = of
                pair.append(self.strided(x, layout))
            made.append(pair)
        return made, [[tuple(zip(x[::2], x[1::2], strict=True)) for x in of] for of in tokens]

    def strided(self, x, layout):
        """The array on the device: dense, with gaps, with tokens before heads, or at an odd address."""
        put = self.engine.put
        if layout == 0:
            return put(np.asfortranarray(x))
        if layout == 1:
            return put(np.asfortranarray(np.repeat(x, 2, axis=2)))[:, :, ::2]
        if layout == 2:
            return put(np.asfortranarray(x.swapaxes(1, 2))).transpose(0, 2, 1, *range(3, x.ndim))
        return put(np.asfortranarray(np.concatenate([x[:1], x], axis=0)))[1:]

    def step(self, counts, form, announce, extra=0):
        """Append one step in all layers."""
        counts = [int(n) for n in counts]
        made, tokens = self.given(counts, form, extra)
        self.poison_free_pages()
        whole = form == "dense" and len(set(counts)) == 1 and not extra
        given = counts[0] if whole and self.rng.integers(2) else counts
        needs = self.pages_needed(counts)
        append = [(k, v, layer) for layer, (k, v) in enumerate(made)]
        if max(len(x) + n for x, n in zip(self.tokens, counts, strict=True)) > self.cache.max_length:
            self.unchanged(ValueError, "max_length", self.cache.begin_step, given)
            self.unchanged(ValueError, "max_length", self.cache.append, *append[0], counts=given)
            return
        if needs > self.cache.free_pages:
            self.unchanged(OutOfPages, rf"needs {needs} pages, but {self.cache.free_pages} of", self.cache.begin_step, given)
            self.unchanged(OutOfPages, rf"needs {needs} pages", self.cache.append, *append[0], counts=given)
            return
        free = self.cache.free_pages
        if announce:
            self.cache.begin_step(given)
            self.cache.append(*append[0])
        else:
            self.cache.append(*append[0], **({} if whole else {"counts": given}))
        assert self.cache.free_pages == free - needs
        for one in append[1:]:
            self.cache.append(*one)
        for own, new in zip(self.tokens, tokens, strict=True):
            own += new

    def pages_needed(self, counts):
        """The pages that a step takes; partial pages with several owners are copied by all writers but the last owner."""
        pages, size = self.cache._pages, self.cache.page_size
        needed, writers = 0, {}
        for b, n in enumerate(counts):
            length = len(self.tokens[b])
            needed += -(-(length + n) // size) - -(-length // size)
            if n and length % size:
                writers.setdefault(pages.by_sequence[b][-1], []).append(b)
        return needed + sum(min(len(of), pages.owners[page] - 1) for page, of in writers.items())

    def check(self):
        """Compare everything with the model."""
        cache, pages, get = self.cache, self.cache._pages, self.engine.get
        lengths = [len(x) for x in self.tokens]
        assert cache.host_lengths.tolist() == lengths
        assert get(cache.lengths).tolist() == lengths
        assert get(cache.lengths).dtype == get(cache.table).dtype == np.int32
        assert not get(cache._parts.finished).any()
        size = cache.page_size
        used = [-(-n // size) for n in lengths]
        full, table = get(cache.full_table), get(cache.table)
        width = min(1 << (max(1, *used) - 1).bit_length() if max(used) else 1, full.shape[0])
        assert full.shape == (min(-(-cache.max_length // size), cache.pages), cache.batch)
        assert table.shape == (width, cache.batch)
        np.testing.assert_array_equal(table, full[:width])
        owners = np.zeros(cache.pages, int)
        for b, number in enumerate(used):
            assert full[:number, b].tolist() == pages.by_sequence[b]
            assert len(set(pages.by_sequence[b])) == number
            assert not full[number:, b].any()
            owners[full[:number, b]] += 1
        np.testing.assert_array_equal(owners, pages.owners)
        assert sorted(pages.free) == np.flatnonzero(owners == 0).tolist()
        assert cache.free_pages == len(pages.free)
        full_pages = [full[: n // size, b].tolist() for b, n in enumerate(lengths) if n]
        same = 0
        while full_pages and same < min(map(len, full_pages)) and len({x[same] for x in full_pages}) == 1:
            same += 1
        assert cache.shared_prefix() == same * size
        for layer in range(cache.layers):
            for side, stored in enumerate((get(cache.keys(layer)), get(cache.values(layer)))):
                for b, number in enumerate(used):
                    rows = stored[..., full[:number, b]].transpose(0, 1, 3, 2).reshape(*stored.shape[:2], -1)
                    if tokens := [token[layer][side] for token in self.tokens[b]]:
                        np.testing.assert_array_equal(bits(rows[..., : len(tokens)]), bits(np.stack(tokens, axis=-1)))
                    assert np.isfinite(rows.astype(float)).all()


#: The shapes of the caches: (D, Dv, Hkv, page_size, pages, B, layers, max_length, dtype).
SHAPES = {
    "one_row_pages": (8, 8, 1, 1, 6, 1, 1, None, "float16"),
    "two_row_pages": (8, 4, 2, 2, 9, 3, 2, 7, "bfloat16"),
    "odd": (3, 1, 3, 2, 8, 2, 1, None, "bfloat16"),
    "few_pages": (4, 4, 1, 4, 4, 4, 2, None, "float32"),
    "one_page": (1, 2, 1, 3, 1, 2, 1, 2, "float64"),
    "large": (16, 24, 2, 16, 24, 5, 3, 90, "float16"),
}


def random_counts(rng, model):
    """Counts of 0, 1 and 2 as often as large ones."""
    most = 2 * model.cache.page_size
    kind, batch = rng.integers(4), model.cache.batch
    if kind == 0:
        return [int(rng.integers(3))] * batch
    if kind == 1:
        return rng.integers(0, 3, batch)
    if kind == 2:
        return rng.integers(0, most + 1, batch)
    return np.where(np.arange(batch) == rng.integers(batch), rng.integers(1, most + 1), 0)


def operate(model, rng):
    """One random operation, allowed or refused."""
    cache = model.cache
    kind = rng.choice(["step", "step", "step", "fork", "fork", "truncate", "release"])
    b = int(rng.integers(cache.batch))
    if kind == "step":
        form = rng.choice(["dense", "packed"])
        extra = int(rng.integers(3)) if form == "dense" else 0
        model.step(random_counts(rng, model), form, announce=bool(rng.integers(2)), extra=extra)
    elif kind == "fork":
        source = int(rng.choice([i for i, x in enumerate(model.tokens) if x] or [b]))
        b = int(rng.choice([i for i, x in enumerate(model.tokens) if not x] or [b]))
        if model.tokens[b]:
            model.unchanged(ValueError, f"sequence {b}, has {len(model.tokens[b])} tokens", cache.fork, source, b)
        else:
            cache.fork(source, b)
            model.tokens[b] = list(model.tokens[source])
    elif kind == "truncate":
        present = len(model.tokens[b])
        model.unchanged(ValueError, f"has {present} tokens", cache.truncate, b, present + 1)
        length = int(rng.integers(max(0, present - 3), present + 1))
        cache.truncate(b, length)
        del model.tokens[b][length:]
    else:
        cache.release(b)
        model.tokens[b].clear()


def model_of(engine, rng, name):
    d, dv, heads, size, pages, batch, layers, longest, dtype = SHAPES[name]
    return Model(
        engine, rng, head_dim=d, head_dim_v=dv, heads_kv=heads, page_size=size, pages=pages, batch=batch, layers=layers,
        max_length=longest, dtype=dtype,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", SHAPES)
def test_random_operations(name, seed, engine):
    """After every operation the cache is what the model says; free pages are full of NaN before every step."""
    rng = np.random.default_rng(seed)
    model = model_of(engine, rng, name)
    for _ in range(100):
        operate(model, rng)
        model.check()


def tokens_of(rng, *shape):
    return np.asfortranarray(rng.standard_normal(shape).astype(np.float16))


@pytest.fixture
def small(engine):
    """A cache of 2 sequences with 3 and 1 tokens, in 2 layers; and a function that gives new tokens."""
    cache = KVCache(4, 2, pages=3, batch=2, page_size=2, dtype="float16", layers=2, max_length=5, **engine.options)

    def new(*shape, dtype="float16", order="F"):
        return engine.put(np.ones(shape, dtype, order=order))

    for layer in range(2):
        cache.append(new(4, 2, 3, 2), new(4, 2, 3, 2), layer, counts=[3, 1] if layer == 0 else None)
    return SimpleNamespace(cache=cache, new=new, x=new(4, 2, 1, 2), packed=new(4, 2, 3))


#: Refused calls: the call, the error, and a part of its message.
REFUSED = {
    "counts_length": (lambda s: s.cache.begin_step([1, 2, 3]), ValueError, r"shape \(3,\); pass one number, or 2 numbers"),
    "counts_negative": (lambda s: s.cache.begin_step([1, -2]), ValueError, r"\[1, -2\].*truncate\(\)"),
    "counts_float": (lambda s: s.cache.begin_step(1.0), TypeError, "1.0; it must be integers"),
    "counts_huge": (lambda s: s.cache.begin_step([2**62, 0]), ValueError, f"gets {2**62}, but max_length is 5"),
    "counts_unsigned": (lambda s: s.cache.begin_step(np.full(2, 2**64 - 1, np.uint64)), ValueError, "must not be negative"),
    "too_long": (lambda s: s.cache.begin_step([3, 0]), ValueError, "sequence 0 has 3 tokens and gets 3, but max_length is 5"),
    "out_of_pages": (lambda s: s.cache.begin_step([0, 2]), OutOfPages, "needs 1 pages, but 0 of 3 are free; release"),
    "memory_error": (lambda s: s.cache.begin_step([0, 2]), MemoryError, "more pages="),
    "layer": (lambda s: s.cache.append(s.x, s.x, 2), ValueError, "layer is 2; the cache has 2, from 0 to 1"),
    "layer_type": (lambda s: s.cache.keys("0"), TypeError, "layer is '0'; it must be an integer"),
    "head_dim": (lambda s: s.cache.append(s.new(8, 2, 1, 2), s.x), ValueError, r"k has shape \(8, 2, 1, 2\).*\(4, 2, S, 2\)"),
    "head_dim_v": (lambda s: s.cache.append(s.x, s.new(8, 2, 1, 2)), ValueError, r"v has shape \(8, 2, 1, 2\).*\(4, 2, S, 2\)"),
    "heads": (lambda s: s.cache.append(s.new(4, 1, 1, 2), s.x), ValueError, r"k has shape \(4, 1, 1, 2\)"),
    "batch": (lambda s: s.cache.append(s.new(4, 2, 1, 3), s.x), ValueError, r"k has shape \(4, 2, 1, 3\).*packed \(4, 2, T\)"),
    "axes": (lambda s: s.cache.append(s.new(4, 2), s.x), ValueError, r"k has shape \(4, 2\)"),
    "tokens_of_v": (lambda s: s.cache.append(s.x, s.new(4, 2, 2, 2)), ValueError, r"\(4, 2, 1, 2\), v \(4, 2, 2, 2\).*same tokens"),
    "dtype": (lambda s: s.cache.append(s.new(4, 2, 1, 2, dtype="f4"), s.x), TypeError, "k is float32, but the cache is float16"),
    "stride": (lambda s: s.cache.append(s.x, s.new(4, 2, 1, 2, order="C")), ValueError, "stride of 8 bytes .* must be 2.*asfortran"),
    "list": (lambda s: s.cache.append([1.0], s.x), TypeError, "k is builtins.list, but the cache consists of .* arrays"),
    "dense_tokens": (lambda s: s.cache.append(s.x, s.x, counts=[2, 0]), ValueError, r"S = 1 tokens, .* maximum of counts is 2"),
    "packed_tokens": (lambda s: s.cache.append(s.packed, s.packed, counts=[1, 1]), ValueError, "T = 3 tokens, .* sum of counts is 2"),
    "packed_counts": (lambda s: s.cache.append(s.packed, s.packed), ValueError, "packed arrays need .* counts="),
    "fork_full": (lambda s: s.cache.fork(0, 1), ValueError, r"target, sequence 1, has 1 tokens; call release\(1\) first"),
    "fork_range": (lambda s: s.cache.fork(2, 1), ValueError, "sequence is 2; the cache has 2, from 0 to 1"),
    "truncate_longer": (lambda s: s.cache.truncate(1, 2), ValueError, "length is 2, but sequence 1 has 1 tokens"),
    "truncate_negative": (lambda s: s.cache.truncate(1, -1), ValueError, "length is -1"),
    "truncate_type": (lambda s: s.cache.truncate(1, 0.5), TypeError, "length is 0.5; it must be an integer"),
    "release_range": (lambda s: s.cache.release(-1), ValueError, "sequence is -1; the cache has 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_calls(name, small, engine):
    """The message names both values and the remedy, and the cache is unchanged."""
    call, error, match = REFUSED[name]
    before = [bits(engine.get(x)).copy() for x in (small.cache._state, *small.cache._storage)], small.cache.host_lengths
    with pytest.raises(error, match=match):
        call(small)
    after = [bits(engine.get(x)) for x in (small.cache._state, *small.cache._storage)], small.cache.host_lengths
    np.testing.assert_equal(after, before)
    assert repr(small.cache) == "<KVCache: 2 of 2 sequences, 4 tokens, 3 of 3 pages, 2 layers>"
    small.cache.begin_step(0)


#: Appends of two layers, the second of which is refused, and words of the message.
WRONG_LAYERS = {
    "no_layer": (lambda s: s.cache.append(s.x, s.x), RuntimeError, r"layers \[1\] of this step are not appended; .*layer=.*cancel_step"),
    "twice": (lambda s: s.cache.append(s.x, s.x, 0, counts=1), RuntimeError, r"layers \[1\] of this step are not appended"),
    "begin_step": (lambda s: s.cache.begin_step(), RuntimeError, r"before begin_step\(\), or call cancel_step"),
    "fork": (lambda s: s.cache.fork(0, 1), RuntimeError, r"before fork\(\)"),
    "release": (lambda s: s.cache.release(0), RuntimeError, r"before truncate\(\)"),
    "other_counts": (lambda s: s.cache.append(s.x, s.x, 1, counts=[1, 0]), ValueError, r"\[1, 0\], .* announced with \[1, 1\]"),
    "other_tokens": (lambda s: s.cache.append(*[s.new(4, 2, 2, 2)] * 2, 1), ValueError, "S = 2 tokens in layer 1, but 1 in layer 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_LAYERS)
def test_a_step_has_every_layer_once(name, small):
    """Layers that lack the tokens of a step would be attended to as zeros: the next step and changes of pages are refused."""
    small.cache.release(0)
    small.cache.append(small.x, small.x)
    call, error, match = WRONG_LAYERS[name]
    before = small.cache.host_lengths.tolist()
    with pytest.raises(error, match=match):
        call(small)
    assert small.cache.host_lengths.tolist() == before == [1, 2]
    small.cache.append(small.x, small.x, 1)
    with pytest.raises(RuntimeError, match="no step has begun; append layer 0 first"):
        small.cache.append(small.x, small.x, 1)


def test_a_layer_is_appended_once(engine):
    """The layer that is missing is named."""
    cache = KVCache(4, 1, pages=4, batch=1, layers=3, dtype="float16", **engine.options)
    x = engine.put(np.ones((4, 1, 2, 1), np.float16, order="F"))
    cache.append(x, x)
    cache.append(x, x, 2)
    with pytest.raises(RuntimeError, match=r"layer 2 of this step is appended already; layers \[1\] are not: pass layer="):
        cache.append(x, x, 2)
    cache.append(x, x, 1)


@pytest.mark.parametrize("appended", [0, 1, 2])
def test_a_step_is_cancelled(appended, small, engine):
    """Its tokens and pages are removed, whichever layers were appended; later steps are as without it."""
    cache = small.cache
    cache.truncate(0, 1)
    before = [engine.get(x).copy() for x in (cache.lengths, cache.full_table)]
    cache.begin_step([2, 1])
    for layer in range(appended):
        cache.append(*[small.new(4, 2, 2, 2)] * 2, layer)
    if appended == cache.layers:
        with pytest.raises(RuntimeError, match=r"every layer of the last step is appended; truncate\(\)"):
            cache.cancel_step()
        return
    cache.cancel_step()
    for x, y in zip(before, (cache.lengths, cache.full_table), strict=True):
        np.testing.assert_array_equal(engine.get(y), x)
    assert (cache.host_lengths.tolist(), cache.free_pages) == ([1, 1], 1)
    for layer in range(2):
        cache.append(small.x, small.x, layer)
    assert engine.get(cache.lengths).tolist() == [2, 2]


#: Calls in the wrong order after ``begin_step``, and a part of the message.
OUT_OF_ORDER = {
    "begin_step": (lambda s: s.cache.begin_step(1), r"append its layer 0 before begin_step\(\)"),
    "fork": (lambda s: s.cache.fork(0, 1), r"before fork\(\)"),
    "truncate": (lambda s: s.cache.truncate(0, 1), r"before truncate\(\)"),
    "release": (lambda s: s.cache.release(0), r"before truncate\(\)"),
    "layer": (lambda s: s.cache.append(s.x, s.x, 1), "layer 1 is appended, but layer 0 of this step is not"),
}


@pytest.mark.parametrize("name", OUT_OF_ORDER)
def test_calls_in_the_wrong_order(name, small):
    """Between the announcement of a step and its first append, the lengths on the host and the device differ."""
    small.cache.release(0)
    small.cache.fork(1, 0)
    small.cache.begin_step(0)
    call, match = OUT_OF_ORDER[name]
    with pytest.raises(RuntimeError, match=match):
        call(small)
    small.cache.append(small.x, small.x)
    small.cache.append(small.x, small.x, 1)
    assert small.cache.host_lengths.tolist() == [1, 1]


#: Refused arguments of the constructor.
REFUSED_SHAPES = {
    "head_dim": ({"head_dim": 0}, ValueError, "head_dim is 0; it must be 1 or more"),
    "heads": ({"heads_kv": 2.0}, TypeError, "heads_kv is 2.0; it must be an integer"),
    "pages": ({"pages": -1}, ValueError, "pages is -1"),
    "dtype": ({"dtype": "int32"}, TypeError, "dtype is int32; it must be one of float16, bfloat16, float32, float64"),
    "max_length": ({"max_length": 0}, ValueError, "max_length is 0"),
    "too_large": ({"heads_kv": 1 << 30}, ValueError, r"max_length is 8 with 1073741824 heads.*2\*\*31"),
}


@pytest.mark.parametrize("name", REFUSED_SHAPES)
def test_refused_shapes(name, engine):
    """The message names the argument and its value."""
    changed, error, match = REFUSED_SHAPES[name]
    with pytest.raises(error, match=match):
        KVCache(**{"head_dim": 4, "heads_kv": 2, "pages": 4, "batch": 2, "page_size": 2} | changed, **engine.options)


def test_other_kinds_of_arrays(fake):
    """Arrays of numpy and CuPy are not mixed, and counts are on the host."""
    x, shape = np.ones((4, 2, 1, 1), np.float16, order="F"), {"pages": 2, "batch": 1, "dtype": "float16"}
    on_device, on_host = KVCache(4, 2, **shape), KVCache(4, 2, **shape, numpy=True)
    with pytest.raises(TypeError, match=r"k is numpy.ndarray, but the cache consists of CuPy arrays"):
        on_device.append(x, x)
    with pytest.raises(TypeError, match=r"v is cupy.ndarray, but the cache consists of numpy arrays"):
        on_host.append(x, fake.asarray(x))
    with pytest.raises(TypeError, match=r"counts is a CuPy array; pass host numbers, for example counts.get\(\)"):
        on_device.begin_step(fake.asarray(np.ones(1, int)))


def test_first_append_of_another_layer(engine):
    """Layer 0 is the first."""
    cache = KVCache(4, 2, pages=2, batch=1, dtype="float16", layers=2, **engine.options)
    x = engine.put(np.ones((4, 2, 1, 1), np.float16, order="F"))
    with pytest.raises(RuntimeError, match="append layer 0 first"):
        cache.append(x, x, 1)


def test_arrays_keep_their_addresses(engine):
    """The table grows in place; its views have a power of two of rows, at most the full width."""
    cache = KVCache(2, 1, pages=5, batch=1, page_size=1, dtype="float16", **engine.options)
    assert cache.keys().shape == (2, 1, 1, 5)
    assert not engine.get(cache.keys()).any()
    address = lambda x: engine.get(x).ctypes.data if engine.options else x.data.ptr  # noqa: E731
    fixed = [address(x) for x in (cache.full_table, cache.lengths)]
    x = engine.put(np.ones((2, 1, 1, 1), np.float16, order="F"))
    widths = []
    for _ in range(5):
        cache.append(x, x)
        widths.append(cache.table.shape[0])
        assert address(cache.table) == fixed[0]
    assert widths == [1, 2, 4, 4, 5]
    cache.truncate(0, 3)
    assert cache.table.shape == (4, 1)
    assert [address(x) for x in (cache.full_table, cache.lengths)] == fixed
    assert [engine.get(cache.full_table)[:, 0].tolist(), engine.get(cache.lengths).tolist()] == [[4, 3, 2, 0, 0], [3]]


def test_a_shared_page_that_is_truncated_is_copied(engine):
    """A full page with two owners, shortened in one of them, is copied before that one grows; the other keeps its tokens."""
    cache = KVCache(2, 1, pages=4, batch=2, page_size=2, dtype="float16", **engine.options)
    rng = np.random.default_rng(0)
    first, second = tokens_of(rng, 2, 1, 4), tokens_of(rng, 2, 1, 1)
    cache.append(engine.put(first), engine.put(first), counts=[4, 0])
    cache.fork(0, 1)
    cache.truncate(1, 3)
    assert cache.shared_prefix() == 2
    cache.append(engine.put(second), engine.put(second), counts=[0, 1])
    table, keys = engine.get(cache.table), engine.get(cache.keys())
    np.testing.assert_array_equal(np.concatenate([keys[:, :, :, p] for p in table[:, 0]], axis=2), first)
    np.testing.assert_array_equal(
        np.concatenate([keys[:, :, :, p] for p in table[:, 1]], axis=2), np.concatenate([first[..., :3], second], axis=2)
    )
    assert cache.free_pages == 1


def test_an_unchanged_step_enqueues_nothing(fake):
    """A step with the same counts and no new page is host work alone; a new page takes one launch."""
    from fake_cupy import DEVICE

    cache = KVCache(2, 1, pages=4, batch=2, page_size=3, dtype="float16")
    x = fake.asarray(np.ones((2, 1, 1, 2), np.float16, order="F"))
    numbers = []
    for _ in range(4):
        before = len(DEVICE.launches)
        cache.begin_step()
        middle = len(DEVICE.launches)
        cache.append(x, x)
        numbers.append((middle - before, len(DEVICE.launches) - middle))
    assert numbers == [(1, 1), (0, 1), (0, 1), (1, 1)]


def test_many_new_entries_of_the_table(engine):
    """More entries than one launch stores; and a release that clears them."""
    cache = KVCache(1, 1, pages=1300, batch=2, page_size=1, dtype="float16", **engine.options)
    x = engine.put(np.ones((1, 1, 1201, 2), np.float16, order="F"))
    cache.append(x, x, counts=[1201, 3])
    table = engine.get(cache.table)
    assert table[:1201, 0].tolist() == list(range(1299, 98, -1))
    assert table[:4, 1].tolist() == [98, 97, 96, 0]
    cache.release(0)
    assert cache.table.shape == (4, 2)
    assert not engine.get(cache.full_table)[:, 0].any()
    assert cache.free_pages == 1297


def replayed(cupy, form, steps, batch=3, layers=2):
    """Capture the append of every layer, replay it with random counts, and compare with appends to a numpy cache."""
    rng = np.random.default_rng(5)
    shape = {"head_dim": 16, "heads_kv": 2, "head_dim_v": 8, "pages": 60, "batch": batch, "page_size": 4, "dtype": "float16"}
    cache, known = KVCache(**shape, layers=layers), KVCache(**shape, layers=layers, numpy=True)
    most = 2
    tail = (most * batch,) if form == "packed" else (most, batch)
    arrays = [[cupy.asarray(tokens_of(rng, dim, 2, *tail)) for dim in (16, 8)] for _ in range(layers)]
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        for step in range(steps):
            counts = rng.integers(0, most + 1, batch) if step else np.full(batch, most)
            if cache.free_pages < 2 * batch:
                for of in (cache, known):
                    of.release(1)
                    of.truncate(0, int(of.host_lengths[0]) // 2)
            cache.begin_step(counts)
            if not step:
                stream.begin_capture()
                for layer, (k, v) in enumerate(arrays):
                    cache.append(k, v, layer)
                with pytest.raises(RuntimeError, match="being captured; call begin_step"):
                    cache.begin_step(1)
                graph = stream.end_capture()
                assert not cache.lengths.get().any()
            new = [[tokens_of(rng, *x.shape) for x in pair] for pair in arrays]
            total = int(counts.sum())
            for layer, pair in enumerate(arrays):
                for x, of in zip(pair, new[layer], strict=True):
                    x[...] = cupy.asarray(of)
                given = [x[..., :total] for x in new[layer]] if form == "packed" else new[layer]
                known.append(*given, layer, counts=None if layer else counts)
            graph.launch(stream)
            assert cache.lengths.get().tolist() == known.lengths.tolist() == cache.host_lengths.tolist()
            np.testing.assert_array_equal(cache.table.get(), known.table)
    for layer in range(layers):
        np.testing.assert_array_equal(cache.keys(layer).get(), known.keys(layer))
        np.testing.assert_array_equal(cache.values(layer).get(), known.values(layer))


@pytest.mark.parametrize("form", ["dense", "packed"])
def test_captured_appends(form, fake):
    """A graph of the appends of two layers, replayed with other counts and across pages."""
    replayed(fake, form, 60)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["dense", "packed"])
def test_captured_appends_on_a_gpu(form, cupy):
    """The same with a CUDA graph."""
    replayed(cupy, form, 100)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", SHAPES)
def test_random_operations_on_a_gpu(name, seed, cupy):
    """The random operations with the compiled kernels."""
    engine = SimpleNamespace(options={}, put=cupy.asarray, get=lambda x: x.get())
    rng = np.random.default_rng(seed)
    model = model_of(engine, rng, name)
    for _ in range(100):
        operate(model, rng)
        model.check()


@pytest.mark.gpu
def test_many_blocks_on_a_gpu(cupy):
    """The length advances after every block has read it: long appends, each of many blocks, to ragged sequences."""
    rng = np.random.default_rng(1)
    shape = {"head_dim": 64, "heads_kv": 4, "pages": 200, "batch": 4, "page_size": 64, "dtype": "float16"}
    cache, known = KVCache(**shape), KVCache(**shape, numpy=True)
    for _ in range(10):
        counts = rng.integers(0, 600, 4)
        if cache.free_pages < 40:
            for b in range(4):
                cache.release(b)
                known.release(b)
        x = tokens_of(rng, 64, 4, int(counts.sum()))
        cache.append(cupy.asarray(x), cupy.asarray(x), counts=counts)
        known.append(x, x, counts=counts)
        np.testing.assert_array_equal(cache.keys().get(), known.keys())
        np.testing.assert_array_equal(cache.values().get(), known.values())
        assert cache.lengths.get().tolist() == known.lengths.tolist()


def test_a_capture_without_a_step_raises(fake):
    """The message says that begin_step is called before the capture; the capture continues."""
    cache = KVCache(4, 2, pages=2, batch=1, dtype="float16", layers=2)
    x = fake.asarray(np.ones((4, 2, 1, 1), np.float16, order="F"))
    stream = fake.cuda.Stream(non_blocking=True)
    fake.cuda.Device().synchronize()
    with stream:
        for layer in range(2):
            stream.begin_capture()
            with pytest.raises(RuntimeError, match=r"no step is announced; call begin_step\(\) before the capture begins"):
                cache.append(x, x, layer)
            stream.end_capture()


def test_cuda_graphs_are_optional_after_a_capture(fake):
    """After a capture, a step that begins with begin_step may be appended without the graph."""
    cache = KVCache(4, 2, pages=2, batch=1, page_size=2, dtype="float16")
    x = fake.asarray(np.ones((4, 2, 1, 1), np.float16, order="F"))
    stream = fake.cuda.Stream(non_blocking=True)
    fake.cuda.Device().synchronize()
    with stream:
        cache.begin_step()
        stream.begin_capture()
        cache.append(x, x)
        graph = stream.end_capture()
        graph.launch(stream)
        cache.begin_step()
        cache.append(x, x)
        cache.append(x, x)
        cache.truncate(0, 2)
        cache.begin_step()
        graph.launch(stream)
        assert cache.lengths.get().tolist() == cache.host_lengths.tolist() == [3]


def test_without_a_gpu(monkeypatch):
    """The error names the option of a cache on the CPU."""
    monkeypatch.setattr("cupy_sdpa.device.cupy_runtime.current_device", lambda: None)
    with pytest.raises(RuntimeError, match=r"numpy is False and there is no GPU here.*pass numpy=True"):
        KVCache(8, 2, pages=4, batch=2)
