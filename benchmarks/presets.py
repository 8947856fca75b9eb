"""Named attention problems, with the operations and the bytes of memory traffic that each needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from cupy_sdpa.cli.console import CommandError
from cupy_sdpa.core.problem.problem import Problem
from cupy_sdpa.core.problem.tensor_spec import ITEMSIZE
from cupy_sdpa.explanation import problem

#: What is timed: the forward pass without row statistics; the backward pass; both, the forward pass with row statistics.
DIRECTIONS = ("forward", "backward", "both")


@dataclass(frozen=True)
class Preset:
    """An attention problem of a common model.

    Attributes:
        name: the name on the command line.
        b, hq, hkv, sq, skv, d, dv: batch, query heads, key/value heads, query and key lengths, head dims of q and k, and of v.
        causal: query i attends to keys up to and including i.
        left: query i attends to at most this many keys before i; None for no limit.
        directions: the directions that are timed.
        dtype: the dtype of the arrays.
        engine: ``"cupy"`` for CuPy's own operations, which are compared with PyTorch's math backend.
    """

    name: str
    b: int
    hq: int
    hkv: int
    sq: int
    skv: int
    d: int
    dv: int
    causal: bool = False
    left: int | None = None
    directions: tuple[str, ...] = DIRECTIONS
    dtype: str = "bfloat16"
    engine: str | None = None

    @property
    def shapes(self) -> tuple[tuple[int, int, int, int], ...]:
        """The shapes of q, k and v."""
        keys = (self.hkv, self.skv, self.b)
        return (self.d, self.hq, self.sq, self.b), (self.d, *keys), (self.dv, *keys)

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        """The shape of the output and of its gradient."""
        return self.dv, self.hq, self.sq, self.b

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of cupy_sdpa's calls."""
        window = {} if self.left is None else {"window": (self.left, 0)}
        return {"causal": self.causal, **window, **({"engine": self.engine} if self.engine else {})}

    @property
    def decode(self) -> bool:
        """Whether there is a single query. Reading k and v then takes most of the time."""
        return self.sq == 1

    @cached_property
    def pairs(self) -> int:
        """The number of pairs of a query and a key that it attends to, for one head and batch item."""
        queries = np.arange(self.sq)
        last = np.minimum(queries, self.skv - 1) if self.causal else np.full(self.sq, self.skv - 1)
        first = 0 if self.left is None else np.maximum(queries - self.left, 0)
        return int(np.maximum(last - first + 1, 0).sum())

    def operations(self, direction: str) -> int:
        """Useful operations. Forward: two matrix products, over D and Dv. Backward: five, three over D and two over Dv."""
        dims = {"forward": self.d + self.dv, "backward": 3 * self.d + 2 * self.dv}
        total = sum(dims.values()) if direction == "both" else dims[direction]
        return 2 * self.b * self.hq * self.pairs * total

    @property
    def input_bytes(self) -> int:
        """The bytes of q, k and v."""
        return sum(ITEMSIZE[self.dtype] * d * h * s * b for d, h, s, b in self.shapes)

    @property
    def moved_bytes(self) -> int:
        """The bytes that a forward pass must read and write: q, k, v and out."""
        d, h, s, b = self.out_shape
        return self.input_bytes + ITEMSIZE[self.dtype] * d * h * s * b

    def columns(self) -> dict[str, Any]:
        """Return the columns of a row that describe the problem."""
        names = ("b", "hq", "hkv", "sq", "skv", "d", "dv", "causal")
        return {"preset": self.name, **{name: getattr(self, name) for name in names}, "window": self.left, "dtype": self.dtype}

    def described(self) -> str:
        """Return the problem in words."""
        lengths = f"{self.sq}" if self.sq == self.skv else f"{self.sq} x {self.skv}"
        dims = f"D {self.d}" if self.d == self.dv else f"D {self.d}, Dv {self.dv}"
        mask = f"{'causal' if self.causal else 'full'}{'' if self.left is None else f', window {self.left + 1}'}"
        return f"batch {self.b}, {self.hq}/{self.hkv} heads, {lengths}, {dims}, {mask}: {', '.join(self.directions)}"

    def problems(self, direction: str) -> tuple[Problem, ...]:
        """Return the problems of cupy_sdpa's calls, in their order; none without cuDNN."""
        if self.engine:
            return ()
        q, k, v = self.shapes
        calls = {"forward": ("forward",), "backward": ("backward",), "both": ("forward with stats", "backward")}[direction]
        return tuple(
            problem(
                q, k, v, dtype=self.dtype, **self.options,
                return_stats=call == "forward with stats", backward=call == "backward",
            )
            for call in calls
        )  # fmt: skip


