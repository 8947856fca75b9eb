"""Worker processes that run cases. A process that crashes or hangs is a finding, and is replaced."""

from __future__ import annotations

import os
import signal
import sys

from .. import _workers
from .case import Case
from .outcome import Outcome

#: Seconds after which a case counts as a hang. The first case of a process also loads the libraries.
TIME_LIMIT = 120.0
#: Cases after which a process is replaced.
CASES_PER_PROCESS = 200


class Pool(_workers.Pool):
    """A pool of workers. :meth:`run` may be called from as many threads as there are workers.

    Args:
        jobs: the number of workers.
        modules: the modules that each worker imports first.
    """

    def __init__(self, jobs: int, modules: tuple[str, ...] = ()) -> None:
        count = str(max(1, (os.cpu_count() or 1) // jobs))
        environment = _workers.environment(
            CUPY_SDPA_CACHE_DIR="0", OMP_NUM_THREADS=count, OPENBLAS_NUM_THREADS=count, MKL_NUM_THREADS=count,
            MALLOC_PERTURB_="1",  # glibc fills memory of numpy.empty with bytes of 254: NaN, or numbers of -1e38 and less
        )  # fmt: skip
        command = [sys.executable, "-m", "cupy_sdpa.check.check_worker", *modules]
        super().__init__(jobs, lambda: _workers.Worker(command, environment, capture=True), CASES_PER_PROCESS)

    def run(self, case: Case, limit: float = TIME_LIMIT) -> Outcome:
        """Run a case in the next idle worker.

        Args:
            case: the case.
            limit: seconds after which the case counts as a hang.

        Returns:
            The outcome; a crash if the process ended, a hang if it did not answer.

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
