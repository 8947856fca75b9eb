"""Members compare their shapes and options, so that all of them raise if they differ."""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from ..boundary.argument import read_arrays
from ..boundary.compute import check_converted, read_compute_dtype
from ..boundary.options import is_one_of
from ..programs.block_mask_calls import dense_options
from ..programs.executor import ReadCall
from ..replay.replay_cache import keep_recent
from ..runtime import cupy_runtime
from .channel import TAG_BYTES, Channel
from .configuration import METHODS, Request
from .group import GroupError, Transfer
from .group_arguments import configure, key_of
from .group_report import choose
from .member import Member

#: The bytes of the text of shapes and options that members exchange.
TEXT_BYTES = 4096
#: What the text of a member that cannot make the call begins with.
REFUSED = "refused: "
#: The maximum number of configurations that are kept.
_MAX_CONFIGURATIONS = 256


class Agreement:
    """The calls that the members have compared; ``method`` is that of calls that request none, None to choose it.

    New ones are compared as texts before any of them runs, which synchronizes. Of known ones a checksum is compared during the
    call (:class:`~cupy_sdpa.parallel.channel.Channel`). Neither happens if ``check`` is False.
    """

    def __init__(self, channel: Channel, method: str | None, *, check: bool) -> None:
        self._channel, self._method, self._check = channel, read_method(method), check
        self._known: dict[Any, Any] = {}
        #: Whether the present call has been compared, or is being compared, and an array of its engine.
        self._begun = False
        self._like: Any = None

    @contextlib.contextmanager
    def announced(self, arguments: Iterable[Any]) -> Iterator[None]:
        """A call of the group with these arguments. Errors from before it is compared are told to the other members: they must
        not wait for this one, or use what it sends next.
        """
        self._begun, self._like = False, next((x for x in arguments if cupy_runtime.is_array(x)), np.empty(0))
        self._channel.begin(None)
        try:
            yield
        except BaseException as failure:
            if isinstance(failure, Exception) and not isinstance(failure, GroupError) and not self._begun:
                with contextlib.suppress(ValueError, GroupError):  # its own error is raised
                    self._compare(f"{REFUSED}{type(failure).__name__}: {failure}")
            with cupy_runtime.device_context(self._like):
                self._channel.abandon()
            raise

    def member(self, arrays: Mapping[str, Any], options: Mapping[str, Any], of: Request) -> Member:
        """What this member computes in calls that were not compared before, from arrays by name and the options of
        :func:`own_options`; arguments that are invalid are refused.
        """
        config = configure(self._channel.rank, self._channel.size, arrays, options, of)
        choice = choose(config, self._method if of.method is None else read_method(of.method))
        return Member(config, choice, self._channel, of)

    def call(self, arrays: Mapping[str, Any], options: Mapping[str, Any], of: Request) -> ReadCall:
        """The call of this member, which all members make; as :meth:`member`, with all options.

        Raises:
            TypeError, ValueError, Unsupported: the call is refused, or members call with different shapes or options.
            GroupError: a member failed.
        """
        self._like = arrays["q"]
        self._channel.check()
        rest, dtype = own_options(arrays, options)
        wanted = of._replace(dtype=dtype)
        key = key_of(arrays, rest, wanted)
        member, tag = self._known.get(key) or (self.member(arrays, rest, wanted), None)
        call = member.call(arrays, rest)
        call.check_elements()
        text = ""
        if tag is None:
            call.plan()  # what cuDNN refuses is refused before another member waits for it
            flags = f"deterministic {of.deterministic}, return_dsinks {of.return_dsinks}"
            direction = "backward" if of.backward else "forward"
            text = f"{member.config.text}\n{direction}, method {member.choice.method}\n{flags}"
            tag = zlib.crc32(text.encode()) >> 1  # an int32
        self.agree(key, text, (member, tag))
        call.begin = functools.partial(self._begin, tag if self._check else None)
        return call

    def _begin(self, tag: int | None) -> None:
        """Begin a call whose first exchange compares this tag."""
        self._channel.check()
        self._begun = True
        self._channel.begin(tag)

    def agree(self, key: Any, text: str, found: Any = None) -> None:
        """Compare the text of a call whose key is not known, and remember what was found by the key, if it has one."""
        if key not in self._known:
            self._compare(text)
        self._begun = True
        if key is not None:
            keep_recent(self._known, key, found, _MAX_CONFIGURATIONS)

    def _compare(self, text: str) -> None:
        self._begun = True
        if self._check and self._channel.size > 1:
            with cupy_runtime.device_context(self._like):
                compare(self._channel, text, self._like)


def own_options(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """The options without ``block_mask`` and ``compute_dtype``, which are checked, and the dtype to compute in."""
    rest = {**dense_options(arrays["q"], None, options)}
    dtype = read_compute_dtype(rest.pop("compute_dtype", None), arrays["q"])
    if dtype is not None:
        read_arrays(arrays, {})
        check_converted(arrays)
    return rest, dtype


def compare(channel: Channel, text: str, like: Any) -> None:
    """Exchange the texts of all members, or :data:`REFUSED` and a reason; waits for the exchange.

    Raises:
        ValueError: the texts of two members differ. It is raised on every member.
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
            raise ValueError(f"member {peer} refused the call: {other.removeprefix(REFUSED)}")
    for peer, other in enumerate(texts):
        if other != texts[channel.rank]:
            raise ValueError(_difference(channel.rank, texts[channel.rank], peer, other))


def read_method(method: Any) -> str | None:
    """The name of a method, or None; ValueError for another one."""
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
