"""Mistakes in calls of gradients and derivatives, and in what describes or prepares a call."""

# mypy: ignore-errors
# (most mistakes are type errors)

import numpy as np
from mistakes import gradients, output, read_only, row

import cupy_sdpa
from cupy_sdpa import (
    BlockMask,
    Unsupported,
    attention,
    attention_backward,
    attention_jvp,
    attention_vjp,
    explain,
    fp8,
    jvp_problems,
    prepare,
    problem,
    supported,
    widen,
    zoo,
)


def backward(forward=None, replaced=None, **options):
    """The gradients of a call, with other options than its forward pass (``forward``) or other arrays (``replaced``)."""

    def make(x):
        out, stats = attention(*x.qkv, return_stats=True, **(options if forward is None else forward))
        arrays = {"dout": x.dout, "q": x.q, "k": x.k, "v": x.v, "out": out, "stats": stats}
        return attention_backward(**{**arrays, **(replaced(x, arrays) if replaced else {})}, **options)

    return make


def right(x):
    """The gradients of the dense arrays."""
    return gradients(x.dout, *x.qkv)


def square(order):
    """Gradients of arrays of one shape, passed in another order than dout, q, k, v, out, stats."""

    def make(x):
        arrays = {name: x.normal(8, 2, 6, 3) for name in ("dout", "q", "k", "v")}
        arrays["out"], arrays["stats"] = attention(arrays["q"], arrays["k"], arrays["v"], return_stats=True)
        return attention_backward(*(arrays[name] for name in order.split()))

    return make


def pulled(call=None, **options):
    """What a call makes of the arrays, the output and the pullback of ``attention_vjp``."""

    def make(x):
        out, pullback = attention_vjp(*x.qkv, **options)
        return pullback(x.dout) if call is None else call(x, out, pullback)

    return make


BACKWARD = [
    row("attention_backward", "dout after v", square("q k v dout out stats"), ValueError, "stats"),
    row("attention_backward", "dout and out swapped", square("out q k v dout stats"), ValueError, "out"),
    row("attention_backward", "a number as dout", backward(replaced=lambda x, a: {"dout": 1.0}), TypeError, "dout is a float",
        "numpy.asarray"),
    row("attention_backward", "one array for the gradients of equal arrays", lambda x: equal_gradients(x), ValueError, "overlaps"),
    row("attention_backward", "a bias gradient without a bias", backward({}, return_dbias=True), ValueError, "bias is None"),
    row("attention_backward", "a sink gradient without sinks", backward({}, return_dsinks=True), ValueError, "sinks is None"),
    row("attention_backward", "the gradient of a scale that is a number", backward({}, return_dscale=True), ValueError,
        "return_dscale is True and scale is None", "(Hq,)"),
    row("attention_vjp", "the gradient of a scale that is a number", lambda x: attention_vjp(*x.qkv, scale=0.5, return_dscale=True),
        ValueError, "return_dscale is True and scale is 0.5"),
    row("attention_jvp", "a scale for each head", lambda x: derived(x, scale=np.ones(4, "f4")), TypeError, "scale is a numpy.ndarray",
        "scale=1", "dq"),
    row("attention_vjp", "a scale for each head in FP8", lambda x: attention_vjp(*x.qkv, compute_dtype="float8_e4m3fn",
        scale=np.ones(4, "f4")), TypeError, "scale is a numpy.ndarray", "(Hq,)", "FP8", "scale=1"),
    row("attention_backward", "the gradient of a tensor that does not exist",
        backward({}, score_mod=zoo.alibi, tensors={"slopes": np.zeros(4, "f4")}, return_dtensors="slope"), ValueError, "'slope'",
        "slopes"),
    row("attention_backward", "the gradient of integers",
        backward({}, score_mod=zoo.alibi, tensors={"slopes": np.zeros(4, "i4")}, return_dtensors="slopes"), TypeError, "int32",
        "floating-point"),
    row("attention_backward", "return_stats in the backward pass", backward({}, return_stats=True), TypeError, "return_stats"),
    row("attention_backward", "pages", lambda x: attention_backward(x.dout, x.q, x.pages_k, x.pages_v, x.dout,
        np.zeros((6, 4, 3), "f4"), **x.paged), Unsupported, "page_table", "dense"),
    row("attention_backward", "FP8 arrays", lambda x: attention_backward(x.dout, *fp8.quantize_qkv(*x.qkv), x.dout,
        np.zeros((6, 4, 3), "f4")), TypeError, "q is an Fp8Array", "dequantize"),
    row("attention_backward", "the gradient of the log-sum-exp in float16", backward({}, lambda x, a: {"dstats": a["stats"].astype(
        "f2")}), TypeError, "dstats is float16", "float32"),
    row("attention_backward", "neither gradient", backward({}, lambda x, a: {"dout": None}), TypeError, "dout is None", "dstats"),
    row("attention_backward", "the gradient of the log-sum-exp as a number", backward({}, lambda x, a: {"dstats": 1.0}), TypeError,
        "dstats is a float"),
    row("attention_backward", "dq in the gradient of the log-sum-exp", lambda x: over_stats(x), ValueError, "dq overlaps dstats"),
    row("attention_backward", "float32 statistics of float64 arrays", lambda x: double_gradients(x), lambda x: right(x)),
]  # fmt: skip

