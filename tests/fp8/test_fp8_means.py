"""Values with a mean: it is subtracted before the conversion to FP8 and added to the output, so that its error does not count."""

import numpy as np
import pytest
from fp8_arrays import ENGINES, ERROR, elements, normal, relative

from cupy_sdpa import KVCache, attention, attention_vjp, explain, fp8, reference
from cupy_sdpa.check.formats import dtype_of

E4M3 = "float8_e4m3fn"
#: Values of normal numbers.
VALUES = {
    "1": lambda n: np.ones_like(n), "1 + 0.3 n": lambda n: 1 + 0.3 * n, "n": lambda n: n,
    "100 + n": lambda n: 100 + n, "a mean of each head and sequence": lambda n: n + 50 * normal((len(n), *n.shape[1:2], 1, *n.shape[3:]), seed=9),
}  # fmt: skip


def arrays(values, sq=20, skv=60, hq=4, hkv=2, d=32, dv=48, b=2, dtype="float32", seed=0):
    """q, k and v on numpy."""
    q, k, n = (normal(shape, seed=seed + i) for i, shape in enumerate([(d, hq, sq, b), (d, hkv, skv, b), (dv, hkv, skv, b)]))
    return [np.asfortranarray(x.astype(dtype_of(dtype))) for x in (q, k, VALUES[values](n))]


def error(found, q, k, v, **options):
    """The error of an output, relative to the output of values without their mean."""
    wide = [x.astype(np.float64) for x in (q, k, v)]
    truth = attention(*wide, **options)
    centered = attention(*wide[:2], wide[2] - np.nanmean(wide[2], axis=2, keepdims=True), **options)
    return float(np.linalg.norm(found - truth) / max(np.linalg.norm(centered), 1e-3 * np.linalg.norm(truth)))


@ENGINES
@pytest.mark.parametrize("values", VALUES)
def test_the_error_is_that_of_the_deviations_from_the_mean(values, engine):
    """Of the output of queries that are converted, and of the pass of a pullback; it is rounded to FP8 without the mean."""
    given = arrays(values)
    q, k, v = engine.put(given)
    _, k8, v8 = fp8.quantize_qkv(q, k, v, rotate=True)
    for _ in range(4):
        found, stats = attention(q, k8, v8, return_stats=True, causal=True)
        assert error(engine.get(found), *given, causal=True) < 2 * ERROR[E4M3]
        assert found.dtype == stats.dtype == q.dtype
        assert error(engine.get(attention(q, k8, v8)), *given) < 2 * ERROR[E4M3]
    x = engine.put(arrays(values, dtype="float16"))
    out, _ = attention_vjp(*x, compute_dtype=E4M3)
    assert (
        error(engine.get(out).astype(float), *arrays(values, dtype="float16")) < (0.6 if "0" in values else 2) * ERROR[E4M3] * 5
    )


LENGTHS = {"seq_lens_q": np.array([20, 7], np.int32), "seq_lens_kv": np.array([9, 0], np.int32)}


@ENGINES
def test_padding_and_rows_without_keys(engine):
    """NaN after the lengths is not read, neither for the mean; a row without keys is 0, also where the mean is not."""
    q, k, v = arrays("100 + n")
    truth = attention(*(x.astype(np.float64) for x in (q, k, v)), causal="bottom_right", **LENGTHS)
    for b, (queries, keys) in enumerate(zip(*LENGTHS.values(), strict=True)):
        q[:, :, queries:, b] = k[:, :, keys:, b] = v[:, :, keys:, b] = np.nan
    lengths = engine.put(LENGTHS)
    given = fp8.quantize_qkv(*engine.put([q, k, v]), **lengths)
    for _ in range(3):
        out, stats = attention(*given, causal="bottom_right", return_stats=True, **lengths)
        found = engine.get(out.dequantize())
        assert relative(found, truth) < ERROR[E4M3]
        assert not found[:, :, :11, 0].any(), "9 keys, 20 queries"
        assert not found[truth == 0].any()
        assert np.isneginf(engine.get(stats)[:, :, 1]).all()
    mean = engine.get(given[2].mean)
    np.testing.assert_allclose(mean[:, :, 0, 0], v[:, :, :9, 0].mean(axis=2), rtol=1e-6)
    assert not mean[..., 1].any()


