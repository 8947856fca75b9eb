"""The calls that a member makes: which queries and keys each one computes, and how their results are combined."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..attention import attention
from ..boundary.layouts import named
from ..helpers import merge_unchecked
from ..kernels.merge import accumulate
from ..problem.band import Band
from ..problem.problem import row_stats_shape
from ..programs.passes import attend_backward, blocks_of
from ..programs.steps import Constant
from ..runtime import cupy_runtime, memory
from .channel import copy
from .shards import Interval, Layout
from .tile_counts import Tile, tiles


class Selection:
    """Some positions of a member's array: a range, or indices in increasing order.

    Args:
        ranges: ranges of positions, in increasing order.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        joined: list[tuple[int, int]] = []
        for start, stop in ranges:
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], stop)
            elif stop > start:
                joined.append((start, stop))
        self.ranges = joined
        self.length = sum(stop - start for start, stop in joined)

    def of(self, x: Any, axis: int) -> Any:
        """The elements of an array along an axis: a view of a range, else a copy, for which the axis must be the last one."""
        if len(self.ranges) <= 1:
            start, stop = self.ranges[0] if self.ranges else (0, 0)
            return x if stop - start == x.shape[axis] else x[(*(slice(None),) * axis, slice(start, stop))]
        return as_bits(x).T[self._index(x)].T.view(x.dtype)

    def write(self, target: Any, x: Any, axis: int) -> None:
        """Write elements into an array along an axis."""
        if len(self.ranges) <= 1:
            copy(self.of(target, axis), x)
        else:
            as_bits(target).T[self._index(target)] = as_bits(x).T

    def add(self, total: Any, x: Any, axis: int) -> None:
        """Add elements to a float32 or float64 array along an axis."""
        if len(self.ranges) <= 1:
            accumulate(self.of(total, axis), x)
        else:
            total.T[self._index(total)] += x.T.astype(total.dtype)

    def _index(self, x: Any) -> Any:
        """The indices, on the device of an array."""
        return self._indices.on_device() if cupy_runtime.is_array(x) else self._indices.array

    @functools.cached_property
    def _indices(self) -> Constant:
        return Constant(np.concatenate([np.arange(*pair) for pair in self.ranges]))


