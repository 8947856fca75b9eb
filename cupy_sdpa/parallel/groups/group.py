"""What a group must offer, and the conversion of communicators of other libraries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable


class GroupError(RuntimeError):
    """A member of a group failed, was aborted, or did not take part in an exchange in time; no result is valid."""


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
    """The least that a group must offer: a member's rank, the number of members, and two blocking or enqueued transfers.

    The arrays are uint8 with one dimension. CuPy arrays are transferred on CuPy's current stream. Between two members, arrays
    arrive in the order in which they were sent, and sender and receiver pass arrays of the same length.
    """

    rank: int
    size: int

    def send(self, array: Any, peer: int) -> Any:
        """Send an array to a member."""

    def receive(self, array: Any, peer: int) -> Any:
        """Receive elements from a member into an array."""


class Exchanger(Protocol):
    """A group with exchanges, which all groups are converted to (:func:`as_exchanger`)."""

    rank: int
    size: int

    def exchange(self, sends: Sequence[Transfer], receives: Sequence[Transfer], label: str) -> None:
        """Send and receive arrays. All transfers proceed at once, so their order cannot cause a deadlock.

        Args:
            sends, receives: the arrays; they are in use until the work on the current stream is done.
            label: what is exchanged, for messages; the same for all members.
        """

    def check(self) -> None:
        """Raise GroupError if a member failed."""


class OrderedExchanges:
    """Exchanges with a group that only sends and receives.

    All messages of an exchange have one order, by sender and receiver, that is the same for all members. The first message in
    that order that is not complete is the next one of both its members, so blocking transfers cannot wait for each other.
    """

    def __init__(self, group: Group) -> None:
        self.rank, self.size, self._group = group.rank, group.size, group

    def exchange(self, sends: Sequence[Transfer], receives: Sequence[Transfer], label: str) -> None:
        """Send and receive arrays one after another; see :class:`Exchanger`."""
        messages = [((self.rank, peer), self._group.send, array) for array, peer in sends]
        messages += [((peer, self.rank), self._group.receive, array) for array, peer in receives]
        for (source, target), transfer, array in sorted(messages, key=lambda message: message[0]):
            transfer(array, target if source == self.rank else source)

    def check(self) -> None:
        """Groups of this kind raise their own errors."""


class SingleMember:
    """The group of one member, which exchanges nothing."""

    rank, size = 0, 1

    def exchange(self, sends: Sequence[Transfer], receives: Sequence[Transfer], label: str) -> None:
        """There is no other member."""

    def check(self) -> None:
        """There is no other member."""


def as_exchanger(group: Any) -> Exchanger:
    """Convert a group or a communicator of another library.

    Args:
        group: a group of this package, ``cupy.cuda.nccl.NcclCommunicator``, ``cupyx.distributed.NCCLBackend``, nccl4py's
            ``Communicator``, a communicator of mpi4py, or any object with ``rank``, ``size``, ``send(array, peer)`` and
            ``receive(array, peer)``. None for a single member.

    Raises:
        TypeError: the object is none of these.
    """
    if group is None:
        return SingleMember()
    if hasattr(group, "exchange") and hasattr(group, "check"):
        return group  # type: ignore[no-any-return]
    origin = f"{type(group).__module__}.{type(group).__qualname__}"
    root = origin.split(".")[0]
    if root in ("cupy_backends", "cupy", "cupyx", "nccl"):
        from . import nccl

        if found := nccl.from_object(group, origin):
            return found
    if root == "mpi4py" and hasattr(group, "Isend"):
        from .mpi import MpiGroup

        return MpiGroup(group)
    if all(hasattr(group, name) for name in ("rank", "size", "send", "receive")):
        return OrderedExchanges(group)
    raise TypeError(
        f"group is a {origin}; pass a group of cupy_sdpa.parallel, an NcclCommunicator or NCCLBackend of CuPy, a communicator "
        "of nccl4py or mpi4py, or an object with rank, size, send(array, peer) and receive(array, peer)"
    )
