"""``plan``: build plans ahead of time, for a GPU that need not be in this machine."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from .. import Problem
from ..extend.cudnn import Cudnn
from . import console, problem_options
from .console import CommandError, Progress, add_json, command_errors, positive, print_labeled, result, working

if TYPE_CHECKING:
    from .. import store

USAGE = "%(prog)s D,Hq,Sq,B ... --gpu NAME -o FOLDER [options]"
DESCRIPTION = "Build cuDNN plans that a process on another machine can load in milliseconds."
EPILOG = f"""\
examples:
  python -m cupy_sdpa plan --gpu h200 --saved problems.jsonl -o plans/
  python -m cupy_sdpa plan 128,32,4096,1 --kv-heads 8 --gpu h200 -o plans/
  python -m cupy_sdpa plan 64,8,500,1 64,8,900,1 --backward --gpu l4 -o plans/
  CUPY_SDPA_CACHE_DIR=plans/ python serve.py    on a machine with this GPU and
                                                the same cuDNN and NVRTC

CUPY_SDPA_TRACE=problems.jsonl python serve.py writes the problems of a program.
{problem_options.EPILOG}"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("queries", type=problem_options.shape, nargs="*", metavar="D,Hq,Sq,B", help="shapes of q")
    parser.add_argument("--saved", type=Path, metavar="FILE", help="the problems of a program, instead of shapes")
    parser.add_argument(
        "--gpu", action="append", required=True, metavar="NAME",
        help=f"{', '.join(Cudnn.GPUS)}, or a file written by info --describe; repeat it for several GPUs",
    )  # fmt: skip
    parser.add_argument("--cudnn", metavar="VERSION", help="the cuDNN version, or the path of a libcudnn.so.9")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER", help="the folder for the plans")
    parser.add_argument(
        "-j", "--jobs", type=positive, metavar="N", help="number of planning processes (default: one per CPU core)"
    )
    problem_options.add_options(parser)
    parser.add_argument("--backward", action="store_true", help="both passes of a training step")
    add_json(parser)


def command(arguments: argparse.Namespace) -> int:
    """Run ``plan``; returns 1 if a problem has no plan, or one that cannot be stored."""
    from .. import store

    if arguments.cudnn and "/" in arguments.cudnn and not Path(arguments.cudnn).is_file():
        raise CommandError(f"--cudnn {arguments.cudnn}: there is no such file; pass the path of a libcudnn.so.9")
    if bool(arguments.queries) == bool(arguments.saved):
        raise CommandError("pass shapes such as 128,32,4096,1, or --saved FILE")
    with command_errors():
        with working("reading the problems"):
            problems = store.read_problems(arguments.saved) if arguments.saved else list(_problems(arguments))
        with Progress("planning") as progress:
            built = store.build(
                problems, arguments.gpu, arguments.output, cudnn=arguments.cudnn, workers=arguments.jobs, progress=progress
            )
    for entry in built:
        print_labeled("refused" if entry.plan is None else "planned", f"{entry.problem}; {entry.gpu}: {_outcome(entry)}")
    refused = sum(entry.plan is None for entry in built)
    files = store.DiskCache(arguments.output)
    result(
        folder=str(arguments.output), planned=len(built) - refused, refused=refused,
        problems=[
            {
                "problem": str(entry.problem), "gpu": entry.gpu, "reason": entry.reason,
                "plan": None if entry.plan is None else entry.plan.as_data(),
            }
            for entry in built
        ],
    )  # fmt: skip
    print_labeled("store", f"{len(built) - refused} plans, {refused} refused; {files}")
    return 1 if refused else 0


def _problems(arguments: argparse.Namespace) -> Iterator[Problem]:
    """Yield the problems of the shapes."""
    for queries in arguments.queries:
        yield problem_options.problem_of(arguments, queries, backward=False, stats=arguments.backward)
        if arguments.backward:
            yield problem_options.problem_of(arguments, queries, backward=True)


def _outcome(entry: store.Built) -> str:
    if entry.plan is None:
        return console.one_line(entry.reason)
    plan = entry.plan
    return f"engine {plan.engine}, {'already stored' if plan.loaded else f'{plan.build_ms:.0f} ms'}, {plan.size} bytes"
