"""What a group must offer: the protocols of groups, their transfers and their error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable


class GroupError(RuntimeError):
    """A member of a group failed, was aborted, or did not take part in an exchange in time; no result is valid.

    Every later call of the group raises it again: create another group to go on.

    >>> from cupy_sdpa.parallel import GroupError, Loopback
    >>> shared = Loopback(2)
    >>> shared.abort("member 1 has no more input")
    >>> try:
    ...     shared.check()
    ... except GroupError as error:
    ...     print(error)
    member 1 has no more input
    """


class Failing:
    """A group that raises the reason in every call after it has failed."""

    _failure = ""

    def check(self) -> None:
        """Check the group.

        Raises:
            GroupError: the group failed; the message is the reason of the first failure.

        >>> from cupy_sdpa.parallel import Loopback
        >>> Loopback(2).check()
        """
        if self._failure:
            raise GroupError(self._failure)


class Transfer(NamedTuple):
    """An array that is sent to a peer, or received from it.

    Attributes:
        array: uint8, one dimension, dense; received elements are written to it.
        peer: the rank of the other member.
    """

    array: Any
    peer: int


@runtime_checkable
class Group(Protocol):
    """Define what a group must offer at least: a member's rank, the number of members, and two blocking or enqueued transfers.

    The arrays are uint8 ``(bytes,)``. CuPy arrays are transferred on CuPy's current stream. Between two members, arrays
    arrive in the order in which they were sent, and sender and receiver pass arrays of the same length. Calls of
    :class:`~cupy_sdpa.parallel.ContextParallel` pass on the errors that the methods raise.

    Attributes:
        rank: the rank of this member, from 0 to ``size - 1``.
        size: P, the number of members.

    A group of threads that exchange arrays through queues:

    >>> import queue, numpy as np
    >>> from cupy_sdpa.parallel import Group, context_parallel, run_threads
    >>> class Queues:
    ...     def __init__(self, rank, size, queues):
    ...         self.rank, self.size, self.queues = rank, size, queues
    ...     def send(self, array, peer):
    ...         self.queues[self.rank, peer].put(array.copy())
    ...     def receive(self, array, peer):
    ...         array[...] = self.queues[peer, self.rank].get()
    >>> queues = {(source, target): queue.SimpleQueue() for source in range(2) for target in range(2)}
    >>> members = [Queues(rank, 2, queues) for rank in range(2)]
    >>> isinstance(members[0], Group)
    True
    >>> x = np.arange(8.0, dtype=np.float32).reshape(1, 1, 8, 1, order="F")
    >>> def member(group):
    ...     cp = context_parallel(group)
    ...     return cp.unshard(cp.shard(x))
    >>> [bool((whole == x).all()) for whole in run_threads(members, member)]
    [True, True]
    """

    rank: int
    size: int

    def send(self, array: Any, peer: int) -> Any:
        """Send an array to a member.

        Args:
            array: uint8 ``(bytes,)``, dense; it is in use until the transfer is done.
            peer: the rank of the receiver.
        """

    def receive(self, array: Any, peer: int) -> Any:
        """Receive elements from a member into an array.

        Args:
            array: uint8 ``(bytes,)``, dense; it is overwritten.
            peer: the rank of the sender.
        """


class Exchanger(Protocol):
    """A group with exchanges, which all groups are converted to (:func:`as_exchanger`)."""

    rank: int
    size: int

    def exchange(self, sends: Sequence[Transfer], receives: Sequence[Transfer], label: str) -> None:
        """Send and receive arrays. All transfers proceed at once, so their order cannot cause a deadlock.

        All members make every exchange, also those that have nothing to send or receive.

        Args:
            sends, receives: the arrays; they are in use until the work on the current stream is done.
            label: what is exchanged, for messages; the same for all members.
        """

    def check(self) -> None:
        """Raise GroupError if a member failed."""
