"""The option ``engine``: CuPy arrays without cuDNN, the results of numpy, and clear refusals of everything else."""

import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from engines import one_in
from fake_cupy import DEVICE
from functions import INTEGERS, OPERATIONS, STEEP

from cupy_sdpa import attention, attention_backward, attention_vjp, dropout_mask, explain, merge, nnlib, prepare
from cupy_sdpa.check.combine import LEFT_OUT
from cupy_sdpa.check.draw import OPTIONS as FEATURES

RNG = np.random.default_rng(0)


def normal(*shape, dtype=np.float32):
    return np.asfortranarray(RNG.standard_normal(shape).astype(dtype))


def arrays(dtype=np.float32):
    """q, k, v and dout with grouped heads and two head dims."""
    return [normal(*shape, dtype=dtype) for shape in [(12, 4, 20, 2), (12, 2, 31, 2), (7, 2, 31, 2), (7, 4, 20, 2)]]


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


@pytest.mark.parametrize("engine", ["interpreted"], indirect=True)
@pytest.mark.parametrize("name", one_in(3, sorted(FEATURES.keys() - LEFT_OUT["cupy"])))
def test_random_problems(name, engine):
    """Problems of every option have the results of the definition."""
    engine.agrees(engine.draw({name}, 0), refused=True)


def test_other_calls(fake):
    """Pullbacks, NNlib's functions, layouts, prepared calls, and dropout with the CPU's random numbers."""
    q, k, v, dout = arrays()

    def pullback(q, k, v, dout, **options):
        out, pull = attention_vjp(q, k, v, **options)
        return out, *pull(dout)

    def prepared(q, k, v, dout, **options):
        out, stats = prepare(q, k, v, return_stats=True, **options)(q, k, v)
        return prepare(q, k, v, backward=True, **options)(dout, q, k, v, out, stats)

    drawn = {"dropout_p": 0.3, "seed": 7, "offset": 2**40}
    for function in (pullback, prepared):
        check_equal(fake, function, (q, k, v, dout), causal=True, **drawn)
    check_equal(fake, dropout_mask, (q, k), **drawn)
    check_equal(fake, attention, [np.ascontiguousarray(x.T) for x in (q, k, v)], layout="bshd", causal=True)
    check_equal(fake, attention, (q, k, v), compute_dtype="bfloat16")
    check_equal(fake, lambda x, **options: nnlib.dot_product_attention(x, x, x, nheads=3, **options)[0], (normal(12, 20, 2),))


#: Launches of a forward and a backward call with one tile, in float32: the matrix products, one elementwise kernel before the
#: softmax, four of the softmax, reductions, and copies of results.
LAUNCHES = [
    ({}, (10, 12)),
    ({"causal": True}, (10, 12)),
    ({"causal": True, "softcap": 3.0, "alibi_slopes": np.ones(1, np.float32)}, (10, 12)),
    ({"score_mod": lambda s, b, h, i, j: np.where(i >= j, s, np.tanh(s) * abs(i - j))}, (10, 15)),
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


def test_results_of_the_caller(fake):
    """They are written and returned; a result that overlaps an input raises."""
    q, k, v, _ = (on(fake, x) for x in arrays())
    out = fake.zeros((7, 4, 20, 2), np.float32, order="F")
    assert attention(q, k, v, out=out, engine="cupy") is out
    np.testing.assert_array_equal(out.get(), attention(q, k, v, engine="cupy").get())
    with pytest.raises(ValueError, match=r"out overlaps q"):
        attention(q, q, q, out=q, engine="cupy")


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


def test_explain(fake):
    """The report has the size of the tiles; with many keys a tile is a part of the queries: memory is linear in the length."""
    q, k, v, _ = (on(fake, x) for x in arrays())
    report = explain(q, k, v, causal=True, engine="cupy")
    assert report.engine == "CuPy"
    assert report.workspace > 20 * 31 * 4
    assert "runs with CuPy's operations, without cuDNN: all heads at a time, 0.0231 MB" in str(report)
    for backward in (False, True):
        needs = []
        for length in (1 << 17, 1 << 18):
            x = fake.empty((8, 1, length, 1), np.float16, order="F")
            report = explain(x, x, x, causal=True, backward=backward, engine="cupy")
            assert f"tiles of {(1 << 24) // length} of {length} queries of all heads" in str(report)
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
found = sys.modules.get("cupy_sdpa.core.cudnn.library")
assert found is None or found._library is None, "cuDNN was loaded"
"""


def test_no_cudnn_is_loaded(stand_ins):
    """CuPy alone is enough: neither cuDNN nor the driver's bindings are loaded, and no CUDA header is compiled."""
    python(ALONE)


#: Compares CuPy's functions with the fake CuPy's functions that the engine uses.
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
