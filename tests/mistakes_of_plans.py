"""Mistakes in what plans ahead and in what keeps plans: shapes, files of shapes, described GPUs, autotuning, plan caches."""

# mypy: ignore-errors
# (most mistakes are type errors)

import tempfile
from pathlib import Path

import numpy as np
from mistakes import row

import cupy_sdpa
from cupy_sdpa import prepare, problem, store

SHAPE = (64, 2, 6, 1)


def posed(q=SHAPE, k=SHAPE, v=SHAPE, **options):
    """What poses a problem of shapes."""
    return lambda x: problem(q, k, v, **{"dtype": "float16", **options})


TABLE = """
[[attention]]
q = [64, 8, 100, 2]
k = [64, 2, 100, 2]
v = [64, 2, 100, 2]
dtype = "bfloat16"
passes = ["forward", "backward"]
lengths = [128, 256]

[[attention]]
q = [64, 8, 1, 2]
k = [64, 2, 1000, 2]
v = [64, 2, 1000, 2]
dtype = "float16"
bucket = 512
"""


def read(text, *change):
    """What reads a file of shapes, with one text replaced."""

    def call(x):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "shapes.toml")
            path.write_text(text.replace(*change) if change else text)
            return store.read_problems(path)

    return call


def tuned_with_knobs(x):
    with cupy_sdpa.autotune(knobs=True):
        pass


#: In a file of shapes: what is replaced, by what, and parts of the message.
FILES = [
    ("a number in place of tables", (TABLE, "attention = 1"), "has no table"),
    ("a list of numbers in place of tables", (TABLE, "attention = [1]"), "table 1", "1 is not a table"),
    ("three arguments that are missing", (TABLE, "[[attention]]\nq = [1, 2]"), "table 1", "k, v, dtype is missing"),
    ("one length", ("[128, 256]", "5"), "table 1", "lengths is 5; it must be a list of non-negative integers"),
    ("no length", ("[128, 256]", "[]"), "table 1", "lengths is []; it must be a list"),
    ("a negative length", ("[128, 256]", "[-1]"), "table 1", "lengths is [-1]; it must be a list"),
    ("a number in place of passes", ('["forward", "backward"]', "5"), "table 1", "passes is 5; it must be a list"),
    ("a list in a list of passes", ('["forward", "backward"]', '[["forward"]]'), "table 1", "passes contains ['forward']"),
    ("a misspelled option in the second table", ("bucket = 512", "buckets = 512"), "table 2", "buckets"),
    ("lengths that differ", ("k = [64, 2, 1000, 2]", "k = [64, 2, 999, 2]"), "table 2", "999 and 1000"),
]

ROWS = [
    row("problem", "a word in place of a shape", posed(q="q"), TypeError, "q is 'q'; pass a shape"),
    row("problem", "a fraction", posed(k=(1.5, 8, 512, 1)), TypeError, "k is (1.5"),
    row("problem", "dtype int8", posed(dtype="int8"), TypeError, "q is int8"),
    row("problem", "two head dims", posed(k=(32, 2, 6, 1)), ValueError, "head dims"),
    row("problem", "an unknown corner", posed(causal="middle"), ValueError, "middle"),
    row("problem", "sinks of other heads", posed(sinks=np.zeros(7, "f4")), ValueError, "sinks", "(7,)"),
    row("problem", "sinks of another dtype", posed(sinks=np.zeros(2)), TypeError, "sinks", "float64"),
    row("problem", "a shape of sinks of other heads", posed(sinks=(3,)), ValueError, "sinks", "(3,)"),
    *(row("store.read_problems", mistake, read(TABLE, *change), ValueError, *words) for mistake, change, *words in FILES),
    row("prepare", "settings of knobs", lambda x: prepare(*x.qkv, autotune="knobs"), TypeError, "autotune is 'knobs'", "True or False"),
    row("autotune", "settings of knobs", tuned_with_knobs, TypeError, "knobs"),
    row("Prepared", "the output of a prepared backward pass", lambda x: prepare(*x.qkv, backward=True)(
        x.dout, *x.qkv, x.dout, np.zeros((6, 4, 3), np.float32, order="F"), out=x.dout), TypeError, "out is not a result",
        "dq, dk, dv"),
    row("get_plan_cache", "a limit of 0 plans", lambda x: cupy_sdpa.get_plan_cache().set_limit(0), ValueError, "the limit is 0",
        "clear()", engine="fake"),
    row("get_plan_cache", "a negative limit of bytes", lambda x: cupy_sdpa.get_plan_cache().set_recording_limit(-1), ValueError,
        "limit is -1 bytes", engine="fake"),
]  # fmt: skip
