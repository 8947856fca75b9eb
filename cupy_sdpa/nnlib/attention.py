"""NNlib.jl's attention: the names, shapes and meanings of Julia's neural network library, on numpy and CuPy arrays.

Arrays are column-major, as Julia has them, with any number of batch dimensions behind: ``q (qk_dim, q_len, batch...)``. Heads
are split off the first axis, the head's index behind the feature's. Numbers of dimensions count from 1, as in Julia.

The fused kernel gives ``y``, so nothing of size ``kv_len x q_len`` is made unless the weights ``alpha`` are used, or ``fdrop``
is given. Where this differs from NNlib.jl: a query that sees no key gives 0 in y and in alpha, not NaN; alpha is lazy. On a GPU
the arrays are float16 or bfloat16, as cuDNN takes them; float32 is computed in such a dtype where ``compute_dtype`` says so.

Source: FluxML/NNlib.jl, src/attention.jl; Vaswani et al. 2017, "Attention Is All You Need", section 3.2.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

import numpy as np

from ..attention import attention, attention_vjp
from ..device import cupy_runtime
from ..problem.tensor_spec import FLOAT_DTYPES, numpy_dtype
from .lazy import Lazy, check_array, made

__all__ = [
    "dot_product_attention",
    "dot_product_attention_scores",
    "dot_product_attention_vjp",
    "join_heads",
    "make_causal_mask",
    "make_padding_mask",
    "split_heads",
]


class Mask(Lazy):
    """A mask that the fused kernel knows by name: causal, of key lengths, or both; an array of bools where it is used as one.

    ``mask & other`` is such a mask again, if the other one is; else an array, broadcast from the first axis on.
    """

    def __init__(self, xp: Any, keys: int, queries: int, *, causal: bool = False, lengths: Any = None) -> None:
        self.causal, self.lengths, self._xp = causal, lengths, xp
        shape = (keys, queries) if lengths is None else (keys, queries, 1, lengths.shape[0])
        super().__init__(shape, self._made)

    def _made(self) -> Any:
        xp, (keys, queries) = self._xp, self.shape[:2]
        index = xp.arange(keys)[:, None]
        seen = index <= xp.arange(queries) if self.causal else xp.ones((keys, queries), bool)
        if self.lengths is not None:
            seen = seen[:, :, None, None] & (index[:, :, None, None] < self.lengths)
        return xp.asfortranarray(seen)

    def __and__(self, other: Any) -> Any:
        if not isinstance(other, Mask):
            check_array("the other mask", other)
            return _four(made(self)) & _four(made(other))
        (keys, queries), (more_keys, more_queries) = self.shape[:2], other.shape[:2]
        lengths = [mask.lengths for mask in (self, other) if mask.lengths is not None]
        pairs = {queries, more_queries}, {array.shape[0] for array in lengths}
        if keys != more_keys or any(len(sizes - {1}) > 1 for sizes in pairs):
            raise ValueError(f"masks of the shapes {self.shape} and {other.shape} do not fit one another")
        shortest = self._xp.minimum(*lengths) if len(lengths) == 2 else lengths[0] if lengths else None
        return Mask(self._xp, keys, max(queries, more_queries), causal=self.causal or other.causal, lengths=shortest)

    __rand__ = __and__
    __iand__ = __and__  # another mask takes the name: this one may be known by others

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **keywords: Any) -> Any:
        if ufunc is np.bitwise_and and method == "__call__" and not keywords:  # array & mask, which numpy is asked first
            one, other = inputs
            return self & (one if other is self else other)
        return super().__array_ufunc__(ufunc, method, *inputs, **keywords)


def make_causal_mask(x: Any, *, dims: int = 2) -> Mask:
    """A square mask that lets every query see the keys up to its own position.

    Args:
        x: an array, for its length and for where it is; its numbers are not used.
        dims: which dimension of x is the sequence, counted from 1, as in Julia. 2 for ``(features, len, batch...)``; for
            :func:`dot_product_attention_scores`, whose arrays are ``(d, heads, len, batch)``, it is 3.

    Returns:
        ``mask[i, j] = i <= j``, key i, query j, both counted from 0; lazy, and known to the fused kernel.

    >>> import numpy as np
    >>> np.asarray(make_causal_mask(np.zeros((8, 3))))
    array([[ True,  True,  True],
           [False,  True,  True],
           [False, False,  True]])
    """
    check_array("x", x)
    if not 1 <= dims <= x.ndim:
        raise ValueError(f"dims is {dims}; x has {x.ndim} dimensions, counted from 1")
    length = x.shape[dims - 1]
    return Mask(_module(x), length, length, causal=True)


def make_padding_mask(lengths: Any, kv_len: int) -> Mask:
    """A mask that hides the keys behind the length of each batch entry; NNlib.jl has no helper for it.

    Args:
        lengths: ``(B,)`` whole numbers.
        kv_len: the number of keys.

    Returns:
        ``(kv_len, 1, 1, B)``, lazy, and known to the fused kernel.

    >>> import numpy as np
    >>> np.asarray(make_padding_mask(np.array([2, 3]), 3))[:, 0, 0]
    array([[ True,  True],
           [ True,  True],
           [False,  True]])
    """
    check_array("lengths", lengths)
    if len(lengths.shape) != 1 or lengths.dtype.kind not in "iu":
        raise ValueError(f"lengths has shape {lengths.shape} and dtype {lengths.dtype}; it must be (B,) whole numbers")
    return Mask(_module(lengths), kv_len, 1, lengths=lengths.clip(0, kv_len).astype(np.int32))


def split_heads(x: Any, nheads: int) -> Any:
    """``(n, len, batch...)`` as ``(n / nheads, nheads, len, batch...)``: the same memory where it is column-major.

    >>> import numpy as np
    >>> split_heads(np.zeros((8, 5, 2), order="F"), 2).shape
    (4, 2, 5, 2)
    """
    check_array("x", x)
    n, *rest = x.shape
    if nheads < 1 or n % nheads:
        raise ValueError(f"the first dimension is {n}; it must be a multiple of nheads, which is {nheads}")
    return x.reshape((n // nheads, nheads, *rest), order="F")


def join_heads(x: Any) -> Any:
    """``(d, nheads, len, batch...)`` as ``(d nheads, len, batch...)``: the opposite of :func:`split_heads`.

    >>> import numpy as np
    >>> join_heads(np.zeros((4, 2, 5, 2), order="F")).shape
    (8, 5, 2)
    """
    check_array("x", x)
    d, nheads, *rest = x.shape
    return x.reshape((d * nheads, *rest), order="F")


def dot_product_attention(
    q: Any,
    k: Any,
    v: Any,
    bias: Any = None,
    *,
    fdrop: Callable[[Any], Any] | None = None,
    mask: Any = None,
    nheads: int = 1,
    alpha: bool = True,
    compute_dtype: Any = None,
) -> tuple[Any, Any]:
    r"""Multi-head attention, NNlib.jl's ``dot_product_attention``.

    .. math:: \alpha = \operatorname{fdrop}(\operatorname{softmax}_j(k_j \cdot q_i / \sqrt{d} + \mathrm{bias}_{ji})), \qquad
              y_i = \sum_j \alpha_{ji} v_j

    Args:
        q: queries ``(qk_dim, q_len, batch...)``; any number of batch dimensions, none too.
        k: keys ``(qk_dim, kv_len, batch...)``.
        v: values ``(v_dim, kv_len, batch...)``.
        bias: added to the scores; broadcasts to ``(kv_len, q_len, nheads, B)`` as in Julia, from the first axis on. B is the
            product of the batch dimensions. Default None.
        fdrop: a function of alpha, such as a dropout. It is given the array, so the whole of it is made. Default None.
        mask: bools, True where the key is seen; broadcasts as the bias does. Those of :func:`make_causal_mask` and
            :func:`make_padding_mask`, and ``&`` of them, become flags of the fused kernel. Default None.
        nheads: number of heads; divides the three first dimensions. Default 1.
        alpha: whether the weights are wanted; they are lazy all the same. Default True.
        compute_dtype: the dtype to compute in, such as ``"bfloat16"``; y has q's dtype again. Default None: that of q.

    Returns:
        ``(y, alpha)``: ``(v_dim, q_len, batch...)`` and ``(kv_len, q_len, nheads, batch...)`` or None. alpha is computed from
        q and k as they are when it is used first.

    Raises:
        ValueError: dimensions that do not fit; with all values.
        TypeError: a dtype that the engine does not take, such as float32 on a GPU without ``compute_dtype``.

    >>> import numpy as np
    >>> x = np.asfortranarray(np.random.default_rng(0).random((8, 5, 2)))
    >>> y, alpha = dot_product_attention(x, x, x, nheads=2, mask=make_causal_mask(x))
    >>> y.shape, alpha.shape
    ((8, 5, 2), (5, 5, 2, 2))
    >>> bool(np.allclose(alpha.sum(axis=0), 1))
    True
    """
    parts, batch = _split(q, k, v, nheads)
    heads_q, heads_k, heads_v = parts
    if fdrop is not None:
        weights = dot_product_attention_scores(heads_q, heads_k, bias, fdrop=fdrop, mask=mask)
        full = (k.shape[1], q.shape[1], nheads, heads_q.shape[3])
        if weights.shape != full:
            raise ValueError(f"fdrop has made {weights.shape} of alpha, which is {full}; it must keep the shape")
        y = _product(weights, heads_v)
        return _joined(y, batch), _unfolded(weights, batch) if alpha else None
    y = attention(*_computed_in(compute_dtype, parts), **_options(parts, bias, mask)).astype(q.dtype, copy=False)
    shape = (k.shape[1], q.shape[1], nheads, *batch)

    def make() -> Any:
        return _unfolded(dot_product_attention_scores(heads_q, heads_k, bias, mask=mask), batch)

    return _joined(y, batch), Lazy(shape, make) if alpha else None


def dot_product_attention_vjp(
    q: Any, k: Any, v: Any, bias: Any = None, *, mask: Any = None, nheads: int = 1, compute_dtype: Any = None
) -> tuple[Any, Callable[[Any], tuple[Any, ...]]]:
    """:func:`dot_product_attention` without alpha, and the function that pulls a gradient of y back.

    Returns:
        ``(y, pullback)``; ``dq, dk, dv, dbias = pullback(dy)``, each of its array's shape and dtype; dbias None without a bias.

    >>> import numpy as np
    >>> x = np.asfortranarray(np.random.default_rng(0).random((8, 5, 2)))
    >>> y, pullback = dot_product_attention_vjp(x, x, x, nheads=2)
    >>> [g.shape for g in pullback(np.ones_like(y))[:3]]
    [(8, 5, 2), (8, 5, 2), (8, 5, 2)]
    """
    parts, batch = _split(q, k, v, nheads)
    options = _options(parts, bias, mask)
    shape = (v.shape[0], *q.shape[1:])
    out, pull = attention_vjp(*_computed_in(compute_dtype, parts), **options, return_dbias=bias is not None)

    def pullback(dy: Any) -> tuple[Any, ...]:
        check_array("dy", dy)
        if dy.shape != shape:
            raise ValueError(f"dy is {dy.shape}; it must be {shape}, as y is")
        dout = _split_one(dy, nheads).astype(out.dtype, copy=False)
        dq, dk, dv, *dbias = pull(dout)
        gradients = [_joined(g.astype(q.dtype, copy=False), batch) for g in (dq, dk, dv)]
        return (*gradients, dbias[0].astype(bias.dtype, copy=False).reshape(bias.shape) if dbias else None)

    return _joined(out.astype(q.dtype, copy=False), batch), pullback


def dot_product_attention_scores(
    q: Any, k: Any, bias: Any = None, *, fdrop: Callable[[Any], Any] | None = None, mask: Any = None
) -> Any:
    r"""The weights of attention, NNlib.jl's ``dot_product_attention_scores``: the whole array, not fused.

    .. math:: \alpha_{ji} = \operatorname{fdrop}(\operatorname{softmax}_j(k_j \cdot q_i / \sqrt{d} + \mathrm{bias}_{ji}))

    Args:
        q: queries ``(d, nheads, q_len, B)``.
        k: keys ``(d, nheads, kv_len, B)``, of q's dtype.
        bias, fdrop, mask: as for :func:`dot_product_attention`. A causal mask for it: ``make_causal_mask(q, dims=3)``.

    Returns:
        ``(kv_len, q_len, nheads, B)`` of q's dtype; 16-bit arrays are computed in float32.

    Raises:
        ValueError, TypeError: shapes or dtypes that do not fit.

    >>> import numpy as np
    >>> x = np.zeros((4, 2, 3, 1), order="F")
    >>> dot_product_attention_scores(x, x)[:, 0, 0, 0].round(3).tolist()
    [0.333, 0.333, 0.333]
    """
    check_array("q", q)
    check_array("k", k)
    if q.ndim != 4 or k.ndim != 4 or q.shape[:2] + q.shape[3:] != k.shape[:2] + k.shape[3:]:
        raise ValueError(f"q is {q.shape} and k is {k.shape}; both are (d, nheads, len, B), and differ in len only")
    if q.dtype != k.dtype:
        raise TypeError(f"q is {q.dtype} and k is {k.dtype}: convert one, so that both have one dtype")
    if str(q.dtype) not in FLOAT_DTYPES:
        raise TypeError(f"q is {q.dtype}; attention takes {', '.join(FLOAT_DTYPES)}: convert with .astype(...)")
    full = (k.shape[2], q.shape[2], *q.shape[1::2])
    for name, array in (("bias", bias), ("mask", mask)):
        if array is not None:
            check_array(name, array)
            _check_broadcast(name, array.shape, full)
    if mask is not None and (mask := made(mask)).dtype != bool:
        raise TypeError(f"mask is {mask.dtype}; it must be bool: convert with .astype(bool)")
    xp, wide = _module(q), _wide(q)
    # S_ji = k_j . q_i / sqrt(d)        (B, nheads, kv_len, q_len), as matmul has it
    scaled = q.astype(wide) / wide.type(math.sqrt(q.shape[0]))
    scores = xp.matmul(k.astype(wide).transpose(3, 1, 2, 0), scaled.transpose(3, 1, 0, 2)).transpose(2, 3, 1, 0)
    if bias is not None:
        scores = scores + _four(made(bias)).astype(wide)
    if mask is not None:
        scores = xp.where(_four(mask), scores, -xp.inf)
    # alpha = exp(S - max) / sum        0 where a query sees no key
    if k.shape[2]:
        top = scores.max(axis=0, keepdims=True)
        scores = xp.exp(scores - xp.where(xp.isfinite(top), top, 0))
        total = scores.sum(axis=0, keepdims=True)
        scores = scores / xp.where(total > 0, total, 1)
    weights = xp.asfortranarray(scores.astype(q.dtype, copy=False))
    return weights if fdrop is None else fdrop(weights)


def _split(q: Any, k: Any, v: Any, nheads: int) -> tuple[list[Any], tuple[int, ...]]:
    """The arrays as (d, nheads, len, B), and their batch dimensions."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_array(name, x)
    if not isinstance(nheads, numbers.Integral):
        raise TypeError(f"nheads is {nheads!r}; it must be a whole number")
    shapes = f"q is {q.shape}, k is {k.shape}, v is {v.shape}"
    if min(q.ndim, k.ndim, v.ndim) < 2:
        raise ValueError(f"{shapes}; they must be (features, len, batch...)")
    batch = q.shape[2:]
    if not batch == k.shape[2:] == v.shape[2:]:
        raise ValueError(f"Batch dimensions have to be the same: {shapes}")
    if q.shape[0] != k.shape[0] or k.shape[1] != v.shape[1]:
        raise ValueError(f"{shapes}; q and k must have the same first dimension, k and v the same length")
    return [_split_one(x, nheads) for x in (q, k, v)], batch


