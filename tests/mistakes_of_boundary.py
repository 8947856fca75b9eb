"""Mistakes with layouts, dtypes, buckets, engines and arrays of other libraries, and mistakes of other libraries' users."""

# mypy: ignore-errors
# (most mistakes are type errors)

import functools

import fake_libraries
import numpy as np
from mistakes import causal, output, row

import cupy_sdpa
from cupy_sdpa import (
    Unsupported,
    attention,
    attention_backward,
    attention_vjp,
    explain,
    fp8,
    layout,
    merge,
    nnlib,
    page_table_from_lists,
    prepare,
)

X = np.ones((2, 5, 3, 8))


def laid_out(name=None, x=X, **options):
    """A call of attention with itself in a layout."""
    return lambda _: attention(x, x, x, layout=name, **options)


LAYOUTS = [
    row("attention", f"{mistake}, with a layout", laid_out(letters, **options), ValueError, *words)
    for mistake, letters, options, *words in [
        ("a packed layout of four axes", "thd", {}, "q has 4 axes (2, 5, 3, 8); with layout='thd' it must have 3: (total, heads"),
        ("a mask of three queries and three keys", "bhsd", {"mask": np.ones((3, 3, 5, 2), bool)}, "pass mask.T"),
        ("an out of other axes", "bhsd", {"out": np.ones((2, 3, 5, 8))},
         "out has shape (2, 3, 5, 8); it must be (2, 5, 3, 8), (B, Hq, "
         "Sq, Dv), ", "[layout='bhsd']"),
        ("statistics of q's shape", "sbhd", {"stats": np.ones((2, 5, 8), "f4")},
         "stats has shape (2, 5, 8); it must be (5, 3, 2), (B, Hq, Sq) ["),
        ("a mask of keys (B, Skv)", "bhsd", {"mask": np.ones((2, 3), bool)},
         "it must broadcast to (2, 5, 3, 3), (B, Hq, Sq, Skv): ",
         "[:, None, None, :]"),
        ("a dropout mask of one key", "bhsd", {"dropout_p": 0.5, "dropout_mask": np.ones((2, 5, 3, 1), bool)},
         "dropout_mask has shape (2, 5, 3, 1); it must be (2, 5, 3, 3), (B, Hq, Sq, Skv)"),
        ("a page table of four sequences", "bshd", {"page_table": np.zeros((4, 1), "i4"), "seq_lens_kv": np.ones(2, "i4")},
         "page_table has shape (4, 1); it must be (B, pages per sequence) with 2 sequences, as q (2, 5, 3, 8)"),
        ("offsets of four axes", "bshd", {"cu_seqlens_q": np.array([0, 5], "i4")},
         "q has 4 dimensions (2, 5, 3, 8); it needs 3: (total",
         "layout='thd'"),
    ]
] + [
    row("attention", f"shapes that do not match: {name} [{letters}, {kind}]", lambda _, call=call, letters=letters,
        shapes=shapes: call(
        *(np.ones(shape, "f4", order="C" if letters else "F") for shape in shapes), layout=letters), ValueError, words,
        *[f"[layout={letters!r}]"] * bool(letters))
    for name, letters, *shapes, words in [
        ("lengths", "bhsd", (2, 4, 9, 8), (2, 4, 7, 8), (2, 4, 6, 8), "lengths (axis 2) of k and v "),
        ("heads", "bhsd", (2, 4, 9, 8), (2, 3, 9, 8), (2, 3, 9, 8), "q is (2, 4, 9, 8), k is (2, 3, 9, 8);"),
        ("head dims", "bshd", (2, 9, 4, 8), (2, 9, 4, 6), (2, 9, 4, 6),
         "head dims (axis 3) of q and k differ, 8 and 6: q is (2, 9, 4"),
        ("batch", "sbhd", (9, 2, 4, 8), (9, 1, 4, 8), (9, 1, 4, 8), "batch sizes (axis 1) of q and k differ, 2 and 1"),
        ("no head dim", "bshd", (2, 9, 4, 0), (2, 9, 4, 0), (2, 9, 4, 8), "q (2, 9, 4, 0) has head dim 0; axis 3 is head_dim"),
        ("head dims", None, (8, 4, 9, 2), (6, 4, 9, 2), (6, 4, 9, 2), "head dims (axis 0) of q and k differ"),
    ]
    for kind, call in {"attention": attention, "converted": functools.partial(attention, compute_dtype="bfloat16")}.items()
    if letters or kind != "converted"
] + [
    row("attention", "a mask in the other order of axes", lambda _: attention(X.T, X.T, X.T, mask=np.ones((2, 1, 5, 5), bool)),
        ValueError, "pass mask.T"),
]  # fmt: skip
#: A sequence in C order, whose first axis has length 1 and no stride; the other axes show that head_dim is not the first.
ONE = np.ones((1, 32, 8, 16), np.float32)
ONE_SEQUENCE = [
    row(name, "one sequence in C order", call, ValueError, "in C order")
    for name, call in {
        "dropout_mask": lambda _: cupy_sdpa.dropout_mask(ONE, ONE, dropout_p=0.5, seed=0),
        "fp8.quantize": lambda _: fp8.quantize(ONE),
        "fp8.quantize_qkv": lambda _: fp8.quantize_qkv(ONE, ONE, ONE),
        "attention": lambda _: attention(*[np.asfortranarray(ONE)] * 3, out=np.empty_like(ONE)),
    }.items()
]  # fmt: skip


