"""Block masks of calls: their keys, their checks, and the problems of their programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..block_masks.block_mask import BlockMask
from ..block_masks.entries import Sizes
from ..block_masks.method import check, method_of
from ..boundary.arguments import read_shapes, views_of_shapes
from ..problem.problem import Problem, row_stats_shape
from ..problem.tensor_spec import dtype_name
from ..problem.view import View
from .block_mask_steps import Forward, Gradients, backward, forward
from .program import Builder


def key_of(mask: Any) -> tuple[Any, ...]:
    """What the key of a cached call has of a mask: its number, and whether its function has not changed."""
    return (mask.number, mask.has_its_function) if isinstance(mask, BlockMask) else (None, None)


def check_return_stats(return_stats: Any) -> None:
    """Raise ValueError for row statistics that are not computed with a block mask."""
    if return_stats not in (False, True):
        raise ValueError(f"return_stats is {return_stats!r} and block_mask is passed; it must be False or True")


def refuse_gradients(others: Mapping[str, Any]) -> None:
    """Raise ValueError if other gradients than those of q, k and v are requested, by the names of the arguments."""
    for name, value in others.items():
        if value is not False and value is not None:
            raise ValueError(f"{name} is {value!r} and block_mask is passed; only dq, dk and dv are computed with a block mask")


# Without arrays


def part_problems(
    arrays: tuple[Any, Any, Any],
    mask: BlockMask,
    options: Mapping[str, Any],
    *,
    gradients: bool = False,
    return_stats: bool = False,
    deterministic: bool = False,
    native: bool = False,
    on_gpu: bool = True,
) -> list[Problem]:
    """The problems of the steps of a call with a block mask; results are assumed to be dense.

    Args:
        arrays: q, k and v.
        mask: the block mask.
        options: the other options.
        gradients: whether the call computes gradients. Default False.
        return_stats, deterministic: as for :func:`cupy_sdpa.explain`.
        native: whether the kernel skips blocks itself. Default False.
        on_gpu: whether the program is for a GPU. Default True.
    """
    q, k, v = arrays
    check(q, k, v, mask, options)
    views, given = views_of_shapes(q, k, v, options, device=0 if on_gpu else None)
    builder = Builder(0 if on_gpu else None)
    if gradients:
        add_gradients(builder, views, mask, given, deterministic=deterministic)
    else:
        out = View.dense("out", (v.shape[0], *q.shape[1:]), q.dtype, builder.device)
        rows = View.dense("stats", row_stats_shape(q.shape), np.float32, builder.device) if return_stats else None
        forward(builder, Forward(**views, out=out, stats=rows), mask, given, deterministic=deterministic, native=native)
    found = builder.build().problems()
    return found or [without_keys(q.shape, v.shape, q.dtype, backward=gradients, return_stats=return_stats)]


def without_keys(q: Sequence[int], v: Sequence[int], dtype: Any, **outputs: Any) -> Problem:
    """The problem of a call in which no query attends to a key, from shapes: nothing is computed."""
    (d, hq, sq, b), (dv, hkv, *_) = q, v
    return read_shapes((d, hq, sq, b), (d, hkv, 0, b), (dv, hkv, 0, b), {}, dtype=dtype_name(dtype), **outputs)


def add_gradients(
    builder: Builder, views: Mapping[str, View], mask: BlockMask, options: Mapping[str, Any], *, deterministic: bool
) -> None:
    """Add the steps of the gradients of q, k and v, for dense arrays of all others."""
    q, k, v = (views[name] for name in "qkv")
    shapes = {
        "dout": (v.shape[0], *q.shape[1:]),
        "out": (v.shape[0], *q.shape[1:]),
        "dq": q.shape,
        "dk": k.shape,
        "dv": v.shape,
    }
    others = {name: View.dense(name, shape, q.dtype, builder.device) for name, shape in shapes.items()}
    others["stats"] = View.dense("stats", row_stats_shape(q.shape), np.float32, builder.device)
    backward(builder, Gradients(q=q, k=k, v=v, **others), mask, options, deterministic=deterministic)


def description(mask: BlockMask, sizes: Sizes, *, native: bool = False) -> str:
    """How calls of some sizes compute a mask, for :func:`cupy_sdpa.explain`; ``native`` if the kernel skips blocks itself."""
    method = method_of(mask, sizes)
    how = {
        "packed": "computed as packed sequences", "blocks": "computed as batch entries of blocks",
        "slices": f"computed as {len(method.slices)} calls on slices" if method.slices else "nothing is computed",
    }  # fmt: skip
    return f"{repr(mask)[1:-1]}; {'computed by a kernel that skips blocks' if native else how[method.name]}"
