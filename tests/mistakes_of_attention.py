"""Mistakes in the arrays, options and results of attention, of its gradients and of merge, and in score functions."""

# mypy: ignore-errors
# (most mistakes are type errors)

import math

import numpy as np
from mistakes import read_only, row

import cupy_sdpa
from cupy_sdpa import (
    BlockMask,
    Unsupported,
    attention,
    attention_backward,
    attention_vjp,
    explain,
    merge,
    shared_prefix_attention,
)
from cupy_sdpa.composed import widen


def options(engine="numpy", **rows):
    """Rows of calls with one option: a list of (value, error, words) for each name."""
    return [
        row("attention", f"{name}={value!r:.60}", lambda x, n=name, v=value: attention(*x.qkv, **{n: v}), error, *words, engine=engine)
        for name, values in rows.items()
        for value, error, *words in values
    ]  # fmt: skip


OPTIONS = options(
    scale=[(value, ValueError, "finite in float32") for value in (math.inf, 1e39, -(10**400))],
    softcap=[(10**400, ValueError, "finite in float32"), (np.ones(1), TypeError, "softcap is a numpy.ndarray")],
    causal=[("bottom", ValueError, "causal is 'bottom'")],
    window=[
        ("all", TypeError, "window is 'all'"), ((1,), TypeError, "window is (1,)"),
        ((1, 0, "top_right"), ValueError, "its third entry must be"), ((1, 1, np.ones(3)), ValueError, "its third entry must be"),
    ],
    dropout_mask=[(np.ones((7, 6, 1, 3), bool), ValueError, "dropout_p is 0")],
    return_stats=[(np.ones(3), ValueError, "return_stats is array")],
    bucket=[(np.ones(3), TypeError, "bucket is array")],
    stats=[(np.zeros((6, 4, 3), order="F"), TypeError, "stats is float64; it must be float32")],
)  # fmt: skip
OPTIONS += [
    row("attention", f"the option {name} of another library", lambda x, n=name: attention(*x.qkv, **{n: 1}), TypeError, name, remedy)
    for name, remedy in {
        "alibi": "cupy_sdpa.alibi_slopes", "dropout_rate": "dropout_p=", "p_dropout": "dropout_p=",
        "generate_stats": "return_stats=True", "key_value_seq_lengths": "seq_lens_kv=", "query_seq_lengths": "seq_lens_q=",
        "seq_len_kv": "seq_lens_kv=", "seq_len_q": "seq_lens_q=",
    }.items()
]  # fmt: skip
OPTIONS += [
    row("attention", "an array of no dimensions", lambda x: attention(x.q[0, 0, 0, 0, ...], x.k, x.v), ValueError, "q has 0 dimensions"),
    row("attention", "other heads of v", lambda x: attention(x.q, x.k, x.v[:, :1]), ValueError, "heads", "k and v differ, 2 and 1"),
    row("attention", "another batch of v", lambda x: attention(x.q, x.k, x.v[..., :1]), ValueError, "q and v differ, 3 and 1"),
    row("attention", "no heads of keys", lambda x: attention(x.q, x.k[:, :0], x.v[:, :0]), ValueError, "q has 4 heads and k, v have 0"),
    row("attention", "an out within v", lambda x: attention(x.s[:, :, :5], x.s, x.s, out=x.s[:, :, 1:]), ValueError, "out overlaps"),
    row("attention", "a Boolean seed", lambda x: attention(*x.qkv, dropout_p=0.5, seed=True), TypeError, "seed is True"),
    row("attention", "an offset of 65 bits", lambda x: attention(*x.qkv, dropout_p=0.5, seed=1, offset=1 << 63), ValueError,
        "offset is 9", "64-bit integer"),
    row("attention", "a dropout mask of one head", lambda x: attention(*x.qkv, dropout_p=0.5, dropout_mask=np.ones((7, 6, 1, 3), bool)),
        ValueError, "dropout_mask has shape (7, 6, 1, 3)", "(7, 6, 4, 3)"),
    row("attention", "a bias and a bucket of packed sequences",
        lambda x: attention(x.pq, x.pk, x.pv, **x.packed, bias=np.zeros((6, 6, 1, 1), "f4"), bucket=8), ValueError, "round max_seqlen_q"),
    row("attention", "a tensor whose name is a number", lambda x: attention(*x.qkv, score_mod=max, tensors={1: x.q}), TypeError,
        "tensors has the key 1"),
    row("problem", "shapes of one axis", lambda x: cupy_sdpa.problem((8,), (8,), (8,), dtype="float16"), ValueError, "(8,)", "it needs 4"),
    row("explain", "a number as the version", lambda x: explain(cupy_sdpa.problem(x.s, x.s, x.s), gpu="h200", cudnn=9.19), TypeError,
        "9.19 is not a string"),
    row("explain", "a number as the GPU", lambda x: explain(cupy_sdpa.problem(x.s, x.s, x.s), gpu=3), TypeError, "gpu is 3",
        "string"),
    *(row("explain", f"a problem and {name}", lambda x, n=name, v=value: explain(
        cupy_sdpa.problem(x.s, x.s, x.s), **{n: v}, gpu="H200", cudnn="9.19"), TypeError, f"a problem is given, and {name}")
      for name, value in (("backward", True), ("k", np.ones(1)))),
    row("explain", "a read-only out", lambda x: explain(x.s, x.s, x.s, out=read_only(x.s)), ValueError, "out is read-only"),
    row("explain", "q passed twice", lambda x: explain(x.s, x.s, x.s, q=x.s), TypeError, "multiple values for argument 'q'"),
    row("composed.widen", "a mask by position", lambda x: widen(x.s, x.s, x.s, np.ones((6, 6, 1, 1), bool)), TypeError, "dq is bool", "mask="),
]  # fmt: skip