CONVERSIONS = [
    row("attention", "float32 as compute_dtype", lambda x: attention(*x.qkv, compute_dtype="float32"), ValueError,
        "compute_dtype is 'float32'; it must be 'float16' or 'bfloat16'"),
    row("attention", "an object as compute_dtype", lambda x: attention(*x.qkv, compute_dtype=object()), ValueError,
        "it must be 'float16' or 'bfloat16'"),
    row("attention", "compute_dtype of arrays in 16 bits", lambda x: attention(*(a.astype("f2") for a in x.qkv),
        compute_dtype="bfloat16"),
        TypeError, "compute_dtype is 'bfloat16' and q is float16"),
    row("attention", "an out in 16 bits of converted arrays",
        lambda x: attention(*x.qkv, compute_dtype="float16", out=x.dout.astype(
        "f2", order="F")), TypeError, "out is float16 and q is float32"),
    row("attention", "a converted q as out", lambda x: attention(x.s, x.s, x.s, compute_dtype="float16", out=x.s), ValueError,
        "overlaps q"),
] + [
    row("attention", f"the bucket {name}", lambda x, bucket=bucket: attention(x.s, x.s, x.s, bucket=bucket), error, words)
    for name, bucket, error, words in [
        ("-5", -5, ValueError, "bucket is -5"), ("1.5", 1.5, TypeError, "bucket is 1.5"),
         ("True", True, TypeError, "bucket is True"),
        ("of a function that rounds down", lambda n: n - 1, ValueError, "bucket returned 5 for the length 6"),
        ("of a function that returns fractions", lambda n: n + 0.5, ValueError, "bucket returned 6.5"),
    ]
] + [
    row("dropout_mask", "a bucket of packed sequences", lambda x: cupy_sdpa.dropout_mask(x.pq, x.pk, dropout_p=0.5, seed=1,
        bucket=32,
        **x.packed), ValueError, "bucket is 32 and cu_seqlens_q is passed; round max_seqlen_q"),
    row("attention_vjp", "return_dtensors=2.5", lambda x: attention_vjp(*x.qkv, score_mod=lambda s, b, h, i, j, t: s * t,
        tensors={
        "t": np.ones(())}, return_dtensors=2.5)[1](x.dout), TypeError, "return_dtensors is 2.5; it must be True, False"),
]  # fmt: skip


def shared(call):
    """A call with the stand-ins of other libraries, and an array (3, 6, 4, 8)."""

    def make(x):
        with fake_libraries.installed() as libraries:
            return call(libraries, np.ascontiguousarray(x.s.T))

    return make


def in_torch(call):
    """A call with a tensor of PyTorch."""
    return shared(lambda libraries, x: call(libraries.torch(x)))


