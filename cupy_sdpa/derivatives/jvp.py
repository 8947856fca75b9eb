"""Attention and its derivative in a direction (the Jacobian-vector product)."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, Unpack

from .. import Problem
from ..extend import (
    Array,
    Call,
    CallKey,
    Options,
    ReadCall,
    View,
    composed,
    operation,
    read_flag,
    read_operands,
    results_of,
    run_cached,
    takes_options,
)
from .derivative import (
    ARRAYS,
    RESULTS,
    TANGENTS,
    WIDENED,
    check_results,
    check_supported,
    check_widened,
    converted_view,
    derivative,
    read_form,
)
from .derivative_form import DerivativeForm, Widened

ArrayT = TypeVar("ArrayT", bound=Array)


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
    return_dstats: bool = False,
    deterministic: bool = False,
    out: Array | None = None,
    dout: Array | None = None,
    stats: Array | None = None,
    dstats: Array | None = None,
    **options: Unpack[Options],
) -> tuple[ArrayT, ...]:
    r"""Compute attention and its derivative in the direction (dq, dk, dv): the Jacobian-vector product, forward mode.

    .. math:: dO = \frac{d}{dt} O(Q + t\,dQ,\; K + t\,dK,\; V + t\,dV) \Big|_{t=0}, \qquad
              dO = \bigl(P \circ (dS - \operatorname{rowsum}(P \circ dS))\bigr) V + P\,dV, \qquad
              dS = \tau\,(dQ\,K^\top + Q\,dK^\top), \qquad dL = \operatorname{rowsum}(P \circ dS)

    Nothing of size Sq x Skv is stored: the derivative is computed by the kernels of :func:`cupy_sdpa.attention` and
    :func:`cupy_sdpa.attention_backward` on arrays that are concatenated along head_dim. With dq or dk these are two forward
    passes and a backward pass; with dv alone one forward pass. With ``softcap``, ``score_mod`` or dropout a second backward
    pass may replace the second forward pass. Keys or values with a mean far above their variation cost precision in 16 bits;
    :doc:`/derivatives` gives the error and how to avoid it.

    Args:
        q, k, v: as for :func:`cupy_sdpa.attention`.
        dq, dk, dv: the direction: arrays with the shapes and dtypes of q, k and v and any strides. None means 0 and takes less
            time; pass at least one.
        widened: the arrays that :func:`cupy_sdpa.widen` returned for q, k and v, instead of dq, dk and dv; nothing is copied
            then. Default None.
        return_stats: also return the log-sum-exp of the scores, float32, and float64 for float64 arrays. Default False.
        return_dstats: also return dL, the derivative of the log-sum-exp, of the dtype of stats. On the GPU it is computed from
            arrays of 16 bits. Default False.
        deterministic: return the same bits in every run, as for :func:`cupy_sdpa.attention_backward`. Default False.
        out, dout: arrays ``(Dv, Hq, Sq, B)`` to write the output and its derivative into, of q's dtype; they must not overlap
            each other or an input.
        stats, dstats: float32 arrays ``(Sq, Hq, B)``, or float64 for float64 arrays, to write the log-sum-exp and its
            derivative into; imply ``return_stats`` and ``return_dstats``.
        options: as for :func:`cupy_sdpa.attention`, except ``page_table`` and ``num_splits``. The options are constant: their
            arrays, such as ``bias``, ``sinks`` and ``tensors``, have no tangents. Dropout drops the same weights from the
            output and its derivative.

    Returns:
        ``(out, dout)``, followed by stats and dstats if requested. New arrays are in Fortran order. out, dout and dstats are 0
        in fully masked rows and in padding.

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
    if not type(return_stats) is type(deterministic) is bool:
        return_stats, deterministic = read_flag("return_stats", return_stats), read_flag("deterministic", deterministic)
    return_dstats = return_dstats is not False and read_flag("return_dstats", return_dstats)
    arrays, tag = (q, k, v, dq, dk, dv, out, dout, stats, dstats), ("jvp", return_stats, return_dstats, deterministic)
    results = run_cached(tag, arrays, options) if widened is None else None
    if results is None:
        flags: dict[str, Any] = {
            "return_stats": return_stats, "return_dstats": return_dstats, "deterministic": deterministic,
        }  # fmt: skip
        call = _jvp_call(arrays, options, widened=widened, **flags)
        results = call.run(tag=tag) if widened is None else results_of(call)
    return tuple(results)


