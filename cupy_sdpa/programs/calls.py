"""The one way of a call from its arguments to its program, for every function of this package.

A repeated call is run as it was cached. Any other is first *resolved*: the options become those of the call that computes it.
Then its arguments are read, its program is compiled, and the call is cached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..block_masks.block_mask import BlockMask
from ..block_masks.intersection import within_band
from ..boundary.argument import read_array
from ..boundary.arguments import read_forward
from ..boundary.call import Call, mode
from ..boundary.compute import read_compute_dtype
from ..boundary.options import read_band
from ..problem.bucket import read_bucket
from ..problem.problem import row_stats_dtype, row_stats_shape
from ..replay.replay_cache import cache_call, run_cached
from ..runtime import cupy_runtime
from .block_mask_calls import reasons_for_dense, with_dense_mask
from .executor import Reading, compiled, composed


def resolved(
    q: Any,
    k: Any,
    options: Mapping[str, Any],
    *,
    return_stats: Any = False,
    outputs: Mapping[str, Any] | None = None,
) -> Mapping[str, Any]:
    """The options of the call that computes a call, and under which it is cached.

    ``compute_dtype`` is the name of another dtype than that of q, or missing. ``block_mask`` is a mask that is computed by
    blocks, or missing, and a mask that needs all blocks is the option ``mask``. q and k are arrays or shapes; ``outputs`` are
    the requested gradients besides those of q, k and v, by the names of arguments.
    """
    found = {**options}
    dtype = read_compute_dtype(found.pop("compute_dtype", None), q)
    mask = found.pop("block_mask", None)
    if isinstance(mask, BlockMask) and reasons_for_dense(found, return_stats=return_stats, outputs=outputs):
        found = with_dense_mask(q, k, mask, found)
        mask = None
    if mask is options.get("block_mask") and dtype is options.get("compute_dtype"):
        return options
    return found | {name: x for name, x in (("block_mask", mask), ("compute_dtype", dtype)) if x is not None}


def parts_of(options: Mapping[str, Any]) -> tuple[BlockMask | None, str | None, dict[str, Any]]:
    """The block mask within ``causal`` and ``window``, the dtype to compute in, and the other options of :func:`resolved`."""
    rest = {**options}
    mask, dtype = rest.pop("block_mask", None), rest.pop("compute_dtype", None)
    if isinstance(mask, BlockMask):  # anything else is refused
        read_bucket(rest.pop("bucket", None))  # a plan of blocks depends on the mask, not on the lengths alone
        band = read_band(rest.pop("causal", None), rest.pop("window", None))
        mask = mask if band is None else within_band(mask, band)
    return mask, dtype, rest


def call_program(
    kind: Any,
    names: Sequence[str],
    arrays: tuple[Any, ...],
    options: Mapping[str, Any],
    read: Callable[[dict[str, Any]], Reading | Call],
) -> list[Any]:
    """Run a call: one that is repeated as it was cached, any other after ``read`` has read its arrays, by name.

    ``kind``, ``names``, ``arrays`` and ``options`` are as for :func:`.cache_call`, in the form of this package.
    """
    results = run_cached(kind, arrays, options)
    if results is not None:
        return results
    like = next((array for array in arrays if array is not None), None)
    with cupy_runtime.device_context(like):
        found = read(_with_missing(dict(zip(names, arrays, strict=True))))
        call = compiled(found) if isinstance(found, Call) else composed(kind, options, found)
    results = call.run()
    cache_call(kind, names, arrays, options, call)
    return results


def _with_missing(arrays: dict[str, Any]) -> dict[str, Any]:
    """The arrays of a call; if it is described, with arrays in place of those that are missing: no element of them is read."""
    description = mode.get().description
    likes = {name: like for name, like in description.missing.items() if arrays[name] is None} if description else {}
    if not likes:
        return arrays
    q, k, v = (read_array(name, arrays[name]).array for name in "qkv")
    if not all(x.ndim in (3, 4) for x in (q, k, v)):
        read_forward(q, k, v, {})  # raises
    shapes = {"q": q.shape, "k": k.shape, "v": v.shape, "out": (v.shape[0], *q.shape[1:]), "stats": row_stats_shape(q.shape)}
    dtypes = dict.fromkeys(shapes, q.dtype) | {"stats": np.dtype(row_stats_dtype(q.dtype))}
    return arrays | {name: cupy_runtime.new_result(q, shapes[like], dtypes[like]) for name, like in likes.items()}
