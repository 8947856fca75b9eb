"""The paged key/value cache: the order of calls, addresses, launches, CUDA graphs, and decoding with it."""

import itertools

import numpy as np
import pytest
from engines import numbers
from fake_cupy import DEVICE

from cupy_sdpa import KVCache, attention

ON_A_GPU = pytest.mark.parametrize("engine", ["fake", pytest.param("cupy", marks=pytest.mark.gpu)], indirect=True)


def new(engine, *sizes, dtype="float16", **options):
    """A cache of the engine."""
    return KVCache(*sizes, dtype=dtype, numpy=not engine.on_cudnn, **options)


def ones(engine, *shape, dtype="float16"):
    """New tokens."""
    return engine.put(np.ones(shape, dtype, order="F"))


@pytest.mark.parametrize("number", numbers(8, quick=1))
def test_random_caches(number, engine):
    """Attention to the tokens that were appended, after forks, releases and truncations, in several steps."""
    engine.agrees(engine.draw({"cache"}, number), refused=True)


# The order of calls


@pytest.fixture
def small(engine):
    """A cache of 2 sequences with 1 and 1 tokens, in 2 layers, of at most 5 tokens; and new tokens."""
    cache = new(engine, 4, 2, pages=3, batch=2, page_size=2, layers=2, max_length=5)
    for layer in range(2):
        cache.append(*[ones(engine, 4, 2, 1, 2)] * 2, layer)
    return cache, ones(engine, 4, 2, 1, 2)


#: Calls within a step, words of the message if nothing is appended, and if layer 0 is.
WITHIN = {
    "begin_step": (lambda c, x, y: c.begin_step(), r"append its layer 0 before begin_step\(\)", r"before begin_step\(\), or call"),
    "fork": (lambda c, x, y: c.fork(0, 1), r"before fork\(\)", r"layers \[1\] of this step .*before fork\(\)"),
    "truncate": (lambda c, x, y: c.truncate(0, 1), r"before truncate\(\)", r"before truncate\(\)"),
    "release": (lambda c, x, y: c.release(0), r"before truncate\(\)", r"before truncate\(\)"),
    "layer 1": (lambda c, x, y: c.append(x, x, 1), "layer 1 is appended, but layer 0 of this step is not", ""),
    "layer 0": (lambda c, x, y: c.append(x, x, 0, seq_lens_q=1), "", r"layers \[1\] of this step are not appended; .*cancel_step"),
    "counts": (
        lambda c, x, y: c.append(x, x, 1, seq_lens_q=[1, 0]), "layer 0 of this step", r"\[1, 0\], .* announced with \[1, 1\]"
    ),
    "tokens": (lambda c, x, y: c.append(y, y, 1), "layer 0", "S = 2 tokens in layer 1, but 1 in layer 0"),
}  # fmt: skip


@pytest.mark.parametrize("appended", [0, 1])
@pytest.mark.parametrize("name", WITHIN)
def test_calls_within_a_step(name, appended, small, engine):
    """A step has every layer once, layer 0 first; other layers would be attended to as zeros. The message names the layers."""
    cache, x = small
    cache.release(0)
    cache.begin_step(1)
    if appended:
        cache.append(x, x)
    call, match = WITHIN[name][0], WITHIN[name][1 + appended]
    if match:
        with pytest.raises((RuntimeError, ValueError), match=match):
            call(cache, x, ones(engine, 4, 2, 2, 2))
    for layer in range(appended, 2):
        cache.append(x, x, layer)
    assert engine.get(cache.lengths).tolist() == cache.host_lengths.tolist() == [1, 2]
    with pytest.raises(RuntimeError, match="no step has begun; append layer 0 first"):
        cache.append(x, x, 1)


# Addresses and launches


def test_an_unchanged_step_enqueues_nothing(fake):
    """A step with the same counts and no new page is host work alone; a new page takes one launch."""
    cache = KVCache(2, 1, pages=4, batch=2, page_size=3, dtype="float16")
    x, launches = fake.asarray(np.ones((2, 1, 1, 2), np.float16, order="F")), []
    for _ in range(4):
        launches.append(len(DEVICE.launches))
        cache.begin_step()
        launches.append(len(DEVICE.launches))
        cache.append(x, x)
    assert np.diff(launches).tolist() == [1, 1, 0, 1, 0, 1, 1]


