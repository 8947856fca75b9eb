"""CuPy's memory: pools, allocators, and memory that belongs to a captured graph."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np

from .device import DEVICE, Block, OutOfMemoryError, Work

#: Sizes are rounded up to multiples of this number of bytes, as in CuPy, so that addresses are reused.
UNIT = 512

_thread = threading.local()


def current_stream() -> int:
    """The address of the current stream of this thread."""
    streams = getattr(_thread, "streams", None)
    return streams[-1].ptr if streams else 0


def streams_of_thread() -> list[Any]:
    """The stack of streams of this thread, the current one last."""
    if not hasattr(_thread, "streams"):
        _thread.streams = []
    return _thread.streams


class Memory:
    """An allocated block; ``give_back`` is called when the object is deallocated.

    As in CuPy this is after the finalizers of all objects of a reference cycle, whichever is older: the garbage collector runs
    them in any order. An array of numpy is not tracked by the collector, so it is deallocated after them.
    """

    def __init__(self, block: Block, size: int, give_back: Callable[[Block], None]) -> None:
        self.block, self._untracked = block, np.empty(0)
        self.ptr, self.size, self.device_id = block.address, size, 0
        weakref.finalize(self._untracked, give_back, block).atexit = False


class UnownedMemory:
    """A part of a block, which it does not keep alive; ``owner`` is kept alive."""

    def __init__(self, ptr: int, size: int, owner: Any, device_id: int = -1) -> None:
        self.block, self.ptr, self.size, self.owner, self.device_id = DEVICE.block_of(ptr), ptr, size, owner, 0


class MemoryPointer:
    """An address in memory, which it keeps alive."""

    def __init__(self, mem: Any, offset: int) -> None:
        assert mem or not offset, "CuPy's pointer to no memory takes no offset"  # as in cupy/cuda/memory.pyx
        self.mem, self.device_id = mem, 0
        self.ptr, self.size = (mem.ptr + offset, mem.size - offset) if mem else (0, 0)

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.ptr + offset - self.mem.ptr) if offset else self

    def memset_async(self, value: int, size: int, stream: Any = None) -> None:
        if size:
            DEVICE.fill(current_stream() if stream is None else stream.ptr, self.ptr, value, 1, size)

    memset = memset_async

    def copy_from_device_async(self, source: MemoryPointer, size: int, stream: Any = None) -> None:
        if size:
            DEVICE.copy(current_stream() if stream is None else stream.ptr, self.ptr, source.ptr, size)


class MemoryPool:
    """Memory that is reused in stream order, the block that was freed last first, as in CuPy."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self._idle: dict[tuple[int, int], list[Block]] = {}
        self._total = self._used = 0

    def malloc(self, size: int) -> MemoryPointer:
        """Allocate memory for the current stream.

        Raises:
            OutOfMemoryError: the pool would exceed its limit.
        """
        if size == 0:
            return MemoryPointer(None, 0)
        stream, capacity = current_stream(), -(-size // UNIT) * UNIT
        with DEVICE.lock:
            idle = self._idle.get((stream, capacity))
            if idle:
                block = idle.pop()
            else:
                if self.limit is not None and self._total + capacity > self.limit:
                    raise OutOfMemoryError(f"Out of memory allocating {size:,} bytes (limit set to {self.limit:,} bytes)")
                block = DEVICE.new_block(capacity)
                self._total += capacity
            self._used += capacity
            DEVICE.submit_uncaptured(stream, Work(lambda: block.revive(size), "pool", 0.0))
        return MemoryPointer(Memory(block, size, lambda block: self._give_back(stream, block)), 0)

    def _give_back(self, stream: int, block: Block) -> None:
        with DEVICE.lock:
            DEVICE.submit_uncaptured(stream, Work(block.die, "pool", 0.0))
            self._idle.setdefault((stream, block.capacity), []).append(block)
            self._used -= block.capacity

    def used_bytes(self) -> int:
        return self._used

    def free_bytes(self) -> int:
        return self._total - self._used

    def total_bytes(self) -> int:
        return self._total

    def set_limit(self, size: int | None = None) -> None:
        self.limit = size or None

    def free_all_blocks(self) -> None:
        """Return all free blocks to the device."""
        DEVICE.wait_for_all()
        with DEVICE.lock:
            for blocks in self._idle.values():
                for block in blocks:
                    DEVICE.drop(block)
                    self._total -= block.capacity
            self._idle.clear()


#: CuPy's default memory pool, and the allocator of each thread.
POOL = MemoryPool()
_allocator: ContextVar[Callable[[int], MemoryPointer]] = ContextVar("allocator")
_default: list[Callable[[int], MemoryPointer]] = [POOL.malloc]


def get_allocator() -> Callable[[int], MemoryPointer]:
    """The current allocator."""
    return _allocator.get(_default[0])


def alloc(size: int) -> MemoryPointer:
    """Allocate with the current allocator."""
    return get_allocator()(size)


def set_allocator(allocator: Callable[[int], MemoryPointer] | None = None) -> None:
    """Set the allocator of all threads."""
    _default[0] = allocator or POOL.malloc


@contextlib.contextmanager
def using_allocator(allocator: Callable[[int], MemoryPointer] | None = None) -> Iterator[None]:
    """Use another allocator in this thread within the context."""
    token = _allocator.set(allocator or POOL.malloc)
    try:
        yield
    finally:
        _allocator.reset(token)


def malloc_async(size: int) -> MemoryPointer:
    """Allocate in stream order; during a capture the memory belongs to the graph, which allocates it in every replay."""
    stream = current_stream()
    with DEVICE.lock:
        block = DEVICE.new_block(size)
        capture = DEVICE.captures.get(stream)
        DEVICE.submit(stream, Work(lambda: block.revive(size), "alloc"))

    def free(block: Block) -> None:
        with DEVICE.lock:
            work = Work(block.die, "free")
            if capture is None:
                DEVICE.submit_uncaptured(stream, work)
            elif DEVICE.captures.get(stream) is capture:
                DEVICE.submit(stream, work)

    return MemoryPointer(Memory(block, size, free), 0)