@ENGINES
@pytest.mark.parametrize("source", ["float16", "bfloat16", "float32"])
def test_conversions_with_a_mean(source, engine):
    """Of many rows, of wide rows, with lengths and in other memory layouts: every bit equals numpy's."""
    for seed, shape in enumerate([(16, 1, 700, 2), (80, 3, 300, 1), (2064, 1, 3, 1)]):
        x = normal(shape, source, seed) + dtype_of(source).type(2)
        lengths = np.array([530, 257], np.int32)[: shape[3]] % (shape[2] + 1)
        for own, of_numpy in ((engine.put(x), x), (engine.put(np.ascontiguousarray(x.T)).T, np.ascontiguousarray(x.T).T)):
            for n in (None, lengths):
                found = fp8.quantize(own, center=True, lengths=None if n is None else engine.put(n))
                wanted = fp8.quantize(of_numpy, center=True, lengths=n)
                np.testing.assert_array_equal(engine.get(found.mean), wanted.mean)
                np.testing.assert_array_equal(elements(engine, found).astype(np.float32), wanted.data.astype(np.float32))
                rows = x.astype(np.float64)[..., 0][:, :, : shape[2] if n is None else n[0]]
                np.testing.assert_allclose(wanted.mean[:, :, 0, 0], rows.mean(axis=2), rtol=1e-5)


def test_sinks_and_masked_rows():
    """The mean of a row has the weight of its keys; on the CPU, which takes sinks and masks."""
    q, k, v = arrays("100 + n")
    mask = np.random.default_rng(0).random((60, 20, 1, 1)) < 0.5
    mask[:, 3] = False
    for options in (
        {"sinks": np.array([0.5, 8, -np.inf, 3], np.float32)},
        {"mask": mask},
        {"mask": mask, "sinks": np.ones(4, np.float32)},
    ):
        truth = attention(*(x.astype(np.float64) for x in (q, k, v)), **options)
        found, stats = attention(q, *fp8.quantize_qkv(q, k, v)[1:], return_stats=True, **options)
        np.testing.assert_allclose(found, truth, atol=1.0)
        if "mask" in options:
            assert not found[:, :, 3].any()
        assert np.isneginf(stats[3]).all() == ("mask" in options and "sinks" not in options)


@ENGINES
def test_the_scale_fits_values_with_and_without_their_mean(engine):
    """A value far from the mean of the others does not saturate."""
    x = np.ones((16, 1, 50, 1), np.float32, order="F")
    x[3, 0, 7, 0] = -1
    found = fp8.quantize(engine.put(x), center=True)
    np.testing.assert_allclose(engine.get(found.dequantize()), x, rtol=0.07)
    np.testing.assert_allclose(engine.get(found.descale), 1.96 / 448, rtol=1e-6)
    found = fp8.quantize(engine.put(x + 9), center=True)
    np.testing.assert_allclose(engine.get(found.descale), 10 / 448, rtol=1e-6)


@ENGINES
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_outputs_in_fp8(dtype, engine):
    """The scale of v fits an output with the mean; ``out_scale`` and the largest output describe the whole output."""
    for values in ("1 + 0.3 n", "100 + n", "1"):
        given = arrays(values)
        truth = attention(*(x.astype(np.float64) for x in given))
        q, k, v = fp8.quantize_qkv(*engine.put(given), dtype)
        assert relative(engine.get(v.dequantize()), given[2]) < ERROR[dtype]
        assert (engine.get(v.dequantize("float16")).astype(np.float32) - engine.get(v.dequantize()) < 0.1).all()
        for scale in (None, 3.0):
            out, amax = fp8.attention(q, k, v, out_scale=scale, return_amax=True)
            assert (
                relative(engine.get(out.dequantize()), np.minimum(truth, 448 / 3.0 if scale and dtype == E4M3 else np.inf))
                < ERROR[dtype]
            )
            np.testing.assert_allclose(engine.get(amax), np.abs(truth).max(), rtol=ERROR[dtype])
            assert out.mean is None


def test_an_output_in_16_bits():
    """On the CPU, which writes it without a rounding to FP8."""
    given = arrays("100 + n")
    out = fp8.attention(*fp8.quantize_qkv(*given), out_dtype="float16")
    assert relative(out.astype(np.float64), reference.attention(*given)[0]) < 1e-3


