"""Key/value caches of FP8 pages: scales, conversion while tokens are appended, and attention, on numpy, the fake CuPy and a GPU."""

from types import SimpleNamespace

import numpy as np
import pytest
from fp8_arrays import ERROR, relative

from cupy_sdpa import KVCache, attention, explain, fp8
from cupy_sdpa._cudnn.library import library
from cupy_sdpa.fp8.array import rotate, rotation_of
from cupy_sdpa.inference.fp8_pages import HEADROOM
from cupy_sdpa.problem.tensor_spec import FP8_LARGEST, numpy_dtype, rounded

ENGINES = ["numpy", "fake", pytest.param("gpu", marks=pytest.mark.gpu)]
DTYPES = tuple(FP8_LARGEST)


@pytest.fixture(params=ENGINES)
def engine(request):
    """Functions that move arrays to the engine and back."""
    if request.param == "numpy":
        return SimpleNamespace(numpy=True, put=lambda x: np.asarray(x, order="F"), get=np.asarray, module=np)
    module = request.getfixturevalue("fake" if request.param == "fake" else "cupy")
    return SimpleNamespace(
        numpy=False,
        put=lambda x: module.asarray(x, order="F"),
        get=lambda x: x.get() if hasattr(x, "get") else x,
        module=module,
    )


def normal(rng, *shape, dtype="float16"):
    """Normal numbers in Fortran order."""
    return np.asfortranarray(rng.standard_normal(shape).astype(numpy_dtype(dtype)))


def elements(engine, x):
    """The elements of an FP8 array on the host."""
    return np.asfortranarray(engine.get(x.data)).view(numpy_dtype(x.dtype))


