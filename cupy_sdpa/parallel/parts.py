"""The calls that a member makes: which queries and keys each one computes.

Member r holds one or two intervals of queries, and computes attention to the keys of the intervals of every member. A mask is a
band around a diagonal of the whole sequences; in the coordinates of a rectangle it is a band with other bounds. Queries and
keys that the band excludes are cropped, so that the bounds are never negative.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..extend import Band, Builder, Constant, View
from .shards import Interval, ShardLayout


class CallTile(NamedTuple):
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


def tile(rows: Interval, keys: Interval, diagonal: int, band: Band | None, *, aligned: bool = True) -> CallTile | None:
    """Return the visible part of a rectangle; None if no query attends to a key.

    Args:
        rows, keys: the positions.
        diagonal: the key on the diagonal of query 0.
        band: the mask of the whole sequences.
        aligned: whether a band may be aligned to the bottom right, which is not possible with lengths of batch items.

    >>> band = Band(right=0)                                 # causal
    >>> tile(Interval(2, 4, 0), Interval(0, 2, 0), 0, band)  # the keys are before the queries
    CallTile(rows=(0, 2), keys=(0, 2), band=None, first=(2, 0))
    >>> tile(Interval(2, 4, 0), Interval(0, 8, 0), 0, band)
    CallTile(rows=(0, 2), keys=(0, 4), band=Band(left=None, right=0, bottom_right=True), first=(2, 0))
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
    return CallTile(*ranges, _local_band(e - a, high - low, a + diagonal - low, left, right, aligned), (a, low))


def _local_band(n: int, m: int, shift: int, left: int | None, right: int | None, aligned: bool) -> Band | None:
    """Return the band of n queries and m keys: query i attends to keys ``i + shift - left`` to ``i + shift + right``."""
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
) -> list[CallTile]:
    """Return the rectangles of a member's queries and some keys of one sequence.

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
    """Return the intervals, of which the one that contains a position is cut there.

    >>> _cut([Interval(0, 8, 0)], 6)
    [Interval(start=0, stop=6, local=0), Interval(start=6, stop=8, local=6)]
    """
    found = []
    for start, stop, local in intervals:
        at = min(max(position, start), stop)
        found += [Interval(start, at, local), Interval(at, stop, local + at - start)]
    return [x for x in found if x.length]


class Selection:
    """Some positions of a member's array: a range, or indices in increasing order; made of ranges in increasing order."""

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        joined: list[tuple[int, int]] = []
        for start, stop in ranges:
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], stop)
            elif stop > start:
                joined.append((start, stop))
        self.ranges = joined
        self.length = sum(stop - start for start, stop in joined)

    def of(self, builder: Builder, x: View, axis: int) -> View:
        """Return an array's elements along an axis: a view for a range, otherwise a copy, which needs the last axis."""
        if len(self.ranges) <= 1:
            return self._range(x, axis)
        target = builder.temporary((*x.shape[:-1], self.length), x.dtype)
        builder.run(copy_positions, target, x, builder.constant(self._indices, keep=True), writes=(target,))
        return target

    def write(self, builder: Builder, target: View, x: View, axis: int) -> None:
        """Write elements into an array along an axis."""
        if len(self.ranges) <= 1:
            builder.copy_part(self._range(target, axis), x)
        else:
            builder.run(put, target, x, builder.constant(self._indices, keep=True), writes=(target,))

    def add(self, builder: Builder, total: View, x: View, axis: int) -> None:
        """Add elements to a float32 or float64 array along an axis."""
        if len(self.ranges) <= 1:
            builder.add(self._range(total, axis), x)
        else:
            builder.run(add_at, total, x, builder.constant(self._indices, keep=True), writes=(total,))

    def _range(self, x: View, axis: int) -> View:
        start, stop = self.ranges[0] if self.ranges else (0, 0)
        return x if stop - start == x.shape[axis] else x[(*(slice(None),) * axis, slice(start, stop))]

    @functools.cached_property
    def _indices(self) -> Constant:
        return Constant(np.concatenate([np.arange(*pair) for pair in self.ranges]))


# Steps; the positions are the last axis


def copy_positions(target: Any, x: Any, indices: Any) -> None:
    """Copy the elements at some positions."""
    as_bits(target).T[...] = as_bits(x).T[indices]


def put(target: Any, x: Any, indices: Any) -> None:
    """Write elements to some positions."""
    as_bits(target).T[indices] = as_bits(x).T


