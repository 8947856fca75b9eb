"""NNlib.jl's attention functions, on numpy and CuPy arrays."""

from .attention import (
    dot_product_attention,
    dot_product_attention_scores,
    dot_product_attention_vjp,
    join_heads,
    make_causal_mask,
    make_padding_mask,
    split_heads,
)

__all__ = [
    "dot_product_attention",
    "dot_product_attention_scores",
    "dot_product_attention_vjp",
    "join_heads",
    "make_causal_mask",
    "make_padding_mask",
    "split_heads",
]