LIBRARIES = [
    row("attention", "tensors of PyTorch with an array of JAX",
        shared(lambda own, x: attention(own.torch(x), own.jax(x), own.torch(x))),
        TypeError, "q is an array of PyTorch and k of JAX"),
    row("attention", "a bias of numpy with tensors", in_torch(lambda t: attention(t, t, t, bias=X)), TypeError,
        "q is an array of PyTorch and bias of numpy"),
    row("prepare", "tensors", in_torch(lambda t: prepare(t, t, t)), ValueError, "in C order", "pass layout='bshd'"),
    row("merge", "tensors", in_torch(lambda t: merge([t], [t])), TypeError, "outs[0] is an array of PyTorch; this call takes"),
    row("fp8.quantize", "tensors", in_torch(fp8.quantize), TypeError, "quantize takes numpy and CuPy arrays: share"),
    row("attention", "a tensor that requires a gradient", shared(lambda own,
        x: attention(*[own.torch(x, requires_grad=True)] * 3)),
        TypeError, "q requires a gradient", "examples/torch_attention.py"),
    row("attention", "arrays traced by JAX", shared(lambda own, x: attention(*[own.modules["jax"].DynamicJaxprTracer()] * 3)),
        TypeError,
        "q is traced by JAX"),
    row("attention", "an out of JAX", shared(lambda own, x: attention(*[own.jax(x)] * 3, out=own.jax(x))), TypeError,
        "out is an array of JAX, which cannot be written to"),
    row("attention", "an array of another device", shared(lambda own, x: attention(*[type("Other", (own.another,), {
        "__dlpack_device__": lambda self: (8, 0), "__module__": "another"})(x)] * 3)), TypeError, "DLPack type 8"),
    row("attention", "arrays of an unknown library", lambda _: attention(*[type("Unknown", (), {
        "__dlpack__": None, "shape": (1,), "__module__": "nothing"})()] * 3), TypeError, "nothing.Unknown", "cupy.from_dlpack"),
]  # fmt: skip


ENGINES = [
    row(name, f"engine={value!r} with arrays of {library}", lambda x, call=call, value=value: call(x, engine=value), error, *words, engine=where)
    for name, call in {"attention": lambda x, **options: attention(*x.qkv, **options)}.items()
    for value, library, where, error, *words in [
        ("cupy", "numpy", "numpy", TypeError, "engine is 'cupy', which computes with CuPy arrays, and q is a numpy array", "omit engine for the CPU"),
        ("cudnn", "numpy", "numpy", TypeError, "or copy the arrays to the GPU with cupy.asarray"),
        ("numpy", "CuPy", "fake", TypeError, "which computes with numpy arrays, and q is a CuPy array: pass engine='cupy'", "cupy.asnumpy"),
        ("gpu", "CuPy", "fake", ValueError, "engine is 'gpu'; it must be 'cupy'"),
        (1, "numpy", "numpy", ValueError, "engine is 1; it must be"),
    ]
] + [
    row(name, mistake, lambda x, call=call: call(x), error, *words, engine="fake")
    for name, mistake, call, error, *words in [
        ("attention", "float32 without engine", lambda x: attention(*(a.astype("f4") for a in x.qkv)), TypeError,
         "q, k and v are float32", "pass engine='cupy', which", "but slower"),
        ("nnlib.dot_product_attention", "float32 without engine", lambda x: nnlib.dot_product_attention(*[x.q[:, 0].astype("f4")] * 3),
         TypeError, "q, k and v are float32", "compute_dtype='bfloat16'", "engine='cupy'"),
        ("attention", "keys of numpy with engine='cupy'", lambda x: attention(x.q, x.k.get(), x.v, engine="cupy"), TypeError,
         "arrays are mixed: q is a CuPy array, k is a numpy array"),
        ("attention", "lengths beyond the queries with engine='cupy'", lambda x: attention(*x.qkv, seq_lens_q=x.integers(7, 7, 7),
         engine="cupy"), ValueError, "seq_lens_q has lengths from 7 to 7; they must be from 0 to 6"),
        ("attention", "q as out with engine='cupy'", lambda x: attention(x.s, x.s, x.s, out=x.s, engine="cupy"), ValueError, "out overlaps q"),
        ("attention", "a capture with engine='cupy'", lambda x: in_capture(x, lambda: attention(*x.qkv, engine="cupy")), RuntimeError,
         "the stream is being captured", "engine is 'cupy'"),
        ("explain", "engine='cupy' and a described GPU", lambda x: explain(*x.qkv, engine="cupy", gpu="H200"), ValueError,
         "engine is 'cupy', which plans nothing for gpu='H200'"),
        *((name, "FP8 arrays with engine='cupy'", lambda x, f=f: f(*fp8.quantize_qkv(*x.qkv), engine="cupy"), Unsupported,
           "engine is 'cupy', which does not compute in FP8", "dequantize")
          for name, f in {"attention": attention, "explain": explain, "prepare": prepare, "fp8.attention": fp8.attention}.items()),
        ("attention_vjp", "engine='cupy' in FP8", lambda x: attention_vjp(*x.qkv, compute_dtype="float8_e4m3fn", engine="cupy"), Unsupported,
         "engine is 'cupy', which does not compute in FP8", "dequantize"),
        ("shared_prefix_attention", "no pages with engine='cupy'", lambda x: cupy_sdpa.shared_prefix_attention(*x.qkv, 0, layout="bshd",
         engine="cupy"), ValueError, "shared_prefix_attention needs page_table and seq_lens_kv"),
        ("merge", "statistics of numpy with engine='cupy'", lambda x: merge([x.s, x.s], [x.s[0], x.s[0].get()], engine="cupy"), TypeError,
         "arrays are mixed: q is a CuPy array, stats[1] is a numpy array"),
        ("problem", "engine", lambda x: cupy_sdpa.problem(*[(8, 1, 4, 1)] * 3, dtype="float32", engine="cupy"), TypeError,
         "this call does not take engine"),
        ("parallel.ContextParallel.attention", "engine", lambda x: cupy_sdpa.parallel.context_parallel().attention(x.s, x.s, x.s, engine="cupy"),
         Unsupported, "engine is 'cupy', which a group does not support"),
        ("attention", "keys on another GPU", lambda x: attention(x.q, on_another(x, x.k), x.v), ValueError, "q on device 0, k on device 1"),
    ]
]  # fmt: skip


