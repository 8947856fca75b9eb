"""Score functions in calls whose queries and keys are at other positions: packed sequences, slices, and blocks.

The function is recorded, and computed at the original positions, which are captured arrays of the call. An array that it
indexes by positions is copied: element by element, in the order of the call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..extend import Recorded
from .block_mask import BlockMask
from .blocks import BLOCK
from .entries import Entries, PackedCopies, TableSizes
from .segments import PackedSegments, SegmentSlice

#: How a function indexes an array: each axis has an index, which is a score axis's name or an integer.
Indices = tuple[str | int, ...]

#: The names of the arrays of original positions, for the axes of the scores; of consecutive ones there is the first one.
_POSITIONS = {"b": "entry of b", "h": "head of b", "q_idx": "position of q_idx", "kv_idx": "position of kv_idx"}


class Positions(NamedTuple):
    """Where the queries and keys of a call come from, E batch items.

    Attributes:
        queries, keys: int32 ``(Sq, E)`` and ``(Skv, E)``, the positions in the arrays of the caller.
        entries: int32 ``(E,)``, the batch items.
        heads: int32 ``(E,)``, the head, if each entry has one head; None for the caller's heads.
    """

    queries: NDArray[np.int32]
    keys: NDArray[np.int32]
    entries: NDArray[np.int32]
    heads: NDArray[np.int32] | None


def of_packed(packed: PackedSegments, mask: BlockMask, sizes: TableSizes) -> Positions:
    """Return the positions of segments as packed sequences of flattened batch items."""
    starts, count = (packed.starts_q[:-1], packed.starts_kv[:-1]), mask.sq * sizes.batch - 1
    entries = np.minimum(starts[0], max(count, 0)) // max(mask.sq, 1)
    local = [start - entries * length for start, length in zip(starts, (mask.sq, mask.skv), strict=True)]
    return _consecutive_positions(packed.longest_q, local[0], packed.longest_kv, local[1], entries, mask)


def of_slice(part: SegmentSlice, mask: BlockMask, sizes: TableSizes) -> Positions:
    """Return the positions of a slice of every batch item."""
    zeros = np.zeros(sizes.batch, np.int64)
    return _consecutive_positions(
        part.q1 - part.q0, zeros + part.q0, part.k1 - part.k0, zeros + part.k0, np.arange(sizes.batch), mask
    )


def of_entries(entries: Entries, mask: BlockMask, sizes: TableSizes) -> Positions:
    """Return the positions of batch items of blocks."""
    blocks, groups, of_batch = entries.items.T.astype(np.int64)
    keys = (entries.table % max(mask.kinds.shape[0], 1)).astype(np.int64)
    return Positions(
        _in_blocks(blocks[None, :], mask.sq),
        _in_blocks(keys, mask.skv),
        of_batch.astype(np.int32),
        groups.astype(np.int32) if mask.heads > 1 else None,
    )


def of_copies(part: PackedCopies, mask: BlockMask) -> Positions:
    """Return the positions of rectangles as packed sequences."""
    found = []
    for items, starts, longest, length in (
        (part.queries, part.starts_q, part.longest_q, mask.sq),
        (part.keys, part.starts_kv, part.longest_kv, mask.skv),
    ):
        tokens = _in_blocks(items[:, :1].astype(np.int64), length).reshape(-1)
        offsets = np.arange(longest)[:, None]
        index, first = np.minimum(starts[:-1] + offsets, len(tokens) - 1), np.minimum(starts[:-1], len(tokens) - 1)
        following = np.minimum(tokens[first] + offsets, max(length - 1, 0))  # after the end of a sequence
        found.append(np.asfortranarray(np.where(offsets < np.diff(starts), tokens[index], following).astype(np.int32)))
    first = np.minimum(part.starts_q[:-1] // BLOCK, len(part.queries) - 1)
    _, groups, entries = part.queries[first].T
    return Positions(found[0], found[1], entries.copy(), groups.copy() if mask.heads > 1 else None)


def _in_blocks(blocks: NDArray[np.int64], length: int) -> NDArray[np.int32]:
    """Return the positions in blocks along the first axis; at most the last one."""
    found = (blocks[:, None] * BLOCK + np.arange(BLOCK)[:, None]).reshape(-1, blocks.shape[1])
    return np.asfortranarray(np.minimum(found, max(length - 1, 0)).astype(np.int32))


def _consecutive_positions(queries: int, first_q: Any, keys: int, first_kv: Any, entries: Any, mask: BlockMask) -> Positions:
    """Consecutive positions from the first query and key of each entry; at most the last ones."""
    found = [
        np.asfortranarray(np.clip(first + np.arange(count)[:, None], 0, max(length - 1, 0)).astype(np.int32))
        for first, count, length in ((first_q, queries, mask.sq), (first_kv, keys, mask.skv))
    ]
    return Positions(found[0], found[1], np.asarray(entries, np.int32), None)


class MovableFunction:
    """The caller's score function and the arrays that it reads; ``sizes`` are the lengths of the score axes."""

    def __init__(self, score_mod: Recorded, tensors: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        self.tensors, self._function = dict(tensors), score_mod
        if score_mod.traced(self.tensors, sizes).masks:
            raise ValueError("score_mod masks keys and block_mask is passed: move the condition into the mask function")
        #: The options of a call in which all queries and keys are at their positions.
        self.options = {"score_mod": self._function, **({"tensors": self.tensors} if self.tensors else {})}

    @property
    def reads(self) -> Sequence[tuple[str, Indices]]:
        """The names of the arrays that the function reads, and how it indexes them."""
        return self._function.reads

    def places(self, positions: Positions, mask: BlockMask) -> dict[str, NDArray[np.int32]]:
        """Return the arrays of original positions that a call reads, by name."""
        arrays = {
            "b": positions.entries, "q_idx": _shortest(positions.queries, mask.sq),
            "kv_idx": _shortest(positions.keys, mask.skv),
        }  # fmt: skip
        if positions.heads is not None:
            arrays["h"] = positions.heads
        return {_POSITIONS[axis]: np.asfortranarray(array) for axis, array in arrays.items()}

    def index(self, axes: Indices, array: Any, positions: Positions) -> NDArray[np.int64]:
        """Return the offsets of the elements that a call reads, ``(Skv, Sq, H, E)`` without the axes that it does not use.

        Of the array only the metadata are read.
        """
        parts: dict[str, NDArray[Any]] = {
            "b": positions.entries[None, None, None, :],
            "q_idx": positions.queries[None, :, None, :],
            "kv_idx": positions.keys[:, None, None, :],
        }
        if positions.heads is not None:
            parts["h"] = positions.heads[None, None, None, :]
        offsets: Any = np.zeros((1, 1, 1, 1), np.int64)
        for axis, length, stride in zip(axes, array.shape, array.strides, strict=True):
            step = stride // array.dtype.itemsize
            if isinstance(axis, int):
                offsets = offsets + axis * step
            else:
                part = parts[axis] if axis in parts else np.arange(length)[None, None, :, None]
                offsets = offsets + part.astype(np.int64) * step
        used = _axes_of(axes, positions.heads is not None)
        kept = tuple(slice(None) if axis in used else 0 for axis in ("kv_idx", "q_idx", "h", "b"))
        return np.asfortranarray(offsets[kept])

    def located(self, names: Sequence[str], ranks: Mapping[str, int]) -> Recorded:
        """Return the function for moved positions; ``names`` are the copied arrays, ``ranks`` the ranks of :meth:`places`."""
        own, one_head = self._function, _POSITIONS["h"] in ranks
        reads = {read: (name, _axes_of(read.axes, one_head)) for read, name in zip(own.reads, names, strict=True)}
        first: dict[str, tuple[str, Indices]] = {
            axis: (name, ("b",)) for axis, name in _POSITIONS.items() if ranks.get(name) == 1
        }
        starts: dict[str, int | tuple[str, Indices]] = {axis: first.pop(axis) for axis in ("q_idx", "kv_idx") if axis in first}
        every = {axis: (name, (axis, "b")) for axis, name in _POSITIONS.items() if ranks.get(name) == 2}
        return own.relocated(reads, starts=starts, places={**first, **every})


def _shortest(positions: NDArray[np.int32], length: int) -> NDArray[np.int32]:
    """Positions ``(S, E)``; the first ones ``(E,)`` if all others follow them.

    cuDNN's backward kernel takes four arrays with an element for each query, two of which are its own.
    """
    if not positions.size or (positions != np.minimum(positions[0] + np.arange(len(positions))[:, None], length - 1)).any():
        return positions
    return np.ascontiguousarray(positions[0])


def _axes_of(axes: Indices, one_head: bool) -> tuple[str, ...]:
    """Return the axes of the copy of an array indexed by ``axes``, in the order keys, queries, heads, batch items."""
    used = {axis for axis in axes if isinstance(axis, str)}
    if used & {"b", "q_idx", "kv_idx"} or (one_head and "h" in used):
        used.add("b")
    if one_head:
        used.discard("h")
    return tuple(axis for axis in ("kv_idx", "q_idx", "h", "b") if axis in used)
