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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .core.cudnn_engine.disk_cache import DIRECTORY, DiskCache, current
from .core.options.values import read_number
from .core.problem import trace
from .core.problem.problem import Problem
from .core.support.engine_problem import launched_problems
from .core.support.why_not import why_not
from .core.version import version_number, version_text
from .offline import problem_file

if TYPE_CHECKING:
    from .core.cudnn_engine.plan import PlanInfo

__all__ = ["DIRECTORY", "Built", "DiskCache", "build", "kept", "read_problems", "save_problems"]


@dataclass(frozen=True)
class Built:
    """Hold the result of :func:`build` for one problem on one GPU.

    Attributes:
        problem: the problem.
        gpu: the GPU model.
        plan: the properties of the plan; None if the problem has no plan, or if the plan cannot be stored.
        reason: why there is no plan, or why it cannot be stored; empty if there is a plan.

    >>> import cupy_sdpa
    >>> from cupy_sdpa.store import Built
    >>> shape = (512, 8, 1024, 2)
    >>> problem = cupy_sdpa.problem(shape, shape, shape, dtype="float16", backward=True)
    >>> built = [Built(problem, "NVIDIA H200", None, "head dims above 256 are not supported")]
    >>> [f"{result.gpu}: {result.reason}" for result in built if result.plan is None]
    ['NVIDIA H200: head dims above 256 are not supported']
    """

    problem: Problem
    gpu: str
    plan: PlanInfo | None
    reason: str


def kept() -> DiskCache:
    """Return the disk cache of this process.

    Returns:
        The cache, a :class:`DiskCache`: ``nbytes``, ``paths()``, ``clear()``, ``hits`` and ``misses``; ``print`` shows the
        folder and what it contains.

    >>> import cupy_sdpa.store
    >>> all(path.is_file() for path in cupy_sdpa.store.kept().paths())
    True
    """
    return current()


def build(
    problems: Iterable[Problem],
    gpu: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    folder: str | Path,
    *,
    cudnn: str | None = None,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Built]:
    """Build plans for a GPU that need not be present, and store them in a folder.

    Processes on a machine with such a GPU and the same build of cuDNN and NVRTC use the plans if ``CUPY_SDPA_CACHE_DIR`` is the
    folder. Trivial problems, which need no plan, are skipped. Plans that are already in the folder are not built again.

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
        TypeError, ValueError: an argument is invalid, the GPU is unknown, or the version of cuDNN is not the required one.
        OSError: plans cannot be stored in the folder.

    On a machine with cuDNN:

    >>> import cupy_sdpa, cupy_sdpa.store
    >>> shape = (128, 8, 4096, 1)
    >>> problem = cupy_sdpa.problem(shape, shape, shape, dtype="bfloat16", causal=True)
    >>> results = cupy_sdpa.store.build([problem], ["h100", "h200"], "plans")  # doctest: +SKIP
    >>> [result.gpu for result in results if result.plan is None]  # doctest: +SKIP
    []
    """
    from .core.cudnn.library import OVERRIDE
    from .core.cudnn_engine.described import plan_described
    from .core.cudnn_engine.plan import Target
    from .offline.remote_planner import Planner

    if isinstance(problems, Problem) or not isinstance(problems, Iterable):
        raise TypeError(f"problems is {problems!r}; pass a list of problems of cupy_sdpa.problem(...)")
    problems = list(problems)
    if wrong := [problem for problem in problems if not isinstance(problem, Problem)]:
        raise TypeError(f"problems contains {wrong[0]!r}; pass problems of cupy_sdpa.problem(...)")
    names = [gpu] if isinstance(gpu, (str, os.PathLike)) or not isinstance(gpu, Iterable) else list(gpu)
    if not all(isinstance(name, (str, os.PathLike)) for name in names):
        raise TypeError(f"gpu is {gpu!r}; pass the name of a GPU, such as 'h200', the path of a description, or a list of them")
    if cudnn is not None and not isinstance(cudnn, str):
        raise TypeError(f"cudnn is {cudnn!r}; pass a version as '9.19', or the path of a libcudnn.so.9 as text")
    workers = workers if workers is None else read_number("workers", workers, 1)
    targets = [Target.described(os.fspath(name)) for name in names]
    variables, required = dict[str, str](), None
    if cudnn is not None and "/" in cudnn:
        variables = {OVERRIDE: cudnn}
    elif cudnn is not None:
        required = version_number(cudnn)
    DiskCache(Path(folder)).check()
    parts = dict.fromkeys(part for problem in problems for part in launched_problems(problem))
    jobs = [(problem, target) for target in targets for problem in parts if not problem.trivial]
    with Planner(max(1, min(workers or os.cpu_count() or 1, len(jobs))), **variables) as planner:
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
        arguments = ((*jobs[index], Path(folder).absolute()) for index in allowed)
        for number, result in planner.call_all(plan_described, arguments):
            results[allowed[number]] = result
            if progress:
                progress(len(results), len(jobs))
    return [_built(*job, results[index]) for index, job in enumerate(jobs)]


