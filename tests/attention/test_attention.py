"""The public call: new and preallocated results, empty arrays, names of options, and what the package exports."""

import inspect
import re
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from mistakes_of_calls import OTHER_NAMES

import cupy_sdpa
from cupy_sdpa import attention, explain, reference

TYPES = (
    "CudnnError", "DiskCacheWarning", "OutOfPages", "Prepared", "Problem", "Pullback", "Report", "Unsupported",
)  # fmt: skip
MODULES = ("fp8", "layout", "nnlib", "parallel", "reference", "store", "zoo")


def arrays(engine=None, d=16, hq=4, hkv=2, sq=6, skv=7, b=2, dv=None, dtype="float32"):
    """Random q, k and v in Fortran order, of numpy or in the dtype of an engine."""
    rng = np.random.default_rng(0)
    shapes = (d, hq, sq, b), (d, hkv, skv, b), (dv or d, hkv, skv, b)
    made = tuple(np.asfortranarray(rng.standard_normal(s).astype(engine.dtype if engine else dtype)) for s in shapes)
    return engine.put(made) if engine else made


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16, "float32", "float64"], ids=lambda x: np.dtype(x).name)
def test_new_results_have_the_inputs_dtype(dtype, engine):
    """They are in Fortran order; stats are float32, float64 for float64, and out has the same bits with and without them."""
    if engine.on_cudnn and np.dtype(dtype).itemsize > 2:
        return
    q, k, v = engine.put(arrays(dtype=dtype, dv=24))
    out, stats = attention(q, k, v, return_stats=True)
    assert (out.shape, out.dtype, out.flags.f_contiguous) == ((24, 4, 6, 2), q.dtype, True)
    assert (stats.shape, stats.dtype, stats.flags.f_contiguous) == ((6, 4, 2), np.promote_types(q.dtype, "f4"), True)
    assert engine.get(attention(q, k, v)).tobytes() == engine.get(out).tobytes()


def test_preallocated_results_are_returned(engine):
    """out= and stats= are written and returned, the same objects, also if they are interleaved with the inputs."""
    q, k, v = arrays(engine, hkv=4, sq=6, skv=6)
    whole = engine.xp.zeros((16, 4, 4, 6, 2), q.dtype, order="F")
    for n, x in enumerate((q, k, v)):
        whole[:, :, n] = x
    wanted, wanted_stats = attention(q, k, v, return_stats=True)
    stats = engine.nan(6, 4, 2, dtype=np.float32)
    got = attention(*(whole[:, :, n] for n in range(3)), out=whole[:, :, 3], stats=stats)
    assert got[1] is stats
    np.testing.assert_array_equal(engine.get(whole[:, :, 3]), engine.get(wanted))
    np.testing.assert_array_equal(engine.get(stats), engine.get(wanted_stats))
    with pytest.raises(ValueError, match="out overlaps q"):
        attention(q, k, v, out=q)


def test_keys_with_stride_0(engine):
    """Keys and values that are broadcast over the batch give the bits of dense ones."""
    q, k, v = arrays(engine)
    wide = [engine.xp.broadcast_to(x[..., :1], x.shape) for x in (k, v)]
    assert wide[0].strides[3] == 0
    dense = [engine.xp.asfortranarray(x) for x in wide]
    np.testing.assert_array_equal(engine.get(attention(q, *wide)), engine.get(attention(q, *dense)))


@pytest.mark.parametrize("sizes", [{"b": 0}, {"sq": 0}, {"hq": 0, "hkv": 0}, {"hq": 0}], ids=str)
def test_empty_inputs_give_empty_outputs(sizes, engine):
    """Empty arrays give empty arrays; a preallocated empty out may have any strides."""
    q, k, v = arrays(engine, **sizes)
    out, stats = attention(q, k, v, return_stats=True)
    assert out.shape == q.shape
    assert stats.shape == (q.shape[2], q.shape[1], q.shape[3])
    assert explain(q, k, v)
    given = engine.xp.empty(q.shape, q.dtype)
    assert attention(q, k, v, out=given) is given


