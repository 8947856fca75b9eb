"""FP8 attention: as near to float64 as the roundings permit, its factors, layouts, gradients, CUDA graphs, reports and plans."""

import csv
import itertools

import numpy as np
import pytest
from engines import numbers
from fp8_arrays import DTYPES, ENGINES, ERROR, ON_A_GPU, moved, normal, relative, values_of
from planner import plan_problem

import cupy_sdpa
from benchmarks import fp8_errors as errors
from benchmarks.__main__ import main
from cupy_sdpa import attention, attention_vjp, explain, fp8, reference
from cupy_sdpa.check.formats import dtype_of

E4M3, E5M2 = DTYPES


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("number", numbers(6, quick=1))
@pytest.mark.parametrize(
    "names", ["fp8", "fp8 mean", "fp8 mean seq_lens_q seq_lens_kv", "fp8 paged", "fp8 seq_lens_q seq_lens_kv"]
)
def test_random_problems(names, number, engine):
    """Output and log-sum-exp of values that are exact in FP8, and the scale of the next conversion; repeated and replayed."""
    engine.agrees(engine.draw(names.split(), number), refused=True)


LENGTHS = {"seq_lens_q": "some_zero", "seq_lens_kv": "some_zero"}
#: Sizes and options; the first ones are not slow.
CORNERS = {
    "lengths of 0": {"options": {**LENGTHS, "fp8": E4M3, "stats": True}},
    "a table smaller than a tile": {"sq": 1, "skv": 60, "options": {"paged": (2, "pages", "some_zero", 0, "unowned", False, False), "fp8": E4M3}},
    "lengths, bottom right": {"options": {**LENGTHS, "causal": "bottom_right", "fp8": E5M2}},
    "lengths, window": {"options": {"seq_lens_q": "random", "window": (5, 3, "top_left"), "fp8": E4M3}},
    "a window at the bottom right": {"options": {"window": (9, 0, "bottom_right"), "fp8": E4M3, "stats": True}},
    "narrow values": {"d": 128, "dv": 64, "options": {"fp8": E4M3}}, "wide values": {"d": 64, "dv": 128, "options": {"fp8": E5M2}},
    "192 and 128": {"d": 192, "dv": 128, "options": {"fp8": E4M3}}, "256": {"d": 256, "dv": 256, "options": {"fp8": E4M3}},
    "one key": {"sq": 3, "skv": 1, "options": {"fp8": E5M2}}, "two queries": {"sq": 2, "skv": 300, "options": {"fp8": E4M3, "stats": True}},
    "pages of a tile, one row": {"sq": 1, "hq": 2, "skv": 384, "options": {"paged": (128, "heads", "random", 0, "mixed", False, False), "fp8": E4M3}},
    "pages, many rows": {"sq": 64, "skv": 288, "b": 1, "options": {"paged": (16, "heads", "random", 0, "large", False, False), "causal": "bottom_right", "fp8": E5M2}},
    "pages, a window, chunks": {"sq": 4, "skv": 320, "options": {"paged": (64, "pages", "random", 3, "negative", False, False), "window": (100, 0, "bottom_right"), "fp8": E4M3}},
}  # fmt: skip


@ENGINES
@pytest.mark.in_turn(2)
@pytest.mark.parametrize(
    "name", [*list(CORNERS)[:2], *(pytest.param(name, marks=pytest.mark.slow) for name in list(CORNERS)[2:])]
)
def test_corners(name, engine):
    """Head dims, lengths, few keys, and page tables of less than a tile, after which other memory was used as entries."""
    sizes = {"d": 32, "dv": 32, "hq": 4, "hkv": 2, "sq": 20, "skv": 30, "b": 2}
    engine.agrees(engine.case(**{**sizes, **CORNERS[name]}, seed=199))