def _split_one(x: Any, nheads: int) -> Any:
    n, length, *batch = x.shape
    return split_heads(x.reshape((n, length, math.prod(batch)), order="F"), nheads)


def _joined(y: Any, batch: tuple[int, ...]) -> Any:
    joined = join_heads(y)
    return joined.reshape((*joined.shape[:2], *batch), order="F")


def _unfolded(alpha: Any, batch: tuple[int, ...]) -> Any:
    return alpha.reshape((*alpha.shape[:3], *batch), order="F")


def _product(alpha: Any, v: Any) -> Any:
    """``y_i = sum_j alpha_ji v_j``, ``(d, nheads, q_len, B)``."""
    xp, wide = _module(v), _wide(v)
    y = xp.matmul(v.astype(wide).transpose(3, 1, 0, 2), alpha.astype(wide).transpose(3, 2, 0, 1)).transpose(2, 1, 3, 0)
    return xp.asfortranarray(y.astype(v.dtype, copy=False))


def _wide(array: Any) -> np.dtype[Any]:
    """The dtype that sums over an array are made in."""
    return np.dtype(array.dtype if array.dtype in (np.float32, np.float64) else np.float32)


def _computed_in(dtype: Any, parts: list[Any]) -> list[Any]:
    q = parts[0]
    if dtype is not None:
        try:
            kind = numpy_dtype(dtype) if isinstance(dtype, str) else np.dtype(dtype)
        except TypeError:
            raise TypeError(f"compute_dtype is {dtype!r}; it must be a dtype of attention, such as 'bfloat16'") from None
        return [x.astype(kind, order="F", copy=False) for x in parts]
    if cupy_runtime.is_array(q) and q.dtype in (np.float32, np.float64):
        raise TypeError(
            f"q is {q.dtype}; on a GPU give compute_dtype='bfloat16' to compute in that, or convert with .astype(...)"
        )
    return parts