VJP = [
    row("attention_vjp", "return_stats='max_sumexp'", lambda x: attention_vjp(*x.qkv, return_stats="max_sumexp"), TypeError,
        "return_stats is 'max_sumexp'; it must be True or False"),
    row("Pullback", "a gradient of the log-sum-exp that was not returned", pulled(lambda x, out, pull: pull(x.dout, x.dout[0])),
        TypeError, "return_stats=True"),
    row("Pullback", "a gradient of the log-sum-exp of another shape", lambda x: attention_vjp(*x.qkv, return_stats=True)[1](
        None, x.dout[0]), ValueError, "dstats has shape (4, 6, 3)", "(6, 4, 3)"),
    row("Pullback", "no gradient of two", lambda x: attention_vjp(*x.qkv, return_stats=True)[1](None), TypeError, "dout is None",
        "dstats"),
    row("Pullback", "the output is changed in place before both gradients", lambda x: both_after_a_change(x), ValueError, "out is of"),
    row("attention_vjp", "the gradient of a missing tensor", pulled(return_dtensors="slopes"), ValueError, "'slopes'"),
    row("Pullback", "no gradient", pulled(lambda x, out, pull: pull()), TypeError, "dout"),
    row("Pullback", "two gradients", pulled(lambda x, out, pull: pull(x.dout, x.dout)), TypeError, "second positional"),
    row("Pullback", "three gradients", pulled(lambda x, out, pull: pull(x.dout, x.dout, x.dout)), TypeError, "positional"),
    row("Pullback", "a call after a failed one", pulled(lambda x, out, pull: [failing(pull, x.q), pull(x.dout)][1]), right),
    row("Pullback", "the output as the gradient", pulled(lambda x, out, pull: pull(out)),
        lambda x: gradients(output(*x.qkv), *x.qkv)),
    row("Pullback", "q as its gradient", pulled(lambda x, out, pull: pull(x.dout, dq=x.q)), ValueError, "dq overlaps q"),
    row("Pullback", "the output is changed in place", pulled(lambda x, out, pull: [out.fill(0), pull(x.dout)][1]), ValueError,
        "out"),
    *(row("Pullback", f"converted gradients: {words}", lambda x, made=made: attention_vjp(x.s, x.s, x.s, compute_dtype="float16")[1](
        x.s, **made(x)), ValueError, words) for words, made in {
            "dk overlaps dv": lambda x: dict.fromkeys(("dk", "dv"), np.zeros_like(x.s)), "dq is read-only": lambda x: {"dq": read_only(x.s)},
        }.items()),
    row("Pullback", "an option", pulled(lambda x, out, pull: pull(x.dout, causal=True)), TypeError, "causal"),
]  # fmt: skip


