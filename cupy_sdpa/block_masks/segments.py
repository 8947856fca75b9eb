"""Masks whose rows are intervals, as segments: ranges of queries that attend to a range of keys, within a band.

Documents, chunks, prefixes and windows consist of segments, whose boundaries need not be multiples of the block size. cuDNN
computes a segment with its own masks, so such a mask needs no list of blocks. The segments are the sequences of one packed
call, or each is a call on slices of the arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..extend import Band
from .blocks import BLOCK
from .evaluate import KeyRanges

#: The largest number of calls on slices.
MAX_SLICES = 4


class KeyBound(NamedTuple):
    """One end of the keys of a segment's queries.

    Attributes:
        key: the first key of the segment, or its last key plus 1.
        fixed: whether every query attends up to that key.
        moves: whether every query attends up to that key or to the bound of the band, whichever comes first.
        exact: whether the rows so far determine the key; otherwise it is the largest possible one.
    """

    key: int
    fixed: bool
    moves: bool
    exact: bool


class Segment(NamedTuple):
    """Queries ``q0`` to ``q1``, exclusive, attend to the keys between two bounds."""

    q0: int
    q1: int
    first: KeyBound
    end: KeyBound


class Segments(NamedTuple):
    """The segments of one batch item, in the order of their queries. Other queries attend to no key.

    Attributes:
        segments: the segments.
        left, right: the bounds of the band: query i attends to keys ``i - left`` to ``i + right``. None if no bound moves.
    """

    segments: tuple[Segment, ...]
    left: int | None
    right: int | None


def find_segments(rows: KeyRanges, most: int) -> Segments | None:
    """Return the segments of a mask's rows; None if a row is not an interval, or for more than ``most`` segments."""
    first, end, count = rows
    used = count > 0
    if (end - first != count)[used].any():
        return None
    moving, index = used[:-1] & used[1:], np.arange(len(first))
    left = _distance((index - first)[:-1], moving & (np.diff(first) == 1))
    right = _distance((end - 1 - index)[:-1], moving & (np.diff(end) == 1))
    # in both bounds, larger numbers mean fewer keys, so that one function serves both
    lows = first.tolist(), None if left is None else (index - left).tolist()
    highs = (-end).tolist(), None if right is None else (-(index + right + 1)).tolist()
    found: list[Segment] = []
    begin, low, high = 0, None, None
    for i, exists in enumerate([*used.tolist(), False]):
        next_low, next_high = (_extended(low, i, *lows), _extended(high, i, *highs)) if exists else (None, None)
        if low is not None and high is not None and (next_low is None or next_high is None):
            found.append(Segment(begin, i, low, high._replace(key=-high.key)))
            if len(found) > most:
                return None
            low = high = None
            next_low, next_high = (_extended(None, i, *lows), _extended(None, i, *highs)) if exists else (None, None)
        if low is None:
            begin = i
        low, high = next_low, next_high
    return Segments(tuple(found), left, right)


def _distance(distance: NDArray[np.int64], moving: NDArray[np.bool_]) -> int | None:
    """Return the most frequent distance from the diagonal among rows whose bound moves with it; None without such rows."""
    values, counts = np.unique(distance[moving], return_counts=True)
    return int(values[counts.argmax()]) if len(values) else None


def _extended(side: KeyBound | None, i: int, bounds: list[int], band: list[int] | None) -> KeyBound | None:
    """Return a segment's bound with one more row: its key is ``bounds[i]``, the band's is ``band[i]``; None for no bound."""
    key = bounds[i]
    moves = band is not None and key >= band[i]
    clipped = band is not None and key > band[i]
    if side is None:
        return KeyBound(key, True, moves, not moves or clipped)
    fixed = side.fixed and key == side.key
    moves = moves and side.moves
    if moves and clipped:
        moves = side.key == key if side.exact else side.key >= key
        exact, known = True, key
    else:
        moves = moves and (side.key <= key or not side.exact)
        exact, known = side.exact, side.key if side.exact else min(side.key, key)
    if fixed:
        return KeyBound(key, True, moves, exact)
    return KeyBound(known, False, True, exact) if moves else None


def band_sides(entry: Segments, group: Sequence[Segment]) -> tuple[int | None, int | None] | None:
    """Return the sides ``(left, right)`` of the band that every segment of a group has; None if they differ."""
    sides: list[int | None] = []
    for name, side in (("first", entry.left), ("end", entry.right)):
        bounds = [getattr(segment, name) for segment in group]
        if all(bound.fixed for bound in bounds):
            sides.append(None)
        elif all(bound.moves for bound in bounds):
            sides.append(side)
        else:
            return None
    return sides[0], sides[1]


def local_band(segment: Segment, left: int | None, right: int | None, bottom_right: bool) -> Band | None:
    """Return a band in positions within a segment, from one of the corners.

    Raises:
        ValueError: the diagonal of the mask is outside of the segment.
    """
    if left is None and right is None:
        return None
    shift = segment.q1 - segment.end.key if bottom_right else segment.q0 - segment.first.key
    return Band(left, right, bottom_right).moved(shift)


