"""``explain``: whether a problem can run and how, from its shapes."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from .. import CudnnError, Problem, Report
from .. import explain as explained
from ..extend import cupy_runtime
from ..extend.cudnn import Cudnn
from . import problem_options
from .console import CommandError, add_json, command_errors, one_line, print_wrapped, result, working

#: The shape comes first: after --causal it would be parsed as its value.
USAGE = "%(prog)s D,Hq,Sq,B [options]"
DESCRIPTION = "Print whether a GPU can run a problem, and its plan; or all reasons why it cannot."
EPILOG = f"""\
examples:
  python -m cupy_sdpa explain 128,64,4096,1 --kv-heads 8 --gpu h200
  python -m cupy_sdpa explain 64,8,1000,2 --causal --backward --gpu h200 --steps
  python -m cupy_sdpa explain 2,8,1000,64 --layout bhsd --gpu h200 --cudnn 9.19
  python -m cupy_sdpa explain 64,8,1,4 --keys 64,8,900,4 --pages 64 --gpu h200

{problem_options.EPILOG}Without --gpu the plan is built for the current GPU and cached. Exit status 1:
the problem cannot run.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("queries", type=problem_options.shape, metavar="D,Hq,Sq,B", help="the shape of q")
    problem_options.add_options(parser)
    parser.add_argument("--backward", action="store_true", help="the backward pass")
    parser.add_argument("--gpu", metavar="NAME", help=f"{', '.join(Cudnn.GPUS)}, or a file (default: the current GPU)")
    parser.add_argument(
        "--cudnn",
        metavar="VERSION",
        help="with --gpu: the cuDNN version (default: the installed one; without cuDNN "
        f"{Cudnn().version} of the support table, and the report says so)",
    )
    parser.add_argument("--steps", action="store_true", help="also print the steps of the graph")
    add_json(parser)


def command(arguments: argparse.Namespace) -> int:
    """Run ``explain``; returns 1 if the problem cannot run."""
    with command_errors():
        described = problem_options.problem_of(arguments, arguments.queries, backward=arguments.backward)
        if arguments.gpu is None and cupy_runtime.current_device() is None:
            raise CommandError("this machine has no GPU: name one with --gpu, for example --gpu h200")
        with working("planning"):
            report = _explained(described, arguments.gpu, arguments.cudnn)
    scale = "scale", max(described.sizes[0], 1) ** -0.5  # which the problem does not contain
    report = dataclasses.replace(report, scalars=(scale, ("softcap", arguments.softcap)) if arguments.softcap else (scale,))
    result(**as_json(report))
    print_wrapped(str(report) if arguments.steps else report.summary())
    return 0 if report else 1


def _explained(problem: Problem, gpu: str | None, cudnn: str | None) -> Report:
    """Return the report; if no plan can be built for a described GPU, the support table's report for the newest cuDNN."""
    try:
        return explained(problem, gpu=gpu, cudnn=cudnn)
    except CudnnError as error:
        if gpu is None or cudnn is not None:
            raise
        report = explained(problem, gpu=gpu, cudnn=Cudnn().version)
        refused = f"; from the support table alone, not planned: {one_line(error.summary)}"  # other notes already say so
        note = f"{report.note}{refused * (not report)} (--cudnn VERSION selects another version)"
        return dataclasses.replace(report, note=note)


def as_json(report: Report) -> dict[str, Any]:
    """Return a report as JSON values."""
    d, dv, hq, hkv, sq, skv, b = report.problem.sizes
    sizes = {"head_dim": d, "value_dim": dv, "q_heads": hq, "kv_heads": hkv, "queries": sq, "keys": skv, "batch": b}
    return {
        "problem": str(report.problem),
        "sizes": sizes,
        "dtype": report.problem.dtype,
        "backward": report.problem.backward,
        "runs": bool(report),
        "reasons": list(report.reasons),
        "note": report.note,
        "inputs": [
            {"name": t.name, "shape": list(report.shape_of(t)), "dtype": t.dtype}
            for t in report.graph.by_role("input", "constant")
        ],
        "steps": [
            {
                "formula": node.formula, "shape": list(report.shape_of(node.out)), "dtype": node.out.dtype,
                "outputs": [t.name for t in node.outputs if t.role == "output"],
            }
            for node in report.graph.nodes
        ],
        "plan": None if report.plan is None else report.plan.as_data(),
        "workspace_bytes": report.workspace,
        "workarounds": list(report.workarounds),
        "unverified": list(report.unverified),
        "batch_dependence": report.batch_dependence,
        "launches": [as_json(launch) for launch in report.launches[1:]],
    }  # fmt: skip
