"""Mistakes with FP8 arrays, NNlib's functions, groups, plans and the reference."""

# mypy: ignore-errors
# (most mistakes are type errors)

import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
from mistakes import output, read_from, row
from mistakes_of_others import fails, tokens

import cupy_sdpa
from cupy_sdpa import (
    Unsupported,
    attention,
    attention_vjp,
    explain_function,
    fp8,
    nnlib,
    parallel,
    prepare,
    problem,
    reference,
    store,
)
from cupy_sdpa.parallel import Loopback, context_parallel

FP8 = [
    row("fp8.quantize", "an FP8 array", lambda x: fp8.quantize(fp8.quantize(x.q)), TypeError, "Fp8Array"),
    row("fp8.quantize", "a dtype of ml_dtypes", lambda x: fp8.quantize(x.q, ml_dtypes.float8_e4m3fn), TypeError, "float8_e4m3fn"),
    row("fp8.quantize", "two axes", lambda x: fp8.quantize(x.q[:, 0, :, 0]), ValueError, "(head_dim, heads, seq, batch)"),
    row("fp8.quantize", "lengths in a list", lambda x: fp8.quantize(x.q, lengths=[1, 2, 3]).dequantize(),
        lambda x: fp8.quantize(x.q, lengths=x.integers(1, 2, 3)).dequantize()),
    row("fp8.quantize", "'bhsd' with three axes", lambda x: fp8.quantize(x.pq, layout="bhsd"), ValueError, "3 axes", "'bhsd'"),
    row("fp8.quantize", "center and rotate", lambda x: fp8.quantize(x.v, center=True, rotate=True), ValueError, "center and rotate are True",
        "pass one of them"),
    row("fp8.quantize", "center=1", lambda x: fp8.quantize(x.v, center=1), TypeError, "center is 1", "True or False"),
    row("fp8.quantize", "explained", lambda x: explain_function(fp8.quantize, x.q), TypeError, "does not run a program that computes attention"),
    row("fp8.quantize", "rotate=1", lambda x: fp8.quantize(x.q, rotate=1), TypeError, "rotate is 1", "True or False"),
    row("fp8.quantize_qkv", "two arrays", lambda x: fp8.quantize_qkv(x.q, x.k), TypeError, "v"),
    row("fp8.quantize_qkv", "lengths in text", lambda x: fp8.quantize_qkv(*x.qkv, seq_lens_q="3 5 2"), TypeError, "seq_lens_q is", "int32"),
    row("fp8.quantize_qkv", "lengths that are fractions", lambda x: fp8.quantize_qkv(*x.qkv, seq_lens_kv=[1.5, 2, 3]), TypeError, "seq_lens_kv is",
        "integers"),
    row("fp8.quantize_qkv", "rotate by position", lambda x: fp8.quantize_qkv(*x.qkv, True), TypeError, "True", "float8_e4m3fn"),
    row("fp8.attention", "arrays without factors", lambda x: fp8.attention(*x.qkv), TypeError, "q is a numpy.ndarray", "fp8.quantize"),
    row("fp8.attention", "elements instead of FP8 arrays", lambda x: attention(*(a.data for a in fp8.quantize_qkv(*x.qkv))),
        TypeError, "factors", "fp8.quantize"),
    row("fp8.attention", "q rotated and k not", lambda x: attention(fp8.quantize(x.q, rotate=True), *(
        fp8.quantize(a) for a in (x.k, x.v))), ValueError, "q.rotated is True", "same rotate"),
    row("fp8.attention", "queries that are not rotated, for a cache that is", lambda x: rotated_cache(fp8.quantize(x.q)), ValueError,
        "k.rotated is True", "same rotate"),
    row("fp8.attention", "the keys of a rotated cache as its values", lambda x: rotated_cache(x.q, values=True), ValueError,
        "v.rotated is True"),
    row("fp8.attention", "keys with a mean", lambda x: attention(fp8.quantize(x.q), fp8.quantize(x.k, center=True), fp8.quantize(x.v)),
        ValueError, "k has a mean", "without center"),
    row("fp8.attention", "dropout and a mean", lambda x: attention(*fp8.quantize_qkv(*x.qkv), dropout_p=0.5, seed=1), ValueError,
        "v has a mean", "dropout", "center=False"),
    row("fp8.attention", "pages with a mean of each", lambda x: attention(*fp8.quantize_qkv(*x.qkv), page_table=np.zeros((1, 3), np.int32),
        seq_lens_kv=np.ones(3, np.int32)), ValueError, "a mean of each page", "center=False", "KVCache"),
    row("fp8.attention", "another mean for each key", lambda x: attention(*(fp8.quantize(a) for a in (x.q, x.k)), fp8.Fp8Array(
        fp8.quantize(x.v).data, 1.0, mean=np.ones(x.v.shape, "f4"))), ValueError, "along axis 2", "of length 1"),
    row("fp8.attention", "two FP8 dtypes", lambda x: attention(fp8.quantize(x.q, "float8_e5m2"), *(
        fp8.quantize(a) for a in (x.k, x.v))), TypeError, "float8_e5m2", "one dtype"),
    row("fp8.attention", "out", lambda x: attention(*fp8.quantize_qkv(*x.qkv), out=x.dout), TypeError, "out is passed", "omit out"),
    row("fp8.attention", "an output dtype of numpy", lambda x: fp8.attention(*fp8.quantize_qkv(*x.qkv), out_dtype=np.dtype("float16")),
        TypeError, "'float16' or 'bfloat16'"),
    row("fp8.attention", "an output of float32", lambda x: fp8.attention(*fp8.quantize_qkv(*x.qkv), out_dtype="float32"),
        TypeError, "'float32'", "'bfloat16'"),
    row("fp8.attention", "a scale of 0", lambda x: fp8.attention(*fp8.quantize_qkv(*x.qkv), out_scale=0.0), ValueError,
        "above 0"),
    row("fp8.attention", "a scale of a 16-bit output", lambda x: fp8.attention(*fp8.quantize_qkv(*x.qkv), out_scale=1.0,
        out_dtype="float16"), ValueError, "omit one"),
    row("fp8.Fp8Array", "a dtype of numpy", lambda x: fp8.Fp8Array(fp8.quantize(x.q).data, descale=1.0,
        dtype=np.dtype(ml_dtypes.float8_e4m3fn)), TypeError, "must be float8_e4m3fn"),
    row("fp8.Fp8Array", "an array of float32", lambda x: fp8.Fp8Array(x.q, 1.0), TypeError, "float32", "fp8.quantize"),
    row("fp8.Fp8Array", "an axis by name", lambda x: fp8.Fp8Array(x.q.astype(ml_dtypes.float8_e4m3fn), 1.0, axis="d"), TypeError,
        "'d'", "integer"),
    row("fp8.Fp8Array", "no factor", lambda x: fp8.Fp8Array(x.q.astype(ml_dtypes.float8_e4m3fn)), TypeError, "descale and scale"),
    row("fp8.Fp8Array", "a factor of 0", lambda x: fp8.Fp8Array(x.q.astype(ml_dtypes.float8_e4m3fn), 0.0), ValueError, "above 0"),
    *(row("fp8.Fp8Array", f"a factor of {value}, which float32 or its inverse does not have", lambda x, value=value: fp8.Fp8Array(
        x.q.astype(ml_dtypes.float8_e4m3fn), value), ValueError, f"descale is {value}", "float32") for value in (1e39, 1e-46)),
    row("fp8.Fp8Array", "a factor in float64", lambda x: fp8.Fp8Array(x.q.astype(ml_dtypes.float8_e4m3fn), np.ones(1)), TypeError,
        "float64", "float32"),
    row("fp8.Fp8Array", "scale and descale that are no inverses", lambda x: fp8.Fp8Array(
        x.q.astype(ml_dtypes.float8_e4m3fn), 2.0, scale=2.0), ValueError, "descale", "scale", "one of them"),
    row("fp8.Fp8Array", "a mean in float64", lambda x: fp8.Fp8Array(fp8.quantize(x.v).data, 1.0, mean=np.ones((16, 2, 1, 3))), TypeError,
        "float64", "float32"),
    row("fp8.Fp8Array", "a mean of another shape", lambda x: fp8.Fp8Array(fp8.quantize(x.v).data, 1.0, mean=np.ones((16, 2, 3, 1), "f4")),
        ValueError, "(16, 2, 3, 1)", "or 1"),
    row("fp8.Fp8Array", "a mean of a rotated array", lambda x: fp8.Fp8Array(fp8.quantize(x.v).data, 1.0, rotated=True, mean=np.ones(
        (16, 2, 1, 1), "f4")), ValueError, "rotated is True", "omit one"),
    row("fp8.Fp8Array", "arithmetic", lambda x: fp8.quantize(x.q) * 2, TypeError, "Fp8Array"),
    row("fp8.Fp8Array", "np.asarray", lambda x: np.asarray(fp8.quantize(x.q)), TypeError, "dequantize()"),
    row("fp8.Fp8Array", "a part of a rotated head dim", lambda x: fp8.quantize(x.q, rotate=True)[:4], ValueError, "dequantize first"),
    row("fp8.Fp8Array.dequantize", "float64", lambda x: fp8.quantize(x.q).dequantize("float64"), TypeError, "float64", "bfloat16"),
    row("fp8.Fp8Array.dequantize", "integers that FP8 stores exactly", lambda x: fp8.quantize(np.asfortranarray(np.float32(
        [1, -2, 4, 7])[:, None, None, None])).dequantize(), lambda x: np.array([1, -2, 4, 7.0])[:, None, None, None]),
    row("fp8.Fp8Array.transpose", "axes in a tuple", lambda x: host_of(fp8.quantize(x.q).transpose((3, 2, 1, 0))), lambda x: host_of(
        fp8.quantize(x.q)).T),
    row("fp8.Fp8Array.transpose", "two axes", lambda x: fp8.quantize(x.q).transpose(1, 0), ValueError, "axes"),
    row("fp8.DelayedScaling", "a string", lambda x: fp8.DelayedScaling("x"), TypeError, "like is a str", "numpy and CuPy arrays"),
    row("fp8.DelayedScaling", "a dtype of numpy", lambda x: fp8.DelayedScaling(x.q, dtype=np.dtype(ml_dtypes.float8_e4m3fn)), TypeError,
        "must be float8_e4m3fn"),
    row("fp8.DelayedScaling", "a history of 0", lambda x: fp8.DelayedScaling(x.q, 0), ValueError, "history is 0"),
    row("fp8.DelayedScaling.quantize", "a number", lambda x: fp8.DelayedScaling(x.q).quantize(1.0), TypeError, "float"),
    row("fp8.DelayedScaling.quantize", "one NaN, then finite arrays", lambda x: after_nan(x), lambda x: np.asarray([True]),),
    row("fp8.DelayedScaling.quantize", "numpy arrays with a history of CuPy", lambda x: fp8.DelayedScaling(x.q).quantize(x.q.get()),
        TypeError, "another DelayedScaling", engine="fake"),
    row("fp8.DelayedScaling.update", "an array instead of its maximum", lambda x: fp8.DelayedScaling(x.q).update(x.q), TypeError,
        "(8, 4, 6, 3)", "(1,)"),
    row("fp8.DelayedScaling.update", "a maximum of 0", lambda x: fp8.DelayedScaling(x.q).update(0.0), ValueError, "above 0"),
]  # fmt: skip


