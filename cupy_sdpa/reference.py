"""Attention from the papers in numpy: the independent reference of the tests and of ``check``.

It shares no code with the graphs and the engines, and imports only numpy and the standard library. Matrices have one row per
query and one column per key, ``(Sq, Skv)``. :func:`attention` and :func:`attention_backward` compute one head at a time, in
float64. They consist of functions of matrices with any axes before the last two, of any dtype, with which ``check`` computes
all heads at once, also with the roundings of a kernel.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "attention", "attention_backward", "diagonal", "directional_derivative", "exponentials", "gradients", "modified", "output",
    "scores", "visible",
]  # fmt: skip


#: A bias masks scores up to this value.
MASKED = -5e8


def _unrounded(x: Any) -> Any:
    return x


def attention(
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    *,
    scale: float | None = None,
    sinks: NDArray[Any] | None = None,
    dropout_p: float = 0.0,
    dropout_mask: NDArray[Any] | None = None,
    cu_seqlens_q: NDArray[Any] | None = None,
    cu_seqlens_kv: NDArray[Any] | None = None,
    max_sumexp: bool = False,
    **options: Any,
) -> tuple[NDArray[np.float64], ...]:
    r"""Compute scaled dot-product attention and its log-sum-exp.

    .. math:: o_i = \sum_j p_{ij}\, v_j, \qquad p_{ij} = e^{s_{ij} - m_i} / \ell_i, \qquad s_{ij} = \tau\, q_i \cdot k_j, \qquad
              m_i = \max_j s_{ij}, \qquad \ell_i = \sum_j e^{s_{ij} - m_i}, \qquad L_i = m_i + \log \ell_i

    Vaswani et al. 2017, equation 1; FlashAttention-2 (Dao 2023), section 3.1, for :math:`L`. A sink is one more score in
    :math:`m_i` and :math:`\ell_i`, without a value (gpt-oss, OpenAI 2025). Dropout (Srivastava et al. 2014) is applied to
    the weights after the softmax: :math:`o_i = \sum_j p_{ij}\, \frac{\mathrm{keep}_{ij}}{1 - P} v_j`.

    Args:
        q: ``(D, Hq, Sq, B)``.
        k: ``(D, Hkv, Skv, B)``.
        v: ``(Dv, Hkv, Skv, B)``.
        scale: :math:`\tau`; default 1/sqrt(D).
        sinks: ``(Hq,)``, the score of each head's sink. A fully masked query attends only to its sink.
        dropout_p: :math:`P`, 0 <= P < 1. Default 0.
        dropout_mask: bool ``(Skv, Sq, Hq, B)``, True for the weights that dropout keeps; an axis may have length 1. Default
            None: all.
        cu_seqlens_q, cu_seqlens_kv: ``(B + 1,)``, for packed sequences: arrays are ``(D, H, total)``, and sequence b is
            ``cu_seqlens[b]:cu_seqlens[b + 1]``. Bias, mask and dropout_mask keep their four axes; each sequence uses their
            first keys and queries.
        max_sumexp: whether to also return :math:`m` and :math:`\ell`. Default False.
        options: softcap, alibi_slopes, bias, bias_repeats, mask, causal, window, seq_lens_q, seq_lens_kv, as for
            :func:`scores`.

    Returns:
        out ``(Dv, Hq, Sq, B)`` and stats ``(Sq, Hq, B)``, float64; with ``max_sumexp`` also max and sum_exp, in the shape of
        stats. The output of a query without key and sink, or beyond the length, is 0; its stats and max are -inf, its
        sum_exp is 0. For packed sequences out is ``(Dv, Hq, total)``, and the others are ``(Hq, total)``.

    Raises:
        ValueError: shapes do not match, Hq is not a multiple of Hkv, ``causal`` is not one of its values, a mask is not bool or
            does not broadcast, packed sequences lack offsets, or ``bias_repeats`` is passed with them.

    >>> q = np.ones((8, 1, 2, 1)); v = np.arange(2.0).reshape(1, 1, 2, 1)
    >>> out, stats = attention(q, q, v, causal=True)
    >>> out.ravel()
    array([0. , 0.5])

    A sink with the same score as the keys has the same weight:

    >>> out, stats, m, sum_exp = attention(q, q, v, scale=0.0, sinks=np.zeros(1), max_sumexp=True)
    >>> bool(np.allclose(out, 1 / 3)), m.ravel(), sum_exp.ravel()
    (True, array([0., 0.]), array([3., 3.]))
    """
    _check(q, k, v, packed=cu_seqlens_q is not None, **options)
    out = np.zeros((len(v), *q.shape[1:]))
    shape = (q.shape[2], q.shape[1], q.shape[3]) if q.ndim == 4 else q.shape[1:]
    rows = stats, maxima, sums = np.full(shape, -np.inf), np.full(shape, -np.inf), np.zeros(shape)
    if cu_seqlens_q is not None or cu_seqlens_kv is not None:
        options |= {"scale": scale, "sinks": sinks, "dropout_p": dropout_p, "dropout_mask": dropout_mask}
        for queries, keys, own in _sequences(cu_seqlens_q, cu_seqlens_kv, options):
            arrays = q[:, :, queries, None], k[:, :, keys, None], v[:, :, keys, None]
            own_out, *own_rows = attention(*arrays, max_sumexp=True, **own)
            out[:, :, queries] = own_out[..., 0]
            for row, own_row in zip(rows, own_rows, strict=True):
                row[:, queries] = own_row[..., 0].T
        return (out, *rows) if max_sumexp else (out, stats)
    for b, h in np.ndindex(q.shape[3], q.shape[1]):
        g = h // (q.shape[1] // k.shape[1])  # the key/value head of this query head
        s = scores(q, k, h, b, scale=scale, **options)
        p, _, m, sum_exp = _softmax(s, _sink(sinks, h, b, q.shape[2], options))
        keep = _keep(dropout_mask, h, b, s.shape) / (1 - dropout_p)
        out[:, h, :, b] = output(p, _attended(v[:, g, :, b], s != -np.inf).T, keep=keep).T
        maxima[:, h, b], sums[:, h, b] = m, sum_exp
        with np.errstate(divide="ignore"):  # log 0 = -inf
            stats[:, h, b] = m + np.log(sum_exp)
    return (out, *rows) if max_sumexp else (out, stats)


def attention_backward(
    dout: NDArray[Any],
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    *,
    scale: float | None = None,
    softcap: float | None = None,
    bias: NDArray[Any] | None = None,
    bias_repeats: int = 1,
    sinks: NDArray[Any] | None = None,
    dropout_p: float = 0.0,
    dropout_mask: NDArray[Any] | None = None,
    cu_seqlens_q: NDArray[Any] | None = None,
    cu_seqlens_kv: NDArray[Any] | None = None,
    dstats: NDArray[Any] | None = None,
    return_dbias: bool = False,
    return_dsinks: bool = False,
    **options: Any,
) -> tuple[NDArray[np.float64], ...]:
    r"""Compute the gradients of :func:`attention`, by the chain rule with the Jacobian of the softmax of each row.

    .. math:: dv_j \mathrel{+}= p_{ij}\, do_i, \qquad dp_{ij} = do_i \cdot v_j, \qquad
              ds_{ij} = p_{ij} \Bigl(dp_{ij} - \sum_l p_{il}\, dp_{il} + dL_i\Bigr), \qquad
              dq_i = \tau \sum_j ds_{ij} k_j, \qquad dk_j \mathrel{+}= \tau\, ds_{ij}\, q_i

    Dao 2023, "FlashAttention-2", section 2.2. The output and the log-sum-exp of the forward pass are not needed. With
    dropout, :math:`p_{ij}` in :math:`dv_j` and :math:`dp_{ij}` have a factor :math:`\mathrm{keep}_{ij} / (1 - P)`. The
    gradient of a bias is its score's gradient. A sink has no value, so its dp is 0. With softcap, :math:`ds` has a factor:

    .. math:: \frac{\partial}{\partial x}\, c \tanh \frac{x}{c} = 1 - \tanh^2 \frac{x}{c}, \quad x = \tau\, q_i \cdot k_j

    Args:
        dout: the gradient of the output, ``(Dv, Hq, Sq, B)``.
        q, k, v, scale, softcap, bias, bias_repeats, sinks, dropout_p, dropout_mask, cu_seqlens_q, cu_seqlens_kv, options: as
            for :func:`attention`.
        dstats: :math:`dL`, the gradient of the log-sum-exp, ``(Sq, Hq, B)``, packed ``(Hq, Tq)``; None is 0.
        return_dbias, return_dsinks: whether to also return the gradients of the bias and of the sinks. Default False.

    Returns:
        dq ``(D, Hq, Sq, B)``, dk ``(D, Hkv, Skv, B)``, dv ``(Dv, Hkv, Skv, B)``, float64; dk and dv are summed over the
        query heads of a group. With ``return_dbias`` dbias, in the shape of the bias, summed over its axes of length 1 and over
        the batch items that share it; with ``return_dsinks`` dsinks ``(Hq,)``. For packed sequences dq, dk and dv have the
        shapes of q, k and v.

    Raises:
        ValueError: as :func:`attention`; ``dout`` does not have the shape of the output; or ``return_dbias`` is True without a
            bias.

    >>> x = np.ones((8, 1, 2, 1))
    >>> dq, dk, dv = attention_backward(x, x, x, x)
    >>> float(abs(dq).max()), dv.ravel()[0]
    (0.0, np.float64(1.0))
    """
    packed = cu_seqlens_q is not None
    _check(q, k, v, dout, bias, packed=packed, needs_bias=return_dbias, bias_repeats=bias_repeats, **options)
    tau = 1 / math.sqrt(len(q)) if scale is None else scale
    dq, dk, dv = (np.zeros(x.shape) for x in (q, k, v))
    dbias: NDArray[np.float64] = np.zeros((1, 1, 1, 1) if bias is None else bias.shape)
    dsinks = np.zeros(q.shape[1])
    results = (dq, dk, dv, *([dbias] if return_dbias else []), *([dsinks] if return_dsinks else []))
    if cu_seqlens_q is not None or cu_seqlens_kv is not None:
        options |= {"scale": scale, "softcap": softcap, "bias": bias, "sinks": sinks, "dropout_p": dropout_p}
        options |= {"dropout_mask": dropout_mask, "return_dbias": bias is not None, "return_dsinks": True, "dbias": dbias}
        for queries, keys, own in _sequences(cu_seqlens_q, cu_seqlens_kv, options):
            own_dbias = own.pop("dbias")
            own["dstats"] = None if dstats is None else dstats[:, queries].T[..., None]
            arrays = [x[:, :, places, None] for x, places in ((dout, queries), (q, queries), (k, keys), (v, keys))]
            found = attention_backward(*arrays, **own)
            for whole, places, part in zip((dq, dk, dv), (queries, keys, keys), found, strict=False):
                whole[:, :, places] = part[..., 0]
            if bias is not None:
                own_dbias += found[3]
            dsinks += found[-1]
        return results
    for b, h in np.ndindex(q.shape[3], q.shape[1]):
        g = h // (q.shape[1] // k.shape[1])
        s = scores(q, k, h, b, scale=scale, softcap=softcap, bias=bias, bias_repeats=bias_repeats, **options)
        qh, doh = (_attending(x[:, h, :, b], s != -np.inf) for x in (q, dout))
        kh, vh = (_attended(x[:, g, :, b], s != -np.inf) for x in (k, v))
        p, p_sink, _, _ = _softmax(s, _sink(sinks, h, b, q.shape[2], options))
        keep = _keep(dropout_mask, h, b, s.shape) / (1 - dropout_p)
        slope = 1.0 if softcap is None else 1 - np.tanh(tau * (qh.T @ kh) / softcap) ** 2
        exists = p.any(axis=1) | (p_sink > 0)  # the log-sum-exp is not -inf
        dl = np.where(exists, 0 if dstats is None else dstats[:, h, b], 0)[:, None]
        own_dq, own_dk, own_dv, ds, delta = gradients(p, doh.T, qh.T, kh.T, vh.T, scale=tau, keep=keep, slope=slope, dstats=dl)
        dq[:, h, :, b] = own_dq.T
        dk[:, g, :, b] += own_dk.T
        dv[:, g, :, b] += own_dv.T
        dsinks[h] -= (p_sink * delta[:, 0]).sum()
        part = dbias[:, :, h % dbias.shape[2], b // bias_repeats % dbias.shape[3]]
        part += ds.T.sum(axis=tuple(axis for axis in (0, 1) if part.shape[axis] == 1), keepdims=True)
    return results


def scores(
    q: NDArray[Any],
    k: NDArray[Any],
    h: int,
    b: int,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: NDArray[Any] | None = None,
    bias: NDArray[Any] | None = None,
    bias_repeats: int = 1,
    mask: NDArray[Any] | None = None,
    **options: Any,
) -> NDArray[np.float64]:
    r"""Return the scores of one head of a batch item, ``(Sq, Skv)``; -inf if the query does not attend to the key.

    .. math:: s_{ij} = c \tanh \frac{\tau\, q_i \cdot k_j}{c} - a_h\, |\delta_i - j| + \beta_{jihb}

    Gemma 2 (2024), section 2, for the softcap; Press et al. 2022, "Train Short, Test Long", for the slopes. Fully masked
    queries, and keys that no query attends to, are not read.

    Args:
        q, k, scale: as for :func:`attention`.
        h, b: the query head and the batch item.
        softcap: :math:`c`. Default None: the scores are not capped.
        alibi_slopes: :math:`a`, ``(Hq,)``; :math:`\delta_i` is the :func:`diagonal`.
        bias: :math:`\beta`, ``(Skv, Sq, Hq, B)``; an axis of length 1 is broadcast. A score of at most -5e8 with the
            bias is masked.
        bias_repeats: how many consecutive batch items share a bias, which is then ``(Skv, Sq, Hq, B / bias_repeats)``.
        mask: bool, with the axes of the bias; False masks a key.
        options: causal, window, seq_lens_q, seq_lens_kv, as for :func:`visible`.

    Returns:
        The scores, float64 ``(Sq, Skv)``.

    Raises:
        ValueError: a bias or a mask does not broadcast to ``(Skv, Sq, Hq, B)``.

    >>> x = np.ones((4, 1, 2, 1))
    >>> scores(x, x, 0, 0, alibi_slopes=np.array([0.5]), bias=np.full((1, 1, 1, 1), 10.0)).tolist()
    [[12.0, 11.5], [11.5, 12.0]]
    """
    d, query_heads, queries, batch = q.shape
    _, key_heads, keys, _ = k.shape
    shape = (keys, queries, query_heads, batch)
    i, j = np.arange(queries)[:, None], np.arange(keys)
    attends = visible(i, b, queries, keys, **options)
    if mask is not None:
        attends = attends & np.broadcast_to(mask, shape)[:, :, h, b].T
    qh = _attending(q[:, h, :, b], attends)
    kh = _attended(k[:, h // (query_heads // key_heads), :, b], attends)
    tau = 1 / math.sqrt(d) if scale is None else scale
    penalty: Any = 0.0
    if alibi_slopes is not None:
        lengths = _length(queries, b, options.get("seq_lens_q")), _length(keys, b, options.get("seq_lens_kv"))
        center = diagonal(i, *lengths, causal=options.get("causal", False), window=options.get("window"))
        penalty = float(alibi_slopes[h]) * np.abs(center - j)
    of_entries = bias if bias is None or bias_repeats == 1 else bias.repeat(bias_repeats, axis=3)
    of_head = 0.0 if of_entries is None else np.broadcast_to(of_entries, shape)[:, :, h, b].T.astype(np.float64)
    s = modified(tau * (qh.T @ kh), softcap=softcap, penalty=penalty, bias=of_head)
    if bias is not None:
        attends = attends & ~(s <= MASKED)  # NaN is not masked
    return np.where(attends, s, -np.inf)


def modified(s: Any, *, softcap: Any = None, penalty: Any = 0.0, bias: Any = 0.0) -> Any:
    r"""Return the scores after the options.

    .. math:: c \tanh \frac{s}{c} - a + \beta

    Args:
        s: the scores, ``(..., Sq, Skv)``.
        softcap: :math:`c`. Default None: the scores are not capped.
        penalty: :math:`a`, the slope times the distance, which broadcasts to s. Default 0.
        bias: :math:`\beta`, which broadcasts to s. Default 0.

    Returns:
        The scores, with the shape of s.

    >>> modified(np.array([[0.0, 4.0]]), penalty=np.array([[0.0, 0.5]]), bias=1.0)
    array([[1. , 4.5]])
    """
    s = s if softcap is None else softcap * np.tanh(s / softcap)
    with np.errstate(over="ignore"):
        return s - penalty + bias


def output(p: Any, v: Any, *, keep: Any = 1.0, rounded: Callable[[Any], Any] = _unrounded) -> Any:
    r"""Return the output, :math:`\sum_j p_{ij}\, \mathrm{keep}_{ij}\, v_j`.

    Args:
        p: the weights, ``(..., Sq, Skv)``.
        v: ``(..., Skv, Dv)``.
        keep: the factors of dropout, 0 or :math:`1 / (1 - P)`, which broadcast to p. Default 1: no dropout.
        rounded: rounds the weights and the output, as a kernel does. Default: no rounding.

    Returns:
        The output, ``(..., Sq, Dv)``.

    >>> output(np.array([[0.25, 0.75]]), np.array([[0.0], [4.0]]))
    array([[3.]])
    """
    return rounded(rounded(p * keep) @ v)


def gradients(
    p: Any,
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: Any,
    keep: Any = 1.0,
    slope: Any = 1.0,
    out: Any = None,
    dstats: Any = 0.0,
    rounded: Callable[[Any], Any] = _unrounded,
) -> tuple[Any, ...]:
    r"""Return the gradients of q, k and v, of the scores, ds, and :math:`\delta = \sum_l p_{il}\, dp_{il} - dL_i`.

    Args:
        p: the weights, ``(..., Sq, Skv)``.
        dout, q: ``(..., Sq, Dv)`` and ``(..., Sq, D)``.
        k, v: ``(..., Skv, D)`` and ``(..., Skv, Dv)``.
        scale: :math:`\tau`.
        keep: the factors of dropout, as for :func:`output`. Default 1: no dropout.
        slope: the derivative of the scores by :math:`\tau\, q_i \cdot k_j`, which broadcasts to p. Default 1.
        out: the output ``(..., Sq, Dv)``, to compute :math:`\delta` as a kernel computes it, from :math:`do_i \cdot o_i`.
            Default None.
        dstats: :math:`dL`, the gradient of the log-sum-exp, ``(..., Sq, 1)``. Default 0.
        rounded: rounds the factors of the products of matrices, as a kernel does. Default: no rounding.

    Returns:
        dq ``(..., Sq, D)``, dk ``(..., Skv, D)``, dv ``(..., Skv, Dv)``, ds ``(..., Sq, Skv)`` and :math:`\delta`
        ``(..., Sq, 1)``.

    >>> one = np.ones((1, 1))
    >>> p, k, v = np.array([[0.5, 0.5]]), np.array([[1.0], [0.0]]), np.array([[0.0], [4.0]])
    >>> dq, dk, dv, ds, delta = gradients(p, one, one, k, v, scale=1.0)
    >>> dq.tolist(), ds.tolist(), delta.tolist()
    ([[-1.0]], [[-1.0, 1.0]], [[2.0]])
    """
    dp = (dout @ v.swapaxes(-1, -2)) * keep
    delta = ((p * dp) if out is None else dout * out).sum(axis=-1, keepdims=True) - dstats
    ds = p * (dp - delta)
    dproduct = rounded(ds * slope)
    dv = rounded(p * keep).swapaxes(-1, -2) @ dout
    return scale * (dproduct @ k), scale * (dproduct.swapaxes(-1, -2) @ q), dv, ds, delta


def directional_derivative(
    p: Any, ds: Any, v: Any, dv: Any, *, keep: Any = 1.0, rounded: Callable[[Any], Any] = _unrounded
) -> tuple[Any, Any]:
    r"""Return the derivative of the output in a direction, and each row's mean score derivative.

    .. math:: \sum_j p_{ij} \Bigl(ds_{ij} - \sum_l p_{il}\, ds_{il}\Bigr) \mathrm{keep}_{ij}\, v_j
              + \sum_j p_{ij}\, \mathrm{keep}_{ij}\, dv_j

    Args:
        p: the weights, ``(..., Sq, Skv)``.
        ds: the derivatives of the scores, ``(..., Sq, Skv)``.
        v, dv: the values and their tangents, ``(..., Skv, Dv)``.
        keep: the factors of dropout, as for :func:`output`. Default 1: no dropout.
        rounded: rounds the factors and the results of the products, as a kernel does. Default: no rounding.

    Returns:
        The derivative ``(..., Sq, Dv)``, and the mean :math:`\sum_l p_{il}\, ds_{il}`, ``(..., Sq, 1)``.

    >>> p, v = np.array([[0.5, 0.5]]), np.array([[0.0], [4.0]])
    >>> directional_derivative(p, np.array([[-1.0, 1.0]]), v, np.zeros_like(v))
    (array([[2.]]), array([[0.]]))
    """
    mean = (p * ds).sum(axis=-1, keepdims=True)
    return rounded(rounded(rounded(p * (ds - mean) * keep) @ v) + output(p, dv, keep=keep, rounded=rounded)), mean


def exponentials(s: NDArray[Any], sink: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    r"""Return the exponentials of the softmax, and the maximum and the sum of each row.

    .. math:: m_i = \max(\max_j s_{ij}, \sigma_i), \qquad e_{ij} = e^{s_{ij} - m_i}, \qquad
              \ell_i = \sum_j e_{ij} + e^{\sigma_i - m_i}

    Args:
        s: the scores, ``(..., Sq, Skv)``; -inf where masked.
        sink: :math:`\sigma`, the score of the sink of each query, ``(..., Sq)``; -inf without a sink.

    Returns:
        e ``(..., Sq, Skv)``; the exponential of the sink, m and :math:`\ell`, each ``(..., Sq)``. In a fully masked row they
        are 0, 0, -inf and 0.

    >>> exponentials(np.array([[0.0, -np.inf]]), np.array([0.0]))
    (array([[1., 0.]]), array([1.]), array([0.]), array([2.]))
    """
    m = np.maximum(s.max(axis=-1, initial=-np.inf), sink)
    shift = np.where(m == -np.inf, 0, m)
    e, e_sink = np.exp(s - shift[..., None]), np.exp(sink - shift)
    return e, e_sink, m, e.sum(axis=-1) + e_sink


def visible(
    i: int | NDArray[Any],
    b: int,
    queries: int,
    keys: int,
    *,
    causal: bool | str = False,
    window: tuple[Any, ...] | None = None,
    seq_lens_q: NDArray[Any] | None = None,
    seq_lens_kv: NDArray[Any] | None = None,
) -> NDArray[np.bool_]:
    """Return whether query i of batch item b attends to each key, ``(Skv,)`` bool, without ``mask`` and ``bias``.

    Args:
        i: the query, or a column of queries; then the result has one row per query.
        b: the batch item.
        queries, keys: the lengths of the arrays, Sq and Skv.
        causal, window, seq_lens_q, seq_lens_kv: as for :func:`cupy_sdpa.attention`.

    Returns:
        bool ``(Skv,)``, or ``(queries of i, Skv)``.

    >>> visible(1, 0, 3, 5, causal="bottom_right").tolist()
    [True, True, True, True, False]
    >>> visible(2, 0, 3, 5, window=(1, 0), seq_lens_kv=np.array([2])).tolist()
    [False, True, False, False, False]
    """
    left, right, *_ = window or (None, None)
    len_q, len_kv = _length(queries, b, seq_lens_q), _length(keys, b, seq_lens_kv)
    center = diagonal(i, len_q, len_kv, causal=causal, window=window)
    j = np.arange(keys)
    attends: NDArray[np.bool_] = (j < len_kv) & (i < len_q)
    if causal:
        attends &= j <= center
    if left is not None:
        attends &= j >= center - left
    if right is not None:
        attends &= j <= center + right
    return attends


def diagonal(
    i: int | NDArray[Any], queries: int, keys: int, *, causal: bool | str = False, window: tuple[Any, ...] | None = None
) -> int | NDArray[Any]:
    """Return the key on the diagonal of query i; it may be before the first key or after the last.

    Args:
        i: the query, or a column of queries.
        queries, keys: the lengths of the batch item.
        causal, window: as for :func:`visible`.

    Returns:
        The key, with the shape of i.

    >>> diagonal(1, 3, 5), diagonal(1, 3, 2, window=(4, 4, "bottom_right"))
    (1, 0)
    """
    _, _, *corner = window or (None, None)
    if causal == "bottom_right" or corner == ["bottom_right"]:
        return i + keys - queries
    return i


def _check(
    q: Any, k: Any, v: Any, dout: Any = None, bias: Any = None, *, packed: bool, needs_bias: bool = False, **options: Any
) -> None:
    """Raise ValueError for what numpy would broadcast, ignore or misread."""
    shapes = f"q {q.shape}, k {k.shape} and v {v.shape} must be (D, Hq, Sq, B), (D, Hkv, Skv, B) and (Dv, Hkv, Skv, B)"
    match = {q.ndim, k.ndim, v.ndim} == {3 if packed else 4} and len(q) == len(k) and k.shape[1:] == v.shape[1:]
    if not match or q.shape[3:] != k.shape[3:] or q.shape[1] % max(k.shape[1], 1):
        raise ValueError(f"{shapes}, Hq a multiple of Hkv; packed arrays need cu_seqlens_q and cu_seqlens_kv")
    if dout is not None and dout.shape != (len(v), *q.shape[1:]):
        raise ValueError(f"dout has shape {dout.shape}; it must be {(len(v), *q.shape[1:])}, (Dv, Hq, Sq, B)")
    if (causal := options.get("causal")) not in (None, False, True, "top_left", "bottom_right"):
        raise ValueError(f"causal is {causal!r}; it must be False, True, 'top_left' or 'bottom_right'")
    if (mask := options.get("mask")) is not None and (mask.dtype != bool or mask.ndim != 4):
        raise ValueError(f"mask is {mask.dtype} {mask.shape}; it must be bool (Skv, Sq, Hq, B)")
    repeats = options.get("bias_repeats", 1)
    for name, array, times in (("mask", mask, 1), ("bias", bias, repeats)):
        if array is None or packed:
            continue
        full = (k.shape[2], q.shape[2], q.shape[1], q.shape[3] // times)
        shape = np.shape(array)
        if len(shape) != 4 or any(length not in (1, whole) for length, whole in zip(shape, full, strict=True)):
            raise ValueError(f"{name} has shape {shape}; it must broadcast to {full}, (Skv, Sq, Hq, B)")
    if packed and repeats != 1:
        raise ValueError(f"bias_repeats is {repeats}; the reference does not take it with packed sequences")
    window = (*options["window"],) if options.get("window") is not None else (None, None)
    if len(window) not in (2, 3) or window[2:] not in ((), ("top_left",), ("bottom_right",)):
        raise ValueError(f"window is {window}; it must be (left, right), or (left, right, 'top_left' or 'bottom_right')")
    if bias is None and needs_bias:
        raise ValueError("return_dbias is True and bias is None: pass bias=")


def _length(length: int, b: int, lengths: NDArray[Any] | None) -> int:
    """Return the number of queries or keys of batch item b."""
    return length if lengths is None else int(lengths[b])


def _attending(q: NDArray[Any], attends: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the queries ``(D, Sq)`` in float64; fully masked queries, which may be NaN, are replaced by 0."""
    return np.where(attends.any(axis=1), q.astype(np.float64), 0.0)