def _built(problem: Problem, target: Any, result: PlanInfo | str) -> Built:
    if isinstance(result, str):
        return Built(problem, target.model, None, result)
    return Built(problem, target.model, result, "")


def save_problems(path: str | os.PathLike[str]) -> int:
    """Add the problems of the plan caches of all threads to a file, one JSON object per line.

    ``python -m cupy_sdpa plan --saved FILE`` builds their plans ahead of time, also for another GPU, and ``check --saved FILE``
    verifies them with random data. A file contains shapes, layouts, options and score functions as expressions, but no elements
    of arrays and no values of scalars.

    The environment variable ``CUPY_SDPA_TRACE=FILE`` does this when a process ends. The file then also gets the problems of
    evicted plans, and of calls on numpy arrays, as a GPU would plan them; at most 10 000 of these.

    Args:
        path: the file. It is created if it does not exist; problems that it already contains are not written again.

    Returns:
        The number of problems in the file.

    Raises:
        OSError: the file cannot be written, is not a regular file of this user, or has other contents. It is unchanged then.

    >>> import pathlib, tempfile, cupy_sdpa.store
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     cupy_sdpa.store.save_problems(pathlib.Path(folder, "problems.jsonl")) >= 0
    True
    """
    import sys

    # A process without the module has no plan cache. It loads cuDNN, so it is not imported here.
    sessions = sys.modules.get(f"{__package__}.core.cudnn_engine.sessions")
    caches = sessions.plan_caches() if sessions else []
    return problem_file.add(path, [*(trace.problems or ()), *(problem for cache in caches for problem in cache.problems)])


def _save_at_exit() -> None:
    """Save the problems when the process ends, to the file of the environment variable; a failure is printed."""
    import atexit
    import sys

    def save() -> None:
        path = os.environ.get(trace.VARIABLE)
        try:
            if path and os.getpid() == process:
                save_problems(path)
        except OSError as error:
            reason = error.strerror or error
            print(f"cupy_sdpa: {trace.VARIABLE} is {path!r}, and no problem is saved: {reason}", file=sys.stderr)

    process = os.getpid()  # a forked child does not have its own
    atexit.register(save)


def read_problems(path: str | os.PathLike[str]) -> list[Problem]:
    """Read the problems of a file that :func:`save_problems` or ``CUPY_SDPA_TRACE`` wrote, for :func:`build` and ``explain``.

    Args:
        path: the file.

    Returns:
        The problems in the order of the file, each once.

    Raises:
        ValueError: a line is not a problem (the message contains its number), or there is no line.
        OSError: the file cannot be read, is not a regular file, or has more than 64 MiB.

    >>> import pathlib, tempfile, cupy_sdpa.store
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "problems.jsonl")
    ...     _ = path.write_text("[]")
    ...     try:
    ...         cupy_sdpa.store.read_problems(path)
    ...     except ValueError as error:
    ...         print(str(error).removeprefix(str(path)))
    , line 1 is not a problem: a problem is a JSON object, not []
    """
    return problem_file.read(path)


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__
