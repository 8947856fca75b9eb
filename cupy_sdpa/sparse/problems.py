"""The problems of the calls that compute a call with a block mask: for reports and for plans ahead of time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..calls.arguments import read_shapes
from ..calls.call import with_plan
from ..device import cupy_runtime
from ..device.blocks import BLOCK
from ..problem.problem import Problem
from ..problem.tensor_spec import dtype_name, placeholder
from .entries import PackedCopies, Sizes, packed_copies, rectangles
from .forward import parts_of
from .masks import segments
from .masks.block_mask import BlockMask
from .plan import band_options, check, gradient_function, is_attended, plan_of
from .positions import Positions, of_copies, of_entries, of_packed, of_slice


def part_problems(
    arrays: tuple[Any, Any, Any],
    mask: BlockMask,
    options: Mapping[str, Any],
    *,
    backward: bool = False,
    return_stats: bool = False,
    deterministic: bool = False,
) -> list[Problem]:
    """The problems of the calls of cuDNN that compute a call with a block mask; arrays are assumed to be dense.

    Args:
        arrays: q, k and v.
        mask: the block mask.
        options: the other options.
        backward, return_stats, deterministic: as for :func:`cupy_sdpa.explain`.
    """
    q, k, v = arrays
    sizes = check(q, k, v, mask, options)
    plan, dtype = plan_of(mask, sizes), dtype_name(q.dtype)
    parts = parts_of(q, k, mask, sizes, options)
    (d, hq, sq, batch), (dv, hkv, skv, _) = q.shape, v.shape
    outputs = {"dtype": dtype, "backward": backward, "return_stats": return_stats, "deterministic": deterministic}
    sinks = parts.options.pop("sinks", None)  # the log-sum-exp contains them in the backward pass

    def pose(queries: tuple[int, ...], keys: tuple[int, ...], given: Mapping[str, Any], **changes: Any) -> Problem:
        shapes = (d, *queries), (d, *keys), (dv, *keys)
        return read_shapes(*shapes, given, **{**outputs, **changes})

    def located(given: Mapping[str, Any], key: tuple[Any, ...], positions: Callable[[], Positions]) -> dict[str, Any]:
        return parts.options_of(given, key, q, positions)

    with_sinks = {} if sinks is None or backward else {"sinks": sinks}
    if backward and plan.blocks is not None and not deterministic and (function := gradient_function(mask, sizes)):
        return [pose((hq, sq, batch), (hkv, skv, batch), {**parts.whole_options, "mask_mod": function})]
    if plan.packed:
        given = {**lengths_of(plan.packed), **band_options(plan.packed.band), **with_sinks}
        given = located(given, ("packed",), functools.partial(of_packed, plan.packed, mask, sizes))
        return [pose((hq, sq * batch), (hkv, skv * batch), given)]
    if plan.slices is not None:
        found = []
        for x in segments.gradient_slices(plan.slices) if backward else plan.slices:
            given = {**band_options(x.band), **with_sinks}
            given = located(given, (x[:4],), functools.partial(of_slice, x, mask, sizes))
            found.append(pose((hq, x.q1 - x.q0, batch), (hkv, x.k1 - x.k0, batch), given))
        return found
    hq, hkv = (1, 1) if mask.heads > 1 else (hq, hkv)
    found = []
    if backward:
        copies = (packed_copies(kind, mask, sizes) for kind in rectangles(mask, batch))
        for number, part in enumerate(part for part in copies if part is not None):
            pairs = None if part.partial is None else (part.longest_kv, part.longest_q, len(part.starts_q) - 1)
            given = {**lengths_of(part), **_pairs_options(pairs)}
            given = located(given, ("rectangles", number), functools.partial(of_copies, part, mask))
            found.append(pose((hq, BLOCK * len(part.queries)), (hkv, BLOCK * len(part.keys)), given))
        return found
    tables = plan.blocks
    pages = (hkv, BLOCK, -(-skv // BLOCK) * batch * (1 if mask.heads == 1 else sizes.hkv))
    merged = bool(tables.copied) or sinks is not None
    for number, entries in enumerate((tables.direct, *tables.copied), -1):
        if entries is not None:
            count = len(entries.items)
            pairs = None if entries.partial is None else (BLOCK * len(entries.table), BLOCK, count)
            given = {"page_table": entries.table.shape, "seq_lens_kv": (count,), "cu_seqlens_q": (count + 1,),
                     "max_seqlen_q": BLOCK, **_pairs_options(pairs)}  # fmt: skip
            key = ("direct",) if entries is tables.direct else ("copied", number)
            given = located(given, key, functools.partial(of_entries, entries, mask, sizes))
            total = sq * batch if entries is tables.direct else BLOCK * count
            found.append(pose((hq, total), pages, given, return_stats=return_stats or merged))
    return found


def plan_parts(arrays: tuple[Any, Any, Any], mask: BlockMask, options: Mapping[str, Any], **outputs: bool) -> None:
    """Build the plans of the calls on the device of the arrays, if they are not in the plan cache.

    Args:
        arrays, mask, options, outputs: as for :func:`part_problems`.

    Raises:
        Unsupported, CudnnError: a call cannot run.
    """
    with cupy_runtime.on_device_of(arrays[0]) as device:
        for problem in part_problems(arrays, mask, options, **outputs):
            if not problem.trivial:
                with_plan(problem, device, lambda session, plan: None)


def lengths_of(part: segments.Packed | PackedCopies) -> dict[str, Any]:
    """The options of packed sequences, with shapes in place of arrays."""
    return {
        "cu_seqlens_q": part.starts_q.shape, "cu_seqlens_kv": part.starts_kv.shape, "max_seqlen_q": part.longest_q,
        "max_seqlen_kv": part.longest_kv,
    }  # fmt: skip


def _pairs_options(shape: tuple[int, int, int] | None) -> dict[str, Any]:
    """The options of a call with the mask of its batch entries, of which only the shape is known; none without a mask."""
    return {} if shape is None else {"mask_mod": is_attended, "tensors": {"attends": placeholder(shape, np.float16)}}


def description(mask: BlockMask, sizes: Sizes, *, native: bool = False) -> str:
    """How calls of some sizes compute a mask, for :func:`cupy_sdpa.explain`; ``native`` if the kernel skips blocks itself."""
    plan = plan_of(mask, sizes)
    how = {
        "packed": "as packed sequences", "slices": f"as {len(plan.slices or ())} calls on slices",
        "blocks": "as batch entries of blocks",
    }  # fmt: skip
    return f"{repr(mask)[1:-1]}; computed {'by a kernel that skips blocks' if native else how[plan.method]}"
