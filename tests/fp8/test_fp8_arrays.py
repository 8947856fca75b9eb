"""FP8 arrays: conversion with scales, rotation, delayed scaling, views and copies. Every bit equals numpy's."""

import copy
import pickle

import numpy as np
import pytest
from fp8_arrays import DTYPES, ENGINES, LARGEST, ON_A_GPU, elements, normal, rounded

from cupy_sdpa import fp8
from cupy_sdpa.check.formats import dtype_of


def equal(engine, found, wanted):
    """Check that the elements and the factors of an engine's array equal numpy's."""
    assert (found.dtype, found.rotated, found.shape) == (wanted.dtype, wanted.rotated, wanted.shape)
    assert (engine.get(found.scale), engine.get(found.descale)) == (wanted.scale, wanted.descale)
    np.testing.assert_array_equal(elements(engine, found).astype(np.float32), wanted.data.astype(np.float32))


@pytest.mark.in_turn(2)
@ON_A_GPU
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_float16_number_is_converted(dtype, engine):
    """Rounded to nearest even, saturated, NaN kept: all float16 numbers, at several scales."""
    x = np.arange(1 << 16, dtype=np.uint16).view(np.float16).reshape((128, 1, 512, 1), order="F")
    for factor in (1.0, 1.7, 2.0**-9):
        amax = LARGEST[dtype] / factor
        found, wanted = (fp8.DelayedScaling(y, amax=amax, dtype=dtype).quantize(y) for y in (engine.put(x), x.copy(order="F")))
        equal(engine, found, wanted)
        assert np.array_equal(np.isnan(elements(engine, found)), np.isnan(x)), "saturation gives no NaN"


@pytest.mark.in_turn(2)
@ON_A_GPU
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_fp8_number_is_dequantized(dtype, engine):
    """All 256 elements, infinities and NaN included, times a factor."""
    codes = np.arange(256, dtype=np.uint8).reshape((32, 2, 4, 1), order="F")
    on_cpu = fp8.Fp8Array(codes.view(dtype_of(dtype)), 0.37)
    for target in ("float16", "bfloat16", "float32"):
        found = engine.get(fp8.Fp8Array(engine.put(codes), 0.37, dtype=dtype).dequantize(target))
        assert found.dtype == dtype_of(target)
        assert found.flags.f_contiguous
        np.testing.assert_array_equal(found.astype(np.float32), on_cpu.dequantize(target).astype(np.float32))


#: Memory layouts of x, (D, H, S, B), put on an engine.
LAYOUTS = {
    "dense": lambda put, x: put(x),
    "C order (batch, seq, heads, head_dim)": lambda put, x: put(np.ascontiguousarray(x.T)).T,
    "a slice": lambda put, x: put(np.asfortranarray(np.repeat(np.repeat(x, 2, axis=1), 3, axis=2)))[:, ::2, ::3],
    "head_dim, seq, heads, batch": lambda put, x: put(np.asfortranarray(x.transpose(0, 2, 1, 3))).transpose(0, 2, 1, 3),
    "not aligned": lambda put, x: put(np.asfortranarray(np.concatenate([x, x[:1]])))[: len(x)],
    "packed": lambda put, x: put(x)[..., 0],
}


#: The head dims that are rotated, by dtype.
ROTATED = {"float16": (16, 40, 128), "bfloat16": (16,), "float32": (80,)}


@pytest.mark.slow
@pytest.mark.in_turn(6)
@ON_A_GPU
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("source", ["float16", "bfloat16", "float32"])
def test_quantize(source, layout, engine):
    """In every layout, rotated or not; the largest element is the largest number; values come back, the same ones too."""
    for seed, shape in enumerate([(16, 1, 1, 1), (80, 3, 50, 2), (40, 2, 7, 3), (128, 1, 20, 1)]):
        x = normal(shape, source, seed)
        given, same = LAYOUTS[layout](engine.put, x), LAYOUTS[layout](np.asarray, x)
        for rotated in (False, True) if len(x) in ROTATED[source] else (False,):
            found, wanted = fp8.quantize(given, rotate=rotated), fp8.quantize(same, rotate=rotated)
            equal(engine, found, wanted)
            assert np.abs(elements(engine, found).astype(np.float32)).max() == 448
            back = engine.get(found.dequantize())
            np.testing.assert_array_equal(back, wanted.dequantize())
            assert np.linalg.norm(back - same.astype(np.float32)) < 0.04 * np.linalg.norm(same.astype(np.float32))