#: Sizes and options with sequences, or tiles of 128 queries, without keys. In some, there are more tiles than multiprocessors.
WITHOUT_KEYS = {
    "some sequences without keys": {"skv": 20, "options": {"seq_lens_kv": "some_zero", "fp8": E4M3, "stats": True}},
    "some paged sequences without keys": {"options": {"paged": (16, "pages", "some_zero", 0, "large", False, False), "fp8": E4M3, "stats": True}},
    "chunks of sequences without keys": {"sq": 4, "skv": 208, "b": 8, "options": {"paged": (16, "pages", "some_zero", 3, "large", False, False), "fp8": E4M3, "stats": True}},
    "a tile without keys, bottom right": {"sq": 128, "skv": 20, "options": {"seq_lens_kv": "some_zero", "causal": "bottom_right", "fp8": E4M3}},
    "a tile without keys, window": {"sq": 128, "skv": 20, "options": {"seq_lens_kv": "some_zero", "window": (5, 3, "top_left"), "fp8": E4M3}},
    "a tile without keys, no lengths": {"sq": 128, "skv": 20, "options": {"window": (5, 0, "top_left"), "fp8": E4M3}},
}  # fmt: skip


@ENGINES
@pytest.mark.parametrize("name", WITHOUT_KEYS)
def test_without_keys(name, engine):
    """Output 0 and log-sum-exp -inf where cuDNN's kernel on Hopper would never end."""
    heads = 2 if engine.name == "fake" and "paged" in WITHOUT_KEYS[name]["options"] else 9  # pages take long on the fake
    sizes = {"d": 16, "dv": 16, "hq": heads, "hkv": heads, "sq": 130, "skv": 32, "b": 8}
    engine.agrees(engine.case(**{**sizes, **WITHOUT_KEYS[name]}, seed=199))


# Results


def inputs(d=32, dv=None, hq=4, hkv=2, sq=20, skv=30, b=2, dtype=E4M3, rotated=False, seed=0):
    """FP8 arrays of numpy, and their values in float64."""
    shapes = (d, hq, sq, b), (d, hkv, skv, b), (dv or d, hkv, skv, b)
    made = [fp8.quantize(normal(shape, "float32", seed + i), dtype, rotate=rotated and i < 2) for i, shape in enumerate(shapes)]
    return made, [values_of(x) for x in made]


@ENGINES
@pytest.mark.parametrize("paged", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_scale_of_the_output(paged, engine):
    """A number or an array; an output beyond the largest number saturates; a later change of the array changes no output."""
    given, values = inputs(32, 48, skv=128)
    lengths = np.array([128, 33], np.int32)
    (q, k, v), options = in_pages(engine, given, lengths, 16) if paged else ([moved(engine, x) for x in given], {})
    truth = attention(*values, **({"seq_lens_kv": lengths} if paged else {}))
    scale, outputs = engine.put(np.full(1, 37.5, np.float32)), []
    for number in (37.5, 60.0, 1000.0):
        scale[...] = number
        for given_scale in (number, scale):
            outputs.append((number, fp8.attention(q, k, v, out_scale=given_scale, **options)))
    scale[...] = 1
    for number, out in outputs:
        assert float(engine.get(out.scale)[0]) == number
        wanted = np.clip(truth, -448 / number, 448 / number)
        assert relative(engine.get(out.dequantize()), wanted) < 1.5 * ERROR[E4M3]
    _, amax = fp8.attention(q, k, v, return_amax=True, **options)
    np.testing.assert_allclose(engine.get(amax), np.abs(truth).max(), rtol=1.5 * ERROR[E4M3])


@ENGINES
def test_the_largest_output_is_of_this_call(engine):
    """Not of an earlier call with the same shapes."""
    (q, k, v), values = inputs(32, 48, skv=128)
    arrays = [moved(engine, x) for x in (q, k, v, fp8.quantize(0 * values[2]))]
    for v in (arrays[2], arrays[3]):
        _, amax = fp8.attention(*arrays[:2], v, return_amax=True)
    assert engine.get(amax) == 0


def test_an_output_in_16_bits_is_not_rounded_to_fp8():
    """On the CPU; and the error does not depend on the number of keys: small weights keep their bits."""
    found = []
    for skv in (64, 512, 4096):
        arrays, values = inputs(16, hq=1, hkv=1, sq=8, skv=skv, b=1)
        out, truth = fp8.attention(*arrays, out_dtype="bfloat16"), attention(*values)
        assert out.dtype == dtype_of("bfloat16")
        found.append(relative(out, truth))
        assert found[-1] < relative(fp8.attention(*arrays).dequantize(), truth)
    assert max(found) < 2 * min(found)


def test_options_of_the_cpu():
    """Masks and biases that cuDNN does not take with FP8."""
    arrays, values = inputs()
    for options in (
        {"softcap": 3.0},
        {"alibi_slopes": np.array([0.1, 0.2, 0.3, 0.4], np.float32)},
        {"scale": 0.5, "causal": True},
    ):
        assert relative(fp8.attention(*arrays, **options).dequantize(), attention(*values, **options)) < ERROR[E4M3]


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1024, 8192, 32768])
def test_the_error_of_normal_inputs_does_not_grow_with_the_number_of_keys(length, cupy):
    """The relative error that docs/fp8.md states."""
    arrays = errors.normal(length)
    given = errors.Arrays(*(cupy.asarray(x, order="F") for x in arrays))
    assert relative(errors.in_fp8(given).get(), reference.attention(*arrays)[0]) < 0.075


