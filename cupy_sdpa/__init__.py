"""Fused attention for CuPy arrays in Julia's layout, by cuDNN; the same on numpy arrays, on the CPU."""

from .attention import attention, explain, get_plan_cache
from .errors import CudnnError, Unsupported
from .report import Report
from .version import __version__

__all__ = ["CudnnError", "Report", "Unsupported", "__version__", "attention", "explain", "get_plan_cache"]
