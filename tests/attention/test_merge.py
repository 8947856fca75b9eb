"""Merged results of attention over disjoint sets of keys, compared with the formula in float64 on random inputs."""

import ml_dtypes
import numpy as np
import pytest
from engines import numbers

import cupy_sdpa
from cupy_sdpa import attention, extend
from cupy_sdpa.extend import Parts

#: The dtypes of the parts and of the result.
PAIRS = [
    ("float16", "float16"),
    ("bfloat16", "bfloat16"),
    ("float32", "float32"),
    ("float32", "bfloat16"),
    ("float16", "float32"),
]


def dtype_of(name):
    """The dtype of a name."""
    return np.dtype(getattr(ml_dtypes, str(name), name))


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


def strided(engine, rng, x, value=None, unit=False):
    """The array on the engine with random memory order, gaps of 7 and directions; filled with ``value`` if it is given.

    Args:
        engine: the engine.
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
    cut = tuple(
        slice(gap, gap + n * abs(step)) if not (unit and axis == 0) else slice(n)
        for axis, (n, step, gap) in enumerate(zip(x.shape, steps, gaps, strict=True))
    )
    turn = tuple(slice(None, None, step) for step in steps)
    whole.transpose(np.argsort(axes))[cut][turn][...] = x if value is None else value
    return engine.put(whole).transpose(*np.argsort(axes))[cut][turn]


def random_parts(rng, shape, parts, dtype, spread):
    """Outputs and log-sum-exps of random parts, some -inf with NaN as output, some far below the others."""
    width, heads, queries, batch = shape
    out = rng.standard_normal((width, heads, queries, batch, parts)).astype(dtype_of(dtype))
    stats = (spread * rng.standard_normal((queries, heads, batch, parts))).astype(np.float32)
    kind = rng.random(stats.shape)
    stats[kind < 0.1] = -1e30
    stats[kind > 0.8] = -np.inf
    stats[rng.random(stats.shape[:3]) < 0.15] = -np.inf  # rows without parts
    out[:, np.isneginf(stats.swapaxes(0, 1))] = np.nan
    return out, stats


def random_sizes(rng):
    """Dv, H, S and B; sizes of 0, 1 and 2 are as frequent as larger ones."""
    width = int(rng.choice([0, 1, 2, 8, 16, 37, 64, 100, 128, 264]))
    return (width, *(int(n) for n in rng.choice([0, 1, 1, 2, 2, 3, 5], 3)))


def check(got, wanted, spread):
    """The errors of a result and its log-sum-exp are rounding errors.

    The weights are exponentials of float32 numbers of size ``spread``: their relative error comes from rounding the
    differences. The result is a mean of numbers below 6.
    """
    out, stats = got
    weights = 8 * float(np.finfo(np.float32).eps) * (2 + 8 * spread)
    atol = 6 * min(weights, 1e-4) + float(ml_dtypes.finfo(out.dtype).tiny)
    np.testing.assert_allclose(out.astype("f8"), wanted[0], rtol=float(ml_dtypes.finfo(out.dtype).eps), atol=atol)
    if stats is not None:
        np.testing.assert_allclose(stats, wanted[1], rtol=4 * float(np.finfo(np.float32).eps), atol=2e-6)


def pair_of(number, engine):
    """The dtypes of a number: each in turn, and the dtypes of numpy alone."""
    pairs = PAIRS if engine.on_cudnn else [*PAIRS, ("float64", "float64")]
    return pairs[number % len(pairs)]


@pytest.mark.parametrize("number", numbers(20, quick=2))
def test_groups_of_parts(number, engine):
    """Up to eight groups of parts of random sizes and strides, as the kernel takes them, equal the formula."""
    dtype, out_dtype = pair_of(number, engine)
    rng = np.random.default_rng([number, *dtype.encode(), *out_dtype.encode()])
    nothing = number == 1  # no part at all, and sinks
    shape = (16, 2, 3, 2) if nothing else random_sizes(rng)
    counts = [int(n) for n in rng.choice([0, 1, 1, 2, 3, 9, 64], int(rng.integers(1, 9)))]
    counts = [0, 0] if nothing else counts if sum(counts) < 150 else [64, 3]
    spread, unit = float(rng.choice([0, 1, 1, 1e4])), bool(rng.integers(2))
    made = [random_parts(rng, shape, n, dtype, spread) for n in counts]
    parts = [(o[..., i], L[..., i]) for o, L in made for i in range(o.shape[-1])]
    parts = parts or [(np.zeros(shape), np.full((shape[2], shape[1], shape[3]), -np.inf))]
    sinks = None
    if nothing or rng.integers(2):
        sinks = (spread * rng.standard_normal(shape[1])).astype(np.float32)
        sinks[rng.random(shape[1]) < 0.3] = -np.inf
        sinks[:nothing] = -np.inf
    groups = [Parts(strided(engine, rng, o, unit=unit), strided(engine, rng, L)) for o, L in made]
    out = strided(engine, rng, np.zeros(shape, dtype_of(out_dtype)), np.nan, unit)
    stats = (
        strided(engine, rng, np.zeros((shape[2], shape[1], shape[3]), np.float32), np.nan)
        if nothing or rng.integers(4)
        else None
    )
    extend.merge_parts(groups, out, stats, None if sinks is None else strided(engine, rng, sinks))
    check((engine.get(out), None if stats is None else engine.get(stats)), formula(parts, sinks), spread)


@pytest.mark.parametrize("number", numbers(12, quick=2))
def test_random_problems(number, engine):
    """Attention to up to 20 parts of the keys is merged to attention to all keys; more than eight parts take several launches."""
    engine.agrees(engine.draw({"merge"}, number), refused=True)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("level", [0, 1e4])
@pytest.mark.parametrize("packed", [False, True])
def test_many_parts_are_as_exact_as_few(packed, level, dtype, engine):
    """The log-sum-exp of 70 parts, some without keys, is not rounded in between: with |L| = 1e4 a float32 has an error of 5e-4."""
    if engine.on_cudnn and dtype == "float64":
        return
    rng = np.random.default_rng(0)
    rows, outs = (level + rng.standard_normal((5, 2, 1, 70))).astype(dtype), rng.standard_normal((8, 2, 5, 1, 70)).astype(dtype)
    rows[0], rows[1, :, :, 3:], rows[2, :, :, 8:16] = -np.inf, -np.inf, -np.inf
    outs[:, :, 0] = np.nan
    sinks = np.array([0.5 + level, -np.inf], np.float32)
    wanted, total = formula([(outs[..., i], rows[..., i]) for i in range(70)], sinks)
    if packed:  # one sequence
        wanted, total, outs, rows = wanted[..., 0], total[..., 0].T, outs[:, :, :, 0], rows[:, :, 0].swapaxes(0, 1)
    parts = [[engine.put(np.asfortranarray(x[..., i])) for i in range(70)] for x in (outs, rows)]
    out, stats = engine.get(cupy_sdpa.merge(*parts, sinks=engine.put(sinks), return_stats=True))
    np.testing.assert_allclose(out, wanted, atol={"float64": 3e-14, "float32": 3e-6}[dtype])
    np.testing.assert_allclose(stats, total, rtol=1e-14 if dtype == "float64" else 1.2e-7, atol=0 if level else 1e-6)


def test_nothing_else_is_written(engine):
    """Gaps in strided results, and elements after a width that is not a whole vector, are unchanged; an out that is interleaved with a part is accepted."""
    rng = np.random.default_rng(0)
    o, rows = (x[..., 0] for x in random_parts(rng, (12, 3, 5, 2), 1, engine.dtype, 1.0))
    out = engine.xp.full((32, 3, 10, 2), 7, engine.dtype, order="F")
    part = out[:12, :, 1::2]
    part[...] = engine.put(np.nan_to_num(o, nan=7))
    cupy_sdpa.merge([part], [engine.put(rows)], out=out[:12, :, ::2])
    left = engine.get(out)
    assert (left[12:] == 7).all()
    np.testing.assert_array_equal(left[:12, :, 1::2], np.nan_to_num(o, nan=7))
    assert not (left[:12, :, ::2] == 7).any()
    with pytest.raises(ValueError, match=r"out overlaps outs\[0\]"):
        cupy_sdpa.merge([out[:, :, :5]], [engine.put(rows)], out=out[:, :, 4:9])


def test_infinite_and_nan_statistics_spread(engine):
    """+inf and NaN give NaN in their row, and only there; a row without parts has its sink as log-sum-exp, also if that is -inf.

    Of numpy arrays, whose elements are read, +inf raises ValueError (``tests/mistakes_of_others.py``).
    """
    infinity = np.nan if engine.name == "numpy" else np.inf
    outs = engine.put([np.ones((8, 4, 1, 1), np.float32, order="F") for _ in range(2)])
    stats = engine.put([np.float32(row).reshape(1, 4, 1) for row in ([0, 0, 0, -np.inf], [infinity, np.nan, 0, -np.inf])])
    out = engine.get(cupy_sdpa.merge(outs, stats))
    assert np.isnan(out[:, :2]).all()
    assert (out[:, 2] == 1).all()
    assert not out[:, 3].any()
    sinks = np.float32([0, 0, -np.inf, 3])
    nothing = engine.put(np.full((1, 4, 1), -np.inf, np.float32)), engine.nan(8, 4, 1, 1, dtype=np.float32)
    out, rows = engine.get(cupy_sdpa.merge([nothing[1]], [nothing[0]], sinks=engine.put(sinks), return_stats=True))
    assert not out.any()
    np.testing.assert_array_equal(rows[0, :, 0], sinks)


@pytest.mark.parametrize("ends", [[40], [15, 40]], ids=["one", "two"])
def test_float64_parts_merge_exactly(ends):
    """Float64 parts with float64 statistics are merged, and differentiated, with the accuracy of float64."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (np.asfortranarray(rng.standard_normal((8, 2, n, 1))) for n in (5, 40, 40, 5))
    parts = []
    for part in map(slice, [0, *ends], ends):
        stats = np.full((5, 2, 1), np.nan, order="F")
        parts.append(attention(q, k[:, :, part], v[:, :, part], stats=stats))
    out, stats = cupy_sdpa.merge(*zip(*parts, strict=True), return_stats=True)
    assert stats.dtype == np.float64
    for got, wanted in zip((out, stats), cupy_sdpa.reference.attention(q, k, v), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-13, atol=1e-13)
    found = cupy_sdpa.attention_backward(dout, q, k, v, out, stats)
    for got, wanted in zip(found, cupy_sdpa.reference.attention_backward(dout, q, k, v), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-12)


def test_a_list_instead_of_an_array():
    """The message speaks of the merge, and not of attention."""
    x, stats = np.ones((8, 2, 3, 1), np.float32, order="F"), np.ones((3, 2, 1), np.float32, order="F")
    with pytest.raises(TypeError, match=r"^stats\[0\] is a list; this call takes numpy and CuPy arrays"):
        cupy_sdpa.merge([x], [stats.tolist()])
    with pytest.raises(TypeError, match=r"^dstats is a list; this call takes numpy and CuPy arrays"):
        cupy_sdpa.merge_backward([x], [stats], x, stats.tolist())
