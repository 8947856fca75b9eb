"""The named problems of the bench, with what of each is useful work: operations, and bytes that must be moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..explain import problem
from ..problem.problem import Problem
from ..problem.tensor_spec import ITEMSIZE

#: What is timed: without statistics; the gradients alone; with statistics, and then the gradients, as one.
DIRECTIONS = ("forward", "backward", "both")
#: Bytes of an element: every preset is bfloat16.
BYTES = ITEMSIZE["bfloat16"]


@dataclass(frozen=True)
class Preset:
    """A problem of the field; sizes in the legend's letters.

    Attributes:
        name: for the command line.
        b, hq, hkv, sq, skv, d, dv: the sizes.
        causal: query i sees the keys up to and with i.
        left: and of those only so many before i; None for all.
        directions: what is timed of it.
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

    @property
    def shapes(self) -> tuple[tuple[int, int, int, int], ...]:
        """Of q, k and v."""
        keys = (self.hkv, self.skv, self.b)
        return (self.d, self.hq, self.sq, self.b), (self.d, *keys), (self.dv, *keys)

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        """Of the output and its gradient."""
        return self.dv, self.hq, self.sq, self.b

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of our calls."""
        window = {} if self.left is None else {"window": (self.left, 0)}
        return {"causal": self.causal, **window}

    @property
    def decode(self) -> bool:
        """Whether a single query sees all keys: the time is that of reading them."""
        return self.sq == 1

    @cached_property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees, of a head and batch entry."""
        queries = np.arange(self.sq)
        last = np.minimum(queries, self.skv - 1) if self.causal else np.full(self.sq, self.skv - 1)
        first = 0 if self.left is None else np.maximum(queries - self.left, 0)
        return int(np.maximum(last - first + 1, 0).sum())

    def operations(self, direction: str) -> int:
        """Useful operations: forward two products, one over D and one over Dv; backward five, three over D and two over Dv."""
        products = {"forward": self.d + self.dv, "backward": 3 * self.d + 2 * self.dv}
        over = sum(products.values()) if direction == "both" else products[direction]
        return 2 * self.b * self.hq * self.pairs * over

    @property
    def input_bytes(self) -> int:
        """Bytes of q, k and v."""
        return sum(BYTES * d * h * s * b for d, h, s, b in self.shapes)

    @property
    def moved_bytes(self) -> int:
        """Bytes that a forward pass must read and write: q, k, v and out."""
        d, h, s, b = self.out_shape
        return self.input_bytes + BYTES * d * h * s * b

    def problems(self, direction: str) -> tuple[Problem, ...]:
        """What our calls ask, one after the other."""
        q, k, v = self.shapes
        calls = {"forward": ("plain",), "backward": ("backward",), "both": ("with statistics", "backward")}[direction]
        return tuple(
            problem(
                q, k, v, dtype="bfloat16", **self.options,
                return_stats=call == "with statistics", backward=call == "backward",
            )
            for call in calls
        )  # fmt: skip


def _square(name: str, b: int, hq: int, hkv: int, s: int, d: int, dv: int | None = None, **more: Any) -> Preset:
    return Preset(name, b, hq, hkv, s, s, d, dv or d, **more)


def _decode(name: str, b: int, skv: int) -> Preset:
    return Preset(name, b, 32, 8, 1, skv, 128, 128, directions=("forward",))


#: (name, query heads, key heads) of Llama 3.1's attention, and the lengths at which it is timed.
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
)


def chosen(names: Sequence[str] | None) -> list[Preset]:
    """The presets of these names, or, where there is none of a name, those whose names begin so; all for None.

    Raises:
        ValueError: there is neither.

    >>> [preset.name for preset in chosen(["decode", "llama-8b-2k"])]
    ['llama-8b-2k', 'decode-8k-batch-32', 'decode-32k-batch-1']
    """
    if names is None:
        return list(PRESETS)
    found: set[Preset] = set()
    for name in names:
        exact = [preset for preset in PRESETS if preset.name == name]
        some = exact or [preset for preset in PRESETS if preset.name.startswith(name)]
        if not some:
            raise ValueError(f"there is no preset {name!r}; --list shows them")
        found.update(some)
    return [preset for preset in PRESETS if preset in found]
