"""The wider arrays of a directional derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

from .._typing import Array
from ..boundary.compute import cast, check_converted
from ..boundary.conversion import convert, needs_conversion
from ..boundary.options import Options, check_names, takes_options
from ..kernels.derivative_terms import Concatenation, Constant, concatenate
from ..problem.view import View
from ..runtime import cupy_runtime
from .calls import parts_of, resolved
from .derivative_checks import read_form
from .derivative_form import Form, Widened

#: The options that select the form, and those that convert the arrays.
_READ = ("cu_seqlens_q", "softcap", "score_mod", "block_mask", "sinks", "dropout_p", "layout", "compute_dtype", "engine")


@takes_options(only=_READ)
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

    ``attention_jvp(q, k, v, widened=widen(q, k, v, dq, dk, dv))`` is ``attention_jvp(q, k, v, dq, dk, dv)``. If several
    derivatives are computed at the same q, k and v, the tangents can be written into these arrays instead, which saves the copy
    of the other arrays: dq into ``widened.dout[:D]``, dk into ``widened.v[D:2 * D]`` (without dq: ``[:D]``), and dv into
    ``widened.values[Dv:]``.

    Args:
        q, k, v, dq, dk, dv, deterministic, options: as for :func:`cupy_sdpa.attention_jvp`. The other options of
            that call may be passed, and are not read.

    Returns:
        The arrays, on the engine of q. On the GPU they are written by one kernel.

    Raises:
        TypeError, ValueError: as :func:`cupy_sdpa.attention_jvp`.

    >>> import numpy as np, cupy_sdpa
    >>> rng = np.random.default_rng(0)
    >>> q, k, v, dq, dk, dv = (np.asfortranarray(rng.standard_normal((8, 2, 5, 1))) for _ in range(6))
    >>> arrays = cupy_sdpa.composed.widen(q, k, v, dq, dk, dv)
    >>> arrays
    <widened: q (24, 2, 5, 1), k (24, 2, 5, 1), v (16, 2, 5, 1), dout (16, 2, 5, 1), values (16, 2, 5, 1)>
    >>> out, dout = cupy_sdpa.attention_jvp(q, k, v, widened=arrays, causal=True)
    >>> bool((dout == cupy_sdpa.attention_jvp(q, k, v, dq, dk, dv, causal=True)[1]).all())
    True
    """
    arrays = {"q": q, "k": k, "v": v, "dq": dq, "dk": dk, "dv": dv}
    if needs_conversion(q, options):
        return convert(widen, arrays, options, deterministic=deterministic)  # type: ignore[no-any-return]
    mask, dtype, others = parts_of(resolved(q, k, options, automatic=False))
    check_names(others)
    if dtype is not None:
        check_converted(arrays)
        rounded: Any = (None if x is None else cast(x, dtype, cupy_runtime.temporary) for x in arrays.values())
        q, k, v, dq, dk, dv = rounded
    form = read_form(q, k, v, (dq, dk, dv), None, {**others, "block_mask": mask}, deterministic=deterministic)
    with cupy_runtime.device_context(q):
        made, wanted = wide_arrays(form, (q, k, v), (dq, dk, dv), cupy_runtime.new_result, copied=True)
        concatenate(wanted)
    return made


def wide_arrays(
    form: Form,
    arrays: tuple[Any, Any, Any],
    tangents: tuple[Any, Any, Any],
    new: Callable[[Any, tuple[int, ...], Any], Any],
    *,
    copied: bool = False,
) -> tuple[Widened, list[Concatenation]]:
    """The wider arrays, and the copies that fill them.

    Args:
        form, arrays, tangents: of the derivative.
        new: ``new(like, shape, dtype)`` creates an array in Fortran order.
        copied: also copy an array that needs no other elements. Default False: it is used in place if possible.
    """
    (q, k, v), (dq, dk, dv) = arrays, tangents
    wanted: list[Concatenation] = []

    def join(width: int, *parts: Any) -> Any:
        given = [part for part in parts if part is not None]
        missing = width - sum(part.width if isinstance(part, Constant) else part.shape[0] for part in given)
        first = next(part for part in given if not isinstance(part, Constant))
        if not copied and len(given) == 1 and not missing and _is_dense(first):
            return first
        target = new(first, (width, *first.shape[1:]), first.dtype)
        wanted.append(Concatenation(target, [*given, Constant(missing)] if missing else given))
        return target

    made: dict[str, Any] = dict.fromkeys(("q", "k", "v", "dout", "values", "ones"))
    if form.scores:
        made["q"] = join(form.score_width, q)
        made["k"] = join(form.score_width, k, v, *_ones(form.score_width - form.head_dim - form.value_dim, form.joint))
        made["v"] = join(form.product_width, k if form.queries else None, dk)
        made["dout"] = join(form.product_width, dq, q if form.keys else None)
        if not (form.centered or form.joint):
            made["ones"] = join(form.score_width, k, *_ones(form.score_width - form.head_dim, True))
    if form.values:
        made["values"] = join(2 * form.value_dim, v, dv)
    return Widened(**made, form=form), wanted


def _ones(width: int, present: bool) -> list[Constant]:
    """A row of 1 and rows of 0, if it is present."""
    return [Constant(width, 1.0)] if present else []


def _is_dense(array: Any) -> bool:
    """Whether the engine can read an array in place: in Fortran order, and aligned, which only a GPU requires."""
    spec = (array if isinstance(array, View) else View.of("", array)).spec("")
    return bool(array.flags.f_contiguous) and spec.alignment == 16