def in_capture(x, call):
    """A call while the stream is captured."""
    with x.xp.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        try:
            call()
        finally:
            stream.end_capture()


def on_another(x, array):
    """A copy of an array, whose memory the fake CuPy regards as a second GPU's."""
    copied = x.xp.asfortranarray(array.copy())
    copied.data.device_id = 1
    return copied


#: NNlib's arrays (features, length, batch), and with heads.
N = np.asfortranarray(np.random.default_rng(0).random((4, 3, 2), np.float32))
HEADS = np.asfortranarray(np.random.default_rng(1).random((4, 1, 3, 2), np.float32))
dot, dot_vjp, scores = nnlib.dot_product_attention, nnlib.dot_product_attention_vjp, nnlib.dot_product_attention_scores
causal_mask, padding_mask = nnlib.make_causal_mask, nnlib.make_padding_mask
NNLIB = [
    row(f"nnlib.{name}", mistake, lambda _, call=call: call(), error, *words)
    for name, mistake, call, error, *words in [
        ("dot_product_attention", "another batch", lambda: dot(N, N[..., :1], N), ValueError,
         "the batch dimensions must be the same"),
        ("dot_product_attention", "other features", lambda: dot(N, N[:2], N), ValueError,
         "q and k must have the same first dimension"),
        ("dot_product_attention", "one axis", lambda: dot(N[:, 0, 0], N, N), ValueError,
         "they must be (features, len, batch...)"),
        ("dot_product_attention", "a bias of five axes", lambda: dot(N, N, N, N[..., None, None, None]), ValueError,
         "it must broadcast to (kv_len"),
        ("dot_product_attention", "a bias of another shape with fdrop",
         lambda: dot(N, N, N, np.ones((3, 3, 5)), fdrop=lambda a: a), ValueError,
         "bias is (3, 3, 5); from the first axis on it must broadcast to (3, 3, 1, 2)"),
        ("dot_product_attention", "fdrop that cuts", lambda: dot(N, N, N, fdrop=lambda a: a[:1]), ValueError,
         "fdrop returned shape (1, 3, 1, 2) for alpha"),
        ("dot_product_attention", "a bias that is a list", lambda: dot(N, N, N, [[1.0] * 3] * 3), TypeError, "bias is a list"),
        ("dot_product_attention", "a number as the bias with fdrop", lambda: dot(N, N, N, 1.0, fdrop=lambda a: a), TypeError,
         "bias is a float"),
        ("dot_product_attention", "a mask that is a list", lambda: dot(N, N, N, mask=[True] * 3), TypeError, "mask is a list"),
        ("dot_product_attention", "numbers as the mask", lambda: dot(N, N, N, mask=np.ones((3, 3))), TypeError,
         "mask is float64; it must be bool"),
        ("dot_product_attention", "k that is a list", lambda: dot(N, [[0.0]], N), TypeError, "k is a list; pass an array"),
        ("dot_product_attention_vjp", "dy without the batch", lambda: dot_vjp(N, N, N)[1](N[..., 0]), ValueError,
         "dy is (4, 3); it must be (4, 3, 2)"),
        ("dot_product_attention_vjp", "dy that is a list", lambda: dot_vjp(N, N, N)[1]([0.0]), TypeError, "dy is a list"),
        ("dot_product_attention_vjp", "a number as the bias", lambda: dot_vjp(N, N, N, 1.0), TypeError, "bias is a float"),
        ("dot_product_attention_vjp", "True as the mask", lambda: dot_vjp(N, N, N, mask=True), TypeError, "mask is a bool"),
        ("dot_product_attention_scores", "two dtypes", lambda: scores(HEADS, HEADS.astype("f8")), TypeError,
         "float32 and k is float64"),
        ("dot_product_attention_scores", "integers", lambda: scores(*[HEADS.astype(int)] * 2), TypeError,
         "q is int64; attention supports"),
        ("dot_product_attention_scores", "q that is a list", lambda: scores([0.0], HEADS), TypeError, "q is a list"),
        ("dot_product_attention_scores", "no k", lambda: scores(HEADS, None), TypeError, "k is None"),
        ("dot_product_attention_scores", "a number as the bias", lambda: scores(HEADS, HEADS, 1.0), TypeError,
         "bias is a float"),
        ("dot_product_attention_scores", "True as the mask", lambda: scores(HEADS, HEADS, mask=True), TypeError,
         "mask is a bool"),
        ("make_padding_mask", "lengths that are floats", lambda: padding_mask(N[0, 0], 3), ValueError,
         "it must be (B,) integers"),
        ("make_padding_mask", "a fraction of keys", lambda: padding_mask(np.array([1, 2]), 2.5), ValueError,
         "kv_len is 2.5; it must be a number of keys"),
        ("make_padding_mask", "-1 keys", lambda: padding_mask(np.array([1, 2]), -1), ValueError, "kv_len is -1; ", "0 or more"),
        ("make_padding_mask", "masks of two batches", lambda: padding_mask(np.array([1, 2, 3]),
         3) & padding_mask(np.array([1, 2]), 3), ValueError,
         "masks of shapes (3, 1, 1, 3) and (3, 1, 1, 2) cannot be combined"),
        ("make_causal_mask", "masks of two lengths", lambda: padding_mask(np.array([1, 2, 3]),
         4) & causal_mask(np.ones((5, 5))), ValueError,
         "(4, 1, 1, 3) and (5, 5) cannot be combined"),
        ("make_causal_mask", "a list", lambda: causal_mask([1.0]), TypeError, "x is a list"),
        ("make_causal_mask", "True as the other mask", lambda: causal_mask(N) & True, TypeError, "the other mask is a bool"),
        ("split_heads", "a list", lambda: nnlib.split_heads([1.0], 1), TypeError, "x is a list"),
        ("join_heads", "a list", lambda: nnlib.join_heads([1.0]), TypeError, "x is a list"),
    ]
] + [
    row("nnlib.dot_product_attention", "q in C order", lambda _: dot(N.copy(), N, N)[0], lambda _: dot(N, N, N)[0]),
    row("nnlib.dot_product_attention_vjp", "dy in C order", lambda _: dot_vjp(N, N, N)[1](N.copy())[:3], lambda _: dot_vjp(N, N, N)[1](N)[:3]),
    row("nnlib.dot_product_attention_scores", "C order", lambda _: scores(HEADS.copy(), HEADS), lambda _: scores(HEADS, HEADS)),
    row("default", "the layout of packed sequences", lambda _: layout.default("thd").__enter__(), ValueError, "'thd'", "'bshd'"),
    row("to_julia", "an unknown letter", lambda _: layout.to_julia(X, "bshx"), ValueError,
        "the layout is 'bshx'; it must have the letters"),
]  # fmt: skip


