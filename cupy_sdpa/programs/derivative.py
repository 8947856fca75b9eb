"""The builder of a directional derivative, with and without a block mask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..block_masks.block_mask import BlockMask
from ..kernels.derivative_terms import Terms, add_terms, concatenate
from ..problem.problem import row_stats_shape
from ..problem.view import View
from . import block_mask_steps
from .derivative_form import Form, Widened, without_dropout
from .program import Builder
from .widened import wide_arrays


class Tangents(NamedTuple):
    """The tangents of q, k and v; None for 0."""

    dq: View | None
    dk: View | None
    dv: View | None


class Arrays(NamedTuple):
    """The arrays of a derivative besides the tangents, as for :func:`cupy_sdpa.attention_jvp`."""

    q: View
    k: View
    v: View
    out: View
    dout: View
    stats: View | None


def derivative(
    builder: Builder,
    arrays: Arrays,
    tangents: Tangents | Widened,
    options: Mapping[str, Any],
    *,
    form: Form,
    mask: BlockMask | None,
    deterministic: bool,
) -> None:
    """Add the steps that write the output, its derivative, and the log-sum-exp unless ``stats`` is None.

    Args:
        builder: collects the steps.
        arrays: the arrays of the call.
        tangents: the tangents, or the arrays that contain them.
        options: the options, with the scale as a number, and without the block mask.
        form: how the derivative is computed.
        mask: the block mask, or None.
        deterministic: as for :func:`cupy_sdpa.attention_jvp`.
    """
    q, k, v, out, dout, stats = arrays
    passes = _Passes(builder, options, mask, {"deterministic": deterministic})
    if isinstance(tangents, Widened):
        wide = tangents
    else:
        wide, wanted = wide_arrays(form, (q, k, v), tangents, lambda like, *array: builder.temporary(*array))
        if wanted:
            builder.run(concatenate, wanted, writes=[one.target for one in wanted])
    if stats is None and form.scores:
        stats = builder.temporary(row_stats_shape(q.shape), np.float32)
    output = builder.temporary((2 * form.value_dim, *q.shape[1:]), q.dtype) if form.values else out
    passes.attend("output", q, k, wide.values if form.values else v, output, stats)
    scores = means = None
    if form.scores and form.value_dim:
        assert stats is not None
        products = builder.temporary(wide.dout.shape, q.dtype)
        if form.centered:
            passes.attend("products", q, k, wide.v, products, None)
        else:
            builder.fill(products, 0)
        scores = passes.gradient("scores", wide, wide.k, products, stats)
        if form.joint:
            means = scores
        elif not form.centered:
            means = passes.gradient("means", wide, wide.ones, products, stats, dropout=False)
    terms = Terms(scores, output if form.values else None, means, form.head_dim, form.value_dim, form.mean_index)
    given = (terms, output, out, dout) if form.values else (terms, output, None, dout)
    builder.run(add_terms, *given, writes=[x for x in given[2:] if x is not None])


class _Passes(NamedTuple):
    """The passes of a derivative, with or without a block mask."""

    builder: Builder
    options: Mapping[str, Any]
    mask: BlockMask | None
    flags: dict[str, bool]

    def attend(self, name: str, q: View, k: View, v: View, out: View, stats: View | None) -> None:
        """A forward pass."""
        self.builder.part = name
        if self.mask is None:
            self.builder.attend("attention", q, k, v, self.options, out=out, stats=stats, **self.flags)
        else:
            block_mask_steps.forward(
                self.builder, block_mask_steps.Forward(q, k, v, out, stats), self.mask, self.options, **self.flags
            )

    def gradient(self, name: str, wide: Widened, k: View, out: View, stats: View, *, dropout: bool = True) -> View:
        """The gradient of Q2 for some keys; the other gradients are discarded."""
        dq, dk, dv = (self.builder.temporary(x.shape, x.dtype) for x in (wide.q, k, wide.v))
        arrays = block_mask_steps.Gradients(wide.dout, wide.q, k, wide.v, out, stats, dq, dk, dv)
        self.builder.part = name
        options = self.options if dropout else without_dropout(self.options)
        if self.mask is None:
            others: dict[str, Any] = {key: x for key, x in arrays._asdict().items() if key not in "qkv"}
            self.builder.attend_backward("gradients", wide.q, k, wide.v, options, **others, **self.flags)
        else:
            block_mask_steps.backward(self.builder, arrays, self.mask, options, **self.flags)
        return dq
