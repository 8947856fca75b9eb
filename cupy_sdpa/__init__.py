"""Fused attention for CuPy arrays in Julia's layout, by cuDNN; the same on numpy arrays, on the CPU."""

from .attention import Pullback, attention, attention_backward, attention_vjp
from .errors import CudnnError, ShelfWarning, Unsupported
from .explain import explain, get_plan_cache, problem
from .prepare import Prepared, autotune, prepare
from .problem import Problem
from .report import Report
from .variants import alibi_slopes, dropout_mask
from .version import __version__

__all__ = [
    "CudnnError",
    "Prepared",
    "Problem",
    "Pullback",
    "Report",
    "ShelfWarning",
    "Unsupported",
    "__version__",
    "alibi_slopes",
    "attention",
    "attention_backward",
    "attention_vjp",
    "autotune",
    "dropout_mask",
    "explain",
    "get_plan_cache",
    "prepare",
    "problem",
]
