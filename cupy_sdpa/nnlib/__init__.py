"""NNlib.jl's attention functions, with the names, shapes and semantics of Julia's library, on numpy and CuPy arrays.

Arrays are column-major with any number of trailing batch dimensions: ``q (qk_dim, q_len, batch...)``. Heads are split off the
first axis; the head index varies more slowly than the feature index. ``dims`` counts from 1, as in Julia.

Differences from NNlib.jl:

- The fused kernel computes ``y`` without the attention weights ``alpha``, an array of ``kv_len x q_len`` per head. ``alpha`` is
  None, unless ``alpha=True`` requests a separate computation. With ``fdrop`` the fused kernel is not used.
- A fully masked query gives 0 in ``y`` and ``alpha``, not NaN.
- On a GPU the arrays are float16 or bfloat16, as cuDNN requires; ``compute_dtype`` converts float32 arrays.

Source: FluxML/NNlib.jl, src/attention.jl; Vaswani et al. 2017, "Attention Is All You Need", section 3.2.
"""

from .masks import make_causal_mask, make_padding_mask
from .nnlib_arrays import join_heads, split_heads
from .nnlib_attention import dot_product_attention, dot_product_attention_vjp
from .nnlib_scores import dot_product_attention_scores

__all__ = [
    "dot_product_attention",
    "dot_product_attention_scores",
    "dot_product_attention_vjp",
    "join_heads",
    "make_causal_mask",
    "make_padding_mask",
    "split_heads",
]


def __dir__() -> list[str]:
    """The public names."""
    return __all__
