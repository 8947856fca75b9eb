"""Which sequence owns which pages of a key/value cache: a free list and numbers of owners, on the host."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray  # slow to import


class OutOfPages(MemoryError):
    """A key/value cache has fewer free pages than a step needs. The cache is unchanged; the message gives the fix."""


class Entry(NamedTuple):
    """A new entry of the page table: the page at a place of a sequence; 0 after the last page."""

    sequence: int
    place: int
    page: int


class Change(NamedTuple):
    """New values of :class:`Pages`. To make a change twice, or after a part of it, is the same as to make it once.

    Attributes:
        lengths, room: of all sequences.
        by_sequence: the pages of some sequences.
        owners: the number of owners of some pages.
        kept: the number of free pages that remain free.
        freed: the free pages after them.
    """

    lengths: NDArray[np.int64]
    room: NDArray[np.int64]
    by_sequence: dict[int, list[int]]
    owners: dict[int, int]
    kept: int
    freed: list[int]


class Pages:
    """The pages of each sequence. A page may have several owners; only pages with one owner are written.

    A sequence of ``n`` tokens owns ``ceil(n / size)`` pages. All owners of a page have the same rows of it: a sequence gets a
    copy before it adds or removes some of them. Methods compute a :class:`Change`, and :meth:`make` makes it.

    Attributes:
        free: the free pages; the last one is taken first.
        owners: the number of owners of each page.
        by_sequence: the pages of each sequence, in order.
        lengths: int64 ``(B,)``, the length of each sequence.
        room: int64 ``(B,)``, the length up to which a sequence can grow without a new page or a copy; in doubt the present one.
    """

    def __init__(self, pages: int, size: int, batch: int, max_length: int) -> None:
        self.size, self.max_length = size, max_length
        self.free = list(range(pages))  # page 0, which unused entries of the table contain, is taken last
        self.owners = [0] * pages
        self.by_sequence: list[list[int]] = [[] for _ in range(batch)]
        self.lengths = np.zeros(batch, np.int64)
        self.room: NDArray[np.int64] = np.zeros(batch, np.int64)

    def make(self, change: Change) -> None:
        """Make a change."""
        for b, pages in change.by_sequence.items():
            self.by_sequence[b] = pages
        for page, number in change.owners.items():
            self.owners[page] = number
        self.free[change.kept :] = change.freed
        self.lengths, self.room = change.lengths, change.room

    def unchanged(self) -> Change:
        """Return the change to the present values."""
        return Change(self.lengths, self.room, {}, {}, len(self.free), [])

    def inverse(self, change: Change) -> Change:
        """Return the change back to the present values."""
        by_sequence = {b: self.by_sequence[b] for b in change.by_sequence}
        owners = {page: self.owners[page] for page in change.owners}
        return Change(self.lengths, self.room, by_sequence, owners, change.kept, self.free[change.kept :])

    def entries(self, change: Change) -> list[Entry]:
        """Return the entries of the table that a change modifies."""
        found = []
        for b, pages in change.by_sequence.items():
            before = self.by_sequence[b]
            first = max(0, min(len(before), len(pages)) - 1)  # the last common page may be a copy
            first = first if before[:first] == pages[:first] else 0
            both = itertools.zip_longest(before[first:], pages[first:], fillvalue=0)
            found += [Entry(b, place, new) for place, (old, new) in enumerate(both, first) if new != old]
        return found

    def extend(self, counts: NDArray[np.int64]) -> tuple[Change, list[tuple[int, int]]]:
        """Lengthen every sequence by its count; with the copies of shared pages, as pairs of pages (from, to).

        ValueError if a sequence would exceed the maximum length, OutOfPages if not enough pages are free.
        """
        beyond = counts > self.room - self.lengths
        if not beyond.any():
            return self.unchanged()._replace(lengths=self.lengths + counts), []
        copied, new = self._needs(np.flatnonzero(beyond).tolist(), counts)
        kept = len(self.free) - len(copied) - sum(number for _, number in new)
        taken = iter(self.free[kept:][::-1])
        owners = dict.fromkeys(self.free[kept:], 1)
        by_sequence = {b: list(self.by_sequence[b]) for b, _ in new}
        room, copies = self.room.copy(), []
        for b in copied:
            shared, own = by_sequence[b][-1], next(taken)
            owners[shared] = owners.get(shared, self.owners[shared]) - 1
            by_sequence[b][-1] = own
            copies.append((shared, own))
        for b, number in new:
            by_sequence[b] += itertools.islice(taken, number)
            room[b] = min(len(by_sequence[b]) * self.size, self.max_length)
        return Change(self.lengths + counts, room, by_sequence, owners, kept, []), copies

    def _needs(self, growing: list[int], counts: NDArray[np.int64]) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the sequences whose last page is copied, and the number of new pages of every growing sequence."""
        copied, new = [], []
        owners: dict[int, int] = {}  # of each page that several sequences will write, after the copies so far
        for b in growing:
            length, count = int(self.lengths[b]), int(counts[b])
            if count > self.max_length - length:
                raise ValueError(
                    f"sequence {b} has {length} tokens and gets {count}, but max_length is {self.max_length}; "
                    "truncate or release it, or create the cache with a larger max_length= (by default, larger pages=)"
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

    def fork(self, source: int, target: int) -> Change:
        """Make an empty sequence an owner of all pages of another."""
        pages, lengths, room = self.by_sequence[source], self.lengths.copy(), self.room.copy()
        lengths[target] = room[source] = room[target] = self.lengths[source]
        owners = {page: self.owners[page] + 1 for page in pages}
        return Change(lengths, room, {target: list(pages)}, owners, len(self.free), [])

    def reorder(self, order: list[int]) -> Change:
        """Make sequence b an owner of the pages of sequence ``order[b]`` instead of its own; pages without owners are free."""
        by_sequence = {b: list(self.by_sequence[source]) for b, source in enumerate(order) if b != source}
        owners: dict[int, int] = {}
        for b, pages in by_sequence.items():
            for before, after in itertools.zip_longest(self.by_sequence[b], pages):
                if before != after:
                    for page, more in ((before, -1), (after, 1)):
                        if page is not None:
                            owners[page] = owners.get(page, self.owners[page]) + more
        lengths, uses = self.lengths[order], np.bincount(order, minlength=len(order))
        room = np.where(uses[order] > 1, lengths, self.room[order])
        freed = [page for page, number in owners.items() if not number]
        return Change(lengths, room, by_sequence, owners, len(self.free), freed)

    def shorten(self, lengths: NDArray[np.int64]) -> Change:
        """Give sequences the lengths, which are at most the present ones, and free the pages without owners.

        No page that loses only some of its rows is shared; :meth:`keep` copies these.
        """
        shorter, room = np.flatnonzero(lengths < self.lengths).tolist(), self.room.copy()
        by_sequence: dict[int, list[int]] = {}
        owners: dict[int, int] = {}
        freed = []
        for b in shorter:
            pages, kept = self.by_sequence[b], -(-int(lengths[b]) // self.size)
            by_sequence[b] = pages[:kept]
            for page in pages[kept:]:
                owners[page] = owners.get(page, self.owners[page]) - 1
                if not owners[page]:
                    freed.append(page)
            room[b] = min(kept * self.size, self.max_length)
        return Change(lengths, room, by_sequence, owners, len(self.free), freed)

    def keep(
        self, b: int, start: int, path: list[int], name: str = "keep()"
    ) -> tuple[Change, list[Entry], list[tuple[int, int]]]:
        """Keep the tokens ``path`` of a sequence, counted from the position ``start``, ascending; they become contiguous.

        With the change, the copies of shared pages that will be written, as new entries of the table; and the moved tokens as
        pairs of rows (from, to). Row r of page p is number ``p * size + r``. OutOfPages, which names the caller, if not enough
        pages are free.
        """
        lengths = self.lengths.copy()
        lengths[b] = start + len(path)
        change = self.shorten(lengths)
        if not change.by_sequence:
            return change, [], []
        moved = [(start + old, start + new) for new, old in enumerate(path) if old != new]
        size, before, after, owners = self.size, self.by_sequence[b], list(change.by_sequence[b]), dict(change.owners)
        first = moved[0][1] if moved else int(lengths[b])  # the first row that is written, also with 0
        copied = [
            place for place in range(first // size, len(after)) if owners.get(after[place], self.owners[after[place]]) > 1
        ]
        if len(copied) > len(self.free):
            raise OutOfPages(
                f"{name} writes to {len(copied)} pages that sequence {b} shares, but {len(self.free)} of {len(self.owners)} "
                f"are free to copy them; release sequences, keep a multiple of {size} tokens, or create the cache with more "
                "pages="
            )
        kept = len(self.free) - len(copied)
        for place, own in zip(copied, self.free[kept:], strict=True):
            owners[after[place]] = owners.get(after[place], self.owners[after[place]]) - 1
            owners[own], after[place] = 1, own
        rows = [(before[old // size] * size + old % size, after[new // size] * size + new % size) for old, new in moved]
        change = change._replace(by_sequence={b: after}, owners=owners, kept=kept)
        return change, [Entry(b, place, after[place]) for place in copied], rows

    def rest(self, lengths: NDArray[np.int64], ends: NDArray[np.int64], change: Change) -> list[tuple[int, int]]:
        """Return the rows for the positions from ``lengths`` to ``ends`` in the last pages of sequences after a change.

        As pairs of the first row and the number of rows.
        """
        spans = []
        for b in np.flatnonzero((lengths < ends) & (lengths % self.size > 0)).tolist():
            place, row = divmod(int(lengths[b]), self.size)
            page = change.by_sequence.get(b, self.by_sequence[b])[place]
            spans.append((page * self.size + row, min(self.size - row, int(ends[b] - lengths[b]))))
        return spans

    def shared_prefix(self) -> int:
        """Return the number of tokens at the start that all sequences with tokens share through the same full pages."""
        sequences = zip(self.by_sequence, self.lengths.tolist(), strict=True)
        full = [pages[: length // self.size] for pages, length in sequences if length]
        places: Any = zip(*full, strict=False)
        return self.size * sum(1 for _ in itertools.takewhile(lambda pages: len(set(pages)) == 1, places))
