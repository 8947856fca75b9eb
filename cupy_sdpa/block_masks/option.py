"""The option ``block_mask`` of attention and its gradients: decided, checked and computed, see :class:`.OptionModule`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..extend.options import read_band, read_bucket
from . import method
from .block_mask import BlockMask
from .block_mask_calls import reasons_for_dense, with_dense_mask
from .block_mask_steps import add as add
from .block_mask_steps import score_function
from .intersection import within_band


def decide(
    mask: Any, arrays: Mapping[str, Any], options: Mapping[str, Any], *, return_stats: Any, outputs: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """Return the options with a dense mask, if the call needs all blocks; None if it computes the mask by blocks."""
    if isinstance(mask, BlockMask) and reasons_for_dense(options, return_stats=return_stats, outputs=outputs):
        return with_dense_mask(arrays["q"], arrays["k"], mask, options)
    return None


def read(mask: Any, options: dict[str, Any]) -> Any:
    """Return the mask within ``causal`` and ``window``, and remove these options."""
    if not isinstance(mask, BlockMask):
        return mask  # check raises TypeError
    read_bucket(options.pop("bucket", None))  # a plan of blocks depends on the mask, not on the lengths alone
    band = read_band(options.pop("causal", None), options.pop("window", None))
    return mask if band is None else within_band(mask, band)


def check(
    mask: Any,
    arrays: Mapping[str, Any],
    options: Mapping[str, Any],
    results: Sequence[str],
    *,
    dtype: Any = None,
    rounded: bool = False,
) -> None:
    """Check the arrays and the score function of a call with a block mask."""
    q, k, v = (arrays[name] for name in "qkv")
    method.check(q, k, v, mask)
    method.check_other_arrays(arrays, options.get("sinks"), results, dtype=dtype, rounded=rounded)
    score_function(q.shape, k.shape, options)  # checks it