@ENGINES
def test_gradients_of_values_with_a_mean(engine):
    """They equal the gradients of the values without the mean: a mean changes only the output."""
    q, k, n = arrays("n", dtype="float16")
    dout = normal((48, 4, 20, 2), "float16", 5)
    v = np.asfortranarray(n + np.float16(8))
    truth = [x.astype(np.float64) for x in (q, k, v)]
    _, pullback = attention_vjp(*truth)
    wanted = pullback(dout.astype(np.float64))
    for _ in range(3):
        out, pullback = attention_vjp(*engine.put([q, k, v]), compute_dtype=E4M3)
        assert relative(engine.get(out).astype(float), attention(*truth)) < 0.002
        for x, y in zip(pullback(engine.put(dout)), wanted, strict=True):
            assert relative(engine.get(x).astype(float), y) < 3 * ERROR[E4M3]


@ENGINES
def test_views_of_an_array_with_a_mean(engine):
    """They are the views of its values; a part of the keys and of the heads gives the same output."""
    q, k, v = engine.put(arrays("100 + n"))
    v8 = fp8.quantize(v, center=True)
    whole = engine.get(v8.dequantize())
    for view in (
        lambda x: x.T,
        lambda x: x[:, 1:, ::2],
        lambda x: x[..., 1],
        lambda x: x[:16, :, 3][..., None],
        lambda x: x.transpose(2, 1, 3, 0),
    ):
        np.testing.assert_allclose(engine.get(view(v8).dequantize()), view(whole), rtol=1e-6)
    k8, part = fp8.quantize(k), np.s_[:, 1:, 5:40]
    found = attention(q[:, 2:], k8[part], v8[part], return_stats=True)
    truth = attention(*(np.asfortranarray(x, np.float64) for x in (engine.get(q)[:, 2:], engine.get(k)[part], whole[part])))
    assert relative(engine.get(found[0]), truth) < 0.002


def test_packed_sequences_have_one_mean():
    """Of all sequences."""
    q, k, v = (x[..., 0] for x in arrays("100 + n", sq=60, b=1))
    starts = np.array([0, 10, 60], np.int32)
    options = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": 50, "max_seqlen_kv": 50}
    truth = attention(*(x.astype(np.float64) for x in (q, k, v)), **options)
    _, k8, v8 = fp8.quantize_qkv(q, k, v)
    assert relative(attention(q, k8, v8, **options), truth) < 0.002


