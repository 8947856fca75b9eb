"""Decide how a call computes ``compute_dtype`` and ``block_mask``: the options that its program is built with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..block_masks.block_mask import BlockMask
from ..block_masks.intersection import within_band
from ..boundary.compute import read_compute_dtype
from ..boundary.options import read_band
from ..problem.bucket import read_bucket
from .block_mask_calls import reasons_for_dense, with_dense_mask


def decided_options(
    arrays: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    return_stats: Any = False,
    outputs: Mapping[str, Any] | None = None,
) -> Mapping[str, Any]:
    """Decide ``compute_dtype`` and ``block_mask``; return the options that the program is built and cached with.

    ``compute_dtype`` remains if it names another dtype than q's, ``block_mask`` if the mask is computed by blocks; a mask that
    needs all blocks becomes the option ``mask``. The result is ``options`` itself if nothing changes.

    Args:
        arrays: q and k by name.
        options: the caller's options.
        return_stats, outputs: what the call returns besides the output; the requested gradients by the names of arguments.
    """
    decided = {**options}
    dtype = read_compute_dtype(decided.pop("compute_dtype", None), arrays["q"])
    mask = decided.pop("block_mask", None)
    if isinstance(mask, BlockMask) and reasons_for_dense(decided, return_stats=return_stats, outputs=outputs):
        decided = with_dense_mask(arrays["q"], arrays["k"], mask, decided)
        mask = None
    if mask is options.get("block_mask") and dtype is options.get("compute_dtype"):
        return options
    return decided | {name: x for name, x in (("block_mask", mask), ("compute_dtype", dtype)) if x is not None}


def split_options(options: Mapping[str, Any]) -> tuple[BlockMask | None, str | None, dict[str, Any]]:
    """Split decided options: the block mask within ``causal`` and ``window``, the dtype to compute in, and the others."""
    others = {**options}
    mask, dtype = others.pop("block_mask", None), others.pop("compute_dtype", None)
    if isinstance(mask, BlockMask):  # attention raises TypeError for anything else
        read_bucket(others.pop("bucket", None))  # a plan of blocks depends on the mask, not on the lengths alone
        band = read_band(others.pop("causal", None), others.pop("window", None))
        mask = mask if band is None else within_band(mask, band)
    return mask, dtype, others
