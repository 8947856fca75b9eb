"""PyTorch's ways: scaled dot-product attention by cuDNN and by FlashAttention, and FlexAttention."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from ..device import cupy_runtime
from .measure import as_torch
from .way import Call, Impossible, Inputs, Way


class _Torch(Way):
    """A function of PyTorch, and its gradients by autograd."""

    needs: ClassVar[tuple[str, ...]] = ("torch",)

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        """The function."""
        raise NotImplementedError

    def laid_out(self, array: Any) -> Any:
        """An array as the function takes it: the same memory."""
        return as_torch(array)

    def active(self) -> AbstractContextManager[Any]:
        """Without a record for gradients where there are none."""
        import torch

        grad: AbstractContextManager[Any] = torch.set_grad_enabled(self.direction != "forward")
        return grad

    def call(self, inputs: Inputs) -> Call:
        """The function, its gradients after the forward pass, or both."""
        import torch

        x = [self.laid_out(array) for array in (inputs.q, inputs.k, inputs.v)]
        if self.direction == "forward":
            return lambda: (self.attend(*x),)
        leaves, gradient = [t.detach().requires_grad_() for t in x], self.laid_out(inputs.dout)
        if self.direction == "backward":
            result = self.attend(*leaves)
            return lambda: torch.autograd.grad(result, leaves, gradient, retain_graph=True)

        def both() -> Sequence[Any]:
            out = self.attend(*leaves)
            return (out, *torch.autograd.grad(out, leaves, gradient))

        return both

    def as_ours(self, results: Sequence[Any]) -> list[Any]:
        """In float32, which every version of both libraries hands over."""
        return [cupy_runtime.cupy().from_dlpack(t.detach().float().permute(3, 1, 2, 0)) for t in results]

    def peak_bytes(self, call: Call) -> int:
        """As PyTorch's allocator counts."""
        from torch import cuda

        cuda.synchronize()
        before = cuda.memory_allocated()
        cuda.reset_peak_memory_stats()
        call()
        cuda.synchronize()
        return int(cuda.max_memory_allocated()) - int(before)


class _Sdpa(_Torch):
    """``scaled_dot_product_attention`` with one of its backends, and no other."""

    backend: ClassVar[str]

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """With the backend alone."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with super().active(), sdpa_kernel(getattr(SDPBackend, self.backend)):
            yield

    def call(self, inputs: Inputs) -> Call:
        """The call, if it has the mask."""
        if self.preset.left is not None:
            raise Impossible("scaled_dot_product_attention has no windows")
        return super().call(inputs)

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        """The function."""
        from torch.nn.functional import scaled_dot_product_attention

        grouped = self.preset.hq != self.preset.hkv
        return scaled_dot_product_attention(q, k, v, is_causal=self.preset.causal, enable_gqa=grouped)


class TorchCudnn(_Sdpa):
    """PyTorch's cuDNN backend."""

    name, title, backend = "torch-cudnn", "PyTorch, cuDNN", "CUDNN_ATTENTION"


class TorchFlash(_Sdpa):
    """PyTorch's FlashAttention backend."""

    name, title, backend = "torch-flash", "PyTorch, flash", "FLASH_ATTENTION"


class Flex(_Torch):
    """FlexAttention, compiled, with a block mask where keys are hidden."""

    name, title = "flex", "FlexAttention"
    needs = ("torch.nn.attention.flex_attention", "triton")

    def laid_out(self, array: Any) -> Any:
        """A copy as FlexAttention likes it best, contiguous (batch, heads, seq, head_dim)."""
        return as_torch(array).contiguous()

    def call(self, inputs: Inputs) -> Call:
        """The compiled function; every preset and direction begins with an empty cache of compiled functions."""
        if not hasattr(self, "_compiled"):
            self._compile()
        return super().call(inputs)

    def _compile(self) -> None:
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        torch._dynamo.reset()
        preset, mask = self.preset, None
        if preset.causal:
            left = preset.skv if preset.left is None else preset.left

            def seen(b: Any, h: Any, query: Any, key: Any) -> Any:
                return (query >= key) & (query - key <= left)

            mask = create_block_mask(seen, None, None, preset.sq, preset.skv, device="cuda")
        self._options = {"block_mask": mask, "enable_gqa": preset.hq != preset.hkv}
        self._compiled = torch.compile(flex_attention, dynamic=False)

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        """The function."""
        return self._compiled(q, k, v, **self._options)
