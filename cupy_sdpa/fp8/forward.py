"""The forward pass on FP8 arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Literal, Unpack, overload

import numpy as np

from .._typing import Array
from ..arrays.argument import Typed, arrays_on_gpu, read_array
from ..arrays.conversion import OUTPUTS
from ..arrays.layouts import other_layout, results_in, to_own
from ..calls.arguments import read_forward
from ..calls.call import Call
from ..calls.options import Options, read_flag, refuse_arguments, takes_options
from ..calls.replay_cache import cache_call, run_cached
from ..device import cupy_runtime
from ..problem.tensor_spec import FP8_LARGEST, dtype_name, storage_dtype
from ..programs.run import compiled
from ..support import fp8_rules
from .array import Fp8Array, factor, made
from .quantize import SOURCES, quantize

#: The dtypes of the output.
_OUTPUTS = ("float16", "bfloat16", *FP8_LARGEST)


# fmt: off
@overload
def attention(
    q: Fp8Array, k: Fp8Array, v: Fp8Array, *, return_stats: Literal[False] = False, return_amax: Literal[False] = False,
    out_dtype: None = None, out_scale: float | Array | None = None, stats: None = None, **options: Unpack[Options],
) -> Fp8Array: ...
@overload
def attention(
    q: Fp8Array, k: Fp8Array, v: Fp8Array, *, return_stats: bool | Literal["max_sumexp"] = False, return_amax: bool = False,
    out_dtype: Literal["float16", "bfloat16"] | None = None, out_scale: float | Array | None = None,
    stats: Array | None = None, **options: Unpack[Options],
) -> Any: ...
# fmt: on
@takes_options
def attention(
    q: Any = ...,
    k: Any = ...,
    v: Any = ...,
    *positional: Any,
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
        options: causal masks, windows, lengths, ``scale``, ``page_table`` with ``num_splits`` and ``sinks``, ``layout`` and
            ``bucket`` on the GPU; on the CPU all options of :func:`cupy_sdpa.attention`.

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
    >>> x = np.asfortranarray(rng.standard_normal((64, 2, 100, 1)))
    >>> q, k, v = (fp8.quantize(x, rotate=name != "v") for name in "qkv")
    >>> out, stats = fp8.attention(q, k, v, causal=True, return_stats=True)
    >>> out, stats.shape
    (<Fp8Array float8_e4m3fn (64, 2, 100, 1)>, (100, 2, 1))
    """
    if positional or q is ... or k is ... or v is ...:
        refuse_arguments(attention, positional, options)
    return_amax = read_flag("return_amax", return_amax)
    kind, arrays = _arguments(q, k, v, return_stats, out_dtype, out_scale, stats, options)
    results = run_cached(kind, tuple(arrays.values()), options)
    if results is None:
        if not return_amax:
            _drop_amax(arrays)
        results = _run(kind, arrays, options, _read(q, arrays, options, return_stats, out_dtype))
    *results, amax = results
    if layout := other_layout(options):
        results = results_in(layout, OUTPUTS, results, {"stats": stats}, options)
    if out_dtype is None:
        scale = arrays["scale_out"]
        if hasattr(out_scale, "dtype"):  # the caller may change the array
            scale = scale.copy()
        results[0] = made(results[0], v.descale if out_scale is None else None, scale, q.dtype)
    results += [amax] if return_amax else []
    return tuple(results) if len(results) > 1 else results[0]


def attention_of_fp8(q: Any, k: Any, v: Any, options: Any, *, return_stats: Any, out: Any, stats: Any) -> Any:
    """:func:`attention` with the arguments of :func:`cupy_sdpa.attention`; q may also have another dtype than FP8.

    Raises:
        TypeError: ``out`` is passed and q is an FP8 array.
    """
    if type(q) is not Fp8Array:
        return _convert_and_attend(q, k, v, options, return_stats, out, stats)
    if out is not None:
        raise TypeError("out is passed, and q is an FP8 array: the result is a new FP8 array with its own scale; omit out")
    return attention(q, k, v, return_stats=return_stats, stats=stats, **options)


def read_call(q: Any, k: Any, v: Any, options: Any, *, return_stats: Any = False, out_dtype: Any = None) -> Call:
    """The call of :func:`attention`, validated but not run; q may also have another dtype than FP8."""
    if type(q) is not Fp8Array:
        name, q = _dtype_of(q), _unconverted(q, k)
        call = read_call(q, k, v, options, return_stats=return_stats, out_dtype=name) if name in _OUTPUTS else None
        if call and _writes_out(call):
            return call
    _, arrays = _arguments(q, k, v, return_stats, out_dtype, None, None, options)
    return _read(q, arrays, options, return_stats, out_dtype)


def _convert_and_attend(q: Any, k: Any, v: Any, options: Any, return_stats: Any, out: Any, stats: Any) -> Any:
    """Attention of queries that are converted to FP8, with FP8 keys and values. The output has the queries' dtype.

    The engine writes the output in this dtype if it can; otherwise it writes FP8, which is converted.
    """
    name = _dtype_of(q)
    if type(v) is not Fp8Array:
        raise TypeError(f"k is an FP8 array and v is a {type(v).__name__}; both must be FP8 arrays: use cupy_sdpa.fp8.quantize")
    with cupy_runtime.temporary_results():
        lengths, layout = options.get("seq_lens_q"), options.get("layout")
        converted = quantize(q, k.dtype, rotate=k.rotated, lengths=lengths, layout=layout)
    if name in _OUTPUTS:
        kind, arrays = _arguments(converted, k, v, return_stats, name, None, stats, options)
        arrays["out"] = out
        results = run_cached(kind, tuple(arrays.values()), options)
        if results is None:
            _drop_amax(arrays)
        if results is None and _writes_out(call := _read(converted, arrays, options, return_stats, name)):
            results = _run(kind, arrays, options, call)
        if results is not None:
            *results, _ = results
            if own := other_layout(options):
                results = results_in(own, OUTPUTS, results, {"out": out, "stats": stats}, options)
            return tuple(results) if len(results) > 1 else results[0]
    if out is not None:
        _check_out(out, q, v, other_layout(options))
    given = {"return_stats": return_stats, "stats": stats, "options": options}
    result, *others = attention_in_dtype(converted, k, v, name, temporary=out is not None, **given)
    if out is not None:
        out[...] = result
        result = out
    return (result, *others) if others else result


