"""Attention and its derivative in a direction (the Jacobian-vector product)."""

from __future__ import annotations

from typing import Any, Unpack, cast

import numpy as np

from .._typing import Array, ArrayT
from ..arrays.conversion import convert, needs_conversion
from ..arrays.layouts import other_layout
from ..calls.arguments import read_backward, read_forward
from ..calls.call import Call
from ..calls.options import Options, read_flag, read_scale, takes_options
from ..calls.replay_cache import cache_call, run_cached
from ..calls.user_functions import kept_options
from ..device import cupy_runtime, driver, memory
from ..errors import Unsupported
from ..problem.problem import row_stats_shape
from ..sparse.backward import gradients_with_block_mask
from ..sparse.forward import attention_with_block_mask
from ..sparse.masks.block_mask import BlockMask
from ..sparse.problems import plan_parts
from ..tracing import recorder
from .checks import check_results, read_form
from .form import Form, Widened, without_dropout
from .kernels import Terms, add_terms
from .widened import concatenated

#: The arrays of the passes.
_FORWARD, _BACKWARD = ("q", "k", "v", "out", "stats"), ("dout", "q", "k", "v", "out", "stats", "dq", "dk", "dv")


@takes_options
def attention_jvp(
    q: ArrayT,
    k: Array,
    v: Array,
    dq: Array | None = None,
    dk: Array | None = None,
    dv: Array | None = None,
    *,
    widened: Widened | None = None,
    return_stats: bool = False,
    deterministic: bool = False,
    out: Array | None = None,
    dout: Array | None = None,
    stats: Array | None = None,
    **options: Unpack[Options],
) -> tuple[ArrayT, ...]:
    r"""Compute attention and its derivative in the direction (dq, dk, dv): the Jacobian-vector product, forward mode.

    .. math:: dO = \frac{d}{dt} O(Q + t\,dQ,\; K + t\,dK,\; V + t\,dV) \Big|_{t=0}
                 = \bigl(P \circ (dS - \operatorname{rowsum}(P \circ dS))\bigr) V + P\,dV, \qquad
              dS = \tau\,(dQ\,K^\top + Q\,dK^\top)

    Nothing of size Sq x Skv is stored: the derivative is computed by the kernels of :func:`cupy_sdpa.attention` and
    :func:`cupy_sdpa.attention_backward` on arrays that are concatenated along head_dim. With dq or dk these are two forward
    passes and a backward pass; with dv alone one forward pass. With ``softcap``, ``score_mod`` or dropout a second backward
    pass may replace the second forward pass. Keys or values with a mean far above their variation cost precision in 16 bits;
    :doc:`/derivatives` gives the error and the remedy.

    Args:
        q, k, v: as for :func:`cupy_sdpa.attention`.
        dq, dk, dv: the direction: arrays of the shapes and dtypes of q, k and v, with any strides. None is 0, and takes less
            time; at least one is given.
        widened: the arrays that :func:`cupy_sdpa.widen` returns, in place of dq, dk and dv: nothing is copied. q, k and v must
            be the arrays that it was called with. Default None.
        return_stats: also return the log-sum-exp of the scores, float32. Default False.
        deterministic: return the same bits in every run, as for :func:`cupy_sdpa.attention_backward`. Default False.
        out, dout: arrays ``(Dv, Hq, Sq, B)`` to write the output and its derivative into, of q's dtype; they must not overlap
            each other or an input.
        stats: float32 array ``(Sq, Hq, B)`` to write the log-sum-exp into; implies ``return_stats``.
        options: as for :func:`cupy_sdpa.attention`, except ``page_table`` and ``num_splits``. With ``block_mask`` all passes
            compute its blocks only. The derivative is that at constant options: their arrays, such as ``bias``, ``sinks`` and
            ``tensors``, have no tangents. Dropout drops the same weights from the output and its derivative.

    Returns:
        ``(out, dout)`` or ``(out, dout, stats)``. New arrays are in Fortran order. out and dout are 0 in fully masked rows
        and in padding.

    Raises:
        TypeError, ValueError, CudnnError: as :func:`cupy_sdpa.attention`; or a tangent does not match its array.
        Unsupported: this cuDNN or GPU cannot run it. The gradients of arrays with head dims D + Dv and 2 D must be supported:
            D and Dv are at most 128 on Hopper, and 64 on other GPUs.

    Source: :doc:`/derivatives`, which derives the formulas; Dao 2023, "FlashAttention-2", algorithm 2, for the backward pass.

    >>> import numpy as np, cupy_sdpa
    >>> rng = np.random.default_rng(0)
    >>> q, k, v, dq, dk, dv = (np.asfortranarray(rng.standard_normal((8, 2, 5, 1))) for _ in range(6))
    >>> out, dout = cupy_sdpa.attention_jvp(q, k, v, dq, dk, dv, causal=True)
    >>> plus, minus = (cupy_sdpa.attention(q + t * dq, k + t * dk, v + t * dv, causal=True) for t in (1e-3, -1e-3))
    >>> bool(np.allclose(dout, (plus - minus) / 2e-3, atol=1e-5))
    True
    """
    if needs_conversion(q, options) or other_layout(options):
        arrays = {"q": q, "k": k, "v": v, "dq": dq, "dk": dk, "dv": dv, "out": out, "dout": dout, "stats": stats}
        converted: tuple[Any, ...] = convert(
            attention_jvp, arrays, options, ("out", "dout", "stats"), widened=widened, return_stats=return_stats,
            deterministic=deterministic,
        )  # fmt: skip
        return converted
    given: dict[str, Any] = dict(options) if recorder.active else {}
    for name, value in (("return_stats", return_stats), ("deterministic", deterministic)):
        read_flag(name, value)
    form = read_form(q, k, v, (dq, dk, dv), widened, options, deterministic=deterministic)
    check_results(out, dout, q, v, (q, k, v, dq, dk, dv, *(widened or ())))
    options = cast(Options, kept_options(q, options))  # all passes compute with the same functions
    options["scale"] = read_scale(options.get("scale"), form.head_dim)
    mask, was_widened = options.pop("block_mask", None), widened is not None
    with cupy_runtime.device_context(q):
        if widened is None:
            widened = concatenated(form, (q, k, v), (dq, dk, dv), cupy_runtime.temporary)
        results = _Derivative(q, k, v, widened, options, deterministic, mask).run(out, dout, stats, return_stats)
    if recorder.active:
        arrays = {"q": q, "k": k, "v": v, "dq": dq, "dk": dk, "dv": dv, "out": out, "dout": dout, "stats": stats}
        given |= {"return_stats": return_stats, "deterministic": deterministic, "widened": was_widened}
        recorder.record("attention_jvp", arrays, given)
    return results if return_stats or stats is not None else results[:2]