def common_band(entries: Sequence[Segments]) -> tuple[bool, Band | None]:
    """Return whether all segments have one band in their own positions, and the band."""
    pairs = []
    for entry in entries:
        if (sides := band_sides(entry, entry.segments)) is None:
            return False, None
        pairs += [(segment, sides) for segment in entry.segments]
    for bottom_right in (False, True):
        try:
            found = {local_band(segment, *sides, bottom_right) for segment, sides in pairs}
        except ValueError:  # the diagonal of the mask is outside of a segment
            continue
        if len(found) <= 1:
            return True, next(iter(found), None)
    return False, None


def cost(entry: Segments) -> float:
    """Return the number of blocks that cuDNN computes, about: tiles of its kernels, without those outside of the bands."""
    total = 0
    for segment in entry.segments:
        for begin in range(segment.q0, segment.q1, BLOCK):
            end = min(begin + BLOCK, segment.q1)
            first = segment.first.key if segment.first.fixed else max(segment.first.key, begin - (entry.left or 0))
            last = segment.end.key if segment.end.fixed else min(segment.end.key, end + (entry.right or 0))
            total += max(0, -(-(last - first) // BLOCK))
    return total


class PackedSegments(NamedTuple):
    """Segments as packed sequences of flattened batch items: cumulative lengths, int32; maximum lengths; the band of all."""

    starts_q: NDArray[np.int32]
    starts_kv: NDArray[np.int32]
    longest_q: int
    longest_kv: int
    band: Band | None


def packed(entries: Sequence[Segments], sq: int, skv: int) -> PackedSegments | None:
    """Return the segments of all batch items as packed sequences; None if keys belong to several segments, or bands differ.

    Queries without keys, and keys without queries, between two segments are sequences of their own, which are not longer than
    the longest segment.
    """
    has_one, band = common_band(entries)
    if not has_one:
        return None
    moved = [
        (q0 + b * sq, q1 + b * sq, first.key + b * skv, end.key + b * skv)
        for b, entry in enumerate(entries)
        for q0, q1, first, end in entry.segments
    ]
    # a tile of cuDNN's kernels has BLOCK queries or keys, so shorter maximum lengths save nothing
    longest_q = max([BLOCK, *(q1 - q0 for q0, q1, _, _ in moved)])
    longest_kv = max([BLOCK, *(k1 - k0 for _, _, k0, k1 in moved)])
    starts = [(0, 0)]
    for q0, q1, k0, k1 in [*moved, (len(entries) * sq, len(entries) * sq, len(entries) * skv, len(entries) * skv)]:
        before_q, before_k = starts[-1]
        if k0 < before_k:
            return None
        starts += [(q, before_k) for q in (*range(before_q, q0, longest_q), q0)]
        starts += [(q0, k) for k in (*range(before_k, k0, longest_kv), k0)]
        starts.append((q1, k1))
    unique = list(dict.fromkeys(starts))
    q, kv = (np.array([pair[i] for pair in unique], np.int32) for i in (0, 1))
    return PackedSegments(q, kv, longest_q, longest_kv, band)


class SegmentSlice(NamedTuple):
    """A segment as a call on slices of the arrays: queries ``q0`` to ``q1``, keys ``k0`` to ``k1``, with a band."""

    q0: int
    q1: int
    k0: int
    k1: int
    band: Band | None


def segment_slices(entry: Segments) -> list[SegmentSlice] | None:
    """Return the segments of a batch item as calls on slices; None if there are too many, or a segment has no band.

    None also for a segment of one query and one key: cuDNN cannot read the positions, which are integers, in such a call.
    """
    found = []
    if len(entry.segments) > MAX_SLICES:
        return None
    for segment in entry.segments:
        if segment.q1 - segment.q0 == segment.end.key - segment.first.key == 1:
            return None
        sides = band_sides(entry, [segment])
        assert sides  # the bands of one segment do not differ
        for bottom_right in (False, True):
            try:
                band = local_band(segment, *sides, bottom_right)
            except ValueError:
                continue
            found.append(SegmentSlice(segment.q0, segment.q1, segment.first.key, segment.end.key, band))
            break
        else:
            return None
    return found


def gradient_slices(parts: Sequence[SegmentSlice]) -> list[SegmentSlice]:
    """Return the slices of the backward pass, with diagonals from the top left wherever possible.

    cuDNN's backward kernels compute all tiles of a mask from the bottom right. The first keys of such a slice, to which all
    its queries attend, and the other keys are separate slices; the log-sum-exp covers all keys, so nothing is merged. Slices of
    consecutive queries with the same keys become one.
    """
    found: list[SegmentSlice] = []
    for part in parts:
        q0, q1, k0, k1, band = part
        common = (k1 - k0) - (q1 - q0)
        pieces = [part]
        several = q1 - q0 > 1  # the last keys of a single query would be one key
        if several and band is not None and band.bottom_right and band.left is None and band.right is not None and common >= 0:
            split = k0 + common
            pieces = [SegmentSlice(q0, q1, k0, split, None)] * (common > 0)
            pieces.append(SegmentSlice(q0, q1, split, k1, Band(None, band.right)))
        for piece in pieces:
            before = next((x for x in found if x[1:] == (piece.q0, piece.k0, piece.k1, None) and piece.band is None), None)
            if before is None:
                found.append(piece)
            else:
                found[found.index(before)] = before._replace(q1=piece.q1)
    return found
