"""The option ``engine``: CuPy arrays without cuDNN, the results of numpy, and clear refusals of everything else."""

import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from fake_cupy import DEVICE
from functions import INTEGERS, OPERATIONS, STEEP

import cupy_sdpa
from cupy_sdpa import (
    KVCache,
    Unsupported,
    attention,
    attention_backward,
    attention_jvp,
    attention_vjp,
    dropout_mask,
    explain,
    fp8,
    merge,
    nnlib,
    parallel,
    prepare,
    shared_prefix_attention,
    weight_sums,
)

RNG = np.random.default_rng(0)
LENGTHS = {"seq_lens_q": np.array([20, 0], np.int32), "seq_lens_kv": np.array([7, 31], np.int32)}
PACKED = {
    "cu_seqlens_q": np.array([0, 9, 9, 20], np.int32), "cu_seqlens_kv": np.array([0, 1, 30, 31], np.int32),
    "max_seqlen_q": 11, "max_seqlen_kv": 29,
}  # fmt: skip


def normal(*shape, dtype=np.float32):
    return np.asfortranarray(RNG.standard_normal(shape).astype(dtype))


def arrays(dtype=np.float32, packed=False):
    """q, k, v and dout with grouped heads and two head dims."""
    shapes = [(12, 4, 20, 2), (12, 2, 31, 2), (7, 2, 31, 2), (7, 4, 20, 2)]
    return [normal(*shape[: 3 if packed else 4], dtype=dtype) for shape in shapes]


def on(fake, x):
    """Arrays of numpy on the fake GPU; also those in a dictionary."""
    if isinstance(x, dict):
        return {name: on(fake, value) for name, value in x.items()}
    return fake.asarray(x) if isinstance(x, np.ndarray) else x


def both_passes(q, k, v, dout, **options):
    out, stats = attention(q, k, v, return_stats=True, **options)
    return out, stats, *attention_backward(dout, q, k, v, out, stats, **options)


def check_equal(fake, function, given, **options):
    """A function has the same results on numpy, and with ``engine="cupy"`` on the fake CuPy, up to a few units of rounding."""
    wanted = function(*given, **options)
    found = function(*(on(fake, x) for x in given), engine="cupy", **on(fake, options))
    pairs = zip(wanted, found, strict=True) if isinstance(wanted, tuple) else [(wanted, found)]
    for x, y in pairs:
        assert isinstance(y, fake.ndarray)
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        y = y.get()
        if x.dtype == bool:
            np.testing.assert_array_equal(x, y)
            continue
        epsilon = float(ml_dtypes.finfo(options.get("compute_dtype", x.dtype)).eps)
        x, y = x.astype(np.float64), y.astype(np.float64)
        largest = np.abs(np.where(np.isfinite(x), x, 0)).max(initial=0)
        np.testing.assert_allclose(y, x, rtol=0, atol=16 * epsilon * largest)


@pytest.mark.parametrize(
    "dtype", [*(pytest.param(dtype, marks=pytest.mark.slow) for dtype in ("float16", "bfloat16", "float64")), "float32"]
)
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "dropout_p": 0.3, "seed": 7, "offset": 2**40},
        {"causal": "bottom_right", "softcap": 3.0, "alibi_slopes": np.array([1, 0.5, 0.1, 0], np.float32), **LENGTHS},
        {"window": (4, 2), "bias": normal(31, 1, 4, 1), "mask": RNG.random((31, 20, 1, 2)) < 0.8, "sinks": normal(4)},
        {"score_mod": lambda s, b, h, i, j, t: np.where(i >= j, s + t[h, j], np.tanh(s)), "tensors": {"t": normal(4, 31)}},
    ],
    ids=["dropout", "lengths", "arrays", "function"],
)
def test_the_results_of_numpy(dtype, options, fake):
    """The interpreter computes the same steps with either module; the random numbers are those of the CPU."""
    check_equal(fake, both_passes, arrays(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype), **options)