def backward(x, change=lambda name, array: array, **options):
    """The gradients of arrays (8, 4, 6, 3), with ``change(name, array)`` in place of every array."""
    given = {name: x.normal(8, 4, 6, 3) for name in ("dout", "q", "k", "v")}
    given["out"], given["stats"] = attention(*(given[name] for name in "qkv"), return_stats=True)
    given |= {"dq": x.xp.zeros_like(x.s), "dv": x.xp.zeros_like(x.s)}
    return attention_backward(**{name: change(name, array) for name, array in given.items()}, **options)


def of_backward(mistake, name, made, error, *words, engine="numpy", **options):
    """A row of a call with one changed array."""

    def make(x):
        return backward(x, lambda of, array: made(x, array) if of == name else array, **options)

    return row("attention_backward", mistake, make, error, *words, engine=engine)


GRADIENTS = [
    of_backward("out of another shape", "out", lambda x, a: a[:4], ValueError, "out has shape (4, 4, 6, 3)", "(8, 4, 6, 3)"),
    of_backward("statistics of fewer rows", "stats", lambda x, a: a[:5], ValueError, "stats has shape (5, 4, 3)"),
    of_backward("k of another head dim", "k", lambda x, a: a[:4], ValueError, "head dims", "8 and 4"),
    of_backward("a negative workspace", "", None, ValueError, "max_workspace is -1", "bytes", max_workspace=-1),
    of_backward("a scale of NaN", "", None, ValueError, "scale is nan", scale=math.nan),
    of_backward("deterministic='x'", "", None, TypeError, "deterministic is 'x'; it must be True or False", deterministic="x"),
    of_backward("gradients that add in varying order", "", None, Unsupported, "batch_invariant is True", "deterministic=True",
                engine="fake", batch_invariant=True),
    of_backward("dout in C order", "dout", lambda x, a: x.xp.ascontiguousarray(a), ValueError, "dout", "contiguous", engine="fake"),
    of_backward("statistics in C order", "stats", lambda x, a: x.xp.ascontiguousarray(a), ValueError, "stats has strides", engine="fake"),
    of_backward("out of numpy", "out", lambda x, a: a.get(), TypeError, "out is a numpy array", engine="fake"),
    row("attention_vjp", "stats", lambda x: attention_vjp(x.s, x.s, x.s, stats=x.q), TypeError, "attention_vjp does not take stats"),
]  # fmt: skip


