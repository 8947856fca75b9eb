"""What random problems with ``validate`` do not reach in kernels of lengths and of page tables, and arrays of equal integers."""

import numpy as np
import pytest
from engines import numbers

from cupy_sdpa.kernels import paged, ragged
from cupy_sdpa.runtime import memory

pytestmark = pytest.mark.parametrize("engine", ["fake", pytest.param("cupy", marks=pytest.mark.gpu)], indirect=True)

SEEDS = numbers(3, quick=1)


@pytest.mark.parametrize(("dtype", "step"), [("int32", 1), ("int64", 2)])
def test_offsets_out_of_range_are_clipped(dtype, step, engine):
    """Offsets beyond the total or below 0 cause no write outside of the arrays; they may have gaps."""
    starts = engine.put(np.repeat(np.array([-5, 4, 90, 60], dtype), step))[::step]
    side = ragged.Lengths(starts, 8, 10, packed=True, made=engine.xp.empty(3, np.int32))
    out = engine.xp.ones((8, 2, 10), np.float16, order="F")
    offsets = ragged.Offsets(engine.xp.empty(4, np.int64), False, 16)
    ragged.prepare_sequences(side, side, [offsets], [ragged.ClearedResult(out, False, False, 0.0)])
    np.testing.assert_array_equal(side.made.get(), [4, 6, 0])
    np.testing.assert_array_equal(offsets.made.get(), np.array([0, 4, 10, 10]) * 16)


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
    most = pages * page
    lengths = rng.choice([0, most, *rng.integers(0, most + 1, 3)], batch).astype(np.int32)
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
