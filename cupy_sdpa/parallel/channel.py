"""Exchanges of a group that overlap with computation."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..runtime import cupy_runtime, memory
from .group import Exchanger, GroupError, Transfer

#: The alignment in bytes of the arrays in a message.
ALIGNMENT = 256
#: The bytes at the end of a message; the first four of them are the tag of the call.
TAG_BYTES = ALIGNMENT


#: The number of elements of a transfer.
_size_of = operator.attrgetter("array.size")


def _tag_of(flat: Any) -> Any:
    """The tag of a message, an int32 array ``(1,)``."""
    return flat[flat.size - TAG_BYTES :][:4].view(np.int32)


class Channel:
    """Starts exchanges. Those of CuPy arrays are enqueued on a stream of their own, so that kernels run at the same time.

    The first exchange of a call sends the call's tag, a checksum of its shapes and options, and compares it with the tag of the
    first message that arrives. On a GPU the comparison is a kernel that writes to memory of the host, so nothing waits for it.
    """

    def __init__(self, exchanger: Exchanger) -> None:
        self.exchanger, self.rank, self.size = exchanger, exchanger.rank, exchanger.size
        self._streams: dict[int, Any] = {}
        #: The events after the exchanges on a GPU that no call has waited for, by label.
        self._running: dict[str, Any] = {}
        #: Whether the present call has been compared with those of the other members, or is being compared.
        self.begun = False
        self._failed: Any = None  # one int32 of the host, other than 0 if a tag was different

    def abandon(self) -> None:
        """End a call that raised: later work on the current stream may reuse its arrays, and waits for what it has started."""
        for label in [*self._running]:
            self.wait_for_exchange(label)

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

    def start_exchange(
        self, sends: Sequence[Transfer], receives: Sequence[Transfer], label: str, tag: int | None = None
    ) -> None:
        """Start an exchange, after the work on CuPy's current stream so far; with a tag, compare it.

        Empty arrays are not transferred.
        The arrays are in use until :meth:`wait_for_exchange`. The label, for messages, is the same for all members.
        """
        sends, receives = [*filter(_size_of, sends)], [*filter(_size_of, receives)]
        first = next(iter(sends or receives), None)
        if first is None or not cupy_runtime.is_array(first.array):
            if tag is not None:
                for sent, _ in sends:
                    _tag_of(sent)[0] = tag
            self.exchanger.exchange(sends, receives, label)  # also without arrays: members that are threads start it together
            if tag is not None and receives and _tag_of(receives[0].array)[0] != tag:
                raise self._other_call()
            return
        if tag is not None:
            for sent, _ in sends:
                memory.clear(_tag_of(sent), tag)
        stream, current = self._stream(first.array.data.device_id), cupy_runtime.cupy().cuda.get_current_stream()
        stream.wait_event(current.record())
        try:
            with stream:
                self.exchanger.exchange(sends, receives, label)
                if tag is not None and receives:
                    if self._failed is None:
                        self._failed = memory.host_int32()
                    memory.differs(_tag_of(receives[0].array), tag, self._failed)
        except BaseException:
            current.wait_event(stream.record())  # a part of it may have started, and uses the arrays
            raise
        self._running[label] = stream.record()

    def wait_for_exchange(self, label: str, arrays: Sequence[Any] = ()) -> None:
        """Let later work on CuPy's current stream wait for an exchange, which uses the arrays until then."""
        if (done := self._running.pop(label, None)) is not None:
            cupy_runtime.cupy().cuda.get_current_stream().wait_event(done)

    def _stream(self, device: int) -> Any:
        if device not in self._streams:
            self._streams[device] = cupy_runtime.cupy().cuda.Stream(non_blocking=True)
        return self._streams[device]
