"""JAX's attention by cuDNN: ``jax.nn.dot_product_attention``, compiled."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

from cupy_sdpa.core.runtime import cupy_runtime

from ..timing import WallClock
from .contender import Call, Contender, Inputs, Timer


class Jax(Contender):
    """JAX's cuDNN attention on the same memory, with gradients by ``jax.vjp``.

    JAX runs on its own streams, which CuPy's CUDA events do not see. So its calls are timed by a wall clock.
    """

    name, title, requires = "jax", "JAX, cuDNN", ("jax",)

    @staticmethod
    def limit_memory() -> None:
        """Stop JAX from reserving most of the GPU's memory; must run before JAX is imported."""
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

    @functools.cached_property
    def _compiled(self) -> dict[str, Any]:
        """The jitted functions by name: forward; forward with its vjp; backward; both. The first call compiles."""
        import jax

        preset = self.preset
        window = {} if preset.left is None else {"local_window_size": (preset.left, 0)}

        def attend(q: Any, k: Any, v: Any) -> Any:
            return jax.nn.dot_product_attention(q, k, v, is_causal=preset.causal, implementation="cudnn", **window)

        def vjp(q: Any, k: Any, v: Any) -> Any:
            return jax.vjp(attend, q, k, v)

        def both(q: Any, k: Any, v: Any, gradient: Any) -> Any:
            out, pullback = vjp(q, k, v)
            return (out, *pullback(gradient))

        functions = {"forward": attend, "vjp": vjp, "backward": lambda pullback, gradient: pullback(gradient), "both": both}
        return {name: jax.jit(function) for name, function in functions.items()}

    def call(self, inputs: Inputs) -> Call:
        """Return the compiled call."""
        import jax

        cupy_runtime.cupy().cuda.Device().synchronize()  # JAX's streams do not wait for CuPy's
        *qkv, gradient = (jax.dlpack.from_dlpack(array.T) for array in (inputs.q, inputs.k, inputs.v, inputs.dout))
        compiled = self._compiled
        if self.direction == "forward":
            return lambda: (compiled["forward"](*qkv),)
        if self.direction == "backward":
            _, pullback = compiled["vjp"](*qkv)
            return lambda: tuple(compiled["backward"](pullback, gradient))
        return lambda: tuple(compiled["both"](*qkv, gradient))

    def to_cupy(self, results: Sequence[Any]) -> list[Any]:
        """Return the results in float32, which DLPack supports in every version of both libraries."""
        self.wait(results)
        return [cupy_runtime.cupy().from_dlpack(x.astype("float32")).T for x in results]

    def timer(self, calls: Sequence[Call], busy: Any) -> Timer:
        """Return a wall clock."""
        return WallClock(calls, self.wait)

    def wait(self, results: Any = None) -> None:
        """Wait for the results and for the device."""
        import jax

        jax.block_until_ready(results)
        super().wait()
