"""Attention from the papers, in float64 numpy, head by head and with nothing clever: the independent judge of the tests.

It shares no code with the graph, the patterns or the engines, and imports numpy only. Its matrices have a row for each query
and a column for each key, ``(Sq, Skv)``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray


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
    r"""Scaled dot-product attention and its log-sum-exp.

    .. math:: o_i = \sum_j p_{ij}\, v_j, \quad p_{ij} = e^{s_{ij} - m_i} / \ell_i, \quad s_{ij} = \tau\, q_i \cdot k_j, \quad
              m_i = \max_j s_{ij}, \quad \ell_i = \sum_j e^{s_{ij} - m_i}, \quad L_i = m_i + \log \ell_i

    Vaswani et al. 2017, equation 1; FlashAttention-2 (Dao 2023), section 3.1, for :math:`L`. A sink is one more score in
    :math:`m_i` and :math:`\ell_i`, with no value to it (gpt-oss, OpenAI 2025). Dropout (Srivastava et al. 2014) is of the
    weights, after the softmax: :math:`o_i = \sum_j p_{ij}\, \frac{\mathrm{keep}_{ij}}{1 - P} v_j`.

    Args:
        q: ``(D, Hq, Sq, B)``.
        k: ``(D, Hkv, Skv, B)``.
        v: ``(Dv, Hkv, Skv, B)``.
        scale: :math:`\tau`; default 1/sqrt(D).
        sinks: ``(Hq,)``, the score of each head's sink. A query that sees no key attends to its sink alone.
        dropout_p: :math:`P`, from 0 to less than 1.
        dropout_mask: bool ``(Skv, Sq, Hq, B)``, True for the weights that dropout keeps; an axis may have length 1.
        cu_seqlens_q, cu_seqlens_kv: ``(B + 1,)``, for sequences packed one behind the other: arrays are ``(D, H, total)``, and
            sequence b has the positions from ``cu_seqlens[b]`` to before ``cu_seqlens[b + 1]``. Bias, mask and dropout_mask
            keep their four axes; sequence b has what comes first in those of keys and queries.
        max_sumexp: whether to return :math:`m` and :math:`\ell` too.
        options: softcap, alibi_slopes, bias, mask, and which keys a query sees, as for :func:`scores`.

    Returns:
        out ``(Dv, Hq, Sq, B)`` and stats ``(Sq, Hq, B)``, float64; then, where asked for, the max and the sum_exp, as stats. A
        query that sees no key and no sink, or lies beyond its length, gives 0 and -inf; its max is -inf, its sum_exp 0. For
        packed sequences out is ``(Dv, Hq, total)``, and the others ``(Hq, total)``.

    >>> q = np.ones((8, 1, 2, 1)); v = np.arange(2.0).reshape(1, 1, 2, 1)
    >>> out, stats = attention(q, q, v, causal=True)
    >>> out.ravel()
    array([0. , 0.5])

    A sink with the score of the keys takes as much as one of them:

    >>> out, stats, m, sum_exp = attention(q, q, v, scale=0.0, sinks=np.zeros(1), max_sumexp=True)
    >>> bool(np.allclose(out, 1 / 3)), m.ravel(), sum_exp.ravel()
    (True, array([0., 0.]), array([3., 3.]))
    """
    if cu_seqlens_q is not None and cu_seqlens_kv is not None:
        options |= {"scale": scale, "sinks": sinks, "dropout_p": dropout_p, "dropout_mask": dropout_mask}
        return _packed_attention(q, k, v, cu_seqlens_q, cu_seqlens_kv, max_sumexp, options)
    _, query_heads, queries, batch = q.shape
    dv, key_heads, _, _ = v.shape
    out = np.zeros((dv, query_heads, queries, batch))
    stats, maxima, sums = (np.zeros((queries, query_heads, batch)) for _ in range(3))
    for b, h in np.ndindex(batch, query_heads):
        g = h // (query_heads // key_heads)  # the key/value head that this query head belongs to
        s = scores(q, k, h, b, scale=scale, **options)
        p, _, m, sum_exp = _softmax(s, _sink(sinks, h, b, queries, options))
        keep = _kept(dropout_mask, h, b, s.shape) / (1 - dropout_p)
        out[:, h, :, b] = _seen(v[:, g, :, b], s != -np.inf) @ (p * keep).T
        maxima[:, h, b], sums[:, h, b] = m, sum_exp
        with np.errstate(divide="ignore"):  # the logarithm of 0 is meant
            stats[:, h, b] = m + np.log(sum_exp)
    return (out, stats, maxima, sums) if max_sumexp else (out, stats)


def attention_backward(
    dout: NDArray[Any],
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    *,
    scale: float | None = None,
    softcap: float | None = None,
    bias: NDArray[Any] | None = None,
    sinks: NDArray[Any] | None = None,
    dropout_p: float = 0.0,
    dropout_mask: NDArray[Any] | None = None,
    cu_seqlens_q: NDArray[Any] | None = None,
    cu_seqlens_kv: NDArray[Any] | None = None,
    return_dbias: bool = False,
    return_dsinks: bool = False,
    **options: Any,
) -> tuple[NDArray[np.float64], ...]:
    r"""The gradients of :func:`attention` by the chain rule, through the Jacobian of the softmax of each row.

    .. math:: dv_j \mathrel{+}= p_{ij}\, do_i, \quad dp_{ij} = do_i \cdot v_j, \quad
              ds_{ij} = p_{ij} \Bigl(dp_{ij} - \sum_l p_{il}\, dp_{il}\Bigr), \quad
              dq_i = \tau \sum_j ds_{ij} k_j, \quad dk_j \mathrel{+}= \tau\, ds_{ij}\, q_i

    Dao 2023, "FlashAttention-2", section 2.2. It needs neither the output nor the log-sum-exp of the forward pass. With
    dropout, :math:`p_{ij}` in :math:`dv_j` and :math:`dp_{ij}` have a factor :math:`\mathrm{keep}_{ij} / (1 - P)`. A bias has
    the gradient of its score. A sink has no value, so that its own dp is 0. A softcap is between score and product:

    .. math:: \frac{\partial}{\partial x}\, c \tanh \frac{x}{c} = 1 - \tanh^2 \frac{x}{c}, \quad x = \tau\, q_i \cdot k_j

    Args:
        dout: the gradient of the output, ``(Dv, Hq, Sq, B)``.
        q, k, v, scale, softcap, bias, sinks, dropout_p, dropout_mask, cu_seqlens_q, cu_seqlens_kv, options: as for
            :func:`attention`.
        return_dbias, return_dsinks: whether to return the gradients of the bias and of the sinks too.

    Returns:
        dq ``(D, Hq, Sq, B)``, dk ``(D, Hkv, Skv, B)``, dv ``(Dv, Hkv, Skv, B)``, float64; those of k and v are summed over
        the query heads of a group. Then, where asked for, dbias in the shape of the bias, summed over the axes of length 1,
        and dsinks ``(Hq,)``. For packed sequences dq, dk and dv are as q, k and v.

    >>> x = np.ones((8, 1, 2, 1))
    >>> dq, dk, dv = attention_backward(x, x, x, x)
    >>> float(abs(dq).max()), dv.ravel()[0]
    (0.0, np.float64(1.0))
    >>> *_, dsinks = attention_backward(x, x, x, x, scale=0.0, sinks=np.zeros(1), return_dsinks=True)
    >>> dsinks.round(3)  # 2 queries, whose dout . out is 16 / (2 + exp(sink))
    array([-3.556])
    """
    if cu_seqlens_q is not None and cu_seqlens_kv is not None:
        options |= {"scale": scale, "softcap": softcap, "bias": bias, "sinks": sinks, "dropout_p": dropout_p}
        options |= {"dropout_mask": dropout_mask, "return_dbias": return_dbias, "return_dsinks": return_dsinks}
        return _packed_attention_backward(dout, q, k, v, cu_seqlens_q, cu_seqlens_kv, options)
    d, query_heads, queries, batch = q.shape
    _, key_heads, keys, _ = k.shape
    tau = 1 / math.sqrt(d) if scale is None else scale
    dq, dk, dv = (np.zeros(x.shape) for x in (q, k, v))
    dscores = np.zeros((keys, queries, query_heads, batch))
    dsinks = np.zeros(query_heads)
    for b, h in np.ndindex(batch, query_heads):
        g = h // (query_heads // key_heads)
        s = scores(q, k, h, b, scale=scale, softcap=softcap, bias=bias, **options)
        qh, doh = (_seeing(x[:, h, :, b], s != -np.inf) for x in (q, dout))
        kh, vh = (_seen(x[:, g, :, b], s != -np.inf) for x in (k, v))
        p, p_sink, _, _ = _softmax(s, _sink(sinks, h, b, queries, options))
        keep = _kept(dropout_mask, h, b, s.shape) / (1 - dropout_p)
        dv[:, g, :, b] += doh @ (p * keep)
        dp = (doh.T @ vh) * keep
        mean = (p * dp).sum(axis=1)
        ds = p * (dp - mean[:, None])
        dsinks[h] += (p_sink * (0 - mean)).sum()
        dscores[:, :, h, b] = ds.T
        dx = ds if softcap is None else ds * (1 - np.tanh(tau * (qh.T @ kh) / softcap) ** 2)
        dq[:, h, :, b] = tau * (kh @ dx.T)
        dk[:, g, :, b] += tau * (qh @ dx)
    gradients: list[NDArray[np.float64]] = [dq, dk, dv]
    if return_dbias and bias is not None:
        repeated = tuple(axis for axis in range(4) if bias.shape[axis] == 1)
        gradients.append(dscores.sum(axis=repeated, keepdims=True))
    if return_dsinks:
        gradients.append(dsinks)
    return tuple(gradients)


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
    mask: NDArray[Any] | None = None,
    **seen: Any,
) -> NDArray[np.float64]:
    r"""The scores of a head of a batch entry, ``(Sq, Skv)``; -inf where the query does not see the key.

    .. math:: s_{ij} = c \tanh \frac{\tau\, q_i \cdot k_j}{c} - a_h\, |\delta_i - j| + \beta_{jihb}

    Gemma 2 (2024), section 2, for the softcap; Press et al. 2022, "Train Short, Test Long", for the slopes. Queries that see
    no key, and keys that no query sees, are not read.

    Args:
        q, k, scale: as for :func:`attention`.
        h, b: the head of the queries, and the batch entry.
        softcap: :math:`c`.
        alibi_slopes: :math:`a`, ``(Hq,)``; :math:`\delta_i` is the :func:`diagonal`.
        bias: :math:`\beta`, ``(Skv, Sq, Hq, B)``; an axis of length 1 is the same for all. Where it makes a score of -1e6 or
            less it is as False in a mask.
        mask: bool, axes as of the bias; False for a key that the query does not see, whatever else is asked for.
        seen: causal, window, seq_lens_q, seq_lens_kv, as for :func:`visible`.

    >>> x = np.ones((4, 1, 2, 1))
    >>> scores(x, x, 0, 0, alibi_slopes=np.array([0.5]), bias=np.array([10.0, 20.0]).reshape(2, 1, 1, 1))
    array([[12. , 21.5],
           [11.5, 22. ]])
    >>> scores(x, x, 0, 0, scale=100.0, softcap=3.0, causal=True)
    array([[  3., -inf],
           [  3.,   3.]])
    """
    d, query_heads, queries, batch = q.shape
    _, key_heads, keys, _ = k.shape
    everywhere = (keys, queries, query_heads, batch)
    i, j = np.arange(queries)[:, None], np.arange(keys)
    attends = visible(i, b, queries, keys, **seen)
    if mask is not None:
        attends = attends & np.broadcast_to(mask, everywhere)[:, :, h, b].T
    qh = _seeing(q[:, h, :, b], attends)
    kh = _seen(k[:, h // (query_heads // key_heads), :, b], attends)
    tau = 1 / math.sqrt(d) if scale is None else scale
    s = tau * (qh.T @ kh)
    if softcap is not None:
        s = softcap * np.tanh(s / softcap)
    if alibi_slopes is not None:
        own = _own(queries, b, seen.get("seq_lens_q")), _own(keys, b, seen.get("seq_lens_kv"))
        middle = diagonal(i, *own, causal=seen.get("causal", False), window=seen.get("window"))
        s = s - float(alibi_slopes[h]) * np.abs(middle - j)
    if bias is not None:
        s = s + np.broadcast_to(bias, everywhere)[:, :, h, b].T.astype(np.float64)
        attends = attends & (s > -1e6)
    return np.where(attends, s, -np.inf)


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
    """Of every key whether query i of batch entry b sees it, key by key, in the words of the options.

    Args:
        i, b: the query; or a column of queries, for a row of each.
        queries, keys: how many there are in the arrays.
        causal, window, seq_lens_q, seq_lens_kv: as for :func:`cupy_sdpa.attention`.

    >>> visible(1, 0, 3, 5, causal="bottom_right").tolist()
    [True, True, True, True, False]
    >>> visible(2, 0, 3, 5, window=(1, 0), seq_lens_kv=np.array([2])).tolist()
    [False, True, False, False, False]
    """
    left, right, *_ = window or (None, None)
    own_queries, own_keys = _own(queries, b, seq_lens_q), _own(keys, b, seq_lens_kv)
    middle = diagonal(i, own_queries, own_keys, causal=causal, window=window)
    j = np.arange(keys)
    seen: NDArray[np.bool_] = (j < own_keys) & (i < own_queries)
    if causal:
        seen &= j <= middle
    if left is not None:
        seen &= j >= middle - left
    if right is not None:
        seen &= j <= middle + right
    return seen


def diagonal(
    i: int | NDArray[Any], queries: int, keys: int, *, causal: bool | str = False, window: tuple[Any, ...] | None = None
) -> int | NDArray[Any]:
    """The key on query i's diagonal, which may lie before the first key or behind the last.

    Args:
        i: the query, or a column of queries.
        queries, keys: how many the batch entry has.
        causal, window: as for :func:`visible`.

    >>> diagonal(1, 3, 5), diagonal(1, 3, 2, window=(4, 4, "bottom_right"))
    (1, 0)
    """
    _, _, *corner = window or (None, None)
    if causal == "bottom_right" or corner == ["bottom_right"]:
        return i + keys - queries
    return i


def _own(length: int, b: int, lengths: NDArray[Any] | None) -> int:
    """How many queries or keys batch entry b has."""
    return length if lengths is None else int(lengths[b])


def _seeing(q: NDArray[Any], attends: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The queries ``(D, Sq)`` in float64, with 0 for those that see no key, whatever is there."""
    return np.where(attends.any(axis=1), q.astype(np.float64), 0.0)


