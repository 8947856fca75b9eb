"""The problems of a directional derivative, from shapes: to plan ahead of time, and to explain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .._typing import Array
from ..arrays.layouts import options_in_own, other_layout, to_own
from ..calls.arguments import read_shapes
from ..calls.options import read_scale, takes_options
from ..errors import Unsupported
from ..problem.problem import Problem
from ..problem.tensor_spec import dtype_name, numpy_dtype, placeholder
from ..sparse.masks.block_mask import BlockMask
from ..sparse.problems import part_problems
from .checks import NO_PAGED_DERIVATIVES
from .form import Form, form_of, without_dropout

#: The tangents.
TANGENTS = ("dq", "dk", "dv")


@takes_options
def jvp_problems(
    q: Array | Sequence[int],
    k: Array | Sequence[int],
    v: Array | Sequence[int],
    *,
    dtype: Any = None,
    tangents: Sequence[str] = TANGENTS,
    seq_lens: bool = False,
    return_stats: bool = False,
    deterministic: bool = False,
    **options: Any,
) -> tuple[Problem, ...]:
    """The problems of the passes of :func:`cupy_sdpa.attention_jvp`, for :func:`cupy_sdpa.explain` and ``store.build``.

    Args:
        q, k, v, dtype, seq_lens, options: as for :func:`cupy_sdpa.problem`.
        tangents: which of ``"dq"``, ``"dk"`` and ``"dv"`` are given. Default: all.
        return_stats, deterministic: as for the call.

    Returns:
        The problems of all passes in the order in which they run.

    Raises:
        TypeError, ValueError, Unsupported: the arguments are invalid.

    >>> import cupy_sdpa
    >>> shape = (64, 8, 1024, 2)
    >>> for problem in cupy_sdpa.jvp_problems(shape, shape, shape, dtype="bfloat16"):
    ...     print("gradients" if problem.backward else "forward", problem.q.shape[0], problem.v.shape[0])
    forward 64 128
    forward 64 128
    gradients 128 128
    """
    if isinstance(tangents, str):
        raise TypeError(f"tangents is {tangents!r}; it must be a sequence of names: pass [{tangents!r}]")
    if unknown := [name for name in tangents if name not in TANGENTS]:
        raise ValueError(f"tangents contains {unknown[0]!r}; it can contain {', '.join(TANGENTS)}")
    if not tangents:
        raise ValueError("tangents is empty; pass at least one of dq, dk, dv")
    common = {"dtype": dtype, "seq_lens": seq_lens, "deterministic": deterministic}
    if layout := other_layout(options):
        q, k, v = (to_own(name, x, layout) for name, x in (("q", q), ("k", k), ("v", v)))
        options = options_in_own(options, layout)
    return problems_of(q, k, v, tangents, options, return_stats=return_stats, **common)


def problems_of(
    q: Any, k: Any, v: Any, tangents: Sequence[str], options: Mapping[str, Any], *, return_stats: bool = False, **common: Any
) -> tuple[Problem, ...]:
    """:func:`jvp_problems` for valid names of tangents, and for either engine (``on_gpu``)."""
    if options.get("page_table") is not None:
        raise Unsupported(NO_PAGED_DERIVATIVES)
    shapes = [tuple(x.shape if hasattr(x, "shape") else x) for x in (q, k, v)]
    if not all(shapes):
        raise ValueError(f"q, k and v have shapes {shapes}; a shape is (head_dim, heads, seq, batch)")
    (d, *queries), (_, *keys), (dv, *_) = shapes
    form = form_of(d, dv, given_by(tangents), options, deterministic=bool(common.get("deterministic")))
    options = {**options, "scale": read_scale(options.get("scale"), d)}
    if hasattr(q, "dtype"):  # of the shapes of the wider arrays
        common["dtype"] = dtype_name(q.dtype)
    passes = bool(form.scores and dv)
    if (mask := options.pop("block_mask", None)) is not None:
        return _of_blocks(form, shapes, mask, options, common, bool(return_stats))
    values = (2 * dv, *keys) if form.values else v
    problems = [read_shapes(q, k, values, options, return_stats=bool(return_stats) or form.scores, **common)]
    if passes and form.centered:
        problems.append(read_shapes(q, k, (form.product_width, *keys), options, **common))
    if passes:
        wide = (form.score_width, *queries), (form.score_width, *keys), (form.product_width, *keys)
        problems.append(read_shapes(*wide, options, backward=True, **common))
        if not form.centered and not form.joint:
            problems.append(read_shapes(*wide, without_dropout(options), backward=True, **common))
    return tuple(problems)


def _of_blocks(
    form: Form,
    shapes: Sequence[tuple[int, ...]],
    mask: BlockMask,
    options: Mapping[str, Any],
    common: Mapping[str, Any],
    return_stats: bool,
) -> tuple[Problem, ...]:
    """The problems of the passes with a block mask."""
    (d, *queries), (_, *keys), (dv, *_) = shapes
    dtype = numpy_dtype(str(common["dtype"]))
    if tensors := options.get("tensors"):
        options = {**options, "tensors": {name: _without_values(x) for name, x in tensors.items()}}
    deterministic = bool(common.get("deterministic"))

    def parts(q: int, k: int, v: int, **outputs: bool) -> list[Problem]:
        arrays = [placeholder((n, *others), dtype) for n, others in ((q, queries), (k, keys), (v, keys))]
        return part_problems((arrays[0], arrays[1], arrays[2]), mask, options, deterministic=deterministic, **outputs)

    problems = parts(d, d, 2 * dv if form.values else dv, return_stats=return_stats or form.scores)
    if form.scores and dv:
        problems += parts(d, d, form.product_width) if form.centered else []
        wide = form.score_width, form.score_width, form.product_width
        for _ in range(2 if not form.centered and not form.joint else 1):
            problems += parts(*wide, backward=True)
    return tuple(problems)


def _without_values(x: Any) -> Any:
    """A numpy array in place of an array of either engine, or of a shape: a score function copies its elements."""
    if not hasattr(x, "dtype"):
        return np.zeros(x, np.float32, order="F")
    return np.zeros(x.shape, x.dtype, order="F" if x.flags.f_contiguous else "C")


def given_by(tangents: Sequence[str]) -> tuple[bool, bool, bool]:
    """Whether dq, dk and dv are among some names."""
    return "dq" in tangents, "dk" in tangents, "dv" in tangents