def _square(name: str, b: int, hq: int, hkv: int, s: int, d: int, dv: int | None = None, **more: Any) -> Preset:
    return Preset(name, b, hq, hkv, s, s, d, dv or d, **more)


def _decode(name: str, b: int, skv: int) -> Preset:
    return Preset(name, b, 32, 8, 1, skv, 128, 128, directions=("forward",))


#: (name, query heads, key/value heads) of Llama 3.1, and the sequence lengths.
_LLAMAS = (("llama-8b", 32, 8), ("llama-70b", 64, 8))
_LENGTHS = (2048, 8192, 16384)

PRESETS: tuple[Preset, ...] = (
    *(
        _square(f"{name}-{length // 1024}k{'-causal' * causal}", 1, hq, hkv, length, 128, causal=causal)
        for name, hq, hkv in _LLAMAS
        for length in _LENGTHS
        for causal in (True, False)
    ),
    _square("mla-4k-causal", 1, 128, 128, 4096, 192, 128, causal=True),
    _square("gpt-oss-8k-window-128", 1, 64, 8, 8192, 64, causal=True, left=127),
    _square("gpt-oss-8k-window-1024", 1, 64, 8, 8192, 64, causal=True, left=1023),
    _square("gpt-oss-8k-causal", 1, 64, 8, 8192, 64, causal=True),
    _square("gemma-4k-causal", 1, 16, 8, 4096, 256, causal=True),
    _square("32-heads-d256-4k-causal", 1, 32, 8, 4096, 256, causal=True),
    _square("16-heads-2k", 4, 16, 16, 2048, 128),
    _square("16-heads-2k-causal", 4, 16, 16, 2048, 128, causal=True),
    _square("16-heads-d64-4k", 4, 16, 16, 4096, 64),
    _square("16-heads-d64-4k-causal", 4, 16, 16, 4096, 64, causal=True),
    _square("vit-197", 64, 16, 16, 197, 64),
    _square("vit-1024", 64, 16, 16, 1024, 64),
    _square("notebook-128", 2, 8, 8, 128, 64),
    _square("notebook-256", 2, 8, 8, 256, 64),
    _square("notebook-512", 2, 8, 8, 512, 64),
    _decode("decode-8k-batch-32", 32, 8192),
    _decode("decode-32k-batch-1", 1, 32768),
    *(
        _square(
            f"cupy-{dtype}-{length // 1024}k{'-causal' * causal}",
            1,
            8,
            8,
            length,
            64,
            causal=causal,
            directions=("forward", "both"),
            dtype=dtype,
            engine="cupy",
        )
        for dtype in ("float32", "float64")
        for length in (1024, 4096, 16384)
        for causal in (False, True)
    ),
)


def select(names: Sequence[str] | None) -> list[Preset]:
    """Return the presets with the given names. Any other name selects the presets that begin with it; None selects all.

    Raises:
        CommandError: no preset has such a name or prefix.

    >>> [preset.name for preset in select(["decode", "llama-8b-2k"])]
    ['llama-8b-2k', 'decode-8k-batch-32', 'decode-32k-batch-1']
    """
    if names is None:
        return list(PRESETS)
    selected: set[Preset] = set()
    for name in names:
        exact = [preset for preset in PRESETS if preset.name == name]
        matches = exact or [preset for preset in PRESETS if preset.name.startswith(name)]
        if not matches:
            raise CommandError(f"there is no preset {name!r}; --list shows all presets")
        selected.update(matches)
    return [preset for preset in PRESETS if preset in selected]
