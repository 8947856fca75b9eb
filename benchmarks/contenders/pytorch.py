"""PyTorch's scaled dot-product attention by cuDNN and by FlashAttention, and FlexAttention."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from cupy_sdpa.core.runtime import cupy_runtime

from ..device import as_torch, torch_peak
from .contender import Call, Contender, Inputs, UnavailableError


class _Torch(Contender):
    """A function of PyTorch, with gradients by autograd."""

    requires: ClassVar[tuple[str, ...]] = ("torch",)

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        """Return the function."""
        raise NotImplementedError

    def to_torch(self, array: Any) -> Any:
        """Return a CuPy array as an input of the function."""
        return as_torch(array)

    def active(self) -> AbstractContextManager[Any]:
        """Autograd only where gradients are computed."""
        import torch

        grad: AbstractContextManager[Any] = torch.set_grad_enabled(self.direction != "forward")
        return grad

    def call(self, inputs: Inputs) -> Call:
        """Return the function, its gradients after the forward pass, or both."""
        import torch

        qkv = [self.to_torch(array) for array in (inputs.q, inputs.k, inputs.v)]
        if self.direction == "forward":
            return lambda: (self.attend(*qkv),)
        leaves, gradient = [x.detach().requires_grad_() for x in qkv], self.to_torch(inputs.dout)
        if self.direction == "backward":
            result = self.attend(*leaves)
            return lambda: torch.autograd.grad(result, leaves, gradient, retain_graph=True)

        def both() -> Sequence[Any]:
            out = self.attend(*leaves)
            return (out, *torch.autograd.grad(out, leaves, gradient))

        return both

    def to_cupy(self, results: Sequence[Any]) -> list[Any]:
        """Return the results in float32, which DLPack supports in every version of both libraries."""
        return [cupy_runtime.cupy().from_dlpack(x.detach().float().permute(3, 1, 2, 0)) for x in results]

    def peak_bytes(self, call: Call) -> int:
        """Return the peak of PyTorch's allocator."""
        return torch_peak(call)


class _Sdpa(_Torch):
    """``scaled_dot_product_attention`` with a single backend."""

    backend: ClassVar[str]

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Only this backend is enabled."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with super().active(), sdpa_kernel(getattr(SDPBackend, self.backend)):
            yield

    def call(self, inputs: Inputs) -> Call:
        """Return the call, unless the preset has a window."""
        if self.preset.left is not None:
            raise UnavailableError("scaled_dot_product_attention does not support windows")
        return super().call(inputs)

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        """Return the function."""
        from torch.nn.functional import scaled_dot_product_attention

        grouped = self.preset.hq != self.preset.hkv
        return scaled_dot_product_attention(q, k, v, is_causal=self.preset.causal, enable_gqa=grouped)


class TorchCudnn(_Sdpa):
    """PyTorch's cuDNN backend."""

    name, title, backend = "torch-cudnn", "PyTorch, cuDNN", "CUDNN_ATTENTION"


class TorchFlash(_Sdpa):
    """PyTorch's FlashAttention backend."""

    name, title, backend = "torch-flash", "PyTorch, flash", "FLASH_ATTENTION"


class TorchMath(_Sdpa):
    """PyTorch's math backend, which stores matrices of size Sq x Skv."""

    name, title, backend = "torch-math", "PyTorch, math", "MATH"
    dtypes = ("float32", "float64")


class Flex(_Torch):
    """FlexAttention, compiled, with a block mask for causal presets."""

    name, title = "flex", "FlexAttention"
    requires = ("torch.nn.attention.flex_attention", "triton")

    def to_torch(self, array: Any) -> Any:
        """Return a contiguous copy ``(batch, heads, seq, head_dim)``, FlexAttention's fastest layout."""
        return as_torch(array).contiguous()

    def call(self, inputs: Inputs) -> Call:
        """Return the compiled call. Each preset and direction starts with an empty cache of compiled functions."""
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

            def mask_mod(b: Any, h: Any, query: Any, key: Any) -> Any:
                return (query >= key) & (query - key <= left)

            mask = create_block_mask(mask_mod, None, None, preset.sq, preset.skv, device="cuda")
        self._options = {"block_mask": mask, "enable_gqa": preset.hq != preset.hkv}
        self._compiled = torch.compile(flex_attention, dynamic=False)

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        """Return the compiled function."""
        return self._compiled(q, k, v, **self._options)