def test_nan_and_infinities_stay_in_their_rows():
    """They give no warning, and affect only their own rows."""
    q, k, v = arrays()
    q[:, 1, 2, 0] = np.nan
    q[:, 2, 3, 1] = np.inf
    out = attention(q, k, v)
    assert np.isnan(out[:, 1, 2, 0]).all()
    bad = np.zeros(out.shape, bool)
    bad[:, 1, 2, 0] = bad[:, 2, 3, 1] = True
    assert np.isfinite(out[~bad]).all()


def test_scores_beyond_float16_are_finite(engine):
    """Scores are float32, so they may exceed the range of float16."""
    q, k, v = (100 * x for x in arrays(dtype="float16"))
    truth, _ = reference.attention(q, k, v)
    np.testing.assert_allclose(
        engine.get(attention(*engine.put((q, k, v)))).astype(float), truth, atol=0.5 if engine.on_cudnn else 0.2
    )


def test_explain_lists_the_steps():
    """A printed report shows the problem, every step with its formula, and the engine; explain raises what the call raises."""
    q, k, v = arrays(dtype="float16")
    report = explain(q, k, v, causal=True, return_stats=True)
    assert report
    assert report.plan is None
    for words in ("GQA, 2 query heads", "S = Q Kᵀ", "visible = i ≥ j", "O = P V", "output stats", "runs on the CPU"):
        assert words in str(report)
    report = explain(q, k, v, causal=True, backward=True, deterministic=True)
    assert report.workspace == 0
    for words in ("deterministic backward attention", "dV = Pᵀ dO", "dK = dSᵀ Q", "dQ = dS K", "runs on the CPU"):
        assert words in str(report)
    with pytest.raises(ValueError, match="head dims"):
        explain(q, k[:8], v)


def test_the_public_names_are_these():
    """A new public name is a decision; each is there."""
    called = [
        "BlockMask", "KVCache", "Rope", "__version__", "alibi_slopes", "apply_rope", "attention", "attention_backward",
        "attention_jvp", "attention_vjp", "block_mask", "cu_seqlens_with_gaps", "dropout_mask", "explain", "explain_function",
        "get_plan_cache", "jvp_problems", "merge", "merge_backward", "page_table_from_lists", "prepare", "problem",
        "shared_prefix_attention", "supported", "tree_depths",
        "tree_mask",
        "weight_entropy", "weight_sums", "weight_sums_problems", "widen",
    ]  # fmt: skip
    assert sorted(cupy_sdpa.__all__) == called
    assert dir(cupy_sdpa) == sorted([*called, *TYPES, *MODULES])
    assert all(hasattr(cupy_sdpa, name) for name in dir(cupy_sdpa))


def test_the_help_of_the_package_lists_every_name():
    """Its first screen is an index of the functions, classes and modules."""
    assert set(dir(cupy_sdpa)) - {"__version__"} <= set(re.findall(r"\w+", cupy_sdpa.__doc__))


@pytest.mark.parametrize(
    "imported",
    ["cupy_sdpa", pytest.param("cupy_sdpa, cupy_sdpa.check, cupy_sdpa.core.cudnn_engine.plan_cache", marks=pytest.mark.slow)],
)
def test_a_new_process_finds_the_public_names(imported):
    """dir() lists these and the public modules only, which are imported on first use."""
    code = f"import {imported}; print(*dir(cupy_sdpa)); print(*(getattr(cupy_sdpa, n).__name__ for n in {MODULES})); "
    code += "print(hasattr(cupy_sdpa, 'nonsense'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names, modules, nonsense = done.stdout.splitlines()
    assert names.split() == sorted([*cupy_sdpa.__all__, *TYPES, *MODULES])
    assert modules.split() == [f"cupy_sdpa.{name}" for name in MODULES]
    assert nonsense == "False"


#: Functions that take the options, and the arguments that each takes by position.
FUNCTIONS = {
    "attention": (attention, "q k v"), "attention_backward": (cupy_sdpa.attention_backward, "dout q k v out stats"),
    "attention_vjp": (cupy_sdpa.attention_vjp, "q k v"), "attention_jvp": (cupy_sdpa.attention_jvp, "q k v dq dk dv"),
    "explain": (explain, "q k v"), "prepare": (cupy_sdpa.prepare, "q k v"), "problem": (cupy_sdpa.problem, "q k v"),
    "widen": (cupy_sdpa.widen, "q k v dq dk dv"), "fp8.attention": (cupy_sdpa.fp8.attention, "q k v"),
}  # fmt: skip


