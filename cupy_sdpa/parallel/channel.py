"""Exchanges of a group that overlap with computation."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..extend import cuda_kernel, cupy_runtime
from .group import Exchanger, GroupError, Transfer

#: The alignment in bytes of the arrays in a message.
ALIGNMENT = 256
#: The bytes at the end of a message; the first four of them are the tag of the call.
TAG_BYTES = ALIGNMENT

#: The number of elements of a transfer.
_size_of = operator.attrgetter("array.size")


class Channel:
    """Starts exchanges. Exchanges of CuPy arrays are enqueued on their own stream, so that kernels run at the same time.

    A repeated call enters :meth:`start_exchange` and :meth:`wait_for_exchange` once for each exchange. What runs on the stream
    of the call, such as writing and comparing tags, is part of its CUDA graphs.
    """

    def __init__(self, exchanger: Exchanger) -> None:
        self.exchanger, self.rank, self.size = exchanger, exchanger.rank, exchanger.size
        self._streams: dict[int, Any] = {}
        self._current_stream: Callable[[], Any]  # of CuPy; set with the first stream
        #: The events after the exchanges on a GPU that no call has waited for, by label.
        self._running: dict[str, Any] = {}
        #: Whether the present call has been compared with the other members' calls, or is being compared.
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

    def compare_tag(self, received: Any, tag: int) -> None:
        """Compare the tag in a message, int32 ``(1,)``, with the tag of this call: a checksum of its shapes and options.

        On a GPU a kernel compares it and writes to memory of the host, so nothing waits for it: the next :meth:`check` raises.
        """
        if not isinstance(received, np.ndarray):
            if self._failed is None:
                self._failed = _host_int32()
            _differs(received, tag, self._failed)
        elif received[0] != tag:
            raise self._other_call()

    def start_exchange(self, sends: Sequence[Transfer], receives: Sequence[Transfer], label: str) -> None:
        """Start an exchange, after the work on CuPy's current stream so far.

        Empty arrays are not transferred.
        The arrays are in use until :meth:`wait_for_exchange`. The label, for messages, is the same for all members.
        """
        sends, receives = [*filter(_size_of, sends)], [*filter(_size_of, receives)]
        first = next(iter(sends or receives), None)
        if first is None or isinstance(first.array, np.ndarray):
            self.exchanger.exchange(sends, receives, label)  # also without arrays: members that are threads start it together
            return
        device = first.array.data.device_id
        if device not in self._streams:
            self._add_stream(device)
        stream, current = self._streams[device], self._current_stream()
        stream.wait_event(current.record())
        try:
            with stream:
                self.exchanger.exchange(sends, receives, label)
        except BaseException:
            current.wait_event(stream.record())  # a part of it may have started, and uses the arrays
            raise
        self._running[label] = stream.record()

    def wait_for_exchange(self, label: str, arrays: Sequence[Any] = ()) -> None:
        """Let later work on CuPy's current stream wait for an exchange, which uses the arrays until then."""
        if (done := self._running.pop(label, None)) is not None:
            self._current_stream().wait_event(done)

    def _add_stream(self, device: int) -> None:
        """Create the stream of the exchanges on a device, which is the current one."""
        cuda = cupy_runtime.cupy().cuda
        self._streams[device], self._current_stream = cuda.Stream(non_blocking=True), cuda.get_current_stream


def _host_int32() -> Any:
    """Return a numpy array int32 ``(1,)`` that contains 0 and that kernels can write to (page-locked memory)."""
    memory = cupy_runtime.cupy().cuda.alloc_pinned_memory(4)
    array = np.frombuffer(memory, np.int32, 1)
    array[0] = 0
    return array


def _differs(found: Any, expected: int, flag: Any) -> None:
    """Enqueue a comparison: ``flag``, of :func:`_host_int32`, becomes 1 if ``found``, int32 ``(1,)``, is another number."""
    _differs_kernel()((1,), (1,), (found, np.int32(expected), np.uint64(flag.ctypes.data)))


@cuda_kernel
def _differs_kernel() -> str:
    """Return the kernel of :func:`_differs`."""
    return """extern "C" __global__ void cupy_sdpa_differs(const int* found, int expected, volatile int* flag) {
            if (*found != expected) *flag = 1;
        }"""
