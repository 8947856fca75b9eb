"""``run``: attention of the user's own arrays, from an npz file into an npz file."""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import layout
from ..attention import attention
from ..device import cupy_runtime
from ..errors import CudnnError, Unsupported
from ..explain import explain
from ..problem.problem import Problem
from ..problem.tensor_spec import ITEMSIZE, numpy_dtype
from . import npz
from .console import CommandError, Help, add_json, milliseconds, say
from .engine import add_options, place, refuse_if_too_large

#: The arrays that a file must hold.
NAMES = ("q", "k", "v")
#: The layouts that a file may have, and those of the log-sum-exps beside them, which are (seq, heads, batch) here.
LAYOUTS = {"dhsb": "shb", "bshd": "bsh", "bhsd": "bhs"}
#: What the package raises for arrays that it cannot take.
_REFUSALS = (TypeError, ValueError, Unsupported, CudnnError)

_EPILOG = """\
The result has q's dtype in the file, whatever it is computed in. numpy keeps
bfloat16 in files as 2-byte void (|V2): such arrays are taken as bfloat16, and
bfloat16 is written so. Read it back with
numpy.load("out.npz")["out"].view(ml_dtypes.bfloat16).

examples:
  python -m cupy_sdpa run in.npz -o out.npz --causal
  python -m cupy_sdpa run torch.npz -o out.npz --layout bhsd --dtype bfloat16
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "run",
        help="attention of your own arrays, npz to npz",
        description="Attention of the arrays q, k and v of an npz file; out, and stats if asked for, go to another.",
        epilog=_EPILOG,
        formatter_class=Help,
    )
    parser.add_argument("input", type=Path, metavar="in.npz", help="a file of numpy.savez with the arrays q, k and v")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="out.npz", help="where the result goes")
    listed = "; ".join(f"{letters}: ({_legend(letters)})" for letters in LAYOUTS)
    parser.add_argument("--layout", choices=tuple(LAYOUTS), default="dhsb", help=f"of the arrays (default dhsb). {listed}")
    parser.add_argument("--causal", action="store_true", help="query i sees the keys up to and with i")
    parser.add_argument("--scale", type=float, metavar="X", help="of the scores (default: 1/sqrt(head_dim))")
    parser.add_argument("--stats", action="store_true", help="also write each query's log-sum-exp, float32")
    add_options(parser, None)
    add_json(parser)
    parser.set_defaults(command=command)


def command(arguments: argparse.Namespace) -> int:
    """Run ``run``.

    Raises:
        CommandError: it cannot be done; the output is then as it was before.
    """
    if os.path.realpath(arguments.output) == os.path.realpath(arguments.input):
        raise CommandError(f"-o {arguments.output} is the input: q, k and v would be lost; name another file")
    options = {"causal": arguments.causal, "scale": arguments.scale, "return_stats": arguments.stats}
    headers = npz.headers(arguments.input, NAMES)
    asked = _asked(arguments, headers, options)
    refuse_if_too_large(_memory(asked, headers), str(arguments.input))
    with npz.replacing(arguments.output) as file:
        arrays = [_loaded(arguments, name, numpy_dtype(asked.dtype)) for name in NAMES]
        try:
            placed = place(arguments.engine, arrays, **options)
            started = time.perf_counter()
            result = attention(*placed.arrays, **options)
        except _REFUSALS as error:
            raise _refusal(arguments.layout, error) from error
        out, stats = result if arguments.stats else (result, None)
        if placed.on_gpu:  # the copies wait for the GPU
            out = cupy_runtime.cupy().asnumpy(out, order="F")
            stats = None if stats is None else cupy_runtime.cupy().asnumpy(stats, order="F")
        seconds = time.perf_counter() - started
        with np.errstate(over="ignore"):  # float64 results may be too large for the file's dtype: infinite there
            out = out.astype(headers[0].dtype.newbyteorder("="), copy=False)
            results = {"out": layout.from_julia(out, arguments.layout)}
        if stats is not None:
            results["stats"] = stats.transpose(layout.order("shb", LAYOUTS[arguments.layout]))
        np.savez(file, **results)
    say("read", _reading(arguments.layout, headers))
    say("engine", f"{placed}, in {asked.dtype}: {milliseconds(seconds)}")
    say("wrote", f"{arguments.output}: {', '.join(f'{name} {a.shape} {a.dtype}' for name, a in results.items())}")
    return 0


def _asked(arguments: argparse.Namespace, headers: Sequence[npz.Header], options: Mapping[str, Any]) -> Problem:
    """The problem that the file poses, validated by its headers alone."""
    shapes = []
    dtype = None if arguments.dtype is None else numpy_dtype(arguments.dtype)
    for name, header in zip(NAMES, headers, strict=True):
        if len(header.shape) != 4:
            raise CommandError(
                f"{name} has {len(header.shape)} dimensions {header.shape}; "
                f"--layout {arguments.layout} needs 4: ({_legend(arguments.layout)})"
            )
        if header.dtype.kind != "f" and header.dtype != numpy_dtype("bfloat16"):
            raise CommandError(
                f"{name} is {header.dtype}; attention takes float16, bfloat16, float32 and float64: save it as one of them"
            )
        shapes.append([header.shape[axis] for axis in layout.order(arguments.layout, "dhsb")])
    elements = [np.zeros((), dtype or header.dtype) for header in headers]
    try:  # one element stands for all of an array, however large it is
        return explain(*map(np.broadcast_to, elements, shapes), **options).problem
    except _REFUSALS as error:
        raise _refusal(arguments.layout, error) from error


def _memory(asked: Problem, headers: Sequence[npz.Header]) -> int:
    """Bytes that the arrays need at the worst moment: all of them as computed with, and one as it is in the file."""
    computed = sum(math.prod(spec.shape) * ITEMSIZE[spec.dtype] for spec in asked.tensors)
    converted = math.prod(asked.out.shape) * headers[0].dtype.itemsize if headers[0].dtype.name != asked.dtype else 0
    return computed + converted + max(header.size for header in headers)


def _loaded(arguments: argparse.Namespace, name: str, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """An array of the file in Julia's layout, Fortran order and the dtype to compute in."""
    array = layout.to_julia(npz.load(arguments.input, name), arguments.layout)
    try:
        with np.errstate(over="raise", invalid="ignore"):
            return np.asarray(array, dtype, order="F")
    except FloatingPointError as error:
        raise CommandError(f"{name} has values that {dtype} cannot hold: choose another --dtype") from error


def _reading(letters: str, headers: Sequence[npz.Header]) -> str:
    """What the axes of the arrays were taken for: a wrong layout whose lengths fit gives results too, but wrong ones."""
    shapes: dict[tuple[int, ...], list[str]] = {}
    for name, header in zip(NAMES, headers, strict=True):
        shapes.setdefault(header.shape, []).append(name)
    arrays = (f"{' and '.join(names)} {shape}" for shape, names in shapes.items())
    return f"{', '.join(arrays)} as ({_legend(letters)})"


def _legend(letters: str) -> str:
    return ", ".join(layout.AXES[letter] for letter in letters)


def _refusal(letters: str, error: Exception) -> CommandError:
    shown = "" if letters == "dhsb" else f"the file's {letters} arrays are shown as ({_legend('dhsb')}) here; "
    hint = "--dtype converts all of them" if isinstance(error, TypeError) else "--layout says which layout the file has"
    return CommandError(f"{error} ({shown}{hint})")
