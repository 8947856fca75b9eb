"""Flux.jl's ``MultiHeadAttention`` on numpy and CuPy arrays, with gradients. Copy this module into your program.

Axes are in Julia's order, ``(features, len, batch...)``. On a GPU, float32 arrays need ``compute_dtype="bfloat16"``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cupy_sdpa.nnlib import dot_product_attention, dot_product_attention_vjp


class Dense:
    """Flux's ``Dense(weight, bias)`` without an activation: ``weight * x .+ bias`` along the first axis.

    Args:
        weight: ``(n_out, n_in)``.
        bias: ``(n_out,)``. Default None: no bias.
    """

    def __init__(self, weight: Any, bias: Any = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Any) -> Any:
        """Return the outputs ``(n_out, len, batch...)``."""
        y = np.tensordot(self.weight, x, 1)  # also of CuPy arrays; in C order
        return y if self.bias is None else y + self.bias.reshape(-1, *[1] * (x.ndim - 1))

    def gradients(self, x: Any, dy: Any) -> tuple[Any, dict[str, Any]]:
        """Return the gradient of x, and the gradients of the weight and the bias by name."""
        others = tuple(range(1, x.ndim))
        of_parameters = {"weight": np.tensordot(dy, x, (others, others))}
        if self.bias is not None:
            of_parameters["bias"] = dy.sum(axis=others)
        return np.tensordot(self.weight.T, dy, 1), of_parameters


class MultiHeadAttention:
    """Flux's ``MultiHeadAttention``: ``mha(q, k, v)``, or ``mha(x)`` for self-attention.

    Args:
        q_proj, k_proj, v_proj, out_proj: the four ``Dense`` layers.
        nheads: the number of heads; divides the outputs of the first three layers.
        options: of every call: ``compute_dtype`` or ``engine``, as for ``dot_product_attention``.
    """

    def __init__(
        self, q_proj: Dense, k_proj: Dense, v_proj: Dense, out_proj: Dense, *, nheads: int = 8, **options: Any
    ) -> None:
        self.projections, self.out_proj = (q_proj, k_proj, v_proj), out_proj
        self.options = {"nheads": nheads, **options}

    def _inputs(self, q: Any, k: Any, v: Any) -> list[Any]:
        k = q if k is None else k
        return [q, k, k if v is None else v]

    def __call__(
        self, q: Any, k: Any = None, v: Any = None, bias: Any = None, *, mask: Any = None, alpha: bool = False
    ) -> tuple[Any, Any]:
        """Return y and the attention weights, which are None unless ``alpha=True`` requests them."""
        inputs = zip(self.projections, self._inputs(q, k, v), strict=True)
        y, weights = dot_product_attention(*(project(x) for project, x in inputs), bias, mask=mask, alpha=alpha, **self.options)
        return self.out_proj(y), weights

    def vjp(
        self, q: Any, k: Any = None, v: Any = None, bias: Any = None, *, mask: Any = None
    ) -> tuple[Any, Callable[[Any], tuple[list[Any], list[dict[str, Any]]]]]:
        """Return y and ``pullback``: ``(dq, dk, dv, dbias), gradients = pullback(dy)``.

        ``gradients`` has the gradients of q_proj, k_proj, v_proj and out_proj, in this order.
        For ``vjp(x)`` the gradient of x is ``dq + dk + dv``.
        """
        inputs = self._inputs(q, k, v)
        projected = [project(x) for project, x in zip(self.projections, inputs, strict=True)]
        y, pullback = dot_product_attention_vjp(*projected, bias, mask=mask, **self.options)

        def pull(dy: Any) -> tuple[list[Any], list[dict[str, Any]]]:
            dy, of_out = self.out_proj.gradients(y, dy)
            *found, dbias = pullback(dy)
            pairs = [layer.gradients(x, dx) for layer, x, dx in zip(self.projections, inputs, found, strict=True)]
            return [*(dx for dx, _ in pairs), dbias], [*(of_layer for _, of_layer in pairs), of_out]

        return self.out_proj(y), pull