def rotated_cache(q, values=False):
    """Attention to an FP8 cache with rotated keys."""
    c, t = cupy_sdpa.KVCache(8, 2, pages=6, batch=3, dtype="float8_e4m3fn", rotate=True, numpy=True), tokens(None)
    c.append(t, t)
    return attention(q, c.keys(), c.keys() if values else c.values(), page_table=c.table, seq_lens_kv=c.lengths)


def host_of(array):
    """The elements of an FP8 array as numbers."""
    return array.data.astype(np.float32)


def after_nan(x):
    """Whether the scale after an array with NaN is finite."""
    scaling = fp8.DelayedScaling(x.q, history=4)
    scaling.quantize(np.full_like(x.q, np.nan))
    scaling.quantize(x.q)
    return np.isfinite(scaling.scale)


def flat(x, count=6):
    """An array (16, length, batch) of NNlib."""
    return np.asfortranarray(np.random.default_rng(count).standard_normal((16, count, 3)).astype("f4"))


def nn(*shapes, **options):
    """NNlib's attention of random arrays."""
    return lambda x: nnlib.dot_product_attention(*(flat(x, n) for n in shapes), **options)


NNLIB = [
    row("nnlib.dot_product_attention", "no values", nn(6, 7), TypeError, "v"),
    row("nnlib.dot_product_attention", "heads that do not divide the features", nn(6, 7, 7, nheads=3), ValueError, "16",
        "nheads, which is 3"),
    row("nnlib.dot_product_attention", "a float number of heads", nn(6, 7, 7, nheads=2.0), TypeError, "nheads is 2.0"),
    row("nnlib.dot_product_attention", "text as alpha", nn(6, 7, 7, alpha="x"), TypeError, "alpha is 'x'", "True or False"),
    row("nnlib.make_causal_mask", "True as dims", lambda x: nnlib.make_causal_mask(x.q, dims=True), TypeError, "dims is True", "integer"),
    row("nnlib.make_padding_mask", "True as the number of keys", lambda x: nnlib.make_padding_mask(np.array([1]), True), ValueError,
        "kv_len is True", "a number of keys"),
    row("nnlib.dot_product_attention", "causal=True", nn(6, 6, 6, causal=True), TypeError, "no option causal",
        "mask=make_causal_mask(q)"),
    row("nnlib.dot_product_attention_vjp", "is_causal=True", lambda x: nnlib.dot_product_attention_vjp(*[x.s[:, :, 0, 0]] * 3, is_causal=True),
        TypeError, "mask=make_causal_mask(q)"),
    row("nnlib.dot_product_attention", "an option of attention", nn(6, 6, 6, scale=1.0), TypeError, "no option scale", "cupy_sdpa.attention"),
    row("nnlib.dot_product_attention", "a causal mask of another length", nn(6, 6, 6, mask=nnlib.make_causal_mask(np.zeros((4, 5)))),
        ValueError, "5 keys", "6 keys"),
    row("nnlib.dot_product_attention", "a padding mask of another batch",
        nn(6, 7, 7, mask=nnlib.make_padding_mask(np.array([3, 4]), 7)), ValueError, "2 lengths", "3 batch items"),
    row("nnlib.dot_product_attention", "fdrop as a rate", nn(6, 7, 7, fdrop=0.1), TypeError, "fdrop is 0.1", "function"),
    row("nnlib.dot_product_attention", "fdrop that returns nothing", nn(6, 7, 7, fdrop=lambda a: None), TypeError, "fdrop"),
    row("nnlib.dot_product_attention", "one feature in C order", lambda x: nnlib.dot_product_attention(*[flat(x)[:1].copy()] * 3)[0],
        lambda x: nnlib.dot_product_attention(*[flat(x)[:1].copy(order="F")] * 3)[0]),
    row("nnlib.dot_product_attention_vjp", "alpha", lambda x: nnlib.dot_product_attention_vjp(*[flat(x)] * 3, alpha=True), TypeError,
        "alpha"),
    row("nnlib.dot_product_attention_vjp", "a number as the gradient", lambda x: nnlib.dot_product_attention_vjp(*[flat(x)] * 3)[1](
        1.0), TypeError, "dy is a float"),
    row("nnlib.dot_product_attention_scores", "three axes", lambda x: nnlib.dot_product_attention_scores(flat(x), flat(x)),
        ValueError, "(d, nheads, len, B)"),
    row("nnlib.dot_product_attention_scores", "a float mask", lambda x: nnlib.dot_product_attention_scores(
        x.s, x.s, mask=np.ones((6, 6))), TypeError, "float64", ".astype(bool)"),
    row("nnlib.make_causal_mask", "dims from 0", lambda x: nnlib.make_causal_mask(x.q, dims=0), ValueError, "dims is 0",
        "from 1"),
    row("nnlib.make_padding_mask", "a length beyond the keys", lambda x: np.asarray(nnlib.make_padding_mask(np.array([9, -1]), 7)),
        lambda x: np.repeat([[[[1, 0]]]], 7, axis=0)),
    row("nnlib.join_heads", "one axis", lambda x: nnlib.join_heads(x.q[:, 0, 0, 0]), ValueError, "(8,)", "(d, nheads, len, batch...)"),
    row("nnlib.join_heads", "two axes", lambda x: nnlib.join_heads(x.q[:, :, 0, 0]), ValueError, "(8, 4)",
        "(d, nheads, len, batch...)"),
    row("nnlib.split_heads", "one axis", lambda x: nnlib.split_heads(x.q[:, 0, 0, 0], 2), ValueError, "(8,)", "(n, len, batch...)"),
    row("nnlib.split_heads", "a number in an array", lambda x: nnlib.split_heads(np.array(1.0), 2), ValueError, "()"),
    row("nnlib.join_heads", "the inverse of split_heads", lambda x: nnlib.join_heads(nnlib.split_heads(flat(x), 2)), flat),
]  # fmt: skip


