"""Groups of NCCL: communicators of CuPy, of cupyx.distributed and of nccl4py, and a watchdog that ends exchanges that hang.

All arrays are sent as bytes, because CuPy's bindings do not know bfloat16. All transfers of an exchange are one NCCL group,
because NCCL would otherwise finish them one after another, which is a deadlock in a ring.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..extend import cupy_runtime
from .group import Failing, GroupError, Transfer

#: The seconds after which an exchange that began but does not end counts as failed.
DEFAULT_TIMEOUT = 300.0
#: The seconds between two checks of the watchdog.
_INTERVAL = 0.25


class CupyCommunicator:
    """``cupy.cuda.nccl.NcclCommunicator``."""

    def __init__(self, communicator: Any) -> None:
        from cupy.cuda import nccl

        self._communicator, self._nccl = communicator, nccl
        self.rank, self.size = int(communicator.rank_id()), int(communicator.size())

    def transfer(self, sends: Sequence[Transfer], receives: Sequence[Transfer], stream: Any) -> None:
        """Enqueue transfers as one NCCL group."""
        communicator, nccl, pointer = self._communicator, self._nccl, stream.ptr
        nccl.groupStart()
        try:
            for array, peer in sends:
                communicator.send(array.data.ptr, array.nbytes, nccl.NCCL_UINT8, peer, pointer)
            for array, peer in receives:
                communicator.recv(array.data.ptr, array.nbytes, nccl.NCCL_UINT8, peer, pointer)
        finally:
            nccl.groupEnd()

    def error(self) -> str:
        """Return the error of an earlier transfer; empty for none."""
        try:
            self._communicator.check_async_error()
        except Exception as error:  # NcclError
            return f"{type(error).__name__}: {error}"
        return ""

    def abort(self) -> None:
        """End all transfers."""
        self._communicator.abort()


class Nccl4pyCommunicator:
    """``nccl.core.Communicator`` of nccl4py."""

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator
        self.rank, self.size = int(communicator.rank), int(communicator.nranks)

    def transfer(self, sends: Sequence[Transfer], receives: Sequence[Transfer], stream: Any) -> None:
        """Enqueue transfers as one NCCL group."""
        import nccl.core

        with nccl.core.group():
            for array, peer in sends:
                self._communicator.send(array, peer=peer, stream=stream.ptr)
            for array, peer in receives:
                self._communicator.recv(array, peer=peer, stream=stream.ptr)

    def error(self) -> str:
        """Return the error of an earlier transfer; empty for none."""
        status = self._communicator.get_async_error()
        return "" if getattr(status, "name", str(status)) in ("Success", "InProgress", "0", "7") else f"NCCL: {status}"

    def abort(self) -> None:
        """End all transfers."""
        self._communicator.abort()


class _Exchange(NamedTuple):
    """An exchange on the GPU: its label, and the events before and after it."""

    label: str
    before: Any
    after: Any


class NcclGroup(Failing):
    """Connect GPUs through NCCL as a group; created by :func:`~cupy_sdpa.parallel.connect` or from a communicator.

    A thread watches the exchanges. If one has begun on the GPU and has not ended after ``timeout`` seconds, or NCCL reports an
    error, such as a process that ended, it aborts the communicator. All work that waits for the exchange then proceeds with
    invalid results, and every later call raises GroupError, as :meth:`check` does.

    If the members are threads of one process, they start every exchange together (``meeting``). CUDA functions that change the
    memory map, such as an allocation, wait for the kernels of every GPU that can access the memory. A kernel of an exchange
    that waits for a member would therefore never end if that member allocates memory before it starts the exchange.

    Args:
        communicator: the communicator, with the methods of :class:`CupyCommunicator`.
        timeout: the limit in seconds. It must be longer than members may lag behind each other. Default 300.
        meeting: a barrier of all members, if they are threads of one process. Default None.

    Attributes:
        rank: the rank of this member.
        size: P, the number of members.

    Raises:
        RuntimeError: CuPy is not installed.
    """

    def __init__(self, communicator: Any, timeout: float = DEFAULT_TIMEOUT, meeting: threading.Barrier | None = None) -> None:
        self.rank, self.size, self.timeout = communicator.rank, communicator.size, timeout
        self._communicator, self._meeting, self._cuda = communicator, meeting, cupy_runtime.cupy().cuda
        self._running: deque[_Exchange] = deque()
        self._began = 0.0
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def exchange(self, sends: Sequence[Transfer], receives: Sequence[Transfer], label: str) -> None:
        """Enqueue transfers on CuPy's current stream; see :class:`~cupy_sdpa.parallel.group.Exchanger`.

        Args:
            sends, receives: pairs of a dense CuPy array uint8 ``(bytes,)`` and the rank of the other member.
            label: what is exchanged, for messages; the same for all members.

        Raises:
            GroupError: the group failed earlier, NCCL does not accept the transfers, or members that are threads did not all
                call in time.
        """
        if self._failure:
            raise GroupError(self._failure)
        if self._meeting:
            self._meet(self._meeting, label)
        if sends or receives:
            stream, event = self._cuda.get_current_stream(), self._cuda.Event
            watched = not cupy_runtime.capturing()
            before = stream.record(event(disable_timing=True)) if watched else None
            try:
                self._communicator.transfer(sends, receives, stream)
            except Exception as error:
                self.abort(f"member {self.rank} could not enqueue {label!r}: {type(error).__name__}: {error}")
                raise GroupError(self._failure) from error
            if watched:
                self._running.append(_Exchange(label, before, stream.record(event(disable_timing=True))))
                if self._thread is None:
                    self._watch()
        if self._meeting:
            self._meet(self._meeting, label)

    def _meet(self, meeting: threading.Barrier, label: str) -> None:
        """Wait in the host for the other members, which are threads."""
        try:
            meeting.wait(self.timeout)
        except threading.BrokenBarrierError as error:
            self.abort(
                f"member {self.rank} waited for {label!r}, and another member ended, failed, or did not call within "
                f"{self.timeout:g} s"
            )
            raise GroupError(self._failure) from error

    def abort(self, reason: str) -> None:
        """End all transfers of this member; every later call raises GroupError with the reason.

        Args:
            reason: the message of the error. A group that has failed keeps its first reason.
        """
        if not self._failure:
            self._failure = reason
            self._stopped.set()
            if self._meeting:
                self._meeting.abort()
            self._communicator.abort()

    def _watch(self) -> None:
        """Start the watchdog."""
        device = self._cuda.runtime.getDevice()
        self._thread = threading.Thread(target=self._run, args=(device,), name="cupy_sdpa watchdog", daemon=True)
        self._thread.start()

    def _run(self, device: int) -> None:
        """Check the exchanges until the group fails."""
        with contextlib.suppress(Exception), self._cuda.Device(device):
            from cuda.bindings import driver as cuda

            # in this mode, querying an event does not invalidate another thread's capture
            cuda.cuThreadExchangeStreamCaptureMode(cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
            while not self._stopped.wait(_INTERVAL):
                self._inspect(time.monotonic())

    def _inspect(self, now: float) -> None:
        """Abort if the oldest exchange takes too long, or NCCL reports an error."""
        while self._running and self._running[0].after.done:
            self._running.popleft()
            self._began = 0.0
        if error := self._communicator.error():
            self.abort(f"member {self.rank}: {error}; another member ended or failed")
        elif self._running and self._running[0].before.done:
            self._began = self._began or now
            if now - self._began > self.timeout:
                self.abort(
                    f"member {self.rank} waited {self.timeout:g} s for {self._running[0].label!r}: another member ended, "
                    "failed, or called with different shapes or options"
                )
