"""Plan for GPUs that are not present, with the real cuDNN in worker processes.

cuDNN builds complete plans, compiled kernels included, for the description of a GPU. Without an NVIDIA driver it also requires
a ``libcuda.so.1``; a stub is enough, but must not be loaded in a process that may use a GPU. In addition, some inputs crash the
process inside cuDNN. Therefore planning runs in worker processes (:mod:`.worker`).
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from ..extend.arrays import Problem
from ..extend.cudnn import OVERRIDE, CudnnError, PlanInfo, Target
from . import _workers

_COMMAND = [sys.executable, "-m", f"{__package__}.plan_worker"]


class Planner(_workers.Pool):
    """A pool of worker processes that plan. A worker that crashes is replaced.

    Args:
        workers: number of processes.
        cudnn: path of the libcudnn.so.9 to use. Default None: the library that this process would load.

    Raises:
        CudnnError: this machine cannot plan; the message lists what is missing.
    """

    def __init__(self, workers: int = 1, cudnn: str | None = None) -> None:
        self.environment = _workers.worker_environment(**({} if cudnn is None else {OVERRIDE: cudnn}))
        super().__init__(workers, lambda: _workers.Worker(_COMMAND, self.environment))
        try:
            self.version = int(self._answer(None))
        except BaseException:
            self.kill()
            self.close()
            raise

    def plan(self, problem: Problem, target: Target, disk_cache: Path | None = None) -> PlanInfo | str:
        """Plan a problem; the support table is not consulted, and the plan is stored only in ``disk_cache``, a folder.

        Returns its properties, or the reason why there is no plan: cuDNN's refusal, a crash of the process, or a folder in
        which it cannot be stored.

        Raises:
            CudnnError: cuDNN failed, or a worker cannot be started.
            RuntimeError: planning failed outside cuDNN; the message contains the traceback.
        """
        result: PlanInfo | str = self._answer((problem, target, disk_cache))
        return result

    def plan_all(
        self, problems: Iterable[tuple[Problem, Target]], disk_cache: Path | None
    ) -> Iterator[tuple[int, PlanInfo | str]]:
        """:meth:`plan` all problems in parallel; yields (index, result) in order of completion."""
        threads = ThreadPoolExecutor(self.size)
        try:
            jobs = {threads.submit(self.plan, *job, disk_cache): index for index, job in enumerate(problems)}
            for job in as_completed(jobs):
                yield jobs[job], job.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)  # after an error the processes are killed

    def _answer(self, request: Any) -> Any:
        try:
            result = self.request(request)
        except OSError as error:
            raise CudnnError(f"a planning process cannot be started: {error}") from error
        except _workers.WorkerEnded as ended:
            status = ended.status
            if request is None:
                raise CudnnError(f"the planning process ended with exit status {status} before the first request") from None
            return f"planning ended the process inside cuDNN (exit status {status})"
        if isinstance(result, Exception):
            raise result
        return result


#: The beginnings of the names of variables that planning depends on.
_VARIABLES = ("CUPY_SDPA", "CUDA", "CUDNN", "HOME", "LD_", "PATH", "PYTHONPATH", "XDG_")
_lock = threading.Lock()
_kept: Planner | None = None


def kept_planner() -> Planner:
    """Return a planner with one worker that is kept for later calls: a new one takes half a second until it plans.

    It is replaced if one of :data:`_VARIABLES` changes, and ends with the process.

    Raises:
        CudnnError: this machine cannot plan; the message lists what is missing.
    """
    global _kept
    with _lock:
        if _kept and _relevant(_kept.environment) != _relevant(_workers.worker_environment()):
            _close_kept()
        _kept = _kept or Planner()
        return _kept


def _relevant(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_VARIABLES)}


@atexit.register
def _close_kept() -> None:
    """End the worker that is kept, after a request of another thread."""
    global _kept
    if _kept:
        _kept.close()
        _kept = None


def _reset_after_fork() -> None:
    """Start a worker of its own in a forked child: the other one belongs to the parent."""
    global _kept, _lock
    _kept, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_reset_after_fork)