@ENGINES
@pytest.mark.slow
@pytest.mark.in_turn(2)
@pytest.mark.parametrize("given", ["descale", "scale"])
def test_factors_that_change(given, engine):
    """An array as a factor is kept: after a change in place, both factors, views and the output of a call use the new value."""
    q, k, v = (fp8.quantize(engine.put(normal((16, 2, 8, 1)))) for _ in range(3))
    wanted = engine.get(fp8.attention(q, k, v).dequantize())
    before = engine.get(getattr(v, given)).copy()
    number = engine.put(before.copy())
    changing = fp8.Fp8Array(v.data, **{given: number})
    view = changing[:, :, ::2]
    for factor in (4, 0.5, 0.25):
        number *= factor
        ratio = float(engine.get(number)[0] / before[0]) ** (1 if given == "descale" else -1)
        np.testing.assert_allclose(engine.get(changing.scale * changing.descale), 1, rtol=1e-6)
        np.testing.assert_allclose(engine.get(view.dequantize()), ratio * engine.get(v.dequantize())[:, :, ::2], rtol=1e-6)
        for _ in range(4):
            found = engine.get(fp8.attention(q, k, changing).dequantize())
            assert relative(found, ratio * wanted) < 0.01, "a factor may be rounded differently, and few elements, too"


# Other arguments


LETTERS = {"bshd": (3, 2, 1, 0), "bhsd": (3, 1, 2, 0), "sbhd": (2, 3, 1, 0)}


