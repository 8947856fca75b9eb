"""Selection of the engine for ``demo``, and the properties of a plan for ``--json``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..cudnn.library import library
from ..explanation import explain
from ..problem.tensor_spec import FLOAT_DTYPES
from ..runtime import cupy_runtime
from ..version import version_text
from . import machine
from .console import CommandError, one_line

if TYPE_CHECKING:
    from ..cudnn_engine.plan import PlanInfo

#: The dtypes that cuDNN's attention supports.
CUDNN_DTYPES = ("float16", "bfloat16")


class Placed(NamedTuple):
    """Arrays on the device of the selected engine.

    Attributes:
        arrays: q, k and v: numpy arrays for numpy, CuPy arrays for the others.
        engine: ``cuDNN``, ``CuPy`` or ``numpy``.
        why: the reason for the selection.
        how: how it computes, in one line.
        plan: cuDNN's plan; None on the others.
    """

    arrays: Sequence[Any]
    engine: str
    why: str
    how: str = "none: numpy evaluates the steps one by one"
    plan: PlanInfo | None = None

    def __str__(self) -> str:
        return f"{self.engine} ({self.why})"

    @property
    def on_gpu(self) -> bool:
        """Whether the engine computes on the GPU."""
        return self.engine != "numpy"

    @property
    def options(self) -> dict[str, Any]:
        """The options of a call that select the engine."""
        return {"engine": "cupy"} if self.engine == "CuPy" else {}


def plan_facts(plan: PlanInfo) -> dict[str, Any]:
    """The properties of a plan, for ``--json``."""
    return {
        "cudnn": version_text(plan.cudnn), "engine": plan.engine, "knobs": [list(knob) for knob in plan.knobs],
        "notes": list(plan.notes), "workspace_bytes": plan.workspace, "build_ms": plan.build_ms, "loaded": plan.loaded,
        "tuned": plan.tuned, "bytes": plan.size, "refused": list(plan.refused),
    }  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--engine`` and ``--dtype`` to a command."""
    parser.add_argument("--dtype", choices=FLOAT_DTYPES, default="bfloat16", help="dtype of the computation (default bfloat16)")
    parser.add_argument(
        "--engine",
        choices=("auto", "cudnn", "cupy", "numpy"),
        default="auto",
        help="auto (default): cuDNN if it can run, which requires float16 or bfloat16, else numpy; cupy: a GPU without cuDNN",
    )


def _choose(requested: str, dtype: str) -> tuple[str, str]:
    """The engine for a dtype, ``cuDNN``, ``CuPy`` or ``numpy``, and the reason.

    Raises:
        CommandError: ``cudnn`` or ``cupy`` is requested and not available.
    """
    if requested == "numpy":
        return "numpy", "requested by --engine numpy"
    if requested == "cupy":
        if missing := machine.obstacles_of_cupy():
            raise CommandError(f"--engine cupy cannot run here: {'; '.join(missing)}")
        return "CuPy", f"{machine.gpus()[_device()]}, without cuDNN"
    reasons = machine.obstacles()
    if not reasons and dtype not in CUDNN_DTYPES:
        reasons = [f"cuDNN supports {' and '.join(CUDNN_DTYPES)}, not {dtype}; use --dtype bfloat16"]
    if not reasons:
        return "cuDNN", f"{machine.gpus()[_device()]}, cuDNN {version_text(library().version)}"
    if requested == "cudnn":
        raise CommandError(f"--engine cudnn cannot run here: {'; '.join(reasons)}")
    return "numpy", reasons[0]


def _device() -> int:
    """The number of the current GPU."""
    return int(cupy_runtime.cupy().cuda.runtime.getDevice())


def place(requested: str, arrays: Sequence[np.ndarray[Any, Any]], **options: Any) -> Placed:
    """Select the engine for a call with options, and copy q, k and v to its device.

    Raises:
        CommandError: ``cudnn`` or ``cupy`` is requested and cannot run the call.
    """
    engine, why = _choose(requested, arrays[0].dtype.name)
    if engine == "numpy":
        return Placed(arrays, engine, why)
    moved = [cupy_runtime.cupy().asarray(array, order="F") for array in arrays]
    if engine == "CuPy":
        how = str(explain(*moved, engine="cupy", **options)).split("\n")[0]
        return Placed(moved, engine, why, f"none: {how.removeprefix('runs with ')}")
    report = explain(*moved, **options)  # builds the plan that the call uses
    if report:
        return Placed(moved, engine, why, str(report.plan).split("\n")[0], report.plan)
    refusal = one_line("cuDNN cannot run this:\n" + "\n".join(report.reasons))
    if requested == "cudnn":
        raise CommandError(refusal)
    return Placed(arrays, "numpy", refusal)
