"""Arrays of numpy, lists and tuples among CuPy arrays: TypeError before anything is allocated or launched, in every public call.

With ``engine="cupy"`` integers that the host reads may be lists; the result then equals the result of CuPy arrays.
"""

import fake_cupy
import numpy as np
import pytest
from mistakes import host

import cupy_sdpa
from cupy_sdpa import fp8, nnlib, parallel, zoo

#: What is passed instead of a CuPy array.
FORMS = {
    "a numpy array": lambda x: x,
    "a list": lambda x: x.tolist(),
    "a tuple": lambda x: tuple(x.tolist()),
}
#: Integers that the CPU and ``engine="cupy"`` also read from lists.
LISTED = {"seq_lens_q", "seq_lens_kv", "page_table", "cu_seqlens_q", "cu_seqlens_kv"}
#: Options of all calls, except arrays.
VARIANTS = {
    "cuDNN": {},
    "converted": {"compute_dtype": "bfloat16"},
    "layout": {"layout": "bshd"},
    "block mask": {"block_mask": cupy_sdpa.block_mask(zoo.causal, 6, 6)},
    "CuPy": {"engine": "cupy"},
}


def normal(*shape, dtype=np.float16):
    return np.asfortranarray(np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype))


def integers(*values, dtype=np.int32):
    return np.array(values, dtype)


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype, order="F")


Q = normal(16, 4, 6, 3)
PACKED = {name: normal(16, 4, 11) for name in "qkv"}
STARTS = {"cu_seqlens_q": integers(0, 5, 5, 11), "cu_seqlens_kv": integers(0, 5, 5, 11)}
LONGEST = {"max_seqlen_q": 6, "max_seqlen_kv": 6}
PAGES = {"page_table": integers([3, 0, 5], [1, 4, 2]), "seq_lens_kv": integers(5, 8, 6)}
POOL = {"q": Q, "k": normal(16, 4, 4, 6), "v": normal(16, 4, 4, 6)}
DENSE = {"q": Q, "k": Q, "v": Q}
ONES = {"stats": ones(6, 4, 3), "sinks": ones(4), "mask": ones(6, 6, 1, 3, dtype=bool)}
#: An FP8 array, which a call gets with a factor of 1.
FP8 = ones(16, 4, 6, 3, dtype=np.uint8)
#: The arrays of options, and the options that they need.
OPTIONS = {
    "mask": ({"mask": ONES["mask"]}, {}),
    "bias": ({"bias": normal(6, 6, 4, 3)}, {}),
    "lengths": ({"seq_lens_q": integers(6, 3, 0), "seq_lens_kv": integers(6, 3, 1)}, {}),
    "slopes": ({"alibi_slopes": ONES["sinks"]}, {"causal": True}),
    "sinks": ({"sinks": ONES["sinks"]}, {}),
    "tensors": ({"tensors['slopes']": ones(4)}, {"score_mod": zoo.alibi}),
    "seeds": ({"seed": integers(3, dtype=np.int64), "offset": integers(4, dtype=np.int64)}, {"dropout_p": 0.25}),
}


def backward(dout, q, k, v, out, stats, **options):
    return cupy_sdpa.attention_backward(dout, q, k, v, out, stats, **options)


def pulled_back(dout, q, k, v, **options):
    out, pullback = cupy_sdpa.attention_vjp(q, k, v, **options)
    return out, *pullback(dout)


def prepared(q, k, v, **options):
    return cupy_sdpa.prepare(q, k, v, **options)(q, k, v)


def explained(q, k, v, **options):
    cupy_sdpa.explain(q, k, v, **options)
    return ()


def in_fp8(q, k, v, **options):
    return fp8.attention(q, k, v, out_dtype="float16", **options)


def of_a_group(q, k, v, **options):
    group = parallel.context_parallel(parallel.Loopback(1).members[0])
    return group.attention(q, k, v, **options)


def with_prefix(q, k, v, **options):
    return cupy_sdpa.shared_prefix_attention(q, k, v, 0, **options)


def merged(**arrays):
    return cupy_sdpa.merge([arrays["outs[0]"]], [arrays["stats[0]"]], sinks=arrays["sinks"], out=arrays["out"])


def rotated(x, **lengths):
    return cupy_sdpa.apply_rope(x, cupy_sdpa.Rope(16), **lengths)


def of_a_tree(parents, k, **options):
    return list(cupy_sdpa.tree_mask(parents, k, **options)["tensors"].values())


