"""Processes that run cases: one that dies or hangs is a finding, and is replaced."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from queue import SimpleQueue

from .cases.case import Case
from .verify.outcome import Outcome

#: Seconds after which a case counts as hanging; the first case of a process also loads the libraries.
LIMIT = 120.0
#: Cases after which a process is replaced.
RECYCLE = 200
#: The most characters that are kept of what a process wrote to stderr.
TAIL = 600


class Worker:
    """One process, in a group of its own, so that it can be ended with its children.

    Args:
        threads: how many threads numpy may use in it.
        modules: what it imports before it answers.
    """

    def __init__(self, threads: int = 1, modules: tuple[str, ...] = ()) -> None:
        count = str(threads)
        environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUPY_SDPA_CACHE_DIR": "0",
            "OMP_NUM_THREADS": count, "OPENBLAS_NUM_THREADS": count, "MKL_NUM_THREADS": count,
        }  # fmt: skip
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cupy_sdpa.check.worker", *modules],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=environment, start_new_session=True,
        )  # fmt: skip
        self.cases = 0
        self._pending = b""

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def ask(self, case: Case, limit: float = LIMIT) -> Outcome:
        """What a case comes to; a process that ends or does not answer is an outcome too."""
        self.cases += 1
        assert self._process.stdin
        try:
            self._process.stdin.write(f"{case!r}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            return self._died()
        line = self._line(limit)
        if line is None:
            self.kill()
            self.close()
            return Outcome("hang", f"no answer within {limit:g} s", "hang", fatal=True)
        return Outcome(**json.loads(line)) if line else self._died()

    def _line(self, limit: float) -> bytes | None:
        """The next line that the process writes; empty where it has ended, None where the time is up."""
        assert self._process.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                if not selector.select(limit):
                    return None
                part = os.read(self._process.stdout.fileno(), 1 << 16)
                if not part:
                    return b""
                self._pending += part
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _died(self) -> Outcome:
        status = self._process.wait()
        self._errors.seek(0)
        tail = " ".join(self._errors.read().decode(errors="replace")[-TAIL:].split())
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        return Outcome("crash", f"the process ended with {how}{': ' * bool(tail)}{tail}", how, fatal=True)

    def kill(self) -> None:
        """End the process and its children now."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Let the process end, and wait for that."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._errors.close()


class Pool:
    """Several workers. :meth:`ask` may be called from as many threads.

    Args:
        jobs: how many workers.
        modules: what each imports first.
    """

    def __init__(self, jobs: int, modules: tuple[str, ...] = ()) -> None:
        self._threads = max(1, (os.cpu_count() or 1) // jobs)
        self._modules = modules
        self._free: SimpleQueue[Worker | None] = SimpleQueue()
        for _ in range(jobs):
            self._free.put(None)  # started when it is needed
        self._every, self._closed = set[Worker](), False

    def ask(self, case: Case, limit: float = LIMIT) -> Outcome:
        """What a case comes to, in the next worker that is free.

        Raises:
            RuntimeError: the pool has been closed.
        """
        worker = self._free.get()
        try:
            if self._closed:
                raise RuntimeError("the pool is closed")
            if worker is None:
                worker = Worker(self._threads, self._modules)
                self._every.add(worker)
            outcome = worker.ask(case, limit)
            if outcome.fatal or worker.cases >= RECYCLE:
                self._every.discard(worker)
                done, worker = worker, None
                done.close()
            return outcome
        finally:
            self._free.put(worker)

    def kill(self) -> None:
        """End all processes now; who waits for one gets an answer, and nothing can be asked any more."""
        self._closed = True
        for worker in list(self._every):
            worker.kill()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for worker in self._every:
            worker.close()
