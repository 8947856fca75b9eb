"""NNlib.jl's ``dot_product_attention`` on the fused kernel, and its gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

from ..attention_functions import attention, attention_backward
from ..extend import Call, CallKey, cupy_runtime, read_flag, run_cached
from ..vjp import attention_vjp
from .masks import Mask
from .nnlib_arrays import check_array, fold, to_four_axes, unfold
from .nnlib_scores import dot_product_attention_scores, weighted_sum


def dot_product_attention(
    q: Any,
    k: Any,
    v: Any,
    bias: Any = None,
    *,
    fdrop: Callable[[Any], Any] | None = None,
    mask: Any = None,
    nheads: int = 1,
    alpha: bool = False,
    compute_dtype: Any = None,
    engine: Literal["numpy", "cudnn", "cupy"] | None = None,
    **unknown: Any,
) -> tuple[Any, Any]:
    r"""Compute multi-head attention: NNlib.jl's ``dot_product_attention``.

    .. math:: \alpha = \operatorname{fdrop}(\operatorname{softmax}_j(k_j \cdot q_i / \sqrt{d} + \mathrm{bias}_{ji})), \qquad
              y_i = \sum_j \alpha_{ji} v_j

    Args:
        q: queries ``(qk_dim, q_len, batch...)``, with any number of batch dimensions, including none.
        k: keys ``(qk_dim, kv_len, batch...)``.
        v: values ``(v_dim, kv_len, batch...)``.
        bias: added to the scores; broadcasts to ``(kv_len, q_len, nheads, B)`` as in Julia, from the first axis on. B is the
            product of the batch dimensions. Default None.
        fdrop: a function of alpha, such as a dropout. It takes and returns the whole array, so the fused kernel is not used.
            Default None.
        mask: bool, True where the query attends to the key; broadcasts like the bias. The fused kernel applies masks of
            :func:`make_causal_mask` and :func:`make_padding_mask`, and ``&`` of them, without an array. Default None.
        nheads: number of heads; divides the first dimension of q, k and v. Default 1.
        alpha: return the attention weights. They are computed separately, without the fused kernel; on an H200 that takes
            3.4 ms in addition to 0.09 ms for y (float16, 16 heads, head dim 64, 2048 queries and keys). Default False.
        compute_dtype: ``"bfloat16"`` or ``"float16"``, in which float32 and float64 arrays are computed; y has q's dtype.
            Default None: q's dtype.
        engine: as for :func:`cupy_sdpa.attention`; ``"cupy"`` computes y in any dtype, without cuDNN. alpha needs no cuDNN.
            Default None: cuDNN for CuPy arrays.

    Returns:
        ``(y, alpha)``: ``(v_dim, q_len, batch...)``, and ``(kv_len, q_len, nheads, batch...)`` or None.

    Raises:
        ValueError: dimensions do not match.
        TypeError: an argument has another type, or a dtype is not supported, such as float32 on a GPU without
            ``compute_dtype`` or ``engine``.

    >>> import numpy as np
    >>> x = np.asfortranarray(np.random.default_rng(0).random((8, 5, 2)))
    >>> y, alpha = dot_product_attention(x, x, x, nheads=2, alpha=True)
    >>> y.shape, alpha.shape
    ((8, 5, 2), (5, 5, 2, 2))
    >>> bool(np.allclose(alpha.sum(axis=0), 1))
    True
    """
    if unknown:
        _refuse_option(unknown)
    arrays, alpha = {"q": q, "k": k, "v": v}, read_flag("alpha", alpha)
    if fdrop is None:
        y = _run(attention, arrays, bias, mask, nheads, compute_dtype, engine)
        if not alpha:
            return y, None
    elif not callable(fdrop):
        raise TypeError(f"fdrop is {fdrop!r}; it must be a function of the weights")
    batch = _batch_of(q, k, v)
    q4, k4, v4 = (fold(x, nheads) for x in (q, k, v))
    weights = dot_product_attention_scores(q4, k4, bias, fdrop=fdrop, mask=mask)
    if fdrop is not None:
        full = (k.shape[1], q.shape[1], nheads, q4.shape[3])
        check_array("the result of fdrop", weights)
        if weights.shape != full:
            raise ValueError(f"fdrop returned shape {weights.shape} for alpha of shape {full}; it must keep the shape")
        y = unfold(weighted_sum(weights, v4), batch)
    return y, weights.reshape((*weights.shape[:3], *batch), order="F") if alpha else None


def dot_product_attention_vjp(
    q: Any,
    k: Any,
    v: Any,
    bias: Any = None,
    *,
    mask: Any = None,
    nheads: int = 1,
    compute_dtype: Any = None,
    engine: Literal["numpy", "cudnn", "cupy"] | None = None,
    **unknown: Any,
) -> tuple[Any, Callable[[Any], tuple[Any, ...]]]:
    """Compute :func:`dot_product_attention` without alpha, and return it with a function that computes the gradients.

    Args:
        q, k, v, bias, mask, nheads, compute_dtype, engine: as for :func:`dot_product_attention`.

    Returns:
        ``(y, pullback)``; ``dq, dk, dv, dbias = pullback(dy)``, each with the shape and dtype of its array; dbias is None
        without a bias.

    Raises:
        ValueError, TypeError: as :func:`dot_product_attention`.

    >>> import numpy as np
    >>> x = np.asfortranarray(np.random.default_rng(0).random((8, 5, 2)))
    >>> y, pullback = dot_product_attention_vjp(x, x, x, nheads=2)
    >>> [g.shape for g in pullback(np.ones_like(y))[:3]]
    [(8, 5, 2), (8, 5, 2), (8, 5, 2)]
    """
    if unknown:
        _refuse_option(unknown)
    arrays = {"q": q, "k": k, "v": v}
    if compute_dtype is not None:
        return _vjp_in(compute_dtype, arrays, bias, mask, nheads, engine)
    y, stats = _run(attention, arrays, bias, mask, nheads, None, engine, return_stats=True)

    def pullback(dy: Any) -> tuple[Any, ...]:
        passed = {"dout": dy, **arrays, "out": y, "stats": stats}
        if bias is None:
            return (*_run(attention_backward, passed, None, mask, nheads, None, engine), None)
        gradients: tuple[Any, ...] = _run(attention_backward, passed, bias, mask, nheads, None, engine, return_dbias=True)
        return gradients

    return y, pullback


def _run(
    function: Callable[..., Any],
    arrays: dict[str, Any],
    bias: Any,
    mask: Any,
    nheads: int,
    dtype: Any,
    engine: Any,
    **flags: bool,
) -> Any:
    """Return a function of :mod:`cupy_sdpa.attention` of arrays of NNlib.jl, as which its results are returned."""
    tag: tuple[Any, ...] = ("nnlib", function.__name__, repr(nheads), *flags)
    given = {"bias": bias, "mask": mask, "compute_dtype": dtype, "engine": engine}
    if isinstance(mask, Mask):  # the array of the lengths itself, because repeated calls are recognized by its address
        tag += (mask.shape, mask.causal)
        given |= {"mask": None, "seq_lens_kv": mask.lengths}
    key = CallKey(tag, (*arrays,), (*arrays.values(),), given)
    results = run_cached(tag, key.arrays, given)
    if results is None:
        results = _run_first(function, key, nheads, mask, flags)
    return results[0] if len(results) == 1 else tuple(results)


def _run_first(function: Callable[..., Any], key: CallKey, nheads: int, mask: Any, flags: Mapping[str, bool]) -> list[Any]:
    """Run a call that is not cached by calling ``function`` on views or copies of the arrays, and return the results."""
    arrays, given = key.named(), key.options
    batch, bias, backward = _batch_of(*(arrays[name] for name in "qkv")), given["bias"], "dout" in arrays
    if backward:
        _check_gradient(arrays["dout"], arrays["out"])
    views = {name: x if name == "stats" else fold(x, nheads) for name, x in arrays.items()}
    if backward:
        views["dout"] = views["dout"].astype(views["out"].dtype, copy=False)
    options = _mask_options(views["q"], views["k"], bias, mask)
    options |= _compute_options(given["compute_dtype"], given["engine"])
    back = functools.partial(_in_axes_of_caller, batch=batch, bias=bias, vectors=3 if backward else 1)
    return Call.of(function, **views, **options, **flags).run(key, back=back)


def _in_axes_of_caller(results: list[Any], *, batch: tuple[int, ...], bias: Any, vectors: int) -> list[Any]:
    """Results with the caller's axes: first the ``vectors``, then the log-sum-exp, or the gradient of the bias."""
    others = [x.reshape(bias.shape) if vectors == 3 else x for x in results[vectors:]]
    return [*(unfold(x, batch) for x in results[:vectors]), *others]


