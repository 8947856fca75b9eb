"""Fused attention for CuPy arrays in Julia's layout, by cuDNN; the same on numpy arrays, on the CPU."""

import importlib
from typing import TYPE_CHECKING

from .attention import Pullback, attention, attention_backward, attention_vjp
from .calls.report import Report
from .errors import CudnnError, DiskCacheWarning, Unsupported
from .explain import explain, get_plan_cache, problem
from .helpers import alibi_slopes, dropout_mask
from .prepare import Prepared, autotune, prepare
from .problem.problem import Problem
from .version import __version__

if TYPE_CHECKING:
    from . import layout as layout
    from . import nnlib as nnlib
    from . import store as store
else:

    def __getattr__(name):
        """Rooms that a plain call does without are entered when they are asked for."""
        if name in ("layout", "nnlib", "store"):
            return importlib.import_module(f".{name}", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "CudnnError",
    "DiskCacheWarning",
    "Prepared",
    "Problem",
    "Pullback",
    "Report",
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