def stored(engine, cache, side, layer, b):
    """The elements of a sequence, (D, Hkv, length)."""
    pages = elements(engine, (cache.keys, cache.values)[side](layer))
    table, length = engine.get(cache.full_table), int(cache.host_lengths[b])
    parts = [pages[..., table[i, b]] for i in range(-(-length // cache.page_size))]
    return np.concatenate([*parts, pages[..., 0][:, :, :0]], axis=2)[:, :, :length]


def converted(x, scale, dtype, rotated):
    """The elements that tokens should have."""
    values = rotate(np.asfortranarray(x, np.float32), rotation_of(x.shape[0]) if rotated else 1)
    return rounded(values * np.float32(scale), dtype)


def make(engine, **options):
    """A small cache."""
    sizes = {"pages": 12, "batch": 3, "page_size": 16, "dtype": "float8_e4m3fn", "layers": 2}
    return KVCache(options.pop("d", 32), options.pop("hkv", 2), numpy=engine.numpy, **(sizes | options))


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("source", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_tokens_are_converted(source, dtype, rotated, packed, engine):
    """With the scale of the first tokens of each layer; tokens after the counts are not read; later ones saturate."""
    rng, counts = np.random.default_rng(0), [20, 0, 5]
    cache = make(engine, dtype=dtype, rotate=rotated, head_dim_v=48)
    history = {}
    for turn in range(3):
        for layer in range(2):
            given = []
            for side, d in enumerate((32, 48)):
                tokens = [normal(rng, d, 2, n, dtype=source) * (100 if turn == 2 else 1 + layer) for n in counts]
                tokens = [x.astype(numpy_dtype(source)) for x in tokens]
                for b, x in enumerate(tokens):
                    history.setdefault((side, layer, b), []).append(x)
                if packed:
                    array = np.concatenate(tokens, axis=2)
                else:
                    padding = np.nan if turn else 6e4  # the first tokens set a scale, of finite numbers
                    array = np.full((d, 2, max(counts), 3), padding, numpy_dtype(source))
                    for b, x in enumerate(tokens):
                        array[:, :, : x.shape[2], b] = x
                given.append(engine.put(np.asfortranarray(array)))
            cache.append(*given, layer, **({} if layer else {"counts": counts}))
        counts = [1, 3, 0]
    for (side, layer, b), parts in history.items():
        array = (cache.keys, cache.values)[side](layer)
        first = [
            rotate(np.asfortranarray(history[side, layer, c][0], np.float32), 32 if rotated and not side else 1) for c in (0, 2)
        ]
        scale = FP8_LARGEST[dtype] / (HEADROOM * max(np.abs(x).max() for x in first))
        np.testing.assert_allclose(engine.get(array.scale), scale, rtol=1e-6)
        np.testing.assert_allclose(engine.get(array.descale), 1 / scale, rtol=1e-6)
        assert array.rotated == (rotated and side == 0)
        wanted = converted(np.concatenate(parts, axis=2), engine.get(array.scale)[0], dtype, array.rotated).astype(np.float32)
        np.testing.assert_array_equal(stored(engine, cache, side, layer, b).astype(np.float32), wanted)
        assert (np.abs(wanted) <= FP8_LARGEST[dtype]).all()


def test_scales_that_are_given(engine):
    """A number, or one for each layer; the first tokens change nothing."""
    cache = make(engine, k_scale=16, v_scale=[4.0, 8.0])
    x = engine.put(normal(np.random.default_rng(0), 32, 2, 4, 3))
    for layer in range(2):
        cache.append(x, x, layer)
        assert float(engine.get(cache.keys(layer).scale)[0]) == 16
        assert float(engine.get(cache.values(layer).scale)[0]) == (4.0, 8.0)[layer]
        found = stored(engine, cache, 1, layer, 2).astype(np.float32)
        np.testing.assert_array_equal(found, converted(engine.get(x)[..., 2], (4.0, 8.0)[layer], "float8_e4m3fn", False))


@pytest.mark.parametrize("rotated", [False, True])
def test_fp8_tokens(rotated, engine):
    """The scale of the first ones is adopted, and their elements are stored as they are; others are converted to this scale."""
    rng = np.random.default_rng(0)
    cache = make(engine, rotate=rotated, layers=1)
    first, second = (
        [fp8.quantize(engine.put(normal(rng, 32, 2, n, 3)), rotate=rotated and i == 0) for i in range(2)] for n in (20, 3)
    )
    second[1] = fp8.quantize(engine.put(engine.get(second[1].dequantize("float16")) * np.float16(2)))
    cache.append(*first)
    cache.append(*second)
    for side, (a, b) in enumerate(zip(first, second, strict=True)):
        array = (cache.keys, cache.values)[side](0)
        assert engine.get(array.scale) == engine.get(a.scale)
        for sequence in range(3):
            found = stored(engine, cache, side, 0, sequence).astype(np.float32)
            np.testing.assert_array_equal(found[:, :, :20], elements(engine, a)[..., sequence].astype(np.float32))
            values = elements(engine, b)[..., sequence].astype(np.float32) * engine.get(b.descale)
            np.testing.assert_array_equal(found[:, :, 20:], rounded(values * engine.get(array.scale), "float8_e4m3fn"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_fp8_number_is_stored(dtype, engine):
    """All finite elements, the smallest ones too, at the same scale and at twice the scale."""
    codes = np.arange(256, dtype=np.uint8).view(numpy_dtype(dtype))
    codes = np.where(np.isfinite(codes.astype(np.float32)), codes, 0).astype(codes.dtype).reshape(32, 2, 4, 1, order="F")
    for factor in (1, 2):
        x = fp8.Fp8Array(engine.put(codes if engine.numpy else codes.view(np.uint8)), 1.0, dtype=dtype)
        cache = make(engine, batch=1, layers=1, dtype=dtype, k_scale=factor, v_scale=factor)
        cache.append(x, x)
        wanted = rounded(codes[..., 0].astype(np.float32) * factor, dtype)
        np.testing.assert_array_equal(stored(engine, cache, 0, 0, 0).astype(np.float32), wanted.astype(np.float32))


@pytest.mark.parametrize("rotated", [False, True])
def test_a_step_without_tokens_sets_no_scale(rotated, engine):
    """The scale is that of the first tokens."""
    cache, x = make(engine, layers=1, rotate=rotated), engine.put(normal(np.random.default_rng(0), 32, 2, 4, 3))
    cache.append(x[:, :, :0], x[:, :, :0])
    cache.append(x, x)
    largest = float(np.abs(engine.get(x).astype(np.float32)).max())
    np.testing.assert_allclose(engine.get(cache.values().scale), 448 / (HEADROOM * largest), rtol=1e-6)
    assert (engine.get(cache.keys().scale) != engine.get(cache.values().scale)) == rotated


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("packed", [False, True])
def test_first_tokens_that_are_not_finite(value, packed, engine):
    """The scale is that of the other numbers, so later tokens are not lost."""
    x = normal(np.random.default_rng(0), 32, 2, 4, 3)
    x[3, 1, 2, 0] = 0
    largest = float(np.abs(x).max())
    x[3, 1, 2, 0] = value
    given = engine.put(x.reshape(32, 2, 12, order="F") if packed else x)
    cache = make(engine, layers=1)
    cache.append(given, given, counts=[4, 4, 4])
    np.testing.assert_allclose(engine.get(cache.values().scale), 448 / (HEADROOM * np.float32(largest)), rtol=1e-6)


def test_a_head_dim_that_is_not_rotated():
    """Refused when the cache is made: no keys and queries would fit to it."""
    with pytest.raises(ValueError, match=r"head_dim is 5 and rotate is True; an odd head_dim .*rotate=False"):
        KVCache(5, 1, pages=2, batch=1, dtype="float8_e4m3fn", rotate=True, numpy=True)
    KVCache(5, 1, pages=2, batch=1, dtype="float8_e4m3fn", numpy=True)
    cache = KVCache(6, 1, pages=2, batch=1, dtype="float8_e4m3fn", rotate=True, head_dim_v=5, numpy=True)
    k, v, q = (np.ones((d, 1, 1, 1), np.float32) for d in (6, 5, 6))
    cache.append(k, v)
    pages = {"page_table": cache.table, "seq_lens_kv": cache.lengths}
    np.testing.assert_allclose(attention(q, cache.keys(), cache.values(), **pages), v, rtol=0.1)


#: Query heads, and Hkv; queries of each step; the options.
STEPS = {
    "grouped": (8, 2, (40, 1, 1, 3, 1), {}), "one head of a group": (2, 2, (33, 1, 1, 2, 1), {}),
    "chunks": (4, 2, (70, 1, 2), {"num_splits": 3}), "window": (4, 1, (50, 1, 4), {"window": (20, 0)}),
    "e5m2": (4, 2, (30, 1, 2), {"dtype": "float8_e5m2"}), "rotated": (8, 2, (60, 1, 2), {"rotate": True}),
}  # fmt: skip


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("source", ["bfloat16", "FP8"])
@pytest.mark.parametrize("lengths", [False, True])
def test_decoding(name, source, lengths, engine):
    """Prompt and steps: attention over the cache against float64 attention over the values of its elements, and over the tokens."""
    hq, hkv, steps, given = STEPS[name]
    options = {key: given[key] for key in ("num_splits", "window") if key in given}
    if "window" in options:
        options["window"] = (*options["window"], "bottom_right")
    else:
        options["causal"] = "bottom_right"
    cache = make(engine, hkv=hkv, pages=60, layers=1, **{key: given[key] for key in ("dtype", "rotate") if key in given})
    dtype, rng, tokens = cache.keys().dtype, np.random.default_rng(0), [np.zeros((32, hkv, 0, 3))] * 2
    for number in steps:
        counts = [number, max(number - 20, 1) if lengths else number, number]
        q, k, v = (normal(rng, 32, h, number, 3, dtype="bfloat16") for h in (hq, hkv, hkv))
        cache.append(engine.put(k), engine.put(v), counts=counts)
        sent = engine.put(q) if source == "bfloat16" else fp8.quantize(engine.put(q), dtype, rotate=cache.keys().rotated)
        pages = {"page_table": cache.table, "seq_lens_kv": cache.lengths}
        more = {"seq_lens_q": engine.put(np.array(counts, np.int32))} if lengths else {}
        per_key = options if hq // hkv * number <= 512 else {key: x for key, x in options.items() if key != "num_splits"}
        for _ in range(4):
            out, stats = attention(sent, cache.keys(), cache.values(), return_stats=True, **pages, **per_key, **more)
        report = explain(sent, cache.keys(), cache.values(), **pages, **per_key, **more)
        assert report
        if not engine.numpy and "num_splits" in per_key:
            assert report.problem.settings.split.chunks > 1 or max(cache.host_lengths) <= 128
        out = out.dequantize() if source == "FP8" else out
        assert str(out.dtype) == ("float32" if source == "FP8" else "bfloat16")
        out, stats = engine.get(out).astype(np.float64), engine.get(stats)
        plain = {key: x for key, x in options.items() if key != "num_splits"}
        for b, n in enumerate(counts):
            of_cache = [
                np.asfortranarray(stored(engine, cache, side, 0, b)[..., None].astype(np.float64) * engine.get(x.descale))
                for side, x in enumerate((cache.keys(), cache.values()))
            ]
            query = np.asfortranarray(q[:, :, :n, b : b + 1].astype(np.float64))
            query = rotate(query.astype(np.float32), 32).astype(np.float64) if cache.keys().rotated else query
            truth, log_sums = attention(query, *of_cache, return_stats=True, **plain)
            assert relative(out[:, :, :n, b : b + 1], truth) < 1.5 * ERROR[dtype]
            np.testing.assert_allclose(stats[:n, :, b : b + 1], log_sums, atol=4 * ERROR[dtype])
            assert not out[:, :, n:, b].any()
        tokens = [np.concatenate([old, new.astype(np.float64)], axis=2) for old, new in zip(tokens, (k, v), strict=True)]
        if not lengths:
            truth = attention(np.asfortranarray(q.astype(np.float64)), *map(np.asfortranarray, tokens), **plain)
            assert relative(out, truth) < 2 * ERROR[dtype]


def test_forks_and_truncation(engine):
    """Pages of FP8 are shared and copied like others."""
    rng = np.random.default_rng(0)
    cache = make(engine, layers=2, batch=2)
    x, y = (normal(rng, 32, 2, n) for n in (20, 3))
    for layer in range(2):
        cache.append(engine.put(x), engine.put(x), layer, **({} if layer else {"counts": [20, 0]}))
    cache.fork(0, 1)
    for layer in range(2):
        cache.append(engine.put(y), engine.put(y), layer, **({} if layer else {"counts": [0, 3]}))
    cache.truncate(0, 17)
    for layer in range(2):
        scale = float(engine.get(cache.values(layer).scale)[0])
        for b, wanted in ((0, x[:, :, :17]), (1, np.concatenate([x, y], axis=2))):
            found = stored(engine, cache, 1, layer, b).astype(np.float32)
            np.testing.assert_array_equal(found, converted(wanted, scale, "float8_e4m3fn", False).astype(np.float32))


@pytest.mark.parametrize("dtype", ["bfloat16", "FP8"])
@pytest.mark.parametrize("engine", ENGINES[1:], indirect=True)  # numpy has no CUDA graphs
def test_a_captured_step(dtype, engine):
    """Append and attention in a CUDA graph: launches give what calls give."""
    cupy, rng = engine.module, np.random.default_rng(0)
    caches = [make(engine, layers=1, pages=30, rotate=True) for _ in range(2)]
    prompt = [engine.put(normal(rng, 32, 2, 40, 3, dtype="bfloat16")) for _ in range(2)]
    steps = [[normal(rng, 32, h, 1, 3, dtype="bfloat16") for h in (8, 2, 2)] for _ in range(5)]
    now = [engine.put(x) for x in steps[0]]
    scaling = fp8.DelayedScaling(now[0], 1, rotate=True, amax=16)

    def step(cache, q, k, v):
        cache.append(k, v)
        sent = scaling.quantize(q) if dtype == "FP8" else q
        pages = {"page_table": cache.full_table, "seq_lens_kv": cache.lengths, "causal": "bottom_right"}
        return attention(sent, cache.keys(), cache.values(), **pages), sent

    for cache in caches:
        cache.append(*prompt)
        step(cache, *now)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        caches[0].begin_step()
        stream.begin_capture()
        out, _kept = step(caches[0], *now)
        graph = stream.end_capture()
        for number, tokens in enumerate(steps):
            if number:
                caches[0].begin_step()
            for x, y in zip(now, tokens, strict=True):
                x[...] = engine.put(y)
            graph.launch(stream)
            stream.synchronize()
            found = engine.get(out.dequantize() if dtype == "FP8" else out).astype(np.float64)
            other, _ = step(caches[1], *(engine.put(y) for y in tokens))
            other = engine.get(other.dequantize() if dtype == "FP8" else other).astype(np.float64)
            stream.synchronize()
            assert relative(found, other) < (0.12 if dtype == "FP8" else 1e-6), "the scale of FP8 queries has another history"
    assert (engine.get(caches[0].lengths) == 46).all()
    del graph
    if hasattr(library(), "forget_plans"):  # of the fake cuDNN
        assert library().forget_plans() > 0, "the plans of the graph are kept"


REFUSED = {
    "scales of other dtypes": (lambda e: make(e, dtype="float16", k_scale=2.0), ValueError, "dtype is float16; k_scale.*omit them"),
    "rotation of other dtypes": (lambda e: make(e, dtype="float16", rotate=True), ValueError, "rotate are for FP8"),
    "scale": (lambda e: make(e, k_scale=0.0), ValueError, r"k_scale is 0\.0; scales must be finite numbers above 0"),
    "scales": (lambda e: make(e, v_scale=[1.0, 2.0, 3.0]), ValueError, "v_scale has 3 numbers; the cache has 2 layers"),
    "kind of scale": (lambda e: make(e, v_scale="1"), TypeError, "v_scale is a str; pass a number"),
    "dtype": (lambda e: make(e, dtype="int8"), TypeError, "dtype is int8; .*float8_e5m2"),
    "tokens of integers": (lambda e: append(e, np.int32), TypeError, "k is int32; a cache of float8_e4m3fn takes float16"),
    "two dtypes": (lambda e: append(e, np.float16, np.float32), TypeError, "k is float16 and v is float32; both must have one"),
    "another format": (lambda e: append(e, "float8_e5m2"), TypeError, "k is float8_e5m2, but the cache is float8_e4m3fn; quantize"),
    "rotated keys": (lambda e: append(e, "rotated"), ValueError, "k.rotated is True .* rotate of the cache is False"),
    "shape": (lambda e: append(e, np.float16, heads=3), ValueError, r"k has shape \(32, 3, 2, 3\); the cache takes \(32, 2, S, 3\)"),
}  # fmt: skip


def append(engine, k, v=None, heads=2):
    """Append two tokens of some dtypes to a cache."""

    def tokens(kind):
        x = np.ones((32, heads, 2, 3), np.float16 if isinstance(kind, str) else kind, order="F")
        x = engine.put(x)
        return (
            fp8.quantize(x, "float8_e4m3fn" if kind == "rotated" else kind, rotate=kind == "rotated")
            if isinstance(kind, str)
            else x
        )

    cache = make(engine)
    try:
        cache.append(tokens(k), tokens(v or k))
    finally:
        assert not cache.host_lengths.any(), "the cache is unchanged"


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, engine):
    """With the value and the remedy; the cache is unchanged."""
    call, error, text = REFUSED[name]
    with pytest.raises(error, match=text):
        call(engine)


def test_refused_on_a_gpu(fake):
    """Head dims; captures without a scale or a compiled kernel."""
    with pytest.raises(ValueError, match=r"head_dim is 24 and head_dim_v 24; .*multiples of 16"):
        KVCache(24, 2, pages=2, batch=1, dtype="float8_e4m3fn")
    x = fake.asarray(np.ones((32, 2, 1, 1), np.float16), order="F")
    for scales, text in (
        ({}, "layer 0 has no scale; .*k_scale="),
        ({"k_scale": 1, "v_scale": 1}, "append tokens of float16 once"),
    ):
        cache = KVCache(32, 2, pages=2, batch=1, dtype="float8_e4m3fn", **scales)
        cache.begin_step()
        with fake.cuda.Stream() as stream:
            stream.begin_capture()
            with pytest.raises(RuntimeError, match=text):
                cache.append(x, x)
            stream.end_capture()
