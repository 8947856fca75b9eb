"""A group of threads in one process: for tests without several GPUs, and to try code on one GPU or none."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..extend import cupy_runtime, in_words, read_number
from .group import Failing, GroupError, Transfer

#: The seconds for which a member waits for a message before the group fails.
DEFAULT_TIMEOUT = 60.0


class Envelope(NamedTuple):
    """A message in transit: what is exchanged, the number of earlier ones, a copy of the array, and the event after it."""

    label: str
    number: int
    array: Any
    written: Any


class Loopback(Failing):
    """Connect threads of one process as the members of a group, on one GPU, on several or on none.

    Pass ``members`` to :func:`run_threads`.

    Args:
        size: P, the number of members.
        timeout: the seconds for which a member waits for a message. Default 60.
        max_delay: the upper bound of the random pauses before each exchange, in seconds, which vary the order of the threads.
            Default 0: no pauses.
        seed: of the random pauses. Default 0.

    Attributes:
        members: the members, one for each thread; each has ``rank`` and ``size``.
        bytes_sent: the bytes that each member has sent, a list of P integers.

    Raises:
        TypeError, ValueError: ``size`` is not a positive integer.

    >>> import numpy as np
    >>> from cupy_sdpa.parallel import Loopback, context_parallel, run_threads
    >>> shared, x = Loopback(2), np.ones((64, 1, 8, 1), np.float32, order="F")
    >>> def member(group):
    ...     cp = context_parallel(group, check=False)
    ...     return cp.unshard(cp.shard(x)).shape
    >>> run_threads(shared.members, member)
    [(64, 1, 8, 1), (64, 1, 8, 1)]
    >>> [sent >= x.nbytes // 2 for sent in shared.bytes_sent]
    [True, True]
    """

    def __init__(self, size: int, timeout: float = DEFAULT_TIMEOUT, max_delay: float = 0.0, seed: int = 0) -> None:
        self.size, self.timeout, self.max_delay = read_number("size", size, 1), timeout, max_delay
        self.bytes_sent = [0] * size
        self._messages: dict[tuple[int, int], deque[Envelope]] = defaultdict(deque)
        self._changed = threading.Condition()
        self.members = [LoopbackMember(self, rank, random.Random(seed * size + rank)) for rank in range(size)]

    def abort(self, reason: str) -> None:
        """Let every member raise GroupError, now or in its next exchange.

        Args:
            reason: the message of the error. A group that has failed keeps its first reason.

        >>> from cupy_sdpa.parallel import GroupError, Loopback, context_parallel
        >>> shared = Loopback(2)
        >>> shared.abort("stopped")
        >>> try:
        ...     context_parallel(shared.members[0]).check()
        ... except GroupError as error:
        ...     print(error)
        stopped
        """
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify_all()

    def post(self, source: int, target: int, message: Envelope) -> None:
        """Deliver a message, for the members. Messages of one sender to one receiver keep their order."""
        with self._changed:
            self._messages[source, target].append(message)
            self._changed.notify_all()

    def take(self, source: int, target: int, label: str) -> Envelope:
        """Wait for the next message, for the members.

        Raises:
            GroupError: the group was aborted, or there is no message in time.
        """
        deadline = time.monotonic() + self.timeout
        with self._changed:
            while not self._failure and not self._messages[source, target]:
                if (left := deadline - time.monotonic()) <= 0:
                    self._failure = (
                        f"member {target} waited {self.timeout:g} s for {label!r} from member {source}, which did not send it: "
                        "it ended, failed, or called with different shapes or options"
                    )
                    self._changed.notify_all()
                    break
                self._changed.wait(left)
            self.check()
            return self._messages[source, target].popleft()


class LoopbackMember:
    """One member of a loopback group, used by one thread. Arrays are numpy's or CuPy's, on one or several devices."""

    def __init__(self, shared: Loopback, rank: int, rng: random.Random) -> None:
        self.shared, self.rank, self.size = shared, rank, shared.size
        self._rng = rng
        self._sent: dict[int, int] = defaultdict(int)
        self._received: dict[int, int] = defaultdict(int)
        #: Copies that a receiver may still read on its stream, with the event after the last read.
        self._retired: list[tuple[Any, Any]] = []
        self._lock = threading.Lock()

    def exchange(self, sends: Sequence[Transfer], receives: Sequence[Transfer], label: str) -> None:
        """As :class:`.Exchanger`; GroupError if a member failed, or a message is missing, out of order, or of another size."""
        self.shared.check()
        if self.shared.max_delay:
            time.sleep(self._rng.uniform(0, self.shared.max_delay))
        self._release()
        for array, peer in sends:
            self.shared.bytes_sent[self.rank] += array.nbytes
            self.shared.post(self.rank, peer, Envelope(label, self._sent[peer], *_copied(array)))
            self._sent[peer] += 1
        try:
            for array, peer in receives:
                self._receive(array, peer, label)
        except BaseException:
            if cupy_runtime.is_array(receives[0].array):  # what has arrived is copied from memory of members that may end
                cupy_runtime.cupy().cuda.get_current_stream().synchronize()
            raise

    def _receive(self, array: Any, peer: int, label: str) -> None:
        message = self.shared.take(peer, self.rank, label)
        try:
            self._verify(message, array, peer, label)
        except GroupError as error:
            self.shared.abort(str(error))
            raise
        self._received[peer] += 1
        self.shared.members[peer]._retire(message.array, _write(array, message))

    def _verify(self, message: Envelope, array: Any, peer: int, label: str) -> None:
        """Check that a message is the expected one."""
        expected = self._received[peer]
        if (message.label, message.number) != (label, expected):
            raise GroupError(
                f"member {self.rank} expects {label!r} as message {expected} of member {peer}, and received {message.label!r} "
                f"as message {message.number}: messages are out of order, or the members call in different orders"
            )
        if message.array.nbytes != array.nbytes:
            raise GroupError(
                f"member {self.rank} expects {array.nbytes} bytes as {label!r} from member {peer}, and received "
                f"{message.array.nbytes} bytes: the members call with different shapes or options"
            )

    def _retire(self, array: Any, event: Any) -> None:
        if event is not None:
            with self._lock:
                self._retired.append((array, event))

    def _release(self) -> None:
        """Free the copies that were read: later work of this stream, which may reuse their memory, waits for the readers."""
        with self._lock:
            retired, self._retired = self._retired, []
        for _, event in retired:
            cupy_runtime.cupy().cuda.get_current_stream().wait_event(event)

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:  # at exit the module's names are None
        """Wait until the copies of the last exchange are read; their memory is then reused."""
        if not finalizing():
            for _, event in self._retired:
                event.synchronize()

    def check(self) -> None:
        """Raise GroupError if a member failed."""
        self.shared.check()

    def abort(self, reason: str) -> None:
        """Let every member raise GroupError."""
        self.shared.abort(reason)


def _copied(array: Any) -> tuple[Any, Any]:
    """Return a dense copy, and the event after it for a CuPy array."""
    copy = array.copy()
    if not cupy_runtime.is_array(array):
        return copy, None
    return copy, cupy_runtime.cupy().cuda.get_current_stream().record()


def _write(array: Any, message: Envelope) -> Any:
    """Write the elements of a message to an array of as many bytes; returns the event after it for a CuPy array."""
    if message.written is None:
        array[...] = message.array
        return None
    stream = cupy_runtime.cupy().cuda.get_current_stream()
    stream.wait_event(message.written)
    array.data.copy_from_device_async(message.array.data, array.nbytes, stream)
    return stream.record()


def run_threads(members: Sequence[Any], function: Callable[[Any], Any]) -> list[Any]:
    """Call a function with each member of a group, each in its own thread.

    Args:
        members: the members, such as ``Loopback(4).members``.
        function: called with a member.

    Returns:
        The results, in the order of the ranks.

    Raises:
        TypeError: ``members`` is not a sequence, such as the group itself.
        Exception: the exception of the member that failed first. The others are aborted.

    >>> from cupy_sdpa.parallel import Loopback, run_threads
    >>> run_threads(Loopback(3).members, lambda member: member.rank)
    [0, 1, 2]
    """
    if not isinstance(members, Sequence):
        raise TypeError(f"members is {in_words(members)}; pass a list of members, such as Loopback(4).members")
    results: list[Any] = [None] * len(members)
    failures: list[tuple[int, BaseException]] = []
    lock = threading.Lock()

    def work(index: int) -> None:
        try:
            results[index] = function(members[index])
        except BaseException as error:  # raised again below
            with lock:
                failures.append((index, error))
            reason = f"member {index} failed: {type(error).__name__}: {error}"
            for member in members:
                if abort := getattr(member, "abort", None):
                    abort(reason)

    threads = [threading.Thread(target=work, args=(i,), name=f"member {i}") for i in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0][1]
    return results
