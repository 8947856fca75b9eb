"""Exchanges of a group that overlap with computation, and arrays packed into one message."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..runtime import cupy_runtime, memory
from .group import Exchanger, GroupError, Transfer

#: The alignment in bytes of the arrays in a message.
_ALIGNMENT = 256
#: The bytes at the end of a message; the first four of them are the tag of the call.
_TAG_BYTES = _ALIGNMENT

#: The shape and dtype of an array in a message.
Spec = tuple[tuple[int, ...], Any]


class Message:
    """Arrays in Fortran order in one uint8 array, which is sent or received as a whole; the tag of the call is at its end.

    Args:
        like: an array of the engine.
        specs: the shape and dtype of every array.

    Attributes:
        flat: the uint8 array.
        arrays: views of it.
    """

    def __init__(self, like: Any, specs: Sequence[Spec]) -> None:
        self.flat = cupy_runtime.temporary(like, (message_bytes(specs),), np.dtype(np.uint8))
        self.arrays: list[Any] = []
        offset = 0
        for shape, dtype in specs:
            self.arrays.append(_view(self.flat, shape, np.dtype(dtype), offset))
            offset += _padded_bytes(shape, dtype)

    @classmethod
    def of(cls, arrays: Sequence[Any]) -> Message:
        """A message with copies of arrays."""
        message = cls(arrays[0], [(x.shape, x.dtype) for x in arrays])
        for target, source in zip(message.arrays, arrays, strict=True):
            copy(target, source)
        return message

    @classmethod
    def zeros(cls, like: Any, specs: Sequence[Spec]) -> Message:
        """A message of zeros."""
        message = cls(like, specs)
        memory.clear(message.flat, 0)
        return message


def message_bytes(specs: Sequence[Spec]) -> int:
    """The size of a message in bytes."""
    return sum(_padded_bytes(*spec) for spec in specs) + _TAG_BYTES


def _padded_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    size: int = math.prod(shape) * np.dtype(dtype).itemsize
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _tag_of(flat: Any) -> Any:
    """The tag of a message, an int32 array ``(1,)``."""
    return _view(flat, (1,), np.dtype(np.int32), flat.size - _TAG_BYTES)


def _view(flat: Any, shape: tuple[int, ...], dtype: Any, offset: int) -> Any:
    if cupy_runtime.is_array(flat):
        return cupy_runtime.cupy().ndarray(shape, dtype, flat.data + offset, order="F")
    return np.ndarray(shape, dtype, flat.data, offset, order="F")


def copy(target: Any, source: Any) -> None:
    """Copy an array into another one of the same shape and dtype; at memory speed if both consist of evenly spaced rows."""
    if cupy_runtime.is_array(target) and target.dtype == source.dtype and target.size:
        for axis in reversed(range(target.ndim)):
            to, of = memory.rows_of(target, axis), memory.rows_of(source, axis)
            if to and of and to.number == of.number:
                memory.resize(target, source, (axis,))
                return
    target[...] = source


class Pending:
    """An exchange that was started; its arrays are kept until :meth:`wait`."""

    def __init__(self, arrays: Sequence[Any] = (), done: Any = None) -> None:
        self._arrays, self._done = arrays, done

    def wait(self) -> None:
        """Let later work on CuPy's current stream wait for the exchange."""
        if self._done is not None:
            cupy_runtime.cupy().cuda.get_current_stream().wait_event(self._done)
        self._arrays, self._done = (), None


