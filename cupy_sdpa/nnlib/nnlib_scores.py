"""The attention weights as an array, computed with matrix products instead of the fused kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..extend import FLOAT_DTYPES, check_arrays, cupy_runtime
from .masks import Mask
from .nnlib_arrays import check_array, to_four_axes


def dot_product_attention_scores(
    q: Any, k: Any, bias: Any = None, *, fdrop: Callable[[Any], Any] | None = None, mask: Any = None
) -> Any:
    r"""Compute the attention weights: NNlib.jl's ``dot_product_attention_scores``.

    .. math:: \alpha_{ji} = \operatorname{fdrop}(\operatorname{softmax}_j(k_j \cdot q_i / \sqrt{d} + \mathrm{bias}_{ji}))

    Args:
        q: queries ``(d, nheads, q_len, B)``.
        k: keys ``(d, nheads, kv_len, B)``, of q's dtype.
        bias, fdrop, mask: as for :func:`dot_product_attention`. A causal mask for these shapes is
            ``make_causal_mask(q, dims=3)``.

    Returns:
        ``(kv_len, q_len, nheads, B)`` of q's dtype; 16-bit arrays are computed in float32. Fully masked queries give 0.

    Raises:
        ValueError, TypeError: shapes or dtypes are not supported.

    >>> import numpy as np
    >>> x = np.zeros((4, 2, 3, 1), order="F")
    >>> dot_product_attention_scores(x, x)[:, 0, 0, 0].round(3).tolist()
    [0.333, 0.333, 0.333]
    """
    bias, mask = _check_score_arrays(q, k, bias, mask)
    xp, work = cupy_runtime.array_module(q), _accumulation_dtype(q)
    # S_ji = k_j . q_i / sqrt(d); matmul needs (B, nheads, kv_len, q_len)
    scaled = q.astype(work) / work.type(math.sqrt(q.shape[0]))
    scores = xp.matmul(k.astype(work).transpose(3, 1, 2, 0), scaled.transpose(3, 1, 0, 2)).transpose(2, 3, 1, 0)
    if bias is not None:
        scores = scores + to_four_axes(bias).astype(work)
    if mask is not None:
        scores = xp.where(to_four_axes(mask), scores, -xp.inf)
    # alpha = exp(S - max) / sum; 0 for fully masked queries
    if k.shape[2]:
        maximum = scores.max(axis=0, keepdims=True)
        scores = xp.exp(scores - xp.where(xp.isfinite(maximum), maximum, 0))
        total = scores.sum(axis=0, keepdims=True)
        scores = scores / xp.where(total > 0, total, 1)
    weights = xp.asfortranarray(scores.astype(q.dtype, copy=False))
    return weights if fdrop is None else fdrop(weights)


def _check_score_arrays(q: Any, k: Any, bias: Any, mask: Any) -> tuple[Any, Any]:
    """Check the arguments; returns bias and mask as arrays or None."""
    check_array("q", q)
    check_array("k", k)
    if q.ndim != 4 or k.ndim != 4 or q.shape[:2] + q.shape[3:] != k.shape[:2] + k.shape[3:]:
        raise ValueError(f"q is {q.shape} and k is {k.shape}; both must be (d, nheads, len, B), and may differ only in len")
    if q.dtype != k.dtype:
        raise TypeError(f"q is {q.dtype} and k is {k.dtype}; they must have the same dtype: convert one of them")
    if str(q.dtype) not in FLOAT_DTYPES:
        raise TypeError(f"q is {q.dtype}; attention supports {', '.join(FLOAT_DTYPES)}: convert with .astype(...)")
    full = (k.shape[2], q.shape[2], *q.shape[1::2])
    for name, array in (("bias", bias), ("mask", mask)):
        if array is not None:
            if not isinstance(array, Mask):
                check_array(name, array)
            _check_broadcast(name, array.shape, full)
    if isinstance(mask, Mask):
        mask = mask.array
    check_arrays([], {"q": q, "k": k, "bias": bias, "mask": mask})
    if mask is not None and mask.dtype != bool:
        raise TypeError(f"mask is {mask.dtype}; it must be bool: convert with .astype(bool)")
    return bias, mask


def _check_broadcast(name: str, shape: tuple[int, ...], full: tuple[int, ...]) -> None:
    if len(shape) > 4 or any(n not in (1, expected) for n, expected in zip(shape, full, strict=False)):
        raise ValueError(f"{name} is {shape}; from the first axis on it must broadcast to {full}, (kv_len, q_len, nheads, B)")


def weighted_sum(alpha: Any, v: Any) -> Any:
    """Compute ``y_i = sum_j alpha_ji v_j``, ``(d, nheads, q_len, B)``."""
    xp, work = cupy_runtime.array_module(v), _accumulation_dtype(v)
    y = xp.matmul(v.astype(work).transpose(3, 1, 0, 2), alpha.astype(work).transpose(3, 2, 0, 1)).transpose(2, 1, 3, 0)
    return xp.asfortranarray(y.astype(v.dtype, copy=False))


def _accumulation_dtype(array: Any) -> np.dtype[Any]:
    return np.dtype(array.dtype if array.dtype in (np.float32, np.float64) else np.float32)
