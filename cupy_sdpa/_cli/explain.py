"""``explain``: whether and how a problem would run, from shapes alone."""

from __future__ import annotations

import argparse
import json
from typing import Any

from .. import explain as explained
from .. import problem
from ..calls.report import Report
from ..device import cupy_runtime
from ..errors import CudnnError
from ..support import gpus
from . import machine
from .console import CommandError, Help, show

_EPILOG = """\
examples:
  python -m cupy_sdpa explain 128,64,4096,1 --keys 128,8,4096,1 --gpu h200
  python -m cupy_sdpa explain 64,8,1000,2 --causal --backward --gpu h200
  python -m cupy_sdpa explain 64,8,1000,2 --window 127,0 --gpu h200 --cudnn 9.19

Shapes are (head_dim, heads, seq, batch). On a GPU that is here the plan is
built, and kept. Exit status 1: the problem cannot run.
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "explain",
        usage="%(prog)s D,Hq,Sq,B [options]",  # the shape first: --causal would take it for its value
        help="whether and how a problem would run",
        description="Every step of a problem's graph, and the plan for a GPU, or everything that speaks against it.",
        epilog=_EPILOG,
        formatter_class=Help,
    )
    parser.add_argument("queries", type=_shape, metavar="D,Hq,Sq,B", help="the shape of q")
    parser.add_argument("--keys", type=_shape, metavar="D,Hkv,Skv,B", help="the shape of k (default: that of q)")
    parser.add_argument("--values", type=_shape, metavar="Dv,Hkv,Skv,B", help="the shape of v (default: that of k)")
    parser.add_argument("--dtype", default="bfloat16", help="of all of them (default bfloat16)")
    parser.add_argument(
        "--causal", nargs="?", const="top_left", choices=("top_left", "bottom_right"), help="hide what is behind the diagonal"
    )
    parser.add_argument("--window", type=_window, metavar="LEFT,RIGHT", help="keys seen on each side; empty for no bound")
    parser.add_argument("--softcap", type=float, metavar="C", help="cap the scores")
    parser.add_argument("--backward", action="store_true", help="the gradients")
    parser.add_argument("--deterministic", action="store_true", help="the same bits in every run")
    parser.add_argument("--gpu", metavar="NAME", help=f"{', '.join(gpus.NAMES)}, or a file (default: the GPU that is here)")
    parser.add_argument("--cudnn", metavar="VERSION", help="with --gpu: the version (default: the one that is here)")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(command=command)


def command(arguments: argparse.Namespace) -> int:
    """Run ``explain``; 1 where the problem cannot run."""
    keys = arguments.keys or arguments.queries
    if arguments.gpu is None and cupy_runtime.current_device() is None:
        raise CommandError("there is no GPU here: name one with --gpu, such as --gpu h200")
    try:
        asked = problem(
            arguments.queries, keys, arguments.values or keys, dtype=arguments.dtype, causal=arguments.causal or False,
            window=arguments.window, softcap=arguments.softcap, backward=arguments.backward,
            deterministic=arguments.deterministic,
        )  # fmt: skip
        report = explained(asked, gpu=arguments.gpu, cudnn=arguments.cudnn)
    except CudnnError as error:
        hint = "" if arguments.cudnn else "; --cudnn VERSION asks the support table instead, which needs no cuDNN"
        raise CommandError(machine.brief(error) + hint) from error
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        raise CommandError(str(error)) from error
    if arguments.json:
        print(json.dumps(facts(report), indent=1))
    else:
        show(str(report))
    return 0 if report else 1


def facts(report: Report) -> dict[str, Any]:
    """What a report says, for machines."""
    plan = report.plan
    return {
        "problem": str(report.problem),
        "runs": bool(report),
        "reasons": list(report.reasons),
        "note": report.note,
        "steps": list(report.graph.lines()),
        "plan": None if plan is None else dict(plan.facts()),
        "workspace_bytes": report.workspace,
        "launches": [facts(launch) for launch in report.launches[1:]],
    }


def _shape(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no shape, such as 128,32,4096,1") from None


def _window(text: str) -> tuple[int | None, ...]:
    try:
        left, right = (int(part) if part else None for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no window, such as 127,0 or 127,") from None
    return left, right
