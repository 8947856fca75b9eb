"""The device: memory, lazy streams and CUDA graphs.

A :class:`Work` is a function that runs on the host, with the attributes that the driver reports. :meth:`Device.submit` queues
it on a stream, or adds it to the graph if the stream is being captured. A queue runs when something waits for the stream.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

#: The content of uninitialized memory: NaN in every floating-point dtype.
POISON = 0xFF
#: The number and the content of the guard bytes on both sides of a block, which are checked when it is freed.
GUARD, GUARD_BYTE = 256, 0xC5
#: Error codes of the CUDA runtime.
INVALID_VALUE, INVALID_HANDLE, NOT_READY, ILLEGAL_ADDRESS = 1, 400, 600, 700
CAPTURE_UNSUPPORTED, CAPTURE_UNJOINED, CAPTURE_IMPLICIT = 900, 904, 906


class CUDARuntimeError(RuntimeError):
    """An error of the CUDA runtime, as CuPy raises it."""

    def __init__(self, status: int, text: str = "") -> None:
        super().__init__(f"CUDA error {status}: {text}")
        self.status = status


class OutOfMemoryError(MemoryError):
    """CuPy's error for a lack of device memory."""


class Work(NamedTuple):
    """A unit of work on a stream.

    Attributes:
        run: the function.
        kind: ``kernel``, ``memset``, ``memcpy``, ``alloc`` or ``free``, the kind of the graph node.
        us: its duration in microseconds on the device's clock.
        memset: for a memset: address, value, bytes per element, width, height.
        check: raises an error if it cannot be launched as a part of a graph; work that was launched before still runs.
    """

    run: Callable[[], None]
    kind: str = "kernel"
    us: float = 1.0
    memset: tuple[int, int, int, int, int] | None = None
    check: Callable[[], None] = lambda: None


