"""What a group must offer: the protocols of groups, their transfers and their error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable


class GroupError(RuntimeError):
    """A member of a group failed, was aborted, or did not take part in an exchange in time; no result is valid."""


class Failing:
    """A group that raises the reason in every call after it has failed."""

    _failure = ""

    def check(self) -> None:
        """Raise GroupError if the group failed."""
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

        All members make every exchange, also those that have nothing to send or receive.

        Args:
            sends, receives: the arrays; they are in use until the work on the current stream is done.
            label: what is exchanged, for messages; the same for all members.
        """

    def check(self) -> None:
        """Raise GroupError if a member failed."""
