"""Each CUDA kernel of :mod:`cupy_sdpa.kernels.ragged` compared with numpy on random inputs, and copies and fills of memory."""

import numpy as np
import pytest
from engines import numbers

from cupy_sdpa.kernels import paged, ragged
from cupy_sdpa.problem.tensor_spec import numpy_dtype
from cupy_sdpa.runtime import memory

pytestmark = pytest.mark.parametrize("engine", ["fake", pytest.param("cupy", marks=pytest.mark.gpu)], indirect=True)

SEEDS = numbers(3, quick=1)


def lengths_of(rng, batch, most):
    """Random lengths, including 0 and the maximum."""
    return rng.choice([0, most, *rng.integers(0, most + 1, 3)], batch)


def as_given(engine, starts, dtype, strided):
    """An array on the device; ``strided`` gives every second element of a longer one."""
    if not strided:
        return engine.put(starts.astype(dtype))
    longer = np.full(2 * len(starts), 1 << 20, dtype)
    longer[::2] = starts
    return engine.put(longer)[::2]


def result(engine, rng, shape, name, value, of_keys):
    """A result full of random numbers, as a slice of a longer array; and these numbers."""
    longer = (*shape[:-1], shape[-1] + 2)
    if name == "large":
        longer = (longer[0], longer[1] + 1, *longer[2:])  # a gap between heads and positions
    host = np.asfortranarray(rng.standard_normal(longer).astype("float16" if name != "per_row" else "float32"))
    whole = engine.put(host)
    part = tuple(slice(n) for n in shape)
    return whole, part, ragged.ClearedResult(whole[part], of_keys, name == "per_row", value), host.copy(order="F")


RESULTS = {
    "queries": ("large", 0.0, False),
    "dense": ("dense", 0.0, False),
    "keys": ("large", 0.0, True),
    "stats": ("per_row", -np.inf, False),
}


@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.parametrize("seed", SEEDS)
def test_rows_of_dense_arrays(seed, name, engine):
    """Positions in the padding, and those of an entry without queries or keys, are cleared; all others are unchanged."""
    rng = np.random.default_rng(seed)
    kind, value, of_keys = RESULTS[name]
    batch, heads, queries, keys = (int(n) for n in rng.integers(1, 6, 4) * (1, 1, 7, 9))
    lengths = [lengths_of(rng, batch, most).astype(np.int32) for most in (queries, keys)]
    positions = keys if of_keys else queries
    shape = (positions, heads, batch) if kind == "per_row" else (8, heads, positions, batch)
    whole, part, cleared, want = result(engine, rng, shape, kind, value, of_keys)
    sides = [ragged.Lengths(engine.put(x), most, 0) for x, most in zip(lengths, (queries, keys), strict=True)]
    ragged.prepare_sequences(*sides, (), [cleared])
    own, other = lengths[of_keys], lengths[1 - of_keys]
    inside = np.arange(positions)[:, None] < np.where(other > 0, own, 0)
    target = want[part]
    target[~np.broadcast_to(inside[:, None] if kind == "per_row" else inside[None, None], shape)] = value
    np.testing.assert_array_equal(whole.get(), want)


