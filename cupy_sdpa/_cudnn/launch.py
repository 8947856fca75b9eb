"""The calls of the hot path: a handle that knows its stream, and a launcher that hands a finalized plan its pointers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_float, c_int32, c_int64, c_void_p
from typing import Any

from .constants import AttributeName, AttributeType, DescriptorType
from .descriptor import DEBUG, Descriptor, created, destroyed
from .library import library

_NUMBERS: dict[str, Any] = {"float32": c_float, "float64": c_double, "int32": c_int32}


class Handle:
    """A cuDNN handle of the current CUDA context; for the thread that uses it, and for no other at the same time.

    A handle is never destroyed: it lives as long as its context, or the process (threads that end hand theirs on).

    Attributes:
        pointer: the ``cudnnHandle_t``.
    """

    __slots__ = ("_stream", "pointer")

    def __init__(self) -> None:
        lib = library()
        pointer = c_void_p()
        lib.check(lib.cudnnCreate(ctypes.byref(pointer)), "create a handle in the current CUDA context")
        assert pointer.value is not None
        self.pointer: int = pointer.value
        self._stream = 0  # a new handle works on the default stream

    def set_stream(self, stream: int) -> None:
        """Have what follows run on a stream; a call only where it changes (0.5 us each)."""
        if stream != self._stream:
            lib = library()
            lib.check(lib.cudnnSetStream(self.pointer, stream), f"set the stream {stream:#x}")
            self._stream = stream


class Launcher:
    """Runs one finalized plan. For one thread at a time: the arrays that carry the pointers are made once.

    Args:
        plan: the finalized execution plan.
        uids: cuDNN's number of every tensor to hand over, in the order in which :meth:`launch` gets the addresses.
        numbers: after the arrays, the tensors handed over by value: (number, dtype, value or None where calls give it).
    """

    __slots__ = ("_addresses", "_count", "_numbers", "_open", "_plan", "_uids", "_workspace")

    def __init__(self, plan: Descriptor, uids: Sequence[int], numbers: Sequence[tuple[int, str, float | None]]) -> None:
        self._plan = plan
        # cuDNN reads a number before cudnnBackendExecute returns (measured), so one buffer serves every call.
        self._numbers = [_NUMBERS[dtype](value or 0) for _, dtype, value in numbers]
        self._open = [buffer for buffer, (_, _, value) in zip(self._numbers, numbers, strict=True) if value is None]
        every = [*uids, *(uid for uid, _, _ in numbers)]
        self._count = len(every)
        self._uids = (c_int64 * self._count)(*every)
        self._addresses = (c_void_p * self._count)(*([0] * len(uids)), *(ctypes.addressof(n) for n in self._numbers))
        self._workspace = (c_void_p * 1)()

    def launch(self, handle: Handle, addresses: list[Any], numbers: Sequence[float], workspace: int) -> None:
        """Enqueue the plan on the handle's stream.

        Args:
            handle: the handle that the plan was finalized for.
            addresses: of the arrays, in the order of ``uids``.
            numbers: the values left open, in their order.
            workspace: address of the workspace, 0 where none is needed.
        """
        lib = library()
        self._addresses[: len(addresses)] = addresses
        for buffer, value in zip(self._open, numbers, strict=True):
            buffer.value = value
        self._workspace[0] = workspace
        pack = c_void_p()
        lib.check(lib.cudnnBackendCreateDescriptor(_PACK, ctypes.byref(pack)), "create a variant pack")
        if DEBUG:
            created("VARIANT_PACK")
        try:
            self._set(lib, pack, AttributeName.VARIANT_PACK_UNIQUE_IDS, AttributeType.INT64, self._count, self._uids)
            self._set(lib, pack, AttributeName.VARIANT_PACK_DATA_POINTERS, AttributeType.VOID_PTR, self._count, self._addresses)
            self._set(lib, pack, AttributeName.VARIANT_PACK_WORKSPACE, AttributeType.VOID_PTR, 1, self._workspace)
            lib.check(lib.cudnnBackendFinalize(pack), "finalize a variant pack")
            lib.check(lib.cudnnBackendExecute(handle.pointer, self._plan.pointer, pack), "execute the plan")
        finally:
            lib.check(lib.cudnnBackendDestroyDescriptor(pack), "destroy a variant pack")
            if DEBUG:
                destroyed("VARIANT_PACK")

    @staticmethod
    def _set(lib: Any, pack: c_void_p, attribute: int, kind: int, count: int, array: Any) -> None:
        lib.check(lib.cudnnBackendSetAttribute(pack, attribute, kind, count, array), "fill a variant pack")


_PACK = DescriptorType.VARIANT_PACK_DESCRIPTOR