@ENGINES
@pytest.mark.slow
@pytest.mark.in_turn(2)
@pytest.mark.parametrize(("letters", "rotated"), [("bhsd", True), pytest.param("sbhd", False, marks=pytest.mark.slow)])
def test_layouts(letters, rotated, engine):
    """Conversion, attention, statistics, reports and gradients take the axes of the caller."""
    axes = LETTERS[letters]
    arrays = [normal((32, h, s, 3), "float16", s) for h, s in ((4, 20), (2, 30), (2, 30), (4, 20))]
    lengths = engine.put(np.array([5, 20, 0], np.int32))

    def results(q, k, v, dout, **layout):
        """The log-sum-exp, the output in FP8 and of queries that are converted, and both passes of float16."""
        options = {"causal": True, "seq_lens_q": lengths, **layout}
        converted = fp8.quantize_qkv(q, k, v, rotate=rotated, seq_lens_q=lengths, **layout)
        assert converted[0].shape == q.shape
        assert explain(*converted, **options)
        out, stats = attention(*converted, return_stats=True, **options)
        own, pullback = attention_vjp(q, k, v, compute_dtype=E4M3, **options)
        of_queries = attention(q, *converted[1:], **options)
        return [engine.get(x).astype(float) for x in (stats, out.dequantize(), of_queries, own, *pullback(dout))]

    log_sums, *wanted = results(*engine.put(arrays))
    given = engine.put([np.ascontiguousarray(x.transpose(axes)) for x in arrays])
    for _ in range(3):
        stats, *found = results(*given, layout=letters)
        np.testing.assert_allclose(stats.T, log_sums, atol=0.02)
        for x, y in zip(found, wanted, strict=True):
            assert relative(x.transpose(np.argsort(axes)), y) < 0.02


def test_layout_of_packed_sequences():
    """Three axes."""
    x, starts = normal((16, 2, 30)), np.array([0, 10, 30], np.int32)
    options = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": 20, "max_seqlen_kv": 20}
    wanted = fp8.attention(*fp8.quantize_qkv(x, x, x, rotate=True), **options)
    y = np.ascontiguousarray(x.T)
    found = fp8.attention(*fp8.quantize_qkv(y, y, y, rotate=True, layout="thd"), layout="thd", **options)
    np.testing.assert_array_equal(found.dequantize().T, wanted.dequantize())


@ENGINES
@pytest.mark.in_turn(2)
@pytest.mark.parametrize(
    "source", ["float32", *(pytest.param(name, marks=pytest.mark.slow) for name in ("float16", "bfloat16"))]
)
def test_queries_that_are_converted(source, engine):
    """FP8 keys and values with other queries: the output has their dtype, also in a preallocated array."""
    arrays = [normal((32, h, s, 2), source, s) for h, s in ((4, 20), (2, 30), (2, 30))]
    truth, log_sums = attention(*(x.astype(float) for x in arrays), return_stats=True, causal=True)
    q, k, v = engine.put(arrays)
    k, v = fp8.quantize(k, rotate=True), fp8.quantize(v)
    for _ in range(4):
        out = engine.nan(*q.shape, dtype=q.dtype)
        found, stats = attention(q, k, v, causal=True, return_stats=True)
        assert attention(q, k, v, causal=True, out=out) is out
        assert found.dtype == out.dtype == q.dtype
        for x in (found, out):
            assert relative(engine.get(x).astype(float), truth) < 1.3 * ERROR[E4M3]
        np.testing.assert_allclose(engine.get(stats), log_sums, atol=0.2)
    assert explain(q, k, v, causal=True)


@pytest.mark.parametrize("source", ["float16", "float32"])
def test_all_statistics_of_queries_that_are_converted(source):
    """return_stats="max_sumexp" returns four results, as for FP8 queries."""
    q, k = normal((16, 4, 5, 1), source), fp8.quantize(normal((16, 2, 7, 1)))
    found = attention(q, k, k, return_stats="max_sumexp")
    wanted = fp8.attention(fp8.quantize(q), k, k, return_stats="max_sumexp")
    assert [x.shape for x in found] == [x.shape for x in wanted]
    for x, y in zip(found[1:], wanted[1:], strict=True):
        np.testing.assert_array_equal(x, y)


# Gradients


def gradients(arrays, dout, **options):
    """The output and the gradients."""
    out, pullback = attention_vjp(*arrays, **options)
    return [out, *pullback(dout)], pullback


OF_GRADIENTS = {
    "lengths, causal": {"seq_lens_q": np.array([20, 0], np.int32), "seq_lens_kv": np.array([30, 9], np.int32), "causal": True},
    "window, scale": {"window": (5, 2), "scale": 0.5},
}  # fmt: skip


