"""Programs: the memory that temporaries share, comparison with numpy, logs of steps, and a new feature."""

import logging
import re

import numpy as np
import pytest
from engines import Engine, numbers, on_cudnn
from replayed_calls import PARSED, REPLAY, ROWS, arguments_read, calls_of, functions_run
from validated_steps import compared, validated_steps

from cupy_sdpa import (
    BlockMask,
    KVCache,
    Prepared,
    attention,
    attention_backward,
    explain,
    explain_function,
    get_plan_cache,
    prepare,
    shared_prefix_attention,
)
from cupy_sdpa.extend import Band, Builder, Call, CallKey, Recorded, View, composed, operation, read_operands, results_of


def test_options_after_reading_refuse_names_that_they_do_not_have():
    """They would be ignored: the causal mask is a band then, and the softcap a scalar. The scale may become an array."""
    _, views, options = read_operands({"q": np.zeros((8, 2, 5, 1))}, {"softcap": 20.0})
    assert (options | {"band": Band(right=0)}).settings.band == Band(right=0)
    for name, value in (("causal", True), ("window", (1, 0)), ("sink", views["q"])):
        with pytest.raises(TypeError, match=f"{name} is no input"):
            options | {name: value}
    for name in ("softcap", "causal"):
        with pytest.raises(TypeError, match=f"{name} is no input"):
            options.without(name)


def test_a_recorded_function_has_four_axes():
    """The name of another axis would be ignored."""
    function = Recorded.of("mask_mod", lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, {})
    assert function.relocated({}, starts={"q_idx": 2})(0, 0, np.arange(3), 3).tolist() == [False, True, True]
    with pytest.raises(ValueError, match="no axis 'q'; the axes are b, h, q_idx, kv_idx"):
        function.relocated({}, starts={"q": 2})


def test_temporaries_share_memory():
    """Two that are not in use at the same time have one place; two that are have two."""
    builder = Builder(None)
    x, y, z = (builder.temporary((100,), np.float32) for _ in range(3))
    builder.fill(x, 1)
    builder.copy(y, x)
    builder.copy(z, y)
    places = builder.build().temporaries
    a, b, c = (places[view.storage.name] for view in (x, y, z))
    assert a.begin == c.begin != b.begin


def of_a_block_mask(engine):
    """A call of several steps."""
    mask = BlockMask.from_blocks(np.array([[True, True], [False, True]])[:, :, None, None], 140, 140)
    x = [engine.normal([1, n], 16, heads, 140, 1) for n, heads in enumerate((2, 1, 1))]
    return lambda: attention(*x, block_mask=mask)


#: The most functions of the package that a first call enters: on numpy, and where cuDNN plans it.
FIRST_ON_NUMPY, FIRST_ON_CUDNN = 950, 1650


def test_host_work_of_a_first_call(engine):
    """A graph lists its tensors once, a problem its arrays, and a descriptor looks cuDNN up once."""
    x, longer = (engine.normal(0, 16, 2, length, 2) for length in (140, 156))
    attention(x, x, x)  # modules are imported
    assert functions_run(attention, longer, longer, longer) <= (FIRST_ON_CUDNN if engine.on_cudnn else FIRST_ON_NUMPY)


@pytest.mark.parametrize("layout", [None, "bshd"])
def test_reading_a_call_allocates_nothing(layout, fake):
    """explain and prepare of both passes and of a derivative, also with other axes and in another dtype."""
    engine = Engine("fake", fake)
    x = [engine.normal(n, 16, 2, 40, 2) for n in range(3)]
    wide = [one.astype(np.float32, order="F") for one in x]
    if layout:
        x, wide = ([engine.put(np.ascontiguousarray(engine.get(one).T)) for one in some] for some in (x, wide))
    options = {} if layout is None else {"layout": layout}
    sizes = []

    def allocate(size):
        sizes.append(size)
        return fake.get_default_memory_pool().malloc(size)

    with fake.cuda.using_allocator(allocate):
        for arrays, of_call in ((x, options), (wide, {**options, "compute_dtype": "bfloat16"})):
            assert explain(*arrays, **of_call, return_stats=True)
            assert explain(*arrays, **of_call, backward=True)
            assert explain(*arrays, **of_call, jvp=True)
            prepare(*arrays, **of_call)
            prepare(*arrays, **of_call, backward=True)
    assert sizes == []


