"""Block-sparse attention against FlexAttention."""