def add_at(total: Any, x: Any, indices: Any) -> None:
    """Add elements to those at some positions, none of which occurs twice."""
    total.T[indices] += x.T.astype(total.dtype)


def as_bits(x: Any) -> Any:
    """Return a view of an array of 2 bytes per element as integers, because not all of CuPy's functions support bfloat16."""
    return x.view(np.uint16) if x.dtype.itemsize == 2 else x


@dataclass
class Part:
    """One call.

    Attributes:
        rows, keys: the queries, in the member's array, and the keys, in the array of keys.
        band: the mask, in the coordinates of the call; None if every query attends to every key.
        first: the positions of the first query and key in their sequence.
        sequence: the only sequence of the call; None for all sequences in ``lengths``, or for dense arrays.
        diagonal: the key on the diagonal of query 0 of the sequence.
        lengths: the numbers of queries and keys of every packed sequence of the call; None for dense arrays.
        buffer: the index of the partial result that the rows are written to; parts of different rows share one.
    """

    rows: Selection
    keys: Selection
    band: Band | None
    first: tuple[int, int]
    sequence: int | None
    diagonal: int
    lengths: tuple[tuple[int, int], ...] | None
    buffer: int = 0

    def packing(self, builder: Builder) -> dict[str, Any]:
        """Return the options that describe packed sequences."""
        if self.lengths is None:
            return {}
        offsets = {name: builder.constant(starts, keep=True) for name, starts in self._offsets.items()}
        return {**offsets, **{f"max_seqlen_{side}": max(of, default=0) for side, of in self._sides.items()}}

    @property
    def _sides(self) -> dict[str, list[int]]:
        """The numbers of queries and keys of every packed sequence."""
        lengths = self.lengths or ()
        return {"q": [n for n, _ in lengths], "kv": [m for _, m in lengths]}

    @functools.cached_property
    def _offsets(self) -> dict[str, Constant]:
        return {f"cu_seqlens_{side}": Constant(np.cumsum([0, *of], dtype=np.int32)) for side, of in self._sides.items()}


def call_parts(
    queries: ShardLayout,
    rank: int,
    keys: Sequence[Sequence[Interval]],
    diagonals: Sequence[int],
    band: Band | None,
    *,
    positional: bool,
    aligned: bool,
    cut: bool = False,
) -> list[Part]:
    """Return the calls for a member's queries and some keys, which are intervals for every sequence.

    An option that is ``positional`` needs calls of one rectangle of one sequence each. For the other arguments
    see :func:`tiles`.
    """
    groups: dict[Any, list[tuple[int, CallTile]]] = {}
    for b, (rows, own, diagonal) in enumerate(zip(queries.intervals(rank), keys, diagonals, strict=True)):
        for tile in tiles(rows, own, diagonal, band, joined=not positional, aligned=aligned, cut=cut):
            key = tile.band if queries.packed and not positional else (b, tile.first)
            groups.setdefault(key, []).append((b, tile))
    made = []
    for found in groups.values():
        for batch in _without_repeats(found) if queries.packed else [[x] for x in found]:
            (b, tile), *_ = batch
            made.append(
                Part(
                    Selection([x.rows for _, x in batch]),
                    Selection([x.keys for _, x in batch]),
                    tile.band,
                    tile.first,
                    b if positional and queries.packed else None,
                    diagonals[b],
                    tuple((x.rows[1] - x.rows[0], x.keys[1] - x.keys[0]) for _, x in batch) if queries.packed else None,
                )
            )
    return made


def _without_repeats(found: Sequence[tuple[int, CallTile]]) -> list[list[tuple[int, CallTile]]]:
    """Split packed tiles so that the ranges of queries and of keys increase and do not overlap within each list."""
    lists: list[list[tuple[int, CallTile]]] = []
    for b, tile in found:
        for some in lists:
            _, last = some[-1]
            if last.rows[1] <= tile.rows[0] and last.keys[1] <= tile.keys[0]:
                some.append((b, tile))
                break
        else:
            lists.append([(b, tile)])
    return lists


def share_buffers(made: Sequence[Part]) -> None:
    """Give every part the index of a partial result; parts with disjoint queries share one."""
    covered: list[list[tuple[int, int]]] = []
    for part in made:
        free = (
            index
            for index, ranges in enumerate(covered)
            if all(a >= stop or e <= start for a, e in part.rows.ranges for start, stop in ranges)
        )
        part.buffer = next(free, len(covered))
        if part.buffer == len(covered):
            covered.append([])
        covered[part.buffer] += part.rows.ranges
