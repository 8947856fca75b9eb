"""The option ``block_mask`` of attention and its gradients: decided, checked and computed, see :class:`.OptionModule`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import method
from .block_mask import BlockMask
from .block_mask_calls import reasons_for_dense, with_dense_mask
from .block_mask_steps import add as add
from .block_mask_steps import score_function


def decide(
    mask: Any, arrays: Mapping[str, Any], options: Mapping[str, Any], *, return_stats: Any, outputs: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """Return the options with a dense mask, if the call needs all blocks; None if it computes the mask by blocks."""
    if isinstance(mask, BlockMask) and reasons_for_dense(options, return_stats=return_stats, outputs=outputs):
        return with_dense_mask(arrays["q"], arrays["k"], mask, options)
    return None


def check(mask: Any, arrays: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Check the shapes and the score function of a call with a block mask."""
    q, k, v = (arrays[name] for name in "qkv")
    method.check(q, k, v, mask)
    score_function(q.shape, k.shape, options)  # checks it