@pytest.mark.parametrize("d", [1, 16, 24, 128, 192])
def test_rotations_are_orthogonal(d):
    """Scores do not change, the matrix is its own inverse, and a single channel is spread over its power of two."""
    eye = np.asfortranarray(np.eye(d, dtype=np.float32).reshape(d, 1, d, 1))
    made = fp8.quantize(eye, rotate=True)
    matrix = made.data[:, 0, :, 0].astype(np.float64) * made.descale.astype(np.float64)
    np.testing.assert_allclose(matrix @ matrix, np.eye(d), atol=1e-6)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(d), atol=1e-6)
    np.testing.assert_allclose(np.abs(matrix).max(axis=0), (d & -d) ** -0.5, rtol=1e-6)
    np.testing.assert_allclose(made.dequantize(), eye, atol=1e-6)


@ENGINES
@pytest.mark.parametrize("value", [0.0, 1e-38, np.inf, np.nan])
def test_scales_of_special_numbers(value, engine):
    """Arrays of 0 and of tiny numbers have the scale 1; NaN and infinity are not hidden."""
    found = elements(engine, fp8.quantize(engine.put(np.full((16, 1, 2, 1), value, np.float32, order="F")))).astype(np.float32)
    assert np.isnan(found).all() if not value < 1 else not found.any()


# Delayed scaling


@ENGINES
@pytest.mark.slow
@pytest.mark.parametrize(("history", "rotated"), [(1, False), (2, True), (5, False)])
def test_delayed_scaling(history, rotated, engine):
    """The scale follows from the largest of the last arrays; an array of many blocks counts as a whole."""
    rng, largest = np.random.default_rng(history), []
    scaling = fp8.DelayedScaling(engine.put(np.zeros(1)), history, rotate=rotated)
    for turn in range(12):
        x = 10.0 ** rng.uniform(-3, 3) * rng.standard_normal((16, 2, 160 if turn % 2 else 1600, 1))
        x = np.asfortranarray(x.astype(np.float32))
        made, current = scaling.quantize(engine.put(x)), fp8.quantize(x, rotate=rotated)
        scale = 448 / max(largest[-history:]) if largest else 1.0
        np.testing.assert_allclose(engine.get(made.scale), scale, rtol=1e-6)
        wanted = fp8.DelayedScaling(x, rotate=rotated, amax=448 / float(engine.get(made.scale)[0])).quantize(x)
        different = elements(engine, made).astype(np.float32) != wanted.data.astype(np.float32)
        assert different.mean() < 1e-3, "the scale may differ in its last bit"
        if not rotated:
            np.testing.assert_array_equal(elements(engine, made), rounded(x * engine.get(made.scale), "float8_e4m3fn"))
        largest.append(448 * float(current.descale[0]))


@ENGINES
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rotated", [False, True])
def test_delayed_scaling_ignores_what_is_not_finite(value, rotated, engine):
    """An array with NaN or an infinity, or such an output, changes neither the history nor the next scales."""
    x = np.ones((16, 1, 2, 1), np.float32, order="F")
    bad, found = x.copy(order="F"), []
    bad[3, 0, 1, 0] = value
    scaling = fp8.DelayedScaling(engine.put(x), 2, rotate=rotated, amax=7.0)
    for y in (bad, 3 * x, bad, x):
        scaling.quantize(engine.put(y))
        scaling.update(engine.put(np.full(1, value, np.float32)))
        found.append(float(engine.get(scaling.scale)[0]))
    largest = 4.0 if rotated else 1.0
    np.testing.assert_allclose(found, [64, 448 / max(7, 3 * largest), 448 / max(7, 3 * largest), 448 / (3 * largest)])


@ON_A_GPU
def test_a_captured_conversion_advances_its_history(engine):
    """The history is in the GPU's memory: replays of a CUDA graph use the scale of the replay before, also for an output."""
    x = engine.put(np.ones((16, 1, 2, 1), np.float16, order="F"))
    scaling = fp8.DelayedScaling(x, 1)
    scaling.quantize(x)  # compiles
    of_output, amax = fp8.DelayedScaling(x, 1), engine.put(np.ones(1, np.float32))
    of_output.update(amax)
    engine.xp.cuda.Device().synchronize()
    with engine.xp.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        made = scaling.quantize(x)
        of_output.update(amax)
        graph = stream.end_capture()
        for factor in (2.0, 8.0, 1.0):
            x[...], amax[...] = factor, factor
            graph.launch(stream)
        assert float(made.scale.get()[0]) == 448 / 8
        assert float(of_output.scale.get()[0]) == 448


# Views, factors and copies