#: Rows with calls of attention_vjp, which reads the arrays for both passes.
WITH_PULLBACK = {
    "attention_vjp",
    "attention_vjp, layout",
    "attention_vjp, no batch axis",
    "compute_dtype",
    "FP8 and its gradients",
    "functions of every call",
    "NNlib",
}


@pytest.mark.parametrize("name", [name for name in ROWS if name not in WITH_PULLBACK | PARSED])
def test_every_array_is_read_once(name):
    """The first call of a kind checks each array once, and its options once: its parts are built from views."""
    calls = calls_of(Engine("numpy", np), name, preallocated=False)
    with validated_steps():  # parses calls that other tests made before
        read = arguments_read(calls.launch)
    assert read
    assert set(read.values()) == {1}, read


def test_an_array_may_have_the_name_of_an_option(engine):
    """An operation whose lengths are an argument, not an option, gets them."""
    x, lengths = engine.normal(0, 16, 2, 20, 2), engine.put(np.array([20, 3], np.int32))
    arrays, views, _ = read_operands({"q": x, "k": x, "v": x, "seq_lens_kv": lengths}, {})
    assert arrays["seq_lens_kv"] is lengths
    assert views["seq_lens_kv"].shape == (2,)


def test_calls_of_a_cache_are_explained(engine):
    """A shared prefix: the steps, the launches with their plans, and the bytes of temporary arrays."""
    cache = KVCache(64, 2, pages=40, batch=2, page_size=16, dtype=engine.dtype, numpy=not engine.on_cudnn)
    k, v = (engine.normal(n, 64, 2, 330) for n in range(2))
    cache.append(k[:, :, :320], v[:, :, :320], seq_lens_q=[320, 0])
    cache.fork(0, 1)
    cache.append(k[:, :, 320:], v[:, :, 320:], seq_lens_q=[5, 5])
    q, options = engine.normal(2, 64, 4, 1, 2), {"page_table": cache.table, "seq_lens_kv": cache.lengths}
    given = q, cache.keys(), cache.values(), cache.shared_prefix()
    report = explain_function(shared_prefix_attention, *given, **options)
    assert report
    assert cache.shared_prefix() == 320
    assert len(report.launches) == 2
    assert all(launch.plan for launch in report.launches) == engine.on_cudnn
    assert [line.split(" ", 2)[0] for line in map(str.strip, report.steps)] == [f"{n + 1}." for n in range(len(report.steps))]
    assert any("own keys" in line for line in report.steps)
    assert any("merge" in line for line in report.steps)
    assert report.temporary_bytes
    before = get_plan_cache().misses if engine.on_cudnn else 0
    shared_prefix_attention(*given, **options)
    assert not engine.on_cudnn or get_plan_cache().misses == before


def test_results_that_overlap_are_refused(engine):
    """The programs of a call of several steps, also after calls that are cached."""
    x, options = [engine.normal(n, 16, 2, 20, 1, dtype="float32") for n in range(3)], {"compute_dtype": "float16"}
    out, stats = attention(*x, return_stats=True, **options)
    for _ in range(3):
        dq, *_ = attention_backward(out, *x, out, stats, **options)
        with pytest.raises(ValueError, match="dq overlaps dk in memory"):
            attention_backward(out, *x, out, stats, dq=dq, dk=dq, **options)


# Comparing and logging steps

WATCHED = (
    (), {"block_mask"}, {"jvp"}, {"seq_lens_kv"}, {"packed"}, {"paged"}, {"bias"}, {"bucket"}, {"dropout"}, {"sinks"}, {"fp8"},
    {"compute_dtype"}, {"score_mod"},
)  # fmt: skip


@pytest.mark.parametrize("number", numbers(4, quick=1))
@pytest.mark.parametrize("features", WATCHED, ids=lambda features: " ".join(sorted(features)) or "any")
def test_right_steps_are_valid(features, number, engine):
    """Random problems of every feature; on the fake CuPy, kernels compiled as C++ are compared with their numpy functions."""
    with validated_steps():
        engine.agrees(engine.draw(features, number), refused=True)


