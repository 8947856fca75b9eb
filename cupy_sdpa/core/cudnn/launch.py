"""The hot path: cuDNN handles, and launches of finalized plans."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_float, c_int32, c_int64, c_void_p
from typing import Any

from .constants import AttributeName, AttributeType, DescriptorType
from .descriptor import Descriptor
from .library import library

_SCALAR_TYPES: dict[str, Any] = {"float32": c_float, "float64": c_double, "int32": c_int32}


class Handle:
    """A cuDNN handle of the current CUDA context. Only one thread at a time may use it.

    A handle is never destroyed. When a thread ends, another one takes over its handles
    (:mod:`.core.cudnn_engine.sessions`).
    """

    __slots__ = ("_stream", "pointer")

    def __init__(self) -> None:
        lib = library()
        pointer = c_void_p()
        lib.check(lib.cudnnCreate(ctypes.byref(pointer)), "create a handle in the current CUDA context")
        assert pointer.value is not None
        self.pointer: int = pointer.value
        self._stream = 0  # a new handle runs on the default stream

    def set_stream(self, stream: int) -> None:
        """Run the following launches on a stream. Calls cuDNN only if the stream changes (0.5 us)."""
        if stream != self._stream:
            lib = library()
            lib.check(lib.cudnnSetStream(self.pointer, stream), f"set the stream {stream:#x}")
            self._stream = stream


class Launcher:
    """Launches a finalized plan. Only one thread at a time may use it: launches reuse the ctypes arrays of the pointers.

    ``uids`` are cuDNN's ids of the arrays. A scalar is (id, dtype, value), with None for a value that :meth:`launch` gets.
    """

    __slots__ = ("_addresses", "_attributes", "_buffers", "_open", "_plan", "_workspace")

    def __init__(self, plan: Descriptor, uids: Sequence[int], scalars: Sequence[tuple[int, str, float | None]]) -> None:
        self._plan = plan
        # cuDNN reads a scalar before cudnnBackendExecute returns (measured), so one buffer serves every launch.
        self._buffers = [_SCALAR_TYPES[dtype](value or 0) for _, dtype, value in scalars]
        self._open = [buffer for buffer, (_, _, value) in zip(self._buffers, scalars, strict=True) if value is None]
        all_uids = [*uids, *(uid for uid, _, _ in scalars)]
        count = len(all_uids)
        self._addresses = (c_void_p * count)(*([0] * len(uids)), *map(ctypes.addressof, self._buffers))
        self._workspace = (c_void_p * 1)()
        #: The attributes of the variant pack: name, type, count and values.
        self._attributes = (
            (AttributeName.VARIANT_PACK_UNIQUE_IDS, AttributeType.INT64, count, (c_int64 * count)(*all_uids)),
            (AttributeName.VARIANT_PACK_DATA_POINTERS, AttributeType.VOID_PTR, count, self._addresses),
            (AttributeName.VARIANT_PACK_WORKSPACE, AttributeType.VOID_PTR, 1, self._workspace),
        )

    def launch(self, handle: Handle, addresses: list[Any], scalars: Sequence[float], workspace: int) -> None:
        """Enqueue the plan on the stream of the handle that it was finalized for.

        Addresses and scalars are in the order of the constructor; the workspace is 0 if none is needed.
        """
        lib = library()
        self._addresses[: len(addresses)] = addresses
        for buffer, value in zip(self._open, scalars, strict=True):
            buffer.value = value
        self._workspace[0] = workspace
        pack = c_void_p()
        lib.check(lib.cudnnBackendCreateDescriptor(_PACK, ctypes.byref(pack)), "create a variant pack")
        try:
            for attribute in self._attributes:
                lib.check(lib.cudnnBackendSetAttribute(pack, *attribute), "fill a variant pack")
            lib.check(lib.cudnnBackendFinalize(pack), "finalize a variant pack")
            lib.check(lib.cudnnBackendExecute(handle.pointer, self._plan.pointer, pack), "execute the plan")
        finally:
            lib.check(lib.cudnnBackendDestroyDescriptor(pack), "destroy a variant pack")


_PACK = DescriptorType.VARIANT_PACK_DESCRIPTOR
