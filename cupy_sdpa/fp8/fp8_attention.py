"""Attention of FP8 arrays, and of arrays that are converted to FP8."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Unpack, overload

import numpy as np

from .. import Unsupported
from ..block_masks.block_mask_calls import decide_dense
from ..extend import (
    Array,
    Axes,
    Call,
    CallKey,
    Options,
    ReadCall,
    View,
    composed,
    cupy_runtime,
    dtype_name,
    in_words,
    numpy_dtype,
    operation,
    read_flag,
    read_operands,
    results_of,
    takes_options,
)
from .array import Fp8Array, descales, factor, made
from .fp8_kernels import FACTOR_STEP, is_name
from .fp8_passes import FACTORS, MEAN, OUTPUTS, backward, forward, keep_in_fp8, mean_shape, read_results
from .quantize import SOURCES, check_dtypes, check_source

#: The end of the message of an array that is not an FP8 array.
_ALL = "q, k and v must all be FP8 arrays: convert with cupy_sdpa.fp8.quantize"
#: The names of a call's arrays and results.
_NAMES = ("q", "k", "v", *FACTORS, *MEAN, "out", "stats")
_RESULTS = ("out", "stats", "max", "sum_exp")


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
@takes_options(name="fp8.attention")
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    return_stats: bool | Literal["max_sumexp"] = False,
    return_amax: bool = False,
    out_dtype: Literal["float16", "bfloat16"] | None = None,
    out_scale: float | Array | None = None,
    stats: Array | None = None,
    **options: Unpack[Options],
) -> Any:
    r"""Compute attention of FP8 arrays; :func:`cupy_sdpa.attention` calls it for such arrays.

    .. math:: S = \tau\, d_q d_k\, q^\top k, \qquad \hat P = \operatorname{round}(M\, e^{S - m}), \qquad
              O = \frac{d_v}{M}\, \frac{\hat P\, v}{\sum e^{S - m}}, \qquad \hat O = \operatorname{round}(s\, O)

    with the elements q, k, v, their descales d, the maximum m of a row, and the largest number M of the dtype. Sums are
    computed in float32 on the CPU; on Hopper they are less accurate, and the error grows with the number of keys (:doc:`/fp8`).

    Args:
        q: queries ``(D, Hq, Sq, B)``.
        k: keys ``(D, Hkv, Skv, B)``, with q's dtype, rotated if and only if q is.
        v: values ``(Dv, Hkv, Skv, B)``, with q's dtype, not rotated.
        return_stats, stats: as for :func:`cupy_sdpa.attention`; the log-sum-exp is computed from the values, not from the
            elements. Not ``"max_sumexp"`` on the GPU.
        return_amax: also return the largest magnitude of the output, float32 ``(1,)``, for the scale of the next one
            (:class:`DelayedScaling`). Rows in the padding do not count. Default False.
        out_dtype: the dtype of the output: None for q's dtype; ``"float16"`` or ``"bfloat16"`` on the CPU and on compute
            capability 10.x. Default None.
        out_scale: s, the scale of an FP8 output, a number or a float32 array ``(1,)``. Default None: the scale of v. No output
            exceeds the largest value of v, so this scale never saturates.
        options: causal masks, windows, lengths, ``scale``, ``page_table`` with ``num_splits`` and ``sinks``, ``layout`` and
            ``bucket`` on the GPU; on the CPU all options of :func:`cupy_sdpa.attention`.

    Returns:
        ``out``, followed by the log-sum-exp and the largest magnitude if requested. ``out`` is an :class:`Fp8Array`, or an
        array of ``out_dtype``.

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
    return_amax = read_flag("return_amax", return_amax)
    if type(q) is not Fp8Array:
        raise TypeError(f"q is {in_words(q)}; {_ALL}")
    flags: dict[str, Any] = {
        "return_stats": return_stats,
        "return_amax": return_amax,
        "out_dtype": out_dtype,
        "out_scale": out_scale,
    }
    results = results_of(_fp8_call((q, k, v, None, stats), options, **flags))
    return tuple(results) if len(results) > 1 else results[0]