def longer(x, *axes):
    """q with 6 and keys with 9 positions, with their axes in another order, in C order."""
    arrays = (x.s, *[x.normal(8, 4, 9, 3)] * 2)
    return [np.ascontiguousarray(a.transpose(axes)) for a in arrays]


def pages(table=None, keys=(5, 8, 1), **options):
    """A call with pages of 4 keys."""
    return lambda x: attention(
        x.q,
        x.pages_k,
        x.pages_v,
        page_table=x.table if table is None else np.int32(table),
        seq_lens_kv=np.int32(keys),
        **options,
    )


def gathered(x, allowed):
    """The output of the dense keys and values of the pages."""
    k, v = (a[:, :, :, x.table].reshape(*a.shape[:2], 8, 3, order="F") for a in (x.pages_k, x.pages_v))
    return output(x.q, k, v, allowed=allowed & (np.arange(8)[:, None] < x.lengths)[:, None, None])


def changed_in_place(x):
    """A pullback after q has changed."""
    q = x.s.copy(order="F")
    out, pullback = attention_vjp(q, x.s, x.s)
    q *= 3
    return pullback(out)


def swapped(*order):
    """A backward pass whose arrays are in another order."""

    def make(x):
        out, stats = attention(*x.qkv, return_stats=True)
        given = {"dout": x.dout, "q": x.q, "k": x.k, "v": x.v, "out": out, "stats": stats}
        return attention_backward(*(given[name] for name in order))

    return make


