"""Plan for GPUs that are not present, with the real cuDNN in worker processes.

Given the description of a GPU, cuDNN builds complete plans with compiled kernels. Without an NVIDIA driver it also needs a
``libcuda.so.1``. A stub is enough, but a process that may use a GPU must not load it. Some inputs also crash the process inside
cuDNN. For both reasons, worker processes (:mod:`.plan_worker`) call the core's planning functions.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, ParamSpec, TypeVar

from .. import CudnnError
from ..extend.cudnn import Cudnn
from . import _workers

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")

_COMMAND = [sys.executable, "-m", f"{__package__}.plan_worker"]


class Planner(_workers.Pool):
    """A pool of worker processes that plan. A worker that crashes is replaced.

    Args:
        workers: the number of processes.
        variables: environment variables to set in the workers; they also inherit this process's variables.

    Attributes:
        version: the version of cuDNN.

    Raises:
        CudnnError: this machine cannot plan; the message lists what is missing.
    """

    def __init__(self, workers: int = 1, **variables: str) -> None:
        self.environment = _workers.worker_environment(**variables)
        super().__init__(workers, lambda: _workers.Worker(_COMMAND, self.environment))
        try:
            self.version = self._result(Cudnn.planning_version)
        except BaseException as error:
            self.kill()
            self.close()
            if isinstance(error, _workers.WorkerEnded):
                status = error.status
                raise CudnnError(f"the planning process ended with exit status {status} before the first request") from None
            raise

    def call(
        self, function: Callable[Arguments, Answer], *arguments: Arguments.args, **named: Arguments.kwargs
    ) -> Answer | str:
        """Call a function in a worker. Return its result, or a message if cuDNN crashed the worker.

        Raises:
            CudnnError: cuDNN failed, or a worker cannot be started.
            RuntimeError: the function failed outside cuDNN; the message contains the traceback.
        """
        try:
            return self._result(functools.partial(function, *arguments, **named))
        except _workers.WorkerEnded as ended:
            return f"planning ended the process inside cuDNN (exit status {ended.status})"

    def call_all(
        self, function: Callable[..., Answer], arguments: Iterable[tuple[Any, ...]]
    ) -> Iterator[tuple[int, Answer | str]]:
        """Call a function in parallel, once for each tuple of arguments, as :meth:`call` does.

        Yield (index, result) in order of completion.
        """
        threads = ThreadPoolExecutor(self.size)
        try:
            jobs = {threads.submit(self.call, function, *given): index for index, given in enumerate(arguments)}
            for job in as_completed(jobs):
                yield jobs[job], job.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)  # after an error the processes are killed

    def _result(self, request: Callable[[], Answer]) -> Answer:
        """Return a request's result, or raise the exception that it raised. Also raises what :meth:`.Worker.request` raises."""
        try:
            result: Answer | Exception = self.request(request)
        except OSError as error:
            raise CudnnError(f"a planning process cannot be started: {error}") from error
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
    """End the kept worker, after any request of another thread has finished."""
    global _kept
    if _kept:
        _kept.close()
        _kept = None


def _reset_after_fork() -> None:
    """Forget the kept worker in a forked child, which starts its own: the worker belongs to the parent."""
    global _kept, _lock
    _kept, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_reset_after_fork)
