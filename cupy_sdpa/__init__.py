"""Scaled dot-product attention for CuPy arrays with cuDNN's fused kernels, and for numpy arrays on the CPU.

``help(cupy_sdpa.attention)`` shows one function. The functions and classes are:

============  ========================================================================================================
attention     attention, attention_backward, attention_vjp (Pullback), attention_jvp, widen, weight_sums,
              weight_entropy
masks         block_mask, BlockMask, tree_mask, alibi_slopes, dropout_mask; zoo: masks and scores of the literature
inference     KVCache, Rope, apply_rope, tree_depths, shared_prefix_attention, merge, merge_backward
packing       page_table_from_lists, cu_seqlens_with_gaps; layout: the order of axes
plans         explain (Report), explain_function, supported, prepare (Prepared), get_plan_cache; store: plans on disk
problems      problem (Problem), jvp_problems, weight_sums_problems: to plan ahead of time
checks        reference: attention in float64
more          fp8, nnlib (NNlib.jl's functions), parallel (several GPUs)
errors        Unsupported, CudnnError, OutOfPages, DiskCacheWarning
============  ========================================================================================================

Names in parentheses are the classes of results.
"""

from .core import _interrupt as _interrupt  # isort: skip  (before the imports that take time)

import importlib
import os
import sys
from typing import TYPE_CHECKING

from .core.hooks import register_libraries, register_option
from .core.version import __version__

#: What users call, and what ``help`` prints.
__all__ = [
    "BlockMask",
    "KVCache",
    "Rope",
    "__version__",
    "alibi_slopes",
    "apply_rope",
    "attention",
    "attention_backward",
    "attention_jvp",
    "attention_vjp",
    "block_mask",
    "cu_seqlens_with_gaps",
    "dropout_mask",
    "explain",
    "explain_function",
    "get_plan_cache",
    "jvp_problems",
    "merge",
    "merge_backward",
    "page_table_from_lists",
    "prepare",
    "problem",
    "shared_prefix_attention",
    "supported",
    "tree_depths",
    "tree_mask",
    "weight_entropy",
    "weight_sums",
    "weight_sums_problems",
    "widen",
]

#: Public modules, imported on first use.
_MODULES = ("fp8", "layout", "nnlib", "parallel", "reference", "store", "zoo")
#: Modules with public names, imported on the first use of a name; type checkers read the imports below instead.
_NAMES = {
    "attention_functions": ("attention", "attention_backward"),
    "block_masks.block_mask": ("BlockMask", "block_mask"),
    "core.errors": ("CudnnError", "DiskCacheWarning", "Unsupported"),
    "explanation": ("explain", "explain_function", "get_plan_cache", "problem", "supported"),
    "helpers": ("alibi_slopes", "dropout_mask", "merge", "merge_backward"),
    "derivatives.derivative": ("widen",),
    "derivatives.jvp": ("attention_jvp", "jvp_problems"),
    "derivatives.weights": ("weight_entropy", "weight_sums", "weight_sums_problems"),
    "kv_cache.cache": ("KVCache",),
    "kv_cache.page_tables": ("OutOfPages",),
    "kv_cache.shared_prefix": ("shared_prefix_attention",),
    "preparation": ("Prepared", "prepare"),
    "core.problem.problem": ("Problem",),
    "core.replay.call_report": ("Report",),
    "kv_cache.rope": ("Rope", "apply_rope"),
    "kv_cache.sequences": ("cu_seqlens_with_gaps", "page_table_from_lists"),
    "kv_cache.tree": ("tree_depths", "tree_mask"),
    "vjp": ("Pullback", "attention_vjp"),
}
#: Attention functions of other libraries; the AttributeError for one of these names refers to docs/migration.md.
_OTHER_FUNCTIONS = (
    "DotProductAttention", "dot_product_attention", "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache",
    "flex_attention", "scaled_dot_product_attention", "single_prefill_with_kv_cache",
)  # fmt: skip

register_option("block_mask", f"{__name__}.block_masks.option")
register_libraries(f"{__name__}.libraries.types")

if TYPE_CHECKING:
    from . import fp8 as fp8
    from . import layout as layout
    from . import nnlib as nnlib
    from . import parallel as parallel
    from . import reference as reference
    from . import store as store
    from . import zoo as zoo
    from .attention_functions import attention, attention_backward
    from .block_masks.block_mask import BlockMask, block_mask
    from .core.errors import CudnnError as CudnnError
    from .core.errors import DiskCacheWarning as DiskCacheWarning
    from .core.errors import Unsupported as Unsupported
    from .core.problem.problem import Problem as Problem
    from .core.replay.call_report import Report as Report
    from .derivatives.derivative import widen
    from .derivatives.jvp import attention_jvp, jvp_problems
    from .derivatives.weights import weight_entropy, weight_sums, weight_sums_problems
    from .explanation import explain, explain_function, get_plan_cache, problem, supported
    from .helpers import alibi_slopes, dropout_mask, merge, merge_backward
    from .kv_cache.cache import KVCache
    from .kv_cache.page_tables import OutOfPages as OutOfPages
    from .kv_cache.rope import Rope, apply_rope
    from .kv_cache.sequences import cu_seqlens_with_gaps, page_table_from_lists
    from .kv_cache.shared_prefix import shared_prefix_attention
    from .kv_cache.tree import tree_depths, tree_mask
    from .preparation import Prepared as Prepared
    from .preparation import prepare
    from .vjp import Pullback as Pullback
    from .vjp import attention_vjp
else:

    def __getattr__(name):
        """Import a public module, or the module of a public name, on first use."""
        if name in _MODULES:
            return importlib.import_module(f".{name}", __name__)
        for module, names in _NAMES.items():
            if name in names:
                globals()[name] = found = getattr(importlib.import_module(f".{module}", __name__), name)
                return found
        hint = "; use attention(q, k, v) instead, see docs/migration.md" if name in _OTHER_FUNCTIONS else ""
        message = f"module {__name__!r} has no attribute {name!r}{hint}"
        if hint and sys._getframe(1).f_globals.get("__name__") == "importlib._bootstrap":  # from cupy_sdpa import ...
            raise ImportError(message)  # Python would replace an AttributeError by a message without the hint
        raise AttributeError(message)

    def __dir__():
        """The public names."""
        return sorted({*__all__, *_MODULES}.union(*_NAMES.values()))


if os.environ.get("CUPY_SDPA_TRACE"):
    from .store import _save_at_exit

    _save_at_exit()