class _Request(NamedTuple):
    """The arguments of a call, except stats.

    Attributes:
        scale, descale: the scale of the output, and the descale of v.
        converts: whether q has another dtype than FP8, which the output then also has.
    """

    q: Any
    k: Fp8Array
    v: Fp8Array
    options: Mapping[str, Any]
    return_stats: Any
    return_amax: bool
    out_dtype: Any
    out_scale: Any
    scale: Any
    descale: Any
    converts: bool

    def check(self) -> None:
        """Check the arguments that are not arrays."""
        refuse_fp8(self.options)
        if (engine := self.options.get("engine")) is not None:
            raise TypeError(f"engine is {engine!r}, which FP8 arrays do not take: they determine the engine; omit engine")
        _check_fp8_call(self.q, self.k, self.v, self.options, self.out_dtype, self.out_scale)

    def parse(self, key: CallKey) -> ReadCall:
        """Check the arrays and the options."""
        arrays, views, options = read_operands(key.named(), key.options)
        mean = views.get("mean")
        if mean is not None and mean.shape[2] > 1 and mean.strides[2]:
            raise ValueError(
                "the mean of v varies along axis 2, the keys; it must be constant there: pass the layout= of the "
                "arrays, or a mean of length 1 there"
            )
        if self.converts:
            check_source(views["q"], views.get("seq_lens_q"))
        out_dtype, dtype = _dtype_of(self.q) if self.converts else self.out_dtype, self.k.dtype
        of_call: dict[str, Any] = {"options": options, "dtype": dtype, "return_stats": self.return_stats}
        inner = {name: view for name, view in views.items() if name != "out"}
        on_gpu = views["k"].storage.device is not None
        of_results = numpy_dtype(out_dtype or dtype, on_gpu=on_gpu)
        results = read_results(inner, views, of_results, out_dtype=out_dtype if out_dtype in OUTPUTS else None, **of_call)
        amax = {"amax_out": results.pop("amax_out")}
        results |= amax if self.return_amax else {}  # the last one
        writes = None if self.converts else True  # without a conversion the engine must write the output, or raises Unsupported
        of_call |= {"views": views, "rotated": self.k.rotated, "out_dtype": out_dtype, "writes_out": writes}
        return composed(key, arrays, views, results, functools.partial(forward, **of_call))

    def finish(self, results: list[Any]) -> list[Any]:
        """Return the results with an FP8 array as the output, if it has that dtype."""
        amax = [results.pop()] if self.return_amax else []
        if not self.converts and self.out_dtype is None:
            scale = self.scale.copy() if hasattr(self.out_scale, "dtype") else self.scale  # the caller may change the array
            results[0] = made(results[0], self.descale if self.out_scale is None else None, scale, self.k.dtype)
        return results + amax


@operation(
    attention,
    ("q", "k", "v", "out", "stats"),
    {"return_stats": False, "return_amax": False, "out_dtype": None, "out_scale": None},
)
def _fp8_call(
    arrays: tuple[Any, ...],
    options: Mapping[str, Any],
    *,
    return_stats: Any,
    return_amax: bool = False,
    out_dtype: Any = None,
    out_scale: Any = None,
) -> Call:
    """Return a call of :func:`attention` as a value; q may also have another dtype than FP8."""
    q, k, v, out, stats = (*arrays, None, None)[:5]
    converts = type(q) is not Fp8Array
    if out is not None and not converts:
        raise TypeError("out is passed, and q is an FP8 array: the result is a new FP8 array with its own scale; omit out")
    if not type(k) is type(v) is Fp8Array:
        _refuse_others(q, k, v)
    scale = v.scale if out_scale is None else factor("out_scale", out_scale, v.data)
    tag = (
        "fp8", return_stats if type(return_stats) is bool else repr(return_stats), return_amax, out_dtype, k.dtype, k.rotated,
        k.axis, v.dtype, v.rotated, None if converts else (q.dtype, q.rotated, q.axis), out_scale is None, k.mean is None,
        v._of_pages,
    )  # fmt: skip
    elements, factors = (q, [None, *descales((k, v))]) if converts else (q.data, descales((q, k, v)))
    of_mean = (None, None) if v.mean is None else (v.mean, scale if out_scale is None else v.scale)
    arrays = (elements, k.data, v.data, *factors, None if out_dtype else scale, *of_mean, out, stats)
    key = CallKey(tag, _NAMES, arrays, options)
    request = _Request(q, k, v, options, return_stats, return_amax, out_dtype, out_scale, scale, factors[2], converts)
    count = 1 + (stats is not None or bool(return_stats)) + 2 * (return_stats == "max_sumexp")
    return Call(key, request.parse, _RESULTS[:count], decide_dense, request.finish, request.check)