def _vjp_in(
    dtype: Any, arrays: dict[str, Any], bias: Any, mask: Any, nheads: int, engine: Any
) -> tuple[Any, Callable[[Any], tuple[Any, ...]]]:
    """:func:`dot_product_attention_vjp` in another dtype, whose pullback keeps the converted arrays."""
    batch = _batch_of(*arrays.values())
    q, k, v = (fold(x, nheads) for x in arrays.values())
    options = _mask_options(q, k, bias, mask) | _compute_options(dtype, engine)
    out, vjp = attention_vjp(q, k, v, **options, return_dbias=bias is not None)
    y = unfold(out, batch)

    def pullback(dy: Any) -> tuple[Any, ...]:
        _check_gradient(dy, y)
        dq, dk, dv, *dbias = vjp(fold(dy, nheads).astype(out.dtype, copy=False))
        return (*(unfold(g, batch) for g in (dq, dk, dv)), dbias[0].reshape(bias.shape) if dbias else None)

    return y, pullback


def _refuse_option(unknown: dict[str, Any]) -> None:
    """Raise TypeError for an option that NNlib.jl's function does not have."""
    for name in unknown:
        fix = "cupy_sdpa.attention, which has more options, takes arrays (head_dim, heads, seq, batch)"
        if name in ("causal", "is_causal"):
            fix = "pass mask=make_causal_mask(q)"
        raise TypeError(
            f"there is no option {name}; the options are bias, mask, nheads, fdrop, alpha, compute_dtype and engine: {fix}"
        )


