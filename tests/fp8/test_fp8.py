"""FP8 arrays: conversion with scales, rotation, delayed scaling, and the forward pass; on numpy, and with CuPy arrays on host memory."""

import csv
from pathlib import Path

import numpy as np
import pytest
from fake_cupy import DEVICE
from fp8_arrays import ERROR, host, moved, relative, values_of
from planner import library_version, plan_problem

import cupy_sdpa
from benchmarks.__main__ import main
from benchmarks.fp8 import errors, plot
from cupy_sdpa import fp8
from cupy_sdpa._cudnn.library import library
from cupy_sdpa.calls.call import Call
from cupy_sdpa.check.verify.tolerance import FP8_SUM
from cupy_sdpa.fp8 import current, kernels
from cupy_sdpa.fp8.array import rotate, rotation_of
from cupy_sdpa.parallel import Loopback, context_parallel, run_threads
from cupy_sdpa.plans.plan import PlanInfo
from cupy_sdpa.problem.split import MAX_FP8_KEYS
from cupy_sdpa.problem.tensor_spec import FP8_LARGEST, numpy_dtype, rounded
from cupy_sdpa.support import gpus
from cupy_sdpa.support.why_not import why_not

DTYPES = tuple(FP8_LARGEST)


def normal(shape, dtype="float32", seed=0):
    """Normal numbers in Fortran order."""
    return np.asfortranarray(np.random.default_rng(seed).standard_normal(shape).astype(numpy_dtype(dtype)))


