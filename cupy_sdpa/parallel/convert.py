"""Convert communicators of other libraries, and objects that only send and receive, to groups with exchanges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .group import Exchanger, Group, Transfer
from .loopback import Loopback
from .mpi import MpiGroup
from .nccl import CupyCommunicator, Nccl4pyCommunicator, NcclGroup


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


def as_exchanger(group: Any) -> Exchanger:
    """Convert a group or a communicator of another library, see :class:`.ContextParallel`; TypeError for other objects."""
    if group is None:
        return Loopback(1).members[0]
    if hasattr(group, "exchange") and hasattr(group, "check"):
        return group  # type: ignore[no-any-return]
    origin = f"{type(group).__module__}.{type(group).__qualname__}"
    if origin.startswith(("cupy.", "cupy_backends.", "cupyx.", "nccl.")) and origin.endswith(".NcclCommunicator"):
        return NcclGroup(CupyCommunicator(group))
    if origin.startswith("cupyx.distributed.") and hasattr(group, "_comm"):
        return NcclGroup(CupyCommunicator(group._comm))
    if origin.startswith("nccl.") and hasattr(group, "nranks"):
        return NcclGroup(Nccl4pyCommunicator(group))
    if origin.startswith("mpi4py.") and hasattr(group, "Isend"):
        return MpiGroup(group)
    if all(hasattr(group, name) for name in ("rank", "size", "send", "receive")):
        return OrderedExchanges(group)
    raise TypeError(
        f"group is a {origin}; pass a member of a group of cupy_sdpa.parallel, such as Loopback(2).members[0], an "
        "NcclCommunicator or NCCLBackend of CuPy, a communicator of nccl4py or mpi4py, or an object with rank, size, "
        "send(array, peer) and receive(array, peer)"
    )