def _batch_of(q: Any, k: Any, v: Any) -> tuple[int, ...]:
    """Return the batch dimensions of q, k and v, which are checked."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_array(name, x)
    batch = q.shape[2:]
    rule = ""
    if min(q.ndim, k.ndim, v.ndim) < 2:
        rule = "they must be (features, len, batch...)"
    elif not batch == k.shape[2:] == v.shape[2:]:
        rule = "the batch dimensions must be the same"
    elif q.shape[0] != k.shape[0] or k.shape[1] != v.shape[1]:
        rule = "q and k must have the same first dimension, k and v the same length"
    if rule:
        raise ValueError(f"q is {q.shape}, k is {k.shape}, v is {v.shape}; {rule}")
    return batch  # type: ignore[no-any-return]


def _check_gradient(dy: Any, y: Any) -> None:
    """Raise an error if ``dy`` is no gradient of ``y``."""
    check_array("dy", dy)
    if dy.shape != y.shape:
        raise ValueError(f"dy is {dy.shape}; it must be {y.shape}, the shape of y")


def _compute_options(dtype: Any, engine: Any) -> dict[str, Any]:
    """Return the layout, the dtype to compute in, and the engine, as options; none if it is q's dtype, and the engine of q."""
    given = {"compute_dtype": dtype, "engine": engine}
    return {"layout": "dhsb", **{name: value for name, value in given.items() if value is not None}}


def _mask_options(q: Any, k: Any, bias: Any, mask: Any) -> dict[str, Any]:
    """Bias and mask as options of :func:`cupy_sdpa.attention`."""
    options: dict[str, Any] = {}
    if bias is not None:
        check_array("bias", bias)
        strided = cupy_runtime.is_array(bias) and not bias.flags.f_contiguous  # cuDNN ignores the strides of a bias
        options["bias"] = to_four_axes(bias.copy(order="F") if strided else bias)
    if isinstance(mask, Mask):
        return options | _flags(mask, keys=k.shape[2], queries=q.shape[2], batch=q.shape[3])
    if mask is not None:
        check_array("mask", mask)
        options["mask"] = to_four_axes(mask)
    return options


def _flags(mask: Mask, *, keys: int, queries: int, batch: int) -> dict[str, Any]:
    """Return a mask as options that do not need a Boolean array."""
    if mask.shape[0] != keys or mask.shape[1] not in (1, queries):
        raise ValueError(
            f"the mask has {mask.shape[0]} keys and {mask.shape[1]} queries; there are {keys} keys and {queries} queries"
        )
    if mask.lengths is None:
        return {"causal": mask.causal}
    count = mask.lengths.shape[0]
    if count not in (1, batch):
        raise ValueError(f"the mask has {count} lengths; there are {batch} batch items: pass one length for each, or one")
    return {"causal": mask.causal, "seq_lens_kv": mask.lengths if count == batch else mask.lengths.repeat(batch)}