def _attended(k: NDArray[Any], attends: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the keys or values ``(D, Skv)`` in float64, with 0 where no query attends (they may be NaN there)."""
    return np.where(attends.any(axis=0), k.astype(np.float64), 0.0)


def _sink(sinks: NDArray[Any] | None, h: int, b: int, queries: int, options: dict[str, Any]) -> NDArray[np.float64]:
    """Return the sink's score for each query: -inf without sinks and beyond the length."""
    if sinks is None:
        return np.full(queries, -np.inf)
    return np.where(np.arange(queries) < _length(queries, b, options.get("seq_lens_q")), float(sinks[h]), -np.inf)


def _keep(dropout_mask: NDArray[Any] | None, h: int, b: int, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """1 where dropout keeps a weight of the head, else 0."""
    if dropout_mask is None:
        return np.ones(shape)
    return np.broadcast_to(dropout_mask[:, :, h % dropout_mask.shape[2], b % dropout_mask.shape[3]].T, shape).astype(np.float64)


def _softmax(s: NDArray[np.float64], sink: NDArray[np.float64]) -> tuple[NDArray[np.float64], ...]:
    """For each row the weights of the keys, the weight of the sink, the maximum and the sum of exponentials."""
    e, e_sink, m, sum_exp = exponentials(s, sink)
    divisor = np.where(m == -np.inf, 1.0, sum_exp)
    return e / divisor[:, None], e_sink / divisor, m, sum_exp


def _sequences(
    cu_q: NDArray[Any] | None, cu_kv: NDArray[Any] | None, options: dict[str, Any]
) -> Iterator[tuple[slice, slice, dict[str, Any]]]:
    """Yield the places of the queries and of the keys of each packed sequence, and its options, which are views."""
    if cu_q is None or cu_kv is None:
        raise ValueError(f"{'cu_seqlens_q' if cu_q is None else 'cu_seqlens_kv'} is None; packed sequences need both offsets")
    places = ([int(offset) for offset in cu] for cu in (cu_q, cu_kv))
    for b, (queries, keys) in enumerate(zip(*map(itertools.pairwise, places), strict=False)):
        own = dict(options)
        for name, x in options.items():
            if x is not None and name in ("bias", "mask", "dropout_mask", "dbias"):
                entry = b % x.shape[3]
                own[name] = x[: keys[1] - keys[0], : queries[1] - queries[0], :, entry : entry + 1]
            elif x is not None and name in ("seq_lens_q", "seq_lens_kv"):
                own[name] = x[b : b + 1]
        yield slice(*queries), slice(*keys), own


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__
