"""``run``: attention of the arrays in an npz file; the result is written to another npz file."""

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
from ..calls.options import Options
from ..device import cupy_runtime
from ..errors import CudnnError, Unsupported
from ..explain import explain
from ..problem.problem import Problem
from ..problem.tensor_spec import ITEMSIZE, numpy_dtype, placeholder
from .helpers import npz
from .helpers.console import CommandError, Help, add_json, milliseconds, print_labeled, working
from .helpers.console import result as report
from .helpers.engine import Placed, add_options, check_memory, place

#: The arrays that the input must contain.
NAMES = ("q", "k", "v")
#: The layouts of the arrays in a file, and for each the layout of stats, which are (seq, heads, batch) in this package.
LAYOUTS = {"dhsb": "shb", "bshd": "bsh", "bhsd": "bhs"}
#: Exceptions of the package for invalid or unsupported arrays.
_REFUSALS = (TypeError, ValueError, Unsupported, CudnnError)

_EPILOG = """\
The result has the dtype of q in the file, also with --dtype. numpy writes
bfloat16 as 2-byte void (|V2). Such arrays are read as bfloat16, and bfloat16
results are written in this form. To read a result, use
numpy.load("out.npz")["out"].view(ml_dtypes.bfloat16).

examples:
  python -m cupy_sdpa run in.npz -o out.npz --causal
  python -m cupy_sdpa run torch.npz -o out.npz --layout bhsd --dtype bfloat16
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "run",
        help="attention of your own arrays in an npz file",
        description="Compute attention of the arrays q, k and v of an npz file; write out (and stats) to another npz file.",
        epilog=_EPILOG,
        formatter_class=Help,
    )
    parser.add_argument("input", type=Path, metavar="in.npz", help="a file written by numpy.savez with q, k and v")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="out.npz", help="the file for the result")
    listed = "; ".join(f"{letters}: ({_legend(letters)})" for letters in LAYOUTS)
    parser.add_argument(
        "--layout",
        choices=tuple(LAYOUTS),
        help=f"layout of the arrays; required for arrays in C order (default dhsb, in Fortran order). {listed}",
    )
    parser.add_argument("--causal", action="store_true", help="query i attends to keys up to and including i")
    parser.add_argument("--scale", type=float, metavar="X", help="scale of the scores (default: 1/sqrt(head_dim))")
    parser.add_argument("--stats", action="store_true", help="also write stats, the log-sum-exp of each query, in float32")
    add_options(parser, None)
    add_json(parser)
    parser.set_defaults(command=command)


def command(arguments: argparse.Namespace) -> int:
    """Run ``run``.

    Raises:
        CommandError: the command cannot run; an existing output file is then unchanged.
    """
    if os.path.realpath(arguments.output) == os.path.realpath(arguments.input):
        raise CommandError(f"-o {arguments.output} is the input file and would be overwritten; use another file")
    options = {"causal": arguments.causal, "scale": arguments.scale, "return_stats": arguments.stats}
    headers = npz.headers(arguments.input, NAMES, Options.__annotations__.keys())
    is_named, arguments.layout = arguments.layout is not None, arguments.layout or "dhsb"
    problem = _problem(arguments, headers, options)
    if not is_named:
        _check_order(headers)
    check_memory(_memory(problem, headers), str(arguments.input))
    with npz.replacing(arguments.output) as file, working("computing"):
        arrays = [_load(arguments, name, numpy_dtype(problem.dtype)) for name in NAMES]
        try:
            placed = place(arguments.engine, arrays, **options)
            started = time.perf_counter()
            result = attention(*placed.arrays, **options)
        except _REFUSALS as error:
            raise _refusal(arguments.layout, error) from error
        out, stats = result if arguments.stats else (result, None)
        if placed.on_gpu:  # the copies synchronize, so the time includes the work on the GPU
            out = cupy_runtime.cupy().asnumpy(out, order="F")
            stats = None if stats is None else cupy_runtime.cupy().asnumpy(stats, order="F")
        seconds = time.perf_counter() - started
        with np.errstate(over="ignore"):  # float64 results that overflow the file's dtype become infinite
            out = out.astype(headers[0].dtype.newbyteorder("="), copy=False)
            results = {"out": layout.from_julia(out, arguments.layout)}
        if stats is not None:
            results["stats"] = stats.transpose(layout.order("shb", LAYOUTS[arguments.layout]))
        np.savez(file, **results)
    _report(arguments, headers, problem, placed, results, seconds)
    return 0


def _report(
    arguments: argparse.Namespace,
    headers: Sequence[npz.Header],
    problem: Problem,
    placed: Placed,
    results: Mapping[str, np.ndarray[Any, Any]],
    seconds: float,
) -> None:
    """Print what was read, computed and written."""
    report(
        read={
            "path": str(arguments.input), "layout": arguments.layout,
            "axes": [layout.AXES[letter] for letter in arguments.layout],
            "arrays": {name: _facts(header) for name, header in zip(NAMES, headers, strict=True)},
        },
        engine=placed.facts(), dtype=problem.dtype, time_ms=1e3 * seconds,
        wrote={"path": str(arguments.output), "arrays": {name: _facts(array) for name, array in results.items()}},
    )  # fmt: skip
    print_labeled("read", _interpretation(arguments.layout, headers))
    print_labeled("engine", f"{placed}, in {problem.dtype}: {milliseconds(seconds)}")
    print_labeled("wrote", f"{arguments.output}: {', '.join(f'{name} {a.shape} {a.dtype}' for name, a in results.items())}")


def _check_order(headers: Sequence[npz.Header]) -> None:
    """Check that axis 0 of every array is contiguous, as a call without ``layout=`` needs it.

    Raises:
        CommandError: an array is in C order.
    """
    for name, header in zip(NAMES, headers, strict=True):
        if not header.fortran and len(header.shape) == 4 and header.shape[0] > 1 and math.prod(header.shape[1:]) > 1:
            raise CommandError(
                f"{name} {header.shape} is in C order, where axis 0 is not contiguous, and --layout is not passed: name its "
                "axes, such as --layout bshd or bhsd; --layout dhsb confirms (head_dim, heads, seq, batch)"
            )


def _facts(array: Any) -> dict[str, Any]:
    """Shape and dtype, for ``--json``."""
    return {"shape": list(array.shape), "dtype": str(array.dtype)}


def _problem(arguments: argparse.Namespace, headers: Sequence[npz.Header], options: Mapping[str, Any]) -> Problem:
    """The attention problem of the file, validated from the headers alone."""
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
                f"{name} is {header.dtype}; supported are float16, bfloat16, float32 and float64: convert it to one of them"
            )
        shapes.append([header.shape[axis] for axis in layout.order(arguments.layout, "dhsb")])
    arrays = [placeholder(tuple(shape), dtype or header.dtype) for shape, header in zip(shapes, headers, strict=True)]
    try:
        return explain(*arrays, **options).problem
    except _REFUSALS as error:
        raise _refusal(arguments.layout, error) from error


def _memory(problem: Problem, headers: Sequence[npz.Header]) -> int:
    """The peak memory in bytes: all arrays in the dtype of the computation, and one array in the dtype of the file."""
    computed = sum(math.prod(spec.shape) * ITEMSIZE[spec.dtype] for spec in problem.tensors)
    converted = math.prod(problem.out.shape) * headers[0].dtype.itemsize if headers[0].dtype.name != problem.dtype else 0
    return computed + converted + max(header.size for header in headers)


def _load(arguments: argparse.Namespace, name: str, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Read an array and convert it to ``(head_dim, heads, seq, batch)``, Fortran order and the dtype of the computation."""
    array = layout.to_julia(npz.load(arguments.input, name), arguments.layout)
    try:
        with np.errstate(over="raise", invalid="ignore"):
            return np.asarray(array, dtype, order="F")
    except FloatingPointError as error:
        raise CommandError(f"{name} has values outside the range of {dtype}: use another --dtype") from error


def _interpretation(letters: str, headers: Sequence[npz.Header]) -> str:
    """How the axes were interpreted. A wrong ``--layout`` whose lengths match gives wrong results without an error."""
    shapes: dict[tuple[int, ...], list[str]] = {}
    for name, header in zip(NAMES, headers, strict=True):
        shapes.setdefault(header.shape, []).append(name)
    arrays = (f"{' and '.join(names)} {shape}" for shape, names in shapes.items())
    return f"{', '.join(arrays)} as ({_legend(letters)})"


def _legend(letters: str) -> str:
    return ", ".join(layout.AXES[letter] for letter in letters)


def _refusal(letters: str, error: Exception) -> CommandError:
    converted = "" if letters == "dhsb" else f"shapes are those after conversion from {letters} to ({_legend('dhsb')}); "
    hint = "--dtype converts all arrays" if isinstance(error, TypeError) else "--layout sets the layout of the file"
    return CommandError(f"{error} ({converted}{hint})")
