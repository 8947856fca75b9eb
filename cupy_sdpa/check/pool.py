"""Worker processes that run cases. A process that crashes or hangs is a finding, and is replaced."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from queue import Empty, SimpleQueue
from typing import IO

from .cases.case import Case
from .verify.outcome import Outcome

#: Seconds after which a case counts as a hang. The first case of a process also loads the libraries.
TIME_LIMIT = 120.0
#: Cases after which a process is replaced.
CASES_PER_PROCESS = 200
#: The number of last bytes of stderr that are part of the message of a crash.
STDERR_BYTES = 600


class Worker:
    """One worker process, in its own process group, so that it can be killed with its children.

    Args:
        threads: the number of threads of numpy.
        modules: the modules that the process imports first.
    """

    def __init__(self, threads: int = 1, modules: tuple[str, ...] = ()) -> None:
        count = str(threads)
        environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUPY_SDPA_CACHE_DIR": "0",
            "OMP_NUM_THREADS": count, "OPENBLAS_NUM_THREADS": count, "MKL_NUM_THREADS": count,
            "MALLOC_PERTURB_": "1",  # glibc fills memory of numpy.empty with bytes of 254: NaN, or numbers of -1e38 and less
        }  # fmt: skip
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cupy_sdpa.check.worker", *modules],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, env=environment, start_new_session=True,
        )  # fmt: skip
        self.cases = 0
        self._lines: SimpleQueue[bytes] = SimpleQueue()
        # A thread, because Windows cannot wait for a pipe with a time limit.
        self._reader = threading.Thread(target=self._read_lines, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def run(self, case: Case, limit: float = TIME_LIMIT) -> Outcome:
        """Run a case.

        Args:
            case: the case.
            limit: seconds after which the case counts as a hang.

        Returns:
            The outcome; a crash if the process ended, a hang if it did not answer.
        """
        self.cases += 1
        assert self._process.stdin
        try:
            self._process.stdin.write(f"{case!r}\n".encode())
            self._process.stdin.flush()
        except OSError:  # the process has ended
            return self._crash()
        line = self._read_line(limit)
        if line is None:
            self.kill()
            self.close()
            return Outcome("hang", f"no answer within {limit:g} s", "hang", fatal=True)
        return Outcome(**json.loads(line)) if line else self._crash()

    def _read_line(self, limit: float) -> bytes | None:
        """The next line of the process; empty if it has ended, None after the time limit."""
        try:
            return self._lines.get(timeout=limit)
        except Empty:
            return None

    def _read_lines(self, pipe: IO[bytes]) -> None:
        """Read the lines of the process until it ends, and then an empty one."""
        with contextlib.suppress(ValueError):  # the pipe was closed
            for line in pipe:
                if line.endswith(b"\n"):
                    self._lines.put(line)
        self._lines.put(b"")

    def _crash(self) -> Outcome:
        """The outcome of a case that ended the process."""
        status = self._process.wait()
        self._stderr.seek(0)
        tail = " ".join(self._stderr.read().decode(errors="replace")[-STDERR_BYTES:].split())
        cause = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        return Outcome("crash", f"the process ended with {cause}{': ' * bool(tail)}{tail}", cause, fatal=True)

    def kill(self) -> None:
        """Kill the process and its children."""
        if not hasattr(os, "killpg"):  # Windows
            self._process.kill()
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Let the process end, and wait for it."""
        if self._process.stdin:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
        self._reader.join(timeout=20)
        if self._process.stdout and not self._reader.is_alive():
            self._process.stdout.close()
        self._stderr.close()


class Pool:
    """A pool of workers. :meth:`run` may be called from as many threads as there are workers.

    Args:
        jobs: the number of workers.
        modules: the modules that each worker imports first.

    Attributes:
        jobs: the number of workers.
    """

    def __init__(self, jobs: int, modules: tuple[str, ...] = ()) -> None:
        self.jobs = jobs
        self._threads = max(1, (os.cpu_count() or 1) // jobs)
        self._modules = modules
        self._idle: SimpleQueue[Worker | None] = SimpleQueue()
        for _ in range(jobs):
            self._idle.put(None)  # started on first use
        self._workers, self._closed = set[Worker](), False

    def run(self, case: Case, limit: float = TIME_LIMIT) -> Outcome:
        """Run a case in the next idle worker.

        Raises:
            RuntimeError: the pool has been closed.
        """
        worker = self._idle.get()
        try:
            if self._closed:
                raise RuntimeError("the pool is closed")
            if worker is None:
                worker = Worker(self._threads, self._modules)
                self._workers.add(worker)
            outcome = worker.run(case, limit)
            if outcome.fatal or worker.cases >= CASES_PER_PROCESS:
                self._workers.discard(worker)
                replaced, worker = worker, None
                replaced.close()
            return outcome
        finally:
            self._idle.put(worker)

    def kill(self) -> None:
        """Kill all processes. Calls in progress return a crash; later calls raise RuntimeError."""
        self._closed = True
        for worker in list(self._workers):
            worker.kill()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for worker in self._workers:
            worker.close()
