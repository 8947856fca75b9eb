"""Mistakes with FP8 arrays, NNlib's functions, groups, plan files, the reference and the integrations."""

# mypy: ignore-errors
# (most mistakes are type errors)

import importlib

import fake_libraries
import ml_dtypes
import numpy as np
from mistakes import output, read_from, row
from mistakes_of_others import fails, tokens

import cupy_sdpa
from cupy_sdpa import Unsupported, attention, attention_vjp, block_mask, fp8, nnlib, parallel, reference, store, zoo

FP8 = [
    row("fp8.quantize", "a list", lambda x: fp8.quantize([1.0]), TypeError, "x is a list", "numpy and CuPy"),
    row("fp8.quantize", "integers", lambda x: fp8.quantize(x.q.astype("i4")), TypeError, "int32", ".astype"),
    row("fp8.quantize", "an FP8 array", lambda x: fp8.quantize(fp8.quantize(x.q)), TypeError, "Fp8Array"),
    row("fp8.quantize", "a dtype of ml_dtypes", lambda x: fp8.quantize(x.q, ml_dtypes.float8_e4m3fn), TypeError, "float8_e4m3fn"),
    row("fp8.quantize", "an unknown dtype", lambda x: fp8.quantize(x.q, "fp8"), TypeError, "'fp8'", "float8_e5m2"),
    row("fp8.quantize", "two axes", lambda x: fp8.quantize(x.q[:, 0, :, 0]), ValueError, "(head_dim, heads, seq, batch)"),
    row("fp8.quantize", "lengths in a list", lambda x: fp8.quantize(x.q, lengths=[1, 2, 3]), TypeError, "[1, 2, 3]", "int32"),
    row("fp8.quantize", "lengths of another batch", lambda x: fp8.quantize(x.q, lengths=x.integers(1, 2)), ValueError, "(2,)"),
    row("fp8.quantize", "a length beyond the array", lambda x: fp8.quantize(x.q, lengths=x.integers(6, 9, -2)), ValueError, "9",
        "from 0 to 6"),
    row("fp8.quantize", "'bhsd' with three axes", lambda x: fp8.quantize(x.pq, layout="bhsd"), ValueError, "3 axes", "'bhsd'"),
    row("fp8.quantize", "(B, S, H, D) without layout=", lambda x: fp8.quantize(x.q.T.copy()), ValueError, "contiguous",
        "layout="),
    row("fp8.quantize", "rotate=1", lambda x: fp8.quantize(x.q, rotate=1), TypeError, "rotate is 1", "True or False"),
    row("fp8.quantize_qkv", "two arrays", lambda x: fp8.quantize_qkv(x.q, x.k), TypeError, "v"),
    row("fp8.quantize_qkv", "arrays of two dtypes", lambda x: fp8.quantize_qkv(x.q, x.k.astype("f2"), x.v), TypeError, "float16",
        "float32"),
    row("fp8.quantize_qkv", "rotate by position", lambda x: fp8.quantize_qkv(*x.qkv, True), TypeError, "True", "float8_e4m3fn"),
    row("fp8.attention", "arrays without factors", lambda x: fp8.attention(*x.qkv), TypeError, "q is a numpy.ndarray", "fp8.quantize"),
    row("fp8.attention", "elements in place of FP8 arrays", lambda x: attention(*(a.data for a in fp8.quantize_qkv(*x.qkv))),
        TypeError, "factors", "fp8.quantize"),
    row("fp8.attention", "q alone in FP8", lambda x: attention(fp8.quantize(x.q), x.k, x.v), TypeError, "k is a numpy.ndarray",
        "fp8.quantize"),
    row("fp8.attention", "q rotated and k not", lambda x: attention(fp8.quantize(x.q, rotate=True), *(
        fp8.quantize(a) for a in (x.k, x.v))), ValueError, "q.rotated is True", "same rotate"),
    row("fp8.attention", "queries that are not rotated, for a cache that is", lambda x: rotated_cache(fp8.quantize(x.q)), ValueError,
        "k.rotated is True", "same rotate"),
    row("fp8.attention", "the keys of a rotated cache as its values", lambda x: rotated_cache(x.q, values=True), ValueError,
        "v.rotated is True"),
    row("fp8.attention", "two FP8 dtypes", lambda x: attention(fp8.quantize(x.q, "float8_e5m2"), *(
        fp8.quantize(a) for a in (x.k, x.v))), TypeError, "float8_e5m2", "one dtype"),
    row("fp8.attention", "out", lambda x: attention(*fp8.quantize_qkv(*x.qkv), out=x.dout), TypeError, "out is passed", "omit out"),
    row("fp8.attention", "an output of float32", lambda x: fp8.attention(*fp8.quantize_qkv(*x.qkv), out_dtype="float32"),
        TypeError, "'float32'", "'bfloat16'"),
    row("fp8.attention", "a scale of 0", lambda x: fp8.attention(*fp8.quantize_qkv(*x.qkv), out_scale=0.0), ValueError,
        "above 0"),
    row("fp8.attention", "a scale of a 16-bit output", lambda x: fp8.attention(*fp8.quantize_qkv(*x.qkv), out_scale=1.0,
        out_dtype="float16"), ValueError, "omit one"),
    row("fp8.attention", "arrays of 'bshd' without layout=", lambda x: attention(*fp8.quantize_qkv(
        *(a.T for a in x.qkv), layout="bshd")), ValueError, "layout"),
    row("fp8.Fp8Array", "an array of float32", lambda x: fp8.Fp8Array(x.q, 1.0), TypeError, "float32", "fp8.quantize"),
    row("fp8.Fp8Array", "no factor", lambda x: fp8.Fp8Array(x.q.astype(ml_dtypes.float8_e4m3fn)), TypeError, "descale and scale"),
    row("fp8.Fp8Array", "a factor of 0", lambda x: fp8.Fp8Array(x.q.astype(ml_dtypes.float8_e4m3fn), 0.0), ValueError, "above 0"),
    *(row("fp8.Fp8Array", f"a factor of {value}, which float32 or its inverse does not have", lambda x, value=value: fp8.Fp8Array(
        x.q.astype(ml_dtypes.float8_e4m3fn), value), ValueError, f"descale is {value}", "float32") for value in (1e39, 1e-46)),
    row("fp8.Fp8Array", "a factor in float64", lambda x: fp8.Fp8Array(x.q.astype(ml_dtypes.float8_e4m3fn), np.ones(1)), TypeError,
        "float64", "float32"),
    row("fp8.Fp8Array", "scale and descale that are no inverses", lambda x: fp8.Fp8Array(
        x.q.astype(ml_dtypes.float8_e4m3fn), 2.0, scale=2.0), ValueError, "descale", "scale", "one of them"),
    row("fp8.Fp8Array", "arithmetic", lambda x: fp8.quantize(x.q) * 2, TypeError, "Fp8Array"),
    row("fp8.Fp8Array", "np.asarray", lambda x: np.asarray(fp8.quantize(x.q)), TypeError, "dequantize()"),
    row("fp8.Fp8Array", "a part of a rotated head dim", lambda x: fp8.quantize(x.q, rotate=True)[:4], ValueError, "dequantize first"),
    row("fp8.Fp8Array.dequantize", "float64", lambda x: fp8.quantize(x.q).dequantize("float64"), TypeError, "float64", "bfloat16"),
    row("fp8.Fp8Array.dequantize", "float8", lambda x: fp8.quantize(x.q).dequantize("float8_e5m2"), TypeError, "float8_e5m2"),
    row("fp8.Fp8Array.dequantize", "integers that FP8 stores exactly", lambda x: fp8.quantize(np.asfortranarray(np.float32(
        [1, -2, 4, 7])[:, None, None, None])).dequantize(), lambda x: np.array([1, -2, 4, 7.0])[:, None, None, None]),
    row("fp8.Fp8Array.transpose", "axes in a tuple", lambda x: host_of(fp8.quantize(x.q).transpose((3, 2, 1, 0))), lambda x: host_of(
        fp8.quantize(x.q)).T),
    row("fp8.Fp8Array.transpose", "two axes", lambda x: fp8.quantize(x.q).transpose(1, 0), ValueError, "axes"),
    row("fp8.DelayedScaling", "a history of 0", lambda x: fp8.DelayedScaling(x.q, 0), ValueError, "history is 0"),
    row("fp8.DelayedScaling", "the dtype in place of the history", lambda x: fp8.DelayedScaling(x.q, "float8_e5m2"), ValueError,
        "history is 'float8_e5m2'"),
    row("fp8.DelayedScaling.quantize", "a number", lambda x: fp8.DelayedScaling(x.q).quantize(1.0), TypeError, "float"),
    row("fp8.DelayedScaling.quantize", "one NaN, then finite arrays", lambda x: after_nan(x), lambda x: np.asarray([True]),),
    row("fp8.DelayedScaling.quantize", "numpy arrays with a history of CuPy", lambda x: fp8.DelayedScaling(x.q).quantize(x.q.get()),
        TypeError, "another DelayedScaling", engine="fake"),
    row("fp8.DelayedScaling.update", "an array in place of its maximum", lambda x: fp8.DelayedScaling(x.q).update(x.q), TypeError,
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
    row("nnlib.dot_product_attention", "True as the number of heads", nn(6, 7, 7, nheads=True), TypeError, "nheads is True", "integer"),
    row("nnlib.dot_product_attention", "text as alpha", nn(6, 7, 7, alpha="x"), TypeError, "alpha is 'x'", "True or False"),
    row("nnlib.make_causal_mask", "True as dims", lambda x: nnlib.make_causal_mask(x.q, dims=True), TypeError, "dims is True", "integer"),
    row("nnlib.make_padding_mask", "True as the number of keys", lambda x: nnlib.make_padding_mask(np.array([1]), True), ValueError,
        "kv_len is True", "a number of keys"),
    row("nnlib.dot_product_attention", "the mask in place of the bias", nn(6, 6, 6, 6), ValueError, "bias has shape", "(Skv, Sq, Hq, B)"),
    row("nnlib.dot_product_attention", "causal=True", nn(6, 6, 6, causal=True), TypeError, "no option causal",
        "mask=make_causal_mask(q)"),
    row("nnlib.dot_product_attention_vjp", "is_causal=True", lambda x: nnlib.dot_product_attention_vjp(*[x.s[:, :, 0, 0]] * 3, is_causal=True),
        TypeError, "mask=make_causal_mask(q)"),
    row("nnlib.dot_product_attention", "an option of attention", nn(6, 6, 6, scale=1.0), TypeError, "no option scale", "cupy_sdpa.attention"),
    row("nnlib.dot_product_attention", "True as the mask", nn(6, 6, 6, mask=True), TypeError, "mask is a bool", "array"),
    row("nnlib.dot_product_attention", "a causal mask of another length", nn(6, 6, 6, mask=nnlib.make_causal_mask(np.zeros((4, 5)))),
        ValueError, "5 keys", "6 keys"),
    row("nnlib.dot_product_attention", "a padding mask of another batch",
        nn(6, 7, 7, mask=nnlib.make_padding_mask(np.array([3, 4]), 7)), ValueError, "2 lengths", "3 batch entries"),
    row("nnlib.dot_product_attention", "fdrop as a rate", nn(6, 7, 7, fdrop=0.1), TypeError, "fdrop is 0.1", "function"),
    row("nnlib.dot_product_attention", "fdrop that returns nothing", nn(6, 7, 7, fdrop=lambda a: None), TypeError, "fdrop"),
    row("nnlib.dot_product_attention", "(1, S, features) in C order", lambda x: nnlib.dot_product_attention(
        *[flat(x)[..., :1].T.copy()] * 3), ValueError, "C order", ".T"),
    row("nnlib.dot_product_attention", "float32 on a GPU", lambda x: nnlib.dot_product_attention(*[x.xp.zeros(
        (16, 6, 3), "f4", order="F")] * 3), TypeError, "compute_dtype='bfloat16'", engine="fake"),
    row("nnlib.dot_product_attention_vjp", "alpha", lambda x: nnlib.dot_product_attention_vjp(*[flat(x)] * 3, alpha=True), TypeError,
        "alpha"),
    row("nnlib.dot_product_attention_vjp", "a number as the gradient", lambda x: nnlib.dot_product_attention_vjp(*[flat(x)] * 3)[1](
        1.0), TypeError, "dy is a float"),
    row("nnlib.dot_product_attention_vjp", "the pair of values", lambda x: nnlib.dot_product_attention_vjp(*[flat(x)] * 3)[1](
        (flat(x), None)), TypeError, "dy is a tuple"),
    row("nnlib.dot_product_attention_scores", "three axes", lambda x: nnlib.dot_product_attention_scores(flat(x), flat(x)),
        ValueError, "(d, nheads, len, B)"),
    row("nnlib.dot_product_attention_scores", "a float mask", lambda x: nnlib.dot_product_attention_scores(
        x.s, x.s, mask=np.ones((6, 6))), TypeError, "float64", ".astype(bool)"),
    row("nnlib.make_causal_mask", "a length", lambda x: nnlib.make_causal_mask(6), TypeError, "x is an int", "array"),
    row("nnlib.make_causal_mask", "dims from 0", lambda x: nnlib.make_causal_mask(x.q, dims=0), ValueError, "dims is 0",
        "from 1"),
    row("nnlib.make_causal_mask", "a float dims", lambda x: nnlib.make_causal_mask(x.q, dims=1.0), TypeError, "dims is 1.0"),
    row("nnlib.make_padding_mask", "a list", lambda x: nnlib.make_padding_mask([1, 2], 3), TypeError, "lengths is a list"),
    row("nnlib.make_padding_mask", "a Boolean mask", lambda x: nnlib.make_padding_mask(np.ones((3, 7), bool), 7), ValueError,
        "bool", "(B,) integers"),
    row("nnlib.make_padding_mask", "a length beyond the keys", lambda x: np.asarray(nnlib.make_padding_mask(np.array([9, -1]), 7)),
        lambda x: np.repeat([[[[1, 0]]]], 7, axis=0)),
    row("nnlib.make_padding_mask", "arguments swapped", lambda x: nnlib.make_padding_mask(7, np.array([1, 2])), TypeError,
        "lengths is an int"),
    row("nnlib.split_heads", "heads that do not divide", lambda x: nnlib.split_heads(flat(x), 3), ValueError, "16", "3"),
    row("nnlib.split_heads", "a float", lambda x: nnlib.split_heads(flat(x), 2.0), TypeError, "nheads is 2.0"),
    row("nnlib.join_heads", "two axes", lambda x: nnlib.join_heads(x.q[:, :, 0, 0][:, 0]), ValueError, "(8,)"),
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
    row("parallel.ContextParallel.attention", "a block mask of a part", grouped(lambda x, cp: attend(
        x, cp, block_mask=block_mask(zoo.causal, 3, 6))), ValueError, "mask has shape (6, 3, 1, 1)", "(6, 6, 4, 3)"),
    row("parallel.ContextParallel.attention", "an unknown method", grouped(lambda x, cp: attend(x, cp, method="p2p")), ValueError,
        "'p2p'", "'ring'"),
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
    row("parallel.ContextParallel.attention", "functions with one name and other values",
        grouped(lambda x, cp: attend(x, cp, score_mod=lambda s, *_: s * cp.rank)), ValueError, "score_mod"),
    row("parallel.ContextParallel.attention_backward", "whole gradients", grouped(lambda x, cp: group_backward(x, cp, x.s)),
        ValueError, "dout", "shard()"),
    row("parallel.ContextParallel.attention_backward", "statistics of fewer heads", grouped(lambda x, cp: group_backward(
        x, cp, None, lambda s: s[:, :2])), ValueError, "stats", "(3, 2, 3)"),
    row("parallel.ContextParallel.attention_backward", "a bias gradient", grouped(lambda x, cp: group_backward(
        x, cp, None, return_dbias=True)), Unsupported, "return_dbias", "one GPU"),
    row("parallel.ContextParallel.attention_backward", "a sink gradient without sinks", grouped(lambda x, cp: group_backward(
        x, cp, None, return_dsinks=True)), ValueError, "sinks is None"),
    row("parallel.ContextParallel.attention_backward", "statistics of another step", grouped(lambda x, cp: group_backward(
        x, cp, None, lambda s: s * 0)), ValueError, "stats"),
    row("parallel.ContextParallel.attention_vjp", "return_stats", grouped(lambda x, cp: cp.attention_vjp(
        *[cp.shard(x.s)] * 3, seqlen_q=6, return_stats=True)), TypeError, "return_stats"),
    row("parallel.ContextParallel.attention_vjp", "a whole gradient", grouped(lambda x, cp: cp.attention_vjp(
        *[cp.shard(x.s)] * 3, seqlen_q=6)[1](x.s)), ValueError, "dout", "shard()"),
    row("parallel.ContextParallel.attention_vjp", "the length is missing in the pullback", lambda x: grouped(lambda x, cp: cp.unshard(
        cp.attention_vjp(*[cp.shard(np.asfortranarray(x.s[:, :, :5]))] * 3, seqlen_q=5)[1](cp.shard(x.s[:, :, :5]))[0], seqlen=5))(x)[0],
        lambda x: attention_vjp(*[np.asfortranarray(np.float64(x.s[:, :, :5]))] * 3)[1](np.asfortranarray(
            np.float64(x.s[:, :, :5])))[0]),
    row("parallel.ContextParallel.explain", "a misspelled option", lambda x: parallel.context_parallel().explain(
        *[x.s] * 3, casual=True), TypeError, "causal"),
    row("parallel.ContextParallel.explain", "a problem", lambda x: parallel.context_parallel().explain(None, None, None), TypeError,
        "q is None"),
    row("parallel.ContextParallel.shard", "(B, S, H, D) without axis=", lambda x: parallel.context_parallel().shard(x.s.T.copy()),
        ValueError, "layout='bshd'", "axis=1"),
    row("parallel.ContextParallel.shard", "one sequence (1, S, H, D) without axis=", lambda x: parallel.context_parallel().shard(
        x.s[..., :1].T.copy()), ValueError, "layout='bshd'", "axis=1"),
    row("parallel.ContextParallel.attention", "parts (B, S, H, D) without layout=", grouped(lambda x, cp: cp.attention(
        *[cp.shard(x.s.T.copy(), axis=1)] * 3, seqlen_q=6)), ValueError, "in C order", "layout="),
    row("parallel.ContextParallel.shard", "a list", lambda x: parallel.context_parallel().shard([1]), TypeError, "x is a"),
    row("parallel.ContextParallel.shard", "an axis that does not exist", lambda x: parallel.context_parallel().shard(x.q, axis=4),
        ValueError, "axis is 4", "4 axes"),
    row("parallel.ContextParallel.shard", "a float axis", lambda x: parallel.context_parallel().shard(x.q, axis=2.0), TypeError,
        "axis is 2.0"),
    row("parallel.ContextParallel.unshard", "a whole array", grouped(lambda x, cp: cp.unshard(x.s, seqlen=6)), ValueError,
        "6 positions", "seqlen="),
    row("parallel.ContextParallel.unshard", "an odd length without seqlen", grouped(lambda x, cp: cp.unshard(
        cp.shard(x.s[:, :, :5]))), ValueError, "seqlen="),
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
    row("parallel.environment", "no launcher", lambda x: parallel.environment({}), RuntimeError, "run_on_gpus()"),
    row("parallel.run_threads", "the group in place of its members", lambda x: parallel.run_threads(parallel.Loopback(2), len),
        TypeError, "Loopback", "members"),
    row("parallel.run_threads", "a number of threads", lambda x: parallel.run_threads(2, len), TypeError, "members"),
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
    row("store.build", "an unknown GPU", lambda x: store.build([], "RTX9090", "/nowhere"), ValueError, "RTX9090"),
    row("store.build", "a shape in place of problems", lambda x: store.build((64, 8, 10, 2), "h200", "/nowhere"), TypeError,
        "64", "cupy_sdpa.problem"),
    row("store.build", "one problem in place of a list", lambda x: one_problem(), TypeError, "problems is <Problem", "a list of problems"),
    row("store.read_problems", "numbers in place of problems", read_from("1"), ValueError, "line 1 is not a problem"),
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
    row("reference.attention", "causal in capitals", lambda x: reference.attention(*x.qkv, causal="BOTTOM_RIGHT"), ValueError,
        "causal"),
    row("reference.attention", "PyTorch's mask", lambda x: reference.attention(*x.qkv, mask=np.ones((3, 4, 6, 7), bool)),
        ValueError, "(3, 4, 6, 7)", "(7, 6, 4, 3)"),
    row("reference.attention", "a mask of floats", lambda x: reference.attention(*x.qkv, mask=np.zeros((7, 6, 1, 1))), ValueError,
        "mask is float64", "bool"),
    row("reference.attention", "another batch of keys", lambda x: reference.attention(x.q[..., :2], x.k, x.v), ValueError,
        "(8, 4, 6, 2)", "(8, 2, 7, 3)"),
    row("reference.attention", "one of the offsets", lambda x: reference.attention(x.pq, x.pk, x.pv, cu_seqlens_q=x.starts),
        ValueError, "cu_seqlens_kv"),
    row("reference.attention_backward", "the order of attention", lambda x: reference.attention_backward(*x.qkv, x.dout), ValueError,
        "(16, 4, 6, 3)"),
    row("reference.attention_backward", "another batch of dout", lambda x: reference.attention_backward(
        x.normal(16, 4, 6, 4), *x.qkv), ValueError, "(16, 4, 6, 4)"),
    row("reference.attention_backward", "a bias gradient without a bias", lambda x: reference.attention_backward(
        x.dout, *x.qkv, return_dbias=True), ValueError, "bias"),
]  # fmt: skip


def torch_call(**options):
    """A call of the function for PyTorch."""

    def make(x):
        with fake_libraries.installed() as libraries:
            call = importlib.import_module("cupy_sdpa.integrations.torch").attention
            tensors = [libraries.torch(np.ascontiguousarray(a.transpose(3, 1, 2, 0))) for a in x.qkv]
            given = {name: value(x, libraries) if callable(value) else value for name, value in options.items()}
            positional = given.pop("positional", tensors)
            return call(*positional, **given)

    return make


def thinc_call(heads=2, width=24, lengths=(2, 4), **options):
    """A call of the layer for Thinc."""

    def make(x):
        with fake_libraries.installed() as libraries:
            layer = importlib.import_module("cupy_sdpa.integrations.thinc").fused_attention(heads, **options)
            ragged = libraries.modules["thinc.types"].Ragged
            return layer(ragged(np.zeros((6, width), "f4"), np.array(lengths, "i4")), is_train=True)

    return make


INTEGRATIONS = [
    row("integrations.torch.attention", "is_causal", torch_call(is_causal=True), TypeError, "causal=True"),
    row("integrations.torch.attention", "return_stats", torch_call(return_stats=True), TypeError, "return_stats"),
    row("integrations.torch.attention", "an option that requires a gradient", torch_call(alibi_slopes=lambda x, libraries: libraries.torch(
        np.ones(4, "f4"), requires_grad=True)), TypeError, "alibi_slopes", ".detach()"),
    row("integrations.torch.attention", "(B, S, H, D)", torch_call(layout="bshd"), ValueError, "(3, 4, 6, 8)"),
    row("integrations.torch.attention", "a mask of this package", torch_call(mask=lambda x, libraries: libraries.torch(
        np.ones((7, 6, 4, 3), bool))), ValueError, "mask.T"),
    row("integrations.torch.attention", "a sequence of a fused projection", torch_call(positional=lambda x, libraries: [libraries.torch(x.pq.T[:, 0])] * 3),
        ValueError, "2 axes"),
    row("integrations.thinc.fused_attention", "heads that do not divide the width", thinc_call(heads=5), ValueError, "24", "15"),
    row("integrations.thinc.fused_attention", "no heads", thinc_call(heads=0), ValueError, "heads"),
    row("integrations.thinc.fused_attention", "lengths of another batch", thinc_call(lengths=(2, 5)), ValueError, "7", "6"),
]  # fmt: skip

ROWS = [*FP8, *NNLIB, *PARALLEL, *STORE, *REFERENCE, *INTEGRATIONS]
