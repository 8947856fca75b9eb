"""Rectangles of queries and keys as calls: which part of each is visible, and the band of that part.

Member r holds one or two intervals of queries, and computes attention to the keys of the intervals of every member. A mask is a
band around a diagonal of the whole sequences; in the coordinates of a rectangle it is a band with other bounds. Queries and
keys that the band excludes are cropped, so that the bounds are never negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..problem.band import Band
from .shards import Interval


class Tile(NamedTuple):
    """A rectangle that one call computes.

    Attributes:
        rows: the range of queries in the member's array.
        keys: the range of keys in the array of keys.
        band: the band in the coordinates of the rectangle; None if every query attends to every key.
        first: the positions of the first query and of the first key in their sequences.
    """

    rows: tuple[int, int]
    keys: tuple[int, int]
    band: Band | None
    first: tuple[int, int]


def tile(rows: Interval, keys: Interval, diagonal: int, band: Band | None, *, aligned: bool = True) -> Tile | None:
    """The visible part of a rectangle; None if no query attends to a key.

    Args:
        rows, keys: the positions.
        diagonal: the key on the diagonal of query 0.
        band: the mask of the whole sequences.
        aligned: whether a band may be aligned to the bottom right, which is not possible with lengths of batch entries.

    >>> band = Band(right=0)                                 # causal
    >>> tile(Interval(2, 4, 0), Interval(0, 2, 0), 0, band)  # the keys are before the queries
    Tile(rows=(0, 2), keys=(0, 2), band=None, first=(2, 0))
    >>> tile(Interval(2, 4, 0), Interval(0, 8, 0), 0, band)
    Tile(rows=(0, 2), keys=(0, 4), band=Band(left=None, right=0, bottom_right=True), first=(2, 0))
    >>> tile(Interval(2, 4, 0), Interval(4, 8, 0), 0, band)
    """
    (a, e, row_offset), (c, f, key_offset) = rows, keys
    left, right = (None, None) if band is None else band[:2]
    for _ in range(2):  # fewer queries may need fewer keys
        low = c if left is None else max(c, a + diagonal - left)
        high = f if right is None else min(f, e + diagonal + right)
        if low >= high or a >= e:
            return None
        a = a if right is None else max(a, low - diagonal - right)
        e = e if left is None else min(e, high - diagonal + left)
    ranges = (row_offset + a - rows.start, row_offset + e - rows.start), (key_offset + low - c, key_offset + high - c)
    return Tile(*ranges, _local_band(e - a, high - low, a + diagonal - low, left, right, aligned), (a, low))


def _local_band(n: int, m: int, shift: int, left: int | None, right: int | None, aligned: bool) -> Band | None:
    """The band of n queries and m keys: query i attends to keys ``i + shift - left`` to ``i + shift + right``."""
    band = Band(left, right).moved(shift).simplified(n, m, lengths=False)
    if aligned and band and band.right == m - n and band.right > 0:  # the last query attends to the last key
        return band.moved(n - m)._replace(bottom_right=True)
    return band


def tiles(
    rows: Sequence[Interval],
    keys: Sequence[Interval],
    diagonal: int,
    band: Band | None,
    *,
    joined: bool,
    aligned: bool = True,
    cut: bool = False,
) -> list[Tile]:
    """The rectangles of a member's queries and some keys of one sequence.

    Args:
        rows, keys: the intervals, each adjacent to the next in its array.
        diagonal, band: as for :func:`tile`.
        joined: whether adjacent rectangles may be one call, which is then not at one position of the sequence.
        aligned: as for :func:`tile`.
        cut: whether the keys before the diagonal, to which every query attends, are a rectangle of their own. cuDNN's backward
            pass computes all blocks of a band that is aligned to the bottom right, also those that it excludes (9.19).
    """
    is_causal = band is not None and band[:2] == (None, 0)
    if joined and is_causal and not diagonal and [x[:2] for x in rows] == [x[:2] for x in keys] and rows:
        whole_rows, whole_keys = (Interval(0, sum(x.length for x in side), side[0].local) for side in (rows, keys))
        return [tile(whole_rows, whole_keys, 0, band)] if rows else []  # type: ignore[list-item]
    if cut and band is not None and band.left is None and band.right is not None:
        pairs = ((x, y) for x in rows for y in _cut(keys, x.start + diagonal + band.right))
        return [part for x, y in pairs if (part := tile(x, y, diagonal, band, aligned=aligned))]
    found = [[tile(x, y, diagonal, band, aligned=aligned) for y in keys] for x in rows]
    if joined and len(rows) == 2:
        for column in range(len(keys)):  # both intervals of queries with one interval of keys
            one, other = found[0][column], found[1][column]
            if one and other and not one.band and not other.band and one.keys == other.keys and one.rows[1] == other.rows[0]:
                found[0][column], found[1][column] = one._replace(rows=(one.rows[0], other.rows[1])), None
    if joined and len(keys) == 2:
        for row in found:  # one interval of queries, or both, with both intervals of keys
            one, other = row
            if one and other and not one.band and not other.band and one.rows == other.rows and one.keys[1] == other.keys[0]:
                row[:] = [one._replace(keys=(one.keys[0], other.keys[1])), None]
    return [part for row in found for part in row if part]


def _cut(intervals: Sequence[Interval], position: int) -> list[Interval]:
    """The intervals, of which the one that contains a position is cut there.

    >>> _cut([Interval(0, 8, 0)], 6)
    [Interval(start=0, stop=6, local=0), Interval(start=6, stop=8, local=6)]
    """
    found = []
    for start, stop, local in intervals:
        at = min(max(position, start), stop)
        found += [Interval(start, at, local), Interval(at, stop, local + at - start)]
    return [x for x in found if x.length]
