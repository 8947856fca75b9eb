"""Directional derivatives: the builder of their steps, with and without a block mask; their arguments; their wider arrays."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import numpy as np

from .. import Unsupported
from ..block_masks.method import check as check_mask
from ..extend import (
    Array,
    Axes,
    Builder,
    Call,
    CallKey,
    Expected,
    Options,
    ReadCall,
    ReadOptions,
    View,
    check_arrays,
    composed,
    cupy_runtime,
    dtype_name,
    in_words,
    numpy_dtype,
    read_array,
    read_forward,
    read_operands,
    takes_options,
)
from .derivative_form import DROPOUT, DerivativeForm, Widened, form_of, wide_arrays
from .derivative_terms import Terms, add_terms

#: The names of a call's arrays, of the tangents and the results among them, and of the wider arrays, which may replace the
#: tangents.
ARRAYS = ("q", "k", "v", "dq", "dk", "dv", "out", "dout", "stats", "dstats")
TANGENTS, RESULTS = ARRAYS[3:6], ARRAYS[6:]
WIDENED = tuple(f"widened.{name}" for name in Widened._fields[:-1])
#: The options that packed sequences need.
_PACKING = ("cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv")
#: The options that a single pass does not take.
_OF_STEPS = ("block_mask", "compute_dtype")
#: The refusal of derivatives of paged keys.
NO_PAGED_DERIVATIVES = (
    "attention_jvp is not supported with page_table, because cuDNN reads pages in the forward pass only: gather the pages into "
    "dense k and v"
)
#: The message for tangents of options.
NO_TANGENTS_OF_OPTIONS = (
    "attention_jvp has no {name}: the derivative of the scores would be a matrix of size Sq x Skv, but the gradient kernels "
    "need a product of arrays with head_dim rows. A bias that is a product, such as one element per key, can be "
    "appended to the head dims of q and k with its tangent (docs/derivatives.md); otherwise use central differences of "
    "attention(...)"
)


def derivative(
    builder: Builder,
    views: Mapping[str, View],
    options: ReadOptions,
    *,
    form: DerivativeForm,
    deterministic: bool = False,
) -> None:
    """Add the steps that write the output, its derivative, and the log-sum-exp and its derivative if there are arrays for them.

    ``views`` has the arrays of the call, without those that are not passed, and its results.
    """
    dtype, options = options.compute_dtype, dataclasses.replace(options, compute_dtype=None)
    own, finish = builder.in_dtype({name: views.get(name) for name in ARRAYS}, dtype, ("out", "dout"))
    q, k, v, dq, dk, dv, out, dout, stats, dstats = (own[name] for name in ARRAYS)

    def attend(name: str, values: View, target: View, stats: View | None) -> None:
        """A forward pass."""
        builder.part = name
        given = {"q": q, "k": k, "v": values, "out": target} | ({} if stats is None else {"stats": stats})
        builder.add_pass(given, options, return_stats=stats is not None, deterministic=deterministic)

    def gradient(name: str, keys: View, products: View, options: ReadOptions) -> View:
        """Return the gradient of Q2 for some keys; the other gradients are discarded."""
        builder.part = name
        given = {"dout": wide.dout, "q": wide.q, "k": keys, "v": wide.v, "out": products, "stats": stats}
        made = {f"d{of}": builder.temporary(given[of].shape, q.dtype) for of in "qkv"}
        builder.add_pass(given | made, options, given_stats="part", deterministic=deterministic)
        return made["dq"]

    if any(name in views for name in WIDENED):
        wide = Widened._make([*map(views.get, WIDENED), form])
        checked = {name: views[name] for name in ("q", "k", "v", *WIDENED) if name in views}
        builder.check(functools.partial(check_copies, dtype), checked)
    else:
        wide, wanted = wide_arrays(form, (q, k, v), (dq, dk, dv), lambda name, *array: builder.temporary(*array))
        builder.concatenate(wanted)
    own_stats, wide_dtype = stats, View.row_stats("stats", q).dtype
    if form.scores and (stats is None or stats.dtype != wide_dtype):  # the derivative needs the log-sum-exp in full precision
        stats = builder.temporary_stats(q)
    output = builder.temporary((2 * form.value_dim, *q.shape[1:]), q.dtype) if form.values else out
    attend("output", wide.values if form.values else v, output, stats)
    scores = means = products = None
    if form.scores and (form.value_dim or dstats):
        products = builder.temporary(wide.dout.shape, q.dtype)
        if form.centered:
            attend("products", wide.v, products, None)
        else:
            builder.fill(products, 0)
        scores = gradient("scores", wide.k, products, options)
        if form.joint:
            means = scores
        elif not form.centered:
            means = gradient("means", wide.ones, products, options.without(*DROPOUT) | {"dropout": 0.0})
    mean = None if means is None else means[form.mean_index : form.mean_index + 1]
    of_scores = None if scores is None else scores[form.head_dim : form.head_dim + form.value_dim]
    if form.values:
        terms = Terms(of_scores, output[form.value_dim :], mean)
        given = (terms, output[: form.value_dim], out, dout)
    else:
        given = (Terms(of_scores, None, mean), output, None, dout)
    builder.run(add_terms, *given, writes=[x for x in given[2:] if x is not None])
    if dstats and form.scores:
        rows = (products, wide.dout) if form.centered else (None, None)
        builder.row_means(dstats, stats, rows, mean, options.scalars["scale"])
    elif dstats:
        builder.fill(dstats, 0)
    if own_stats is not None and own_stats is not stats:
        builder.copy(own_stats, stats)
    finish()


# Arguments


def check_supported(options: Mapping[str, Any]) -> None:
    """Check that there are no tangents of options and no pages; raises Unsupported."""
    for name, value in options.items():
        if value is not None and name[:1] == "d" and name[1:] in Options.__annotations__:
            raise Unsupported(NO_TANGENTS_OF_OPTIONS.format(name=name))
    if options.get("page_table") is not None:
        raise Unsupported(NO_PAGED_DERIVATIVES)


def read_form(
    q: Any, k: Any, v: Any, tangents: Sequence[Any], widened: Widened | None, options: Any, *, deterministic: bool
) -> DerivativeForm:
    """Check the arrays, as far as copying them requires, and return the form of the derivative."""
    if not _may_copy(q, k, v):
        read_forward(q, k, v, {name: x for name, x in options.items() if name not in _OF_STEPS})  # raises
    mask = options.get("block_mask")
    for name, array in (("q", q), ("k", k), ("v", v)) if mask is not None or options.get("layout") is None else ():
        Axes.check_strides(name, array, required=mask is not None)
    if mask is not None:
        check_mask(q, k, v, mask)
    given = (tangents[0] is not None, tangents[1] is not None, tangents[2] is not None)
    if widened is not None:
        if any(given):
            raise TypeError("widened is passed with dq, dk or dv: widened already contains the tangents; omit one of them")
        return _checked_form(widened, q, k, v, options, deterministic)
    if not any(given):
        raise ValueError("dq, dk and dv are None; pass at least one of them: the derivative in no direction is 0")
    for name, tangent, array in zip(("dq", "dk", "dv"), tangents, (q, k, v), strict=True):
        if tangent is not None:
            check_like(name, tangent, name[1:], array, array.shape)
    return form_of(q.shape[0], v.shape[0], given, options, deterministic=deterministic)


def _checked_form(widened: Widened, q: Any, k: Any, v: Any, options: Any, deterministic: bool) -> DerivativeForm:
    """Return the form of arrays that were widened before; checks that they fit the arguments."""
    made = widened.form
    form = form_of(q.shape[0], v.shape[0], (made.queries, made.keys, made.values), options, deterministic=deterministic)
    if form != made:
        raise ValueError(
            f"widened is for {made}, and the call needs {form}: pass the same head dims, deterministic=, softcap=, score_mod=, "
            "dropout_p=, sinks=, cu_seqlens_q= and block_mask= to widen as to attention_jvp"
        )
    for name, array in widened.named().items():
        like = q if name in ("q", "dout") else k
        check_like(f"widened.{name}", array, "q" if like is q else "k", like, (array.shape[0], *like.shape[1:]))
    return form


def check_widened(widened: Any) -> None:
    """Check that wider arrays come from :func:`cupy_sdpa.widen`; raises TypeError."""
    if not isinstance(widened, Widened):
        raise TypeError(f"widened is {in_words(widened)}; pass the result of cupy_sdpa.widen")


def check_copies(dtype: str | None, arrays: Mapping[str, Any]) -> None:
    """Check that wider arrays, of ``dtype`` if it is not None, contain q, k and v; on numpy only: it would synchronize a GPU.

    Raises:
        ValueError: an array differs from its copy.
    """
    copies = {"q": ("q", 0), "k": ("k", 0), "v": ("k", len(arrays["k"]))}
    if "widened.values" in arrays:
        copies["v"] = "values", 0
    for name, (wide, start) in copies.items():
        array, copied = arrays[name], arrays.get(f"widened.{wide}")
        if not isinstance(array, np.ndarray) or copied is None:
            continue
        with np.errstate(over="ignore", under="ignore"):
            own = array if dtype is None else array.astype(numpy_dtype(dtype))
        if not np.array_equal(copied[start : start + len(own)], own, equal_nan=True):
            raise ValueError(f"{name} differs from its copy in widened: call widen again when {name} has changed")


def converted_view(x: View | None, dtype: str) -> View | None:
    """Return a dense view like ``x`` in another dtype, from which a problem can be read."""
    return x and View.dense(x.storage.name, x.shape, numpy_dtype(dtype), x.storage.device)


def check_like(name: str, array: Any, of: str, like: Any, shape: tuple[int, ...]) -> None:
    """Check that an array has the type, device and dtype of another one, and a shape."""
    legend = f"the shape and dtype of {of}" if shape == like.shape else f"the shape of {of} {like.shape} with another head dim"
    check_arrays([Expected(name, shape, dtype_name(read_array(of, like).dtype), legend)], {of: like, name: array})


def check_results(given: Mapping[str, Any], q: Any, v: Any, dtype: str | None) -> None:
    """Check the dtypes, shapes and strides of the arrays that the results are written to; for None they are created.

    ``dtype`` is the dtype to compute in, or None for q's dtype.
    """
    table = Expected.of_call(q, v, v, given=given, computed=dtype)
    check_arrays([table[name]._replace(writable=True) for name in given], {"q": q, "v": v, **given})


def _may_copy(q: Any, k: Any, v: Any) -> bool:
    """True if the shapes and dtypes of q, k and v match, so that they can be copied."""
    if not (type(q) is type(k) is type(v) and hasattr(q, "strides")):
        return False
    if not (q.dtype == k.dtype == v.dtype and q.ndim == k.ndim == v.ndim and q.ndim in (3, 4)):
        return False
    if cupy_runtime.is_array(q) and (q.itemsize != 2 or not q.data.device_id == k.data.device_id == v.data.device_id):
        return False
    return bool(k.shape[0] == q.shape[0] and v.shape[1:] == k.shape[1:] and (q.ndim == 3 or q.shape[3] == k.shape[3]))


# Wider arrays


@takes_options
def widen(
    q: Array,
    k: Array,
    v: Array,
    dq: Array | None = None,
    dk: Array | None = None,
    dv: Array | None = None,
    *,
    deterministic: bool = False,
    **options: Unpack[Options],
) -> Widened:
    """Copy the arguments of :func:`cupy_sdpa.attention_jvp` into the wider arrays from which it computes.

    ``attention_jvp(q, k, v, widened=widen(q, k, v, dq, dk, dv))`` equals ``attention_jvp(q, k, v, dq, dk, dv)``. To compute
    several derivatives at the same q, k and v, write the tangents into these arrays, which saves copying the other arrays: dq
    into ``widened.dout[:D]``, dk into ``widened.v[D:2 * D]`` (without dq: ``[:D]``), and dv into ``widened.values[Dv:]``.

    Args:
        q, k, v, dq, dk, dv, deterministic, options: as for :func:`cupy_sdpa.attention_jvp`. The arrays depend only on the
            options of this signature. You may pass all options of that call; their shapes and values are checked.

    Returns:
        The arrays, on the engine of q. On the GPU one kernel writes them.

    Raises:
        TypeError, ValueError: as :func:`cupy_sdpa.attention_jvp`.

    >>> import numpy as np, cupy_sdpa
    >>> rng = np.random.default_rng(0)
    >>> q, k, v, dq, dk, dv = (np.asfortranarray(rng.standard_normal((8, 2, 5, 1))) for _ in range(6))
    >>> arrays = cupy_sdpa.widen(q, k, v, dq, dk, dv)
    >>> arrays
    <widened: q (24, 2, 5, 1), k (24, 2, 5, 1), v (16, 2, 5, 1), dout (16, 2, 5, 1), values (16, 2, 5, 1)>
    >>> out, dout = cupy_sdpa.attention_jvp(q, k, v, widened=arrays, causal=True)
    >>> bool((dout == cupy_sdpa.attention_jvp(q, k, v, dq, dk, dv, causal=True)[1]).all())
    True
    """
    request = _Widening(deterministic)
    key = CallKey("widen", ARRAYS[:6], (q, k, v, dq, dk, dv), options)
    arrays = Call(key, request.parse, WIDENED, request.decide, dense=WIDENED).run()
    return request.form.widened(arrays)


class _Widening:
    """A call of :func:`widen`: its program depends on the options only through the form of the derivative."""

    form: DerivativeForm

    def __init__(self, deterministic: bool) -> None:
        self._deterministic = deterministic

    def decide(self, arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Check the arguments, and return the form and the dtype to compute in."""
        decided = Call.decide_pass(arrays, options)
        check_supported(decided)
        passed = _checked_options(decided)
        _, views, read = read_operands(arrays, passed, results=())
        dtype = read.compute_dtype
        own: Any = arrays if dtype is None else {name: converted_view(views.get(name), dtype) for name in arrays}
        q, k, v, *tangents = own.values()
        self.form = read_form(q, k, v, tangents, None, decided, deterministic=self._deterministic)
        _check_options(q, k, v, passed)
        return {"form": tuple(self.form), "compute_dtype": dtype}

    def parse(self, key: CallKey) -> ReadCall:
        """Return the call that concatenates the arrays, after it converts them if it computes in another dtype."""
        form, dtype = self.form, key.options["compute_dtype"]
        arrays, views, _ = read_operands(key.named(), {})
        device = views["q"].storage.device

        def wide(own: Mapping[str, Any], new: Callable[[str, tuple[int, ...], Any], View]) -> Any:
            parts, tangents = (own["q"], own["k"], own["v"]), (own.get("dq"), own.get("dk"), own.get("dv"))
            return wide_arrays(form, parts, tangents, new, copied=True)

        converted = views if dtype is None else {name: converted_view(view, dtype) for name, view in views.items()}
        made, _ = wide(converted, lambda name, shape, kind: View.dense(f"widened.{name}", shape, kind, device))
        results = made.named()

        def build(builder: Builder) -> None:
            own, _ = builder.in_dtype(views, dtype, ())
            builder.concatenate(wide(own, lambda name, shape, kind: results[name])[1])

        return composed(key, arrays, views, {f"widened.{name}": view for name, view in results.items()}, build)


def _checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options to check, without what only attention needs: functions are left out, and dropout gets a seed."""
    passed = {name: x for name, x in options.items() if x is not None and name not in ("score_mod", "mask_mod", "tensors")}
    if passed.get("dropout_p") and passed.keys().isdisjoint(DROPOUT):
        passed["seed"] = 0
    return passed


def _check_options(q: Any, k: Any, v: Any, options: Mapping[str, Any]) -> None:
    """Check the options as attention does, unless lengths are missing, which only attention needs."""
    passed = {name: x for name, x in options.items() if name not in _OF_STEPS}
    if passed.keys().isdisjoint(_PACKING) or passed.keys() >= {*_PACKING}:
        read_forward(q, k, v, passed)