def as_bits(x: Any) -> Any:
    """A view of an array of 2 bytes per element as integers, because not all of CuPy's functions support bfloat16."""
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
        known: the options of the call by device, if they do not depend on the caller's arrays.
    """

    rows: Selection
    keys: Selection
    band: Band | None
    first: tuple[int, int]
    sequence: int | None
    diagonal: int
    lengths: tuple[tuple[int, int], ...] | None
    buffer: int = 0
    known: dict[int | None, dict[str, Any]] = field(default_factory=dict, repr=False)

    def packing(self, like: Any) -> dict[str, Any]:
        """The options that describe packed sequences."""
        if self.lengths is None:
            return {}
        on_gpu = cupy_runtime.is_array(like)
        offsets = {name: starts.on_device() if on_gpu else starts.array for name, starts in self._offsets.items()}
        return {**offsets, **{f"max_seqlen_{side}": max(of, default=0) for side, of in self._sides.items()}}

    @property
    def _sides(self) -> dict[str, list[int]]:
        """The numbers of queries and keys of every packed sequence."""
        lengths = self.lengths or ()
        return {"q": [n for n, _ in lengths], "kv": [m for _, m in lengths]}

    @functools.cached_property
    def _offsets(self) -> dict[str, Constant]:
        return {f"cu_seqlens_{side}": Constant(np.cumsum([0, *of], dtype=np.int32)) for side, of in self._sides.items()}


def parts(
    queries: Layout,
    rank: int,
    keys: Sequence[Sequence[Interval]],
    diagonals: Sequence[int],
    band: Band | None,
    *,
    positional: bool,
    aligned: bool,
    cut: bool = False,
) -> list[Part]:
    """The calls for a member's queries and some keys.

    Args:
        queries: the layout of the queries.
        rank: the member.
        keys: for every sequence the intervals of the keys.
        diagonals: for every sequence the key on the diagonal of query 0.
        band: the mask.
        positional: whether an option depends on positions, so that each call must be one rectangle of one sequence.
        aligned: whether bands may be aligned to the bottom right.
        cut: see :func:`~cupy_sdpa.parallel.tile_counts.tiles`.
    """
    groups: dict[Any, list[tuple[int, Tile]]] = {}
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


def _without_repeats(found: Sequence[tuple[int, Tile]]) -> list[list[tuple[int, Tile]]]:
    """Split packed tiles so that the ranges of queries and of keys increase and do not overlap within each list."""
    lists: list[list[tuple[int, Tile]]] = []
    for b, tile in found:
        for some in lists:
            _, last = some[-1]
            if last.rows[1] <= tile.rows[0] and last.keys[1] <= tile.keys[0]:
                some.append((b, tile))
                break
        else:
            lists.append([(b, tile)])
    return lists


def share_buffers(made: Sequence[Part]) -> int:
    """Give every part the index of a partial result; those of disjoint queries share one. Returns the number of results."""
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
    return max(len(covered), 1)


class Partials:
    """The partial outputs and log-sum-exps of a member's queries, to be merged.

    Args:
        q, v: arrays of the queries and of the values, of which only shapes, dtype and device are used.
        count: the number of partial results.
        packed: whether sequences are packed.
    """

    def __init__(self, q: Any, v: Any, count: int, packed: bool) -> None:
        self._like, self._packed = q, packed
        self.out_shape = (v.shape[0], *q.shape[1:])
        self.stats_shape = row_stats_shape(q.shape)
        self.stats_dtype = stats_dtype(q.dtype)
        self._results: list[tuple[Any, Any] | None] = [None] * count
        #: The number of rows of the first partial result that have been written; parts that share a result have different rows.
        self._rows = 0

    def compute(self, part: Part, q: Any, k: Any, v: Any, options: Mapping[str, Any]) -> None:
        """Compute a part."""
        inputs = part.rows.of(q, 2), part.keys.of(k, 2), part.keys.of(v, 2)
        rows = inputs[0].shape[2]
        stats = cupy_runtime.new_result(q, row_stats_shape(inputs[0].shape), self.stats_dtype)
        with named():  # parts of the options of the whole call
            out, stats = attention(*inputs, stats=stats, **options)
        if not part.buffer:
            self._rows += rows
        if rows == q.shape[2] and self._results[part.buffer] is None:
            self._results[part.buffer] = out, stats
            return
        if (known := self._results[part.buffer]) is None:
            known = self._results[part.buffer] = self._empty()
        part.rows.write(known[0], out, 2)
        part.rows.write(known[1], stats, 1 if self._packed else 0)

    def _empty(self) -> tuple[Any, Any]:
        """A partial result without keys: merging does not read the outputs of rows whose log-sum-exp is -inf."""
        out = cupy_runtime.new_result(self._like, self.out_shape, self._like.dtype)
        stats = cupy_runtime.new_result(self._like, self.stats_shape, self.stats_dtype)
        memory.clear(stats, -np.inf)
        return out, stats

    def merged(self, sinks: Any) -> tuple[Any, Any]:
        """The output and the log-sum-exp over all keys."""
        results = [result or self._empty() for result in self._results]
        if len(results) == 1 and sinks is None and self._rows == self._like.shape[2]:
            return results[0]
        outs, stats = zip(*results, strict=True)
        return merge_unchecked(outs, stats, sinks, None, return_stats=True)  # type: ignore[no-any-return]


def stats_dtype(dtype: Any) -> Any:
    """The dtype of the log-sum-exp: float64 for float64 arrays, else float32."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def gradients(part: Part, arrays: Sequence[Any], k: Any, v: Any, packed: bool, options: Mapping[str, Any]) -> Any:
    """The gradients of a part, from the final output and log-sum-exp of its queries.

    Args:
        part: the part.
        arrays: dout, q, out and stats of the member.
        k, v: the keys and values.
        packed: whether sequences are packed.
        options: the options of the call.

    Returns:
        The gradients of the queries, keys and values of the part, in the dtype of q.
    """
    dout, q, out, stats = arrays
    rows = part.rows
    final = rows.of(stats, 1 if packed else 0)
    if final.shape != stats.shape or not final.flags.f_contiguous:  # cuDNN requires addresses that are multiples of 16
        dense = cupy_runtime.temporary(final, final.shape, final.dtype)
        dense[...] = final
        final = dense
    queries, keys, values = rows.of(q, 2), part.keys.of(k, 2), part.keys.of(v, 2)
    mask, rest = blocks_of(queries, keys, {**options}, automatic=True)
    deterministic = rest.pop("deterministic", False)
    arrays = rows.of(dout, 2), queries, keys, values, rows.of(out, 2), final, None, None, None
    with named():
        return attend_backward(arrays, rest, mask=mask, deterministic=deterministic, given_stats="part")