class Block:
    """A block of device memory with guard bytes on both sides."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        memory = np.full(capacity + 3 * GUARD, GUARD_BYTE, np.uint8)
        start = GUARD + -(memory.ctypes.data + GUARD) % GUARD
        self._guarded = memory[start - GUARD : start + capacity + GUARD]
        self.address = memory.ctypes.data + start
        self.whole = self._guarded[GUARD : GUARD + capacity]
        self.live = False
        self.give(capacity)

    def give(self, size: int) -> None:
        """Prepare the block for an allocation of ``size`` bytes."""
        self._guarded[:] = GUARD_BYTE
        self.memory = self._guarded[GUARD : GUARD + size]
        self.memory[:] = POISON

    def check(self) -> None:
        """Raise if the guard bytes were overwritten."""
        outside = np.concatenate([self._guarded[:GUARD], self._guarded[GUARD + self.memory.size :]])
        if (outside != GUARD_BYTE).any():
            raise CUDARuntimeError(ILLEGAL_ADDRESS, f"a write outside of the {self.memory.size} bytes at {self.address:#x}")

    def die(self) -> None:
        """Free the block in stream order."""
        self.check()
        self.live = False
        self.memory[:] = POISON

    def revive(self, size: int) -> None:
        """Allocate ``size`` bytes of the block in stream order."""
        self.give(size)
        self.live = True


class Device:
    """Streams, blocks and graphs. Stream 0 is the default stream; it and blocking streams wait for each other.

    Attributes:
        waits: how often the host waited for work or read memory.
        launches: the streams to which work was submitted, in order; the replay of a graph counts once.
        clock: microseconds of work that each stream has run.
        submitted: the number of units of work that each stream added to a capture. Streams of one capture share its list.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.queues: dict[int, deque[Work]] = {0: deque()}
        self.clock: dict[int, float] = {0: 0.0}
        self.captures: dict[int, list[Work]] = {}
        self.submitted: dict[int, int] = {}
        self._joined: dict[int, int] = {}
        self.waits = 0
        self.launches: list[int] = []
        self.graphs: dict[int, list[Work]] = {}
        self.executables: dict[int, list[Work]] = {}
        self._unfreed: set[int] = set()
        self._non_blocking: set[int] = set()
        self._unused_streams: list[int] = []
        self._running = 0
        self._destroyed: list[int] = []
        self._numbers = itertools.count(0x1000, 0x10)
        self._addresses: list[int] = []
        self._blocks: dict[int, Block] = {}

    def reset(self) -> None:
        """Remove work, graphs and captures of a failed test."""
        with self.lock:
            for queue in list(self.queues.values()):
                while queue:
                    with contextlib.suppress(Exception):
                        queue.popleft().run()
            self.captures.clear()
            self.graphs.clear()
            self.executables.clear()
            self.launches.clear()

    # Streams

    def create_stream(self, non_blocking: bool) -> int:
        """Create a stream; as in CUDA, it may have the address of a destroyed one."""
        with self.lock:
            stream = self._unused_streams.pop() if self._unused_streams else next(self._numbers)
            self.queues[stream], self.clock[stream] = deque(), 0.0
            if non_blocking:
                self._non_blocking.add(stream)
            return stream

    def destroy_stream(self, stream: int) -> None:
        """Run the queued work, and destroy the stream; while other work runs, as soon as it has ended."""
        with self.lock:
            if self._running:  # the garbage collector can destroy a stream at any time
                self._destroyed.append(stream)
                return
            self.run(stream)
            self.captures.pop(stream, None)
            del self.queues[stream], self.clock[stream]
            self._non_blocking.discard(stream)
            self._unused_streams.append(stream)

    def submit(self, stream: int, work: Work) -> None:
        """Queue work on a stream, or add it to the graph if the stream is being captured."""
        with self.lock:
            self._check(stream)
            if stream in self.captures:
                self.captures[stream].append(work)
                self.submitted[stream] = self.submitted.get(stream, 0) + 1
                return
            self._wait_for_others(stream)
            self.launches.append(stream)
            self.queues[stream].append(work)

    def submit_uncaptured(self, stream: int, work: Work) -> None:
        """Queue work of CuPy's memory pool: in stream order, but not part of a capture."""
        with self.lock:
            if stream in self.queues:
                self.queues[stream].append(work)
            else:
                work.run()

    def run(self, stream: int) -> None:
        """Run the queued work of a stream, unless it was destroyed meanwhile."""
        while self.queues.get(stream):
            self.run_next(stream)

    def run_next(self, stream: int) -> None:
        """Run the first of the queued work of a stream."""
        work = self.queues[stream].popleft()
        self._running += 1
        try:
            with np.errstate(all="ignore"):
                work.run()
            self.clock[stream] += work.us
        finally:
            self._running -= 1
        while self._destroyed and not self._running:
            self.destroy_stream(self._destroyed.pop())

    def wait(self, stream: int) -> None:
        """Wait for a stream."""
        with self.lock:
            self._check(stream)
            if stream in self.captures:
                raise CUDARuntimeError(CAPTURE_UNSUPPORTED, f"stream {stream:#x} is being captured: nothing can wait for it")
            self._wait_for_others(stream)
            self.waits += 1
            self.run(stream)

    def wait_for_all(self) -> None:
        """Wait for all streams."""
        with self.lock:
            self.waits += 1
            for stream in list(self.queues):
                self.run(stream)

    def busy(self, stream: int) -> bool:
        """Whether a stream has pending work."""
        with self.lock:
            self._check(stream)
            return bool(self.queues[stream])

    def _check(self, stream: int) -> None:
        if stream not in self.queues:
            raise CUDARuntimeError(INVALID_HANDLE, f"there is no stream {stream:#x}")

    def _wait_for_others(self, stream: int) -> None:
        """Run the work of the streams for which this one waits implicitly."""
        if stream == 0:
            blocking = [other for other in list(self.queues) if other and other not in self._non_blocking]
            if any(other in self.captures for other in blocking):
                raise CUDARuntimeError(CAPTURE_IMPLICIT, "a blocking stream is being captured: stream 0 would wait for it")
            for other in blocking:
                self.run(other)
        elif stream not in self._non_blocking:
            self.run(0)

    # Graphs

    def begin_capture(self, stream: int) -> None:
        """Begin to capture the work that is submitted to a stream."""
        with self.lock:
            self._check(stream)
            if stream == 0 or stream in self.captures:
                raise CUDARuntimeError(CAPTURE_UNSUPPORTED, f"stream {stream:#x} cannot be captured now")
            self.captures[stream] = []

    def join_capture(self, stream: int, other: int, submitted: int) -> None:
        """Make a stream wait for the units of work that another captured stream had ``submitted``. It joins that capture."""
        with self.lock:
            if self.captures.setdefault(stream, self.captures[other]) is not self.captures[other]:
                raise CUDARuntimeError(CAPTURE_UNSUPPORTED, f"streams {stream:#x} and {other:#x} are parts of two captures")
            self._joined[other] = submitted

    def end_capture(self, stream: int) -> int:
        """End a capture; returns the number of the graph."""
        with self.lock:
            if stream not in self.captures:
                raise CUDARuntimeError(INVALID_HANDLE, f"stream {stream:#x} is not being captured")
            works = self.captures.pop(stream)
            branches = [other for other, own in self.captures.items() if own is works]
            for other in branches:
                del self.captures[other]
            if any(self._joined.get(other, 0) != self.submitted.get(other, 0) for other in branches):
                raise CUDARuntimeError(CAPTURE_UNJOINED, "the capture has a branch for which its first stream did not wait")
            graph = next(self._numbers)
            self.graphs[graph] = works
            return graph

    def instantiate(self, graph: int) -> int:
        """Instantiate a graph."""
        with self.lock:
            executable = next(self._numbers)
            self.executables[executable] = list(self.graphs[graph])
            return executable

    def launch(self, executable: int, stream: int) -> None:
        """Launch a graph on a stream, as one unit of work; only once if it does not free all memory that it allocates."""
        works = self.executables[executable]
        kinds = [work.kind for work in works]
        if kinds.count("alloc") > kinds.count("free"):
            if executable in self._unfreed:
                raise CUDARuntimeError(INVALID_VALUE, "the memory that the graph allocated was not freed since its last launch")
            self._unfreed.add(executable)

        for work in works:
            work.check()

        def replay() -> None:
            for work in works:
                work.run()

        self.submit(stream, Work(replay, "graph", sum(work.us for work in works)))

    # Memory

    def new_block(self, size: int) -> Block:
        """Allocate a new block."""
        block = Block(size)
        with self.lock:
            bisect.insort(self._addresses, block.address)
            self._blocks[block.address] = block
        return block

    def drop(self, block: Block) -> None:
        """Return a block to the host."""
        with self.lock:
            self._addresses.remove(block.address)
            del self._blocks[block.address]

    def block_of(self, address: int) -> Block | None:
        """The block that contains an address, or the last one before it."""
        with self.lock:
            place = bisect.bisect_right(self._addresses, address) - 1
            return self._blocks[self._addresses[place]] if place >= 0 else None

    def view(self, address: int, shape: Sequence[int], strides: Sequence[int], dtype: Any) -> Any:
        """A numpy array on device memory, which must be within one live block. Strides are in bytes."""
        block = self.block_of(address)
        if 0 in shape:
            return np.empty(shape, dtype)
        if block is None or not block.live:
            raise CUDARuntimeError(ILLEGAL_ADDRESS, f"no live memory at {address:#x}")
        try:
            return np.ndarray(tuple(shape), dtype, block.memory, address - block.address, tuple(strides))
        except (ValueError, TypeError) as error:
            text = f"{tuple(shape)} {dtype} at {address:#x}: {block.memory.size} bytes begin at {block.address:#x}"
            raise CUDARuntimeError(ILLEGAL_ADDRESS, text) from error

    def fill(self, stream: int, address: int, value: int, itemsize: int, width: int, height: int = 1, pitch: int = 0) -> None:
        """Fill rows of elements on a stream."""

        def run() -> None:
            self.view(address, (height, width), (pitch, itemsize), f"u{itemsize}")[...] = value

        self.submit(stream, Work(run, "memset", memset=(address, value, itemsize, width, height)))

    def copy(self, stream: int, to: int, of: int, width: int, height: int = 1, pitch: int = 0, from_pitch: int = 0) -> None:
        """Copy rows of bytes on a stream."""

        def run() -> None:
            self.view(to, (height, width), (pitch, 1), "u1")[...] = self.view(of, (height, width), (from_pitch, 1), "u1")

        self.submit(stream, Work(run, "memcpy"))

    def check_guards(self) -> None:
        """Raise if any guard bytes were overwritten."""
        with self.lock:
            for block in self._blocks.values():
                block.check()


#: The only device.
DEVICE = Device()
