"""The builder of a directional derivative, with and without a block mask."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..block_masks.block_mask import BlockMask
from ..boundary.options import read_scale
from ..kernels.derivative_terms import Terms, add_terms, concatenate
from ..problem.problem import row_stats_shape
from ..problem.view import View
from . import passes
from .derivative_checks import check_copies
from .derivative_form import Form, Widened, without_dropout
from .program import Builder
from .steps import Check
from .widened import wide_arrays

#: The names of the arrays of a call, of the tangents and the results among them, and of the wider arrays, which may replace
#: the tangents.
ARRAYS = ("q", "k", "v", "dq", "dk", "dv", "out", "dout", "stats")
TANGENTS, RESULTS = ARRAYS[3:6], ARRAYS[6:]
WIDENED = tuple(f"widened.{name}" for name in Widened._fields[:-1])


def derivative(
    builder: Builder,
    views: Mapping[str, View],
    options: Mapping[str, Any],
    *,
    form: Form,
    mask: BlockMask | None = None,
    dtype: str | None = None,
    deterministic: bool = False,
) -> None:
    """Add the steps that write the output, its derivative, and the log-sum-exp if there is an array for it.

    Args:
        builder: collects the steps.
        views: the arrays of the call by name, without those that are not passed, and with its results.
        options: the options, with views in place of arrays, and without the block mask.
        form: how the derivative is computed.
        mask: the block mask. Default None.
        dtype: the dtype to compute in. Default None: that of q.
        deterministic: as for :func:`cupy_sdpa.attention_jvp`. Default False.
    """
    own, finish = passes.rounded(builder, {name: views.get(name) for name in ARRAYS}, dtype, ("out", "dout"))
    q, k, v, dq, dk, dv, out, dout, stats = (own[name] for name in ARRAYS)
    options = {**options, "scale": read_scale(options.get("scale"), form.head_dim)}
    flags: dict[str, Any] = {"mask": mask, "deterministic": deterministic}

    def attend(name: str, values: View, target: View, stats: View | None) -> None:
        """A forward pass."""
        builder.part = name
        given = {"q": q, "k": k, "v": values, "out": target} | ({} if stats is None else {"stats": stats})
        passes.forward(builder, given, options, return_stats=stats is not None, **flags)

    def gradient(name: str, keys: View, products: View, options: Mapping[str, Any]) -> View:
        """The gradient of Q2 for some keys; the other gradients are discarded."""
        builder.part = name
        given = {"dout": wide.dout, "q": wide.q, "k": keys, "v": wide.v, "out": products, "stats": stats}
        made = {f"d{of}": builder.temporary(given[of].shape, q.dtype) for of in "qkv"}
        passes.backward(builder, given | made, options, given_stats="part", **flags)
        return made["dq"]

    if any(name in views for name in WIDENED):
        wide = Widened._make([*map(views.get, WIDENED), form])
        checked = {name: views[name] for name in ("q", "k", "v", *WIDENED) if name in views}
        builder.checks.append(Check(functools.partial(check_copies, dtype), checked))
    else:
        wide, wanted = wide_arrays(form, (q, k, v), (dq, dk, dv), lambda like, *array: builder.temporary(*array))
        if wanted:
            builder.run(concatenate, wanted, writes=[one.target for one in wanted])
    if stats is None and form.scores:
        stats = builder.temporary(row_stats_shape(q.shape), np.float32)
    output = builder.temporary((2 * form.value_dim, *q.shape[1:]), q.dtype) if form.values else out
    attend("output", wide.values if form.values else v, output, stats)
    scores = means = None
    if form.scores and form.value_dim:
        products = builder.temporary(wide.dout.shape, q.dtype)
        if form.centered:
            attend("products", wide.v, products, None)
        else:
            builder.fill(products, 0)
        scores = gradient("scores", wide.k, products, options)
        if form.joint:
            means = scores
        elif not form.centered:
            means = gradient("means", wide.ones, products, without_dropout(options))
    terms = Terms(scores, output if form.values else None, means, form.head_dim, form.value_dim, form.mean_index)
    given = (terms, output, out, dout) if form.values else (terms, output, None, dout)
    builder.run(add_terms, *given, writes=[x for x in given[2:] if x is not None])
    finish()
