"""JAX's way: ``jax.nn.dot_product_attention`` by cuDNN, compiled."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

from ..device import cupy_runtime
from .measure import WallClock
from .way import Call, Inputs, Timer, Way


class Jax(Way):
    """JAX's cuDNN attention on the same memory; gradients by its own differentiation.

    JAX runs on streams of its own, which CUDA events of CuPy's do not see, and tells no time: a wall clock does.
    """

    name, title, needs = "jax", "JAX, cuDNN", ("jax",)

    @staticmethod
    def leave_memory() -> None:
        """Keep JAX from taking most of the GPU's memory; before it is imported."""
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

    @functools.cached_property
    def _compiled(self) -> dict[str, Any]:
        """The function, with what its gradients need, those, and both, by name; compiled when they are called first."""
        import jax

        preset = self.preset
        window = {} if preset.left is None else {"local_window_size": (preset.left, 0)}

        def attend(q: Any, k: Any, v: Any) -> Any:
            return jax.nn.dot_product_attention(q, k, v, is_causal=preset.causal, implementation="cudnn", **window)

        def kept(q: Any, k: Any, v: Any) -> Any:
            return jax.vjp(attend, q, k, v)

        def both(q: Any, k: Any, v: Any, gradient: Any) -> Any:
            out, pull = kept(q, k, v)
            return (out, *pull(gradient))

        functions = {"forward": attend, "kept": kept, "backward": lambda pull, gradient: pull(gradient), "both": both}
        return {name: jax.jit(function) for name, function in functions.items()}

    def call(self, inputs: Inputs) -> Call:
        """The compiled call."""
        import jax

        cupy_runtime.cupy().cuda.Device().synchronize()  # JAX's streams do not wait for CuPy's
        *x, gradient = (jax.dlpack.from_dlpack(array.T) for array in (inputs.q, inputs.k, inputs.v, inputs.dout))
        compiled = self._compiled
        if self.direction == "forward":
            return lambda: (compiled["forward"](*x),)
        if self.direction == "backward":
            _, pull = compiled["kept"](*x)
            return lambda: tuple(compiled["backward"](pull, gradient))
        return lambda: tuple(compiled["both"](*x, gradient))

    def as_ours(self, results: Sequence[Any]) -> list[Any]:
        """In float32, which every version of both libraries hands over."""
        self.wait(results)
        return [cupy_runtime.cupy().from_dlpack(x.astype("float32")).T for x in results]

    def timer(self, calls: Sequence[Call], busy: Any) -> Timer:
        """A wall clock."""
        return WallClock(calls, self.wait)

    def wait(self, results: Any = None) -> None:
        """Until the results are there, and everything else that the device has to do."""
        import jax

        jax.block_until_ready(results)
        super().wait()
