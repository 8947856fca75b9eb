"""Block masks of mask functions that are passed to calls without a block mask."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

from ..boundary.call import for_gpu
from ..kernels.blocks import BLOCK
from ..replay.replay_cache import keep_recent
from ..runtime import cupy_runtime
from ..score_fn.expression import AXES
from ..score_fn.identity import identity
from ..score_fn.tracer import trace
from .block_mask import BlockMask, block_mask
from .entries import Sizes
from .method import SUPPORTED, blocks_of_band, is_passed, method_of

#: The least number of blocks of 128 queries and keys that a call without a block mask computes: 2048 x 2048. With fewer, one
#: kernel takes less time than the launches of several.
LEAST_BLOCKS = 256
#: The time of a block in a call with the mask function, relative to one without a mask, and the least gain. Measured on an H200
#: (8192 queries and keys, 16 heads, head dim 128): mask functions take 1.0 to 2.6 times as long as no mask. A gain of 2 for the
#: most favorable function leaves no pattern that was measured slower with blocks than without.
FUNCTION_COST, LEAST_GAIN = 1.0, 2.0
#: The number of functions whose decisions are stored; the least recently used are removed first.
MAX_FUNCTIONS = 64

#: The decisions, the most recently used last.
_decisions: dict[Hashable, Decision] = {}


class Decision(NamedTuple):
    """The block mask that calls with a mask function use, or None if they compute all blocks; and why."""

    mask: BlockMask | None
    reason: str


def automatic_mask(q: Any, k: Any, options: Mapping[str, Any]) -> BlockMask | None:
    """The block mask that a call with a mask function uses; None if it computes all blocks.

    It depends on the function and the shapes only, so a repeated call looks it up.
    """
    if not for_gpu(q) or not hasattr(k, "shape"):
        return None
    return decide(q.shape, k.shape, options).mask


def decide(q: tuple[int, ...], k: tuple[int, ...], options: Mapping[str, Any]) -> Decision:
    """Whether calls with arrays of these shapes use blocks, and why; the first call with a function synchronizes."""
    function = options.get("mask_mod")
    if function is None:
        return Decision(None, "there is no mask_mod")
    if options.get("tensors"):
        return Decision(None, "tensors may change from call to call: pass block_mask=cupy_sdpa.block_mask(...)")
    for name, value in options.items():
        if is_passed(name, value) and name not in (*SUPPORTED, "mask_mod"):
            return Decision(None, f"{name} is passed")
    if len(q) != 4 or len(k) != 4 or not k[1] or q[1] % k[1]:
        return Decision(None, "the arrays are not (D, H, S, B)")
    if -(-q[2] // BLOCK) * -(-k[2] // BLOCK) < LEAST_BLOCKS:
        return Decision(None, f"there are fewer than {LEAST_BLOCKS} blocks of {BLOCK} queries and keys")
    known = identity(function)
    if known is None:
        return Decision(None, "the function may change in a way that cannot be seen: pass block_mask=")
    key, sizes = (known, q[1:], k[1:]), Sizes(q[1], k[1], q[3])
    if (found := _look_up(key)) is None:
        if cupy_runtime.current_device() is not None and cupy_runtime.capturing():
            return Decision(None, "the stream is being captured, and the function was not evaluated before")
        found = _store(key, _evaluated(function, sizes, q[2], k[2]))
    score_mod = options.get("score_mod")
    if found.mask is None or score_mod is None:
        return found
    both = (*key, identity(score_mod))
    return _look_up(both) or _store(both, _with_scores(found, score_mod, sizes, q[2], k[2]))


def _look_up(key: tuple[Any, ...]) -> Decision | None:
    found = _decisions.get(key)
    if found is not None:
        keep_recent(_decisions, key, found, MAX_FUNCTIONS)
    return found


def _store(key: tuple[Any, ...], found: Decision) -> Decision:
    """Store a decision, unless a function may change in a way that cannot be seen."""
    if None not in key:
        keep_recent(_decisions, key, found, MAX_FUNCTIONS)
    return found


def _with_scores(found: Decision, score_mod: Any, sizes: Sizes, sq: int, skv: int) -> Decision:
    """The decision with a score function: blocks do not take one that masks keys itself."""
    traced = trace(score_mod, None, {}, dict(zip(AXES, (sizes.batch, sizes.hq, sq, skv), strict=True)))
    masks = traced.band or (traced.expression and traced.expression.mask is not None)
    return Decision(None, "score_mod masks keys: put the condition into the mask function") if masks else found


def _evaluated(function: Any, sizes: Sizes, sq: int, skv: int) -> Decision:
    """Compare the cost of the blocks with that of a call with the function, which computes all blocks of its band."""
    traced = trace(None, function, {}, dict(zip(AXES, (sizes.batch, sizes.hq, sq, skv), strict=True)))
    if traced.expression is None:
        return Decision(None, "the function is a causal mask or a window, whose tiles cuDNN skips itself")
    try:
        mask = block_mask(function, sq, skv)
    except Exception as error:  # functions that use h or b, or that arrays cannot evaluate
        return Decision(None, f"the function was not evaluated: {error}")
    now, blocks = FUNCTION_COST * float(blocks_of_band(mask, traced.band)), method_of(mask, sizes).cost
    text = f"{mask.blocks} of {mask.kinds.size} blocks, at an estimated {blocks / max(now, 1.0):.2f} of the time of all blocks"
    if LEAST_GAIN * blocks > now:
        return Decision(None, f"{text}; they are used below {1 / LEAST_GAIN:.2f}")
    return Decision(mask, text)