def attention_in_dtype(
    q: Fp8Array, k: Fp8Array, v: Fp8Array, name: str, *, return_stats: Any, stats: Any, options: Any, temporary: bool = False
) -> list[Any]:
    """:func:`attention` whose output is converted to float16, bfloat16 or float32; the output and the requested statistics.

    Args:
        q, k, v, return_stats, stats, options: of the call.
        name: the dtype.
        temporary: whether the output is used within a call only, see :func:`.cupy_runtime.temporary_results`.
    """
    if return_stats is True and stats is None:
        layout = other_layout(options)
        _, heads, queries, *batch = (to_own("q", q.data, layout) if layout else q).shape
        rows = (queries, heads, *batch) if batch else (heads, queries)
        stats = cupy_runtime.new_result(q.data, rows, np.dtype(np.float32))
        stats = stats.T if layout else stats
    with cupy_runtime.temporary_results():
        out = attention(q, k, v, return_stats=return_stats, stats=stats, **options)
    out, *others = out if isinstance(out, tuple) else (out,)
    with cupy_runtime.temporary_results() if temporary else contextlib.nullcontext():
        return [out.dequantize(name), *others]


def _check_out(out: Any, q: Any, v: Fp8Array, layout: str | None) -> None:
    """Check an array for an output that is computed in FP8 and converted.

    Raises:
        TypeError, ValueError: it is not an array on q's engine, of q's dtype and of the shape of the output.
    """
    arrays_on_gpu([read_array(name, array) for name, array in (("q", q), ("out", out))])
    if out.dtype != q.dtype:
        raise TypeError(f"out is {dtype_name(out.dtype)}; it must be {dtype_name(q.dtype)}, the dtype of q")
    if out.shape != (shape := (*q.shape[:-1], v.shape[-1]) if layout else (v.shape[0], *q.shape[1:])):
        raise ValueError(f"out has shape {out.shape}; it must be {shape}")


def _dtype_of(q: Any) -> str:
    """The dtype of queries that are not an FP8 array.

    Raises:
        TypeError: they are not converted to FP8.
    """
    name = dtype_name(q.dtype) if hasattr(q, "dtype") else type(q).__name__
    if name not in SOURCES:
        raise TypeError(f"q is {name} and k is an FP8 array; q must also be one, or {', '.join(SOURCES)}, which are converted")
    return name


def _unconverted(q: Any, k: Fp8Array) -> Fp8Array:
    """An FP8 array without contents in place of queries."""
    dtype = storage_dtype(k.dtype, cupy_runtime.is_array(q))
    with cupy_runtime.device_context(q):
        if k.axis == 0:
            data = cupy_runtime.new_result(q, tuple(q.shape), dtype)
        else:  # in C order
            data = cupy_runtime.new_result(q, tuple(q.shape[::-1]), dtype).T
    return made(data, k.descale, k.scale, k.dtype, rotated=k.rotated, axis=k.axis)


def _writes_out(call: Call) -> bool:
    """Whether the engine writes an output of another dtype than FP8."""
    if not call.on_gpu:
        return True
    capability = cupy_runtime.capability(call.arrays["q"].data.device_id)
    return not any(fp8_rules.out(call.engine_problem, 0, capability))


def _arguments(
    q: Any, k: Any, v: Any, return_stats: Any, out_dtype: Any, out_scale: Any, stats: Any, options: Mapping[str, Any]
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
    if q.rotated:
        _check_axes(q, k, options)
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


def _check_axes(q: Fp8Array, k: Fp8Array, options: Mapping[str, Any]) -> None:
    """Check that the rotated axis is head_dim, which is the last axis of every layout in C order.

    Raises:
        ValueError: it is another axis.
    """
    layout = other_layout(options)
    for name, x in (("q", q), ("k", k)):
        head_dim = x.ndim - 1 if layout else 0
        if x.axis != head_dim:
            raise ValueError(
                f"{name} was rotated along axis {x.axis}, and with layout={layout!r} head_dim is axis {head_dim}: pass "
                "the layout of the arrays to both, cupy_sdpa.fp8.quantize and attention"
            )


def _drop_amax(arrays: dict[str, Any]) -> None:
    """Let the largest magnitude of the output, which is not returned, be memory of the CUDA graph that is being captured."""
    if cupy_runtime.is_array(arrays["q"]) and cupy_runtime.capturing():
        arrays["amax_out"] = cupy_runtime.empty((1,), np.dtype(np.float32))


def _read(q: Fp8Array, arrays: dict[str, Any], options: Any, return_stats: Any, out_dtype: str | None) -> Call:
    """The validated call of these arrays."""
    typed = {name: Typed(arrays[name], q.dtype) for name in "qkv"}
    return read_forward(options=options, return_stats=return_stats, out_dtype=out_dtype or "", **{**arrays, **typed})


def _run(kind: tuple[Any, ...], arrays: dict[str, Any], options: Any, read: Call) -> list[Any]:
    """Run a call and cache it."""
    call = compiled(read)
    results = call.run()
    cache_call(kind, tuple(arrays), tuple(arrays.values()), options, call)
    return results