#: The call of :func:`cupy_sdpa.attention` of arrays of this type.
Fp8Array._call_of = staticmethod(_fp8_call)


def forward_in_fp8(q: Any, k: Any, v: Any, dtype: str, options: Mapping[str, Any]) -> list[Any]:
    """Return the forward pass of :func:`cupy_sdpa.attention_vjp` in FP8: q, k and v are converted, q and k after a rotation.

    They are float16 or bfloat16; on the CPU also float32.

    Returns:
        The output, in q's dtype, and its log-sum-exp; and what :func:`gradients_in_fp8` needs: q, k and v in FP8, their
        factors, and the mean of v, except with dropout.
    """
    key = CallKey(("forward in fp8", dtype), ("q", "k", "v"), (q, k, v), options)
    return results_of(Call(key, functools.partial(_parse_forward, dtype=dtype)))


def _parse_forward(key: CallKey, *, dtype: str) -> ReadCall:
    """Check the arguments of :func:`forward_in_fp8`."""
    q = key.array("q")
    allowed = SOURCES[:2] if cupy_runtime.is_array(q) else SOURCES
    if (name := dtype_name(q.dtype) if isinstance(getattr(q, "dtype", ""), np.dtype) else type(q).__name__) not in allowed:
        raise TypeError(
            f"compute_dtype is {dtype!r} and q is {name}; q must be {' or '.join(allowed)}, the dtype of the gradients"
        )
    arrays, views, options = read_operands(key.named(), key.options)
    check_dtypes(views)
    for x, lengths in zip("qkv", ("seq_lens_q", "seq_lens_kv", "seq_lens_kv"), strict=True):
        check_source(views[x], views.get(lengths))
    storage = numpy_dtype(dtype, on_gpu=cupy_runtime.is_array(q))
    shapes, device = {x: views[x].shape for x in "qkv"}, views["q"].storage.device
    elements = {x: View.dense(x, shape, storage, device) for x, shape in shapes.items()}
    one = View.dense("factor", (1,), np.float32, device)
    of_call: dict[str, Any] = {"options": options, "dtype": dtype, "return_stats": True}
    of_kernel = read_results(elements | dict.fromkeys(FACTORS, one), views, q.dtype, out_dtype=None, **of_call)
    results = {x: of_kernel[x] for x in ("out", "stats")}
    results |= {f"kept {x}": View.dense(f"kept {x}", shape, storage, device) for x, shape in shapes.items()}
    results["factors"] = View.dense("factors", (6 * FACTOR_STEP,), np.float32, device)
    if not _has_dropout(options):
        results["kept mean"] = View.dense("kept mean", mean_shape(shapes["v"]), np.float32, device)
    return composed(key, arrays, views, results, functools.partial(keep_in_fp8, views=views, out_dtype=name, **of_call))


#: The arrays of :func:`gradients_in_fp8`.
_OF_GRADIENTS = ("dout", "out", "stats", "dq", "dk", "dv", "dstats", "q", "k", "v", "factors", "mean")


def gradients_in_fp8(
    arrays: tuple[Any, ...], kept: Sequence[Any], dtype: str, options: Mapping[str, Any], **outputs: Any
) -> list[Any]:
    """Return the gradients at the values that :func:`forward_in_fp8` kept.

    ``arrays`` are dout, out, stats, dq, dk, dv and dstats; the last four may be None, and with dstats also dout. ``outputs``
    are ``deterministic`` and others, as for :func:`cupy_sdpa.attention_backward`.
    """
    kept = (*kept, None)[:5]
    outputs.pop("return_dscale", None)  # the forward pass takes no scale for each head
    key = CallKey(("backward in fp8", dtype, *map(repr, outputs.values())), _OF_GRADIENTS, (*arrays, *kept), options)
    return results_of(Call(key, functools.partial(_parse_gradients, dtype=dtype, outputs=outputs)))


def _parse_gradients(key: CallKey, *, dtype: str, outputs: Mapping[str, Any]) -> ReadCall:
    """Check the arguments of :func:`gradients_in_fp8`."""
    if key.array("dout") is key.array("dstats") is None:
        raise TypeError("dout is None; the backward pass needs it: it is the gradient of the output")
    operands = read_operands(key.named(), key.options)
    views = operands.views
    values = {x: View.dense(x, views[x].shape, views["out"].dtype, views[x].storage.device) for x in "qkv"}
    return operands.composed_backward(key, functools.partial(backward, dtype=dtype), views | values, **outputs)


