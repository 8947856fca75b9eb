"""Kernels compared with their numpy functions on random views, offsets out of range, and arrays of equal integers."""

from typing import Any, NamedTuple

import numpy as np
import pytest
from engines import numbers, on_cudnn

from cupy_sdpa.core.kernels import paged, ragged
from cupy_sdpa.core.problem.tensor_spec import numpy_dtype
from cupy_sdpa.core.runtime import memory

pytestmark = on_cudnn


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


@pytest.mark.parametrize("number", numbers(30, quick=5))
def test_written_offsets_never_decrease(number, engine):
    """What the engine gets for random offsets are offsets that rise inside of the array, and their differences."""
    rng = np.random.default_rng(number)
    batch, total, most = int(rng.choice([1, 2, 7, 255, 256, 700])), 40, 9
    given = rng.integers(-20, 60, batch + 1).astype(np.int32)
    side = ragged.Lengths(engine.put(given), most, total, packed=True, made=engine.xp.empty(batch, np.int32))
    offsets = ragged.Offsets(engine.xp.empty(batch + 1, np.int64), False, 16)
    ragged.prepare_sequences(side, side, [offsets], [])
    wanted = np.maximum.accumulate(given.clip(0, total))
    np.testing.assert_array_equal(engine.get(offsets.made), wanted * 16)
    np.testing.assert_array_equal(engine.get(side.made), np.diff(wanted).clip(0, most))


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


class Part(NamedTuple):
    """A part of an array; an engine gets it as a view, and the rest of the array must not change."""

    whole: np.ndarray
    key: Any = ...


def calls(seed):
    """Calls of kernels by name: the function, and its arguments."""
    rng, every_second = np.random.default_rng(seed), np.s_[:, :, ::2]
    batch, pages, page = (int(n) for n in rng.integers(1, 7, 3))

    def x(*shape, key=..., dtype="float32", values=range(-9, 10)):
        return Part(np.asfortranarray(rng.choice(np.array(values, float), shape).astype(numpy_dtype(dtype))), key)

    def lengths(most, count=batch):
        return x(count, dtype="int32", values=(0, most, *rng.integers(0, most + 1, 3)))

    used = lengths(pages * page)
    table = x(pages, batch, dtype="int32", values=range(1, 100))
    table.whole[np.arange(pages)[:, None] * page >= used.whole] = -1  # entries after the length are not read
    scores = {"whole": x(70, 33, 2, 3, key=np.s_[:69, :31], dtype="bfloat16"), "one key": x(1, 33, 2, 3, dtype="float16")}
    low = (-np.inf, -3000.0, -2e30, -1.0, 0.0, 1.5, np.inf, np.nan)
    return {
        "longer": (memory.resize, x(8, 3, 10, 2), x(8, 3, 7, 2), (2,)),
        "shorter": (memory.resize, x(8, 3, 7, 2), x(8, 3, 10, 2), (2,)),
        "longer along the first axis": (memory.resize, x(11, 3, 2), x(5, 3, 2), (0,)),
        "longer along two axes": (memory.resize, x(11, 5, 2), x(5, 3, 2), (0, 1)),
        "longer than nothing": (memory.resize, x(8, 3, 10, 2), x(8, 3, 0, 2), (2,)),
        "longer than every second": (memory.resize, x(8, 3, 10, 2), x(8, 3, 14, 2, key=every_second), (2,)),
        "every second, longer": (memory.resize, x(8, 3, 20, 2, key=every_second), x(8, 3, 7, 2), (2,)),
        "longer than a part": (memory.resize, x(8, 3, 10, 2), x(8, 3, 9, 4, key=np.s_[:, :, 1:8, 1:3]), (2,)),
        "longer than uneven rows": (memory.resize, x(11, 3, 2), x(5, 4, 2, key=np.s_[:, :3]), (0,)),
        "longer, of other entries": (memory.resize, x(8, 3, 10, 2), x(8, 3, 7, 4, key=np.s_[..., ::2]), (2,)),
        "cleared": (memory.clear, x(3, 5, 2), 0.0),
        "cleared part": (memory.clear, x(3, 5, 2, key=np.s_[:, 1:3]), -np.inf),
        "no padding": (ragged.zero_padded, x(24, 3, 37, 4), x(24, 3, 37, 4), lengths(37, 4)),
        "no padding of a part": (ragged.zero_padded, x(24, 3, 36, 4), x(24, 3, 40, 4, key=np.s_[:, :, :36]), lengths(36, 4)),
        "no padding, unaligned": (ragged.zero_padded, x(16, 3, 7, 4), x(18, 3, 7, 4, key=np.s_[1:17]), lengths(7, 4)),
        "sums over keys": (ragged.sum_over_scores, scores["whole"], x(2, 31, 2, 3, key=np.s_[:1])),
        "sums over queries": (ragged.sum_over_scores, scores["whole"], x(70, 1, 2, 3, key=np.s_[:69], dtype="float16")),
        "sums": (ragged.sum_over_scores, scores["whole"], x(1, 1, 2, 3, dtype="bfloat16")),
        "sums of one key": (ragged.sum_over_scores, scores["one key"], x(1, 1, 2, 3)),
        "statistics of gradients": (ragged.backward_stats, x(7, 3, 2), x(7, 3, 2, values=low)),
        "log-sum-exp": (ragged.write_log_sum_exp, x(7, 3, 2), x(7, 3, 2, values=range(9)), x(7, 3, 2)),
        "finite bias": (ragged.replace_infinite, x(1, 5, 2, batch, values=low)),
        "diagonal": (ragged.diagonal, x(7, batch, dtype="int32"), int(rng.integers(0, 4)), lengths(9), lengths(5)),
        "one key of every sequence": (ragged.at_least_one, x(batch, dtype="int32"), used),
        "longer page table": (paged.padded_table, x(pages + 3, batch, dtype="int32"), table, used, page),
    }  # fmt: skip


@pytest.mark.parametrize("seed", numbers(3, quick=1))
@pytest.mark.parametrize("name", calls(0))
def test_kernels_and_their_numpy_functions_agree(name, seed, engine):
    """On random views, with nothing written around them."""
    function, *arguments = calls(seed)[name]
    found = []
    for put in (lambda array: array.copy("K"), engine.put):
        wholes = [put(x.whole) if isinstance(x, Part) else x for x in arguments]
        function(*(y[x.key] if isinstance(x, Part) else x for x, y in zip(arguments, wholes, strict=True)))
        found.append([engine.get(y) for x, y in zip(arguments, wholes, strict=True) if isinstance(x, Part)])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one.astype(np.float64), other.astype(np.float64), rtol=1e-6, atol=1e-6)


def test_sequences_without_keys_have_one_for_the_kernel(engine):
    """The kernel of FP8 does not end for a length of 0."""
    lengths = engine.put(np.int32([0, 3, 1]))
    copy = engine.put(np.zeros(3, np.int32))
    ragged.at_least_one(copy, lengths)
    assert engine.get(copy).tolist() == [1, 3, 1]
