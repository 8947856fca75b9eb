"""NNlib.jl's attention functions, with the names, shapes and semantics of Julia's library, on numpy and CuPy arrays.

Axes are in Julia's order, with any number of trailing batch dimensions: ``q (qk_dim, q_len, batch...)``. Arrays may have any
strides, such as the C order of a numpy product; column-major arrays are not copied. Heads are split off the first axis; the
head index varies more slowly than the feature index. ``dims`` counts from 1, as in Julia.

Differences from NNlib.jl:

- ``alpha``, the attention weights ``(kv_len, q_len)`` of every head, is None unless you pass ``alpha=True``: the fused kernel
  does not store it, so it is computed separately. With ``fdrop`` the fused kernel is not used.
- A fully masked query gives 0 in ``y`` and ``alpha``, not NaN.
- q, k and v must have the same dtype: float16, bfloat16, float32 or float64. Julia promotes mixed dtypes, and integers.
- ``y`` and ``alpha`` have q's dtype, also with a float64 bias, for which Julia returns Float64. 16-bit arrays are computed in
  float32. A bias or a mask is an array, not a number; a mask is bool.
- On a GPU, cuDNN takes float16 and bfloat16 arrays, and a bias of these dtypes or float32. For float32 and float64 arrays, pass
  ``compute_dtype=`` or ``engine="cupy"``.
- :func:`make_padding_mask` is an addition. :func:`dot_product_attention_vjp` stands for ``Zygote.pullback``.

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
    """Return the public names."""
    return __all__
