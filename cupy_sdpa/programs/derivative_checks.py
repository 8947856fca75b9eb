"""Checks of the arguments of a directional derivative."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..block_masks.method import check as check_mask
from ..boundary.argument import check_arrays, read_array
from ..boundary.arguments import read_forward
from ..boundary.compute import cast
from ..boundary.layouts import check_strides_of
from ..errors import Unsupported, in_words
from ..problem.tensor_spec import Expected
from ..problem.validation import expected_arrays
from ..runtime import cupy_runtime
from .derivative_form import Form, Widened, form_of

#: The refusal of derivatives of paged keys.
NO_PAGED_DERIVATIVES = (
    "attention_jvp is not supported with page_table, because cuDNN reads pages in the forward pass only: gather the pages into "
    "dense k and v"
)
#: The refusal of tangents of the options.
NO_TANGENTS_OF_OPTIONS = (
    "attention_jvp has no {name}: the derivative of the scores would be a matrix of size Sq x Skv, no product of arrays with "
    "head_dim rows, from which the gradient kernels compute. A bias that is a product, such as one element per key, can be "
    "appended to the head dims of q and k with its tangent (docs/derivatives.md); otherwise use central differences of "
    "attention(...)"
)


def read_form(
    q: Any, k: Any, v: Any, tangents: tuple[Any, Any, Any], widened: Widened | None, options: Any, *, deterministic: bool
) -> Form:
    """Check the arrays, as far as copying them requires, and return the form of the derivative.

    Raises:
        TypeError, ValueError, Unsupported: the arguments are invalid.
    """
    for name in ("dbias", "dsinks", "dtensors"):
        if options.get(name) is not None:
            raise Unsupported(NO_TANGENTS_OF_OPTIONS.format(name=name))
    if options.get("page_table") is not None:
        raise Unsupported(NO_PAGED_DERIVATIVES)
    if not _may_copy(q, k, v):
        read_forward(q, k, v, {name: value for name, value in options.items() if name != "block_mask"})  # raises
    for name, array in (("q", q), ("k", k), ("v", v)) if options.get("layout") is None else ():
        check_strides_of(name, array)
    if (mask := options.get("block_mask")) is not None:
        check_mask(q, k, v, mask)
    given = (tangents[0] is not None, tangents[1] is not None, tangents[2] is not None)
    if widened is not None:
        if any(given):
            raise TypeError("widened is passed, and dq, dk or dv: widened contains the tangents; omit one of them")
        return _checked_form(widened, q, k, v, options, deterministic)
    if not any(given):
        raise ValueError("dq, dk and dv are None; pass at least one of them: the derivative in no direction is 0")
    for name, tangent, array in zip(("dq", "dk", "dv"), tangents, (q, k, v), strict=True):
        if tangent is not None:
            check_like(name, tangent, name[1:], array, array.shape)
    return form_of(q.shape[0], v.shape[0], given, options, deterministic=deterministic)


def _checked_form(widened: Widened, q: Any, k: Any, v: Any, options: Any, deterministic: bool) -> Form:
    """The form of arrays that were widened before; checks that they fit the arguments."""
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
    """Check that wider arrays are those of :func:`cupy_sdpa.composed.widen`; raises TypeError."""
    if not isinstance(widened, Widened):
        raise TypeError(f"widened is {in_words(widened)}; pass the result of cupy_sdpa.composed.widen")


def check_copies(dtype: str | None, arrays: Mapping[str, Any]) -> None:
    """Check that wider arrays contain q, k and v, on numpy only: reading them from a GPU would synchronize.

    Args:
        dtype: the dtype of the wider arrays; None for that of q.
        arrays: q, k and v, and the wider arrays.

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
        own = array if dtype is None else cast(array, dtype, cupy_runtime.temporary)
        if not np.array_equal(copied[start : start + len(own)], own, equal_nan=True):
            raise ValueError(f"{name} differs from its copy in widened: call widen again when {name} has changed")


def check_like(name: str, array: Any, of: str, like: Any, shape: tuple[int, ...]) -> None:
    """Check that an array has the type, device and dtype of another one, and a shape.

    Raises:
        TypeError, ValueError: it has not; the message contains both values.
    """
    legend = f"the shape and dtype of {of}" if shape == like.shape else f"that of {of} {like.shape} with another head dim"
    check_arrays([Expected(name, shape, read_array(of, like).spec.dtype, legend)], {of: like, name: array})


def check_results(out: Any, dout: Any, stats: Any, q: Any, v: Any) -> None:
    """Check the dtypes, shapes and strides of the arrays that the output, its derivative and the log-sum-exp are written to.

    Raises:
        TypeError, ValueError: one of them is wrong.
    """
    given, table = {"out": out, "dout": dout, "stats": stats}, expected_arrays(q, v, v)
    check_arrays([table[name]._replace(writable=True) for name in given], {"q": q, "v": v, **given})


def _may_copy(q: Any, k: Any, v: Any) -> bool:
    """Whether the shapes and dtypes of q, k and v match, so that they can be copied."""
    if not (type(q) is type(k) is type(v) and hasattr(q, "strides")):
        return False
    if not (q.dtype == k.dtype == v.dtype and q.ndim == k.ndim == v.ndim and q.ndim in (3, 4)):
        return False
    if cupy_runtime.is_array(q) and (q.itemsize != 2 or not q.data.device_id == k.data.device_id == v.data.device_id):
        return False
    return bool(k.shape[0] == q.shape[0] and v.shape[1:] == k.shape[1:] and (q.ndim == 3 or q.shape[3] == k.shape[3]))
