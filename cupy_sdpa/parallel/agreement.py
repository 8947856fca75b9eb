"""Members compare their shapes and options, so that all of them raise if they differ."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..device import cupy_runtime
from .groups.channel import Channel, Message

#: The bytes of the text of shapes and options that members exchange.
TEXT_BYTES = 4096
#: What the text of a member that cannot make the call begins with.
REFUSED = "refused: "


def compare(channel: Channel, text: str, like: Any) -> None:
    """Exchange the texts of all members; waits for the exchange.

    Args:
        channel: the group.
        text: the shapes and options of this member, or :data:`REFUSED` and a reason.
        like: an array of the engine.

    Raises:
        ValueError: the texts of two members differ. It is raised on every member.
        GroupError: a member failed.
    """
    on_gpu = cupy_runtime.is_array(like)
    own = np.zeros(TEXT_BYTES, np.uint8)
    encoded = np.frombuffer(text.encode()[:TEXT_BYTES], np.uint8)
    own[: len(encoded)] = encoded
    message = Message.of([cupy_runtime.cupy().asarray(own) if on_gpu else own])
    specs = [[((TEXT_BYTES,), np.dtype(np.uint8))]] * channel.size
    messages = channel.gather(message, specs, "shapes and options of a new configuration")
    arrays = [found.arrays[0].get() if on_gpu else found.arrays[0] for found in messages]
    channel.exchanger.check()
    texts = [bytes(array).rstrip(b"\0").decode(errors="replace") for array in arrays]
    for peer, other in enumerate(texts):
        if other.startswith(REFUSED):
            raise ValueError(f"member {peer} refused the call: {other.removeprefix(REFUSED)}")
    for peer, other in enumerate(texts):
        if other != texts[channel.rank]:
            raise ValueError(_difference(channel.rank, texts[channel.rank], peer, other))


def _difference(rank: int, own: str, peer: int, other: str) -> str:
    """The first difference between the texts of two members."""
    mine, theirs = [*own.splitlines(), "nothing more"], [*other.splitlines(), "nothing more"]
    one, two = next((one, two) for one, two in zip(mine, theirs, strict=False) if one != two)
    return f"members call with different shapes or options: member {rank} has {one!r}, member {peer} has {two!r}"