@ENGINES
@pytest.mark.slow
@pytest.mark.in_turn(2)
@pytest.mark.parametrize(
    ("name", "dtype", "source"),
    [("lengths, causal", E4M3, "bfloat16"), pytest.param("window, scale", E5M2, "float16", marks=pytest.mark.slow)],
)
def test_gradients_of_a_forward_pass_in_fp8(name, dtype, source, engine):
    """As near to float64 as FP8 permits; NaN in the padding of q, k and v is not read; the pullback holds the arrays in FP8."""
    options = OF_GRADIENTS[name]
    shapes = (32, 4, 20, 2), (32, 2, 30, 2), (16, 2, 30, 2), (16, 4, 20, 2)
    q, k, v, dout = (normal(shape, source, seed) for seed, shape in enumerate(shapes))
    truth, _ = gradients([x.astype(np.float64) for x in (q, k, v)], dout.astype(np.float64), **options)
    for x, lengths in ((q, "seq_lens_q"), (k, "seq_lens_kv"), (v, "seq_lens_kv")):
        for b, length in enumerate(options.get(lengths, ())):
            x[:, :, length:, b] = np.nan
    *arrays, dout = engine.put([q, k, v, dout])
    for _ in range(4):
        found, pullback = gradients(arrays, dout, compute_dtype=dtype, **engine.put(options))
        for x, y in zip(found, truth, strict=True):
            assert x.dtype == dtype_of(source)
            assert relative(engine.get(x), y) < 3 * ERROR[dtype]
    held = sum(x.nbytes for x in options.values() if isinstance(x, np.ndarray))
    assert engine.on_cudnn or pullback.nbytes == q.size + k.size + v.size + 2 * dout.size + 4 * 4 * 20 * 2 + held


def test_gradients_with_large_scores_are_finite():
    """With outliers the scores in FP8 differ by more than 1 from the others: the gradients still have the right size."""
    x = [normal((64, 2, 50, 1), "bfloat16", seed) for seed in range(4)]
    for array in x[:2]:
        array[::37] *= 20
    found, _ = gradients(x[:3], x[3], compute_dtype=E4M3)
    truth, _ = gradients([y.astype(np.float64) for y in x[:3]], x[3].astype(np.float64))
    assert all(relative(a, b) < 1 for a, b in zip(found, truth, strict=True))


# Reports, pages and plans


@ENGINES
def test_explain(engine):
    """The problem, the graph and the plan; softcap is a reason against it on the GPU."""
    x = fp8.quantize(engine.put(normal((16, 2, 4, 1))))
    report = explain(x, x, x, causal=True)
    assert report
    assert report.engine == ("cuDNN" if engine.on_cudnn else "numpy")
    assert engine.on_cudnn or "round(448 exp(S − m)) / l" in str(report)
    assert bool(explain(x, x, x, softcap=1.0)) != engine.on_cudnn
    with pytest.raises(TypeError, match="compute_dtype='float8_e4m3fn'"):
        explain(x, x, x, backward=True)