@ENGINES
def test_a_cache_keeps_the_mean_of_the_first_tokens(engine):
    """Of every sequence, also after fork, truncate, release and new tokens: random changes compared with a list of the tokens."""
    rng = np.random.default_rng(1)
    cache = KVCache(
        32, 2, pages=40, batch=4, page_size=16, head_dim_v=48, dtype=E4M3, layers=2, numpy=not engine.on_cudnn, v_scale=1.0
    )
    tokens, firsts = [[np.zeros((d, 2, 0, 1))] * 4 for d in (32, 48)], [0] * 4
    like = np.arange(4)  # sequences with equal numbers have equal means
    for turn in range(12):
        b, other = rng.permutation(4)[:2]
        length = tokens[0][b].shape[2]
        if turn % 4 == 1:
            keep = int(rng.integers(0, length + 1)) * (turn != 5)
            cache.truncate(int(b), keep)
            for side in tokens:
                side[b] = side[b][:, :, :keep]
        if turn % 4 == 2:
            cache.release(int(other))
            cache.fork(int(b), int(other))
            for side in tokens:
                side[other] = side[b]
            firsts[other], like[other] = firsts[b], like[b]
        if turn == 7:
            cache.release(int(b))
            for side in tokens:
                side[b] = side[b][:, :, :0]
        counts = rng.integers(1, 25, 4) if turn % 3 else rng.integers(0, 2, 4)
        new = [rng.standard_normal((d, 2, max(1, counts.max()), 4)).astype(np.float16) for d in (32, 48)]
        new[1] += np.where(np.arange(48) < 24, 20 + 10 * like[:, None], 0).T[:, None, None].astype(np.float16)
        for layer in (0, 1):
            given = engine.put([np.asfortranarray(x * np.float16(1 + layer)) for x in new])
            cache.append(*given, layer, **({} if layer else {"seq_lens_q": counts}))
        firsts = [firsts[n] if tokens[0][n].shape[2] else count for n, count in enumerate(counts)]
        for side, x in zip(tokens, new, strict=True):
            for n, count in enumerate(counts):
                side[n] = np.concatenate([side[n], x[:, :, :count, n : n + 1]], axis=2)
        q = normal((32, 4, 2, 4), "float32", turn)
        out = engine.get(attention(engine.put(q), **cache.view(1) | {"seq_lens_q": None, "max_seqlen_q": None}))
        values, means = engine.get(cache.values(1).dequantize()), engine.get(cache.values(1).mean)[:, :, 0]
        table = engine.get(cache.full_table)
        for n in range(4):
            k, v = (np.asfortranarray(2 * side[n].astype(np.float64)) for side in tokens)
            truth = attention(np.asfortranarray(q[..., n : n + 1].astype(np.float64)), k, v)
            pages = table[: -(-k.shape[2] // 16), n]
            if not pages.size:
                assert not out[..., n].any()
                continue
            assert (means[:, :, pages] == means[:, :, pages[:1]]).all()
            deviation = np.abs(v[..., 0] - means[:, :, pages[:1]]).max()
            assert firsts[n] < 2 or deviation < 15, "values from 40 to 100"
            assert np.abs(out[..., n : n + 1] - truth).max() < deviation / 8
            found = np.concatenate([values[..., page] for page in pages], axis=2)[:, :, : v.shape[2]]
            assert np.abs(found - v[..., 0]).max() < deviation / 16


@ENGINES
def test_the_mean_of_few_first_tokens(engine):
    """It is the mean of a few tokens where their directions agree, and near 0 where they do not, so that no sequence gets worse."""
    for numbers, offset, least, most in (
        (1, 0, 0, 1e-6),
        (40, 0, 0, 0.3),
        (40, 5, 4.7, 5.3),
        (2, 5, 4.5, 5.5),
        (1, 5, 0, 1e-6),
    ):
        cache = KVCache(128, 2, pages=4, batch=1, page_size=64, dtype=E4M3, numpy=not engine.on_cudnn)
        x = engine.put(np.asfortranarray(normal((128, 2, numbers, 1), "float16") + np.float16(offset)))
        cache.append(x, x)
        mean = engine.get(cache.values().mean)[:, :, 0, int(engine.get(cache.table)[0, 0])]
        assert least <= np.sqrt(np.square(mean).mean()) <= most, (numbers, offset)


@ENGINES
def test_fp8_tokens_with_a_mean(engine):
    """The first ones give the sequence their mean, and their elements are stored; others are converted."""
    first, second = (engine.put(np.asfortranarray(normal((32, 2, n, 2), "float16", n) + np.float16(8))) for n in (20, 5))
    cache = KVCache(32, 2, pages=8, batch=2, page_size=16, dtype=E4M3, numpy=not engine.on_cudnn)
    k, v = fp8.quantize(first), fp8.quantize(first, center=True)
    cache.append(k, v)
    cache.append(fp8.quantize(second), fp8.quantize(second, center=True))
    table = engine.get(cache.table)
    np.testing.assert_array_equal(engine.get(cache.values().mean)[:, :, 0, table[0]], engine.get(v.mean)[:, :, 0])
    pages, values = elements(engine, cache.values()), engine.get(cache.values().dequantize())
    np.testing.assert_array_equal(pages[..., table[0]].astype(np.float32), elements(engine, v)[:, :, :16].astype(np.float32))
    assert np.abs(values[:, :, 4:9, table[1]] - engine.get(second)).max() < 0.3


@ENGINES
def test_reports(engine):
    """They show the step that adds the mean, and say which error is expected."""
    q, k, v = fp8.quantize_qkv(*engine.put(arrays("1 + 0.3 n")))
    report = explain(q, k, v)
    assert any("add_mean" in step for step in report.steps)
    assert "expected error: about 6 % of the output of v without its mean" in str(report)
    report = explain(q, k, fp8.quantize(engine.put(arrays("n")[2])))
    assert not any("add_mean" in step for step in report.steps)
    assert "center=True" in str(report)
    assert "expected error" not in str(explain(*engine.put(arrays("n", dtype="float16"))))


@pytest.mark.gpu
@pytest.mark.parametrize("keys", [8192, 32768])
@pytest.mark.parametrize("values", ["1", "1 + 0.3 n", "n"])
def test_many_keys(values, keys, cupy):
    """The error that docs/fp8.md states: the tensor cores truncate sums, by up to 43 % of the mean of v."""
    given = arrays(values, sq=64, skv=keys, hq=2, hkv=1, d=128, dv=128, b=1, dtype="bfloat16")
    q, k, v = (cupy.asarray(x, order="F") for x in given)
    truth = reference.attention(*given)[0]
    for found in (attention(q, *fp8.quantize_qkv(q, k, v)[1:]), attention_vjp(q, k, v, compute_dtype=E4M3)[0]):
        assert relative(found.get().astype(np.float64), truth) < (0.075 if values == "n" else 0.005)