@on_cudnn
def test_packed_sequences_longer_than_the_maximum_are_valid(engine):
    """On a GPU elements of cu_seqlens are not read; positions beyond max_seqlen take no part in attention."""
    packed = ("full", "one", 0, 0, 3, "int32")
    with validated_steps():
        engine.agrees(engine.case(d=16, dv=16, sq=21, skv=9, b=2, backward=True, options={"packed": packed}))


def test_a_wrong_plan_is_named(engine):
    """A plain call is one step; its result is compared with the float64 result of its graph."""
    call = Call.of(attention, *(engine.normal(n, 16, 2, 40, 1) for n in range(3))).read()
    call.create_results()
    (step,) = call.program.steps
    for _, arrays in call.bound():
        call.execute(0 if engine.on_cudnn else None)
        arrays["out"] *= engine.dtype.type(1.25)
        with pytest.raises(AssertionError, match=r"step 'attention' differs .* out has an error of"):
            compared(call, step, arrays, lambda: None)


def test_functions_of_scores_are_approximate(fake):
    """A GPU's tanh has a relative error of 2^-11, and the log-sum-exp has the scores' error."""
    x = [Engine("fake", fake).normal(n, 16, 2, 40, 1) for n in range(3)]

    def validate_wrong_stats(**options):
        call = Call.of(attention, *x, return_stats=True, **options).read()
        call.create_results()
        for _, arrays in call.bound():
            call.execute(0)
            arrays["stats"] += np.float32(2e-4)
            compared(call, call.program.steps[0], arrays, lambda: None)

    validate_wrong_stats(softcap=3.0)
    with pytest.raises(AssertionError, match="stats has an error of"):
        validate_wrong_stats()


def test_sums_of_terms_that_cancel_are_right(fake):
    """The gradient of a bias that is added at every key is near 0, with its terms' rounding errors."""
    engine, options = Engine("fake", fake), {"bias": ("1q11", "float32", "inf"), "return_dbias": True}
    with validated_steps():
        engine.agrees(engine.case(dtype="bfloat16", d=16, dv=16, sq=83, skv=1128, b=2, backward=True, options=options, seed=1))


def test_padded_queries_of_split_keys_are_valid(engine):
    """The merge of the parts clears them, on numpy and on the GPU."""
    q, pages = engine.normal(0, 16, 4, 5, 3), engine.normal(1, 16, 2, 64, 64)
    table = np.asfortranarray(np.random.default_rng(0).permutation(60).reshape(20, 3).astype(np.int32))
    lengths = {"seq_lens_kv": np.array([1200, 700, 1280], np.int32), "seq_lens_q": np.array([5, 2, 0], np.int32)}
    options = engine.put({"page_table": table, **lengths})
    with validated_steps():
        attention(q, pages, pages, causal="bottom_right", num_splits=4, **options)


def test_repeated_calls_are_compared(fake):
    """Graphs that were captured are not replayed within the block, and are after it."""
    call = of_a_block_mask(Engine("fake", fake))
    for _ in range(10):
        call()
    with validated_steps():
        assert functions_run(call) > 100
    assert functions_run(call) <= REPLAY
    fake.cuda.Device().synchronize()  # the plans are destroyed next


