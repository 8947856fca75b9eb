# mypy: disable-error-code="arg-type, call-overload, dict-item"
# The tables of mistakes pass wrong types on purpose.
"""The public call on numpy arrays: results, preallocated outputs, and error messages."""

import pydoc
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from cases import DTYPES, LAYOUTS

import cupy_sdpa
from cupy_sdpa import attention, attention_backward, explain, reference
from cupy_sdpa.calls import options as call_options


def arrays(d=16, hq=4, hkv=2, sq=6, skv=7, b=2, dv=None, dtype="float32"):
    """Random q, k and v in Fortran order."""
    rng = np.random.default_rng(0)
    shapes = (d, hq, sq, b), (d, hkv, skv, b), (dv or d, hkv, skv, b)
    return tuple(np.asfortranarray(rng.standard_normal(s).astype(DTYPES[dtype])) for s in shapes)


def test_results_are_in_fortran_order_and_of_the_inputs_dtype():
    """New arrays are in Fortran order; stats are float32 with every dtype."""
    for dtype in DTYPES:
        q, k, v = arrays(dtype=dtype, dv=24)
        out, stats = attention(q, k, v, return_stats=True)
        assert (out.shape, out.dtype, out.flags.f_contiguous) == ((24, 4, 6, 2), q.dtype, True)
        assert (stats.shape, stats.dtype, stats.flags.f_contiguous) == ((6, 4, 2), np.float32, True)


