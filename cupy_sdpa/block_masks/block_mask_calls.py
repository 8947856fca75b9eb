"""Block masks of calls: by blocks or as dense masks, and their description."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from ..extend import OPTIONS, Constant, View
from .block_mask import BlockMask
from .entries import TableSizes
from .method import check_groups, check_mask_type, method_of


def reasons_for_dense(
    options: Mapping[str, Any], *, return_stats: Any = False, outputs: Mapping[str, Any] | None = None
) -> list[str]:
    """Return the arguments that force a call to compute all blocks with a dense mask; empty if it computes by blocks."""
    known = {name: value for name, value in options.items() if name in OPTIONS}  # unknown options raise an error later
    found = [name for name, value in known.items() if not OPTIONS[name].blocks and OPTIONS[name].is_passed(value)]
    found += [name for name, value in (outputs or {}).items() if value is not None and value is not False]
    is_flag = isinstance(return_stats, Hashable) and return_stats in (False, True)
    return found if is_flag else [*found, f"return_stats={return_stats!r}"]


def dense_options(q: Any, k: Any, options: Mapping[str, Any]) -> Any:
    """Return the options of a function that does not compute blocks: with a dense mask instead of ``block_mask``, if passed.

    q and k are arrays or shapes. Without k, as for the part of a group, the sizes are not checked here.
    """
    if options.get("block_mask") is None:
        return options
    rest = {name: value for name, value in options.items() if name != "block_mask"}
    check_mask_type(mask := options["block_mask"])
    return with_dense_mask(q, k, mask, rest)


def decide_dense(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Return :func:`dense_options` of a call's arrays: :attr:`.Call.decide` of operations that do not compute blocks."""
    return dense_options(arrays["q"], arrays["k"], options)


def with_dense_mask(q: Any, k: Any, mask: BlockMask, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with a block mask as ``mask=``, or as a mask function if ``mask`` is already passed.

    The array is created by the first call, and belongs to the block mask.
    """
    array = _dense_mask(q, mask)
    if k is not None:
        _check_sizes(q, k, mask, options)
    if options.get("mask") is None:
        return {**options, "mask": array}
    if options.get("mask_mod") is not None:
        raise ValueError(
            "mask, mask_mod and block_mask are passed; a call takes at most two of them: create block_mask with the condition "
            "of mask_mod"
        )
    function = _WITHIN[mask.heads > 1, mask.batch > 1]
    return {**options, "mask_mod": function, "tensors": {**(options.get("tensors") or {}), "_dense_block_mask": array}}


def _within(per_head: bool, per_entry: bool) -> Callable[..., Any]:
    """Return a dense mask as a mask function; its array has a name that no array of the caller has."""

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any, _dense_block_mask: Any) -> Any:
        return _dense_block_mask[kv_idx, q_idx, h if per_head else 0, b if per_entry else 0]

    return mask_mod


_WITHIN = {(per_head, per_entry): _within(per_head, per_entry) for per_head in (False, True) for per_entry in (False, True)}


def _dense_mask(q: Any, mask: BlockMask) -> Any:
    """Return the mask as an array of the engine of q; its view or its shape if q is one."""
    if isinstance(q, View):
        return View.dense("mask", mask.shape, bool, q.storage.device)
    if not hasattr(q, "dtype"):
        return mask.shape
    if "dense" not in mask.tables:
        mask.tables["dense"] = Constant(mask.to_dense())
    constant: Constant = mask.tables["dense"]
    return constant.like(q)


def _check_sizes(q: Any, k: Any, mask: BlockMask, options: Mapping[str, Any]) -> None:
    """Raise ValueError if a mask's sizes differ from the scores of a call; arrays of wrong ranks raise errors later."""
    queries, keys = (tuple(getattr(x, "shape", x)) for x in (q, k))
    starts, table = options.get("cu_seqlens_q"), options.get("page_table")
    if hasattr(q, "dtype"):  # they are arrays or lists, not shapes
        starts, table = ((len(x),) if isinstance(x, (list, tuple)) else x for x in (starts, table))
    if len(queries) != (4 if starts is None else 3) or len(keys) != (3 if table is None and starts is not None else 4):
        return
    lengths, names = [*queries[2:3], *keys[2:3]], ["q has {} queries", "k {} keys"]
    batch = queries[3] if starts is None else (getattr(starts, "shape", starts)[0] - 1)
    if starts is not None:
        lengths = [options.get("max_seqlen_q"), options.get("max_seqlen_kv")]
        names = ["max_seqlen_q is {}", "max_seqlen_kv {}"]
    if table is not None:
        pages, *_ = getattr(table, "shape", table)
        lengths[1], names[1] = pages * keys[2], "the pages of a sequence have {} keys"
    if None in lengths:
        return
    if [mask.sq, mask.skv] != lengths:
        found = " and ".join(text.format(n) for text, n in zip(names, lengths, strict=True))
        raise ValueError(f"block_mask is for {mask.sq} queries and {mask.skv} keys; {found}")
    check_groups(mask, queries[1], batch)


def method_description(mask: BlockMask, sizes: TableSizes) -> str:
    """Return how calls of some sizes compute a mask, for :func:`cupy_sdpa.explain`."""
    method = method_of(mask, sizes)
    how = {
        "packed": "computed as packed sequences", "blocks": "computed as batch items of blocks",
        "slices": f"computed as {len(method.slices)} calls on slices" if method.slices else "nothing is computed",
    }  # fmt: skip
    return f"{repr(mask)[1:-1]}; {how[method.name]}"


def dense_description(mask: BlockMask, reasons: Sequence[str]) -> str:
    """Return how calls with other arguments compute a mask, for :func:`cupy_sdpa.explain`."""
    return f"{repr(mask)[1:-1]}; computed as a dense mask of all blocks, because of {', '.join(reasons)}"