def both_after_a_change(x):
    """Gradients of the output and the log-sum-exp, after the output was changed in place."""
    (out, stats), pullback = attention_vjp(*x.qkv, return_stats=True)
    out *= 2
    return pullback(x.dout, stats)


def equal_gradients(x):
    """One array for dk and dv of equal shapes."""
    s = x.s
    out, stats = attention(s, s, s, return_stats=True)
    target = np.empty_like(s)
    return attention_backward(s, s, s, s, out, stats, dk=target, dv=target)


def over_stats(x):
    """The gradient of q is written over the gradient of the log-sum-exp."""
    out, stats = attention(*x.qkv, return_stats=True)
    memory = np.zeros(x.q.size, "f4")
    dq = memory.reshape(x.q.shape, order="F")
    return attention_backward(x.dout, *x.qkv, out, stats, dq=dq, dstats=memory[: stats.size].reshape(stats.shape, order="F"))


def double_gradients(x):
    """The gradients of float64 arrays with statistics in float32."""
    arrays = [a.astype("f8", order="F") for a in x.qkv]
    out, stats = attention(*arrays, return_stats=True)
    return attention_backward(x.dout.astype("f8", order="F"), *arrays, out, stats)


def failing(function, *arguments):
    """Call a function that raises."""
    try:
        function(*arguments)
    except ValueError:
        return
    raise AssertionError("no error")


def derived(x, **options):
    """The derivative in the direction of random arrays."""
    return attention_jvp(*x.qkv, x.q, x.k, x.v, **options)


def tangent(x, allowed=True):
    """The output and its derivative in the direction of q, k and v themselves, by central differences in float64."""
    step = 1e-5
    plus, minus = (output(*(np.float64(a) * (1 + sign * step) for a in x.qkv), allowed=allowed) for sign in (1, -1))
    return output(*x.qkv, allowed=allowed), (plus - minus) / (2 * step)


JVP = [
    row("attention_jvp", "no tangents", lambda x: attention_jvp(*x.qkv), ValueError, "dq, dk and dv are None"),
    row("attention_jvp", "primals and tangents as pairs, as in JAX", lambda x: attention_jvp(x.qkv, x.qkv), TypeError, "required"),
    row("attention_jvp", "pairs (q, dq)", lambda x: attention_jvp((x.q, x.q), (x.k, x.k), (x.v, x.v)), TypeError, "q is a tuple"),
    row("attention_jvp", "the tangent of a bias", lambda x: derived(x, dbias=x.q), Unsupported, "dbias", "differences"),
    row("attention_jvp", "pages", lambda x: attention_jvp(x.q, x.pages_k, x.pages_v, x.q, **x.paged), Unsupported, "gather"),
    row("attention_jvp", "wide arrays and tangents", lambda x: attention_jvp(*x.qkv, x.q, widened=widen(*x.qkv, x.q)), TypeError,
        "omit one"),
    row("attention_jvp", "wide arrays of other tangents", lambda x: attention_jvp(*(a[..., :2] for a in x.qkv), widened=widen(
        *x.qkv, x.q)), ValueError, "widened", "(8, 4, 6, 2)"),
    row("attention_jvp", "wide arrays for another softcap", lambda x: attention_jvp(*x.qkv, softcap=2.0, widened=widen(
        *x.qkv, x.q, x.k)), ValueError, "widen", "softcap="),
    row("attention_jvp", "out over a bias", lambda x: over_bias(x), ValueError, "out overlaps bias"),
    row("attention_jvp", "out over an array of a score function", lambda x: derived(x, out=(t := np.zeros_like(x.dout)), tensors={
        "t": t[:7, 0, 0, 0]}, score_mod=lambda s, b, h, i, j, t: s + t[j]), ValueError, "out overlaps tensors['t']"),
    row("widen", "a misspelled option", lambda x: widen(*x.qkv, x.q, casual=True), TypeError, "did you mean causal"),
    row("widen", "one array", lambda x: widen(x.q), TypeError, "k"),
    row("widen", "another q in the second call", lambda x: attention_jvp(x.q * 2, x.k, x.v, widened=widen(*x.qkv, *x.qkv)),
        ValueError, "q differs", "call widen again"),
    row("jvp_problems", "an unknown tangent", lambda x: jvp_problems(*x.qkv, tangents=["q"]), ValueError, "'q'", "dq, dk, dv"),
    row("jvp_problems", "a text of tangents", lambda x: jvp_problems(*x.qkv, tangents="dq"), TypeError, "tangents", "['dq']"),
    row("jvp_problems", "a number of tensors", lambda x: jvp_problems(*x.qkv, tensors=3), TypeError, "tensors is an int", "mapping"),
    row("jvp_problems", "no tangents", lambda x: jvp_problems(*x.qkv, tangents=()), ValueError, "tangents is empty"),
    row("jvp_problems", "shapes without a dtype", lambda x: jvp_problems(*[(64, 8, 10, 2)] * 3), TypeError, "dtype='bfloat16'"),
]  # fmt: skip


