"""Merged results of attention over disjoint sets of keys, compared with the formula in float64 on random inputs.

The same problems run on numpy arrays, on the fake CuPy, and on a GPU. Outputs are full of NaN before.
"""

import ml_dtypes
import numpy as np
import pytest

import cupy_sdpa
from cupy_sdpa.device import merge as merging
from cupy_sdpa.device.merge import Parts

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
ON_GPU = ("float16", "bfloat16", "float32")
SEEDS = range(20)


class OnCpu:
    """numpy with the functions of CuPy that the tests use."""

    asarray = staticmethod(lambda x: x)
    asnumpy = staticmethod(lambda x: x)


def formula(parts, sinks):
    """The merged output and log-sum-exp in float64, row by row.

    Args:
        parts: outputs ``(Dv, H, S, B)`` and log-sum-exps ``(S, H, B)``.
        sinks: ``(H,)`` or None.
    """
    width, heads, queries, batch = parts[0][0].shape
    out, stats = np.zeros((width, heads, queries, batch)), np.full((queries, heads, batch), -np.inf)
    for s, h, b in np.ndindex(stats.shape):
        known = [(float(L[s, h, b]), o[:, h, s, b].astype(np.float64)) for o, L in parts if L[s, h, b] != -np.inf]
        if sinks is not None and sinks[h] != -np.inf:
            known.append((float(sinks[h]), np.zeros(width)))
        if known:
            top = max(L for L, _ in known)
            weights = [np.exp(L - top) for L, _ in known]
            out[:, h, s, b] = sum(w * o for w, (_, o) in zip(weights, known, strict=True)) / sum(weights)
            stats[s, h, b] = top + np.log(sum(weights))
    return out, stats


def strided(xp, rng, x, value=None, unit=False):
    """The array on the engine with random memory order, gaps and directions; filled with ``value`` if it is given.

    Args:
        xp: the array module.
        rng: random numbers.
        x: a numpy array.
        value: a number, or None for the elements of ``x``.
        unit: whether the first axis has stride 1 and every other stride is a multiple of 8 elements.
    """
    axes = [0, *(1 + rng.permutation(x.ndim - 1))] if unit else list(rng.permutation(x.ndim))
    gaps = [int(n) for n in rng.choice([0, 0, 1, 2], x.ndim)]
    steps = [1 if unit and axis == 0 else int(rng.choice([1, 1, -1, 2])) for axis in range(x.ndim)]
    if unit:
        gaps[0] = -x.shape[0] % 8 + 8 * int(rng.integers(2))
    longer = [n * abs(step) + gap for n, step, gap in zip(x.shape, steps, gaps, strict=True)]
    whole = np.full([longer[axis] for axis in axes], 7, x.dtype, order="F")
    window = whole.transpose(np.argsort(axes))
    cut = tuple(
        slice(gap, gap + n * abs(step)) if not (unit and axis == 0) else slice(n)
        for axis, (n, step, gap) in enumerate(zip(x.shape, steps, gaps, strict=True))
    )
    turn = tuple(slice(None, None, step) for step in steps)
    window[cut][turn][...] = x if value is None else value
    return xp.asarray(whole).transpose(*np.argsort(axes))[cut][turn]


def random_parts(rng, shape, parts, dtype, spread):
    """Outputs and log-sum-exps of random parts, some -inf with NaN as output, some far below the others."""
    width, heads, queries, batch = shape
    out = rng.standard_normal((width, heads, queries, batch, parts)).astype(dtype)
    stats = (spread * rng.standard_normal((queries, heads, batch, parts))).astype(np.float32)
    kind = rng.random(stats.shape)
    stats[kind < 0.1] = -1e30
    stats[kind > 0.8] = -np.inf
    stats[rng.random(stats.shape[:3]) < 0.15] = -np.inf  # rows without parts
    out[:, np.isneginf(stats.swapaxes(0, 1))] = np.nan
    return out, stats


def random_sizes(rng, large=False):
    """Dv, H, S and B; sizes of 0, 1 and 2 are as frequent as larger ones."""
    width = int(rng.choice([0, 1, 2, 8, 16, 37, 64, 100, 128, 264]))
    return (width, *(int(n) for n in rng.choice([0, 1, 1, 2, 2, 3, 5], 3)))


