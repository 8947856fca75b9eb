"""Attention and its derivative in a direction (the Jacobian-vector product)."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import numpy as np

from ._typing import Array, ArrayT
from .block_masks.block_mask import BlockMask
from .block_masks.method import check as check_mask
from .boundary.arguments import read_shapes, views_of_shapes
from .boundary.compute import cast, check_converted, read_compute_dtype
from .boundary.conversion import convert, needs_conversion
from .boundary.layouts import of_caller, options_in_own, other_layout, to_own
from .boundary.options import PAGES, Options, read_flag, read_scale, takes_options
from .boundary.user_functions import kept_options
from .errors import Unsupported
from .problem.problem import Problem, row_stats_shape
from .problem.tensor_spec import numpy_dtype, placeholder
from .problem.view import View
from .programs.block_mask_calls import key_of, without_keys
from .programs.derivative import Arrays, Tangents, derivative
from .programs.derivative_checks import NO_PAGED_DERIVATIVES, check_results, read_form
from .programs.derivative_form import Form, Widened, form_of
from .programs.executor import Inputs, run_program
from .programs.passes import blocks_of, rounded
from .programs.program import Builder, Program
from .replay.replay_cache import run_cached
from .runtime import cupy_runtime

#: The tangents.
TANGENTS = ("dq", "dk", "dv")
#: The names of the wider arrays among those of a call.
_WIDENED = tuple(f"widened.{name}" for name in Widened._fields[:-1])
_NAMES = ("q", "k", "v", "dq", "dk", "dv", "out", "dout", "stats")


@takes_options(without=PAGES)
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
        widened: the arrays that :func:`cupy_sdpa.composed.widen` returns, in place of dq, dk and dv: nothing is copied. q, k
            and v must be the arrays that it was called with. Default None.
        return_stats: also return the log-sum-exp of the scores, float32. Default False.
        deterministic: return the same bits in every run, as for :func:`cupy_sdpa.attention_backward`. Default False.
        out, dout: arrays ``(Dv, Hq, Sq, B)`` to write the output and its derivative into, of q's dtype; they must not overlap
            each other or an input.
        stats: float32 array ``(Sq, Hq, B)`` to write the log-sum-exp into; implies ``return_stats``.
        options: as for :func:`cupy_sdpa.attention`, except ``page_table`` and ``num_splits``. The derivative is that at
            constant options: their arrays, such as ``bias``, ``sinks`` and ``tensors``, have no tangents. Dropout drops the
            same weights from the output and its derivative.

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
    if needs_conversion(q, options) or (options.get("layout") is not None and other_layout(options)):
        arrays = {"q": q, "k": k, "v": v, "dq": dq, "dk": dk, "dv": dv, "out": out, "dout": dout, "stats": stats}
        converted: tuple[Any, ...] = convert(
            attention_jvp, arrays, options, ("out", "dout", "stats"), widened=widened, return_stats=return_stats,
            deterministic=deterministic,
        )  # fmt: skip
        return converted
    dtype = read_compute_dtype(options.pop("compute_dtype"), q) if "compute_dtype" in options else None
    flags = {"return_stats": return_stats, "deterministic": deterministic}
    for name, value in flags.items():
        if type(value) is not bool:
            read_flag(name, value)
    given: tuple[Any, ...] = (q, k, v, dq, dk, dv, out, dout, stats)
    mask, others = blocks_of(q, k, options, automatic=False)
    of_form = {**others, "block_mask": mask}
    names: tuple[str, ...] = _NAMES
    kind: tuple[Any, ...] = ("jvp", dtype, bool(return_stats), bool(deterministic), mask if mask is None else key_of(mask))
    if widened is not None and isinstance(widened, Widened):
        given, names, kind = (*given, *widened[:-1]), (*_NAMES, *_WIDENED), (*kind, widened.form)
    # On the CPU the elements of widened are compared with those of q, k and v in every call.
    results = run_cached(kind, given, others) if widened is None or cupy_runtime.is_array(q) else None
    if results is None:
        own: dict[str, Any] = {"q": q, "k": k, "v": v, "dq": dq, "dk": dk, "dv": dv}
        if dtype is not None:
            with of_caller(own, options):
                check_converted({**own, "out": out, "dout": dout}, results=("out", "dout"))
            own = {name: _rounded(name, x, dtype, read=widened is not None) for name, x in own.items()}
        tangents = own["dq"], own["dk"], own["dv"]
        form = read_form(own["q"], own["k"], own["v"], tangents, widened, of_form, deterministic=deterministic)
        check_results(out, dout, stats, q, v)
        with cupy_runtime.device_context(q):
            try:
                results = _run(kind, names, given, form, others, mask, dtype, flags)
            except Unsupported as error:
                if (step := getattr(error, "step", None)) is None:
                    raise  # an option is refused, not a pass
                name = str(step).partition(":")[0]
                raise Unsupported(refusal(form, name, str(error))) from error
    return tuple(results)


def _run(
    kind: Any,
    names: tuple[str, ...],
    given: tuple[Any, ...],
    form: Form,
    options: Mapping[str, Any],
    mask: BlockMask | None,
    dtype: str | None,
    flags: Mapping[str, bool],
) -> list[Any]:
    """Run the program of a call whose arguments are valid.

    Args:
        kind: the key of the call besides arrays and options.
        names, given: the arrays that the caller passed, which may be None, and their names.
        form: how the derivative is computed.
        options: the options, without the block mask.
        mask: the block mask, or None.
        dtype: the dtype to compute in; None for that of q.
        flags: ``return_stats`` and ``deterministic``.
    """
    arrays = dict(zip(names, given, strict=True))
    q, v = arrays["q"], arrays["v"]
    for name in ("out", "dout"):
        if arrays[name] is None:
            arrays[name] = cupy_runtime.new_result(q, (v.shape[0], *q.shape[1:]), q.dtype)
    with_stats = flags["return_stats"] or arrays["stats"] is not None
    if with_stats and arrays["stats"] is None:
        arrays["stats"] = cupy_runtime.new_result(q, row_stats_shape(q.shape), np.dtype(np.float32))
    inputs = Inputs(arrays, kept_options(q, options))
    build = functools.partial(
        _build,
        views=inputs.views,
        options=inputs.options,
        form=form,
        mask=mask,
        dtype=dtype,
        deterministic=flags["deterministic"],
    )
    results = ["out", "dout", *(["stats"] if with_stats else [])]
    return run_program(kind, names, given, options, inputs, results, build)


def _build(
    builder: Builder,
    views: Mapping[str, View],
    options: Mapping[str, Any],
    form: Form,
    mask: BlockMask | None,
    dtype: str | None,
    *,
    deterministic: bool,
) -> None:
    """Add the steps of a derivative.

    Args:
        builder: collects the steps.
        views: the arrays by name: q, k, v, out and dout; stats if it is returned; and tangents, or the wider arrays.
        options: the options, with views in place of arrays, and without the block mask.
        form, mask, dtype, deterministic: as for :func:`_run`.
    """
    own, finish = rounded(builder, {name: views.get(name) for name in _NAMES}, dtype, ("out", "dout"))
    tangents: Tangents | Widened = Tangents(*(own[name] for name in TANGENTS))
    if any(name in views for name in _WIDENED):
        made: dict[str, Any] = dict(zip(Widened._fields, [*map(views.get, _WIDENED), form], strict=True))
        tangents = Widened(**made)
    scaled = {**options, "scale": read_scale(options.get("scale"), form.head_dim)}
    of_call = Arrays(*(own[name] for name in Arrays._fields))
    derivative(builder, of_call, tangents, scaled, form=form, mask=mask, deterministic=bool(deterministic))
    finish()


def _rounded(name: str, x: Any, dtype: str, *, read: bool) -> Any:
    """An array in another dtype, to read a problem; with its elements if they are ``read``, as only those of numpy are."""
    if x is None:
        return None
    if read and isinstance(x, np.ndarray):
        return cast(x, dtype, cupy_runtime.temporary)
    return View.dense(name, x.shape, numpy_dtype(dtype), x.data.device_id if cupy_runtime.is_array(x) else None)


def refusal(form: Form, name: str, reason: str) -> str:
    """Why a pass cannot run, in terms of the caller's arrays."""
    if name in ("output", "products"):
        width = 2 * form.value_dim if name == "output" else form.product_width
        passes = f"a forward pass with head dims {form.head_dim} and {width}"
    else:
        passes = f"gradients with head dims {form.score_width} and {form.product_width}"
    return f"attention_jvp with head dims {form.head_dim} and {form.value_dim} needs {passes}: {reason}. {form.remedy}"