def score(mistake, function, error, *words, tensors=None):
    """A row of a call with a score function."""
    return row("attention", mistake, lambda x: attention(*x.qkv, score_mod=function, tensors=tensors), error, *words)


FUNCTIONS = [
    score("a method of numpy's arrays", lambda s, b, h, i, j: s.tanh(), AttributeError, "write np.tanh(x) in place of x.tanh()"),
    score("an attribute of numpy's arrays", lambda s, b, h, i, j: s.shape, AttributeError, "no attribute 'shape'"),
    score("out= of a function of numpy", lambda s, b, h, i, j: np.add(s, 1, out=s), TypeError, "np.add", "the keywords out"),
    score("np.where of a condition alone", lambda s, b, h, i, j: np.where(s > 0), TypeError, "write np.where(condition, a, b)"),
    score("a score function of one parameter", lambda s: s, TypeError, "f(score, b, h, q_idx, kv_idx, **tensors) -> score"),
    score("a tensor of another name", lambda s, b, h, i, j, w: s, TypeError, "tensors has x", "'w'", tensors={"x": np.ones(1)}),
    score("a tensor named like the score", lambda s, b, h, i, j, **t: s, ValueError, "tensors has 's'", tensors={"s": np.ones(1)}),
    score("an error of the function itself", lambda s, b, h, i, j: len(3), TypeError, "object of type 'int' has no len()"),
    score("a score // 0", lambda s, b, h, i, j: s // 0, ZeroDivisionError, "by"),
    score("a score % 0.0", lambda s, b, h, i, j: s % 0.0, ZeroDivisionError, "by"),
    score("a position // 0", lambda s, b, h, i, j: s + i // 0, ZeroDivisionError, "by"),
    score("a position % 0.0", lambda s, b, h, i, j: s + i % 0.0, ZeroDivisionError, "by"),
]  # fmt: skip


def merged(mistake, make, error, *words, engine="numpy"):
    """A row of a call with an output (8, 2, 3, 1) and its statistics, of zeros."""

    def call(x):
        return make(x.xp.zeros((8, 2, 3, 1), "f4", order="F"), x.xp.zeros((3, 2, 1), "f4", order="F"))

    return row("merge", mistake, call, error, *words, engine=engine)


MERGE = [
    merged("statistics in a list", lambda o, s: merge([o], [[0.0]]), TypeError, "stats[0] is a list"),
    merged("packed statistics of another order", lambda o, s: merge([o[..., 0]], [s[..., 0]]), ValueError, "(3, 2)", "(2, 3)"),
    merged("float64 statistics of float32 outputs", lambda o, s: merge([o], [s.astype("f8")]), TypeError, "float64", "astype('float32')"),
    merged("sinks in float16", lambda o, s: merge([o], [s], sinks=np.zeros(2, "f2")), TypeError, "sinks is float16", "float32"),
    merged("out of another shape", lambda o, s: merge([o], [s], out=o[:4]), ValueError, "out has shape (4, 2, 3, 1)", "(8, 2, 3, 1)"),
    merged("out of another dtype", lambda o, s: merge([o], [s], out=o.astype("f2")), TypeError, "out is float16", "float32", "pass a new array"),
    merged("an out over the sinks", lambda o, s: merge([o + 0], [s], out=o, sinks=o[:2, 0, 0, 0]), ValueError, "out overlaps sinks"),
    merged("an out whose elements share memory", lambda o, s: merge([o, o], [s, s], out=np.lib.stride_tricks.as_strided(
        np.zeros(8, "f4"), o.shape, (4, 0, 0, 0))), ValueError, "elements share memory"),
    merged("float64 on a GPU", lambda o, s: merge([o.astype("f8")], [s]), TypeError, "float64", "float16, bfloat16, float32", engine="fake"),
]  # fmt: skip


def block_call(x, name, made, layout=None):
    """Both passes with a mask of blocks; one of the arrays is ``made(array)``."""
    change = lambda of, array: made(array) if of == name else array  # noqa: E731
    mask = BlockMask.from_blocks(np.array([[1, 0], [1, 1]], bool), 130, 130)
    q, k, v, dout = (x.normal(16, 4, 130, 1) for _ in range(4))
    sinks = change("sinks", x.xp.zeros(4, "f4"))
    options = {"block_mask": mask, "sinks": sinks} | ({"layout": layout} if layout else {})
    out, stats = attention(q, k, v, return_stats=True, **options)
    given = {name: change(name, array) for name, array in {"dout": dout, "out": out, "stats": stats}.items()}
    return attention_backward(
        given["dout"], q, k, v, given["out"], given["stats"], dq=change("dq", x.xp.zeros_like(q)), **options
    )


def gapped(array):
    """The array with another fastest axis."""
    return array.transpose(1, 0, 2, 3).copy(order="F").transpose(1, 0, 2, 3)


BLOCKS = [
    row("attention_backward", f"a block mask and {mistake}", lambda x, n=name, m=made: block_call(x, n, m), error, *words, engine=engine)
    for engine in ("numpy", "fake")
    for mistake, name, made, error, *words in (
        ("int32 sinks", "sinks", lambda a: a.astype("i4"), TypeError, "sinks is int32; it must be float32"),
        ("one sink", "sinks", lambda a: a[:1], ValueError, "sinks has shape (1,); it must be (4,)"),
        ("float64 statistics", "stats", lambda a: a.astype("f8"), TypeError, "stats is float64; it must be float32"),
        ("a dout in float64", "dout", lambda a: a.astype("f8"), TypeError, "dout is float64"),
        ("statistics of one head", "stats", lambda a: a[:, :1], ValueError, "stats has shape (130, 1, 1); it must be (130, 4, 1)"),
        ("no dout", "dout", lambda a: None, TypeError, "dout is None"),
        *((f"{name} with another order of axes", name, gapped, ValueError, f"{name} has a stride of") for name in ("dout", "out", "dq")),
    )
]  # fmt: skip
BLOCKS += [
    row("attention_backward", "a block mask and sinks with gaps", lambda x: block_call(x, "sinks", lambda a: x.xp.zeros(8, "f4")[::2]),
        ValueError, "sinks has strides", engine="fake"),
    row("attention", "a block mask and an out that is broadcast", lambda x: attention(x.s, x.s, x.s, out=x.xp.broadcast_to(
        x.xp.zeros((8, 1, 6, 3), x.dtype, order="F"), x.s.shape), block_mask=BlockMask.from_blocks(np.ones((1, 1), bool), 6, 6)),
        ValueError, "elements share memory", engine="fake"),
]  # fmt: skip


def prefixed(x, **change):
    """A shared prefix of one page of two sequences."""
    given = {"page_table": x.xp.asarray(np.array([[0, 0], [1, 2]], "i4", order="F")), "seq_lens_kv": x.integers(5, 8)}
    q = x.q[..., :2]
    results = {name: value(q, x.pages_k) for name, value in change.items() if callable(value)}
    return shared_prefix_attention(q, x.pages_k, x.normal(8, 2, 4, 6), 4, **{**given, **change, **results})


PREFIXES = [
    row("shared_prefix_attention", mistake, lambda x, c=change: prefixed(x, **c(x)), error, *words, engine=engine)
    for engine in ("numpy", "fake")
    for mistake, change, error, *words in (
        ("one length for two sequences", lambda x: {"seq_lens_kv": x.integers(5)}, ValueError, "seq_lens_kv has shape (1,)", "(2,)"),
        ("lengths in two axes", lambda x: {"seq_lens_kv": x.integers(5, 8).reshape(2, 1)}, ValueError, "seq_lens_kv has shape (2, 1)"),
        ("lengths in a list", lambda x: {"seq_lens_kv": [5.0, 8]}, TypeError, "seq_lens_kv is a list"),
        ("an invariant call", lambda x: {"batch_invariant": True}, ValueError, "batch_invariant is passed", "cupy_sdpa.attention"),
        ("the queries as out", lambda x: {"out": lambda q, k: q}, ValueError, "out overlaps q"),
    )
]  # fmt: skip

ROWS = [*OPTIONS, *GRADIENTS, *FUNCTIONS, *MERGE, *BLOCKS, *PREFIXES]