def check(got, wanted, dtype, spread):
    """The errors of a result and its log-sum-exp are those of rounding.

    The weights are exponentials of float32 numbers of size ``spread``: their relative error is that of rounding the differences.
    The result is a mean of numbers below 6.
    """
    weights = 8 * float(np.finfo(np.float32).eps) * (2 + 8 * spread)
    unit = float(ml_dtypes.finfo(dtype).eps)
    out, stats = (np.asarray(x, np.float64) for x in got)
    np.testing.assert_allclose(out, wanted[0], rtol=unit, atol=6 * min(weights, 1e-4) + float(ml_dtypes.finfo(dtype).tiny))
    np.testing.assert_allclose(stats, wanted[1], rtol=4 * float(np.finfo(np.float32).eps), atol=2e-6)


def check_random_groups(xp, seed, dtype, out_dtype):
    """Merge groups of random sizes and strides."""
    rng = np.random.default_rng([seed, *dtype.encode(), *out_dtype.encode()])
    shape = random_sizes(rng)
    counts = [int(n) for n in rng.choice([0, 1, 1, 2, 3, 9, 64], int(rng.integers(1, merging.MAX_GROUPS + 1)))]
    counts = counts if sum(counts) < 150 else [64, 3]
    spread, unit = float(rng.choice([0, 1, 1, 1e4])), bool(rng.integers(2))
    made = [random_parts(rng, shape, n, DTYPES[dtype], spread) for n in counts]
    parts = [(o[..., i], L[..., i]) for o, L in made for i in range(o.shape[-1])]
    parts = parts or [(np.zeros(shape), np.full((shape[2], shape[1], shape[3]), -np.inf))]
    sinks = None
    if rng.integers(2):
        sinks = (spread * rng.standard_normal(shape[1])).astype(np.float32)
        sinks[rng.random(shape[1]) < 0.3] = -np.inf
    groups = [Parts(strided(xp, rng, o, unit=unit), strided(xp, rng, L)) for o, L in made]
    out = strided(xp, rng, np.zeros(shape, DTYPES[out_dtype]), np.nan, unit)
    stats = strided(xp, rng, np.zeros((shape[2], shape[1], shape[3]), np.float32), np.nan) if rng.integers(4) else None
    given_sinks = None if sinks is None else strided(xp, rng, sinks)
    merging.merge(groups, out, stats, given_sinks)
    wanted = formula(parts, sinks)
    got = xp.asnumpy(out), wanted[1] if stats is None else xp.asnumpy(stats)
    check(got, wanted, DTYPES[out_dtype], spread)


def check_random_calls(xp, seed, dtype):
    """Call the public function with 1 to 20 parts."""
    rng = np.random.default_rng([seed, *dtype.encode()])
    shape = random_sizes(rng)
    n, packed = int(rng.choice([1, 1, 2, 2, 7, 8, 9, 16, 17, 20])), bool(rng.integers(2))
    shape = (*shape[:3], 1) if packed else shape
    spread = float(rng.choice([1, 1, 1e4]))
    made = [random_parts(rng, shape, 1, DTYPES[dtype], spread) for _ in range(n)]
    parts = [(o[..., 0], L[..., 0]) for o, L in made]
    sinks = rng.standard_normal(shape[1]).astype(np.float32) if rng.integers(2) else None
    given = [(o[..., 0], L[..., 0].T) if packed else (o, L) for o, L in parts]
    outs = [strided(xp, rng, o, unit=bool(rng.integers(2))) for o, _ in given]
    stats = [strided(xp, rng, L) for _, L in given]
    out = strided(xp, rng, given[0][0], np.nan) if rng.integers(2) else None
    got = cupy_sdpa.merge(
        outs, stats, sinks=None if sinks is None else xp.asarray(sinks), out=out, return_stats=bool(seed % 2)
    )  # fmt: skip
    wanted = formula(parts, sinks)
    values, rows = got if seed % 2 else (got, None)
    assert out is None or values is out
    assert values.dtype == DTYPES[dtype]
    wanted = (wanted[0][..., 0], wanted[1][..., 0].T) if packed else wanted
    check((xp.asnumpy(values), wanted[1] if rows is None else xp.asnumpy(rows)), wanted, DTYPES[dtype], spread)


