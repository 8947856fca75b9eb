"""Compare the members' shapes and options. If they differ, every member raises an error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..block_masks.block_mask_calls import dense_options
from ..extend import Call, CallKey, ReadCall, cupy_runtime
from .channel import TAG_BYTES, Channel
from .configuration import METHODS, Request
from .group import GroupError, Transfer
from .group_arguments import HostOffsets, configure, read_member_operands
from .group_report import choose
from .member import Member

#: The size in bytes of the text of shapes and options that members exchange.
TEXT_BYTES = 4096
#: What the text of a member that cannot make the call begins with.
REFUSED = "refused: "
#: The maximum number of texts that a member remembers.
_MAX_TEXTS = 1024


class Agreement:
    """The calls that the members have compared. Calls that request no method use ``method``; None chooses one.

    Members compare a new call as text before it runs, which synchronizes. During a known call they compare a checksum
    (:class:`~cupy_sdpa.parallel.channel.Channel`). If ``check`` is False, they compare neither.
    """

    def __init__(self, channel: Channel, method: str | None, *, check: bool) -> None:
        self._channel, self._method, self._check = channel, read_method(method), check
        #: The texts that were compared.
        self._texts: dict[str, None] = {}
        #: The current call's arguments.
        self._arguments: Iterable[Any] = ()
        #: This member's part of the last call that was parsed.
        self.member: Member | None = None

    def begin(self, arguments: Iterable[Any]) -> None:
        """Begin a call of the group with these arguments; raises GroupError if a member failed."""
        self._channel.begun, self._arguments = False, arguments
        self._channel.check()

    def fail(self, failure: BaseException) -> None:
        """End a call that raised. If the members have not compared it yet, send the error to the others: they must neither wait
        for this member nor use what it sends next.
        """
        if isinstance(failure, Exception) and not isinstance(failure, GroupError) and not self._channel.begun:
            with contextlib.suppress(ValueError, GroupError):  # the caller raises this member's own error
                self.compare(f"{REFUSED}{type(failure).__name__}: {failure}")
        with cupy_runtime.device_context(self._array()):
            self._channel.abandon()

    def decided(self, arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the options to build the program with: a dense block mask, and no redundant ``compute_dtype``."""
        self._arguments = arrays.values()  # of numpy or CuPy
        return Call.decide_pass(arrays, dense_options(arrays["q"], None, options))

    def parse(self, of: Request, key: CallKey) -> ReadCall:
        """Check the arrays and the decided options of a call, and build the program of this member.

        Args:
            of: what the call asks for.
            key: the call.

        Raises:
            TypeError, ValueError, Unsupported: arguments are invalid, or no method supports them.
        """
        options: dict[str, Any] = {
            name: value.array if isinstance(value, HostOffsets) else value for name, value in key.options.items()
        }
        arrays, views, read = read_member_operands(key.named(), options)
        of = of._replace(dtype=options.pop("compute_dtype", None))
        config = configure(self._channel.rank, self._channel.size, views, read, options, of)
        choice = choose(config, self._method if of.method is None else read_method(of.method))
        self.member = Member(config, choice, self._channel, of, self.agree, tagged=self._check)
        return self.member.read(key, arrays, views, read)

    def agree(self, text: str) -> None:
        """Compare the text of a call unless this member remembers it.

        Members compare and use texts in the same order, so they all remember the same texts.
        """
        if text not in self._texts:
            self.compare(text)
        self._texts.pop(text, None)
        self._texts[text] = None
        if len(self._texts) > _MAX_TEXTS:
            del self._texts[next(iter(self._texts))]
        self._channel.begun = True

    def compare(self, text: str) -> None:
        """Compare the text of a call with the texts of the other members, see :func:`compare_texts`."""
        self._channel.begun = True
        if self._check and self._channel.size > 1:
            array = self._array()
            with cupy_runtime.device_context(array):
                compare_texts(self._channel, text, array)

    def _array(self) -> Any:
        """Return an array of the current call's engine."""
        return next((x for x in self._arguments if cupy_runtime.is_array(x)), np.empty(0))


def compare_texts(channel: Channel, text: str, like: Any) -> None:
    """Exchange the texts of all members and wait. A text is a call, or :data:`REFUSED` and a reason.

    Raises:
        ValueError: two members' texts differ, or a member sent :data:`REFUSED`. Every member raises it.
        GroupError: a member failed.
    """
    xp = cupy_runtime.array_module(like)
    own = np.zeros(TEXT_BYTES + TAG_BYTES, np.uint8)
    encoded = np.frombuffer(text.encode()[:TEXT_BYTES], np.uint8)
    own[: len(encoded)] = encoded
    arrays = [xp.asarray(own) if peer == channel.rank else xp.empty(own.shape, np.uint8) for peer in range(channel.size)]
    peers, label = [peer for peer in range(channel.size) if peer != channel.rank], "shapes and options of a new configuration"
    channel.start_exchange([Transfer(arrays[channel.rank], x) for x in peers], [Transfer(arrays[x], x) for x in peers], label)
    channel.wait_for_exchange(label)
    found = [x.get() if cupy_runtime.is_array(x) else x for x in arrays]
    channel.exchanger.check()
    texts = [bytes(array[:TEXT_BYTES]).rstrip(b"\0").decode(errors="replace") for array in found]
    for peer, other in enumerate(texts):
        if other.startswith(REFUSED):
            raise ValueError(f"member {peer} rejected the call: {other.removeprefix(REFUSED)}")
    for peer, other in enumerate(texts):
        if other != texts[channel.rank]:
            raise ValueError(_difference(channel.rank, texts[channel.rank], peer, other))


def read_method(method: Any) -> str | None:
    """Return the name of a method, or None; raises ValueError for any other value."""
    if method is not None and not (isinstance(method, str) and method in METHODS):
        raise ValueError(f"method is {method!r}; it must be {', '.join(map(repr, METHODS))} or None")
    return method


def _difference(rank: int, own: str, peer: int, other: str) -> str:
    """Describe the first difference between two members' texts."""
    mine, theirs = [*own.splitlines(), "nothing more"], [*other.splitlines(), "nothing more"]
    one, two = next((one, two) for one, two in zip(mine, theirs, strict=False) if one != two)
    lengths = one.startswith(("problem: ", "unshard")) and two.startswith(("problem: ", "unshard"))
    return (
        f"members call with different shapes or options: member {rank} has {one!r}, member {peer} has {two!r}"
        f"{'; if 2 P does not divide a length, pass seqlen_q= and seqlen_kv=, or seqlen= to unshard' * lengths}"
    )