def test_explain_with_a_mask_function_for_a_described_gpu():
    """The mask function raises, as in the call; its blocks are not counted, because FP8 arrays take no block mask."""
    x = fp8.quantize(normal((16, 1, 2048, 1)))
    report = explain(x, x, x, mask_mod=lambda b, h, i, j: i // 128 == j // 128, gpu="h200", cudnn="9.19")
    assert "mask_mod is not supported with FP8 arrays" in report.reasons[0]
    assert not report.blocks


def in_pages(engine, arrays, lengths, page):
    """q, and keys and values (D, Hkv, Skv, B) in pages in random order with NaN in unused pages; and the page table."""
    (q, *others), batch, width = arrays, arrays[0].shape[3], arrays[1].shape[2] // page
    table = np.asfortranarray(np.random.default_rng(0).permutation(batch * width).reshape(width, batch).astype(np.int32))
    made = [moved(engine, q)]
    for x in others:
        pool = np.full((x.shape[0], x.shape[1], page, batch * width), np.nan, x.data.dtype, order="F")
        for b, place in np.ndindex(batch, width):
            if place * page < lengths[b]:
                pool[..., table[place, b]] = x.data[:, :, page * place : page * (place + 1), b]
        made.append(moved(engine, fp8.Fp8Array(pool, x.descale, scale=x.scale, rotated=x.rotated)))
    return made, engine.put({"page_table": table, "seq_lens_kv": lengths})


SINKS = np.array([0.5, 1, -1, 3], np.float32)


@ENGINES
@pytest.mark.parametrize(
    ("sq", "hq", "options", "least"),
    [
        (2, 4, {"sinks": SINKS, "num_splits": 2}, 2), (1, 2, {"num_splits": 3}, 2),
        pytest.param(6, 4, {"seq_lens_q": np.array([6, 2], np.int32), "causal": "bottom_right", "num_splits": 2}, 2, marks=pytest.mark.slow),
    ],
    ids=["sinks", "one row", "lengths"],
)  # fmt: skip
def test_paged_keys(sq, hq, options, least, engine):
    """Keys and values in pages, rotated and split: output, log-sum-exp and largest output, in FP8 and bfloat16."""
    lengths = np.array([256, 133], np.int32)
    given, values = inputs(d=32, dv=48, hq=hq, sq=sq, skv=256, rotated=True)
    dense = {name: x for name, x in options.items() if name != "num_splits"}
    truth, log_sums = attention(*values, seq_lens_kv=lengths, return_stats=True, **dense)
    arrays, pages = in_pages(engine, given, lengths, 16)
    options = {**engine.put(options), **pages}
    if engine.on_cudnn:
        assert explain(*arrays, **options).problem.settings.split.chunks >= least
    for _ in range(3):
        out, stats, amax = fp8.attention(*arrays, return_stats=True, return_amax=True, **options)
        wide = fp8.attention(*arrays, out_dtype="bfloat16", **options)
        for x in (engine.get(out.dequantize()), engine.get(wide)):
            assert relative(x.astype(float), truth) < ERROR[E4M3]
        np.testing.assert_allclose(engine.get(stats), log_sums, atol=1e-2 if engine.on_cudnn else 1e-4)
        np.testing.assert_allclose(engine.get(amax), np.abs(truth).max(), rtol=1.5 * ERROR[E4M3])  # of rounded parts


@pytest.mark.parametrize("page", [2, 16, 64, 128])
@pytest.mark.parametrize(("sq", "keys"), [(1, 128), (4, 1920), (600, 640)])
def test_page_tables_of_whole_tiles(page, sq, keys):
    """FP8 kernels use the table entries of tiles of up to 256 keys, or 192."""
    kv = (16, 1, page, 2 * keys // page)
    problem = cupy_sdpa.problem((16, 1, sq, 2), kv, kv, dtype=E4M3, page_table=(keys // page, 2))
    width = problem.page_table.shape[0]
    assert width * page % 192 == width * page % 256 == 0


PLANNED = {
    "causal": {"causal": True, "return_stats": True}, "bottom right": {"causal": "bottom_right"}, "window": {"window": (100, 5)},
    "lengths": {"seq_lens_kv": True, "causal": True}, "pages": {"page_table": (8, 2)},
}  # fmt: skip


@pytest.mark.cudnn
@pytest.mark.parametrize("gpu", ["b200", *(pytest.param(gpu, marks=pytest.mark.slow) for gpu in ("h200", "rtx5090"))])
def test_cudnn_plans_fp8(gpu, planner):
    """The real cuDNN accepts what the support table allows, for GPUs that are described; bfloat16 outputs for SM 10.x only."""
    head_dims = ((128, 128), (64, 128), *(((192, 128), (256, 256)) if gpu != "rtx5090" else ()))
    for (name, options), (number, (d, dv)) in itertools.product(PLANNED.items(), enumerate(head_dims)):
        kv = [(d, 2, 64, 16), (dv, 2, 64, 16)] if name == "pages" else [(d, 2, 512, 2), (dv, 2, 512, 2)]
        problem = cupy_sdpa.problem((d, 8, 256, 2), *kv, dtype=DTYPES[(number + len(name)) % 2], **options)
        plan = planner.accept(plan_problem, problem, gpu)
        assert not isinstance(plan, str), f"{name}: {plan}"
    shape = (128, 8, 256, 2)
    plan = planner.accept(plan_problem, cupy_sdpa.problem(shape, shape, shape, dtype=E4M3, out_dtype="bfloat16"), gpu)
    assert (not isinstance(plan, str)) if gpu == "b200" else "only supported on Blackwell" in plan


@pytest.mark.slow
def test_the_benchmark_of_errors(tmp_path, capsys):
    """On the CPU engine: rows with the errors that the documentation states."""
    path = tmp_path / "errors.csv"
    assert main(["fp8", "--errors", str(path), "--engine", "numpy", "--lengths", "256"]) == 0
    rows = csv.DictReader(path.read_text(encoding="utf-8").splitlines())
    found = {(row["inputs"], row["method"]): float(row["error"]) for row in rows}
    assert len(found) == len(errors.INPUTS) * len(errors.METHODS) == len(capsys.readouterr().out.splitlines())
    assert found["normal", "bfloat16"] < 0.01 < found["normal", "FP8"] < 0.1
    assert found["outliers", "FP8, rotated"] < found["outliers", "FP8"] / 1.5
    assert found["v = 1 + 0.3 n", "FP8, rotated"] < found["v = 1 + 0.3 n", "FP8, rotated, with the mean of v"] / 1.5


@pytest.mark.slow
@ON_A_GPU
def test_delayed_scaling_in_a_captured_graph(engine):
    """Conversion, attention and the history of the output are captured; every launch uses the scales of the one before."""
    x = [normal((32, 2, s, 2), "bfloat16", s) for s in (20, 30, 30)]
    arrays = engine.put(x)
    scalings = [fp8.DelayedScaling(y, 1, rotate=name != "v") for name, y in zip("qkv", arrays, strict=True)]
    of_out = fp8.DelayedScaling(arrays[0], 1)

    def step():
        converted = [scaling.quantize(y) for scaling, y in zip(scalings, arrays, strict=True)]
        scale = of_out.scale
        out, amax = fp8.attention(*converted, return_amax=True, out_scale=scale, causal=True)
        of_out.update(amax)
        return out, (converted, scale, amax)  # the graph uses their memory

    engine.xp.cuda.Device().synchronize()
    with engine.xp.cuda.Stream(non_blocking=True) as stream:
        for _ in range(3):
            step()
        stream.synchronize()
        stream.begin_capture()
        out, kept = step()
        graph = stream.end_capture()
        for factor in (1.0, 8.0, 8.0, 0.25, 0.25):
            for y, host in zip(arrays, x, strict=True):
                y[...] = engine.put(np.asfortranarray(host * host.dtype.type(factor)))
            graph.launch(stream)
        stream.synchronize()
    on_host = [np.asfortranarray(y * y.dtype.type(0.25)) for y in x]
    truth = attention(*(y.astype(np.float64) for y in on_host), causal=True)
    wanted = fp8.attention(*fp8.quantize_qkv(*on_host, rotate=True), causal=True).dequantize()
    assert relative(engine.get(out.dequantize()), truth) < 1.5 * relative(wanted, truth) + 0.005
    np.testing.assert_allclose(engine.get(out.scale), 448 / np.abs(truth).max(), rtol=ERROR[out.dtype])
    del kept, graph
    engine.forget_plans()
