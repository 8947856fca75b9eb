"""Attention with gradients for PyTorch, as an autograd function: copy this module into your program."""

from __future__ import annotations

from typing import Any

import torch

import cupy_sdpa


class _Attention(torch.autograd.Function):
    """Both passes; the gradients of q, k, v, bias and sinks are those that autograd asks for."""

    @staticmethod
    def forward(context: Any, q: Any, k: Any, v: Any, bias: Any, sinks: Any, options: dict[str, Any]) -> Any:
        stats = {} if q.dtype != torch.float64 else {"stats": torch.empty(_row_shape(q, options), dtype=torch.float64)}
        out, rows = cupy_sdpa.attention(q, k, v, return_stats=True, bias=bias, sinks=sinks, **stats, **options)
        context.save_for_backward(q, k, v, bias, sinks, out, rows)
        context.options = options
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, dout: Any) -> tuple[Any, ...]:
        q, k, v, bias, sinks, out, stats = context.saved_tensors
        if dout.stride(-1) != 1 or 0 in dout.stride():  # cuDNN reads the head dim contiguously; sum() expands its gradient
            dout = dout.contiguous()
        *_, of_bias, of_sinks, _ = context.needs_input_grad
        flags = {"return_dbias": of_bias, "return_dsinks": of_sinks}
        dq, dk, dv, *others = cupy_sdpa.attention_backward(
            dout, q, k, v, out, stats, bias=bias, sinks=sinks, **flags, **context.options
        )
        dbias = others.pop(0) if of_bias else None
        return dq, dk, dv, dbias, others.pop(0) if of_sinks else None, None


def attention(q: Any, k: Any, v: Any, *, layout: str = "bhsd", bias: Any = None, sinks: Any = None, **options: Any) -> Any:
    """Compute ``cupy_sdpa.attention`` of PyTorch tensors; autograd differentiates it with respect to q, k, v, bias and sinks.

    Tensors are shared without a copy. The work is enqueued on PyTorch's current stream without synchronization. Tensors in the
    memory of the CPU are computed on the CPU.

    Args:
        q, k, v: ``(B, Hq, Sq, D)``, ``(B, Hkv, Skv, D)`` and ``(B, Hkv, Skv, Dv)``, as for PyTorch's
            ``scaled_dot_product_attention``; or in another layout. float16 or bfloat16; float32 with ``compute_dtype``.
        layout: as for ``cupy_sdpa.attention``. Default ``"bhsd"``.
        bias: ``(B, Hq, Sq, Skv)``, added to the scores; every axis may be 1. Default None.
        sinks: float32 ``(Hq,)``. Default None.
        options: the other options of ``cupy_sdpa.attention``, such as ``causal``, ``mask``, ``compute_dtype`` and
            ``deterministic``. Tensors among them have no gradients.

    Returns:
        The output, ``(B, Hq, Sq, Dv)``, in the layout. Its gradients cannot be differentiated again.

    Raises:
        TypeError: an argument is no tensor, or a tensor among the options requires a gradient.
        ValueError, Unsupported, CudnnError: as ``cupy_sdpa.attention``.

    Source: Dao 2023, "FlashAttention-2", algorithm 2.
    """
    for name, value in (("q", q), ("k", k), ("v", v)):
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} is a {type(value).__module__}.{type(value).__qualname__}; pass a torch.Tensor")
    tensors = {f"tensors[{name!r}]": x for name, x in (options.get("tensors") or {}).items()}
    for name, value in {**options, **tensors}.items():
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise TypeError(
                f"{name} requires a gradient, which is computed for q, k, v, bias and sinks only: pass {name}.detach()"
            )
    return _Attention.apply(q, k, v, bias, sinks, {"layout": layout, **options})


def _row_shape(q: Any, options: dict[str, Any]) -> tuple[int, ...]:
    """Return the shape of the log-sum-exp in the caller's layout."""
    letters = options["layout"]
    sizes = dict(zip(letters.replace("b", "") if q.ndim == 3 and "b" in letters else letters, q.shape, strict=True))
    axes = "th" if "t" in letters else "shb" if letters[0] == "d" else "bhs"
    return tuple(sizes[axis] for axis in axes if axis in sizes)