def grouped(function, size=2, **options):
    """What a function of the context returns in every member of a group of threads."""

    def make(x):
        def member(group):
            return function(x, parallel.context_parallel(group, **options))

        return parallel.run_threads(parallel.Loopback(size, timeout=5).members, member)

    return make


def attend(x, cp, length=None, **options):
    """The whole output of attention of a group with itself."""
    s = np.asfortranarray(x.s if length is None else x.s[:, :, :length])
    out = cp.attention(*[cp.shard(s)] * 3, seqlen_q=s.shape[2], **options)
    return cp.unshard(out, seqlen=s.shape[2])


PARALLEL = [
    row("parallel.context_parallel", "a number of GPUs", lambda x: parallel.context_parallel(2), TypeError, "group is a builtins.int",
        "rank, size"),
    row("parallel.context_parallel", "an unknown method", lambda x: parallel.context_parallel(method="ulysses"), ValueError,
        "'ulysses'", "'all_to_all'"),
    row("parallel.context_parallel", "check=1", lambda x: parallel.context_parallel(check=1), TypeError, "check is 1"),
    row("parallel.ContextParallel", "all members in one object", lambda x: parallel.ContextParallel(parallel.Loopback(2)), TypeError,
        "Loopback", "members"),
    row("parallel.ContextParallel.attention_vjp", "a sink gradient without sinks, before the forward pass",
        grouped(lambda x, cp: cp.attention_vjp(*[x.s] * 3, seqlen_q=12, return_dsinks=True)), ValueError, "sinks is None"),
    row("parallel.ContextParallel.attention", "a mask by position", lambda x: context_parallel().attention(*[x.s] * 4), TypeError,
        "only q, k and v", "mask="),
    row("parallel.ContextParallel.attention", "whole arrays", grouped(lambda x, cp: cp.attention(*[x.s] * 3, seqlen_q=6)),
        ValueError, "6 positions", "shard()"),
    row("parallel.ContextParallel.attention", "a length that 2 P does not divide, without seqlen_q",
        grouped(lambda x, cp: cp.attention(*[cp.shard(x.s[:, :, :5])] * 3)), ValueError, "seqlen_q"),
    row("parallel.ContextParallel.attention", "the scale of one member", grouped(lambda x, cp: attend(x, cp, scale=1.0 + cp.rank)),
        ValueError, "scale: 1.0", "scale: 2.0"),
    row("parallel.ContextParallel.attention", "pages", grouped(lambda x, cp: cp.attention(
        x.q, x.pages_k, x.pages_v, **x.paged)), Unsupported, "page_table", "cupy_sdpa.attention"),
    row("parallel.ContextParallel.attention", "an invariant call", grouped(lambda x, cp: attend(x, cp, batch_invariant=True)),
        Unsupported, "batch_invariant is passed", "cupy_sdpa.attention"),
    row("parallel.ContextParallel.attention", "a bucket", grouped(lambda x, cp: attend(x, cp, bucket=8)), Unsupported, "bucket"),
    row("parallel.ContextParallel.attention", "a misspelled option", grouped(lambda x, cp: attend(x, cp, casual=True)), TypeError,
        "causal"),
    row("parallel.ContextParallel.attention", "out", grouped(lambda x, cp: attend(x, cp, out=x.s)), TypeError, "out"),
    row("parallel.ContextParallel.attention", "offsets without the leading 0", grouped(lambda x, cp: cp.attention(
        x.pq, x.pk, x.pv, cu_seqlens_q=np.array([5, 11]), cu_seqlens_kv=np.array([5, 11]))), ValueError, "[5, 11]", "begin with 0"),
    row("parallel.ContextParallel.attention", "one member alone", lambda x: parallel.run_threads(
        parallel.Loopback(2, timeout=0.2).members, lambda g: attend(x, parallel.context_parallel(g)) if g.rank else None),
        parallel.GroupError, "member 0", "did not send"),
    row("parallel.ContextParallel.attention", "a call after a refused one", lambda x: grouped(lambda x, cp: [fails(
        attend, x, cp, casual=True), attend(x, cp)][1])(x)[1], lambda x: output(x.s, x.s, x.s)),
    row("parallel.ContextParallel.attention_backward", "a bias gradient", grouped(lambda x, cp: group_backward(
        x, cp, None, return_dbias=True)), Unsupported, "return_dbias", "one GPU"),
    row("parallel.ContextParallel.attention_backward", "statistics of another step", grouped(lambda x, cp: group_backward(
        x, cp, None, lambda s: s * 0)), ValueError, "stats"),
    row("parallel.ContextParallel.attention_vjp", "return_stats", grouped(lambda x, cp: cp.attention_vjp(
        *[cp.shard(x.s)] * 3, seqlen_q=6, return_stats=True)), Unsupported, "return_stats", "one GPU"),
    row("parallel.ContextParallel.attention_vjp", "the length is missing in the pullback", lambda x: grouped(lambda x, cp: cp.unshard(
        cp.attention_vjp(*[cp.shard(np.asfortranarray(x.s[:, :, :5]))] * 3, seqlen_q=5)[1](cp.shard(x.s[:, :, :5]))[0], seqlen=5))(x)[0],
        lambda x: attention_vjp(*[np.asfortranarray(np.float64(x.s[:, :, :5]))] * 3)[1](np.asfortranarray(
            np.float64(x.s[:, :, :5])))[0]),
    row("parallel.ContextParallel.explain", "a misspelled option", lambda x: parallel.context_parallel().explain(
        *[x.s] * 3, casual=True), TypeError, "causal"),
    row("parallel.ContextParallel.shard", "(B, S, H, D) without axis=", lambda x: parallel.context_parallel().shard(x.s.T.copy()),
        ValueError, "layout='bshd'", "axis=1"),
    row("parallel.ContextParallel.shard", "one sequence (1, S, H, D) without axis=", lambda x: parallel.context_parallel().shard(
        x.s[..., :1].T.copy()), ValueError, "layout='bshd'", "axis=1"),
    row("parallel.ContextParallel.shard", "a list", lambda x: parallel.context_parallel().shard([1]), TypeError, "x is a"),
    row("parallel.ContextParallel.shard", "an axis that does not exist", lambda x: parallel.context_parallel().shard(x.q, axis=4),
        ValueError, "axis is 4", "4 axes"),
    row("parallel.ContextParallel.shard", "a float axis", lambda x: parallel.context_parallel().shard(x.q, axis=2.0), TypeError,
        "axis is 2.0"),
    row("parallel.ContextParallel.unshard", "a whole array", grouped(lambda x, cp: cp.unshard(x.s, seqlen=6)), ValueError,
        "6 positions", "seqlen="),
    row("parallel.ContextParallel.position_ids", "no length", lambda x: parallel.context_parallel().position_ids(), ValueError,
        "pass one of them"),
    row("parallel.ContextParallel.position_ids", "a float length", lambda x: parallel.context_parallel().position_ids(6.0),
        ValueError, "6.0", "integer"),
    row("parallel.ContextParallel.check", "an argument", lambda x: parallel.context_parallel().check(1), TypeError, "positional"),
    row("parallel.connect", "no launcher", lambda x: parallel.connect(variables={}), RuntimeError, "mpirun", "torchrun"),
    row("parallel.environment", "a rank that is no number", lambda x: parallel.environment({"RANK": "a", "WORLD_SIZE": "2"}),
        ValueError, "'a'", "number"),
    row("parallel.environment", "ranks from 1", lambda x: parallel.environment({"RANK": "2", "WORLD_SIZE": "2"}), ValueError,
        "RANK is 2", "lower"),
    row("parallel.run_threads", "the group instead of its members", lambda x: parallel.run_threads(parallel.Loopback(2), len),
        TypeError, "Loopback", "members"),
    row("parallel.run_threads", "an error of one member", lambda x: parallel.run_threads(
        parallel.Loopback(2, timeout=5).members, lambda g: 1 // g.rank), ZeroDivisionError),
    row("parallel.run_on_gpus", "no function", lambda x: parallel.run_on_gpus(devices=2), TypeError, "function"),
    row("parallel.Loopback", "no members", lambda x: parallel.Loopback(0), ValueError, "size is 0"),
    row("parallel.Loopback", "a list of devices", lambda x: parallel.Loopback([0, 1]), TypeError, "size is [0, 1]"),
]  # fmt: skip


def group_backward(x, cp, dout, change=lambda stats: stats, **options):
    """The gradients of a group."""
    own = cp.shard(x.s)
    out, stats = cp.attention(own, own, own, return_stats=True, seqlen_q=6)
    dout = own if dout is None else dout
    return cp.attention_backward(dout, own, own, own, out, change(stats), seqlen_q=6, **options)


STORE = [
    row("store.build", "a shape instead of problems", lambda x: store.build((64, 8, 10, 2), "h200", "/nowhere"), TypeError,
        "64", "cupy_sdpa.problem"),
    row("store.build", "one problem instead of a list", lambda x: one_problem(), TypeError, "problems is <Problem", "a list of problems"),
    row("store.read_problems", "numbers instead of problems", read_from("1"), ValueError, "line 1 is not a problem"),
    row("store.read_problems", "a file that does not exist", lambda x: store.read_problems("/nowhere/problems.jsonl"),
        FileNotFoundError, "problems.jsonl"),
    row("store.kept", "an argument", lambda x: store.kept(1), TypeError, "positional"),
]  # fmt: skip


def one_problem():
    """Plans of one problem."""
    shape = (64, 8, 10, 2)
    return store.build(cupy_sdpa.problem(shape, shape, shape, dtype="float16"), "h200", "/nowhere")


REFERENCE = [
    row("reference.exponentials", "sinks of other queries", lambda x: reference.exponentials(np.zeros((2, 3)), np.zeros(5)), ValueError,
        "(2,) (5,)"),
    row("reference.attention", "a misspelled option", lambda x: reference.attention(*x.qkv, casual=True), TypeError, "casual"),
    row("reference.attention", "PyTorch's mask", lambda x: reference.attention(*x.qkv, mask=np.ones((3, 4, 6, 7), bool)),
        ValueError, "(3, 4, 6, 7)", "(7, 6, 4, 3)"),
    row("reference.attention", "a mask of floats", lambda x: reference.attention(*x.qkv, mask=np.zeros((7, 6, 1, 1))), ValueError,
        "mask is float64", "bool"),
    row("reference.attention", "a bias of three axes", lambda x: reference.attention(*x.qkv, bias=np.zeros((6, 4, 3))), ValueError,
        "(6, 4, 3)", "(7, 6, 4, 3)"),
    row("reference.attention", "a bias of other heads", lambda x: reference.attention(*x.qkv, bias=np.zeros((7, 6, 2, 1))), ValueError,
        "(7, 6, 2, 1)", "(7, 6, 4, 3)"),
    row("reference.attention", "a misspelled corner", lambda x: reference.attention(*x.qkv, window=(1, 0, "bottomright")), ValueError,
        "bottomright", "bottom_right"),
    row("reference.attention", "one end of a window", lambda x: reference.attention(*x.qkv, window=(1,)), ValueError, "(1,)", "(left, right)"),
    row("reference.attention", "another batch of keys", lambda x: reference.attention(x.q[..., :2], x.k, x.v), ValueError,
        "(8, 4, 6, 2)", "(8, 2, 7, 3)"),
    row("reference.attention", "one of the offsets", lambda x: reference.attention(x.pq, x.pk, x.pv, cu_seqlens_q=x.starts),
        ValueError, "cu_seqlens_kv"),
    row("reference.attention_backward", "another batch of dout", lambda x: reference.attention_backward(
        x.normal(16, 4, 6, 4), *x.qkv), ValueError, "(16, 4, 6, 4)"),
    row("reference.attention_backward", "a bias gradient without a bias", lambda x: reference.attention_backward(
        x.dout, *x.qkv, return_dbias=True), ValueError, "bias"),
]  # fmt: skip


def elements(x):
    """Elements of FP8 without a factor."""
    return x.q.astype(ml_dtypes.float8_e4m3fn)


def converted(function, **options):
    """A call with q, k and v in FP8."""
    return lambda x: function(*fp8.quantize_qkv(*x.qkv), **options)


def pulled(dtype, **options):
    """attention_vjp with arrays of a dtype."""
    return lambda x: cupy_sdpa.attention_vjp(*(y.astype(dtype) for y in x.qkv), **options)


def of_outputs(dtype, **options):
    """A pullback with a gradient of another dtype."""

    def make(x):
        out, pullback = cupy_sdpa.attention_vjp(*x.qkv, **options)
        return pullback(out.astype(dtype) if dtype else 1)

    return make


def on_gpu(call, d=16):
    """A call with an FP8 array (D, 16, 16, 16) on a GPU."""
    return lambda x: call(fp8.quantize(x.normal(d, 16, 16, 16)))


def written(x, out):
    """Queries that are converted, with FP8 keys and values, into an array."""
    return attention(x.q, *(fp8.quantize(y) for y in (x.k, x.v)), out=out)


OF_FP8 = [
    row("fp8.quantize_qkv", "lists", lambda x: fp8.quantize_qkv([1.0], [1.0], [1.0]), TypeError, "q is a list", "numpy and CuPy arrays"),
    row("fp8.DelayedScaling", "a negative amax", lambda x: fp8.DelayedScaling(x.q, amax=-1.0), ValueError, "amax is -1.0", "above 0"),
    row("fp8.DelayedScaling", "an unknown dtype", lambda x: fp8.DelayedScaling(x.q, dtype="fp8"), TypeError, "dtype is 'fp8'", "float8_e5m2"),
    row("fp8.attention", "arrays that were rotated in another layout", lambda x: fp8.attention(*(
        fp8.quantize(y, rotate=rotate) for y, rotate in ((x.s, True), (x.s, True), (x.s, False))), layout="bhsd"), ValueError, "axis 0", "'bhsd' head_dim is axis 3"),
    row("fp8.attention", "transposed rotated arrays without layout=", lambda x: fp8.attention(*(
        fp8.quantize(y, rotate=rotate).T for y, rotate in ((x.s, True), (x.s, True), (x.s, False)))), ValueError, "axis 3", "head_dim is axis 0"),
    row("attention", "values that are not in FP8", lambda x: attention(x.q, fp8.quantize(x.k), x.v), TypeError, "v is a numpy.ndarray", "both"),
    row("attention", "integer queries with FP8 keys", lambda x: attention(x.q.astype("i8"), *(fp8.quantize(y) for y in (x.k, x.v))), TypeError,
        "q is int64 and k is an FP8"),
    *[row("attention", f"FP8 keys and out: {name}", lambda x, make=make: written(x, make(x)), error, *words)
      for name, make, error, *words in (
          ("integers", lambda x: x.dout.astype("i2"), TypeError, "out is int16", "float32"), ("a list", lambda x: [1.0], TypeError, "out is a list; attention takes"),
          ("too short", lambda x: x.dout[:, :, :1], ValueError, "out has shape (16, 4, 1, 3)", "(16, 4, 6, 3)"),
      )],
    row("attention_vjp", "FP8 arrays with compute_dtype", converted(cupy_sdpa.attention_vjp, compute_dtype="float8_e4m3fn"), TypeError, "q is Fp8Array", "float16"),
    row("attention_vjp", "FP8 keys", lambda x: cupy_sdpa.attention_vjp(x.q, *(fp8.quantize(y) for y in (x.k, x.v))), Unsupported,
        "gradients of FP8 arrays", "compute_dtype="),
    row("attention_vjp", "an invariant call in FP8", pulled("f4", compute_dtype="float8_e4m3fn", batch_invariant=True), Unsupported,
        "batch_invariant is True", "arrays of 16 bits"),
    row("attention_vjp", "compute_dtype of integers", pulled("f4", compute_dtype="int8"), ValueError, "compute_dtype is 'int8'"),
    *[row("attention_vjp", f"dout in {dtype}, {options}", of_outputs(dtype, **options), TypeError, f"dout is {dtype}; it must be float32")
      for dtype, options in (("float16", {}), ("float64", {"compute_dtype": "float8_e4m3fn"}))],
    *[row("attention_vjp", f"a number as dout, {options}", of_outputs(None, **options), TypeError, "dout is an int; attention takes")
      for options in ({}, {"compute_dtype": "float8_e4m3fn"})],
    row("attention", "FP8 arrays and a block mask on the GPU", on_gpu(lambda x: attention(x, x, x, block_mask=cupy_sdpa.block_mask(
        lambda b, h, q, k: q >= k, 16, 16))), Unsupported, "mask or block_mask is not supported with FP8 arrays", "pass bfloat16", engine="fake"),
    # what Hopper cannot run
    *[row("fp8.attention", name, on_gpu(call, d), Unsupported, *words, engine="fake")
      for name, d, call, *words in (
          ("one query", 16, lambda x: fp8.attention(x[:, :, :1], x, x), "FP8 needs two or more", "pass the query twice"),
          ("softcap", 16, lambda x: fp8.attention(x, x, x, softcap=2.0), "softcap is not supported"),
          ("a scale below 0", 16, lambda x: fp8.attention(x, x, x, scale=-1.0), "positive scale"),
          ("a bfloat16 output", 16, lambda x: fp8.attention(x, x, x, out_dtype="bfloat16"), "omit out_dtype"),
          ("half of head_dim", 16, lambda x: fp8.attention(x[:8], x[:8], x), "multiples of 16"),
          ("wide values", 144, lambda x: fp8.attention(x[:128], x[:128], x), "pad q and k"),
      )],
    row("fp8.attention", "packed sequences", lambda x: fp8.attention(*[fp8.quantize(x.normal(16, 2, 11))] * 3, **x.packed), Unsupported,
        "illegal instruction", engine="fake"),
    row("fp8.attention", "numpy queries among CuPy arrays", on_gpu(lambda x: fp8.attention(
        fp8.quantize(np.asfortranarray(x.dequantize().get())), x, x)), TypeError, "numpy", engine="fake"),
]  # fmt: skip


def first(size=2, **options):
    """The first member of a group."""
    return context_parallel(Loopback(size).members[0], **options)


def ones(heads, keys):
    """q, k and v of a member."""
    return [np.ones((4, n, 8, 1), order="F") for n in (heads, keys, keys)]


def packed(x, starts, **options):
    """The report of a call with packed sequences."""
    own = x.pq[:, :, :4].copy(order="F")
    return first().explain(own, own, own, cu_seqlens_q=starts, cu_seqlens_kv=starts, **options)


EXPLAIN, SHARD = "parallel.ContextParallel.explain", "parallel.ContextParallel.shard"
OF_PARALLEL = [
    row(EXPLAIN, "dropout on a GPU", lambda x: first().explain(x.s, x.s, x.s, dropout_p=0.25, seed=1), Unsupported,
        "no input for the call's place", engine="fake"),
    row(EXPLAIN, "offsets on the GPU", lambda x: packed(x, x.integers(0, 8)), TypeError, "pass a numpy array", engine="fake"),
    row(EXPLAIN, "a sequence longer than the maximum", lambda x: packed(x, np.array([0, 8]), max_seqlen_q=7), ValueError,
        "cu_seqlens_q has a sequence of 8; max_seqlen_q is 7"),
    row(EXPLAIN, "heads that the members cannot share", lambda x: first(3).explain(x.s, x.s, x.s, method="all_to_all"), Unsupported,
        "4 query heads cannot be divided equally among 3 members", "use method='ring'"),
    row(EXPLAIN, "heads of parts of groups", lambda x: first(3).explain(*ones(6, 2), method="all_to_all"), Unsupported,
        "do not form whole groups"),
    row(EXPLAIN, "lengths and a diagonal of the end", lambda x: first().explain(
        *ones(2, 2), seq_lens_kv=np.array([3], np.int32), causal="bottom_right", method="ring"), Unsupported,
        "bottom-right diagonal", "use method='all_to_all'"),
    row(EXPLAIN, "fewer values than keys", lambda x: first().explain(x.s, x.s, x.s[:, :, :5]), ValueError, "12 positions"),
    *[row(EXPLAIN, f"{length!r} as a length", lambda x, length=length: first().explain(x.s, x.s, x.s, seqlen_q=length), ValueError,
        f"seqlen_q is {length!r}; it must be an integer") for length in (3.5, -8, True, "8")],
    *[row(SHARD, f"the offsets {starts}", lambda x, starts=starts: first().shard(x.pq, cu_seqlens=np.array(starts)), kind, words)
      for starts, kind, words in (
          ([0, 4, 9], ValueError, "11 positions along axis 2; cu_seqlens has 9"),
          ([0, 4, 13], ValueError, "11 positions along axis 2; cu_seqlens has 13"),
          ([0, 6, 4, 11], ValueError, "begin with 0 and must not decrease"),
          ([0.0, 11.0], TypeError, "cu_seqlens is float64"),
          ([], TypeError, "(B + 1,)"))],
]  # fmt: skip


SHAPE = (64, 2, 6, 1)


def posed(q=SHAPE, k=SHAPE, v=SHAPE, **options):
    """What poses a problem of shapes."""
    return lambda x: problem(q, k, v, **{"dtype": "float16", **options})


def built(problems=(), gpu="h200", **options):
    """What builds plans."""
    return lambda x: store.build(problems, gpu, Path(tempfile.gettempdir(), "plans of mistakes"), **options)


OF_PLANS = [
    row("explain_function", "a function of numpy", lambda x: explain_function(np.sum, x.q), TypeError, "sum does not run a program"),
    row("explain_function", "a function that computes no attention", lambda x: explain_function(cupy_sdpa.alibi_slopes, 8), TypeError,
        "alibi_slopes does not run a program"),
    row("problem", "dtype int8", posed(dtype="int8"), TypeError, "q is int8"),
    row("store.read_problems", "a TOML file", read_from("[[attention]]\nq = [64, 8, 100, 2]"), ValueError, "line 1 is not a problem"),
    row("store.read_problems", "no JSON", read_from("{"), ValueError, "line 1 is not a problem: Expecting"),
    row("store.read_problems", "a line that is too deep", read_from("[" * 100_000), ValueError, "line 1 is not a problem"),
    row("store.read_problems", "a problem without arrays", read_from('{"q": 3}'), ValueError, "k, v, out is missing"),
    row("store.read_problems", "an empty file", read_from(""), ValueError, "problems.jsonl has no problem"),
    row("store.build", "a number as the GPU", built(gpu=90), TypeError, "gpu is 90", "'h200'"),
    row("store.build", "a version as a number", built(cudnn=9.28), TypeError, "cudnn is 9.28", "'9.19'"),
    row("store.build", "0 workers", built(workers=0), ValueError, "workers is 0", "1 or more"),
    row("store.save_problems", "a folder", lambda x: store.save_problems(tempfile.gettempdir()), OSError, tempfile.gettempdir()),
    row("Prepared", "the output of a prepared backward pass", lambda x: prepare(*x.qkv, backward=True)(
        x.dout, *x.qkv, x.dout, np.zeros((6, 4, 3), np.float32, order="F"), out=x.dout), TypeError, "out is not a result",
        "dq, dk, dv"),
    row("get_plan_cache", "a negative limit of bytes", lambda x: cupy_sdpa.get_plan_cache().set_recording_limit(-1), ValueError,
        "limit is -1 bytes", engine="fake"),
]  # fmt: skip


ROWS = [*FP8, *NNLIB, *PARALLEL, *STORE, *REFERENCE]
ROWS += OF_FP8 + OF_PARALLEL + OF_PLANS