#: Packed sequences: the maximum of positions before the first, and by how much sequences may exceed the maximum length.
PLACES = {"from_zero": (0, 0), "first_offset": (4, 0), "beyond_maximum": (0, 3), "both": (4, 3)}


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("starts_as", [("int32", False), ("int64", True)], ids=["int32", "int64_strided"])
@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.parametrize("place", PLACES)
def test_rows_of_packed_arrays(place, name, starts_as, engine):
    """Lengths, offsets, and cleared positions: before the first sequence, after the last, beyond the maximum length, and of
    sequences without queries or keys; all others are unchanged.
    """
    rng = np.random.default_rng([100, *place.encode(), *name.encode()])
    before, excess = PLACES[place]
    kind, value, of_keys = RESULTS[name]
    batch, heads = int(rng.integers(1, 7)), int(rng.integers(1, 4))
    starts, most, totals = [], [], []
    for _ in range(2):
        lengths = lengths_of(rng, batch, int(rng.integers(1, 30)))
        starts.append(np.cumsum([rng.integers(0, before + 1), *lengths]))
        most.append(max(1, int(lengths.max() - rng.integers(0, excess + 1))))
        totals.append(int(starts[-1][-1]) + int(rng.integers(0, 4)))
    total = totals[of_keys] = max(1, totals[of_keys])
    shape = (heads, total) if kind == "per_row" else (8, heads, total)
    whole, part, cleared, want = result(engine, rng, shape, kind, value, of_keys)
    sides = [
        ragged.Lengths(as_given(engine, s, *starts_as), m, t, packed=True, made=engine.xp.empty(batch, np.int32))
        for s, m, t in zip(starts, most, totals, strict=True)
    ]
    offsets = [ragged.Offsets(engine.xp.empty(batch + 1, np.int64), *of) for of in ((False, 24), (True, 8), (True, 1))]
    ragged.prepare_sequences(*sides, offsets, [cleared])
    own = [np.minimum(np.diff(s), m) for s, m in zip(starts, most, strict=True)]
    for side, lengths in zip(sides, own, strict=True):
        np.testing.assert_array_equal(side.made.get(), lengths)
    for made, keys, factor in offsets:
        np.testing.assert_array_equal(made.get(), starts[keys] * factor)
    inside = np.zeros(total, bool)
    for b in range(batch):
        if own[1 - of_keys][b]:
            begin = starts[of_keys][b]
            inside[begin : begin + own[of_keys][b]] = True
    want[part][..., ~inside] = value
    np.testing.assert_array_equal(whole.get(), want)


def test_offsets_out_of_range_are_clipped(engine):
    """Offsets beyond the total or below 0 cause no write outside of the arrays."""
    starts = engine.put(np.array([-5, 4, 90, 60], np.int32))
    side = ragged.Lengths(starts, 8, 10, packed=True, made=engine.xp.empty(3, np.int32))
    out = engine.xp.ones((8, 2, 10), np.float16, order="F")
    offsets = ragged.Offsets(engine.xp.empty(4, np.int64), False, 16)
    ragged.prepare_sequences(side, side, [offsets], [ragged.ClearedResult(out, False, False, 0.0)])
    np.testing.assert_array_equal(side.made.get(), [4, 6, 0])
    np.testing.assert_array_equal(offsets.made.get(), np.array([0, 4, 10, 10]) * 16)


def test_several_results_in_one_launch(engine):
    """Results of queries and keys, each cleared by its own lengths."""
    rng = np.random.default_rng(3)
    lengths = [np.array([3, 0, 5], np.int32), np.array([2, 4, 0], np.int32)]
    sides = [ragged.Lengths(engine.put(x), most, 0) for x, most in zip(lengths, (5, 6), strict=True)]
    made = [
        result(engine, rng, shape, *RESULTS[name])
        for name, shape in (("queries", (8, 2, 5, 3)), ("stats", (5, 2, 3)), ("keys", (16, 1, 6, 3)), ("keys", (8, 1, 6, 3)))
    ]
    ragged.prepare_sequences(*sides, (), [cleared for _, _, cleared, _ in made])
    for whole, part, cleared, want in made:
        own = np.where(lengths[1 - cleared.of_keys] > 0, lengths[cleared.of_keys], 0)
        target = want[part]
        for b, length in enumerate(own):
            if cleared.per_row:
                target[length:, :, b] = cleared.fill_value
            else:
                target[:, :, length:, b] = cleared.fill_value
        np.testing.assert_array_equal(whole.get(), want)


LAYOUTS = {
    "dense": lambda engine, x: engine.put(x),
    "longer_batch_step": lambda engine, x: engine.put(np.concatenate([x, x], axis=2))[:, :, : x.shape[2]],
    "c_order": lambda engine, x: engine.put(np.ascontiguousarray(x)),
    "every_second_position": lambda engine, x: engine.put(np.asfortranarray(np.repeat(x, 2, axis=2)))[:, :, ::2],
}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cleaned_copies(layout, dtype, engine):
    """A dense copy with zeros in the padding, even where it is NaN; the original is unchanged."""
    rng = np.random.default_rng(7)
    x = np.asfortranarray(rng.standard_normal((24, 3, 37, 4)).astype(dtype))
    lengths = np.array([37, 0, 5, 36], np.int32)
    for b, length in enumerate(lengths):
        x[:, :, length:, b] = np.nan
    given = LAYOUTS[layout](engine, x)
    copy = engine.xp.empty(x.shape, x.dtype, order="F")
    ragged.zero_padded(copy, given, engine.put(lengths))
    np.testing.assert_array_equal(copy.get(), np.nan_to_num(x))
    np.testing.assert_array_equal(given.get(), x)