def test_steps_are_logged(engine, caplog):
    """At level DEBUG each step of each call, also of repeated ones, with time, bytes and rate; above it nothing, and calls repeat."""
    call = of_a_block_mask(engine)
    with caplog.at_level(logging.DEBUG, logger="cupy_sdpa"):
        for _ in range(5):
            call()
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG]
    steps = [line for line in lines if re.fullmatch(r" +\d+\. .+ +[\d.]+ us, \d+\.\d+ MiB(, [\d.]+ GB/s)?", line)]
    titles = [line for line in lines if "of temporary memory" in line]
    assert len(titles) == 5
    assert len(lines) == len(steps) + len(titles)
    assert len(steps) > 5
    assert [int(line.split(".")[0]) for line in steps] == [*range(1, len(steps) // 5 + 1)] * 5
    caplog.clear()
    for _ in range(5):
        call()
    assert not caplog.records
    if engine.name == "fake":
        assert functions_run(call) <= REPLAY
        get_plan_cache().clear()


# A feature of one builder

PAGE = 16


def scale(target, factor):
    """A kernel: multiply an array by a number."""
    product = target.T
    product *= np.float32(factor)


def mean_of_pages(builder, x):
    """Add the steps of the mean over pages of 16 keys, in float32."""
    total = builder.temporary((*x.shape[:2], x.shape[2] // PAGE, x.shape[3]), np.float32)
    builder.fill(total, 0)
    for n in range(PAGE):
        builder.add(total, x[:, :, n::PAGE])
    builder.run(scale, total, 1 / PAGE, writes=(total,))
    mean = builder.temporary(total.shape, x.dtype)
    builder.copy(mean, total)
    return mean


def attention_mean(q, k, v, *, out=None, **options):
    """Attention to the means of keys and values over pages of 16."""
    return results_of(mean_call((q, k, v, out), options))[0]


@operation(attention_mean, ("q", "k", "v", "out"), {})
def mean_call(arrays, options):
    """The call as a value."""
    return Call(CallKey("mean", ("q", "k", "v", "out"), arrays, options), parse_mean, ("out",))


def parse_mean(key):
    """Read the call."""
    arrays, views, options = read_operands(key.named(), key.options)
    q, k, v = (views[name] for name in "qkv")
    if k.shape[2] % PAGE:
        raise ValueError(f"k has {k.shape[2]} keys; they must be a multiple of {PAGE}")

    def build(builder):
        means = mean_of_pages(builder, k), mean_of_pages(builder, v)
        builder.attend("attention", q, *means, options, out=views["out"])

    out = View.dense("out", (v.shape[0], *q.shape[1:]), q.dtype, q.storage.device)
    return composed(key, arrays, views, {"out": out}, build)


def test_a_feature_is_one_builder(engine):
    """It runs on both engines, repeated and validated; explain shows its steps, also for another GPU; prepare plans it."""
    x = [engine.normal(n, 16, heads, size, 2) for n, (heads, size) in enumerate(((4, 20), (2, 64), (2, 64)))]
    q, k, v = (engine.get(one).astype(np.float64, order="F") for one in x)
    k, v = (np.asfortranarray(one.reshape(16, 2, -1, PAGE, 2).mean(axis=3)) for one in (k, v))
    want = attention(q, k, v)
    for _ in range(5):  # the third is captured
        np.testing.assert_allclose(engine.get(attention_mean(*x)), want, atol=engine.tolerance)
    assert engine.name != "fake" or functions_run(lambda: attention_mean(*x)) <= REPLAY
    with validated_steps():
        attention_mean(*x)
    for report in explain_function(attention_mean, *x), explain_function(attention_mean, *x, gpu="H200", cudnn="9.20.5"):
        assert bool(report) == (engine.on_cudnn or report.engine == "numpy"), report
        assert report.problem.k.shape == k.shape
        assert [line.split()[1] for line in report.steps].count("add") == 2 * PAGE
        assert "bytes of temporary arrays" in str(report)
    call = Prepared(attention_mean, dict(zip("qkv", x, strict=True)), {}, {})
    np.testing.assert_allclose(engine.get(call(*x)), want, atol=engine.tolerance)
    with pytest.raises(ValueError, match="differs from the prepared one"):
        call(*(engine.normal(n, 16, 2, 32, 1) for n in range(3)))


def test_programs_depend_on_arrays_of_options_without_a_view():
    """A parser may read the shape of an array that it does not pass to ``read_operands``."""

    @operation(test_programs_depend_on_arrays_of_options_without_a_view, ("q",), {})
    def call(arrays, options):
        return Call(CallKey(("rows of a mask",), ("q",), arrays, options), parse)

    def parse(key):
        arrays, views, _ = read_operands(key.named(), {})
        out, rows = View.dense("out", (1,), np.dtype(np.float64), None), key.options["mask"].shape[0]
        return composed(key, arrays, views, {"out": out}, lambda builder: builder.run(fill, views["out"], rows, writes=(out,)))

    def fill(x, rows):
        x[...] = rows

    q = np.ones((8, 1, 4, 1), order="F")
    masks = [np.ones((rows, 1, 1, 1), bool) for rows in (3, 5, 3)]
    assert [results_of(call((q,), {"mask": mask}))[0].item() for mask in masks] == [3, 5, 3]
