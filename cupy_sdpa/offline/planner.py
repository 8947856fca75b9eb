"""Plans for a GPU that is not here, made by the real cuDNN in processes of their own.

cuDNN plans completely, kernels compiled and all, for a GPU that is described to it. On a machine without NVIDIA's driver it
also wants a ``libcuda.so.1``; a stub will do, which must never be seen by a process that may use a GPU. And there are inputs
that kill the process inside cuDNN. So planning is done by workers: ``python -m cupy_sdpa.offline.planner``, which read requests from
stdin and write answers to stdout. Each is in a process group of its own, so that Ctrl-C interrupts only the
process that started them, which ends them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from .._cudnn.deviceless import use_some_driver
from .._cudnn.library import OVERRIDE, library
from ..device.cupy_runtime import model_of
from ..errors import CudnnError, Unsupported
from ..plans.disk_cache import DiskCache
from ..plans.plan import PlanInfo, Target
from ..plans.planner import plan_for
from ..problem.problem import Problem
from ..support import gpus


def described(gpu: str) -> Target:
    """A GPU by the name of its description, or by the path of a file that ``python -m cupy_sdpa info --describe`` wrote.

    Raises:
        ValueError: neither.
    """
    text = gpus.describe(gpu)
    facts, capability = json.loads(text), gpus.capability(gpu)
    return Target(model_of(facts["deviceName"], capability, facts["multiProcessorCount"]), capability, description=text)


class Planner:
    """Processes that plan; one that a problem has killed is replaced.

    Args:
        workers: how many.
        cudnn: path of the libcudnn.so.9 to plan with; None for the one that this process would find.

    Raises:
        CudnnError: planning cannot be done on this machine; the message says what it lacks.
    """

    def __init__(self, workers: int = 1, cudnn: str | None = None) -> None:
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        if cudnn is not None:
            self._environment[OVERRIDE] = cudnn
        self._free: SimpleQueue[_Worker | None] = SimpleQueue()  # None: a process that ended, to be started again when needed
        self._every: list[_Worker] = []
        self._threads = ThreadPoolExecutor(workers)
        try:
            for _ in range(workers):
                self._free.put(self._start())
            #: The version of the cuDNN that plans.
            self.version = int(self._ask(None))
        except BaseException:
            self._kill()
            raise

    def plan(self, problem: Problem, target: Target, disk_cache: Path | None = None) -> PlanInfo | str:
        """Plan a problem for a described GPU, and keep the plan in a folder; gives what is known of it, or why there is none.

        Nothing is asked of the support table. A problem that kills the process gets a sentence that says so.

        Raises:
            CudnnError: cuDNN failed, or no process can be started.
            RuntimeError: planning failed outside cuDNN; the message has the traceback.
        """
        answer: PlanInfo | str = self._ask((problem, target, disk_cache))
        return answer

    def plan_all(
        self, problems: Iterable[tuple[Problem, Target]], disk_cache: Path | None
    ) -> Iterator[tuple[int, PlanInfo | str]]:
        """:meth:`plan` every problem, as many at once as there are workers; gives (its number, the answer) as they come."""
        jobs = {self._threads.submit(self.plan, *job, disk_cache): number for number, job in enumerate(problems)}
        for job in as_completed(jobs):
            yield jobs[job], job.result()

    def close(self) -> None:
        """End the processes, when they have done what they are doing."""
        self._threads.shutdown(cancel_futures=True)
        for worker in self._every:
            worker.close()

    def _kill(self) -> None:
        """End the processes at once."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in list(self._every):
            worker.kill()
        self.close()

    def __enter__(self) -> Planner:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._kill()

    def _start(self) -> _Worker:
        try:
            worker = _Worker(self._environment)
        except OSError as error:
            raise CudnnError(f"a process that plans cannot be started: {error}") from error
        self._every.append(worker)
        return worker

    def _ask(self, request: Any) -> Any:
        worker = self._free.get()
        try:
            worker = worker or self._start()
            answer = worker.ask(request)
        except EOFError:
            assert worker
            code = worker.close()
            self._every.remove(worker)
            worker = None
            if request is None:
                raise CudnnError(f"the process that plans ended with status {code} before it could begin") from None
            return f"planning ended the process inside cuDNN (exit status {code})"
        except BaseException:  # its answer would be taken for the next request's
            if worker:
                worker.kill()
            worker = None
            raise
        finally:
            self._free.put(worker)
        if isinstance(answer, Exception):
            raise answer
        return answer


_COMMAND = [sys.executable, "-m", __name__]


class _Worker:
    """One process; it says nothing but answers on its stdout."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            _COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, process_group=0
        )

    def ask(self, request: Any) -> Any:
        """The answer to a request.

        Raises:
            EOFError: the process ended instead.
        """
        assert self._process.stdin
        assert self._process.stdout
        try:
            self._process.stdin.write(pickle.dumps(request))
            self._process.stdin.flush()
            return pickle.load(self._process.stdout)
        except (BrokenPipeError, pickle.UnpicklingError):  # it ended before, or within its answer
            raise EOFError from None

    def kill(self) -> None:
        """End the process at once; :meth:`close` is still to be called."""
        self._process.kill()

    def close(self) -> int:
        """End the process; gives its exit status."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        return self._process.wait()


@functools.cache
def _ready() -> int:
    """Make sure, once, that cuDNN finds a driver; gives cuDNN's version."""
    use_some_driver()
    return library().version


def _answer(request: Any) -> Any:
    try:
        version = _ready()
        if request is None:
            return version
        problem, target, disk_cache = request
        plan = plan_for(problem, target, DiskCache(disk_cache) if disk_cache else None)
        plan.close()
        return plan.info
    except Unsupported as error:
        return str(error)
    except CudnnError as error:
        return error
    except Exception:  # cuDNN lives: this must not look like its end
        return RuntimeError(f"planning failed:\n{traceback.format_exc()}")


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever cuDNN prints must not be taken for an answer
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answers.write(pickle.dumps(_answer(request)))
            answers.flush()
        except BrokenPipeError:  # who asked has ended
            os._exit(1)


if __name__ == "__main__":
    _serve()