@ENGINES
def test_views_of_rotated_arrays(engine):
    """They have the values of the transposed and indexed array; a part of head_dim raises, in any order of axes."""
    made = fp8.quantize(engine.put(normal((32, 3, 5, 2))), rotate=True)
    square = fp8.quantize(engine.put(normal((16, 16, 5, 2))), rotate=True)
    assert made.T.axis == 3
    for array, view in (
        (made, lambda x: x.T), (made, lambda x: x.transpose(1, 0, 3, 2)[1:]), (made, lambda x: x[:, 1:, ::2]),
        (made, lambda x: x[..., 0]), (square, lambda x: x[:, 0]),
    ):  # fmt: skip
        np.testing.assert_allclose(engine.get(view(array).dequantize()), view(engine.get(array.dequantize())), atol=1e-5)
    for array, index in (
        (made.T, np.s_[..., :16]), (made.T, np.s_[0]), (made, np.s_[0]), (made, np.s_[::-1]), (square, np.s_[0]),
        (square.T, np.s_[:, :, None, :, 0]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="selects a part of head_dim, which was rotated: dequantize first"):
            array[index]


VIEWS = {
    "a new axis": lambda x: x[..., 0][..., None],
    "a new first axis": lambda x: x[None, :, :, :, 0],
    "in reverse order": lambda x: x[:, :, ::-1],
    "one head": lambda x: x[:, 1:2, :, :1].transpose(1, 0, 2, 3),
}


@ENGINES
@pytest.mark.parametrize("name", VIEWS)
def test_views_are_dequantized(name, engine):
    """Also those with an axis whose stride says nothing about the order in memory."""
    x = fp8.quantize(engine.put(normal((32, 3, 5, 2))))
    np.testing.assert_array_equal(engine.get(VIEWS[name](x).dequantize()), engine.get(VIEWS[name](x.dequantize())))


@ON_A_GPU
def test_a_view_at_any_address_is_dequantized(engine):
    """The kernel reads units of 8 bytes; elements may begin elsewhere."""
    codes = np.arange(40, dtype=np.uint8)
    buffer = engine.put(codes)
    for offset in (0, 1, 4, 8):
        data = buffer[offset : offset + 32].reshape((16, 1, 2, 1), order="F")
        wanted = codes[offset : offset + 32].view(dtype_of("float8_e4m3fn")).astype(np.float32)
        np.testing.assert_array_equal(fp8.Fp8Array(data, 1.0).dequantize().get().ravel(order="F"), wanted)


COPIES = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x))}


@ENGINES
@pytest.mark.parametrize("way", COPIES)
def test_copies_of_fp8_arrays(way, engine):
    """They have the elements, the factors and the memory order, in memory of their own."""
    arrays = fp8.quantize_qkv(*[engine.put(normal((16, 1, 5, 2), seed=i)) for i in range(3)], rotate=True)
    for x in (*arrays, arrays[0].transpose(3, 2, 1, 0), fp8.Fp8Array(arrays[0].data, 0.5)):
        other = COPIES[way](x)
        wanted = engine.get(x.dequantize()).copy()
        assert (other.dtype, other.rotated, other.axis, other.shape) == (x.dtype, x.rotated, x.axis, x.shape)
        assert other.data.flags.f_contiguous == x.data.flags.f_contiguous
        x.data[...] = 0
        np.testing.assert_array_equal(engine.get(other.scale), engine.get(x.scale))
        np.testing.assert_array_equal(engine.get(other.dequantize()), wanted)


@ENGINES
@pytest.mark.parametrize("way", COPIES)
def test_copies_of_delayed_scaling(way, engine):
    """They have the history, and do not share it."""
    scaling = fp8.DelayedScaling(engine.put(np.zeros(1, np.float32)), 2, amax=7.0)
    other = COPIES[way](scaling)
    for amax, wanted in ((14.0, 32.0), (3.5, 32.0), (3.5, 128.0)):
        other.update(engine.put(np.full(1, amax, np.float32)))
        assert float(engine.get(other.scale)[0]) == wanted
        assert float(engine.get(scaling.scale)[0]) == 64


def test_lengths_of_numpy_arrays_are_checked_in_every_call():
    """Also if a call with other lengths is known; and names are checked before a call is looked up."""
    x = np.zeros((16, 2, 5, 2), np.float32, order="F")
    for _ in range(2):
        fp8.quantize(x, lengths=np.int32([3, 5]))
        with pytest.raises(ValueError, match=r"lengths has lengths from -1 to 9; they must be from 0 to 5"):
            fp8.quantize(x, lengths=np.int32([-1, 9]))
    with pytest.raises(ValueError, match="layout is 'None'"):
        fp8.quantize(x, layout="None")
    with pytest.raises(TypeError, match="dtype is"):
        fp8.quantize(x, ["float8_e4m3fn"])
