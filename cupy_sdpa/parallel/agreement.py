"""Members compare their shapes and options, so that all of them raise if they differ."""

from __future__ import annotations

import collections
import contextlib
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..boundary.options import is_one_of
from ..errors import Unsupported
from ..runtime import cupy_runtime
from .channel import Channel, Message
from .configuration import METHODS, Configuration
from .group_arguments import configure, key_of
from .group_report import choose
from .group_support import refusal

#: The bytes of the text of shapes and options that members exchange.
TEXT_BYTES = 4096
#: What the text of a member that cannot make the call begins with.
REFUSED = "refused: "
#: The maximum number of configurations that are kept.
_MAX_CONFIGURATIONS = 256


class Agreement:
    """The configurations of calls, which the members have compared.

    New configurations are compared as texts before any of them is used, which synchronizes. Of known ones a checksum is
    compared during the call (:class:`~cupy_sdpa.parallel.channel.Channel`).

    Args:
        channel: the group.
        method: the method of calls that request none; None to choose it.
        check: whether members compare configurations and checksums.
    """

    def __init__(self, channel: Channel, method: str | None, *, check: bool) -> None:
        self._channel, self._method, self._check = channel, read_method(method), check
        self._known: collections.OrderedDict[Any, Any] = collections.OrderedDict()

    def requested(self, method: str | None) -> str | None:
        """The method that a call requests."""
        return self._method if method is None else read_method(method)

    def configuration(
        self,
        arrays: Mapping[str, Any],
        options: Mapping[str, Any],
        method: str | None,
        seqlens: tuple[int | None, int | None],
        **outputs: bool,
    ) -> tuple[Configuration, str]:
        """The configuration of a call and its method; begins the call.

        Args:
            arrays: the arrays of the call by name.
            options: its options.
            method: the requested method; None to choose it.
            seqlens: the requested lengths of whole sequences.
            outputs: the options of the backward pass.

        Raises:
            TypeError, ValueError, Unsupported: the call is refused, or members call with different shapes or options.
            GroupError: a member failed.
        """
        self._channel.check()
        self._channel.begin(None)
        key = key_of(arrays, options, method, seqlens, *outputs.items())
        found = None if key is None else self._known.get(key)
        if found is None:
            found = self._compared(arrays, options, method, seqlens, outputs)
            if key is not None:
                self._remember(key, found)
        else:
            self._known.move_to_end(key)
        config, chosen, tag = found
        if self._check:
            self._channel.begin(tag)
        return config, chosen

    def compare_once(self, text: str, like: Any, error: Exception | None) -> None:
        """Compare a text that was not compared before, and raise this member's error, if there is one."""
        self._channel.begin(None)
        if error or text not in self._known:
            self._compare(text, like, error)
            self._remember(text, None)

    def _compared(
        self,
        arrays: Mapping[str, Any],
        options: Mapping[str, Any],
        method: str | None,
        seqlens: tuple[int | None, int | None],
        outputs: Mapping[str, bool],
    ) -> tuple[Configuration, str, int]:
        """A configuration after its comparison, its method, and its checksum."""
        rank, size, q = self._channel.rank, self._channel.size, arrays["q"]
        error: Exception | None = None
        try:
            config = configure(rank, size, arrays, options, seqlens)
            chosen = choose(config, self.requested(method)).method
            with cupy_runtime.device_context(q):
                if size > 1 and (reason := refusal(config, chosen, q, options, **outputs)):
                    raise Unsupported(reason)
            text = f"{config.text}\n{'backward' if outputs else 'forward'}, method {chosen}\n{dict(outputs)}"
        except Exception as failure:  # the other members must not wait for this one
            error, text = failure, f"{REFUSED}{type(failure).__name__}: {failure}"
        self._compare(text, q, error)
        return config, chosen, zlib.crc32(text.encode()) >> 1  # an int32

    def _compare(self, text: str, like: Any, error: Exception | None) -> None:
        if self._check and self._channel.size > 1:
            # its own error is raised below
            with cupy_runtime.device_context(like), contextlib.suppress(*([ValueError] if error else [])):
                compare(self._channel, text, like)
        if error is not None:
            raise error

    def _remember(self, key: Any, found: Any) -> None:
        self._known[key] = found
        while len(self._known) > _MAX_CONFIGURATIONS:
            self._known.popitem(last=False)


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


def read_method(method: Any) -> str | None:
    """Validate the name of a method.

    Raises:
        ValueError: there is no such method.
    """
    if not is_one_of(method, (None, *METHODS)):
        raise ValueError(f"method is {method!r}; it must be {', '.join(map(repr, METHODS))} or None")
    return method  # type: ignore[no-any-return]


def _difference(rank: int, own: str, peer: int, other: str) -> str:
    """The first difference between the texts of two members."""
    mine, theirs = [*own.splitlines(), "nothing more"], [*other.splitlines(), "nothing more"]
    one, two = next((one, two) for one, two in zip(mine, theirs, strict=False) if one != two)
    lengths = one.startswith(("problem: ", "unshard")) and two.startswith(("problem: ", "unshard"))
    return (
        f"members call with different shapes or options: member {rank} has {one!r}, member {peer} has {two!r}"
        f"{'; if 2 P does not divide a length, pass seqlen_q= and seqlen_kv=, or seqlen= to unshard' * lengths}"
    )