@takes_options(without=(*PAGES, "compute_dtype", "engine"))
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
    >>> for problem in cupy_sdpa.composed.jvp_problems(shape, shape, shape, dtype="bfloat16"):
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
    program, views = _program_of(q, k, v, tangents, options, return_stats=return_stats, **common)
    found = program.problems()
    if found:
        return tuple(found)
    return (without_keys(views["q"].shape, views["v"].shape, views["q"].dtype, return_stats=return_stats),)


def _program_of(
    q: Any,
    k: Any,
    v: Any,
    tangents: Sequence[str],
    options: Mapping[str, Any],
    *,
    return_stats: bool = False,
    deterministic: bool = False,
    dtype: Any = None,
    seq_lens: bool = False,
    on_gpu: bool = True,
) -> tuple[Program, dict[str, View]]:
    """The program of a derivative of arrays or of shapes, and q, k and v; tangents and results are assumed to be dense."""
    shapes = [tuple(x.shape if hasattr(x, "shape") else x) for x in (q, k, v)]
    if not all(shapes):
        raise ValueError(f"q, k and v have shapes {shapes}; a shape is (head_dim, heads, seq, batch)")
    mask, others = blocks_of(q, k, options, automatic=False)
    device = 0 if on_gpu else None
    if mask is None:
        # checks the arguments
        read_shapes(q, k, v, others, dtype=dtype, seq_lens=seq_lens, on_gpu=on_gpu, deterministic=deterministic)
    views, own = views_of_shapes(q, k, v, others, dtype=dtype, seq_lens=seq_lens, device=device)
    if mask is not None:
        like = {name: placeholder(view.shape, view.dtype) for name, view in views.items()}
        check_mask(**like, mask=mask)
    head_dim, value_dim = views["q"].shape[0], views["v"].shape[0]
    form = form_of(head_dim, value_dim, given_by(tangents), {**others, "block_mask": mask}, deterministic=deterministic)
    shapes_of = {name: views[name[1:]].shape for name in TANGENTS if name in tangents}
    shapes_of |= dict.fromkeys(("out", "dout"), (value_dim, *views["q"].shape[1:]))
    made = {name: View.dense(name, shape, views["q"].dtype, device) for name, shape in shapes_of.items()}
    if return_stats:
        made["stats"] = View.dense("stats", row_stats_shape(views["q"].shape), np.float32, device)
    builder = Builder(device)
    _build(builder, views | made, own, form, mask, None, deterministic=deterministic)
    return builder.build(), views


def given_by(tangents: Sequence[str]) -> tuple[bool, bool, bool]:
    """Whether dq, dk and dv are among some names."""
    return "dq" in tangents, "dk" in tangents, "dv" in tangents
