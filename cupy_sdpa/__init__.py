"""Scaled dot-product attention for CuPy arrays with cuDNN's fused kernels, and for numpy arrays on the CPU."""

from . import _interrupt as _interrupt  # isort: skip  (before the imports that take time)

import importlib
import os
import sys
from typing import TYPE_CHECKING

from .attention import attention, attention_backward
from .block_masks.block_mask import BlockMask, block_mask
from .errors import CudnnError, DiskCacheWarning, OutOfPages, StepError, Unsupported
from .explain import explain, get_plan_cache, problem
from .helpers import alibi_slopes, dropout_mask, merge
from .jvp import attention_jvp
from .kv_cache.cache import KVCache
from .kv_cache.shared_prefix import shared_prefix_attention
from .prepare import Prepared, autotune, prepare
from .problem.problem import Problem
from .programs.watch import validate
from .replay.call_report import Report
from .rope import Rope, apply_rope
from .sequences import cu_seqlens_with_gaps, page_table_from_lists
from .tree import tree_mask
from .version import __version__
from .vjp import Pullback, attention_vjp
from .weights import weight_sums

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
    "Rope",
    "StepError",
    "Unsupported",
    "__version__",
    "alibi_slopes",
    "apply_rope",
    "attention",
    "attention_backward",
    "attention_jvp",
    "attention_vjp",
    "autotune",
    "block_mask",
    "cu_seqlens_with_gaps",
    "dropout_mask",
    "explain",
    "get_plan_cache",
    "merge",
    "page_table_from_lists",
    "prepare",
    "problem",
    "shared_prefix_attention",
    "tree_mask",
    "validate",
    "weight_sums",
]

#: Public modules, imported on first use.
_MODULES = ("composed", "fp8", "layout", "nnlib", "parallel", "reference", "store", "zoo")
#: Attention functions of other libraries; the AttributeError for one of these names refers to docs/migration.md.
_OTHER_FUNCTIONS = (
    "dot_product_attention", "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache", "flex_attention",
    "scaled_dot_product_attention",
)  # fmt: skip

if TYPE_CHECKING:
    from . import composed as composed
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
        message = f"module {__name__!r} has no attribute {name!r}{hint}"
        if hint and sys._getframe(1).f_globals.get("__name__") == "importlib._bootstrap":  # from cupy_sdpa import ...
            raise ImportError(message)  # Python would replace an AttributeError by a message without the hint
        raise AttributeError(message)

    def __dir__():
        """The public names."""
        return sorted([*__all__, *_MODULES])


if os.environ.get("CUPY_SDPA_TRACE"):
    from .store import _save_at_exit

    _save_at_exit()
