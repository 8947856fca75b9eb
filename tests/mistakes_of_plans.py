"""Mistakes in what plans ahead and in what keeps plans: shapes, files of problems, described GPUs, autotuning, plan caches."""

# mypy: ignore-errors
# (most mistakes are type errors)

import tempfile
from pathlib import Path

import numpy as np
from mistakes import read_from, row

import cupy_sdpa
from cupy_sdpa import prepare, problem, store
from cupy_sdpa.composed import explain_function

SHAPE = (64, 2, 6, 1)


def posed(q=SHAPE, k=SHAPE, v=SHAPE, **options):
    """What poses a problem of shapes."""
    return lambda x: problem(q, k, v, **{"dtype": "float16", **options})


def built(problems=(), gpu="h200", **options):
    """What builds plans."""
    return lambda x: store.build(problems, gpu, Path(tempfile.gettempdir(), "plans of mistakes"), **options)


def within_validate(x):
    with cupy_sdpa.validate():
        cupy_sdpa.attention(x.q, x.k[:4], x.v)


ROWS = [
    row("composed.explain_function", "a function of numpy", lambda x: explain_function(np.sum, x.q), TypeError, "sum runs no program"),
    row("composed.explain_function", "a function that computes no attention", lambda x: explain_function(cupy_sdpa.alibi_slopes, 8), TypeError,
        "alibi_slopes runs no program"),
    row("composed.explain_function", "keys of another head dim", lambda x: explain_function(cupy_sdpa.attention, x.q, x.k[:4], x.v), ValueError,
        "head dim"),
    row("validate", "keys of another head dim in its block", within_validate, ValueError, "head dim"),
    row("problem", "a word in place of a shape", posed(q="q"), TypeError, "q is 'q'; pass a shape"),
    row("problem", "dtype int8", posed(dtype="int8"), TypeError, "q is int8"),
    row("problem", "two head dims", posed(k=(32, 2, 6, 1)), ValueError, "head dims"),
    row("problem", "an unknown corner", posed(causal="middle"), ValueError, "middle"),
    row("problem", "sinks of other heads", posed(sinks=np.zeros(7, "f4")), ValueError, "sinks", "(7,)"),
    row("problem", "sinks of another dtype", posed(sinks=np.zeros(2)), TypeError, "sinks", "float64"),
    row("store.read_problems", "a TOML file", read_from("[[attention]]\nq = [64, 8, 100, 2]"), ValueError, "line 1 is not a problem"),
    row("store.read_problems", "an empty file", read_from(""), ValueError, "problems.jsonl has no problem"),
    row("store.build", "a number as the GPU", built(gpu=90), TypeError, "gpu is 90", "'h200'"),
    row("store.build", "a path that does not exist", built(gpu=Path("h300.json")), ValueError, "no GPU named 'h300.json'", "info --describe"),
    row("store.build", "a version as a number", built(cudnn=9.28), TypeError, "cudnn is 9.28", "'9.19'"),
    row("store.build", "0 workers", built(workers=0), ValueError, "workers is 0", "1 or more"),
    row("store.save_problems", "a folder", lambda x: store.save_problems(tempfile.gettempdir()), OSError, tempfile.gettempdir()),
    row("prepare", "settings of knobs", lambda x: prepare(*x.qkv, autotune="knobs"), TypeError, "autotune is 'knobs'", "True or False"),
    row("Prepared", "the output of a prepared backward pass", lambda x: prepare(*x.qkv, backward=True)(
        x.dout, *x.qkv, x.dout, np.zeros((6, 4, 3), np.float32, order="F"), out=x.dout), TypeError, "out is not a result",
        "dq, dk, dv"),
    row("get_plan_cache", "a negative limit of bytes", lambda x: cupy_sdpa.get_plan_cache().set_recording_limit(-1), ValueError,
        "limit is -1 bytes", engine="fake"),
]  # fmt: skip
