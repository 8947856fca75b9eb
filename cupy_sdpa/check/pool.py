"""Worker processes that run cases. A process that crashes or hangs is a finding, and is replaced.

``python -m cupy_sdpa.check.pool [MODULE ...]`` is such a process. It imports the modules first; tests inject faults so.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys
import warnings
from typing import Any

from ..offline import _workers
from .case import Case, Outcome, parse

#: Seconds after which a case counts as a hang. The first case of a process also loads the libraries.
TIME_LIMIT = 120.0
#: Cases after which a process is replaced.
CASES_PER_PROCESS = 200


class CasePool(_workers.Pool):
    """A pool of ``jobs`` workers, which import ``modules`` first. :meth:`run` may be called from as many threads."""

    def __init__(self, jobs: int, modules: tuple[str, ...] = ()) -> None:
        count = str(max(1, (os.cpu_count() or 1) // jobs))
        environment = _workers.worker_environment(
            CUPY_SDPA_CACHE_DIR="0", OMP_NUM_THREADS=count, OPENBLAS_NUM_THREADS=count, MKL_NUM_THREADS=count,
            MALLOC_PERTURB_="1",  # glibc fills memory of numpy.empty with bytes of 254: NaN, or numbers of -1e38 and less
        )  # fmt: skip
        command = [sys.executable, "-m", "cupy_sdpa.check.pool", *modules]
        super().__init__(jobs, lambda: _workers.Worker(command, environment, capture=True), CASES_PER_PROCESS)

    def run(self, case: Case, limit: float = TIME_LIMIT) -> Outcome:
        """Run a case in the next idle worker, and return the outcome: a crash if it ended, a hang if it did not answer in time.

        Raises:
            RuntimeError: the pool has been killed.
        """
        try:
            outcome: Outcome = self.request(repr(case), limit, lambda outcome: outcome.fatal)
        except TimeoutError:
            return Outcome("hang", f"no answer within {limit:g} s", "hang", fatal=True)
        except _workers.WorkerEnded as ended:
            status, tail = ended.status, ended.tail
            cause = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
            return Outcome("crash", f"the process ended with {cause}{': ' * bool(tail)}{tail}", cause, fatal=True)
        return outcome


def run_case(case: Case) -> Outcome:
    """Run a case in this process; on the GPU with memory that is full of NaN when it is allocated."""
    from .execute import execute

    if case.engine not in ("gpu", "cupy"):
        return execute(case)
    pool = _poisoned_pool()
    try:
        return execute(case)
    finally:
        pool.free_all_blocks()  # for the other workers


@functools.cache
def _poisoned_pool() -> Any:
    """Make CuPy fill all memory that it allocates, including workspaces, with NaN (bytes of 255); returns the memory pool."""
    import cupy  # type: ignore[import-untyped,unused-ignore]

    pool = cupy.cuda.MemoryPool()

    def allocate(size: int) -> Any:
        memory = pool.malloc(size)
        memory.memset_async(255, size, cupy.cuda.get_current_stream())
        return memory

    cupy.cuda.set_allocator(allocate)
    return pool


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for module in sys.argv[1:]:
        importlib.import_module(module)
    _workers.serve(lambda text: run_case(parse(text)))  # the case as text, so that a reported case is exactly what ran
