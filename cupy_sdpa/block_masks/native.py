"""The forward pass as one call whose kernel reads a bit for each block of 128 queries and 128 keys: cuDNN on Blackwell."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..boundary.arguments import read_shapes
from ..boundary.call import for_gpu, mode, with_plan
from ..errors import Unsupported
from ..kernels.blocks import BLOCK
from ..problem.band import Band
from ..problem.problem import Problem
from ..problem.tensor_spec import dense_spec
from ..runtime import driver
from .block_mask import BlockMask
from .entries import Sizes
from .evaluate import EMPTY, FULL, partial_blocks
from .intersection import BlocksOfBand


class Native(NamedTuple):
    """A mask as bits of blocks, and the options of the call for partial blocks: none, a causal mask, or the mask function.

    The bits are uint8 ``(ceil(key blocks / 8), query blocks, heads, batch)``: bit k of byte j is key block 8 j + k.
    """

    bits: NDArray[np.uint8]
    options: dict[str, Any]

    def of(self, sizes: Sizes) -> NDArray[np.uint8]:
        """The bits for each head and batch entry of a call, which the kernel requires."""
        return np.broadcast_to(self.bits, (*self.bits.shape[:2], sizes.hq, sizes.batch))


def native_of(mask: BlockMask) -> Native | None:
    """The mask in this form; None if its partial blocks have no such form, or if a query attends to no key.

    The kernel's result for a query whose blocks are all skipped is not documented.
    """
    if "native" not in mask.tables:
        mask.tables["native"] = _found(mask)
    found: Native | None = mask.tables["native"]
    return found


def _found(mask: BlockMask) -> Native | None:
    options: dict[str, Any] = {}
    if len(mask.bits):
        if _is_causal(mask):
            options = {"causal": True}
        elif mask.function is not None:
            options = {"mask_mod": mask.function}
        else:
            return None
    if not _every_query_attends(mask):
        return None
    return Native(np.asfortranarray(np.packbits(mask.kinds != EMPTY, axis=0, bitorder="little")), options)


def _is_causal(mask: BlockMask) -> bool:
    """Whether the queries of the listed blocks attend to all keys up to their own position, and to no others."""
    causal = BlocksOfBand(Band(right=0), mask.sq, mask.skv)
    if ((mask.kinds == FULL) & (causal.kinds != FULL)).any():
        return False
    tiles = zip(partial_blocks(mask.kinds), mask.bits, strict=True)
    return all((causal.bits(j, i) == bits).all() for (j, i, *_), bits in tiles)


def _every_query_attends(mask: BlockMask) -> bool:
    """Whether every query of every head and batch entry attends to a key."""
    _, query_blocks, heads, batch = mask.kinds.shape
    attends = np.zeros((query_blocks, BLOCK, heads, batch), bool)
    attends[:] = (mask.kinds == FULL).any(axis=0)[:, None]
    for (_, i, h, b), bits in zip(partial_blocks(mask.kinds), mask.bits, strict=True):
        attends[i, :, h, b] |= bits.reshape(BLOCK, -1).any(axis=1)
    return bool(attends.reshape(query_blocks * BLOCK, heads, batch)[: mask.sq].all())


def native_problem(
    arrays: tuple[Any, Any, Any],
    mask: BlockMask,
    sizes: Sizes,
    options: Mapping[str, Any],
    *,
    return_stats: bool,
    dtype: str | None = None,
) -> Problem | None:
    """The problem of the call with q, k and v; None if the mask does not have this form.

    ``dtype`` is that of dense arrays that are computed in place of these. Default None: these are.
    """
    native = native_of(mask)
    if native is None:
        return None
    q, k, v = (tuple(x.shape) if dtype else x for x in arrays)
    problem = read_shapes(q, k, v, {**options, **native.options}, dtype=dtype, return_stats=return_stats)
    bits = dense_spec("block_bits", "uint8", (*native.bits.shape[:2], sizes.hq, sizes.batch))
    return dataclasses.replace(problem, block_bits=bits)


def is_supported(
    arrays: tuple[Any, Any, Any],
    mask: BlockMask,
    sizes: Sizes,
    options: Mapping[str, Any],
    *,
    return_stats: bool,
    dtype: str | None = None,
) -> bool:
    """Whether the GPU of the arrays can run the call: its first call plans it. The arguments are those of the problem."""
    q, _, v = arrays
    if not for_gpu(q) or native_of(mask) is None:
        return False
    if (description := mode.get().description) is not None and description.for_gpu:  # which need not be here
        described = native_problem(arrays, mask, sizes, options, return_stats=return_stats, dtype=dtype)
        return bool(described and description.is_supported and description.is_supported(described))
    key = (driver.context_id(), sizes, "native", dtype or q.dtype, q.shape[0], v.shape[0], return_stats, *sorted(options))
    if key not in mask.tables:
        problem = native_problem(arrays, mask, sizes, options, return_stats=return_stats, dtype=dtype)
        assert problem
        try:
            with_plan(problem, q.data.device_id, lambda session, plan: None)
        except Unsupported:
            mask.tables[key] = False
        else:
            mask.tables[key] = True
    return bool(mask.tables[key])
