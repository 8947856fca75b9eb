"""What the builders of the methods add to the program of a member: calls, copies, and exchanges with the other members."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..extend import Builder, ReadCall, ReadOptions, View
from .channel import ALIGNMENT, TAG_BYTES, Channel
from .configuration import Spec
from .group import Transfer


class Message(NamedTuple):
    """Arrays in one uint8 array, which is sent or received as a whole; the tag of the call, int32 ``(1,)``, is at its end."""

    flat: View
    arrays: list[View]
    tag: View


class Exchange(NamedTuple):
    """An exchange that was started: its messages to and from members, by their ranks, and the tag to compare, if any."""

    sent: Mapping[int, Message]
    received: Mapping[int, Message]
    label: str
    tag: int | None


class MemberSteps:
    """Adds copies and exchanges to a program; the first exchange compares the tag of the call, if ``tag`` is not None."""

    def __init__(self, builder: Builder, channel: Channel, tag: int | None = None) -> None:
        self.builder, self.rank, self.size, self._channel, self._tag = builder, channel.rank, channel.size, channel, tag

    def message(self, specs: Sequence[Spec]) -> Message:
        """Return a message for arrays of these shapes and dtypes."""
        dense = [View.dense("", shape, dtype, None) for shape, dtype in [*specs, ((1,), np.int32)]]
        sizes = [-(-view.nbytes // ALIGNMENT) * ALIGNMENT for view in dense[:-1]]
        flat = self.builder.temporary((sum(sizes) + TAG_BYTES,), np.uint8)
        places = zip(dense, np.cumsum([0, *sizes]).tolist(), strict=True)
        *arrays, tag = (dataclasses.replace(view, storage=flat.storage, offset=place) for view, place in places)
        return Message(flat, arrays, tag)

    def message_of(self, arrays: Sequence[View]) -> Message:
        """Return a message with copies of arrays."""
        message = self.message([(x.shape, x.dtype) for x in arrays])
        for target, source in zip(message.arrays, arrays, strict=True):
            self.builder.copy_part(target, source)
        return message

    def start(self, sent: Mapping[int, Message], received: Mapping[int, Message], label: str) -> Exchange:
        """Start an exchange: messages to members, and messages from members, by their ranks. The first one sends tags."""
        sent, received = ({peer: x for peer, x in of.items() if peer != self.rank} for of in (sent, received))
        tag, self._tag = self._tag, None
        if self.size > 1:
            if tag is not None:
                for target in dict.fromkeys(message.tag for message in sent.values()):
                    self.builder.fill(target, tag)
            sends, receives = (tuple(Transfer(x.flat, peer) for peer, x in of.items()) for of in (sent, received))
            # nothing else writes a message of empty arrays
            written = [transfer.array for transfer in (*sends, *receives)]
            self.builder.run(self._channel.start_exchange, sends, receives, label, writes=written, on_host=True)
        return Exchange(sent, received, label, tag)

    def wait(self, exchange: Exchange) -> None:
        """Let later steps wait for an exchange."""
        if self.size > 1:
            flat = tuple(x.flat for of in (exchange.sent, exchange.received) for x in of.values())
            self.builder.run(self._channel.wait_for_exchange, exchange.label, flat, writes=(), on_host=True)
            if exchange.tag is not None:
                first = next(iter(exchange.received.values()))
                self.builder.run(self._channel.compare_tag, first.tag, exchange.tag, writes=())

    def gather(self, own: Message, specs: Sequence[Sequence[Spec]], label: str) -> list[Message]:
        """Send a message to every member, and receive one from each; returns them in the order of the ranks."""
        return self.all_to_all([own] * self.size, specs, label)

    def all_to_all(self, own: Sequence[Message], specs: Sequence[Sequence[Spec]], label: str) -> list[Message]:
        """Send a message of the given arrays to each member, and receive one from each; this member's own is returned."""
        received = {peer: own[peer] if peer == self.rank else self.message(spec) for peer, spec in enumerate(specs)}
        sent = dict(enumerate(own))
        self.wait(self.start(sent, received, label))
        return [*received.values()]


def bytes_sent(call: ReadCall) -> int:
    """Return the bytes that a member sends."""
    started = [
        step.arguments[0] for step in call.program.steps if getattr(step.function, "__func__", None) is Channel.start_exchange
    ]
    return sum(transfer.array.nbytes for sends in started for transfer in sends)


def attend(builder: Builder, arrays: tuple[View, View, View], out: View, stats: View, options: ReadOptions) -> None:
    """Add attention of q, k and v."""
    views = dict(zip("qkv", arrays, strict=True)) | {"out": out, "stats": stats}
    builder.add_pass(views, options, return_stats=True)
