"""The disk cache of execution plans, and building plans ahead of time for a GPU that is not present.

Plans are stored in a folder, where later processes find them. A first call then takes milliseconds; compiling a kernel takes
half a second. The environment variable ``CUPY_SDPA_CACHE_DIR`` sets the folder; the default is ``cupy_sdpa`` in the cache
folder of the user, and ``0`` disables the disk cache. A stored plan is used only with the same build of cuDNN and NVRTC and the
same GPU model.

>>> import cupy_sdpa.store
>>> cupy_sdpa.store.kept().nbytes >= 0
True
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import Unsupported
from .explain import problem as problem_of_shapes
from .jvp import jvp_problems
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
    """The result of :func:`build` for one problem on one GPU.

    Attributes:
        problem: the problem.
        gpu: the GPU model.
        plan: the properties of the plan; None if the problem has no plan.
        reason: why there is no plan; empty if there is a plan.
    """

    problem: Problem
    gpu: str
    plan: PlanInfo | None
    reason: str


def kept() -> DiskCache:
    """Return the disk cache of this process.

    Its attributes are ``nbytes``, ``paths()`` and ``clear()``; ``print`` shows the folder and what it contains.
    """
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
    """Build plans for a GPU that need not be present, and store them in a folder.

    Processes on a machine with such a GPU and the same build of cuDNN and NVRTC use the plans if ``CUPY_SDPA_CACHE_DIR`` is the
    folder. Trivial problems, which need no plan, are skipped. Plans that are in the folder already are not built again.

    Args:
        problems: from :func:`cupy_sdpa.problem` and :func:`cupy_sdpa.jvp_problems`.
        gpu: the name of a described GPU, such as ``"h200"``, or the path of a description; or several of them.
        folder: where to store the plans; if it does not exist, it is created, accessible only to its owner.
        cudnn: the required version of cuDNN, such as ``"9.19"``; or the path of the libcudnn.so.9 to plan with. Default None:
            the library that this process would load.
        workers: number of planning processes. Default None: the number of processors.
        progress: called with (number of finished plans, number of all plans). Default None.

    Returns:
        The result for every problem on every GPU.

    Raises:
        CudnnError: this machine cannot plan; the message lists what is missing.
        ValueError: the GPU is unknown, or the version of cuDNN is not the required one.
        OSError: plans cannot be stored in the folder.
    """
    from .offline.planner import Planner, load_target

    problems = list(problems)
    if wrong := [problem for problem in problems if not isinstance(problem, Problem)]:
        raise TypeError(f"problems contains {wrong[0]!r}; pass problems of cupy_sdpa.problem(...)")
    targets = [load_target(name) for name in ([gpu] if isinstance(gpu, str) else gpu)]
    library = cudnn if cudnn is not None and "/" in cudnn else None
    required = version_number(cudnn) if cudnn is not None and library is None else None
    DiskCache(Path(folder)).check()
    parts = dict.fromkeys(part for problem in problems for part in subproblems(problem))
    jobs = [(problem, target) for target in targets for problem in parts if not problem.trivial]
    with Planner(max(1, min(workers or os.cpu_count() or 1, len(jobs))), library) as planner:
        if required not in (None, planner.version):
            raise ValueError(
                f"cudnn is {cudnn!r}, but cuDNN {version_text(planner.version)} is installed: "
                f"pip install 'nvidia-cudnn-cu12=={cudnn}.*' (or -cu13), or pass the path of its libcudnn.so.9"
            )
        reasons = [why_not(problem, planner.version, target.capability) for problem, target in jobs]
        results: dict[int, PlanInfo | str] = {
            index: "\n".join(map(str, refusal)) for index, refusal in enumerate(reasons) if refusal
        }
        allowed = [index for index, refusal in enumerate(reasons) if not refusal]
        if progress:
            progress(len(results), len(jobs))
        for number, result in planner.plan_all([jobs[index] for index in allowed], Path(folder).absolute()):
            results[allowed[number]] = result
            if progress:
                progress(len(results), len(jobs))
    return [_built(*job, results[index]) for index, job in enumerate(jobs)]


def _built(problem: Problem, target: Any, result: PlanInfo | str) -> Built:
    if isinstance(result, str):
        return Built(problem, target.model, None, result)
    return Built(problem, target.model, result, "")


def read_problems(path: str | Path) -> list[Problem]:
    """Read problems from a TOML file: one table ``[[attention]]`` each, with the arguments of :func:`cupy_sdpa.problem`.

    Two more keys define several problems in one table. ``passes = ["forward", "backward"]`` defines both; the forward pass then
    returns the log-sum-exp, which the backward pass needs. ``"jvp"`` defines those of :func:`cupy_sdpa.jvp_problems`, with
    ``tangents`` such as ``["dq"]``; default: all. ``lengths = [1024, 2048]`` replaces the sequence lengths in the
    shapes of q, k and v by each of the lengths.

    Raises:
        ValueError: the file is not valid; the message contains the number of the table.
        OSError: the file cannot be read.
    """
    with Path(path).open("rb") as file:
        try:
            tables = tomllib.load(file).get("attention", [])
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not a TOML file: {error}") from None
    if not isinstance(tables, list) or not tables:
        raise ValueError(f"{path} has no table [[attention]]")
    problems: list[Problem] = []
    for number, table in enumerate(tables, 1):
        try:
            if not isinstance(table, dict):
                raise ValueError(f"{table!r} is not a table")
            problems += _problems(dict(table))
        except (TypeError, ValueError, LookupError, Unsupported) as error:
            raise ValueError(f"{path}, table {number} of [[attention]]: {error}") from None
    return problems


def _problems(table: dict[str, Any]) -> Iterator[Problem]:
    """The problems of one table."""
    passes, lengths = _passes(table.pop("passes", ["forward"])), _lengths(table.pop("lengths", None))
    if missing := [name for name in ("q", "k", "v", "dtype") if name not in table]:
        raise ValueError(f"{', '.join(missing)} is missing")
    if "page_table" in table and lengths != [None]:
        raise ValueError(f"lengths is {lengths} and page_table is passed: axis 2 of k is the page size; omit lengths")
    shapes = {name: table.pop(name) for name in ("q", "k", "v")}
    deterministic, tangents = table.pop("deterministic", False), table.pop("tangents", None)
    if tangents is not None and "jvp" not in passes:
        raise ValueError(f"tangents is {tangents!r} and passes is {passes}: tangents are for jvp; omit them, or add jvp")
    if "backward" in passes:
        table.setdefault("return_stats", True)
    for length in lengths:
        arrays: dict[str, Any] = {name: _shape(name, shape, length) for name, shape in shapes.items()}
        if "forward" in passes:
            yield problem_of_shapes(**arrays, **table, deterministic=deterministic)
        if "backward" in passes:
            yield problem_of_shapes(**arrays, **table, backward=True, deterministic=deterministic)
        if "jvp" in passes:
            given = {} if tangents is None else {"tangents": tangents}
            yield from jvp_problems(**arrays, **table, **given, deterministic=deterministic)


def _passes(passes: Any) -> list[str]:
    passes = [passes] if isinstance(passes, str) else passes
    if not isinstance(passes, list) or not passes:
        raise ValueError(f'passes is {passes!r}; it must be a list, such as ["forward", "backward"]')
    if unknown := [name for name in passes if name not in ("forward", "backward", "jvp")]:
        raise ValueError(f"passes contains {', '.join(map(str, unknown))}; it can contain forward, backward and jvp")
    return passes


def _lengths(lengths: Any) -> list[int | None]:
    """The lengths that replace those in the shapes; None leaves the shapes unchanged."""
    if lengths is None:
        return [None]
    if not isinstance(lengths, list) or not lengths or not all(type(length) is int and length >= 0 for length in lengths):
        raise ValueError(f"lengths is {lengths!r}; it must be a list of non-negative integers, such as [1024, 2048]")
    return list(lengths)


def _shape(name: str, shape: Any, length: int | None) -> list[int]:
    if not isinstance(shape, list) or len(shape) < 3:
        raise ValueError(f"{name} is {shape!r}; it must be a shape, such as [128, 32, 4096, 1]")
    return shape if length is None else [*shape[:2], length, *shape[3:]]
