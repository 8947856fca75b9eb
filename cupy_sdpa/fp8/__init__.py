"""FP8 attention: arrays of 8-bit floats with scales, and the forward pass on them."""

from .array import Fp8Array
from .fp8_attention import attention
from .quantize import DelayedScaling, quantize, quantize_qkv

__all__ = ["DelayedScaling", "Fp8Array", "attention", "quantize", "quantize_qkv"]


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__