@operation(
    attention_jvp,
    ARRAYS,
    {"widened": None, "return_stats": False, "return_dstats": False, "deterministic": False},
    ("q", "k", "v", "dq", "dk", "dv"),
)
def _jvp_call(arrays: tuple[Any, ...], options: Mapping[str, Any], *, widened: Widened | None, **flags: Any) -> Call:
    """Return a call of :func:`attention_jvp` as a value."""
    flags = {name: read_flag(name, value) for name, value in flags.items()}
    tag: tuple[Any, ...] = ("jvp", *flags.values())
    names: tuple[str, ...] = ARRAYS
    if widened is not None:
        check_widened(widened)
        arrays, names, tag = (*arrays, *widened[:-1]), (*ARRAYS, *WIDENED), (*tag, widened.form)
    parse = functools.partial(_parse_jvp, widened=widened, **flags)
    return Call(CallKey(tag, names, arrays, options), parse, RESULTS, Call.decide_pass, dense=WIDENED)


def _parse_jvp(
    key: CallKey, *, widened: Widened | None, return_stats: bool, return_dstats: bool, deterministic: bool
) -> ReadCall:
    """Check the arguments of :func:`attention_jvp`."""
    check_supported(key.options)
    arrays, views, options = read_operands(key.named(), key.options, ("out", "dout"))
    dtype = options.compute_dtype
    own = {name: views.get(name) for name in ARRAYS}
    if dtype is not None:
        own |= {name: converted_view(own[name], dtype) for name in ARRAYS[:6]}
    tangents = own["dq"], own["dk"], own["dv"]
    form = read_form(own["q"], own["k"], own["v"], tangents, widened, key.options, deterministic=deterministic)
    q, v = views["q"], views["v"]
    check_results({name: own[name] for name in RESULTS}, q, v, dtype)
    shape, device = (v.shape[0], *q.shape[1:]), q.storage.device
    results = {name: View.dense(name, shape, q.dtype, device) for name in ("out", "dout")}
    for name, requested in (("stats", return_stats), ("dstats", return_dstats)):
        if requested or name in arrays:
            results[name] = View.row_stats(name, q, dtype)
    build = functools.partial(derivative, views=views, options=options, form=form, deterministic=deterministic)
    return composed(key, arrays, views, results, build, refusal=functools.partial(refusal, form))


def refusal(form: DerivativeForm, name: str, reason: str) -> str:
    """Return why a pass cannot run, in terms of the caller's arrays."""
    if name in ("output", "products"):
        width = 2 * form.value_dim if name == "output" else form.product_width
        passes = f"a forward pass with head dims {form.head_dim} and {width}"
    else:
        passes = f"gradients with head dims {form.score_width} and {form.product_width}"
    return f"attention_jvp with head dims {form.head_dim} and {form.value_dim} needs {passes}: {reason}. {form.remedy}"


@takes_options
def jvp_problems(
    q: Array | Sequence[int],
    k: Array | Sequence[int],
    v: Array | Sequence[int],
    *,
    dtype: Any = None,
    tangents: Sequence[str] = TANGENTS,
    return_stats: bool = False,
    deterministic: bool = False,
    **options: Any,
) -> tuple[Problem, ...]:
    """List the problems of :func:`cupy_sdpa.attention_jvp`'s passes, for :func:`cupy_sdpa.explain` and ``store.build``.

    Args:
        q, k, v, dtype, options: as for :func:`cupy_sdpa.problem`.
        tangents: which of ``"dq"``, ``"dk"`` and ``"dv"`` the call gets. Default: all.
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
    shapes = {"q": q, "k": k, "v": v}
    shapes |= {name: shapes[name[1:]] for name in tangents}
    flags = {"return_stats": return_stats, "deterministic": deterministic}
    return Call.of_shapes(attention_jvp, shapes, options, dtype=dtype, **flags).read().problems
