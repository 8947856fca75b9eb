"""Plans on disk: where they are kept, and making them ahead of time for a GPU that is not here.

Plans that were built are kept in a folder, and found again by later processes: a first call then takes milliseconds, not the
half second in which cuDNN compiles a kernel. ``CUPY_SDPA_CACHE_DIR`` names another folder than ``cupy_sdpa`` in the user's
cache folder; ``0`` turns it off. A plan is found only by the same build of cuDNN and NVRTC, on the model of GPU
that it was made for.

>>> import cupy_sdpa.store
>>> "plans in" in str(cupy_sdpa.store.kept())
True
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .explain import problem
from .plans.disk_cache import DIRECTORY, DiskCache, current
from .problem.problem import Problem
from .problem.subproblems import subproblems
from .support.why_not import why_not
from .version import version_number, version_text

if TYPE_CHECKING:
    from .plans.plan import PlanInfo

__all__ = ["DIRECTORY", "Built", "DiskCache", "build", "kept", "read_problems"]


@dataclass(frozen=True)
class Built:
    """What became of one problem in :func:`build`.

    Attributes:
        problem: what was to be planned.
        gpu: the model of the GPU.
        plan: what is known of the plan; None where there is none.
        reason: why there is none; empty where there is one.
    """

    problem: Problem
    gpu: str
    plan: PlanInfo | None
    reason: str


def kept() -> DiskCache:
    """The store that this process uses: ``nbytes``, ``paths()``, ``clear()``; printed, where it is and what it holds."""
    return current()


def build(
    problems: Iterable[Problem],
    gpu: str | Sequence[str],
    folder: str | Path,
    *,
    cudnn: str | None = None,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Built]:
    """Plan problems for a GPU that need not be here, and keep the plans in a folder.

    On a machine with such a GPU and the same build of cuDNN and NVRTC, a process with ``CUPY_SDPA_CACHE_DIR`` set to the folder
    finds them.
    Trivial problems, which need no plan, are passed over. What is in the folder already is not built again.

    Args:
        problems: made by :func:`cupy_sdpa.problem`.
        gpu: the name of a described GPU, such as ``"h200"``, or the path of a description; or several of them.
        folder: where; made where it is not there, for its owner alone.
        cudnn: the version to plan with, such as ``"9.19"``, to be sure of it; or the path of a libcudnn.so.9. Default None: the
            one that this process would find.
        workers: processes that plan at the same time. Default None: as many as there are processors.
        progress: called with (how many are done, how many there are). Default None.

    Returns:
        What became of every problem on every GPU.

    Raises:
        CudnnError: this machine cannot plan; the message says what it lacks.
        ValueError: an unknown GPU; another version than asked for.
        OSError: plans cannot be kept in the folder.
    """
    from .offline.planner import Planner, described

    targets = [described(name) for name in ([gpu] if isinstance(gpu, str) else gpu)]
    path = cudnn if cudnn is not None and "/" in cudnn else None
    wanted = version_number(cudnn) if cudnn is not None and path is None else None
    DiskCache(Path(folder)).check()
    parts = dict.fromkeys(part for asked in problems for part in subproblems(asked))
    jobs = [(asked, target) for target in targets for asked in parts if not asked.trivial]
    found: dict[int, PlanInfo | str] = {}
    with Planner(max(1, min(workers or os.cpu_count() or 1, len(jobs))), path) as planner:
        if wanted not in (None, planner.version):
            raise ValueError(
                f"plans are wanted for cuDNN {cudnn}, and {version_text(planner.version)} is here: "
                f"pip install 'nvidia-cudnn-cu12=={cudnn}.*' (or -cu13), or give the path of its libcudnn.so.9"
            )
        for number, (asked, target) in enumerate(jobs):
            if reasons := why_not(asked, planner.version, target.capability):
                found[number] = "\n".join(map(str, reasons))
        left = [number for number in range(len(jobs)) if number not in found]
        if progress:
            progress(len(found), len(jobs))
        for index, answer in planner.plan_all([jobs[number] for number in left], Path(folder).absolute()):
            found[left[index]] = answer
            if progress:
                progress(len(found), len(jobs))
    return [_built(*job, found[number]) for number, job in enumerate(jobs)]


def _built(asked: Problem, target: Any, answer: PlanInfo | str) -> Built:
    if isinstance(answer, str):
        return Built(asked, target.model, None, answer)
    return Built(asked, target.model, answer, "")


def read_problems(path: str | Path) -> list[Problem]:
    """The problems in a TOML file: a table ``[[attention]]`` each, with the arguments of :func:`cupy_sdpa.problem`.

    ``passes = ["forward", "backward"]`` asks for both; the forward pass then gives the log-sum-exp, which the backward
    needs. A list of lengths in ``lengths`` stands for as many tables: it takes the place of the lengths in the shapes.

    Raises:
        ValueError: it is no such file; the message names the table.
        OSError: it cannot be read.
    """
    with Path(path).open("rb") as file:
        try:
            tables = tomllib.load(file).get("attention", [])
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is no TOML file: {error}") from None
    if not isinstance(tables, list) or not tables:
        raise ValueError(f"{path} has no table [[attention]]")
    found: list[Problem] = []
    for number, table in enumerate(tables, 1):
        try:
            if not isinstance(table, dict):
                raise ValueError(f"{table!r} is not a table")
            found += _problems(dict(table))
        except (TypeError, ValueError, LookupError) as error:
            raise ValueError(f"{path}, table {number} of [[attention]]: {error}") from None
    return found


def _problems(table: dict[str, Any]) -> list[Problem]:
    passes = table.pop("passes", ["forward"])
    passes = [passes] if isinstance(passes, str) else passes
    lengths = table.pop("lengths", None)
    if not isinstance(passes, list) or not passes:
        raise ValueError(f'passes is {passes!r}; it must be a list, such as ["forward", "backward"]')
    if lengths is None:
        lengths = [None]
    elif not isinstance(lengths, list) or not lengths or not all(type(length) is int and length >= 0 for length in lengths):
        raise ValueError(f"lengths is {lengths!r}; it must be a list of whole numbers from 0 on, such as [1024, 2048]")
    if unknown := [name for name in passes if name not in ("forward", "backward")]:
        raise ValueError(f"passes names {', '.join(map(str, unknown))}; there are forward and backward")
    missing = [name for name in ("q", "k", "v", "dtype") if name not in table]
    if missing:
        raise ValueError(f"{', '.join(missing)} is missing")
    found = []
    for length in lengths:
        shapes: dict[str, Any] = {name: table[name] for name in ("q", "k", "v")}
        for name, shape in shapes.items():
            if not isinstance(shape, list) or len(shape) < 3:
                raise ValueError(f"{name} is {shape!r}; it must be a shape, such as [128, 32, 4096, 1]")
            shapes[name] = list(shape)
        if length is not None:
            for shape in shapes.values():
                shape[2] = length
        others = {name: value for name, value in table.items() if name not in shapes}
        if "backward" in passes:
            others.setdefault("return_stats", True)
        if "forward" in passes:
            found.append(problem(**shapes, **others))
        if "backward" in passes:
            found.append(problem(**shapes, **others, backward=True))
    return found
