"""The problems: packed sequences of several lengths, and random arrays for them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from ..common.device import random_normal

DIRECTIONS = ("forward", "backward")


class Problem(NamedTuple):
    """Packed sequences.

    Attributes:
        name: the name in the file.
        lengths: the lengths of the sequences, for queries and keys.
        hq, hkv, d: query heads, key/value heads, head dim.
        causal: causal mask aligned to the top left of each sequence.
        timed: whether it is timed, or only checked.
    """

    name: str
    lengths: tuple[int, ...]
    hq: int
    hkv: int
    d: int
    causal: bool
    timed: bool = True

    @property
    def total(self) -> int:
        """The total length."""
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        """The length of the longest sequence."""
        return max(self.lengths)

    @property
    def starts(self) -> list[int]:
        """The start of each sequence, and the end of the last one."""
        return [sum(self.lengths[:b]) for b in range(len(self.lengths) + 1)]

    def operations(self, direction: str) -> float:
        """Useful operations: two matrix products forward, five backward."""
        products = 2 if direction == "forward" else 5
        pairs = sum(s**2 for s in self.lengths) / (2 if self.causal else 1)
        return 2 * self.hq * pairs * products * self.d


def mixed(batch: int, shortest: int, longest: int) -> tuple[int, ...]:
    """Random lengths, the same in every run."""
    return tuple(int(s) for s in np.random.default_rng(batch).integers(shortest, longest, batch, endpoint=True))


LONG = (8192 - 1, 8192 - 333, 8192 - 1027, 8192 - 75)
PROBLEMS = [
    Problem("8 of 512 to 4096 causal", mixed(8, 512, 4096), 32, 8, 128, True),
    Problem("8 of 512 to 4096", mixed(8, 512, 4096), 32, 8, 128, False),
    Problem("16 of 1024 to 2048 64 heads causal", mixed(16, 1024, 2048), 64, 8, 128, True),
    Problem("4 near 8192 causal", LONG, 32, 8, 128, True),
    Problem("32 of 128 to 1024 d64 causal", mixed(32, 128, 1024), 16, 16, 64, True),
    Problem("empty ones among 5 causal", (700, 0, 1333, 64, 0), 8, 2, 128, True, timed=False),
]


class Inputs:
    """Random packed arrays ``(head_dim, heads, total)``, and PyTorch tensors ``(total, heads, head_dim)`` on their memory."""

    def __init__(self, problem: Problem) -> None:
        heads = {"q": problem.hq, "k": problem.hkv, "v": problem.hkv, "dout": problem.hq}
        self.arrays = {name: random_normal(problem.d, h, problem.total) for name, h in heads.items()}
        self.q, self.k, self.v, self.dout = (packed_to_torch(a) for a in self.arrays.values())


def packed_to_torch(array: Any) -> Any:
    """A tensor ``(total, heads, head_dim)`` on the memory of a packed array."""
    return torch.from_dlpack(array.T)
