"""What the builders of the methods add to the program of a member: calls, copies, and exchanges with the other members."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..boundary.call import GivenStats
from ..problem.arrays import BACKWARD, REQUESTS
from ..problem.view import View
from ..programs import passes
from ..programs.program import Builder, Program
from .channel import ALIGNMENT, TAG_BYTES, Channel
from .configuration import Spec
from .group import Transfer
from .parts import copy


class Message(NamedTuple):
    """Arrays in one uint8 array, which is sent or received as a whole; the tag of the call is at its end."""

    flat: View
    arrays: list[View]


class MemberSteps:
    """Adds copies and exchanges to a program; the first exchange compares the tag of the call, if it has one."""

    def __init__(self, builder: Builder, channel: Channel, tag: int | None = None) -> None:
        self.builder, self.rank, self.size, self._channel, self._tag = builder, channel.rank, channel.size, channel, tag

    def copy(self, target: View, source: View) -> None:
        """Copy an array into another one of the same shape."""
        copy(self.builder, target, source)

    def message(self, specs: Sequence[Spec]) -> Message:
        """A message for arrays of these shapes and dtypes."""
        dense = [View.dense("", shape, dtype, None) for shape, dtype in specs]
        sizes = [-(-view.nbytes // ALIGNMENT) * ALIGNMENT for view in dense]
        flat = self.builder.temporary((sum(sizes) + TAG_BYTES,), np.uint8)
        places = zip(dense, np.cumsum([0, *sizes]).tolist(), strict=False)
        return Message(flat, [dataclasses.replace(view, storage=flat.storage, offset=place) for view, place in places])

    def message_of(self, arrays: Sequence[View]) -> Message:
        """A message with copies of arrays."""
        message = self.message([(x.shape, x.dtype) for x in arrays])
        for target, source in zip(message.arrays, arrays, strict=True):
            self.copy(target, source)
        return message

    def start(self, sent: Mapping[int, Message], received: Mapping[int, Message], label: str) -> None:
        """Start an exchange: messages to members, and messages from members, by their ranks."""
        sends, receives = (
            tuple(Transfer(message.flat, peer) for peer, message in messages.items() if peer != self.rank)
            for messages in (sent, received)
        )
        if self.size > 1:
            written = [x.array for x in (*sends, *receives)]  # also the tags of those that are sent
            self.builder.run(self._channel.start_exchange, sends, receives, label, self._tag, writes=written, on_host=True)
            self._tag = None

    def wait(self, sent: Mapping[int, Message], received: Mapping[int, Message], label: str) -> None:
        """Let later steps wait for an exchange; the arguments are those of :meth:`start`."""
        if self.size > 1:
            flat = tuple(x.flat for messages in (sent, received) for peer, x in messages.items() if peer != self.rank)
            self.builder.run(self._channel.wait_for_exchange, label, flat, writes=(), on_host=True)

    def gather(self, own: Message, specs: Sequence[Sequence[Spec]], label: str) -> list[Message]:
        """Send a message to every member, and receive one from each; returns them in the order of the ranks."""
        return self.all_to_all([own] * self.size, specs, label)

    def all_to_all(self, own: Sequence[Message], specs: Sequence[Sequence[Spec]], label: str) -> list[Message]:
        """Send a message to each member, and receive one from each, of the given arrays; that of this member is returned."""
        received = {peer: own[peer] if peer == self.rank else self.message(spec) for peer, spec in enumerate(specs)}
        sent = dict(enumerate(own))
        self.start(sent, received, label)
        self.wait(sent, received, label)
        return [*received.values()]


def bytes_sent(program: Program) -> int:
    """The bytes that a member sends."""
    started = [
        step.arguments[0] for step in program.steps if getattr(step.function, "__func__", None) is Channel.start_exchange
    ]
    return sum(transfer.array.nbytes for sends in started for transfer in sends)


def attend(builder: Builder, arrays: tuple[View, View, View], out: View, stats: View, options: Mapping[str, Any]) -> None:
    """Add attention of q, k and v."""
    views = dict(zip("qkv", arrays, strict=True)) | {"out": out, "stats": stats}
    passes.add(builder, views, options, return_stats=True)


def attend_backward(
    builder: Builder, arrays: Sequence[View], options: Mapping[str, Any], *, deterministic: bool, given_stats: GivenStats
) -> None:
    """Add the gradients of attention; the arrays are dout, q, k, v, out, stats, dq, dk and dv."""
    views = dict(zip(BACKWARD, arrays, strict=True))
    outputs: dict[str, Any] = dict.fromkeys(REQUESTS, False)
    passes.add(builder, views, options, deterministic=deterministic, given_stats=given_stats, **outputs)
