"""Calls with a block mask: their checks, their programs, and the problems of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..arrays.view import View
from ..calls.arguments import read_shapes, views_of_shapes
from ..calls.options import read_flag
from ..calls.replay_cache import run_cached
from ..calls.user_functions import kept_options
from ..device import cupy_runtime
from ..problem.problem import Problem, row_stats_shape
from ..problem.tensor_spec import dtype_name
from ..sparse.entries import Sizes
from ..sparse.masks.block_mask import BlockMask
from ..sparse.method import check, check_arrays, method_of
from ..sparse.native import is_supported
from .block_masks import Forward, Gradients, backward, forward, score_function
from .program import Builder
from .run import Inputs, run_program


def attention_with_block_mask(
    q: Any,
    k: Any,
    v: Any,
    mask: BlockMask,
    options: Mapping[str, Any],
    *,
    return_stats: Any,
    deterministic: Any,
    out: Any,
    stats: Any,
) -> Any:
    """:func:`cupy_sdpa.attention` with a block mask.

    Args:
        q, k, v, return_stats, deterministic, out, stats: as for :func:`cupy_sdpa.attention`.
        mask: the block mask.
        options: the other options.
    """
    deterministic = deterministic is not False and read_flag("deterministic", deterministic)
    kind = ("blocks", *key_of(mask), bool(return_stats), deterministic)
    given = (q, k, v, out, stats)
    if (results := run_cached(kind, given, options)) is not None:
        return tuple(results) if len(results) > 1 else results[0]
    sizes = check(q, k, v, mask, options)
    check_return_stats(return_stats)
    arrays: dict[str, Any] = dict(zip(Forward._fields, given, strict=True))
    check_arrays(arrays, options.get("sinks"), ("out", "stats"))
    with cupy_runtime.device_context(q):
        kept = kept_options(q, options)
        score_function(q.shape, k.shape, kept)  # checks it
        if out is None:
            arrays["out"] = cupy_runtime.new_result(q, (v.shape[0], *q.shape[1:]), q.dtype)
        if stats is None and return_stats:
            arrays["stats"] = cupy_runtime.new_result(q, row_stats_shape(q.shape), np.dtype(np.float32))
        inputs = Inputs(arrays, kept)
        with_stats = arrays["stats"] is not None
        in_blocks = method_of(mask, sizes).blocks is not None
        native = in_blocks and is_supported((q, k, v), mask, sizes, kept, return_stats=with_stats)
        own, names = Forward(*inputs.of(Forward._fields)), ["out", "stats"][: 2 if with_stats else 1]
        flags = {"deterministic": deterministic, "native": native}

        def build(builder: Builder) -> None:
            forward(builder, own, mask, inputs.options, **flags)

        results = run_program(kind, Forward._fields, given, options, inputs, names, build)
    return tuple(results) if len(results) > 1 else results[0]


def gradients_with_block_mask(
    arrays: tuple[Any, ...], mask: BlockMask, options: Mapping[str, Any], *, deterministic: bool, others: Mapping[str, Any]
) -> tuple[Any, Any, Any]:
    """:func:`cupy_sdpa.attention_backward` with a block mask.

    Args:
        arrays: dout, q, k, v, out, stats, dq, dk and dv; the last three may be None.
        mask: the block mask.
        options: the other options.
        deterministic: whether to return the same bits in every run.
        others: the other requested gradients, which are refused.
    """
    named = dict(zip(Gradients._fields, arrays, strict=True))
    _, q, k, v, *_ = arrays
    kind = ("gradients of blocks", *key_of(mask), deterministic, *map(repr, others.values()))
    if (results := run_cached(kind, arrays, options)) is not None:
        return tuple(results)
    check(q, k, v, mask, options)
    refuse_gradients(others)
    for name in ("dout", "out", "stats"):
        if named[name] is None:
            raise TypeError(
                f"{name} is None; the backward pass needs it: attention(..., return_stats=True) returns out and stats"
            )
    check_arrays(named, options.get("sinks"), ("dq", "dk", "dv"))
    with cupy_runtime.device_context(q):
        kept = kept_options(q, options)
        score_function(q.shape, k.shape, kept)  # checks it
        for name, x in (("dq", q), ("dk", k), ("dv", v)):
            if named[name] is None:
                named[name] = cupy_runtime.new_result(q, x.shape, x.dtype)
        inputs = Inputs(named, kept)
        own = Gradients(*inputs.of(Gradients._fields))

        def build(builder: Builder) -> None:
            backward(builder, own, mask, inputs.options, deterministic=deterministic)

        dq, dk, dv = run_program(kind, Gradients._fields, arrays, options, inputs, ["dq", "dk", "dv"], build)
    return dq, dk, dv


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
