"""FP8 attention on a GPU: as near to float64 as the CPU engine, which applies the same roundings; and the behavior of calls."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import Case
from fp8_arrays import ERROR, moved, relative, values_of
from on_gpu import poisoning
from tolerance import assert_close

import cupy_sdpa
from benchmarks.fp8 import errors
from cupy_sdpa import Unsupported, attention, fp8
from cupy_sdpa.check import Case as CheckCase
from cupy_sdpa.check.cases.case import Paged
from cupy_sdpa.check.verify.execute import execute
from cupy_sdpa.check.verify.tolerance import FP8_SUM

pytestmark = pytest.mark.gpu

DTYPES = tuple(ERROR)
SHAPES: dict[str, dict[str, Any]] = {
    "small": {"d": 64, "sq": 20, "skv": 30}, "long": {"d": 128, "sq": 300, "skv": 700, "hq": 2, "hkv": 1},
    "narrow values": {"d": 128, "dv": 64, "sq": 70, "skv": 130}, "wide values": {"d": 64, "dv": 128, "sq": 130, "skv": 70},
    "192 and 128": {"d": 192, "dv": 128, "sq": 65, "skv": 129}, "256": {"d": 256, "sq": 40, "skv": 200, "b": 1},
    "16": {"d": 16, "sq": 20, "skv": 30}, "16 and 48": {"d": 16, "dv": 48, "sq": 33, "skv": 65}, "80": {"d": 80, "sq": 64, "skv": 64},
    "four heads of a group": {"hq": 8, "hkv": 2, "sq": 50, "skv": 150}, "one key head": {"hq": 5, "hkv": 1, "sq": 3, "skv": 500},
    "two queries, one key": {"sq": 2, "skv": 1}, "two queries, two keys": {"sq": 2, "skv": 2}, "three queries, one key": {"sq": 3, "skv": 1},
    "two queries": {"sq": 2, "skv": 1000}, "more queries than keys": {"sq": 129, "skv": 2},
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True}, "bottom right": {"causal": "bottom_right"}, "window": {"window": (5, 2)},
    "left window": {"causal": True, "window": (17, None)}, "window bottom right": {"window": (9, 0, "bottom_right")},
    "scale": {"scale": 0.5}, "lengths": {"seq_lens_q": (70, 3), "seq_lens_kv": (7, 130)},
    "key lengths": {"seq_lens_kv": (100, 1)}, "lengths of 0": {"seq_lens_q": (0, 70), "seq_lens_kv": (130, 0)},
    "lengths, causal": {"seq_lens_q": (69, 0), "seq_lens_kv": (130, 9), "causal": True},
    "lengths, bottom right": {"seq_lens_q": (70, 8), "seq_lens_kv": (64, 65), "causal": "bottom_right"},
    "lengths, window": {"seq_lens_q": (33, 70), "seq_lens_kv": (130, 128), "window": (20, 3)},
    "C order": {"layout": "bshd"}, "heads before positions": {"layout": "bhsd"}, "sliced": {"layout": "sliced"},
}  # fmt: skip
CASES = [Case(f"fp8 {name}", **sizes) for name, sizes in SHAPES.items()] + [
    Case(f"fp8 {name}", d=64, hq=4, hkv=2, sq=70, skv=130, **options) for name, options in OPTIONS.items()
]


def quantized(case, dtype="float8_e4m3fn", *, rotate=False, seed=0):
    """q, k and v of a case in FP8, on numpy. The padding consists of bytes 0xFF, which are NaN in both formats."""
    arrays = fp8.quantize_qkv(*case.arrays(seed), dtype, rotate=rotate)
    for x, lengths in zip(arrays, (case.seq_lens_q, case.seq_lens_kv, case.seq_lens_kv), strict=True):
        for b, length in enumerate(lengths or ()):
            x.data.view(np.uint8)[:, :, length:, b] = 0xFF
    return arrays


def on_device(cupy, case, arrays):
    """The arrays on the device, in the memory layout of the case."""
    laid_out = case.laid_out([cupy.asarray(x.data.view(np.uint8), order="F") for x in arrays])
    return [moved(cupy, x, data) for x, data in zip(arrays, laid_out, strict=True)]


def check(case, arrays, found, **options):
    """Compare results of the GPU, the output, the log-sum-exp and the largest output, with the CPU engine and float64."""
    (q, k, _), dtype = values = [values_of(x) for x in arrays], arrays[0].dtype
    given = case.options()
    truth, true_stats = attention(*values[0], return_stats=True, **given)
    naive, naive_stats = fp8.attention(*arrays, return_stats=True, **options, **given)
    out, stats, amax = found
    out, naive = out.dequantize().get(), naive.dequantize()
    assert not out.any(axis=0)[np.isneginf(true_stats).swapaxes(0, 1)].any(), "rows without keys must be 0"
    assert (np.isneginf(stats.get()) == np.isneginf(true_stats)).all()
    largest = float(np.abs(truth).max(initial=0))
    assert_close(out, truth, naive, ERROR[dtype] * largest)
    limit = 1.5 * relative(naive, truth) + 0.005
    assert relative(out, truth) <= limit, f"error {relative(out, truth):.4f} in the norm, allowed {limit:.4f}"
    norms = [np.linalg.norm(np.nan_to_num(x), axis=0).max(initial=0) for x in (q, k)]
    assert_close(stats.get(), true_stats, naive_stats, 2 * FP8_SUM * case.tau * float(np.prod(norms)))
    np.testing.assert_allclose(amax.get(), largest, rtol=ERROR[dtype])


def run(cupy, case, arrays, **options):
    """All results of a call on the GPU, which allocates memory full of NaN."""
    with poisoning(cupy):
        return fp8.attention(
            *on_device(cupy, case, arrays), return_stats=True, return_amax=True, **options, **case.options(cupy)
        )


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_named_problems(case, dtype, cupy):
    """Shapes, masks, lengths with NaN in the padding, and layouts, in both formats."""
    arrays = quantized(case, dtype)
    check(case, arrays, run(cupy, case, arrays))


def drawn(seed):
    """A random case."""
    rng = np.random.default_rng(seed)
    hkv, group, b = (int(rng.choice(given)) for given in ((1, 2, 3), (1, 1, 2, 4), (1, 2, 3)))
    sq, skv = (int(2 ** rng.uniform(1, 9)) for _ in range(2))
    options = {"causal": (False, True, "bottom_right")[rng.integers(3)]}
    if rng.random() < 0.3:
        options["window"] = (
            int(rng.integers(100)),
            int(rng.integers(100)),
            *([options["causal"]] if options["causal"] else []),
        )
        options["window"] = tuple("top_left" if side is True else side for side in options["window"])
    if rng.random() < 0.5:
        options |= {"seq_lens_q": tuple(rng.integers(sq + 1, size=b)), "seq_lens_kv": tuple(rng.integers(skv + 1, size=b))}
    d = 16 * int(rng.integers(1, 17))
    dv = 16 * int(rng.integers(1, 17 if d > 128 else 9))
    layout = str(rng.choice(["fortran", "bshd", "bhsd"]))
    return Case(f"fp8 random {seed}", d, dv, hkv * group, hkv, sq, skv, b, layout=layout, **options)


@pytest.mark.parametrize("seed", range(32))
def test_random_problems(seed, cupy):
    """Sizes, head dims, masks, lengths, layouts, formats and rotations in random combinations."""
    case, dtype = drawn(seed), DTYPES[seed % 3 == 0]
    arrays = quantized(case, dtype, rotate=seed % 2 == 0)
    check(case, arrays, run(cupy, case, arrays))


@pytest.mark.parametrize("d", [64, 80, 128])
def test_rotation(d, cupy):
    """Rotated q and k that were converted on the GPU give the scores of the CPU engine, also with outliers."""
    case = Case("fp8 rotated", d=d, sq=50, skv=90, causal=True)
    x = case.arrays()
    for array in x[:2]:
        array[::37] *= 20
    given = [cupy.asarray(array, order="F") for array in x]
    found = fp8.attention(*fp8.quantize_qkv(*given, rotate=True), causal=True).dequantize().get()
    on_cpu = fp8.attention(*fp8.quantize_qkv(*x, rotate=True), causal=True).dequantize()
    plain = fp8.attention(*fp8.quantize_qkv(*given), causal=True).dequantize().get()
    truth = attention(*(array.astype(np.float64) for array in x), causal=True)
    assert relative(found, truth) < 1.5 * relative(on_cpu, truth)
    assert relative(found, truth) < relative(plain, truth)


@pytest.mark.parametrize("out_scale", ["a number", "an array", "too large"])
def test_the_scale_of_the_output(out_scale, cupy):
    """Elements are the output times the scale; an output beyond the largest number saturates."""
    case = Case("fp8 out_scale", sq=40, skv=60)
    arrays = quantized(case)
    scale = 1000.0 if out_scale == "too large" else 37.5
    given = scale if out_scale == "a number" else cupy.full(1, scale, np.float32)
    out, *others = run(cupy, case, arrays, out_scale=given)
    assert float(out.scale.get()[0]) == scale
    if out_scale == "too large":
        wide = np.clip(attention(*(values_of(x) for x in arrays)), -0.448, 0.448)
        assert relative(out.dequantize().get(), wide) < ERROR[out.dtype]
    else:
        check(case, arrays, (out, *others), out_scale=scale)


def test_only_the_output(cupy):
    """Without statistics and the largest output the output has the same bits."""
    arrays = on_device(cupy, case := Case("fp8 results", sq=100), quantized(case))
    out, _, amax = fp8.attention(*arrays, return_stats=True, return_amax=True)
    assert (attention(*arrays).data == out.data).all()
    other, same = fp8.attention(*arrays, return_amax=True)
    assert (other.data == out.data).all()
    assert (same == amax).all()


@pytest.mark.parametrize("case", [CASES[0], *(case for case in CASES if case.seq_lens_kv)], ids=str)
def test_repeated_calls(case, cupy):
    """Elements, factors and lengths that are changed in place are used by a call that is replayed."""
    lengths = {name for name in ("seq_lens_q", "seq_lens_kv") if getattr(case, name)}
    gpu, options = on_device(cupy, case, quantized(case)), case.options(cupy)
    for turn in range(8):
        now = replace(case, **{name: getattr(case, name)[:: -1 if turn % 2 else 1] for name in lengths})
        arrays = quantized(now, rotate=bool(turn % 3), seed=turn)
        for x, y in zip(gpu, arrays, strict=True):
            x.data[...] = cupy.asarray(y.data.view(np.uint8), order="F")
            x.descale[...], x.scale[...] = cupy.asarray(y.descale), cupy.asarray(y.scale)
        for name in lengths:
            options[name][...] = cupy.asarray(np.array(getattr(now, name), np.int32))
        x = [fp8.Fp8Array(x.data, x.descale, scale=x.scale, rotated=y.rotated) for x, y in zip(gpu, arrays, strict=True)]
        check(now, arrays, fp8.attention(*x, return_stats=True, return_amax=True, **options))


def test_other_streams(cupy):
    """Conversion and attention run on the current stream, after its earlier work; the host does not wait."""
    case = Case("fp8 stream", d=128, sq=300, b=1)
    given = [cupy.asarray(x, order="F") for x in case.arrays()]
    wanted = fp8.attention(*fp8.quantize_qkv(*given, rotate=True)).data
    busy, late = cupy.ones((4096, 4096), np.float32), [cupy.zeros_like(x) for x in given]
    busy @ busy
    cupy.cuda.Device().synchronize()
    for stream in (cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)):
        for x in late:
            x.fill(0)
        cupy.cuda.Device().synchronize()
        with stream:
            for _ in range(20):
                busy @ busy  # the inputs arrive late
            for source, target in zip(given, late, strict=True):
                target[...] = source
            out = fp8.attention(*fp8.quantize_qkv(*late, rotate=True)).data
        stream.synchronize()
        assert (out == wanted).all()


def test_delayed_scaling_in_a_captured_graph(cupy):
    """Conversion, attention and the history of the output are captured; every launch uses the scales of the one before."""
    case = Case("fp8 delayed", sq=50, skv=80, causal=True)
    arrays = [cupy.asarray(x, order="F") for x in case.arrays()]
    scalings = [fp8.DelayedScaling(x, 1, rotate=name != "v") for name, x in zip("qkv", arrays, strict=True)]
    of_out = fp8.DelayedScaling(arrays[0], 1)

    def step():
        converted = [scaling.quantize(x) for scaling, x in zip(scalings, arrays, strict=True)]
        scale = of_out.scale
        out, amax = fp8.attention(*converted, return_amax=True, out_scale=scale, causal=True)
        of_out.update(amax)
        return out, (converted, scale, amax)  # the graph uses their memory

    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        for _ in range(3):
            step()
        stream.synchronize()
        stream.begin_capture()
        out, kept = step()
        graph = stream.end_capture()
        for factor in (1.0, 8.0, 8.0, 0.25, 0.25):
            for x, y in zip(arrays, case.arrays(), strict=True):
                x[...] = cupy.asarray(y * y.dtype.type(factor), order="F")
            graph.launch(stream)
        stream.synchronize()
    assert len(kept) == 3
    on_host = [x.get(order="F") for x in arrays]
    truth = attention(*(x.astype(np.float64) for x in on_host), causal=True)
    wanted = fp8.attention(*fp8.quantize_qkv(*on_host, rotate=True), causal=True).dequantize()
    assert relative(out.dequantize().get(), truth) < 1.5 * relative(wanted, truth) + 0.005
    np.testing.assert_allclose(out.scale.get(), 448 / np.abs(truth).max(), rtol=ERROR[out.dtype])


@pytest.mark.parametrize("source", ["float16", "bfloat16"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["causal", "lengths", "scale"])
def test_gradients_of_a_forward_pass_in_fp8(name, dtype, source, cupy):
    """As near to float64 as FP8 permits; NaN in the padding of q, k and v is not read."""
    case = Case("fp8 gradients", d=64, hq=4, hkv=2, sq=70, skv=130, dtype=source, **OPTIONS[name])
    arrays, dout, options = case.arrays(), case.dout(), case.options()
    out, pullback = cupy_sdpa.attention_vjp(*(x.astype(np.float64) for x in arrays), **options)
    truth = [out, *pullback(dout.astype(np.float64))]
    for x, lengths in zip(arrays, (case.seq_lens_q, case.seq_lens_kv, case.seq_lens_kv), strict=True):
        for b, length in enumerate(lengths or ()):
            x[:, :, length:, b] = np.nan
    given, dout = [cupy.asarray(x, order="F") for x in arrays], cupy.asarray(dout, order="F")
    for _ in range(4):
        out, pullback = cupy_sdpa.attention_vjp(*given, compute_dtype=dtype, **case.options(cupy))
        found = [out, *pullback(dout)]
        for x, y in zip(found, truth, strict=True):
            assert x.dtype == given[0].dtype
            assert relative(x.get().astype(np.float64), y) < 3 * ERROR[dtype]


@pytest.mark.parametrize(("page", "width", "lengths"), [(16, 9, (130, 33)), (64, 5, (320, 1)), (128, 3, (300, 0))])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("sq", [2, 5, 64])
@pytest.mark.parametrize("causal", [False, "bottom_right"])
def test_paged_keys(page, width, lengths, group, sq, causal, cupy):
    """Keys and values in pages; entries of the table after the length, and pages that are not used, are not read."""
    case = Case("fp8 pages", d=128, hq=2 * group, hkv=2, sq=sq, skv=page * width, causal=causal, seq_lens_kv=lengths)
    arrays = quantized(replace(case, seq_lens_kv=None))
    table = np.full((width, 2), 1 << 20, np.int32, order="F")
    order = iter(np.random.default_rng(page).permutation(2 * width))
    pools = [np.full((128, 2, page, 2 * width), 0xFF, np.uint8, order="F") for _ in range(2)]
    for b, length in enumerate(lengths):
        for i in range(-(-length // page)):
            table[i, b] = next(order)
            for pool, x in zip(pools, arrays[1:], strict=True):
                pool[..., table[i, b]] = x.data.view(np.uint8)[:, :, page * i : page * (i + 1), b]
    given = [moved(cupy, x, cupy.asarray(data, order="F")) for x, data in zip(arrays[1:], pools, strict=True)]
    options = {"page_table": cupy.asarray(table, order="F"), "seq_lens_kv": cupy.asarray(np.array(lengths, np.int32))}
    for _ in range(4):
        with poisoning(cupy):
            found = fp8.attention(moved(cupy, arrays[0]), *given, return_stats=True, return_amax=True, causal=causal, **options)
        check(case, arrays, found)


@pytest.mark.parametrize("skv", [2, 60, 124, 256, 640])
@pytest.mark.parametrize("sq", [1, 2])
@pytest.mark.parametrize("d", [16, 128, 256])
@pytest.mark.parametrize("seed", range(4))
def test_small_pages(skv, sq, d, seed, cupy):
    """A table of fewer keys than a tile of the kernel: other memory was used as its entries, and NaN of other pages spread."""
    pages = tuple(Paged(2, "pages", "some_zero", 0, "unowned", False, False))
    options = {"paged": pages, "fp8": DTYPES[seed % 2], "stats": True}
    case = CheckCase("gpu", "float16", d=d, dv=d, hq=1, hkv=1, sq=sq, skv=skv, b=1, options=options, seed=199 + seed)
    outcome = execute(case)
    assert outcome.kind == "passed", outcome.message


@pytest.mark.parametrize("length", [1024, 8192, 32768])
def test_the_error_of_normal_inputs_does_not_grow_with_the_number_of_keys(length, cupy):
    """The relative error that docs/fp8.md states."""
    arrays = errors.normal(length)
    given = errors.Arrays(*(cupy.asarray(x, order="F") for x in arrays))
    assert relative(errors.in_fp8(given).get(), errors.exact(arrays)) < 0.075


REFUSED = {
    "one query": (lambda x: fp8.attention(x[:, :, :1], x, x), Unsupported, "FP8 needs two or more"),
    "softcap": (lambda x: fp8.attention(x, x, x, softcap=2.0), Unsupported, "softcap is not supported"),
    "a scale below 0": (lambda x: fp8.attention(x, x, x, scale=-1.0), Unsupported, "positive scale"),
    "another dtype": (lambda x: fp8.attention(x, x, x, out_dtype="bfloat16"), Unsupported, "omit out_dtype"),
    "head dim": (lambda x: fp8.attention(x[:8], x[:8], x), Unsupported, "multiples of 16"),
    "wide values": (lambda x: fp8.attention(x[:128], x[:128], x[:144]), Unsupported, "pad q and k"),
    "dtypes": (lambda x: fp8.attention(x, x, fp8.quantize(x.dequantize(), "float8_e5m2")), TypeError, "v is float8_e5m2"),
    "out": (lambda x: attention(x, x, x, out=x.data), TypeError, "omit out"),
    "gradients": (lambda x: cupy_sdpa.explain(x, x, x, backward=True), Unsupported, "compute_dtype"),
    "numpy": (lambda x: fp8.attention(fp8.quantize(x.dequantize().get(order="F")), x, x), TypeError, "numpy"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, cupy):
    """With the value and the remedy, before anything is launched."""
    call, error, text = REFUSED[name]
    (x, _, _) = Case("fp8 refused", d=256, hq=2, sq=16).arrays()
    x = fp8.quantize(cupy.asarray(x, order="F"))
    if cupy.cuda.Device().compute_capability != "90" and error is Unsupported and name in ("one query", "another dtype"):
        pytest.skip("of Hopper")
    with pytest.raises(error, match=text):
        call(x)


def test_packed_sequences_are_refused(cupy):
    """On Hopper their kernel ends in an illegal instruction."""
    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("of Hopper")
    x = fp8.quantize(cupy.ones((16, 2, 30), np.float16, order="F"))
    starts = cupy.asarray(np.array([0, 10, 30], np.int32))
    with pytest.raises(Unsupported, match="illegal instruction"):
        fp8.attention(x, x, x, cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=20, max_seqlen_kv=20)
