"""Which engine computes, and why: the choice that ``demo`` and ``run`` share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .._cudnn.library import library
from ..device import cupy_runtime
from ..explain import explain
from ..problem.tensor_spec import FLOAT_DTYPES
from ..version import version_text
from . import machine
from .console import CommandError, one_line

if TYPE_CHECKING:
    from ..plans.plan import PlanInfo

#: What cuDNN's attention computes in.
CUDNN_DTYPES = ("float16", "bfloat16")


@dataclass(frozen=True)
class Placed:
    """Arrays where their engine wants them.

    Attributes:
        arrays: q, k and v, CuPy's for cuDNN and numpy's for numpy.
        on_gpu: whether cuDNN computes.
        why: why it is this engine.
        plan: cuDNN's plan; None on numpy.
    """

    arrays: Sequence[Any]
    on_gpu: bool
    why: str
    plan: PlanInfo | None = None

    def __str__(self) -> str:
        return f"{'cuDNN' if self.on_gpu else 'numpy'} ({self.why})"


def add_options(parser: argparse.ArgumentParser, default_dtype: str | None) -> None:
    """Give a command ``--engine`` and ``--dtype``."""
    default = default_dtype or "the file's"
    parser.add_argument("--dtype", choices=FLOAT_DTYPES, default=default_dtype, help=f"compute in it (default: {default})")
    parser.add_argument(
        "--engine",
        choices=("auto", "cudnn", "numpy"),
        default="auto",
        help="auto: cuDNN where it can run, which needs float16 or bfloat16, else numpy (default)",
    )


def choose(wanted: str, dtype: str) -> tuple[bool, str]:
    """Whether cuDNN is to compute, and why.

    Args:
        wanted: ``auto``, ``cudnn`` or ``numpy``.
        dtype: what q, k and v are.

    Raises:
        CommandError: ``cudnn`` is wanted and cannot be had.
    """
    if wanted == "numpy":
        return False, "asked for with --engine numpy"
    reasons = machine.obstacles()
    if not reasons and dtype not in CUDNN_DTYPES:
        reasons = [f"cuDNN takes {' and '.join(CUDNN_DTYPES)}, not {dtype}; --dtype bfloat16 would use it"]
    if not reasons:
        device = cupy_runtime.cupy().cuda.runtime.getDevice()
        return True, f"{machine.gpus()[device]}, cuDNN {version_text(library().version)}"
    if wanted == "cudnn":
        raise CommandError(f"--engine cudnn cannot run here: {'; '.join(reasons)}")
    return False, reasons[0]


def place(wanted: str, arrays: Sequence[np.ndarray[Any, Any]], **options: Any) -> Placed:
    """Choose the engine and bring q, k and v to it.

    Args:
        wanted: ``auto``, ``cudnn`` or ``numpy``.
        arrays: q, k and v in Julia's layout.
        options: of the :func:`cupy_sdpa.attention` call that is to follow.

    Raises:
        CommandError: ``cudnn`` is wanted and cannot run this.
    """
    on_gpu, why = choose(wanted, arrays[0].dtype.name)
    if not on_gpu:
        return Placed(arrays, False, why)
    moved = [cupy_runtime.cupy().asarray(array, order="F") for array in arrays]
    report = explain(*moved, **options)  # the plan that it makes is the one that the call will use
    if report:
        return Placed(moved, True, why, report.plan)
    refusal = one_line("cuDNN cannot run this:\n" + "\n".join(report.reasons))
    if wanted == "cudnn":
        raise CommandError(refusal)
    return Placed(arrays, False, refusal)


def refuse_if_too_large(needed: int, what: str) -> None:
    """Refuse before any work what cannot fit into memory.

    Raises:
        CommandError: ``needed`` bytes are more than the system has to give.
    """
    available = machine.memory_available()
    if available is not None and needed > available:
        raise CommandError(
            f"{what} needs {needed / 2**30:.1f} GiB of memory with the result, {available / 2**30:.1f} GiB are available"
        )