def _options(parts: list[Any], bias: Any, mask: Any) -> dict[str, Any]:
    """Bias and mask as options of :func:`cupy_sdpa.attention`."""
    q, k, _ = parts
    check_array("bias", bias, optional=True)
    check_array("mask", mask, optional=True)
    options: dict[str, Any] = {} if bias is None else {"bias": _four(made(bias))}
    if not isinstance(mask, Mask):
        return options if mask is None else {**options, "mask": _four(made(mask))}
    keys, queries = mask.shape[:2]
    if keys != k.shape[2] or queries not in (1, q.shape[2]):
        raise ValueError(
            f"the mask is for {keys} keys and {queries} queries; there are {k.shape[2]} keys and {q.shape[2]} queries"
        )
    if mask.lengths is not None:
        batch = q.shape[3]
        if mask.lengths.shape[0] not in (1, batch):
            raise ValueError(
                f"the mask has {mask.lengths.shape[0]} lengths; there are {batch} batch entries: one for each, or 1"
            )
        # the mask's own array, so that a call that comes again is known by its address; one length is everybody's
        options["seq_lens_kv"] = mask.lengths if mask.lengths.shape[0] == batch else mask.lengths.repeat(batch)
    return {**options, "causal": mask.causal}


def _check_broadcast(name: str, shape: tuple[int, ...], full: tuple[int, ...]) -> None:
    if len(shape) > 4 or any(n not in (1, most) for n, most in zip(shape, full, strict=False)):
        raise ValueError(f"{name} is {shape}; from the first axis on it must broadcast to {full}, (kv_len, q_len, nheads, B)")


def _four(array: Any) -> Any:
    """An array with axes of length 1 behind, up to four: as Julia broadcasts."""
    if array.ndim > 4:
        raise ValueError(
            f"an array of shape {array.shape} was given as bias or mask; it broadcasts to (kv_len, q_len, nheads, B)"
        )
    return array.reshape(array.shape + (1,) * (4 - array.ndim), order="F")


def _module(array: Any) -> Any:
    return cupy_runtime.cupy() if cupy_runtime.is_array(array) else np