def test_many_new_entries_of_the_table(engine):
    """More entries than one launch stores; and a release that clears them."""
    cache, x = new(engine, 1, 1, pages=1300, batch=2, page_size=1), ones(engine, 1, 1, 1201, 2)
    cache.append(x, x, seq_lens_q=[1201, 3])
    table = engine.get(cache.table)
    assert table[:1201, 0].tolist() == list(range(1299, 98, -1))
    assert table[:4, 1].tolist() == [98, 97, 96, 0]
    cache.release(0)
    assert cache.table.shape == (4, 2)
    assert not engine.get(cache.full_table)[:, 0].any()
    assert cache.free_pages == 1297


@pytest.mark.gpu
def test_many_blocks(cupy):
    """The length advances after every block has read it: long appends, each of many blocks, to ragged sequences."""
    rng, shape = np.random.default_rng(1), {"pages": 200, "batch": 4, "page_size": 64, "dtype": "float16"}
    cache, known = KVCache(64, 4, **shape), KVCache(64, 4, **shape, numpy=True)
    for _ in range(10):
        counts = rng.integers(0, 600, 4)
        for b, of in itertools.product(range(4), (cache, known) if cache.free_pages < 40 else ()):
            of.release(b)
        x = np.asfortranarray(rng.standard_normal((64, 4, int(counts.sum()))).astype(np.float16))
        cache.append(cupy.asarray(x), cupy.asarray(x), seq_lens_q=counts)
        known.append(x, x, seq_lens_q=counts)
        np.testing.assert_array_equal(cache.keys().get(), known.keys())
        np.testing.assert_array_equal(cache.values().get(), known.values())
        assert cache.lengths.get().tolist() == known.lengths.tolist()


# CUDA graphs


@ON_A_GPU
@pytest.mark.parametrize("form", ["dense", "packed"])
def test_captured_appends(form, engine):
    """A graph of the appends of two layers, replayed with other counts and across pages, is a cache of numpy arrays."""
    rng, xp, batch, layers, most = np.random.default_rng(5), engine.xp, 3, 2, 2
    shape = {"head_dim_v": 8, "pages": 60, "batch": batch, "page_size": 4, "dtype": "float16", "layers": layers}
    cache, known = KVCache(16, 2, **shape), KVCache(16, 2, **shape, numpy=True)
    tail = (most * batch,) if form == "packed" else (most, batch)
    arrays = [[engine.normal(1, dim, 2, *tail) for dim in (16, 8)] for _ in range(layers)]
    stream = xp.cuda.Stream(non_blocking=True)
    xp.cuda.Device().synchronize()
    with stream:
        for step in range(50):
            counts = rng.integers(0, most + 1, batch) if step else np.full(batch, most)
            for of in (cache, known) if cache.free_pages < 2 * batch else ():
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
            for layer, pair in enumerate(arrays):
                tokens = [rng.standard_normal(x.shape).astype(np.float16) for x in pair]
                for x, of in zip(pair, tokens, strict=True):
                    x[...] = xp.asarray(of)
                given = [np.asfortranarray(x[..., : counts.sum()] if form == "packed" else x) for x in tokens]
                known.append(*given, layer, seq_lens_q=None if layer else counts)
            graph.launch(stream)
            assert cache.lengths.get().tolist() == known.lengths.tolist() == cache.host_lengths.tolist()
            np.testing.assert_array_equal(cache.table.get(), known.table)
    for layer in range(layers):
        np.testing.assert_array_equal(cache.keys(layer).get(), known.keys(layer))
        np.testing.assert_array_equal(cache.values(layer).get(), known.values(layer))