def _refuse_others(q: Any, k: Any, v: Any) -> None:
    """Raise TypeError for arrays that are not FP8 arrays, if k or v is one of them."""
    if type(q) is not Fp8Array and type(k) is Fp8Array:
        _dtype_of(q)
        raise TypeError(f"k is an FP8 array and v is {in_words(v)}; both must be FP8 arrays: use cupy_sdpa.fp8.quantize")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if type(x) is not Fp8Array:
            raise TypeError(f"{name} is {in_words(x)}; {_ALL}")


def _dtype_of(q: Any) -> str:
    """Return the dtype of queries that are converted to FP8; TypeError for others."""
    name = dtype_name(q.dtype) if hasattr(q, "dtype") else type(q).__name__
    if name not in SOURCES:
        raise TypeError(f"q is {name} and k is an FP8 array; q must also be one, or {', '.join(SOURCES)}, which are converted")
    return name


def _check_fp8_call(q: Any, k: Any, v: Any, options: Mapping[str, Any], out_dtype: Any, out_scale: Any) -> str | None:
    """Check the arguments that are not arrays; return the dtype of the output, None for FP8."""
    converts = type(q) is not Fp8Array
    name = _dtype_of(q) if converts else out_dtype
    dtype = k.dtype if converts else q.dtype
    of_dtype = "k" if converts else "q"
    for of, x in (("k", k), ("v", v)):
        if x.dtype != dtype:
            raise TypeError(f"{of} is {x.dtype} and {of_dtype} is {dtype}; the dtypes must be equal: quantize with one dtype")
    if not converts and q.rotated != k.rotated:
        raise ValueError(
            f"q.rotated is {q.rotated} and k.rotated is {k.rotated}; rotate both or neither: pass the same rotate="
        )
    for of, x in (("q", q), ("k", k)):
        if type(x) is Fp8Array and x.mean is not None:
            raise ValueError(f"{of} has a mean, which only v may have: quantize {of} without center")
    if v.mean is not None:
        _check_mean(v, options)
    if v.rotated:
        raise ValueError("v.rotated is True; the rotation of v would remain in the output: quantize v without rotate")
    if k.rotated:
        _check_axes({"k": k} if converts else {"q": q, "k": k}, options)
    if out_dtype is not None and not is_name(out_dtype, OUTPUTS):
        raise TypeError(f"out_dtype is {out_dtype!r}; it must be 'float16' or 'bfloat16', or None for {dtype}")
    if out_dtype is not None and out_scale is not None:
        raise ValueError(f"out_scale is for FP8 outputs, and out_dtype is {out_dtype!r}: omit one of them")
    return name


def _check_mean(v: Fp8Array, options: Mapping[str, Any]) -> None:
    """Check that the mean of v can be added to the output: the weights of a row must add up to 1."""
    if options.get("page_table") is not None and not v._of_pages:
        raise ValueError(
            "v has a mean for each page, and attention needs one for each sequence: quantize pages with center=False, or use a "
            "KVCache"
        )
    if _has_dropout(options):
        raise ValueError(
            "v has a mean, which needs weights that add up to 1; with dropout they do not: quantize v with center=False"
        )


def _has_dropout(options: Mapping[str, Any]) -> bool:
    """True if a call drops weights."""
    return bool(options.get("dropout_p")) or options.get("dropout_mask") is not None


def _check_axes(arrays: Mapping[str, Fp8Array], options: Mapping[str, Any]) -> None:
    """Check that the rotated axis is head_dim, which is the last axis of every layout in C order."""
    layout = Axes(options.get("layout")).layout
    for name, x in arrays.items():
        head_dim = x.ndim - 1 if layout else 0
        if x.axis != head_dim:
            raise ValueError(
                f"{name} was rotated along axis {x.axis}, and with layout={layout!r} head_dim is axis {head_dim}: pass "
                "the layout of the arrays to both, cupy_sdpa.fp8.quantize and attention"
            )


def refuse_fp8(options: Mapping[str, Any]) -> None:
    """Raise an error for ``engine="cupy"`` in an FP8 call."""
    if isinstance(engine := options.get("engine"), str) and engine == "cupy":
        raise Unsupported(
            "engine is 'cupy', which does not compute in FP8: CuPy has no FP8 dtype. Pass the values of FP8 arrays, their "
            "method dequantize('float16'), and no FP8 compute_dtype; or omit engine for cuDNN"
        )