def test_stats_are_the_natural_log_sum_exp():
    """exp(scores - stats) sums to one over the keys."""
    q, k, v = arrays(hkv=4, dtype="float64")
    _, stats = attention(q, k, v, return_stats=True)
    scores = np.einsum("dhib,dhjb->jihb", q, k) / 4
    np.testing.assert_allclose(np.exp(scores - stats).sum(axis=0), 1, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_changes_nothing(layout):
    """Views with any strides give the same bits as dense arrays."""
    q, k, v = arrays(hkv=4, sq=7)
    turned = [LAYOUTS[layout](x) for x in (q, k, v)]
    np.testing.assert_array_equal(attention(*turned, causal=True), attention(q, k, v, causal=True))


def test_preallocated_outputs_are_written_and_returned():
    """out= and stats= may have any strides if the layout is named; the same objects are returned."""
    q, k, v = arrays()
    wanted, wanted_stats = attention(q, k, v, return_stats=True)
    out = np.full((16, 4, 6, 2), np.nan, np.float32)
    stats = np.full((6, 4, 2), np.nan, np.float32)
    got = attention(q, k, v, out=out, stats=stats, layout="dhsb")
    assert got[0] is out
    assert got[1] is stats
    np.testing.assert_array_equal(out, wanted)
    np.testing.assert_array_equal(stats, wanted_stats)


def test_inputs_are_unchanged():
    """No bit of q, k or v changes, in any dtype."""
    for dtype in DTYPES:
        inputs = arrays(dtype=dtype)
        before = [x.tobytes() for x in inputs]
        attention(*inputs, causal=True)
        assert [x.tobytes() for x in inputs] == before


@pytest.mark.parametrize(
    ("options", "words"),
    [({"scale": True}, "scale is a bool"), ({"softcap": np.True_}, "softcap is a bool")],
    ids=["scale", "softcap"],
)
def test_booleans_are_not_numbers(options, words):
    """True in place of a number raises."""
    with pytest.raises(TypeError, match=words):
        attention(*arrays(), **options)


@pytest.mark.parametrize("name", ["deterministic", "return_dbias", "return_dsinks"])
def test_flags_must_be_booleans(name):
    """A string is not accepted as True."""
    q, k, v = arrays()
    out, stats = attention(q, k, v, return_stats=True)
    with pytest.raises(TypeError, match=f"{name} is 'x'; it must be True or False"):
        attention_backward(out, q, k, v, out, stats, **{name: "x"})


def test_causal_means_top_left():
    """True and "top_left" are equivalent: query i attends to keys 0 to i, also with more queries than keys."""
    q, k, v = arrays(sq=9, skv=5)
    out = attention(q, k, v, causal=True)
    np.testing.assert_array_equal(out, attention(q, k, v, causal="top_left"))
    np.testing.assert_allclose(out[:, 0, 0], v[:, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(out[:, :, 5:], attention(q, k, v)[:, :, 5:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [0.3, -2, 0, np.float32(0.25), np.float64(1)])
def test_scale_may_be_any_real_number(scale):
    """Python and numpy numbers; with 0 all keys have equal weight."""
    q, k, v = arrays(dtype="float64")
    np.testing.assert_allclose(attention(q, k, v, scale=scale), reference.attention(q, k, v, scale=float(scale))[0], atol=1e-12)


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({"b": 0}, (16, 4, 6, 0)),
        ({"sq": 0}, (16, 4, 0, 2)),
        ({"hq": 0, "hkv": 0}, (16, 0, 6, 2)),
        ({"hq": 0}, (16, 0, 6, 2)),
    ],
    ids=["no batch", "no queries", "no heads", "no query heads"],
)
def test_empty_inputs_give_empty_outputs(sizes, shape):
    """Empty arrays give empty arrays."""
    out, stats = attention(*arrays(**sizes), return_stats=True)
    assert out.shape == shape
    assert stats.shape == (shape[2], shape[1], shape[3])
    assert explain(*arrays(**sizes))


def test_an_empty_out_may_have_any_strides():
    """numpy gives empty arrays strides of 0, although no elements share memory."""
    q, k, v = arrays(sq=0)
    out = np.empty((16, 4, 0, 2), np.float32)
    assert attention(q, k, v, out=out) is out


def test_no_keys_give_zero():
    """A query without keys gives output 0 and log-sum-exp -inf."""
    out, stats = attention(*arrays(skv=0), return_stats=True)
    assert (out == 0).all()
    assert out.shape == (16, 4, 6, 2)
    assert (stats == -np.inf).all()


def test_infinite_scores_give_no_warning():
    """Infinities and NaN in the inputs give no warning, and affect only their own rows."""
    q, k, v = arrays()
    q[:, 1, 2, 0] = np.nan
    q[:, 2, 3, 1] = np.inf
    out = attention(q, k, v)
    assert np.isnan(out[:, 1, 2, 0]).all()
    bad = np.zeros(out.shape, bool)
    bad[:, 1, 2, 0] = bad[:, 2, 3, 1] = True
    assert np.isfinite(out[~bad]).all()


def test_scores_beyond_float16_are_finite():
    """Scores are float32, so they may exceed the range of float16."""
    q, k, v = (100 * x for x in arrays(dtype="float16"))
    truth, _ = reference.attention(q, k, v)
    np.testing.assert_allclose(attention(q, k, v).astype(float), truth, atol=0.2)


BAD = {
    "rank": (lambda q, k, v: attention(q[..., 0], k, v), ValueError, r"q has 3 dimensions .*\[\.\.\., None\]"),
    "no_rank": (lambda q, k, v: attention(q[0, 0, 0, 0, ...], k, v), ValueError, r"q has 0 dimensions"),
    "head_dim": (lambda q, k, v: attention(q, k[:8], v), ValueError, r"head dims .* q and k differ, 16 and 8"),
    "batch_k": (lambda q, k, v: attention(q, k[..., :1], v), ValueError, r"batch sizes .* q and k differ, 2 and 1"),
    "batch_v": (lambda q, k, v: attention(q, k, v[..., :1]), ValueError, r"batch sizes .* q and v differ, 2 and 1"),
    "heads_kv": (lambda q, k, v: attention(q, k, v[:, :1]), ValueError, r"heads .* k and v differ, 2 and 1"),
    "lengths_kv": (lambda q, k, v: attention(q, k, v[:, :, :5]), ValueError, r"lengths .* k and v differ, 7 and 5"),
    "group": (lambda q, k, v: attention(q[:, :3], k, v), ValueError, r"q has 3 heads and k, v have 2: 3 must be a multiple of 2"),
    "no_kv_heads": (lambda q, k, v: attention(q, k[:, :0], v[:, :0]), ValueError, r"q has 4 heads and k, v have 0"),
    "no_head_dim": (lambda q, k, v: attention(q[:0], k[:0], v), ValueError, r"head dim 0"),
    "mixed_dtypes": (lambda q, k, v: attention(q, k.astype("f8"), v), TypeError, r"k is float64 and q is float32; the dtypes must be equal"),
    "integers": (lambda q, k, v: attention(*(x.astype("i4") for x in (q, k, v))), TypeError, r"q is int32; attention takes float16"),
    "complex": (lambda q, k, v: attention(*(x.astype("c8") for x in (q, k, v))), TypeError, r"q is complex64"),
    "lists": (lambda q, k, v: attention(q.tolist(), k, v), TypeError, r"q is a list; .* numpy.asarray"),
    "masked_array": (lambda q, k, v: attention(np.ma.array(q), k, v), TypeError, r"MaskedArray"),
    "none": (lambda q, k, v: attention(q, None, v), TypeError, r"k is None"),
    "out_shape": (lambda q, k, v: attention(q, k, v, out=np.empty((16, 4, 5, 2), "f4")), ValueError, r"\(16, 4, 5, 2\); it must be \(16, 4, 6, 2\)"),
    "out_dtype": (lambda q, k, v: attention(q, k, v, out=np.empty(q.shape, "f8")), TypeError, r"out is float64; it must be float32"),
    "out_is_q": (lambda q, k, v: attention(q, k, v, out=q), ValueError, r"out overlaps q"),
    "out_shares_v": (lambda q, k, v: attention(v[:, :, :6], k[:, :, :6], v[:, :, :6], out=v[:, :, 1:]), ValueError, r"out overlaps"),
    "out_onto_itself": (
        lambda q, k, v: attention(q, k, v, out=np.broadcast_to(np.empty((16, 1, 6, 2), "f4"), q.shape)),
        ValueError,
        r"elements share memory",
    ),
    "stats_shape": (lambda q, k, v: attention(q, k, v, stats=np.empty((4, 6, 2), "f4")), ValueError, r"stats has shape \(4, 6, 2\); it must be \(6, 4, 2\)"),
    "stats_dtype": (lambda q, k, v: attention(q, k, v, stats=np.empty((6, 4, 2))), TypeError, r"stats is float64; it must be float32"),
    "nan_scale": (lambda q, k, v: attention(q, k, v, scale=float("nan")), ValueError, r"scale is nan.* 1/sqrt\(head_dim\) = 0.25"),
    "infinite_scale": (lambda q, k, v: attention(q, k, v, scale=np.inf), ValueError, r"scale is inf"),
    "scale_beyond_float32": (lambda q, k, v: attention(q, k, v, scale=1e39), ValueError, r"scale is 1e\+39; it must be finite in float32"),
    "array_scale": (lambda q, k, v: attention(q, k, v, scale=np.ones(3)), TypeError, r"scale is a ndarray; .* float"),
    "string_scale": (lambda q, k, v: attention(q, k, v, scale="1"), TypeError, r"scale is a str"),
    "causal_word": (lambda q, k, v: attention(q, k, v, causal="bottom"), ValueError, r"causal is 'bottom'; it must be"),
    "causal_number": (lambda q, k, v: attention(q, k, v, causal=2), ValueError, r"causal is 2"),
    "float_mask": (lambda q, k, v: attention(q, k, v, mask=np.zeros((6, 6, 1, 1), "f4")), TypeError, r"mask is float32; it must be bool: .*added to the scores.*bias="),
    "integer_mask": (lambda q, k, v: attention(q, k, v, mask=np.ones((6, 6, 1, 1), "i8")), TypeError, r"mask is int64; it must be bool: convert with \.astype\('bool'\)"),
    "bool_bias": (lambda q, k, v: attention(q, k, v, bias=np.ones((6, 6, 1, 1), bool)), TypeError, r"bias is bool; .*passed as mask=$"),
    "bool_lengths": (lambda q, k, v: attention(q, k, v, seq_lens_kv=np.ones((2, 6), bool)), TypeError, r"seq_lens_kv is bool; .*number of True.*mask=$"),
    "int64_lengths": (lambda q, k, v: attention(q, k, v, seq_lens_kv=np.array([6, 6])), TypeError, r"seq_lens_kv is int64; it must be int32: convert with \.astype\('int32'\)$"),
    "positional_mask": (lambda q, k, v: attention(q, k, v, np.ones((6, 6, 1, 1), bool)), TypeError, r"4 arguments are passed by position.*mask=.*bias="),
    "names_of_pytorch": (lambda q, k, v: attention(query=q, key=k, value=v), TypeError, r"there is no option (query|key|value): pass q, k and v"),
    "nothing": (lambda q, k, v: attention(q, causal=True), TypeError, r"q, k and v are required"),
    "fp8": (lambda q, k, v: attention(q, k, v, compute_dtype="float8_e4m3fn"), ValueError, r"compute_dtype is 'float8_e4m3fn'.*attention_vjp.*fp8\.quantize_qkv"),
    "fp8_vjp": (lambda q, k, v: cupy_sdpa.attention_vjp(q, k, v, compute_dtype="fp8"), ValueError, r"compute_dtype is 'fp8'; it must be 'float16' or 'bfloat16' or 'float8_e4m3fn' or"),
    "float_seed": (lambda q, k, v: attention(q, k, v, dropout_p=0.5, seed=1.5), TypeError, r"seed is 1.5; it must be an integer"),
    "bool_seed": (lambda q, k, v: attention(q, k, v, dropout_p=0.5, seed=True), TypeError, r"seed is True; it must be an integer"),
    "large_offset": (lambda q, k, v: attention(q, k, v, dropout_p=0.5, seed=1, offset=1 << 63), ValueError, r"offset is 9\d+; it must be a 64-bit integer"),
    "dbias_without_bias": (lambda q, k, v: cupy_sdpa.attention_vjp(q, k, v, return_dbias=True), ValueError, r"return_dbias is True and bias is None"),
    "dsinks_without_sinks": (lambda q, k, v: cupy_sdpa.attention_vjp(q, k, v, return_dsinks=True), ValueError, r"return_dsinks is True and sinks is None"),
    "unknown_option": (lambda q, k, v: attention(q, k, v, is_causal=True), TypeError, r"is_causal"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_raise(name):
    """The message contains the value and the requirement."""
    call, error, words = BAD[name]
    with pytest.raises(error, match=words):
        call(*arrays())


def test_interleaved_out_is_no_overlap():
    """An output that is interleaved with the inputs, but shares no element, is accepted."""
    whole = np.asfortranarray(np.random.default_rng(0).standard_normal((16, 2, 4, 6, 2), np.float32))
    q, k, v, out = (whole[:, :, i] for i in range(4))
    wanted = attention(*(x.copy(order="F") for x in (q, k, v)))
    assert attention(q, k, v, out=out) is out
    np.testing.assert_array_equal(out, wanted)


def test_explain_raises_what_the_call_raises():
    """Arguments that are not a valid problem raise the same error in explain()."""
    q, k, v = arrays()
    with pytest.raises(ValueError, match="head dims"):
        explain(q, k[:8], v)


def test_explain_lists_the_steps():
    """A printed report shows the problem, every step with its formula, and the engine."""
    q, k, v = arrays(dtype="float16")
    report = explain(q, k, v, causal=True, return_stats=True)
    text = str(report)
    assert report
    assert report.plan is None
    for words in (
        "GQA, 2 query heads per key/value head",
        "S = Q Kᵀ",
        "visible = i ≥ j",
        "O = P V",
        "output stats",
        "runs on the CPU",
    ):
        assert words in text


class FakeArray:
    """A fake CuPy array with the attributes that are read before any GPU work."""

    def __init__(self, shape=(64, 4, 8, 2), device=0):
        self.dtype, self.shape, self.ndim = np.dtype("float16"), shape, 4
        self.strides = np.empty(shape, np.float16, order="F").strides
        self.data = SimpleNamespace(ptr=1 << 20, device_id=device)


@pytest.fixture
def fake_cupy(monkeypatch):
    """A process whose CuPy arrays are FakeArrays."""
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=FakeArray))


@pytest.mark.usefixtures("fake_cupy")
def test_mixed_numpy_and_cupy_raises():
    """No array is transferred implicitly; the message names the type of each array."""
    with pytest.raises(TypeError, match=r"q is a CuPy array, k is a CuPy array, v is a numpy array.*cupy.asarray"):
        attention(FakeArray(), FakeArray(), np.empty((64, 4, 8, 2), np.float16))
    with pytest.raises(TypeError, match=r"out is a CuPy array"):
        attention(*arrays(), out=FakeArray())


@pytest.mark.usefixtures("fake_cupy")
def test_arrays_on_different_devices_raise():
    """The message names the device of each array."""
    with pytest.raises(ValueError, match=r"q on device 0, k on device 1, v on device 0"):
        attention(FakeArray(), FakeArray(device=1), FakeArray())


def test_the_public_names_are_these():
    """A new public name is a decision."""
    assert sorted(cupy_sdpa.__all__) == [
        "BlockMask", "CudnnError", "DiskCacheWarning", "KVCache", "OutOfPages", "Prepared", "Problem", "Pullback", "Report",
        "Unsupported", "__version__", "alibi_slopes", "attention", "attention_backward", "attention_jvp", "attention_vjp",
        "autotune", "block_mask", "dropout_mask", "explain", "get_plan_cache", "jvp_problems", "merge", "prepare", "problem",
        "shared_prefix_attention", "trace", "widen",
    ]  # fmt: skip
    assert all(hasattr(cupy_sdpa, name) for name in cupy_sdpa.__all__)


def test_dir_lists_public_names_only():
    """The names of __all__ and the public modules, in a new process and after other modules were imported."""
    public = sorted([*cupy_sdpa.__all__, "fp8", "layout", "nnlib", "parallel", "reference", "store", "zoo"])
    for code in ("import cupy_sdpa", "import cupy_sdpa, cupy_sdpa.check, cupy_sdpa.plans.plan_cache"):
        done = subprocess.run(
            [sys.executable, "-c", f"{code}; print(*dir(cupy_sdpa))"], capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == public


@pytest.mark.parametrize("name", ["fp8", "layout", "nnlib", "parallel", "reference", "store", "zoo"])
def test_public_modules_are_imported_on_first_use(name):
    """A new process that has imported the package alone finds them; an unknown name is an AttributeError."""
    code = f"import cupy_sdpa; print(cupy_sdpa.{name}.__name__); print(hasattr(cupy_sdpa, 'nonsense'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [f"cupy_sdpa.{name}", "False"]


#: Options of other libraries, and what the message names in their place.
OTHER_NAMES = {
    "enable_gqa": "k and v may have fewer heads than q", "is_causal": "causal=True", "attn_mask": r"mask= .*attn_mask\.T",
    "attn_bias": "bias=", "dropout": "dropout_p=", "window_size": "window=", "key_padding_mask": "seq_lens_kv=.*mask=",
    "softmax_scale": "scale=", "sm_scale": "scale=", "cu_seqlens_k": "cu_seqlens_kv=", "max_seqlen_k": "max_seqlen_kv=",
    "block_table": "page_table=", "block_tables": "page_table=.*transpose", "cache_seqlens": "seq_lens_kv=",
    "alibi": r"alibi_slopes=.*cupy_sdpa\.alibi_slopes", "attention_mask": "seq_lens_kv=.*mask=", "attn_logit_softcapping": "softcap=",
    "attn_scale": "scale=", "causal_mask": "causal=True", "cu_seqlens": "cu_seqlens_q= and cu_seqlens_kv=", "dropout_rate": "dropout_p=",
    "generate_stats": "return_stats=True", "key_value_seq_lengths": "seq_lens_kv=", "learnable_sink": "sinks=",
    "local_window_size": "window=", "logits_soft_cap": "softcap=", "max_seqlen": "max_seqlen_q= and max_seqlen_kv=",
    "p_dropout": "dropout_p=", "qkv_format": "layout=", "query_seq_lengths": "seq_lens_q=", "return_attn_probs": "return_stats=True",
    "return_lse": "return_stats=True", "seq_len_kv": "seq_lens_kv=", "seq_len_q": "seq_lens_q=", "seqused_k": "seq_lens_kv=",
    "sliding_window": r"window=.*\(n - 1, 0\)", "tensor_layout": "layout=", "use_causal_mask": "causal=True", "query": "q=, k= and v=", "key": "q=, k= and v=", "value": "q=, k= and v=",
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_names_of_other_libraries_are_answered_with_ours(name):
    """By every function that takes the options."""
    x = np.ones((4, 1, 5, 1), np.float32, order="F")
    for call in (attention, explain, cupy_sdpa.prepare, cupy_sdpa.attention_vjp, cupy_sdpa.problem):
        with pytest.raises(TypeError, match=f"there is no option {name}: .*{OTHER_NAMES[name]}"):
            call(x, x, x, **{name: True})
    assert set(OTHER_NAMES) <= set(call_options.OTHER_NAMES)
    named = set(re.findall(r"\b(\w+)=", " ".join(call_options.OTHER_NAMES.values())))
    assert named <= {*call_options.Options.__annotations__, "return_stats", "q", "k", "v"}


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


@pytest.mark.parametrize(
    "options", [{}, {"compute_dtype": "float16"}, {"block_mask": 1}], ids=["", "compute_dtype", "block_mask"]
)
def test_positional_masks_are_answered_with_the_option(function_and_arguments, options):
    """By every function that takes the options, whatever the other options are."""
    function, given = function_and_arguments
    *names, last = given
    words = f"^{len(given) + 1} arguments are passed by position; only {', '.join(names)} and {last} are; .* mask=, .* bias=$"
    with pytest.raises(TypeError, match=words) as found:
        function(*given.values(), np.ones((5, 5, 1, 1), bool), **options)
    assert found.value.__context__ is None or found.value.__suppress_context__  # one error is printed


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("first", [True, False])
def test_arrays_by_names_of_other_libraries(function_and_arguments, name, first):
    """All arrays are passed by name, or q is passed by position."""
    function, given = function_and_arguments
    own = name[0]
    position = [given["q"]] if first and own != "q" and next(iter(given)) == "q" else []
    others = {other: x for other, x in given.items() if other != own and not (position and other == "q")}
    with pytest.raises(TypeError, match=f"^there is no option {name}: pass q, k and v by position, or as q=, k= and v=$"):
        function(*position, **others, **{name: given[own]})


@pytest.mark.parametrize("missing", ["k", "v"])
def test_missing_arrays_are_named(function_and_arguments, missing):
    """A TypeError names the array that is not passed."""
    function, given = function_and_arguments
    words = (
        rf"{missing} is not passed|missing 1 required positional argument: '{missing}'|k and v are required|{missing} is None"
    )
    with pytest.raises(TypeError, match=words):
        function(**{name: x for name, x in given.items() if name != missing})


def test_errors_of_the_call_itself_are_unchanged():
    """An argument that is passed twice, and a TypeError inside the function, are not reported as something else."""
    x = np.ones((4, 1, 5, 1), np.float32, order="F")
    with pytest.raises(TypeError, match="multiple values for argument 'q'"):
        explain(x, x, x, q=x)
    with pytest.raises(TypeError, match="mask is float32; it must be bool"):
        explain(x, x, x, mask=x)


@pytest.mark.parametrize("call", [cupy_sdpa.attention_jvp, cupy_sdpa.widen])
def test_a_mask_in_place_of_a_tangent_is_answered_with_the_option(call):
    """The fourth argument by position is dq."""
    x = np.ones((4, 1, 5, 1), np.float32, order="F")
    with pytest.raises(TypeError, match=r"dq is bool and q is float32; .* pass a mask as mask=$"):
        call(x, x, x, np.ones((5, 5, 1, 1), bool))


@pytest.mark.parametrize("name", ["attn_mask", "attn_bias", "attention_mask", "key_padding_mask", "block_table"])
def test_remedies_name_the_axes_of_both_orders(name):
    """With a layout in C order the arrays of PyTorch are passed unchanged; a transposed square mask would be accepted."""
    x = np.ones((1, 5, 2, 4), np.float32)
    with pytest.raises(TypeError, match="with a layout in C order") as found:
        attention(x, x, x, layout="bshd", **{name: np.ones((5, 5), bool)})
    with pytest.raises(TypeError) as other:
        attention(x.T, x.T, x.T, **{name: np.ones((5, 5), bool)})
    assert str(found.value) == str(other.value)


def test_causal_none_is_false():
    """Wrappers pass it on."""
    q, k, v = arrays()
    np.testing.assert_array_equal(attention(q, k, v, causal=None), attention(q, k, v))
    np.testing.assert_array_equal(attention(q, k, v, causal=None, window=(2, 0)), attention(q, k, v, window=(2, 0)))


@pytest.mark.parametrize("name", ["scaled_dot_product_attention", "flash_attn_func", "flex_attention"])
def test_functions_of_other_libraries_are_answered_with_ours(name):
    with pytest.raises(AttributeError, match=rf"no attribute '{name}'; attention\(q, k, v\) takes its place"):
        getattr(cupy_sdpa, name)


def test_help_shows_every_option():
    """With its type and default, in place of **options."""
    text = pydoc.render_doc(attention, renderer=pydoc.plaintext)
    assert "causal: bool | Literal['top_left', 'bottom_right'] | None = False" in text.replace('"', "'")
    assert "**options" not in text.splitlines()[2]
    assert "(q: Array, k: Array, v: Array, *, return_stats" in text.splitlines()[2]


@pytest.mark.parametrize("name", ["out", "stats"])
def test_a_read_only_result_raises(name):
    """The call raises before anything is written; explain() raises, too."""
    x = np.ones((4, 1, 5, 1), np.float32, order="F")
    given = {"out": np.zeros_like(x), "stats": np.zeros((5, 1, 1), np.float32, order="F")}
    given[name].flags.writeable = False
    for call in (attention, explain):
        with pytest.raises(ValueError, match=f"{name} is read-only, but results are written to it"):
            call(x, x, x, **given)
    assert not any(array.any() for array in given.values())


@pytest.mark.parametrize(
    ("extra", "name"), [({"backward": True}, "backward"), ({"causal": True}, "causal"), ({"k": np.ones(1)}, "k")]
)
def test_a_problem_is_explained_alone(extra, name):
    """Other arguments beside a problem would be ignored, so they raise."""
    shape = (64, 2, 128, 1)
    asked = cupy_sdpa.problem(shape, shape, shape, dtype="float16")
    with pytest.raises(TypeError, match=f"a problem is given, and {name}"):
        explain(asked, **extra, gpu="H200", cudnn="9.19")


@pytest.mark.parametrize("options", [{"scale": -(10**400)}, {"softcap": 10**400}], ids=["scale", "softcap"])
def test_numbers_beyond_float64_raise(options):
    """With the package's own message, as for infinity."""
    x = np.ones((4, 1, 5, 1))
    with pytest.raises(ValueError, match="finite in float32"):
        attention(x, x, x, **options)


#: Wrong values of arguments, and the messages.
MISTAKES = {
    "causal": (lambda x: attention(x, x, x, causal=np.ones(3, bool)), "causal is array"),
    "return_stats": (lambda x: attention(x, x, x, return_stats=np.ones(3)), "return_stats is array"),
    "bucket": (lambda x: attention(x, x, x, bucket=np.ones(3)), "bucket is array"),
    "diagonal": (lambda x: attention(x, x, x, window=(1, 1, np.ones(3))), "window is .*its third entry must be"),
    "tensors": (lambda x: attention(x, x, x, score_mod=max, tensors={1: x}), "tensors has the key 1"),
    "rank": (lambda x: cupy_sdpa.problem((8,), (8,), (8,), dtype="float16"), r"q .*\(8,\).*it needs 4"),
    "cudnn": (lambda x: explain(cupy_sdpa.problem(x, x, x), gpu="h200", cudnn=9.19), "9.19 is not a string"),
    "gpu": (lambda x: explain(cupy_sdpa.problem(x, x, x), gpu=3), "gpu is 3; it must be a string"),
    "slopes": (lambda x: cupy_sdpa.alibi_slopes(2.0), "heads is 2.0; it must be an integer"),
    "layout": (lambda x: cupy_sdpa.layout.to_julia(x, None), "the layout is None; it must have the letters"),
    "compute_dtype": (
        lambda x: cupy_sdpa.nnlib.dot_product_attention(*[x[:, 0]] * 3, compute_dtype="float99"),
        "compute_dtype is 'float99'",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_wrong_types_raise_with_the_argument(name):
    """The message contains the argument's name and value."""
    call, words = MISTAKES[name]
    with pytest.raises((TypeError, ValueError), match=words):
        call(np.ones((8, 2, 5, 2), np.float16, order="F"))


@pytest.mark.parametrize("dtype", ["f2", "half", np.float16, np.dtype("float16")], ids=str)
def test_a_dtype_has_many_names(dtype):
    """Shapes accept every spelling of a dtype that numpy accepts."""
    shape = (64, 2, 128, 1)
    assert cupy_sdpa.problem(shape, shape, shape, dtype=dtype).dtype == "float16"
