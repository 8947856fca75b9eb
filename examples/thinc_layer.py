"""A layer for Thinc (spaCy): attention of packed sequences. Copy this module into your program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thinc.api import Model, registry
from thinc.types import Ragged

from cupy_sdpa import attention, attention_backward


@registry.layers("cupy_sdpa.FusedAttention.v1")
def fused_attention(heads: int, *, causal: bool = False, compute_dtype: str | None = None) -> Any:
    """Create a Thinc layer without parameters: self-attention within every sequence of a ``Ragged``.

    The layer before it computes q, k and v, such as ``Linear(nO=3 * width)``. On a GPU, Thinc's
    float32 arrays need ``compute_dtype``.

    Args:
        heads: H. It divides the width.
        causal: each position attends to itself and the positions before it. Default False.
        compute_dtype: as for ``cupy_sdpa.attention``. Default None.

    Returns:
        A model whose input is a ``Ragged`` with data ``(T, 3 H D)``: q, k and v one after the other, ``(T, 3, H, D)``; and
        whose output is a ``Ragged`` with data ``(T, H D)`` and the same lengths. On a GPU a call reads the longest length
        and the total, which waits for the GPU.

    Raises:
        ValueError: heads is not positive, the width of the input is not a multiple of 3 H, or the lengths do not add up to T.
        TypeError, Unsupported, CudnnError: as ``cupy_sdpa.attention``.
    """
    if heads < 1:
        raise ValueError(f"heads is {heads}; it must be positive")
    options = {"causal": causal, "compute_dtype": compute_dtype} if compute_dtype else {"causal": causal}
    return Model("fused_attention", _forward, attrs={"heads": heads, "options": options})


def _forward(model: Any, given: Any, is_train: bool) -> tuple[Any, Callable[[Any], Any]]:
    heads, xp = model.attrs["heads"], model.ops.xp
    total, width = given.dataXd.shape
    if width % (3 * heads):
        raise ValueError(f"the input has width {width}; it must be a multiple of 3 * heads = {3 * heads}: q, k and v")
    parts = given.dataXd.reshape(total, 3, heads, width // (3 * heads))
    q, k, v = (parts[:, i] for i in range(3))
    starts = xp.zeros(len(given.lengths) + 1, dtype="int32")
    starts[1:] = xp.cumsum(given.lengths)
    longest = int(given.lengths.max()) if len(given.lengths) else 0
    if int(starts[-1]) != total:
        raise ValueError(f"the lengths have {int(starts[-1])} rows in all, and the data {total}: they must be equal")
    options = {
        "layout": "thd", "cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": longest, "max_seqlen_kv": longest,
        **model.attrs["options"],
    }  # fmt: skip
    out, stats = attention(q, k, v, return_stats=True, **options)

    def backprop(gradient: Any) -> Any:
        gradients = xp.empty_like(parts, order="C")
        targets = {f"d{name}": gradients[:, i] for i, name in enumerate("qkv")}
        dout = gradient.dataXd.reshape(out.shape)
        attention_backward(dout, q, k, v, out, stats, **targets, **options)
        return Ragged(gradients.reshape(total, width), gradient.lengths)

    return Ragged(out.reshape(total, width // 3), given.lengths), backprop
