"""Worker processes: a pool that replaces what crashes or hangs, and the loop that a worker runs.

Requests and results are pickled objects on stdin and stdout. Each process has its own session, so that Ctrl-C interrupts only
the parent, which ends its workers, and so that a worker can be killed with its children.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Self

#: The number of last bytes of stderr that are part of :attr:`WorkerEnded.tail`.
STDERR_BYTES = 600


class WorkerEnded(Exception):
    """A worker ended before it answered: its exit status, negative for a signal, and the end of its stderr on one line."""

    def __init__(self, status: int, tail: str) -> None:
        super().__init__(f"the process ended with exit status {status}")
        self.status, self.tail = status, tail


def worker_environment(**more: str) -> dict[str, str]:
    """Return the environment of a worker, which imports what its parent does."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **more}


def serve(handle: Callable[[Any], Any]) -> None:
    """In a worker: answer requests until stdin ends. What libraries print to stdout goes to stderr, not between the results."""
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            results.write(pickle.dumps(handle(request)))
            results.flush()
        except BrokenPipeError:  # the parent has ended
            os._exit(1)


class Worker:
    """One worker process, and the number of its requests. Its stderr is captured for :class:`WorkerEnded`, or the parent's.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, capture: bool = False) -> None:
        self._stderr = tempfile.TemporaryFile() if capture else None  # noqa: SIM115 (closed by close)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, env=environment, start_new_session=True
        )
        self.requests = 0
        self._results: SimpleQueue[tuple[Any] | None] = SimpleQueue()
        # A thread, because Windows cannot wait for a pipe with a time limit.
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def request(self, request: Any, limit: float | None = None) -> Any:
        """Send a request and return the result.

        Raises:
            TimeoutError: there is no result after the limit in seconds.
            WorkerEnded: the process ended.
        """
        self.requests += 1
        assert self._process.stdin
        with contextlib.suppress(OSError):  # the process has ended, which the reader reports
            self._process.stdin.write(pickle.dumps(request))
            self._process.stdin.flush()
        try:
            found = self._results.get(timeout=limit)
        except Empty:
            raise TimeoutError from None
        if found is None:
            status = self._process.wait()
            raise WorkerEnded(status, self._tail())
        return found[0]

    def _read(self) -> None:
        """Read results until the process ends, also within a result, and then None."""
        assert self._process.stdout
        with contextlib.suppress(EOFError, pickle.UnpicklingError, ValueError, OSError):
            while True:
                self._results.put((pickle.load(self._process.stdout),))
        self._results.put(None)

    def _tail(self) -> str:
        if self._stderr is None:
            return ""
        self._stderr.seek(0)
        return " ".join(self._stderr.read().decode(errors="replace")[-STDERR_BYTES:].split())

    def kill(self) -> None:
        """Kill the process and its children; :meth:`close` is still required."""
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
        if self._stderr:
            self._stderr.close()


class Pool:
    """A pool of workers, which ``start`` starts on first use. :meth:`request` may be called from several threads.

    A worker is replaced after ``most`` requests.
    """

    def __init__(self, size: int, start: Callable[[], Worker], most: int | None = None) -> None:
        self.size = size
        self._start, self._most = start, most
        self._idle: SimpleQueue[Worker | None] = SimpleQueue()  # None: one that is started when it is needed
        for _ in range(size):
            self._idle.put(None)
        self._workers, self._closed = set[Worker](), False

    @property
    def pids(self) -> set[int]:
        """The ids of the processes."""
        return {worker.pid for worker in self._workers}

    def request(self, request: Any, limit: float | None = None, is_last: Callable[[Any], bool] = lambda result: False) -> Any:
        """Send a request to the next idle worker and return the result.

        A worker is replaced if it ends, exceeds the limit, or ``is_last`` of its result.

        Raises:
            TimeoutError, WorkerEnded: see :meth:`Worker.request`.
            OSError: a process cannot be started.
            RuntimeError: the pool has been killed.
        """
        worker, ended = self._idle.get(), False
        try:
            if self._closed:
                raise RuntimeError("the pool is closed")
            if worker is None:
                worker = self._start()
                self._workers.add(worker)
            result = worker.request(request, limit)
            ended = is_last(result) or worker.requests == self._most
            return result
        except BaseException:  # a pending result would be read as the result of the next request
            ended = True
            raise
        finally:
            if worker and ended:
                self._discard(worker)
            self._idle.put(None if ended else worker)

    def _discard(self, worker: Worker) -> None:
        self._workers.discard(worker)
        worker.kill()
        worker.close()

    def kill(self) -> None:
        """Kill all processes. Requests in progress raise WorkerEnded; later ones raise RuntimeError."""
        self._closed = True
        for worker in list(self._workers):
            worker.kill()

    def close(self) -> None:
        """Wait for requests in progress, and end the processes."""
        for _ in range(self.size):
            self._idle.get()
        self._closed = True
        for worker in self._workers:
            worker.close()
        for _ in range(self.size):
            self._idle.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self.kill()
        self.close()