@pytest.mark.parametrize("causal", [False, True])
def test_other_calls(causal, fake):
    """Packed sequences, pages, block masks, derivatives, pullbacks, NNlib's functions, layouts, and prepared calls."""
    q, k, v, dout = arrays()
    check_equal(fake, both_passes, arrays(packed=True), causal=causal, **PACKED)
    pages, table = normal(12, 2, 4, 9), RNG.permutation(9)[:8].reshape(4, 2).astype(np.int32)
    paged = {"page_table": table, "seq_lens_kv": np.array([13, 0], np.int32), "causal": "bottom_right" if causal else False}
    check_equal(fake, attention, (q[:, :, :2].copy(order="F"), pages, pages), **paged)
    check_equal(fake, attention_jvp, (q, k, v, q[::-1].copy(order="F"), None, v * 2), causal=causal)
    mask = cupy_sdpa.block_mask(lambda b, h, i, j: (i // 128 + j // 128 + h) % 3 < 2, 300, 300, heads=2)
    wide = [normal(8, 2, 300, 1) for _ in range(4)]
    check_equal(fake, both_passes, wide, block_mask=mask)
    check_equal(fake, attention_jvp, wide, block_mask=mask)

    def pullback(q, k, v, dout, **options):
        out, pull = attention_vjp(q, k, v, **options)
        return out, *pull(dout)

    check_equal(fake, pullback, (q, k, v, dout), causal=causal)
    check_equal(fake, attention, [np.ascontiguousarray(x.T) for x in (q, k, v)], layout="bshd", causal=causal)
    check_equal(fake, attention, (q, k, v), compute_dtype="bfloat16", causal=causal)
    check_equal(fake, lambda *given, **options: prepare(*given, **options)(*given), (q, k, v), causal=causal)

    def prepared(q, k, v, dout, **options):
        out, stats = attention(q, k, v, return_stats=True, **options)
        return prepare(q, k, v, backward=True, **options)(dout, q, k, v, out, stats)

    check_equal(fake, prepared, (q, k, v, dout), causal=causal)
    x = normal(12, 20, 2)
    check_equal(fake, lambda x, **options: nnlib.dot_product_attention(x, x, x, nheads=3, **options)[0], (x,))
    drawn = {"dropout_p": 0.5, "seed": 3}
    check_equal(fake, lambda q, k, **options: dropout_mask(q, k, **drawn, **options), (q, k))


#: Launches of a forward and a backward call with one tile, in float32: the matrix products, one elementwise kernel before the
#: softmax, four of the softmax, reductions, and copies of arrays.
LAUNCHES = [
    ({}, (13, 18)),
    ({"causal": True}, (13, 18)),
    ({"causal": True, "softcap": 3.0, "alibi_slopes": np.ones(1, np.float32)}, (14, 19)),
    ({"score_mod": lambda s, b, h, i, j: np.where(i >= j, s, np.tanh(s) * abs(i - j))}, (13, 21)),
]


@pytest.mark.parametrize(("options", "expected"), LAUNCHES, ids=["plain", "causal", "arrays", "function"])
def test_launches(options, expected, fake):
    """The scale, the masks and score functions are one kernel, however many operations they have."""
    q, k, v, dout = (on(fake, normal(8, 1, 20, 1)) for _ in range(4))
    options = on(fake, options)
    before = len(DEVICE.launches)
    out, stats = attention(q, k, v, return_stats=True, engine="cupy", **options)
    between = len(DEVICE.launches)
    attention_backward(dout, q, k, v, out, stats, engine="cupy", **options)
    assert (between - before, len(DEVICE.launches) - between) == expected


def test_operations_of_functions(fake):
    """The fused kernel has every operation of score functions, with the results of numpy; also of integers."""
    scores = [functions.score_mod for functions in OPERATIONS if functions is not STEEP]
    q, k, v, dout = arrays(np.float64)
    check_equal(fake, both_passes, (q, k, v, dout), score_mod=lambda *given: sum(0.05 * score(*given) for score in scores))
    plain, captured = ([f for f in INTEGERS if f.mask_mod and ("tensors" in f.options()) is has] for has in (False, True))

    def masks(s, b, h, i, j):
        return s + sum(0.1 * np.where(functions.mask_mod(b, h, i, j), 1.0, 0.0) for functions in plain)

    check_equal(fake, attention, (q, k, v), score_mod=masks)
    for functions in captured:
        options = functions.options(h=4, q=20, kv=20, b=2)
        check_equal(fake, attention, (q, q, q), **options)


@pytest.mark.parametrize("dtype", ["float64", pytest.param("float16", marks=pytest.mark.slow)])
def test_shared_prefixes_weights_and_merged_parts(dtype, fake):
    """shared_prefix_attention, weight_sums and merge; also the keys of a cache."""
    dtype = np.dtype(dtype)
    q, k, v, _ = arrays(dtype)
    pages = normal(12, 2, 4, 9, dtype=dtype)
    table = np.array([[3, 3], [5, 5], [0, 1], [2, 7]], np.int32)
    paged = {"page_table": table, "seq_lens_kv": np.array([13, 8], np.int32), "sinks": normal(4), "return_stats": True}
    few = q[:, :, :2].copy(order="F")
    check_equal(fake, shared_prefix_attention, (few, pages, pages), shared_prefix=8, causal="bottom_right", **paged)
    check_equal(fake, weight_sums, (q, k), causal=True, per_kv_head=True, **LENGTHS)
    check_equal(fake, weight_sums, arrays(dtype, packed=True)[:2], **PACKED)

    def merged(q, k, v, sinks, engine=None):
        parts = [
            attention(q, k[:, :, own], v[:, :, own], return_stats=True, engine=engine) for own in (slice(9), slice(9, None))
        ]
        return merge(*zip(*parts, strict=True), sinks=sinks, return_stats=True, engine=engine)

    check_equal(fake, merged, (q, k, v, normal(4)))

    def cached(q, k, engine=None):
        cache = KVCache(12, 2, pages=30, batch=2, page_size=3, dtype=dtype.name, numpy=engine is None)
        cache.append(k, k)
        return attention(q, **cache.view(), causal="bottom_right", engine=engine)

    check_equal(fake, cached, (q, k))


def test_the_gradient_of_a_number(fake):
    """A captured number has a gradient without axes, of a call whose sizes are 1."""
    x = np.full((1, 1, 1, 1), 0.5, np.float32)
    options = {"score_mod": lambda s, b, h, i, j, t: s * t, "tensors": {"t": np.array(2.0)}, "sinks": np.zeros(1, np.float32)}

    def gradient(q, k, v, dout, **options):
        out, pullback = attention_vjp(q, k, v, return_dtensors=True, **options)
        return out, pullback(dout)[-1]["t"]

    check_equal(fake, gradient, (x, x, x, x), **options)


def test_results_of_the_caller(fake):
    """They are written and returned; a result that overlaps an input is refused."""
    q, k, v, _ = (on(fake, x) for x in arrays())
    out = fake.zeros((7, 4, 20, 2), np.float32, order="F")
    assert attention(q, k, v, out=out, engine="cupy") is out
    np.testing.assert_array_equal(out.get(), attention(q, k, v, engine="cupy").get())
    with pytest.raises(ValueError, match=r"out overlaps q"):
        attention(q, q, q, out=q, engine="cupy")


def test_only_on_request(fake):
    """Arrays that cuDNN does not support are refused, and the refusal names the engine that computes them."""
    q, k, v, _ = (on(fake, x) for x in arrays())
    with pytest.raises(TypeError, match=r"q, k and v are float32; .* pass engine='cupy', which .* but slower"):
        attention(q, k, v)
    with pytest.raises(TypeError, match=r"which cuDNN does not support: .* engine='cupy'"):
        nnlib.dot_product_attention(q[:, 0], q[:, 0], q[:, 0])


@pytest.mark.parametrize(
    ("engine", "where", "error", "message"),
    [
        (
            "cupy",
            "numpy",
            TypeError,
            "engine is 'cupy', which computes with CuPy arrays, and q is a numpy array: omit engine for the CPU",
        ),
        ("cudnn", "numpy", TypeError, "or copy the arrays to the GPU with cupy.asarray"),
        (
            "numpy",
            "fake",
            TypeError,
            "which computes with numpy arrays, and q is a CuPy array: pass engine='cupy' .* cupy.asnumpy",
        ),
        ("gpu", "fake", ValueError, "engine is 'gpu'; it must be 'cupy' .*, 'cudnn' .*, 'numpy'"),
        (1, "numpy", ValueError, "engine is 1; it must be"),
    ],
)
def test_engines_and_arrays(engine, where, error, message, fake):
    """An engine does not compute with arrays of the other kind, in no call."""
    q, k, v, dout = arrays() if where == "numpy" else [on(fake, x) for x in arrays()]
    for call in (attention, attention_vjp, explain, prepare):
        with pytest.raises(error, match=message):
            call(q, k, v, engine=engine)
    with pytest.raises(error, match=message):
        attention_jvp(q, k, v, q, engine=engine)
    with pytest.raises(error, match=message):
        attention_backward(dout, q, k, v, dout, dout, engine=engine)


def test_packed_parts_are_merged():
    """Arrays of three axes are packed: no batch axis is added."""
    x, stats = np.ones((8, 2, 5), np.float32, order="F"), np.zeros((2, 5), np.float32, order="F")
    out, rows = merge([x, x], [stats, stats], return_stats=True, engine="numpy")
    assert (out.shape, rows.shape) == (x.shape, stats.shape)


def test_the_default_engines_can_be_named(fake):
    """numpy and cuDNN confirm the engine of the arrays."""
    q, k, v, _ = arrays()
    assert attention(q, k, v, engine="numpy").tobytes() == attention(q, k, v).tobytes()
    halves = [on(fake, normal(16, 2, 20, 1, dtype=np.float16)) for _ in range(3)]
    assert attention(*halves, engine="cudnn").get().tobytes() == attention(*halves).get().tobytes()
    assert prepare(*halves, engine="cudnn").report.engine == "cuDNN"


def test_mistakes(fake):
    """Mixed arrays, invalid lengths, captured streams, and calls that have no such engine."""
    q, k, v, _ = (on(fake, x) for x in arrays())
    with pytest.raises(TypeError, match=r"arrays are mixed: q is a CuPy array and k is a numpy array"):
        attention(q, k.get(), v, engine="cupy")
    with pytest.raises(ValueError, match=r"seq_lens_q has lengths from 21 to 21; they must be from 0 to 20"):
        attention(q, k, v, seq_lens_q=fake.full(2, 21, np.int32), engine="cupy")
    with fake.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        with pytest.raises(RuntimeError, match=r"the stream is being captured .* engine is 'cupy'"):
            attention(q, k, v, engine="cupy")
        stream.end_capture()
    with pytest.raises(ValueError, match=r"engine is 'cupy', which plans nothing for gpu='H200'"):
        explain(q, k, v, engine="cupy", gpu="H200")
    half = on(fake, normal(16, 2, 20, 1, dtype=np.float16))
    eighths = fp8.quantize_qkv(half, half, half)
    for call in (attention, explain, prepare, fp8.attention):
        with pytest.raises(Unsupported, match=r"engine is 'cupy', which does not compute in FP8: .* dequantize"):
            call(*eighths, engine="cupy")
    with pytest.raises(Unsupported, match=r"engine is 'cupy', which does not compute in FP8: .* dequantize"):
        attention_vjp(half, half, half, compute_dtype="float8_e4m3fn", engine="cupy")
    with pytest.raises(ValueError, match="shared_prefix_attention needs page_table and seq_lens_kv"):
        shared_prefix_attention(half, half, half, 0, layout="bshd", engine="cupy")
    with pytest.raises(TypeError, match=r"arrays are mixed: q is a CuPy array and stats\[1\] is a numpy array"):
        merge([half, half], [half[0], half[0].get()], engine="cupy")
    with pytest.raises(TypeError, match=r"this call does not take engine"):
        cupy_sdpa.problem((8, 1, 4, 1), (8, 1, 4, 1), (8, 1, 4, 1), dtype="float32", engine="cupy")
    with pytest.raises(Unsupported, match=r"engine is 'cupy', which a group does not support"):
        parallel.context_parallel(parallel.Loopback(1).members[0]).attention(half, half, half, engine="cupy")


def test_explain(fake):
    """The report has the size of the tiles; with many keys a tile is a part of the queries: memory is linear in the length."""
    q, k, v, _ = (on(fake, x) for x in arrays())
    report = explain(q, k, v, causal=True, engine="cupy")
    assert report.engine == "CuPy"
    assert report.workspace > 20 * 31 * 4
    assert "runs with CuPy's operations, without cuDNN: one head at a time, 0.00653 MB" in str(report)
    for backward in (False, True):
        needs = []
        for length in (1 << 17, 1 << 18):
            x = fake.empty((8, 1, length, 1), np.float16, order="F")
            report = explain(x, x, x, causal=True, backward=backward, engine="cupy")
            assert f"tiles of {(1 << 24) // length} of {length} queries of a head" in str(report)
            needs.append(report.workspace)
        assert needs[1] < 2 * needs[0]
    assert explain(x, x, x, backward=True, engine="cupy").engine == explain(x, x, x, jvp=True, engine="cupy").engine == "CuPy"


#: Runs without cuDNN and without the driver's Python bindings, which CuPy for ROCm does not have.
ALONE = """
import sys
import numpy as np
from fake_cupy import cupy
sys.modules |= {"cupy": cupy, "cuda": None, "cuda.bindings": None, "cuda.pathfinder": None}
from cupy_sdpa import attention_jvp, attention_vjp, explain
x = cupy.asarray(np.ones((8, 2, 16, 1), np.float32, order="F"))
lengths = cupy.asarray(np.array([9], np.int32))
out, pullback = attention_vjp(x, x, x, causal=True, seq_lens_q=lengths, dropout_p=0.5, seed=1, sinks=x[0, :, 0, 0], engine="cupy")
pullback(out)
attention_jvp(x, x, x, x, x, x, softcap=2.0, engine="cupy")
assert explain(x, x, x, engine="cupy")
found = sys.modules.get("cupy_sdpa.cudnn.library")
assert found is None or found._library is None, "cuDNN was loaded"
"""


def test_no_cudnn_is_loaded(stand_ins):
    """CuPy alone is enough: neither cuDNN nor the driver's bindings are loaded, and no CUDA header is compiled."""
    python(ALONE)


#: Compares the functions of CuPy with those of the fake one that the engine uses.
FUNCTIONS = """
import inspect
try:
    import cupy
except ImportError:
    print("CuPy is not installed")
    raise SystemExit
from fake_cupy.cupy import UFUNCS
for name in UFUNCS:
    assert isinstance(getattr(cupy, name), cupy.ufunc), name
for name, arguments in {
    "zeros_like": {"dtype"}, "full_like": {"dtype"}, "empty_like": {"dtype", "order", "shape"}, "concatenate": {"axis", "dtype"},
    "pad": {"pad_width"}, "where": {"condition"}, "diff": set(), "broadcast_to": {"shape"}, "isneginf": set(), "take": {"axis"},
}.items():
    assert arguments <= inspect.signature(getattr(cupy, name)).parameters.keys(), name
"""


def test_the_functions_of_cupy():
    """CuPy has the functions of the fake CuPy, with these arguments."""
    if text := python(FUNCTIONS):
        pytest.skip(text)


def python(code):
    """Run code in a new process that can import the fake CuPy; returns its output."""
    path = [str(Path(__file__).parents[1]), *filter(None, sys.path)]
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