GRADIENTS = {"dout": Q, **DENSE, "out": Q, "stats": ONES["stats"]}
FEATURES = {name: normal(16, 6, 3) for name in "qkv"}
#: The calls with options of dense arrays.
WITH_OPTIONS = {
    "attention": (cupy_sdpa.attention, DENSE),
    "attention_backward": (backward, GRADIENTS),
    "attention_vjp": (pulled_back, {"dout": Q, **DENSE}),
    "attention_jvp": (cupy_sdpa.attention_jvp, {**DENSE, "dq": Q, "dk": Q, "dv": Q}),
    "attention_jvp of v": (cupy_sdpa.attention_jvp, {**DENSE, "dv": Q}),
    "weight_sums": (cupy_sdpa.weight_sums, {"q": Q, "k": Q}),
    "weight_entropy": (cupy_sdpa.weight_entropy, {"q": Q, "k": Q}),
    "prepare": (prepared, DENSE),
    "explain": (explained, DENSE),
    "fp8.attention": (in_fp8, dict.fromkeys("qkv", FP8)),
    "ContextParallel.attention": (of_a_group, DENSE),
}
#: Calls with the arrays that they take, and other arguments.
OTHERS = {
    "attention of packed arrays": (cupy_sdpa.attention, {**PACKED, **STARTS}, LONGEST),
    "attention_vjp of packed arrays": (pulled_back, {"dout": PACKED["q"], **PACKED, **STARTS}, LONGEST),
    "attention_jvp of packed arrays": (cupy_sdpa.attention_jvp, {**PACKED, **STARTS, "dv": PACKED["q"]}, LONGEST),
    "attention of pages": (cupy_sdpa.attention, {**POOL, **PAGES}, {}),
    "attention into arrays": (cupy_sdpa.attention, {**DENSE, "out": Q.copy("F"), "stats": ONES["stats"].copy("F")}, {}),
    "attention_backward into arrays": (backward, {**GRADIENTS, **{name: Q.copy("F") for name in ("dq", "dk", "dv")}}, {}),
    "attention_jvp into arrays": (cupy_sdpa.attention_jvp, {**DENSE, "dv": Q, "out": Q.copy("F"), "dout": Q.copy("F")}, {}),
    "weight_sums of pages": (cupy_sdpa.weight_sums, {"q": Q, "k": POOL["k"], **PAGES}, {}),
    "shared_prefix_attention": (with_prefix, {**POOL, **PAGES}, {}),
    "dropout_mask": (cupy_sdpa.dropout_mask, {"q": Q, "k": Q, "seed": integers(3, dtype=np.int64)}, {"dropout_p": 0.25}),
    "dropout_mask of packed arrays": (
        cupy_sdpa.dropout_mask,
        {"q": PACKED["q"], "k": PACKED["k"], **STARTS},
        {"dropout_p": 0.25, "seed": 1, **LONGEST},
    ),
    "merge": (merged, {"outs[0]": Q, "stats[0]": ONES["stats"], "sinks": ONES["sinks"], "out": Q.copy("F")}, {}),
    "apply_rope": (rotated, {"x": Q, "seq_lens_kv": integers(6, 7, 8), "seq_lens_q": integers(6, 3, 0)}, {}),
    "apply_rope of packed arrays": (rotated, {"x": PACKED["q"], "cu_seqlens_q": STARTS["cu_seqlens_q"]}, {}),
    "page_table_from_lists": (
        cupy_sdpa.page_table_from_lists,
        {"indptr": integers(0, 2, 3), "indices": integers(1, 0, 2), "last_page_len": integers(4, 1)},
        {"page_size": 4, "max_pages": 2},
    ),
    "cu_seqlens_with_gaps": (cupy_sdpa.cu_seqlens_with_gaps, {"starts": integers(0, 5, 11), "lengths": integers(3, 6, 0)}, {}),
    "tree_mask": (of_a_tree, {"k": Q, "seq_lens_kv": integers(6, 6, 6), "seq_lens_q": integers(2, 2, 2)}, {"parents": [-1, 0]}),
    "fp8.quantize": (fp8.quantize, {"x": Q, "lengths": integers(6, 3, 0)}, {}),
    "fp8.quantize_qkv": (fp8.quantize_qkv, {**DENSE, "seq_lens_kv": integers(6, 3, 1)}, {}),
    "widen": (cupy_sdpa.widen, {**DENSE, "dq": Q, "dk": Q, "dv": Q}, {}),
    "nnlib.dot_product_attention": (
        nnlib.dot_product_attention,
        {**FEATURES, "bias": normal(6, 6, 4, 3), "mask": ONES["mask"]},
        {"nheads": 4},
    ),
    "nnlib.dot_product_attention with alpha": (
        nnlib.dot_product_attention,
        {**FEATURES, "bias": normal(6, 6, 4, 3), "mask": ONES["mask"]},
        {"nheads": 4, "alpha": True},
    ),
    "nnlib.dot_product_attention_scores": (
        nnlib.dot_product_attention_scores,
        {"q": Q, "k": Q, "bias": normal(6, 6, 4, 3), "mask": ONES["mask"]},
        {},
    ),
    "nnlib.make_padding_mask": (nnlib.make_padding_mask, {"lengths": integers(6, 3)}, {"kv_len": 6}),
}


