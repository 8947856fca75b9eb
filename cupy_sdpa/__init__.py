"""Fused attention for CuPy arrays in Julia's layout, by cuDNN; the same on numpy arrays, on the CPU."""

from .attention import Pullback, attention, attention_backward, attention_vjp, explain, get_plan_cache
from .errors import CudnnError, Unsupported
from .report import Report
from .version import __version__

__all__ = [
    "CudnnError",
    "Pullback",
    "Report",
    "Unsupported",
    "__version__",
    "attention",
    "attention_backward",
    "attention_vjp",
    "explain",
    "get_plan_cache",
]
