"""Key/value caches of FP8 pages: scales, conversion while tokens are appended, and attention."""

import numpy as np
import pytest
from fp8_arrays import ENGINES, ERROR, LARGEST, ON_A_GPU, elements, normal, relative, rounded

from cupy_sdpa import KVCache, attention, explain, fp8
from cupy_sdpa.check.formats import dtype_of

#: A scale that is set by the first tokens leaves room for values larger by this factor.
HEADROOM = 2


def make(engine, **options):
    """A small cache."""
    sizes = {"pages": 12, "batch": 3, "page_size": 16, "dtype": "float8_e4m3fn", "layers": 2}
    return KVCache(options.pop("d", 32), options.pop("hkv", 2), numpy=not engine.on_cudnn, **(sizes | options))


def stored(engine, cache, side, layer, b):
    """The elements of a sequence, (D, Hkv, length)."""
    pages = elements(engine, (cache.keys, cache.values)[side](layer))
    table, length = engine.get(cache.full_table), int(cache.host_lengths[b])
    parts = [pages[..., table[i, b]] for i in range(-(-length // cache.page_size))]
    return np.concatenate([*parts, pages[..., 0][:, :, :0]], axis=2)[:, :, :length]


def mean_of(engine, cache, layer, b):
    """The mean of a sequence's values, (Dv, Hkv, 1); all of its pages have it."""
    table, mean = engine.get(cache.full_table), engine.get(cache.values(layer).mean)[:, :, 0]
    pages = table[: -(-int(cache.host_lengths[b]) // cache.page_size), b]
    assert (mean[:, :, pages] == mean[:, :, pages[:1]]).all()
    return mean[:, :, pages[:1]]


def converted(x, scale, dtype, *, rotated=False, mean=0):
    """The elements that tokens should have."""
    if rotated:  # the conversion of an array on the CPU with this scale
        amax = LARGEST[dtype] / float(scale)
        return fp8.DelayedScaling(x, amax=amax, dtype=dtype, rotate=True).quantize(np.asfortranarray(x)).data
    return rounded((np.asfortranarray(x, np.float32) - mean) * np.float32(scale), dtype)


def largest(x, *, rotated=False):
    """The largest magnitude of tokens."""
    return 448 * float(fp8.quantize(np.asfortranarray(x, np.float32), rotate=rotated).descale[0])


@ENGINES
@pytest.mark.slow
@pytest.mark.in_turn(2)
@pytest.mark.parametrize(
    ("source", "dtype", "rotated", "packed"),
    [
        ("float16", "float8_e4m3fn", True, False),
        ("bfloat16", "float8_e5m2", False, True),
        ("float32", "float8_e5m2", True, True),
    ],
)
def test_tokens_are_converted(source, dtype, rotated, packed, engine):
    """With the scale of the first tokens of each layer; tokens after the counts are not read; later ones saturate."""
    rng, counts = np.random.default_rng(0), [20, 0, 5]
    cache, history = make(engine, dtype=dtype, rotate=rotated, head_dim_v=48), {}
    for turn, layer in np.ndindex(3, 2):
        counts, given = [[20, 0, 5], [1, 3, 0], [1, 3, 0]][turn], []
        for side, d in enumerate((32, 48)):
            tokens = [rng.standard_normal((d, 2, n)) * (100 if turn == 2 else 1 + layer) for n in counts]
            tokens = [x.astype(dtype_of(source)) for x in tokens]
            for b, x in enumerate(tokens):
                history.setdefault((side, layer, b), []).append(x)
            array = np.concatenate(tokens, axis=2)
            if not packed:
                # the first tokens set a scale, of finite numbers
                array = np.full((d, 2, max(counts), 3), np.nan if turn else 6e4, dtype_of(source))
                for b, x in enumerate(tokens):
                    array[:, :, : x.shape[2], b] = x
            given.append(engine.put(np.asfortranarray(array)))
        cache.append(*given, layer, **({} if layer else {"seq_lens_q": counts}))
    for (side, layer, b), parts in history.items():
        array, turned = (cache.keys, cache.values)[side](layer), rotated and side == 0
        first = max(largest(history[side, layer, c][0], rotated=turned) for c in (0, 2))
        np.testing.assert_allclose(engine.get(array.scale), LARGEST[dtype] / (HEADROOM * first), rtol=1e-6)
        np.testing.assert_allclose(engine.get(array.scale * array.descale), 1, rtol=1e-6)
        assert array.rotated == turned
        tokens, mean = np.concatenate(parts, axis=2), mean_of(engine, cache, layer, b) if side else 0
        wanted = converted(tokens, engine.get(array.scale)[0], dtype, rotated=turned, mean=mean).astype(np.float32)
        different = stored(engine, cache, side, layer, b).astype(np.float32) != wanted
        assert different.mean() <= 0.01 * turned, "the scale of the rotated ones is rounded once more"
        assert (np.abs(wanted) <= LARGEST[dtype]).all()


@ENGINES
def test_scales_that_are_given(engine):
    """A number, or one for each layer; the first tokens change nothing."""
    cache = make(engine, k_scale=16, v_scale=[4.0, 8.0])
    x = normal((32, 2, 4, 3), "float16")
    for layer, scale in enumerate((4.0, 8.0)):
        cache.append(engine.put(x), engine.put(x), layer)
        assert float(engine.get(cache.keys(layer).scale)[0]) == 16
        assert float(engine.get(cache.values(layer).scale)[0]) == scale
        wanted = converted(x[..., 2], scale, "float8_e4m3fn", mean=mean_of(engine, cache, layer, 2))
        np.testing.assert_array_equal(stored(engine, cache, 1, layer, 2), wanted)


@ENGINES
@pytest.mark.slow
@pytest.mark.in_turn(2)
@pytest.mark.parametrize("rotated", [False, True])
def test_fp8_tokens(rotated, engine):
    """The scale of the first ones is adopted, and their elements are stored unchanged; others are converted to this scale."""
    cache = make(engine, rotate=rotated, layers=1)
    first, second = (
        [fp8.quantize(engine.put(normal((32, 2, n, 3), "float16", n + i)), rotate=rotated and i == 0) for i in range(2)]
        for n in (20, 3)
    )
    second[1] = fp8.quantize(engine.put(engine.get(second[1].dequantize("float16")) * np.float16(2)))
    cache.append(*first)
    cache.append(*second)
    for side, (a, b) in enumerate(zip(first, second, strict=True)):
        array = (cache.keys, cache.values)[side](0)
        assert engine.get(array.scale) == engine.get(a.scale)
        for sequence in range(3):
            found = stored(engine, cache, side, 0, sequence)
            np.testing.assert_array_equal(found[:, :, :20], elements(engine, a)[..., sequence])
            values = elements(engine, b)[..., sequence].astype(np.float32) * engine.get(b.descale)
            np.testing.assert_array_equal(found[:, :, 20:], rounded(values * engine.get(array.scale), "float8_e4m3fn"))


@ENGINES
@pytest.mark.parametrize("rotated", [False, True])
def test_a_step_without_tokens_sets_no_scale(rotated, engine):
    """The scale follows from the first tokens."""
    cache, x = make(engine, layers=1, rotate=rotated), normal((32, 2, 4, 3), "float16")
    given = engine.put(x)
    cache.append(given[:, :, :0], given[:, :, :0])
    cache.append(given, given)
    for side, turned in ((cache.values(), False), (cache.keys(), rotated)):
        np.testing.assert_allclose(engine.get(side.scale), 448 / (HEADROOM * largest(x, rotated=turned)), rtol=1e-6)


@ENGINES
@pytest.mark.parametrize(("value", "packed"), [(np.nan, False), (np.inf, True)])
def test_first_tokens_that_are_not_finite(value, packed, engine):
    """The scale follows from the other numbers, so later tokens are not lost."""
    x = normal((32, 2, 4, 3), "float16")
    x[3, 1, 2, 0] = 0
    wanted = 448 / (HEADROOM * np.abs(x).max().astype(np.float32))
    x[3, 1, 2, 0] = value
    given, cache = engine.put(x.reshape(32, 2, 12, order="F") if packed else x), make(engine, layers=1)
    cache.append(given, given, seq_lens_q=[4, 4, 4])
    np.testing.assert_allclose(engine.get(cache.values().scale), wanted, rtol=1e-6)


def test_a_head_dim_of_values_that_is_not_rotated():
    """Only the head dim of keys must be even."""
    KVCache(5, 1, pages=2, batch=1, dtype="float8_e4m3fn", numpy=True)
    cache = KVCache(6, 1, pages=2, batch=1, dtype="float8_e4m3fn", rotate=True, head_dim_v=5, numpy=True)
    k, v, q = (np.ones((d, 1, 1, 1), np.float32) for d in (6, 5, 6))
    cache.append(k, v)
    pages = {"page_table": cache.table, "seq_lens_kv": cache.lengths}
    np.testing.assert_allclose(attention(q, cache.keys(), cache.values(), **pages), v, rtol=0.1)


#: Query heads, Hkv, the dtype of the queries; the new tokens of each step, whether lengths differ; options of the cache and of calls.
STEPS = {
    "grouped": (8, 2, "bfloat16", (40, 1, 3), False, {}, {}),
    "rotated": (4, 2, "FP8", (60, 2), True, {"rotate": True}, {"num_splits": 3}),
    "one head of a group": (2, 2, "FP8", (33, 1, 2), False, {}, {}),
    "window": (4, 1, "bfloat16", (50, 1, 4), True, {"dtype": "float8_e5m2"}, {"window": (20, 0, "bottom_right")}),
}  # fmt: skip


@ENGINES
@pytest.mark.in_turn(2)
@pytest.mark.parametrize("name", [*list(STEPS)[:2], *(pytest.param(name, marks=pytest.mark.slow) for name in list(STEPS)[2:])])
def test_decoding(name, engine):
    """Prompt and steps: attention over the cache against float64 attention over the values of its elements, and over the tokens."""
    hq, hkv, source, steps, ragged, sizes, options = STEPS[name]
    plain = {key: x for key, x in {"causal": "bottom_right", **options}.items() if key != "num_splits"}
    cache = make(engine, hkv=hkv, pages=60, layers=1, **sizes)
    dtype, rotated, seed, tokens = cache.keys().dtype, cache.keys().rotated, 0, [np.zeros((32, hkv, 0, 3))] * 2
    for number in steps:
        counts = [number, max(number - 20, 1) if ragged else number, number]
        q, k, v = (normal((32, h, number, 3), "bfloat16", seed := seed + 1) for h in (hq, hkv, hkv))
        cache.append(engine.put(k), engine.put(v), seq_lens_q=counts)
        sent = fp8.quantize(engine.put(q), dtype, rotate=rotated) if source == "FP8" else engine.put(q)
        more = {"page_table": cache.table, "seq_lens_kv": cache.lengths, "causal": "bottom_right"} | options
        more |= {"seq_lens_q": engine.put(np.array(counts, np.int32))} if ragged else {}
        for _ in range(3):
            out, stats = attention(sent, cache.keys(), cache.values(), return_stats=True, **more)
        assert explain(sent, cache.keys(), cache.values(), **more)
        out = engine.get(out.dequantize() if source == "FP8" else out)
        assert out.dtype == dtype_of("float32" if source == "FP8" else source)
        out, stats = out.astype(np.float64), engine.get(stats)
        for b, n in enumerate(counts):
            of_cache = [
                stored(engine, cache, side, 0, b)[..., None].astype(np.float64) * engine.get(x.descale)
                for side, x in enumerate((cache.keys(), cache.values()))
            ]
            of_cache[1] += mean_of(engine, cache, 0, b)[..., None]
            query = np.asfortranarray(q[:, :, :n, b : b + 1].astype(np.float32))
            if rotated:
                turned = fp8.quantize(query, rotate=True)
                query = turned.data.astype(np.float64) * turned.descale[0]
            truth, log_sums = attention(
                *(np.asfortranarray(x, np.float64) for x in (query, *of_cache)), return_stats=True, **plain
            )
            assert relative(out[:, :, :n, b : b + 1], truth) < 1.5 * ERROR[dtype]
            np.testing.assert_allclose(stats[:n, :, b : b + 1], log_sums, atol=4 * ERROR[dtype])
            assert not out[:, :, n:, b].any()
        tokens = [np.concatenate([old, new.astype(np.float64)], axis=2) for old, new in zip(tokens, (k, v), strict=True)]
        if not ragged:
            truth = attention(np.asfortranarray(q.astype(np.float64)), *map(np.asfortranarray, tokens), **plain)
            assert relative(out, truth) < 2 * ERROR[dtype]


@ON_A_GPU
def test_a_captured_step(engine):
    """Append and attention in a CUDA graph: launches give what calls give."""
    captured, called = (make(engine, layers=1, pages=30, rotate=True) for _ in range(2))
    prompt = [engine.put(normal((32, 2, 40, 3), "bfloat16", seed)) for seed in range(2)]
    steps = [[normal((32, h, 1, 3), "bfloat16", [h, seed]) for h in (8, 2, 2)] for seed in range(5)]
    now = engine.put(steps[0])

    def step(cache, q, k, v):
        cache.append(k, v)
        return attention(q, **cache.view() | {"page_table": cache.full_table}, causal="bottom_right")

    for cache in (captured, called):
        cache.append(*prompt)
        step(cache, *now)
    engine.xp.cuda.Device().synchronize()
    with engine.xp.cuda.Stream(non_blocking=True) as stream:
        captured.begin_step()
        stream.begin_capture()
        out = step(captured, *now)
        graph = stream.end_capture()
        for number, tokens in enumerate(steps):
            if number:
                captured.begin_step()
            for x, y in zip(now, tokens, strict=True):
                x[...] = engine.put(y)
            graph.launch(stream)
            found, wanted = engine.get((out, step(called, *engine.put(tokens))))
            assert relative(found.astype(np.float64), wanted.astype(np.float64)) < 1e-6
    assert (engine.get(captured.lengths) == 46).all()
    del graph
    engine.forget_plans()