AXES = [
    row("attention", "own axes and layout='bshd', and more keys than queries",
        lambda x: attention(x.s, *[x.normal(8, 4, 9, 3)] * 2, layout="bshd"), ValueError, "omit layout for arrays (head_dim, heads, seq, batch)"),
    row("attention", "statistics in C order", lambda x: attention(x.s, x.s, x.s, stats=np.empty((6, 4, 3), "f4")), ValueError,
        "stats has strides", "allocate it with order='F'"),
    row("attention", "a block mask, and a result in C order", lambda x: attention(x.s, x.s, x.s, out=np.empty(x.s.shape, "f4"),
        mask_mod=lambda b, h, i, j: (i * j) % 3 != 1), ValueError, "out has a stride", "allocate it with order='F'"),
    row("attention", "keys without a batch axis", lambda x: attention(x.q, x.k[..., 0], x.v[..., 0]), ValueError,
        "k has 3 dimensions (8, 2, 7)", "as q (8, 4, 6, 3) has"),
    row("attention", "a q without a batch axis", lambda x: attention(x.q[..., 0], x.k, x.v), ValueError, "q has 3 axes and k has 4",
        "pass q with a batch axis, or k without it"),
    *[row("attention", f"{axes} without layout= and without a batch axis", lambda x, order=order: attention(
        *[np.ascontiguousarray(x.s[..., 0].transpose(order))] * 3), ValueError, f"axes are ({axes}), pass layout={layout!r}")
      for axes, order, layout in (("seq 6, heads 4, head_dim 8", (2, 1, 0), "bshd"), ("heads 4, seq 6, head_dim 8", (1, 2, 0), "bhsd"))],
    row("attention", "x.T of (B, H, S, D), and more keys than queries", lambda x: attention(*[a.T for a in longer(x, 3, 1, 2, 0)]),
        ValueError, "6 must be a multiple of 9", "Heads and seq may be exchanged", "layout='bhsd'", "x.transpose(3, 1, 2, 0)"),
    row("attention", "sinks (1, Hq, 1, 1)", lambda x: attention(*[x.s.T] * 3, layout="bshd", sinks=np.zeros((1, 4, 1, 1), "f4")), ValueError,
        "sinks has shape (1, 4, 1, 1); it must be (4,)"),
    row("attention", "a scale (Hq, 1, 1) in a layout", lambda x: attention(*[x.s.T] * 3, layout="bshd", scale=np.ones((4, 1, 1), "f4")),
        ValueError, "scale has shape (4, 1, 1); it must be (4,)"),
]  # fmt: skip

