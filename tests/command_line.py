"""Helpers for the tests of the command line."""

import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np

from cupy_sdpa import reference
from cupy_sdpa._cli import demo
from cupy_sdpa.layout import from_julia

ROOT = Path(__file__).parents[1]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def lines(capsys):
    """The printed lines of a command; nothing on stderr."""
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out.splitlines()


def complaint(capsys):
    """The error of a command, one line, without the program's name."""
    err = capsys.readouterr().err
    assert err.startswith("cupy_sdpa: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    return err.removeprefix("cupy_sdpa: ").rstrip("\n")


def python(*words, cwd, code=None, stdout=subprocess.PIPE):
    """Run a new Python process with warnings as errors."""
    command = [sys.executable, "-W", "error", *(["-c", code] if code else ["-m", "cupy_sdpa"]), *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=cwd, env=env, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=120, check=False)


def arrays(dtype=np.float32, *, seed=0):
    """q, k and v, (head_dim, heads, seq, batch)."""
    rng = np.random.default_rng(seed)
    shapes = {"q": (8, 4, 5, 2), "k": (8, 2, 7, 2), "v": (16, 2, 7, 2)}
    return {name: rng.standard_normal(shape, np.float32).astype(dtype, order="F") for name, shape in shapes.items()}


def save(given, *, layout="dhsb", path="in.npz"):
    """Write arrays to a file in a layout."""
    np.savez(path, **{name: from_julia(array, layout) for name, array in given.items()})


def error_of(out, stats, given, **options):
    """The error of a result against the reference, divided by the error that rounding explains."""
    exact, exact_stats = reference.attention(*given.values(), **options)
    allowed = demo.rounding(*given.values())
    assert out.shape == exact.shape
    worst = float(np.abs(out.astype(np.float64) - exact).max())
    if stats is not None:
        assert (stats.dtype, stats.shape) == (np.float32, exact_stats.shape)
        worst = max(worst, float(np.abs(stats - exact_stats).max()))
    return worst / allowed


LAYOUT_SHAPES = {"dhsb": ("dhsb", "shb"), "bshd": ("bshd", "bsh"), "bhsd": ("bhsd", "bhs")}
