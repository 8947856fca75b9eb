"""The contenders: this package, and PyTorch's varlen, nested and padded attention."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import cupy
import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import cupy_sdpa

from .problems import Inputs, Problem, packed_to_torch

Call = Callable[[], Sequence[Any]]


class Contender:
    """An implementation of attention over packed sequences.

    Args:
        problem: the problem.
        repeated: whether key and value heads are repeated, one for each query head. Only for ``can_repeat``.
    """

    name: ClassVar[str]
    can_repeat: ClassVar[bool] = False

    def __init__(self, problem: Problem, repeated: bool) -> None:
        self.problem, self.repeated = problem, repeated

    def forward(self, inputs: Inputs) -> Call:
        """The forward call; its first result is out."""
        raise NotImplementedError

    def backward(self, inputs: Inputs) -> Call:
        """The backward call, after the forward pass; its results are dq, dk and dv."""
        raise NotImplementedError

    def packed(self, results: Sequence[Any], direction: str) -> list[Any]:
        """The results as packed PyTorch tensors, without the row statistics."""
        return list(results)

    def facts(self, direction: str, inputs: Inputs) -> dict[str, Any]:
        """More columns for the row: engine and workspace if they are known."""
        return {}


class Ours(Contender):
    """cupy_sdpa on CuPy arrays."""

    name = "ours"

    def __init__(self, problem: Problem, repeated: bool) -> None:
        super().__init__(problem, repeated)
        self.options = options(problem, problem.starts)

    def forward(self, inputs: Inputs) -> Call:
        """The call into preallocated results."""
        q, k, v, _ = inputs.arrays.values()
        out = cupy.empty_like(q)
        stats = cupy.empty(q.shape[1:], np.float32, order="F")
        return lambda: cupy_sdpa.attention(q, k, v, **self.options, return_stats=True, out=out, stats=stats)

    def backward(self, inputs: Inputs) -> Call:
        """The call into preallocated results."""
        q, k, v, dout = inputs.arrays.values()
        out, stats = cupy_sdpa.attention(q, k, v, **self.options, return_stats=True)
        gradients = {f"d{name}": cupy.empty_like(x) for name, x in zip("qkv", (q, k, v), strict=True)}
        return lambda: cupy_sdpa.attention_backward(dout, q, k, v, out, stats, **self.options, **gradients)

    def packed(self, results: Sequence[Any], direction: str) -> list[Any]:
        """The results as packed PyTorch tensors, without the row statistics."""
        return [packed_to_torch(x) for x in (results[:1] if direction == "forward" else results)]

    def facts(self, direction: str, inputs: Inputs) -> dict[str, Any]:
        """The engine of the plan and its workspace."""
        plan = plan_info(inputs, self.options, direction)
        return {"engine": str(plan.engine), "workspace_bytes": plan.workspace}


def options(problem: Problem, starts: Sequence[int]) -> dict[str, Any]:
    """The keyword arguments of cupy_sdpa's calls."""
    cu_seqlens = cupy.asarray(np.array(starts, np.int32))
    return {
        "causal": problem.causal,
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_kv": cu_seqlens,
        "max_seqlen_q": problem.longest,
        "max_seqlen_kv": problem.longest,
    }


def plan_info(inputs: Inputs, keywords: dict[str, Any], direction: str) -> Any:
    """The plan of one of our calls.

    Raises:
        RuntimeError: there is none.
    """
    q, k, v, _ = inputs.arrays.values()
    report = cupy_sdpa.explain(q, k, v, **keywords, return_stats=direction == "forward", backward=direction == "backward")
    if report.plan is None:
        raise RuntimeError(str(report))
    return report.plan


