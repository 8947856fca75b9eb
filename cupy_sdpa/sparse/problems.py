"""The problems of the calls that compute a call with a block mask: for reports and for plans ahead of time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..calls.arguments import read_shapes
from ..calls.call import with_plan
from ..calls.options import band_options
from ..device import cupy_runtime
from ..device.blocks import BLOCK
from ..problem.problem import Problem
from ..problem.tensor_spec import dtype_name, placeholder
from .entries import PackedCopies, Sizes, Tables, packed_copies, rectangles
from .forward import parts_of
from .masks import segments
from .masks.block_mask import BlockMask
from .method import check, gradient_function, is_attended, method_of
from .positions import Parts, Positions, of_copies, of_entries, of_packed, of_slice


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
    method = method_of(mask, sizes)
    outputs = {"backward": backward, "return_stats": return_stats, "deterministic": deterministic}
    problems = _Problems(arrays, parts_of(q, k, mask, sizes, options, deterministic), outputs)
    if backward and method.blocks is not None and not deterministic and (function := gradient_function(mask, sizes)):
        return [problems.whole(function)]
    if method.packed:
        return [problems.packed(method.packed)]
    if not method.slices and method.blocks is None:
        return [problems.without_keys()]
    if method.slices is not None:
        return problems.slices(segments.gradient_slices(method.slices) if backward else method.slices)
    return problems.rectangles() if backward else problems.entries(method.blocks)


class _Problems:
    """The problems of the methods for one call.

    Args:
        arrays: q, k and v.
        parts: what the parts of the call have in common.
        outputs: the arguments of :func:`part_problems` that select the results.
    """

    def __init__(self, arrays: tuple[Any, Any, Any], parts: Parts, outputs: dict[str, bool]) -> None:
        self._q, _, v = arrays
        self._parts, self._outputs, self._mask, self._sizes = parts, outputs, parts.mask, parts.sizes
        self._dims = self._q.shape[0], v.shape[0]
        sinks = parts.options.pop("sinks", None)
        self._has_sinks = sinks is not None
        #: The log-sum-exp contains the sinks in the backward pass.
        self._sinks = {} if sinks is None or outputs["backward"] else {"sinks": sinks}
        #: The query heads and the key/value heads of a copy of a block.
        self._heads = (1, 1) if self._mask.heads > 1 else (self._sizes.hq, self._sizes.hkv)

    def _problem(self, queries: tuple[int, ...], keys: tuple[int, ...], options: Mapping[str, Any], **changes: Any) -> Problem:
        """The problem of one call.

        Args:
            queries, keys: the shapes of q, and of k and v, after the head dim.
            options: the options.
            changes: outputs that differ from those of the whole call.
        """
        d, dv = self._dims
        shapes = (d, *queries), (d, *keys), (dv, *keys)
        return read_shapes(*shapes, options, dtype=dtype_name(self._q.dtype), **{**self._outputs, **changes})

    def _located(self, given: Mapping[str, Any], key: tuple[Any, ...], positions: Callable[[], Positions]) -> dict[str, Any]:
        return self._parts.options_of(given, key, self._q, positions)

    def whole(self, function: Callable[..., Any]) -> Problem:
        """One call with the mask function."""
        hq, hkv, batch = self._sizes
        options = {**self._parts.whole_options, "mask_mod": function}
        return self._problem((hq, self._mask.sq, batch), (hkv, self._mask.skv, batch), options)

    def without_keys(self) -> Problem:
        """No call: no query attends to a key."""
        hq, hkv, batch = self._sizes
        return self._problem((hq, self._mask.sq, batch), (hkv, 0, batch), {**self._parts.options, **self._sinks})

    def packed(self, packed: segments.Packed) -> Problem:
        """One packed call."""
        (hq, hkv, batch), mask = self._sizes, self._mask
        given = {**lengths_of(packed), **band_options(packed.band), **self._sinks}
        options = self._located(given, ("packed",), functools.partial(of_packed, packed, mask, self._sizes))
        return self._problem((hq, mask.sq * batch), (hkv, mask.skv * batch), options)

    def slices(self, slices: Sequence[segments.Slice]) -> list[Problem]:
        """A call on each slice."""
        hq, hkv, batch = self._sizes
        found = []
        for part in slices:
            given = {**band_options(part.band), **self._sinks}
            options = self._located(given, (part[:4],), functools.partial(of_slice, part, self._mask, self._sizes))
            found.append(self._problem((hq, part.q1 - part.q0, batch), (hkv, part.k1 - part.k0, batch), options))
        return found

    def rectangles(self) -> list[Problem]:
        """The backward pass on copies of blocks."""
        hq, hkv = self._heads
        copies = (packed_copies(kind, self._mask, self._sizes) for kind in rectangles(self._mask, self._sizes.batch))
        found = []
        for number, part in enumerate(part for part in copies if part is not None):
            pairs = None if part.partial is None else (part.longest_kv, part.longest_q, len(part.starts_q) - 1)
            given = {**lengths_of(part), **_pairs_options(pairs)}
            options = self._located(given, ("rectangles", number), functools.partial(of_copies, part, self._mask))
            found.append(self._problem((hq, BLOCK * len(part.queries)), (hkv, BLOCK * len(part.keys)), options))
        return found

    def entries(self, tables: Tables) -> list[Problem]:
        """The forward pass on batch entries of blocks."""
        (hq, hkv), mask, batch = self._heads, self._mask, self._sizes.batch
        pages = (hkv, BLOCK, -(-mask.skv // BLOCK) * batch * (1 if mask.heads == 1 else self._sizes.hkv))
        with_stats = self._outputs["return_stats"] or bool(tables.copied) or self._has_sinks  # results are merged
        found = []
        for number, entries in enumerate((tables.direct, *tables.copied), -1):
            if entries is None:
                continue
            count, is_direct = len(entries.items), entries is tables.direct
            pairs = None if entries.partial is None else (BLOCK * len(entries.table), BLOCK, count)
            given = {
                "page_table": entries.table.shape, "seq_lens_kv": (count,), "cu_seqlens_q": (count + 1,),
                "max_seqlen_q": BLOCK, **_pairs_options(pairs),
            }  # fmt: skip
            key = ("direct",) if is_direct else ("copied", number)
            options = self._located(given, key, functools.partial(of_entries, entries, mask, self._sizes))
            total = mask.sq * batch if is_direct else BLOCK * count
            found.append(self._problem((hq, total), pages, options, return_stats=with_stats))
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
    method = method_of(mask, sizes)
    how = {
        "packed": "computed as packed sequences", "blocks": "computed as batch entries of blocks",
        "slices": f"computed as {len(method.slices)} calls on slices" if method.slices else "nothing is computed",
    }  # fmt: skip
    return f"{repr(mask)[1:-1]}; {'computed by a kernel that skips blocks' if native else how[method.name]}"