PAIRS = [
    ("float16", "float16"),
    ("bfloat16", "bfloat16"),
    ("float32", "float32"),
    ("float32", "bfloat16"),
    ("float16", "float32"),
]


@pytest.mark.parametrize(("dtype", "out_dtype"), [*PAIRS, ("float64", "float64")], ids="-".join)
@pytest.mark.parametrize("seed", SEEDS)
def test_groups_on_the_cpu(seed, dtype, out_dtype):
    """Groups of parts as numpy arrays equal the formula."""
    check_random_groups(OnCpu, seed, dtype, out_dtype)


@pytest.mark.parametrize(("dtype", "out_dtype"), PAIRS, ids="-".join)
@pytest.mark.parametrize("seed", SEEDS)
def test_groups_on_the_fake_gpu(seed, dtype, out_dtype, fake):
    """Groups of parts in the CUDA kernel equal the formula."""
    check_random_groups(fake, seed, dtype, out_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "out_dtype"), PAIRS, ids="-".join)
@pytest.mark.parametrize("seed", SEEDS)
def test_groups_on_the_gpu(seed, dtype, out_dtype, cupy):
    """The same on a GPU."""
    check_random_groups(cupy, seed, dtype, out_dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_calls_on_the_cpu(seed, dtype):
    """1 to 20 results, packed or not, equal the formula."""
    check_random_calls(OnCpu, seed, dtype)


@pytest.mark.parametrize("dtype", ON_GPU)
@pytest.mark.parametrize("seed", SEEDS)
def test_calls_on_the_fake_gpu(seed, dtype, fake):
    """The same in the CUDA kernel; more than eight parts take several launches."""
    check_random_calls(fake, seed, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ON_GPU)
@pytest.mark.parametrize("seed", SEEDS)
def test_calls_on_the_gpu(seed, dtype, cupy):
    """The same on a GPU."""
    check_random_calls(cupy, seed, dtype)


def check_typical(xp, count, dtype):
    """Head dim 128, 32 heads, dense: every thread reads vectors, and slots share the parts."""
    rng = np.random.default_rng(count)
    shape = (128, 32, 2, 2)
    o, rows = random_parts(rng, shape, count, DTYPES[dtype], 3.0)
    out, stats = (xp.asarray(np.full(s, np.nan, t, order="F")) for s, t in ((shape, DTYPES[dtype]), ((2, 32, 2), np.float32)))
    merging.merge([Parts(xp.asarray(np.asfortranarray(o)), xp.asarray(np.asfortranarray(rows)))], out, stats)
    check((xp.asnumpy(out), xp.asnumpy(stats)), formula([(o[..., i], rows[..., i]) for i in range(count)], None), o.dtype, 3.0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("count", [2, 8, 9, 64, 65])
def test_typical_sizes_on_the_fake_gpu(count, dtype, fake):
    """As many parts as one thread loads at once, one more, as many as all slots load, one more."""
    check_typical(fake, count, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("count", [2, 8, 9, 64, 65])
def test_typical_sizes_on_the_gpu(count, dtype, cupy):
    """The same on a GPU."""
    check_typical(cupy, count, dtype)


def test_nothing_else_is_written(fake):
    """Elements between those of strided results are unchanged."""
    rng = np.random.default_rng(0)
    o, rows = random_parts(rng, (24, 3, 5, 2), 4, np.float16, 1.0)
    out, stats = fake.full((32, 3, 10, 2), 7, np.float16, order="F"), fake.full((10, 3, 2), 7, np.float32, order="F")
    merging.merge([Parts(fake.asarray(o), fake.asarray(rows))], out[:24, :, ::2], stats[::2])
    left, left_rows = out.get(), stats.get()
    assert (left[24:] == 7).all()
    assert (left[:, :, 1::2] == 7).all()
    assert (left_rows[1::2] == 7).all()
    assert not (left[:24, :, ::2] == 7).any()


@pytest.mark.parametrize("engine", ["cpu", "gpu"])
def test_infinite_and_nan_statistics_spread(engine, fake):
    """+inf and NaN give NaN in their row, and only there."""
    xp = fake if engine == "gpu" else OnCpu
    outs = [np.ones((8, 3, 1, 1), np.float32) for _ in range(2)]
    stats = [np.zeros((1, 3, 1), np.float32), np.array([np.inf, np.nan, 0], np.float32).reshape(1, 3, 1)]
    out = xp.asnumpy(cupy_sdpa.merge([xp.asarray(x) for x in outs], [xp.asarray(x) for x in stats]))
    assert np.isnan(out[:, :2]).all()
    assert (out[:, 2] == 1).all()


@pytest.mark.parametrize("engine", ["cpu", "gpu"])
def test_sinks_alone(engine, fake):
    """A row without parts has output 0, and its sink as log-sum-exp, also if that is -inf."""
    xp = fake if engine == "gpu" else OnCpu
    outs, stats = [np.full((8, 2, 1, 1), np.nan, np.float32)], [np.full((1, 2, 1), -np.inf, np.float32)]
    sinks = np.array([-np.inf, 3], np.float32)
    given = [xp.asarray(x) for x in outs], [xp.asarray(x) for x in stats]
    out, rows = (xp.asnumpy(x) for x in cupy_sdpa.merge(*given, sinks=xp.asarray(sinks), return_stats=True))
    assert (out == 0).all()
    np.testing.assert_array_equal(rows[0, :, 0], sinks)


ALIGNED = {
    "dense": (lambda x: x, True),
    "offset": (lambda x: x[1:17], False),
    "offset_of_a_vector": (lambda x: x[8:24], True),
    "odd_width": (lambda x: x[:12], False),
    "every_second": (lambda x: x[::2], False),
    "backwards": (lambda x: x[:, ::-1], True),
    "odd_stride": (lambda x: x.reshape(-1, order="F")[: 27 * 8].reshape((27, 2, 4, 1), order="F")[:24], False),
    "odd_stride_of_one": (lambda x: x.reshape(-1, order="F")[: 27 * 8].reshape((27, 1, 1, 8), order="F")[:24, :, :, :1], True),
}


@pytest.mark.parametrize("name", ALIGNED)
def test_vectors_are_aligned(name, fake):
    """A thread loads eight elements at once only where all addresses are multiples of 16 bytes."""
    view, wanted = ALIGNED[name]
    assert merging._is_aligned(view(fake.zeros((32, 2, 4, 1), np.float16, order="F")), 8) is wanted


def test_parts_of_attention_on_the_fake_gpu(fake):
    """Attention over three sets of keys, merged with the sinks, equals attention with sinks over all keys."""
    rng = np.random.default_rng(1)
    q, k, v = (np.asfortranarray(rng.standard_normal((16, h, n, 2)).astype(np.float16)) for h, n in ((4, 5), (2, 40), (2, 40)))
    sinks = rng.standard_normal(4).astype(np.float32)
    wanted = cupy_sdpa.attention(*(x.astype(np.float64) for x in (q, k, v)), sinks=sinks, return_stats=True)
    sets = [slice(8), slice(8, 32), slice(32, 40)]
    on_gpu = [[fake.asarray(np.asfortranarray(x)) for x in (q, k[:, :, keys], v[:, :, keys])] for keys in sets]
    outs, stats = zip(*(cupy_sdpa.attention(*arrays, return_stats=True) for arrays in on_gpu), strict=True)
    out, rows = cupy_sdpa.merge(outs, stats, sinks=fake.asarray(sinks), return_stats=True)
    np.testing.assert_allclose(out.get(), wanted[0], rtol=4e-3, atol=4e-3)
    np.testing.assert_allclose(rows.get(), wanted[1], rtol=1e-5, atol=1e-5)


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype, order="F")


X, Y = zeros(8, 2, 3, 1), zeros(3, 2, 1)


def read_only():
    x = X.copy(order="F")
    x.flags.writeable = False
    return x


ERRORS = {
    "no_parts": (([], []), {}, ValueError, "0 outs and 0 stats"),
    "numbers": (([X, X], [Y]), {}, ValueError, "2 outs and 1 stats; pass one or more parts"),
    "an_array": ((X, Y), {}, TypeError, "outs is a ndarray; pass a list"),
    "no_array": (([X], [[0.0]]), {}, TypeError, r"stats\[0\] is a list"),
    "axes": (([Y[0]], [Y]), {}, ValueError, r"outs\[0\] has shape \(2, 1\); it must be \(Dv, Hq, Sq, B\)"),
    "dtype": (([X.astype("i4")], [Y]), {}, TypeError, r"outs\[0\] has dtype int32; it must be float16, bfloat16"),
    "other_shape": (([X, X[:4]], [Y, Y]), {}, ValueError, r"outs\[1\] has shape \(4, 2, 3, 1\); .*\(8, 2, 3, 1\)"),
    "other_dtype": (([X, X.astype("f2")], [Y, Y]), {}, TypeError, r"outs\[1\] has dtype float16.*astype\('float32'\)"),
    "stats_shape": (([X], [zeros(2, 3, 1)]), {}, ValueError, r"stats\[0\] has shape \(2, 3, 1\);.* \(3, 2, 1\)"),
    "packed_stats": (([X[..., 0]], [Y[..., 0]]), {}, ValueError, r"stats\[0\] has shape \(3, 2\);.* \(2, 3\)"),
    "stats_dtype": (([X], [Y.astype("f8")]), {}, TypeError, r"stats\[0\] has dtype float64.*astype\('float32'\)"),
    "sinks_shape": (([X], [Y]), {"sinks": zeros(3)}, ValueError, r"sinks has shape \(3,\);.* \(2,\)"),
    "sinks_dtype": (([X], [Y]), {"sinks": zeros(2, dtype="f2")}, TypeError, "sinks has dtype float16"),
    "out_shape": (([X], [Y]), {"out": X[:4]}, ValueError, r"out has shape \(4, 2, 3, 1\);.* \(8, 2, 3, 1\)"),
    "out_dtype": (([X], [Y]), {"out": X.astype("f2")}, TypeError, "out has dtype float16"),
    "out_overlaps": (([X, X], [Y, Y]), {"out": X}, ValueError, r"out overlaps outs\[0\] in memory"),
    "out_overlaps_sinks": (
        ([X], [Y]),
        {"out": (own := zeros(8, 2, 3, 1)), "sinks": own[:2, 0, 0, 0]},
        ValueError,
        "out overlaps sinks in memory",
    ),
    "out_read_only": (([X], [Y]), {"out": read_only()}, ValueError, "out is read-only"),
    "flag": (([X], [Y]), {"return_stats": 1}, TypeError, "return_stats is 1; it must be True or False"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    """Messages name both values."""
    args, options, error, message = ERRORS[name]
    with pytest.raises(error, match=message):
        cupy_sdpa.merge(*args, **options)


GPU_ERRORS: dict[str, tuple] = {
    "mixed": (lambda cp: ([cp.asarray(X)], [Y]), {}, TypeError, r"arrays are mixed: outs\[0\] is a CuPy array, stats\[0\] is a numpy"),
    "float64": (lambda cp: ([cp.asarray(X.astype("f8"))], [cp.asarray(Y)]), {}, TypeError, "float64; it must be float16, bfloat16, float32:"),
}  # fmt: skip


@pytest.mark.parametrize("name", GPU_ERRORS)
def test_errors_on_the_gpu(name, fake):
    """Mixed arrays and float64."""
    arrays, options, error, message = GPU_ERRORS[name]
    with pytest.raises(error, match=message):
        cupy_sdpa.merge(*arrays(fake), **options)


def test_an_output_that_overlaps_on_the_gpu(fake):
    """Overlapping views are refused; interleaved views without a common element are not."""
    whole = fake.zeros((8, 2, 6, 1), np.float32, order="F")
    stats = [fake.asarray(Y)]
    with pytest.raises(ValueError, match=r"out overlaps outs\[0\]"):
        cupy_sdpa.merge([whole[:, :, :3]], stats, out=whole[:, :, 2:5])
    cupy_sdpa.merge([whole[:, :, ::2]], stats, out=whole[:, :, 1::2])


def test_float64_statistics_merge_exactly():
    """Float64 parts with float64 statistics are merged, and differentiated, with the accuracy of float64."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (np.asfortranarray(rng.standard_normal((8, 2, n, 1))) for n in (5, 40, 40, 5))
    parts = []
    for part in (slice(15), slice(15, 40)):
        stats = np.full((5, 2, 1), np.nan, order="F")
        parts.append(cupy_sdpa.attention(q, k[:, :, part], v[:, :, part], stats=stats))
    out, stats = cupy_sdpa.merge(*zip(*parts, strict=True), return_stats=True)
    assert stats.dtype == np.float64
    truth = cupy_sdpa.reference.attention(q, k, v)
    for got, wanted in zip((out, stats), truth, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-13, atol=1e-13)
    found = cupy_sdpa.attention_backward(dout, q, k, v, out, stats)
    for got, wanted in zip(found, cupy_sdpa.reference.attention_backward(dout, q, k, v), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-13)


def test_float64_statistics_need_float64_arrays():
    """Statistics of float32 arrays are float32."""
    x = np.ones((8, 1, 4, 1), np.float32, order="F")
    with pytest.raises(TypeError, match="stats is float64; it must be float32"):
        cupy_sdpa.attention(x, x, x, stats=np.zeros((4, 1, 1), order="F"))
    with pytest.raises(TypeError, match=r"stats\[0\] has dtype float64"):
        cupy_sdpa.merge([x], [np.zeros((4, 1, 1))])


@pytest.mark.parametrize("engine", ["float64", "float64 with float32 statistics", "float32", "float32 on the fake GPU"])
@pytest.mark.parametrize("level", [0, 1e4])
def test_many_parts_are_as_exact_as_few(level, engine, request):
    """The log-sum-exp of some of the parts is not rounded: with |L| = 1e4 a float32 has an error of 5e-4."""
    xp = request.getfixturevalue("fake") if "GPU" in engine else np
    rng, dtype = np.random.default_rng(0), engine.split()[0]
    rows = (level + rng.standard_normal((5, 2, 1, 20))).astype("f8" if engine == "float64" else "f4")
    outs = rng.standard_normal((8, 2, 5, 1, 20)).astype(dtype)
    wanted, total = formula([(outs[..., i], rows[..., i]) for i in range(20)], None)
    parts = [[xp.asarray(np.asfortranarray(x[..., i]), order="F") for i in range(20)] for x in (outs, rows)]
    out, stats = (np.asarray(x.get() if xp is not np else x) for x in cupy_sdpa.merge(*parts, return_stats=True))
    precision = {"float64": 1e-14, "float32": 1e-6}[dtype]
    np.testing.assert_allclose(out.astype("f8"), wanted, atol=precision * 3)
    np.testing.assert_allclose(stats, total, rtol=1e-14 if engine == "float64" else 1.2e-7, atol=1e-6 if level == 0 else 0)


def test_more_parts_than_a_kernel_takes_twice(fake):
    """With 70 parts some have no keys, and their outputs are not used."""
    rng = np.random.default_rng(0)
    outs, rows = rng.standard_normal((8, 2, 5, 1, 70)).astype("f4"), rng.standard_normal((5, 2, 1, 70)).astype("f4")
    rows[0], rows[1, :, :, 3:], rows[2, :, :, 8:16] = -np.inf, -np.inf, -np.inf
    outs[:, :, 0] = np.nan
    sinks = np.array([0.5, -np.inf], np.float32)
    wanted, total = formula([(outs[..., i], rows[..., i]) for i in range(70)], sinks)
    parts = [[fake.asarray(np.asfortranarray(x[..., i]), order="F") for i in range(70)] for x in (outs, rows)]
    out, stats = cupy_sdpa.merge(*parts, sinks=fake.asarray(sinks), return_stats=True)
    np.testing.assert_allclose(out.get(), wanted, atol=2e-6)
    np.testing.assert_allclose(stats.get(), total, atol=2e-6)
