"""``plan``: build plans ahead of time, for a GPU that need not be in this machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from .. import store
from ..errors import CudnnError, Unsupported
from ..problem.problem import Problem
from ..support import gpus
from .helpers import machine
from .helpers.console import (
    CommandError,
    Help,
    Progress,
    add_json,
    file_error,
    one_line,
    positive,
    print_labeled,
    result,
    working,
)
from .helpers.engine import plan_facts
from .helpers.trace import read_entries

_EPILOG = """\
examples:
  python -m cupy_sdpa plan --gpu h200 shapes.toml -o plans/
  python -m cupy_sdpa plan --gpu h200 --trace problems.jsonl -o plans/
  CUPY_SDPA_CACHE_DIR=plans/ python serve.py    on a machine with this GPU and
                                                the same cuDNN and NVRTC

shapes.toml has a table for each attention problem:
  [[attention]]
  q = [128, 64, 4096, 1]            # (head_dim, heads, seq, batch)
  k = [128, 8, 4096, 1]
  v = [128, 8, 4096, 1]
  dtype = "bfloat16"
  causal = true                     # and other options of cupy_sdpa.problem()
  passes = ["forward", "backward"]  # default: forward; "jvp": attention_jvp
  lengths = [1024, 2048, 4096]      # replace the lengths in the shapes
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "plan",
        help="build plans ahead of time, also without the GPU",
        description="Build cuDNN plans that a process on another machine can load in milliseconds.",
        epilog=_EPILOG,
        formatter_class=Help,
    )
    parser.add_argument("shapes", type=Path, nargs="?", help="a TOML file")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="a file written by CUPY_SDPA_TRACE, in place of the TOML file"
    )
    parser.add_argument(
        "--gpu", action="append", required=True, metavar="NAME",
        help=f"{', '.join(gpus.NAMES)}, or a file written by info --describe; repeat it for several GPUs",
    )  # fmt: skip
    parser.add_argument("--cudnn", metavar="VERSION", help="the cuDNN version, or the path of a libcudnn.so.9")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER", help="the folder for the plans")
    parser.add_argument(
        "-j", "--jobs", type=positive, metavar="N", help="number of planning processes (default: one per CPU core)"
    )
    add_json(parser)
    parser.set_defaults(command=command)


def command(arguments: argparse.Namespace) -> int:
    """Run ``plan``; returns 1 if a problem has no plan."""
    if arguments.cudnn and "/" in arguments.cudnn:
        machine.check_library(arguments.cudnn)
    try:
        if (arguments.shapes is None) == (arguments.trace is None):
            raise CommandError("pass a TOML file, or --trace FILE")
        with working("reading the problems"):
            problems, skipped = _traced(arguments.trace) if arguments.trace else (store.read_problems(arguments.shapes), {})
        with Progress("planning") as progress:
            built = store.build(
                problems, arguments.gpu, arguments.output, cudnn=arguments.cudnn, workers=arguments.jobs, progress=progress
            )
    except OSError as error:
        raise CommandError(file_error(error)) from error
    except CudnnError as error:
        raise CommandError(machine.brief(error)) from error
    except ValueError as error:
        raise CommandError(str(error)) from error
    for line, reason in skipped.items():
        print_labeled("skipped", f"line {line} of {arguments.trace}: {reason}")
    for entry in built:
        print_labeled("refused" if entry.plan is None else "planned", f"{entry.problem}; {entry.gpu}: {_outcome(entry)}")
    refused = sum(entry.plan is None for entry in built)
    files = store.DiskCache(arguments.output)
    result(
        folder=str(arguments.output), planned=len(built) - refused, refused=refused,
        skipped=[{"line": line, "reason": reason} for line, reason in skipped.items()],
        problems=[
            {
                "problem": str(entry.problem), "gpu": entry.gpu, "reason": entry.reason,
                "plan": None if entry.plan is None else plan_facts(entry.plan),
            }
            for entry in built
        ],
    )  # fmt: skip
    print_labeled("store", f"{len(built) - refused} plans, {refused} refused; {files}")
    return 1 if refused else 0


def _traced(path: Path) -> tuple[list[Problem], dict[int, str]]:
    """The problems of a trace, and why some lines have none, by their numbers."""
    problems: list[Problem] = []
    skipped: dict[int, str] = {}
    for entry in read_entries(path):
        try:
            problems += entry.problems()
        except (TypeError, ValueError, Unsupported) as error:
            skipped[entry.number] = one_line(str(error))
    return problems, skipped


def _outcome(entry: store.Built) -> str:
    if entry.plan is None:
        return one_line(entry.reason)
    plan = entry.plan
    return f"engine {plan.engine}, {'already stored' if plan.loaded else f'{plan.build_ms:.0f} ms'}, {plan.size} bytes"