class _Derivative:
    """The passes of one derivative.

    Args:
        q, k, v: the caller's arrays.
        widened: the wider arrays.
        options: the options, with the scale.
        deterministic: whether the bits must be reproducible.
        mask: the block mask, or None.
    """

    def __init__(
        self, q: Any, k: Any, v: Any, widened: Widened, options: Options, deterministic: bool, mask: BlockMask | None
    ) -> None:
        self.mask = mask
        self.q, self.k, self.v, self.widened, self.form = q, k, v, widened, widened.form
        self.options, self.flags = options, {"deterministic": bool(deterministic)}
        #: While the stream is captured, results that the caller does not get belong to the graph.
        self.capturing = cupy_runtime.is_array(q) and cupy_runtime.capturing()
        #: The passes, read and planned before the first one runs; empty while all of them are cached.
        self.calls: dict[str, Call] = {}
        #: The arrays that the pass ``output`` writes to; None if it creates them.
        self.outputs: dict[str, Any] = {}

    def run(self, out: Any, dout: Any, stats: Any, return_stats: bool) -> tuple[Any, Any, Any]:
        """Compute the output, its derivative and the log-sum-exp."""
        form, shape = self.form, (self.form.value_dim, *self.q.shape[1:])
        self.with_stats = return_stats or stats is not None or form.scores
        if self.mask is not None and cupy_runtime.is_array(self.q):
            self.plan_blocks(self.mask)
        if self.capturing and stats is None and form.scores and not return_stats:
            stats = self.temporary(row_stats_shape(self.q.shape), np.float32)
        output, stats = self.output(None if form.values else out, stats)
        scores, means = self.scores(stats) if form.scores and form.value_dim else (None, None)
        dout = cupy_runtime.new_result(self.q, shape, self.q.dtype) if dout is None else dout
        terms = Terms(scores, output if form.values else None, means, form.head_dim, form.value_dim, form.mean_index)
        if not form.values:
            add_terms(terms, output, None, dout)
            return output, dout, stats
        out = cupy_runtime.new_result(self.q, shape, self.q.dtype) if out is None else out
        add_terms(terms, output, out, dout)
        return out, dout, stats

    def output(self, out: Any, stats: Any) -> tuple[Any, Any]:
        """The output, for the values [v; v'] if dv is given, and the log-sum-exp or None."""
        values = self.widened.values if self.form.values else self.v
        if self.form.values and self.capturing:
            out = self.temporary((values.shape[0], *self.q.shape[1:]))
        self.outputs = {"out": out, "stats": stats}
        results = self.call("output", _FORWARD, (self.q, self.k, values, out, stats), self.options)
        return results[0], results[1] if self.with_stats else None

    def scores(self, stats: Any) -> tuple[Any, Any]:
        """The gradient of Q2; and the array with the means of the derivatives of the scores, if they must be subtracted."""
        form, widened, inside = self.form, self.widened, self.widened.dout.shape
        products = self.temporary(inside) if self.capturing or not form.centered else None
        if form.centered:
            (products,) = self.call("products", _FORWARD, (self.q, self.k, widened.v, products, None), self.options)
            scores = self.gradient("scores", widened.k, products, stats, self.options)
            return scores, scores if form.joint else None
        memory.clear(products, 0.0)
        scores = self.gradient("scores", widened.k, products, stats, self.options)
        if form.joint:
            return scores, scores
        return scores, self.gradient("means", widened.ones, products, stats, without_dropout(self.options))

    def gradient(self, name: str, k: Any, out: Any, stats: Any, options: Any) -> Any:
        """The gradient of Q2 for some keys; the other gradients are discarded."""
        q, v, dout = self.widened.q, self.widened.v, self.widened.dout
        gradients = [self.temporary(x.shape) for x in (q, k, v)] if self.capturing else [None] * 3
        gradient, *_ = self.call(name, _BACKWARD, (dout, q, k, v, out, stats, *gradients), options)
        return gradient

    def temporary(self, shape: tuple[int, ...], dtype: Any = None) -> Any:
        """An array that is used within the call only, by default of q's dtype."""
        return cupy_runtime.temporary(self.q, shape, dtype or self.q.dtype)

    def call(self, name: str, names: tuple[str, ...], arrays: tuple[Any, ...], options: Any) -> list[Any]:
        """Run a pass; it is not parsed if an equal one was cached."""
        if self.mask is not None:
            return self.call_with_blocks(self.mask, name, arrays, options)
        kind = "jvp", name, self.with_stats, *self.flags.values()
        results = run_cached(kind, arrays, options)
        if results is None:
            self.calls = self.calls or self.plan()
            call = self.calls[name]
            call.arrays |= {name: array for name, array in zip(names, arrays, strict=True) if array is not None}
            results = call.run()
            cache_call(kind, names, arrays, options, call)
        return results

    def plan(self) -> dict[str, Call]:
        """Read and plan all passes, so that nothing is written if one of them cannot run."""
        form, w, options = self.form, self.widened, self.options
        values = w.values if form.values else self.v
        output = read_forward(self.q, self.k, values, options, return_stats=self.with_stats, **self.flags, **self.outputs)
        calls = {"output": output}
        if form.scores and form.value_dim:
            if form.centered:
                calls["products"] = read_forward(self.q, self.k, w.v, options, **self.flags)
            calls["scores"] = read_backward(w.q, w.k, w.v, options, dout=w.dout, **self.flags)
            if w.ones is not None:
                calls["means"] = read_backward(w.q, w.ones, w.v, without_dropout(options), dout=w.dout, **self.flags)
        for name, call in calls.items():
            try:
                call.plan()
            except Unsupported as error:
                raise Unsupported(refusal(form, name, str(error))) from error
        return calls

    def call_with_blocks(self, mask: BlockMask, name: str, arrays: tuple[Any, ...], options: Any) -> list[Any]:
        """Run a pass with a block mask."""
        if len(arrays) == len(_BACKWARD):
            return list(gradients_with_block_mask(arrays, mask, options, **self.flags, others={}))
        q, k, v, out, stats = arrays
        with_stats = name == "output" and self.with_stats
        flags = {"return_stats": with_stats, **self.flags}
        results = attention_with_block_mask(q, k, v, mask, options, **flags, out=out, stats=stats)
        return list(results) if with_stats else [results]

    def plan_blocks(self, mask: BlockMask) -> None:
        """Plan all passes with a block mask, once for each mask, so that nothing is written if one of them cannot run."""
        form, w = self.form, self.widened
        key = ("derivative", driver.context_id(), form, self.q.dtype, self.q.shape, self.k.shape, *sorted(self.options))
        key = (*key, *self.flags.values())
        if key in mask.tables:
            return
        passes = {
            "output": ((self.q, self.k, w.values if form.values else self.v), {"return_stats": self.with_stats, **self.flags})
        }
        if form.scores and form.value_dim:
            gradients = {"backward": True, **self.flags}
            passes |= {"products": ((self.q, self.k, w.v), dict(self.flags))} if form.centered else {}
            passes["scores"] = (w.q, w.k, w.v), gradients
            passes |= {"means": ((w.q, w.ones, w.v), gradients)} if w.ones is not None else {}
        for name, (arrays, flags) in passes.items():
            try:
                plan_parts(arrays, mask, self.options, **flags)
            except Unsupported as error:
                raise Unsupported(refusal(form, name, str(error))) from error
        mask.tables[key] = True


def refusal(form: Form, name: str, reason: str) -> str:
    """Why a pass cannot run, in terms of the caller's arrays."""
    if name in ("output", "products"):
        width = 2 * form.value_dim if name == "output" else form.product_width
        passes = f"a forward pass with head dims {form.head_dim} and {width}"
    else:
        passes = f"gradients with head dims {form.score_width} and {form.product_width}"
    return f"attention_jvp with head dims {form.head_dim} and {form.value_dim} needs {passes}: {reason}. {form.remedy}"
