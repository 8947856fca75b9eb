"""The forward pass on FP8 arrays."""

from __future__ import annotations

from typing import Any, Literal, Unpack

from .._typing import Array
from ..arrays.argument import Typed
from ..calls.arguments import read_forward
from ..calls.call import Call
from ..calls.options import Options, read_flag, takes_options
from ..calls.replay_cache import cache_call, run_cached
from ..problem.tensor_spec import FP8_LARGEST
from .array import Fp8Array, factor, made

#: The dtypes of the output.
_OUTPUTS = ("float16", "bfloat16", *FP8_LARGEST)


@takes_options
def attention(
    q: Fp8Array,
    k: Fp8Array,
    v: Fp8Array,
    *,
    return_stats: bool | Literal["max_sumexp"] = False,
    return_amax: bool = False,
    out_dtype: Literal["float16", "bfloat16"] | None = None,
    out_scale: float | Array | None = None,
    stats: Array | None = None,
    **options: Unpack[Options],
) -> Any:
    r"""Attention of FP8 arrays; :func:`cupy_sdpa.attention` calls it for such arrays.

    .. math:: S = \tau\, d_q d_k\, q^\top k, \qquad \hat P = \operatorname{round}(M\, e^{S - m}), \qquad
              O = \frac{d_v}{M}\, \frac{\hat P\, v}{\sum e^{S - m}}, \qquad \hat O = \operatorname{round}(s\, O)

    with the elements q, k, v, their descales d, the maximum m of a row, and the largest number M of the dtype. Sums are
    computed in float32 on the CPU; on Hopper they are less accurate, and the error grows with the number of keys (:doc:`/fp8`).

    Args:
        q: queries ``(D, Hq, Sq, B)``.
        k: keys ``(D, Hkv, Skv, B)``, of q's dtype, rotated if and only if q is.
        v: values ``(Dv, Hkv, Skv, B)``, of q's dtype, not rotated.
        return_stats, stats: as for :func:`cupy_sdpa.attention`; the log-sum-exp is that of the values, not of the elements. Not
            ``"max_sumexp"`` on the GPU.
        return_amax: also return the largest magnitude of the output, float32 ``(1,)``, for the scale of the next one
            (:class:`DelayedScaling`). Rows in the padding do not count. Default False.
        out_dtype: the dtype of the output: None for that of q; ``"float16"`` or ``"bfloat16"`` on the CPU and on compute
            capability 10.x. Default None.
        out_scale: s, the scale of an FP8 output, a number or a float32 array ``(1,)``. Default None: the scale of v. No output
            exceeds the largest value of v, so this scale saturates no output.
        options: causal masks, windows, lengths, ``scale``, ``page_table`` and ``bucket`` on the GPU; on the CPU all options of
            :func:`cupy_sdpa.attention`.

    Returns:
        ``out``, followed by the statistics and the largest magnitude if they are requested. ``out`` is an :class:`Fp8Array`, or
        an array of ``out_dtype``.

    Raises:
        TypeError, ValueError, Unsupported, CudnnError: as :func:`cupy_sdpa.attention`.

    Sources: Micikevicius et al. 2022, "FP8 Formats for Deep Learning", section 4; Shah et al. 2024, "FlashAttention-3",
    section 3.3.

    >>> import numpy as np
    >>> from cupy_sdpa import fp8
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (fp8.quantize(rng.standard_normal((64, 2, 100, 1)), rotate=name != "v") for name in "qkv")
    >>> out, stats = fp8.attention(q, k, v, causal=True, return_stats=True)
    >>> out, stats.shape
    (<Fp8Array float8_e4m3fn (64, 2, 100, 1)>, (100, 2, 1))
    """
    return_amax = read_flag("return_amax", return_amax)
    kind, arrays = _arguments(q, k, v, return_stats, out_dtype, out_scale, stats)
    results = run_cached(kind, tuple(arrays.values()), options)
    if results is None:
        call = _read(q, arrays, options, return_stats, out_dtype)
        results = call.run()
        cache_call(kind, tuple(arrays), tuple(arrays.values()), options, call)
    *results, amax = results
    if out_dtype is None:
        results[0] = made(results[0], v.descale if out_scale is None else None, arrays["scale_out"], q.dtype)
    results += [amax] if return_amax else []
    return tuple(results) if len(results) > 1 else results[0]


def attention_of_fp8(q: Any, k: Any, v: Any, options: Any, *, return_stats: Any, out: Any, stats: Any) -> Any:
    """:func:`attention` with the arguments of :func:`cupy_sdpa.attention`.

    Raises:
        TypeError: ``out`` is passed.
    """
    if out is not None:
        raise TypeError("out is passed, and q is an FP8 array: the result is a new FP8 array with its own scale; omit out")
    return attention(q, k, v, return_stats=return_stats, stats=stats, **options)


def read_call(q: Any, k: Any, v: Any, options: Any, *, return_stats: Any = False, out_dtype: Any = None) -> Call:
    """The call of :func:`attention`, validated but not run."""
    _, arrays = _arguments(q, k, v, return_stats, out_dtype, None, None)
    return _read(q, arrays, options, return_stats, out_dtype)


def _arguments(
    q: Any, k: Any, v: Any, return_stats: Any, out_dtype: Any, out_scale: Any, stats: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The key of a call besides its arrays and options, and its arrays."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if type(x) is not Fp8Array:
            raise TypeError(
                f"{name} is a {type(x).__name__}; q, k and v must all be FP8 arrays: convert with cupy_sdpa.fp8.quantize"
            )
        if x.dtype != q.dtype:
            raise TypeError(f"{name} is {x.dtype} and q is {q.dtype}; the dtypes must be equal: quantize with one dtype")
    if q.rotated != k.rotated:
        raise ValueError(
            f"q.rotated is {q.rotated} and k.rotated is {k.rotated}; scores need both or none: pass the same rotate"
        )
    if v.rotated:
        raise ValueError("v.rotated is True; the rotation of v would remain in the output: quantize v without rotate")
    if out_dtype is not None and out_dtype not in _OUTPUTS[:2]:
        raise TypeError(f"out_dtype is {out_dtype!r}; it must be 'float16' or 'bfloat16', or None for {q.dtype}")
    if out_dtype is not None and out_scale is not None:
        raise ValueError(f"out_scale is for FP8 outputs, and out_dtype is {out_dtype!r}: omit one of them")
    arrays = {
        "q": q.data, "k": k.data, "v": v.data, "descale_q": q.descale, "descale_k": k.descale, "descale_v": v.descale,
        "scale_out": None if out_dtype else v.scale if out_scale is None else factor("out_scale", out_scale, q.data),
        "stats": stats,
    }  # fmt: skip
    return ("fp8", return_stats if type(return_stats) is bool else str(return_stats), q.dtype, out_dtype), arrays


def _read(q: Fp8Array, arrays: dict[str, Any], options: Any, return_stats: Any, out_dtype: str | None) -> Call:
    """The validated call of these arrays."""
    typed = {name: Typed(arrays[name], q.dtype) for name in "qkv"}
    return read_forward(options=options, return_stats=return_stats, out_dtype=out_dtype or "", **{**arrays, **typed})
