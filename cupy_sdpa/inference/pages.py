"""Which sequence owns which pages of a key/value cache: a free list and numbers of owners, on the host."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import OutOfPages

if TYPE_CHECKING:
    from numpy.typing import NDArray  # slow to import


class Entry(NamedTuple):
    """A new entry of the page table: the page at a place of a sequence."""

    sequence: int
    place: int
    page: int


class Pages:
    """The pages of each sequence. A page may have several owners; only pages with one owner are written.

    A sequence of ``n`` tokens owns ``ceil(n / size)`` pages.

    Args:
        pages: the number of pages.
        size: tokens per page.
        batch: B, the number of sequences.
        max_length: the maximum length of a sequence.

    Attributes:
        free: the free pages; the last one is taken first.
        owners: the number of owners of each page.
        by_sequence: the pages of each sequence, in order.
        lengths: int64 ``(B,)``, the length of each sequence.
    """

    def __init__(self, pages: int, size: int, batch: int, max_length: int) -> None:
        self.size, self.max_length = size, max_length
        self.free = list(range(pages))  # page 0, which unused entries of the table contain, is taken last
        self.owners = [0] * pages
        self.by_sequence: list[list[int]] = [[] for _ in range(batch)]
        self.lengths = np.zeros(batch, np.int64)
        # The length up to which a sequence can grow without a new page or a copy; in doubt the present length.
        self._room: NDArray[np.int64] = np.zeros(batch, np.int64)

    def __repr__(self) -> str:
        return f"<Pages: {len(self.free)} of {len(self.owners)} free>"

    def extend(self, counts: NDArray[np.int64]) -> tuple[list[tuple[int, int]], list[Entry]]:
        """Lengthen every sequence by its count.

        Returns:
            The copies of shared pages, as pairs of pages (from, to); and the new entries of the table.

        Raises:
            ValueError: a sequence would exceed the maximum length.
            OutOfPages: not enough pages are free. Nothing is changed in either case.
        """
        copies: list[tuple[int, int]] = []
        entries: list[Entry] = []
        beyond = counts > self._room - self.lengths
        if beyond.any():
            growing = np.flatnonzero(beyond).tolist()
            copied, new = self._needs(growing, counts)
            for b in copied:
                shared, own = self.by_sequence[b][-1], self._take()
                self.owners[shared] -= 1
                self.by_sequence[b][-1] = own
                copies.append((shared, own))
                entries.append(Entry(b, len(self.by_sequence[b]) - 1, own))
            for b, number in new:
                pages = [self._take() for _ in range(number)]
                entries += [Entry(b, place, page) for place, page in enumerate(pages, len(self.by_sequence[b]))]
                self.by_sequence[b] += pages
                self._room[b] = min(len(self.by_sequence[b]) * self.size, self.max_length)
        self.lengths += counts
        return copies, entries

    def _needs(self, growing: list[int], counts: NDArray[np.int64]) -> tuple[list[int], list[tuple[int, int]]]:
        """The sequences whose last page is copied, and the number of new pages of every growing sequence."""
        copied, new = [], []
        owners: dict[int, int] = {}  # of each page that several sequences will write, after the copies so far
        for b in growing:
            length, count = int(self.lengths[b]), int(counts[b])
            if count > self.max_length - length:
                raise ValueError(
                    f"sequence {b} has {length} tokens and gets {count}, but max_length is {self.max_length}; "
                    "truncate or release it, or create the cache with a larger max_length= or, as its default, larger pages="
                )
            if length % self.size:
                page = self.by_sequence[b][-1]
                number = owners.get(page, self.owners[page])
                if number > 1:
                    copied.append(b)
                    owners[page] = number - 1
            new.append((b, -(-(length + count) // self.size) - len(self.by_sequence[b])))
        needed = len(copied) + sum(number for _, number in new)
        if needed > len(self.free):
            raise OutOfPages(
                f"the step needs {needed} pages, but {len(self.free)} of {len(self.owners)} are free; "
                f"release sequences, or create the cache with more pages="
            )
        return copied, new

    def _take(self) -> int:
        page = self.free.pop()
        self.owners[page] = 1
        return page

    def fork(self, source: int, target: int) -> list[Entry]:
        """Make an empty sequence an owner of all pages of another; returns the new entries of the table."""
        self.by_sequence[target] = list(self.by_sequence[source])
        for page in self.by_sequence[target]:
            self.owners[page] += 1
        self.lengths[target] = self._room[source] = self._room[target] = self.lengths[source]
        return [Entry(target, place, page) for place, page in enumerate(self.by_sequence[target])]

    def truncate(self, sequence: int, length: int) -> list[Entry]:
        """Shorten a sequence and free the pages without owners; returns the entries of the table to clear, with page 0."""
        pages = self.by_sequence[sequence]
        kept, before = -(-length // self.size), len(pages)
        for page in pages[kept:]:
            self.owners[page] -= 1
            if not self.owners[page]:
                self.free.append(page)
        del pages[kept:]
        shared = length % self.size and self.owners[pages[-1]] > 1
        self.lengths[sequence] = length
        self._room[sequence] = length if shared else min(kept * self.size, self.max_length)
        return [Entry(sequence, place, 0) for place in range(kept, before)]

    def shared_prefix(self) -> int:
        """The number of tokens at the start that all sequences with tokens share through the same full pages."""
        sequences = zip(self.by_sequence, self.lengths.tolist(), strict=True)
        full = [pages[: length // self.size] for pages, length in sequences if length]
        places: Any = zip(*full, strict=False)
        return self.size * sum(1 for _ in itertools.takewhile(lambda pages: len(set(pages)) == 1, places))