@pytest.fixture(params=FUNCTIONS)
def function_and_arguments(request):
    """A function, and valid arguments by their names."""
    function, names = FUNCTIONS[request.param]
    x = np.ones((4, 1, 5, 1), np.float32, order="F")
    x = cupy_sdpa.fp8.quantize(x) if request.param == "fp8.attention" else x
    given = dict.fromkeys(names.split(), x)
    return function, given | {"stats": np.ones((5, 1, 1), np.float32, order="F")} if "stats" in given else given


def test_names_of_other_libraries_are_answered_with_ours(function_and_arguments):
    """By every function that takes the options; the message names options that exist."""
    function, given = function_and_arguments
    if function is cupy_sdpa.widen:  # it ignores the options that do not select the form
        return
    known = {*inspect.signature(attention).parameters, "Skv", "Sq", "B"}
    for name in OTHER_NAMES.keys() - inspect.signature(function).parameters.keys():
        with pytest.raises(TypeError, match=f"there is no option {name}: ") as found:
            function(**(given if name not in ("query", "key", "value") else {}), **{name: True})
        if function is attention:
            assert set(re.findall(r"\b(\w+)=", str(found.value))) <= known


@pytest.mark.parametrize("options", [{}, {"compute_dtype": "float16"}, {"block_mask": 1}], ids=str)
def test_positional_masks_are_answered_with_the_option(function_and_arguments, options):
    """By every function that takes the options, with any other options; one error is printed."""
    function, given = function_and_arguments
    *names, last = given
    words = (
        f"^{len(given) + 1} arguments are passed by position; only {', '.join(names)} and {last} can be; .* mask=, .* bias=$"
    )
    with pytest.raises(TypeError, match=words) as found:
        function(*given.values(), np.ones((5, 5, 1, 1), bool), **options)
    assert found.value.__context__ is None or found.value.__suppress_context__


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_arrays_by_names_of_other_libraries(function_and_arguments, name):
    """The message names ours, if all arrays are passed by name, and if q is passed by position."""
    function, given = function_and_arguments
    others = {other: x for other, x in given.items() if other != name[0]}
    text = f"^there is no option {name}: pass q, k and v by position, or as q=, k= and v=$"
    with pytest.raises(TypeError, match=text):
        function(**others, **{name: given[name[0]]})
    if name != "query" and next(iter(given)) == "q":
        with pytest.raises(TypeError, match=text):
            function(others.pop("q"), **others, **{name: given[name[0]]})


@pytest.mark.parametrize("missing", ["k", "v"])
def test_missing_arrays_are_named(function_and_arguments, missing):
    """A TypeError names the array that is not passed."""
    function, given = function_and_arguments
    words = f"{missing} is not passed|missing 1 required .*'{missing}'|k and v are required|{missing} is None"
    with pytest.raises(TypeError, match=words):
        function(**{name: x for name, x in given.items() if name != missing})


@pytest.mark.parametrize("name", ["scaled_dot_product_attention", "flash_attn_func", "flex_attention"])
def test_functions_of_other_libraries_are_answered_with_ours(name):
    """An AttributeError, and the ImportError of ``from cupy_sdpa import ...``, name the function of this package."""
    with pytest.raises(AttributeError, match=rf"no attribute '{name}'; use attention\(q, k, v\) instead"):
        getattr(cupy_sdpa, name)
    with pytest.raises(ImportError, match=r"use attention\(q, k, v\) instead"):
        exec(f"from cupy_sdpa import {name}")
    assert not hasattr(cupy_sdpa, name)


@pytest.mark.parametrize("dtype", ["f2", "half", np.float16, np.dtype("float16")], ids=str)
def test_a_dtype_has_many_names(dtype):
    """Shapes accept every spelling of a dtype that numpy accepts."""
    assert cupy_sdpa.problem(*[(64, 2, 128, 1)] * 3, dtype=dtype).dtype == "float16"