@ON_A_GPU
def test_a_capture_without_a_step_raises(engine):
    """The message says that begin_step is called before the capture; the capture continues."""
    cache, x = new(engine, 4, 2, pages=2, batch=1, layers=2), ones(engine, 4, 2, 1, 1)
    engine.xp.cuda.Device().synchronize()
    with engine.xp.cuda.Stream(non_blocking=True) as stream:
        for layer in range(2):
            stream.begin_capture()
            with pytest.raises(RuntimeError, match=r"no step is announced; call begin_step\(\) before the capture begins"):
                cache.append(x, x, layer)
            stream.end_capture()


@ON_A_GPU
def test_cuda_graphs_are_optional_after_a_capture(engine):
    """After a capture, a step that begins with begin_step may be appended without the graph."""
    cache, x = new(engine, 4, 2, pages=2, batch=1, page_size=2), ones(engine, 4, 2, 1, 1)
    engine.xp.cuda.Device().synchronize()
    with engine.xp.cuda.Stream(non_blocking=True) as stream:
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


# Decoding


def decoded(engine, sizes, steps, others, place):
    """The results of one sequence of a batch: its tokens are given, the others' tokens are random.

    Args:
        engine: the engine.
        sizes: D, Dv, Hkv, the query heads of each, and the page size.
        steps: the keys, values and queries of every step of the sequence.
        others: the lengths of the sequences before the first step; that at the place counts as 0.
        place: the index of the sequence in the batch.
    """
    d, dv, heads, _, page = sizes
    rng, batch = np.random.default_rng([place, *others]), len(others)
    cache = new(engine, d, heads, pages=200, batch=batch, page_size=page, head_dim_v=dv, dtype=engine.dtype, max_length=100)
    before, results = [0 if b == place else n for b, n in enumerate(others)], []
    if any(before):
        cache.append(*(engine.normal(1, dim, heads, max(before), batch) for dim in (d, dv)), seq_lens_q=before)
    for given in steps:
        k, v, q = (rng.standard_normal((*x.shape, batch)).astype(engine.dtype) for x in given)
        for x, own in zip((k, v, q), given, strict=True):
            x[..., place] = own
        k, v, q = (engine.put(np.asfortranarray(x)) for x in (k, v, q))
        cache.append(k, v)
        pages = {"page_table": cache.full_table, "seq_lens_kv": cache.lengths, "causal": "bottom_right", "num_splits": 4}
        results += [engine.get(x)[..., place] for x in attention(q, cache.keys(), cache.values(), return_stats=True, **pages)]
    return results


@pytest.mark.parametrize("sizes", [(8, 16, 2, 2, 4), pytest.param((8, 8, 1, 3, 16), marks=pytest.mark.slow)], ids=str)
def test_a_sequence_does_not_depend_on_the_batch(sizes, engine):
    """With num_splits and the full table: the same bits, with other lengths, contents, places and batch sizes of the others."""
    d, dv, heads, group, _ = sizes
    rng, shapes = np.random.default_rng(0), ((d, heads), (dv, heads), (d, heads * group))
    steps = [[rng.standard_normal((*shape, n)).astype(engine.dtype) for shape in shapes] for n in (19, 1, 1, 4, 1)]
    first = decoded(engine, sizes, steps, [0, 0, 0], 0)
    for others, place in (([0, 40, 3], 0), ([7, 0, 50], 1), ([0], 0), ([9, 30, 0, 2, 5], 2)):
        for one, other in zip(first, decoded(engine, sizes, steps, others, place), strict=True):
            np.testing.assert_array_equal(one, other)


# Beams