class Torch(Contender):
    """A function of PyTorch, with gradients by autograd."""

    can_repeat = True

    def __init__(self, problem: Problem, repeated: bool) -> None:
        super().__init__(problem, repeated)
        self.group = {"enable_gqa": True} if problem.hq != problem.hkv and not repeated else {}
        self.starts = torch.tensor(problem.starts, dtype=torch.int32, device="cuda")

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        """The function."""
        raise NotImplementedError

    def from_packed(self, x: Any) -> Any:
        """A packed tensor as an input of the function."""
        return x

    def to_packed(self, x: Any) -> Any:
        """A result of the function as a packed tensor."""
        return x

    def prepare(self, inputs: Inputs) -> list[Any]:
        """The arguments of the function."""
        count = self.problem.hq // self.problem.hkv if self.repeated else 1
        heads = [inputs.q] + [x.repeat_interleave(count, 1) if count > 1 else x for x in (inputs.k, inputs.v)]
        return [self.from_packed(x) for x in heads]

    def forward(self, inputs: Inputs) -> Call:
        """The call."""
        qkv = self.prepare(inputs)
        return lambda: (self.attend(*qkv),)

    def backward(self, inputs: Inputs) -> Call:
        """The call, after the forward pass."""
        leaves = [x.detach().requires_grad_() for x in self.prepare(inputs)]
        with torch.enable_grad():
            out = self.attend(*leaves)
        gradient = self.from_packed(inputs.dout)
        return lambda: torch.autograd.grad(out, leaves, gradient, retain_graph=True)

    def packed(self, results: Sequence[Any], direction: str) -> list[Any]:
        """The packed results; gradients of repeated heads are summed."""
        p = self.problem
        heads = [p.hq] if direction == "forward" else [p.hq, p.hkv, p.hkv]
        tensors = [self.to_packed(x) for x in results]
        return [x.unflatten(1, (h, -1)).float().sum(2) for x, h in zip(tensors, heads, strict=True)]


class TorchVarlen(Torch):
    """``torch.nn.attention.varlen``. Older versions support grouped-query attention without ``enable_gqa``."""

    name = "torch varlen"

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        """The function."""
        from torch.nn.attention.varlen import varlen_attn

        parameters = inspect.signature(varlen_attn).parameters
        keywords: dict[str, Any] = {name: value for name, value in self.group.items() if name in parameters}
        if self.problem.causal:
            keywords |= {"is_causal": True} if "is_causal" in parameters else {"window_size": (-1, 0)}
        longest = self.problem.longest
        return varlen_attn(q, k, v, self.starts, self.starts, longest, longest, **keywords)


class TorchVarlenCudnn(Torch):
    """PyTorch's operator for packed sequences by cuDNN. PyTorch 2.11 builds a plan in every call, on the host."""

    name = "torch varlen cuDNN"

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        """The function."""
        longest, starts = self.problem.longest, self.starts
        operator = torch.ops.aten._cudnn_attention_forward
        return operator(q, k, v, None, starts, starts, longest, longest, True, 0.0, self.problem.causal, False)[0]


class TorchNested(Torch):
    """Scaled dot-product attention of jagged nested tensors."""

    name = "torch nested"

    def __init__(self, problem: Problem, repeated: bool) -> None:
        super().__init__(problem, repeated)
        self.starts = self.starts.long()

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        """The function."""
        bounds = {"min_seqlen": min(self.problem.lengths), "max_seqlen": self.problem.longest}
        qkv = [torch.nested.nested_tensor_from_jagged(x, self.starts, **bounds).transpose(1, 2) for x in (q, k, v)]
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]):
            out = scaled_dot_product_attention(*qkv, is_causal=self.problem.causal, **self.group)
            return out.transpose(1, 2).values()


class TorchPadded(Torch):
    """Scaled dot-product attention by cuDNN over padded sequences; without a causal mask, a bias masks padded keys."""

    name = "torch padded"

    def __init__(self, problem: Problem, repeated: bool) -> None:
        super().__init__(problem, repeated)
        longest = -(-problem.longest // 64) * 64
        lengths = torch.tensor(problem.lengths, device="cuda")
        self.valid = torch.arange(longest, device="cuda") < lengths[:, None]
        self.bias = None
        if not problem.causal:
            bias = torch.zeros(len(problem.lengths), 1, longest, longest, dtype=torch.bfloat16, device="cuda")
            self.bias = bias.masked_fill_(~self.valid[:, None, None, :], -math.inf)

    def from_packed(self, x: Any) -> Any:
        """Pad with zeros: (batch, heads, longest, head_dim)."""
        padded = x.new_zeros(*self.valid.shape, *x.shape[1:])
        padded[self.valid] = x
        return padded.transpose(1, 2)

    def to_packed(self, x: Any) -> Any:
        """Remove the padding."""
        return x.transpose(1, 2)[self.valid]

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        """The function."""
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, self.bias, is_causal=self.problem.causal, **self.group)
