"""How a call computes a block mask: one packed call, calls on slices, or batch items of blocks; and the arrays for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..extend import Band, View
from . import segments
from .block_mask import BlockMask
from .blocks import BLOCK
from .entries import MASKED_COST, MASKED_GRADIENT_COST, MERGE_COST, TableSizes, make_tables, rectangles
from .evaluate import EMPTY, FULL, PARTIAL


class Method(NamedTuple):
    """How calls of some sizes compute a mask; exactly one of the first three is not None.

    Attributes:
        packed: the sequences of one packed call.
        slices: calls on slices of the arrays.
        blocks: batch items of blocks.
        cost: the number of blocks that cuDNN computes, about; a block with a mask counts as several.
    """

    packed: segments.PackedSegments | None
    slices: list[segments.SegmentSlice] | None
    blocks: Any
    cost: float

    @property
    def name(self) -> str:
        """``packed``, ``slices`` or ``blocks``."""
        return "packed" if self.packed else "slices" if self.slices is not None else "blocks"


def block_cost(mask: BlockMask) -> float:
    """Return the cost of the mask as batch items of blocks: with a mask in partial blocks, and merged results."""
    full, partial = ((mask.kinds == kind).sum(axis=0) for kind in (FULL, PARTIAL))
    together = MASKED_COST * (full + partial)
    separate = full + MASKED_COST * partial + MERGE_COST
    return float(np.where(partial == 0, full, np.minimum(together, separate)).sum())


def cheapest_method(mask: BlockMask, sizes: TableSizes) -> Method:
    """Return the method with the least cost: segments need no mask, but as many tiles as their rows and keys overlap."""
    if 0 in (sizes.hq, sizes.batch) or not mask.kinds.any():  # no query attends to a key
        return Method(None, [], None, 0.0)
    repeats = sizes.batch // mask.batch
    blocks = block_cost(mask)
    if mask.sq * mask.skv > 1 and (mask.kinds == FULL).all():  # one call on the whole arrays, at their own positions
        return Method(None, [segments.SegmentSlice(0, mask.sq, 0, mask.skv, None)], None, blocks)
    if mask.segments is not None and (cost := sum(map(segments.cost, mask.segments))) <= blocks:
        slices = segments.segment_slices(mask.segments[0]) if mask.batch == 1 else None
        packed = segments.packed(list(mask.segments) * repeats, mask.sq, mask.skv)
        if packed is not None and (slices is None or len(slices) > 1):
            return Method(packed, None, None, cost)
        if slices is not None:
            return Method(None, slices, None, cost)
    return Method(None, None, make_tables(mask, sizes), blocks)


def method_of(mask: BlockMask, sizes: TableSizes) -> Method:
    """Return the method of a mask for calls of some sizes; it is chosen once."""
    method = mask.tables.get(sizes)
    if method is None:
        method = mask.tables[sizes] = cheapest_method(mask, sizes)
    return method


def gradient_function(mask: BlockMask, sizes: TableSizes) -> Callable[..., Any] | None:
    """Return the mask function if the backward pass is faster as a call with it than on copies of blocks; None otherwise.

    cuDNN computes all blocks within a band that ends at the diagonal, and all blocks without such a band. A block of queries or
    keys that is in no block of the mask may contain NaN, which would spread; such masks are computed on copies.
    """

    def find() -> Callable[..., Any] | None:
        listed = mask.kinds != EMPTY
        if mask.function is None or not all(listed.any(axis=axis).all() for axis in (0, 1)):
            return None
        axes = {"b": sizes.batch, "h": sizes.hq, "q_idx": mask.sq, "kv_idx": mask.skv}
        left, right = mask.function.traced({}, axes).band or (None, None)
        computed = blocks_of_band(Band(left, right) if right == 0 else None, mask.sq, mask.skv)
        cost = MASKED_GRADIENT_COST * int(computed.sum()) * sizes.batch * mask.heads
        of_copies = sum(rectangle.cost for kind in rectangles(mask, sizes.batch) for rectangle in kind)
        return mask.function if cost < of_copies else None

    key = (sizes, "function")
    if key not in mask.tables:
        mask.tables[key] = find()
    found: Callable[..., Any] | None = mask.tables[key]
    return found


def blocks_of_band(band: Band | None, sq: int, skv: int) -> NDArray[np.bool_]:
    """Return whether blocks ``(key blocks, query blocks)`` have pairs within a band: cuDNN computes only these."""
    left, right, bottom_right = band or Band()
    diagonal = BLOCK * np.arange(-(-sq // BLOCK)) + (skv - sq if bottom_right else 0)  # of each block's first query
    offsets = diagonal - BLOCK * np.arange(-(-skv // BLOCK))[:, None]  # from each block's first key to that diagonal
    computed = np.ones(offsets.shape, bool)
    if left is not None:
        computed &= offsets < left + BLOCK
    if right is not None:
        computed &= -offsets < right + BLOCK
    return computed


def is_attended(b: Any, h: Any, q_idx: Any, kv_idx: Any, attends: Any) -> Any:
    """Return the mask of batch items of blocks."""
    return attends[kv_idx, q_idx, b] != 0


def flattened(array: View) -> View | None:
    """Return an array ``(D, H, S, B)`` as ``(D, H, S B)``; None if the batch items do not follow one another."""
    d, h, s, b = array.shape
    unit, head, row, batch = array.strides
    return array.strided((d, h, s * b), (unit, head, row)) if b == 1 or batch == s * row else None


def as_pages(array: View) -> View | None:
    """Return an array ``(D, H, S, B)`` as pages ``(D, H, BLOCK, pages)``; None if S is no multiple of BLOCK."""
    flat = flattened(array)
    if flat is None or array.shape[2] % BLOCK:
        return None
    d, h, total = flat.shape
    return array.strided((d, h, BLOCK, total // BLOCK), (*flat.strides, BLOCK * flat.strides[2]))


def check_mask_type(mask: Any) -> None:
    """Raise TypeError if ``block_mask`` is not a BlockMask."""
    if not isinstance(mask, BlockMask):
        raise TypeError(
            f"block_mask is a {type(mask).__module__}.{type(mask).__qualname__}; it must be a cupy_sdpa.BlockMask: create it "
            "with cupy_sdpa.block_mask(mask_mod, Sq, Skv), or from FlexAttention's fields with BlockMask.from_kv_blocks; a "
            "bool array (Skv, Sq, Hq, B) is mask="
        )


def check(q: Any, k: Any, v: Any, mask: Any) -> TableSizes:
    """Check the arguments of a call with a block mask; returns its sizes.

    Raises:
        TypeError, ValueError: the mask does not fit the arrays.
    """
    check_mask_type(mask)
    for name, array in (("q", q), ("k", k), ("v", v)):
        if getattr(array, "ndim", 0) != 4:
            raise ValueError(f"{name} has shape {getattr(array, 'shape', None)}; with a block mask it must be (D, H, S, B)")
    (_, hq, sq, batch), (_, hkv, skv, _) = q.shape, k.shape
    if k.shape[1:] != v.shape[1:] or k.shape[3] != batch or q.shape[0] != k.shape[0] or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"q {q.dtype} {q.shape}, k {k.dtype} {k.shape} and v {v.dtype} {v.shape} do not match: shapes are (D, Hq, Sq, B), "
            "(D, Hkv, Skv, B) and (Dv, Hkv, Skv, B), of one dtype"
        )
    if (mask.sq, mask.skv) != (sq, skv):
        raise ValueError(f"block_mask is for {mask.sq} queries and {mask.skv} keys; q has {sq} queries and k {skv} keys")
    check_groups(mask, hq, batch)
    if hkv and hq % hkv:
        raise ValueError(f"q has {hq} heads and k {hkv}; {hq} must be a multiple of {hkv}")
    return TableSizes(hq, hkv, batch)


def check_groups(mask: BlockMask, heads: int, batch: int) -> None:
    """Raise ValueError if a mask has other numbers of heads or batch items than the queries."""
    if mask.heads not in (1, heads) or mask.batch not in (1, batch):
        raise ValueError(
            f"block_mask has {mask.heads} heads and {mask.batch} batch items; q has {heads} and {batch}: both must be equal "
            "or 1"
        )