def beam_search(engine, orders, page_size, step):
    """Attention of hypotheses that continue each other, and of each alone; ``step`` appends a token of each and attends to all."""
    rng, count = np.random.default_rng(0), len(orders[0])
    cache = new(engine, 8, 2, pages=60, batch=count, page_size=page_size, dtype=str(engine.dtype))
    prompt = rng.standard_normal((8, 2, 5, count)).astype(engine.dtype)
    cache.append(*[engine.put(np.asfortranarray(prompt))] * 2)
    hypotheses = [[prompt[:, :, i, b] for i in range(5)] for b in range(count)]
    for order in orders:
        x = rng.standard_normal((8, 2, 1, count)).astype(engine.dtype)
        out = engine.get(step(cache, engine.put(np.asfortranarray(x))))
        for b, own in enumerate(hypotheses):
            own.append(x[:, :, 0, b])
            keys = np.asfortranarray(np.stack(own, axis=2)[..., None].astype("f4"))
            alone = attention(np.asfortranarray(x[..., b : b + 1].astype("f4")), keys, keys)
            np.testing.assert_allclose(out[..., b].astype("f4"), alone[..., 0], atol=2 * engine.tolerance)
        cache.reorder(order)
        hypotheses = [list(hypotheses[source]) for source in order]
    return cache


ORDERS = [[0, 0, 0, 0], [1, 1, 0, 2], [3, 2, 1, 0], [2, 2, 2, 3], [0, 1, 2, 3], [0, 1, 1, 1], [3, 3, 0, 0], [1, 0, 3, 3]]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_beams(page_size, engine):
    """Each hypothesis attends to its own tokens alone, and shares the pages of earlier ones."""

    def step(cache, x):
        cache.append(x, x)
        return attention(x, **cache.view())

    cache = beam_search(engine, ORDERS, page_size, step)
    tokens = 5 + len(ORDERS)
    assert cache.pages - cache.free_pages < 4 * -(-tokens // page_size) or page_size > tokens
    cache.reorder([0] * 4)
    assert cache.pages - cache.free_pages == -(-tokens // page_size)


@ON_A_GPU
def test_beams_in_a_captured_step(engine):
    """A captured step follows the order, as it reads the table at a constant address."""
    xp, kept = engine.xp, {}

    def step(cache, x):
        if not kept:
            kept["x"] = x.copy(order="F")
            cache.begin_step(0)
            compute(cache)
            cache.begin_step(0)
            stream.begin_capture()
            kept["out"] = compute(cache)
            kept["graph"] = stream.end_capture()
        kept["x"][...] = x
        cache.begin_step(1)
        kept["graph"].launch(stream)
        return kept["out"]

    def compute(cache):
        cache.append(kept["x"], kept["x"])
        return attention(kept["x"], **cache.view() | {"page_table": cache.full_table})

    xp.cuda.Device().synchronize()
    with xp.cuda.Stream(non_blocking=True) as stream:
        beam_search(engine, ORDERS[:4], 4, step)
    engine.forget_plans(kept=False)


# Size and picture


def test_bytes(engine):
    """The bytes of all arrays: pages of keys and values, the state, and the scales and means of FP8 values."""
    sizes = {"pages": 6, "batch": 2, "page_size": 8, "layers": 3}
    cache = new(engine, 16, 2, head_dim_v=32, **sizes)
    pages = sum(x.nbytes for layer in range(3) for x in (cache.keys(layer), cache.values(layer)))
    assert pages == 6 * 8 * 3 * 2 * (16 + 32) * 2
    assert pages < cache.nbytes < pages + 4096
    in_fp8 = new(engine, 16, 2, head_dim_v=32, **sizes, dtype="float8_e4m3fn")
    means = 6 * 2 * 32 * 3 * 4
    assert pages // 2 + means < in_fp8.nbytes < pages // 2 + means + 4096


def test_a_picture(engine):
    """A rectangle for each page of a sequence and for each free page; shared pages have another color; long rows are cut."""
    cache = new(engine, 8, 1, pages=90, batch=40, page_size=2)
    x = ones(engine, 8, 1, 7)
    cache.append(x, x, seq_lens_q=[6, 1, *[0] * 38])
    html = cache._repr_html_()
    assert "2 of 40 sequences" in html
    assert (html.count("#4c78a8"), html.count("#f58518")) == (4, 0)
    assert 'width="0.45" fill="#4c78a8"' in html  # half of a page
    for words in ("0: 6 tokens", "1: 1 token<", "8 more sequences", "86 free", "+22"):
        assert words in html
    cache.fork(0, 2)
    html = cache._repr_html_()
    assert (html.count("#4c78a8"), html.count("#f58518")) == (1, 6)
