"""Mistakes with FP8 arrays."""

# mypy: ignore-errors

import ml_dtypes
import numpy as np
from mistakes import row

import cupy_sdpa
from cupy_sdpa import Unsupported, attention, explain, fp8
from cupy_sdpa.parallel import Loopback, context_parallel, run_threads


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


ROWS = [
    row("fp8.quantize", "an unknown layout", lambda x: fp8.quantize(x.q, layout="bdhs"), ValueError, "layout is 'bdhs'"),
    row("fp8.quantize_qkv", "lists", lambda x: fp8.quantize_qkv([1.0], [1.0], [1.0]), TypeError, "x is a list", "numpy and CuPy arrays"),
    row("fp8.DelayedScaling", "a negative amax", lambda x: fp8.DelayedScaling(x.q, amax=-1.0), ValueError, "amax is -1.0", "above 0"),
    row("fp8.DelayedScaling", "an amax beyond float32", lambda x: fp8.DelayedScaling(x.q, amax=1e42), ValueError, "amax is 1e+42", "float32"),
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
    row("attention_vjp", "float64 with FP8", pulled("f8", compute_dtype="float8_e5m2"), TypeError, "q is float64", "dtype of the gradients"),
    *[row("attention_vjp", f"dout in {dtype}, {options}", of_outputs(dtype, **options), TypeError, f"dout is {dtype}; it must be float32")
      for dtype, options in (("float16", {}), ("float64", {"compute_dtype": "float8_e4m3fn"}))],
    *[row("attention_vjp", f"a number as dout, {options}", of_outputs(None, **options), TypeError, "dout is an int; attention takes")
      for options in ({}, {"compute_dtype": "float8_e4m3fn"})],
    row("attention_backward", "elements of FP8", lambda x: cupy_sdpa.attention_backward(*[elements(x)] * 5, np.ones((6, 4, 3), "f4")), Unsupported,
        "compute_dtype"),
    row("attention", "FP8 arrays and a block mask on the GPU", on_gpu(lambda x: attention(x, x, x, block_mask=cupy_sdpa.block_mask(
        lambda b, h, q, k: q >= k, 16, 16))), Unsupported, "mask or block_mask is not supported with FP8 arrays", "pass bfloat16", engine="fake"),
    row("explain", "the derivative of FP8 arrays", converted(explain, jvp=True), TypeError, "Fp8Array", "dequantize()"),
    row("nnlib.dot_product_attention", "FP8 arrays", converted(cupy_sdpa.nnlib.dot_product_attention), TypeError, "q is an Fp8Array", "dequantize()"),
    row("parallel.ContextParallel.attention", "FP8 arrays", lambda x: run_threads(
        Loopback(2).members, lambda member: context_parallel(member).attention(*fp8.quantize_qkv(*x.qkv))), TypeError, "q is an Fp8Array", "dequantize()"),
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
    row("fp8.attention", "head_dim that is not contiguous", on_gpu(lambda x: fp8.attention(x.T, x.T, x.T)), ValueError, "axis 0 must be contiguous", engine="fake"),
    row("fp8.attention", "numpy queries among CuPy arrays", on_gpu(lambda x: fp8.attention(
        fp8.quantize(np.asfortranarray(x.dequantize().get())), x, x)), TypeError, "numpy", engine="fake"),
]  # fmt: skip