def test_fully_masked_rows(engine):
    """-inf becomes +inf in a copy; all other values are unchanged, including NaN and +inf."""
    x = np.array([[-np.inf, 1.5, np.nan], [np.inf, -3000.0, -0.0]], np.float32, order="F")
    given = engine.put(x)
    want = np.where(np.isneginf(x), np.inf, x)
    copy = engine.xp.empty(x.shape, x.dtype, order="F")
    ragged.backward_stats(copy, given)
    np.testing.assert_array_equal(copy.get(), want)
    np.testing.assert_array_equal(given.get(), x)


def test_log_sum_exp_of_its_parts(engine):
    """``m + log l``; a fully masked row has l = 0 and gets -inf."""
    rng = np.random.default_rng(2)
    top = np.asfortranarray(rng.standard_normal((7, 3, 2)).astype("f4"))
    total = np.asfortranarray(rng.uniform(1, 50, top.shape).astype("f4"))
    top[2, 1, 0], total[2, 1, 0] = -np.inf, 0
    stats = engine.xp.full(top.shape, np.nan, np.float32, order="F")
    ragged.log_sum_exp(engine.put(top), engine.put(total), stats)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(stats.get(), top + np.log(total), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float16", "float16"), ("float32", "bfloat16")], ids="-".join)
@pytest.mark.parametrize("seed", SEEDS)
def test_sums_over_scores(seed, dtypes, axes, engine):
    """Sums over keys, queries or both, of a part of an array, into a strided result; nothing else is written."""
    rng = np.random.default_rng(seed)
    keys, queries, heads, batch = (int(n) for n in rng.choice([1, 2, 3, 31, 33, 70], 4) % (71, 71, 4, 4) + (0, 0, 1, 1))
    source, target = (np.dtype(numpy_dtype(name)) for name in dtypes)
    whole = np.asfortranarray(rng.integers(-8, 9, (keys + 2, queries + 1, heads, batch)).astype(source))
    part = whole[:keys, :queries]
    shape = [1 if axis in axes else n for axis, n in enumerate(part.shape)]
    longer = engine.put(np.full((shape[0] + 1, *shape[1:]), 99, target, order="F"))
    ragged.sum_over_scores(engine.put(whole)[:keys, :queries], longer[: shape[0]])
    want = part.astype(np.float32).sum(axis=axes, keepdims=True).astype(target)
    np.testing.assert_array_equal(longer.get()[: shape[0]].astype(np.float32), want.astype(np.float32))
    assert (longer.get()[shape[0] :].astype(np.float32) == 99).all()


def test_the_diagonal_of_every_entry(engine):
    """``step i + keys - queries`` for query i of each batch entry."""
    queries, keys = np.array([5, 0, 7], np.int32), np.array([2, 9, 7], np.int32)
    for step in (1, 3):
        made = engine.xp.empty((7, 3), np.int32, order="F")
        ragged.diagonal(made, step, engine.put(queries), engine.put(keys))
        np.testing.assert_array_equal(made.get(), step * np.arange(7)[:, None] + keys - queries)


CLEARED = {
    "fortran": lambda x: x,
    "c_order": lambda x: x.T,
    "slice": lambda x: x[:, 1:3],
    "empty": lambda x: x[:0],
}


@pytest.mark.parametrize("value", [0.0, -np.inf], ids=["zero", "minus_infinity"])
@pytest.mark.parametrize("name", CLEARED)
def test_clearing(name, value, engine):
    """Every element of the array, and no other memory."""
    host = np.asfortranarray(np.ones((3, 5, 2), np.float32))
    whole = engine.put(host)
    memory.clear(CLEARED[name](whole), value)
    CLEARED[name](host)[...] = value
    np.testing.assert_array_equal(whole.get(), host)


def dense(engine, *shape):
    return engine.put(np.arange(np.prod(shape), dtype=np.int16).reshape(shape, order="F") + 1)


def target(engine, *shape):
    return engine.xp.full(shape, -1, np.int16, order="F")


RESIZED = {
    "longer": lambda cp: (target(cp, 8, 3, 10, 2), dense(cp, 8, 3, 7, 2), 2),
    "shorter": lambda cp: (target(cp, 8, 3, 7, 2), dense(cp, 8, 3, 10, 2), 2),
    "one_entry": lambda cp: (target(cp, 8, 3, 10, 1), dense(cp, 8, 3, 7, 1), 2),
    "first_axis": lambda cp: (target(cp, 11, 3, 2), dense(cp, 5, 3, 2), 0),
    "nothing": lambda cp: (target(cp, 8, 3, 10, 2), dense(cp, 8, 3, 0, 2), 2),
    "strided_source": lambda cp: (target(cp, 8, 3, 10, 2), dense(cp, 8, 3, 14, 2)[:, :, ::2], 2),
    "strided_target": lambda cp: (target(cp, 8, 3, 20, 2)[:, :, ::2], dense(cp, 8, 3, 7, 2), 2),
    "part_of_a_batch": lambda cp: (target(cp, 8, 3, 10, 2), dense(cp, 8, 3, 9, 4)[:, :, 1:8, 1:3], 2),
    "other_batches": lambda cp: (target(cp, 8, 3, 10, 2), dense(cp, 8, 3, 7, 4)[..., ::2], 2),
    "c_order": lambda cp: (target(cp, 8, 3, 10, 2), cp.xp.ascontiguousarray(dense(cp, 8, 3, 7, 2)), 2),
}


@pytest.mark.parametrize("name", RESIZED)
def test_resizing(name, engine):
    """The common part is copied, the rest of the target is 0, and the memory around it is unchanged."""
    to, of, axis = RESIZED[name](engine)
    around = to.base if to.base is not None else to
    before = around.get()
    memory.resize(to, of, (axis,))
    common = (slice(None),) * axis + (slice(min(to.shape[axis], of.shape[axis])),)
    want = np.zeros(to.shape, np.int16)
    want[common] = of.get()[common]
    np.testing.assert_array_equal(to.get(), want)
    if name == "strided_target":
        np.testing.assert_array_equal(around.get()[:, :, 1::2], before[:, :, 1::2])


def test_equal_integers(engine, monkeypatch):
    """A constant array has one address for one value; too many values, and captures, get new arrays."""
    monkeypatch.setattr(memory, "_constants", {})
    three = memory.equal_integers(3, 5)
    assert three.get().tolist() == [3] * 5
    assert memory.equal_integers(3, 700).data.ptr == three.data.ptr
    assert memory.is_constant(three)
    longer = memory.equal_integers(3, 5000)
    assert longer.get().tolist() == [3] * 5000
    assert three.get().tolist() == [3] * 5, "plans may store the address of the shorter one"
    for value in range(memory.MAX_EQUAL + 5):
        assert memory.equal_integers(value, 2).get().tolist() == [value] * 2
    assert not memory.is_constant(memory.equal_integers(value, 2))
    engine.xp.cuda.Device().synchronize()
    with engine.xp.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        inside = memory.equal_integers(10**6, 4)
        assert not memory.is_constant(inside)
        del inside  # a graph that is never launched does not own its memory
        stream.end_capture()


@pytest.mark.parametrize("seed", SEEDS)
def test_kernels_and_their_numpy_functions_agree(seed, engine):
    """Lengths without 0, a bias without -inf, and page tables of another width; table entries after the length are not read."""
    rng = np.random.default_rng(seed)
    batch, pages, page = (int(n) for n in rng.integers(1, 7, 3))
    lengths = lengths_of(rng, batch, pages * page).astype(np.int32)
    bias = rng.choice(np.array([-np.inf, -2e30, -1.0, 0.0, np.inf], np.float32), (1, 5, 2, batch))
    table = np.asfortranarray(rng.integers(1, 100, (pages, batch)).astype(np.int32))
    table[np.arange(pages)[:, None] * page >= lengths] = -1
    found = []
    for put in (np.array, engine.put):
        made, padded, finite = put(lengths * 0), put(np.full((pages + 3, batch), -7, np.int32, order="F")), put(bias)
        ragged.at_least_one(made, put(lengths))
        ragged.replace_infinite(finite)
        paged.padded_table(padded, put(table), put(lengths), page)
        found.append([engine.get(x) for x in (made, padded, finite)])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
    made, padded, finite = found[0]
    assert made.min() > 0
    assert np.isfinite(finite[bias < 0]).all()
    assert (padded[:, lengths > 0] > 0).all()
    assert not padded[:, lengths == 0].any()