def over_bias(x):
    """An output in the memory of the bias."""
    memory = np.zeros(x.dout.size, x.dout.dtype)
    bias = memory[: 7 * 6].reshape(7, 6, 1, 1, order="F")
    return derived(x, out=memory.reshape(x.dout.shape, order="F"), bias=bias)


SHAPES = {"dtype": "bfloat16"}
SHAPE = (64, 8, 100, 2)


def refused(which):
    """Raise the reasons of a report on an H200."""
    raised_by(explain(which, gpu="H200", cudnn="9.19"))


def raised_by(report):
    """Raise the reasons of a report on a call that cannot run."""
    raise report.error("\n".join(report.reasons))


def shapes(q=SHAPE, k=SHAPE, v=SHAPE, **options):
    """A problem of shapes."""
    return lambda x: problem(q, k, v, **{**SHAPES, **options})


def prepared(call, **options):
    """What a call makes of the arrays and a prepared call."""
    return lambda x: call(x, prepare(*x.qkv, **options))


DESCRIPTIONS = [
    row("problem", "numbers instead of shapes", lambda x: problem(64, 8, 100), TypeError, "(128, 32, 4096, 1)"),
    row("problem", "an unknown dtype", shapes(dtype="bf16"), TypeError, "bf16", "bfloat16"),
    row("problem", "float shapes", shapes((64.0, 8, 100, 2)), TypeError, "64.0", "pass a shape"),
    row("problem", "a negative length", shapes((64, 8, -1, 2)), ValueError, "negative"),
    row("explain", "shapes in C order", lambda x: refused(problem(*[(2, 100, 8, 64)] * 3, dtype="float16")), Unsupported,
        "(2, 100, 8, 64)", "layout='bshd'"),
    row("problem", "bias=True", shapes(bias=True), TypeError, "bias is True", "shape"),
    row("problem", "an output dtype of bfloat16 arrays", shapes(out_dtype="float16"), ValueError, "only FP8"),
    row("Problem", "a field is changed", lambda x: setattr(shapes()(x), "q", None), AttributeError, "q"),
    row("explain", "shapes instead of a problem", lambda x: explain(SHAPE, SHAPE, SHAPE), TypeError, "cupy_sdpa.problem("),
    row("explain", "a problem and options", lambda x: explain(shapes()(x), causal=True, gpu="H200", cudnn="9.19"), TypeError,
        "pass causal to cupy_sdpa.problem"),
    row("explain", "an unknown GPU", lambda x: explain(shapes()(x), gpu="RTX9090"), ValueError, "RTX9090", "h200"),
    row("explain", "a version without a GPU", lambda x: explain(shapes()(x), cudnn="9.19"), ValueError, "gpu='H200'"),
    row("explain", "a version that is no version", lambda x: explain(shapes()(x), gpu="H200", cudnn="latest"), ValueError,
        "latest", "9."),
    row("explain", "a problem without a GPU", lambda x: raised_by(explain(shapes()(x))), Unsupported, "gpu='H200'", engine="no GPU"),
    row("supported", "a problem without a GPU", lambda x: np.bool_(supported(shapes()(x))), lambda x: np.False_, engine="no GPU"),
    row("supported", "gradients of a problem that the GPU cannot compute", lambda x: np.bool_(supported(
        shapes(*[(512, 8, 64, 2)] * 3, backward=True)(x), gpu="H200", cudnn="9.19")), lambda x: np.False_),
    row("supported", "head dims that a derivative cannot have", lambda x: np.bool_(supported(
        *[x.normal(136, 1, 4, 1)] * 3, jvp=True)), lambda x: np.False_, engine="fake"),
    row("supported", "gradients of pages", lambda x: np.bool_(supported(x.q, x.pages_k, x.pages_v, **x.paged, backward=True)),
        lambda x: np.False_),
    row("supported", "float32 on a GPU", lambda x: np.bool_(supported(*(a.astype("f4") for a in x.qkv))), lambda x: np.False_, engine="fake"),
    row("supported", "k with other features", lambda x: supported(x.q, x.k[:4], x.v), ValueError, "8 and 4"),
    row("supported", "an unknown option", lambda x: supported(*x.qkv, is_causal=True), TypeError, "causal=True"),
    row("supported", "an unknown GPU", lambda x: supported(shapes()(x), gpu="RTX9090"), ValueError, "RTX9090", "h200"),
    row("explain", "both passes", lambda x: explain(*x.qkv, backward=True, jvp=True), ValueError, "one of them"),
    row("explain", "a block mask without blocks", lambda x: str(bool(explain(x.s, x.s, x.s, block_mask=no_blocks()))) == "True",
        lambda x: np.True_),
    row("Report", "a report used as a result", lambda x: np.asarray(explain(*x.qkv), float), TypeError, "Report"),
    row("prepare", "results instead of flags", lambda x: prepare(*x.qkv, out=x.dout), TypeError, "out"),
    row("Prepared", "arrays of another shape", prepared(lambda x, call: call(*(a[..., :2] for a in x.qkv))), ValueError,
        "(8, 4, 6, 2)", "(8, 4, 6, 3)", "Prepare a call for each problem"),
    row("Prepared", "two arrays", prepared(lambda x, call: call(x.q, x.k)), TypeError, "2 arrays", "q, k, v"),
    row("Prepared", "a gradient of a forward pass", prepared(lambda x, call: call(*x.qkv, dq=x.q)), TypeError,
        "dq is not a result"),
    row("Prepared", "return_stats at the call", prepared(lambda x, call: call(*x.qkv, return_stats=True)), TypeError,
        "return_stats"),
    row("Prepared", "another function", prepared(lambda x, call: call(*x.qkv, score_mod=zoo.relative_position), score_mod=zoo.softcap(2.0)),
        ValueError, "function"),
    row("Prepared", "the forward arrays of a prepared backward pass", lambda x: prepare(*x.qkv, backward=True)(*x.qkv), TypeError,
        "3 arrays", "dout, q, k, v, out, stats"),
    row("Prepared", "a call after a failed one", prepared(lambda x, call: [failing(call, *(a[..., :2] for a in x.qkv)),
        call(*x.qkv)][1]), lambda x: output(*x.qkv)),
    row("get_plan_cache", "a machine without a GPU", lambda x: np.int64(cupy_sdpa.get_plan_cache().size), lambda x: np.int64(0), engine="no GPU"),
    row("get_plan_cache", "a negative limit", lambda x: cupy_sdpa.get_plan_cache().set_limit(-1), ValueError, "-1", engine="fake"),
    row("get_plan_cache", "a limit that is no number", lambda x: cupy_sdpa.get_plan_cache().set_limit("1GB"), TypeError, "1GB",
        engine="fake"),
]  # fmt: skip


def no_blocks():
    """A block mask without blocks."""
    return BlockMask.from_blocks(np.zeros((1, 1), bool), 6, 6)


ROWS = [*BACKWARD, *VJP, *JVP, *DESCRIPTIONS]