def _seen(k: NDArray[Any], attends: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The keys or values ``(D, Skv)`` in float64, with 0 for those that no query sees, whatever is there."""
    return np.where(attends.any(axis=0), k.astype(np.float64), 0.0)


def _sink(sinks: NDArray[Any] | None, h: int, b: int, queries: int, options: dict[str, Any]) -> NDArray[np.float64]:
    """The score of each query's sink: -inf without sinks, and beyond the length."""
    if sinks is None:
        return np.full(queries, -np.inf)
    return np.where(np.arange(queries) < _own(queries, b, options.get("seq_lens_q")), float(sinks[h]), -np.inf)


def _kept(dropout_mask: NDArray[Any] | None, h: int, b: int, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """1 for the weights of a head that dropout keeps, else 0."""
    if dropout_mask is None:
        return np.ones(shape)
    _, _, heads, batch = dropout_mask.shape
    return np.broadcast_to(dropout_mask[:, :, h % heads, b % batch].T, shape).astype(np.float64)


def _softmax(s: NDArray[np.float64], sink: NDArray[np.float64]) -> tuple[NDArray[np.float64], ...]:
    """The weights of the keys and of the sink of each row, the maximum, and the sum of the exponentials.

    >>> p, p_sink, m, sum_exp = _softmax(np.array([[0.0, -np.inf], [-np.inf, -np.inf]]), np.array([0.0, -np.inf]))
    >>> p.tolist(), p_sink.tolist(), m.tolist(), sum_exp.tolist()
    ([[0.5, 0.0], [0.0, 0.0]], [0.5, 0.0], [0.0, -inf], [2.0, 0.0])
    """
    m = np.maximum(s.max(axis=1, initial=-np.inf), sink)
    nothing = m == -np.inf  # rows without a score: everything in them is 0
    shift = np.where(nothing, 0.0, m)
    e, e_sink = np.exp(s - shift[:, None]), np.exp(sink - shift)
    sum_exp = e.sum(axis=1) + e_sink
    whole = np.where(nothing, 1.0, sum_exp)
    return e / whole[:, None], e_sink / whole, m, sum_exp


def _sequences(cu_seqlens_q: NDArray[Any], cu_seqlens_kv: NDArray[Any]) -> list[tuple[int, slice, slice]]:
    """Number, queries and keys of each packed sequence.

    >>> _sequences(np.array([0, 2, 5]), np.array([0, 4, 4]))
    [(0, slice(0, 2, None), slice(0, 4, None)), (1, slice(2, 5, None), slice(4, 4, None))]
    """
    cu_q, cu_kv = ([int(at) for at in cu] for cu in (cu_seqlens_q, cu_seqlens_kv))
    return [(b, slice(*cu_q[b : b + 2]), slice(*cu_kv[b : b + 2])) for b in range(len(cu_q) - 1)]


def _of_sequence(x: NDArray[Any], b: int, of_q: slice, of_kv: slice) -> NDArray[Any]:
    """The part ``(Skv|1, Sq|1, H|1, 1)`` of a bias or mask ``(.., .., H|1, B|1)`` that is sequence b's, as a view."""
    b = b % x.shape[3]
    return x[: of_kv.stop - of_kv.start, : of_q.stop - of_q.start, :, b : b + 1]


def _options_of_sequence(options: dict[str, Any], b: int, of_q: slice, of_kv: slice) -> dict[str, Any]:
    """The options for a sequence on its own."""
    matrices = [name for name in ("bias", "mask", "dropout_mask") if options.get(name) is not None]
    return options | {name: _of_sequence(options[name], b, of_q, of_kv) for name in matrices}


def _packed_attention(
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    cu_seqlens_q: NDArray[Any],
    cu_seqlens_kv: NDArray[Any],
    max_sumexp: bool,
    options: dict[str, Any],
) -> tuple[NDArray[np.float64], ...]:
    """:func:`attention` of each sequence on its own."""
    _, heads, total = q.shape
    out, sums = np.zeros((v.shape[0], heads, total)), np.zeros((heads, total))
    stats, maxima = (np.full((heads, total), -np.inf) for _ in range(2))
    for b, of_q, of_kv in _sequences(cu_seqlens_q, cu_seqlens_kv):
        own = _options_of_sequence(options, b, of_q, of_kv)
        arrays = q[:, :, of_q, None], k[:, :, of_kv, None], v[:, :, of_kv, None]
        part, *rows = attention(*arrays, max_sumexp=True, **own)
        out[:, :, of_q] = part[:, :, :, 0]
        stats[:, of_q], maxima[:, of_q], sums[:, of_q] = (row[:, :, 0].T for row in rows)
    return (out, stats, maxima, sums) if max_sumexp else (out, stats)


def _packed_attention_backward(
    dout: NDArray[Any],
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    cu_seqlens_q: NDArray[Any],
    cu_seqlens_kv: NDArray[Any],
    options: dict[str, Any],
) -> tuple[NDArray[np.float64], ...]:
    """:func:`attention_backward` of each sequence on its own; those of the bias and the sinks are summed."""
    dq, dk, dv = (np.zeros(x.shape) for x in (q, k, v))
    gradients: list[NDArray[np.float64]] = [dq, dk, dv]
    bias, dsinks = options["bias"], np.zeros(q.shape[1])
    dbias = None if bias is None or not options["return_dbias"] else np.zeros(bias.shape)
    for b, of_q, of_kv in _sequences(cu_seqlens_q, cu_seqlens_kv):
        own = _options_of_sequence(options, b, of_q, of_kv)
        arrays = dout[:, :, of_q, None], q[:, :, of_q, None], k[:, :, of_kv, None], v[:, :, of_kv, None]
        parts = list(attention_backward(*arrays, **own))
        dq[:, :, of_q], dk[:, :, of_kv], dv[:, :, of_kv] = (part[:, :, :, 0] for part in parts[:3])
        if options["return_dsinks"]:
            dsinks += parts[-1]
        if dbias is not None:
            _of_sequence(dbias, b, of_q, of_kv)[...] += parts[3]
    if dbias is not None:
        gradients.append(dbias)
    if options["return_dsinks"]:
        gradients.append(dsinks)
    return tuple(gradients)
