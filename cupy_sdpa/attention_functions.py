"""Attention and its gradients. numpy arrays run on the CPU, CuPy arrays on cuDNN; other engines run only on request."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Literal, Unpack, overload

from .core._typing import Array, ArrayT, StatsT
from .core.boundary.arguments import check_order
from .core.boundary.conversion import OUTPUTS, gradient_names
from .core.boundary.layouts import check_layout, other_layout
from .core.boundary.options import NO_REQUESTS, special_call, split_requests, takes_options
from .core.layout import default_layout
from .core.options.table import GradientOptions, Options
from .core.options.values import read_flag
from .core.problem.arrays import FORWARD, GRADIENT_ARRAYS
from .core.programs.calls import Call, operation
from .core.programs.passes import parse_backward, parse_forward
from .core.replay.call_key import CallKey
from .core.replay.replay_cache import run_cached


# fmt: off
@overload
def attention(
    q: ArrayT, k: Array, v: Array, *, return_stats: Literal[False] = False, deterministic: bool = False,
    out: Array | None = None, stats: None = None, **options: Unpack[Options],
) -> ArrayT: ...
@overload
def attention(
    q: ArrayT, k: Array, v: Array, *, return_stats: Literal[True], deterministic: bool = False,
    out: Array | None = None, stats: Array | None = None, **options: Unpack[Options],
) -> tuple[ArrayT, Any]: ...
@overload
def attention(
    q: ArrayT, k: Array, v: Array, *, return_stats: Literal[False] = False, deterministic: bool = False,
    out: Array | None = None, stats: StatsT, **options: Unpack[Options],
) -> tuple[ArrayT, StatsT]: ...
@overload
def attention(
    q: ArrayT, k: Array, v: Array, *, return_stats: Literal["max_sumexp"], deterministic: bool = False,
    out: Array | None = None, stats: Array | None = None, **options: Unpack[Options],
) -> tuple[ArrayT, Any, Any, Any]: ...
@overload
def attention(
    q: ArrayT, k: Array, v: Array, *, return_stats: bool | Literal["max_sumexp"], deterministic: bool = False,
    out: Array | None = None, stats: Array | None = None, **options: Unpack[Options],
) -> Any: ...
# fmt: on
@takes_options
def attention(
    q: Any = ...,
    k: Any = ...,
    v: Any = ...,
    *positional: Any,
    return_stats: bool | Literal["max_sumexp"] = False,
    deterministic: bool = False,
    out: Array | None = None,
    stats: Array | None = None,
    **options: Unpack[Options],
) -> Any:
    r"""Compute scaled dot-product attention of arrays ``(head_dim, heads, seq, batch)`` in Fortran order.

    .. math:: O = \operatorname{softmax}(S)\, V, \qquad S_{ij} = \tau\, q_i \cdot k_j, \qquad
              L_i = \log \sum_j e^{S_{ij}}

    numpy arrays are computed on the CPU; CuPy arrays by cuDNN on CuPy's current stream, without synchronization. Nothing of
    size Sq x Skv is stored. :doc:`/options` defines each option; :doc:`/layouts` covers arrays of other libraries.

    Args:
        q, k, v: ``(D, Hq, Sq, B)``, ``(D, Hkv, Skv, B)``, ``(Dv, Hkv, Skv, B)``, or all without B; Hq is a multiple of Hkv.
            float16 or bfloat16; on the CPU also float32 and float64. FP8: :func:`cupy_sdpa.fp8.attention`.
        return_stats: also return L, float32, and float64 for float64 arrays; ``"max_sumexp"``: also the maximum m and the sum
            of :math:`e^{S_{ij} - m_i}`.
        deterministic: return the same bits in every run. Default False.
        out, stats: arrays ``(Dv, Hq, Sq, B)`` and ``(Sq, Hq, B)`` to write the results into. For float64 arrays stats may be
            float32.
        options: every option; :doc:`/options` defines each.

    Returns:
        ``out``, ``(out, stats)`` or ``(out, stats, max, sum_exp)``, in Fortran order. A fully masked row has output 0, and L
        and m are -inf; with a sink, the row attends to the sink.

    Raises:
        TypeError: numpy and CuPy arrays are mixed, or an array has a type or dtype that is not supported.
        ValueError: shapes do not match, cuDNN cannot read the strides of an array, or an option has an invalid value.
        Unsupported, CudnnError: this cuDNN or GPU cannot run it, see :func:`cupy_sdpa.explain`; or cuDNN failed.

    Sources: Vaswani et al. 2017, "Attention Is All You Need", equation 1; Dao 2023, "FlashAttention-2", section 3.1 (L).

    >>> import numpy as np, cupy_sdpa
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (np.asfortranarray(rng.standard_normal((64, 8, 100, 2), np.float32)) for _ in range(3))
    >>> out, stats = cupy_sdpa.attention(q, k, v, causal=True, return_stats=True)
    >>> out.shape, stats.shape
    ((64, 8, 100, 2), (100, 8, 2))
    >>> bool(np.allclose(out[:, :, 0], v[:, :, 0], atol=1e-6))     # the first query attends to the first key only
    True
    """
    if positional or v is ... or default_layout() is not None:
        return special_call(attention, locals())
    deterministic = deterministic is not False and read_flag("deterministic", deterministic)
    tag = ("forward", return_stats if type(return_stats) is bool else repr(return_stats), deterministic)
    arrays = (q, k, v) if out is stats is None else (q, k, v, out, stats)
    results = run_cached(tag, arrays, options)
    if results is None:
        call = _forward_call(arrays, options, return_stats=return_stats, deterministic=deterministic)
        if call.key.tag[0] != "forward":  # FP8 arrays, whose key has their parts
            tag = call.key.tag
            results = run_cached(tag, call.key.arrays, call.key.options)
        results = call.run(tag=tag) if results is None else call.finish(results)
    return tuple(results) if len(results) > 1 else results[0]


@operation(attention, FORWARD, {"return_stats": False, "deterministic": False})
def _forward_call(
    arrays: tuple[Any, ...], options: Mapping[str, Any], *, return_stats: Any = False, deterministic: Any = False
) -> Call:
    """Return a call of :func:`attention` as a value."""
    for x in arrays[:2]:  # q and k
        if (call_of := getattr(type(x), "_call_of", None)) is not None:  # a type of arrays with programs of its own
            call: Call = call_of(arrays, options, return_stats=return_stats)
            return call
    deterministic = deterministic is not False and read_flag("deterministic", deterministic)
    flags = {"return_stats": return_stats, "deterministic": deterministic}
    tag = ("forward", return_stats if type(return_stats) is bool else repr(return_stats), deterministic)
    key = CallKey(tag, FORWARD[: len(arrays)], arrays, options)
    decide = functools.partial(Call.decide_pass, return_stats=return_stats)
    return Call(key, functools.partial(parse_forward, **flags), OUTPUTS, decide)


# fmt: off
@overload
def attention_backward(
    dout: Array | None, q: ArrayT, k: Array, v: Array, out: Array, stats: Array, *, dstats: Array | None = None,
    deterministic: bool = False, dq: Array | None = None, dk: Array | None = None, dv: Array | None = None,
    **options: Unpack[Options],
) -> tuple[ArrayT, ArrayT, ArrayT]: ...
@overload
def attention_backward(
    dout: Array | None, q: Array, k: Array, v: Array, out: Array, stats: Array, *, dstats: Array | None = None,
    deterministic: bool = False, dq: Array | None = None, dk: Array | None = None, dv: Array | None = None,
    **options: Unpack[GradientOptions],
) -> tuple[Any, ...]: ...
# fmt: on
@takes_options(gradients=True)
def attention_backward(
    dout: Any = ...,
    q: Any = ...,
    k: Any = ...,
    v: Any = ...,
    out: Any = ...,
    stats: Any = ...,
    *positional: Any,
    dstats: Array | None = None,
    deterministic: bool = False,
    dq: Array | None = None,
    dk: Array | None = None,
    dv: Array | None = None,
    **options: Unpack[GradientOptions],
) -> tuple[Any, ...]:
    r"""Compute the gradients of :func:`attention` with respect to q, k and v, and on request to arrays among the options.

    .. math:: dV = P^\top dO, \qquad dS = P \circ (dO\, V^\top - \operatorname{rowsum}(dO \circ O) + dL), \qquad
              dQ = \tau\, dS\, K, \qquad dK = \tau\, dS^\top Q

    P is recomputed from q, k and the log-sum-exp, so nothing of size Sq x Skv is stored between the passes. An absolute error
    of the log-sum-exp becomes a relative error of the gradients; in float32 it is 6e-8 times the magnitude of the log-sum-exp.

    Args:
        dout: the gradient of the output, ``(Dv, Hq, Sq, B)``, of q's dtype; or None for 0, if dstats is passed.
        q, k, v: the inputs of :func:`attention`.
        out: its output, ``(Dv, Hq, Sq, B)``.
        stats: its log-sum-exp, from ``return_stats=True``, ``(Sq, Hq, B)``, in Fortran order: float32, or float64 for float64
            inputs, which also accept float32. On the CPU, out and stats of another call raise ValueError. The check is skipped
            with ``score_mod``; with ``block_mask`` it only catches stats that are too small.
        dstats: dL, the gradient of the log-sum-exp, with the shape and dtype of stats and any strides. It is ignored where the
            log-sum-exp is -inf. On the GPU it takes at least two extra head dims of v; :doc:`/derivatives` explains this and
            the precision. Default None: 0.
        deterministic: return the same bits in every run. By default dQ is accumulated in arbitrary order on the GPU (dK and dV
            are always deterministic). True needs a workspace of 2 x Hq x Sq x Skv x B bytes; if that exceeds ``max_workspace``,
            Hopper with cuDNN 9.25.1 or newer uses a slower engine with a small workspace. The choice does not depend on free
            memory; :func:`cupy_sdpa.explain` shows the workspace. Default False.
        return_dbias: also return the gradient of the bias, with its shape and dtype, summed over its broadcast axes and over
            the batch items that share it. On the GPU it is accumulated in 16 bits, even for a float32 bias. Default False.
        return_dsinks: also return the gradient of the sinks, ``(Hq,)`` float32. Default False.
        return_dscale: also return the gradient of a scale for each head, ``(Hq,)``, with its dtype. Default False.
        return_dtensors: also return the gradients of the floating-point arrays in ``tensors``: True for all, or some names. An
            array that is added to the scores, such as a bias, shares the launch; every other array, and every further way of
            indexing one, needs another launch of the same cost. On the GPU each gradient is accumulated in 16 bits, in memory
            of size Sq x Skv, times Hq and B if the array has these axes, and then in float32. Default False.
        dq, dk, dv: arrays to write the gradients into, with the shapes and dtypes of q, k and v.
        options: the options of the forward pass. Gradients of padding are 0.

    Returns:
        ``(dq, dk, dv)``, followed by dbias, dsinks, dscale, and a dict of the gradients of ``tensors``, with their shapes and
        dtypes, if requested. New arrays are in Fortran order. dk and dv are summed over the query heads of a group in float32.

    Raises:
        TypeError, ValueError, Unsupported, CudnnError: as :func:`attention`.

    Source: Dao 2023, "FlashAttention-2", section 2.2 and algorithm 2.

    >>> import numpy as np, cupy_sdpa
    >>> rng = np.random.default_rng(0)
    >>> q, k, v, dout = (np.asfortranarray(rng.standard_normal((16, 2, 10, 1))) for _ in range(4))
    >>> out, stats = cupy_sdpa.attention(q, k, v, return_stats=True)
    >>> dq, dk, dv = cupy_sdpa.attention_backward(dout, q, k, v, out, stats)
    >>> bool(np.allclose((dq * q).sum(), (dk * k).sum()))         # scaling q or k has the same effect on the scores
    True
    """
    if positional or stats is ... or default_layout() is not None:
        made: tuple[Any, ...] = special_call(attention_backward, locals())
        return made
    deterministic = deterministic is not False and read_flag("deterministic", deterministic)
    tag = ("backward", deterministic)
    arrays: tuple[Any, ...] = (dout, q, k, v, out, stats)
    if dstats is not None:
        arrays = (*arrays, dq, dk, dv, dstats)
    elif not dq is dk is dv is None:
        arrays = (*arrays, dq, dk, dv)
    results = run_cached(tag, arrays, options)
    if results is None:
        requests, others = split_requests(options)
        call = _backward_call(arrays, others, deterministic=deterministic, **requests)
        results = call.run(call.key._replace(tag=tag, options=options))
    return tuple(results)


@operation(
    attention_backward,
    GRADIENT_ARRAYS,
    {"deterministic": False, **NO_REQUESTS},
)
def _backward_call(arrays: tuple[Any, ...], options: Mapping[str, Any], *, return_dtensors: Any, **flags: Any) -> Call:
    """Return a call of :func:`attention_backward` as a value."""
    names = GRADIENT_ARRAYS[: len(arrays)]
    check_layout(options.get("layout"))
    check_order(dict(zip(names, arrays, strict=True)), other_layout(options))
    flags = {name: read_flag(name, value) for name, value in flags.items()}
    dtensors = return_dtensors if type(return_dtensors) is bool else repr(return_dtensors)
    key = CallKey(("backward", *flags.values(), dtensors), names, arrays, options)
    flags["return_dtensors"] = return_dtensors
    outputs = {name: value for name, value in flags.items() if name not in ("deterministic", "return_dscale")}
    results = gradient_names(flags)
    decide = functools.partial(Call.decide_pass, outputs=outputs)
    return Call(key, functools.partial(parse_backward, **flags), results, decide)
