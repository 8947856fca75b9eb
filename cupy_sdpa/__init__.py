"""Scaled dot-product attention for CuPy arrays with cuDNN's fused kernels, and for numpy arrays on the CPU."""

from . import _interrupt as _interrupt  # isort: skip  (before the imports that take time)

import importlib
import os
from typing import TYPE_CHECKING

from .attention import attention, attention_backward
from .calls.report import Report
from .errors import CudnnError, DiskCacheWarning, OutOfPages, Unsupported
from .explain import explain, get_plan_cache, problem
from .forward_mode.widened import widen
from .helpers import alibi_slopes, dropout_mask, merge
from .inference.kv_cache import KVCache
from .inference.shared_prefix import shared_prefix_attention
from .jvp import attention_jvp, jvp_problems
from .prepare import Prepared, autotune, prepare
from .problem.problem import Problem
from .sparse.masks.block_mask import BlockMask, block_mask
from .version import __version__
from .vjp import Pullback, attention_vjp

__all__ = [
    "BlockMask",
    "CudnnError",
    "DiskCacheWarning",
    "KVCache",
    "OutOfPages",
    "Prepared",
    "Problem",
    "Pullback",
    "Report",
    "Unsupported",
    "__version__",
    "alibi_slopes",
    "attention",
    "attention_backward",
    "attention_jvp",
    "attention_vjp",
    "autotune",
    "block_mask",
    "dropout_mask",
    "explain",
    "get_plan_cache",
    "jvp_problems",
    "merge",
    "prepare",
    "problem",
    "shared_prefix_attention",
    "widen",
]

#: Public modules, imported on first use.
_MODULES = ("fp8", "layout", "nnlib", "parallel", "reference", "store", "zoo")
#: Attention functions of other libraries; the AttributeError for one of these names refers to docs/migration.md.
_OTHER_FUNCTIONS = (
    "dot_product_attention", "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache", "flex_attention",
    "scaled_dot_product_attention",
)  # fmt: skip

if TYPE_CHECKING:
    from . import fp8 as fp8
    from . import layout as layout
    from . import nnlib as nnlib
    from . import parallel as parallel
    from . import reference as reference
    from . import store as store
    from . import zoo as zoo
else:

    def __getattr__(name):
        """Import a public module on first use."""
        if name in _MODULES:
            return importlib.import_module(f".{name}", __name__)
        hint = "; attention(q, k, v) takes its place, see docs/migration.md" if name in _OTHER_FUNCTIONS else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")

    def __dir__():
        """The public names."""
        return sorted([*__all__, *_MODULES])


if os.environ.get("CUPY_SDPA_TRACE"):
    from .store import _save_at_exit

    _save_at_exit()
