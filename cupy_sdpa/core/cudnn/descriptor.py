"""cuDNN backend descriptors.

A descriptor deliberately has no ``__del__``: the garbage collector could destroy it at any moment, even while another thread is
inside a cuDNN call that holds cuDNN's lock. Use a descriptor in a ``with`` block, or pass it to an owner that closes it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from ctypes import c_bool, c_char, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from types import TracebackType
from typing import Any

from .constants import (
    AttributeName,
    AttributeType,
    CudaGraphRetention,
    CudnnConstant,
    DataType,
    DescriptorType,
    HeurMode,
    KnobType,
    PointwiseMode,
    ReduceTensorOp,
    RngDistribution,
)
from .library import library

#: The C type of an attribute's elements; all other attributes are enums of type int.
_C_TYPES: dict[AttributeType, Any] = {
    AttributeType.INT64: c_int64,
    AttributeType.INT32: c_int32,
    AttributeType.BOOLEAN: c_bool,
    AttributeType.FLOAT: c_float,
    AttributeType.DOUBLE: c_double,
    AttributeType.CHAR: c_char,
    AttributeType.HANDLE: c_void_p,
    AttributeType.VOID_PTR: c_void_p,
    AttributeType.BACKEND_DESCRIPTOR: c_void_p,
}

#: The attribute type of a Python value, by the value's type.
_TYPE_OF: dict[type, AttributeType] = {
    bool: AttributeType.BOOLEAN,
    int: AttributeType.INT64,
    float: AttributeType.DOUBLE,
    DataType: AttributeType.DATA_TYPE,
    PointwiseMode: AttributeType.POINTWISE_MODE,
    ReduceTensorOp: AttributeType.REDUCTION_OPERATOR_TYPE,
    HeurMode: AttributeType.HEUR_MODE,
    KnobType: AttributeType.KNOB_TYPE,
    RngDistribution: AttributeType.RNG_DISTRIBUTION,
    CudaGraphRetention: AttributeType.CUDA_GRAPH_RETENTION,
}


class Descriptor:
    """A descriptor. The names of its attributes omit the prefix of its kind.

    >>> with Descriptor.finalized("MATMUL", "describe S", COMP_TYPE=DataType.FLOAT) as matmul:  # doctest: +SKIP
    ...     ...

    Args:
        kind: the C name of the descriptor type without ``CUDNN_BACKEND_`` and ``_DESCRIPTOR``.

    Raises:
        CudnnError, Unsupported: cuDNN failed; no descriptor is created.
    """

    __slots__ = ("_lib", "_pid", "kind", "pointer")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.pointer: int | None = None
        pointer = c_void_p()
        self._lib = lib = library()
        if status := lib.cudnnBackendCreateDescriptor(DescriptorType[f"{kind}_DESCRIPTOR"], ctypes.byref(pointer)):
            lib.check(status, f"create a {kind} descriptor")
        self.pointer = pointer.value
        self._pid = os.getpid()

    @classmethod
    def finalized(cls, kind: str, doing: str, **attributes: Any) -> Descriptor:
        """Return a finalized descriptor; attributes of None are not set, and ``doing`` names the step in error messages."""
        made = cls(kind)
        try:
            for name, value in attributes.items():
                if value is not None:
                    made.set(name, value)
            made.finalize(doing)
        except BaseException:
            made.close()
            raise
        return made

    def set(self, name: str, value: Any) -> None:
        """Set an attribute to a value or to a list of values."""
        values: Sequence[Any] = value if isinstance(value, (list, tuple)) else [value]
        if isinstance(value, bytes):
            kind, array = AttributeType.CHAR, ctypes.create_string_buffer(value, len(value))
        else:
            kind = AttributeType.HANDLE if name == "HANDLE" else _TYPE_OF[type(values[0])]
            elements = [v.pointer for v in values] if kind is AttributeType.BACKEND_DESCRIPTOR else values
            array = (_C_TYPES.get(kind, c_int) * len(elements))(*elements)
        attribute = AttributeName[f"{self.kind}_{name}"]
        if status := self._lib.cudnnBackendSetAttribute(self.pointer, attribute, kind, len(array), array):
            self._lib.check(status, f"set {name} of a {self.kind} descriptor to {_short(values)}")

    def finalize(self, doing: str) -> None:
        """Finalize the descriptor; ``doing`` describes the step in the error message."""
        if status := self._lib.cudnnBackendFinalize(self.pointer):
            self._lib.check(status, doing)

    def get(self, name: str, kind: AttributeType, count: int = 1) -> list[Any]:
        """Up to ``count`` elements of an attribute of a finalized descriptor."""
        array = (_C_TYPES.get(kind, c_int) * count)()
        length = self._read(name, kind, count, array)
        return list(array)[:length]

    def count(self, name: str, kind: AttributeType) -> int:
        """Return the number of elements of an attribute."""
        return self._read(name, kind, 0, None)

    def get_text(self, name: str) -> str:
        """Return a CHAR attribute, without its terminating NUL."""
        size = self.count(name, AttributeType.CHAR)
        array = (c_char * size)()
        self._read(name, AttributeType.CHAR, size, array)
        return array.raw.rstrip(b"\0").decode()

    def fill(self, name: str, targets: Sequence[Descriptor]) -> int:
        """Let cuDNN fill existing descriptors from an attribute; returns how many were filled, starting with the first."""
        array = (c_void_p * len(targets))(*[t.pointer for t in targets])
        return self._read(name, AttributeType.BACKEND_DESCRIPTOR, len(targets), array)

    def _read(self, name: str, kind: AttributeType, count: int, array: Any) -> int:
        length = c_int64()
        attribute = AttributeName[f"{self.kind}_{name}"]
        if status := self._lib.cudnnBackendGetAttribute(self.pointer, attribute, kind, count, ctypes.byref(length), array):
            self._lib.check(status, f"read {name} of a {self.kind} descriptor")
        return length.value

    def close(self) -> None:
        """Destroy the descriptor. Does nothing if called again, or in a forked child, whose parent owns the descriptor."""
        pointer, self.pointer = self.pointer, None
        if pointer is None or self._pid != os.getpid():
            return
        if status := self._lib.cudnnBackendDestroyDescriptor(pointer):
            self._lib.check(status, f"destroy a {self.kind} descriptor")

    def __enter__(self) -> Descriptor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


_TYPE_OF[Descriptor] = AttributeType.BACKEND_DESCRIPTOR


def _short(values: Sequence[Any]) -> str:
    text = ", ".join(v.name if isinstance(v, CudnnConstant) else str(v) for v in values[:8])
    return text if len(values) <= 8 else f"{text}, ... ({len(values)} values)"
