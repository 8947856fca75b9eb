"""A GPU's description, as cuDNN reads it off the card: what plans can be made from elsewhere."""

from __future__ import annotations

from .constants import AttributeType
from .descriptor import Descriptor
from .launch import Handle


def read_description() -> str:
    """The current GPU's description, as JSON; makes the device's context if there is none.

    Raises:
        CudnnError: there is no GPU.
    """
    handle = Handle()
    with Descriptor("DEVICEPROP") as device:
        device.set("HANDLE", handle.pointer, AttributeType.HANDLE)
        device.finalize("describe the GPU")
        return device.get_text("JSON_REPRESENTATION")
