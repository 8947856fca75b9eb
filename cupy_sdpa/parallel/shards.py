"""Which positions of a sequence each member holds: the zigzag order.

A sequence is cut into 2 P chunks for P members. Member r holds chunk r and chunk 2 P - 1 - r: with a causal mask every member
then has the same work, because an early chunk attends to few keys and a late one to many.

Source: Zhu 2024, "ring-flash-attention" (zigzag order); NVIDIA's Transformer Engine, "dual chunk swap".
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray  # slow to import


class Interval(NamedTuple):
    """Consecutive positions of a sequence that a member holds; ``local`` is where the first one is in the member's array."""

    start: int
    stop: int
    local: int

    @property
    def length(self) -> int:
        """The number of positions."""
        return self.stop - self.start


def boundaries(length: int, size: int) -> list[int]:
    """Return the starts of the 2 P chunks of a sequence, and its end. The lengths of chunks differ by at most one.

    >>> boundaries(8, 2), boundaries(7, 2), boundaries(1, 2)
    ([0, 2, 4, 6, 8], [0, 1, 3, 5, 7], [0, 0, 0, 0, 1])
    """
    return [length * i // (2 * size) for i in range(2 * size + 1)]


@dataclass(frozen=True)
class ShardLayout:
    """The positions of all members, along the queries or along the keys.

    Attributes:
        lengths: the length of each sequence; a single one for dense arrays, whose batch items are cut alike.
        size: the number of members.
        packed: whether the arrays contain several sequences one after another.
    """

    lengths: tuple[int, ...]
    size: int
    packed: bool = False

    @property
    def total(self) -> int:
        """The number of positions of all sequences."""
        return sum(self.lengths)

    @functools.cache  # noqa: B019 (layouts are few and live in the cache of configurations)
    def intervals(self, rank: int) -> tuple[tuple[Interval, ...], ...]:
        """For every sequence the one or two intervals that a member holds, without empty ones."""
        found: list[tuple[Interval, ...]] = []
        local = 0
        for length in self.lengths:
            cuts = boundaries(length, self.size)
            own: list[Interval] = []
            for chunk in (rank, 2 * self.size - 1 - rank):
                start, stop = cuts[chunk], cuts[chunk + 1]
                if own and start == own[-1].stop:
                    own[-1] = own[-1]._replace(stop=stop)
                elif stop > start:
                    own.append(Interval(start, stop, local))
                local += stop - start
            found.append(tuple(own))
        return tuple(found)

    @property
    def whole(self) -> list[tuple[Interval, ...]]:
        """The intervals of an array of all positions."""
        return [(Interval(0, n, start),) if n else () for n, start in zip(self.lengths, self.starts, strict=True)]

    def share(self, rank: int) -> int:
        """Return the number of positions that a member holds."""
        return sum(interval.length for own in self.intervals(rank) for interval in own)

    @property
    def starts(self) -> list[int]:
        """The start of every sequence among all positions."""
        return [0, *np.cumsum(self.lengths).tolist()][:-1]

    def positions(self, rank: int) -> NDArray[np.int64]:
        """Return the positions of a member's elements within their sequences."""
        parts = [np.arange(interval.start, interval.stop) for own in self.intervals(rank) for interval in own]
        return np.concatenate(parts, dtype=np.int64) if parts else np.zeros(0, np.int64)

    def slices(self, rank: int) -> list[tuple[slice, slice]]:
        """Return the member's elements: pairs of slices of the local array and of the array of all positions."""
        return [
            (slice(interval.local, interval.local + interval.length), slice(start + interval.start, start + interval.stop))
            for start, own in zip(self.starts, self.intervals(rank), strict=True)
            for interval in own
        ]