# Conversion


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [1.0, 1.7, 2.0**-9])
def test_every_float16_number_is_converted_as_on_the_cpu(dtype, factor, fake):
    """Rounded to nearest even, saturated, NaN kept: all float16 numbers, at a scale."""
    x = np.arange(1 << 16, dtype=np.uint16).view(np.float16).reshape((128, 1, 512, 1), order="F")
    amax = FP8_LARGEST[dtype] / factor
    on_gpu, on_cpu = (
        fp8.DelayedScaling(y, amax=amax, dtype=dtype).quantize(y) for y in (fake.asarray(x, order="F"), x.copy(order="F"))
    )
    assert on_gpu.scale.get() == on_cpu.scale
    gpu, cpu = host(on_gpu), host(on_cpu)
    assert np.array_equal(np.isnan(gpu), np.isnan(x)), "saturation gives no NaN"
    np.testing.assert_array_equal(gpu.astype(np.float32), cpu.astype(np.float32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", ["float16", "bfloat16", "float32"])
def test_every_fp8_number_is_dequantized_as_on_the_cpu(dtype, target, fake):
    """All 256 elements, infinities and NaN included, times a factor."""
    codes = np.arange(256, dtype=np.uint8).reshape((32, 2, 4, 1), order="F")
    on_cpu = fp8.Fp8Array(codes.view(numpy_dtype(dtype)), 0.37)
    on_gpu = fp8.Fp8Array(fake.asarray(codes, order="F"), 0.37, dtype=dtype)
    found = on_gpu.dequantize(target).get()
    assert found.dtype == numpy_dtype(target)
    assert found.flags.f_contiguous
    np.testing.assert_array_equal(found.astype(np.float32), on_cpu.dequantize(target).astype(np.float32))


LAYOUTS = {
    "dense": lambda x: x,
    "C order (batch, seq, heads, head_dim)": lambda x: np.ascontiguousarray(x.T).T,
    "a slice": lambda x: np.asfortranarray(np.repeat(np.repeat(x, 2, axis=1), 3, axis=2))[:, ::2, ::3],
    "head_dim, seq, heads, batch": lambda x: np.asfortranarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3),
    "not aligned": lambda x: np.asfortranarray(np.concatenate([x, x[:1]]))[: len(x)],
    "packed": lambda x: x[..., 0],
}


def on_device(fake, x, layout):
    """An array on the device in a layout."""
    made = LAYOUTS[layout](x)
    if layout == "not aligned":
        return fake.asarray(np.asfortranarray(np.concatenate([x, x[:1]])), order="F")[: len(x)], made
    if layout == "a slice":
        return fake.asarray(np.asfortranarray(np.repeat(np.repeat(x, 2, axis=1), 3, axis=2)), order="F")[:, ::2, ::3], made
    if layout == "packed":
        return fake.asarray(x, order="F")[..., 0], made
    if layout == "dense":
        return fake.asarray(x, order="F"), made
    if layout.startswith("C order"):
        return fake.asarray(np.ascontiguousarray(x.T)).T, made
    return fake.asarray(np.asfortranarray(x.transpose(0, 2, 1, 3)), order="F").transpose(0, 2, 1, 3), made


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("source", ["float16", "bfloat16", "float32"])
def test_quantize(source, layout, fake):
    """Elements, scale and descale are those of numpy, bit for bit, in every layout."""
    for seed, (d, heads, length, batch) in enumerate([(16, 1, 1, 1), (128, 3, 50, 2), (40, 2, 7, 3), (256, 1, 20, 1)]):
        x = normal((d, heads, length, batch), source, seed)
        given, same = on_device(fake, x, layout)
        found, wanted = fp8.quantize(given), fp8.quantize(same)
        assert (found.scale.get(), found.descale.get()) == (wanted.scale, wanted.descale)
        assert np.abs(host(found).astype(np.float32)).max() == 448
        np.testing.assert_array_equal(host(found), host(wanted))


def test_conversions_that_are_prepared(fake, monkeypatch):
    """Equal metadata needs no preparation; other addresses, strides, lengths, rotations and formats are not confused."""
    prepared, prepare, lengths = [], current.prepare, np.array([2, 5], np.int32)
    monkeypatch.setattr(current, "prepare", lambda *given: prepared.append(given) or prepare(*given))
    monkeypatch.setattr(current, "_prepared", {})
    variants = [
        (layout, rotated, dtype, given)
        for layout in ("dense", "a slice")
        for rotated in (False, True)
        for dtype in DTYPES
        for given in (None, lengths)
    ]
    for turn in range(3):
        for layout, rotated, dtype, given in variants:
            x, same = on_device(fake, normal((32, 2, 5, 2), "float16", 10 * turn), layout)
            options = {"dtype": dtype, "rotate": rotated}
            found = fp8.quantize(x, lengths=None if given is None else fake.asarray(given), **options)
            wanted = fp8.quantize(same, lengths=given, **options)
            assert (found.dtype, found.rotated) == (dtype, rotated)
            assert found.scale.get() == wanted.scale
            np.testing.assert_array_equal(host(found), host(wanted))
        assert len(prepared) == len(variants)


@pytest.mark.parametrize("d", [16, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("layout", ["dense", "a slice"])
def test_rotation(d, layout, fake):
    """Elements, scale and descale are those of numpy, bit for bit, and the inverse gives the values back, the same ones too."""
    x = normal((d, 3, 11, 2), "float32", d)
    given, same = on_device(fake, x, layout)
    found, wanted = fp8.quantize(given, rotate=True), fp8.quantize(same, rotate=True)
    assert found.rotated
    assert wanted.rotated
    assert (found.scale.get(), found.descale.get()) == (wanted.scale, wanted.descale)
    np.testing.assert_array_equal(host(found), host(wanted))
    back = found.dequantize().get()
    np.testing.assert_array_equal(back, wanted.dequantize())
    assert np.linalg.norm(back - x) < 0.04 * np.linalg.norm(x)


@pytest.mark.parametrize("d", [1, 16, 24, 128, 192])
def test_rotations_are_orthogonal(d):
    """Scores do not change, the matrix is its own inverse, and a single channel is spread over its part."""
    part = rotation_of(d)
    eye = np.eye(d, dtype=np.float32).reshape(d, 1, 1, d)
    matrix = rotate(eye, part).reshape(d, d)
    np.testing.assert_allclose(matrix @ matrix, np.eye(d), atol=1e-6)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(d), atol=1e-6)
    assert np.allclose(np.abs(matrix).max(axis=0), part**-0.5)


@pytest.mark.parametrize("rotated", [False, True])
def test_padding_is_not_read(rotated, fake):
    """NaN beyond the lengths changes nothing, and 0 is stored there."""
    lengths = np.array([5, 0, 9], np.int32)
    x = normal((32, 2, 9, 3), "float16")
    clean = x.copy(order="F")
    for b, length in enumerate(lengths):
        x[:, :, length:, b], clean[:, :, length:, b] = np.nan, 0
    wanted = fp8.quantize(clean, rotate=rotated)
    for found in (
        fp8.quantize(x, rotate=rotated, lengths=lengths),
        fp8.quantize(fake.asarray(x, order="F"), rotate=rotated, lengths=fake.asarray(lengths)),
        fp8.DelayedScaling(x, rotate=rotated, amax=FP8_LARGEST["float8_e4m3fn"] / wanted.scale[0]).quantize(x, lengths=lengths),
    ):
        elements = host(found).astype(np.float32)
        np.testing.assert_array_equal(elements, host(wanted).astype(np.float32))
        assert not elements[:, :, :, 1].any()
        assert not elements[:, :, 5:, 0].any()


@pytest.mark.parametrize("value", [0.0, 1e-38, np.inf, np.nan])
def test_scales_of_special_numbers(value, fake):
    """Arrays of 0 and of tiny numbers have the scale 1; NaN and infinity are not hidden."""
    x = np.full((16, 1, 2, 1), value, np.float32, order="F")
    for found in (fp8.quantize(x), fp8.quantize(fake.asarray(x, order="F"))):
        values = host(found).astype(np.float32)
        assert np.isnan(values).all() if not value < 1 else not values.any()


# Delayed scaling


@pytest.mark.parametrize("history", [1, 2, 5])
@pytest.mark.parametrize("rotated", [False, True])
def test_delayed_scaling(history, rotated, fake):
    """The scale is that of the largest of the last arrays, on both engines; an array of many blocks counts as a whole."""
    rng = np.random.default_rng(history)
    amaxes: list[float] = []
    scalings = [fp8.DelayedScaling(x, history, rotate=rotated) for x in (np.zeros(1), fake.zeros(1))]
    for turn in range(12):
        x = np.asfortranarray(
            (10.0 ** rng.uniform(-3, 3) * rng.standard_normal((64, 2, 40 if turn % 2 else 400, 1))).astype("f4")
        )
        scale = FP8_LARGEST["float8_e4m3fn"] / max(amaxes[-history:]) if amaxes else 1.0
        for scaling, y in zip(scalings, (x, fake.asarray(x, order="F")), strict=True):
            made = scaling.quantize(y)
            np.testing.assert_allclose(
                np.asarray(made.scale.get() if hasattr(made.scale, "get") else made.scale), scale, rtol=1e-6
            )
            wanted = rounded(rotate(x, 64 if rotated else 1) * get(made.scale), "float8_e4m3fn").astype(np.float32)
            np.testing.assert_array_equal(host(made).astype(np.float32), wanted)
        amaxes.append(float(np.abs(rotate(x, 64 if rotated else 1)).max()))


def test_delayed_scaling_of_an_output(fake):
    """``update`` adds the largest output to the history."""
    for like in (np, fake):
        scaling = fp8.DelayedScaling(like.zeros(1), 2)
        for amax, wanted in ((2.0, 224), (4.0, 112), (1.0, 112), (1.0, 448)):
            scaling.update(like.full(1, amax, np.float32))
            assert float(scaling.scale[0]) == wanted


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rotated", [False, True])
def test_delayed_scaling_ignores_what_is_not_finite(value, rotated, fake):
    """An array with NaN or an infinity, or such an output, changes neither the history nor the next scales."""
    x = np.ones((16, 1, 2, 1), np.float32, order="F")
    bad = x.copy(order="F")
    bad[3, 0, 1, 0] = value
    for put in (np.asarray, fake.asarray):
        scaling = fp8.DelayedScaling(put(x), 2, rotate=rotated, amax=7.0)
        found = []
        for y in (bad, 3 * x, bad, x):
            scaling.quantize(put(y))
            scaling.update(put(np.full(1, value, np.float32)))
            found.append(float(get(scaling.scale)[0]))
        largest = 4.0 if rotated else 1.0
        np.testing.assert_allclose(found, [64, 448 / max(7, 3 * largest), 448 / max(7, 3 * largest), 448 / (3 * largest)])


def test_a_captured_conversion_advances_its_history(fake):
    """The history is in the GPU's memory: replays of a CUDA graph use the scale of the replay before."""
    scaling = fp8.DelayedScaling(fake.zeros(1), 1)
    x = fake.asarray(np.ones((16, 1, 2, 1), np.float16), order="F")
    scaling.quantize(x)  # compiles
    with fake.cuda.Stream() as stream:
        stream.begin_capture()
        made = scaling.quantize(x)
        graph = stream.end_capture()
        for factor in (2.0, 8.0, 1.0):
            x[...] = factor
            graph.launch(stream)
            stream.synchronize()
            last = float(made.scale.get()[0])
        assert last == 448 / 8
    DEVICE.wait_for_all()


# Attention


def get(x):
    """An array on the host."""
    return x.get() if hasattr(x, "get") else x


def inputs(d=32, dv=None, hq=4, hkv=2, sq=20, skv=30, b=2, dtype="float8_e4m3fn", rotated=False, seed=0):
    """FP8 arrays and their values in float64."""
    shapes = (d, hq, sq, b), (d, hkv, skv, b), (dv or d, hkv, skv, b)
    made = [fp8.quantize(normal(shape, "float32", seed + i), dtype, rotate=rotated and i < 2) for i, shape in enumerate(shapes)]
    return made, [values_of(x) for x in made]


CASES = {
    "plain": {}, "causal": {"causal": True}, "bottom right": {"causal": "bottom_right"}, "window": {"window": (5, 2)},
    "scale": {"scale": 0.5}, "softcap": {"softcap": 3.0}, "ALiBi": {"alibi_slopes": np.array([0.1, 0.2, 0.3, 0.4], np.float32)},
    "lengths": {"seq_lens_q": np.array([20, 3], np.int32), "seq_lens_kv": np.array([7, 30], np.int32)},
    "lengths, causal": {
        "seq_lens_q": np.array([20, 0], np.int32), "seq_lens_kv": np.array([30, 9], np.int32), "causal": True,
    },
}  # fmt: skip
SIZES = [(32, 32, 20, 30), (16, 48, 20, 30), (128, 64, 20, 30), (16, 16, 20, 30)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_error_on_the_cpu_is_that_of_fp8(case, dtype):
    """Against attention of the dequantized values in float64, the reference: output, log-sum-exp and largest output."""
    options = CASES[case]
    for d, dv, *_ in SIZES:
        (q, k, v), values = inputs(d, dv, dtype=dtype)
        out, stats, amax = fp8.attention(q, k, v, return_stats=True, return_amax=True, **options)
        truth, true_stats = cupy_sdpa.attention(*values, return_stats=True, **options)
        assert out.dtype == dtype
        assert out.descale is v.descale
        assert relative(out.dequantize(), truth) < ERROR[dtype]
        np.testing.assert_allclose(stats, true_stats, atol=1e-4)
        np.testing.assert_allclose(amax, np.abs(truth).max(), rtol=ERROR[dtype])
        wide = fp8.attention(q, k, v, out_dtype="bfloat16", **options)
        assert wide.dtype == numpy_dtype("bfloat16")
        assert relative(wide, truth) < relative(out.dequantize(), truth), "the output is not rounded to FP8"


def test_the_error_on_the_cpu_does_not_depend_on_the_number_of_keys():
    """P is rounded before the division by its sum, so that small weights keep their bits."""
    errors = []
    for skv in (64, 512, 4096):
        (q, k, v), values = inputs(16, hq=1, hkv=1, sq=8, skv=skv, b=1)
        errors.append(relative(fp8.attention(q, k, v, out_dtype="bfloat16"), cupy_sdpa.attention(*values)))
    assert max(errors) < 2 * min(errors)


@pytest.mark.parametrize("case", [name for name in CASES if name not in ("softcap", "ALiBi")])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("repeats", [1, 5])
def test_the_gpu_is_as_accurate_as_the_cpu(case, dtype, repeats, fake):
    """The same graph on both engines, repeated until it is replayed, with inputs changed in place and factors of other arrays."""
    options = CASES[case]
    on_device = {name: fake.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    for d, dv, sq, skv in SIZES:
        arrays, values = inputs(d, dv, sq=sq, skv=skv, dtype=dtype)
        gpu = [moved(fake, x) for x in arrays]
        for turn in range(repeats):
            if turn:
                arrays, values = inputs(d, dv, sq=sq, skv=skv, dtype=dtype, seed=10 * turn)
                for x, y in zip(gpu, arrays, strict=True):
                    x.data[...] = fake.asarray(y.data.view(np.uint8), order="F")
                    x.descale[...], x.scale[...] = fake.asarray(y.descale), fake.asarray(y.scale)
            out, stats, amax = fp8.attention(*gpu, return_stats=True, return_amax=True, **on_device)
            on_cpu = fp8.attention(*arrays, return_stats=True, return_amax=True, **options)
            truth = cupy_sdpa.attention(*values, **options)
            assert relative(out.dequantize().get(), truth) < 1.5 * relative(on_cpu[0].dequantize(), truth)
            norms = [np.linalg.norm(np.nan_to_num(x), axis=0).max() for x in values[:2]]
            scale = options.get("scale", d**-0.5)
            np.testing.assert_allclose(stats.get(), on_cpu[1], atol=FP8_SUM * scale * np.prod(norms))
            np.testing.assert_allclose(amax.get(), on_cpu[2], rtol=ERROR[dtype])


@pytest.mark.sweep
def test_the_fake_gpu_adds_as_an_h200(fake):
    """With a mean in v the error of truncated sums grows with the number of keys: 0.02 in float32, 0.04 on an H200."""
    path = Path(__file__).parents[2] / "benchmarks/results/h200_cudnn919_fp8_errors.csv"
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    (measured,) = (
        float(row["error"]) for row in rows if (row["inputs"], row["method"], row["keys"]) == ("mean", "FP8", "8192")
    )
    arrays = errors.mean(8192)
    given = errors.Arrays(*(fake.asarray(x, order="F") for x in arrays))
    assert relative(errors.in_fp8(given).get(), errors.exact(arrays)) == pytest.approx(measured, rel=0.05)


def axes_of(letters):
    """The order of the axes of (D, H, S, B) in a layout."""
    return tuple("dhsb".index(letter) for letter in letters)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("letters", ["bshd", "bhsd", "sbhd"])
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("engine", ["numpy", "fake", pytest.param("cupy", marks=pytest.mark.gpu)])
def test_layouts(letters, rotated, engine, request):
    """Conversion, attention, statistics, reports and gradients take the axes of the caller."""
    put = np.asarray if engine == "numpy" else request.getfixturevalue(engine).asarray
    axes = axes_of(letters)
    arrays = [normal((32, h, s, 3), "float16", s) for h, s in ((4, 20), (2, 30), (2, 30), (4, 20))]
    given = [put(np.ascontiguousarray(x.transpose(axes))) for x in arrays]
    lengths = put(np.array([5, 20, 0], np.int32))
    options = {"causal": True, "seq_lens_q": lengths}
    wanted, log_sums = fp8.attention(
        *fp8.quantize_qkv(*arrays[:3], rotate=rotated),
        return_stats=True,
        causal=True,
        seq_lens_q=np.array([5, 20, 0], np.int32),
    )
    truth = wanted.dequantize()
    converted = fp8.quantize_qkv(*given[:3], rotate=rotated, layout=letters, seq_lens_q=lengths)
    separate = [fp8.quantize(x, rotate=rotated and n < 2, layout=letters) for n, x in enumerate(given[:3])]
    delayed = fp8.DelayedScaling(given[0], 1, rotate=rotated, amax=8).quantize(given[0], layout=letters)
    assert separate[0].shape == delayed.shape == given[0].shape
    assert cupy_sdpa.explain(*converted, layout=letters, **options)
    for q in (separate[0], delayed):
        assert relative(get(q.dequantize()), arrays[0].transpose(axes).astype(float)) < 0.04
    for _ in range(4):
        for x in (converted, separate, [delayed, *converted[1:]]):
            out, stats = cupy_sdpa.attention(*x, layout=letters, return_stats=True, **options)
            assert out.shape == given[0].shape
            assert relative(get(out.dequantize()).transpose(np.argsort(axes)), truth) < 0.1
            np.testing.assert_allclose(get(stats).T, log_sums, atol=0.15)  # one has another scale
        mixed = cupy_sdpa.attention(given[0], *converted[1:], layout=letters, **options)
        assert relative(get(mixed).transpose(np.argsort(axes)).astype(float), truth) < 0.1
        out, pullback = cupy_sdpa.attention_vjp(*given[:3], layout=letters, compute_dtype="float8_e4m3fn", **options)
        own, own_pullback = cupy_sdpa.attention_vjp(
            *arrays[:3], compute_dtype="float8_e4m3fn", causal=True, seq_lens_q=np.array([5, 20, 0], np.int32)
        )
        for x, y in zip((out, *pullback(given[3])), (own, *own_pullback(arrays[3])), strict=True):
            assert relative(get(x).transpose(np.argsort(axes)).astype(float), y.astype(float)) < 0.1


def test_layout_of_packed_sequences():
    """Three axes."""
    x = normal((16, 2, 30))
    starts = np.array([0, 10, 30], np.int32)
    options = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": 20, "max_seqlen_kv": 20}
    wanted = fp8.attention(*fp8.quantize_qkv(x, x, x, rotate=True), **options)
    y = np.ascontiguousarray(x.T.transpose(0, 1, 2))
    found = fp8.attention(*fp8.quantize_qkv(y, y, y, rotate=True, layout="thd"), layout="thd", **options)
    np.testing.assert_array_equal(found.dequantize().T, wanted.dequantize())


def test_views_of_rotated_arrays():
    """Transposed and indexed arrays have the values of the transposed and indexed array."""
    x = normal((32, 3, 5, 2))
    made = fp8.quantize(x, rotate=True)
    values = made.dequantize()
    assert made.T.axis == 3
    np.testing.assert_allclose(made.T.dequantize(), values.T, atol=1e-5)
    np.testing.assert_allclose(made.transpose(1, 0, 3, 2)[1:].dequantize(), values.transpose(1, 0, 3, 2)[1:], atol=1e-5)
    np.testing.assert_allclose(made[:, 1:, ::2].dequantize(), values[:, 1:, ::2], atol=1e-5)
    np.testing.assert_allclose(made[..., 0].dequantize(), values[..., 0], atol=1e-5)
    square = fp8.quantize(normal((16, 16, 5, 2)), rotate=True)
    np.testing.assert_allclose(square[:, 0].dequantize(), square.dequantize()[:, 0], atol=1e-5)
    for bad in (
        lambda: made.T[..., :16],
        lambda: made.T[0],
        lambda: made[0],
        lambda: made[::-1],
        lambda: square[0],
        lambda: square.T[:, :, None, :, 0],
    ):
        with pytest.raises(ValueError, match="dequantize first"):
            bad()


def test_a_view_at_any_address_is_dequantized(fake, monkeypatch):
    """The kernel reads units of 8 bytes, so elements at other addresses are copied."""
    codes = np.arange(40, dtype=np.uint8)
    buffer, addresses, run = fake.asarray(codes), [], kernels.dequantize
    monkeypatch.setattr(kernels, "dequantize", lambda *given: addresses.append(given[0].data.ptr) or run(*given))
    for offset in (0, 1, 4, 8):
        data = buffer[offset : offset + 32].reshape((16, 1, 2, 1), order="F")
        wanted = codes[offset : offset + 32].view(numpy_dtype("float8_e4m3fn")).astype(np.float32)
        np.testing.assert_array_equal(fp8.Fp8Array(data, 1.0).dequantize().get().ravel(order="F"), wanted)
    assert not any(address % 8 for address in addresses)


VIEWS = {
    "a new axis": lambda x: x[..., 0][..., None],
    "a new first axis": lambda x: x[None, :, :, :, 0],
    "in reverse order": lambda x: x[:, :, ::-1],
    "one head": lambda x: x[:, 1:2, :, :1].transpose(1, 0, 2, 3),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_are_dequantized(name, fake):
    """Also those with an axis whose stride says nothing about the order in memory."""
    x = fp8.quantize(fake.asarray(normal((32, 3, 5, 2)), order="F"))
    np.testing.assert_array_equal(VIEWS[name](x).dequantize().get(), VIEWS[name](x.dequantize().get()))


@pytest.mark.parametrize("given", ["descale", "scale"])
@pytest.mark.parametrize("engine", ["numpy", "fake", pytest.param("cupy", marks=pytest.mark.gpu)])
def test_factors_that_change(given, engine, request):
    """An array as a factor is kept: after a change in place, both factors, views and the output of a call are those of it."""
    put = np.array if engine == "numpy" else request.getfixturevalue(engine).array
    x = normal((16, 2, 8, 1))
    q, k, v = (fp8.quantize(put(x, order="F")) for _ in range(3))
    wanted = get(fp8.attention(q, k, v).dequantize())
    number = put(get(getattr(v, given)))
    changing = fp8.Fp8Array(v.data, **{given: number})
    view = changing[:, :, ::2]
    for factor in (4, 0.5, 0.25):
        number *= factor
        ratio = float(get(number / getattr(v, given))[0]) ** (1 if given == "descale" else -1)
        np.testing.assert_allclose(get(changing.scale * changing.descale), 1, rtol=1e-6)
        np.testing.assert_allclose(get(view.dequantize()), ratio * get(v.dequantize())[:, :, ::2], rtol=1e-6)
        for _ in range(4):
            found = get(fp8.attention(q, k, changing).dequantize())
            assert relative(found, ratio * wanted) < 0.01, "a factor may be rounded differently, and few elements, too"


@pytest.mark.parametrize("engine", ["numpy", "fake", pytest.param("cupy", marks=pytest.mark.gpu)])
def test_an_output_keeps_its_scale(engine, request):
    """An array as out_scale may change after the call: the values of earlier outputs are the same."""
    put = np.array if engine == "numpy" else request.getfixturevalue(engine).array
    x = fp8.quantize(put(normal((16, 2, 8, 1)), order="F"))
    scale, outputs = put([3.0], np.float32), []
    for number in (3.0, 24.0, 6.0):
        scale[...] = number
        outputs.append(fp8.attention(x, x, x, out_scale=scale))
    wanted = get(fp8.attention(x, x, x).dequantize())
    for out in outputs:
        assert relative(get(out.dequantize()), wanted) < 2 * ERROR["float8_e4m3fn"]


@pytest.mark.parametrize("source", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("engine", ["numpy", "fake", pytest.param("cupy", marks=pytest.mark.gpu)])
def test_queries_that_are_converted(source, engine, request):
    """FP8 keys and values with other queries: the output has their dtype, also in a preallocated array."""
    put = np.asarray if engine == "numpy" else lambda x: request.getfixturevalue(engine).asarray(x, order="F")
    arrays = [normal((32, h, s, 2), source, s) for h, s in ((4, 20), (2, 30), (2, 30))]
    truth, log_sums = cupy_sdpa.attention(*(x.astype(float) for x in arrays), return_stats=True, causal=True)
    q = put(arrays[0])
    k, v = (fp8.quantize(put(x), rotate=rotate) for x, rotate in zip(arrays[1:], (True, False), strict=True))
    for _ in range(4):
        out = put(np.zeros(q.shape, q.dtype, order="F"))
        found, stats = cupy_sdpa.attention(q, k, v, causal=True, return_stats=True)
        assert cupy_sdpa.attention(q, k, v, causal=True, out=out) is out
        assert found.dtype == out.dtype == q.dtype
        for x in (found, out):
            assert relative(get(x).astype(float), truth) < 1.3 * ERROR["float8_e4m3fn"]
        np.testing.assert_allclose(get(stats), log_sums, atol=0.2)
    assert cupy_sdpa.explain(q, k, v, causal=True)
    for bad, error, text in (
        (put(np.ones(q.shape, np.int16, order="F")), TypeError, f"out is int16; .*{source}"),
        (out[:, :, :1], ValueError, r"out has shape \(32, 4, 1, 2\); it must be \(32, 4, 20, 2\)"),
        ([1.0], TypeError, "out is a list; attention takes"),
    ):
        with pytest.raises(error, match=text):
            cupy_sdpa.attention(q, k, v, causal=True, out=bad)


@pytest.mark.parametrize("source", ["float16", "float32"])
def test_all_statistics_of_queries_that_are_converted(source):
    """return_stats="max_sumexp" returns four results, as for FP8 queries."""
    q, k = normal((16, 4, 5, 1), source), fp8.quantize(normal((16, 2, 7, 1)))
    found = cupy_sdpa.attention(q, k, k, return_stats="max_sumexp")
    wanted = fp8.attention(fp8.quantize(q), k, k, return_stats="max_sumexp")
    assert [x.shape for x in found] == [x.shape for x in wanted]
    for x, y in zip(found[1:], wanted[1:], strict=True):
        np.testing.assert_array_equal(x, y)


# Gradients


def gradients(arrays, dout, **options):
    """The output and the gradients."""
    out, pullback = cupy_sdpa.attention_vjp(*arrays, **options)
    return [out, *pullback(dout)], pullback


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("case", [name for name in CASES if name not in ("softcap", "ALiBi")])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", ["float16", "bfloat16"])
def test_gradients_of_a_forward_pass_in_fp8(case, dtype, source, fake):
    """Both engines, as near to float64 as FP8 permits; NaN in the padding of q, k and v is not read."""
    options = CASES[case]
    shapes = (32, 4, 20, 2), (32, 2, 30, 2), (16, 2, 30, 2), (16, 4, 20, 2)
    q, k, v, dout = (normal(shape, source, seed) for seed, shape in enumerate(shapes))
    wide = [x.astype(np.float64) for x in (q, k, v)]
    truth, _ = gradients(wide, dout.astype(np.float64), **options)
    for x, name in ((q, "seq_lens_q"), (k, "seq_lens_kv"), (v, "seq_lens_kv")):
        for b, length in enumerate(options.get(name, ())):
            x[:, :, length:, b] = np.nan
    on_cpu, pullback = gradients((q, k, v), dout, compute_dtype=dtype, **options)
    assert pullback.nbytes == sum(x.size for x in (q, k, v)) + 2 * dout.size + 4 * 4 * 20 * 2 + sum(
        x.nbytes for x in options.values() if isinstance(x, np.ndarray)
    )
    moved_options = {name: fake.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    for _ in range(4):
        on_gpu, _ = gradients(
            [fake.asarray(x, order="F") for x in (q, k, v)], fake.asarray(dout, order="F"), compute_dtype=dtype, **moved_options
        )
    for found in (on_cpu, [x.get() for x in on_gpu]):
        for x, y in zip(found, truth, strict=True):
            assert x.dtype == numpy_dtype(source)
            assert relative(x, y) < 3 * ERROR[dtype]


def test_gradients_with_large_scores_are_finite():
    """With outliers the scores in FP8 differ by more than 1 from the others: the gradients still have the right size."""
    x = [normal((64, 2, 50, 1), "bfloat16", seed) for seed in range(4)]
    for array in x[:2]:
        array[::37] *= 20
    found, _ = gradients(x[:3], x[3], compute_dtype="float8_e4m3fn")
    truth, _ = gradients([y.astype(np.float64) for y in x[:3]], x[3].astype(np.float64))
    assert all(relative(a, b) < 1 for a, b in zip(found, truth, strict=True))


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd"])
def test_gradients_in_other_layouts(layout):
    """Those of the arrays in the order of this package."""
    x = normal((16, 2, 8, 3), "bfloat16")
    wanted, _ = gradients([x] * 3, x, compute_dtype="float8_e4m3fn", causal=True)
    y = np.ascontiguousarray(x.transpose(["dhsb".index(letter) for letter in layout]))
    found, _ = gradients([y] * 3, y, compute_dtype="float8_e4m3fn", causal=True, layout=layout)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a.transpose([layout.index(letter) for letter in "dhsb"]), b)


@pytest.mark.parametrize("compute_dtype", [None, "float8_e4m3fn"])
def test_gradients_of_outputs_that_are_refused(compute_dtype):
    """The message names dout and the dtype that it must have."""
    x = normal((16, 2, 8, 1))
    out, pullback = cupy_sdpa.attention_vjp(x, x, x, **({"compute_dtype": compute_dtype} if compute_dtype else {}))
    for dtype in ("float16", "float64"):
        with pytest.raises(TypeError, match=f"dout is {dtype}; it must be float32"):
            pullback(out.astype(dtype))
    with pytest.raises(TypeError, match="dout is a int; attention takes"):
        pullback(1)


# CUDA graphs


def with_out(x, y, ends):
    """Attention in FP8 into an array of x's dtype."""
    out = x * 0
    k, v = fp8.quantize(x, rotate=True), fp8.quantize(x)
    cupy_sdpa.attention(x, k, v, out=out)
    return out, k, v


def with_gradients(x, y, ends):
    """The gradient of q."""
    out, pullback = cupy_sdpa.attention_vjp(x, x, x, compute_dtype="float8_e4m3fn")
    dq, *others = pullback(x)
    return dq, out, pullback, others


#: The result, and what the caller must keep.
CAPTURED = {
    "attention": lambda x, y, ends: (fp8.attention(y, y, y), y),
    "a scale": lambda x, y, ends: ((out := fp8.attention(y, y, y, out_scale=y.scale)).dequantize(), out),
    "queries that are converted": lambda x, y, ends: (cupy_sdpa.attention(x, y, y), y),
    "out": with_out,
    "gradients": with_gradients,
    "a view": lambda x, y, ends: (y[:, :, 1::2].dequantize(), y),
    "a factor": lambda x, y, ends: ((z := fp8.Fp8Array(y.data, scale=y.scale)).dequantize(), z, y),
    "lengths": lambda x, y, ends: (fp8.quantize(x, lengths=ends), y),
}


@pytest.mark.parametrize("name", CAPTURED)
def test_captured_calls_use_no_memory_of_others(name, fake):
    """What a call allocates besides its results belongs to the CUDA graph, whose launches change nothing else."""
    x = fake.asarray(normal((32, 2, 20, 2), "bfloat16"), order="F")
    y, ends = fp8.quantize(x), fake.asarray(np.array([5, 0, 20, 0], np.int32))[::2]

    def values(result):
        return get(result.dequantize() if isinstance(result, fp8.Fp8Array) else result).astype(float)

    wanted = values(CAPTURED[name](x, y, ends)[0])
    DEVICE.wait_for_all()
    with fake.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        found, *kept = CAPTURED[name](x, y, ends)
        graph = stream.end_capture()
        fake.get_default_memory_pool().free_all_blocks()
        junk = [fake.full(size, np.nan, np.float32) for size in (1, 1 << 8, 1 << 10, 1 << 12) for _ in range(8)]
        for _ in range(2):
            graph.launch(stream)
            stream.synchronize()
            np.testing.assert_array_equal(values(found), wanted)
            assert all(np.isnan(part.get()).all() for part in junk)
    del kept, graph
    cupy_sdpa.get_plan_cache().clear()
    library().forget_plans()


# Refusals


def float8(shape=(16, 2, 4, 1)):
    """Elements without a factor."""
    return normal(shape).astype(numpy_dtype("float8_e4m3fn"))


def small(**options):
    """A small FP8 array."""
    return fp8.quantize(normal((16, 2, 4, 1)), **options)


ERRORS = {
    "elements without factors": (lambda: cupy_sdpa.attention(*[float8()] * 3), TypeError, r"q is float8_e4m3fn, .*fp8\.quantize"),
    "mixed": (lambda: fp8.attention(small(), normal((16, 2, 4, 1)), small()), TypeError, "k is a ndarray; .* all be FP8 arrays"),
    "dtypes": (lambda: fp8.attention(small(), small(), small(dtype="float8_e5m2")), TypeError, "v is float8_e5m2 and q is float8_e4m3fn"),
    "rotation": (lambda: fp8.attention(small(rotate=True), small(), small()), ValueError, "q.rotated is True and k.rotated is False"),
    "rotated v": (lambda: fp8.attention(*[small(rotate=True)] * 3), ValueError, "v.rotated is True; .*quantize v without rotate"),
    "out": (lambda: cupy_sdpa.attention(*[small()] * 3, out=float8()), TypeError, "out is passed, .*omit out"),
    "out_dtype": (lambda: fp8.attention(*[small()] * 3, out_dtype="float32"), TypeError, "out_dtype is 'float32'; .*'bfloat16'"),  # type: ignore[call-overload]
    "two outputs": (lambda: fp8.attention(*[small()] * 3, out_dtype="float16", out_scale=2.0), ValueError, "omit one of them"),
    "scale": (lambda: fp8.Fp8Array(float8(), 0.0), ValueError, "descale is 0.0; .* above 0"),
    "factor": (lambda: fp8.Fp8Array(float8(), np.ones(2, np.float32)), TypeError, r"float32 \(2,\); .* numpy array float32 \(1,\)"),
    "no factor": (lambda: fp8.Fp8Array(float8()), TypeError, "descale and scale are None: pass one"),
    "data": (lambda: fp8.Fp8Array(normal((16, 2, 4, 1)), 1.0), TypeError, "data is float32 .*use fp8.quantize"),
    "dtype": (lambda: fp8.quantize(normal((16, 2, 4, 1)), "float8_e3m4"), TypeError, "dtype is 'float8_e3m4'; .*float8_e5m2"),
    "source": (lambda: fp8.quantize(np.ones((16, 2, 4, 1), int)), TypeError, r"x is int64; .*convert with \.astype"),
    "axes": (lambda: fp8.quantize(normal((16, 4))), ValueError, r"x has shape \(16, 4\); .*\(head_dim, heads, seq, batch\)"),
    "lengths": (lambda: fp8.quantize(normal((16, 2, 4, 1)), lengths=np.ones(2, np.int32)), ValueError, r"lengths is int32 \(2,\)"),
    "lengths as a list": (lambda: fp8.quantize(normal((16, 2, 4, 1)), lengths=[4]), TypeError, r"lengths is \[4\]; .*int32 array \(B,\)"),  # type: ignore[arg-type]
    "lists": (lambda: fp8.quantize_qkv([1.0], [1.0], [1.0]), TypeError, "x is a list; quantize takes numpy and CuPy arrays"),  # type: ignore[arg-type]
    "history": (lambda: fp8.DelayedScaling(float8(), 0), ValueError, "history is 0; .*1 or more"),
    "amax": (lambda: fp8.DelayedScaling(float8(), amax=-1.0), ValueError, "amax is -1.0; .* above 0"),
    "a part of head_dim": (lambda: small(rotate=True)[:8], ValueError, "part of head_dim, which was rotated: dequantize first"),
    "converted without the factor": (lambda: np.asarray(small()), TypeError, r"not converted .* dequantize\(\)"),
    "prepared": (lambda: cupy_sdpa.prepare(*[small()] * 3), TypeError, r"q is a Fp8Array; .*dequantize\(\)"),  # type: ignore[call-overload]
    "another layout": (
        lambda: fp8.attention(small(rotate=True), small(rotate=True), small(), layout="bhsd"), ValueError, "axis 0, and .*'bhsd' head_dim is axis 3: .*layout",
    ),
    "no layout": (lambda: fp8.attention(small(rotate=True).T, small(rotate=True).T, small().T), ValueError, "axis 3, and .* head_dim is axis 0"),
    "unknown layout": (lambda: fp8.quantize(normal((16, 2, 4, 1)), layout="bdhs"), ValueError, "layout is 'bdhs'"),  # type: ignore[arg-type]
    "compute_dtype of FP8 arrays": (
        lambda: cupy_sdpa.attention_vjp(*[small()] * 3, compute_dtype="float8_e4m3fn"), TypeError, "q is Fp8Array; .*float16",
    ),
    "attention_vjp": (lambda: cupy_sdpa.attention_vjp(*[small()] * 3), cupy_sdpa.Unsupported, "gradients of FP8 arrays .*compute_dtype="),
    "attention_vjp of FP8 keys": (
        lambda: cupy_sdpa.attention_vjp(normal((16, 2, 4, 1)), small(), small()), cupy_sdpa.Unsupported, "gradients of FP8 arrays .*compute_dtype=",
    ),
    "attention_backward": (
        lambda: cupy_sdpa.attention_backward(*[small()] * 6), TypeError, r"Fp8Array; .*attention_vjp\(q, k, v, compute_dtype=",
    ),
    "explained with blocks": (
        lambda: cupy_sdpa.explain(*[small()] * 3, block_mask=cupy_sdpa.block_mask(lambda b, h, q, k: q >= k, 4, 4)), TypeError, "does not take block_mask",
    ),
    "explained derivative": (lambda: cupy_sdpa.explain(*[small()] * 3, jvp=True), TypeError, r"q is a Fp8Array .*dequantize\(\)"),
    "nnlib": (lambda: cupy_sdpa.nnlib.dot_product_attention(*[small()] * 3), TypeError, r"q is a Fp8Array; .*dequantize\(\)"),
    "shared prefix": (
        lambda: cupy_sdpa.shared_prefix_attention(
            small(), small(), small(), 4, page_table=np.zeros((1, 1), np.int32), seq_lens_kv=np.full(1, 4, np.int32)
        ),
        TypeError, "FP8 array; shared_prefix_attention",
    ),
    "several GPUs": (
        lambda: run_threads(Loopback(2).members, lambda member: context_parallel(member).attention(*[small()] * 3)),
        TypeError, r"q is a Fp8Array; .*dequantize\(\)",
    ),
    "plain v": (lambda: cupy_sdpa.attention(normal((16, 2, 4, 1)), small(), normal((16, 2, 4, 1))), TypeError, "v is a ndarray; both"),
    "plain q of integers": (lambda: cupy_sdpa.attention(np.ones((16, 2, 4, 1), int), small(), small()), TypeError, "q is int64 and k is an FP8"),
    "dequantized": (lambda: small().dequantize("float64"), TypeError, "dtype is float64; it must be one of float16"),
    "gradients": (
        lambda: cupy_sdpa.attention_backward(float8(), float8(), float8(), float8(), float8(), np.ones((4, 2, 1), np.float32)),
        cupy_sdpa.Unsupported, "compute_dtype",
    ),
    "explained": (lambda: cupy_sdpa.explain(*[small()] * 3, backward=True), cupy_sdpa.Unsupported, "compute_dtype='float8_e4m3fn'"),
    "compute_dtype": (lambda: cupy_sdpa.attention_vjp(*[normal((16, 2, 4, 1))] * 3, compute_dtype="int8"), ValueError, "compute_dtype is 'int8'"),  # type: ignore[call-overload]
    "float64": (
        lambda: cupy_sdpa.attention_vjp(*[np.ones((16, 2, 4, 1))] * 3, compute_dtype="float8_e5m2"), TypeError, "q is float64; .*dtype of the gradients",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_values_and_the_remedy(name):
    """Of every invalid argument."""
    call, error, text = ERRORS[name]
    with pytest.raises(error, match=text):
        call()


GPU_ERRORS = {
    "one query": (lambda x: fp8.attention(x[:, :, :1], x, x), cupy_sdpa.Unsupported, "pass the query twice"),
    "softcap": (lambda x: fp8.attention(x, x, x, softcap=2.0), cupy_sdpa.Unsupported, "softcap is not supported"),
    "another dtype": (lambda x: fp8.attention(x, x, x, out_dtype="bfloat16"), cupy_sdpa.Unsupported, "omit out_dtype"),
    "head dim": (lambda x: fp8.attention(x[:8], x[:8], x), cupy_sdpa.Unsupported, "multiples of 16"),
    "lengths as a list": (lambda x: fp8.quantize(x.dequantize(), lengths=[4]), TypeError, r"lengths is \[4\]; .*int32 array"),  # type: ignore[arg-type]
    "a slice of head_dim": (lambda x: fp8.attention(x.T, x.T, x.T), ValueError, "axis 0 must be contiguous"),
}


@pytest.mark.parametrize("name", GPU_ERRORS)
def test_what_hopper_cannot_run_is_refused(name, fake):
    """Before anything is launched."""
    call, error, text = GPU_ERRORS[name]
    x = fp8.quantize(fake.asarray(normal((16, 16, 16, 16)), order="F"))
    with pytest.raises(error, match=text):
        call(x)


def test_explain(fake):
    """On numpy and on the GPU: the problem, the graph and the plan."""
    x = small()
    report = cupy_sdpa.explain(x, x, x, causal=True)
    assert report
    assert "round(448 exp(S − m)) / l" in str(report)
    on_gpu = fp8.quantize(fake.asarray(normal((16, 2, 4, 1)), order="F"))
    report = cupy_sdpa.explain(on_gpu, on_gpu, on_gpu, causal=True)
    assert report
    assert report.engine == "cuDNN"
    assert not cupy_sdpa.explain(on_gpu, on_gpu, on_gpu, softcap=1.0)


def test_explain_with_a_mask_function_for_a_described_gpu():
    """The mask function is refused, as in the call; it is not evaluated to blocks, which FP8 arrays do not have."""
    x = fp8.quantize(normal((16, 1, 2048, 1)))
    report = cupy_sdpa.explain(x, x, x, mask_mod=lambda b, h, i, j: i // 128 == j // 128, gpu="h200", cudnn="9.19")
    assert "mask_mod is not supported with FP8 arrays" in report.reasons[0]


# Paged keys, plans, the benchmark


def in_pages(arrays, lengths, page, seed=0):
    """Keys and values of (D, Hkv, Skv, B) in pages that are in random order, and the page table; NaN in unused pages."""
    (q, *others), batch = arrays, arrays[0].shape[3]
    width = arrays[1].shape[2] // page
    table = np.asfortranarray(np.random.default_rng(seed).permutation(batch * width).reshape(width, batch).astype(np.int32))
    pools = []
    for x in others:
        pool = np.full((x.shape[0], x.shape[1], page, batch * width), np.nan, x.data.dtype, order="F")
        for b, place in np.ndindex(batch, width):
            if place * page < lengths[b]:
                pool[..., table[place, b]] = x.data[:, :, page * place : page * (place + 1), b]
        pools.append(fp8.Fp8Array(pool, x.descale, scale=x.scale, rotated=x.rotated))
    return (q, *pools), {"page_table": table, "seq_lens_kv": lengths}


#: Sq, Hq and Hkv, options, the smallest number of chunks, and Dv.
SPLIT = {
    "two queries": (2, 4, 2, {}, 1, 32), "five queries, bottom right": (5, 4, 2, {"causal": "bottom_right"}, 2, 32),
    "one query of a group": (1, 4, 1, {"causal": "bottom_right"}, 1, 32), "one row": (1, 2, 2, {"num_splits": 3}, 3, 48),
    "one row, causal": (1, 2, 2, {"causal": "bottom_right", "num_splits": 2}, 2, 32),
    "chunks": (3, 4, 2, {"causal": "bottom_right", "num_splits": 4}, 4, 16), "window": (4, 4, 2, {"window": (20, 0, "bottom_right")}, 1, 32),
    "lengths": (6, 2, 1, {"seq_lens_q": np.array([6, 2], np.int32), "causal": "bottom_right", "num_splits": 2}, 2, 32),
    "sinks": (2, 4, 2, {"sinks": np.array([0.5, 1, -1, 3], np.float32), "num_splits": 2}, 2, 32),
}  # fmt: skip


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [(1024, 533), (4, 0)], ids=str)
def test_paged_keys(name, dtype, lengths, fake):
    """Keys and values in pages, split on the GPU: output, log-sum-exp and largest output on both engines, in FP8 and bfloat16."""
    sq, hq, hkv, options, least, dv = SPLIT[name]
    lengths = np.array(lengths, np.int32)
    arrays, values = inputs(d=32, dv=dv, hq=hq, hkv=hkv, sq=sq, skv=1024, dtype=dtype, rotated=True)
    paged, pages = in_pages(arrays, lengths, 16)
    dense = {key: x for key, x in options.items() if key != "num_splits"}
    truth, true_stats = cupy_sdpa.attention(*values, seq_lens_kv=lengths, return_stats=True, **dense)
    options = {**options, **pages}
    gpu = [moved(fake, x) for x in paged]
    moved_options = {key: fake.asarray(x, order="F") if isinstance(x, np.ndarray) else x for key, x in options.items()}
    assert cupy_sdpa.explain(*gpu, **moved_options).problem.settings.split.chunks >= least
    flags = {"return_stats": True, "return_amax": True}
    for _ in range(4):
        found = [fp8.attention(*paged, **flags, **options), fp8.attention(*gpu, **flags, **moved_options)]
        wide = fp8.attention(*gpu, out_dtype="bfloat16", **moved_options)
        small = fp8.attention(*gpu, out_scale=2.0, **moved_options)
        for out, stats, amax in found:
            stats, amax = (x.get() if hasattr(x, "get") else x for x in (stats, amax))
            values = out.dequantize() if stats is found[0][1] else out.dequantize().get()
            assert relative(values, truth) < ERROR[dtype]
            np.testing.assert_allclose(stats, true_stats, atol=1e-4)
            np.testing.assert_allclose(amax, np.abs(truth).max(), rtol=1.5 * ERROR[dtype])  # of rounded parts
        assert relative(wide.get().astype(np.float64), truth) < ERROR[dtype]
        assert float(small.scale.get()[0]) == 2
        np.testing.assert_allclose(small.dequantize().get(), truth, atol=2 * ERROR[dtype] * np.abs(truth).max())


@pytest.mark.parametrize("page", [2, 16, 64, 128])
@pytest.mark.parametrize(("sq", "keys"), [(1, 128), (4, 128), (4, 1920), (600, 640)])
def test_page_tables_of_whole_tiles(page, sq, keys, fake, monkeypatch):
    """FP8 kernels use the table entries of tiles of more than 128 keys: each is a page of the sequence, also after its length."""
    (q, k, v), _ = inputs(d=16, hq=1, hkv=1, sq=sq, skv=keys)
    lengths = np.array([keys, 1], np.int32)
    paged, pages = in_pages((q, k, v), lengths, page)
    tables = []
    make = Call.stage
    monkeypatch.setattr(Call, "stage", lambda call: tables.append(make(call)) or tables[-1])
    options = {name: fake.asarray(x, order="F") for name, x in pages.items()}
    fp8.attention(*(moved(fake, x) for x in paged), **options)
    table = tables[0].arrays["page_table"].get()
    width, entries = table.shape
    assert width * page % 192 == 0
    assert width * page % 256 == 0
    own = [set(pages["page_table"][: -(-length // page), b].tolist()) for b, length in enumerate(lengths)]
    for entry in range(entries):
        b = entry * 2 // entries
        assert set(table[:, entry].tolist()) <= own[b] | ({0} if b == 1 and entry % (entries // 2) else set())


def test_long_keys_are_split():
    """So that no kernel adds over more keys than :data:`MAX_FP8_KEYS`, also if the batch fills the GPU."""
    for batch in (1, 32):
        pages = [(128, 8, 64, 512 * batch)] * 2
        problem = cupy_sdpa.problem((128, 32, 1, batch), *pages, dtype="float8_e4m3fn", page_table=(512, batch))
        split = problem.settings.split
        assert split.pages * 64 <= MAX_FP8_KEYS
        assert split.chunks * split.pages >= 512


PLANNED = {
    "causal": {"causal": True, "return_stats": True}, "bottom right": {"causal": "bottom_right"}, "window": {"window": (100, 5)},
    "lengths": {"seq_lens": True, "causal": True}, "pages": {"page_table": (8, 2)},
}  # fmt: skip


@pytest.mark.cudnn
@pytest.mark.parametrize("gpu", ["h200", "b200", "rtx5090"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PLANNED)
def test_cudnn_plans_fp8(name, dtype, gpu, planned):
    """The real cuDNN accepts what the support table allows, for GPUs that are described."""
    for d, dv in ((128, 128), (64, 128), *(((192, 128), (256, 256)) if gpu != "rtx5090" else ())):
        kv = [(d, 2, 64, 16), (dv, 2, 64, 16)] if name == "pages" else [(d, 2, 512, 2), (dv, 2, 512, 2)]
        problem = cupy_sdpa.problem((d, 8, 256, 2), *kv, dtype=dtype, **PLANNED[name])
        assert not why_not(problem, planned(library_version), gpus.capability(gpu))
        plan = planned(plan_problem, problem, gpu)
        assert isinstance(plan, PlanInfo), plan


@pytest.mark.cudnn
def test_cudnn_plans_bfloat16_outputs_for_blackwell(planned):
    """Only for SM 10.x."""
    shape = (128, 8, 256, 2)
    problem = cupy_sdpa.problem(shape, shape, shape, dtype="float8_e4m3fn", out_dtype="bfloat16")
    assert isinstance(planned(plan_problem, problem, "b200"), PlanInfo)
    assert "only supported on Blackwell" in planned(plan_problem, problem, "h200")


def test_the_benchmark_of_errors(tmp_path, capsys):
    """On the CPU engine: rows with the errors that the documentation states, and the picture of the stored rows."""
    path = tmp_path / "errors.csv"
    assert main(["fp8", "--errors", str(path), "--engine", "numpy", "--lengths", "256"]) == 0
    rows = csv.DictReader(path.read_text(encoding="utf-8").splitlines())
    found = {(row["inputs"], row["method"]): float(row["error"]) for row in rows}
    assert len(found) == len(errors.INPUTS) * len(errors.METHODS) == len(capsys.readouterr().out.splitlines())
    assert found["normal", "bfloat16"] < 0.01 < found["normal", "FP8"] < 0.1
    assert found["outliers", "FP8, rotated"] < found["outliers", "FP8"] / 1.5
    assert found["mean", "FP8, rotated, centered"] < found["mean", "FP8"]
    assert plot.TARGET.read_text(encoding="utf-8") == plot.drawn(), "draw it anew: python -m benchmarks.fp8.plot"
