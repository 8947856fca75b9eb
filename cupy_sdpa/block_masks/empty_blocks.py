"""Count the blocks of a mask function in which no query attends to a key: with ``block_mask=`` calls skip them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..extend import Band
from .blocks import BLOCK
from .evaluate import MaskFunction, evaluate_blocks
from .method import blocks_of_band

#: The number of blocks that are evaluated. If there are more, they are drawn at random: the share is then right to about 2 %.
EVALUATED = 1024
#: The least number of blocks (2048 x 2048 pairs), and the least share of empty ones, for which a block mask is worth trying.
#: With fewer blocks one kernel takes less time than the launches of several. The forward pass of half of the blocks is
#: estimated to take at most 0.73 of the time: a partial block costs 1.45 times as much as a full one (H200).
LEAST_BLOCKS, LEAST_SHARE = 256, 0.5


def describe_empty_blocks(
    mask_mod: Callable[..., Any], tensors: Mapping[str, Any], sizes: tuple[int, int, int, int], band: Band | None
) -> str:
    """Say which share of the blocks that a call computes is empty; name ``block_mask=`` if it is large.

    ``sizes`` are Sq, Skv, Hq and B. cuDNN computes the blocks within the ``band``.
    """
    sq, skv, heads, batch = sizes
    of_band = blocks_of_band(band, sq, skv)
    computed = np.argwhere(of_band)
    every = len(computed) * heads * batch
    numbers = np.arange(every) if every <= EVALUATED else np.random.default_rng(0).choice(every, EVALUATED, replace=False)
    places, head, entry = np.unravel_index(numbers, (len(computed), heads, batch))
    blocks = np.column_stack([computed[places], head, entry]).astype(np.int32)
    function = MaskFunction(mask_mod, _arrays_taken(mask_mod, tensors), per_head=True, per_entry=True)
    empty = ~evaluate_blocks(function, blocks, sq, skv).any(axis=1)
    share = float(empty.mean()) if every else 0.0
    percent = f"{'' if every <= EVALUATED else 'about '}{100 * share:.0f} %"
    text = f"mask_mod is False in {percent} of the blocks of {BLOCK} queries and {BLOCK} keys that are computed"
    if of_band.size < LEAST_BLOCKS or share < LEAST_SHARE:
        return text
    return f"{text}: to skip them, pass block_mask=cupy_sdpa.block_mask(mask_mod, {sq}, {skv}, ...) instead"


def _arrays_taken(mask_mod: Callable[..., Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays that the mask function takes; the rest belong to the score function."""
    parameters = inspect.signature(mask_mod).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {name: array for name, array in tensors.items() if takes_all or name in parameters}