def on_gpu(xp, arrays, *, variant=""):
    """The arrays on the GPU, with the axes and the dtypes of a variant."""
    found = {}
    for name, x in arrays.items():
        if variant == "converted" and x.dtype == np.float16 and name != "bias":
            x = x.astype(np.float32)
        x = xp.asarray(np.ascontiguousarray(x.T) if variant == "layout" else x)
        found[name] = fp8.Fp8Array(x, xp.asarray(ones(1)), scale=xp.asarray(ones(1))) if x.dtype == np.uint8 else x
    return found


def called(function, arrays, options):
    """A call with arrays; arrays in ``tensors`` have the names that messages use."""
    own = {name: x for name, x in arrays.items() if not name.startswith("tensors")}
    tensors = {name[9:-2]: x for name, x in arrays.items() if name.startswith("tensors")}
    return function(**own, **options, **({"tensors": tensors} if tensors else {}))


def check_mixed(xp, function, arrays, options):
    """Every array but q in host memory raises TypeError, which names it and the fix; nothing is allocated or launched.

    Lengths in lists are right with ``engine="cupy"``.
    """
    try:
        wanted, error = called(function, arrays, options), TypeError
    except cupy_sdpa.Unsupported:  # so is the call of mixed arrays, if it is not refused before
        wanted, error = None, (TypeError, cupy_sdpa.Unsupported)
    xp.cuda.Device().synchronize()
    for name, x in [*arrays.items()][1:]:
        for form, convert in FORMS.items():
            if isinstance(x, fp8.Fp8Array):
                continue  # its constructor has rows in the table of mistakes
            mixed = arrays | {name: convert(x.get(order="F" if x.flags.f_contiguous else "C"))}
            if options.get("engine") == "cupy" and name in LISTED and form != "a numpy array" and wanted is not None:
                found = called(function, mixed, options)
                assert all(np.array_equal(a, b) for a, b in zip(flat(found), flat(wanted), strict=True)), (name, form)
                continue
            before = len(fake_cupy.DEVICE.launches)
            with xp.cuda.using_allocator(refused), pytest.raises(error) as raised:
                called(function, mixed, options)
            assert len(fake_cupy.DEVICE.launches) == before, (name, form)
            if raised.type is cupy_sdpa.Unsupported:
                continue
            assert name in str(raised.value), (name, form)
            assert "cupy.asarray" in str(raised.value) or "CuPy" in str(raised.value), (name, form)


def refused(size):
    """An allocator of calls that must not allocate."""
    raise AssertionError(f"{size} bytes are allocated")


def flat(found):
    """The arrays of a result on the host."""
    return [host(x) for x in (found if isinstance(found, tuple) else (found,)) if x is not None]


@pytest.mark.in_turn(5)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_options(name, option, variant, fake):
    """Arrays of options, in calls of dense arrays."""
    function, arrays = WITH_OPTIONS[name]
    if name == "fp8.attention" and variant == "converted":
        return  # there is no such option
    passed, needed = OPTIONS[option]
    own = on_gpu(fake, {**arrays, **passed}, variant=variant)
    check_mixed(fake, function, own, {**needed, **VARIANTS[variant]})


@pytest.mark.parametrize("name", OTHERS)
def test_other_calls(name, fake):
    """Arrays of other calls."""
    function, arrays, options = OTHERS[name]
    check_mixed(fake, function, on_gpu(fake, arrays), options)


def test_append(fake):
    """A cache of CuPy arrays takes CuPy arrays only."""
    cache = cupy_sdpa.KVCache(16, 4, pages=24, batch=3, page_size=4, dtype="float16")
    cache.append(*(fake.asarray(Q),) * 2)
    check_mixed(fake, cache.append, {"layer": 0, "k": fake.asarray(Q), "v": fake.asarray(Q)}, {})