class Channel:
    """Starts exchanges. Those of CuPy arrays are enqueued on a stream of their own, so that kernels run at the same time.

    The first exchange of a call sends the call's tag, a checksum of its shapes and options, and compares it with that of the
    first message that arrives. On a GPU the comparison is a kernel that writes to memory of the host, so nothing waits for it.

    Args:
        exchanger: the group.
    """

    def __init__(self, exchanger: Exchanger) -> None:
        self.exchanger, self.rank, self.size = exchanger, exchanger.rank, exchanger.size
        self._streams: dict[int, Any] = {}
        self._tag: int | None = None
        self._failed: Any = None  # one int32 of the host, other than 0 if a tag was different

    def begin(self, tag: int | None) -> None:
        """Begin a call; its first exchange compares the tag. None for no tag, also not that of an earlier call that raised."""
        self._tag = tag

    def check(self) -> None:
        """Raise GroupError if a member failed, or made another call than this one."""
        self.exchanger.check()
        if self._failed is not None and self._failed[0]:
            raise self._other_call()

    def _other_call(self) -> GroupError:
        error = GroupError(
            f"member {self.rank} and another member made calls with different shapes or options at the same time, and their "
            "results are wrong: let all members make the same calls in the same order"
        )
        if abort := getattr(self.exchanger, "abort", None):  # let the other members raise
            abort(str(error))
        return error

    def start(self, sends: Sequence[Transfer], receives: Sequence[Transfer], label: str) -> Pending:
        """Start an exchange, after the work on CuPy's current stream so far. Empty arrays are not transferred."""
        tag, self._tag = self._tag, None
        sends, receives = [x for x in sends if x.array.size], [x for x in receives if x.array.size]
        arrays = [x.array for x in (*sends, *receives)]
        if not arrays:
            self.exchanger.exchange([], [], label)  # members that are threads start every exchange together
            return Pending()
        if not cupy_runtime.is_array(arrays[0]):
            if tag is not None:
                for sent, _ in sends:
                    _tag_of(sent)[0] = tag
            self.exchanger.exchange(sends, receives, label)
            if tag is not None and receives and _tag_of(receives[0].array)[0] != tag:
                raise self._other_call()
            return Pending()
        if tag is not None:
            for sent, _ in sends:
                memory.fill_int32(_tag_of(sent), tag)
        stream = self._stream(arrays[0].data.device_id)
        stream.wait_event(cupy_runtime.cupy().cuda.get_current_stream().record())
        with stream:
            self.exchanger.exchange(sends, receives, label)
            if tag is not None and receives:
                if self._failed is None:
                    self._failed = memory.host_int32()
                memory.differs(_tag_of(receives[0].array), tag, self._failed)
        return Pending(arrays, stream.record())

    def exchange(self, sends: Sequence[Transfer], receives: Sequence[Transfer], label: str) -> None:
        """Start an exchange, and let later work wait for it."""
        self.start(sends, receives, label).wait()

    def gather(self, own: Message, specs: Sequence[Sequence[Spec]], label: str) -> list[Message]:
        """Send a message to every member, and receive one from each; returns them in the order of the ranks.

        Args:
            own: the message of this member.
            specs: what the messages of all members contain.
            label: see :meth:`start`.
        """
        messages = [own if peer == self.rank else Message(own.flat, spec) for peer, spec in enumerate(specs)]
        peers = [peer for peer in range(self.size) if peer != self.rank]
        self.exchange([Transfer(own.flat, x) for x in peers], [Transfer(messages[x].flat, x) for x in peers], label)
        return messages

    def all_to_all(self, own: Sequence[Message], specs: Sequence[Sequence[Spec]], label: str) -> list[Message]:
        """Send a message to each member, and receive one from each; returns the received ones in the order of the ranks.

        Args:
            own: the messages to all members. That to this member itself is returned.
            specs: what the received messages contain.
            label: see :meth:`start`.
        """
        flat = own[0].flat
        messages = [own[peer] if peer == self.rank else Message(flat, spec) for peer, spec in enumerate(specs)]
        peers = [peer for peer in range(self.size) if peer != self.rank]
        self.exchange([Transfer(own[x].flat, x) for x in peers], [Transfer(messages[x].flat, x) for x in peers], label)
        return messages

    def _stream(self, device: int) -> Any:
        if device not in self._streams:
            self._streams[device] = cupy_runtime.cupy().cuda.Stream(non_blocking=True)
        return self._streams[device]
