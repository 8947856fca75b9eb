"""PyTorch's closest call to every kind of call: scaled dot-product attention, varlen attention and FlexAttention.

Every kind has several ways in the order of preference; the first that runs is measured. Scaled dot-product attention tries its
backends in the order of :data:`BACKENDS`. It has no lengths and no windows, so these are passed as ``attn_mask``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import cupy_sdpa

from .host_options import BATCH, CAP, CHUNK, DROPOUT, HEAD_DIM, HEADS, LENGTH, LENGTHS, SEQUENCES, WINDOW, Call, Way

#: The backends in the order of preference.
BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH,
}  # fmt: skip


class Tensors:
    """One set of tensors ``(batch, heads, seq, head_dim)``, in the memory order of our arrays."""

    def __init__(self) -> None:
        self.q, self.k, self.v, self.dout = (normal(BATCH, LENGTH, HEADS, HEAD_DIM).transpose(1, 2) for _ in range(4))
        self.one = normal(BATCH, HEADS, 1, HEAD_DIM)
        self.bias = normal(1, HEADS, LENGTH, LENGTH)
        self.learned = torch.randn(HEADS, LENGTH, LENGTH, device="cuda")

    def qkv(self) -> list[Any]:
        """Return the queries, keys and values."""
        return [self.q, self.k, self.v]

    def packed(self) -> list[Any]:
        """Return the same memory as packed sequences ``(total length, heads, head_dim)``."""
        return [x.transpose(1, 2).reshape(BATCH * LENGTH, HEADS, HEAD_DIM) for x in self.qkv()]


def normal(*shape: int) -> Any:
    """Normal random numbers in bfloat16."""
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


Attend = Callable[..., Any]
#: Makes a call from the tensors of a set.
Make = Callable[[Tensors], Call]


class Peers:
    """The ways of every kind of call.

    Args:
        with_flex: whether FlexAttention, which has to be compiled, takes part.
    """

    def __init__(self, with_flex: bool) -> None:
        self._with_flex = with_flex
        self._sets: dict[int, Tensors] = {}
        query, key = torch.arange(LENGTH, device="cuda")[:, None], torch.arange(LENGTH, device="cuda")
        self._window = ((query >= key) & (query - key <= WINDOW))[None, None]
        self._padding = (key < torch.tensor(LENGTHS, device="cuda")[:, None])[:, None, None, :]
        self._mask = torch.rand(BATCH, 1, LENGTH, LENGTH, device="cuda") < 0.7
        self._slopes = torch.tensor([float(slope) for slope in cupy_sdpa.alibi_slopes(HEADS)], device="cuda")
        self._alibi = (-self._slopes[:, None, None] * (query - key).abs())[None].to(torch.bfloat16)
        self._starts = [0]
        for length in SEQUENCES:
            self._starts.append(self._starts[-1] + length)

    @staticmethod
    def active() -> AbstractContextManager[Any]:
        """Return the context of a mix: for each call the first of the backends that supports it."""
        context: AbstractContextManager[Any] = sdpa_kernel(list(BACKENDS.values()), set_priority=True)
        return context

    def ways(self, kind: str) -> list[Way]:
        """Return the ways of a kind, in the order of preference; none if there is no peer, or it is left out."""
        makers: dict[str, Callable[[], Sequence[Way]]] = {
            "plain": lambda: self._sdpa("SDPA"),
            "causal": lambda: self._sdpa("SDPA, is_causal", is_causal=True),
            "window": lambda: self._sdpa("SDPA, boolean attn_mask", attn_mask=self._window),
            "lengths": lambda: self._sdpa("SDPA, boolean attn_mask", attn_mask=self._padding),
            "packed": self._packed,
            "bias": lambda: self._by_backend(
                "SDPA, attn_mask", lambda x: functools.partial(scaled_dot_product_attention, *x.qkv(), attn_mask=x.bias)
            ),
            "mask": lambda: self._sdpa("SDPA, boolean attn_mask", attn_mask=self._mask),
            "alibi": lambda: self._sdpa("SDPA, attn_mask", attn_mask=self._alibi),
            "sinks": lambda: self._sdpa("SDPA without sinks"),
            "dropout": lambda: self._sdpa("SDPA, dropout_p", dropout_p=DROPOUT),
            "stats": self._with_stats,
            "max_sumexp": self._with_stats,
            "alibi_flex": lambda: self._flex("alibi_flex"),
            "score_mod": lambda: self._flex("score_mod"),
            "mask_mod": lambda: self._flex("mask_mod"),
            "paged": lambda: self._by_backend(
                "SDPA of dense keys", lambda x: functools.partial(scaled_dot_product_attention, x.one, x.k, x.v)
            ),
            "nnlib": lambda: self._by_backend("SDPA with split heads", self._split_heads),
            "vjp": lambda: self._by_backend("SDPA and autograd", self._both_passes),
            "gradients": lambda: self._gradients("SDPA"),
            "gradients_causal": lambda: self._gradients("SDPA, is_causal", is_causal=True),
            "gradients_lengths": lambda: self._gradients("SDPA, boolean attn_mask", attn_mask=self._padding),
            "gradients_bias": lambda: self._by_backend(
                "SDPA, attn_mask, autograd", lambda x: gradients(scaled_dot_product_attention, x.dout, [*x.qkv(), x.bias])
            ),
            "gradients_sinks": lambda: self._gradients("SDPA without sinks"),
            "gradients_tensors": lambda: self._flex("gradients_tensors"),
        }
        return list(makers[kind]())

    def _way(self, title: str, make: Make, active: Callable[[], AbstractContextManager[Any]] | None = None) -> Way:
        """Return a way whose calls are made from the tensors of a set."""

        def on_set(number: int) -> Call:
            if number not in self._sets:
                self._sets[number] = Tensors()
            return make(self._sets[number])

        return Way(title, on_set, active) if active else Way(title, on_set)

    # scaled dot-product attention

    def _by_backend(self, title: str, make: Make) -> list[Way]:
        """Return one way for each backend."""
        return [self._way(f"{title}, {name}", make, functools.partial(sdpa_kernel, one)) for name, one in BACKENDS.items()]

    def _sdpa(self, title: str, **options: Any) -> list[Way]:
        return self._by_backend(title, lambda x: functools.partial(scaled_dot_product_attention, *x.qkv(), **options))

    def _gradients(self, title: str, **options: Any) -> list[Way]:
        attend = functools.partial(scaled_dot_product_attention, **options)
        return self._by_backend(f"{title}, autograd", lambda x: gradients(attend, x.dout, x.qkv()))

    @staticmethod
    def _split_heads(x: Tensors) -> Call:
        joined = [t.transpose(1, 2).reshape(BATCH, LENGTH, HEADS * HEAD_DIM) for t in x.qkv()]

        def call() -> Any:
            q, k, v = (t.view(BATCH, LENGTH, HEADS, HEAD_DIM).transpose(1, 2) for t in joined)
            return scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(BATCH, LENGTH, HEADS * HEAD_DIM)

        return call

    @staticmethod
    def _both_passes(x: Tensors) -> Call:
        leaves = [t.detach().requires_grad_() for t in x.qkv()]

        def call() -> Any:
            out = scaled_dot_product_attention(*leaves)
            return (out, *torch.autograd.grad(out, leaves, x.dout))

        return call

    def _with_stats(self) -> list[Way]:
        """Return the operators that also return the log-sum-exp; PyTorch does not return the maximum and the sum."""
        aten = torch.ops.aten

        def by_cudnn(x: Tensors) -> Call:
            # attn_bias, compute_log_sumexp
            return functools.partial(aten._scaled_dot_product_cudnn_attention, *x.qkv(), None, True)

        def by_flash(x: Tensors) -> Call:
            # dropout_p, is_causal, return_debug_mask
            return functools.partial(aten._scaled_dot_product_flash_attention, *x.qkv(), 0.0, False, False)

        return [
            self._way("_scaled_dot_product_cudnn_attention", by_cudnn),
            self._way("_scaled_dot_product_flash_attention", by_flash),
        ]

    # packed sequences

    def _packed(self) -> list[Way]:
        """Return the function for packed sequences, nested tensors, and the cuDNN operator, which plans in every call."""
        starts, longest = torch.tensor(self._starts, dtype=torch.int32, device="cuda"), max(SEQUENCES)

        def varlen(x: Tensors) -> Call:
            from torch.nn.attention.varlen import varlen_attn

            return functools.partial(varlen_attn, *x.packed(), starts, starts, longest, longest)

        def nested(x: Tensors) -> Call:
            bounds = {"min_seqlen": min(SEQUENCES), "max_seqlen": longest}
            jagged = torch.nested.nested_tensor_from_jagged
            qkv = [jagged(t, starts.long(), **bounds).transpose(1, 2) for t in x.packed()]
            return functools.partial(scaled_dot_product_attention, *qkv)

        def by_cudnn(x: Tensors) -> Call:
            # attn_bias, cum_seq_q, cum_seq_k, max_q, max_k, compute_log_sumexp, dropout_p, is_causal, return_debug_mask
            operator = torch.ops.aten._cudnn_attention_forward
            return functools.partial(operator, *x.packed(), None, starts, starts, longest, longest, True, 0.0, False, False)

        either = functools.partial(sdpa_kernel, [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION])
        return [
            self._way("varlen_attn", varlen),
            self._way("SDPA of jagged tensors", nested, either),
            self._way("_cudnn_attention_forward", by_cudnn),
        ]

    # FlexAttention

    def _flex(self, kind: str) -> list[Way]:
        """FlexAttention with the function of a kind, compiled for the first set, unless it is left out."""
        if not self._with_flex:
            return []

        @functools.cache
        def compiled() -> Any:
            # A function of its own for every kind, so that its calls do not check the guards of the others.
            from torch.nn.attention.flex_attention import create_block_mask, flex_attention

            slopes, options = self._slopes, {}
            if kind == "mask_mod":
                options["block_mask"] = create_block_mask(
                    lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx // CHUNK == kv_idx // CHUNK),
                    None, None, LENGTH, LENGTH, device="cuda",
                )  # fmt: skip
            elif kind == "alibi_flex":
                options["score_mod"] = lambda score, b, h, q_idx, kv_idx: score - slopes[h] * (q_idx - kv_idx).abs()
            elif kind == "score_mod":
                options["score_mod"] = lambda score, b, h, q_idx, kv_idx: CAP * torch.tanh(score / CAP)

            def attend(q: Any, k: Any, v: Any) -> Any:
                return flex_attention(q, k, v, **options)

            def learn(q: Any, k: Any, v: Any, learned: Any) -> Any:
                return flex_attention(q, k, v, score_mod=lambda score, b, h, q_idx, kv_idx: score + learned[h, q_idx, kv_idx])

            return torch.compile(learn if kind == "gradients_tensors" else attend, dynamic=False)

        def make(x: Tensors) -> Call:
            if kind == "gradients_tensors":
                return gradients(compiled(), x.dout, [*x.qkv(), x.learned])
            return functools.partial(compiled(), *x.qkv())

        return [self._way("FlexAttention, compiled", make)]


def gradients(attend: Attend, dout: Any, inputs: Sequence[Any]) -> Call:
    """Return the gradients of a function with respect to all its inputs, after its forward pass."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad():
        out = attend(*leaves)
    return functools.partial(torch.autograd.grad, out, leaves, dout, retain_graph=True)