OFFSETS = [
    row("attention", "lengths as offsets of both sides", lambda x: attention(x.pq, x.pk, x.pv, cu_seqlens_q=[5, 6], cu_seqlens_kv=[5, 6],
        max_seqlen_q=6, max_seqlen_kv=6), ValueError, "cu_seqlens_q is [5, 6]", "these are lengths", "[0, 5, 11]"),
    row("attention", "positions before the first sequence and after the last one, whose offsets add up to the total", lambda x: attention(
        x.pq, x.pk, x.pv, cu_seqlens_q=[3, 8], cu_seqlens_kv=[3, 8], max_seqlen_q=5, max_seqlen_kv=5)[:, :, 3:8],
        lambda x: output(*(a[:, :, 3:8, None] for a in (x.pq, x.pk, x.pv)))[..., 0]),
    row("attention", "lengths and offsets of sequences with gaps", lambda x: attention(x.pq, x.pk, x.pv, **x.packed,
        seq_lens_q=x.lengths), ValueError, "both passed", "cu_seqlens_with_gaps"),
]  # fmt: skip

PAGES = [
    row("attention", "causal=True with pages", pages(causal=True), ValueError, "causal is True", "Sq is 6", "up to 8 keys",
        "'bottom_right'", "'top_left'"),
    *[row("attention", f"causal={value!r} with pages", pages(causal=value), ValueError, f"causal is {value}", "'bottom_right'")
      for value in (1, np.True_)],
    row("attention", "causal='top_left' with pages", pages(causal="top_left"), lambda x: gathered(x, causal(6, 8))),
    row("attention", "a page twice, because the lengths are those of the table", pages([[3, 1, 5], [3, 4, 0]], (8, 8, 8)), ValueError,
        "page_table lists a page twice in sequence 0", "[3, 3]", "8 keys in pages of 4", "seq_lens_kv"),
    row("attention", "a page twice, in a window that hides it", pages([[3, 0, 5], [3, 0, 5]], (8, 8, 8), window=(0, 0, "bottom_right")),
        lambda x: output(x.q, *(a[:, :, [n % 4 for n in range(2, 8)]][..., [3, 0, 5]] for a in (x.pages_k, x.pages_v)),
                         allowed=np.eye(6, dtype=bool)[:, :, None, None])),
    row("attention", "one query of each sequence as packed queries", lambda x: attention(
        x.q[:, :, 0].T, x.pages_k.T, x.pages_v.T, layout="thd", page_table=x.table.T, seq_lens_kv=x.lengths), ValueError,
        "q has 3 dimensions (3, 4, 8)", "q[:, None] and layout='bshd'"),
    row("attention", "a length instead of lengths", lambda x: attention(*x.qkv, seq_lens_kv=5), TypeError, "seq_lens_kv is an int",
        "numpy.full(B, 5, 'int32')"),
    row("page_table_from_lists", "-1 after the pages of a list", lambda x: page_table_from_lists(
        [0, 2, 4], [1, 3, 2, -1], [3, 4], page_size=4), ValueError, "indices contains -1", "indptr"),
    row("attention", "shorter lists of pages of another page size", lambda x: attention(x.q, x.pages_k, x.pages_v, **dict(zip(
        ("page_table", "seq_lens_kv"), page_table_from_lists([0, 2, 3, 4], [1, 3, 2, 0], [1, 5, 6], page_size=6), strict=True))),
        ValueError, "entries from -1 to 2 in sequence 1, which has 5 keys"),
]  # fmt: skip

ARRAYS = [
    row("Pullback", "q changed in place", changed_in_place, ValueError, "from another call", "changed in place", "q.copy(order='F')"),
    row("attention_backward", "the order q, k, v, out, dout, stats", swapped("q", "k", "v", "out", "dout", "stats"), ValueError,
        "in another order; pass (dout, q, k, v, out, stats)", "dout (8, 4, 6, 3)"),
    *[row("attention", f"the option {name}", lambda x, name=name: attention(*x.qkv, **{name: 16}), TypeError, f"no option {name}", remedy)
      for name, remedy in {"logits_dtype": "softmax are float32", "page_size": "axis 2 of k and v", "block_size": "cupy_sdpa.block_mask"}.items()],
]  # fmt: skip


OF_NEW_USERS = AXES + OFFSETS + PAGES + ARRAYS


ROWS = [*LAYOUTS, *ONE_SEQUENCE, *CONVERSIONS, *LIBRARIES, *ENGINES, *NNLIB]
ROWS += OF_NEW_USERS
